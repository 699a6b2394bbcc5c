"""What the stores that keep objects as files have in common."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from warmseed.blocking import BlockingPool
from warmseed.stores.base import CHUNK, Body, ObjectInfo, ObjectReader, Observer, StoreLimits, length_from
from warmseed.stores.errors import ObjectInvalid
from warmseed.stores.files import Entry, OpenFile, Tree, Writing, info_of
from warmseed.stores.prunable import BasePrunableStore

__all__ = ["FileReader", "FileStore"]

T = TypeVar("T")


class FileStore(BasePrunableStore):
    """A store over a `Tree`; one worker thread an operation, from a pool that a hung file system may block."""

    def __init__(
        self,
        name: str,
        tree: Tree,
        pool: BlockingPool,
        *,
        reserve: bool,
        limits: StoreLimits | None = None,
        observer: Observer | None = None,
    ) -> None:
        super().__init__(name, limits=limits, observer=observer)
        self._tree, self.pool, self._reserve = tree, pool, reserve

    async def _blocking(self, work: Callable[[], T]) -> T:
        return await self.pool.run(work)

    @asynccontextmanager
    async def _open(self, key: str, offset: int) -> AsyncIterator[ObjectReader | None]:
        found = await self._blocking(lambda: self._tree.open(key))
        if found is None:
            yield None
            return
        try:
            found.touch()
            yield FileReader(found, self.pool, offset, length_from(found.status.st_size, offset, self.name, key))
        finally:
            found.close()

    async def _get(self, key: str, limit: int) -> bytes | None:
        def read() -> bytes | None:
            found = self._tree.open(key)
            if found is None:
                return None
            try:
                size = found.status.st_size
                if size > limit:
                    raise ObjectInvalid(f"{self.name}: {key} has {size} bytes, over the limit of {limit}; not read")
                found.touch()
                data = found.read_whole()
                if len(data) != size:
                    raise ObjectInvalid(f"{self.name}: {key} stopped after {len(data)} of {size} bytes; dropped")
                return data
            finally:
                found.close()

        return await self._blocking(read)

    async def _write(self, key: str, body: Body) -> None:
        writing = Writing(self._tree, key, body.size, reserve=self._reserve)
        if body.size <= CHUNK:
            data = await body.read()
            await self._blocking(lambda: self._write_whole(writing, data))
            return
        finished = False
        try:
            await self._blocking(lambda: self._begin(writing, body.size))
            async for piece in body.chunks():
                await self.pool.run(writing.write, piece)
            await self._blocking(writing.commit)
            finished = True
        except Exception:
            await self.pool.run(writing.abort)
            finished = True
            raise
        finally:
            if not finished:  # cancelled: whoever waits is gone, and the disk may hang
                self.pool.submit(writing.abort)

    def _write_whole(self, writing: Writing, data: bytes) -> None:
        try:
            self._begin(writing, len(data))
            writing.write(data)
            writing.commit()
        finally:
            writing.abort()

    def _begin(self, writing: Writing, size: int) -> None:
        """Make room and start; a store with a size limit evicts here."""
        writing.begin()

    async def _stat(self, key: str) -> ObjectInfo | None:
        status = await self._blocking(lambda: self._tree.stat(key))
        return None if status is None else info_of(key, status)

    async def _list(self, prefix: str) -> AsyncGenerator[ObjectInfo, None]:
        for entry in await self.entries(prefix):
            yield ObjectInfo(entry.key, entry.size, entry.modified)

    async def entries(self, prefix: str = "") -> Sequence[Entry]:
        """The same with times of last use, for garbage collection."""
        return await self._blocking(lambda: sorted(self._tree.entries(prefix, complete=True), key=lambda e: e.key))

    async def _delete(self, key: str) -> bool:
        return await self._blocking(lambda: self._tree.delete(key))


class FileReader:
    """An open file as an `ObjectReader`."""

    def __init__(self, file: OpenFile, pool: BlockingPool, offset: int, size: int) -> None:
        self._file, self._pool, self._offset, self._size = file, pool, offset, size

    @property
    def size(self) -> int:
        return self._size

    async def __aiter__(self) -> AsyncIterator[bytes]:
        at, end = self._offset, self._offset + self._size
        while at < end:
            piece = await self._pool.run(self._file.read, at, min(CHUNK, end - at))
            if not piece:
                return  # cut since it was opened; whoever counts will notice
            at += len(piece)
            yield piece
