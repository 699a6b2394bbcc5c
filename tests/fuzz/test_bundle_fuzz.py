"""The kept corpus through every parser of bundles, and a short run from it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.bundle_rules import PARSERS, one_input

CORPUS = Path(__file__).parent / "corpus" / "bundle"


@pytest.mark.parametrize("seed", sorted(CORPUS.iterdir()), ids=lambda path: path.name)
def test_a_kept_input_is_refused_or_canonical(seed: Path) -> None:
    data = seed.read_bytes()
    assert one_input(data) == seed.name.startswith("good-")
    for number in range(len(PARSERS)):
        one_input(bytes([number]) + data[1:])


def test_every_cut_of_a_good_input_is_refused_or_canonical() -> None:
    for seed in CORPUS.glob("good-*"):
        data = seed.read_bytes()
        for end in range(0, len(data), max(1, len(data) // 200)):
            one_input(data[:end])


@pytest.mark.slow
def test_a_short_run_finds_nothing(tmp_path: Path) -> None:
    repository = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.fuzz.fuzz_bundle"),
            *(str(tmp_path), str(CORPUS)),  # new inputs go to the first, the corpus stays as it is
            *("-runs=20000", "-max_len=16384", "-timeout=5", f"-artifact_prefix={tmp_path}/"),
        ],
        cwd=repository,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(repository), *sys.path])},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
