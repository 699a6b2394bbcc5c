"""What an engine's warmup did to the installed files: the proof that a bundle was used."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from warmseed.seeding.bundle.trees import Tree, read_tree
from warmseed.seeding.bundle.walk import Snapshot, open_folder, read_file, take_snapshot
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.kinds.base import Evidence, Installation, Site, Verdict
from warmseed.seeding.kinds.compiled.cache import CacheUse, CompiledCache, renewed

__all__ = ["changed_files", "judge_caches"]


def changed_files(tree: Tree, files: Mapping[str, str]) -> list[str]:
    """Which of `files` (path in the tree -> SHA-256) have other bytes now, or are gone; not those engines renew."""
    changed = []
    handles: dict[Path, int | None] = {}
    try:
        for path, digest in files.items():
            if renewed(path):
                continue
            folder, below = tree.where(path)
            if folder not in handles:
                try:
                    handles[folder] = open_folder(folder)
                except OSError:
                    handles[folder] = None
            handle = handles[folder]
            try:
                data = read_file(handle, below) if handle is not None else None
            except (OSError, ArtifactRefused):
                data = None
            if data is None or hashlib.sha256(data).hexdigest() != digest:
                changed.append(path)
    finally:
        for handle in handles.values():
            if handle is not None:
                os.close(handle)
    return changed


def judge_caches(
    caches: Mapping[str, CompiledCache], installation: Installation, evidence: Evidence, site: Site
) -> Verdict:
    """The verdict on what is installed of every cache; the bundle was used when each of them was.

    Files are looked at where they are, so an adapter need not report them: rewritten files mean a rebuild,
    new ones a miss, and access times, where the mount keeps them, show what was read.
    """
    if installation.folder is None:
        return Verdict(used=False, reason="nothing was installed")
    tree = read_tree(installation.folder)
    if tree is None:
        return Verdict(used=False, reason="what was installed is no longer there")
    per_cache: dict[str, bool] = {}
    reasons: list[str] = []
    for name, cache in caches.items():
        for folder in cache.folders:
            prefix = f"{folder}/"
            files = {path: digest for path, digest in installation.files.items() if path.startswith(prefix)}
            if not files:
                continue
            use = _use(cache, tree, prefix, files, evidence)
            if folder != name and name in site.roots:  # the engine's own root must have stayed as it was
                built = _built_since(cache, site.roots[name], tree.path)
                use = dataclasses.replace(use, appeared=[*use.appeared, *built])
            absent = installation.left_out.get(name)
            if absent is not None:  # what it stands for had to be compiled here, so new files say nothing
                use = dataclasses.replace(use, appeared=())
            per_cache[name], reason = cache.used(use)
            reasons.append(f"{name}: {reason}" + (f", but not all of it is here: {absent}" if absent else ""))
    used = bool(per_cache) and all(per_cache.values())
    return Verdict(used=used, reason="; ".join(reasons) or "no cache was installed", per_cache=per_cache)


def _use(cache: CompiledCache, tree: Tree, prefix: str, files: Mapping[str, str], evidence: Evidence) -> CacheUse:
    present: set[str] = set()
    read = 0
    for folder in (prefix[:-1], *(moved for moved in tree.record.moved if moved.startswith(prefix))):
        base = "" if folder == prefix[:-1] else folder[len(prefix) :] + "/"  # of the folder, below the cache's root
        snapshot = _snapshot(Path(*tree.where(folder)), cache, base)
        for path, found in snapshot.files.items():
            name = prefix + base + path
            if name in files:
                read += snapshot.atimes_ns[path] != found.mtime_ns
            elif _shows_build(cache, base + path):
                present.add(name)
    reported = {
        path for path in evidence.new_files if path.startswith(prefix) and _shows_build(cache, path[len(prefix) :])
    }
    return CacheUse(
        installed=len(files),
        read=read if read or _keeps_access_times(tree.path) else None,
        appeared=sorted(present | reported),
        changed=changed_files(tree, files),
        counters=evidence.counters,
        lines=evidence.lines,
    )


def _shows_build(cache: CompiledCache, path: str) -> bool:
    """Whether a file at `path` below the cache's root that was not installed is something that was compiled."""
    parts = path.split("/")
    passing = any(cache.skips("/".join(parts[:depth])) for depth in range(1, len(parts) + 1))  # a lock, a scratch file
    return not passing and cache.counts(path) and not renewed(path)


def _snapshot(folder: Path, cache: CompiledCache, base: str = "") -> Snapshot:
    """The files below `folder`, whose path below the cache's root is `base`; none when it is gone."""
    try:
        handle = open_folder(folder)
    except OSError:
        return Snapshot()
    try:
        return take_snapshot(handle, lambda path: cache.skips(base + path))
    finally:
        os.close(handle)


def _built_since(cache: CompiledCache, root: Path, tree: Path) -> list[str]:
    """Files below an engine's own root that are younger than the tree's record."""
    try:
        since = (tree / "tree.json").stat().st_mtime_ns
    except OSError:
        return []
    files = _snapshot(root, cache).files.items()
    return [f"{cache.name}/{path}" for path, found in files if found.mtime_ns > since and cache.counts(path)]


def _keeps_access_times(folder: Path) -> bool:
    """Whether reading a file on this mount shows in its access time."""
    return not os.statvfs(folder).f_flag & os.ST_NOATIME
