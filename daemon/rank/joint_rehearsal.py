"""An engine that spans nodes is rehearsed on all of them or on none, and what it left counts on all or on none."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Final, Literal, get_args

from warmseed.daemon.protocol import rendezvous
from warmseed.daemon.protocol.spec import RankSpec
from warmseed.daemon.protocol.status import RehearsalOutcome
from warmseed.errors import printable

__all__ = ["Wish", "agree", "share_outcome"]

_log = logging.getLogger(__name__)

Wish = Literal["needed", "complete", "refused"]  # refused: ``--no-rehearsal``

ARRIVE_SECONDS: Final = 1800.0  # for the slowest node to load its weights
TELL_SECONDS: Final = 120.0  # between the ends of an engine's parts on two nodes
_KEY: Final = "warmseed/rehearsal"


def agree(spec: RankSpec, wish: Wish) -> bool:
    """Whether the ranks of all nodes rehearse now: somebody needs it and nobody refuses.

    Blocks until all have come; when some have not within `ARRIVE_SECONDS`, nobody rehearses.
    """
    keys = [f"{_KEY}/wish/{rank}" for rank in range(spec.world_size)]
    try:
        store = rendezvous.connect(spec, ARRIVE_SECONDS)
        store.set(keys[spec.global_rank], wish)
        store.wait(keys, timedelta(seconds=ARRIVE_SECONDS))
        wishes = {store.get(key).decode() for key in keys}
    except RuntimeError as error:  # torch.distributed raises subclasses of it
        _log.warning(
            "no rehearsal: not all ranks on the other nodes were heard of within %g s (%s); engines warm up themselves",
            *(ARRIVE_SECONDS, printable(error, limit=300)),
        )
        return False
    return "refused" not in wishes and "needed" in wishes


def share_outcome(spec: RankSpec, outcome: RehearsalOutcome) -> RehearsalOutcome:
    """How the rehearsal went where the engine's head ran, which is with global rank 0; told there, heard elsewhere.

    A head that says nothing in `TELL_SECONDS` has failed.
    """
    key = f"{_KEY}/outcome"
    try:
        store = rendezvous.connect(spec, ARRIVE_SECONDS)
        if spec.global_rank == 0:
            store.set(key, outcome)
            return outcome
        store.wait([key], timedelta(seconds=TELL_SECONDS))
        heard = store.get(key).decode()
    except RuntimeError as error:
        _log.warning(
            "the rehearsal's head was not heard of within %g s (%s); what it left here is not published",
            *(TELL_SECONDS, printable(error, limit=300)),
        )
        return "failed"
    return next((known for known in get_args(RehearsalOutcome) if known == heard), "failed")
