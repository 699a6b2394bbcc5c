"""``warmseed run``: the small engine. Maps a daemon's weights, warms up, answers, exits."""

from __future__ import annotations

import atexit
import errno
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from warmseed.daemon.engines.bytecode import keep_bytecode
from warmseed.daemon.engines.torch import TorchEngine
from warmseed.daemon.settings.paths import default_cache_root, prepare_cache_root
from warmseed.daemon.weights.errors import WeightCacheError, WeightCacheUnavailable
from warmseed.errors import ConfigurationError, WarmseedError, printable

if TYPE_CHECKING:
    import torch

    from warmseed.daemon.weights.client import Attachment
    from warmseed.daemon.weights.loader_config import LoaderConfig
    from warmseed.seeding.kinds.base import Evidence

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
    fallback: Annotated[
        bool,
        typer.Option(help="Load from disk when the daemon can't serve this model, compile elsewhere when it is full."),
    ] = True,
    cache_root: Annotated[Path | None, typer.Option(help="Canonical root of this node's caches.")] = None,
    dtype: Annotated[str, typer.Option(help="Data type of the weights.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="torch device; the first GPU where there is one, else the CPU.")] = "",
    shape_buckets: Annotated[
        str, typer.Option(help="Sequence lengths to compile and pad to, as the daemon has them.", metavar="A,B")
    ] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens in the longest answer.")] = 16,
    stdin: Annotated[bool, typer.Option(help="Then answer one prompt a line from standard input.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object an answer instead of text.")] = False,
) -> None:
    """Map a daemon's weights, warm up every shape bucket, answer greedily and exit."""
    started = time.monotonic()
    if engine != TorchEngine.name:
        raise ConfigurationError(f"--engine {engine}: `warmseed run` is the torch engine; start vLLM with `vllm serve`")
    if load_format not in ("ipc_cache", "disk"):
        raise ConfigurationError(f"--load-format {load_format}: choose ipc_cache or disk")
    loader = _loader_config(model_loader_extra_config, socket_path, socket_dir, fallback)
    server = TorchEngine(model, dtype=dtype, device=device, buckets=_buckets(shape_buckets))
    root = (cache_root or default_cache_root()).absolute()
    prepare_cache_root(root)  # compiled code is loaded from there: nobody else may have put it there
    keep_bytecode(root, server.modules)
    # Before torch is imported: its cache folders are read from the environment once.
    os.environ.update(server.caches(root).variables)

    phases = _Phases()
    with phases.timed("import"):
        server.prepare()
    module, attachment, source = _weights(server, loader, load_format, phases)
    server.compile(module)
    with phases.timed("compile"):
        evidence = _warm_up(server, module, root, elsewhere=fallback)
    if attachment is not None:
        _report(attachment, evidence)

    def answer(text: str) -> None:
        asked = time.monotonic()
        generation = server.generate(module, text, max_tokens=max_tokens)
        if not as_json:
            print(generation.text, flush=True)
            return
        seconds = {**phases.seconds, "first_token": round(generation.first_token_at - asked, 4)}
        counters = {"seconds": round(evidence.seconds, 4), "counters": dict(evidence.counters)}
        record = {
            "text": generation.text,
            "tokens": generation.tokens,
            "phases": seconds,
            "total": round(generation.first_token_at - started, 4),
            "first_token_at": generation.first_token_at,
            **source,
            "evidence": counters,
        }
        print(json.dumps(record), flush=True)

    for text in prompt or ():
        answer(text)
    if stdin:
        for line in sys.stdin:
            answer(line.strip())
    if attachment is not None:
        attachment.close()


def _warm_up(server: TorchEngine, module: torch.nn.Module, root: Path, *, elsewhere: bool) -> Evidence:
    """Warm up; where `root` has no room for compiled code, in a folder of this process's own instead."""
    try:
        return server.warm_up(module)
    except Exception as error:
        # Compilers wrap it in errors of their own, or only print it.
        if os.strerror(errno.ENOSPC) not in str(error):
            raise
        if not elsewhere:
            raise WarmseedError(
                f"{root} has no room for compiled code; free some or name another --cache-root"
            ) from None
    folder = Path(tempfile.mkdtemp(prefix="warmseed-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    print(
        f"warmseed: {root} has no room for compiled code; it is compiled in {folder} and gone with this process: free "
        "some room or name another --cache-root",
        file=sys.stderr,
    )
    server.start_over(folder)
    return server.warm_up(module)


def _buckets(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdecimal() and len(word) < 8 for word in words):
        raise ConfigurationError(f"--shape-buckets {printable(text)}: numbers of tokens, such as 16,32,64")
    return [int(word) for word in words]


def _report(attachment: Attachment, evidence: Evidence) -> None:
    """Tell the daemon what this warmup used; a daemon that can't take it costs the verdict, not the answer."""
    from warmseed.daemon.weights.messages import Report

    try:
        attachment.report(
            Report(
                seconds=evidence.seconds,
                counters={name: float(value) for name, value in evidence.counters.items()},
                lines=evidence.lines,
                new_files=evidence.new_files,
            )
        )
    except WeightCacheError as error:
        print(f"warmseed: the daemon did not take the evidence of use: {error}", file=sys.stderr)


def _loader_config(extra: str, socket_path: Path | None, socket_dir: Path | None, fallback: bool) -> LoaderConfig:
    from warmseed.daemon.weights.loader_config import LoaderConfig

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
    """The model with its weights; the attachment that holds them, if a daemon's; and where they came from."""
    if load_format == "ipc_cache":
        try:
            return _attached(server, loader, phases)
        except WeightCacheUnavailable as error:
            if not loader.fallback:
                raise
            print(f"warmseed: {error}; loading from disk", file=sys.stderr)
            reason = {"fallback": error.reason, "fields": list(error.fields)}
    else:
        reason = {}
    with phases.timed("load"):
        module = server.load_module()
    return module, None, {"source": "disk", **reason}


def _attached(
    server: TorchEngine, loader: LoaderConfig, phases: _Phases
) -> tuple[torch.nn.Module, Attachment, dict[str, Any]]:
    from warmseed.daemon.weights.checkpoint import digest_checkpoint, stat_checkpoint
    from warmseed.daemon.weights.client import attach, map_into

    with phases.timed("build"):
        module = server.shell()
    before = _private_bytes()
    with phases.timed("attach"):
        attachment = attach(
            loader.address(server.device_uuid()),
            server.fingerprint(stat_checkpoint(server.model)),
            mode=loader.mode,
            connect_timeout_s=loader.connect_timeout_s,
            state_timeout_s=loader.state_timeout_s,
            fallback=loader.fallback,
            device=server.device,
            digest=lambda mode: digest_checkpoint(server.model, mode=mode),
        )
        map_into(module, attachment)
    with phases.timed("look"):
        _look_at(module)
    growth = max(0, _private_bytes() - before)
    source = {
        "source": "ipc_cache",
        "attach_ms": round(phases.seconds["attach"] * 1e3, 2),
        "weights_bytes": attachment.nbytes,
        "private_growth": round(growth / attachment.nbytes, 5),
    }
    return module, attachment, source


def _private_bytes() -> int:
    """Bytes of memory that are this process's own: anonymous pages and page tables (proc(5), smaps_rollup, status).

    ``Private_*`` would not do: a page of the daemon's that only this process has looked at lately counts there.
    """
    own = 0
    for file, names in (("smaps_rollup", ("Anonymous:",)), ("status", ("VmPTE:",))):
        for line in Path(f"/proc/self/{file}").read_text().splitlines():
            if line.startswith(names):
                own += int(line.split()[1]) << 10
    return own


def _look_at(module: torch.nn.Module) -> None:
    """Read every byte of the weights once, so that what is shared and what is copied shows in the account."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type == "cpu":
            tensor.detach().sum()
