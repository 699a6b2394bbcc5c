"""Objects as files below one folder: walked without following links, written whole or not at all.

Everything here blocks; `disk` and `folder` call it on worker threads. The order of a write is the only one
that survives a crash: temporary file, fsync, rename, fsync of the folder (and of the parent of each new folder).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from warmseed.stores.base import CHUNK, ObjectInfo
from warmseed.stores.errors import ObjectInvalid, StoreUnavailable

__all__ = ["Entry", "OpenFile", "Tree", "Writing", "info_of", "is_read_only"]

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Not blocked by a FIFO that somebody put in an object's place.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NOT_AN_OBJECT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EISDIR})
_READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored object, as a walk over the tree sees it."""

    key: str
    size: int  # bytes
    used: float  # unix seconds of the last use: the file's atime, which reads keep up to date
    modified: float  # unix seconds


class OpenFile:
    """A descriptor that closes itself when nobody holds it: a cancelled reader may never have seen it."""

    __slots__ = ("fd", "status")

    status: os.stat_result

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def read(self, offset: int, size: int = CHUNK) -> bytes:
        """Up to `size` bytes at `offset`."""
        return os.pread(self.fd, size, offset)

    def read_whole(self) -> bytes:
        """Everything the file held when it was opened, or less if it was cut since."""
        data = os.pread(self.fd, self.status.st_size, 0)
        while len(data) < self.status.st_size and (more := self.read(len(data))):
            data += more
        return data

    def touch(self) -> None:
        """Record this use for the eviction order, at most once a minute; never fails."""
        now = time.time_ns()
        if now - self.status.st_atime_ns > 60_000_000_000:
            with contextlib.suppress(OSError):
                os.utime(self.fd, ns=(now, self.status.st_mtime_ns))

    def close(self) -> None:
        """Let go of the descriptor; harmless when repeated."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


class Tree:
    """The files of one store: objects in `objects`, unfinished ones in `staging`, on one file system."""

    def __init__(self, objects: Path, staging: Path, *, private: bool) -> None:
        self.objects, self.staging = objects, staging
        self.folder_mode, self.file_mode = (0o700, 0o600) if private else (0o777, 0o666)  # less the umask

    def create(self) -> None:
        """Make the two folders.

        Raises:
            OSError: when they can't be made.
        """
        for folder in (self.objects, self.staging):
            folder.mkdir(mode=self.folder_mode, parents=True, exist_ok=True)

    def open(self, key: str) -> OpenFile | None:
        """The object, or `None` where there is no regular file of that name."""
        try:
            with self.walk(key) as (folder, name):
                fd = os.open(name, _READ, dir_fd=folder)
        except OSError as error:
            if error.errno in _NOT_AN_OBJECT:
                return None
            raise
        found = OpenFile(fd)
        found.status = os.fstat(fd)
        return found if stat.S_ISREG(found.status.st_mode) else None

    def stat(self, key: str) -> os.stat_result | None:
        """What the file system says of the object, or `None`."""
        try:
            with self.walk(key) as (folder, name):
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except OSError as error:
            if error.errno in _NOT_AN_OBJECT:
                return None
            raise
        return status if stat.S_ISREG(status.st_mode) else None

    def delete(self, key: str) -> bool:
        """Remove the object; whether there was one. Folders stay: another process may be about to use one."""
        try:
            with self.walk(key) as (folder, name):
                os.unlink(name, dir_fd=folder)
        except OSError as error:
            if error.errno in _NOT_AN_OBJECT:
                return False
            raise
        return True

    def entries(self, prefix: str = "", *, complete: bool = False) -> Iterator[Entry]:
        """Every object, in no particular order; what vanishes meanwhile is left out.

        What can't be looked at is left out, too, unless the caller needs the `complete` list.

        Raises:
            OSError: with `complete`, when a folder or a file can't be looked at.
        """
        start = prefix.rpartition("/")[0]
        passed = _NOT_AN_OBJECT if complete else None
        folder = self.objects / start if start else self.objects
        yield from self._entries(folder, f"{start}/" if start else "", prefix, passed)

    def _entries(self, folder: Path, at: str, prefix: str, passed: frozenset[int] | None) -> Iterator[Entry]:
        found: list[os.DirEntry[str]] = []
        with _passing(passed), os.scandir(folder) as items:
            found = list(items)
        for item in found:
            key = at + item.name
            if item.name.startswith(".") or not (key.startswith(prefix) or prefix.startswith(f"{key}/")):
                continue
            with _passing(passed):
                if item.is_dir(follow_symlinks=False):
                    yield from self._entries(folder / item.name, f"{key}/", prefix, passed)
                elif item.is_file(follow_symlinks=False):
                    status = item.stat(follow_symlinks=False)
                    yield Entry(key, status.st_size, status.st_atime, status.st_mtime)

    @contextlib.contextmanager
    def walk(self, key: str, *, create: bool = False) -> Iterator[tuple[int, str]]:
        """The folder of `key` as a descriptor, and the name in it; no link on the way is followed."""
        *folders, name = key.split("/")
        at = os.open(self.objects, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in folders:
                try:
                    inner = os.open(part, _FOLDER, dir_fd=at)
                except FileNotFoundError:
                    if not create:
                        raise
                    with contextlib.suppress(FileExistsError):  # another process was faster
                        os.mkdir(part, self.folder_mode, dir_fd=at)
                    os.fsync(at)
                    inner = os.open(part, _FOLDER, dir_fd=at)
                os.close(at)
                at = inner
            yield at, name
        finally:
            os.close(at)

    def sweep(self, *, older_than: float | None = None) -> int:
        """Remove what killed writers left in the staging folder; how many files that was.

        Without `older_than` a file is dead when nobody holds its lock. With it (shared folders, where locks may
        not reach other hosts) it must be that many seconds older than a file made now: both times come from the
        file server, so the hosts' clocks do not matter.
        """
        removed = 0
        now = self._server_now() if older_than is not None else 0.0
        with os.scandir(self.staging) as items:
            found = list(items)
        for item in found:
            path = self.staging / item.name
            with contextlib.suppress(OSError):
                if older_than is not None and now - item.stat(follow_symlinks=False).st_mtime < older_than:
                    continue
                if older_than is None and not _abandoned(path):
                    continue
                path.unlink()
                removed += 1
        return removed

    def _server_now(self) -> float:
        probe = self.staging / f"{secrets.token_hex(8)}.now"
        fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, self.file_mode)
        try:
            os.write(fd, b".")
            os.fsync(fd)
            return os.fstat(fd).st_mtime
        finally:
            os.close(fd)
            probe.unlink(missing_ok=True)


class Writing:
    """One object on its way into a `Tree`: `begin`, `write`…, `commit`; `abort` at any time, from any thread."""

    def __init__(self, tree: Tree, key: str, size: int, *, reserve: bool) -> None:
        self._tree, self._key, self._size, self._reserve = tree, key, size, reserve
        self._lock = threading.Lock()
        self._fd = -1
        self._temp: Path | None = None
        self._written = 0
        self._over = False

    def begin(self) -> None:
        """Make the temporary file, and claim its whole length so that a full disk is noticed before any byte."""
        with self._lock:
            if self._over:
                return
            while True:
                path = self._tree.staging / f"{secrets.token_hex(12)}.part"
                self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, self._tree.file_mode)
                self._temp = path
                with contextlib.suppress(OSError):  # a file system without locks: shared folders go by age
                    fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(self._fd).st_nlink:
                    break
                os.close(self._fd)  # swept between creation and lock; once more
            if self._reserve and self._size:
                try:
                    os.posix_fallocate(self._fd, 0, self._size)
                except OSError as error:
                    if error.errno not in {errno.EOPNOTSUPP, errno.EINVAL}:
                        raise

    def write(self, piece: bytes) -> None:
        """Append `piece`."""
        with self._lock:
            if self._over:
                return
            left = memoryview(piece)
            while left:
                count = os.write(self._fd, left)
                self._written += count
                left = left[count:]

    def commit(self) -> None:
        """Make the object visible under its key, durably.

        Raises:
            OSError: when the disk fails; nothing is visible then.
            ObjectInvalid: when fewer bytes were written than announced.
        """
        with self._lock:
            if self._over or self._temp is None:
                raise StoreUnavailable(f"the write of {self._key} was given up; nothing was stored")
            if self._written != self._size:
                raise ObjectInvalid(f"{self._key}: {self._written} of {self._size} bytes arrived; nothing was stored")
            os.fsync(self._fd)  # a failure here is final: the kernel may have dropped the pages
            with self._tree.walk(self._key, create=True) as (folder, name):
                os.rename(self._temp, name, dst_dir_fd=folder)
                self._temp = None
                os.fsync(folder)
            self._close()

    def whole(self, data: bytes) -> None:
        """`begin`, `write` and `commit` at once, for small objects."""
        try:
            self.begin()
            self.write(data)
            self.commit()
        finally:
            self.abort()

    def abort(self) -> None:
        """Remove the temporary file; nothing if the object is committed."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        self._over = True
        temp, self._temp = self._temp, None
        if temp is not None:
            with contextlib.suppress(OSError):
                temp.unlink(missing_ok=True)
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


def info_of(key: str, status: os.stat_result) -> ObjectInfo:
    """The contract's view of a file."""
    return ObjectInfo(key, status.st_size, status.st_mtime)


def is_read_only(error: OSError) -> bool:
    """Whether `error` says that this folder can't be written at all."""
    return error.errno in _READ_ONLY


@contextlib.contextmanager
def _passing(passed: frozenset[int] | None) -> Iterator[None]:
    """Leave out what fails for one of these reasons; `None`: for any."""
    try:
        yield
    except OSError as error:
        if passed is not None and error.errno not in passed:
            raise


def _abandoned(path: Path) -> bool:
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
