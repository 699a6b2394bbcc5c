"""Tables that stock vLLM left in a shared store: taken only where the operator said so, and by every other rule."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.artifacts import PlainKind, run
from tests.support.fleet import Node, artifact_key
from tests.support.sites import make_site
from tests.support.specs import spec
from tests.support.tables import H200, H200_V1, local_path, put_local, table_site, table_text

from warmseed.daemon.rank.fleet_keys import fleet_keys
from warmseed.daemon.rank.seeds import Seeds
from warmseed.seeding.adoption import Adoption
from warmseed.seeding.artifact import NAMESPACE
from warmseed.seeding.channel.messages import DescribeRequest
from warmseed.seeding.channel.source import Described
from warmseed.seeding.kinds.autotune.kind import FlashInferAutotune
from warmseed.seeding.kinds.base import Evidence, Installation, Site
from warmseed.seeding.operator.golden import deny, list_artifacts, pin_generation
from warmseed.seeding.trust.keys import Keyring, PublisherKey
from warmseed.seeding.trust.manifest import Manifest
from warmseed.seeding.trust.token import new_token, read_tokens, write_token

KIND = FlashInferAutotune()


@dataclasses.dataclass
class Fleet:
    """A token, and a folder that stock vLLM writes to as well."""

    base: Path
    store: Path
    token: Path
    key: PublisherKey

    def leave(self, data: bytes, *, rank: int = 0) -> str:
        """What stock vLLM does with a table it has tuned; its digest."""
        site = table_site(self.base / "n")
        path = self.store / NAMESPACE / KIND.name / site.config_hash / f"autotune_configs_dp0_rank{rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return hashlib.sha256(data).hexdigest()

    def site(self, name: str) -> Site:
        site = table_site(self.base / name)
        (self.base / name / "warmseed").mkdir(parents=True, exist_ok=True)
        return dataclasses.replace(site, state=self.base / name / "warmseed")

    @asynccontextmanager
    async def node(self, name: str, *, allow_unsigned: bool = True, **more: Any) -> AsyncIterator[Seeds]:
        settings = {"warmup_cache_stores": [f"file:{self.store}"], "seed_token_file": str(self.token), **more}
        base = self.site(name).state.parent
        what = spec(allow_unsigned=allow_unsigned, **settings)
        async with Seeds.opened(what, base, observer=_nobody, count=lambda _: None) as seeds:
            yield seeds

    def start(self, name: str, *, allow_unsigned: bool = True) -> Adoption:
        """One node's start."""

        async def main() -> Adoption:
            async with self.node(name, allow_unsigned=allow_unsigned) as seeds:
                return await seeds.adopt(KIND, self.site(name))

        return asyncio.run(main())


def _nobody(*, store: str, operation: str, outcome: str, size: int, seconds: float) -> None: ...


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    tmp_path.chmod(0o700)
    token, store = tmp_path / "token", tmp_path / "shared"
    write_token(token, new_token())
    store.mkdir()
    (key,), _ = fleet_keys(read_tokens(file=token, arguments=(), environ={}), tmp_path, signing=None, trusted=())
    return Fleet(tmp_path, store, token, key)


def test_a_table_of_stock_vllm_is_taken_said_loudly_and_not_handed_on(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    fleet.leave(H200_V1)

    async def main() -> None:
        site = fleet.site("n")
        async with fleet.node("n") as seeds:
            with caplog.at_level(logging.WARNING):
                adoption = await seeds.adopt(KIND, site)
            assert adoption.outcome == "installed", adoption.refusals
            assert adoption.complete
            assert adoption.origin.startswith("unsigned, file")
            environment = KIND.environment(site)
            question = DescribeRequest.of(artifact_key(KIND, site), instance="1" * 64, environment=environment)
            assert not isinstance(await seeds.shelf.describe(question), Described)
            assert adoption.installation is not None
            verdict = KIND.judge(adoption.installation, Evidence(seconds=1.0), site)
            await seeds.trials.judged(adoption, site, verdict, 0.0)  # counts like any other

    run(main())
    assert local_path(fleet.site("n")).read_bytes() == H200_V1
    assert "WITHOUT A SIGNATURE" in caplog.text
    assert not list((fleet.site("n").state / "store").rglob("*.json"))  # nor kept for the next start
    assert not list(fleet.site("n").state.glob("staging/*"))


def test_an_installation_that_outlasts_the_budget_is_waited_for_and_known(fleet: Fleet) -> None:
    """Given up half way, it would go on while the daemon rehearses as if there were no table."""
    fleet.leave(H200_V1)
    over = threading.Event()

    class Slow(FlashInferAutotune):
        def install(self, manifest: Manifest, payload: Path, index: bytes | None, site: Site) -> Installation:
            assert over.wait(60)
            return super().install(manifest, payload, index, site)

    async def main() -> None:
        site = fleet.site("n")
        async with fleet.node("n", seed_budget=2.0) as seeds:
            asyncio.get_running_loop().call_later(6.0, over.set)  # both budgets, the signed search's too, are over
            adoption = await seeds.adopt(Slow(), site)
        assert adoption.outcome == "installed", adoption.refusals
        assert local_path(site).read_bytes() == H200_V1

    run(main())


def test_nothing_unsigned_is_taken_unless_the_operator_said_so(fleet: Fleet) -> None:
    fleet.leave(H200_V1)
    assert fleet.start("n", allow_unsigned=False).outcome == "none"
    assert not local_path(fleet.site("n")).exists()


def test_a_signed_table_comes_first(fleet: Fleet) -> None:
    fleet.leave(H200_V1)
    signed = table_text(4, tactic=2)

    async def main() -> None:
        maker = fleet.site("maker")
        put_local(maker, signed)
        async with Node.opened(maker.state, f"file:{fleet.store}", key=fleet.key, trusted=fleet.key) as node:
            await node.publish(KIND, maker)
        fleet.leave(H200_V1)  # stock vLLM tuned later, under the same name

    run(main())
    adoption = fleet.start("n")
    assert adoption.manifest is not None
    assert adoption.envelope
    assert local_path(fleet.site("n")).read_bytes() == signed


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (table_text(1, metadata={**H200, "gpu": "NVIDIA B200"}), "environment"),
        (b"[]", "malformed"),
        (b"", "malformed"),
        (H200_V1[: len(H200_V1) // 2], "malformed"),
        (b"[" * 100_000, "malformed"),
    ],
)
def test_a_table_that_flashinfer_must_not_meet_is_refused_and_nothing_is_written(
    fleet: Fleet, data: bytes, reason: str
) -> None:
    fleet.leave(data)
    adoption = fleet.start("n")
    assert adoption.outcome == "none"
    assert reason in [refusal.reason for refusal in adoption.refusals]
    assert not local_path(fleet.site("n")).exists()


def test_another_ranks_table_is_not_even_looked_at(fleet: Fleet) -> None:
    fleet.leave(H200_V1, rank=1)
    assert fleet.start("n").outcome == "none"


def test_what_the_fleet_denied_is_denied_unsigned_too(fleet: Fleet) -> None:
    digest = fleet.leave(H200_V1)

    async def main() -> None:
        state = fleet.site("operator").state
        async with Node.opened(state, f"file:{fleet.store}", key=fleet.key, trusted=fleet.key) as node:
            about = {"kind": KIND.name, "sha256": digest, "publisher": "op", "now": int(time.time())}
            await deny(node.chain, [fleet.key], **about, reason="it crashed")

    run(main())
    adoption = fleet.start("n")
    assert adoption.outcome == "none"
    assert "denied" in [refusal.reason for refusal in adoption.refusals]


def test_where_the_fleet_has_pinned_a_table_no_unsigned_one_takes_its_place(fleet: Fleet) -> None:
    async def main() -> None:
        maker = fleet.site("maker")
        put_local(maker, table_text(4, tactic=2))
        async with Node.opened(maker.state, f"file:{fleet.store}", key=fleet.key, trusted=fleet.key) as node:
            published = await node.publish(KIND, maker)
            async for found in list_artifacts(node.chain, Keyring([fleet.key.public])):
                await pin_generation(
                    node.chain, [fleet.key], Keyring([fleet.key.public]), found, publisher="op", now=int(time.time())
                )
        (fleet.store / published.manifest.store_key).unlink()  # the store has lost the pinned table
        for path in fleet.store.glob(f"{NAMESPACE}/{KIND.name}/*/*.json"):
            path.unlink()

    run(main())
    fleet.leave(H200_V1)
    adoption = fleet.start("n")
    assert adoption.outcome == "none"
    assert "pinned" in [refusal.reason for refusal in adoption.refusals]


def test_code_is_never_taken_unsigned(fleet: Fleet) -> None:
    async def main() -> None:
        site = make_site(fleet.base / "n")
        kind = PlainKind()
        path = fleet.store / NAMESPACE / kind.name / site.config_hash / "bundle.tar"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"code")
        async with fleet.node("n") as seeds:
            assert (await seeds.adopt(kind, site)).outcome == "none"
        assert kind.installed == []

    run(main())
