"""What daemon and engine say to each other on the socket; `frames` is how.

A connection starts with one request. Most are answered and done. `GetState` is answered with `State`, followed by the
file descriptors of its memfd segments; from then on the connection is a lease on the weights, which `Watch` makes last
as long as the connection is open. The daemon says `Farewell` on watched connections before it goes.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from warmseed.daemon.weights.checkpoint import DigestMode, Hex64
from warmseed.daemon.weights.fingerprint import Fingerprint
from warmseed.daemon.weights.layout import SegmentRecord, TensorRecord

__all__ = [
    "Answer",
    "Done",
    "Farewell",
    "GetMemory",
    "GetState",
    "Memory",
    "Refusal",
    "Release",
    "Released",
    "Report",
    "Request",
    "State",
    "Watch",
    "Watching",
]

TENSORS: Final = 1_000_000  # in one model, at most
SEGMENTS: Final = 65536

Natural = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Uuid = Annotated[str, msgspec.Meta(max_length=128)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]


class GetState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="get_state", tag_field="request"):
    """The weights, if they are those of `fingerprint` on the device of `device_uuid`; takes a lease on them."""

    fingerprint: Fingerprint
    device_uuid: Uuid
    pid: Natural  # for the log


class GetMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="get_memory", tag_field="request"):
    """How much is held and by whom it is mapped."""


class Release(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="release", tag_field="request"):
    """Free the weights. While engines map them: refused, or done when the last one goes if `defer`."""

    defer: bool = False


class Watch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="watch", tag_field="request"):
    """Keep this connection open; its end tells either side of the other's."""


class Report(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="report", tag_field="request"):
    """An engine's evidence of what its start used and built."""

    seconds: Annotated[float, msgspec.Meta(ge=0, le=1e9)]
    counters: Annotated[dict[Text, float], msgspec.Meta(max_length=4096)] = {}
    lines: Annotated[tuple[Text, ...], msgspec.Meta(max_length=4096)] = ()
    new_files: Annotated[tuple[Text, ...], msgspec.Meta(max_length=65536)] = ()


Request = GetState | GetMemory | Release | Watch | Report


class State(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="state", tag_field="answer"):
    """The weights: where every tensor lies. One descriptor for each ``memfd`` segment follows, in order."""

    device_uuid: Uuid
    pid: Natural  # the daemon's
    nbytes: Natural  # of distinct tensor bytes
    segments: Annotated[tuple[SegmentRecord, ...], msgspec.Meta(max_length=SEGMENTS)]
    tensors: Annotated[tuple[TensorRecord, ...], msgspec.Meta(max_length=TENSORS)]
    aliases: Annotated[dict[Name, Name], msgspec.Meta(max_length=TENSORS)] = {}


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="memory", tag_field="answer"):
    """What the daemon holds; all zero after a release."""

    nbytes: Natural  # of distinct tensor bytes
    segment_bytes: Natural  # allocated for them
    segments: Natural
    tensors: Natural
    leases: Natural  # engines that map them now
    device_uuid: Uuid
    released: bool


class Released(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="released", tag_field="answer"):
    """What became of a `Release`; `leases` engines still map the weights."""

    outcome: Literal["released", "deferred", "in_use"]
    leases: Natural = 0


class Done(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="done", tag_field="answer"):
    """The report was taken."""


class Watching(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="watching", tag_field="answer"):
    """The daemon keeps the connection open."""

    pid: Natural


class Refusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="refusal", tag_field="answer"):
    """No, and why.

    ``need_digest`` asks for the same request with a checkpoint digest of `digest_mode`; where the engine's own sketch
    is not `sketch`, it can't match.
    """

    reason: Literal["mismatch", "need_digest", "wrong_gpu", "released", "busy", "error"]
    message: Text
    fields: Annotated[tuple[Text, ...], msgspec.Meta(max_length=4096)] = ()
    digest_mode: DigestMode | None = None
    sketch: Hex64 = ""


class Farewell(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="farewell", tag_field="answer"):
    """The daemon is about to stop on purpose."""


Answer = State | Memory | Released | Done | Watching | Refusal | Farewell
