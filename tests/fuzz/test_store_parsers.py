"""Keys and lists of parts from strangers: accepted only if harmless, refused only with the right exception."""

from __future__ import annotations

from pathlib import PurePosixPath

from hypothesis import given
from hypothesis import strategies as st

from warmseed.stores.base import check_key
from warmseed.stores.errors import InvalidKey, ObjectInvalid
from warmseed.stores.mooncake.layout import PART, Parts, decode, is_raw, new_parts

ALPHABET = st.sampled_from("aZ09._-/\\ \n\0%?#*~@é\u202e")


@given(st.text(ALPHABET, max_size=40) | st.text(max_size=600))
def test_an_accepted_key_is_a_plain_relative_path(key: str) -> None:
    try:
        accepted = check_key(key)
    except InvalidKey:
        return
    assert accepted == key == str(PurePosixPath(key))
    assert key.isascii()
    assert key.isprintable()
    assert not key.startswith("/")
    assert not any(part.startswith(".") for part in key.split("/"))


@given(st.binary(max_size=300) | st.binary(max_size=300).map(lambda tail: b"WARMSEED-PARTS/1\n" + tail))
def test_any_bytes_are_an_object_a_list_or_invalid(data: bytes) -> None:
    try:
        parts = decode(data, store="s", key="kind/doc")
    except ObjectInvalid:
        return
    if parts is None:
        assert is_raw(data) or not data
    else:
        assert sum(parts.sizes()) == parts.size
        assert all(name.startswith("kind/doc@") for name in parts.names)


@given(st.integers(0, 70 << 30), st.integers(1, 2 * PART), st.lists(st.text(max_size=20), max_size=3))
def test_a_list_that_does_not_add_up_is_invalid(size: int, part: int, names: list[str]) -> None:
    try:
        parts = decode(Parts(size, part, names).encode(), store="s", key="k")
    except ObjectInvalid:
        return
    assert parts is not None
    assert sum(parts.sizes()) == size
    assert len(parts.sizes()) == len(parts.names)


@given(st.integers(0, 10 * PART + 5), st.data())
def test_what_is_needed_from_an_offset_on_is_all_of_it(size: int, data: st.DataObject) -> None:
    parts = new_parts("kind/doc", size)
    assert decode(parts.encode(), store="s", key="kind/doc") == parts
    offset = data.draw(st.integers(0, size))
    assert sum(whole - start for _, start, whole in parts.from_offset(offset)) == size - offset
