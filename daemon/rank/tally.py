"""Counts what one rank's stores did, as totals for its launcher."""

from __future__ import annotations

from dataclasses import dataclass

from warmseed.daemon.protocol.status import Metrics, TierCounts

__all__ = ["Tally"]


@dataclass(slots=True)
class _Tier:
    hits: int = 0
    misses: int = 0
    invalid: int = 0
    errors: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    breaker_open: bool = False


class Tally:
    """An `Observer` of the rank's stores; `metrics` gives the totals so far."""

    def __init__(self) -> None:
        self._tiers: dict[str, _Tier] = {}

    def __call__(self, *, store: str, operation: str, outcome: str, size: int, seconds: float) -> None:
        tier = self._tiers.setdefault(store, _Tier())
        tier.breaker_open = outcome == "refused"
        match outcome:
            case "hit":
                tier.hits += 1
                tier.bytes_read += size
            case "miss":
                tier.misses += 1
            case "stored":
                tier.bytes_written += size
            case "invalid":
                tier.invalid += 1
            case "cancelled":
                pass
            case _:
                tier.errors += 1

    def metrics(
        self, *, engines: int | None = None, weights: int | None = None, released: int | None = None
    ) -> Metrics:
        """The totals since the rank started; `weights` and `released` are bytes."""
        tiers = tuple(
            TierCounts(
                tier=name,
                hits=tier.hits,
                misses=tier.misses,
                invalid=tier.invalid,
                errors=tier.errors,
                bytes_read=tier.bytes_read,
                bytes_written=tier.bytes_written,
                breaker_open=tier.breaker_open,
            )
            for name, tier in self._tiers.items()
        )
        return Metrics(
            tiers=tiers,
            engines=engines,
            weights_bytes=weights,
            released_bytes=released,
        )
