"""What the chain costs over its back ends, and what a broken tier costs a start; ratios within one run.

``python bench/stores.py [--json] [--only chain,hung,flight,mooncake] [--mooncake-mib 1024]``; with ``--json`` the last
line is one JSON object. Run it from the repository's root: the Mooncake part starts a real master and a real storage
node (about 3 GiB of memory), and compares with Mooncake's own client in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.services import Mooncake, mooncake

from warmseed.stores.base import Body, Store, StoreLimits
from warmseed.stores.chain import Chain
from warmseed.stores.disk import DiskStore
from warmseed.stores.folder import FolderStore
from warmseed.stores.mooncake.config import read_config
from warmseed.stores.mooncake.store import MooncakeStore
from warmseed.stores.registry import wrap
from warmseed.testing.fake_store import FakeStore
from warmseed.testing.store_contract import pattern_body

MIB = 1 << 20
PARTS = ("chain", "hung", "flight", "mooncake")
console = Console(stderr=True, highlight=False)

# Mooncake's own client: writes and reads a file in parts of 64 MiB, put_from and get_into on a mapped file.
RAW = """
import ctypes, json, mmap, os, sys, time
out = os.fdopen(os.dup(1), "w", buffering=1); os.dup2(2, 1)
from mooncake.store import MooncakeDistributedStore
master, path, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", master) == 0
fd = os.open(path, os.O_RDONLY); source = mmap.mmap(fd, size, mmap.MAP_PRIVATE)
into = mmap.mmap(-1, size)
a, b = (ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in (source, into))
store.register_buffer(a, size); store.register_buffer(b, size)
part = 64 << 20
pieces = [(i, at, min(part, size - at)) for i, at in enumerate(range(0, size, part))]
out.write("ready\\n")
for line in sys.stdin:
    start = time.monotonic()
    if line.startswith("put"):
        assert all(store.put_from(f"raw/{i}", a + at, n) == 0 for i, at, n in pieces)
    elif line.startswith("get"):
        assert all(store.get_into(f"raw/{i}", b + at, n) == n for i, at, n in pieces)
    else:
        [store.remove(f"raw/{i}", True) for i, at, n in pieces]
    out.write(json.dumps(time.monotonic() - start) + "\\n")
out.flush(); os._exit(0)
"""


async def timed(work: Callable[[], Awaitable[object]]) -> float:
    start = time.perf_counter()
    await work()
    return time.perf_counter() - start


async def drain(store: Store | Chain, key: str, limit: int) -> int:
    async with store.open(key, limit=limit) as reader:
        if reader is None:
            raise RuntimeError(f"{key} is missing")
        return sum([len(piece) async for piece in reader])


async def in_turns(one: Callable[[], Awaitable[object]], two: Callable[[], Awaitable[object]], rounds: int) -> float:
    """Median of the second over the first, measured alternately."""
    for work in (one, two):
        await work()
    pairs = [(await timed(one), await timed(two)) for _ in range(rounds)]
    return statistics.median(b for _, b in pairs) / statistics.median(a for a, _ in pairs)


async def chain_overhead(folder: Path) -> dict[str, float]:
    """A folder store, bare and as a fully wrapped tier of a chain."""
    (folder / "shared").mkdir()
    bare = FolderStore(folder / "shared")
    await bare.put("kind/large", pattern_body(64 * MIB))
    await bare.put("kind/small", b"x" * 4096)
    chain = Chain(None, [wrap(bare)])
    ratio = await in_turns(
        lambda: drain(bare, "kind/large", 64 * MIB), lambda: drain(chain, "kind/large", 64 * MIB), 15
    )
    gets: dict[str, list[float]] = {"bare": [], "chain": []}
    for _ in range(2000):
        gets["bare"].append(await timed(lambda: bare.get("kind/small", limit=4096)))
        gets["chain"].append(await timed(lambda: chain.get("kind/small", limit=4096)))
    extra = statistics.median(gets["chain"]) - statistics.median(gets["bare"])
    await chain.aclose()
    return {"chain_overhead_64mib": round(ratio, 3), "chain_overhead_4kib_us": round(extra * 1e6, 1)}


async def hung_tier() -> dict[str, float]:
    """A first tier that never answers, with a deadline of one second; the second one is well."""
    hung = FakeStore("hung", limits=StoreLimits(deadline=1.0))
    hung.faults.hang = True
    good = FakeStore("good", objects={f"kind/{n}": b"x" * 4096 for n in range(101)})
    chain = Chain(None, [wrap(hung), wrap(good)], writes="none")
    first = await timed(lambda: chain.get("kind/0", limit=4096))
    later = [await timed(lambda n=n: chain.get(f"kind/{n}", limit=4096)) for n in range(1, 101)]  # type: ignore[misc]
    well = Chain(None, [wrap(good)], writes="none")
    base = [await timed(lambda n=n: well.get(f"kind/{n}", limit=4096)) for n in range(1, 101)]  # type: ignore[misc]
    await chain.aclose()
    await well.aclose()
    extra = max(0.0, statistics.median(later) - statistics.median(base))
    return {"hung_tier_first_read_s": round(first, 3), "hung_tier_later_read_ms": round(extra * 1e3, 3)}


async def single_flight(folder: Path) -> dict[str, float]:
    """64 readers of one key at once."""
    tier = FakeStore("tier", objects={"kind/doc": b"x" * MIB})
    tier.faults.latency = 0.02
    chain = Chain(DiskStore(folder / "flight"), [wrap(tier)])
    await asyncio.gather(*(drain(chain, "kind/doc", MIB) for _ in range(64)))
    await chain.aclose()
    return {"upstream_reads_of_64": tier.count("open")}


async def mooncake_ratio(folder: Path, mib: int) -> dict[str, float]:
    """Write a file and read it back, through the store and through Mooncake's own client, in turns."""
    size = mib * MIB
    source = folder / "source"
    with source.open("wb") as file:
        async for piece in pattern_body(size).chunks():
            file.write(piece)
    with mooncake(folder, "--default_kv_lease_ttl=60s", segment=f"{2 * mib + 512}MB") as cluster:
        raw = _raw_client(cluster, source, size)
        store = MooncakeStore(read_config(cluster.config(), {}), limits=StoreLimits(deadline=60))
        ours: dict[str, list[float]] = {"put": [], "get": []}
        theirs: dict[str, list[float]] = {"put": [], "get": []}
        try:
            for turn in range(4):  # the first touches the node's memory and does not count
                for name in ("put", "get"):
                    taken = _ask(raw, name)
                    if turn:
                        theirs[name].append(taken)
                _ask(raw, "remove")
                put = await timed(lambda: store.put("kind/large", Body.file(source)))
                get = await timed(lambda: drain(store, "kind/large", size))
                if turn:
                    ours["put"].append(put)
                    ours["get"].append(get)
                await store.delete("kind/large")
        finally:
            raw.kill()
            raw.wait()
            await store.aclose()
    medians = {n: (statistics.median(ours[n]), statistics.median(theirs[n])) for n in ours}
    for name, (mine, reference) in medians.items():
        console.print(f"mooncake {name} {mib} MiB: {mine:.2f} s, its own client {reference:.2f} s")
    ratio = sum(mine for mine, _ in medians.values()) / sum(reference for _, reference in medians.values())
    return {"mooncake_1gib_ratio": round(ratio, 2)}


def _raw_client(cluster: Mooncake, source: Path, size: int) -> subprocess.Popen[str]:
    raw = subprocess.Popen(
        [sys.executable, "-c", RAW, f"127.0.0.1:{cluster.rpc}", str(source), str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    if raw.stdout is None or raw.stdout.readline() != "ready\n":
        raise RuntimeError("Mooncake's own client did not start")
    return raw


def _ask(raw: subprocess.Popen[str], what: str) -> float:
    if raw.stdin is None or raw.stdout is None:
        raise RuntimeError("Mooncake's own client has no pipes")
    raw.stdin.write(what + "\n")
    raw.stdin.flush()
    return float(json.loads(raw.stdout.readline()))


def main() -> None:
    """Run the parts and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--mooncake-mib", type=int, default=1024)
    chosen = parser.parse_args()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in chosen.only.split(","):
            match part:
                case "chain":
                    figures |= asyncio.run(chain_overhead(folder))
                case "hung":
                    figures |= asyncio.run(hung_tier())
                case "flight":
                    figures |= asyncio.run(single_flight(folder))
                case "mooncake":
                    figures |= asyncio.run(mooncake_ratio(folder, chosen.mooncake_mib))
                case _:
                    parser.error(f"there is no part {part!r}; known are {', '.join(PARTS)}")
            console.print(figures)
    if chosen.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
