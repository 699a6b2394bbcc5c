"""vLLM's own ``ipc_cache`` loader (0.30 and later), which stays in charge where vLLM's own daemon is what runs."""

from __future__ import annotations

import logging
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from warmseed.daemon.weights.loader_config import LoaderConfig

if TYPE_CHECKING:
    import torch
    from vllm.config import ModelConfig, VllmConfig
    from vllm.config.load import LoadConfig

__all__ = ["NativeLoader"]

logger = logging.getLogger("vllm.warmseed")


class NativeLoader:
    """Static access to it; nothing here does anything on releases that have none."""

    _kind: type[Any] | None = None

    @classmethod
    def remember(cls, module: ModuleType) -> None:
        """Keep vLLM's own class before its name is taken."""
        cls._kind = getattr(module, "IpcModelLoader", None)

    @classmethod
    def exists(cls) -> bool:
        return cls._kind is not None

    @classmethod
    def answers(cls, settings: LoaderConfig) -> bool:
        """Whether vLLM's own daemon has its socket for this GPU. It never has one on a CPU."""
        if cls._kind is None or settings.socket_path is not None:
            return False
        from vllm.platforms import current_platform

        if not current_platform.is_cuda_alike():
            return False
        try:
            from vllm.model_executor.model_loader.weight_cache.protocol import get_current_device_uuid, get_socket_path

            return Path(get_socket_path(get_current_device_uuid(), settings.socket_dir)).is_socket()
        except (ImportError, OSError, RuntimeError) as error:
            logger.debug("vLLM's own weight cache can't be looked for: %r", error)
            return False

    @classmethod
    def external_memory(cls, load_config: LoadConfig, vllm_config: VllmConfig) -> int:
        """What vLLM's own daemon holds, as its loader counts it; 0 before 0.32, where it did not."""
        loader = cls._make(load_config)
        count = getattr(loader, "get_external_weight_memory", None)
        return int(count(vllm_config)) if count is not None else 0

    @classmethod
    def load(
        cls, load_config: LoadConfig, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str
    ) -> torch.nn.Module:
        """The model as vLLM's own loader makes it."""
        model: torch.nn.Module = cls._make(load_config).load_model(vllm_config, model_config, prefix)
        return model

    @classmethod
    def _make(cls, load_config: LoadConfig) -> Any:
        if cls._kind is None:
            raise RuntimeError("this vLLM has no ipc_cache load format of its own")
        return cls._kind(load_config)
