"""Publishes a warmup cache: payload first, then its index, then the signed manifest that makes them findable.

A publisher that is killed leaves objects that no manifest names: invisible to every reader.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from warmseed.blocking import run_blocking
from warmseed.seeding.artifact import ArtifactKey, object_key
from warmseed.seeding.environment import Environment
from warmseed.seeding.kinds.base import Capture, Site
from warmseed.seeding.origins.catalog import Catalog
from warmseed.seeding.trust.judge import DAY
from warmseed.seeding.trust.keys import PublisherKey
from warmseed.seeding.trust.manifest import Index, Manifest, sign_manifest
from warmseed.stores.base import Body
from warmseed.stores.chain import Chain

__all__ = ["Publication", "Publisher"]

_log = logging.getLogger(__name__)

LIFE = 30 * DAY  # seconds a manifest is believed; a fleet that still runs publishes again


@dataclass(frozen=True, slots=True)
class Publication:
    """What was published."""

    manifest: Manifest
    envelope: bytes  # the manifest as signed


class Publisher:
    """Signs what a node made and writes it to a store, disk first."""

    def __init__(
        self,
        chain: Chain,
        keys: Sequence[PublisherKey],
        *,
        publisher: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`keys` sign, `publisher` names this node for people."""
        self._chain = chain
        self._catalog = Catalog(chain)
        self._keys = keys
        self._publisher = publisher
        self._clock = clock

    async def publish(self, capture: Capture, kind: str, site: Site, *, known: int = 0, run: str = "") -> Publication:
        """Publish `capture` as the next generation of `kind`'s artifact; `run` is the one its group agreed on.

        Raises:
            StoreError: when the first tier did not take it; the others are written behind and only counted.
            OSError: when the disk fails.
        """
        key = ArtifactKey(
            kind=kind,
            config_hash=site.config_hash,
            environment_hash=capture.environment.digest,
            dp_rank=site.dp_rank,
            world_rank=site.world_rank,
        )
        # A large body is written to the shared stores from the disk's copy, a small one from memory; only what the
        # disk had no room for is read from `capture.payload`, which must stay until the chain is flushed.
        for store_key in (capture.store_key, *capture.also):
            await self._chain.put(store_key, await run_blocking(Body.file, capture.payload))
        # What the configuration was made of lies at its own digest, so that `explain` can say what differs.
        await self._chain.put(object_key(site.config_digest), Environment(site.config_factors).canonical)
        index = None
        if capture.index is not None:
            index = await self._put_index(capture.index)
        issued = int(self._clock())

        def sign(generation: int) -> tuple[Manifest, bytes]:
            manifest = Manifest(
                schema=1,
                kind=kind,
                store_key=capture.store_key,
                config_hash=site.config_hash,
                config_digest=site.config_digest,
                dp_rank=site.dp_rank,
                world_rank=site.world_rank,
                device_index=capture.device_index,
                filename=capture.filename,
                sha256=capture.sha256,
                length=capture.length,
                stored=capture.stored,
                index=index,
                environment=dict(capture.environment),
                generation=generation,
                run=run,
                issued_at=issued,
                expires_at=issued + LIFE,
                publisher=self._publisher,
                provenance=dict(capture.provenance),
            )
            return manifest, sign_manifest(manifest, self._keys)

        manifest, envelope = await self._catalog.append(key, sign, known=known)
        form = capture.stored or manifest
        _log.info(
            "kind=%s published generation=%d bytes=%d stored=%d",
            *(kind, manifest.generation, capture.length, form.length),
        )
        return Publication(manifest, envelope)

    async def _put_index(self, index: bytes) -> Index:
        digest = hashlib.sha256(index).hexdigest()
        await self._chain.put(object_key(digest), index)
        return Index(digest, len(index))
