"""More mirrors than places: they wait their turn, nobody fails, and memory stays bounded."""

from __future__ import annotations

import asyncio
import resource

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

from warmseed.seeding.channel.errors import PeerBusy
from warmseed.seeding.channel.limits import ServerLimits
from warmseed.seeding.channel.sources import Patience, SeedSources


@pytest.fixture(autouse=True)
def _enough_descriptors() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))


def test_two_hundred_mirrors_are_served_through_a_handful_of_places() -> None:
    async def main() -> None:
        token = a_token()
        client = await a_client(token)
        limits = ServerLimits(handshakes=8, handshakes_per_address=8, sessions=16, descriptions=2, streams=2)

        async def mirror() -> bool:
            found = await client.describe(peer, a_request(client))
            return found is not None and await fetched(client, peer, OBJECT_DIGEST, length=len(OBJECT)) == OBJECT

        async with serving(a_source(), [token], limits=limits) as (server, peer):
            assert all(await asyncio.gather(*(mirror() for _ in range(200))))
            assert server.stats.sessions_peak == 16
            assert (server.stats.failed, server.stats.turned_away) == (0, 0)

    run(main(), seconds=60)


def test_a_listener_whose_queue_is_full_is_asked_again_by_itself() -> None:
    async def main() -> None:
        token = a_token()
        client = await a_client(token)
        limits = ServerLimits(handshakes=1, handshakes_per_address=1, queue=2, queue_per_address=2)
        async with serving(a_source(), [token], limits=limits) as (server, peer):
            found = await asyncio.gather(*(client.describe(peer, a_request(client)) for _ in range(20)))
            assert all(one is not None for one in found)
            assert server.stats.turned_away > 0

    run(main())


def test_a_full_house_says_busy_and_the_mirror_waits_for_it() -> None:
    async def main() -> None:
        token, source = a_token(), a_source()
        client = await a_client(token)
        gate = asyncio.Event()

        async def wait() -> None:
            await gate.wait()

        source.before = wait
        limits = ServerLimits(sessions=1, queue_seconds=0.2, busy_retry_seconds=0.1)
        async with serving(source, [token], limits=limits) as (server, peer):
            first = asyncio.create_task(client.describe(peer, a_request(client)))
            await until(lambda: len(source.requests) == 1)
            with pytest.raises(PeerBusy) as caught:
                await client.describe(peer, a_request(client))
            assert caught.value.retry_after == 0.1
            sources = SeedSources(client, [peer], Patience(wait_seconds=20))
            second = asyncio.create_task(sources.describe(a_request(client)))
            await until(lambda: server.stats.turned_away >= 2)
            gate.set()
            assert await first is not None
            assert await second is not None

    run(main())


def test_a_mirror_in_turn_seeds_the_next_one() -> None:
    """A fleet fans out as a tree: the first source serves one mirror, which serves the next."""

    async def main() -> None:
        token, origin = a_token(), a_source()
        client = await a_client(token)
        async with serving(origin, [token]) as (_, first):
            content = await fetched(client, first, OBJECT_DIGEST, length=len(OBJECT))
        assert content is not None
        grown = a_source()
        grown.objects = {OBJECT_DIGEST: content}
        async with serving(grown, [token]) as (_, second):
            assert await fetched(client, second, OBJECT_DIGEST, length=len(OBJECT)) == OBJECT

    run(main())
