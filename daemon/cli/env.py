"""``warmseed env`` and ``warmseed exec``: give an engine the canonical cache root."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from pathlib import Path
from typing import Annotated

import typer

from warmseed.daemon.engines.registry import cache_layout
from warmseed.daemon.settings.paths import default_cache_root, prepare_cache_root
from warmseed.errors import ConfigurationError, printable

__all__ = ["env", "execute"]

_Root = Annotated[Path | None, typer.Option(help="Root of every warmup cache (default: one fixed path per user).")]
_Engine = Annotated[str, typer.Option(help="Whose variables; vllm is the one that needs them.")]


def env(
    *,
    cache_root: _Root = None,
    engine: _Engine = "vllm",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of shell lines.")] = False,
) -> None:
    """Print the variables that make an engine use the canonical cache root: ``eval "$(warmseed env)"``."""
    variables = cache_layout(engine, _root(cache_root)).variables
    if as_json:
        print(json.dumps(dict(variables)))
        return
    for name, value in variables.items():
        print(f"export {name}={shlex.quote(value)}")


def execute(
    command: Annotated[list[str], typer.Argument(help="The engine's own command line, after --.")],
    *,
    cache_root: _Root = None,
    engine: _Engine = "vllm",
) -> None:
    """Run an engine with the canonical cache root: ``warmseed exec -- vllm serve MODEL …``."""
    root = _root(cache_root)
    prepare_cache_root(root)
    os.environ.update(cache_layout(engine, root).variables)
    program = shutil.which(command[0])
    if program is None:
        raise ConfigurationError(f"{printable(command[0])}: there is no such program on the PATH")
    os.execv(program, command)  # noqa: S606 - replacing this process is the point, so that signals reach the engine


def _root(cache_root: Path | None) -> Path:
    return default_cache_root() if cache_root is None else cache_root.absolute()
