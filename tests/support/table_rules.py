"""What must hold for any bytes that claim to be a table, an entry or a payload of stores; used by tests and fuzzer."""

from __future__ import annotations

from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.kinds.autotune.convert import store_of_table, table_of_store
from warmseed.seeding.kinds.autotune.managed import decode_stores, encode_entry, encode_stores, parse_entry
from warmseed.seeding.kinds.autotune.table import parse_table


def one_input(data: bytes) -> None:
    """Refused as `ArtifactRefused`, or accepted and the same after another round through text and conversion."""
    try:
        table = parse_table(data)
    except ArtifactRefused:
        pass
    else:
        if parse_table(table.encode()) != table:
            raise AssertionError("a table is not the same after encoding")
        back = table_of_store(store_of_table(table))
        if not back.entries.keys() <= table.entries.keys():
            raise AssertionError("a conversion made entries up")
    try:
        stores = decode_stores(data, "payload")
    except ArtifactRefused:
        pass
    else:
        if encode_stores(decode_stores(encode_stores(stores), "payload")) != encode_stores(stores):
            raise AssertionError("a payload of stores is not the same after encoding")
    try:
        key, entry = parse_entry(data, "entry")
    except ArtifactRefused:
        return
    if parse_entry(encode_entry(key, entry), "entry") != (key, entry):
        raise AssertionError("an entry is not the same after encoding")
