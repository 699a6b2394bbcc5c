"""A loaded model's tensors moved into shared segments, with the model itself looking at them from then on.

The move costs no second copy: a segment is filled tensor by tensor, each tensor is pointed at its new place at once,
and its old memory is free before the next one is copied.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from warmseed.daemon.weights.devices import device_uuid
from warmseed.daemon.weights.errors import ExportRefused, UnsupportedQuantForIPCError
from warmseed.daemon.weights.layout import (
    DTYPES,
    SegmentRecord,
    TensorRecord,
    distinct_bytes,
    end_of,
    extent_bytes,
    pack,
)
from warmseed.daemon.weights.messages import Memory, State
from warmseed.daemon.weights.modules import registered_tensors
from warmseed.daemon.weights.transport import CHECKED_BYTES, OwnedSegment, Transport, transport_for
from warmseed.daemon.weights.views import strided_view

if TYPE_CHECKING:
    import torch

__all__ = ["Exported", "check_exportable", "export_model", "require_shareable"]

SEGMENT_BYTES = 1 << 30  # in one segment: 19 handles or one map equally fast, 300 are seven times slower (H200)


@dataclass(slots=True)
class _Held:
    """One distinct tensor object of the model, and every name it goes by."""

    names: list[str]
    kind: Literal["parameter", "buffer"]
    tensor: torch.Tensor
    persistent: bool


@dataclass(slots=True)
class _Block:
    """A run of bytes of one storage that one or more tensors look at."""

    device: torch.device
    low: int
    high: int
    held: list[_Held]


@dataclass(slots=True)
class Exported:
    """The shared weights of one rank, and the tensors of the model that now look at them."""

    device_uuid: str
    tensors: tuple[TensorRecord, ...]
    aliases: dict[str, str]
    nbytes: int  # of distinct tensor bytes
    segments: list[OwnedSegment]
    released: bool = False
    moved: list[torch.Tensor] = field(default_factory=list, repr=False)  # the model's own, looking at the segments
    sums: list[tuple[int, ...] | None] = field(default_factory=list, repr=False)  # checksums of the segments as filled

    @property
    def segment_records(self) -> tuple[SegmentRecord, ...]:
        """Each segment's size and handle."""
        return tuple(segment.record for segment in self.segments)

    @property
    def descriptors(self) -> list[int]:
        """The file descriptors of the ``memfd`` segments, in order."""
        return [segment.descriptor for segment in self.segments if segment.descriptor is not None]

    @property
    def writable(self) -> bool:
        """Whether engines could change the bytes: on a GPU they can."""
        return any(total is not None for total in self.sums)

    def state(self, device_uuid: str) -> State:
        """The message that lets an engine on that device map all of it."""
        return State(
            device_uuid=device_uuid,
            pid=os.getpid(),
            nbytes=self.nbytes,
            segments=self.segment_records,
            tensors=self.tensors,
            aliases=self.aliases,
        )

    def memory(self, leases: int, device_uuid: str) -> Memory:
        """The account of what is held."""
        return Memory(
            nbytes=0 if self.released else self.nbytes,
            segment_bytes=sum(segment.record.nbytes for segment in self.segments),
            segments=len(self.segments),
            tensors=0 if self.released else len(self.tensors),
            leases=leases,
            device_uuid=device_uuid,
            released=self.released,
        )

    def changed_tensors(self) -> tuple[str, ...]:
        """Names of tensors in the parts that are not as they were exported; none on CPU, where memory is sealed.

        Reads every byte on the GPU (some 6 ms for 19 GB at an H200's memory speed); raises what the driver raises.
        """
        changed: list[str] = []
        for index, (segment, old) in enumerate(zip(self.segments, self.sums, strict=True)):
            if old is None or (new := segment.checksum()) is None or new == old:
                continue
            blocks = {number for number, pair in enumerate(zip(old, new, strict=True)) if pair[0] != pair[1]}
            changed += [
                tensor.name
                for tensor in self.tensors
                if tensor.segment == index
                and not blocks.isdisjoint(range(tensor.offset // CHECKED_BYTES, -(-end_of(tensor) // CHECKED_BYTES)))
            ]
        return tuple(changed)

    def release(self) -> None:
        """Give all memory back. The model's tensors are empty from then on. Harmless when called again."""
        import torch

        self.released = True
        for tensor in self.moved:
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self.moved.clear()
        self.sums.clear()
        for segment in self.segments:
            segment.close()
        self.segments.clear()


def check_exportable(model: torch.nn.Module) -> None:
    """Nothing, if the model's tensors are all there is to its layers. Works on a shell: call it before the slow load.

    Raises:
        UnsupportedQuantForIPCError: naming the layer and what it hides.
    """
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    for held in _collect(model):
        tensor = held.tensor
        what = None
        if is_traceable_wrapper_subclass(tensor) or tensor.is_quantized:
            what = f"is a {type(tensor).__name__}, whose bytes lie in other tensors"
        elif getattr(tensor, "quant_state", None) is not None:  # bitsandbytes
            what = f"is a {type(tensor).__name__} with a quant_state beside its bytes"
        if what:
            raise UnsupportedQuantForIPCError(
                f"{held.names[0]} {what}: this quantization can't be shared; load it from disk in every engine"
            )


def export_model(
    model: torch.nn.Module,
    *,
    device: torch.device | str,
    segment_bytes: int = SEGMENT_BYTES,
    transport: Transport | None = None,
) -> Exported:
    """Move every parameter and buffer of `model`, which is loaded on `device`, into shared segments.

    A tensor registered under several names is exported once, the other names are aliases. Tensors that look at the
    same bytes keep doing so. Strides stay. Buffers that a CUDA model keeps in host memory travel as host memory.

    Raises:
        UnsupportedPlatformForIPCError: memory of this kind can't be shared here.
        UnsupportedQuantForIPCError: a layer keeps state outside its tensors.
        ExportRefused: a tensor has no bytes (meta, sparse) or a dtype outside the protocol.
        WeightCacheError: the driver has no memory for a segment.
        OSError: the system has none.
    """
    import torch

    target = torch.device(device)
    uuid = device_uuid(target)
    transports: dict[str, Transport] = {target.type: transport or transport_for(target.type)}
    check_exportable(model)
    held = _collect(model)
    exported = Exported(uuid, (), {alias: h.names[0] for h in held for alias in h.names[1:]}, 0, [])
    records: dict[str, TensorRecord] = {}
    blocks: list[_Block] = []
    for block in _blocks(held):
        if block.high > block.low:
            blocks.append(block)
            transports.setdefault(block.device.type, transport_for(block.device.type))
        else:
            records.update({h.names[0]: _record(h, 0, 0) for h in block.held})
    try:
        for kind in transports:  # segments never mix kinds of memory
            _fill(exported, [b for b in blocks if b.device.type == kind], transports[kind], segment_bytes, records)
    except BaseException:
        exported.release()
        raise
    exported.tensors = tuple(records[h.names[0]] for h in held)
    exported.nbytes = distinct_bytes(exported.tensors)
    exported.sums = [segment.checksum() for segment in exported.segments]
    return exported


def _fill(
    exported: Exported, blocks: list[_Block], transport: Transport, segment_bytes: int, records: dict[str, TensorRecord]
) -> None:
    import torch

    places, sizes = pack([block.high - block.low for block in blocks], segment_bytes)
    at = 0
    with torch.no_grad():
        for size in sizes:
            number = len(exported.segments)
            segment = transport.allocate(size, blocks[at].device)
            exported.segments.append(segment)
            first = places[at].segment
            while at < len(blocks) and places[at].segment == first:
                _move(blocks[at], segment, number, places[at].offset, records, exported.moved)
                at += 1
            segment.seal()
            transport.settle(blocks[at - 1].device)


def _move(
    block: _Block,
    segment: OwnedSegment,
    number: int,
    offset: int,
    records: dict[str, TensorRecord],
    moved: list[torch.Tensor],
) -> None:
    """Copy one block into its place and point its tensors there; their old memory is free when this returns."""
    import torch

    size = block.high - block.low
    storage = block.held[0].tensor.untyped_storage()
    segment.write(
        offset, torch.empty(0, dtype=torch.uint8, device=block.device).set_(storage, block.low, (size,), (1,))
    )
    del storage
    window = segment.window(offset, size)
    for held in block.held:
        tensor = held.tensor
        inner = _byte_offset(tensor) - block.low
        records[held.names[0]] = _record(held, number, offset + inner)
        tensor.data = strided_view(window, inner, tensor.dtype, tuple(tensor.shape), tensor.stride())
        moved.append(tensor)


def _record(held: _Held, segment: int, offset: int) -> TensorRecord:
    tensor = held.tensor
    return TensorRecord(
        held.names[0],
        held.kind,
        str(tensor.dtype).removeprefix("torch."),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        segment,
        offset,
        tensor.requires_grad,
        held.persistent,
    )


def _collect(model: torch.nn.Module) -> list[_Held]:
    """Every distinct parameter and buffer, in the order of the modules."""
    found: dict[int, _Held] = {}
    for name, kind, tensor, persistent in registered_tensors(model):
        if held := found.get(id(tensor)):
            held.names.append(name)
        else:
            found[id(tensor)] = _Held([name], kind, tensor, persistent)
    return list(found.values())


def _byte_offset(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


def _blocks(held: list[_Held]) -> list[_Block]:
    """The byte runs to move, in the order of the tensors; overlapping tensors share one."""
    import torch

    spans: dict[tuple[torch.device, int], list[_Block]] = {}
    order: list[_Block] = []
    for h in held:
        tensor = h.tensor
        if tensor.device.type == "meta" or tensor.layout is not torch.strided:
            raise ExportRefused(
                f"{h.names[0]} has no bytes to share ({tensor.device.type}, {tensor.layout}): load it first"
            )
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise ExportRefused(f"{h.names[0]} has dtype {dtype}, which the protocol does not carry")
        extent = extent_bytes(tuple(tensor.shape), tensor.stride(), tensor.element_size())
        low = _byte_offset(tensor)
        # Starts are rounded down to the largest element, so that every tensor of a merged block stays aligned.
        block = _Block(tensor.device, low - low % 16 if extent else low, low + extent, [h])
        if extent:
            spans.setdefault((tensor.device, tensor.untyped_storage().data_ptr()), []).append(block)
        else:
            order.append(block)
    for group in spans.values():
        order.extend(_merged(group))
    return order


def _merged(blocks: list[_Block]) -> list[_Block]:
    out: list[_Block] = []
    for block in sorted(blocks, key=lambda b: (b.low, b.high)):
        if out and block.low < out[-1].high:
            out[-1].high = max(out[-1].high, block.high)
            out[-1].held.extend(block.held)
        else:
            out.append(block)
    return out


def require_shareable(layers: Iterable[tuple[str, str, bool]]) -> None:
    """Nothing, if every layer's quantization method can take weights that are processed already.

    `layers` yields a layer's name, its method's name and whether the method declares so; an engine's adapter knows.

    Raises:
        UnsupportedQuantForIPCError: naming the first layer and every method that can't.
    """
    wrong = [(layer, method) for layer, method, able in layers if not able]
    if wrong:
        methods = ", ".join(sorted({method for _, method in wrong}))
        raise UnsupportedQuantForIPCError(
            f"quantization {methods} can't take weights that are processed already ({len(wrong)} layers, "
            f"{wrong[0][0]} first): use another method, or load from disk in every engine"
        )
