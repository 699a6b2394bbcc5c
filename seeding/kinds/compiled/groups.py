"""Triton's group files: the one file of its cache that holds paths.

``__grp__<kernel>.json`` is ``{"child_paths": {"<name>": "<cache folder>/<hash>/<name>"}}``. Triton opens those
paths as they stand, so a moved cache misses, or worse, hits through the old place; and whoever writes one
can point it at any file. Bundles hold them with bare names; a node writes its own folder in front.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec

from warmseed.errors import printable
from warmseed.seeding.errors import ArtifactRefused

__all__ = ["is_group", "to_absolute", "to_relative"]

GROUP_BYTES = 1 << 20  # bytes in the largest group file
_CHILD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,254}")


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of a group file."""

    child_paths: Annotated[dict[str, str], msgspec.Meta(max_length=256)]


_ENCODER = msgspec.json.Encoder(order="sorted")


def is_group(path: str) -> bool:
    """Whether `path` names a group file."""
    name = path.rpartition("/")[2]
    return name.startswith("__grp__") and name.endswith(".json")


def to_relative(path: str, data: bytes, roots: Iterable[Path]) -> bytes:
    """The group file at `path` with bare names in place of paths; any other file as it is.

    Raises:
        ValueError: for a broken group file, or one that points outside its own folder.
    """
    if not is_group(path):
        return data
    group = _parse(path, data)
    folder = path.rpartition("/")[0]
    for name, child in group.child_paths.items():
        inside = any(child == str(root / folder / name) for root in roots)
        if not inside or not _CHILD.fullmatch(name):
            raise ValueError(f"a group file that points at {printable(child)!r}, outside its own folder")
    return _ENCODER.encode(Group({name: name for name in group.child_paths}))


def to_absolute(path: str, data: bytes, root: Path) -> bytes:
    """The group file at `path`, as Triton reads it when its cache lies at `root`; any other file as it is.

    Raises:
        ArtifactRefused: ``relocation``, for a name that is a path, or a group file that is none.
    """
    if not is_group(path):
        return data
    try:
        group = _parse(path, data)
    except ValueError as error:
        raise ArtifactRefused(
            "relocation", f"{printable(path)!r} in the bundle is {error}; nothing was installed"
        ) from error
    folder = path.rpartition("/")[0]
    for name, child in group.child_paths.items():
        if child != name or not _CHILD.fullmatch(name) or ".." in name:
            raise ArtifactRefused(
                "relocation",
                f"{printable(path)!r} in the bundle points at {printable(child)!r}, not at a file of its own folder; "
                "nothing was installed",
            )
    return _ENCODER.encode(Group({name: str(root / folder / name) for name in group.child_paths}))


def _parse(path: str, data: bytes) -> Group:
    if len(data) > GROUP_BYTES:
        raise ValueError(f"a group file of {len(data)} bytes")
    try:
        return msgspec.json.decode(data, type=Group)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"a broken group file: {printable(error)}") from error
