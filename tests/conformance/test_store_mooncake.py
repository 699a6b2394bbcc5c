"""The Mooncake store keeps the contract against a real master and a real storage node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.support.services import Mooncake, RawMooncake, mooncake

from warmseed.stores.base import Store
from warmseed.stores.mooncake.config import read_config
from warmseed.stores.mooncake.store import MooncakeStore
from warmseed.testing.store_contract import Medium, StoreContract

MIB = 1 << 20


class MooncakeMedium(Medium):
    def __init__(self, cluster: Mooncake, raw: RawMooncake) -> None:
        self._config = read_config(cluster.config(), {})
        self._raw = raw
        self.store = MooncakeStore(self._config)

    async def raw_read(self, key: str) -> bytes | None:
        return await asyncio.to_thread(self._raw.get, key)

    async def raw_write(self, key: str, data: bytes) -> None:
        assert await asyncio.to_thread(self._raw.ask, "put", key, data.hex()) == 0

    async def reopen(self) -> Store:
        return MooncakeStore(self._config)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Mooncake, RawMooncake]]:
    with mooncake(tmp_path_factory.mktemp("mooncake")) as running:
        raw = RawMooncake(running)
        try:
            yield running, raw
        finally:
            raw.close()


class TestMooncake(StoreContract):
    stream_bytes = 320 * MIB
    memory_bytes = 320 * MIB  # four shared regions of a part each, at most

    @pytest.fixture(autouse=True)
    def _cluster(self, cluster: tuple[Mooncake, RawMooncake]) -> Iterator[None]:
        self.cluster, self.raw = cluster
        yield
        self.cluster.clear()

    @asynccontextmanager
    async def medium(self, folder: Path) -> AsyncIterator[Medium]:
        medium = await asyncio.to_thread(MooncakeMedium, self.cluster, self.raw)
        try:
            yield medium
        finally:
            await medium.store.aclose()
