"""What lies on this node's disk where FlashInfer will look, and what would happen if it did look."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from warmseed.seeding.environment import Environment
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.kinds.autotune.bounded import JsonLimits, parse_json
from warmseed.seeding.kinds.autotune.compare import compare
from warmseed.seeding.kinds.autotune.files import held_folder, read_file
from warmseed.seeding.kinds.autotune.layout import ENTRY_NAME, ENVIRONMENT_NAME, MANAGED_SCHEMA
from warmseed.seeding.kinds.autotune.managed import (
    ManagedEntry,
    ManagedStore,
    check_stem,
    parse_entry,
    parse_manifest,
)
from warmseed.seeding.kinds.autotune.table import Table, parse_table
from warmseed.seeding.rejected import Rejected, list_rejected, move_aside, restore

__all__ = ["LocalTable", "Standing", "examine_store", "examine_table", "heal_table", "list_stores"]

_log = logging.getLogger(__name__)
_ENTRIES = 8192  # files read from one store
_STORES = 64  # folders looked at below ``v2/``


class Standing(Enum):
    """What FlashInfer would do with a local v1 file."""

    ABSENT = "absent"  # tune, and write one
    GOOD = "good"  # load it
    CORRUPT = "corrupt"  # raise, load rubbish, or load a table of anywhere: at every start
    FOREIGN = "foreign"  # ignore it and never replace it: tune at every start
    VAGUE = "vague"  # ignore it, tune, and replace it: heals by itself
    UNDECIDED = "undecided"  # this node does not know its own environment now


@dataclass(frozen=True, slots=True)
class LocalTable:
    """A local v1 file as examined once."""

    path: Path
    standing: Standing
    reason: str = ""
    data: bytes = b""
    table: Table | None = None


def examine_table(path: Path, ours: Mapping[str, str]) -> LocalTable:
    """The v1 file at `path`, read once and judged against this node's metadata.

    Raises:
        OSError: if the disk fails.
    """
    try:
        data = read_file(path, JsonLimits().size)
        if data is None:
            return LocalTable(path, Standing.ABSENT)
        table = parse_table(data, path.name)
    except NotADirectoryError:
        return LocalTable(path, Standing.ABSENT)
    except ArtifactRefused as refused:
        return LocalTable(path, Standing.CORRUPT, str(refused))
    found = compare(table.metadata, ours)
    if found.hard:
        standing, reason = Standing.FOREIGN, "; ".join(map(str, (*found.hard, *found.soft)))
    elif found.soft or found.wildcard:
        standing, reason = Standing.VAGUE, "; ".join((*map(str, found.soft), *(f"{w}: any" for w in found.wildcard)))
    elif found.undecided:
        standing, reason = Standing.UNDECIDED, f"this node does not know its {', '.join(found.undecided)}"
    else:
        standing, reason = Standing.GOOD, ""
    return LocalTable(path, standing, reason, data, table)


def heal_table(found: LocalTable, ours: Environment, state: Path) -> LocalTable:
    """`found`, or what lies there after a file that poisons every start was moved aside.

    A file of another environment leaves room for one of ours that was moved aside earlier: two GPU models that
    share one folder each keep their table.

    Raises:
        OSError: if the folder can't be written; the file is then still there, and the engine will fail on it.
    """
    if found.standing not in (Standing.CORRUPT, Standing.FOREIGN):
        return found
    note = "" if found.table is None else Environment(found.table.metadata).digest
    reason = "malformed" if found.standing is Standing.CORRUPT else "environment"
    detail = found.reason
    if found.standing is Standing.FOREIGN:
        detail += "; give each GPU model a folder of its own (VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR)"
    move_aside(found.path, state, reason=reason, detail=detail, note=note)
    earlier = _earlier(found.path, ours, state)
    if earlier is not None and restore(earlier, state):
        back = examine_table(found.path, ours)
        if back.standing is Standing.GOOD:
            _log.info("put back %s, which was tuned in this environment", found.path)
            return back
        move_aside(found.path, state, reason="malformed", detail=back.reason)
    return LocalTable(found.path, Standing.ABSENT)


def _earlier(path: Path, ours: Environment, state: Path) -> Rejected | None:
    wanted = ours.digest
    return next(
        (item for item in list_rejected(state) if item.original == str(path.absolute()) and item.note == wanted), None
    )


def list_stores(root: Path, ours: Mapping[str, str]) -> tuple[ManagedStore, ...]:
    """The managed stores below `root` that were made in this environment, one a measurement policy.

    Raises:
        OSError: if the disk fails.
    """
    parent = root / MANAGED_SCHEMA
    try:
        names = sorted(name for name in os.listdir(parent) if ENVIRONMENT_NAME.fullmatch(name))
    except (FileNotFoundError, NotADirectoryError):
        return ()
    stores: list[ManagedStore] = []
    for name in names[:_STORES]:
        try:
            store = examine_store(parent / name)
        except (ArtifactRefused, FileNotFoundError, NotADirectoryError) as error:
            _log.info("left the store %s alone: %s", name, error)
            continue
        if compare(store.metadata, ours).same:
            stores.append(store)
    return tuple(stores)


def examine_store(folder: Path) -> ManagedStore:
    """The store in `folder`; entries that FlashInfer would miss, or serve unchecked, are left out with the reason.

    Raises:
        ArtifactRefused: ``malformed`` or ``environment``: its manifest is missing, no manifest, or not its own.
        OSError: if the disk fails.
    """
    with held_folder(folder) as held:
        data = read_file("manifest.json", 64 << 10, folder=held)
        if data is None:
            raise ArtifactRefused("malformed", f"{folder} has no manifest.json; nobody can say what it is for")
        manifest = parse_manifest(parse_json(data, "manifest.json"), "manifest.json")
    store = ManagedStore(manifest, {})
    if store.name != folder.name:
        raise ArtifactRefused(
            "environment", f"{folder} holds the manifest of {store.name}: FlashInfer serves its entries all the same"
        )
    entries: dict[str, ManagedEntry] = {}
    left_out: dict[str, str] = {}
    room = JsonLimits().size
    with held_folder(folder / "entries") as held:
        for name in sorted(os.listdir(held)):
            if not ENTRY_NAME.fullmatch(name):
                continue
            try:
                if len(entries) + len(left_out) >= _ENTRIES or room <= 0:
                    raise ArtifactRefused("space", "the store is larger than any that is published")
                text = read_file(name, 64 << 10, folder=held)
                if text is None:  # FlashInfer 0.7.4 may discard an entry at any time
                    continue
                room -= len(text)
                key, entry = parse_entry(text, name)
                check_stem(name, key, name)
                entries[key] = entry
            except ArtifactRefused as refused:
                left_out[f"entries/{name}"] = str(refused)
    return ManagedStore(manifest, entries, left_out)
