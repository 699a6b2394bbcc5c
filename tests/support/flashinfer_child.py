"""Runs FlashInfer's own code in a child process, with the environment of an H200 where a test says so.

FlashInfer's import creates folders and configures loggers, and its tuner is one object a process; a child a
question keeps tests independent of each other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_PRELUDE = """
import json, os, sys
import torch, flashinfer
from flashinfer import autotune, autotune_v2
from flashinfer.autotuner import AutoTuner, autotuner
import flashinfer.autotuner as package
question = json.loads(sys.argv[1])
if question["metadata"]:
    see = lambda: dict(question["metadata"])
    autotuner._collect_metadata = see
    package._collect_metadata = see
tuner = AutoTuner.get()
answer = {}
"""


def ask_flashinfer(program: str, workspace: Path, *, metadata: dict[str, str] | None = None, **values: Any) -> Any:
    """What `program` left in ``answer``; it finds `values` in ``question``, ``tuner`` and FlashInfer's names."""
    question = json.dumps({"metadata": metadata, **values})
    child = subprocess.run(
        [sys.executable, "-c", _PRELUDE + program + "\nprint(json.dumps(answer))", question],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "FLASHINFER_WORKSPACE_BASE": str(workspace), "FLASHINFER_LOGGING_LEVEL": "info"},
    )
    if child.returncode != 0:
        raise AssertionError(f"FlashInfer's child failed:\n{child.stderr[-3000:]}")
    return json.loads(child.stdout.splitlines()[-1])
