"""Fetching only what changed: the stored object of a new bundle from pieces that this node already has.

Pure. A bundle's index says where each chunk's frame lies in the stored object. A chunk that an earlier bundle
on this disk also holds is copied from there; only the others are read from the store, by range. The same plan
resumes a transfer that was cut, from the byte at which it stopped. The assembled object must have the digest
that the manifest binds, else it is thrown away and the whole object is fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from warmseed.seeding.bundle.index import BundleIndex

__all__ = ["REMOTE", "Base", "Piece", "Plan", "plan"]

REMOTE = -1  # as a piece's source: the store
MAX_REQUESTS = 256  # range reads of one plan; neighbours are joined to stay below
GAP = 32 << 10  # bytes; a smaller gap between two remote pieces is cheaper to read than to skip


@dataclass(frozen=True, slots=True)
class Base:
    """A stored object on this node's disk, whole or its beginning."""

    index: BundleIndex
    available: int  # bytes of the stored object that are there


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of bytes of the new stored object."""

    source: int  # which base, or `REMOTE`
    offset: int  # in the source
    length: int  # bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """How to put a stored object together, in order."""

    pieces: tuple[Piece, ...]

    @property
    def moved(self) -> int:
        """Bytes read from the store."""
        return sum(piece.length for piece in self.pieces if piece.source == REMOTE)

    @property
    def total(self) -> int:
        """Bytes of the object."""
        return sum(piece.length for piece in self.pieces)

    def after(self, position: int) -> Plan:
        """What is left to do when the first `position` bytes of the object are there."""
        left, at = [], 0
        for piece in self.pieces:
            skip = min(max(position - at, 0), piece.length)
            if skip < piece.length:
                left.append(Piece(piece.source, piece.offset + skip, piece.length - skip))
            at += piece.length
        return Plan(tuple(left))

    @property
    def requests(self) -> int:
        """Range reads of the store."""
        return sum(piece.source == REMOTE for piece in self.pieces)


def plan(new: BundleIndex, bases: Sequence[Base]) -> Plan | None:
    """How to make the stored object of `new` from `bases` and the store; `None` when its index can't say.

    A frame counts as the same when its chunk's id, its length and its stored length are.
    """
    where: dict[tuple[str, int, int], tuple[int, int]] = {}
    for number, base in enumerate(bases):
        for chunk in base.index.chunks:
            if chunk.offset + chunk.stored <= base.available:
                where.setdefault((chunk.id, chunk.length, chunk.stored), (number, chunk.offset))
    pieces: list[Piece] = []
    position = 0
    for chunk in new.chunks:
        if chunk.offset != position:
            return None  # not an object as our writer lays it out
        position += chunk.stored
        source, offset = where.get((chunk.id, chunk.length, chunk.stored), (REMOTE, chunk.offset))
        _append(pieces, Piece(source, offset, chunk.stored))
    joined = _join(pieces, GAP)
    gap = GAP
    while (made := Plan(tuple(joined))).requests > MAX_REQUESTS:
        gap *= 4
        joined = _join(pieces, gap)
    return made if made.pieces else None


def _append(pieces: list[Piece], piece: Piece) -> None:
    """Add `piece`, as part of the last one where it follows on."""
    if pieces:
        last = pieces[-1]
        if last.source == piece.source and last.offset + last.length == piece.offset:
            pieces[-1] = Piece(last.source, last.offset, last.length + piece.length)
            return
    pieces.append(piece)


def _join(pieces: Sequence[Piece], gap: int) -> list[Piece]:
    """`pieces`, with local runs shorter than `gap` between two remote ones read from the store as well."""
    joined: list[Piece] = []
    position = 0
    for number, piece in enumerate(pieces):
        between = (
            piece.source != REMOTE
            and piece.length < gap
            and joined
            and joined[-1].source == REMOTE
            and number + 1 < len(pieces)
            and pieces[number + 1].source == REMOTE
        )
        _append(joined, Piece(REMOTE, position, piece.length) if between else piece)
        position += piece.length
    return joined
