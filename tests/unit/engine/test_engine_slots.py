"""Places that go to whoever is in the greatest hurry."""

from __future__ import annotations

import asyncio

import pytest

from batchferry.engine.slots import OrderedSlots


async def test_the_smallest_order_is_next() -> None:
    """Of those that wait, the one with the smallest order gets the next place; of equals, the first."""
    slots, served = OrderedSlots(1), []
    held = asyncio.Event()

    async def take(order: float, name: str) -> None:
        async with slots.place(order):
            served.append(name)
            if name == "first":
                await held.wait()

    async with asyncio.TaskGroup() as group:
        for order, name in ((5.0, "first"), (3.0, "late"), (1.0, "hurry"), (1.0, "hurry too")):
            group.create_task(take(order, name))
            await asyncio.sleep(0)
        assert (slots.taken, served) == (1, ["first"])
        held.set()
    assert served == ["first", "hurry", "hurry too", "late"]
    assert slots.taken == 0


async def test_who_is_cancelled_leaves_no_place_behind() -> None:
    """A waiter that is cancelled, even in the moment its turn has come, costs nobody a place."""
    slots = OrderedSlots(1)

    async def take() -> None:
        async with slots.place(1.0):
            await asyncio.sleep(0)

    async with slots.place(0.0):
        waiting = asyncio.create_task(take())
        chosen = asyncio.create_task(take())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    chosen.cancel()  # its turn has just been given to it
    with pytest.raises(asyncio.CancelledError):
        await chosen
    async with asyncio.timeout(1):
        async with slots.place(2.0):
            assert slots.taken == 1
    assert slots.taken == 0
