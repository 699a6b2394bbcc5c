"""A store that is another store, with something added."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from warmseed.stores.base import Body, ObjectInfo, ObjectReader, Store

__all__ = ["Wrapper", "innermost"]


class Wrapper:
    """Passes everything on to `inner`; subclasses change what they add to."""

    suffix = ""  # how the wrapper shows in the store's name

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    @property
    def name(self) -> str:
        return f"{self.inner.name}|{self.suffix}" if self.suffix else self.inner.name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    async def get(self, key: str, *, limit: int) -> bytes | None:
        return await self.inner.get(key, limit=limit)

    def open(self, key: str, *, limit: int, offset: int = 0) -> AbstractAsyncContextManager[ObjectReader | None]:
        return self.inner.open(key, limit=limit, offset=offset)

    async def put(self, key: str, body: Body | bytes) -> None:
        await self.inner.put(key, body)

    async def stat(self, key: str) -> ObjectInfo | None:
        return await self.inner.stat(key)

    async def aclose(self) -> None:
        await self.inner.aclose()


def innermost(store: Store) -> Store:
    """The back end under all wrappers, for operators' commands (`PrunableStore`)."""
    while isinstance(store, Wrapper):
        store = store.inner
    return store
