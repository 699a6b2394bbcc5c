"""Peers as an origin: over the real channel, to real shelves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from tests.support.artifacts import FLEET, STRANGER, TABLE, SeedNode, run
from tests.support.channel import a_client, a_token, serving

from warmseed.seeding.channel.endpoint import Endpoint
from warmseed.seeding.channel.messages import PAYLOAD_BYTES
from warmseed.seeding.channel.source import Opened
from warmseed.seeding.channel.sources import Patience
from warmseed.seeding.origins.origins import PeerOrigin
from warmseed.seeding.origins.shelf import Shelf
from warmseed.seeding.trust.keys import PublisherKey
from warmseed.seeding.trust.token import Token

LARGE = bytes(range(256)) * (PAYLOAD_BYTES // 256 + 1)
PATIENCE = Patience(wait_seconds=10.0, pause_seconds=0.02, appear_seconds=0.5)


class CutShelf(Shelf):
    """Breaks off every transfer after 1 MiB, as a source that is killed does."""

    cuts = 0

    @asynccontextmanager
    async def open(self, sha256: str, offset: int) -> AsyncIterator[Opened | None]:
        async with super().open(sha256, offset) as opened:
            yield None if opened is None else Opened(opened.length, self._cut(opened.chunks))

    async def _cut(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        sent = 0
        async for chunk in chunks:
            yield chunk
            sent += len(chunk)
            if sent >= 1 << 20:
                self.cuts += 1
                return


@asynccontextmanager
async def source(
    base: Path, token: Token, payload: bytes, *, key: PublisherKey = FLEET, shelf: type[Shelf] = Shelf
) -> AsyncIterator[tuple[Shelf, Endpoint]]:
    """A node that has published `payload` and serves it."""
    node = SeedNode(base, keys=(key,))
    served = shelf(node.chain)
    published = await node.publish(payload)
    served.put(node.key, published.envelope, published.manifest)
    async with serving(served, [token]) as (_, peer):  # type: ignore[arg-type]
        yield served, peer
    await node.chain.aclose()


async def origin(token: Token, peers: Sequence[Endpoint], node: SeedNode) -> PeerOrigin:
    return PeerOrigin(await a_client(token), peers, PATIENCE, environment=node.site.environment)


async def adopts(node: SeedNode, origin: PeerOrigin) -> Any:
    return await node.adopter(origin).adopt(node.kind, node.site)


def test_a_small_payload_comes_with_its_description_and_is_kept(tmp_path: Path) -> None:
    async def main() -> None:
        token, mirror = a_token(), SeedNode(tmp_path / "mirror", keys=(FLEET,))
        async with source(tmp_path / "source", token, TABLE) as (shelf, peer):
            shelf.open = None  # type: ignore[assignment, method-assign]  # nobody may ask for the bytes apart
            adoption = await adopts(mirror, await origin(token, [peer], mirror))
        assert adoption.origin == f"peer {peer}"
        assert mirror.kind.installed == [TABLE]
        # On its own disk now, so the next start needs no peer.
        again = SeedNode(tmp_path / "mirror", keys=(FLEET,))
        assert (await again.adopter().adopt(again.kind, again.site)).origin == "disk"
        for node in (mirror, again):
            await node.chain.aclose()

    run(main())


def test_a_transfer_that_is_cut_is_taken_up_where_it_stopped(tmp_path: Path) -> None:
    async def main() -> None:
        token, mirror = a_token(), SeedNode(tmp_path / "mirror", keys=(FLEET,))
        async with source(tmp_path / "source", token, LARGE, shelf=CutShelf) as (shelf, peer):
            adoption = await adopts(mirror, await origin(token, [peer], mirror))
        assert adoption.outcome == "installed", adoption.refusals
        assert mirror.kind.installed == [LARGE]
        assert isinstance(shelf, CutShelf)
        assert shelf.cuts >= 8
        assert list((mirror.site.state / "staging").iterdir()) == []
        await mirror.chain.aclose()

    run(main())


def test_a_peer_whose_word_is_refused_is_followed_by_the_next(tmp_path: Path) -> None:
    async def main() -> None:
        token, mirror = a_token(), SeedNode(tmp_path / "mirror", keys=(FLEET,))
        async with AsyncExitStack() as stack:
            _, bad = await stack.enter_async_context(source(tmp_path / "bad", token, b"evil", key=STRANGER))
            _, good = await stack.enter_async_context(source(tmp_path / "good", token, TABLE))
            adoption = await adopts(mirror, await origin(token, [bad, good], mirror))
        assert [(r.origin, r.reason) for r in adoption.refusals] == [(f"peer {bad}", "signature")]
        assert mirror.kind.installed == [TABLE]
        await mirror.chain.aclose()

    run(main())


def test_a_peer_with_another_token_is_a_reason_not_a_failure(tmp_path: Path) -> None:
    async def main() -> None:
        mirror = SeedNode(tmp_path / "mirror", keys=(FLEET,))
        async with source(tmp_path / "source", a_token(), TABLE) as (_, peer):
            adoption = await adopts(mirror, await origin(a_token(), [peer], mirror))
        assert [refusal.reason for refusal in adoption.refusals] == ["unavailable"]
        assert adoption.outcome == "none"
        await mirror.chain.aclose()

    run(main())
