"""One spelling for every signed object: JSON with sorted names, no spaces, and nothing that decodes twice."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from warmseed.errors import printable
from warmseed.seeding.errors import ArtifactRefused

__all__ = ["decode", "encode"]

T = TypeVar("T", bound=msgspec.Struct)

_ENCODER = msgspec.json.Encoder(order="sorted")


def encode(value: msgspec.Struct) -> bytes:
    """The one JSON spelling of `value`: names sorted at every depth, no white space, every field present."""
    return _ENCODER.encode(value)


def decode(data: bytes, form: type[T], *, limit: int) -> T:
    """`data` as a `form`, if it is no longer than `limit` bytes and spelled exactly as `encode` spells it.

    Comparing with the re-encoded value refuses what JSON decoders let through: names that come twice,
    trailing white space, other spellings of a number or a string.

    Raises:
        ArtifactRefused: ``malformed``, for anything else.
    """
    what = form.__name__.lower()
    if len(data) > limit:
        raise ArtifactRefused("malformed", f"{what} of {len(data)} bytes is over the limit of {limit}; not read")
    try:
        value = msgspec.json.decode(data, type=form)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ArtifactRefused("malformed", f"{what} does not parse: {printable(error)}") from error
    if _ENCODER.encode(value) != data:
        raise ArtifactRefused("malformed", f"{what} is not in its canonical spelling")
    return value
