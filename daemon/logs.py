"""Log lines of the launcher: ``event key=value …`` for people, one JSON object a line for machines."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import sys
import time
from typing import Final, Literal, TextIO

__all__ = ["FORMAT_VARIABLE", "RANK_VARIABLE", "JsonFormatter", "event", "install"]

FORMAT_VARIABLE: Final = "WARMSEED_LOG_FORMAT"  # text or json
RANK_VARIABLE: Final = "WARMSEED_RANK"  # set by the launcher: target-3
_FIELDS: Final = "warmseed_fields"


def event(log: logging.Logger, level: int, name: str, /, **fields: object) -> None:
    """Log `name` with `fields`, in the order given; `None` values are left out."""
    given = {key: value for key, value in fields.items() if value is not None}
    line = " ".join([name, *(f"{key}={_plain(value)}" for key, value in given.items())])
    log.log(level, "%s", line, extra={_FIELDS: given, "warmseed_event": name})


class JsonFormatter(logging.Formatter):
    """One object a line: time (unix seconds), level, logger, event, and the event's fields."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": getattr(record, "warmseed_event", None) or record.getMessage(),
        }
        if rank := os.environ.get(RANK_VARIABLE):
            entry["rank"] = rank
        entry.update(getattr(record, _FIELDS, {}))
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class _Handler(logging.StreamHandler[TextIO]):
    """Writes to a stream that may go away: a closed or broken log must not stop a daemon."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (the base class's name)
        if not isinstance(sys.exc_info()[1], OSError | ValueError):
            super().handleError(record)


def install(
    form: Literal["text", "json"] | None = None, *, level: int = logging.INFO, stream: TextIO | None = None
) -> None:
    """Send warmseed's log to `stream` (default: standard error), replacing what an earlier call installed.

    `form` defaults to ``WARMSEED_LOG_FORMAT``, so that ranks log as their launcher does, and to text. In a rank each
    line begins with its name.
    """
    if form is None:
        form = "json" if os.environ.get(FORMAT_VARIABLE, "").lower() == "json" else "text"
    out = stream or sys.stderr
    root = logging.getLogger("warmseed")
    for old in [handler for handler in root.handlers if isinstance(handler, _Handler)]:
        root.removeHandler(old)
    root.setLevel(level)
    if out is None:  # Python sets sys.stderr to None when the file was closed at its start
        return
    atexit.unregister(_let_go)
    atexit.register(_let_go, out)
    handler = _Handler(out)
    if form == "json":
        handler.setFormatter(JsonFormatter())
    else:
        rank = os.environ.get(RANK_VARIABLE)
        who = f"[{rank}] " if rank else ""
        text = logging.Formatter(f"%(asctime)sZ %(levelname)s {who}%(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
        text.converter = time.gmtime
        handler.setFormatter(text)
    root.addHandler(handler)


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    return text if text and not any(c.isspace() or c in '"=' for c in text) else json.dumps(text)


def _let_go(stream: TextIO) -> None:
    """Drop what `stream` could not write, or Python ends with 120 whatever this process wanted to end with."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
