"""What stands at a rank's cache roots, looked at once before a start: is it still to be trusted?"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from warmseed.errors import printable
from warmseed.seeding.kinds.base import Installation, Site
from warmseed.seeding.trust.judge import Trust
from warmseed.seeding.trust.probation import Probation, Trial

__all__ = ["Restorable", "TakenBack", "reconcile"]

_log = logging.getLogger(__name__)


@runtime_checkable
class Restorable(Protocol):
    """A kind that knows what it installed in an earlier life of this process."""

    name: str

    def current(self, site: Site) -> Installation | None:
        """What this rank has installed at its roots now."""
        ...

    def retract(self, installation: Installation, site: Site) -> None:
        """Take an installation back."""
        ...


@dataclass(frozen=True, slots=True)
class TakenBack:
    """An installation that was moved into quarantine before this start."""

    installation: Installation
    reason: str
    trial: Trial | None  # set when this node found out itself: sign and publish a denial of it


def reconcile(
    kind: Restorable, site: Site, *, trust: Trust, probation: Probation, rank: str, now: int
) -> TakenBack | None:
    """Take back what `rank` has installed if it is denied, in quarantine, or never survived its first start.

    Call it before anything is adopted, with the fleet's denials already told to `trust`. A generation that is
    still on trial when its rank starts again killed the process that tried it, or died with it: either way
    nothing vouches for it.

    Raises:
        OSError: when the disk fails.
        ArtifactRefused: ``busy``, when another rank holds the node's lock or records for too long.
    """
    installed = kind.current(site)
    if installed is None:
        return None
    trial: Trial | None = None
    reason = trust.denied(installed.sha256, now=now)
    if reason is None and probation.standing(installed.sha256) == "quarantined":
        reason = "in quarantine on this node"
    if reason is None and any(found.sha256 == installed.sha256 for found in probation.interrupted(rank)):
        reason = "its first start never said how it went"
        trial = probation.fail(installed.sha256, rank, reason)
    if reason is None:
        return None
    kind.retract(installed, site)
    _log.warning(
        "kind=%s generation=%d of %s is taken back: %s",
        kind.name,
        installed.generation,
        installed.sha256[:12],
        printable(reason),
    )
    return TakenBack(installed, reason, trial)
