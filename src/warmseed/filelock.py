"""A lock between the processes of one node: a file's, waited for within a limit."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["file_lock"]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.02  # seconds between two tries


@contextlib.contextmanager
def file_lock(path: Path, seconds: float) -> Iterator[None]:
    """Hold the lock of the file `path`, which is made if it is not there. Blocks for up to `seconds`.

    A holder that dies lets go (the kernel sees to it); one that is stopped does not, hence the limit.

    Raises:
        TimeoutError: another process has held it for all of `seconds`; it names the file.
        OSError: the file can't be opened, or is a link.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        end = time.monotonic() + seconds
        pause = _FIRST_PAUSE
        while not _taken(handle):
            if time.monotonic() >= end:
                raise TimeoutError(errno.ETIMEDOUT, f"another process has held this lock for {seconds:g} s", str(path))
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        yield
    finally:
        os.close(handle)  # releases the lock


def _taken(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
