"""Frames: four bytes of length, most significant first, then that many bytes of JSON."""

from __future__ import annotations

import asyncio
import struct

from warmseed.seeding.channel.errors import ProtocolError

__all__ = ["ANSWER_BYTES", "HEADER_BYTES", "REQUEST_BYTES", "body_length", "frame", "read_frame"]

HEADER_BYTES = 4
REQUEST_BYTES = 16 << 10  # bytes in the largest request
ANSWER_BYTES = 96 << 10  # bytes in the largest head of an answer: 64 KiB of manifest as a JSON string, and names

_HEADER = struct.Struct("!I")


def frame(body: bytes, *, limit: int) -> bytes:
    """`body` with its length in front.

    Raises:
        ProtocolError: `body` is empty or longer than `limit` bytes.
    """
    return _HEADER.pack(_checked(len(body), limit)) + body


def body_length(header: bytes, *, limit: int) -> int:
    """How many bytes follow the four of `header`: at least one, at most `limit`.

    Raises:
        ProtocolError: anything else; nothing has been allocated for it.
    """
    if len(header) != HEADER_BYTES:
        raise ProtocolError(f"a frame's length takes {HEADER_BYTES} bytes, not {len(header)}")
    (length,) = _HEADER.unpack(header)
    return _checked(length, limit)


async def read_frame(reader: asyncio.StreamReader, *, limit: int) -> bytes | None:
    """The body of the next frame; `None` when the peer closed before its first byte.

    The caller sets the deadline.

    Raises:
        ProtocolError: the length is out of bounds, or the peer closed in the middle.
    """
    try:
        header = await reader.readexactly(HEADER_BYTES)
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            return None
        raise ProtocolError("the peer closed inside a frame's length") from None
    length = body_length(header, limit=limit)
    try:
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError as error:
        raise ProtocolError(f"the peer closed after {len(error.partial)} of a frame's {length} bytes") from None


def _checked(length: int, limit: int) -> int:
    if not 0 < length <= limit:
        raise ProtocolError(f"a frame of {length} bytes; between 1 and {limit} are allowed here")
    return length
