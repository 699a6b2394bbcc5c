"""``warmseed keys``: makes publisher keys, and says what a change of trusted keys would cost."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from pathlib import Path
from typing import Annotated

import typer

from warmseed.daemon.settings.paths import default_cache_root, state_folder
from warmseed.errors import ConfigurationError, WarmseedError
from warmseed.seeding.operator.keycheck import Checked, check_keys
from warmseed.seeding.trust.keys import Keyring, PublicKey, PublisherKey
from warmseed.seeding.trust.token import MANIFEST_LABEL, read_tokens
from warmseed.stores.base import PrunableStore, Store
from warmseed.stores.disk import DiskStore
from warmseed.stores.registry import open_store

__all__ = ["app"]

CHECK_SECONDS = 300.0  # for all stores together

app = typer.Typer(name="keys", help="Make publisher keys, and check a change of trusted keys.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Make publisher keys, and check a change of trusted keys."""


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="The key's name, for people: builder-2027, ci.example.org.")],
    out: Annotated[Path, typer.Option("--out", help="The new file for the secret half, readable by you alone.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines for people.")] = False,
) -> None:
    """Make an Ed25519 key. The secret half stays in --out; the public half is for --seed-trusted-keys of every node."""
    key = PublisherKey.generate(name)
    try:
        key.save(out)
    except FileExistsError as error:
        raise ConfigurationError(f"{out} exists; a key is never overwritten: choose another file") from error
    except OSError as error:
        raise ConfigurationError(f"{out} can't be written: {error.strerror}") from error
    if as_json:
        print(json.dumps({"file": str(out), "key_id": key.public.keyid, "public": str(key.public)}))
    else:
        print(str(key.public))
        typer.echo(f"wrote {out}; publishers pass --seed-signing-key {out}, nodes trust the line above", err=True)


@app.command()
def check(
    trusted: Annotated[
        list[str] | None,
        typer.Option("--seed-trusted-keys", help="Keys as they would be: name:base64, or a file of such lines."),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option("--seed-token-file", help="Trust the keys that follow from these tokens as well.")
    ] = None,
    stores: Annotated[
        list[str] | None, typer.Option("--store", help="A store to look through, as in --warmup-cache-stores.")
    ] = None,
    cache_root: Annotated[Path | None, typer.Option(help="Root of this node's warmup caches.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines for people.")] = False,
) -> None:
    """Say which stored manifests would stop verifying under these keys; 1 if any would, so scripts can stop."""
    keyring = _keyring(trusted or [], token_file)
    root = default_cache_root() if cache_root is None else cache_root.absolute()
    found = asyncio.run(_look(keyring, stores or [], state_folder(root)))
    lost = [one for one in found if one.problem]
    if as_json:
        shown = [{"store": one.store, "key": one.key, "problem": one.problem} for one in lost]
        trusting = [{"name": key.name, "key_id": key.keyid} for key in keyring]
        print(json.dumps({"checked": len(found), "trusted": trusting, "would_stop_verifying": shown}))
    else:
        for one in lost:
            print(f"{one.store}: {one.key}: {one.problem}")
        print(f"{len(found) - len(lost)} of {len(found)} signed objects verify with {len(keyring)} trusted keys")
    if lost:
        raise typer.Exit(1)


def _keyring(trusted: list[str], token_file: Path | None) -> Keyring:
    lines: list[str] = []
    for entry in trusted:
        if ":" in entry:
            lines.append(entry)
            continue
        try:
            lines += Path(entry).read_text(encoding="ascii").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"--seed-trusted-keys {entry}: neither name:base64 nor a readable file") from error
    keys: list[PublicKey] = list(Keyring.parse(lines))
    tokens = read_tokens(file=token_file, environ={}) if token_file is not None else ()
    keys += [PublisherKey(f"token-{token.key_id}", token.derive(MANIFEST_LABEL)).public for token in tokens]
    if not keys:
        raise ConfigurationError("no keys to check with: pass --seed-trusted-keys or --seed-token-file")
    return Keyring(keys)


async def _look(keyring: Keyring, stores: list[str], state: Path) -> list[Checked]:
    found: list[Checked] = []
    opened: list[Store] = []
    try:
        if (state / "objects").is_dir():
            opened.append(DiskStore(state))
        for text in stores:
            opened += [await open_store(text)]
        async with asyncio.timeout(CHECK_SECONDS):
            for store in opened:
                if not isinstance(store, PrunableStore):
                    raise ConfigurationError(f"store {store.name!r} can't list its objects, so it can't be checked")
                async with aclosing(check_keys(store, keyring)) as checked:
                    found += [one async for one in checked]
    except TimeoutError as error:
        raise WarmseedError(f"the stores were not looked through within {CHECK_SECONDS:g} s") from error
    finally:
        for store in opened:
            await store.aclose()
    return found
