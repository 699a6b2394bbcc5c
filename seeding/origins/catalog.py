"""Finds and appends the signed manifests of an artifact in a store that can't list.

Generations are consecutive integers, each written once. ``head`` names the newest one its writer knew of: a
hint that saves look-ups and is never believed for anything else. From the hint a reader looks ahead in windows
until one is empty, so a lost hint costs look-ups and a lying one costs at most a miss.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from warmseed.seeding.artifact import ArtifactKey
from warmseed.seeding.trust.manifest import MANIFEST_BYTES, Manifest
from warmseed.stores.chain import Chain

__all__ = ["HEAD_BYTES", "Catalog"]

WINDOW = 8  # generations looked up at once; never less: collected stores keep a manifest in every window of this size
MAX_WINDOWS = 64  # windows before the search ends, whatever the store says
MAX_CANDIDATES = 4  # manifests tried for one artifact, newest first
HEAD_BYTES = 20  # digits of a generation


class Catalog:
    """The manifests in one chain of stores."""

    def __init__(self, chain: Chain) -> None:
        self._store = chain

    async def newest(self, key: ArtifactKey, *, known: int = 0) -> int:
        """The newest generation in the store, 0 if there is none.

        `known` is a generation this node has seen, from which the search may start.

        Raises:
            StoreError: when the store can't be asked.
        """
        start = max(known, await self._head(key))
        newest = start if start and await self._store.stat(key.manifest_key(start)) is not None else 0
        for _ in range(MAX_WINDOWS):
            window = range(start + 1, start + 1 + WINDOW)
            found = await asyncio.gather(*(self._store.stat(key.manifest_key(n)) for n in window))
            present = [n for n, info in zip(window, found, strict=True) if info is not None]
            if not present:
                if newest or not start:
                    return newest
                start = 0  # the hint led nowhere: look once from the beginning
                continue
            newest = start = present[-1]
        return newest

    async def envelopes(self, key: ArtifactKey, *, known: int = 0) -> AsyncIterator[bytes]:
        """The envelopes of the newest few generations, newest first; unverified bytes."""
        newest = await self.newest(key, known=known)
        for generation in range(newest, max(0, newest - MAX_CANDIDATES), -1):
            envelope = await self._store.get(key.manifest_key(generation), limit=MANIFEST_BYTES)
            if envelope is not None:
                yield envelope

    async def envelope(self, key: ArtifactKey, generation: int) -> bytes | None:
        """The envelope of one generation, or `None`."""
        return await self._store.get(key.manifest_key(generation), limit=MANIFEST_BYTES)

    async def append(
        self, key: ArtifactKey, sign: Callable[[int], tuple[Manifest, bytes]], *, known: int = 0
    ) -> tuple[Manifest, bytes]:
        """Write the next generation, as `sign` makes it of its number; what was written.

        Two nodes that publish at once may take the same number in a store without compare-and-set; one of the
        two equivalent manifests then stands, and each node keeps its own on its own disk.

        Raises:
            StoreError: when the store did not take it.
        """
        generation = max(await self.newest(key, known=known), known) + 1
        while await self._store.stat(key.manifest_key(generation)) is not None:
            generation += 1  # the search ended early, as after a lost hint; nothing is ever written twice
        manifest, envelope = sign(generation)
        await self._store.put(key.manifest_key(generation), envelope)
        await self._store.put(key.head_key, str(generation).encode())
        return manifest, envelope

    async def _head(self, key: ArtifactKey) -> int:
        """The highest hint of any tier: a node's own disk does not learn what others publish."""
        heads = [answer.data async for answer in self._store.answers(key.head_key, limit=HEAD_BYTES)]
        return max((int(head) for head in heads if head.isdigit() and len(head) < HEAD_BYTES), default=0)
