"""A model's tensors in shared segments: the same tensors, no second copy, nothing forgotten."""

from __future__ import annotations

import fcntl
import os

import pytest
import torch
from tests.support.weights_model import digests, loaded, shell
from torch.multiprocessing.reductions import StorageWeakRef

from warmseed.daemon.weights.errors import (
    ExportRefused,
    UnsupportedPlatformForIPCError,
    UnsupportedQuantForIPCError,
)
from warmseed.daemon.weights.export import check_exportable, export_model, require_shareable
from warmseed.daemon.weights.layout import SegmentRecord
from warmseed.daemon.weights.memfd import MemfdSegment, MemfdTransport
from warmseed.daemon.weights.transport import transport_for


def module(**tensors: torch.Tensor) -> torch.nn.Module:
    made = torch.nn.Module()
    for name, tensor in tensors.items():
        made.register_buffer(name, tensor)
    return made


@pytest.mark.parametrize("segment_bytes", [1, 512, 1 << 30])
def test_the_model_is_what_it_was_bit_for_bit_whatever_the_segments_size(segment_bytes: int) -> None:
    model = loaded()
    before = digests(model)
    kept = [(name, id(p)) for name, p in model.named_parameters()]
    exported = export_model(model, device="cpu", segment_bytes=segment_bytes)
    assert digests(model) == before
    assert [(name, id(p)) for name, p in model.named_parameters()] == kept
    exported.release()


def test_ties_are_exported_once_and_overlapping_tensors_keep_overlapping() -> None:
    model = loaded()
    exported = export_model(model, device="cpu")
    names = [record.name for record in exported.tensors]
    assert exported.aliases["head.weight"] == "embed.weight"
    assert exported.aliases["layers.1.rotary"] == "layers.0.rotary"
    assert set(names).isdisjoint(exported.aliases)
    assert {"nothing", "steps", "layers.0.rotary"} <= set(names)
    with torch.no_grad():
        model.layers[1].marked[2, 0] = 77.0
    assert model.layers[2].marked[0, 0] == 77.0
    exported.release()


def test_bytes_are_accounted_for_exactly() -> None:
    model = loaded()
    distinct = {id(t): t for t in [*model.parameters(), *model.buffers()]}.values()
    exported = export_model(model, device="cpu")
    overlap = 5 * 4  # of the two views into one storage
    assert exported.nbytes == sum(t.numel() * t.element_size() for t in distinct) - overlap
    memory = exported.memory(0, "cpu0")
    assert memory.nbytes == exported.nbytes
    assert memory.segment_bytes == sum(os.fstat(fd).st_size for fd in exported.descriptors)
    assert memory.segment_bytes - memory.nbytes < 512 * memory.tensors
    exported.release()
    assert exported.memory(0, "cpu0").segment_bytes == 0


def test_each_original_is_freed_before_the_next_one_is_copied() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(6)))
    alive = [StorageWeakRef(layer.weight.untyped_storage()) for layer in model]
    counts: list[int] = []

    class Counting(MemfdTransport):
        def allocate(self, nbytes: int, device: torch.device) -> MemfdSegment:
            segment = super().allocate(nbytes, device)
            write = segment.write

            def counted(offset: int, source: torch.Tensor) -> None:
                counts.append(sum(not ref.expired() for ref in alive))
                write(offset, source)

            segment.write = counted  # type: ignore[method-assign]
            return segment

    export_model(model, device="cpu", segment_bytes=40_000, transport=Counting()).release()
    assert counts == [6, 5, 4, 3, 2, 1]


def test_sealed_segments_can_be_changed_by_nobody_who_has_the_descriptor() -> None:
    exported = export_model(module(w=torch.ones(1000)), device="cpu")
    (descriptor,) = exported.descriptors
    with pytest.raises(PermissionError):
        os.pwrite(descriptor, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 10)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, 0)
    exported.release()


def test_the_daemons_own_writes_do_not_reach_the_segments() -> None:
    model = module(w=torch.ones(1000))
    exported = export_model(model, device="cpu")
    model.w.zero_()
    mapping = MemfdTransport().map(exported.segment_records[0], exported.descriptors[0], torch.device("cpu"))
    assert mapping.window(0, 4000).view(torch.float32).eq(1).all()
    exported.release()


def test_after_a_release_the_model_is_empty_and_the_memory_gone() -> None:
    model = loaded()
    exported = export_model(model, device="cpu")
    descriptors = exported.descriptors
    exported.release()
    exported.release()
    assert all(t.numel() == 0 for t in [*model.parameters(), *model.buffers()])
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


@pytest.mark.parametrize("dtype", ["bool", "uint16", "float8_e4m3fn", "float8_e8m0fnu", "complex64", "float64"])
def test_dtypes_of_every_width_travel(dtype: str) -> None:
    tensor = torch.zeros(7, dtype=getattr(torch, dtype))
    exported = export_model(module(w=tensor, b=torch.ones(3)), device="cpu")
    assert exported.tensors[0].dtype == dtype
    exported.release()


def test_a_segment_is_as_long_as_what_it_holds_and_a_large_tensor_has_one_of_its_own() -> None:
    exported = export_model(
        module(a=torch.ones(100), b=torch.ones(5000), c=torch.ones(100)), device="cpu", segment_bytes=2048
    )
    assert [record.nbytes for record in exported.segment_records] == [400, 20000, 400]
    exported.release()


def test_a_model_without_tensors_is_exported_as_nothing() -> None:
    exported = export_model(torch.nn.Module(), device="cpu")
    assert (exported.nbytes, exported.tensors, exported.segments) == (0, (), [])


def test_a_hundred_thousand_tensors_are_exported() -> None:
    model = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(2)) for _ in range(100_000))
    exported = export_model(model, device="cpu")
    assert len(exported.tensors) == 100_000
    assert len(exported.segments) == 1
    exported.release()


def test_tensors_without_bytes_are_refused_by_name() -> None:
    with pytest.raises(ExportRefused, match="steps has no bytes"):
        export_model(shell(), device="cpu")
    with pytest.raises(ExportRefused, match="sparse"):
        export_model(module(s=torch.ones(3, 3).to_sparse()), device="cpu")


def test_memory_of_other_devices_can_not_be_shared() -> None:
    for device in ("mps", "xpu", "hpu"):
        with pytest.raises(UnsupportedPlatformForIPCError, match=device):
            transport_for(device)


def test_other_systems_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warmseed.daemon.weights.transport.sys.platform", "darwin")
    with pytest.raises(UnsupportedPlatformForIPCError, match="darwin"):
        transport_for("cpu")


def test_quantization_that_hides_state_is_refused_on_the_empty_shell_already() -> None:
    model = shell()
    model.layers[1].weight.quant_state = object()
    with pytest.raises(UnsupportedQuantForIPCError, match=r"layers\.1\.weight"):
        check_exportable(model)


def test_methods_that_do_not_take_processed_weights_are_named() -> None:
    require_shareable([("layers.0", "fp8", True)])
    with pytest.raises(UnsupportedQuantForIPCError, match=r"gguf.*2 layers.*layers\.1"):
        require_shareable([("layers.0", "fp8", True), ("layers.1", "gguf", False), ("layers.2", "gguf", False)])


def test_a_failure_half_way_gives_every_segment_back() -> None:
    class Failing(MemfdTransport):
        made: list[MemfdSegment]

        def __init__(self) -> None:
            self.made = []

        def allocate(self, nbytes: int, device: torch.device) -> MemfdSegment:
            if len(self.made) == 2:
                raise OSError(28, "No space left on device")
            self.made.append(super().allocate(nbytes, device))
            return self.made[-1]

    transport = Failing()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space"):
        export_model(
            module(a=torch.ones(99), b=torch.ones(99), c=torch.ones(99)),
            device="cpu",
            segment_bytes=1,
            transport=transport,
        )
    assert all(segment.descriptor == -1 for segment in transport.made)
    del transport
    assert len(os.listdir("/proc/self/fd")) == before


def test_records_say_what_a_segment_is() -> None:
    segment = MemfdSegment(4096)
    assert segment.record == SegmentRecord("memfd", 4096)
    assert segment.checksum() is None
    segment.close()
