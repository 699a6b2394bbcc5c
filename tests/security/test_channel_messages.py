"""Frames and messages from a hostile holder of the token: refused before they cost anything."""

from __future__ import annotations

import asyncio
import json
import struct
import tracemalloc

import pytest
from tests.support.channel import a_client, a_request, a_source, a_token, fetched, run, serving, until

from warmseed.blocking import run_blocking
from warmseed.seeding.artifact import ArtifactKey
from warmseed.seeding.bundle.delta import MAX_REQUESTS
from warmseed.seeding.channel.endpoint import Endpoint
from warmseed.seeding.channel.errors import (
    AnswerMismatch,
    ChannelError,
    PeerUnreachable,
    ProtocolError,
    SelfDialled,
)
from warmseed.seeding.channel.frames import ANSWER_BYTES, REQUEST_BYTES, body_length, frame
from warmseed.seeding.channel.limits import ServerLimits
from warmseed.seeding.channel.messages import (
    BusyAnswer,
    DescribeAnswer,
    DescribeRequest,
    FetchAnswer,
    FetchRequest,
    MissAnswer,
    RefusedAnswer,
    decode_answer,
    decode_request,
    encode,
)
from warmseed.seeding.channel.ranges import MOST_RANGES
from warmseed.seeding.channel.tls import client_context, server_context, server_name
from warmseed.seeding.environment import Environment
from warmseed.seeding.trust.token import Token

INSTANCE = "1a" * 32
GOOD: dict[str, object] = {
    "request": "describe",
    "instance": INSTANCE,
    "kind": "flashinfer_autotune",
    "config_hash": "c0" * 32,
    "environment_hash": "e0" * 32,
    "dp_rank": 0,
    "world_rank": 3,
    "environment": {},
}


def spelled(**changes: object) -> bytes:
    return json.dumps(GOOD | changes, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


def test_the_good_request_is_good() -> None:
    assert encode(decode_request(spelled())) == spelled()


def _deep(opening: bytes) -> bytes:
    return spelled().replace(b"{}", opening * 100_000)


BAD_REQUESTS = {
    "empty": b"",
    "not JSON": b"\x80\x04\x95",
    "pickle": b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93\x94.",
    "an array": b"[]",
    "a string": b'"describe"',
    "null": b"null",
    "deep arrays": _deep(b"["),
    "deep objects": _deep(b'{"a":'),
    "NaN": spelled().replace(b":3,", b":NaN,"),
    "infinity": spelled().replace(b":3,", b":Infinity,"),
    "a byte order mark": b"\xef\xbb\xbf" + spelled(),
    "UTF-16": spelled().decode().encode("utf-16"),
    "a lone surrogate": spelled(environment={"a": "\ud800"}),
    "an escaped lone surrogate": spelled().replace(b"{}", b'{"a":"\\ud800"}'),
    "an unknown field": spelled(extra=1),
    "a duplicate field": spelled().replace(b'"dp_rank":0', b'"dp_rank":1,"dp_rank":0'),
    "a duplicate key in the environment": spelled().replace(b"{}", b'{"a":"1","a":"1"}'),
    "a boolean for a rank": spelled(dp_rank=True),
    "a float for a rank": spelled().replace(b":3,", b":3.0,"),
    "an exponent for a rank": spelled().replace(b":3,", b":3e0,"),
    "a string for a rank": spelled(dp_rank="0"),
    "a negative rank": spelled(dp_rank=-1),
    "a huge rank": spelled(dp_rank=1 << 20),
    "a 5000-digit integer": spelled().replace(b":3,", b":" + b"9" * 5000 + b","),
    "an upper-case hash": spelled(config_hash="C0" * 32),
    "a hash with a newline": spelled(config_hash="c0" * 32 + "\n"),
    "a short hash": spelled(config_hash="c0" * 31),
    "a path for a kind": spelled(kind="../../etc/passwd"),
    "a kind with a newline": spelled(kind="k\n"),
    "a kind with terminal codes": spelled(kind="\x1b[31m"),
    "an empty kind": spelled(kind=""),
    "an unknown request": spelled(request="exec"),
    "a missing field": spelled().replace(b'"dp_rank":0,', b""),
    "another order": json.dumps(dict(reversed(GOOD.items())), separators=(",", ":")).encode(),
    "spare white space": spelled().replace(b",", b", "),
    "trailing bytes": spelled() + b"{}",
    "a trailing newline": spelled() + b"\n",
    "an environment of another digest": spelled(environment={"gpu": "H200"}),
    "an environment of a thousand fields": spelled(environment={str(n): "x" for n in range(1000)}),
    "a megabyte of environment": spelled(environment={"gpu": "x" * (1 << 20)}),
    "an environment value that is no text": spelled(environment={"gpu": 1}),
    "an answer": encode(MissAnswer(instance=INSTANCE)),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_malformed_request_is_a_typed_error(name: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode_request(BAD_REQUESTS[name])
    message = str(caught.value)
    assert len(message) < 400
    assert message.isprintable()


def ranges(*pairs: object) -> bytes:
    asked = {"request": "ranges", "instance": INSTANCE, "sha256": "a0" * 32, "ranges": pairs}
    return json.dumps(asked, separators=(",", ":")).encode()


def test_a_request_for_ranges_may_have_as_many_as_a_plan_makes() -> None:
    far = 1 << 49
    body = ranges(*([far + 2 * n, 1] for n in range(MOST_RANGES)))
    assert encode(decode_request(body)) == body
    assert len(body) < REQUEST_BYTES
    assert MAX_REQUESTS <= MOST_RANGES


@pytest.mark.parametrize(
    "body",
    [
        ranges(),
        ranges(*([2 * n, 1] for n in range(MOST_RANGES + 1))),
        ranges([0, 10], [9, 1]),
        ranges([0, 10], [0, 10]),
        ranges([10, 10], [0, 10]),
        ranges([0, 0]),
        ranges([-1, 1]),
        ranges([0, -1]),
        ranges([0, (1 << 50) + 1]),
        ranges([(1 << 50) + 1, 1]),
        ranges([0, True]),
        ranges([0, 1.0]),
        ranges([0]),
        ranges([0, 1, 2]),
        ranges({"offset": 0, "length": 1}),
        ranges("0-10"),
        ranges([0, 10]).replace(b"[0,10]", b"[00,10]"),
    ],
)
def test_ranges_that_are_too_many_empty_overlapping_or_out_of_order_are_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_request(body)


@pytest.mark.parametrize(
    "body",
    [
        encode(BusyAnswer(instance=INSTANCE, retry_after=1.0)).replace(b"1.0", b"1e999"),
        encode(BusyAnswer(instance=INSTANCE, retry_after=1.0)).replace(b"1.0", b"-1.0"),
        encode(BusyAnswer(instance=INSTANCE, retry_after=1.0)).replace(b"1.0", b"86400.0"),
        encode(RefusedAnswer(instance=INSTANCE, reason="x" * 33)),
        encode(RefusedAnswer(instance=INSTANCE, reason="line\nbreak")),
        encode(RefusedAnswer(instance=INSTANCE, reason="ok", fields=("f",) * 65)),
        encode(RefusedAnswer(instance=INSTANCE, reason="ok", fields=("f" * 65,))),
        encode(MissAnswer(instance="")),
        encode(FetchRequest(instance=INSTANCE, sha256="a0" * 32, offset=0)),
        encode(
            DescribeAnswer(
                instance=INSTANCE,
                kind="k",
                config_hash="c0" * 32,
                environment_hash="e0" * 32,
                dp_rank=0,
                world_rank=0,
                manifest="m" * 65537,
                length=0,
            )
        ),
        encode(
            DescribeAnswer(
                instance=INSTANCE,
                kind="k",
                config_hash="c0" * 32,
                environment_hash="e0" * 32,
                dp_rank=0,
                world_rank=0,
                manifest="m",
                length=(8 << 20) + 1,
            )
        ),
    ],
)
def test_a_malformed_answer_is_a_typed_error(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_answer(body)


def test_a_request_that_could_not_travel_is_refused_where_it_is_made() -> None:
    environment = Environment({"gpu": "x" * 257})
    key = a_request_key(environment.digest)
    with pytest.raises(ProtocolError):
        DescribeRequest.of(key, instance=INSTANCE, environment=environment)
    fine = Environment({"gpu": "NVIDIA H200"})
    asked = DescribeRequest.of(a_request_key(fine.digest), instance=INSTANCE, environment=fine)
    assert asked.key == a_request_key(fine.digest)
    assert decode_request(encode(asked)) == asked


def a_request_key(environment_hash: str) -> ArtifactKey:
    return ArtifactKey(kind="k", config_hash="c0" * 32, environment_hash=environment_hash, dp_rank=1, world_rank=2)


@pytest.mark.parametrize("length", [0, REQUEST_BYTES + 1, 2**31 - 1, 2**31, 2**32 - 1])
def test_a_length_out_of_bounds_is_refused_without_allocating(length: int) -> None:
    tracemalloc.start()
    with pytest.raises(ProtocolError, match=str(length)):
        body_length(struct.pack("!I", length), limit=REQUEST_BYTES)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_an_oversized_body_is_never_sent() -> None:
    with pytest.raises(ProtocolError):
        frame(bytes(ANSWER_BYTES + 1), limit=ANSWER_BYTES)
    with pytest.raises(ProtocolError):
        frame(b"", limit=ANSWER_BYTES)


async def _raw(peer: Endpoint, token: Token) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that holds the token and can say anything."""
    context = await run_blocking(client_context, token)
    return await asyncio.open_connection(peer.host, peer.port, ssl=context, server_hostname=server_name(token.key_id))


WIRE = {
    "a zero length": struct.pack("!I", 0),
    "two gigabytes": struct.pack("!I", 2**31) + b"x" * 100,
    "four gigabytes": struct.pack("!I", 2**32 - 1) + b"x" * 100,
    "half a length": b"\0\0",
    "a short body": struct.pack("!I", 1000) + b"{}",
    "garbage": struct.pack("!I", 4) + b"\xff\xfe\xfd\xfc",
    "deep JSON": struct.pack("!I", REQUEST_BYTES) + b"[" * REQUEST_BYTES,
    "two requests": frame(spelled(), limit=REQUEST_BYTES) * 2,
    "a request and more": frame(spelled(), limit=REQUEST_BYTES) + b"x",
}


@pytest.mark.parametrize("name", WIRE)
def test_what_breaks_the_protocol_is_closed_and_counted_and_the_next_peer_served(name: str) -> None:
    async def main() -> None:
        token = a_token()
        client = await a_client(token)
        async with serving(a_source(), [token]) as (server, peer):
            reader, writer = await _raw(peer, token)
            writer.write(WIRE[name])
            if name in ("half a length", "a short body"):
                writer.close()
            else:
                await reader.read()
                writer.transport.abort()
            await until(lambda: server.stats.malformed == 1)
            assert await client.describe(peer, a_request(client)) is not None
            await until(lambda: server._seats.held == 0)

    run(main())


def test_a_request_that_drips_is_cut_in_time() -> None:
    async def main() -> None:
        token = a_token()
        client = await a_client(token)
        async with serving(a_source(), [token], limits=ServerLimits(request_seconds=0.3)) as (server, peer):
            reader, writer = await _raw(peer, token)
            body = frame(spelled(), limit=REQUEST_BYTES)
            for position in range(len(body)):
                writer.write(body[position : position + 1])
                await asyncio.sleep(0.01)
                if reader.at_eof() or server.stats.failed:
                    break
            await until(lambda: server.stats.failed == 1)
            writer.transport.abort()
            assert await client.describe(peer, a_request(client)) is not None

    run(main())


def test_an_answer_from_a_hostile_source_is_checked() -> None:
    """A source that holds the token and answers nonsense, another rank, too much, or in fragments."""

    async def main() -> None:
        token = a_token()
        client = await a_client(token)
        asked = a_request(client)
        right = {
            "instance": INSTANCE,
            "kind": asked.kind,
            "config_hash": asked.config_hash,
            "environment_hash": asked.environment_hash,
            "dp_rank": asked.dp_rank,
            "world_rank": asked.world_rank,
            "manifest": "m",
            "length": 0,
        }
        reply = b""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(4)
            writer.write(reply)
            await writer.drain()
            writer.close()

        context = await run_blocking(server_context, [token])
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
        peer = Endpoint(*server.sockets[0].getsockname()[:2])
        for field, wrong in (
            ("kind", "compile_cache"),
            ("config_hash", "00" * 32),
            ("environment_hash", "00" * 32),
            ("dp_rank", 1),
            ("world_rank", 0),
        ):
            reply = frame(encode(DescribeAnswer(**(right | {field: wrong}))), limit=ANSWER_BYTES)  # type: ignore[arg-type]
            with pytest.raises(AnswerMismatch, match=field) as caught:
                await client.describe(peer, asked)
            assert caught.value.fields == (field,)
        reply = frame(encode(DescribeAnswer(**(right | {"instance": client.instance}))), limit=ANSWER_BYTES)  # type: ignore[arg-type]
        with pytest.raises(SelfDialled):
            await client.describe(peer, asked)
        # All there is arrives at once, end included, before anyone has asked for the bytes.
        head = encode(FetchAnswer(instance=INSTANCE, sha256="a0" * 32, offset=0, length=100))
        reply = frame(head, limit=ANSWER_BYTES) + b"x" * 10
        with pytest.raises(PeerUnreachable, match="90 bytes before the end"):
            await fetched(client, peer, "a0" * 32, length=100)
        reply = frame(head, limit=ANSWER_BYTES) + b"x" * 150
        assert await fetched(client, peer, "a0" * 32, length=100) == b"x" * 100
        for reply in (  # noqa: B007 - `serve` sends it
            struct.pack("!I", 2**31),
            struct.pack("!I", ANSWER_BYTES + 1),
            struct.pack("!I", 10) + b"[" * 10,
            struct.pack("!I", 10) + b"x",
            frame(encode(DescribeAnswer(**(right | {"length": 100}))), limit=ANSWER_BYTES) + b"x" * 99,  # type: ignore[arg-type]
            frame(spelled(), limit=ANSWER_BYTES),
        ):
            with pytest.raises(ChannelError):
                await client.describe(peer, asked)
        server.close()

    run(main())
