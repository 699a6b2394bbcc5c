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
from itertools import chain
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import zstandard

from warmseed.seeding.bundle.files import holds, start_writeback
from warmseed.seeding.bundle.index import Chunk
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.trust.manifest import Stored

__all__ = ["MAGIC", "FrameWriter", "Place", "compressed", "expand", "expand_into"]

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

_BATCH = 4 << 20  # bytes of the tar in one piece of memory, hashed and compressed by one task
_PACKERS = min(4, os.cpu_count() or 1)  # threads that hash and compress, each a batch of its own
_AHEAD = 2 * _PACKERS  # batches that wait for them or for the disk


def large_cuts(memory: bytearray, start: int, end: int) -> Iterator[int]:
    """Where a large file in `memory` is cut: after the needle, between `TARGET` and `LARGEST` apart."""
    while end - start > LARGEST:
        # The needle's first byte is in no text, and a search for a single byte sees that many times as fast.
        found = memory.find(NEEDLE[:1], start + TARGET, start + LARGEST)
        if found >= 0:
            found = memory.find(NEEDLE, found, start + LARGEST)
        start = found + len(NEEDLE) if found >= 0 else start + LARGEST
        yield start
    yield end


class Place(NamedTuple):
    """Memory in which one file of the tar can be read. It is no part of the tar before `FrameWriter.add`."""

    memory: bytearray
    start: int
    size: int
    header: bytes
    padding: bytes

    @property
    def view(self) -> memoryview:
        """Room for the file's bytes and for one more, which shows a reader that the file has grown."""
        return memoryview(self.memory)[self.start : self.start + self.size + 1]

    def holds(self, needle: bytes) -> bool:
        """Whether `needle` stands in the file's bytes."""
        return holds(self.memory, self.start, self.size, needle)


class _File(NamedTuple):
    """Where a file's bytes lie in memory."""

    number: int
    start: int
    end: int


class _Chunk(NamedTuple):
    """Where the bytes of a chunk lie in memory, and the files whose digests stand for them in its id."""

    start: int
    end: int
    files: Sequence[_File]


@dataclass(frozen=True, slots=True)
class _Packed:
    """What became of a batch of chunks."""

    ids: list[str]
    digests: dict[int, str]  # of the files that are whole in it
    frames: list[memoryview]


def _pack(memory: bytearray, batch: Sequence[_Chunk]) -> _Packed:
    """Hash and compress a batch, in few large calls, so that threads do not queue for the interpreter."""
    view = memoryview(memory)
    ids, digests = [], {}
    for chunk in batch:
        name, at = hashlib.sha256(), chunk.start
        for file in chunk.files:
            digest = hashlib.sha256(view[file.start : file.end])
            digests[file.number] = digest.hexdigest()
            name.update(view[at : file.start])
            name.update(digest.digest())
            at = file.end
        name.update(view[at : chunk.end])
        ids.append(name.hexdigest())
    return _Packed(ids, digests, _compress(view, batch))


def _compress(view: memoryview, batch: Sequence[_Chunk]) -> list[memoryview]:
    """One frame for each chunk of the batch."""
    compressor = zstandard.ZstdCompressor(level=LEVEL)
    if "multi_compress_to_buffer" not in zstandard.backend_features:
        return [memoryview(compressor.compress(view[chunk.start : chunk.end])) for chunk in batch]
    bounds = array("Q", chain.from_iterable((chunk.start, chunk.end - chunk.start) for chunk in batch))
    made = compressor.multi_compress_to_buffer(zstandard.BufferWithSegments(view, bounds.tobytes()))
    # Segments have the buffer protocol, which their stubs don't say; views of them save a copy.
    return [memoryview(cast("bytes", made[number])) for number in range(len(made))]


class FrameWriter:
    """Writes a tar as frames, and remembers its digests and chunks. Use as a context manager.

    The tar is built in a few pieces of memory that are used again and again: files are read to where they are
    hashed and compressed, so bytes are not copied on the way. Hashing and compression run on other cores; what
    waits for them is bounded.
    """

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._packers = ThreadPoolExecutor(max_workers=_PACKERS, thread_name_prefix="warmseed-pack")
        # One thread: batches are hashed as parts of the whole, and written, in their order.
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="warmseed-write")
        self._writing: deque[tuple[Future[None], bytearray]] = deque()  # with the memory that each reads
        self._large: list[Future[None]] = []  # digests of files that lie in several chunks
        self._idle: list[bytearray] = []
        self._memory = bytearray()
        self._end = 0  # of the tar in this memory
        self._start = 0  # of the chunk being collected
        self._collected: list[_File] = []  # its files
        self._whole: list[_Chunk] = []  # chunks that stand before it in this memory
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

    def place(self, header: bytes, size: int, padding: bytes) -> Place:
        """Where a file of `size` bytes can be read that is to stand between this `header` and `padding`.

        It is good until the next call of a method; a file that could not be read is just not added.
        """
        needed = len(header) + size + max(1, len(padding))
        if self._end + needed > len(self._memory):
            self._turn(needed)
        start = self._end + len(header)
        self._memory[self._end : start] = header
        return Place(self._memory, start, size, header, padding)

    def add(self, place: Place) -> None:
        """Make the file that was read into `place`, the latest one, a part of the tar."""
        collected, number = self._end - self._start, self._files
        end = place.start + place.size
        after = end + len(place.padding)
        if collected >= SMALL and (collected + after - self._end > TARGET or zlib.crc32(place.header) & 7 == 0):
            self._cut(self._end)
        self._memory[end:after] = place.padding
        self._files += 1
        self.length += after - self._end
        self._end = after
        if place.size <= LARGE:
            self._collected.append(_File(number, place.start, end))
            return
        # On the thread that writes this memory's batches after it, so the bytes are still there.
        self._large.append(self._writer.submit(self._digest, self._memory, _File(number, place.start, end)))
        for cut in large_cuts(self._memory, place.start, end):
            self._cut(after if cut == end else cut)

    def finish(self, trailer: bytes) -> str:
        """Write the end; the SHA-256 of the whole uncompressed tar."""
        self.place(trailer, 0, b"")
        self._end += len(trailer)
        self.length += len(trailer)
        self._cut(self._end)
        self._submit()
        while self._writing:
            self._wait()
        for digested in self._large:
            digested.result()
        return self._hash.hexdigest()

    @property
    def digests(self) -> list[str]:
        """The SHA-256 of every file, in the order in which they were added; once `finish` has returned."""
        return [self._digests[number] for number in range(self._files)]

    @property
    def stored(self) -> Stored:
        """What a manifest says of the frames written."""
        return Stored(encoding="zstd", sha256=self._stored.hexdigest(), length=self._offset)

    def _cut(self, end: int) -> None:
        """End the chunk being collected."""
        self._whole.append(_Chunk(self._start, end, self._collected))
        self._start, self._collected = end, []

    def _turn(self, needed: int) -> None:
        """Have the whole chunks packed, and go on in other memory, with the chunk being collected at its start."""
        rest, moved = bytes(memoryview(self._memory)[self._start : self._end]), self._start
        self._submit()
        if len(rest) + needed > _BATCH:
            self._memory = bytearray(len(rest) + needed)  # for this one file
        else:
            self._memory = self._idle.pop() if self._idle else bytearray(_BATCH)
        self._memory[: len(rest)] = rest
        self._start, self._end = 0, len(rest)
        self._collected = [_File(f.number, f.start - moved, f.end - moved) for f in self._collected]

    def _submit(self) -> None:
        batch: list[_Chunk] = []
        for number, chunk in enumerate(self._whole, 1):
            batch.append(chunk)
            # Only memory made for one very large file holds more than a batch.
            if chunk.end - batch[0].start >= _BATCH or number == len(self._whole):
                packing = self._packers.submit(_pack, self._memory, batch)
                task = self._writer.submit(self._write, self._memory, batch, packing)
                self._writing.append((task, self._memory))
                batch = []
            while len(self._writing) > _AHEAD:
                self._wait()
        self._whole = []

    def _wait(self) -> None:
        task, memory = self._writing.popleft()
        task.result()
        if len(memory) == _BATCH:  # and so of this batch only; larger memory was made for one file
            self._idle.append(memory)

    def _digest(self, memory: bytearray, file: _File) -> None:
        self._digests[file.number] = hashlib.sha256(memoryview(memory)[file.start : file.end]).hexdigest()

    def _write(self, memory: bytearray, batch: Sequence[_Chunk], packing: Future[_Packed]) -> None:
        self._hash.update(memoryview(memory)[batch[0].start : batch[-1].end])
        packed = packing.result()
        self._digests.update(packed.digests)
        for name, chunk, frame in zip(packed.ids, batch, packed.frames, strict=True):
            self.chunks.append(Chunk(name, chunk.end - chunk.start, self._offset, len(frame)))
            self._offset += len(frame)
            self._stored.update(frame)
            self._out.write(frame)
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
