"""What people want to know of a table before they make it the fleet's: how much it holds and how clear it was."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping

from warmseed.seeding.kinds.autotune.bounded import Json
from warmseed.seeding.kinds.autotune.keys import split_key

__all__ = ["describe"]

_OPERATIONS = 12  # named in one line


def describe(
    keys: Iterable[str], timings: Iterable[Mapping[str, Json]], metadata: Mapping[str, str], *, form: str
) -> dict[str, str]:
    """Short lines for `Manifest.provenance`: when, which versions, how many entries, FlashInfer's own timings.

    FlashInfer 0.7.4 writes per entry the winner's time and its margin over the runner-up; a table whose margins
    are near zero was decided by noise.
    """
    counted = Counter(split_key(key)[0] for key in keys)
    found = {
        "captured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "flashinfer": metadata.get("flashinfer_version", ""),
        "gpu": metadata.get("gpu", ""),
        "form": form,
        "entries": str(counted.total()),
        "operations": ", ".join(f"{name} {count}" for name, count in counted.most_common(_OPERATIONS))[:1000],
    }
    known = list(timings)
    winners = [value for item in known if type(value := item.get("time_ms")) is float]
    margins = [value for item in known if type(value := item.get("margin")) is float]
    if winners:
        found["timed"] = f"{len(winners)} entries, winners {sum(winners):.3f} ms together"
    if margins:
        found["margin"] = f"median {statistics.median(margins):.3f}, least {min(margins):.3f}"
    return found
