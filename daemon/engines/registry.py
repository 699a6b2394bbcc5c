"""Engines by name."""

from __future__ import annotations

import os
from pathlib import Path

from warmseed.daemon.engines.base import CacheLayout, Engine
from warmseed.daemon.engines.bytecode import bytecode_variables
from warmseed.daemon.engines.torch import TorchEngine
from warmseed.daemon.protocol.spec import RankSpec
from warmseed.errors import ConfigurationError, printable

__all__ = ["cache_layout", "engine_for"]


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
            buckets=config.shape_buckets,
        )
    from warmseed.daemon.engines.vllm.adapter import VllmEngine

    return VllmEngine(spec)


def cache_layout(engine: str, cache_root: Path) -> CacheLayout:
    """Where processes of the engine called `engine` keep their caches below `cache_root`.

    Raises:
        ConfigurationError: there is no such engine, or it has no processes but `warmseed run`, which knows by itself.
    """
    if engine == "vllm":
        from warmseed.daemon.engines.vllm import layout

        found = layout.layout_below(cache_root, os.environ, flashinfer="", arch="")
        bytecode = bytecode_variables(cache_root, layout.MODULES, os.environ)
        return CacheLayout(found.roots, {**found.variables, **bytecode})
    if engine == "torch":
        raise ConfigurationError("the torch engine is `warmseed run`, which sets its own caches; this is for vllm")
    raise ConfigurationError(f"there is no engine {printable(engine)!r}; choose vllm")
