"""Fuzz target: frames and messages of the channel. Whatever the bytes, a typed error or one canonical message.

Run it for as long as you like: ``python tests/fuzz/fuzz_channel.py tests/fuzz/corpus/channel -max_total_time=600``.
"""

from __future__ import annotations

import asyncio
import sys

import atheris

with atheris.instrument_imports(include=["warmseed.seeding"]):
    from warmseed.seeding.channel.errors import ProtocolError
    from warmseed.seeding.channel.frames import REQUEST_BYTES, read_frame
    from warmseed.seeding.channel.messages import decode_answer, decode_request, encode

__all__ = ["one_input"]

_LOOP = asyncio.new_event_loop()


def one_input(data: bytes) -> None:
    """Raise if any of the rules is broken by `data`."""
    for decode in (decode_request, decode_answer):
        try:
            message = decode(data)
        except ProtocolError as error:
            if not str(error).isprintable():
                raise ValueError("foreign control characters in a message for the log") from error
        else:
            if encode(message) != data:
                raise ValueError("accepted in a spelling that is not ours")
    _LOOP.run_until_complete(_frames(data))


async def _frames(data: bytes) -> None:
    reader = asyncio.StreamReader(limit=REQUEST_BYTES)
    reader.feed_data(data)
    reader.feed_eof()
    try:
        while (body := await read_frame(reader, limit=REQUEST_BYTES)) is not None:
            if not 0 < len(body) <= REQUEST_BYTES:
                raise ValueError("a frame out of bounds")
    except ProtocolError:
        pass


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
