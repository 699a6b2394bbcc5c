"""Groups of real processes: all adopt one run or none does, whoever dies, stops, comes late or has another table."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

RANK = Path(__file__).parents[1] / "support" / "gang_rank.py"
A, B = {"run": "run-a", "issued_at": 100}, {"run": "run-b", "issued_at": 200}


class Gang:
    """The processes of one group."""

    def __init__(self, folder: Path, world: int, *, timeout: float = 20.0) -> None:
        self.folder, self.world, self.timeout = folder, world, timeout
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.children: dict[int, subprocess.Popen[str]] = {}

    def start(self, rank: int, runs: list[dict[str, Any]], **settings: Any) -> None:
        """One rank that offers `runs`."""
        values = {"rank": rank, "world": self.world, "port": self.port, "timeout": self.timeout, "runs": runs}
        values |= {"file": str(self.file(rank)), **settings}
        self.children[rank] = subprocess.Popen(
            [sys.executable, str(RANK), json.dumps(values)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def file(self, rank: int) -> Path:
        return self.folder / f"table-{rank}"

    def answer(self, rank: int, within: float = 60.0) -> dict[str, Any]:
        """What a rank said of the decision."""
        stdout = self.children[rank].stdout
        assert stdout is not None
        ready, _, _ = select.select([stdout], [], [], within)
        assert ready, f"rank {rank} said nothing within {within} s"
        line = stdout.readline()
        assert line, f"rank {rank} ended without an answer: {self.children[rank].wait(5)}"
        found: dict[str, Any] = json.loads(line)
        return found

    def installed(self) -> dict[int, str]:
        """What every rank has in place."""
        return {rank: self.file(rank).read_text() for rank in range(self.world) if self.file(rank).exists()}

    def end(self) -> None:
        for child in self.children.values():
            if child.stdin is not None:
                child.stdin.close()
            child.send_signal(signal.SIGCONT)
        for child in self.children.values():
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            if child.stdout is not None:
                child.stdout.close()


@pytest.fixture
def gang(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Gang]:
    world, timeout = getattr(request, "param", (4, 20.0))
    gang = Gang(tmp_path, world, timeout=timeout)
    yield gang
    gang.end()


@pytest.mark.parametrize("gang", [(2, 60.0), (8, 60.0), (16, 60.0)], indirect=True)
def test_all_ranks_adopt_the_newest_run_that_all_have(gang: Gang) -> None:
    for rank in range(gang.world):
        gang.start(rank, [A, B] if rank % 2 else [B, A, {"run": "only-here", "issued_at": 999}])
    answers = [gang.answer(rank) for rank in range(gang.world)]
    assert {(a["outcome"], a["run"]) for a in answers} == {("adopted", "run-b")}
    assert gang.installed() == dict.fromkeys(range(gang.world), "run-b")


@pytest.mark.parametrize("odd", [0, 3])
def test_a_rank_with_another_table_leaves_all_to_tune(gang: Gang, odd: int) -> None:
    for rank in range(4):
        gang.start(rank, [{"run": "run-z", "issued_at": 300}] if rank == odd else [A])
    answers = [gang.answer(rank) for rank in range(4)]
    assert {a["outcome"] for a in answers} == {"local"}
    assert all(a["log"] == ["stand_down"] for a in answers)
    assert gang.installed() == {}


@pytest.mark.parametrize("odd", [0, 2])
def test_a_rank_without_a_table_leaves_all_to_tune_and_is_named(gang: Gang, odd: int) -> None:
    for rank in range(4):
        gang.start(rank, [] if rank == odd else [A], **({"offers": "fail"} if rank == odd else {}))
    answers = [gang.answer(rank) for rank in range(4)]
    assert {a["outcome"] for a in answers} == {"local"}
    assert all(f"rank {odd} has nothing to adopt" in a["reason"] for a in answers)
    assert gang.installed() == {}


@pytest.mark.parametrize("odd", [0, 3])
def test_a_rank_that_cannot_install_makes_all_take_the_run_back(gang: Gang, odd: int) -> None:
    for rank in range(4):
        gang.start(rank, [A], **({"take": "fail"} if rank == odd else {}))
    answers = [gang.answer(rank) for rank in range(4)]
    assert {a["outcome"] for a in answers} == {"local"}
    assert all(f"rank {odd}: the test has rank {odd} fail" in a["reason"] for a in answers)
    assert gang.installed() == {}


@pytest.mark.parametrize("step", ["start", "offers", "take", "taken"])
@pytest.mark.parametrize("odd", [0, 2])
def test_a_killed_rank_leaves_no_mixture(gang: Gang, odd: int, step: str) -> None:
    gang.timeout = 5.0
    for rank in range(4):
        gang.start(rank, [A], **({step: "kill"} if rank == odd else {}))
    assert gang.children[odd].wait(60) == -signal.SIGKILL
    answers = {rank: gang.answer(rank) for rank in range(4) if rank != odd}
    outcomes = {a["outcome"] for a in answers.values()}
    # Without rank 0 nobody can know what the others heard: then the start ends, and is begun again.
    assert outcomes <= ({"local", "broken"} if odd == 0 else {"local"})
    assert "adopted" not in outcomes
    assert set(gang.installed()) <= {odd}  # only what the killed rank itself had no time to take back


@pytest.mark.parametrize("step", ["offers", "taken"])
@pytest.mark.parametrize("odd", [0, 2])
def test_a_rank_that_stops_costs_the_others_their_deadline_and_then_learns_how_it_ended(
    gang: Gang, odd: int, step: str
) -> None:
    gang.timeout = 2.0
    for rank in range(4):
        gang.start(rank, [A], **({step: "stop"} if rank == odd else {}))
    until = time.monotonic() + 60
    while not Path(f"{gang.file(odd)}.stopped").exists():
        assert time.monotonic() < until
        select.select([], [], [], 0.02)
    others = {rank: gang.answer(rank) for rank in range(4) if rank != odd}
    assert {a["outcome"] for a in others.values()} <= ({"local", "broken"} if odd == 0 else {"local"})
    os.kill(gang.children[odd].pid, signal.SIGCONT)
    late = gang.answer(odd)
    assert late["outcome"] in ("local", "broken")
    assert gang.installed() == {}


def test_a_late_rank_learns_at_once_that_the_group_went_on_without_it(gang: Gang) -> None:
    gang.timeout = 2.0
    for rank in range(3):
        gang.start(rank, [A])
    answers = [gang.answer(rank) for rank in range(3)]
    assert {a["outcome"] for a in answers} == {"local"}
    assert "rank 3 did not speak" in answers[0]["reason"]
    gang.start(3, [A])
    late = gang.answer(3)
    assert late["outcome"] == "local"
    assert gang.installed() == {}


def test_a_stranger_without_the_secret_neither_joins_nor_disturbs(gang: Gang) -> None:
    for rank in range(4):
        gang.start(rank, [A])
    strangers = []
    for rank in (1, 2, 3):
        gang_of_strangers = Gang(gang.folder / f"stranger{rank}", 4, timeout=1.0)
        gang_of_strangers.port = gang.port
        gang_of_strangers.start(rank, [{"run": "evil", "issued_at": 999}], secret="wrong")
        strangers.append(gang_of_strangers)
    try:
        answers = [gang.answer(rank) for rank in range(4)]
    finally:
        for stranger in strangers:
            stranger.end()
    assert {(a["outcome"], a["run"]) for a in answers} == {("adopted", "run-a")}


def test_silent_connections_do_not_hold_the_group_up(gang: Gang) -> None:
    for rank in range(4):
        gang.start(rank, [A])
    silent: list[socket.socket] = []
    until = time.monotonic() + 30
    while len(silent) < 30 and time.monotonic() < until:
        try:
            silent.append(socket.create_connection(("127.0.0.1", gang.port), timeout=5))
        except OSError:
            select.select([], [], [], 0.02)
    try:
        assert {gang.answer(rank)["outcome"] for rank in range(4)} == {"adopted"}
    finally:
        for connection in silent:
            connection.close()
