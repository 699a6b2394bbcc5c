"""Is a safetensors file what its header says? Checked before the slow load, without reading a tensor.

Format: https://github.com/huggingface/safetensors#format. 8 bytes of little-endian header length, a JSON header, then
the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from typing import Final

from warmseed.daemon.weights.errors import CheckpointInvalid
from warmseed.errors import printable

__all__ = ["check_header", "read_header"]

HEADER_LIMIT: Final = 100_000_000  # bytes; the reference implementation's own limit
# Bits of one element by the format's dtype names.
_BITS: Final = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


def read_header(descriptor: int, size: int, name: str) -> bytes:
    """The JSON header of the open file, whose length prefix is checked against the file's `size` first.

    Raises:
        CheckpointInvalid: the file is shorter than its header says, or the header is absurdly long.
        OSError: the file can't be read.
    """
    if size < 8:
        raise CheckpointInvalid(f"{name} has {size} bytes, too few for a safetensors file; fetch it again")
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if length > HEADER_LIMIT or length > size - 8:
        raise CheckpointInvalid(
            f"{name}: a header of {length} bytes in a file of {size}; it is truncated or no safetensors file"
        )
    header = bytearray()
    while len(header) < length:
        piece = os.pread(descriptor, length - len(header), 8 + len(header))
        if not piece:
            raise CheckpointInvalid(f"{name} became shorter while it was read")
        header += piece
    return bytes(header)


def check_header(header: bytes, size: int, name: str) -> tuple[str, ...]:
    """The names of the tensors, if all of them lie in a file of `size` bytes exactly as the format demands.

    Raises:
        CheckpointInvalid: naming the tensor and what is wrong with it.
    """
    try:
        entries = json.loads(header, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointInvalid(f"{name}: the header is no valid JSON: {printable(error)}") from error
    if not isinstance(entries, dict):
        raise CheckpointInvalid(f"{name}: the header is no JSON object")
    spans: list[tuple[int, int, str]] = []
    for tensor, entry in entries.items():
        if tensor != "__metadata__":
            spans.append((*_span(tensor, entry, name), tensor))
    end = 0
    for low, high, tensor in sorted(spans):
        if low != end:
            raise CheckpointInvalid(
                f"{name}: tensor {printable(tensor)!r} starts at byte {low}, the one before it ends at {end}"
            )
        end = high
    data = size - 8 - len(header)
    if end != data:
        raise CheckpointInvalid(
            f"{name}: its tensors end at byte {end}, but the file holds {data} bytes of tensors; fetch it again"
        )
    return tuple(tensor for _, _, tensor in spans)


def _span(tensor: str, entry: object, name: str) -> tuple[int, int]:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(low), int(high)], **rest} if not rest:
            pass
        case _:
            raise CheckpointInvalid(f"{name}: tensor {printable(tensor)!r} has a malformed entry")
    bits = _BITS.get(dtype)
    if bits is None:
        raise CheckpointInvalid(f"{name}: tensor {printable(tensor)!r} has the unknown dtype {printable(dtype)!r}")
    if any(type(side) is not int or side < 0 for side in shape) or isinstance(low, bool) or isinstance(high, bool):
        raise CheckpointInvalid(f"{name}: tensor {printable(tensor)!r} has a malformed shape or offset")
    if low < 0 or high < low or (high - low) * 8 != math.prod(shape) * bits:
        raise CheckpointInvalid(
            f"{name}: tensor {printable(tensor)!r} of shape {printable(shape)} and dtype {dtype} "
            f"can't fill bytes {low} to {high}"
        )
    return low, high


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{printable(twice)!r} appears twice")
    return table
