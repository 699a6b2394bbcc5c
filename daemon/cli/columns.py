"""Tables on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from warmseed.errors import printable

__all__ = ["print_columns"]


def print_columns(rows: Sequence[tuple[str, ...]], *, indent: str = "", limit: int = 60) -> None:
    """Print `rows`, which are equally long, under each other, each cell `printable` and cut to `limit` characters.

    Columns are as wide as they need to be: what is cut off can't be searched for.
    """
    if not rows:
        return
    shown = [[printable(cell, limit=limit) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in shown) for column in range(len(shown[0]))]
    for row in shown:
        print(indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
