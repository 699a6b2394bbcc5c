"""Tensors over mapped segments: where the numbers of a checked record become memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from warmseed.daemon.weights.layout import SegmentRecord, TensorRecord, end_of, overlap_groups
from warmseed.daemon.weights.transport import Mapping, Transport, transport_for

if TYPE_CHECKING:
    import torch

__all__ = ["copy_tensors", "map_segments", "strided_view", "view_tensors"]

_MEMORY = {"memfd": "cpu", "cuda_ipc": "cuda"}  # torch's device type behind each kind of segment


def map_segments(
    segments: Iterable[SegmentRecord], descriptors: Sequence[int], device: torch.device
) -> list[tuple[Mapping, torch.device]]:
    """Each segment mapped, with the device it is on; `device` is where this process keeps GPU segments.

    Raises:
        MessageRefused: a handle or a descriptor is not what its record says.
        WeightCacheError: the driver refuses.
        OSError: the kernel does.
    """
    import torch

    transports: dict[str, Transport] = {}
    mapped: list[tuple[Mapping, torch.device]] = []
    waiting = iter(descriptors)
    for segment in segments:
        kind = _MEMORY[segment.kind]
        transport = transports.get(kind) or transports.setdefault(kind, transport_for(kind))
        where = device if kind == device.type else torch.device(kind)
        descriptor = next(waiting, None) if segment.kind == "memfd" else None
        mapped.append((transport.map(segment, descriptor, where), where))
    return mapped


def strided_view(
    window: torch.Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    """The tensor that starts `offset` bytes into `window`, a uint8 tensor that begins its own storage."""
    import torch

    tensor = torch.empty(0, dtype=dtype, device=window.device)
    return tensor.set_(window.untyped_storage(), offset // tensor.element_size(), shape, stride)


def view_tensors(
    records: Iterable[TensorRecord], mapped: Sequence[tuple[Mapping, torch.device]], device: torch.device
) -> dict[str, torch.Tensor]:
    """Every tensor as a view of its segment, each with a storage of its own that keeps the segment mapped."""
    import torch

    tensors: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for record in records:
            end = end_of(record)
            if end == record.offset:
                tensors[record.name] = _empty(record, device)
                continue
            window = mapped[record.segment][0].window(record.offset, end - record.offset)
            tensors[record.name] = strided_view(window, 0, _dtype(record), record.shape, record.stride)
    return tensors


def copy_tensors(
    records: Iterable[TensorRecord], mapped: Sequence[tuple[Mapping, torch.device]], device: torch.device
) -> dict[str, torch.Tensor]:
    """Every tensor in this process's own memory; those that shared bytes still share them."""
    import torch

    tensors: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for group in overlap_groups(records):
            end = max(map(end_of, group))
            if end == group[0].offset:
                tensors.update({record.name: _empty(record, device) for record in group})
                continue
            start = group[0].offset - group[0].offset % 16  # whole elements of every dtype lie after it
            copy = mapped[group[0].segment][0].window(start, end - start).clone()
            for record in group:
                offset = record.offset - start
                tensors[record.name] = strided_view(copy, offset, _dtype(record), record.shape, record.stride)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the daemon may free its memory once this returns
    return tensors


def _dtype(record: TensorRecord) -> torch.dtype:
    import torch

    dtype = getattr(torch, record.dtype)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{record.dtype} is no dtype of this torch")
    return dtype


def _empty(record: TensorRecord, device: torch.device) -> torch.Tensor:
    import torch

    return torch.empty_strided(record.shape, record.stride, dtype=_dtype(record), device=device)
