"""Counts what one rank's stores did, as totals for its launcher."""

from __future__ import annotations

from msgspec.structs import replace

from warmseed.daemon.protocol.status import Metrics, TierCounts

__all__ = ["Tally"]


class Tally:
    """An `Observer` of the rank's stores; `metrics` gives the totals so far."""

    def __init__(self) -> None:
        self._tiers: dict[str, TierCounts] = {}

    def __call__(self, *, store: str, operation: str, outcome: str, size: int, seconds: float) -> None:
        if outcome == "cancelled":  # says nothing about the store
            return
        tier = replace(self._tiers.get(store, TierCounts(store)), breaker_open=outcome == "refused")
        match outcome:
            case "hit":
                tier = replace(tier, hits=tier.hits + 1, bytes_read=tier.bytes_read + size)
            case "miss":
                tier = replace(tier, misses=tier.misses + 1)
            case "stored":
                tier = replace(tier, bytes_written=tier.bytes_written + size)
            case "invalid":
                tier = replace(tier, invalid=tier.invalid + 1)
            case _:
                tier = replace(tier, errors=tier.errors + 1)
        self._tiers[store] = tier

    def metrics(
        self, *, engines: int | None = None, weights: int | None = None, released: int | None = None
    ) -> Metrics:
        """The totals since the rank started; `weights` and `released` are bytes."""
        return Metrics(
            tiers=tuple(self._tiers.values()), engines=engines, weights_bytes=weights, released_bytes=released
        )
