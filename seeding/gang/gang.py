"""All ranks of a tuning group adopt one generation, or none does, and that is decided before any rank tunes.

A rank that hits while another misses waits in a collective for ever (a hit skips the reduction that the miss
enters), and ranks that serve tables of two tuning runs pick tactics that deadlock over symmetric memory. So
what a group adopts is named by its *run*, which all its ranks share, and two rounds decide:

    1  every rank names the runs it could serve          -> the best run that all of them named, or none
    2  every rank has that run in place, and says so     -> kept by all, or taken back by all

Whoever misses a round's end in doubt must not tune either: `GangBroken` ends its start.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, TypeVar

import msgspec

from warmseed.errors import WarmseedError, printable
from warmseed.seeding.gang.rendezvous import Rendezvous, RendezvousFailed

__all__ = ["Decision", "GangBroken", "Member", "Offer", "agree_run", "choose", "decide_together"]

_log = logging.getLogger(__name__)
_OFFERS = 16  # runs one rank names at most

_T = TypeVar("_T", bound=msgspec.Struct)
Run = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


class GangBroken(WarmseedError):
    """The group may have decided, but this rank did not hear it: it must neither tune nor serve. Start again."""


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run that a rank could serve."""

    run: Run  # names the tuning run; equal on all ranks that took part in it
    issued_at: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 0  # unix seconds; the newest common run wins
    pinned: bool = False  # the fleet's choice, which outranks newer ones


class _Offers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    offers: Annotated[tuple[Offer, ...], msgspec.Meta(max_length=_OFFERS)]
    note: Annotated[str, msgspec.Meta(max_length=256)] = ""  # why there are none, for people


class _Placed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    failed: Annotated[str, msgspec.Meta(max_length=256)] = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """How a group decided; the same on all its ranks, but for `reason`."""

    outcome: Literal["adopted", "local"]
    run: str = ""
    reason: str = ""
    missing: tuple[int, ...] = ()  # ranks that did not take part


class Member(Protocol):
    """What one rank does for its group. `take` and `withdraw` concern the run that was chosen."""

    async def offers(self) -> Sequence[Offer]:
        """The runs this rank could serve, checked to be good and of this very rank. May raise `WarmseedError`."""
        ...

    async def take(self, run: str) -> None:
        """Have `run` in place, or raise `WarmseedError` or `OSError`; nothing has changed then."""
        ...

    async def withdraw(self) -> None:
        """Undo `take`: the group does not keep the run."""
        ...

    async def stand_down(self) -> None:
        """See to it that nothing hits on this rank, since the whole group will tune."""
        ...


async def decide_together(meeting: Rendezvous, member: Member, *, name: str, timeout: float) -> Decision:
    """Adopt one run on every rank of the group, or none on any; `name` is this decision's, on every rank.

    Each of the two rounds takes at most about `timeout` seconds.

    Raises:
        GangBroken: this rank has the run in place and does not know whether the others kept it.
    """
    ours = await _offers_of(member)
    try:
        heard = await meeting.exchange(f"{name}/offers", msgspec.json.encode(ours), timeout=timeout)
        chosen, reason = choose(_decoded(heard, _Offers))
    except RendezvousFailed as error:
        # Not everybody was heard, so nobody goes on to the second round with all of us in it.
        return await _local(member, str(error), error.missing)
    if chosen is None:
        return await _local(member, reason)
    failed = await _take(member, chosen)
    try:
        heard = await meeting.exchange(f"{name}/placed", msgspec.json.encode(_Placed(failed)), timeout=timeout)
        problems = {rank: placed.failed for rank, placed in _decoded(heard, _Placed).items() if placed.failed}
    except RendezvousFailed as error:
        await _withdraw(member, failed)
        if error.decided:
            return await _local(member, str(error), error.missing)
        raise GangBroken(
            f"this rank had run {chosen} in place when its group fell silent ({error}); it can't know what the others "
            "did, so it ends instead of tuning against them"
        ) from error
    except BaseException:
        await asyncio.shield(_withdraw(member, failed))
        raise
    if problems:
        await _withdraw(member, failed)
        said = "; ".join(f"rank {rank}: {printable(why)}" for rank, why in sorted(problems.items())[:4])
        return await _local(member, f"run {chosen} could not be put in place everywhere ({said})")
    _log.info("group of %d adopted run %s", meeting.world, chosen)
    return Decision("adopted", chosen, reason)


def choose(offers: Mapping[int, _Offers]) -> tuple[str | None, str]:
    """The best run that every rank offers, and why; `None` if there is none. Pure, and the same everywhere."""
    common: dict[str, tuple[bool, int]] = {}
    for rank, said in sorted(offers.items()):
        mine = {offer.run: (offer.pinned, offer.issued_at) for offer in said.offers}
        if rank == min(offers):
            common = mine
        common = {run: min(common[run], mine[run]) for run in common if run in mine}
        if not common:
            if not said.offers:
                return None, f"rank {rank} has nothing to adopt{': ' + printable(said.note) if said.note else ''}"
            return None, f"rank {rank} offers only runs that another rank does not have"
    best = max(common, key=lambda run: (*common[run], run))
    return best, f"offered by all {len(offers)} ranks" + (", pinned" if common[best][0] else "")


async def agree_run(meeting: Rendezvous, *, name: str, timeout: float) -> str:
    """A fresh name for the run that this group is about to tune, equal on all its ranks.

    Raises:
        RendezvousFailed: not every rank was heard; what is tuned now must not be published as one run.
    """
    heard = await meeting.exchange(f"{name}/run", secrets.token_bytes(16), timeout=timeout)
    return hashlib.sha256(b"\0".join(heard[rank] for rank in sorted(heard))).hexdigest()[:32]


async def _offers_of(member: Member) -> _Offers:
    try:
        return _Offers(tuple(await member.offers())[:_OFFERS])
    except (WarmseedError, OSError) as error:
        _log.info("this rank offers its group nothing: %s", printable(error))
        return _Offers((), printable(error, limit=200)[:256])


def _decoded(heard: Mapping[int, bytes], form: type[_T]) -> dict[int, _T]:
    try:
        return {rank: msgspec.json.decode(share, type=form) for rank, share in heard.items()}
    except msgspec.MsgspecError as error:
        # Every rank decodes the same bytes, so every rank comes to this.
        raise RendezvousFailed(f"a rank said something that is not part of this: {error}", decided=True) from None


async def _take(member: Member, run: str) -> str:
    try:
        await member.take(run)
    except (WarmseedError, OSError) as error:
        return printable(error, limit=200)[:256] or type(error).__name__
    return ""


async def _withdraw(member: Member, failed: str) -> None:
    if not failed:
        await member.withdraw()


async def _local(member: Member, reason: str, missing: tuple[int, ...] = ()) -> Decision:
    _log.info("the group tunes by itself: %s", reason)
    await member.stand_down()
    return Decision("local", reason=reason, missing=missing)
