"""vLLM's own flags: parsed by vLLM's parser, checked for what a weight daemon can't do, turned into a config."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from warmseed.daemon.engines.vllm.inspection import inspected_here
from warmseed.errors import ConfigurationError, printable

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

__all__ = ["LOAD_FORMAT", "Usage", "check_config", "engine_config", "parse_engine_arguments", "usage_context"]

LOAD_FORMAT = "ipc_cache"
Usage = Literal["serve", "llm"]  # how the engines of this node are started: `vllm serve` or the `LLM` class


def parse_engine_arguments(argv: Sequence[str]) -> EngineArgs:
    """vLLM's `EngineArgs` for the flags `argv`, such as ``["--model", "/m", "--dtype", "bfloat16"]``.

    Raises:
        ConfigurationError: a flag that this vLLM does not know, or a value it refuses; the message is vLLM's own.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="warmseed preload", add_help=False, exit_on_error=True)
    EngineArgs.add_cli_args(parser)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parsed = parser.parse_args(list(argv))
    except SystemExit as stop:
        lines = [line for line in said.getvalue().splitlines() if line.strip()]
        reason = lines[-1].partition("error: ")[2] or lines[-1] if lines else "no reason given"
        raise ConfigurationError(f"vLLM does not take these flags: {printable(reason, limit=1000)}") from stop
    try:
        return EngineArgs.from_cli_args(parsed)
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"vLLM refuses these flags: {printable(error, limit=1000)}") from error


def usage_context(usage: Usage) -> UsageContext:
    """vLLM's name for `usage`. It decides defaults such as the batch size, and through them the config hash."""
    from vllm.usage.usage_lib import UsageContext

    return UsageContext.LLM_CLASS if usage == "llm" else UsageContext.OPENAI_API_SERVER


def engine_config(arguments: EngineArgs, *, usage: Usage = "serve") -> VllmConfig:
    """The complete configuration that an engine with these flags would have, before it builds anything.

    Raises:
        ConfigurationError: vLLM refuses the combination, or the daemon can't serve it.
    """
    try:
        with inspected_here():
            config = arguments.create_engine_config(usage_context=usage_context(usage))
    except (ValueError, TypeError, OSError, NotImplementedError) as error:
        raise ConfigurationError(f"vLLM refuses this configuration: {printable(error, limit=1000)}") from error
    check_config(config, daemon=True)
    return config


def check_config(config: VllmConfig, *, daemon: bool) -> None:
    """Pass silently if weights can be shared under `config`; the engine asks the same before it attaches.

    Raises:
        ConfigurationError: naming the setting and why it can't work with weights that another process owns.
    """
    if daemon and str(config.load_config.load_format) == LOAD_FORMAT:
        raise ConfigurationError(
            "--load-format ipc_cache is for engines that map the daemon's weights; the daemon itself loads from disk: "
            "leave it out"
        )
    if getattr(config.model_config, "enable_sleep_mode", False):
        raise ConfigurationError(
            "--enable-sleep-mode can't work with the ipc_cache load format: sleeping frees the weights' memory, which "
            "belongs to the daemon; leave one of the two out"
        )
    if getattr(config.parallel_config, "enable_eplb", False):
        raise ConfigurationError(
            "--enable-eplb can't work with the ipc_cache load format: it moves experts between ranks while serving, "
            "and would overwrite the daemon's weights; leave one of the two out"
        )
    offloaded = _offloaded(config)
    if offloaded:
        raise ConfigurationError(
            f"{offloaded} can't work with the ipc_cache load format: offloaded weights are not on the GPU to be mapped"
        )


def _offloaded(config: Any) -> str | None:
    offload = getattr(config, "offload_config", None)
    uva = getattr(offload, "uva", offload)
    gib = getattr(uva, "cpu_offload_gb", None) or getattr(config.cache_config, "cpu_offload_gb", 0)
    return "--cpu-offload-gb" if gib else None
