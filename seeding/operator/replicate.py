"""Copies published generations from one chain of stores to another store, as they were signed.

Objects are written in a publisher's order: the payload, what describes it, the manifest, the hint. A copy that is cut
off leaves nothing that a reader finds, and running it again completes it. Nothing signed is ever replaced: a store that
has another generation of the same number keeps it.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from warmseed.blocking import run_blocking
from warmseed.errors import printable
from warmseed.seeding.artifact import FACTORS_BYTES, ArtifactKey, denial_key, object_key
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.operator.golden import Listed, keep_newest, list_artifacts
from warmseed.seeding.origins.catalog import HEAD_BYTES
from warmseed.seeding.origins.payload import prepare_staging, remove_staged
from warmseed.seeding.trust.dsse import ENVELOPE_BYTES
from warmseed.seeding.trust.judge import Trust
from warmseed.seeding.trust.manifest import MANIFEST_BYTES, verify_manifest
from warmseed.seeding.trust.statements import verify_pin
from warmseed.stores.base import Body, Store
from warmseed.stores.chain import Chain
from warmseed.stores.errors import InvalidKey, StoreError
from warmseed.stores.wrappers.verifying import sha256_of

__all__ = ["Outcome", "Replica", "current_generations", "replicate"]

# copied   the target has it now
# present  the target had all of it
# conflict the target has another generation of this number
# denied   the fleet forbids its payload
# missing  the source no longer has all of its objects
# failed   a store did not do what it was asked
Outcome = Literal["copied", "present", "conflict", "denied", "missing", "failed"]


@dataclass(frozen=True, slots=True)
class Replica:
    """What became of one generation at one target."""

    listed: Listed
    target: str  # the store's name
    outcome: Outcome
    nbytes: int = 0  # bytes written
    why: str = ""  # of an outcome that is neither ``copied`` nor ``present``


async def current_generations(source: Chain, trust: Trust, *, prefix: str = "", now: int) -> tuple[Listed, ...]:
    """Of each artifact that `source` lists, what a node would use: the newest generation, and the one that is pinned.

    What `trust` takes for expired at `now` (unix seconds) is left out. `prefix` as for `list_artifacts`.

    Raises:
        StoreError: when a store that can list fails.
    """
    newest: dict[ArtifactKey, Listed] = {}
    every: dict[tuple[ArtifactKey, int], Listed] = {}
    async for found in list_artifacts(source, trust.keyring, prefix=prefix):
        try:
            trust.check_dates("manifest", found.manifest.issued_at, found.manifest.expires_at, now)
        except ArtifactRefused:
            continue
        every[found.key, found.manifest.generation] = found
        keep_newest(newest, found)
    chosen: list[Listed] = []
    for key, latest in newest.items():
        pinned = every.get((key, await _pinned(source, key, trust, now) or 0))
        if pinned is not None and pinned is not latest:
            chosen.append(pinned)
        chosen.append(latest)
    return tuple(chosen)


async def replicate(
    listed: Listed, source: Chain, targets: Sequence[Store], trust: Trust, *, staging: Path, now: int
) -> tuple[Replica, ...]:
    """Have each of `targets` hold one generation of `source`, and its pin; what became of it at each.

    Objects are fetched once, checked against the manifest's digests, and kept in `staging` meanwhile.

    Raises:
        OSError: when `staging` can't be written.
    """
    if (why := await _denied(listed, source, targets, trust, now)) is not None:
        return tuple(Replica(listed, target.name, "denied", why=why) for target in targets)
    await run_blocking(prepare_staging, staging)
    objects: list[_Object] = []
    try:
        try:
            objects = await _gather(listed, source, staging)
        except ArtifactRefused as error:
            return tuple(Replica(listed, target.name, "missing", why=printable(error)) for target in targets)
        pinned = await _pinned(source, listed.key, trust, now) is not None
        done = []
        for target in targets:
            try:
                replica = await _copy(listed, objects, target, trust)
                if pinned and replica.outcome in ("copied", "present"):
                    await _copy_pin(listed.key, source, target, trust)
            except StoreError as error:
                replica = Replica(listed, target.name, "failed", why=printable(error))
            done.append(replica)
        return tuple(done)
    finally:
        await run_blocking(remove_staged, [item.path for item in objects if item.path is not None])


@dataclass(frozen=True, slots=True)
class _Object:
    """One object of a generation, verified, on its way."""

    key: str
    body: Body
    path: Path | None = None  # its staging file, if it has one


async def _gather(listed: Listed, source: Chain, staging: Path) -> list[_Object]:
    """Everything of one generation, the manifest last.

    Raises:
        ArtifactRefused: ``missing``: an object that it can't do without is not to be had.
    """
    manifest, key = listed.manifest, listed.key
    form = manifest.stored or manifest
    path = staging / f"object.{secrets.token_hex(8)}"
    if await source.fetch_verified(manifest.store_key, sha256=form.sha256, length=form.length, into=path) is None:
        raise ArtifactRefused("missing", f"its payload is not at {printable(manifest.store_key)} as it was signed")
    payload = await run_blocking(Body.file, path)
    objects = [_Object(manifest.store_key, payload, path)]
    try:
        if manifest.index is None and await _at_reference(listed, source):
            objects.append(_Object(key.reference_key(manifest.filename), payload))
        factors = await source.get(object_key(manifest.config_digest), limit=FACTORS_BYTES)
        if factors is not None and await sha256_of(factors) == manifest.config_digest:
            objects.append(_Object(object_key(manifest.config_digest), Body.of(factors)))
        if manifest.index is not None:
            stored = object_key(manifest.index.sha256)
            index = await source.get_verified(stored, sha256=manifest.index.sha256, length=manifest.index.length)
            if index is None:
                raise ArtifactRefused("missing", f"its file index is not at {stored} as it was signed")
            objects.append(_Object(stored, Body.of(index)))
        objects.append(_Object(key.manifest_key(manifest.generation), Body.of(listed.envelope)))
    except BaseException:
        await run_blocking(remove_staged, [path])
        raise
    return objects


async def _at_reference(listed: Listed, source: Chain) -> bool:
    """Whether the same bytes also lie where stock vLLM looks for a table of this name."""
    manifest = listed.manifest
    try:
        data = await source.get(listed.key.reference_key(manifest.filename), limit=manifest.length)
    except InvalidKey:
        return False
    return data is not None and await sha256_of(data) == manifest.sha256


async def _copy(listed: Listed, objects: Sequence[_Object], target: Store, trust: Trust) -> Replica:
    """Write what `target` lacks of one generation, in order.

    Raises:
        StoreError: when the target fails.
    """
    *parts, manifest = objects
    there = await target.get(manifest.key, limit=MANIFEST_BYTES)
    if there is not None and not _equivalent(there, listed, trust):
        why = f"it has another generation {listed.manifest.generation} already; nothing was replaced"
        return Replica(listed, target.name, "conflict", why=why)
    written = 0
    for item in parts if there is not None else objects:
        known = await target.stat(item.key)
        if known is None or known.size != item.body.size:
            await target.put(item.key, item.body)
            written += item.body.size
    hint = await target.get(listed.key.head_key, limit=HEAD_BYTES)
    if hint is None or not hint.isdigit() or int(hint) < listed.manifest.generation:
        await target.put(listed.key.head_key, str(listed.manifest.generation).encode())
    return Replica(listed, target.name, "copied" if written else "present", written)


def _equivalent(envelope: bytes, listed: Listed, trust: Trust) -> bool:
    """Whether a manifest of the same number describes the same payload: two nodes may have published it at once."""
    try:
        manifest, _ = verify_manifest(envelope, trust.keyring)
    except ArtifactRefused:
        return False
    return (manifest.sha256, manifest.stored) == (listed.manifest.sha256, listed.manifest.stored)


# What the fleet has said of a generation -----------------------------------------------------------------


async def _denied(listed: Listed, source: Chain, targets: Sequence[Store], trust: Trust, now: int) -> str | None:
    """Why the payload must not be used, as the source or a target knows it, or `None`."""
    key = denial_key(listed.manifest.sha256)
    envelopes = [await source.get(key, limit=ENVELOPE_BYTES, fresh=True)]
    for target in targets:
        with contextlib.suppress(StoreError):  # a target that can't be asked will not take the copy either
            envelopes.append(await target.get(key, limit=ENVELOPE_BYTES))
    for envelope in envelopes:
        if envelope is not None:
            with contextlib.suppress(ArtifactRefused):  # signed by a stranger, or over
                trust.deny(envelope, now=now)
    return trust.denied(listed.manifest.sha256, now=now)


async def _pinned(source: Chain, key: ArtifactKey, trust: Trust, now: int) -> int | None:
    """The generation of `key` that the fleet's pin names, if it is valid."""
    pin = await source.get(key.pin_key, limit=ENVELOPE_BYTES, fresh=True)
    return None if pin is None else trust.pinned(pin, key, now=now)


async def _copy_pin(key: ArtifactKey, source: Chain, target: Store, trust: Trust) -> None:
    """Pin at `target` what is pinned at `source`, unless something newer was said there."""
    pin = await source.get(key.pin_key, limit=ENVELOPE_BYTES, fresh=True)
    if pin is None:
        return
    there = await target.get(key.pin_key, limit=ENVELOPE_BYTES)
    if there is not None:
        with contextlib.suppress(ArtifactRefused):
            if verify_pin(there, trust.keyring).issued_at >= verify_pin(pin, trust.keyring).issued_at:
                return
    await target.put(key.pin_key, pin)
