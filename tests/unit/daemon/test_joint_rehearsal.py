"""Ranks on several nodes rehearse together or not at all, over the rendezvous that they loaded their weights by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from warmseed.daemon.protocol import rendezvous
from warmseed.daemon.protocol.spec import RankSpec
from warmseed.daemon.rank import joint_rehearsal
from warmseed.daemon.rank.joint_rehearsal import Wish, agree, share_outcome
from warmseed.daemon.rank.tuning_group import TuningGroup, tuning_group
from warmseed.daemon.settings.config import PreloadConfig


def rank_of(
    rank: int, *, tp: int = 1, pp: int = 1, dp: int = 1, port: int = 1, listener: int | None = None
) -> RankSpec:
    """Rank `rank` of a group, each rank on a node of its own."""
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "data_parallel_size": dp}
    return RankSpec(
        group="target",
        local_rank=0,
        global_rank=rank,
        world_size=tp * pp * dp,
        local_size=1,
        dp_rank=rank // (tp * pp),
        pp_rank=rank // tp % pp,
        tp_rank=rank % tp,
        device=0,
        rendezvous_host=f"127.0.0.{rank + 1}",  # a process has one connection to one address: each rank its own
        rendezvous_port=port,
        rendezvous_fd=listener,
        config=msgspec.convert({"engine": "torch", "model": "/models/m", **sizes}, PreloadConfig),
    )


@pytest.fixture
def ranks() -> list[RankSpec]:
    """Three ranks that have met."""
    listener = rendezvous.listen("0.0.0.0", None, flag="--weight-cache-master-port")
    port, handed_over = listener.getsockname()[1], listener.detach()
    first = rank_of(0, tp=3, port=port, listener=handed_over)
    met = [first, rank_of(1, tp=3, port=port), rank_of(2, tp=3, port=port)]
    for spec in met:
        rendezvous.connect(spec, 10)
    return met


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [done.result(20) for done in [pool.submit(call) for call in calls]]


@pytest.mark.parametrize(
    ("wishes", "rehearsed"),
    [
        (("complete", "complete", "complete"), False),
        (("complete", "needed", "complete"), True),
        (("needed", "needed", "needed"), True),
        (("needed", "refused", "needed"), False),
    ],
)
def test_all_rehearse_as_soon_as_one_needs_it_and_none_refuses(
    ranks: list[RankSpec], wishes: Sequence[Wish], rehearsed: bool
) -> None:
    def say(spec: RankSpec, wish: Wish) -> Callable[[], bool]:
        return lambda: agree(spec, wish)

    said = at_once([say(spec, wish) for spec, wish in zip(ranks, wishes, strict=True)])
    assert said == [rehearsed] * 3


def test_a_rank_that_does_not_come_costs_the_rehearsal_and_no_endless_wait(
    ranks: list[RankSpec], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(joint_rehearsal, "ARRIVE_SECONDS", 0.2)
    assert not agree(ranks[0], "needed")
    assert "not all ranks on the other nodes were heard of" in caplog.text


@pytest.mark.parametrize("outcome", ["ok", "failed", "timeout"])
def test_what_the_head_saw_is_what_counts_on_every_node(ranks: list[RankSpec], outcome: str) -> None:
    heard = at_once([lambda: share_outcome(ranks[1], "ok"), lambda: share_outcome(ranks[0], outcome)])
    assert heard == [outcome, outcome]


def test_a_head_that_says_nothing_has_failed_and_the_log_says_so(
    ranks: list[RankSpec], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(joint_rehearsal, "TELL_SECONDS", 0.2)
    assert share_outcome(ranks[1], "ok") == "failed"
    assert "head was not heard of within 0.2 s" in caplog.text


@pytest.mark.parametrize(
    ("layout", "rank", "apart", "group"),
    [
        ({"tp": 4}, 3, True, TuningGroup("target", 3, 4)),
        ({"tp": 2, "dp": 2}, 3, False, TuningGroup("target", 3, 4)),
        ({"tp": 2, "dp": 2}, 3, True, TuningGroup("target/dp1", 1, 2)),
        ({"tp": 2, "pp": 2}, 3, True, TuningGroup("target/dp0/pp1", 1, 2)),
    ],
)
def test_copies_that_run_apart_tune_apart(layout: dict[str, Any], rank: int, apart: bool, group: TuningGroup) -> None:
    assert tuning_group(rank_of(rank, **layout), apart=apart) == group


def test_a_rank_is_numbered_within_its_copy() -> None:
    assert [rank_of(rank, tp=2, pp=2, dp=2).copy_rank for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
