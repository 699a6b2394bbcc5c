"""What a kind of warmup cache is to the rest of warmseed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from warmseed.seeding.environment import Environment
from warmseed.seeding.trust.manifest import Manifest, Stored

__all__ = ["Capture", "Evidence", "HealsDisk", "Installation", "Kind", "Overrulable", "Site", "Verdict"]


@dataclass(frozen=True, slots=True)
class Site:
    """One rank's place on this node: where its caches live, and what they depend on."""

    config_hash: str
    config_factors: Mapping[str, str]  # every input of the config hash, for `explain` and the full digest
    environment: Environment
    dp_rank: int
    world_rank: int  # within the world that the engine's caches number: one copy of the model, or all
    device_index: int  # -1 on a CPU
    cache_root: Path  # the canonical root of this node's caches
    roots: Mapping[str, Path]  # cache name -> folder, below `cache_root` or where the engine puts it
    state: Path  # warmseed's own folder: staging, bundles, highest generations, ledger; no engine reads it

    @property
    def config_digest(self) -> str:
        """SHA-256 of every factor of the configuration, as manifests bind it."""
        return Environment(self.config_factors).digest

    @property
    def rank_label(self) -> str:
        """The rank as `ArtifactKey.rank_label` spells it."""
        return f"dp{self.dp_rank}_rank{self.world_rank}"


@dataclass(frozen=True, slots=True)
class Capture:
    """What a kind read from this node's caches, ready to be signed and published."""

    filename: str
    payload: Path  # a file in `Site.state` that holds the payload: uncompressed, or as `stored` says
    sha256: str  # of the payload, uncompressed
    length: int  # bytes of the payload, uncompressed
    environment: Environment  # the part of the site's environment this payload depends on
    device_index: int
    store_key: str
    also: tuple[str, ...] = ()  # further store keys of the same bytes, where stock readers look
    stored: Stored | None = None  # the compressed form in `payload`, ready to be put at `store_key` as it is
    index: bytes | None = None  # bundles: the file index
    provenance: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)  # file or cache -> why it is not in the payload


@dataclass(frozen=True, slots=True)
class Installation:
    """What a kind put in place, so that it can be judged, kept or taken back."""

    kind: str
    generation: int
    sha256: str
    files: Mapping[str, str]  # relative path -> SHA-256 as installed
    folder: Path | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)  # file or cache -> why this node did not take it
    complete: bool = True  # False: something an engine will want had to be left out, so local work remains


@dataclass(frozen=True, slots=True)
class Evidence:
    """What an engine itself observed while it warmed up; the adapter collects it."""

    seconds: float  # seconds of warmup, as the engine saw it
    counters: Mapping[str, int] = field(default_factory=dict)  # engine's own: ``inductor_hit``, ``inductor_miss``…
    lines: tuple[str, ...] = ()  # log lines that prove a hit or a miss
    new_files: tuple[str, ...] = ()  # cache files that appeared during warmup, relative to their root


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an installed artifact was used, and why we say so."""

    used: bool
    reason: str
    per_cache: Mapping[str, bool] = field(default_factory=dict)


class Kind(Protocol):
    """One kind of warmup cache. All methods block: callers run them off the event loop."""

    name: str

    def environment(self, site: Site) -> Environment:
        """The part of the site's environment that names this kind's artifacts."""
        ...

    def capture(self, site: Site) -> Capture | None:
        """The cache as it is on disk now, or `None` when there is nothing to publish.

        Raises:
            ArtifactRefused: when what is there must not be published.
        """
        ...

    def install(self, manifest: Manifest, payload: Path, index: bytes | None, site: Site) -> Installation:
        """Check the payload, whose digest was verified, and put it in place, whole or not at all.

        Raises:
            ArtifactRefused: when it must not be installed; nothing has changed then.
            OSError: when the disk fails; nothing is half-visible then.
        """
        ...

    def present(self, site: Site) -> bool:
        """Whether this node already has a usable cache of this kind."""
        ...

    def judge(self, installation: Installation, evidence: Evidence, site: Site) -> Verdict:
        """Whether the installed artifact was used, from the engine's own evidence."""
        ...

    def retract(self, installation: Installation, site: Site) -> None:
        """Take an installation back: quarantined, never silently deleted."""
        ...


@runtime_checkable
class Selective(Protocol):
    """A kind whose artifacts may work here only in part, which can be told before one is fetched."""

    def suits(self, manifest: Manifest, index: bytes, site: Site) -> bool:
        """Whether nothing that an engine here wants would be left out, as far as the file index tells.

        Raises:
            ArtifactRefused: as `install`, for an index that does not fit.
        """
        ...


@runtime_checkable
class HealsDisk(Protocol):
    """A kind whose local files can poison every start; called once before anything is adopted or warmed up."""

    def heal(self, site: Site) -> tuple[str, ...]:
        """Move what would crash or be refused at every start aside, and say what was done, one line each.

        Raises:
            OSError: when the disk does not let us; nothing is lost then.
        """
        ...


@runtime_checkable
class Overrulable(Protocol):
    """A kind whose local cache the fleet can overrule at the next start, by denying its digest or pinning another."""

    def held(self, site: Site) -> tuple[str, ...]:
        """Digests of the payloads that what lies here was installed from, or published as."""
        ...

    def set_aside(self, site: Site, why: str) -> None:
        """Take the local cache out of the engine's sight, good as it may be; it is kept.

        Raises:
            OSError: when the disk does not let us.
        """
        ...
