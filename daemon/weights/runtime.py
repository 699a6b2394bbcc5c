"""The six calls of the CUDA runtime that sharing needs, and the same six of HIP."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from typing import TYPE_CHECKING, Any, Final, Protocol

from warmseed.daemon.weights.errors import MessageRefused, UnsupportedPlatformForIPCError, WeightCacheError

if TYPE_CHECKING:
    import torch

__all__ = ["HANDLE_BYTES", "GpuRuntime", "handle_bytes", "load_runtime", "set_handle_bytes"]

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
    """The runtime that the installed torch was built for.

    Raises:
        UnsupportedPlatformForIPCError: torch has no GPU support, or the bindings are missing.
    """
    import torch

    if torch.version.hip is not None:
        return _Hip()
    if torch.version.cuda is None:
        raise UnsupportedPlatformForIPCError("this torch is built without CUDA and ROCm: no GPU memory to share")
    return _Cuda()


def handle_bytes(handle: Any) -> bytes:
    """The bytes of a cuda-bindings IPC handle, read where it lies: version 13.5 has no name for them any more."""
    return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)


def set_handle_bytes(handle: Any, content: bytes) -> None:
    """Make the handle the one that `content` describes.

    Raises:
        MessageRefused: `content` has another length than a handle.
    """
    if len(content) != HANDLE_BYTES:
        raise MessageRefused(f"an IPC handle has {len(content)} bytes, not {HANDLE_BYTES}; nothing is mapped")
    ctypes.memmove(handle.getPtr(), content, HANDLE_BYTES)


class _Cuda:
    def __init__(self) -> None:
        try:
            self._cudart: Any = importlib.import_module("cuda.bindings.runtime")
        except ImportError as error:
            raise UnsupportedPlatformForIPCError(
                "the package cuda-bindings is missing: install it to share GPU memory"
            ) from error

    def malloc(self, nbytes: int, device: torch.device) -> int:
        import torch

        with torch.cuda.device(device):
            status, pointer = self._cudart.cudaMalloc(nbytes)
            if int(status) == _OUT_OF_MEMORY:  # torch's cache may hold what the driver lacks
                self._cudart.cudaGetLastError()
                torch.cuda.empty_cache()
                status, pointer = self._cudart.cudaMalloc(nbytes)
        self._check(status, f"allocating a segment of {nbytes} bytes on {device}")
        return int(pointer)

    def free(self, pointer: int, device: torch.device) -> None:
        import torch

        with torch.cuda.device(device):
            self._check(self._cudart.cudaFree(pointer)[0], f"freeing a segment on {device}")

    def get_handle(self, pointer: int, device: torch.device) -> bytes:
        import torch

        with torch.cuda.device(device):
            status, handle = self._cudart.cudaIpcGetMemHandle(pointer)
        self._check(status, f"exporting a segment of {device}")
        return handle_bytes(handle)

    def open_handle(self, handle: bytes, device: torch.device) -> int:
        import torch

        raw = self._cudart.cudaIpcMemHandle_t()
        set_handle_bytes(raw, handle)
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # the context must exist before a handle can be opened in it
            status, pointer = self._cudart.cudaIpcOpenMemHandle(raw, _LAZY_PEER_ACCESS)
        self._check(status, f"mapping the daemon's segment on {device}")
        return int(pointer)

    def close_handle(self, pointer: int, device: torch.device) -> None:
        import torch

        # At interpreter exit the context may be gone already, and the mapping with it.
        with contextlib.suppress(Exception), torch.cuda.device(device):
            self._cudart.cudaIpcCloseMemHandle(pointer)

    def _check(self, status: Any, doing: str) -> None:
        if int(status):
            self._cudart.cudaGetLastError()  # clears it, or torch reports it at some later, innocent call
            raise WeightCacheError(f"{doing} failed: {status.name} ({int(status)})")


class _HipHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class _Hip:
    """HIP by ctypes: it has no Python package of its own everywhere torch for ROCm is."""

    def __init__(self) -> None:
        try:
            self._hip = ctypes.CDLL("libamdhip64.so")
        except OSError as error:
            raise UnsupportedPlatformForIPCError(f"libamdhip64.so can't be loaded: {error}") from error

    def malloc(self, nbytes: int, device: torch.device) -> int:
        import torch

        pointer = ctypes.c_void_p()
        with torch.cuda.device(device):
            status = self._hip.hipMalloc(ctypes.byref(pointer), ctypes.c_size_t(nbytes))
            if status == _OUT_OF_MEMORY:
                self._hip.hipGetLastError()
                torch.cuda.empty_cache()
                status = self._hip.hipMalloc(ctypes.byref(pointer), ctypes.c_size_t(nbytes))
        self._check(status, f"allocating a segment of {nbytes} bytes on {device}")
        return pointer.value or 0

    def free(self, pointer: int, device: torch.device) -> None:
        import torch

        with torch.cuda.device(device):
            self._check(self._hip.hipFree(ctypes.c_void_p(pointer)), f"freeing a segment on {device}")

    def get_handle(self, pointer: int, device: torch.device) -> bytes:
        import torch

        handle = _HipHandle()
        with torch.cuda.device(device):
            status = self._hip.hipIpcGetMemHandle(ctypes.byref(handle), ctypes.c_void_p(pointer))
        self._check(status, f"exporting a segment of {device}")
        return bytes(handle)

    def open_handle(self, handle: bytes, device: torch.device) -> int:
        import torch

        pointer = ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream()
            raw = _HipHandle.from_buffer_copy(handle)
            status = self._hip.hipIpcOpenMemHandle(ctypes.byref(pointer), raw, ctypes.c_uint(_LAZY_PEER_ACCESS))
        self._check(status, f"mapping the daemon's segment on {device}")
        return pointer.value or 0

    def close_handle(self, pointer: int, device: torch.device) -> None:
        import torch

        with contextlib.suppress(Exception), torch.cuda.device(device):
            self._hip.hipIpcCloseMemHandle(ctypes.c_void_p(pointer))

    def _check(self, status: int, doing: str) -> None:
        if status:
            self._hip.hipGetLastError()
            raise WeightCacheError(f"{doing} failed: HIP error {status}")
