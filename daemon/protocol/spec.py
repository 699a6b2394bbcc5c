"""What the launcher tells one rank: the `RankSpec`, sent as JSON over an inherited pipe.

A pipe and not argv or the environment, because the spec may hold the fleet's secret.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from warmseed.daemon.placement import Group, Layout, Place, seed_endpoint
from warmseed.daemon.settings.config import PreloadConfig, decode_secret
from warmseed.errors import ConfigurationError, printable
from warmseed.seeding.channel.endpoint import Endpoint
from warmseed.seeding.trust.token import Secret

__all__ = ["SPEC_BYTES", "RankSpec", "decode_spec", "encode_spec", "rank_spec", "read_spec"]

SPEC_BYTES: Final = 1 << 20  # bytes in the largest spec


class RankSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank's place in the fleet, its addresses, and the whole configuration."""

    group: Literal["target", "draft"]
    local_rank: int
    global_rank: int
    world_size: int
    local_size: int  # ranks of this group on this node
    dp_rank: int
    pp_rank: int
    tp_rank: int
    device: int  # index among the visible devices; target and draft share it
    rendezvous_host: str
    rendezvous_port: int
    # Global rank 0 inherits the rendezvous socket, already listening; see `warmseed.daemon.protocol.rendezvous`.
    rendezvous_fd: int | None = None
    orders_fd: int | None = None  # where the launcher answers; see `warmseed.daemon.protocol.status.Orders`
    seed_listen: Endpoint | None = None  # where this rank serves its peers
    seed_sources: tuple[Endpoint, ...] = ()  # this rank's match in each source, in order
    config: PreloadConfig

    @property
    def name(self) -> str:
        """How logs, metrics and the status page call this rank: ``target-3``."""
        return f"{self.group}-{self.global_rank}"

    @property
    def spans_nodes(self) -> bool:
        """Whether some ranks of the group are on other nodes."""
        return self.local_size < self.world_size

    @property
    def copy_rank(self) -> int:
        """The rank's number within its data-parallel copy of the model."""
        return self.pp_rank * self.config.tensor_parallel_size + self.tp_rank


def rank_spec(
    config: PreloadConfig, layout: Layout, group: Group, place: Place, *, port: int, listener: int | None = None
) -> RankSpec:
    """The spec of the rank at `place`; `port` is the group's rendezvous port, `listener` its inherited socket."""
    listen = None
    if config.seed_listen_port is not None:
        listen = seed_endpoint(Endpoint(config.seed_listen_host, config.seed_listen_port), layout, group, place)
    return RankSpec(
        group=group.role,
        local_rank=place.local_rank,
        global_rank=place.global_rank,
        world_size=layout.world_size,
        local_size=layout.local_size,
        dp_rank=place.dp_rank,
        pp_rank=place.pp_rank,
        tp_rank=place.tp_rank,
        device=place.local_rank,
        rendezvous_host=layout.master_host,
        rendezvous_port=port,
        rendezvous_fd=listener,
        seed_listen=listen,
        seed_sources=tuple(seed_endpoint(source, layout, group, place) for source in config.seed_sources),
        config=config,
    )


def _encode(value: object) -> str:
    if isinstance(value, Secret):
        return value.reveal()
    raise NotImplementedError(f"{type(value).__name__} has no place in a rank's spec")


def encode_spec(spec: RankSpec) -> bytes:
    """`spec` as JSON, secrets in clear: for the pipe to the rank only, never for a log or a file."""
    return msgspec.json.encode(spec, enc_hook=_encode)


def decode_spec(data: bytes) -> RankSpec:
    """The spec that `data` holds.

    Raises:
        ConfigurationError: if `data` is not a spec of this version.
    """
    try:
        return msgspec.json.decode(data, type=RankSpec, dec_hook=decode_secret)
    except msgspec.DecodeError as error:
        raise ConfigurationError(
            f"the launcher's description of this rank can't be read ({printable(error)}); "
            "launcher and rank must come from the same warmseed"
        ) from error


def read_spec(fd: int) -> RankSpec:
    """The spec that the launcher wrote to the inherited pipe `fd`, which is then closed.

    Blocks until the launcher has written it; call it before any event loop runs.

    Raises:
        ConfigurationError: if the pipe holds no whole spec.
    """
    pieces = []
    left = SPEC_BYTES
    with open(fd, "rb", buffering=0) as pipe:
        while left > 0 and (piece := pipe.read(min(left, 1 << 16))):
            pieces.append(piece)
            left -= len(piece)
    return decode_spec(b"".join(pieces))
