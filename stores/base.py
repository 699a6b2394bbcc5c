"""The store contract: what every tier does, and what no back end has to remember to do.

A back end writes `_open`, `_write` and `_stat`. Key checks, byte caps, whole-operation deadlines,
error wrapping and counting live here, so that no back end can forget them.
"""

from __future__ import annotations

import asyncio
import re
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

from warmseed.blocking import run_blocking
from warmseed.errors import WarmseedError, printable
from warmseed.stores.errors import InvalidKey, ObjectInvalid, StoreError, StoreFull, StoreUnavailable

__all__ = [
    "CHUNK",
    "BaseStore",
    "Body",
    "ObjectInfo",
    "ObjectReader",
    "Observer",
    "PrunableStore",
    "Store",
    "StoreLimits",
    "check_key",
]

CHUNK = 1 << 20  # bytes in one piece of a streamed object
KEY_LENGTH = 512  # characters in a whole key
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
T = TypeVar("T")


def check_key(key: str) -> str:
    """`key`, if it is made of 1 to 16 parts of ``[A-Za-z0-9][A-Za-z0-9._-]{0,127}`` joined by ``/``.

    Raises:
        InvalidKey: for anything else, so no key can climb out of a folder or a prefix.
    """
    parts = key.split("/")
    if len(key) > KEY_LENGTH or len(parts) > 16 or not all(_PART.fullmatch(p) for p in parts):
        raise InvalidKey(f"store key {printable(key)!r} is not made of allowed parts; it was not sent to any store")
    return key


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a store knows of an object without reading it."""

    key: str
    size: int  # bytes
    modified: float | None = None  # unix seconds, where the back end has it


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """How long and how much one store may take."""

    deadline: float = 10.0  # seconds for a whole small operation (get, put, stat)
    stream_deadline: float = 600.0  # seconds for a whole streamed read or write
    object_bytes: int = 16 << 30  # bytes in the largest object ever written


class Body:
    """A value to write, of known length, that can be read more than once (retries, several tiers)."""

    __slots__ = ("_make", "path", "size")

    def __init__(self, size: int, make: Callable[[], AsyncIterator[bytes]], path: Path | None = None) -> None:
        self.size = size
        self._make = make
        self.path = path  # the file that holds exactly these bytes, for back ends that can map one

    @classmethod
    def of(cls, data: bytes) -> Body:
        """A body held in memory."""

        async def once() -> AsyncIterator[bytes]:
            if data:
                yield data

        return cls(len(data), once)

    @classmethod
    def file(cls, path: Path) -> Body:
        """The contents of the file at `path`, which must not change until the write is done.

        Raises:
            OSError: if the file can't be examined.
        """

        async def pieces() -> AsyncIterator[bytes]:
            source = await run_blocking(open, path, "rb")
            try:
                while piece := await run_blocking(source.read, CHUNK):
                    yield piece
            finally:
                source.close()

        return cls(path.stat().st_size, pieces, path)

    def chunks(self) -> AsyncIterator[bytes]:
        """The bytes from the beginning, in pieces; each call starts over."""
        return self._make()

    async def read(self) -> bytes:
        """All the bytes at once; for small bodies."""
        return b"".join([piece async for piece in self.chunks()])


@runtime_checkable
class ObjectReader(Protocol):
    """An open object. Iterate it once, to its end; it raises if the bytes stop short."""

    @property
    def size(self) -> int:
        """Length in bytes, as the store states it."""
        ...

    def __aiter__(self) -> AsyncIterator[bytes]: ...


@runtime_checkable
class Store(Protocol):
    """Bytes by key. A miss is `None`; anything else that goes wrong is a `StoreError`."""

    @property
    def name(self) -> str:
        """How logs and metrics call this store, wrappers included (``chain(disk, mooncake|breaker)``)."""
        ...

    async def get(self, key: str, *, limit: int) -> bytes | None:
        """The whole small object, or `None`; `ObjectInvalid` if it is longer than `limit` bytes."""
        ...

    def open(self, key: str, *, limit: int, offset: int = 0) -> AbstractAsyncContextManager[ObjectReader | None]:
        """The object from `offset` on as a stream, in constant memory, or `None` for a miss."""
        ...

    async def put(self, key: str, body: Body | bytes) -> None:
        """Store the object whole or not at all; an object already there is replaced."""
        ...

    async def stat(self, key: str) -> ObjectInfo | None:
        """Size of the object without reading it, or `None`."""
        ...

    async def aclose(self) -> None:
        """Let go of connections and child processes."""
        ...


@runtime_checkable
class PrunableStore(Protocol):
    """What operators need beyond `Store`: listing and deleting. Start-up never uses it."""

    def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """Every object whose key starts with `prefix`."""
        ...

    async def delete(self, key: str) -> bool:
        """Remove the object; whether there was one."""
        ...


class Observer(Protocol):
    """Told of every finished operation; metrics plug in here."""

    def __call__(self, *, store: str, operation: str, outcome: str, size: int, seconds: float) -> None:
        """`outcome` is ``hit``, ``miss``, ``stored``, ``invalid``, ``full``, ``unavailable`` or ``cancelled``."""
        ...


def _ignore(*, store: str, operation: str, outcome: str, size: int, seconds: float) -> None: ...


class BaseStore(ABC):
    """The contract's common half; a back end subclasses it and writes three methods."""

    def __init__(self, name: str, *, limits: StoreLimits | None = None, observer: Observer = _ignore) -> None:
        self._name = name
        self.limits = limits or StoreLimits()
        self.observer = observer

    @property
    def name(self) -> str:
        return self._name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    # What a back end writes ------------------------------------------------------------------

    @abstractmethod
    def _open(self, key: str, offset: int) -> AbstractAsyncContextManager[ObjectReader | None]:
        """The object from `offset` on, or `None`. May raise `OSError` or any library's exception."""

    @abstractmethod
    async def _write(self, key: str, body: Body) -> None:
        """Make the object visible whole, or raise; leave nothing half-visible when cancelled."""

    @abstractmethod
    async def _stat(self, key: str) -> ObjectInfo | None:
        """Size of the object, or `None`."""

    # What every caller uses ------------------------------------------------------------------

    async def get(self, key: str, *, limit: int) -> bytes | None:
        async def work() -> bytes | None:
            async with self._open(check_key(key), 0) as reader:
                if reader is None:
                    return None
                return b"".join([piece async for piece in _capped(reader, self.name, key, limit)])

        return await self._timed("get", key, self.limits.deadline, work, _size_of)

    @asynccontextmanager
    async def open(self, key: str, *, limit: int, offset: int = 0) -> AsyncIterator[ObjectReader | None]:
        check_key(key)
        start = time.monotonic()
        outcome = "unavailable"
        try:
            async with asyncio.timeout(self.limits.stream_deadline):
                async with _wrapped(self.name, "open", key), self._open(key, offset) as reader:
                    if reader is None:
                        outcome = "miss"
                        yield None
                    else:
                        yield _Guarded(reader, self.name, key, limit)
                        outcome = "hit"
        except TimeoutError as error:
            raise StoreUnavailable(
                f"{self.name}: reading {key} took over {self.limits.stream_deadline:g} s; treated as a miss"
            ) from error
        except ObjectInvalid:
            outcome = "invalid"
            raise
        finally:
            self._observe("open", outcome, 0, start)

    async def put(self, key: str, body: Body | bytes) -> None:
        value = Body.of(body) if isinstance(body, bytes) else body
        check_key(key)
        if value.size > self.limits.object_bytes:
            raise ObjectInvalid(
                f"{self.name}: {key} has {value.size} bytes, over the limit of {self.limits.object_bytes}; not stored"
            )
        small = value.size <= 4 * CHUNK
        deadline = self.limits.deadline if small else self.limits.stream_deadline

        async def work() -> int:
            await self._write(key, value)
            return value.size

        await self._timed("put", key, deadline, work, lambda size: ("stored", size))

    async def stat(self, key: str) -> ObjectInfo | None:
        async def work() -> ObjectInfo | None:
            return await self._stat(check_key(key))

        return await self._timed("stat", key, self.limits.deadline, work, lambda i: ("hit" if i else "miss", 0))

    async def aclose(self) -> None:  # noqa: B027 - most back ends hold nothing
        """Let go of what the back end holds; nothing, unless it says otherwise."""

    # How it is done --------------------------------------------------------------------------

    async def _timed(
        self,
        operation: str,
        key: str,
        deadline: float,
        work: Callable[[], Awaitable[T]],
        outcome_of: Callable[[T], tuple[str, int]],
    ) -> T:
        start = time.monotonic()
        outcome, size = "cancelled", 0
        try:
            async with asyncio.timeout(deadline):
                async with _wrapped(self.name, operation, key):
                    result = await work()
            outcome, size = outcome_of(result)
            return result
        except TimeoutError as error:
            outcome = "unavailable"
            raise StoreUnavailable(f"{self.name}: {operation} {key} took over {deadline:g} s; given up") from error
        except ObjectInvalid:
            outcome = "invalid"
            raise
        except StoreError as error:
            outcome = "full" if isinstance(error, StoreFull) else "unavailable"
            raise
        finally:
            self._observe(operation, outcome, size, start)

    def _observe(self, operation: str, outcome: str, size: int, start: float) -> None:
        self.observer(
            store=self.name, operation=operation, outcome=outcome, size=size, seconds=time.monotonic() - start
        )


@asynccontextmanager
async def _wrapped(store: str, operation: str, key: str) -> AsyncIterator[None]:
    """Turn whatever a back end's library raises into a `StoreUnavailable` that names key and tier."""
    try:
        yield
    except (WarmseedError, TimeoutError):
        raise
    except Exception as error:
        raise StoreUnavailable(
            f"{store}: {operation} {key} failed: {type(error).__name__}: {printable(error)}"
        ) from error


def _size_of(value: bytes | None) -> tuple[str, int]:
    return ("miss", 0) if value is None else ("hit", len(value))


async def _capped(reader: ObjectReader, store: str, key: str, limit: int) -> AsyncIterator[bytes]:
    """The reader's pieces, refused as soon as they are more than `limit` or differ from the stated size."""
    if reader.size > limit:
        raise ObjectInvalid(f"{store}: {key} states {reader.size} bytes, over the limit of {limit}; not read")
    seen = 0
    async for piece in reader:
        seen += len(piece)
        if seen > limit or seen > reader.size:
            raise ObjectInvalid(f"{store}: {key} sent more than the {reader.size} bytes it stated; dropped")
        yield piece
    if seen != reader.size:
        raise ObjectInvalid(f"{store}: {key} stopped after {seen} of {reader.size} bytes; dropped")


class _Guarded:
    """An `ObjectReader` that checks lengths and names store and key in every failure."""

    def __init__(self, reader: ObjectReader, store: str, key: str, limit: int) -> None:
        self._reader, self._store, self._key, self._limit = reader, store, key, limit

    @property
    def size(self) -> int:
        return self._reader.size

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async with _wrapped(self._store, "read", self._key):
            async for piece in _capped(self._reader, self._store, self._key, self._limit):
                yield piece
