"""Devices by their UUID: an index means another GPU in every process that sets CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmseed.daemon.weights.errors import UnsupportedPlatformForIPCError, WeightCacheUnavailable

if TYPE_CHECKING:
    import torch

__all__ = ["device_by_uuid", "device_uuid"]


def device_uuid(device: torch.device) -> str:
    """The stable name of `device`: a GPU's UUID, or ``cpu0``, ``cpu1``… for CPU ranks by their local index.

    Raises:
        UnsupportedPlatformForIPCError: for devices whose memory can't be shared.
    """
    import torch

    if device.type == "cpu":
        return f"cpu{device.index or 0}"
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return str(torch.cuda.get_device_properties(index).uuid)
    raise UnsupportedPlatformForIPCError(
        f"{device.type} devices can't share weights between processes: only CUDA, ROCm and Linux CPU memory can"
    )


def device_by_uuid(uuid: str) -> torch.device:
    """This process's own device of that UUID, whatever index it has here.

    Raises:
        WeightCacheUnavailable: reason ``wrong_gpu``; this process sees no such device.
    """
    import torch

    if uuid.startswith("cpu") and uuid[3:].isdecimal():
        return torch.device("cpu")
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return torch.device("cuda", index)
    raise WeightCacheUnavailable("wrong_gpu", f"the daemon's GPU {uuid!r} is none that this process sees")
