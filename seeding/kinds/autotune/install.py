"""Putting a validated table where FlashInfer will look: whole or not at all, and never over a better one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.kinds.autotune.bounded import JsonLimits, parse_json
from warmseed.seeding.kinds.autotune.files import held_folder, read_file, replace_file, sync_folder
from warmseed.seeding.kinds.autotune.layout import MANAGED_SCHEMA, operation_name
from warmseed.seeding.kinds.autotune.local import LocalTable, Standing
from warmseed.seeding.kinds.autotune.managed import (
    ManagedStore,
    check_stem,
    encode_entry,
    parse_entry,
    parse_manifest,
)
from warmseed.seeding.kinds.autotune.table import Table, parse_table
from warmseed.seeding.rejected import move_aside

__all__ = ["Placed", "merge", "place_store", "place_table"]

Overlap = Literal["local", "seeded"]


@dataclass(frozen=True, slots=True)
class Placed:
    """What was written, by path relative to the root, and what was there before."""

    files: Mapping[str, str]  # relative path -> SHA-256 of the file as it is now
    added: int  # entries that were not there before
    kept: int  # entries of this node that stayed as they were
    previous: bytes | None = None  # v1: the file that was replaced
    replaced: Mapping[str, bytes] = field(default_factory=dict)  # v2: entries that gave way, by relative path


def merge(local: Table, seeded: Table, overlap: Overlap) -> Table:
    """Both tables in one, of the same environment; on an operation both have tuned, `overlap` says who wins.

    A rank alone keeps its own measurements. The ranks of a group must all serve the seeded ones: two runs
    pick different tactics, and kernels that meet over symmetric memory then wait for each other for ever.
    """
    first, second = (seeded, local) if overlap == "local" else (local, seeded)
    return Table(local.metadata, {**first.entries, **second.entries}, {**first.records, **second.records})


def place_table(
    table: Table, data: bytes, root: Path, relative: Path, *, local: LocalTable, overlap: Overlap
) -> Placed:
    """Make ``root/relative`` hold the table, merged with a good one that is there already.

    `data` is the text `table` was read from; where nothing has to be merged these exact bytes are written.

    Raises:
        ArtifactRefused: ``malformed``: the disk holds something else than was written.
        OSError: if the disk fails; the file is as it was then.
    """
    added, kept, previous = len(table.entries), 0, None
    if local.standing is Standing.GOOD and local.table is not None:
        previous, kept = local.data, len(local.table.entries)
        joined = merge(local.table, table, overlap)
        added = len(joined.entries) - kept
        if joined == local.table:
            return Placed({str(relative): hashlib.sha256(local.data).hexdigest()}, 0, kept, previous)
        data = data if joined == table else joined.encode()
    elif local.standing is not Standing.ABSENT:
        previous = local.data or None
    target = root / relative
    with held_folder(target.parent, create=True) as folder:
        replace_file(folder, target.name, data)
        written = read_file(target.name, JsonLimits().size, folder=folder)
    if written != data:  # an engine saved in between: its file is judged like any other
        parse_table(written or b"", target.name)
    return Placed({str(relative): hashlib.sha256(written or b"").hexdigest()}, added, kept, previous)


def place_store(store: ManagedStore, root: Path, state: Path, *, overlap: Overlap) -> Placed:
    """Add the store's entries to the one below `root`; entries that are there and good stay, if `overlap` says so.

    Every entry is a file of its own that FlashInfer reads alone, so each becomes visible in one step; if one
    can't be written, those written before are taken back. Entries are not flushed one by one (seconds, on a busy
    disk): one that a power cut empties is a miss to FlashInfer and absent to us.

    Raises:
        OSError: if the disk fails; nothing was added then.
    """
    folder = root / MANAGED_SCHEMA / store.name
    files: dict[str, str] = {}
    created: list[str] = []
    replaced: dict[str, bytes] = {}
    kept = 0
    with held_folder(folder / "entries", create=True) as entries:
        try:
            for key, entry in sorted(store.entries.items()):
                name = operation_name(key)
                data = encode_entry(key, entry)
                there = _usable(folder / "entries" / name, key, entries, state)
                if there is not None and (overlap == "local" or there == data):
                    kept += 1
                    continue
                if not replace_file(entries, name, data, durable=False, only_new=there is None):
                    kept += 1
                    continue
                relative = f"{MANAGED_SCHEMA}/{store.name}/entries/{name}"
                files[relative] = hashlib.sha256(data).hexdigest()
                if there is None:
                    created.append(name)
                else:
                    replaced[relative] = there
            sync_folder(entries)
            _place_manifest(store, folder, state)
        except BaseException:
            for name in created:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=entries)
            for relative, there in replaced.items():
                with contextlib.suppress(OSError):
                    replace_file(entries, Path(relative).name, there, durable=False)
            raise
    return Placed(files, len(created), kept, replaced=replaced)


def _usable(path: Path, key: str, folder: int, state: Path) -> bytes | None:
    """The entry that is there, if FlashInfer would serve it and it may; one that it would miss is moved aside."""
    try:
        data = read_file(path.name, 64 << 10, folder=folder)
        if data is None:
            return None
        found, _ = parse_entry(data, path.name)
        check_stem(path.name, found, path.name)
        if found != key:
            raise ArtifactRefused("malformed", f"{path.name} holds another operation's key")
    except (ArtifactRefused, IsADirectoryError) as error:
        move_aside(path, state, reason="malformed", detail=str(error))
        return None
    return data


def _place_manifest(store: ManagedStore, folder: Path, state: Path) -> None:
    wanted = dict(store.manifest)
    with held_folder(folder) as held:
        try:
            data = read_file("manifest.json", 64 << 10, folder=held)
            if data is not None and parse_manifest(parse_json(data, "manifest.json"), "manifest.json") == wanted:
                return
            problem = "it describes another store"
        except ArtifactRefused as refused:
            data, problem = b"", str(refused)
        if data is not None:
            move_aside(folder / "manifest.json", state, reason="environment", detail=problem)
        replace_file(held, "manifest.json", _manifest_text(wanted))


def _manifest_text(manifest: Mapping[str, str]) -> bytes:
    return json.dumps(manifest, indent=2, sort_keys=True).encode("ascii")
