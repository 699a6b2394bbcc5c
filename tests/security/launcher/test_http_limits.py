"""No client can hold the health port: not by silence, by dripping, by never reading, nor by numbers."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Awaitable, Callable

from warmseed.daemon.launcher.board import Board
from warmseed.daemon.pages.http import HttpLimits, open_port, serve

LIMITS = HttpLimits(connections=4, connection_seconds=0.5, idle_seconds=0.2)
BIG = b"x" * (32 << 20)


def with_server(client: Callable[[int], Awaitable[None]], limits: HttpLimits = LIMITS) -> None:
    async def whole() -> None:
        sock = open_port("127.0.0.1", 0)
        port = sock.getsockname()[1]
        async with (
            asyncio.timeout(30),
            serve(
                sock,
                Board(),
                metrics=lambda: (BIG, "text/plain"),
                page=lambda: "<p>",
                status=dict,
                limits=limits,
            ),
        ):
            await client(port)

    asyncio.run(whole())


async def dial(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


async def answer(port: int, request: bytes) -> bytes:
    reader, writer = await dial(port)
    writer.write(request)
    data = await reader.read()
    writer.close()
    return data


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What comes until the server ends the connection, however it does."""
    got = b""
    try:
        async with asyncio.timeout(5):
            while piece := await reader.read(1 << 16):
                got += piece
    except ConnectionError:
        return got
    return got


GET = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def test_silent_client_is_cut_off() -> None:
    async def client(port: int) -> None:
        reader, writer = await dial(port)
        assert await ended(reader) == b""
        writer.close()

    with_server(client)


def test_dripping_header_is_cut_off() -> None:
    async def client(port: int) -> None:
        reader, writer = await dial(port)
        writer.write(b"GET /health HTTP/1.1\r\n")
        ending = asyncio.create_task(ended(reader))
        while not ending.done():
            writer.write(b"X-A: b\r\n")
            await asyncio.sleep(0.02)
        assert b"200" not in await ending
        writer.close()

    with_server(client)


def test_stalled_body_is_refused_and_cut_off() -> None:
    async def client(port: int) -> None:
        reader, writer = await dial(port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\nabc")
        assert b"400" in (await ended(reader)).split(b"\r\n")[0]
        writer.close()

    with_server(client)


def test_client_that_never_reads_is_cut_off() -> None:
    async def client(port: int) -> None:
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.setblocking(False)
            await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", port))
            raw.send(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            hung_up = select.poll()
            hung_up.register(raw, 0)  # only the end of the connection, not what there is to read
            events = await asyncio.to_thread(hung_up.poll, 5000)
            assert [event & (select.POLLHUP | select.POLLERR) for _, event in events] != [0]
            assert events

    with_server(client)


def test_busy_connection_ends_after_its_time_too() -> None:
    async def client(port: int) -> None:
        reader, writer = await dial(port)
        ending = asyncio.create_task(ended(reader))
        while not ending.done():
            writer.write(GET.replace(b"Connection: close\r\n", b""))
            await asyncio.sleep(0.02)
        writer.close()

    with_server(client)


def test_crowd_is_refused_and_the_port_recovers() -> None:
    async def client(port: int) -> None:
        crowd = [await dial(port) for _ in range(LIMITS.connections)]
        reader, writer = await dial(port)
        writer.write(GET)
        assert await ended(reader) == b""
        writer.close()
        for other, _ in crowd:
            await ended(other)
        for _, other_writer in crowd:
            other_writer.close()
        assert b"503" in await answer(port, GET)

    with_server(client)


def test_hostile_requests_get_4xx_and_never_5xx() -> None:
    requests = [
        b"POST /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ]

    async def client(port: int) -> None:
        for request in requests:
            reader, writer = await dial(port)
            writer.write(request)
            first = (await ended(reader)).split(b"\r\n")[0]
            assert first == b"" or first.split()[1][:1] == b"4", (request[:40], first)
            writer.close()

    with_server(client, HttpLimits(connection_seconds=2.0, idle_seconds=0.5))
