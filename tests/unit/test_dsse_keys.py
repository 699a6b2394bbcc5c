"""Envelopes and keys: only what a trusted key signed, as the type it was signed as, is opened."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from warmseed.errors import ConfigurationError
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.trust import canonical, dsse
from warmseed.seeding.trust.edwards import in_prime_order_subgroup
from warmseed.seeding.trust.keys import Keyring, PublicKey, PublisherKey

TYPE = "application/test"
ALICE, BOB = PublisherKey("alice", b"a" * 32), PublisherKey("bob", b"b" * 32)
ORDER = 2**252 + 27742317777372353535851937790883648493

SMALL_ORDER = [
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0100000000000000000000000000000000000000000000000000000000000000",
    "0100000000000000000000000000000000000000000000000000000000000080",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
]


def changed(envelope: bytes, **parts: object) -> bytes:
    return json.dumps({**json.loads(envelope), **parts}, sort_keys=True, separators=(",", ":")).encode()


def test_any_one_of_several_signatures_by_a_trusted_key_is_enough() -> None:
    envelope = dsse.seal(TYPE, b"hello", [ALICE, BOB])
    for key in (ALICE, BOB):
        opened = dsse.open_envelope(envelope, TYPE, Keyring([key.public]))
        assert (opened.payload, opened.signers) == (b"hello", (key.public,))
    assert len(dsse.open_envelope(envelope, TYPE, Keyring([ALICE.public, BOB.public])).signers) == 2


def test_the_signed_bytes_are_those_of_the_dsse_specification() -> None:
    assert dsse.pae("http://example.com/HelloWorld", b"hello world") == (
        b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    )


@pytest.mark.parametrize("case", ["none", "unknown", "other type", "other payload", "malleable", "swapped", "short"])
def test_an_envelope_that_no_trusted_key_signed_is_refused(case: str) -> None:
    envelope = dsse.seal(TYPE, b"hello", [ALICE])
    signature = json.loads(envelope)["signatures"][0]
    raw = base64.b64decode(signature["sig"])
    malleable = raw[:32] + (int.from_bytes(raw[32:], "little") + ORDER).to_bytes(32, "little")
    bad = {
        "none": changed(envelope, signatures=[]),
        "unknown": dsse.seal(TYPE, b"hello", [BOB]),
        "other type": changed(envelope, payloadType="application/other"),
        "other payload": changed(envelope, payload=base64.b64encode(b"hullo").decode()),
        "malleable": changed(envelope, signatures=[{**signature, "sig": base64.b64encode(malleable).decode()}]),
        "swapped": changed(envelope, signatures=[{**signature, "keyid": BOB.public.keyid}]),
        "short": changed(envelope, signatures=[{**signature, "sig": base64.b64encode(raw[:63]).decode()}]),
    }[case]
    with pytest.raises(ArtifactRefused) as refused:
        dsse.open_envelope(bad, TYPE, Keyring([ALICE.public]))
    assert refused.value.reason in ("signature", "malformed")


@pytest.mark.parametrize(
    "respell",
    [
        lambda e: e + b" ",
        lambda e: e.replace(b'"payload":', b'"payload": '),
        lambda e: e[:-1] + b',"extra":1}',
        lambda e: e[:1] + b'"payloadType":"application/test",' + e[1:],
        lambda e: b"\xef\xbb\xbf" + e,
        lambda e: e[: len(e) // 2],
        lambda e: b"[" * 100_000,
        lambda e: b'{"payload":NaN}',
        lambda e: b"",
        lambda e: b" " * (dsse.ENVELOPE_BYTES + 1),
        lambda e: e.replace(b"aGVsbG8=", b"aGVsbG9="),
    ],
)
def test_only_one_spelling_of_an_envelope_is_read(respell: object) -> None:
    envelope = dsse.seal(TYPE, b"hello", [ALICE])
    with pytest.raises(ArtifactRefused):
        dsse.open_envelope(respell(envelope), TYPE, Keyring([ALICE.public]))  # type: ignore[operator]


def test_decoding_and_encoding_again_gives_the_same_bytes() -> None:
    envelope = dsse.seal(TYPE, b"hello", [ALICE, BOB])
    assert canonical.encode(canonical.decode(envelope, dsse.Envelope, limit=len(envelope))) == envelope


@pytest.mark.parametrize("raw", SMALL_ORDER)
def test_a_public_key_that_accepts_forgeries_is_refused_when_it_is_loaded(raw: str) -> None:
    assert not in_prime_order_subgroup(bytes.fromhex(raw))
    with pytest.raises(ConfigurationError, match="prime-order"):
        PublicKey("evil", bytes.fromhex(raw))


def test_every_honest_key_is_accepted() -> None:
    for _ in range(8):
        key = PublisherKey.generate("k")
        assert PublicKey.parse(str(key.public)) == key.public


@pytest.mark.parametrize(
    "text", ["", "a", "a:", "a:!!!!", "A b:" + "A" * 43 + "=", "a:" + base64.b64encode(b"x" * 31).decode()]
)
def test_a_key_that_is_not_name_and_base64_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        PublicKey.parse(text)


def test_two_keys_of_one_name_are_refused() -> None:
    other = PublisherKey("alice", b"c" * 32)
    with pytest.raises(ConfigurationError, match="alice"):
        Keyring.parse([str(ALICE.public), "# comment", "", str(other.public)])


def test_a_key_file_is_private_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "publisher.key"
    ALICE.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert PublisherKey.load(path).public == ALICE.public
    with pytest.raises(FileExistsError):
        BOB.save(path)
    path.chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        PublisherKey.load(path)


def test_a_secret_key_shows_in_no_representation() -> None:
    seed = base64.b64encode(b"a" * 32).decode()
    for text in (repr(ALICE), str(ALICE), repr(ALICE.public), repr(Keyring([ALICE.public]))):
        assert seed not in text
        assert (b"a" * 32).hex() not in text


def test_rotation_never_leaves_a_moment_without_a_valid_signature() -> None:
    old, new = ALICE, BOB
    steps = [  # (publisher signs with, consumers trust)
        ([old], [old]),
        ([old], [old, new]),
        ([old, new], [old, new]),
        ([new], [old, new]),
        ([new], [new]),
    ]
    for signers, trusted in steps:
        envelope = dsse.seal(TYPE, b"x", signers)
        assert dsse.open_envelope(envelope, TYPE, Keyring([k.public for k in trusted])).payload == b"x"
