"""The rehearsal: one throwaway engine over the daemons' private sockets, run and watched by the launcher.

Ranks that miss a warmup cache wait at this point; when all ranks of the node are here, one engine maps their
weights, does once what every restart would do, and exits. Whatever goes wrong with it costs the warmup only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable
from typing import Final

from warmseed.daemon.launcher.board import Board, RankState
from warmseed.daemon.launcher.leash import leashed
from warmseed.daemon.launcher.processes import ChildProcess, exit_code
from warmseed.daemon.logs import event
from warmseed.daemon.protocol.status import Rehearsal, Rehearsed

__all__ = ["all_arrived", "rehearse"]

_REAP: Final = 5.0  # seconds for the kernel to end a killed engine; its GPU memory is many gigabytes
_log = logging.getLogger(__name__)


def all_arrived(ranks: Iterable[RankState]) -> bool:
    """Whether every rank is at the rehearsal or past it, and at least one waits there."""
    states = list(ranks)
    waiting = [rank for rank in states if rank.rehearsal is not None and rank.serving is None]
    return bool(waiting) and all(rank.rehearsal is not None or rank.serving is not None for rank in states)


async def rehearse(board: Board, *, allowed: bool, deadline: float, launch_id: str) -> Rehearsed:
    """Run the engine that the ranks on `board` ask for, if any; how that went.

    The engine is killed with everything in its session after `deadline` seconds, and when the caller is
    cancelled. Never raises for what the engine does.
    """
    wanted = [rank.rehearsal for rank in board.ranks.values() if rank.rehearsal is not None and rank.rehearsal.needed]
    if not wanted:
        return Rehearsed("skipped", reason="every warmup cache is complete")
    if not allowed:
        return Rehearsed("skipped", reason="--no-rehearsal")
    script = next((r for r in wanted if r.argv), None)
    if script is None:
        return Rehearsed("failed", reason="no rank named an engine to rehearse with")
    result = await _run(script, deadline, launch_id)
    board.rehearsal_outcome, board.rehearsal_seconds = result.outcome, result.seconds
    level = logging.INFO if result.outcome == "ok" else logging.WARNING
    event(_log, level, "rehearsal", outcome=result.outcome, seconds=result.seconds, reason=result.reason or None)
    return result


async def _run(script: Rehearsal, deadline: float, launch_id: str) -> Rehearsed:
    start = time.monotonic()
    try:
        engine = ChildProcess.start("rehearsal", leashed(script.argv), launch_id=launch_id, env=script.env)
    except OSError as error:
        return Rehearsed("failed", reason=f"the engine can't be started: {error.strerror}")
    try:
        async with asyncio.timeout(deadline):
            await engine.done.wait()
    except TimeoutError:
        return Rehearsed("timeout", time.monotonic() - start, f"killed after --rehearsal-deadline {deadline:g} s")
    finally:
        engine.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REAP):
                await engine.done.wait()
    seconds = time.monotonic() - start
    if engine.status == 0:
        return Rehearsed("ok", seconds)
    code = exit_code(engine.status if engine.status is not None else 1)
    return Rehearsed("failed", seconds, f"the engine exited with {code}; serving without its warmup")
