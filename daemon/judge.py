"""Turns what an engine observed while it warmed up into a verdict on what was adopted."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence

from warmseed.blocking import run_blocking
from warmseed.daemon.seeds import Seeds
from warmseed.daemon.status import StatusWriter, Used
from warmseed.daemon.weights.messages import Report
from warmseed.errors import printable
from warmseed.seeding.adopt import Adoption
from warmseed.seeding.kinds.base import Capture, Evidence, Kind, Site

__all__ = ["WARMUP_SECONDS", "Judge"]

_log = logging.getLogger(__name__)

WARMUP_SECONDS = "warmup_seconds"  # provenance: what this warmup cost the node that did it from nothing


class Judge:
    """Hears the engines of one rank."""

    def __init__(
        self,
        seeds: Seeds,
        sites: Mapping[str, Site],
        kinds: Sequence[Kind],
        adoptions: Mapping[str, Adoption],
        status: StatusWriter,
    ) -> None:
        self._seeds, self._sites, self._kinds = seeds, sites, kinds
        self._adoptions = adoptions
        self._status = status
        self._judged: set[str] = set()
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
        for kind in self._kinds:
            adoption = self._adoptions.get(kind.name)
            if adoption is None or adoption.installation is None or kind.name in self._judged:
                continue
            self._judged.add(kind.name)
            await self._judge(kind, adoption, evidence)

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
        await self._seeds.judged(adoption, site, verdict, saved)

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
