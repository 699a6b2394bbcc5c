"""The name of an artifact, and the store keys that follow from it."""

from __future__ import annotations

import re

import msgspec

from warmseed.errors import printable
from warmseed.seeding.errors import ArtifactRefused

__all__ = [
    "FACTORS_BYTES",
    "NAMESPACE",
    "ArtifactKey",
    "bundle_key",
    "check_digest",
    "denial_key",
    "object_key",
    "parse_manifest_key",
]

# Fixed by the vLLM preload documentation, so that a fleet can mix both.
NAMESPACE = "vllm-warmup-cache"
FACTORS_BYTES = 1 << 20  # bytes in the largest description of a configuration, which lies at its `object_key`

_DIGEST = re.compile(r"[0-9a-f]{64}")
_KIND = re.compile(r"[a-z0-9][a-z0-9_]{0,63}")
_MANIFEST = re.compile(
    rf"{NAMESPACE}/manifest/([a-z0-9][a-z0-9_]{{0,63}})/([0-9a-f]{{64}})/([0-9a-f]{{64}})/dp(\d{{1,7}})_rank(\d{{1,7}})/"
    r"([1-9]\d{0,12})\.json",
    re.ASCII,
)


def check_digest(text: str) -> str:
    """`text`, if it is a lower-case hexadecimal SHA-256.

    Raises:
        ArtifactRefused: ``malformed``, for anything else.
    """
    if not _DIGEST.fullmatch(text):
        raise ArtifactRefused("malformed", f"{printable(text)!r} is not a lower-case SHA-256")
    return text


class ArtifactKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which warmup cache of which rank of which configuration in which environment."""

    kind: str
    config_hash: str  # 64 hex digits; the engine's own hash of its configuration
    environment_hash: str  # 64 hex digits; `Environment.digest`
    dp_rank: int = 0
    world_rank: int = 0

    def __post_init__(self) -> None:
        if not _KIND.fullmatch(self.kind):
            raise ArtifactRefused("malformed", f"{printable(self.kind)!r} is not a kind's name")
        check_digest(self.config_hash)
        check_digest(self.environment_hash)
        for name, value in (("dp_rank", self.dp_rank), ("world_rank", self.world_rank)):
            if type(value) is not int or not 0 <= value < 1 << 20:
                raise ArtifactRefused("malformed", f"{name} {printable(value)} is not a rank")

    @property
    def rank_label(self) -> str:
        """The rank as a key part, as the reference's file names spell it."""
        return f"dp{self.dp_rank}_rank{self.world_rank}"

    @property
    def manifest_folder(self) -> str:
        """Where this artifact's signed manifests lie in every store."""
        return f"{NAMESPACE}/manifest/{self.kind}/{self.config_hash}/{self.environment_hash}/{self.rank_label}"

    def manifest_key(self, generation: int) -> str:
        """The store key of one generation's manifest; written once, never replaced."""
        return f"{self.manifest_folder}/{generation}.json"

    @property
    def head_key(self) -> str:
        """A hint at the newest generation; unsigned, so it only ever saves look-ups."""
        return f"{self.manifest_folder}/head"

    @property
    def pin_key(self) -> str:
        """The signed statement of which generation the fleet is to use."""
        return f"{self.manifest_folder}/pin.json"

    def reference_key(self, filename: str) -> str:
        """The key under which stock vLLM looks for the same file."""
        return f"{NAMESPACE}/{self.kind}/{self.config_hash}/{filename}"


def parse_manifest_key(name: str) -> tuple[ArtifactKey, int] | None:
    """The artifact and the generation of a manifest's store key, or `None` for any other object's."""
    parts = _MANIFEST.fullmatch(name)
    if parts is None:
        return None
    kind, config, environment, dp_rank, world_rank, generation = parts.groups()
    try:
        key = ArtifactKey(
            kind=kind,
            config_hash=config,
            environment_hash=environment,
            dp_rank=int(dp_rank),
            world_rank=int(world_rank),
        )
    except ArtifactRefused:
        return None
    return (key, int(generation)) if key.manifest_key(int(generation)) == name else None


def bundle_key(digest: str) -> str:
    """The store key of a compiled bundle, by the SHA-256 of its uncompressed tar."""
    return f"{NAMESPACE}/compile_cache/{check_digest(digest)}/bundle.tar"


def object_key(digest: str) -> str:
    """The store key of a small immutable object (a table, a file index), by its SHA-256."""
    return f"{NAMESPACE}/object/{check_digest(digest)}"


def denial_key(digest: str) -> str:
    """The store key of the signed statement that the payload `digest` must not be installed."""
    return f"{NAMESPACE}/denied/{check_digest(digest)}.json"
