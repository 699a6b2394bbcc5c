"""A rank's part in the rehearsal: it lends its weights to the launcher's throwaway engine, and hears how it went."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from warmseed.blocking import run_blocking
from warmseed.daemon.engines.base import Engine
from warmseed.daemon.protocol.spec import RankSpec
from warmseed.daemon.protocol.status import Rehearsal, RehearsalOutcome, StatusWriter, next_order, orders
from warmseed.daemon.rank.joint_rehearsal import Wish, agree, share_outcome
from warmseed.daemon.weights.server import WeightServer
from warmseed.daemon.weights.socket import SocketAddress, default_socket_dir
from warmseed.errors import WarmseedError

__all__ = ["rehearse"]

_log = logging.getLogger(__name__)


async def rehearse(
    spec: RankSpec,
    engine: Engine,
    server: WeightServer,
    status: StatusWriter,
    *,
    cache_root: Path,
    missing: Sequence[str],
) -> RehearsalOutcome:
    """Have the launcher run a throwaway engine on this node's weights, if any cache is `missing`; how it went.

    Raises:
        WarmseedError: the launcher is gone.
    """
    if spec.orders_fd is None:
        return "skipped"
    folder = _private_folder(spec)
    address = SocketAddress.for_device(server.address.device_uuid, directory=folder, draft=spec.group == "draft")
    with status.phase("rehearsal") as report:
        needed = await _agreed(spec, missing=bool(missing))
        async with server.serving(address), orders(spec.orders_fd) as reader:
            status.send(
                Rehearsal(
                    needed=needed,
                    argv=tuple(engine.rehearsal(socket_dir=folder, cache_root=cache_root)),
                    env=dict(engine.caches(cache_root).variables),
                    reason=", ".join(missing),
                )
            )
            order = await next_order(reader)
        if order is None:
            raise WarmseedError("the launcher is gone; this rank ends")
        outcome = order.outcome
        if needed and spec.spans_nodes and (spec.global_rank == 0 or outcome == "ok"):
            outcome = await run_blocking(share_outcome, spec, outcome)
        report.outcome = outcome
        if order.reason:
            report.detail["reason"] = order.reason
    return outcome


async def _agreed(spec: RankSpec, *, missing: bool) -> bool:
    """Whether to rehearse, where ranks on other nodes have a say; a draft's never ask for it."""
    if not spec.spans_nodes or spec.group != "target":
        return missing
    if spec.config.data_parallel_size > 1:
        if missing:
            _log.warning(
                "no rehearsal: it can't start data-parallel copies on other nodes; engines warm up themselves, and "
                "the next start of this daemon publishes what they leave"
            )
        return False
    wish: Wish = "refused" if not spec.config.rehearsal else "needed" if missing else "complete"
    return await run_blocking(agree, spec, wish)


def _private_folder(spec: RankSpec) -> Path:
    """Where the rehearsing engine finds this node's ranks, and no other engine looks."""
    folder = spec.config.weight_cache_socket_dir
    return (default_socket_dir() if folder is None else Path(folder)) / "rehearsal"
