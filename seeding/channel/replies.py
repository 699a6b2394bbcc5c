"""Answers to authenticated peers: in fair turns, within deadlines, and with bounded memory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass

from warmseed.errors import WarmseedError, printable
from warmseed.seeding.channel.errors import ProtocolError
from warmseed.seeding.channel.fair import FairQueue
from warmseed.seeding.channel.frames import ANSWER_BYTES, frame
from warmseed.seeding.channel.limits import ServerLimits
from warmseed.seeding.channel.messages import (
    PAYLOAD_BYTES,
    Answer,
    BusyAnswer,
    DescribeAnswer,
    DescribeRequest,
    FetchAnswer,
    FetchRequest,
    MissAnswer,
    RangesAnswer,
    RangesRequest,
    RefusedAnswer,
    Request,
    WarmingAnswer,
    decode_answer,
    encode,
)
from warmseed.seeding.channel.source import Described, Miss, Opened, Refused, SeedSource, SourceAnswer, Warming

__all__ = ["Replies", "ReplyStats"]

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ReplyStats:
    """Counts since the start, for metrics."""

    described: int = 0
    streamed: int = 0
    missed: int = 0
    warming: int = 0
    busy: int = 0
    refused: int = 0
    payload_bytes: int = 0


class Replies:
    """Turns requests into bytes on the wire."""

    def __init__(self, source: SeedSource, *, instance: str, limits: ServerLimits) -> None:
        self._source = source
        self._instance = instance
        self._limits = limits
        self._descriptions = FairQueue(limits.descriptions)
        self._streams = FairQueue(limits.streams)
        self.stats = ReplyStats()

    async def answer(
        self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, owner: str
    ) -> None:
        """Answer `request`, and return when the peer has taken everything and closed.

        Raises:
            ProtocolError: the peer went on talking.
            TimeoutError: the peer is too slow.
            OSError: the connection is lost.
        """
        if request.instance == self._instance:
            await self._finish(RefusedAnswer(instance=self._instance, reason="self"), reader, writer)
        elif isinstance(request, DescribeRequest):
            await self._describe(request, reader, writer, owner)
        else:
            await self._send(request, reader, writer, owner)

    async def turn_away(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Tell a peer, whatever it asks, to come again.

        Raises:
            ProtocolError, TimeoutError, OSError: as `answer` does.
        """
        async with asyncio.timeout(1.0):
            await self._head(self._busy(), writer)
            while await reader.read(1024):  # its request, and its end
                pass

    async def _describe(
        self, request: DescribeRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, owner: str
    ) -> None:
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self._descriptions.turn(owner, seconds=self._limits.turn_seconds))
            except TimeoutError:
                await self._finish(self._busy(), reader, writer)
                return
            head, payload = await self._described(request)
            async with asyncio.timeout(self._limits.answer_seconds + len(payload) / self._limits.description_rate):
                await self._head(head, writer)
                await self._write(payload, writer)
                await self._flushed(reader, writer)

    async def _described(self, request: DescribeRequest) -> tuple[Answer, bytes]:
        try:
            async with asyncio.timeout(self._limits.source_seconds):
                found = await self._source.describe(request)
        except TimeoutError:
            logger.warning("the source took too long to answer for %s", request.key.rank_label)
            return self._busy(), b""
        except WarmseedError as error:
            logger.warning("the source can't answer for %s: %s", request.key.rank_label, printable(error))
            return RefusedAnswer(instance=self._instance, reason="unavailable"), b""
        return self._spelled(request, found)

    def _spelled(self, request: DescribeRequest, found: SourceAnswer) -> tuple[Answer, bytes]:
        me = self._instance
        match found:
            case Described(manifest, payload):
                if len(payload) > PAYLOAD_BYTES:
                    raise ValueError(f"the source gave {len(payload)} bytes of payload, at most {PAYLOAD_BYTES} travel")
                self.stats.described += 1
                answer = DescribeAnswer(
                    instance=me,
                    kind=request.kind,
                    config_hash=request.config_hash,
                    environment_hash=request.environment_hash,
                    dp_rank=request.dp_rank,
                    world_rank=request.world_rank,
                    manifest=manifest,
                    length=len(payload),
                )
                return answer, payload
            case Miss():
                self.stats.missed += 1
                return MissAnswer(instance=me), b""
            case Warming(retry_after):
                self.stats.warming += 1
                return WarmingAnswer(instance=me, retry_after=float(retry_after)), b""
            case Refused(reason, fields):
                self.stats.refused += 1
                return RefusedAnswer(instance=me, reason=reason, fields=fields), b""

    async def _send(
        self,
        request: FetchRequest | RangesRequest,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        owner: str,
    ) -> None:
        """Answer with bytes: the rest of an object, or parts of it."""
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self._streams.turn(owner, seconds=self._limits.turn_seconds))
            except TimeoutError:
                await self._finish(self._busy(), reader, writer)
                return
            first = request.offset if isinstance(request, FetchRequest) else request.ranges[0].offset
            opened = await self._opened(request.sha256, first, stack)
            if not isinstance(opened, Opened):
                await self._finish(opened, reader, writer)
                return
            head = self._promise(request, first + opened.length)
            if isinstance(head, RefusedAnswer):
                await self._finish(head, reader, writer)
                return
            if isinstance(request, RangesRequest):
                parts = await stack.enter_async_context(aclosing(self._parts(request, opened)))
                opened = Opened(sum(wanted.length for wanted in request.ranges), parts)
            async with asyncio.timeout(self._limits.answer_seconds + opened.length / self._limits.stream_rate):
                await self._head(head, writer)
                if await self._stream(opened.chunks, opened.length, writer):
                    self.stats.streamed += 1
                    await self._flushed(reader, writer)

    def _promise(
        self, request: FetchRequest | RangesRequest, length: int
    ) -> FetchAnswer | RangesAnswer | RefusedAnswer:
        """The head of the answer from an object of `length` bytes."""
        me = self._instance
        if isinstance(request, FetchRequest):
            rest = length - request.offset
            return FetchAnswer(instance=me, sha256=request.sha256, offset=request.offset, length=rest)
        if request.ranges[-1].end > length:
            self.stats.refused += 1
            return RefusedAnswer(instance=me, reason="range", fields=("ranges",))
        return RangesAnswer(instance=me, sha256=request.sha256, length=length)

    async def _parts(self, request: RangesRequest, first: Opened) -> AsyncGenerator[bytes, None]:
        """The bytes of the ranges, the first of which is open; ends early when the object goes away meanwhile."""
        opened: Opened | Answer = first
        for number, wanted in enumerate(request.ranges):
            async with AsyncExitStack() as stack:
                if number:
                    opened = await self._opened(request.sha256, wanted.offset, stack)
                if not isinstance(opened, Opened):
                    return
                left = wanted.length
                async for chunk in opened.chunks:
                    yield chunk[:left]
                    left -= min(left, len(chunk))
                    if not left:
                        break
                if left:
                    return

    async def _opened(self, sha256: str, offset: int, stack: AsyncExitStack) -> Opened | Answer:
        try:
            async with asyncio.timeout(self._limits.source_seconds):
                opened = await stack.enter_async_context(self._source.open(sha256, offset))
        except TimeoutError:
            logger.warning("the source took too long to open %s", sha256)
            return self._busy()
        except WarmseedError as error:
            logger.warning("the source can't open %s: %s", sha256, printable(error))
            return RefusedAnswer(instance=self._instance, reason="unavailable")
        if opened is None:
            self.stats.missed += 1
            return MissAnswer(instance=self._instance)
        return opened

    async def _stream(self, chunks: AsyncIterator[bytes], length: int, writer: asyncio.StreamWriter) -> bool:
        """Whether all `length` bytes went out; a source that fails midway leaves the peer with a cut stream."""
        left = length
        try:
            async for chunk in chunks:
                if len(chunk) > left:
                    logger.warning("the source gave more than the %d bytes it promised; the stream is cut", length)
                    return False
                left -= len(chunk)
                await self._write(chunk, writer)
        except WarmseedError as error:
            logger.warning("the source failed %d bytes before the end of a stream: %s", left, printable(error))
            return False
        if left:
            logger.warning("the source gave %d bytes less than the %d it promised; the stream is cut", left, length)
        return not left

    async def _finish(self, answer: Answer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(self._limits.answer_seconds):
            await self._head(answer, writer)
            await self._flushed(reader, writer)

    async def _head(self, answer: Answer, writer: asyncio.StreamWriter) -> None:
        try:
            body = encode(answer)
            decode_answer(body)
            framed = frame(body, limit=ANSWER_BYTES)
        except ProtocolError as error:  # the fault is on this side: the peer only asked
            raise ValueError(f"the source gave an answer that the channel can't carry: {error}") from error
        writer.write(framed)
        await writer.drain()

    async def _write(self, data: bytes, writer: asyncio.StreamWriter) -> None:
        # A view, because the TLS layer cuts what it is given into records, and cutting bytes copies the rest.
        view = memoryview(data)
        for start in range(0, len(view), self._limits.write_buffer):
            piece = view[start : start + self._limits.write_buffer]
            writer.write(piece)
            self.stats.payload_bytes += len(piece)
            await writer.drain()

    async def _flushed(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Wait for the peer to close, which says that it has everything; closing first could cut its end."""
        if await reader.read(1):
            raise ProtocolError("the peer sent more than its one request")

    def _busy(self) -> BusyAnswer:
        self.stats.busy += 1
        return BusyAnswer(instance=self._instance, retry_after=self._limits.busy_retry_seconds)
