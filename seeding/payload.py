"""How a payload lies in stores and on the wire: compressed, with a digest of its own over those bytes.

So nothing is decompressed before it is known to be what the publisher stored, and nothing is used before it is
known to be what the publisher packed.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import zstandard

from warmseed.blocking import run_blocking
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.manifest import Stored

__all__ = ["compress", "decompress", "write_stream"]

WINDOW_BYTES = 1 << 27  # the largest zstd window accepted: what decompressing may cost in memory
PIECE = 1 << 20  # bytes handled at once
LEVEL = 3  # zstd's default


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def compress(source: Path, folder: Path) -> tuple[Path, Stored]:
    """A new file in `folder` with `source` as one zstd frame, and what a manifest says of it. Blocks.

    Raises:
        OSError: when the disk fails; the file is gone again then.
    """
    target = folder / f"stored.{secrets.token_hex(8)}"
    digest, length = hashlib.sha256(), 0
    try:
        with source.open("rb") as read, os.fdopen(_create(target), "wb") as write:
            size = source.stat().st_size
            for piece in zstandard.ZstdCompressor(level=LEVEL).read_to_iter(read, size=size, write_size=PIECE):
                digest.update(piece)
                length += len(piece)
                write.write(piece)
    except OSError:
        with suppress(OSError):
            target.unlink()
        raise
    return target, Stored(encoding="zstd", sha256=digest.hexdigest(), length=length)


def decompress(source: Path, folder: Path, *, sha256: str, length: int) -> Path:
    """A new file in `folder` with the `length` bytes that `source` holds compressed. Blocks.

    Raises:
        ArtifactRefused: ``length`` or ``digest``: it holds something else; found out at the first byte too many.
        OSError: when the disk fails.
    """
    target = folder / f"payload.{secrets.token_hex(8)}"
    digest, seen = hashlib.sha256(), 0
    try:
        with source.open("rb") as compressed, os.fdopen(_create(target), "wb") as write:
            reader = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES).stream_reader(
                compressed,
                read_across_frames=True,  # bundles are many frames, see `bundle.frames`
            )
            while piece := reader.read(min(PIECE, length - seen + 1)):
                seen += len(piece)
                if seen > length:
                    raise ArtifactRefused("length", f"unpacks to more than the {length} bytes its manifest states")
                digest.update(piece)
                write.write(piece)
        if seen != length:
            raise ArtifactRefused("length", f"unpacks to {seen} of the {length} bytes its manifest states")
        if digest.hexdigest() != sha256:
            raise ArtifactRefused("digest", f"unpacks to SHA-256 {digest.hexdigest()[:16]}…, not {sha256[:16]}…")
    except zstandard.ZstdError as error:
        target.unlink(missing_ok=True)
        raise ArtifactRefused("malformed", f"not a readable zstd stream: {error}") from error
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    return target


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
