"""The status page and its JSON: what one look at a node should tell."""

from __future__ import annotations

import html
import time

import warmseed
from warmseed.daemon.launcher.board import Board, RankState
from warmseed.daemon.settings.config import PreloadConfig

__all__ = ["status_page", "status_record"]


def status_record(board: Board, config: PreloadConfig) -> dict[str, object]:
    """The node's state as plain values: what ``/status.json`` answers."""
    now = time.monotonic()
    return {
        "version": warmseed.__version__,
        "model": config.model,
        "engine": config.engine,
        "troubles": board.troubles(now),
        "ready_after_seconds": board.ready_after,
        "up_seconds": now - board.started,
        "rehearsal": {"outcome": board.rehearsal_outcome, "seconds": board.rehearsal_seconds},
        "ranks": [_rank_record(rank, now) for rank in board.ranks.values()],
    }


def _rank_record(rank: RankState, now: float) -> dict[str, object]:
    return {
        "name": rank.name,
        "group": rank.group,
        "global_rank": rank.global_rank,
        "local_rank": rank.local_rank,
        "pid": rank.pid,
        "exit_status": rank.status,
        "phase": rank.running,
        "socket": rank.serving.socket if rank.serving else None,
        "serving": rank.serving is not None and rank.live,
        "silent_seconds": rank.silent_for(now),
        "engines": rank.engines,
        "phases": [
            {"name": p.name, "outcome": p.outcome, "seconds": p.seconds, "detail": p.detail} for p in rank.phases
        ],
        "used": [
            {"kind": u.kind, "used": u.used, "seconds_saved": u.seconds_saved, "reason": u.reason} for u in rank.used
        ],
        "tiers": rank.metrics.tiers,
        "refusals": rank.refusals,
        "weights_bytes": rank.metrics.weights_bytes,
        "released_bytes": rank.metrics.released_bytes,
        "failure": rank.failed.message if rank.failed else None,
    }


_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;color:#222;background:#fff}
table{border-collapse:collapse;width:100%;margin:.5rem 0 1.5rem}
th,td{text-align:left;padding:.3rem .6rem;border-bottom:1px solid #ddd;vertical-align:top}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
.ok{color:#176f2c}.bad{color:#a32020}
.bar{display:flex;height:.9rem;background:#eee;min-width:8rem}.bar i{display:block;height:100%}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}th,td{border-color:#444}.bar{background:#333}
.ok{color:#6fd08c}.bad{color:#ff8a80}}
"""
_COLOURS = (
    "#4878d0",
    "#ee854a",
    "#6acc64",
    "#d65f5f",
    "#956cb4",
    "#8c613c",
    "#dc7ec0",
    "#797979",
    "#d5bb67",
    "#82c6e2",
)


def status_page(board: Board, config: PreloadConfig) -> str:
    """The node's state as one HTML page without scripts; everything foreign in it is escaped."""
    troubles = board.troubles()
    say = html.escape
    headline = (
        f'<p class="ok">Serving, {len(board.ranks)} ranks.</p>'
        if not troubles
        else "".join(f'<p class="bad">{say(line)}</p>' for line in troubles[:16])
    )
    ready = f"{board.ready_after:.1f} s" if board.ready_after is not None else "not yet"
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta http-equiv=refresh content=5>",
        f"<title>warmseed: {say(config.model)}</title><style>{_STYLE}</style>",
        f"<h1>warmseed</h1>{headline}",
        f"<p>{say(config.model)} on {say(config.engine)}; ready after {ready}; version {say(warmseed.__version__)}. ",
        '<a href="/status.json">JSON</a>, <a href="/metrics">metrics</a></p>',
        _ranks_table(board),
        _tiers_table(board),
        _used_table(board),
    ]
    return "".join(parts)


def _ranks_table(board: Board) -> str:
    say = html.escape
    longest = max((sum(p.seconds for p in r.phases) for r in board.ranks.values()), default=0.0) or 1.0
    rows = []
    for rank in board.ranks.values():
        if rank.status is not None:
            state = f'<span class="bad">exited ({rank.status})</span>'
        elif rank.serving is not None:
            state = '<span class="ok">serving</span>'
        else:
            state = say(rank.running or "starting")
        bars = "".join(
            f'<i style="width:{100 * p.seconds / longest:.2f}%;background:{_COLOURS[i % len(_COLOURS)]}" '
            f'title="{say(p.name)}: {p.seconds:.2f} s, {say(p.outcome)}"></i>'
            for i, p in enumerate(rank.phases)
        )
        total = sum(p.seconds for p in rank.phases)
        rows.append(
            f"<tr><td>{say(rank.name)}<td>{state}<td class=n>{rank.pid or ''}<td class=n>{rank.engines}"
            f'<td class=n>{total:.1f}<td><div class="bar">{bars}</div></tr>'
        )
    return (
        "<table><tr><th>rank<th>state<th class=n>pid<th class=n>engines<th class=n>seconds<th>phases</tr>"
        f"{''.join(rows)}</table>"
    )


def _tiers_table(board: Board) -> str:
    totals: dict[str, list[int]] = {}
    for rank in board.ranks.values():
        for tier in rank.metrics.tiers:
            row = totals.setdefault(tier.tier, [0, 0, 0, 0, 0])
            for i, value in enumerate(
                (tier.hits, tier.misses, tier.invalid + tier.errors, tier.bytes_read, int(tier.breaker_open))
            ):
                row[i] += value
    if not totals:
        return ""
    rows = "".join(
        f"<tr><td>{html.escape(name)}" + "".join(f"<td class=n>{value}" for value in row) + "</tr>"
        for name, row in totals.items()
    )
    heads = "".join(f"<th class=n>{head}" for head in ("hits", "misses", "bad", "bytes read", "breakers open"))
    return f"<table><tr><th>tier{heads}</tr>{rows}</table>"


def _used_table(board: Board) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(rank.name)}<td>{html.escape(used.kind)}<td>{'used' if used.used else 'not used'}"
        f"<td class=n>{used.seconds_saved:.1f}<td>{html.escape(used.reason)}</tr>"
        for rank in board.ranks.values()
        for used in rank.used
    )
    if not rows:
        return ""
    return f"<table><tr><th>rank<th>cache<th>verdict<th class=n>seconds saved<th>reason</tr>{rows}</table>"
