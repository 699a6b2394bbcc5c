"""Lets no byte of a wrong object count as the object."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from warmseed.blocking import run_blocking
from warmseed.stores.base import Body, ObjectInfo, ObjectReader, Store
from warmseed.stores.errors import ObjectInvalid
from warmseed.stores.wrappers.base import Wrapper

__all__ = ["Checker", "Expected", "Sha256Checker", "Verifying", "checked_pieces", "sha256_of"]

_OFF_LOOP = 256 << 10  # bytes from which hashing is worth a trip to a worker thread


@dataclass(frozen=True, slots=True)
class Expected:
    """What an object must be."""

    sha256: str  # 64 hex digits
    length: int  # bytes

    def check(self, digest: str, length: int, *, store: str, key: str) -> None:
        """Nothing, if the object is the one expected.

        Raises:
            ObjectInvalid: if it is another.
        """
        if length != self.length:
            raise ObjectInvalid(f"{store}: {key} has {length} bytes, not {self.length}; dropped")
        if digest != self.sha256:
            raise ObjectInvalid(f"{store}: {key} has sha256 {digest[:16]}…, not {self.sha256[:16]}…; dropped")


class Verifying(Wrapper):
    """Checks every object against what `expect` says of its key; keys it says nothing about pass.

    A stream's last piece is held back until the digest of the whole is known, so a reader that reaches the end
    holds the right object; one that does not reach it must discard what it has.
    """

    suffix = "verified"

    def __init__(self, inner: Store, expect: Callable[[str], Expected | None]) -> None:
        super().__init__(inner)
        self._expect = expect

    async def get(self, key: str, *, limit: int) -> bytes | None:
        value = await self.inner.get(key, limit=limit)
        expected = self._expect(key)
        if value is None or expected is None:
            return value
        digest = await sha256_of(value)
        expected.check(digest, len(value), store=self.inner.name, key=key)
        return value

    @asynccontextmanager
    async def open(self, key: str, *, limit: int, offset: int = 0) -> AsyncIterator[ObjectReader | None]:
        expected = self._expect(key) if offset == 0 else None  # a part can't be told from the digest of the whole
        async with self.inner.open(key, limit=limit, offset=offset) as reader:
            if reader is None or expected is None:
                yield reader
            else:
                if reader.size != expected.length:
                    expected.check("", reader.size, store=self.inner.name, key=key)
                yield _VerifiedReader(reader, expected, self.inner.name, key)

    async def put(self, key: str, body: Body | bytes) -> None:
        await self.inner.put(key, body)

    async def stat(self, key: str) -> ObjectInfo | None:
        info = await self.inner.stat(key)
        expected = self._expect(key)
        if info is not None and expected is not None and info.size != expected.length:
            expected.check("", info.size, store=self.inner.name, key=key)
        return info


class Checker(Protocol):
    """Judges an object while its bytes pass; both methods may block, and run on a worker thread."""

    def feed(self, piece: bytes) -> None:
        """Take the next bytes; `ObjectInvalid` as soon as they can't be right."""
        ...

    def finish(self) -> None:
        """The bytes are complete; `ObjectInvalid` if they are not the object."""
        ...


class Sha256Checker:
    """A `Checker` for objects whose digest and length are known."""

    def __init__(self, expected: Expected, *, store: str, key: str) -> None:
        self._expected, self._store, self._key = expected, store, key
        self._digest, self._seen = hashlib.sha256(), 0

    def feed(self, piece: bytes) -> None:
        self._seen += len(piece)
        if self._seen > self._expected.length:
            raise ObjectInvalid(f"{self._store}: {self._key} is longer than {self._expected.length} bytes; dropped")
        self._digest.update(piece)

    def finish(self) -> None:
        self._expected.check(self._digest.hexdigest(), self._seen, store=self._store, key=self._key)


async def checked_pieces(reader: ObjectReader, checker: Checker) -> AsyncIterator[bytes]:
    """The reader's pieces; the last one only once `checker` has accepted the whole.

    Raises:
        ObjectInvalid: from the checker.
    """
    held = b""
    async for piece in reader:
        if held:
            yield held
        await run_blocking(checker.feed, piece)
        held = piece
    await run_blocking(checker.finish)
    if held:
        yield held


class _VerifiedReader:
    def __init__(self, reader: ObjectReader, expected: Expected, store: str, key: str) -> None:
        self._reader, self._expected, self._store, self._key = reader, expected, store, key

    @property
    def size(self) -> int:
        return self._reader.size

    async def __aiter__(self) -> AsyncIterator[bytes]:
        checker = Sha256Checker(self._expected, store=self._store, key=self._key)
        async for piece in checked_pieces(self._reader, checker):
            yield piece


async def sha256_of(data: bytes) -> str:
    """Hex SHA-256 of `data`, off the event loop when that takes long."""
    if len(data) < _OFF_LOOP:
        return hashlib.sha256(data).hexdigest()
    return (await run_blocking(hashlib.sha256, data)).hexdigest()
