"""Making cache roots lead to a tree, and back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from warmseed.seeding.bundle.moving import copy_file
from warmseed.seeding.bundle.trees import Tree, TreeRecord, Trees
from warmseed.seeding.kinds.compiled.cache import Placement

__all__ = ["carry_over", "common_tree", "put_back", "switch"]


def common_tree(trees: Trees, placements: Mapping[str, Placement]) -> Tree | None:
    """The tree that all roots of `placements` lead to, or `None`."""
    found = [trees.at(root) for placement in placements.values() for root in placement.roots.values()]
    first = found[0] if found else None
    if first is None or any(tree is None or tree.path != first.path for tree in found):
        return None
    return first


def switch(trees: Trees, tree: Tree) -> None:
    """Point every root at the tree; on a failure all point where they pointed.

    Raises:
        OSError: when the disk fails.
    """
    before: dict[str, str] = {}
    try:
        for folder, root in tree.record.roots.items():
            before[root] = trees.point(Path(root), str(tree.path / folder))
            trees.settle(Path(root))
        if before != tree.record.before:  # an engine's own folder was moved aside: its new place must be known
            tree.record = msgspec.structs.replace(tree.record, before=before)
            tree.save()
    except OSError:
        for root, standing in before.items():
            trees.point(Path(root), standing)
        raise


def put_back(trees: Trees, tree: Tree) -> None:
    """Make the roots that lead to `tree` lead to what stood there before it, where that is still fit.

    Raises:
        OSError: when the disk fails.
    """
    for folder, root in tree.record.roots.items():
        if trees.standing(Path(root)) != str(tree.path / folder):
            continue
        before = tree.record.before.get(root, "")
        trees.point(Path(root), before if _fit(trees, before, tree.record) else "")
        trees.settle(Path(root))


def carry_over(trees: Trees, staged: Path, record: TreeRecord, label: str) -> None:
    """Copy into `staged` what other ranks of this node installed at the same roots for the same key.

    The ranks of one engine share its cache folders, so a tree that one of them switches to must still hold
    what the others put there. Files that are already there stay; ranks whose files clash are not carried.
    """
    for folder, root in record.roots.items():
        tree = trees.at(Path(root))
        if tree is None or tree.record.config_hash != record.config_hash:
            continue
        if tree.record.environment_hash != record.environment_hash:
            continue
        for other, rank in tree.record.ranks.items():
            if other == label:
                continue
            files = {path: digest for path, digest in rank.files.items() if path.startswith(f"{folder}/")}
            for path in files:
                source, target = Path(*tree.where(path)), staged / path
                if source.is_file() and not source.is_symlink() and not target.exists():
                    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    copy_file(str(source), str(target))
            record.ranks.setdefault(other, rank)


def _fit(trees: Trees, before: str, record: TreeRecord) -> bool:
    """Whether what stood at a root before may come back: an engine's own folder, or a tree for the same key."""
    if not before:
        return False
    path = trees.holding(before)
    if path is None:
        return Path(before).is_dir()  # an operator's own link, or a folder that was moved aside
    tree = trees.read(path)
    return tree is not None and Path(before).is_dir() and tree.record.environment_hash == record.environment_hash
