"""One process of the node fetches a key; the others wait for its result instead of fetching it too."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from warmseed.blocking import run_blocking

__all__ = ["HostLock"]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.1  # seconds between looks at a lock that another process holds


class HostLock:
    """``async with HostLock(folder, key) as lock``: the node-wide lock of `key`, if nobody else has it.

    Nothing here can hurt: a folder that can't be written means no lock, and a holder that dies lets go (the
    kernel sees to it).
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._path = folder / hashlib.sha256(key.encode()).hexdigest()[:32]
        self._fd = -1
        self._told = 0.0
        self.mine = False  # whether this process may fetch; also where locks do not work
        self.busy = False  # whether another process holds the lock

    async def __aenter__(self) -> Self:
        await run_blocking(self._take)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    def alive(self) -> None:
        """Tell the waiting processes that the fetch goes on."""
        now = time.monotonic()
        if self._fd >= 0 and now - self._told > 1:
            self._told = now
            with contextlib.suppress(OSError):
                os.utime(self._fd)

    async def wait(self, patience: float) -> None:
        """Until the holder lets go, or gave no sign of life for `patience` seconds."""
        pause = _FIRST_PAUSE
        loop = asyncio.get_running_loop()
        seen, last = loop.time(), await run_blocking(self._sign)
        while await run_blocking(self._taken):
            sign = await run_blocking(self._sign)
            if sign != last:
                seen, last = loop.time(), sign
            if loop.time() - seen > patience:
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _take(self) -> None:
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(self._path, flags, 0o600)
        except OSError:
            self.mine = True
            return
        self.busy = self._taken()
        self.mine = not self.busy

    def _taken(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def _sign(self) -> int:
        try:
            return os.fstat(self._fd).st_mtime_ns
        except OSError:
            return 0

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self._close()
