"""An installed package as an installer that compiles nothing leaves it, and an interpreter that imports it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

__all__ = ["MODULE", "bare_package", "without_bytecode", "word"]

MODULE = "some_engine.deep.core"


def bare_package(site: Path) -> Path:
    """Install the package into the new folder `site`, which is to be put on the path."""
    (site / "some_engine" / "deep").mkdir(parents=True)
    for name in ("__init__.py", "deep/__init__.py"):
        (site / "some_engine" / name).touch()
    (site / "some_engine" / "deep" / "core.py").write_text("WORD = 'written'\n")
    (site / "some_engine-1.dist-info").mkdir()
    (site / "some_engine-1.dist-info" / "RECORD").write_text("some_engine/deep/core.py,sha256=one,17\n")
    return site


def word(site: Path, variables: Mapping[str, str]) -> str:
    """What the module says in an interpreter of an image that forbids bytecode."""
    environ = {**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1", **variables}
    command = [sys.executable, "-c", f"from {MODULE} import WORD; print(WORD)"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def without_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process be one that keeps no bytecode, and be it again when the test is over."""
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in ("PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE"):
        monkeypatch.setenv(name, "")
