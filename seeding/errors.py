"""Why an artifact is not adopted.

ArtifactRefused        something was found and must not be used; carries a machine-readable reason
└── CannotJudge        this node can't tell (its own environment is partly unknown): nothing is remembered
"""

from __future__ import annotations

from warmseed.errors import WarmseedError

__all__ = ["ArtifactRefused", "CannotJudge"]


class ArtifactRefused(WarmseedError):
    """An artifact that is not installed. `reason` is a short stable word for metrics and ``--json``.

    Reasons in use: ``signature``, ``key``, ``rank``, ``kind``, ``environment``, ``expired``, ``rollback``,
    ``denied``, ``pinned``, ``digest``, ``length``, ``malformed``, ``relocation``, ``probation``, ``busy``, ``space``,
    ``unsigned``.
    """

    def __init__(self, reason: str, message: str, *, fields: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.reason = reason
        self.fields = fields  # the names of what differs, where the reason is a difference


class CannotJudge(ArtifactRefused):
    """This node's own environment is partly unknown; the artifact may be good. Not installed, not remembered."""
