"""A checkpoint is known by its values: nothing else makes it another one, and no changed value is missed."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from warmseed.daemon.weights import checkpoint as module
from warmseed.daemon.weights.checkpoint import (
    check_unchanged,
    digest_checkpoint,
    stat_checkpoint,
    weight_files,
)
from warmseed.daemon.weights.digest_cache import DigestCache, FileStat
from warmseed.daemon.weights.errors import CheckpointChanged, CheckpointInvalid


def write_shard(path: Path, data: bytes, name: str = "w") -> None:
    header = json.dumps({name: {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    for number in range(3):
        write_shard(made / f"model-{number}.safetensors", bytes([number]) * 5000, f"w{number}")
    (made / "config.json").write_text("{}")
    return made


@pytest.fixture
def cache(tmp_path: Path) -> DigestCache:
    return DigestCache(tmp_path / "digests")


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files just written count as quiet: the clock is far ahead of them."""
    real = time.time_ns
    monkeypatch.setattr(module.time, "time_ns", lambda: real() + 10_000_000_000)


def hashed(folder: Path, cache: DigestCache, mode: module.AnyDigest = "full") -> tuple[str, int]:
    """The digest, and how many bytes were hashed for it."""
    counts: list[int] = []
    identity = digest_checkpoint(folder, mode=mode, cache=cache, on_bytes=counts.append)
    return identity.digest, sum(counts)


def test_a_files_digest_is_its_sha256_which_is_what_hub_blobs_are_named_by(folder: Path, cache: DigestCache) -> None:
    identity = digest_checkpoint(folder, cache=cache)
    for file in identity.files:
        assert file.sha256 == hashlib.sha256((folder / file.name).read_bytes()).hexdigest()
    assert [file.name for file in identity.files] == [f"model-{n}.safetensors" for n in range(3)]


def test_one_changed_value_with_size_and_times_put_back_is_another_checkpoint(
    folder: Path, cache: DigestCache, settled: None
) -> None:
    before = hashed(folder, cache)[0]
    path = folder / "model-1.safetensors"
    times = path.stat()
    with path.open("r+b") as out:
        out.seek(-1, os.SEEK_END)
        out.write(b"\xff")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert path.stat().st_mtime_ns == times.st_mtime_ns
    assert hashed(folder, cache)[0] != before


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".gguf"])
def test_formats_without_a_header_are_known_by_value_too(tmp_path: Path, cache: DigestCache, suffix: str) -> None:
    path = tmp_path / f"model{suffix}"
    path.write_bytes(b"a" * 100)
    before = digest_checkpoint(tmp_path, cache=cache)
    path.write_bytes(b"a" * 99 + b"b")
    assert digest_checkpoint(tmp_path, cache=cache).digest != before.digest
    assert digest_checkpoint(path, cache=cache).digest == digest_checkpoint(tmp_path, cache=cache).digest


@pytest.mark.parametrize("mode", ["full", "sampled"])
def test_the_same_weights_in_another_folder_are_the_same_checkpoint(
    folder: Path, tmp_path: Path, cache: DigestCache, mode: module.DigestMode
) -> None:
    other = tmp_path / "elsewhere"
    other.mkdir()
    for path in weight_files(folder):
        (other / path.name).write_bytes(path.read_bytes())
    one = digest_checkpoint(folder, mode=mode, cache=cache)
    two = digest_checkpoint(other, mode=mode, cache=cache)
    assert one.matches(two)
    assert not one.same_files(two)


def test_a_retrain_with_the_same_shapes_is_noticed_in_every_mode(folder: Path, cache: DigestCache) -> None:
    for mode in ("full", "sampled", "metadata"):
        before = digest_checkpoint(folder, mode=mode, cache=cache)
        write_shard(folder / "model-0.safetensors", os.urandom(5000), "w0")
        assert not before.matches(digest_checkpoint(folder, mode=mode, cache=cache)), mode


def test_a_sketch_is_of_the_bytes_even_where_a_blob_name_would_tell(folder: Path, cache: DigestCache) -> None:
    """A hub's snapshot and a copy of it have one sketch, or an engine with the copy would be refused for nothing."""
    snapshot = folder.parent / "snapshots" / "main"
    blobs = folder.parent / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in weight_files(folder):
        blob = blobs / hashlib.sha256(path.read_bytes()).hexdigest()
        blob.write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(blob)
    ours, theirs = digest_checkpoint(folder, cache=cache), digest_checkpoint(snapshot, cache=cache)
    assert ours.sketch
    assert ours.sketch == theirs.sketch == digest_checkpoint(snapshot, mode="sketch", cache=cache).digest
    write_shard(folder / "model-0.safetensors", os.urandom(5000), "w0")
    assert digest_checkpoint(folder, cache=cache).sketch != ours.sketch


@pytest.mark.parametrize("mode", ["sampled", "sketch"])
def test_sampling_reads_little_of_a_large_file(tmp_path: Path, cache: DigestCache, mode: module.AnyDigest) -> None:
    (tmp_path / "model.bin").touch()
    os.truncate(tmp_path / "model.bin", 256 << 20)
    assert hashed(tmp_path, cache, mode)[1] < 4 << 20


def test_what_was_hashed_once_is_not_hashed_again(folder: Path, cache: DigestCache, settled: None) -> None:
    digest, count = hashed(folder, cache)
    assert count > 15_000
    assert hashed(folder, cache) == (digest, 0)
    (folder / "model-2.safetensors").touch()
    again, count = hashed(folder, cache)
    assert again == digest
    assert 5000 < count < 6000


def test_a_file_too_fresh_to_be_told_from_its_next_version_is_hashed_again(folder: Path, cache: DigestCache) -> None:
    digest, _ = hashed(folder, cache)
    again, count = hashed(folder, cache)
    assert again == digest
    assert count > 15_000
    assert not digest_checkpoint(folder, cache=cache).same_files(stat_checkpoint(folder))


def test_an_engine_opening_the_same_files_is_recognised_without_reading_them(
    folder: Path, cache: DigestCache, settled: None
) -> None:
    ours = digest_checkpoint(folder, cache=cache)
    for path in weight_files(folder):
        path.chmod(0)  # not even openable, for anyone but root; ctime moves with it
    assert not ours.matches(stat_checkpoint(folder))
    fresh = stat_checkpoint(folder)
    assert fresh.digest == ""
    assert stat_checkpoint(folder).matches(fresh)


def test_a_file_that_changes_while_it_is_hashed_is_noticed(folder: Path, cache: DigestCache) -> None:
    def meddle(count: int) -> None:
        with (folder / "model-1.safetensors").open("ab") as out:
            out.write(b"more")

    with pytest.raises(CheckpointChanged, match=r"model-1\.safetensors"):
        digest_checkpoint(folder, cache=cache, workers=1, on_bytes=meddle)


def test_a_file_replaced_while_it_is_hashed_is_noticed(folder: Path, cache: DigestCache) -> None:
    def meddle(count: int) -> None:
        write_shard(folder / "new", b"\x09" * 5000, "w1")
        (folder / "new").replace(folder / "model-1.safetensors")

    with pytest.raises(CheckpointChanged):
        digest_checkpoint(folder, cache=cache, workers=1, on_bytes=meddle)


@pytest.mark.parametrize("how", ["rewritten", "added", "removed"])
def test_files_that_change_during_the_load_are_noticed_after_it(folder: Path, cache: DigestCache, how: str) -> None:
    identity = digest_checkpoint(folder, cache=cache)
    check_unchanged(folder, identity)
    if how == "rewritten":
        write_shard(folder / "model-1.safetensors", b"\x09" * 5000, "w1")
    elif how == "added":
        write_shard(folder / "model-9.safetensors", b"\x09" * 5000, "w9")
    else:
        (folder / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointChanged):
        check_unchanged(folder, identity)


def test_an_index_decides_which_shards_count(folder: Path, cache: DigestCache) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w0": "model-0.safetensors", "w2": "model-2.safetensors"}}))
    assert [p.name for p in weight_files(folder)] == ["model-0.safetensors", "model-2.safetensors"]
    index.write_text(json.dumps({"weight_map": {"w0": "model-7.safetensors"}}))
    with pytest.raises(CheckpointInvalid, match=r"model-7\.safetensors"):
        weight_files(folder)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "../x"}}', "[" * 100_000])
def test_a_malformed_index_is_refused(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointInvalid):
        weight_files(folder)


def test_a_tensor_in_two_shards_is_refused_also_when_the_digests_are_known(
    folder: Path, cache: DigestCache, settled: None
) -> None:
    assert digest_checkpoint(folder, cache=cache).digest
    write_shard(folder / "model-3.safetensors", b"\x01" * 10, "w0")
    for _ in range(2):
        with pytest.raises(CheckpointInvalid, match="both in"):
            digest_checkpoint(folder, cache=cache)


def test_a_truncated_shard_is_refused_and_not_remembered(folder: Path, cache: DigestCache, settled: None) -> None:
    os.truncate(folder / "model-1.safetensors", 4000)
    for _ in range(2):
        with pytest.raises(CheckpointInvalid, match=r"model-1\.safetensors"):
            digest_checkpoint(folder, cache=cache)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointInvalid):
        weight_files(tmp_path)
    with pytest.raises(CheckpointInvalid):
        weight_files(tmp_path / "missing")


def test_a_damaged_hub_blob_is_told_by_its_own_bytes_and_warned_about(
    tmp_path: Path, cache: DigestCache, caplog: pytest.LogCaptureFixture
) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    content = b"weights" * 1000
    name = hashlib.sha256(content).hexdigest()
    (blobs / name).write_bytes(content)
    (snapshot / "model.bin").symlink_to(f"../../blobs/{name}")
    good = digest_checkpoint(snapshot, cache=cache)
    assert good.files[0].sha256 == name
    assert digest_checkpoint(snapshot, mode="sampled", cache=cache).files[0].sha256 == name
    assert not caplog.records
    (blobs / name).write_bytes(b"Weights" * 1000)
    assert digest_checkpoint(snapshot, cache=cache).digest != good.digest
    assert "damaged" in caplog.text


class TestDigestCache:
    stat = FileStat(1, 2, 3, 4, 5)

    def test_keeps_modes_and_versions_apart(self, cache: DigestCache) -> None:
        cache.put(self.stat, "full", "a" * 64)
        assert cache.get(self.stat, "full") == "a" * 64
        assert cache.get(self.stat, "sampled") is None
        for number in range(5):
            fields = [1, 2, 3, 4, 5]
            fields[number] += 1
            assert cache.get(FileStat(*fields), "full") is None

    @pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"stat": 1}', b"\xff" * 100, b"{}" * 5000])
    def test_a_damaged_entry_is_a_miss(self, tmp_path: Path, content: bytes) -> None:
        cache = DigestCache(tmp_path / "digests")
        cache.put(self.stat, "full", "a" * 64)
        (tmp_path / "digests" / self.stat.key("full")).write_bytes(content)
        assert cache.get(self.stat, "full") is None

    def test_an_entry_moved_to_another_name_is_a_miss(self, tmp_path: Path) -> None:
        cache = DigestCache(tmp_path / "digests")
        cache.put(self.stat, "full", "a" * 64)
        other = FileStat(9, 9, 9, 9, 9)
        (tmp_path / "digests" / self.stat.key("full")).rename(tmp_path / "digests" / other.key("full"))
        assert cache.get(other, "full") is None

    def test_a_folder_others_can_write_is_not_believed_and_said_so_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        cache = DigestCache(tmp_path / "digests")
        cache.put(self.stat, "full", "a" * 64)
        (tmp_path / "digests").chmod(0o777)
        assert cache.get(self.stat, "full") is None
        cache.put(self.stat, "full", "a" * 64)
        assert len(caplog.records) == 1

    def test_a_folder_that_can_not_be_made_only_costs_time(
        self, tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture, settled: None
    ) -> None:
        (tmp_path / "file").write_text("in the way")
        cache = DigestCache(tmp_path / "file" / "digests")
        assert digest_checkpoint(folder, cache=cache).digest
        assert len(caplog.records) == 1

    def test_old_entries_go_first(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("warmseed.daemon.weights.digest_cache.ENTRIES", 3)
        cache = DigestCache(tmp_path / "digests")
        for number in range(5):
            cache.put(FileStat(number, 0, 0, 0, 0), "full", f"{number}" * 64)
            os.utime(tmp_path / "digests" / FileStat(number, 0, 0, 0, 0).key("full"), ns=(number, number))
        kept = [cache.get(FileStat(number, 0, 0, 0, 0), "full") is not None for number in range(5)]
        assert kept == [False, False, True, True, True]
        assert len(list((tmp_path / "digests").iterdir())) == 3
