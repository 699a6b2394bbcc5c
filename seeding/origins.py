"""Where artifacts come from: the chain of stores, or a peer that is running now.

Every origin hands out the same two things: signed envelopes to be judged, and the bytes of a manifest that was
believed. What comes from a peer is asked of the stores first: they are built for many readers.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

from warmseed.seeding.artifact import ArtifactKey, denial_key
from warmseed.seeding.catalog import Catalog
from warmseed.seeding.channel.client import Description, SeedClient
from warmseed.seeding.channel.endpoint import Endpoint
from warmseed.seeding.channel.errors import PeerBusy, PeerUnreachable, PeerWarming
from warmseed.seeding.channel.messages import DescribeRequest
from warmseed.seeding.dsse import ENVELOPE_BYTES
from warmseed.seeding.environment import Environment
from warmseed.seeding.payload import write_stream
from warmseed.stores.chain import Chain

__all__ = ["Origin", "PeerOrigin", "StoreOrigin"]

RESUMES = 4  # times a cut transfer is taken up again before the next origin is asked


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
        """The fleet's pin for `key`, unverified; shared stores before the disk, since pins change."""
        return await self._chain.get(key.pin_key, limit=ENVELOPE_BYTES, fresh=True)

    async def denial(self, sha256: str) -> bytes | None:
        """The fleet's denial of a payload, unverified."""
        return await self._chain.get(denial_key(sha256), limit=ENVELOPE_BYTES, fresh=True)

    async def object(self, store_key: str, *, sha256: str, length: int, folder: Path) -> Path | None:
        into = folder / f"object.{secrets.token_hex(8)}"
        found = await self._chain.fetch_verified(store_key, sha256=sha256, length=length, into=into)
        return None if found is None else into


class PeerOrigin:
    """One source daemon. While it says that it is still warming up, it is worth waiting for."""

    def __init__(self, client: SeedClient, peer: Endpoint, *, wait: float, environment: Environment) -> None:
        """`wait` is the seconds this node gives a source that is making what was asked for."""
        self._client = client
        self._peer = peer
        self._wait = wait
        self._environment = environment
        self._payloads: dict[str, bytes] = {}  # small ones, which travel with the description

    @property
    def name(self) -> str:
        return f"peer {self._peer}"

    async def envelopes(self, key: ArtifactKey, *, known: int) -> AsyncIterator[bytes]:
        request = DescribeRequest.of(key, instance=self._client.instance, environment=self._environment)
        description = await self._patiently(request)
        if description is not None:
            if description.payload:
                self._payloads[hashlib.sha256(description.payload).hexdigest()] = description.payload
            yield description.manifest.encode()

    async def _patiently(self, request: DescribeRequest) -> Description | None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._wait
        while True:
            try:
                return await self._client.describe(self._peer, request)
            except (PeerWarming, PeerBusy) as error:
                pause = max(error.retry_after, 0.2) * random.uniform(0.8, 1.2)  # noqa: S311 - spreads a fleet's retries
                if loop.time() + pause > until:
                    raise
            await asyncio.sleep(pause)

    async def object(self, store_key: str, *, sha256: str, length: int, folder: Path) -> Path | None:
        """The bytes from the peer; a connection that is cut is taken up again where it stopped."""
        if (small := self._payloads.get(sha256)) is not None:
            return await write_stream(_once(small), folder, sha256=sha256, length=length)
        try:
            return await write_stream(self._resuming(sha256, length), folder, sha256=sha256, length=length)
        except _Missing:
            return None

    async def _resuming(self, sha256: str, length: int) -> AsyncIterator[bytes]:
        have = 0
        for attempt in range(RESUMES + 1):
            try:
                async with self._client.fetch(self._peer, sha256, length=length, offset=have) as pieces:
                    if pieces is None:
                        raise _Missing
                    async for piece in pieces:
                        have += len(piece)
                        yield piece
                return
            except PeerUnreachable:
                if attempt == RESUMES:
                    raise
            await asyncio.sleep(random.uniform(0.05, 0.2) * 2**attempt)  # noqa: S311 - spreads a fleet's retries


class _Missing(Exception):
    """The peer does not have the object."""


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data
