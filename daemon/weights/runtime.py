"""The six calls of the CUDA runtime that sharing needs, and the same six of HIP."""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING, Any, Final, Protocol

from warmseed.daemon.weights.errors import MessageRefused, UnsupportedPlatformForIPCError, WeightCacheError

if TYPE_CHECKING:
    import torch

__all__ = ["HANDLE_BYTES", "GpuRuntime", "load_runtime"]

HANDLE_BYTES: Final = 64  # CUDA_IPC_HANDLE_SIZE, and HIP's
_OUT_OF_MEMORY: Final = 2  # cudaErrorMemoryAllocation, hipErrorOutOfMemory
_LAZY_PEER_ACCESS: Final = 1  # cudaIpcMemLazyEnablePeerAccess, the only flag there is


class GpuRuntime(Protocol):
    """Raw memory and IPC handles of one GPU platform."""

    def malloc(self, nbytes: int, device: torch.device) -> int: ...
    def free(self, pointer: int, device: torch.device) -> None: ...
    def get_handle(self, pointer: int, device: torch.device) -> bytes: ...
    def open_handle(self, handle: bytes, device: torch.device) -> int: ...
    def close_handle(self, pointer: int, device: torch.device) -> None: ...


def load_runtime() -> GpuRuntime:
    """The runtime that the installed torch was built for, as torch has loaded it.

    Raises:
        UnsupportedPlatformForIPCError: torch has no GPU support, or its runtime can't be found.
    """
    import torch

    if torch.version.hip is not None:
        return _Runtime("hip", "libamdhip64.so")
    if torch.version.cuda is None:
        raise UnsupportedPlatformForIPCError("this torch is built without CUDA and ROCm: no GPU memory to share")
    return _Runtime("cuda", f"libcudart.so.{torch.version.cuda.partition('.')[0]}")


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t, hipIpcMemHandle_t: 64 bytes that mean nothing here; passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class _Runtime:
    """CUDA's or HIP's runtime, which name the same calls ``cudaMalloc`` and ``hipMalloc``.

    By ctypes and not through a package of bindings: the library is in the process already, because torch needs it
    (dlopen finds it by its SONAME), while importing the bindings takes longer than to map all the weights.
    """

    def __init__(self, prefix: str, library: str) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise UnsupportedPlatformForIPCError(
                f"{library} can't be loaded, though this torch is built for it: {error}"
            ) from error
        self._prefix = prefix
        self._call("GetErrorName").restype = ctypes.c_char_p

    def malloc(self, nbytes: int, device: torch.device) -> int:
        import torch

        pointer = ctypes.c_void_p()
        with torch.cuda.device(device):
            status = self._call("Malloc")(ctypes.byref(pointer), ctypes.c_size_t(nbytes))
            if status == _OUT_OF_MEMORY:  # torch's cache may hold what the driver lacks
                self._call("GetLastError")()
                torch.cuda.empty_cache()
                status = self._call("Malloc")(ctypes.byref(pointer), ctypes.c_size_t(nbytes))
        self._check(status, f"allocating a segment of {nbytes} bytes on {device}")
        return pointer.value or 0

    def free(self, pointer: int, device: torch.device) -> None:
        import torch

        with torch.cuda.device(device):
            self._check(self._call("Free")(ctypes.c_void_p(pointer)), f"freeing a segment on {device}")

    def get_handle(self, pointer: int, device: torch.device) -> bytes:
        import torch

        handle = _Handle()
        with torch.cuda.device(device):
            status = self._call("IpcGetMemHandle")(ctypes.byref(handle), ctypes.c_void_p(pointer))
        self._check(status, f"exporting a segment of {device}")
        return bytes(handle)

    def open_handle(self, handle: bytes, device: torch.device) -> int:
        import torch

        if len(handle) != HANDLE_BYTES:
            raise MessageRefused(f"an IPC handle has {len(handle)} bytes, not {HANDLE_BYTES}; nothing is mapped")
        pointer = ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # the context must exist before a handle can be opened in it
            raw = _Handle.from_buffer_copy(handle)
            status = self._call("IpcOpenMemHandle")(ctypes.byref(pointer), raw, ctypes.c_uint(_LAZY_PEER_ACCESS))
        self._check(status, f"mapping the daemon's segment on {device}")
        return pointer.value or 0

    def close_handle(self, pointer: int, device: torch.device) -> None:
        import torch

        # At interpreter exit the context may be gone already, and the mapping with it.
        with contextlib.suppress(Exception), torch.cuda.device(device):
            self._call("IpcCloseMemHandle")(ctypes.c_void_p(pointer))

    def _call(self, name: str) -> Any:
        return getattr(self._library, f"{self._prefix}{name}")

    def _check(self, status: int, doing: str) -> None:
        if status:
            self._call("GetLastError")()  # clears it, or torch reports it at some later, innocent call
            name = self._call("GetErrorName")(status)
            raise WeightCacheError(f"{doing} failed: {name.decode() if name else 'unknown error'} ({status})")
