"""What there is to know of one published generation: who signed it, who believes it, what is in it, where it lies.

Looks only: stores are read past the disk's cache, so that nothing is filled, replaced or dropped, and of the objects
themselves only small ones are read, by the digests of a manifest whose signature holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from warmseed.seeding.artifact import ArtifactKey, denial_key, object_key
from warmseed.seeding.environment import Environment
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.operator.contents import Contents, read_contents, read_factors
from warmseed.seeding.operator.eligibility import Examiner, Rule, StatedDenial, StatedPin, read_denial, read_pin
from warmseed.seeding.operator.published import Found
from warmseed.seeding.trust import canonical
from warmseed.seeding.trust.dsse import ENVELOPE_BYTES, read_unverified
from warmseed.seeding.trust.keys import Keyring
from warmseed.seeding.trust.manifest import MANIFEST_BYTES, MANIFEST_TYPE, Manifest, verify_manifest
from warmseed.stores.base import Store
from warmseed.stores.chain import Chain
from warmseed.stores.errors import StoreError, StoreUnavailable
from warmseed.stores.wrappers.base import innermost

__all__ = ["Held", "Inspection", "Signature", "Tier", "inspect_generation"]


@dataclass(frozen=True, slots=True)
class Signature:
    """One key that a manifest names as its signer."""

    keyid: str
    name: str  # as the trusted keys call it; empty: not trusted here
    verified: bool


@dataclass(frozen=True, slots=True)
class Held:
    """One object of the generation in one store."""

    what: str  # manifest, payload, index or factors
    key: str
    state: Literal["here", "missing", "different", "failed"]
    size: int | None = None  # bytes that the store states
    expected: int | None = None  # bytes that the manifest states
    why: str = ""


@dataclass(frozen=True, slots=True)
class Tier:
    """One store, and what it has of the generation."""

    name: str
    objects: tuple[Held, ...]
    unlisted: str = ""  # why it did not say which generations it holds


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything that is known of one generation."""

    key: ArtifactKey
    generation: int
    generations: tuple[int, ...]  # all that stores list of this artifact
    manifest: Manifest | None  # `None`: no store gave one that can be read
    signatures: tuple[Signature, ...]
    rules: tuple[Rule, ...]
    pin: StatedPin | None
    denial: StatedDenial | None
    factors: Mapping[str, str] | None  # every input of the configuration, where a store has them
    contents: Contents
    tiers: tuple[Tier, ...]

    @property
    def refusal(self) -> Rule | None:
        """The first rule by which this node would not adopt the generation, or `None`."""
        return next((rule for rule in self.rules if rule.outcome == "refuses"), None)


async def inspect_generation(
    chain: Chain, keyring: Keyring, found: Found, *, state: Path, now: int, ours: Environment | None = None
) -> Inspection:
    """Look at `found` in every tier of `chain`, and judge it as this node would at `now` (unix seconds).

    `state` is warmseed's own folder on this node, of which only the records of `Trust` and `Probation` are read;
    `ours` this node's environment, where it is known. A tier that fails is reported as failed.

    Raises:
        OSError: when this node's own records can't be read.
    """
    name = found.key.manifest_key(found.generation)
    tiers = chain.all_tiers()
    answers = await asyncio.gather(*(_manifest(tier, name) for tier in tiers))
    envelopes = [answer for answer in answers if isinstance(answer, bytes)]
    envelope = next((item for item in envelopes if _verifies(item, keyring)), envelopes[0] if envelopes else b"")
    manifest, keyids = _look(envelope)
    verified = _verifies(envelope, keyring)
    pin = await _first(chain, found.key.pin_key)
    denial = None if manifest is None else await _first(chain, denial_key(manifest.sha256))
    examiner = await Examiner.at(state, keyring, ours, now)
    # What a stranger signed is shown, but nothing is fetched or parsed on its word.
    factors, contents = None, Contents(unread="the manifest is not verified, so nothing is read on its word")
    if manifest is not None and verified:
        factors, contents = await read_factors(chain, manifest), await read_contents(chain, manifest)
    held = await asyncio.gather(
        *(_held(tier, name, envelope, manifest, answer) for tier, answer in zip(tiers, answers, strict=True))
    )
    reports = tuple(
        Tier(store, objects, found.unlisted.get(store, ""))
        for store, objects in zip((innermost(tier).name for tier in tiers), held, strict=True)
    )
    return Inspection(
        key=found.key,
        generation=found.generation,
        generations=found.generations,
        manifest=manifest,
        signatures=_signatures(keyids, keyring, verified=verified),
        rules=await examiner.rules(envelope, found, pin, denial, _fetchable(reports)),
        pin=None if pin is None else read_pin(pin, found.key, examiner.trust, now),
        denial=None if denial is None or manifest is None else read_denial(denial, manifest, examiner.trust, now),
        factors=factors,
        contents=contents,
        tiers=reports,
    )


# The manifest ---------------------------------------------------------------------------------------------


async def _manifest(tier: Store, name: str) -> bytes | StoreError | None:
    try:
        return await tier.get(name, limit=MANIFEST_BYTES)
    except StoreError as error:
        return error


def _verifies(envelope: bytes, keyring: Keyring) -> bool:
    try:
        verify_manifest(envelope, keyring)
    except ArtifactRefused:
        return False
    return True


def _look(envelope: bytes) -> tuple[Manifest | None, tuple[str, ...]]:
    """What an envelope says and names as its signers, verified or not."""
    try:
        payload, keyids = read_unverified(envelope, MANIFEST_TYPE)
    except ArtifactRefused:
        return None, ()
    try:
        return canonical.decode(payload, Manifest, limit=MANIFEST_BYTES), keyids
    except ArtifactRefused:
        return None, keyids


def _signatures(keyids: Sequence[str], keyring: Keyring, *, verified: bool) -> tuple[Signature, ...]:
    # An envelope with one bad signature of a trusted key is refused whole, so the trusted ones share one fate.
    known = [(keyid, keyring.find(keyid)) for keyid in dict.fromkeys(keyids)]
    return tuple(Signature(keyid, key.name if key else "", verified and key is not None) for keyid, key in known)


# What the fleet has said of it ----------------------------------------------------------------------------


async def _first(chain: Chain, key: str) -> bytes | None:
    """The answer that a node goes by: shared stores before the disk, since statements change."""
    async for answer in chain.answers(key, limit=ENVELOPE_BYTES, fresh=True):
        return answer.data
    return None


# Where it lies --------------------------------------------------------------------------------------------


async def _held(
    tier: Store, name: str, envelope: bytes, manifest: Manifest | None, answer: bytes | StoreError | None
) -> tuple[Held, ...]:
    """What one store has, asked one object after the other: what is down is not asked again."""
    if isinstance(answer, StoreError):
        held = [Held("manifest", name, "failed", why=str(answer))]
    elif answer is None:
        held = [Held("manifest", name, "missing", expected=len(envelope))]
    elif answer != envelope:
        why = f"{innermost(tier).name}: another manifest of this number lies there"
        held = [Held("manifest", name, "different", len(answer), len(envelope), why)]
    else:
        held = [Held("manifest", name, "here", len(answer), len(envelope))]
    down = str(answer) if isinstance(answer, StoreUnavailable) else ""
    for what, key, expected in _objects(manifest):
        if down:
            held.append(Held(what, key, "failed", expected=expected, why=down))
            continue
        try:
            info = await tier.stat(key)
        except StoreError as error:
            held.append(Held(what, key, "failed", expected=expected, why=str(error)))
            down = str(error) if isinstance(error, StoreUnavailable) else ""
            continue
        if info is None:
            held.append(Held(what, key, "missing", expected=expected))
        elif expected not in (None, info.size):
            held.append(Held(what, key, "different", info.size, expected))
        else:
            held.append(Held(what, key, "here", info.size, expected))
    return tuple(held)


def _objects(manifest: Manifest | None) -> list[tuple[str, str, int | None]]:
    """What, its store key and its bytes, where those are known, of every object that a manifest names."""
    if manifest is None:
        return []
    found: list[tuple[str, str, int | None]] = [
        ("payload", manifest.store_key, (manifest.stored or manifest).length),
        ("factors", object_key(manifest.config_digest), None),
    ]
    if manifest.index is not None:
        found.insert(1, ("index", object_key(manifest.index.sha256), manifest.index.length))
    return found


def _fetchable(tiers: Sequence[Tier]) -> Rule:
    """Whether what an installation needs is to be had somewhere."""
    for what in ("payload", "index"):
        held = [item for tier in tiers for item in tier.objects if item.what == what]
        if not held or any(item.state == "here" for item in held):
            continue
        if any(item.state == "failed" for item in held):
            return Rule("objects", "open", why=f"no store that could be asked has the {what}")
        return Rule("objects", "refuses", "missing", f"no store has the {what} in its signed size; a peer may have it")
    return Rule("objects", "holds")
