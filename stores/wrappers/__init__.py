"""Stores around a store: each adds one behaviour and keeps the contract.

Which of the three failures each one acts on: `Retry` on `StoreUnavailable` (not on a timeout), `Breaker` on
`StoreUnavailable` and timeouts, `NegativeCache` on misses, `SingleFlight` on none, `Verifying` makes `ObjectInvalid`.
"""

from __future__ import annotations

from warmseed.stores.wrappers.base import Wrapper, innermost
from warmseed.stores.wrappers.breaker import Breaker
from warmseed.stores.wrappers.flight import SingleFlight
from warmseed.stores.wrappers.negative import NegativeCache
from warmseed.stores.wrappers.retry import Retry
from warmseed.stores.wrappers.verifying import Verifying

__all__ = ["Breaker", "NegativeCache", "Retry", "SingleFlight", "Verifying", "Wrapper", "innermost"]
