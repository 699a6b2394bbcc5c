"""Where a source listens: addresses as people write them, and the port of each rank."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from warmseed.errors import ConfigurationError, printable

__all__ = ["Endpoint", "check_endpoints", "check_port_range", "seed_port"]

_HOST = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_][A-Za-z0-9_-]{0,62})*\.?")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host (name, IPv4 or IPv6 address without brackets) and a TCP port.

    Raises:
        ConfigurationError: neither a host's name nor an address, or the port is out of range.
    """

    host: str
    port: int

    def __post_init__(self) -> None:
        if not _is_host(self.host):
            raise ConfigurationError(f"{printable(self.host)!r} is not a host name or address; start-up stops")
        if type(self.port) is not int or not 0 < self.port <= 65535:
            raise ConfigurationError(f"{printable(self.port)!r} is not a TCP port (1 to 65535); start-up stops")

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def seed_port(base: int, *, group_index: int, world_size: int, rank: int) -> int:
    """The port of one rank: every rank of every group of a replica has its own, above one base port.

    `group_index` is 0 for the target model and 1 for its draft; `rank` is the global rank, from 0.

    Raises:
        ConfigurationError: the base is no port, the rank is outside the world, or the port is past 65535.
    """
    if not 0 < base <= 65535:
        raise ConfigurationError(f"seed port {base} is not a TCP port (1 to 65535); start-up stops")
    if world_size < 1 or not 0 <= rank < world_size or group_index < 0:
        raise ConfigurationError(f"rank {rank} of group {group_index} is not in a world of {world_size} ranks")
    port = base + group_index * world_size + rank
    if port > 65535:
        raise ConfigurationError(
            f"seed port {port} of rank {rank} in group {group_index} is past 65535; start-up stops; "
            f"with {world_size} ranks a group, choose a base port lower than {base}"
        )
    return port


def check_port_range(base: int, *, groups: int, world_size: int) -> None:
    """Nothing, when every rank of every group has a port; checked once, before any GPU work.

    Raises:
        ConfigurationError: the last one is past 65535, or the base is no port.
    """
    seed_port(base, group_index=groups - 1, world_size=world_size, rank=world_size - 1)


def check_endpoints(
    *,
    listen_host: str | None,
    listen_port: int | None,
    source_hosts: Sequence[str],
    source_ports: Sequence[int],
    has_token: bool,
) -> tuple[Endpoint | None, tuple[Endpoint, ...]]:
    """The listening endpoint and the sources (at their base ports) that the ``--seed-*`` flags ask for.

    One port may serve all source hosts; otherwise there are as many ports as hosts.

    Raises:
        ConfigurationError: half an endpoint, endpoints without a token, a token without endpoints, a
            malformed address, or the same source twice.
    """
    if (listen_host is None) != (listen_port is None):
        raise ConfigurationError("--seed-listen-host and --seed-listen-port belong together; start-up stops")
    if bool(source_hosts) != bool(source_ports):
        raise ConfigurationError("--seed-source-host and --seed-source-port belong together; start-up stops")
    if len(source_ports) not in (1, len(source_hosts)) and source_hosts:
        raise ConfigurationError(
            f"{len(source_hosts)} --seed-source-host and {len(source_ports)} --seed-source-port: "
            "give one port for all of them or one each; start-up stops"
        )
    ports = list(source_ports) * len(source_hosts) if len(source_ports) == 1 else list(source_ports)
    sources = tuple(Endpoint(_bare(host), port) for host, port in zip(source_hosts, ports, strict=True))
    if len(set(sources)) != len(sources):
        raise ConfigurationError("the same seed source is named twice; start-up stops")
    listen = None if listen_host is None or listen_port is None else Endpoint(_bare(listen_host), listen_port)
    if (listen or sources) and not has_token:
        raise ConfigurationError(
            "a seed endpoint without a token: anyone could read and replace what is served; start-up stops; "
            "make one with: warmseed token new, and pass --seed-token-file"
        )
    if has_token and not (listen or sources):
        raise ConfigurationError(
            "a seed token without an endpoint does nothing on the channel; start-up stops; "
            "add --seed-listen-host/--seed-listen-port or --seed-source-host/--seed-source-port, or drop the token"
        )
    return listen, sources


def _bare(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _is_host(text: str) -> bool:
    try:
        ipaddress.ip_address(text.partition("%")[0] if ":" in text else text)
    except ValueError:
        return bool(_HOST.fullmatch(text)) and not text.rpartition(".")[2].isdigit()
    return True
