"""What a tactic may look like. FlashInfer hands it to the kernel as it is: nothing behind us checks it.

`choose_one` returns ``[9, 9]`` or a string from a file unchanged (seen in 0.7.2 and 0.7.4), and only a few
runners know `validate_tactic`. So a tactic must have the general form for any runner, and the exact form for
the runners whose `get_valid_tactics` was read in FlashInfer's source.
"""

from __future__ import annotations

from warmseed.errors import printable
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.kinds.autotune.bounded import Json

__all__ = ["check_tactic", "is_legacy_plan_index"]

_SCALARS = 256  # in one tactic; CuTe-DSL's nested ones have about a dozen
_DEPTH = 8
_TEXT = 256  # characters

# Runners whose tactics are positions in a list that the library itself enumerates (flashinfer/gemm/gemm_base.py):
# `range(n)` of at most this many, or -1 for "the default".
_INDEXED = {
    "CublasFp8GemmRunner": 1024,
    "CublasltBf16GemmRunner": 1024,
    "CutlassBf16GemmRunner": 1024,
    "CutlassFp4GemmRunner": 1024,
    "CutlassFp8GemmRunner": 1024,
    "CutlassMxfp8GemmRunner": 1024,
    "TinyGemmBf16GemmRunner": 1,
}


def check_tactic(runner: str, tactic: Json) -> None:
    """Nothing, if `tactic` has a form that `runner` could have returned.

    Raises:
        ArtifactRefused: ``malformed``, if no such runner has it.
    """
    bound = _INDEXED.get(runner)
    if bound is not None:
        if type(tactic) is not int or not -1 <= tactic < bound:
            raise _refused(runner, tactic, f"it takes an index from -1 to {bound - 1}")
        return
    if type(tactic) is int:
        if not -1 <= tactic < 1 << 63:
            raise _refused(runner, tactic, "an index fits 63 bits")
        return
    if not isinstance(tactic, list) or not tactic:
        raise _refused(runner, tactic, "a tactic is an index or a list")
    if _scalars(tactic, 1) > _SCALARS:
        raise _refused(runner, tactic, f"a tactic has at most {_SCALARS} parts, {_DEPTH} deep, of short scalars")


def is_legacy_plan_index(runner: str, tactic: Json) -> bool:
    """Whether this is a bare cuDNN plan index, which FlashInfer skips in a v1 file but would serve from a v2 store."""
    return runner.startswith("Cudnn") and type(tactic) is int and tactic >= 0


def _scalars(value: Json, depth: int) -> int:
    """Scalars in `value`; more than the limit for anything that may not be in a tactic."""
    if isinstance(value, list):
        return _SCALARS + 1 if depth > _DEPTH else sum(_scalars(item, depth + 1) for item in value)
    if isinstance(value, str):
        return 1 if len(value) <= _TEXT and value.isprintable() else _SCALARS + 1
    if type(value) is int:
        return 1 if -(1 << 63) <= value < 1 << 63 else _SCALARS + 1
    return 1 if value is None or isinstance(value, bool) else _SCALARS + 1


def _refused(runner: str, tactic: Json, rule: str) -> ArtifactRefused:
    return ArtifactRefused("malformed", f"{runner} has no tactic {printable(tactic, limit=80)}: {rule}")
