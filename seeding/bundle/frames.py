"""How a bundle lies in a store: its tar cut into content-defined chunks, each one zstd frame.

Concatenated frames are an ordinary zstd stream, so any zstd tool reads the object, and a reader that holds
the index can fetch single chunks by range. Cuts follow the content: they fall between files, and inside large
files after a byte pattern, so that a changed file changes its own chunks and hardly any others.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import zstandard

from warmseed.seeding.bundle.index import Chunk
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.manifest import Stored

__all__ = ["MAGIC", "FrameWriter", "compressed", "expand", "large_cuts"]

MAGIC = b"\x28\xb5\x2f\xfd"  # RFC 8878, 3.1.1
WINDOW = 1 << 27  # bytes; the largest zstd window a reader accepts, so a frame can't ask for gigabytes
LEVEL = 1  # of zstd: a start waits for it, and higher levels save few bytes of machine code
PIECE = 1 << 20  # bytes

SMALL = 16 << 10  # bytes; below this, files share a chunk
TARGET = 64 << 10  # bytes; a chunk of several files does not grow past this
LARGE = 128 << 10  # bytes; a file above this is cut inside
LARGEST = 256 << 10  # bytes in the longest chunk
# Two bytes that end a chunk in a large file: in machine code and random bytes they come once in about 64 KiB.
NEEDLE = b"\x9b\x17"

_BATCH = 1 << 20  # bytes compressed by one task
_AHEAD = 16  # batches in flight, so at most 16 MiB wait in memory


def large_cuts(data: memoryview) -> Iterator[int]:
    """Where the bytes of a large file are cut: after the needle, between `TARGET` and `LARGEST` apart."""
    start, size = 0, len(data)
    while size - start > LARGEST:
        window = bytes(data[start + TARGET : start + LARGEST])
        found = window.find(NEEDLE)
        start += TARGET + found + len(NEEDLE) if found >= 0 else LARGEST
        yield start
    yield size


def _compress(pieces: list[bytes]) -> list[tuple[str, int, bytes]]:
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    return [(hashlib.sha256(piece).hexdigest(), len(piece), compressor.compress(piece)) for piece in pieces]


class FrameWriter:
    """Writes a tar as frames, and remembers its digest and chunks. Use as a context manager."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._pool = ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1), thread_name_prefix="warmseed-pack")
        self._pending: deque[Future[list[tuple[str, int, bytes]]]] = deque()
        self._parts: list[bytes | memoryview] = []  # of the chunk being collected
        self._size = 0
        self._batch: list[bytes] = []
        self._batched = 0
        self._hash = hashlib.sha256()
        self._offset = 0
        self._stored = hashlib.sha256()
        self.length = 0  # bytes of the tar so far
        self.chunks: list[Chunk] = []

    def __enter__(self) -> FrameWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def add(self, header: bytes, data: memoryview, padding: bytes) -> None:
        """One file of the tar: its header, its bytes, its padding."""
        whole = len(header) + len(data) + len(padding)
        if self._size >= SMALL and (self._size + whole > TARGET or zlib.crc32(header) & 7 == 0):
            self._cut()
        self._append(header)
        if len(data) <= LARGE:
            self._append(data)
            self._append(padding)
            return
        start = 0
        for end in large_cuts(data):
            self._append(data[start:end])
            start = end
            if end == len(data):
                self._append(padding)
            self._cut()

    def finish(self, trailer: bytes) -> str:
        """Write the end; the SHA-256 of the whole uncompressed tar."""
        self._append(trailer)
        self._cut()
        self._submit()
        while self._pending:
            self._drain()
        return self._hash.hexdigest()

    @property
    def stored(self) -> Stored:
        """What a manifest says of the frames written."""
        return Stored(encoding="zstd", sha256=self._stored.hexdigest(), length=self._offset)

    def _append(self, data: bytes | memoryview) -> None:
        if len(data):
            self._parts.append(data)
            self._size += len(data)
            self.length += len(data)

    def _cut(self) -> None:
        if not self._size:
            return
        piece = b"".join(self._parts)
        self._parts, self._size = [], 0
        self._hash.update(piece)
        self._batch.append(piece)
        self._batched += len(piece)
        if self._batched >= _BATCH:
            self._submit()

    def _submit(self) -> None:
        if self._batch:
            self._pending.append(self._pool.submit(_compress, self._batch))
            self._batch, self._batched = [], 0
        while len(self._pending) > _AHEAD:
            self._drain()

    def _drain(self) -> None:
        for digest, length, frame in self._pending.popleft().result():
            self._out.write(frame)
            self._stored.update(frame)
            self.chunks.append(Chunk(digest, length, self._offset, len(frame)))
            self._offset += len(frame)


def compressed(path: Path) -> bool:
    """Whether the file at `path` holds zstd frames rather than a plain tar."""
    with path.open("rb") as source:
        return source.read(len(MAGIC)) == MAGIC


def expand(source: BinaryIO, out: BinaryIO, *, length: int) -> str:
    """Decompress the frames in `source` into `out`; the SHA-256 of the result.

    Stops as soon as there is more than `length` bytes, so a bomb costs one piece.

    Raises:
        ArtifactRefused: ``length``, when the result is longer or shorter; ``malformed``, for broken frames.
    """
    digest, total = hashlib.sha256(), 0
    decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW)
    try:
        with decompressor.stream_reader(source, read_across_frames=True, closefd=False) as reader:
            while piece := reader.read(PIECE):
                total += len(piece)
                if total > length:
                    raise ArtifactRefused("length", f"the bundle is longer than the {length} bytes of its manifest")
                digest.update(piece)
                out.write(piece)
    except zstandard.ZstdError as error:
        raise ArtifactRefused("malformed", f"the bundle's compression is broken: {error}") from error
    if total != length:
        raise ArtifactRefused("length", f"the bundle has {total} bytes, its manifest says {length}")
    return digest.hexdigest()
