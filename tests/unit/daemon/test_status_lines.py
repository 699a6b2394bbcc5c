"""Status and orders pipes: nothing blocks, nothing is lost that fits, nothing foreign is believed."""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmseed.daemon.protocol.status import (
    LINE_BYTES,
    Alive,
    Begin,
    EngineAttached,
    Failed,
    Message,
    Metrics,
    Phase,
    Refused,
    Rehearsal,
    Serving,
    StatusLineInvalid,
    StatusWriter,
    TierCounts,
    Used,
    decode_message,
    next_order,
    orders,
)

MESSAGES: list[Message] = [
    Begin("load"),
    Phase("load", "hit", 1.5, {"bytes": 7, "tier": "disk", "warm": True, "none": None}),
    Serving("/run/x.sock", 12.5),
    Alive(),
    EngineAttached(7, 0.01),
    Used("compile_cache", used=False, reason="rebuilt"),
    Metrics((TierCounts("s3", hits=1, breaker_open=True),), engines=2, weights_bytes=9),
    Refused({"expired": 2}),
    Rehearsal(needed=True, argv=("vllm", "serve"), env={"A": "b"}, reason="tables"),
    Failed("no", 2),
]


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe2(os.O_CLOEXEC)
    yield read, write
    os.close(read)


def everything(fd: int) -> list[Message]:
    os.set_blocking(fd, False)
    data = b""
    while piece := os.read(fd, 1 << 20):
        data += piece
    return [decode_message(line) for line in data.splitlines()]


def test_messages_arrive_as_they_were_sent(pipe: tuple[int, int]) -> None:
    writer = StatusWriter(pipe[1])
    for message in MESSAGES:
        writer.send(message)
    writer.close()
    writer.send(Alive())  # after the end: dropped
    assert everything(pipe[0]) == MESSAGES


def test_phase_reports_begin_end_time_and_failure(pipe: tuple[int, int]) -> None:
    writer = StatusWriter(pipe[1])
    with writer.phase("tables") as report:
        report.outcome = "hit"
        report.detail["bytes"] = 5
    with pytest.raises(KeyError), writer.phase("load"):
        raise KeyError
    writer.close()
    begin, tables, _, load = everything(pipe[0])
    assert begin == Begin("tables")
    assert isinstance(tables, Phase)
    assert isinstance(load, Phase)
    assert (tables.outcome, tables.detail) == ("hit", {"bytes": 5})
    assert tables.seconds >= 0
    assert load.outcome == "failed"


def test_full_pipe_never_blocks_and_keeps_the_newest(pipe: tuple[int, int]) -> None:
    fcntl.fcntl(pipe[1], fcntl.F_SETPIPE_SZ, 4096)
    writer = StatusWriter(pipe[1])
    for number in range(5000):
        writer.send(Phase(f"p{number}"))
    taken = b""
    os.set_blocking(pipe[0], False)
    while b"p4999" not in taken:
        taken += os.read(pipe[0], 1 << 16)
        writer.send(Alive())  # sends what was kept, and itself
    lines = taken.splitlines()
    complete = [decode_message(line) for line in lines[:-1]]
    assert complete[0] == Phase("p0")
    assert len(complete) < 2000
    writer.close()


def test_dead_launcher_is_no_error(pipe: tuple[int, int]) -> None:
    read, write = os.pipe2(os.O_CLOEXEC)
    writer = StatusWriter(write)
    os.close(read)
    for _ in range(3):
        writer.send(Alive())
    writer.close()
    os.close(pipe[1])


def test_threads_do_not_mix_their_lines(pipe: tuple[int, int]) -> None:
    writer = StatusWriter(pipe[1])
    threads = [
        threading.Thread(target=lambda n=n: [writer.send(Phase(f"{n}" * 200)) for _ in range(20)]) for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    assert len(everything(pipe[0])) == 80


def test_message_too_long_for_a_line_is_left_out(pipe: tuple[int, int]) -> None:
    writer = StatusWriter(pipe[1])
    writer.send(Failed("x" * LINE_BYTES))
    writer.send(Alive())
    writer.close()
    assert everything(pipe[0]) == [Alive()]


def test_refusals_are_counted_by_reason(pipe: tuple[int, int]) -> None:
    writer = StatusWriter(pipe[1])
    writer.refused([])
    writer.refused(["expired", "expired", "other\nGPU"])
    writer.close()
    assert everything(pipe[0]) == [Refused({"expired": 2, "other\\nGPU": 1})]


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"null",
        b"[]",
        b'{"event":"unheard"}',
        b'{"event":"phase"}',
        b'{"event":"phase","name":3}',
        b'{"event":"phase","name":"x","extra":1}',
        b'{"event":"serving","bound_at":"soon"}',
        b'{"event":"failed","message":"x","code":1e999}',
        b"\xff\xfe",
        b"[" * 10_000,
    ],
)
def test_foreign_line_is_refused(line: bytes) -> None:
    with pytest.raises(StatusLineInvalid):
        decode_message(line)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(line: bytes) -> None:
    try:
        decode_message(line)
    except StatusLineInvalid:
        return


def test_orders_end_with_the_launcher() -> None:
    async def whole() -> None:
        read, write = os.pipe2(os.O_CLOEXEC)
        async with asyncio.timeout(5), orders(read) as reader:
            os.write(write, b'{"order":"rehearsed","outcome":"ok","seconds":1.5}\n{"order":"dance"}\n')
            first = await next_order(reader)
            assert first is not None
            assert (first.outcome, first.seconds) == ("ok", 1.5)
            with pytest.raises(StatusLineInvalid):
                await next_order(reader)
            os.close(write)
            assert await next_order(reader) is None

    asyncio.run(whole())
