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
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
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

_BATCH = 4 << 20  # bytes compressed by one task
_AHEAD = 4  # batches in flight, so some 16 MiB wait in memory
_THREADS = min(4, os.cpu_count() or 1)


def large_cuts(data: memoryview) -> Iterator[int]:
    """Where the bytes of a large file are cut: after the needle, between `TARGET` and `LARGEST` apart."""
    start, size = 0, len(data)
    while size - start > LARGEST:
        window = bytes(data[start + TARGET : start + LARGEST])
        found = window.find(NEEDLE)
        start += TARGET + found + len(NEEDLE) if found >= 0 else LARGEST
        yield start
    yield size


def _compress(pieces: Sequence[bytes]) -> list[bytes]:
    """One frame a piece; on several cores and in one call, so that threads do not queue for the interpreter."""
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    if "multi_compress_to_buffer" in zstandard.backend_features:
        made = compressor.multi_compress_to_buffer(list(pieces), threads=_THREADS)
        return [made[number].tobytes() for number in range(len(made))]
    return [compressor.compress(piece) for piece in pieces]


class FrameWriter:
    """Writes a tar as frames, and remembers its digest and chunks. Use as a context manager.

    Compression and the digest of the whole run on other cores; what waits for them is bounded.
    """

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._packer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="warmseed-pack")
        self._hasher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="warmseed-hash")  # one: order matters
        self._pending: deque[_Pending] = deque()
        self._parts: list[bytes | memoryview] = []  # of the chunk being collected
        self._id = hashlib.sha256()
        self._size = 0
        self._batch: list[bytes] = []
        self._ids: list[str] = []
        self._batched = 0
        self._hash = hashlib.sha256()
        self._offset = 0
        self._stored = hashlib.sha256()
        self.length = 0  # bytes of the tar so far
        self.chunks: list[Chunk] = []

    def __enter__(self) -> FrameWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self._packer.shutdown(wait=True, cancel_futures=True)
        self._hasher.shutdown(wait=True, cancel_futures=True)

    def add(self, header: bytes, data: memoryview, padding: bytes) -> str:
        """One file of the tar: its header, its bytes, its padding. The SHA-256 of its bytes."""
        digest = hashlib.sha256(data)
        whole = len(header) + len(data) + len(padding)
        if self._size >= SMALL and (self._size + whole > TARGET or zlib.crc32(header) & 7 == 0):
            self._cut()
        self._append(header)
        if len(data) <= LARGE:
            self._append(data, name=digest.digest())
            self._append(padding)
            return digest.hexdigest()
        start = 0
        for end in large_cuts(data):
            self._append(data[start:end])
            start = end
            if end == len(data):
                self._append(padding)
            self._cut()
        return digest.hexdigest()

    def finish(self, trailer: bytes) -> str:
        """Write the end; the SHA-256 of the whole uncompressed tar."""
        self._append(trailer)
        self._cut()
        self._submit()
        while self._pending:
            self._drain()
        self._hasher.submit(lambda: None).result()  # everything before it is done then
        return self._hash.hexdigest()

    @property
    def stored(self) -> Stored:
        """What a manifest says of the frames written."""
        return Stored(encoding="zstd", sha256=self._stored.hexdigest(), length=self._offset)

    def _append(self, data: bytes | memoryview, *, name: bytes | None = None) -> None:
        """Add `data` to the chunk; `name` stands for it in the chunk's id where it was hashed already."""
        if len(data):
            self._id.update(data if name is None else name)
            self._parts.append(data)
            self._size += len(data)
            self.length += len(data)

    def _cut(self) -> None:
        if not self._size:
            return
        self._batch.append(b"".join(self._parts))
        self._ids.append(self._id.hexdigest())
        self._batched += self._size
        self._parts, self._size, self._id = [], 0, hashlib.sha256()
        if self._batched >= _BATCH:
            self._submit()

    def _submit(self) -> None:
        if self._batch:
            frames = self._packer.submit(_compress, self._batch)
            hashed = self._hasher.submit(self._hash.update, b"".join(self._batch))
            self._pending.append(_Pending(self._ids, [len(piece) for piece in self._batch], frames, hashed))
            self._batch, self._ids, self._batched = [], [], 0
        while len(self._pending) > _AHEAD:
            self._drain()

    def _drain(self) -> None:
        done = self._pending.popleft()
        frames = done.frames.result()
        for name, length, frame in zip(done.ids, done.lengths, frames, strict=True):
            self.chunks.append(Chunk(name, length, self._offset, len(frame)))
            self._offset += len(frame)
        stored = b"".join(frames)
        self._out.write(stored)
        done.hashed.result()
        self._hasher.submit(self._stored.update, stored)


@dataclass(frozen=True, slots=True)
class _Pending:
    """A batch on its way through the other threads."""

    ids: list[str]
    lengths: list[int]
    frames: Future[list[bytes]]
    hashed: Future[None]


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
    waiting: deque[Future[None]] = deque()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="warmseed-hash") as hasher:
        try:
            with decompressor.stream_reader(source, read_across_frames=True, closefd=False) as reader:
                while piece := reader.read(PIECE):
                    total += len(piece)
                    if total > length:
                        raise ArtifactRefused("length", f"the bundle is longer than the {length} bytes of its manifest")
                    waiting.append(hasher.submit(digest.update, piece))
                    out.write(piece)
                    while len(waiting) > _AHEAD:
                        waiting.popleft().result()
        except zstandard.ZstdError as error:
            raise ArtifactRefused("malformed", f"the bundle's compression is broken: {error}") from error
    if total != length:
        raise ArtifactRefused("length", f"the bundle has {total} bytes, its manifest says {length}")
    return digest.hexdigest()
