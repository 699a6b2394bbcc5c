"""Real vLLM on a CPU: an engine on empty caches, on a node seeded from a store, and restarted on a daemon's weights.

    .venv-vllm/bin/python bench/vllm_cpu.py [--json] [--work DIR]

Needs the environment that ``.ci/install-vllm`` builds; ten minutes on two quiet cores. With ``--json`` the last line
is one JSON object. The seeded node has another cache root, where the AOT artifact of 0.32 can't work and is left out
(on a CPU it would not load anyway): ``used`` is about the rest, and ``used_reason`` says so.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.vllm_nodes import Node, NodeFailed, new_token, smollm2, wait_published


def play(work: Path) -> dict[str, Any]:
    """The figures."""
    model = work / "model"
    shutil.copytree(smollm2(), model)
    store = work / "store"
    store.mkdir()
    shared = ("--warmup-cache-stores", f"file:{store}", "--seed-token-file", str(new_token(work)))
    # B's first engine shows what the store gave it; a rehearsal would have added what it did not.
    a, b = Node("A", work / "a", model, shared), Node("B", work / "b", model, (*shared, "--no-rehearsal"))
    figures: dict[str, Any] = {}
    try:
        empty = Node("empty", work / "empty", model).ask()
        note(figures, empty_init_s=empty.init_s, import_s=empty.import_s)
        note(figures, cold_ready_s=a.start())
        wait_published(store)
        restart = a.ask(**a.loader(fallback=False))
        note(figures, restart_init_s=restart.init_s, **mapping(restart.log))
        a.stop()
        shutil.rmtree(a.cache_root)
        note(figures, seeded_ready_s=b.start())
        seeded = b.ask(**b.loader(fallback=False))
        verdicts = [v for v in b.verdicts() if v["kind"] == "compile_cache"]
        note(
            figures,
            seeded_init_s=seeded.init_s,
            seeded_ratio=seeded.init_s / empty.init_s,
            same_tokens=empty.tokens == restart.tokens == seeded.tokens,
            used=bool(verdicts) and all(v["used"] for v in verdicts),
            used_reason="; ".join(v["reason"] for v in verdicts),
        )
        note(figures, retrain_detected=retrained(b))
    finally:
        a.stop()
        b.stop()
    return figures


def retrained(node: Node) -> bool:
    """Whether an engine that finds other values in the checkpoint refuses the daemon's."""
    (shard,) = node.model.glob("*.safetensors")
    with shard.open("r+b") as file:
        file.seek(shard.stat().st_size // 2)
        data = file.read(4096)
        file.seek(-len(data), 1)
        file.write(bytes(255 - b for b in data))
    try:
        node.ask(**{**node.loader(fallback=False), "enforce_eager": True})
    except NodeFailed as error:
        return "FingerprintMismatch" in error.log and "checkpoint" in error.log
    return False


def mapping(log: str) -> dict[str, float]:
    """What the engine says of mapping, in seconds."""
    line = next((line for line in log.splitlines() if "Mapped " in line), "")
    words = line.replace(",", "").split()
    found = {}
    for name, word in (("attach_s", "attach"), ("shell_s", "model"), ("fill_s", "post-process")):
        if word in words:
            found[name] = int(words[words.index(word) + 1]) / 1e3
    return found


def note(figures: dict[str, Any], **more: Any) -> None:
    """Keep figures, and show them as they come."""
    rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in more.items()}
    figures.update(rounded)
    for name, value in rounded.items():
        print(f"{name:22} {value}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--work", type=Path, help="an empty folder to work in, kept afterwards")
    given = parser.parse_args()
    if given.work is not None:
        given.work.mkdir(parents=True)
        figures = play(given.work.absolute())
    else:
        with tempfile.TemporaryDirectory(prefix="warmseed-vllm-") as scratch:
            figures = play(Path(scratch))
    if given.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
