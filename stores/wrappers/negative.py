"""Remembers for a moment what a store does not have."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from warmseed.stores.base import Body, ObjectInfo, ObjectReader, Store
from warmseed.stores.wrappers.base import Wrapper

__all__ = ["NegativeCache"]


class NegativeCache(Wrapper):
    """Answers a key that was missing less than `lifetime` seconds ago with a miss, without asking.

    Short, because another node may publish at any time; a `put` through this store is seen at once.
    """

    suffix = "negative"

    def __init__(
        self,
        inner: Store,
        *,
        lifetime: float = 2.0,
        keys: int = 4096,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(inner)
        self._lifetime, self._keys, self._clock = lifetime, keys, clock
        self._missing: OrderedDict[str, float] = OrderedDict()  # key -> when it may be asked for again
        self._puts = 0  # so that a miss that was on its way during a put is not remembered

    def _is_missing(self, key: str) -> bool:
        return self._missing.get(key, 0.0) > self._clock()

    def _remember(self, key: str, puts: int) -> None:
        if puts != self._puts:
            return
        self._missing[key] = self._clock() + self._lifetime
        self._missing.move_to_end(key)
        if len(self._missing) > self._keys:
            self._missing.popitem(last=False)

    async def get(self, key: str, *, limit: int) -> bytes | None:
        if self._is_missing(key):
            return None
        puts = self._puts
        value = await self.inner.get(key, limit=limit)
        if value is None:
            self._remember(key, puts)
        return value

    @asynccontextmanager
    async def open(self, key: str, *, limit: int, offset: int = 0) -> AsyncIterator[ObjectReader | None]:
        if self._is_missing(key):
            yield None
            return
        puts = self._puts
        async with self.inner.open(key, limit=limit, offset=offset) as reader:
            if reader is None:
                self._remember(key, puts)
            yield reader

    async def put(self, key: str, body: Body | bytes) -> None:
        try:
            await self.inner.put(key, body)
        finally:
            self._puts += 1
            self._missing.pop(key, None)

    async def stat(self, key: str) -> ObjectInfo | None:
        if self._is_missing(key):
            return None
        puts = self._puts
        info = await self.inner.stat(key)
        if info is None:
            self._remember(key, puts)
        return info
