"""How a bundle lies in a store: its tar cut into content-defined chunks, each one zstd frame.

Concatenated frames are an ordinary zstd stream, so any zstd tool reads the object, and a reader that holds
the index can fetch single chunks by range. Cuts follow the content: they fall between files, and inside large
files after a byte pattern, so that a changed file changes its own chunks and hardly any others.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import BinaryIO, cast

import zstandard

from warmseed.seeding.bundle.files import start_writeback
from warmseed.seeding.bundle.index import Chunk
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.trust.manifest import Stored

__all__ = ["MAGIC", "FrameWriter", "compressed", "expand", "expand_into", "large_cuts"]

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

_BATCH = 2 << 20  # bytes hashed and compressed by one task
_PACKERS = min(4, os.cpu_count() or 1)  # threads that hash and compress, each a batch of its own
_AHEAD = 2 * _PACKERS  # batches that wait for them or for the disk


def large_cuts(data: memoryview) -> Iterator[int]:
    """Where the bytes of a large file are cut: after the needle, between `TARGET` and `LARGEST` apart."""
    start, size = 0, len(data)
    while size - start > LARGEST:
        window = bytes(data[start + TARGET : start + LARGEST])
        found = window.find(NEEDLE)
        start += TARGET + found + len(NEEDLE) if found >= 0 else LARGEST
        yield start
    yield size


@dataclass(frozen=True, slots=True)
class _Part:
    """A run of bytes of a chunk."""

    data: bytes | memoryview
    file: int = -1  # its number, where the run is all of a file


@dataclass(frozen=True, slots=True)
class _Packed:
    """What became of a batch of chunks."""

    chunks: list[tuple[str, int, int]]  # id, length, length of the frame
    digests: dict[int, str]  # of the files that are whole in it
    data: bytes  # the batch's part of the tar
    frames: bytes  # the same, compressed


def _pack(batch: Sequence[Sequence[_Part]]) -> _Packed:
    """Hash and compress a batch, in few large calls, so that threads do not queue for the interpreter."""
    ids, lengths, digests = [], [], {}
    for chunk in batch:
        name = hashlib.sha256()
        for part in chunk:
            if part.file < 0:
                name.update(part.data)
            else:
                digest = hashlib.sha256(part.data)
                digests[part.file] = digest.hexdigest()
                name.update(digest.digest())
        ids.append(name.hexdigest())
        lengths.append(sum([len(part.data) for part in chunk]))
    data = b"".join([part.data for chunk in batch for part in chunk])
    frames = _compress(data, lengths)
    chunks = [(i, n, len(frame)) for i, n, frame in zip(ids, lengths, frames, strict=True)]
    return _Packed(chunks, digests, data, b"".join(frames))


def _compress(data: bytes, lengths: Sequence[int]) -> list[bytes | memoryview]:
    """One frame for each run of `data`, which have the `lengths` and follow one another."""
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    starts = [end - length for end, length in zip(accumulate(lengths), lengths, strict=True)]
    if "multi_compress_to_buffer" not in zstandard.backend_features:
        view = memoryview(data)
        return [compressor.compress(view[start : start + n]) for start, n in zip(starts, lengths, strict=True)]
    bounds = array("Q", chain.from_iterable(zip(starts, lengths, strict=True)))
    made = compressor.multi_compress_to_buffer(zstandard.BufferWithSegments(data, bounds.tobytes()))
    # Segments have the buffer protocol, which their stubs don't say; views of them save a copy.
    return [memoryview(cast("bytes", made[number])) for number in range(len(made))]


class FrameWriter:
    """Writes a tar as frames, and remembers its digests and chunks. Use as a context manager.

    Hashing and compression run on other cores; what waits for them is bounded.
    """

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._packers = ThreadPoolExecutor(max_workers=_PACKERS, thread_name_prefix="warmseed-pack")
        # One thread: batches are hashed as parts of the whole, and written, in their order.
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="warmseed-write")
        self._pending: deque[Future[_Packed]] = deque()
        self._large: dict[int, Future[str]] = {}  # digests of files that lie in several chunks
        self._written: deque[Future[None]] = deque()
        self._parts: list[_Part] = []  # of the chunk being collected
        self._size = 0
        self._batch: list[list[_Part]] = []
        self._batched = 0
        self._hash = hashlib.sha256()
        self._offset = 0
        self._stored = hashlib.sha256()
        self._digests: dict[int, str] = {}
        self._files = 0
        self.length = 0  # bytes of the tar so far
        self.chunks: list[Chunk] = []

    def __enter__(self) -> FrameWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self._packers.shutdown(wait=True, cancel_futures=True)
        self._writer.shutdown(wait=True, cancel_futures=True)

    def add(self, header: bytes, data: memoryview, padding: bytes) -> None:
        """One file of the tar: its header, its bytes, its padding. `data` must stay as it is until `finish`."""
        number, self._files = self._files, self._files + 1
        whole = len(header) + len(data) + len(padding)
        if self._size >= SMALL and (self._size + whole > TARGET or zlib.crc32(header) & 7 == 0):
            self._cut()
        self._append(_Part(header))
        if len(data) <= LARGE:
            self._append(_Part(data, number))
            self._append(_Part(padding))
            return
        self._large[number] = self._writer.submit(lambda: hashlib.sha256(data).hexdigest())
        start = 0
        for end in large_cuts(data):
            self._append(_Part(data[start:end]))
            start = end
            if end == len(data):
                self._append(_Part(padding))
            self._cut()

    def finish(self, trailer: bytes) -> str:
        """Write the end; the SHA-256 of the whole uncompressed tar."""
        self._append(_Part(trailer))
        self._cut()
        self._submit()
        while self._pending:
            self._drain()
        while self._written:
            self._written.popleft().result()
        return self._hash.hexdigest()

    @property
    def digests(self) -> list[str]:
        """The SHA-256 of every file, in the order in which they were added; once `finish` has returned."""
        large = {number: future.result() for number, future in self._large.items()}
        return [large[number] if number in large else self._digests[number] for number in range(self._files)]

    @property
    def stored(self) -> Stored:
        """What a manifest says of the frames written."""
        return Stored(encoding="zstd", sha256=self._stored.hexdigest(), length=self._offset)

    def _append(self, part: _Part) -> None:
        if len(part.data) or part.file >= 0:
            self._parts.append(part)
            self._size += len(part.data)
            self.length += len(part.data)

    def _cut(self) -> None:
        if not self._size:
            return
        self._batch.append(self._parts)
        self._batched += self._size
        self._parts, self._size = [], 0
        if self._batched >= _BATCH:
            self._submit()

    def _submit(self) -> None:
        if self._batch:
            self._pending.append(self._packers.submit(_pack, self._batch))
            self._batch, self._batched = [], 0
        while len(self._pending) > _AHEAD:
            self._drain()

    def _drain(self) -> None:
        packed = self._pending.popleft().result()
        for name, length, stored in packed.chunks:
            self.chunks.append(Chunk(name, length, self._offset, stored))
            self._offset += stored
        self._digests.update(packed.digests)
        self._written.append(self._writer.submit(self._write, packed))
        while len(self._written) > _AHEAD:
            self._written.popleft().result()

    def _write(self, packed: _Packed) -> None:
        self._hash.update(packed.data)
        self._stored.update(packed.frames)
        self._out.write(packed.frames)
        self._out.flush()
        start_writeback(self._out.fileno())


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
                        raise _longer(length)
                    waiting.append(hasher.submit(digest.update, piece))
                    out.write(piece)
                    while len(waiting) > _AHEAD:
                        waiting.popleft().result()
        except zstandard.ZstdError as error:
            raise _broken(error) from error
    if total != length:
        raise _shorter(total, length)
    return digest.hexdigest()


def expand_into(source: BinaryIO, out: memoryview) -> str:
    """Decompress the frames in `source` into `out`, which they must fill; the SHA-256 of the result.

    Raises:
        ArtifactRefused: as `expand` does.
    """
    digest, total, length = hashlib.sha256(), 0, len(out)
    decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW)
    hashed: deque[Future[None]] = deque()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="warmseed-hash") as hasher:
        try:
            with decompressor.stream_reader(source, read_across_frames=True, closefd=False) as reader:
                while total < length and (count := reader.readinto(out[total : total + PIECE])):
                    hashed.append(hasher.submit(digest.update, out[total : total + count]))
                    total += count
                if total == length and reader.read(1):
                    raise _longer(length)
        except zstandard.ZstdError as error:
            raise _broken(error) from error
        for done in hashed:
            done.result()
    if total != length:
        raise _shorter(total, length)
    return digest.hexdigest()


def _longer(length: int) -> ArtifactRefused:
    return ArtifactRefused("length", f"the bundle is longer than the {length} bytes of its manifest")


def _shorter(total: int, length: int) -> ArtifactRefused:
    return ArtifactRefused("length", f"the bundle has {total} bytes, its manifest says {length}")


def _broken(error: zstandard.ZstdError) -> ArtifactRefused:
    return ArtifactRefused("malformed", f"the bundle's compression is broken: {error}")
