"""A TCP proxy that delays, drips, cuts, flips, half-closes and records what passes through it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from warmseed.seeding.channel.endpoint import Endpoint

__all__ = ["ChaosProxy", "Faults", "chaos"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What happens to the bytes of one direction; counts are from the connection's first byte."""

    delay: float = 0.0  # seconds before each piece goes on
    drip: int | None = None  # bytes a piece
    cut_after: int | None = None  # bytes, then both directions end with a reset
    half_close_after: int | None = None  # bytes, then this direction ends and the other goes on
    flip_at: int | None = None  # the byte whose lowest bit is turned
    stall_after: int | None = None  # bytes, then nothing, for ever


@dataclass
class ChaosProxy:
    """Counts and recordings; faults may be changed between connections."""

    endpoint: Endpoint
    to_source: Faults
    to_mirror: Faults
    connections: int = 0
    sent_to_source: list[bytearray] = field(default_factory=list)  # per connection, after the faults
    sent_to_mirror: list[bytearray] = field(default_factory=list)


@asynccontextmanager
async def chaos(
    target: Endpoint, *, to_source: Faults | None = None, to_mirror: Faults | None = None
) -> AsyncIterator[ChaosProxy]:
    """A proxy in front of `target` on a free port."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            tasks.add(task)
        proxy.connections += 1
        to_source, to_mirror = bytearray(), bytearray()
        proxy.sent_to_source.append(to_source)
        proxy.sent_to_mirror.append(to_mirror)
        out_writer = None
        try:
            out_reader, out_writer = await asyncio.open_connection(target.host, target.port)
            async with asyncio.TaskGroup() as group:
                group.create_task(_pump(reader, out_writer, proxy.to_source, to_source))
                group.create_task(_pump(out_reader, writer, proxy.to_mirror, to_mirror))
        except* (OSError, _Cut):
            pass
        except* asyncio.CancelledError:
            if not closing:
                raise
        finally:
            for end in (writer, out_writer):
                if end is not None:
                    end.transport.abort()

    closing = False
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    proxy = ChaosProxy(Endpoint(*server.sockets[0].getsockname()[:2]), to_source or Faults(), to_mirror or Faults())
    try:
        yield proxy
    finally:
        closing = True
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Cut(Exception):
    """The proxy ends the connection on purpose."""


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, faults: Faults, record: bytearray) -> None:
    while data := await reader.read(faults.drip or 64 << 10):
        if faults.delay:
            await asyncio.sleep(faults.delay)
        start = len(record)
        if faults.flip_at is not None and start <= faults.flip_at < start + len(data):
            changed = bytearray(data)
            changed[faults.flip_at - start] ^= 1
            data = bytes(changed)
        ends = [end for end in (faults.cut_after, faults.half_close_after, faults.stall_after) if end is not None]
        room = min(ends, default=start + len(data)) - start
        data = data[: max(room, 0)]
        writer.write(data)
        await writer.drain()
        record += data
        if ends and len(record) >= min(ends):
            if faults.cut_after is not None:
                raise _Cut
            if faults.stall_after is not None:
                await asyncio.Event().wait()
            break
    with suppress(OSError):
        writer.write_eof()
