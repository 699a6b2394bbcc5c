"""A source in a process of its own: publishes the caches below two folders, an older and a newer release, and serves.

``serve_bundles.py FOLDER TOKEN [wrong]`` prints its port; then, at each line that comes, how many bytes of objects it
has sent. With ``wrong`` one byte in each chunk of a bundle that it streams is another.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.support.fleet import Node
from tests.support.sites import make_site
from warmseed.blocking import run_blocking
from warmseed.seeding.channel.client import new_instance
from warmseed.seeding.channel.server import SeedServer
from warmseed.seeding.channel.source import Opened
from warmseed.seeding.kinds.base import Site
from warmseed.seeding.kinds.compiled.bundle import CompileCacheKind
from warmseed.seeding.kinds.compiled.capture import Quiet
from warmseed.seeding.kinds.compiled.inductor import InductorCache
from warmseed.seeding.origins.shelf import Shelf
from warmseed.seeding.trust.keys import PublisherKey
from warmseed.seeding.trust.token import MANIFEST_LABEL, Token, read_tokens

RELEASES = {"old": "a" * 64, "new": "b" * 64}  # folder -> configuration


def kind() -> CompileCacheKind:
    """The kind that both sides use."""
    return CompileCacheKind([InductorCache()], quiet=Quiet(settle=0.0))


def site(base: Path, release: str) -> Site:
    """A rank with its state below `base`, its caches in a folder for the release."""
    return make_site(base, root=base / release, caches=("inductor",), config_hash=RELEASES[release])


def fleet_key(token: Token) -> PublisherKey:
    """Whom the holders of `token` believe."""
    return PublisherKey("fleet", token.derive(MANIFEST_LABEL))


class Wrong(Shelf):
    """Sends other bytes than it has, of bundles alone: who gets no index does not come to ask for them."""

    @asynccontextmanager
    async def open(self, sha256: str, offset: int) -> AsyncIterator[Opened | None]:
        async with super().open(sha256, offset) as opened:
            if opened is not None and self._objects[sha256].store_key.endswith("bundle.tar"):
                opened = Opened(opened.length, _turned(opened.chunks))
            yield opened


async def _turned(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for chunk in chunks:
        yield bytes([chunk[0] ^ 1]) + chunk[1:]


async def main(folder: Path, token_file: Path, *, wrong: bool) -> None:
    """Publish and serve until standard input ends."""
    (token,) = read_tokens(file=token_file, arguments=(), environ={})
    key = fleet_key(token)
    async with Node.opened(folder / "state", key=key, trusted=key) as node:
        if wrong:
            node.shelf = Wrong(node.chain)
        for release in RELEASES:
            await node.publish(kind(), site(folder, release))
        server = SeedServer(node.shelf, [token], host="127.0.0.1", port=0, instance=new_instance())
        async with server.listening():
            print(server.addresses[0][1], flush=True)
            while await run_blocking(sys.stdin.readline):
                print(server.counters()["payload_bytes"], flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), wrong=sys.argv[3:] == ["wrong"]))
