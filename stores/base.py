"""The store contract: what every tier does, and what no back end has to remember to do.

A back end writes `_open`, `_write` and `_stat`. Key checks, byte caps, whole-operation deadlines,
error wrapping and counting live here, so that no back end can forget them.

One key must not be the folder of another (`a` and `a/b`): a store that keeps objects as files can
hold only one of them, and refuses the other with a `StoreError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

from warmseed.blocking import run_blocking
from warmseed.errors import printable
from warmseed.stores.errors import InvalidKey, ObjectInvalid, StoreError, StoreFull, StoreRefused, StoreTimeout
from warmseed.stores.guards import GuardedReader, checked_chunks, wrapped

__all__ = [
    "CHUNK",
    "BaseStore",
    "Body",
    "ObjectInfo",
    "ObjectReader",
    "Observer",
    "PieceReader",
    "PrunableStore",
    "Store",
    "StoreLimits",
    "check_key",
    "length_from",
    "outcome_of",
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

    deadline: float = 10.0  # seconds for a whole small operation, for opening a stream, and for each piece of one
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

    def checked(self, store: str, key: str, failures: list[StoreError] | None = None) -> Body:
        """The same body, whose iteration raises `ObjectInvalid` when it is not exactly `size` bytes long.

        What it raises is also added to `failures`: libraries that read a body tend to wrap its exceptions.
        """
        seen = [] if failures is None else failures
        return Body(self.size, lambda: checked_chunks(self.chunks(), self.size, store, key, seen), self.path)


@runtime_checkable
class ObjectReader(Protocol):
    """An open object. Iterate it once, to its end; it raises if the bytes stop short."""

    @property
    def size(self) -> int:
        """How many bytes this reader yields, as the store states it: the object's length less the offset."""
        ...

    def __aiter__(self) -> AsyncIterator[bytes]: ...


class PieceReader:
    """An `ObjectReader` over pieces that a back end has at hand."""

    __slots__ = ("_pieces", "_size")

    def __init__(self, size: int, pieces: AsyncIterator[bytes]) -> None:
        self._size, self._pieces = size, pieces

    @classmethod
    def of(cls, data: bytes) -> PieceReader:
        """A reader of `data`."""
        return cls(len(data), Body.of(data).chunks())

    @property
    def size(self) -> int:
        return self._size

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._pieces


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
        """The object from `offset` on as a stream, in constant memory, or `None` for a miss.

        An `offset` past the end is an `ObjectInvalid`; one at the end is an empty stream.
        """
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
        """`outcome` is ``hit``, ``miss``, ``stored``, ``invalid``, ``full``, ``refused``, ``timeout``,
        ``unavailable`` or ``cancelled``."""
        ...


def _ignore(*, store: str, operation: str, outcome: str, size: int, seconds: float) -> None: ...


class BaseStore(ABC):
    """The contract's common half; a back end subclasses it and writes three methods."""

    def __init__(self, name: str, *, limits: StoreLimits | None = None, observer: Observer | None = None) -> None:
        self._name = name
        self.limits = limits or StoreLimits()
        self.observer = observer or _ignore

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
        """Make the object visible whole, or raise; leave nothing half-visible when cancelled.

        Iterating `body` raises `ObjectInvalid` when it is not exactly ``body.size`` bytes long.
        """

    @abstractmethod
    async def _stat(self, key: str) -> ObjectInfo | None:
        """Size of the object, or `None`."""

    async def _get(self, key: str, limit: int) -> bytes | None:
        """The whole small object; worth writing where one round trip can do it."""
        async with self._open(key, 0) as reader:
            if reader is None:
                return None
            guarded = GuardedReader(reader, self.name, key, limit)
            return b"".join([piece async for piece in guarded.checked()])

    # What every caller uses ------------------------------------------------------------------

    async def get(self, key: str, *, limit: int) -> bytes | None:
        check_key(key)

        async def work() -> bytes | None:
            value = await self._get(key, limit)
            if value is not None and len(value) > limit:
                raise ObjectInvalid(f"{self.name}: {key} has {len(value)} bytes, over the limit of {limit}; dropped")
            return value

        return await self._timed("get", key, self.limits.deadline, work, _size_of)

    @asynccontextmanager
    async def open(self, key: str, *, limit: int, offset: int = 0) -> AsyncIterator[ObjectReader | None]:
        check_key(key)
        start = time.monotonic()
        outcome, guarded = "cancelled", None
        manager = self._open(key, offset)
        try:
            async with wrapped(self.name, "open", key, self.limits.deadline):
                reader = await manager.__aenter__()
            try:
                if reader is None:
                    outcome = "miss"
                    yield None
                else:
                    until = asyncio.get_running_loop().time() + self.limits.stream_deadline
                    guarded = GuardedReader(reader, self.name, key, limit, until=until, stall=self.limits.deadline)
                    yield guarded
                    outcome = "hit"
            except BaseException as error:
                # The caller's own failure passes as it is; the back end is told of it, and only cleans up.
                if guarded is not None:
                    await guarded.aclose()
                with contextlib.suppress(Exception):
                    async with asyncio.timeout(self.limits.deadline):
                        await manager.__aexit__(type(error), error, error.__traceback__)
                raise
            else:
                if guarded is not None:
                    await guarded.aclose()
                async with wrapped(self.name, "close", key, self.limits.deadline):
                    await manager.__aexit__(None, None, None)
        except StoreError as error:
            outcome = outcome_of(error)
            raise
        finally:
            self._observe("open", outcome, guarded.seen if guarded else 0, start)

    async def put(self, key: str, body: Body | bytes) -> None:
        value = Body.of(body) if isinstance(body, bytes) else body
        check_key(key)
        if value.size > self.limits.object_bytes:
            raise ObjectInvalid(
                f"{self.name}: {key} has {value.size} bytes, over the limit of {self.limits.object_bytes}; not stored"
            )
        small = value.size <= 4 * CHUNK
        deadline = self.limits.deadline if small else self.limits.stream_deadline
        failures: list[StoreError] = []
        checked = value.checked(self.name, key, failures)

        async def work() -> int:
            try:
                await self._write(key, checked)
            except Exception as error:
                if failures and error is not failures[0]:
                    raise failures[0] from error  # the body's own fault, whatever a library made of it
                raise
            return value.size

        await self._timed("put", key, deadline, work, lambda size: ("stored", size))

    async def stat(self, key: str) -> ObjectInfo | None:
        check_key(key)
        return await self._timed(
            "stat", key, self.limits.deadline, lambda: self._stat(key), lambda i: ("hit" if i else "miss", 0)
        )

    async def aclose(self) -> None:  # noqa: B027 - most back ends hold nothing
        """Let go of what the back end holds; nothing, unless it says otherwise."""

    # How it is done --------------------------------------------------------------------------

    async def _timed(
        self,
        operation: str,
        key: str,
        deadline: float,
        work: Callable[[], Awaitable[T]],
        result_of: Callable[[T], tuple[str, int]],
    ) -> T:
        start = time.monotonic()
        outcome, size = "cancelled", 0
        try:
            async with wrapped(self.name, operation, key, deadline):
                result = await work()
            outcome, size = result_of(result)
            return result
        except StoreError as error:
            outcome = outcome_of(error)
            raise
        finally:
            self._observe(operation, outcome, size, start)

    def _observe(self, operation: str, outcome: str, size: int, start: float) -> None:
        self.observer(
            store=self.name, operation=operation, outcome=outcome, size=size, seconds=time.monotonic() - start
        )


def outcome_of(error: StoreError) -> str:
    """The word an `Observer` is told for `error`."""
    if isinstance(error, StoreTimeout):
        return "timeout"
    if isinstance(error, StoreFull | StoreRefused):
        return "full" if isinstance(error, StoreFull) else "refused"
    return "invalid" if isinstance(error, ObjectInvalid | InvalidKey) else "unavailable"


def length_from(size: int, offset: int, store: str, key: str) -> int:
    """How many bytes are left of `size` from `offset` on.

    Raises:
        ObjectInvalid: when `offset` lies outside the object.
    """
    if not 0 <= offset <= size:
        raise ObjectInvalid(f"{store}: {key} has {size} bytes, none at offset {offset}; nothing was read")
    return size - offset


def _size_of(value: bytes | None) -> tuple[str, int]:
    return ("miss", 0) if value is None else ("hit", len(value))
