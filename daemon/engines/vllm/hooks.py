"""The three moments at which vLLM's worker is told something: sizing its memory, sizing its KV cache, end of warmup.

All wrap a method of vLLM's and call it; they do nothing unless the load format is ``ipc_cache``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from warmseed.daemon.engines.vllm import memory, observe
from warmseed.daemon.engines.vllm.arguments import LOAD_FORMAT
from warmseed.daemon.engines.vllm.plugin import unsupported_ok
from warmseed.daemon.engines.vllm.releases import installed_release
from warmseed.errors import ConfigurationError

__all__ = ["install"]

logger = logging.getLogger(__name__)

_MARK: Final = "_warmseed_wrapped"


def install(module: ModuleType) -> None:
    """Wrap the worker classes of `module`, one of vLLM's worker modules."""
    try:
        release = installed_release(unsupported_ok=unsupported_ok())
    except ConfigurationError:
        return  # the load format is off, and said so
    for name in ("Worker", "CPUWorker"):
        worker = vars(module).get(name)
        if not isinstance(worker, type) or worker.__module__ != module.__name__:
            continue
        _wrap(worker, "compile_or_warm_up_model", _warmed_up)
        if name == "Worker":
            _wrap(worker, "determine_available_memory", _before_kv_sizing)
            if not release.external_weights:
                _wrap(worker, "init_device", functools.partial(_before_memory, module))


def _wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    original = vars(owner).get(name)
    if original is None or hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def wrapped(self: Any, *arguments: Any, **named: Any) -> Any:
        if str(self.vllm_config.load_config.load_format) != LOAD_FORMAT:
            return original(self, *arguments, **named)
        return around(functools.partial(original, self, *arguments, **named), self)

    setattr(wrapped, _MARK, True)
    setattr(owner, name, wrapped)


def _before_memory(module: ModuleType, proceed: Callable[[], Any], worker: Any) -> Any:
    """The worker sizes its share inside `proceed`; while it runs, that accounts for what the daemon holds."""
    original = module.request_memory

    def request_memory(snapshot: Any, cache_config: Any) -> int:
        from vllm.model_executor.model_loader import get_model_loader

        loader: Any = get_model_loader(worker.load_config)
        return memory.request_memory(
            snapshot, cache_config, original, loader.get_external_weight_memory(worker.vllm_config)
        )

    module.request_memory = request_memory  # type: ignore[attr-defined]
    try:
        return proceed()
    finally:
        module.request_memory = original  # type: ignore[attr-defined]


def _before_kv_sizing(proceed: Callable[[], Any], worker: Any) -> Any:
    if memory.charge.refund:
        worker.requested_memory = memory.refunded(
            int(worker.requested_memory), free=int(worker.init_snapshot.free_memory)
        )
    return proceed()


def _warmed_up(proceed: Callable[[], Any], worker: Any) -> Any:
    result = proceed()
    observe.finish()
    return result
