"""Writes to the shared tiers, in the background: one bounded queue and one worker a tier."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from warmseed.errors import printable
from warmseed.stores.base import Body, Store
from warmseed.stores.errors import StoreError

__all__ = ["FanOut"]

_log = logging.getLogger(__name__)
_QUIET = 60.0  # seconds between two lines about the same kind of failure of one tier


class FanOut:
    """Hands every object to each tier without making anybody wait.

    A tier gets its objects in the order they were given, so that what is written last (a manifest) is visible
    last. A full queue drops the new object for that tier, and says so: the disk still has it.
    """

    def __init__(self, tiers: Sequence[Store], *, depth: int = 64) -> None:
        self._tiers, self._depth = tiers, depth
        self._queues: dict[str, asyncio.Queue[tuple[str, Body]]] = {}
        self._workers: list[asyncio.Task[None]] = []
        self._told: dict[tuple[str, str], float] = {}  # (tier, kind of failure) -> monotonic time of the last line
        self.dropped = 0  # objects that a full queue refused
        self.failed = 0  # objects that a tier refused

    def offer(self, key: str, body: Body, *, only: Sequence[Store] | None = None) -> None:
        """Queue `body` for the tiers (or for `only` some of them); its source must last until `flush`."""
        for tier in self._tiers if only is None else only:
            queue = self._queue_of(tier)
            try:
                queue.put_nowait((key, body))
            except asyncio.QueueFull:
                self.dropped += 1
                _log.warning(
                    "store=%s key=%s not written: %d writes are waiting already; the local disk keeps it",
                    tier.name,
                    key,
                    self._depth,
                )

    def _queue_of(self, tier: Store) -> asyncio.Queue[tuple[str, Body]]:
        if tier.name not in self._queues:
            queue: asyncio.Queue[tuple[str, Body]] = asyncio.Queue(self._depth)
            self._queues[tier.name] = queue
            task = asyncio.get_running_loop().create_task(self._work(tier, queue), name=f"write {tier.name}")
            self._workers.append(task)
        return self._queues[tier.name]

    async def _work(self, tier: Store, queue: asyncio.Queue[tuple[str, Body]]) -> None:
        while True:
            key, body = await queue.get()
            try:
                await tier.put(key, body)
                _log.debug("store=%s key=%s bytes=%d outcome=stored", tier.name, key, body.size)
            except StoreError as error:
                self._note_failure(tier, key, error)
            except Exception:  # noqa: BLE001 - a third party's store may raise anything; it must not end the worker
                self.failed += 1
                _log.warning("store=%s key=%s not written", tier.name, key, exc_info=True)
            finally:
                queue.task_done()

    def _note_failure(self, tier: Store, key: str, error: StoreError) -> None:
        self.failed += 1
        kind, now = type(error).__name__, time.monotonic()
        if now - self._told.get((tier.name, kind), float("-inf")) > _QUIET:
            self._told[tier.name, kind] = now
            _log.warning("store=%s key=%s not written: %s", tier.name, key, printable(error))

    @property
    def waiting(self) -> int:
        """Objects that are not in every tier yet."""
        return sum(queue.qsize() for queue in self._queues.values())

    async def flush(self, timeout: float) -> bool:
        """Wait until every queue is empty; whether that was within `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await asyncio.gather(*(queue.join() for queue in self._queues.values()))
        except TimeoutError:
            return False
        return True

    async def aclose(self) -> None:
        """Give up what is still waiting."""
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        self._workers.clear()
        self._queues.clear()
