"""What a node hands on to its peers, and what it tells those who ask for something else."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import zstandard
from tests.support.artifacts import FLEET, TABLE, SeedNode, run
from tests.support.sites import ENVIRONMENT

from warmseed.seeding.artifact import ArtifactKey, object_key
from warmseed.seeding.channel.messages import PAYLOAD_BYTES, DescribeRequest
from warmseed.seeding.channel.source import Described, Miss, Refused, SourceAnswer, Warming
from warmseed.seeding.environment import Environment
from warmseed.seeding.origins.shelf import Shelf
from warmseed.seeding.trust.manifest import Index, Stored

T = TypeVar("T")


def question(key: ArtifactKey, environment: Environment | None = None) -> DescribeRequest:
    return DescribeRequest.of(key, instance="1" * 64, environment=environment)


def with_shelf(base: Path, main: Callable[[SeedNode, Shelf], Awaitable[None]]) -> None:
    async def whole() -> None:
        node = SeedNode(base / "node", keys=(FLEET,))
        await main(node, Shelf(node.chain))
        await node.chain.aclose()

    run(whole())


async def content(shelf: Shelf, sha256: str, offset: int = 0) -> bytes | None:
    async with shelf.open(sha256, offset) as opened:
        return None if opened is None else b"".join([piece async for piece in opened.chunks])


def test_what_was_published_is_described_with_its_small_payload(tmp_path: Path) -> None:
    async def main(node: SeedNode, shelf: Shelf) -> None:
        published = await node.publish(TABLE)
        shelf.put(node.key, published.envelope, published.manifest)
        answer = await shelf.describe(question(node.key, node.site.environment))
        assert answer == Described(published.envelope.decode(), TABLE)
        assert await content(shelf, published.manifest.sha256) == TABLE
        assert await content(shelf, published.manifest.sha256, 100) == TABLE[100:]
        assert await content(shelf, published.manifest.sha256, len(TABLE)) == b""
        assert await content(shelf, published.manifest.sha256, len(TABLE) + 1) is None

    with_shelf(tmp_path, main)


def test_what_it_was_not_given_it_does_not_serve_though_it_lies_in_its_store(tmp_path: Path) -> None:
    async def main(node: SeedNode, shelf: Shelf) -> None:
        published = await node.publish(TABLE)
        assert await shelf.describe(question(node.key)) == Miss()
        assert await content(shelf, published.manifest.sha256) is None

    with_shelf(tmp_path, main)


def test_what_is_taken_down_is_gone_for_those_who_know_its_digest_too(tmp_path: Path) -> None:
    async def main(node: SeedNode, shelf: Shelf) -> None:
        published = await node.publish(TABLE)
        shelf.put(node.key, published.envelope, published.manifest)
        shelf.take_down(published.manifest.sha256)
        assert await shelf.describe(question(node.key)) == Miss()
        assert await content(shelf, published.manifest.sha256) is None

    with_shelf(tmp_path, main)


def test_a_bundle_is_described_without_its_bytes_and_its_index_can_be_fetched(tmp_path: Path) -> None:
    async def main(node: SeedNode, shelf: Shelf) -> None:
        published = await node.publish(TABLE)
        index = Index(hashlib.sha256(b"index").hexdigest(), 5)
        await node.chain.put(object_key(index.sha256), b"index")
        shelf.put(node.key, published.envelope, msgspec.structs.replace(published.manifest, index=index))
        answer = await shelf.describe(question(node.key))
        assert isinstance(answer, Described)
        assert answer.payload == b""
        assert await content(shelf, index.sha256) == b"index"

    with_shelf(tmp_path, main)


def test_a_compressed_table_is_handed_on_as_it_lies_in_stores(tmp_path: Path) -> None:
    async def main(node: SeedNode, shelf: Shelf) -> None:
        packed = zstandard.compress(TABLE)
        stored = Stored("zstd", hashlib.sha256(packed).hexdigest(), len(packed))
        published = await node.publish(TABLE)
        await node.chain.put(published.manifest.store_key, packed)
        shelf.put(node.key, published.envelope, msgspec.structs.replace(published.manifest, stored=stored))
        answer = await shelf.describe(question(node.key))
        assert isinstance(answer, Described)
        assert answer.payload == packed
        assert await content(shelf, stored.sha256) == packed
        assert await node.chain.get(published.manifest.store_key, limit=1 << 20) == packed  # nothing was "healed"

    with_shelf(tmp_path, main)


def test_a_payload_too_large_to_travel_with_its_description_is_left_to_be_fetched(tmp_path: Path) -> None:
    async def main(node: SeedNode, shelf: Shelf) -> None:
        published = await node.publish(bytes(PAYLOAD_BYTES + 1))
        shelf.put(node.key, published.envelope, published.manifest)
        answer = await shelf.describe(question(node.key))
        assert isinstance(answer, Described)
        assert answer.payload == b""

    with_shelf(tmp_path, main)


def test_peers_wait_for_what_is_being_made_until_it_is_there_or_will_not_come(tmp_path: Path) -> None:
    async def main(node: SeedNode, shelf: Shelf) -> None:
        asked = question(node.key, node.site.environment)
        shelf.warming(node.key, node.site.environment)
        assert isinstance(await shelf.describe(asked), Warming)
        published = await node.publish(TABLE)
        shelf.put(node.key, published.envelope, published.manifest)
        assert isinstance(await shelf.describe(asked), Described)
        shelf.take_down(published.manifest.sha256)
        shelf.warming(node.key, node.site.environment)
        shelf.settled()
        assert await shelf.describe(asked) == Miss()

    with_shelf(tmp_path, main)


def other_answer(node: SeedNode, shelf: Shelf, key: ArtifactKey, environment: Environment) -> Awaitable[SourceAnswer]:
    shelf.warming(node.key, node.site.environment)
    return shelf.describe(question(key, environment))


def test_nobody_waits_for_what_this_rank_will_never_have(tmp_path: Path) -> None:
    async def main(node: SeedNode, shelf: Shelf) -> None:
        newer = Environment({**ENVIRONMENT, "torch": "3.0", "cxx": "clang"})
        key = msgspec.structs.replace(node.key, environment_hash=newer.digest)
        assert await other_answer(node, shelf, key, newer) == Refused("environment", ("cxx", "torch"))
        ours = node.site.environment
        key = msgspec.structs.replace(node.key, config_hash="f" * 64)
        assert await other_answer(node, shelf, key, ours) == Refused("config", ("config_hash",))
        key = msgspec.structs.replace(node.key, world_rank=3)
        assert await other_answer(node, shelf, key, ours) == Refused("rank", ("world_rank",))
        key = msgspec.structs.replace(node.key, kind="another_kind")
        assert await other_answer(node, shelf, key, ours) == Miss()

    with_shelf(tmp_path, main)


def test_an_object_of_another_length_than_stated_is_not_opened(tmp_path: Path) -> None:
    async def main(node: SeedNode, shelf: Shelf) -> None:
        published = await node.publish(TABLE)
        shelf.put(node.key, published.envelope, published.manifest)
        assert node.chain.disk is not None
        await node.chain.disk.put(published.manifest.store_key, TABLE[:-1])
        assert await content(shelf, published.manifest.sha256) is None

    with_shelf(tmp_path, main)


def test_the_key_of_another_rank_of_the_same_kind_is_kept_apart(tmp_path: Path) -> None:
    async def main(node: SeedNode, shelf: Shelf) -> None:
        published = await node.publish(TABLE)
        shelf.put(node.key, published.envelope, published.manifest)
        second = dataclasses.replace(node.site, world_rank=1)
        key = msgspec.structs.replace(node.key, world_rank=second.world_rank)
        shelf.warming(key, second.environment)
        assert isinstance(await shelf.describe(question(node.key)), Described)
        assert isinstance(await shelf.describe(question(key)), Warming)

    with_shelf(tmp_path, main)
