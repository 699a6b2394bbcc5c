"""Small signed statements about artifacts: which generation a fleet is to use, and which one it must not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from warmseed.seeding.artifact import ArtifactKey, check_digest
from warmseed.seeding.trust import canonical
from warmseed.seeding.trust.dsse import ENVELOPE_BYTES, open_envelope, read_unverified, seal
from warmseed.seeding.trust.keys import Keyring, PublisherKey
from warmseed.seeding.trust.manifest import Text, UnixSeconds

__all__ = [
    "DENIAL_TYPE",
    "PIN_TYPE",
    "Denial",
    "Pin",
    "sign_denial",
    "sign_pin",
    "unverified_pin",
    "verify_denial",
    "verify_pin",
]

DENIAL_TYPE = "application/vnd.warmseed.denial+json;v=1"
PIN_TYPE = "application/vnd.warmseed.pin+json;v=1"


class Denial(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Do not install the artifact with this digest: it crashed or failed the first engine that loaded it."""

    schema: Literal[1]
    kind: Text
    sha256: Text  # of the denied payload, uncompressed
    reason: Text  # for people
    issued_at: UnixSeconds
    expires_at: UnixSeconds
    publisher: Text

    def __post_init__(self) -> None:
        check_digest(self.sha256)


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Use exactly this generation, also when a newer one exists or was already seen."""

    schema: Literal[1]
    key: ArtifactKey
    generation: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    sha256: Text
    previous: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 0  # what was pinned before, to go back to; 0: nothing
    previous_sha256: Text = ""
    issued_at: UnixSeconds
    expires_at: UnixSeconds
    publisher: Text

    def __post_init__(self) -> None:
        check_digest(self.sha256)
        if self.previous:
            check_digest(self.previous_sha256)


def sign_denial(denial: Denial, keys: Sequence[PublisherKey]) -> bytes:
    """The envelope of `denial`; it lies at `artifact.denial_key` in every store."""
    return seal(DENIAL_TYPE, canonical.encode(denial), keys)


def verify_denial(envelope: bytes, keyring: Keyring) -> Denial:
    """The denial in `envelope`.

    Raises:
        ArtifactRefused: ``malformed`` or ``signature``.
    """
    return canonical.decode(open_envelope(envelope, DENIAL_TYPE, keyring).payload, Denial, limit=ENVELOPE_BYTES)


def sign_pin(pin: Pin, keys: Sequence[PublisherKey]) -> bytes:
    """The envelope of `pin`; it lies at `ArtifactKey.pin_key` in every store."""
    return seal(PIN_TYPE, canonical.encode(pin), keys)


def verify_pin(envelope: bytes, keyring: Keyring) -> Pin:
    """The pin in `envelope`.

    Raises:
        ArtifactRefused: ``malformed`` or ``signature``.
    """
    return canonical.decode(open_envelope(envelope, PIN_TYPE, keyring).payload, Pin, limit=ENVELOPE_BYTES)


def unverified_pin(envelope: bytes) -> Pin:
    """What `envelope` says, whoever signed it: to know which generation somebody pins, never to follow it.

    Raises:
        ArtifactRefused: ``malformed``, or ``signature`` for an envelope of another type.
    """
    payload, _ = read_unverified(envelope, PIN_TYPE)
    return canonical.decode(payload, Pin, limit=ENVELOPE_BYTES)
