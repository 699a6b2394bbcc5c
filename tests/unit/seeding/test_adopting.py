"""Publishing and adopting over a disk and a shared store: what is believed, what is refused, and why."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support import channel
from tests.support.artifacts import FLEET, KIND, NOW, STRANGER, TABLE, PlainKind, SeedNode, run
from tests.support.sites import ENVIRONMENT

from warmseed.seeding.adopt import Adoption
from warmseed.seeding.artifact import denial_key, object_key
from warmseed.seeding.channel.errors import PeerUnreachable
from warmseed.seeding.environment import UNKNOWN
from warmseed.seeding.origins.payload import ABANDONED
from warmseed.seeding.publish import LIFE, Publisher
from warmseed.seeding.trust.judge import DAY, Trust
from warmseed.seeding.trust.keys import PublisherKey
from warmseed.seeding.trust.manifest import Index, Manifest, sign_manifest
from warmseed.seeding.trust.marks import load_marks
from warmseed.seeding.trust.probation import Probation
from warmseed.seeding.trust.statements import Denial, Pin, sign_denial, sign_pin
from warmseed.stores.folder import FolderStore
from warmseed.testing.fake_store import FakeStore


def shared_folder(base: Path) -> Path:
    folder = base / "shared"
    folder.mkdir(exist_ok=True)
    return folder


def node(base: Path, name: str, **changes: Any) -> SeedNode:
    """A node of the fleet over the shared folder."""
    settings: dict[str, Any] = {"stores": (FolderStore(shared_folder(base)),), "keys": (FLEET,)}
    return SeedNode(base / name, **(settings | changes))


async def adopted(who: SeedNode, **settings: Any) -> Adoption:
    try:
        return await who.adopter(**settings).adopt(who.kind, who.site)
    finally:
        await who.chain.aclose()


def reasons(adoption: Adoption) -> list[str]:
    return [refusal.reason for refusal in adoption.refusals]


def test_what_one_node_publishes_another_adopts_and_hands_on_as_signed(tmp_path: Path) -> None:
    async def main() -> None:
        a, b = node(tmp_path, "a"), node(tmp_path, "b")
        published = await a.publish(TABLE)
        adoption = await adopted(b)
        assert adoption.outcome == "installed"
        assert adoption.complete
        assert adoption.envelope == published.envelope
        assert b.kind.installed == [TABLE]
        assert load_marks(b.marks).marks[b.key.manifest_folder].generation == 1
        assert list((b.site.state / "staging").iterdir()) == []

    run(main())


def test_neither_publishing_nor_adopting_blocks_the_loop(tmp_path: Path) -> None:
    a, b = node(tmp_path, "a"), node(tmp_path, "b")
    capture = a.capture(TABLE)

    async def main() -> Adoption:
        await Publisher(a.chain, [FLEET], publisher="a", clock=lambda: NOW).publish(capture, KIND, a.site)
        assert await a.chain.flush(30)
        return await adopted(b)

    assert channel.run(main()).outcome == "installed"


def test_an_adopted_artifact_lies_on_the_nodes_own_disk_for_its_next_start(tmp_path: Path) -> None:
    async def main() -> None:
        await node(tmp_path, "a").publish(TABLE)
        await adopted(node(tmp_path, "b"))
        alone = node(tmp_path, "b", stores=())
        adoption = await adopted(alone)
        assert adoption.origin == "disk"
        assert alone.kind.installed == [TABLE]

    run(main())


def test_nothing_is_searched_where_the_cache_is_there_already(tmp_path: Path) -> None:
    async def main() -> None:
        store = FakeStore()
        adoption = await adopted(node(tmp_path, "a", stores=(store,), kind=PlainKind(has=True)))
        assert (adoption.outcome, adoption.complete, store.calls) == ("present", True, [])

    run(main())


Change = Callable[[Manifest], Manifest]


def changed(**fields: Any) -> Change:
    return lambda manifest: msgspec.structs.replace(manifest, **fields)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param(changed(kind="other"), "kind", id="another kind"),
        pytest.param(changed(config_hash="f" * 64), "key", id="another configuration"),
        pytest.param(changed(config_digest="f" * 64), "key", id="a collision of the short hash"),
        pytest.param(changed(dp_rank=1), "rank", id="another replica's rank"),
        pytest.param(changed(world_rank=1), "rank", id="another rank"),
        pytest.param(changed(environment={**ENVIRONMENT, "torch": "2.12.0"}), "environment", id="another torch"),
        pytest.param(changed(issued_at=NOW + DAY, expires_at=NOW + 2 * DAY), "expired", id="from the future"),
        pytest.param(changed(issued_at=NOW - 3 * DAY, expires_at=NOW - 2 * DAY), "expired", id="expired"),
        pytest.param(changed(issued_at=NOW - LIFE - DAY), "expired", id="too old whatever it says"),
        pytest.param(changed(store_key="vllm-warmup-cache/object/" + "f" * 64), "malformed", id="bytes elsewhere"),
    ],
)
def test_a_manifest_that_describes_something_else_is_refused_with_its_reason(
    tmp_path: Path, change: Change, reason: str
) -> None:
    async def main() -> None:
        a, b = node(tmp_path, "a"), node(tmp_path, "b")
        published = await a.publish(TABLE)
        forged = change(published.manifest)
        await a.chain.push(a.key.manifest_key(1), sign_manifest(forged, [FLEET]))
        adoption = await adopted(b)
        assert adoption.outcome == "none"
        if forged.store_key == published.manifest.store_key:
            assert reasons(adoption) == [reason]
        else:
            assert adoption.refusals
        assert b.kind.installed == []
        assert load_marks(b.marks).marks == {}

    run(main())


def test_a_strangers_signature_is_worth_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        await node(tmp_path, "a", keys=(STRANGER,)).publish(TABLE)
        b = node(tmp_path, "b", keys=(FLEET,))
        assert reasons(await adopted(b)) == ["signature"]

    run(main())


def test_bytes_that_are_no_manifest_are_a_refusal_and_the_older_generation_is_taken(tmp_path: Path) -> None:
    async def main() -> None:
        a, b = node(tmp_path, "a"), node(tmp_path, "b")
        await a.publish(TABLE)
        await a.chain.push(a.key.manifest_key(2), b"{}")
        await a.chain.push(a.key.head_key, b"2")
        adoption = await adopted(b)
        assert reasons(adoption) == ["malformed"]
        assert adoption.manifest is not None
        assert adoption.manifest.generation == 1

    run(main())


def test_a_payload_that_is_nowhere_costs_its_generation_only(tmp_path: Path) -> None:
    async def main() -> None:
        a, b = node(tmp_path, "a"), node(tmp_path, "b")
        await a.publish(b"old")
        published = await a.publish(b"new")
        (shared_folder(tmp_path) / published.manifest.store_key).unlink()
        adoption = await adopted(b)
        assert reasons(adoption) == ["missing"]
        assert b.kind.installed == [b"old"]

    run(main())


def test_a_generation_that_can_not_be_installed_does_not_bar_the_older_one(tmp_path: Path) -> None:
    """The mark of what was not installed is taken back, on disk too, and nothing stays on trial."""

    async def main() -> None:
        a = node(tmp_path, "a")
        await a.publish(b"old")
        await a.publish(b"new")
        picky = PlainKind(unfit=lambda data: "relocation" if data == b"new" else None)
        b = node(tmp_path, "b", kind=picky)
        adoption = await adopted(b)
        assert reasons(adoption) == ["relocation"]
        assert picky.installed == [b"old"]
        assert load_marks(b.marks).marks[b.key.manifest_folder].generation == 1
        assert [trial.generation for trial in Probation(b.site.state).trials()] == [1]

    run(main())


def test_going_back_to_an_older_generation_is_refused_without_a_pin(tmp_path: Path) -> None:
    async def main() -> None:
        a = node(tmp_path, "a")
        await a.publish(b"old")
        published = await a.publish(b"new")
        assert (await adopted(node(tmp_path, "b"))).outcome == "installed"
        await a.chain.aclose()
        folder = shared_folder(tmp_path)
        (folder / a.key.manifest_key(2)).unlink()
        (folder / a.key.head_key).write_bytes(b"1")
        b = node(tmp_path, "b", stores=(FolderStore(folder),))
        assert b.chain.disk is not None
        await b.chain.disk.delete(b.key.manifest_key(2))
        assert published.manifest.generation == 2
        assert reasons(await adopted(b)) == ["rollback"]

    run(main())


@pytest.mark.parametrize("left", [(1, 2), (1,)], ids=["the one before", "one that was older even then"])
def test_poison_bars_the_generation_before_it_no_longer_and_older_ones_still(
    tmp_path: Path, left: tuple[int, ...]
) -> None:
    async def main() -> None:
        a = node(tmp_path, "a")
        for payload in (b"oldest", b"good"):
            await a.publish(payload)
        assert (await adopted(node(tmp_path, "b"))).outcome == "installed"
        poison = (await a.publish(b"poison")).manifest
        await a.chain.aclose()
        b = node(tmp_path, "b")
        assert (await adopted(b)).manifest == poison
        Probation(b.site.state).fail(poison.sha256, b.key.rank_label, "it killed an engine")
        folder = shared_folder(tmp_path)
        for disk in (folder, b.site.state / "store"):
            for generation in {1, 2} - set(left):
                for path in disk.rglob(f"{generation}.json*"):
                    path.unlink()
        again = await adopted(node(tmp_path, "b"))
        if 2 in left:
            assert reasons(again) == ["probation"]
            assert again.manifest is not None
            assert again.manifest.generation == 2
        else:
            assert reasons(again) == ["probation", "rollback"]

    run(main())


async def poisoned_fleet(base: Path) -> None:
    """A published a good generation and a bad one; B adopted the bad one, which the fleet was then told to avoid."""
    a = node(base, "a")
    await a.publish(b"good")
    poison = (await a.publish(b"poison")).manifest
    assert (await adopted(node(base, "b"))).manifest == poison
    await a.chain.put(denial_key(poison.sha256), denied(poison.sha256))
    assert await a.chain.flush(20)
    await a.chain.aclose()


def test_a_denied_generation_does_not_bar_the_one_before_it(tmp_path: Path) -> None:
    async def main() -> None:
        await poisoned_fleet(tmp_path)
        again = await adopted(node(tmp_path, "b"))
        assert reasons(again) == ["denied"]
        assert again.manifest is not None
        assert again.manifest.generation == 1

    run(main())


def test_ranks_that_choose_together_may_go_back_as_well(tmp_path: Path) -> None:
    """Or a group would tune anew for ever where one rank alone goes back to what worked."""

    async def main() -> None:
        await poisoned_fleet(tmp_path)
        b = node(tmp_path, "b")
        async with b.adopter().candidates(b.kind, b.site) as found:
            assert [candidate.manifest.generation for candidate in found] == [1]
        await b.chain.aclose()

    run(main())


async def pin(a: SeedNode, manifest: Manifest, *, issued_at: int = NOW) -> bytes:
    stated = Pin(
        schema=1,
        key=a.key,
        generation=manifest.generation,
        sha256=manifest.sha256,
        issued_at=issued_at,
        expires_at=issued_at + DAY,
        publisher="operator",
    )
    envelope = sign_pin(stated, [FLEET])
    await a.chain.push(a.key.pin_key, envelope)
    return envelope


def test_the_pinned_generation_comes_first_however_old_it_is(tmp_path: Path) -> None:
    async def main() -> None:
        a = node(tmp_path, "a")
        first = await a.publish(b"generation 1")
        for n in range(2, 9):
            await a.publish(b"generation %d" % n)
        await pin(a, first.manifest)
        b = node(tmp_path, "b")
        adoption = await adopted(b)
        assert adoption.refusals == ()
        assert b.kind.installed == [b"generation 1"]

    run(main())


def test_a_pin_takes_a_node_back_that_has_seen_newer_ones(tmp_path: Path) -> None:
    async def main() -> None:
        a = node(tmp_path, "a")
        first = await a.publish(b"old")
        await a.publish(b"new")
        assert (await adopted(node(tmp_path, "b"))).outcome == "installed"
        await pin(a, first.manifest, issued_at=NOW)
        back = node(tmp_path, "b")
        await adopted(back)
        assert back.kind.installed == [b"old"]

    run(main())


class Peer:
    """An origin that is no store."""

    name = "peer"

    def __init__(self, envelope: bytes, payload: bytes) -> None:
        self.envelope, self.payload = envelope, payload

    async def envelopes(self, key: object, *, known: int) -> Any:
        yield self.envelope

    async def object(self, store_key: str, *, sha256: str, length: int, folder: Path) -> Path | None:
        path = folder / "from-a-peer"
        path.write_bytes(self.payload)
        return path


def test_a_pin_binds_what_a_peer_offers_too(tmp_path: Path) -> None:
    async def main() -> None:
        a = node(tmp_path, "a")
        first = await a.publish(b"old")
        second = await a.publish(b"new")
        await pin(a, first.manifest)
        folder = shared_folder(tmp_path)
        for published in (first, second):
            (folder / published.manifest.store_key).unlink()  # no store has the bytes
        b = node(tmp_path, "b")
        adoption = await b.adopter(Peer(second.envelope, b"new")).adopt(b.kind, b.site)
        assert adoption.outcome == "none"
        assert "pinned" in reasons(adoption)
        await b.chain.aclose()

    run(main())


def denied(sha256: str, *, until: int = NOW + DAY, key: PublisherKey = FLEET) -> bytes:
    return sign_denial(
        Denial(
            schema=1,
            kind=KIND,
            sha256=sha256,
            reason="it crashed an engine",
            issued_at=until - 2 * DAY,
            expires_at=until,
            publisher="b",
        ),
        [key],
    )


@pytest.mark.parametrize(
    ("denial", "outcome"),
    [
        pytest.param(lambda sha: denied(sha), "none", id="the fleet's"),
        pytest.param(lambda sha: denied(sha, until=NOW - DAY), "installed", id="one that has run out"),
        pytest.param(lambda sha: denied(sha, key=STRANGER), "installed", id="a stranger's"),
        pytest.param(lambda sha: b"garbage", "installed", id="none at all"),
        pytest.param(lambda sha: denied("f" * 64), "installed", id="another payload's"),
    ],
)
def test_a_denial_counts_while_it_is_the_fleets_and_valid(
    tmp_path: Path, denial: Callable[[str], bytes], outcome: str
) -> None:
    async def main() -> None:
        a, b = node(tmp_path, "a"), node(tmp_path, "b")
        published = await a.publish(TABLE)
        sha256 = published.manifest.sha256
        await a.chain.push(denial_key(sha256), denial(sha256))
        adoption = await adopted(b)
        assert adoption.outcome == outcome
        assert reasons(adoption) == (["denied"] if outcome == "none" else [])

    run(main())


def test_bad_bytes_in_the_first_store_are_healed_by_the_second(tmp_path: Path) -> None:
    async def main() -> None:
        bad, good = FakeStore("bad"), FakeStore("good")
        a = node(tmp_path, "a", stores=(bad, good))
        published = await a.publish(TABLE)
        bad.objects[published.manifest.store_key] = b"x" * len(TABLE)
        b = node(tmp_path, "b", stores=(bad, good))
        adoption = await b.adopter().adopt(b.kind, b.site)
        assert adoption.outcome == "installed"
        assert b.kind.installed == [TABLE]
        assert await b.chain.flush(10)
        assert bad.objects[published.manifest.store_key] == TABLE
        await b.chain.aclose()

    run(main())


def test_bad_bytes_on_the_disk_are_removed_and_fetched_again(tmp_path: Path) -> None:
    async def main() -> None:
        published = await node(tmp_path, "a").publish(TABLE)
        b = node(tmp_path, "b")
        assert b.chain.disk is not None
        await b.chain.disk.put(published.manifest.store_key, b"rotten")
        assert (await b.adopter().adopt(b.kind, b.site)).outcome == "installed"
        assert await b.chain.disk.get(published.manifest.store_key, limit=1 << 20) == TABLE
        await b.chain.aclose()

    run(main())


def test_a_store_that_hangs_costs_the_budget_and_no_more(tmp_path: Path) -> None:
    async def main() -> None:
        store = FakeStore()
        store.faults.hang = True
        b = node(tmp_path, "b", stores=(store,))
        begun = time.monotonic()
        adoption = await b.adopter(budget=0.3).adopt(b.kind, b.site)
        assert reasons(adoption) == ["budget"]
        assert "this node does the work" in adoption.refusals[0].message
        assert time.monotonic() - begun < 8
        assert await b.adopter(budget=0.3).known(b.kind, b.site) is None
        await b.chain.aclose()

    run(main())


def test_an_installation_that_began_within_the_budget_is_seen_to_its_end(tmp_path: Path) -> None:
    """Given up half way, it would go on in its thread and change the cache under the engine."""

    async def main() -> None:
        await node(tmp_path, "a").publish(TABLE)

        def slow(data: bytes) -> None:
            time.sleep(0.6)

        b = node(tmp_path, "b", kind=PlainKind(unfit=slow))
        adoption = await adopted(b, budget=0.5)
        if reasons(adoption) != ["budget"]:  # a machine so busy that the fetch alone took the budget
            assert adoption.outcome == "installed"
            assert b.kind.installed == [TABLE]

    run(main())


def test_a_node_that_does_not_know_itself_installs_nothing_and_remembers_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        a = node(tmp_path, "a", environment={**ENVIRONMENT, "cxx": UNKNOWN})
        await a.publish(TABLE)
        b = node(tmp_path, "b", environment={**ENVIRONMENT, "cxx": UNKNOWN})
        assert reasons(await adopted(b)) == ["cannot-judge"]
        assert not b.marks.exists()
        assert Probation(b.site.state).trials() == ()

    run(main())


def test_a_peer_that_is_lost_is_a_reason_and_the_search_is_over(tmp_path: Path) -> None:
    class Lost(Peer):
        async def envelopes(self, key: object, *, known: int) -> Any:
            raise PeerUnreachable("nobody there")
            yield b""

    async def main() -> None:
        b = node(tmp_path, "b", stores=())
        adoption = await b.adopter(Lost(b"", b"")).adopt(b.kind, b.site)
        assert [(r.origin, r.reason) for r in adoption.refusals] == [("peer", "unavailable")]
        await b.chain.aclose()

    run(main())


def test_a_disk_that_takes_nothing_is_a_reason_and_nothing_is_installed(tmp_path: Path) -> None:
    async def main() -> None:
        await node(tmp_path, "a").publish(TABLE)
        b = node(tmp_path, "b")
        b.site.state.mkdir(parents=True)
        (b.site.state / "staging").write_text("in the way")
        adoption = await adopted(b)
        assert reasons(adoption) == ["disk"]
        assert b.kind.installed == []

    run(main())


def test_what_killed_processes_left_in_staging_goes_and_what_others_write_stays(tmp_path: Path) -> None:
    async def main() -> None:
        await node(tmp_path, "a").publish(TABLE)
        b = node(tmp_path, "b")
        staging = b.site.state / "staging"
        staging.mkdir(parents=True)
        for name, age in (("abandoned", ABANDONED + 60), ("busy", 10.0)):
            (staging / name).write_bytes(b"x")
            os.utime(staging / name, (time.time() - age,) * 2)
        await adopted(b)
        assert [file.name for file in staging.iterdir()] == ["busy"]

    run(main())


def test_an_index_of_absurd_length_is_never_fetched(tmp_path: Path) -> None:
    async def main() -> None:
        store = FakeStore()
        a, b = node(tmp_path, "a", stores=(store,)), node(tmp_path, "b", stores=(store,))
        published = await a.publish(TABLE)
        forged = changed(index=Index("e" * 64, 1 << 40))(published.manifest)
        await a.chain.push(a.key.manifest_key(1), sign_manifest(forged, [FLEET]))
        assert reasons(await adopted(b)) == ["length"]
        assert store.count("open", object_key("e" * 64)) == 0

    run(main())


def test_ranks_of_one_node_do_not_forget_each_others_marks(tmp_path: Path) -> None:
    async def main() -> None:
        a, b = node(tmp_path, "a"), node(tmp_path, "b")
        await a.publish(TABLE)
        other = node(tmp_path, "b")
        other.site = dataclasses.replace(other.site, config_hash="9" * 64)
        builder = node(tmp_path, "c")
        builder.site = other.site
        await builder.publish(b"another table")
        await adopted(b)
        await adopted(other)
        assert set(load_marks(b.marks).marks) == {b.key.manifest_folder, other.key.manifest_folder}

    run(main())


def test_publishing_goes_on_after_the_generations_this_node_has_seen(tmp_path: Path) -> None:
    """A wiped store must not lead to a generation that this node itself refuses as old."""

    async def main() -> None:
        a = node(tmp_path, "a")
        for n in range(3):
            await a.publish(b"table %d" % n)
        b = node(tmp_path, "b")
        assert (await b.adopter().adopt(b.kind, b.site)).outcome == "installed"
        await b.chain.aclose()
        seen = b.trust.marks
        (tmp_path / "shared").rename(tmp_path / "gone")
        again = node(tmp_path, "d")
        again.trust = Trust(b.trust.keyring, marks=seen)
        assert (await again.publish(TABLE)).manifest.generation == 4
        await again.chain.aclose()

    run(main())


def test_the_payload_is_written_before_its_index_and_the_manifest_last(tmp_path: Path) -> None:
    async def main() -> None:
        store = FakeStore()
        a = node(tmp_path, "a", stores=(store,))
        capture = dataclasses.replace(a.capture(TABLE), index=b"an index")
        await Publisher(a.chain, [FLEET], publisher="a", clock=lambda: NOW).publish(capture, KIND, a.site)
        assert await a.chain.flush(10)
        index = object_key(hashlib.sha256(b"an index").hexdigest())
        puts = [call.key for call in store.calls if call.operation == "put"]
        assert puts[0] == capture.store_key
        assert index in puts
        assert puts[-2:] == [a.key.manifest_key(1), a.key.head_key]
        await a.chain.aclose()

    run(main())
