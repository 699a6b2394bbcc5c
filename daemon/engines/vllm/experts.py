"""Which experts are this rank's: tables that have memory and values while the rest of a model is built without."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from vllm.config import ModelConfig

__all__ = ["real_expert_maps"]


@contextmanager
def real_expert_maps(model_config: ModelConfig, device: torch.device) -> Iterator[None]:
    """While the block builds a model of experts on the meta device, vLLM makes its expert maps on `device`.

    vLLM reads the maps as soon as it has made them, which fails on the meta device.
    """
    if not model_config.is_moe:
        yield
        return
    owner, name = _maker()
    original: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(original)
    def with_memory(*arguments: Any, **named: Any) -> Any:
        import torch

        with torch.device(device):
            return original(*arguments, **named)

    setattr(owner, name, with_memory)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _maker() -> tuple[Any, str]:
    """What makes the maps: a class of its own since 0.22, a function before."""
    try:
        from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
    except ImportError:
        from vllm.model_executor.layers.fused_moe import layer

        return layer, "determine_expert_map"
    return ExpertMapManager, "__init__"
