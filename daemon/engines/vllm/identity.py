"""vLLM's hash of its configuration, with every factor that goes into it, snapshotted once.

vLLM changes its configuration while it builds a model, so the hash means something only together with the moment
it was taken at. `snapshot` is taken before anything is built and names bundles; `table_hash` is taken with the model
built, as vLLM's own warmup takes it, and is the folder in which an engine looks for its FlashInfer tables.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from warmseed.daemon.engines.base import EngineIdentity

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["snapshot", "table_hash"]

VALUE_LIMIT = 512  # characters of one factor kept readable; longer ones are kept as a digest


def snapshot(config: VllmConfig) -> EngineIdentity:
    """The hash and its factors, named ``ModelConfig.dtype`` and so on; `config` is not changed."""
    with _recording() as seen:
        digest = _own_hash(config)
    factors: dict[str, str] = {}
    for name in sorted(vars(config)):
        part = getattr(config, name)
        if hasattr(part, "compute_hash") and type(part).__name__ not in seen:
            factors[f"vllm.{name}"] = str(part.compute_hash())
    for kind, items in seen.items():
        factors.update({f"{kind}.{name}": _readable(value) for name, value in items.items()})
    return EngineIdentity(digest, factors)


def table_hash(config: VllmConfig) -> str:
    """The hash under which an engine looks for its FlashInfer tables; call it when the model is built.

    An engine lets its attention backend choose the KV block size before it hashes, so a copy of `config` does too.
    """
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform

    update = getattr(current_platform, "update_block_size_for_backend", None)
    if update is None:
        return _own_hash(config)
    adjusted = copy.copy(config)
    adjusted.cache_config = copy.copy(config.cache_config)
    with set_current_vllm_config(adjusted):
        update(adjusted)
    return _own_hash(adjusted)


def _own_hash(config: VllmConfig) -> str:
    """64 hex digits: vLLM's own name for its table folder where it has one, else the SHA-256 of its hash."""
    try:
        from vllm.model_executor.warmup.flashinfer_autotune_cache import flashinfer_autotune_cache_hash
    except ImportError:  # before 0.24
        return hashlib.sha256(config.compute_hash().encode()).hexdigest()
    # It asks its argument, a model runner, for the configuration and for nothing else.
    return str(flashinfer_autotune_cache_hash(SimpleNamespace(vllm_config=config)))


@contextlib.contextmanager
def _recording() -> Iterator[dict[str, Mapping[str, object]]]:
    """What every part of the configuration hashes, by class name, while the block runs.

    vLLM has no way of listing them, and `warmseed explain` needs them by name. Only the collecting function is
    wrapped; the hash is vLLM's own.
    """
    seen: dict[str, Mapping[str, object]] = {}
    wrapped: list[tuple[Any, Callable[..., Any]]] = []
    for name, module in list(sys.modules.items()):
        collect = getattr(module, "get_hash_factors", None) if name.startswith("vllm.config") else None
        if collect is None:
            continue

        wrapped.append((module, collect))
        module.get_hash_factors = _remembering(collect, seen)  # type: ignore[attr-defined]
    try:
        yield seen
    finally:
        for module, collect in wrapped:
            module.get_hash_factors = collect


def _remembering(collect: Callable[..., Any], seen: dict[str, Mapping[str, object]]) -> Callable[..., Any]:
    def record(part: object, *rest: object, **named: object) -> Any:
        factors = collect(part, *rest, **named)
        seen[type(part).__name__] = factors
        return factors

    return record


def _readable(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    return text if len(text) <= VALUE_LIMIT else f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
