"""``warmseed preload``: keep a model's weights in memory and its warmup caches hot."""

from __future__ import annotations

import asyncio

from warmseed.daemon import logs
from warmseed.daemon.launcher.launcher import launch
from warmseed.daemon.settings.config import PreloadConfig
from warmseed.daemon.settings.flags import preload_command

__all__ = ["preload"]


def _run(config: PreloadConfig) -> int:
    logs.install()
    return asyncio.run(launch(config))


preload = preload_command(_run)
