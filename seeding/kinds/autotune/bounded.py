"""JSON from a stranger, read without surprises: bounded before it is parsed, strict while it is.

The standard parser accepts duplicate keys, NaN, lone surrogates and any depth (`RecursionError`), and builds
objects twenty times the size of a hostile text. So the text is measured first, with the C string methods
only: depth, number of values and digits of the longest number. Only then does a parser see it.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass

from warmseed.errors import printable
from warmseed.seeding.errors import ArtifactRefused

__all__ = ["Json", "JsonLimits", "parse_json"]

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


@dataclass(frozen=True, slots=True)
class JsonLimits:
    """How much JSON is read at all."""

    size: int = 2 << 20  # bytes of text; a table entry takes about 270, so this is some 7,000 of them
    values: int = 60_000  # values, counted by their separators; a table entry takes 8 or 9 of them
    depth: int = 24  # nested arrays and objects; a managed entry's key fields take 8
    digits: int = 24  # digits in a row outside a string; 2**64 has 20


_STRING = re.compile(r'"[^"]*"')
_ONE_DIGIT = dict.fromkeys(b"123456789", "0")
_NOT_STRUCTURE = {code: None for code in range(128) if chr(code) not in "[]{}"}


def parse_json(data: bytes, what: str, limits: JsonLimits | None = None) -> Json:
    """The value that `data` spells; `what` names it in errors.

    Raises:
        ArtifactRefused: ``malformed``: over a limit, not ASCII (FlashInfer writes ASCII only), a BOM, duplicate
            keys, NaN or an infinity, or not JSON at all.
    """
    bounds = limits or JsonLimits()
    if len(data) > bounds.size:
        raise _malformed(what, f"has {len(data)} bytes, over the limit of {bounds.size}")
    try:
        text = data.decode("ascii")
    except UnicodeDecodeError as error:
        raise _malformed(what, f"is not ASCII text at byte {error.start}") from None
    _measure(text, what, bounds)
    try:
        value: Json = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise _malformed(what, f"is not strict JSON ({printable(error, limit=120)})") from None
    return value


def _measure(text: str, what: str, bounds: JsonLimits) -> None:
    """Refuse what would cost a parser too much, at the cost of a few passes over the text, all of them linear."""
    if "\\" in text:  # no escape may hide a quote; what remains only has to keep its structure
        text = text.replace("\\\\", "").replace('\\"', "")
    if text.count('"') > 2 * bounds.values:
        raise _malformed(what, f"holds more than {bounds.values} strings")
    bare = _STRING.sub("", text)
    if bare.count(",") + bare.count("[") + bare.count("{") > bounds.values:
        raise _malformed(what, f"holds more than {bounds.values} values")
    if "0" * (bounds.digits + 1) in bare.translate(_ONE_DIGIT):
        raise _malformed(what, f"holds a number of more than {bounds.digits} digits")
    shape = bare.translate(_NOT_STRUCTURE)
    for _ in range(bounds.depth):
        if not shape:
            return
        shape = shape.replace("[]", "").replace("{}", "")
    if shape:
        raise _malformed(what, f"is nested more than {bounds.depth} deep, or its brackets do not match")


def _unique_keys(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) != len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"duplicate key {printable(name)!r}")
    return found


def _no_constant(name: str) -> Json:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value


def _malformed(what: str, problem: str) -> ArtifactRefused:
    return ArtifactRefused("malformed", f"{what} {problem}; it is not used")
