"""Poison control and the books: a crash is remembered, told to the fleet, and never counted as a saving."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec
import pytest

from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.ledger import ROTATE_BYTES, Entry, Ledger
from warmseed.seeding.trust.judge import Trust
from warmseed.seeding.trust.keys import Keyring, PublisherKey
from warmseed.seeding.trust.probation import DENIAL_LIFE, Probation
from warmseed.seeding.trust.statements import sign_denial

A, B = "a" * 64, "b" * 64
NOW = 1_800_000_000
RANK, OTHER = "dp0_rank0", "dp0_rank1"


def probation(folder: Path) -> Probation:
    return Probation(folder, clock=lambda: NOW)


def test_a_payload_is_on_trial_until_an_engine_warmed_up_on_it(tmp_path: Path) -> None:
    record = probation(tmp_path)
    assert record.standing(A) == "unknown"
    record.begin("compile_cache", A, 3, RANK)
    assert record.standing(A) == "trial"
    record.prove(A, RANK)
    assert probation(tmp_path).standing(A) == "proven"
    record.begin("compile_cache", A, 3, RANK)  # a later start does not put it on trial again
    assert record.interrupted(RANK) == ()


def test_a_start_that_never_said_how_it_went_shows_at_the_next_one(tmp_path: Path) -> None:
    for sha256, rank in ((A, RANK), (B, OTHER)):
        probation(tmp_path).begin("compile_cache", sha256, 3, rank)
        probation(tmp_path).meet(sha256, rank)
    found = probation(tmp_path).interrupted(RANK)
    assert [(trial.sha256, trial.generation) for trial in found] == [(A, 3)]


def test_a_start_that_no_engine_came_to_says_nothing_about_the_payload(tmp_path: Path) -> None:
    probation(tmp_path).begin("compile_cache", A, 3, RANK)
    assert probation(tmp_path).interrupted(RANK) == ()


def test_an_engine_that_parted_for_a_reason_of_its_own_leaves_no_silence_behind(tmp_path: Path) -> None:
    record = probation(tmp_path)
    record.begin("compile_cache", A, 3, RANK)
    record.meet(A, RANK)
    record.part(A, RANK)
    assert record.interrupted(RANK) == ()
    assert record.standing(A) == "trial"


def test_a_payload_is_proven_for_the_rank_whose_engine_warmed_up_on_it(tmp_path: Path) -> None:
    record = probation(tmp_path)
    for rank in (RANK, OTHER):
        record.begin("compile_cache", A, 3, rank)
    record.prove(A, RANK)
    assert record.proven(A, RANK)
    assert not record.proven(A, OTHER)
    record.fail(A, RANK, "crashed")
    assert not record.proven(A, RANK)


def test_a_payload_that_was_not_installed_after_all_is_not_on_trial(tmp_path: Path) -> None:
    record = probation(tmp_path)
    record.begin("compile_cache", A, 3, RANK)
    record.withdraw(A, RANK)
    assert record.interrupted(RANK) == ()
    assert record.standing(A) == "unknown"


def test_one_ranks_crash_keeps_every_rank_of_the_node_away(tmp_path: Path) -> None:
    record = probation(tmp_path)
    record.begin("compile_cache", A, 3, RANK)
    record.begin("compile_cache", A, 3, OTHER)
    record.prove(A, OTHER)
    record.fail(A, RANK, "the engine died of SIGSEGV\nwhile it loaded")
    with pytest.raises(ArtifactRefused, match="quarantine") as refused:
        probation(tmp_path).check(A)
    assert refused.value.reason == "probation"
    assert "\n" not in str(refused.value)
    probation(tmp_path).check(B)


def test_an_operator_can_forgive(tmp_path: Path) -> None:
    record = probation(tmp_path)
    record.begin("compile_cache", A, 3, RANK)
    record.fail(A, RANK, "crashed")
    assert record.forgive(A)
    record.check(A)
    assert not record.forgive(A)


def test_the_fleet_is_told_and_the_next_node_does_not_try(tmp_path: Path) -> None:
    key = PublisherKey("node", b"k" * 32)
    record = probation(tmp_path)
    record.begin("compile_cache", A, 3, RANK)
    trial = record.fail(A, RANK, "crashed")
    assert trial is not None
    envelope = sign_denial(record.denial(trial, publisher="node7"), [key])
    other = Trust(Keyring([key.public]))
    other.deny(envelope, now=NOW)
    assert "node7" in (other.denied(A, now=NOW) or "")
    assert other.denied(B, now=NOW) is None
    assert other.denied(A, now=NOW + DENIAL_LIFE + 3600) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"schema":1,"trials":[{"x":1}]}'])
def test_a_broken_record_stops_no_start(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "probation.json").write_bytes(content)
    record = probation(tmp_path)
    assert record.standing(A) == "unknown"
    record.begin("compile_cache", A, 1, RANK)
    assert record.standing(A) == "trial"


def test_ranks_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        for number in range(5):
            probation(tmp_path).begin("compile_cache", f"{number:064x}", 1, f"dp0_rank{rank}")

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(probation(tmp_path).trials()) == 30


# -- the ledger --------------------------------------------------------------------------------------------


def entry(event: str, **fields: object) -> Entry:
    return msgspec.convert({"at": NOW, "kind": "compile_cache", "rank": RANK, "event": event, **fields}, Entry)


def test_what_is_recorded_is_read_back_and_added_up(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    recorded = [
        entry("adopted", sha256=A, generation=2, origin="s3", bytes=1000, seconds=0.5),
        entry("used", sha256=A, generation=2, saved=149.0, per_cache={"inductor": True}),
        entry("unused", reason="nothing was read"),
        entry("refused", reason="environment"),
    ]
    for one in recorded:
        ledger.record(one)
    assert list(Ledger(tmp_path / "ledger.jsonl").entries()) == recorded
    totals = ledger.totals()
    assert (totals.adopted, totals.used, totals.unused, totals.refused) == (1, 1, 1, 1)
    assert totals.seconds_saved == 149.0
    assert totals.bytes_moved == 1000


def test_an_empty_ledger_adds_up_to_nothing(tmp_path: Path) -> None:
    assert Ledger(tmp_path / "none.jsonl").totals().adopted == 0


def test_a_line_that_a_crash_cut_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.record(entry("adopted"))
    ledger.record(entry("used"))
    os.truncate(path, path.stat().st_size - 10)
    ledger.record(entry("unused"))
    assert [one.event for one in ledger.entries()] == ["adopted", "unused"]


def test_the_ledger_stays_bounded(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b"x" * ROTATE_BYTES)
    ledger = Ledger(path)
    ledger.record(entry("adopted", reason="r" * 1000))
    ledger.record(entry("used"))
    assert path.stat().st_size < 4096
    assert [one.event for one in ledger.entries()] == ["adopted", "used"]


def test_a_line_of_any_length_is_cut_to_one_write(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.record(entry("used", per_cache={f"{n:0500}": True for n in range(100)}))
    assert [one.event for one in ledger.entries()] == ["used"]


def test_many_ranks_append_at_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")

    def work() -> None:
        for _ in range(50):
            ledger.record(entry("adopted", reason="x" * 500))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert ledger.totals().adopted == 400
