"""Real process groups: the ranks that a launcher places meet over gloo, on one node and on two."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.nodes import free_port, run_toys, start_toys, toy_config

from warmseed.daemon.launcher.board import Board

PLAN = {"gloo": True}


def groups_of(folder: Path, **settings: object) -> dict[str, str]:
    """What each rank saw of its group, as ``global/dp/pp/tp`` of every member."""
    seen: dict[str, str] = {}

    def ready(board: Board) -> None:
        for rank in board.ranks.values():
            seen[rank.name] = str(rank.phases[0].detail["group"])
        os.kill(os.getpid(), signal.SIGTERM)

    assert run_toys(toy_config(folder, PLAN, **settings), on_ready=ready) == 143
    return seen


def test_target_and_draft_form_their_own_groups_at_free_ports(tmp_path: Path) -> None:
    seen = groups_of(tmp_path, tensor_parallel_size=2, speculative_config='{"method":"eagle3"}')
    assert seen == dict.fromkeys(("target-0", "target-1", "draft-0", "draft-1"), "0/0/0/0;1/0/0/1")


def test_data_and_pipeline_ranks_are_laid_out_as_planned(tmp_path: Path) -> None:
    seen = groups_of(tmp_path, pipeline_parallel_size=2, data_parallel_size=2, weight_cache_master_port=free_port())
    assert set(seen.values()) == {"0/0/0/0;1/0/1/0;2/1/0/0;3/1/1/0"}
    assert len(seen) == 4


def sh(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=20)


@pytest.fixture
def nodes() -> Iterator[tuple[str, str]]:
    """Two network namespaces joined by a cable: 10.91.7.1 and 10.91.7.2."""
    names = f"ws{os.getpid()}a", f"ws{os.getpid()}b"
    try:
        for name in names:
            sh("ip", "netns", "add", name)
            sh("ip", "-n", name, "link", "set", "lo", "up")
        sh("ip", "link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for number, name in enumerate(names, 1):
            sh("ip", "-n", name, "addr", "add", f"10.91.7.{number}/24", "dev", "eth0")
            sh("ip", "-n", name, "link", "set", "eth0", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=20)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")


@needs_root
@pytest.mark.parametrize(
    "flags",
    [
        {"tensor_parallel_size": 2, "nnodes": 2, "node_rank": None, "master_addr": "10.91.7.1"},
        {
            "data_parallel_size": 2,
            "data_parallel_size_local": 1,
            "data_parallel_start_rank": None,
            "data_parallel_address": "10.91.7.1",
        },
    ],
    ids=["tensor parallel across nodes", "one copy a node"],
)
def test_two_nodes_form_one_group(tmp_path: Path, nodes: tuple[str, str], flags: dict[str, object]) -> None:
    launchers: list[subprocess.Popen[bytes]] = []
    # The second node comes first: its ranks wait for the master, as nodes of a fleet boot in any order.
    for number in (1, 0):
        folder = tmp_path / str(number)
        folder.mkdir()
        mine = {key: number if value is None else value for key, value in flags.items()}
        config = toy_config(folder, PLAN, weight_cache_master_port=29600, start_deadline=60.0, **mine)
        launchers.append(
            start_toys(
                config,
                prefix=("ip", "netns", "exec", nodes[number], "env", "GLOO_SOCKET_IFNAME=eth0"),
                stderr=subprocess.PIPE,
            )
        )
    logs = []
    for launcher in launchers:
        lines = []
        for line in launcher.stderr or ():
            lines.append(line.decode())
            if " READY " in lines[-1]:
                break
        logs.append("".join(lines))
    for launcher in launchers:
        launcher.send_signal(signal.SIGTERM)
        logs.append(launcher.communicate(timeout=30)[1].decode())
    assert [launcher.returncode for launcher in launchers] == [143, 143], "".join(logs)
    whole = "0/0/0/0;1/0/0/1" if "nnodes" in flags else "0/0/0/0;1/1/0/0"
    assert f"group={whole}" in logs[0]
    assert f"group={whole}" in logs[1]


@needs_root
def test_unreachable_master_ends_with_the_rank_that_could_not_reach_it(tmp_path: Path, nodes: tuple[str, str]) -> None:
    config = toy_config(
        tmp_path,
        PLAN,
        tensor_parallel_size=2,
        nnodes=2,
        node_rank=1,
        master_addr="10.91.7.1",
        weight_cache_master_port=29600,
        start_deadline=3.0,
    )
    launcher = start_toys(config, prefix=("ip", "netns", "exec", nodes[1]), stderr=subprocess.PIPE)
    log = launcher.communicate(timeout=30)[1].decode()
    assert launcher.returncode == 1
    assert "not ready within --start-deadline 3 s: target-1 is starting (environment)" in log
