"""A third party's store that brings no caps, deadlines or error wrapping of its own: here they are added."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from warmseed.stores.base import BaseStore, Body, ObjectInfo, ObjectReader, Observer, Store, StoreLimits
from warmseed.stores.errors import ObjectInvalid

__all__ = ["Contained"]


class Contained(BaseStore):
    """Any `Store`, held to the contract."""

    def __init__(self, inner: Store, *, limits: StoreLimits | None = None, observer: Observer | None = None) -> None:
        super().__init__(inner.name, limits=limits, observer=observer)
        self.inner = inner

    @asynccontextmanager
    async def _open(self, key: str, offset: int) -> AsyncIterator[ObjectReader | None]:
        async with self.inner.open(key, limit=self.limits.object_bytes, offset=offset) as reader:
            yield reader

    async def _get(self, key: str, limit: int) -> bytes | None:
        value = await self.inner.get(key, limit=limit)
        if value is not None and not isinstance(value, bytes):
            raise ObjectInvalid(f"{self.name}: {key} came as {type(value).__name__}, not bytes; dropped")
        return value

    async def _write(self, key: str, body: Body) -> None:
        await self.inner.put(key, body)

    async def _stat(self, key: str) -> ObjectInfo | None:
        return await self.inner.stat(key)

    async def aclose(self) -> None:
        await self.inner.aclose()
