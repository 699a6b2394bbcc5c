"""One rank's seeding side, put together from its configuration: whom it believes, where it looks, whom it serves."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from warmseed.blocking import run_blocking
from warmseed.daemon.protocol.spec import RankSpec
from warmseed.daemon.rank.fleet_keys import fleet_keys
from warmseed.daemon.rank.trials import Trials, quietly
from warmseed.daemon.settings.paths import state_folder
from warmseed.errors import ConfigurationError, WarmseedError, printable
from warmseed.seeding.adopt import Adopter, Adoption
from warmseed.seeding.artifact import ArtifactKey
from warmseed.seeding.channel.client import SeedClient, new_instance
from warmseed.seeding.channel.server import SeedServer
from warmseed.seeding.channel.sources import Patience
from warmseed.seeding.environment import Environment
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.gang.rendezvous import Rendezvous
from warmseed.seeding.kinds.autotune.group import adopt_in_group, note_published
from warmseed.seeding.kinds.autotune.kind import FlashInferAutotune
from warmseed.seeding.kinds.autotune.unsigned import adopt_unsigned
from warmseed.seeding.kinds.base import Capture, Kind, Site
from warmseed.seeding.origins.origins import Origin, PeerOrigin, StoreOrigin
from warmseed.seeding.origins.shelf import Shelf
from warmseed.seeding.publish import Publisher
from warmseed.seeding.trust.judge import Marks, Trust
from warmseed.seeding.trust.keys import PublisherKey
from warmseed.seeding.trust.marks import load_marks
from warmseed.seeding.trust.reconcile import Restorable, reconcile
from warmseed.seeding.trust.token import Token, read_tokens
from warmseed.stores.base import Observer
from warmseed.stores.chain import Chain
from warmseed.stores.registry import open_stores

__all__ = ["Seeds"]

_log = logging.getLogger(__name__)
# For all ranks of a group to come to a round of their decision: they load their weights first, at unlike speed.
GROUP_SECONDS = 600.0
WRITE_SECONDS = 3600.0  # for the shared stores to take what this node made; nobody waits for it


class Seeds:
    """What a rank needs to adopt, publish and serve warmup caches."""

    def __init__(
        self,
        chain: Chain,
        *,
        trust: Trust,
        keys: Sequence[PublisherKey],
        tokens: Sequence[Token],
        client: SeedClient | None,
        spec: RankSpec,
        state: Path,
        count: Callable[[Sequence[str]], None],
    ) -> None:
        self.chain = chain
        self.shelf = Shelf(chain)
        self.tokens = tuple(tokens)
        self._trust, self._keys, self._client = trust, keys, client
        self._spec, self._state, self._count = spec, state, count
        self.trials = Trials(state, chain=chain, shelf=self.shelf, keys=keys)

    @classmethod
    @asynccontextmanager
    async def opened(
        cls, spec: RankSpec, cache_root: Path, *, observer: Observer, count: Callable[[Sequence[str]], None]
    ) -> AsyncIterator[Seeds]:
        """The seeding side of `spec`'s rank; its listener runs for as long as the block.

        `observer` hears of every store operation, `count` why something was not captured or published.

        Raises:
            ConfigurationError: for a token, key or store that can't work, a history that can't be read, or a
                listener's port in use.
        """
        config = spec.config
        state = state_folder(cache_root)
        file = None if config.seed_token_file is None else Path(config.seed_token_file)
        arguments = () if config.seed_token is None else (config.seed_token.reveal(),)
        tokens = await run_blocking(read_tokens, file=file, arguments=arguments, environ={})
        keys, keyring = await run_blocking(
            fleet_keys, tokens, state, signing=config.seed_signing_key, trusted=config.seed_trusted_keys
        )
        shared = bool(tokens or config.seed_signing_key or config.seed_trusted_keys or config.allow_unsigned)
        stores = config.warmup_cache_stores if shared else ()
        chain = await open_stores(
            stores, folder=state / "store", table=config.stores, writes=config.store_writes, observer=observer
        )
        try:
            marks = await run_blocking(_history, state / "highest.json")
            instance = new_instance()
            client = None
            if spec.seed_sources:
                client = await run_blocking(SeedClient, tokens, instance=instance)
            trust = Trust(keyring, marks=marks)
            seeds = cls(
                chain, trust=trust, keys=keys, tokens=tokens, client=client, spec=spec, state=state, count=count
            )
            async with AsyncExitStack() as stack:
                if spec.seed_listen is not None:
                    host, port = spec.seed_listen.host, spec.seed_listen.port
                    server = await run_blocking(
                        SeedServer, seeds.shelf, tokens, host=host, port=port, instance=instance
                    )
                    await stack.enter_async_context(server.listening())
                yield seeds
        finally:
            await chain.aclose()

    async def adopt(self, kind: Kind, site: Site, *, within: float | None = None) -> Adoption:
        """Have `kind`'s cache in place, from the disk, the stores or a peer; or say why not.

        A peer that is still making it is waited for as long as the configuration allows; not so with `within`, the
        seconds after which local work would be done.
        """
        environment = await run_blocking(kind.environment, site)
        self.shelf.warming(_key(kind.name, site, environment), environment)
        await self._reconcile(kind, site)
        adoption = await self._adopter(environment, within).adopt(kind, site)
        if adoption.outcome == "none":
            adoption = await self._unsigned(kind, site, adoption)
        if adoption.manifest is not None:
            if adoption.envelope:
                self.shelf.put(_key(kind.name, site, environment), adoption.envelope, adoption.manifest)
            await self.trials.record(adoption, site, "adopted", "" if adoption.envelope else "unsigned")
        elif adoption.outcome == "none":
            reasons = "; ".join(f"{refusal.origin}: {refusal.reason}" for refusal in adoption.refusals)
            await self.trials.record(adoption, site, "local", reasons)
        return adoption

    async def _unsigned(self, kind: Kind, site: Site, searched: Adoption) -> Adoption:
        """`searched`, or what a table without a signature makes of it, where those will do."""
        config = self._spec.config
        if not config.allow_unsigned or not isinstance(kind, FlashInferAutotune):
            return searched
        now = int(time.time())
        try:
            async with asyncio.timeout(config.seed_budget) as limit:
                found = await adopt_unsigned(
                    self.chain, kind, site, trust=self._trust, probation=self.trials.probation, limit=limit, now=now
                )
        except TimeoutError:
            _log.warning("kind=%s no unsigned table within %g s", kind.name, config.seed_budget)
            return searched
        return dataclasses.replace(found, refusals=(*searched.refusals, *found.refusals))

    async def adopt_together(self, kind: FlashInferAutotune, site: Site, group: Rendezvous) -> Adoption:
        """The same for tables that several ranks tune together: all of them adopt one run, or none does.

        Raises:
            GangBroken: this rank can't know what the others did; it must not go on.
        """
        environment = await run_blocking(kind.environment, site)
        key = _key(kind.name, site, environment)
        self.shelf.warming(key, environment)
        adopter = self._adopter(environment)
        adoption = await adopt_in_group(adopter, kind, site, group, timeout=GROUP_SECONDS)
        if adoption.manifest is not None:
            self.shelf.put(key, adoption.envelope, adoption.manifest)
        await self.trials.record(adoption, site, "local" if adoption.outcome == "none" else "adopted", "")
        return adoption

    def _adopter(self, environment: Environment, within: float | None = None) -> Adopter:
        config = self._spec.config
        patience = config.seed_wait if within is None and self._client is not None else 0.0
        return Adopter(
            self._origins(environment, patience),
            trust=self._trust,
            probation=self.trials.probation,
            state=self._state,
            budget=min(config.seed_budget + patience, math.inf if within is None else within),
        )

    def _origins(self, environment: Environment, wait_seconds: float) -> list[Origin]:
        if not len(self._trust.keyring):
            return []
        origins: list[Origin] = [StoreOrigin(self.chain)]
        if self._client is not None:
            patience = Patience(wait_seconds=wait_seconds)
            origins.append(PeerOrigin(self._client, self._spec.seed_sources, patience, environment=environment))
        return origins

    async def hand_on(self, kind: Kind, site: Site, adoption: Adoption) -> Adoption | None:
        """Serve peers what this node has and has published before; `adoption` with its manifest, if there is one."""
        environment = await run_blocking(kind.environment, site)
        found = await self._adopter(environment).known(kind, site)
        if found is None:
            return None
        manifest, envelope = found
        self.shelf.put(_key(kind.name, site, environment), envelope, manifest)
        installation = await run_blocking(kind.current, site) if isinstance(kind, Restorable) else None
        if installation is not None and installation.sha256 != manifest.sha256:
            installation = None
        return dataclasses.replace(adoption, manifest=manifest, envelope=envelope, installation=installation)

    async def _reconcile(self, kind: Kind, site: Site) -> None:
        """Take back what lies here if the fleet has denied it, or its last start never said how it went."""
        if not isinstance(kind, Restorable):
            return
        current = await run_blocking(kind.current, site)
        if current is None:
            return
        now = int(time.time())
        denial = await StoreOrigin(self.chain).denial(current.sha256)
        try:
            if denial is not None:
                self._trust.deny(denial, now=now)
        except ArtifactRefused as error:
            _log.warning("a denial of %s is ignored: %s", current.sha256[:12], printable(error))
        rank = site.rank_label
        taken = await quietly(
            reconcile, kind, site, trust=self._trust, probation=self.trials.probation, rank=rank, now=now
        )
        if taken is not None:
            await self.trials.record(Adoption(kind.name, "none"), site, "quarantined", taken.reason)

    async def capture(self, kind: Kind, site: Site) -> Capture | None:
        """What this node has of `kind`, ready to be published; `None` for nothing, or nothing fit to publish."""
        if not self._keys:
            return None
        try:
            return await run_blocking(kind.capture, site)
        except (WarmseedError, OSError) as error:
            _log.warning("kind=%s not captured, so not published: %s", kind.name, printable(error, limit=500))
            self._count(("not-captured",))
            return None

    async def publish(
        self,
        captures: Sequence[tuple[Kind, Capture]],
        sites: Mapping[str, Site],
        *,
        runs: Mapping[str, str] | None = None,
    ) -> None:
        """Publish to the disk, then the stores. A failure costs the fleet a generation, never this node its start.

        `runs` names, by kind, the run that this rank's group tuned together.
        """
        publisher = Publisher(self.chain, self._keys, publisher=socket.gethostname())
        try:
            for kind, capture in captures:
                key = _key(kind.name, sites[kind.name], capture.environment)
                known = self._trust.mark(key)
                run = (runs or {}).get(kind.name, "")
                try:
                    published = await publisher.publish(
                        capture, kind.name, sites[kind.name], known=known.generation if known else 0, run=run
                    )
                    if run:
                        await note_published(sites[kind.name], run)
                except (WarmseedError, OSError, ValueError) as error:
                    _log.warning("kind=%s not published: %s", kind.name, printable(error, limit=500))
                    self._count(("not-published",))
                else:
                    self.shelf.put(key, published.envelope, published.manifest)
            self.shelf.settled()
            # What the disk had no room for is read from the captured file until the last store has it.
            await self.chain.flush(WRITE_SECONDS)
        finally:
            for _, capture in captures:
                with contextlib.suppress(OSError):
                    capture.payload.unlink(missing_ok=True)


def _history(path: Path) -> Marks:
    try:
        return load_marks(path)
    except OSError as error:
        raise ConfigurationError(
            f"the history of generations in {path} can't be read ({error.strerror}), and without it a rollback can't "
            "be told from news; repair the disk or remove it, and this node starts with an empty history"
        ) from error


def _key(kind: str, site: Site, environment: Environment) -> ArtifactKey:
    return ArtifactKey(
        kind=kind,
        config_hash=site.config_hash,
        environment_hash=environment.digest,
        dp_rank=site.dp_rank,
        world_rank=site.world_rank,
    )
