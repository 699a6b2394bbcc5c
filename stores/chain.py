"""Tiers in order, as one store: the disk, then what is shared.

Reads take the first *valid* answer and fill the faster tiers; writes go to the disk and, in the background, to
the shared tiers. Whatever a tier does, the worst effect is a miss.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from warmseed.errors import printable
from warmseed.stores.base import Body, ObjectInfo, ObjectReader, Store, check_key
from warmseed.stores.disk import DiskStore
from warmseed.stores.errors import ObjectInvalid, StoreError, StoreUnavailable
from warmseed.stores.fanout import FanOut
from warmseed.stores.fetch import Fetched, Fetcher
from warmseed.stores.wrappers.base import innermost
from warmseed.stores.wrappers.breaker import breaker_state
from warmseed.stores.wrappers.flight import Flights
from warmseed.stores.wrappers.verifying import Checker, Expected, Sha256Checker, sha256_of

__all__ = ["Answer", "Chain", "Fetched", "Writes"]

_log = logging.getLogger(__name__)
_IN_MEMORY = 8 << 20  # bytes of a body that is kept for the background when the disk did not take it
Writes = Literal["all", "first", "none"]


@dataclass(frozen=True, slots=True)
class Answer:
    """A small object, and who had it."""

    tier: str
    data: bytes


class Chain:
    """The disk (if any) and the shared tiers behind it, in order of speed."""

    def __init__(self, disk: DiskStore | None, tiers: Sequence[Store], *, writes: Writes = "all") -> None:
        self.disk, self.tiers, self.writes = disk, tuple(tiers), writes
        written = {"all": self.tiers, "first": self.tiers[:1], "none": ()}[writes]
        self.fan_out = FanOut(written)
        self._written = written
        self._fetcher = Fetcher(disk, self.tiers, self._fill_faster)
        self._lookups: Flights[Answer | None] = Flights()
        self._told: dict[tuple[str, str], float] = {}  # (tier, kind of failure) -> monotonic time of the last line

    @property
    def name(self) -> str:
        """The chain as it is: ``disk -> mooncake|retry|breaker -> s3|retry|breaker``."""
        return " -> ".join(tier.name for tier in self.all_tiers())

    def states(self) -> dict[str, str]:
        """Each shared tier's breaker: ``closed`` (in use), ``open`` or ``half-open``; tiers without one are closed."""
        return {innermost(tier).name: breaker_state(tier) for tier in self.tiers}

    def __repr__(self) -> str:
        return f"<Chain {self.name} writes={self.writes}>"

    def all_tiers(self) -> tuple[Store, ...]:
        """The disk, if there is one, and every shared tier."""
        return self.tiers if self.disk is None else (self.disk, *self.tiers)

    # Small objects -----------------------------------------------------------------------------

    async def get(
        self, key: str, *, limit: int, accept: Callable[[bytes], bool] | None = None, fresh: bool = False
    ) -> bytes | None:
        """The first answer that `accept` believes (any, without it), or `None`.

        `accept` judges each tier's answer, for documents whose validity only the caller can tell; an answer it
        refuses is a miss of that tier. `fresh` asks the shared tiers before the disk, for documents that change.

        Raises:
            InvalidKey: for a key that no store accepts; nothing else.
        """
        answer = await self.find(key, limit=limit, accept=accept, fresh=fresh)
        return None if answer is None else answer.data

    async def get_verified(self, key: str, *, sha256: str, length: int) -> bytes | None:
        """The object with this digest and length from the first tier that really has it, or `None`."""
        async for answer in self.answers(key, limit=length):
            if len(answer.data) == length and await sha256_of(answer.data) == sha256:
                await self._spread(key, answer)
                return answer.data
            await self._refused(key, answer.tier, f"it is not sha256 {sha256[:16]}…")
        return None

    async def find(
        self, key: str, *, limit: int, accept: Callable[[bytes], bool] | None = None, fresh: bool = False
    ) -> Answer | None:
        """As `get`, with the name of the tier that answered."""
        check_key(key)
        if self.disk is not None and not fresh:
            data = await self._ask(self.disk, key, limit)
            if data is not None:
                if accept is None or accept(data):
                    return Answer(self.disk.name, data)
                await self._refused(key, self.disk.name, "the caller refused it")
        if not self.tiers and not fresh:
            return None
        return await self._lookups.share(
            (key, limit, accept, fresh), lambda: self._look_up(key, limit, accept, fresh=fresh)
        )

    async def _look_up(
        self, key: str, limit: int, accept: Callable[[bytes], bool] | None, *, fresh: bool
    ) -> Answer | None:
        async for answer in self.answers(key, limit=limit, fresh=fresh):
            if accept is not None and not accept(answer.data):
                await self._refused(key, answer.tier, "the caller refused it")
                continue
            await self._spread(key, answer)
            return answer
        return None

    async def answers(self, key: str, *, limit: int, fresh: bool = False) -> AsyncIterator[Answer]:
        """What each tier has, in order; nothing is filled. For callers that compare (the newest of several)."""
        check_key(key)
        order = (*self.tiers, self.disk) if fresh else self.all_tiers()
        for tier in order:
            if tier is not None and (data := await self._ask(tier, key, limit)) is not None:
                yield Answer(tier.name, data)

    # Large objects -----------------------------------------------------------------------------

    async def fetch_verified(self, key: str, *, sha256: str, length: int, into: Path) -> Fetched | None:
        """Write the object with this digest and length to the file `into`, from the first tier that really has it.

        `into` is a staging file: it is replaced, and holds the verified object only if the result is not `None`.

        Raises:
            OSError: when `into` can't be written.
            InvalidKey: for a key that no store accepts.
        """
        expected = Expected(sha256, length)
        return await self.fetch_checked(
            key,
            limit=length,
            into=into,
            check=lambda tier: Sha256Checker(expected, store=tier, key=key),
            identity=sha256,
        )

    async def fetch_checked(
        self, key: str, *, limit: int, into: Path, check: Callable[[str], Checker], identity: str = ""
    ) -> Fetched | None:
        """As `fetch_verified`, for objects that are judged otherwise (compressed ones, by what is inside).

        `check` makes a new judge for each tier, by its name; `identity` says which judges are alike, so that
        concurrent fetches of the same object share one upstream read.
        """
        check_key(key)
        return await self._fetcher.fetch(key, limit=limit, into=into, check=check, identity=identity)

    @asynccontextmanager
    async def open(self, key: str, *, limit: int, offset: int = 0) -> AsyncIterator[ObjectReader | None]:
        """The first answer as a stream, unverified: through the disk where there is one, else as it comes."""
        check_key(key)
        disk = self.disk
        if disk is not None:
            async with self._opened(disk, key, limit, offset) as reader:
                if reader is not None:
                    yield reader
                    return
            filled = await self._fetcher.fill(key, limit=limit)
            if filled.tier is not None:
                async with self._opened(disk, key, limit, offset) as reader:
                    yield reader
                    return
            if not filled.disk_failed:
                yield None
                return
        for tier in self.tiers:
            async with self._opened(tier, key, limit, offset) as reader:
                if reader is not None:
                    yield reader
                    return
        yield None

    @asynccontextmanager
    async def _opened(self, tier: Store, key: str, limit: int, offset: int) -> AsyncIterator[ObjectReader | None]:
        """The tier's stream, or `None` for whatever went wrong before it was open."""
        async with AsyncExitStack() as stack:
            try:
                reader = await stack.enter_async_context(tier.open(key, limit=limit, offset=offset))
            except StoreError as error:
                self._tell(tier, "open", key, error)
                reader = None
            yield reader

    async def stat(self, key: str) -> ObjectInfo | None:
        """The first tier's word on the object, or `None`."""
        check_key(key)
        for tier in self.all_tiers():
            try:
                info = await tier.stat(key)
            except StoreError as error:
                self._tell(tier, "stat", key, error)
                continue
            if info is not None:
                return info
        return None

    # Writing -----------------------------------------------------------------------------------

    async def put(self, key: str, body: Body | bytes) -> None:
        """Store on the disk now and, in the background, in the shared tiers that `writes` names.

        Without a disk the first of those tiers is written now.

        A body that the disk could not take, over 8 MiB, is read in the background from its own source, which must
        stay until `flush`.

        Raises:
            StoreError: when neither the disk (or, without one, the first tier) took it nor another tier will be asked.
            InvalidKey: for a key that no store accepts.
        """
        check_key(key)
        value = Body.of(body) if isinstance(body, bytes) else body
        if self.disk is None and self._written:
            await self._written[0].put(key, value)
            if rest := self._written[1:]:
                self.fan_out.offer(key, await self._lasting(key, value, on_disk=False), only=rest)
            return
        kept = await self._to_disk(key, value)
        if self._written:
            self.fan_out.offer(key, await self._lasting(key, value, on_disk=kept is None))
        elif kept is not None:
            raise kept

    async def push(self, key: str, body: Body | bytes) -> dict[str, StoreError | None]:
        """Store in every tier and wait for each; tier name -> what went wrong, `None` for stored."""
        check_key(key)
        value = Body.of(body) if isinstance(body, bytes) else body
        result: dict[str, StoreError | None] = {}
        for tier in self.all_tiers():
            try:
                await tier.put(key, value)
                result[tier.name] = None
            except StoreError as error:
                result[tier.name] = error
        return result

    async def flush(self, timeout: float) -> bool:
        """Wait until the background has written everything; whether that was within `timeout` seconds."""
        return await self.fan_out.flush(timeout)

    async def aclose(self) -> None:
        """Give up background writes and close every tier."""
        await self.fan_out.aclose()
        await self._lookups.aclose()
        await self._fetcher.aclose()
        for tier in self.all_tiers():
            await tier.aclose()

    # How it is done ----------------------------------------------------------------------------

    async def _ask(self, tier: Store, key: str, limit: int) -> bytes | None:
        try:
            return await tier.get(key, limit=limit)
        except StoreError as error:
            self._tell(tier, "get", key, error)
            return None

    async def _refused(self, key: str, tier: str, why: str) -> None:
        _log.warning("store=%s key=%s outcome=invalid: %s; the next tier is asked", tier, key, why)
        if self.disk is not None and tier == self.disk.name:
            try:
                await self.disk.delete(key)
            except (StoreError, OSError) as error:
                _log.warning("store=%s key=%s could not be removed: %s", tier, key, printable(error))

    async def _to_disk(self, key: str, body: Body) -> StoreError | None:
        if self.disk is None:
            return StoreUnavailable(f"{key}: there is no disk tier, and no shared tier is written to")
        try:
            await self.disk.put(key, body)
        except ObjectInvalid:
            raise  # the caller's own body is wrong: no tier should see it
        except StoreError as error:
            self._tell(self.disk, "put", key, error)
            return error
        return None

    async def _lasting(self, key: str, body: Body, *, on_disk: bool) -> Body:
        if body.size <= _IN_MEMORY:
            return Body.of(await body.read())
        if not on_disk or self.disk is None:
            return body
        return self.disk.body(key, body.size)

    async def _spread(self, key: str, answer: Answer) -> None:
        """Put a tier's good answer where the next reader finds it sooner."""
        if self.disk is None or answer.tier != self.disk.name:
            await self._to_disk(key, Body.of(answer.data))
            self._fill_faster(key, Body.of(answer.data), answer.tier)

    def _fill_faster(self, key: str, body: Body, tier: str) -> None:
        """Queue an object that `tier` had for the shared tiers before it."""
        names = [t.name for t in self.tiers]
        faster = [t for t in self.tiers[: names.index(tier)] if t in self._written] if tier in names else []
        if faster:
            self.fan_out.offer(key, body, only=faster)

    def _tell(self, tier: Store, operation: str, key: str, error: StoreError) -> None:
        """One line a minute for each tier and kind of failure; metrics have the rest."""
        kind, now = type(error).__name__, time.monotonic()
        if now - self._told.get((tier.name, kind), float("-inf")) > 60:
            self._told[tier.name, kind] = now
            _log.warning("store=%s operation=%s key=%s %s: %s", tier.name, operation, key, kind, printable(error))
