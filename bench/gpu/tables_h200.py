"""FlashInfer's own tuner on a GPU: tuned once, then replayed by nodes that were seeded through a store and over D2D.

    python bench/gpu/tables_h200.py --kit .kit                # where there is a network: packs what a GPU machine lacks
    bash .kit/setup.sh SITE && PYTHONPATH=SITE:src python bench/gpu/tables_h200.py    # on an H200: some five minutes
    PYTHONPATH=src python bench/gpu/tables_h200.py --dry-run  # on a CPU: FlashInfer's tuner with a stand-in kernel

Every node is a process of its own with table folders of its own. FlashInfer's compiled modules are shared by all
(compiling is not what is measured here); its workspace is `--workspace`. Prints one JSON object on the last line; exits
with 1 if a check failed: a seeded node profiled something, computed other bytes, or a cold one profiled nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the tests' fleet

DRY_METADATA = {
    "flashinfer_version": "0.7.2.post1",
    "cuda_version": "13.0",
    "cublas_version": "13.1.0",
    "cudnn_version": "91900",
    "cudnn_frontend_version": "1.32.0",
    "cutlass_dsl_version": "nvidia-cutlass-dsl==4.7.1",
    "gpu": "dry run",
}

# One engine: tunes or replays, and reports what FlashInfer counted and what came out.
ENGINE = """
import hashlib, json, sys, time
question = json.loads(sys.argv[1])
import torch
from flashinfer import autotune, autotune_v2
from flashinfer.autotuner import AutoTuner, autotuner
import flashinfer.autotuner as package
from warmseed.seeding.kinds.autotune.usage import read_counters
torch.manual_seed(7)
BUCKETS = (64, 256, 1024)
if question["dry"]:
    see = lambda: dict(question["dry"])
    autotuner._collect_metadata = package._collect_metadata = see
    from flashinfer.autotuner import DynamicTensorSpec, TunableRunner, TuningConfig
    torch.cuda.is_current_stream_capturing = lambda: False
    def on_cpu(self, runner, inputs, tactic, tuning_config, input_tensor_batches=None, **kw):
        begun = time.perf_counter()
        for _ in range(3):
            runner(inputs, tactic=tactic, **kw)
        return (time.perf_counter() - begun) * 1e3
    AutoTuner._profile_single_kernel = on_cpu
    class FakeGemmRunner(TunableRunner):
        def get_valid_tactics(self, inputs, profile):
            return [0, 1, 2]
        def get_cache_key_extras(self, inputs):
            return (inputs[0].dtype,)
        def forward(self, inputs, tactic=-1, do_preparation=False, **kw):
            for _ in range({-1: 4, 0: 8, 1: 1, 2: 4}[tactic]):
                result = inputs[0] @ inputs[1]
            return result
    config = TuningConfig(dynamic_tensor_specs=(
        DynamicTensorSpec((0,), (0,), BUCKETS, lambda x: max(b for b in BUCKETS if b <= max(x, 64))),))
    a, b = torch.randn(1024, 64), torch.randn(64, 64)
    def gemm():
        runner, tactic = AutoTuner.get().choose_one("fake::gemm", [FakeGemmRunner()], config, [a, b])
        return runner([a, b], tactic=tactic)
    steps = [(BUCKETS, gemm)]
else:
    from flashinfer.gemm import bmm_fp8, mm_bf16
    def fp8(x):
        scale = x.abs().amax().float().clamp(min=1e-12) / 448
        return (x / scale).to(torch.float8_e4m3fn), scale
    m, n, k = 1024, 2048, 4096
    a = torch.randn(1, m, k, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(1, n, k, device="cuda", dtype=torch.bfloat16)
    (qa, sa), (qb, sb) = fp8(a), fp8(w)
    qb = qb.transpose(-2, -1)
    steps = [
        (BUCKETS, lambda: bmm_fp8(qa, qb, sa, sb, torch.bfloat16, backend="cublas")),
        # Its key holds the raw number of rows, and tuning looks every bucket up with the caller's: with more
        # buckets than that one, FlashInfer itself profiles the others again at every start.
        ((1024,), lambda: mm_bf16(a[0], w[0].T, backend="cublaslt")),
    ]
start = time.perf_counter()
for buckets, step in steps:
    options = {"tuning_buckets": buckets, "round_up": True}
    if question["managed"]:
        context = autotune_v2(cache_root=question["managed"], **options)
    else:
        context = autotune(True, cache=question["table"], **options)
    with context:
        step()
if torch.cuda.is_available():
    torch.cuda.synchronize()
seconds = time.perf_counter() - start
out = []
for buckets, step in steps:
    with autotune(False, tuning_buckets=buckets, round_up=True):
        out.append(step())
digest = hashlib.sha256()
for tensor in out:
    digest.update(tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes())
print(json.dumps({"seconds": seconds, "counters": read_counters(AutoTuner.get()), "output": digest.hexdigest()}))
"""


class Bench:
    """Nodes in one temporary folder, and what was seen of them."""

    def __init__(self, folder: Path, workspace: Path, *, dry: bool) -> None:
        from warmseed.seeding.kinds.autotune.collect import collect
        from warmseed.seeding.trust.keys import PublisherKey

        self.folder, self.workspace, self.dry = folder, workspace, dry
        self.key = PublisherKey.generate("bench")
        self.store = folder / "store"
        self.store.mkdir()
        self.environ = {"FLASHINFER_WORKSPACE_BASE": str(workspace)}
        found = collect(folder / "state", environ={**os.environ, **self.environ}, timeout=300)
        self.metadata = DRY_METADATA if dry else found.metadata
        self.unknown = [name for name, value in self.metadata.items() if value == "unknown"]
        self.failed: list[str] = []
        self.figures: dict[str, Any] = {"metadata": self.metadata}

    def site(self, name: str, home: str) -> Any:
        from tests.support.tables import table_site

        return table_site(self.folder / name, metadata=self.metadata, homes=(home,))

    def engine(self, name: str, site: Any) -> dict[str, Any]:
        """One engine's start at `site`."""
        from tests.support.tables import local_path

        from warmseed.seeding.kinds.autotune.layout import MANAGED_ROOT

        managed = str(site.roots[MANAGED_ROOT]) if MANAGED_ROOT in site.roots else ""
        table = "" if managed else str(local_path(site))
        question = {"dry": self.metadata if self.dry else None, "managed": managed, "table": table}
        start = time.perf_counter()
        child = subprocess.run(
            [sys.executable, "-c", ENGINE, json.dumps(question)],
            env={**os.environ, **self.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        if child.returncode != 0:
            raise SystemExit(f"{name}: the engine failed:\n{child.stderr[-4000:]}")
        seen: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
        seen["process_seconds"] = time.perf_counter() - start
        self.figures[name] = seen
        profiled, hits = (seen["counters"][f"flashinfer_autotune_{what}"] for what in ("profiled", "hits"))
        print(f"{name}: profiled {profiled}, hits {hits}, {seen['seconds']:.2f} s of tuning", file=sys.stderr)
        return seen

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            self.failed.append(what)
            print(f"FAILED: {what}", file=sys.stderr)

    async def run(self) -> None:
        from tests.support.fleet import Node
        from tests.support.tables import local_path

        from warmseed.seeding.kinds.autotune.kind import FlashInferAutotune
        from warmseed.seeding.kinds.autotune.layout import MANAGED_ROOT, PER_RANK_ROOT
        from warmseed.seeding.kinds.base import Evidence
        from warmseed.seeding.trust.token import new_token, read_tokens, write_token

        kind = FlashInferAutotune()
        self.check(not self.unknown, f"FlashInfer knows its whole environment, but for {self.unknown}")
        builder = self.site("builder", PER_RANK_ROOT)
        local_path(builder).parent.mkdir(parents=True)
        cold = await asyncio.to_thread(self.engine, "cold_first", builder)  # compiles FlashInfer's modules as well
        again = self.site("cold", PER_RANK_ROOT)
        local_path(again).parent.mkdir(parents=True)
        cold = await asyncio.to_thread(self.engine, "cold", again)
        self.check(cold["counters"]["flashinfer_autotune_profiled"] > 0, "a cold node profiles")
        self.check(local_path(again).exists(), "a cold node saves its table")
        token_file = self.folder / "token"
        write_token(token_file, new_token())
        (token,) = read_tokens(file=token_file, arguments=(), environ={})
        async with AsyncExitStack() as stack:
            opened = stack.enter_async_context
            source = await opened(Node.opened(again.state, f"file:{self.store}", key=self.key, trusted=self.key))
            self.figures["published"] = dict((await source.publish(kind, again)).manifest.provenance)
            endpoint = await opened(source.serving(token))
            for name, home, through in (
                ("store_v1", PER_RANK_ROOT, "store"),
                ("d2d_v1", PER_RANK_ROOT, "peer"),
                ("store_v2", MANAGED_ROOT, "store"),
                ("d2d_v2", MANAGED_ROOT, "peer"),
            ):
                site = self.site(name, home)
                stores = (f"file:{self.store}",) if through == "store" else ()
                node = await opened(Node.opened(site.state, *stores, key=self.key, trusted=self.key))
                peer = endpoint if through == "peer" else None
                adopter = node.adopter(site, kind, token=token if peer else None, peer=peer)
                adoption = await adopter.adopt(kind, site)
                self.check(adoption.outcome == "installed", f"{name}: adopted, {adoption.refusals}")
                if adoption.installation is None:
                    continue
                seen = await asyncio.to_thread(self.engine, name, site)
                seen["adopt_ms"] = adoption.seconds * 1e3
                self.check(seen["counters"]["flashinfer_autotune_profiled"] == 0, f"{name}: nothing is profiled")
                self.check(seen["output"] == cold["output"], f"{name}: the output equals the cold node's, bit for bit")
                evidence = Evidence(seen["seconds"], seen["counters"])
                verdict = kind.judge(adoption.installation, evidence, site)
                self.check(verdict.used, f"{name}: judged as used ({verdict.reason})")
                seen["verdict"] = verdict.reason


def make_kit(out: Path) -> None:
    """Wheels for CPython 3.12, FlashInfer's without what it does not need to build two modules; under 60 MiB."""
    platforms = [f"manylinux_2_{n}_x86_64" for n in (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)]
    platforms += ["manylinux2014_x86_64", "manylinux1_x86_64", "linux_x86_64"]
    wheels = ("flashinfer-python==0.7.2.post1", "apache-tvm-ffi==0.1.11", "nvidia-cudnn-frontend==1.32.0")
    wheels += ("nvidia-cutlass-dsl==4.8.0", "msgspec", "cryptography", "cffi", "typing_extensions")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", scratch]
        fetch += ["--python-version", "3.12", "--implementation", "cp"]
        fetch += [part for platform in platforms for part in ("--platform", platform)]
        subprocess.run([*fetch, *wheels], check=True)
        tree = Path(scratch) / "site"
        for wheel in Path(scratch).glob("*.whl"):
            subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(tree)], check=True)
        skip = ("examples", "test", "tools/profiler", "docs", "media", "python")
        excludes = [f"--exclude=./flashinfer/data/cutlass/{name}" for name in skip]
        subprocess.run(["tar", "-C", str(tree), *excludes, "-cJf", str(out / "site.tar.xz"), "."], check=True)
    (out / "setup.sh").write_text(_SETUP)
    print(f"{out}: {(out / 'site.tar.xz').stat().st_size >> 20} MiB; carry it and run `bash {out}/setup.sh SITE`")


# What a machine with nvcc but without development packages lacks: cuBLAS's headers and linker names from torch's own
# wheels, a stub for -lcuda, and the folders whose absence makes every process rebuild.
_SETUP = r"""#!/usr/bin/env bash
set -euo pipefail
site=${1:?where to unpack}; here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$site"; tar -C "$site" -xJf "$here/site.tar.xz"
cuda=${CUDA_HOME:-/usr/local/cuda}; target=$cuda/targets/x86_64-linux
mkdir -p "$target/include" "$target/lib" "$target/lib/stubs"
for base in $(python3 -c 'import site,sys; print(*site.getsitepackages(), *sys.path)' | tr ' ' '\n' | sort -u); do
  for inc in "$base"/nvidia/cu13/include "$base"/nvidia/*/include; do
    [ -d "$inc" ] || continue
    for f in "$inc"/*; do [ -e "$cuda/include/$(basename "$f")" ] || ln -sfn "$f" "$cuda/include/" || true; done
  done
  for lib in "$base"/nvidia/cu13/lib "$base"/nvidia/*/lib; do
    [ -d "$lib" ] || continue
    for f in "$lib"/lib*.so.[0-9]*; do
      [ -e "$f" ] || continue
      n=$(basename "$f"); n=${n%%.so.*}.so
      [ -e "$target/lib/$n" ] || ln -sfn "$f" "$target/lib/$n"
      [ -e "$cuda/lib64/$n" ] || ln -sfn "$f" "$cuda/lib64/$n" || true
    done
  done
done
if ! [ -e "$cuda/lib64/stubs/libcuda.so" ]; then
  mkdir -p "$cuda/lib64/stubs"
  echo 'void warmseed_stub(void){}' | gcc -shared -fPIC -xc - -o "$cuda/lib64/stubs/libcuda.so"
fi
PYTHONPATH=$site python3 -c 'import cryptography, flashinfer, msgspec; print("flashinfer", flashinfer.__version__)'
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kit", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--workspace", type=Path, default=Path.home() / "warmseed-flashinfer")
    options = parser.parse_args()
    if options.kit is not None:
        make_kit(options.kit)
        return
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), options.workspace, dry=options.dry_run)
        asyncio.run(bench.run())
    cold = bench.figures["cold"]["seconds"]
    names = [name for name in bench.figures if name.startswith(("store_", "d2d_"))]
    seeded = {f"{name}_s": bench.figures[name]["seconds"] for name in names}
    bench.figures["summary"] = {"cold_s": cold, **seeded}
    bench.figures["failed"] = bench.failed
    print(json.dumps(bench.figures))
    sys.exit(1 if bench.failed else 0)


if __name__ == "__main__":
    main()
