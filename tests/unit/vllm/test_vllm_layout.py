"""Where a vLLM process keeps its caches, from its environment alone."""

from __future__ import annotations

from pathlib import Path

from warmseed.daemon.engines.vllm.layout import cache_roots, layout_below
from warmseed.seeding.kinds.autotune.layout import MANAGED_ROOT, PER_RANK_ROOT

ROOT = Path("/srv/warm")


def test_every_cache_of_an_engine_lies_below_the_canonical_root() -> None:
    layout = layout_below(ROOT, {"HOME": "/home/u"}, flashinfer="0.6.14", arch="90a")
    assert all(path.is_relative_to(ROOT) for path in layout.roots.values())
    assert layout.roots[PER_RANK_ROOT] == ROOT / "vllm/flashinfer_autotune_cache/0.6.14/90a"
    assert layout.roots[MANAGED_ROOT] == ROOT / "flashinfer/.cache/flashinfer/autotune"


def test_the_variables_lead_an_engine_to_the_same_folders() -> None:
    layout = layout_below(ROOT, {"HOME": "/home/u"}, flashinfer="0.6.14", arch="90a")
    engine = {"HOME": "/home/u", **layout.variables}
    assert cache_roots(engine, flashinfer="0.6.14", arch="90a") == layout.roots


def test_without_tables_no_folder_for_them_is_named() -> None:
    layout = layout_below(ROOT, {"HOME": "/home/u"}, flashinfer="", arch="")
    assert PER_RANK_ROOT not in layout.roots
    assert MANAGED_ROOT not in layout.roots


def test_an_operators_own_table_folder_stands() -> None:
    chosen = {"HOME": "/home/u", "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": "/tables"}
    layout = layout_below(ROOT, chosen, flashinfer="0.6.14", arch="90a")
    assert layout.roots[PER_RANK_ROOT] == Path("/tables")
    assert layout.variables["VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR"] == "/tables"


def test_an_inherited_python_path_is_kept_behind_ours_and_not_repeated() -> None:
    once = layout_below(ROOT, {"HOME": "/h", "PYTHONPATH": "/mine"}, flashinfer="", arch="")
    assert once.variables["PYTHONPATH"] == "/srv/warm/python:/mine"
    again = layout_below(ROOT, {"HOME": "/h", **once.variables}, flashinfer="", arch="")
    assert again.variables["PYTHONPATH"].split(":").count("/srv/warm/python") == 1
    assert "/mine" in again.variables["PYTHONPATH"].split(":")


def test_a_bare_environment_has_vllms_own_defaults() -> None:
    roots = cache_roots({"HOME": "/home/u"})
    assert roots["vllm"] == Path("/home/u/.cache/vllm/torch_compile_cache")
    assert roots["triton"] == Path("/home/u/.triton/cache")
    assert roots["flashinfer"] == Path("/home/u/.cache/flashinfer")
    assert "inductor" not in roots
