"""Where Python keeps the bytecode of packages that came without any, tried with real interpreters."""

from __future__ import annotations

import compileall
import json
import os
import py_compile
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.artifacts import run
from tests.support.bare_package import MODULE, bare_package, without_bytecode, word
from tests.support.fake_checkpoint import fake_checkpoint
from tests.support.specs import spec
from typer.testing import CliRunner

from warmseed.daemon.cli.main import app
from warmseed.daemon.engines.bytecode import bytecode_variables, installation, keep_bytecode
from warmseed.daemon.engines.registry import cache_layout
from warmseed.daemon.engines.vllm import layout
from warmseed.daemon.protocol.status import StatusWriter
from warmseed.daemon.rank.rank import Rank
from warmseed.errors import ConfigurationError


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path with a package that nobody compiled."""
    folder = bare_package(tmp_path / "site")
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_what_one_start_compiles_below_the_root_the_next_start_reads(site: Path, tmp_path: Path) -> None:
    variables = bytecode_variables(tmp_path / "root", (MODULE,), {})
    assert word(site, variables) == "written"
    (kept,) = (tmp_path / "root").rglob("core.*.pyc")
    assert not list(site.rglob("*.pyc"))
    kept.write_bytes(kept.read_bytes().replace(b"written", b"noticed"))  # in the bytecode alone
    assert word(site, variables) == "noticed"


def test_a_changed_source_is_compiled_again(site: Path, tmp_path: Path) -> None:
    variables = bytecode_variables(tmp_path / "root", (MODULE,), {})
    word(site, variables)
    (site / "some_engine" / "deep" / "core.py").write_text("WORD = 'changed, and longer'\n")
    assert word(site, variables) == "changed, and longer"


def test_packages_with_bytecode_beside_them_are_left_alone(site: Path, tmp_path: Path) -> None:
    compileall.compile_dir(site, quiet=1)
    assert bytecode_variables(tmp_path, (MODULE, "some_engine", "sys", "no_such_package.part"), {}) == {}


def test_bytecode_that_is_checked_by_hash_counts(site: Path, tmp_path: Path) -> None:
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(site, quiet=1, invalidation_mode=mode)
    os.utime(site / "some_engine" / "deep" / "core.py", (1, 1))
    assert bytecode_variables(tmp_path, (MODULE,), {}) == {}


def _older(source: Path, kept: Path) -> None:
    os.utime(source, (1, 1))


def _half(source: Path, kept: Path) -> None:
    kept.write_bytes(kept.read_bytes()[:9])


def _another_python(source: Path, kept: Path) -> None:
    kept.write_bytes(b"\0\0\r\n" + kept.read_bytes()[4:])


@pytest.mark.parametrize("spoil", [_older, _half, _another_python])
def test_bytecode_that_python_would_not_believe_does_not_count(
    site: Path, tmp_path: Path, spoil: Callable[[Path, Path], None]
) -> None:
    compileall.compile_dir(site, quiet=1)
    (kept,) = site.rglob("core.*.pyc")
    spoil(site / "some_engine" / "deep" / "core.py", kept)
    assert bytecode_variables(tmp_path, (MODULE,), {})


def test_other_packages_have_another_folder_however_old_their_files_look(site: Path, tmp_path: Path) -> None:
    """In many images all files have one time, and then size alone would have to tell two releases apart."""
    before = bytecode_variables(tmp_path, (MODULE,), {})
    assert bytecode_variables(tmp_path, (MODULE,), {}) == before
    (site / "some_engine-1.dist-info" / "RECORD").write_text("some_engine/deep/core.py,sha256=two,17\n")
    assert bytecode_variables(tmp_path, (MODULE,), {})["PYTHONPYCACHEPREFIX"] != before["PYTHONPYCACHEPREFIX"]


def test_the_folder_stays_when_an_import_puts_a_packages_own_parts_on_the_path(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """setuptools does that, and vLLM imports it: its next process would compile everything again."""
    before = bytecode_variables(tmp_path, (MODULE,), {})
    vendored = site / "some_engine" / "_vendor" / "part-1.dist-info"
    vendored.mkdir(parents=True)
    (vendored / "RECORD").write_text("part.py,sha256=one,1\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(vendored.parent)])
    assert bytecode_variables(tmp_path, (MODULE,), {}) == before


def test_the_folder_is_the_same_for_a_process_that_is_started_in_a_checkout(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An editable install leaves a description there, and no list of files: nothing was installed from it."""
    before = bytecode_variables(tmp_path, (MODULE,), {})
    (tmp_path / "checkout" / "some_tool.egg-info").mkdir(parents=True)
    (tmp_path / "checkout" / "some_tool.egg-info" / "PKG-INFO").write_text("Name: some-tool\nVersion: 1\n")
    monkeypatch.syspath_prepend(str(tmp_path / "checkout"))
    assert bytecode_variables(tmp_path, (MODULE,), {}) == before


def test_packages_that_can_not_be_looked_at_cost_nothing(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "blocked", None)
    (site / "odd-1.dist-info").mkdir()
    (site / "odd-1.dist-info" / "RECORD").write_bytes(b"\xff\xfe")
    assert bytecode_variables(tmp_path, ("blocked.part", MODULE), {})


def test_an_operators_own_folder_stands_and_ours_is_found_again(site: Path, tmp_path: Path) -> None:
    assert bytecode_variables(tmp_path, (MODULE,), {"PYTHONPYCACHEPREFIX": "/elsewhere"}) == {}
    ours = bytecode_variables(tmp_path, (MODULE,), {})
    assert bytecode_variables(tmp_path, (MODULE,), ours) == ours


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    without_bytecode(monkeypatch)


@pytest.mark.usefixtures("interpreter")
def test_a_running_process_goes_on_with_the_folder_and_old_ones_go(site: Path, tmp_path: Path) -> None:
    old, recent = (tmp_path / "bytecode" / name for name in ("old", "recent"))
    for folder in (old, recent):
        (folder / "inside").mkdir(parents=True)
    month = time.time() - 31 * 86_400
    os.utime(old, (month, month))
    keep_bytecode(tmp_path, (MODULE,))
    assert sys.pycache_prefix == os.environ["PYTHONPYCACHEPREFIX"]
    assert Path(sys.pycache_prefix).is_dir()
    assert not sys.dont_write_bytecode
    assert not os.environ["PYTHONDONTWRITEBYTECODE"]
    assert recent.exists()
    assert not old.exists()


@pytest.mark.usefixtures("interpreter")
def test_adopted_bytecode_that_somebody_removed_is_kept_anew(site: Path, tmp_path: Path) -> None:
    """Behind a link that leads nowhere an interpreter could keep nothing, and would not say so."""
    variables = bytecode_variables(tmp_path, (MODULE,), {})
    folder = Path(variables["PYTHONPYCACHEPREFIX"])
    folder.parent.mkdir()
    folder.symlink_to(tmp_path / "gone")
    keep_bytecode(tmp_path, (MODULE,))
    assert word(site, variables) == "written"
    assert list(folder.rglob("core.*.pyc"))


@pytest.mark.usefixtures("interpreter")
def test_a_link_to_adopted_bytecode_ages_with_its_folder(site: Path, tmp_path: Path) -> None:
    adopted, link = tmp_path / "tree", tmp_path / "bytecode" / "old"
    adopted.mkdir()
    link.parent.mkdir()
    link.symlink_to(adopted)
    (link.parent / "astray").symlink_to(tmp_path / "gone")
    keep_bytecode(tmp_path, (MODULE,))
    assert link.is_symlink()
    assert not (link.parent / "astray").is_symlink()
    month = time.time() - 31 * 86_400
    os.utime(adopted, (month, month))
    keep_bytecode(tmp_path, (MODULE,))
    assert not link.is_symlink()
    assert adopted.is_dir()


def test_sources_from_before_the_epoch_and_paths_that_are_no_text_are_told_apart_as_well(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / os.fsdecode(b"\xff") / "odd-1.dist-info"
    odd.mkdir(parents=True)
    (odd / "RECORD").write_text("odd.py,sha256=one,1\n")
    monkeypatch.syspath_prepend(str(odd.parent))
    before = installation((MODULE,))
    os.utime(site / "some_engine" / "deep" / "core.py", (-86_400, -86_400))
    assert installation((MODULE,)) != before


@pytest.mark.usefixtures("interpreter")
def test_packages_with_bytecode_change_nothing_in_the_process(site: Path, tmp_path: Path) -> None:
    compileall.compile_dir(site, quiet=1)
    keep_bytecode(tmp_path, (MODULE,))
    assert sys.pycache_prefix is None
    assert sys.dont_write_bytecode


@pytest.mark.usefixtures("interpreter")
def test_a_disk_that_takes_nothing_costs_nothing_else(site: Path, tmp_path: Path) -> None:
    (tmp_path / "bytecode").touch()
    keep_bytecode(tmp_path, (MODULE,))
    assert word(site, bytecode_variables(tmp_path, (MODULE,), {})) == "written"


def test_an_engine_gets_the_folder_with_the_variables_of_its_caches(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "MODULES", (MODULE,))
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    variables = cache_layout("vllm", tmp_path).variables
    assert Path(variables["PYTHONPYCACHEPREFIX"]).parent == tmp_path / "bytecode"
    assert said_by_doctor(tmp_path) == variables["PYTHONPYCACHEPREFIX"]
    compileall.compile_dir(site, quiet=1)
    assert "PYTHONPYCACHEPREFIX" not in cache_layout("vllm", tmp_path).variables
    assert not said_by_doctor(tmp_path)


def said_by_doctor(root: Path) -> str:
    result = CliRunner().invoke(app, ["doctor", "--cache-root", str(root), "--json"])
    assert result.exit_code == 0, result.output
    return str(json.loads(result.output)["bytecode"])


@pytest.mark.usefixtures("interpreter")
def test_a_rank_has_the_folder_before_its_engine_imports_anything_and_only_in_a_private_root(
    site: Path, tmp_path: Path
) -> None:
    seen: list[str | None] = []

    class Importing:
        modules = (MODULE,)

        def device_uuid(self) -> str:
            seen.append(sys.pycache_prefix)
            raise ConfigurationError("this is as far as it goes")

    root = tmp_path / "root"
    told, end = os.pipe()
    status = StatusWriter(end)
    rank = Rank(spec(model=str(fake_checkpoint(tmp_path / "model")), cache_root=str(root)), status)
    rank.engine = Importing()  # type: ignore[assignment]
    for mode, said in ((0o777, "nobody else may write to it"), (0o700, "as far as it goes")):
        root.mkdir(exist_ok=True)
        root.chmod(mode)
        with pytest.raises(ConfigurationError, match=said):
            run(rank._start())
    (prefix,) = seen
    assert prefix is not None
    assert Path(prefix).parent == root / "bytecode"
    status.close()
    os.close(told)
