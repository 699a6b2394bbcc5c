"""Strangers that hold connections: they cost a descriptor each, and honest mirrors do not notice them."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from tests.support.channel import (
    OBJECT,
    OBJECT_DIGEST,
    a_client,
    a_request,
    a_source,
    a_token,
    fetched,
    run,
    serving,
    until,
)
from tests.support.chaos import chaos

from warmseed.seeding.channel.endpoint import Endpoint
from warmseed.seeding.channel.limits import ServerLimits
from warmseed.seeding.channel.lobby import Lobby, owner_of
from warmseed.seeding.channel.server import SeedServer


@asynccontextmanager
async def strangers(peer: Endpoint, count: int, *, address: str | None = None) -> AsyncIterator[list[socket.socket]]:
    """`count` open connections to `peer` that say nothing; each from its own loopback address, or all from one."""
    loop = asyncio.get_running_loop()
    socks: list[socket.socket] = []
    try:
        for number in range(count):
            sock = socket.socket()
            socks.append(sock)
            sock.setblocking(False)
            sock.bind((address or f"127.0.{1 + number // 250}.{1 + number % 250}", 0))
            await loop.sock_connect(sock, (peer.host, peer.port))
        yield socks
    finally:
        for sock in socks:
            sock.close()


def lobby_of(server: SeedServer) -> Lobby:
    assert server.lobby is not None
    return server.lobby


@pytest.fixture(autouse=True)
def _enough_descriptors() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))


@pytest.mark.parametrize(
    ("count", "address"), [(1, None), (4, None), (500, None), (50, "127.0.0.1"), (500, "127.0.0.9"), (500, "127.0.0.1")]
)
def test_an_honest_mirror_is_served_at_once_beside_silent_strangers(count: int, address: str | None) -> None:
    async def main() -> None:
        token = a_token()
        client = await a_client(token)
        async with serving(a_source(), [token]) as (server, peer), strangers(peer, count, address=address):
            await until(lambda: server.stats.accepted == count)
            begun = time.monotonic()
            assert await client.describe(peer, a_request(client)) is not None
            assert await fetched(client, peer, OBJECT_DIGEST, length=len(OBJECT)) == OBJECT
            assert time.monotonic() - begun < 1
            assert server.stats.rejected == 0

    run(main())


def test_the_caps_are_never_passed() -> None:
    async def main() -> None:
        limits = ServerLimits(silent=64, silent_per_address=16)
        async with serving(a_source(), [a_token()], limits=limits) as (server, peer):
            async with strangers(peer, 100, address="127.0.0.7"):
                await until(lambda: server.stats.accepted == 100)
                assert lobby_of(server).peak == len(lobby_of(server)) == 16
            async with strangers(peer, 200):
                await until(lambda: server.stats.accepted == 300)
                assert lobby_of(server).peak <= 64

    run(main())


def test_one_address_can_not_push_out_another() -> None:
    async def main() -> None:
        limits = ServerLimits(silent=32, silent_per_address=32)
        async with (
            serving(a_source(), [a_token()], limits=limits) as (server, peer),
            strangers(peer, 1, address="127.0.0.2") as (quiet,),
            strangers(peer, 200, address="127.0.0.3"),
        ):
            await until(lambda: server.stats.accepted == 201)
            with pytest.raises(BlockingIOError):
                quiet.recv(1)  # still open

    run(main())


@pytest.mark.parametrize("sent", [b"", b"\x16", b"\x16\x03\x01\x01\x00", b"\x16\x03\x01\x01\x00\x01"])
def test_a_silent_or_dripping_stranger_is_cut_in_time(sent: bytes) -> None:
    async def main() -> None:
        limits = ServerLimits(hello_seconds=0.3)
        async with serving(a_source(), [a_token()], limits=limits) as (server, peer):
            reader, writer = await asyncio.open_connection(peer.host, peer.port)
            writer.write(sent)
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
            assert lobby_of(server).expired == 1
            writer.close()

    run(main(), seconds=3)


def test_a_hello_that_arrives_in_pieces_is_served() -> None:
    async def main() -> None:
        token = a_token()
        client = await a_client(token)
        async with serving(a_source(), [token]) as (_, peer), chaos(peer) as proxy:
            assert await client.describe(proxy.endpoint, a_request(client)) is not None
            recorded = bytes(proxy.sent_to_source[0])
            hello = recorded[: 5 + int.from_bytes(recorded[3:5], "big")]
            reader, writer = await asyncio.open_connection(peer.host, peer.port)
            for start in range(0, len(hello), 60):
                writer.write(hello[start : start + 60])
                await writer.drain()
                await asyncio.sleep(0.002)
            assert (await reader.readexactly(3))[:1] == b"\x16"
            writer.close()

    run(main())


def test_handshakes_that_dawdle_lose_their_place_to_those_who_wait() -> None:
    async def main() -> None:
        token = a_token()
        client = await a_client(token)
        limits = ServerLimits(handshakes=8, handshakes_per_address=8, handshake_grace=0.2, handshake_seconds=60)
        async with serving(a_source(), [token], limits=limits) as (server, peer), chaos(peer) as proxy:
            assert await client.describe(proxy.endpoint, a_request(client)) is not None
            recorded = bytes(proxy.sent_to_source[0])
            hello = recorded[: 5 + int.from_bytes(recorded[3:5], "big")]
            async with strangers(peer, 8) as socks:
                for sock in socks:
                    sock.send(hello)
                await until(lambda: server._turns.held == 8)
                begun = time.monotonic()
                assert await client.describe(peer, a_request(client)) is not None
                assert time.monotonic() - begun < 2
                assert server.stats.evicted_handshakes >= 1

    run(main())


def test_running_out_of_descriptors_pushes_out_the_silent_and_serves_the_honest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        token = a_token()
        client = await a_client(token)
        async with serving(a_source(), [token]) as (server, peer), strangers(peer, 3):
            await until(lambda: server.stats.accepted == 3)
            loop = asyncio.get_running_loop()
            real = loop.sock_accept
            failures = [OSError(errno.EMFILE, "Too many open files")] * 5

            async def accept(sock: socket.socket) -> tuple[socket.socket, object]:
                if failures:
                    raise failures.pop()
                return await real(sock)

            monkeypatch.setattr(loop, "sock_accept", accept)
            assert await client.describe(peer, a_request(client)) is not None
            assert await client.describe(peer, a_request(client)) is not None
            assert failures == []
            assert len(lobby_of(server)) == 0

    run(main())


@pytest.mark.parametrize("descriptors", [256, 1024, 20_000, 1 << 20])
def test_connections_leave_the_daemon_half_of_its_descriptors(descriptors: int) -> None:
    limits = ServerLimits().within(descriptors)
    assert limits.silent + limits.queue + limits.handshakes + limits.sessions <= descriptors // 2
    assert min(limits.silent, limits.queue, limits.handshakes, limits.sessions) > 0


def test_counters_have_stable_names() -> None:
    async def main() -> None:
        token = a_token()
        client = await a_client(token)
        async with serving(a_source(), [token]) as (server, peer), strangers(peer, 2):
            await client.describe(peer, a_request(client))
            await until(lambda: server.counters()["sessions"] == 0)
            counters = server.counters()
            assert counters | {"accepted": 3, "described": 1, "silent": 2, "rejected": 0} == counters

    run(main())


def test_addresses_are_counted_by_who_holds_them() -> None:
    assert owner_of("10.1.2.3") == "10.1.2.3"
    assert owner_of("::ffff:10.1.2.3") == "10.1.2.3"
    assert owner_of("2001:db8:1:2:aaaa::1") == owner_of("2001:db8:1:2:bbbb::2") != owner_of("2001:db8:1:3::1")
    assert owner_of("fe80::1%eth0") == "fe80::/64"
