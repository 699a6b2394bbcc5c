"""The parent of a node's ranks: starts one process per local rank and group, watches, stops and reaps them.

All or nothing: the node is ready when every rank serves, and a rank that exits, whenever and however, takes the
others with it. The engine's restart is cheap; half a replica is not a state that anyone can use.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final

from warmseed.daemon.launcher.board import Board, RankState
from warmseed.daemon.launcher.child_rank import ChildRank
from warmseed.daemon.launcher.guardian import kill_strays
from warmseed.daemon.launcher.notify import Notifier
from warmseed.daemon.launcher.processes import (
    RANK_COMMAND,
    Guardian,
    ensure_standard_files,
    exit_code,
    reap_orphans,
    stop_all,
)
from warmseed.daemon.launcher.rehearsal import all_arrived, rehearse
from warmseed.daemon.logs import event
from warmseed.daemon.pages import http
from warmseed.daemon.pages.metrics import Exposition
from warmseed.daemon.pages.status import status_page, status_record
from warmseed.daemon.placement import Group, Layout, Role, groups_of, layout_of, places_of
from warmseed.daemon.protocol import rendezvous
from warmseed.daemon.protocol.spec import RankSpec, rank_spec
from warmseed.daemon.protocol.status import (
    Begin,
    Phase,
    Rehearsal,
    Rehearsed,
    Serving,
    StatusLineInvalid,
    decode_message,
)
from warmseed.daemon.settings.config import PreloadConfig
from warmseed.errors import ConfigurationError, printable
from warmseed.seeding.channel.endpoint import Endpoint

__all__ = ["STOP_GRACE", "Ending", "launch"]

STOP_GRACE: Final = 10.0  # seconds from SIGTERM to SIGKILL
_LAST_WORDS: Final = 0.5  # seconds to read what exited ranks left in their pipes
_ORPHANS: Final = 1.0  # seconds between two reapings, where there is something to reap
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a launch ends, and with which exit code."""

    code: int
    reason: str
    rank: str | None = None  # the rank that caused it


async def launch(
    config: PreloadConfig,
    *,
    rank_command: Sequence[str] = RANK_COMMAND,
    on_ready: Callable[[Board], None] | None = None,
    notifier: Notifier | None = None,
) -> int:
    """Start this node's ranks, serve until something ends it, leave nothing behind; the exit code.

    The code is 2 for a configuration that can't work, 130 and 143 for SIGINT and SIGTERM (129 for SIGHUP),
    a failing rank's own code, 128 + the signal's number if a signal ended it, and 1 for a rank that exited
    cleanly or for ranks that were not ready within ``start_deadline``.

    `rank_command` is the program of one rank; ``--spec-fd N --status-fd M`` is added to it. `on_ready` is
    called once, when the last rank serves. Must run on the main thread: signals and the parent death signal
    belong to it.
    """
    launcher = _Launcher(config, rank_command, on_ready, notifier or Notifier())
    try:
        ending = await launcher.run()
    except ConfigurationError as error:
        _log.error("%s", error)
        return 2
    level = logging.INFO if ending.code in (129, 130, 143) else logging.ERROR
    event(_log, level, "stopped", code=ending.code, rank=ending.rank, reason=ending.reason)
    return ending.code


class _Launcher:
    def __init__(
        self,
        config: PreloadConfig,
        rank_command: Sequence[str],
        on_ready: Callable[[Board], None] | None,
        notifier: Notifier,
    ) -> None:
        self._config = config
        self._command = tuple(rank_command)
        self._on_ready = on_ready
        self._notifier = notifier
        self._board = Board()
        self._ranks: list[ChildRank] = []
        self._launch_id = secrets.token_hex(16)
        self._end: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self._hurry = asyncio.Event()  # a second signal: no more patience
        self._arrived = asyncio.Event()  # every rank is at the rehearsal
        self._rehearsal: asyncio.Task[None] | None = None

    async def run(self) -> Ending:
        ensure_standard_files()
        layout = layout_of(self._config)
        groups = groups_of(self._config, layout)
        with self._signals():
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(self._http())
                guardian = Guardian(self._launch_id)
                stack.push_async_callback(guardian.stop)
                listeners = {group.role: self._listen(group, layout, stack) for group in groups}
                try:
                    await self._start_all(layout, groups, listeners)
                    for listener in filter(None, listeners.values()):
                        listener.close()  # global rank 0 has it now
                    return await self._watch()
                finally:
                    await self._stop()
                    for rank in self._ranks:
                        rank.close()

    # Starting ----------------------------------------------------------------------------------

    def _listen(self, group: Group, layout: Layout, stack: AsyncExitStack) -> socket.socket | None:
        if not layout.is_master:
            return None
        flag = "--weight-cache-master-port" if group.role == "target" else "--weight-cache-draft-master-port"
        return stack.enter_context(contextlib.closing(rendezvous.listen(layout.master_host, group.port, flag=flag)))

    async def _start_all(
        self, layout: Layout, groups: Sequence[Group], listeners: Mapping[Role, socket.socket | None]
    ) -> None:
        event(
            _log,
            logging.INFO,
            "starting",
            ranks=layout.local_size * len(groups),
            groups=",".join(group.role for group in groups),
            world_size=layout.world_size,
            first_rank=layout.first_rank,
            model=printable(self._config.model),
        )
        specs: list[tuple[RankSpec, socket.socket | None]] = []
        for group in groups:
            listener = listeners[group.role]
            port = listener.getsockname()[1] if listener is not None else group.port
            if port is None:
                raise RuntimeError("a group that spans nodes has a port")  # groups_of saw to it
            for place in places_of(layout):
                own = listener if place.global_rank == 0 else None
                fd = own.fileno() if own is not None else None
                specs.append((rank_spec(self._config, layout, group, place, port=port, listener=fd), own))
        states = [RankState(s.name, s.group, s.local_rank, s.global_rank) for s, _ in specs]
        self._board.ranks = {state.name: state for state in states}
        for (spec, own), state in zip(specs, states, strict=True):
            await asyncio.sleep(0)  # signals and health checks are heard between two ranks
            if self._end.done():
                return
            try:
                rank = ChildRank.start(spec, state, self._command, launch_id=self._launch_id, listener=own)
            except OSError as error:
                self._finish(Ending(1, f"{spec.name} can't be started: {error.strerror}", spec.name))
                return
            self._ranks.append(rank)

    # Watching ----------------------------------------------------------------------------------

    async def _watch(self) -> Ending:
        tasks: list[asyncio.Task[None]] = []
        async with asyncio.TaskGroup() as group:
            readers = [group.create_task(self._read(rank)) for rank in self._ranks]
            tasks += [group.create_task(self._await_exit(rank)) for rank in self._ranks]
            tasks.append(group.create_task(self._keep_deadline()))
            self._rehearsal = group.create_task(self._rehearse())
            tasks.append(self._rehearsal)
            tasks.append(group.create_task(self._notifier.watchdog()))
            tasks.append(group.create_task(self._adopt_orphans()))
            try:
                ending = await asyncio.shield(self._end)
                await self._stop()
                if readers:
                    await asyncio.wait(readers, timeout=_LAST_WORDS)
            finally:
                for task in (*tasks, *readers):
                    task.cancel()
        return self._explained(ending)

    async def _await_exit(self, rank: ChildRank) -> None:
        await rank.process.done.wait()
        # Ranks often follow each other within the same instant; the one that began it is not always the
        # first that the loop sees. So look at all of them now.
        dead = [other for other in self._ranks if other.process.collect() is not None]
        for other in dead:
            other.state.status = other.process.status
        if not self._end.done():
            first = min(dead, key=lambda other: _suspicion(other.process.status or 0))
            status = first.process.status or 0
            how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited with {status}"
            when = "while serving" if first.state.serving else f"during {first.state.running or 'start-up'}"
            self._finish(Ending(exit_code(status), f"{first.spec.name} {how} {when}", first.spec.name))

    async def _keep_deadline(self) -> None:
        limit = self._config.start_deadline
        if limit <= 0:
            return
        await asyncio.sleep(limit)
        if self._board.ready_after is None:
            waiting = "; ".join(self._board.troubles()[:4])
            self._finish(Ending(1, f"not ready within --start-deadline {limit:g} s: {waiting}"))

    async def _adopt_orphans(self) -> None:
        """As process 1 of a container: reap what nobody else will."""
        while os.getpid() == 1:
            await asyncio.sleep(_ORPHANS)
            reap_orphans({rank.process.pid for rank in self._ranks})

    async def _rehearse(self) -> None:
        await self._arrived.wait()
        try:
            result = await rehearse(
                self._board,
                allowed=self._config.rehearsal,
                deadline=self._config.rehearsal_deadline,
                launch_id=self._launch_id,
            )
        except Exception as error:  # noqa: BLE001 (best effort: the rehearsal may cost the warmup, never the weights)
            _log.exception("the rehearsal broke")
            result = Rehearsed("failed", reason=printable(error))
        for rank in self._ranks:
            if rank.state.rehearsal is not None:
                rank.order(result)

    async def _read(self, rank: ChildRank) -> None:
        async with contextlib.aclosing(rank.lines()) as lines:
            async for line in lines:
                self._take(rank, line)

    def _take(self, rank: ChildRank, line: bytes) -> None:
        state = rank.state
        try:
            message = decode_message(line)
        except StatusLineInvalid as error:
            state.invalid_lines += 1
            if state.invalid_lines == 1:
                _log.warning("%s: %s", state.name, error)
            return
        state.take(message, time.monotonic())
        match message:
            case Phase():
                event(
                    _log,
                    logging.INFO,
                    "phase",
                    rank=state.name,
                    phase=message.name,
                    outcome=message.outcome,
                    seconds=message.seconds,
                    **{k: v for k, v in message.detail.items() if k not in ("rank", "phase", "outcome", "seconds")},
                )
            case Begin():
                self._notifier.send(f"STATUS=starting: {state.name} {printable(message.name, limit=60)}")
            case Serving():
                self._serves(state)
            case Rehearsal():
                pass
            case _:
                return
        if all_arrived(self._board.ranks.values()):
            self._arrived.set()

    def _serves(self, state: RankState) -> None:
        event(_log, logging.INFO, "serving", rank=state.name, socket=state.serving and state.serving.socket)
        board = self._board
        if board.ready_after is not None or not board.all_serving or self._end.done():
            return
        board.ready_after = time.monotonic() - board.started
        self._notifier.send("READY=1", f"STATUS=serving {len(board.ranks)} ranks")
        event(_log, logging.INFO, "READY", ranks=len(board.ranks), seconds=board.ready_after)
        if self._on_ready is not None:
            self._on_ready(board)

    # Ending ------------------------------------------------------------------------------------

    def _finish(self, ending: Ending) -> None:
        if not self._end.done():
            self._end.set_result(ending)

    async def _stop(self) -> None:
        if self._board.stopping:
            return
        self._board.stopping = True
        self._notifier.send("STOPPING=1", "STATUS=stopping")
        if self._rehearsal is not None:
            self._rehearsal.cancel()  # it kills and reaps its engine while the ranks stop
        left = await stop_all([rank.process for rank in self._ranks], STOP_GRACE, hurry=self._hurry)
        for process in left:
            _log.error("%s (pid %d) did not end even by SIGKILL; it hangs in the kernel", process.name, process.pid)
        for rank in self._ranks:
            rank.state.status = rank.process.status
        if self._rehearsal is not None:
            await asyncio.wait({self._rehearsal}, timeout=STOP_GRACE)
        for pid in kill_strays(self._launch_id) if self._ranks else ():
            event(_log, logging.WARNING, "killed what a rank left behind", pid=pid)

    def _explained(self, ending: Ending) -> Ending:
        """`ending` with the failing rank's last words, which may arrive after its exit was seen."""
        state = self._board.ranks.get(ending.rank or "")
        if state is None or state.failed is None:
            return ending
        return Ending(ending.code, f"{ending.reason}: {printable(state.failed.message, limit=500)}", ending.rank)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        handled = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup has it ignored, and means it
            handled.append(signal.SIGHUP)
        for number in handled:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._end.done():
            self._hurry.set()
        self._finish(Ending(128 + number, f"received {number.name}"))

    @asynccontextmanager
    async def _http(self) -> AsyncIterator[None]:
        port = self._config.weight_cache_health_port
        if port is None:
            yield
            return
        host = self._config.weight_cache_health_host
        with contextlib.closing(http.open_port(host, port)) as sock:
            exposition = Exposition(self._board)
            async with http.serve(
                sock,
                self._board,
                metrics=exposition.render,
                page=lambda: status_page(self._board, self._config),
                status=lambda: status_record(self._board, self._config),
            ):
                event(_log, logging.INFO, "listening", address=Endpoint(host, port), pages="/health,/metrics,/status")
                yield


def _suspicion(status: int) -> int:
    """Which of several ranks that ended at once most likely began it: the lower, the more likely.

    SIGKILL comes from outside (a person, the out-of-memory killer), 2 is a refused configuration; SIGABRT is how
    communication libraries end a rank whose peer went away.
    """
    if status == -signal.SIGKILL:
        return 0
    if status == 2:
        return 1
    if status < 0 and status != -signal.SIGABRT:
        return 2
    return 3 if status > 0 else 4
