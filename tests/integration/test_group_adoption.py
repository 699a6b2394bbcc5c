"""A group of ranks with real stores, signatures, tables and rendezvous: all of one run, or all tune."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.support.fleet import Node
from tests.support.tables import H200, local_path, put_local, table_site, table_text

from warmseed.seeding.adopt import Adoption
from warmseed.seeding.gang.rendezvous import Alone, TcpRendezvous
from warmseed.seeding.kinds.autotune.group import TableMember, adopt_in_group, note_published
from warmseed.seeding.kinds.autotune.kind import FlashInferAutotune
from warmseed.seeding.kinds.autotune.layout import MANAGED_ROOT, PER_RANK_ROOT
from warmseed.seeding.kinds.autotune.notes import Note, write_note
from warmseed.seeding.kinds.base import Site
from warmseed.seeding.rejected import list_rejected

WORLD = 4
KIND = FlashInferAutotune(overlap="seeded")


def sites(base: Path, world: int = WORLD) -> list[Site]:
    return [table_site(base / f"rank{rank}", world_rank=rank) for rank in range(world)]


def table_of(rank: int, tactic: int = 1) -> bytes:
    """Ranks of one run differ in what they tuned, and in how many."""
    return table_text(3 + rank, first=100 * rank, tactic=tactic)


async def publish_run(base: Path, store: Path, run: str, table: Callable[[int], bytes], world: int = WORLD) -> None:
    """What the ranks of another node tuned and published as `run`."""
    for site in sites(base, world):
        put_local(site, table(site.world_rank))
        async with Node.opened(site.state, f"file:{store}") as node:
            await node.publish(KIND, site, run=run)


async def decide(members: list[Site], store: Path, *, timeout: float = 10.0) -> list[Adoption]:
    """Every rank's adoption, decided together."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    async def rank(site: Site) -> Adoption:
        async with AsyncExitStack() as stack:
            meeting = await stack.enter_async_context(
                TcpRendezvous.opened(
                    rank=site.world_rank, world=len(members), group="target", host="127.0.0.1", port=port
                )
            )
            node = await stack.enter_async_context(Node.opened(site.state, f"file:{store}"))
            adoption = await adopt_in_group(node.adopter(site, KIND), KIND, site, meeting, timeout=timeout)
            ended.release()
            while not everybody.is_set() and site.world_rank == 0:
                await everybody.wait()
            return adoption

    ended = asyncio.Semaphore(0)
    everybody = asyncio.Event()

    async def watch() -> None:
        for _ in members:
            await ended.acquire()
        everybody.set()

    results = await asyncio.gather(watch(), *(rank(site) for site in members))
    return [adoption for adoption in results if adoption is not None]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


def test_a_new_group_adopts_one_run_whole_although_ranks_differ_in_entries(tmp_path: Path, store: Path) -> None:
    async def main() -> None:
        await publish_run(tmp_path / "source", store, "run-1", table_of)
        mirror = sites(tmp_path / "mirror")
        adoptions = await decide(mirror, store)
        assert {(a.outcome, a.manifest.run if a.manifest else "") for a in adoptions} == {("installed", "run-1")}
        assert [local_path(site).read_bytes() for site in mirror] == [table_of(rank) for rank in range(WORLD)]
        again = await decide(mirror, store)
        assert {a.outcome for a in again} == {"present"}

    asyncio.run(main())


def test_the_newest_run_that_all_ranks_have_wins_over_one_that_some_have(tmp_path: Path, store: Path) -> None:
    async def main() -> None:
        await publish_run(tmp_path / "a", store, "run-1", table_of)
        await publish_run(tmp_path / "b", store, "run-2", lambda rank: table_of(rank, 2), world=WORLD - 1)
        mirror = sites(tmp_path / "mirror")
        adoptions = await decide(mirror, store)
        assert {a.manifest.run if a.manifest else "" for a in adoptions} == {"run-1"}

    asyncio.run(main())


def test_one_rank_without_a_good_table_leaves_all_to_tune(tmp_path: Path, store: Path) -> None:
    async def main() -> None:
        await publish_run(tmp_path / "source", store, "run-1", table_of, world=WORLD - 1)
        mirror = sites(tmp_path / "mirror")
        adoptions = await decide(mirror, store)
        assert {a.outcome for a in adoptions} == {"none"}
        assert not any(local_path(site).exists() for site in mirror)

    asyncio.run(main())


def test_a_rank_that_is_warm_alone_stands_down_and_its_table_is_kept(tmp_path: Path, store: Path) -> None:
    async def main() -> None:
        mirror = sites(tmp_path / "mirror")
        put_local(mirror[2], table_of(2))
        adoptions = await decide(mirror, store)
        assert {a.outcome for a in adoptions} == {"none"}
        assert not local_path(mirror[2]).exists()

    asyncio.run(main())
    (rejected,) = list_rejected(sites(tmp_path / "mirror")[2].state)
    assert rejected.reason == "gang"
    assert Path(rejected.moved_to).read_bytes() == table_of(2)


def test_tables_that_an_engine_without_us_tuned_for_all_ranks_are_kept(tmp_path: Path, store: Path) -> None:
    async def main() -> None:
        mirror = sites(tmp_path / "mirror")
        for site in mirror:
            put_local(site, table_of(site.world_rank))
        adoptions = await decide(mirror, store)
        assert {a.outcome for a in adoptions} == {"present"}
        assert all(local_path(site).exists() for site in mirror)

    asyncio.run(main())


def test_a_group_uses_the_v1_home_alone_also_where_an_engine_has_both(tmp_path: Path, store: Path) -> None:
    async def main() -> list[Site]:
        both = (PER_RANK_ROOT, MANAGED_ROOT)
        mirror = [table_site(tmp_path / f"rank{rank}", world_rank=rank, homes=both) for rank in range(2)]
        for site in mirror:
            put_local(site, table_of(site.world_rank))
        assert {a.outcome for a in await decide(mirror, store)} == {"present"}
        return mirror

    for site in asyncio.run(main()):
        assert local_path(site).exists()
        assert not site.roots[MANAGED_ROOT].exists()


def test_local_tables_of_two_environments_are_no_group(tmp_path: Path, store: Path) -> None:
    async def main() -> None:
        mirror = sites(tmp_path / "mirror", 2)
        other = {**H200, "cudnn_version": "92101"}
        mirror[1] = table_site(tmp_path / "mirror" / "rank1", world_rank=1, metadata=other)
        put_local(mirror[0], table_of(0))
        put_local(mirror[1], table_text(3, metadata=other))
        assert {a.outcome for a in await decide(mirror, store)} == {"none"}

    asyncio.run(main())


def test_a_seeded_run_replaces_single_ranks_winners_on_every_rank(tmp_path: Path, store: Path) -> None:
    async def main() -> None:
        await publish_run(tmp_path / "source", store, "run-1", table_of)
        mirror = sites(tmp_path / "mirror")
        put_local(mirror[1], table_of(1, tactic=9))
        adoptions = await decide(mirror, store)
        assert {a.outcome for a in adoptions} == {"installed"}
        assert local_path(mirror[1]).read_bytes() == table_of(1)

    asyncio.run(main())


def test_a_rank_that_was_killed_while_installing_does_not_pass_its_table_for_its_own(
    tmp_path: Path, store: Path
) -> None:
    async def main() -> None:
        mirror = sites(tmp_path / "mirror")
        for site in mirror:
            put_local(site, table_of(site.world_rank))
        write_note(mirror[3], Note("run-9"))  # pending: it never heard whether the group kept run-9
        adoptions = await decide(mirror, store)
        assert {a.outcome for a in adoptions} == {"none"}
        assert not any(local_path(site).exists() for site in mirror)

    asyncio.run(main())


def test_a_rank_whose_disk_fails_makes_every_rank_take_the_run_back(tmp_path: Path, store: Path) -> None:
    async def main() -> None:
        await publish_run(tmp_path / "source", store, "run-1", table_of)
        mirror = sites(tmp_path / "mirror")
        # A plain file where the folder belongs: the install fails as a full or broken disk would.
        local_path(mirror[3]).parent.parent.mkdir(parents=True)
        local_path(mirror[3]).parent.write_text("in the way")
        adoptions = await decide(mirror, store)
        assert {a.outcome for a in adoptions} == {"none"}
        assert not any(local_path(site).exists() for site in mirror[:3])

    asyncio.run(main())


def test_what_a_group_published_itself_is_its_own_at_the_next_start(tmp_path: Path, store: Path) -> None:
    async def main() -> None:
        await publish_run(tmp_path / "node", store, "run-1", table_of)
        ours = sites(tmp_path / "node")
        for site in ours:
            await note_published(site, "run-1")
        adoptions = await decide(ours, store)
        assert {a.outcome for a in adoptions} == {"present"}

    asyncio.run(main())


def test_a_kind_that_keeps_single_ranks_winners_is_no_member(tmp_path: Path, store: Path) -> None:
    async def main() -> None:
        site = table_site(tmp_path)
        async with Node.opened(site.state, f"file:{store}") as node:
            with pytest.raises(ValueError, match="overlap"):
                TableMember(node.adopter(site, KIND), FlashInferAutotune(overlap="local"), site)
            adoption = await adopt_in_group(node.adopter(site, KIND), KIND, site, Alone(), timeout=5)
            assert adoption.outcome == "none"

    asyncio.run(main())
