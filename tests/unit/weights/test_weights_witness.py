"""What can be known of how an engine ended by those who are not its parent."""

from __future__ import annotations

import asyncio
import errno
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from warmseed.daemon.weights import witness
from warmseed.daemon.weights.witness import Ending, Witness


@contextmanager
def process(last: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for its standard input to close, and then does `last`."""
    code = f"import os, sys; sys.stdin.read(); {last}"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as started:
        yield started


def watched(last: str, *, reaped: bool) -> Ending | None:
    """How a witness says that a process ended, before or after its parent has heard of it."""

    async def main() -> Ending | None:
        with process(last) as child:
            seen = Witness(child.pid)
            try:
                assert child.stdin is not None
                child.stdin.close()
                if reaped:
                    child.wait(20)
                return await seen.ending(20)
            finally:
                seen.close()

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("last", "status", "said"),
    [
        ("os.abort()", -6, "died of SIGABRT"),
        ("os.kill(os.getpid(), 9)", -9, "died of SIGKILL"),
        ("os.kill(os.getpid(), 40)", -40, "died of signal 40"),
        ("sys.exit(3)", 3, "exited with 3"),
        ("pass", 0, "exited with 0"),
    ],
)
def test_a_process_that_its_parent_has_not_reaped_shows_how_it_ended(last: str, status: int, said: str) -> None:
    found = watched(last, reaped=False)
    assert found == Ending(status)
    assert str(found) == said


def test_a_process_that_its_parent_has_reaped_is_known_to_have_ended_and_how_where_the_kernel_can_tell() -> None:
    assert watched("os.abort()", reaped=True) in (Ending(-6), Ending(None))


@pytest.mark.parametrize("missing", ["pidfd_open", "ioctl"])
def test_a_kernel_that_knows_less_costs_the_how_and_not_the_that(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any) -> int:
        raise OSError(errno.ENOSYS, "no such call")

    monkeypatch.setattr(witness.os if missing == "pidfd_open" else witness.fcntl, missing, unknown)
    found = watched("os.abort()", reaped=True)
    assert found == Ending(None)
    assert str(found) == "died"
    assert watched("os.abort()", reaped=False) == Ending(-6)


def test_a_process_that_lives_is_not_said_to_have_ended() -> None:
    async def main() -> None:
        with process("pass") as child:
            seen = Witness(child.pid)
            assert await seen.ending(0.01) is None
            seen.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("status", "outside", "clean"),
    [(-9, True, False), (-15, True, False), (143, True, False), (130, True, False), (0, False, True)]
    + [(status, False, False) for status in (-4, -6, -7, -8, -11, 1, 139, None)],
)
def test_only_what_others_do_to_a_process_counts_as_from_outside(
    status: int | None, outside: bool, clean: bool
) -> None:
    ending = Ending(status)
    assert (ending.outside, ending.clean) == (outside, clean)
