"""The daemon's side of loading: vLLM's own loader and post-processing, in a process that never serves."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from warmseed.daemon.engines.vllm.draft import Role, config_of, model_config_of
from warmseed.daemon.engines.vllm.quantization import check_quantization, post_process
from warmseed.daemon.engines.vllm.releases import Release
from warmseed.daemon.weights.modules import registered_tensor

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

__all__ = ["FLAG_PREFIX", "GROUP_SECONDS", "join_groups", "leave_groups", "load_rank", "take_flags"]

logger = logging.getLogger(__name__)

FLAG_PREFIX: Final = "warmseed_flag_"  # root buffers that carry what loading a draft model found out
_DRAFT_FLAGS: Final = ("has_own_lm_head", "has_own_embed_tokens")  # vllm/model_executor/models/interfaces.py
GROUP_SECONDS: Final = 1800.0  # seconds for every rank of the world to arrive; ranks load at their own pace


def join_groups(
    config: VllmConfig, *, rank: int, world_size: int, local_rank: int, store: Any, name: str = "warmseed"
) -> torch.device:
    """Form the world group of the daemons and vLLM's groups in it, as its engines do; this rank's device.

    The daemons meet through `store` (torch.distributed's), apart from any engine: vLLM's own rendezvous settings are
    not consulted. Every rank of the group must call this, with the same `name`, which no other group here has.
    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.distributed.parallel_state import set_custom_all_reduce
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        os.environ["VLLM_DIST_IDENT"] = name  # what the CPU communicator calls its shared memory
    set_custom_all_reduce(False)  # its buffers are for serving, and the daemons only ever meet
    parallel = config.parallel_config
    device = torch.device("cpu") if current_platform.is_cpu() else torch.device("cuda", local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            backend=current_platform.dist_backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=GROUP_SECONDS),
        )
    init_distributed_environment(
        world_size=world_size,
        rank=rank,
        distributed_init_method="",
        local_rank=local_rank,
        backend=current_platform.dist_backend,
    )
    with set_current_vllm_config(config):
        ensure_model_parallel_initialized(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    return device


def leave_groups(device: str = "cpu") -> None:
    """Give back communicators and workspaces: what serves engines afterwards needs the weights alone."""
    import torch
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(device)  # of this thread, which need not be the one that loaded
    destroy_model_parallel()
    destroy_distributed_environment()
    gc.collect()
    if on_gpu:
        clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # noqa: SLF001 - there is no public way
        if clear is not None:
            clear()
        torch.cuda.empty_cache()


def load_rank(config: VllmConfig, release: Release, device: torch.device, *, role: Role = "target") -> torch.nn.Module:
    """This rank's shard of the model in `role`, loaded by vLLM's configured loader and, on a GPU, post-processed.

    On a CPU post-processing packs weights into handles that no other process can use, so weights stay as loaded.

    Raises:
        UnsupportedQuantForIPCError: before anything is read, if a layer's quantization can't be shared.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.worker.workspace import init_workspace_manager

    model_config = model_config_of(config, role)
    config = config_of(config, role)
    loader = get_model_loader(config.load_config)
    on_gpu = device.type == "cuda"
    with set_current_vllm_config(config), set_default_torch_dtype(model_config.dtype):
        init_workspace_manager(device)  # some attention backends take workspace when they are built
        with device:
            model: torch.nn.Module = initialize_model(vllm_config=config, model_config=model_config)
        check_quantization(model, release, on_gpu=on_gpu)
        loader.load_weights(model, model_config)
        if on_gpu:
            post_process(model, model_config, device)
    _carry_flags(model)
    model.eval().requires_grad_(False)
    gc.collect()
    if on_gpu:
        import torch

        torch.cuda.empty_cache()
    return model


def _carry_flags(model: torch.nn.Module) -> None:
    """Loading tells a draft model whether head and embeddings are its own; engines never load, so that travels."""
    import torch

    for name in _DRAFT_FLAGS:
        value = getattr(model, name, None)
        if isinstance(value, bool):
            model.register_buffer(FLAG_PREFIX + name, torch.tensor([value], dtype=torch.uint8), persistent=False)


def take_flags(model: torch.nn.Module) -> None:
    """Set what `_carry_flags` wrote down, in the engine's model, and remove the carriers."""
    for name in _DRAFT_FLAGS:
        carrier = registered_tensor(model, FLAG_PREFIX + name)
        if carrier is not None:
            delattr(model, FLAG_PREFIX + name)
            with contextlib.suppress(AttributeError):  # a read-only property says it already
                setattr(model, name, bool(carrier.item()))
