"""Tier zero: this node's own disk. Atomic, fsynced, bounded by least recent use, shared by the node's processes.

Below one folder (``<cache folder>/store``):

    objects/<key>    what is stored
    staging/         what is being written; swept at start, never read
    pins/<key>       empty files: these keys are not evicted
    flights/         locks that let one process of the node fetch a key for all
    lock             held while room is made
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from warmseed.blocking import BlockingPool
from warmseed.filelock import file_lock
from warmseed.stores.base import CHUNK, Body, ObjectInfo, ObjectReader, Observer, StoreLimits, check_key, length_from
from warmseed.stores.errors import StoreFull
from warmseed.stores.files import Tree, Writing, is_read_only
from warmseed.stores.filestore import FileStore

__all__ = ["DiskStore"]

_log = logging.getLogger(__name__)
_RESCAN = 30.0  # seconds after which other processes' writes are counted again
_LOCK_SECONDS = 10.0  # for other threads and processes of this node, which hold it for milliseconds
_MEMORY = 64 << 20  # bytes kept in memory when the folder can't be written
T = TypeVar("T")


class DiskStore(FileStore):
    """Objects on the local disk; at most `size_limit` bytes of them, the least recently used go first.

    A folder that can't be written (read-only image, foreign owner) is warned about once; objects up to 64 MiB in
    total then live in memory, so that this process is still served.
    """

    def __init__(
        self,
        folder: Path,
        *,
        size_limit: int = 64 << 30,
        name: str = "disk",
        limits: StoreLimits | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.folder, self.size_limit = folder, size_limit
        tree = Tree(folder / "objects", folder / "staging", private=True)
        super().__init__(
            name, tree, BlockingPool(f"warmseed-{name}", 8), reserve=True, limits=limits, observer=observer
        )
        self._pins = Tree(folder / "pins", folder / "staging", private=True)
        self._ready = False
        self._used, self._scanned = 0, float("-inf")  # bytes, monotonic seconds
        self._memory: OrderedDict[str, bytes] | None = None  # only where the folder can't be written

    # Operators ---------------------------------------------------------------------------------

    async def pin(self, key: str) -> None:
        """Keep `key` whatever else must go, also across restarts, whether or not it is here yet.

        Raises:
            OSError: when the pin can't be written.
            InvalidKey: for a key that no store accepts.
        """
        check_key(key)
        await self._blocking(lambda: Writing(self._pins, key, 0, reserve=False).whole(b""))

    async def unpin(self, key: str) -> bool:
        """Let `key` be evicted again; whether it was pinned."""
        check_key(key)
        return await self._blocking(lambda: self._pins.delete(key))

    async def pinned(self) -> frozenset[str]:
        """The keys that are never evicted."""
        return await self._blocking(lambda: frozenset(e.key for e in self._pins.entries()))

    async def evict(self, size_limit: int) -> int:
        """Shrink to `size_limit` bytes now; how many bytes went. Pinned objects stay."""

        def work() -> int:
            with file_lock(self.folder / "lock", _LOCK_SECONDS):
                before = self._scan()
                self._shrink(size_limit)
                return before - self._used

        return await self._blocking(work)

    async def used(self) -> int:
        """Bytes on disk, unfinished writes included."""
        return await self._blocking(self._scan)

    def body(self, key: str, size: int) -> Body:
        """The object as a body to write elsewhere; it ends as `ObjectInvalid` if the object changes meanwhile."""

        async def pieces() -> AsyncIterator[bytes]:
            async with self.open(key, limit=size) as reader:
                if reader is not None:
                    async for piece in reader:
                        yield piece

        return Body(size, pieces, self._tree.objects / key if self._memory is None else None)

    # The contract ------------------------------------------------------------------------------

    async def _blocking(self, work: Callable[[], T]) -> T:
        if self._ready:
            return await self.pool.run(work)

        def prepared() -> T:
            if not self._ready:
                self._prepare()
            return work()

        return await self.pool.run(prepared)

    def _prepare(self) -> None:
        try:
            self._tree.create()
            self._pins.create()
            swept = self._tree.sweep()
            if swept:
                _log.info("swept %d unfinished writes store=%s folder=%s", swept, self.name, self.folder)
        except OSError as error:
            if is_read_only(error):
                self._go_to_memory(error)
            else:
                raise
        self._ready = True

    def _go_to_memory(self, error: OSError) -> None:
        if self._memory is None:
            self._memory = OrderedDict()
            _log.warning(
                "%s: %s can't be written (%s): objects are kept in memory and lost at exit; make the folder writable "
                "or name another with --cache-root",
                self.name,
                self.folder,
                error.strerror,
            )

    @asynccontextmanager
    async def _open(self, key: str, offset: int) -> AsyncIterator[ObjectReader | None]:
        if self._memory is not None and (data := self._memory.get(key)) is not None:
            length_from(len(data), offset, self.name, key)
            yield _MemoryReader(data[offset:])
            return
        async with super()._open(key, offset) as reader:
            yield reader

    async def _get(self, key: str, limit: int) -> bytes | None:
        if self._memory is not None and (data := self._memory.get(key)) is not None:
            return data
        return await super()._get(key, limit)

    async def _stat(self, key: str) -> ObjectInfo | None:
        if self._memory is not None and (data := self._memory.get(key)) is not None:
            return ObjectInfo(key, len(data))
        return await super()._stat(key)

    async def _write(self, key: str, body: Body) -> None:
        if self._memory is None:
            try:
                await super()._write(key, body)
                return
            except OSError as error:
                if not is_read_only(error):
                    raise
                self._go_to_memory(error)
        await self._remember(key, body)

    async def _delete(self, key: str) -> bool:
        kept = self._memory is not None and self._memory.pop(key, None) is not None
        return await super()._delete(key) or kept

    async def _remember(self, key: str, body: Body) -> None:
        if self._memory is None or body.size > _MEMORY // 2:
            raise StoreFull(
                f"{self.name}: {self.folder} can't be written and {key} ({body.size} bytes) is too large to keep in "
                "memory; it stays where it came from"
            )
        data = await body.read()
        self._memory[key] = data
        self._memory.move_to_end(key)
        while sum(map(len, self._memory.values())) > _MEMORY:
            self._memory.popitem(last=False)

    # Room --------------------------------------------------------------------------------------

    def _begin(self, writing: Writing, size: int) -> None:
        if size > self.size_limit:
            raise StoreFull(f"{self.name}: an object of {size} bytes does not fit into {self.size_limit}; not kept")
        with file_lock(self.folder / "lock", _LOCK_SECONDS):
            if time.monotonic() - self._scanned > _RESCAN or self._used + size > self.size_limit:
                self._scan()
                self._shrink(self.size_limit - size)
                if self._used + size > self.size_limit:
                    raise StoreFull(
                        f"{self.name}: no room for {size} bytes: {self._used} of {self.size_limit} are pinned or being "
                        "written; unpin something or raise the limit"
                    )
            writing.begin()
            self._used += size

    def _scan(self) -> int:
        unfinished = 0
        with contextlib.suppress(FileNotFoundError), os.scandir(self._tree.staging) as found:
            for item in found:
                with contextlib.suppress(OSError):
                    unfinished += item.stat(follow_symlinks=False).st_size
        self._used = unfinished + sum(entry.size for entry in self._tree.entries())
        self._scanned = time.monotonic()
        return self._used

    def _shrink(self, target: int) -> None:
        if self._used <= target:
            return
        pinned = {entry.key for entry in self._pins.entries()}
        for entry in sorted(self._tree.entries(), key=lambda e: e.used):
            if self._used <= target:
                return
            if entry.key not in pinned and self._tree.delete(entry.key):
                self._used -= entry.size
                _log.info("evicted key=%s bytes=%d store=%s", entry.key, entry.size, self.name)


class _MemoryReader:
    def __init__(self, data: bytes) -> None:
        self._data = data

    @property
    def size(self) -> int:
        return len(self._data)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for at in range(0, len(self._data), CHUNK):
            yield self._data[at : at + CHUNK]
