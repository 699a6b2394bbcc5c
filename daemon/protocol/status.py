"""What a rank and its launcher tell each other while the rank runs.

Rank to launcher: one JSON object a line on the status pipe, `Message`. Launcher to rank: one JSON object
a line on the orders pipe, `Order`; its end means that the launcher is gone. Both ends live on one machine
and in one release, but each side still treats the other's bytes as input: capped lines, strict types.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from warmseed.errors import WarmseedError, printable

__all__ = [
    "LINE_BYTES",
    "Alive",
    "Begin",
    "EngineAttached",
    "EngineDetached",
    "Failed",
    "Message",
    "Metrics",
    "Order",
    "Phase",
    "PhaseReport",
    "Refused",
    "Rehearsal",
    "RehearsalOutcome",
    "Rehearsed",
    "Serving",
    "StatusLineInvalid",
    "StatusWriter",
    "TierCounts",
    "Used",
    "decode_message",
    "next_order",
    "orders",
]

LINE_BYTES: Final = 64 << 10  # bytes in the longest line, either way
_QUEUED_LINES: Final = 512  # lines kept for a launcher that is slow to read
Detail = dict[str, str | int | float | bool | None]


class StatusLineInvalid(WarmseedError):
    """A line on a status or orders pipe is not a message of this release."""


class _Event(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="event", omit_defaults=True):
    pass


class Begin(_Event, frozen=True, tag="begin"):
    """A step has started; a rank that hangs is then known to hang in it."""

    name: str


class Phase(_Event, frozen=True, tag="phase"):
    """A step of the start is over."""

    name: str
    outcome: str = "ok"  # ok, hit, miss, skipped, failed, …: one word
    seconds: float = 0.0
    detail: Detail = {}  # figures of the step: bytes=, tier=, released_bytes=, …


class Serving(_Event, frozen=True, tag="serving"):
    """The rank's socket is bound; engines may attach."""

    socket: str | None = None
    bound_at: float | None = None  # time.monotonic() of the bind; one clock for all processes of a boot


class Alive(_Event, frozen=True, tag="alive"):
    """A heartbeat. A rank that has sent one and falls silent is shown as hung."""


class EngineAttached(_Event, frozen=True, tag="engine_attached"):
    """An engine mapped the weights."""

    pid: int | None = None
    seconds: float = 0.0


class EngineDetached(_Event, frozen=True, tag="engine_detached"):
    """An engine let go of the weights, or died."""

    pid: int | None = None


class Used(_Event, frozen=True, tag="used"):
    """Whether an adopted artifact was used, by the engine's own evidence."""

    kind: str
    used: bool
    seconds_saved: float = 0.0
    reason: str = ""


class TierCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One tier's totals since the rank started."""

    tier: str
    hits: int = 0
    misses: int = 0
    invalid: int = 0
    errors: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    breaker_open: bool = False


class Metrics(_Event, frozen=True, tag="metrics"):
    """Totals since the rank started; each message replaces the one before."""

    tiers: tuple[TierCounts, ...] = ()
    engines: int | None = None  # engines attached now, where the rank knows it exactly
    weights_bytes: int | None = None
    released_bytes: int | None = None  # memory given back between warmup and serving


class Refused(_Event, frozen=True, tag="refused"):
    """Artifacts, peers or clients refused since the last such message, by reason."""

    counts: dict[str, int]


class Rehearsal(_Event, frozen=True, tag="rehearsal"):
    """The rank has come to the rehearsal and waits for `Rehearsed`.

    The launcher runs one throwaway engine when every rank of the node has come here: the command of the
    lowest rank that gave one. A gang that spans nodes must agree on `needed` before it reports it.
    """

    needed: bool
    argv: tuple[str, ...] = ()
    env: dict[str, str] = {}  # added to the launcher's environment
    reason: str = ""  # what is missing


class Failed(_Event, frozen=True, tag="failed"):
    """The last words of a rank that is about to exit."""

    message: str
    code: int = 1


Message = (
    Begin | Phase | Serving | Alive | EngineAttached | EngineDetached | Used | Metrics | Refused | Rehearsal | Failed
)


RehearsalOutcome = Literal["ok", "failed", "timeout", "skipped"]


class Rehearsed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="order", tag="rehearsed"):
    """The rehearsal is over, or was not needed; the rank goes on either way."""

    outcome: RehearsalOutcome
    seconds: float = 0.0
    reason: str = ""


Order = Rehearsed

_decoder = msgspec.json.Decoder(Message)
_order_decoder = msgspec.json.Decoder(Order)
_encoder = msgspec.json.Encoder()


def decode_message(line: bytes) -> Message:
    """The message that one line holds.

    Raises:
        StatusLineInvalid: if it is none.
    """
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise StatusLineInvalid(f"status line is not a known message ({printable(error)}); it is left out") from error


@dataclass(slots=True)
class PhaseReport:
    """What a step says about itself while it runs; see `StatusWriter.phase`."""

    outcome: str = "ok"
    detail: Detail = field(default_factory=dict)


class StatusWriter:
    """A rank's end of the status pipe. Safe to use from any thread, never blocks, never raises for a dead launcher.

    Lines that a slow launcher has not taken yet are kept, the newest 512 of them.
    """

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        os.set_inheritable(fd, False)
        self._fd = fd
        self._lock = threading.Lock()
        self._rest = b""  # the part of a line that did not fit into the pipe
        self._queue: deque[bytes] = deque(maxlen=_QUEUED_LINES)

    def send(self, message: Message) -> None:
        """Write `message`, now if the pipe has room, else with the next one."""
        line = _encoder.encode(message) + b"\n"
        if len(line) > LINE_BYTES:
            return  # the launcher would refuse it
        with self._lock:
            self._queue.append(line)
            self._flush()

    def refused(self, reasons: Iterable[str]) -> None:
        """Count refusals; one word or two for each, the same word for the same cause."""
        if counts := Counter(printable(reason, limit=80) for reason in reasons):
            self.send(Refused(dict(counts)))

    @contextmanager
    def phase(self, name: str) -> Iterator[PhaseReport]:
        """Report the step `name`: its begin, and at its end the time and what the step set on the report.

        An exception makes the outcome ``failed`` and passes on.
        """
        report = PhaseReport()
        start = time.monotonic()
        self.send(Begin(name))
        try:
            yield report
        except BaseException:
            report.outcome = "failed"
            raise
        finally:
            self.send(Phase(name, report.outcome, time.monotonic() - start, report.detail))

    def close(self) -> None:
        """Close the pipe; later messages are dropped."""
        with self._lock:
            if self._fd >= 0:
                self._flush()
                os.close(self._fd)
                self._fd = -1

    def _flush(self) -> None:
        try:
            while self._fd >= 0 and (self._rest or self._queue):
                self._rest = self._rest or self._queue.popleft()
                self._rest = self._rest[os.write(self._fd, self._rest) :]
        except BlockingIOError:
            return
        except OSError:
            # The launcher is gone, and with it whoever would read this; its death ends this rank anyway.
            self._queue.clear()
            self._rest = b""


@asynccontextmanager
async def orders(fd: int) -> AsyncIterator[asyncio.StreamReader]:
    """The orders pipe `fd` as a stream for `next_order`; closed at the end."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=LINE_BYTES)
    pipe = os.fdopen(fd, "rb", buffering=0)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        yield reader
    finally:
        transport.close()


async def next_order(reader: asyncio.StreamReader) -> Order | None:
    """The launcher's next order, or `None` when the launcher is gone.

    Raises:
        StatusLineInvalid: if the line is not an order of this release.
    """
    try:
        line = await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError:
        return None
    except asyncio.LimitOverrunError as error:
        raise StatusLineInvalid(f"an order is longer than {LINE_BYTES} bytes") from error
    try:
        return _order_decoder.decode(line)
    except msgspec.DecodeError as error:
        raise StatusLineInvalid(f"order is not known to this rank ({printable(error)})") from error
