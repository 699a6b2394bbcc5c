"""One rank as its launcher holds it: the process, its end of the pipes, and what is known of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType

import msgspec

from warmseed.daemon.launcher.board import RankState
from warmseed.daemon.launcher.processes import ChildProcess
from warmseed.daemon.logs import RANK_VARIABLE
from warmseed.daemon.protocol.spec import RankSpec, encode_spec
from warmseed.daemon.protocol.status import LINE_BYTES, Order

__all__ = ["ChildRank"]


class ChildRank:
    """A started rank."""

    def __init__(self, spec: RankSpec, state: RankState, process: ChildProcess, status_fd: int, orders_fd: int) -> None:
        self.spec = spec
        self.state = state
        self.process = process
        self._status_fd = status_fd  # -1 once `lines` owns it
        self._orders_fd = orders_fd

    @classmethod
    def start(
        cls, spec: RankSpec, state: RankState, command: Sequence[str], *, launch_id: str, listener: socket.socket | None
    ) -> ChildRank:
        """Start `command` as the rank that `spec` describes; `listener` is the rendezvous it inherits.

        Raises:
            OSError: if the process or its pipes can't be made.
        """
        with _Descriptors() as kept:
            status_ours, status_theirs = kept.pipe()
            orders_theirs, orders_ours = kept.pipe()
            # A file in memory and not a pipe: it takes a spec of any size before anyone reads.
            spec_fd = kept.keep(os.memfd_create("warmseed-rank-spec", os.MFD_CLOEXEC))
            with open(spec_fd, "wb", closefd=False) as file:
                file.write(encode_spec(msgspec.structs.replace(spec, orders_fd=orders_theirs)))
            os.lseek(spec_fd, 0, os.SEEK_SET)
            passed = [spec_fd, status_theirs, orders_theirs, *([listener.fileno()] if listener else [])]
            process = ChildProcess.start(
                spec.name,
                (*command, "--spec-fd", str(spec_fd), "--status-fd", str(status_theirs)),
                launch_id=launch_id,
                env={RANK_VARIABLE: spec.name},
                pass_fds=passed,
            )
            kept.hand_over(status_ours, orders_ours)
        os.set_blocking(orders_ours, False)
        state.pid = process.pid
        return cls(spec, state, process, status_ours, orders_ours)

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """The rank's status lines until it closes the pipe; those longer than `LINE_BYTES` come cut and invalid."""
        reader = asyncio.StreamReader(limit=LINE_BYTES)
        pipe = os.fdopen(self._status_fd, "rb", buffering=0)
        self._status_fd = -1
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            while True:
                try:
                    yield await reader.readuntil(b"\n")
                except asyncio.IncompleteReadError:
                    return
                except asyncio.LimitOverrunError as overrun:
                    yield await reader.read(overrun.consumed)
        finally:
            transport.close()

    def order(self, order: Order) -> None:
        """Tell the rank; one that is gone or has stopped listening hears nothing, which its exit tells."""
        with contextlib.suppress(OSError):
            os.write(self._orders_fd, msgspec.json.encode(order) + b"\n")

    def close(self) -> None:
        """Close the pipes; the process must have ended."""
        for fd in (self._status_fd, self._orders_fd):
            if fd >= 0:
                os.close(fd)
        self._status_fd = self._orders_fd = -1


class _Descriptors:
    """File descriptors that are closed when the block ends, except those handed over."""

    def __init__(self) -> None:
        self._fds: set[int] = set()

    def __enter__(self) -> _Descriptors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for fd in self._fds:
            os.close(fd)

    def keep(self, fd: int) -> int:
        self._fds.add(fd)
        return fd

    def pipe(self) -> tuple[int, int]:
        read, write = os.pipe2(os.O_CLOEXEC)
        self._fds |= {read, write}
        return read, write

    def hand_over(self, *fds: int) -> None:
        self._fds -= set(fds)
