"""Brings large objects from the tiers to where they are wanted, judged on the way."""

from __future__ import annotations

import contextlib
import io
import logging
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from warmseed.blocking import run_blocking
from warmseed.errors import printable
from warmseed.stores.base import Body, ObjectReader, Store
from warmseed.stores.disk import DiskStore
from warmseed.stores.errors import ObjectInvalid, StoreError, StoreFull
from warmseed.stores.hostlock import HostLock
from warmseed.stores.wrappers.flight import Flights
from warmseed.stores.wrappers.verifying import Checker, checked_pieces

__all__ = ["Fetched", "Fetcher"]

_log = logging.getLogger(__name__)
_PATIENCE = 10.0  # seconds without a sign of life after which another process's fetch is not waited for
Check = Callable[[str], Checker]


@dataclass(frozen=True, slots=True)
class Fetched:
    """Where an object came from."""

    tier: str
    size: int  # bytes, as stored


@dataclass(frozen=True, slots=True)
class _Filled:
    tier: str | None  # who had it; `None`: nobody, or the disk could not take it
    disk_failed: bool = False


class Fetcher:
    """Fetches through the disk: one upstream read serves every reader of this node, in every process."""

    def __init__(
        self, disk: DiskStore | None, tiers: Sequence[Store], filled: Callable[[str, Body, str], None]
    ) -> None:
        self._disk, self._tiers, self._filled = disk, tuple(tiers), filled
        self._fills: Flights[_Filled] = Flights()

    async def fetch(self, key: str, *, limit: int, into: Path, check: Check, identity: str) -> Fetched | None:
        """See `Chain.fetch_checked`."""
        if self._disk is not None:
            size = await self._copy(self._disk, key, limit, into, check)
            if size is not None:
                return Fetched(self._disk.name, size)
            filled = await self.fill(key, limit=limit, check=check, identity=identity)
            if filled.tier is not None:
                size = await self._copy(self._disk, key, limit, into, check)
                if size is not None:
                    return Fetched(filled.tier, size)
            elif not filled.disk_failed:
                return None
        for tier in self._tiers:
            size = await self._copy(tier, key, limit, into, check)
            if size is not None:
                return Fetched(tier.name, size)
        return None

    async def fill(self, key: str, *, limit: int, check: Check | None = None, identity: str = "") -> _Filled:
        """Bring the object to the disk, from the first tier that has a valid one; shared by concurrent callers."""
        if not self._tiers:
            return _Filled(None)
        return await self._fills.share((key, limit, identity), lambda: self._fill(key, limit, check))

    async def aclose(self) -> None:
        """Stop fetches that nobody waits for any more."""
        await self._fills.aclose()

    # How it is done ----------------------------------------------------------------------------

    async def _fill(self, key: str, limit: int, check: Check | None) -> _Filled:
        disk = self._disk
        if disk is None:
            return _Filled(None, disk_failed=True)
        if await _held(disk, key):
            return _Filled(disk.name)  # it arrived while this caller was on its way
        for tier in self._tiers:
            try:
                filled = await self._fill_from(tier, disk, key, limit, check)
            except StoreError as error:
                self._note(tier, key, error)
                continue
            if filled is not None:
                if filled.tier == tier.name and (info := await _size(disk, key)) is not None:
                    self._filled(key, disk.body(key, info), tier.name)
                return filled
        return _Filled(None)

    async def _fill_from(
        self, tier: Store, disk: DiskStore, key: str, limit: int, check: Check | None
    ) -> _Filled | None:
        """One tier's try; `None` for a miss. Only once the tier has answered is anybody made to wait for us."""
        async with HostLock(disk.folder / "flights", key) as lock:
            if not lock.busy:
                return await self._download(tier, disk, key, limit, check, lock)
            async with tier.open(key, limit=limit) as reader:
                if reader is None:
                    return None
            await lock.wait(_PATIENCE)
            if await _held(disk, key):
                return _Filled(disk.name)
        # The other process failed. Everybody now goes alone, so that nobody waits for a second failure.
        return await self._download(tier, disk, key, limit, check, None)

    async def _download(
        self, tier: Store, disk: DiskStore, key: str, limit: int, check: Check | None, lock: HostLock | None
    ) -> _Filled | None:
        failed: list[StoreError] = []  # what went wrong upstream, as opposed to on the disk

        async def pieces(reader: ObjectReader) -> AsyncIterator[bytes]:
            try:
                source = aiter(reader) if check is None else checked_pieces(reader, check(tier.name))
                async for piece in source:
                    if lock is not None:
                        lock.alive()
                    yield piece
            except StoreError as error:
                failed.append(error)
                raise

        async with tier.open(key, limit=limit) as reader:
            if reader is None:
                return None
            try:
                await disk.put(key, Body(reader.size, lambda: pieces(reader)))
            except StoreError as error:
                if failed:
                    raise failed[0] from error
                _log.warning("store=%s key=%s not kept: %s", disk.name, key, printable(error))
                return _Filled(None, disk_failed=True)
        return _Filled(tier.name)

    async def _copy(self, tier: Store, key: str, limit: int, into: Path, check: Check) -> int | None:
        """Bytes written to `into`, or `None` where the tier has no valid object."""
        done = False
        try:
            async with tier.open(key, limit=limit) as reader:
                if reader is None:
                    return None
                size = await _write(into, reader, check(tier.name))
            done = True
            return size
        except StoreError as error:
            self._note(tier, key, error)
            if isinstance(error, ObjectInvalid) and tier is self._disk:
                with contextlib.suppress(StoreError, OSError):
                    await self._disk.delete(key)
            return None
        finally:
            if not done:
                await run_blocking(_discard, into)

    def _note(self, tier: Store, key: str, error: StoreError) -> None:
        level = logging.WARNING if isinstance(error, ObjectInvalid | StoreFull) else logging.INFO
        _log.log(level, "store=%s key=%s outcome=miss: %s", tier.name, key, printable(error))


async def _write(into: Path, reader: ObjectReader, checker: Checker) -> int:
    sink = _Sink(into, checker)
    try:
        await run_blocking(sink.create)
        async for piece in reader:
            await run_blocking(sink.take, piece)
        await run_blocking(checker.finish)
    finally:
        await run_blocking(sink.close)
    return sink.size


class _Sink:
    """The staging file, and the judge of what goes in; a lock, because a cancelled step may still be running."""

    def __init__(self, path: Path, checker: Checker) -> None:
        self._path, self._checker = path, checker
        self._lock = threading.Lock()
        self._file: io.FileIO | None = None
        self.size = 0  # bytes written

    def create(self) -> None:
        with self._lock:
            self._path.unlink(missing_ok=True)  # never through a link, never into a file that somebody has open
            self._file = io.FileIO(self._path, "xb")

    def take(self, piece: bytes) -> None:
        self._checker.feed(piece)
        with self._lock:
            left = memoryview(piece)
            while left and self._file is not None and not self._file.closed:
                left = left[self._file.write(left) :]
        self.size += len(piece)

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()


def _discard(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


async def _held(disk: DiskStore, key: str) -> bool:
    return await _size(disk, key) is not None


async def _size(disk: DiskStore, key: str) -> int | None:
    with contextlib.suppress(StoreError):
        info = await disk.stat(key)
        return None if info is None else info.size
    return None
