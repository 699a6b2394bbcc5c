"""Asking FlashInfer in a child process: what it may answer, and how long that is believed."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path

import pytest
from tests.support.tables import H200

from warmseed.seeding.kinds.autotune.collect import collect


def interpreter(folder: Path, body: str) -> str:
    """A stand-in for the engine's Python that counts its runs and does `body`."""
    script = folder / "bin" / "python"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(f"#!/bin/sh\necho run >> {folder}/runs\n{body}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


def answering(folder: Path, **metadata: str) -> str:
    answer = json.dumps({"metadata": {**H200, **metadata}, "arch": "90a"})
    return interpreter(folder, f"cat <<'END'\n{answer}\nEND")


def runs(folder: Path) -> int:
    return len((folder / "runs").read_text().splitlines())


def test_an_answer_is_remembered_for_this_boot(tmp_path: Path) -> None:
    python = answering(tmp_path)
    first = collect(tmp_path / "state", python=python)
    assert (first.metadata, first.arch, first.complete) == (H200, "90a", True)
    assert collect(tmp_path / "state", python=python) == first
    assert runs(tmp_path) == 1


def test_another_device_or_library_path_is_another_question(tmp_path: Path) -> None:
    python = answering(tmp_path)
    for environ in ({}, {"LD_LIBRARY_PATH": "/opt/cublas"}, {"CUDA_VISIBLE_DEVICES": "3"}):
        collect(tmp_path / "state", python=python, environ={"PATH": os.environ["PATH"], **environ})
    assert runs(tmp_path) == 3


def test_a_package_installed_meanwhile_is_seen(tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    python = answering(tmp_path)
    collect(tmp_path / "state", python=python)
    os.utime(packages, ns=(1, 1))
    collect(tmp_path / "state", python=python)
    assert runs(tmp_path) == 2


def test_an_answer_with_unknown_fields_is_used_once_and_not_remembered(tmp_path: Path) -> None:
    python = answering(tmp_path, gpu="unknown")
    for _ in range(2):
        found = collect(tmp_path / "state", python=python)
        assert found.metadata["gpu"] == "unknown"
        assert not found.complete
    assert runs(tmp_path) == 2


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("echo 'ImportError: no flashinfer' >&2; exit 1", "no flashinfer"),
        ("kill -9 $$", "ended with -9"),
        ("echo not json", "does not parse"),
        ("head -c 200000 /dev/zero", "ended with 0"),
        ('echo \'{"metadata": {"gpu": 7}}\'', "does not parse"),
        ("exit 0", "does not parse"),
    ],
)
def test_a_child_that_fails_leaves_everything_unknown(tmp_path: Path, body: str, says: str) -> None:
    found = collect(tmp_path / "state", python=interpreter(tmp_path, body))
    assert set(found.metadata.values()) == {"unknown"}
    assert says in found.reason


def test_a_child_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    python = interpreter(tmp_path, f"sleep 300 & echo $! > {tmp_path}/grandchild; wait")
    start = time.monotonic()
    found = collect(tmp_path / "state", python=python, timeout=0.5)
    assert time.monotonic() - start < 10
    assert "no answer" in found.reason
    grandchild = Path(f"/proc/{(tmp_path / 'grandchild').read_text().strip()}/stat")
    deadline = time.monotonic() + 10
    while grandchild.exists() and grandchild.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        os.sched_yield()


def test_an_interpreter_that_is_not_there_is_no_exception(tmp_path: Path) -> None:
    assert "can't be run" in collect(tmp_path / "state", python=str(tmp_path / "none")).reason


def test_a_state_folder_that_cannot_be_written_costs_only_the_memory(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    assert collect(tmp_path / "state", python=answering(tmp_path)).complete
