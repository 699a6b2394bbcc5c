"""A newer release from a peer: only what changed is moved, a cut moves nothing twice, a lie is asked of the next."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.artifacts import run
from tests.support.chaos import Faults, chaos
from tests.support.fleet import Node
from tests.support.serve_bundles import fleet_key, kind, site
from tests.support.sites import fill, tree

from warmseed.seeding.adopt import Adopter, Adoption
from warmseed.seeding.channel import server
from warmseed.seeding.channel.client import SeedClient, new_instance
from warmseed.seeding.channel.endpoint import Endpoint
from warmseed.seeding.channel.errors import ProtocolError
from warmseed.seeding.channel.messages import RangesRequest, Request, decode_request
from warmseed.seeding.channel.sources import Patience
from warmseed.seeding.origins.origins import PeerOrigin, StoreOrigin
from warmseed.seeding.trust.probation import Probation
from warmseed.seeding.trust.token import Token, new_token, read_tokens, write_token

pytestmark = pytest.mark.timeout(120)

PATIENCE = Patience(wait_seconds=5.0, pause_seconds=0.02, appear_seconds=0.5)
FILES, CHANGED = 200, 4
OVERHEAD = 8_000  # bytes of a connection that are no object: the handshake, the head of the answer


def releases(folder: Path) -> dict[str, bytes]:
    """Write an older release, and a newer one in which 2 % of the files are others; the files of the newer."""
    rng = random.Random(7)
    files = {f"{n % 16:02x}/{n:04d}.so": rng.randbytes(int(rng.lognormvariate(9.5, 1.2))) for n in range(FILES)}
    fill(folder / "old" / "inductor", files)
    for name in rng.sample(sorted(files), CHANGED):
        files[name] = rng.randbytes(len(files[name]))
    fill(folder / "new" / "inductor", files)
    return files


@dataclass
class Source:
    """A source in a process of its own."""

    process: subprocess.Popen[str]
    peer: Endpoint

    def sent(self) -> int:
        """Bytes of objects that it has sent so far."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


@dataclass
class Place:
    """One test's folder, token and releases."""

    folder: Path
    token_file: Path
    token: Token
    files: dict[str, bytes]  # of the newer release

    @contextmanager
    def source(self, name: str, *options: str) -> Iterator[Source]:
        """A source that has published both releases."""
        folder = self.folder / name
        for release in ("old", "new"):
            shutil.copytree(self.folder / "releases" / release, folder / release)
        command = [sys.executable, "-m", "tests.support.serve_bundles", str(folder), str(self.token_file), *options]
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
        ) as process:
            try:
                assert process.stdout is not None
                yield Source(process, Endpoint("127.0.0.1", int(process.stdout.readline())))
            finally:
                process.kill()

    @asynccontextmanager
    async def mirror(self) -> AsyncIterator[Mirror]:
        key = fleet_key(self.token)
        async with Node.opened(self.folder / "mirror" / "state", key=key, trusted=key) as node:
            yield Mirror(self, node, SeedClient([self.token], instance=new_instance()))


@dataclass
class Mirror:
    """A node that has no stores but its own disk."""

    place: Place
    node: Node
    client: SeedClient

    async def adopts(self, release: str, *peers: Endpoint) -> Adoption:
        where = site(self.place.folder / "mirror", release)
        origins = [
            StoreOrigin(self.node.chain),
            PeerOrigin(self.client, peers, PATIENCE, environment=kind().environment(where)),
        ]
        state = where.state
        adopter = Adopter(origins, trust=self.node.trust, probation=Probation(state), state=state, budget=30.0)
        return await adopter.adopt(kind(), where)

    def check(self, adoption: Adoption) -> None:
        """See that the newer release is in place, byte for byte, and that nothing is left in staging."""
        assert adoption.outcome == "installed", adoption.refusals
        where = site(self.place.folder / "mirror", "new")
        assert tree(where.roots["inductor"]) == self.place.files
        assert list((where.state / "staging").iterdir()) == []


@pytest.fixture
def place(tmp_path: Path) -> Place:
    tmp_path.chmod(0o700)
    token_file = tmp_path / "token"
    write_token(token_file, new_token())
    (token,) = read_tokens(file=token_file, arguments=(), environ={})
    return Place(tmp_path, token_file, token, releases(tmp_path / "releases"))


def stored_bytes(adoption: Adoption) -> tuple[int, int]:
    """Bytes of the object and of its index, as a peer sends them whole."""
    manifest = adoption.manifest
    assert manifest is not None
    assert manifest.stored is not None
    assert manifest.index is not None
    return manifest.stored.length, manifest.index.length


def test_a_release_in_which_little_changed_moves_little(place: Place) -> None:
    async def main() -> None:
        with place.source("a") as a:
            async with place.mirror() as mirror:
                first = await mirror.adopts("old", a.peer)
                whole = a.sent()
                assert whole == sum(stored_bytes(first))
                second = await mirror.adopts("new", a.peer)
                mirror.check(second)
                length, index = stored_bytes(second)
                assert 0 < a.sent() - whole - index < 0.12 * length

    run(main())


def test_a_transfer_that_is_cut_goes_on_at_another_source_and_nothing_moves_twice(place: Place) -> None:
    async def main() -> None:
        with place.source("a") as a, place.source("b") as b:
            async with place.mirror() as mirror:
                await mirror.adopts("old", a.peer)
                before = a.sent()
                second = await mirror.adopts("new", a.peer)
                mirror.check(second)
                once = a.sent() - before
            shutil.rmtree(place.folder / "mirror")
            async with place.mirror() as mirror:
                await mirror.adopts("old", a.peer)
                pieces = once - stored_bytes(second)[1]
                async with chaos(a.peer, to_mirror=Faults(cut_after=pieces // 2)) as proxy:
                    mirror.check(await mirror.adopts("new", proxy.endpoint, b.peer))
                    arrived = sum(len(connection) for connection in proxy.sent_to_mirror)
                assert arrived > pieces // 2  # so the cut was in the middle of the pieces
                from_b = b.sent()
                assert 0 < from_b < pieces
                assert from_b + arrived < once + proxy.connections * OVERHEAD

    run(main())


def test_a_source_that_sends_other_bytes_is_followed_by_the_next(place: Place) -> None:
    async def main() -> None:
        with place.source("a") as a, place.source("liar", "wrong") as liar:
            async with place.mirror() as mirror:
                await mirror.adopts("old", a.peer)
                before = a.sent()
                second = await mirror.adopts("new", liar.peer, a.peer)
                mirror.check(second)
                assert [(refusal.origin, refusal.reason) for refusal in second.refusals] == [
                    (f"peer {liar.peer}", "digest")
                ]
                assert a.sent() - before < 0.3 * sum(stored_bytes(second))

    run(main())


def test_a_source_of_before_ranges_sends_the_whole(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def before_ranges(body: bytes) -> Request:
        request = decode_request(body)
        if isinstance(request, RangesRequest):
            raise ProtocolError("a malformed message: an unknown tag")
        return request

    monkeypatch.setattr(server, "decode_request", before_ranges)

    async def main() -> None:
        key = fleet_key(place.token)
        async with Node.opened(place.folder / "old-node" / "state", key=key, trusted=key) as node:
            for release in ("old", "new"):
                shutil.copytree(place.folder / "releases" / release, place.folder / "old-node" / release)
                await node.publish(kind(), site(place.folder / "old-node", release))
            async with node.serving(place.token) as peer, place.mirror() as mirror:
                await mirror.adopts("old", peer)
                mirror.check(await mirror.adopts("new", peer))

    run(main())
