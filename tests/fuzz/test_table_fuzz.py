"""The rules of the table fuzzer, over its corpus and over random changes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.table_rules import one_input

CORPUS = sorted((Path(__file__).parent / "corpus" / "tables").iterdir())


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_the_corpus_keeps_the_rules(path: Path) -> None:
    one_input(path.read_bytes())


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(CORPUS), st.data())
def test_changed_corpus_keeps_the_rules(path: Path, data: st.DataObject) -> None:
    seed = path.read_bytes()
    start = data.draw(st.integers(0, len(seed)))
    end = data.draw(st.integers(start, min(len(seed), start + 40)))
    one_input(seed[:start] + data.draw(st.binary(max_size=40)) + seed[end:])
