"""What stands between a back end and its callers: deadlines, error wrapping, and length checks on streams."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Protocol, Self

from warmseed.errors import WarmseedError, printable
from warmseed.stores.errors import ObjectInvalid, StoreError, StoreFull, StoreRefused, StoreTimeout, StoreUnavailable

__all__ = ["GuardedReader", "checked_chunks", "wrapped"]

_REFUSED = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class _Reader(Protocol):
    @property
    def size(self) -> int: ...

    def __aiter__(self) -> AsyncIterator[bytes]: ...


class wrapped:  # noqa: N801 - used as a statement, like asyncio.timeout
    """``async with``: whatever a back end's library raises becomes a `StoreError` that names tier and key.

    Raises:
        StoreTimeout: when the block took longer than `deadline` seconds.
        StoreFull: for an `OSError` that means no space or no quota.
        StoreRefused: for an `OSError` that means no permission, or a read-only file system.
        StoreUnavailable: for any other foreign exception.
    """

    __slots__ = ("_deadline", "_key", "_operation", "_scope", "_store", "_then")

    def __init__(
        self, store: str, operation: str, key: str, deadline: float, *, then: str = "treated as a miss"
    ) -> None:
        """`then` says what follows from a failure of the tier."""
        self._store, self._operation, self._key, self._deadline = store, operation, key, deadline
        self._then = then
        self._scope = asyncio.timeout(deadline)

    async def __aenter__(self) -> Self:
        await self._scope.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._scope.__aexit__(kind, error, traceback)
        except TimeoutError as late:
            raise StoreTimeout(
                f"{self._store}: {self._operation} {self._key} took over {self._deadline:g} s; given up"
            ) from late
        if error is None or isinstance(error, WarmseedError | StopAsyncIteration) or not isinstance(error, Exception):
            return
        what = f"{self._store}: {self._operation} {self._key} failed: {type(error).__name__}: {printable(error)}"
        if isinstance(error, OSError) and error.errno in _FULL:
            raise StoreFull(f"{what}; nothing was kept") from error
        if isinstance(error, OSError) and error.errno in _REFUSED:
            raise StoreRefused(f"{what}; grant the right, or leave this store out") from error
        raise StoreUnavailable(f"{what}; {self._then}") from error


class GuardedReader:
    """An `ObjectReader` that is cut off at its stated size and its deadlines, naming store and key."""

    def __init__(
        self,
        reader: _Reader,
        store: str,
        key: str,
        limit: int,
        *,
        until: float | None = None,  # loop time at which the whole stream must be through
        stall: float | None = None,  # seconds that one piece may take
    ) -> None:
        self._reader, self._store, self._key = reader, store, key
        self._until, self._stall = until, stall
        self._running: AsyncIterator[bytes] | None = None
        self.seen = 0  # bytes yielded so far
        if reader.size > limit:
            raise ObjectInvalid(f"{store}: {key} states {reader.size} bytes, over the limit of {limit}; not read")

    @property
    def size(self) -> int:
        return self._reader.size

    def __aiter__(self) -> AsyncIterator[bytes]:
        if self._running is None:
            self._running = self.checked() if self._until is None else self._timed(self._until)
        return self._running

    async def aclose(self) -> None:
        """End an iteration that the caller left half-way."""
        running, self._running = self._running, None
        if running is not None and hasattr(running, "aclose"):
            await running.aclose()

    async def checked(self) -> AsyncIterator[bytes]:
        """The pieces, refused as soon as they differ from the stated size; no deadlines."""
        async for piece in self._reader:
            yield self._count(piece)
        self._finish()

    async def _timed(self, until: float) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        pieces = aiter(self._reader)
        try:
            while True:
                left = until - loop.time()
                deadline = left if self._stall is None else min(left, self._stall)
                try:
                    async with wrapped(self._store, "read", self._key, max(deadline, 0.0)):
                        piece = await anext(pieces)
                except StopAsyncIteration:
                    break
                yield self._count(piece)
        finally:
            if hasattr(pieces, "aclose"):
                await pieces.aclose()
        self._finish()

    def _count(self, piece: bytes) -> bytes:
        self.seen += len(piece)
        if self.seen > self.size:
            raise ObjectInvalid(f"{self._store}: {self._key} sent more than the {self.size} bytes it stated; dropped")
        return piece

    def _finish(self) -> None:
        if self.seen != self.size:
            raise ObjectInvalid(f"{self._store}: {self._key} stopped after {self.seen} of {self.size} bytes; dropped")


async def checked_chunks(
    pieces: AsyncIterator[bytes], size: int, store: str, key: str, failures: list[StoreError]
) -> AsyncIterator[bytes]:
    """The pieces of a body to write, as long as they are exactly `size` bytes; what is raised goes into `failures`.

    Raises:
        ObjectInvalid: for a body that is longer or shorter, or whose own source fails: the fault is the
            caller's, so no tier is blamed for it.
    """
    seen, held = 0, b""
    try:
        async for piece in pieces:
            seen += len(piece)
            if seen > size:
                break
            if held:
                yield held
            held = piece  # until the body's end is seen: a server that has all it was told of would keep it
    except StoreError as error:
        failures.append(error)
        raise
    except Exception as error:
        failures.append(
            ObjectInvalid(
                f"{store}: the source of {key} failed: {type(error).__name__}: {printable(error)}; nothing was stored"
            )
        )
        raise failures[-1] from error
    finally:
        if hasattr(pieces, "aclose"):
            await pieces.aclose()
    if seen != size:
        failures.append(
            ObjectInvalid(f"{store}: the source of {key} gave {seen} bytes, not {size}; nothing was stored")
        )
        raise failures[-1]
    if held:
        yield held
