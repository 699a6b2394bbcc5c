"""The folders warmseed uses on a node unless it is told others."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["default_cache_root", "state_folder"]


def default_cache_root() -> Path:
    """One fixed path per user, the same on every node.

    Compiled caches embed the folder they were made in, so a fleet wants one path and not one per home folder.
    /var/tmp exists everywhere, outlives a reboot and needs no rights; the folder itself is private.
    """
    return Path(f"/var/tmp/warmseed-{os.getuid()}")  # noqa: S108 - created 0700 and owner-checked before use


def state_folder(cache_root: Path) -> Path:
    """warmseed's own files below `cache_root`: staging, store, ledger. No engine reads there."""
    return cache_root / "warmseed"
