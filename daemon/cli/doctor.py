"""``warmseed doctor``: checks the cache folder and every store for real, and says what to do about what fails."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from warmseed.daemon.engines.registry import cache_layout
from warmseed.daemon.settings.config import ENV_PREFIX
from warmseed.daemon.settings.merge import read_file
from warmseed.daemon.settings.paths import default_cache_root, state_folder
from warmseed.stores.checkup import Checkup, check_store
from warmseed.stores.disk import DiskStore
from warmseed.stores.registry import known_backends, open_store

__all__ = ["doctor"]

_PACKAGES = ("obstore", "redis", "aiohttp", "cryptography", "msgspec", "torch", "vllm")
_MOONCAKE = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13")


def doctor(
    warmup_cache_stores: Annotated[
        str, typer.Option(help="Stores to check, comma-separated; default: those of the configuration.")
    ] = "",
    config: Annotated[Path | None, typer.Option(help="TOML file, as for `warmseed preload`.")] = None,
    cache_root: Annotated[Path | None, typer.Option(help="Root of this node's caches.")] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Write to, read back from and time the local disk and every store; exit 1 if one of them can't be used."""
    if config is None and (named := _environment("CONFIG")):
        config = Path(named)
    fields = read_file(config) if config is not None else {}
    root = cache_root or Path(str(_environment("CACHE_ROOT") or fields.get("cache_root") or default_cache_root()))
    listed = warmup_cache_stores or _environment("WARMUP_CACHE_STORES")
    configured = fields.get("warmup_cache_stores")
    names = _split(listed)
    if not listed and isinstance(configured, list | tuple):
        names = [str(name) for name in configured]
    tables = fields.get("stores")
    table = {str(name): dict(options) for name, options in tables.items()} if isinstance(tables, dict) else {}
    checkups = asyncio.run(_check(root, names, table, dict(os.environ)))
    facts = _facts(root)
    if as_json:
        print(json.dumps({**facts, "stores": [{**asdict(checkup), "ok": checkup.ok} for checkup in checkups]}))
    else:
        _show(facts, checkups)
    if not all(checkup.ok for checkup in checkups):
        raise typer.Exit(1)


def _environment(name: str) -> str:
    """The environment variable of a setting, empty where there is none."""
    return os.environ.get(ENV_PREFIX + name, "")


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


async def _check(
    root: Path, names: list[str], table: dict[str, dict[str, object]], environment: dict[str, str]
) -> list[Checkup]:
    disk = DiskStore(state_folder(root) / "store")
    checkups = [await check_store(disk)]
    for name in names:  # one after the other, so that the times are each store's own
        store = await open_store(name, table=table, environment=environment)
        try:
            checkups.append(await check_store(store))
        finally:
            await store.aclose()
    return checkups


def _facts(root: Path) -> dict[str, object]:
    folder = next((p for p in (root, *root.parents) if p.exists()), Path("/"))
    usage = shutil.disk_usage(folder)
    return {
        "warmseed": _version("warmseed"),
        "python": platform.python_version(),
        "cache_root": str(root),
        "disk_free_bytes": usage.free,
        "bytecode": cache_layout("vllm", root.absolute()).variables.get("PYTHONPYCACHEPREFIX", ""),
        "known_stores": list(known_backends()),
        "packages": {name: version for name in (*_PACKAGES, *_MOONCAKE) if (version := _version(name))},
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _show(facts: dict[str, object], checkups: list[Checkup]) -> None:
    console = Console()
    table = Table("store", "reads", "writes", "miss", "4 KiB put", "4 KiB get", "put", "get")
    for c in checkups:
        table.add_row(
            c.store,
            "yes" if c.reads else "NO",
            "yes" if c.writes else ("NO" if c.problem else "read-only"),
            *(_number(value, "ms") for value in (c.miss_ms, c.small_put_ms, c.small_get_ms)),
            *(_number(value, "MB/s") for value in (c.put_mb_s, c.get_mb_s)),
        )
    console.print(f"cache root {facts['cache_root']}, {_gib(facts['disk_free_bytes'])} free", highlight=False)
    if facts["bytecode"]:
        console.print(
            f"the engine's packages came without Python's bytecode; it is kept in {facts['bytecode']}", highlight=False
        )
    console.print("chain: " + " -> ".join(c.store for c in checkups), highlight=False, markup=False)
    console.print(table)
    for c in checkups:
        if c.problem:
            console.print(f"{c.store}: {c.problem}", highlight=False, markup=False)
        if c.left_behind:
            console.print(f"{c.store}: test objects stay under {c.left_behind}", highlight=False, markup=False)
    if any(c.store == "mooncake" for c in checkups):
        console.print(
            "mooncake has no authentication: any client of its master can read, replace and delete everything. "
            "Keep it inside a trusted network; warmseed installs only what its publishers signed.",
            highlight=False,
        )


def _number(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:g} {unit}"


def _gib(size: object) -> str:
    return f"{int(size) / (1 << 30):.1f} GiB" if isinstance(size, int) else "?"
