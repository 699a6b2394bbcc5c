"""Waiting for something to become true, with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


async def until(true: Callable[[], bool], *, seconds: float = 20.0) -> None:
    """Return as soon as `true` holds.

    Raises:
        TimeoutError: when that takes longer than `seconds`.
    """
    async with asyncio.timeout(seconds):
        while True:
            if true():
                return
            await asyncio.sleep(0.002)


def run(work: Callable[[], Awaitable[None]], *, seconds: float = 100.0) -> None:
    """Run one test's coroutine under a deadline."""

    async def limited() -> None:
        async with asyncio.timeout(seconds):
            await work()

    asyncio.run(limited())
