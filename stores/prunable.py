"""Listing and deleting, which operators need, held to the store contract like everything else a back end does."""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator

from warmseed.stores.base import BaseStore, ObjectInfo, check_key
from warmseed.stores.guards import wrapped

__all__ = ["BasePrunableStore"]


class BasePrunableStore(BaseStore):
    """A `PrunableStore`: a back end writes `_list` and `_delete` as well."""

    @abstractmethod
    def _list(self, prefix: str) -> AsyncGenerator[ObjectInfo, None]:
        """Every object whose key starts with `prefix`. May raise `OSError` or any library's exception."""

    @abstractmethod
    async def _delete(self, key: str) -> bool:
        """Remove the object; whether there was one."""

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """Every object whose key starts with `prefix`.

        Raises:
            StoreError: when the back end fails, or the whole listing takes longer than a stream may.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + self.limits.stream_deadline
        async with contextlib.aclosing(self._list(prefix)) as found:
            while True:
                left = max(0.0, until - loop.time())
                async with wrapped(self.name, "list", prefix or "everything", left, then="the listing ends here"):
                    try:
                        info = await anext(found)
                    except StopAsyncIteration:
                        return
                yield info

    async def delete(self, key: str) -> bool:
        """Remove the object; whether there was one.

        Raises:
            StoreError: when the back end fails; the object may still be there.
            InvalidKey: for a key that no store accepts.
        """
        check_key(key)
        async with wrapped(self.name, "delete", key, self.limits.deadline, then="it may still be there"):
            return await self._delete(key)
