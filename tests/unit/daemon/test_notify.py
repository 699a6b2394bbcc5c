"""systemd hears of readiness, of the end, and of life, in its own protocol."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.nodes import run_toys, stop_when_ready, toy_config

from warmseed.daemon.launcher.notify import Notifier


@contextmanager
def manager(address: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("\0" + address[1:] if address.startswith("@") else address)
        receiver.settimeout(5)
        yield receiver


def received(receiver: socket.socket) -> list[str]:
    receiver.setblocking(False)
    lines: list[str] = []
    while True:
        try:
            lines += receiver.recv(4096).decode().splitlines()
        except BlockingIOError:
            return lines


@pytest.mark.parametrize("abstract", [False, True])
def test_readiness_status_and_stop_are_announced(tmp_path: Path, abstract: bool) -> None:
    address = f"@warmseed-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    folder = tmp_path / "sockets"
    folder.mkdir()
    with manager(address) as receiver:
        notifier = Notifier({"NOTIFY_SOCKET": address})
        assert run_toys(toy_config(folder), on_ready=stop_when_ready(), notifier=notifier) == 143
        lines = received(receiver)
    assert lines.count("READY=1") == 1
    assert lines.index("STATUS=starting: target-0 load") < lines.index("READY=1") < lines.index("STOPPING=1")


def test_group_that_never_served_is_never_announced_ready(tmp_path: Path) -> None:
    folder = tmp_path / "sockets"
    folder.mkdir()
    with manager(str(tmp_path / "notify")) as receiver:
        notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify")})
        config = toy_config(folder, {"target-0": {"at": "bind", "do": "exit 4"}})
        assert run_toys(config, notifier=notifier) == 4
        assert "READY=1" not in received(receiver)


def test_watchdog_is_fed_several_times_an_interval(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")

    async def feed(notifier: Notifier) -> None:
        try:
            async with asyncio.timeout(0.5):
                await notifier.watchdog()
        except TimeoutError:
            return

    with manager(path) as receiver:
        asyncio.run(feed(Notifier({"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "150000"})))
        assert 2 <= received(receiver).count("WATCHDOG=1") <= 11


@pytest.mark.parametrize(
    "environment",
    [{}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "x"}, {"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"}],
)
def test_watchdog_of_nobody_or_somebody_else_is_left_alone(environment: dict[str, str]) -> None:
    assert Notifier(environment).watchdog_interval is None


def test_manager_that_is_gone_is_no_error(tmp_path: Path) -> None:
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "absent")}).send("READY=1")
    Notifier({"NOTIFY_SOCKET": "nonsense"}).send("READY=1")
    Notifier({}).send("READY=1")


def test_ranks_do_not_inherit_the_managers_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from warmseed.daemon.launcher.board import Board

    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "absent"))
    monkeypatch.setenv("WATCHDOG_USEC", "100000000")
    seen: list[bytes] = []

    def look(board: Board) -> None:
        seen.extend(Path(f"/proc/{rank.pid}/environ").read_bytes() for rank in board.ranks.values())
        os.kill(os.getpid(), signal.SIGTERM)

    assert run_toys(toy_config(tmp_path), on_ready=look) == 143
    assert seen
    assert all(b"NOTIFY_SOCKET" not in text and b"WATCHDOG" not in text for text in seen)
