"""``/health``, ``/metrics``, ``/status`` and ``/status.json`` over HTTP, read-only, with real limits.

aiohttp alone would let a client hold a connection for ever (a stalled body, a reader that never reads), so
connections are counted here, each ends after `HttpLimits.connection_seconds` whatever it does, and no
request body is ever read.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import msgspec
from aiohttp import web

from warmseed.daemon.launcher.board import Board
from warmseed.errors import ConfigurationError, printable

__all__ = ["HttpLimits", "open_port", "serve"]

_PLAIN: Final = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
_PAGE: Final = _PLAIN | {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What one client may take."""

    connections: int = 64  # open at once, all clients together
    connection_seconds: float = 30.0  # a connection's whole life, however many requests it carried
    idle_seconds: float = 10.0  # between requests, and for the header of one
    header_bytes: int = 8 << 10  # one header line or field


def open_port(host: str, port: int) -> socket.socket:
    """A socket bound to `host` and `port`, taken before any rank starts.

    Raises:
        ConfigurationError: if the port is in use or the address is not this machine's.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        opened = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    except OSError as error:
        raise ConfigurationError(
            f"--weight-cache-health-host {printable(host)} has no address: {error.strerror}"
        ) from error
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
        opened.listen(64)  # here already: two sockets may bind one port, only one may listen
        opened.setblocking(False)
    except OSError as error:
        opened.close()
        hint = "; is another launcher running on this node?" if error.errno == errno.EADDRINUSE else ""
        raise ConfigurationError(
            f"--weight-cache-health-port {port} on {printable(host)} can't be opened: {error.strerror}{hint}"
        ) from error
    return opened


@asynccontextmanager
async def serve(
    sock: socket.socket,
    board: Board,
    *,
    metrics: Callable[[], tuple[bytes, str]],
    page: Callable[[], str],
    status: Callable[[], object],
    limits: HttpLimits = HttpLimits(),
) -> AsyncIterator[None]:
    """Answer on `sock` while the block runs; the callables make the bodies at each request."""

    async def health(_: web.Request) -> web.Response:
        troubles = board.troubles()
        body = {
            "status": "serving" if not troubles else "unavailable",
            "ranks": len(board.ranks),
            "serving": sum(r.serving is not None and r.live for r in board.ranks.values()),
            "troubles": troubles[:64],
        }
        return _json(body, status=503 if troubles else 200)

    async def metrics_text(_: web.Request) -> web.Response:
        body, content_type = metrics()
        return web.Response(body=body, headers=_PLAIN | {"Content-Type": content_type})

    async def status_page(_: web.Request) -> web.Response:
        return web.Response(text=page(), content_type="text/html", headers=_PAGE)

    async def status_json(_: web.Request) -> web.Response:
        return _json(status())

    async def root(_: web.Request) -> web.Response:
        raise web.HTTPFound("/status")

    app = web.Application(client_max_size=1024, middlewares=[_no_bodies])
    for path, handler in (
        ("/health", health),
        ("/metrics", metrics_text),
        ("/status", status_page),
        ("/status.json", status_json),
        ("/", root),
    ):
        app.router.add_get(path, handler)
    runner = web.AppRunner(
        app,
        access_log=None,
        handle_signals=False,
        keepalive_timeout=limits.idle_seconds,
        lingering_time=1.0,
        max_line_size=limits.header_bytes,
        max_field_size=limits.header_bytes,
        shutdown_timeout=0.5,
    )
    await runner.setup()
    if runner.server is None:
        raise RuntimeError("aiohttp made no server")  # can't happen after setup()
    gate = _Gate(runner.server, limits)
    listener = await asyncio.get_running_loop().create_server(gate, sock=sock)
    try:
        yield
    finally:
        listener.close()
        await runner.cleanup()


@web.middleware
async def _no_bodies(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    if request.can_read_body:
        response = _json({"error": "these pages take no request body"}, status=400)
        response.force_close()
        return response
    return await handler(request)


def _json(body: object, *, status: int = 200) -> web.Response:
    text = msgspec.json.encode(body)
    return web.Response(body=text, status=status, headers=_PLAIN | {"Content-Type": "application/json"})


class _Gate:
    """A protocol factory that refuses connections past the cap and ends each after its time."""

    def __init__(self, factory: Callable[[], asyncio.BaseProtocol], limits: HttpLimits) -> None:
        self._factory = factory
        self.limits = limits
        self.open = 0

    def __call__(self) -> asyncio.BaseProtocol:
        inner = self._factory() if self.open < self.limits.connections else None
        return _Counted(self, inner) if isinstance(inner, asyncio.Protocol) else _Refused()


class _Refused(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.WriteTransport):
            transport.abort()


def _reset(transport: asyncio.WriteTransport) -> None:
    """End the connection at once; what a client never read must not wait for it in the kernel either."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


class _Counted(asyncio.Protocol):
    """Passes every call on to aiohttp's protocol, counting the connection and ending it after its time."""

    def __init__(self, gate: _Gate, inner: asyncio.Protocol) -> None:
        self._gate = gate
        self._inner = inner
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._gate.open += 1
        if isinstance(transport, asyncio.WriteTransport):
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._gate.limits.connection_seconds, _reset, transport)
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._gate.open -= 1
        if self._timer is not None:
            self._timer.cancel()
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()
