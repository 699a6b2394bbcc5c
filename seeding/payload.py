"""Writes what a peer streams into a staging file, and knows at the end whether it is what was promised."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from warmseed.blocking import run_blocking
from warmseed.seeding.errors import ArtifactRefused

__all__ = ["write_stream"]


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
