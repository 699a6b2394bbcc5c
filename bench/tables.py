"""What it costs to believe and adopt an autotune table, on one machine in one run.

``python bench/tables.py [--json] [--rounds N]``; with ``--json`` the last line is one JSON object. An adoption is
everything from the search to the table lying durably where FlashInfer reads it: manifest verified, payload fetched
and checked, table validated, written, read back, renamed. Every adoption is a new node's; the source of the D2D
figure runs in a process of its own. Hostile tables are those of tests/security/test_hostile_tables.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests' fleet and tables

from rich.console import Console
from rich.table import Table
from tests.security.test_hostile_tables import HOSTILE
from tests.support.fleet import Node
from tests.support.tables import CONFIG, put_local, table_site, table_text

from warmseed.seeding.channel.endpoint import Endpoint
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.kinds.autotune.kind import FlashInferAutotune
from warmseed.seeding.kinds.autotune.layout import MANAGED_ROOT, PER_RANK_ROOT
from warmseed.seeding.kinds.autotune.table import parse_table
from warmseed.seeding.trust.keys import PublisherKey
from warmseed.seeding.trust.token import new_token, read_tokens, write_token

ENTRIES = 191  # of the largest table reported so far
KIND = FlashInferAutotune()
KEY = PublisherKey("bench", b"b" * 32)


async def publish(base: Path) -> None:
    """A source's disk, with one published table."""
    site = table_site(base)
    put_local(site, table_text(ENTRIES))
    async with Node.opened(site.state, key=KEY, trusted=KEY) as node:
        await node.publish(KIND, site)


async def adopt_disk(folder: Path, source: Path, rounds: int, home: str) -> list[float]:
    """Milliseconds of adoptions from a disk that holds the table, signed; each by a node new to it."""
    taken: list[float] = []
    for number in range(rounds):
        base = folder / f"disk-{home}-{number}"
        shutil.copytree(source / "state" / "store", base / "state" / "store")
        site = table_site(base, homes=(home,))
        async with Node.opened(site.state, key=KEY, trusted=KEY) as node:
            taken.append(await timed(node, site))
    return taken


async def timed(node: Node, site: object, **peer: object) -> float:
    start = time.perf_counter()
    adoption = await node.adopter(site, KIND, **peer).adopt(KIND, site)  # type: ignore[arg-type]
    seconds = time.perf_counter() - start
    if adoption.outcome != "installed":
        raise SystemExit(f"the table was not adopted: {adoption.refusals}")
    return seconds * 1e3


async def adopt_d2d(folder: Path, source: Path, rounds: int) -> list[float]:
    """Milliseconds of adoptions over the channel on loopback, TLS handshake included, by nodes with an empty disk."""
    token_file = folder / "token"
    write_token(token_file, new_token())
    (token,) = read_tokens(file=token_file, arguments=(), environ={})
    serving = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--serve", str(source), str(token_file)), stdout=asyncio.subprocess.PIPE
    )
    if serving.stdout is None:
        raise SystemExit("the source has no output")
    try:
        async with asyncio.timeout(30):
            port = int(await serving.stdout.readline())
        taken: list[float] = []
        for number in range(rounds):
            site = table_site(folder / f"d2d-{number}")
            async with Node.opened(site.state, key=KEY, trusted=KEY) as node:
                taken.append(await timed(node, site, token=token, peer=Endpoint("127.0.0.1", port)))
        return taken
    finally:
        serving.kill()
        await serving.wait()


async def serve(source: Path, token_file: Path) -> None:
    """A source daemon's listener, until it is killed."""
    (token,) = read_tokens(file=token_file, arguments=(), environ={})
    site = table_site(source)
    async with Node.opened(site.state, key=KEY, trusted=KEY) as node:
        await node.publish(KIND, site)
        async with node.serving(token) as endpoint:
            print(endpoint.port, flush=True)
            await asyncio.Event().wait()


def validate(rounds: int) -> list[float]:
    """Milliseconds to validate a table of 1 MB."""
    data = table_text(1)
    entries = 1
    while len(data) < 1_000_000:
        entries += 100
        data = table_text(entries)
    taken: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        parse_table(data)
        taken.append((time.perf_counter() - start) * 1e3)
    return taken


def hostile() -> tuple[float, float]:
    """Seconds and MiB of the most expensive refusal; time and memory are measured in separate runs."""
    slowest = largest = 0.0
    for data in HOSTILE.values():
        start = time.perf_counter()
        refuse(data)
        slowest = max(slowest, time.perf_counter() - start)
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        refuse(data)
        largest = max(largest, (tracemalloc.get_traced_memory()[1] - before) / (1 << 20))
        tracemalloc.stop()
    return slowest, largest


def refuse(data: bytes) -> None:
    try:
        parse_table(data)
    except ArtifactRefused:
        return
    raise SystemExit("a hostile table was accepted")


async def measure(folder: Path, rounds: int) -> dict[str, float]:
    source = folder / "source"
    await publish(source)
    slowest, largest = hostile()
    return {
        "adopt_disk_ms": statistics.median(await adopt_disk(folder, source, rounds, PER_RANK_ROOT)),
        "adopt_d2d_ms": statistics.median(await adopt_d2d(folder, source, rounds)),
        "validate_1mb_ms": statistics.median(validate(rounds * 3)),
        "hostile_max_s": slowest,
        "hostile_max_mib": largest,
        "adopt_v2_disk_ms": statistics.median(await adopt_disk(folder, source, rounds, MANAGED_ROOT)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(Path(options.serve[0]), Path(options.serve[1])))
        return
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(measure(Path(folder), options.rounds))
    shown = Table("figure", "value", title=f"tables of {ENTRIES} entries, configuration {CONFIG[:8]}")
    for name, value in figures.items():
        shown.add_row(name, f"{value:.3f}")
    Console(stderr=True).print(shown)
    if options.json:
        print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
