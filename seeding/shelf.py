"""What this node hands on to peers: only what it published itself or verified before it installed it."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from warmseed.seeding.artifact import ArtifactKey, object_key
from warmseed.seeding.channel.messages import PAYLOAD_BYTES, DescribeRequest
from warmseed.seeding.channel.source import Described, Miss, Opened, Refused, SourceAnswer, Warming
from warmseed.seeding.environment import Environment
from warmseed.seeding.manifest import Manifest
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

    def __init__(self, chain: Chain, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._chain = chain
        self._envelopes: dict[ArtifactKey, tuple[bytes, Manifest]] = {}
        self._objects: dict[str, _Object] = {}
        self._expected: dict[str, Environment] = {}  # kind -> our environment, while this rank works on it
        self._warming: set[str] = set()
        self._clock = clock

    def warming(self, kind: str, environment: Environment) -> None:
        """This rank is about to have `kind`: peers are told to wait."""
        self._warming.add(kind)
        self._expected[kind] = environment

    def settled(self) -> None:
        """Nothing more will come: what is not here by now is a miss."""
        self._warming.clear()

    def put(self, key: ArtifactKey, envelope: bytes, manifest: Manifest) -> None:
        """Hand on what this node has verified or made."""
        self._envelopes[key] = (envelope, manifest)
        self._expected.setdefault(key.kind, Environment(manifest.environment))
        if manifest.stored is not None:
            self._objects[manifest.stored.sha256] = _Object(manifest.store_key, manifest.stored.length)
        else:
            self._objects[manifest.sha256] = _Object(manifest.store_key, manifest.length)
        if manifest.index is not None:
            self._objects[manifest.index.sha256] = _Object(object_key(manifest.index.sha256), manifest.index.length)
        self._warming.discard(key.kind)

    def take_down(self, sha256: str) -> None:
        """Stop handing on the payload with this digest."""
        for key, (_, manifest) in list(self._envelopes.items()):
            if manifest.sha256 == sha256:
                del self._envelopes[key]

    async def describe(self, request: DescribeRequest) -> SourceAnswer:
        held = self._envelopes.get(request.key)
        if held is not None:
            envelope, manifest = held
            return Described(envelope.decode(), await self._payload(manifest))
        if differing := self._differing(request.kind, request.environment):
            return Refused("environment", differing)
        if request.kind in self._warming:
            return Warming(WARMING_PAUSE)
        return Miss()

    def _differing(self, kind: str, theirs: Mapping[str, str]) -> tuple[str, ...]:
        ours = self._expected.get(kind)
        if ours is None or not theirs:
            return ()
        return tuple(difference.field for difference in ours.differences(theirs))[:64]

    async def _payload(self, manifest: Manifest) -> bytes:
        """The payload itself where it is a small table; bundles are fetched by digest."""
        if manifest.index is not None or manifest.length > PAYLOAD_BYTES:
            return b""
        data = await self._chain.get_verified(manifest.store_key, sha256=manifest.sha256, length=manifest.length)
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
