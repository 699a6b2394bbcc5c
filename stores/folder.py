"""`file:`: a folder that several hosts share (NFS, Lustre, a bind mount).

Whole files appear by rename, so the last writer of a key wins and no reader sees a mixture. Nothing here trusts
the hosts' clocks or relies on locks, which shared file systems may not have.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from warmseed.blocking import BlockingPool
from warmseed.errors import ConfigurationError
from warmseed.stores.base import Observer, StoreLimits
from warmseed.stores.files import Tree
from warmseed.stores.filestore import FileStore
from warmseed.stores.registry import Backend, NoOptions, StoreContext

__all__ = ["BACKEND", "FolderStore"]

_log = logging.getLogger(__name__)
_PATIENCE = 5.0  # seconds that a look at the folder may take at start-up
_ABANDONED = 3 * 24 * 3600.0  # seconds after which an unfinished write is certainly dead
T = TypeVar("T")


class FolderStore(FileStore):
    """Objects as files below a shared folder, which must exist: a missing one is a mount that did not happen."""

    def __init__(
        self, folder: Path, *, name: str = "file", limits: StoreLimits | None = None, observer: Observer | None = None
    ) -> None:
        tree = Tree(folder, folder / ".staging", private=False)
        pool = BlockingPool(f"warmseed-{name}", 8)
        super().__init__(name, tree, pool, reserve=False, limits=limits, observer=observer)
        self.folder = folder
        self._ready = False

    async def _blocking(self, work: Callable[[], T]) -> T:
        def once_more_if_stale() -> T:
            if not self._ready:
                self._prepare()
            try:
                return work()
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
                return work()  # another host replaced the file between our look-up and our open

        return await self.pool.run(once_more_if_stale)

    def _prepare(self) -> None:
        if not self.folder.is_dir():
            raise FileNotFoundError(errno.ENOENT, "the shared folder is not there; is it mounted?", str(self.folder))
        with contextlib.suppress(OSError):  # a read-only mount serves reads
            self._tree.staging.mkdir(mode=self._tree.folder_mode, exist_ok=True)
            self._tree.sweep(older_than=_ABANDONED)
        self._ready = True


async def _open(context: StoreContext, options: NoOptions) -> FolderStore:
    path = Path(urlsplit(context.url).path)
    if not path.is_absolute():
        raise ConfigurationError(f"store {context.name!r}: {context.url!r} names no absolute path: file:/shared/folder")
    store = FolderStore(path, name=context.name, limits=context.limits, observer=context.observer)
    try:
        async with asyncio.timeout(_PATIENCE):
            there = await store.pool.run(path.is_dir)
    except (TimeoutError, OSError):
        _log.warning("store=%s %s does not answer; every read is a miss until it does", context.name, path)
    else:
        if not there:
            raise ConfigurationError(f"store {context.name!r}: {path} is not a folder; create or mount it")
    return store


BACKEND = Backend(NoOptions, _open)
