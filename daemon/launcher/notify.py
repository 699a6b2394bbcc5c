"""systemd's readiness and watchdog protocol: one datagram a message (``man sd_notify``)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Mapping

__all__ = ["Notifier"]

_log = logging.getLogger(__name__)


class Notifier:
    """Messages for the service manager; without ``NOTIFY_SOCKET`` every call does nothing."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        address = environ.get("NOTIFY_SOCKET", "")
        if address and address[0] not in "/@":
            _log.warning(
                "NOTIFY_SOCKET %r is neither a path nor an abstract name; systemd will not be notified", address
            )
            address = ""
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.watchdog_interval = _watchdog(environ)  # seconds between pings; `None`: no watchdog

    def send(self, *lines: str) -> None:
        """Send ``KEY=VALUE`` lines as one message. Best effort: the manager's own timeouts judge a loss."""
        if not self._address:
            return
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as out,
        ):
            out.sendto("\n".join(lines).encode(), self._address)

    async def watchdog(self) -> None:
        """Ping until cancelled, from the loop: a launcher whose loop hangs stops pinging."""
        if self.watchdog_interval is None:
            return
        while True:
            self.send("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_interval)


def _watchdog(environ: Mapping[str, str]) -> float | None:
    micros, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not micros.isdecimal() or int(micros) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(micros) / 1e6 / 3  # systemd advises half; a third survives one late ping
