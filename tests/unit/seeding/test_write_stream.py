"""A peer's stream in a staging file: whole and right, or not there."""

from __future__ import annotations

import asyncio
import hashlib
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.channel import run

from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.origins.payload import write_stream

DATA = b"0123456789" * 1000
DIGEST = hashlib.sha256(DATA).hexdigest()


async def pieces(*parts: bytes, then: BaseException | None = None) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
    if then is not None:
        raise then


def test_the_whole_stream_is_there_and_only_for_this_user(tmp_path: Path) -> None:
    path = run(write_stream(pieces(DATA[:3], b"", DATA[3:]), tmp_path, sha256=DIGEST, length=len(DATA)))
    assert path.read_bytes() == DATA
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        pytest.param((DATA, b"x"), "length", id="longer"),
        pytest.param((DATA[:-1],), "digest", id="shorter"),
        pytest.param((), "digest", id="nothing"),
        pytest.param((DATA[:-1] + b"x",), "digest", id="other bytes"),
    ],
)
def test_a_stream_of_anything_else_leaves_nothing(tmp_path: Path, parts: tuple[bytes, ...], reason: str) -> None:
    with pytest.raises(ArtifactRefused) as refused:
        run(write_stream(pieces(*parts), tmp_path, sha256=DIGEST, length=len(DATA)))
    assert refused.value.reason == reason
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failure", [OSError("lost"), asyncio.CancelledError()], ids=["lost", "cancelled"])
def test_a_stream_that_breaks_off_leaves_nothing(tmp_path: Path, failure: BaseException) -> None:
    with pytest.raises(type(failure)):
        run(write_stream(pieces(DATA[:10], then=failure), tmp_path, sha256=DIGEST, length=len(DATA)))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_the_disks_failure(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        run(write_stream(pieces(DATA), tmp_path / "none", sha256=DIGEST, length=len(DATA)))
