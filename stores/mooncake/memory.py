"""The memory that the store shares with its client process, cut into regions."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from warmseed.stores.mooncake.layout import PART, SMALL

__all__ = ["Region", "SharedMemory"]

_KEEP = 30.0  # seconds for which pages that nobody uses are kept
_LARGE, _SMALL = 4, 16  # regions of each size; pages cost nothing until they are used


class Region:
    """A piece of the memory, owned by one caller at a time."""

    def __init__(self, owner: SharedMemory, at: int, size: int) -> None:
        self._owner = owner
        self.at, self.size = at, size  # bytes
        self._used_by: asyncio.Future[object] | None = None

    def read(self, offset: int, size: int) -> bytes:
        """A copy of `size` bytes from `offset` on."""
        return self._owner.map[self.at + offset : self.at + offset + size]

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Put `data` at `offset`."""
        self._owner.map[self.at + offset : self.at + offset + len(data)] = data

    def used_by(self, request: asyncio.Future[object]) -> None:
        """Note that the client process may touch the region until `request` has ended."""
        self._used_by = request

    def release(self) -> None:
        """Give the region to whoever waits for one: now, or when the request that uses it has ended."""
        request, self._used_by = self._used_by, None
        if request is None or request.done():
            self._owner.give_back(self)
        else:
            request.add_done_callback(lambda _: self._owner.give_back(self))


class SharedMemory:
    """An anonymous file that both processes map; regions of one part each, and small ones of two small objects."""

    def __init__(self, name: str) -> None:
        self.size = _LARGE * PART + _SMALL * 2 * SMALL  # bytes
        self.fd = os.memfd_create(f"warmseed-{name}", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.size)
        self.map = mmap.mmap(self.fd, self.size)
        # Last in, first out: a region that was used a moment ago has its pages already.
        self._large: asyncio.LifoQueue[Region] = asyncio.LifoQueue()
        self._small: asyncio.Queue[Region] = asyncio.Queue()
        self._idle: asyncio.TimerHandle | None = None
        for index in range(_LARGE):
            self._large.put_nowait(Region(self, index * PART, PART))
        for index in range(_SMALL):
            self._small.put_nowait(Region(self, _LARGE * PART + index * 2 * SMALL, 2 * SMALL))

    def has_large(self) -> bool:
        """Whether a large region is free right now."""
        return not self._large.empty()

    async def take_large(self) -> Region:
        """A region of `PART` bytes; waits until one is free. The caller releases it."""
        region = await self._large.get()
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        return region

    @asynccontextmanager
    async def small(self) -> AsyncIterator[Region]:
        """A region of twice `SMALL` bytes, for the length of the block."""
        region = await self._small.get()
        try:
            yield region
        finally:
            region.release()

    def give_back(self, region: Region) -> None:
        """Take a region back; when no large one was in use for a while, their memory returns to the system."""
        if region.size != PART:
            self._small.put_nowait(region)
            return
        self._large.put_nowait(region)
        if self._large.qsize() == _LARGE and not self.map.closed:
            # Not at once: filling fresh pages costs as much processor time as the transfer itself.
            self._idle = asyncio.get_running_loop().call_later(_KEEP, self._free)

    def _free(self) -> None:
        self._idle = None
        if not self.map.closed and self._large.qsize() == _LARGE:
            self.map.madvise(mmap.MADV_REMOVE, 0, _LARGE * PART)

    def close(self) -> None:
        """Unmap; the client process must be gone."""
        if self._idle is not None:
            self._idle.cancel()
        if not self.map.closed:
            self.map.close()
            os.close(self.fd)
