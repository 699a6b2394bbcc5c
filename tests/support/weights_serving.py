"""A weight server in a thread of the test's own process, so that a test can be the engine, a stranger, or both."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

import torch
from blockbuster import blockbuster_ctx

from tests.support.weights_model import fingerprint, loaded
from warmseed.daemon.weights.export import Exported, export_model
from warmseed.daemon.weights.fingerprint import Fingerprint
from warmseed.daemon.weights.server import OnReport, ServerLimits, WeightServer
from warmseed.daemon.weights.socket import SocketAddress

__all__ = ["eventually", "private_folder", "served"]


def private_folder(path: Path) -> Path:
    """`path`, as a folder that may hold sockets."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.chmod(0o700)
    return path


@contextmanager
def served(
    folder: Path,
    *,
    model: torch.nn.Module | None = None,
    exported: Exported | None = None,
    key: Fingerprint | None = None,
    limits: ServerLimits | None = None,
    on_report: OnReport | None = None,
    device_uuid: str = "",
) -> Iterator[WeightServer]:
    """The server, listening in `folder`; the loop it runs on is not allowed to block."""
    shared = exported or export_model(model or loaded(), device="cpu", segment_bytes=512)
    address = SocketAddress(private_folder(folder) / "weights.sock", device_uuid=device_uuid)
    started: Future[tuple[WeightServer, Callable[[], None]]] = Future()

    async def run() -> None:
        server = WeightServer(shared, key or fingerprint(), address, on_report=on_report, limits=limits)
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        async with server.serving():
            started.set_result((server, lambda: loop.call_soon_threadsafe(stopped.set)))
            await stopped.wait()

    with blockbuster_ctx("warmseed"), ThreadPoolExecutor(1) as pool:
        running = pool.submit(asyncio.run, run())
        wait((running, started), timeout=20, return_when=FIRST_COMPLETED)
        if running.done():
            running.result()
        server, stop = started.result(0)
        try:
            yield server
        finally:
            stop()
            running.result(20)


def eventually(true: Callable[[], bool], what: str) -> None:
    """Wait for what another thread is about to do."""
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)
