"""The chain: order of tiers, what is a hit, what is filled; nothing that a tier does costs more than a miss."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from tests.support.waiting import run, until

from warmseed.stores.base import StoreLimits
from warmseed.stores.chain import Chain
from warmseed.stores.disk import DiskStore
from warmseed.stores.errors import InvalidKey, StoreError
from warmseed.stores.registry import wrap
from warmseed.stores.wrappers import Breaker
from warmseed.testing.fake_store import FakeStore, Faults

KEY = "kind/aa/doc"
GOOD = b"good bytes " * 1000
SHA = hashlib.sha256(GOOD).hexdigest()
SHORT = StoreLimits(deadline=0.2, stream_deadline=1.0)


async def with_chain(chain: Chain, work: Callable[[Chain], Awaitable[None]]) -> None:
    try:
        await work(chain)
    finally:
        await chain.aclose()


async def fetched(chain: Chain, folder: Path, name: str = "into") -> tuple[str, bytes] | None:
    found = await chain.fetch_verified(KEY, sha256=SHA, length=len(GOOD), into=folder / name)
    if found is None:
        return None
    return found.tier, await asyncio.to_thread((folder / name).read_bytes)


LIES: dict[str, Faults] = {
    "garbage": Faults(lie=lambda data: b"\0" * len(data)),
    "empty": Faults(lie=lambda data: b""),
    "truncated and saying so": Faults(lie=lambda data: data[:-1]),
    "truncated": Faults(truncate=100),
    "one flipped bit": Faults(lie=lambda data: data[:500] + bytes([data[500] ^ 1]) + data[501:]),
    "longer than it states": Faults(states=len(GOOD) - 10),
    "longer": Faults(lie=lambda data: data + b"x"),
    "endless": Faults(lie=lambda data: data * 1000),
    "cut": Faults(cut=1000),
    "dropped": Faults(drop=True),
    "hanging": Faults(hang=True),
    "stalling": Faults(stall=1000),
}


@pytest.mark.parametrize("disk", [True, False], ids=["disk", "no disk"])
@pytest.mark.parametrize("name", LIES)
def test_a_bad_object_in_one_tier_is_a_miss_there_and_the_next_is_asked(tmp_path: Path, name: str, disk: bool) -> None:
    async def work() -> None:
        bad = FakeStore("bad", limits=SHORT, objects={KEY: GOOD})
        good = FakeStore("good", limits=SHORT, objects={KEY: GOOD})
        bad.faults = LIES[name]
        chain = Chain(DiskStore(tmp_path / "store") if disk else None, [bad, good], writes="none")

        async def test(chain: Chain) -> None:
            assert await fetched(chain, tmp_path) == ("good", GOOD)
            assert await chain.get_verified(KEY, sha256=SHA, length=len(GOOD)) == GOOD
            assert await chain.get(KEY, limit=len(GOOD), accept=lambda data: data == GOOD) == GOOD
            assert good.count("open") >= 1
            assert bad.waiting == 0

        await with_chain(chain, test)

    run(work)


@pytest.mark.parametrize("name", LIES)
def test_when_every_tier_is_bad_the_answer_is_a_miss_and_nothing_is_left_behind(tmp_path: Path, name: str) -> None:
    async def work() -> None:
        bad = FakeStore("bad", limits=SHORT, objects={KEY: GOOD})
        bad.faults = LIES[name]
        disk = DiskStore(tmp_path / "store")

        async def test(chain: Chain) -> None:
            assert await fetched(chain, tmp_path) is None
            assert not (tmp_path / "into").exists()
            assert await chain.get_verified(KEY, sha256=SHA, length=len(GOOD)) is None
            assert await disk.stat(KEY) is None
            assert list((tmp_path / "store/staging").iterdir()) == []

        await with_chain(Chain(disk, [wrap(bad)]), test)

    run(work)


def test_a_damaged_file_on_the_disk_is_replaced_from_the_next_tier(tmp_path: Path) -> None:
    async def work() -> None:
        disk = DiskStore(tmp_path / "store")
        good = FakeStore("good", objects={KEY: GOOD})
        await disk.put(KEY, b"\0" * len(GOOD))

        async def test(chain: Chain) -> None:
            assert await fetched(chain, tmp_path) == ("good", GOOD)
            assert await disk.get(KEY, limit=1 << 20) == GOOD
            assert await fetched(chain, tmp_path) == ("disk", GOOD)

        await with_chain(Chain(disk, [good]), test)

    run(work)


def test_the_disk_is_asked_first_and_filled_by_what_a_tier_had(tmp_path: Path) -> None:
    async def work() -> None:
        one, two = FakeStore("one"), FakeStore("two", objects={KEY: GOOD})

        async def test(chain: Chain) -> None:
            assert await chain.get(KEY, limit=1 << 20) == GOOD
            assert await chain.get(KEY, limit=1 << 20) == GOOD
            assert one.count("open") == two.count("open") == 1
            assert await chain.flush(5)
            assert one.objects == {KEY: GOOD}, "the faster shared tier is filled too"

        await with_chain(Chain(DiskStore(tmp_path / "store"), [one, two]), test)

    run(work)


@pytest.mark.parametrize(("writes", "expected"), [("all", [1, 1]), ("first", [1, 0]), ("none", [0, 0])])
def test_writes_reach_the_tiers_that_were_asked_for(tmp_path: Path, writes: str, expected: list[int]) -> None:
    async def work() -> None:
        tiers = [FakeStore("one"), FakeStore("two")]

        async def test(chain: Chain) -> None:
            await chain.put(KEY, GOOD)
            assert await chain.flush(5)
            assert [len(tier.objects) for tier in tiers] == expected
            assert await DiskStore(tmp_path / "store").get(KEY, limit=1 << 20) == GOOD

        await with_chain(Chain(DiskStore(tmp_path / "store"), tiers, writes=writes), test)  # type: ignore[arg-type]

    run(work)


def test_a_hung_tier_does_not_hold_up_a_write_or_the_other_tiers(tmp_path: Path) -> None:
    async def work() -> None:
        hung, well = FakeStore("hung", limits=StoreLimits(deadline=30)), FakeStore("well")
        hung.faults.hang = True
        loop = asyncio.get_running_loop()

        async def test(chain: Chain) -> None:
            start = loop.time()
            for number in range(200):
                await chain.put(f"kind/{number}", b"x")
            assert loop.time() - start < 10
            await until(lambda: len(well.objects) >= 64)
            assert chain.fan_out.dropped > 0, "the queue of the hung tier is bounded"
            assert not await chain.flush(0.05)

        await with_chain(Chain(DiskStore(tmp_path / "store"), [hung, well]), test)
        assert hung.waiting == 0, "closing the chain leaves no task behind"
        assert hung.closed

    run(work)


def test_what_is_written_last_is_visible_last_in_each_tier(tmp_path: Path) -> None:
    async def work() -> None:
        tier = FakeStore("tier")
        tier.faults.latency = 0.01

        async def test(chain: Chain) -> None:
            for number in range(10):
                await chain.put(f"kind/{number}", b"x")
            assert await chain.flush(5)
            assert [call.key for call in tier.calls] == [f"kind/{n}" for n in range(10)]

        await with_chain(Chain(DiskStore(tmp_path / "store"), [tier]), test)

    run(work)


@pytest.mark.parametrize("how", ["get", "open", "fetch"])
def test_64_readers_of_one_key_cause_one_upstream_read(tmp_path: Path, how: str) -> None:
    async def work() -> None:
        tier = FakeStore("tier", objects={KEY: GOOD})
        tier.faults.latency = 0.05

        async def read(chain: Chain, number: int) -> bytes | None:
            if how == "get":
                return await chain.get(KEY, limit=1 << 20)
            if how == "fetch":
                found = await fetched(chain, tmp_path, f"into{number}")
                return None if found is None else found[1]
            async with chain.open(KEY, limit=1 << 20) as reader:
                return None if reader is None else b"".join([piece async for piece in reader])

        async def test(chain: Chain) -> None:
            got = await asyncio.gather(*(read(chain, n) for n in range(64)))
            assert got == [GOOD] * 64
            assert tier.count("open") == 1

        await with_chain(Chain(DiskStore(tmp_path / "store"), [wrap(tier)]), test)

    run(work)


def test_a_cancelled_reader_does_not_take_the_others_with_it(tmp_path: Path) -> None:
    async def work() -> None:
        tier = FakeStore("tier", objects={KEY: GOOD})
        tier.faults.latency = 0.2

        async def test(chain: Chain) -> None:
            first = asyncio.create_task(chain.get(KEY, limit=1 << 20))
            others = [asyncio.create_task(chain.get(KEY, limit=1 << 20)) for _ in range(5)]
            await until(lambda: bool(tier.calls))
            first.cancel()
            assert await asyncio.gather(*others) == [GOOD] * 5
            assert first.cancelled()
            assert tier.count("open") == 1

        await with_chain(Chain(DiskStore(tmp_path / "store"), [wrap(tier)]), test)

    run(work)


def test_a_hung_first_tier_costs_its_deadline_once(tmp_path: Path) -> None:
    async def work() -> None:
        hung = FakeStore("hung", limits=StoreLimits(deadline=0.5))
        good = FakeStore("good", objects={f"kind/{n}": GOOD for n in range(20)})
        hung.faults.hang = True
        loop = asyncio.get_running_loop()

        async def test(chain: Chain) -> None:
            start = loop.time()
            assert await chain.get("kind/0", limit=1 << 20) == GOOD
            first = loop.time() - start
            assert 0.4 < first < 2.5
            for number in range(1, 20):
                assert await chain.get(f"kind/{number}", limit=1 << 20) == GOOD
            assert hung.count("open") == 1
            assert hung.waiting == 0
            assert chain.states() == {"hung": "open", "good": "closed"}

        await with_chain(Chain(DiskStore(tmp_path / "store"), [wrap(hung), wrap(good)]), test)

    run(work)


def test_a_tier_that_answered_at_start_and_failed_later_is_used_again_when_it_is_well(tmp_path: Path) -> None:
    async def work() -> None:
        now = 0.0
        tier = FakeStore("tier", objects={KEY: GOOD})
        breaker = Breaker(tier, clock=lambda: now)

        async def test(chain: Chain) -> None:
            nonlocal now
            assert await chain.get("kind/other", limit=10) is None
            tier.faults.drop = True
            for _ in range(5):
                assert await chain.get(KEY, limit=1 << 20) is None
            assert breaker.state == "open"
            assert tier.count("open", KEY) == 3
            tier.faults.drop = False
            now += 3600
            assert await chain.get(KEY, limit=1 << 20) is None, "nobody waits for the probe"
            await until(lambda: breaker.state == "closed")
            assert await chain.get(KEY, limit=1 << 20) == GOOD

        await with_chain(Chain(DiskStore(tmp_path / "store"), [breaker]), test)

    run(work)


def test_a_document_is_judged_by_its_caller_tier_by_tier(tmp_path: Path) -> None:
    async def work() -> None:
        disk = DiskStore(tmp_path / "store")
        await disk.put(KEY, b"generation 1")
        old, new = FakeStore("old", objects={KEY: b"generation 2"}), FakeStore("new", objects={KEY: b"generation 3"})
        asked: list[bytes] = []

        def newest(data: bytes) -> bool:
            asked.append(data)
            return data.endswith(b"3")

        async def test(chain: Chain) -> None:
            assert await chain.get(KEY, limit=100, accept=newest) == b"generation 3"
            assert asked[0] == b"generation 1"
            assert await disk.get(KEY, limit=100) == b"generation 3"
            assert [a.tier async for a in chain.answers(KEY, limit=100)] == ["disk", "old", "new"]
            assert await chain.get(KEY, limit=100, fresh=True) == b"generation 2"

        await with_chain(Chain(disk, [old, new], writes="none"), test)

    run(work)


def test_a_read_only_tier_is_still_read(tmp_path: Path) -> None:
    async def work() -> None:
        tier = FakeStore("tier", objects={KEY: GOOD})
        tier.faults.refuse = True

        async def test(chain: Chain) -> None:
            for number in range(10):
                await chain.put(f"kind/{number}", b"x")
            assert await chain.flush(5)
            assert chain.states() == {"tier": "closed"}
            assert await chain.get(KEY, limit=1 << 20) == GOOD

        await with_chain(Chain(DiskStore(tmp_path / "store"), [wrap(tier)]), test)

    run(work)


def test_a_full_tier_gets_no_retry_and_stays_in_use(tmp_path: Path) -> None:
    async def work() -> None:
        tier = FakeStore("tier", objects={KEY: GOOD})
        tier.faults.full = True

        async def test(chain: Chain) -> None:
            await chain.put("kind/new", b"x")
            assert await chain.flush(5)
            assert tier.count("put") == 1
            assert await chain.get(KEY, limit=1 << 20) == GOOD

        await with_chain(Chain(DiskStore(tmp_path / "store"), [wrap(tier)]), test)

    run(work)


def test_push_tells_what_each_tier_did(tmp_path: Path) -> None:
    async def work() -> None:
        well, full = FakeStore("well"), FakeStore("full")
        full.faults.full = True

        async def test(chain: Chain) -> None:
            result = await chain.push(KEY, GOOD)
            assert result["disk"] is None
            assert result["well"] is None
            assert isinstance(result["full"], StoreError)

        await with_chain(Chain(DiskStore(tmp_path / "store"), [well, full]), test)

    run(work)


def test_a_hostile_key_reaches_no_tier(tmp_path: Path) -> None:
    async def work() -> None:
        tier = FakeStore("tier")

        async def test(chain: Chain) -> None:
            with pytest.raises(InvalidKey):
                await chain.get("../x", limit=1)
            with pytest.raises(InvalidKey):
                await chain.fetch_verified("../x", sha256=SHA, length=1, into=tmp_path / "x")
            assert tier.calls == []

        await with_chain(Chain(DiskStore(tmp_path / "store"), [tier]), test)

    run(work)


def test_hostile_text_of_a_store_is_escaped_and_cut_in_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Rude(FakeStore):
        async def _get(self, key: str, limit: int) -> bytes | None:
            raise ValueError("\x1b[31mred\nINFO forged line" + "x" * (1 << 20))

    async def work() -> None:
        async def test(chain: Chain) -> None:
            with caplog.at_level(logging.INFO):
                assert await chain.get(KEY, limit=10) is None

        await with_chain(Chain(DiskStore(tmp_path / "store"), [Rude("rude")]), test)

    run(work)
    text = caplog.text
    assert "rude" in text
    assert "\x1b" not in text
    assert len(text) < 2000
    assert not any(line.startswith("INFO forged") for line in text.splitlines())


def test_an_unwritable_target_is_the_callers_error_and_blames_no_tier(tmp_path: Path) -> None:
    async def work() -> None:
        tier = FakeStore("tier", objects={KEY: GOOD})

        async def test(chain: Chain) -> None:
            with pytest.raises(OSError):
                await chain.fetch_verified(KEY, sha256=SHA, length=len(GOOD), into=tmp_path / "no/such/folder/x")
            assert chain.states() == {"tier": "closed"}

        await with_chain(Chain(None, [wrap(tier)]), test)

    run(work)
