"""What can be imported without torch, and what importing it must not bring along."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Each costs tens of milliseconds to seconds, and is for whoever asked for it.
HEAVY = ("aiohttp", "flashinfer", "mooncake", "obstore", "numpy", "redis", "rich", "torch", "transformers", "vllm")
_CODE = """
import sys
for name in {blocked!r}:
    sys.modules[name] = None  # importing it now fails
import {modules}
print(*sorted(name for name in {heavy!r} if sys.modules.get(name) is not None))
"""


def imported(modules: str, *, blocked: tuple[str, ...] = ()) -> list[str]:
    """The heavy packages that importing `modules` brings along."""
    code = _CODE.format(blocked=blocked, modules=modules, heavy=HEAVY)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, env=environ, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    "modules",
    [
        "warmseed",
        "warmseed.seeding, warmseed.stores",
        "warmseed.seeding.adopt, warmseed.seeding.publish, warmseed.seeding.origins.shelf",
        "warmseed.stores.chain, warmseed.stores.registry, warmseed.stores.disk, warmseed.stores.folder",
        "warmseed.seeding.kinds.autotune.kind, warmseed.seeding.kinds.compiled.bundle",
    ],
)
def test_seeding_and_stores_work_where_there_is_no_torch_and_bring_nothing_heavy(modules: str) -> None:
    assert imported(modules, blocked=HEAVY) == []


def test_the_command_line_and_a_rank_start_without_torch() -> None:
    """Importing it takes seconds; a rank does that beside its search for caches."""
    found = imported("warmseed.daemon.cli.main, warmseed.daemon.rank.rank, warmseed.daemon.engines.torch")
    assert not {"torch", "transformers", "vllm", "flashinfer", "obstore", "redis", "mooncake"} & set(found)
