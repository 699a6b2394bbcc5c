"""How fast an engine attaches to weights in host memory, what that costs in memory, and how fast checkpoints hash.

    python bench/weights.py --json              # 8 GiB in 2,000 tensors: needs 18 GiB of memory, 9 GB of disk
    python bench/weights.py --gib 0.5 --runs 3  # a quick look

Daemon and engine are processes of their own. `attach_8gib_ms` is the median of one attach a fresh engine process makes,
from the request to usable tensors; the engine then reads every byte before its memory is counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TENSORS = 2000
SHARDS = 8


def daemon(path: str, gib: float) -> None:
    """Serve a model of that size at `path` until standard input ends."""
    import torch

    from warmseed.daemon.weights.export import export_model
    from warmseed.daemon.weights.server import WeightServer
    from warmseed.daemon.weights.socket import SocketAddress

    elements = int(gib * (1 << 30)) // TENSORS // 2
    model = torch.nn.Module()
    for number in range(TENSORS):
        values = torch.full((elements,), number % 251, dtype=torch.bfloat16)
        model.register_parameter(f"t{number}", torch.nn.Parameter(values, requires_grad=False))
    start = time.perf_counter()
    exported = export_model(model, device="cpu")
    seconds = time.perf_counter() - start

    async def serve() -> None:
        async with WeightServer(exported, _fingerprint(), SocketAddress(Path(path))).serving():
            print(json.dumps({"export_s": seconds, "segments": len(exported.segments)}), flush=True)
            await asyncio.to_thread(sys.stdin.read)

    asyncio.run(serve())


def engine(path: str) -> None:
    """Attach once, read everything, print what it took."""
    import torch

    from warmseed.daemon.weights.client import attach
    from warmseed.daemon.weights.socket import SocketAddress

    torch.set_num_threads(1)
    before = _own_bytes()
    attachment = attach(SocketAddress(Path(path)), _fingerprint())
    checked = sum(int(tensor.view(torch.uint8).max()) for tensor in attachment.tensors.values())
    extra = _own_bytes() - before
    result = {"ms": attachment.seconds * 1e3, "extra": extra / attachment.nbytes, "nbytes": attachment.nbytes}
    print(json.dumps({**result, "checked": checked}), flush=True)


def _own_bytes() -> int:
    """Bytes of this process's own, page tables included: what it maps of the daemon's memfds is not anonymous."""
    kib = 0
    for row in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if row.startswith("Anonymous:"):
            kib += int(row.split()[1])
    for row in Path("/proc/self/status").read_text().splitlines():
        if row.startswith("VmPTE:"):
            kib += int(row.split()[1])
    return kib * 1024


def _fingerprint() -> Any:
    from warmseed.daemon.weights.checkpoint import CheckpointIdentity
    from warmseed.daemon.weights.fingerprint import Fingerprint

    identity = CheckpointIdentity("full", (), "0" * 64)
    return Fingerprint(checkpoint=identity, architecture="Bench", dtype="bfloat16", engine="torch", engine_version="0")


def attaching(gib: float, runs: int) -> dict[str, float]:
    """Attach times and memory over `runs` fresh engines."""
    with tempfile.TemporaryDirectory(prefix="warmseed-bench-") as folder:
        path = str(Path(folder) / "weights.sock")
        command = [sys.executable, __file__, "--role"]
        with subprocess.Popen(
            [*command, "daemon", "--socket", path, "--gib", str(gib)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as serving:  # fmt: skip
            assert serving.stdout is not None
            ready = json.loads(serving.stdout.readline())
            results = []
            for _ in range(runs):
                done = subprocess.run([*command, "engine", "--socket", path], stdout=subprocess.PIPE, check=True)
                results.append(json.loads(done.stdout))
            serving.communicate("", timeout=60)
    return {
        "attach_8gib_ms": statistics.median(r["ms"] for r in results),
        "attach_worst_ms": max(r["ms"] for r in results),
        "extra_memory_fraction": statistics.median(r["extra"] for r in results),
        "export_s": ready["export_s"],
        "segments": ready["segments"],
        "gib": results[0]["nbytes"] / (1 << 30),
    }


def digesting(gib: float, folder: str | None) -> dict[str, float]:
    """Rates of the first digest of a checkpoint, on one core and on all, and the time of a later one."""
    from warmseed.daemon.weights.checkpoint import digest_checkpoint
    from warmseed.daemon.weights.digest_cache import DigestCache

    with tempfile.TemporaryDirectory(prefix="warmseed-bench-", dir=folder) as made:
        root = Path(made) / "model"
        root.mkdir()
        per_shard = int(gib * (1 << 30)) // SHARDS
        tensors = TENSORS // SHARDS
        for shard in range(SHARDS):
            _write_shard(root / f"model-{shard}.safetensors", shard, per_shard // tensors, tensors)
        time.sleep(2.5)  # a digest is only remembered of files that have been quiet for two seconds
        for shard in root.iterdir():  # in memory, so that hashing is measured and not the disk
            with shard.open("rb") as source:
                while source.read(1 << 24):
                    pass
        start = time.perf_counter()
        one = digest_checkpoint(root, cache=DigestCache(Path(made) / "one"), workers=1)
        single = time.perf_counter() - start
        cache = DigestCache(Path(made) / "all")
        start = time.perf_counter()
        first = digest_checkpoint(root, cache=cache)
        parallel = time.perf_counter() - start
        start = time.perf_counter()
        again = digest_checkpoint(root, cache=DigestCache(Path(made) / "all"))
        cached = time.perf_counter() - start
        if not one.digest == first.digest == again.digest:
            raise SystemExit("digests differ")
    cores = min(SHARDS, os.cpu_count() or 1)
    return {
        "digest_gb_per_s_per_core": one.nbytes / single / 1e9,
        "digest_gb_per_s": one.nbytes / parallel / 1e9,
        "digest_cores": cores,
        "digest_cached_ms": cached * 1e3,
    }


def _write_shard(path: Path, shard: int, nbytes: int, count: int) -> None:
    header: dict[str, object] = {}
    for number in range(count):
        offsets = [number * nbytes, (number + 1) * nbytes]
        header[f"s{shard}.t{number}"] = {"dtype": "U8", "shape": [nbytes], "data_offsets": offsets}
    text = json.dumps(header).encode()
    block = os.urandom(1 << 20)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        left = nbytes * count
        while left:
            left -= out.write(block[: min(left, len(block))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", help="where to write the checkpoint; default: the temporary folder")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on the last line")
    parser.add_argument("--role", choices=["daemon", "engine"], help=argparse.SUPPRESS)
    parser.add_argument("--socket", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "daemon":
        return daemon(options.socket, options.gib)
    if options.role == "engine":
        return engine(options.socket)
    figures = {**attaching(options.gib, options.runs), **digesting(options.gib, options.folder)}
    for name, value in figures.items():
        print(f"{name:28} {value:12.4f}")
    if options.json:
        print(json.dumps(figures))
    return None


if __name__ == "__main__":
    main()
