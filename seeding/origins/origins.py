"""Where artifacts come from: the chain of stores, or a peer that is running now.

Every origin hands out the same two things: signed envelopes to be judged, and the bytes of a manifest that was
believed. What comes from a peer is asked of the stores first: they are built for many readers.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from warmseed.blocking import run_blocking
from warmseed.seeding.artifact import ArtifactKey, denial_key, object_key
from warmseed.seeding.bundle.delta import Piece
from warmseed.seeding.bundle.index import BundleIndex
from warmseed.seeding.channel.client import Description, SeedClient
from warmseed.seeding.channel.endpoint import Endpoint
from warmseed.seeding.channel.errors import ChannelError
from warmseed.seeding.channel.messages import DescribeRequest
from warmseed.seeding.channel.ranges import Range
from warmseed.seeding.channel.sources import Patience, SeedSources
from warmseed.seeding.environment import Environment
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.origins.catalog import Catalog
from warmseed.seeding.origins.deltas import PieceSource, fetch_delta
from warmseed.seeding.origins.payload import write_stream
from warmseed.seeding.trust.dsse import ENVELOPE_BYTES
from warmseed.seeding.trust.manifest import Manifest, Stored
from warmseed.stores.base import Body
from warmseed.stores.chain import Chain
from warmseed.stores.errors import StoreError

__all__ = ["Origin", "PeerOrigin", "StoreOrigin"]

_log = logging.getLogger(__name__)


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

    async def delta(
        self, index: BundleIndex, stored: Stored, *, also: Origin, state: Path, folder: Path
    ) -> Path | None:
        """The stored object of `index` as a new file, mostly from bundles this node has; `None`: fetch it whole.

        What the stores do not have of it comes from `also`, if that is asked for pieces.
        """
        local = self._chain.disk
        if local is None:
            return None
        peers = [also] if isinstance(also, PieceSource) else []
        try:
            delta = await fetch_delta(
                index, stored, tiers=self._chain.tiers, local=local, also=peers, state=state, folder=folder
            )
        except (ArtifactRefused, StoreError, ChannelError) as error:
            _log.info("bundle=%s fetched whole: %s", index.sha256[:12], error)
            return None
        return None if delta is None else delta.path

    async def keep(
        self, key: ArtifactKey, manifest: Manifest, envelope: bytes, payload: Path, index: bytes | None
    ) -> None:
        """Have the disk hold an adopted artifact, wherever it came from: for this node's next start, and its peers.

        Best effort: what the disk does not take is fetched again.
        """
        disk = self._chain.disk
        if disk is None:
            return
        objects: list[tuple[str, Body]] = [(manifest.store_key, await run_blocking(Body.file, payload))]
        if index is not None and manifest.index is not None:
            objects.append((object_key(manifest.index.sha256), Body.of(index)))
        objects.append((key.manifest_key(manifest.generation), Body.of(envelope)))
        objects.append((key.head_key, Body.of(str(manifest.generation).encode())))
        try:
            for store_key, body in objects:
                known = await disk.stat(store_key)
                if known is None or known.size != body.size or store_key == key.head_key:
                    await disk.put(store_key, body)
        except StoreError as error:
            _log.warning("kind=%s is not kept on disk: %s", key.kind, error)


class PeerOrigin:
    """The source daemons, in order; each is asked until one has something that is believed."""

    def __init__(
        self, client: SeedClient, peers: Sequence[Endpoint], patience: Patience, *, environment: Environment
    ) -> None:
        self._client = client
        self._peers = tuple(peers)
        self._patience = patience
        self._environment = environment
        self._described: Description | None = None  # by whom the last envelope came

    @property
    def name(self) -> str:
        return f"peer {self._described.peer}" if self._described else "peers"

    async def envelopes(self, key: ArtifactKey, *, known: int) -> AsyncIterator[bytes]:
        request = DescribeRequest.of(key, instance=self._client.instance, environment=self._environment)
        left = list(self._peers)
        while left:
            self._described = await SeedSources(self._client, left, self._patience).describe(request)
            if self._described is None:
                return
            yield self._described.manifest.encode()
            left.remove(self._described.peer)  # what it offered was refused

    async def object(self, store_key: str, *, sha256: str, length: int, folder: Path) -> Path | None:
        """The bytes from the peers; a transfer that is cut is taken up again where it stopped, or elsewhere."""
        described = self._described
        if described is not None and hashlib.sha256(described.payload).hexdigest() == sha256:
            return await write_stream(_once(described.payload), folder, sha256=sha256, length=length)
        sources = SeedSources(self._client, self._peers, self._patience)
        first = described.peer if described is not None else None
        async with sources.fetch(sha256, length=length, first=first) as pieces:
            return await write_stream(pieces, folder, sha256=sha256, length=length)

    @asynccontextmanager
    async def pieces(self, key: str, stored: Stored, wanted: Sequence[Piece]) -> AsyncIterator[AsyncIterator[bytes]]:
        """Parts of the object from the peers; one that is lost on the way is followed by the next, or asked again.

        Raises:
            NoSource: while iterating: no peer is left that has it, or they are all too old to be asked for parts.
        """
        sources = SeedSources(self._client, self._peers, self._patience)
        first = self._described.peer if self._described is not None else None
        ranges = [Range(piece.offset, piece.length) for piece in wanted]
        async with sources.fetch(stored.sha256, length=stored.length, first=first, ranges=ranges) as chunks:
            yield chunks


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data
