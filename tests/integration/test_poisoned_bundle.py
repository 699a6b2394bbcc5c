"""A publisher's mistake: a validly signed bundle whose kernel ends the engine that loads it. One engine pays for it."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from tests.support.real_nodes import PATIENCE, RealNode, new_token
from tests.support.tiny_model import BUCKET, tiny_model

from warmseed.daemon.engines.torch import TorchEngine
from warmseed.daemon.rank.fleet_keys import fleet_keys
from warmseed.seeding.bundle.index import BundleIndex, write_index
from warmseed.seeding.kinds.base import Site
from warmseed.seeding.publish import Publisher
from warmseed.seeding.trust.token import read_tokens
from warmseed.stores.registry import open_stores

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KIND = "compile_cache"


@dataclass
class Fleet:
    """What node A, which has compiled generation 1, left behind: its caches, and the store it published to."""

    folder: Path
    model: Path
    token: Path
    caches: Path
    store: Path
    tokens: list[int]  # the answer of A's engine

    def with_store(self, name: str) -> Path:
        """A store of its own, with generation 1 in it."""
        return Path(shutil.copytree(self.store, self.folder / f"store-{name}"))

    def node(self, name: str, store: Path) -> RealNode:
        shared = "--warmup-cache-stores", f"file:{store}", "--seed-token-file", str(self.token)
        return RealNode(self.folder / name, self.model, shared)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    folder.chmod(0o700)
    model, token, store = tiny_model(folder / "model"), new_token(folder), folder / "store"
    store.mkdir()
    a = RealNode(folder / "a", model, ("--warmup-cache-stores", f"file:{store}", "--seed-token-file", str(token)))
    try:
        a.start()
        until(lambda: any(store.rglob("head")), "A published nothing")
        tokens = a.ask()["tokens"]
        assert a.stop() == 143
        assert a.cache is not None
        yield Fleet(folder, model, token, a.cache, store, tokens)
    finally:
        a.end()


@pytest.fixture
def started() -> Iterator[list[RealNode]]:
    """Nodes that a test starts; whatever is left of them is killed."""
    nodes: list[RealNode] = []
    yield nodes
    for node in nodes:
        node.end()


def until(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def killing_library(folder: Path) -> bytes:
    """A shared library that ends, by SIGILL, the process that loads it."""
    source, library = folder / "poison.c", folder / "poison.so"
    source.write_text("__attribute__((constructor)) static void die(void) { __builtin_trap(); }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=PATIENCE)
    return library.read_bytes()


def publish_poison(fleet: Fleet, store: Path, folder: Path, kernel: bytes, *, whole: bool = True) -> str:
    """Publish A's caches once more, with `kernel` for each compiled kernel, as any holder of the token can.

    One that is not `whole` has a Triton cache that fits no node, so whoever adopts it rehearses the rest.

    Returns:
        The digest of the payload.
    """
    root, state = folder / "cache", folder / "state"
    shutil.copytree(fleet.caches / "torch", root / "torch")
    engine = TorchEngine(fleet.model, buckets=[int(BUCKET)])
    layout, identity = engine.caches(root), engine.identity()
    kernels = list(layout.roots["inductor"].rglob("*.main.so"))
    assert kernels, "torch has renamed its kernels"
    for path in kernels:
        path.write_bytes(kernel)
    if not whole:
        layout.roots["triton"].mkdir()
        (layout.roots["triton"] / "kernel.json").write_text("{}")
    site = Site(
        config_hash=identity.config_hash,
        config_factors=identity.factors,
        environment=engine.environment(),
        dp_rank=0,
        world_rank=0,
        device_index=engine.device_index(),
        cache_root=root,
        roots=layout.roots,
        state=state,
    )
    (kind,) = engine.kinds()
    capture = kind.capture(site)
    assert capture is not None
    if not whole:
        capture = dataclasses.replace(capture, index=foreign_triton(capture.index or b""))
    tokens = read_tokens(file=fleet.token, arguments=(), environ={})
    keys, _ = fleet_keys(tokens, state, signing=None, trusted=())

    async def publish() -> int:
        chain = await open_stores([f"file:{store}"], folder=state / "store")
        try:
            published = await Publisher(chain, keys, publisher="mistaken").publish(capture, kind.name, site)
            assert await chain.flush(30)
            return published.manifest.generation
        finally:
            await chain.aclose()

    before = len(list(store.glob("**/manifest/**/*.json")))
    assert asyncio.run(publish()) == before + 1
    return capture.sha256


def foreign_triton(index: bytes) -> bytes:
    """The index of a bundle whose Triton cache was made by another Triton."""
    contents = msgspec.json.decode(index, type=BundleIndex)
    record = contents.caches["triton"]
    other = msgspec.structs.replace(record, environment={**record.environment, "triton": "0.0"})
    return write_index(msgspec.structs.replace(contents, caches={**contents.caches, "triton": other}))[0]


def denied(store: Path) -> list[str]:
    """The payloads that the fleet was told to keep away from."""
    return [path.stem for path in store.rglob("denied/*")]


def quarantined(node: RealNode) -> list[str]:
    assert node.cache is not None
    return [path.name for path in (node.cache / "warmseed" / "compiled" / "quarantine").glob("*")]


def test_a_kernel_that_kills_its_engine_costs_the_fleet_one_engine(
    fleet: Fleet, started: list[RealNode], tmp_path: Path
) -> None:
    store = fleet.with_store("killing")
    digest = publish_poison(fleet, store, tmp_path, killing_library(tmp_path))
    b = fleet.node("b", store)
    started.append(b)
    b.start()  # the daemon loads no compiled code, so its own start can't fail by any
    assert "outcome=hit" in b.said()
    assert "generation=2" in b.said()
    died = b.engine()
    until(lambda: quarantined(b), b.said())
    assert died.wait(PATIENCE) == -signal.SIGILL
    assert "generation=2 of " + digest[:12] + " quarantined: engine pid " in b.said()
    assert "died of SIGILL" in b.said()
    assert denied(store) == []  # one death alone forbids the fleet nothing
    answer = b.ask()
    assert answer["tokens"] == fleet.tokens
    assert answer["source"] == "ipc_cache"
    until(lambda: denied(store) == [digest], b.said())
    assert "generation=2 denied to the fleet" in b.said()

    c = fleet.node("c", store)
    started.append(c)
    c.start()
    assert f"refused=denied payload {digest[:12]}" in c.said()
    assert "outcome=hit" in c.said()
    assert "generation=1 " in c.said()
    killed_while_it_warms_up(c)  # by somebody else, which is no reason to give up a generation on trial
    assert quarantined(c) == []
    answer = c.ask()
    assert answer["tokens"] == fleet.tokens
    assert [verdict["used"] for verdict in c.used()] == [True]

    # It is proven now, and stays so when an engine of the daemon's next life does not come to its warmup.
    assert c.stop() == 143
    c.log.unlink()
    c.start()
    killed_while_it_warms_up(c)
    assert quarantined(c) == []
    assert denied(store) == [digest]


def test_a_kernel_that_cannot_be_loaded_is_taken_back_like_one_that_kills(
    fleet: Fleet, started: list[RealNode], tmp_path: Path
) -> None:
    store = fleet.with_store("raising")
    publish_poison(fleet, store, tmp_path, b"no shared library")
    b = fleet.node("d", store)
    started.append(b)
    b.start()
    failed = b.engine()
    until(lambda: quarantined(b), b.said())
    assert failed.wait(PATIENCE) == 1
    assert "exited with 1" in b.said()


def test_a_kernel_that_kills_the_rehearsing_engine_ends_no_start(
    fleet: Fleet, started: list[RealNode], tmp_path: Path
) -> None:
    store = fleet.folder / "store-rehearsed"  # without generation 1, which works whole and would be taken first
    store.mkdir()
    publish_poison(fleet, store, tmp_path, killing_library(tmp_path), whole=False)
    b = fleet.node("f", store)
    started.append(b)
    b.start()
    said = b.said()
    assert "rehearsal outcome=failed" in said
    assert "exited with 132" in said  # by SIGILL; its parent, the launcher, may know before the daemon can look
    assert "quarantined: engine pid" in said
    assert len(quarantined(b)) == 1
    assert "published" not in said  # half a cache is nobody else's
    assert denied(store) == []


def killed_while_it_warms_up(node: RealNode) -> None:
    """Kill an engine between its first look at the weights and its report; the daemon says why nothing follows."""
    engine = node.engine()
    until(lambda: f"weights given pid={engine.pid}" in node.said(), node.said())
    engine.kill()
    until(lambda: f"generation=1 stays: engine pid {engine.pid} died of SIGKILL" in node.said(), node.said())
    assert engine.wait(PATIENCE) == -signal.SIGKILL
