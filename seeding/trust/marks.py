"""Where a node keeps what it must remember about manifests: ``highest.json``, always whole, always synced."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

from warmseed.filelock import file_lock
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.trust import canonical
from warmseed.seeding.trust.judge import Mark, Marks

__all__ = ["load_marks", "read_marks", "save_mark", "save_marks", "write_durably"]

LOCK_SECONDS = 10.0  # for other ranks of this node; each holds it for milliseconds
_MARKS_BYTES = 16 << 20  # bytes in the largest history ever read
_log = logging.getLogger(__name__)


def write_durably(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Replace the file at `path` by `data`: a reader, or the next boot, finds the old bytes or the new ones.

    Raises:
        OSError: if the disk fails; the old file is then still there and the temporary one is gone.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(handle, view) :]
            os.fsync(handle)  # without it a crash leaves a zero-length file behind the new name
        finally:
            os.close(handle)
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Put the names in `folder` on disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_marks(path: Path) -> Marks:
    """The history in the file `path`, an empty one when there is none; the file stays as it is.

    Raises:
        ArtifactRefused: ``malformed``: it does not parse.
        OSError: if the disk fails.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Marks()
    return canonical.decode(data, Marks, limit=_MARKS_BYTES)


def load_marks(path: Path) -> Marks:
    """The history in the file `path`; an empty one when there is none.

    A file that does not parse is moved aside with a warning: the node is then as trusting as a new one,
    which expiry bounds, but it can start.

    Raises:
        OSError: if the disk fails.
    """
    try:
        return read_marks(path)
    except ArtifactRefused as error:
        aside = path.with_name(f"{path.name}.broken")
        os.replace(path, aside)
        _log.warning(
            "the history of generations in %s is unreadable (%s); moved to %s, starting anew", path, error, aside
        )
        return Marks()


def save_marks(path: Path, marks: Marks) -> None:
    """Put `marks` on disk at `path`, before anything that they believe in is installed.

    Raises:
        OSError: if the disk fails; the artifact must then not be installed.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_durably(path, canonical.encode(marks))


def save_mark(path: Path, folder: str, mark: Mark | None) -> None:
    """Change one artifact's entry (`None`: remove it) in the history at `path`, which the ranks of a node share.

    Raises:
        OSError: if the disk fails, or another rank does not let go; the artifact must then not be installed.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with file_lock(path.with_name(f"{path.name}.lock"), LOCK_SECONDS):
        marks = dict(load_marks(path).marks)
        if mark is None:
            marks.pop(folder, None)
        else:
            marks[folder] = mark
        save_marks(path, Marks(marks=dict(sorted(marks.items()))))
