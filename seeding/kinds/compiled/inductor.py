"""TorchInductor's cache: FX graphs, AOTAutograd entries, generated code and compiled kernels.

Layout, keys and trust: torch/_inductor/codecache.py (torch 2.6 to 2.13). Entries are found by content hash,
never by path, so the folder may move: tried by moving it and deleting the old one.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from warmseed.seeding.kinds.compiled import groups
from warmseed.seeding.kinds.compiled.cache import CacheUse, CompiledCache

__all__ = ["InductorCache"]


class InductorCache(CompiledCache):
    """``TORCHINDUCTOR_CACHE_DIR``. Pickles and code: only ever installed from a signed bundle."""

    name = "inductor"
    # Kernels for a CPU are compiled with -march=native, and torch's own key does not cover the exact CPU.
    needs = ("machine", "cpu_flags", "glibc", "python_abi", "torch", "triton")
    also = ("cxx", "device", "compute_capability", "cuda", "cpu_threads")
    device_bound = True  # generated wrappers call get_raw_stream(<index>)

    def examines(self, path: str) -> bool:
        return groups.is_group(path)

    def captured(self, path: str, data: bytes, roots: Iterable[Path]) -> bytes:
        return groups.to_relative(path, data, roots)  # Triton's own files may lie below this root

    def rewrites(self, path: str) -> bool:
        return groups.is_group(path)

    def localised(self, path: str, data: bytes, root: Path) -> bytes:
        return groups.to_absolute(path, data, root)

    def used(self, use: CacheUse) -> tuple[bool, str]:
        hits = use.counters.get("inductor_fxgraph_cache_hit", 0)
        missed = use.counters.get("inductor_fxgraph_cache_miss", 0)
        graphs = use.counters.get("aot_autograd_autograd_cache_hit", 0)
        graphs_missed = use.counters.get("aot_autograd_autograd_cache_miss", 0)
        if missed or graphs_missed:
            return (
                False,
                f"torch compiled {max(missed, graphs_missed)} graphs again, {max(hits, graphs)} came from the cache",
            )
        if use.changed:
            return super().used(use)
        if hits or graphs:
            if use.appeared:
                return False, f"torch counted hits, yet {len(use.appeared)} files are new, {use.appeared[0]} first"
            return True, f"torch counted {max(hits, graphs)} graphs from the cache and compiled none"
        return super().used(use)
