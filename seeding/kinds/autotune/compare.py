"""Whether a table's environment is ours: FlashInfer's own rules, tightened so that doubt never installs.

FlashInfer compares ``_metadata`` field by field (`_classify_metadata_mismatches`): a *definite* difference is
hard (the file is ignored for ever and never overwritten), an *indeterminate* one soft (ignored, then replaced).
It takes ``unknown == unknown`` for a match, and loads a file without metadata anywhere. We do neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from warmseed.seeding.environment import UNKNOWN, Difference
from warmseed.seeding.errors import ArtifactRefused, CannotJudge
from warmseed.seeding.kinds.autotune.table import METADATA_FIELDS

__all__ = ["WILDCARD", "Comparison", "compare", "indeterminate", "require_publishable", "require_same"]

WILDCARD = "*"
_INDETERMINATE = (UNKNOWN, "None", "")  # flashinfer's `_INDETERMINATE_META_VALUES`, as text


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a table's environment stands to this node's."""

    hard: tuple[Difference, ...] = ()  # both definite and different: FlashInfer ignores the file and keeps it
    soft: tuple[Difference, ...] = ()  # the table does not know: FlashInfer ignores the file and replaces it
    wildcard: tuple[str, ...] = ()  # the table claims to fit any value of these
    undecided: tuple[str, ...] = ()  # this node does not know: nobody can say

    @property
    def same(self) -> bool:
        """Whether every field is known on both sides and equal."""
        return not (self.hard or self.soft or self.wildcard or self.undecided)


def indeterminate(metadata: Mapping[str, str]) -> tuple[str, ...]:
    """The fields of `metadata` that name no definite value."""
    return tuple(name for name, value in metadata.items() if value in _INDETERMINATE or value == WILDCARD)


def compare(theirs: Mapping[str, str], ours: Mapping[str, str]) -> Comparison:
    """The table's metadata against this node's, field by field of ours."""
    hard, soft, wildcard, undecided = [], [], [], []
    for name in {**dict.fromkeys(METADATA_FIELDS), **ours}:
        saved, current = theirs.get(name), ours.get(name, UNKNOWN)
        if saved == WILDCARD:
            wildcard.append(name)
        elif saved is None or saved in _INDETERMINATE:
            soft.append(Difference(name, saved, current))
        elif current in _INDETERMINATE:
            undecided.append(name)
        elif saved != current:
            hard.append(Difference(name, saved, current))
    return Comparison(tuple(hard), tuple(soft), tuple(wildcard), tuple(undecided))


def require_same(
    theirs: Mapping[str, str], ours: Mapping[str, str], what: str, *, allow_wildcards: bool = False
) -> None:
    """Nothing, if a table with the metadata `theirs` may be installed on this node.

    Raises:
        CannotJudge: this node does not know a field that the table names, and nothing else is wrong.
        ArtifactRefused: ``environment``, naming every field that differs, is indeterminate, or is a wildcard.
    """
    found = compare(theirs, ours)
    refused = [str(difference) for difference in (*found.hard, *found.soft)]
    fields = [difference.field for difference in (*found.hard, *found.soft)]
    if found.wildcard and not allow_wildcards:
        refused += [f"{name}: theirs fits anything" for name in found.wildcard]
        fields += found.wildcard
    if refused:
        raise ArtifactRefused(
            "environment",
            f"{what} was tuned in another environment ({'; '.join(refused)}); tuning happens here instead",
            fields=tuple(fields),
        )
    if found.undecided:
        raise CannotJudge(
            "environment",
            f"{what} can't be judged: this node does not know its own {', '.join(found.undecided)}; not installed, "
            "and asked for again at the next start",
            fields=found.undecided,
        )


def require_publishable(metadata: Mapping[str, str], what: str) -> None:
    """Nothing, if every field of `metadata` is definite.

    Raises:
        ArtifactRefused: ``environment``: a table that does not know where it was tuned helps nobody, and with
            older FlashInfer it could never be replaced.
    """
    vague = indeterminate(metadata)
    if vague:
        raise ArtifactRefused(
            "environment",
            f"{what} does not name its {', '.join(vague)}; it stays on this node and is not published",
            fields=vague,
        )
