"""What the operators' commands need of a fleet: its stores, its keys, this node's folder."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from warmseed.blocking import run_blocking
from warmseed.daemon.rank.fleet_keys import fleet_keys
from warmseed.daemon.settings.paths import default_cache_root, state_folder
from warmseed.errors import ConfigurationError
from warmseed.seeding.trust.keys import Keyring, PublisherKey
from warmseed.seeding.trust.token import read_tokens
from warmseed.stores.chain import Chain
from warmseed.stores.registry import open_stores

__all__ = ["CacheRoot", "Fleet", "SigningKey", "Stores", "TokenFile", "TrustedKeys", "node_state", "open_fleet"]

CacheRoot = Annotated[Path | None, typer.Option("--cache-root", help="Root of this node's warmup caches.")]
Stores = Annotated[
    str,
    typer.Option("--warmup-cache-stores", help="The fleet's stores, separated by commas."),
]
TokenFile = Annotated[Path | None, typer.Option("--seed-token-file", help="File with the fleet's token.")]
SigningKey = Annotated[Path | None, typer.Option("--seed-signing-key", help="The publisher's key, if there is one.")]
TrustedKeys = Annotated[
    list[str] | None, typer.Option("--seed-trusted-keys", help="A trusted key, or a file of them; may be repeated.")
]


@dataclass(frozen=True, slots=True)
class Fleet:
    """Opened for one command."""

    chain: Chain
    keys: tuple[PublisherKey, ...]
    keyring: Keyring
    state: Path

    def signing(self) -> tuple[PublisherKey, ...]:
        """The keys to sign with.

        Raises:
            ConfigurationError: there are none.
        """
        if not self.keys:
            raise ConfigurationError("there is no key to sign with; pass --seed-token-file or --seed-signing-key")
        return self.keys


def node_state(cache_root: Path | None) -> Path:
    """warmseed's own folder on this node."""
    return state_folder(default_cache_root() if cache_root is None else cache_root.absolute())


@asynccontextmanager
async def open_fleet(
    cache_root: Path | None,
    *,
    stores: str = "",
    token_file: Path | None = None,
    signing_key: Path | None = None,
    trusted_keys: list[str] | None = None,
) -> AsyncIterator[Fleet]:
    """The stores and keys that these options name, this node's disk first.

    Raises:
        ConfigurationError: for a token, key or store that can't work.
    """
    state = node_state(cache_root)
    tokens = await run_blocking(read_tokens, file=token_file, arguments=(), environ={})
    signing = None if signing_key is None else str(signing_key)
    keys, keyring = await run_blocking(fleet_keys, tokens, state, signing=signing, trusted=tuple(trusted_keys or ()))
    names = [name.strip() for name in stores.split(",") if name.strip()]
    chain = await open_stores(names, folder=state / "store")
    try:
        yield Fleet(chain, tuple(keys), keyring, state)
    finally:
        await chain.aclose()
