"""The listening end: admits, authenticates, asks the source, answers. One request a connection."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass

from warmseed.errors import ConfigurationError, printable
from warmseed.seeding.channel.errors import PeerRejected, ProtocolError
from warmseed.seeding.channel.fair import FairQueue, QueueFull
from warmseed.seeding.channel.frames import REQUEST_BYTES, read_frame
from warmseed.seeding.channel.limits import ServerLimits
from warmseed.seeding.channel.lobby import Lobby, owner_of
from warmseed.seeding.channel.logs import Throttled
from warmseed.seeding.channel.messages import decode_request
from warmseed.seeding.channel.replies import Replies
from warmseed.seeding.channel.source import SeedSource
from warmseed.seeding.channel.streams import secure
from warmseed.seeding.channel.tls import check_alpn, server_context
from warmseed.seeding.trust.token import Token

__all__ = ["SeedServer", "ServerStats"]

logger = logging.getLogger(__name__)

_BACKLOG = 1024
_JANITOR_SECONDS = 0.25
_ACCEPT_RETRY_SECONDS = 0.05


@dataclass(slots=True)
class ServerStats:
    """Counts since the start, for metrics."""

    accepted: int = 0
    turned_away: int = 0  # by full queues, before the handshake
    rejected: int = 0  # by TLS: no token, another token, no TLS 1.3
    evicted_handshakes: int = 0  # took long while others waited
    malformed: int = 0  # holders of the token that broke the protocol
    failed: int = 0  # the connection was lost, or the peer too slow
    sessions_peak: int = 0


class SeedServer:
    """Serves one `SeedSource` to the holders of the tokens, on one address and port.

    `instance` names this process: 64 hex digits, the same that its `SeedClient` uses. Making one derives
    keys, for about 0.1 s of CPU a token: before the loop runs, or on a thread.

    Raises:
        ConfigurationError: there is no token.
    """

    def __init__(
        self,
        source: SeedSource,
        tokens: Sequence[Token],
        *,
        host: str,
        port: int,
        instance: str,
        limits: ServerLimits | None = None,
    ) -> None:
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._limits = limits = (limits or ServerLimits()).within(descriptors)
        self._host = host
        self._port = port
        self._context = server_context(tokens)
        self._replies = Replies(source, instance=instance, limits=limits)
        self._turns = FairQueue(
            limits.handshakes,
            places_per_owner=limits.handshakes_per_address,
            waiting=limits.queue,
            waiting_per_owner=limits.queue_per_address,
        )
        self._seats = FairQueue(limits.sessions)
        self._shaking: OrderedDict[asyncio.Timeout, float] = OrderedDict()  # by age; value: when it began
        self._log = Throttled(logger)
        self._key_ids = ", ".join(token.key_id for token in tokens)
        self.stats = ServerStats()
        self.lobby: Lobby | None = None  # while it listens
        self.addresses: tuple[tuple[str, int], ...] = ()  # where it listens, once `listening` has begun

    def counters(self) -> dict[str, int]:
        """Every count since the start, and what is held now, by stable names; for metrics."""
        lobby, turns, seats = self.lobby, self._turns, self._seats
        silent = {"silent": len(lobby), "evicted": lobby.evicted, "expired": lobby.expired} if lobby else {}
        held = {"queued": turns.waiting, "handshakes": turns.held, "sessions": seats.held}
        return asdict(self.stats) | asdict(self._replies.stats) | silent | held

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[SeedServer]:
        """This server, accepting peers for the length of the block.

        Raises:
            ConfigurationError: the address can't be bound.
        """
        listeners = await self._bind()
        self.addresses = tuple(listener.getsockname()[:2] for listener in listeners)
        # No TaskGroup around the caller's block: it would wrap what the block raises.
        running = asyncio.create_task(self._run(listeners))
        running.add_done_callback(_report)
        try:
            yield self
        finally:
            running.cancel()
            try:
                await asyncio.wait([running])
            finally:
                for listener in listeners:
                    listener.close()

    async def _run(self, listeners: list[socket.socket]) -> None:
        async with asyncio.TaskGroup() as group:
            lobby = Lobby(self._limits, lambda sock, owner: self._arrived(group, sock, owner))
            self.lobby = lobby
            try:
                for listener in listeners:
                    group.create_task(self._accept(listener, lobby))
                await self._janitor()
            finally:
                lobby.close()

    async def _bind(self) -> list[socket.socket]:
        loop = asyncio.get_running_loop()
        where = f"{self._host}:{self._port}"
        try:
            found = await loop.getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
            )
        except OSError as error:
            raise ConfigurationError(
                f"the seed listener's address {where} is unknown: {error}; start-up stops"
            ) from error
        listeners: list[socket.socket] = []
        try:
            for family, _, _, _, address in dict.fromkeys(found):
                listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
                listeners.append(listener)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listener.bind(address)
                listener.listen(_BACKLOG)
        except OSError as error:
            for listener in listeners:
                listener.close()
            raise ConfigurationError(
                f"the seed listener can't bind {where}: {error.strerror}; start-up stops; "
                "choose another --seed-listen-port, or stop what holds this one"
            ) from error
        return listeners

    async def _accept(self, listener: socket.socket, lobby: Lobby) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                lobby.add(sock, owner_of(address[0]))
            except OSError as error:
                # Out of descriptors or memory, or a peer that left already. A silent stranger makes room.
                self._log.warning("accept", "a seed connection could not be accepted: %s", error.strerror)
                if not lobby.make_room():
                    await asyncio.sleep(_ACCEPT_RETRY_SECONDS)
                continue
            self.stats.accepted += 1
            await asyncio.sleep(0)  # a flood of connections must not keep the others from going on

    def _arrived(self, group: asyncio.TaskGroup, sock: socket.socket, owner: str) -> None:
        task = group.create_task(self._guarded(sock, owner))
        # Also when the task is cancelled before its first line. Whatever else uses it has let go by then.
        task.add_done_callback(lambda _: sock.close())

    async def _guarded(self, sock: socket.socket, owner: str) -> None:
        try:
            await self._visit(sock, owner)
        except Exception:
            # One peer that meets a bug of ours must not end the listener for all others.
            self.stats.failed += 1
            logger.exception("a seed exchange with %s failed", owner)

    async def _visit(self, sock: socket.socket, owner: str) -> None:
        limits = self._limits
        try:
            async with asyncio.timeout(limits.queue_seconds):
                await self._turns.acquire(owner)
        except (QueueFull, TimeoutError):
            self.stats.turned_away += 1
            self._log.warning("full", "the seed listener is full; a connection from %s was turned away", owner)
            return
        seated = None
        try:
            admitted = await self._authenticate(sock, owner)
            if admitted is not None:
                seated = await self._seat(*admitted, owner)
        finally:
            self._turns.release(owner)
        if seated is None:
            return
        reader, writer = seated
        try:
            await self._session(reader, writer, owner)
        finally:
            # The peer closes first, after it has read everything; whatever is left is of no use to anyone.
            writer.transport.abort()
            self._seats.release(owner)

    async def _authenticate(
        self, sock: socket.socket, owner: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """A proven holder of the token; `None` and everything closed for anybody else."""
        loop = asyncio.get_running_loop()
        writer: asyncio.StreamWriter | None = None
        proven = False
        try:
            async with asyncio.timeout(self._limits.handshake_seconds) as deadline:
                self._shaking[deadline] = loop.time()
                try:
                    reader, writer = await secure(
                        sock,
                        self._context,
                        server_name=None,
                        seconds=self._limits.handshake_seconds,
                        read_buffer=REQUEST_BYTES,
                    )
                finally:
                    del self._shaking[deadline]
            check_alpn(writer.get_extra_info("ssl_object"))
            writer.transport.set_write_buffer_limits(high=self._limits.write_buffer)
            proven = True
            return reader, writer
        except TimeoutError:
            self.stats.rejected += 1
            self._log.warning("slow", "a peer at %s did not finish its handshake in time", owner)
        except (PeerRejected, OSError) as error:  # ssl.SSLError is an OSError
            self.stats.rejected += 1
            self._log.warning(
                "rejected",
                "a peer at %s did not prove that it holds a token (ours: %s): %s",
                owner,
                self._key_ids,
                printable(error.reason if isinstance(error, ssl.SSLError) else error) or "connection lost",
            )
        finally:
            if writer is not None and not proven:
                writer.transport.abort()
        return None

    async def _seat(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, owner: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """The same, with a seat; `None` when none came free, and the peer has been told to come again."""
        seated = False
        try:
            async with asyncio.timeout(self._limits.queue_seconds):
                await self._seats.acquire(owner)
            seated = True
            self.stats.sessions_peak = max(self.stats.sessions_peak, self._seats.held)
            return reader, writer
        except TimeoutError:
            self.stats.turned_away += 1
            with suppress(TimeoutError, OSError, ProtocolError):
                await self._replies.turn_away(reader, writer)
            return None
        finally:
            if not seated:
                writer.transport.abort()

    async def _session(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, owner: str) -> None:
        try:
            async with asyncio.timeout(self._limits.request_seconds):
                body = await read_frame(reader, limit=REQUEST_BYTES)
            if body is None:
                return
            await self._replies.answer(decode_request(body), reader, writer, owner)
        except ProtocolError as error:
            self.stats.malformed += 1
            self._log.warning("malformed", "a holder of the token at %s broke the protocol: %s", owner, error)
        except (TimeoutError, OSError) as error:
            self.stats.failed += 1
            self._log.warning("failed", "the exchange with %s ended early: %s", owner, printable(error) or "too slow")

    async def _janitor(self) -> None:
        """Take the place of handshakes that dawdle while others wait for one."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_JANITOR_SECONDS)
            wanted = self._turns.waiting
            now = loop.time()
            for deadline, began in list(self._shaking.items())[:wanted]:
                if now - began < self._limits.handshake_grace:
                    break
                with suppress(RuntimeError):  # it ended in this very moment
                    deadline.reschedule(now)
                    self.stats.evicted_handshakes += 1


def _report(running: asyncio.Task[None]) -> None:
    if not running.cancelled() and running.exception() is not None:
        logger.error("the seed listener ended; this node no longer serves peers", exc_info=running.exception())
