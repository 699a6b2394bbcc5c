"""What can go wrong between the daemon that owns weights and an engine that wants them.

WeightCacheError
├── WeightCacheUnavailable           the engine loads from disk, unless its configuration forbids that
│   ├── FingerprintMismatch          names the fields; never retried
│   └── SocketPathRefused            also a ConfigurationError: a daemon stops start-up on it
├── MessageRefused                   a peer broke the protocol; its connection is closed
├── CheckpointInvalid                the checkpoint's files contradict themselves
├── CheckpointChanged                a file changed while it was read
├── ExportRefused                    a model that can't be put into segments as it is
├── UnsupportedPlatformForIPCError   permanent: raised even where falling back is allowed
└── UnsupportedQuantForIPCError      permanent for this model: raised before the slow load

Every error carries `reason`, one stable word for metrics and scripts (`REASONS`).
"""

from __future__ import annotations

from typing import Final, Literal, get_args

from warmseed.errors import ConfigurationError, WarmseedError

__all__ = [
    "REASONS",
    "CheckpointChanged",
    "CheckpointInvalid",
    "ExportRefused",
    "FingerprintMismatch",
    "MessageRefused",
    "Reason",
    "SocketPathRefused",
    "UnsupportedPlatformForIPCError",
    "UnsupportedQuantForIPCError",
    "WeightCacheError",
    "WeightCacheUnavailable",
]

Reason = Literal["absent", "refused", "timeout", "mismatch", "wrong_gpu", "released", "error"]
REASONS: Final[tuple[Reason, ...]] = get_args(Reason)


class WeightCacheError(WarmseedError):
    """The weight cache could not do what it was asked."""

    reason: Reason = "error"


class WeightCacheUnavailable(WeightCacheError):
    """The daemon's weights can't be mapped now; `reason` says why, in one word.

    ``absent``: no socket. ``refused``: nobody listens, or path or peer is not to be trusted, or the daemon
    has no free slot. ``timeout``: the deadline passed. ``mismatch``: `fields` differ. ``wrong_gpu``: the
    daemon holds another device's shard. ``released``: the daemon has let its weights go. ``error``: the rest.
    """

    def __init__(self, reason: Reason, message: str, *, fields: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.reason = reason
        self.fields = fields


class FingerprintMismatch(WeightCacheUnavailable):
    """The daemon holds other weights than the engine wants; `fields` names every difference."""

    def __init__(self, message: str, *, fields: tuple[str, ...]) -> None:
        super().__init__("mismatch", message, fields=fields)


class SocketPathRefused(WeightCacheUnavailable, ConfigurationError):
    """A socket, its folder or its lock is not what a private path must be; nothing was touched."""

    def __init__(self, message: str) -> None:
        super().__init__("refused", message)


class MessageRefused(WeightCacheError):
    """A peer sent bytes that are no message of this protocol, or a message that contradicts itself."""


class CheckpointInvalid(WeightCacheError):
    """The checkpoint's files are missing, truncated, or contradict their own headers."""


class CheckpointChanged(WeightCacheError):
    """A checkpoint file changed while it was read; what was read describes neither version."""


class ExportRefused(WeightCacheError):
    """The model holds a tensor that has no bytes to share (on the meta device, or sparse)."""


class UnsupportedPlatformForIPCError(WeightCacheError):
    """This platform has no way to share a device's memory between processes; falling back would hide that."""


class UnsupportedQuantForIPCError(WeightCacheError):
    """A layer's quantization keeps state outside its parameters, so mapped weights would be incomplete."""
