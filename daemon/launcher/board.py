"""What the launcher knows of its ranks: filled from their status lines, read by health, metrics and status page."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

from warmseed.daemon.protocol.status import (
    Alive,
    Begin,
    EngineAttached,
    EngineDetached,
    Failed,
    Message,
    Metrics,
    Phase,
    Refused,
    Rehearsal,
    Serving,
    Used,
)

__all__ = ["SILENT_AFTER", "Board", "RankState", "State"]
_REASONS: Final = 100  # different reasons counted apart

State = Literal["starting", "serving", "stopping", "exited"]
SILENT_AFTER: Final = 30.0  # seconds without a heartbeat after which a rank that sends them counts as hung
_PHASES: Final = 64  # phases kept for one rank; the order of a start has about a dozen


@dataclass(slots=True)
class RankState:
    """One rank as its launcher sees it."""

    name: str
    group: str
    local_rank: int
    global_rank: int
    pid: int | None = None
    status: int | None = None  # return code once it has exited
    running: str | None = None  # the phase it is in
    phases: list[Phase] = field(default_factory=list)
    dropped_phases: int = 0
    serving: Serving | None = None
    heartbeat: float | None = None  # monotonic time of the last one; `None`: it sends none
    attached_engines: int = 0
    attaches: int = 0
    metrics: Metrics = field(default_factory=Metrics)
    used: list[Used] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)
    rehearsal: Rehearsal | None = None
    failed: Failed | None = None
    invalid_lines: int = 0

    @property
    def live(self) -> bool:
        return self.pid is not None and self.status is None

    @property
    def engines(self) -> int:
        """Engines attached now: the rank's own count where it gives one."""
        return self.attached_engines if self.metrics.engines is None else self.metrics.engines

    def silent_for(self, now: float) -> float | None:
        """Seconds since the last heartbeat, if that is longer than it may be."""
        if self.heartbeat is None or now - self.heartbeat <= SILENT_AFTER:
            return None
        return now - self.heartbeat

    def take(self, message: Message, now: float) -> None:
        """Fold `message` into the state. Any line is a sign of life for a rank that sends heartbeats."""
        if self.heartbeat is not None:
            self.heartbeat = now
        match message:
            case Begin():
                self.running = message.name
            case Phase():
                if self.running == message.name:
                    self.running = None
                if len(self.phases) < _PHASES:
                    self.phases.append(message)
                else:
                    self.dropped_phases += 1
            case Serving():
                self.serving = message
                self.running = None
            case Alive():
                self.heartbeat = now
            case EngineAttached():
                self.attaches += 1
                self.attached_engines += 1
            case EngineDetached():
                self.attached_engines = max(0, self.attached_engines - 1)
            case Used():
                if len(self.used) < _PHASES:
                    self.used.append(message)
            case Metrics():
                self.metrics = message
            case Refused():
                self._count(message)
            case Rehearsal():
                self.rehearsal = message
            case Failed():
                self.failed = message

    def _count(self, message: Refused) -> None:
        for reason, count in message.counts.items():
            # A reason that holds a name or a number would make endless series.
            self.refusals[reason if reason in self.refusals or len(self.refusals) < _REASONS else "other"] += count


class Board:
    """All ranks of one launcher."""

    def __init__(self, ranks: Iterable[RankState] = ()) -> None:
        self.ranks: dict[str, RankState] = {rank.name: rank for rank in ranks}
        self.started = time.monotonic()
        self.ready_after: float | None = None  # seconds from the launcher's start to readiness
        self.stopping = False
        self.rehearsal_outcome: str | None = None
        self.rehearsal_seconds = 0.0

    def troubles(self, now: float | None = None) -> list[str]:
        """Why this node does not serve, one line a cause; empty exactly when every rank serves and lives."""
        now = time.monotonic() if now is None else now
        if self.stopping:
            return ["the launcher is stopping"]
        if not self.ranks:
            return ["no rank has been started yet"]
        found = []
        for rank in self.ranks.values():
            if rank.status is not None:
                found.append(f"{rank.name} has exited with status {rank.status}")
            elif rank.serving is None:
                found.append(f"{rank.name} is starting" + (f" ({rank.running})" if rank.running else ""))
            elif (silence := rank.silent_for(now)) is not None:
                found.append(f"{rank.name} has given no sign of life for {silence:.0f} s")
        return found

    @property
    def all_serving(self) -> bool:
        """Whether every rank has bound its socket and none has exited."""
        return bool(self.ranks) and all(r.serving is not None and r.status is None for r in self.ranks.values())
