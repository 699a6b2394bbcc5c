"""The JSON at MOONCAKE_CONFIG_PATH, the same file that vLLM's MooncakeStoreConnector reads.

Fields, defaults and units as in vLLM 0.33 (``vllm/distributed/mooncake_store.py``); unknown fields are ignored.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from warmseed.errors import ConfigurationError, printable

__all__ = ["MooncakeConfig", "read_config"]

_FILE_BYTES = 1 << 20  # bytes in the largest configuration file read
_SEGMENT = 4 << 30  # bytes: vLLM's default of `global_segment_size` and `local_buffer_size`
_OUR_BUFFER = 64 << 20  # bytes: our values never pass through the local buffer, so it stays small
_UNITS = {"": 1, "b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*")


@dataclass(frozen=True, slots=True)
class MooncakeConfig:
    """How to reach a Mooncake store."""

    master: str  # host:port, or etcd://…
    metadata: str  # P2PHANDSHAKE, http://…/metadata or etcd://…
    protocol: str  # tcp or rdma
    devices: str  # RDMA devices, comma-separated
    tenant: str
    segment: int  # bytes of host memory this process adds to the pool; 0 in standalone-store mode
    buffer: int  # bytes
    host: str  # the address under which storage nodes reach this one


def read_config(path: Path, environment: Mapping[str, str]) -> MooncakeConfig:
    """The configuration in the file at `path`.

    Raises:
        ConfigurationError: when the file can't be read or says something that can't work; it names field and fix.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(_FILE_BYTES + 1)
        if len(raw) > _FILE_BYTES:
            raise ConfigurationError(f"mooncake: {path} is over {_FILE_BYTES} bytes; that is no configuration")
        fields = json.loads(raw)
    except OSError as error:
        raise ConfigurationError(f"mooncake: {path} can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"mooncake: {path} is not JSON: {printable(error)}") from error
    if not isinstance(fields, dict):
        raise ConfigurationError(f"mooncake: {path} holds no JSON object")
    return _parse(fields, f"mooncake: {path}", environment)


def _parse(fields: dict[str, object], where: str, environment: Mapping[str, str]) -> MooncakeConfig:
    master = _text(fields, "master_server_address", "", where)
    if not master:
        raise ConfigurationError(f"{where}: master_server_address is missing; give the master's host:port")
    mode = _text(fields, "mode", "embedded", where)
    segment = _size(fields, "global_segment_size", where)
    if mode == "standalone-store":
        if segment:
            raise ConfigurationError(
                f"{where}: global_segment_size must be 0 in standalone-store mode (it is {segment}; left out, 4 GiB)"
            )
    elif mode == "embedded":
        if not segment:
            raise ConfigurationError(
                f'{where}: global_segment_size must be more than 0 in embedded mode; or set "mode": "standalone-store"'
            )
    else:
        raise ConfigurationError(f"{where}: mode is {printable(mode)!r}; it can be embedded or standalone-store")
    buffer = _size(fields, "local_buffer_size", where)
    if not buffer:
        raise ConfigurationError(f"{where}: local_buffer_size must be more than 0")
    protocol = _text(fields, "protocol", "rdma", where)
    tenant = fields.get("tenant_id")
    if tenant is not None and not isinstance(tenant, str):
        raise ConfigurationError(f"{where}: tenant_id is not a text")
    return MooncakeConfig(
        master=master,
        metadata=_text(fields, "metadata_server", "", where) or "P2PHANDSHAKE",
        protocol=protocol,
        devices=_text(fields, "device_name", "", where),
        tenant=(tenant or "").strip() or "default",
        segment=segment,
        buffer=min(buffer, _OUR_BUFFER),
        host=environment.get("MOONCAKE_REQUESTER_LOCAL_HOSTNAME", "").strip() or _own_address(master),
    )


def _text(fields: dict[str, object], name: str, default: str, where: str) -> str:
    value = fields.get(name, default)
    if not isinstance(value, str):
        raise ConfigurationError(f"{where}: {name} is not a text")
    return value.strip()


def _size(fields: dict[str, object], name: str, where: str) -> int:
    value = fields.get(name, _SEGMENT)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and (match := _SIZE.fullmatch(value.lower())) and match[2] in _UNITS:
        return int(float(match[1]) * _UNITS[match[2]])
    raise ConfigurationError(
        f"{where}: {name} is {printable(value)!r}; it can be a number of bytes or a text such as '512mb' "
        "(units b, kb, mb, gb)"
    )


def _own_address(master: str) -> str:
    """The address of the interface that leads to the master; no packet is sent."""
    host, _, port = master.removeprefix("etcd://").split(";")[0].rpartition(":")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host or master, port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"  # the master can't be reached now; its own error will say so
