"""Where each tensor lies in which segment, and whether such a claim can be true. Pure: no torch, no IO."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import msgspec

from warmseed.daemon.weights.errors import MessageRefused
from warmseed.errors import printable

__all__ = [
    "ALIGNMENT",
    "DTYPES",
    "Placement",
    "SegmentRecord",
    "TensorRecord",
    "check_layout",
    "distinct_bytes",
    "end_of",
    "extent_bytes",
    "overlap_groups",
    "pack",
]

ALIGNMENT: Final = 512  # bytes; what torch's own CUDA allocator promises, so no kernel sees less than it is used to
_HUGE: Final = 1 << 62  # no honest size, stride or offset is larger; sums of a few stay below 2**64

# Bytes of one element by torch's name for the dtype. A closed list: anything else is refused by name.
DTYPES: Final[dict[str, int]] = {
    "bool": 1, "uint8": 1, "int8": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4, "complex32": 4,
    "int64": 8, "uint64": 8, "float64": 8, "complex64": 8,
    "complex128": 16,
}  # fmt: skip

Size = Annotated[int, msgspec.Meta(ge=0, le=_HUGE)]
Dims = Annotated[tuple[Size, ...], msgspec.Meta(max_length=32)]


class SegmentRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One piece of shared memory. ``memfd`` comes as a file descriptor, ``cuda_ipc`` as a 64-byte handle."""

    kind: Literal["memfd", "cuda_ipc"]
    nbytes: Annotated[int, msgspec.Meta(ge=1, le=_HUGE)]
    handle: Annotated[bytes, msgspec.Meta(max_length=64)] = b""


class TensorRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One tensor: its name in the model, and its place in a segment."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
    kind: Literal["parameter", "buffer"]
    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    shape: Dims
    stride: Dims  # elements
    segment: Size
    offset: Size  # bytes from the start of the segment
    requires_grad: bool = False
    persistent: bool = True  # of a buffer: whether a state dict holds it


def extent_bytes(shape: Sequence[int], stride: Sequence[int], itemsize: int) -> int:
    """Bytes from a strided tensor's first element to just past its last; 0 when it has no element."""
    if 0 in shape:
        return 0
    return (sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1) * itemsize


def check_layout(segments: Sequence[SegmentRecord], tensors: Iterable[TensorRecord], aliases: dict[str, str]) -> None:
    """Nothing, if every tensor lies inside its segment and every name is used once.

    Raises:
        MessageRefused: naming the tensor and what is wrong with it. No memory has been mapped by then.
    """
    seen: set[str] = set()
    sizes = [segment.nbytes for segment in segments]
    for tensor in tensors:
        if wrong := _wrong_with(tensor, sizes):
            raise MessageRefused(f"tensor {printable(tensor.name)!r} {wrong}; none of the daemon's weights are mapped")
        if tensor.name in seen:
            raise MessageRefused(f"tensor {printable(tensor.name)!r} is listed twice; none of the weights are mapped")
        seen.add(tensor.name)
    for alias, target in aliases.items():
        if alias in seen or target not in seen:
            raise MessageRefused(
                f"alias {printable(alias)!r} of {printable(target)!r} contradicts the tensor list; nothing is mapped"
            )


def _wrong_with(tensor: TensorRecord, sizes: Sequence[int]) -> str | None:
    itemsize = DTYPES.get(tensor.dtype)
    if itemsize is None:
        return f"has the unknown dtype {printable(tensor.dtype)!r}"
    if len(tensor.shape) != len(tensor.stride):
        return f"has {len(tensor.shape)} sizes but {len(tensor.stride)} strides"
    extent = extent_bytes(tensor.shape, tensor.stride, itemsize)
    if extent == 0:
        return None
    if math.prod(tensor.shape) > _HUGE:
        return "has more elements than any memory holds"
    if tensor.segment >= len(sizes):
        return f"names segment {tensor.segment} of {len(sizes)}"
    if tensor.offset % itemsize:
        return f"starts at byte {tensor.offset}, which is not a multiple of its {itemsize}-byte elements"
    if tensor.offset + extent > sizes[tensor.segment]:
        return f"ends at byte {tensor.offset + extent} of a segment of {sizes[tensor.segment]} bytes"
    return None


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a block was put."""

    segment: int
    offset: int  # bytes


def pack(sizes: Sequence[int], segment_bytes: int) -> tuple[list[Placement], list[int]]:
    """A place for each block of `sizes` bytes, in order, and the exact size of each segment.

    Blocks never straddle segments; one larger than `segment_bytes` gets a segment of its own. Segments are as
    long as what they hold, so packing wastes only the alignment between blocks.
    """
    places: list[Placement] = []
    segments: list[int] = []
    for size in sizes:
        start = -(-segments[-1] // ALIGNMENT) * ALIGNMENT if segments else 0
        if not segments or start + size > segment_bytes:
            segments.append(0)
            start = 0
        places.append(Placement(len(segments) - 1, start))
        segments[-1] = start + size
    return places, segments


def end_of(tensor: TensorRecord) -> int:
    """Just past the tensor's last byte in its segment."""
    return tensor.offset + extent_bytes(tensor.shape, tensor.stride, DTYPES[tensor.dtype])


def distinct_bytes(tensors: Iterable[TensorRecord]) -> int:
    """Bytes the tensors take together, those that several of them look at counted once."""
    return sum(max(map(end_of, group)) - group[0].offset for group in overlap_groups(tensors))


def overlap_groups(tensors: Iterable[TensorRecord]) -> list[list[TensorRecord]]:
    """The tensors, those that share bytes together and by offset; tensors without elements come alone."""
    groups: list[list[TensorRecord]] = []
    spans: list[tuple[int, int, int, TensorRecord]] = []
    for tensor in tensors:
        if (end := end_of(tensor)) > tensor.offset:
            spans.append((tensor.segment, tensor.offset, end, tensor))
        else:
            groups.append([tensor])
    segment, end = -1, -1
    for at, low, high, tensor in sorted(spans, key=lambda span: span[:3]):
        if at == segment and low < end:
            groups[-1].append(tensor)
            end = max(end, high)
        else:
            groups.append([tensor])
            segment, end = at, high
    return groups
