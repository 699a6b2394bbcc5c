"""What a rank is among data-parallel copies, and what a draft is built with. No model is built, no process started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.support.vllm_models import eagle_draft, small_mixtral
from tests.support.vllm_nodes import smollm2

from warmseed.daemon.engines.vllm.adapter import VllmEngine
from warmseed.daemon.engines.vllm.arguments import engine_config, parse_engine_arguments
from warmseed.daemon.engines.vllm.draft import config_of
from warmseed.daemon.placement import groups_of, layout_of, places_of
from warmseed.daemon.protocol.spec import RankSpec, rank_spec
from warmseed.daemon.settings.config import PreloadConfig
from warmseed.daemon.weights.checkpoint import digest_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """An engine's adapter says in the environment of its process where the caches are; here that is undone."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def engines(model: Path, cache_root: Path, **settings: object) -> list[VllmEngine]:
    """The engine of each rank of this node."""
    given = {"engine": "vllm", "model": str(model), "cache_root": str(cache_root), "dtype": "bfloat16", **settings}
    config = msgspec.convert(given, PreloadConfig)
    layout = layout_of(config)
    group = groups_of(config, layout)[0]
    specs: list[RankSpec] = [rank_spec(config, layout, group, place, port=1) for place in places_of(layout)]
    return [VllmEngine(spec) for spec in specs]


def test_copies_of_a_dense_model_are_each_what_a_single_engine_is(tmp_path: Path) -> None:
    model = smollm2()
    (alone,) = engines(model, tmp_path)
    checkpoint = digest_checkpoint(model, mode="metadata")
    first, second = engines(model, tmp_path, data_parallel_size=2)
    assert first.identity() == second.identity()
    for copy in (first, second):
        assert copy.copies_run_apart()
        assert copy.identity().factors["ParallelConfig.data_parallel_size"] == "1"
        assert copy.fingerprint(checkpoint).differences(alone.fingerprint(checkpoint)) == ()


def test_copies_of_a_mixture_of_experts_are_one_world(tmp_path: Path) -> None:
    model = small_mixtral(tmp_path / "model")
    first, second = engines(model, tmp_path, data_parallel_size=2)
    assert not first.copies_run_apart()
    checkpoint = digest_checkpoint(model, mode="metadata")
    assert second.fingerprint(checkpoint).mismatched_fields(first.fingerprint(checkpoint)) == ("dp_rank",)


@pytest.mark.parametrize(("draft", "built_with"), [({}, None), ({"attention_backend": "CPU_ATTN"}, "CPU_ATTN")])
def test_a_draft_is_built_with_its_own_backend_and_not_its_targets(
    tmp_path: Path, draft: dict[str, str], built_with: str | None
) -> None:
    speculation = {"method": "eagle", "model": str(eagle_draft(tmp_path / "draft")), "num_speculative_tokens": 2}
    flags = ["--model", str(smollm2()), "--dtype", "bfloat16", "--max-model-len", "512"]
    flags += ["--attention-backend", "CPU_ATTN", "--speculative-config"]
    config = engine_config(parse_engine_arguments([*flags, msgspec.json.encode({**speculation, **draft}).decode()]))
    assert config_of(config, "target") is config
    backend = config_of(config, "draft").attention_config.backend
    assert getattr(backend, "name", backend) == built_with
    assert config.attention_config.backend.name == "CPU_ATTN"
