"""The settle queue of a partition: what is waited for, and how much is kept."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from engine_kit import LOT, Harbour, lot

from batchferry.domain.errors import PartitionLost
from batchferry.domain.ledger import LotState
from batchferry.domain.offsets import OffsetSet
from batchferry.engine.partition import QUEUED_CHUNKS, RECORD_FRAME_BYTES, Settlement
from batchferry.ports import OutRecord


def outcome(offset: int, deadline_ms: int = 0, value: bytes = b"") -> Settlement:
    """An outcome of one record."""
    return Settlement(offset, OutRecord("outcomes", str(offset).encode(), value), deadline_ms)


async def test_a_flush_waits_only_for_what_was_queued_before(tmp_path: Path) -> None:
    """Outcomes queued after the call, even more urgent ones, neither delay it nor overtake it."""
    async with Harbour(tmp_path) as harbour:
        task = await harbour.task(settles=False, chunk_rows=2, max_delay_s=3600.0)
        producer = harbour.log.producers[0]
        before = len(producer.transactions)
        await task.settle([outcome(offset, deadline_ms=1_000) for offset in range(4)])
        flushed = asyncio.create_task(task.flush())
        await asyncio.sleep(0)
        await task.settle([outcome(offset, deadline_ms=1) for offset in range(10, 13)])
        harbour.settle(task)
        await flushed
        assert [producer.offsets(number) for number in (before, before + 1)] == [[0, 1], [2, 3]]
        # The one that does not fill a transaction waits for its delay, and is not hurried by a flush long over.
        await asyncio.wait_for(task.flush(), 5)
        assert sorted(producer.offsets(before + 2) + producer.offsets(before + 3)) == [10, 11, 12]


async def test_a_flush_also_waits_for_the_transaction_under_way(tmp_path: Path) -> None:
    """An outcome that has left the queue is not committed yet."""
    async with Harbour(tmp_path) as harbour:
        task = await harbour.task()
        producer = harbour.log.producers[0]
        producer.asked = asyncio.Semaphore(0)
        producer.gate.clear()
        await task.settle([outcome(1)])
        await producer.asked.acquire()
        flushed = asyncio.create_task(task.flush())
        await asyncio.sleep(0)
        assert not flushed.done()
        producer.gate.set()
        await flushed
        assert task.ledger.is_settled(1)


async def test_a_flush_of_a_partition_that_is_lost_says_so(tmp_path: Path) -> None:
    """Nothing is waited for that can no longer come."""
    async with Harbour(tmp_path) as harbour:
        task = await harbour.task()
        harbour.log.producers[0].is_fenced = True
        await task.settle([outcome(1)])
        with pytest.raises(PartitionLost):
            await task.flush()


async def test_the_queue_is_bounded_by_bytes(tmp_path: Path) -> None:
    """Whoever brings outcomes waits while four transactions' worth is queued; one too large for that still goes."""
    chunk_bytes = 10_000
    async with Harbour(tmp_path) as harbour:
        task = await harbour.task(settles=False, chunk_bytes=chunk_bytes)
        value = b"x" * (2 * chunk_bytes)
        bringing = asyncio.create_task(task.settle([outcome(offset, value=value) for offset in range(20)]))
        await asyncio.sleep(0)
        assert not bringing.done()
        assert task.queued_rows == QUEUED_CHUNKS * chunk_bytes // (len(value) + RECORD_FRAME_BYTES) + 1
        harbour.settle(task)
        await bringing
        await task.flush()
        assert all(task.ledger.is_settled(offset) for offset in range(20))
        await task.settle([outcome(30, value=b"x" * (9 * chunk_bytes))])
        await task.flush()


async def test_who_waits_for_room_learns_that_the_partition_is_lost(tmp_path: Path) -> None:
    """The wait for room ends with the partition."""
    async with Harbour(tmp_path) as harbour:
        task = await harbour.task(settles=False, queue_rows=1)
        bringing = asyncio.create_task(task.settle([outcome(1), outcome(2)]))
        await asyncio.sleep(0)
        task.lose("moved")
        with pytest.raises(PartitionLost):
            await bringing


async def test_settling_ends_with_a_partition_that_was_lost_before_it_began(tmp_path: Path) -> None:
    """It does not wait for work that nobody brings any more."""
    async with Harbour(tmp_path) as harbour:
        task = await harbour.task(settles=False)
        task.lose("moved")
        await asyncio.wait_for(task.run_settling(), 5)


async def test_the_refresh_of_an_idle_partition_commits_its_offset(tmp_path: Path) -> None:
    """The watermark has not moved, and is committed to the group all the same: brokers forget old offsets."""
    async with Harbour(tmp_path) as harbour:
        task = await harbour.task()
        await task.settle([outcome(0)])
        await task.flush()
        producer: Any = harbour.log.producers[0]
        producer.last_transaction_at -= 60.0
        await task.confirm_ownership(30.0)
        records, committed = producer.transactions[-1]
        assert (len(records), committed) == (1, 1)
        transactions = len(producer.transactions)
        await task.confirm_ownership(30.0)
        assert len(producer.transactions) == transactions
        await harbour.hold(lot(LotState.WAITING, [5]))
        assert producer.transactions[-1][1] is None


async def test_a_cancelled_caller_does_not_cut_its_transaction_short(tmp_path: Path) -> None:
    """The transaction is finished and applied behind its back; the partition keeps its life."""
    async with Harbour(tmp_path) as harbour:
        task = await harbour.task()
        producer = harbour.log.producers[0]
        producer.gate.clear()
        producer.asked = asyncio.Semaphore(0)
        caller = asyncio.create_task(task.commit(lambda _: [lot(LotState.WAITING, [1, 2])]))
        await producer.asked.acquire()
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        assert caller.cancelled()
        producer.gate.set()
        await task.commit(lambda _: [])
        assert task.is_live
        assert task.ledger.held_by(LOT) == OffsetSet([1, 2])
