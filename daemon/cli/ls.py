"""``warmseed ls``: what is published, and what was moved aside on this node."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Annotated

import msgspec
import typer

from warmseed.daemon.cli.columns import print_columns
from warmseed.daemon.cli.fleet import CacheRoot, SigningKey, Stores, TokenFile, TrustedKeys, node_state, open_fleet
from warmseed.errors import printable
from warmseed.seeding.operator.golden import Listed, list_artifacts
from warmseed.seeding.rejected import Rejected, list_rejected

__all__ = ["ls"]


def ls(
    prefix: Annotated[str, typer.Argument(help="Only this KIND, or KIND/CONFIG-HASH.")] = "",
    *,
    rejected: Annotated[bool, typer.Option("--rejected", help="Local files that were moved aside, and why.")] = False,
    cache_root: CacheRoot = None,
    stores: Stores = "",
    token_file: TokenFile = None,
    signing_key: SigningKey = None,
    trusted_keys: TrustedKeys = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """List published generations, or with --rejected the local files that were moved aside."""
    if rejected:
        _show_rejected(list_rejected(node_state(cache_root)), as_json=as_json)
        return

    async def gather() -> list[Listed]:
        async with open_fleet(
            cache_root, stores=stores, token_file=token_file, signing_key=signing_key, trusted_keys=trusted_keys
        ) as fleet:
            return [found async for found in list_artifacts(fleet.chain, fleet.keyring, prefix=prefix)]

    _show_listed(asyncio.run(gather()), as_json=as_json)


def _show_rejected(found: tuple[Rejected, ...], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"rejected": msgspec.to_builtins(found)}))
        return
    if not found:
        print("nothing was moved aside on this node")
        return
    for item in found:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(item.moved_at))
        print(f"{when}  {item.reason}  {printable(item.original, limit=500)}")
        print(f"    because: {printable(item.detail, limit=1000)}")
        print(f"    kept as: {printable(item.moved_to, limit=600)}")


def _show_listed(found: list[Listed], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"artifacts": [msgspec.to_builtins(item.manifest) for item in found]}))
        return
    if not found:
        print("nothing is published here that this node believes")
        return
    rows: list[tuple[str, ...]] = [
        ("KIND", "CONFIGURATION", "RANK", "GENERATION", "RUN", "BYTES", "PUBLISHED", "BY", "WHAT")
    ]
    for item in found:
        manifest = item.manifest
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(manifest.issued_at))
        numbers = (str(manifest.generation), manifest.run[:12] or "-", str(manifest.length))
        what = manifest.provenance.get("operations", "-")
        rows.append(
            (manifest.kind, manifest.config_hash[:12], item.key.rank_label, *numbers, when, manifest.publisher, what)
        )
    print_columns(rows)
