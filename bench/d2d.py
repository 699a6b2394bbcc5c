"""The channel between daemons, beside vLLM 0.33's own seed.py, on one machine in one run.

``python bench/d2d.py [--json] [--only one,clients,strangers,bundle,mirrors,delta]``; with ``--json`` the last line is
one JSON object. Sources run in processes of their own; every figure compared with another was measured in turns with
it.

A fetch of a table ends when it could be written to disk: for us with the bytes that came, their digest taken and their
JSON parsed; for vLLM with the parsed JSON that came, serialised again, as its `install` does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import resource
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import peer_vllm  # beside this file
import releases
from rich.console import Console
from rich.table import Table

from warmseed.blocking import run_blocking
from warmseed.seeding.channel.client import SeedClient, new_instance
from warmseed.seeding.channel.endpoint import Endpoint
from warmseed.seeding.channel.messages import DescribeRequest
from warmseed.seeding.channel.server import SeedServer
from warmseed.seeding.channel.source import Described, Opened
from warmseed.seeding.channel.tls import client_context, server_context, server_name
from warmseed.seeding.trust.token import new_token, read_tokens, write_token

TABLE_BYTES = 208_000
BUNDLE_BYTES = 1 << 30
MIRROR_BUNDLE_BYTES = 5 << 20  # compiled caches of an H200 start, compressed
BLOCK = 1 << 20
BUNDLE, MIRROR_BUNDLE = "b1" * 32, "b2" * 32
PARTS = ("one", "clients", "strangers", "bundle", "mirrors", "delta")
ROUNDS = 9
FETCHES = 30

console = Console(stderr=True, highlight=False)


# ---------------------------------------------------------------- sources, each in its own process


class DiskSource:
    """Answers as a daemon does: the table read from disk and checked, the bundle in blocks."""

    def __init__(self, table: Path) -> None:
        self._table = table
        self._digest = hashlib.sha256(table.read_bytes()).digest()

    async def describe(self, request: DescribeRequest) -> Described:
        payload = await run_blocking(self._table.read_bytes)
        if hashlib.sha256(payload).digest() != self._digest:
            raise ValueError("the table changed")
        return Described('{"payload":"' + "A" * 2000 + '","payloadType":"x","signatures":[]}', payload)

    @asynccontextmanager
    async def open(self, sha256: str, offset: int) -> AsyncIterator[Opened]:
        length = BUNDLE_BYTES if sha256 == BUNDLE else MIRROR_BUNDLE_BYTES
        yield Opened(length - offset, self._blocks(length - offset))

    async def _blocks(self, left: int) -> AsyncIterator[bytes]:
        block = bytes(range(256)) * (BLOCK // 256)
        while left:
            piece = block[: min(left, BLOCK)]
            left -= len(piece)
            yield piece


async def serve_ours(token_file: Path, table: Path) -> None:
    server = SeedServer(
        DiskSource(table), read_tokens(file=token_file), host="127.0.0.1", port=0, instance=new_instance()
    )
    async with server.listening():
        print(server.addresses[0][1], flush=True)
        await asyncio.Event().wait()


def serve_vllm(token_file: Path, table: Path) -> None:
    seed = peer_vllm.load()
    config = seed.SeedConfig(listen=("127.0.0.1", 0), token=token_file.read_text().strip())
    transport = seed.SeedTransport([peer_vllm.Table(table)], config)
    print(transport.start_listener()[1], flush=True)
    threading.Event().wait()


def serve_tls(token_file: Path, table: Path) -> None:
    """The plain TLS socket that bundles are measured against: same TLS, no protocol, blocking."""
    context = server_context(read_tokens(file=token_file))
    block = bytes(range(256)) * (BLOCK // 256)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            plain, _ = listener.accept()
            with contextlib.suppress(OSError), context.wrap_socket(plain, server_side=True) as sock:
                for _ in range(BUNDLE_BYTES // BLOCK):
                    sock.sendall(block)


@contextmanager
def source(kind: str, token_file: Path, table: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve", kind, str(token_file), str(table)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.wait(timeout=20)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


# ---------------------------------------------------------------- measurements


class Bench:
    def __init__(self, token_file: Path, table: Path) -> None:
        self.token_file = token_file
        self.table = table
        self.digest = hashlib.sha256(table.read_bytes()).digest()
        (self.token,) = read_tokens(file=token_file, environ={})
        self.client = SeedClient([self.token], instance=new_instance())
        self.request = DescribeRequest(
            instance=self.client.instance,
            kind="flashinfer_autotune",
            config_hash="c0" * 32,
            environment_hash="e0" * 32,
            dp_rank=0,
            world_rank=0,
        )
        self.figures: dict[str, float] = {}

    async def fetch_ours(self, port: int) -> None:
        found = await self.client.describe(Endpoint("127.0.0.1", port), self.request)
        if found is None or hashlib.sha256(found.payload).digest() != self.digest or not json.loads(found.payload):
            raise RuntimeError("no table")

    def fetch_vllm(self, port: int) -> None:
        config = self.vllm.SeedConfig(source=("127.0.0.1", port), token=self.token_file.read_text().strip())
        transport = self.vllm.SeedTransport([], config)
        answer = transport.request({"kind": peer_vllm.KIND, "config_hash": "c0" * 32, "dp_rank": 0, "rank": 0})
        if answer is None or answer["status"] != "ok":
            raise RuntimeError(f"no table: {answer}")
        ((_, table),) = answer["payload"].items()
        json.dumps(table).encode()

    @property
    def vllm(self) -> Any:
        return sys.modules.get("vllm.model_executor.model_loader.weight_cache.seed") or peer_vllm.load()

    async def one(self) -> None:
        with (
            source("ours", self.token_file, self.table) as (_, ours),
            source("vllm", self.token_file, self.table) as (_, theirs),
        ):
            await self.fetch_ours(ours)
            self.fetch_vllm(theirs)
            our_times, their_times = [], []
            for _ in range(ROUNDS):
                their_times.append(median_of(FETCHES, lambda: self.fetch_vllm(theirs)))
                our_times.append(await self.median(ours))
            self.figures["one_client_ms"] = statistics.median(our_times) * 1e3
            self.figures["one_client_vllm_ms"] = statistics.median(their_times) * 1e3
            self.figures["one_client_ratio"] = statistics.median(our_times) / statistics.median(their_times)

    async def median(self, port: int) -> float:
        times = []
        for _ in range(FETCHES):
            begun = time.perf_counter()
            await self.fetch_ours(port)
            times.append(time.perf_counter() - begun)
        return statistics.median(times)

    async def clients(self) -> None:
        with (
            source("ours", self.token_file, self.table) as (_, ours),
            source("vllm", self.token_file, self.table) as (_, theirs),
        ):
            await self.fetch_ours(ours)
            self.fetch_vllm(theirs)
            our_times, their_times = [], []
            for _ in range(ROUNDS):
                their_times.append(await run_blocking(in_threads, 64, lambda: self.fetch_vllm(theirs)))
                begun = time.perf_counter()
                await asyncio.gather(*(self.fetch_ours(ours) for _ in range(64)))
                our_times.append(time.perf_counter() - begun)
            self.figures["clients64_ms"] = statistics.median(our_times) * 1e3
            self.figures["clients64_vllm_ms"] = statistics.median(their_times) * 1e3
            self.figures["clients64_ratio"] = statistics.median(our_times) / statistics.median(their_times)

    async def strangers(self) -> None:
        with source("ours", self.token_file, self.table) as (_, port):
            await self.fetch_ours(port)
            for count, own in ((1, 0), (4, 0), (500, 50)):
                quiet, disturbed = [], []
                for _ in range(ROUNDS):
                    quiet.append(await self.median(port))
                    with silent(port, count, own):
                        await asyncio.sleep(0.1)  # until the source has accepted them all
                        disturbed.append(await self.median(port))
                self.figures[f"strangers{count}_ratio"] = statistics.median(disturbed) / statistics.median(quiet)

    async def bundle(self) -> None:
        context = client_context(self.token)
        with (
            source("ours", self.token_file, self.table) as (_, ours),
            source("tls", self.token_file, self.table) as (_, plain),
        ):
            rates: dict[str, list[float]] = {"ours": [], "hashed": [], "tls": []}
            for _ in range(3):
                rates["tls"].append(await run_blocking(self.read_tls, context, plain))
                rates["ours"].append(await self.read_stream(ours, hashed=False))
                rates["hashed"].append(await self.read_stream(ours, hashed=True))
            best = {name: statistics.median(values) for name, values in rates.items()}
            self.figures["bundle_mib_per_s"] = best["ours"]
            self.figures["bundle_hashed_mib_per_s"] = best["hashed"]
            self.figures["tls_socket_mib_per_s"] = best["tls"]
            self.figures["bundle_rate_over_tls_socket"] = best["ours"] / best["tls"]

    def read_tls(self, context: ssl.SSLContext, port: int) -> float:
        buffer = memoryview(bytearray(BLOCK))
        begun = time.perf_counter()
        left = BUNDLE_BYTES
        with (
            socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
            context.wrap_socket(plain, server_hostname=server_name(self.token.key_id)) as sock,
        ):
            while left:
                left -= sock.recv_into(buffer, min(left, BLOCK))
        return BUNDLE_BYTES / (1 << 20) / (time.perf_counter() - begun)

    async def read_stream(self, port: int, *, hashed: bool) -> float:
        digest = hashlib.sha256()
        begun = time.perf_counter()
        async with self.client.fetch(Endpoint("127.0.0.1", port), BUNDLE, length=BUNDLE_BYTES) as chunks:
            if chunks is None:
                raise RuntimeError("no bundle")
            async for chunk in chunks:
                if hashed:
                    digest.update(chunk)
        return BUNDLE_BYTES / (1 << 20) / (time.perf_counter() - begun)

    async def mirrors(self) -> None:
        with source("ours", self.token_file, self.table) as (process, port):
            peer = Endpoint("127.0.0.1", port)
            before = high_water(process.pid)

            async def mirror() -> int:
                await self.fetch_ours(port)
                got = 0
                async with self.client.fetch(peer, MIRROR_BUNDLE, length=MIRROR_BUNDLE_BYTES) as chunks:
                    if chunks is not None:
                        async for chunk in chunks:
                            got += len(chunk)
                return got

            begun = time.perf_counter()
            outcomes = await asyncio.gather(*(mirror() for _ in range(200)), return_exceptions=True)
            self.figures["mirrors200_seconds"] = time.perf_counter() - begun
            self.figures["mirrors200_failed"] = sum(outcome != MIRROR_BUNDLE_BYTES for outcome in outcomes)
            self.figures["mirrors200_source_mib"] = high_water(process.pid)
            self.figures["source_idle_mib"] = before

    async def delta(self) -> None:
        with (
            tempfile.TemporaryDirectory() as folder,
            source("releases", self.token_file, Path(folder)) as (process, port),
        ):
            self.figures |= await releases.adopt_both(self.client, process, port)


@contextmanager
def silent(port: int, others: int, own: int) -> Iterator[None]:
    """Connections that say nothing: each of `others` from its own loopback address, `own` from the mirror's."""
    socks = []
    try:
        for number in range(others + own):
            sock = socket.socket()
            socks.append(sock)
            address = f"127.1.{number // 250}.{number % 250 + 1}" if number < others else "127.0.0.1"
            sock.bind((address, 0))
            sock.connect(("127.0.0.1", port))
        yield
    finally:
        for sock in socks:
            sock.close()


def median_of(count: int, work: Callable[[], None]) -> float:
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def in_threads(count: int, work: Callable[[], None]) -> float:
    threads = [threading.Thread(target=work) for _ in range(count)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begun


def high_water(pid: int) -> float:
    """MiB of memory that process `pid` has held at most."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no VmHWM")


def make_table(path: Path) -> None:
    """A table of the size that a real model's autotuning writes."""
    entries: dict[str, Any] = {"_metadata": {"gpu": "NVIDIA H200", "cuda": "13.0"}}
    number = 0
    while len(json.dumps(entries)) < TABLE_BYTES:
        for _ in range(100):
            entries[f"('flashinfer::trtllm_fp8_block_scale_moe', ((1, {number}), (4096, 512)))"] = [number % 7, number]
            number += 1
    path.write_text(json.dumps(entries))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 16384), hard))
    if options.serve:
        kind, token_file, table = options.serve
        if kind in ("ours", "releases"):
            serve = serve_ours if kind == "ours" else releases.serve
            asyncio.run(serve(Path(token_file), Path(table)))
        else:
            {"vllm": serve_vllm, "tls": serve_tls}[kind](Path(token_file), Path(table))
        return
    with tempfile.TemporaryDirectory() as folder:
        token_file, table = Path(folder) / "token", Path(folder) / "table.json"
        write_token(token_file, new_token())
        make_table(table)
        bench = Bench(token_file, table)
        for part in options.only.split(","):
            console.print(f"measuring {part} ...")
            asyncio.run(getattr(bench, part)())
    shown = Table("figure", "value")
    for name, value in bench.figures.items():
        shown.add_row(name, f"{value:.3f}")
    console.print(shown)
    if options.json:
        print(json.dumps({name: round(value, 4) for name, value in bench.figures.items()}))


if __name__ == "__main__":
    main()
