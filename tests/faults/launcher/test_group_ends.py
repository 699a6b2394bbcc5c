"""However a launch ends, everything ends with it, and the code says why."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.support.nodes import left_over, run_toys, start_toys, toy_config, wait_until_gone
from tests.support.toy_rank import PHASES

from warmseed.daemon.launcher.board import Board


def first_line_with(process: subprocess.Popen[bytes], word: bytes) -> bytes:
    for line in process.stderr or ():
        if word in line:
            return line
    raise AssertionError(f"the launcher ended with {process.wait()} before it said {word!r}")


def test_killed_launcher_leaves_no_rank_behind(tmp_path: Path) -> None:
    launcher = start_toys(toy_config(tmp_path, tensor_parallel_size=3), stderr=subprocess.PIPE)
    with launcher:
        first_line_with(launcher, b" READY ")
        assert len(left_over(tmp_path)) == 5  # launcher, guardian, three ranks
        launcher.kill()
    assert not wait_until_gone(tmp_path)
    assert run_toys(toy_config(tmp_path), on_ready=lambda _: os.kill(os.getpid(), signal.SIGTERM)) == 143


def test_what_ranks_started_dies_with_a_killed_launcher_too(tmp_path: Path) -> None:
    plan = {"target-1": {"at": "load", "do": "child"}}
    launcher = start_toys(toy_config(tmp_path, plan, tensor_parallel_size=2), stderr=subprocess.PIPE)
    with launcher:
        first_line_with(launcher, b" READY ")
        assert len(left_over(tmp_path)) == 5  # launcher, guardian, two ranks, and the child in a session of its own
        launcher.kill()
    assert not wait_until_gone(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="a process namespace needs root")
def test_process_1_of_a_container_keeps_no_zombies(tmp_path: Path) -> None:
    """Orphans of a container become its process 1's children; a launcher that is process 1 reaps them."""
    plan = {"target-0": {"at": "load", "do": "orphan"}}
    launcher = start_toys(
        toy_config(tmp_path, plan),
        prefix=("unshare", "--pid", "--fork", "--kill-child", "--mount-proc"),
        stderr=subprocess.PIPE,
    )
    with launcher:
        first_line_with(launcher, b" READY ")
        orphan = int((tmp_path / "orphan.pid").read_text())
        inside = left_over(tmp_path)
        namespace = {os.readlink(f"/proc/{pid}/ns/pid") for pid in inside} - {os.readlink("/proc/self/ns/pid")}
        assert len(namespace) == 1
        deadline = time.monotonic() + 10
        while (found := _in_namespace(orphan, namespace)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not found
        launcher.kill()


def _in_namespace(pid: int, namespace: set[str]) -> list[str]:
    """Names of the processes in `namespace` whose pid there is `pid`."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and os.readlink(entry / "ns" / "pid") in namespace:
                status = (entry / "status").read_text()
                if any(line.split()[-1] == str(pid) for line in status.splitlines() if line.startswith("NSpid:")):
                    found.append(status.splitlines()[0])
    return found


def test_launcher_killed_at_any_moment_of_its_start_leaves_no_rank_behind(tmp_path: Path) -> None:
    chance = random.Random(7)
    for _ in range(6):
        launcher = start_toys(toy_config(tmp_path, {"pace": 0.02}, tensor_parallel_size=2), stderr=subprocess.DEVNULL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(chance.uniform(0.1, 0.7))
        launcher.kill()
        launcher.wait()
        assert not wait_until_gone(tmp_path)


def test_rehearsal_engine_dies_with_a_killed_launcher(tmp_path: Path) -> None:
    mark = tmp_path / "running"
    script = ["sh", "-c", f"touch {mark}; exec sleep 1000"]
    launcher = start_toys(toy_config(tmp_path, {"target-0": {"rehearse": script}}), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not mark.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    launcher.kill()
    launcher.wait()
    assert not wait_until_gone(tmp_path)


@pytest.mark.parametrize("phase", PHASES)
def test_sigterm_in_each_phase_is_143_and_leaves_nothing(tmp_path: Path, phase: str) -> None:
    plan = {"target-1": {"at": phase, "do": "hang"}}
    launcher = start_toys(toy_config(tmp_path, plan, tensor_parallel_size=2), stderr=subprocess.PIPE)
    with launcher:
        if phase != PHASES[0]:
            before = PHASES[PHASES.index(phase) - 1].encode()
            first_line_with(launcher, b"rank=target-1 phase=" + before)
        launcher.terminate()
        log = launcher.communicate(timeout=20)[1]
    # Before its handlers are in place the signal's default applies, which a shell reports as 143 too.
    assert launcher.returncode in (143, -signal.SIGTERM), log.decode()
    assert phase == PHASES[0] or launcher.returncode == 143
    assert not wait_until_gone(tmp_path)


def test_random_kills_end_the_group_with_the_right_code(tmp_path: Path) -> None:
    chance = random.Random(11)
    for _ in range(8):
        victim, phase = chance.randrange(3), chance.choice([*PHASES, "serving"])
        plan = {f"target-{victim}": {"at": phase, "do": "kill SIGKILL"}}
        start = time.monotonic()
        assert run_toys(toy_config(tmp_path, plan, tensor_parallel_size=3)) == 137
        assert time.monotonic() - start < 12
        assert not wait_until_gone(tmp_path)


def test_two_ranks_that_end_at_once_are_told_apart(tmp_path: Path) -> None:
    """A rank whose peer was killed often gives up within the same instant; the kill is the cause."""

    def kill_both(board: Board) -> None:
        # Both deaths are there before the launcher's loop looks again.
        follower, victim = board.ranks["target-0"], board.ranks["target-1"]
        os.kill(follower.pid or 0, signal.SIGUSR1)
        os.kill(victim.pid or 0, signal.SIGKILL)
        for rank in (follower, victim):
            os.waitid(os.P_PID, rank.pid or 0, os.WEXITED | os.WNOWAIT)

    assert run_toys(toy_config(tmp_path, tensor_parallel_size=2), on_ready=kill_both) == 137


@pytest.mark.parametrize("closed", ["1", "2", "0 1 2"])
def test_closed_standard_files_do_not_matter(tmp_path: Path, closed: str) -> None:
    closing = "; ".join(f"os.close({fd})" for fd in closed.split())
    config = toy_config(tmp_path, {"target-0": {"at": "serving", "do": "exit 6"}})
    shim = f"import os, sys; {closing}; os.execv(sys.argv[1], sys.argv[1:])"
    if "0" in closed.split():
        # The configuration comes over standard input, so close the file only once it has been read.
        shim = "import os, sys; os.close(1); os.close(2); os.execv(sys.argv[1], sys.argv[1:])"
    launcher = start_toys(config, prefix=(sys.executable, "-c", shim))
    assert launcher.wait(timeout=30) == 6
    assert not wait_until_gone(tmp_path)


@pytest.mark.parametrize("buffered", [True, False])
def test_reader_of_the_log_that_goes_away_does_not_end_the_daemons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buffered: bool
) -> None:
    if buffered:
        monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    else:
        monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    launcher = start_toys(
        toy_config(tmp_path, {"target-1": {"at": "serving", "do": "exit 6"}, "pace": 0.02}, tensor_parallel_size=2),
        stderr=subprocess.PIPE,
    )
    first_line_with(launcher, b"starting")
    assert launcher.stderr is not None
    launcher.stderr.close()
    assert launcher.wait(timeout=30) == 6


def test_stopped_rank_shows_as_unhealthy_and_still_can_be_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("warmseed.daemon.launcher.launcher.STOP_GRACE", 0.3)
    troubles: list[list[str]] = []

    def ready(board: Board) -> None:
        rank = board.ranks["target-0"]
        rank.heartbeat = time.monotonic()
        os.kill(rank.pid or 0, signal.SIGSTOP)
        troubles.append(board.troubles(time.monotonic() + 31))
        os.kill(os.getpid(), signal.SIGTERM)

    assert run_toys(toy_config(tmp_path), on_ready=ready) == 143
    assert troubles == [["target-0 has given no sign of life for 31 s"]]
    assert not left_over(tmp_path)


def test_wall_clock_plays_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that jumps by a day, either way, neither ends a start nor keeps one alive."""
    import itertools

    jumps = itertools.cycle([0.0, 86_400.0, -86_400.0])
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    config = toy_config(tmp_path, {"pace": 0.02}, start_deadline=30.0)
    assert run_toys(config, on_ready=lambda _: os.kill(os.getpid(), signal.SIGTERM)) == 143
    hanging = toy_config(tmp_path, {"target-0": {"at": "load", "do": "hang"}}, start_deadline=0.5)
    start = time.monotonic()
    assert run_toys(hanging) == 1
    assert time.monotonic() - start < 8


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    config = toy_config(tmp_path, {"target-0": {"at": "load", "do": "exit 3"}}, tensor_parallel_size=3)
    assert run_toys(config) == 3
    before = set(os.listdir("/proc/self/fd"))
    assert run_toys(config) == 3
    assert len(os.listdir("/proc/self/fd")) <= len(before)


def test_ports_are_free_again_afterwards(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    config = toy_config(tmp_path, weight_cache_master_port=port, weight_cache_health_port=port - 1)
    for _ in range(2):
        assert run_toys(config, on_ready=lambda _: os.kill(os.getpid(), signal.SIGTERM)) == 143
