"""The messages of the channel, as strict structs; the framing is in `frames`.

Both directions are decoded by one rule: the bytes must be exactly what we would have written for the
value they spell. That refuses what a JSON parser lets pass in silence (duplicate names, other number
forms, spare white space), on top of what msgspec refuses by itself (unknown names, wrong types, NaN,
lone surrogates, deep nesting).
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from warmseed.errors import printable
from warmseed.seeding.artifact import ArtifactKey
from warmseed.seeding.channel.errors import ProtocolError
from warmseed.seeding.channel.ranges import Length, Ranges, check_order
from warmseed.seeding.environment import Environment
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.trust.manifest import MANIFEST_BYTES

__all__ = [
    "PAYLOAD_BYTES",
    "Answer",
    "BusyAnswer",
    "DescribeAnswer",
    "DescribeRequest",
    "FetchAnswer",
    "FetchRequest",
    "MissAnswer",
    "RangesAnswer",
    "RangesRequest",
    "RefusedAnswer",
    "Request",
    "WarmingAnswer",
    "decode_answer",
    "decode_request",
    "encode",
]

PAYLOAD_BYTES = 8 << 20  # bytes in the largest payload that travels with a description

Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]
# \Z and not $: the latter lets a trailing newline pass.
Hex64 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z", max_length=64)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9_]{0,63}\Z", max_length=64)]
Field = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Value = Annotated[str, msgspec.Meta(max_length=256)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]
Manifest = Annotated[str, msgspec.Meta(min_length=1, max_length=MANIFEST_BYTES)]
Fields = Annotated[tuple[Field, ...], msgspec.Meta(max_length=64)]


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    instance: Hex64  # of the process that writes the message; meeting one's own means having dialled oneself


class DescribeRequest(_Message, frozen=True, kw_only=True, tag="describe", tag_field="request"):
    """Which artifact of which rank? Answered with its signed manifest, and the payload when it is small."""

    kind: Name
    config_hash: Hex64
    environment_hash: Hex64
    dp_rank: Rank
    world_rank: Rank
    # What `environment_hash` is the digest of, so that a source for another environment can name what differs.
    environment: Annotated[dict[Field, Value], msgspec.Meta(max_length=64)] = {}

    def __post_init__(self) -> None:
        if self.environment and Environment(self.environment).digest != self.environment_hash:
            raise ValueError("environment_hash is not the digest of environment")

    @classmethod
    def of(cls, key: ArtifactKey, *, instance: str, environment: Environment | None = None) -> DescribeRequest:
        """The question for `key`.

        Raises:
            ProtocolError: the environment has more fields or longer values than a request can carry.
        """
        asked = cls(
            instance=instance,
            kind=key.kind,
            config_hash=key.config_hash,
            environment_hash=key.environment_hash,
            dp_rank=key.dp_rank,
            world_rank=key.world_rank,
            environment=dict(environment or {}),
        )
        decode_request(encode(asked))  # a constructor checks nothing by itself
        return asked

    @property
    def key(self) -> ArtifactKey:
        """The artifact that is asked for."""
        return ArtifactKey(
            kind=self.kind,
            config_hash=self.config_hash,
            environment_hash=self.environment_hash,
            dp_rank=self.dp_rank,
            world_rank=self.world_rank,
        )


class FetchRequest(_Message, frozen=True, kw_only=True, tag="fetch", tag_field="request"):
    """The bytes of a verified object, from `offset` on."""

    sha256: Hex64
    offset: Length


class RangesRequest(_Message, frozen=True, kw_only=True, tag="ranges", tag_field="request"):
    """Parts of a verified object. A source of before this request takes it for a breach, and closes."""

    sha256: Hex64
    ranges: Ranges

    def __post_init__(self) -> None:
        check_order(self.ranges)


class DescribeAnswer(_Message, frozen=True, kw_only=True, tag="description", tag_field="answer"):
    """A signed manifest; `length` bytes of payload follow the frame (0: fetch it by digest)."""

    kind: Name
    config_hash: Hex64
    environment_hash: Hex64
    dp_rank: Rank
    world_rank: Rank
    manifest: Manifest  # the envelope, as text
    length: Annotated[int, msgspec.Meta(ge=0, le=PAYLOAD_BYTES)]

    def differences(self, request: DescribeRequest) -> tuple[str, ...]:
        """The names of the fields in which this answers another question than `request`."""
        names = ("kind", "config_hash", "environment_hash", "dp_rank", "world_rank")
        return tuple(name for name in names if getattr(self, name) != getattr(request, name))


class FetchAnswer(_Message, frozen=True, kw_only=True, tag="bytes", tag_field="answer"):
    """`length` bytes of the object follow the frame: all that lie behind `offset`."""

    sha256: Hex64
    offset: Length
    length: Length


class RangesAnswer(_Message, frozen=True, kw_only=True, tag="ranges", tag_field="answer"):
    """The bytes of the ranges that were asked for follow the frame, in order and without gaps."""

    sha256: Hex64
    length: Length  # of the whole object


class MissAnswer(_Message, frozen=True, kw_only=True, tag="miss", tag_field="answer"):
    """The source does not have it and is not making it."""


class WarmingAnswer(_Message, frozen=True, kw_only=True, tag="warming", tag_field="answer"):
    """The source is making it."""

    retry_after: Seconds


class BusyAnswer(_Message, frozen=True, kw_only=True, tag="busy", tag_field="answer"):
    """The source could not get to the question in time."""

    retry_after: Seconds


class RefusedAnswer(_Message, frozen=True, kw_only=True, tag="refused", tag_field="answer"):
    """The source will not answer this; `fields` names what differs where that is the reason."""

    reason: Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z_]{0,31}\Z", max_length=32)]
    fields: Fields = ()


Request = DescribeRequest | FetchRequest | RangesRequest
Answer = DescribeAnswer | FetchAnswer | RangesAnswer | MissAnswer | WarmingAnswer | BusyAnswer | RefusedAnswer

T = TypeVar("T")

_ENCODER = msgspec.json.Encoder()
_REQUESTS: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
_ANSWERS: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


def encode(message: Request | Answer) -> bytes:
    """The one spelling of `message`."""
    return _ENCODER.encode(message)


def decode_request(body: bytes) -> Request:
    """The request that `body` spells.

    Raises:
        ProtocolError: it spells none, or not in the one allowed spelling.
    """
    return _decode(_REQUESTS, body)


def decode_answer(body: bytes) -> Answer:
    """The head of an answer that `body` spells.

    Raises:
        ProtocolError: it spells none, or not in the one allowed spelling.
    """
    return _decode(_ANSWERS, body)


def _decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    try:
        message = decoder.decode(body)
    except (msgspec.MsgspecError, ArtifactRefused, ValueError, RecursionError) as error:
        raise ProtocolError(f"a malformed message: {printable(error)}") from None
    if _ENCODER.encode(message) != body:
        raise ProtocolError("a malformed message: not in canonical form")
    return message
