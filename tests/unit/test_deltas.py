"""A later bundle moves what changed, goes on after a cut, and is never put together wrongly."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from tests.support.sites import fill, make_site

from warmseed.seeding.artifact import bundle_key
from warmseed.seeding.bundle.delta import REMOTE, Base, Piece, Plan, plan
from warmseed.seeding.bundle.history import KEPT, known_indexes, remember_index
from warmseed.seeding.bundle.index import BundleIndex
from warmseed.seeding.channel.errors import PeerUnreachable
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.kinds.base import Capture
from warmseed.seeding.kinds.compiled.bundle import CompileCacheKind
from warmseed.seeding.kinds.compiled.capture import Quiet
from warmseed.seeding.kinds.compiled.inductor import InductorCache
from warmseed.seeding.origins.deltas import Delta, fetch_delta
from warmseed.seeding.trust.manifest import Stored
from warmseed.stores.base import Body, ObjectReader
from warmseed.stores.disk import DiskStore
from warmseed.stores.errors import StoreUnavailable
from warmseed.stores.folder import FolderStore


@dataclass
class Made:
    """One bundle, in memory."""

    capture: Capture
    index: BundleIndex
    data: bytes

    @property
    def key(self) -> str:
        return bundle_key(self.capture.sha256)

    @property
    def stored(self) -> Stored:
        assert self.capture.stored is not None
        return self.capture.stored


def corpus(seed: int = 0) -> dict[str, bytes]:
    rng = random.Random(seed)
    files = {f"{n % 16:02x}/{n:04d}.so": rng.randbytes(int(rng.lognormvariate(9.5, 1.2))) for n in range(200)}
    files["big/large.so"] = rng.randbytes(3_000_000)
    return files


def bundle(base: Path, files: dict[str, bytes]) -> Made:
    site = make_site(base, caches=("inductor",))
    fill(site.roots["inductor"], files)
    capture = CompileCacheKind([InductorCache()], quiet=Quiet(settle=0.0)).capture(site)
    assert capture is not None
    assert capture.index is not None
    return Made(capture, msgspec.json.decode(capture.index, type=BundleIndex), capture.payload.read_bytes())


def assembled(made: Plan, sources: list[bytes], remote: bytes) -> bytes:
    parts = [(remote if p.source == REMOTE else sources[p.source])[p.offset : p.offset + p.length] for p in made.pieces]
    return b"".join(parts)


def test_equal_files_give_the_chunks_that_earlier_versions_gave(tmp_path: Path) -> None:
    """Chunks cut in another way would make every node fetch its next bundle whole."""
    rng = random.Random(5)
    files = {f"{n % 8:x}/{n:03d}.so": rng.randbytes(int(rng.lognormvariate(9.0, 1.5))) for n in range(300)}
    sizes = (0, 1, 511, 512, 513, (16 << 10) - 512, 64 << 10, 128 << 10, (128 << 10) + 1, 256 << 10, 2_096_640, 5 << 20)
    files.update({f"edge/{size:08d}": rng.randbytes(size) for size in sizes})
    files["uncut/zeros"] = bytes(3_000_000)
    files["long/" + "n" * 120] = rng.randbytes(2000)
    files["left\\out"] = rng.randbytes(40_000)
    files["ab/__grp__k.json"] = b'{"child_paths": {}}'
    made = bundle(tmp_path, files)
    assert len(made.index.files) == len(files) - 1
    # The frames are left out: another release of the zstd library may make others.
    laid = [
        made.index.sha256,
        *(f.sha256 for f in made.index.files),
        *(f"{c.id} {c.length}" for c in made.index.chunks),
    ]
    assert (
        hashlib.sha256("\n".join(laid).encode()).hexdigest()
        == "3ee0cd7d09d409118ca96b3d7cbcd972443ace2a066daed31b1b0e34f3f05f36"
    )


def test_two_changed_files_in_a_hundred_move_less_than_a_tenth(tmp_path: Path) -> None:
    files = corpus()
    old = bundle(tmp_path / "old", files)
    rng = random.Random(1)
    for name in rng.sample(sorted(n for n in files if not n.startswith("big")), 4):
        files[name] = rng.randbytes(len(files[name]))
    new = bundle(tmp_path / "new", files)
    made = plan(new.index, [Base(old.index, len(old.data))])
    assert made is not None
    assert assembled(made, [old.data], new.data) == new.data
    assert made.moved < 0.1 * made.total


def test_bytes_put_into_the_middle_of_a_large_file_move_little_more_than_themselves(tmp_path: Path) -> None:
    files = corpus()
    old = bundle(tmp_path / "old", files)
    large = files["big/large.so"]
    files["big/large.so"] = large[:1_000_001] + b"inserted" + large[1_000_001:]
    new = bundle(tmp_path / "new", files)
    made = plan(new.index, [Base(old.index, len(old.data))])
    assert made is not None
    assert assembled(made, [old.data], new.data) == new.data
    assert made.moved < 1_000_000


def test_new_removed_and_renamed_files_leave_the_others_where_they_were(tmp_path: Path) -> None:
    files = corpus()
    old = bundle(tmp_path / "old", files)
    del files["03/0003.so"]
    files["03/0003b.so"] = b"new" * 1000
    files["00/aaaa.so"] = b"first" * 1000
    new = bundle(tmp_path / "new", files)
    made = plan(new.index, [Base(old.index, len(old.data))])
    assert made is not None
    assert assembled(made, [old.data], new.data) == new.data
    assert made.moved < 0.1 * made.total


def test_a_base_that_is_only_partly_there_gives_only_that_part(tmp_path: Path) -> None:
    made = bundle(tmp_path, corpus())
    half = len(made.data) // 2
    found = plan(made.index, [Base(made.index, half)])
    assert found is not None
    assert assembled(found, [made.data[:half]], made.data) == made.data
    assert 0.4 < found.moved / found.total < 0.6


def test_what_is_left_after_a_cut_makes_the_rest() -> None:
    whole = Plan((Piece(0, 100, 10), Piece(REMOTE, 10, 20), Piece(0, 500, 5)))
    assert whole.after(0) == whole
    assert whole.after(15).pieces == (Piece(REMOTE, 15, 15), Piece(0, 500, 5))
    assert whole.after(30).pieces == (Piece(0, 500, 5),)
    assert whole.after(35).pieces == ()


def test_an_index_that_lays_frames_out_otherwise_gives_no_plan(tmp_path: Path) -> None:
    made = bundle(tmp_path, {"a.so": b"x" * 300_000, "b.so": b"y" * 300_000})
    chunks = list(made.index.chunks)
    chunks[1] = msgspec.structs.replace(chunks[1], offset=chunks[1].offset + 1)
    assert plan(msgspec.structs.replace(made.index, chunks=tuple(chunks)), []) is None
    assert plan(msgspec.structs.replace(made.index, chunks=()), []) is None


def test_only_the_newest_indexes_are_kept(tmp_path: Path) -> None:
    made = bundle(tmp_path / "b", {"a.so": b"x"})
    for number in range(KEPT + 3):
        remember_index(tmp_path, made.capture.index or b"", f"{number:064x}")
    (tmp_path / "compiled" / "indexes" / f"{1:064x}.json").write_bytes(b"{")
    assert len(list((tmp_path / "compiled" / "indexes").iterdir())) <= KEPT + 1
    assert all(index == made.index for index in known_indexes(tmp_path))


# -- with real stores --------------------------------------------------------------------------------------


class Cutting(FolderStore):
    """A shared folder whose connection is cut after some bytes, once."""

    def __init__(self, folder: Path, after: int) -> None:
        super().__init__(folder)
        self.after = after
        self.read = 0

    @asynccontextmanager
    async def open(self, key: str, *, limit: int, offset: int = 0) -> AsyncIterator[ObjectReader | None]:
        async with super().open(key, limit=limit, offset=offset) as reader:
            yield None if reader is None else _Cut(self, reader)


class _Cut:
    def __init__(self, store: Cutting, reader: ObjectReader) -> None:
        self._store, self._reader = store, reader
        self.size = reader.size

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for data in self._reader:
            for start in range(0, len(data), 4096):
                if self._store.read >= self._store.after:
                    raise StoreUnavailable("the connection was cut")
                piece = data[start : start + 4096]
                self._store.read += len(piece)
                yield piece


async def stores(tmp_path: Path, old: Made, new: Made, *, after: int = 1 << 60) -> tuple[DiskStore, Cutting]:
    disk = DiskStore(tmp_path / "disk")
    await disk.put(old.key, Body.of(old.data))
    remember_index(tmp_path, old.capture.index or b"", old.capture.sha256)
    (tmp_path / "shared").mkdir()
    (tmp_path / "staging").mkdir()
    shared = Cutting(tmp_path / "shared", after)
    await shared.put(new.key, Body.of(new.data))
    return disk, shared


def pair(tmp_path: Path, fraction: float = 0.02) -> tuple[Made, Made]:
    files = corpus()
    old = bundle(tmp_path / "old", files)
    rng = random.Random(2)
    small = sorted(name for name in files if not name.startswith("big"))
    for name in rng.sample(small, max(1, int(len(small) * fraction))):
        files[name] = rng.randbytes(len(files[name]))
    return old, bundle(tmp_path / "new", files)


def test_only_the_changed_pieces_are_read_from_the_shared_store(tmp_path: Path) -> None:
    old, new = pair(tmp_path)

    async def run() -> None:
        disk, shared = await stores(tmp_path, old, new)
        found = await fetch_delta(
            new.index, new.stored, tiers=[shared], local=disk, state=tmp_path, folder=tmp_path / "staging"
        )
        assert found is not None
        assert found.path.read_bytes() == new.data
        assert shared.read < 0.1 * len(new.data) + 64 * 4096
        assert found.moved < 0.1 * found.total
        assert [p.name for p in (tmp_path / "staging").iterdir()] == [found.path.name]

    asyncio.run(run())


def test_a_cut_transfer_goes_on_where_it_stopped(tmp_path: Path) -> None:
    old, new = pair(tmp_path, 0.3)

    async def run() -> None:
        disk, shared = await stores(tmp_path, old, new, after=300_000)
        arguments = {"tiers": [shared], "local": disk, "state": tmp_path, "folder": tmp_path / "staging"}
        with pytest.raises(StoreUnavailable):
            await fetch_delta(new.index, new.stored, always=True, **arguments)  # type: ignore[arg-type]
        read, shared.after = shared.read, 1 << 60
        found = await fetch_delta(new.index, new.stored, always=True, **arguments)  # type: ignore[arg-type]
        assert found is not None
        assert found.path.read_bytes() == new.data
        whole = plan(new.index, [Base(old.index, len(old.data))])
        assert whole is not None
        assert found.moved <= whole.moved - read + 8192

    asyncio.run(run())


def test_when_one_tier_is_cut_the_next_one_takes_over(tmp_path: Path) -> None:
    old, new = pair(tmp_path, 0.3)

    async def run() -> None:
        disk, shared = await stores(tmp_path, old, new, after=100_000)
        second = FolderStore(tmp_path / "shared")
        found = await fetch_delta(
            new.index, new.stored, tiers=[shared, second], local=disk, state=tmp_path, folder=tmp_path / "staging"
        )
        assert found is not None
        assert found.path.read_bytes() == new.data

    asyncio.run(run())


def test_pieces_that_do_not_make_the_signed_object_are_thrown_away(tmp_path: Path) -> None:
    old, new = pair(tmp_path)

    async def run() -> None:
        disk, shared = await stores(tmp_path, old, new)
        rotten = bytearray(old.data)
        rotten[len(rotten) // 2] ^= 1
        await disk.put(old.key, Body.of(bytes(rotten)))
        with pytest.raises(ArtifactRefused) as refused:
            await fetch_delta(
                new.index, new.stored, tiers=[shared], local=disk, state=tmp_path, folder=tmp_path / "staging"
            )
        assert refused.value.reason == "digest"
        assert list((tmp_path / "staging").iterdir()) == []

    asyncio.run(run())


def test_an_object_of_which_nothing_is_known_is_left_to_the_whole_fetch(tmp_path: Path) -> None:
    old, new = pair(tmp_path)

    async def run() -> None:
        disk, shared = await stores(tmp_path, old, new)
        await disk.delete(old.key)
        found = await fetch_delta(
            new.index, new.stored, tiers=[shared], local=disk, state=tmp_path, folder=tmp_path / "staging"
        )
        assert found is None
        assert list((tmp_path / "staging").iterdir()) == []

    asyncio.run(run())


def test_an_object_that_is_gone_is_a_refusal_not_a_crash(tmp_path: Path) -> None:
    old, new = pair(tmp_path)

    async def run() -> None:
        disk, shared = await stores(tmp_path, old, new)
        for path in (tmp_path / "shared").rglob("bundle.tar"):
            path.unlink()
        with pytest.raises(ArtifactRefused) as refused:
            await fetch_delta(
                new.index, new.stored, tiers=[shared], local=disk, state=tmp_path, folder=tmp_path / "staging"
            )
        assert refused.value.reason == "missing"

    asyncio.run(run())


# -- and from peers ----------------------------------------------------------------------------------------


class Peer:
    """A source of pieces that has the whole object, and is lost after some bytes, once."""

    name = "a peer"

    def __init__(self, data: bytes, after: int = 1 << 60) -> None:
        self.data, self.after, self.sent = data, after, 0
        self.asked: list[tuple[Piece, ...]] = []

    @asynccontextmanager
    async def pieces(self, key: str, stored: Stored, wanted: Sequence[Piece]) -> AsyncIterator[AsyncIterator[bytes]]:
        self.asked.append(tuple(wanted))
        yield self._send(b"".join(self.data[piece.offset : piece.offset + piece.length] for piece in wanted))

    async def _send(self, data: bytes) -> AsyncIterator[bytes]:
        for start in range(0, len(data), 4096):
            if self.sent >= self.after:
                raise PeerUnreachable("the peer was lost")
            self.sent += len(data[start : start + 4096])
            yield data[start : start + 4096]


def test_what_no_store_has_comes_from_a_peer_in_one_question(tmp_path: Path) -> None:
    old, new = pair(tmp_path)

    async def run() -> None:
        disk, _ = await stores(tmp_path, old, new)
        (tmp_path / "empty").mkdir()
        empty, peer = FolderStore(tmp_path / "empty"), Peer(new.data)
        found = await fetch_delta(
            new.index, new.stored, tiers=[empty], local=disk, also=[peer], state=tmp_path, folder=tmp_path / "staging"
        )
        assert found is not None
        assert found.path.read_bytes() == new.data
        assert len(peer.asked) == 1
        assert peer.sent == found.moved < 0.1 * found.total

    asyncio.run(run())


def test_a_peer_goes_on_where_a_store_stopped(tmp_path: Path) -> None:
    old, new = pair(tmp_path, 0.3)

    async def run() -> None:
        disk, shared = await stores(tmp_path, old, new, after=100_000)
        peer = Peer(new.data)
        found = await fetch_delta(
            new.index, new.stored, tiers=[shared], local=disk, also=[peer], state=tmp_path, folder=tmp_path / "staging"
        )
        assert found is not None
        assert found.path.read_bytes() == new.data
        assert shared.read + peer.sent == found.moved

    asyncio.run(run())


def test_what_a_lost_peer_sent_is_not_asked_for_again_by_a_later_call(tmp_path: Path) -> None:
    old, new = pair(tmp_path, 0.3)

    async def run() -> None:
        disk, _ = await stores(tmp_path, old, new)
        peer = Peer(new.data, after=100_000)

        async def fetch() -> Delta | None:
            folder = tmp_path / "staging"
            return await fetch_delta(
                new.index, new.stored, tiers=[], local=disk, also=[peer], state=tmp_path, folder=folder
            )

        with pytest.raises(PeerUnreachable):
            await fetch()
        peer.after = 1 << 60
        found = await fetch()
        assert found is not None
        assert found.path.read_bytes() == new.data
        whole = plan(new.index, [Base(old.index, len(old.data))])
        assert whole is not None
        assert peer.sent == whole.moved

    asyncio.run(run())


def test_a_bundle_of_nothing_but_known_chunks_needs_nobody(tmp_path: Path) -> None:
    files = corpus()
    old = bundle(tmp_path / "old", files)
    same = bundle(tmp_path / "same", files)
    index = msgspec.structs.replace(same.index, sha256="ab" * 32)  # another bundle that is made of the same chunks

    async def run() -> None:
        disk, _ = await stores(tmp_path, old, same)
        found = await fetch_delta(index, same.stored, tiers=[], local=disk, state=tmp_path, folder=tmp_path / "staging")
        assert found is not None
        assert found.path.read_bytes() == same.data
        assert found.moved == 0

    asyncio.run(run())
