"""Turns what engines observed while they warmed up, or that they died of it, into a verdict on what was adopted.

An engine that dies before it has warmed up on an artifact makes it a suspect: it is taken back here at once. If the
next engine then warms up without it, it was the artifact, and the fleet is told; if that one dies as well, it was not.

One death is no evidence where there is a better explanation: when somebody else killed the engine (a person, a service
manager, the out-of-memory killer), or when an engine of this rank has warmed up on the very same bytes before. Then the
artifact stays, until a second engine in a row dies on it.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Mapping, Sequence

from warmseed.blocking import run_blocking
from warmseed.daemon.protocol.status import StatusWriter, Used
from warmseed.daemon.rank.trials import Trials
from warmseed.daemon.weights.messages import Report
from warmseed.daemon.weights.server import Lease
from warmseed.errors import printable
from warmseed.seeding.adopt import Adoption
from warmseed.seeding.kinds.base import Capture, Evidence, Kind, Site

__all__ = ["WARMUP_SECONDS", "Judge"]

_log = logging.getLogger(__name__)

DEATH_SECONDS = 2.0  # for an engine whose lease has ended to be dead: its sockets close a moment before it is
PARDONED = 1  # deaths in a row that are put down to something else where there is something else
WARMUP_SECONDS = "warmup_seconds"  # provenance: what this warmup cost the node that did it from nothing


class Judge:
    """Hears the engines of one rank."""

    def __init__(
        self,
        trials: Trials,
        sites: Mapping[str, Site],
        kinds: Sequence[Kind],
        adoptions: Mapping[str, Adoption],
        status: StatusWriter,
    ) -> None:
        self._trials, self._sites, self._kinds = trials, sites, kinds
        self._adoptions = adoptions
        self._status = status
        self._judged: set[str] = set()
        self._taken_back: set[str] = set()
        self._deaths = 0  # of engines that did not warm up, since one did
        self._suspects: list[tuple[Kind, Adoption, str]] = []
        self._reported = -math.inf  # time.monotonic() of the last engine that warmed up
        self._warmup: float | None = None  # seconds of the first warmup after nothing was adopted

    async def on_report(self, report: Report) -> None:
        """Judge every adopted artifact by the first engine that warmed up on it."""
        evidence = Evidence(
            seconds=report.seconds,
            counters={name: int(value) for name, value in report.counters.items()},
            lines=report.lines,
            new_files=report.new_files,
        )
        if self._warmup is None:
            self._warmup = evidence.seconds
        self._reported = time.monotonic()
        self._deaths = 0
        while self._suspects:
            suspect, adopted, reason = self._suspects.pop()
            await self._trials.denounce(adopted, self._sites[suspect.name], reason)
        for kind, adoption in self._in_use():
            self._judged.add(kind.name)
            await self._judge(kind, adoption, evidence)

    async def on_attached(self) -> None:
        """An engine has mapped the weights: it is about to load whatever is on trial."""
        for kind, adoption in self._in_use():
            await self._trials.met(adoption, self._sites[kind.name])

    async def on_detached(self, lease: Lease) -> None:
        """Suspect what an engine was warming up on, if it died before it could report."""
        if self._reported >= lease.since:
            return
        ending = await lease.witness.ending(DEATH_SECONDS)
        if ending is None or ending.clean:
            return
        if self._suspects:  # this engine had none of it, and died too
            if not ending.outside:
                for _, suspect, _ in self._suspects:
                    await self._trials.forgive(suspect)
                self._suspects.clear()
            return
        self._deaths += 1
        reason = f"engine pid {lease.pid} {ending} {time.monotonic() - lease.since:.0f} s after it attached, unwarmed"
        for kind, adoption in self._in_use():
            site = self._sites[kind.name]
            if self._deaths <= PARDONED and (ending.outside or await self._trials.proven(adoption, site)):
                await self._trials.pardon(adoption, site, reason)
                continue
            self._taken_back.add(kind.name)
            self._status.refused(("quarantined",))
            await self._trials.quarantine(kind, adoption, site, reason)
            self._suspects.append((kind, adoption, reason))

    async def on_stop(self) -> None:
        """The daemon goes on purpose: what engines that still warm up would have shown is no evidence."""
        for kind, adoption in self._in_use():
            await self._trials.part(adoption, self._sites[kind.name])

    def _in_use(self) -> list[tuple[Kind, Adoption]]:
        """What engines load that was not made here and that no engine of this daemon has warmed up on."""
        found = [(kind, self._adoptions.get(kind.name)) for kind in self._kinds]
        done = self._judged | self._taken_back
        return [(kind, a) for kind, a in found if a and a.installation is not None and kind.name not in done]

    async def _judge(self, kind: Kind, adoption: Adoption, evidence: Evidence) -> None:
        if adoption.installation is None or adoption.manifest is None:
            return
        site = self._sites[kind.name]
        verdict = await run_blocking(kind.judge, adoption.installation, evidence, site)
        saved = 0.0
        if verdict.used:
            cold = adoption.manifest.provenance.get(WARMUP_SECONDS, "")
            saved = max(0.0, _seconds(cold) - evidence.seconds)
        _log.info("kind=%s used=%s saved=%.1f s %s", kind.name, verdict.used, saved, printable(verdict.reason))
        self._status.send(Used(kind.name, verdict.used, saved, printable(verdict.reason)))
        await self._trials.judged(adoption, site, verdict, saved)

    def annotated(self, capture: Capture) -> Capture:
        """`capture` with what its warmup cost here, so that those who adopt it know what they saved."""
        if self._warmup is None:
            return capture
        provenance = {**capture.provenance, WARMUP_SECONDS: f"{self._warmup:.2f}"}
        return dataclasses.replace(capture, provenance=provenance)


def _seconds(text: str) -> float:
    """What a manifest says a warmup took; 0 for anything that is no finite number, which is only for people anyway."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0
