"""Engines by name."""

from __future__ import annotations

from pathlib import Path

from warmseed.daemon.engines.base import Engine
from warmseed.daemon.engines.torch import TorchEngine
from warmseed.daemon.spec import RankSpec

__all__ = ["engine_for"]


def engine_for(spec: RankSpec) -> Engine:
    """The engine of one rank.

    Raises:
        ConfigurationError: for a model or flags that the engine can't serve.
    """
    config = spec.config
    if config.engine == "torch":
        return TorchEngine(
            Path(config.model),
            dtype="bfloat16" if config.dtype == "auto" else config.dtype,
            local_rank=spec.local_rank,
            checkpoint_digest=config.checkpoint_digest,
        )
    from warmseed.daemon.engines.vllm.adapter import VllmEngine

    return VllmEngine(spec)
