"""What the imports of an engine cost where its packages came without bytecode, and with warmseed keeping it.

    python bench/bytecode.py [--statement "from vllm import LLM"] [--runs 3] [--json]

Run it with the engine's own interpreter. `none` is a start where bytecode is neither there nor written, as in an image
that was installed without and forbids it; `first` and `kept` are the first start and the later ones with the variables
that ``warmseed env`` and the daemon set there. Rounds of `none` and `kept` take turns; each run is a fresh interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path


def seconds(statement: str, variables: Mapping[str, str]) -> float:
    """How long an interpreter took to run `statement` and end."""
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **variables}
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", statement], env=environ, check=True, capture_output=True, timeout=600)
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--statement", default="from vllm import LLM, SamplingParams")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        nothing, folder = Path(scratch) / "nothing", Path(scratch) / "kept"
        none = {"PYTHONPYCACHEPREFIX": str(nothing), "PYTHONDONTWRITEBYTECODE": "1"}
        kept = {"PYTHONPYCACHEPREFIX": str(folder), "PYTHONDONTWRITEBYTECODE": ""}
        seconds(given.statement, none)  # files into the page cache
        first = seconds(given.statement, kept)
        rounds = [(seconds(given.statement, none), seconds(given.statement, kept)) for _ in range(given.runs)]
        files = list(folder.rglob("*.pyc"))
        nbytes = sum(path.stat().st_size for path in files)
    without, with_it = ([pair[side] for pair in rounds] for side in (0, 1))
    ratios = [after / before for before, after in rounds]
    figures = {
        "none_s": round(statistics.median(without), 2),
        "first_s": round(first, 2),
        "kept_s": round(statistics.median(with_it), 2),
        "kept_ratio": round(statistics.median(ratios), 3),
        "kept_ratio_spread": [round(min(ratios), 3), round(max(ratios), 3)],
        "files": len(files),
        "megabytes": round(nbytes / 1e6, 1),
    }
    for name, value in figures.items():
        print(f"{name:20} {value}")
    if given.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
