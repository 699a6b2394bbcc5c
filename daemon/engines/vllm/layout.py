"""Where a vLLM process keeps its warmup caches: below one canonical root, or wherever its environment says. Pure.

Variables and defaults: vllm/envs.py, flashinfer/jit/env.py, triton/knobs.py, torch/_inductor/runtime/cache_dir_utils.py
and the packages named below. The names of the caches are those of `warmseed.seeding.kinds.compiled`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from warmseed.daemon.engines.base import CacheLayout
from warmseed.seeding.kinds.autotune.layout import MANAGED_ROOT, PER_RANK_ROOT, managed_root, per_rank_root

__all__ = ["MODULES", "cache_roots", "layout_below"]

MODULES = ("torch._inductor.compile_fx", "transformers.modeling_utils", "vllm.v1.engine.core")  # every engine imports

_BELOW = {  # cache -> (variable, folder below the canonical root)
    "inductor": ("TORCHINDUCTOR_CACHE_DIR", "inductor"),
    "triton": ("TRITON_CACHE_DIR", "triton"),
    "deepgemm": ("DG_JIT_CACHE_DIR", "deep_gemm"),
    "tilelang": ("TILELANG_CACHE_DIR", "tilelang"),
    "cute_dsl": ("CUTE_DSL_CACHE_DIR", "cute_dsl"),
}


def layout_below(cache_root: Path, environ: Mapping[str, str], *, flashinfer: str, arch: str) -> CacheLayout:
    """Every cache below `cache_root`, and the variables that put an engine's caches there.

    `flashinfer` is its version and `arch` FlashInfer's name of this node's GPU architectures, such as ``90a``; both
    are empty without a GPU, and then there are no tables.
    """
    variables = {variable: str(cache_root / folder) for variable, folder in _BELOW.values()}
    variables["VLLM_CACHE_ROOT"] = str(cache_root / "vllm")
    variables["FLASHINFER_WORKSPACE_BASE"] = str(cache_root / "flashinfer")
    # FlashInfer modules that were compiled elsewhere come as a package; see the kind of compiled caches.
    python = str(cache_root / "python")
    inherited = [part for part in environ.get("PYTHONPATH", "").split(":") if part and part != python]
    variables["PYTHONPATH"] = ":".join((python, *inherited))
    for name in ("VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR", "FLASHINFER_AUTOTUNE_CACHE_DIR"):
        if environ.get(name):
            variables[name] = environ[name]  # an operator's own choice stands
    return CacheLayout(roots=cache_roots(variables, flashinfer=flashinfer, arch=arch), variables=variables)


def cache_roots(environ: Mapping[str, str], *, flashinfer: str = "", arch: str = "") -> dict[str, Path]:
    """The folder of each cache for a process with that environment; those with no fixed place are left out."""
    home = Path(environ.get("HOME") or Path.home())
    vllm = Path(environ.get("VLLM_CACHE_ROOT") or Path(environ.get("XDG_CACHE_HOME") or home / ".cache") / "vllm")
    workspace = Path(environ.get("FLASHINFER_WORKSPACE_BASE") or home) / ".cache" / "flashinfer"
    roots = {"vllm": vllm.expanduser() / "torch_compile_cache", "flashinfer": workspace}
    roots.update({name: Path(environ[variable]) for name, (variable, _) in _BELOW.items() if environ.get(variable)})
    roots.setdefault("triton", home / ".triton" / "cache")
    if flashinfer and arch:
        roots[PER_RANK_ROOT] = per_rank_root(environ, flashinfer_version=flashinfer, arch=arch)
        roots[MANAGED_ROOT] = managed_root(environ)
    return roots
