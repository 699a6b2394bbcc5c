"""What can be known of the GPU side without a GPU: handles as bytes, and plain words where there is no platform."""

from __future__ import annotations

import types

import pytest
import torch

from warmseed.daemon.weights.cuda import CudaTransport
from warmseed.daemon.weights.errors import MessageRefused, UnsupportedPlatformForIPCError
from warmseed.daemon.weights.runtime import _Runtime, load_runtime


@pytest.mark.parametrize("length", [0, 63, 65])
def test_bytes_that_are_no_handle_never_reach_the_driver(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    library = _Library()
    monkeypatch.setattr("ctypes.CDLL", lambda name: library)
    runtime = _Runtime("cuda", "libcudart.so.13")
    with pytest.raises(MessageRefused):
        runtime.open_handle(b"x" * length, torch.device("cpu"))
    assert library.called == ["cudaGetErrorName"]


class _Library:
    """Stands where a CUDA runtime would be; notes what is asked for."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, name: str) -> types.SimpleNamespace:
        self.called.append(name)
        return types.SimpleNamespace()


def test_a_torch_without_gpu_support_is_told_apart_from_a_missing_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(UnsupportedPlatformForIPCError, match="without CUDA and ROCm"):
        load_runtime()
    with pytest.raises(UnsupportedPlatformForIPCError):
        CudaTransport()
