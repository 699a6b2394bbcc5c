"""The canonical tar: equal files give equal bytes, and everything else is refused."""

from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tars import pack

from warmseed.seeding.bundle import tar
from warmseed.seeding.errors import ArtifactRefused

NAMES = [
    "a",
    "cache/ab/file.so",
    "n" * 100,
    "n" * 101,
    "d/" * 60 + "deep.py",
    "ü/ß.json",
    "x" * 255 + "/" + "y" * 255 + "/" + "z" * 255 + "/" + "w" * 255,
]


def test_a_bundle_is_what_pythons_tarfile_writes_for_the_same_files() -> None:
    for name in NAMES:
        for executable in (False, True):
            info = tarfile.TarInfo(name)
            info.size, info.mode = 5, 0o755 if executable else 0o644
            expected = info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")
            assert tar.header(name, 5, executable=executable) == expected


def test_files_come_back_with_their_bytes_and_modes() -> None:
    files = {name: (name.encode() * 3, index % 2 == 1) for index, name in enumerate(NAMES)}
    data = pack(files)
    read = {m.name: (data[m.offset : m.offset + m.size], m.executable) for m in tar.members(data)}
    assert read == files
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        assert sorted(archive.getnames()) == sorted(NAMES)


def test_the_order_in_which_files_are_given_does_not_matter() -> None:
    assert pack({"a": (b"1", False), "b": (b"2", False)}) == pack({"b": (b"2", False), "a": (b"1", False)})


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/abs",
        "../x",
        "a/../b",
        "a//b",
        "a/",
        "./a",
        ".",
        "a\\b",
        "a\nb",
        "a\0b",
        "a\x7fb",
        "e\u0301",  # NFD
        "x" * 256,
        "x/" * 600 + "y",
        "\ud800",
        "a\u202e\u0000",
    ],
)
def test_names_that_could_leave_the_folder_or_mislead_are_refused(name: str) -> None:
    with pytest.raises(ArtifactRefused) as refused:
        tar.header(name, 1, executable=False)
    assert refused.value.reason == "malformed"


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.text("abcü/.", min_size=1, max_size=12),
        st.tuples(st.binary(max_size=1500), st.booleans()),
        max_size=5,
    )
)
def test_every_archive_that_can_be_written_reads_back_unchanged(files: dict[str, tuple[bytes, bool]]) -> None:
    try:
        data = pack(files)
        found = list(tar.members(data))
    except ArtifactRefused:
        return
    assert {m.name: (data[m.offset : m.offset + m.size], m.executable) for m in found} == files
    assert pack(files) == data


def test_no_single_bit_flip_of_a_header_is_accepted_as_another_archive() -> None:
    data = bytearray(pack({"a/b": (b"x" * 10, False), "n" * 120: (b"y" * 600, True)}))
    bodies = [range(m.offset, m.offset + m.size) for m in tar.members(bytes(data))]
    end = bodies[-1].stop + tar.BLOCK
    for position in (*range(end), *range(end, len(data), 61)):  # past the headers all is zero: a sample will do
        if any(position in body for body in bodies):
            continue
        for bit in range(8):
            data[position] ^= 1 << bit
            try:
                files = {
                    m.name: (bytes(data[m.offset : m.offset + m.size]), m.executable) for m in tar.members(bytes(data))
                }
            except ArtifactRefused:
                pass
            else:  # a changed name that is itself canonical: the digest catches those
                assert pack(files) == bytes(data)
            data[position] ^= 1 << bit
