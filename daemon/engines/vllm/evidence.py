"""What vLLM says about its caches while it starts, as counters. Pure: text in, numbers out.

The lines are those of vLLM's own log, read in the sources of 0.20 to 0.33 (vllm/compilation/{decorators,backends,
monitor}.py, vllm/model_executor/warmup/). Counters are the better evidence where a release has them; lines are what
every release has, and what a person can check.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

__all__ = ["LINES", "LINE_LIMIT", "counted", "is_evidence"]

LINES: Final = 200  # kept of one start
LINE_LIMIT: Final = 500  # characters kept of one

# Counter -> what the line that raises it by one looks like.
_SAYS: Final[Mapping[str, re.Pattern[str]]] = {
    "vllm_aot_loaded": re.compile(r"Directly load AOT compilation from path"),
    "vllm_aot_refused": re.compile(r"Compiling model again due to a load failure from"),
    "vllm_aot_saved": re.compile(r"saved AOT compiled function to"),
    "vllm_aot_unsaved": re.compile(r"unable to save AOT compiled function to"),
    "vllm_graphs_loaded": re.compile(r"Directly load the compiled graph\(s\) for compile range"),
    "vllm_graphs_compiled": re.compile(r"Compiling a graph for compile range"),
    "vllm_cache_off": re.compile(r"vLLM's torch\.compile cache is disabled"),
    "flashinfer_saved": re.compile(r"\[Autotuner\]: Saved \d+ configs"),
    "flashinfer_loaded": re.compile(r"\[Autotuner\]: Loaded \d+ "),
    "flashinfer_hit_lines": re.compile(r"\[Autotuner\]: Config cache hit for "),
    "flashinfer_ignored": re.compile(r"\[Autotuner\]: Cache file .* was created in a different environment"),
}
_SECONDS: Final[Mapping[str, re.Pattern[str]]] = {
    "vllm_compile_ms": re.compile(r"torch\.compile.*? (?:takes?|took) (?P<s>[\d.]+) s"),
    "vllm_profile_ms": re.compile(r"Initial profiling/warmup run took (?P<s>[\d.]+) s"),
    "vllm_graphs_ms": re.compile(r"Graph capturing finished in (?P<s>[\d.]+) secs"),
}


def is_evidence(line: str) -> bool:
    """Whether `line` says anything about a cache."""
    return any(pattern.search(line) for pattern in (*_SAYS.values(), *_SECONDS.values()))


def counted(lines: Iterable[str]) -> dict[str, int]:
    """How often each kind of line was said, and milliseconds where a line states seconds."""
    counters: dict[str, int] = {}
    for line in lines:
        for name, pattern in _SAYS.items():
            if pattern.search(line):
                counters[name] = counters.get(name, 0) + 1
        for name, pattern in _SECONDS.items():
            if (match := pattern.search(line)) is not None:
                counters[name] = counters.get(name, 0) + round(float(match["s"]) * 1000)
    return counters
