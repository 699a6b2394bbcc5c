"""The channel between two network namespaces: other addresses, other interfaces, and a link that goes down."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from warmseed.seeding.trust.token import new_token, write_token

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")

SOURCE = """
import asyncio, sys
from pathlib import Path
from tests.support.channel import a_source
from warmseed.seeding.channel.client import new_instance
from warmseed.seeding.channel.server import SeedServer
from warmseed.seeding.trust.token import read_tokens

async def main():
    server = SeedServer(a_source(), read_tokens(file=Path(sys.argv[1])), host=sys.argv[2], port=29600,
                        instance=new_instance())
    async with server.listening():
        print("listening", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""

MIRROR = """
import asyncio, sys
from pathlib import Path
from tests.support.channel import OBJECT, OBJECT_DIGEST, TABLE, a_request, fetched
from warmseed.seeding.channel.client import SeedClient, new_instance
from warmseed.seeding.channel.endpoint import Endpoint
from warmseed.seeding.channel.errors import ChannelError
from warmseed.seeding.channel.limits import ClientLimits
from warmseed.seeding.trust.token import read_tokens

async def main():
    client = SeedClient(read_tokens(file=Path(sys.argv[1])), instance=new_instance(),
                        limits=ClientLimits(connect_seconds=2, handshake_seconds=2, reconnects=0))
    peer = Endpoint(sys.argv[2], 29600)
    try:
        found = await client.describe(peer, a_request(client))
        assert found.payload == TABLE
        assert await fetched(client, peer, OBJECT_DIGEST, length=len(OBJECT)) == OBJECT
        print("seeded")
    except ChannelError as error:
        print(type(error).__name__)

asyncio.run(main())
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=20, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two namespaces with a wire between them: 10.77.0.1 and fd77::1, 10.77.0.2 and fd77::2."""
    tag = uuid.uuid4().hex[:6]
    names = (f"ws-a-{tag}", f"ws-b-{tag}")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", f"wsa{tag}", "type", "veth", "peer", "name", f"wsb{tag}")
        for number, (name, link) in enumerate(zip(names, (f"wsa{tag}", f"wsb{tag}"), strict=True), start=1):
            ip("link", "set", link, "netns", name)
            ip("-n", name, "link", "set", link, "name", "wire")
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "wire")
            ip("-n", name, "addr", "add", f"fd77::{number}/64", "dev", "wire", "nodad")
            ip("-n", name, "link", "set", "wire", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, timeout=20, capture_output=True)


def inside(host: str, program: str, *arguments: str) -> list[str]:
    return ["ip", "netns", "exec", host, sys.executable, "-c", textwrap.dedent(program), *arguments]


@pytest.mark.parametrize(("bind", "dial"), [("0.0.0.0", "10.77.0.1"), ("::", "fd77::1"), ("fd77::1", "fd77::1")])
def test_a_mirror_on_another_host_is_seeded_until_the_link_goes_down(
    hosts: tuple[str, str], tmp_path: Path, bind: str, dial: str
) -> None:
    token = tmp_path / "token"
    write_token(token, new_token())
    env = os.environ | {"PYTHONPATH": f"src:{Path.cwd()}"}

    def mirror() -> str:
        done = subprocess.run(
            inside(hosts[1], MIRROR, str(token), dial), env=env, capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout.strip()

    source = subprocess.Popen(inside(hosts[0], SOURCE, str(token), bind), env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert source.stdout is not None
        assert source.stdout.readline().strip() == "listening"
        assert mirror() == "seeded"
        ip("-n", hosts[0], "link", "set", "wire", "down")
        assert mirror() == "PeerUnreachable"
        ip("-n", hosts[0], "link", "set", "wire", "up")
        if ":" in dial:  # the kernel drops IPv6 addresses of a link that goes down
            ip("-n", hosts[0], "addr", "replace", "fd77::1/64", "dev", "wire", "nodad")
        # The link needs a moment to carry packets again; every attempt has a deadline of its own.
        assert "seeded" in (mirror() for _ in range(10))
    finally:
        source.kill()
        source.wait(timeout=20)
        if source.stdout is not None:
            source.stdout.close()
