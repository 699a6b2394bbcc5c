"""Whether FlashInfer used a table: its own counters where an adapter has them, its log lines, the file after.

A hit is not warmth: a table saves profiling, while the kernels it names may still be compiled at the first
request. So what is said here is about the table only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from warmseed.seeding.kinds.base import Evidence, Verdict

__all__ = ["HITS", "PROFILED", "Usage", "read_counters", "usage_of", "verdict"]

HITS = "flashinfer_autotune_hits"  # names in `Evidence.counters`: operations served from a table
PROFILED = "flashinfer_autotune_profiled"  # configurations that were measured on this node

# Log lines of flashinfer/autotuner/autotuner.py, 0.6.18 to 0.7.4.
_HIT = re.compile(r"\[Autotuner\]: Config cache hit for (\S{1,128}) \(runner=(\w{1,128})")
_SAVED = re.compile(r"\[Autotuner\]: Saved \d{1,9} configs to .* \((-?\d{1,9}) new,")
_IGNORED = re.compile(r"\[Autotuner\]: Cache file .{1,512} was created in a different environment \((.{0,1024})\)")
_LEGACY = re.compile(r"\[Autotuner\]: Skipped (\d{1,9}) legacy cuDNN")


@dataclass(frozen=True, slots=True)
class Usage:
    """What was seen of one warmup; `None` is: nobody looked."""

    hits: int | None = None
    profiled: int | None = None
    ignored: str | None = None  # FlashInfer's own words, where it refused the file
    legacy: int = 0  # entries it skipped as outdated


def read_counters(tuner: object) -> dict[str, int]:
    """Hits and profilings of a FlashInfer `AutoTuner`, for the adapter that runs in the engine's process.

    FlashInfer counts what it measured (`AutoTunerStatistics.tuned_op_successful_configs`); of hits it keeps
    only which operations and runners had one.
    """
    statistics = getattr(tuner, "stats", None)
    measured = getattr(statistics, "tuned_op_successful_configs", None)
    served = getattr(tuner, "_logged_file_hits", None)
    found: dict[str, int] = {}
    if isinstance(measured, dict):
        found[PROFILED] = sum(count for count in measured.values() if isinstance(count, int))
    if isinstance(served, set | frozenset):
        found[HITS] = len(served)
    return found


def usage_of(evidence: Evidence) -> Usage:
    """What counters and log lines say; a counter outranks lines."""
    from_lines = _from_lines(evidence.lines)
    return Usage(
        hits=evidence.counters.get(HITS, from_lines.hits),
        profiled=evidence.counters.get(PROFILED, from_lines.profiled),
        ignored=from_lines.ignored,
        legacy=from_lines.legacy,
    )


def _from_lines(lines: Iterable[str]) -> Usage:
    hits: set[tuple[str, str]] = set()
    profiled: int | None = None
    ignored: str | None = None
    legacy = 0
    seen = False
    for line in lines:
        if "[Autotuner]" not in line:
            continue
        seen = True
        if found := _HIT.search(line):
            hits.add((found[1], found[2]))
        elif found := _SAVED.search(line):
            profiled = (profiled or 0) + max(0, int(found[1]))
        elif found := _IGNORED.search(line):
            ignored = found[1]
        elif found := _LEGACY.search(line):
            legacy = int(found[1])
    return Usage(len(hits) if seen else None, profiled, ignored, legacy)


def verdict(usage: Usage, *, entries: int, new_keys: tuple[str, ...] | None) -> Verdict:
    """The judgement on a table of `entries`; `new_keys` are those that appeared beside it on disk, if known."""
    profiled = usage.profiled if usage.profiled is not None else (None if new_keys is None else len(new_keys))
    if usage.ignored is not None:
        return _unused(f"FlashInfer ignored the file: {usage.ignored}")
    if entries == 0:
        return _unused("the table is empty: nothing had to be tuned where it was made")
    if usage.hits:
        cost = f"; {profiled} configurations were tuned here all the same" if profiled else ", nothing was profiled"
        return Verdict(True, f"{usage.hits} operations were served from the table{cost}", {"tables": True})
    if usage.hits == 0 and profiled:
        return _unused(f"no operation hit and {profiled} configurations were tuned here{_example(new_keys)}")
    if usage.hits == 0:
        return _unused("the engine asked for no operation of this table")
    if profiled:
        return _unused(f"{profiled} configurations were tuned here and no hit was reported{_example(new_keys)}")
    if usage.profiled == 0 and not usage.legacy:
        return Verdict(True, "nothing was profiled during warmup", {"tables": True})
    return _unused("nothing shows that the engine read the table")


def _unused(reason: str) -> Verdict:
    return Verdict(False, reason, {"tables": False})


def _example(new_keys: tuple[str, ...] | None) -> str:
    return f", such as {new_keys[0][:160]}" if new_keys else ""


def new_keys_of(before: Mapping[str, object], after: Mapping[str, object]) -> tuple[str, ...]:
    """Keys that `after` has and `before` had not."""
    return tuple(sorted(set(after) - set(before)))
