"""Which ranks tune together, and where they meet to decide together what they adopt.

The group and the place follow from the rank's spec and the rendezvous that its launcher opened: the group's
first rank listens on a port of its own and names it there, so no further port has to be agreed on.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from warmseed.blocking import run_blocking
from warmseed.daemon.protocol import rendezvous
from warmseed.errors import WarmseedError
from warmseed.seeding.gang.rendezvous import Alone, Rendezvous, TcpRendezvous
from warmseed.seeding.trust.token import Token

if TYPE_CHECKING:
    from warmseed.daemon.protocol.spec import RankSpec

__all__ = ["TuningGroup", "meeting", "tuning_group"]

CONNECT = 600.0  # seconds for the other nodes' ranks to start at all
SECRET_LABEL = b"gang"  # of the key that the members of a group prove to each other


class _Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the group's first rank listens, and the group's secret where no token gives one."""

    host: str
    port: int
    secret: bytes = b""


@dataclass(frozen=True, slots=True)
class TuningGroup:
    """One rank's place among the ranks that tune together."""

    name: str
    rank: int
    world: int


def tuning_group(spec: RankSpec, *, apart: bool) -> TuningGroup:
    """All ranks of the model, or those of one pipeline stage: stages run different operations (vLLM's own rule).

    Of copies that run `apart`, those of one copy.
    """
    config = spec.config
    if config.pipeline_parallel_size > 1:
        name = f"{spec.group}/dp{spec.dp_rank}/pp{spec.pp_rank}"
    elif apart and config.data_parallel_size > 1:
        name = f"{spec.group}/dp{spec.dp_rank}"
    else:
        return TuningGroup(spec.group, spec.global_rank, spec.world_size)
    return TuningGroup(name, spec.tp_rank, config.tensor_parallel_size)


@asynccontextmanager
async def meeting(spec: RankSpec, tokens: Sequence[Token], *, apart: bool) -> AsyncIterator[Rendezvous]:
    """Where `spec`'s rank meets its tuning group, for as long as the block; `apart` as in `tuning_group`.

    Raises:
        WarmseedError: the group's first rank was not heard of in time.
        ConfigurationError: the first rank can't listen.
    """
    group = tuning_group(spec, apart=apart)
    if group.world == 1:
        yield Alone()
        return
    listener = await run_blocking(_listen, spec) if group.rank == 0 else None
    try:
        place = await run_blocking(_meet, spec, group, listener)
    except BaseException:
        if listener is not None:
            listener.close()
        raise
    secret = tokens[0].derive(SECRET_LABEL) if tokens else place.secret
    async with TcpRendezvous.opened(
        rank=group.rank,
        world=group.world,
        group=group.name,
        host=place.host,
        port=place.port,
        secret=secret,
        listener=listener,
    ) as opened:
        yield opened


def _listen(spec: RankSpec) -> socket.socket:
    return rendezvous.listen(_own_address(spec), None, flag="--master-addr")


def _meet(spec: RankSpec, group: TuningGroup, listener: socket.socket | None) -> _Place:
    """Name the place (the first rank), or hear of it (the others), over the launcher's rendezvous."""
    key = f"warmseed/tuning-group/{group.name}"
    try:
        store = rendezvous.connect(spec, CONNECT)
        if listener is None:
            return msgspec.json.decode(store.get(key), type=_Place)
        place = _Place(_own_address(spec), listener.getsockname()[1], secrets.token_bytes(32))
        store.set(key, msgspec.json.encode(place).decode())
    except (RuntimeError, msgspec.MsgspecError) as error:  # torch.distributed raises subclasses of RuntimeError
        raise WarmseedError(f"tuning group {group.name} could not meet: {error}; each rank tunes by itself") from error
    return place


def _own_address(spec: RankSpec) -> str:
    """The address under which this node reaches the group's rendezvous, and so the other nodes this one."""
    with socket.socket(_family(spec.rendezvous_host), socket.SOCK_DGRAM) as probe:
        probe.connect((spec.rendezvous_host, spec.rendezvous_port))  # sends nothing
        return str(probe.getsockname()[0])


def _family(host: str) -> int:
    return socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)[0][0]
