"""A process that stops while it holds a lock of the node costs the others their limit, and not for ever."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from warmseed.filelock import file_lock
from warmseed.seeding.bundle.trees import Trees
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.trust import marks, probation
from warmseed.seeding.trust.judge import Mark
from warmseed.stores import disk
from warmseed.stores.errors import StoreError

_HOLDER = """
import sys
from pathlib import Path
from warmseed.filelock import file_lock
with file_lock(Path(sys.argv[1]), 5):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def stopped_holder(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds the lock of `path` and has met SIGSTOP."""
    command = [sys.executable, "-c", _HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == b"held\n"
            holder.send_signal(signal.SIGSTOP)
            yield holder
        finally:
            holder.kill()


def test_a_lock_is_waited_for_within_its_limit_and_a_dead_holder_lets_go(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with stopped_holder(path) as holder:
        with pytest.raises(TimeoutError, match=r"held this lock for 0.1 s.*lock"), file_lock(path, 0.1):
            pass
        holder.kill()
        with file_lock(path, 30):
            pass


def test_a_lock_behind_a_link_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="link"), file_lock(tmp_path / "link", 0):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_the_disk_tier_refuses_a_write_and_takes_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_LOCK_SECONDS", 0.1)

    async def main() -> None:
        store = disk.DiskStore(tmp_path)
        await store.put("a", b"1")
        with stopped_holder(tmp_path / "lock"):
            with pytest.raises(StoreError, match="another process has held this lock"):
                await store.put("b", b"2")
            assert await store.get("a", limit=1) == b"1"
        await store.put("b", b"2")
        assert await store.get("b", limit=1) == b"2"

    asyncio.run(main())


def test_no_history_is_written_and_nothing_installed_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "LOCK_SECONDS", 0.1)
    path = tmp_path / "highest.json"
    mark = Mark(generation=3, issued_at=1_800_000_000, sha256="ab" * 32)
    with stopped_holder(tmp_path / "highest.json.lock"), pytest.raises(OSError, match="another process"):
        marks.save_mark(path, "folder", mark)
    assert not path.exists()
    marks.save_mark(path, "folder", mark)
    assert marks.load_marks(path).marks == {"folder": mark}


def test_trials_and_installations_are_refused_as_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probation, "LOCK_SECONDS", 0.1)
    record = probation.Probation(tmp_path)
    with (
        stopped_holder(tmp_path / "probation.json.lock"),
        pytest.raises(ArtifactRefused, match="record of trials") as no,
    ):
        record.begin("flashinfer_autotune", "ab" * 32, 1, "dp0_rank0")
    assert no.value.reason == "busy"
    trees = Trees(tmp_path / "state")
    with trees.locked():
        pass
    with (
        stopped_holder(trees.base / "lock"),
        pytest.raises(ArtifactRefused, match="works locally") as busy,
        trees.locked(seconds=0.1),
    ):
        pass
    assert busy.value.reason == "busy"
