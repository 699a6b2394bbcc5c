"""``warmseed inspect``: all there is to know of one published generation."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

import msgspec
import typer

from warmseed.blocking import run_blocking
from warmseed.daemon.cli.columns import print_columns
from warmseed.daemon.cli.fleet import CacheRoot, Fleet, SigningKey, Stores, TokenFile, TrustedKeys, open_fleet
from warmseed.errors import ConfigurationError, printable
from warmseed.seeding.environment import UNKNOWN, Environment
from warmseed.seeding.kinds.autotune.collect import collect
from warmseed.seeding.kinds.autotune.layout import KIND
from warmseed.seeding.kinds.autotune.table import METADATA_FIELDS
from warmseed.seeding.operator.contents import Contents
from warmseed.seeding.operator.eligibility import StatedDenial, StatedPin, Statement
from warmseed.seeding.operator.inspect import Held, Inspection, inspect_generation
from warmseed.seeding.operator.published import Wanted, find_published
from warmseed.seeding.trust.manifest import Manifest

__all__ = ["inspect"]

_LARGEST = 5  # files named of each cache; ``--files`` names all


def inspect(
    what: Annotated[
        str,
        typer.Argument(help="KIND/CONFIG-HASH[/RANK][@GENERATION]; the hash may be cut short, as `warmseed ls` does."),
    ],
    *,
    files: Annotated[bool, typer.Option("--files", help="Name every file of a bundle, not only the largest.")] = False,
    here: Annotated[
        bool, typer.Option("--here", help="Compare a table's environment with what FlashInfer says on this node.")
    ] = False,
    cache_root: CacheRoot = None,
    stores: Stores = "",
    token_file: TokenFile = None,
    signing_key: SigningKey = None,
    trusted_keys: TrustedKeys = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines for people.")] = False,
) -> None:
    """Show one published generation: who signed it, whether this node would adopt it, what is in it, where it lies."""
    wanted = Wanted.parse(what)
    if here and wanted.kind != KIND:
        raise ConfigurationError(f"--here can ask for the environment of {KIND} only; leave it out for {wanted.kind}")

    async def work() -> Inspection:
        async with open_fleet(
            cache_root, stores=stores, token_file=token_file, signing_key=signing_key, trusted_keys=trusted_keys
        ) as fleet:
            found = await find_published(fleet.chain, wanted)
            ours = await _environment(fleet) if here else None
            return await inspect_generation(
                fleet.chain, fleet.keyring, found, state=fleet.state, now=int(time.time()), ours=ours
            )

    found = asyncio.run(work())
    if not files:
        caches = tuple(replace(cache, files=cache.files[:_LARGEST]) for cache in found.contents.caches)
        found = replace(found, contents=replace(found.contents, caches=caches))
    if as_json:
        refusal = found.refusal
        print(json.dumps({"refused": refusal.reason if refusal else "", **msgspec.to_builtins(found)}))
    else:
        _show(found)


async def _environment(fleet: Fleet) -> Environment:
    known = (await run_blocking(collect, fleet.state)).metadata
    return Environment({**dict.fromkeys(METADATA_FIELDS, UNKNOWN), **known})


def _show(found: Inspection) -> None:
    key, manifest = found.key, found.manifest
    others = ", ".join(str(number) for number in found.generations[-_LARGEST:] if number != found.generation)
    _facts(
        ("kind", key.kind),
        ("configuration", key.config_hash),
        ("environment", key.environment_hash),
        ("rank", key.rank_label),
        ("generation", f"{found.generation} (also there: {others})" if others else str(found.generation)),
    )
    if manifest is not None:
        _show_manifest(found, manifest)
    _facts(("pin", _pin(found.pin, found.generation)), ("denial", _denial(found.denial)))
    _show_rules(found)
    if manifest is not None:
        _show_mapping("provenance", manifest.provenance)
        _show_mapping("configuration's inputs", found.factors or {})
        _show_mapping("environment", manifest.environment)
    _show_contents(found.contents)
    _show_tiers(found)


def _show_manifest(found: Inspection, manifest: Manifest) -> None:
    if not any(signature.verified for signature in found.signatures):
        print("NOT VERIFIED: what follows is what somebody wrote, see the rule `signature`")
    form = manifest.stored
    stored = f", {form.length} stored ({form.encoding})" if form is not None else ""
    device = "any" if manifest.device_index < 0 else str(manifest.device_index)
    _facts(
        ("run", manifest.run or "-"),
        ("device index", device),
        ("payload", f"{manifest.filename}, SHA-256 {manifest.sha256}"),
        ("bytes", f"{manifest.length}{stored}"),
        ("publisher", manifest.publisher),
    )
    for signature in found.signatures:
        known = signature.name or "a key that is not trusted here"
        _facts(("signed by", f"{signature.keyid} {known}{'' if signature.verified else ', not verified'}"))
    _facts(("issued", _when(manifest.issued_at)), ("expires", _when(manifest.expires_at)))


def _pin(pin: StatedPin | None, generation: int) -> str:
    if pin is None:
        return "none; the newest generation is used"
    if not pin.signers:
        return f"ignored: {pin.ignored}"
    which = "this generation" if pin.generation == generation else f"generation {pin.generation}, not this one"
    before = f"generation {pin.previous}" if pin.previous else "nothing"
    said = f"{which}, by {_said(pin)}; pinned before: {before}"
    return f"ignored: {pin.ignored}; it named {said}" if pin.ignored else said


def _denial(denial: StatedDenial | None) -> str:
    if denial is None:
        return "none"
    if not denial.signers:
        return f"ignored: {denial.ignored}"
    said = f"{denial.reason!r}, by {_said(denial)}"
    return f"ignored: {denial.ignored}; it said {said}" if denial.ignored else said


def _said(statement: Statement) -> str:
    until = f"{_when(statement.issued_at)} to {_when(statement.expires_at)}"
    return f"{statement.publisher} (key {', '.join(statement.signers)}), {until}"


def _show_rules(found: Inspection) -> None:
    refusal = found.refusal
    if refusal is not None:
        verdict = f"no: {refusal.reason}: {refusal.why}"
    else:
        left = [rule.name for rule in found.rules if rule.outcome == "open"]
        verdict = f"yes, as far as can be told here; not judged: {', '.join(left)}" if left else "yes"
    _facts(("would adopt", verdict))
    rows = [
        (rule.name, rule.outcome, f"{rule.reason}: {rule.why}" if rule.reason else rule.why) for rule in found.rules
    ]
    print_columns(rows, indent="  ", limit=500)


def _show_mapping(title: str, fields: Mapping[str, str]) -> None:
    if fields:
        print(f"{title}:")
        print_columns(sorted(fields.items()), indent="  ", limit=1024)


def _show_contents(contents: Contents) -> None:
    if contents.unread:
        _facts(("contents", f"not shown: {contents.unread}"))
    if contents.operations:
        print(f"contents: {sum(contents.operations.values())} entries")
        print_columns([(name, str(count)) for name, count in contents.operations.items()], indent="  ", limit=128)
    for cache in contents.caches:
        print(f"contents: {printable(cache.name)}, {cache.count} files, {cache.nbytes} bytes, captured at")
        print(f"  {printable(cache.root, limit=1024)}")
        print_columns([(str(file.size), file.relative) for file in cache.files], indent="  ", limit=1024)
        if cache.count > len(cache.files):
            print(f"  and {cache.count - len(cache.files)} smaller ones; --files names all")


def _show_tiers(found: Inspection) -> None:
    """One line for each store, so that what one of them lost stands beside what the others have."""
    keys = {held.what: held.key for tier in found.tiers for held in tier.objects}
    print("stores:")
    rows = [("STORE", *(what.upper() for what in keys))]
    rows += [(tier.name, *(_state(held) for held in tier.objects)) for tier in found.tiers]
    print_columns(rows, indent="  ")
    for tier in found.tiers:
        for why in dict.fromkeys([tier.unlisted, *(held.why for held in tier.objects)]):
            if why:
                print(f"  {printable(why, limit=500)}")
    print("keys:")
    print_columns(list(keys.items()), indent="  ", limit=1024)


def _state(held: Held) -> str:
    if held.size is None:
        return held.state
    size = f"{held.size}" if held.expected in (None, held.size) else f"{held.size} of {held.expected}"
    return f"{held.state}, {size} bytes"


def _facts(*facts: tuple[str, str]) -> None:
    for name, text in facts:
        print(f"{name:<14} {printable(text, limit=1500)}")


def _when(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
