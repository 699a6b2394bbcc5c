"""Relocation rules: what can't work at another place is left out with the reason, and what can is installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.sites import ENVIRONMENT, fill, make_manifest, make_site, tree

from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.kinds.base import Capture, Evidence, Installation, Site
from warmseed.seeding.kinds.compiled.bundle import CompileCacheKind
from warmseed.seeding.kinds.compiled.cache import CompiledCache
from warmseed.seeding.kinds.compiled.capture import Quiet
from warmseed.seeding.kinds.compiled.cute_dsl import CuteDslCache
from warmseed.seeding.kinds.compiled.deepgemm import DeepGemmCache
from warmseed.seeding.kinds.compiled.flashinfer import FlashInferCache
from warmseed.seeding.kinds.compiled.tilelang import TileLangCache
from warmseed.seeding.kinds.compiled.triton import TritonCache
from warmseed.seeding.kinds.compiled.vllm import VllmCache

TOOLS = {
    **ENVIRONMENT,
    "vllm": "0.26.0",
    "flashinfer": "0.6.14",
    "deep_gemm": "2.1",
    "tilelang": "0.1.12",
    "cutlass_dsl": "4.3",
    "site_packages": "/opt/venv/lib",
    "cuda_home": "/usr/local/cuda",
    "flashinfer_jit_cache": "absent",
    "compute_capability": "9.0",
}


def kind_of(*caches: CompiledCache) -> CompileCacheKind:
    return CompileCacheKind(caches, quiet=Quiet(settle=0.0))


def moved(
    tmp_path: Path, cache: CompiledCache, files: dict[str, bytes], *, same_root: bool = False, **changes: str
) -> tuple[Site, Site, Capture, Installation]:
    """Capture `files` at one root, delete it, and install at another one (or the same)."""
    source = make_site(tmp_path / "source", caches=(cache.name,), environment=TOOLS)
    fill(source.roots[cache.name], files)
    kind = kind_of(cache)
    capture = kind.capture(source)
    assert capture is not None
    payload = tmp_path / "payload"
    shutil.copy(capture.payload, payload)
    shutil.rmtree(tmp_path / "source")
    root = source.cache_root if same_root else None
    target = make_site(tmp_path / "target", root=root, caches=(cache.name,), environment={**TOOLS, **changes})
    installation = kind.install(make_manifest(capture, source), payload, capture.index, target)
    return source, target, capture, installation


# -- Triton ----------------------------------------------------------------------------------------------


def group(root: Path, folder: str, *names: str) -> bytes:
    return json.dumps({"child_paths": {name: str(root / folder / name) for name in names}}).encode()


def test_tritons_group_files_point_into_the_new_root_after_the_old_one_is_gone(tmp_path: Path) -> None:
    root = tmp_path / "source" / "cache" / "triton"
    files = {
        "HASH/k.cubin": b"cubin",
        "HASH/k.json": b"{}",
        "HASH/__grp__k.json": group(root, "HASH", "k.cubin", "k.json"),
    }
    source, target, _, installation = moved(tmp_path, TritonCache(), files)
    here = target.roots["triton"]
    paths = json.loads((here / "HASH/__grp__k.json").read_bytes())["child_paths"]
    assert paths == {name: str(here / "HASH" / name) for name in ("k.cubin", "k.json")}
    assert all(Path(path).read_bytes() == files[f"HASH/{name}"] for name, path in paths.items())
    assert not source.roots["triton"].exists()
    assert installation.complete


def test_group_files_are_equal_on_every_host_inside_a_bundle(tmp_path: Path) -> None:
    digests = set()
    for name in ("one", "another/deeper"):
        site = make_site(tmp_path / name, caches=("triton",))
        fill(site.roots["triton"], {"H/k.cubin": b"c", "H/__grp__k.json": group(site.roots["triton"], "H", "k.cubin")})
        capture = kind_of(TritonCache()).capture(site)
        assert capture is not None
        digests.add(capture.sha256)
    assert len(digests) == 1


def test_a_group_file_through_an_installed_tree_can_be_captured_again(tmp_path: Path) -> None:
    root = tmp_path / "source" / "cache" / "triton"
    files = {"H/k.cubin": b"c", "H/__grp__k.json": group(root, "H", "k.cubin")}
    _, target, first, _ = moved(tmp_path, TritonCache(), files)
    again = kind_of(TritonCache()).capture(target)
    assert again is not None
    assert again.sha256 == first.sha256


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"child_paths":{"k":"/etc/passwd"}}', b'{"child_paths":{"../k":"../k"}}', b'{"child_paths":[]}'],
)
def test_a_group_file_that_is_broken_or_points_elsewhere_is_not_captured(tmp_path: Path, body: bytes) -> None:
    site = make_site(tmp_path, caches=("triton",))
    fill(site.roots["triton"], {"H/__grp__k.json": body, "H/k.cubin": b"c"})
    capture = kind_of(TritonCache()).capture(site)
    assert capture is not None
    assert "triton/H/__grp__k.json" in capture.left_out


# -- vLLM ------------------------------------------------------------------------------------------------


def vllm_files(root: Path) -> dict[str, bytes]:
    artifact = b"\x80\x04pickle " + os.fsencode(root) + b"/0123456789/rank_0_0/backbone/artifact"
    return {
        "0123456789/rank_0_0/backbone/vllm_compile_cache.py": b"{}",
        "0123456789/rank_0_0/backbone/artifact_compile_range_1": artifact,
        "0123456789/rank_1_0/backbone/artifact_compile_range_1": b"the other rank's",
        "torch_aot_compile/ff/rank_0_0/model": artifact,
        "torch_aot_compile/ff/inductor_cache/fxgraph/a/b": b"graph",
    }


def test_a_blank_list_of_compiled_graphs_is_not_captured(tmp_path: Path) -> None:
    site = make_site(tmp_path, caches=("vllm",))
    blank = "0123456789/rank_0_0/backbone/vllm_compile_cache.py"
    fill(site.roots["vllm"], {**vllm_files(site.roots["vllm"]), blank: b" \n"})
    capture = kind_of(VllmCache()).capture(site)
    assert capture is not None
    assert set(capture.left_out) == {f"vllm/{blank}"}


def test_an_aot_artifact_is_installed_only_at_the_root_it_names(tmp_path: Path) -> None:
    root = tmp_path / "source" / "cache" / "vllm"
    _, target, _, installation = moved(tmp_path, VllmCache(), vllm_files(root))
    assert set(tree(target.roots["vllm"])) == {"torch_aot_compile/ff/inductor_cache/fxgraph/a/b"}
    assert not installation.complete
    assert str(root) in installation.left_out["vllm"]
    assert "--cache-root" in installation.left_out["vllm"]


def test_at_another_root_what_could_be_installed_is_judged_and_nothing_else(tmp_path: Path) -> None:
    """vLLM compiles what was left out, and hits in what was not: that is use, and the reason tells what is missing."""
    root = tmp_path / "source" / "cache" / "vllm"
    _, target, _, installation = moved(tmp_path, VllmCache(), vllm_files(root))
    here = target.roots["vllm"]
    fill(here, {"0123456789/rank_0_0/backbone/artifact_compile_range_1": b"made here"})
    unread = kind_of(VllmCache()).judge(installation, Evidence(seconds=1.0), target)
    assert not unread.used
    (here / "torch_aot_compile/ff/inductor_cache/fxgraph/a/b").read_bytes()
    verdict = kind_of(VllmCache()).judge(installation, Evidence(seconds=1.0), target)
    assert verdict.used
    assert str(root) in verdict.reason
    fill(here, {"torch_aot_compile/ff/inductor_cache/fxgraph/a/b": b"compiled again"})
    assert not kind_of(VllmCache()).judge(installation, Evidence(seconds=1.0), target).used


def test_at_the_same_root_the_whole_cache_is_installed_other_ranks_folders_too(tmp_path: Path) -> None:
    root = tmp_path / "source" / "cache" / "vllm"
    _, target, _, installation = moved(tmp_path, VllmCache(), vllm_files(root), same_root=True)
    assert tree(target.roots["vllm"]) == vllm_files(root)
    assert installation.complete


def test_ranks_that_share_a_bundle_share_its_tree_and_each_is_judged_by_it(tmp_path: Path) -> None:
    root = tmp_path / "source" / "cache" / "vllm"
    source, target, capture, first = moved(tmp_path, VllmCache(), vllm_files(root), same_root=True)
    neighbour = replace(target, world_rank=1, device_index=1)
    manifest = make_manifest(replace(capture, device_index=1), replace(source, world_rank=1))
    second = kind_of(VllmCache()).install(manifest, tmp_path / "payload", capture.index, neighbour)
    assert second.folder == first.folder
    (target.roots["vllm"] / "torch_aot_compile/ff/rank_0_0/model").read_bytes()
    for site, installation in ((target, first), (neighbour, second)):
        assert kind_of(VllmCache()).present(site)
        assert kind_of(VllmCache()).judge(installation, Evidence(seconds=1.0), site).used


def test_from_vllm_0_33_on_the_whole_cache_may_move(tmp_path: Path) -> None:
    source = make_site(tmp_path / "source", caches=("vllm",), environment={**TOOLS, "vllm": "0.33.0"})
    fill(source.roots["vllm"], vllm_files(source.roots["vllm"]))
    kind = kind_of(VllmCache())
    capture = kind.capture(source)
    assert capture is not None
    target = make_site(tmp_path / "target", caches=("vllm",), environment={**TOOLS, "vllm": "0.33.0"})
    installation = kind.install(make_manifest(capture, source), capture.payload, capture.index, target)
    assert "torch_aot_compile/ff/rank_0_0/model" in tree(target.roots["vllm"])
    assert installation.complete


def test_vllms_own_word_that_it_compiled_again_outweighs_every_file(tmp_path: Path) -> None:
    root = tmp_path / "source" / "cache" / "vllm"
    _, target, _, installation = moved(tmp_path, VllmCache(), vllm_files(root), same_root=True)
    (target.roots["vllm"] / "torch_aot_compile/ff/rank_0_0/model").read_bytes()
    line = "WARNING Compiling model again due to a load failure from ..., reason: no attribute 'finalize_loading'"
    verdict = kind_of(VllmCache()).judge(installation, Evidence(seconds=1.0, lines=(line,)), target)
    assert not verdict.used
    assert "Compiling model again" in verdict.reason


# -- caches that hold their install prefix ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("cache", "files"),
    [
        (DeepGemmCache(), {"cache/kernel.gemm.0123/kernel.cu": b"c", "cache/kernel.gemm.0123/kernel.cubin": b"b"}),
        (CuteDslCache(), {"op_sm90a_cute_dsl/meta.json": b"{}", "op_sm90a_cute_dsl/k.o": b"o"}),
    ],
)
def test_a_cache_that_hashes_its_install_prefix_moves_to_the_same_prefix_only(
    tmp_path: Path, cache: CompiledCache, files: dict[str, bytes]
) -> None:
    _, target, _, installation = moved(tmp_path / "same", cache, files)
    assert tree(target.roots[cache.name]) == files
    assert installation.complete
    with pytest.raises(ArtifactRefused, match="site_packages") as refused:
        moved(tmp_path / "other", cache, files, site_packages="/usr/lib/python3")
    assert refused.value.reason == "relocation"


def test_an_empty_cubin_is_never_captured(tmp_path: Path) -> None:
    site = make_site(tmp_path, caches=("deepgemm",), environment=TOOLS)
    fill(site.roots["deepgemm"], {"cache/kernel.a.1/kernel.cubin": b"", "cache/kernel.b.2/kernel.cubin": b"x"})
    capture = kind_of(DeepGemmCache()).capture(site)
    assert capture is not None
    assert list(capture.left_out) == ["deepgemm/cache/kernel.a.1/kernel.cubin"]


def test_tilelangs_kernels_may_lie_anywhere(tmp_path: Path) -> None:
    files = {"abc/params.pkl": b"p", "abc/kernel_lib.so": b"so", "abc/manifest.json": b"{}"}
    _, target, _, installation = moved(tmp_path, TileLangCache(), files, site_packages="/elsewhere")
    assert tree(target.roots["tilelang"]) == files
    assert installation.complete


# -- FlashInfer ------------------------------------------------------------------------------------------


def ninja_tree(root: Path, sources: Path) -> None:
    """A FlashInfer-shaped module, built by the real ninja with the real compiler."""
    module = root / "0.6.14" / "90a" / "cached_ops" / "norm"
    generated = root / "0.6.14" / "90a" / "generated" / "norm"
    module.mkdir(parents=True)
    generated.mkdir(parents=True)
    sources.mkdir(parents=True, exist_ok=True)
    (sources / "norm.h").write_text("static int one() { return 1; }\n")
    (generated / "norm.cc").write_text('#include "norm.h"\nextern "C" int norm() { return one(); }\n')
    (module / "build.ninja").write_text(
        "ninja_required_version = 1.3\n"
        f"cflags = -O0 -fPIC -I{sources}\n"
        "rule compile\n  command = g++ -MMD -MF $out.d $cflags -c $in -o $out\n  depfile = $out.d\n  deps = gcc\n"
        "rule link\n  command = g++ -shared $in -o $out\n"
        f"build {module}/norm.cuda.o: compile {generated}/norm.cc\n"
        f"build {module}/norm.so: link {module}/norm.cuda.o\n"
        f"default {module}/norm.so\n"
    )
    subprocess.run(["ninja", "-f", "build.ninja"], cwd=module, check=True, capture_output=True, timeout=60)
    assert (module / "norm.so").stat().st_size


def flashinfer(
    tmp_path: Path, *, same_root: bool, touch_header: bool = False, **changes: str
) -> tuple[Site, Installation]:
    source = make_site(tmp_path / "source", caches=("flashinfer",), environment=TOOLS)
    headers = tmp_path / "site-packages"
    ninja_tree(source.roots["flashinfer"], headers)
    kind = kind_of(FlashInferCache())
    capture = kind.capture(source)
    assert capture is not None
    payload = tmp_path / "payload"
    shutil.copy(capture.payload, payload)
    shutil.rmtree(tmp_path / "source")
    if touch_header:
        os.utime(headers / "norm.h")
    root = source.cache_root if same_root else None
    target = make_site(tmp_path / "target", root=root, caches=("flashinfer",), environment={**TOOLS, **changes})
    return target, kind.install(make_manifest(capture, source), payload, capture.index, target)


def ninja_says(root: Path) -> str:
    build = root / "0.6.14" / "90a" / "cached_ops" / "norm" / "build.ninja"
    return subprocess.run(
        ["ninja", "-n", "-f", str(build)], cwd=build.parent, capture_output=True, text=True, timeout=60, check=False
    ).stdout


def test_at_the_same_root_ninja_has_no_work_to_do(tmp_path: Path) -> None:
    target, installation = flashinfer(tmp_path, same_root=True)
    assert "no work to do" in ninja_says(target.roots["flashinfer"])
    assert installation.complete
    assert not (target.cache_root / "python").exists()


def load_provider(target: Site) -> dict[str, object]:
    """What FlashInfer reads from the provider package, in a process that has it on its path."""
    code = (
        "import json, ctypes, flashinfer_jit_cache as p\n"
        "a, = p.get_jit_cache_providers()\n"
        "n = ctypes.CDLL(p.get_jit_cache_dir() + '/norm/norm.so').norm()\n"
        "print(json.dumps({'version': p.__version__, 'modules': a.modules, 'archs': a.cuda_architectures, 'norm': n,"
        " 'same': a.jit_cache_dir == p.get_jit_cache_dir()}))"
    )
    environment = {**os.environ, **kind_of(FlashInferCache()).variables(target)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    return dict(json.loads(done.stdout))


EXPECTED = {"version": "0.6.14", "modules": ["norm"], "archs": ["sm90a"], "norm": 1, "same": True}


def test_what_lies_beside_the_jit_cache_stays_where_it_is(tmp_path: Path) -> None:
    source = make_site(tmp_path / "source", caches=("flashinfer",), environment=TOOLS)
    root = source.roots["flashinfer"]
    ninja_tree(root, tmp_path / "site-packages")
    kind = kind_of(FlashInferCache())
    fill(root, {"cubins/x.cubin": b"theirs", "autotune/ab/manifest.json": b"{}", "0.6.14/flashinfer_jit.log": b"log"})
    capture = kind.capture(source)
    assert capture is not None
    assert capture.index is not None
    names = [file["path"] for file in json.loads(capture.index)["files"]]
    jit = ("flashinfer/0.6.14/90a/cached_ops/", "flashinfer/0.6.14/90a/generated/")
    assert all(name.startswith(jit) for name in names)
    payload = Path(shutil.copy(capture.payload, tmp_path / "payload"))
    shutil.rmtree(source.state)
    shutil.rmtree(root / "0.6.14/90a")
    target = make_site(tmp_path / "target", root=source.cache_root, caches=("flashinfer",), environment=TOOLS)
    installation = kind.install(make_manifest(capture, source), payload, capture.index, target)
    assert "no work to do" in ninja_says(root)
    assert (root / "cubins/x.cubin").read_bytes() == b"theirs"
    assert (root / "autotune/ab/manifest.json").read_bytes() == b"{}"
    assert kind.present(target)
    assert kind.current(target) == installation
    again = kind.capture(target)
    assert again is not None
    assert again.sha256 == capture.sha256
    assert not any("link" in why for why in again.left_out.values())
    kind.retract(installation, target)
    assert not (root / "0.6.14/90a/cached_ops").exists()


def test_at_another_root_flashinfer_loads_the_modules_from_a_provider_package(tmp_path: Path) -> None:
    target, installation = flashinfer(tmp_path, same_root=False)
    assert not target.roots["flashinfer"].exists()
    assert load_provider(target) == EXPECTED
    assert installation.complete


def test_where_ninja_would_rebuild_the_provider_package_takes_over(tmp_path: Path) -> None:
    target, installation = flashinfer(tmp_path, same_root=True, touch_header=True)
    assert not os.path.lexists(target.roots["flashinfer"] / "0.6.14/90a/cached_ops")
    assert load_provider(target) == EXPECTED
    assert installation.complete
    assert len(list((target.state / "compiled" / "trees").iterdir())) == 1


def test_another_install_prefix_leads_to_the_provider_package(tmp_path: Path) -> None:
    target, _ = flashinfer(tmp_path, same_root=True, site_packages="/usr/lib")
    assert load_provider(target) == EXPECTED


def test_an_installed_jit_cache_package_is_never_hidden(tmp_path: Path) -> None:
    with pytest.raises(ArtifactRefused, match="flashinfer-jit-cache") as refused:
        flashinfer(tmp_path, same_root=False, flashinfer_jit_cache="0.6.14")
    assert refused.value.reason == "relocation"


def test_modules_that_flashinfer_builds_itself_show_that_the_provider_was_not_used(tmp_path: Path) -> None:
    target, installation = flashinfer(tmp_path, same_root=False)
    kind = kind_of(FlashInferCache())
    load_provider(target)
    assert kind.judge(installation, Evidence(seconds=1.0), target).used
    built = target.roots["flashinfer"] / "0.6.14/90a/cached_ops/norm/norm.so"
    built.parent.mkdir(parents=True)
    built.write_bytes(b"built again")
    verdict = kind.judge(installation, Evidence(seconds=1.0), target)
    assert not verdict.used
    assert "new files" in verdict.reason


def test_modules_from_a_provider_package_are_part_of_the_nodes_next_generation(tmp_path: Path) -> None:
    target, _ = flashinfer(tmp_path, same_root=False)
    kind = kind_of(FlashInferCache())
    again = kind.capture(target)
    assert again is not None
    assert again.index is not None
    names = [file["path"] for file in json.loads(again.index)["files"]]
    assert names == ["flashinfer/cached_ops/norm/norm.so"]
    payload = Path(shutil.copy(again.payload, tmp_path / "payload2"))
    manifest = make_manifest(again, target)
    shutil.rmtree(tmp_path / "target")
    kind.install(manifest, payload, again.index, target)  # same root, but nothing that ninja could be asked about
    assert load_provider(target) == EXPECTED
