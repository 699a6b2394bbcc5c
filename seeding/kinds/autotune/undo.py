"""What an installation replaced, kept in warmseed's own folder until the installation has proved itself."""

from __future__ import annotations

from pathlib import Path

import msgspec

from warmseed.seeding.kinds.autotune.files import held_folder, read_file, replace_file

__all__ = [
    "Undo",
    "forget",
    "managed_files",
    "recall",
    "remember",
    "remember_digest",
    "remember_managed",
    "remembered_digest",
]

_LIMIT = 16 << 20  # bytes of one record


class Undo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How to take one installation back."""

    table: bytes | None = None  # v1: the file that was there
    keys: tuple[str, ...] = ()  # lookup keys of the table as installed, to tell new ones later
    entries: dict[str, bytes] = {}  # v2: entries that gave way, by path relative to the root


def remember(state: Path, sha256: str, generation: int, undo: Undo) -> None:
    """Keep `undo` on disk before anything is replaced; durably, if there is something to put back.

    Raises:
        OSError: if warmseed's own folder can't be written.
    """
    durable = undo.table is not None or bool(undo.entries)
    with held_folder(state / "tables" / "undo", create=True) as folder:
        replace_file(folder, _name(sha256, generation), msgspec.json.encode(undo), durable=durable)


def recall(state: Path, sha256: str, generation: int) -> Undo:
    """The record of an installation, or an empty one.

    Raises:
        OSError: if warmseed's own folder can't be read.
    """
    data = read_file(state / "tables" / "undo" / _name(sha256, generation), _LIMIT)
    try:
        return Undo() if data is None else msgspec.json.decode(data, type=Undo)
    except msgspec.DecodeError:
        return Undo()


def forget(state: Path, sha256: str, generation: int) -> None:
    """Drop the record."""
    (state / "tables" / "undo" / _name(sha256, generation)).unlink(missing_ok=True)


def remember_managed(state: Path, label: str, files: tuple[str, ...]) -> None:
    """Note which entries of the managed store, which knows no configurations, belong to one of them.

    Raises:
        OSError: if warmseed's own folder can't be written.
    """
    with held_folder(state / "tables" / "managed", create=True) as folder:
        replace_file(folder, f"{label}.json", msgspec.json.encode(files), durable=False)  # lost: adopted once more


def managed_files(state: Path, label: str) -> tuple[str, ...]:
    """The entries noted for one configuration, by path relative to the store's root.

    Raises:
        OSError: if warmseed's own folder can't be read.
    """
    data = read_file(state / "tables" / "managed" / f"{label}.json", _LIMIT)
    try:
        return () if data is None else msgspec.json.decode(data, type=tuple[str, ...])
    except msgspec.DecodeError:
        return ()


def remember_digest(state: Path, label: str, sha256: str) -> None:
    """Note which payload a rank's table was installed from or captured as; empty for none.

    Raises:
        OSError: if warmseed's own folder can't be written.
    """
    with held_folder(state / "tables" / "held", create=True) as folder:
        replace_file(folder, label, sha256.encode(), durable=False)  # lost: a pin installs it once more


def remembered_digest(state: Path, label: str) -> str:
    """The digest noted, or an empty text.

    Raises:
        OSError: if warmseed's own folder can't be read.
    """
    return (read_file(state / "tables" / "held" / label, 64) or b"").decode("ascii", "replace")


def _name(sha256: str, generation: int) -> str:
    return f"{sha256}-{generation}.json"
