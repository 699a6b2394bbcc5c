"""`make demo` itself, on the real model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_demo_tells_its_story_to_the_end(tmp_path: Path) -> None:
    figures = tmp_path / "demo.json"
    # Its figures are for a quiet machine; here only the story counts.
    done = subprocess.run(
        [sys.executable, "bench/demo.py"],
        cwd=ROOT,
        env=os.environ | {"DEMO_JSON": str(figures), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=2900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = json.loads(figures.read_text())
    assert found["same_tokens"] is True
    assert found["used"] == {"store": True, "d2d": True}
    assert set(found["seconds"]) == {"off", "cold", "restart", "store", "d2d"}
    assert found["attach_ms"] > 0
    assert found["private_growth"] >= 0
