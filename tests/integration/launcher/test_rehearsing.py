"""The rehearsal: run once when all ranks wait, watched, and never able to cost more than the warmup."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from tests.support.nodes import left_over, run_toys, stop_when_ready, toy_config, wait_until_gone

from warmseed.daemon.launcher.board import Board


def outcome_of(folder: Path, script: list[str] | None, **settings: object) -> tuple[Board, list[str]]:
    boards: list[Board] = []

    def ready(board: Board) -> None:
        boards.append(board)
        os.kill(os.getpid(), signal.SIGTERM)

    plan = {} if script is None else {"target-1": {"rehearse": script}}
    config = toy_config(folder, plan, **({"tensor_parallel_size": 2} | settings))
    assert run_toys(config, on_ready=ready) == 143
    phases = [phase for rank in boards[0].ranks.values() for phase in rank.phases]
    return boards[0], [phase.outcome for phase in phases if phase.name == "rehearsal"]


def test_engine_runs_once_for_all_ranks_and_groups(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    script = [sys.executable, "-c", f"open({str(mark)!r}, 'a').write('once ')"]
    board, outcomes = outcome_of(tmp_path, script, speculative_config='{"method":"eagle"}')
    assert outcomes == ["ok"] * 4
    assert mark.read_text() == "once "
    assert board.rehearsal_outcome == "ok"


def test_single_rank_rehearses_too(tmp_path: Path) -> None:
    boards: list[Board] = []

    def ready(board: Board) -> None:
        boards.append(board)
        os.kill(os.getpid(), signal.SIGTERM)

    plan = {"target-0": {"rehearse": ["true"]}}
    assert run_toys(toy_config(tmp_path, plan), on_ready=ready) == 143
    assert boards[0].rehearsal_outcome == "ok"


def test_nothing_missing_means_no_engine(tmp_path: Path) -> None:
    board, outcomes = outcome_of(tmp_path, None)
    assert outcomes == ["skipped"] * 2
    assert board.rehearsal_outcome is None


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (["false"], "exited with 1"),
        (["/nowhere/engine"], "exited with 1"),
        (["sh", "-c", "kill -SEGV $$"], "exited with 139"),
    ],
)
def test_failed_engine_costs_the_warmup_only(
    tmp_path: Path, script: list[str], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    board, outcomes = outcome_of(tmp_path, script)
    assert outcomes == ["failed"] * 2
    assert all(rank.serving for rank in board.ranks.values())
    assert words in caplog.text


def test_hanging_engine_is_killed_at_its_deadline_with_its_children(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = ["sh", "-c", "sleep 1000 & sleep 1000"]
    _, outcomes = outcome_of(tmp_path, script, rehearsal_deadline=0.5)
    assert outcomes == ["timeout"] * 2
    assert "killed after --rehearsal-deadline 0.5 s" in caplog.text
    assert not wait_until_gone(tmp_path)


def test_signal_during_the_rehearsal_ends_the_engine_too(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    # The engine itself sends the signal that a person would send while it runs.
    script = ["sh", "-c", f"echo $$ > {mark}; kill -TERM {os.getpid()}; sleep 1000"]
    config = toy_config(tmp_path, {"target-0": {"rehearse": script}})
    start = time.monotonic()
    assert run_toys(config, on_ready=stop_when_ready()) == 143
    assert mark.exists()
    assert time.monotonic() - start < 10
    assert not left_over(tmp_path)


def test_rank_that_dies_during_the_rehearsal_ends_everything(tmp_path: Path) -> None:
    plan = {
        "target-0": {"at": "load", "do": "pid"},
        "target-1": {"rehearse": ["sh", "-c", f"kill -KILL $(cat {tmp_path}/target-0.pid); sleep 1000"]},
    }
    assert run_toys(toy_config(tmp_path, plan, tensor_parallel_size=2)) == 137
    assert not left_over(tmp_path)


def test_no_rehearsal_is_respected(tmp_path: Path) -> None:
    board, outcomes = outcome_of(tmp_path, ["true"], rehearsal=False)
    assert outcomes == ["skipped"] * 2
    assert board.rehearsal_outcome is None
