"""What an engine's warmup did to the installed files: the proof that a bundle was used."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from warmseed.seeding.bundle.walk import Snapshot, open_folder, read_file, take_snapshot
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.kinds.base import Evidence, Installation, Site, Verdict
from warmseed.seeding.kinds.compiled.cache import CacheUse, CompiledCache

__all__ = ["changed_files", "judge_caches"]


def changed_files(tree: Path, files: Mapping[str, str]) -> list[str]:
    """Which of `files` (path in the tree -> SHA-256) have other bytes now, or are gone."""
    changed = []
    handle = open_folder(tree)
    try:
        for path, digest in files.items():
            try:
                data = read_file(handle, path)
            except (OSError, ArtifactRefused):
                changed.append(path)
                continue
            if hashlib.sha256(data).hexdigest() != digest:
                changed.append(path)
    finally:
        os.close(handle)
    return changed


def judge_caches(
    caches: Mapping[str, CompiledCache], installation: Installation, evidence: Evidence, site: Site
) -> Verdict:
    """The verdict on every installed cache; the bundle was used when each of them was.

    Files are looked at where they are, so an adapter need not report them: rewritten files mean a rebuild,
    new ones a miss, and access times, where the mount keeps them, show what was read.
    """
    if installation.folder is None:
        return Verdict(used=False, reason="nothing was installed")
    per_cache: dict[str, bool] = {}
    reasons: list[str] = []
    for name, cache in caches.items():
        for folder in cache.folders:
            prefix = f"{folder}/"
            files = {path: digest for path, digest in installation.files.items() if path.startswith(prefix)}
            if not files:
                continue
            use = _use(cache, installation.folder, prefix, files, evidence)
            if folder != name and name in site.roots:  # the engine's own root must have stayed as it was
                built = _built_since(cache, site.roots[name], installation.folder)
                use = dataclasses.replace(use, appeared=[*use.appeared, *built])
            per_cache[name], reason = cache.used(use)
            reasons.append(f"{name}: {reason}")
    used = bool(per_cache) and all(per_cache.values())
    return Verdict(used=used, reason="; ".join(reasons) or "no cache was installed", per_cache=per_cache)


def _use(cache: CompiledCache, tree: Path, prefix: str, files: Mapping[str, str], evidence: Evidence) -> CacheUse:
    snapshot = Snapshot()
    try:
        handle = open_folder(tree / prefix)
    except OSError:
        pass  # the whole folder is gone: every file shows as changed
    else:
        try:
            snapshot = take_snapshot(handle, cache.skips)
        finally:
            os.close(handle)
    present = {prefix + path for path in snapshot.files}
    reported = {path for path in evidence.new_files if path.startswith(prefix)}
    read = sum(
        snapshot.atimes_ns[path] != found.mtime_ns for path, found in snapshot.files.items() if prefix + path in files
    )
    return CacheUse(
        installed=len(files),
        read=read if read or _keeps_access_times(tree) else None,
        appeared=sorted((present - set(files)) | reported),
        changed=changed_files(tree, files),
        counters=evidence.counters,
        lines=evidence.lines,
    )


def _built_since(cache: CompiledCache, root: Path, tree: Path) -> list[str]:
    """Files below an engine's own root that are younger than the tree's record."""
    try:
        since = (tree / "tree.json").stat().st_mtime_ns
        handle = open_folder(root)
    except OSError:
        return []
    try:
        snapshot = take_snapshot(handle, cache.skips)
    finally:
        os.close(handle)
    return [f"{cache.name}/{path}" for path, found in snapshot.files.items() if found.mtime_ns > since]


def _keeps_access_times(folder: Path) -> bool:
    """Whether reading a file on this mount shows in its access time."""
    return not os.statvfs(folder).f_flag & os.ST_NOATIME
