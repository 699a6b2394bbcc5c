"""A seed source in memory, and both ends of the channel over loopback."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from blockbuster import blockbuster_ctx

from warmseed.blocking import run_blocking
from warmseed.seeding.channel.client import SeedClient, new_instance
from warmseed.seeding.channel.endpoint import Endpoint
from warmseed.seeding.channel.limits import ClientLimits, ServerLimits
from warmseed.seeding.channel.messages import DescribeRequest
from warmseed.seeding.channel.ranges import Range
from warmseed.seeding.channel.server import SeedServer
from warmseed.seeding.channel.source import Described, Miss, Opened, SourceAnswer
from warmseed.seeding.trust.token import Token, new_token, parse_token

T = TypeVar("T")

MANIFEST = '{"payload":"eyJ4IjoxfQ==","payloadType":"application/json","signatures":[]}'
TABLE = b"table " * 1000
OBJECT = bytes(range(256)) * (1 << 12)  # 1 MiB
OBJECT_DIGEST = hashlib.sha256(OBJECT).hexdigest()
CONFIG_HASH = "c0" * 32
ENVIRONMENT_HASH = "e0" * 32


def run(main: Coroutine[Any, Any, T], *, seconds: float = 30) -> T:
    """What `main` returns; fails when it blocks the loop or takes longer than `seconds`."""

    async def bounded() -> T:
        async with asyncio.timeout(seconds):
            return await main

    with blockbuster_ctx():
        return asyncio.run(bounded())


def a_token() -> Token:
    """A fresh one."""
    return parse_token(new_token().reveal())


def a_request(client: SeedClient, **changes: Any) -> DescribeRequest:
    """A question for rank 3's tables."""
    asked: dict[str, Any] = {
        "instance": client.instance,
        "kind": "flashinfer_autotune",
        "config_hash": CONFIG_HASH,
        "environment_hash": ENVIRONMENT_HASH,
        "dp_rank": 0,
        "world_rank": 3,
    }
    return DescribeRequest(**(asked | changes))


@dataclass
class MemorySource:
    """Answers from dictionaries; `before` runs first and may wait, raise or count."""

    answers: dict[tuple[str, int], SourceAnswer] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=lambda: {OBJECT_DIGEST: OBJECT})
    chunk: int = 64 << 10
    before: Callable[[], Awaitable[None]] | None = None
    requests: list[DescribeRequest] = field(default_factory=list)

    async def describe(self, request: DescribeRequest) -> SourceAnswer:
        self.requests.append(request)
        if self.before is not None:
            await self.before()
        return self.answers.get((request.kind, request.world_rank), Miss())

    @asynccontextmanager
    async def open(self, sha256: str, offset: int) -> AsyncIterator[Opened | None]:
        if self.before is not None:
            await self.before()
        content = self.objects.get(sha256)
        if content is None or offset > len(content):
            yield None
        else:
            yield Opened(len(content) - offset, self._chunks(content, offset))

    async def _chunks(self, content: bytes, offset: int) -> AsyncIterator[bytes]:
        for start in range(offset, len(content), self.chunk):
            yield content[start : min(start + self.chunk, len(content))]


def a_source() -> MemorySource:
    """One that has rank 3's tables and one object."""
    return MemorySource(answers={("flashinfer_autotune", 3): Described(MANIFEST, TABLE)})


@asynccontextmanager
async def serving(
    source: MemorySource,
    tokens: Sequence[Token],
    *,
    host: str = "127.0.0.1",
    limits: ServerLimits | None = None,
    instance: str | None = None,
) -> AsyncIterator[tuple[SeedServer, Endpoint]]:
    """A listener on a free port, and where it is."""
    server = await run_blocking(
        SeedServer, source, tokens, host=host, port=0, instance=instance or new_instance(), limits=limits
    )
    async with server.listening():
        yield server, Endpoint(*server.addresses[0])


async def a_client(*tokens: Token, limits: ClientLimits | None = None, instance: str | None = None) -> SeedClient:
    """A mirror's end; made on a thread, because deriving keys takes a while."""
    return await run_blocking(SeedClient, tokens, instance=instance or new_instance(), limits=limits)


async def fetched(client: SeedClient, peer: Endpoint, sha256: str, *, length: int, offset: int = 0) -> bytes | None:
    """A whole object."""
    async with client.fetch(peer, sha256, length=length, offset=offset) as chunks:
        return None if chunks is None else b"".join([chunk async for chunk in chunks])


async def fetched_parts(
    client: SeedClient, peer: Endpoint, *wanted: tuple[int, int], sha256: str = OBJECT_DIGEST
) -> bytes | None:
    """The bytes of ranges of `OBJECT`, each given by its first byte and the one behind its last."""
    ranges = [Range(start, end - start) for start, end in wanted]
    async with client.fetch_ranges(peer, sha256, ranges, length=len(OBJECT)) as chunks:
        return None if chunks is None else b"".join([chunk async for chunk in chunks])


async def until(condition: Callable[[], bool], *, seconds: float = 5) -> None:
    """Return as soon as `condition` holds.

    Raises:
        TimeoutError: it did not within `seconds`.
    """
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - conditions of the code under test, which has no event for them
            await asyncio.sleep(0.005)
