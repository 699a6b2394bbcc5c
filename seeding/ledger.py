"""What was adopted, whether it was used, and what it saved: one JSON line an event, for metrics and reports."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec

__all__ = ["Entry", "Ledger", "Totals"]

LINE_BYTES = 16 << 10  # bytes in the longest line; longer reasons are cut
ROTATE_BYTES = 8 << 20  # bytes after which a new file is begun; one old file is kept

Text = Annotated[str, msgspec.Meta(max_length=1024)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Entry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One artifact in one start of one rank."""

    at: int  # unix seconds
    kind: Text
    rank: Text
    event: Literal["adopted", "used", "unused", "refused", "published", "pardoned", "quarantined", "local"]
    config_hash: Text = ""
    sha256: Text = ""
    generation: int = 0
    origin: Text = ""  # the tier or peer it came from
    bytes: int = 0  # moved over the wire
    seconds: Seconds = 0.0  # that this event took
    saved: Seconds = 0.0  # seconds: the same warmup done from nothing, less this one
    reason: Text = ""
    per_cache: dict[str, bool] = {}


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over a ledger."""

    adopted: int = 0
    used: int = 0
    unused: int = 0
    refused: int = 0
    quarantined: int = 0
    seconds_saved: float = 0.0
    bytes_moved: int = 0


class Ledger:
    """The ledger in `path`. Ranks append at once without a lock: one line is one write. All methods block."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._old = path.with_name(f"{path.name}.1")

    def record(self, entry: Entry) -> None:
        """Append one entry.

        Raises:
            OSError: when the disk fails; callers log it and go on, no start depends on the ledger.
        """
        line = msgspec.json.encode(entry)
        if len(line) >= LINE_BYTES:
            line = msgspec.json.encode(msgspec.structs.replace(entry, reason="", per_cache={}))
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.write(handle, b"\n" + line + b"\n")  # the first newline ends a line that a crash cut short
            full = os.fstat(handle).st_size > ROTATE_BYTES
        finally:
            os.close(handle)
        if full:
            os.replace(self._path, self._old)

    def entries(self) -> Iterator[Entry]:
        """Everything on record, oldest first; lines that a crash cut short are skipped."""
        decoder = msgspec.json.Decoder(Entry)
        for path in (self._old, self._path):
            try:
                lines = path.read_bytes().split(b"\n")
            except FileNotFoundError:
                continue
            for line in lines:
                if not line:
                    continue
                try:
                    yield decoder.decode(line)
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    continue

    def totals(self) -> Totals:
        """What all entries add up to."""
        counts = dict.fromkeys(("adopted", "used", "unused", "refused", "quarantined"), 0)
        saved, moved = 0.0, 0
        for entry in self.entries():
            if entry.event in counts:
                counts[entry.event] += 1
            saved += entry.saved
            moved += entry.bytes
        return Totals(**counts, seconds_saved=saved, bytes_moved=moved)
