"""What Prometheus reads from a launcher: the metrics' names, and their text.

Counters of ranks are totals since the rank's start, summed over the node where a rank's own figure would
only multiply series. Everything is drawn from the `Board` at the moment of the scrape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

import warmseed
from warmseed.daemon.launcher.board import Board, RankState

__all__ = ["Exposition"]


class Exposition:
    """The text of ``/metrics`` for one board."""

    def __init__(self, board: Board) -> None:
        self._now = CollectorRegistry()
        self._now.register(_Collected(lambda: _current(board)))
        ProcessCollector(registry=self._now)
        # One series for each rank and phase is most of the text, and changes rarely once a node serves.
        self._kept = (
            _Kept(lambda: _phases(_ranks(board)), lambda: [len(rank.phases) for rank in _ranks(board)]),
            _Kept(lambda: _by_rank(_ranks(board)), lambda: [_figures(rank) for rank in _ranks(board)]),
        )

    def render(self) -> tuple[bytes, str]:
        """The metrics now, and their content type."""
        return generate_latest(self._now) + b"".join(kept.text() for kept in self._kept), CONTENT_TYPE_LATEST


class _Kept:
    """Text that is drawn again only when what it is made of has changed."""

    def __init__(self, draw: Callable[[], Iterator[Metric]], made_of: Callable[[], object]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Collected(draw))
        self._made_of = made_of
        self._last: object = None
        self._text = b""

    def text(self) -> bytes:
        now = self._made_of()
        if now != self._last:
            self._last, self._text = now, generate_latest(self._registry)
        return self._text


class _Collected(Collector):
    def __init__(self, draw: Callable[[], Iterator[Metric]]) -> None:
        self._draw = draw

    def collect(self) -> Iterator[Metric]:
        return self._draw()

    def describe(self) -> Iterable[Metric]:
        return []  # the registry then doesn't draw everything only to learn the names


def _current(board: Board) -> Iterator[Metric]:
    ranks = _ranks(board)
    yield _gauge("warmseed_ready", "1 when every rank of this node serves and lives.", 0 if board.troubles() else 1)
    yield _gauge("warmseed_ranks", "Ranks of this node, all groups together.", len(ranks))
    if board.ready_after is not None:
        yield _gauge("warmseed_ready_seconds", "Seconds from the launcher's start to readiness.", board.ready_after)
    build = GaugeMetricFamily("warmseed_build_info", "Always 1; the version is in the label.", labels=["version"])
    build.add_metric([warmseed.__version__], 1)
    yield build
    yield from _tiers(ranks)
    yield from _artifacts(ranks)
    if board.rehearsal_outcome is not None:
        rehearsal = GaugeMetricFamily(
            "warmseed_rehearsal_seconds", "Seconds the rehearsal took, by its outcome.", labels=["outcome"]
        )
        rehearsal.add_metric([board.rehearsal_outcome], board.rehearsal_seconds)
        yield rehearsal


def _ranks(board: Board) -> list[RankState]:
    return list(board.ranks.values())


def _figures(rank: RankState) -> tuple[int, int, int, int | None, int | None]:
    serving = 1 if rank.serving is not None and rank.live else 0
    return serving, rank.engines, rank.attaches, rank.metrics.weights_bytes, rank.metrics.released_bytes


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _by_rank(ranks: list[RankState]) -> Iterator[Metric]:
    labels = ["rank", "group"]
    serving = GaugeMetricFamily("warmseed_rank_serving", "1 while the rank serves engines.", labels=labels)
    engines = GaugeMetricFamily("warmseed_engines_attached", "Engines that map this rank's weights.", labels=labels)
    attaches = CounterMetricFamily("warmseed_engine_attaches", "Engines that ever mapped them.", labels=labels)
    weights = GaugeMetricFamily("warmseed_weights_bytes", "Bytes of weights the rank holds.", labels=labels)
    released = GaugeMetricFamily(
        "warmseed_released_bytes", "Bytes given back between warmup and serving.", labels=labels
    )
    for rank in ranks:
        who = [str(rank.global_rank), rank.group]
        is_serving, attached, ever, held, given_back = _figures(rank)
        serving.add_metric(who, is_serving)
        engines.add_metric(who, attached)
        attaches.add_metric(who, ever)
        if held is not None:
            weights.add_metric(who, held)
        if given_back is not None:
            released.add_metric(who, given_back)
    yield from (serving, engines, attaches, weights, released)


def _phases(ranks: list[RankState]) -> Iterator[Metric]:
    seconds = GaugeMetricFamily(
        "warmseed_phase_seconds", "Seconds a step of the start took.", labels=["rank", "group", "phase", "outcome"]
    )
    for rank in ranks:
        for phase in rank.phases:
            seconds.add_metric([str(rank.global_rank), rank.group, phase.name, phase.outcome], phase.seconds)
    yield seconds


def _tiers(ranks: list[RankState]) -> Iterator[Metric]:
    reads: Counter[tuple[str, str]] = Counter()
    moved: Counter[tuple[str, str]] = Counter()
    breakers: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    for rank in ranks:
        refusals.update(rank.refusals)
        for tier in rank.metrics.tiers:
            reads[tier.tier, "hit"] += tier.hits
            reads[tier.tier, "miss"] += tier.misses
            reads[tier.tier, "invalid"] += tier.invalid
            reads[tier.tier, "error"] += tier.errors
            moved[tier.tier, "read"] += tier.bytes_read
            moved[tier.tier, "written"] += tier.bytes_written
            breakers[tier.tier] += int(tier.breaker_open)
    outcomes = CounterMetricFamily("warmseed_tier_reads", "Reads by tier and outcome.", labels=["tier", "outcome"])
    for (name, outcome), count in reads.items():
        outcomes.add_metric([name, outcome], count)
    volume = CounterMetricFamily("warmseed_tier_bytes", "Bytes by tier and direction.", labels=["tier", "direction"])
    for (name, direction), count in moved.items():
        volume.add_metric([name, direction], count)
    open_breakers = GaugeMetricFamily("warmseed_tier_breaker_open", "Ranks that have given a tier up.", labels=["tier"])
    for name, count in breakers.items():
        open_breakers.add_metric([name], count)
    refused = CounterMetricFamily("warmseed_refusals", "Refused artifacts, peers and clients.", labels=["reason"])
    for reason, count in refusals.items():
        refused.add_metric([reason], count)
    yield from (outcomes, volume, open_breakers, refused)


def _artifacts(ranks: list[RankState]) -> Iterator[Metric]:
    verdicts: Counter[tuple[str, str]] = Counter()
    saved: Counter[str] = Counter()
    for rank in ranks:
        for used in rank.used:
            verdicts[used.kind, "used" if used.used else "unused"] += 1
            saved[used.kind] += used.seconds_saved  # type: ignore[assignment]  # a Counter adds floats just as well
    adopted = CounterMetricFamily(
        "warmseed_artifacts", "Adopted artifacts by the engine's own verdict.", labels=["kind", "verdict"]
    )
    for (kind, verdict), count in verdicts.items():
        adopted.add_metric([kind, verdict], count)
    seconds = CounterMetricFamily("warmseed_seconds_saved", "Seconds of start-up work not done.", labels=["kind"])
    for kind, total in saved.items():
        seconds.add_metric([kind], total)
    yield from (adopted, seconds)
