"""What vLLM calls in each of its processes (entry-point group ``vllm.general_plugins``).

It registers the ``ipc_cache`` load format and the hooks that format needs, each at the moment vLLM imports the module
concerned. With ``VLLM_PLUGINS`` set, the name ``warmseed`` must be in it.
"""

from __future__ import annotations

import logging
import os
from types import ModuleType
from typing import Final

from warmseed.daemon.engines.vllm.post_import import when_imported
from warmseed.daemon.engines.vllm.releases import installed_release
from warmseed.errors import ConfigurationError

__all__ = ["UNSUPPORTED_OK", "register", "unsupported_ok"]

logger = logging.getLogger(__name__)

UNSUPPORTED_OK: Final = "WARMSEED_ENGINE_UNSUPPORTED_OK"


def unsupported_ok() -> bool:
    """Whether the operator wants a vLLM outside the table of releases to be tried."""
    return os.environ.get(UNSUPPORTED_OK, "").strip().lower() in ("1", "true", "yes", "on")


def register() -> None:
    """Set everything up for whichever modules this process will import. Harmless when called again."""
    when_imported("vllm.model_executor.model_loader", _loader)
    when_imported("vllm.v1.worker.gpu_worker", _worker)
    when_imported("vllm.v1.worker.cpu_worker", _worker)


def _loader(module: ModuleType) -> None:
    try:
        installed_release(unsupported_ok=unsupported_ok())
    except ConfigurationError as error:
        logger.warning("the ipc_cache load format of warmseed stays off: %s", error)
        return
    from warmseed.daemon.engines.vllm import loader

    loader.install(module)


def _worker(module: ModuleType) -> None:
    from warmseed.daemon.engines.vllm import hooks

    hooks.install(module)
