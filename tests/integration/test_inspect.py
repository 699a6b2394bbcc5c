"""What `warmseed inspect` says of a published generation, and that it only looks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from tests.support.fleet import Node, artifact_key
from tests.support.sites import fill, make_site, tree
from tests.support.tables import H200, NOW, put_local, table_site, table_text
from typer.testing import CliRunner

from warmseed.daemon.cli.main import app
from warmseed.daemon.rank.fleet_keys import fleet_keys
from warmseed.errors import ConfigurationError
from warmseed.seeding.artifact import ArtifactKey, denial_key, object_key
from warmseed.seeding.bundle.index import INDEX_BYTES
from warmseed.seeding.environment import Environment
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.kinds.autotune.kind import FlashInferAutotune
from warmseed.seeding.kinds.base import Kind, Site
from warmseed.seeding.kinds.compiled.bundle import CompileCacheKind
from warmseed.seeding.kinds.compiled.capture import Quiet
from warmseed.seeding.kinds.compiled.inductor import InductorCache
from warmseed.seeding.operator import published
from warmseed.seeding.operator.eligibility import RULES, Rule
from warmseed.seeding.operator.golden import Listed, deny, list_artifacts, pin_generation, roll_back
from warmseed.seeding.operator.inspect import Inspection, inspect_generation
from warmseed.seeding.operator.published import Wanted, find_published
from warmseed.seeding.publish import Publication, Publisher
from warmseed.seeding.trust.judge import DAY, Mark, Marks
from warmseed.seeding.trust.keys import Keyring, PublisherKey
from warmseed.seeding.trust.manifest import Index, Manifest, sign_manifest
from warmseed.seeding.trust.marks import save_marks
from warmseed.seeding.trust.probation import Probation
from warmseed.seeding.trust.token import new_token, read_tokens, write_token
from warmseed.stores.base import BaseStore, Body, ObjectInfo, ObjectReader, Store, StoreLimits
from warmseed.stores.chain import Chain
from warmseed.stores.disk import DiskStore
from warmseed.testing.fake_store import FakeStore

TABLE = FlashInferAutotune()
BUNDLE = CompileCacheKind([InductorCache()], quiet=Quiet(settle=0.0, deadline=5.0))
FILES = {f"ab/c{number}.py": b"#" * number for number in range(1, 8)} | {"ab/big.so": b"\x7fELF" + b"x" * 3000}
KEY, STRANGER = PublisherKey("fleet", b"f" * 32), PublisherKey("stranger", b"s" * 32)
TRUSTED = Keyring([KEY.public])
TABLE_NAME, BUNDLE_NAME = "flashinfer_autotune/cccc", "compile_cache/aaaa"


@asynccontextmanager
async def fleet(base: Path, *stores: Store) -> AsyncIterator[Chain]:
    """A node's real disk before `stores`."""
    chain = Chain(DiskStore(base / "state" / "store"), stores)
    try:
        yield chain
    finally:
        await chain.aclose()


async def publish(
    base: Path, store: Store, kind: Kind, site: Site, *, key: PublisherKey = KEY, at: int = NOW, name: str = "builder"
) -> Publication:
    """What another node, whose folder is `base`, publishes to `store` of what lies at `site`."""
    async with fleet(base, store) as chain:
        capture = await asyncio.to_thread(kind.capture, site)
        assert capture is not None
        published = await Publisher(chain, [key], publisher=name, clock=lambda: at).publish(capture, kind.name, site)
        assert await chain.flush(20)
        return published


async def publish_table(
    base: Path, store: Store, *, tactic: int = 0, rank: int = 0, key: PublisherKey = KEY, at: int = NOW
) -> Publication:
    site = table_site(base, world_rank=rank)
    put_local(site, table_text(4, tactic=tactic))
    return await publish(base, store, TABLE, site, key=key, at=at)


async def publish_bundle(base: Path, store: Store, files: Mapping[str, bytes] = FILES) -> Publication:
    site = make_site(base, caches=("inductor",))
    fill(site.roots["inductor"], files)
    return await publish(base, store, BUNDLE, site)


async def put_signed(store: Store, key: ArtifactKey, manifest: Manifest, signer: PublisherKey = KEY) -> None:
    await store.put(key.manifest_key(manifest.generation), sign_manifest(manifest, [signer]))


async def look(base: Path, name: str, *stores: Store, now: int = NOW, ours: Environment | None = None) -> Inspection:
    """What a fresh node with `stores` sees; its disk is afterwards what it was."""
    disk = base / "state" / "store" / "objects"
    before = tree(disk)
    async with fleet(base, *stores) as chain:
        found = await find_published(chain, Wanted.parse(name))
        result = await inspect_generation(chain, TRUSTED, found, state=base / "state", now=now, ours=ours)
    assert tree(disk) == before
    return result


def refusal(found: Inspection) -> Rule:
    assert found.refusal is not None, found.rules
    return found.refusal


def states(found: Inspection, tier: str) -> dict[str, str]:
    (objects,) = [item.objects for item in found.tiers if item.name == tier]
    return {held.what: held.state for held in objects}


async def listed(chain: Chain, generation: int) -> Listed:
    (found,) = [item async for item in list_artifacts(chain, TRUSTED) if item.manifest.generation == generation]
    return found


# What is in it, and whose it is ---------------------------------------------------------------------------


def test_a_table_that_is_believed_is_shown_whole(tmp_path: Path) -> None:
    store = FakeStore()

    async def main() -> None:
        await publish_table(tmp_path / "maker", store)
        ours = Environment(H200)
        found = await look(tmp_path / "node", TABLE_NAME, store, ours=ours)
        assert found.refusal is None
        assert [(rule.name, rule.outcome) for rule in found.rules] == [(name, "holds") for name in RULES]
        assert [(item.keyid, item.name, item.verified) for item in found.signatures] == [
            (KEY.public.keyid, "fleet", True)
        ]
        assert found.manifest is not None
        assert found.manifest.publisher == "builder"
        assert found.contents.operations == {"fp8_gemm": 4}
        assert found.factors == {"model": "m", "max_num_batched_tokens": "8192"}
        assert states(found, "fake") == {"manifest": "here", "payload": "here", "factors": "here"}
        assert states(found, "disk") == {"manifest": "missing", "payload": "missing", "factors": "missing"}
        assert (found.pin, found.denial) == (None, None)

    asyncio.run(main())


def test_a_bundle_is_described_by_its_index_and_nothing_is_fetched_or_kept(tmp_path: Path) -> None:
    store = FakeStore()

    async def main() -> None:
        made = (await publish_bundle(tmp_path / "maker", store)).manifest
        before = dict(store.objects)
        store.calls.clear()
        found = await look(tmp_path / "node", BUNDLE_NAME, store)
        (cache,) = found.contents.caches
        assert (cache.name, cache.count, cache.nbytes) == ("inductor", len(FILES), sum(map(len, FILES.values())))
        assert cache.root == str(tmp_path / "maker" / "cache" / "inductor")
        assert cache.files[0].relative == "ab/big.so"
        assert states(found, "fake")["payload"] == "here"
        assert store.count("open", made.store_key) == 0
        assert {call.operation for call in store.calls} == {"list", "open", "stat"}
        assert store.objects == before

    asyncio.run(main())
    assert not [path for path in (tmp_path / "node" / "state").rglob("*") if path.is_file()]


def test_the_environment_is_judged_only_where_it_is_known(tmp_path: Path) -> None:
    store = FakeStore()

    async def main() -> None:
        await publish_table(tmp_path / "maker", store)
        unknown = await look(tmp_path / "node", TABLE_NAME, store)
        assert unknown.refusal is None
        assert [rule.name for rule in unknown.rules if rule.outcome == "open"] == ["environment"]
        other = Environment({**H200, "gpu": "NVIDIA L4"})
        refused = refusal(await look(tmp_path / "node", TABLE_NAME, store, ours=other))
        assert refused.reason == "environment"
        assert "NVIDIA L4" in refused.why
        vague = Environment({**H200, "gpu": "unknown"})
        assert refusal(await look(tmp_path / "node", TABLE_NAME, store, ours=vague)).reason == "cannot-judge"

    asyncio.run(main())


# Whether it would be adopted ------------------------------------------------------------------------------


def test_what_a_stranger_signed_is_shown_as_such_and_nothing_is_read_on_its_word(tmp_path: Path) -> None:
    store = FakeStore()

    async def main() -> None:
        made = (await publish_table(tmp_path / "maker", store, key=STRANGER)).manifest
        store.calls.clear()
        found = await look(tmp_path / "node", TABLE_NAME, store)
        assert refusal(found).name == refusal(found).reason == "signature"
        assert [rule.outcome for rule in found.rules[1:]] == ["skipped"] * (len(RULES) - 1)
        assert [(item.keyid, item.name, item.verified) for item in found.signatures] == [
            (STRANGER.public.keyid, "", False)
        ]
        assert found.manifest == made
        assert (found.factors, dict(found.contents.operations)) == (None, {})
        assert "not verified" in found.contents.unread
        assert store.count("open", made.store_key) == 0
        assert states(found, "fake")["payload"] == "here"

    asyncio.run(main())


def test_an_expired_one_and_one_from_the_future(tmp_path: Path) -> None:
    store = FakeStore()

    async def main() -> None:
        await publish_table(tmp_path / "maker", store)
        for now in (NOW + 31 * DAY, NOW - DAY):
            refused = refusal(await look(tmp_path / "node", TABLE_NAME, store, now=now))
            assert (refused.name, refused.reason) == ("age", "expired")

    asyncio.run(main())


def test_one_that_is_older_than_what_this_node_has_seen(tmp_path: Path) -> None:
    store, marks = FakeStore(), tmp_path / "node" / "state" / "highest.json"

    async def main() -> None:
        await publish_table(tmp_path / "maker", store)
        key = artifact_key(TABLE, table_site(tmp_path))
        save_marks(marks, Marks(marks={key.manifest_folder: Mark(2, NOW, "d" * 64)}))
        before = marks.read_bytes()
        refused = refusal(await look(tmp_path / "node", TABLE_NAME, store))
        assert (refused.name, refused.reason) == ("age", "rollback")
        assert marks.read_bytes() == before
        marks.write_bytes(b"not a history")
        found = await look(tmp_path / "node", TABLE_NAME, store)
        assert found.refusal is None
        assert [rule.name for rule in found.rules if rule.outcome == "open"] == ["environment", "age"]
        assert marks.read_bytes() == b"not a history", "looking at it has moved this node's history aside"

    asyncio.run(main())


def test_a_denied_payload_is_shown_with_who_denied_it_and_why(tmp_path: Path) -> None:
    store = FakeStore()

    async def main() -> None:
        digest = (await publish_table(tmp_path / "maker", store)).manifest.sha256
        about = {"kind": TABLE.name, "sha256": digest, "reason": "it crashes", "publisher": "op", "now": NOW}
        async with fleet(tmp_path / "op", store) as chain:
            await deny(chain, [STRANGER], **about)
            found = await look(tmp_path / "node", TABLE_NAME, store)
            assert found.refusal is None
            assert found.denial is not None
            assert found.denial.ignored.startswith("signature: ")
            await deny(chain, [KEY], **about)
        found = await look(tmp_path / "node", TABLE_NAME, store)
        assert refusal(found).name == refusal(found).reason == "denied"
        assert "it crashes" in refusal(found).why
        assert found.denial is not None
        assert (found.denial.reason, found.denial.publisher) == ("it crashes", "op")
        assert (found.denial.signers, found.denial.ignored) == (("fleet",), "")
        over = await look(tmp_path / "node", TABLE_NAME, store, now=NOW + 31 * DAY)
        assert over.denial is not None
        assert over.denial.ignored.startswith("expired: ")

    asyncio.run(main())


def test_a_denial_of_another_payload_forbids_nothing(tmp_path: Path) -> None:
    """Whoever can write to a store can put a signed denial under another name."""
    store = FakeStore()

    async def main() -> None:
        digest = (await publish_table(tmp_path / "maker", store)).manifest.sha256
        other = "e" * 64
        async with fleet(tmp_path / "op", store) as chain:
            await deny(chain, [KEY], kind=TABLE.name, sha256=other, reason="bad", publisher="op", now=NOW)
        store.objects[denial_key(digest)] = store.objects[denial_key(other)]
        found = await look(tmp_path / "node", TABLE_NAME, store)
        assert found.refusal is None
        assert found.denial is not None
        assert "another payload" in found.denial.ignored

    asyncio.run(main())


def test_the_pinned_generation_is_told_from_the_others(tmp_path: Path) -> None:
    store = FakeStore()

    async def main() -> None:
        for number in (1, 2):
            await publish_table(tmp_path / f"maker{number}", store, tactic=number)
        async with fleet(tmp_path / "op", store) as chain:
            first = await listed(chain, 1)
            await pin_generation(chain, [KEY], TRUSTED, first, publisher="op", now=NOW)
            newest = await look(tmp_path / "node", TABLE_NAME, store)
            assert (newest.generation, newest.generations) == (2, (1, 2))
            assert refusal(newest).name == refusal(newest).reason == "pinned"
            assert newest.pin is not None
            assert (newest.pin.generation, newest.pin.publisher, newest.pin.signers) == (1, "op", ("fleet",))
            assert newest.pin.expires_at == NOW + 30 * DAY
            pinned = await look(tmp_path / "node", f"{TABLE_NAME}@1", store)
            assert (pinned.generation, pinned.refusal) == (1, None)
            await roll_back(chain, [KEY], TRUSTED, first.key, publisher="op", now=NOW)
        free = await look(tmp_path / "node", TABLE_NAME, store)
        assert free.refusal is None
        assert free.pin is not None
        assert free.pin.ignored.startswith("expired: ")

    asyncio.run(main())


def test_a_pin_of_another_artifact_pins_nothing(tmp_path: Path) -> None:
    """Whoever can write to a store can copy a signed pin to another place."""
    store = FakeStore()

    async def main() -> None:
        for rank in (0, 1):
            await publish_table(tmp_path / f"maker{rank}", store, rank=rank)
        key = artifact_key(TABLE, table_site(tmp_path))
        async with fleet(tmp_path / "op", store) as chain:
            other = [item async for item in list_artifacts(chain, TRUSTED) if item.key != key]
            await pin_generation(chain, [KEY], TRUSTED, other[0], publisher="op", now=NOW)
        store.objects[key.pin_key] = store.objects[other[0].key.pin_key]
        found = await look(tmp_path / "node", f"{TABLE_NAME}/dp0_rank0", store)
        assert found.refusal is None
        assert found.pin is not None
        assert "another artifact" in found.pin.ignored

    asyncio.run(main())


def test_a_bad_copy_on_the_disk_is_passed_over_and_stays(tmp_path: Path) -> None:
    store, node = FakeStore(), tmp_path / "node"

    async def main() -> None:
        made = (await publish_table(tmp_path / "maker", store)).manifest
        bad = node / "state" / "store" / "objects" / made.store_key
        bad.parent.mkdir(parents=True)
        bad.write_bytes(b"x" * made.length)
        found = await look(node, TABLE_NAME, store)
        assert found.contents.operations == {"fp8_gemm": 4}
        assert bad.exists()

    asyncio.run(main())


def test_a_payload_in_quarantine_on_this_node(tmp_path: Path) -> None:
    store = FakeStore()

    async def main() -> None:
        digest = (await publish_table(tmp_path / "maker", store)).manifest.sha256
        probation = Probation(tmp_path / "node" / "state")
        probation.begin(TABLE.name, digest, 1, "dp0_rank0")
        probation.fail(digest, "dp0_rank0", "the engine died")
        refused = refusal(await look(tmp_path / "node", TABLE_NAME, store))
        assert refused.name == refused.reason == "probation"
        assert "the engine died" in refused.why

    asyncio.run(main())


def test_a_manifest_that_lies_where_another_belongs(tmp_path: Path) -> None:
    store = FakeStore()

    async def main() -> None:
        await publish_table(tmp_path / "maker", store)
        key = artifact_key(TABLE, table_site(tmp_path))
        envelope = store.objects.pop(key.manifest_key(1))
        changes = {"world_rank": 3, "config_hash": "b" * 64, "environment_hash": "b" * 64}
        for (field, value), reason in zip(changes.items(), ("rank", "key", "key"), strict=True):
            moved = msgspec.structs.replace(key, **{field: value})
            store.objects[moved.manifest_key(1)] = envelope
            name = f"{moved.kind}/{moved.config_hash}/{moved.environment_hash}/{moved.rank_label}"
            refused = refusal(await look(tmp_path / "node", name, store))
            assert (refused.name, refused.reason) == ("identity", reason)
        store.objects[key.manifest_key(7)] = envelope
        name = f"{key.kind}/{key.config_hash}/{key.environment_hash}/{key.rank_label}"
        assert refusal(await look(tmp_path / "node", name, store)).reason == "key"

    asyncio.run(main())


# Where it lies --------------------------------------------------------------------------------------------


def test_a_store_that_lost_the_payload_is_told_from_one_that_has_it(tmp_path: Path) -> None:
    whole, lossy = FakeStore("whole"), FakeStore("lossy")

    async def main() -> None:
        made = (await publish_bundle(tmp_path / "maker", whole)).manifest
        lossy.objects = dict(whole.objects)
        del lossy.objects[made.store_key]
        found = await look(tmp_path / "node", BUNDLE_NAME, lossy, whole)
        assert states(found, "lossy") == {
            "manifest": "here", "payload": "missing", "index": "here", "factors": "here",
        }  # fmt: skip
        assert states(found, "whole")["payload"] == "here"
        assert found.refusal is None
        whole.objects[made.store_key] = whole.objects[made.store_key][:-1]
        found = await look(tmp_path / "node", BUNDLE_NAME, lossy, whole)
        assert states(found, "whole")["payload"] == "different"
        assert (refusal(found).name, refusal(found).reason) == ("objects", "missing")

    asyncio.run(main())


def test_a_store_that_has_another_manifest_of_that_number_is_noticed(tmp_path: Path) -> None:
    """The one that verifies is shown, whatever a faster store has."""
    good, other = FakeStore("good"), FakeStore("other")

    async def main() -> None:
        await publish_table(tmp_path / "a", good, tactic=1)
        await publish_table(tmp_path / "b", other, tactic=2, key=STRANGER)
        found = await look(tmp_path / "node", TABLE_NAME, other, good)
        assert found.refusal is None
        assert (states(found, "good")["manifest"], states(found, "other")["manifest"]) == ("here", "different")

    asyncio.run(main())


@pytest.mark.parametrize("fault", ["drop", "hang"])
def test_a_store_that_fails_is_shown_as_failed_and_the_rest_all_the_same(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, broken = FakeStore("good"), FakeStore("broken", limits=StoreLimits(deadline=0.05))
    monkeypatch.setattr(published, "_PATIENCE", 0.05)

    async def main() -> None:
        await publish_bundle(tmp_path / "maker", good)
        setattr(broken.faults, fault, True)
        found = await look(tmp_path / "node", BUNDLE_NAME, broken, good)
        assert found.refusal is None
        assert set(states(found, "broken").values()) == {"failed"}
        assert set(states(found, "good").values()) == {"here"}
        (tier,) = [tier for tier in found.tiers if tier.name == "broken"]
        assert tier.unlisted
        assert all(held.why for held in tier.objects)
        assert broken.count("stat") == 0, "a store that is down was asked again for every object"
        with pytest.raises(ArtifactRefused, match="broken: ") as caught:
            await look(tmp_path / "node", "compile_cache/bbbb", broken, good)
        assert caught.value.reason == "missing"

    asyncio.run(main())


class Unlisted(BaseStore):
    """A store that can't say what it holds."""

    def __init__(self, inner: FakeStore) -> None:
        super().__init__("unlisted")
        self._inner = inner

    def _open(self, key: str, offset: int) -> AbstractAsyncContextManager[ObjectReader | None]:
        return self._inner._open(key, offset)

    async def _write(self, key: str, body: Body) -> None:
        await self._inner._write(key, body)

    async def _stat(self, key: str) -> ObjectInfo | None:
        return await self._inner._stat(key)


def test_a_store_that_cannot_list_is_asked_for_what_another_one_lists(tmp_path: Path) -> None:
    store = FakeStore()

    async def main() -> None:
        made = (await publish_table(tmp_path / "maker", store)).manifest
        mute = Unlisted(FakeStore(objects={made.store_key: store.objects[made.store_key]}))
        found = await look(tmp_path / "node", TABLE_NAME, mute, store)
        assert states(found, "unlisted") == {"manifest": "missing", "payload": "here", "factors": "missing"}
        assert [tier.unlisted for tier in found.tiers if "can't list" in tier.unlisted]
        with pytest.raises(ArtifactRefused, match="unlisted can't list what it holds"):
            await look(tmp_path / "node", TABLE_NAME, mute)

    asyncio.run(main())


def test_a_missing_payload_is_not_called_lost_while_a_store_cannot_be_asked(tmp_path: Path) -> None:
    good, broken = FakeStore("good"), FakeStore("broken")

    async def main() -> None:
        made = (await publish_bundle(tmp_path / "maker", good)).manifest
        del good.objects[made.store_key]
        broken.faults.drop = True
        found = await look(tmp_path / "node", BUNDLE_NAME, broken, good)
        assert found.refusal is None
        assert found.rules[-1].outcome == "open"

    asyncio.run(main())


# By which name --------------------------------------------------------------------------------------------


def test_a_name_that_may_mean_several_lists_them(tmp_path: Path) -> None:
    store = FakeStore()

    async def main() -> None:
        for rank in (0, 1):
            await publish_table(tmp_path / f"maker{rank}", store, rank=rank)
        with pytest.raises(ConfigurationError) as caught:
            await look(tmp_path / "node", TABLE_NAME, store)
        key = artifact_key(TABLE, table_site(tmp_path))
        listed = [f"{key.kind}/{key.config_hash[:12]}/{key.environment_hash[:12]}/dp0_rank{rank}" for rank in (0, 1)]
        for name in listed:
            assert name in str(caught.value)
            assert (await look(tmp_path / "node", name, store)).key.rank_label == name.rpartition("/")[2]
        assert (await look(tmp_path / "node", f"{TABLE_NAME}/dp0_rank1@1", store)).key.world_rank == 1

    asyncio.run(main())


def test_a_generation_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    store = FakeStore()

    async def main() -> None:
        await publish_table(tmp_path / "maker", store)
        with pytest.raises(ArtifactRefused, match=r"no store lists .*@9; there are .*\(generations 1\)"):
            await look(tmp_path / "node", f"{TABLE_NAME}@9", store)

    asyncio.run(main())


@pytest.mark.parametrize(
    "text",
    ["", "flashinfer_autotune", "kind/xyz", "../aaaa", "kind/aaaa/dp0", "kind/aaaa@-1", "kind/aaaa@x", "k/a\x1b"],
)
def test_a_name_that_names_no_generation_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="does not name a generation") as caught:
        Wanted.parse(text)
    assert str(caught.value).isprintable()


# Hostile content ------------------------------------------------------------------------------------------


def test_names_that_are_no_manifests_are_passed_over(tmp_path: Path) -> None:
    store = FakeStore()

    async def main() -> None:
        await publish_table(tmp_path / "maker", store)
        folder = artifact_key(TABLE, table_site(tmp_path)).manifest_folder
        for name in ("²", "9" * 5000, "07", "-1", "pin", "8.json/9"):
            store.objects[f"{folder}/{name}.json"] = b"{}"
        store.objects[folder.replace("dp0", "dp00") + "/9.json"] = b"{}"
        store.objects[folder.replace("rank0", "rank9999999") + "/9.json"] = b"{}"
        assert (await look(tmp_path / "node", TABLE_NAME, store)).generations == (1,)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("data", "reason", "state"),
    [
        (b"", "missing", "here"),
        (b"\x00" * 100, "malformed", "here"),
        (b"{}", "malformed", "here"),
        (b"x" * (65 << 10), "missing", "failed"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_shown_as_such(tmp_path: Path, data: bytes, reason: str, state: str) -> None:
    store = FakeStore()
    key = artifact_key(TABLE, table_site(tmp_path))
    store.objects[key.manifest_key(1)] = data

    async def main() -> None:
        found = await look(tmp_path / "node", TABLE_NAME, store)
        assert (found.manifest, found.signatures) == (None, ())
        assert (refusal(found).name, refusal(found).reason) == ("signature", reason)
        assert states(found, "fake") == {"manifest": state}

    asyncio.run(main())


def test_an_index_over_the_limit_is_not_read(tmp_path: Path) -> None:
    store = FakeStore()

    async def main() -> None:
        made = (await publish_bundle(tmp_path / "maker", store)).manifest
        assert made.index is not None
        key = artifact_key(BUNDLE, make_site(tmp_path, caches=("inductor",)))
        huge = msgspec.structs.replace(made, index=Index(made.index.sha256, INDEX_BYTES + 1), generation=2)
        await put_signed(store, key, huge)
        store.calls.clear()
        found = await look(tmp_path / "node", BUNDLE_NAME, store)
        assert found.generation == 2
        assert str(INDEX_BYTES + 1) in found.contents.unread
        assert store.count("open", object_key(made.index.sha256)) == 0

    asyncio.run(main())


def test_other_bytes_than_the_signed_index_are_not_parsed(tmp_path: Path) -> None:
    store = FakeStore()

    async def main() -> None:
        made = (await publish_bundle(tmp_path / "maker", store)).manifest
        assert made.index is not None
        (name,) = [name for name in store.objects if name.endswith(made.index.sha256)]
        store.objects[name] = store.objects[name].replace(b"inductor", b"inducted")
        found = await look(tmp_path / "node", BUNDLE_NAME, store)
        assert found.contents.caches == ()
        assert "no store has its file index" in found.contents.unread

    asyncio.run(main())


def test_a_store_key_that_is_none_is_a_failure_of_that_object_alone(tmp_path: Path) -> None:
    store = FakeStore()

    async def main() -> None:
        made = (await publish_table(tmp_path / "maker", store)).manifest
        key = artifact_key(TABLE, table_site(tmp_path))
        await put_signed(store, key, msgspec.structs.replace(made, store_key="../../etc/passwd", generation=2))
        found = await look(tmp_path / "node", TABLE_NAME, store)
        assert states(found, "fake") == {"manifest": "here", "payload": "failed", "factors": "here"}
        assert (refusal(found).name, refusal(found).reason) == ("identity", "key")

    asyncio.run(main())


# The command ----------------------------------------------------------------------------------------------


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


@pytest.fixture
def key(tmp_path: Path) -> PublisherKey:
    """The key of the fleet that the command is told of."""
    write_token(tmp_path / "token", new_token())
    tokens = read_tokens(file=tmp_path / "token", arguments=(), environ={})
    (found,), _ = fleet_keys(tokens, tmp_path / "root" / "warmseed", signing=None, trusted=())
    return found


def invoke(tmp_path: Path, *arguments: str, stores: Sequence[str] = ()) -> str:
    options = ["--cache-root", str(tmp_path / "root"), "--seed-token-file", str(tmp_path / "token")]
    options += ["--warmup-cache-stores", ",".join([f"file:{tmp_path / 'shared'}", *stores])]
    result = CliRunner().invoke(app, ["inspect", *arguments, *options])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


async def publish_to(base: Path, folder: Path, kind: Kind, site: Site, key: PublisherKey) -> Manifest:
    async with Node.opened(base / "state", f"file:{folder}", key=key, trusted=key) as node:
        return (await node.publish(kind, site)).manifest


def test_the_command_says_for_people_and_for_scripts_what_is_there(
    tmp_path: Path, shared: Path, key: PublisherKey
) -> None:
    site = make_site(tmp_path / "maker", caches=("inductor",))
    fill(site.roots["inductor"], FILES)
    made = asyncio.run(publish_to(tmp_path / "maker", shared, BUNDLE, site, key))
    said = invoke(tmp_path, BUNDLE_NAME)
    for text in (made.sha256, key.public.keyid, key.name, made.environment["glibc"], "ab/big.so", "ab/c7.py"):
        assert text in said
    assert "would adopt    yes" in said
    assert "ab/c1.py" not in said
    assert "--files names all" in said
    everything = invoke(tmp_path, BUNDLE_NAME, "--files")
    assert all(name in everything for name in FILES)
    found = json.loads(invoke(tmp_path, BUNDLE_NAME, "--json"))
    assert (found["refused"], found["generation"], found["manifest"]["sha256"]) == ("", 1, made.sha256)
    assert [tier["name"] for tier in found["tiers"]] == ["disk", "file"]
    (shared / made.store_key).unlink()
    lost = invoke(tmp_path, BUNDLE_NAME)
    assert "would adopt    no: missing: " in lost
    (line,) = [line.split() for line in lost.splitlines() if line.startswith("  file ")]
    assert line[:5] == ["file", "here,", line[2], "bytes", "missing"]


def test_the_command_shows_what_nobody_trusted_signed(tmp_path: Path, shared: Path, key: PublisherKey) -> None:
    site = table_site(tmp_path / "maker")
    put_local(site, table_text(4))
    asyncio.run(publish_to(tmp_path / "maker", shared, TABLE, site, STRANGER))
    said = invoke(tmp_path, TABLE_NAME)
    assert "NOT VERIFIED" in said
    assert f"{STRANGER.public.keyid} a key that is not trusted here, not verified" in said
    assert "would adopt    no: signature: " in said
    assert json.loads(invoke(tmp_path, TABLE_NAME, "--json"))["refused"] == "signature"


def test_nothing_that_a_publisher_wrote_reaches_the_terminal_unescaped(
    tmp_path: Path, shared: Path, key: PublisherKey
) -> None:
    site = make_site(tmp_path / "maker", caches=("inductor",))
    fill(site.roots["inductor"], {"ab/\u202egnp.so": b"x"})
    made = asyncio.run(publish_to(tmp_path / "maker", shared, BUNDLE, site, key))
    evil = "\x1b[2J\r\nforged line\x9b\u2028"
    hostile = msgspec.structs.replace(
        made,
        generation=2,
        publisher=evil,
        filename=evil,
        run=evil,
        provenance={evil: evil},
        environment={**made.environment, evil: evil},
        expires_at=1 << 40,
    )
    where = replace_environment(artifact_key(BUNDLE, site), hostile)
    for signer in (key, STRANGER):
        path = shared / where.manifest_key(2)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sign_manifest(hostile, [signer]))
        for more in ((), ("--json",), ("--files",)):
            name = f"{where.kind}/{where.config_hash}/{where.environment_hash}"
            said = invoke(tmp_path, name, *more)
            assert "forged line" in said
            assert all(line.isprintable() for line in said.split("\n"))
            assert not any(line.startswith("forged") for line in said.split("\n"))
            assert ("gnp.so" in said) is (signer is key)


def replace_environment(key: ArtifactKey, manifest: Manifest) -> ArtifactKey:
    return msgspec.structs.replace(key, environment_hash=Environment(manifest.environment).digest)


def test_a_store_that_cannot_be_reached_costs_only_its_own_line(
    tmp_path: Path, shared: Path, key: PublisherKey
) -> None:
    site = table_site(tmp_path / "maker")
    put_local(site, table_text(4))
    asyncio.run(publish_to(tmp_path / "maker", shared, TABLE, site, key))
    said = invoke(tmp_path, TABLE_NAME, stores=["http://127.0.0.1:9/"])
    assert "would adopt    yes" in said
    (line,) = [line.split() for line in said.splitlines() if line.startswith("  http ")]
    assert line == ["http", "failed", "failed", "failed"]
    assert "\n  http: list vllm-warmup-cache/manifest/flashinfer_autotune/cccc failed" in said


@pytest.mark.parametrize(
    ("arguments", "error", "word"),
    [
        (["compile_cache/bbbb"], ArtifactRefused, "no store lists compile_cache/bbbb"),
        (["what"], ConfigurationError, "does not name a generation"),
        (["compile_cache/bbbb", "--here"], ConfigurationError, "leave it out"),
    ],
)
def test_requests_that_find_nothing_or_cannot_work_say_so(
    tmp_path: Path, arguments: list[str], error: type[Exception], word: str
) -> None:
    result = CliRunner().invoke(app, ["inspect", *arguments, "--cache-root", str(tmp_path / "root")])
    assert isinstance(result.exception, error)
    assert word in str(result.exception)
