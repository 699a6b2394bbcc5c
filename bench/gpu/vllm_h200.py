"""Real vLLM on GPUs: empty caches, restarts, new nodes, retrained weights, a killed daemon; a table and JSON.

    python bench/gpu/vllm_h200.py pack .kit5        # here: warmseed's own requirements as wheels, beside the vLLM kit
    python bench/gpu/vllm_h200.py setup .kit5 SITE  # there: unpack them, and warmseed with its entry points, into SITE
    PYTHONPATH=SITE python bench/gpu/vllm_h200.py play --work DIR [--steps a,b] [--tp 2] [--json FILE]

The GPU machine has no network and takes 64 MiB a call: carry the vLLM kit's parts one by one, this one's, and a folder
with a tokenizer; each call of ``play`` then names a few steps.

``play`` remembers what it has done in DIR, so that its steps can be spread over calls with a time limit:

    model    a random Llama-8B shape in bf16, with a real tokenizer's folder given by --tokenizer
    cold     node A, nothing cached: warmseed preload with its rehearsal; published to a folder and to a listener
    restart  an engine started again: weights mapped, caches at the same path
    plain    the same without warmseed's weights: the reference for tokens, and "restored at the same path"
    peer     node D at a foreign root, seeded by A's listener
    retrain  the checkpoint's values change under a living daemon: refused, from disk, tokens differ; then put back
    killed   the daemon is killed under an engine that goes on answering; the next engine loads from disk
    store    node A's caches and daemon gone; node B at the same path, seeded by the store
    foreign  node C at another path, seeded by the store, A's and B's gone
    imports  where the seconds before an engine's own start go

`restart`, `peer`, `retrain` and `killed` share one daemon of node A where they run in one call. Steps joined by ``+``
run side by side, the second on the second GPU (``restart+peer``). With --tp 2 every step runs with one daemon per GPU.
With --eager nothing is compiled, which is of use only to try this script itself, on any machine and model.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.gpu.random_llama import write_llama  # noqa: E402

REQUIREMENTS = (
    *("aiohttp", "aiosignal", "aiohappyeyeballs", "attrs", "frozenlist", "multidict", "propcache", "yarl", "idna"),
    *("cryptography", "cffi", "pycparser", "msgspec", "zstandard", "prometheus-client"),
    *(
        "typer",
        "click",
        "shellingham",
        "rich",
        "markdown-it-py",
        "mdurl",
        "pygments",
        "typing-extensions",
        "annotated-doc",
    ),
)
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (34, 31, 28, 27, 17, 12, 5)] + ["manylinux2014_x86_64", "linux_x86_64"]
PACKAGES = ("daemon", "seeding", "stores", "configs")
PROMPTS = ("What is the capital of France?", "Write one sentence about the sea.", "Count from one to ten.")
STEPS = ("model", "cold", "plain", "restart", "peer", "retrain", "killed", "store", "foreign", "imports")
SHAPE = {"dtype": "bfloat16", "max_model_len": 2048, "gpu_memory_utilization": 0.5}
# What each figure must not exceed, in seconds (Llama-8B shape, one H200).
LIMITS = {
    "store_init_s": 26.0,
    "foreign_init_s": 52.0,
    "store_mapped_init_s": 22.0,
    "map_s": 0.2,
    "fallback_extra_s": 1.0,
    "killed_extra_s": 1.0,
}


def pack(target: Path) -> None:
    """Wheels of warmseed's own requirements for the GPU machine's Python."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    words = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(target)]
    words += ["--python-version", "3.12", "--implementation", "cp"]
    for platform in PLATFORMS:
        words += ["--platform", platform]
    subprocess.run([*words, *REQUIREMENTS], check=True, timeout=600)
    print(
        f"{target}: {sum(p.stat().st_size for p in target.iterdir()) >> 20} MiB in {len(list(target.iterdir()))} wheels"
    )


def setup(wheels: Path, site: Path) -> None:
    """Put warmseed and what it needs into `site`, as an installer would: vLLM finds its plugin by the metadata."""
    site.mkdir(parents=True, exist_ok=True)
    for wheel in sorted(wheels.glob("*.whl")):
        if _installed(wheel.name.partition("-")[0]):
            continue  # what the machine has fits its torch
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if not (site / name).exists():  # vLLM's own versions stand
                    archive.extract(name, site)
    package = site / "warmseed"
    shutil.rmtree(package, ignore_errors=True)
    package.mkdir()
    for path in (ROOT / "src" / "warmseed").iterdir():
        if path.name not in PACKAGES:
            (shutil.copytree if path.is_dir() else shutil.copy)(path, package / path.name)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, package / name)
    info = site / "warmseed-0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: warmseed\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nwarmseed = warmseed.daemon.engines.vllm.plugin:register\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", "import warmseed.daemon.engines.vllm.adapter, warmseed.daemon.cli.main; print('ready')"],
        env={**os.environ, "PYTHONPATH": str(site)},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    print(said.stdout.strip())


def _installed(distribution: str) -> bool:
    from importlib.metadata import PackageNotFoundError, version

    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


@dataclass
class Play:
    """One run of the story; every step leaves its figures in a file of its own."""

    work: Path
    tokenizer: Path
    tp: int
    eager: bool = False
    _a: Any = None  # node A with its daemon, once a step has needed it
    _port: str = ""  # of its listener
    _ready: float = 0.0  # seconds that it took to serve
    _starting: threading.Lock = field(default_factory=threading.Lock)

    @property
    def notes(self) -> Path:
        return self.work / f"figures-tp{self.tp}"

    @property
    def figures(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for path in sorted(self.notes.glob("*.json"), key=lambda path: path.stat().st_mtime_ns):
            found |= json.loads(path.read_text())
        return found

    @property
    def model(self) -> Path:
        return self.work / "model"

    @property
    def canonical(self) -> Path:
        """The folder of every node whose cache root is the fleet's: A, and B after it."""
        return self.work / f"node{self.tp}"

    @property
    def store(self) -> Path:
        return self.work / f"store{self.tp}"

    def node(self, name: str, folder: Path, gpu: int, *extra: str, **shape: Any) -> Any:
        from tests.support.vllm_nodes import Node

        shape = {**SHAPE, **shape}
        if self.eager:
            shape["enforce_eager"] = True
        if self.tp > 1:
            shape["tensor_parallel_size"] = self.tp
            # FlashInfer's fused all-reduce writes through multicast, which is off below: it ends in an illegal access.
            shape["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
        # `LLM` and `vllm serve` choose different batch sizes; the daemon is told whose engines it has.
        node = Node(name, folder, self.model, (*extra, "--engine-usage", "llm"), shape=shape)
        node.logs = self.work / "logs"
        # Multicast can put GPUs that others share out of service: off, whatever the machine's own default is.
        node.variables |= {
            "NCCL_NVLS_ENABLE": "0",
            "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
            "NVSHMEM_DISABLE_NVLS": "1",
            "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        }
        if self.tp == 1:
            node.variables["CUDA_VISIBLE_DEVICES"] = str(gpu)
        return node

    def token(self) -> list[str]:
        from tests.support.vllm_nodes import new_token

        if not (self.work / "token").is_file():
            new_token(self.work)
        return ["--seed-token-file", str(self.work / "token")]

    def shared(self) -> list[str]:
        self.store.mkdir(exist_ok=True)
        return ["--warmup-cache-stores", f"file:{self.store}", *self.token()]

    def run(self, step: str, gpu: int) -> None:
        """One step on one GPU, and its figures kept."""
        began = time.monotonic()
        print(f"== {step} on GPU {gpu}", flush=True)
        figures: dict[str, Any] = getattr(self, f"step_{step}")(gpu) or {}
        self.notes.mkdir(parents=True, exist_ok=True)
        (self.notes / f"{step}.json").write_text(json.dumps(figures, indent=1))
        print(f"== {step}: {time.monotonic() - began:.0f} s {json.dumps(figures)}", flush=True)

    def close(self) -> None:
        if self._a is not None:
            self._a.stop()
            self._a = None

    # The steps ------------------------------------------------------------------------------------

    def step_model(self, gpu: int) -> dict[str, Any] | None:
        if (self.model / "model.safetensors.index.json").is_file():
            return None
        began = time.monotonic()
        write_llama(self.model, self.tokenizer)
        return {"model_write_s": round(time.monotonic() - began, 1)}

    def step_cold(self, gpu: int) -> dict[str, Any]:
        from tests.support.vllm_nodes import wait_published

        with self._daemon("A", self.canonical, gpu, *self.shared()) as (a, ready):
            if not self.eager:
                wait_published(self.store)
            return {"empty_ready_s": ready, "empty_phases": _phases(a), **_rehearsed(a)}

    def step_restart(self, gpu: int) -> dict[str, Any]:
        a = self._living(gpu)
        again = a.ask(prompts=PROMPTS, **a.loader(fallback=False))
        return {
            "restart_init_s": again.init_s, "restart_import_s": again.import_s, **_said("restart", again),
            "restart_mapped": again.mapped, "restart_parts": _parts(again.log), "restart_verdicts": a.verdicts(),
            "restart_ready_s": self._ready, "restart_phases": _phases(a), **_attach(again.log),
        }  # fmt: skip

    def step_plain(self, gpu: int) -> dict[str, Any]:
        answer = self.node("A", self.canonical, gpu).ask(prompts=PROMPTS)
        return {
            "plain_init_s": answer.init_s, "plain_import_s": answer.import_s, **_said("plain", answer),
            "plain_load_s": _seconds(answer.log), "plain_parts": _parts(answer.log),
        }  # fmt: skip

    def step_peer(self, gpu: int) -> dict[str, Any]:
        self._living(0)
        source = ["--seed-source-host", "127.0.0.1", "--seed-source-port", self._port]
        folder = self.work / f"peer{self.tp}"
        self._forget(folder)
        with self._daemon("D", folder, gpu, *self.token(), *source, "--no-rehearsal") as (d, ready):
            answer = d.ask(prompts=PROMPTS, **d.loader(fallback=False))
            return {
                "peer_ready_s": ready, "peer_init_s": answer.init_s, **_said("peer", answer),
                "peer_phases": _phases(d), "peer_verdicts": d.verdicts(), "peer_lines": _evidence(answer.log),
            }  # fmt: skip

    def step_retrain(self, gpu: int) -> dict[str, Any]:
        a = self._living(gpu)
        shard = sorted(self.model.glob("*.safetensors"))[-1]
        kept = shard.with_suffix(".kept")
        shutil.copy2(shard, kept)
        try:
            _change_values(shard)
            refused = _refused(lambda: a.ask(prompts=PROMPTS, **a.loader(fallback=False)))
            answer = a.ask(prompts=PROMPTS, **a.loader())
            plain = self.node("A", self.canonical, gpu).ask(prompts=PROMPTS)
            return {
                "retrain_refused": "FingerprintMismatch" in refused and "checkpoint" in refused,
                "retrain_fell_back": answer.fell_back, **_said("retrain", answer),
                **_said("retrain_plain", plain), "retrain_init_s": answer.init_s,
                "retrain_plain_init_s": plain.init_s, "fallback_extra_s": _spent(answer.log),
            }  # fmt: skip
        finally:
            os.replace(kept, shard)

    def step_killed(self, gpu: int) -> dict[str, Any]:
        import signal

        a = self._living(gpu)
        with a.serving(**a.loader(fallback=False)) as server:
            before = server.ask(PROMPTS[0])
            a.stop(signal.SIGKILL)
            self._a = None
            after = server.ask(PROMPTS[0])
        answer = a.ask(prompts=PROMPTS, **a.loader())
        return {
            "killed_answers_same": before == after, "killed_fell_back": answer.fell_back,
            **_said("killed", answer), "killed_extra_s": _spent(answer.log),
        }  # fmt: skip

    def step_store(self, gpu: int) -> dict[str, Any]:
        self.close()
        self._forget(self.canonical)
        with self._daemon("B", self.canonical, gpu, *self.shared()) as (b, ready):
            phases = _phases(b)
            plain = b.ask(prompts=PROMPTS)
            mapped = b.ask(prompts=PROMPTS, **b.loader(fallback=False))
            return {
                "store_ready_s": ready, "store_phases": phases, "store_init_s": plain.init_s,
                **_said("store", plain), "store_mapped_init_s": mapped.init_s,
                **_said("store_mapped", mapped), "store_verdicts": b.verdicts(),
                "store_parts": _parts(plain.log), "store_mapped_parts": _parts(mapped.log),
            }  # fmt: skip

    def step_foreign(self, gpu: int) -> dict[str, Any]:
        self.close()
        self._forget(self.canonical)
        folder = self.work / f"elsewhere{self.tp}" / "deeper"
        self._forget(folder)
        with self._daemon("C", folder, gpu, *self.shared(), "--no-rehearsal") as (c, ready):
            phases = _phases(c)
            plain = c.ask(prompts=PROMPTS)
            return {
                "foreign_ready_s": ready, "foreign_phases": phases, "foreign_init_s": plain.init_s,
                **_said("foreign", plain), "foreign_lines": _evidence(plain.log),
                "foreign_parts": _parts(plain.log),
            }  # fmt: skip

    def step_imports(self, gpu: int) -> dict[str, Any]:
        node = self.node("A", self.canonical, gpu)
        command = [sys.executable, "-X", "importtime", "-c", "from vllm import LLM, SamplingParams; LLM"]
        runs = []
        for _ in range(2):
            began = time.monotonic()
            done = subprocess.run(
                command, env=node.environment, capture_output=True, text=True, timeout=300, check=True
            )
            runs.append((time.monotonic() - began, done.stderr))
        seconds, said = min(runs)
        return {"imports_s": round(seconds, 2), "imports_by_package": _by_package(said)}

    # Helpers --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _daemon(self, name: str, folder: Path, gpu: int, *extra: str) -> Iterator[tuple[Any, float]]:
        """A node with its daemon, and the seconds that it took to serve."""
        node = self.node(name, folder, gpu, *extra)
        try:
            yield node, node.start()
        finally:
            node.stop()

    def _living(self, gpu: int) -> Any:
        """Node A with its daemon serving and listening; started by the first step that needs it."""
        from tests.support.vllm_nodes import free_port

        with self._starting:
            if self._a is None:
                self._port = str(free_port())
                listen = ["--seed-listen-host", "127.0.0.1", "--seed-listen-port", self._port, *self.token()]
                node = self.node("A", self.canonical, gpu, *listen)
                self._a = node  # also when it fails: `close` ends it
                self._ready = node.start()
            return self._a

    def _forget(self, folder: Path) -> None:
        """A node that never was: its caches, its state, its sockets."""
        shutil.rmtree(folder, ignore_errors=True)


def _phases(node: Any) -> dict[str, Any]:
    return {f"{rank['name']}.{phase['name']}": phase for rank in node.status()["ranks"] for phase in rank["phases"]}


def _rehearsed(node: Any) -> dict[str, Any]:
    """What the throwaway engine said of itself on its last line."""
    for line in reversed(node.words(400).splitlines()):
        if '"init_s"' in line:
            said = json.loads(line[line.index("{") :])
            return {"empty_init_s": said["init_s"], "empty_import_s": said["import_s"]}
    return {"empty_init_s": None}


def _said(step: str, answer: Any) -> dict[str, Any]:
    return {f"{step}_tokens": answer.tokens, f"{step}_logprobs": answer.logprobs}


def _attach(log: str) -> dict[str, float]:
    found = re.findall(r"attach (\d+) ms, empty model (\d+) ms, map and post-process (\d+) ms", log)
    if not found:
        return {}
    attach, shell, fill = (max(int(row[i]) for row in found) / 1e3 for i in range(3))
    return {"map_s": attach, "shell_s": shell, "fill_s": fill, "own_weights_gib": _own_weights(log)}


def _own_weights(log: str) -> float:
    found = re.findall(r"Model loading took ([\d.]+) ?GiB", log)
    return max(map(float, found)) if found else -1.0


def _parts(log: str) -> dict[str, float]:
    """Where an engine's init went, in vLLM's own words; the rest of it is not accounted for by vLLM."""
    said = {
        "model_load_s": r"Model loading took .*? ([\d.]+) seconds",
        "compile_s": r"torch\.compile.*? (?:takes?|took) ([\d.]+) s",
        "profile_s": r"Initial profiling/warmup run took ([\d.]+) s",
        "graphs_s": r"Graph capturing finished in ([\d.]+) secs",
        "engine_init_s": r"init engine \(.*?\) took ([\d.]+) s",
    }
    found = {name: re.findall(pattern, log) for name, pattern in said.items()}
    return {name: max(map(float, values)) for name, values in found.items() if values}


def _seconds(log: str) -> float:
    found = re.findall(r"Loading weights took ([\d.]+) seconds", log)
    return max(map(float, found)) if found else -1.0


def _evidence(log: str) -> list[str]:
    from warmseed.daemon.engines.vllm.evidence import is_evidence

    return [line[-300:] for line in log.splitlines() if is_evidence(line)][:40]


def _spent(log: str) -> float | None:
    """Seconds from the load's start to the decision to load from disk."""
    found = re.findall(r"falling back to disk loading after (\d+) ms", log)
    return max(map(int, found)) / 1e3 if found else None


def _by_package(said: str) -> dict[str, float]:
    """Seconds that modules of each package took themselves, the slowest packages first, from ``-X importtime``."""
    seconds: dict[str, float] = {}
    for own, name in re.findall(r"^import time: +(\d+) \| +\d+ \| *(\S+)$", said, re.MULTILINE):
        package = name.partition(".")[0]
        seconds[package] = seconds.get(package, 0.0) + int(own) / 1e6
    return dict(sorted(((n, round(s, 2)) for n, s in seconds.items()), key=lambda item: -item[1])[:16])


def _refused(ask: Callable[[], Any]) -> str:
    from tests.support.vllm_nodes import NodeFailed

    try:
        ask()
    except NodeFailed as error:
        return error.log
    return ""


def _change_values(shard: Path) -> None:
    """Other values in the same header: what a retrain leaves, and what headers alone do not show."""
    with shard.open("r+b") as file:
        header = int.from_bytes(file.read(8), "little")
        for offset in range(header + 8, shard.stat().st_size - 65536, 64 << 20):
            file.seek(offset)
            data = bytearray(file.read(65536))
            data[::2] = bytes(b ^ 1 for b in data[::2])
            file.seek(offset)
            file.write(data)


def summary(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures that have limits, and what must hold everywhere."""
    reference = figures.get("plain_tokens")
    same = {
        name: figures[name] == reference
        for name in figures
        if name.endswith("_tokens") and not name.startswith(("plain", "retrain"))
    }
    holds = {name: value for name, value in figures.items() if isinstance(value, bool)}
    if "retrain_tokens" in figures:
        holds["retrain_is_another_model"] = figures["retrain_logprobs"] != figures.get("plain_logprobs")
        holds["retrain_is_the_new_model"] = figures["retrain_logprobs"] == figures["retrain_plain_logprobs"]
    return {
        "same_tokens": bool(same) and all(same.values()),
        "same_logprobs": [
            name.removesuffix("_logprobs")
            for name in figures
            if name.endswith("_logprobs") and figures[name] == figures.get("plain_logprobs")
        ],
        "differing": [name for name, equal in same.items() if not equal],
        "broken": [name for name, kept in holds.items() if not kept],
        "within": {name: figures[name] <= limit for name, limit in LIMITS.items() if figures.get(name) is not None},
    }


def table(figures: dict[str, Any]) -> str:
    rows = [f"{'figure':28} {'value':>12} {'at most':>8}"]
    for name, value in figures.items():
        if isinstance(value, bool | float | int):
            rows.append(
                f"{name:28} {value if isinstance(value, bool) else round(value, 3)!s:>12} {LIMITS.get(name, '')!s:>8}"
            )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("target", type=Path)
    setting = commands.add_parser("setup")
    setting.add_argument("wheels", type=Path)
    setting.add_argument("site", type=Path)
    playing = commands.add_parser("play")
    playing.add_argument("--work", type=Path, required=True)
    playing.add_argument("--tokenizer", type=Path, default=Path())
    playing.add_argument("--steps", default=",".join(STEPS))
    playing.add_argument("--tp", type=int, default=1)
    playing.add_argument("--eager", action="store_true")
    playing.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.command == "pack":
        pack(given.target)
    elif given.command == "setup":
        setup(given.wheels, given.site)
    else:
        play = Play(given.work.absolute(), given.tokenizer.absolute(), given.tp, given.eager)
        play.work.mkdir(parents=True, exist_ok=True)
        failed = []
        try:
            for group in given.steps.split(","):
                steps = group.split("+")
                with ThreadPoolExecutor(len(steps)) as pool:
                    runs = [pool.submit(play.run, step, gpu) for gpu, step in enumerate(steps)]
                for step, run in zip(steps, runs, strict=True):
                    if (error := run.exception()) is not None:  # the others' figures are worth having
                        failed.append(step)
                        print(f"== {step} failed: {error}", flush=True)
        finally:
            play.close()
        result = {**play.figures, "summary": summary(play.figures)}
        print(table(play.figures))
        print(json.dumps(result["summary"]))
        if given.json:
            given.json.write_text(json.dumps(result, indent=1))
        if failed:
            sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
