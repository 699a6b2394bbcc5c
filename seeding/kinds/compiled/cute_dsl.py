"""CuTe DSL's cache. FlashInfer's entries hash the *paths* of their sources together with the bytes.

``<op>/{meta.json,<kernel>.o}``: ``source_sha256`` in ``meta.json`` covers each source's path, and a mismatch makes
FlashInfer wipe the folder. So it works at the same install prefix only.
"""

from __future__ import annotations

from warmseed.seeding.kinds.compiled.cache import CompiledCache

__all__ = ["CuteDslCache"]


class CuteDslCache(CompiledCache):
    """``CUTE_DSL_CACHE_DIR``. Object files that are linked into the process: native code."""

    name = "cute_dsl"
    needs = ("machine", "glibc", "torch", "cutlass_dsl")
    also = ("flashinfer", "device", "compute_capability", "cuda")
    prefixes = ("site_packages",)
