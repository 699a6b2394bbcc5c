"""Brings what a manifest describes into staging: put together from earlier bundles, from a store, or from a peer."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from warmseed.blocking import run_blocking
from warmseed.errors import printable
from warmseed.seeding.artifact import object_key
from warmseed.seeding.bundle.index import INDEX_BYTES, read_index
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.origins.deltas import part_path
from warmseed.seeding.origins.origins import Origin, StoreOrigin
from warmseed.seeding.origins.payload import prepare_staging, remove_staged
from warmseed.seeding.trust.manifest import Manifest
from warmseed.stores.errors import StoreError

__all__ = ["Fetcher"]

_log = logging.getLogger(__name__)


class Fetcher:
    """Asks the stores, and then the origin that described an artifact, for its bytes."""

    def __init__(self, stores: Sequence[StoreOrigin], *, state: Path) -> None:
        """`state` is warmseed's own folder; what is fetched is staged in it."""
        self._stores = stores
        self._state = state
        self._staging = state / "staging"

    async def index(self, manifest: Manifest, origin: Origin) -> bytes | None:
        """The file index of an artifact that has one.

        Raises:
            ArtifactRefused: when it is not to be had, or is not the promised one.
            ChannelError: when the peers that are asked last fail.
            OSError: when the disk fails.
        """
        await run_blocking(prepare_staging, self._staging)
        files: list[Path] = []
        try:
            return await self._index(origin, manifest, files)
        finally:
            await run_blocking(remove_staged, files)

    @asynccontextmanager
    async def fetched(self, manifest: Manifest, origin: Origin) -> AsyncIterator[tuple[Path, bytes | None]]:
        """The payload as it lies in stores, and its index; the files are gone again afterwards.

        Raises:
            ArtifactRefused: when the bytes are not to be had, or are not the promised ones.
            ChannelError: when the peers that are asked last fail.
            OSError: when the disk fails.
        """
        await run_blocking(prepare_staging, self._staging)
        files: list[Path] = []
        try:
            index = await self._index(origin, manifest, files)
            payload = await self._payload(origin, manifest, index, files)
            yield payload, index
        finally:
            await run_blocking(remove_staged, files)

    async def _index(self, origin: Origin, manifest: Manifest, files: list[Path]) -> bytes | None:
        stated = manifest.index
        if stated is None:
            return None
        if stated.length > INDEX_BYTES:
            raise ArtifactRefused("length", f"an index of {stated.length} bytes; {INDEX_BYTES} are read at most")
        path = await self._object(origin, object_key(stated.sha256), stated.sha256, stated.length, files)
        return await run_blocking(path.read_bytes)

    async def _payload(self, origin: Origin, manifest: Manifest, index: bytes | None, files: list[Path]) -> Path:
        """The stored object: put together from what this node has of earlier bundles, or fetched whole."""
        if index is not None and (bound := manifest.index) is not None and (stored := manifest.stored) is not None:
            contents = await run_blocking(read_index, index, bound)
            for store in self._stores:
                path = await store.delta(contents, stored, also=origin, state=self._state, folder=self._staging)
                if path is not None:
                    files.append(path)
                    return path
        form = manifest.stored or manifest
        return await self._object(origin, manifest.store_key, form.sha256, form.length, files)

    async def _object(self, origin: Origin, store_key: str, sha256: str, length: int, files: list[Path]) -> Path:
        # Stores are built for many readers, a peer is busy with its own engines: it is asked last.
        for place in dict.fromkeys([*self._stores, origin]):
            try:
                path = await place.object(store_key, sha256=sha256, length=length, folder=self._staging)
            except StoreError as error:
                _log.info("origin=%s object=%s unavailable: %s", place.name, store_key, printable(error))
                continue
            if path is not None:
                files += [path, part_path(self._staging, sha256)]  # the beginning of a delta that is needed no more
                return path
        raise ArtifactRefused("missing", f"{store_key} is described but nowhere to be had")
