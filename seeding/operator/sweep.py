"""Looks through stores, and removes what `seeding.operator.retention` says they no longer need.

Manifests go first and what they referred to after them, so that a run that is cut off leaves objects that no reader
looks for, and the next run takes them. In between every manifest is read once more: what was published meanwhile keeps
its objects. One race is left: who relies on an old object that nothing referred to, without writing it again (a copy
to a store that has the payload already), between that look and the object's turn, publishes a manifest whose object is
gone. A reader takes that for a miss, and copying or publishing once more heals it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from warmseed.errors import ConfigurationError, printable
from warmseed.seeding.artifact import NAMESPACE, denial_key, object_key
from warmseed.seeding.bundle.frames import MAGIC
from warmseed.seeding.errors import ArtifactRefused
from warmseed.seeding.operator.retention import (
    Generation,
    Item,
    Judgement,
    PinFound,
    Plan,
    Retention,
    Standing,
    Survey,
    make_plan,
)
from warmseed.seeding.trust.dsse import ENVELOPE_BYTES
from warmseed.seeding.trust.judge import PAST, Trust
from warmseed.seeding.trust.manifest import MANIFEST_BYTES, Manifest, unverified_manifest, verify_manifest
from warmseed.seeding.trust.statements import unverified_pin, verify_denial, verify_pin
from warmseed.stores.base import ObjectInfo, PrunableStore, Store
from warmseed.stores.disk import DiskStore
from warmseed.stores.errors import InvalidKey, ObjectInvalid, StoreError, StoreRefused
from warmseed.stores.wrappers.base import innermost
from warmseed.stores.wrappers.verifying import sha256_of

__all__ = ["Planned", "Removed", "carry_out", "plan_stores"]

_LISTED = 500_000  # objects looked at in one store; some 300 bytes of memory each
_AT_ONCE = 16  # objects that are read or removed at the same time
_TABLE_BYTES = 16 << 20  # bytes of the largest object that is read to tell whose it is
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Planned:
    """What one store no longer needs."""

    store: Store
    plan: Plan
    unreadable: tuple[str, ...]  # keys where a manifest belongs that nobody can read


@dataclass(slots=True)
class Removed:
    """What was removed from one store."""

    items: list[Item] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of what was removed."""
        return sum(item.info.size for item in self.items)


async def plan_stores(
    stores: Sequence[Store], trust: Trust, retention: Retention, *, now: int
) -> tuple[tuple[Planned, ...], Judgement]:
    """What each of `stores` no longer needs at `now` (unix seconds), and what they say together; nothing is changed.

    A pin or a denial counts wherever it lies, so all stores are looked through before anything may go from one.

    Raises:
        ConfigurationError: when a store can't list what it holds.
        StoreError: when a store fails, or holds more than is looked at: what refers to what is then unknown.
    """
    for store in stores:
        _prunable(store)
    planned = []
    try:
        surveys = [await _survey(store, trust, now) for store in stores]
        judgement = _judge(surveys, trust, now)
        for store, survey in zip(stores, surveys, strict=True):
            plan = await _proven(store, _plan(survey, judgement, retention, trust, now))
            planned.append(Planned(store, plan, tuple(survey.unreadable)))
    except StoreError as error:
        raise StoreError(f"{printable(error, limit=500)}; nothing was removed from any store") from error
    return tuple(planned), judgement


async def carry_out(planned: Planned, judgement: Judgement, trust: Trust, retention: Retention, *, now: int) -> Removed:
    """Remove what was planned for one store, except what has changed since.

    Raises:
        StoreError: when the store fails; it says what was removed by then, and running it again completes it.
    """
    store, removed = planned.store, Removed()
    try:
        first = [item for item in planned.plan.items if item.what != "object"]
        await _each(first, lambda item: _remove(store, item, removed, trust, now))
        survey = await _survey(store, trust, now)
        sweep = _plan(survey, judgement, retention, trust, now, sweep=True)
        free = {item.info.key for item in sweep.items}
        objects = [item for item in planned.plan.items if item.what == "object" and item.info.key in free]
        await _each(objects, lambda item: _remove(store, item, removed, trust, now))
        gone = set(removed.items)
        removed.items = [item for item in planned.plan.items if item in gone]
    except StoreError as error:
        raise StoreError(
            f"{printable(error, limit=500)}; by then {len(removed.items)} of {len(planned.plan.items)} objects, "
            f"{removed.nbytes} bytes, were removed from {innermost(store).name}. No payload goes before its manifest: "
            "what is published there can still be adopted. Run it again to complete it"
        ) from error
    return removed


def _plan(
    survey: Survey, judgement: Judgement, retention: Retention, trust: Trust, now: int, *, sweep: bool = False
) -> Plan:
    life = trust.policy.longest_life + PAST
    return make_plan(survey, judgement, retention, life=life, now=now, sweep=sweep)


def _judge(surveys: Sequence[Survey], trust: Trust, now: int) -> Judgement:
    pinned: dict[str, frozenset[int] | None] = {}
    for survey in surveys:
        for folder, pin in survey.pins.items():
            known = pinned.get(folder, frozenset())
            pinned[folder] = None if known is None or pin.generations is None else known | pin.generations
    digests = {item.sha256 for survey in surveys for found in survey.generations.values() for item in found}
    return Judgement(pinned, frozenset(sha256 for sha256 in digests if trust.denied(sha256, now=now)))


def _prunable(store: Store) -> PrunableStore:
    back_end = innermost(store)
    if not isinstance(back_end, PrunableStore):
        raise ConfigurationError(
            f"{back_end.name} can't list what it holds, so nobody can tell what it no longer needs; leave it out. "
            "Nothing was removed"
        )
    return back_end


# Looking ------------------------------------------------------------------------------------------------


async def _survey(store: Store, trust: Trust, now: int) -> Survey:
    """Everything that `store` holds. Valid denials are made known to `trust`.

    Raises:
        StoreError: when the store fails, or holds more than is looked at.
    """
    objects: dict[str, ObjectInfo] = {}
    manifests: list[ObjectInfo] = []
    pins: list[ObjectInfo] = []
    denials: list[ObjectInfo] = []
    unreadable: list[str] = []
    listed = 0
    async for info in _prunable(store).list(f"{NAMESPACE}/"):
        listed += 1
        if listed > _LISTED:
            raise StoreError(
                f"{innermost(store).name} holds more than {_LISTED} objects; what lies beyond might refer to them"
            )
        match info.key.split("/")[1:]:
            case ["manifest", _, _, _, _, "head"]:
                pass  # a hint that costs nothing
            case ["manifest", _, _, _, _, "pin.json"]:
                pins.append(info)
            case ["manifest", _, _, _, _, name] if name.endswith(".json") and name[:-5].isdecimal():
                manifests.append(info)
            case ["manifest", *_]:
                if info.size:  # consoles of object stores mark folders with empty objects
                    unreadable.append(info.key)
            case ["denied", _]:
                denials.append(info)
            case _:
                objects[info.key] = info
    generations: dict[str, list[Generation]] = {}
    for info, envelope in await _read(store, manifests, MANIFEST_BYTES):
        try:
            generation = _generation(info, envelope, trust, now)
        except ArtifactRefused:
            unreadable.append(info.key)
            continue
        generations.setdefault(generation.folder, []).append(generation)
    for found in generations.values():
        found.sort(key=lambda item: item.number)
    disk = innermost(store)
    return Survey(
        objects,
        generations,
        pins={info.key.rpartition("/")[0]: _pin(info, data, trust, now) for info, data in await _read(store, pins)},
        denials=[info for info, data in await _read(store, denials) if _denial_over(info, data, trust, now)],
        protected=await disk.pinned() if isinstance(disk, DiskStore) else frozenset(),
        unreadable=sorted(unreadable),
    )


async def _read(
    store: Store, infos: Sequence[ObjectInfo], limit: int = ENVELOPE_BYTES
) -> list[tuple[ObjectInfo, bytes]]:
    """What lies at each of `infos`, without what vanished meanwhile; empty where it can't be had as it is."""

    async def get(info: ObjectInfo) -> bytes | None:
        try:
            return await store.get(info.key, limit=limit)
        except (ObjectInvalid, StoreRefused, InvalidKey):
            return b""

    found = await _each(infos, get)
    return [(info, data) for info, data in zip(infos, found, strict=True) if data is not None]


def _generation(info: ObjectInfo, envelope: bytes, trust: Trust, now: int) -> Generation:
    """What a manifest says and how it stands.

    Raises:
        ArtifactRefused: it is none, so what it refers to is unknown.
    """
    stated = unverified_manifest(envelope)
    payload, index = stated.stored or stated, stated.index
    needs = [(stated.store_key, payload.length)]
    if index is not None:
        needs.append((object_key(index.sha256), index.length))
    return Generation(
        info=info,
        number=int(info.key.rpartition("/")[2][:-5]),
        standing=_standing(info, stated, envelope, trust, now),
        sha256=stated.sha256,
        length=stated.length,
        run=stated.run,
        needs=tuple(needs),
        also=(object_key(stated.config_digest),),
        reference=f"{NAMESPACE}/{stated.kind}/{stated.config_hash}/{stated.filename}" if index is None else "",
    )


def _standing(info: ObjectInfo, stated: Manifest, envelope: bytes, trust: Trust, now: int) -> Standing:
    try:
        verify_manifest(envelope, trust.keyring)
        if stated.key(info.key.split("/")[4]).manifest_key(stated.generation) != info.key:
            return "foreign"
    except ArtifactRefused:
        return "foreign"
    if trust.over(stated.issued_at, stated.expires_at, now=now):
        return "over"
    try:
        trust.check_dates("manifest", stated.issued_at, stated.expires_at, now)
    except ArtifactRefused:
        return "doubtful"
    return "good"


def _pin(info: ObjectInfo, envelope: bytes, trust: Trust, now: int) -> PinFound:
    try:
        stated = unverified_pin(envelope)
    except ArtifactRefused:
        return PinFound(info, None, over=False)
    kept = frozenset({stated.generation, stated.previous})
    try:
        verify_pin(envelope, trust.keyring)
    except ArtifactRefused:
        return PinFound(info, kept, over=False)  # others of this store may follow it
    if stated.key.pin_key == info.key and trust.over(stated.issued_at, stated.expires_at, now=now):
        return PinFound(info, frozenset(), over=True)
    return PinFound(info, kept, over=False)


def _denial_over(info: ObjectInfo, envelope: bytes, trust: Trust, now: int) -> bool:
    """Whether a denial is ours and over for good; one that is valid is made known to `trust`."""
    try:
        denial = verify_denial(envelope, trust.keyring)
        if denial_key(denial.sha256) != info.key:
            return False  # no node looks for it there
        if trust.over(denial.issued_at, denial.expires_at, now=now):
            return True
        trust.deny(envelope, now=now)
    except ArtifactRefused:
        pass
    return False


# Proving and removing -----------------------------------------------------------------------------------


async def _proven(store: Store, plan: Plan) -> Plan:
    """`plan` without the objects that turn out to be somebody else's."""

    async def ours(item: Item) -> bool:
        if not item.proof:
            return True
        try:
            if item.proof == {"zstd"}:
                return await _begins(store, item.info) == MAGIC
            data = await store.get(item.info.key, limit=min(item.info.size, _TABLE_BYTES))
        except (ObjectInvalid, StoreRefused, InvalidKey):
            return False
        return data is not None and await sha256_of(data) in item.proof

    verdicts = await _each(plan.items, ours)
    return replace(plan, items=tuple(item for item, good in zip(plan.items, verdicts, strict=True) if good))


async def _begins(store: Store, info: ObjectInfo) -> bytes:
    """The first bytes of an object."""
    head = b""
    async with store.open(info.key, limit=info.size) as reader:
        if reader is not None:
            async for piece in reader:
                head += piece
                if len(head) >= len(MAGIC):
                    break
    return head[: len(MAGIC)]


async def _remove(store: Store, item: Item, removed: Removed, trust: Trust, now: int) -> None:
    """Remove one object, unless it was written again, or pinned, since it was listed.

    Raises:
        StoreError: when the store fails.
    """
    back_end = innermost(store)
    known = await back_end.stat(item.info.key)
    if known is None or known.size != item.info.size or _seconds(known) != _seconds(item.info):
        return
    if item.what == "generation" and await _pinned_now(back_end, item.info.key, trust, now):
        return
    if await _prunable(store).delete(item.info.key):
        removed.items.append(item)


def _seconds(info: ObjectInfo) -> int:
    """When it was written, in whole seconds: some object stores list a finer time than they state for one object."""
    return int(info.modified or 0)


async def _pinned_now(store: Store, key: str, trust: Trust, now: int) -> bool:
    """Whether a pin that may have come since names the generation at `key`."""
    folder, _, name = key.rpartition("/")
    info = ObjectInfo(f"{folder}/pin.json", 0)
    for _, envelope in await _read(store, [info]):
        pin = _pin(info, envelope, trust, now)
        return pin.generations is None or int(name[:-5]) in pin.generations
    return False


async def _each(items: Sequence[T], work: Callable[[T], Awaitable[R]]) -> list[R]:
    """`work` on each of `items`, a few at a time, in order; the first failure is raised when its few are through."""
    done: list[R] = []
    for at in range(0, len(items), _AT_ONCE):
        results = await asyncio.gather(*map(work, items[at : at + _AT_ONCE]), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
            done.append(result)
    return done
