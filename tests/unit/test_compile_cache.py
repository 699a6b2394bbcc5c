"""Bundles of compiled caches: exact capture, equal addresses, atomic installation, and the way back."""

from __future__ import annotations

import json
import os
import shutil
import stat
import threading
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from tests.support.sites import ENVIRONMENT, fill, make_manifest, make_site, tree

from warmseed.seeding.bundle.index import BundleIndex
from warmseed.seeding.environment import UNKNOWN, Environment
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.kinds.base import Capture, Evidence, Site
from warmseed.seeding.kinds.compiled.bundle import CompileCacheKind
from warmseed.seeding.kinds.compiled.capture import Quiet
from warmseed.seeding.kinds.compiled.inductor import InductorCache
from warmseed.seeding.kinds.compiled.triton import TritonCache

FAST = Quiet(settle=0.0, deadline=5.0)
FILES = {"ab/cab.py": b"print(1)\n", "ab/cab.so": b"\x7fELF" + b"x" * 3000, "fxgraph/k/v": b"\x80pickle"}


def kind() -> CompileCacheKind:
    return CompileCacheKind([InductorCache(), TritonCache()], quiet=FAST)


def captured(site: Site) -> Capture:
    capture = kind().capture(site)
    assert capture is not None
    return capture


def index_of(capture: Capture) -> BundleIndex:
    assert capture.index is not None
    return msgspec.json.decode(capture.index, type=BundleIndex)


@pytest.fixture
def source(tmp_path: Path) -> Site:
    site = make_site(tmp_path / "source")
    fill(site.roots["inductor"], FILES)
    return site


def install(capture: Capture, source: Site, site: Site, *, generation: int = 1):
    return kind().install(make_manifest(capture, source, generation=generation), capture.payload, capture.index, site)


def test_an_installed_bundle_is_the_captured_tree_with_exact_times(source: Site, tmp_path: Path) -> None:
    target = make_site(tmp_path / "target")
    installation = install(captured(source), source, target)
    root = target.roots["inductor"]
    assert tree(root) == FILES
    for name in FILES:
        assert (root / name).stat().st_mtime_ns == 1_700_000_000_123_456_789
    assert installation.complete
    assert set(installation.files) == {f"inductor/{name}" for name in FILES}
    assert kind().present(target)


def test_only_the_owner_can_read_what_was_installed(source: Site, tmp_path: Path) -> None:
    target = make_site(tmp_path / "target")
    install(captured(source), source, target)
    root = target.roots["inductor"]
    assert stat.S_IMODE((root / "ab/cab.so").stat().st_mode) == 0o700
    assert stat.S_IMODE((root / "ab/cab.py").stat().st_mode) == 0o600
    for folder in (root.resolve(), root / "ab", root.resolve().parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_equal_caches_have_one_address_on_every_host(source: Site, tmp_path: Path) -> None:
    other = make_site(tmp_path / "elsewhere" / "deep")
    fill(other.roots["inductor"], dict(reversed(FILES.items())), mtime_ns=1_600_000_000_000_000_001)
    os.chmod(other.roots["inductor"] / "ab/cab.py", 0o640)
    one, two = captured(source), captured(other)
    assert one.sha256 == two.sha256
    assert one.stored == two.stored
    assert one.index != two.index  # times and roots stand in the index


def test_an_empty_cache_is_nothing_to_publish(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    assert kind().capture(site) is None
    site.roots["inductor"].mkdir(parents=True)
    assert kind().capture(site) is None


def test_locks_temporary_and_empty_files_stay_behind(source: Site) -> None:
    root = source.roots["inductor"]
    fill(root, {"locks/k.lock": b"", "ab/x.lock": b"1", "ab/y.tmp": b"1", "tmp.pid_3/z.cubin": b"1", "ab/e.so": b""})
    capture = captured(source)
    assert {f.relative for f in index_of(capture).files} == set(FILES)
    assert "empty" in capture.left_out["inductor/ab/e.so"]


def test_links_are_never_followed_and_nothing_outside_the_root_is_read(source: Site, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"do not publish")
    root = source.roots["inductor"]
    (root / "ab" / "link.so").symlink_to(secret)
    (root / "folder").symlink_to(tmp_path)
    os.mkfifo(root / "pipe")
    capture = captured(source)
    assert {f.relative for f in index_of(capture).files} == set(FILES)
    assert "link" in capture.left_out["inductor/ab/link.so"]
    assert "link" in capture.left_out["inductor/folder"]
    assert "inductor/pipe" in capture.left_out


def test_a_file_that_holds_its_roots_path_is_marked(source: Site) -> None:
    root = source.roots["inductor"]
    fill(root, {"p.py": f"open('{root}/x')".encode(), "q.bin": b"\0" + os.fsencode(source.roots["triton"]) + b"/k"})
    bound = {f.relative for f in index_of(captured(source)).files if f.bound}
    assert bound == {"p.py", "q.bin"}


def test_capture_waits_until_nothing_changes(source: Site) -> None:
    root = source.roots["inductor"]
    writes = iter(range(3))

    class Restless(InductorCache):
        def skips(self, path: str) -> bool:
            if path == "ab" and (n := next(writes, None)) is not None:
                fill(root, {f"late{n}": b"1"})
            return super().skips(path)

    capture = CompileCacheKind([Restless()], quiet=FAST).capture(source)
    assert capture is not None
    assert {f"late{n}" for n in range(3)} <= {f.relative for f in index_of(capture).files}


def test_a_cache_that_never_rests_is_left_for_a_later_start(source: Site) -> None:
    root = source.roots["inductor"]
    count = iter(range(10**6))

    class Busy(InductorCache):
        def skips(self, path: str) -> bool:
            fill(root, {"ab/cab.py": str(next(count)).encode()})
            return super().skips(path)

    with pytest.raises(ArtifactRefused) as refused:
        CompileCacheKind([Busy()], quiet=Quiet(settle=0.0, deadline=0.2)).capture(source)
    assert refused.value.reason == "busy"


def test_a_file_that_changes_while_it_is_read_fails_the_capture(source: Site) -> None:
    class Rewriting(InductorCache):
        def examines(self, path: str) -> bool:
            return True

        def captured(self, path: str, data: bytes, roots: object) -> bytes:
            fill(source.roots["inductor"], {"ab/cab.py": b"print(2)\n"})
            return data

    with pytest.raises(ArtifactRefused, match="changed") as refused:
        CompileCacheKind([Rewriting()], quiet=FAST).capture(source)
    assert refused.value.reason == "busy"
    assert list((source.state / "compiled" / "captured").iterdir()) == []


@pytest.mark.parametrize("late", [0, 8, 10, 5000])
def test_a_file_that_grows_or_shrinks_before_it_is_read_fails_the_capture(source: Site, late: int) -> None:
    class Resizing(InductorCache):
        def refuses(self, path: str, size: int) -> str | None:
            os.truncate(source.roots["inductor"] / "ab/cab.py", late)
            return None

    assert len(FILES["ab/cab.py"]) == 9
    with pytest.raises(ArtifactRefused, match="changed while it was read") as refused:
        CompileCacheKind([Resizing()], quiet=FAST).capture(source)
    assert refused.value.reason == "busy"


# -- the switch ----------------------------------------------------------------------------------------


def test_an_engines_own_files_come_back_when_a_bundle_is_taken_back(source: Site, tmp_path: Path) -> None:
    target = make_site(tmp_path / "target")
    own = {"mine/a.so": b"own work"}
    fill(target.roots["inductor"], own)
    installation = install(captured(source), source, target)
    assert tree(target.roots["inductor"]) == FILES
    kind().retract(installation, target)
    assert not target.roots["inductor"].is_symlink()
    assert tree(target.roots["inductor"]) == own
    quarantined = list((target.state / "compiled" / "quarantine").iterdir())
    assert len(quarantined) == 1
    assert not kind().present(target)


def test_taking_back_a_generation_brings_back_the_one_before(source: Site, tmp_path: Path) -> None:
    target = make_site(tmp_path / "target")
    install(captured(source), source, target)
    fill(source.roots["inductor"], {"ab/new.py": b"2"})
    second = install(captured(source), source, target, generation=2)
    assert "ab/new.py" in tree(target.roots["inductor"])
    kind().retract(second, target)
    assert tree(target.roots["inductor"]) == FILES
    assert kind().present(target)


def test_a_path_never_leads_to_a_partial_tree_while_bundles_come_and_go(source: Site, tmp_path: Path) -> None:
    target = make_site(tmp_path / "target")
    first = captured(source)
    first_payload = tmp_path / "first"
    shutil.copy(first.payload, first_payload)
    first = replace(first, payload=first_payload)
    fill(source.roots["inductor"], {"ab/new.py": b"2"})
    second = captured(source)
    install(first, source, target)
    root, problems, done = target.roots["inductor"], [], threading.Event()

    def watch() -> None:
        while not done.is_set():
            handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
            try:
                names = set(os.listdir(handle))
                below = os.open("ab", os.O_RDONLY | os.O_DIRECTORY, dir_fd=handle)
                inner = set(os.listdir(below))
                os.close(below)
            finally:
                os.close(handle)
            if not ({"ab", "fxgraph"} <= names) or inner not in ({"cab.py", "cab.so"}, {"cab.py", "cab.so", "new.py"}):
                problems.append((names, inner))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for generation in range(2, 12):
            install(second if generation % 2 == 0 else first, source, target, generation=generation)
    finally:
        done.set()
        watcher.join(10)
    assert problems == []


def test_the_same_bundle_is_installed_once_and_a_damaged_one_again(source: Site, tmp_path: Path) -> None:
    target = make_site(tmp_path / "target")
    capture = captured(source)
    first, second = install(capture, source, target), install(capture, source, target)
    assert first.folder == second.folder
    (target.roots["inductor"] / "ab/cab.so").write_bytes(b"rot")
    third = install(capture, source, target)
    assert third.folder != first.folder
    assert tree(target.roots["inductor"]) == FILES


def test_eight_threads_installing_one_bundle_leave_one_tree(source: Site, tmp_path: Path) -> None:
    target = make_site(tmp_path / "target")
    capture = captured(source)
    folders: list[Path | None] = []

    def work() -> None:
        folders.append(install(capture, source, target).folder)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(folders) == 8
    assert len(set(folders)) == 1
    assert list((target.state / "compiled" / "staging").iterdir()) == []


def test_ranks_that_share_cache_folders_keep_each_others_files(tmp_path: Path) -> None:
    shared, captures = tmp_path / "cache", []
    for rank in range(2):
        site = make_site(tmp_path / f"source{rank}", world_rank=rank)
        fill(site.roots["inductor"], {f"r{rank}/k.so": f"rank {rank}".encode()})
        captures.append((captured(site), site))
    targets = [make_site(tmp_path / "node", root=shared, world_rank=rank) for rank in range(2)]
    for (capture, origin), target in zip(captures, targets, strict=True):
        install(capture, origin, target)
    assert set(tree(shared / "inductor")) == {"r0/k.so", "r1/k.so"}
    assert all(kind().present(target) for target in targets)


def test_two_captures_of_the_same_bytes_are_two_files(source: Site) -> None:
    """Each rank deletes what it published from; a neighbour may still be reading the same bundle."""
    one, two = captured(source), captured(replace(source, world_rank=1))
    assert one.sha256 == two.sha256
    one.payload.unlink()
    assert two.payload.is_file()


def test_what_a_dead_process_captured_is_swept_after_a_day(source: Site) -> None:
    forgotten, waiting = captured(source).payload, captured(source).payload
    os.utime(forgotten, (1, 1))
    captured(source)
    assert not forgotten.exists()
    assert waiting.exists()


def test_ranks_that_share_a_bundle_install_it_once_and_take_it_back_to_the_generation_before(
    source: Site, tmp_path: Path
) -> None:
    before, ranks = captured(source), [make_site(tmp_path / "node", world_rank=rank) for rank in range(4)]
    for site in ranks:
        install(before, source, site)
    fill(source.roots["inductor"], {"ab/poison.so": b"bad"})
    poisoned = captured(source)
    installed = [install(poisoned, source, site, generation=2) for site in ranks]
    assert len({installation.folder for installation in installed}) == 1
    assert all(kind().present(site) for site in ranks)
    for site, installation in zip(ranks, installed, strict=True):  # an engine that dies takes all its ranks with it
        kind().retract(installation, site)
    assert tree(ranks[0].roots["inductor"]) == FILES
    assert all(kind().present(site) for site in ranks)


def test_a_rank_joins_no_tree_that_an_engine_has_changed(source: Site, tmp_path: Path) -> None:
    ranks = [make_site(tmp_path / "node", world_rank=rank) for rank in range(2)]
    capture = captured(source)
    first = install(capture, source, ranks[0])
    (ranks[0].roots["inductor"] / "ab/cab.so").write_bytes(b"rot")
    second = install(capture, source, ranks[1])
    assert second.folder != first.folder
    assert tree(ranks[1].roots["inductor"]) == FILES


def test_old_trees_are_pruned_but_never_the_live_one_or_its_predecessor(source: Site, tmp_path: Path) -> None:
    target = make_site(tmp_path / "target")
    for generation in range(1, 6):
        fill(source.roots["inductor"], {f"g{generation}.py": b"1"})
        install(captured(source), source, target, generation=generation)
    trees = sorted(path.name.partition("-")[0] for path in (target.state / "compiled" / "trees").iterdir())
    assert trees == ["4", "5"]


# -- what does not fit -----------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["machine", "cpu_flags", "python_abi", "torch", "triton", "glibc", "cxx"])
def test_a_bundle_for_another_toolchain_cpu_or_python_is_not_installed(
    source: Site, tmp_path: Path, field: str
) -> None:
    target = make_site(tmp_path / "target", caches=("inductor",), environment={**ENVIRONMENT, field: "other"})
    with pytest.raises(ArtifactRefused, match=field) as refused:
        install(captured(source), source, target)
    assert refused.value.reason == "relocation"
    assert not os.path.lexists(target.roots["inductor"])


def test_an_unknown_of_our_own_matches_nothing(source: Site, tmp_path: Path) -> None:
    target = make_site(tmp_path / "target", environment={**ENVIRONMENT, "cpu_flags": UNKNOWN})
    assert "cpu_flags" in kind().environment(target).unknown
    missing = make_site(tmp_path / "target", environment={"torch": "2.13.0"})
    assert "cpu_flags" in kind().environment(missing).unknown


def test_a_bundle_for_another_device_index_is_not_installed(source: Site, tmp_path: Path) -> None:
    capture = captured(source)
    assert capture.device_index == 0
    with pytest.raises(ArtifactRefused, match="device index") as refused:
        install(capture, source, make_site(tmp_path / "target", device_index=1))
    assert refused.value.reason == "rank"


def test_what_identifies_a_pod_is_no_part_of_the_key(source: Site) -> None:
    moved = replace(source, environment=Environment({**ENVIRONMENT, "host": "pod-7", "VLLM_PORT": "1234"}))
    assert kind().environment(moved).digest == kind().environment(source).digest


def test_a_cache_the_engine_does_not_have_is_left_out_and_the_rest_installed(tmp_path: Path) -> None:
    source = make_site(tmp_path / "source")
    fill(source.roots["inductor"], FILES)
    fill(source.roots["triton"], {"HASH/k.cubin": b"c"})
    target = make_site(tmp_path / "target", caches=("inductor",))
    installation = install(captured(source), source, target)
    assert installation.complete  # nothing that this engine wants is missing
    assert "triton" in installation.left_out
    assert tree(target.roots["inductor"]) == FILES


# -- proof of use ----------------------------------------------------------------------------------------


HIT = {"inductor_fxgraph_cache_hit": 3}


@pytest.mark.parametrize(
    ("counters", "act", "used", "word"),
    [
        (HIT, None, True, "3 graphs"),
        ({**HIT, "inductor_fxgraph_cache_miss": 1}, None, False, "compiled 1"),
        (HIT, "new", False, "new"),
        ({}, "rewrite", False, "rewritten"),
        ({}, None, False, "never read"),
        ({}, "read", True, "read"),
    ],
)
def test_a_bundle_counts_as_used_only_on_the_engines_own_evidence(
    source: Site, tmp_path: Path, counters: dict[str, int], act: str | None, used: bool, word: str
) -> None:
    target = make_site(tmp_path / "target")
    installation = install(captured(source), source, target)
    root = target.roots["inductor"]
    if act == "new":
        fill(root, {"zz/new.so": b"1"})
    elif act == "rewrite":
        fill(root, {"ab/cab.so": b"1"})
    elif act == "read":
        (root / "ab/cab.so").read_bytes()
    verdict = kind().judge(installation, Evidence(seconds=1.0, counters=counters), target)
    assert verdict.used is used
    assert word in verdict.reason
    assert verdict.per_cache == {"inductor": used}


def test_notes_that_torch_writes_at_every_start_are_no_rebuild(source: Site, tmp_path: Path) -> None:
    """Seen with vLLM on an H200: a graph that was loaded, seven of its notes written anew with other milliseconds."""
    fill(source.roots["inductor"], {"ab/5f.best_config": b'{"time_taken_ms": 29}'})
    target = make_site(tmp_path / "target")
    installation = install(captured(source), source, target)
    root = target.roots["inductor"]
    fill(root, {"ab/5f.best_config": b'{"time_taken_ms": 31}', "cd/77.best_config": b"{}"})
    (root / "ab/cab.so").read_bytes()
    assert kind().judge(installation, Evidence(seconds=1.0), target).used
    assert kind().present(target)
    again = install(captured(source), source, target)
    assert again.folder == installation.folder, "installed anew at every start for nothing"


@pytest.mark.parametrize(
    ("path", "used"),
    [("ab/graph.lock", True), ("ab/locks/graph", True), ("ab/5f.best_config", True), ("ab/new.so", False)],
)
def test_a_file_that_an_engine_reports_as_new_counts_if_it_was_compiled(
    source: Site, tmp_path: Path, path: str, used: bool
) -> None:
    """An engine lists whatever appeared in its folders; it holds locks also for what it only loads."""
    target = make_site(tmp_path / "target")
    installation = install(captured(source), source, target)
    (target.roots["inductor"] / "ab/cab.so").read_bytes()
    evidence = Evidence(seconds=1.0, new_files=(f"inductor/{path}",))
    assert kind().judge(installation, evidence, target).used is used


def test_an_installation_is_found_again_after_a_restart(source: Site, tmp_path: Path) -> None:
    target = make_site(tmp_path / "target")
    installation = install(captured(source), source, target)
    again = kind().current(target)
    assert again == installation
    assert kind().current(make_site(tmp_path / "target", world_rank=1)) is None


def test_an_index_is_plain_json_with_integer_times(source: Site) -> None:
    index = captured(source).index
    assert index is not None
    for file in json.loads(index)["files"]:
        assert isinstance(file["mtime_ns"], int)
        assert isinstance(file["mode"], int)
