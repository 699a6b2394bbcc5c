"""``warmseed pin``: make one generation the fleet's, go back, forbid a payload, or allow it again."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from dataclasses import dataclass
from typing import Annotated

import typer

from warmseed.blocking import run_blocking
from warmseed.daemon.cli.fleet import CacheRoot, Fleet, SigningKey, Stores, TokenFile, TrustedKeys, open_fleet
from warmseed.errors import ConfigurationError, printable
from warmseed.seeding.artifact import ArtifactKey
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.operator.golden import (
    Listed,
    Pinned,
    allow,
    deny,
    list_artifacts,
    pin_generation,
    pin_run,
    roll_back,
)
from warmseed.seeding.trust.probation import Probation

__all__ = ["pin"]


@dataclass(frozen=True, slots=True)
class _Wish:
    """What was asked for."""

    kind: str
    run: str
    config: str
    rank: str
    generation: int
    rollback: bool
    deny: str
    allow: str
    reason: str


def pin(
    *,
    run: Annotated[str, typer.Option("--run", help="Pin this run for every rank that took part in it.")] = "",
    config: Annotated[str, typer.Option("--config", help="Configuration hash, or its first 8 digits or more.")] = "",
    rank: Annotated[str, typer.Option("--rank", help="Only this rank, as dp0_rank3.")] = "",
    generation: Annotated[int, typer.Option("--generation", min=0, help="Pin this generation.")] = 0,
    rollback: Annotated[bool, typer.Option("--rollback", help="Go back to what was pinned before.")] = False,
    deny: Annotated[str, typer.Option("--deny", help="Forbid the payload with this SHA-256.")] = "",
    allow: Annotated[
        str, typer.Option("--allow", help="Take back the denial of this SHA-256, and this node's quarantine of it.")
    ] = "",
    reason: Annotated[str, typer.Option("--reason", help="Why it is forbidden, for people.")] = "",
    kind: Annotated[str, typer.Option("--kind", help="Kind of cache.")] = "flashinfer_autotune",
    cache_root: CacheRoot = None,
    stores: Stores = "",
    token_file: TokenFile = None,
    signing_key: SigningKey = None,
    trusted_keys: TrustedKeys = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines for people.")] = False,
) -> None:
    """Make one generation the fleet's from every node's next start on, go back, or --deny and --allow a payload."""
    wish = _Wish(kind, run, config, rank, generation, rollback, deny, allow, reason)
    if sum((bool(run), bool(generation), rollback, bool(deny), bool(allow))) != 1:
        raise ConfigurationError("say exactly one of --run, --generation, --rollback, --deny and --allow")
    if (generation or rollback) and not config:
        raise ConfigurationError("--generation and --rollback need --config; `warmseed ls` shows the hashes")

    async def work() -> tuple[Pinned, ...]:
        async with open_fleet(
            cache_root, stores=stores, token_file=token_file, signing_key=signing_key, trusted_keys=trusted_keys
        ) as fleet:
            return await _fulfil(wish, fleet, socket.gethostname(), int(time.time()))

    done = asyncio.run(work())
    if as_json:
        ranks = [
            {"rank": item.key.rank_label, "config_hash": item.key.config_hash, "generation": item.generation}
            | {"sha256": item.sha256, "before": item.before}
            for item in done
        ]
        print(json.dumps({"pinned": ranks, "denied": deny, "allowed": allow}))
        return
    for item in done:
        what = f"generation {item.generation}" if item.generation else "the newest generation, nothing is pinned"
        print(f"{item.key.config_hash[:12]} {item.key.rank_label}: {what} (before: {item.before or 'the newest'})")
    if deny:
        print(f"denied {deny[:12]} at every node's next start")
    if allow:
        print(f"allowed {allow[:12]} again at every node's next start; quarantines of other nodes stay theirs to lift")


async def _fulfil(wish: _Wish, fleet: Fleet, publisher: str, now: int) -> tuple[Pinned, ...]:
    keys = fleet.signing()
    if wish.deny:
        await _deny(wish, fleet, publisher, now)
        return ()
    if wish.allow:
        await allow(fleet.chain, keys, kind=wish.kind, sha256=wish.allow, publisher=publisher, now=now)
        await run_blocking(Probation(fleet.state).forgive, wish.allow)
        return ()
    if wish.run:
        return await pin_run(fleet.chain, keys, fleet.keyring, wish.run, kind=wish.kind, publisher=publisher, now=now)
    found = [item async for item in list_artifacts(fleet.chain, fleet.keyring, prefix=f"{wish.kind}/")]
    found = [item for item in found if item.key.config_hash.startswith(wish.config) and len(wish.config) >= 8]
    found = [item for item in found if wish.rank in ("", item.key.rank_label)]
    if wish.rollback:
        ranks: dict[ArtifactKey, Listed] = {item.key: item for item in found}
        wanted = [await roll_back(fleet.chain, keys, fleet.keyring, key, publisher=publisher, now=now) for key in ranks]
    else:
        wanted = [
            await pin_generation(fleet.chain, keys, fleet.keyring, item, publisher=publisher, now=now)
            for item in found
            if item.manifest.generation == wish.generation
        ]
    if not wanted:
        raise ArtifactRefused("missing", f"nothing of {printable(wish.config)} is published here; nothing was changed")
    return tuple(wanted)


async def _deny(wish: _Wish, fleet: Fleet, publisher: str, now: int) -> None:
    """Forbid the payload that was asked for."""
    await deny(
        fleet.chain,
        fleet.signing(),
        kind=wish.kind,
        sha256=wish.deny,
        reason=wish.reason or "denied by an operator",
        publisher=publisher,
        now=now,
    )
