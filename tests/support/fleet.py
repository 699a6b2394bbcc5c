"""Nodes of a fleet, with the real stores, signatures and channel: what a daemon wires, without a daemon."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from warmseed.seeding.adopt import Adopter, Adoption
from warmseed.seeding.artifact import ArtifactKey
from warmseed.seeding.channel.client import SeedClient, new_instance
from warmseed.seeding.channel.endpoint import Endpoint
from warmseed.seeding.channel.server import SeedServer
from warmseed.seeding.channel.sources import Patience
from warmseed.seeding.kinds.base import Kind, Site
from warmseed.seeding.origins.origins import Origin, PeerOrigin, StoreOrigin
from warmseed.seeding.origins.shelf import Shelf
from warmseed.seeding.publish import Publication, Publisher
from warmseed.seeding.trust.judge import Trust
from warmseed.seeding.trust.keys import Keyring, PublisherKey
from warmseed.seeding.trust.probation import Probation
from warmseed.seeding.trust.token import Token
from warmseed.stores.chain import Chain
from warmseed.stores.registry import open_stores

FLEET_KEY = PublisherKey.generate("fleet")


class Node:
    """One rank's seeding side."""

    def __init__(self, chain: Chain, state: Path, key: PublisherKey, trusted: PublisherKey) -> None:
        self.chain = chain
        self.state = state
        self.shelf = Shelf(chain)
        self.trust = Trust(Keyring([trusted.public]))
        self.publisher = Publisher(chain, [key], publisher="test")

    @classmethod
    @asynccontextmanager
    async def opened(
        cls, state: Path, *stores: str, key: PublisherKey = FLEET_KEY, trusted: PublisherKey = FLEET_KEY
    ) -> AsyncIterator[Node]:
        """A node whose disk tier lies in `state`, before the shared `stores`."""
        chain = await open_stores(stores, folder=state / "store")
        try:
            yield cls(chain, state, key, trusted)
        finally:
            await chain.aclose()

    @asynccontextmanager
    async def serving(self, token: Token) -> AsyncIterator[Endpoint]:
        """Its listener, and where it is."""
        server = SeedServer(self.shelf, [token], host="127.0.0.1", port=0, instance=new_instance())
        async with server.listening():
            host, port = server.addresses[0]
            yield Endpoint(host, port)

    def adopter(self, site: Site, kind: Kind, *, token: Token | None = None, peer: Endpoint | None = None) -> Adopter:
        """What searches its stores, and `peer` if there is one."""
        origins: list[Origin] = [StoreOrigin(self.chain)]
        if token is not None and peer is not None:
            client = SeedClient([token], instance=new_instance())
            patience = Patience(wait_seconds=1.0)
            origins.append(PeerOrigin(client, [peer], patience, environment=kind.environment(site)))
        return Adopter(origins, trust=self.trust, probation=Probation(self.state), state=self.state, budget=30.0)

    async def adopt(self, kind: Kind, site: Site) -> Adoption:
        """Adopt from the stores alone."""
        return await self.adopter(site, kind).adopt(kind, site)

    async def publish(self, kind: Kind, site: Site, *, run: str = "") -> Publication:
        """Publish what `kind` captures at `site`, to the end of the background."""
        capture = kind.capture(site)
        if capture is None:
            raise AssertionError("nothing to publish")
        published = await self.publisher.publish(capture, kind.name, site, run=run)
        if not await self.chain.flush(20):
            raise AssertionError("the shared stores did not take it")
        self.shelf.put(artifact_key(kind, site), published.envelope, published.manifest)
        return published


def artifact_key(kind: Kind, site: Site) -> ArtifactKey:
    """The key of `kind`'s artifact at `site`."""
    return ArtifactKey(
        kind=kind.name,
        config_hash=site.config_hash,
        environment_hash=kind.environment(site).digest,
        dp_rank=site.dp_rank,
        world_rank=site.world_rank,
    )
