"""Which generation a fleet uses: pins, the way back from one, and denials.

A pin names one generation of one rank's artifact; ranks of a group are pinned together, by the run they share.
Pins lie beside the manifests and are signed like them. A pin remembers what was pinned before it, so that one
command takes a fleet back; "nothing was pinned" is remembered, too.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from warmseed.errors import printable
from warmseed.seeding.artifact import NAMESPACE, ArtifactKey, check_digest, denial_key, parse_manifest_key
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.trust.dsse import ENVELOPE_BYTES
from warmseed.seeding.trust.judge import DAY, PAST
from warmseed.seeding.trust.keys import Keyring, PublisherKey
from warmseed.seeding.trust.manifest import MANIFEST_BYTES, Manifest, verify_manifest
from warmseed.seeding.trust.statements import Denial, Pin, sign_denial, sign_pin, verify_pin
from warmseed.stores.base import PrunableStore
from warmseed.stores.chain import Chain
from warmseed.stores.errors import StoreError
from warmseed.stores.wrappers.base import innermost

__all__ = [
    "Listed",
    "Pinned",
    "allow",
    "deny",
    "keep_newest",
    "list_artifacts",
    "pin_generation",
    "pin_run",
    "roll_back",
]

_log = logging.getLogger(__name__)
_LIFE = 30 * DAY  # seconds a pin or a denial is believed, see `trust.Policy.longest_life`
_LISTED = 100_000  # objects looked at in one store


@dataclass(frozen=True, slots=True)
class Listed:
    """One published generation, verified."""

    key: ArtifactKey
    manifest: Manifest
    envelope: bytes  # the manifest as signed


@dataclass(frozen=True, slots=True)
class Pinned:
    """What a command did to one rank."""

    key: ArtifactKey
    generation: int  # 0: nothing is pinned any more, the newest is used
    sha256: str
    before: int  # the generation pinned before; 0 for none


async def list_artifacts(chain: Chain, keyring: Keyring, *, prefix: str = "") -> AsyncIterator[Listed]:
    """Every generation that a store of `chain` can list and `keyring` verifies, oldest first within a rank.

    `prefix` narrows it down: ``KIND`` or ``KIND/CONFIG-HASH`` or more of the path.

    Raises:
        StoreError: when a store that can list fails.
    """
    seen: set[str] = set()
    for store in chain.all_tiers():
        if not isinstance(listing := innermost(store), PrunableStore):
            continue
        for key, generation in sorted(await _named(listing, prefix), key=_by_generation):
            name = key.manifest_key(generation)
            if name in seen:
                continue
            seen.add(name)
            envelope = await store.get(name, limit=MANIFEST_BYTES)
            if envelope is not None and (found := _verified(key, generation, envelope, keyring)) is not None:
                yield found


def keep_newest(newest: dict[ArtifactKey, Listed], found: Listed) -> None:
    """Have `newest` hold the highest generation of each artifact; tiers list theirs one after the other."""
    known = newest.get(found.key)
    if known is None or known.manifest.generation < found.manifest.generation:
        newest[found.key] = found


async def _named(store: PrunableStore, prefix: str) -> list[tuple[ArtifactKey, int]]:
    found: list[tuple[ArtifactKey, int]] = []
    count = 0
    async for info in store.list(f"{NAMESPACE}/manifest/{prefix}"):
        count += 1
        if count > _LISTED:
            _log.warning("the listing of %s ends after %d objects", prefix or "everything", _LISTED)
            break
        if (named := parse_manifest_key(info.key)) is not None:
            found.append(named)
    return found


def _by_generation(named: tuple[ArtifactKey, int]) -> tuple[str, int]:
    return named[0].manifest_folder, named[1]


def _verified(key: ArtifactKey, generation: int, envelope: bytes, keyring: Keyring) -> Listed | None:
    try:
        manifest, _ = verify_manifest(envelope, keyring)
        if (manifest.key(key.environment_hash), manifest.generation) != (key, generation):
            raise ArtifactRefused("key", "it describes another artifact")
    except ArtifactRefused as error:
        _log.info("%s is not listed: %s", key.manifest_key(generation), printable(error))
        return None
    return Listed(key, manifest, envelope)


async def pin_generation(
    chain: Chain, keys: Sequence[PublisherKey], keyring: Keyring, wanted: Listed, *, publisher: str, now: int
) -> Pinned:
    """Make `wanted` the generation that the fleet uses for its rank.

    Raises:
        StoreError: when a store does not take the pin.
        ValueError: without a key to sign with.
    """
    return await _put_pin(
        chain, keys, keyring, wanted.key, wanted.manifest.generation, wanted.manifest.sha256, publisher, now
    )


async def pin_run(
    chain: Chain,
    keys: Sequence[PublisherKey],
    keyring: Keyring,
    run: str,
    *,
    kind: str,
    publisher: str,
    now: int,
) -> tuple[Pinned, ...]:
    """Pin every rank's generation of `run`; all of them are found before the first is pinned.

    Raises:
        ArtifactRefused: ``missing``: no generation of that run can be listed.
        StoreError: when a store fails; ranks pinned by then stay pinned, and running it again completes it.
    """
    newest: dict[ArtifactKey, Listed] = {}
    async for found in list_artifacts(chain, keyring, prefix=f"{kind}/"):
        if found.manifest.run == run:
            keep_newest(newest, found)
    if not newest:
        raise ArtifactRefused("missing", f"no store lists a generation of run {printable(run)}; nothing was pinned")
    return tuple(
        [await pin_generation(chain, keys, keyring, wanted, publisher=publisher, now=now) for wanted in newest.values()]
    )


async def roll_back(
    chain: Chain, keys: Sequence[PublisherKey], keyring: Keyring, key: ArtifactKey, *, publisher: str, now: int
) -> Pinned:
    """Take back the pin of `key`: what was pinned before is pinned again, or nothing is.

    Raises:
        ArtifactRefused: ``missing``: nothing is pinned.
        StoreError: when a store fails.
    """
    current = await _pin_of(chain, keyring, key)
    if current is None:
        raise ArtifactRefused("missing", f"nothing is pinned for {key.manifest_folder}; there is no way back")
    generation = current.previous
    # Going back to "nothing pinned" is said by a pin that is over: a deleted one might live on in some node's disk.
    return await _put_pin(
        chain,
        keys,
        keyring,
        key,
        generation or current.generation,
        current.previous_sha256 if generation else current.sha256,
        publisher,
        now,
        over=not generation,
    )


async def deny(
    chain: Chain,
    keys: Sequence[PublisherKey],
    *,
    kind: str,
    sha256: str,
    reason: str,
    publisher: str,
    now: int,
) -> Denial:
    """Tell the fleet not to install, and at the next start not to keep, the payload `sha256`.

    Raises:
        ArtifactRefused: ``malformed``: that is no digest.
        StoreError: when a store fails.
    """
    return await _put_denial(chain, keys, kind, sha256, reason, publisher, now, now + _LIFE)


async def allow(
    chain: Chain, keys: Sequence[PublisherKey], *, kind: str, sha256: str, publisher: str, now: int
) -> Denial:
    """Take back the fleet's denial of the payload `sha256`, from the next start on: one that is over replaces it.

    Raises:
        ArtifactRefused: ``malformed``: that is no digest.
        StoreError: when a store fails.
    """
    return await _put_denial(chain, keys, kind, sha256, "allowed again", publisher, now - 2 * PAST, now - PAST)


async def _put_denial(
    chain: Chain,
    keys: Sequence[PublisherKey],
    kind: str,
    sha256: str,
    reason: str,
    publisher: str,
    issued_at: int,
    expires_at: int,
) -> Denial:
    denial = Denial(
        schema=1,
        kind=kind,
        sha256=check_digest(sha256),
        reason=printable(reason, limit=500),
        issued_at=issued_at,
        expires_at=expires_at,
        publisher=publisher,
    )
    await _put(chain, denial_key(denial.sha256), sign_denial(denial, keys))
    return denial


async def _pin_of(chain: Chain, keyring: Keyring, key: ArtifactKey) -> Pin | None:
    envelope = await chain.get(key.pin_key, limit=ENVELOPE_BYTES, fresh=True)
    if envelope is None:
        return None
    try:
        found = verify_pin(envelope, keyring)
    except ArtifactRefused as error:
        _log.warning("the pin of %s counts for nothing: %s", key.manifest_folder, error)
        return None
    return found if found.key == key else None


async def _put_pin(
    chain: Chain,
    keys: Sequence[PublisherKey],
    keyring: Keyring,
    key: ArtifactKey,
    generation: int,
    sha256: str,
    publisher: str,
    now: int,
    *,
    over: bool = False,
) -> Pinned:
    current = await _pin_of(chain, keyring, key)
    if current is not None and current.expires_at <= now:
        current = None
    before, before_sha256 = (0, "") if current is None else (current.generation, current.sha256)
    if current is not None and (before, before_sha256) == (generation, sha256) and not over:
        before, before_sha256 = current.previous, current.previous_sha256  # pinned again, to live on
    issued = now - 2 * PAST if over else now
    pin = Pin(
        schema=1,
        key=key,
        generation=generation,
        sha256=sha256,
        previous=before,
        previous_sha256=before_sha256,
        issued_at=issued,
        expires_at=now - PAST if over else now + _LIFE,
        publisher=publisher,
    )
    await _put(chain, key.pin_key, sign_pin(pin, keys))
    return Pinned(key, 0 if over else generation, "" if over else sha256, before)


async def _put(chain: Chain, key: str, envelope: bytes) -> None:
    """Write to every tier now: what an operator was told is done must be where every node looks."""
    failed: list[str] = []
    for store in chain.all_tiers():
        try:
            await store.put(key, envelope)
        except StoreError as error:
            failed.append(str(error))
    if failed:
        raise StoreError(f"{key} is not in every store, so not every node will see it: {'; '.join(failed)}")
