"""Which installed generations have shown that an engine survives them.

A generation is on trial from its installation until an engine has warmed up on it. One that crashes its first
engine goes into quarantine, and so does one that an engine had met when its rank ended (so nothing survived to say
how it went): this node does not install it again, and a signed denial keeps the next node from trying.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from warmseed.errors import printable
from warmseed.filelock import file_lock
from warmseed.seeding.artifact import check_digest
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.trust import canonical
from warmseed.seeding.trust.judge import DAY
from warmseed.seeding.trust.marks import write_durably
from warmseed.seeding.trust.statements import Denial

__all__ = ["DENIAL_LIFE", "Probation", "Trial"]

DENIAL_LIFE = 7 * DAY  # seconds a fleet keeps away from what crashed one node
REMEMBERED = 4096  # trials kept, newest first
LOCK_SECONDS = 10.0  # for other ranks of this node to finish their own entries
_BYTES = 8 << 20  # bytes in the largest record read
_log = logging.getLogger(__name__)

Text = Annotated[str, msgspec.Meta(max_length=1024)]


class Trial(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How one payload stands with one rank of this node."""

    kind: Text
    sha256: Text  # of the payload
    generation: int
    rank: Text  # which rank of this node installed it
    state: Literal["trial", "proven", "quarantined"]
    since: int  # unix seconds
    reason: Text = ""
    met: bool = False  # on trial: an engine has attached since

    def __post_init__(self) -> None:
        check_digest(self.sha256)


class Trials(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ``probation.json`` holds."""

    schema: Literal[1] = 1
    trials: tuple[Trial, ...] = ()


class Probation:
    """The record of one node, shared by its ranks. All methods block.

    Each may raise `OSError` when the disk fails, and `ArtifactRefused` (``busy``) when another rank holds the
    record for more than `LOCK_SECONDS`.
    """

    def __init__(self, state: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._path = state / "probation.json"
        self._clock = clock

    def check(self, sha256: str) -> None:
        """See that the payload may be installed.

        Raises:
            ArtifactRefused: ``probation``, when it is in quarantine here.
        """
        for trial in self._read():
            if trial.sha256 == sha256 and trial.state == "quarantined":
                raise ArtifactRefused(
                    "probation",
                    f"payload {sha256[:12]} is in quarantine on this node since {trial.since}: "
                    f"{printable(trial.reason)}; `warmseed pin --allow {sha256}` lifts it",
                )

    def begin(self, kind: str, sha256: str, generation: int, rank: str) -> None:
        """Put a payload on trial before an engine first meets it; one that is proven stays so."""
        with self._changing() as trials:
            key = (sha256, rank)
            known = trials.get(key)
            if known is None or known.state != "proven":
                trials[key] = self._trial(kind, sha256, generation, rank, "trial", "")

    def withdraw(self, sha256: str, rank: str) -> None:
        """The payload was not installed after all: no engine will meet it, so there is nothing to wait for."""
        with self._changing() as trials:
            known = trials.get((sha256, rank))
            if known is not None and known.state == "trial":
                del trials[(sha256, rank)]

    def prove(self, sha256: str, rank: str) -> None:
        """An engine of `rank` warmed up on the payload."""
        self._move(sha256, rank, "proven", "an engine warmed up on it")

    def fail(self, sha256: str, rank: str, reason: str) -> Trial | None:
        """The payload crashed or failed an engine of `rank`; the trial as it stands now, for a denial."""
        return self._move(sha256, rank, "quarantined", reason[:512])

    def meet(self, sha256: str, rank: str) -> None:
        """An engine of `rank` has attached and will load the payload: from here on silence counts against it."""
        with self._changing() as trials:
            known = trials.get((sha256, rank))
            if known is not None and known.state == "trial":
                trials[(sha256, rank)] = msgspec.structs.replace(known, met=True)

    def part(self, sha256: str, rank: str) -> None:
        """The engine of `rank` that met the payload is gone for a reason of its own: silence is no evidence again."""
        with self._changing() as trials:
            known = trials.get((sha256, rank))
            if known is not None and known.state == "trial":
                trials[(sha256, rank)] = msgspec.structs.replace(known, met=False)

    def proven(self, sha256: str, rank: str) -> bool:
        """Whether an engine of `rank` has warmed up on the payload, and none has crashed on it since."""
        states = [trial.state for trial in self._read() if (trial.sha256, trial.rank) == (sha256, rank)]
        return states == ["proven"]

    def interrupted(self, rank: str) -> tuple[Trial, ...]:
        """Trials that an earlier process of `rank` began, an engine met, and nobody ended."""
        return tuple(trial for trial in self._read() if trial.rank == rank and trial.state == "trial" and trial.met)

    def standing(self, sha256: str) -> str:
        """``unknown``, ``trial``, ``proven`` or ``quarantined``; one rank's quarantine is the node's."""
        states = {trial.state for trial in self._read() if trial.sha256 == sha256}
        for state in ("quarantined", "proven", "trial"):
            if state in states:
                return state
        return "unknown"

    def forgive(self, sha256: str) -> bool:
        """Take a payload out of quarantine, at an operator's word; whether it was there."""
        with self._changing() as trials:
            keys = [key for key, trial in trials.items() if key[0] == sha256 and trial.state == "quarantined"]
            for key in keys:
                del trials[key]
        return bool(keys)

    def trials(self) -> tuple[Trial, ...]:
        """Everything on record, newest first, for ``warmseed ls``."""
        return tuple(sorted(self._read(), key=lambda t: t.since, reverse=True))

    def denial(self, trial: Trial, *, publisher: str) -> Denial:
        """What to sign and publish about a payload in quarantine."""
        now = int(self._clock())
        return Denial(
            schema=1,
            kind=trial.kind,
            sha256=trial.sha256,
            reason=trial.reason or "it failed the first engine that loaded it",
            issued_at=now,
            expires_at=now + DENIAL_LIFE,
            publisher=publisher,
        )

    def _trial(
        self,
        kind: str,
        sha256: str,
        generation: int,
        rank: str,
        state: Literal["trial", "proven", "quarantined"],
        reason: str,
    ) -> Trial:
        return Trial(
            kind=kind,
            sha256=sha256,
            generation=generation,
            rank=rank,
            state=state,
            since=int(self._clock()),
            reason=reason,
        )

    def _move(self, sha256: str, rank: str, state: Literal["proven", "quarantined"], reason: str) -> Trial | None:
        with self._changing() as trials:
            known = trials.get((sha256, rank))
            if known is None:
                return None
            moved = self._trial(known.kind, sha256, known.generation, rank, state, reason)
            trials[(sha256, rank)] = moved
        return moved

    def _read(self) -> tuple[Trial, ...]:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return ()
        try:
            return canonical.decode(data, Trials, limit=_BYTES).trials
        except ArtifactRefused as error:
            # Starting with a clean record would try poison again, but refusing to start is worse.
            _log.warning("the record of trials in %s is unreadable (%s); starting a new one", self._path, error)
            return ()

    @contextlib.contextmanager
    def _changing(self) -> Iterator[dict[tuple[str, str], Trial]]:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(file_lock(self._path.with_name(f"{self._path.name}.lock"), LOCK_SECONDS))
            except TimeoutError as error:
                raise ArtifactRefused("busy", f"the record of trials: {error}; nothing was recorded") from None
            trials = {(trial.sha256, trial.rank): trial for trial in self._read()}
            before = dict(trials)
            yield trials
            if trials != before:
                kept = sorted(trials.values(), key=lambda t: t.since, reverse=True)[:REMEMBERED]
                write_durably(self._path, canonical.encode(Trials(trials=tuple(kept))))
