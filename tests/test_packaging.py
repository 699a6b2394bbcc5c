"""The wheel holds what the tree holds, under one name, and works without any of the heavy packages."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAPPED = {"configs": "warmseed/configs", "daemon": "warmseed/daemon", "seeding": "warmseed/seeding"}
MAPPED |= {"stores": "warmseed/stores", "src/warmseed": "warmseed"}
LINKS = {"configs", "daemon", "seeding", "stores"}  # below src/warmseed, for tools that do not read pyproject.toml

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the tree: setuptools would take up what an earlier build left behind."""
    base = tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    for name in listed.stdout.split("\0"):
        source, target = ROOT / name, base / "tree" / name
        if name and source.is_file() and not source.is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    command = [sys.executable, "-P", "-m", "build", "--wheel", "--no-isolation", "--outdir", str(base), "tree"]
    done = subprocess.run(command, cwd=base, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (found,) = base.glob("warmseed-*.whl")
    return found


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def modules() -> Iterator[tuple[Path, str]]:
    """Every Python file of the package, and its name in the wheel."""
    for folder, target in MAPPED.items():
        for path in (ROOT / folder).rglob("*.py"):
            inside = path.relative_to(ROOT / folder)
            if folder == "src/warmseed" and inside.parts[0] in LINKS:
                continue
            yield path, f"{target}/{inside.as_posix()}"


def test_every_module_is_in_the_wheel(names: set[str]) -> None:
    expected = {name for _, name in modules()}
    assert len(expected) > 100
    assert expected - names == set(), "list the new package in pyproject.toml"


def test_nothing_else_is_at_the_top(names: set[str]) -> None:
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"warmseed"}


def test_examples_and_the_typing_marker_are_in_the_wheel(names: set[str]) -> None:
    assert "warmseed/py.typed" in names
    examples = {
        f"warmseed/configs/{path.relative_to(ROOT / 'configs').as_posix()}"
        for path in (ROOT / "configs").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert examples - names == set()


def test_it_is_installed_and_imported_from_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.strip()
    install = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--no-index"]
    subprocess.run([*install, "--target", site, str(wheel)], check=True, capture_output=True, timeout=300)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # Without any dependency: what needs none must not import one.
    code = "import warmseed, warmseed.errors, warmseed.seeding, warmseed.stores; print(warmseed.__file__)"
    done = subprocess.run(
        [python, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == f"{site}/warmseed/__init__.py"
