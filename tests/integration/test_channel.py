"""Both ends of the channel, over loopback."""

from __future__ import annotations

import asyncio
import hashlib

import pytest
from tests.support.channel import (
    MANIFEST,
    OBJECT,
    OBJECT_DIGEST,
    TABLE,
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

from warmseed.blocking import run_blocking
from warmseed.errors import ConfigurationError
from warmseed.seeding.channel.client import new_instance
from warmseed.seeding.channel.endpoint import Endpoint
from warmseed.seeding.channel.errors import (
    AnswerMismatch,
    PeerRefused,
    PeerRejected,
    PeerUnreachable,
    PeerWarming,
    SelfDialled,
)
from warmseed.seeding.channel.ranges import MOST_RANGES, Range
from warmseed.seeding.channel.server import SeedServer
from warmseed.seeding.channel.source import Described, Refused, Warming
from warmseed.seeding.channel.streams import BulkReader
from warmseed.seeding.environment import Environment
from warmseed.stores.errors import StoreUnavailable


def test_a_mirror_gets_the_manifest_and_the_table_of_its_rank() -> None:
    async def main() -> None:
        token, source = a_token(), a_source()
        client = await a_client(token)
        async with serving(source, [token]) as (_, peer):
            found = await client.describe(peer, a_request(client))
            assert found is not None
            assert (found.manifest, found.payload) == (MANIFEST, TABLE)
            assert source.requests == [a_request(client)]

    run(main())


def test_what_a_source_does_not_have_is_none() -> None:
    async def main() -> None:
        token = a_token()
        client = await a_client(token)
        async with serving(a_source(), [token]) as (_, peer):
            assert await client.describe(peer, a_request(client, world_rank=4)) is None
            assert await fetched(client, peer, "00" * 32, length=5) is None

    run(main())


def test_a_source_that_compiles_says_so_and_when_to_ask_again() -> None:
    async def main() -> None:
        token, source = a_token(), a_source()
        source.answers["flashinfer_autotune", 3] = Warming(12.5)
        client = await a_client(token)
        async with serving(source, [token]) as (_, peer):
            with pytest.raises(PeerWarming) as caught:
                await client.describe(peer, a_request(client))
        assert caught.value.retry_after == 12.5

    run(main())


def test_a_source_for_another_environment_names_what_differs() -> None:
    async def main() -> None:
        token, source = a_token(), a_source()
        source.answers["flashinfer_autotune", 3] = Refused("environment", ("gpu", "cuda"))
        client = await a_client(token)
        environment = Environment({"gpu": "NVIDIA H200", "cuda": "13.0"})
        asked = a_request(client, environment_hash=environment.digest, environment=dict(environment))
        async with serving(source, [token]) as (_, peer):
            with pytest.raises(PeerRefused, match="gpu, cuda") as caught:
                await client.describe(peer, asked)
        assert (caught.value.reason, caught.value.fields) == ("environment", ("gpu", "cuda"))
        assert source.requests[0].environment == {"gpu": "NVIDIA H200", "cuda": "13.0"}

    run(main())


def test_an_object_streams_whole_and_resumes_at_any_offset() -> None:
    async def main() -> None:
        token = a_token()
        client = await a_client(token)
        async with serving(a_source(), [token]) as (_, peer):
            whole = await fetched(client, peer, OBJECT_DIGEST, length=len(OBJECT))
            assert whole is not None
            assert hashlib.sha256(whole).hexdigest() == OBJECT_DIGEST
            for offset in (1, len(OBJECT) // 2, len(OBJECT) - 1, len(OBJECT)):
                rest = await fetched(client, peer, OBJECT_DIGEST, length=len(OBJECT), offset=offset)
                assert rest == OBJECT[offset:]

    run(main())


def test_an_object_of_another_length_than_the_manifest_says_is_refused_before_its_first_byte() -> None:
    async def main() -> None:
        token = a_token()
        client = await a_client(token)
        async with serving(a_source(), [token]) as (_, peer):
            with pytest.raises(AnswerMismatch) as caught:
                await fetched(client, peer, OBJECT_DIGEST, length=len(OBJECT) + 1)
        assert caught.value.fields == ("length",)

    run(main())


def test_parts_of_an_object_come_in_one_exchange_and_nothing_but_them() -> None:
    async def main() -> None:
        token, end = a_token(), len(OBJECT)
        client = await a_client(token)
        for wanted in (
            ((0, end),),
            ((5, 6),),
            ((0, 1), (end - 1, end)),
            ((10, 300_000), (300_000, 300_001), (700_000, end)),
            tuple((n * 4096 + 1, n * 4096 + 9) for n in range(MOST_RANGES)),
        ):
            async with serving(a_source(), [token]) as (server, peer):
                expected = b"".join(OBJECT[start:end] for start, end in wanted)
                assert await fetched_parts(client, peer, *wanted) == expected
                await until(lambda: server.counters()["sessions"] == 0)
                assert server.counters()["payload_bytes"] == len(expected)
                assert server.counters()["accepted"] == 1

    run(main())


def test_a_range_that_ends_behind_the_object_is_refused_and_no_byte_sent() -> None:
    async def main() -> None:
        token, end = a_token(), len(OBJECT)
        client = await a_client(token)
        async with serving(a_source(), [token]) as (server, peer):
            for last in ((end - 1, end + 1), (end, end + 1)):
                with pytest.raises(PeerRefused) as caught:
                    await fetched_parts(client, peer, (0, 10), last)
                assert (caught.value.reason, caught.value.fields) == ("range", ("ranges",))
            assert server.counters()["payload_bytes"] == 0
            assert (
                await fetched_parts(client, peer, (end + 1, end + 2)) is None
            )  # a miss: not even its beginning is there
            assert await fetched_parts(client, peer, (0, 1), sha256="00" * 32) is None

    run(main())


def test_parts_of_an_object_of_another_length_are_refused_before_their_first_byte() -> None:
    async def main() -> None:
        token = a_token()
        client = await a_client(token)
        async with serving(a_source(), [token]) as (_, peer):
            with pytest.raises(AnswerMismatch) as caught:
                async with client.fetch_ranges(peer, OBJECT_DIGEST, [Range(0, 1)], length=len(OBJECT) + 1):
                    raise AssertionError("nothing is to be read")
        assert caught.value.fields == ("length",)

    run(main())


def test_ranges_that_no_peer_would_take_are_not_sent() -> None:
    async def main() -> None:
        token = a_token()
        client = await a_client(token)
        async with serving(a_source(), [token]) as (server, peer):
            with pytest.raises(ValueError, match="a range from byte 9 follows one that ends at 10"):
                await fetched_parts(client, peer, (0, 10), (9, 11))
            assert server.counters()["accepted"] == 0

    run(main())


def test_dialling_oneself_is_noticed() -> None:
    async def main() -> None:
        token, instance = a_token(), new_instance()
        client, source = await a_client(token, instance=instance), a_source()
        async with serving(source, [token], instance=instance) as (_, peer):
            with pytest.raises(SelfDialled):
                await client.describe(peer, a_request(client))
            with pytest.raises(SelfDialled):
                await fetched(client, peer, OBJECT_DIGEST, length=len(OBJECT))
        assert source.requests == []

    run(main())


def test_a_source_that_fails_says_so_and_goes_on_serving() -> None:
    async def main() -> None:
        token, source = a_token(), a_source()
        client = await a_client(token)

        async def broken() -> None:
            raise StoreUnavailable("tier s3 is down at s3://secret-bucket")

        async with serving(source, [token]) as (_, peer):
            source.before = broken
            for ask in (
                client.describe(peer, a_request(client)),
                fetched(client, peer, OBJECT_DIGEST, length=len(OBJECT)),
            ):
                with pytest.raises(PeerRefused) as caught:
                    await ask
                assert caught.value.reason == "unavailable"
                assert "bucket" not in str(caught.value)
            source.before = None
            assert await client.describe(peer, a_request(client)) is not None

    run(main())


def test_two_tokens_at_once_rotate_without_downtime() -> None:
    async def main() -> None:
        old, new = a_token(), a_token()
        mirrors = [await a_client(*held) for held in ([old], [new], [new, old], [old, new])]
        for served in ([old], [new, old], [old, new], [new]):
            async with serving(a_source(), served) as (_, peer):
                for client, held in zip(mirrors, ([old], [new], [new, old], [old, new]), strict=True):
                    if set(held) & set(served):
                        assert await client.describe(peer, a_request(client)) is not None

    run(main())


def test_ipv6_serves_as_ipv4_does() -> None:
    async def main() -> None:
        token = a_token()
        client = await a_client(token)
        async with serving(a_source(), [token], host="::1") as (_, peer):
            assert peer.host == "::1"
            assert str(peer).startswith("[::1]:")
            assert await client.describe(peer, a_request(client)) is not None

    run(main())


def test_a_port_in_use_stops_start_up_and_says_which() -> None:
    async def main() -> None:
        token = a_token()
        async with serving(a_source(), [token]) as (_, peer):
            second = await run_blocking(
                SeedServer, a_source(), [token], host="127.0.0.1", port=peer.port, instance=new_instance()
            )
            with pytest.raises(ConfigurationError, match=f"{peer.port}.*--seed-listen-port"):
                async with second.listening():
                    pass

    run(main())


def test_nobody_listening_is_unreachable_at_once() -> None:
    async def main() -> None:
        client = await a_client(a_token())
        async with serving(a_source(), [a_token()]) as (_, peer):
            pass
        with pytest.raises(PeerUnreachable):
            await client.describe(peer, a_request(client))
        with pytest.raises(PeerUnreachable, match="resolved"):
            await client.describe(Endpoint("no-such-host.invalid", 29600), a_request(client))

    run(main())


def test_closing_the_listener_ends_what_is_under_way() -> None:
    async def main() -> None:
        token, source = a_token(), a_source()
        client = await a_client(token)
        asked = asyncio.Event()

        async def hang() -> None:
            asked.set()
            await asyncio.Event().wait()

        source.before = hang
        async with serving(source, [token]) as (_, peer):
            waiting = asyncio.create_task(client.describe(peer, a_request(client)))
            await asked.wait()
        with pytest.raises(PeerRejected):
            await waiting

    run(main())


def test_a_bug_in_the_source_costs_one_exchange_and_not_the_listener() -> None:
    async def main() -> None:
        token, source = a_token(), a_source()
        source.answers["flashinfer_autotune", 3] = Described("m" * 70_000)
        client = await a_client(token)
        async with serving(source, [token]) as (server, peer):
            with pytest.raises(PeerRejected):
                await client.describe(peer, a_request(client))
            assert server.stats.failed == 1
            assert await client.describe(peer, a_request(client, world_rank=4)) is None

    run(main())


def test_a_slow_reader_gets_every_byte_and_is_never_sent_ahead_of_itself() -> None:
    async def main() -> None:
        token, source = a_token(), a_source()
        content = OBJECT * 16
        digest = hashlib.sha256(content).hexdigest()
        source.objects[digest] = content
        client = await a_client(token)
        async with serving(source, [token]) as (server, peer):
            async with client.fetch(peer, digest, length=len(content)) as chunks:
                assert chunks is not None
                first = await anext(chunks)
                for _ in range(200):
                    await asyncio.sleep(0.001)
                # What the source has handed out fits both ends' buffers and the kernel's: the rest waits there.
                assert server.counters()["payload_bytes"] < len(content)
                rest = [first]
                async for chunk in chunks:
                    rest.append(chunk)
                    assert len(chunk) <= 256 << 10
                    await asyncio.sleep(0)
            assert b"".join(rest) == content

    run(main())


def test_leaving_a_stream_early_frees_the_source() -> None:
    async def main() -> None:
        token, source = a_token(), a_source()
        source.objects[OBJECT_DIGEST] = OBJECT * 8
        client = await a_client(token)
        async with serving(source, [token]) as (server, peer):
            async with client.fetch(peer, OBJECT_DIGEST, length=8 * len(OBJECT)) as chunks:
                assert chunks is not None
                await anext(chunks)
            await until(lambda: server.counters()["sessions"] == 0)
            assert await client.describe(peer, a_request(client)) is not None

    run(main())


def test_what_the_block_around_a_listener_raises_comes_out_as_it_is() -> None:
    async def main() -> None:
        async with serving(a_source(), [a_token()]):
            raise LookupError("from the block")

    with pytest.raises(LookupError, match="from the block"):
        run(main())


def test_a_bulk_reader_of_a_connection_that_is_gone_already_ends_at_once() -> None:
    async def main() -> None:
        async with serving(a_source(), [a_token()]) as (_, peer):
            reader, writer = await asyncio.open_connection(peer.host, peer.port)
            reader.feed_data(b"last words")
            writer.transport.abort()
            await asyncio.sleep(0)
            bulk = BulkReader(reader, writer, size=4)
            said = b""
            while piece := await bulk.read():
                said += piece
            assert said == b"last words"

    run(main(), seconds=5)
