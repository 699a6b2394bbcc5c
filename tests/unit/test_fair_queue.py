"""Turns are fair, bounded, and never lost."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmseed.seeding.channel.fair import FairQueue, QueueFull


def test_owners_take_turns_however_many_waiters_one_of_them_has() -> None:
    async def main() -> list[str]:
        queue = FairQueue(1)
        order: list[str] = []

        async def visit(owner: str) -> None:
            async with queue.turn(owner, seconds=5):
                order.append(owner)
                await asyncio.sleep(0)

        await queue.acquire("first")
        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                group.create_task(visit("greedy"))
            await asyncio.sleep(0)
            group.create_task(visit("modest"))
            group.create_task(visit("shy"))
            await asyncio.sleep(0)
            queue.release("first")
        return order

    assert asyncio.run(main()) == ["greedy", "modest", "shy", "greedy", "greedy", "greedy", "greedy"]


def test_one_owner_holds_no_more_than_its_share() -> None:
    async def main() -> None:
        queue = FairQueue(4, places_per_owner=2)
        await queue.acquire("a")
        await queue.acquire("a")
        with pytest.raises(TimeoutError):
            async with queue.turn("a", seconds=0.01):
                pass
        await queue.acquire("b")
        assert (queue.held, queue.waiting) == (3, 0)

    asyncio.run(main())


def test_more_waiters_than_allowed_are_told_at_once() -> None:
    async def main() -> None:
        queue = FairQueue(1, waiting=2, waiting_per_owner=1)
        await queue.acquire("a")
        waiters = [asyncio.create_task(queue.acquire(owner)) for owner in ("a", "b")]
        await asyncio.sleep(0)
        for owner in ("a", "c"):
            with pytest.raises(QueueFull):
                await queue.acquire(owner)
        for waiter in waiters:
            waiter.cancel()
        await asyncio.gather(*waiters, return_exceptions=True)
        assert queue.waiting == 0

    asyncio.run(main())


@settings(max_examples=200, deadline=None)
@given(
    places=st.integers(1, 4),
    share=st.integers(1, 4),
    steps=st.lists(st.tuples(st.sampled_from(["ask", "release", "cancel", "run"]), st.integers(0, 7)), max_size=60),
)
def test_no_turn_is_lost_or_given_twice(places: int, share: int, steps: list[tuple[str, int]]) -> None:
    async def main() -> None:
        queue = FairQueue(places, places_per_owner=share)
        tasks: list[tuple[str, asyncio.Task[None]]] = []
        holders: list[str] = []

        def settle() -> None:
            for entry in list(tasks):
                owner, task = entry
                if task.done():
                    tasks.remove(entry)
                    if not task.cancelled():
                        holders.append(owner)

        for action, number in steps:
            if action == "ask":
                owner = "abc"[number % 3]
                tasks.append((owner, asyncio.create_task(queue.acquire(owner))))
            elif action == "release" and holders:
                queue.release(holders.pop(number % len(holders)))
            elif action == "cancel" and tasks:
                tasks[number % len(tasks)][1].cancel()
            else:
                for _ in range(3):
                    await asyncio.sleep(0)
            settle()
            assert len(holders) <= queue.held <= places
        for _ in range(5):
            await asyncio.sleep(0)
        settle()
        assert queue.held == len(holders)
        while holders or tasks:
            if holders:
                queue.release(holders.pop())
            for _ in range(3):
                await asyncio.sleep(0)
            settle()
        assert (queue.held, queue.waiting) == (0, 0)

    asyncio.run(asyncio.wait_for(main(), 10))
