"""The main job end to end on a tiny real model: publish, adopt from a store, adopt from a peer, survive kills."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.nodes import free_port
from tests.support.real_nodes import PATIENCE, RealNode, ask, new_token, refused
from tests.support.tiny_model import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass
class Fleet:
    """Node A, which has compiled and published, and what other nodes need to know of it."""

    folder: Path
    model: Path
    store: Path
    token: Path
    seed_port: int
    a: RealNode
    tokens: list[int]  # the answer of A's first engine

    def node(self, name: str, *extra: str) -> RealNode:
        return RealNode(self.folder / name, self.model, extra)

    @property
    def from_store(self) -> tuple[str, ...]:
        return "--warmup-cache-stores", f"file:{self.store}", "--seed-token-file", str(self.token)

    @property
    def from_peer(self) -> tuple[str, ...]:
        source = "--seed-source-host", "127.0.0.1", "--seed-source-port", str(self.seed_port)
        return "--seed-token-file", str(self.token), *source


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    folder.chmod(0o700)
    model, token, store, port = tiny_model(folder / "model"), new_token(folder), folder / "store", free_port()
    store.mkdir()
    a = RealNode(
        folder / "a",
        model,
        (
            *("--warmup-cache-stores", f"file:{store}", "--seed-token-file", str(token)),
            *("--seed-listen-host", "127.0.0.1", "--seed-listen-port", str(port)),
        ),
    )
    try:
        a.start()
        until(lambda: any(store.rglob("head")), "A published nothing")
        yield Fleet(folder, model, store, token, port, a, a.ask()["tokens"])
    finally:
        a.end()


def until(true: object, what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.fixture
def started(fleet: Fleet) -> Iterator[list[RealNode]]:
    """Nodes that a test starts; whatever is left of them is killed."""
    nodes: list[RealNode] = []
    yield nodes
    for node in nodes:
        node.end()


def test_a_node_with_the_store_alone_uses_what_another_compiled(fleet: Fleet, started: list[RealNode]) -> None:
    b = fleet.node("b", *fleet.from_store)
    started.append(b)
    b.start()
    answer = b.ask()
    assert answer["source"] == "ipc_cache"
    assert answer["tokens"] == fleet.tokens
    assert [(verdict["kind"], verdict["used"]) for verdict in b.used()] == [("compile_cache", True)]
    assert answer["evidence"]["counters"].get("inductor_fxgraph_cache_miss", 0) == 0
    assert "outcome=hit" in b.said()
    assert "rehearsal outcome=skipped" in b.said().replace("phase=rehearsal outcome", "rehearsal outcome")


def test_a_node_with_a_peer_alone_uses_what_it_compiled_and_keeps_it(fleet: Fleet, started: list[RealNode]) -> None:
    c = fleet.node("c", *fleet.from_peer)
    started.append(c)
    c.start()
    answer = c.ask()
    assert answer["tokens"] == fleet.tokens
    assert [verdict["used"] for verdict in c.used()] == [True]
    assert f'origin="peer 127.0.0.1:{fleet.seed_port}"' in c.said()
    assert c.stop() == 143
    # Its next start needs nobody: what it adopted lies on its own disk.
    c.extra = ("--seed-token-file", str(fleet.token), "--warmup-cache-stores", f"file:{fleet.folder}")
    c.log.unlink()
    c.start()
    assert "phase=adopt-compile_cache outcome=present" in c.said()
    assert c.ask()["tokens"] == fleet.tokens


def test_a_killed_engine_costs_nothing_but_its_restart(fleet: Fleet) -> None:
    first = fleet.a.engine()
    assert ask(first)["source"] == "ipc_cache"
    first.send_signal(signal.SIGKILL)
    first.wait(PATIENCE)
    again = fleet.a.ask()
    assert again["source"] == "ipc_cache"
    assert again["tokens"] == fleet.tokens
    assert again["evidence"]["counters"].get("inductor_fxgraph_cache_hit", 0) >= 1


def test_a_stopped_daemon_leaves_nothing_and_starts_again_from_its_own_disk(fleet: Fleet) -> None:
    a = fleet.a
    assert a.stop() == 143
    until(lambda: not a.running(), "processes are left")
    assert a.unfinished() == []
    a.log.unlink()
    a.start()
    adopted = [line for line in a.said().splitlines() if "phase=adopt-compile_cache" in line]
    assert "outcome=hit" in adopted[0] or "outcome=present" in adopted[0]
    assert "published" not in a.said()
    answer = a.ask()
    assert answer["tokens"] == fleet.tokens
    assert answer["evidence"]["counters"].get("inductor_fxgraph_cache_miss", 0) == 0


def test_other_weights_of_the_same_shapes_are_never_mapped(fleet: Fleet, tmp_path: Path) -> None:
    retrained = tiny_model(tmp_path / "retrained", seed=1)
    answer = fleet.a.ask(model=retrained)
    assert answer["source"] == "disk"
    assert answer["fallback"] == "mismatch"
    assert answer["fields"] == ["checkpoint"]


def test_a_second_daemon_for_the_same_device_is_refused_and_the_first_serves_on(fleet: Fleet) -> None:
    error = refused(fleet.a.preload(), fleet.a.environ)
    assert "belongs to another daemon (pid " in error
    assert fleet.a.ask()["source"] == "ipc_cache"


def test_without_fallback_an_engine_says_what_differs_and_fails(fleet: Fleet, tmp_path: Path) -> None:
    retrained = tiny_model(tmp_path / "retrained", seed=2)
    engine = fleet.a.engine("--no-fallback", model=retrained)
    assert engine.wait(PATIENCE) == 1
    assert "checkpoint" in fleet.a.engine_said().splitlines()[-1]


def test_a_daemon_killed_outright_takes_its_ranks_with_it_and_can_be_started_again(
    fleet: Fleet, started: list[RealNode]
) -> None:
    d = fleet.node("d", *fleet.from_store)
    started.append(d)
    d.start()
    assert d.stop(signal.SIGKILL) == -signal.SIGKILL
    until(lambda: not d.running(), "ranks outlive their launcher")
    d.start()
    assert d.ask()["tokens"] == fleet.tokens


def full_disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    yield from full_disk(tmp_path / "small", "600k")


def test_a_disk_too_full_for_the_bundle_starts_uncached_and_says_so(
    fleet: Fleet, started: list[RealNode], small_disk: Path
) -> None:
    node = fleet.node("full", *fleet.from_store)
    node.cache = small_disk
    started.append(node)
    node.start()
    assert "starts uncached" in node.said()
    assert "has no room for compiled code" in node.said()
    answer = node.ask()
    assert answer["source"] == "ipc_cache"
    assert answer["tokens"] == fleet.tokens
    assert "compiled in" in node.engine_said()
    assert "published" not in node.said()
