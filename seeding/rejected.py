"""Local cache files that must not stay where an engine reads them: moved aside with the reason, never deleted.

The file stays in its folder under ``.<name>.rejected-<id>`` (a rename can't fail half way, and an operator finds
it), and a record of why lies in warmseed's own folder, where `list_rejected` reads it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import time
from pathlib import Path

import msgspec

from warmseed.errors import printable

__all__ = ["Rejected", "list_rejected", "move_aside", "restore"]

_log = logging.getLogger(__name__)
_RECORD_BYTES = 64 << 10
_LISTED = 10_000  # records read at most


class Rejected(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One file that was moved aside."""

    original: str  # absolute path where an engine would have read it
    moved_to: str  # absolute path where it lies now
    reason: str  # short stable word, as in `ArtifactRefused.reason`
    detail: str  # for people
    moved_at: float  # unix seconds
    note: str = ""  # what the mover wants to find it by again, such as an environment's digest


def move_aside(path: Path, state: Path, *, reason: str, detail: str, note: str = "") -> Rejected | None:
    """Take the file at `path` out of every reader's sight; `None` if it vanished by itself.

    The record is written before the rename, so a crash between the two leaves a record of a file that is still
    in place, never a hidden file that nobody knows of.

    Raises:
        OSError: if the folder can't be written (a read-only mount); the file is still where it was.
    """
    token = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(4)}"
    found = Rejected(
        original=str(path.absolute()),
        moved_to=str(path.absolute().parent / f".{path.name}.rejected-{token}"),
        reason=reason,
        detail=printable(detail, limit=1000),
        moved_at=time.time(),
        note=printable(note),
    )
    record = _folder(state) / f"{token}.json"
    record.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = record.with_suffix(".tmp")
    temporary.write_bytes(msgspec.json.encode(found))
    os.replace(temporary, record)
    try:
        os.rename(path, found.moved_to)
    except OSError as error:
        with contextlib.suppress(FileNotFoundError):
            record.unlink()
        if error.errno == errno.ENOENT:
            return None
        raise
    _log.warning(
        "moved %s aside: %s (%s); it is kept as %s and `warmseed ls --rejected` lists it",
        found.original,
        found.detail,
        reason,
        found.moved_to,
    )
    return found


def restore(rejected: Rejected, state: Path) -> bool:
    """Put a file back where it was, unless something is there again; whether it was put back.

    Raises:
        OSError: if the folder can't be written.
    """
    try:
        os.link(rejected.moved_to, rejected.original, follow_symlinks=False)
    except (FileExistsError, FileNotFoundError):
        return False
    os.unlink(rejected.moved_to)
    for record, found in _records(state):
        if found == rejected:
            record.unlink(missing_ok=True)
    return True


def list_rejected(state: Path) -> tuple[Rejected, ...]:
    """Every file that was moved aside and is still there, newest first.

    Raises:
        OSError: if warmseed's own folder can't be read.
    """
    found = [rejected for _, rejected in _records(state) if os.path.lexists(rejected.moved_to)]
    return tuple(sorted(found, key=lambda rejected: rejected.moved_at, reverse=True))


def _records(state: Path) -> list[tuple[Path, Rejected]]:
    folder = _folder(state)
    found: list[tuple[Path, Rejected]] = []
    if not folder.is_dir():
        return found
    for record in sorted(folder.glob("*.json"))[-_LISTED:]:
        with contextlib.suppress(FileNotFoundError, msgspec.DecodeError), record.open("rb") as source:
            found.append((record, msgspec.json.decode(source.read(_RECORD_BYTES), type=Rejected)))
    return found


def _folder(state: Path) -> Path:
    return state / "rejected"
