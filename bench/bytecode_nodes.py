"""How long daemons of real vLLM look at a model where no package has bytecode: on a first node, and on a seeded one.

    .venv-vllm/bin/python bench/bytecode_nodes.py [--rounds 3] [--json] [--bare]

It works on a copy of its own environment without bytecode, made of hard links beside it; with --bare on its own
environment, which has none. The model is SmolLM2, or the one at ``WARMSEED_TEST_MODEL``. Each round starts two nodes
with empty cache roots: the first one compiles and publishes to a folder, the second one adopts from there. `first_s` is
the first one's snapshot, most of which is imports, `seeded_s` the second one's together with the adoption before it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.vllm_nodes import SHAPE, Node, new_token, smollm2, wait_published

ROUNDS_SECONDS = 3600.0  # for all rounds


def bare_copy(folder: Path) -> Path:
    """The interpreter of a copy of this environment without any bytecode; `folder` must be on its file system."""
    shutil.copytree(
        sys.prefix, folder, symlinks=True, copy_function=os.link, ignore=shutil.ignore_patterns("__pycache__")
    )
    return folder / Path(sys.executable).relative_to(sys.prefix)


def start(node: Node, *until: str) -> dict[str, float]:
    """Start and stop a daemon: seconds by phase, and those to serving. `until` is a store to be published to."""
    try:
        ready = node.start()
        for store in until:
            wait_published(Path(store), kind="bytecode")
        (rank,) = node.status()["ranks"]
        return {"ready": ready, **{phase["name"]: phase["seconds"] for phase in rank["phases"]}}
    finally:
        node.stop()


def play(work: Path) -> dict[str, float]:
    """One round."""
    store = work / "store"
    store.mkdir()
    shared = ("--warmup-cache-stores", f"file:{store}", "--seed-token-file", str(new_token(work)), "--no-rehearsal")
    shape = {**SHAPE, "enforce_eager": True}
    first = start(Node("first", work / "first", smollm2(), shared, shape=shape), str(store))
    seeded = start(Node("seeded", work / "seeded", smollm2(), shared, shape=shape))
    return {
        "first_s": first["snapshot"],
        "adopt_s": seeded["adopt-bytecode"],
        "seeded_s": seeded["adopt-bytecode"] + seeded["snapshot"],
        "first_ready_s": first["ready"],
        "seeded_ready_s": seeded["ready"],
        "stored_megabytes": max(path.stat().st_size for path in store.rglob("bundle.tar")) / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--bare", action="store_true", help="no package of this interpreter has bytecode")
    given = parser.parse_args()
    if not given.bare:
        with tempfile.TemporaryDirectory(prefix=".venv-bare-", dir=Path(sys.prefix).parent) as folder:
            command = [str(bare_copy(Path(folder) / "venv")), *sys.argv, "--bare"]
            sys.exit(subprocess.run(command, check=False, timeout=ROUNDS_SECONDS).returncode)
    rounds = []
    for _ in range(given.rounds):
        with tempfile.TemporaryDirectory() as work:
            rounds.append(play(Path(work)))
        print(json.dumps(rounds[-1]), flush=True)
    figures: dict[str, Any] = {name: round(statistics.median(r[name] for r in rounds), 2) for name in rounds[0]}
    for name, over in (("seeded", "first"), ("seeded_ready", "first_ready")):
        ratios = [r[f"{name}_s"] / r[f"{over}_s"] for r in rounds]
        figures[f"{name}_ratio"] = round(statistics.median(ratios), 3)
        figures[f"{name}_ratio_spread"] = [round(min(ratios), 3), round(max(ratios), 3)]
    for name, value in figures.items():
        print(f"{name:24} {value}")
    if given.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
