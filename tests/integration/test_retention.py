"""What a store no longer needs goes, and nobody who reads from it notices."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import boto3
import msgspec
import pytest
from tests.support.artifacts import FLEET, KIND, STRANGER, SeedNode
from tests.support.fleet import Node
from tests.support.sites import ENVIRONMENT, fill, make_site, tree
from tests.support.tables import put_local, table_site, table_text
from typer.testing import CliRunner

from warmseed.daemon.cli.main import app
from warmseed.daemon.rank.fleet_keys import fleet_keys
from warmseed.errors import ConfigurationError, WarmseedError
from warmseed.seeding.artifact import NAMESPACE, ArtifactKey, bundle_key, denial_key, object_key
from warmseed.seeding.kinds.autotune.kind import FlashInferAutotune
from warmseed.seeding.kinds.compiled.bundle import CompileCacheKind
from warmseed.seeding.kinds.compiled.capture import Quiet
from warmseed.seeding.kinds.compiled.inductor import InductorCache
from warmseed.seeding.operator import sweep
from warmseed.seeding.operator.golden import deny, list_artifacts, pin_generation, roll_back
from warmseed.seeding.operator.retention import Plan, Retention
from warmseed.seeding.operator.sweep import Removed, carry_out, plan_stores
from warmseed.seeding.trust.judge import DAY, Trust
from warmseed.seeding.trust.keys import Keyring, PublisherKey
from warmseed.seeding.trust.manifest import sign_manifest, verify_manifest
from warmseed.seeding.trust.token import new_token, read_tokens, write_token
from warmseed.stores.base import ObjectInfo, PrunableStore, Store
from warmseed.stores.chain import Chain
from warmseed.stores.contained import Contained
from warmseed.stores.disk import DiskStore
from warmseed.stores.errors import StoreError
from warmseed.stores.folder import FolderStore
from warmseed.stores.registry import open_store
from warmseed.testing.fake_store import FakeStore

TODAY = int(time.time())  # stores date what is written by their own clock
LATER = TODAY + 2 * DAY
TRUSTED = Keyring([FLEET.public])
BUNDLE = CompileCacheKind([InductorCache()], quiet=Quiet(settle=0.0, deadline=5.0))
NO_ENVIRONMENT: dict[str, str] = {}
Opener = Callable[[], Awaitable[Store]]


class AgedFake(FakeStore):
    """A fake store that knows the age of what it holds, and takes back only so many objects."""

    patience = 1 << 30  # deletions before it fails
    rewritten = ""  # the object that somebody writes again after every listing

    async def _stat(self, key: str) -> ObjectInfo | None:
        info = await super()._stat(key)
        return None if info is None else replace(info, modified=float(LATER if key == self.rewritten else TODAY))

    async def _list(self, prefix: str):  # type: ignore[no-untyped-def]
        async for info in super()._list(prefix):
            yield replace(info, modified=TODAY + 0.345)  # as object stores do that state whole seconds elsewhere

    async def _delete(self, key: str) -> bool:
        if self.patience == 0:
            raise ConnectionResetError
        self.patience -= 1
        return await super()._delete(key)


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    folder = tmp_path / "shared"
    folder.mkdir()
    return FolderStore(folder)


@pytest.fixture(params=["file", "redis", "s3"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of an empty store of each kind that can be listed."""
    if request.param == "file":
        (tmp_path / "shared").mkdir()
        return f"file:{tmp_path}/shared"
    if request.param == "redis":
        return f"redis://127.0.0.1:{request.getfixturevalue('redis_port')}/0?prefix={tmp_path.name}/"
    endpoint: str = request.getfixturevalue("s3_endpoint")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    raw = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
    raw.create_bucket(Bucket="retention")
    raw.close()
    return f"s3://retention/{tmp_path.name}?endpoint={endpoint}&region=us-east-1"


def maker(base: Path, *stores: Store, key: PublisherKey = FLEET, now: int = TODAY, gpu: str = "cpu") -> SeedNode:
    return SeedNode(base, stores, (key,), now=now, environment={**ENVIRONMENT, "device": gpu})


async def publish(node: SeedNode, *payloads: bytes) -> list[str]:
    return [(await node.publish(payload)).manifest.sha256 for payload in payloads]


async def adopted(base: Path, *stores: Store, gpu: str = "cpu", key: PublisherKey = FLEET) -> bytes | None:
    """What a new node installs from the stores at `LATER`."""
    node = maker(base, *stores, now=LATER, gpu=gpu, key=key)
    await node.adopter().adopt(node.kind, node.site)
    return node.kind.installed[-1] if node.kind.installed else None


async def keys(store: Store) -> set[str]:
    assert isinstance(store, PrunableStore)
    return {info.key async for info in store.list()}


async def numbers(store: Store, key: ArtifactKey) -> list[int]:
    """The generations of which a manifest is there."""
    names = [name.removeprefix(f"{key.manifest_folder}/") for name in await keys(store)]
    return sorted(int(name[:-5]) for name in names if name[:-5].isdigit())


async def planned(*stores: Store, now: int = LATER, **wanted: object) -> list[Plan]:
    retention = Retention(**{"keep": 1, **wanted})  # type: ignore[arg-type]
    found, _ = await plan_stores(stores, Trust(TRUSTED), retention, now=now)
    return [one.plan for one in found]


async def collect(
    *stores: Store,
    now: int = LATER,
    trust: Trust | None = None,
    meanwhile: Callable[[], Awaitable[object]] | None = None,
    **wanted: object,
) -> list[Removed]:
    """Remove what is planned, `meanwhile` something happens between the plan and the deed."""
    trust = trust or Trust(TRUSTED)
    retention = Retention(**{"keep": 1, **wanted})  # type: ignore[arg-type]
    found, judgement = await plan_stores(stores, trust, retention, now=now)
    if meanwhile is not None:
        await meanwhile()
    return [await carry_out(one, judgement, trust, retention, now=now) for one in found]


def age(store: FolderStore, *names: str, days: float) -> None:
    """Have the file system say that these objects, or all, were written so long ago."""
    for name in names or tree(store.folder):
        os.utime(store.folder / name, (TODAY - days * DAY, TODAY - days * DAY))


# What stays and what goes --------------------------------------------------------------------------------


def test_a_node_adopts_the_newest_from_a_store_that_was_collected(tmp_path: Path, any_store: str) -> None:
    texts = [b"table %d" % number * 100 for number in range(1, 6)]

    async def main() -> None:
        store = await open_store(any_store, environment=NO_ENVIRONMENT)
        try:
            node = maker(tmp_path / "maker", store)
            digests = await publish(node, *texts)
            before = await keys(store)
            (plan,) = await planned(store, keep=2)
            assert await keys(store) == before, "looking changed something"
            (removed,) = await collect(store, keep=2)
            assert removed.items == list(plan.items)
            expected = {node.key.manifest_key(number) for number in (1, 2, 3)}
            expected |= {object_key(digest) for digest in digests[:3]}
            assert before - await keys(store) == expected
            assert removed.nbytes == sum(item.info.size for item in removed.items) > 3 * 700
            assert await adopted(tmp_path / "new", store) == texts[-1]
            assert (await planned(store, keep=2))[0].items == ()
        finally:
            await store.aclose()

    asyncio.run(main())


def test_bundles_of_which_files_were_shared_stay_whole(tmp_path: Path, store: FolderStore) -> None:
    """Payload, file index and the configuration's factors: each generation has all of its own, whoever shares them."""
    versions = [
        {"ab/cab.py": b"print(1)\n", f"ab/{number}.so": b"\x7fELF" + bytes([number]) * 3000} for number in (1, 2, 3)
    ]

    async def main() -> None:
        for number, files in enumerate(versions):
            site = make_site(tmp_path / f"maker{number}", caches=("inductor",))
            fill(site.roots["inductor"], files)
            async with Node.opened(site.state, f"file:{store.folder}", key=FLEET, trusted=FLEET) as node:
                await node.publish(BUNDLE, site)
        (removed,) = await collect(store)
        assert sorted(item.info.key.split("/")[1] for item in removed.items) == (
            ["compile_cache"] * 2 + ["manifest"] * 2 + ["object"] * 2
        )
        site = make_site(tmp_path / "new", caches=("inductor",))
        async with Node.opened(site.state, f"file:{store.folder}", key=FLEET, trusted=FLEET) as node:
            assert (await node.adopt(BUNDLE, site)).outcome == "installed"
        assert tree(site.roots["inductor"]) == versions[-1]

    asyncio.run(main())


def test_what_is_pinned_stays_with_the_way_back_from_it(tmp_path: Path, store: FolderStore) -> None:
    async def main() -> None:
        node = maker(tmp_path / "maker", store)
        await publish(node, b"one" * 99, b"two" * 99, b"three" * 99, b"four" * 99, b"five" * 99)
        chain = Chain(None, [store])
        for wanted in (2, 3):
            async for found in list_artifacts(chain, TRUSTED):
                if found.manifest.generation == wanted:
                    await pin_generation(chain, [FLEET], TRUSTED, found, publisher="op", now=TODAY)
        await collect(store)
        assert await numbers(store, node.key) == [2, 3, 5]
        assert await adopted(tmp_path / "new", store) == b"three" * 99
        await roll_back(chain, [FLEET], TRUSTED, node.key, publisher="op", now=TODAY + 1)
        assert await adopted(tmp_path / "back", store) == b"two" * 99

    asyncio.run(main())


def test_a_pin_that_comes_meanwhile_is_heeded(tmp_path: Path, store: FolderStore) -> None:
    async def main() -> None:
        node = maker(tmp_path / "maker", store)
        await publish(node, b"one" * 99, b"two" * 99, b"three" * 99)
        chain = Chain(None, [store])
        found = {item.manifest.generation: item async for item in list_artifacts(chain, TRUSTED)}

        async def pin() -> None:
            await pin_generation(chain, [FLEET], TRUSTED, found[1], publisher="op", now=TODAY)

        await collect(store, meanwhile=pin)
        assert await numbers(store, node.key) == [1, 3]
        assert await adopted(tmp_path / "new", store) == b"one" * 99

    asyncio.run(main())


def test_a_denied_generation_does_not_count(tmp_path: Path, store: FolderStore) -> None:
    async def main() -> None:
        node = maker(tmp_path / "maker", store)
        digests = await publish(node, b"one" * 99, b"two" * 99, b"bad" * 99)
        chain = Chain(None, [store])
        await deny(chain, [FLEET], kind=KIND, sha256=digests[-1], reason="crashes", publisher="op", now=TODAY)
        await collect(store)
        assert await numbers(store, node.key) == [2, 3], "the highest number stays: the next one counts on from it"
        assert denial_key(digests[-1]) in await keys(store)
        assert await adopted(tmp_path / "new", store) == b"two" * 99
        await publish(node, b"four" * 99)
        await collect(store)
        assert await numbers(store, node.key) == [4]
        assert object_key(digests[-1]) not in await keys(store)

    asyncio.run(main())


def test_what_another_fleet_published_is_not_touched(tmp_path: Path, store: FolderStore) -> None:
    """Two fleets share a store, and one payload; the other's keys are not known here."""

    async def main() -> None:
        theirs = maker(tmp_path / "theirs", store, key=STRANGER, gpu="theirs")
        await publish(theirs, b"shared" * 99, b"two" * 99, b"three" * 99)
        before = tree(store.folder)
        await publish(maker(tmp_path / "ours", store, gpu="ours"), b"shared" * 99, b"newer" * 99)
        (removed,) = await collect(store)
        assert [item.what for item in removed.items] == ["generation"]
        assert before.items() <= tree(store.folder).items()
        assert await adopted(tmp_path / "new", store, gpu="theirs", key=STRANGER) == b"three" * 99

    asyncio.run(main())


def test_a_payload_that_two_artifacts_share_goes_with_the_last_of_them(tmp_path: Path, store: FolderStore) -> None:
    async def main() -> None:
        first, second = maker(tmp_path / "a", store, gpu="a"), maker(tmp_path / "b", store, gpu="b")
        (shared,) = await publish(second, b"shared" * 99)
        await publish(first, b"shared" * 99, b"newer" * 99)
        await collect(store)
        assert await adopted(tmp_path / "new", store, gpu="b") == b"shared" * 99
        await publish(second, b"newest" * 99)
        await collect(store)
        assert object_key(shared) not in await keys(store)

    asyncio.run(main())


def test_a_prefix_narrows_down_whose_generations_go(tmp_path: Path, store: FolderStore) -> None:
    async def main() -> None:
        node = maker(tmp_path / "maker", store)
        await publish(node, b"one" * 99, b"two" * 99)
        for prefix in ("other_kind", f"{KIND}/{'b' * 64}", f"{KIND}/{'a' * 64}x"):
            assert (await planned(store, prefix=prefix))[0].items == ()
        for prefix in (KIND, f"{KIND}/{'a' * 12}"):
            assert [item.what for item in (await planned(store, prefix=prefix))[0].items] == ["generation", "object"]

    asyncio.run(main())


def test_ranks_keep_the_run_that_all_of_them_have(tmp_path: Path, store: FolderStore) -> None:
    """They adopt one run together or none; the newest of one rank may be of a run that the other never published."""

    async def main() -> None:
        ranks = [table_site(tmp_path / f"rank{rank}", world_rank=rank) for rank in (0, 1)]
        kind, tactic = FlashInferAutotune(), 0
        for run, present in (("old", (0, 1)), ("both", (0, 1)), ("torn", (0,))):
            for rank in present:
                tactic += 1
                put_local(ranks[rank], table_text(4, tactic=tactic))
                async with Node.opened(ranks[rank].state, f"file:{store.folder}", key=FLEET, trusted=FLEET) as node:
                    await node.publish(kind, ranks[rank], run=run)
        await collect(store)
        left = sorted(
            [(item.key.world_rank, item.manifest.run) async for item in list_artifacts(Chain(None, [store]), TRUSTED)]
        )
        assert left == [(0, "both"), (0, "torn"), (1, "both")]

    asyncio.run(main())


def test_a_generation_that_is_not_complete_does_not_push_out_one_that_is(tmp_path: Path, store: FolderStore) -> None:
    """A store may have missed a payload: its queue was full, or it evicts."""

    async def main() -> None:
        digests = await publish(maker(tmp_path / "maker", store), b"one" * 99, b"two" * 99, b"lost" * 99)
        await store.delete(object_key(digests[-1]))
        await collect(store)
        assert await adopted(tmp_path / "new", store) == b"two" * 99

    asyncio.run(main())


def test_the_disk_is_collected_too_except_for_what_it_pins_itself(tmp_path: Path, store: FolderStore) -> None:
    async def main() -> None:
        node = maker(tmp_path / "maker", store)
        digests = await publish(node, b"one" * 99, b"two" * 99, b"three" * 99)
        disk = node.chain.disk
        assert isinstance(disk, DiskStore)
        await disk.pin(object_key(digests[0]))
        await collect(*node.chain.all_tiers())
        assert await numbers(disk, node.key) == await numbers(store, node.key) == [3]
        left = await keys(disk)
        assert [object_key(digest) in left for digest in digests] == [True, False, True]

    asyncio.run(main())


# Age -----------------------------------------------------------------------------------------------------


def test_nothing_is_touched_before_its_time(tmp_path: Path, store: FolderStore) -> None:
    async def main() -> None:
        await publish(maker(tmp_path / "maker", store), b"one" * 99, b"two" * 99)
        await store.put(object_key("e" * 64), b"what a killed publisher left, or one is about to name")
        (plan,) = await planned(store, now=TODAY + 3600)
        assert (plan.items, plan.young) == ((), 2)
        assert len((await planned(store, now=TODAY + 3600, older_than=1800.0))[0].items) == 3

    asyncio.run(main())


def test_an_object_that_is_written_again_stays_for_the_publication_that_is_under_way(
    tmp_path: Path, store: FolderStore
) -> None:
    async def main() -> None:
        node = maker(tmp_path / "maker", store)
        digests = await publish(node, b"one" * 99, b"two" * 99)
        age(store, days=3)

        async def again() -> None:
            await store.put(object_key(digests[0]), b"one" * 99)

        (removed,) = await collect(store, now=TODAY, meanwhile=again)
        assert [item.what for item in removed.items] == ["generation"]
        assert object_key(digests[0]) in await keys(store)
        await again()
        assert (await planned(store, now=TODAY))[0].items == ()

    asyncio.run(main())


def test_an_object_that_is_written_again_when_it_is_about_to_go_stays(tmp_path: Path) -> None:
    store = AgedFake()

    async def main() -> None:
        digests = await publish(maker(tmp_path / "maker", store), b"one" * 99, b"two" * 99)
        store.rewritten = object_key(digests[0])
        (removed,) = await collect(store)
        assert [item.what for item in removed.items] == ["generation"]
        assert store.rewritten in store.objects

    asyncio.run(main())


def test_an_object_that_a_new_manifest_names_meanwhile_stays(tmp_path: Path, store: FolderStore) -> None:
    """A copy writes only what its target lacks: here the payload is there already, and old."""

    async def main() -> None:
        node = maker(tmp_path / "maker", store)
        await publish(node, b"one" * 99, b"two" * 99)
        envelope = await store.get(node.key.manifest_key(1), limit=1 << 16)
        assert envelope is not None
        manifest, _ = verify_manifest(envelope, TRUSTED)

        async def copy() -> None:
            third = msgspec.structs.replace(manifest, generation=3)
            await store.put(node.key.manifest_key(3), sign_manifest(third, [FLEET]))
            await store.put(node.key.head_key, b"3")

        (removed,) = await collect(store, meanwhile=copy)
        assert [item.what for item in removed.items] == ["generation"]
        assert await adopted(tmp_path / "new", store) == b"one" * 99

    asyncio.run(main())


def test_a_store_that_does_not_know_ages_keeps_everything_and_it_is_said(tmp_path: Path) -> None:
    store = FakeStore()

    async def main() -> None:
        await publish(maker(tmp_path / "maker", store), b"one" * 99, b"two" * 99)
        (plan,) = await planned(store)
        assert (plan.items, plan.ageless) == ((), 1)

    asyncio.run(main())


def test_an_artifact_that_nobody_publishes_any_more_leaves_its_number_alone(tmp_path: Path, store: FolderStore) -> None:
    """The last manifest is some 2 KB; without it the numbers would begin again, and nodes would take that for old."""

    async def main() -> None:
        node = maker(tmp_path / "maker", store)
        await publish(node, b"one" * 99, b"two" * 99)
        kept = {node.key.manifest_key(2), node.key.head_key}
        assert (await planned(store, keep=2, now=TODAY + 30 * DAY + 60))[0].items == (), "a clock may be a little wrong"
        await collect(store, keep=2, now=TODAY + 31 * DAY)
        assert await keys(store) == kept
        assert (await planned(store, now=TODAY + 31 * DAY))[0].items == ()
        other = maker(tmp_path / "other", store, now=TODAY + 31 * DAY)
        await publish(other, b"three" * 99)
        assert await numbers(store, node.key) == [2, 3]

    asyncio.run(main())


def test_pins_and_denials_go_when_they_and_all_they_replaced_are_over(tmp_path: Path, store: FolderStore) -> None:
    """A pin that takes another back is over from the start, but the other may still lie on some node's disk."""

    async def main() -> None:
        node = maker(tmp_path / "maker", store)
        digests = await publish(node, b"one" * 99, b"two" * 99)
        chain = Chain(None, [store])
        async for found in list_artifacts(chain, TRUSTED):
            if found.manifest.generation == 1:
                await pin_generation(chain, [FLEET], TRUSTED, found, publisher="op", now=TODAY)
        await roll_back(chain, [FLEET], TRUSTED, node.key, publisher="op", now=TODAY)
        await deny(chain, [FLEET], kind=KIND, sha256=digests[0], reason="bad", publisher="op", now=TODAY)
        statements = {node.key.pin_key, denial_key(digests[0])}
        await collect(store, now=TODAY + 29 * DAY)
        assert statements <= await keys(store)
        await collect(store, now=TODAY + 31 * DAY)
        assert not statements & await keys(store)

    asyncio.run(main())


def test_what_strangers_say_for_ever_stays(tmp_path: Path, store: FolderStore) -> None:
    async def main() -> None:
        node = maker(tmp_path / "maker", store)
        (digest, *_) = await publish(node, b"one" * 99, b"two" * 99, b"three" * 99)
        chain = Chain(None, [store])
        found = {item.manifest.generation: item async for item in list_artifacts(chain, TRUSTED)}
        await pin_generation(chain, [STRANGER], TRUSTED, found[1], publisher="op", now=TODAY)
        await deny(chain, [STRANGER], kind=KIND, sha256=digest, reason="bad", publisher="op", now=TODAY)
        await collect(store, now=TODAY + 40 * DAY)
        left = await keys(store)
        assert {node.key.pin_key, denial_key(digest), node.key.manifest_key(1), object_key(digest)} <= left
        await store.put(node.key.pin_key, b"not a pin at all")
        age(store, days=60)
        assert (await planned(store))[0].items == (), "nobody knows what that pin names"

    asyncio.run(main())


# What must not go wrong ----------------------------------------------------------------------------------


def test_a_reader_without_a_hint_still_finds_the_newest_and_numbers_go_on(tmp_path: Path, store: FolderStore) -> None:
    async def main() -> None:
        node = maker(tmp_path / "maker", store)
        await publish(node, *(b"table %d" % number for number in range(1, 31)))
        await collect(store)
        assert await numbers(store, node.key) == [8, 16, 24, 30]
        for hint in (None, b"3", b"17", b"31", b"9" * 19):
            if hint is None:
                await store.delete(node.key.head_key)
            else:
                await store.put(node.key.head_key, hint)
            assert await adopted(tmp_path / f"new{hint!r}", store) == b"table 30"
        await store.delete(node.key.head_key)
        await publish(maker(tmp_path / "next", store), b"table 31")
        assert (await numbers(store, node.key))[-1] == 31

    asyncio.run(main())


def test_a_run_that_is_cut_off_leaves_every_manifest_its_objects_and_the_next_completes_it(tmp_path: Path) -> None:
    texts = [b"table %d" % number * 100 for number in range(1, 12)]

    async def main() -> None:
        filled = AgedFake()
        node = maker(tmp_path / "maker", filled)
        await publish(node, *texts)
        (plan,) = await planned(filled, keep=2)
        whole = AgedFake(objects=dict(filled.objects))
        await collect(whole, keep=2)
        for cut in range(len(plan.items)):
            store = AgedFake("cut", objects=dict(filled.objects))
            store.patience = cut
            with pytest.raises(StoreError, match=f"by then {cut} of {len(plan.items)} objects") as failure:
                await collect(store, keep=2)
            assert "cut: delete" in str(failure.value)
            for number in await numbers(store, node.key):
                manifest, _ = verify_manifest(store.objects[node.key.manifest_key(number)], TRUSTED)
                assert manifest.store_key in store.objects, f"cut off after {cut}, generation {number} has no payload"
            assert await adopted(tmp_path / f"new{cut}", store) == texts[-1]
            store.patience = 1 << 30
            await collect(store, keep=2)
            assert store.objects == whole.objects

    asyncio.run(main())


@pytest.mark.parametrize(
    "name", ["5.json", "v2/1.json", "note", "5.json.new"], ids=["broken", "deeper", "unknown", "suffix"]
)
def test_a_manifest_that_cannot_be_read_keeps_everything_it_might_refer_to(
    tmp_path: Path, store: FolderStore, name: str
) -> None:
    async def main() -> None:
        node = maker(tmp_path / "maker", store)
        digests = await publish(node, b"one" * 99, b"two" * 99)
        strange = f"{NAMESPACE}/manifest/{KIND}/{'c' * 64}/{'d' * 64}/dp0_rank0/{name}"
        await store.put(strange, b'{"schema": 2}')
        (plan,) = await planned(store)
        assert ([item.what for item in plan.items], plan.held) == (["generation"], 1)
        await collect(store)
        assert object_key(digests[0]) in await keys(store)
        await store.delete(strange)
        await collect(store)
        assert object_key(digests[0]) not in await keys(store)

    asyncio.run(main())


def test_a_manifest_that_cannot_be_read_any_more_when_it_is_the_objects_turn_keeps_them(
    tmp_path: Path, store: FolderStore
) -> None:
    async def main() -> None:
        node = maker(tmp_path / "maker", store)
        await publish(node, b"one" * 99, b"two" * 99)

        async def break_in() -> None:
            await store.put(node.key.manifest_key(3), b"of a newer release")

        (removed,) = await collect(store, meanwhile=break_in)
        assert [item.what for item in removed.items] == ["generation"]

    asyncio.run(main())


def test_what_warmseed_did_not_write_stays(tmp_path: Path, store: FolderStore) -> None:
    """Stock vLLM keeps its own bundles and tables in the same places."""
    foreign = {
        bundle_key("1" * 64): b"a plain tar, as stock vLLM writes it",
        f"{NAMESPACE}/flashinfer_autotune/{'a' * 64}/rank_0.json": b"a table",
        f"{NAMESPACE}/object/not-a-digest": b"?",
        f"{NAMESPACE}/README": b"do not delete",
        "another/tenant": b"of the same bucket",
    }
    garbage = {bundle_key("2" * 64): b"\x28\xb5\x2f\xfd of a killed publisher", object_key("3" * 64): b"as well"}

    async def main() -> None:
        for key, data in {**foreign, **garbage}.items():
            await store.put(key, data)
        (removed,) = await collect(store)
        assert {item.info.key for item in removed.items} == set(garbage)
        assert tree(store.folder) == foreign

    asyncio.run(main())


def test_the_table_that_lies_ready_for_stock_vllm_goes_when_it_is_ours_and_over(
    tmp_path: Path, store: FolderStore
) -> None:
    async def main() -> None:
        kind, site = FlashInferAutotune(), table_site(tmp_path / "maker")
        put_local(site, table_text(4))
        async with Node.opened(site.state, f"file:{store.folder}", key=FLEET, trusted=FLEET) as node:
            await node.publish(kind, site)
            await node.publish(kind, site)
        (reference,) = [key for key in await keys(store) if key.startswith(f"{NAMESPACE}/flashinfer_autotune/")]
        table = await store.get(reference, limit=1 << 20)
        assert table == table_text(4)
        assert [item.what for item in (await planned(store))[0].items] == ["generation"]
        over = TODAY + 40 * DAY
        assert reference in {item.info.key for item in (await planned(store, now=over))[0].items}
        await store.put(reference, table[::-1])  # stock vLLM tuned anew
        await collect(store, now=over)
        assert reference in await keys(store)
        assert not any("/object/" in key for key in await keys(store))

    asyncio.run(main())


def test_a_store_that_cannot_list_is_refused_before_anything_goes(tmp_path: Path, store: FolderStore) -> None:
    async def main() -> None:
        await publish(maker(tmp_path / "maker", store), b"one" * 99, b"two" * 99)
        before = await keys(store)
        with pytest.raises(ConfigurationError, match="silent can't list what it holds"):
            await collect(store, Contained(FakeStore("silent")))
        broken = FakeStore("broken")
        broken.faults.drop = True
        with pytest.raises(StoreError, match=r"broken: list.*nothing was removed from any store"):
            await collect(store, broken)
        assert await keys(store) == before

    asyncio.run(main())


def test_a_store_that_holds_more_than_is_looked_at_is_left_alone(
    tmp_path: Path, store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies beyond the limit might refer to anything."""

    async def main() -> None:
        await publish(maker(tmp_path / "maker", store), b"one" * 99, b"two" * 99)
        before = await keys(store)
        monkeypatch.setattr(sweep, "_LISTED", len(before) - 1)
        with pytest.raises(StoreError, match=f"holds more than {len(before) - 1} objects"):
            await collect(store)
        assert await keys(store) == before
        monkeypatch.setattr(sweep, "_LISTED", len(before))
        assert len((await planned(store))[0].items) == 2

    asyncio.run(main())


# The command ---------------------------------------------------------------------------------------------


@pytest.fixture
def options(tmp_path: Path, store: FolderStore) -> list[str]:
    """What the command is told of the fleet, in which a node has published three tables."""
    token_file, root = tmp_path / "token", tmp_path / "root"
    write_token(token_file, new_token())
    (key,), _ = fleet_keys(
        read_tokens(file=token_file, arguments=(), environ={}), root / "warmseed", signing=None, trusted=()
    )

    async def main() -> None:
        await publish(maker(tmp_path / "maker", store, key=key), b"one" * 99, b"two" * 99, b"three" * 99)

    asyncio.run(main())
    age(store, days=2)
    fleet = ["--seed-token-file", str(token_file), "--warmup-cache-stores", f"file:{store.folder}"]
    return ["gc", "--cache-root", str(root), *fleet]


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def test_the_command_shows_first_and_removes_when_told(store: FolderStore, options: list[str]) -> None:
    before = tree(store.folder)
    assert "file: 0 objects" in invoke(*options)
    said = invoke(*options, "--keep", "1")
    assert "4 objects, 2 of them generations" in said
    assert "--delete does it" in said
    assert tree(store.folder) == before
    assert "0 objects" in invoke(*options, "--keep", "1", "--delete", "--older-than", "3d")
    assert tree(store.folder) == before
    assert "0 objects" in invoke(*options, "other_kind", "--keep", "1", "--delete")
    said = json.loads(invoke(*options, "--keep", "1", "--delete", "--json"))
    disk, shared = said["stores"]
    assert (disk["store"], disk["removed"]) == ("disk", [])
    gone = {item["key"]: item["bytes"] for item in shared["removed"]}
    assert gone == {key: len(data) for key, data in before.items() if key not in tree(store.folder)}
    assert len(gone) == 4
    assert shared["removed_bytes"] == sum(gone.values())
    assert "0 objects" in invoke(*options, "--keep", "1")


def test_the_command_names_manifests_that_cannot_be_read(store: FolderStore, options: list[str]) -> None:
    asyncio.run(store.put(f"{NAMESPACE}/manifest/{KIND}/who-knows", b"?"))
    said = invoke(*options, "--keep", "1")
    assert "1 manifests can't be read, so 2 objects that they may refer to stay" in said
    assert f"{NAMESPACE}/manifest/{KIND}/who-knows" in said


@pytest.mark.parametrize("duration", ["", "24", "1w", "-1h", "1.5h", "h", "9999999999d"])
def test_a_duration_that_is_none_is_refused(options: list[str], duration: str) -> None:
    result = CliRunner().invoke(app, [*options, "--older-than", duration])
    assert isinstance(result.exception, ConfigurationError)
    assert "is no duration" in str(result.exception)


def test_at_least_one_generation_is_kept(options: list[str]) -> None:
    assert CliRunner().invoke(app, [*options, "--keep", "0", "--delete"]).exit_code == 2


def test_a_store_that_fails_is_named(options: list[str]) -> None:
    result = CliRunner().invoke(app, [*options[:-1], "http://127.0.0.1:9/", "--delete"])
    assert isinstance(result.exception, WarmseedError), result.exception
    assert "http: list" in str(result.exception)
