"""How a process ended that is not a child of this one, as far as the kernel tells.

Only a parent is told how its child ended. Others may read it from ``/proc`` until the parent has reaped it, and from
then on, since Linux 6.15, from a descriptor of the process that they opened in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["Ending", "Witness"]

_LOOK: Final = 0.05  # seconds between looks at a process of which there is no descriptor
_INFO_BYTES: Final = 64  # of struct pidfd_info, as it was when the call came
_GET_INFO: Final = 0xC000FF0B | _INFO_BYTES << 16  # _IOWR(0xFF, 11, struct pidfd_info) of <linux/pidfd.h>
_EXIT: Final = 1 << 3  # PIDFD_INFO_EXIT, in the mask that leads the structure
_EXIT_CODE: Final = 60  # bytes before `exit_code`
# How people, service managers and the out-of-memory killer end processes; no fault of the process's own raises these.
_OUTSIDE: Final = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process ended."""

    status: int | None = None  # as `subprocess` has it: minus the signal's number, or the exit code; `None`: unknown

    @property
    def clean(self) -> bool:
        """Whether it ended because it was done."""
        return self.status == 0

    @property
    def outside(self) -> bool:
        """Whether somebody else ended it, directly or by a signal that it turned into an exit code."""
        return self.status is not None and any(self.status in (-number, 128 + number) for number in _OUTSIDE)

    def __str__(self) -> str:
        if self.status is None:
            return "died"
        if self.status >= 0:
            return f"exited with {self.status}"
        try:
            return f"died of {signal.Signals(-self.status).name}"
        except ValueError:  # a real-time signal
            return f"died of signal {-self.status}"


class Witness:
    """Watches the process `pid` from now on; made while it certainly lives, it can't mistake another one for it."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._fd: int | None = None
        with contextlib.suppress(OSError):  # it is gone already, or the kernel or a filter does not know the call
            self._fd = os.pidfd_open(pid)

    async def ending(self, seconds: float) -> Ending | None:
        """How the process ended; `None` when it still runs `seconds` from now."""
        # A process that closes its sockets because it is killed has its status already, and may lose it at once.
        dying = _stat(self._pid)
        try:
            async with asyncio.timeout(seconds):
                await self._ended()
        except TimeoutError:
            return None
        status = _zombie(self._pid)
        if status is None and self._fd is not None:
            status = _reaped(self._fd)
        if status is None and dying and dying[-1] != "0":
            status = int(dying[-1])
        return Ending(None if status is None else os.waitstatus_to_exitcode(status))

    def close(self) -> None:
        """Stop watching."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    async def _ended(self) -> None:
        if self._fd is None:
            while _lives(self._pid):  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(_LOOK)
            return
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        loop.add_reader(self._fd, gone.set)
        try:
            await gone.wait()
        finally:
            loop.remove_reader(self._fd)


def _stat(pid: int) -> list[str]:
    """The fields of ``/proc/PID/stat`` from the state on (proc(5)); none when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _lives(pid: int) -> bool:
    fields = _stat(pid)
    return bool(fields) and fields[0] not in ("Z", "X")


def _zombie(pid: int) -> int | None:
    """The wait status of a process that its parent has not reaped."""
    fields = _stat(pid)
    return int(fields[-1]) if fields and fields[0] in ("Z", "X") else None


def _reaped(pidfd: int) -> int | None:
    """The wait status of a process that its parent has reaped."""
    try:
        info = fcntl.ioctl(pidfd, _GET_INFO, struct.pack("=Q", _EXIT).ljust(_INFO_BYTES, b"\0"))
    except OSError:  # before 6.15: nobody knows any more
        return None
    (told,), (status,) = struct.unpack_from("=Q", info), struct.unpack_from("=i", info, _EXIT_CODE)
    return int(status) if told & _EXIT else None
