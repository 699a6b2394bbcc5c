"""Killed at every step, or on a failing disk: the old cache or the new one, never a torn one."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.install_once import kind, write_job
from tests.support.sites import fill, make_manifest, make_site, tree

from warmseed.seeding.bundle.files import Disk
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.kinds.base import Capture, Site
from warmseed.seeding.kinds.compiled.bundle import CompileCacheKind
from warmseed.seeding.kinds.compiled.capture import Quiet
from warmseed.seeding.kinds.compiled.inductor import InductorCache
from warmseed.seeding.kinds.compiled.triton import TritonCache

OLD = {"ab/k.so": b"old" * 400, "ab/k.py": b"old"}
NEW = {"ab/k.so": b"new" * 500, "ab/k.py": b"new", "cd/l.py": b"more"}
REPOSITORY = Path(__file__).resolve().parents[2]


def captured(base: Path, files: dict[str, bytes]) -> tuple[Capture, Site]:
    source = make_site(base)
    for name in ("inductor", "triton"):
        fill(source.roots[name], files)
    capture = kind().capture(source)
    assert capture is not None
    return capture, source


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    for generation, files in ((1, OLD), (2, NEW)):
        capture, source = captured(tmp_path / f"source{generation}", files)
        write_job(tmp_path / f"job{generation}", capture, source, generation=generation)
    return tmp_path


def run(job: Path, base: Path, *wrapper: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*wrapper, sys.executable, "-P", "-m", "tests.support.install_once", str(job), str(base)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path]), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def assert_old_or_new(base: Path) -> set[str]:
    """Each root holds one whole generation; which ones there are."""
    seen = set()
    for root in make_site(base).roots.values():
        found = tree(root)
        assert found in (OLD, NEW), f"{root} is torn: {sorted(found)}"
        seen.add("old" if found == OLD else "new")
    return seen


CALLS = (
    "openat",
    "write",
    "mkdirat",
    "rename",
    "renameat2",
    "fsync",
    "syncfs",
    "symlink",
    "fchmod",
    "utimensat",
    "mkdir",
)


def last_calls(log: Path, folder: Path) -> Iterator[tuple[str, int]]:
    """For each system call, the numbers of its last few occurrences that concern the installation."""
    lines = log.read_text(errors="replace").splitlines()
    for call in CALLS:
        numbers = [n for n, _ in enumerate((x for x in lines if re.search(rf"\b{call}\(", x)), start=1)]
        picked = numbers[-8:] if len(numbers) > 8 else numbers
        for number in picked[:: 1 if len(picked) < 4 else 2]:
            yield call, number


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_kill_at_any_step_leaves_the_old_cache_or_the_new_one(jobs: Path, tmp_path: Path) -> None:
    start = tmp_path / "start"
    assert run(jobs / "job1", start).returncode == 0
    log = tmp_path / "calls"
    trial = tmp_path / "trial"
    shutil.copytree(start, trial, symlinks=True)
    relink(trial, start)
    traced = run(jobs / "job2", trial, "strace", "-f", "-o", str(log), "-e", f"trace={','.join(CALLS)}")
    assert traced.returncode == 0, traced.stderr
    outcomes: dict[str, int] = {}
    for number, (call, when) in enumerate(last_calls(log, trial)):
        base = tmp_path / f"killed{number}"
        shutil.copytree(start, base, symlinks=True)
        relink(base, start)
        inject = f"inject={call}:signal=KILL:when={when}"
        done = run(jobs / "job2", base, "strace", "-f", "-o", os.devnull, "-e", f"trace={call}", "-e", inject)
        outcome = ",".join(sorted(assert_old_or_new(base)))
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        if done.returncode == 0:
            continue  # the interpreter's own calls shift a little from run to run
        assert run(jobs / "job2", base).returncode == 0, f"the start after a kill at {call} {when} fails"
        assert assert_old_or_new(base) == {"new"}
        assert list((base / "state" / "compiled" / "staging").iterdir()) == []
        shutil.rmtree(base)
    assert outcomes.get("old", 0) > 3, outcomes
    assert sum(outcomes.values()) > 15, outcomes


def relink(base: Path, old: Path) -> None:
    """Point the copied roots into the copied trees."""
    for root in make_site(base).roots.values():
        target = os.readlink(root).replace(str(old), str(base), 1)
        root.unlink()
        root.symlink_to(target)
    for record in (base / "state" / "compiled" / "trees").glob("*/tree.json"):
        record.write_bytes(record.read_bytes().replace(str(old).encode(), str(base).encode()))


def test_a_kill_while_an_engines_own_folder_is_swapped_leaves_a_root_that_works(jobs: Path, tmp_path: Path) -> None:
    for call in ("renameat2", "rename", "fsync"):
        for when in (1, 2, 3):
            base = tmp_path / f"{call}{when}"
            for root in make_site(base).roots.values():
                fill(root, OLD)
            inject = f"inject={call}:signal=KILL:when={when}"
            run(jobs / "job2", base, "strace", "-f", "-o", os.devnull, "-e", f"trace={call}", "-e", inject)
            assert_old_or_new(base)
            current = kind().current(make_site(base))
            if current is not None:
                kind().retract(current, make_site(base))
            for root in make_site(base).roots.values():
                assert tree(root) in (OLD, {}), "the way back leads nowhere"
            assert run(jobs / "job2", base).returncode == 0
            assert assert_old_or_new(base) == {"new"}


# -- a failing disk -----------------------------------------------------------------------------------------


class FailingDisk(Disk):
    """Fails the `number`-th operation of the whole installation."""

    def __init__(self, number: int, code: int) -> None:
        self.left, self.code, self.operations = number, code, 0

    def _step(self) -> None:
        self.operations += 1
        self.left -= 1
        if self.left == 0:
            raise OSError(self.code, os.strerror(self.code))

    def make_folder(self, name: str, at: int) -> int:
        self._step()
        return super().make_folder(name, at)

    def write_file(self, name: str, at: int, data: memoryview, *, mode: int, mtime_ns: int) -> None:
        self._step()
        super().write_file(name, at, data, mode=mode, mtime_ns=mtime_ns)

    def sync(self, folder: int) -> None:
        self._step()
        super().sync(folder)

    def sync_folder(self, folder: int) -> None:
        self._step()
        super().sync_folder(folder)

    def rename(self, source: str, target: str) -> None:
        self._step()
        super().rename(source, target)

    def link(self, target: str, path: str) -> None:
        self._step()
        super().link(target, path)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EMFILE, errno.EROFS])
@pytest.mark.parametrize("before", ["nothing", "older", "engine's own"])
def test_a_disk_that_fails_at_any_step_changes_nothing_and_the_next_start_succeeds(
    tmp_path: Path, code: int, before: str
) -> None:
    old, old_source = captured(tmp_path / "source1", OLD)
    new, new_source = captured(tmp_path / "source2", NEW)
    caches = [InductorCache(), TritonCache()]
    for number in range(1, 100):
        base = tmp_path / f"{number}"
        site = make_site(base)
        if before == "older":
            kind().install(make_manifest(old, old_source), old.payload, old.index, site)
        elif before == "engine's own":
            for root in site.roots.values():
                fill(root, OLD)
        disk = FailingDisk(number, code)
        failing = CompileCacheKind(caches, quiet=Quiet(settle=0.0), disk=disk)
        manifest = make_manifest(new, new_source, generation=2)
        failed = None
        try:
            failing.install(manifest, new.payload, new.index, site)
        except OSError as error:
            failed = error.errno
        if failed is None:
            assert disk.operations < number, "a failure was swallowed"
            break
        assert failed == code
        for root in site.roots.values():
            assert tree(root) == ({} if before == "nothing" else OLD)
            assert not list(root.parent.glob(".*")), "a temporary name is left"
        kind().install(manifest, new.payload, new.index, site)
        assert all(tree(root) == NEW for root in site.roots.values())
        shutil.rmtree(base)
    else:
        pytest.fail("the installation never succeeded")


def test_a_folder_that_cannot_be_written_is_an_error_of_the_disk(tmp_path: Path) -> None:
    capture, source = captured(tmp_path / "source", NEW)
    site = make_site(tmp_path / "target")
    site.state.parent.mkdir()
    site.state.write_bytes(b"a file where the state folder should be")
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        kind().install(make_manifest(capture, source), capture.payload, capture.index, site)


def test_a_full_tmpfs_leaves_nothing_behind(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.fail("this test mounts a small tmpfs: run the suite as root")
    capture, source = captured(tmp_path / "source", {f"d{n}/k.so": os.urandom(40_000) for n in range(60)})
    for options in ("size=2m", "size=600m,nr_inodes=40"):
        mount = tmp_path / options.replace(",", "_")
        mount.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(mount)], check=True, timeout=20)
        try:
            site = make_site(mount)
            with pytest.raises((ArtifactRefused, OSError)) as failed:
                kind().install(make_manifest(capture, source), capture.payload, capture.index, site)
            if isinstance(failed.value, ArtifactRefused):
                assert failed.value.reason == "space"
            assert not any(os.path.lexists(root) for root in site.roots.values())
            assert list((site.state / "compiled" / "staging").iterdir()) == []
            assert list((site.state / "compiled" / "trees").iterdir()) == []
        finally:
            subprocess.run(["umount", "-l", str(mount)], check=True, timeout=20)


# -- a power cut --------------------------------------------------------------------------------------------


class RecordingDisk(Disk):
    """Remembers what was put on disk, and what only the page cache has."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def write_file(self, name: str, at: int, data: memoryview, *, mode: int, mtime_ns: int) -> None:
        self.log.append("write")
        super().write_file(name, at, data, mode=mode, mtime_ns=mtime_ns)

    def sync(self, folder: int) -> None:
        self.log.append("sync tree")
        super().sync(folder)

    def sync_folder(self, folder: int) -> None:
        self.log.append(f"sync {Path(os.readlink(f'/proc/self/fd/{folder}')).name}")
        super().sync_folder(folder)

    def rename(self, source: str, target: str) -> None:
        self.log.append("commit" if Path(target).parent.name == "trees" else "switch")
        super().rename(source, target)


def test_nothing_gets_its_name_before_its_bytes_are_on_disk(tmp_path: Path) -> None:
    capture, source = captured(tmp_path / "source", NEW)
    disk = RecordingDisk()
    caches = [InductorCache(), TritonCache()]
    CompileCacheKind(caches, quiet=Quiet(settle=0.0), disk=disk).install(
        make_manifest(capture, source), capture.payload, capture.index, make_site(tmp_path / "target")
    )
    order = [entry for n, entry in enumerate(disk.log) if n == 0 or disk.log[n - 1] != entry]
    assert order == ["write", "sync tree", "commit", "sync trees", "switch", "sync cache", "switch", "sync cache"]


def test_processes_that_install_one_bundle_at_once_leave_one_tree(jobs: Path, tmp_path: Path) -> None:
    base = tmp_path / "target"
    command = [sys.executable, "-P", "-m", "tests.support.install_once", str(jobs / "job2"), str(base)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])}
    processes = [
        subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(8)
    ]
    for process in processes:
        _, said = process.communicate(timeout=100)
        assert process.returncode == 0, said
    assert assert_old_or_new(base) == {"new"}
    assert len(list((base / "state" / "compiled" / "trees").iterdir())) == 1


SHUTDOWN = 0x8004587D  # FS_IOC_SHUTDOWN, the same number on ext4 and xfs (linux/fs.h)
LOG_FLUSHED, LOG_LOST = 1, 2


@pytest.mark.slow
@pytest.mark.parametrize("flags", [LOG_FLUSHED, LOG_LOST])
def test_a_power_cut_after_the_switch_leaves_whole_files(tmp_path: Path, flags: int) -> None:
    if os.geteuid() != 0:
        pytest.fail("this test mounts a file system: run the suite as root")
    image, mount = tmp_path / "image", tmp_path / "mount"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(900 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, capture_output=True, timeout=60)
    attach = ["mount", "-o", "loop,noauto_da_alloc", str(image), str(mount)]
    subprocess.run(attach, check=True, timeout=60)
    try:
        for generation, files in ((1, OLD), (2, NEW)):
            capture, source = captured(tmp_path / f"source{generation}", files)
            kind().install(
                make_manifest(capture, source, generation=generation), capture.payload, capture.index, make_site(mount)
            )
        handle = os.open(mount, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(handle, SHUTDOWN, struct.pack("I", flags))
        finally:
            os.close(handle)
        subprocess.run(["umount", str(mount)], check=True, timeout=60)
        subprocess.run(attach, check=True, timeout=60)
        assert assert_old_or_new(mount) == {"new"}  # the installation had returned, so it lasts
        assert kind().present(make_site(mount))
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True, timeout=60)
