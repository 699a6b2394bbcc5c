"""Keeps a broken store from costing anybody time."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

from warmseed.errors import printable
from warmseed.stores.base import Body, ObjectInfo, ObjectReader, Store
from warmseed.stores.errors import StoreError, StoreTimeout, StoreUnavailable
from warmseed.stores.wrappers.base import Wrapper

__all__ = ["PROBE_KEY", "Breaker", "BreakerOpen", "breaker_state"]

_log = logging.getLogger(__name__)
PROBE_KEY = "warmseed/probe"  # never written; a store that can say so is alive


class BreakerOpen(StoreUnavailable):
    """The store was not asked: it failed a moment ago."""


class Breaker(Wrapper):
    """Refuses at once while its store is broken.

    Opens after one timeout, or after `failures` failures in a row. `cooldown` seconds later (doubling up to
    `longest`, with jitter) the next caller starts a probe that nobody waits for; the breaker closes when it answers.
    So a store that hangs costs its deadline once, and nothing more until it has proven itself.
    """

    suffix = "breaker"

    def __init__(
        self,
        inner: Store,
        *,
        failures: int = 3,
        cooldown: float = 10.0,
        longest: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(inner)
        self._allowed, self._cooldown, self._longest, self._clock = failures, cooldown, longest, clock
        self._failed = 0  # failures in a row
        self._trips = 0  # openings since the last success
        self._open_until: float | None = None  # None: closed
        self._why = ""
        self._probe: asyncio.Task[None] | None = None

    @property
    def state(self) -> str:
        """``closed``, ``open`` or ``half-open`` (a probe is under way)."""
        if self._open_until is None:
            return "closed"
        return "half-open" if self._probe is not None and not self._probe.done() else "open"

    @contextmanager
    def _watched(self) -> Iterator[None]:
        if self._open_until is not None:
            self._maybe_probe()
            raise BreakerOpen(f"{self.inner.name}: not asked, it failed just now ({self._why}); treated as a miss")
        try:
            yield
        except StoreUnavailable as error:
            self._note_failure(error)
            raise
        except StoreError:
            self._succeeded()  # it answered
            raise
        else:
            self._succeeded()

    def _succeeded(self) -> None:
        self._failed = self._trips = 0

    def _note_failure(self, error: StoreError) -> None:
        self._failed += 1
        if self._open_until is None and (isinstance(error, StoreTimeout) or self._failed >= self._allowed):
            self._trip(error)

    def _trip(self, error: StoreError) -> None:
        pause = min(self._cooldown * 2**self._trips, self._longest) * random.uniform(0.75, 1.25)  # noqa: S311
        self._trips += 1
        self._failed = 0
        self._open_until = self._clock() + pause
        self._why = printable(error)
        _log.warning("store=%s breaker=open for=%.1fs reason=%s", self.inner.name, pause, self._why)

    def _maybe_probe(self) -> None:
        due = self._open_until is not None and self._clock() >= self._open_until
        if due and (self._probe is None or self._probe.done()):
            self._probe = asyncio.get_running_loop().create_task(self._ask(), name=f"probe {self.inner.name}")

    async def _ask(self) -> None:
        try:
            await self.inner.stat(PROBE_KEY)
        except StoreError as error:
            self._trip(error)
        else:
            _log.info("store=%s breaker=closed", self.inner.name)
            self._open_until = None
            self._failed = 0  # `_trips` stays until a real operation succeeds: a flapping store waits longer

    async def get(self, key: str, *, limit: int) -> bytes | None:
        with self._watched():
            return await self.inner.get(key, limit=limit)

    @asynccontextmanager
    async def open(self, key: str, *, limit: int, offset: int = 0) -> AsyncIterator[ObjectReader | None]:
        async with AsyncExitStack() as stack:
            with self._watched():
                reader = await stack.enter_async_context(self.inner.open(key, limit=limit, offset=offset))
            yield None if reader is None else _WatchedReader(reader, self._note_failure)

    async def put(self, key: str, body: Body | bytes) -> None:
        with self._watched():
            await self.inner.put(key, body)

    async def stat(self, key: str) -> ObjectInfo | None:
        with self._watched():
            return await self.inner.stat(key)

    async def aclose(self) -> None:
        if self._probe is not None and not self._probe.done():
            self._probe.cancel()
            await asyncio.gather(self._probe, return_exceptions=True)
        await self.inner.aclose()


def breaker_state(store: Store) -> str:
    """The state of the breaker among the wrappers of `store`; ``closed`` if there is none."""
    while isinstance(store, Wrapper):
        if isinstance(store, Breaker):
            return store.state
        store = store.inner
    return "closed"


class _WatchedReader:
    """Tells the breaker of failures of the stream, and of nothing that its caller does meanwhile."""

    def __init__(self, reader: ObjectReader, note: Callable[[StoreError], None]) -> None:
        self._reader, self._note = reader, note

    @property
    def size(self) -> int:
        return self._reader.size

    async def __aiter__(self) -> AsyncIterator[bytes]:
        pieces = aiter(self._reader)
        while True:
            try:
                piece = await anext(pieces)
            except StopAsyncIteration:
                return
            except StoreUnavailable as error:
                self._note(error)
                raise
            yield piece
