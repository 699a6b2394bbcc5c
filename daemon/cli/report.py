"""``warmseed report``: what was adopted, used and saved here, and where a start's seconds went."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from warmseed.daemon.settings.paths import default_cache_root, state_folder
from warmseed.errors import WarmseedError, printable
from warmseed.seeding.ledger import Entry, Ledger

__all__ = ["report"]

_STATUS_SECONDS = 5.0  # for a launcher to answer
_STATUS_BYTES = 16 << 20  # bytes in the longest answer read
_WIDTH = 40  # characters of the waterfall's bars


def report(
    *,
    cache_root: Annotated[Path | None, typer.Option(help="Root of this node's warmup caches.")] = None,
    status: Annotated[
        str | None, typer.Option(help="A launcher's address, http://127.0.0.1:PORT: adds its start as a waterfall.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Show what this node adopted, whether it was used, what that saved, and where a start's seconds went."""
    root = default_cache_root() if cache_root is None else cache_root.absolute()
    ledger = Ledger(state_folder(root) / "ledger.jsonl")
    entries = list(ledger.entries())
    ranks = _ranks(status) if status is not None else []
    if as_json:
        record = {
            "totals": msgspec.to_builtins(ledger.totals()),
            "entries": msgspec.to_builtins(entries),
            "ranks": ranks,
        }
        print(json.dumps(record))
        return
    console = Console()
    _print_ledger(console, entries)
    for rank in ranks:
        _print_waterfall(console, rank)


def _ranks(address: str) -> list[dict[str, Any]]:
    if not address.startswith(("http://", "https://")):
        raise WarmseedError(f"--status {printable(address)} is no http address; write http://127.0.0.1:PORT")
    try:
        with urllib.request.urlopen(f"{address.rstrip('/')}/status.json", timeout=_STATUS_SECONDS) as answer:  # noqa: S310
            found = json.loads(answer.read(_STATUS_BYTES))
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise WarmseedError(f"no status from {printable(address)}: {printable(error)}; is the launcher up?") from error
    return list(found.get("ranks", []))


def _print_ledger(console: Console, entries: list[Entry]) -> None:
    table = Table(title="Warmup caches on this node")
    for name in ("kind", "rank", "event", "generation", "from", "MB moved", "seconds", "saved s", "why"):
        table.add_column(name, justify="right" if name in ("generation", "MB moved", "seconds", "saved s") else "left")
    for entry in entries[-40:]:
        table.add_row(
            entry.kind,
            entry.rank,
            entry.event,
            str(entry.generation or ""),
            printable(entry.origin, limit=40),
            f"{entry.bytes / 1e6:.1f}" if entry.bytes else "",
            f"{entry.seconds:.2f}",
            f"{entry.saved:.1f}" if entry.saved else "",
            printable(entry.reason, limit=80),
        )
    console.print(table)
    console.print(f"saved so far: {sum(entry.saved for entry in entries):.1f} s")


def _print_waterfall(console: Console, rank: dict[str, Any]) -> None:
    """One bar a phase, each beginning where the one before it ended."""
    phases = rank.get("phases", [])
    total = sum(phase["seconds"] for phase in phases) or 1.0
    table = Table(title=f"Start of {printable(rank.get('name', '?'))}: {total:.1f} s")
    table.add_column("phase")
    table.add_column("outcome")
    table.add_column("seconds", justify="right")
    table.add_column("")
    begun = 0.0
    for phase in phases:
        before = round(_WIDTH * begun / total)
        length = max(1, round(_WIDTH * phase["seconds"] / total))
        bar = " " * before + "█" * min(length, _WIDTH - before + 1)
        table.add_row(printable(phase["name"]), printable(phase["outcome"]), f"{phase['seconds']:.2f}", bar)
        begun += phase["seconds"]
    console.print(table)
