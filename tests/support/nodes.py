"""One node for launcher tests: a configuration over toy ranks, run in this process or in one of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from warmseed.daemon.launcher.board import Board
from warmseed.daemon.launcher.launcher import launch
from warmseed.daemon.launcher.notify import Notifier
from warmseed.daemon.settings.config import PreloadConfig

FOLDER = "WARMSEED_TOY_FOLDER"  # in the environment of a test's ranks: which test they belong to
HERE = Path(__file__).parent
TOY = (sys.executable, str(HERE / "toy_rank.py"))
# How long a test may wait for what should take milliseconds; reached only when something hangs.
PATIENCE = 60.0


def toy_config(folder: Path, plan: Mapping[str, object] | None = None, **settings: object) -> PreloadConfig:
    """A checked configuration whose toy ranks follow `plan` (see `toy_rank`)."""
    fields = {
        "model": "/models/toy",
        "weight_cache_socket_dir": str(folder),
        "engine_args": ["--toy", json.dumps(plan or {})],
        **settings,
    }
    return msgspec.convert(fields, PreloadConfig)


def run_toys(
    config: PreloadConfig,
    *,
    on_ready: Callable[[Board], None] | None = None,
    notifier: Notifier | None = None,
) -> int:
    """Launch toy ranks in this process's event loop; the exit code."""

    async def whole() -> int:
        async with asyncio.timeout(PATIENCE):
            return await launch(config, rank_command=TOY, on_ready=on_ready, notifier=notifier)

    os.environ[FOLDER] = config.weight_cache_socket_dir or ""
    try:
        return asyncio.run(whole())
    finally:
        del os.environ[FOLDER]


def stop_when_ready(number: signal.Signals = signal.SIGTERM) -> Callable[[Board], None]:
    """An `on_ready` that sends this process a signal."""
    return lambda _: os.kill(os.getpid(), number)


def start_toys(config: PreloadConfig, *, prefix: tuple[str, ...] = (), **popen: object) -> subprocess.Popen[bytes]:
    """A launcher in a process of its own; its configuration goes through standard input."""
    process = subprocess.Popen(
        [*prefix, sys.executable, str(HERE / "toy_launcher.py")],
        stdin=subprocess.PIPE,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), FOLDER: config.weight_cache_socket_dir or ""},
        **popen,  # type: ignore[call-overload]
    )
    process.stdin.write(msgspec.json.encode(config))
    process.stdin.close()
    process.stdin = None
    return process


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def left_over(folder: Path) -> list[int]:
    """Processes that still run for toy ranks of the socket folder `folder`, however far they have moved away."""
    marker = f"{FOLDER}={folder}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if marker in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def wait_until_gone(folder: Path, seconds: float = 5.0) -> list[int]:
    """What `left_over` still finds after at most `seconds`."""
    deadline = time.monotonic() + seconds
    while (found := left_over(folder)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found
