"""The fleet view: when it has read enough, and that nobody waits for its events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from batchferry.clock import SystemClock
from batchferry.domain import control
from batchferry.domain.errors import KafkaUnavailable
from batchferry.engine import fleet as fleet_module
from batchferry.engine.fleet import FleetView
from batchferry.ports import OutRecord
from batchferry.telemetry import RecordingTelemetry

LEDGER = ("ledger", 0)


class BusyTail:
    """A log to which the others write as fast as it is read: one record more for each that was returned."""

    def __init__(self) -> None:
        self.position = 0
        self.end = 3
        self.marks = 0
        self.is_stopped = False
        self.fails_at: int | None = None

    async def start(self, _topics: Sequence[str]) -> None:
        return

    async def poll(self, _timeout_ms: int) -> Sequence[Any]:
        await asyncio.sleep(0)
        if self.position == self.fails_at:
            raise KafkaUnavailable("gone")
        self.position += 1
        self.end += 1
        return [SimpleNamespace(topic="ledger", partition=0, offset=self.position - 1, key=None, value=None)]

    async def mark(self) -> Mapping[tuple[str, int], int]:
        self.marks += 1
        return {LEDGER: self.end}

    def reached(self, mark: Mapping[tuple[str, int], int]) -> bool:
        return not self.is_stopped and self.position >= mark[LEDGER]

    async def stop(self) -> None:
        self.is_stopped = True


class Broker:
    """A plain producer that takes nothing while it is away."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []
        self.sendings = 0
        self.refused = asyncio.Event()
        self.is_back = asyncio.Event()
        self.is_broken = False

    async def start(self) -> None:
        return

    async def send(self, records: Sequence[OutRecord]) -> None:
        self.sendings += 1
        if self.is_broken:
            raise RuntimeError
        if not self.is_back.is_set():
            self.refused.set()
            raise KafkaUnavailable("away")
        self.taken.extend(record.value or b"" for record in records)

    async def stop(self) -> None:
        return


def view(telemetry: RecordingTelemetry, tails: Sequence[BusyTail] = (), broker: Broker | None = None) -> FleetView:
    """A fleet view of these tails, one after the other, and this broker."""
    rest = iter(tails)
    kafka: Any = SimpleNamespace(tail=lambda: next(rest), plain_producer=lambda: broker)
    return FleetView(kafka, SystemClock(), telemetry, "ledger", "control")


@asynccontextmanager
async def running(fleet: FleetView) -> AsyncIterator[None]:
    """The fleet view, following."""
    task = asyncio.create_task(fleet.run())
    try:
        async with asyncio.timeout(10):
            yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def event(number: int) -> OutRecord:
    """An event that says its number."""
    return OutRecord("events", None, b"%d" % number)


Until = Callable[[Callable[[], bool]], Awaitable[None]]


@pytest.fixture
def until() -> Until:
    """Let the loop turn until something is so, within ten seconds."""

    async def wait(is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not is_so():  # noqa: ASYNC110 (one loop, no other thread)
                await asyncio.sleep(0)

    return wait


# ------------------------------------------------------------------------------------------- following


async def test_steady_writing_does_not_keep_the_view_from_being_ready() -> None:
    """Others write as fast as we read: what was there at the start is enough, and so it is for each later question."""
    telemetry, tail = RecordingTelemetry(), BusyTail()
    fleet = view(telemetry, [tail])
    async with running(fleet):
        await fleet.ready()
        assert tail.position < tail.end
        assert telemetry.named("fleet_caught_up")[0]["records"] == 3
        before = tail.end
        await fleet.catch_up()
        assert tail.position >= before
    assert tail.marks == 2


async def test_a_question_outlives_a_lost_connection() -> None:
    """A tail made anew reads everything again: the question is held against the new one's end, not the old one's."""
    first, second = BusyTail(), BusyTail()
    first.end, first.fails_at = 100, 5
    fleet = view(RecordingTelemetry(), [first, second])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet_module, "RETRY_PAUSE_S", 0)
        async with running(fleet):
            await fleet.catch_up()
            assert first.is_stopped
            assert second.position >= 3


async def test_a_ledger_that_could_not_be_read_whole_is_named_until_it_is_read_again() -> None:
    """Who asks whether a lot is absent must know that a record was passed over."""
    first, second = BusyTail(), BusyTail()
    first.end, first.fails_at = 100, 5
    poll = first.poll

    async def damaged(timeout_ms: int) -> Sequence[Any]:
        return [SimpleNamespace(**{**vars(one), "key": b"lot/X", "value": b"{"}) for one in await poll(timeout_ms)]

    first.poll = damaged  # type: ignore[method-assign]
    telemetry = RecordingTelemetry()
    fleet = view(telemetry, [first, second])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet_module, "RETRY_PAUSE_S", 0)
        seen: list[set[int]] = []
        patch.setattr(first, "stop", lambda: _note(seen, fleet, first))
        async with running(fleet):
            await fleet.catch_up()
    assert seen == [{0}]
    assert len(telemetry.named("ledger_record_unreadable")) == 5
    assert fleet.unreadable == set()


async def _note(seen: list[set[int]], fleet: FleetView, tail: BusyTail) -> None:
    seen.append(set(fleet.unreadable))
    tail.is_stopped = True


# -------------------------------------------------------------------------------------------- events


async def test_events_wait_for_the_broker_and_nobody_for_them(until: Until) -> None:
    """``send`` returns while the broker is away; when it is back all come, in their order, in few sendings."""
    telemetry, broker = RecordingTelemetry(), Broker()
    fleet = view(telemetry, broker=broker)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet_module, "RETRY_PAUSE_S", 0)
        await fleet.send([event(0)])
        async with asyncio.timeout(10):
            await broker.refused.wait()
        for number in range(1, 200):
            await fleet.send([event(number)])
        broker.is_back.set()
        await until(lambda: len(broker.taken) == 200)
    assert broker.taken == [b"%d" % number for number in range(200)]
    assert broker.sendings < 200
    assert telemetry.total("events_dropped") == 0
    await fleet.stop()


async def test_an_event_that_meets_the_end_of_a_sending_is_sent(until: Until) -> None:
    """The sender ends when nothing waits; an event of that very moment begins a new one."""
    broker = Broker()
    broker.is_back.set()
    fleet = view(RecordingTelemetry(), broker=broker)

    async def send_all() -> None:
        for number in range(500):
            await fleet.send([event(number)])
            await asyncio.sleep(0)

    await asyncio.gather(send_all(), send_all())
    await until(lambda: len(broker.taken) == 1_000)
    await fleet.stop()


async def test_the_oldest_events_go_when_too_many_wait(until: Until, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue is bounded; what went is counted, and told once a sending."""
    monkeypatch.setattr(fleet_module, "OUTBOX_RECORDS", 10)
    monkeypatch.setattr(fleet_module, "SEND_RECORDS", 4)
    monkeypatch.setattr(fleet_module, "RETRY_PAUSE_S", 0)
    telemetry, broker = RecordingTelemetry(), Broker()
    fleet = view(telemetry, broker=broker)
    await fleet.send([event(number) for number in range(25)])
    async with asyncio.timeout(10):
        await broker.refused.wait()
    broker.is_back.set()
    await until(lambda: len(broker.taken) == 10)
    assert broker.taken == [b"%d" % number for number in range(15, 25)]
    assert telemetry.total("events_dropped") == 15
    assert telemetry.named("events_dropped") == [{"records": 15}]
    await fleet.stop()


async def test_a_stop_sends_what_waits() -> None:
    """Events of the last moment are still published."""
    broker = Broker()
    broker.is_back.set()
    fleet = view(RecordingTelemetry(), broker=broker)
    await fleet.send([event(number) for number in range(1_200)])
    await fleet.stop()
    assert len(broker.taken) == 1_200


async def test_a_stop_without_a_broker_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody takes within the farewell is dropped and counted."""
    monkeypatch.setattr(fleet_module, "FAREWELL_S", 0.01)
    telemetry, broker = RecordingTelemetry(), Broker()
    fleet = view(telemetry, broker=broker)
    await fleet.send([event(1), event(2)])
    async with asyncio.timeout(10):
        await fleet.stop()
    assert telemetry.total("events_dropped") == 2


async def test_a_bug_in_sending_costs_events_only(until: Until) -> None:
    """It is told, and the next event is sent all the same."""
    telemetry, broker = RecordingTelemetry(), Broker()
    fleet = view(telemetry, broker=broker)
    broker.is_back.set()
    broker.is_broken = True
    await fleet.send([event(1)])
    await until(lambda: bool(telemetry.named("task_failed")))
    broker.is_broken = False
    await fleet.send([event(2)])
    await until(lambda: broker.taken == [b"2"])
    assert telemetry.total("tasks_failed", task="events") == 1
    await fleet.stop()


async def test_a_hold_stands_here_although_the_broker_is_away() -> None:
    """A control record is believed in this process whether or not it could be published."""
    telemetry = RecordingTelemetry()
    fleet = view(telemetry, broker=Broker())
    flush = control.Flush("k", datetime(2026, 3, 1, tzinfo=UTC))
    await fleet.publish(flush)
    assert fleet.control.flushes == {"k": flush}
    assert telemetry.named("kafka_unavailable") == [{"what": "control record"}]
    await fleet.stop()
