"""Which differences make weights other weights, and that nothing else does."""

from __future__ import annotations

import msgspec
import pytest
from tests.support.weights_model import fingerprint

from warmseed.daemon.weights.checkpoint import CheckpointFile, CheckpointIdentity
from warmseed.daemon.weights.digest_cache import FileStat
from warmseed.daemon.weights.fingerprint import Fingerprint, config_digest

CHANGES: dict[str, object] = {
    "checkpoint": CheckpointIdentity("full", (), "c" * 64),
    "revision": "main",
    "architecture": "Other",
    "role": "draft",
    "tp_size": 2, "tp_rank": 1, "pp_size": 2, "pp_rank": 1, "dp_size": 2, "dp_rank": 1,
    "expert_parallel": True,
    "expert_placement": "round_robin",
    "dtype": "float16",
    "quantization": "fp8",
    "quantization_config": "d" * 64,
    "rope": "e" * 64,
    "kv_cache_dtype": "fp8_e4m3",
    "kv_cache_skip_layers": ("0",),
    "attention_backend": "flash", "moe_backend": "cutlass", "linear_backend": "cutlass",
    "engine": "vllm", "engine_version": "2",
    "torch_version": "2.11", "cuda_version": "13.0", "gpu_model": "H200",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_a_change_of_any_one_field_is_told_by_that_fields_name(name: str) -> None:
    ours, theirs = fingerprint(), fingerprint(**{name: CHANGES[name]})
    assert ours.mismatched_fields(theirs) == (name,)
    assert theirs.mismatched_fields(ours) == (name,)
    (difference,) = ours.differences(theirs)
    assert difference.theirs != difference.ours


def test_every_field_is_compared_and_none_says_where_a_process_runs() -> None:
    assert set(CHANGES) | {"extra"} == set(Fingerprint.__struct_fields__)
    words = {word for name in Fingerprint.__struct_fields__ for word in name.split("_")}
    assert words.isdisjoint(
        {"host", "port", "path", "dir", "folder", "addr", "address", "pid", "uuid", "index", "user"}
    )


def test_equal_fingerprints_survive_the_wire_equal() -> None:
    ours = fingerprint(extra={"vllm.block": "16"}, kv_cache_skip_layers=("1", "3"))
    wired = msgspec.msgpack.decode(msgspec.msgpack.encode(ours), type=Fingerprint)
    assert ours.mismatched_fields(wired) == ()


def test_an_adapters_own_fields_are_named_one_by_one() -> None:
    ours = fingerprint(extra={"a": "1", "b": "2"})
    theirs = fingerprint(extra={"b": "3", "c": "4"})
    assert ours.mismatched_fields(theirs) == ("extra.a", "extra.b", "extra.c")


def identity(mode: str, digest: str, *, settled: bool = True, inode: int = 2) -> CheckpointIdentity:
    file = CheckpointFile("m.safetensors", FileStat(1, inode, 3, 4, 5), digest and "f" * 64, settled)
    return CheckpointIdentity(mode, (file,), digest)  # type: ignore[arg-type]


def test_the_very_files_the_daemon_loaded_need_no_digest() -> None:
    assert identity("full", "a" * 64).matches(identity("stat", "", settled=False))
    assert not identity("full", "a" * 64).matches(identity("stat", "", inode=9))


def test_stats_that_nobody_saw_settle_prove_nothing() -> None:
    assert not identity("full", "a" * 64, settled=False).matches(identity("stat", "", settled=False))


def test_another_digest_of_the_same_mode_is_another_checkpoint_whatever_the_stats_say() -> None:
    assert not identity("full", "a" * 64).matches(identity("full", "b" * 64))
    assert identity("full", "a" * 64).matches(identity("full", "a" * 64, inode=9))


def test_no_files_are_no_proof() -> None:
    empty = CheckpointIdentity("stat", ())
    assert not empty.matches(empty)


def test_configs_are_digested_by_content_and_what_is_left_out_does_not_count() -> None:
    one = config_digest({"bits": 4, "group": [1, 2], "path": "/a"}, leave_out=("path",))
    assert one == config_digest({"path": "/b", "group": [1, 2], "bits": 4}, leave_out=("path",))
    assert one != config_digest({"bits": 8, "group": [1, 2]})
    assert config_digest(None) == ""
    with pytest.raises(TypeError):
        config_digest({"value": object()})
