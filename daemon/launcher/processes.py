"""Rank processes: started so that they cannot outlive the launcher, watched, stopped, reaped.

Each rank leads a session of its own. So a terminal's Ctrl-C reaches only the launcher, and whatever a rank
started (a Mooncake child, compile workers) can be ended with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from warmseed.blocking import run_blocking
from warmseed.daemon.launcher import guardian
from warmseed.daemon.launcher.guardian import LAUNCH_ID

__all__ = [
    "RANK_COMMAND",
    "ChildProcess",
    "Guardian",
    "die_with_parent",
    "ensure_standard_files",
    "exit_code",
    "reap_orphans",
    "stop_all",
]

_PARENT: Final = "WARMSEED_LAUNCHER_PID"
_PR_SET_PDEATHSIG: Final = 1  # <linux/prctl.h>
_GUARDIAN_WAIT: Final = 5.0  # seconds; it ends at once when nothing is left
_POLL: Final = 0.05  # seconds between looks at a child where the kernel has no pidfd
# What only the launcher may use: a rank that pinged systemd's watchdog would hide a dead launcher.
_NOT_INHERITED: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID")


def die_with_parent() -> None:
    """Have the kernel kill this process (SIGKILL) when its launcher dies. Call it first thing in a child.

    Without a launcher (a rank started by hand) it binds to whichever parent there is. Exits with code 1 if
    the launcher died before this call.
    """
    parent = os.environ.get(_PARENT, "")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The launcher may have died between the fork and the line above: then nobody sends the signal.
    if parent.isdecimal() and os.getppid() != int(parent):
        os._exit(1)
    # A rank's own children compare with the rank, not with the launcher.
    os.environ[_PARENT] = str(os.getpid())


def ensure_standard_files() -> None:
    """Open ``/dev/null`` for each of the files 0 to 2 that is closed.

    Otherwise the next pipe or socket would become standard output, and a stray print would write into it.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != fd:
                os.dup2(opened, fd)
                os.close(opened)


def exit_code(status: int) -> int:
    """The launcher's exit code for a rank's `status` (negative: minus the signal, as `subprocess` has it)."""
    if status < 0:
        return 128 - status
    return status or 1  # a rank must not end by itself: a clean exit is a failure too


class ChildProcess:
    """A process of ours; `done` is set once it is reaped, and then `status` holds its return code."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.pid = popen.pid
        self.done = asyncio.Event()
        self._popen = popen
        self._watch: int | asyncio.Task[None]
        loop = asyncio.get_running_loop()
        try:
            self._watch = os.pidfd_open(popen.pid)
        except OSError:  # an old kernel, or a seccomp filter that does not know the call
            self._watch = loop.create_task(self._poll_until_done())
        else:
            loop.add_reader(self._watch, self.collect)

    @classmethod
    def start(
        cls,
        name: str,
        argv: Sequence[str],
        *,
        launch_id: str,
        pass_fds: Sequence[int] = (),
        env: Mapping[str, str] | None = None,
        output: int | None = None,
    ) -> ChildProcess:
        """Start `argv` in a session of its own, with `env` added to this process's environment.

        Must run on the main thread: the parent death signal follows the thread that forked.

        Raises:
            OSError: if the program can't be started.
        """
        merged = {k: v for k, v in os.environ.items() if k not in _NOT_INHERITED}
        merged |= {**(env or {}), LAUNCH_ID: launch_id, _PARENT: str(os.getpid())}
        popen = subprocess.Popen(  # noqa: S603 (our own command, no shell)
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=merged,
            pass_fds=tuple(pass_fds),
            start_new_session=True,
        )
        return cls(name, popen)

    @property
    def status(self) -> int | None:
        """The return code, minus the signal's number if one ended it; `None` while it runs."""
        return self._popen.returncode

    def collect(self) -> int | None:
        """Reap the process if it has ended, together with all that is left of its session; its status."""
        if self._popen.returncode is None and self._ended():
            # Before the reaping: as long as the dead leader holds its pid, the group's number can't be reused.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self._popen.poll()
            if isinstance(self._watch, int):
                asyncio.get_running_loop().remove_reader(self._watch)
                os.close(self._watch)
            self.done.set()
        return self._popen.returncode

    def signal(self, number: signal.Signals) -> None:
        """Send `number` to the process alone, so that it can end what it started in its own order."""
        if self._popen.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL the process and its whole session."""
        if self._popen.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def stop(self, grace: float) -> None:
        """End the process: SIGTERM, after `grace` seconds SIGKILL, then reaped."""
        await stop_all([self], grace)

    def _ended(self) -> bool:
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True  # someone else reaped it; `poll` then reports what is known

    async def _poll_until_done(self) -> None:
        while self.collect() is None:  # noqa: ASYNC110 (there is nothing to wait on)
            await asyncio.sleep(_POLL)


async def stop_all(
    processes: Sequence[ChildProcess], grace: float, *, hurry: asyncio.Event | None = None
) -> list[ChildProcess]:
    """SIGTERM to all, SIGKILL to what runs `grace` seconds later or when `hurry` is set; those that even that left.

    What SIGKILL leaves hangs in the kernel (a stuck driver or mount) and is given 2 seconds.
    """
    for process in processes:
        process.signal(signal.SIGTERM)
    everyone = asyncio.ensure_future(_all_done(processes))
    impatience = asyncio.ensure_future((hurry or asyncio.Event()).wait())
    try:
        await asyncio.wait({everyone, impatience}, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        for process in processes:
            process.kill()
        await asyncio.wait({everyone}, timeout=2.0)
    finally:
        everyone.cancel()
        impatience.cancel()
    return [process for process in processes if process.collect() is None]


async def _all_done(processes: Sequence[ChildProcess]) -> None:
    for process in processes:
        await process.done.wait()


class Guardian:
    """The process that ends what this one leaves behind if it is killed; see `warmseed.daemon.launcher.guardian`."""

    def __init__(self, launch_id: str) -> None:
        theirs, self._ours = os.pipe2(os.O_CLOEXEC)
        try:
            self._popen = subprocess.Popen(  # noqa: S603 (our own command, no shell)
                [sys.executable, "-I", "-S", guardian.__file__, str(theirs), launch_id],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs],
                start_new_session=True,
            )
        except BaseException:
            os.close(self._ours)
            raise
        finally:
            os.close(theirs)

    async def stop(self) -> None:
        """Let it look once more, and reap it."""
        os.close(self._ours)
        with contextlib.suppress(subprocess.TimeoutExpired):
            await run_blocking(self._popen.wait, timeout=_GUARDIAN_WAIT)


def reap_orphans(ours: Collection[int]) -> int:
    """Reap ended processes that became this one's children because their parents are gone; how many.

    Needed only as process 1 of a container. `ours` are left for whoever waits for them.
    """
    count = 0
    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
        if ended.si_pid in ours:
            break  # its own watcher will; the others come next time
        os.waitpid(ended.si_pid, 0)
        count += 1
    return count


RANK_COMMAND: Final = (sys.executable, "-P", "-m", "warmseed.daemon.rank.rank")
