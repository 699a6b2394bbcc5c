"""What the conformance suite works with: the medium, bodies of any size, and keys that no store may accept."""

from __future__ import annotations

import asyncio
import zlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from warmseed.stores.base import CHUNK, Body, Store
from warmseed.stores.errors import ObjectInvalid

__all__ = [
    "HOSTILE_KEYS",
    "MIB",
    "NO_LIMIT",
    "Medium",
    "checksum",
    "get_strictly",
    "pattern",
    "pattern_body",
    "read_stream",
    "read_stream_strictly",
    "run",
]

T = TypeVar("T")
MIB = 1 << 20
WHOLE_TEST = 110.0  # seconds one test may take
NO_LIMIT = 1 << 40  # bytes

HOSTILE_KEYS = {
    "empty": "",
    "absolute": "/etc/passwd",
    "climbing": "../../etc/passwd",
    "climbing inside": "a/../../b",
    "dot": "a/./b",
    "double slash": "a//b",
    "trailing slash": "a/",
    "hidden": ".staging/x",
    "NUL": "a\0b",
    "newline": "a\nb",
    "trailing newline": "a\n",
    "space": "a b",
    "backslash": "a\\b",
    "drive": "C:\\x",
    "percent": "a%2Fb",
    "query": "a?b",
    "fragment": "a#b",
    "glob": "a*",
    "unicode": "käse",
    "lookalike slash": "a\u2215b",
    "right-to-left": "a\u202eb",
    "lone surrogate": "a\udc80b",
    "long part": "a" * 129,
    "long key": "/".join(["a" * 100] * 6),
    "deep": "/".join("a" * 17),
    "reserved": "a@b",
}


class Medium(ABC):
    """A store under test, and the way around it."""

    store: Store

    @abstractmethod
    async def raw_read(self, key: str) -> bytes | None:
        """The bytes that really lie under `key`, read without the store; `None` if there are none."""

    @abstractmethod
    async def raw_write(self, key: str, data: bytes) -> None:
        """Put bytes under `key` as another node would, without this store object."""

    @abstractmethod
    async def reopen(self) -> Store:
        """A second store object on the same medium, as after a restart; the suite closes it."""


def pattern(index: int, size: int = CHUNK) -> bytes:
    """`size` bytes that differ for each `index`."""
    stamp = index.to_bytes(8, "big")
    return (stamp * (size // 8 + 1))[:size]


def pattern_body(size: int) -> Body:
    """A body of `size` bytes, generated as it is read."""

    async def pieces() -> AsyncIterator[bytes]:
        for index in range(0, size, CHUNK):
            yield pattern(index, min(CHUNK, size - index))

    return Body(size, pieces)


def run(work: Callable[[], Awaitable[T]]) -> T:
    """Run one test's coroutine under a deadline."""

    async def limited() -> T:
        async with asyncio.timeout(WHOLE_TEST):
            return await work()

    return asyncio.run(limited())


async def read_stream(store: Store, key: str, *, limit: int = NO_LIMIT, offset: int = 0) -> bytes | None:
    """All bytes that `open` gives."""
    async with store.open(key, limit=limit, offset=offset) as reader:
        return None if reader is None else b"".join([piece async for piece in reader])


async def checksum(pieces: AsyncIterator[bytes]) -> tuple[int, int]:
    """Length and CRC-32 of a stream, in constant memory."""
    size = crc = 0
    async for piece in pieces:
        size, crc = size + len(piece), zlib.crc32(piece, crc)
    return size, crc


async def get_strictly(store: Store, key: str, *, limit: int) -> bytes:
    """`get`, where a chain's miss counts as the `ObjectInvalid` that it stands for."""
    value = await store.get(key, limit=limit)
    if value is None:
        raise ObjectInvalid("a miss")
    return value


async def read_stream_strictly(store: Store, key: str, *, limit: int = NO_LIMIT, offset: int = 0) -> bytes:
    """`read_stream`, where a chain's miss counts as the `ObjectInvalid` that it stands for."""
    value = await read_stream(store, key, limit=limit, offset=offset)
    if value is None:
        raise ObjectInvalid("a miss")
    return value
