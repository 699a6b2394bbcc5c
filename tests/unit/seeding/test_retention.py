"""Which numbers may go without any reader missing the newest, and what is planned from what a store holds."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from warmseed.seeding.artifact import ArtifactKey, object_key
from warmseed.seeding.operator.retention import Generation, Judgement, Plan, Retention, Standing, Survey, make_plan
from warmseed.seeding.origins.catalog import MAX_WINDOWS, WINDOW, Catalog
from warmseed.stores.base import ObjectInfo
from warmseed.stores.chain import Chain
from warmseed.testing.fake_store import FakeStore

KEY = ArtifactKey(kind="plain", config_hash="a" * 64, environment_hash="b" * 64)
HOUR, DAY = 3600.0, 86_400.0
NOW = 1_800_000_000.0
NOBODY = Judgement({}, frozenset())


def digest(number: int) -> str:
    return f"{number:064x}"


def generation(number: int, *, standing: Standing = "good", modified: float | None = 0.0) -> Generation:
    payload = object_key(digest(number))
    return Generation(
        info=ObjectInfo(KEY.manifest_key(number), 2000, modified),
        number=number,
        standing=standing,
        sha256=digest(number),
        length=10,
        run="",
        needs=((payload, 10),),
        also=(),
        reference="",
    )


def plan_of(*found: Generation, keep: int = 1, judgement: Judgement = NOBODY, unreadable: tuple[str, ...] = ()) -> Plan:
    objects = {key: ObjectInfo(key, size, 0.0) for item in found for key, size in item.needs}
    survey = Survey(objects, {KEY.manifest_folder: found}, {}, (), frozenset(), unreadable)
    return make_plan(survey, judgement, Retention(keep=keep), life=30 * DAY, now=NOW)


def left(plan: Plan, *found: Generation) -> list[int]:
    gone = {item.info.key for item in plan.items}
    return [item.number for item in found if item.info.key not in gone]


def newest(numbers: list[int], hint: int | None, known: int) -> int:
    store = FakeStore(objects={KEY.manifest_key(number): b"." for number in numbers})
    if hint is not None:
        store.objects[KEY.head_key] = str(hint).encode()
    return asyncio.run(Catalog(Chain(None, [store])).newest(KEY, known=known))


@given(
    gaps=st.lists(st.integers(1, WINDOW), min_size=1, max_size=40),
    keep=st.integers(1, 4),
    hint=st.none() | st.integers(0, 400),
    known=st.integers(0, 400),
)
def test_whatever_a_reader_starts_from_it_finds_what_it_would_have_found_before(
    gaps: list[int], keep: int, hint: int | None, known: int
) -> None:
    numbers = [sum(gaps[: end + 1]) for end in range(len(gaps))]
    found = [generation(number) for number in numbers]
    stays = left(plan_of(*found, keep=keep), *found)
    assert stays[-keep:] == numbers[-keep:]
    assert newest(stays, hint, known) == newest(numbers, hint, known) == numbers[-1]
    again = [generation(number) for number in stays]
    assert left(plan_of(*again, keep=keep), *again) == stays, "the same once more would take more"


def test_few_enough_manifests_stay_to_make_it_worth_it_and_few_enough_windows_to_read_them() -> None:
    found = [generation(number) for number in range(1, WINDOW * MAX_WINDOWS)]
    stays = left(plan_of(*found), *found)
    assert len(stays) <= len(found) / WINDOW + 1
    assert newest(stays, None, 0) == found[-1].number


def test_a_manifest_that_stays_for_its_number_keeps_its_payload_until_it_is_over() -> None:
    for standing, gone in (("good", False), ("doubtful", False), ("foreign", False), ("over", True)):
        found = [generation(number) for number in range(1, 20)]
        found[7] = generation(8, standing=standing)  # type: ignore[arg-type]  # a literal out of a loop
        plan = plan_of(*found)
        assert 8 in left(plan, *found)
        assert (object_key(digest(8)) in {item.info.key for item in plan.items}) is gone


def test_what_is_doubtful_neither_goes_nor_counts() -> None:
    found = (generation(1), generation(2), generation(3, standing="doubtful"))
    assert left(plan_of(*found), *found) == [2, 3]


def test_the_highest_number_of_ours_stays_below_a_stranger_s() -> None:
    found = (generation(1, standing="over"), generation(2, standing="over"), generation(9, standing="foreign"))
    assert left(plan_of(*found), *found) == [2, 9]


def test_a_pin_that_nobody_can_read_keeps_every_generation_of_its_artifact() -> None:
    found = tuple(generation(number) for number in (1, 2, 3))
    judgement = Judgement({KEY.manifest_folder: None}, frozenset())
    assert plan_of(*found, judgement=judgement).items == ()


def test_an_expired_generation_that_is_pinned_keeps_its_payload() -> None:
    found = (generation(1, standing="over"), generation(2))
    pinned = Judgement({KEY.manifest_folder: frozenset({1})}, frozenset())
    assert plan_of(*found, judgement=pinned).items == ()
    assert len(plan_of(*found).items) == 2


def test_what_is_too_young_or_of_unknown_age_is_counted_and_needs_its_payload() -> None:
    found = (generation(1, modified=NOW - HOUR), generation(2, modified=None), generation(3))
    plan = plan_of(*found)
    assert (plan.items, plan.young, plan.ageless, plan.kept) == ((), 1, 1, 3)


def test_fewer_complete_generations_than_are_to_be_kept_keep_all() -> None:
    found = tuple(generation(number) for number in (1, 2, 3))
    assert plan_of(*found, keep=4).items == ()


def test_manifests_go_before_objects() -> None:
    plan = plan_of(*(generation(number) for number in range(1, 6)), keep=2)
    assert [item.what for item in plan.items] == ["generation"] * 3 + ["object"] * 3
    assert plan.nbytes == 3 * (2000 + 10)


def test_objects_are_held_back_while_a_manifest_cannot_be_read() -> None:
    plan = plan_of(generation(1), generation(2), unreadable=("x",))
    assert ([item.what for item in plan.items], plan.held) == (["generation"], 1)
