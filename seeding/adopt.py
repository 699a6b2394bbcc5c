"""Adopts a warmup cache: disk, stores, peers, in that order, and local work when none of them will do.

Nothing here may cost more than its budget, and nothing it meets may stop a start: whatever goes wrong ends as
an `Adoption` that says why, and the rank does the work itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from warmseed.blocking import run_blocking
from warmseed.errors import WarmseedError, printable
from warmseed.seeding.adoption import Adoption, Candidate, Refusal
from warmseed.seeding.artifact import ArtifactKey
from warmseed.seeding.channel.errors import ChannelError
from warmseed.seeding.errors import ArtifactRefused, CannotJudge
from warmseed.seeding.kinds.base import HealsDisk, Installation, Kind, Overrulable, Selective, Site
from warmseed.seeding.origins.fetcher import Fetcher
from warmseed.seeding.origins.origins import Origin, StoreOrigin
from warmseed.seeding.trust.judge import Expected, Trust
from warmseed.seeding.trust.manifest import Manifest
from warmseed.seeding.trust.marks import save_mark
from warmseed.seeding.trust.probation import Probation
from warmseed.stores.errors import StoreError

__all__ = ["Adopter", "Adoption", "Candidate", "Refusal"]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Search:
    """One search under way."""

    kind: Kind
    site: Site
    expected: Expected
    refusals: list[Refusal] = field(default_factory=list)
    limit: asyncio.Timeout | None = None

    @asynccontextmanager
    async def unhurried(self) -> AsyncIterator[None]:
        """The budget is for fetching: an installation that is given up half way would go on behind our back."""
        until = self.limit.when() if self.limit is not None else None
        if self.limit is not None:
            self.limit.reschedule(None)
        try:
            yield
        finally:
            if self.limit is not None:
                self.limit.reschedule(until)

    def refuse(self, origin: str, reason: str, message: str) -> None:
        _log.info("kind=%s origin=%s refused=%s %s", self.kind.name, origin, reason, printable(message))
        self.refusals.append(Refusal(origin, reason, message))


class Adopter:
    """Searches the origins in order; the first artifact that is believed and can be installed wins."""

    def __init__(
        self,
        origins: Sequence[Origin],
        *,
        trust: Trust,
        probation: Probation,
        state: Path,
        budget: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`state` is warmseed's own folder, `budget` the seconds one adoption may take in all."""
        self._origins = origins
        self._trust = trust
        self._probation = probation
        self._stores = [origin for origin in origins if isinstance(origin, StoreOrigin)]
        self._fetcher = Fetcher(self._stores, state=state)
        self._marks = state / "highest.json"
        self._budget = budget
        self._clock = clock

    async def adopt(self, kind: Kind, site: Site) -> Adoption:
        """Have `kind`'s cache in place at `site`, or say why it is not. Never raises for what it finds."""
        start = time.monotonic()
        search = _Search(kind, site, await self._expected(kind, site))
        await self._heal(kind, site)
        present = await run_blocking(kind.present, site)
        adoption = None
        try:
            async with asyncio.timeout(self._budget) as search.limit:
                if present and not await self._overruled(search):
                    return Adoption(kind.name, "present", "disk", seconds=time.monotonic() - start)
                adoption = await self._search(search)
        except TimeoutError:
            search.refuse("", "budget", f"nothing was adopted within {self._budget:g} s; this node does the work")
        seconds = time.monotonic() - start
        if adoption is None:
            # What the fleet wanted instead was not to be had; what lies here is better than nothing, unless denied.
            kept = present and await run_blocking(kind.present, site)
            outcome: Literal["present", "none"] = "present" if kept else "none"
            return Adoption(kind.name, outcome, seconds=seconds, refusals=tuple(search.refusals))
        origin, manifest, envelope, installation = adoption
        return Adoption(
            kind.name, "installed", origin, manifest, envelope, installation, seconds, tuple(search.refusals)
        )

    async def known(self, kind: Kind, site: Site) -> tuple[Manifest, bytes] | None:
        """The newest manifest of `kind` that this node believes, with its envelope; nothing is installed.

        `None` also when it could not be found within the budget.
        """
        try:
            async with asyncio.timeout(self._budget):
                return await self._known(kind, await self._expected(kind, site))
        except TimeoutError:
            _log.warning("kind=%s no manifest was found within %g s", kind.name, self._budget)
            return None

    async def _known(self, kind: Kind, expected: Expected) -> tuple[Manifest, bytes] | None:
        for store in self._stores:
            async with aclosing(self._candidates(store, expected.key)) as envelopes:
                async for envelope in envelopes:
                    try:
                        return await self._believe(envelope, expected), envelope
                    except ArtifactRefused as error:
                        _log.info("kind=%s origin=%s refused=%s %s", kind.name, store.name, error.reason, error)
        return None

    async def _heal(self, kind: Kind, site: Site) -> None:
        """Local files that poison every start go first, so that they are neither found nor built upon."""
        if not isinstance(kind, HealsDisk):
            return
        try:
            for line in await run_blocking(kind.heal, site):
                _log.warning("kind=%s %s", kind.name, line)
        except OSError as error:
            _log.error("kind=%s a local file poisons every start and can't be moved: %s", kind.name, printable(error))

    async def overruled(self, kind: Kind, site: Site) -> bool:
        """Whether the fleet wants something else here than what lies here; what it denied is set aside."""
        try:
            async with asyncio.timeout(self._budget):
                return await self._overruled(_Search(kind, site, await self._expected(kind, site)))
        except TimeoutError:
            return False

    async def _overruled(self, search: _Search) -> bool:
        kind, key, now = search.kind, search.expected.key, int(self._clock())
        if not isinstance(kind, Overrulable):
            return False
        held = await run_blocking(kind.held, search.site)
        try:
            for digest in held:
                await self._learn_denials(digest, now)
                if reason := self._trust.denied(digest, now=now):
                    await run_blocking(kind.set_aside, search.site, f"payload {digest[:12]} is {reason}")
                    search.refuse("disk", "denied", f"what lies here, {digest[:12]}, is {reason}; set aside")
                    return True
            for store in self._stores:
                if (pin := await store.pin(key)) is None:
                    continue
                wanted = self._trust.pinned_payload(pin, key, now=now)
                if wanted is not None and wanted not in held:
                    search.refuse("disk", "pinned", f"the fleet is pinned to {wanted[:12]}, which is not here")
                    return True
        except (StoreError, OSError) as error:
            _log.warning("kind=%s not checked against pins and denials: %s", kind.name, printable(error))
        return False

    @asynccontextmanager
    async def candidates(self, kind: Kind, site: Site, *, most: int = 16) -> AsyncIterator[list[Candidate]]:
        """Every artifact that would be believed here, for those who must choose one together with others.

        Nothing is installed; what could not be had within the budget is not among them.
        """
        await self._heal(kind, site)
        search = _Search(kind, site, await self._expected(kind, site))
        found: dict[tuple[int, str], Candidate] = {}
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self._budget):
                    await self._give_up_bad_mark(search.expected.key)
                    for origin in self._origins:
                        await self._gather(search, origin, stack, found, most)
            except TimeoutError:
                search.refuse("", "budget", f"the search ended after {self._budget:g} s")
            yield list(found.values())

    async def _gather(
        self,
        search: _Search,
        origin: Origin,
        stack: AsyncExitStack,
        found: dict[tuple[int, str], Candidate],
        most: int,
    ) -> None:
        try:
            async for envelope in self._candidates(origin, search.expected.key):
                try:
                    manifest = await self._believe(envelope, search.expected)
                    name = (manifest.generation, manifest.sha256)
                    if name in found or len(found) >= most:
                        continue
                    payload, index = await stack.enter_async_context(self._fetcher.fetched(manifest, origin))
                    found[name] = Candidate(origin.name, manifest, envelope, payload, index)
                except ArtifactRefused as error:
                    search.refuse(origin.name, error.reason, str(error))
        except (StoreError, ChannelError, OSError) as error:
            search.refuse(origin.name, "unavailable", str(error))

    async def install(self, kind: Kind, site: Site, candidate: Candidate) -> Installation:
        """Put `candidate` in place.

        Raises:
            ArtifactRefused: the kind refuses it; nothing has changed then.
            OSError: the disk fails; nothing has changed then.
        """
        expected = await self._expected(kind, site)
        return await self._install(kind, site, expected, candidate)

    async def _install(self, kind: Kind, site: Site, expected: Expected, candidate: Candidate) -> Installation:
        """What was believed, in place; remembered and on trial before, kept on disk after."""
        manifest, rank = candidate.manifest, expected.key.rank_label
        before = self._trust.mark(expected.key)
        if self._trust.remember(manifest, expected):
            await self._save_mark(expected.key)
        await run_blocking(self._probation.begin, manifest.kind, manifest.sha256, manifest.generation, rank)
        try:
            installation = await run_blocking(kind.install, manifest, candidate.payload, candidate.index, site)
        except (WarmseedError, OSError):
            # Nothing has changed, so no engine will try it, and an older generation may still be what works here.
            self._trust.restore(expected.key, before)
            with suppress(WarmseedError, OSError):
                await self._save_mark(expected.key)
                await run_blocking(self._probation.withdraw, manifest.sha256, rank)
            raise
        for store in self._stores:
            await store.keep(expected.key, manifest, candidate.envelope, candidate.payload, candidate.index)
        return installation

    async def _save_mark(self, key: ArtifactKey) -> None:
        await run_blocking(save_mark, self._marks, key.manifest_folder, self._trust.mark(key))

    async def _expected(self, kind: Kind, site: Site) -> Expected:
        environment = await run_blocking(kind.environment, site)
        key = ArtifactKey(
            kind=kind.name,
            config_hash=site.config_hash,
            environment_hash=environment.digest,
            dp_rank=site.dp_rank,
            world_rank=site.world_rank,
        )
        return Expected(
            key=key, config_digest=site.config_digest, environment=environment, device_index=site.device_index
        )

    async def _search(self, search: _Search) -> tuple[str, Manifest, bytes, Installation] | None:
        await self._give_up_bad_mark(search.expected.key)
        for origin in self._origins:
            partial: list[bytes] = []  # what would work here only in part: if nothing works whole, the newest of them
            try:
                async with aclosing(self._candidates(origin, search.expected.key)) as envelopes:
                    async for envelope in envelopes:
                        found = await self._try(search, origin, envelope, partial)
                        if found is not None:
                            return origin.name, found[0], envelope, found[1]
                for envelope in partial:
                    found = await self._try(search, origin, envelope)
                    if found is not None:
                        return origin.name, found[0], envelope, found[1]
            except (StoreError, ChannelError) as error:
                search.refuse(origin.name, "unavailable", str(error))
        return None

    async def _give_up_bad_mark(self, key: ArtifactKey) -> None:
        """Where the newest generation seen here turned out to be poison, let the one before it be good enough."""
        mark = self._trust.mark(key)
        if mark is None or not mark.sha256:  # never seen one, or given up already
            return
        now = int(self._clock())
        try:
            await self._learn_denials(mark.sha256, now)
            quarantined = await run_blocking(self._probation.standing, mark.sha256) == "quarantined"
            if quarantined or self._trust.denied(mark.sha256, now=now):
                self._trust.lower(key)
        except (StoreError, OSError) as error:
            _log.warning("kind=%s not checked for a way back: %s", key.kind, printable(error))

    async def _candidates(self, origin: Origin, key: ArtifactKey) -> AsyncGenerator[bytes, None]:
        """Envelopes to judge: the pinned generation first, which may be older than the newest few."""
        known = self._trust.mark(key)
        if isinstance(origin, StoreOrigin) and (pin := await origin.pin(key)) is not None:
            generation = self._trust.pinned(pin, key, now=int(self._clock()))
            if generation is not None and (envelope := await origin.generation(key, generation)) is not None:
                yield envelope
        async for envelope in origin.envelopes(key, known=known.generation if known else 0):
            yield envelope

    async def _try(
        self, search: _Search, origin: Origin, envelope: bytes, partial: list[bytes] | None = None
    ) -> tuple[Manifest, Installation] | None:
        """What `envelope` describes, installed; one that would work here only in part goes to `partial` instead."""
        try:
            manifest = await self._believe(envelope, search.expected)
            if partial is not None and not await self._suits(search, origin, manifest):
                partial.append(envelope)
                return None
            async with self._fetcher.fetched(manifest, origin) as (payload, index):
                candidate = Candidate(origin.name, manifest, envelope, payload, index)
                async with search.unhurried():
                    installation = await self._install(search.kind, search.site, search.expected, candidate)
        except CannotJudge as error:
            search.refuse(origin.name, "cannot-judge", str(error))
        except ArtifactRefused as error:
            search.refuse(origin.name, error.reason, str(error))
        except OSError as error:
            search.refuse(origin.name, "disk", f"{type(error).__name__}: {error}; nothing was installed")
        except (StoreError, ChannelError) as error:
            search.refuse(origin.name, "unavailable", str(error))
        except WarmseedError as error:
            search.refuse(origin.name, "failed", str(error))
        else:
            return manifest, installation
        return None

    async def _suits(self, search: _Search, origin: Origin, manifest: Manifest) -> bool:
        """Whether all of an artifact would work here; a peer has one, so what it offers is taken as it is.

        Raises:
            ArtifactRefused: its index is not to be had, or no index of it.
            StoreError: when the store fails.
            OSError: when the disk fails.
        """
        kind = search.kind
        if not isinstance(kind, Selective) or not isinstance(origin, StoreOrigin):
            return True
        index = await self._fetcher.index(manifest, origin)
        if index is None or await run_blocking(kind.suits, manifest, index, search.site):
            return True
        _log.info(
            "kind=%s origin=%s generation=%d works here only in part; looking for an earlier one that works whole",
            *(kind.name, origin.name, manifest.generation),
        )
        return False

    async def _believe(self, envelope: bytes, expected: Expected) -> Manifest:
        now = int(self._clock())
        pin = await self._pin(expected.key)
        manifest = self._trust.believe(envelope, expected, now=now, pin=pin)
        # The fleet may know something about this very payload that its manifest can't say.
        if await self._learn_denials(manifest.sha256, now):
            manifest = self._trust.believe(envelope, expected, now=now, pin=pin)
        await run_blocking(self._probation.check, manifest.sha256)
        return manifest

    async def _learn_denials(self, sha256: str, now: int) -> bool:
        """Ask the stores for the fleet's denial of a payload; whether one was learnt."""
        learnt = False
        for store in self._stores:
            if (denial := await store.denial(sha256)) is None:
                continue
            try:
                self._trust.deny(denial, now=now)
                learnt = True
            except ArtifactRefused as error:  # a store writer without a key forbids nothing
                _log.warning("store=%s a denial of %s is ignored: %s", store.name, sha256[:12], error)
        return learnt

    async def _pin(self, key: ArtifactKey) -> bytes | None:
        """The fleet's pin. Peers hand out no pins, but theirs is not to be an artifact that the pin rules out."""
        for store in self._stores:
            if (pin := await store.pin(key)) is not None:
                return pin
        return None
