"""Intake: whose records are whose, and what happens when the disk does not take them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from batchferry.clock import SystemClock
from batchferry.config import load_settings
from batchferry.domain.errors import StoreUnavailable
from batchferry.domain.partition import PartitionLedger
from batchferry.domain.requests import RequestRules
from batchferry.engine import intake as intake_module
from batchferry.engine.intake import Intake
from batchferry.engine.outcomes import OutcomeWriter
from batchferry.engine.partition import Settlement
from batchferry.engine.routing import Router
from batchferry.engine.rowsource import RowSource
from batchferry.engine.ways import Ways
from batchferry.store import LocalState
from batchferry.telemetry import RecordingTelemetry

NOW_MS = round(datetime.now(UTC).timestamp() * 1000)


class Life:
    """One life of a partition, as far as the intake looks at it."""

    def __init__(self, partition: int, next_offset: int = 0) -> None:
        self.partition = partition
        self.ledger = PartitionLedger(partition)
        self.ledger_id = "0123456789"
        self.next_offset = next_offset
        self.known_until = 0
        self.is_live = True
        self.lost_reason = ""
        self.gaps: list[tuple[int, int]] = []
        self.settled: list[Settlement] = []

    def note_gap(self, start: int, stop: int) -> None:
        self.gaps.append((start, stop))

    def note_read(self, record: Any) -> None:
        """Which record was read last is of no interest here."""

    def lose(self, reason: str) -> None:
        self.is_live, self.lost_reason = False, reason

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        self.settled.extend(settlements)


class Consumer:
    """Hands out what it is given, then ends the intake."""

    def __init__(self, polls: list[Mapping[int, Sequence[Any]]]) -> None:
        self.polls = polls
        self.at_end: Callable[[], None] = lambda: None
        self.paused: set[int] = set()

    async def poll(self, _max_records: int, _timeout_ms: int) -> Mapping[int, Sequence[Any]]:
        if not self.polls:
            self.at_end()
            return {}
        return self.polls.pop(0)

    def lost_positions(self) -> Mapping[int, int]:
        return {}

    def position(self, _partition: int) -> None:
        return None

    def pause(self, partitions: Sequence[int]) -> None:
        self.paused.update(partitions)

    def resume(self, partition: int) -> None:
        self.paused.discard(partition)


def records(partition: int, start: int, stop: int) -> list[Any]:
    """Good records at these offsets."""
    return [
        SimpleNamespace(
            topic="requests",
            partition=partition,
            offset=offset,
            timestamp=NOW_MS,
            timestamp_type=0,
            key=None,
            headers=(),
            value=json.dumps(
                {
                    "custom_id": f"{partition}-{offset}",
                    "body": {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": "hi"}]},
                }
            ).encode(),
        )
        for offset in range(start, stop)
    ]


class NoWays(Ways):
    """Plain rows take the way of all: whoever asks for another has found one that is not plain."""

    def __init__(self) -> None:
        """It needs nothing."""

    def choose(self, *_: Any) -> Any:
        raise AssertionError("a plain row was sent another way")


Build = Callable[..., Awaitable[tuple[Intake, LocalState, list[Any]]]]


@pytest.fixture
async def build(tmp_path: Path) -> Any:
    """Makes an intake over a real local store; sealed batches end in the list."""
    stores: list[LocalState] = []

    async def make(consumer: Any, tasks: Mapping[int, Any], **route: Any) -> tuple[Intake, LocalState, list[Any]]:
        settings = load_settings(
            None, env={}, overrides={"accounts": {"default": {"api_key": "k"}}, "routes": {"default": route}}
        )
        store = LocalState(tmp_path / f"state{len(stores)}")
        await store.start()
        stores.append(store)
        clock, telemetry, router = SystemClock(), RecordingTelemetry(), Router(settings)
        provider: Any = SimpleNamespace(
            is_inline=False,
            check_request=lambda _url, _body: None,
            render_line=lambda url, body: b',"method":"POST","url":"' + url.encode() + b'","body":' + body + b"}\n",
            line_head=lambda wire_id: b'{"custom_id":"' + wire_id.encode() + b'"',
        )
        providers = {"default": provider}
        kafka: Any = None
        source = RowSource(kafka, store, clock, "requests", RequestRules(), router, providers, telemetry)
        topics = dict.fromkeys(("results", "failures", "batch-events"), 1_000_000)
        outcomes = OutcomeWriter(settings, clock, telemetry, topics, {})
        sealed: list[Any] = []

        async def new_batch(batch: Any) -> None:
            sealed.append(batch)

        intake = Intake(
            settings, consumer, store, clock, telemetry, router, source, outcomes, providers, tasks, new_batch,
            NoWays(),
        )  # fmt: skip
        consumer.at_end = intake.stop
        return intake, store, sealed

    yield make
    for store in stores:
        await store.close()


async def test_records_of_an_earlier_life_are_not_shown_to_the_next(build: Build):
    """A partition lost and restored while another's records are taken does not see what its old life had polled."""
    tasks: dict[int, Any] = {0: Life(0), 1: Life(1, next_offset=150)}
    consumer = Consumer([{0: records(0, 0, 5), 1: records(1, 150, 160)}])
    intake, _, _ = await build(consumer, tasks)
    old, new = tasks[1], Life(1, next_offset=100)
    taken = intake._take

    async def take_and_move(task: Any, some: Sequence[Any]) -> None:
        await taken(task, some)
        if task.partition == 0:
            old.lose("moved")
            tasks[1] = new  # restored from its own position while p0's records were being taken

    intake._take = take_and_move  # type: ignore[method-assign]
    await intake.run()
    assert new.gaps == []
    assert new.next_offset == 100
    assert tasks[0].next_offset == 5


async def test_a_full_disk_ends_every_life_and_loses_nothing(build: Build, monkeypatch: pytest.MonkeyPatch):
    """When the store refuses a write, all partitions are given up to be read again: none keeps half a batch."""
    monkeypatch.setattr(intake_module, "STORE_PAUSE_S", 0.0)
    tasks: dict[int, Any] = {0: Life(0), 1: Life(1)}
    consumer = Consumer([{0: records(0, 0, 4)}, {1: records(1, 0, 4)}])
    intake, store, sealed = await build(consumer, tasks, max_rows=6)

    async def full(*_: object) -> None:
        raise StoreUnavailable("full")

    calls = 0
    put = store.put_rows

    async def put_once(partition: int, rows: Sequence[Any]) -> None:
        nonlocal calls
        calls += 1
        await (put(partition, rows) if calls == 1 else full())

    monkeypatch.setattr(store, "put_rows", put_once)
    await intake.run()
    assert [life.is_live for life in tasks.values()] == [False, False]
    assert sealed == []


async def test_indexed_rows_do_not_grow_with_the_lives_of_a_partition(build: Build):
    """A partition that is read again counts its rows once; rows that are settled stop counting."""
    tasks: dict[int, Any] = {0: Life(0)}
    intake, store, _ = await build(Consumer([{0: records(0, 0, 50)}]), tasks)
    await intake.run()
    assert intake.indexed_rows == 50
    await store.drop_partition(0)
    assert intake.indexed_rows == 0


async def test_pressure_seals_until_the_spool_will_fall_below_its_low_mark(build: Build):
    """At the high mark open batches leave early one by one, the largest first, and consumption pauses meanwhile."""
    tasks: dict[int, Any] = {0: Life(0)}
    consumer = Consumer([{0: records(0, 0, 40)}, {}, {}, {}])
    intake, _, sealed = await build(consumer, tasks)
    limits = intake._limits
    intake._limits = limits.model_copy(update={"spool_high_bytes": 2_000, "spool_low_bytes": 1_000})
    await asyncio.wait_for(intake.run(), 20)
    assert sum(batch.rows for batch in sealed) == 40
    assert consumer.paused == {0}
