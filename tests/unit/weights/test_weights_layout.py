"""What a daemon says of its tensors is checked against the segments before any of it becomes memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmseed.daemon.weights.errors import MessageRefused
from warmseed.daemon.weights.layout import (
    ALIGNMENT,
    SegmentRecord,
    TensorRecord,
    check_layout,
    distinct_bytes,
    extent_bytes,
    overlap_groups,
    pack,
)

SEGMENTS = (SegmentRecord("memfd", 1024), SegmentRecord("memfd", 64))


def tensor(name: str = "w", **changes: object) -> TensorRecord:
    fields: dict[str, object] = {
        "kind": "parameter", "dtype": "float32", "shape": (4, 8), "stride": (8, 1), "segment": 0, "offset": 0,
    }  # fmt: skip
    return TensorRecord(name, **{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dtype": "object"}, "unknown dtype"),
        ({"dtype": "Tensor"}, "unknown dtype"),
        ({"segment": 2}, "segment 2 of 2"),
        ({"segment": 1}, "of a segment of 64 bytes"),
        ({"offset": 900}, "ends at byte"),
        ({"offset": 2}, "not a multiple"),
        ({"stride": (1,)}, "2 sizes but 1 strides"),
        ({"stride": (1 << 61, 1)}, "ends at byte"),
        ({"shape": (1 << 62, 1 << 62), "stride": (0, 0)}, "more elements"),
        ({"offset": 1 << 62}, "ends at byte"),
    ],
)
def test_a_record_that_can_not_be_true_is_refused_by_name(changes: dict[str, object], says: str) -> None:
    with pytest.raises(MessageRefused, match=says) as caught:
        check_layout(SEGMENTS, [tensor("layers.0.w", **changes)], {})
    assert "layers.0.w" in str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "aliases"),
    [
        ([tensor("a"), tensor("a")], {}),
        ([tensor("a")], {"b": "missing"}),
        ([tensor("a")], {"a": "a"}),
        ([tensor("a")], {"b": "c", "c": "a"}),
    ],
)
def test_names_and_aliases_must_agree(tensors: list[TensorRecord], aliases: dict[str, str]) -> None:
    with pytest.raises(MessageRefused):
        check_layout(SEGMENTS, tensors, aliases)


def test_true_records_pass_among_them_empty_scalar_and_overlapping_ones() -> None:
    check_layout(
        SEGMENTS,
        [
            tensor("a"),
            tensor("b", offset=64),
            tensor("scalar", shape=(), stride=(), segment=1, offset=60),
            tensor("empty", shape=(0, 5), stride=(5, 1), segment=9, offset=1 << 40),
            tensor("broadcast", shape=(1000, 2), stride=(0, 1)),
        ],
        {"c": "a"},
    )


@given(st.lists(st.integers(1, 5000), max_size=60), st.integers(512, 8192))
def test_packed_blocks_are_aligned_never_overlap_and_waste_only_alignment(sizes: list[int], limit: int) -> None:
    places, segments = pack(sizes, limit)
    ends = [0] * len(segments)
    for size, place in zip(sizes, places, strict=True):
        assert place.offset % ALIGNMENT == 0
        assert 0 <= place.offset - ends[place.segment] < ALIGNMENT
        ends[place.segment] = place.offset + size
    assert ends == segments
    assert all(end <= max(limit, max(sizes, default=0)) for end in segments)


dims = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=3)


@given(dims)
def test_extent_is_the_furthest_byte_any_index_reaches(pairs: list[tuple[int, int]]) -> None:
    reached = {0}
    for size, step in pairs:
        reached = {at + index * step for at in reached for index in range(size)}
    shape, stride = [s for s, _ in pairs], [s for _, s in pairs]
    assert extent_bytes(shape, stride, 4) == ((max(reached) + 1) * 4 if reached else 0)


def test_tensors_that_share_bytes_are_grouped_also_around_empty_ones() -> None:
    tensors = [
        tensor("a", shape=(25,), stride=(1,)),
        tensor("empty", shape=(0,), stride=(1,)),
        tensor("b", shape=(5,), stride=(1,), offset=80),
        tensor("c", shape=(5,), stride=(1,), offset=512),
        tensor("d", shape=(5,), stride=(1,), segment=1),
    ]
    groups = sorted([t.name for t in group] for group in overlap_groups(tensors))
    assert groups == [["a", "b"], ["c"], ["d"], ["empty"]]
    assert distinct_bytes(tensors) == 100 + 20 + 20
