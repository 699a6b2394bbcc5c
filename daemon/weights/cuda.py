"""GPU segments: memory of the driver's, shared by one raw IPC handle each.

Each segment is an allocation of its own (cudaMalloc), so that its handle covers exactly its bytes and no caching
allocator stands between; torch sees it through ``__cuda_array_interface__``. Nothing counts references per tensor,
so a killed engine leaves nothing behind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from warmseed.daemon.weights.errors import MessageRefused
from warmseed.daemon.weights.layout import SegmentRecord
from warmseed.daemon.weights.runtime import HANDLE_BYTES, GpuRuntime, load_runtime
from warmseed.daemon.weights.transport import CHECKED_BYTES

if TYPE_CHECKING:
    import torch

__all__ = ["CudaTransport"]

_WHOLE_BLOCK: Final = 2 << 20  # bytes; CUDA programming guide, interprocess communication


class CudaTransport:
    """Sharing of GPU memory through CUDA or HIP IPC handles."""

    def __init__(self) -> None:
        self._runtime = load_runtime()

    def allocate(self, nbytes: int, device: torch.device) -> CudaSegment:
        return CudaSegment(self._runtime, nbytes, device)

    def settle(self, device: torch.device) -> None:
        """Give blocks that torch's allocator cached for the moved tensors back to the driver."""
        import torch

        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()

    def map(self, record: SegmentRecord, descriptor: int | None, device: torch.device) -> CudaMapping:
        """Map the segment behind the handle in `record` on `device`.

        Raises:
            MessageRefused: the handle has another length than the platform's.
            WeightCacheError: the driver refuses to map the handle.
        """
        if len(record.handle) != HANDLE_BYTES:
            raise MessageRefused(f"an IPC handle has {len(record.handle)} bytes, not {HANDLE_BYTES}; nothing is mapped")
        return CudaMapping(self._runtime, self._runtime.open_handle(record.handle, device), device)


class CudaSegment:
    """GPU memory of the daemon's."""

    def __init__(self, runtime: GpuRuntime, nbytes: int, device: torch.device) -> None:
        self._runtime = runtime
        self._nbytes = nbytes
        self._device = device
        # The driver cuts small allocations out of blocks of 2 MiB, and a handle always shares the whole block.
        self._pointer = runtime.malloc(-(-nbytes // _WHOLE_BLOCK) * _WHOLE_BLOCK, device)
        try:
            self._handle = runtime.get_handle(self._pointer, device)
        except BaseException:
            self.close()
            raise

    @property
    def record(self) -> SegmentRecord:
        return SegmentRecord("cuda_ipc", self._nbytes, self._handle)

    @property
    def descriptor(self) -> None:
        return None

    def write(self, offset: int, source: torch.Tensor) -> None:
        self.window(offset, source.numel()).copy_(source)

    def window(self, offset: int, nbytes: int) -> torch.Tensor:
        return _window(self._pointer + offset, nbytes, self._device, self)

    def seal(self) -> None:
        """Wait for the copies; the memory itself stays writable, which is why `checksum` exists."""
        import torch

        torch.cuda.synchronize(self._device)

    def checksum(self) -> tuple[int, ...]:
        """One sum of 64-bit words per MiB: reads every byte at memory speed, on the GPU."""
        import torch

        whole = self._nbytes // CHECKED_BYTES * CHECKED_BYTES
        sums: list[int] = []
        if whole:
            words = self.window(0, whole).view(torch.int64).view(-1, CHECKED_BYTES // 8)
            sums += words.sum(dim=1).tolist()
        if whole < self._nbytes:
            sums.append(int(self.window(whole, self._nbytes - whole).sum(dtype=torch.int64)))
        return tuple(sums)

    def close(self) -> None:
        if self._pointer:
            self._runtime.free(self._pointer, self._device)
            self._pointer = 0


class CudaMapping:
    """GPU memory of another process. Unmapped when the last tensor over it is gone."""

    def __init__(self, runtime: GpuRuntime, pointer: int, device: torch.device) -> None:
        self._runtime = runtime
        self._pointer = pointer
        self._device = device

    def window(self, offset: int, nbytes: int) -> torch.Tensor:
        return _window(self._pointer + offset, nbytes, self._device, self)

    def __del__(self) -> None:
        self._runtime.close_handle(self._pointer, self._device)


class _Array:
    """Bytes of GPU memory, described the way torch reads; keeps their owner alive."""

    __slots__ = ("__cuda_array_interface__", "_owner")

    def __init__(self, pointer: int, nbytes: int, owner: object) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "strides": None, "version": 3,
        }  # fmt: skip


def _window(pointer: int, nbytes: int, device: torch.device, owner: object) -> torch.Tensor:
    import torch

    return torch.as_tensor(_Array(pointer, nbytes, owner), device=device)
