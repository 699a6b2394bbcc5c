"""A rank's own names: where its v1 table lies, what its notes are called, what FlashInfer says of its environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from warmseed.seeding.environment import UNKNOWN, Environment
from warmseed.seeding.kinds.autotune.layout import PER_RANK_ROOT, per_rank_filename
from warmseed.seeding.kinds.autotune.table import METADATA_FIELDS
from warmseed.seeding.kinds.base import Site

__all__ = ["ENVIRONMENT_PREFIX", "environment_fields", "label", "metadata_of", "per_rank_path"]

ENVIRONMENT_PREFIX = "flashinfer."  # FlashInfer's metadata in `Site.environment`, whose other fields are not ours


def environment_fields(metadata: Mapping[str, str]) -> dict[str, str]:
    """FlashInfer's metadata under the names it has in `Site.environment`."""
    return {ENVIRONMENT_PREFIX + name: value for name, value in metadata.items()}


def metadata_of(site: Site) -> Environment:
    """FlashInfer's metadata on this node, under its own names; ``unknown`` where this node can't tell."""
    found = {
        name.removeprefix(ENVIRONMENT_PREFIX): value
        for name, value in site.environment.items()
        if name.startswith(ENVIRONMENT_PREFIX)
    }
    return Environment({**dict.fromkeys(METADATA_FIELDS, UNKNOWN), **found})


def per_rank_path(site: Site) -> Path:
    """The v1 file of this rank; `site.roots` must name its root."""
    return site.roots[PER_RANK_ROOT] / site.config_hash / per_rank_filename(site.dp_rank, site.world_rank)


def label(site: Site) -> str:
    """What this rank's notes in warmseed's own folder are called."""
    return f"{site.config_hash}-{site.rank_label}"
