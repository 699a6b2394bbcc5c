"""Several sources as one: tried in order, waited for while that is cheaper than local work."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass

from warmseed.seeding.channel.client import Description, SeedClient
from warmseed.seeding.channel.endpoint import Endpoint
from warmseed.seeding.channel.errors import ChannelError, NoSource, PeerBusy, PeerUnreachable, PeerWarming
from warmseed.seeding.channel.messages import DescribeRequest
from warmseed.seeding.channel.ranges import Range, after

__all__ = ["Patience", "SeedSources"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long to wait for sources; the caller's own budget comes on top."""

    wait_seconds: float  # for one that is warming or busy (``--seed-wait``); 0: ask once
    appear_seconds: float = 30.0  # for one where nothing answers yet, as when both are started together
    pause_seconds: float = 1.0  # between two rounds where no source suggests a time


class SeedSources:
    """Asks `peers` in their order; every wait is spread by up to half, so that a fleet does not ask in step."""

    def __init__(
        self,
        client: SeedClient,
        peers: Sequence[Endpoint],
        patience: Patience,
        *,
        spread: Callable[[float], float] = lambda seconds: seconds * random.uniform(0.5, 1.5),  # noqa: S311
    ) -> None:
        self._client = client
        self._peers = tuple(peers)
        self._patience = patience
        self._spread = spread

    async def describe(self, request: DescribeRequest) -> Description | None:
        """What the first source that has it says; `None` when none has it and at least one could tell.

        A source is given up on when it misses, refuses, rejects us or breaks the protocol; waited for
        while it is warming or busy; and for a shorter while when nothing answers there.

        Raises:
            NoSource: every source failed, or is still warming after all the waiting.
        """
        loop = asyncio.get_running_loop()
        begun = loop.time()
        left = list(self._peers)
        missed = False
        reasons: dict[str, ChannelError] = {}
        while left:
            pauses: list[float] = []
            for peer in list(left):
                try:
                    found = await self._client.describe(peer, request)
                except ChannelError as error:
                    reasons[str(peer)] = error
                    pause = self._pause(error, loop.time() - begun)
                    if pause is None:
                        left.remove(peer)
                        logger.info("seed source %s is given up on: %s", peer, error)
                    else:
                        pauses.append(pause)
                    continue
                if found is not None:
                    return found
                missed = True
                left.remove(peer)
            if left:
                await asyncio.sleep(min(pauses))
        if missed:
            return None
        raise NoSource(_summary(reasons, "nothing was seeded"), reasons=reasons)

    @asynccontextmanager
    async def fetch(
        self, sha256: str, *, length: int, first: Endpoint | None = None, ranges: Sequence[Range] = ()
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """The `length` bytes of an object, from `first` and then the others; one that dies is resumed elsewhere.

        With `ranges` only their bytes, one after the other. The caller hashes: only the digest of the whole says
        that the bytes are right.

        Raises:
            NoSource: while iterating: no source is left, the object is not complete.
        """
        async with aclosing(self._chunks(sha256, length, first, ranges)) as chunks:
            yield chunks

    async def _chunks(
        self, sha256: str, length: int, first: Endpoint | None, ranges: Sequence[Range]
    ) -> AsyncGenerator[bytes, None]:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        left = sorted(self._peers, key=lambda peer: peer != first)
        reasons: dict[str, ChannelError] = {}
        offset = 0
        while left:
            pauses: list[float] = []
            for peer in list(left):
                before = offset
                try:
                    async with self._rest(peer, sha256, length, ranges, offset) as chunks:
                        if chunks is None:
                            left.remove(peer)
                            continue
                        async for chunk in chunks:
                            offset += len(chunk)
                            yield chunk
                    return
                except ChannelError as error:
                    reasons[str(peer)] = error
                    logger.info("seed source %s failed at byte %d of %s: %s", peer, offset, sha256, error)
                    pause = self._pause(error, loop.time() - begun)
                    # One that got further is worth coming back to; one that is not there has no reason to appear now.
                    if offset == before and (pause is None or isinstance(error, PeerUnreachable)):
                        left.remove(peer)
                    else:
                        pauses.append(pause or self._spread(self._patience.pause_seconds))
            if left:
                await asyncio.sleep(min(pauses))
        wanted = sum(part.length for part in ranges) or length
        raise NoSource(_summary(reasons, f"{sha256} stands at byte {offset} of {wanted}"), reasons=reasons)

    def _rest(
        self, peer: Endpoint, sha256: str, length: int, ranges: Sequence[Range], position: int
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes] | None]:
        """What is missing when `position` bytes have come; asked for in the way that every peer knows, if it can be."""
        if not ranges:
            return self._client.fetch(peer, sha256, length=length, offset=position)
        left = after(ranges, position)
        if len(left) == 1 and left[0].end == length:
            return self._client.fetch(peer, sha256, length=length, offset=left[0].offset)
        return self._client.fetch_ranges(peer, sha256, left, length=length)

    def _pause(self, error: ChannelError, waited: float) -> float | None:
        """How long until it is worth asking again; `None` when it is not."""
        patience = self._patience
        if isinstance(error, PeerWarming | PeerBusy):
            pause, limit = max(error.retry_after, 0.1), patience.wait_seconds
        elif isinstance(error, PeerUnreachable):
            pause, limit = patience.pause_seconds, min(patience.appear_seconds, patience.wait_seconds)
        else:
            return None
        if waited >= limit:
            return None
        return min(self._spread(pause), limit - waited)  # a last question right at the end of the waiting


def _summary(reasons: dict[str, ChannelError], outcome: str) -> str:
    if not reasons:
        return f"no seed source has it; {outcome}"
    return f"no seed source could help ({'; '.join(str(error) for error in reasons.values())}); {outcome}"
