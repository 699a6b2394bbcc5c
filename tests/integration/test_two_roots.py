"""A fleet whose nodes have their caches at two roots: each finds the newest bundle that works whole at its own."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
from tests.support.artifacts import run
from tests.support.fleet import FLEET_KEY, Node, artifact_key
from tests.support.sites import ENVIRONMENT, fill, make_site

from warmseed.seeding.adoption import Adoption
from warmseed.seeding.artifact import object_key
from warmseed.seeding.kinds.base import Site
from warmseed.seeding.kinds.compiled.bundle import CompileCacheKind
from warmseed.seeding.kinds.compiled.capture import Quiet
from warmseed.seeding.kinds.compiled.vllm import VllmCache
from warmseed.seeding.operator.golden import deny, list_artifacts, pin_generation
from warmseed.seeding.trust.keys import Keyring

VLLM = {**ENVIRONMENT, "vllm": "0.26.0"}  # whose AOT artifacts work at their own root only
TRUSTED = Keyring([FLEET_KEY.public])


def kind() -> CompileCacheKind:
    return CompileCacheKind([VllmCache()], quiet=Quiet(settle=0.0))


class Fleet:
    """A shared folder, and nodes that come and go."""

    def __init__(self, base: Path) -> None:
        self.base, self.nodes = base, 0
        self.store = base / "shared"
        self.store.mkdir()

    def site(self, root: str) -> Site:
        """A new node whose caches lie at `root`, where those of the one before it are gone."""
        self.nodes += 1
        folder = self.base / root
        shutil.rmtree(folder, ignore_errors=True)
        return make_site(self.base / f"node{self.nodes}", root=folder, caches=("vllm",), environment=VLLM)

    async def make(self, root: str) -> int:
        """A node at `root` compiles all by itself and publishes; the generation."""
        site = self.site(root)
        at = str(site.roots["vllm"]).encode()
        files = {
            "torch_aot_compile/ff/rank_0_0/model": b"opens its files at " + at,
            "torch_aot_compile/ff/inductor_cache/ab/k.py": b"found by hash, made by node %d" % self.nodes,
        }
        fill(site.roots["vllm"], files)
        async with self.node(site) as node:
            return (await node.publish(kind(), site)).manifest.generation

    def node(self, site: Site):  # type: ignore[no-untyped-def]
        return Node.opened(site.state, f"file:{self.store}")

    async def start(self, root: str) -> Adoption:
        site = self.site(root)
        async with self.node(site) as node:
            adoption: Adoption = await node.adopt(kind(), site)
        return adoption


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def ending(adoption: Adoption) -> tuple[int, bool]:
    """The generation that was adopted, and whether it was all that engines want."""
    assert adoption.manifest is not None, adoption.refusals
    return adoption.manifest.generation, adoption.complete


def test_each_root_gets_the_newest_bundle_that_works_whole_there(fleet: Fleet) -> None:
    async def main() -> None:
        assert [await fleet.make(root) for root in ("here", "there", "there", "here", "there")] == [1, 2, 3, 4, 5]
        assert ending(await fleet.start("here")) == (4, True)
        assert ending(await fleet.start("there")) == (5, True)

    run(main())


def test_where_none_works_whole_the_newest_serves_in_part_and_nothing_counts_as_refused(fleet: Fleet) -> None:
    async def main() -> None:
        for root in ("here", "there"):
            await fleet.make(root)
        adoption = await fleet.start("elsewhere")
        assert ending(adoption) == (2, False)
        assert adoption.refusals == ()

    run(main())


def test_a_pin_and_a_denial_decide_before_what_would_work_whole(fleet: Fleet) -> None:
    async def main() -> None:
        for root in ("here", "there"):
            await fleet.make(root)
        now = int(time.time())
        site = fleet.site("operator")
        async with fleet.node(site) as node:
            found = {item.manifest.generation: item async for item in list_artifacts(node.chain, TRUSTED)}
            await pin_generation(node.chain, [FLEET_KEY], TRUSTED, found[2], publisher="op", now=now)
            assert ending(await fleet.start("here")) == (2, False)
            await pin_generation(node.chain, [FLEET_KEY], TRUSTED, found[1], publisher="op", now=now)
            assert ending(await fleet.start("there")) == (1, False)
            digest = found[1].manifest.sha256
            await deny(
                node.chain, [FLEET_KEY], kind=kind().name, sha256=digest, reason="crashes", publisher="op", now=now
            )
            (fleet.store / found[1].key.pin_key).unlink()
        assert ending(await fleet.start("here")) == (2, False)

    run(main())


def test_an_index_that_is_lost_costs_its_generation_only(fleet: Fleet) -> None:
    async def main() -> None:
        for root in ("here", "there", "here"):
            await fleet.make(root)
        site = fleet.site("operator")
        async with fleet.node(site) as node:
            newest = [item async for item in list_artifacts(node.chain, TRUSTED)][-1]
        assert newest.manifest.generation == 3
        assert newest.key == artifact_key(kind(), site)
        assert newest.manifest.index is not None
        (fleet.store / object_key(newest.manifest.index.sha256)).unlink()
        adoption = await fleet.start("here")
        assert ending(adoption) == (1, True)
        assert [refusal.reason for refusal in adoption.refusals] == ["missing"]

    run(main())
