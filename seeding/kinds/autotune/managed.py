"""FlashInfer's managed (v2) store as a value: its entries, its identity, and the payload that carries several.

A store is a folder ``v2/<environment>`` with one file an operation (`flashinfer.autotune_cache`). FlashInfer
takes a bad file for a miss, but serves an entry's tactic unchecked and never reads ``manifest.json`` back: only
the folder's name counts. So name, manifest, key, file name and tactic are all checked here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from warmseed.errors import printable
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.kinds.autotune.bounded import Json, JsonLimits, parse_json
from warmseed.seeding.kinds.autotune.keys import PROTOCOL, encode_key, split_key
from warmseed.seeding.kinds.autotune.layout import MANAGED_SCHEMA, environment_name, operation_name
from warmseed.seeding.kinds.autotune.table import Entry, check_entry, check_metadata

__all__ = [
    "MEASUREMENT",
    "ManagedEntry",
    "ManagedStore",
    "check_stem",
    "decode_stores",
    "encode_entry",
    "encode_stores",
    "entry_paths",
    "manifest_of",
    "parse_entry",
    "parse_manifest",
]

MEASUREMENT = "measure_"  # prefix of the policy fields in a manifest: another policy is another store
_SCHEMA = "warmseed.flashinfer_autotune.managed/1"
_STORES = 8  # measurement policies in one payload; FlashInfer knows 3 modes x 3 L2 choices, engines use one or two
_ENTRY_LIMITS = JsonLimits(size=64 << 10, values=4096)


class ManagedEntry(msgspec.Struct, frozen=True):
    """One entry; `group` is set for the group records of FlashInfer 0.7.4, whose tactic is any JSON."""

    runner: str
    tactic: Json
    policy: tuple[Json, ...] | None = None
    extra: dict[str, Json] = {}  # fields of later releases, kept as they are
    group: bool = False


@dataclass(frozen=True, slots=True)
class ManagedStore:
    """The entries of one environment and measurement policy."""

    manifest: Mapping[str, str]
    entries: Mapping[str, ManagedEntry]
    left_out: Mapping[str, str] = field(default_factory=dict)  # file -> why it is not among the entries

    @property
    def name(self) -> str:
        """The store's folder name, recomputed."""
        return environment_name(self.manifest)

    @property
    def metadata(self) -> dict[str, str]:
        """The environment alone, as a v1 file's ``_metadata`` spells it."""
        return {
            name: value
            for name, value in self.manifest.items()
            if name != "cache_schema" and not name.startswith(MEASUREMENT)
        }

    @property
    def measured(self) -> tuple[str, ...]:
        """The policy fields; empty for the default policy, the only one a v1 file can express."""
        return tuple(name for name in self.manifest if name.startswith(MEASUREMENT))


def manifest_of(metadata: Mapping[str, str], measurement: Mapping[str, str] | None = None) -> dict[str, str]:
    """The manifest FlashInfer makes of a node's metadata, for the default policy or the one given."""
    return {**metadata, **(measurement or {}), "cache_schema": MANAGED_SCHEMA}


def entry_paths(stores: tuple[ManagedStore, ...]) -> tuple[str, ...]:
    """Every entry's file, relative to the store's root."""
    return tuple(
        f"{MANAGED_SCHEMA}/{store.name}/entries/{operation_name(key)}" for store in stores for key in store.entries
    )


def parse_manifest(value: Json, what: str) -> dict[str, str]:
    """A store's manifest, every field checked for form.

    Raises:
        ArtifactRefused: ``malformed``.
    """
    manifest = check_metadata(value, what)
    if manifest.get("cache_schema") != MANAGED_SCHEMA:
        raise ArtifactRefused("malformed", f"{what} is not of cache schema {MANAGED_SCHEMA}; it is not used")
    return manifest


def parse_entry(data: bytes, what: str) -> tuple[str, ManagedEntry]:
    """Key and content of one entry file; the caller compares `operation_name` of the key with the file's name.

    Raises:
        ArtifactRefused: ``malformed``.
    """
    value = parse_json(data, what, _ENTRY_LIMITS)
    if not isinstance(value, dict):
        raise ArtifactRefused("malformed", f"{what} is not an object; FlashInfer would take it for a miss")
    key = value.pop("key", None)
    if not isinstance(key, str):
        raise ArtifactRefused("malformed", f"{what} has no key; FlashInfer would take it for a miss")
    fields = value.pop("key_fields", None)
    if fields is not None and (known := encode_key(key)) is not None and fields != known:
        raise ArtifactRefused("malformed", f"{what}: its key_fields are not those of its key")
    return key, _entry(key, value, what)


def encode_entry(key: str, entry: ManagedEntry) -> bytes:
    """The entry file as FlashInfer writes it."""
    value: dict[str, Json] = {**entry.extra, "key": key, "runner": entry.runner, "tactic": entry.tactic}
    if entry.policy is not None:
        value["profiling_policy"] = list(entry.policy)
    if (fields := encode_key(key)) is not None:
        value["key_fields"] = fields
    return json.dumps(value, indent=2, sort_keys=True).encode("ascii")


def encode_stores(stores: tuple[ManagedStore, ...]) -> bytes:
    """A payload of several stores, canonical: equal stores give equal bytes.

    ``key_fields`` are left out; they follow from the key.
    """
    return json.dumps(
        {
            "schema": _SCHEMA,
            "stores": [
                {
                    "manifest": dict(store.manifest),
                    "entries": {
                        key: {
                            **entry.extra,
                            "runner": entry.runner,
                            "tactic": entry.tactic,
                            **({} if entry.policy is None else {"profiling_policy": list(entry.policy)}),
                        }
                        for key, entry in store.entries.items()
                    },
                }
                for store in sorted(stores, key=lambda store: store.name)
            ],
        },
        sort_keys=True,
        separators=(",", ":"),
    ).encode("ascii")


def decode_stores(data: bytes, what: str) -> tuple[ManagedStore, ...]:
    """The stores of a payload, whole.

    Raises:
        ArtifactRefused: ``malformed``; one bad entry refuses the payload, since we only ever make good ones.
    """
    value = parse_json(data, what)
    if not isinstance(value, dict) or value.get("schema") != _SCHEMA or set(value) != {"schema", "stores"}:
        raise ArtifactRefused("malformed", f"{what} is not a payload of managed stores; it is not used")
    listed = value["stores"]
    if not isinstance(listed, list) or not 1 <= len(listed) <= _STORES:
        raise ArtifactRefused("malformed", f"{what} does not hold 1 to {_STORES} stores; it is not used")
    stores: list[ManagedStore] = []
    for item in listed:
        if not isinstance(item, dict) or set(item) != {"manifest", "entries"}:
            raise ArtifactRefused("malformed", f"{what} holds something that is no store; it is not used")
        entries = item["entries"]
        if not isinstance(entries, dict):
            raise ArtifactRefused("malformed", f"{what}: a store's entries are not an object")
        manifest = parse_manifest(item["manifest"], what)
        stores.append(ManagedStore(manifest, {key: _entry(key, part, what) for key, part in entries.items()}))
    if len({store.name for store in stores}) != len(stores):
        raise ArtifactRefused("malformed", f"{what} holds the same store twice; it is not used")
    return tuple(stores)


def check_stem(name: str, key: str, what: str) -> None:
    """Nothing, if an entry with `key` belongs in the file `name`.

    Raises:
        ArtifactRefused: ``malformed``.
    """
    if name != operation_name(key):
        raise ArtifactRefused("malformed", f"{what} holds the key of another file; FlashInfer would take it for a miss")


def _entry(key: str, value: Json, what: str) -> ManagedEntry:
    if not isinstance(value, dict) or "runner" not in value or "tactic" not in value:
        raise ArtifactRefused("malformed", f"{what}: the entry {printable(key, limit=80)!r} lacks runner or tactic")
    runner, tactic, policy = value["runner"], value["tactic"], value.get("profiling_policy")
    extra = {name: part for name, part in value.items() if name not in ("runner", "tactic", "profiling_policy")}
    reserved = {"key", "key_fields"} & set(extra)
    if reserved:
        raise ArtifactRefused("malformed", f"{what}: an entry repeats {', '.join(sorted(reserved))}")
    operation, expected = split_key(key)
    if operation == PROTOCOL:
        if runner != expected or policy is not None:
            raise ArtifactRefused("malformed", f"{what}: a group record of {expected} does not name it")
        return ManagedEntry(expected, tactic, None, extra, group=True)
    checked: Entry = check_entry(key, runner, tactic, policy, None, what)
    return ManagedEntry(checked.runner, checked.tactic, checked.policy, extra)
