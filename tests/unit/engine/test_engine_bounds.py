"""The bounds: exact, fair, measured, and written down once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from engine_kit import ACCOUNT, BATCH, KEY, NOW, Harbour, batch, no_late_rows

from batchferry.domain.accumulator import SealReason
from batchferry.domain.ids import BatchId
from batchferry.domain.machine import Admit, Admitted, BatchState, HeldBack, InputUnusable
from batchferry.domain.provider import BatchPage
from batchferry.engine import scheduler as scheduler_module
from batchferry.engine import work as work_module
from batchferry.engine.bounds import BOUNDS, table
from batchferry.engine.landing import FileFacts
from batchferry.engine.scheduler import Due, PollScheduler
from batchferry.engine.sealed import SealedBatch
from batchferry.engine.slots import Slots
from batchferry.engine.work import BatchContext, BatchWork

PLACES = 7


class Quay:
    """Batches that want a place. Their states are those of the start until ``move`` is called."""

    def __init__(self, harbour: Harbour) -> None:
        self.contexts: dict[str, BatchContext] = {}
        self.afloat: set[str] = set()
        self.held: set[str] = set()
        self.order: list[str] = []

        async def ready() -> None: ...

        fleet: Any = SimpleNamespace(ready=ready)
        holds: Any = SimpleNamespace(
            standing=lambda key: [key] if key.slice in self.held else [], may_probe=lambda _key, _batch_id: True
        )
        nothing: Any = None
        self.work = BatchWork(
            harbour.settings, {ACCOUNT: harbour.provider}, harbour.tasks, harbour.store, harbour.clock,
            harbour.telemetry, fleet, holds, nothing, harbour.outcomes, nothing, lambda _: None, self.taken,
            harbour.admission, no_late_rows, FileFacts(),
        )  # fmt: skip

    def taken(self) -> int:
        """As the supervisor counts: those afloat, and those admitted whose state does not show it yet."""
        return sum(one in self.afloat or context.is_admitted for one, context in self.contexts.items())

    def ask(self, number: int) -> asyncio.Task[Any]:
        """A batch begins to wait for its place."""
        name = f"{number:04}"
        key = KEY._replace(slice=name)
        sealed = SealedBatch(BatchId(name), key, SealReason.COUNT, {}, (), NOW, 0)
        context = self.contexts[name] = BatchContext(sealed, ACCOUNT)

        async def ask() -> Any:
            event = await self.work.run(context, batch(BatchState.SEALED, batch_id=BatchId(name), key=key), Admit())
            self.order.append(name)
            return event

        return asyncio.create_task(ask())

    def land(self, number: int) -> None:
        """One has landed: its place is free."""
        del self.contexts[f"{number:04}"]


async def test_a_burst_does_not_pass_the_limit_of_batches_in_flight(tmp_path: Path, monkeypatch: Any) -> None:
    """Hundreds of batches ask in one moment: exactly the limit is let in, then one for each that lands, in order."""
    monkeypatch.setattr(work_module, "ROOM_LOOK_S", 0.005)
    async with Harbour(tmp_path, **{"limits.max_batches_in_flight": PLACES}) as harbour:
        quay = Quay(harbour)
        asked = [quay.ask(number) for number in range(300)]
        async with asyncio.timeout(10):
            done, _ = await asyncio.wait(asked[:PLACES])
            assert {type(one.result()) for one in done} == {Admitted}
            for _ in range(20):
                await asyncio.sleep(0)
            assert quay.taken() == PLACES
            for number in range(20):
                quay.land(number)
                assert isinstance(await asked[PLACES + number], Admitted)
                assert quay.taken() == PLACES
        assert quay.order == sorted(quay.order)
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def test_a_batch_leaves_the_line_when_it_is_held_or_unusable(tmp_path: Path, monkeypatch: Any) -> None:
    """A hold and a lost partition are noticed while waiting, also behind others; the line moves on without them."""
    monkeypatch.setattr(work_module, "ROOM_LOOK_S", 0.005)
    async with Harbour(tmp_path, **{"limits.max_batches_in_flight": 1}) as harbour:
        quay = Quay(harbour)
        first, head, held, lost, last = (quay.ask(number) for number in range(5))
        async with asyncio.timeout(10):
            assert isinstance(await first, Admitted)
            quay.held.add("0002")
            assert isinstance(await held, HeldBack)
            sealed = quay.contexts["0003"].sealed
            assert sealed is not None
            sealed.parts[0] = SimpleNamespace(task=SimpleNamespace(is_live=False))  # type: ignore[assignment]
            assert isinstance(await lost, InputUnusable)
            head.cancel()
            await asyncio.wait({head})
            quay.contexts.pop("0001")
            assert not last.done()
            quay.land(0)
            assert isinstance(await last, Admitted)


async def test_a_batch_that_asks_again_does_not_stand_in_its_own_way(tmp_path: Path) -> None:
    """With room for one batch, that one is let in a second time after it came back."""
    async with Harbour(tmp_path, **{"limits.max_batches_in_flight": 1}) as harbour:
        quay = Quay(harbour)
        async with asyncio.timeout(5):
            assert isinstance(await quay.ask(0), Admitted)
            again = batch(BatchState.SEALED, batch_id=BATCH)
            assert isinstance(await quay.work.run(quay.contexts["0000"], again, Admit()), Admitted)


# ------------------------------------------------------------------------------------------------ polling


def scheduler_of(harbour: Harbour, posted: list[str]) -> PollScheduler:
    """A scheduler of the one account; who was answered goes to the list."""
    return PollScheduler(
        {ACCOUNT: harbour.provider}, harbour.settings.accounts, harbour.clock, harbour.telemetry,
        lambda batch_id, _event: posted.append(batch_id), seed=1,
    )  # fmt: skip


async def test_thousands_of_batches_are_all_polled_by_pages_first(tmp_path: Path, eventually: Any) -> None:
    """Three thousand due at once: the account's list pages are read, the rest singly within the account's calls, and
    each is answered exactly once.
    """
    async with Harbour(tmp_path) as harbour:
        posted: list[str] = []
        scheduler = scheduler_of(harbour, posted)
        limit = harbour.settings.accounts[ACCOUNT].max_concurrent_calls
        busiest = 0
        listed = 0

        async def retrieve(_: str) -> Any:
            nonlocal busiest
            busiest = max(busiest, scheduler.calls[ACCOUNT].taken)
            await asyncio.sleep(0)
            return SimpleNamespace()

        async def list_batches(_: str | None = None) -> Any:
            nonlocal listed
            listed += 1
            return BatchPage((), next_cursor=f"page {listed}")

        harbour.provider.retrieve, harbour.provider.list_batches = retrieve, list_batches
        scheduler._failed = lambda *_: None  # type: ignore[method-assign]
        for number in range(3_000):
            scheduler.schedule(Due(BatchId(f"{number}"), ACCOUNT, f"p{number}"), NOW)  # type: ignore[arg-type]
        task = asyncio.create_task(scheduler.run())
        await eventually(lambda: len(posted) >= 3_000)
        task.cancel()
        await asyncio.wait({task})
        assert sorted(posted, key=int) == [str(number) for number in range(3_000)]
        assert listed == harbour.settings.accounts[ACCOUNT].poll.list_pages
        assert busiest == limit
        assert scheduler.calls[ACCOUNT].taken == 0
        assert scheduler.overdue_s() == 0


async def test_polls_are_spread(tmp_path: Path) -> None:
    """Batches that are to be asked for at one instant in the future are not all asked for in that instant."""
    async with Harbour(tmp_path) as harbour:
        scheduler = scheduler_of(harbour, [])
        later = NOW.replace(hour=13)
        for number in range(500):
            scheduler.schedule(Due(BatchId(f"{number}"), ACCOUNT, f"p{number}"), later)  # type: ignore[arg-type]
        waits_s = sorted((at - later).total_seconds() for at in scheduler._due_at.values())
        jitter = harbour.settings.accounts[ACCOUNT].poll.jitter
        assert waits_s[0] >= 0
        assert waits_s[-1] <= 3600 * jitter
        assert waits_s[-1] - waits_s[0] > 3600 * jitter * 0.9


async def test_a_call_that_never_ends_is_complained_of_and_a_slow_provider_is_not(
    tmp_path: Path, eventually: Any, monkeypatch: Any
) -> None:
    """Calls are under way: as long as one after the other ends nothing is wrong; when none does, something is."""
    monkeypatch.setattr(scheduler_module, "ANSWER_SILENCE_S", 0.3)
    async with Harbour(tmp_path) as harbour:
        scheduler = scheduler_of(harbour, posted := [])
        answer = asyncio.Semaphore(0)

        async def retrieve(_: str) -> Any:
            await answer.acquire()
            return SimpleNamespace()

        harbour.provider.retrieve = retrieve
        scheduler._failed = lambda *_: None  # type: ignore[method-assign]
        for number in range(10):
            scheduler.schedule(Due(BatchId(f"{number}"), ACCOUNT, f"p{number}"), NOW)  # type: ignore[arg-type]
        task = asyncio.create_task(scheduler.run())
        await eventually(lambda: scheduler.calls[ACCOUNT].taken)
        for number in range(5):
            answer.release()
            await eventually(lambda number=number: len(posted) > number)
            assert scheduler.complaints() == []
        await eventually(scheduler.complaints)
        (complaint,) = scheduler.complaints()
        assert complaint.startswith("no call to a provider has ended for")
        for _ in range(5):
            answer.release()
        await eventually(lambda: len(posted) == 10)
        assert scheduler.complaints() == []
        task.cancel()
        await asyncio.wait({task})
        monkeypatch.setattr(scheduler_module, "ROUND_SILENCE_S", 0.0)
        await eventually(scheduler.complaints)
        assert scheduler.complaints()[0].startswith("no batch has been looked at for polling")


# -------------------------------------------------------------------------------------------- written down


async def test_slots_say_how_many_are_taken() -> None:
    """Taken, given back, and given back by one that was cancelled while it waited."""
    slots = Slots(1)
    async with slots:
        waiting = asyncio.create_task(slots.acquire())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert slots.taken == 1
    assert slots.taken == 0


def test_every_bound_is_in_the_table_once() -> None:
    """One line a bound, each with its limit and what happens there."""
    names = [one.name for one in BOUNDS]
    assert len(set(names)) == len(names)
    assert all(one.limit and one.at_the_limit for one in BOUNDS)
    assert table().count("\n") == len(BOUNDS) + 1
