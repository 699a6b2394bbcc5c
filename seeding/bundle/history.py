"""The file indexes of bundles this node has seen: what a later bundle can be assembled from."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from warmseed.seeding.artifact import check_digest
from warmseed.seeding.bundle.index import INDEX_BYTES, BundleIndex
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.trust import canonical

__all__ = ["KEPT", "known_indexes", "remember_index"]

KEPT = 8  # indexes kept, newest first


def remember_index(state: Path, index: bytes, sha256: str) -> None:
    """Keep the verified index of the bundle `sha256`. Best effort: it only ever saves bytes on the wire."""
    folder = state / "compiled" / "indexes"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = folder / f".{secrets.token_hex(8)}"
        temporary.write_bytes(index)
        os.replace(temporary, folder / f"{check_digest(sha256)}.json")
        for old in sorted(folder.glob("*.json"), key=lambda p: p.stat().st_mtime_ns, reverse=True)[KEPT:]:
            old.unlink(missing_ok=True)


def known_indexes(state: Path) -> Iterator[BundleIndex]:
    """The indexes that are kept, newest first; broken ones are skipped."""
    folder = state / "compiled" / "indexes"
    try:
        paths = sorted(folder.glob("*.json"), key=lambda p: p.stat().st_mtime_ns, reverse=True)
    except OSError:
        return
    for path in paths[:KEPT]:
        with contextlib.suppress(OSError, ArtifactRefused):
            yield canonical.decode(path.read_bytes(), BundleIndex, limit=INDEX_BYTES)
