"""The kept corpus, a short run from it, and messages built at random."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmseed.seeding.channel.errors import ProtocolError
from warmseed.seeding.channel.messages import decode_answer, decode_request, encode

HERE = Path(__file__).parent
CORPUS = HERE / "corpus" / "channel"


def accepted(data: bytes) -> int:
    """How many of the two decoders take `data`; each that does spells it back as it was."""
    count = 0
    for decode in (decode_request, decode_answer):
        try:
            message = decode(data)
        except ProtocolError as error:
            if not str(error).isprintable():
                pytest.fail("foreign control characters in a message for the log")
        else:
            assert encode(message) == data
            count += 1
    return count


@pytest.mark.parametrize("path", sorted(CORPUS.iterdir()), ids=lambda path: path.name)
def test_the_kept_inputs_give_a_message_or_a_typed_error(path: Path) -> None:
    # "bad-an-answer" is bad as a request only.
    assert accepted(path.read_bytes()) == (path.name.startswith("good-") or path.name == "bad-an-answer")


def test_a_short_run_from_the_corpus_finds_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            str(HERE / "fuzz_channel.py"),
            str(tmp_path),  # new inputs go here, the corpus stays as it is
            str(CORPUS),
            "-runs=20000",
            "-max_len=20000",
            "-timeout=5",
            f"-artifact_prefix={tmp_path}/",
        ],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=70),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_good_message_with_any_one_field_replaced_is_refused_or_canonical(data: st.DataObject) -> None:
    path = data.draw(st.sampled_from([path for path in sorted(CORPUS.iterdir()) if path.name.startswith("good-")]))
    message = json.loads(path.read_bytes())
    message[data.draw(st.sampled_from(sorted(message)))] = data.draw(JSON)
    body = json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    accepted(body)
