"""Which run a rank's local table belongs to, noted in warmseed's own folder.

A table says nothing of the run it came from, and a process may be killed between installing one and hearing
whether its group kept it. So an installation is noted as pending first: a pending note offers nothing.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import msgspec

from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.kinds.autotune.bounded import JsonLimits
from warmseed.seeding.kinds.autotune.files import held_folder, read_file, replace_file
from warmseed.seeding.kinds.autotune.home import label, per_rank_path
from warmseed.seeding.kinds.autotune.layout import MANAGED_ROOT, PER_RANK_ROOT
from warmseed.seeding.kinds.autotune.undo import managed_files
from warmseed.seeding.kinds.base import Site

__all__ = ["Note", "local_digest", "read_note", "write_note"]


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is known of the local table."""

    run: Annotated[str, msgspec.Meta(max_length=128)]
    local: Annotated[str, msgspec.Meta(max_length=64)] = ""  # `local_digest` when the run was complete; empty: pending


def read_note(site: Site) -> Note | None:
    """The note of this rank, or `None`. One that can't be read counts as pending.

    Raises:
        OSError: if warmseed's own folder can't be read.
    """
    try:
        data = read_file(_path(site), 4096)
        return None if data is None else msgspec.json.decode(data, type=Note)
    except (ArtifactRefused, msgspec.MsgspecError):
        return Note("")


def write_note(site: Site, note: Note | None) -> None:
    """Replace the note, durably, or drop it.

    Raises:
        OSError: if warmseed's own folder can't be written.
    """
    path = _path(site)
    if note is None:
        path.unlink(missing_ok=True)
        return
    with held_folder(path.parent, create=True) as folder:
        replace_file(folder, path.name, msgspec.json.encode(note))


def local_digest(site: Site) -> str:
    """SHA-256 of this rank's table as it lies here: the v1 file, or the managed entries noted for it.

    Raises:
        OSError: if the disk fails.
    """
    paths: list[Path] = []
    if PER_RANK_ROOT in site.roots:
        paths.append(per_rank_path(site))
    elif MANAGED_ROOT in site.roots:
        paths += [site.roots[MANAGED_ROOT] / name for name in managed_files(site.state, label(site))]
    found = hashlib.sha256()
    for path in paths:
        data = read_file(path, JsonLimits().size) or b""
        found.update(hashlib.sha256(data).digest())
    return found.hexdigest()


def _path(site: Site) -> Path:
    return site.state / "tables" / "runs" / f"{label(site)}.json"
