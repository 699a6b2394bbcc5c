"""The torch engine before and beside torch: what it checks, what its configuration hash covers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from tests.support.fake_checkpoint import fake_checkpoint, safetensors

from warmseed.daemon.cli import run as command
from warmseed.daemon.engines.torch import BUCKETS, TorchEngine, decoder_layers
from warmseed.daemon.weights.checkpoint import digest_checkpoint
from warmseed.daemon.weights.digest_cache import DigestCache
from warmseed.errors import ConfigurationError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return fake_checkpoint(tmp_path / "model")


def test_the_configuration_hash_follows_what_shapes_the_compiled_code(model: Path, tmp_path: Path) -> None:
    plain = TorchEngine(model).identity()
    assert TorchEngine(model, dtype="float32").identity().config_hash != plain.config_hash
    assert TorchEngine(model, buckets=(16,)).identity().config_hash != plain.config_hash
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "hidden_size": 1}')
    assert TorchEngine(model).identity().config_hash != plain.config_hash


def test_the_configuration_hash_ignores_where_the_model_lies_and_who_wrote_it(model: Path, tmp_path: Path) -> None:
    elsewhere = fake_checkpoint(tmp_path / "elsewhere")
    settings = json.loads((elsewhere / "config.json").read_text())
    settings = {"transformers_version": "9", "_name_or_path": "/x", **dict(reversed(settings.items()))}
    (elsewhere / "config.json").write_text(json.dumps(settings))
    assert TorchEngine(elsewhere).identity() == TorchEngine(model).identity()


def test_the_configuration_hash_ignores_the_weights_so_that_a_retrained_model_starts_warm(model: Path) -> None:
    before = TorchEngine(model).identity()
    (model / "model.safetensors").write_bytes(safetensors()[:-1] + b"\xff")
    assert TorchEngine(model).identity() == before


def test_the_fingerprint_covers_the_weights(model: Path, tmp_path: Path) -> None:
    engine, cache = TorchEngine(model), DigestCache(tmp_path / "digests")
    before = engine.fingerprint(digest_checkpoint(model, cache=cache))
    (model / "model.safetensors").write_bytes(safetensors()[:-1] + b"\xff")
    after = engine.fingerprint(digest_checkpoint(model, cache=cache))
    assert before.mismatched_fields(after) == ("checkpoint",)


def test_buckets_are_sorted_and_distinct_and_have_a_default(model: Path) -> None:
    assert TorchEngine(model, buckets=(64, 16, 64)).buckets == (16, 64)
    assert TorchEngine(model).buckets == BUCKETS
    with pytest.raises(ConfigurationError, match="at least 1 token"):
        TorchEngine(model, buckets=(0, 16))


def test_the_rehearsal_is_the_same_engine_as_every_restart(model: Path, tmp_path: Path) -> None:
    engine = TorchEngine(model, dtype="float32", device="cpu", buckets=(32, 16))
    words = engine.rehearsal(socket_dir=tmp_path / "s", cache_root=tmp_path / "c")
    given = dict(itertools.pairwise(words))
    again = TorchEngine(
        Path(given["--model"]),
        dtype=given["--dtype"],
        device=given["--device"],
        buckets=command._buckets(given["--shape-buckets"]),
    )
    assert again.identity() == engine.identity()
    assert given["--cache-root"] == str(tmp_path / "c")
    assert "--no-fallback" in words


def test_the_caches_lie_below_the_root_that_was_given(model: Path, tmp_path: Path) -> None:
    layout = TorchEngine(model).caches(tmp_path)
    assert all(root.is_relative_to(tmp_path) for root in layout.roots.values())
    assert set(layout.variables.values()) == {str(root) for root in layout.roots.values()}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", b"[]", "not a JSON object"),
        ("config.json", b"{", "not a JSON object"),
        ("config.json", b" " * (1 << 20) + b"{}", "larger than"),
        ("model.safetensors", b"", "too few for a safetensors file"),
        ("model.safetensors", b"\xff" * 64, "no safetensors file"),
        ("model.safetensors", safetensors() + b"x", "its tensors end at byte 8"),
        ("second.safetensors", safetensors()[:-1], "second.safetensors"),
    ],
)
def test_a_bad_folder_is_refused_before_anything_heavy_is_imported(
    model: Path, name: str, content: bytes, said: str
) -> None:
    (model / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=said):
        TorchEngine(model)


def test_a_folder_of_that_name_in_a_shards_place_is_refused(model: Path) -> None:
    (model / "x.safetensors").mkdir()
    with pytest.raises(ConfigurationError, match=r"x\.safetensors can't be read"):
        TorchEngine(model)


def test_the_layers_are_the_longest_list_of_modules() -> None:
    import torch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = torch.nn.ModuleList(torch.nn.Identity() for _ in range(2))
            self.layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(3))

    model = Model()
    assert list(decoder_layers(model)) == list(model.layers)
    assert list(decoder_layers(torch.nn.Identity())) == []
