"""What the two ways of sharing memory have in common; everything above this line is the same on CPU and GPU."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol

from warmseed.daemon.weights.errors import UnsupportedPlatformForIPCError
from warmseed.daemon.weights.layout import SegmentRecord

if TYPE_CHECKING:
    import torch

__all__ = ["CHECKED_BYTES", "Mapping", "OwnedSegment", "Transport", "transport_for"]

CHECKED_BYTES = 1 << 20  # under one sum of a segment's checksum


class OwnedSegment(Protocol):
    """Shared memory of the daemon's: filled block by block, sealed, then handed out as often as asked."""

    @property
    def record(self) -> SegmentRecord:
        """What a client needs to know of it, the handle included."""
        ...

    @property
    def descriptor(self) -> int | None:
        """The file descriptor that travels beside the record, or `None`."""
        ...

    def write(self, offset: int, source: torch.Tensor) -> None:
        """Copy the bytes of `source` (one dimension, uint8, contiguous) to `offset`."""
        ...

    def window(self, offset: int, nbytes: int) -> torch.Tensor:
        """These bytes as a uint8 tensor with a storage of its own, without a copy."""
        ...

    def seal(self) -> None:
        """Nothing is written through this object any more; on CPU, by nobody."""
        ...

    def checksum(self) -> tuple[int, ...] | None:
        """A sum over each `CHECKED_BYTES` as they are now, or `None` where nobody can have changed one."""
        ...

    def close(self) -> None:
        """Give the memory back, once the last tensor over it is gone."""
        ...


class Mapping(Protocol):
    """A daemon's segment as a client sees it. It lives as long as any tensor made of it."""

    def window(self, offset: int, nbytes: int) -> torch.Tensor:
        """These bytes as a uint8 tensor with a storage of its own, without a copy."""
        ...


class Transport(Protocol):
    """One way of sharing memory."""

    def allocate(self, nbytes: int, device: torch.device) -> OwnedSegment:
        """A new segment of `nbytes` on `device`."""
        ...

    def settle(self, device: torch.device) -> None:
        """Called after each segment: give memory that was freed by re-pointing tensors back to the system."""
        ...

    def map(self, record: SegmentRecord, descriptor: int | None, device: torch.device) -> Mapping:
        """Map a segment of the daemon's; the caller keeps ownership of `descriptor` and may close it then."""
        ...


def transport_for(device_type: str) -> Transport:
    """The way to share memory of `device_type`, one of torch's device types.

    Raises:
        UnsupportedPlatformForIPCError: there is none on this platform.
    """
    if sys.platform == "linux":
        if device_type == "cpu":
            from warmseed.daemon.weights.memfd import MemfdTransport

            return MemfdTransport()
        if device_type == "cuda":  # ROCm calls its devices "cuda" too
            from warmseed.daemon.weights.cuda import CudaTransport

            return CudaTransport()
    raise UnsupportedPlatformForIPCError(
        f"{device_type} memory on {sys.platform} can't be shared between processes: weights are only shared on CUDA, "
        "ROCm and Linux CPU memory; start the engine without the ipc_cache load format"
    )
