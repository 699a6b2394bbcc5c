"""What the stores did, as the launcher's metrics tell it."""

from __future__ import annotations

from warmseed.daemon.protocol.status import TierCounts
from warmseed.daemon.rank.tally import Tally


def test_every_outcome_is_counted_for_its_tier() -> None:
    tally = Tally()
    outcomes = [("hit", 5), ("hit", 7), ("miss", 0), ("stored", 3), ("invalid", 9), ("timeout", 0), ("refused", 0)]
    for outcome, size in outcomes:
        tally(store="s3", operation="get", outcome=outcome, size=size, seconds=0.1)
    tally(store="disk", operation="get", outcome="miss", size=0, seconds=0.1)
    found = tally.metrics(engines=2, weights=10, released=4)
    assert found.tiers == (
        TierCounts("s3", hits=2, misses=1, invalid=1, errors=2, bytes_read=12, bytes_written=3, breaker_open=True),
        TierCounts("disk", misses=1),
    )
    assert (found.engines, found.weights_bytes, found.released_bytes) == (2, 10, 4)


def test_a_breaker_is_open_until_the_store_is_asked_again() -> None:
    tally = Tally()
    for outcome, is_open in [("refused", True), ("cancelled", True), ("miss", False)]:
        tally(store="s3", operation="get", outcome=outcome, size=0, seconds=0.0)
        assert tally.metrics().tiers[0].breaker_open is is_open
