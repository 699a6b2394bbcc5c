"""Staging files: what a peer streams goes into one, and at the end it is known whether it is what was promised."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import BinaryIO

from warmseed.blocking import run_blocking
from warmseed.seeding.errors import ArtifactRefused

__all__ = ["ABANDONED", "prepare_staging", "remove_staged", "write_stream"]

ABANDONED = 6 * 3600.0  # seconds without a write after which a staging file is certainly nobody's


def _create(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "wb")


def _discard(file: BinaryIO, path: Path) -> None:
    with contextlib.suppress(OSError):  # a full disk fails again when what is buffered is flushed
        file.close()
    path.unlink(missing_ok=True)


async def write_stream(pieces: AsyncIterator[bytes], folder: Path, *, sha256: str, length: int) -> Path:
    """A new file in `folder` with all the pieces, `length` bytes of that `sha256`; gone again when anything fails.

    Raises:
        ArtifactRefused: ``length`` or ``digest``: the stream is something else.
        OSError: when the disk fails.
    """
    target = folder / f"stored.{secrets.token_hex(8)}"
    digest, seen = hashlib.sha256(), 0
    file = await run_blocking(_create, target)

    def keep(piece: bytes) -> None:
        digest.update(piece)
        file.write(piece)

    try:
        async for piece in pieces:
            seen += len(piece)
            if seen > length:
                raise ArtifactRefused("length", f"more than the {length} bytes its manifest states")
            await run_blocking(keep, piece)
        await run_blocking(file.close)
        if seen != length or digest.hexdigest() != sha256:
            raise ArtifactRefused("digest", f"{seen} bytes of SHA-256 {digest.hexdigest()[:16]}…, not {sha256[:16]}…")
    except BaseException:
        await run_blocking(_discard, file, target)
        raise
    return target


def prepare_staging(staging: Path) -> None:
    """Make the staging folder, without what killed processes left in it."""
    staging.mkdir(0o700, parents=True, exist_ok=True)
    oldest = time.time() - ABANDONED
    for file in staging.iterdir():
        with contextlib.suppress(OSError):
            if file.lstat().st_mtime < oldest:
                file.unlink()


def remove_staged(files: Sequence[Path]) -> None:
    """Remove staging files, those that are there."""
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
