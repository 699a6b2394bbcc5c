"""The kept corpus, a short run from it, and layouts built at random and then really read."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from warmseed.daemon.weights.errors import MessageRefused
from warmseed.daemon.weights.layout import DTYPES, SegmentRecord, TensorRecord, check_layout, distinct_bytes
from warmseed.daemon.weights.memfd import MemfdSegment, MemfdTransport
from warmseed.daemon.weights.transport import Mapping
from warmseed.daemon.weights.views import copy_tensors, view_tensors

HERE = Path(__file__).parent
CPU = torch.device("cpu")
SIZE = 640


@pytest.fixture(scope="module")
def mapped() -> Iterator[list[tuple[Mapping, torch.device]]]:
    segment = MemfdSegment(SIZE)
    segment.seal()
    yield [(MemfdTransport().map(segment.record, segment.descriptor, CPU), CPU)]
    segment.close()


dims = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=3)
tensors = st.builds(
    lambda dtype, pairs, offset: TensorRecord(
        "w", "buffer", dtype, tuple(s for s, _ in pairs), tuple(s for _, s in pairs), 0, offset
    ),
    st.sampled_from(sorted(set(DTYPES) - {"float4_e2m1fn_x2", "complex32"})),
    dims,
    st.integers(0, SIZE + 8),
)


@settings(max_examples=400)
@given(tensors)
def test_whatever_passes_the_check_can_be_mapped_copied_and_read_to_its_last_byte(
    mapped: list[tuple[Mapping, torch.device]], record: TensorRecord
) -> None:
    try:
        check_layout([SegmentRecord("memfd", SIZE)], [record], {})
    except MessageRefused:
        return
    view = view_tensors([record], mapped, CPU)["w"]
    copy = copy_tensors([record], mapped, CPU)["w"]
    for tensor in (view, copy):
        assert (tuple(tensor.shape), tensor.dtype) == (record.shape, getattr(torch, record.dtype))
        assert tensor.numel() == 0 or tensor.stride() == record.stride
        if tensor.numel():
            tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).sum()
    assert distinct_bytes([record]) <= SIZE


def test_a_short_run_from_the_corpus_finds_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1] / "src")}
    command = [sys.executable, str(HERE / "fuzz_weights.py"), str(tmp_path), str(HERE / "corpus" / "weights")]
    done = subprocess.run(
        [*command, "-runs=3000", "-seed=1", "-max_len=4096"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-2000:]
