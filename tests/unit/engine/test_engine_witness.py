"""The witness of a ledger: how a partition tells that the topic under its name is no longer the one it has read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_kit import NOW, Harbour, Log, lot
from engine_kit import Reader as EmptyLedgerReader

from batchferry.domain.errors import LedgerDamaged
from batchferry.domain.ledger import Claim, LotState, Watermark, Witness, decode
from batchferry.domain.offsets import OffsetSet
from batchferry.engine.partition import PartitionPlaces, PartitionTask, SettleLimits

CLAIM = Claim("me", "0", NOW)


class Reader(EmptyLedgerReader):
    """Reads a log with these ends and, as the ledger, what a partition's producer has written."""

    def __init__(self, log: Log, ends: tuple[int, int]) -> None:
        super().__init__(log)
        self.log = log
        self.ends = ends

    async def read_to_end(self, topic: str, partition: int, _start: int | None = None) -> AsyncIterator[list[Any]]:
        for records, _ in self.log.producers[partition].transactions:
            yield [one for one in records if one.topic == topic]

    async def bounds(self, _topic: str, partitions: Sequence[int]) -> Mapping[int, tuple[int, int]]:
        return dict.fromkeys(partitions, self.ends)


def life(harbour: Harbour) -> PartitionTask:
    """A life of partition 0 that is not restored yet."""
    return PartitionTask(
        0, harbour.log, harbour.clock, harbour.telemetry, PartitionPlaces("requests", "ledger", "group"),
        SettleLimits(100, 1_000_000, 0.01, 1_000), asyncio.Semaphore(4),
    )  # fmt: skip


async def read_some(harbour: Harbour) -> PartitionTask:
    """A life that has read offset 7, and whose last transaction says so."""
    for offset in range(10):
        harbour.log.put(offset, f"question {offset}")
    task = life(harbour)
    await task.restore(Reader(harbour.log, (0, 10)), None, CLAIM)
    task.note_read(harbour.log.records[0, 7])
    await task.commit(lambda _: [lot(LotState.WAITING, [1])])
    return task


async def test_the_first_record_read_is_remembered_by_the_next_transaction(tmp_path: Path) -> None:
    """Offset, time, size and checksum stand in the ledger; no word of the record does, and later reads change nothing."""
    async with Harbour(tmp_path) as harbour:
        task = await read_some(harbour)
        task.note_read(harbour.log.records[0, 9])
        await task.commit(lambda _: [lot(LotState.WAITING, [2])])
        written = [
            record
            for records, _ in harbour.log.producers[0].transactions
            for record in records
            if record.key == b"witness"
        ]
        assert len(written) == 1
        assert b"question" not in (written[0].value or b"")
        seen = harbour.log.records[0, 7]
        assert decode(b"witness", written[0].value) == Witness.of(7, seen.timestamp, seen.key, seen.value)


async def test_the_same_topic_is_taken_over_as_ever(tmp_path: Path) -> None:
    """The witness is still there, or retention has taken it: the next life is live and remembers it."""
    async with Harbour(tmp_path) as harbour:
        first = await read_some(harbour)
        for ends in ((0, 10), (7, 8), (8, 10), (8, 8)):
            task = life(harbour)
            await task.restore(Reader(harbour.log, ends), None, CLAIM)
            assert task.is_live
            assert task.ledger.witness == first.ledger.witness


@pytest.mark.parametrize("change", ["timestamp", "value", "key", "gone", "shorter", "empty"])
async def test_a_topic_made_anew_is_refused(tmp_path: Path, change: str) -> None:
    """Another record, none, or an end at or below it: refused with topic, partition, rule and remedy."""
    async with Harbour(tmp_path) as harbour:
        await read_some(harbour)
        ends = {"shorter": (0, 7), "empty": (0, 0)}.get(change, (0, 100))
        seen = harbour.log.records[0, 7]
        if change == "gone":
            del harbour.log.records[0, 7]
        elif change == "timestamp":
            seen.timestamp += 1
        elif change in {"value", "key"}:
            setattr(seen, change, b"other")
        with pytest.raises(LedgerDamaged, match=r"requests-0: .*made anew.*topics\.group.*ledger") as caught:
            await life(harbour).restore(Reader(harbour.log, ends), None, CLAIM)
        assert "7" in caught.value.problem
        assert "question" not in str(caught.value)


async def test_a_ledger_without_a_witness_stays_readable(tmp_path: Path) -> None:
    """What an older version wrote is taken over, and gets its witness with the next record read."""
    async with Harbour(tmp_path) as harbour:
        harbour.log.put(3)
        old = life(harbour)
        await old.restore(Reader(harbour.log, (0, 4)), None, CLAIM)
        task = life(harbour)
        await task.restore(Reader(harbour.log, (0, 4)), None, CLAIM)
        assert task.ledger.witness is None
        task.note_read(harbour.log.records[0, 3])
        await task.commit(lambda _: [Watermark(0, NOW)])
        assert task.ledger.witness is not None
        assert task.ledger.witness.offset == 3


async def test_rows_about_to_be_deleted_are_set_aside(tmp_path: Path) -> None:
    """Old rows that no provider has are not read again and join no batch; one young record ends the search."""
    async with Harbour(tmp_path) as harbour:
        young_ms = round(NOW.timestamp() * 1000)
        for offset in range(10):
            harbour.log.put(offset, timestamp=young_ms - 1_000_000 + (2_000_000 if offset == 6 else 0))
        first = life(harbour)
        await first.restore(Reader(harbour.log, (0, 10)), None, CLAIM)
        waiting = lot(LotState.WAITING, [1, 8])
        sent = lot(LotState.SUBMITTED, [2, 3], lot_id="01JBBBBBBBBBBBBBBBBBBBBBBB")
        await first.commit(lambda _: [waiting, sent])
        task = life(harbour)
        facts = await task.restore(Reader(harbour.log, (0, 10)), None, CLAIM, young_ms)
        assert facts.expiring == OffsetSet([0, 1, 4, 5])
        assert task.next_offset == 6
        assert task.packed_rows == {waiting.lot_id: OffsetSet([1])}
