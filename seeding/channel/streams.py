"""TLS over a connected socket, for both ends, safe to cancel at any moment."""

from __future__ import annotations

import asyncio
import socket
import ssl

__all__ = ["BulkReader", "secure"]

_SHUTDOWN_SECONDS = 2.0


class _StreamProtocol(asyncio.StreamReaderProtocol):
    """asyncio's own, which must be told here that it sits on TLS: it can't keep half a connection open."""

    def eof_received(self) -> bool:
        super().eof_received()
        return False


async def secure(
    sock: socket.socket, context: ssl.SSLContext, *, server_name: str | None, seconds: float, read_buffer: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The streams of `sock` once its TLS handshake is done; owns `sock` from the call on.

    `server_name` is what the client end asks for, and `None` at the listening end. The caller sets its own
    deadline; `seconds` only has to be no shorter.

    Raises:
        OSError: the handshake failed (`ssl.SSLError` where TLS has the reason) or the connection was lost.
    """
    loop = asyncio.get_running_loop()
    # In two steps, because asyncio's single step leaks the connection, and can then watch a descriptor that
    # belongs to somebody else, when it is cancelled before its first callback (3.11 to 3.13).
    plain, _ = await loop.create_connection(asyncio.Protocol, sock=sock)
    reader = asyncio.StreamReader(limit=read_buffer, loop=loop)
    protocol = _StreamProtocol(reader, loop=loop)
    try:
        transport = await loop.start_tls(
            plain,
            protocol,
            context,
            server_side=server_name is None,
            server_hostname=server_name,
            ssl_handshake_timeout=seconds,
            ssl_shutdown_timeout=_SHUTDOWN_SECONDS,
        )
    except BaseException:
        plain.abort()
        raise
    if transport is None:  # lost in the very moment in which the handshake ended
        raise ConnectionResetError("connection lost")
    protocol.connection_made(transport)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


class BulkReader(asyncio.BufferedProtocol):
    """The rest of a connection, for many bytes: TLS decrypts straight into one buffer, which bounds the memory.

    Takes over from the `StreamReader` and `StreamWriter` that `secure` gave; neither reads any more.
    A stream's own way costs three copies of every byte and a third of the rate.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, size: int) -> None:
        self._view = memoryview(bytearray(size))
        self._filled = 0
        self._waiter: asyncio.Future[None] | None = None
        self._failure: Exception | None = None
        self._paused = False
        self._transport: asyncio.Transport = writer.transport  # type: ignore[assignment]  # of TCP, so it reads too
        self._before = reader
        self._transport.set_protocol(self)
        self._ended = reader.at_eof() or self._transport.is_closing()
        reader.feed_eof()  # what it still holds comes out first

    async def read(self) -> bytes:
        """What has come, at least one byte and at most the buffer; ``b""`` at the end. The caller sets the deadline.

        Raises:
            OSError: the connection was lost.
        """
        if not self._before.at_eof():
            return await self._before.read(len(self._view))
        while not self._filled and not self._ended:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if not self._filled:
            if self._failure is not None:
                raise self._failure
            return b""
        data = bytes(self._view[: self._filled])
        self._filled = 0
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        return data

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._filled == len(self._view):
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        self._ended = True
        self._wake()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True
        self._failure = exc
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
