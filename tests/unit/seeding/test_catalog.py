"""Finding the newest manifest in stores that can't list, whatever the hint says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
from tests.support.artifacts import KIND, NOW
from tests.support.channel import run

from warmseed.seeding.artifact import ArtifactKey
from warmseed.seeding.origins.catalog import MAX_CANDIDATES, WINDOW, Catalog
from warmseed.seeding.trust.keys import PublisherKey
from warmseed.seeding.trust.manifest import Manifest, sign_manifest
from warmseed.stores.chain import Chain
from warmseed.stores.disk import DiskStore
from warmseed.testing.fake_store import FakeStore

KEY = ArtifactKey(kind=KIND, config_hash="a" * 64, environment_hash="b" * 64)
SIGNER = PublisherKey("test", bytes(range(32)))
T = TypeVar("T")


def with_catalog(main: Callable[[Catalog, FakeStore], Awaitable[T]], *generations: int, head: str | None = None) -> T:
    """What `main` returns over a store that holds those generations and that hint."""
    store = FakeStore(objects={KEY.manifest_key(n): str(n).encode() for n in generations})
    if head is not None:
        store.objects[KEY.head_key] = head.encode()

    async def whole() -> T:
        return await main(Catalog(Chain(None, [store])), store)

    return run(whole())


async def _newest(catalog: Catalog, store: FakeStore) -> int:
    return await catalog.newest(KEY)


def _sign(generation: int) -> tuple[Manifest, bytes]:
    manifest = Manifest(
        schema=1,
        kind=KIND,
        store_key="k",
        config_hash=KEY.config_hash,
        config_digest="c" * 64,
        dp_rank=0,
        world_rank=0,
        device_index=-1,
        filename="f",
        sha256="d" * 64,
        length=1,
        environment={},
        generation=generation,
        issued_at=NOW,
        expires_at=NOW + 1,
        publisher="test",
    )
    return manifest, sign_manifest(manifest, [SIGNER])


@pytest.mark.parametrize(
    ("generations", "head", "newest"),
    [
        pytest.param((), None, 0, id="nothing"),
        pytest.param((), "7", 0, id="a hint at nothing"),
        pytest.param((1,), "1", 1, id="one"),
        pytest.param(range(1, 31), "30", 30, id="an honest hint"),
        pytest.param(range(1, 31), None, 30, id="a lost hint"),
        pytest.param(range(1, 31), "3", 30, id="a stale hint"),
        pytest.param(range(1, 31), "9000", 30, id="a lying hint"),
        pytest.param(range(1, 31), "9" * 19, 30, id="an absurd hint"),
        pytest.param(range(1, 31), "-1", 30, id="a negative hint"),
        pytest.param(range(1, 31), "1e3", 30, id="no number"),
        pytest.param((5, 6), "6", 6, id="older ones were pruned"),
        pytest.param((1, 2, 4, 9), "2", 9, id="holes smaller than a window"),
    ],
)
def test_the_newest_generation_is_found(generations: tuple[int, ...], head: str | None, newest: int) -> None:
    assert with_catalog(_newest, *generations, head=head) == newest


def test_a_hole_of_a_whole_window_hides_what_lies_behind_it_unless_the_hint_leads_there() -> None:
    behind = 2 + WINDOW
    assert with_catalog(_newest, 1, behind + 1, head="1") == 1
    assert with_catalog(_newest, 1, behind + 1, head=str(behind + 1)) == behind + 1


def test_an_honest_hint_costs_one_window_of_look_ups() -> None:
    async def main(catalog: Catalog, store: FakeStore) -> int:
        await catalog.newest(KEY)
        return store.count("stat")

    assert with_catalog(main, *range(1, 101), head="100") == 1 + WINDOW


def test_the_newest_few_come_newest_first_and_holes_are_passed_over() -> None:
    async def main(catalog: Catalog, store: FakeStore) -> list[bytes]:
        return [envelope async for envelope in catalog.envelopes(KEY)]

    assert with_catalog(main, *range(1, 11), head="10") == [b"10", b"9", b"8", b"7"]
    assert MAX_CANDIDATES == 4
    assert with_catalog(main, 1, 2, 4, head="4") == [b"4", b"2", b"1"]


def test_appending_goes_on_from_the_newest_and_never_below_what_this_node_knows() -> None:
    async def main(catalog: Catalog, store: FakeStore) -> list[int]:
        first, _ = await catalog.append(KEY, _sign)
        second, _ = await catalog.append(KEY, _sign)
        emptied = await catalog.append(KEY, _sign, known=41)  # the store was wiped since this node saw 41
        return [first.generation, second.generation, emptied[0].generation, int(store.objects[KEY.head_key])]

    assert with_catalog(main) == [1, 2, 42, 42]


def test_a_lying_hint_can_not_push_generations_up() -> None:
    async def main(catalog: Catalog, store: FakeStore) -> int:
        return (await catalog.append(KEY, _sign))[0].generation

    assert with_catalog(main, 1, 2, head="9000000") == 3


def test_two_publishers_at_once_leave_one_whole_manifest_and_a_next_generation_for_both(tmp_path: Path) -> None:
    async def main() -> None:
        shared = FakeStore()
        chains = [Chain(DiskStore(tmp_path / name), [shared]) for name in "ab"]
        both = await asyncio.gather(*(Catalog(chain).append(KEY, _sign) for chain in chains))
        for chain in chains:
            assert await chain.flush(10)
        written = {envelope for _, envelope in both}
        assert shared.objects[KEY.manifest_key(1)] in written
        assert [await Catalog(chain).newest(KEY) for chain in chains] == [1, 1]
        third, _ = await Catalog(chains[0]).append(KEY, _sign)
        assert third.generation == 2
        assert await chains[0].flush(10)
        assert (await Catalog(chains[1]).append(KEY, _sign))[0].generation == 3
        for chain in chains:
            await chain.aclose()

    run(main())


def test_the_highest_hint_of_all_tiers_counts(tmp_path: Path) -> None:
    """A node's own disk does not learn what others publish."""

    async def main() -> int:
        shared = FakeStore(objects={KEY.manifest_key(n): b"x" for n in range(1, 41)})
        shared.objects[KEY.head_key] = b"40"
        chain = Chain(DiskStore(tmp_path / "disk"), [shared])
        assert chain.disk is not None
        await chain.disk.put(KEY.head_key, b"1")
        newest = await Catalog(chain).newest(KEY)
        await chain.aclose()
        return newest

    assert run(main()) == 40
