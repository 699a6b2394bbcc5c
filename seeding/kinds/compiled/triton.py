"""Triton's cache: kernels as IR and machine code, launchers as Python extensions.

Layout: triton/runtime/cache.py (3.2 to 3.9). The key covers sources, options, compiler and GPU architecture;
launchers depend on the Python ABI and glibc as well. Relocation rewrites the group files, see `groups`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from warmseed.seeding.kinds.compiled import groups
from warmseed.seeding.kinds.compiled.cache import CompiledCache

__all__ = ["TritonCache"]


class TritonCache(CompiledCache):
    """``TRITON_CACHE_DIR``."""

    name = "triton"
    needs = ("machine", "glibc", "python_abi", "torch", "triton")
    also = ("cxx", "device", "compute_capability", "cuda")

    def examines(self, path: str) -> bool:
        return groups.is_group(path)

    def captured(self, path: str, data: bytes, roots: Iterable[Path]) -> bytes:
        return groups.to_relative(path, data, roots)

    def rewrites(self, path: str) -> bool:
        return groups.is_group(path)

    def localised(self, path: str, data: bytes, root: Path) -> bytes:
        return groups.to_absolute(path, data, root)
