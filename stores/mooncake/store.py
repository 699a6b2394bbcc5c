"""A Mooncake store as a tier: a lossy cache in other machines' memory, read and written through a child process."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager

from warmseed.blocking import run_blocking
from warmseed.stores.base import (
    CHUNK,
    BaseStore,
    Body,
    ObjectInfo,
    ObjectReader,
    Observer,
    PieceReader,
    StoreLimits,
    length_from,
)
from warmseed.stores.errors import ObjectInvalid, StoreFull, StoreTimeout, StoreUnavailable
from warmseed.stores.mooncake.config import MooncakeConfig
from warmseed.stores.mooncake.helper import Helper
from warmseed.stores.mooncake.layout import PART, SMALL, Parts, decode, is_raw, new_parts
from warmseed.stores.mooncake.memory import Region, SharedMemory

__all__ = ["MooncakeStore"]

_MISSING = frozenset({-704, -703})  # not found; a put that is under way, or whose writer died
_FULL = frozenset({-200, -1700})
_UNKNOWN = frozenset({-800, -901})  # transfer failed, call timed out: native code may still be at work
_LEASED = -706


class MooncakeStore(BaseStore):
    """Objects in a Mooncake store. Small ones are hard-pinned; parts of large ones may be evicted at any time.

    Reading answers a miss for whatever is missing, unfinished or partly evicted. Mooncake has no authentication:
    any client of the master can read, replace and delete everything.
    """

    def __init__(
        self,
        config: MooncakeConfig,
        *,
        name: str = "mooncake",
        python: str = "",
        limits: StoreLimits | None = None,
        observer: Observer | None = None,
    ) -> None:
        super().__init__(name, limits=limits, observer=observer)
        self._memory = SharedMemory(name)
        self._cleaning: set[asyncio.Task[None]] = set()
        self._helper = Helper(
            config,
            name=name,
            python=python,
            memory=self._memory.fd,
            memory_bytes=self._memory.size,
            kill_after=self.limits.deadline,
        )

    @property
    def client_pid(self) -> int | None:
        """The process id of the client process, `None` while there is none."""
        return self._helper.pid

    # Reading -----------------------------------------------------------------------------------

    async def _get(self, key: str, limit: int) -> bytes | None:
        found = await self._look(key)
        if found is None or isinstance(found, bytes):
            return found
        if _size(found) > limit:
            raise ObjectInvalid(f"{self.name}: {key} states {_size(found)} bytes, over the limit of {limit}; not read")
        return b"".join([piece async for piece in self._pieces(key, found, 0)])

    @asynccontextmanager
    async def _open(self, key: str, offset: int) -> AsyncIterator[ObjectReader | None]:
        found = await self._look(key)
        if found is None:
            yield None
        elif isinstance(found, bytes):
            length_from(len(found), offset, self.name, key)
            yield PieceReader.of(found[offset:])
        else:
            size = length_from(_size(found), offset, self.name, key)
            pieces = self._pieces(key, found, offset)
            try:
                yield PieceReader(size, pieces)
            finally:
                await pieces.aclose()

    async def _stat(self, key: str) -> ObjectInfo | None:
        found = await self._look(key)
        if found is None:
            return None
        return ObjectInfo(key, len(found) if isinstance(found, bytes) else _size(found))

    async def _look(self, key: str) -> bytes | Parts | int | None:
        """The small object itself, its parts, or the size of a large one that lies raw (another writer's)."""
        async with self._memory.small() as region:
            size = await self._number("fetch", region, name=key, at=region.at, room=region.size)
            if size in _MISSING:
                return None
            if size < 0:
                raise self._failure(size, f"reading {key}")
            if size > SMALL:
                return size
            data = region.read(0, size)
        parts = decode(data, store=self.name, key=key)
        if parts is None:
            return data
        sizes = await self._numbers("sizes", names=parts.names) if parts.names else []
        for found, expected in zip(sizes, parts.sizes(), strict=True):
            if found in _MISSING:
                return None  # evicted: the list outlives its parts
            if found < 0:
                raise self._failure(found, f"looking for {key}")
            if found != expected:
                raise ObjectInvalid(f"{self.name}: a part of {key} has {found} bytes, not {expected}; dropped")
        return parts

    async def _pieces(self, key: str, found: Parts | int, offset: int) -> AsyncGenerator[bytes, None]:
        """The object's bytes; while one part is handed out, the next is on its way."""
        wanted = _raw_parts(key, found, offset) if isinstance(found, int) else list(found.from_offset(offset))
        ahead: asyncio.Task[tuple[Region, int]] | None = None
        try:
            for index, part in enumerate(wanted):
                region, size = await (ahead if ahead is not None else self._load(key, part))
                ahead = None
                try:
                    if index + 1 < len(wanted) and self._memory.has_large():
                        ahead = asyncio.get_running_loop().create_task(self._load(key, wanted[index + 1]))
                    for at in range(0, size, CHUNK):
                        yield region.read(at, min(CHUNK, size - at))
                finally:
                    region.release()
        finally:
            if ahead is not None:
                ahead.cancel()
                with contextlib.suppress(asyncio.CancelledError, StoreUnavailable, ObjectInvalid, StoreFull):
                    region, _ = await ahead
                    region.release()

    async def _load(self, key: str, part: tuple[str, int, int]) -> tuple[Region, int]:
        name, offset, whole = part
        size = min(PART, whole - offset)
        region = await self._memory.take_large()
        try:
            got = await self._number("load", region, name=name, at=region.at, size=size, offset=offset, whole=whole)
            if got in _MISSING:
                raise ObjectInvalid(f"{self.name}: a part of {key} was evicted while it was read; dropped")
            if got != size:
                raise self._failure(got if got < 0 else -1, f"reading a part of {key}")
        except BaseException:
            region.release()
            raise
        return region, size

    # Writing -----------------------------------------------------------------------------------

    async def _write(self, key: str, body: Body) -> None:
        await self._check_file(key, body)
        old = await self._list_under(key)
        if body.size <= SMALL and is_raw(data := await body.read()):
            await self._replace(key, data)
        else:
            parts = new_parts(key, body.size)
            written: list[str] = []
            try:
                await self._write_parts(key, parts, body, written)
                await self._check_parts(key, parts)
                await self._replace(key, parts.encode())
            except BaseException:
                self._forget_later(written)
                raise
        if old is not None:
            await self._remove(old.names, force=False)

    async def _check_parts(self, key: str, parts: Parts) -> None:
        """That no part was evicted to make room for a later one; the question also leases them for a while."""
        if parts.names and await self._numbers("sizes", names=parts.names) != parts.sizes():
            raise StoreFull(f"{self.name}: no room for {key}: its first parts were evicted for the last; nothing kept")

    async def _check_file(self, key: str, body: Body) -> None:
        if body.path is not None:
            try:
                status = await run_blocking(os.stat, body.path)
            except OSError as error:
                raise ObjectInvalid(
                    f"{self.name}: the file of {key} can't be read ({error.strerror}); nothing was stored"
                ) from error
            if status.st_size != body.size:
                raise ObjectInvalid(
                    f"{self.name}: the file of {key} has {status.st_size} bytes, not {body.size}; nothing was stored"
                )

    async def _write_parts(self, key: str, parts: Parts, body: Body, written: list[str]) -> None:
        sizes = parts.sizes()
        if body.path is not None and body.size:
            path = str(body.path)
            for index, (name, size) in enumerate(zip(parts.names, sizes, strict=True)):
                written.append(name)
                code = await self._number("save_file", name=name, path=path, offset=index * PART, size=size)
                self._expect(code, size, key)
            return
        region = await self._memory.take_large()
        try:
            number = filled = 0
            async for whole in body.chunks():  # raises when it is longer or shorter than it said
                piece = memoryview(whole)
                while piece:
                    take = piece[: sizes[number] - filled]
                    await run_blocking(region.write, filled, take)
                    filled, piece = filled + len(take), piece[len(take) :]
                    if filled == sizes[number]:
                        name = parts.names[number]
                        written.append(name)
                        self._expect(
                            await self._number("save", region, name=name, at=region.at, size=filled), filled, key
                        )
                        number, filled = number + 1, 0
        finally:
            region.release()

    def _expect(self, code: int, size: int, key: str) -> None:
        if code != size:
            raise self._failure(code if code < 0 else -1, f"writing a part of {key}")

    async def _replace(self, key: str, data: bytes) -> None:
        async with self._memory.small() as region:
            region.write(0, data)
            code = await self._number("replace", region, name=key, at=region.at, size=len(data))
        if code != len(data):
            raise self._failure(code if code < 0 else -1, f"writing {key}")

    async def _list_under(self, key: str) -> Parts | None:
        """The parts that a write of `key` makes useless."""
        async with self._memory.small() as region:
            size = await self._number("fetch", region, name=key, at=region.at, room=region.size)
            if 0 < size <= SMALL:
                with contextlib.suppress(ObjectInvalid):
                    return decode(region.read(0, size), store=self.name, key=key)
        return None

    async def delete(self, key: str) -> bool:
        """Remove the object, readers or not; whether there was one. (Mooncake's clients can't list.)"""
        old = await self._list_under(key)
        codes = await self._numbers("remove", names=[key, *(old.names if old else [])], force=True)
        return codes[0] == 0

    async def _remove(self, names: Sequence[str], *, force: bool) -> None:
        """Let parts go; without `force` those that somebody is reading stay until they are evicted."""
        if names:
            codes = await self._numbers("remove", names=list(names), force=force)
            for code in codes:
                if code < 0 and code not in _MISSING and code != _LEASED:
                    raise self._failure(code, "removing old parts")

    def _forget_later(self, names: Sequence[str]) -> None:
        """Remove the parts of a write that failed, without making its caller wait."""
        if names and self._helper.pid is not None:
            task = asyncio.get_running_loop().create_task(self._remove(names, force=True))
            self._cleaning.add(task)
            task.add_done_callback(self._cleaning.discard)
            task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def aclose(self) -> None:
        if self._cleaning:
            await asyncio.wait(self._cleaning, timeout=1)
        await self._helper.aclose()
        self._memory.close()

    # The child ---------------------------------------------------------------------------------

    async def _number(self, method: str, region: Region | None = None, **arguments: object) -> int:
        request = await self._helper.submit(method, arguments)
        if region is not None:
            region.used_by(request)
        answer = await asyncio.shield(request)
        if not isinstance(answer, int):
            raise StoreUnavailable(f"{self.name}: the client answered {method} with no number; treated as a miss")
        return answer

    async def _numbers(self, method: str, **arguments: object) -> list[int]:
        answer = await asyncio.shield(await self._helper.submit(method, arguments))
        if not isinstance(answer, list) or not all(isinstance(code, int) for code in answer):
            raise StoreUnavailable(f"{self.name}: the client answered {method} with no numbers; treated as a miss")
        return answer

    def _failure(self, code: int, doing: str) -> Exception:
        if code in _UNKNOWN:
            self._helper.kill(f"{doing} ended with {code}, whose outcome nobody knows")
        if code == -901:
            return StoreTimeout(f"{self.name}: {doing}: the master does not answer (-901); treated as a miss")
        if code in _FULL:
            return StoreFull(f"{self.name}: {doing}: no room ({code}); nothing was kept")
        if code in _MISSING:
            return StoreUnavailable(f"{self.name}: {doing}: it vanished at once ({code}); not kept")
        words = {-101: "no storage node", -800: "a storage node is gone", -900: "the master is gone"}
        return StoreUnavailable(f"{self.name}: {doing}: {words.get(code, 'failed')} ({code}); treated as a miss")


def _size(found: Parts | int) -> int:
    return found if isinstance(found, int) else found.size


def _raw_parts(key: str, size: int, offset: int) -> list[tuple[str, int, int]]:
    """A large object that lies raw, as pieces to load: (name, offset, whole length)."""
    return [(key, at, size) for at in range(offset, size, PART)]
