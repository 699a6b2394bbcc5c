"""The folders warmseed uses on a node unless it is told others."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from warmseed.errors import ConfigurationError

__all__ = ["default_cache_root", "prepare_cache_root", "state_folder"]


def default_cache_root() -> Path:
    """One fixed path per user, the same on every node.

    Compiled caches embed the folder they were made in, so a fleet wants one path and not one per home folder.
    /var/tmp exists everywhere, outlives a reboot and needs no rights; the folder itself is private.
    """
    return Path(f"/var/tmp/warmseed-{os.getuid()}")  # noqa: S108 - created 0700 and owner-checked before use


def prepare_cache_root(root: Path) -> None:
    """Make `root` a private folder of this user, and warmseed's own folder in it.

    Raises:
        ConfigurationError: somebody else owns it, others may write to it, or it can't be created.
    """
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = root.lstat()
    except OSError as error:
        raise ConfigurationError(f"--cache-root {root} can't be used: {error.strerror}; name another folder") from error
    if not stat.S_ISDIR(info.st_mode):
        raise ConfigurationError(f"--cache-root {root} is no folder (nor may it be a link); name another one")
    if info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise ConfigurationError(
            f"--cache-root {root} belongs to user {info.st_uid} with mode {stat.S_IMODE(info.st_mode):04o}; compiled "
            "code is loaded from there, so nobody else may write to it: chmod 700 it or name another folder"
        )
    with contextlib.suppress(OSError):  # a read-only root is served from memory
        state_folder(root).mkdir(mode=0o700, exist_ok=True)


def state_folder(cache_root: Path) -> Path:
    """warmseed's own files below `cache_root`: staging, store, ledger. No engine reads there."""
    return cache_root / "warmseed"
