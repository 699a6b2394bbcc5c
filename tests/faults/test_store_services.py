"""The Redis, S3 and HTTP stores while their servers are full, forbid, hang, lie or go away."""

from __future__ import annotations

import asyncio
import signal
import socket
import socketserver
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import boto3
import pytest
import redis
from tests.support.services import (
    free_port,
    http_server,
    listening,
    program,
    redis_server,
    running,
    s3_server,
    wait_until,
)
from tests.support.waiting import run

from warmseed.stores.base import Body, Store
from warmseed.stores.chain import Chain
from warmseed.stores.disk import DiskStore
from warmseed.stores.errors import ObjectInvalid, StoreError, StoreFull, StoreRefused, StoreTimeout, StoreUnavailable
from warmseed.stores.registry import open_store, wrap
from warmseed.testing.store_contract import pattern_body, read_stream

MIB = 1 << 20
KEY = "kind/doc"
NONE: dict[str, str] = {}


@asynccontextmanager
async def opened(text: str) -> AsyncIterator[Store]:
    store = await open_store(text, environment=NONE)
    try:
        yield store
    finally:
        await store.aclose()


# Redis ---------------------------------------------------------------------------------------------


def test_a_full_redis_is_store_full_and_stays_in_use(tmp_path: Path) -> None:
    with redis_server(tmp_path, "--maxmemory", "20mb") as port:

        async def work() -> None:
            async with opened(f"redis://127.0.0.1:{port}") as store:
                await store.put(KEY, b"small")
                for body in (pattern_body(40 * MIB), pattern_body(40 * MIB)):
                    with pytest.raises(StoreFull):
                        await store.put("kind/large", body)
                assert await store.get("kind/large", limit=1 << 30) is None
                assert await store.get(KEY, limit=10) == b"small"

        run(work)


def test_redis_that_evicts_parts_gives_a_miss_or_an_invalid_object_never_a_short_one(tmp_path: Path) -> None:
    with redis_server(tmp_path) as port, redis.Redis(port=port) as raw:

        async def work() -> None:
            async with opened(f"redis://127.0.0.1:{port}") as store:
                await store.put(KEY, pattern_body(20 * MIB))
                part = next(key for key in list(raw.scan_iter()) if key.endswith(b":3"))
                raw.delete(part)
                with pytest.raises(ObjectInvalid):
                    await read_stream(store, KEY)

        run(work)


def test_parts_of_a_write_that_never_ended_expire(tmp_path: Path) -> None:
    with redis_server(tmp_path) as port, redis.Redis(port=port) as raw:

        async def work() -> None:
            async with opened(f"redis://127.0.0.1:{port}") as store:
                begun = asyncio.Event()

                async def pieces() -> AsyncIterator[bytes]:
                    for _ in range(10):
                        yield b"x" * MIB
                    begun.set()
                    await asyncio.Event().wait()

                task = asyncio.create_task(store.put(KEY, Body(20 * MIB, pieces)))
                await begun.wait()
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                keys = raw.keys()
                assert keys
                assert all(0 < raw.ttl(key) <= 3600 for key in keys)
                await store.put(KEY, pattern_body(10 * MIB))
                assert raw.ttl(KEY) == -1

        run(work)


def test_a_wrong_redis_password_is_refused_and_never_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret = tmp_path / "password"
    secret.write_text("wrong-canary\n")
    with redis_server(tmp_path, "--requirepass", "right") as port:

        async def work() -> None:
            url = f"redis://127.0.0.1:{port}?password_file={secret}"
            async with opened(url) as store:
                with pytest.raises(StoreError) as caught:
                    await store.get(KEY, limit=10)
                chain = Chain(DiskStore(tmp_path / "store"), [wrap(store)])
                assert await chain.get(KEY, limit=10) is None
                shown = str(caught.value) + repr(store) + repr(chain) + caplog.text
                assert "wrong-canary" not in shown
            secret.write_text("right\n")
            async with opened(url) as store:
                await store.put(KEY, b"x")

        run(work)


def test_a_redis_that_hangs_costs_its_deadline_and_one_that_comes_back_is_used(tmp_path: Path) -> None:
    port = free_port()
    command = [program("redis-server"), "--port", str(port), "--save", "", "--dir", str(tmp_path)]
    with running(command, tmp_path / "log") as server:
        wait_until(lambda: listening(port), "redis-server")

        async def work() -> None:
            async with opened(f"redis://127.0.0.1:{port}?deadline=0.5") as store:
                await store.put(KEY, b"x")
                server.send_signal(signal.SIGSTOP)
                start = time.monotonic()
                with pytest.raises(StoreTimeout):
                    await store.get(KEY, limit=10)
                assert time.monotonic() - start < 1.5
                server.send_signal(signal.SIGCONT)
                assert await store.get(KEY, limit=10) == b"x"

        run(work)


# S3 ------------------------------------------------------------------------------------------------


def test_an_s3_upload_that_is_cut_or_cancelled_shows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-secret")
    with s3_server(tmp_path) as endpoint:
        raw = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
        raw.create_bucket(Bucket="bucket")

        async def work() -> None:
            async with opened(f"s3://bucket/p?endpoint={endpoint}&region=us-east-1") as store:
                begun = asyncio.Event()

                async def pieces() -> AsyncIterator[bytes]:
                    for _ in range(30):
                        yield b"x" * MIB
                    begun.set()
                    await asyncio.Event().wait()

                task = asyncio.create_task(store.put(KEY, Body(60 * MIB, pieces)))
                await begun.wait()
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                assert await store.stat(KEY) is None
                await store.put(KEY, pattern_body(20 * MIB))
                info = await store.stat(KEY)
                assert info is not None
                assert info.size == 20 * MIB

        run(work)
        raw.close()


def test_a_bucket_that_is_not_there_is_a_miss_or_unavailable_and_secrets_stay_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-secret")
    with s3_server(tmp_path) as endpoint:

        async def work() -> None:
            async with opened(f"s3://nowhere/p?endpoint={endpoint}&region=us-east-1") as store:
                assert await store.get(KEY, limit=10) is None
                with pytest.raises(StoreError) as caught:
                    await store.put(KEY, b"x")
                assert "canary-secret" not in str(caught.value) + repr(store) + caplog.text

        run(work)


# HTTP ----------------------------------------------------------------------------------------------


def test_a_read_only_http_server_refuses_puts_and_serves_reads(tmp_path: Path) -> None:
    served = tmp_path / "served"
    (served / "kind").mkdir(parents=True)
    (served / KEY).write_bytes(b"value")
    with http_server(served, "read-only") as url:

        async def work() -> None:
            async with opened(url) as store:
                chain = Chain(DiskStore(tmp_path / "store"), [wrap(store)])
                for number in range(5):
                    with pytest.raises(StoreRefused):
                        await store.put(f"kind/{number}", b"x")
                    await chain.put(f"kind/{number}", b"x")
                assert await chain.flush(5)
                assert chain.states() == {"http": "closed"}
                assert await chain.get(KEY, limit=10) == b"value"
                await chain.aclose()

        run(work)


@dataclass(frozen=True)
class Answer:
    """What a hostile server sends, and whether it then neither closes nor goes on."""

    text: bytes
    then: bytes = b""
    times: int = 1
    hang: bool = False


@contextmanager
def hostile_server(answer: Answer) -> Iterator[int]:
    """A server that answers every request with `answer`; yields its port."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                self.request.recv(65536)
                self.request.sendall(answer.text)
                for _ in range(answer.times):
                    self.request.sendall(answer.then)
                while answer.hang and self.request.recv(65536):
                    pass

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


HEAD = b"HTTP/1.1 200 OK\r\nLast-Modified: Sun, 29 Nov 2026 10:00:00 GMT\r\n"
HOSTILE = {
    "not http": Answer(b"\0\xff\x1b[31m" * 100),
    "no length": Answer(HEAD + b"\r\n", then=b"x" * MIB, times=64),
    "huge length": Answer(HEAD + b"Content-Length: 99999999999999\r\n\r\n", then=b"x"),
    "negative length": Answer(HEAD + b"Content-Length: -5\r\n\r\n", then=b"x"),
    "shorter than stated": Answer(HEAD + b"Content-Length: 50\r\n\r\n", then=b"x"),
    "endless headers": Answer(b"HTTP/1.1 200 OK\r\n", then=b"X: " + b"y" * 60000 + b"\r\n", times=500),
    "stalls": Answer(HEAD + b"Content-Length: 50\r\n\r\n", then=b"x", hang=True),
    "silent": Answer(b"", hang=True),
    "server error": Answer(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n"),
    "redirect to itself": Answer(b"HTTP/1.1 302 Found\r\nLocation: /kind/doc\r\nContent-Length: 0\r\n\r\n"),
    "redirect to a file": Answer(b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_http_server_causes_a_typed_failure_within_the_deadline(name: str) -> None:
    async def work() -> None:
        async with opened(f"http://127.0.0.1:{port}/") as bare:
            store = wrap(bare)
            bare.limits = type(bare.limits)(deadline=1.0, stream_deadline=2.0)  # type: ignore[attr-defined]
            start = time.monotonic()
            with pytest.raises((StoreUnavailable, ObjectInvalid)):
                await store.get(KEY, limit=100)
            assert time.monotonic() - start < 4
            await store.aclose()

    with hostile_server(HOSTILE[name]) as port:
        run(work)


def test_a_port_that_nobody_listens_on_fails_fast() -> None:
    async def work() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
            for text in (f"http://127.0.0.1:{port}", f"redis://127.0.0.1:{port}"):
                async with opened(text) as store:
                    start = time.monotonic()
                    with pytest.raises(StoreUnavailable):
                        await store.get(KEY, limit=10)
                    assert time.monotonic() - start < 3

    run(work)
