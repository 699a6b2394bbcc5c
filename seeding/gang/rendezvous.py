"""Where the ranks of a group tell each other one small thing at a time, and learn together who is missing.

Rank 0 hosts it: one TCP connection a rank, kept for all rounds. A round ends for everybody the same way: with a
share of every rank, or with the names of those that did not speak in time or went away. No torch, no pickle;
both ends prove that they hold the group's secret, and every frame carries a MAC.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final, Protocol

from warmseed.errors import ConfigurationError, WarmseedError, printable
from warmseed.seeding.gang.wire import SHARE_BYTES, Hello, Share, Verdict, Welcome, Wire

__all__ = ["Alone", "Rendezvous", "RendezvousFailed", "TcpRendezvous"]

_log = logging.getLogger(__name__)

HANDSHAKE: Final = 5.0  # seconds for a stranger to prove that it is a rank
GRACE: Final = 3.0  # seconds that a rank waits for the host's word beyond its own deadline
SENDING: Final = 30.0  # seconds for a rank to read how a round ended
_HELLO_BYTES: Final = 4 << 10
_ROUNDS: Final = 64  # rounds remembered, so that a late rank still learns how one ended


class RendezvousFailed(WarmseedError):
    """A round did not complete for this rank. `missing` are the ranks that the host named.

    `decided` says whether that is the host's word, which every rank hears; otherwise the host itself was not
    heard, and other ranks may know more than this one.
    """

    def __init__(self, message: str, *, missing: tuple[int, ...] = (), decided: bool = False) -> None:
        super().__init__(message)
        self.missing = missing
        self.decided = decided


class Rendezvous(Protocol):
    """A group's way to tell each other something."""

    @property
    def rank(self) -> int:
        """Ours."""
        ...

    @property
    def world(self) -> int:
        """Ranks in the group."""
        ...

    async def exchange(self, name: str, share: bytes, *, timeout: float) -> Mapping[int, bytes]:
        """Every rank's share of the round `name`, ours included; the same mapping on every rank.

        Each rank takes part in each round at most once, with at most `SHARE_BYTES`.

        Raises:
            RendezvousFailed: if it did not complete within about `timeout` seconds.
        """
        ...


class Alone:
    """The rendezvous of a group of one."""

    rank = 0
    world = 1

    async def exchange(self, name: str, share: bytes, *, timeout: float) -> Mapping[int, bytes]:
        """Our own share."""
        del name, timeout
        return {0: share}


class _Round:
    """One round at the host."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.shares: dict[int, bytes] = {}
        self.ended: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()

    def end(self, verdict: Verdict) -> None:
        if not self.ended.done():
            self.ended.set_result(verdict)


class TcpRendezvous:
    """One rank's end of the exchange; rank 0's holds the listener too. Use it as ``async with``'s `opened`."""

    def __init__(self, *, rank: int, world: int, group: str, host: str, port: int, secret: bytes) -> None:
        self.rank, self.world = rank, world
        self._group, self._host, self._port = group, host, port
        self._key = hashlib.sha256(b"warmseed gang\0" + secret).digest()
        self._verdict_bytes = 4096 + world * (SHARE_BYTES * 4 // 3 + 16)
        self._rounds: dict[str, _Round] = {}
        self._gone: set[int] = set()
        self._members: dict[int, Wire] = {}
        self._wire: Wire | None = None
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers: dict[asyncio.Task[None], None] = {}  # not admitted yet, oldest first

    @classmethod
    @asynccontextmanager
    async def opened(
        cls,
        *,
        rank: int,
        world: int,
        group: str,
        host: str,
        port: int,
        secret: bytes = b"",
        listener: socket.socket | None = None,
    ) -> AsyncIterator[TcpRendezvous]:
        """The rendezvous of rank `rank` of `world`; rank 0 listens at `host` and `port`, or on `listener`.

        `group` names what meets here, such as ``target/0``; ranks of another group are turned away.

        Raises:
            ConfigurationError: without a secret anywhere but on loopback, or when rank 0 can't listen.
        """
        if not secret and not _is_loopback(host):
            raise ConfigurationError(
                f"the ranks of {group} would meet at {host} without a secret; give every node the same --seed-token"
            )
        meeting = cls(rank=rank, world=world, group=group, host=host, port=port, secret=secret)
        async with AsyncExitStack() as stack:
            if rank == 0:
                await stack.enter_async_context(meeting._listening(listener))
            stack.callback(meeting._hang_up)
            yield meeting

    async def exchange(self, name: str, share: bytes, *, timeout: float) -> Mapping[int, bytes]:
        """See `Rendezvous.exchange`."""
        if len(share) > SHARE_BYTES:
            raise RendezvousFailed(f"round {name}: a share of {len(share)} bytes is over the limit of {SHARE_BYTES}")
        async with self._turn:
            verdict = await (self._as_host if self.rank == 0 else self._as_member)(name, share, timeout)
        if not verdict.shares:
            raise RendezvousFailed(f"round {name}: {verdict.reason}", missing=verdict.missing, decided=True)
        return dict(enumerate(verdict.shares))

    # Rank 0 ------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _listening(self, listener: socket.socket | None) -> AsyncIterator[None]:
        try:
            server = await asyncio.start_server(
                self._accept,
                **({"sock": listener} if listener is not None else {"host": self._host, "port": self._port}),
                limit=_HELLO_BYTES + SHARE_BYTES * 2,
                backlog=min(4096, self.world + 16),
            )
        except OSError as error:
            raise ConfigurationError(
                f"rank 0 of {self._group} can't listen at {self._host}:{self._port}: {error}"
            ) from error
        try:
            yield
        finally:
            server.close()
            for task in tuple(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _left(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._strangers.pop(task, None)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._left)
            self._strangers[task] = None
        wire = Wire(reader, writer, self._key, host=True)
        rank: int | None = None
        try:
            if len(self._tasks) > 2 * self.world + 16:
                # Whoever has been silent for longest makes room: a rank proves itself within milliseconds.
                next(iter(self._strangers)).cancel()
            async with asyncio.timeout(HANDSHAKE):
                rank = await self._admit(wire, writer)
            if task is not None:
                self._strangers.pop(task, None)
            if rank is not None:
                await self._serve(rank, wire)
        except (OSError, EOFError, TimeoutError, WarmseedError) as error:
            _log.info("group=%s rank=%s left the rendezvous: %s", self._group, rank, printable(error) or "it closed")
        finally:
            if rank is not None and self._members.get(rank) is wire:
                del self._members[rank]
                self._lost(rank)
            wire.close()

    async def _admit(self, wire: Wire, writer: asyncio.StreamWriter) -> int | None:
        nonce = secrets.token_hex(16)
        writer.write(nonce.encode())
        await writer.drain()
        hello = await wire.receive(Hello, limit=_HELLO_BYTES)
        wire.rekey(nonce.encode(), hello.nonce.encode())
        refused = ""
        if (hello.group, hello.world) != (self._group, self.world):
            refused = f"this is {self._group} of {self.world} ranks"
        elif not 0 < hello.rank < self.world:
            refused = f"{self._group} has no rank {hello.rank} to admit"
        elif hello.rank in self._members:
            refused = f"rank {hello.rank} of {self._group} is here already"
        await wire.send(Welcome(refused))
        if refused:
            _log.warning("turned a rank away: %s", refused)
            return None
        self._members[hello.rank] = wire
        self._gone.discard(hello.rank)
        return hello.rank

    async def _serve(self, rank: int, wire: Wire) -> None:
        """Rounds of one rank. Its hanging up is heard at once, also while it waits for the others."""
        heard = asyncio.create_task(wire.receive(Share, limit=_HELLO_BYTES + SHARE_BYTES * 2))
        try:
            while True:
                message = await heard
                heard = asyncio.create_task(wire.receive(Share, limit=_HELLO_BYTES + SHARE_BYTES * 2))
                meeting = self._round(message.name)
                if not meeting.ended.done():
                    meeting.shares[rank] = message.share
                    self._complete(meeting)
                either: set[asyncio.Future[Verdict] | asyncio.Task[Share]] = {meeting.ended, heard}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if not meeting.ended.done():
                    await heard  # it hung up, or spoke out of turn
                    raise WarmseedError(f"rank {rank} spoke twice in one round; the connection is closed")
                async with asyncio.timeout(SENDING):
                    await wire.send(meeting.ended.result())
        finally:
            heard.cancel()
            await asyncio.gather(heard, return_exceptions=True)

    async def _as_host(self, name: str, share: bytes, timeout: float) -> Verdict:
        meeting = self._round(name)
        meeting.shares[0] = share
        if self._gone:
            self._fail(meeting, "went away")
        self._complete(meeting)
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.shield(meeting.ended)
        except TimeoutError:
            self._fail(meeting, f"did not speak within {timeout:g} s")
        return meeting.ended.result()

    def _round(self, name: str) -> _Round:
        if name not in self._rounds:
            while len(self._rounds) >= _ROUNDS:
                del self._rounds[next(iter(self._rounds))]
            self._rounds[name] = _Round(name)
        return self._rounds[name]

    def _complete(self, meeting: _Round) -> None:
        if len(meeting.shares) == self.world:
            meeting.end(Verdict(meeting.name, tuple(meeting.shares[rank] for rank in range(self.world))))

    def _fail(self, meeting: _Round, how: str) -> None:
        missing = tuple(rank for rank in range(self.world) if rank not in meeting.shares)
        named = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
        meeting.end(Verdict(meeting.name, (), missing[:1024], f"rank {named} {how}"))

    def _lost(self, rank: int) -> None:
        """A rank that hung up is out of every round that has not ended; the others need not wait for it."""
        self._gone.add(rank)
        for meeting in self._rounds.values():
            if not meeting.ended.done():
                meeting.shares.pop(rank, None)
                if 0 in meeting.shares:  # otherwise the host has not come to this round yet, and will find out
                    self._fail(meeting, "went away")

    # The others ----------------------------------------------------------------------------------------

    async def _as_member(self, name: str, share: bytes, timeout: float) -> Verdict:
        try:
            async with asyncio.timeout(timeout + GRACE):
                wire = await self._connected()
                await wire.send(Share(name, share))
                verdict = await wire.receive(Verdict, limit=self._verdict_bytes)
        except TimeoutError:
            self._hang_up()
            raise RendezvousFailed(f"round {name}: no word from rank 0 within {timeout + GRACE:g} s") from None
        except (OSError, EOFError, WarmseedError) as error:
            self._hang_up()
            if isinstance(error, RendezvousFailed):
                raise
            raise RendezvousFailed(f"round {name}: rank 0 is gone: {printable(error) or 'it closed'}") from error
        except BaseException:
            self._hang_up()  # half an exchange can't be continued
            raise
        if verdict.name != name or len(verdict.shares) not in (0, self.world):
            self._hang_up()
            raise RendezvousFailed(f"round {name}: rank 0 answered another question")
        return verdict

    async def _connected(self) -> Wire:
        if self._wire is not None:
            return self._wire
        pause = 0.02
        while True:
            try:
                reader, writer = await asyncio.open_connection(self._host, self._port, limit=self._verdict_bytes)
                break
            except OSError:  # rank 0 is still starting; the round's deadline ends this
                await asyncio.sleep(pause)
                pause = min(pause * 1.5, 0.5)
        wire = Wire(reader, writer, self._key, host=False)
        try:
            theirs = await reader.readexactly(32)
            ours = secrets.token_hex(16)
            await wire.send(Hello(self._group, self.rank, self.world, ours))
            wire.rekey(theirs, ours.encode())
            welcome = await wire.receive(Welcome, limit=_HELLO_BYTES)
        except BaseException:
            wire.close()
            raise
        if welcome.refused:
            wire.close()
            raise RendezvousFailed(f"rank 0 does not admit rank {self.rank}: {printable(welcome.refused)}")
        self._wire = wire
        return wire

    def _hang_up(self) -> None:
        if self._wire is not None:
            with contextlib.suppress(OSError, RuntimeError):
                self._wire.close()
            self._wire = None


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False
