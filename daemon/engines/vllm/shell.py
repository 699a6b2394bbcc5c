"""An engine's model without memory, and the daemon's tensors put into it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from warmseed.daemon.engines.vllm.experts import real_expert_maps
from warmseed.daemon.engines.vllm.model import take_flags
from warmseed.daemon.engines.vllm.quantization import check_quantization, finish_processed, post_process
from warmseed.daemon.engines.vllm.releases import Release
from warmseed.daemon.weights.client import Attachment, map_into
from warmseed.daemon.weights.errors import WeightCacheUnavailable
from warmseed.daemon.weights.modules import meta_tensors, unregistered_meta

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from vllm.config import ModelConfig, VllmConfig

__all__ = ["build_shell", "fill_shell", "forget_layers"]


def build_shell(
    vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "", *, device: torch.device
) -> torch.nn.Module:
    """vLLM's model for this configuration on the meta device: every parameter and buffer named, nothing allocated.

    Expert maps alone are made, on `device`, where the engine runs.
    """
    import torch
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    maps = real_expert_maps(model_config, device)
    with set_default_torch_dtype(model_config.dtype), torch.device("meta"), maps:
        model: torch.nn.Module = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
    return model


def fill_shell(
    model: torch.nn.Module,
    attachment: Attachment,
    vllm_config: VllmConfig,
    model_config: ModelConfig,
    release: Release,
) -> None:
    """Register the daemon's tensors in `model` and do what they can't carry, so that it can serve.

    Raises:
        UnsupportedQuantForIPCError: a layer's quantization can't take them.
        WeightCacheUnavailable: reason ``error``; something of the model would have stayed empty.
    """
    from vllm.utils.torch_utils import set_default_torch_dtype

    on_gpu = vllm_config.device_config.device_type == "cuda"
    check_quantization(model, release, on_gpu=on_gpu)
    map_into(model, attachment)
    take_flags(model)
    _materialise_placeholders(model, attachment.device)
    with set_default_torch_dtype(model_config.dtype):
        if on_gpu:
            finish_processed(model, model_config, attachment.device, release)
        else:
            post_process(model, model_config, attachment.device)
    model.eval()
    empty = [f"{name}.{leaf}" for name, module in model.named_modules() for leaf in _without_memory(module)]
    if empty:
        raise WeightCacheUnavailable(
            "error",
            f"{len(empty)} tensors of the engine's model are empty, {empty[0]} first; the daemon has none for them",
        )


def _materialise_placeholders(model: torch.nn.Module, device: torch.device) -> None:
    """Attributes such as an attention layer's ``kv_cache`` start as tensors without elements, to be replaced later."""
    import torch

    for module in model.modules():
        for leaf in tuple(unregistered_meta(module)):
            placeholder = getattr(module, leaf)
            if placeholder.numel() == 0:
                setattr(module, leaf, torch.empty_like(placeholder, device=device))


def _without_memory(module: torch.nn.Module) -> Iterator[str]:
    for leaf, *_ in meta_tensors(module):
        yield leaf
    yield from unregistered_meta(module)


@contextmanager
def forget_layers(vllm_config: VllmConfig) -> Iterator[None]:
    """If the block fails, what building a model left in vLLM's registries is taken out again."""
    compilation = vllm_config.compilation_config
    layers = dict(compilation.static_forward_context)
    experts = list(getattr(compilation, "static_all_moe_layers", ()))
    rotary = _rotary_cache()
    embeddings = dict(rotary)
    try:
        yield
    except BaseException:
        compilation.static_forward_context.clear()
        compilation.static_forward_context.update(layers)
        if hasattr(compilation, "static_all_moe_layers"):
            compilation.static_all_moe_layers[:] = experts
        rotary.clear()
        rotary.update(embeddings)
        raise


def _rotary_cache() -> dict[Any, Any]:
    """vLLM keeps rotary embeddings by their parameters and would reuse one that is still on the meta device."""
    from vllm.model_executor.layers import rotary_embedding

    found: dict[Any, Any] = getattr(rotary_embedding, "_ROPE_DICT", {})
    return found
