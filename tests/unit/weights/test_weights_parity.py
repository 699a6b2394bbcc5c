"""The comparison that proves parity must notice every single bit."""

from __future__ import annotations

import math

import pytest
import torch
from tests.support.weights_model import loaded

from warmseed.daemon.weights import parity
from warmseed.daemon.weights.parity import compare_models


def test_a_model_equals_another_load_of_itself() -> None:
    report = compare_models(loaded(), loaded())
    assert report.equal
    assert report.tensors == len(dict(loaded().named_parameters(remove_duplicate=False))) + 5
    assert report.nbytes > 1000


@pytest.mark.parametrize("piece", [1, 7, 64 << 20])
def test_one_flipped_bit_is_found_named_and_placed(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "_PIECE", piece)
    other = loaded()
    other.layers[1].marked.data.view(torch.int32)[2, 3] ^= 1
    differences = compare_models(other, loaded()).differences
    assert [(d.name, d.what) for d in differences] == [
        ("layers.1.marked", "values"),
        ("layers.2.marked", "values"),
    ]
    assert "1 of 60 bytes differ, from element 13 on" in differences[0].detail


def test_bits_count_and_not_numbers() -> None:
    one, two = torch.nn.Module(), torch.nn.Module()
    one.register_buffer("w", torch.tensor([0.0, math.nan]))
    two.register_buffer("w", torch.tensor([-0.0, math.nan]))
    (difference,) = compare_models(one, two).differences
    assert "1 of 8 bytes differ, from element 0" in difference.detail


def test_what_is_missing_extra_or_of_another_make_is_named() -> None:
    other = loaded()
    del other.layers[0].scale
    other.register_buffer("more", torch.ones(2))
    other.layers[1].weight = torch.nn.Parameter(other.layers[1].weight.data.float())
    other.layers[2].weight = torch.nn.Parameter(other.layers[2].weight.data[:3])
    other.layers[0].weight = torch.nn.Parameter(other.layers[0].weight.data.contiguous())
    other.head.weight = torch.nn.Parameter(other.embed.weight.data.clone())
    found = {d.name: d.what for d in compare_models(other, loaded()).differences}
    assert found == {
        "layers.0.scale": "missing",
        "more": "unexpected",
        "layers.1.weight": "dtype",
        "layers.2.weight": "shape",
        "layers.0.weight": "stride",
        "head.weight": "tied",
    }


def test_a_single_element_of_an_odd_stride_is_compared() -> None:
    one, two = torch.nn.Module(), torch.nn.Module()
    one.register_buffer("w", torch.ones(1, 1).as_strided((1, 1), (5, 0)))
    two.register_buffer("w", torch.zeros(1, 1).as_strided((1, 1), (5, 0)))
    assert [d.what for d in compare_models(one, two).differences] == ["values"]
