"""Where connections wait until they have sent one whole TLS ClientHello, at the price of a descriptor each.

A stranger that says nothing, or one byte a second, never reaches a task, a TLS object or a place that
an honest peer could want. The bytes stay in the kernel and are only looked at (``MSG_PEEK``).
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from warmseed.seeding.channel.limits import ServerLimits

__all__ = ["Lobby", "owner_of"]

_RECORD_HEADER = 5  # bytes: type, version (2), length (2); RFC 8446 5.1
_HANDSHAKE_RECORD = 22
_HELLO_BYTES = 4 << 10  # bytes in the largest ClientHello we look at; our own takes about 400
_FIRST_LOOK_AGAIN = 0.02  # seconds, doubled up to
_LAST_LOOK_AGAIN = 0.64


def owner_of(address: str) -> str:
    """Whom a connection from `address` is counted for: an IPv4 address, or an IPv6 /64."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    # One host usually holds a whole /64, so its addresses are no scarce thing.
    return str(ipaddress.IPv6Network((int(parsed) >> 64 << 64, 64)))


@dataclass(eq=False, slots=True)
class _Visitor:
    sock: socket.socket
    owner: str
    deadline: float
    needed: int = _RECORD_HEADER
    look_again: float = _FIRST_LOOK_AGAIN
    timer: asyncio.TimerHandle | None = None
    watched: bool = False  # by the loop, for readability


class Lobby:
    """Holds silent connections; calls `arrived` with each that has sent a ClientHello.

    Full means that the oldest goes: honest peers stay here for a millisecond. Whose oldest is decided
    by who holds most, so that one address can't push out the others.
    """

    def __init__(self, limits: ServerLimits, arrived: Callable[[socket.socket, str], None]) -> None:
        self._limits = limits
        self._arrived = arrived
        self._loop = asyncio.get_running_loop()
        self._visitors: OrderedDict[_Visitor, None] = OrderedDict()  # by age
        self._by_owner: dict[str, OrderedDict[_Visitor, None]] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self.evicted = 0  # pushed out by newcomers, ever
        self.expired = 0  # never sent a ClientHello in time, ever
        self.garbage = 0  # sent something else, ever
        self.peak = 0  # most held at once

    def __len__(self) -> int:
        return len(self._visitors)

    def add(self, sock: socket.socket, owner: str) -> None:
        """Take over `sock`, which is connected and non-blocking."""
        own = self._by_owner.get(owner)
        if own is not None and len(own) >= self._limits.silent_per_address:
            self._evict(next(iter(own)))
        elif len(self._visitors) >= self._limits.silent:
            self.make_room()
        visitor = _Visitor(sock, owner, self._loop.time() + self._limits.hello_seconds)
        self._visitors[visitor] = None
        self._by_owner.setdefault(owner, OrderedDict())[visitor] = None
        self.peak = max(self.peak, len(self._visitors))
        self._look(visitor)
        self._schedule_sweep()

    def make_room(self) -> bool:
        """Push out the oldest of whoever holds most; whether there was anyone."""
        if not self._visitors:
            return False
        most = max(self._by_owner.values(), key=len)
        self._evict(next(iter(most)))
        return True

    def close(self) -> None:
        """Close every connection that still waits."""
        for visitor in list(self._visitors):
            self._close(visitor)
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None

    def _look(self, visitor: _Visitor) -> None:
        """Peek at what has come; go on waiting, hand over, or close."""
        self._unwatch(visitor)
        try:
            seen = visitor.sock.recv(visitor.needed, socket.MSG_PEEK)
        except BlockingIOError:
            self._wait(visitor)
            return
        except OSError:
            self._close(visitor)
            return
        if not seen:  # closed by the other side
            self._close(visitor)
            return
        if len(seen) >= _RECORD_HEADER and visitor.needed == _RECORD_HEADER:
            length = int.from_bytes(seen[3:5], "big")
            if seen[0] != _HANDSHAKE_RECORD or seen[1] != 3 or not 0 < length <= _HELLO_BYTES:
                self.garbage += 1
                self._close(visitor)
                return
            visitor.needed = _RECORD_HEADER + length
            self._look(visitor)
        elif len(seen) >= visitor.needed:
            self._remove(visitor)
            # The transport that comes next must hear of every byte.
            visitor.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            self._arrived(visitor.sock, visitor.owner)
        else:
            self._wait(visitor, dribbling=True)

    def _wait(self, visitor: _Visitor, *, dribbling: bool = False) -> None:
        # The kernel wakes us when the rest is there. It also does for a half-closed connection, or where it
        # does not know SO_RCVLOWAT; then a timer keeps a part of a ClientHello from spinning the loop.
        visitor.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, visitor.needed)
        if dribbling:
            visitor.timer = self._loop.call_later(visitor.look_again, self._look, visitor)
            visitor.look_again = min(visitor.look_again * 2, _LAST_LOOK_AGAIN)
        else:
            visitor.watched = True
            self._loop.add_reader(visitor.sock.fileno(), self._look, visitor)

    def _unwatch(self, visitor: _Visitor) -> None:
        if visitor.watched:
            visitor.watched = False
            self._loop.remove_reader(visitor.sock.fileno())
        if visitor.timer is not None:
            visitor.timer.cancel()
            visitor.timer = None

    def _evict(self, visitor: _Visitor) -> None:
        self.evicted += 1
        self._close(visitor)

    def _close(self, visitor: _Visitor) -> None:
        self._remove(visitor)
        visitor.sock.close()

    def _remove(self, visitor: _Visitor) -> None:
        self._unwatch(visitor)
        del self._visitors[visitor]
        own = self._by_owner[visitor.owner]
        del own[visitor]
        if not own:
            del self._by_owner[visitor.owner]

    def _schedule_sweep(self) -> None:
        if self._sweeper is None and self._visitors:
            oldest = next(iter(self._visitors))
            self._sweeper = self._loop.call_at(oldest.deadline, self._sweep)

    def _sweep(self) -> None:
        self._sweeper = None
        now = self._loop.time()
        for visitor in list(self._visitors):
            if visitor.deadline > now:
                break
            self.expired += 1
            self._close(visitor)
        self._schedule_sweep()
