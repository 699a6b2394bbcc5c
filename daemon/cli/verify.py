"""``warmseed verify``: proofs, for an operator who wants more than a promise."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from warmseed.daemon.weights.checkpoint import digest_checkpoint, stat_checkpoint
from warmseed.errors import ConfigurationError

if TYPE_CHECKING:
    from warmseed.daemon.engines.torch import TorchEngine
    from warmseed.daemon.weights.loader_config import LoaderConfig
    from warmseed.daemon.weights.parity import ParityReport

__all__ = ["verify", "verify_weights"]

SHOWN = 20  # differences on the terminal; ``--json`` has them all


def verify(
    model: Annotated[Path, typer.Option(help="Folder of the model: config.json and *.safetensors.")],
    *,
    weights: Annotated[
        bool, typer.Option("--weights", help="Compare the daemon's weights with a load from disk.")
    ] = False,
    socket_dir: Annotated[Path | None, typer.Option(help="Folder of the daemons' sockets.")] = None,
    dtype: Annotated[str, typer.Option(help="Data type of the weights.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="torch device; the first GPU where there is one, else the CPU.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines for people.")] = False,
) -> None:
    """Prove that a daemon serves what lies on disk: every tensor, bit for bit. Exit 1 if it does not."""
    from warmseed.daemon.engines.torch import TorchEngine
    from warmseed.daemon.weights.loader_config import LoaderConfig

    if not weights:
        raise ConfigurationError("nothing to verify: give --weights")
    loader = LoaderConfig.parse({"fallback": True} if socket_dir is None else {"socket_dir": str(socket_dir)})
    raise typer.Exit(verify_weights(TorchEngine(model, dtype=dtype, device=device), loader, as_json=as_json))


def verify_weights(engine: TorchEngine, loader: LoaderConfig, *, as_json: bool = False) -> int:
    """0 if the daemon's weights are those of a fresh load from disk, bit for bit, else 1; says which on stdout.

    Needs room for the model once more. The daemon is only asked, never changed.

    Raises:
        WeightCacheUnavailable: there is no daemon, or it holds other weights; nothing was compared.
        ConfigurationError: the model can't be loaded.
    """
    from warmseed.daemon.weights.client import attach, map_into
    from warmseed.daemon.weights.parity import compare_models

    mapped = engine.shell()
    with attach(
        loader.address(engine.device_uuid()),
        engine.fingerprint(stat_checkpoint(engine.model)),
        mode="zero_copy",  # copy mode would ask the daemon to let go of what it holds
        connect_timeout_s=loader.connect_timeout_s,
        state_timeout_s=loader.state_timeout_s,
        fallback=loader.fallback,
        device=engine.device,
        digest=lambda mode: digest_checkpoint(engine.model, mode=mode),
    ) as attachment:
        materialised = map_into(mapped, attachment).materialised
        report = compare_models(mapped, engine.load_module())
        seconds = attachment.seconds
    _say(report, materialised, seconds, as_json=as_json)
    return 0 if report.equal else 1


def _say(report: ParityReport, materialised: tuple[str, ...], seconds: float, *, as_json: bool) -> None:
    if as_json:
        found = [asdict(difference) for difference in report.differences]
        record = {"equal": report.equal, "tensors": report.tensors, "bytes": report.nbytes, "differences": found}
        print(json.dumps({**record, "not_from_daemon": list(materialised), "attach_ms": round(seconds * 1e3, 2)}))
        return
    for difference in report.differences[:SHOWN]:
        print(difference)
    if len(report.differences) > SHOWN:
        print(f"and {len(report.differences) - SHOWN} more; --json lists all")
    verdict = "identical" if report.equal else f"{len(report.differences)} differences"
    print(f"weights: {report.tensors} tensors, {report.nbytes} bytes, mapped and loaded from disk: {verdict}")
