"""What a table's text may say, and what it may not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tables import H200, H200_V1, HOT, key_of, table_text, with_entry

from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.kinds.autotune.bounded import JsonLimits, parse_json
from warmseed.seeding.kinds.autotune.keys import encode_key, split_key
from warmseed.seeding.kinds.autotune.table import parse_table

MOE = (
    "('trtllm::fused_moe::gemm1', 'MoERunner', ((64, 2048), (128, 1536, 2048)), "
    "(torch.bfloat16, 8, 1, 0, 2, True, None, 'swiglu', 1.5))"
)


def test_a_table_from_a_real_gpu_is_accepted_and_spelled_the_same_again() -> None:
    table = parse_table(H200_V1)
    assert table.metadata == H200
    assert len(table.entries) == 6
    assert table.encode() == H200_V1.rstrip(b"\n")


@pytest.mark.parametrize(
    "value",
    [
        ["CublasFp8GemmRunner", 3],
        ["CublasFp8GemmRunner", -1, HOT],
        ["CublasFp8GemmRunner", 0, HOT, {"time_ms": 0.004345, "runner_up_ms": 0.01, "margin": 2.3, "candidates": 3}],
    ],
)
def test_entries_of_every_release_are_accepted_and_kept_element_for_element(value: list[Any]) -> None:
    table = parse_table(with_entry(key_of(7), value))
    assert table.entries[key_of(7)].as_value() == value


@pytest.mark.parametrize("tactic", [[128, 1], [[64, 128], [1, 2, "x"], None, True], 0, -1])
def test_tactics_of_runners_nobody_lists_may_be_indices_or_nested_lists(tactic: Any) -> None:
    assert parse_table(with_entry(MOE, ["MoERunner", tactic, HOT])).entries[MOE].tactic == tactic


def test_records_of_a_namespace_travel_with_the_table() -> None:
    table = parse_table(table_text(1, _records={"trtllm_moe": {"x": [1, {"y": 2}]}}))
    assert table.records == {"trtllm_moe": {"x": [1, {"y": 2}]}}
    assert parse_table(table.encode()) == table


def test_a_table_without_entries_is_no_error() -> None:
    assert parse_table(table_text(0)).entries == {}


# FlashInfer 0.7.2 raises on these, at every start, or loads them where it should not.
REFUSED: dict[str, bytes] = {
    "empty": b"",
    "truncated": H200_V1[:-100],
    "byte order mark": b"\xef\xbb\xbf" + H200_V1,
    "utf-16": H200_V1.decode().encode("utf-16"),
    "not utf-8": H200_V1.replace(b"H200", b"H\xff00"),
    "a list": b"[]",
    "a number": b"5",
    "null": b"null",
    "a string": b'"x"',
    "no metadata at all": b"{}",
    "no metadata": table_text(metadata=...),
    "metadata null": table_text(metadata=None),
    "metadata a list": table_text(metadata=[]),
    "metadata a string": table_text(metadata="NVIDIA H200"),
    "metadata empty": table_text(metadata={}),
    "metadata with a number": table_text(metadata={**H200, "gpu": 1}),
    "metadata with null": table_text(metadata={**H200, "gpu": None}),
    "metadata with a line break": table_text(metadata={**H200, "gpu": "a\nb"}),
    "metadata huge": table_text(metadata={**H200, **{f"f{n}": "x" for n in range(64)}}),
    "metadata lacking one field": table_text(metadata={k: v for k, v in H200.items() if k != "cudnn_version"}),
    "second metadata": H200_V1.rstrip()[:-1] + b', "_metadata": ' + json.dumps({**H200, "gpu": "x"}).encode() + b"}",
    "duplicate entry": table_text(1).rstrip()[:-1] + b"," + table_text(1, metadata=...).lstrip()[1:],
    "NaN": table_text(1, _records={"x": {"y": float("nan")}}),
    "infinity": table_text(1, _records={"x": {"y": float("inf")}}),
    "overflowing number": table_text(1).replace(b"0,", b"1e999,"),
    "5,000 digits": table_text(1, _records={"x": {"y": 0}}).replace(b'"y": 0', b'"y": ' + b"7" * 5000),
    "100,000 deep": b'{"_metadata":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "30 deep": table_text(1, _records={"x": {"y": json.loads("[" * 30 + "]" * 30)}}),
    "unknown section": table_text(1, _future={"x": 1}),
    "records a list": table_text(1, _records=[]),
    "records of scalars": table_text(1, _records={"x": 1}),
    "generation a number": table_text(1, _generation=7),
    "trailing text": H200_V1 + b"x",
    "two documents": H200_V1 + H200_V1,
    "comment": b"// x\n" + H200_V1,
    "entry a number": with_entry(key_of(1), 5),
    "entry empty": with_entry(key_of(1), []),
    "entry of one": with_entry(key_of(1), ["CublasFp8GemmRunner"]),
    "entry null": with_entry(key_of(1), None),
    "entry of five": with_entry(key_of(1), ["CublasFp8GemmRunner", 0, HOT, {}, 1]),
    "entry an object": with_entry(key_of(1), {"0": "CublasFp8GemmRunner", "1": 0}),
    "runner a number": with_entry(key_of(1), [7, 0, HOT]),
    "runner of another key": with_entry(key_of(1), ["CublasltBf16GemmRunner", 0, HOT]),
    "policy a number": with_entry(key_of(1), ["CublasFp8GemmRunner", 0, 7]),
    "policy null": with_entry(key_of(1), ["CublasFp8GemmRunner", 0, None]),
    "policy nested": with_entry(key_of(1), ["CublasFp8GemmRunner", 0, [["x"]]]),
    "timing a list": with_entry(key_of(1), ["CublasFp8GemmRunner", 0, HOT, []]),
    "timing nested": with_entry(key_of(1), ["CublasFp8GemmRunner", 0, HOT, {"time_ms": {}}]),
    "key no tuple": with_entry("fp8_gemm", ["CublasFp8GemmRunner", 0, HOT]),
    "key a call": with_entry("__import__('os').system('true')", ["x", 0]),
    "key not ascii": with_entry(key_of(1).replace("fp8", "fp\u0668"), ["CublasFp8GemmRunner", 0]),
    "key with a surrogate": with_entry("('\ud800', 'A', ((1,),), ())", ["A", 0]),
    "key endless": with_entry(f"('a', 'A', ({'1, ' * 5000}), ())", ["A", 0]),
    "group record": with_entry("('__protocol__', 'ns', 'k')", ["ns", 0]),
    "tactic a list for an index runner": with_entry(key_of(1), ["CublasFp8GemmRunner", [9, 9], HOT]),
    "tactic an object": with_entry(MOE, ["MoERunner", {"a": 1}, HOT]),
    "tactic a string": with_entry(MOE, ["MoERunner", "fast", HOT]),
    "tactic null": with_entry(MOE, ["MoERunner", None, HOT]),
    "tactic true": with_entry(key_of(1), ["CublasFp8GemmRunner", True, HOT]),
    "tactic a fraction": with_entry(MOE, ["MoERunner", 1.5, HOT]),
    "tactic below -1": with_entry(key_of(1), ["CublasFp8GemmRunner", -2, HOT]),
    "tactic no algorithm has": with_entry(key_of(1), ["CublasFp8GemmRunner", 10**6, HOT]),
    "tactic over 63 bits": with_entry(MOE, ["MoERunner", 1 << 64, HOT]),
    "tactic of thousands": with_entry(MOE, ["MoERunner", [1] * 5000, HOT]),
    "tactic nested deep": with_entry(MOE, ["MoERunner", json.loads("[" * 12 + "1" + "]" * 12), HOT]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_flashinfer_would_crash_on_or_believe_is_refused_as_malformed(name: str) -> None:
    with pytest.raises(ArtifactRefused) as caught:
        parse_table(REFUSED[name], "rank 3's table")
    assert caught.value.reason == "malformed"
    assert len(str(caught.value)) < 1000
    assert str(caught.value).isprintable()


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_arbitrary_bytes_only_ever_are_refused(data: bytes) -> None:
    with pytest.raises(ArtifactRefused):
        parse_table(data)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(H200_V1) - 1), st.integers(0, 255))
def test_one_changed_byte_gives_a_good_table_or_a_refusal(position: int, value: int) -> None:
    data = H200_V1[:position] + bytes([value]) + H200_V1[position + 1 :]
    try:
        table = parse_table(data)
    except ArtifactRefused:
        return
    assert parse_table(table.encode()) == table


def test_brackets_and_commas_inside_strings_count_for_nothing() -> None:
    limits = JsonLimits(values=10)
    assert parse_json(b'["' + b"[{,:" * 100 + b'", "\\"[[[\\\\"]', "x", limits) == ["[{,:" * 100, '"[[[\\']


def test_names_of_a_key_are_read_without_parsing_it() -> None:
    assert split_key(MOE) == ("trtllm::fused_moe::gemm1", "MoERunner")


def test_a_key_is_encoded_as_flashinfer_does_or_not_at_all() -> None:
    assert encode_key("('a', 'R', ((1,), ()), (torch.bfloat16, True, None, -1.5, 'x'))") == {
        "__tuple__": [
            "a",
            "R",
            {"__tuple__": [{"__tuple__": [1]}, {"__tuple__": []}]},
            {"__tuple__": [{"__dtype__": "bfloat16"}, True, None, -1.5, "x"]},
        ]
    }
    for odd in ("('a', 'R', ((1,),), (<Enum.x: 1>,))", "('a', 'R',  ((1,),), ())", "('a', 'R', ((1,),), (01,))", "("):
        assert encode_key(odd) is None
