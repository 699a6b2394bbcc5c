"""Where artifacts come from: a chain of stores, or a peer that is running now.

Both hand out the same two things: signed envelopes to judge, and the bytes of a manifest that was believed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

from warmseed.seeding.artifact import ArtifactKey
from warmseed.seeding.manifest import Manifest

__all__ = ["Origin", "StoreOrigin"]


class Origin(Protocol):
    """A place that may have an artifact."""

    @property
    def name(self) -> str:
        """For logs: a chain's name, or a peer's address."""
        ...

    def envelopes(self, key: ArtifactKey, *, known: int) -> AsyncIterator[bytes]:
        """Signed envelopes for `key`, newest first, unverified."""
        ...

    async def pin(self, key: ArtifactKey) -> bytes | None:
        """The fleet's pin for `key`, unverified."""
        ...

    async def denial(self, sha256: str) -> bytes | None:
        """The fleet's denial of a payload, unverified."""
        ...

    async def fetch(self, manifest: Manifest, folder: Path) -> Path | None:
        """A new file in `folder` with the payload, length and digest checked; `None` if it is not there."""
        ...

    async def index(self, manifest: Manifest, folder: Path) -> bytes | None:
        """The payload's file index, length and digest checked; `None` if there is none."""
        ...
