"""The bytecode of an engine's packages as a warmup cache of the node, in place before a rank imports any of them."""

from __future__ import annotations

import asyncio
import os
import traceback
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from warmseed.daemon.engines.bytecode import bytecode_folder, installation, installed_sources
from warmseed.daemon.rank.trials import Trials
from warmseed.daemon.settings.paths import state_folder
from warmseed.errors import WarmseedError
from warmseed.seeding.adopt import Adoption
from warmseed.seeding.environment import Environment
from warmseed.seeding.host import host_facts
from warmseed.seeding.kinds.base import Site
from warmseed.seeding.kinds.compiled.bundle import CompileCacheKind
from warmseed.seeding.kinds.compiled.bytecode import Bytecode

__all__ = ["BYTECODE", "COMPILING", "bytecode_cache", "on_trial"]

BYTECODE: Final = "bytecode"
COMPILING: Final = 15.0  # seconds that it takes to do without: 11 to 15 on the machines of docs/benchmarks.md


def bytecode_cache(cache_root: Path, modules: Sequence[str]) -> tuple[CompileCacheKind, Site] | None:
    """The kind and the place of the bytecode that is kept below `cache_root`; `None` where packages have their own.

    It belongs to the installation alone: all ranks of a node share it, whatever they serve.
    """
    folder = bytecode_folder(cache_root, modules, os.environ)
    if folder is None:
        return None
    factors = {"installation": installation(modules)}
    site = Site(
        config_hash=Environment(factors).digest,
        config_factors=factors,
        environment=Environment(host_facts()),
        dp_rank=0,
        world_rank=0,
        device_index=-1,
        cache_root=cache_root,
        roots={Bytecode.name: folder},
        state=state_folder(cache_root),
    )
    return CompileCacheKind([Bytecode(installed_sources())], name=BYTECODE), site


@asynccontextmanager
async def on_trial(trials: Trials, tried: Sequence[tuple[Adoption, Site]]) -> AsyncIterator[None]:
    """While this runs, the rank's death is held against the bytecode it adopted: its next start does without."""
    for adoption, site in tried:
        await trials.met(adoption, site)
    explained = False
    try:
        yield
        explained = True
    except (WarmseedError, asyncio.CancelledError) as error:  # flags or a model that can't work, or a stop
        explained = not _unreadable(error)
        raise
    finally:
        for adoption, site in tried if explained else ():
            await trials.part(adoption, site)


def _unreadable(error: BaseException | None) -> bool:
    """Whether Python could not read a file of bytecode; an adapter may have taken that for flags that can't work."""
    while error is not None:
        # importlib/_bootstrap_external.py; what `marshal` raises has no type of its own
        if any(frame.f_code.co_name == "_compile_bytecode" for frame, _ in traceback.walk_tb(error.__traceback__)):
            return True
        error = error.__cause__ or error.__context__
    return False
