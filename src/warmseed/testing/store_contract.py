"""The conformance suite: what every back end and every wrapper must do, checked on the medium itself.

Subclass `StoreContract`, write `medium`, and pytest runs the rest. A medium reaches *behind* the store, so that what
a store says about its objects is compared with what really lies there.
"""

from __future__ import annotations

import asyncio
import resource
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from warmseed.stores.base import CHUNK, Body
from warmseed.stores.errors import InvalidKey, ObjectInvalid, StoreError
from warmseed.testing.medium import (
    HOSTILE_KEYS,
    MIB,
    NO_LIMIT,
    Medium,
    checksum,
    get_strictly,
    pattern,
    pattern_body,
    read_stream,
    read_stream_strictly,
    run,
)

__all__ = ["Medium", "StoreContract", "pattern", "pattern_body", "read_stream"]


class StoreContract(ABC):
    """Every public method is one promise of the store contract."""

    stream_bytes = 64 * MIB  # the object of the constant-memory test; one stream of 2 GiB is expected of big stores
    memory_bytes = 96 * MIB  # how much the process may grow by while an object of any size passes
    largest = NO_LIMIT  # bytes in the largest object this store takes

    @abstractmethod
    def medium(self, folder: Path) -> AbstractAsyncContextManager[Medium]:
        """A fresh, empty medium; `folder` is an empty folder to use or not."""

    def check(self, folder: Path, test: Callable[[Medium], Awaitable[None]]) -> None:
        """Run `test` on a fresh medium."""

        async def whole() -> None:
            async with self.medium(folder) as medium:
                await test(medium)

        run(whole)

    # Reading and writing -----------------------------------------------------------------------

    def test_a_missing_object_is_none_for_every_operation(self, tmp_path: Path) -> None:
        async def test(m: Medium) -> None:
            assert await m.store.get("kind/none", limit=10) is None
            assert await m.store.stat("kind/none") is None
            assert await read_stream(m.store, "kind/none") is None

        self.check(tmp_path, test)

    def test_what_was_put_is_got_and_lies_on_the_medium(self, tmp_path: Path) -> None:
        async def test(m: Medium) -> None:
            await m.store.put("kind/a/doc.json", b"{}\n")
            assert await m.store.get("kind/a/doc.json", limit=3) == b"{}\n"
            assert await read_stream(m.store, "kind/a/doc.json") == b"{}\n"
            assert await m.raw_read("kind/a/doc.json") == b"{}\n"

        self.check(tmp_path, test)

    def test_what_another_node_wrote_is_read(self, tmp_path: Path) -> None:
        async def test(m: Medium) -> None:
            await m.raw_write("kind/b/doc", b"from elsewhere")
            assert await m.store.get("kind/b/doc", limit=100) == b"from elsewhere"
            info = await m.store.stat("kind/b/doc")
            assert info is not None
            assert info.size == 14

        self.check(tmp_path, test)

    def test_an_empty_object_is_an_object(self, tmp_path: Path) -> None:
        async def test(m: Medium) -> None:
            await m.store.put("kind/empty", b"")
            assert await m.store.get("kind/empty", limit=10) == b""
            assert await read_stream(m.store, "kind/empty") == b""
            info = await m.store.stat("kind/empty")
            assert info is not None
            assert info.size == 0

        self.check(tmp_path, test)

    def test_put_replaces(self, tmp_path: Path) -> None:
        async def test(m: Medium) -> None:
            for value in (b"first", b"the second, longer", b"3rd"):
                await m.store.put("kind/replaced", value)
                assert await m.store.get("kind/replaced", limit=100) == value
                assert await m.raw_read("kind/replaced") == value

        self.check(tmp_path, test)

    def test_every_byte_value_survives(self, tmp_path: Path) -> None:
        async def test(m: Medium) -> None:
            value = bytes(range(256)) * 17
            await m.store.put("kind/bytes", value)
            assert await m.store.get("kind/bytes", limit=len(value)) == value
            assert await m.raw_read("kind/bytes") == value

        self.check(tmp_path, test)

    def test_a_large_object_streams_both_ways(self, tmp_path: Path) -> None:
        async def test(m: Medium) -> None:
            size = min(64 * MIB + 4097, self.largest)
            await m.store.put("kind/large", pattern_body(size))
            async with m.store.open("kind/large", limit=size) as reader:
                assert reader is not None
                assert reader.size == size
                got = await checksum(aiter(reader))
            assert got == await checksum(pattern_body(size).chunks())
            info = await m.store.stat("kind/large")
            assert info is not None
            assert info.size == size

        self.check(tmp_path, test)

    def test_a_stream_of_any_length_takes_constant_memory(self, tmp_path: Path) -> None:
        async def test(m: Medium) -> None:
            await m.store.put("kind/warm", pattern_body(8 * MIB))  # what the first use of a library costs
            await read_stream(m.store, "kind/warm")
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            await m.store.put("kind/long", pattern_body(self.stream_bytes))
            async with m.store.open("kind/long", limit=self.stream_bytes) as reader:
                assert reader is not None
                got = await checksum(aiter(reader))
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
            assert got == await checksum(pattern_body(self.stream_bytes).chunks())
            assert grown < self.memory_bytes

        self.check(tmp_path, test)

    def test_a_file_is_stored_by_its_contents(self, tmp_path: Path) -> None:
        async def test(m: Medium) -> None:
            path = tmp_path / "body-of-a-file"
            data = pattern(7, 3 * MIB + 5)
            await asyncio.to_thread(path.write_bytes, data)
            await m.store.put("kind/file", await asyncio.to_thread(Body.file, path))
            assert await m.store.get("kind/file", limit=len(data)) == data
            assert await m.raw_read("kind/file") == data

        self.check(tmp_path, test)

    def test_a_stream_can_start_anywhere(self, tmp_path: Path) -> None:
        async def test(m: Medium) -> None:
            data = b"".join(pattern(i) for i in range(3)) + b"end"
            await m.store.put("kind/parts", data)
            for offset in (0, 1, CHUNK, 2 * CHUNK + 7, len(data) - 1, len(data)):
                async with m.store.open("kind/parts", limit=len(data), offset=offset) as reader:
                    assert reader is not None
                    assert reader.size == len(data) - offset
                    assert b"".join([p async for p in reader]) == data[offset:]
            with pytest.raises(ObjectInvalid):
                await read_stream_strictly(m.store, "kind/parts", offset=len(data) + 1)

        self.check(tmp_path, test)

    def test_a_key_of_any_allowed_shape_works(self, tmp_path: Path) -> None:
        async def test(m: Medium) -> None:
            keys = ["a", "A/b-c_d.e", "0/" + "b" * 128, "/".join("abcdefghijklmnop"), "x/" + "c" * 60 + ".tar.zst"]
            for number, key in enumerate(keys):
                await m.store.put(f"shape{number}/{key}" if key != keys[3] else key, str(number).encode())
            for number, key in enumerate(keys):
                found = await m.store.get(f"shape{number}/{key}" if key != keys[3] else key, limit=9)
                assert found == str(number).encode()

        self.check(tmp_path, test)

    # Refusals ----------------------------------------------------------------------------------

    @pytest.mark.parametrize("key", HOSTILE_KEYS.values(), ids=HOSTILE_KEYS.keys())
    def test_a_hostile_key_is_refused_by_every_operation(self, tmp_path: Path, key: str) -> None:
        async def test(m: Medium) -> None:
            with pytest.raises(InvalidKey):
                await m.store.get(key, limit=10)
            with pytest.raises(InvalidKey):
                await m.store.put(key, b"x")
            with pytest.raises(InvalidKey):
                await m.store.stat(key)
            with pytest.raises(InvalidKey):
                await read_stream(m.store, key)

        self.check(tmp_path, test)

    def test_an_object_over_the_limit_is_not_read(self, tmp_path: Path) -> None:
        async def test(m: Medium) -> None:
            await m.store.put("kind/long", b"0123456789")
            with pytest.raises(ObjectInvalid):
                await get_strictly(m.store, "kind/long", limit=9)
            with pytest.raises(ObjectInvalid):
                await read_stream_strictly(m.store, "kind/long", limit=9)
            assert await m.store.get("kind/long", limit=10) == b"0123456789"

        self.check(tmp_path, test)

    @pytest.mark.parametrize("size", [10, 6 * MIB])
    @pytest.mark.parametrize("extra", [-1, 1], ids=["short", "long"])
    def test_a_body_of_another_length_is_not_stored(self, tmp_path: Path, size: int, extra: int) -> None:
        async def test(m: Medium) -> None:
            await m.store.put("kind/kept", b"old")

            async def pieces() -> AsyncIterator[bytes]:
                for at in range(0, size + extra, CHUNK):
                    yield pattern(at, min(CHUNK, size + extra - at))

            with pytest.raises(ObjectInvalid):
                await m.store.put("kind/kept", Body(size, pieces))
            with pytest.raises(ObjectInvalid):
                await m.store.put("kind/fresh", Body(size, pieces))
            assert await m.raw_read("kind/kept") == b"old"
            assert await m.raw_read("kind/fresh") is None
            assert await m.store.get("kind/kept", limit=10) == b"old"

        self.check(tmp_path, test)

    def test_a_body_whose_source_fails_is_not_stored(self, tmp_path: Path) -> None:
        async def test(m: Medium) -> None:
            async def pieces() -> AsyncIterator[bytes]:
                for index in range(3):
                    yield pattern(index)
                raise OSError("the source broke")

            with pytest.raises(StoreError):
                await m.store.put("kind/broken", Body(6 * MIB, pieces))
            assert await m.raw_read("kind/broken") is None
            assert await m.store.get("kind/broken", limit=10) is None

        self.check(tmp_path, test)

    # Several at once ---------------------------------------------------------------------------

    def test_of_concurrent_writers_one_wins_whole(self, tmp_path: Path) -> None:
        async def test(m: Medium) -> None:
            values = [pattern(i, 300_000 + i) for i in range(6)]
            await asyncio.gather(*(m.store.put("kind/raced", v) for v in values))
            assert await m.store.get("kind/raced", limit=MIB) in values
            assert await m.raw_read("kind/raced") in values

        self.check(tmp_path, test)

    def test_a_reader_sees_the_old_or_the_new_object_never_a_mixture(self, tmp_path: Path) -> None:
        async def test(m: Medium) -> None:
            values = [pattern(i, 64 * 1024 + 1000 * i) for i in range(4)]
            await m.store.put("kind/changing", values[0])
            reading, done = asyncio.Event(), asyncio.Event()
            seen: list[bytes | None] = []

            async def read() -> None:
                other = await m.reopen()
                try:
                    while not done.is_set():
                        seen.append(await other.get("kind/changing", limit=MIB))
                        reading.set()
                        await asyncio.sleep(0)
                finally:
                    await other.aclose()

            async def write() -> None:
                try:
                    await reading.wait()
                    for turn in range(24):
                        await m.store.put("kind/changing", values[turn % 4])
                finally:
                    done.set()

            await asyncio.gather(read(), write())
            assert all(value is None or value in values for value in seen)
            assert await m.store.get("kind/changing", limit=MIB) == values[23 % 4]

        self.check(tmp_path, test)

    def test_many_keys_at_once(self, tmp_path: Path) -> None:
        async def test(m: Medium) -> None:
            keys = [f"kind/many/{i}" for i in range(40)]
            await asyncio.gather(*(m.store.put(k, k.encode()) for k in keys))
            got = await asyncio.gather(*(m.store.get(k, limit=100) for k in keys))
            assert got == [k.encode() for k in keys]

        self.check(tmp_path, test)

    # Interruptions -----------------------------------------------------------------------------

    def test_a_cancelled_read_leaves_the_store_usable(self, tmp_path: Path) -> None:
        async def test(m: Medium) -> None:
            size = min(16 * MIB, self.largest)
            await m.store.put("kind/cancelled", pattern_body(size))
            for _ in range(5):
                first = asyncio.Event()

                async def read(first: asyncio.Event = first) -> None:
                    async with m.store.open("kind/cancelled", limit=size) as reader:
                        assert reader is not None
                        async for _ in reader:
                            first.set()
                            await asyncio.sleep(0)

                task = asyncio.create_task(read())
                await first.wait()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            async with m.store.open("kind/cancelled", limit=size) as reader:
                assert reader is not None
                assert await checksum(aiter(reader)) == await checksum(pattern_body(size).chunks())

        self.check(tmp_path, test)

    def test_a_cancelled_write_leaves_nothing_half_visible(self, tmp_path: Path) -> None:
        async def test(m: Medium) -> None:
            started = asyncio.Event()

            async def pieces() -> AsyncIterator[bytes]:
                for index in range(6):
                    yield pattern(index)
                started.set()
                await asyncio.Event().wait()  # never comes

            task = asyncio.create_task(m.store.put("kind/halfway", Body(8 * MIB, pieces)))
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await m.raw_read("kind/halfway") is None
            assert await m.store.get("kind/halfway", limit=NO_LIMIT) is None
            await m.store.put("kind/halfway", b"then whole")
            assert await m.raw_read("kind/halfway") == b"then whole"

        self.check(tmp_path, test)

    def test_a_stream_left_half_way_hurts_nobody(self, tmp_path: Path) -> None:
        async def test(m: Medium) -> None:
            await m.store.put("kind/left", pattern_body(4 * MIB))
            async with m.store.open("kind/left", limit=NO_LIMIT) as reader:
                assert reader is not None
                async for _ in reader:
                    break
            assert await m.store.stat("kind/left") is not None

        self.check(tmp_path, test)

    def test_the_caller_s_own_error_passes_through_open(self, tmp_path: Path) -> None:
        async def test(m: Medium) -> None:
            await m.store.put("kind/open", b"abc")
            with pytest.raises(ZeroDivisionError):
                async with m.store.open("kind/open", limit=10):
                    raise ZeroDivisionError
            assert await m.store.get("kind/open", limit=10) == b"abc"

        self.check(tmp_path, test)

    def test_objects_outlive_the_store_object(self, tmp_path: Path) -> None:
        async def test(m: Medium) -> None:
            await m.store.put("kind/lasting", b"still here")
            await m.store.put("kind/lasting-large", pattern_body(5 * MIB))
            await m.store.aclose()
            again = await m.reopen()
            try:
                assert await again.get("kind/lasting", limit=100) == b"still here"
                assert await read_stream(again, "kind/lasting-large") == b"".join(
                    [p async for p in pattern_body(5 * MIB).chunks()]
                )
            finally:
                await again.aclose()

        self.check(tmp_path, test)
