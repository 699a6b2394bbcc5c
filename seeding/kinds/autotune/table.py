"""A FlashInfer autotune table: its text, validated whole, as a value. Pure: no disk, no clock, no FlashInfer.

The text is FlashInfer's v1 file (`AutoTuner.save_configs` of 0.6 to 0.7.4): ``_metadata``, perhaps ``_records``,
one ``key: [runner, tactic, policy?, timing?]`` a tuned operation, ``_generation``. `load_configs` checks almost
nothing of it: one wrong value raises after a partial load, in every rank and at every start. So everything it
reads is checked here, before the text may lie where FlashInfer looks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import msgspec

from warmseed.errors import printable
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.kinds.autotune.bounded import Json, JsonLimits, parse_json
from warmseed.seeding.kinds.autotune.keys import PROTOCOL, split_key
from warmseed.seeding.kinds.autotune.tactics import check_tactic

__all__ = ["METADATA_FIELDS", "Entry", "Table", "check_entry", "check_metadata", "parse_table"]

# `flashinfer.autotuner._collect_metadata`; later releases may add to it, none has taken one away.
METADATA_FIELDS = (
    "flashinfer_version",
    "cuda_version",
    "cublas_version",
    "cudnn_version",
    "cudnn_frontend_version",
    "cutlass_dsl_version",
    "gpu",
)
_METADATA, _RECORDS, _GENERATION = "_metadata", "_records", "_generation"
_METADATA_COUNT = 32  # fields
_METADATA_TEXT = 1024  # characters in one value
_POLICY_ITEMS = 32


class Entry(msgspec.Struct, frozen=True):
    """The winner of one tuned operation."""

    runner: str
    tactic: Json
    policy: tuple[Json, ...] | None = None  # how it was measured; absent in files older than 0.7.2
    timing: Mapping[str, Json] | None = None  # 0.7.4: ``time_ms``, ``runner_up_ms``, ``margin``, ``candidates``

    def as_value(self) -> list[Json]:
        """The entry as a v1 file holds it, element for element."""
        value: list[Json] = [self.runner, self.tactic]
        if self.policy is not None or self.timing is not None:
            value.append(None if self.policy is None else list(self.policy))
        if self.timing is not None:
            value.append(dict(self.timing))
        return value


@dataclass(frozen=True, slots=True)
class Table:
    """A validated table."""

    metadata: Mapping[str, str]
    entries: Mapping[str, Entry]
    records: Mapping[str, Json] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The text as FlashInfer would write it, ``_generation`` included; equal tables give equal bytes."""
        ordered: dict[str, Json] = {_METADATA: dict(self.metadata)}
        if self.records:
            ordered[_RECORDS] = dict(self.records)
        for key in sorted(self.entries):
            ordered[key] = self.entries[key].as_value()
        canonical = json.dumps(ordered, sort_keys=True, separators=(",", ":"))
        ordered[_GENERATION] = hashlib.sha256(canonical.encode("ascii")).hexdigest()
        return json.dumps(ordered, indent=2).encode("ascii")


def parse_table(data: bytes, what: str = "the table", *, limits: JsonLimits | None = None) -> Table:
    """The table that `data` spells, every part of it checked; `what` names it in errors.

    Raises:
        ArtifactRefused: ``malformed``, for anything on which FlashInfer would raise, that it would load for any
            environment (no ``_metadata``), or that it would hand to a kernel unchecked.
    """
    value = parse_json(data, what, limits)
    if not isinstance(value, dict):
        raise ArtifactRefused("malformed", f"{what} is {type(value).__name__}, not an object; it is not used")
    metadata = check_metadata(value.pop(_METADATA, None), what)
    records = value.pop(_RECORDS, {})
    if not isinstance(records, dict) or not all(isinstance(record, dict) for record in records.values()):
        raise ArtifactRefused("malformed", f"{what}: {_RECORDS} is not an object of objects; FlashInfer would raise")
    generation = value.pop(_GENERATION, "")
    if not isinstance(generation, str) or len(generation) > 64:
        raise ArtifactRefused("malformed", f"{what}: {_GENERATION} is not a digest")
    entries: dict[str, Entry] = {}
    for key, item in value.items():
        if key.startswith("_"):
            raise ArtifactRefused("malformed", f"{what} has a section {printable(key)!r} that FlashInfer can't read")
        entries[key] = _entry(key, item, what)
    return Table(metadata, entries, records)


def check_metadata(value: Json, what: str) -> dict[str, str]:
    """The environment a table was tuned in, if it names every field; values are not judged here.

    Raises:
        ArtifactRefused: ``malformed``. A table without it would be loaded in *any* environment, and stamped as
            local by the next save.
    """
    if not isinstance(value, dict):
        raise ArtifactRefused(
            "malformed", f"{what} does not say in which environment it was tuned ({_METADATA}); it is not used"
        )
    missing = tuple(name for name in METADATA_FIELDS if name not in value)
    if missing:
        raise ArtifactRefused("malformed", f"{what}: {_METADATA} lacks {', '.join(missing)}", fields=missing)
    found: dict[str, str] = {}
    for name, text in value.items():
        if not isinstance(text, str) or not text or not text.isprintable() or not name.isprintable():
            raise ArtifactRefused("malformed", f"{what}: {_METADATA} field {printable(name)!r} is not a line of text")
        if len(text) > _METADATA_TEXT or len(name) > _METADATA_TEXT or len(value) > _METADATA_COUNT:
            raise ArtifactRefused("malformed", f"{what}: {_METADATA} is larger than any environment")
        found[name] = text
    return found


def _entry(key: str, item: Json, what: str) -> Entry:
    if not isinstance(item, list) or not 2 <= len(item) <= 4:
        raise ArtifactRefused(
            "malformed",
            f"{what}: the entry {printable(key, limit=80)!r} is not a list of 2 to 4; FlashInfer would raise",
        )
    policy = item[2] if len(item) > 2 else None
    timing = item[3] if len(item) > 3 else None
    if len(item) > 2 and not isinstance(policy, list):
        raise ArtifactRefused("malformed", f"{what}: the policy of {printable(key, limit=80)!r} is not a list")
    return check_entry(key, item[0], item[1], policy, timing, what)


def check_entry(key: str, runner: Json, tactic: Json, policy: Json, timing: Json, what: str) -> Entry:
    """One entry, checked against its key.

    Raises:
        ArtifactRefused: ``malformed``.
    """
    operation, expected = split_key(key)
    if runner != expected:
        raise ArtifactRefused(
            "malformed", f"{what}: an entry of {expected} names the runner {printable(runner, limit=80)!r}"
        )
    if operation == PROTOCOL:
        raise ArtifactRefused("malformed", f"{what} holds a group record, which only a managed store may")
    check_tactic(expected, tactic)
    if policy is None:
        known = None
    else:
        known = _policy(policy)
        if known is None:
            raise ArtifactRefused("malformed", f"{what}: the policy of {printable(key, limit=80)!r} is not scalars")
    if timing is not None and not (isinstance(timing, dict) and all(_scalar(part) for part in timing.values())):
        raise ArtifactRefused("malformed", f"{what}: the timing of {printable(key, limit=80)!r} is not flat")
    return Entry(expected, tactic, known, timing)


def _policy(value: Json) -> tuple[Json, ...] | None:
    """The measurement policy as a tuple, or `None` for what can't be one."""
    if not isinstance(value, list) or len(value) > _POLICY_ITEMS:
        return None
    try:
        # A table has two or three policies and thousands of entries. The types are in the key: 1 == True == 1.0.
        return _checked_policy(tuple(value), tuple(map(type, value)))
    except (TypeError, ValueError):
        return None


@lru_cache(maxsize=64)
def _checked_policy(policy: tuple[Json, ...], types: tuple[type, ...]) -> tuple[Json, ...]:
    if not all(_scalar(part) for part in policy):
        raise ValueError("not scalars")
    return policy


def _scalar(value: Json) -> bool:
    if isinstance(value, str):
        return len(value) <= 128 and value.isprintable()
    return value is None or isinstance(value, bool | int | float)
