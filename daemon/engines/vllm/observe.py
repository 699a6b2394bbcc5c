"""Watches one engine rank warm up from inside its process and reports what it saw to the daemon that holds its weights.

Evidence is vLLM's own: its compilation counters, torch's cache counters, FlashInfer's autotuner statistics, its log
lines, and the files that appeared in its cache folders meanwhile.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from warmseed.daemon.engines.vllm import evidence
from warmseed.daemon.engines.vllm.layout import cache_roots
from warmseed.daemon.weights.client import send_report
from warmseed.daemon.weights.errors import WeightCacheUnavailable
from warmseed.daemon.weights.messages import Report
from warmseed.daemon.weights.socket import SocketAddress
from warmseed.errors import printable

__all__ = ["begin", "finish"]

logger = logging.getLogger(__name__)

FILES: Final = 20000  # looked at in all cache folders together
NEW_FILES: Final = 2000  # named in a report
_TORCH_AREAS: Final = ("inductor", "aot_autograd")


class _Observation(logging.Handler):
    def __init__(self, address: SocketAddress) -> None:
        super().__init__(logging.INFO)
        self.address = address
        self.start = time.monotonic()
        self.lines: list[str] = []
        # Now, because vLLM points some of these variables into its own cache while it compiles.
        self.roots = cache_roots(os.environ)
        self.files = frozenset(_files(self.roots))

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.lines) < evidence.LINES:
            line = record.getMessage()
            if evidence.is_evidence(line):
                self.lines.append(printable(line, limit=evidence.LINE_LIMIT))

    def report(self) -> Report:
        counters = {**evidence.counted(self.lines), **_counters()}
        new = sorted(set(_files(self.roots)) - self.files)
        return Report(
            seconds=time.monotonic() - self.start,
            counters={name: float(value) for name, value in counters.items()},
            lines=tuple(self.lines),
            new_files=tuple(new[:NEW_FILES]),
        )


_current: _Observation | None = None
_lock = threading.Lock()


def begin(address: SocketAddress) -> None:
    """Watch from now on; the report goes to the daemon at `address`. The first call counts."""
    global _current
    with _lock:
        if _current is None:
            _current = _Observation(address)
            for name in ("vllm", "flashinfer"):
                logging.getLogger(name).addHandler(_current)


def finish() -> None:
    """Report what was seen since `begin`, once; failing to costs a warning."""
    global _current
    with _lock:
        seen, _current = _current, None
    if seen is None:
        return
    for name in ("vllm", "flashinfer"):
        logging.getLogger(name).removeHandler(seen)
    try:
        send_report(seen.address, seen.report())
    except WeightCacheUnavailable as error:
        logger.warning("the daemon did not take this engine's evidence of its warmup: %s", error)


def _counters() -> dict[str, int]:
    """Counters of libraries this process has loaded anyway; none is imported for it."""
    found: dict[str, int] = {}
    counting = sys.modules.get("vllm.compilation.counter")
    if counting is not None:
        for name, value in vars(counting.compilation_counter).items():
            if isinstance(value, int):
                found[f"vllm_{name}"] = value
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None:
        for area in _TORCH_AREAS:
            found.update(
                {f"{area}_{name}": int(value) for name, value in dynamo.counters[area].items() if "cache" in name}
            )
    found.update(_autotuner())
    return found


def _autotuner() -> Mapping[str, int]:
    """FlashInfer's hits and profilings in this process, where its tuner was used."""
    module: Any = sys.modules.get("flashinfer.autotuner")
    tuner = getattr(getattr(module, "AutoTuner", None), "_instance", None)
    if tuner is None:
        return {}
    from warmseed.seeding.kinds.autotune.usage import read_counters

    return read_counters(tuner)


def _files(roots: Mapping[str, Path]) -> Iterator[str]:
    """Every file below this process's cache folders, as ``<cache>/<path>``."""
    left = FILES
    for name, root in roots.items():
        for folder, _, names in os.walk(root, followlinks=True):
            relative = Path(folder).relative_to(root)
            for file in names:
                left -= 1
                if left < 0:
                    return
                yield str(Path(name) / relative / file)
