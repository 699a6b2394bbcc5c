"""The stores that keep objects as files, and every wrapper and chain over them, keep the contract."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from tests.support.media import folder_medium

from warmseed.stores.base import Store
from warmseed.stores.chain import Chain
from warmseed.stores.contained import Contained
from warmseed.stores.disk import DiskStore
from warmseed.stores.folder import FolderStore
from warmseed.stores.registry import wrap
from warmseed.stores.wrappers import Breaker, NegativeCache, Retry, SingleFlight, Verifying
from warmseed.testing.fake_store import FakeStore
from warmseed.testing.store_contract import Medium, StoreContract

GIB = 1 << 30


def shared(folder: Path) -> FolderStore:
    return FolderStore(folder / "shared")


class TestDisk(StoreContract):
    stream_bytes = 2 * GIB

    def medium(self, folder: Path) -> AbstractAsyncContextManager[Medium]:
        return folder_medium(lambda: DiskStore(folder / "store"), folder / "store/objects")


class TestFolder(StoreContract):
    stream_bytes = 2 * GIB

    def medium(self, folder: Path) -> AbstractAsyncContextManager[Medium]:
        return folder_medium(lambda: shared(folder), folder / "shared")


class TestRetry(StoreContract):
    def medium(self, folder: Path) -> AbstractAsyncContextManager[Medium]:
        return folder_medium(lambda: Retry(shared(folder)), folder / "shared")


class TestBreaker(StoreContract):
    def medium(self, folder: Path) -> AbstractAsyncContextManager[Medium]:
        return folder_medium(lambda: Breaker(shared(folder)), folder / "shared")


class TestNegativeCache(StoreContract):
    def medium(self, folder: Path) -> AbstractAsyncContextManager[Medium]:
        return folder_medium(lambda: NegativeCache(shared(folder)), folder / "shared")


class TestSingleFlight(StoreContract):
    def medium(self, folder: Path) -> AbstractAsyncContextManager[Medium]:
        return folder_medium(lambda: SingleFlight(shared(folder)), folder / "shared")


class TestVerifying(StoreContract):
    def medium(self, folder: Path) -> AbstractAsyncContextManager[Medium]:
        return folder_medium(lambda: Verifying(shared(folder), lambda key: None), folder / "shared")


class TestContained(StoreContract):
    def medium(self, folder: Path) -> AbstractAsyncContextManager[Medium]:
        return folder_medium(lambda: Contained(shared(folder)), folder / "shared")


class TestChainOfDiskAndFolder(StoreContract):
    """Seen from its disk; the shared folder does not even exist."""

    def medium(self, folder: Path) -> AbstractAsyncContextManager[Medium]:
        return folder_medium(
            lambda: Chain(DiskStore(folder / "store"), [wrap(shared(folder))]), folder / "store/objects"
        )


class TestChainSeenFromItsSharedTier(StoreContract):
    """Objects reach the shared tier, and what lies only there is served."""

    def medium(self, folder: Path) -> AbstractAsyncContextManager[Medium]:
        return folder_medium(lambda: Chain(DiskStore(folder / "store"), [wrap(shared(folder))]), folder / "shared")


class TestChainWithoutDisk(StoreContract):
    def medium(self, folder: Path) -> AbstractAsyncContextManager[Medium]:
        return folder_medium(lambda: Chain(None, [shared(folder)]), folder / "shared")


class FakeMedium(Medium):
    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.store = FakeStore(objects=self.objects)

    async def raw_read(self, key: str) -> bytes | None:
        return self.objects.get(key)

    async def raw_write(self, key: str, data: bytes) -> None:
        self.objects[key] = data

    async def reopen(self) -> Store:
        return FakeStore(objects=self.objects)


class TestFakeStore(StoreContract):
    memory_bytes = 320 << 20  # it keeps everything

    @asynccontextmanager
    async def medium(self, folder: Path) -> AsyncIterator[Medium]:
        yield FakeMedium()
