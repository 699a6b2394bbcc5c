"""Endpoints as operators write them."""

from __future__ import annotations

import pytest

from warmseed.errors import ConfigurationError
from warmseed.seeding.channel.endpoint import Endpoint


@pytest.mark.parametrize("host", ["node-1", "node1.cluster.local", "10.0.0.1", "::1", "fe80::1%eth0", "2001:db8::1"])
def test_hosts_that_people_write_are_accepted(host: str) -> None:
    assert host in str(Endpoint(host, 29600))


@pytest.mark.parametrize(
    "host", ["", "a b", "node/1", "http://node", "10.0.0.256", "::g", "a" * 300, "-x", "n\n", "x:1"]
)
def test_what_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(ConfigurationError, match="host name or address"):
        Endpoint(host, 29600)
