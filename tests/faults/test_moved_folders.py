"""Folders that stand at a root themselves: killed or failing at every step, the old one or the new one is there."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.sites import fill, make_manifest, make_site, tree

from warmseed.seeding.bundle.files import Disk
from warmseed.seeding.bundle.index import CacheRecord, FileRecord
from warmseed.seeding.bundle.moving import MARK
from warmseed.seeding.kinds.base import Capture, Site
from warmseed.seeding.kinds.compiled.bundle import CompileCacheKind
from warmseed.seeding.kinds.compiled.cache import CompiledCache, Placement, everything
from warmseed.seeding.kinds.compiled.capture import Quiet

OLD = {"ab/k.so": b"old" * 400, "ab/k.py": b"old"}
NEW = {"ab/k.so": b"new" * 500, "cd/l.py": b"more"}
OWN = {"ab/k.so": b"an engine's own"}


class RealRoot(CompiledCache):
    """A cache whose compiler resolves links."""

    name = "inductor"

    def place(self, record: CacheRecord, files: Sequence[FileRecord], site: Site) -> Placement | str:
        return replace(everything(self.name, files, site), real=True)


class Interrupted(Disk):
    """Ends the process, or fails, at one of the steps that change a name; without `RENAME_EXCHANGE` where told so."""

    def __init__(self, at: int = 0, *, kill: bool = False, swaps: bool = True) -> None:
        self.at, self.kill, self.swaps, self.steps = at, kill, swaps, 0

    def _step(self) -> None:
        self.steps += 1
        if self.steps == self.at:
            if self.kill:
                os._exit(9)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def rename(self, source: str, target: str) -> None:
        self._step()
        super().rename(source, target)

    def exchange(self, one: str, other: str) -> None:
        if not self.swaps:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._step()
        super().exchange(one, other)

    def sync_folder(self, folder: int) -> None:
        self._step()
        super().sync_folder(folder)


def kind(disk: Disk | None = None) -> CompileCacheKind:
    return CompileCacheKind([RealRoot()], quiet=Quiet(settle=0.0), disk=disk)


def captured(base: Path, files: dict[str, bytes]) -> tuple[Capture, Site]:
    source = make_site(base, caches=("inductor",))
    fill(source.roots["inductor"], files)
    capture = kind().capture(source)
    assert capture is not None
    return capture, source


def install(job: tuple[Capture, Site], site: Site, generation: int, disk: Disk | None = None) -> None:
    capture, source = job
    manifest = make_manifest(capture, source, generation=generation)
    kind(disk).install(manifest, capture.payload, capture.index, site)


def standing(site: Site) -> dict[str, bytes]:
    root = site.roots["inductor"]
    assert not root.is_symlink()
    return {path: data for path, data in tree(root).items() if path != MARK}


def in_child(work: object) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()  # type: ignore[operator]
        except BaseException:  # noqa: BLE001 - the parent looks at what is on the disk
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


@pytest.mark.parametrize("before", ["nothing", "older", "own"])
@pytest.mark.parametrize("kill", [True, False])
def test_whatever_step_is_the_last_one_there_is_a_whole_folder_and_a_way_on(
    tmp_path: Path, before: str, kill: bool
) -> None:
    old, new = captured(tmp_path / "old", OLD), captured(tmp_path / "new", NEW)
    seen = set()
    for at in range(1, 40):
        base = tmp_path / str(at)
        site = make_site(base, caches=("inductor",))
        root = site.roots["inductor"]
        earlier = {"nothing": {}, "older": OLD, "own": OWN}[before]
        if before == "older":
            install(old, site, 1)
        elif before == "own":
            fill(root, OWN)
        disk = Interrupted(at, kill=kill)
        status = in_child(lambda site=site, disk=disk: install(new, site, 2, disk))
        found = standing(site)
        assert found in (earlier, NEW), f"step {at} left {sorted(found)}"
        seen.add("new" if found == NEW else "earlier")
        install(new, site, 2)
        assert standing(site) == NEW
        assert [path.name for path in root.parent.iterdir()] == ["inductor"]
        assert kind().present(site)
        current = kind().current(site)
        assert current is not None
        kind().retract(current, site)
        kept = [tree(path) for path in (site.state / "compiled" / "replaced").iterdir()]
        if before == "own":  # what an engine built comes back, or after a kill in between is at least kept
            assert standing(site) == OWN or OWN in kept
        if before == "older":
            assert standing(site) == OLD
        shutil.rmtree(base)
        if status == 0:
            break
    else:
        raise AssertionError("it never came to its end")
    assert seen == {"earlier", "new"}


def test_a_file_system_that_cannot_swap_takes_two_steps(tmp_path: Path) -> None:
    site = make_site(tmp_path / "node", caches=("inductor",))
    fill(site.roots["inductor"], OWN)
    install(captured(tmp_path / "old", OLD), site, 1, Interrupted(swaps=False))
    assert standing(site) == OLD
    install(captured(tmp_path / "new", NEW), site, 2, Interrupted(swaps=False))
    assert standing(site) == NEW
    for files in (OLD, OWN):
        current = kind().current(site)
        assert current is not None
        kind(Interrupted(swaps=False)).retract(current, site)
        assert standing(site) == files


def test_a_mark_that_names_no_tree_of_ours_is_an_engines_own_folder_that_is_replaced(tmp_path: Path) -> None:
    for number, text in enumerate(("../../etc/x", "/etc/x", "1-ab-cd/../x", "gone-1/inductor", "", "\xff" * 5000)):
        site = make_site(tmp_path / str(number), caches=("inductor",))
        fill(site.roots["inductor"], {**OWN, MARK: text.encode()})
        install(captured(tmp_path / f"new{number}", NEW), site, 1)
        assert standing(site) == NEW
        assert kind().present(site)


def test_the_mark_is_no_part_of_the_next_bundle(tmp_path: Path) -> None:
    site = make_site(tmp_path / "node", caches=("inductor",))
    job = captured(tmp_path / "new", NEW)
    install(job, site, 1)
    again = kind().capture(site)
    assert again is not None
    assert again.sha256 == job[0].sha256
