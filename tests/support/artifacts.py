"""A kind, a key and nodes in memory and on disk, for tests of publishing and adopting."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.sites import ENVIRONMENT, make_site
from warmseed.seeding.adopt import Adopter
from warmseed.seeding.artifact import ArtifactKey, object_key
from warmseed.seeding.environment import Environment
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.kinds.base import Capture, Evidence, Installation, Site, Verdict
from warmseed.seeding.origins.origins import Origin, StoreOrigin
from warmseed.seeding.publish import Publication, Publisher
from warmseed.seeding.trust.judge import Trust
from warmseed.seeding.trust.keys import Keyring, PublisherKey
from warmseed.seeding.trust.manifest import Manifest
from warmseed.seeding.trust.marks import load_marks
from warmseed.seeding.trust.probation import Probation
from warmseed.stores.base import Store
from warmseed.stores.chain import Chain
from warmseed.stores.disk import DiskStore

NOW = 1_800_000_000  # unix seconds; after the release, so that dates count
KIND = "plain_table"
FLEET = PublisherKey("fleet", bytes(range(32)))
STRANGER = PublisherKey("stranger", bytes(range(1, 33)))
TABLE = b"a table " * 100


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a test that looks at files itself, and so blocks the loop where the code under test must not."""

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main

    asyncio.run(bounded())


@dataclass
class PlainKind:
    """One file, kept as it is. Refuses what `unfit` says."""

    name: str = KIND
    has: bool = False
    unfit: Callable[[bytes], str | None] = lambda _: None
    installed: list[bytes] = field(default_factory=list)

    def environment(self, site: Site) -> Environment:
        return site.environment

    def capture(self, site: Site) -> Capture | None:
        return None

    def install(self, manifest: Manifest, payload: Path, index: bytes | None, site: Site) -> Installation:
        data = payload.read_bytes()
        if reason := self.unfit(data):
            raise ArtifactRefused(reason, "this kind does not want it")
        self.installed.append(data)
        return Installation(self.name, manifest.generation, manifest.sha256, {})

    def present(self, site: Site) -> bool:
        return self.has

    def judge(self, installation: Installation, evidence: Evidence, site: Site) -> Verdict:
        return Verdict(used=True, reason="it is plain")

    def retract(self, installation: Installation, site: Site) -> None: ...


@dataclass
class SeedNode:
    """One node: its disk, the stores it shares, whom it believes, what it installed."""

    base: Path
    stores: tuple[Store, ...] = ()
    keys: tuple[PublisherKey, ...] = ()
    trusted: tuple[PublisherKey, ...] | None = None
    environment: Mapping[str, str] = field(default_factory=lambda: ENVIRONMENT)
    kind: PlainKind = field(default_factory=PlainKind)
    now: int = NOW

    def __post_init__(self) -> None:
        self.site = make_site(self.base, environment=self.environment)
        self.chain = Chain(DiskStore(self.site.state / "store"), self.stores)
        trusted = self.keys if self.trusted is None else self.trusted
        self.trust = Trust(Keyring([key.public for key in trusted]), marks=load_marks(self.marks))

    @property
    def marks(self) -> Path:
        return self.site.state / "highest.json"

    @property
    def key(self) -> ArtifactKey:
        return key_of(self.site)

    def adopter(self, *further: Origin, budget: float = 30.0) -> Adopter:
        return Adopter(
            [StoreOrigin(self.chain), *further],
            trust=self.trust,
            probation=Probation(self.site.state),
            state=self.site.state,
            budget=budget,
            clock=lambda: self.now,
        )

    def capture(self, payload: bytes) -> Capture:
        """What `PlainKind` would have captured."""
        sha256 = hashlib.sha256(payload).hexdigest()
        path = self.site.state / f"captured-{sha256[:8]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(payload)
        return Capture(
            filename="table.json",
            payload=path,
            sha256=sha256,
            length=len(payload),
            environment=self.site.environment,
            device_index=-1,
            store_key=object_key(sha256),
        )

    async def publish(self, payload: bytes) -> Publication:
        """Publish `payload` everywhere."""
        publisher = Publisher(self.chain, self.keys, publisher="test", clock=lambda: self.now)
        known = self.trust.mark(self.key)
        published = await publisher.publish(
            self.capture(payload), KIND, self.site, known=known.generation if known else 0
        )
        assert await self.chain.flush(30)
        return published


def key_of(site: Site) -> ArtifactKey:
    """The key of `PlainKind`'s artifact at `site`."""
    return ArtifactKey(kind=KIND, config_hash=site.config_hash, environment_hash=site.environment.digest)
