"""What can go wrong between two daemons.

ChannelError
├── PeerUnreachable    nothing answers there, or not in time: try again for a while, or the next source
├── PeerRejected       the two ends do not hold the same token, or this is not a warmseed peer
├── PeerWarming        the source is still compiling; worth waiting for
├── PeerBusy           the source is healthy and full; worth asking again
├── PeerRefused        the source has something, and says why it is not for us
├── SelfDialled        the source is this very process
├── ProtocolError      the peer broke the protocol: too long, malformed, cut off
│   └── AnswerMismatch an answer to another question than the one asked
└── NoSource           every source was tried; holds what each one said
"""

from __future__ import annotations

from collections.abc import Mapping

from warmseed.errors import WarmseedError

__all__ = [
    "AnswerMismatch",
    "ChannelError",
    "NoSource",
    "PeerBusy",
    "PeerRefused",
    "PeerRejected",
    "PeerUnreachable",
    "PeerWarming",
    "ProtocolError",
    "SelfDialled",
]


class ChannelError(WarmseedError):
    """A fetch from a peer that failed."""


class PeerUnreachable(ChannelError):
    """Nothing answers at the address, or not within the deadline, or the connection was lost."""


class PeerRejected(ChannelError):
    """The peer does not hold our token, or we do not hold its."""


class PeerWarming(ChannelError):
    """The source exists and will have the artifact; it is still doing the work itself."""

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after  # seconds, as the source suggests


class PeerBusy(ChannelError):
    """The source serves others; we waited our turn as long as it lets anyone wait."""

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after  # seconds, as the source suggests


class PeerRefused(ChannelError):
    """The source will not give us this; `reason` is a short word, `fields` the names of what differs."""

    def __init__(self, message: str, *, reason: str, fields: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.reason = reason
        self.fields = fields


class SelfDialled(ChannelError):
    """The address leads back to this process."""


class ProtocolError(ChannelError):
    """The peer answered something that the protocol does not allow."""


class AnswerMismatch(ProtocolError):
    """The answer is about another artifact; `fields` names what differs from the question."""

    def __init__(self, message: str, *, fields: tuple[str, ...]) -> None:
        super().__init__(message)
        self.fields = fields


class NoSource(ChannelError):
    """No source gave what was asked; `reasons` holds the last failure of each, by address."""

    def __init__(self, message: str, *, reasons: Mapping[str, ChannelError]) -> None:
        super().__init__(message)
        self.reasons = dict(reasons)
