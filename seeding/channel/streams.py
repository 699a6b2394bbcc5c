"""TLS over a connected socket, for both ends, safe to cancel at any moment."""

from __future__ import annotations

import asyncio
import socket
import ssl

__all__ = ["secure"]

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
