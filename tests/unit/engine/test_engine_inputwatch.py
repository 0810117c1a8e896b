"""What the watch on the input topic tells."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

from batchferry.domain.offsets import OffsetSet
from batchferry.engine.inputwatch import RETENTION_NEAR_S, InputWatch
from batchferry.telemetry import RecordingTelemetry

NOW = datetime(2026, 3, 1, tzinfo=UTC)
NOW_MS = round(NOW.timestamp() * 1000)
DAY_S = 86_400.0
DAY_MS = 86_400_000


class Log:
    """A reader of a log that ends at 100 in each partition; every record is as old as ``age_ms`` says."""

    def __init__(self, age_ms: int) -> None:
        self.age_ms = age_ms
        self.reads = 0

    async def bounds(self, _topic: str, partitions: Sequence[int]) -> Mapping[int, tuple[int, int]]:
        return dict.fromkeys(partitions, (0, 100))

    async def read_offsets(self, _topic: str, _partition: int, offsets: OffsetSet) -> AsyncIterator[list[Any]]:
        self.reads += 1
        yield [SimpleNamespace(offset=offset, timestamp=NOW_MS - self.age_ms) for offset in offsets]


class Rows:
    """An index that knows these rows."""

    def __init__(self, t0_ms: Mapping[int, int]) -> None:
        self.t0_ms = t0_ms

    async def get_rows(self, _partition: int, offsets: Sequence[int]) -> Mapping[int, Any]:
        return {one: SimpleNamespace(t0_ms=self.t0_ms[one]) for one in offsets if one in self.t0_ms}


def task(partition: int, watermark: int, next_offset: int) -> Any:
    """A live partition."""
    return SimpleNamespace(
        partition=partition, is_live=True, next_offset=next_offset, ledger=SimpleNamespace(watermark=watermark)
    )


def watch(telemetry: RecordingTelemetry, tasks: Mapping[int, Any], rows: Mapping[int, int], days: float | None) -> Any:
    """A watch on these partitions with so many days of retention."""
    clock: Any = SimpleNamespace(now=lambda: NOW)
    kafka: Any = None
    store: Any = Rows(rows)
    retention_s = None if days is None else days * DAY_S
    return InputWatch(kafka, "requests", tasks, store, clock, telemetry, retention_s)


def gauge(telemetry: RecordingTelemetry, name: str) -> float | None:
    """A gauge without labels."""
    return telemetry.gauges.get((name, ()))


async def test_backlog_age_and_headroom_are_those_of_the_oldest_open_record() -> None:
    """The backlog adds up; age and headroom are those of the partition that is furthest behind."""
    telemetry = RecordingTelemetry()
    tasks = {0: task(0, 10, 60), 1: task(1, 40, 90)}
    watched = watch(telemetry, tasks, {10: NOW_MS - 2 * DAY_MS, 40: NOW_MS - DAY_MS}, 7)
    log = Log(0)
    await watched.look(log)
    assert gauge(telemetry, "backlog_records") == 50
    assert gauge(telemetry, "oldest_unsettled_age_seconds") == 2 * DAY_S
    assert gauge(telemetry, "retention_headroom_seconds") == 5 * DAY_S
    assert log.reads == 0


async def test_a_record_the_index_does_not_know_is_looked_up_once() -> None:
    """A record that waits at the provider since before the restore is found in the log, and not read again."""
    telemetry = RecordingTelemetry()
    watched, log = watch(telemetry, {0: task(0, 10, 60)}, {}, 7), Log(3 * DAY_MS)
    await watched.look(log)
    await watched.look(log)
    assert log.reads == 1
    assert gauge(telemetry, "retention_headroom_seconds") == 4 * DAY_S


async def test_little_headroom_is_told_once() -> None:
    """An event comes when the headroom falls below the bound, and again only after it has been above."""
    telemetry = RecordingTelemetry()
    late = task(0, 10, 60)
    watched, log = watch(telemetry, {0: late}, {10: NOW_MS - 2 * DAY_MS, 11: NOW_MS}, 2.5), Log(0)
    await watched.look(log)
    await watched.look(log)
    assert telemetry.named("retention_near") == [{"topic": "requests", "partition": 0, "headroom_s": 43_200}]
    late.ledger.watermark = 11
    await watched.look(log)
    late.ledger.watermark = 10
    await watched.look(log)
    assert len(telemetry.named("retention_near")) == 2
    assert RETENTION_NEAR_S == DAY_S


async def test_nothing_waits() -> None:
    """With every record settled the age is 0 and the headroom is the whole retention; without a bound it is untold."""
    telemetry = RecordingTelemetry()
    await watch(telemetry, {0: task(0, 100, 100)}, {}, 7).look(Log(0))
    assert gauge(telemetry, "oldest_unsettled_age_seconds") == 0
    assert gauge(telemetry, "retention_headroom_seconds") == 7 * DAY_S
    unbounded = RecordingTelemetry()
    await watch(unbounded, {0: task(0, 10, 60)}, {}, None).look(Log(DAY_MS))
    assert gauge(unbounded, "retention_headroom_seconds") is None
    assert gauge(unbounded, "oldest_unsettled_age_seconds") == DAY_S
