"""What one compiler's cache is to a bundle: a small class that knows where it lives and what it may move to."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from warmseed.errors import printable
from warmseed.seeding.bundle.index import CacheRecord, FileRecord
from warmseed.seeding.environment import UNKNOWN, Environment
from warmseed.seeding.kinds.base import Site

__all__ = ["CacheUse", "CompiledCache", "Placement", "everything", "renewed"]

# Left behind by every writer that locks or renames; loading one means waiting for a process that is gone.
_TEMPORARY_ENDS = (".lock", ".tmp", ".temp", ".partial", "~")
_TEMPORARY_STARTS = ("tmp.", ".tmp", ".nfs", ".warmseed-")
_TEMPORARY_FOLDERS = ("/locks", "/__pycache__")
# Empty files of these types are what a crash leaves behind, and some loaders check existence only.
_NEVER_EMPTY = (".so", ".cubin", ".o", ".json", ".ptx", ".py", ".cpp", ".cu")

# Which tile sizes were fastest, and in how many milliseconds: torch measures some kernels at every start and notes what
# it finds, also for a graph that it has loaded (AutotuneCache.save in torch/_inductor/runtime/autotune_cache.py).
_NOTES = (".best_config",)


def renewed(path: str) -> bool:
    """Whether engines write the file at `path` again and again while they use a cache: no sign of a rebuild."""
    return path.endswith(_NOTES)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a cache's files go on this node."""

    root: Path  # the path engines use
    folder: str  # the name of its folder in an installed tree
    files: Mapping[str, str]  # path in the bundle -> path below `folder`
    made: Mapping[str, bytes] = field(default_factory=dict)  # path below `folder` -> what warmseed writes there
    left_out: Mapping[str, str] = field(default_factory=dict)  # path in the bundle or cache name -> why
    links: Mapping[str, Path] = field(default_factory=dict)  # folders in the tree -> where, if not all of `root`
    real: bool = False  # its compiler resolves links, so the folders themselves must stand at those paths

    @property
    def roots(self) -> Mapping[str, Path]:
        """The folders of an installed tree, and the paths that are to lead to them."""
        return self.links or {self.folder: self.root}


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What an engine's warmup did to one installed cache."""

    installed: int  # files
    read: int | None  # installed files that were read since, `None` where the mount keeps no access times
    appeared: Sequence[str]  # files that were not installed
    changed: Sequence[str]  # installed files with other bytes, or gone
    counters: Mapping[str, int]
    lines: Sequence[str]


class CompiledCache(ABC):
    """One compiler's cache. Subclasses say what is different about theirs."""

    name: str  # of the cache in `Site.roots`, in bundles and in reports
    needs: tuple[str, ...] = ("machine", "python_abi", "torch")  # environment fields without which nothing is certain
    also: tuple[str, ...] = ()  # further fields of its key, where the engine states them
    prefixes: tuple[str, ...] = ()  # fields of the place rather than the key: a difference leaves out this cache only
    device_bound: bool = False  # its code names the index of the device it was compiled on

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of an installed tree that may hold this cache's files."""
        return (self.name,)

    def environment(self, site: Site) -> Environment:
        """The fields of the site's environment that this cache's contents depend on."""
        fields = {name: site.environment.get(name, UNKNOWN) for name in self.needs}
        fields.update({name: site.environment[name] for name in self.also if name in site.environment})
        return Environment(fields)

    def record(self, site: Site) -> CacheRecord:
        """How a bundle describes this cache as it is at `site`."""
        place = {name: site.environment.get(name, UNKNOWN) for name in self.prefixes}
        return CacheRecord(root=str(site.roots[self.name]), environment={**self.environment(site), **place})

    def elsewhere(self, site: Site) -> Sequence[tuple[Path, str]]:
        """Further folders that hold files of this cache, and what stands before their paths in a bundle."""
        return ()

    def skips(self, path: str) -> bool:
        """Whether the file or folder at `path` below the root is no part of the cache."""
        if path.endswith(_TEMPORARY_ENDS) or path.startswith(_TEMPORARY_STARTS, path.rfind("/") + 1):
            return True
        return f"/{path}".endswith(_TEMPORARY_FOLDERS)

    def counts(self, path: str) -> bool:
        """Whether a new file at `path` below the root shows that something was compiled."""
        return True

    def refuses(self, path: str, size: int) -> str | None:
        """Why the file at `path` is not captured, or `None`."""
        if size == 0 and path.endswith(_NEVER_EMPTY):
            return "empty: its writer was interrupted"
        return None

    def examines(self, path: str) -> bool:
        """Whether `captured` must see the file at `path`; any other travels as it is, or not at all."""
        return False

    def captured(self, path: str, data: bytes, roots: Iterable[Path]) -> bytes:
        """What a bundle holds of a file that `examines` picks: its bytes, or the same spelled alike on every node.

        Raises:
            ValueError: when the file must not travel; the message says why.
        """
        return data

    def rewrites(self, path: str) -> bool:
        """Whether `localised` may change the file at `path`."""
        return False

    def localised(self, path: str, data: bytes, root: Path) -> bytes:
        """What is written at ``root / path`` for a bundle's `data`.

        Raises:
            ArtifactRefused: ``relocation``, for a file that could reach outside `root`.
        """
        return data

    def place(self, record: CacheRecord, files: Sequence[FileRecord], site: Site) -> Placement | str:
        """Where the cache's files go at `site`, or why none of them can."""
        ours = self.record(site).environment
        for name in self.prefixes:
            theirs = record.environment.get(name, UNKNOWN)
            if UNKNOWN in (theirs, ours[name]) or theirs != ours[name]:
                return f"it works only at the same {name}: theirs {printable(theirs)!r}, ours {ours[name]!r}"
        return everything(self.name, files, site)

    def place_otherwise(
        self, record: CacheRecord, files: Sequence[FileRecord], site: Site, why: str
    ) -> Placement | str:
        """Where the files go after `prove` found that they do not work where `place` put them."""
        return why

    def used(self, use: CacheUse) -> tuple[bool, str]:
        """Whether the cache was used rather than rebuilt, and how that is known."""
        if use.changed:
            return False, f"{len(use.changed)} installed files were rewritten, {use.changed[0]} first"
        if use.appeared:
            return False, f"{len(use.appeared)} new files, {use.appeared[0]} first"
        if use.read is None:
            return False, "nothing was rebuilt, but nothing shows that it was read"
        if not use.read:
            return False, "installed, but the engine never read it: is its cache folder another one?"
        return True, f"{use.read} files read, none built"

    def prove(self, placement: Placement, site: Site) -> str | None:
        """Why the cache would be rebuilt although it is in place, or `None`. Called once it is."""
        return None


def everything(name: str, files: Sequence[FileRecord], site: Site) -> Placement:
    """All of a cache's files, at the root that engines at `site` use."""
    return Placement(site.roots[name], name, {file.path: file.relative for file in files})
