"""An engine's side of a connection to the daemon: one request at a time, then a watch for the daemon's end."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from warmseed.daemon.weights import frames
from warmseed.daemon.weights.checkpoint import DigestMode
from warmseed.daemon.weights.errors import (
    FingerprintMismatch,
    MessageRefused,
    Reason,
    WeightCacheUnavailable,
)
from warmseed.daemon.weights.messages import Answer, Farewell, Refusal, Request, Watch, Watching
from warmseed.daemon.weights.socket import SocketAddress, connect
from warmseed.errors import printable

__all__ = ["Line", "NeedDigest", "deadline_in"]

logger = logging.getLogger(__name__)


class Line:
    """A connection to the daemon. While it is open after a ``GetState``, it is the lease on the weights."""

    def __init__(self, address: SocketAddress, connection: socket.socket) -> None:
        self.address = address
        self.gone = threading.Event()  # set when the daemon has stopped or died
        self._connection = connection
        self._closing = False
        self._watcher: threading.Thread | None = None

    @classmethod
    def open(cls, address: SocketAddress, *, timeout_s: float) -> Line:
        """A line to the daemon at `address`.

        Raises:
            WeightCacheUnavailable: there is none to be had.
        """
        return cls(address, connect(address, timeout_s=timeout_s))

    def ask(self, request: Request, *, deadline: float) -> Any:
        """The daemon's answer, one of the structs of `Answer`, but never a `Refusal`.

        Raises:
            FingerprintMismatch: the daemon holds other weights.
            NeedDigest: the daemon wants the same question with a digest.
            WeightCacheUnavailable: no answer in time, a refusal, or no understandable answer.
        """
        with self._explained():
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may have said why before it closed
                frames.send(self._connection, request, deadline=deadline)
            answer = frames.read(
                self._connection, Answer, limit=frames.ANSWER_LIMIT, who=f"daemon at {self.address}", deadline=deadline
            )
        if answer is None or isinstance(answer, Farewell):
            raise WeightCacheUnavailable("error", f"the daemon at {self.address} closed without an answer")
        if isinstance(answer, Refusal):
            raise _refused(answer, self.address)
        return answer

    def descriptors(self, count: int, *, deadline: float) -> list[int]:
        """The `count` file descriptors that follow a state; the caller owns them.

        Raises:
            WeightCacheUnavailable: they did not come, or others did. None is left open.
        """
        with self._explained():
            who = f"daemon at {self.address}"
            return frames.read_descriptors(self._connection, count, who=who, deadline=deadline)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise WeightCacheUnavailable("timeout", f"the daemon at {self.address} did not answer in time") from error
        except MessageRefused as error:
            raise WeightCacheUnavailable("error", str(error)) from error
        except OSError as error:
            text = f"the connection to the daemon at {self.address} broke: {error.strerror or error}"
            raise WeightCacheUnavailable("error", text) from error

    def hold(self, *, deadline: float) -> int:
        """Make the lease last until `close`; the daemon's pid.

        Raises:
            WeightCacheUnavailable: the daemon did not agree.
        """
        answer = self.ask(Watch(), deadline=deadline)
        if not isinstance(answer, Watching):
            raise WeightCacheUnavailable("error", f"the daemon at {self.address} gave a senseless answer to a watch")
        return answer.pid

    def watch(self, pid: int) -> None:
        """From now on a thread waits for the daemon's end, warns about it and sets `gone`."""
        self._watcher = threading.Thread(
            target=self._wait_for_end, args=(pid,), name="warmseed-weights-watch", daemon=True
        )
        self._watcher.start()

    def _wait_for_end(self, pid: int) -> None:
        said_goodbye = False
        with contextlib.suppress(OSError, MessageRefused), self._connection:
            while message := frames.read(
                self._connection, Answer, limit=frames.REQUEST_LIMIT, who=f"daemon at {self.address}", deadline=None
            ):
                said_goodbye = said_goodbye or isinstance(message, Farewell)
        if self._closing:
            return
        logger.warning(
            "weights: the daemon (pid %d, %s) %s; this engine keeps serving what it has mapped, but a restarted engine "
            "loads from disk until a daemon is ready again",
            pid, self.address, "has stopped" if said_goodbye else "died",
        )  # fmt: skip
        self.gone.set()

    def close(self) -> None:
        """End the lease. Harmless when called again."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # wakes the watching thread
        if self._watcher is None:
            self._connection.close()


class NeedDigest(FingerprintMismatch):
    """The daemon loaded other files and asks for the digest of the engine's, in its own `mode`.

    `sketch` is that of its own files, empty where it has none.
    """

    def __init__(self, message: str, *, fields: tuple[str, ...], mode: DigestMode, sketch: str) -> None:
        super().__init__(message, fields=fields)
        self.mode: DigestMode = mode
        self.sketch = sketch


def _refused(refusal: Refusal, address: SocketAddress) -> WeightCacheUnavailable:
    text = f"the daemon at {address} refused: {printable(refusal.message, limit=4000)}"
    fields = tuple(printable(name) for name in refusal.fields)
    match refusal.reason:
        case "need_digest" if refusal.digest_mode is not None:
            return NeedDigest(text, fields=fields, mode=refusal.digest_mode, sketch=refusal.sketch)
        case "mismatch" | "need_digest":
            return FingerprintMismatch(text, fields=fields)
        case "busy":
            return WeightCacheUnavailable("refused", text)
        case reason:
            known: Reason = reason
            return WeightCacheUnavailable(known, text)


def deadline_in(seconds: float) -> float:
    """The moment `seconds` from now, on the clock that deadlines are given in."""
    return time.monotonic() + seconds
