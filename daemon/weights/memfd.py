"""CPU segments: sealed memfds. The daemon writes once; every map is copy-on-write, so no process changes another's.

Seals are what makes the bytes trustworthy to map: F_SEAL_SHRINK and F_SEAL_GROW rule out SIGBUS, F_SEAL_WRITE rules
out changes (memfd_create(2), fcntl(2)).
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import stat
from typing import TYPE_CHECKING, Final

from warmseed.daemon.weights.errors import MessageRefused
from warmseed.daemon.weights.layout import SegmentRecord

if TYPE_CHECKING:
    import torch

__all__ = ["MemfdTransport"]

_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_MAP_NORESERVE: Final = 0x4000  # <asm-generic/mman-common.h>; mmap has a name for it from Python 3.13 on
_REQUIRED: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class MemfdTransport:
    """Sharing of host memory on Linux."""

    def allocate(self, nbytes: int, device: torch.device) -> MemfdSegment:
        return MemfdSegment(nbytes)

    def settle(self, device: torch.device) -> None:
        """Nothing to do: large freed host tensors go back to the system by themselves."""

    def map(self, record: SegmentRecord, descriptor: int | None, device: torch.device) -> MemfdMapping:
        """Map the sealed memfd `descriptor`.

        Raises:
            MessageRefused: `descriptor` is no sealed memory of the stated size.
            OSError: the kernel refuses the map.
        """
        if descriptor is None:
            raise MessageRefused("a memfd segment came without its file descriptor; nothing is mapped")
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != record.nbytes:
            raise MessageRefused(
                f"a file descriptor is no memory of {record.nbytes} bytes (mode {status.st_mode:o}, "
                f"{status.st_size} bytes); nothing is mapped"
            )
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError as error:  # an ordinary file has no seals at all
            raise MessageRefused(
                f"a file descriptor can't carry seals ({error.strerror}); nothing is mapped"
            ) from error
        if seals & _REQUIRED != _REQUIRED:
            raise MessageRefused(f"a memfd came with seals {seals:#x}, not sealed for good; nothing is mapped")
        return MemfdMapping(_map(descriptor, record.nbytes))


class MemfdSegment:
    """A memfd while the daemon fills it, and afterwards."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._fd = os.memfd_create("warmseed-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, nbytes)
            # Private from the start: pages that this process never writes show what write() puts into the file,
            # and a private map does not stand in the way of F_SEAL_WRITE.
            self._mapping = MemfdMapping(_map(self._fd, nbytes))
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def record(self) -> SegmentRecord:
        return SegmentRecord("memfd", self._nbytes)

    @property
    def descriptor(self) -> int:
        return self._fd

    def write(self, offset: int, source: torch.Tensor) -> None:
        """Copy the bytes of `source` to `offset`.

        Raises:
            OSError: no memory is left (ENOSPC, or ENOMEM within a cgroup).
        """
        nbytes = source.numel()
        view = memoryview((ctypes.c_ubyte * nbytes).from_address(source.data_ptr())).cast("B")
        done = 0
        while done < nbytes:
            done += os.pwrite(self._fd, view[done:], offset + done)

    def window(self, offset: int, nbytes: int) -> torch.Tensor:
        return self._mapping.window(offset, nbytes)

    def seal(self) -> None:
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)

    def checksum(self) -> None:
        """`None`: sealed bytes don't change."""

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class MemfdMapping:
    """A private map of a memfd; the pages are shared until someone writes to them."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._mapped = mapped

    def window(self, offset: int, nbytes: int) -> torch.Tensor:
        import torch

        # The tensor's storage keeps the map alive; there is nothing to unmap by hand.
        return torch.frombuffer(self._mapped, dtype=torch.uint8, count=nbytes, offset=offset)


def _map(descriptor: int, nbytes: int) -> mmap.mmap:
    # NORESERVE: copy-on-write pages that nobody is going to write must not count as promised memory.
    flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
    return mmap.mmap(descriptor, nbytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
