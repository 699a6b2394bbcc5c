"""Published generations travel between stores whole and as they were signed; nothing else does."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.support.fleet import FLEET_KEY, Node
from tests.support.sites import fill, make_site, tree
from tests.support.tables import local_path, put_local, table_site, table_text
from typer.testing import CliRunner

from warmseed.daemon.cli.main import app
from warmseed.daemon.rank.fleet_keys import fleet_keys
from warmseed.errors import ConfigurationError, WarmseedError
from warmseed.seeding.artifact import NAMESPACE
from warmseed.seeding.kinds.autotune.kind import FlashInferAutotune
from warmseed.seeding.kinds.compiled.bundle import CompileCacheKind
from warmseed.seeding.kinds.compiled.capture import Quiet
from warmseed.seeding.kinds.compiled.inductor import InductorCache
from warmseed.seeding.operator.golden import deny, list_artifacts, pin_generation
from warmseed.seeding.operator.replicate import Replica, current_generations, replicate
from warmseed.seeding.trust.judge import Trust
from warmseed.seeding.trust.keys import Keyring, PublisherKey
from warmseed.seeding.trust.token import new_token, read_tokens, write_token
from warmseed.stores.base import Store
from warmseed.stores.chain import Chain
from warmseed.testing.fake_store import FakeStore

TABLE = FlashInferAutotune()
BUNDLE = CompileCacheKind([InductorCache()], quiet=Quiet(settle=0.0, deadline=5.0))
FILES = {"ab/cab.py": b"print(1)\n", "ab/cab.so": b"\x7fELF" + b"x" * 3000}
KEY = FLEET_KEY
TRUSTED = Keyring([KEY.public])


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


@asynccontextmanager
async def node_at(base: Path, *stores: Path, key: PublisherKey = KEY) -> AsyncIterator[Node]:
    async with Node.opened(base / "state", *(f"file:{folder}" for folder in stores), key=key, trusted=KEY) as node:
        yield node


async def publish_table(base: Path, store: Path, data: bytes, *, key: PublisherKey = KEY, run: str = "") -> str:
    site = table_site(base)
    put_local(site, data)
    async with Node.opened(site.state, f"file:{store}", key=key, trusted=key) as node:
        return (await node.publish(TABLE, site, run=run)).manifest.sha256


async def publish_bundle(base: Path, store: Path) -> None:
    site = make_site(base, caches=("inductor",))
    fill(site.roots["inductor"], FILES)
    async with Node.opened(site.state, f"file:{store}", key=KEY, trusted=KEY) as node:
        await node.publish(BUNDLE, site)


async def copy(source: Chain, *targets: Store, staging: Path, prefix: str = "") -> list[Replica]:
    trust, now, done = Trust(TRUSTED), int(time.time()), []
    for listed in await current_generations(source, trust, prefix=prefix, now=now):
        done += await replicate(listed, source, targets, trust, staging=staging, now=now)
    return done


async def adopted_table(base: Path, *stores: Path) -> tuple[str, bytes]:
    """A node's start: how its search ended, and what the engine would read."""
    site = table_site(base)
    async with Node.opened(site.state, *(f"file:{folder}" for folder in stores), key=KEY, trusted=KEY) as node:
        adoption = await node.adopt(TABLE, site)
    path = local_path(site)
    return adoption.outcome, path.read_bytes() if path.exists() else b""


def spoil(store: Path, pattern: str) -> None:
    """Other bytes of the same length."""
    (payload,) = store.rglob(pattern)
    payload.write_bytes(payload.read_bytes()[::-1])


def objects(folder: Path) -> dict[str, bytes]:
    return {path: data for path, data in tree(folder).items() if path.startswith(NAMESPACE)}


def test_a_node_adopts_from_a_copy_what_it_would_have_adopted_from_the_original(tmp_path: Path, store: Path) -> None:
    away = tmp_path / "away"
    away.mkdir()

    async def main() -> None:
        await publish_table(tmp_path / "a", store, table_text(4))
        await publish_bundle(tmp_path / "a", store)
        async with node_at(tmp_path / "op", store) as node, node_at(tmp_path / "far", away) as far:
            done = await copy(node.chain, *far.chain.tiers, staging=tmp_path / "staging")
            assert [item.outcome for item in done] == ["copied", "copied"]
            assert sum(item.nbytes for item in done) > 0
            again = await copy(node.chain, *far.chain.tiers, staging=tmp_path / "staging")
            assert [(item.outcome, item.nbytes) for item in again] == [("present", 0), ("present", 0)]
        assert objects(away) == objects(store), "the copy is not what was published"
        shutil.rmtree(store)
        assert await adopted_table(tmp_path / "new", away) == ("installed", table_text(4))
        site = make_site(tmp_path / "new", caches=("inductor",))
        async with Node.opened(site.state, f"file:{away}", key=KEY, trusted=KEY) as node:
            assert (await node.adopt(BUNDLE, site)).outcome == "installed"
        assert tree(site.roots["inductor"]) == FILES

    asyncio.run(main())
    assert list((tmp_path / "staging").iterdir()) == []


def test_the_newest_generation_and_the_pinned_one_travel_with_the_pin(tmp_path: Path, store: Path) -> None:
    away = tmp_path / "away"
    away.mkdir()
    texts = [table_text(4, tactic=number) for number in (1, 2, 3)]

    async def main() -> None:
        for number, text in enumerate(texts):
            await publish_table(tmp_path / f"n{number}", store, text)
        async with node_at(tmp_path / "op", store) as node, node_at(tmp_path / "far", away) as far:
            async for found in list_artifacts(node.chain, TRUSTED):
                if found.manifest.generation == 1:
                    await pin_generation(node.chain, [KEY], TRUSTED, found, publisher="op", now=int(time.time()))
            done = await copy(node.chain, *far.chain.tiers, staging=tmp_path / "staging")
            assert [item.listed.manifest.generation for item in done] == [1, 3]
        assert await adopted_table(tmp_path / "new", away) == ("installed", texts[0])

    asyncio.run(main())


def test_a_denied_payload_stays_where_it_is(tmp_path: Path, store: Path) -> None:
    """The denial may be known to the source or to the target."""
    away = tmp_path / "away"
    away.mkdir()

    async def main() -> None:
        digest = await publish_table(tmp_path / "a", store, table_text(4))
        denial = {"kind": TABLE.name, "sha256": digest, "reason": "crashes", "publisher": "op", "now": int(time.time())}
        async with node_at(tmp_path / "op", store) as node, node_at(tmp_path / "far", away) as far:
            await deny(far.chain, [KEY], **denial)
            (done,) = await copy(node.chain, *far.chain.tiers, staging=tmp_path / "staging")
            assert done.outcome == "denied"
        async with node_at(tmp_path / "op2", store) as node, node_at(tmp_path / "far2", away) as far:
            await deny(node.chain, [KEY], **denial)
            (done,) = await copy(node.chain, *far.chain.tiers, staging=tmp_path / "staging")
            assert done.outcome == "denied"
        assert not any("/manifest/" in key for key in objects(away))

    asyncio.run(main())


def test_another_generation_of_the_same_number_is_never_replaced(tmp_path: Path, store: Path) -> None:
    away = tmp_path / "away"
    away.mkdir()

    async def main() -> None:
        await publish_table(tmp_path / "a", store, table_text(4, tactic=1))
        await publish_table(tmp_path / "b", away, table_text(4, tactic=2))
        before = objects(away)
        async with node_at(tmp_path / "op", store) as node, node_at(tmp_path / "far", away) as far:
            (done,) = await copy(node.chain, *far.chain.tiers, staging=tmp_path / "staging")
        assert (done.outcome, done.nbytes) == ("conflict", 0)
        assert "generation 1" in done.why
        assert objects(away) == before

    asyncio.run(main())


def test_what_two_nodes_published_at_once_is_the_same_thing(tmp_path: Path, store: Path) -> None:
    """Each signed its own manifest of the same payload; the one that is there stands, and lost objects are restored."""
    away = tmp_path / "away"
    away.mkdir()

    async def main() -> None:
        await publish_table(tmp_path / "a", store, table_text(4), run="one")
        await publish_table(tmp_path / "b", away, table_text(4), run="other")
        before = objects(away)
        async with node_at(tmp_path / "op", store) as node, node_at(tmp_path / "far", away) as far:
            (done,) = await copy(node.chain, *far.chain.tiers, staging=tmp_path / "staging")
            assert done.outcome == "present"
            assert objects(away) == before
        shutil.rmtree(away / NAMESPACE / "object")
        async with node_at(tmp_path / "op2", store) as node, node_at(tmp_path / "far2", away) as far:
            (done,) = await copy(node.chain, *far.chain.tiers, staging=tmp_path / "staging")
            assert done.outcome == "copied"
        assert objects(away) == before

    asyncio.run(main())


def test_a_payload_that_is_not_what_was_signed_is_not_copied(tmp_path: Path, store: Path) -> None:
    target = FakeStore()

    async def main() -> None:
        await publish_bundle(tmp_path / "a", store)
        spoil(store, "bundle.tar")
        async with node_at(tmp_path / "op", store) as node:
            (done,) = await copy(node.chain, target, staging=tmp_path / "staging")
        assert done.outcome == "missing"
        assert target.objects == {}

    asyncio.run(main())


def test_what_an_untrusted_key_signed_is_not_copied(tmp_path: Path, store: Path) -> None:
    async def main() -> None:
        await publish_table(tmp_path / "a", store, table_text(4), key=PublisherKey.generate("stranger"))
        async with node_at(tmp_path / "op", store) as node:
            assert await copy(node.chain, FakeStore(), staging=tmp_path / "staging") == []

    asyncio.run(main())


def test_a_copy_that_is_cut_off_leaves_no_manifest_and_is_completed_later(tmp_path: Path, store: Path) -> None:
    class Failing(FakeStore):
        """Takes so many objects, then none."""

        room = 0

        async def _write(self, key, body):  # type: ignore[no-untyped-def]
            self.faults.full = len(self.objects) >= self.room
            await super()._write(key, body)

    async def main() -> None:
        await publish_bundle(tmp_path / "a", store)
        whole = len(objects(store))
        target = Failing()
        async with node_at(tmp_path / "op", store) as node:
            for room in range(whole - 1):  # all but the manifest and its hint, at the most
                target.room = room
                (done,) = await copy(node.chain, target, staging=tmp_path / "staging")
                assert done.outcome == "failed"
                assert any("/manifest/" in key for key in target.objects) is (room == whole - 1)
            target.room = whole
            (done,) = await copy(node.chain, target, staging=tmp_path / "staging")
            assert done.outcome == "copied"
        assert target.objects == objects(store)

    asyncio.run(main())


def test_one_failing_target_does_not_keep_the_others_from_theirs(tmp_path: Path, store: Path) -> None:
    broken, good = FakeStore("broken"), FakeStore("good")
    broken.faults.refuse = True

    async def main() -> None:
        await publish_table(tmp_path / "a", store, table_text(4))
        async with node_at(tmp_path / "op", store) as node:
            done = await copy(node.chain, broken, good, staging=tmp_path / "staging")
        assert [(item.target, item.outcome) for item in done] == [("broken", "failed"), ("good", "copied")]
        assert good.objects == objects(store)

    asyncio.run(main())


# The commands ---------------------------------------------------------------------------------------------


@pytest.fixture
def options(tmp_path: Path, store: Path) -> list[str]:
    """What every command is told of the fleet, in which one node has published a table."""
    token_file, root = tmp_path / "token", tmp_path / "root"
    write_token(token_file, new_token())
    (key,), _ = fleet_keys(
        read_tokens(file=token_file, arguments=(), environ={}), root / "warmseed", signing=None, trusted=()
    )
    asyncio.run(publish_table(tmp_path / "maker", store, table_text(4), key=key))
    return ["--cache-root", str(root), "--seed-token-file", str(token_file)]


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def on_disk(tmp_path: Path) -> dict[str, bytes]:
    return objects(tmp_path / "root" / "warmseed" / "store" / "objects")


def test_pull_fills_the_disk_from_the_stores_and_push_a_store_from_the_disk(
    tmp_path: Path, store: Path, options: list[str]
) -> None:
    assert "copied" in invoke("pull", *options, "--warmup-cache-stores", f"file:{store}")
    assert on_disk(tmp_path) == objects(store)
    assert "present" in invoke("pull", *options, "--warmup-cache-stores", f"file:{store}")
    second = tmp_path / "second"
    second.mkdir()
    said = json.loads(
        invoke("push", "flashinfer_autotune", *options, "--warmup-cache-stores", f"file:{second}", "--json")
    )
    (row,) = said["generations"]
    assert (row["outcome"], row["generation"], row["target"].split("|")[0]) == ("copied", 1, "file")
    assert objects(second) == objects(store)


def test_an_exported_folder_brings_a_fleet_that_cannot_reach_the_stores_up_to_date(
    tmp_path: Path, store: Path, options: list[str]
) -> None:
    stick = tmp_path / "stick"
    assert "copied" in invoke("export", str(stick), *options, "--warmup-cache-stores", f"file:{store}")
    assert objects(stick) == objects(store)
    shutil.rmtree(tmp_path / "root" / "warmseed" / "store")
    other = tmp_path / "other"
    other.mkdir()
    said = invoke("import", str(stick), *options, "--warmup-cache-stores", f"file:{other}")
    assert said.count("copied") == 2
    assert objects(other) == on_disk(tmp_path) == objects(stick)


def test_a_copy_that_was_not_made_ends_with_an_error(tmp_path: Path, store: Path, options: list[str]) -> None:
    for payload in (store / NAMESPACE / "object").iterdir():
        payload.write_bytes(b"not that")
    result = CliRunner().invoke(app, ["pull", *options, "--warmup-cache-stores", f"file:{store}"])
    assert isinstance(result.exception, WarmseedError)
    assert "1 of 1 copies were not made" in str(result.exception)
    assert "missing" in result.output


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["pull"], "name one with --warmup-cache-stores"),
        (["push"], "name one with --warmup-cache-stores"),
        (["import", "/nowhere/at/all"], "not a folder"),
        (["export", "/nowhere/at/all"], "can't be made"),
    ],
)
def test_requests_that_cannot_work_say_what_is_wrong(tmp_path: Path, arguments: list[str], word: str) -> None:
    result = CliRunner().invoke(app, [*arguments, "--cache-root", str(tmp_path / "root")])
    assert isinstance(result.exception, ConfigurationError)
    assert word in str(result.exception)


@pytest.mark.parametrize("command", ["pull", "ls"])
def test_a_store_that_cannot_be_listed_is_named_with_the_reason(tmp_path: Path, command: str) -> None:
    arguments = [command, "--cache-root", str(tmp_path / "root"), "--warmup-cache-stores", "http://127.0.0.1:9/"]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, WarmseedError), result.exception
    assert "http: list" in str(result.exception)
