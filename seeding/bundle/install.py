"""From a verified payload to files: authenticate, parse, write. Nothing here is visible to an engine yet.

The order is the point: length and digest before the tar is parsed, the tar canonical before a file is made,
every file's own digest before the tree gets its name. Folders are opened one component at a time, so a link
planted in the way stops the walk.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from warmseed.errors import printable
from warmseed.seeding.bundle import tar
from warmseed.seeding.bundle.files import Disk, owned_mode
from warmseed.seeding.bundle.frames import PIECE, compressed, expand, expand_into
from warmseed.seeding.bundle.index import BundleIndex, FileRecord
from warmseed.seeding.bundle.walk import open_folder
from warmseed.seeding.errors import ArtifactRefused

__all__ = ["RESERVE", "Target", "authenticated", "check_space", "write_tree"]

IN_MEMORY = 512 << 20  # bytes; a larger bundle is expanded on the disk
RESERVE = 256 << 20  # bytes left free on the disk after an installation
_WRITERS = 2  # threads that write and hash files; making a file is mostly the kernel's work


@dataclass(frozen=True, slots=True)
class Target:
    """Where one file of a bundle goes, and how its bytes are made fit for that place."""

    path: str  # in the tree
    localise: Callable[[bytes], bytes] | None = None


def check_space(folder: Path, length: int) -> None:
    """See that `folder` has room for an expanded bundle of `length` bytes and the files in it.

    Raises:
        ArtifactRefused: ``space``.
    """
    free = os.statvfs(folder)
    have, need = free.f_bavail * free.f_frsize, 2 * length + RESERVE
    if have < need:
        raise ArtifactRefused(
            "space", f"{folder} has {have >> 20} MiB free, the bundle needs {need >> 20}; not installed"
        )


@contextmanager
def authenticated(payload: Path, staging: Path, *, sha256: str, length: int) -> Iterator[memoryview]:
    """The uncompressed tar of `payload` (plain, or zstd frames), once its length and digest are right.

    A compressed payload is expanded in memory up to `IN_MEMORY` bytes, else into a file without a name in `staging`; it
    is gone when this ends.

    Raises:
        ArtifactRefused: ``length``, ``digest`` or ``malformed``; nothing was parsed then.
        OSError: when the disk fails.
    """
    if not length:
        raise ArtifactRefused("malformed", "a bundle without a byte")
    if not compressed(payload):
        with payload.open("rb", buffering=0) as file:
            found = _digest(file, length)
            mapped = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ)
    elif length <= IN_MEMORY:  # the disk is spared from bytes that are gone in a second
        mapped = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapped.madvise(mmap.MADV_HUGEPAGE)
        with payload.open("rb") as source:
            found = expand_into(source, memoryview(mapped))
    else:
        handle = os.open(staging, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "w+b", buffering=0) as file, payload.open("rb") as source:
            found = expand(source, file, length=length)
            mapped = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ)
    view = memoryview(mapped).toreadonly()
    try:
        if found != sha256:
            raise ArtifactRefused("digest", f"the bundle's SHA-256 is {found[:12]}…, its manifest says {sha256[:12]}…")
        yield view
    finally:
        # A refusal's traceback still holds slices of the map; it then goes when they do.
        with suppress(BufferError):
            view.release()
            mapped.close()


def _digest(file: object, length: int) -> str:
    from io import RawIOBase

    if not isinstance(file, RawIOBase):
        raise TypeError("a raw file is needed")
    size = os.fstat(file.fileno()).st_size
    if size != length:
        raise ArtifactRefused("length", f"the bundle has {size} bytes, its manifest says {length}")
    digest = hashlib.sha256()
    while piece := file.read(PIECE):
        digest.update(piece)
    return digest.hexdigest()


def write_tree(
    data: memoryview, index: BundleIndex, targets: Mapping[str, Target], staged: Path, disk: Disk
) -> dict[str, str]:
    """Write the files of `targets` (by their path in the bundle) below `staged`; path in the tree -> SHA-256.

    Every member is checked against the index, also those that are not written.

    Raises:
        ArtifactRefused: ``malformed``, ``digest`` or ``relocation``; `staged` is then to be thrown away.
        OSError: when the disk fails.
    """
    listed = _listed(data, index)
    stop = threading.Event()

    def work(part: Sequence[tuple[tar.Member, FileRecord]]) -> dict[str, str]:
        try:
            return _write_part(data, part, targets, staged, disk, stop)
        except BaseException:
            stop.set()
            raise

    installed: dict[str, str] = {}
    with ThreadPoolExecutor(_WRITERS, thread_name_prefix="warmseed-write") as writers:
        for done in [writers.submit(work, part) for part in _shares(listed, _WRITERS)]:
            installed.update(done.result())
    return installed


def _shares(
    listed: Sequence[tuple[tar.Member, FileRecord]], count: int
) -> Iterator[Sequence[tuple[tar.Member, FileRecord]]]:
    """`listed` in `count` runs of about the same number of files; folders stay together but at the borders."""
    for number in range(count):
        yield listed[len(listed) * number // count : len(listed) * (number + 1) // count]


def _write_part(
    data: memoryview,
    part: Sequence[tuple[tar.Member, FileRecord]],
    targets: Mapping[str, Target],
    staged: Path,
    disk: Disk,
    stop: threading.Event,
) -> dict[str, str]:
    """Check and write some of the files; until another thread has failed."""
    installed: dict[str, str] = {}
    with _Folders(staged, disk) as folders:
        for member, record in part:
            if stop.is_set():
                break
            check_files(data, ((member, record),))
            if (target := targets.get(member.name)) is None:
                continue
            body, digest = data[member.offset : member.offset + member.size], record.sha256
            if target.localise is not None:
                made = target.localise(bytes(body))
                body, digest = memoryview(made), hashlib.sha256(made).hexdigest()
            folder, _, name = target.path.rpartition("/")
            disk.write_file(name, folders.open(folder), body, mode=owned_mode(record.mode), mtime_ns=record.mtime_ns)
            installed[target.path] = digest
    return installed


def _listed(data: memoryview, index: BundleIndex) -> list[tuple[tar.Member, FileRecord]]:
    """The members of the tar with their records, which must agree in everything but the digest."""
    listed = []
    expected = iter(index.files)
    for member in tar.members(data):
        record = next(expected, None)
        if record is None or not _same(member, record):
            raise ArtifactRefused(
                "malformed", f"{printable(member.name)!r} is not what the file index says stands there"
            )
        listed.append((member, record))
    if next(expected, None) is not None:
        raise ArtifactRefused("malformed", "the file index lists files that the bundle does not hold")
    return listed


def check_files(data: memoryview, listed: Sequence[tuple[tar.Member, FileRecord]]) -> None:
    """See that every file has the digest that the index gives it.

    Raises:
        ArtifactRefused: ``digest``.
    """
    for member, record in listed:
        if hashlib.sha256(data[member.offset : member.offset + member.size]).hexdigest() != record.sha256:
            raise ArtifactRefused("digest", f"{printable(member.name)!r} has another SHA-256 than the file index says")


def _same(member: tar.Member, record: FileRecord) -> bool:
    return member.name == record.path and member.size == record.size and member.executable == bool(record.mode & 0o100)


class _Folders:
    """The open folders on the way to the file being written; files come in order, so most are reused."""

    def __init__(self, base: Path, disk: Disk) -> None:
        self._disk = disk
        self._open: list[tuple[str, int]] = [("", open_folder(base))]

    def __enter__(self) -> _Folders:
        return self

    def __exit__(self, *exc: object) -> None:
        while self._open:
            os.close(self._open.pop()[1])

    def open(self, path: str) -> int:
        """The folder at `path` below the base, made where it is not there."""
        parts = path.split("/") if path else []
        common = 0
        while common < min(len(parts), len(self._open) - 1) and self._open[common + 1][0] == parts[common]:
            common += 1
        while len(self._open) - 1 > common:
            os.close(self._open.pop()[1])
        for part in parts[common:]:
            self._open.append((part, self._disk.make_folder(part, self._open[-1][1])))
        return self._open[-1][1]
