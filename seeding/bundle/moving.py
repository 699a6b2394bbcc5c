"""Moving whole folders of compiled caches, and the mark by which a folder is known wherever it stands."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path

from warmseed.seeding.bundle.files import DIRECTORY, Disk

__all__ = ["MARK", "copy_file", "leftovers", "move", "read_mark", "write_mark"]

MARK = ".warmseed-tree"  # a file in a folder that stands at a cache root itself: its tree, and its path in it
_MARK_BYTES = 4096
_MARK_TEXT = re.compile(r"[A-Za-z0-9-]+(?:/[A-Za-z0-9_][A-Za-z0-9_.+-]*)+")
_LEFT = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{12}(?P<part>\.part)?", re.DOTALL)


def write_mark(folder: Path, tree: str, path: str) -> None:
    """Say in `folder` that it is the folder `path` of the tree named `tree`.

    Raises:
        OSError: when it can't be written.
    """
    handle = os.open(folder / MARK, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "wb") as out:
        out.write(f"{tree}/{path}".encode())


def read_mark(folder: Path) -> str:
    """The tree and path that the mark in `folder` names, "" for no mark or one that warmseed did not write."""
    try:
        handle = os.open(folder / MARK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        text = os.read(handle, _MARK_BYTES).decode("ascii", "replace")
    except OSError:
        return ""
    finally:
        os.close(handle)
    return text if _MARK_TEXT.fullmatch(text) else ""


def leftovers(root: Path) -> list[Path]:
    """Links and folders that a killed process left beside the cache root `root` under a temporary name."""
    try:
        entries = list(root.parent.iterdir())
    except OSError:
        return []
    found = []
    for entry in entries:
        match = _LEFT.fullmatch(entry.name)
        if match is None or match["name"] != root.name:
            continue
        if match["part"]:
            shutil.rmtree(entry, ignore_errors=True)  # an unfinished copy: what it was copied from is still there
        elif entry.is_symlink() or entry.is_dir():
            found.append(entry)
    return found


def move(source: Path, target: Path, disk: Disk) -> None:
    """Give the folder `source` the new name `target`, on another file system as a synced copy with the same times.

    Raises:
        OSError: when the disk fails; `source` is then still there.
    """
    try:
        disk.rename(str(source), str(target))
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
    else:
        return
    part = target.with_name(f"{target.name}.part")
    try:
        shutil.copytree(source, part, symlinks=True, copy_function=copy_file)
        handle = os.open(part, DIRECTORY)
        try:
            disk.sync(handle)
        finally:
            os.close(handle)
        disk.rename(str(part), str(target))
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    shutil.rmtree(source, ignore_errors=True)


def copy_file(source: str, target: str) -> None:
    """Copy a file with its mode and both times; that it was copied does not count as read."""
    info = os.stat(source, follow_symlinks=False)
    shutil.copyfile(source, target, follow_symlinks=False)
    os.chmod(target, info.st_mode & 0o777)
    os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns))
