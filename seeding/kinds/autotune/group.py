"""One rank of a group that adopts its tables together: `gang.Member` over the adopter, the kind and the disk."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

from warmseed.blocking import run_blocking
from warmseed.errors import WarmseedError
from warmseed.seeding.adopt import Adopter, Adoption, Candidate
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.gang.gang import Offer, decide_together
from warmseed.seeding.gang.rendezvous import Rendezvous
from warmseed.seeding.kinds.autotune.kind import FlashInferAutotune
from warmseed.seeding.kinds.autotune.layout import MANAGED_ROOT, PER_RANK_ROOT
from warmseed.seeding.kinds.autotune.notes import Note, local_digest, read_note, write_note
from warmseed.seeding.kinds.base import Installation, Site

__all__ = ["TableMember", "adopt_in_group", "note_published", "per_rank_site"]

_log = logging.getLogger(__name__)
_LOCAL = "local/"  # prefix of the name of tables that nobody published: an older engine tuned them here


class TableMember:
    """Offers what this rank could adopt, and puts in place what its group chose. Use it as ``async with``."""

    def __init__(self, adopter: Adopter, kind: FlashInferAutotune, site: Site) -> None:
        """`kind` must be of ``overlap="seeded"``: one run's winners on every rank."""
        if kind.overlap != "seeded":
            raise ValueError("a group's tables must not keep single ranks' winners: make the kind overlap='seeded'")
        self._adopter, self._kind, self._site = adopter, kind, site
        self._stack = AsyncExitStack()
        self._candidates: dict[str, Candidate] = {}
        self._held = ""  # the run that lies here already
        self.chosen: Candidate | None = None
        self.installation: Installation | None = None

    async def __aenter__(self) -> TableMember:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def offers(self) -> Sequence[Offer]:
        """Runs that are published, believed, fetched and good for this rank, and what lies here already."""
        offers: list[Offer] = []
        candidates = await self._stack.enter_async_context(self._adopter.candidates(self._kind, self._site))
        for candidate in candidates:
            manifest = candidate.manifest
            if not manifest.run or manifest.run.startswith(_LOCAL) or manifest.run in self._candidates:
                continue
            try:
                await run_blocking(self._kind.check, manifest, candidate.payload, self._site)
            except ArtifactRefused as refused:
                _log.info("run %s is not offered: %s", manifest.run, refused)
                continue
            self._candidates[manifest.run] = candidate
            offers.append(Offer(manifest.run, manifest.issued_at))
        if not await self._adopter.overruled(self._kind, self._site):
            self._held = await run_blocking(self._local_run)
        if self._held and self._held not in self._candidates:
            offers.append(Offer(self._held, 0))
        return offers

    def _local_run(self) -> str:
        """The run that the local table belongs to; empty if there is none, or nobody can say."""
        if not self._kind.present(self._site):
            return ""
        note = read_note(self._site)
        if note is None:
            return _LOCAL + self._kind.environment(self._site).digest
        return note.run if note.local and note.local == local_digest(self._site) else ""

    async def take(self, run: str) -> None:
        """Install the candidate of `run`; a run that lies here already is left as it is."""
        if run == self._held:
            return
        candidate = self._candidates.get(run)
        if candidate is None:
            raise WarmseedError(f"run {run} was chosen, but this rank never offered it")
        await run_blocking(write_note, self._site, Note(run))
        self.installation = await self._adopter.install(self._kind, self._site, candidate)
        self.chosen = candidate

    async def withdraw(self) -> None:
        """Take the installation back."""
        if self.installation is not None:
            await run_blocking(self._kind.retract, self.installation, self._site)
            self.installation = self.chosen = None

    async def stand_down(self) -> None:
        """Move what lies here aside: the others tune, and a rank that hits while they do never returns."""
        await run_blocking(self._kind.set_aside, self._site, "its group tunes together, and not every rank had one")
        await run_blocking(write_note, self._site, None)

    async def keep(self, run: str) -> None:
        """Note that the group kept `run`."""
        if not run.startswith(_LOCAL):
            await run_blocking(_note_local, self._site, run)


def _note_local(site: Site, run: str) -> None:
    write_note(site, Note(run, local_digest(site)))


async def adopt_in_group(
    adopter: Adopter,
    kind: FlashInferAutotune,
    site: Site,
    meeting: Rendezvous,
    *,
    timeout: float,
    name: str = "tables",
) -> Adoption:
    """Have one run's table in place on every rank of the group, or on none; the same outcome everywhere.

    Raises:
        GangBroken: this rank can't know what the others did; its start must end.
    """
    start = time.monotonic()
    site = per_rank_site(site)
    async with TableMember(adopter, kind, site) as member:
        decision = await decide_together(meeting, member, name=name, timeout=timeout)
        seconds = time.monotonic() - start
        if decision.outcome == "local":
            _log.warning("tables are tuned here, by all ranks: %s", decision.reason)
            return Adoption(kind.name, "none", seconds=seconds)
        await member.keep(decision.run)
        if member.installation is None or member.chosen is None:
            return Adoption(kind.name, "present", "disk", seconds=seconds)
        chosen = member.chosen
        return Adoption(
            kind.name, "installed", chosen.origin, chosen.manifest, chosen.envelope, member.installation, seconds
        )


async def note_published(site: Site, run: str) -> None:
    """Note that what lies here now was published as `run`, so that the next start's group finds it at home."""
    await run_blocking(_note_local, per_rank_site(site), run)


def per_rank_site(site: Site) -> Site:
    """`site` with the v1 home alone, where it has one: in a group, engines do not use the managed store.

    FlashInfer 0.7.2 deadlocks when one rank of a group hits in it and another misses.
    """
    if PER_RANK_ROOT not in site.roots or MANAGED_ROOT not in site.roots:
        return site
    return dataclasses.replace(site, roots={name: path for name, path in site.roots.items() if name != MANAGED_ROOT})
