"""Installed trees: one immutable, versioned folder a generation, and the atomic switch to it.

    state/compiled/lock               held while anything below changes
    state/compiled/staging/<random>   being written; no engine's path leads here
    state/compiled/trees/<id>         complete and synced; the name is the commit record
    state/compiled/replaced/<random>  a folder that stood at a cache root before warmseed's first switch
    state/compiled/quarantine/<id>    taken back

A cache root becomes a symbolic link to ``trees/<id>/<cache>``. The switch replaces the link in one step, so a
path leads to the old tree or to the new one. Where a compiler resolves links before it writes a path down, the
tree's folder itself stands at the root, swapped with what stood there; a mark in it names its tree, to which it
goes back when another takes its place. Engines write new files into the tree they run on; what warmseed
wrote is listed in ``tree.json``. Trees are copies, never hard links: an engine that writes in place would reach
through a hard link into another generation.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from warmseed.errors import printable
from warmseed.filelock import file_lock
from warmseed.seeding.bundle.files import Disk
from warmseed.seeding.bundle.moving import leftovers, move, read_mark
from warmseed.seeding.bundle.walk import open_folder
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.trust import canonical
from warmseed.seeding.trust.marks import write_durably

__all__ = ["RankRecord", "Tree", "TreeRecord", "Trees", "read_tree"]

RECORD_BYTES = 64 << 20  # bytes in the largest tree.json read
LOCK_SECONDS = 120.0  # for other ranks of this node to finish their own installations


class RankRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one rank's bundle put into a tree."""

    sha256: str
    generation: int
    device_index: int
    files: dict[str, str]  # path in the tree -> SHA-256 as installed
    left_out: dict[str, str] = {}
    complete: bool = True


class TreeRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a tree is; ``tree.json`` in it."""

    schema: Literal[1] = 1
    config_hash: str
    environment_hash: str
    roots: dict[str, str]  # folder in the tree -> the path that engines use
    before: dict[str, str] = {}  # path that engines use -> what stood there: a tree's folder, or a replaced one
    ranks: dict[str, RankRecord] = {}
    moved: tuple[str, ...] = ()  # folders of `roots` that stand at their roots themselves, without a link


class Tree:
    """One committed tree."""

    def __init__(self, path: Path, record: TreeRecord) -> None:
        self.path = path
        self.record = record

    def where(self, path: str) -> tuple[Path, str]:
        """Where the file or folder `path` of this tree lies now: an existing folder, and the path below it."""
        for folder in self.record.moved:
            below = path[len(folder) + 1 :]
            if path == folder or path.startswith(f"{folder}/"):
                home = self.path / folder
                return (home if home.is_dir() else Path(self.record.roots[folder])), below
        return self.path, path

    def save(self) -> None:
        """Write the record; durable when this returns."""
        write_durably(self.path / "tree.json", canonical.encode(self.record))


def read_tree(path: Path) -> Tree | None:
    """The committed tree at `path`, or `None` when there is none or its record is broken."""
    try:
        data = (path / "tree.json").read_bytes()
        return Tree(path, canonical.decode(data, TreeRecord, limit=RECORD_BYTES))
    except (OSError, ArtifactRefused):
        return None


class Trees:
    """The installed trees of one node. All methods block."""

    def __init__(self, state: Path, disk: Disk | None = None) -> None:
        self.base = state / "compiled"
        self.disk = disk if disk is not None else Disk()

    @property
    def trees(self) -> Path:
        """Where committed trees lie."""
        return self.base / "trees"

    @contextlib.contextmanager
    def locked(self, *, seconds: float = LOCK_SECONDS) -> Iterator[None]:
        """Hold the node's lock; the holder alone sweeps, commits and switches.

        Raises:
            ArtifactRefused: ``busy``, when another process holds it for longer than `seconds`.
            OSError: when the state folder can't be written.
        """
        for name in ("staging", "trees", "replaced", "quarantine"):
            (self.base / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(file_lock(self.base / "lock", seconds))
            except TimeoutError as error:
                raise ArtifactRefused("busy", f"installing: {error}; this rank works locally") from None
            self._sweep()
            yield

    def stage(self) -> Path:
        """A new empty folder to write a tree in."""
        path = self.base / "staging" / secrets.token_hex(8)
        path.mkdir(mode=0o700)
        return path

    def name(self, prefix: str) -> str:
        """A new name for a tree."""
        return f"{prefix}-{secrets.token_hex(4)}"

    def commit(self, staged: Path, name: str) -> Path:
        """Make the written, recorded tree at `staged` durable and give it its `name`; where it now lies.

        Raises:
            OSError: when the disk fails; the tree is then not there.
        """
        handle = open_folder(staged)
        try:
            self.disk.sync(handle)
        finally:
            os.close(handle)
        target = self.trees / name
        self.disk.rename(str(staged), str(target))
        self._sync(self.trees)
        return target

    def at(self, root: Path) -> Tree | None:
        """The tree that engines find at the cache root `root`, or `None`."""
        path = self.holding(self.standing(root))
        return None if path is None else self.read(path)

    def holding(self, folder: str) -> Path | None:
        """The tree that `folder` lies in, or `None`."""
        inner = Path(folder)
        if not inner.is_relative_to(self.trees) or inner == self.trees:
            return None
        return self.trees / inner.relative_to(self.trees).parts[0]

    def live(self) -> list[Tree]:
        """The trees that some cache root leads to."""
        found = [self.read(path) for path in self.trees.iterdir()] if self.trees.is_dir() else []
        return [tree for tree in found if tree is not None and self._is_live(tree)]

    def read(self, path: Path) -> Tree | None:
        """The committed tree at `path`, or `None` when there is none or its record is broken."""
        return read_tree(path)

    def standing(self, root: Path) -> str:
        """Where the link at the cache root leads, or to which folder of a tree the folder there belongs; else "".

        An engine's own folder has no other place to come back from until `point` has moved it there.
        """
        if root.is_symlink():
            return os.readlink(root)
        mark = read_mark(root)
        return str(self.trees / mark) if mark else ""

    def point(self, root: Path, folder: str) -> str:
        """Make `root` lead to `folder`, in one step; where what stood there before is now, "" for nothing.

        With `folder` "" the root is removed, and an engine makes its own. `settle` makes the change last.

        Raises:
            OSError: when the disk fails; the root then leads where it led.
        """
        root.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        old = self.standing(root)
        if not folder:
            if root.is_symlink():
                root.unlink()
            elif root.is_dir():
                old = self._put_aside(root)
        elif Path(folder).parent == self.base / "replaced":  # an engine's own folder comes back as a folder
            self.point(root, "")
            move(Path(folder), root, self.disk)
        elif read_mark(Path(folder)):
            old = self._move_in(root, Path(folder), old)
        else:
            old = self._link(root, folder, old)
        return old

    def settle(self, root: Path) -> None:
        """Put on disk where `root` leads.

        Raises:
            OSError: when the disk fails; where the root leads after a crash is then unknown, old or new.
        """
        self._sync(root.parent)

    def quarantine(self, tree: Tree) -> Path:
        """Move a tree out of use, keeping it for whoever wants to know why."""
        target = self.base / "quarantine" / tree.path.name
        with contextlib.suppress(FileNotFoundError):
            self.disk.rename(str(tree.path), str(target))
        self._sync(target.parent)
        return target

    def discard(self, tree: Tree) -> None:
        """Delete a tree that no root leads to."""
        self._discard(tree.path)

    def prune(self) -> int:
        """Delete the trees that no root leads to and that no live tree could be taken back to; how many."""
        live = self.live()
        keep = {tree.path for tree in live}
        keep.update(path for tree in live for b in tree.record.before.values() if (path := self.holding(b)) is not None)
        gone = [path for path in self.trees.iterdir() if path not in keep]
        for path in gone:
            self._discard(path)
        return len(gone)

    def _is_live(self, tree: Tree) -> bool:
        return any(self.standing(Path(root)) == str(tree.path / folder) for folder, root in tree.record.roots.items())

    def _move_in(self, root: Path, folder: Path, old: str) -> str:
        """Let the tree's `folder` itself stand at `root`; where what stood there before is now.

        A process killed in between leaves a folder of a temporary name beside `root`, which `_sweep` takes home.
        """
        temporary = root.with_name(f".{root.name}.{secrets.token_hex(6)}")
        move(folder, temporary, self.disk)
        try:
            if not os.path.lexists(root):
                self.disk.rename(str(temporary), str(root))
                return old
            try:
                self.disk.exchange(str(temporary), str(root))
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOSYS):
                    raise
                aside = self._clear(root, old)  # two steps where the file system can't swap
                self.disk.rename(str(temporary), str(root))
                return aside
            try:
                return self._clear(temporary, old)
            except OSError:
                self.disk.exchange(str(temporary), str(root))
                raise
        except BaseException:
            if not temporary.is_symlink() and temporary.is_dir():
                move(temporary, folder, self.disk)
            raise

    def _clear(self, path: Path, old: str) -> str:
        """Take away the link or folder at `path`; where what it was is now."""
        if path.is_symlink():
            path.unlink()
            return old
        return self._put_aside(path)

    def _link(self, root: Path, folder: str, old: str) -> str:
        temporary = root.with_name(f".{root.name}.{secrets.token_hex(6)}")
        self.disk.link(folder, str(temporary))
        try:
            if not root.is_dir() or root.is_symlink():
                self.disk.rename(str(temporary), str(root))
                return old
            try:
                self.disk.exchange(str(temporary), str(root))
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EXDEV):
                    raise
                aside = self._put_aside(root)  # two steps where the file system can't swap
                self.disk.rename(str(temporary), str(root))
                return aside
            try:
                return self._put_aside(temporary)
            except OSError:
                self.disk.exchange(str(temporary), str(root))
                raise
        except BaseException:
            if temporary.is_symlink():
                temporary.unlink()
            raise

    def _put_aside(self, folder: Path) -> str:
        """Move a folder to its tree, or an engine's own into the state; where it is, "" if it was empty."""
        if mark := read_mark(folder):
            return self._take_home(folder, self.trees / mark)
        try:
            folder.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return ""
        target = self.base / "replaced" / secrets.token_hex(8)
        move(folder, target, self.disk)
        return str(target)

    def _take_home(self, folder: Path, home: Path) -> str:
        """Move a marked folder back into its tree, "" if that is no more."""
        if home.parent.is_dir() and not os.path.lexists(home):
            move(folder, home, self.disk)
            return str(home)
        gone = folder.with_name(f".{home.name}.{secrets.token_hex(6)}")  # never half-deleted under its own name
        os.rename(folder, gone)
        shutil.rmtree(gone, ignore_errors=True)
        return ""

    def _sync(self, folder: Path) -> None:
        handle = open_folder(folder)
        try:
            self.disk.sync_folder(handle)
        finally:
            os.close(handle)

    def _sweep(self) -> None:
        """Remove what a killed process left in staging or beside a root; only the lock's holder writes there."""
        for path in (self.base / "staging").iterdir():
            self._discard(path)
        roots = {
            Path(root)
            for path in self.trees.iterdir()
            if (tree := self.read(path))
            for root in tree.record.roots.values()
        }
        for root in roots:
            for path in leftovers(root):
                self._clear(path, "")

    def _discard(self, path: Path) -> None:
        # Renamed first, so that no half-deleted tree keeps a committed name.
        if path.parent == self.trees:
            moved = self.base / "staging" / secrets.token_hex(8)
            os.rename(path, moved)
            path = moved
        shutil.rmtree(path, ignore_errors=True)


def named(files: Mapping[str, str]) -> str:
    """The first few of `files`, for a log line."""
    shown = ", ".join(printable(name, limit=80) for name in list(files)[:3])
    return shown if len(files) <= 3 else f"{shown} and {len(files) - 3} more"
