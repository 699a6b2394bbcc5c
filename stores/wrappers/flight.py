"""One upstream read for everybody who wants the same key at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Generic, TypeVar

from warmseed.stores.base import ObjectInfo, Store
from warmseed.stores.wrappers.base import Wrapper

__all__ = ["Flights", "SingleFlight"]

T = TypeVar("T")


class Flights(Generic[T]):
    """Runs one task a key; later callers of the same key share its result.

    A caller that is cancelled leaves; the task ends when the last one has left.
    """

    def __init__(self) -> None:
        self._tasks: dict[object, tuple[asyncio.Task[T], list[int]]] = {}

    async def share(self, key: object, work: Callable[[], Coroutine[object, object, T]]) -> T:
        """What `work` gives, from the call under way for `key` if there is one."""
        if key not in self._tasks:
            task = asyncio.get_running_loop().create_task(work())
            self._tasks[key] = (task, [0])
            task.add_done_callback(lambda done: self._landed(key, done))
        task, waiting = self._tasks[key]
        waiting[0] += 1
        try:
            return await asyncio.shield(task)
        finally:
            waiting[0] -= 1
            if not waiting[0] and not task.done():
                self._tasks.pop(key, None)
                task.cancel()

    def _landed(self, key: object, task: asyncio.Task[T]) -> None:
        if key in self._tasks and self._tasks[key][0] is task:
            del self._tasks[key]
        if not task.cancelled():
            task.exception()  # seen, even when every caller has left

    async def aclose(self) -> None:
        """Cancel what is still under way."""
        tasks = [task for task, _ in self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class SingleFlight(Wrapper):
    """Concurrent `get` and `stat` of one key are one request to the store.

    Streams are not shared here: their bytes would have to be kept for the slowest reader. The chain fetches a
    stream into its disk tier once, under a lock that also holds for the node's other processes.
    """

    suffix = "flight"

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._gets: Flights[bytes | None] = Flights()
        self._stats: Flights[ObjectInfo | None] = Flights()

    async def get(self, key: str, *, limit: int) -> bytes | None:
        return await self._gets.share((key, limit), lambda: self._get(key, limit))

    async def _get(self, key: str, limit: int) -> bytes | None:
        return await self.inner.get(key, limit=limit)

    async def stat(self, key: str) -> ObjectInfo | None:
        return await self._stats.share(key, lambda: self._stat(key))

    async def _stat(self, key: str) -> ObjectInfo | None:
        return await self.inner.stat(key)

    async def aclose(self) -> None:
        await self._gets.aclose()
        await self._stats.aclose()
        await self.inner.aclose()
