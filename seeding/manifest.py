"""Signed descriptions of artifacts: what a manifest says, and the envelope it travels in."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from warmseed.seeding.artifact import ArtifactKey, check_digest

__all__ = ["MANIFEST_BYTES", "MANIFEST_TYPE", "Index", "Manifest"]

MANIFEST_BYTES = 64 << 10  # bytes in the largest envelope ever read
MANIFEST_TYPE = "application/vnd.warmseed.manifest+json;v=1"

Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]
UnixSeconds = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Text = Annotated[str, msgspec.Meta(max_length=1024)]


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Digest and length of a bundle's file index, which is an object of its own (`object_key`)."""

    sha256: str
    length: Size


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
    index: Index | None = None  # bundles: their file index
    environment: dict[Text, Text]
    generation: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    issued_at: UnixSeconds
    expires_at: UnixSeconds
    publisher: Text  # who made it, for people
    provenance: dict[Text, Text] = {}  # when, with which versions, how fast: for people, never for decisions

    def __post_init__(self) -> None:
        check_digest(self.sha256)
        check_digest(self.config_hash)
        check_digest(self.config_digest)

    def key(self, environment_hash: str) -> ArtifactKey:
        """The artifact this manifest claims to describe, in the environment with `environment_hash`."""
        return ArtifactKey(
            kind=self.kind,
            config_hash=self.config_hash,
            environment_hash=environment_hash,
            dp_rank=self.dp_rank,
            world_rank=self.world_rank,
        )
