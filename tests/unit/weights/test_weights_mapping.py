"""Tensors registered in an engine's empty model, as its own loader would have."""

from __future__ import annotations

import pytest
import torch
from tests.support.weights_model import Marked, digests, loaded, shell

from warmseed.daemon.weights.errors import WeightCacheUnavailable
from warmseed.daemon.weights.export import Exported, export_model
from warmseed.daemon.weights.mapping import MapReport, map_tensors
from warmseed.daemon.weights.memfd import MemfdTransport
from warmseed.daemon.weights.views import copy_tensors, map_segments, view_tensors

CPU = torch.device("cpu")


def mapped_into(model: torch.nn.Module, exported: Exported, *, copy: bool = False) -> MapReport:
    mapped = map_segments(exported.segment_records, exported.descriptors, CPU)
    tensors = (copy_tensors if copy else view_tensors)(exported.tensors, mapped, CPU)
    return map_tensors(model, exported.tensors, tensors, exported.aliases, CPU)


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("segment_bytes", [1, 512, 1 << 30])
def test_the_shell_becomes_the_model_bit_for_bit(copy: bool, segment_bytes: int) -> None:
    source, model = loaded(), shell()
    before = digests(source)
    exported = export_model(source, device="cpu", segment_bytes=segment_bytes)
    report = mapped_into(model, exported, copy=copy)
    exported.release()
    assert digests(model) == before
    assert report.materialised == ()
    assert report.unregistered == ()


def test_parameters_keep_class_and_attributes_and_ties_are_one_object_again() -> None:
    model = shell()
    exported = export_model(loaded(), device="cpu")
    mapped_into(model, exported)
    assert isinstance(model.layers[0].marked, Marked)
    assert model.layers[0].marked.note == "kept"
    assert model.layers[0].scale.loader == "kept"
    assert model.head.weight is model.embed.weight
    assert model.layers[0].rotary is model.layers[1].rotary is model.layers[2].rotary
    assert list(dict(model.named_parameters())) == list(dict(loaded().named_parameters()))
    exported.release()


def test_a_state_dict_has_the_same_keys_as_the_originals() -> None:
    source, model = loaded(), shell()
    keys = set(source.state_dict())
    exported = export_model(source, device="cpu")
    mapped_into(model, exported)
    assert set(model.state_dict()) == keys
    exported.release()


@pytest.mark.parametrize("copy", [False, True])
def test_tensors_that_overlapped_still_do(copy: bool) -> None:
    model = shell()
    exported = export_model(loaded(), device="cpu")
    mapped_into(model, exported, copy=copy)
    with torch.no_grad():
        model.layers[1].marked[2, 0] = 77.0
    assert model.layers[2].marked[0, 0] == 77.0
    exported.release()


def test_every_tensor_has_a_storage_of_its_own_and_keeps_the_memory_alive() -> None:
    exported = export_model(loaded(), device="cpu")
    tensors = view_tensors(exported.tensors, map_segments(exported.segment_records, exported.descriptors, CPU), CPU)
    exported.release()
    kept = tensors.pop("embed.weight")
    tensors.clear()
    assert kept.untyped_storage().nbytes() == kept.numel() * kept.element_size()
    assert torch.isfinite(kept.float()).all()


def test_what_the_daemon_lacks_becomes_zeros_and_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    model = shell()
    with torch.device("meta"):
        model.layers[0].new = torch.nn.Parameter(torch.empty(3))
        model.register_buffer("old", torch.empty(2), persistent=False)
        model.stray = torch.empty(4)
    model.layers[0].new.note = "kept"
    exported = export_model(loaded(), device="cpu")
    report = mapped_into(model, exported)
    assert set(report.materialised) == {"layers.0.new", "old"}
    assert model.layers[0].new.tolist() == [0, 0, 0]
    assert model.layers[0].new.note == "kept"
    assert "old" not in model.state_dict()
    assert report.unregistered == ("stray",)
    assert "layers.0.new" in caplog.text
    assert "stray" in caplog.text
    exported.release()


def test_shapes_that_processing_changed_are_taken_over_and_reported() -> None:
    model = shell()
    with torch.device("meta"):
        model.layers[0].weight = torch.nn.Parameter(torch.empty(8, 16, dtype=torch.bfloat16))
    exported = export_model(loaded(), device="cpu")
    assert mapped_into(model, exported).reshaped == ("layers.0.weight",)
    assert model.layers[0].weight.shape == (16, 8)
    exported.release()


def test_another_models_shell_is_refused() -> None:
    exported = export_model(loaded(), device="cpu")
    with pytest.raises(WeightCacheUnavailable, match=r"embed\.weight") as caught:
        mapped_into(torch.nn.Module(), exported)
    assert caught.value.reason == "error"
    exported.release()


def test_a_buffer_that_became_a_parameter_moves_over() -> None:
    model = shell()
    del model.layers[0].scale
    with torch.device("meta"):
        model.layers[0].register_buffer("scale", torch.empty(()))
    model.layers[1].weight = None
    exported = export_model(loaded(), device="cpu")
    mapped_into(model, exported)
    assert isinstance(model.layers[0].scale, torch.nn.Parameter)
    assert "scale" not in dict(model.layers[0].named_buffers())
    assert isinstance(model.layers[1].weight, torch.nn.Parameter)
    exported.release()


def test_descriptors_may_be_closed_after_the_map() -> None:
    exported = export_model(loaded(), device="cpu")
    mapping = MemfdTransport().map(exported.segment_records[0], exported.descriptors[0], CPU)
    exported.release()
    assert mapping.window(0, 4).numel() == 4
