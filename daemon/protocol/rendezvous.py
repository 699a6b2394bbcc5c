"""Where the ranks of one group first meet: one TCP port on the node of global rank 0.

The launcher opens the port before any rank starts, so that a port in use is one clear error before any GPU
work, and a free port that was picked can't be taken by someone else in between. Global rank 0 inherits it.
"""

from __future__ import annotations

import errno
import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from warmseed.errors import ConfigurationError, printable

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its __all__

    from warmseed.daemon.protocol.spec import RankSpec

__all__ = ["connect", "listen", "release"]

_connected: dict[tuple[str, int], TCPStore] = {}
_BACKLOG: Final = 4096  # every rank of a large fleet may dial in the same second


def listen(host: str, port: int | None, *, flag: str) -> socket.socket:
    """A listening TCP socket on `host` and `port`, or on any free port.

    An address that is not this machine's own (a load balancer's, a NAT's) is served on all interfaces.

    Raises:
        ConfigurationError: if the port is taken or `host` has no address; the message names `flag`.
    """
    try:
        found = socket.getaddrinfo(host, port or 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigurationError(f"{flag}: host {printable(host)} has no address: {error.strerror}") from error
    family, _, _, _, address = found[0]
    try:
        return _bound(family, address)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            anywhere = ("::" if family == socket.AF_INET6 else "0.0.0.0", address[1])  # noqa: S104 (see above)
            try:
                return _bound(family, anywhere)
            except OSError as second:
                error = second
        raise ConfigurationError(
            f"{flag}: port {port} on {printable(host)} can't be opened: {error.strerror}; is another launcher running "
            "on this node? Give each its own port"
        ) from error


def _bound(family: int, address: tuple[object, ...]) -> socket.socket:
    opened = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
        opened.listen(_BACKLOG)
    except BaseException:
        opened.close()
        raise
    return opened


def connect(spec: RankSpec, timeout: float) -> TCPStore:
    """The group's rendezvous as a `torch.distributed.TCPStore`; every rank of the group must call this.

    One connection a process: rank 0's listening socket can be taken over only once.

    Raises:
        torch.distributed.DistStoreError: if the master can't be reached within `timeout` seconds.
    """
    place = (spec.rendezvous_host, spec.rendezvous_port)
    if place not in _connected:
        _connected[place] = _connect(spec, timeout)
    return _connected[place]


def _connect(spec: RankSpec, timeout: float) -> TCPStore:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its __all__

    wait = timedelta(seconds=timeout)
    if spec.rendezvous_fd is not None:
        return TCPStore(
            *(spec.rendezvous_host, spec.rendezvous_port, spec.world_size),
            is_master=True,
            timeout=wait,
            wait_for_workers=False,
            master_listen_fd=spec.rendezvous_fd,
        )
    return TCPStore(
        *(spec.rendezvous_host, spec.rendezvous_port, spec.world_size),
        is_master=False,
        timeout=wait,
        wait_for_workers=False,
    )


def release(spec: RankSpec) -> None:
    """Close the inherited socket, for an engine that insists on opening the port itself."""
    if spec.rendezvous_fd is not None:
        os.close(spec.rendezvous_fd)
