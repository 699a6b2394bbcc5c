"""Fetches a bundle's stored object by its chunks, where this node has most of them already.

What is missing comes from the shared stores and then from peers, by one way: a place that has the object is asked for
all the missing pieces in one go, and where it stops, the next one goes on. Nothing is looked into before the whole has
the digest that the manifest binds.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, runtime_checkable

from warmseed.blocking import run_blocking
from warmseed.seeding.artifact import bundle_key
from warmseed.seeding.bundle.delta import REMOTE, Base, Piece, Plan, plan
from warmseed.seeding.bundle.history import known_indexes
from warmseed.seeding.bundle.index import BundleIndex
from warmseed.seeding.channel.errors import ChannelError
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.trust.manifest import Stored
from warmseed.stores.base import ObjectInfo, ObjectReader
from warmseed.stores.errors import StoreError

__all__ = ["Delta", "PieceSource", "RangedStore", "fetch_delta", "part_path"]

PIECE = 1 << 20  # bytes
WORTH = 0.8  # of the object: a delta that moves more is not worth its requests
_log = logging.getLogger(__name__)


class RangedStore(Protocol):
    """What is asked of a store."""

    @property
    def name(self) -> str: ...

    def open(self, key: str, *, limit: int, offset: int = 0) -> AbstractAsyncContextManager[ObjectReader | None]: ...

    async def stat(self, key: str) -> ObjectInfo | None: ...


@runtime_checkable
class PieceSource(Protocol):
    """A place that may have the object, or some of it."""

    @property
    def name(self) -> str:
        """For logs."""
        ...

    def pieces(
        self, key: str, stored: Stored, wanted: Sequence[Piece]
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """The bytes of the `wanted` pieces of the object, one after the other; they end early where it has no more.

        Raises:
            StoreError, ChannelError: when it can't be read; while iterating, too.
        """
        ...


class _Tier:
    """A shared store as a source of pieces, each read by its range."""

    def __init__(self, store: RangedStore) -> None:
        self._store = store
        self.name = store.name

    @asynccontextmanager
    async def pieces(self, key: str, stored: Stored, wanted: Sequence[Piece]) -> AsyncIterator[AsyncIterator[bytes]]:
        async with aclosing(_read(self._store, key, wanted)) as read:
            yield read


@dataclass(frozen=True, slots=True)
class Delta:
    """An object that was put together."""

    path: Path
    moved: int  # bytes that were not on the disk
    total: int  # bytes of the object


def part_path(folder: Path, sha256: str) -> Path:
    """Where the beginning of the stored object with that digest is kept when a transfer is cut."""
    return folder / f"part.{sha256[:32]}"


async def fetch_delta(
    index: BundleIndex,
    stored: Stored,
    *,
    tiers: Sequence[RangedStore],
    local: RangedStore,
    state: Path,
    folder: Path,
    also: Sequence[PieceSource] = (),
    always: bool = False,
) -> Delta | None:
    """The stored object of `index` as a new file in `folder`, mostly from bundles in `local`; `None` if not worth it.

    `local` is the disk tier, which must not have the object; `tiers` are the shared ones, asked in order (a chain
    would bring the whole object to the disk), and `also` those asked after them. Which earlier bundles there are is
    known from the indexes in `state`. A transfer that is cut leaves its beginning in `folder`, and the next call goes
    on from there. With `always` an object of which nothing is known is fetched too, so that it can be resumed.

    Raises:
        ArtifactRefused: ``digest``, ``length`` or ``missing``, when the pieces do not make the object that `stored`
            describes; a caller then fetches the whole object.
        StoreError, ChannelError: when the last place that was asked can't be read.
        OSError: when the disk fails.
    """
    key = bundle_key(index.sha256)
    if await local.stat(key) is not None:
        return None
    bases, keys = await _bases(index, local, state)
    made = plan(index, bases)
    if made is None or made.total != stored.length:
        return None
    part = _Part(part_path(folder, stored.sha256))
    worth = always or made.moved <= WORTH * made.total
    if not worth and not await run_blocking(part.exists):
        return None
    have = await run_blocking(part.open, made.total)
    try:
        left = made.after(have)
        await _assemble(made, key, stored, part, sources=[*map(_Tier, tiers), *also], local=_Local(local, keys))
        path = folder / f"delta.{secrets.token_hex(8)}"
        await run_blocking(part.finish, stored.sha256, path)
    finally:
        part.close()
    _log.info("bundle=%s pieces moved=%d of=%d", index.sha256[:12], left.moved, made.total)
    return Delta(path, left.moved, made.total)


async def _bases(index: BundleIndex, local: RangedStore, state: Path) -> tuple[list[Base], list[str]]:
    """Earlier bundles whose stored objects are on disk as their indexes describe them, and their keys."""
    bases: list[Base] = []
    keys: list[str] = []
    for earlier in await run_blocking(lambda: list(known_indexes(state))):
        if earlier.sha256 == index.sha256 or not earlier.stored:
            continue
        key = bundle_key(earlier.sha256)
        info = await local.stat(key)
        if info is not None and info.size == earlier.stored:  # another writer's frames lie elsewhere
            bases.append(Base(earlier, info.size))
            keys.append(key)
    return bases, keys


class _Part:
    """The beginning of an object, kept across calls; one process at a time works on it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self.position = 0  # bytes of the object that are there

    def exists(self) -> bool:
        """Whether an earlier call left a beginning."""
        return self._path.exists()

    def open(self, total: int) -> int:
        """Take up the file; how many bytes of the object it holds."""
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(handle, "r+b")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ArtifactRefused("busy", "another rank is fetching the same object; fetching it apart") from None
        if os.fstat(handle).st_size > total:
            os.ftruncate(handle, 0)
        while piece := self._file.read(PIECE):
            self._digest.update(piece)
        self.position = self._file.tell()
        return self.position

    def write(self, data: bytes) -> None:
        """Append `data`."""
        if self._file is None:
            raise ValueError("the part is closed")
        self._digest.update(data)
        self._file.write(data)
        self.position += len(data)

    def finish(self, sha256: str, path: Path) -> None:
        """Give the complete object its place, if it is the right one; else it is gone."""
        if self._file is None:
            raise ValueError("the part is closed")
        self._file.flush()
        if self._digest.hexdigest() != sha256:
            self._path.unlink(missing_ok=True)
            raise ArtifactRefused("digest", "the pieces do not make the object that the manifest binds")
        os.rename(self._path, path)

    def close(self) -> None:
        """Let go of the file; what was written stays for the next call."""
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass(frozen=True, slots=True)
class _Local:
    """The earlier bundles on disk."""

    store: RangedStore
    keys: Sequence[str]  # by the number of their base

    async def copy(self, piece: Piece, part: _Part) -> None:
        """Append the bytes of `piece`."""
        key = self.keys[piece.source]
        async with aclosing(_read(self.store, key, [piece])) as read:
            if not await _Stream(read).copy(piece.length, part):
                raise ArtifactRefused("missing", f"{key} went away while pieces of it were read")


class _Stream:
    """What a source sends for several pieces, given out a piece at a time."""

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks
        self._spare = b""  # bytes that came with the last ones of a piece

    async def copy(self, length: int, part: _Part) -> bool:
        """Append `length` bytes; whether there were as many."""
        while length:
            data = self._spare or await anext(self._chunks, b"")
            if not data:
                return False
            await run_blocking(part.write, data[:length])
            self._spare, length = data[length:], max(0, length - len(data))
        return True


async def _read(store: RangedStore, key: str, wanted: Sequence[Piece]) -> AsyncGenerator[bytes, None]:
    """The bytes of the `wanted` pieces of an object, as far as `store` has them."""
    for piece in wanted:
        left = piece.length
        async with store.open(key, limit=1 << 50, offset=piece.offset) as reader:
            if reader is None:
                return
            async for data in reader:
                yield data[:left]
                left -= min(left, len(data))
                if not left:
                    break
        if left:
            return


async def _assemble(
    made: Plan, key: str, stored: Stored, part: _Part, *, sources: Sequence[PieceSource], local: _Local
) -> None:
    """Do what `made` says, from where `part` stands; a source that stops in the middle is followed by the next."""
    failure: StoreError | ChannelError | None = None
    for source in sources or [_Tier(local.store)]:
        try:
            if await _fill(made.after(part.position), key, stored, part, source=source, local=local):
                return
        except (StoreError, ChannelError) as error:
            failure = error
        _log.info("%s stopped at byte %d of %d of %s", source.name, part.position, made.total, key)
    if failure is not None:
        raise failure
    raise ArtifactRefused("missing", f"nobody has all of {key}")


async def _fill(left: Plan, key: str, stored: Stored, part: _Part, *, source: PieceSource, local: _Local) -> bool:
    """Whether everything that was `left` is there."""
    wanted = [piece for piece in left.pieces if piece.source == REMOTE]
    async with AsyncExitStack() as stack:
        stream: _Stream | None = None
        for piece in left.pieces:
            if piece.source != REMOTE:
                await local.copy(piece, part)
                continue
            if stream is None:  # not before: whoever sends has a deadline
                stream = _Stream(await stack.enter_async_context(source.pieces(key, stored, wanted)))
            if not await stream.copy(piece.length, part):
                return False
    return True
