"""Messages on a Unix stream socket: four letters, a length, msgpack. File descriptors travel in small batches.

Nothing that arrives is trusted: lengths are capped before a byte is read, bytes become strict structs or an error, and
descriptors that nobody asked for are closed.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec

from warmseed.daemon.weights.errors import MessageRefused
from warmseed.errors import printable

__all__ = [
    "ANSWER_LIMIT",
    "REQUEST_LIMIT",
    "aread",
    "asend",
    "asend_descriptors",
    "decode",
    "encode",
    "read",
    "read_descriptors",
    "send",
]

REQUEST_LIMIT: Final = 16 << 20  # bytes; a fingerprint of 65,536 files fits
ANSWER_LIMIT: Final = 256 << 20  # bytes; a million tensors fit
BATCH: Final = 64  # descriptors in one message; the kernel's own limit is 253
_MAGIC: Final = b"WSW1"
_HEAD: Final = struct.Struct("!4sI")
_PIECE: Final = 1 << 20
T = TypeVar("T")


def encode(message: msgspec.Struct) -> bytes:
    """`message` as a frame."""
    body = msgspec.msgpack.encode(message)
    return _HEAD.pack(_MAGIC, len(body)) + body


def decode(body: bytes | bytearray, kind: Any, who: str) -> Any:
    """`body` as one of the structs of `kind`.

    Raises:
        MessageRefused: it is none of them; `who` sent it.
    """
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError, OverflowError) as error:
        raise MessageRefused(f"{who} sent a malformed message: {printable(error)}; the connection is closed") from error


def _length(head: bytes | bytearray, limit: int, who: str) -> int:
    magic, length = _HEAD.unpack(head)
    if magic != _MAGIC:
        raise MessageRefused(f"{who} does not speak this protocol (first bytes {magic!r}); the connection is closed")
    if length > limit:
        raise MessageRefused(f"{who} announced {length} bytes, over the limit of {limit}; the connection is closed")
    return int(length)


# The daemon's side: asyncio, under the caller's deadline -----------------------------------------


async def aread(connection: socket.socket, kind: Any, *, limit: int, who: str) -> Any | None:
    """The next message, or `None` when the peer has closed before sending one.

    Raises:
        MessageRefused: it is too long, cut short, or no message of `kind`.
        OSError: the connection broke.
    """
    head = await _arecv(connection, _HEAD.size)
    if not head:
        return None
    if len(head) == _HEAD.size:
        length = _length(head, limit, who)
        body = await _arecv(connection, length)
        if len(body) == length:
            return decode(body, kind, who)
    raise MessageRefused(f"{who} closed the connection in the middle of a message")


async def _arecv(connection: socket.socket, count: int) -> bytearray:
    """`count` bytes, or fewer at the end of the stream; grows as bytes arrive, whatever was announced."""
    loop = asyncio.get_running_loop()
    data = bytearray()
    while len(data) < count:
        piece = await loop.sock_recv(connection, min(_PIECE, count - len(data)))
        if not piece:
            break
        data += piece
    return data


async def asend(connection: socket.socket, message: msgspec.Struct | bytes) -> None:
    """Send `message`, or a frame that is encoded already.

    Raises:
        OSError: the connection broke.
    """
    frame = message if isinstance(message, bytes) else encode(message)
    await asyncio.get_running_loop().sock_sendall(connection, frame)


async def asend_descriptors(connection: socket.socket, descriptors: Sequence[int]) -> None:
    """Send copies of `descriptors`; the peer reads them with `read_descriptors`.

    Raises:
        OSError: the connection broke.
    """
    for start in range(0, len(descriptors), BATCH):
        batch = array.array("i", descriptors[start : start + BATCH])
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, batch)]
        while True:
            try:
                connection.sendmsg([b"D"], control)
                break
            except BlockingIOError:
                await _writable(connection)


async def _writable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_writer(connection, wake)
    try:
        await ready
    finally:
        loop.remove_writer(connection)


# The engine's side: plain blocking calls, each under one deadline for the whole exchange ----------


def send(connection: socket.socket, message: msgspec.Struct, *, deadline: float) -> None:
    """Send `message` before `deadline` (of `time.monotonic`).

    Raises:
        TimeoutError: the deadline passed.
        OSError: the connection broke.
    """
    connection.settimeout(_left(deadline))
    connection.sendall(encode(message))


def read(connection: socket.socket, kind: Any, *, limit: int, who: str, deadline: float | None) -> Any | None:
    """The next message, or `None` when the peer has closed before sending one. No `deadline`: waits for ever.

    Raises:
        MessageRefused: it is too long, cut short, or no message of `kind`.
        TimeoutError: the deadline passed.
        OSError: the connection broke.
    """
    head = _recv(connection, _HEAD.size, deadline)
    if not head:
        return None
    if len(head) == _HEAD.size:
        length = _length(head, limit, who)
        body = _recv(connection, length, deadline)
        if len(body) == length:
            return decode(body, kind, who)
    raise MessageRefused(f"{who} closed the connection in the middle of a message")


def _recv(connection: socket.socket, count: int, deadline: float | None) -> bytearray:
    data = bytearray()
    while len(data) < count:
        connection.settimeout(None if deadline is None else _left(deadline))
        piece = connection.recv(min(_PIECE, count - len(data)))
        if not piece:
            break
        data += piece
    return data


def read_descriptors(connection: socket.socket, count: int, *, who: str, deadline: float) -> list[int]:
    """Exactly `count` descriptors, closed on exec, owned by the caller.

    Raises:
        MessageRefused: the peer sent more, fewer, or something else. Every descriptor received is closed.
        TimeoutError: the deadline passed; likewise.
        OSError: the connection broke; likewise.
    """
    received: list[int] = []
    try:
        while len(received) < count:
            wanted = min(BATCH, count - len(received))
            connection.settimeout(_left(deadline))
            # socket.recv_fds ignores its flags and so leaks descriptors into children; recvmsg does not.
            data, control, flags, _ = connection.recvmsg(1, socket.CMSG_SPACE(4 * wanted), socket.MSG_CMSG_CLOEXEC)
            arrived = _rights(control)
            received += arrived
            if flags & socket.MSG_CTRUNC or data != b"D" or len(arrived) != wanted:
                raise MessageRefused(f"{who} sent {len(arrived)} file descriptors where {wanted} were due")
    except BaseException:
        for descriptor in received:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        raise
    return received


def _rights(control: Sequence[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline of this exchange has passed")
    return left
