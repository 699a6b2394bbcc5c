"""What becomes of adopted artifacts on this rank: used or not, on trial, taken back, denied to the fleet."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, ParamSpec, TypeVar

from warmseed.blocking import run_blocking
from warmseed.errors import WarmseedError, printable
from warmseed.seeding.adopt import Adoption
from warmseed.seeding.artifact import denial_key
from warmseed.seeding.kinds.base import Kind, Site, Verdict
from warmseed.seeding.ledger import Entry, Ledger
from warmseed.seeding.origins.shelf import Shelf
from warmseed.seeding.trust.keys import PublisherKey
from warmseed.seeding.trust.probation import Probation
from warmseed.seeding.trust.statements import sign_denial
from warmseed.stores.chain import Chain
from warmseed.stores.errors import StoreError

__all__ = ["Trials", "quietly"]

_log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
Event = Literal["adopted", "used", "unused", "refused", "published", "pardoned", "quarantined", "local"]


class Trials:
    """The rank's memory of what it adopted. Nothing here raises: a record that can't be kept costs nothing else."""

    def __init__(self, state: Path, *, chain: Chain, shelf: Shelf, keys: Sequence[PublisherKey]) -> None:
        self.probation = Probation(state)
        self._ledger = Ledger(state / "ledger.jsonl")
        self._chain, self._shelf, self._keys = chain, shelf, keys

    async def record(
        self,
        adoption: Adoption,
        site: Site,
        event: Event,
        reason: str,
        *,
        saved: float = 0.0,
        per_cache: Mapping[str, bool] | None = None,
    ) -> None:
        """Write down in the node's ledger what happened to an artifact, or to the search for one."""
        manifest = adoption.manifest
        entry = Entry(
            at=int(time.time()),
            kind=adoption.kind,
            rank=site.rank_label,
            event=event,
            config_hash=site.config_hash,
            sha256=manifest.sha256 if manifest else "",
            generation=manifest.generation if manifest else 0,
            origin=adoption.origin,
            bytes=(manifest.stored or manifest).length if manifest else 0,
            seconds=adoption.seconds,
            saved=saved,
            reason=reason[:1024],
            per_cache=dict(per_cache or {}),
        )
        await quietly(self._ledger.record, entry)

    async def judged(self, adoption: Adoption, site: Site, verdict: Verdict, saved: float) -> None:
        """Remember whether an adopted artifact was used, and what it saved; an engine survived it either way."""
        manifest = adoption.manifest
        if manifest is None:
            return
        await quietly(self.probation.prove, manifest.sha256, site.rank_label)
        await self.record(
            adoption,
            site,
            "used" if verdict.used else "unused",
            verdict.reason,
            saved=saved,
            per_cache=dict(verdict.per_cache),
        )

    async def met(self, adoption: Adoption, site: Site) -> None:
        """An engine is about to load an adopted artifact."""
        if adoption.manifest is not None:
            await quietly(self.probation.meet, adoption.manifest.sha256, site.rank_label)

    async def proven(self, adoption: Adoption, site: Site) -> bool:
        """Whether an engine of this rank has warmed up on an adopted artifact, in this life of the daemon or before."""
        if adoption.manifest is None:
            return False
        return bool(await quietly(self.probation.proven, adoption.manifest.sha256, site.rank_label))

    async def pardon(self, adoption: Adoption, site: Site, reason: str) -> None:
        """An engine died on an adopted artifact, and something else explains it: the next engine tries it as well."""
        manifest = adoption.manifest
        if manifest is None:
            return
        _log.warning(
            "kind=%s generation=%d stays: %s; it is put down to something else once, taken back at the next such death",
            *(adoption.kind, manifest.generation, printable(reason)),
        )
        await self.part(adoption, site)
        await self.record(adoption, site, "pardoned", reason)

    async def part(self, adoption: Adoption, site: Site) -> None:
        """Whatever engine was about to load an adopted artifact, its silence from now on means nothing."""
        if adoption.manifest is not None:
            await quietly(self.probation.part, adoption.manifest.sha256, site.rank_label)

    async def quarantine(self, kind: Kind, adoption: Adoption, site: Site, reason: str) -> None:
        """Take an artifact on trial back here: the next engine finds what was there before, or does the work."""
        manifest, installation = adoption.manifest, adoption.installation
        if manifest is None or installation is None:
            return
        _log.error(
            "kind=%s generation=%d of %s quarantined: %s; start the engine again: it finds what was here before, or "
            "compiles; if it warms up, the fleet is told",
            *(kind.name, manifest.generation, manifest.sha256[:12], printable(reason)),
        )
        self._shelf.take_down(manifest.sha256)
        await quietly(kind.retract, installation, site)
        await quietly(self.probation.fail, manifest.sha256, site.rank_label, reason)
        await self.record(adoption, site, "quarantined", reason)

    async def denounce(self, adoption: Adoption, site: Site, reason: str) -> None:
        """Tell the fleet not to try a quarantined artifact: an engine has just warmed up without it."""
        manifest = adoption.manifest
        if manifest is None or not self._keys:
            return
        trial = await quietly(self.probation.fail, manifest.sha256, site.rank_label, reason)
        if trial is None:
            return
        _log.error("kind=%s generation=%d denied to the fleet: %s", adoption.kind, manifest.generation, reason)
        denial = sign_denial(self.probation.denial(trial, publisher=socket.gethostname()), self._keys)
        try:
            await self._chain.put(denial_key(manifest.sha256), denial)
        except StoreError as error:
            _log.warning("kind=%s the fleet was not told of the quarantine: %s", adoption.kind, printable(error))

    async def forgive(self, adoption: Adoption) -> None:
        """Engines die without the artifact as well: it is not what kills them."""
        if adoption.manifest is not None:
            _log.warning("kind=%s out of quarantine: an engine died without it, too", adoption.kind)
            await quietly(self.probation.forgive, adoption.manifest.sha256)


async def quietly(work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T | None:
    """What `work` returns; a record that can't be kept is logged and costs nothing else."""
    try:
        return await run_blocking(work, *args, **kwargs)
    except (WarmseedError, OSError) as error:
        _log.warning("%s: %s", getattr(work, "__name__", "a record"), printable(error, limit=500))
        return None
