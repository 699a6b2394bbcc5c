"""Bytecode that one node compiled, found by real interpreters of another node before they import anything."""

from __future__ import annotations

import compileall
import importlib
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.artifacts import run
from tests.support.bare_package import MODULE, bare_package, without_bytecode, word
from tests.support.fake_checkpoint import fake_checkpoint
from tests.support.specs import spec

from warmseed.daemon.engines.bytecode import bytecode_variables
from warmseed.daemon.protocol.status import Phase, StatusWriter, decode_message
from warmseed.daemon.rank.bytecode import BYTECODE, bytecode_cache
from warmseed.daemon.rank.rank import Rank
from warmseed.daemon.rank.seeds import Seeds
from warmseed.errors import ConfigurationError
from warmseed.seeding.adopt import Adoption
from warmseed.seeding.kinds.base import Evidence, Site
from warmseed.seeding.kinds.compiled.bundle import CompileCacheKind
from warmseed.seeding.trust.token import new_token, write_token


def _nobody(*, store: str, operation: str, outcome: str, size: int, seconds: float) -> None: ...


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = bare_package(tmp_path / "site")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    return folder


class Node:
    """One machine with its cache root, beside others that have the same packages at the same place."""

    def __init__(self, base: Path, name: str) -> None:
        self.base, self.root = base, base / name
        self.root.mkdir(mode=0o700)
        self.settings: dict[str, Any] = {
            "seed_token_file": str(base / "token"),
            "warmup_cache_stores": [f"file:{base / 'store'}"],
            "cache_root": str(self.root),
        }

    @property
    def cache(self) -> tuple[CompileCacheKind, Site]:
        found = bytecode_cache(self.root, (MODULE,))
        assert found is not None
        return found

    @property
    def variables(self) -> dict[str, str]:
        return bytecode_variables(self.root, (MODULE,), {})

    @asynccontextmanager
    async def seeds(self) -> AsyncIterator[Seeds]:
        (self.root / "warmseed").mkdir(exist_ok=True)
        async with Seeds.opened(spec(**self.settings), self.root, observer=_nobody, count=lambda _: None) as seeds:
            yield seeds


@pytest.fixture
def fleet(tmp_path: Path, site: Path) -> tuple[Node, Node]:
    """A node that compiled the package, marked and published it, and one that knows nothing yet."""
    tmp_path.chmod(0o700)
    write_token(tmp_path / "token", new_token())
    (tmp_path / "store").mkdir()
    first, second = Node(tmp_path, "first"), Node(tmp_path, "second")

    async def publish() -> None:
        kind, place = first.cache
        async with first.seeds() as seeds:
            assert (await seeds.adopt(kind, place)).outcome == "none"
            assert word(site, first.variables) == "written"
            (kept,) = first.root.rglob("core.*.pyc")
            kept.write_bytes(kept.read_bytes().replace(b"written", b"noticed"))  # in the bytecode alone
            kept.with_name(f"{kept.name}.140123").write_bytes(b"half")  # as an interpreter leaves it when it is killed
            kept.with_name("notes.txt").touch()
            secret = place.roots["bytecode"] / "home" / "operator" / "secret.pyc"
            secret.parent.mkdir(parents=True)
            secret.write_bytes(b"of a script's neighbour")
            capture = await seeds.capture(kind, place)
            assert capture is not None
            await seeds.publish([(kind, capture)], {kind.name: place})

    run(publish())
    return first, second


def test_an_interpreter_of_another_node_reads_what_the_first_one_compiled(fleet: tuple[Node, Node], site: Path) -> None:
    _, second = fleet
    kind, place = second.cache

    async def main() -> None:
        async with second.seeds() as seeds:
            adoption = await seeds.adopt(kind, place)
            assert adoption.outcome == "installed"
            assert adoption.complete
            assert word(site, second.variables) == "noticed"
            assert adoption.installation is not None
            ours = f"bytecode{site}/some_engine/deep/core"
            assert [path.partition(".")[0] for path in adoption.installation.files if "/deep/core" in path] == [ours]
            assert not [path for path in adoption.installation.files if not path.endswith(".pyc") or "secret" in path]
            verdict = kind.judge(adoption.installation, Evidence(1.0), place)
            assert verdict.used, verdict.reason
            assert (await seeds.adopt(kind, place)).outcome == "present"

    run(main())


def test_what_an_interpreter_had_to_compile_again_was_not_used(fleet: tuple[Node, Node], site: Path) -> None:
    _, second = fleet
    kind, place = second.cache

    async def main() -> None:
        async with second.seeds() as seeds:
            adoption = await seeds.adopt(kind, place)
            source = site / "some_engine" / "deep" / "core.py"
            source.write_text("WORD = 'another one'\n")
            chosen_before = {"PYTHONPYCACHEPREFIX": str(place.roots["bytecode"]), "PYTHONDONTWRITEBYTECODE": ""}
            assert word(site, chosen_before) == "another one"
            assert adoption.installation is not None
            assert not kind.judge(adoption.installation, Evidence(1.0), place).used

    run(main())


def test_packages_that_were_unpacked_at_another_time_are_another_installation(
    fleet: tuple[Node, Node], site: Path
) -> None:
    """Python would compile every file again, so nothing is fetched."""
    _, second = fleet
    os.utime(site / "some_engine" / "deep" / "core.py", (1_000_000_000, 1_000_000_000))
    kind, place = second.cache

    async def main() -> None:
        async with second.seeds() as seeds:
            assert (await seeds.adopt(kind, place)).outcome == "none"

    run(main())


def test_packages_with_bytecode_of_their_own_are_no_cache(tmp_path: Path, site: Path) -> None:
    compileall.compile_dir(site, quiet=1)
    assert bytecode_cache(tmp_path, (MODULE,)) is None


Start = Callable[..., tuple[list[str], list[Phase]]]
STOP = ConfigurationError("this is as far as it goes")


class Unreadable(ConfigurationError):
    """What an adapter makes of imports that raise; they do, because the bytecode ends too soon."""


class Importing:
    """An engine that notes what it finds, and whose imports end as they are told to."""

    modules = (MODULE,)

    def __init__(self, root: Path, end: Exception) -> None:
        self.root, self.end = root, end
        self.found: list[str] = []

    def device_uuid(self) -> str:
        return "a-device"

    def prepare(self) -> None: ...

    def identity(self) -> None:
        found = list((self.root / "bytecode").glob("*/**/core.*.pyc"))
        self.found = [path.name for path in found]
        if isinstance(self.end, Unreadable):
            for path in found:
                path.write_bytes(path.read_bytes()[:20])
            try:
                importlib.import_module(MODULE)
            except EOFError as error:
                raise self.end from error
            finally:
                for name in [name for name in sys.modules if name.partition(".")[0] == "some_engine"]:
                    del sys.modules[name]
        raise self.end


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    """Start a rank of a node up to the end of its imports: what it found, and its phases of adoption."""
    without_bytecode(monkeypatch)

    def starting(node: Node, end: Exception, **place: Any) -> tuple[list[str], list[Phase]]:
        told, ours = os.pipe()
        status = StatusWriter(ours)
        model = node.base / "model"
        if not model.exists():
            fake_checkpoint(model)
        what = spec(model=str(model), weight_cache_socket_dir=str(node.base / "sockets"), **node.settings)
        rank = Rank(msgspec.structs.replace(what, **place), status)
        engine = Importing(node.root, end)
        rank.engine = engine  # type: ignore[assignment]
        with pytest.raises(type(end), match=str(end)):
            run(rank._start())
        status.close()
        with open(told, "rb") as lines:
            messages = [decode_message(line) for line in lines.read().splitlines()]
        return engine.found, [m for m in messages if isinstance(m, Phase) and m.name.startswith("adopt")]

    return starting


def test_a_ranks_engine_finds_it_before_it_imports_anything(fleet: tuple[Node, Node], start: Start) -> None:
    found, phases = start(fleet[1], STOP)
    assert len(found) == 1
    assert [(phase.name, phase.outcome) for phase in phases] == [("adopt-bytecode", "hit")]


def test_no_engine_is_rehearsed_for_bytecode_alone(tmp_path: Path) -> None:
    told, ours = os.pipe()
    rank = Rank(spec(model=str(fake_checkpoint(tmp_path / "model"))), StatusWriter(ours))
    rank._adoptions = {BYTECODE: Adoption(BYTECODE, "none")}
    assert not rank._missing
    rank._adoptions["compile_cache"] = Adoption("compile_cache", "none")
    assert rank._missing == ["compile_cache"]
    rank.status.close()
    os.close(told)


def test_one_rank_fetches_for_all_of_its_node(fleet: tuple[Node, Node], start: Start) -> None:
    for place in ({"local_rank": 1, "global_rank": 1}, {"group": "draft"}):
        assert start(fleet[1], STOP, **place) == ([], [])


@pytest.mark.parametrize("end", [RuntimeError("a broken import"), Unreadable("vLLM refuses this configuration")])
def test_imports_that_break_on_it_have_the_next_start_do_without(
    fleet: tuple[Node, Node], start: Start, end: Exception
) -> None:
    """A rank that crashed would crash at every start, whatever its adapter takes the reason for."""
    found, _ = start(fleet[1], end)
    assert len(found) == 1
    found, phases = start(fleet[1], STOP)
    assert not found
    assert [(phase.outcome, "probation" in phase.detail["refused"]) for phase in phases] == [("miss", True)]


def test_a_start_that_ends_for_another_reason_is_not_held_against_it(fleet: tuple[Node, Node], start: Start) -> None:
    start(fleet[1], STOP)
    found, phases = start(fleet[1], STOP)
    assert len(found) == 1
    assert [phase.outcome for phase in phases] == ["present"]
