"""The daemon's end: many engines at once, a deadline for each exchange, and a lease for whoever maps the weights."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from warmseed.blocking import run_blocking
from warmseed.daemon.weights import frames
from warmseed.daemon.weights.errors import MessageRefused, WeightCacheError
from warmseed.daemon.weights.export import Exported
from warmseed.daemon.weights.fingerprint import Fingerprint
from warmseed.daemon.weights.messages import (
    Answer,
    Done,
    Farewell,
    GetMemory,
    GetState,
    Memory,
    Refusal,
    Release,
    Released,
    Report,
    Request,
    Watching,
)
from warmseed.daemon.weights.socket import BoundSocket, DeviceLock, Peer, SocketAddress, bind_private, check_peer
from warmseed.daemon.weights.witness import Witness
from warmseed.errors import ConfigurationError, printable

__all__ = ["Lease", "ServerLimits", "WeightServer"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """How long and how much one client may take."""

    exchange_s: float = 10.0  # seconds from the start of a request to the end of its answer
    state_s: float = 60.0  # seconds to send the weights' description to an engine that reads slowly
    connections: int = 256  # open at once, watching engines included
    report_s: float = 30.0  # seconds the callback may take over a report


@dataclass(slots=True)
class Lease:
    """One engine's hold on the weights, for as long as its connection is open."""

    pid: int
    since: float = field(default_factory=time.monotonic)  # of time.monotonic()
    watched: bool = False  # the engine has said that it maps them
    witness: Witness = field(init=False)

    def __post_init__(self) -> None:
        self.witness = Witness(self.pid)


class OnDetached(Protocol):
    """Hears that an engine's lease has ended, however it ended."""

    def __call__(self, lease: Lease, /) -> Awaitable[None]: ...


class OnReport(Protocol):
    """Takes an engine's evidence; may be a coroutine function."""

    def __call__(self, report: Report, /) -> Awaitable[None] | None: ...


class _Connection:
    __slots__ = ("lease", "peer", "socket", "watching")

    def __init__(self, connection: socket.socket, peer: Peer) -> None:
        self.socket = connection
        self.peer = peer
        self.lease: Lease | None = None
        self.watching = False


class WeightServer:
    """Serves one rank's exported weights, at one address or several, to engines of the same user."""

    def __init__(
        self,
        exported: Exported,
        fingerprint: Fingerprint,
        address: SocketAddress,
        *,
        on_report: OnReport | None = None,
        on_detached: OnDetached | None = None,
        on_changed: Callable[[tuple[str, ...]], None] | None = None,
        limits: ServerLimits | None = None,
    ) -> None:
        self.exported = exported
        self.fingerprint = fingerprint
        self.address = address
        self.limits = limits or ServerLimits()
        self.released = asyncio.Event()  # set once the weights are freed, on an engine's request
        self.changed: tuple[str, ...] = ()  # tensors an engine has written to; nothing is served from then on
        self._on_report = on_report
        self._on_detached = on_detached
        self._on_changed = on_changed
        self.device_uuid = _device(exported, address)
        self._state = frames.encode(exported.state(self.device_uuid))
        self._connections: set[_Connection] = set()
        self._release_when_free = False
        self._unchecked = False  # an engine that could have written has gone since the last look
        self._checking = asyncio.Lock()

    @property
    def leases(self) -> tuple[Lease, ...]:
        """The engines that map the weights now."""
        return tuple(c.lease for c in self._connections if c.lease is not None)

    def memory(self) -> Memory:
        """What is held and by how many engines it is mapped."""
        return self.exported.memory(len(self.leases), self.device_uuid)

    @asynccontextmanager
    async def serving(
        self, address: SocketAddress | None = None, *, lock: DeviceLock | None = None
    ) -> AsyncIterator[None]:
        """Listen at `address` (default: the server's own) until the block ends; engines may attach from its first line.

        Leaving the block ends every lease, and returns when `on_detached` has been heard for each.

        `lock` is the address's lock, held by whoever took it before the slow load; without one it is taken here.

        Raises:
            ConfigurationError: another daemon owns the address, or something is in the way there.
        """
        where = address or self.address
        own = lock or DeviceLock(where)
        if own.address != where:
            raise ConfigurationError(f"the lock of {own.address} does not cover {where}")
        await run_blocking(own.acquire)
        try:
            bound = await run_blocking(bind_private, own)
            try:
                async with asyncio.TaskGroup() as tasks:
                    accepting = tasks.create_task(self._accept(bound, tasks))
                    logger.info("weights ready socket=%s bytes=%d", where, self.exported.nbytes)
                    try:
                        yield
                    finally:
                        await run_blocking(bound.unpublish)
                        await self._farewell()
                        accepting.cancel()
            finally:
                await run_blocking(bound.withdraw)
        finally:
            if lock is None:
                own.release()

    async def _farewell(self) -> None:
        for connection in tuple(self._connections):
            if connection.watching:
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(1.0):
                        await frames.asend(connection.socket, Farewell())

    async def _accept(self, bound: BoundSocket, tasks: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        talking: set[asyncio.Task[None]] = set()
        try:
            while True:
                try:
                    accepted, _ = await loop.sock_accept(bound.listener)
                except OSError as error:  # EMFILE, ENFILE: wait for descriptors instead of spinning
                    logger.warning("weights: accepting a connection failed (%s); retried in 1 s", error)
                    await asyncio.sleep(1.0)
                    continue
                talk = tasks.create_task(self._talk(accepted, talking))
                talking.add(talk)
                talk.add_done_callback(talking.discard)
        finally:
            for talk in talking:
                talk.cancel()

    async def _talk(self, accepted: socket.socket, talking: set[asyncio.Task[None]]) -> None:
        with accepted:
            accepted.setblocking(False)
            try:
                connection = _Connection(accepted, check_peer(accepted))
            except WeightCacheError as error:
                logger.warning("weights: connection refused: %s", error)
                return
            if len(self._connections) >= self.limits.connections:
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(1.0):
                        await frames.asend(accepted, Refusal(reason="busy", message="too many connections"))
                return
            self._connections.add(connection)
            try:
                while await self._exchange(connection):
                    pass
            except (OSError, TimeoutError) as error:  # vanished, or silent for too long
                logger.info("weights: client pid=%d dropped: %r", connection.peer.pid, error)
            except MessageRefused as error:
                logger.warning("weights: %s", error)
                await self._last_word(connection, error)
            except Exception:  # a fault of ours costs one engine its connection, not all of them the weights
                logger.exception("weights: serving client pid=%d failed", connection.peer.pid)
            finally:
                self._connections.discard(connection)
                # Serving ends once the lease has ended, and not in the middle of what its end brings about.
                talking.difference_update({asyncio.current_task()})
                if connection.lease is not None:
                    with contextlib.closing(connection.lease.witness):
                        await self._lease_ended(connection.lease)

    async def _last_word(self, connection: _Connection, error: MessageRefused) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                await frames.asend(connection.socket, Refusal(reason="error", message=printable(error, limit=1000)))

    async def _exchange(self, connection: _Connection) -> bool:
        """One request and its answer; whether another may follow."""
        who = f"client pid={connection.peer.pid}"
        # Only a watching client may be silent: between its requests it serves traffic for weeks.
        async with asyncio.timeout(None if connection.watching else self.limits.exchange_s):
            request = await frames.aread(connection.socket, Request, limit=frames.REQUEST_LIMIT, who=who)
        if request is None:
            return False
        if isinstance(request, GetState):
            await self._give_state(connection, request)
        else:
            answer = await self._answer(connection, request)
            async with asyncio.timeout(self.limits.exchange_s):
                await frames.asend(connection.socket, answer)
        return True

    async def _answer(self, connection: _Connection, request: Request) -> Answer:
        if isinstance(request, GetMemory):
            return self.memory()
        if isinstance(request, Release):
            return await self._release(request, connection)
        if isinstance(request, Report):
            return await self._take_report(request)
        connection.watching = True
        if connection.lease is not None:
            connection.lease.watched = True
        return Watching(os.getpid())

    # The weights --------------------------------------------------------------------------------

    async def _give_state(self, connection: _Connection, request: GetState) -> None:
        refusal = await self._refusal(request)
        async with asyncio.timeout(self.limits.state_s):
            if refusal is not None:
                logger.info("weights refused pid=%d reason=%s fields=%s", request.pid, refusal.reason, refusal.fields)
                await frames.asend(connection.socket, refusal)
                return
            # The lease comes first: between these lines and the engine's map, nobody may free the memory.
            connection.lease = connection.lease or Lease(connection.peer.pid)
            await frames.asend(connection.socket, self._state)
            await frames.asend_descriptors(connection.socket, self.exported.descriptors)
        logger.info("weights given pid=%d bytes=%d", connection.peer.pid, self.exported.nbytes)

    async def _refusal(self, request: GetState) -> Refusal | None:
        if self.exported.released or self._release_when_free:
            return Refusal(
                reason="released", message="the daemon has released its weights; restart it to load them again"
            )
        if request.device_uuid != self.device_uuid:
            return Refusal(
                reason="wrong_gpu",
                message=f"this daemon holds the shard of device {self.device_uuid}, not {request.device_uuid}",
            )
        differences = self.fingerprint.differences(request.fingerprint)
        names = tuple(difference.field for difference in differences)
        theirs, ours = request.fingerprint.checkpoint, self.fingerprint.checkpoint
        if names == ("checkpoint",) and theirs.mode != ours.mode and ours.mode != "stat" and ours.mode != "sketch":
            return Refusal(
                reason="need_digest",
                message="other files: send their digest",
                fields=names,
                digest_mode=ours.mode,
                sketch=ours.sketch,
            )
        if differences:
            text = "; ".join(str(difference) for difference in differences)
            return Refusal(reason="mismatch", message=printable(text, limit=4000), fields=names)
        await self._look_for_changes()
        if self.changed:
            return Refusal(
                reason="error",
                message=f"an engine has changed the weights in place ({', '.join(self.changed[:8])}); restart it",
            )
        return None

    async def _release(self, request: Release, connection: _Connection) -> Released:
        others = len(self.leases) - (connection.lease is not None)
        if others and not self.exported.released:
            if request.defer:
                self._release_when_free = True
                return Released("deferred", others)
            logger.warning(
                "weights: pid=%d asked for their release, but %d engines map them", connection.peer.pid, others
            )
            return Released("in_use", others)
        await self._free()
        return Released("released")

    async def _free(self) -> None:
        self._release_when_free = False
        if not self.exported.released:
            self.exported.released = True  # before the first await: no lease may begin now
            freed = self.exported.nbytes
            async with self._checking:  # nobody frees what is just being read
                await run_blocking(self.exported.release)
            logger.info("weights released bytes=%d", freed)
        self.released.set()

    async def _lease_ended(self, lease: Lease) -> None:
        logger.info("weights lease ended pid=%d after=%.1fs", lease.pid, time.monotonic() - lease.since)
        if self._on_detached is not None:
            await self._on_detached(lease)
        if self.exported.released:
            return
        if self._release_when_free and not self.leases:
            await self._free()
        elif self.exported.writable:
            self._unchecked = True
            await self._look_for_changes()

    async def _look_for_changes(self) -> None:
        """Compare the weights with what was exported, if an engine has gone since the last time.

        Once a departure and not once an attach: it reads every byte, which takes longer than to map them.
        """
        async with self._checking:
            if not self._unchecked or self.exported.released:
                return
            self._unchecked = False
            try:
                found = await run_blocking(self.exported.changed_tensors)
            except RuntimeError:  # torch's and the driver's; what can't be read is not to be served
                logger.exception("weights: they can't be compared with what was loaded")
                found = tuple(tensor.name for tensor in self.exported.tensors)
        if found and found != self.changed:
            self.changed = found
            logger.error(
                "weights: an engine has changed %d tensors in place (%s first); restart the daemon",
                len(found),
                found[0],
            )
            if self._on_changed:
                self._on_changed(found)

    async def _take_report(self, report: Report) -> Answer:
        if self._on_report is None:
            return Refusal(reason="error", message="this daemon takes no reports")
        try:
            async with asyncio.timeout(self.limits.report_s):
                outcome = self._on_report(report)
                if inspect.isawaitable(outcome):
                    await outcome
        except Exception as error:  # the callback is the rank's; an engine's report must not stop the daemon
            logger.exception("weights: a report could not be processed")
            return Refusal(reason="error", message=f"report not processed: {type(error).__name__}")
        return Done()


def _device(exported: Exported, address: SocketAddress) -> str:
    """The device the weights are on; CPU ranks of one node are told apart by the address alone."""
    if exported.device_uuid.startswith("cpu") and address.device_uuid.startswith("cpu"):
        return address.device_uuid
    if address.device_uuid not in ("", exported.device_uuid):
        raise ConfigurationError(
            f"{address} is the socket of device {address.device_uuid}, the weights are on {exported.device_uuid}"
        )
    return exported.device_uuid
