"""Media for the conformance suite: a store, and the way around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from warmseed.stores.base import Store
from warmseed.stores.chain import Chain
from warmseed.testing.store_contract import Medium


class FolderMedium(Medium):
    """Any store over one whose objects are the files below `objects`."""

    def __init__(self, make: Callable[[], Store], objects: Path) -> None:
        self._make, self._objects = make, objects
        self.store = make()

    async def raw_read(self, key: str) -> bytes | None:
        if isinstance(self.store, Chain):
            assert await self.store.flush(20)
        path = self._objects / key
        return await asyncio.to_thread(lambda: path.read_bytes() if path.is_file() else None)

    async def raw_write(self, key: str, data: bytes) -> None:
        def write() -> None:
            (self._objects / key).parent.mkdir(parents=True, exist_ok=True)
            (self._objects / key).write_bytes(data)

        await asyncio.to_thread(write)

    async def reopen(self) -> Store:
        if isinstance(self.store, Chain):
            await self.store.flush(20)
        return self._make()


@asynccontextmanager
async def folder_medium(make: Callable[[], Store], objects: Path) -> AsyncIterator[Medium]:
    """A `FolderMedium` that is closed at the end."""
    await asyncio.to_thread(objects.mkdir, parents=True, exist_ok=True)
    medium = FolderMedium(make, objects)
    try:
        yield medium
    finally:
        await medium.store.aclose()
