"""Which rank runs where, and on which ports: pure arithmetic over `PreloadConfig`.

Global ranks enumerate data-parallel, then pipeline, then tensor ranks::

    global = dp_rank * pp_size * tp_size + pp_rank * tp_size + tp_rank

With ``--nnodes`` a node serves the contiguous block that starts at ``node_rank * local``; without it the
block starts at ``start_rank * pp_size * tp_size``. So local device ``i`` of a TP1 x DP16 fleet serves DP
rank ``start_rank + i // tp_size`` and TP rank ``i % tp_size``, as the engine lays them out. The draft group
of a speculative setup has the same layout on the same devices, with a rendezvous and sockets of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from warmseed.daemon.settings.config import PreloadConfig
from warmseed.errors import ConfigurationError
from warmseed.seeding.channel.endpoint import Endpoint

__all__ = [
    "GROUPS",
    "LAST_PORT",
    "Group",
    "Layout",
    "Place",
    "groups_of",
    "layout_of",
    "places_of",
    "seed_endpoint",
    "seed_ports",
]

Role = Literal["target", "draft"]
GROUPS: Final[tuple[Role, ...]] = ("target", "draft")  # a group's index here is its port offset in ranks
_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})
LAST_PORT: Final = 65535


@dataclass(frozen=True, slots=True)
class Layout:
    """The sizes of a fleet and the block of it that this node serves."""

    tp_size: int
    pp_size: int
    dp_size: int
    first_rank: int  # global rank of this node's first rank
    local_size: int  # ranks of one group on this node
    master_host: str  # where global rank 0 runs

    @property
    def world_size(self) -> int:
        return self.dp_size * self.pp_size * self.tp_size

    @property
    def spans_nodes(self) -> bool:
        return self.local_size < self.world_size

    @property
    def is_master(self) -> bool:
        """Whether global rank 0 is on this node."""
        return self.first_rank == 0


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank sits in the fleet and on this node."""

    local_rank: int  # also the index of its device among the visible ones
    global_rank: int
    dp_rank: int
    pp_rank: int
    tp_rank: int


@dataclass(frozen=True, slots=True)
class Group:
    """One set of daemons that hold one model: the target, or its draft."""

    role: Role
    port: int | None  # its rendezvous port; `None`: any free one, possible only on a single node

    @property
    def index(self) -> int:
        return GROUPS.index(self.role)


def layout_of(config: PreloadConfig) -> Layout:
    """The block of the fleet that this node serves.

    Raises:
        ConfigurationError: for sizes that don't divide, a place outside the fleet, or placement flags
            that contradict each other; the message names the flags.
    """
    tp, pp, dp = config.tensor_parallel_size, config.pipeline_parallel_size, config.data_parallel_size
    _check_data_parallel_flags(config)
    if config.nnodes > 1:
        return _by_nodes(config, tp, pp, dp)
    if config.node_rank != 0:
        raise ConfigurationError(f"--node-rank {config.node_rank} needs --nnodes above {config.node_rank}")
    start = _start_rank(config) or 0
    local = _local_copies(config)
    local = dp if local is None else local
    if start + local > dp:
        raise ConfigurationError(
            f"--data-parallel-start-rank {start} + --data-parallel-size-local {local} is {start + local}, "
            f"past --data-parallel-size {dp}; this node would serve ranks that don't exist"
        )
    host = config.master_addr if dp == 1 else config.data_parallel_address or config.master_addr
    layout = Layout(tp, pp, dp, start * pp * tp, local * pp * tp, host)
    return _reachable(layout, "--data-parallel-address")


def places_of(layout: Layout) -> tuple[Place, ...]:
    """Every rank of one group on this node, by local rank."""
    places = []
    for local_rank in range(layout.local_size):
        global_rank = layout.first_rank + local_rank
        dp_rank, in_copy = divmod(global_rank, layout.pp_size * layout.tp_size)
        pp_rank, tp_rank = divmod(in_copy, layout.tp_size)
        places.append(Place(local_rank, global_rank, dp_rank, pp_rank, tp_rank))
    return tuple(places)


def groups_of(config: PreloadConfig, layout: Layout) -> tuple[Group, ...]:
    """The daemon groups to start: the target, and the draft of MTP, EAGLE and EAGLE3.

    Raises:
        ConfigurationError: if the groups span nodes without an agreed port, if two ports coincide or
            pass 65535, or if a port is given for a draft group that doesn't exist.
    """
    port, draft_port = config.weight_cache_master_port, config.weight_cache_draft_master_port
    if layout.spans_nodes and port is None:
        raise ConfigurationError(
            "--weight-cache-master-port is required when the daemons span nodes; give every node the same one"
        )
    groups = [Group("target", port)]
    if config.draft_method is None:
        if draft_port is not None:
            raise ConfigurationError(
                "--weight-cache-draft-master-port is set, but --speculative-config names no method with a cached "
                "draft (mtp, eagle, eagle3)"
            )
    else:
        if draft_port is None and port is not None:
            draft_port = port + 1
        groups.append(Group("draft", draft_port))
    _check_ports(config, layout, tuple(groups))
    return tuple(groups)


def seed_ports(base: int, layout: Layout, groups: tuple[Group, ...]) -> range:
    """Every port that a replica whose seed base is `base` uses, fleet-wide: one for each rank of each group."""
    return range(base, base + len(groups) * layout.world_size)


def seed_endpoint(base: Endpoint, layout: Layout, group: Group, place: Place) -> Endpoint:
    """Where the rank at `place` listens, or finds its match: ``base + group offset + global rank``."""
    return base.shifted(group.index * layout.world_size + place.global_rank)


def _start_rank(config: PreloadConfig) -> int | None:
    if config.data_parallel_rank is not None:
        return config.data_parallel_rank
    return config.data_parallel_start_rank


def _local_copies(config: PreloadConfig) -> int | None:
    if config.data_parallel_size_local is not None:
        return config.data_parallel_size_local
    return 1 if config.data_parallel_rank is not None else None


def _check_data_parallel_flags(config: PreloadConfig) -> None:
    rank, start, local = config.data_parallel_rank, config.data_parallel_start_rank, config.data_parallel_size_local
    dp = config.data_parallel_size
    if rank is not None and start is not None and rank != start:
        raise ConfigurationError(
            f"--data-parallel-rank {rank} and --data-parallel-start-rank {start} contradict each other; give one"
        )
    if rank is not None and local is not None and local != 1:
        raise ConfigurationError(
            f"--data-parallel-rank {rank} means one copy on this node, --data-parallel-size-local says {local}; "
            "use --data-parallel-start-rank for several"
        )
    for flag, value in (("--data-parallel-rank", rank), ("--data-parallel-start-rank", start)):
        if value is not None and value >= dp:
            raise ConfigurationError(f"{flag} {value} is not below --data-parallel-size {dp}")
    if local is not None and local > dp:
        raise ConfigurationError(f"--data-parallel-size-local {local} exceeds --data-parallel-size {dp}")


def _by_nodes(config: PreloadConfig, tp: int, pp: int, dp: int) -> Layout:
    nodes, world = config.nnodes, dp * pp * tp
    if world % nodes:
        raise ConfigurationError(
            f"--nnodes {nodes} does not divide the {world} ranks (--data-parallel-size {dp} x "
            f"--pipeline-parallel-size {pp} x --tensor-parallel-size {tp}); every node serves as many"
        )
    if config.node_rank >= nodes:
        raise ConfigurationError(
            f"--node-rank {config.node_rank} is not below --nnodes {nodes}; node ranks count from 0"
        )
    local = world // nodes
    first = config.node_rank * local
    if (start := _start_rank(config)) is not None and start != first // (pp * tp):
        raise ConfigurationError(
            f"--data-parallel-start-rank {start} contradicts --node-rank {config.node_rank} of --nnodes {nodes}, "
            f"whose first rank belongs to data-parallel rank {first // (pp * tp)}; leave the start rank out"
        )
    copies = max(1, local // (pp * tp))
    if (given := _local_copies(config)) is not None and given != copies:
        raise ConfigurationError(
            f"--data-parallel-size-local {given} contradicts --nnodes {nodes}: a node serves {local} ranks, "
            f"so {copies}; leave it out"
        )
    host = config.data_parallel_address if dp > 1 and config.data_parallel_address else config.master_addr
    layout = Layout(tp, pp, dp, first, local, host)
    return _reachable(layout, "--master-addr" if host == config.master_addr else "--data-parallel-address")


def _reachable(layout: Layout, flag: str) -> Layout:
    if layout.spans_nodes and layout.master_host in _LOOPBACK:
        raise ConfigurationError(
            f"the daemons span nodes, but {flag} is {layout.master_host}, which other nodes can't reach; "
            "give the address of the node that holds global rank 0"
        )
    return layout


def _check_ports(config: PreloadConfig, layout: Layout, groups: tuple[Group, ...]) -> None:
    taken: dict[int, str] = {}
    single = [("--weight-cache-health-port", config.weight_cache_health_port), ("--master-port", config.master_port)]
    for group in groups:
        flag = "--weight-cache-master-port" if group.role == "target" else "--weight-cache-draft-master-port"
        single.append((flag, group.port))
    for flag, port in single:
        if port is None:
            continue
        if port > LAST_PORT:
            raise ConfigurationError(f"{flag} would be {port}, past {LAST_PORT}; give a lower port")
        if port in taken:
            raise ConfigurationError(f"{flag} {port} is also {taken[port]}; each needs a port of its own")
        taken[port] = flag
    bases = [("--seed-listen-port", config.seed_listen_port)]
    bases += [(f"--seed-sources {source}", source.port) for source in config.seed_sources]
    for flag, base in bases:
        if base is None:
            continue
        span = seed_ports(base, layout, groups)
        if span[-1] > LAST_PORT:
            raise ConfigurationError(
                f"{flag}: {len(span)} ranks from port {base} on end at {span[-1]}, past {LAST_PORT}; "
                f"start at {LAST_PORT - len(span) + 1} or lower"
            )
    if config.seed_listen_port is not None:
        span = seed_ports(config.seed_listen_port, layout, groups)
        for port, flag in taken.items():
            if port in span:
                raise ConfigurationError(
                    f"{flag} {port} lies in the seed ports {span[0]}-{span[-1]} (--seed-listen-port, one for each "
                    "rank of each group); move one of them"
                )
