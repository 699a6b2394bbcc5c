"""Pins and denials take effect at every node's next start; so does the way back."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import time
from pathlib import Path

import pytest
from tests.support.fleet import Node, artifact_key
from tests.support.tables import H200, H200_V1, local_path, put_local, table_site, table_text
from typer.testing import CliRunner

from warmseed.daemon.cli.main import app
from warmseed.daemon.rank.fleet_keys import fleet_keys
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.kinds.autotune.kind import FlashInferAutotune
from warmseed.seeding.kinds.autotune.local import examine_table, heal_table
from warmseed.seeding.operator.golden import allow, deny, list_artifacts, pin_generation, pin_run, roll_back
from warmseed.seeding.rejected import list_rejected
from warmseed.seeding.trust.keys import Keyring, PublisherKey
from warmseed.seeding.trust.probation import Probation
from warmseed.seeding.trust.token import new_token, read_tokens, write_token

KIND = FlashInferAutotune()
KEY = PublisherKey.generate("operator")
TRUSTED = Keyring([KEY.public])


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


async def publish(base: Path, store: Path, data: bytes, *, run: str = "", rank: int = 0) -> str:
    """One node tunes `data` and publishes it; the digest."""
    site = table_site(base, world_rank=rank)
    put_local(site, data)
    async with Node.opened(site.state, f"file:{store}", key=KEY, trusted=KEY) as node:
        return (await node.publish(KIND, site, run=run)).manifest.sha256


async def start(base: Path, store: Path, *, rank: int = 0) -> tuple[str, bytes]:
    """One node's start: how its search ended, and what the engine would read."""
    site = table_site(base, world_rank=rank)
    async with Node.opened(site.state, f"file:{store}", key=KEY, trusted=KEY) as node:
        adoption = await node.adopt(KIND, site)
    path = local_path(site)
    return adoption.outcome, path.read_bytes() if path.exists() else b""


async def pin(base: Path, store: Path, generation: int) -> None:
    async with Node.opened(base / "operator", f"file:{store}", key=KEY, trusted=KEY) as node:
        async for found in list_artifacts(node.chain, TRUSTED):
            if found.manifest.generation == generation:
                await pin_generation(node.chain, [KEY], TRUSTED, found, publisher="op", now=int(time.time()))


def test_a_pin_moves_new_and_running_nodes_to_one_generation_and_back(tmp_path: Path, store: Path) -> None:
    first, second = table_text(4, tactic=1), table_text(4, tactic=2)

    async def main() -> None:
        await publish(tmp_path / "a", store, first)
        await publish(tmp_path / "b", store, second)
        assert await start(tmp_path / "n1", store) == ("installed", second)
        await pin(tmp_path, store, 1)
        assert await start(tmp_path / "n2", store) == ("installed", first)  # a new node
        assert await start(tmp_path / "n1", store) == ("installed", first)  # and one that had the newer
        assert await start(tmp_path / "n1", store) == ("present", first)
        await pin(tmp_path, store, 2)
        assert await start(tmp_path / "n1", store) == ("installed", second)
        async with Node.opened(tmp_path / "operator", f"file:{store}", key=KEY, trusted=KEY) as node:
            key = artifact_key(KIND, table_site(tmp_path))
            back = await roll_back(node.chain, [KEY], TRUSTED, key, publisher="op", now=int(time.time()))
            assert (back.generation, back.before) == (1, 2)
        assert await start(tmp_path / "n1", store) == ("installed", first)
        assert await start(tmp_path / "n3", store) == ("installed", first)

    asyncio.run(main())


def test_going_back_from_the_first_pin_leaves_nothing_pinned(tmp_path: Path, store: Path) -> None:
    async def main() -> None:
        await publish(tmp_path / "a", store, table_text(4, tactic=1))
        await publish(tmp_path / "b", store, table_text(4, tactic=2))
        await pin(tmp_path, store, 1)
        async with Node.opened(tmp_path / "operator", f"file:{store}", key=KEY, trusted=KEY) as node:
            key = artifact_key(KIND, table_site(tmp_path))
            back = await roll_back(node.chain, [KEY], TRUSTED, key, publisher="op", now=int(time.time()))
            assert back.generation == 0
        assert await start(tmp_path / "n1", store) == ("installed", table_text(4, tactic=2))

    asyncio.run(main())


def test_there_is_no_way_back_from_no_pin(tmp_path: Path, store: Path) -> None:
    async def main() -> None:
        await publish(tmp_path / "a", store, table_text(4))
        async with Node.opened(tmp_path / "operator", f"file:{store}", key=KEY, trusted=KEY) as node:
            with pytest.raises(ArtifactRefused, match="nothing is pinned"):
                await roll_back(
                    node.chain, [KEY], TRUSTED, artifact_key(KIND, table_site(tmp_path)), publisher="op", now=1
                )

    asyncio.run(main())


def test_a_pin_that_nobody_trusted_has_signed_changes_nothing(tmp_path: Path, store: Path) -> None:
    stranger = PublisherKey.generate("operator")

    async def main() -> None:
        await publish(tmp_path / "a", store, table_text(4, tactic=1))
        await publish(tmp_path / "b", store, table_text(4, tactic=2))
        async with Node.opened(tmp_path / "operator", f"file:{store}", key=KEY, trusted=KEY) as node:
            async for found in list_artifacts(node.chain, TRUSTED):
                if found.manifest.generation == 1:
                    await pin_generation(node.chain, [stranger], TRUSTED, found, publisher="x", now=int(time.time()))
        assert await start(tmp_path / "n1", store) == ("installed", table_text(4, tactic=2))

    asyncio.run(main())


def test_a_denied_table_is_set_aside_where_it_lies_and_installed_nowhere(tmp_path: Path, store: Path) -> None:
    bad, good = table_text(4, tactic=1), table_text(4, tactic=2)

    async def main() -> str:
        await publish(tmp_path / "a", store, good)
        digest = await publish(tmp_path / "b", store, bad)
        assert await start(tmp_path / "n1", store) == ("installed", bad)
        async with Node.opened(tmp_path / "operator", f"file:{store}", key=KEY, trusted=KEY) as node:
            await deny(
                node.chain,
                [KEY],
                kind=KIND.name,
                sha256=digest,
                reason="it crashed",
                publisher="op",
                now=int(time.time()),
            )
        assert await start(tmp_path / "n1", store) == ("installed", good)
        assert await start(tmp_path / "n2", store) == ("installed", good)
        assert await start(tmp_path / "b", store) == ("installed", good)  # also where it was tuned
        async with Node.opened(tmp_path / "operator", f"file:{store}", key=KEY, trusted=KEY) as node:
            stranger = PublisherKey.generate("stranger")
            about = {"kind": KIND.name, "sha256": digest, "publisher": "op", "now": int(time.time())}
            await allow(node.chain, [KEY], **about)
            assert await start(tmp_path / "n3", store) == ("installed", bad)  # the newest is good enough again
            await deny(node.chain, [stranger], **about, reason="sabotage")
            assert await start(tmp_path / "n4", store) == ("installed", bad)
        return digest

    digest = asyncio.run(main())
    (rejected,) = list_rejected(tmp_path / "n1" / "state")
    assert digest[:12] in rejected.detail
    assert "it crashed" in rejected.detail


def test_a_run_is_pinned_on_every_rank_that_took_part(tmp_path: Path, store: Path) -> None:
    async def main() -> None:
        for rank in range(3):
            await publish(tmp_path / f"a{rank}", store, table_text(4, tactic=1), run="run-1", rank=rank)
            await publish(tmp_path / f"b{rank}", store, table_text(4, tactic=2), run="run-2", rank=rank)
        async with Node.opened(tmp_path / "operator", f"file:{store}", key=KEY, trusted=KEY) as node:
            done = await pin_run(
                node.chain, [KEY], TRUSTED, "run-1", kind=KIND.name, publisher="op", now=int(time.time())
            )
            assert sorted(item.key.world_rank for item in done) == [0, 1, 2]
            with pytest.raises(ArtifactRefused, match="run-9"):
                await pin_run(node.chain, [KEY], TRUSTED, "run-9", kind=KIND.name, publisher="op", now=1)
        for rank in range(3):
            outcome, data = await start(tmp_path / f"n{rank}", store, rank=rank)
            assert (outcome, data) == ("installed", table_text(4, tactic=1))

    asyncio.run(main())


def test_a_run_is_pinned_at_its_newest_generation_whichever_tier_lists_it(tmp_path: Path, store: Path) -> None:
    async def main() -> None:
        await publish(tmp_path / "a", store, table_text(4, tactic=1), run="r")
        await publish(tmp_path / "a", store, table_text(4, tactic=2), run="r")
        site = table_site(tmp_path / "a")
        (store / artifact_key(KIND, site).manifest_key(2)).unlink()  # which this node's own disk still has
        (site.state / "store" / "objects" / artifact_key(KIND, site).manifest_key(1)).unlink()  # which the store has
        async with Node.opened(site.state, f"file:{store}", key=KEY, trusted=KEY) as node:
            (pinned,) = await pin_run(
                node.chain, [KEY], TRUSTED, "r", kind=KIND.name, publisher="op", now=int(time.time())
            )
        assert pinned.generation == 2

    asyncio.run(main())


# The commands ---------------------------------------------------------------------------------------------


def invoke(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def test_ls_pin_and_explain_work_on_what_a_node_published(tmp_path: Path, store: Path) -> None:
    token_file, root = tmp_path / "token", tmp_path / "root"
    write_token(token_file, new_token())
    tokens = read_tokens(file=token_file, arguments=(), environ={})
    (key,), _ = fleet_keys(tokens, root, signing=None, trusted=())

    async def publish_as(base: Path, data: bytes, config: str, factors: dict[str, str]) -> None:
        site = table_site(base, config_hash=config)
        site = dataclasses.replace(site, config_factors=factors)
        put_local(site, data)
        async with Node.opened(site.state, f"file:{store}", key=key, trusted=key) as node:
            await node.publish(KIND, site, run="run-1")

    async def main() -> None:
        await publish_as(tmp_path / "a", H200_V1, "a" * 64, {"model": "m", "max_num_seqs": "256"})
        await publish_as(tmp_path / "b", H200_V1, "b" * 64, {"model": "m", "max_num_seqs": "512"})

    asyncio.run(main())
    options = ["--cache-root", str(root), "--warmup-cache-stores", f"file:{store}"]
    options += ["--seed-token-file", str(token_file)]
    listed = json.loads(invoke("ls", *options, "--json"))["artifacts"]
    assert sorted(item["config_hash"][0] for item in listed) == ["a", "b"]
    assert all(item["provenance"]["operations"] == "bf16_gemm 3, fp8_gemm 3" for item in listed)
    assert "dp0_rank0" in invoke("ls", *options)

    said = json.loads(invoke("explain", "a" * 64, "b" * 64, *options, "--json", code=1))
    assert said["configuration"] == [{"field": "max_num_seqs", "theirs": "256", "ours": "512"}]
    assert said["environment"] == []
    assert "max_num_seqs: theirs '256', ours '512'" in invoke("explain", "a" * 64, "b" * 64, *options, code=1)

    pinned = json.loads(invoke("pin", "--run", "run-1", *options, "--json"))["pinned"]
    assert [item["generation"] for item in pinned] == [1, 1]
    back = json.loads(invoke("pin", "--rollback", "--config", "a" * 12, *options, "--json"))["pinned"]
    assert [(item["config_hash"][0], item["generation"], item["before"]) for item in back] == [("a", 0, 1)]
    assert "denied" in invoke("pin", "--deny", "0" * 64, *options)

    trials = Probation(root / "warmseed")
    trials.begin(KIND.name, "0" * 64, 1, "dp0_rank0")
    trials.fail("0" * 64, "dp0_rank0", "an engine died on it")
    assert "allowed" in invoke("pin", "--allow", "0" * 64, *options)
    assert trials.standing("0" * 64) == "unknown"
    invoke("pin", "--allow", "zero", *options, code=1)


def test_contradictory_requests_are_refused_before_anything_is_opened() -> None:
    for arguments in (["pin"], ["pin", "--rollback"], ["pin", "--allow", "x", "--deny", "0" * 64]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code != 0
        assert "say exactly one" in str(result.exception) or "need --config" in str(result.exception)


def test_explain_compares_a_table_with_a_table_field_by_field(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs.json", tmp_path / "ours.json"
    theirs.write_bytes(H200_V1)
    ours.write_bytes(table_text(1, metadata={**H200, "gpu": "NVIDIA B200", "cudnn_version": "unknown"}))
    said = invoke("explain", str(theirs), str(ours), "--cache-root", str(tmp_path / "root"), code=1)
    assert "environment  gpu: theirs 'NVIDIA H200', ours 'NVIDIA B200'" in said
    assert re.search("cudnn_version: one side does not know", said)
    assert "nothing differs" in invoke("explain", str(theirs), str(theirs), "--cache-root", str(tmp_path / "root"))


def test_ls_shows_what_was_moved_aside_and_why(tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert "nothing was moved aside" in invoke("ls", "--rejected", "--cache-root", str(root))
    site = table_site(tmp_path)
    put_local(site, b"[]")
    heal_table(examine_table(local_path(site), H200), KIND.environment(site), root / "warmseed")
    (item,) = json.loads(invoke("ls", "--rejected", "--cache-root", str(root), "--json"))["rejected"]
    assert item["original"] == str(local_path(site))
    assert item["reason"] == "malformed"


def test_a_start_moves_a_poisonous_file_aside_whether_or_not_anything_is_published(tmp_path: Path, store: Path) -> None:
    site = table_site(tmp_path / "n1")
    put_local(site, b"[]")
    assert asyncio.run(start(tmp_path / "n1", store)) == ("none", b"")
    assert [item.reason for item in list_rejected(site.state)] == ["malformed"]
