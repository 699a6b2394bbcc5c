"""The disk tier under crashes, full and broken disks, several writers, and hostile files."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.faulty_os import fail, fail_call, faults
from tests.support.waiting import run, until

from warmseed.stores.base import CHUNK, Body
from warmseed.stores.disk import DiskStore
from warmseed.stores.errors import StoreFull, StoreRefused, StoreUnavailable
from warmseed.stores.folder import FolderStore
from warmseed.testing.store_contract import pattern_body

KEY = "kind/doc"
ROOT = Path(__file__).parents[2]


def script(name: str, *arguments: object) -> list[str]:
    return [sys.executable, str(ROOT / "tests/support" / name), *map(str, arguments)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}


def staged(folder: Path) -> list[str]:
    return os.listdir(folder / "staging")


@pytest.mark.parametrize("size", [10, 3 * CHUNK], ids=["small", "large"])
def test_sigkill_at_each_step_of_a_put_leaves_old_or_new_and_the_next_start_sweeps(tmp_path: Path, size: int) -> None:
    done = subprocess.run(
        script("kill_at_each_step.py", tmp_path, size),
        capture_output=True,
        env=environment(),
        timeout=100,
        check=True,
    )
    seen = json.loads(done.stdout)
    assert set(seen) == {"old", "new", "none"}
    assert sum(seen.values()) > 20


@pytest.mark.parametrize("size", [10, 3 * CHUNK], ids=["small", "large"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE], ids=errno.errorcode.get)
def test_an_error_at_each_step_of_a_put_is_typed_and_leaves_nothing(tmp_path: Path, error: int, size: int) -> None:
    async def work() -> None:
        store = DiskStore(tmp_path)
        await store.put(KEY, b"old")
        new = b"n" * size
        expected = StoreFull if error in {errno.ENOSPC, errno.EDQUOT} else StoreUnavailable
        for call in range(1, 100):
            with faults(fail_call(call, error)) as faulty:
                failure = (await asyncio.gather(store.put(KEY, new), return_exceptions=True))[0]
            assert failure is None or isinstance(failure, expected)
            if faulty.calls < call:
                break
            assert await store.get(KEY, limit=1 << 30) in (b"old", new)
            assert staged(tmp_path) == []
        assert call > 8
        assert await store.get(KEY, limit=1 << 30) == new

    run(work)


def test_a_failed_fsync_is_never_retried_as_success(tmp_path: Path) -> None:
    async def work() -> None:
        store = DiskStore(tmp_path)
        await store.put(KEY, b"old")
        with faults(fail("fsync", errno.EIO)), pytest.raises(StoreUnavailable):
            await store.put(KEY, b"new")
        assert await store.get(KEY, limit=10) == b"old"

    run(work)


REAL_FULL_DISK = """
import asyncio, errno, os, sys
from pathlib import Path
from warmseed.stores.disk import DiskStore
from warmseed.stores.errors import StoreFull
from warmseed.testing.store_contract import pattern_body
async def main():
    folder = Path(sys.argv[1]) / "store"
    store = DiskStore(folder)
    await store.put("kind/fits", b"x" * 1000)
    for size in (3 << 20, 900_000, 900_000, 900_000):
        try:
            await store.put(f"kind/large{size}", pattern_body(size))
            os.link(folder / f"objects/kind/large{size}", folder / f"kept{os.urandom(4).hex()}")
            await store.delete(f"kind/large{size}")
        except StoreFull as error:
            print("full", "No space" in str(error))
    assert await store.get("kind/fits", limit=1000) == b"x" * 1000
    print(os.listdir(folder / "staging"))
asyncio.run(main())
"""


def in_namespace(mounts: str, code: str, folder: Path) -> list[str]:
    """Run `code` in a mount namespace of its own, after the shell command `mounts`."""
    command = f'set -e; {mounts}; exec "$0" -c "$1" "$2"'
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", command, sys.executable, code, str(folder)],
        capture_output=True,
        env=environment(),
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().splitlines()


def test_a_disk_that_is_really_full_is_store_full_and_keeps_nothing(tmp_path: Path) -> None:
    lines = in_namespace(f"mount -t tmpfs -o size=2m none {tmp_path}", REAL_FULL_DISK, tmp_path)
    assert lines[0] == "full True"
    assert lines.count("full True") >= 2
    assert lines[-1] == "[]"


READ_ONLY = """
import asyncio, logging, sys
from pathlib import Path
from warmseed.stores.chain import Chain
from warmseed.stores.disk import DiskStore
from warmseed.testing.fake_store import FakeStore
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
async def main():
    chain = Chain(DiskStore(Path(sys.argv[1]) / "store"), [FakeStore("up", objects={"kind/up": b"upstream"})])
    print(await chain.get("kind/before", limit=100))
    print(await chain.get("kind/up", limit=100))
    for n in range(20):
        await chain.put(f"kind/{n}", b"in memory")
    print(await chain.get("kind/7", limit=100))
    print(await chain.get("kind/before", limit=100))
    await chain.aclose()
asyncio.run(main())
"""


def test_a_read_only_cache_folder_serves_from_memory_and_warns_once(tmp_path: Path) -> None:
    run(lambda: DiskStore(tmp_path / "store").put("kind/before", b"on disk"))
    mounts = f"mount --bind {tmp_path} {tmp_path}; mount -o remount,ro,bind {tmp_path}"
    lines = in_namespace(mounts, READ_ONLY, tmp_path)
    assert [line for line in lines if not line.startswith("WARNING")] == [
        "b'on disk'",
        "b'upstream'",
        "b'in memory'",
        "b'on disk'",
    ]
    warnings = [line for line in lines if line.startswith("WARNING")]
    assert len(warnings) == 1
    assert str(tmp_path) in warnings[0]
    assert "--cache-root" in warnings[0]


def test_a_folder_that_becomes_read_only_later_costs_nothing_but_persistence(tmp_path: Path) -> None:
    async def work() -> None:
        store = DiskStore(tmp_path)
        await store.put("kind/early", b"1")
        with faults(fail("open", errno.EROFS, times=1000)):
            await store.put("kind/late", b"2")
        assert await store.get("kind/late", limit=1) == b"2"
        assert await store.get("kind/early", limit=1) == b"1"
        with pytest.raises(StoreFull):
            await store.put("kind/huge", pattern_body(40 << 20))

    run(work)


def test_the_least_recently_used_object_goes_first_and_pinned_ones_stay(tmp_path: Path) -> None:
    async def work() -> None:
        store = DiskStore(tmp_path, size_limit=1000)
        for number in range(4):
            await store.put(f"kind/{number}", b"x" * 200)
            path = tmp_path / f"objects/kind/{number}"
            os.utime(path, (1000 + number, 1000 + number))
        await store.pin("kind/0")
        assert await store.get("kind/1", limit=200) is not None  # used now, so no longer the oldest
        await store.put("kind/new", b"x" * 500)
        assert [info.key async for info in store.list()] == ["kind/0", "kind/1", "kind/new"]
        assert await store.used() <= 1000
        assert await store.pinned() == {"kind/0"}
        assert await store.unpin("kind/0")
        assert not await store.unpin("kind/0")
        await store.put("kind/newer", b"x" * 500)
        assert "kind/0" not in [info.key async for info in store.list()]

    run(work)


def test_pins_outlive_the_process_and_a_disk_full_of_them_says_so(tmp_path: Path) -> None:
    async def work() -> None:
        store = DiskStore(tmp_path, size_limit=1000)
        await store.put("kind/pinned", b"x" * 800)
        await store.pin("kind/pinned")
        again = DiskStore(tmp_path, size_limit=1000)
        with pytest.raises(StoreFull, match="pinned"):
            await again.put("kind/other", b"x" * 300)
        with pytest.raises(StoreFull):
            await again.put("kind/too-large", b"x" * 1001)
        assert await again.get("kind/pinned", limit=800) is not None
        assert await again.evict(0) == 0

    run(work)


def test_an_object_is_whole_for_a_reader_that_opened_it_before_it_was_evicted(tmp_path: Path) -> None:
    async def work() -> None:
        store = DiskStore(tmp_path)
        await store.put(KEY, pattern_body(3 * CHUNK))
        async with store.open(KEY, limit=1 << 30) as reader:
            assert reader is not None
            assert await store.evict(0) == 3 * CHUNK
            assert sum([len(piece) async for piece in reader]) == 3 * CHUNK
        assert await store.stat(KEY) is None

    run(work)


def test_a_start_sweeps_dead_writes_but_not_those_of_a_living_process(tmp_path: Path) -> None:
    async def work() -> None:
        await DiskStore(tmp_path).put(KEY, b"x")
        (tmp_path / "staging/dead.part").write_bytes(b"half")
        living = tmp_path / "staging/living.part"
        living.write_bytes(b"half")
        with living.open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            assert await DiskStore(tmp_path).get(KEY, limit=1) == b"x"
            assert staged(tmp_path) == ["living.part"]
        assert await DiskStore(tmp_path).get(KEY, limit=1) == b"x"
        assert staged(tmp_path) == []

    run(work)


WRITERS = """
import asyncio, sys
from pathlib import Path
from warmseed.stores.disk import DiskStore
async def main():
    store = DiskStore(Path(sys.argv[1]), size_limit=1 << 30)
    value = bytes([int(sys.argv[2])]) * (256 << 10)
    await asyncio.gather(*(store.put(f"kind/{turn % 4}", value) for turn in range(40)))
asyncio.run(main())
"""


def test_eight_processes_writing_the_same_keys_never_show_a_part_or_a_temporary(tmp_path: Path) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITERS, str(tmp_path), str(n)], env=environment()) for n in range(8)
    ]

    async def work() -> None:
        store = DiskStore(tmp_path)
        reads = 0
        while any(writer.poll() is None for writer in writers):
            for number in range(4):
                value = await store.get(f"kind/{number}", limit=1 << 20)
                assert value is None or value == value[:1] * (256 << 10)
                reads += value is not None
            names = [info.key async for info in store.list()]
            assert set(names) <= {f"kind/{n}" for n in range(4)}
        assert reads > 10
        assert staged(tmp_path) == []

    try:
        run(work)
    finally:
        for writer in writers:
            writer.kill()
    assert [writer.wait() for writer in writers] == [0] * 8


@pytest.mark.parametrize("planted", ["fifo", "symlink", "folder", "folder link", "device link"])
def test_a_hostile_file_in_an_objects_place_is_a_miss(tmp_path: Path, planted: str) -> None:
    async def work() -> None:
        (tmp_path / "secret").mkdir()
        (tmp_path / "secret/doc").write_bytes(b"not for you")
        store = FolderStore(tmp_path / "shared")
        (tmp_path / "shared").mkdir()
        place = tmp_path / "shared/kind/doc"
        if planted == "folder link":
            (tmp_path / "shared/kind").symlink_to(tmp_path / "secret")
        else:
            place.parent.mkdir()
            if planted == "fifo":
                os.mkfifo(place)
            elif planted == "symlink":
                place.symlink_to(tmp_path / "secret/doc")
            elif planted == "device link":
                place.symlink_to("/dev/zero")
            else:
                place.mkdir()
        assert await store.get(KEY, limit=100) is None
        assert await store.stat(KEY) is None
        async with store.open(KEY, limit=100) as reader:
            assert reader is None
        if planted in {"folder", "folder link"}:
            with pytest.raises(StoreUnavailable):
                await store.put(KEY, b"mine")
        else:
            await store.put(KEY, b"mine")
            assert await store.get(KEY, limit=10) == b"mine"
        assert (tmp_path / "secret/doc").read_bytes() == b"not for you"

    run(work)


def test_a_stale_handle_of_a_shared_folder_is_asked_for_again(tmp_path: Path) -> None:
    async def work() -> None:
        store = FolderStore(tmp_path)
        await store.put(KEY, b"value")
        with faults(fail("fstat", errno.ESTALE)):
            assert await store.get(KEY, limit=10) == b"value"
        with faults(fail("open", errno.ESTALE)):
            async with store.open(KEY, limit=10) as reader:
                assert reader is not None

    run(work)


def test_a_shared_folder_that_may_not_be_written_is_still_read(tmp_path: Path) -> None:
    async def work() -> None:
        await FolderStore(tmp_path).put(KEY, b"value")
        store = FolderStore(tmp_path)
        with faults(fail("open", errno.EROFS, times=0)):
            assert await store.get(KEY, limit=10) == b"value"
        with faults(fail("rename", errno.EROFS)), pytest.raises(StoreRefused):
            await store.put(KEY, b"new")
        assert await store.get(KEY, limit=10) == b"value"
        assert os.listdir(tmp_path / ".staging") == []

    run(work)


def test_hosts_with_clocks_a_day_apart_do_not_sweep_each_others_writes(tmp_path: Path) -> None:
    async def work() -> None:
        await FolderStore(tmp_path).put(KEY, b"value")
        day = 24 * 3600
        now = (tmp_path / KEY).stat().st_mtime
        for name, age in {"ahead": -day, "behind": day, "dead": 10 * day}.items():
            path = tmp_path / f".staging/{name}.part"
            path.write_bytes(b"half")
            os.utime(path, (now - age, now - age))
        assert await FolderStore(tmp_path).get(KEY, limit=10) == b"value"
        assert sorted(os.listdir(tmp_path / ".staging")) == ["ahead.part", "behind.part"]

    run(work)


def test_a_cancelled_put_removes_its_temporary(tmp_path: Path) -> None:
    async def work() -> None:
        store = DiskStore(tmp_path)
        begun = asyncio.Event()

        async def pieces() -> object:
            yield b"x" * CHUNK
            yield b"x" * CHUNK
            begun.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(store.put(KEY, Body(8 * CHUNK, pieces)))  # type: ignore[arg-type]
        await begun.wait()
        assert len(staged(tmp_path)) == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: staged(tmp_path) == [])

    run(work)


def test_the_limit_counts_what_other_processes_are_writing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        one, two = DiskStore(tmp_path, size_limit=10 * CHUNK), DiskStore(tmp_path, size_limit=10 * CHUNK)
        begun, go = asyncio.Event(), asyncio.Event()

        async def pieces() -> object:
            for _ in range(2):
                yield b"x" * CHUNK
            begun.set()
            await go.wait()
            for _ in range(6):
                yield b"x" * CHUNK

        first = asyncio.create_task(one.put("kind/first", Body(8 * CHUNK, pieces)))  # type: ignore[arg-type]
        await begun.wait()
        with pytest.raises(StoreFull):
            await two.put("kind/second", pattern_body(3 * CHUNK))
        go.set()
        await first
        with caplog.at_level(logging.INFO):
            await two.put("kind/second", pattern_body(3 * CHUNK))
        assert "evicted key=kind/first" in caplog.text

    run(work)
