"""How fast and how surely a launcher does its work: readiness, random kills, scrapes.

    python bench/launcher.py                          200 random kills of toy ranks, about three minutes
    python bench/launcher.py --kills 20 --json        the last line is one JSON object
    python bench/launcher.py --model DIR --real-kills 10    the same against real torch ranks

Toy ranks are real processes with real sockets and locks and no model. A kill is a SIGKILL of a random rank at a
random moment between the launcher's first line and some time after readiness; the right exit code is 137. Left over
counts processes, held socket locks, shared-memory files and (with nvidia-smi) processes on a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import logging
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec
from tests.support.nodes import FOLDER, TOY, free_port, left_over, toy_config

from warmseed.daemon.launcher.board import Board
from warmseed.daemon.launcher.guardian import LAUNCH_ID
from warmseed.daemon.launcher.launcher import launch
from warmseed.daemon.launcher.processes import RANK_COMMAND
from warmseed.daemon.settings.config import PreloadConfig

PATIENCE = 120.0  # seconds for what should take at most twelve


@dataclass(slots=True)
class Kills:
    """What a series of kills came to."""

    count: int = 0
    wrong_codes: int = 0
    leftovers: int = 0
    slowest_end: float = 0.0  # seconds from the kill to the launcher's return
    before_ready: int = 0
    notes: list[str] = field(default_factory=list)


def children() -> list[int]:
    """Pids of this process's children that are ranks."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        found += [int(pid) for pid in (task / "children").read_text().split()]
    # The guardian is a child too, but no rank.
    return [pid for pid in found if f"{LAUNCH_ID}=".encode() in Path(f"/proc/{pid}/environ").read_bytes()]


async def one_kill(
    config: PreloadConfig, command: tuple[str, ...], delay: float, chance: random.Random
) -> tuple[int, float, bool]:
    """SIGKILL one rank `delay` seconds after the start; exit code, seconds until the end, whether it was ready."""
    ready = asyncio.Event()
    running = asyncio.create_task(launch(config, rank_command=command, on_ready=lambda _: ready.set()))
    try:
        async with asyncio.timeout(PATIENCE):
            await asyncio.sleep(delay)
            while not (pids := children()):  # noqa: ASYNC110 (a matter of milliseconds)
                await asyncio.sleep(0)
            was_ready = ready.is_set()
            os.kill(chance.choice(pids), signal.SIGKILL)
            start = time.monotonic()
            return await running, time.monotonic() - start, was_ready
    finally:
        running.cancel()


def leftovers(folder: Path, shared_memory: set[str]) -> list[str]:
    """What a launch that is over still holds."""
    found = [f"process {pid}" for pid in left_over(folder)]
    for lock in folder.glob("*.lock"):
        with lock.open() as opened:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                found.append(f"lock {lock.name}")
    found += [f"shared memory {name}" for name in set(os.listdir("/dev/shm")) - shared_memory]
    return found


def gpu_processes() -> set[str]:
    if shutil.which("nvidia-smi") is None:
        return set()
    query = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    return set(subprocess.run(query, capture_output=True, text=True, timeout=30, check=False).stdout.split())


def kill_series(
    make: Config, command: tuple[str, ...], count: int, longest: float, seed: int, *, settle: float = 1.0
) -> Kills:
    """`count` launches, one random kill in each, at most `longest` seconds after the start."""
    chance = random.Random(seed)
    result = Kills()
    for number in range(count):
        with tempfile.TemporaryDirectory(prefix="ws-bench-") as name:
            folder = Path(name)
            os.environ[FOLDER] = name
            shared_memory, on_gpu = set(os.listdir("/dev/shm")), gpu_processes()
            config = make(folder)
            code, seconds, was_ready = asyncio.run(one_kill(config, command, chance.uniform(0, longest), chance))
            deadline = time.monotonic() + settle
            while (left := leftovers(folder, shared_memory)) and time.monotonic() < deadline:
                time.sleep(0.02)
            left += [f"GPU process {pid}" for pid in gpu_processes() - on_gpu]
        result.count += 1
        result.before_ready += not was_ready
        result.slowest_end = max(result.slowest_end, seconds)
        result.leftovers += len(left)
        if code != 137:
            result.wrong_codes += 1
        if code != 137 or left:
            result.notes.append(f"kill {number}: code {code}, left {left}")
    return result


class Config:
    """Makes one launch's configuration for a socket folder."""

    def __init__(self, **settings: object) -> None:
        self.settings = settings

    def __call__(self, folder: Path) -> PreloadConfig:
        return toy_config(
            folder, self.settings.get("plan", {}), **{k: v for k, v in self.settings.items() if k != "plan"}
        )  # type: ignore[arg-type]


class RealConfig(Config):
    """The same for real torch ranks over the model in `settings`."""

    def __call__(self, folder: Path) -> PreloadConfig:
        fields = {
            "engine": "torch",
            "weight_cache_socket_dir": str(folder / "sockets"),
            "cache_root": str(folder / "cache"),
            **self.settings,
        }
        return msgspec.convert(fields, PreloadConfig)


def readiness(starts: int, ranks: int) -> tuple[float, float]:
    """Milliseconds from the last rank's bind to the announcement, and seconds of a whole start; the largest of several.

    The ranks are those of the kills, so that kills can be spread over their whole start.
    """
    lags: list[float] = []
    whole: list[float] = []

    def announced(board: Board) -> None:
        now = time.monotonic()
        lags.append(1e3 * (now - max(r.serving.bound_at or now for r in board.ranks.values() if r.serving)))
        whole.append(board.ready_after or 0.0)
        os.kill(os.getpid(), signal.SIGTERM)

    for _ in range(starts):
        with tempfile.TemporaryDirectory(prefix="ws-bench-") as name:
            asyncio.run(launch(toys(ranks)(Path(name)), rank_command=TOY, on_ready=announced))
    return max(lags), max(whole)


def toys(ranks: int) -> Config:
    """Target and draft ranks whose phases take 30 ms each."""
    return Config(plan={"pace": 0.03}, tensor_parallel_size=ranks, speculative_config='{"method":"eagle3"}')


SCRAPER = """
import sys, time
from urllib.request import urlopen
for _ in range(int(sys.argv[2])):
    start = time.perf_counter()
    with urlopen(sys.argv[1], timeout=10) as answer:
        answer.read()
    print(1e3 * (time.perf_counter() - start))
"""


def scrape(ranks: int, scrapes: int = 50) -> float:
    """Milliseconds of a whole scrape of ``/metrics`` by another process with `ranks` live ranks; the median."""
    port = free_port()
    times: list[float] = []

    async def whole(folder: Path) -> None:
        ready = asyncio.Event()
        config = toy_config(folder, tensor_parallel_size=ranks, weight_cache_health_port=port)
        running = asyncio.create_task(launch(config, rank_command=TOY, on_ready=lambda _: ready.set()))
        async with asyncio.timeout(PATIENCE):
            await ready.wait()
            await asyncio.sleep(1)  # the ranks' own start-up is over
            scraper = await asyncio.create_subprocess_exec(
                sys.executable, "-c", SCRAPER, f"http://127.0.0.1:{port}/metrics", str(scrapes),
                stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            times.extend(float(line) for line in (await scraper.communicate())[0].split())
            os.kill(os.getpid(), signal.SIGTERM)
            await running

    with tempfile.TemporaryDirectory(prefix="ws-bench-") as name:
        asyncio.run(whole(Path(name)))
    return statistics.median(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--starts", type=int, default=20, help="starts measured for readiness")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--metrics-ranks", type=int, default=64)
    parser.add_argument("--model", help="model folder for kills of real torch ranks")
    parser.add_argument("--real-kills", type=int, default=0)
    parser.add_argument("--real-seconds", type=float, default=60.0, help="latest moment of a kill of a real rank")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    given = parser.parse_args()
    logging.getLogger("warmseed").setLevel(logging.CRITICAL)

    lag, start = readiness(given.starts, given.ranks)
    print(f"readiness after the last bind: {lag:.2f} ms (worst of {given.starts})")
    kills = kill_series(toys(given.ranks), TOY, given.kills, 1.5 * start, given.seed)
    report("toy ranks", kills)
    per_scrape = scrape(given.metrics_ranks)
    print(f"/metrics with {given.metrics_ranks} ranks: {per_scrape:.2f} ms")
    figures: dict[str, object] = {
        "ready_after_last_bind_ms": round(lag, 3),
        "random_kills": kills.count,
        "wrong_exit_codes": kills.wrong_codes,
        "leftovers": kills.leftovers,
        "slowest_group_end_s": round(kills.slowest_end, 3),
        "metrics_ms_64_ranks": round(per_scrape, 3),
    }
    if given.real_kills:
        real = kill_series(
            RealConfig(model=given.model), RANK_COMMAND, given.real_kills, given.real_seconds, given.seed, settle=5.0
        )
        report("real ranks", real)
        figures |= {
            "real_kills": real.count,
            "real_wrong_exit_codes": real.wrong_codes,
            "real_leftovers": real.leftovers,
            "real_slowest_group_end_s": round(real.slowest_end, 3),
        }
    if given.json:
        print(json.dumps(figures))
    return 0


def report(name: str, kills: Kills) -> None:
    print(
        f"{kills.count} random kills of {name} ({kills.before_ready} before readiness): "
        f"{kills.wrong_codes} wrong codes, {kills.leftovers} left over, slowest end {kills.slowest_end:.2f} s"
    )
    for note in kills.notes[:10]:
        print("  " + note)


if __name__ == "__main__":
    sys.exit(main())
