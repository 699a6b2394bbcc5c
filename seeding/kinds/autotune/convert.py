"""Between a v1 table and a managed store, where one side of a fleet has only the other. Pure.

FlashInfer keeps the two apart in memory and on disk and converts neither; the contents are the same triples
(tried: a store made of a v1 table is served in replay, and not profiled again in tuning).
"""

from __future__ import annotations

from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.kinds.autotune.managed import ManagedEntry, ManagedStore, manifest_of
from warmseed.seeding.kinds.autotune.table import Entry, Table
from warmseed.seeding.kinds.autotune.tactics import is_legacy_plan_index

__all__ = ["store_of_table", "table_of_store", "table_of_stores"]


def store_of_table(table: Table) -> ManagedStore:
    """The managed store of the default measurement policy with the table's entries.

    Bare cuDNN plan indices are left out: FlashInfer skips them in a v1 file, but would serve them from a store.
    A timing is left out too; a managed entry of 0.7 has no place for it. Records of a namespace stay behind.
    """
    entries: dict[str, ManagedEntry] = {}
    left_out: dict[str, str] = {}
    for key, entry in table.entries.items():
        if is_legacy_plan_index(entry.runner, entry.tactic):
            left_out[key] = "a bare cuDNN plan index, which FlashInfer no longer trusts"
        else:
            entries[key] = ManagedEntry(entry.runner, entry.tactic, entry.policy)
    for namespace in table.records:
        left_out[f"_records/{namespace}"] = "a managed store has no place for records"
    return ManagedStore(manifest_of(table.metadata), entries, left_out)


def table_of_store(store: ManagedStore) -> Table:
    """The v1 table with the store's entries, group records left out.

    Raises:
        ArtifactRefused: ``environment``: the store was measured under a policy that a v1 file can't name.
    """
    if store.measured:
        raise ArtifactRefused(
            "environment",
            f"a store measured with {', '.join(store.measured)} can't become a v1 table, which knows one policy only",
            fields=store.measured,
        )
    entries = {
        key: Entry(entry.runner, entry.tactic, entry.policy) for key, entry in store.entries.items() if not entry.group
    }
    return Table(store.metadata, entries)


def table_of_stores(stores: tuple[ManagedStore, ...]) -> Table:
    """The v1 table of whichever store has the default policy.

    Raises:
        ArtifactRefused: ``environment``: none has it.
    """
    plain = next((store for store in stores if not store.measured), None)
    return table_of_store(plain or stores[0])
