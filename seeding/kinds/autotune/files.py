"""Reading and replacing single small files, whole or not at all, with the folder held open."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from warmseed.seeding.errors import ArtifactRefused

__all__ = ["held_folder", "read_file", "replace_file", "sync_folder"]

TEMPORARY = ".warmseed-"  # prefix of our temporaries; FlashInfer's own are ``.autotuner_*`` and ``.autotune_*``


def read_file(path: Path | str, limit: int, *, folder: int | None = None) -> bytes | None:
    """The bytes of a regular file, or `None` if there is none; `folder` is an open directory to start from.

    Raises:
        ArtifactRefused: ``malformed``: a symbolic link, a device, a folder, or more than `limit` bytes.
        OSError: if the disk fails.
    """
    try:
        # NONBLOCK: opening a FIFO that someone left there must not hang a start.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENOTDIR):
            raise ArtifactRefused("malformed", f"{path} is not a plain file; it is not read") from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ArtifactRefused("malformed", f"{path} is not a plain file; it is not read")
        if status.st_size > limit:
            raise ArtifactRefused("malformed", f"{path} has {status.st_size} bytes, over the limit of {limit}")
        with os.fdopen(descriptor, "rb", closefd=False) as source:
            data = source.read(limit + 1)
    finally:
        os.close(descriptor)
    if len(data) > limit:
        raise ArtifactRefused("malformed", f"{path} grew over the limit of {limit} bytes while it was read")
    return data


@contextmanager
def held_folder(path: Path, *, create: bool = False) -> Iterator[int]:
    """`path` as an open directory, so that nobody can swap it for a link between two steps.

    Raises:
        OSError: if it is not a directory, or can't be made.
    """
    if create:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def replace_file(folder: int, name: str, data: bytes, *, durable: bool = True, only_new: bool = False) -> bool:
    """Make ``name`` in the open `folder` hold exactly `data`, mode 0600, in one step; whether it was written.

    What was written is read back from the disk before it becomes visible. With `only_new` a file that is
    already there stays, and the answer is `False`.

    Raises:
        OSError: if the disk fails, or does not return what was written; nothing is visible then.
    """
    temporary = f"{TEMPORARY}{secrets.token_hex(8)}.tmp"
    descriptor = os.open(
        temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder
    )
    try:
        with os.fdopen(descriptor, "r+b") as target:
            target.write(data)
            target.flush()
            _give_to_owner(target.fileno(), folder)
            if durable:
                os.fsync(target.fileno())
            target.seek(0)
            if target.read() != data:
                raise OSError(
                    errno.EIO, f"{name}: the disk returned other bytes than were written; nothing was changed"
                )
        if only_new:
            try:
                os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
            except FileExistsError:
                return False
            return True
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        temporary = ""
        return True
    finally:
        if temporary:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)
        if durable:
            sync_folder(folder)


def sync_folder(folder: int) -> None:
    """Make names in the open `folder` survive a power cut, where the file system can."""
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.EROFS):
            raise


def _give_to_owner(descriptor: int, folder: int) -> None:
    """A daemon that runs as root leaves files that the engine's user, who owns the folder, can read."""
    if os.geteuid() == 0:
        owner = os.fstat(folder)
        if owner.st_uid != 0:
            os.fchown(descriptor, owner.st_uid, owner.st_gid)
