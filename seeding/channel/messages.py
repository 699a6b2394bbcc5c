"""The messages of the channel, as strict structs; the framing is in `frames`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

__all__ = ["Answer", "DescribeRequest", "FetchRequest", "Request"]

Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]
Hex64 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$", max_length=64)]
Name = Annotated[str, msgspec.Meta(pattern="^[a-z0-9][a-z0-9_]{0,63}$", max_length=64)]


class DescribeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="describe", tag_field="request"):
    """Which artifact of which rank? Answered with its signed manifest, and the payload when it is small."""

    kind: Name
    config_hash: Hex64
    environment_hash: Hex64
    dp_rank: Rank
    world_rank: Rank
    instance: Hex64  # of the asking process; a source that finds its own has dialled itself


class FetchRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="fetch", tag_field="request"):
    """The bytes of a verified object, from `offset` on."""

    sha256: Hex64
    offset: Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
    instance: Hex64


Request = DescribeRequest | FetchRequest


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The head of every answer; `length` bytes of payload follow an ``ok``."""

    status: Literal["ok", "miss", "warming", "refused", "busy"]
    kind: str = ""
    config_hash: str = ""
    environment_hash: str = ""
    dp_rank: Rank = 0
    world_rank: Rank = 0
    instance: str = ""
    manifest: str = ""  # the signed envelope, JSON text, at most 64 KiB
    length: Annotated[int, msgspec.Meta(ge=0, le=1 << 50)] = 0  # bytes of payload that follow
    retry_after: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0  # seconds; with ``warming`` and ``busy``
    reason: Annotated[str, msgspec.Meta(max_length=512)] = ""
    fields: tuple[str, ...] = ()  # environment fields that differ, with ``refused``
