"""How objects lie in Mooncake.

A small object lies raw under its key, exactly as stock vLLM writes and reads it. Any other is cut into parts under
names of their own that are used once, and the key holds a list of them:

    WARMSEED-PARTS/1\\n{"size": 200000000, "part": 67108864, "names": ["<key>@<random>.0", ...]}

So a part can never be half old and half new, whatever Mooncake does to a value that is replaced.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import msgspec

from warmseed.errors import printable
from warmseed.stores.errors import ObjectInvalid

__all__ = ["PART", "SMALL", "Parts", "decode", "is_raw", "new_parts"]

SMALL = 1 << 20  # bytes in the largest object that lies raw under its key
PART = 64 << 20  # bytes in a part: over 1 Gbit/s still well under a 10 s lease
_MAGIC = b"WARMSEED-PARTS/1\n"
_MOST = 1024  # parts in one object: 64 GiB


class Parts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The list of an object's parts."""

    size: int  # bytes of the whole object
    part: int  # bytes of every part but the last
    names: list[str]

    def encode(self) -> bytes:
        """As it lies under the key."""
        return _MAGIC + msgspec.json.encode(self)

    def sizes(self) -> list[int]:
        """Bytes of each part."""
        return [min(self.part, self.size - at) for at in range(0, self.size, self.part)]

    def from_offset(self, offset: int) -> Iterator[tuple[str, int, int]]:
        """(name, offset in the part, whole length of the part) of what is needed from `offset` on."""
        for index, (name, size) in enumerate(zip(self.names, self.sizes(), strict=True)):
            start = index * self.part
            if start + size > offset:
                yield name, max(0, offset - start), size


def new_parts(key: str, size: int) -> Parts:
    """Parts under names that nobody has used before."""
    generation = secrets.token_hex(8)
    return Parts(size, PART, [f"{key}@{generation}.{index}" for index in range(-(-size // PART))])


def is_raw(data: bytes) -> bool:
    """Whether `data` can lie raw under a key: not empty (Mooncake refuses that) and not taken for a list of parts."""
    return 0 < len(data) <= SMALL and not data.startswith(_MAGIC)


def decode(data: bytes, *, store: str, key: str) -> Parts | None:
    """The list of parts in `data`, or `None` where it is the object itself.

    Raises:
        ObjectInvalid: for a list that can't be right.
    """
    if not data.startswith(_MAGIC):
        return None
    try:
        parts = msgspec.json.decode(data.removeprefix(_MAGIC), type=Parts)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ObjectInvalid(f"{store}: {key}: its list of parts is damaged ({printable(error)}); dropped") from error
    fits = 0 < parts.part <= PART and 0 <= parts.size <= _MOST * PART and len(parts.names) <= _MOST
    if not fits or len(parts.names) != -(-parts.size // parts.part):
        raise ObjectInvalid(f"{store}: {key}: its list of parts does not add up; dropped")
    if not all(name.startswith(f"{key}@") for name in parts.names):
        raise ObjectInvalid(f"{store}: {key}: its parts belong to another key; dropped")
    return parts
