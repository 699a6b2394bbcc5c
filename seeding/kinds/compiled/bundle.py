"""Kinds that are bundles of compiled caches; ``compile_cache`` is the one a rank, of all that an engine compiles."""

from __future__ import annotations

import functools
import hashlib
import os
import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from warmseed.seeding.bundle.files import Disk
from warmseed.seeding.bundle.history import remember_index
from warmseed.seeding.bundle.index import BundleIndex, FileRecord, read_index
from warmseed.seeding.bundle.install import Target, authenticated, check_space, write_tree
from warmseed.seeding.bundle.moving import write_mark
from warmseed.seeding.bundle.trees import RankRecord, Tree, TreeRecord, Trees
from warmseed.seeding.environment import Environment
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.kinds.base import Capture, Evidence, Installation, Site, Verdict
from warmseed.seeding.kinds.compiled.cache import CompiledCache, Placement
from warmseed.seeding.kinds.compiled.capture import Quiet, capture_bundle
from warmseed.seeding.kinds.compiled.evidence import changed_files, judge_caches
from warmseed.seeding.kinds.compiled.flashinfer import provider_root
from warmseed.seeding.kinds.compiled.switching import carry_over, common_tree, put_back, switch
from warmseed.seeding.trust.manifest import Manifest

__all__ = ["CompileCacheKind"]

SAMPLE = 16  # files re-hashed at every start, against rot and against engines that write in place


class CompileCacheKind:
    """Compiled caches as one signed, content-addressed bundle. Implements `kinds.base.Kind`."""

    def __init__(
        self,
        caches: Sequence[CompiledCache],
        *,
        name: str = "compile_cache",
        quiet: Quiet | None = None,
        disk: Disk | None = None,
    ) -> None:
        self.name = name
        self.caches = {cache.name: cache for cache in caches}
        self._quiet = quiet if quiet is not None else Quiet()
        self._disk = disk if disk is not None else Disk()

    def environment(self, site: Site) -> Environment:
        """The fields of every cache this engine has; places and hosts are not among them."""
        fields: dict[str, str] = {}
        for name, cache in self.caches.items():
            if name in site.roots:
                fields.update(cache.environment(site))
        return Environment(fields)

    def capture(self, site: Site) -> Capture | None:
        """All caches of the site in one bundle, once they have come to rest; `None` when they are empty.

        Raises:
            ArtifactRefused: ``busy`` or ``malformed``.
            OSError: when a cache can't be read, or the bundle can't be written.
        """
        return capture_bundle(list(self.caches.values()), site, self.environment(site), self._quiet)

    def suits(self, manifest: Manifest, index: bytes, site: Site) -> bool:
        """Whether every cache that engines here have, and the bundle holds, can work at its place, before any proof.

        Raises:
            ArtifactRefused: the index is malformed, or of another bundle.
        """
        _, left_out = self._placements(self._checked_index(manifest, index, site), site, {})
        return self._complete(left_out, site)

    def install(self, manifest: Manifest, payload: Path, index: bytes | None, site: Site) -> Installation:
        """Put the bundle's files where the engine's roots are, those caches that can work here.

        `payload` may be the object as a store holds it (zstd frames) or the plain tar. The switch is the last
        step: before it nothing that an engine can see has changed.

        Raises:
            ArtifactRefused: with the reason; nothing that an engine can see has changed.
            OSError: when the disk fails; nothing is half-visible.
        """
        contents = self._checked_index(manifest, index, site)
        trees = Trees(site.state, self._disk)
        with trees.locked():
            unfit: dict[str, str] = {}  # caches that did not prove themselves where they were first put
            while True:
                placements, left_out = self._placements(contents, site, unfit)
                if not placements:
                    reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items())
                    raise ArtifactRefused(
                        "relocation", f"nothing in the bundle can work here ({reasons or 'it is empty'})"
                    )
                current = common_tree(trees, placements)
                if current is not None and _stands(current, manifest, site):
                    return self._installation(current, manifest.generation, site)
                work = _Work(manifest, payload, contents, placements, left_out)
                if current is not None and _joined(current, work, self.environment(site), site):
                    return self._installation(current, manifest.generation, site)
                tree = self._install(trees, work, site)
                failed = {name: why for name, p in placements.items() if (why := self.caches[name].prove(p, site))}
                if not failed:
                    trees.prune()
                    remember_index(site.state, index or b"", manifest.sha256)
                    return self._installation(tree, manifest.generation, site)
                put_back(trees, tree)
                trees.discard(tree)
                unfit.update(failed)

    def present(self, site: Site) -> bool:
        """Whether this rank's own installed bundle stands at its roots, whole and for this configuration."""
        tree = self._tree(site)
        return tree is not None and _is_ours(tree, site, self.environment(site)) and _whole(tree, site, sample=SAMPLE)

    def judge(self, installation: Installation, evidence: Evidence, site: Site) -> Verdict:
        """Whether each installed cache was used, from the engine's counters and from the tree itself."""
        return judge_caches(self.caches, installation, evidence, site)

    def current(self, site: Site) -> Installation | None:
        """What this rank has installed at its roots now, to be judged or taken back after a restart."""
        tree = self._tree(site)
        return None if tree is None else self._installation(tree, tree.record.ranks[site.rank_label].generation, site)

    def _tree(self, site: Site) -> Tree | None:
        """The live tree that this rank's files are in."""
        roots = [site.roots[name] for name in self.caches if name in site.roots]
        if "flashinfer" in self.caches:
            roots.append(provider_root(site))
        for tree in Trees(site.state, self._disk).live():
            leads = [Path(path) for path in tree.record.roots.values()]
            if site.rank_label in tree.record.ranks and any(p.is_relative_to(root) for p in leads for root in roots):
                return tree
        return None

    def variables(self, site: Site) -> dict[str, str]:
        """Environment variables that engines need beyond those of their cache roots."""
        if "flashinfer" in self.caches and "flashinfer" in site.roots:
            return {"PYTHONPATH": str(provider_root(site))}
        return {}

    def retract(self, installation: Installation, site: Site) -> None:
        """Put back what stood at the roots before, and move the tree into quarantine.

        Raises:
            OSError: when the disk fails.
        """
        if installation.folder is None:
            return
        trees = Trees(site.state, self._disk)
        with trees.locked():
            tree = trees.read(installation.folder)
            if tree is not None:
                put_back(trees, tree)
                trees.quarantine(tree)

    # -- steps of an installation ------------------------------------------------------------------

    def _checked_index(self, manifest: Manifest, index: bytes | None, site: Site) -> BundleIndex:
        if manifest.kind != self.name:
            raise ArtifactRefused("kind", f"a manifest of {manifest.kind} came to {self.name}")
        if manifest.device_index not in (-1, site.device_index):
            raise ArtifactRefused(
                "rank", f"compiled for device index {manifest.device_index}, this rank runs on {site.device_index}"
            )
        if index is None or manifest.index is None:
            raise ArtifactRefused("malformed", "a bundle without a file index; not installed")
        contents = read_index(index, manifest.index)
        if (contents.sha256, contents.length) != (manifest.sha256, manifest.length):
            raise ArtifactRefused("malformed", "the file index describes another bundle than its manifest")
        return contents

    def _install(self, trees: Trees, work: _Work, site: Site) -> Tree:
        """Write, sync and commit a tree, and switch to it."""
        manifest = work.manifest
        check_space(trees.base, manifest.length)
        staged = trees.stage()
        try:
            targets = self._targets(work.placements)
            with authenticated(work.payload, staged, sha256=manifest.sha256, length=manifest.length) as data:
                files = write_tree(data, work.contents, targets, staged, self._disk)
                files.update(_write_made(work.placements, staged))
            record = self._record(trees, work, files, site)
            carry_over(trees, staged, record, site.rank_label)
            tree = _commit(trees, staged, record, manifest)
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        try:
            switch(trees, tree)
        except OSError:
            trees.discard(tree)
            raise
        return tree

    def _placements(
        self, index: BundleIndex, site: Site, unfit: Mapping[str, str]
    ) -> tuple[dict[str, Placement], dict[str, str]]:
        """Where each cache goes, and why the others go nowhere."""
        placements: dict[str, Placement] = {}
        left_out: dict[str, str] = {}
        files: dict[str, list[FileRecord]] = {name: [] for name in index.caches}
        for file in index.files:
            files[file.cache].append(file)
        for name, record in index.caches.items():
            cache = self.caches.get(name)
            if cache is None or not self._has(name, site):
                left_out[name] = "this engine has no such cache"
                continue
            ours = Environment(cache.record(site).environment)
            needed = set(cache.environment(site)) | (set(record.environment) - set(cache.prefixes))
            differing = [d for d in ours.differences(record.environment) if d.field in needed]
            if differing:
                left_out[name] = "; ".join(str(d) for d in differing)
                continue
            if name in unfit:
                placed = cache.place_otherwise(record, files[name], site, unfit[name])
            else:
                placed = cache.place(record, files[name], site)
            if isinstance(placed, str):
                left_out[name] = placed
                continue
            left_out.update(placed.left_out)
            if placed.files:
                placements[name] = placed
        return placements, left_out

    def _complete(self, left_out: Mapping[str, str], site: Site) -> bool:
        return not any(self._has(name.partition("/")[0], site) for name in left_out)

    def _has(self, name: str, site: Site) -> bool:
        return name in self.caches and name in site.roots

    def _installation(self, tree: Tree, generation: int, site: Site) -> Installation:
        rank = tree.record.ranks[site.rank_label]
        return Installation(
            kind=self.name,
            generation=generation,
            sha256=rank.sha256,
            files=rank.files,
            folder=tree.path,
            left_out=rank.left_out,
            complete=rank.complete,
        )

    def _targets(self, placements: Mapping[str, Placement]) -> dict[str, Target]:
        targets: dict[str, Target] = {}
        for name, placement in placements.items():
            for source, relative in placement.files.items():
                localise = None
                if self.caches[name].rewrites(relative):
                    localise = functools.partial(self.caches[name].localised, relative, root=placement.root)
                targets[source] = Target(f"{placement.folder}/{relative}", localise)
        return targets

    def _record(self, trees: Trees, work: _Work, files: dict[str, str], site: Site) -> TreeRecord:
        placed = work.placements.values()
        roots = {folder: str(root) for placement in placed for folder, root in placement.roots.items()}
        rank = RankRecord(
            sha256=work.manifest.sha256,
            generation=work.manifest.generation,
            device_index=work.manifest.device_index,
            files=files,
            left_out=dict(work.left_out),
            complete=self._complete(work.left_out, site),
        )
        return TreeRecord(
            moved=tuple(folder for placement in placed if placement.real for folder in placement.roots),
            config_hash=site.config_hash,
            environment_hash=self.environment(site).digest,
            roots=roots,
            before={root: trees.standing(Path(root)) for root in roots.values()},
            ranks={site.rank_label: rank},
        )


@dataclass(frozen=True, slots=True)
class _Work:
    """One installation under way."""

    manifest: Manifest
    payload: Path
    contents: BundleIndex
    placements: Mapping[str, Placement]
    left_out: Mapping[str, str]

    @property
    def paths(self) -> set[str]:
        """Every file that the installation puts into its tree."""
        return {
            f"{placement.folder}/{relative}"
            for placement in self.placements.values()
            for relative in (*placement.files.values(), *placement.made)
        }


def _write_made(placements: Mapping[str, Placement], staged: Path) -> dict[str, str]:
    made: dict[str, str] = {}
    for placement in placements.values():
        for relative, data in placement.made.items():
            path = staged / placement.folder / relative
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.write_bytes(data)
            path.chmod(0o600)
            made[f"{placement.folder}/{relative}"] = hashlib.sha256(data).hexdigest()
    return made


def _commit(trees: Trees, staged: Path, record: TreeRecord, manifest: Manifest) -> Tree:
    name = trees.name(f"{manifest.generation}-{manifest.sha256[:16]}")
    for folder in record.moved:
        write_mark(staged / folder, name, folder)
    Tree(staged, record).save()
    return Tree(trees.commit(staged, name), record)


def _is_ours(tree: Tree, site: Site, environment: Environment) -> bool:
    record = tree.record
    return (
        record.config_hash == site.config_hash
        and record.environment_hash == environment.digest
        and site.rank_label in record.ranks
    )


def _whole(tree: Tree, site: Site, *, sample: int) -> bool:
    """Whether every file of the rank is still there, and `sample` of them have the bytes that were installed."""
    files = tree.record.ranks[site.rank_label].files
    if not all(os.path.lexists(Path(*tree.where(path))) for path in files):
        return False
    picked = random.sample(sorted(files), min(sample, len(files)))
    return not changed_files(tree, {path: files[path] for path in picked})


def _stands(tree: Tree, manifest: Manifest, site: Site) -> bool:
    """Whether the same bundle is installed there already, and its files are what was installed."""
    rank = tree.record.ranks.get(site.rank_label)
    if tree.record.config_hash != site.config_hash or rank is None or rank.sha256 != manifest.sha256:
        return False
    return not changed_files(tree, rank.files)


def _joined(tree: Tree, work: _Work, environment: Environment, site: Site) -> bool:
    """Whether another rank has put the very same files of the same bundle there; then they are this rank's as well.

    The ranks of one engine share its cache folders, so what they publish is mostly the same bundle. Installed by each
    of them anew, it would stand between this rank and the generation before it.
    """
    record = tree.record
    if (record.config_hash, record.environment_hash) != (site.config_hash, environment.digest):
        return False
    for other in record.ranks.values():
        if other.sha256 != work.manifest.sha256 or set(other.files) != work.paths or changed_files(tree, other.files):
            continue
        rank = msgspec.structs.replace(
            other, generation=work.manifest.generation, device_index=work.manifest.device_index
        )
        tree.record = msgspec.structs.replace(record, ranks={**record.ranks, site.rank_label: rank})
        tree.save()
        return True
    return False
