"""What an artifact depends on outside the engine's configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = ["UNKNOWN", "Difference", "Environment"]

UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Difference:
    """One field in which two environments (or two sets of config factors) differ; `None` is absent."""

    field: str
    theirs: str | None
    ours: str | None

    def __str__(self) -> str:
        return f"{self.field}: theirs {self.theirs!r}, ours {self.ours!r}"


class Environment(Mapping[str, str]):
    """Names and values of everything an artifact depends on: GPU, driver stack, compilers, ABI, prefixes.

    Immutable. A value that this node can't determine is the word ``unknown``, which never matches.
    """

    __slots__ = ("_fields",)

    def __init__(self, fields: Mapping[str, str]) -> None:
        self._fields = dict(sorted(fields.items()))

    def __getitem__(self, name: str) -> str:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        return f"Environment({self._fields!r})"

    @property
    def canonical(self) -> bytes:
        """The fields as canonical JSON; what `digest` is the SHA-256 of."""
        return json.dumps(self._fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")

    @property
    def digest(self) -> str:
        """SHA-256 of the fields as canonical JSON; part of every manifest's path."""
        return hashlib.sha256(self.canonical).hexdigest()

    @property
    def unknown(self) -> tuple[str, ...]:
        """The names of the fields this node could not determine."""
        return tuple(name for name, value in self._fields.items() if value == UNKNOWN)

    def only(self, names: Iterator[str] | tuple[str, ...]) -> Environment:
        """The part of this environment that `names` picks."""
        return Environment({name: self._fields.get(name, UNKNOWN) for name in names})

    def differences(self, theirs: Mapping[str, str]) -> tuple[Difference, ...]:
        """What differs between `theirs` and this environment, by field name."""
        names = sorted(set(self._fields) | set(theirs))
        return tuple(
            Difference(name, theirs.get(name), self._fields.get(name))
            for name in names
            if theirs.get(name) != self._fields.get(name)
        )
