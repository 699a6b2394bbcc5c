"""From what FlashInfer left on this node's disk to a payload that another node can believe."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping

from warmseed.seeding.artifact import ArtifactKey, object_key
from warmseed.seeding.captured import new_payload
from warmseed.seeding.environment import Environment
from warmseed.seeding.errors import ArtifactRefused, CannotJudge
from warmseed.seeding.kinds.autotune.bounded import JsonLimits
from warmseed.seeding.kinds.autotune.compare import require_publishable, require_same
from warmseed.seeding.kinds.autotune.convert import table_of_store, table_of_stores
from warmseed.seeding.kinds.autotune.files import held_folder, replace_file
from warmseed.seeding.kinds.autotune.home import label, metadata_of, per_rank_path
from warmseed.seeding.kinds.autotune.install import merge
from warmseed.seeding.kinds.autotune.layout import (
    KIND,
    MANAGED_ROOT,
    PER_RANK_ROOT,
    managed_filename,
    per_rank_filename,
)
from warmseed.seeding.kinds.autotune.local import LocalTable, Standing, examine_table, list_stores
from warmseed.seeding.kinds.autotune.managed import ManagedStore, encode_stores, entry_paths
from warmseed.seeding.kinds.autotune.provenance import describe
from warmseed.seeding.kinds.autotune.table import Table
from warmseed.seeding.kinds.autotune.undo import remember_digest, remember_managed
from warmseed.seeding.kinds.base import Capture, Site

__all__ = ["capture_tables"]


def capture_tables(site: Site) -> Capture | None:
    """The table as FlashInfer saved it, or `None` if it tuned nothing.

    Raises:
        CannotJudge: this node does not know its own environment now.
        ArtifactRefused: ``malformed``, ``environment`` or ``space``: the table must stay on this node.
        OSError: if the disk fails.
    """
    ours = metadata_of(site)
    if ours.unknown:
        raise CannotJudge(
            "environment",
            f"this node does not know its {', '.join(ours.unknown)}, so its table is not published",
            fields=ours.unknown,
        )
    stores: tuple[ManagedStore, ...] = ()
    if MANAGED_ROOT in site.roots:
        stores = tuple(store for store in list_stores(site.roots[MANAGED_ROOT], ours) if store.entries)
    if PER_RANK_ROOT in site.roots:
        local = examine_table(per_rank_path(site), ours)
        if local.standing is Standing.GOOD and local.table is not None:
            return _of_table(_with_newer(local, local.table, stores), ours, site)
        if local.standing is not Standing.ABSENT:
            return _of_table(local, ours, site)
    return _of_stores(stores, ours, site) if stores else None


def _with_newer(local: LocalTable, table: Table, stores: tuple[ManagedStore, ...]) -> LocalTable:
    """The v1 table with what the engine tuned into the managed store since; one engine reads only one of the two."""
    plain = next((store for store in stores if not store.measured), None)
    if plain is None:
        return local
    found = table_of_store(plain)
    if found.entries.keys() <= table.entries.keys():
        return local
    joined = merge(table, found, "local")
    return dataclasses.replace(local, table=joined, data=joined.encode())


def _of_table(local: LocalTable, ours: Environment, site: Site) -> Capture:
    if local.table is None:
        raise ArtifactRefused("malformed", f"{local.path} is not published: {local.reason}")
    require_publishable(local.table.metadata, str(local.path))
    require_same(local.table.metadata, ours, str(local.path))
    timings = [entry.timing for entry in local.table.entries.values() if entry.timing]
    provenance = describe(local.table.entries, timings, local.table.metadata, form="v1")
    return _captured(local.data, ours, site, per_rank=True, provenance=provenance)


def _of_stores(stores: tuple[ManagedStore, ...], ours: Environment, site: Site) -> Capture:
    left_out = {f"{store.name}/{name}": reason for store in stores for name, reason in store.left_out.items()}
    remember_managed(site.state, label(site), entry_paths(stores))
    provenance = describe((key for store in stores for key in store.entries), (), ours, form="v2")
    # The v1 form wherever it can hold everything: every reader has it, stock vLLM included.
    plain = len(stores) == 1 and not stores[0].measured
    plain = plain and not any(entry.group or entry.extra for entry in stores[0].entries.values())
    data = table_of_stores(stores).encode() if plain else encode_stores(stores)
    return _captured(data, ours, site, per_rank=plain, provenance=provenance, left_out=left_out)


def _captured(
    data: bytes,
    ours: Environment,
    site: Site,
    *,
    per_rank: bool,
    provenance: Mapping[str, str],
    left_out: Mapping[str, str] | None = None,
) -> Capture:
    if len(data) > JsonLimits().size:
        raise ArtifactRefused("space", f"the table has {len(data)} bytes, more than any node reads; not published")
    digest = hashlib.sha256(data).hexdigest()
    payload = new_payload(site.state / "tables" / "captured", digest)
    with held_folder(payload.parent) as folder:
        replace_file(folder, payload.name, data)
    remember_digest(site.state, label(site), digest)
    key = ArtifactKey(
        kind=KIND,
        config_hash=site.config_hash,
        environment_hash=ours.digest,
        dp_rank=site.dp_rank,
        world_rank=site.world_rank,
    )
    filename = (per_rank_filename if per_rank else managed_filename)(site.dp_rank, site.world_rank)
    return Capture(
        filename=filename,
        payload=payload,
        sha256=digest,
        length=len(data),
        environment=ours,
        device_index=-1,
        store_key=object_key(digest),
        provenance=provenance,
        left_out=left_out or {},
        also=(key.reference_key(filename),) if per_rank else (),
    )
