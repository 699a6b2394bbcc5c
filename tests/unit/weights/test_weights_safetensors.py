"""Headers that lie, and headers that are only unusual."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmseed.daemon.weights.errors import CheckpointInvalid
from warmseed.daemon.weights.safetensors import check_header, read_header


def entry(low: int, high: int, dtype: str = "U8", shape: object = None) -> dict[str, object]:
    return {"dtype": dtype, "shape": [high - low] if shape is None else shape, "data_offsets": [low, high]}


def checked(header: dict[str, object] | bytes, data: int) -> tuple[str, ...]:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return check_header(text, 8 + len(text) + data, "model.safetensors")


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        ({"a": entry(0, 8)}, 7, "end at byte 8"),
        ({"a": entry(0, 8)}, 9, "end at byte 8"),
        ({"a": entry(0, 8), "b": entry(12, 16)}, 16, "starts at byte 12"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "starts at byte 4"),
        ({"a": entry(4, 8)}, 8, "starts at byte 4"),
        ({"a": entry(0, 8, "BF16", [5])}, 8, "can't fill"),
        ({"a": entry(8, 0, "U8", [8])}, 8, "can't fill"),
        ({"a": entry(0, 8, "X9")}, 8, "unknown dtype"),
        ({"a": entry(0, 8, "U8", [-1, -8])}, 8, "malformed shape"),
        ({"a": entry(0, 8, "U8", [8.0])}, 8, "malformed shape"),
        ({"a": entry(0, 8, "U8", [True, 8])}, 8, "malformed shape"),
        ({"a": {**entry(0, 8), "more": 1}}, 8, "malformed entry"),
        ({"a": [0, 8]}, 8, "malformed entry"),
        ({"a": {"dtype": "U8", "shape": [8]}}, 8, "malformed entry"),
        (b"[]", 0, "no JSON object"),
        (b"{", 0, "no valid JSON"),
        (b'{"a": 1, "a": 1}', 0, "appears twice"),
        (b'"' + b"[" * 100_000, 0, "no valid JSON"),
        (b"[" * 100_000, 0, "no valid JSON"),
        (b"\xff\xfe", 0, "no valid JSON"),
    ],
)
def test_a_lying_header_is_refused_before_the_load(header: dict[str, object] | bytes, data: int, says: str) -> None:
    with pytest.raises(CheckpointInvalid, match=says):
        checked(header, data)


def test_metadata_padding_and_zero_size_tensors_are_fine() -> None:
    header = {"__metadata__": {"format": "pt"}, "a": entry(0, 8), "none": entry(8, 8, "F32", [0, 4]), "b": entry(8, 9)}
    assert set(checked(json.dumps(header).encode() + b"    ", 9)) == {"a", "none", "b"}


def test_a_hundred_thousand_tensors_are_checked() -> None:
    header = {f"t{i}": entry(4 * i, 4 * i + 4) for i in range(100_000)}
    assert len(checked(header, 400_000)) == 100_000


def test_a_duplicate_among_very_many_names_is_found_without_trying_all_pairs() -> None:
    pairs = ",".join(f'"t{i}":0' for i in range(100_000))
    with pytest.raises(CheckpointInvalid, match="appears twice"):
        checked(b"{" + pairs.encode() + b',"t99999":0}', 0)


@pytest.mark.parametrize(
    "content", [b"", b"1234567", b"\xff" * 8, (1 << 40).to_bytes(8, "little") + b"{}", b"\x05" + b"\0" * 7 + b"{}"]
)
def test_a_file_shorter_than_it_says_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(CheckpointInvalid):
            read_header(descriptor, len(content), path.name)
    finally:
        os.close(descriptor)


@given(st.binary(max_size=200), st.integers(0, 64))
def test_no_bytes_make_the_check_fail_in_any_other_way(header: bytes, data: int) -> None:
    with contextlib.suppress(CheckpointInvalid):
        checked(header, data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "a"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(json_values, st.integers(0, 64))
def test_no_json_makes_the_check_fail_in_any_other_way(header: object, data: int) -> None:
    with contextlib.suppress(CheckpointInvalid):
        checked(json.dumps(header).encode(), data)
