"""vLLM's own compile cache: ``torch_compile_cache`` with AOT artifacts, per-rank folders and nested caches.

Layout (vLLM 0.26 to 0.33): ``<10 hex>/rank_<r>_<dp>/<prefix>/{vllm_compile_cache.py,artifact_*,...}`` and
``torch_aot_compile/<64 hex>/{rank_<r>_<dp>/model,inductor_cache/...}``. Before 0.33 the AOT artifact holds the
absolute path of its folder and opens files through it: at another root it does not miss, the engine's start
crashes. The nested Inductor and Triton caches are found by hash and may move.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from warmseed.seeding.bundle.index import CacheRecord, FileRecord
from warmseed.seeding.kinds.base import Site
from warmseed.seeding.kinds.compiled import groups
from warmseed.seeding.kinds.compiled.cache import CacheUse, CompiledCache, Placement, everything

__all__ = ["VllmCache"]

_GRAPHS = "vllm_compile_cache.py"  # names the compiled graphs beside it
_MOVABLE = frozenset({"inductor_cache", "triton_cache"})
_RELOCATABLE = (0, 33)  # the first vLLM whose artifacts name their files relative to their folder
_COMPILED = re.compile(r"(?i)(compiling model again|compile cache file corrupted|failed to load.*compil)")
_LOADED = re.compile(r"(?i)directly load.*(?:aot|compiled)|loaded (?:aot|compiled)|cache hit.*compil")


class VllmCache(CompiledCache):
    """``$VLLM_CACHE_ROOT/torch_compile_cache``."""

    name = "vllm"
    needs = ("machine", "cpu_flags", "glibc", "python_abi", "torch", "triton", "vllm")
    also = ("cxx", "device", "compute_capability", "cuda", "cpu_threads")
    device_bound = True

    def examines(self, path: str) -> bool:
        return groups.is_group(path) or path.endswith(_GRAPHS)

    def captured(self, path: str, data: bytes, roots: Iterable[Path]) -> bytes:
        if path.endswith(_GRAPHS) and not data.strip():
            raise ValueError("empty: vLLM would fail on it at the next start")
        return groups.to_relative(path, data, roots)

    def rewrites(self, path: str) -> bool:
        return groups.is_group(path)

    def localised(self, path: str, data: bytes, root: Path) -> bytes:
        return groups.to_absolute(path, data, root)

    def place(self, record: CacheRecord, files: Sequence[FileRecord], site: Site) -> Placement | str:
        """All files at the recorded root or from vLLM 0.33 on, else those that are found by hash.

        Other ranks' folders are among them: the ranks of a node share the cache, and mostly the bundle.
        """
        left_out = {}
        if record.root == str(site.roots[self.name]) or _version(record.environment.get("vllm", "")) >= _RELOCATABLE:
            return everything(self.name, files, site)
        movable = [file for file in files if _MOVABLE.intersection(file.relative.split("/"))]
        if len(movable) < len(files):
            left_out[self.name] = (
                f"{len(files) - len(movable)} AOT files work only at {record.root}, here the cache lies at "
                f"{site.roots[self.name]}: give both nodes the same --cache-root"
            )
        if not movable:
            return left_out.get(self.name, "it is empty")
        placed = everything(self.name, movable, site)
        return Placement(placed.root, placed.folder, placed.files, left_out=left_out)

    def used(self, use: CacheUse) -> tuple[bool, str]:
        for line in use.lines:
            if _COMPILED.search(line):
                return False, f"the engine says: {line.strip()[:160]}"
        if not use.appeared and not use.changed:
            for line in use.lines:
                if _LOADED.search(line):
                    return True, f"the engine says: {line.strip()[:160]}"
        return super().used(use)


def _version(text: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)
