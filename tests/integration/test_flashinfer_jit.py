"""FlashInfer's own JIT finds what a bundle brought and builds nothing: its writer of build files, and real ninja."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.flashinfer_jit import jit, make_toolkit, version
from tests.support.sites import ENVIRONMENT, make_manifest, make_site, tree

from warmseed.seeding.kinds.base import Capture, Evidence, Installation, Site
from warmseed.seeding.kinds.compiled.bundle import CompileCacheKind
from warmseed.seeding.kinds.compiled.capture import Quiet
from warmseed.seeding.kinds.compiled.flashinfer import FlashInferCache

IDLE = "ninja: no work to do."
KIND = CompileCacheKind([FlashInferCache()], quiet=Quiet(settle=0.0))


@pytest.fixture(scope="module")
def toolkit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toolkit(tmp_path_factory.mktemp("toolkit") / "cuda")


def site_at(workspace: Path, state: Path, toolkit: Path, **changes: str) -> Site:
    environment = {
        **ENVIRONMENT,
        "flashinfer": version(),
        "flashinfer_jit_cache": "absent",
        "compute_capability": "9.0",
        "site_packages": "/opt/venv/lib",
        "cuda_home": str(toolkit),
        **changes,
    }
    site = make_site(state, root=workspace.parent, caches=("flashinfer",), environment=environment)
    return replace(site, roots={"flashinfer": workspace / ".cache" / "flashinfer"})


def seeded(tmp_path: Path, toolkit: Path, *modules: str) -> tuple[Site, Capture, Path]:
    """A node that FlashInfer built `modules` on, and its bundle; the node's caches are then moved away."""
    site = site_at(tmp_path / "node" / "workspace", tmp_path / "first", toolkit)
    answers, said = jit(tmp_path / "node" / "workspace", toolkit, *modules)
    assert answers == dict.fromkeys(modules, 7)
    assert not any(IDLE in line for line in said)
    capture = KIND.capture(site)
    assert capture is not None
    payload = Path(shutil.copy(capture.payload, tmp_path / "payload"))
    (tmp_path / "node" / "workspace").rename(tmp_path / "moved away")
    return site, capture, payload


def adopt(site: Site, source: Site, capture: Capture, payload: Path, *, generation: int = 1) -> Installation:
    manifest = make_manifest(capture, source, generation=generation)
    return KIND.install(manifest, payload, capture.index, site)


def test_at_the_same_root_flashinfers_next_start_builds_nothing(tmp_path: Path, toolkit: Path) -> None:
    source, capture, payload = seeded(tmp_path, toolkit, "norm", "page")
    workspace = tmp_path / "node" / "workspace"
    site = site_at(workspace, tmp_path / "second", toolkit)
    installed = adopt(site, source, capture, payload)
    assert installed.complete
    assert not (tmp_path / "node" / "python").exists()
    before = tree(site.roots["flashinfer"])
    answers, said = jit(workspace, toolkit, "norm", "page")
    assert answers == {"norm": 7, "page": 7}
    assert [IDLE in line for line in said] == [True, True]
    after = tree(site.roots["flashinfer"])
    assert before.items() <= after.items()
    assert KIND.present(site)
    new = tuple(f"flashinfer/{path}" for path in after.keys() - before.keys())  # as an engine's adapter reports them
    assert any(path.endswith(".lock") for path in new), "FlashInfer locks a module also where it only loads it"
    assert KIND.judge(installed, Evidence(seconds=1.0, new_files=new), site).used


def test_a_module_that_was_built_again_shows_as_such(tmp_path: Path, toolkit: Path) -> None:
    source, capture, payload = seeded(tmp_path, toolkit, "norm")
    workspace = tmp_path / "node" / "workspace"
    site = site_at(workspace, tmp_path / "second", toolkit)
    installed = adopt(site, source, capture, payload)
    jit(workspace, toolkit, "norm", "page")
    verdict = KIND.judge(installed, Evidence(seconds=1.0), site)
    assert not verdict.used
    assert "new files" in verdict.reason


def test_a_second_generation_and_the_way_back_build_nothing_either(tmp_path: Path, toolkit: Path) -> None:
    source, capture, payload = seeded(tmp_path, toolkit, "norm")
    workspace = tmp_path / "node" / "workspace"
    site = site_at(workspace, tmp_path / "second", toolkit)
    adopt(site, source, capture, payload)
    jit(workspace, toolkit, "norm", "page")
    again = KIND.capture(site)
    assert again is not None
    newer = adopt(site, site, again, Path(shutil.copy(again.payload, tmp_path / "newer")), generation=2)
    assert [IDLE in line for line in jit(workspace, toolkit, "norm", "page")[1]] == [True, True]
    KIND.retract(newer, site)
    assert [IDLE in line for line in jit(workspace, toolkit, "norm")[1]] == [True]
    current = KIND.current(site)
    assert current is not None
    assert current.generation == 1


def test_what_an_engine_had_built_itself_comes_back_when_a_bundle_is_taken_back(tmp_path: Path, toolkit: Path) -> None:
    source, capture, payload = seeded(tmp_path, toolkit, "norm")
    workspace = tmp_path / "node" / "workspace"
    jit(workspace, toolkit, "page")
    site = site_at(workspace, tmp_path / "second", toolkit)
    installed = adopt(site, source, capture, payload)
    KIND.retract(installed, site)
    assert [IDLE in line for line in jit(workspace, toolkit, "page")[1]] == [True]


def test_at_another_root_flashinfer_loads_the_provider_package_and_runs_no_ninja(tmp_path: Path, toolkit: Path) -> None:
    source, capture, payload = seeded(tmp_path, toolkit, "norm", "page")
    workspace = tmp_path / "other" / "workspace"
    site = site_at(workspace, tmp_path / "second", toolkit)
    installed = adopt(site, source, capture, payload)
    assert installed.complete
    path = KIND.variables(site)["PYTHONPATH"]
    answers, said = jit(workspace, toolkit, "norm", "page", path=path, disable=True)
    assert answers == {"norm": 7, "page": 7}
    assert said == []
    assert KIND.judge(installed, Evidence(seconds=1.0), site).used


def test_a_root_that_really_lies_elsewhere_leads_to_the_provider_package(tmp_path: Path, toolkit: Path) -> None:
    """Equal names are not enough: FlashInfer writes resolved paths, so another mount below the name rebuilds."""
    source, capture, payload = seeded(tmp_path, toolkit, "norm")
    workspace = tmp_path / "node" / "workspace"
    (tmp_path / "disk").mkdir()
    workspace.symlink_to(tmp_path / "disk")
    site = site_at(workspace, tmp_path / "second", toolkit)
    adopt(site, source, capture, payload)
    path = KIND.variables(site)["PYTHONPATH"]
    answers, said = jit(workspace, toolkit, "norm", path=path, disable=True)
    assert (answers, said) == ({"norm": 7}, [])


def test_the_package_of_another_flashinfer_stands_aside(tmp_path: Path, toolkit: Path) -> None:
    """After an upgrade the old package is still on the path; 0.6 refuses to be imported beside a wrong version."""
    source, capture, payload = seeded(tmp_path, toolkit, "norm")
    workspace = tmp_path / "other" / "workspace"
    site = site_at(workspace, tmp_path / "second", toolkit)
    adopt(site, source, capture, payload)
    package = Path(KIND.variables(site)["PYTHONPATH"]) / "flashinfer_jit_cache" / "__init__.py"
    package.write_text(package.read_text().replace(repr(version()), repr("0.5.9")))
    answers, said = jit(workspace, toolkit, "norm", path=str(package.parents[1]))
    assert answers == {"norm": 7}
    assert len(said) == 1


def test_only_modules_of_the_recorded_version_go_into_a_package(tmp_path: Path, toolkit: Path) -> None:
    workspace = tmp_path / "node" / "workspace"
    jit(workspace, toolkit, "norm")
    root = workspace / ".cache" / "flashinfer"
    old = root / "0.1.0" / "90a" / "cached_ops" / "norm"
    old.mkdir(parents=True)
    (old / "norm.so").write_bytes(b"of another time")
    source = site_at(workspace, tmp_path / "first", toolkit)
    capture = KIND.capture(source)
    assert capture is not None
    site = site_at(tmp_path / "other" / "workspace", tmp_path / "second", toolkit)
    adopt(site, source, capture, capture.payload)
    path = KIND.variables(site)["PYTHONPATH"]
    assert jit(tmp_path / "other" / "workspace", toolkit, "norm", path=path, disable=True) == ({"norm": 7}, [])


def test_a_state_folder_on_another_file_system_keeps_the_times(tmp_path: Path, toolkit: Path) -> None:
    shared = Path("/dev/shm")
    if os.stat(shared).st_dev == os.stat(tmp_path).st_dev:
        shared = tmp_path
    source, capture, payload = seeded(tmp_path, toolkit, "norm")
    workspace = tmp_path / "node" / "workspace"
    state = shared / f"warmseed-test-{os.getpid()}"
    try:
        site = site_at(workspace, state, toolkit)
        installed = adopt(site, source, capture, payload)
        assert [IDLE in line for line in jit(workspace, toolkit, "norm")[1]] == [True]
        KIND.retract(installed, site)
        assert not (workspace / ".cache/flashinfer" / version() / "90a/cached_ops").exists()
    finally:
        shutil.rmtree(state, ignore_errors=True)
