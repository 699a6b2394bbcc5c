"""Writing to an HTTP folder: one streamed PUT, because HTTP has no upload in parts."""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp
from obstore.store import HTTPStore

from warmseed.stores.base import Body, Observer, StoreLimits
from warmseed.stores.errors import StoreFull, StoreRefused, StoreUnavailable
from warmseed.stores.object import ObjectStoreTier

__all__ = ["HttpTier"]

_STORED = frozenset({200, 201, 204})
_READ_ONLY = frozenset({401, 403, 404, 405, 501})
_FULL = frozenset({413, 507})


class HttpTier(ObjectStoreTier):
    """Objects below an HTTP URL; read-only unless the server takes PUT."""

    def __init__(
        self,
        store: HTTPStore,
        *,
        url: str,
        headers: Mapping[str, str],
        name: str,
        limits: StoreLimits | None = None,
        observer: Observer | None = None,
    ) -> None:
        super().__init__(store, name=name, limits=limits, observer=observer)
        self._url, self._headers = url, dict(headers)
        self._session: aiohttp.ClientSession | None = None

    async def _write(self, key: str, body: Body) -> None:
        if self._session is None:
            # No limits of its own: the whole operation runs under the store's deadline.
            self._session = aiohttp.ClientSession(headers=self._headers, timeout=aiohttp.ClientTimeout(total=None))
        headers = {"Content-Length": str(body.size)}
        async with self._session.put(
            f"{self._url}/{key}", data=body.chunks(), headers=headers, allow_redirects=False
        ) as answer:
            status = answer.status
        if status in _STORED:
            return
        if status in _FULL:
            raise StoreFull(f"{self.name}: the server has no room for {key} ({status}); nothing was kept")
        if status in _READ_ONLY:
            raise StoreRefused(f"{self.name}: the server takes no PUT of {key} ({status}); it is read from only")
        raise StoreUnavailable(f"{self.name}: writing {key}: the server answered {status}; nothing was kept")

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None
