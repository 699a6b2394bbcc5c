"""Signed envelopes: DSSE (https://github.com/secure-systems-lab/dsse, protocol v1) with Ed25519 signatures.

The signature covers the type of the payload and the payload's own bytes, so nothing is parsed before it is
verified, and a signed statement of one type can never be read as another.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from warmseed.errors import printable
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.trust import canonical
from warmseed.seeding.trust.keys import Keyring, PublicKey, PublisherKey

__all__ = ["ENVELOPE_BYTES", "SIGNATURES", "Opened", "open_envelope", "pae", "read_unverified", "seal"]

ENVELOPE_BYTES = 64 << 10  # bytes in the largest envelope ever read
SIGNATURES = 4  # signatures in one envelope; two are enough for every rotation


class Signature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One signature; `keyid` only says which local key to try."""

    keyid: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$", max_length=32)]
    sig: Annotated[str, msgspec.Meta(max_length=88)]  # base64 of 64 bytes


class Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A payload with its type and signatures, all as text."""

    payload: Annotated[str, msgspec.Meta(max_length=ENVELOPE_BYTES)]  # base64
    payloadType: Annotated[str, msgspec.Meta(max_length=128)]  # noqa: N815 - DSSE's own spelling
    signatures: Annotated[tuple[Signature, ...], msgspec.Meta(min_length=1, max_length=SIGNATURES)]


@dataclass(frozen=True, slots=True)
class Opened:
    """A payload whose origin is known."""

    payload: bytes
    signers: tuple[PublicKey, ...]  # trusted keys whose signatures verified; at least one


def pae(payload_type: str, payload: bytes) -> bytes:
    """DSSE's pre-authentication encoding: the exact bytes that are signed."""
    kind = payload_type.encode("utf-8")
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def seal(payload_type: str, payload: bytes, keys: Sequence[PublisherKey]) -> bytes:
    """An envelope over `payload`, signed with each of `keys`; canonical JSON.

    Raises:
        ValueError: for no keys, too many keys, or an envelope that no reader would take.
    """
    if not 1 <= len(keys) <= SIGNATURES:
        raise ValueError(f"an envelope carries 1 to {SIGNATURES} signatures, not {len(keys)}")
    message = pae(payload_type, payload)
    envelope = Envelope(
        payload=base64.b64encode(payload).decode("ascii"),
        payloadType=payload_type,
        signatures=tuple(
            Signature(keyid=key.public.keyid, sig=base64.b64encode(key.sign(message)).decode("ascii")) for key in keys
        ),
    )
    data = canonical.encode(envelope)
    if len(data) > ENVELOPE_BYTES:
        raise ValueError(f"an envelope of {len(data)} bytes is over the limit of {ENVELOPE_BYTES}")
    return data


def _decode64(text: str, what: str) -> bytes:
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ArtifactRefused("malformed", f"{what} of an envelope is not base64") from error
    if base64.b64encode(raw).decode("ascii") != text:
        raise ArtifactRefused("malformed", f"{what} of an envelope is not canonical base64")
    return raw


def _payload_of(envelope: Envelope, payload_type: str) -> bytes:
    if envelope.payloadType != payload_type:
        raise ArtifactRefused(
            "signature",
            f"an envelope of type {printable(envelope.payloadType)!r} stands where {payload_type!r} belongs",
        )
    return _decode64(envelope.payload, "the payload")


def open_envelope(data: bytes, payload_type: str, keyring: Keyring) -> Opened:
    """The payload of the envelope `data`, if a key of `keyring` signed it as a `payload_type`.

    The payload is verified, not parsed. Signatures of unknown keys are skipped; a signature that names a
    trusted key and does not verify refuses the envelope, whatever else it carries.

    Raises:
        ArtifactRefused: ``malformed`` or ``signature``.
    """
    envelope = canonical.decode(data, Envelope, limit=ENVELOPE_BYTES)
    payload = _payload_of(envelope, payload_type)
    message = pae(payload_type, payload)
    signers: list[PublicKey] = []
    for signature in envelope.signatures:
        key = keyring.find(signature.keyid)
        if key is None:
            continue
        if not key.verify(message, _decode64(signature.sig, "a signature")):
            raise ArtifactRefused("signature", f"the signature of trusted key {key.name!r} does not verify; not used")
        if key not in signers:
            signers.append(key)
    if not signers:
        ids = ", ".join(signature.keyid for signature in envelope.signatures)
        raise ArtifactRefused(
            "signature", f"signed by key {ids}, of which none is trusted here; add it to the trusted keys or ignore it"
        )
    return Opened(payload, tuple(signers))


def read_unverified(data: bytes, payload_type: str) -> tuple[bytes, tuple[str, ...]]:
    """The payload of the envelope `data`, and the ids of the keys that it names as its signers. Nothing is verified.

    To show people what `open_envelope` refuses, and to know what must be left alone; never to believe it.

    Raises:
        ArtifactRefused: ``malformed``, or ``signature`` for another type.
    """
    envelope = canonical.decode(data, Envelope, limit=ENVELOPE_BYTES)
    return _payload_of(envelope, payload_type), tuple(signature.keyid for signature in envelope.signatures)
