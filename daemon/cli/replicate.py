"""``warmseed pull``, ``push``, ``export`` and ``import``: copy published generations between stores."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Annotated

import typer

from warmseed.daemon.cli.fleet import CacheRoot, Fleet, SigningKey, Stores, TokenFile, TrustedKeys, open_fleet
from warmseed.errors import ConfigurationError, WarmseedError, printable
from warmseed.seeding.operator.replicate import Replica, current_generations, replicate
from warmseed.seeding.trust.judge import Trust
from warmseed.stores.base import PrunableStore, Store
from warmseed.stores.chain import Chain
from warmseed.stores.folder import FolderStore
from warmseed.stores.wrappers.base import innermost

__all__ = ["export", "import_", "pull", "push"]

Prefix = Annotated[str, typer.Argument(help="Only this KIND, or KIND/CONFIG-HASH.")]
Folder = Annotated[Path, typer.Argument(help="The folder; it can be named as a store, too: file:/its/path.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of lines for people.")]
# From where, and to which stores; what had to be opened for it is closed by the stack.
Route = Callable[[Fleet, AsyncExitStack], tuple[Chain, Sequence[Store]]]


def pull(
    prefix: Prefix = "",
    *,
    cache_root: CacheRoot = None,
    stores: Stores = "",
    token_file: TokenFile = None,
    signing_key: SigningKey = None,
    trusted_keys: TrustedKeys = None,
    as_json: AsJson = False,
) -> None:
    """Bring what the stores have to this node's disk, so that its next start needs no network."""

    def route(fleet: Fleet, opened: AsyncExitStack) -> tuple[Chain, Sequence[Store]]:
        return Chain(None, _shared(fleet), writes="none"), _disk(fleet)

    opening = open_fleet(
        cache_root, stores=stores, token_file=token_file, signing_key=signing_key, trusted_keys=trusted_keys
    )
    _run(opening, route, prefix, as_json=as_json)


def push(
    prefix: Prefix = "",
    *,
    cache_root: CacheRoot = None,
    stores: Stores = "",
    token_file: TokenFile = None,
    signing_key: SigningKey = None,
    trusted_keys: TrustedKeys = None,
    as_json: AsJson = False,
) -> None:
    """Put what this node's disk has into every store: what a node made while they were away, or for a new store."""

    def route(fleet: Fleet, opened: AsyncExitStack) -> tuple[Chain, Sequence[Store]]:
        return Chain(fleet.chain.disk, (), writes="none"), _shared(fleet)

    opening = open_fleet(
        cache_root, stores=stores, token_file=token_file, signing_key=signing_key, trusted_keys=trusted_keys
    )
    _run(opening, route, prefix, as_json=as_json)


def export(
    folder: Folder,
    prefix: Prefix = "",
    *,
    cache_root: CacheRoot = None,
    stores: Stores = "",
    token_file: TokenFile = None,
    signing_key: SigningKey = None,
    trusted_keys: TrustedKeys = None,
    as_json: AsJson = False,
) -> None:
    """Copy what this node's disk and the stores have to a folder, for a fleet that can't reach them."""

    def route(fleet: Fleet, opened: AsyncExitStack) -> tuple[Chain, Sequence[Store]]:
        target = folder.absolute()
        try:
            target.mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"{target} can't be made: {error.strerror}; nothing was exported") from error
        return fleet.chain, [_folder(target, opened)]

    opening = open_fleet(
        cache_root, stores=stores, token_file=token_file, signing_key=signing_key, trusted_keys=trusted_keys
    )
    _run(opening, route, prefix, as_json=as_json)


def import_(
    folder: Folder,
    prefix: Prefix = "",
    *,
    cache_root: CacheRoot = None,
    stores: Stores = "",
    token_file: TokenFile = None,
    signing_key: SigningKey = None,
    trusted_keys: TrustedKeys = None,
    as_json: AsJson = False,
) -> None:
    """Copy from an exported folder to this node's disk and every store that is named."""

    def route(fleet: Fleet, opened: AsyncExitStack) -> tuple[Chain, Sequence[Store]]:
        source = folder.absolute()
        if not source.is_dir():
            raise ConfigurationError(f"{source} is not a folder; nothing was imported")
        return Chain(None, [_folder(source, opened)], writes="none"), [*_disk(fleet), *fleet.chain.tiers]

    opening = open_fleet(
        cache_root, stores=stores, token_file=token_file, signing_key=signing_key, trusted_keys=trusted_keys
    )
    _run(opening, route, prefix, as_json=as_json)


def _shared(fleet: Fleet) -> Sequence[Store]:
    if not fleet.chain.tiers:
        raise ConfigurationError("there is no store to copy from or to; name one with --warmup-cache-stores")
    return fleet.chain.tiers


def _folder(folder: Path, opened: AsyncExitStack) -> Store:
    store = FolderStore(folder, name=str(folder))
    opened.push_async_callback(store.aclose)
    return store


def _disk(fleet: Fleet) -> Sequence[Store]:
    return [] if fleet.chain.disk is None else [fleet.chain.disk]


def _run(opening: AbstractAsyncContextManager[Fleet], route: Route, prefix: str, *, as_json: bool) -> None:
    """Copy along `route`, and say so line by line; exit code 1 if anything is not where it was to be."""

    async def work() -> list[Replica]:
        done: list[Replica] = []
        async with AsyncExitStack() as opened:
            fleet = await opened.enter_async_context(opening)
            source, targets = route(fleet, opened)
            _require_listing(source)
            trust, now = Trust(fleet.keyring), int(time.time())
            for listed in await current_generations(source, trust, prefix=prefix, now=now):
                for replica in await replicate(
                    listed, source, targets, trust, staging=fleet.state / "staging", now=now
                ):
                    done.append(replica)
                    if not as_json:
                        print(_line(replica), flush=True)
        return done

    done = asyncio.run(work())
    if as_json:
        print(json.dumps({"generations": [_row(replica) for replica in done]}))
    elif not done:
        print("nothing is published there that this node believes")
    failed = sum(replica.outcome in ("conflict", "missing", "failed") for replica in done)
    if failed:
        raise WarmseedError(f"{failed} of {len(done)} copies were not made; what was copied stays")


def _require_listing(source: Chain) -> None:
    """Refuse a source that can't say what it holds: everything would look as if there were nothing."""
    if not any(isinstance(innermost(tier), PrunableStore) for tier in source.all_tiers()):
        names = ", ".join(tier.name for tier in source.all_tiers())
        raise ConfigurationError(f"{names} can't list what it holds; name a store that can (file, s3, redis)")


def _line(replica: Replica) -> str:
    key, manifest = replica.listed.key, replica.listed.manifest
    what = f"{manifest.kind} {manifest.config_hash[:12]} {key.rank_label} generation {manifest.generation}"
    size = f", {replica.nbytes / 1e6:.1f} MB" if replica.nbytes else ""
    why = f": {printable(replica.why, limit=300)}" if replica.why else ""
    return f"{what} -> {printable(replica.target)}: {replica.outcome}{size}{why}"


def _row(replica: Replica) -> dict[str, object]:
    key, manifest = replica.listed.key, replica.listed.manifest
    return {
        "kind": manifest.kind, "config_hash": manifest.config_hash, "rank": key.rank_label,
        "generation": manifest.generation, "sha256": manifest.sha256, "target": replica.target,
        "outcome": replica.outcome, "bytes": replica.nbytes, "why": replica.why,
    }  # fmt: skip
