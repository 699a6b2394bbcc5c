"""What can go wrong with a store.

StoreError
├── StoreUnavailable   the tier is down or refusing: try the next one, perhaps later this one
│   └── StoreTimeout   the tier did not answer within its deadline: asking again at once would cost it again
├── StoreRefused       the tier does not allow it (read-only, no permission): it is well, asking again is useless
├── StoreFull          no room for this object: do not retry, the rest of the tier still works
├── ObjectInvalid      the bytes are not what was promised: acts as a miss, and is counted
└── InvalidKey         the key breaks the key grammar: a bug in the caller or a hostile name

A missing object is not an error: it is `None`. A store that can't be configured raises
`warmseed.errors.ConfigurationError`, at start-up only.
"""

from __future__ import annotations

from warmseed.errors import WarmseedError

__all__ = ["InvalidKey", "ObjectInvalid", "StoreError", "StoreFull", "StoreRefused", "StoreTimeout", "StoreUnavailable"]


class StoreError(WarmseedError):
    """A store could not do what it was asked."""


class StoreUnavailable(StoreError):
    """The store can't be reached, or refuses. Retryable."""


class StoreTimeout(StoreUnavailable):
    """The store did not answer within its deadline. Another tier first; this one after a pause."""


class StoreRefused(StoreError):
    """The store does not allow this operation: it is read-only, or its credentials do not suffice."""


class StoreFull(StoreError):
    """The store has no room for this object. Not worth a retry now."""


class ObjectInvalid(StoreError):
    """The store answered with bytes that are not the object: too long, too short, or another digest."""


class InvalidKey(StoreError):
    """The key is not made of allowed parts."""
