"""The one place where blocking work leaves the event loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

__all__ = ["run_blocking"]

P = ParamSpec("P")
T = TypeVar("T")

# A pool of its own: a hung network file system must not take the threads that name resolution and
# other libraries share. 16 bounds how much such a hang can pile up.
_POOL = ThreadPoolExecutor(max_workers=16, thread_name_prefix="warmseed-blocking")


async def run_blocking(work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """What `work` returns, computed on a worker thread.

    Cancelling the caller stops the wait at once; the thread itself ends when the call returns, so
    `work` must leave nothing half-visible behind.
    """
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_POOL, functools.partial(work, *args, **kwargs))
