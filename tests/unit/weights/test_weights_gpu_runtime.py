"""What can be known of the GPU side without a GPU: handles as bytes, and plain words where there is no platform."""

from __future__ import annotations

import importlib

import pytest
import torch

from warmseed.daemon.weights.cuda import CudaTransport
from warmseed.daemon.weights.errors import MessageRefused, UnsupportedPlatformForIPCError
from warmseed.daemon.weights.runtime import HANDLE_BYTES, handle_bytes, load_runtime, set_handle_bytes


def test_a_handle_of_the_installed_bindings_takes_and_gives_its_bytes() -> None:
    runtime = importlib.import_module("cuda.bindings.runtime")
    handle = runtime.cudaIpcMemHandle_t()
    content = bytes(range(255, 255 - HANDLE_BYTES, -1))
    set_handle_bytes(handle, content)
    assert handle_bytes(handle) == content


@pytest.mark.parametrize("length", [0, 63, 65])
def test_bytes_that_are_no_handle_never_reach_its_memory(length: int) -> None:
    with pytest.raises(MessageRefused):
        set_handle_bytes(None, b"x" * length)


@pytest.mark.skipif(torch.version.cuda is not None or torch.version.hip is not None, reason="this torch has a platform")
def test_a_torch_without_gpu_support_is_told_apart_from_a_missing_daemon() -> None:
    with pytest.raises(UnsupportedPlatformForIPCError, match="without CUDA and ROCm"):
        load_runtime()
    with pytest.raises(UnsupportedPlatformForIPCError):
        CudaTransport()
