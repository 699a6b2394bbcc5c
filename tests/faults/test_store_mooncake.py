"""The Mooncake store while master, storage nodes and its own client die, hang, fill up and come back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.support.services import Mooncake, RawMooncake, free_port, mooncake, wait_until
from tests.support.waiting import run, until

from warmseed.errors import ConfigurationError
from warmseed.stores.base import StoreLimits
from warmseed.stores.chain import Chain
from warmseed.stores.disk import DiskStore
from warmseed.stores.errors import ObjectInvalid, StoreError, StoreFull, StoreTimeout, StoreUnavailable
from warmseed.stores.mooncake.config import read_config
from warmseed.stores.mooncake.helper import probe
from warmseed.stores.mooncake.store import MooncakeStore
from warmseed.stores.registry import open_store, wrap
from warmseed.testing.store_contract import pattern_body, read_stream

MIB = 1 << 20
KEY = "kind/aa/doc"
# What takes 10 to 600 seconds in the field, in a second or two.
FAST = (
    "--put_start_discard_timeout_sec=1",
    "--put_start_release_timeout_sec=2",
    "--client_ttl=2",
    "--default_kv_lease_ttl=500ms",
)


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@asynccontextmanager
async def client(cluster: Mooncake, *, deadline: float = 5.0, **more: object) -> AsyncIterator[MooncakeStore]:
    config = await asyncio.to_thread(lambda: read_config(cluster.config(**more), {}))
    store = MooncakeStore(config, limits=StoreLimits(deadline=deadline))
    try:
        yield store
    finally:
        pid = store.client_pid
        await store.aclose()
        assert pid is None or not alive(pid)


@contextlib.contextmanager
def raw_client(cluster: Mooncake, *tenant: str) -> Iterator[RawMooncake]:
    raw = RawMooncake(cluster, *tenant)
    try:
        yield raw
    finally:
        raw.close()


def test_a_refused_master_is_unavailable_within_the_deadline_and_does_not_stop_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody = Mooncake(tmp_path, rpc=free_port())
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(nobody.config()))

    async def work() -> None:
        store = await open_store("mooncake?deadline=8")
        try:
            start = time.monotonic()
            with pytest.raises(StoreUnavailable, match="master"):
                await store.get(KEY, limit=10)
            assert time.monotonic() - start < 8
        finally:
            await store.aclose()

    run(work)


def test_a_silent_master_costs_the_deadline_and_leaves_no_process(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        cluster = Mooncake(tmp_path, rpc=silent.getsockname()[1])

        async def work() -> None:
            async with client(cluster, deadline=1.0) as store:
                start = time.monotonic()
                with pytest.raises(StoreTimeout):
                    await store.get(KEY, limit=10)
                assert time.monotonic() - start < 2
                assert store.client_pid is None

        run(work)


def test_a_master_that_dies_and_comes_back_loses_the_keys_and_nothing_else(tmp_path: Path) -> None:
    with mooncake(tmp_path, *FAST) as cluster:

        async def work() -> None:
            async with client(cluster, deadline=8) as store:
                await store.put(KEY, b"value")
                assert cluster.master is not None
                cluster.master.kill()
                await asyncio.to_thread(cluster.master.wait)
                with pytest.raises(StoreUnavailable):
                    await store.get(KEY, limit=10)
                await asyncio.to_thread(cluster.start_master)
                await asyncio.to_thread(wait_until, lambda: bool(cluster.segments()), "the node's return")
                assert await store.get(KEY, limit=10) is None
                await store.put(KEY, b"again")
                assert await store.get(KEY, limit=10) == b"again"

        run(work)


def test_a_hung_master_ends_the_client_at_the_deadline_and_a_new_one_works_later(tmp_path: Path) -> None:
    with mooncake(tmp_path) as cluster:

        async def work() -> None:
            async with client(cluster, deadline=1.0) as store:
                await store.put(KEY, b"value")
                first = store.client_pid
                assert first is not None
                assert cluster.master is not None
                cluster.master.send_signal(signal.SIGSTOP)
                start = time.monotonic()
                with pytest.raises(StoreTimeout):
                    await store.get(KEY, limit=10)
                assert time.monotonic() - start < 2
                await until(lambda: not alive(first))
                cluster.master.send_signal(signal.SIGCONT)
                assert await store.get(KEY, limit=10) == b"value"
                assert store.client_pid != first

        run(work)


def test_a_dead_node_is_a_miss_and_a_new_one_is_used_at_once(tmp_path: Path) -> None:
    with mooncake(tmp_path, *FAST) as cluster:

        async def work() -> None:
            async with client(cluster) as store:
                await store.put(KEY, b"value")
                await store.put("kind/large", pattern_body(100 * MIB))
                cluster.nodes[0].kill()
                for key in (KEY, "kind/large"):
                    with contextlib.suppress(StoreUnavailable, ObjectInvalid):
                        assert await read_stream(store, key) is None
                await asyncio.to_thread(wait_until, lambda: not cluster.segments(), "the node's end")
                assert await store.get(KEY, limit=10) is None
                with pytest.raises(StoreError):
                    await store.put("kind/new", b"value")
                await asyncio.to_thread(cluster.start_node)
                await store.put(KEY, b"again")
                assert await store.get(KEY, limit=10) == b"again"

        run(work)


def test_a_hung_node_ends_a_stream_at_the_deadline(tmp_path: Path) -> None:
    with mooncake(tmp_path, "--default_kv_lease_ttl=60s") as cluster:

        async def work() -> None:
            async with client(cluster, deadline=1.5) as store:
                await store.put("kind/large", pattern_body(200 * MIB))
                start = time.monotonic()
                with pytest.raises(StoreError):  # noqa: PT012 - the read may end at any piece
                    async with store.open("kind/large", limit=1 << 30) as reader:
                        assert reader is not None
                        cluster.nodes[0].send_signal(signal.SIGSTOP)
                        async for _ in reader:
                            pass
                assert time.monotonic() - start < 6

        run(work)


def test_an_object_over_the_segment_is_store_full_and_leaves_no_parts(tmp_path: Path) -> None:
    with mooncake(tmp_path, *FAST, segment="128MB") as cluster:

        async def work() -> None:
            async with client(cluster, deadline=20) as store:
                with pytest.raises(StoreFull):
                    await store.put("kind/huge", pattern_body(300 * MIB))
                assert await store.get("kind/huge", limit=1 << 30) is None
                await until(lambda: not any("huge" in key for key in cluster.all_keys()))
                await store.put(KEY, b"still usable")
                assert await store.get(KEY, limit=100) == b"still usable"

        run(work)


def test_documents_survive_pressure_and_an_evicted_large_object_is_a_miss(tmp_path: Path) -> None:
    with mooncake(tmp_path, "--default_kv_lease_ttl=100ms", segment="256MB") as cluster, raw_client(cluster) as raw:

        async def work() -> None:
            async with client(cluster, deadline=20) as store:
                for number in range(20):
                    await store.put(f"kind/doc{number}", b"document %d" % number)
                await store.put("kind/large", pattern_body(70 * MIB))
                for turn in range(4):
                    await asyncio.to_thread(raw.ask, "fill", f"other/{turn}", 100)
                for number in range(20):
                    assert await store.get(f"kind/doc{number}", limit=100) == b"document %d" % number
                assert await read_stream(store, "kind/large") is None
                assert await store.stat("kind/large") is None

        run(work)


def test_a_store_full_of_pinned_objects_says_so(tmp_path: Path) -> None:
    with mooncake(tmp_path, *FAST, segment="64MB") as cluster, raw_client(cluster) as raw:

        async def work() -> None:
            await asyncio.to_thread(raw.ask, "fill-pinned", "other", 70)
            async with client(cluster, deadline=20) as store:
                with pytest.raises(StoreFull):
                    await store.put("kind/large", pattern_body(3 * MIB))

        run(work)


def test_a_writer_that_died_half_way_does_not_keep_its_key(tmp_path: Path) -> None:
    flags = ("--put_start_discard_timeout_sec=300",)
    with mooncake(tmp_path, *flags, segment="4GB") as cluster, raw_client(cluster) as look:
        for _ in range(10):
            dying = RawMooncake(cluster)
            dying.begin("put-zeros", KEY, 500)
            until_size = time.monotonic() + 5
            while look.ask("size", KEY) == -704 and time.monotonic() < until_size:
                pass
            dying.close()
            if look.ask("size", KEY) == -703:
                break
            look.ask("remove", KEY)
        assert look.ask("size", KEY) == -703, "the key is held by a writer that is dead"

        async def work() -> None:
            async with client(cluster) as store:
                assert await store.get(KEY, limit=10) is None
                await store.put(KEY, b"value")
                assert await store.get(KEY, limit=10) == b"value"

        run(work)


def test_a_killed_client_fails_what_was_under_way_and_the_next_operation_has_a_new_one(tmp_path: Path) -> None:
    with mooncake(tmp_path) as cluster:

        async def work() -> None:
            async with client(cluster) as store:
                await store.put(KEY, b"value")
                first = store.client_pid
                assert first is not None
                assert cluster.master is not None
                cluster.master.send_signal(signal.SIGSTOP)
                task = asyncio.create_task(store.get(KEY, limit=10))
                await asyncio.sleep(0)
                os.kill(first, signal.SIGKILL)
                with pytest.raises(StoreUnavailable):
                    await task
                cluster.master.send_signal(signal.SIGCONT)
                assert await store.get(KEY, limit=10) == b"value"
                assert store.client_pid not in (None, first)

        run(work)


OWNER = """
import asyncio, os, sys
from pathlib import Path
from warmseed.stores.mooncake.config import read_config
from warmseed.stores.mooncake.store import MooncakeStore
async def main():
    store = MooncakeStore(read_config(Path(sys.argv[1]), {}))
    await store.put("kind/doc", b"value")
    print(store.client_pid, flush=True)
    await asyncio.sleep(100)
asyncio.run(main())
"""


def test_the_client_process_dies_with_its_owner(tmp_path: Path) -> None:
    with mooncake(tmp_path) as cluster:
        owner = subprocess.Popen([sys.executable, "-c", OWNER, str(cluster.config())], stdout=subprocess.PIPE)
        try:
            assert owner.stdout is not None
            pid = int(owner.stdout.readline())
            assert alive(pid)
        finally:
            owner.kill()
            owner.wait()
            if owner.stdout is not None:
                owner.stdout.close()
        wait_until(lambda: not alive(pid), "the client's end")


def test_tenants_do_not_see_each_other_and_survive_each_others_reset(tmp_path: Path) -> None:
    quotas = tmp_path / "quotas.yaml"
    quotas.write_text("version: 1\ntenants:\n  - name: warm\n    quota: 300MB\n  - name: kv\n    quota: 300MB\n")
    flags = ("--enable_multi_tenants=true", "--tenant_quota_connector_type=file")
    with (
        mooncake(tmp_path, *flags, f"--tenant_quota_connector_uri={quotas}") as cluster,
        raw_client(cluster, "kv") as kv,
    ):

        async def work() -> None:
            async with client(cluster, tenant_id="warm") as store:
                await store.put(KEY, b"ours")
                assert await asyncio.to_thread(kv.get, KEY) is None
                assert await asyncio.to_thread(kv.ask, "put", KEY, b"theirs".hex()) == 0
                assert await store.get(KEY, limit=10) == b"ours"
                await asyncio.to_thread(kv.ask, "remove-all", "")
                assert await store.get(KEY, limit=10) == b"ours"

        run(work)


def test_a_reset_of_the_whole_store_is_a_miss(tmp_path: Path) -> None:
    with mooncake(tmp_path) as cluster:

        async def work() -> None:
            async with client(cluster) as store:
                await store.put(KEY, b"value")
                await store.put("kind/large", pattern_body(3 * MIB))
                await asyncio.to_thread(cluster.clear)
                assert await store.get(KEY, limit=10) is None
                assert await read_stream(store, "kind/large") is None
                await store.put(KEY, b"again")
                assert await store.get(KEY, limit=10) == b"again"

        run(work)


def test_parts_that_vanish_one_by_one_are_a_miss_never_a_short_object(tmp_path: Path) -> None:
    with mooncake(tmp_path) as cluster, raw_client(cluster) as raw:

        async def work() -> None:
            async with client(cluster) as store:
                await store.put("kind/large", pattern_body(130 * MIB))
                part = next(key for key in cluster.all_keys() if key.endswith(".1"))
                async with store.open("kind/large", limit=1 << 30) as reader:
                    assert reader is not None
                    await asyncio.to_thread(raw.ask, "remove", part)
                    with pytest.raises((ObjectInvalid, StoreUnavailable)):
                        async for _ in reader:
                            pass
                assert await store.stat("kind/large") is None
                assert await read_stream(store, "kind/large") is None

        run(work)


@pytest.mark.parametrize(
    "listed",
    [
        b"WARMSEED-PARTS/1\n",
        b"WARMSEED-PARTS/1\n{}",
        b'WARMSEED-PARTS/1\n{"size": 5, "part": 67108864, "names": []}',
        b'WARMSEED-PARTS/1\n{"size": -5, "part": 67108864, "names": []}',
        b'WARMSEED-PARTS/1\n{"size": 5, "part": 0, "names": ["kind/aa/doc@1.0"]}',
        b'WARMSEED-PARTS/1\n{"size": 5, "part": 1, "names": ["a", "b", "c", "d", "e"]}',
        b'WARMSEED-PARTS/1\n{"size": 9999999999999999, "part": 67108864, "names": ["kind/aa/doc@1.0"]}',
        b'WARMSEED-PARTS/1\n{"size": 5, "part": 67108864, "names": ["other/key@1.0"]}',
        b"WARMSEED-PARTS/1\n" + b"[" * 100_000,
    ],
)
def test_a_forged_list_of_parts_is_invalid(tmp_path: Path, listed: bytes, shared_cluster: Mooncake) -> None:
    with raw_client(shared_cluster) as raw:
        raw.ask("remove", KEY)
        raw.ask("put", KEY, listed.hex())

        async def work() -> None:
            async with client(shared_cluster) as store:
                with pytest.raises(ObjectInvalid):
                    await store.get(KEY, limit=1 << 30)

        run(work)


def test_a_large_object_that_stock_vllm_wrote_is_read(tmp_path: Path, shared_cluster: Mooncake) -> None:
    with raw_client(shared_cluster) as raw:
        raw.ask("remove", "kind/stock")
        assert raw.ask("put-zeros", "kind/stock", 100) == 0

        async def work() -> None:
            async with client(shared_cluster) as store:
                value = await read_stream(store, "kind/stock")
                assert value == bytes(100 * MIB)
                async with store.open("kind/stock", limit=1 << 30, offset=90 * MIB + 1) as reader:
                    assert reader is not None
                    assert sum([len(piece) async for piece in reader]) == 10 * MIB - 1

        run(work)


def test_a_transfer_that_outlives_its_lease_is_no_object(tmp_path: Path) -> None:
    with mooncake(tmp_path, "--default_kv_lease_ttl=1ms") as cluster:

        async def work() -> None:
            async with client(cluster) as store:
                await store.put("kind/large", pattern_body(64 * MIB))
                with contextlib.suppress(StoreUnavailable, ObjectInvalid):
                    assert await read_stream(store, "kind/large") in (
                        None,
                        b"".join([p async for p in pattern_body(64 * MIB).chunks()]),
                    )

        run(work)


def test_a_metadata_server_over_http_works_too(tmp_path: Path) -> None:
    port = free_port()
    flags = (
        "--enable_http_metadata_server=true",
        "--http_metadata_server_host=127.0.0.1",
        f"--http_metadata_server_port={port}",
    )
    metadata = f"http://127.0.0.1:{port}/metadata"
    with mooncake(tmp_path, *flags, nodes=0) as cluster:
        cluster.start_node(metadata)

        async def work() -> None:
            async with client(cluster, metadata_server=metadata) as store:
                await store.put(KEY, b"value")
                assert await store.get(KEY, limit=10) == b"value"

        run(work)


def test_embedded_mode_brings_its_own_memory(tmp_path: Path) -> None:
    with mooncake(tmp_path, nodes=0) as cluster:

        async def work() -> None:
            async with client(cluster, mode="embedded", global_segment_size="128mb") as store:
                await store.put(KEY, b"value")
                assert await store.get(KEY, limit=10) == b"value"

        run(work)


def test_a_python_without_mooncake_stops_the_start_with_what_to_install() -> None:
    async def work() -> None:
        with pytest.raises(ConfigurationError, match="libibverbs1"):
            await probe("/bin/false", name="mooncake")
        with pytest.raises(ConfigurationError, match="helper_python"):
            await probe("/no/such/python", name="mooncake")

    run(work)


def test_behind_the_chain_a_hung_master_costs_one_deadline(tmp_path: Path) -> None:
    with mooncake(tmp_path) as cluster:

        async def work() -> None:
            async with client(cluster, deadline=1.0) as store:
                chain = Chain(DiskStore(tmp_path / "store"), [wrap(store)])
                await store.put(KEY, b"value")
                assert cluster.master is not None
                cluster.master.send_signal(signal.SIGSTOP)
                start = time.monotonic()
                for number in range(20):
                    assert await chain.get(f"kind/{number}", limit=10) is None
                assert time.monotonic() - start < 3
                cluster.master.send_signal(signal.SIGCONT)
                await chain.aclose()

        run(work)


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mooncake]:
    with mooncake(tmp_path_factory.mktemp("mooncake")) as cluster:
        yield cluster
