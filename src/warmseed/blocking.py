"""The one place where blocking work leaves the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

__all__ = ["BlockingPool", "run_blocking"]

P = ParamSpec("P")
T = TypeVar("T")


class BlockingPool:
    """Up to `threads` worker threads for calls that block.

    The threads are daemons: a call that never returns (a hung network file system) must not keep the
    process from exiting. Whatever can hang gets a pool of its own, so that it starves nobody else.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._name, self._limit = name, threads
        self._work: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._waiting = 0  # threads without work, less the calls already queued for them

    async def run(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """What `work` returns, computed on a worker thread.

        Cancelling the caller stops the wait at once; a call already begun ends by itself, so `work` must
        leave nothing half-visible behind.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(value: T | None, error: BaseException | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(value)  # type: ignore[arg-type]  # None only where T is None

        def call() -> None:
            if future.cancelled():
                return
            value: T | None = None
            failure: BaseException | None = None
            try:
                value = work(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - handed to whoever awaits
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle, value, failure)

        self.submit(call)
        return await future

    def submit(self, work: Callable[[], object]) -> None:
        """Have `work` run soon, without anybody waiting for it; it must not raise."""
        with self._lock:
            self._waiting -= 1
            if self._waiting < 0 and self._threads < self._limit:
                self._threads += 1
                self._waiting += 1
                threading.Thread(target=self._serve, name=f"{self._name}-{self._threads}", daemon=True).start()
        self._work.put(work)

    def _serve(self) -> None:
        while True:
            self._work.get()()
            with self._lock:
                self._waiting += 1


# A pool of its own: a hung disk must not take the threads that name resolution and other libraries share.
_POOL = BlockingPool("warmseed-blocking", 16)


async def run_blocking(work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """What `work` returns, computed on a worker thread.

    Cancelling the caller stops the wait at once; the thread itself ends when the call returns, so
    `work` must leave nothing half-visible behind.
    """
    return await _POOL.run(work, *args, **kwargs)
