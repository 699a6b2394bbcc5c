"""Which parts of an object a mirror asks for: a few runs of bytes, in order, none twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

__all__ = ["LENGTH_BYTES", "MOST_RANGES", "Length", "Range", "Ranges", "after", "check_order"]

LENGTH_BYTES = 1 << 50  # bytes in the largest object that can be named at all
MOST_RANGES = 256  # of one request; with the longest numbers they take 9 KiB of it

Length = Annotated[int, msgspec.Meta(ge=0, le=LENGTH_BYTES)]


class Range(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A run of bytes of an object."""

    offset: Length
    length: Annotated[int, msgspec.Meta(ge=1, le=LENGTH_BYTES)]

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.offset + self.length


Ranges = Annotated[tuple[Range, ...], msgspec.Meta(min_length=1, max_length=MOST_RANGES)]


def check_order(ranges: Sequence[Range]) -> None:
    """See that each range begins where the one before has ended, or later: nothing is read backwards, or twice.

    Raises:
        ValueError: it does not.
    """
    end = 0
    for wanted in ranges:
        if wanted.offset < end:
            raise ValueError(f"a range from byte {wanted.offset} follows one that ends at {end}")
        end = wanted.end


def after(ranges: Sequence[Range], position: int) -> tuple[Range, ...]:
    """What is left of `ranges` when their first `position` bytes have come."""
    left = []
    for wanted in ranges:
        skip = min(position, wanted.length)
        position -= skip
        if skip < wanted.length:
            left.append(Range(wanted.offset + skip, wanted.length - skip))
    return tuple(left)
