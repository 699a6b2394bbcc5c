"""Fetches a bundle's stored object by its chunks, where this node has most of them already."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import secrets
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from warmseed.blocking import run_blocking
from warmseed.seeding.artifact import bundle_key
from warmseed.seeding.bundle.delta import REMOTE, Base, Piece, Plan, plan
from warmseed.seeding.bundle.history import known_indexes
from warmseed.seeding.bundle.index import BundleIndex
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.trust.manifest import Stored
from warmseed.stores.base import ObjectInfo, ObjectReader
from warmseed.stores.errors import StoreError

__all__ = ["Delta", "RangedStore", "fetch_delta"]

PIECE = 1 << 20  # bytes
WORTH = 0.8  # of the object: a delta that moves more is not worth its requests
_log = logging.getLogger(__name__)


class RangedStore(Protocol):
    """What is asked of a store."""

    def open(self, key: str, *, limit: int, offset: int = 0) -> AbstractAsyncContextManager[ObjectReader | None]: ...

    async def stat(self, key: str) -> ObjectInfo | None: ...


@dataclass(frozen=True, slots=True)
class Delta:
    """An object that was put together."""

    path: Path
    moved: int  # bytes read from the store
    total: int  # bytes of the object


async def fetch_delta(
    index: BundleIndex,
    stored: Stored,
    *,
    tiers: Sequence[RangedStore],
    local: RangedStore,
    state: Path,
    folder: Path,
    always: bool = False,
) -> Delta | None:
    """The stored object of `index` as a new file in `folder`, mostly from bundles in `local`; `None` if not worth it.

    `local` is the disk tier, which must not have the object; `tiers` are the shared ones, asked in order (a chain
    would bring the whole object to the disk). Which earlier bundles there are is known from the indexes in `state`.
    A transfer that is cut leaves its beginning in `folder`, and the next call goes on from
    there. With `always` an object of which nothing is known is fetched too, so that it can be resumed.

    Raises:
        ArtifactRefused: ``digest``, ``length`` or ``missing``, when the pieces do not make the object that `stored`
            describes; a caller then fetches the whole object.
        StoreError: when a store can't be read.
        OSError: when the disk fails.
    """
    key = bundle_key(index.sha256)
    if await local.stat(key) is not None:
        return None
    bases, keys = await _bases(index, local, state)
    made = plan(index, bases)
    if made is None or made.total != stored.length:
        return None
    part = _Part(folder / f"part.{stored.sha256[:32]}")
    worth = always or made.moved <= WORTH * made.total
    if not worth and not await run_blocking(part.exists):
        return None
    have = await run_blocking(part.open, made.total)
    try:
        left = made.after(have)
        await _assemble(left, key, keys, part, tiers=tiers, local=local)
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


async def _assemble(
    left: Plan, key: str, keys: Sequence[str], part: _Part, *, tiers: Sequence[RangedStore], local: RangedStore
) -> None:
    for piece in left.pieces:
        if piece.source == REMOTE:
            await _from_tiers(tiers, key, piece, part)
        else:
            start = part.position
            await _copy(local, keys[piece.source], piece, part)
            if part.position - start != piece.length:
                raise ArtifactRefused("missing", f"{keys[piece.source]} went away while pieces of it were read")


async def _from_tiers(tiers: Sequence[RangedStore], key: str, piece: Piece, part: _Part) -> None:
    """The piece from the first tier that has it; a tier that stops in the middle is followed by the next."""
    start = part.position
    failure: StoreError | None = None
    for tier in tiers:
        done = part.position - start
        try:
            await _copy(tier, key, Piece(REMOTE, piece.offset + done, piece.length - done), part)
        except StoreError as error:
            failure = error
        if part.position - start == piece.length:
            return
    if failure is not None:
        raise failure
    raise ArtifactRefused("missing", f"no tier has all of {key}")


async def _copy(store: RangedStore, key: str, piece: Piece, part: _Part) -> None:
    """Append the bytes of `piece`, as many as `store` has."""
    left = piece.length
    async with store.open(key, limit=1 << 50, offset=piece.offset) as reader:
        if reader is None:
            return
        async for data in reader:
            await run_blocking(part.write, data[:left])
            left -= min(left, len(data))
            if not left:
                return
