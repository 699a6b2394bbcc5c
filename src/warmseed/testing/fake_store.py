"""A store in memory whose faults are programmed: how the rest behaves when a store is slow, broken or lying."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from warmseed.stores.base import CHUNK, Body, ObjectInfo, ObjectReader, Observer, StoreLimits, length_from
from warmseed.stores.errors import StoreRefused
from warmseed.stores.prunable import BasePrunableStore

__all__ = ["Call", "FakeStore", "Faults"]


@dataclass(frozen=True, slots=True)
class Call:
    """One operation that reached the store."""

    operation: str  # ``open`` (also for `get`), ``put``, ``stat``, ``list`` or ``delete``
    key: str


@dataclass(slots=True)
class Faults:
    """What is wrong with a store; set a field at any time, and the next operation meets it."""

    latency: float = 0.0  # seconds before every operation
    hang: bool = False  # no operation ever ends
    drop: bool = False  # every operation fails as a broken connection does
    flap: int = 0  # every n-th operation succeeds, the others are dropped; 0: none
    refuse: bool = False  # puts are not allowed
    full: bool = False  # puts find no space
    truncate: int | None = None  # bytes after which a read ends, as if that were all
    cut: int | None = None  # bytes after which a read's connection breaks
    stall: int | None = None  # bytes after which a read never goes on
    states: int | None = None  # the length that reads and stats state, whatever is sent
    lie: Callable[[bytes], bytes] | None = None  # what reads send instead
    # Which of them latency, hang, drop and flap meet.
    operations: frozenset[str] = frozenset({"open", "put", "stat", "list", "delete"})


class FakeStore(BasePrunableStore):
    """Objects in a dict, the faults in `faults`, every operation that arrived in `calls`."""

    def __init__(
        self,
        name: str = "fake",
        *,
        limits: StoreLimits | None = None,
        observer: Observer | None = None,
        objects: dict[str, bytes] | None = None,
    ) -> None:
        super().__init__(name, limits=limits, observer=observer)
        self.objects = {} if objects is None else objects
        self.faults = Faults()
        self.calls: list[Call] = []
        self.waiting = 0  # operations that hang right now
        self.closed = False

    def count(self, operation: str, key: str | None = None) -> int:
        """How many such operations arrived."""
        return sum(call.operation == operation and key in (None, call.key) for call in self.calls)

    async def _meet(self, operation: str, key: str) -> None:
        self.calls.append(Call(operation, key))
        faults = self.faults
        if operation not in faults.operations:
            return
        if faults.latency:
            await asyncio.sleep(faults.latency)
        if faults.hang:
            await self._hang()
        if faults.drop or (faults.flap and len(self.calls) % faults.flap):
            raise ConnectionResetError(errno.ECONNRESET, "the fake store dropped the connection")

    async def _hang(self) -> None:
        self.waiting += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.waiting -= 1

    @asynccontextmanager
    async def _open(self, key: str, offset: int) -> AsyncIterator[ObjectReader | None]:
        await self._meet("open", key)
        data = self.objects.get(key)
        if data is None:
            yield None
            return
        length_from(len(data), offset, self.name, key)
        yield _FakeReader(self, data[offset:])

    async def _write(self, key: str, body: Body) -> None:
        await self._meet("put", key)
        if self.faults.refuse:
            raise StoreRefused(f"{self.name}: {key}: this fake store is read-only")
        data = await body.read()
        if self.faults.full:
            raise OSError(errno.ENOSPC, "the fake store is full")
        self.objects[key] = data

    async def _stat(self, key: str) -> ObjectInfo | None:
        await self._meet("stat", key)
        data = self.objects.get(key)
        if data is None:
            return None
        return ObjectInfo(key, len(data) if self.faults.states is None else self.faults.states)

    async def _list(self, prefix: str) -> AsyncGenerator[ObjectInfo, None]:
        await self._meet("list", prefix)
        for key, data in sorted(self.objects.items()):
            if key.startswith(prefix):
                yield ObjectInfo(key, len(data))

    async def _delete(self, key: str) -> bool:
        await self._meet("delete", key)
        return self.objects.pop(key, None) is not None

    async def aclose(self) -> None:
        self.closed = True


class _FakeReader:
    def __init__(self, store: FakeStore, data: bytes) -> None:
        self._store, faults = store, store.faults
        self._data = data if faults.lie is None else faults.lie(data)
        self._size = len(self._data) if faults.states is None else faults.states

    @property
    def size(self) -> int:
        return self._size

    async def __aiter__(self) -> AsyncIterator[bytes]:
        faults = self._store.faults
        ends = [n for n in (faults.truncate, faults.cut, faults.stall) if n is not None]
        data = self._data[: min(ends)] if ends else self._data
        for at in range(0, len(data), CHUNK):
            yield data[at : at + CHUNK]
        if faults.cut is not None:
            raise ConnectionResetError(errno.ECONNRESET, "the fake store cut the connection")
        if faults.stall is not None:
            await self._store._hang()  # noqa: SLF001 - one module
