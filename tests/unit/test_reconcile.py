"""Before a start: what was denied, quarantined or never survived is taken back, and everything else is left alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.support.sites import fill, make_manifest, make_site, tree

from warmseed.seeding.kinds.base import Installation, Site
from warmseed.seeding.kinds.compiled.bundle import CompileCacheKind
from warmseed.seeding.kinds.compiled.capture import Quiet
from warmseed.seeding.kinds.compiled.inductor import InductorCache
from warmseed.seeding.trust.judge import Policy, Trust
from warmseed.seeding.trust.keys import Keyring, PublisherKey
from warmseed.seeding.trust.probation import Probation
from warmseed.seeding.trust.reconcile import TakenBack, reconcile
from warmseed.seeding.trust.statements import sign_denial

KEY = PublisherKey("fleet", b"f" * 32)
KIND = CompileCacheKind([InductorCache()], quiet=Quiet(settle=0.0))
NOW = 1_800_000_000
RANK = "dp0_rank0"
OLD, NEW = {"ab/k.so": b"old"}, {"ab/k.so": b"new", "ab/l.so": b"more"}


def install(base: Path, site: Site, files: dict[str, bytes], generation: int) -> Installation:
    source = make_site(base / f"source{generation}", caches=("inductor",))
    fill(source.roots["inductor"], files)
    capture = KIND.capture(source)
    assert capture is not None
    return KIND.install(make_manifest(capture, source, generation=generation), capture.payload, capture.index, site)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A rank with an older and a newer generation installed."""
    site = make_site(tmp_path / "node", caches=("inductor",))
    install(tmp_path, site, OLD, 1)
    install(tmp_path, site, NEW, 2)
    return site


def run(site: Site, *, policy: Policy | None = None, trust: Trust | None = None) -> TakenBack | None:
    judge = trust or Trust(Keyring([KEY.public]), policy)
    probation = Probation(site.state, clock=lambda: NOW)
    return reconcile(KIND, site, trust=judge, probation=probation, rank=RANK, now=NOW)


def current(site: Site) -> str:
    found = KIND.current(site)
    assert found is not None
    return found.sha256


def test_a_generation_that_nothing_speaks_against_stays(site: Site) -> None:
    probation = Probation(site.state, clock=lambda: NOW)
    probation.begin(KIND.name, current(site), 2, RANK)
    probation.prove(current(site), RANK)
    assert run(site) is None
    assert tree(site.roots["inductor"]) == NEW


def test_a_denied_payload_that_is_already_installed_is_quarantined(site: Site) -> None:
    found = run(site, policy=Policy(denied_digests=frozenset({current(site)})))
    assert found is not None
    assert "configuration" in found.reason
    assert tree(site.roots["inductor"]) == OLD
    assert len(list((site.state / "compiled" / "quarantine").iterdir())) == 1


def test_a_payload_that_the_fleet_denied_is_quarantined(site: Site, tmp_path: Path) -> None:
    probation = Probation(tmp_path / "elsewhere", clock=lambda: NOW)
    probation.begin(KIND.name, current(site), 2, RANK)
    trial = probation.fail(current(site), RANK, "SIGSEGV")
    assert trial is not None
    trust = Trust(Keyring([KEY.public]))
    trust.deny(sign_denial(probation.denial(trial, publisher="node7"), [KEY]), now=NOW)
    found = run(site, trust=trust)
    assert found is not None
    assert "node7" in found.reason
    assert found.trial is None


def test_a_generation_whose_first_start_never_ended_is_taken_back_and_told_to_the_fleet(site: Site) -> None:
    digest = current(site)
    probation = Probation(site.state, clock=lambda: NOW)
    probation.begin(KIND.name, digest, 2, RANK)
    probation.meet(digest, RANK)
    found = run(site)
    assert found is not None
    assert found.trial is not None
    assert found.trial.sha256 == digest
    assert tree(site.roots["inductor"]) == OLD
    assert Probation(site.state).standing(digest) == "quarantined"
    assert run(site) is None  # the older one is not on trial


def test_a_rank_with_nothing_installed_has_nothing_to_take_back(tmp_path: Path) -> None:
    assert run(make_site(tmp_path, caches=("inductor",))) is None


def test_without_a_predecessor_the_engine_starts_from_nothing(tmp_path: Path) -> None:
    site = make_site(tmp_path / "node", caches=("inductor",))
    install(tmp_path, site, NEW, 1)
    probation = Probation(site.state, clock=lambda: NOW)
    probation.begin(KIND.name, current(site), 1, RANK)
    assert run(site) is None  # no engine has met it yet
    probation.meet(current(site), RANK)
    assert run(site) is not None
    assert not site.roots["inductor"].exists()
    shutil.rmtree(site.state)
