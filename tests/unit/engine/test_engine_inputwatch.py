"""What the watch on the input topic tells."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

from batchferry.domain.errors import LedgerDamaged
from batchferry.domain.ledger import Witness
from batchferry.domain.offsets import OffsetSet
from batchferry.domain.partition import PartitionLedger
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
        self.ends = (0, 100)

    async def bounds(self, _topic: str, partitions: Sequence[int]) -> Mapping[int, tuple[int, int]]:
        return dict.fromkeys(partitions, self.ends)

    async def read_offsets(self, _topic: str, _partition: int, offsets: OffsetSet) -> AsyncIterator[list[Any]]:
        self.reads += 1
        yield [SimpleNamespace(offset=offset, timestamp=NOW_MS - self.age_ms) for offset in offsets]


class Rows:
    """An index that knows these rows."""

    def __init__(self, t0_ms: Mapping[int, int]) -> None:
        self.t0_ms = t0_ms

    async def get_rows(self, _partition: int, offsets: Sequence[int]) -> Mapping[int, Any]:
        return {one: SimpleNamespace(t0_ms=self.t0_ms[one]) for one in offsets if one in self.t0_ms}


class Life:
    """A live partition. ``at`` is what a provider has of it; ``damage`` what comparing its witness brings to light."""

    def __init__(self, partition: int, watermark: int, next_offset: int) -> None:
        self.partition = partition
        self.is_live = True
        self.next_offset = next_offset
        self.ledger = PartitionLedger(partition)
        self.ledger.watermark = watermark
        self.at = OffsetSet()
        self.last_read: Witness | None = None
        self.damage: LedgerDamaged | None = None
        self.compared = 0
        self.renewed: list[Witness] = []
        self.lost_reason = ""

    def at_provider(self) -> OffsetSet:
        return self.at

    async def check_witness(self, _reader: Any, _start: int, _end: int) -> None:
        self.compared += 1
        if self.damage is not None:
            raise self.damage

    def renew_witness(self, witness: Witness) -> None:
        self.renewed.append(witness)

    def lose(self, reason: str) -> None:
        self.is_live, self.lost_reason = False, reason


def task(partition: int, watermark: int, next_offset: int) -> Any:
    """A live partition."""
    return Life(partition, watermark, next_offset)


def watch(
    telemetry: RecordingTelemetry,
    tasks: Mapping[int, Any],
    rows: Mapping[int, int],
    days: float | None,
    headroom_min_s: float = 0.0,
) -> Any:
    """A watch on these partitions with so many days of retention."""
    clock: Any = SimpleNamespace(now=lambda: NOW)
    kafka: Any = None
    store: Any = Rows(rows)
    retention_s = None if days is None else days * DAY_S
    return InputWatch(kafka, "requests", tasks, store, clock, telemetry, retention_s, headroom_min_s)


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


async def test_rows_that_no_provider_has_are_given_up_in_time() -> None:
    """Below the least headroom the partition's life ends, and the next is asked to give up what is a quarter more near."""
    rows = {10: NOW_MS - 2 * DAY_MS, 11: NOW_MS - 2 * DAY_MS + 3_600_000}
    late = task(0, 10, 60)
    late.at = OffsetSet([10])  # it is older, but a provider has it
    watched = watch(RecordingTelemetry(), {0: late}, rows, 2, headroom_min_s=7_200)
    await watched.look(Log(0))
    assert not late.is_live
    assert "3600 s" in late.lost_reason
    assert watched.retire_before_ms == {0: NOW_MS - 2 * DAY_MS + 9_000_000}


async def test_what_is_at_a_provider_is_not_given_up() -> None:
    """A row that may still be answered waits for its answer, whatever happens to its record; 0 gives nothing up."""
    rows = {10: NOW_MS - 2 * DAY_MS, 11: NOW_MS - 3_600_000}
    sent = task(0, 10, 60)
    sent.at = OffsetSet([10])
    watched = watch(RecordingTelemetry(), {0: sent}, rows, 2, headroom_min_s=7_200)
    await watched.look(Log(0))
    waits = task(0, 10, 60)
    patient = watch(RecordingTelemetry(), {0: waits}, rows, 2, headroom_min_s=0)
    await patient.look(Log(0))
    assert sent.is_live
    assert waits.is_live
    assert not watched.retire_before_ms
    assert not patient.retire_before_ms


async def test_a_log_that_goes_back_ends_the_partition_s_life() -> None:
    """An end or a start below the one seen before is another topic's, or a lost end: the next life finds out."""
    for ends in ((0, 99), (4, 100)):
        one, log = task(0, 10, 60), Log(0)
        log.ends = (5, 100)
        watched = watch(RecordingTelemetry(), {0: one}, {10: NOW_MS}, 7)
        await watched.look(log)
        assert one.is_live
        log.ends = ends
        await watched.look(log)
        assert not one.is_live
        assert f"{ends[0]}..{ends[1]}" in one.lost_reason


async def test_a_witness_that_is_not_there_ends_the_partition_s_life() -> None:
    """Another record under the remembered offset: the life ends, and what it has read since vouches for nothing."""
    one = task(0, 10, 60)
    one.last_read = Witness(59, NOW_MS, 10, 1)
    one.damage = LedgerDamaged(0, "another record stands there", "use a new group")
    await watch(RecordingTelemetry(), {0: one}, {10: NOW_MS}, 7).look(Log(0))
    assert one.lost_reason == "another record stands there"
    assert one.renewed == []


async def test_witnesses_are_compared_in_turn_and_moved_along() -> None:
    """At most ten in one look, each once a minute; a later record takes over once the present one has been compared."""
    tasks = {partition: task(partition, 10, 60) for partition in range(15)}
    newest = Witness(59, NOW_MS, 10, 1)
    tasks[0].last_read = newest
    watched, log = watch(RecordingTelemetry(), tasks, {10: NOW_MS}, 7), Log(0)
    await watched.look(log)
    assert sum(one.compared for one in tasks.values()) == 10
    assert tasks[0].renewed == [newest]
    await watched.look(log)
    await watched.look(log)
    assert [one.compared for one in tasks.values()] == [1] * 15
