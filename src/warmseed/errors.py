"""The root of every exception that warmseed raises.

WarmseedError
├── ConfigurationError            stops start-up, exit code 2, before any GPU work
├── StoreError                    warmseed.stores.errors
│   ├── StoreUnavailable, StoreTimeout
│   ├── StoreRefused
│   ├── StoreFull
│   ├── ObjectInvalid
│   └── InvalidKey
├── ArtifactRefused               warmseed.seeding.errors
├── ChannelError                  warmseed.seeding.channel.errors
└── WeightCacheError              warmseed.daemon.weights.errors

Each area draws its own branch at the top of its ``errors.py``.
"""

from __future__ import annotations

__all__ = ["ConfigurationError", "WarmseedError", "printable"]


class WarmseedError(Exception):
    """Any failure that warmseed itself reports.

    The message says what happened, to which key, tier, peer or file, and what happens next.
    """


class ConfigurationError(WarmseedError):
    """What the operator asked for can't work; start-up stops with exit code 2."""


def printable(text: object, *, limit: int = 200) -> str:
    """Foreign text made safe for one log line: control characters escaped, cut to `limit` characters."""
    raw = str(text)
    cut = raw if len(raw) <= limit else raw[:limit] + "…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in cut)
