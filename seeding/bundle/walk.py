"""What is in a cache folder right now, read without following a single link."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from warmseed.errors import printable
from warmseed.seeding.bundle.files import DIRECTORY
from warmseed.seeding.bundle.tar import MEMBERS
from warmseed.seeding.errors import ArtifactRefused

__all__ = ["FileReader", "Found", "Snapshot", "check_size", "read_file", "take_snapshot", "wait_until_quiet"]

DEPTH = 48  # folders below one another; deeper is no cache
FILE_BYTES = 2 << 30  # bytes in the largest file captured
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Found(NamedTuple):
    """One regular file, as `stat` sees it. Two equal values mean an unchanged file."""

    size: int
    mode: int
    mtime_ns: int
    ctime_ns: int
    inode: int


@dataclass(slots=True)
class Snapshot:
    """The regular files below a folder, and what else was there."""

    files: dict[str, Found] = field(default_factory=dict)  # path below the folder -> what it is
    refused: dict[str, str] = field(default_factory=dict)  # path -> why it is not read
    atimes_ns: dict[str, int] = field(default_factory=dict, compare=False)


def take_snapshot(folder: int, skip: Callable[[str], bool]) -> Snapshot:
    """The files below the open `folder`, but those below names that `skip` picks (paths relative to it).

    Raises:
        ArtifactRefused: ``malformed``, for a tree too deep or with too many files.
        OSError: when a folder can't be read.
    """
    snapshot = Snapshot()
    _take(folder, "", 0, skip, snapshot)
    return snapshot


def _take(folder: int, prefix: str, depth: int, skip: Callable[[str], bool], snapshot: Snapshot) -> None:
    if depth > DEPTH:
        raise ArtifactRefused("malformed", f"{prefix!r} lies more than {DEPTH} folders deep; that is no cache")
    with os.scandir(folder) as entries:
        found = [(prefix + entry.name, entry) for entry in entries]
    files, atimes = snapshot.files, snapshot.atimes_ns
    for path, entry in found:
        if skip(path):
            continue
        try:
            info = entry.stat(follow_symlinks=False)  # relative to the open folder
            mode = info.st_mode
            if stat.S_ISDIR(mode):
                handle = os.open(entry.name, DIRECTORY, dir_fd=folder)
                try:
                    _take(handle, path + "/", depth + 1, skip, snapshot)
                finally:
                    os.close(handle)
                continue
        except FileNotFoundError:
            continue  # gone again: an engine's temporary file
        if not stat.S_ISREG(mode):
            snapshot.refused[path] = "a link, never followed" if stat.S_ISLNK(mode) else "not a regular file"
            continue
        if len(files) >= MEMBERS:
            raise ArtifactRefused("malformed", f"more than {MEMBERS} files below one cache root")
        files[path] = Found(info.st_size, mode, info.st_mtime_ns, info.st_ctime_ns, info.st_ino)
        atimes[path] = info.st_atime_ns


def wait_until_quiet(
    take: Callable[[], Snapshot],
    *,
    settle: float,
    deadline: float,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Snapshot:
    """A snapshot that was the same `settle` seconds earlier.

    Raises:
        ArtifactRefused: ``busy``, when files still change after `deadline` seconds.
    """
    end = clock() + deadline
    earlier = take()
    while True:
        sleep(settle)
        now = take()
        if now == earlier:
            return now
        if clock() >= end:
            changed = sorted({path for path, _ in now.files.items() ^ earlier.files.items()})
            what = printable(changed[0]) if changed else "its folders"
            raise ArtifactRefused(
                "busy", f"the cache still changes after {deadline:g} s ({what}); captured at a later start"
            )
        earlier = now


class FileReader:
    """Reads files below one open folder, whose inner folders it keeps open from one file to the next.

    Use as a context manager. No component of a path may be a link.
    """

    def __init__(self, folder: int) -> None:
        self._open: list[tuple[str, int]] = [("", folder)]
        self._folder: str | None = ""  # that the last of them is

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self._folder = None
        while len(self._open) > 1:
            os.close(self._open.pop()[1])

    def read(self, path: str) -> bytes:
        """The bytes of the file at `path`.

        Raises:
            ArtifactRefused: ``length``, for a file over `FILE_BYTES`.
            OSError: when it can't be read, or a link stands in the way.
        """
        file = self._opened(path)
        try:
            check_size(path, size := os.fstat(file).st_size)
            data = os.read(file, size + 1)
            if len(data) == size:
                return data
            pieces = [data]  # it grew, or the kernel gave less than was asked for
            while piece := os.read(file, 8 << 20):
                pieces.append(piece)
            return b"".join(pieces)
        finally:
            os.close(file)

    def read_into(self, path: str, place: memoryview) -> int:
        """How many bytes of the file at `path` were read into `place`, which has room for one more than expected.

        A file that has grown shows by the room being filled, a shorter one by more of it being left.

        Raises:
            OSError: when it can't be read, or a link stands in the way.
        """
        expected = len(place) - 1
        file = self._opened(path)
        try:
            done = count = os.readv(file, [place])
            while count and done < expected:  # the kernel gave less than was asked for, or the file has shrunk
                done += (count := os.readv(file, [place[done:]]))
            return done
        finally:
            os.close(file)

    def _opened(self, path: str) -> int:
        folder, _, name = path.rpartition("/")
        if folder != self._folder:
            self._enter(folder)
        at = self._open[-1][1]
        try:
            # Without an access time of our own the engine's reads stay visible.
            return os.open(name, _FILE | os.O_NOATIME, dir_fd=at)
        except PermissionError:  # another owner's file
            return os.open(name, _FILE, dir_fd=at)

    def _enter(self, folder: str) -> None:
        parts = folder.split("/") if folder else []
        common = 0
        while common < min(len(parts), len(self._open) - 1) and self._open[common + 1][0] == parts[common]:
            common += 1
        self._folder = None  # until all of its parts are open
        while len(self._open) - 1 > common:
            os.close(self._open.pop()[1])
        for part in parts[common:]:
            self._open.append((part, os.open(part, DIRECTORY, dir_fd=self._open[-1][1])))
        self._folder = folder


def check_size(name: str, size: int) -> None:
    """See that a file of `size` bytes may be captured.

    Raises:
        ArtifactRefused: ``length``.
    """
    if size > FILE_BYTES:
        raise ArtifactRefused("length", f"{name!r} has {size} bytes; files over {FILE_BYTES} are not captured")


def read_file(folder: int, path: str) -> bytes:
    """The bytes of the one file at `path` below the open `folder`, as `FileReader` reads them."""
    with FileReader(folder) as reader:
        return reader.read(path)


def open_folder(path: Path) -> int:
    """The folder at `path` as a descriptor; links in the way are followed, as the operator laid them.

    Raises:
        OSError: when it can't be opened.
    """
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
