"""Disks that fail, fill up or are read-only, and processes that die: no table is ever half there."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.support.fleet import Node
from tests.support.tables import H200_V1, local_path, payload_of, put_local, table_manifest, table_site, table_text

from warmseed.seeding.kinds.autotune.kind import FlashInferAutotune
from warmseed.seeding.kinds.autotune.layout import MANAGED_ROOT, PER_RANK_ROOT
from warmseed.seeding.kinds.autotune.table import parse_table
from warmseed.seeding.rejected import list_rejected
from warmseed.seeding.trust.keys import PublisherKey

KIND = FlashInferAutotune()
ROOT = Path(__file__).parents[2]


def leftovers(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob(".warmseed-*")]


@pytest.mark.parametrize("step", ["fsync", "replace", "write", "fchmod"])
def test_a_disk_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    site = table_site(tmp_path)
    before = table_text(2, tactic=7)
    path = put_local(site, before)
    payload = payload_of(tmp_path, H200_V1)
    real = {"fsync": os.fsync, "replace": os.replace}

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    if step in real:
        monkeypatch.setattr(os, step, full)
        with pytest.raises(OSError, match="no space left"):
            KIND.install(table_manifest(H200_V1, site), payload, None, site)
        monkeypatch.setattr(os, step, real[step])
    else:
        # A real limit on the size of files that this process may write.
        code = (
            "import resource, signal, sys\n"
            "from pathlib import Path\n"
            "from tests.support.tables import *\n"
            "from warmseed.seeding.kinds.autotune.kind import FlashInferAutotune\n"
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            f"site = table_site(Path({str(tmp_path)!r}))\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))\n"
            "try:\n"
            f"    FlashInferAutotune().install(table_manifest(H200_V1, site), Path({str(payload)!r}), None, site)\n"
            "except OSError as error:\n"
            "    sys.exit(40 if error.errno == 27 else 41)\n"
        )
        child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False)
        assert child.returncode == 40
    assert path.read_bytes() == before
    assert leftovers(tmp_path) == []


def test_a_store_that_fills_up_half_way_holds_none_of_the_new_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = table_site(tmp_path, homes=(MANAGED_ROOT,))
    KIND.install(table_manifest(table_text(2), site), payload_of(tmp_path, table_text(2)), None, site)
    entries = next((site.roots[MANAGED_ROOT] / "v2").iterdir()) / "entries"
    before = {path.name: path.read_bytes() for path in entries.iterdir()}
    real, count = os.link, 0

    def failing(*arguments: object, **options: object) -> None:
        nonlocal count
        count += 1
        if count > 3:
            raise OSError(errno.ENOSPC, "no space left")
        real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "link", failing)
    with pytest.raises(OSError, match="no space left"):
        KIND.install(table_manifest(table_text(9), site), payload_of(tmp_path, table_text(9)), None, site)
    assert {path.name: path.read_bytes() for path in entries.iterdir()} == before


def test_both_homes_get_the_table_or_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = table_site(tmp_path, homes=(PER_RANK_ROOT, MANAGED_ROOT))
    real = os.replace

    def failing(source: str, target: str, **options: int) -> None:
        if str(target).startswith("autotune_configs"):
            raise OSError(errno.EIO, "broken")
        real(source, target, **options)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="broken"):
        KIND.install(table_manifest(H200_V1, site), payload_of(tmp_path, H200_V1), None, site)
    assert not local_path(site).exists()
    assert list(site.roots[MANAGED_ROOT].rglob("entries/*.json")) == []


def test_a_disk_that_returns_other_bytes_is_found_out_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = table_site(tmp_path)
    real = os.fsync

    def corrupting(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(site.roots[PER_RANK_ROOT])):
            with contextlib.suppress(OSError):  # a folder
                os.pwrite(descriptor, b"X", 10)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", corrupting)
    with pytest.raises(OSError, match="returned other bytes"):
        KIND.install(table_manifest(H200_V1, site), payload_of(tmp_path, H200_V1), None, site)
    assert not local_path(site).exists()
    assert leftovers(tmp_path) == []


def test_a_process_killed_at_any_moment_of_an_installation_leaves_a_whole_table_or_none(tmp_path: Path) -> None:
    """A child installs over and over and is killed; whatever it was doing, FlashInfer could load what is there."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.support.tables import *\n"
        "from warmseed.seeding.kinds.autotune.kind import FlashInferAutotune\n"
        "base = Path(sys.argv[1])\n"
        "site = table_site(base)\n"
        "tables = [table_text(60, tactic=t) for t in range(8)]\n"
        "payloads = [payload_of(base, t) for t in tables]\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    for table, payload in zip(tables, payloads):\n"
        "        FlashInferAutotune().install(table_manifest(table, site), payload, None, site)\n"
    )
    for number in range(6):
        base = tmp_path / str(number)
        child = subprocess.Popen([sys.executable, "-c", code, str(base)], cwd=ROOT, stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        path = local_path(table_site(base))
        seen: set[int] = set()
        until = time.monotonic() + 30
        while len(seen) <= number and time.monotonic() < until:  # some moment, another one each time
            with contextlib.suppress(FileNotFoundError):
                seen.add(path.stat().st_mtime_ns)
        assert len(seen) > number
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        assert len(parse_table(path.read_bytes()).entries) == 60
        site = table_site(base)
        KIND.install(table_manifest(table_text(3), site), payload_of(base, table_text(3)), None, site)
        assert KIND.present(site)


@pytest.mark.parametrize("data", [b"[]", H200_V1])
def test_a_folder_that_cannot_be_written_costs_the_table_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    site = table_site(tmp_path)
    path = put_local(site, data)

    def read_only(*_: object, **__: object) -> int:
        raise OSError(errno.EROFS, "read-only file system")

    monkeypatch.setattr(os, "rename", read_only)
    monkeypatch.setattr(os, "replace", read_only)
    if data == b"[]":
        with pytest.raises(OSError, match="read-only"):
            KIND.heal(site)
    with pytest.raises(OSError, match="read-only"):
        KIND.install(table_manifest(table_text(9), site), payload_of(tmp_path, table_text(9)), None, site)
    assert path.read_bytes() == data
    assert list_rejected(site.state) == ()


def test_an_entry_that_vanishes_while_the_store_is_read_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = table_site(tmp_path, homes=(MANAGED_ROOT,))
    KIND.install(table_manifest(table_text(4), site), payload_of(tmp_path, table_text(4)), None, site)
    entries = next((site.roots[MANAGED_ROOT] / "v2").iterdir()) / "entries"
    gone = sorted(entries.iterdir())[1]
    real = os.listdir

    def listing(path: int | str | Path) -> list[str]:
        names = real(path)
        gone.unlink(missing_ok=True)  # FlashInfer 0.7.4 discards entries
        return names

    monkeypatch.setattr(os, "listdir", listing)
    capture = KIND.capture(site)
    assert capture is not None
    assert len(parse_table(capture.payload.read_bytes()).entries) == 3


def test_a_publisher_killed_at_any_moment_leaves_nothing_that_a_node_half_sees(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from tests.support.fleet import Node\n"
        "from tests.support.tables import *\n"
        "from warmseed.seeding.trust.keys import PublisherKey\n"
        "from warmseed.seeding.kinds.autotune.kind import FlashInferAutotune\n"
        "base, store, key = Path(sys.argv[1]), sys.argv[2], PublisherKey('fleet', b'k' * 32)\n"
        "async def main():\n"
        "    for number in range(1, 10**6):\n"
        "        site = table_site(base)\n"
        "        put_local(site, table_text(60, tactic=number % 50))\n"
        "        async with Node.opened(site.state, f'file:{store}', key=key, trusted=key) as node:\n"
        "            await node.publish(FlashInferAutotune(), site)\n"
        "        print(number, flush=True)\n"
        "asyncio.run(main())\n"
    )
    key = PublisherKey("fleet", b"k" * 32)
    for number in range(4):
        store = tmp_path / f"store{number}"
        store.mkdir()
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / f"source{number}"), str(store)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert child.stdout is not None
        for _ in range(number):  # some publications are whole, the next is under way
            assert child.stdout.readline()
        until = time.monotonic() + 30
        manifests = 0
        while number == 0 and not manifests and time.monotonic() < until:
            manifests = sum("manifest" in str(path) for path in store.rglob("*"))
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()

        async def start(base: Path, store: Path = store) -> tuple[str, tuple[str, ...]]:
            site = table_site(base)
            async with Node.opened(site.state, f"file:{store}", key=key, trusted=key) as node:
                adoption = await node.adopt(KIND, site)
            return adoption.outcome, tuple(refusal.reason for refusal in adoption.refusals)

        outcome, refusals = asyncio.run(start(tmp_path / f"mirror{number}"))
        assert refusals == ()
        assert outcome in (("installed",) if number else ("installed", "none"))
        if outcome == "installed":
            assert len(parse_table(local_path(table_site(tmp_path / f"mirror{number}")).read_bytes()).entries) == 60
