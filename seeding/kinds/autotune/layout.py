"""Where FlashInfer and vLLM keep tables, as names only: no disk is touched here.

v1: ``<v1 root>/<config hash>/autotune_configs_dp{D}_rank{R}.json``; the root is
``$VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR``, or ``$VLLM_CACHE_ROOT/flashinfer_autotune_cache/<FlashInfer>/<arch>``.
v2: ``<v2 root>/v2/<environment>/{manifest.json,entries/<operation>.json}``; the root is
``$FLASHINFER_AUTOTUNE_CACHE_DIR``, or ``$FLASHINFER_WORKSPACE_BASE/.cache/flashinfer/autotune``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

from warmseed.seeding.errors import ArtifactRefused

__all__ = [
    "ENTRY_NAME",
    "ENVIRONMENT_NAME",
    "KIND",
    "MANAGED_ROOT",
    "MANAGED_SCHEMA",
    "PER_RANK_ROOT",
    "autotune_disabled",
    "environment_name",
    "managed_filename",
    "managed_root",
    "operation_name",
    "per_rank_filename",
    "per_rank_root",
]

KIND = "flashinfer_autotune"
PER_RANK_ROOT = "flashinfer_autotune"  # in `Site.roots`: the folder that holds ``<config hash>/``
MANAGED_ROOT = "flashinfer_autotune_v2"  # in `Site.roots`: the folder that holds ``v2/``
MANAGED_SCHEMA = "v2"
ENVIRONMENT_NAME = re.compile(r"[0-9a-f]{16}")
ENTRY_NAME = re.compile(r"[0-9a-f]{24}\.json")

_COMPONENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")


def per_rank_filename(dp_rank: int, world_rank: int) -> str:
    """The name vLLM gives the table of one rank."""
    return f"autotune_configs_dp{dp_rank}_rank{world_rank}.json"


def managed_filename(dp_rank: int, world_rank: int) -> str:
    """The name of a payload that only a managed store can hold."""
    return f"autotune_managed_dp{dp_rank}_rank{world_rank}.json"


def per_rank_root(environ: Mapping[str, str], *, flashinfer_version: str, arch: str) -> Path:
    """vLLM's v1 root for an engine with the variables `environ`.

    Raises:
        ArtifactRefused: ``malformed``, if version or arch (``90a``) is not one folder name.
    """
    override = environ.get("VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR")
    if override:  # vLLM then leaves version and arch out of the path
        return Path(override).expanduser()
    for part in (flashinfer_version, arch):
        if not _COMPONENT.fullmatch(part):
            raise ArtifactRefused("malformed", f"{part!r} can't be a part of FlashInfer's cache path")
    root = environ.get("VLLM_CACHE_ROOT")
    if root:
        base = Path(root).expanduser()
    else:
        base = Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or "~").expanduser() / ".cache") / "vllm"
    return base / "flashinfer_autotune_cache" / flashinfer_version / arch


def managed_root(environ: Mapping[str, str]) -> Path:
    """FlashInfer's v2 root for an engine with the variables `environ`."""
    override = environ.get("FLASHINFER_AUTOTUNE_CACHE_DIR")
    if override:
        return Path(override)
    base = environ.get("FLASHINFER_WORKSPACE_BASE") or environ.get("HOME") or "~"
    return Path(base).expanduser() / ".cache" / "flashinfer" / "autotune"


def environment_name(manifest: Mapping[str, str]) -> str:
    """The folder of a managed store for one environment and measurement policy: 16 hex digits."""
    canonical = json.dumps(dict(manifest), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()[:16]


def operation_name(key: str) -> str:
    """The file of one entry in a managed store."""
    return hashlib.sha256(key.encode("ascii")).hexdigest()[:24] + ".json"


def autotune_disabled(arguments: tuple[str, ...]) -> bool:
    """Whether the command line switches autotuning off, by either of its two names; the last one given counts.

    ``--disable-flashinfer-autotune`` is the name in the preload documentation, and
    ``--no-enable-flashinfer-autotune`` is vLLM's own.
    """
    disabled = False
    for argument in arguments:
        if argument == "--":
            break
        name = argument.replace("_", "-")
        if name in ("--disable-flashinfer-autotune", "--no-enable-flashinfer-autotune"):
            disabled = True
        elif name in ("--enable-flashinfer-autotune", "--no-disable-flashinfer-autotune"):
            disabled = False
    return disabled
