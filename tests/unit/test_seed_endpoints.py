"""Ports of ranks, and endpoints as operators write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmseed.errors import ConfigurationError
from warmseed.seeding.channel.endpoint import Endpoint, check_endpoints, check_port_range, seed_port


def test_every_rank_of_every_group_has_a_port_of_its_own() -> None:
    ports = [seed_port(29600, group_index=g, world_size=8, rank=r) for g in range(2) for r in range(8)]
    assert ports == list(range(29600, 29616))


@given(st.integers(1, 65535), st.integers(1, 3), st.integers(1, 4096))
def test_a_range_is_accepted_exactly_when_its_last_port_exists(base: int, groups: int, world: int) -> None:
    if base + groups * world - 1 <= 65535:
        check_port_range(base, groups=groups, world_size=world)
    else:
        with pytest.raises(ConfigurationError, match="past 65535"):
            check_port_range(base, groups=groups, world_size=world)


@pytest.mark.parametrize(("base", "rank"), [(0, 0), (-1, 0), (65536, 0), (29600, 8), (29600, -1)])
def test_a_rank_outside_the_world_or_a_base_that_is_no_port_is_refused(base: int, rank: int) -> None:
    with pytest.raises(ConfigurationError):
        seed_port(base, group_index=0, world_size=8, rank=rank)


@pytest.mark.parametrize("host", ["node-1", "node1.cluster.local", "10.0.0.1", "::1", "fe80::1%eth0", "2001:db8::1"])
def test_hosts_that_people_write_are_accepted(host: str) -> None:
    assert host in str(Endpoint(host, 29600))


@pytest.mark.parametrize(
    "host", ["", "a b", "node/1", "http://node", "10.0.0.256", "::g", "a" * 300, "-x", "n\n", "x:1"]
)
def test_what_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(ConfigurationError, match="host name or address"):
        Endpoint(host, 29600)


def flags(**changes: object) -> dict[str, object]:
    nothing: dict[str, object] = {
        "listen_host": None,
        "listen_port": None,
        "source_hosts": [],
        "source_ports": [],
        "has_token": True,
    }
    return nothing | changes


def test_the_flags_of_a_source_a_mirror_and_both() -> None:
    listen, sources = check_endpoints(**flags(listen_host="0.0.0.0", listen_port=29600))  # type: ignore[arg-type]
    assert (listen, sources) == (Endpoint("0.0.0.0", 29600), ())
    listen, sources = check_endpoints(**flags(source_hosts=["a", "[::1]"], source_ports=[29600]))  # type: ignore[arg-type]
    assert (listen, sources) == (None, (Endpoint("a", 29600), Endpoint("::1", 29600)))
    _, sources = check_endpoints(**flags(source_hosts=["a", "a"], source_ports=[1, 2], listen_host="::", listen_port=3))  # type: ignore[arg-type]
    assert sources == (Endpoint("a", 1), Endpoint("a", 2))
    assert check_endpoints(**flags(has_token=False)) == (None, ())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"listen_host": "0.0.0.0"},
        {"listen_port": 29600},
        {"source_hosts": ["a"]},
        {"source_ports": [29600]},
        {"source_hosts": ["a", "b", "c"], "source_ports": [1, 2]},
        {"source_hosts": ["a", "a"], "source_ports": [1]},
        {"source_hosts": ["a"], "source_ports": [70000]},
        {"listen_host": "0.0.0.0", "listen_port": 29600, "has_token": False},
        {"source_hosts": ["a"], "source_ports": [1], "has_token": False},
        {},
    ],
)
def test_flags_that_contradict_each_other_stop_start_up(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="start-up stops"):
        check_endpoints(**flags(**changes))  # type: ignore[arg-type]
