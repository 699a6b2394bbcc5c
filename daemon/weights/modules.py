"""What a torch module has registered under which name. The one place that touches a module's own tables."""

# ruff: noqa: SLF001 - there is no public way to list non-persistent buffers, nor to replace a registered tensor in place

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

__all__ = ["as_parameter", "meta_tensors", "put", "registered_tensor", "registered_tensors", "unregistered_meta"]

Kind = Literal["parameter", "buffer"]


def registered_tensors(model: torch.nn.Module) -> Iterator[tuple[str, Kind, torch.Tensor, bool]]:
    """Name, kind, tensor and whether a state dict holds it, of every parameter and buffer, under each of its names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        start = f"{prefix}." if prefix else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield start + name, "parameter", parameter, True
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield start + name, "buffer", buffer, name not in module._non_persistent_buffers_set


def registered_tensor(module: torch.nn.Module, leaf: str) -> torch.Tensor | None:
    """The parameter or buffer of that name, or `None`."""
    parameter = module._parameters.get(leaf)
    return parameter if parameter is not None else module._buffers.get(leaf)


def meta_tensors(module: torch.nn.Module) -> Iterator[tuple[str, Kind, torch.Tensor, bool]]:
    """The module's own parameters and buffers that have no memory yet."""
    for leaf, parameter in tuple(module._parameters.items()):
        if parameter is not None and parameter.is_meta:
            yield leaf, "parameter", parameter, True
    for leaf, buffer in tuple(module._buffers.items()):
        if buffer is not None and buffer.is_meta:
            yield leaf, "buffer", buffer, leaf not in module._non_persistent_buffers_set


def unregistered_meta(module: torch.nn.Module) -> Iterator[str]:
    """Names of plain attributes that are tensors without memory."""
    import torch

    for name, value in module.__dict__.items():
        if isinstance(value, torch.Tensor) and value.is_meta:
            yield name


def put(module: torch.nn.Module, leaf: str, tensor: torch.Tensor, *, kind: Kind, persistent: bool) -> None:
    """Register `tensor` under that name, in place of whatever had it."""
    module.__dict__.pop(leaf, None)
    if kind == "parameter":
        module._buffers.pop(leaf, None)
        module._non_persistent_buffers_set.discard(leaf)
        module._parameters[leaf] = tensor  # type: ignore[assignment]  # a Parameter, as `kind` says
        return
    module._parameters.pop(leaf, None)
    module._buffers[leaf] = tensor
    if persistent:
        module._non_persistent_buffers_set.discard(leaf)
    else:
        module._non_persistent_buffers_set.add(leaf)


def as_parameter(old: torch.Tensor | None, tensor: torch.Tensor, *, requires_grad: bool) -> torch.nn.Parameter:
    """`tensor` as a parameter of `old`'s class, with the attributes an engine hung on `old`."""
    import torch

    kind = type(old) if isinstance(old, torch.nn.Parameter) else torch.nn.Parameter
    kind = getattr(kind, "cls_to_become", kind)  # a lazy parameter has become an ordinary one by now
    trainable = requires_grad and (tensor.is_floating_point() or tensor.is_complex())
    new: torch.nn.Parameter = torch.Tensor._make_subclass(kind, tensor, trainable)
    if old is not None:
        new.__dict__.update(old.__dict__)
    return new
