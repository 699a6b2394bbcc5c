"""The Redis, S3 and HTTP stores keep the contract against real servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import boto3
import pytest
import redis
from tests.support.media import FolderMedium
from tests.support.services import http_server

from warmseed.stores.base import Store
from warmseed.stores.registry import open_store
from warmseed.stores.wrappers import Retry
from warmseed.testing.store_contract import Medium, StoreContract

GIB, MIB = 1 << 30, 1 << 20
NO_ENVIRONMENT: dict[str, str] = {}


class RedisMedium(Medium):
    def __init__(self, port: int) -> None:
        self.url = f"redis://127.0.0.1:{port}/0"
        self.raw = redis.Redis(port=port)

    async def raw_read(self, key: str) -> bytes | None:
        return await asyncio.to_thread(self._read, key)

    def _read(self, key: str) -> bytes | None:
        fields = {k.decode(): v for k, v in self.raw.hgetall(key).items()}
        if "data" in fields or not fields:
            return fields.get("data")
        names = [f"{key}@{fields['generation'].decode()}:{i}" for i in range(-(-int(fields["size"]) // (4 << 20)))]
        return b"".join(self.raw.get(name) for name in names)

    async def raw_write(self, key: str, data: bytes) -> None:
        await asyncio.to_thread(self.raw.hset, key, mapping={"data": data, "size": len(data)})

    async def reopen(self) -> Store:
        return await open_store(self.url, environment=NO_ENVIRONMENT)


class S3Medium(Medium):
    def __init__(self, endpoint: str, bucket: str) -> None:
        self.url = f"s3://{bucket}/prefix?endpoint={endpoint}&region=us-east-1"
        self.bucket = bucket
        self.raw = boto3.client(
            "s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x"
        )

    async def raw_read(self, key: str) -> bytes | None:
        return await asyncio.to_thread(self._read, key)

    def _read(self, key: str) -> bytes | None:
        try:
            return bytes(self.raw.get_object(Bucket=self.bucket, Key=f"prefix/{key}")["Body"].read())
        except self.raw.exceptions.NoSuchKey:
            return None

    async def raw_write(self, key: str, data: bytes) -> None:
        await asyncio.to_thread(self.raw.put_object, Bucket=self.bucket, Key=f"prefix/{key}", Body=data)

    async def reopen(self) -> Store:
        # moto answers 500 to concurrent writers of one key; that is what the retries are for.
        return Retry(await open_store(self.url, environment=NO_ENVIRONMENT))


class TestRedis(StoreContract):
    stream_bytes = 256 * MIB

    @pytest.fixture(autouse=True)
    def _server(self, redis_port: int) -> None:
        self.port = redis_port

    @asynccontextmanager
    async def medium(self, folder: Path) -> AsyncIterator[Medium]:
        medium = await asyncio.to_thread(RedisMedium, self.port)
        await asyncio.to_thread(medium.raw.flushall)
        medium.store = await medium.reopen()
        try:
            yield medium
        finally:
            await medium.store.aclose()
            await asyncio.to_thread(medium.raw.close)

    def test_the_age_of_an_object_is_the_servers(self, tmp_path: Path) -> None:
        """Hosts' clocks may differ; garbage is collected by age."""

        async def main() -> None:
            async with self.medium(tmp_path) as medium:
                before = await asyncio.to_thread(medium.raw.time)
                await medium.store.put("a/small", b"x")
                await medium.store.put("a/large", bytes(5 * MIB))
                after = await asyncio.to_thread(medium.raw.time)
                for key in ("a/small", "a/large"):
                    info = await medium.store.stat(key)
                    assert info is not None
                    assert info.modified is not None
                    assert before[0] <= info.modified <= after[0]
                await medium.raw_write("a/older", b"written by a release that recorded no age")
                info = await medium.store.stat("a/older")
                assert info is not None
                assert info.modified is None

        asyncio.run(main())


class TestS3(StoreContract):
    @pytest.fixture(autouse=True)
    def _server(
        self, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
    ) -> Iterator[None]:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
        self.endpoint = s3_endpoint
        self.bucket = f"bucket-{abs(hash(request.node.nodeid)):x}"
        raw = S3Medium(self.endpoint, self.bucket).raw
        raw.create_bucket(Bucket=self.bucket)
        yield
        for page in raw.get_paginator("list_objects_v2").paginate(Bucket=self.bucket):
            for item in page.get("Contents", []):
                raw.delete_object(Bucket=self.bucket, Key=item["Key"])
        raw.close()

    @asynccontextmanager
    async def medium(self, folder: Path) -> AsyncIterator[Medium]:
        medium = await asyncio.to_thread(S3Medium, self.endpoint, self.bucket)
        medium.store = await medium.reopen()
        try:
            yield medium
        finally:
            await medium.store.aclose()
            await asyncio.to_thread(medium.raw.close)


class TestHttp(StoreContract):
    stream_bytes = 2 * GIB

    @asynccontextmanager
    async def medium(self, folder: Path) -> AsyncIterator[Medium]:
        served = folder / "served"
        await asyncio.to_thread(served.mkdir, exist_ok=True)
        server = http_server(served)
        url = await asyncio.to_thread(server.__enter__)
        try:
            medium = await HttpMedium.make(url, served)
            try:
                yield medium
            finally:
                await medium.store.aclose()
        finally:
            await asyncio.to_thread(server.__exit__, None, None, None)


class HttpMedium(FolderMedium):
    def __init__(self, url: str, store: Store, objects: Path) -> None:
        super().__init__(lambda: store, objects)
        self.url = url

    @classmethod
    async def make(cls, url: str, objects: Path) -> HttpMedium:
        return cls(url, await open_store(url, environment=NO_ENVIRONMENT), objects)

    async def reopen(self) -> Store:
        return await open_store(self.url, environment=NO_ENVIRONMENT)
