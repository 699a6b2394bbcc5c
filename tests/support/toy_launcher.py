"""A launcher of toy ranks as a process of its own: configuration on standard input, exit code as the launcher's."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec

from warmseed.daemon import logs
from warmseed.daemon.launcher.launcher import launch
from warmseed.daemon.settings.config import PreloadConfig

if __name__ == "__main__":
    logs.install()
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=PreloadConfig)
    toy = str(Path(__file__).parent / "toy_rank.py")
    sys.exit(asyncio.run(launch(config, rank_command=(sys.executable, toy))))
