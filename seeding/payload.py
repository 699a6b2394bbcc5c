"""How a payload lies in stores and on the wire: with a digest of its own over exactly those bytes.

So nothing is decompressed before it is known to be what the publisher stored, and nothing is used before it is
known to be what the publisher packed.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

from warmseed.blocking import run_blocking
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.manifest import Stored

__all__ = ["stored_form", "write_stream"]


def stored_form(payload: Path, *, sha256: str) -> Stored | None:
    """What a manifest says of the file `payload` as it lies there; `None` if it is the plain payload. Blocks.

    Raises:
        OSError: when it can't be read.
    """
    with payload.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return None if digest == sha256 else Stored(encoding="zstd", sha256=digest, length=payload.stat().st_size)


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


async def write_stream(pieces: AsyncIterator[bytes], folder: Path, *, sha256: str, length: int) -> Path:
    """A new file in `folder` with all the pieces, `length` bytes of that `sha256`; gone again when anything fails.

    Raises:
        ArtifactRefused: ``length`` or ``digest``: the stream is something else.
        OSError: when the disk fails.
    """
    target = folder / f"stored.{secrets.token_hex(8)}"
    digest, seen = hashlib.sha256(), 0
    file = os.fdopen(await run_blocking(_create, target), "wb")

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
        file.close()
        target.unlink(missing_ok=True)
        raise
    return target
