"""Where artifacts come from: the chain of stores, or a peer that is running now.

Every origin hands out the same two things: signed envelopes to be judged, and the bytes of a manifest that was
believed. What comes from a peer is asked of the stores first: they are built for many readers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

from warmseed.seeding.artifact import ArtifactKey, denial_key
from warmseed.seeding.catalog import Catalog
from warmseed.seeding.dsse import ENVELOPE_BYTES
from warmseed.seeding.payload import write_stream
from warmseed.stores.chain import Chain

__all__ = ["Origin", "StoreOrigin"]


class Origin(Protocol):
    """A place that may have an artifact."""

    @property
    def name(self) -> str:
        """For logs: a chain's name, or a peer's address."""
        ...

    def envelopes(self, key: ArtifactKey, *, known: int) -> AsyncIterator[bytes]:
        """Signed envelopes for `key`, newest first, unverified; `known` is a generation seen before."""
        ...

    async def object(self, store_key: str, *, sha256: str, length: int, folder: Path) -> Path | None:
        """A new file in `folder` with exactly those bytes, checked; `None` if they are not to be had here."""
        ...


class StoreOrigin:
    """The chain of stores, local disk first."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._catalog = Catalog(chain)

    @property
    def name(self) -> str:
        return self._chain.name

    def envelopes(self, key: ArtifactKey, *, known: int) -> AsyncIterator[bytes]:
        return self._catalog.envelopes(key, known=known)

    async def generation(self, key: ArtifactKey, generation: int) -> bytes | None:
        """The envelope of one generation, unverified."""
        return await self._catalog.envelope(key, generation)

    async def pin(self, key: ArtifactKey) -> bytes | None:
        """The fleet's pin for `key`, unverified."""
        return await self._chain.get(key.pin_key, limit=ENVELOPE_BYTES)

    async def denial(self, sha256: str) -> bytes | None:
        """The fleet's denial of a payload, unverified."""
        return await self._chain.get(denial_key(sha256), limit=ENVELOPE_BYTES)

    async def object(self, store_key: str, *, sha256: str, length: int, folder: Path) -> Path | None:
        async with self._chain.open_verified(store_key, sha256=sha256, length=length) as reader:
            return None if reader is None else await write_stream(aiter(reader), folder)
