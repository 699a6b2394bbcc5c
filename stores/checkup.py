"""Checks one store for real: writes, reads back, measures, and cleans up after itself."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from warmseed.errors import printable
from warmseed.stores.base import CHUNK, Body, Store
from warmseed.stores.errors import StoreError, StoreRefused

__all__ = ["Checkup", "check_store"]

_SMALL = 4096  # bytes
_LARGE = 8 * CHUNK  # bytes


@dataclass(frozen=True, slots=True)
class Checkup:
    """What one store did when it was asked."""

    store: str
    reads: bool
    writes: bool
    problem: str = ""  # the first thing that went wrong, in the store's own words
    miss_ms: float | None = None  # milliseconds to learn that a key is not there
    small_put_ms: float | None = None  # milliseconds for 4 KiB
    small_get_ms: float | None = None
    put_mb_s: float | None = None  # MB/s for 8 MiB
    get_mb_s: float | None = None
    left_behind: str = ""  # the key prefix of test objects that could not be deleted

    @property
    def ok(self) -> bool:
        """Whether the store can be used; a read-only one can."""
        return self.reads and not self.problem


@runtime_checkable
class _Deleting(Protocol):
    async def delete(self, key: str) -> bool: ...


async def check_store(store: Store) -> Checkup:
    """Ask `store` for a missing key, write a small and a larger object under names of our own, and read them back.

    Never raises a `StoreError`: what goes wrong is in the result.
    """
    prefix = f"warmseed/doctor/{secrets.token_hex(8)}"
    small, large = f"{prefix}/small", f"{prefix}/large"
    times: dict[str, float] = {}
    reads = writes = False
    problem = ""
    try:
        start = time.monotonic()
        if await store.stat(small) is not None:
            raise StoreError(f"{store.name}: it claims to have a key that nobody ever wrote")
        times["miss_ms"] = _ms(start)
        reads = True
        try:
            await _write_and_read(store, small, large, times)
            writes = True
        except StoreRefused:
            writes = False  # read-only: fine where others publish
    except StoreError as error:
        problem = printable(error, limit=400)
    left = await _clean(store, (small, large), prefix) if writes or "small_put_ms" in times else ""
    return Checkup(store.name, reads, writes, problem, left_behind=left, **times)


async def _write_and_read(store: Store, small: str, large: str, times: dict[str, float]) -> None:
    value = secrets.token_bytes(_SMALL)
    start = time.monotonic()
    await store.put(small, value)
    times["small_put_ms"] = _ms(start)
    start = time.monotonic()
    if await store.get(small, limit=_SMALL) != value:
        raise StoreError(f"{store.name}: 4 KiB came back as something else; do not use this store")
    times["small_get_ms"] = _ms(start)
    await store.put(small, value[::-1])
    if await store.get(small, limit=_SMALL) != value[::-1]:
        raise StoreError(f"{store.name}: it keeps an old object after it was replaced; do not use this store")
    piece = secrets.token_bytes(CHUNK)
    start = time.monotonic()
    await store.put(large, Body(_LARGE, lambda: _repeat(piece)))
    times["put_mb_s"] = _mb_s(start)
    digest, expected = hashlib.sha256(), hashlib.sha256(piece * (_LARGE // CHUNK)).digest()
    start = time.monotonic()
    async with store.open(large, limit=_LARGE) as reader:
        if reader is not None:
            async for got in reader:
                digest.update(got)
    times["get_mb_s"] = _mb_s(start)
    if digest.digest() != expected:
        raise StoreError(f"{store.name}: 8 MiB came back as something else or not at all; do not use this store")


async def _repeat(piece: bytes) -> AsyncIterator[bytes]:
    for _ in range(_LARGE // CHUNK):
        yield piece


async def _clean(store: Store, keys: tuple[str, ...], prefix: str) -> str:
    if not isinstance(store, _Deleting):
        return prefix
    for key in keys:
        try:
            await store.delete(key)
        except Exception:  # noqa: BLE001 - deleting is outside the contract's wrapping; what stays is reported
            return prefix
    return ""


def _ms(start: float) -> float:
    return round((time.monotonic() - start) * 1e3, 2)


def _mb_s(start: float) -> float:
    return round(_LARGE / 1e6 / max(time.monotonic() - start, 1e-9), 1)
