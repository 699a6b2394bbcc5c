"""What the ranks of a group say to their host, and the frames it travels in: every one carries a MAC."""

from __future__ import annotations

import asyncio
import hmac
from typing import Annotated, Final, TypeVar

import msgspec

from warmseed.errors import WarmseedError, printable

__all__ = ["SHARE_BYTES", "Hello", "Share", "Verdict", "Welcome", "Wire"]

SHARE_BYTES: Final = 16 << 10  # bytes one rank may say in one round
S = TypeVar("S", bound=msgspec.Struct)


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank's first word to the host."""

    group: Annotated[str, msgspec.Meta(max_length=256)]
    rank: Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]
    world: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    nonce: Annotated[str, msgspec.Meta(min_length=32, max_length=64)]


class Welcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The host's answer: empty for a rank that may stay."""

    refused: Annotated[str, msgspec.Meta(max_length=512)] = ""


class Share(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one rank says in one round."""

    name: Annotated[str, msgspec.Meta(max_length=128)]
    share: Annotated[bytes, msgspec.Meta(max_length=SHARE_BYTES)]


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a round ended."""

    name: Annotated[str, msgspec.Meta(max_length=128)]
    shares: tuple[bytes, ...] = ()  # by rank; empty when the round failed
    missing: tuple[int, ...] = ()
    reason: Annotated[str, msgspec.Meta(max_length=512)] = ""


class Wire:
    """Frames with a MAC: 4 bytes of length, 32 of HMAC-SHA256 over direction, number and body, the body."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, *, host: bool) -> None:
        self._reader, self._writer, self._key = reader, writer, key
        self._out, self._in = (b"host", b"rank") if host else (b"rank", b"host")
        self._sent = self._received = 0

    async def send(self, message: msgspec.Struct) -> None:
        """Write one message, and wait until it has left."""
        body = msgspec.json.encode(message)
        mac = self._mac(self._out, self._sent, body)
        self._sent += 1
        self._writer.write(len(body).to_bytes(4, "big") + mac + body)
        await self._writer.drain()

    async def receive(self, form: type[S], *, limit: int) -> S:
        """Raises: EOFError, OSError, `WarmseedError` for a frame that is too long, forged or malformed."""
        length = int.from_bytes(await self._reader.readexactly(4), "big")
        if length > limit:
            raise WarmseedError(f"a frame of {length} bytes is over the limit of {limit}; the connection is closed")
        mac = await self._reader.readexactly(32)
        body = await self._reader.readexactly(length)
        if not hmac.compare_digest(mac, self._mac(self._in, self._received, body)):
            raise WarmseedError("the other end does not hold this group's secret; the connection is closed")
        self._received += 1
        try:
            return msgspec.json.decode(body, type=form)
        except msgspec.MsgspecError as error:
            raise WarmseedError(f"a frame does not parse: {printable(error)}; the connection is closed") from None

    def rekey(self, *nonces: bytes) -> None:
        """From here on frames are good for this connection only."""
        self._key = hmac.digest(self._key, b"\0".join(nonces), "sha256")

    def _mac(self, direction: bytes, number: int, body: bytes) -> bytes:
        return hmac.digest(self._key, direction + number.to_bytes(8, "big") + body, "sha256")

    def close(self) -> None:
        """Hang up."""
        self._writer.close()
