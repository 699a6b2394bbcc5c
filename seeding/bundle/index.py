"""The file index of a bundle: what every file is, where its cache lived, and where its chunks lie.

It is an object of its own, bound by digest and length in the signed manifest, so that the manifest stays small
whatever a cache holds. What depends on the host that captured (times, roots, chunk offsets) stands here and
not in the tar, so equal caches give equal tars.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

import msgspec

from warmseed.errors import printable
from warmseed.seeding.artifact import check_digest
from warmseed.seeding.bundle.tar import MEMBERS, check_name
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.trust import canonical
from warmseed.seeding.trust.manifest import Index, Size, Text

__all__ = ["INDEX_BYTES", "BundleIndex", "CacheRecord", "Chunk", "FileRecord", "read_index", "write_index"]

INDEX_BYTES = 48 << 20  # bytes in the largest index ever read; 100,000 files with long names fit

Name = Annotated[str, msgspec.Meta(max_length=1024)]
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$", max_length=64)]
# What `os.utime` takes: signed 64-bit nanoseconds. 0 to the year 2262.
Nanoseconds = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One file of a bundle."""

    path: Name  # in the tar: cache name, slash, path below that cache's root
    size: Size  # bytes
    mode: Annotated[int, msgspec.Meta(ge=0, le=0o777)]  # as captured; installed with its owner bits only
    mtime_ns: Nanoseconds  # restored exactly: ninja rebuilds on anything else
    sha256: Digest
    bound: bool = False  # holds the path of a captured root, so it may mean files at that path

    @property
    def cache(self) -> str:
        """The cache this file belongs to."""
        return self.path.partition("/")[0]

    @property
    def relative(self) -> str:
        """The path below the cache's root."""
        return self.path.partition("/")[2]


class CacheRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One cache of a bundle, as it was where it was captured."""

    root: Text  # the folder engines used, as they were told it
    environment: dict[Text, Text]  # what this cache depends on, its own prefixes included


class Chunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A piece of the tar that is one zstd frame of the stored object."""

    id: Digest  # equal ids mean equal bytes; SHA-256 over its headers, file digests and pieces of large files
    length: Annotated[int, msgspec.Meta(ge=1, le=1 << 22)]  # bytes of the tar
    offset: Size  # of the frame in the object as its publisher stored it
    stored: Annotated[int, msgspec.Meta(ge=1, le=1 << 23)]  # bytes of the frame


class BundleIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything about a bundle but its bytes.

    Raises (on construction):
        ArtifactRefused: ``malformed``, when its parts contradict each other.
    """

    schema: Literal[1]
    sha256: Digest  # of the uncompressed tar
    length: Size  # bytes of the uncompressed tar
    caches: dict[Text, CacheRecord]
    files: Annotated[tuple[FileRecord, ...], msgspec.Meta(max_length=MEMBERS)]  # in the order of the tar
    chunks: tuple[Chunk, ...] = ()

    def __post_init__(self) -> None:
        check_digest(self.sha256)
        previous = b""
        for file in self.files:
            check_name(file.path)
            raw = file.path.encode("utf-8")
            if raw <= previous or not file.relative or file.cache not in self.caches:
                raise ArtifactRefused(
                    "malformed", f"file index: {printable(file.path)!r} is out of order or of no cache"
                )
            previous = raw
        if self.chunks and sum(chunk.length for chunk in self.chunks) != self.length:
            raise ArtifactRefused("malformed", "file index: its chunks do not add up to the bundle")

    @property
    def stored(self) -> int:
        """Bytes of the object as its publisher stored it; 0 when there are no chunks."""
        return self.chunks[-1].offset + self.chunks[-1].stored if self.chunks else 0


def write_index(index: BundleIndex) -> tuple[bytes, Index]:
    """The index as bytes, and how a manifest binds it."""
    data = canonical.encode(index)
    return data, Index(sha256=hashlib.sha256(data).hexdigest(), length=len(data))


def read_index(data: bytes, bound: Index) -> BundleIndex:
    """The index in `data`, if it is the one that a manifest binds. Length and digest come before parsing.

    Raises:
        ArtifactRefused: ``length``, ``digest`` or ``malformed``.
    """
    if len(data) != bound.length:
        raise ArtifactRefused("length", f"file index of {len(data)} bytes, the manifest says {bound.length}")
    if hashlib.sha256(data).hexdigest() != bound.sha256:
        raise ArtifactRefused("digest", "the file index is not the one that the manifest binds")
    return canonical.decode(data, BundleIndex, limit=INDEX_BYTES)
