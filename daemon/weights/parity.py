"""Two models compared tensor by tensor, bit for bit: the proof that mapped weights are the checkpoint's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from warmseed.daemon.weights.modules import registered_tensors

if TYPE_CHECKING:
    import torch

__all__ = ["ParityReport", "TensorDifference", "compare_models"]

_PIECE = 64 << 20  # bytes compared at once, so that comparing needs little memory of its own


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """One tensor that is not the same in both models."""

    name: str
    what: Literal["missing", "unexpected", "kind", "dtype", "shape", "stride", "tied", "values"]
    detail: str  # both sides, or where the values begin to differ and how many bytes do

    def __str__(self) -> str:
        return f"{self.name}: {self.what} ({self.detail})"


@dataclass(frozen=True, slots=True)
class ParityReport:
    """The outcome of a comparison."""

    tensors: int  # names compared
    nbytes: int  # compared, bytes of distinct tensors
    differences: tuple[TensorDifference, ...]

    @property
    def equal(self) -> bool:
        """Whether every tensor is the same, bit for bit, and none is missing."""
        return not self.differences


def compare_models(mapped: torch.nn.Module, loaded: torch.nn.Module) -> ParityReport:
    """Every parameter and buffer of both, under each of its names: kind, dtype, shape, stride, ties and bytes.

    Bits are compared and not numbers: NaNs equal themselves, 0.0 and -0.0 differ.
    """
    ours = {name: (kind, tensor) for name, kind, tensor, _ in registered_tensors(mapped)}
    theirs = {name: (kind, tensor) for name, kind, tensor, _ in registered_tensors(loaded)}
    differences = [TensorDifference(name, "missing", "not mapped") for name in theirs if name not in ours]
    differences += [
        TensorDifference(name, "unexpected", "not in the checkpoint") for name in ours if name not in theirs
    ]
    both = [name for name in theirs if name in ours]
    our_ties, their_ties = (_first_names(table, both) for table in (ours, theirs))
    seen: set[tuple[int, int]] = set()
    nbytes = 0
    for name in both:
        (our_kind, one), (their_kind, two) = ours[name], theirs[name]
        if our_ties[name] != their_ties[name]:
            text = f"mapped one is {our_ties[name]}, loaded one is {their_ties[name]}"
            differences.append(TensorDifference(name, "tied", text))
        if (id(one), id(two)) in seen:
            continue
        seen.add((id(one), id(two)))
        nbytes += two.numel() * two.element_size()
        if our_kind != their_kind:
            differences.append(TensorDifference(name, "kind", f"{our_kind} for {their_kind}"))
        differences += _compare(name, one, two)
    return ParityReport(len(both), nbytes, tuple(differences))


def _first_names(table: Mapping[str, tuple[object, torch.Tensor]], names: list[str]) -> dict[str, str]:
    """For each name, the first name of the same tensor object: equal tables mean equal ties."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(table[name][1]), name) for name in names}


def _compare(name: str, one: torch.Tensor, two: torch.Tensor) -> Iterator[TensorDifference]:
    if one.dtype != two.dtype:
        yield TensorDifference(name, "dtype", f"{one.dtype} for {two.dtype}")
        return
    if one.shape != two.shape:
        yield TensorDifference(name, "shape", f"{tuple(one.shape)} for {tuple(two.shape)}")
        return
    if one.numel() > 1 and one.stride() != two.stride():
        yield TensorDifference(name, "stride", f"{one.stride()} for {two.stride()}")
    first, count, at = -1, 0, 0
    for left, right in zip(_pieces(one), _pieces(two), strict=True):
        unequal = (left != right.to(left.device)).nonzero().flatten()
        if unequal.numel():
            first = at + int(unequal[0]) if first < 0 else first
            count += unequal.numel()
        at += left.numel()
    if count:
        element = first // two.element_size()
        yield TensorDifference(name, "values", f"{count} of {at} bytes differ, from element {element} on")


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor's bytes in the order of its elements, a piece at a time."""
    import torch

    flat = tensor.detach().reshape(-1)
    step = max(1, _PIECE // tensor.element_size())
    for start in range(0, flat.numel(), step):
        piece = flat[start : start + step]
        if piece.stride(0) != 1:  # a single element may have any stride and still counts as contiguous
            piece = piece.clone(memory_format=torch.contiguous_format)
        yield piece.view(torch.uint8)
