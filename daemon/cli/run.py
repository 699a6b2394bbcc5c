"""``warmseed run``: the small engine. Maps a daemon's weights, warms up, answers, exits."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from warmseed.daemon.engines.torch import TorchEngine
from warmseed.daemon.paths import default_cache_root
from warmseed.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

    from warmseed.daemon.weights.client import Attachment, LoaderConfig

__all__ = ["run"]


class _Phases:
    """Seconds by phase, in the order in which they happened."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = round(time.monotonic() - start, 4)


def run(
    model: Annotated[Path, typer.Option(help="Folder of the model: config.json and *.safetensors.")],
    prompt: Annotated[list[str] | None, typer.Option(help="What to answer; repeatable.")] = None,
    *,
    engine: Annotated[str, typer.Option(help="The engine; only torch runs here, vLLM has its own command.")] = "torch",
    load_format: Annotated[str, typer.Option(help="ipc_cache maps a daemon's weights, disk loads them.")] = "ipc_cache",
    model_loader_extra_config: Annotated[
        str, typer.Option(help="JSON: socket_path, socket_dir, mode, fallback, connect_timeout_s, state_timeout_s.")
    ] = "{}",
    socket_path: Annotated[Path | None, typer.Option(help="The daemon's socket.")] = None,
    socket_dir: Annotated[Path | None, typer.Option(help="Folder of the daemons' sockets.")] = None,
    fallback: Annotated[bool, typer.Option(help="Load from disk when the daemon can't serve this model.")] = True,
    cache_root: Annotated[Path | None, typer.Option(help="Canonical root of this node's caches.")] = None,
    dtype: Annotated[str, typer.Option(help="Data type of the weights.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="torch device; the first GPU where there is one, else the CPU.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens in the longest answer.")] = 16,
    stdin: Annotated[bool, typer.Option(help="Then answer one prompt a line from standard input.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a answer instead of text.")] = False,
) -> None:
    """Map a daemon's weights, warm up every shape bucket, answer greedily and exit."""
    started = time.monotonic()
    if engine != TorchEngine.name:
        raise ConfigurationError(f"--engine {engine}: `warmseed run` is the torch engine; start vLLM with `vllm serve`")
    if load_format not in ("ipc_cache", "disk"):
        raise ConfigurationError(f"--load-format {load_format}: choose ipc_cache or disk")
    loader = _loader_config(model_loader_extra_config, socket_path, socket_dir, fallback)
    server = TorchEngine(model, dtype=dtype, device=device)
    # Before torch is imported: its cache folders are read from the environment once.
    os.environ.update(server.caches(cache_root or default_cache_root()).variables)

    phases = _Phases()
    with phases.timed("import"):
        server.import_everything()
    module, attachment, source = _weights(server, loader, load_format, phases)
    server.compile(module)
    with phases.timed("compile"):
        evidence = server.warm_up(module)
    if attachment is not None:
        attachment.report(evidence)

    def answer(text: str) -> None:
        with phases.timed("first_token"):
            generation = server.generate(module, text, max_tokens=max_tokens)
        phases.seconds["first_token"] = round(generation.first_token_seconds, 4)
        phases.seconds["total"] = round(time.monotonic() - started, 4)
        if not as_json:
            print(generation.text, flush=True)
            return
        print(
            json.dumps(
                {
                    "text": generation.text,
                    "tokens": generation.tokens,
                    "phases": phases.seconds,
                    **source,
                    "evidence": {"seconds": round(evidence.seconds, 4), "counters": dict(evidence.counters)},
                }
            ),
            flush=True,
        )

    for text in prompt or ():
        answer(text)
    if stdin:
        for line in sys.stdin:
            answer(line.strip())
    if attachment is not None:
        attachment.close()


def _loader_config(extra: str, socket_path: Path | None, socket_dir: Path | None, fallback: bool) -> LoaderConfig:
    from warmseed.daemon.weights.client import LoaderConfig

    try:
        given: Any = json.loads(extra)
    except ValueError as error:
        raise ConfigurationError(f"--model-loader-extra-config is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise ConfigurationError("--model-loader-extra-config must be a JSON object")
    for name, value in (("socket_path", socket_path), ("socket_dir", socket_dir)):
        if value is not None:
            given[name] = str(value)
    return LoaderConfig.parse({"fallback": fallback, **given})


def _weights(
    server: TorchEngine, loader: LoaderConfig, load_format: str, phases: _Phases
) -> tuple[torch.nn.Module, Attachment | None, dict[str, Any]]:
    raise NotImplementedError
