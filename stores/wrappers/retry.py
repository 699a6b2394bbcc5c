"""Asks again, a little later, when a store failed fast."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

from warmseed.stores.base import Body, ObjectInfo, ObjectReader, Store
from warmseed.stores.errors import StoreTimeout, StoreUnavailable
from warmseed.stores.wrappers.base import Wrapper

__all__ = ["Retry"]

T = TypeVar("T")


class Retry(Wrapper):
    """Repeats an operation that failed with `StoreUnavailable`, at most `attempts` times in all.

    Never after a timeout, which already cost its deadline, and never once `budget` seconds have passed. A stream
    is only retried until it is open: bytes already handed out can't be taken back.
    """

    suffix = "retry"

    def __init__(self, inner: Store, *, attempts: int = 3, pause: float = 0.1, budget: float = 2.0) -> None:
        super().__init__(inner)
        self._attempts = attempts
        self._pause = pause  # seconds before the second attempt; doubles, with jitter
        self._budget = budget  # seconds after which no further attempt begins

    async def _repeat(self, work: Callable[[], Awaitable[T]]) -> T:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._budget
        for attempt in range(self._attempts):
            try:
                return await work()
            except StoreTimeout:
                raise
            except StoreUnavailable:
                pause = self._pause * 2**attempt * random.uniform(0.5, 1.5)  # noqa: S311 - spreads a fleet's retries
                if attempt + 1 == self._attempts or loop.time() + pause > until:
                    raise
            await asyncio.sleep(pause)
        raise AssertionError("unreachable")  # pragma: no cover

    async def get(self, key: str, *, limit: int) -> bytes | None:
        return await self._repeat(lambda: self.inner.get(key, limit=limit))

    @asynccontextmanager
    async def open(self, key: str, *, limit: int, offset: int = 0) -> AsyncIterator[ObjectReader | None]:
        async with AsyncExitStack() as stack:
            yield await self._repeat(
                lambda: stack.enter_async_context(self.inner.open(key, limit=limit, offset=offset))
            )

    async def put(self, key: str, body: Body | bytes) -> None:
        await self._repeat(lambda: self.inner.put(key, body))

    async def stat(self, key: str) -> ObjectInfo | None:
        return await self._repeat(lambda: self.inner.stat(key))
