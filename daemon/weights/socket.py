"""Private socket paths, the lock that owns one, and who is at the other end.

A socket is only used through a descriptor of its folder (``/proc/self/fd/N/name``): the folder that was checked is the
folder that is used, and a path may be longer than the 107 bytes of a socket address.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import secrets
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from warmseed.daemon.weights.errors import SocketPathRefused, WeightCacheUnavailable
from warmseed.errors import ConfigurationError, printable

__all__ = [
    "BoundSocket",
    "DeviceLock",
    "Peer",
    "SocketAddress",
    "bind_private",
    "check_peer",
    "connect",
    "default_socket_dir",
    "socket_path",
]

logger = logging.getLogger(__name__)

NAME_LIMIT: Final = 64  # bytes of a socket's file name; what is left of an address after /proc/self/fd/N/.….new
BACKLOG: Final = 128
_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred: pid, uid, gid (unix(7))


def default_socket_dir() -> Path:
    """The folder that daemon and engine agree on when neither is told another: private, one a user.

    It is under the temporary folder and not under ``$XDG_RUNTIME_DIR``: a service and a login shell see different
    values of that, and it is removed when the user's last session ends, sockets of living daemons included.
    """
    return Path(tempfile.gettempdir()) / f"warmseed_weights_{os.geteuid()}"


def socket_path(directory: Path, device_uuid: str, *, draft: bool = False) -> Path:
    """The socket of the device's daemon, whatever index the device has in this process.

    The name is the UUID's SHA-256, one algorithm with or without FIPS.
    """
    digest = hashlib.sha256(device_uuid.encode()).hexdigest()[:32]
    return directory / f"weights_{digest}{'_draft' if draft else ''}.sock"


@dataclass(frozen=True, slots=True)
class SocketAddress:
    """Where a daemon listens. `private` folders are ours: created on demand, and refused if others may look inside."""

    path: Path
    private: bool = False
    device_uuid: str = ""  # the device the path was derived from; empty for a path given by hand

    @classmethod
    def for_device(cls, device_uuid: str, *, directory: Path | None = None, draft: bool = False) -> SocketAddress:
        """The derived address of a device, in `directory` or the default folder."""
        folder = directory or default_socket_dir()
        return cls(socket_path(folder, device_uuid, draft=draft), directory is None, device_uuid)

    @property
    def lock_path(self) -> Path:
        """The file whose lock says who owns the address."""
        return self.path.with_name(self.path.name + ".lock")

    def __str__(self) -> str:
        return str(self.path)


@contextmanager
def _folder(address: SocketAddress, *, create: bool) -> Iterator[int]:
    """A descriptor of the address's folder, checked."""
    folder, name = address.path.parent, address.path.name
    if not name or len(os.fsencode(name)) > NAME_LIMIT:
        raise SocketPathRefused(f"socket name {printable(name)!r} must have 1 to {NAME_LIMIT} bytes")
    if create:
        _create(folder)
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise WeightCacheUnavailable("absent", f"{folder} does not exist: no daemon has run here") from error
    except OSError as error:  # ELOOP, ENOTDIR: a symbolic link or a file; EACCES: somebody else's
        raise SocketPathRefused(
            f"{folder} is not a folder of our own to open ({error.strerror}); sockets are not looked for behind links"
        ) from error
    try:
        _check_folder(folder, os.fstat(descriptor), private=address.private)
        yield descriptor
    finally:
        os.close(descriptor)


def _create(folder: Path) -> None:
    try:
        # One by one: mkdir gives the parents it makes on the way the default mode, and we make a private folder of
        # a parent's name, too.
        for missing in [f for f in reversed(folder.parents) if not f.exists()]:
            missing.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError as error:
        raise SocketPathRefused(f"{folder} is in the way: it is no folder") from error
    except OSError as error:
        raise SocketPathRefused(
            f"the socket folder {folder} can't be created ({error.strerror}); name a writable one"
        ) from error


def _check_folder(folder: Path, status: os.stat_result, *, private: bool) -> None:
    me = os.geteuid()
    if status.st_uid != me:
        raise SocketPathRefused(
            f"socket folder {folder} belongs to user {status.st_uid}, not to {me}; use a sub-folder of your own"
        )
    forbidden = 0o077 if private else 0o022
    if status.st_mode & forbidden:
        raise SocketPathRefused(
            f"socket folder {folder} has mode {stat.S_IMODE(status.st_mode):04o}: others may "
            f"{'look or write' if private else 'write'} there; chmod 700 it"
        )
    if status.st_mode & 0o055:
        logger.warning("socket folder %s can be read by others; chmod 700 it", folder)
    for ancestor in Path(os.path.realpath(folder)).parents:
        above = ancestor.stat()
        if above.st_uid not in (0, me) or (above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX):
            raise SocketPathRefused(
                f"socket folder {folder} lies under {ancestor}, where other users may replace it; use another folder"
            )


def _at(folder: int, name: str) -> str:
    return f"/proc/self/fd/{folder}/{name}"


class DeviceLock:
    """Sole ownership of one address, for as long as it is held. The kernel lets go when the process dies.

    The lock file stays when the lock is let go: removing it would let two daemons hold two files of the same name.
    """

    def __init__(self, address: SocketAddress) -> None:
        self.address = address
        self._fd = -1

    @property
    def held(self) -> bool:
        """Whether this object holds the lock now."""
        return self._fd >= 0

    def acquire(self) -> None:
        """Take the lock, or fail at once.

        Raises:
            ConfigurationError: another daemon holds it; the message names its pid.
            SocketPathRefused: the folder or the lock file is not what it must be.
        """
        if self.held:
            return
        with _folder(self.address, create=True) as folder:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                descriptor = os.open(self.address.lock_path.name, flags, 0o600, dir_fd=folder)
            except OSError as error:
                raise SocketPathRefused(f"{self.address.lock_path} can't be opened: {error.strerror}") from error
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                    raise SocketPathRefused(f"{self.address.lock_path} is not a file of our own; not touched")
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()} {_start_time(os.getpid())}\n".encode(), 0)
            except BlockingIOError as error:
                holder = _holder(descriptor)
                os.close(descriptor)
                raise ConfigurationError(
                    f"{self.address} belongs to another daemon ({holder}); stop that one first, nothing was touched"
                ) from error
            except BaseException:
                os.close(descriptor)
                raise
        self._fd = descriptor

    def release(self) -> None:
        """Let go of the lock."""
        if self.held:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> DeviceLock:
        self.acquire()
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


def _holder(descriptor: int) -> str:
    """Who wrote the lock file; a pid that now means another process is not blamed."""
    words = os.pread(descriptor, 64, 0).decode("ascii", "replace").split()
    if len(words) != 2 or not words[0].isdecimal():
        return "pid unknown"
    same = _start_time(int(words[0])) == words[1]
    return (
        f"pid {words[0]}" if same else f"started by pid {words[0]}, which is gone; a child of it still holds the lock"
    )


def _start_time(pid: int) -> str:
    """Clock ticks from boot to the start of `pid` (proc(5), field 22), or ``?``: with the pid, it names one process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return "?"
    return text.rpartition(")")[2].split()[19]


@dataclass(slots=True)
class BoundSocket:
    """A listening socket and the inode its path had when it was published."""

    listener: socket.socket
    address: SocketAddress
    inode: int

    def withdraw(self) -> None:
        """Remove the path, if it is still ours, and stop listening."""
        self.unpublish()
        self.listener.close()

    def unpublish(self) -> None:
        """Remove the path, if it is still ours: nobody new finds the daemon."""
        gone = contextlib.suppress(WeightCacheUnavailable, FileNotFoundError)
        with gone, _folder(self.address, create=False) as folder:
            if os.stat(self.address.path.name, dir_fd=folder, follow_symlinks=False).st_ino == self.inode:
                os.unlink(self.address.path.name, dir_fd=folder)


def bind_private(lock: DeviceLock) -> BoundSocket:
    """A socket that listens at the lock's address. It appears there by rename: whoever sees it can connect.

    Raises:
        ConfigurationError: the lock is not held.
        SocketPathRefused: something that is no socket of ours is in the way; it is not touched.
    """
    address = lock.address
    if not lock.held:
        raise ConfigurationError(f"{address} can't be served without its lock")
    name = address.path.name
    temporary = f".{name}.{secrets.token_hex(4)}"
    with _folder(address, create=True) as folder:
        _check_in_the_way(folder, address)
        _sweep(folder, name)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            os.fchmod(listener.fileno(), 0o600)  # before bind: the file then has this mode from the start
            listener.bind(_at(folder, temporary))
            try:
                listener.listen(BACKLOG)
                inode = os.stat(temporary, dir_fd=folder, follow_symlinks=False).st_ino
                os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                os.unlink(temporary, dir_fd=folder)
                raise
        except BaseException:
            listener.close()
            raise
    return BoundSocket(listener, address, inode)


def _check_in_the_way(folder: int, address: SocketAddress) -> None:
    try:
        status = os.stat(address.path.name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid():
        raise SocketPathRefused(f"{address} is in the way and no socket of ours; move it away, it was not touched")
    logger.info("replacing the stale socket %s: its lock is ours", address)


def _sweep(folder: int, name: str) -> None:
    """Remove sockets that a daemon killed between bind and rename left behind; the lock says that none is alive."""
    for entry in os.listdir(folder):
        if entry.startswith(f".{name}.") and stat.S_ISSOCK(
            os.stat(entry, dir_fd=folder, follow_symlinks=False).st_mode
        ):
            os.unlink(entry, dir_fd=folder)


def connect(address: SocketAddress, *, timeout_s: float) -> socket.socket:
    """A connection to the daemon at `address`, whose process belongs to our own user.

    Raises:
        WeightCacheUnavailable: reason ``absent``, ``refused`` or ``timeout``.
        SocketPathRefused: the path can't be trusted.
    """
    with _folder(address, create=False) as folder:
        try:
            status = os.stat(address.path.name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError as error:
            raise WeightCacheUnavailable("absent", f"{address} does not exist: no daemon is ready here") from error
        if not stat.S_ISSOCK(status.st_mode):
            raise SocketPathRefused(f"{address} is no socket; not connected")
        if status.st_uid != os.geteuid():
            raise SocketPathRefused(f"{address} belongs to user {status.st_uid}; not connected")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            _connect(connection, _at(folder, address.path.name), timeout_s)
            check_peer(connection)
            connection.settimeout(timeout_s)
        except BlockingIOError as error:
            connection.close()
            raise WeightCacheUnavailable("timeout", f"{address}: no connection within {timeout_s:g} s") from error
        except FileNotFoundError as error:
            connection.close()
            raise WeightCacheUnavailable("absent", f"{address} went away: the daemon has stopped") from error
        except OSError as error:  # ECONNREFUSED: a stale socket
            connection.close()
            raise WeightCacheUnavailable("refused", f"{address}: nobody listens there ({error.strerror})") from error
        except BaseException:
            connection.close()
            raise
    return connection


def _connect(connection: socket.socket, path: str, timeout_s: float) -> None:
    """Connect, waiting for room in the daemon's backlog; a Unix socket answers EAGAIN at once when it is full."""
    deadline = time.monotonic() + timeout_s
    connection.setblocking(False)
    while True:
        try:
            return connection.connect(path)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.01)


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end, as the kernel states it."""

    pid: int
    uid: int


def check_peer(connection: socket.socket) -> Peer:
    """Who is at the other end, if it is a process of our own user.

    Raises:
        WeightCacheUnavailable: reason ``refused``: another user, or the kernel does not say.
    """
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(raw)
    except (OSError, AttributeError, struct.error) as error:
        raise WeightCacheUnavailable("refused", f"the peer's user can't be told ({error}); refused") from error
    if uid != os.geteuid():
        raise WeightCacheUnavailable("refused", f"the peer runs as user {uid}, not as {os.geteuid()}; refused")
    return Peer(pid, uid)
