"""The JSON at MOONCAKE_CONFIG_PATH is read as vLLM reads it, and what is wrong with it is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from warmseed.errors import ConfigurationError
from warmseed.stores.mooncake.config import MooncakeConfig, read_config

STANDALONE: dict[str, object] = {
    "mode": "standalone-store",
    "metadata_server": "P2PHANDSHAKE",
    "master_server_address": "127.0.0.1:50051",
    "protocol": "tcp",
    "global_segment_size": 0,
    "local_buffer_size": "1gb",
}


def read(folder: Path, environment: dict[str, str] | None = None, **changes: object) -> MooncakeConfig:
    fields = {name: value for name, value in {**STANDALONE, **changes}.items() if value is not ...}
    path = folder / "mooncake.json"
    path.write_text(json.dumps(fields))
    return read_config(path, environment or {})


def test_the_standalone_store_of_vllms_documentation(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.master == "127.0.0.1:50051"
    assert (config.segment, config.protocol, config.tenant, config.host) == (0, "tcp", "default", "127.0.0.1")
    assert config.buffer == 64 << 20


@pytest.mark.parametrize(
    ("size", "expected"),
    [(1, 1), ("5", 5), ("512mb", 512 << 20), ("4GB", 4 << 30), (" 1.5 kb ", 1536), ("7b", 7), (..., 4 << 30)],
)
def test_sizes_are_in_vllms_units(tmp_path: Path, size: object, expected: int) -> None:
    assert read(tmp_path, mode="embedded", global_segment_size=size).segment == expected


def test_unknown_fields_are_ignored_and_defaults_are_vllms(tmp_path: Path) -> None:
    config = read(tmp_path, protocol=..., metadata_server=..., tenant_id=None, enable_offload=False, future=[1])
    assert (config.protocol, config.metadata, config.tenant) == ("rdma", "P2PHANDSHAKE", "default")


def test_tenant_and_host_are_taken_over(tmp_path: Path) -> None:
    config = read(tmp_path, {"MOONCAKE_REQUESTER_LOCAL_HOSTNAME": "10.0.0.9"}, tenant_id=" warm ")
    assert (config.tenant, config.host) == ("warm", "10.0.0.9")


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"master_server_address": ...}, "master_server_address"),
        ({"master_server_address": 5}, "master_server_address"),
        ({"global_segment_size": ...}, "must be 0"),
        ({"global_segment_size": "4gb"}, "must be 0"),
        ({"mode": "embedded"}, "standalone-store"),
        ({"mode": "elsewhere"}, "embedded or standalone-store"),
        ({"mode": "embedded", "global_segment_size": "4g"}, "512mb"),
        ({"mode": "embedded", "global_segment_size": "1GiB"}, "512mb"),
        ({"mode": "embedded", "global_segment_size": -1}, "512mb"),
        ({"mode": "embedded", "global_segment_size": True}, "512mb"),
        ({"local_buffer_size": 0}, "local_buffer_size"),
        ({"tenant_id": 7}, "tenant_id"),
        ({"protocol": None}, "protocol"),
    ],
)
def test_what_cannot_work_is_named(tmp_path: Path, changes: dict[str, object], fix: str) -> None:
    with pytest.raises(ConfigurationError, match=fix):
        read(tmp_path, **changes)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b" " * (2 << 20)])
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "mooncake.json"
    path.write_bytes(text)
    with pytest.raises(ConfigurationError, match=r"mooncake\.json"):
        read_config(path, {})


def test_a_missing_or_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        read_config(tmp_path / "none.json", {})
    with pytest.raises(ConfigurationError):
        read_config(tmp_path, {})
