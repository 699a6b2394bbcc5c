"""Turns handed out fairly: owners in rotation, each owner's own waiters in the order they came."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

__all__ = ["FairQueue", "QueueFull"]


class QueueFull(Exception):
    """More wait already than the queue lets wait."""


class FairQueue:
    """`places` turns at a time; whoever has a hundred waiters still gets one turn per round.

    With `places_per_owner` one owner never holds more than that, even when places are free.
    """

    def __init__(
        self,
        places: int,
        *,
        places_per_owner: int | None = None,
        waiting: int | None = None,
        waiting_per_owner: int | None = None,
    ) -> None:
        self._places = places
        self._places_per_owner = places_per_owner or places
        self._waiting = waiting
        self._waiting_per_owner = waiting_per_owner
        self._held: Counter[str] = Counter()
        self._out = 0  # the sum of `_held`
        self._queues: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._waiters = 0

    @property
    def held(self) -> int:
        """How many turns are out now."""
        return self._out

    @property
    def waiting(self) -> int:
        """How many wait for a turn now."""
        return self._waiters

    @asynccontextmanager
    async def turn(self, owner: str, *, seconds: float) -> AsyncIterator[None]:
        """A turn, held for the length of the block; waited for `seconds` at most.

        Raises:
            TimeoutError: no turn came in time.
            QueueFull: too many wait already.
        """
        async with asyncio.timeout(seconds):
            await self.acquire(owner)
        try:
            yield
        finally:
            self.release(owner)

    async def acquire(self, owner: str) -> None:
        """A turn for `owner`, given back by `release`. The caller sets the deadline.

        Raises:
            QueueFull: too many wait already.
        """
        queue = self._queues.get(owner)
        if queue is None and self.held < self._places and self._held[owner] < self._places_per_owner:
            # Nobody of this owner waits; others that wait do so because of their own share only.
            self._take(owner)
            return
        if (self._waiting is not None and self._waiters >= self._waiting) or (
            self._waiting_per_owner is not None and queue is not None and len(queue) >= self._waiting_per_owner
        ):
            raise QueueFull
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(owner, deque()).append(future)
        self._waiters += 1
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.release(owner)  # the turn came in the same moment as the cancellation
            else:
                self._forget(owner, future)
            raise

    def release(self, owner: str) -> None:
        """Give a turn back; the next in rotation gets it."""
        self._out -= 1
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]
        self._hand_out()

    def _hand_out(self) -> None:
        passed_over = 0
        while self._queues and self.held < self._places and passed_over < len(self._queues):
            owner, queue = next(iter(self._queues.items()))
            self._queues.move_to_end(owner)
            if self._held[owner] >= self._places_per_owner:
                passed_over += 1
                continue
            passed_over = 0
            future = queue.popleft()
            if not queue:
                del self._queues[owner]
            self._waiters -= 1
            if not future.done():  # else: cancelled, its waiter not yet resumed
                self._take(owner)
                future.set_result(None)

    def _take(self, owner: str) -> None:
        self._out += 1
        self._held[owner] += 1

    def _forget(self, owner: str, future: asyncio.Future[None]) -> None:
        queue = self._queues.get(owner)
        if queue is not None and future in queue:
            queue.remove(future)
            self._waiters -= 1
            if not queue:
                del self._queues[owner]
