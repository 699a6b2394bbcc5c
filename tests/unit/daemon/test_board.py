"""The board's picture of a rank, and what it calls trouble."""

from __future__ import annotations

import itertools

from warmseed.daemon.launcher.board import SILENT_AFTER, Board, RankState
from warmseed.daemon.pages.metrics import Exposition
from warmseed.daemon.pages.status import status_page, status_record
from warmseed.daemon.protocol.status import (
    Alive,
    Begin,
    EngineAttached,
    EngineDetached,
    Failed,
    Metrics,
    Phase,
    Refused,
    Serving,
    Used,
)
from warmseed.daemon.settings.config import PreloadConfig


def rank(number: int = 0) -> RankState:
    return RankState(f"target-{number}", "target", number, number, pid=100 + number)


def test_no_rank_and_a_stopping_launcher_are_trouble() -> None:
    board = Board()
    assert board.troubles() == ["no rank has been started yet"]
    board = Board([rank()])
    board.ranks["target-0"].take(Serving("/s"), 0)
    assert board.troubles() == []
    assert board.all_serving
    board.stopping = True
    assert board.troubles() == ["the launcher is stopping"]


def test_phase_in_progress_is_named_until_it_ends() -> None:
    state = rank()
    board = Board([state])
    state.take(Begin("load"), 0)
    assert board.troubles() == ["target-0 is starting (load)"]
    state.take(Phase("load", seconds=2.0), 0)
    assert board.troubles() == ["target-0 is starting"]


def test_exited_rank_is_trouble_even_if_it_served() -> None:
    state = rank()
    state.take(Serving("/s"), 0)
    state.status = -9
    assert Board([state]).troubles() == ["target-0 has exited with status -9"]
    assert not Board([state]).all_serving


def test_only_ranks_with_heartbeats_can_fall_silent() -> None:
    quiet, lively = rank(0), rank(1)
    for state in (quiet, lively):
        state.take(Serving("/s"), 0)
    lively.take(Alive(), 10)
    board = Board([quiet, lively])
    assert board.troubles(10 + SILENT_AFTER) == []
    assert board.troubles(11 + SILENT_AFTER) == ["target-1 has given no sign of life for 31 s"]
    lively.take(EngineAttached(1), 11 + SILENT_AFTER)
    assert board.troubles(12 + SILENT_AFTER) == []


def test_engines_are_counted_or_taken_from_the_rank() -> None:
    state = rank()
    for message in (EngineAttached(1), EngineAttached(2), EngineDetached(1), EngineDetached(2), EngineDetached(3)):
        state.take(message, 0)
    assert (state.engines, state.attaches) == (0, 2)
    state.take(Metrics(engines=5), 0)
    assert state.engines == 5


def test_endless_messages_do_not_grow_the_board() -> None:
    state = rank()
    for number in range(1000):
        state.take(Phase(f"p{number}"), 0)
        state.take(Used("k", used=True), 0)
        state.take(Refused({f"reason {number}": 1}), 0)
    assert len(state.phases) + state.dropped_phases == 1000
    assert len(state.phases) < 100
    assert len(state.used) < 100
    assert len(state.refusals) <= 101
    assert state.refusals.total() == 1000


def test_pages_and_metrics_escape_what_ranks_say() -> None:
    state = rank()
    nasty = '<b>"\\\n'
    for message in (Phase(nasty, nasty), Begin(nasty), Failed(nasty), Used(nasty, used=False, reason=nasty)):
        state.take(message, 0)
    board = Board([state])
    config = PreloadConfig(model=nasty)
    assert "<b>" not in status_page(board, config)
    text = Exposition(board).render()[0].decode()
    assert all(line.startswith(("#", "warmseed_", "process_")) for line in text.splitlines())
    assert status_record(board, config)["model"] == nasty


def test_metrics_of_64_ranks_are_complete() -> None:
    states = [rank(number) for number in range(64)]
    for state, number in itertools.product(states, range(12)):
        state.take(Phase(f"phase{number}", seconds=1.0), 0)
    text = Exposition(Board(states)).render()[0].decode()
    assert text.count("warmseed_phase_seconds{") == 64 * 12


def test_metrics_follow_every_change_of_a_rank() -> None:
    state = rank()
    exposition = Exposition(Board([state]))

    def value(series: str) -> str:
        lines = exposition.render()[0].decode().splitlines()
        return next(line.split()[-1] for line in lines if line.startswith(series))

    assert value("warmseed_rank_serving{") == "0.0"
    state.take(Serving("/s"), 0)
    assert value("warmseed_rank_serving{") == "1.0"
    state.take(EngineAttached(1), 0)
    assert value("warmseed_engines_attached{") == "1.0"
    state.take(Phase("load", seconds=2.0), 0)
    assert value("warmseed_phase_seconds{") == "2.0"
    state.take(Metrics(weights_bytes=7), 0)
    assert value("warmseed_weights_bytes{") == "7.0"
    state.status = 1
    assert value("warmseed_rank_serving{") == "0.0"
    assert value("warmseed_ready") == "0.0"
