"""Weights that the daemon holds count towards this engine's share of the GPU, but are not its own to allocate.

vLLM 0.32 and later ask the loader for that charge; before, their worker is told here. Should the engine then load from
disk after all, the charge is taken back before the KV cache is sized.
"""

from __future__ import annotations

import logging
import math
from typing import Any, Final

__all__ = ["Charge", "charge", "reduced_request", "refunded"]

logger = logging.getLogger(__name__)

_GIB: Final = 1 << 30


class Charge:
    """What this process's budget was charged for weights held elsewhere."""

    def __init__(self) -> None:
        self.nbytes = 0  # taken off the budget
        self.refund = 0  # to be added again before KV sizing

    def take(self, nbytes: int) -> None:
        """The budget has been reduced by `nbytes`."""
        self.nbytes, self.refund = nbytes, 0

    def give_back(self) -> None:
        """The engine loads from disk: its own copy is measured like any other memory of its own."""
        self.refund, self.nbytes = self.nbytes, 0


charge = Charge()


def reduced_request(requested: int, external: int, *, free: int, total: int, utilization: float) -> int:
    """What the engine may allocate itself when `external` of its `requested` bytes are held by the daemon.

    Raises:
        ValueError: the daemon's weights alone exceed the share, or the rest of the share is not free.
    """
    own = requested - external
    if own <= 0:
        raise ValueError(
            f"the weights that the daemon holds ({external / _GIB:.2f} GiB) exceed this engine's share of the GPU "
            f"(gpu_memory_utilization {utilization} of {total / _GIB:.2f} GiB); raise --gpu-memory-utilization"
        )
    if free < own:
        raise ValueError(
            f"{free / _GIB:.2f} of {total / _GIB:.2f} GiB are free on the GPU, less than the {own / _GIB:.2f} GiB left "
            f"of this engine's share (gpu_memory_utilization {utilization}) beside the {external / _GIB:.2f} GiB of "
            "weights that the daemon holds; lower --gpu-memory-utilization or stop what else runs there"
        )
    logger.info(
        "weights are held by the daemon: %.2f GiB of this engine's share of %.2f GiB, %.2f GiB remain for its own",
        external / _GIB, requested / _GIB, own / _GIB,
    )  # fmt: skip
    return own


def request_memory(snapshot: Any, cache_config: Any, original: Any, external: int) -> int:
    """vLLM's ``request_memory`` for the releases whose worker does not know of external weights."""
    if external <= 0:
        return int(original(snapshot, cache_config))
    utilization = float(cache_config.gpu_memory_utilization)
    return reduced_request(
        math.ceil(snapshot.total_memory * utilization),
        external,
        free=int(snapshot.free_memory),
        total=int(snapshot.total_memory),
        utilization=utilization,
    )


def refunded(requested: int, *, free: int) -> int:
    """The engine's share once a charge is taken back; `free` is what was free before it loaded anything.

    Raises:
        ValueError: the whole share does not fit beside the daemon's weights, which stay where they are.
    """
    whole = requested + charge.refund
    if charge.refund == 0:
        return requested
    if free < whole:
        raise ValueError(
            f"the engine loads its weights from disk, but its share of {whole / _GIB:.2f} GiB does not fit into the "
            f"{free / _GIB:.2f} GiB that are free beside the weights that the daemon still holds: stop the daemon, "
            "or lower --gpu-memory-utilization"
        )
    logger.info("the daemon's %.2f GiB no longer count towards this engine's share", charge.refund / _GIB)
    charge.refund = 0
    return whole
