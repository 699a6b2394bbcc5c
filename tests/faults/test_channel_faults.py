"""Networks that misbehave: every exchange ends in time, with a typed reason, and the next one works."""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace

import pytest
from tests.support.channel import (
    OBJECT,
    OBJECT_DIGEST,
    TABLE,
    MemorySource,
    a_client,
    a_request,
    a_source,
    a_token,
    fetched,
    fetched_parts,
    run,
    serving,
    until,
)
from tests.support.chaos import Faults, chaos

from warmseed.seeding.channel.endpoint import Endpoint
from warmseed.seeding.channel.errors import (
    ChannelError,
    NoSource,
    PeerBusy,
    PeerRejected,
    PeerUnreachable,
    PeerWarming,
)
from warmseed.seeding.channel.limits import ClientLimits, ServerLimits
from warmseed.seeding.channel.ranges import Range
from warmseed.seeding.channel.source import Described, Opened, Warming
from warmseed.seeding.channel.sources import Patience, SeedSources

HASTY = ClientLimits(
    connect_seconds=1, handshake_seconds=1, answer_seconds=1, transfer_seconds=0.5, reconnects=1, reconnect_seconds=0.01
)


def test_a_slow_network_only_takes_longer() -> None:
    async def main() -> None:
        token = a_token()
        client = await a_client(token)
        async with (
            serving(a_source(), [token]) as (_, peer),
            chaos(peer, to_source=Faults(delay=0.01, drip=100), to_mirror=Faults(delay=0.01, drip=1000)) as proxy,
        ):
            found = await client.describe(proxy.endpoint, a_request(client))
            assert found is not None
            assert found.payload == TABLE

    run(main())


@pytest.mark.parametrize("direction", ["to_source", "to_mirror"])
def test_a_connection_cut_anywhere_is_a_typed_error_and_never_half_an_answer(direction: str) -> None:
    async def main() -> None:
        token = a_token()
        client = await a_client(token, limits=HASTY)
        async with serving(a_source(), [token]) as (_, peer), chaos(peer) as proxy:
            whole = await client.describe(proxy.endpoint, a_request(client))
            await until(lambda: len(proxy.sent_to_mirror[0]) > len(TABLE))
            length = len(getattr(proxy, f"sent_{direction}")[0])
            for cut in sorted({0, 1, 4, 5, 100, 400, length // 2, length - 100, *range(600, length, length // 10)}):
                if not 0 <= cut < length - 60:
                    continue
                setattr(proxy, direction, Faults(cut_after=cut))
                with pytest.raises((PeerUnreachable, PeerRejected)):
                    await client.describe(proxy.endpoint, a_request(client))
            setattr(proxy, direction, Faults())
            assert await client.describe(proxy.endpoint, a_request(client)) == replace_peer(whole, proxy.endpoint)

    run(main(), seconds=60)


def replace_peer(found: object, endpoint: Endpoint) -> object:
    return replace(found, peer=endpoint)  # type: ignore[type-var]


@pytest.mark.parametrize("direction", ["to_source", "to_mirror"])
def test_a_flipped_bit_never_reaches_the_caller(direction: str) -> None:
    async def main() -> None:
        token = a_token()
        client = await a_client(token, limits=HASTY)
        async with serving(a_source(), [token]) as (_, peer), chaos(peer) as proxy:
            await client.describe(proxy.endpoint, a_request(client))
            await until(lambda: len(proxy.sent_to_mirror[0]) > len(TABLE))
            length = len(getattr(proxy, f"sent_{direction}")[0])
            for flip in (0, 3, 9, 60, 200, length // 2, length - 80):
                setattr(proxy, direction, Faults(flip_at=flip))
                try:
                    found = await client.describe(proxy.endpoint, a_request(client))
                except ChannelError:
                    continue
                assert found is not None
                assert found.payload == TABLE

    run(main(), seconds=60)


def test_a_source_that_stalls_midway_is_given_up_on() -> None:
    async def main() -> None:
        token = a_token()
        client = await a_client(token, limits=HASTY)
        async with serving(a_source(), [token]) as (_, peer), chaos(peer) as proxy:
            for stall in (0, 500, 3000, len(TABLE)):
                proxy.to_mirror = Faults(stall_after=stall)
                with pytest.raises(PeerUnreachable, match=r"within|slowly"):
                    await client.describe(proxy.endpoint, a_request(client))

    run(main())


@pytest.mark.parametrize("direction", ["to_source", "to_mirror"])
def test_a_half_closed_connection_ends_the_exchange(direction: str) -> None:
    async def main() -> None:
        token = a_token()
        client = await a_client(token, limits=HASTY)
        async with serving(a_source(), [token]) as (_, peer), chaos(peer) as proxy:
            for end in (0, 200, 1000):
                setattr(proxy, direction, Faults(half_close_after=end))
                try:
                    found = await client.describe(proxy.endpoint, a_request(client))
                    assert found is not None
                    assert found.payload == TABLE
                except ChannelError:
                    pass
            setattr(proxy, direction, Faults())
            assert await client.describe(proxy.endpoint, a_request(client)) is not None

    run(main())


def test_a_stream_that_is_cut_resumes_where_it_stopped_at_the_next_source() -> None:
    async def main() -> None:
        token = a_token()
        client = await a_client(token, limits=HASTY)
        async with AsyncExitStack() as stack:
            _, first = await stack.enter_async_context(serving(a_source(), [token]))
            _, second = await stack.enter_async_context(serving(a_source(), [token]))
            proxy = await stack.enter_async_context(chaos(first, to_mirror=Faults(cut_after=len(OBJECT) // 2)))
            sources = SeedSources(client, [proxy.endpoint, second], Patience(wait_seconds=1))
            async with sources.fetch(OBJECT_DIGEST, length=len(OBJECT)) as chunks:
                assert b"".join([chunk async for chunk in chunks]) == OBJECT
            assert 0 < len(proxy.sent_to_mirror[0]) <= len(OBJECT) // 2

    run(main())


def test_parts_of_an_object_that_are_cut_go_on_in_the_middle_of_a_range_at_the_next_source() -> None:
    ranges = [Range(100, 200_000), Range(400_000, 1), Range(500_000, 300_000), Range(1_000_000, 10)]
    wanted = b"".join(OBJECT[part.offset : part.end] for part in ranges)

    async def main() -> None:
        token = a_token()
        client = await a_client(token, limits=HASTY)
        async with AsyncExitStack() as stack:
            _, first = await stack.enter_async_context(serving(a_source(), [token]))
            server, second = await stack.enter_async_context(serving(a_source(), [token]))
            proxy = await stack.enter_async_context(chaos(first, to_mirror=Faults(cut_after=300_000)))
            sources = SeedSources(client, [proxy.endpoint, second], Patience(wait_seconds=1))
            async with sources.fetch(OBJECT_DIGEST, length=len(OBJECT), ranges=ranges) as chunks:
                assert b"".join([chunk async for chunk in chunks]) == wanted
            # A record of TLS that was cut is lost; everything before it is not asked for again.
            assert server.counters()["payload_bytes"] <= len(wanted) - 300_000 + 32_000

    run(main())


def test_a_source_whose_object_goes_away_between_two_ranges_leaves_a_cut_stream() -> None:
    async def main() -> None:
        token, source = a_token(), a_source()
        client = await a_client(token)
        opened = source.open

        @asynccontextmanager
        async def once(sha256: str, offset: int) -> AsyncIterator[Opened | None]:
            async with opened(sha256, offset) as found:
                source.objects.clear()
                yield found

        source.open = once  # type: ignore[method-assign]
        async with serving(source, [token]) as (_, peer):
            with pytest.raises(PeerUnreachable, match="10 bytes before the end"):
                await fetched_parts(client, peer, (0, 10), (20, 30))

    run(main())


def test_one_source_that_keeps_breaking_is_still_read_to_the_end() -> None:
    async def main() -> None:
        token = a_token()
        client = await a_client(token, limits=HASTY)
        async with (
            serving(a_source(), [token]) as (_, peer),
            chaos(peer, to_mirror=Faults(cut_after=300_000)) as proxy,
        ):
            sources = SeedSources(client, [proxy.endpoint], Patience(wait_seconds=5, pause_seconds=0.01))
            async with sources.fetch(OBJECT_DIGEST, length=len(OBJECT)) as chunks:
                assert b"".join([chunk async for chunk in chunks]) == OBJECT
            assert proxy.connections >= 4

    run(main())


def test_no_source_left_says_what_each_one_said() -> None:
    async def main() -> None:
        token = a_token()
        client = await a_client(token, limits=HASTY)
        async with serving(a_source(), [token]) as (_, gone):
            pass
        async with serving(a_source(), [a_token()]) as (_, stranger):
            sources = SeedSources(client, [gone, stranger], Patience(wait_seconds=0))
            with pytest.raises(NoSource) as caught:
                await sources.describe(a_request(client))
            assert isinstance(caught.value.reasons[str(gone)], PeerUnreachable)
            assert isinstance(caught.value.reasons[str(stranger)], PeerRejected)
            async with sources.fetch(OBJECT_DIGEST, length=len(OBJECT)) as chunks:
                with pytest.raises(NoSource, match="byte 0"):
                    await anext(chunks)

    run(main())


def test_a_warming_source_is_waited_for_and_only_as_long_as_allowed() -> None:
    async def main() -> None:
        token, source = a_token(), a_source()
        source.answers["flashinfer_autotune", 3] = Warming(0.1)
        client = await a_client(token)
        async with serving(source, [token]) as (_, peer):
            patient = SeedSources(client, [peer], Patience(wait_seconds=20))
            waiting = asyncio.create_task(patient.describe(a_request(client)))
            await until(lambda: len(source.requests) >= 3)
            source.answers["flashinfer_autotune", 3] = Described("m", TABLE)
            found = await waiting
            assert found is not None
            source.answers["flashinfer_autotune", 3] = Warming(0.1)
            with pytest.raises(NoSource) as caught:
                await SeedSources(client, [peer], Patience(wait_seconds=0.3)).describe(a_request(client))
            assert isinstance(caught.value.reasons[str(peer)], PeerWarming)

    run(main())


def test_a_source_started_a_moment_after_its_mirror_is_waited_for() -> None:
    async def main() -> None:
        token = a_token()
        client = await a_client(token)
        async with serving(a_source(), [token]) as (server, peer):
            pass  # its port is known now, and closed
        sources = SeedSources(client, [peer], Patience(wait_seconds=20, pause_seconds=0.05))
        waiting = asyncio.create_task(sources.describe(a_request(client)))
        await asyncio.sleep(0)
        server._port = peer.port
        async with server.listening():
            assert await waiting is not None

    run(main())


def test_the_next_source_answers_when_the_first_has_nothing() -> None:
    async def main() -> None:
        token = a_token()
        client = await a_client(token)
        async with serving(MemorySource(), [token]) as (_, empty), serving(a_source(), [token]) as (_, full):
            sources = SeedSources(client, [empty, full], Patience(wait_seconds=0))
            found = await sources.describe(a_request(client))
            assert found is not None
            assert found.peer == full
            assert await sources.describe(a_request(client, world_rank=9)) is None

    run(main())


def test_a_source_that_hangs_answers_busy_in_time_and_leaks_nothing() -> None:
    async def main() -> None:
        token, source = a_token(), a_source()

        async def hang() -> None:
            await asyncio.Event().wait()

        source.before = hang
        client = await a_client(token)
        limits = ServerLimits(source_seconds=0.2, descriptions=2, turn_seconds=0.1)
        async with serving(source, [token], limits=limits) as (server, peer):
            outcomes = await asyncio.gather(
                *(client.describe(peer, a_request(client)) for _ in range(6)), return_exceptions=True
            )
            assert {type(outcome) for outcome in outcomes} == {PeerBusy}
            await until(lambda: server._seats.held == 0)
            source.before = None
            assert await client.describe(peer, a_request(client)) is not None

    run(main())


def test_a_reader_that_does_not_read_is_cut_and_its_place_freed() -> None:
    async def main() -> None:
        token, source = a_token(), a_source()
        source.answers["flashinfer_autotune", 3] = Described("m", bytes(8 << 20))
        client = await a_client(token)
        limits = ServerLimits(descriptions=1, answer_seconds=0.3, description_rate=64 << 20)
        async with (
            serving(source, [token], limits=limits) as (server, peer),
            chaos(peer, to_mirror=Faults(stall_after=100_000)) as proxy,
        ):
            stuck = asyncio.create_task(client.describe(proxy.endpoint, a_request(client)))
            await until(lambda: server.stats.failed == 1)
            assert await client.describe(peer, a_request(client)) is not None
            stuck.cancel()

    run(main())


def test_a_source_that_gives_less_or_more_than_it_promised_leaves_a_cut_stream() -> None:
    async def main() -> None:
        token, source = a_token(), a_source()
        client = await a_client(token)
        async with serving(source, [token]) as (_, peer):
            for wrong in (OBJECT[:-1], OBJECT + b"!"):

                async def chunks(content: bytes = wrong, offset: int = 0) -> object:
                    yield content

                source._chunks = lambda content, offset: chunks()  # type: ignore[method-assign,assignment,return-value]
                with pytest.raises(PeerUnreachable, match="before the end"):
                    await fetched(client, peer, OBJECT_DIGEST, length=len(OBJECT))

    run(main())


def test_an_exchange_cancelled_at_any_moment_leaves_nothing_open() -> None:
    async def main() -> None:
        token = a_token()
        client = await a_client(token)
        async with serving(a_source(), [token]) as (server, peer):
            await client.describe(peer, a_request(client))
            await until(lambda: server.counters()["sessions"] == 0)
            before = open_descriptors()
            for steps in range(60):
                asking = asyncio.create_task(client.describe(peer, a_request(client)))
                for _ in range(steps):
                    await asyncio.sleep(0)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            await until(lambda: open_descriptors() == before)
            assert await client.describe(peer, a_request(client)) is not None

    run(main())


def test_a_listener_stopped_at_any_moment_leaves_nothing_open() -> None:
    async def main() -> None:
        token = a_token()
        client = await a_client(token, limits=HASTY)
        async with serving(a_source(), [token]) as (server, _):
            pass
        before = open_descriptors()
        for steps in range(0, 80, 2):
            async with server.listening():
                peer = Endpoint(*server.addresses[0])
                asking = [asyncio.create_task(client.describe(peer, a_request(client))) for _ in range(3)]
                for _ in range(steps):
                    await asyncio.sleep(0)
            for one in asking:
                one.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        await until(lambda: open_descriptors() == before)

    run(main())


def open_descriptors() -> int:
    count = 0
    for descriptor in range(1024):
        with suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_GETFD)
            count += 1
    return count
