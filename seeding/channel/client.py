"""The asking end: dials a source, proves the token, asks one question, checks that the answer fits it."""

from __future__ import annotations

import asyncio
import ipaddress
import random
import secrets
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from warmseed.errors import ConfigurationError, printable
from warmseed.seeding.channel.endpoint import Endpoint
from warmseed.seeding.channel.errors import (
    AnswerMismatch,
    PeerBusy,
    PeerRefused,
    PeerRejected,
    PeerUnreachable,
    PeerWarming,
    ProtocolError,
    SelfDialled,
)
from warmseed.seeding.channel.frames import ANSWER_BYTES, REQUEST_BYTES, frame, read_frame
from warmseed.seeding.channel.limits import ClientLimits
from warmseed.seeding.channel.messages import (
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
from warmseed.seeding.channel.ranges import Range
from warmseed.seeding.channel.streams import BulkReader, secure
from warmseed.seeding.channel.tls import check_alpn, client_context, server_name
from warmseed.seeding.trust.token import Token

__all__ = ["Description", "SeedClient", "new_instance"]


def new_instance() -> str:
    """A name for this process, 64 random hex digits; its listener and its client share it."""
    return secrets.token_hex(32)


@dataclass(frozen=True, slots=True)
class Description:
    """What a source says about the artifact that was asked for; not yet verified against any key."""

    peer: Endpoint
    instance: str  # of the source's process
    manifest: str  # the signed envelope, as text
    payload: bytes  # empty when the bytes are to be fetched by digest


class _Dropped(PeerUnreachable):
    """The connection ended before the handshake did, as a full listener ends it."""


class SeedClient:
    """Asks sources, as a holder of `tokens`: the first is tried first, the others after a rejection.

    Making one derives keys, for about 0.1 s of CPU a token: before the loop runs, or on a thread.

    Raises:
        ConfigurationError: there is no token.
    """

    def __init__(self, tokens: Sequence[Token], *, instance: str, limits: ClientLimits | None = None) -> None:
        if not tokens:
            raise ConfigurationError("a seed source needs a token; start-up stops; make one with: warmseed token new")
        self._identities = tuple((server_name(token.key_id), client_context(token)) for token in tokens)
        self._key_ids = ", ".join(token.key_id for token in tokens)
        self._limits = limits or ClientLimits()
        self.instance = instance

    async def describe(self, peer: Endpoint, request: DescribeRequest) -> Description | None:
        """What `peer` has for exactly the artifact of `request`; `None` when it has nothing.

        Raises:
            PeerUnreachable: nobody there, too slow, or the connection was lost.
            PeerRejected: the two ends hold different tokens, or the peer is something else.
            PeerWarming: it is being made there; ask again after `retry_after`.
            PeerBusy: too many ask; ask again after `retry_after`.
            PeerRefused: not for us; `fields` names what differs, where that is the reason.
            SelfDialled: the address is our own.
            AnswerMismatch: the answer is about another artifact, rank or environment.
            ProtocolError: the answer is malformed.
        """
        async with self._exchange(peer, request) as (answer, reader, _):
            if isinstance(answer, MissAnswer):
                return None
            if not isinstance(answer, DescribeAnswer):
                raise ProtocolError(f"{peer} answered a description's question with {type(answer).__name__}")
            fields = answer.differences(request)
            if fields:
                raise AnswerMismatch(
                    f"{peer} answered for another artifact: {', '.join(fields)} differ from what was asked; not used",
                    fields=fields,
                )
            payload = await self._payload(peer, answer.length, reader)
            return Description(peer=peer, instance=answer.instance, manifest=answer.manifest, payload=payload)

    @asynccontextmanager
    async def fetch(
        self, peer: Endpoint, sha256: str, *, length: int, offset: int = 0
    ) -> AsyncIterator[AsyncIterator[bytes] | None]:
        """The bytes from `offset` to `length` of an object, in pieces as they come; `None` when it is not there.

        The caller hashes: only the digest of the whole says that the bytes are right. After a failure
        it may go on from where it stands, at this peer or another.

        Raises:
            AnswerMismatch: the peer's object has another length.
            PeerUnreachable: nobody there, too slow, or lost on the way (while iterating, too).
            ChannelError: everything else that `describe` raises.
        """
        request = FetchRequest(instance=self.instance, sha256=sha256, offset=offset)
        asked = {"sha256": sha256, "offset": offset, "length": length - offset}
        async with self._bytes(peer, request, FetchAnswer, asked, length - offset) as chunks:
            yield chunks

    @asynccontextmanager
    async def fetch_ranges(
        self, peer: Endpoint, sha256: str, ranges: Sequence[Range], *, length: int
    ) -> AsyncIterator[AsyncIterator[bytes] | None]:
        """The bytes of `ranges` of an object of `length` bytes, one after the other; else as `fetch`.

        Raises:
            AnswerMismatch: the peer's object has another length.
            PeerRefused: a range ends behind the object.
            PeerRejected: also when the peer is too old to know ranges; `fetch` is then what it answers.
            ValueError: the ranges overlap, or are not in order.
            ChannelError: everything else that `fetch` raises.
        """
        request = RangesRequest(instance=self.instance, sha256=sha256, ranges=tuple(ranges))
        asked = {"sha256": sha256, "length": length}
        expected = sum(wanted.length for wanted in ranges)
        async with self._bytes(peer, request, RangesAnswer, asked, expected) as chunks:
            yield chunks

    @asynccontextmanager
    async def _bytes(
        self,
        peer: Endpoint,
        request: FetchRequest | RangesRequest,
        form: type[FetchAnswer | RangesAnswer],
        asked: dict[str, object],
        length: int,
    ) -> AsyncIterator[AsyncIterator[bytes] | None]:
        """`length` bytes behind an answer of this `form`, if it says what was `asked`."""
        async with self._exchange(peer, request) as (answer, reader, writer):
            if isinstance(answer, MissAnswer):
                yield None
                return
            if not isinstance(answer, form):
                raise ProtocolError(f"{peer} answered a question for bytes with {type(answer).__name__}")
            fields = tuple(name for name, value in asked.items() if getattr(answer, name) != value)
            if fields:
                raise AnswerMismatch(
                    f"{peer} offers other bytes than those of {request.sha256}: {', '.join(fields)} differ; not used",
                    fields=fields,
                )
            bulk = BulkReader(reader, writer, size=self._limits.read_buffer)
            async with aclosing(self._chunks(peer, length, bulk)) as chunks:
                yield chunks

    @asynccontextmanager
    async def _exchange(
        self, peer: Endpoint, request: Request
    ) -> AsyncIterator[tuple[Answer, asyncio.StreamReader, asyncio.StreamWriter]]:
        answer, reader, writer = await self._answered(peer, request)
        try:
            yield answer, reader, writer
        finally:
            # Also says "I have everything": the source waits for our end of the connection to close.
            writer.transport.abort()

    async def _answered(
        self, peer: Endpoint, request: Request
    ) -> tuple[Answer, asyncio.StreamReader, asyncio.StreamWriter]:
        """The head of the answer, as the holder of the first token that the peer takes."""
        rejected: PeerRejected | None = None
        for name, context in self._identities:
            writer = None
            answer = None
            try:
                reader, writer = await self._connect(peer, name, context)
                answer = await self._ask(peer, request, reader, writer)
                return answer, reader, writer
            except PeerRejected as error:
                rejected = rejected or error  # the first token's reason is the one to act on
            finally:
                if writer is not None and answer is None:
                    writer.transport.abort()
        raise rejected or PeerRejected(f"{peer} can't be asked without a token")

    async def _connect(
        self, peer: Endpoint, name: str, context: ssl.SSLContext
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        wait = self._limits.reconnect_seconds
        for attempt in range(self._limits.reconnects + 1):
            try:
                return await self._handshake(peer, name, context)
            except _Dropped:
                if attempt == self._limits.reconnects:
                    raise
            await asyncio.sleep(wait * random.uniform(0.5, 1.5))  # noqa: S311 - spreads load, protects nothing
            wait *= 2
        raise PeerUnreachable(f"{peer} can't be reached: no attempt is allowed")

    async def _handshake(
        self, peer: Endpoint, name: str, context: ssl.SSLContext
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        sock = await self._dial(peer)
        seconds = self._limits.handshake_seconds
        try:
            async with asyncio.timeout(seconds):
                reader, writer = await secure(
                    sock, context, server_name=name, seconds=seconds * 2, read_buffer=self._limits.read_buffer
                )
        except TimeoutError:
            raise PeerUnreachable(f"{peer} did not finish the TLS handshake within {seconds:g} s") from None
        except ssl.SSLCertVerificationError:
            raise PeerRejected(
                f"{peer} does not hold our token (ours: {self._key_ids}); give both ends the same --seed-token-file"
            ) from None
        except ssl.SSLError as error:
            raise PeerRejected(f"{peer} is not a warmseed peer: {printable(error.reason)}") from None
        except OSError as error:
            raise _Dropped(f"{peer} closed the connection before the TLS handshake ended: {error}") from None
        try:
            check_alpn(writer.get_extra_info("ssl_object"))
        except PeerRejected:
            writer.transport.abort()
            raise
        return reader, writer

    async def _dial(self, peer: Endpoint) -> socket.socket:
        loop = asyncio.get_running_loop()
        failure: OSError | None = None
        try:
            async with asyncio.timeout(self._limits.connect_seconds):
                for family, address in await _addresses(peer):
                    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
                    try:
                        await loop.sock_connect(sock, address)
                    except OSError as error:
                        sock.close()
                        failure = error
                    except BaseException:
                        sock.close()
                        raise
                    else:
                        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        return sock
        except TimeoutError:
            raise PeerUnreachable(f"{peer} did not answer within {self._limits.connect_seconds:g} s") from None
        except OSError as error:
            raise PeerUnreachable(f"{peer} can't be resolved: {error}") from None
        raise PeerUnreachable(f"{peer} can't be reached: {failure.strerror if failure else 'it has no address'}")

    async def _ask(
        self, peer: Endpoint, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Answer:
        try:
            async with asyncio.timeout(self._limits.answer_seconds):
                writer.write(frame(encode(request), limit=REQUEST_BYTES))
                await writer.drain()
                body = await read_frame(reader, limit=ANSWER_BYTES)
        except TimeoutError:
            raise PeerUnreachable(f"{peer} did not answer within {self._limits.answer_seconds:g} s") from None
        except OSError as error:
            # A TLS 1.3 client believes the handshake done before the server has judged its certificate.
            reason = error.reason if isinstance(error, ssl.SSLError) else error
            raise PeerRejected(f"{peer} ended the connection instead of answering: {printable(reason)}") from None
        if body is None:
            raise PeerRejected(f"{peer} closed instead of answering: it rejects our certificate, or it went down")
        answer = decode_answer(body)
        _check_identity(peer, answer, self.instance)
        return answer

    async def _payload(self, peer: Endpoint, length: int, reader: asyncio.StreamReader) -> bytes:
        seconds = self._limits.transfer_seconds + length / self._limits.description_rate
        try:
            async with asyncio.timeout(seconds):
                return await reader.readexactly(length)
        except asyncio.IncompleteReadError as error:
            raise PeerUnreachable(f"{peer} was lost after {len(error.partial)} of {length} bytes") from None
        except TimeoutError:
            raise PeerUnreachable(f"{peer} sent {length} bytes too slowly: not within {seconds:g} s") from None
        except OSError as error:
            raise PeerUnreachable(f"{peer} was lost while it sent {length} bytes: {printable(error)}") from None

    async def _chunks(self, peer: Endpoint, length: int, bulk: BulkReader) -> AsyncGenerator[bytes, None]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limits.transfer_seconds + length / self._limits.stream_rate
        left = length
        while left:
            try:
                async with asyncio.timeout_at(deadline):
                    chunk = (await bulk.read())[:left]
            except TimeoutError:
                raise PeerUnreachable(f"{peer} sends too slowly: {left} of {length} bytes are missing") from None
            except OSError as error:
                raise PeerUnreachable(f"{peer} was lost {left} bytes before the end: {printable(error)}") from None
            if not chunk:
                raise PeerUnreachable(f"{peer} was lost {left} bytes before the end of {length}")
            left -= len(chunk)
            yield chunk


async def _addresses(peer: Endpoint) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    flags = 0
    with suppress(ValueError):
        if isinstance(ipaddress.ip_address(peer.host), ipaddress.IPv4Address):
            return [(socket.AF_INET, (peer.host, peer.port))]  # no thread and no resolver for what needs none
        flags = socket.AI_NUMERICHOST
    found = await asyncio.get_running_loop().getaddrinfo(peer.host, peer.port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, address) for family, _, _, _, address in found]


def _check_identity(peer: Endpoint, answer: Answer, instance: str) -> None:
    if answer.instance == instance or (isinstance(answer, RefusedAnswer) and answer.reason == "self"):
        raise SelfDialled(f"{peer} is this process itself; remove it from the seed sources")
    if isinstance(answer, WarmingAnswer):
        raise PeerWarming(f"{peer} is still making it", retry_after=answer.retry_after)
    if isinstance(answer, BusyAnswer):
        raise PeerBusy(f"{peer} is busy with other peers", retry_after=answer.retry_after)
    if isinstance(answer, RefusedAnswer):
        fields = tuple(printable(field, limit=64) for field in answer.fields)
        named = f" ({', '.join(fields)})" if fields else ""
        raise PeerRefused(f"{peer} refuses: {answer.reason}{named}", reason=answer.reason, fields=fields)
