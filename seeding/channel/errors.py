"""What can go wrong between two daemons.

ChannelError
├── PeerUnreachable    nothing answers there, or not in time: try the next source
├── PeerRejected       the two ends do not hold the same token, or this is not a warmseed peer
├── PeerWarming        the source is still compiling; worth waiting for
└── ProtocolError      the peer broke the protocol: too long, malformed, or an answer to another question
"""

from __future__ import annotations

from warmseed.errors import WarmseedError

__all__ = ["ChannelError", "PeerRejected", "PeerUnreachable", "PeerWarming", "ProtocolError"]


class ChannelError(WarmseedError):
    """A fetch from a peer that failed."""


class PeerUnreachable(ChannelError):
    """Nothing answers at the address, or not within the deadline."""


class PeerRejected(ChannelError):
    """The peer does not hold our token, or we do not hold its."""


class PeerWarming(ChannelError):
    """The source exists and will have the artifact; it is still doing the work itself."""


class ProtocolError(ChannelError):
    """The peer answered something that the protocol does not allow."""
