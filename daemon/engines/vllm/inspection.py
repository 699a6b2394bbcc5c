"""A shorter way for vLLM to look at a model's class: in this process, where it would start another one.

vLLM asks a class what it supports in a process of its own, because importing it may initialise CUDA, and remembers the
answer below its cache root. On a new node nothing is remembered, and that process imports all of vLLM once more: 25 s
on an H200's host. A daemon has CUDA initialised anyway and imports the class to load it. The answer is remembered as
ever, so this node's engines start no such process either.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["inspected_here"]


@contextlib.contextmanager
def inspected_here() -> Iterator[None]:
    """While the block runs, vLLM inspects models in this process; the same in every release from 0.20 to 0.33."""
    from vllm.model_executor.models import registry

    apart = getattr(registry, "_run_in_subprocess", None)
    if apart is None:
        yield
        return
    registry._run_in_subprocess = _here  # noqa: SLF001 - there is no public way
    try:
        yield
    finally:
        registry._run_in_subprocess = apart  # noqa: SLF001


def _here(inspect: Callable[[], Any]) -> Any:
    return inspect()
