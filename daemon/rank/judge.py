"""Turns what engines observed while they warmed up, or that they died of it, into a verdict on what was adopted.

An engine that dies before it has warmed up on an artifact makes it a suspect: it is taken back here at once. If the
next engine then warms up without it, it was the artifact, and the fleet is told; if that one dies as well, it was not.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from warmseed.blocking import run_blocking
from warmseed.daemon.protocol.status import StatusWriter, Used
from warmseed.daemon.rank.seeds import Seeds
from warmseed.daemon.weights.messages import Report
from warmseed.daemon.weights.server import Lease
from warmseed.errors import printable
from warmseed.seeding.adopt import Adoption
from warmseed.seeding.kinds.base import Capture, Evidence, Kind, Site

__all__ = ["WARMUP_SECONDS", "Judge"]

_log = logging.getLogger(__name__)

DEATH_LOOKS, DEATH_PAUSE = 20, 0.1  # looks, and seconds between them, at an engine whose lease has ended
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
        while self._suspects:
            suspect, adopted, reason = self._suspects.pop()
            await self._seeds.denounce(adopted, self._sites[suspect.name], reason)
        for kind in self._kinds:
            adoption = self._adoptions.get(kind.name)
            if adoption is None or adoption.installation is None or kind.name in self._judged:
                continue
            self._judged.add(kind.name)
            await self._judge(kind, adoption, evidence)

    async def on_attached(self) -> None:
        """An engine has mapped the weights: it is about to load whatever is on trial."""
        for kind in self._kinds:
            adoption = self._adoptions.get(kind.name)
            if adoption is not None and adoption.installation is not None and kind.name not in self._judged:
                await self._seeds.met(adoption, self._sites[kind.name])

    async def on_detached(self, lease: Lease) -> None:
        """Suspect what an engine was warming up on, if it died before it could report."""
        if self._reported >= lease.since or not await _died(lease.pid):
            return
        if self._suspects:  # this engine had none of it, and died too
            for _, suspect, _ in self._suspects:
                await self._seeds.forgive(suspect)
            self._suspects.clear()
            return
        for kind in self._kinds:
            adoption = self._adoptions.get(kind.name)
            if adoption is None or adoption.installation is None or kind.name in self._judged:
                continue
            self._judged.add(kind.name)
            reason = f"engine pid {lease.pid} died {time.monotonic() - lease.since:.0f} s after it attached, unwarmed"
            await self._seeds.quarantine(kind, adoption, self._sites[kind.name], reason)
            self._suspects.append((kind, adoption, reason))

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


async def _died(pid: int) -> bool:
    """Whether the process is dead. Its sockets close a moment before it is, so this waits for that moment."""
    for _ in range(DEATH_LOOKS):
        if _dead(pid):
            return True
        await asyncio.sleep(DEATH_PAUSE)
    return False


def _dead(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in ("Z", "X")  # a zombie, or about to be gone (proc(5))


def _seconds(text: str) -> float:
    """What a manifest says a warmup took; 0 for anything that is no finite number, which is only for people anyway."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0
