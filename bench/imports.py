"""What importing warmseed costs: the least of several fresh processes, in milliseconds.

``python bench/imports.py [--runs N] [--json]``
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

MODULES = {
    "warmseed": "warmseed",
    "seeding and stores": "warmseed.seeding, warmseed.stores",
    "adopt, publish, chain, registry": "warmseed.seeding.adopt, warmseed.seeding.publish, warmseed.stores.registry",
    "command line": "warmseed.daemon.cli.main",
}


def milliseconds(modules: str, runs: int) -> float:
    """The least time that importing `modules` took, of `runs` processes; the interpreter's own start not included."""
    code = f"import time; t = time.perf_counter(); import {modules}; print(time.perf_counter() - t)"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path[1:] if p)}
    command = [sys.executable, "-P", "-c", code]
    outputs = (
        subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout for _ in range(runs)
    )
    return round(min(map(float, outputs)) * 1e3, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    figures = {name: milliseconds(modules, arguments.runs) for name, modules in MODULES.items()}
    for name, figure in figures.items():
        print(f"{name:36} {figure:8.1f} ms")
    if arguments.json:
        print(json.dumps({"import_ms": figures}))


if __name__ == "__main__":
    main()
