"""The engine's end: ask, check, map. Synchronous, because it runs inside an engine's loader."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from warmseed.daemon.weights.checkpoint import AnyDigest, CheckpointIdentity
from warmseed.daemon.weights.devices import device_by_uuid, device_uuid
from warmseed.daemon.weights.errors import (
    FingerprintMismatch,
    SocketPathRefused,
    UnsupportedPlatformForIPCError,
    WeightCacheError,
    WeightCacheUnavailable,
)
from warmseed.daemon.weights.fingerprint import Fingerprint
from warmseed.daemon.weights.layout import check_layout
from warmseed.daemon.weights.lease import Line, NeedDigest, deadline_in
from warmseed.daemon.weights.loader_config import LoaderConfig
from warmseed.daemon.weights.mapping import MapReport, map_tensors
from warmseed.daemon.weights.messages import Done, GetMemory, GetState, Memory, Release, Released, Report, State
from warmseed.daemon.weights.socket import SocketAddress
from warmseed.daemon.weights.transport import transport_for
from warmseed.daemon.weights.views import copy_tensors, map_segments, view_tensors
from warmseed.errors import printable

if TYPE_CHECKING:
    import torch

__all__ = ["Attachment", "LoaderConfig", "attach", "get_memory", "map_into", "release", "send_report"]

logger = logging.getLogger(__name__)

RETRY_S = 0.1  # seconds between two looks for a daemon that is still starting
EXCHANGE_S = 15.0  # seconds for one small exchange; the daemon's own deadline is shorter, so it explains itself first
A = TypeVar("A")
Mode = Literal["zero_copy", "copy"]


@dataclass(slots=True)
class Attachment:
    """The daemon's weights in this process. In zero-copy mode, `close` it only when the model is gone."""

    address: SocketAddress
    mode: Mode
    state: State = field(repr=False)
    tensors: dict[str, torch.Tensor] = field(repr=False)
    device: torch.device
    seconds: float  # from the first look for the daemon to usable tensors
    _line: Line = field(repr=False)
    released: Released | None = None  # what became of the release that copy mode asks for

    @property
    def aliases(self) -> dict[str, str]:
        """Further names of tensors, by alias."""
        return self.state.aliases

    @property
    def nbytes(self) -> int:
        """Bytes of weights. In zero-copy mode they count towards the engine's memory budget, but are not its own."""
        return self.state.nbytes

    @property
    def daemon_gone(self) -> threading.Event:
        """Set when the daemon has stopped or died; a warning has been logged by then. Zero-copy mode only."""
        return self._line.gone

    def release(self) -> Released:
        """Ask the daemon to free its weights; refused there while another engine maps them.

        Raises:
            WeightCacheError: in zero-copy mode, where the weights are this engine's own.
            WeightCacheUnavailable: the daemon did not answer.
        """
        if self.mode != "copy":
            raise WeightCacheError("mapped weights can't be released: this engine serves from the daemon's memory")
        if self.released is None or self.released.outcome == "in_use":
            self._line.close()
            self.released = release(self.address)
        return self.released

    def report(self, evidence: Report) -> None:
        """Tell the daemon what this engine's warmup used and built.

        Raises:
            WeightCacheUnavailable: the daemon did not take it.
        """
        send_report(self.address, evidence)

    def close(self) -> None:
        """End the lease. On a GPU the daemon may then free the memory under tensors that are still mapped."""
        self._line.close()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection in here: thousands of small objects would set one off, and in a process that has just
    imported a deep-learning framework a single one takes longer than to map all the weights."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


def attach(
    address: SocketAddress,
    fingerprint: Fingerprint,
    *,
    mode: Mode = "zero_copy",
    connect_timeout_s: float = 5.0,
    state_timeout_s: float = 300.0,
    fallback: bool = True,
    device: torch.device | str | None = None,
    digest: Callable[[AnyDigest], CheckpointIdentity] | None = None,
) -> Attachment:
    """The daemon's weights as tensors by name, mapped or (``copy``) in this process's own memory.

    `fingerprint` normally carries `checkpoint.stat_checkpoint`; should the daemon have loaded other files, `digest` is
    called for a sketch, which tells a retrained checkpoint at once, and if that agrees with the mode the daemon wants.
    Without `fallback` this waits up to `state_timeout_s` for a daemon that is starting. `device` is the engine's; by
    default the one `address` was derived from, else the current one. In ``copy`` mode the daemon has been asked to
    release its weights when this returns, and also when it fails after they were fetched.

    Raises:
        FingerprintMismatch: the daemon holds other weights; `fields` names the differences.
        WeightCacheUnavailable: for the reason in `reason`; load from disk, if the configuration allows it.
        UnsupportedPlatformForIPCError: whatever the configuration allows: it would never work here.
    """
    expected = _expected_uuid(address, device)
    start = time.monotonic()
    line = _open(address, connect_timeout_s, 0.0 if fallback else state_timeout_s)
    deadline = deadline_in(state_timeout_s)
    try:
        state = _get_state(line, fingerprint, expected, deadline)
    except NeedDigest as need:
        line.close()  # hashing may take longer than the daemon waits for a silent client
        if digest is None:
            raise
        if need.sketch and (ours := digest("sketch").digest) != need.sketch:
            raise FingerprintMismatch(
                f"the daemon at {address} loaded a checkpoint with other values than this engine's "
                f"(sketch {need.sketch[:12]}…, not {ours[:12]}…)",
                fields=("checkpoint",),
            ) from None
        fingerprint = msgspec.structs.replace(fingerprint, checkpoint=digest(need.mode))
        line = _open(address, connect_timeout_s, 0.0)
        deadline = deadline_in(state_timeout_s)
        state = _get_state(line, fingerprint, expected, deadline)
    try:
        with _no_collection():
            tensors, where = _tensors(line, state, expected, mode, deadline)
    except BaseException as error:
        line.close()
        traceback.clear_frames(error.__traceback__)  # they hold what was copied so far, while the handler loads
        if mode == "copy":  # the disk load that follows needs the room
            _try_release(address)
        if isinstance(error, WeightCacheUnavailable | UnsupportedPlatformForIPCError) or not isinstance(
            error, Exception
        ):
            raise
        raise WeightCacheUnavailable("error", f"mapping the daemon's weights failed: {printable(error)}") from error
    attachment = Attachment(address, mode, state, tensors, where, time.monotonic() - start, line)
    if mode == "copy":
        line.close()
        attachment.released = _try_release(address)
    logger.info(
        "weights attached mode=%s tensors=%d bytes=%d ms=%.1f",
        mode,
        len(tensors),
        state.nbytes,
        attachment.seconds * 1e3,
    )
    return attachment


def map_into(shell: torch.nn.Module, attachment: Attachment) -> MapReport:
    """Register the attachment's tensors in `shell`, a model on the meta device, in place of its own.

    Parameters keep class and attributes; tied parameters and shared buffers are one object again; what the daemon does
    not have becomes zeros. On failure the attachment is closed and its tensors are dropped.

    Raises:
        WeightCacheUnavailable: reason ``error``; the shell is another model's.
    """
    try:
        return map_tensors(shell, attachment.state.tensors, attachment.tensors, attachment.aliases, attachment.device)
    except BaseException:
        attachment.tensors.clear()
        attachment.close()
        raise


def get_memory(address: SocketAddress, *, timeout_s: float = 5.0) -> Memory:
    """What the daemon at `address` holds.

    Raises:
        WeightCacheUnavailable: it does not answer.
    """
    return _once(address, GetMemory(), Memory, timeout_s)


def release(address: SocketAddress, *, defer: bool = False, timeout_s: float = 5.0) -> Released:
    """Ask the daemon to free its weights; while engines map them it refuses, or waits for the last one if `defer`.

    Raises:
        WeightCacheUnavailable: it does not answer.
    """
    return _once(address, Release(defer), Released, timeout_s)


def send_report(address: SocketAddress, evidence: Report, *, timeout_s: float = 5.0) -> None:
    """Give the daemon an engine's evidence of its start.

    Raises:
        WeightCacheUnavailable: it did not take it.
    """
    _once(address, evidence, Done, timeout_s)


def _once(address: SocketAddress, request: Any, kind: type[A], timeout_s: float) -> A:
    line = Line.open(address, timeout_s=timeout_s)
    try:
        answer = line.ask(request, deadline=deadline_in(EXCHANGE_S))
    finally:
        line.close()
    if not isinstance(answer, kind):
        raise WeightCacheUnavailable("error", f"the daemon at {address} gave a senseless answer to a request")
    return answer


def _try_release(address: SocketAddress) -> Released | None:
    try:
        answer = release(address)
    except WeightCacheUnavailable as error:
        logger.warning("weights: the daemon could not be asked to release its copy: %s", error)
        return None
    if answer.outcome != "released":
        logger.warning("weights: the daemon keeps its copy: %d other engines map it", answer.leases)
    return answer


def _expected_uuid(address: SocketAddress, device: torch.device | str | None) -> str:
    """The UUID of this engine's device; an unsupported platform is told before anything else is tried."""
    import torch

    if device is None and address.device_uuid:
        chosen = device_by_uuid(address.device_uuid)
    else:
        chosen = torch.device(device if device is not None else ("cuda" if torch.cuda.is_available() else "cpu"))
    transport_for(chosen.type)
    if chosen.type == "cpu" and chosen.index is None and address.device_uuid.startswith("cpu"):
        return address.device_uuid  # CPU ranks of one node differ by their address alone
    return device_uuid(chosen)


def _open(address: SocketAddress, connect_timeout_s: float, wait_s: float) -> Line:
    deadline = deadline_in(wait_s)
    while True:
        try:
            return Line.open(address, timeout_s=connect_timeout_s)
        except SocketPathRefused:
            raise
        except WeightCacheUnavailable as error:
            if error.reason not in ("absent", "refused") or time.monotonic() + RETRY_S > deadline:
                raise
        time.sleep(RETRY_S)


def _get_state(line: Line, fingerprint: Fingerprint, uuid: str, deadline: float) -> State:
    """The daemon's answer to the one big question; the line is closed if there is none."""
    try:
        with _no_collection():
            answer = line.ask(GetState(fingerprint, uuid, os.getpid()), deadline=deadline)
        if not isinstance(answer, State):
            raise WeightCacheUnavailable("error", f"the daemon at {line.address} gave a senseless answer to a request")
    except BaseException:
        line.close()
        raise
    return answer


def _tensors(
    line: Line, state: State, uuid: str, mode: Mode, deadline: float
) -> tuple[dict[str, torch.Tensor], torch.device]:
    """The tensors of `state`, on this process's own device of that UUID; the line has become a watched lease."""
    if state.device_uuid != uuid:
        raise WeightCacheUnavailable(
            "wrong_gpu",
            f"the daemon at {line.address} holds the shard of {state.device_uuid}, this engine is on {uuid}",
        )
    check_layout(state.segments, state.tensors, state.aliases)
    device = device_by_uuid(uuid)
    descriptors = line.descriptors(sum(s.kind == "memfd" for s in state.segments), deadline=deadline)
    try:
        line.hold(deadline=deadline)
        mappings = map_segments(state.segments, descriptors, device)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    if mode == "copy":
        return copy_tensors(state.tensors, mappings, device), device
    tensors = view_tensors(state.tensors, mappings, device)
    line.watch(state.pid)
    return tensors, device
