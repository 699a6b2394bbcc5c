"""FP8 weights mapped from a daemon against the same weights loaded from disk: tokens and log probabilities, to the bit.

    PYTHONPATH=SITE python bench/gpu/vllm_fp8_parity.py --work DIR --tokenizer FOLDER [--gpu 1] [--json FILE]

One row for each way in which vLLM gets FP8 weights for its CUTLASS kernels: quantized while loading (``online``), or
from a checkpoint in FP8. Each has a daemon, an engine that maps, and an engine that loads; the models have Llama 8B's
shape, four layers deep, and run eager. A row says what was refused or what failed, and ends the script with 1.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench.gpu.random_llama import FORMATS, write_llama  # noqa: E402

PROMPTS = ("What is the capital of France?", "Write one sentence about the sea.", "Count from one to ten.")
LAYERS = 4
# Nothing of one engine's memory depends on what its neighbours on the GPU do at that moment.
SHAPE: Final[dict[str, Any]] = {
    "dtype": "bfloat16", "max_model_len": 2048, "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 30,
    "enforce_eager": True, "kernel_config": {"linear_backend": "cutlass"},
}  # fmt: skip
# A row's name: the checkpoint's format, and what the engine is told besides.
ROWS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "online_tensor": ("bf16", {"quantization": "fp8"}),
    "online_channel": ("bf16", {"quantization": "fp8_per_channel"}),
    "online_block": ("bf16", {"quantization": "fp8_per_block"}),
    "fp8_tensor": ("fp8_tensor", {"kv_cache_dtype": "fp8"}),
    "fp8_block": ("fp8_block", {}),
    "modelopt_tensor": ("modelopt_tensor", {"kv_cache_dtype": "fp8"}),
    "modelopt_channel": ("modelopt_channel", {}),
}


def compare(name: str, work: Path, gpu: int) -> dict[str, Any]:
    """One row's figures; ``parity`` is true if a mapped engine and a plain one answered the same, to the last bit."""
    from tests.support.vllm_nodes import Node, NodeFailed

    form, told = ROWS[name]
    node = Node(
        name,
        work / f"parity-{name}",
        work / f"llama{LAYERS}-{form}",
        ("--no-rehearsal", "--engine-usage", "llm"),
        shape={**SHAPE, **told},
        logs=work / "logs",
    )
    node.variables["CUDA_VISIBLE_DEVICES"] = str(gpu)
    shutil.rmtree(node.folder, ignore_errors=True)
    began = time.monotonic()
    try:
        node.start()
        try:
            mapped = node.ask(prompts=PROMPTS, **node.loader(fallback=False))
        finally:
            node.stop()
        plain = node.ask(prompts=PROMPTS)
    except NodeFailed as error:
        return {"parity": False, "why": _reason(str(error))}
    return {
        "parity": mapped.mapped and not plain.mapped
        and (mapped.tokens, mapped.logprobs) == (plain.tokens, plain.logprobs),
        "same_tokens": mapped.tokens == plain.tokens, "mapped": mapped.mapped,
        "kernels": sorted({*re.findall(r"Selected (\w+) for \w+", mapped.log)}),
        "logprobs": sum(map(len, plain.logprobs)), "distinct_tokens": len({t for row in plain.tokens for t in row}),
        "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip


def _reason(log: str) -> str:
    """The last line that names an error."""
    said = [line.strip() for line in log.splitlines() if re.search(r"Error|error:|refuse|can't", line)]
    return (said or log.strip().splitlines() or ["(nothing said)"])[-1][-300:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    work, names = given.work.absolute(), given.rows.split(",")
    for form in ("bf16", *FORMATS):
        folder = work / f"llama{LAYERS}-{form}"
        if form in {ROWS[name][0] for name in names} and not (folder / "model.safetensors.index.json").is_file():
            write_llama(folder, given.tokenizer.absolute(), layers=LAYERS, form=form)
    with ThreadPoolExecutor(given.at_once) as pool:
        figures = dict(zip(names, pool.map(lambda name: compare(name, work, given.gpu), names), strict=True))
    for name, row in figures.items():
        print(f"{name:18} {'same' if row['parity'] else 'DIFFERENT OR FAILED'}  {json.dumps(row)}")
    print(json.dumps({"parity": {name: row["parity"] for name, row in figures.items()}}))
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1))
    if not all(row["parity"] for row in figures.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
