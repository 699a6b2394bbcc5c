"""Which generations and objects a store no longer needs. Pure: what a store holds in, what may go out.

Of each artifact the newest generations stay, what is pinned, what ranks of one group adopt together, and whatever is
not certainly ours to judge. Objects stay as long as any manifest refers to them that somebody could still believe,
whoever signed it. Three things keep readers, who find generations without listing, from noticing anything
(`origins.catalog`): the highest number of an artifact stays, because the next publication counts on from it; no gap
between numbers becomes wider than a reader's window; and a manifest that stays keeps its objects until it is over.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from warmseed.seeding.artifact import NAMESPACE
from warmseed.seeding.origins.catalog import WINDOW
from warmseed.stores.base import ObjectInfo

__all__ = ["Generation", "Item", "Judgement", "PinFound", "Plan", "Retention", "Standing", "Survey", "make_plan"]

_SHARED = re.compile(rf"{NAMESPACE}/(?:object/[0-9a-f]{{64}}|compile_cache/[0-9a-f]{{64}}/bundle\.tar)")
# good      verified, in its place, and within its life
# doubtful  verified, but neither valid now nor certainly over: a clock may be wrong
# over      verified, and no node of the fleet can believe it any more
# foreign   signed by somebody else, or about another artifact: never touched
Standing = Literal["good", "doubtful", "over", "foreign"]


@dataclass(frozen=True, slots=True)
class Retention:
    """What an operator wants to keep."""

    keep: int = 3  # believed generations of each artifact; at least 1
    older_than: float = 24 * 3600.0  # seconds since it was written, below which nothing is touched
    prefix: str = ""  # only generations of this KIND, or KIND/CONFIG-HASH; what nothing refers to goes everywhere


@dataclass(frozen=True, slots=True)
class Generation:
    """One manifest in a store, and what must be there for as long as it is believed."""

    info: ObjectInfo
    number: int
    standing: Standing
    sha256: str  # of the payload, uncompressed
    length: int  # bytes of the payload, uncompressed
    run: str
    needs: tuple[tuple[str, int], ...]  # store keys and sizes of what a node can't adopt it without
    also: tuple[str, ...]  # store keys of what merely describes it
    reference: str  # store key where the same payload may lie for stock vLLM; empty: nowhere

    @property
    def folder(self) -> str:
        """Where its artifact's manifests lie."""
        return self.info.key.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class PinFound:
    """A pin in a store, and the generations that it keeps."""

    info: ObjectInfo
    generations: frozenset[int] | None  # also the way back from it; `None`: it can't be read, so all of them
    over: bool  # verified, and no node follows it any more


@dataclass(frozen=True, slots=True)
class Survey:
    """What one store holds."""

    objects: Mapping[str, ObjectInfo]  # all that is neither a manifest, a hint, a pin nor a denial
    generations: Mapping[str, Sequence[Generation]]  # by their folder, in order
    pins: Mapping[str, PinFound]  # by their folder
    denials: Sequence[ObjectInfo]  # those that are over
    protected: Collection[str]  # keys that the store itself is told to keep
    unreadable: Sequence[str]  # keys where a manifest belongs, of which nobody knows what it refers to


@dataclass(frozen=True, slots=True)
class Judgement:
    """What all stores together say of the generations."""

    pinned: Mapping[str, frozenset[int] | None]  # folder -> as for `PinFound`
    denied: Collection[str]  # digests of payloads


@dataclass(frozen=True, slots=True)
class Item:
    """One object that may go."""

    what: Literal["generation", "object", "pin", "denial"]
    info: ObjectInfo
    # What its bytes must show first, where others write to such keys as well: one of these SHA-256, or ("zstd") that
    # they are a bundle as warmseed stores it. Empty: a manifest or its own name says whose it is.
    proof: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Plan:
    """What one store no longer needs, in the order in which it goes."""

    items: tuple[Item, ...]
    kept: int = 0  # generations that stay
    young: int = 0  # objects that would go if they were older
    ageless: int = 0  # objects that would go if the store knew their age
    held: int = 0  # objects that would go if all manifests could be read

    @property
    def nbytes(self) -> int:
        """Bytes that go."""
        return sum(item.info.size for item in self.items)


def make_plan(
    survey: Survey, judgement: Judgement, retention: Retention, *, life: float, now: float, sweep: bool = False
) -> Plan:
    """What may go from a store of which `survey` tells.

    `life` is how many seconds any signed statement is believed at most. With `sweep` no generation goes: what nothing
    refers to now is all that is planned.
    """
    return _Planner(survey, judgement, retention, life, now).plan(sweep=sweep)


class _Planner:
    def __init__(self, survey: Survey, judgement: Judgement, retention: Retention, life: float, now: float) -> None:
        self._survey, self._judgement, self._retention = survey, judgement, retention
        self._life, self._now = life, now
        self._young = self._ageless = self._held = 0

    def plan(self, *, sweep: bool) -> Plan:
        going = () if sweep else tuple(self._generations())
        gone = frozenset(item.info.key for item in going)
        statements = () if sweep else tuple(self._statements())
        items = (*going, *statements, *self._objects(gone))
        kept = sum(map(len, self._survey.generations.values())) - len(going)
        return Plan(items, kept, self._young, self._ageless, self._held)

    # Generations -----------------------------------------------------------------------------------------

    def _generations(self) -> Iterator[Item]:
        newest = {folder: self._newest(found) for folder, found in self._survey.generations.items()}
        runs = {_group(item) for kept in newest.values() for item in kept if item.run}
        for folder, found in sorted(self._survey.generations.items()):
            pinned = self._judgement.pinned.get(folder, frozenset())
            floor = newest[folder][-1].number if len(newest[folder]) == self._retention.keep else 0
            ours = [item.number for item in found if item.standing != "foreign"]
            highest = {found[-1].number, *ours[-1:]}
            last = 0  # the number before, of those that stay
            for position, item in enumerate(found):
                stays = (
                    item.number in highest
                    or item.standing in ("foreign", "doubtful")
                    or not item.info.key.startswith(f"{NAMESPACE}/manifest/{self._retention.prefix}")
                    or pinned is None
                    or item.number in pinned
                    or (self._usable(item) and (item.number >= floor or _group(item) in runs))
                    or found[position + 1].number - last > WINDOW
                    or not self._old(item.info)
                )
                if stays:
                    last = item.number
                else:
                    yield Item("generation", item.info)

    def _newest(self, found: Sequence[Generation]) -> list[Generation]:
        """Those that the operator wants to keep, newest first; what is not complete here does not count."""
        complete = [item for item in reversed(found) if self._usable(item) and self._complete(item)]
        return complete[: self._retention.keep]

    def _usable(self, item: Generation) -> bool:
        return item.standing == "good" and item.sha256 not in self._judgement.denied

    def _complete(self, item: Generation) -> bool:
        objects = self._survey.objects
        return all(key in objects and objects[key].size == size for key, size in item.needs)

    # What nothing refers to -----------------------------------------------------------------------------

    def _objects(self, gone: Collection[str]) -> Iterator[Item]:
        needed: set[str] = set()
        ours: set[str] = set()  # keys that a manifest of ours names, believed or not
        references: dict[str, set[tuple[int, str]]] = {}  # key -> what publications of ours put there
        for folder, found in self._survey.generations.items():
            for item in found:
                keys = {*(key for key, _ in item.needs), *item.also}
                if item.standing != "foreign":
                    ours |= keys
                if item.info.key not in gone and not self._spent(folder, item):
                    needed |= {*keys, item.reference}
                else:
                    references.setdefault(item.reference, set()).add((item.length, item.sha256))
        for key, info in sorted(self._survey.objects.items()):
            if key in needed or key in self._survey.protected:
                continue
            proof: frozenset[str] = frozenset()
            if not _SHARED.fullmatch(key):
                proof = frozenset(sha256 for length, sha256 in references.get(key, ()) if length == info.size)
                if not proof:
                    continue  # not written by warmseed, as far as anybody can tell
            elif key not in ours and key.endswith("/bundle.tar"):
                proof = frozenset({"zstd"})  # stock vLLM has bundles of its own there, which no manifest names
            if self._survey.unreadable:
                self._held += 1
            elif self._old(info):
                yield Item("object", info, proof)

    def _spent(self, folder: str, item: Generation) -> bool:
        """Whether a manifest that stays for its number alone has no more use for its objects."""
        pinned = self._judgement.pinned.get(folder, frozenset())
        return (
            item.standing == "over"
            and pinned is not None
            and item.number not in pinned
            and item.info.key.startswith(f"{NAMESPACE}/manifest/{self._retention.prefix}")
            and _older(item.info, self._now - self._retention.older_than)
        )

    # Statements -----------------------------------------------------------------------------------------

    def _statements(self) -> Iterator[Item]:
        # An older pin that is still valid may lie on some node's disk: what took its place outlives it.
        before = self._now - max(self._retention.older_than, self._life)
        for folder, pin in self._survey.pins.items():
            inside = f"{folder}/".startswith(f"{NAMESPACE}/manifest/{self._retention.prefix}")
            if pin.over and inside and _older(pin.info, before):
                yield Item("pin", pin.info)
        if not self._retention.prefix:
            yield from (Item("denial", info) for info in self._survey.denials if _older(info, before))

    def _old(self, info: ObjectInfo) -> bool:
        """Whether `info` may be touched; what may not is counted."""
        if _older(info, self._now - self._retention.older_than):
            return True
        if info.modified is None:
            self._ageless += 1
        else:
            self._young += 1
        return False


def _older(info: ObjectInfo, before: float) -> bool:
    return info.modified is not None and info.modified <= before


def _group(item: Generation) -> tuple[str, str, str]:
    """What ranks that adopt together have in common."""
    _, _, kind, config_hash, *_ = item.info.key.split("/")
    return kind, config_hash, item.run
