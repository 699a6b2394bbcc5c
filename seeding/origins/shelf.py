"""What this node hands on to peers: only what it published itself or verified before it installed it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from warmseed.seeding.artifact import ArtifactKey, object_key
from warmseed.seeding.channel.messages import PAYLOAD_BYTES, DescribeRequest
from warmseed.seeding.channel.source import Described, Miss, Opened, Refused, SourceAnswer, Warming
from warmseed.seeding.environment import Environment
from warmseed.seeding.trust.manifest import Manifest
from warmseed.stores.chain import Chain

__all__ = ["Shelf"]

_log = logging.getLogger(__name__)

WARMING_PAUSE = 1.0  # seconds after which a mirror should ask again


@dataclass(frozen=True, slots=True)
class _Object:
    """One object this node vouches for, and where its chain has it."""

    store_key: str
    length: int  # bytes as it lies there


class Shelf:
    """A `SeedSource` over the chain of stores: the disk first, then what is shared."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._envelopes: dict[ArtifactKey, tuple[bytes, Manifest]] = {}
        self._objects: dict[str, _Object] = {}
        self._expected: dict[str, tuple[ArtifactKey, Environment]] = {}  # kind -> what this rank has or will have
        self._warming: set[ArtifactKey] = set()

    def warming(self, key: ArtifactKey, environment: Environment) -> None:
        """This rank is about to have `key`: peers are told to wait."""
        self._warming.add(key)
        self._expected[key.kind] = key, environment

    def settled(self) -> None:
        """Nothing more will come: what is not here by now is a miss."""
        self._warming.clear()

    def put(self, key: ArtifactKey, envelope: bytes, manifest: Manifest) -> None:
        """Hand on what this node has verified or made."""
        self._envelopes[key] = (envelope, manifest)
        self._expected[key.kind] = key, Environment(manifest.environment)
        form = manifest.stored or manifest
        self._objects[form.sha256] = _Object(manifest.store_key, form.length)
        if manifest.index is not None:
            self._objects[manifest.index.sha256] = _Object(object_key(manifest.index.sha256), manifest.index.length)
        self._warming.discard(key)

    def take_down(self, sha256: str) -> None:
        """Stop handing on the payload with this digest, also to peers that know it by name already."""
        for key, (_, manifest) in list(self._envelopes.items()):
            if manifest.sha256 == sha256:
                del self._envelopes[key]
                self._objects.pop((manifest.stored or manifest).sha256, None)
                if manifest.index is not None:
                    self._objects.pop(manifest.index.sha256, None)

    async def describe(self, request: DescribeRequest) -> SourceAnswer:
        held = self._envelopes.get(request.key)
        if held is not None:
            envelope, manifest = held
            return Described(envelope.decode(), await self._payload(manifest))
        if request.key in self._warming:
            return Warming(WARMING_PAUSE)
        return self._other(request)

    def _other(self, request: DescribeRequest) -> SourceAnswer:
        """Why this rank will never have what is asked for: waiting for it would be in vain."""
        ours = self._expected.get(request.kind)
        if ours is None:
            return Miss()
        key, environment = ours
        if key.environment_hash != request.environment_hash:
            theirs = request.environment
            differing = tuple(d.field for d in environment.differences(theirs))[:64] if theirs else ()
            return Refused("environment", differing)
        fields = tuple(n for n in ("config_hash", "dp_rank", "world_rank") if getattr(key, n) != getattr(request, n))
        return Refused("config" if "config_hash" in fields else "rank", fields) if fields else Miss()

    async def _payload(self, manifest: Manifest) -> bytes:
        """The object itself where it is a small table; bundles are fetched by digest."""
        form = manifest.stored or manifest
        if manifest.index is not None or form.length > PAYLOAD_BYTES:
            return b""
        data = await self._chain.get_verified(manifest.store_key, sha256=form.sha256, length=form.length)
        return data or b""

    @asynccontextmanager
    async def open(self, sha256: str, offset: int) -> AsyncIterator[Opened | None]:
        known = self._objects.get(sha256)
        if known is None or offset > known.length:
            yield None
            return
        async with self._chain.open(known.store_key, limit=known.length, offset=offset) as reader:
            if reader is None or reader.size != known.length - offset:
                yield None
            else:
                yield Opened(reader.size, aiter(reader))
