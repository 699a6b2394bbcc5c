"""Signed descriptions of artifacts: what a manifest says, and how it is signed and read.

The envelope is `warmseed.seeding.trust.dsse`; whether a verified manifest is to be believed is
`warmseed.seeding.trust.judge`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from warmseed.seeding.artifact import ArtifactKey, check_digest
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.trust import canonical
from warmseed.seeding.trust.dsse import ENVELOPE_BYTES, open_envelope, read_unverified, seal
from warmseed.seeding.trust.keys import Keyring, PublicKey, PublisherKey

__all__ = [
    "MANIFEST_BYTES",
    "MANIFEST_TYPE",
    "Index",
    "Manifest",
    "Stored",
    "sign_manifest",
    "unverified_manifest",
    "verify_manifest",
]

MANIFEST_BYTES = ENVELOPE_BYTES  # bytes in the largest envelope ever read
MANIFEST_TYPE = "application/vnd.warmseed.manifest+json;v=1"

Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]
UnixSeconds = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Text = Annotated[str, msgspec.Meta(max_length=1024)]


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Digest and length of a bundle's file index, which is an object of its own (`object_key`)."""

    sha256: str
    length: Size

    def __post_init__(self) -> None:
        check_digest(self.sha256)


class Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The payload's compressed form, as it lies in stores and travels: checked before it is decompressed."""

    encoding: Literal["zstd"]
    sha256: str  # of the compressed bytes
    length: Size  # bytes, compressed

    def __post_init__(self) -> None:
        check_digest(self.sha256)


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything a node needs to know of an artifact before it touches one byte of it."""

    schema: Literal[1]
    kind: Text
    store_key: Text  # where the payload lies
    config_hash: Text  # the engine's own hash of its configuration, 64 hex digits
    config_digest: Text  # SHA-256 of every factor of that configuration
    dp_rank: Rank
    world_rank: Rank
    device_index: Annotated[int, msgspec.Meta(ge=-1, lt=1024)]  # -1: does not depend on a device index
    filename: Text
    sha256: Text  # of the payload, uncompressed
    length: Size  # bytes of the payload, uncompressed
    stored: Stored | None = None  # what lies at `store_key`, where that is not the payload as it is
    index: Index | None = None  # bundles: their file index
    environment: dict[Text, Text]
    generation: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    run: Text = ""  # the work that all ranks of a group did together; they adopt it together, see `gang`
    issued_at: UnixSeconds
    expires_at: UnixSeconds
    publisher: Text  # who made it, for people
    provenance: dict[Text, Text] = {}  # when, with which versions, how fast: for people, never for decisions

    def __post_init__(self) -> None:
        check_digest(self.sha256)
        check_digest(self.config_hash)
        check_digest(self.config_digest)
        if self.expires_at <= self.issued_at:
            raise ArtifactRefused("malformed", "a manifest that expires before it was issued")

    def key(self, environment_hash: str) -> ArtifactKey:
        """The artifact this manifest claims to describe, in the environment with `environment_hash`."""
        return ArtifactKey(
            kind=self.kind,
            config_hash=self.config_hash,
            environment_hash=environment_hash,
            dp_rank=self.dp_rank,
            world_rank=self.world_rank,
        )


def sign_manifest(manifest: Manifest, keys: Sequence[PublisherKey]) -> bytes:
    """The envelope of `manifest`, signed with each of `keys`; what a store or a peer hands on.

    Raises:
        ValueError: for no keys, more than four, or an envelope over `MANIFEST_BYTES`.
    """
    return seal(MANIFEST_TYPE, canonical.encode(manifest), keys)


def verify_manifest(envelope: bytes, keyring: Keyring) -> tuple[Manifest, tuple[PublicKey, ...]]:
    """The manifest in `envelope` and the trusted keys that signed it. Verified, but not yet believed.

    Raises:
        ArtifactRefused: ``malformed`` or ``signature``.
    """
    opened = open_envelope(envelope, MANIFEST_TYPE, keyring)
    return canonical.decode(opened.payload, Manifest, limit=MANIFEST_BYTES), opened.signers


def unverified_manifest(envelope: bytes) -> Manifest:
    """What `envelope` says, whoever signed it: to know which objects it refers to, never to believe it.

    Raises:
        ArtifactRefused: ``malformed``, or ``signature`` for an envelope of another type.
    """
    payload, _ = read_unverified(envelope, MANIFEST_TYPE)
    return canonical.decode(payload, Manifest, limit=MANIFEST_BYTES)
