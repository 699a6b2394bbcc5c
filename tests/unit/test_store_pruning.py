"""What operators ask of a store fails as everything else does: in time, and as a `StoreError` that names it."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from warmseed.stores.base import PrunableStore, StoreLimits
from warmseed.stores.errors import InvalidKey, StoreRefused, StoreTimeout, StoreUnavailable
from warmseed.stores.folder import FolderStore
from warmseed.testing.fake_store import FakeStore

SHORT = StoreLimits(deadline=0.05, stream_deadline=0.05)


def filled(limits: StoreLimits | None = None) -> FakeStore:
    return FakeStore("shelf", limits=limits, objects={"a/1": b"1", "a/2": b"22", "b/1": b"333"})


async def listed(store: PrunableStore, prefix: str = "") -> list[tuple[str, int]]:
    return [(info.key, info.size) async for info in store.list(prefix)]


def test_a_listing_has_the_keys_below_a_prefix_with_their_sizes() -> None:
    assert asyncio.run(listed(filled(), "a/")) == [("a/1", 1), ("a/2", 2)]


def test_a_broken_connection_ends_a_listing_with_the_stores_name() -> None:
    store = filled()
    store.faults.drop = True
    with pytest.raises(StoreUnavailable, match="shelf: list a/ failed: ConnectionResetError"):
        asyncio.run(listed(store, "a/"))


def test_a_silent_store_ends_a_listing_in_time() -> None:
    store = filled(SHORT)
    store.faults.hang = True
    with pytest.raises(StoreTimeout, match="shelf: list everything took over"):
        asyncio.run(listed(store))
    assert store.waiting == 0


def test_the_caller_s_own_failure_passes_a_listing_unchanged() -> None:
    async def main() -> None:
        async for _ in filled().list():
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        asyncio.run(main())


def test_deleting_says_whether_there_was_an_object() -> None:
    async def main() -> tuple[bool, bool]:
        store = filled()
        return await store.delete("a/1"), await store.delete("a/1")

    assert asyncio.run(main()) == (True, False)


def test_a_failed_deletion_says_that_the_object_may_still_be_there() -> None:
    store = filled()
    store.faults.drop = True
    with pytest.raises(StoreUnavailable, match=r"shelf: delete a/1 failed.*it may still be there"):
        asyncio.run(store.delete("a/1"))


def test_no_key_that_leads_elsewhere_is_deleted() -> None:
    with pytest.raises(InvalidKey):
        asyncio.run(filled().delete("../a"))


def test_a_folder_that_cannot_be_looked_into_fails_the_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who deletes what nothing refers to must not take what it could not see for nothing."""
    store = FolderStore(tmp_path)
    scan: Callable[[Path], object] = os.scandir

    def forbidden(folder: Path) -> object:
        if folder.name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return scan(folder)

    async def main() -> None:
        await store.put("open/1", b"1")
        await store.put("closed/1", b"22")
        monkeypatch.setattr(os, "scandir", forbidden)
        assert await listed(store, "open/") == [("open/1", 1)]
        with pytest.raises(StoreRefused, match="list everything failed: PermissionError"):
            await listed(store)

    asyncio.run(main())


def test_a_folder_that_vanishes_meanwhile_is_left_out(tmp_path: Path) -> None:
    assert asyncio.run(listed(FolderStore(tmp_path), "never/there/")) == []
