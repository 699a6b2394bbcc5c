"""Which weights are these, by value: SHA-256 of every file, or what stands in for it.

``full`` hashes every byte: one changed value anywhere is another checkpoint. ``sampled`` hashes both ends and evenly
spaced pieces: a retrain is noticed, a single changed value may not be. ``metadata`` reads only headers, sizes and
mtimes. A ``sketch`` is what goes with every full digest: the same pieces, always read from the files. Sketches that
differ tell two checkpoints apart in milliseconds; equal ones tell nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from warmseed.daemon.weights.digest_cache import DigestCache, FileStat
from warmseed.daemon.weights.errors import CheckpointChanged, CheckpointInvalid
from warmseed.daemon.weights.safetensors import check_header, read_header
from warmseed.errors import printable

__all__ = [
    "AnyDigest",
    "CheckpointFile",
    "CheckpointIdentity",
    "DigestMode",
    "check_unchanged",
    "digest_checkpoint",
    "stat_checkpoint",
    "weight_files",
]

logger = logging.getLogger(__name__)

DigestMode = Literal["full", "sampled", "metadata"]  # what an operator chooses from
AnyDigest = DigestMode | Literal["sketch"]
Hex64 = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{64})?$")]
FILES: Final = 65536  # in one checkpoint, at most
_READ: Final = 1 << 20  # bytes a read: what was read is still in the CPU's cache when it is hashed
_SAMPLE: Final = 64 << 10  # bytes of one sampled piece
_STEP: Final = 16 << 20  # bytes from one sampled piece to the next
_EDGE: Final = 1 << 20  # bytes sampled at either end
_INDEX_LIMIT: Final = 256 << 20  # bytes of an index file
# A write within the clock tick of the one before it leaves the same timestamps. A file must have been quiet for this
# long before its stat is taken for its contents; 2 s is the coarsest clock a file system has (FAT).
_SETTLED_NS: Final = 2_000_000_000
_HEX64: Final = re.compile(r"[0-9a-f]{64}")


class CheckpointFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of weights."""

    name: Annotated[str, msgspec.Meta(max_length=255)]
    stat: FileStat
    sha256: Annotated[str, msgspec.Meta(max_length=64)] = ""  # empty where only the stat was taken
    settled: bool = False  # the stat had been quiet for long enough to stand for the contents


class CheckpointIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The files of a checkpoint and, unless it is only a list of stats, one digest over all of them."""

    mode: Literal["full", "sampled", "metadata", "sketch", "stat"]
    files: Annotated[tuple[CheckpointFile, ...], msgspec.Meta(max_length=FILES)]
    digest: Hex64 = ""
    sketch: Hex64 = ""  # beside a full digest only

    def __str__(self) -> str:
        return f"{self.mode}:{self.digest}" if self.digest else f"{len(self.files)} files by stat"

    @property
    def nbytes(self) -> int:
        """Bytes in all the files together."""
        return sum(file.stat.size for file in self.files)

    def matches(self, other: CheckpointIdentity) -> bool:
        """Whether both mean the same weights: the same digest, or the very same versions of the very same files."""
        if self.digest and other.digest and self.mode == other.mode:
            return self.digest == other.digest
        return self.same_files(other)

    def same_files(self, other: CheckpointIdentity) -> bool:
        """Whether both were taken of the same versions of the same files, as far as stats can tell for certain."""
        if not self.files or len(self.files) != len(other.files):
            return False
        return all(
            ours.stat == theirs.stat and ours.name == theirs.name and (ours.settled or theirs.settled)
            for ours, theirs in zip(self.files, other.files, strict=True)
        )


def weight_files(path: Path) -> tuple[Path, ...]:
    """The files whose tensors an engine loads from `path`, a folder or a single file, sorted by name.

    safetensors before ``.bin`` before ``.pt`` before GGUF, as engines choose; an index file decides which shards count.

    Raises:
        CheckpointInvalid: there are none, the index names a file that is missing, or the index is malformed.
        OSError: the folder can't be read.
    """
    if path.is_file():
        return (path,)
    if not path.is_dir():
        raise CheckpointInvalid(f"{path} is neither a folder nor a file; there are no weights to identify")
    for suffix, index in (
        (".safetensors", "model.safetensors"),
        (".bin", "pytorch_model.bin"),
        (".pt", ""),
        (".gguf", ""),
    ):
        found = {entry.name: entry for entry in path.iterdir() if entry.name.endswith(suffix) and entry.is_file()}
        wanted = _indexed(path / f"{index}.index.json") if index else None
        if wanted is not None:
            if missing := sorted(wanted - found.keys()):
                raise CheckpointInvalid(
                    f"{path}: the index names {len(missing)} files that are missing, {printable(missing[0])!r} first"
                )
            found = {name: found[name] for name in wanted}
        if len(found) > FILES:
            raise CheckpointInvalid(f"{path} holds {len(found)} files of weights, over the limit of {FILES}")
        if found:
            return tuple(found[name] for name in sorted(found))
    raise CheckpointInvalid(f"{path} holds no .safetensors, .bin, .pt or .gguf file")


def stat_checkpoint(path: Path) -> CheckpointIdentity:
    """What an engine sends: names and stats of the files under `path`. Reads none of them.

    Raises:
        CheckpointInvalid: `path` holds no checkpoint.
        OSError: a file can't be examined.
    """
    now = time.time_ns()
    files = []
    for file in weight_files(path):
        stat = FileStat.of(file.stat())
        files.append(CheckpointFile(file.name, stat, "", _settled(stat, now)))
    return CheckpointIdentity("stat", tuple(files))


def digest_checkpoint(
    path: Path,
    *,
    mode: AnyDigest = "full",
    cache: DigestCache | None = None,
    workers: int | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> CheckpointIdentity:
    """The identity of the checkpoint at `path`, with a digest of `mode`; a full one has its sketch beside it.

    Shards are hashed in parallel, one thread a core (hashing releases the interpreter's lock), and each file's bytes
    are read once: run beside the load, it reads what the load has brought into memory, or the other way round.
    `on_bytes` is told of every piece as it is hashed, from several threads.

    Raises:
        CheckpointInvalid: files are missing, or a safetensors file contradicts its header.
        CheckpointChanged: a file changed while it was read.
        OSError: a file can't be read.
    """
    known = cache or DigestCache()
    paths = weight_files(path)
    threads = workers or min(len(paths), os.cpu_count() or 1)
    with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="warmseed-digest") as pool:
        cached = tuple(pool.map(lambda file: _from_cache(file, mode, known), paths))
        if None in cached:
            # Names are compared across all shards, so a shard that is known by digest has its header read too.
            _check_names(pool.map(_tensor_names, paths), paths)
            files = tuple(
                pool.map(lambda pair: pair[1] or _identify(pair[0], mode, on_bytes), zip(paths, cached, strict=True))
            )
        else:
            files = tuple(file for file in cached if file)
    for file, old in zip(files, cached, strict=True):
        if old is None and file.settled:
            known.put(file.stat, mode, file.sha256)
    listing = [[file.name, file.stat.size, file.sha256] for file in files]
    canonical = json.dumps([mode, listing], separators=(",", ":"), ensure_ascii=True)
    identity = CheckpointIdentity(mode, files, hashlib.sha256(canonical.encode("ascii")).hexdigest())
    return _with_sketch(identity, path, known, workers) if mode == "full" else identity


def _with_sketch(
    identity: CheckpointIdentity, path: Path, cache: DigestCache, workers: int | None
) -> CheckpointIdentity:
    sketch = digest_checkpoint(path, mode="sketch", cache=cache, workers=workers)
    for hashed, sketched in zip(identity.files, sketch.files, strict=True):
        if (hashed.name, hashed.stat) != (sketched.name, sketched.stat):
            raise CheckpointChanged(
                f"{path}: {hashed.name} changed while it was hashed; start again once it is written"
            )
    return msgspec.structs.replace(identity, sketch=sketch.digest)


def check_unchanged(path: Path, identity: CheckpointIdentity) -> None:
    """Nothing, if the files are still those of `identity`; call it when the load is done.

    Raises:
        CheckpointChanged: naming the file; what was loaded may be neither the old nor the new weights.
    """
    for known, file in zip(identity.files, weight_files(path), strict=False):
        if file.name != known.name or FileStat.of(file.stat()) != known.stat:
            raise CheckpointChanged(f"{file} changed while its weights were loaded; start again once it is written")
    if len(identity.files) != len(weight_files(path)):
        raise CheckpointChanged(f"{path}: files came or went while the weights were loaded; start again")


def _from_cache(path: Path, mode: AnyDigest, cache: DigestCache) -> CheckpointFile | None:
    stat = FileStat.of(path.stat())
    digest = cache.get(stat, mode)
    return None if digest is None else CheckpointFile(path.name, stat, digest, settled=True)


def _tensor_names(path: Path) -> tuple[str, ...]:
    if path.suffix != ".safetensors":
        return ()
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        return check_header(read_header(descriptor, size, path.name), size, path.name)
    finally:
        os.close(descriptor)


def _check_names(names: Iterable[tuple[str, ...]], paths: tuple[Path, ...]) -> None:
    seen: dict[str, str] = {}
    for path, here in zip(paths, names, strict=True):
        for name in here:
            if name in seen:
                raise CheckpointInvalid(f"tensor {printable(name)!r} is both in {seen[name]} and in {path.name}")
            seen[name] = path.name


def _identify(path: Path, mode: AnyDigest, on_bytes: Callable[[int], None] | None) -> CheckpointFile:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        stat = FileStat.of(os.fstat(descriptor))
        header = read_header(descriptor, stat.size, path.name) if path.suffix == ".safetensors" else b""
        digest = _digest(descriptor, path, stat, mode, header, on_bytes)
        if FileStat.of(os.fstat(descriptor)) != stat or FileStat.of(path.stat()) != stat:
            raise CheckpointChanged(f"{path} changed while it was hashed; start again once it is written")
    finally:
        os.close(descriptor)
    return CheckpointFile(path.name, stat, digest, _settled(stat, time.time_ns()))


def _digest(
    descriptor: int,
    path: Path,
    stat: FileStat,
    mode: AnyDigest,
    header: bytes,
    on_bytes: Callable[[int], None] | None,
) -> str:
    blob = _blob_name(path)
    if mode == "full":
        digest = _hash(descriptor, ((0, stat.size),), b"", on_bytes)
        if blob and blob != digest:
            logger.warning("%s: its bytes are not those that its blob name stands for; a damaged download?", path)
        return digest
    if (
        blob and mode != "sketch"
    ):  # the content's SHA-256 at no cost; only `full` asks whether the bytes still are those
        return blob
    if mode == "metadata":
        return hashlib.sha256(b"%d:%d:" % (stat.size, stat.mtime_ns) + header).hexdigest()
    spans = [(0, _EDGE), (max(0, stat.size - _EDGE), stat.size)]
    spans += [(at, at + _SAMPLE) for at in range(_EDGE, max(0, stat.size - _EDGE), _STEP)]
    return _hash(descriptor, spans, b"%d:" % stat.size + header, on_bytes)


def _hash(
    descriptor: int,
    spans: list[tuple[int, int]] | tuple[tuple[int, int], ...],
    start: bytes,
    on_bytes: Callable[[int], None] | None,
) -> str:
    digest = hashlib.sha256(start)
    # Read and not mapped: a file that is cut short under a map ends the process with SIGBUS.
    buffer = bytearray(_READ)
    view = memoryview(buffer)
    for low, high in spans:
        at = low
        while at < high:
            count = os.preadv(descriptor, [view[: min(_READ, high - at)]], at)
            if count == 0:
                break  # shorter than it was: the stat taken afterwards tells
            digest.update(view[:count])
            at += count
            if on_bytes:
                on_bytes(count)
    return digest.hexdigest()


def _blob_name(path: Path) -> str | None:
    """The SHA-256 in a Hugging Face cache's blob name, or `None`: ``snapshots/<rev>/x -> ../../blobs/<sha256>``."""
    if not path.is_symlink():
        return None
    target = path.resolve()
    return target.name if target.parent.name == "blobs" and _HEX64.fullmatch(target.name) else None


def _settled(stat: FileStat, now_ns: int) -> bool:
    return now_ns - max(stat.mtime_ns, stat.ctime_ns) > _SETTLED_NS


def _indexed(index: Path) -> set[str] | None:
    """The shards an index file lists, or `None` where there is no index."""
    try:
        with index.open("rb") as source:
            text = source.read(_INDEX_LIMIT + 1)
    except FileNotFoundError:
        return None
    try:
        table = msgspec.json.decode(text)
        shards = {str(name) for name in table["weight_map"].values()}
    except (msgspec.MsgspecError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointInvalid(f"{index} has no weight map: {printable(error)}") from error
    if wrong := [name for name in shards if "/" in name or name in {"", ".", ".."}]:
        raise CheckpointInvalid(f"{index} names {printable(wrong[0])!r}, which is not a file of its folder")
    return shards
