"""What a rank's seeding side does with keys, with captures, and with stores that fail it."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.artifacts import FLEET, TABLE, PlainKind, SeedNode, key_of, run
from tests.support.fake_checkpoint import fake_checkpoint
from tests.support.sites import make_site
from tests.support.specs import spec

from warmseed.daemon.protocol.status import Phase, Refused, RehearsalOutcome, StatusWriter, decode_message
from warmseed.daemon.rank.fleet_keys import node_key
from warmseed.daemon.rank.judge import Judge
from warmseed.daemon.rank.rank import Rank
from warmseed.daemon.rank.seeds import Seeds
from warmseed.errors import ConfigurationError
from warmseed.seeding.adoption import Adoption
from warmseed.seeding.channel.messages import DescribeRequest
from warmseed.seeding.channel.source import Described, Miss, Warming
from warmseed.seeding.environment import Environment
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.kinds.base import Capture, Installation, Site
from warmseed.seeding.trust.keys import PublisherKey
from warmseed.seeding.trust.token import new_token, write_token


def _nobody(*, store: str, operation: str, outcome: str, size: int, seconds: float) -> None: ...


@asynccontextmanager
async def opened(base: Path, *, counted: list[str] | None = None, **settings: Any) -> AsyncIterator[Seeds]:
    (base / "warmseed").mkdir(exist_ok=True)
    reasons = [] if counted is None else counted
    async with Seeds.opened(spec(**settings), base, observer=_nobody, count=reasons.extend) as seeds:
        yield seeds


def fleet(base: Path) -> dict[str, Any]:
    """Settings of a node with a token and a shared folder."""
    base.chmod(0o700)
    token, store = base / "token", base / "store"
    if not token.exists():
        write_token(token, new_token())
        store.mkdir()
    return {"seed_token_file": str(token), "warmup_cache_stores": [f"file:{store}"]}


def test_a_node_without_a_token_believes_its_own_next_start_and_nobody_else(tmp_path: Path) -> None:
    key = tmp_path / "node.key"
    first = node_key(key)
    assert node_key(key).public == first.public
    assert node_key(tmp_path / "another.key").public != first.public


def test_ranks_that_start_together_come_to_one_key(tmp_path: Path) -> None:
    found: list[PublisherKey] = []
    gate = threading.Barrier(8)

    def start() -> None:
        gate.wait(30)
        found.append(node_key(tmp_path / "node.key"))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 8
    assert len({key.public for key in found}) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["node.key"]


def test_a_full_disk_leaves_no_half_key_that_would_stop_every_later_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert node_key(tmp_path / "node.key")  # served, with a key of this process's own
    assert list(tmp_path.iterdir()) == []
    node_key(tmp_path / "node.key")
    assert PublisherKey.load(tmp_path / "node.key")


def test_a_key_is_never_written_over_another(tmp_path: Path) -> None:
    PublisherKey.generate("a").save(tmp_path / "key")
    with pytest.raises(FileExistsError):
        PublisherKey.generate("b").save(tmp_path / "key")
    assert PublisherKey.load(tmp_path / "key").name == "a"
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


@pytest.mark.parametrize(
    ("content", "said"), [(None, "can't be read"), (b"\xff\xfe", "no lines of name:base64"), (b"x:y", "name:base64")]
)
def test_trusted_keys_that_can_not_be_read_stop_the_start(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)

    async def main() -> None:
        async with opened(tmp_path, seed_trusted_keys=[str(path)]):
            raise AssertionError("it was opened")

    with pytest.raises(ConfigurationError, match=said):
        run(main())


def test_a_misspelt_store_stops_the_start(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path, **(fleet(tmp_path) | {"warmup_cache_stores": ["rediss3:"]})):
            raise AssertionError("it was opened")

    with pytest.raises(ConfigurationError, match="did you mean"):
        run(main())


def node(base: Path) -> SeedNode:
    return SeedNode(base / "node", keys=(FLEET,))


def question(who: SeedNode) -> DescribeRequest:
    return DescribeRequest.of(key_of(who.site), instance="1" * 64, environment=who.site.environment)


def test_what_one_node_publishes_the_next_adopts_and_both_hand_on(tmp_path: Path) -> None:
    async def main() -> None:
        who, settings = node(tmp_path), fleet(tmp_path)
        (tmp_path / "a").mkdir()
        async with opened(tmp_path / "a", **settings) as a:
            assert (await a.adopt(who.kind, who.site)).outcome == "none"
            assert isinstance(await a.shelf.describe(question(who)), Warming)
            capture = who.capture(TABLE)
            await a.publish([(who.kind, capture)], {who.kind.name: who.site})
            assert not capture.payload.exists()
            assert isinstance(await a.shelf.describe(question(who)), Described)
        (tmp_path / "b").mkdir()
        async with opened(tmp_path / "b", **settings) as b:
            adoption = await b.adopt(who.kind, who.site)
            assert adoption.outcome == "installed", adoption.refusals
            assert who.kind.installed == [TABLE]
            assert isinstance(await b.shelf.describe(question(who)), Described)

    run(main())


def test_a_publication_that_fails_leaves_no_file_and_nobody_waiting(tmp_path: Path) -> None:
    async def main() -> None:
        who, counted = node(tmp_path), list[str]()
        async with opened(tmp_path, counted=counted, **fleet(tmp_path)) as seeds:
            await seeds.adopt(who.kind, who.site)
            capture = who.capture(TABLE)
            object.__setattr__(capture, "provenance", {"note": "x" * (1 << 20)})  # no envelope can hold it
            await seeds.publish([(who.kind, capture)], {who.kind.name: who.site})
            assert counted == ["not-published"]
            assert not capture.payload.exists()
            assert await seeds.shelf.describe(question(who)) == Miss()

    run(main())


def test_a_cache_that_can_not_be_read_is_not_published_and_counted(tmp_path: Path) -> None:
    class Unreadable(PlainKind):
        def capture(self, site: Site) -> Capture | None:
            raise ArtifactRefused("busy", "it never came to rest")

    async def main() -> None:
        counted = list[str]()
        async with opened(tmp_path, counted=counted, **fleet(tmp_path)) as seeds:
            assert await seeds.capture(Unreadable(), make_site(tmp_path)) is None
        assert counted == ["not-captured"]

    run(main())


def test_what_the_disk_has_no_room_for_still_reaches_the_stores(tmp_path: Path) -> None:
    """The captured file is what the background writes from, so it stays until they are done."""
    large = bytes(9 << 20)

    async def main() -> None:
        who, settings = node(tmp_path), fleet(tmp_path)
        async with opened(tmp_path, **settings) as seeds:
            assert seeds.chain.disk is not None
            seeds.chain.disk.size_limit = 1 << 20
            capture = who.capture(large)
            await seeds.publish([(who.kind, capture)], {who.kind.name: who.site})
            assert (tmp_path / "store" / capture.store_key).stat().st_size == len(large)
            assert not capture.payload.exists()

    run(main())


def test_only_sources_are_waited_for_beyond_the_budget(tmp_path: Path) -> None:
    async def main() -> None:
        who = node(tmp_path)
        settings = fleet(tmp_path) | {"seed_budget": 7.0, "seed_wait": 100.0}
        async with opened(tmp_path, **settings) as seeds:
            assert seeds._adopter(who.site.environment)._budget == 7.0
            assert seeds._adopter(who.site.environment, within=5.0)._budget == 5.0
            assert seeds._adopter(who.site.environment, within=60.0)._budget == 7.0

    run(main())


@pytest.mark.parametrize(
    ("outcome", "rehearsal", "published"),
    [
        ("installed", "ok", True),
        ("installed", "skipped", False),
        ("installed", "failed", False),
        ("present", "skipped", True),
        ("present", "timeout", False),
        ("none", "ok", True),
    ],
)
def test_a_part_that_was_adopted_is_published_only_with_the_rest_that_an_engine_made(
    tmp_path: Path, outcome: Any, rehearsal: RehearsalOutcome, published: bool
) -> None:
    """Otherwise a node at another cache root, which can use only part, gives the fleet that part for the whole."""
    who = node(tmp_path)

    class Partial(PlainKind):
        def capture(self, site: Site) -> Capture | None:
            return who.capture(TABLE)

    told, end = os.pipe()
    status, kind = StatusWriter(end), Partial()
    there = Installation(kind.name, 1, "0" * 64, {}, complete=False) if outcome == "installed" else None
    adoptions = {kind.name: Adoption(kind.name, outcome, installation=there)}

    async def main() -> None:
        async with opened(tmp_path, **fleet(tmp_path)) as seeds:
            rank = Rank(spec(model=str(fake_checkpoint(tmp_path / "model"))), status)
            rank._adoptions = adoptions
            sites = {kind.name: who.site}
            judge = Judge(seeds.trials, sites, (kind,), adoptions, status)
            captures = await rank._capture(seeds, (kind,), sites, judge, rehearsal=rehearsal)
            assert [capture.sha256 for _, capture in captures] == ([who.capture(TABLE).sha256] if published else [])

    run(main())
    status.close()
    os.close(told)


def test_a_kind_that_breaks_costs_its_adoption_and_is_counted(tmp_path: Path) -> None:
    class BrokenKind(PlainKind):
        def environment(self, site: Site) -> Environment:
            raise RuntimeError("a defect in this kind")

    told, end = os.pipe()
    status = StatusWriter(end)

    async def main() -> None:
        async with opened(tmp_path) as seeds:
            rank = Rank(spec(model=str(fake_checkpoint(tmp_path / "model"))), status)
            await rank._adopt(seeds, BrokenKind(), make_site(tmp_path))

    run(main())
    status.close()
    with open(told, "rb") as lines:
        messages = [decode_message(line) for line in lines.read().splitlines()]
    assert Refused({"error": 1}) in messages
    phase = next(message for message in messages if isinstance(message, Phase))
    assert (phase.outcome, phase.detail["refused"]) == ("miss", "here: error")
