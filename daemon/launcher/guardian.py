"""Ends what a killed launcher leaves behind.

The kernel kills ranks with their launcher, but not what the ranks had started: compile workers, an engine in
rehearsal and its own children. A guardian waits for the end of a pipe that only the launcher holds, then kills every
process that carries the launch's mark in its environment, however far it has moved away.

Run as a file by a bare interpreter (``python -I -S guardian.py FD LAUNCH-ID``): a few megabytes, nothing imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

__all__ = ["LAUNCH_ID", "kill_strays", "strays"]

LAUNCH_ID = "WARMSEED_LAUNCH_ID"  # in the environment of everything that one launcher started
_ROUNDS = 200  # looks for strays: a process may fork while it is being looked for
_PAUSE = 0.05  # seconds between two looks


def strays(launch_id: str) -> list[int]:
    """Pids of this user's processes that the launch `launch_id` started, this one excepted: read from ``/proc``."""
    marker = f"{LAUNCH_ID}={launch_id}".encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as environment:
            if marker in environment.read().split(b"\0"):
                found.append(int(name))
    return found


def kill_strays(launch_id: str) -> list[int]:
    """SIGKILL everything that `strays` finds; what there was."""
    found = strays(launch_id)
    for pid in found:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return found


def _guard(fd: int, launch_id: str) -> None:
    # Whoever stops a whole control group means the launcher; this one follows when the launcher is gone.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(fd, 1):
        continue
    for _ in range(_ROUNDS):
        if not kill_strays(launch_id):
            return
        time.sleep(_PAUSE)


if __name__ == "__main__":
    _guard(int(sys.argv[1]), sys.argv[2])
