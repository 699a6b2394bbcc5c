"""Where a source listens: a host and a port, as people write them."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Self

from warmseed.errors import ConfigurationError, printable

__all__ = ["Endpoint"]

_WRITTEN = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.%A-Za-z]+)\]|(?P<host>[^\[\]:\s/]+)):(?P<port>[0-9]{1,5})")
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

    @classmethod
    def parse(cls, text: str) -> Self:
        """The endpoint that ``host:port`` or ``[v6]:port`` names.

        Raises:
            ConfigurationError: if `text` is neither, or the port is not in 1..65535.
        """
        match = _WRITTEN.fullmatch(text.strip())
        if match is None or not 1 <= int(match["port"]) <= 65535:
            raise ConfigurationError(
                f"{printable(text)!r} is not host:port with a port from 1 to 65535; "
                "write 10.0.0.1:29600 or [fd00::1]:29600"
            )
        return cls(match["v6"] or match["host"], int(match["port"]))

    def shifted(self, offset: int) -> Endpoint:
        """The same host, `offset` ports higher."""
        return Endpoint(self.host, self.port + offset)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _is_host(text: str) -> bool:
    try:
        ipaddress.ip_address(text.partition("%")[0] if ":" in text else text)
    except ValueError:
        return bool(_HOST.fullmatch(text)) and not text.rpartition(".")[2].isdigit()
    return True
