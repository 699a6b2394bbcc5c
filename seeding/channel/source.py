"""What a listener asks of the side that knows the artifacts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from warmseed.seeding.channel.messages import DescribeRequest

__all__ = ["Described", "Miss", "Opened", "Refused", "SeedSource", "SourceAnswer", "Warming"]


@dataclass(frozen=True, slots=True)
class Described:
    """The artifact exists: its signed manifest, and its bytes where they are small."""

    manifest: str  # the envelope as text, at most 64 KiB
    payload: bytes = b""  # at most 8 MiB; empty: the peer fetches by digest


@dataclass(frozen=True, slots=True)
class Miss:
    """Neither there nor on its way."""


@dataclass(frozen=True, slots=True)
class Warming:
    """Being made by this very daemon."""

    retry_after: float  # seconds until it is worth asking again, at most 3600


@dataclass(frozen=True, slots=True)
class Refused:
    """There, but not for this peer."""

    reason: str  # a short word of [a-z_], for instance ``environment``
    fields: tuple[str, ...] = ()  # names of what differs, at most 64


SourceAnswer = Described | Miss | Warming | Refused


@dataclass(frozen=True, slots=True)
class Opened:
    """An object ready to be streamed."""

    length: int  # bytes from the asked offset to the end
    chunks: AsyncIterator[bytes]  # those bytes, in pieces of at most a few MiB


class SeedSource(Protocol):
    """Answers peers. Only ever with what this node has verified itself.

    Both methods may raise any `WarmseedError`: the peer is told that the source can't answer now, the
    message stays in our own log. They are given a deadline and cancelled past it.
    """

    async def describe(self, request: DescribeRequest) -> SourceAnswer:
        """What this node has for exactly that kind, configuration, environment and ranks."""
        ...

    def open(self, sha256: str, offset: int) -> AbstractAsyncContextManager[Opened | None]:
        """The bytes of the object with that digest from `offset` on; `None` when it is not here.

        An offset past the end is also `None`.
        """
        ...
