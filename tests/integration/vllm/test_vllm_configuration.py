"""vLLM's configuration as the daemon reads it: identity, fingerprint, refusals. No model is built."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.support.vllm_nodes import smollm2

from warmseed.daemon.engines.vllm.arguments import check_config, engine_config, parse_engine_arguments
from warmseed.daemon.engines.vllm.fingerprint import RankPlace, rank_fingerprint
from warmseed.daemon.engines.vllm.identity import snapshot
from warmseed.daemon.engines.vllm.releases import installed_release
from warmseed.daemon.weights.checkpoint import stat_checkpoint
from warmseed.daemon.weights.fingerprint import Fingerprint
from warmseed.errors import ConfigurationError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    # vLLM's and its libraries' own, while they are imported; none is ours to fix.
    pytest.mark.filterwarnings("ignore"),
]

BASE = ("--dtype", "bfloat16", "--max-model-len", "512")


@pytest.fixture(scope="module")
def model() -> Path:
    return smollm2()


def fingerprint(model: Path, *flags: str, place: RankPlace | None = None) -> Fingerprint:
    config = engine_config(parse_engine_arguments(["--model", str(model), *flags]))
    return rank_fingerprint(config, installed_release(), place or RankPlace(), stat_checkpoint(model))


def test_the_hash_is_that_of_the_same_flags_and_no_other(model: Path) -> None:
    def identity(*flags: str) -> tuple[str, str]:
        found = snapshot(engine_config(parse_engine_arguments(["--model", str(model), *flags])))
        return found.config_hash, found.config_digest

    first = identity(*BASE)
    assert identity(*BASE) == first
    assert identity("--dtype", "bfloat16", "--max-model-len", "256") != first
    assert identity(*BASE, "--max-num-batched-tokens", "1024") != first


def test_a_new_nodes_daemon_starts_no_second_vllm_to_look_at_the_model(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That process imports everything again: half of the time until a daemon knows its configuration."""
    from vllm.model_executor.models import registry

    def second(inspect: object) -> None:
        raise AssertionError("another process was started")

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(registry, "_run_in_subprocess", second)
    registry._try_inspect_model_cls.cache_clear()
    engine_config(parse_engine_arguments(["--model", str(model), *BASE]))
    assert registry._run_in_subprocess is second, "vLLM's own way is back"
    assert list((tmp_path / "modelinfos").iterdir()), "this node's engines do not find the answer"


def test_the_factors_name_what_differs(model: Path) -> None:
    def factors(*flags: str) -> dict[str, str]:
        return dict(snapshot(engine_config(parse_engine_arguments(["--model", str(model), *flags]))).factors)

    short, long = factors(*BASE), factors("--dtype", "bfloat16", "--max-model-len", "256")
    differing = {name for name in short if short[name] != long.get(name)}
    assert "ModelConfig.max_model_len" in differing
    assert not any(name.startswith(("ParallelConfig", "CacheConfig")) for name in differing)


def test_how_the_weights_are_loaded_does_not_change_the_hash(model: Path) -> None:
    """The daemon loads from disk and the engine from the daemon; their caches must be the same ones."""
    daemon = snapshot(engine_config(parse_engine_arguments(["--model", str(model), *BASE])))
    arguments = parse_engine_arguments(["--model", str(model), *BASE, "--load-format", "ipc_cache"])
    from warmseed.daemon.engines.vllm.arguments import usage_context

    engine = snapshot(arguments.create_engine_config(usage_context=usage_context("serve")))
    assert engine == daemon


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (("--dtype", "float32", "--max-model-len", "512"), "dtype"),
        ((*BASE, "--tensor-parallel-size", "3"), "tp_size"),
        ((*BASE, "--hf-overrides", '{"rope_theta": 5000.0}'), "rope"),
        ((*BASE, "--revision", "other"), "revision"),
    ],
)
def test_what_shapes_the_weights_is_in_the_fingerprint(model: Path, flags: tuple[str, ...], field: str) -> None:
    plain = fingerprint(model, *BASE)
    assert plain.mismatched_fields(fingerprint(model, *BASE)) == ()
    assert field in plain.mismatched_fields(fingerprint(model, *flags))


def test_ranks_have_different_fingerprints(model: Path) -> None:
    assert fingerprint(model, *BASE).mismatched_fields(fingerprint(model, *BASE, place=RankPlace(tp_rank=1))) == (
        "tp_rank",
    )


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--load-format", "ipc_cache"), "the daemon itself loads from disk"),
        (("--modell", "x"), "unrecognized arguments: --modell"),
        (("--dtype", "float7"), "invalid choice"),
    ],
)
def test_flags_that_cannot_work_are_refused_with_vllms_reason(model: Path, flags: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        engine_config(parse_engine_arguments(["--model", str(model), *flags]))


@pytest.mark.parametrize(
    ("model_config", "parallel_config", "offload", "named"),
    [
        ({"enable_sleep_mode": True}, {}, 0, "--enable-sleep-mode"),
        ({}, {"enable_eplb": True}, 0, "--enable-eplb"),
        ({}, {}, 4, "--cpu-offload-gb"),
    ],
)
def test_sleep_mode_eplb_and_offloading_are_refused_in_daemon_and_engine(
    model_config: dict[str, bool], parallel_config: dict[str, bool], offload: int, named: str
) -> None:
    """vLLM itself refuses some of them on a CPU, so the check is asked with what it would see on a GPU."""
    config = SimpleNamespace(
        load_config=SimpleNamespace(load_format="auto"),
        model_config=SimpleNamespace(**model_config),
        parallel_config=SimpleNamespace(**parallel_config),
        cache_config=SimpleNamespace(cpu_offload_gb=offload),
    )
    for daemon in (True, False):
        with pytest.raises(ConfigurationError, match=named):
            check_config(config, daemon=daemon)  # type: ignore[arg-type]
