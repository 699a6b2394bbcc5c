"""The `os` module as the file stores see it, failing or killing the process at a chosen call."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from warmseed.stores import files

# What a put is made of; everything else passes uncounted.
COUNTED = ("open", "mkdir", "write", "fsync", "rename", "posix_fallocate", "fstat", "close", "unlink")


class FaultyOs:
    """Stands for `os` in `warmseed.stores.files`."""

    def __init__(self, fault: Callable[[str, int], None]) -> None:
        self._fault = fault
        self.calls = 0

    def __getattr__(self, name: str) -> object:
        real = getattr(os, name)
        if name not in COUNTED:
            return real

        def counted(*args: object, **kwargs: object) -> object:
            self.calls += 1
            self._fault(name, self.calls)
            return real(*args, **kwargs)

        return counted


@contextmanager
def faults(fault: Callable[[str, int], None]) -> Iterator[FaultyOs]:
    """Have `fault(name, number)` called before every counted call; it may raise."""
    faulty = FaultyOs(fault)
    files.os = faulty  # type: ignore[attr-defined]
    try:
        yield faulty
    finally:
        files.os = os  # type: ignore[attr-defined]


def kill_before(call: int) -> Callable[[str, int], None]:
    """A fault that ends the process by SIGKILL before the call of that number."""

    def fault(name: str, number: int) -> None:
        if number == call:
            os.kill(os.getpid(), signal.SIGKILL)

    return fault


def fail(name: str, error: int, *, times: int = 1) -> Callable[[str, int], None]:
    """A fault that makes the first `times` calls of `name` fail with the errno `error`."""
    left = times

    def fault(called: str, number: int) -> None:
        nonlocal left
        if called == name and left:
            left -= 1
            raise OSError(error, os.strerror(error))

    return fault


def fail_call(call: int, error: int) -> Callable[[str, int], None]:
    """A fault that makes the call of that number fail with the errno `error`."""

    def fault(name: str, number: int) -> None:
        if number == call:
            raise OSError(error, os.strerror(error))

    return fault
