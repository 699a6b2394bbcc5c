"""``warmseed gc``: keep stores, and this node's disk, from growing for ever."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Annotated

import typer

from warmseed.daemon.cli.fleet import CacheRoot, SigningKey, Stores, TokenFile, TrustedKeys, open_fleet
from warmseed.errors import ConfigurationError, WarmseedError, printable
from warmseed.seeding.operator.retention import Item, Retention
from warmseed.seeding.operator.sweep import Planned, Removed, carry_out, plan_stores
from warmseed.seeding.trust.judge import Trust
from warmseed.stores.wrappers.base import innermost

__all__ = ["gc"]

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}  # seconds
_DURATION = re.compile(r"([0-9]{1,9})([smhd])")
_SHOWN = 5  # unreadable manifests on the terminal; ``--json`` has them all


def gc(
    prefix: Annotated[str, typer.Argument(help="Only generations of this KIND, or KIND/CONFIG-HASH.")] = "",
    *,
    keep: Annotated[int, typer.Option("--keep", min=1, help="Generations of each artifact that stay.")] = 3,
    older_than: Annotated[
        str, typer.Option("--older-than", help="Touch nothing that was written later than this ago: 90m, 24h, 7d.")
    ] = "24h",
    delete: Annotated[bool, typer.Option("--delete", help="Do it; without this nothing is changed.")] = False,
    cache_root: CacheRoot = None,
    stores: Stores = "",
    token_file: TokenFile = None,
    signing_key: SigningKey = None,
    trusted_keys: TrustedKeys = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines for people.")] = False,
) -> None:
    """Show what the stores and this node's disk no longer need, or remove it with --delete."""
    retention = Retention(keep=keep, older_than=_seconds(older_than), prefix=prefix)
    done: list[tuple[Planned, Removed | None]] = []

    async def work() -> None:
        async with open_fleet(
            cache_root, stores=stores, token_file=token_file, signing_key=signing_key, trusted_keys=trusted_keys
        ) as fleet:
            trust, now = Trust(fleet.keyring), int(time.time())
            planned, judgement = await plan_stores(fleet.chain.all_tiers(), trust, retention, now=now)
            for one in planned:
                removed = await carry_out(one, judgement, trust, retention, now=now) if delete else None
                done.append((one, removed))
                if not as_json:
                    _say(one, removed, older_than)

    failure: WarmseedError | None = None
    try:
        asyncio.run(work())
    except WarmseedError as error:
        if not done:
            raise
        failure = error
    if as_json:
        print(json.dumps({"deleted": delete, "stores": [_row(one, removed) for one, removed in done]}))
    if failure is not None:
        names = ", ".join(innermost(one.store).name for one, _ in done)
        raise WarmseedError(f"{failure}; {names} had been done by then") from failure


def _seconds(text: str) -> int:
    """A duration such as ``24h`` in seconds.

    Raises:
        ConfigurationError: for anything else.
    """
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ConfigurationError(
            f"--older-than {printable(text)!r} is no duration; write a whole number and s, m, h or d, such as 24h. "
            "Nothing was removed"
        )
    return int(match[1]) * _UNITS[match[2]]


def _say(planned: Planned, removed: Removed | None, older_than: str) -> None:
    name, plan = printable(innermost(planned.store).name), planned.plan
    items = plan.items if removed is None else removed.items
    nbytes = plan.nbytes if removed is None else removed.nbytes
    verb = "would go" if removed is None else "removed"
    for item in items:
        print(f"{name}: {verb}: {item.what} {printable(item.info.key, limit=600)}, {item.info.size} bytes")
    generations = sum(item.what == "generation" for item in items)
    print(
        f"{name}: {len(items)} objects, {generations} of them generations, {nbytes / 1e6:.1f} MB {verb}; "
        f"{plan.kept} generations stay"
    )
    if removed is not None and len(items) < len(plan.items):
        print(f"{name}: {len(plan.items) - len(items)} more had changed or were needed again, and stay")
    if plan.young:
        print(f"{name}: {plan.young} more are younger than {older_than}")
    if plan.ageless:
        print(f"{name}: {plan.ageless} more are of unknown age, and stay")
    if planned.unreadable:
        print(
            f"{name}: {len(planned.unreadable)} manifests can't be read, so {plan.held} objects that they may refer to "
            "stay; a newer release may have written them, else remove them by hand:"
        )
        for key in planned.unreadable[:_SHOWN]:
            print(f"    {printable(key, limit=600)}")
    if removed is None and items:
        print(f"{name}: nothing was changed; --delete does it")


def _row(planned: Planned, removed: Removed | None) -> dict[str, object]:
    plan = planned.plan
    return {
        "store": innermost(planned.store).name,
        "planned": [_object(item) for item in plan.items], "planned_bytes": plan.nbytes,
        "removed": None if removed is None else [_object(item) for item in removed.items],
        "removed_bytes": 0 if removed is None else removed.nbytes,
        "generations_kept": plan.kept, "too_young": plan.young, "age_unknown": plan.ageless,
        "held_back": plan.held, "unreadable_manifests": list(planned.unreadable),
    }  # fmt: skip


def _object(item: Item) -> dict[str, object]:
    return {"what": item.what, "key": item.info.key, "bytes": item.info.size}
