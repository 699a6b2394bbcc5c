"""What operators may write into the loader's extra configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from warmseed.daemon.weights.loader_config import LoaderConfig
from warmseed.daemon.weights.socket import SocketAddress, default_socket_dir
from warmseed.errors import ConfigurationError


def test_defaults_are_the_documented_ones() -> None:
    config = LoaderConfig.parse(None)
    assert (config.mode, config.fallback, config.connect_timeout_s, config.state_timeout_s) == (
        "zero_copy",
        True,
        5.0,
        300.0,
    )
    assert config.address("GPU-1") == SocketAddress.for_device("GPU-1")
    assert config.address("GPU-1").path.parent == default_socket_dir()


def test_a_folder_or_a_path_of_the_operators_own_is_used() -> None:
    assert LoaderConfig.parse({"socket_dir": "/run/w"}).address("GPU-1", draft=True).path.parent == Path("/run/w")
    assert LoaderConfig.parse({"socket_dir": "/run/w"}).address("GPU-1", draft=True).path.name.endswith("_draft.sock")
    assert LoaderConfig.parse({"socket_path": "/run/w/x.sock"}).address("GPU-1").path == Path("/run/w/x.sock")


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"sockt_path": "/x"}, "did you mean 'socket_path'"),
        ({"zzz": 1}, "known keys"),
        ({"mode": "copi"}, "mode"),
        ({"mode": None}, "mode"),
        ({"fallback": "no"}, "fallback"),
        ({"fallback": 0}, "fallback"),
        ({"connect_timeout_s": 0}, "connect_timeout_s"),
        ({"state_timeout_s": -1}, "state_timeout_s"),
        ({"state_timeout_s": "5"}, "state_timeout_s"),
        ({"state_timeout_s": float("nan")}, "state_timeout_s"),
        ({"socket_path": "/a", "socket_dir": "/b"}, "not both"),
    ],
)
def test_anything_else_stops_the_start_and_names_the_key(extra: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        LoaderConfig.parse(extra)
