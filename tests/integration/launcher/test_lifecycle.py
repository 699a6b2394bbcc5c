"""Ready when all serve; one rank's end is everyone's; the exit code says whose it was."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest
from tests.support.nodes import free_port, left_over, run_toys, start_toys, stop_when_ready, toy_config, wait_until_gone

from warmseed.daemon.launcher.board import Board
from warmseed.daemon.launcher.launcher import launch
from warmseed.daemon.settings.merge import resolve


def sockets_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.endswith(".sock"))


def test_ready_only_when_every_rank_of_every_group_serves(tmp_path: Path) -> None:
    seen: list[Board] = []

    def ready(board: Board) -> None:
        seen.append(board)
        assert sockets_in(tmp_path) == ["toy_0.sock", "toy_0_draft.sock", "toy_1.sock", "toy_1_draft.sock"]
        assert all(rank.serving and rank.serving.bound_at for rank in board.ranks.values())
        os.kill(os.getpid(), signal.SIGTERM)

    config = toy_config(tmp_path, tensor_parallel_size=2, speculative_config='{"method":"eagle3"}')
    assert run_toys(config, on_ready=ready) == 143
    assert len(seen) == 1
    assert set(seen[0].ranks) == {"target-0", "target-1", "draft-0", "draft-1"}
    assert sockets_in(tmp_path) == []


@pytest.mark.parametrize(
    ("action", "code"),
    [("exit 7", 7), ("exit 2", 2), ("exit 0", 1), ("kill SIGKILL", 137), ("kill SIGSEGV", 139), ("kill SIGUSR1", 138)],
)
@pytest.mark.parametrize("phase", ["environment", "load", "bind", "serving"])
def test_failing_rank_takes_the_group_down_with_its_code(tmp_path: Path, action: str, code: int, phase: str) -> None:
    config = toy_config(tmp_path, {"target-1": {"at": phase, "do": action}}, tensor_parallel_size=2)
    start = time.monotonic()
    assert run_toys(config) == code
    assert time.monotonic() - start < 12
    assert not left_over(tmp_path)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signal_ends_the_group_with_128_plus_its_number(tmp_path: Path, number: signal.Signals, code: int) -> None:
    assert run_toys(toy_config(tmp_path), on_ready=stop_when_ready(number)) == code
    assert sockets_in(tmp_path) == []


def test_last_words_of_the_failing_rank_reach_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="warmseed")
    config = toy_config(tmp_path, {"draft-0": {"at": "load", "do": "exit 9"}}, speculative_config='{"method":"mtp"}')
    assert run_toys(config) == 9
    assert "draft-0 exited with 9 during load: told to fail in load" in caplog.text


def test_one_line_a_phase_with_its_time_and_outcome(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="warmseed")
    run_toys(toy_config(tmp_path), on_ready=stop_when_ready())
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("phase ")]
    named = ["environment", "bundle", "load", "tables", "rehearsal", "release", "bind"]
    assert [line.split("phase=")[1].split()[0] for line in lines] == named
    assert all("outcome=" in line and "seconds=" in line for line in lines)


def test_rank_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warmseed.daemon.launcher.launcher.STOP_GRACE", 0.3)
    config = toy_config(tmp_path, {"target-0": {"at": "load", "do": "deaf"}}, tensor_parallel_size=2)
    start = time.monotonic()
    assert run_toys(config, on_ready=stop_when_ready()) == 143
    assert 0.3 < time.monotonic() - start < 10
    assert not left_over(tmp_path)
    assert sockets_in(tmp_path) == ["toy_0.sock"]  # stale, and the lock beside it is free


def test_stale_socket_does_not_hinder_the_next_launch(tmp_path: Path) -> None:
    assert run_toys(toy_config(tmp_path, {"target-0": {"at": "serving", "do": "kill SIGKILL"}})) == 137
    assert sockets_in(tmp_path) == ["toy_0.sock"]
    assert run_toys(toy_config(tmp_path), on_ready=stop_when_ready()) == 143


def test_second_signal_ends_the_patience(tmp_path: Path) -> None:
    def twice(_: Board) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)

    start = time.monotonic()
    config = toy_config(tmp_path, {"target-0": {"at": "load", "do": "deaf"}})
    assert run_toys(config, on_ready=twice) in (130, 143)
    assert time.monotonic() - start < 8


def test_ranks_that_never_get_ready_meet_the_deadline(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = toy_config(
        tmp_path, {"target-1": {"at": "load", "do": "hang"}}, tensor_parallel_size=2, start_deadline=1.0
    )
    assert run_toys(config) == 1
    assert "not ready within --start-deadline 1 s" in caplog.text
    assert "target-1 is starting (load)" in caplog.text


def test_second_launcher_on_the_node_fails_with_2_and_leaves_the_first_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def rival(board: Board) -> None:
        other = start_toys(toy_config(tmp_path))
        assert other.wait(timeout=30) == 2
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(board.ranks["target-0"].serving.socket)  # type: ignore[union-attr, arg-type]
        os.kill(os.getpid(), signal.SIGTERM)

    assert run_toys(toy_config(tmp_path), on_ready=rival) == 143


@pytest.mark.parametrize("setting", ["weight_cache_health_port", "weight_cache_master_port"])
def test_port_in_use_stops_the_start_before_any_rank(
    tmp_path: Path, setting: str, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run_toys(toy_config(tmp_path, **{setting: port})) == 2
    assert f"port {port}" in caplog.text or f"port {port} " in caplog.text or str(port) in caplog.text
    assert "Address already in use" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_contradiction_is_2_and_starts_nothing(tmp_path: Path) -> None:
    assert run_toys(toy_config(tmp_path, tensor_parallel_size=3, nnodes=2, master_addr="10.0.0.1")) == 2
    assert list(tmp_path.iterdir()) == []


def test_rank_program_that_is_missing_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert asyncio.run(launch(toy_config(tmp_path), rank_command=("/nowhere/rank",))) == 1
    assert "target-0 can't be started: No such file" in caplog.text


def test_garbage_on_the_status_pipe_is_counted_and_survived(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    boards: list[Board] = []

    def ready(board: Board) -> None:
        boards.append(board)
        os.kill(os.getpid(), signal.SIGTERM)

    assert run_toys(toy_config(tmp_path, {"target-0": {"at": "load", "do": "garbage"}}), on_ready=ready) == 143
    assert boards[0].ranks["target-0"].invalid_lines == 3
    assert caplog.text.count("status line is not a known message") == 1


def test_child_that_left_the_ranks_session_is_ended_too(tmp_path: Path) -> None:
    config = toy_config(tmp_path, {"target-0": {"at": "load", "do": "child"}})
    assert run_toys(config, on_ready=stop_when_ready()) == 143
    assert not wait_until_gone(tmp_path)


def test_secret_reaches_the_rank_but_no_command_line_or_environment(tmp_path: Path) -> None:
    secret = "0123456789abcdefghijklmnopqrstuvwxyz"
    config = resolve(
        {
            "model": "/m",
            "seed_listen_port": free_port(),
            "weight_cache_socket_dir": str(tmp_path),
            "engine_args": ["--toy", json.dumps({})],
        },
        environ={"WARMSEED_SEED_TOKEN": secret},
    )

    def look(board: Board) -> None:
        for rank in board.ranks.values():
            for name in ("cmdline", "environ"):
                assert secret.encode() not in Path(f"/proc/{rank.pid}/{name}").read_bytes()
        os.kill(os.getpid(), signal.SIGTERM)

    assert run_toys(config, on_ready=look) == 143
