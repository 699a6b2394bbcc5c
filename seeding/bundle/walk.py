"""What is in a cache folder right now, read without following a single link."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from warmseed.errors import printable
from warmseed.seeding.bundle.files import DIRECTORY
from warmseed.seeding.bundle.tar import MEMBERS
from warmseed.seeding.errors import ArtifactRefused

__all__ = ["Found", "Snapshot", "read_file", "take_snapshot", "wait_until_quiet"]

DEPTH = 48  # folders below one another; deeper is no cache
FILE_BYTES = 4 << 30  # bytes in the largest file captured


@dataclass(frozen=True, slots=True)
class Found:
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
        names = sorted(entry.name for entry in entries)
    for name in names:
        path = prefix + name
        if skip(path):
            continue
        try:
            info = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISDIR(info.st_mode):
                handle = os.open(name, DIRECTORY, dir_fd=folder)
                try:
                    _take(handle, path + "/", depth + 1, skip, snapshot)
                finally:
                    os.close(handle)
                continue
        except FileNotFoundError:
            continue  # gone again: an engine's temporary file
        if not stat.S_ISREG(info.st_mode):
            snapshot.refused[path] = "a link, never followed" if stat.S_ISLNK(info.st_mode) else "not a regular file"
            continue
        if len(snapshot.files) >= MEMBERS:
            raise ArtifactRefused("malformed", f"more than {MEMBERS} files below one cache root")
        snapshot.files[path] = Found(info.st_size, info.st_mode, info.st_mtime_ns, info.st_ctime_ns, info.st_ino)
        snapshot.atimes_ns[path] = info.st_atime_ns


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


def read_file(folder: int, path: str) -> bytes:
    """The bytes of the file at `path` below the open `folder`; no component may be a link.

    Raises:
        ArtifactRefused: ``length``, for a file over `FILE_BYTES`.
        OSError: when it can't be read, or a link stands in the way.
    """
    parts = path.split("/")
    handle, opened = folder, []
    try:
        for part in parts[:-1]:
            handle = os.open(part, DIRECTORY, dir_fd=handle)
            opened.append(handle)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            file = os.open(parts[-1], flags | os.O_NOATIME, dir_fd=handle)  # keeps the engine's own reads visible
        except PermissionError:  # another owner's file
            file = os.open(parts[-1], flags, dir_fd=handle)
        try:
            size = os.fstat(file).st_size
            if size > FILE_BYTES:
                raise ArtifactRefused("length", f"{path!r} has {size} bytes; files over {FILE_BYTES} are not captured")
            pieces = []
            while piece := os.read(file, 8 << 20):
                pieces.append(piece)
            return b"".join(pieces) if len(pieces) != 1 else pieces[0]
        finally:
            os.close(file)
    finally:
        for entry in reversed(opened):
            os.close(entry)


def open_folder(path: Path) -> int:
    """The folder at `path` as a descriptor; links in the way are followed, as the operator laid them.

    Raises:
        OSError: when it can't be opened.
    """
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
