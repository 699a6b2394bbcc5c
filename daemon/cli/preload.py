"""``warmseed preload``: keep a model's weights in memory and its warmup caches hot."""

from __future__ import annotations

import asyncio

from warmseed.daemon import logs
from warmseed.daemon.config import PreloadConfig
from warmseed.daemon.flags import preload_command
from warmseed.daemon.launcher import launch

__all__ = ["preload"]


def _run(config: PreloadConfig) -> int:
    logs.install()
    return asyncio.run(launch(config))


preload = preload_command(_run)
