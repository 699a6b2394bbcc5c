"""How a search for a warmup cache ends, and what it met on the way."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from warmseed.seeding.kinds.base import Installation
from warmseed.seeding.trust.manifest import Manifest

__all__ = ["Adoption", "Candidate", "Refusal"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why one candidate, or one whole origin, was passed over."""

    origin: str
    reason: str  # a stable word: an `ArtifactRefused.reason`, or unavailable, missing, disk, budget, error
    message: str


@dataclass(frozen=True, slots=True)
class Adoption:
    """How the search for one warmup cache ended."""

    kind: str
    outcome: Literal["present", "installed", "none"]
    origin: str = ""  # where it came from
    manifest: Manifest | None = None
    envelope: bytes = b""  # as signed, so that this node can hand it on
    installation: Installation | None = None
    seconds: float = 0.0
    refusals: tuple[Refusal, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether nothing is left for local work."""
        if self.outcome == "present":
            return True
        return self.installation is not None and self.installation.complete


@dataclass(frozen=True, slots=True)
class Candidate:
    """An artifact that is believed and fetched, but not installed."""

    origin: str
    manifest: Manifest
    envelope: bytes
    payload: Path  # a staging file, there for as long as `Adopter.candidates` is open
    index: bytes | None
