"""``warmseed explain``: which input of two configurations or environments differs."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import Annotated

import typer

from warmseed.blocking import run_blocking
from warmseed.daemon.cli.fleet import CacheRoot, SigningKey, Stores, TokenFile, TrustedKeys, open_fleet
from warmseed.errors import printable
from warmseed.seeding.environment import Difference
from warmseed.seeding.kinds.autotune.collect import collect
from warmseed.seeding.operator.explain import Explanation, Side, compare_sides, read_side

__all__ = ["explain"]

_HERE = "here"


def explain(
    theirs: Annotated[
        str, typer.Argument(help="A table, a managed store's folder, a manifest, a file of inputs, or a config hash.")
    ],
    ours: Annotated[str, typer.Argument(help="The same; 'here' is this node's own FlashInfer environment.")] = _HERE,
    *,
    cache_root: CacheRoot = None,
    stores: Stores = "",
    token_file: TokenFile = None,
    signing_key: SigningKey = None,
    trusted_keys: TrustedKeys = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines for people.")] = False,
) -> None:
    """Say why a cache from there is not one for here: field by field. Exit code 1 if anything differs."""

    async def work() -> Explanation:
        async with open_fleet(
            cache_root, stores=stores, token_file=token_file, signing_key=signing_key, trusted_keys=trusted_keys
        ) as fleet:

            async def side(text: str) -> Side:
                if text != _HERE:
                    return await read_side(text, fleet.chain, fleet.keyring)
                return Side(_HERE, (await run_blocking(collect, fleet.state)).metadata)

            return compare_sides(await side(theirs), await side(ours))

    found = asyncio.run(work())
    if as_json:
        print(json.dumps({"same": found.same, **asdict(found)}))
    else:
        _show(found)
    raise typer.Exit(0 if found.same else 1)


def _show(found: Explanation) -> None:
    for title, differences in (("configuration", found.configuration), ("environment", found.environment)):
        for difference in differences:
            print(f"{title}  {_line(difference)}")
    for note in found.notes:
        print(f"note  {printable(note, limit=500)}")
    if found.same:
        print("nothing differs")


def _line(difference: Difference) -> str:
    sides = (difference.theirs, difference.ours)
    shown = ["absent" if side is None else repr(printable(side, limit=120)) for side in sides]
    return f"{printable(difference.field)}: theirs {shown[0]}, ours {shown[1]}"
