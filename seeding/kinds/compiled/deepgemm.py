"""DeepGEMM's cache: one folder a kernel, with its source and its machine code.

Layout: ``cache/kernel.<name>.<hash>/{kernel.cu,kernel.cubin}`` below ``DG_JIT_CACHE_DIR``. The hash covers the
compiler's flags, among them the absolute include path of the installed package: another install prefix gives
other names, so the cache would lie there unread.
"""

from __future__ import annotations

from warmseed.seeding.kinds.compiled.cache import CompiledCache

__all__ = ["DeepGemmCache"]


class DeepGemmCache(CompiledCache):
    """``DG_JIT_CACHE_DIR``. Its loader checks existence only, so empty files are never captured."""

    name = "deepgemm"
    needs = ("machine", "torch", "deep_gemm")
    also = ("device", "compute_capability", "cuda", "nvcc")
    prefixes = ("site_packages", "cuda_home")
