"""TileLang's cache: kernels by the hash of their TIR script, target and options; found by hash, so it may move.

``params.pkl`` (0.1.12) is a pickle and ``kernel_lib.so`` is host code: both run when an engine loads them.
"""

from __future__ import annotations

from warmseed.seeding.kinds.compiled.cache import CompiledCache

__all__ = ["TileLangCache"]


class TileLangCache(CompiledCache):
    """``TILELANG_CACHE_DIR``."""

    name = "tilelang"
    needs = ("machine", "glibc", "python_abi", "torch", "tilelang")
    also = ("device", "compute_capability", "cuda", "nvcc", "cxx")
