"""Real daemons and real engines, each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from warmseed.daemon.weights.client import get_memory
from warmseed.daemon.weights.socket import SocketAddress

SUPPORT = Path(__file__).parents[1] / "support"


@contextmanager
def process(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The helper, running; killed at the end if it still does."""
    child = subprocess.Popen(
        [sys.executable, str(SUPPORT / script), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate(timeout=30)


def line(child: subprocess.Popen[str]) -> dict[str, object]:
    assert child.stdout is not None
    text = child.stdout.readline()
    assert text, "the helper ended without a word"
    return json.loads(text)


def finish(child: subprocess.Popen[str]) -> dict[str, object]:
    out, _ = child.communicate("", timeout=30)
    return json.loads(out.splitlines()[-1])


def descriptors(pid: int) -> list[str]:
    """What a process has open, sorted; inode numbers of sockets left out."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(entry).partition("[")[0])
    return sorted(found)


def wait_until(true: Callable[[], bool], what: str) -> None:
    """Give a daemon the moment it needs to notice that somebody is gone."""
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


@pytest.fixture
def socket(tmp_path: Path) -> str:
    tmp_path.chmod(0o700)
    return str(tmp_path / "w.sock")


def test_an_engine_sees_the_daemons_tensors_bit_for_bit_with_ties_strides_and_buffers(socket: str) -> None:
    with process("weights_daemon.py", socket) as daemon:
        ready = line(daemon)
        with process("weights_engine.py", socket, json.dumps({"report": True})) as engine:
            seen = line(engine)
            assert seen["digests"] == ready["digests"]
            assert seen["tied"]
            assert seen["shared"]
            assert seen["materialised"] == []
            finish(engine)
        assert finish(daemon)["reports"] == 1


def test_an_engines_in_place_write_stays_its_own(socket: str) -> None:
    with process("weights_daemon.py", socket) as daemon:
        ready = line(daemon)
        with (
            process("weights_engine.py", socket, json.dumps({"scribble": True})) as vandal,
            process("weights_engine.py", socket) as witness,
        ):
            line(vandal)
            assert line(witness)["digests"] == ready["digests"]
        with process("weights_engine.py", socket) as later:
            assert line(later)["digests"] == ready["digests"]
        assert finish(daemon)["digests_now"] == ready["digests"]


def test_engines_killed_hard_leave_nothing_in_the_daemon(socket: str) -> None:
    address = SocketAddress(Path(socket))
    with process("weights_daemon.py", socket) as daemon:
        ready = line(daemon)
        before = descriptors(daemon.pid)
        memory = get_memory(address)
        for _ in range(5):
            with process("weights_engine.py", socket) as engine:
                assert line(engine)["digests"] == ready["digests"]
                assert get_memory(address).leases == 1
                engine.send_signal(signal.SIGKILL)
                engine.wait(10)
            wait_until(lambda: get_memory(address).leases == 0, "a dead engine's lease was not ended")
        wait_until(lambda: descriptors(daemon.pid) == before, "the daemon keeps descriptors of dead engines")
        assert get_memory(address) == memory


def test_a_living_engine_outlasts_its_daemon_notices_and_a_new_daemon_takes_the_address(socket: str) -> None:
    with process("weights_daemon.py", socket) as daemon:
        line(daemon)
        with process("weights_engine.py", socket, json.dumps({"wait_gone": True})) as engine:
            line(engine)
            daemon.kill()  # leaves a stale socket behind
            daemon.wait(10)
            with process("weights_daemon.py", socket, "1") as successor:
                ready = line(successor)
                with process("weights_engine.py", socket) as fresh:
                    assert line(fresh)["digests"] == ready["digests"]
            assert finish(engine)["daemon_gone"] is True


def test_copy_mode_takes_the_weights_along_and_later_engines_are_told_they_are_released(socket: str) -> None:
    with process("weights_daemon.py", socket) as daemon:
        ready = line(daemon)
        with process("weights_engine.py", socket, json.dumps({"mode": "copy"})) as engine:
            seen = line(engine)
            assert seen["digests"] == ready["digests"]
            assert seen["released"] == "released"
            with process("weights_engine.py", socket) as late:
                assert line(late)["reason"] == "released"


def test_copy_mode_beside_a_mapping_engine_does_not_free_what_that_one_maps(socket: str) -> None:
    with process("weights_daemon.py", socket) as daemon:
        ready = line(daemon)
        with process("weights_engine.py", socket) as mapping:
            line(mapping)
            with process("weights_engine.py", socket, json.dumps({"mode": "copy"})) as copying:
                assert line(copying)["released"] == "in_use"
        with process("weights_engine.py", socket) as again:
            assert line(again)["digests"] == ready["digests"]


def test_without_fallback_an_engine_waits_for_a_daemon_that_is_still_starting(socket: str) -> None:
    with (
        process("weights_engine.py", socket, json.dumps({"fallback": False})) as engine,
        process("weights_daemon.py", socket) as daemon,
    ):
        ready = line(daemon)
        assert line(engine)["digests"] == ready["digests"]


def test_without_fallback_a_mismatch_fails_at_once_and_names_the_fields(socket: str) -> None:
    with process("weights_daemon.py", socket) as daemon:
        line(daemon)
        options = {"fallback": False, "fingerprint": {"dtype": "float16", "tp_size": 2}}
        with process("weights_engine.py", socket, json.dumps(options)) as engine:
            answer = line(engine)
            assert answer["reason"] == "mismatch"
            assert answer["fields"] == ["tp_size", "dtype"]


def test_without_a_daemon_an_engine_falls_back_at_once(socket: str) -> None:
    with process("weights_engine.py", socket) as engine:
        assert line(engine)["reason"] == "absent"
