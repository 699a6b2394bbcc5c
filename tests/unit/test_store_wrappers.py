"""Each wrapper acts on the failure it is for, and on no other."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.waiting import run, until

from warmseed.blocking import BlockingPool
from warmseed.stores.base import StoreLimits
from warmseed.stores.errors import ObjectInvalid, StoreFull, StoreRefused, StoreTimeout, StoreUnavailable
from warmseed.stores.hostlock import HostLock
from warmseed.stores.wrappers import Breaker, NegativeCache, Retry, SingleFlight, Verifying
from warmseed.stores.wrappers.breaker import PROBE_KEY, BreakerOpen
from warmseed.stores.wrappers.verifying import Expected
from warmseed.testing.fake_store import FakeStore

KEY = "kind/doc"
ROOT = Path(__file__).parents[2]


def test_retry_repeats_what_failed_fast_and_nothing_else() -> None:
    async def work() -> None:
        fake = FakeStore(limits=StoreLimits(deadline=0.1), objects={KEY: b"x"})
        store = Retry(fake, pause=0.001)
        fake.faults.flap = 3
        assert await store.get(KEY, limit=1) == b"x"
        assert fake.count("open") == 3
        for field, error, calls in (("hang", StoreTimeout, 1), ("full", StoreFull, 1), ("refuse", StoreRefused, 1)):
            fake.faults.flap = 0
            fake.calls.clear()
            setattr(fake.faults, field, True)
            with pytest.raises(error):
                await store.put(KEY, b"y")
            assert fake.count("put") == calls
            setattr(fake.faults, field, False)
        fake.calls.clear()
        fake.faults.drop = True
        with pytest.raises(StoreUnavailable):
            await store.stat(KEY)
        assert fake.count("stat") == 3

    run(work)


def test_retry_does_not_repeat_a_stream_that_was_begun() -> None:
    async def work() -> None:
        fake = FakeStore(objects={KEY: b"x" * 100})
        fake.faults.cut = 10
        with pytest.raises(StoreUnavailable):  # noqa: PT012 - the failure comes from the iteration
            async with Retry(fake).open(KEY, limit=100) as reader:
                assert reader is not None
                async for _ in reader:
                    pass
        assert fake.count("open") == 1

    run(work)


def test_a_breaker_opens_on_one_timeout_or_three_failures_and_never_on_an_answer() -> None:
    async def work() -> None:
        fake = FakeStore(limits=StoreLimits(deadline=0.1), objects={KEY: b"x" * 10})
        store = Breaker(fake)
        fake.faults.full = True
        for _ in range(5):
            with pytest.raises(StoreFull):
                await store.put(KEY, b"y")
            with pytest.raises(ObjectInvalid):
                await store.get(KEY, limit=1)
        assert store.state == "closed"
        fake.faults.drop = True
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                await store.get(KEY, limit=10)
        assert store.state == "closed"
        fake.faults.drop, fake.faults.hang = False, True
        with pytest.raises(StoreTimeout):
            await store.get(KEY, limit=10)
        assert store.state == "open"
        with pytest.raises(BreakerOpen, match="not asked"):
            await store.get(KEY, limit=10)
        await store.aclose()

    run(work)


def test_half_open_one_probe_decides_and_nobody_waits_for_it() -> None:
    async def work() -> None:
        now = 0.0
        fake = FakeStore(limits=StoreLimits(deadline=0.1))
        store = Breaker(fake, cooldown=10, clock=lambda: now)
        fake.faults.hang = True
        with pytest.raises(StoreTimeout):
            await store.stat(KEY)
        loop, waits = asyncio.get_running_loop(), []
        for turn in range(3):
            now += 400
            for _ in range(5):
                start = loop.time()
                with pytest.raises(BreakerOpen):
                    await store.stat(KEY)
                waits.append(loop.time() - start)
            assert store.state == "half-open"
            await until(lambda turn=turn: fake.count("stat", PROBE_KEY) == turn + 1 and store.state == "open")
        assert max(waits) < 0.05
        assert fake.count("stat", KEY) == 1
        fake.faults.hang = False
        now += 400
        with pytest.raises(BreakerOpen):
            await store.stat(KEY)
        await until(lambda: store.state == "closed")
        assert await store.stat(KEY) is None
        assert fake.waiting == 0

    run(work)


def test_a_flapping_store_waits_longer_each_time_and_is_let_back_in() -> None:
    async def work() -> None:
        now = 0.0
        fake = FakeStore(objects={KEY: b"x"})
        store = Breaker(fake, failures=1, cooldown=10, clock=lambda: now)
        pauses = []
        for _ in range(4):
            fake.faults.drop = True
            with pytest.raises(StoreUnavailable):
                await store.get(KEY, limit=1)
            fake.faults.drop = False
            before = now
            while store.state != "closed":
                now += 1
                with pytest.raises(BreakerOpen):
                    await store.get(KEY, limit=1)
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                await until(lambda: store.state != "half-open")
            pauses.append(now - before)
        assert pauses[3] > 4 * pauses[0]
        assert await store.get(KEY, limit=1) == b"x"

    run(work)


def test_a_breaker_is_not_tripped_by_what_its_caller_does_with_a_stream() -> None:
    async def work() -> None:
        fake = FakeStore(objects={KEY: b"x"})
        store = Breaker(fake, failures=1)
        with pytest.raises(StoreUnavailable):
            async with store.open(KEY, limit=1):
                raise StoreUnavailable("another store's")
        assert store.state == "closed"

    run(work)


def test_the_negative_cache_forgets_in_time_and_at_once_on_a_put() -> None:
    async def work() -> None:
        now = 0.0
        fake = FakeStore()
        store = NegativeCache(fake, lifetime=2, keys=4, clock=lambda: now)
        for _ in range(5):
            assert await store.get(KEY, limit=1) is None
            assert await store.stat(KEY) is None
        assert len(fake.calls) == 1
        await store.put(KEY, b"x")
        assert await store.get(KEY, limit=1) == b"x"
        assert await store.get("kind/other", limit=1) is None
        fake.objects["kind/other"] = b"y"
        assert await store.get("kind/other", limit=1) is None
        now += 2.1
        assert await store.get("kind/other", limit=1) == b"y"
        for number in range(20):
            await store.get(f"kind/{number}", limit=1)
        assert len(store._missing) <= 4

    run(work)


def test_a_miss_that_was_on_its_way_during_a_put_is_not_remembered() -> None:
    async def work() -> None:
        fake = FakeStore()
        store = NegativeCache(fake)
        fake.faults.latency, fake.faults.operations = 0.05, frozenset({"stat"})
        asking = asyncio.create_task(store.stat(KEY))
        await until(lambda: bool(fake.calls))
        await store.put(KEY, b"x")
        fake.objects.pop(KEY)
        assert await asking is None
        fake.objects[KEY] = b"x"
        assert await store.get(KEY, limit=1) == b"x"

    run(work)


def test_single_flight_shares_failures_and_outlives_its_first_caller() -> None:
    async def work() -> None:
        fake = FakeStore(objects={KEY: b"x"})
        store = SingleFlight(fake)
        fake.faults.latency, fake.faults.drop = 0.02, True
        got = await asyncio.gather(*(store.get(KEY, limit=1) for _ in range(10)), return_exceptions=True)
        assert all(isinstance(error, StoreUnavailable) for error in got)
        assert fake.count("open") == 1
        fake.faults.drop = False
        tasks = [asyncio.create_task(store.get(KEY, limit=1)) for _ in range(3)]
        await until(lambda: fake.count("open") == 2)
        tasks[0].cancel()
        assert await asyncio.gather(*tasks[1:]) == [b"x", b"x"]
        tasks = [asyncio.create_task(store.get(KEY, limit=1)) for _ in range(3)]
        await until(lambda: fake.count("open") == 3)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert await store.get(KEY, limit=1) == b"x"
        assert fake.count("open") == 4

    run(work)


def test_verifying_hands_out_no_last_byte_of_a_wrong_object() -> None:
    async def work() -> None:
        good = b"a" * (3 << 20)
        expected = Expected(hashlib.sha256(good).hexdigest(), len(good))
        fake = FakeStore(objects={KEY: good, "kind/free": b"anything"})
        store = Verifying(fake, lambda key: expected if key == KEY else None)
        async with store.open(KEY, limit=len(good)) as reader:
            assert reader is not None
            assert b"".join([piece async for piece in reader]) == good
        assert await store.get("kind/free", limit=10) == b"anything"
        fake.objects[KEY] = good[:-1] + b"b"
        seen = 0
        with pytest.raises(ObjectInvalid):  # noqa: PT012 - the failure comes from the iteration
            async with store.open(KEY, limit=len(good)) as reader:
                assert reader is not None
                async for piece in reader:
                    seen += len(piece)
        assert seen < len(good)
        with pytest.raises(ObjectInvalid):
            await store.get(KEY, limit=len(good))
        fake.objects[KEY] = b"short"
        with pytest.raises(ObjectInvalid):
            await store.stat(KEY)

    run(work)


PROCESS = """
import asyncio, hashlib, sys
from pathlib import Path
from warmseed.stores.chain import Chain
from warmseed.stores.disk import DiskStore
from warmseed.testing.fake_store import FakeStore
async def main():
    node, log = Path(sys.argv[1]), Path(sys.argv[2])
    data = b"x" * (8 << 20)
    tier = FakeStore("tier", objects={"kind/doc": data})
    real = tier._open
    def opened(key, offset):
        with log.open("a") as file:
            file.write("open\\n")
        return real(key, offset)
    tier._open = opened
    if len(sys.argv) > 3:
        tier.faults.stall = 4 << 20
    chain = Chain(DiskStore(node / "store"), [tier])
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    sha = hashlib.sha256(data).hexdigest()
    found = await chain.fetch_verified("kind/doc", sha256=sha, length=len(data), into=node / f"into{id(chain)}")
    print(found is not None, flush=True)
    await chain.aclose()
asyncio.run(main())
"""


def test_the_processes_of_a_node_download_a_key_once(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    log = tmp_path / "upstream"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(tmp_path), str(log)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for _ in range(4)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        outputs = []
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        outputs = [process.communicate(timeout=60)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert outputs == ["True\n"] * 4
    # A process that finds the lock taken asks whether the tier has the key, and reads nothing of it.
    assert log.read_text().count("open") <= 4
    assert sorted(p.name for p in (tmp_path / "store/objects/kind").iterdir()) == ["doc"]


def test_the_lock_of_a_process_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    async def work() -> None:
        async with HostLock(tmp_path / "flights", KEY) as holder:
            assert holder.mine
            async with HostLock(tmp_path / "flights", KEY) as other:
                assert other.busy
                loop = asyncio.get_running_loop()
                start = loop.time()
                await other.wait(0.1)
                assert loop.time() - start < 2
        async with HostLock(tmp_path / "flights", KEY) as free:
            assert free.mine
        async with HostLock(Path("/proc/no/such"), KEY) as nowhere:
            assert nowhere.mine

    run(work)


def test_a_call_that_never_returns_starves_only_its_own_pool() -> None:
    code = """
import asyncio, threading
from warmseed.blocking import BlockingPool, run_blocking
async def main():
    hung = BlockingPool("hung", 2)
    stuck = [asyncio.create_task(hung.run(threading.Event().wait)) for _ in range(4)]
    await asyncio.sleep(0)
    print(await run_blocking(lambda: "alive"))
    for task in stuck:
        task.cancel()
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        timeout=20,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.stdout == b"alive\n"


def test_a_pool_reports_errors_and_reuses_its_threads() -> None:
    async def work() -> None:
        pool = BlockingPool("few", 3)
        with pytest.raises(ZeroDivisionError):
            await pool.run(lambda: 1 // 0)
        assert await asyncio.gather(*(pool.run(pow, 2, n) for n in range(50))) == [2**n for n in range(50)]
        assert pool._threads <= 3

    run(work)
