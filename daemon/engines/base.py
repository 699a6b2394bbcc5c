"""What an engine is to the daemon: the one seam between warmseed and the servers it keeps warm."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from warmseed.seeding.environment import Environment
from warmseed.seeding.kinds.base import Kind

if TYPE_CHECKING:
    import torch

    from warmseed.daemon.weights.checkpoint import CheckpointIdentity
    from warmseed.daemon.weights.fingerprint import Fingerprint

__all__ = ["CacheLayout", "Engine", "EngineIdentity", "LoadedModel", "canonical_digest"]


def canonical_digest(factors: Mapping[str, str]) -> str:
    """SHA-256 of named factors as canonical JSON; the order in which they were collected does not matter."""
    text = json.dumps(dict(factors), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """What this engine will run, snapshotted once before anything can change it."""

    config_hash: str  # 64 hex digits, the engine's own hash of its configuration
    factors: Mapping[str, str]  # every input of that hash, by name

    @property
    def config_digest(self) -> str:
        """SHA-256 over every factor; an engine's own hash may carry fewer bits."""
        return canonical_digest(self.factors)


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Where one engine keeps its warmup caches below a canonical root."""

    roots: Mapping[str, Path]  # cache name -> folder
    variables: Mapping[str, str]  # environment variables that make an engine process use them


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model as loaded from disk and post-processed, ready to be exported."""

    module: torch.nn.Module
    checkpoint: CheckpointIdentity


class Engine(Protocol):
    """One kind of server. The constructor raises `ConfigurationError` for a model that can't be served."""

    name: str
    modules: tuple[str, ...]  # some that every process of this engine imports, by which its installation is judged

    @property
    def device(self) -> str:
        """The torch device of this rank: ``cpu``, ``cuda:3``."""
        ...

    def device_uuid(self) -> str:
        """The stable name of that device, from which the daemon's socket path follows."""
        ...

    def device_index(self) -> int:
        """The device index that compiled code may embed; -1 on a CPU."""
        ...

    def prepare(self) -> None:
        """Import what `load` needs. Blocks for seconds; safe to run beside adoption."""
        ...

    def identity(self) -> EngineIdentity:
        """Configuration hash and factors; needs no GPU."""
        ...

    def environment(self) -> Environment:
        """Everything outside the configuration that warmup caches depend on. Blocks."""
        ...

    def caches(self, cache_root: Path) -> CacheLayout:
        """Where engine processes keep their caches when `cache_root` is the node's canonical root."""
        ...

    def kinds(self) -> Sequence[Kind]:
        """The kinds of warmup cache this engine has, compiled caches before tables."""
        ...

    def load(self) -> LoadedModel:
        """The model from disk, post-processed, with the digest of the files it came from. Blocks."""
        ...

    def fingerprint(self, checkpoint: CheckpointIdentity) -> Fingerprint:
        """What a daemon's weights and an engine's expectations must agree on."""
        ...

    def table_hash(self) -> str:
        """The configuration hash under which engines look for tables, once the model is loaded.

        Engines change their configuration while they build the model, so it may differ from the identity's.
        """
        ...

    def copies_run_apart(self) -> bool:
        """Whether data-parallel copies are engines of their own, each its own world, once `identity` is known."""
        ...

    def rehearsal(self, *, socket_dir: Path, cache_root: Path) -> list[str]:
        """The command line of a throwaway engine: maps this node's weights at the sockets in `socket_dir`,
        warms up, reports its evidence, answers one token and exits."""
        ...

    def release(self) -> None:
        """Give back what start-up allocated and serving does not need: communicators, workspaces, free lists."""
        ...
