"""FlashInfer's lookup keys: `str((custom_op, runner_class, nearest_profile, extras))`.

The text holds torch dtypes (``torch.bfloat16``), so it is no Python literal. `split_key` reads the two names
that every check needs; `encode_key` rebuilds the structured form that a managed (v2) entry carries beside it
(`flashinfer.autotune_cache._encode_key_fields`), and only if that form spells the same text again.
"""

from __future__ import annotations

import re

from warmseed.errors import printable
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.kinds.autotune.bounded import Json

__all__ = ["PROTOCOL", "encode_key", "split_key"]

PROTOCOL = "__protocol__"  # operation name of the group records of FlashInfer 0.7.4
_KEY_LENGTH = 4096  # characters
_DEPTH = 16

_KEY = re.compile(r"\('([A-Za-z_][\w:.-]{0,127})', '([A-Za-z_]\w{0,127})', [ -~]{1,3840}\)", re.ASCII)
_TOKEN = re.compile(
    r"(?P<space> )|(?P<mark>[()\[\],])|torch\.(?P<dtype>[a-z][a-z0-9_]*)|(?P<word>None|True|False)"
    r"|(?P<float>-?\d+\.\d+(?:e[+-]?\d+)?|-?\d+e[+-]?\d+)|(?P<int>-?\d+)|'(?P<text>[^'\\]*)'",
    re.ASCII,
)


def split_key(key: str) -> tuple[str, str]:
    """Operation and runner class of a lookup key.

    Raises:
        ArtifactRefused: ``malformed``, if the text is not a key that FlashInfer could have written.
    """
    found = _KEY.fullmatch(key) if len(key) <= _KEY_LENGTH else None
    if found is None:
        raise ArtifactRefused("malformed", f"{printable(key, limit=80)!r} is not a FlashInfer lookup key")
    return found[1], found[2]


def encode_key(key: str) -> Json:
    """The structured form of `key`, or `None` if it has parts with no exact one (FlashInfer then reads lazily)."""
    try:
        tokens = _tokens(key)
        value, end = _value(tokens, 0, 0)
        return value if end == len(tokens) and _spell(value) == key else None
    except (ValueError, IndexError):
        return None


def _tokens(key: str) -> list[tuple[str, str]]:
    tokens: list[tuple[str, str]] = []
    position = 0
    while position < len(key):
        found = _TOKEN.match(key, position)
        if found is None or found.lastgroup is None:
            raise ValueError("not a token")
        if found.lastgroup != "space":
            tokens.append((found.lastgroup, found[found.lastgroup]))
        position = found.end()
    return tokens


def _value(tokens: list[tuple[str, str]], at: int, depth: int) -> tuple[Json, int]:
    if depth > _DEPTH:
        raise ValueError("too deep")
    group, text = tokens[at]
    match group:
        case "int":
            return int(text), at + 1
        case "float":
            return float(text), at + 1
        case "word":
            return {"None": None, "True": True, "False": False}[text], at + 1
        case "text":
            return text, at + 1
        case "dtype":
            return {"__dtype__": text}, at + 1
    closing = {"(": ")", "[": "]"}[text] if text in "([" else ""
    if not closing:
        raise ValueError("misplaced mark")
    items: list[Json] = []
    at += 1
    while tokens[at] != ("mark", closing):
        item, at = _value(tokens, at, depth + 1)
        items.append(item)
        if tokens[at] == ("mark", ","):
            at += 1
    return (items if closing == "]" else {"__tuple__": items}), at + 1


def _spell(value: Json) -> str:
    """What Python's `str` makes of the decoded value."""
    if isinstance(value, dict):
        if "__dtype__" in value:
            return f"torch.{value['__dtype__']}"
        inner = value["__tuple__"]
        if not isinstance(inner, list):
            raise ValueError("not a tuple")
        return f"({_spell(inner[0])},)" if len(inner) == 1 else f"({', '.join(map(_spell, inner))})"
    if isinstance(value, list):
        return f"[{', '.join(map(_spell, value))}]"
    return repr(value)
