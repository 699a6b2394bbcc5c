"""Which signed manifests are believed: the right thing, for this rank, in this environment, and not an old one."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from warmseed.seeding.artifact import ArtifactKey, bundle_key
from warmseed.seeding.environment import UNKNOWN, Environment
from warmseed.seeding.errors import ArtifactRefused, CannotJudge
from warmseed.seeding.trust.judge import DAY, Expected, Marks, Policy, Trust
from warmseed.seeding.trust.keys import Keyring, PublisherKey
from warmseed.seeding.trust.manifest import Manifest, sign_manifest
from warmseed.seeding.trust.marks import load_marks, save_marks
from warmseed.seeding.trust.statements import Denial, Pin, sign_denial, sign_pin

KEY = PublisherKey("builder", b"k" * 32)
NOW = 1_800_000_000
ENVIRONMENT = Environment({"gpu": "H200", "torch": "2.13"})
EXPECTED = Expected(
    key=ArtifactKey(
        kind="compile_cache", config_hash="a" * 64, environment_hash=ENVIRONMENT.digest, dp_rank=1, world_rank=3
    ),
    config_digest="b" * 64,
    environment=ENVIRONMENT,
    device_index=3,
)
GOOD = Manifest(
    schema=1,
    kind="compile_cache",
    store_key=bundle_key("c" * 64),
    config_hash="a" * 64,
    config_digest="b" * 64,
    dp_rank=1,
    world_rank=3,
    device_index=3,
    filename="bundle.tar",
    sha256="c" * 64,
    length=10,
    environment=dict(ENVIRONMENT),
    generation=5,
    issued_at=NOW - 60,
    expires_at=NOW + DAY,
    publisher="node",
)


def trust(policy: Policy | None = None, marks: Marks | None = None) -> Trust:
    return Trust(Keyring([KEY.public]), policy, marks=marks)


def signed(**changes: object) -> bytes:
    return sign_manifest(msgspec.structs.replace(GOOD, **changes), [KEY])


def refused(judge: Trust, envelope: bytes, *, now: int = NOW, pin: bytes | None = None) -> ArtifactRefused:
    with pytest.raises(ArtifactRefused) as caught:
        judge.believe(envelope, EXPECTED, now=now, pin=pin)
    return caught.value


def test_a_manifest_for_this_rank_and_environment_is_believed() -> None:
    assert trust().believe(signed(), EXPECTED, now=NOW) == GOOD


@pytest.mark.parametrize(
    ("changes", "reason", "field"),
    [
        ({"kind": "flashinfer_autotune"}, "kind", None),
        ({"config_hash": "d" * 64}, "key", "config_hash"),
        ({"config_digest": "d" * 64}, "key", "config_digest"),
        ({"dp_rank": 0}, "rank", "dp_rank"),
        ({"world_rank": 2}, "rank", "world_rank"),
        ({"device_index": 0}, "rank", "device_index"),
        ({"store_key": bundle_key("d" * 64)}, "key", None),
        ({"store_key": "other/place"}, "key", None),
        ({"environment": {"gpu": "H100", "torch": "2.13"}}, "environment", "gpu"),
        ({"environment": {"gpu": "H200", "torch": "2.12"}}, "environment", "torch"),
        ({"environment": {"gpu": "H200"}}, "environment", "torch"),
        ({"environment": {"gpu": "H200", "torch": "2.13", "x": "y"}}, "environment", "x"),
        ({"issued_at": NOW + 601, "expires_at": NOW + DAY}, "expired", None),
        ({"issued_at": NOW - 2 * DAY, "expires_at": NOW - 601}, "expired", None),
        ({"issued_at": NOW - 31 * DAY, "expires_at": NOW + 300 * DAY}, "expired", None),
    ],
)
def test_a_validly_signed_manifest_for_something_else_is_refused(
    changes: dict[str, object], reason: str, field: str | None
) -> None:
    error = refused(trust(), signed(**changes))
    assert error.reason == reason
    assert field is None or field in error.fields
    assert field is None or field.replace("_", " ") in str(error).replace("_", " ")


def test_the_same_code_on_any_device_is_believed_when_it_says_so() -> None:
    trust().believe(signed(device_index=-1), EXPECTED, now=NOW)


def test_the_manifest_of_an_unknown_signer_is_refused() -> None:
    error = refused(trust(), sign_manifest(GOOD, [PublisherKey("other", b"o" * 32)]))
    assert error.reason == "signature"


def test_a_signed_statement_of_another_type_is_no_manifest() -> None:
    denial = Denial(schema=1, kind="x", sha256="c" * 64, reason="r", issued_at=NOW, expires_at=NOW + 1, publisher="p")
    assert refused(trust(), sign_denial(denial, [KEY])).reason == "signature"


def test_a_node_that_cannot_tell_its_own_environment_judges_nothing() -> None:
    environment = Environment({"gpu": "H200", "torch": UNKNOWN})
    expected = Expected(
        key=msgspec.structs.replace(EXPECTED.key, environment_hash=environment.digest),
        config_digest="b" * 64,
        environment=environment,
        device_index=3,
    )
    with pytest.raises(CannotJudge, match="torch"):
        trust().believe(signed(environment=dict(environment)), expected, now=NOW)


def test_an_older_generation_is_refused_once_a_newer_was_seen() -> None:
    judge = trust()
    judge.remember(judge.believe(signed(), EXPECTED, now=NOW), EXPECTED)
    assert refused(judge, signed(generation=4, issued_at=NOW)).reason == "rollback"
    assert refused(judge, signed(issued_at=NOW - 61)).reason == "rollback"
    judge.believe(signed(), EXPECTED, now=NOW)  # the same one is fine
    judge.believe(signed(generation=6), EXPECTED, now=NOW)


def test_what_was_seen_survives_a_restart(tmp_path: Path) -> None:
    judge = trust()
    assert judge.remember(judge.believe(signed(), EXPECTED, now=NOW), EXPECTED)
    assert not judge.remember(GOOD, EXPECTED)
    save_marks(tmp_path / "deep" / "highest.json", judge.marks)
    again = trust(marks=load_marks(tmp_path / "deep" / "highest.json"))
    assert refused(again, signed(generation=4)).reason == "rollback"


@pytest.mark.parametrize("content", [b"", b"{", b'{"schema":1}', b"[]", b'{"marks":{"a":1},"schema":1}'])
def test_a_broken_history_is_put_aside_and_the_node_starts(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "highest.json"
    path.write_bytes(content)
    assert load_marks(path) == Marks()
    assert not path.exists()
    assert (tmp_path / "highest.json.broken").read_bytes() == content


def test_a_signed_pin_taken_later_allows_going_back() -> None:
    judge = trust()
    judge.remember(judge.believe(signed(), EXPECTED, now=NOW), EXPECTED)
    old = signed(generation=4, issued_at=NOW - 600)
    pin = Pin(
        schema=1,
        key=EXPECTED.key,
        generation=4,
        sha256="c" * 64,
        issued_at=NOW,
        expires_at=NOW + DAY,
        publisher="operator",
    )
    envelope = sign_pin(pin, [KEY])
    assert judge.pinned(envelope, EXPECTED.key, now=NOW) == 4
    assert judge.believe(old, EXPECTED, now=NOW, pin=envelope).generation == 4
    assert refused(judge, signed(), pin=envelope).reason == "pinned"


@pytest.mark.parametrize("case", ["unsigned", "stale", "other key", "garbage"])
def test_a_pin_that_does_not_hold_changes_nothing(case: str) -> None:
    pin = Pin(
        schema=1,
        key=EXPECTED.key if case != "other key" else msgspec.structs.replace(EXPECTED.key, world_rank=9),
        generation=1,
        sha256="d" * 64,
        issued_at=NOW - 3 * DAY,
        expires_at=NOW - 2 * DAY if case == "stale" else NOW + DAY,
        publisher="operator",
    )
    signer = PublisherKey("stranger", b"s" * 32) if case == "unsigned" else KEY
    envelope = b"garbage" if case == "garbage" else sign_pin(pin, [signer])
    assert trust().pinned(envelope, EXPECTED.key, now=NOW) is None
    assert trust().believe(signed(), EXPECTED, now=NOW, pin=envelope) == GOOD


def test_what_the_fleet_or_the_operator_denied_is_refused() -> None:
    judge = trust()
    denial = Denial(
        schema=1,
        kind="compile_cache",
        sha256="c" * 64,
        reason="crashed the first engine",
        issued_at=NOW,
        expires_at=NOW + DAY,
        publisher="node7",
    )
    judge.deny(sign_denial(denial, [KEY]), now=NOW)
    error = refused(judge, signed())
    assert error.reason == "denied"
    assert "node7" in str(error)
    assert refused(trust(Policy(denied_digests=frozenset({"c" * 64}))), signed()).reason == "denied"
    assert refused(trust(Policy(min_generation=6)), signed()).reason == "denied"


def test_a_denial_by_a_stranger_denies_nothing() -> None:
    judge = trust()
    denial = Denial(schema=1, kind="x", sha256="c" * 64, reason="r", issued_at=NOW, expires_at=NOW + DAY, publisher="p")
    with pytest.raises(ArtifactRefused):
        judge.deny(sign_denial(denial, [PublisherKey("stranger", b"s" * 32)]), now=NOW)
    assert judge.believe(signed(), EXPECTED, now=NOW) == GOOD


@pytest.mark.parametrize(
    ("life", "age", "valid", "over"),
    [
        (DAY, 0, True, False),
        (DAY, DAY + 600, True, False),
        (DAY, DAY + 601, False, False),
        (DAY, DAY + 3600, False, False),
        (DAY, DAY + 3601, False, True),
        (90 * DAY, 30 * DAY + 3601, False, True),
        (DAY, -601, False, False),
    ],
)
def test_what_is_over_for_good_is_not_merely_invalid_now(life: int, age: int, valid: bool, over: bool) -> None:
    """A node only passes over what it may not believe; what is over may be thrown away."""
    judge, issued = trust(), NOW - age
    assert judge.over(issued, issued + life, now=NOW) is over
    if valid:
        judge.check_dates("manifest", issued, issued + life, NOW)
    else:
        with pytest.raises(ArtifactRefused, match=r"expired|future"):
            judge.check_dates("manifest", issued, issued + life, NOW)


def test_nothing_is_over_for_a_node_that_booted_in_1970() -> None:
    assert not trust().over(0, 1, now=86_400)


def test_a_node_that_booted_in_1970_still_adopts_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    judge = trust()
    with caplog.at_level(logging.WARNING):
        judge.believe(signed(), EXPECTED, now=86_400)
        judge.believe(signed(), EXPECTED, now=86_401)
    assert sum("clock" in record.message for record in caplog.records) == 1


def test_every_factor_of_the_configuration_changes_the_digest_that_manifests_bind(tmp_path: Path) -> None:
    from dataclasses import replace

    from tests.support.sites import make_site

    site = make_site(tmp_path)
    factors = {"model": "m", "num_speculative_tokens": "2", "pp": "1", "mm_encoder_tp_mode": "data"}
    base = replace(site, config_factors=factors).config_digest
    for name in factors:
        assert replace(site, config_factors={**factors, name: "other"}).config_digest != base
    assert replace(site, config_factors=dict(reversed(list(factors.items())))).config_digest == base


def test_hostile_text_in_a_manifest_is_escaped_in_the_reason() -> None:
    error = refused(trust(), signed(environment={"gpu": "H200\n\x1b[31mFAKE LOG LINE", "torch": "2.13"}))
    assert "\n" not in str(error)
    assert "\x1b" not in str(error)
