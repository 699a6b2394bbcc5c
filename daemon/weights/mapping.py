"""Mapped tensors registered in an engine's empty model, as if its own loader had put them there."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from warmseed.daemon.weights.errors import WeightCacheUnavailable
from warmseed.daemon.weights.layout import TensorRecord
from warmseed.daemon.weights.modules import as_parameter, meta_tensors, put, registered_tensor, unregistered_meta
from warmseed.errors import printable

if TYPE_CHECKING:
    import torch

__all__ = ["MapReport", "map_tensors"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MapReport:
    """What became of the shell's tensors."""

    mapped: int  # tensors of the daemon's, now in the model
    aliased: int  # further names of those
    reshaped: tuple[str, ...]  # shape or dtype differs from the shell's: processed after loading
    materialised: tuple[str, ...]  # the daemon had none by that name; zeros
    unregistered: tuple[str, ...]  # meta tensors outside parameters and buffers; the engine must fill them


def map_tensors(
    model: torch.nn.Module,
    records: Iterable[TensorRecord],
    tensors: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
    device: torch.device,
) -> MapReport:
    """Put `tensors` in the place of the shell's own, keeping each parameter's class and attributes.

    Tensors the shell has and the daemon has not become zeros on `device`.

    Raises:
        WeightCacheUnavailable: reason ``error``; the shell has no module of a tensor's name.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    placed: dict[str, torch.Tensor] = {}
    reshaped: list[str] = []
    for record in records:
        module, leaf = _owner(modules, record.name)
        tensor = tensors[record.name]
        old = registered_tensor(module, leaf)
        if old is not None and (old.shape != tensor.shape or old.dtype != tensor.dtype):
            reshaped.append(record.name)
        new = tensor
        if record.kind == "parameter":
            new = as_parameter(old, tensor, requires_grad=record.requires_grad)
        put(module, leaf, new, kind=record.kind, persistent=record.persistent)
        placed[record.name] = new
    by_name = {record.name: record for record in records}
    for alias, target in aliases.items():
        module, leaf = _owner(modules, alias)
        record = by_name[target]
        put(module, leaf, placed[target], kind=record.kind, persistent=record.persistent)
    materialised = _materialise(modules, device)
    if materialised:
        logger.warning("weights: %d tensors are not the daemon's, zeros: %s", len(materialised), materialised[:8])
    outside = tuple(_join(prefix, name) for prefix, module in modules.items() for name in unregistered_meta(module))
    report = MapReport(len(placed), len(aliases), tuple(reshaped), materialised, outside)
    if report.unregistered:
        logger.warning("weights: tensors outside parameters and buffers are empty: %s", report.unregistered[:8])
    return report


def _owner(modules: Mapping[str, torch.nn.Module], name: str) -> tuple[torch.nn.Module, str]:
    prefix, _, leaf = name.rpartition(".")
    module = modules.get(prefix)
    if module is None or not leaf:
        raise WeightCacheUnavailable("error", f"the engine's model has no module for the daemon's {printable(name)!r}")
    return module, leaf


def _materialise(modules: Mapping[str, torch.nn.Module], device: torch.device) -> tuple[str, ...]:
    import torch

    made: dict[int, torch.Tensor] = {}
    names: list[str] = []
    for prefix, module in modules.items():
        for leaf, kind, old, persistent in meta_tensors(module):
            if (new := made.get(id(old))) is None:
                new = torch.zeros(old.shape, dtype=old.dtype, device=device)
                if kind == "parameter":
                    new = as_parameter(old, new, requires_grad=old.requires_grad)
                made[id(old)] = new
            put(module, leaf, new, kind=kind, persistent=persistent)
            names.append(_join(prefix, leaf))
    return tuple(names)


def _join(prefix: str, leaf: str) -> str:
    return f"{prefix}.{leaf}" if prefix else leaf
