"""SHA-256 digests that this user has computed before, by what the kernel says about the file.

An entry is only ever a saving: it is used if device, inode, size, mtime and ctime are all what they were. ctime can't
be set by a program, so a file rewritten with its old mtime put back is noticed. One small file an entry, written to a
temporary name and renamed, so that any number of daemons share the folder without a lock.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from pathlib import Path
from typing import Annotated, Final

import msgspec

__all__ = ["DigestCache", "FileStat", "default_cache_dir"]

logger = logging.getLogger(__name__)

ENTRIES: Final = 4096  # kept; the oldest go first
_ENTRY_LIMIT: Final = 4096  # bytes of one entry's file


class FileStat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What identifies one version of one file on this machine."""

    device: int
    inode: int
    size: int  # bytes
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileStat:
        """From what `os.stat` returned."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def key(self, mode: str) -> str:
        """The name of this version's entry for digests of `mode`."""
        text = f"{mode}:{self.device}:{self.inode}:{self.size}:{self.mtime_ns}:{self.ctime_ns}"
        return hashlib.sha256(text.encode("ascii")).hexdigest()


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    stat: FileStat
    mode: str
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


def default_cache_dir() -> Path:
    """``warmseed/checkpoint-digests`` in the user's cache folder (XDG Base Directory Specification)."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(root) if root.startswith("/") else Path.home() / ".cache"
    return base / "warmseed" / "checkpoint-digests"


class DigestCache:
    """The entries in `folder`. A folder that can't be written, or is not this user's alone, only costs time."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or default_cache_dir()
        self._warned = False

    def get(self, stat: FileStat, mode: str) -> str | None:
        """The digest of this very version of the file, or `None`."""
        if not self._trusted():
            return None
        try:
            with (self._folder / stat.key(mode)).open("rb") as source:
                entry = msgspec.json.decode(source.read(_ENTRY_LIMIT), type=_Entry)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            logger.warning("checkpoint digest cache entry unreadable (%s); the file is hashed again", error)
            return None
        return entry.sha256 if entry.stat == stat and entry.mode == mode else None

    def put(self, stat: FileStat, mode: str, sha256: str) -> None:
        """Remember a digest; failing to is a warning, once."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._trusted():
                return
            handle, name = tempfile.mkstemp(prefix=".new-", dir=self._folder)
            try:
                with os.fdopen(handle, "wb") as out:
                    out.write(msgspec.json.encode(_Entry(stat, mode, sha256)))
                    out.flush()
                    os.fsync(out.fileno())
                os.replace(name, self._folder / stat.key(mode))
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name)
                raise
            self._prune()
        except OSError as error:
            self._warn(f"{self._folder} can't be written ({error}); checkpoints are hashed again at every start")

    def _trusted(self) -> bool:
        try:
            status = os.lstat(self._folder)
        except OSError:
            return False
        if status.st_uid == os.geteuid() and not status.st_mode & 0o022 and os.path.isdir(self._folder):
            return True
        self._warn(f"{self._folder} can be written by others; its digests are not used")
        return False

    def _prune(self) -> None:
        with os.scandir(self._folder) as found:
            names = [entry for entry in found if not entry.name.startswith(".")]
        if len(names) <= ENTRIES:
            return
        names.sort(key=lambda entry: entry.stat().st_mtime_ns)
        for entry in names[: len(names) - ENTRIES]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry.path)

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("checkpoint digest cache: %s", text)
