"""Rows that get another submission: how they are packed, and what becomes of those that cannot travel."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from engine_kit import HEAD, KEY, LOT, NOW, Harbour, lot

from batchferry.domain.batchkey import BatchKey
from batchferry.domain.errors import StoreUnavailable
from batchferry.domain.ids import LotId
from batchferry.domain.ledger import Lane, Lot, LotState
from batchferry.domain.offsets import OffsetSet
from batchferry.domain.rows import RowClass
from batchferry.engine.fates import HELD_S, PACK_ROWS, PACK_TOKENS, SHAPE
from batchferry.engine.partition import PartitionTask
from batchferry.engine.sealed import SealedBatch
from batchferry.engine.waiting import WaitingRows

LATER = NOW + timedelta(minutes=10)


class Quay:
    """Waiting rows, and the batches they became."""

    def __init__(self, harbour: Harbour) -> None:
        self.made: list[SealedBatch] = []
        self.held_shapes: set[str] = set()
        self.looked_at: list[str] = []
        self.rows = WaitingRows(
            harbour.tasks, harbour.store, harbour.clock, harbour.telemetry, harbour.router, harbour.source,
            harbour.outcomes, self.made.append, self.is_held, self.move_late,
        )  # fmt: skip

    def is_held(self, _key: BatchKey, shape: str) -> bool:
        """Whether a hold stands: on a kind of prompt, if any."""
        return shape in self.held_shapes

    async def move_late(self, _task: PartitionTask, lot: Lot) -> bool:
        """Nothing is late; which lots were looked at is noted."""
        self.looked_at.append(lot.lot_id)
        return False

    async def packed(self) -> list[list[int]]:
        """The rows of each batch once nothing more is packed."""
        for _ in range(20):
            before = len(self.made)
            await self.rows.pack_due()
            if len(self.made) == before:
                return [sorted(one for part in batch.parts.values() for one in part.offsets) for batch in self.made]
        pytest.fail("packing does not end")


async def test_a_lot_larger_than_the_limits_leaves_in_several_batches(tmp_path: Path) -> None:
    """The rows themselves close a batch: what they weigh in the file, its line heads included, is what counts."""
    async with Harbour(tmp_path) as harbour:
        await harbour.task()
        for offset in range(5):
            harbour.log.put(offset)
        body = json.loads(harbour.log.records[0, 0].value)["body"]
        row_bytes = len(json.dumps(body)) + 1 + len(HEAD)
        limits = harbour.router.for_key(KEY)
        assert limits is not None
        object.__setattr__(limits.limits, "max_bytes", 2 * row_bytes + len(HEAD) // 2)
        await harbour.hold(lot(LotState.WAITING, range(5), own_bytes=1))
        quay = Quay(harbour)
        harbour.router.for_key = lambda _key: limits  # type: ignore[method-assign]
        assert await quay.packed() == [[0, 1], [2, 3], [4]]
        assert [one.bytes for one in quay.made] == [2 * row_bytes, 2 * row_bytes, row_bytes]
        assert harbour.log.readers == 0, "a reading that was broken off still runs"


async def test_embedding_inputs_and_tokens_are_limits_of_a_repacked_batch_too(tmp_path: Path) -> None:
    """A batch of retried rows obeys every limit that a fresh one obeys."""
    async with Harbour(tmp_path) as harbour:
        await harbour.task()
        key = KEY._replace(endpoint="/v1/embeddings", model="text-embedding-3-small")
        for offset in range(4):
            body = {"model": key.model, "input": ["a", "b", "c"]}
            value = {"custom_id": f"c{offset}", "url": key.endpoint, "body": body}
            harbour.log.put(offset, value=json.dumps(value).encode())
        await harbour.hold(lot(LotState.WAITING, range(4), key=key))
        routed: Any = harbour.router.for_key(key)
        object.__setattr__(routed.limits, "max_inputs", 7)
        harbour.router.for_key = lambda _key: routed  # type: ignore[method-assign]
        assert await Quay(harbour).packed() == [[0, 1], [2, 3]]


async def test_lots_that_were_too_many_tokens_together_stay_apart(tmp_path: Path) -> None:
    """A lot says how many tokens a batch of its rows may hold; one row goes in any case."""
    async with Harbour(tmp_path) as harbour:
        await harbour.task()
        for offset in range(6):
            harbour.log.put(offset)
        await harbour.hold(lot(LotState.WAITING, range(4), extra={PACK_TOKENS: 40}))
        await harbour.hold(lot(LotState.WAITING, [4, 5], lot_id=LotId("B2"), extra={PACK_TOKENS: 1}))
        quay = Quay(harbour)
        rows = await quay.packed()
        assert sorted(offset for one in rows for offset in one) == list(range(6))
        assert [one for one in rows if max(one) >= 4] == [[4], [5]]
        assert all(one.tokens <= 40 for one in quay.made)
        assert max(one.rows for one in quay.made) > 1


async def test_rows_that_have_left_are_not_packed_again_and_the_rest_is(tmp_path: Path) -> None:
    """What is in a sealed batch waits for its ledger record; a row a batch had no room for is not forgotten."""
    async with Harbour(tmp_path) as harbour:
        task = await harbour.task()
        for offset in range(3):
            harbour.log.put(offset)
        await harbour.hold(lot(LotState.WAITING, range(3), extra={PACK_TOKENS: 1}))
        quay = Quay(harbour)
        assert await quay.packed() == [[0], [1], [2]]
        sent = quay.made[0].lot(0)
        await task.commit(lambda ledger: ledger.plan_submitting(sent))
        assert len(await quay.packed()) == 3
        assert task.packed_rows[LOT] == OffsetSet(range(3))


async def test_a_record_that_todays_rules_refuse_is_a_failure_that_names_the_rule(tmp_path: Path) -> None:
    """It is still in the log, so it is not called deleted; the deleted one beside it is."""
    async with Harbour(tmp_path) as harbour:
        task = await harbour.task()
        harbour.log.put(0)
        harbour.log.put(1, value=b'{"custom_id": "c1", "body": {"model": "gpt-4o-mini", "stream": true}}')
        await harbour.hold(lot(LotState.WAITING, [0, 1, 2]))
        assert await Quay(harbour).packed() == [[0]]
        failures = harbour.failures()
        assert {offset: one["error"]["class"] for offset, one in failures.items()} == {
            1: RowClass.BAD_RECORD.value,
            2: RowClass.RETENTION.value,
        }
        assert failures[1]["custom_id"] == "c1"
        (told,) = harbour.telemetry.named("record_refused")
        assert told["offset"] == 1
        assert harbour.telemetry.total("input_lost_records") == 1
        assert task.ledger.held_by(LOT) == OffsetSet([0])


async def test_an_account_that_is_gone_is_told_once_and_its_rows_wait(tmp_path: Path) -> None:
    """Rows of an account that the settings lack go nowhere, and the others do."""
    async with Harbour(tmp_path) as harbour:
        await harbour.task()
        harbour.log.put(0)
        harbour.log.put(1)
        gone = KEY._replace(account="old")
        await harbour.hold(lot(LotState.WAITING, [0], lot_id=LotId("B0"), key=gone))
        await harbour.hold(lot(LotState.WAITING, [1]))
        assert await Quay(harbour).packed() == [[1]]
        assert harbour.telemetry.named("account_unknown") == [{"batch_id": "B0", "account": "old"}]


async def test_the_segment_of_a_partition_that_died_is_deleted(tmp_path: Path) -> None:
    """What was spooled for a partition that is lost meanwhile leaves the disk, and the others travel."""
    async with Harbour(tmp_path) as harbour:
        await harbour.task(0)
        dying = await harbour.task(1)
        for partition in (0, 1):
            harbour.log.put(7, partition=partition)
            await harbour.hold(lot(LotState.WAITING, [7], partition, lot_id=LotId(f"B{partition}")))
        close = harbour.store.close_segment

        async def close_and_die(key: Any, partition: int) -> Any:
            if partition == 1:
                dying.lose("moved")
            return await close(key, partition)

        harbour.store.close_segment = close_and_die  # type: ignore[method-assign]
        quay = Quay(harbour)
        await quay.rows.pack_due()
        (made,) = quay.made
        assert made.partitions == (0,)
        sizes = harbour.store.line_sizes(made.refs, {0: OffsetSet([7])})
        assert harbour.store.spooled_bytes == sum(sizes.values()) > 0


async def test_a_disk_that_keeps_a_segment_does_not_stop_the_packing(tmp_path: Path) -> None:
    """Segments that cannot be deleted are told by nobody's death; the rows are packed when the disk takes them."""
    async with Harbour(tmp_path) as harbour:
        await harbour.task()
        harbour.log.put(0)
        await harbour.hold(lot(LotState.WAITING, [0]))
        append = harbour.store.append

        def refuse(*_: object) -> None:
            raise StoreUnavailable("full")

        harbour.store.append = refuse  # type: ignore[method-assign]
        delete, harbour.store.delete_segments = harbour.store.delete_segments, refuse  # type: ignore[method-assign]
        quay = Quay(harbour)
        await quay.rows.pack_due()
        assert not quay.made
        harbour.store.append, harbour.store.delete_segments = append, delete  # type: ignore[method-assign]
        assert await quay.packed() == [[0]]


async def test_the_index_knows_a_record_that_todays_rules_refuse(tmp_path: Path) -> None:
    """An answer to a request whose route is gone still carries the request's key, id and headers."""
    async with Harbour(tmp_path) as harbour:
        await harbour.task()
        harbour.log.put(1, value=b'{"custom_id": "c1", "body": {"model": "gpt-4o-mini", "stream": true}}')
        assert await harbour.source.index(0, OffsetSet([1, 2])) == OffsetSet([2])
        row = (await harbour.store.get_rows(0, [1]))[1]
        assert (row.custom_id, row.key, row.headers) == ("c1", b"k1", (("trace", b"t"),))
        assert row.t0_ms == row.deadline_ms == round(NOW.timestamp() * 1000) - 60_000


async def test_rows_of_a_held_kind_of_prompt_stay_and_those_beside_them_go(tmp_path: Path) -> None:
    """Only lots that wait for a verdict carry their shape; when it is lifted they go like all others."""
    async with Harbour(tmp_path) as harbour:
        await harbour.task()
        for offset in range(4):
            harbour.log.put(offset)
        await harbour.hold(lot(LotState.WAITING, [0, 1], extra={SHAPE: "f00d"}))
        await harbour.hold(lot(LotState.WAITING, [2, 3], lot_id=LotId("B2")))
        quay = Quay(harbour)
        quay.held_shapes.add("f00d")
        assert await quay.packed() == [[2, 3]]
        quay.held_shapes.clear()
        assert await quay.packed() == [[2, 3], [0, 1]]


async def test_rows_that_are_late_are_offered_to_the_lane_before_they_are_packed(tmp_path: Path) -> None:
    """Every due lot is looked at first; rows that it loses then are in no batch."""
    async with Harbour(tmp_path) as harbour:
        task = await harbour.task()
        for offset in range(3):
            harbour.log.put(offset)
        await harbour.hold(lot(LotState.WAITING, range(3)))
        quay = Quay(harbour)

        async def move(_task: PartitionTask, waiting: Lot) -> bool:
            if waiting.lot_id == LOT and 1 in task.ledger.held_by(LOT):
                heir = lot(LotState.WAITING, [1], lot_id=LotId("S1"), lane=Lane.SYNC, submission=2)
                await task.commit(lambda ledger: ledger.plan_settle(OffsetSet(), NOW, [heir]))
            return True

        quay.rows._move_late = move
        assert await quay.packed() == [[0, 2]]
        assert list(task.waiting_lots(Lane.SYNC)) == ["S1"]


async def test_a_row_grows_old_only_while_nothing_holds_it(tmp_path: Path) -> None:
    """Eight days after it was sent a row is given up, unless two of them were spent in holds, which its batch knows."""
    async with Harbour(tmp_path) as harbour:
        await harbour.task()
        sent_ms = round((NOW - timedelta(days=8)).timestamp() * 1000)
        for offset in (0, 1):
            harbour.log.put(offset, timestamp=sent_ms)
        await harbour.hold(lot(LotState.WAITING, [0]))
        await harbour.hold(lot(LotState.WAITING, [1], lot_id=LotId("B2"), extra={HELD_S: 2 * 86_400}, not_before=LATER))
        quay = Quay(harbour)
        assert await quay.packed() == []
        await harbour.settled()
        assert harbour.failures()[0]["error"]["class"] == "max_age"
        harbour.clock.at = LATER
        assert await quay.packed() == [[1]]
        assert quay.made[0].lot(0).extra == {HELD_S: 2 * 86_400}


async def test_a_batch_of_retried_rows_knows_when_they_are_due(tmp_path: Path) -> None:
    """Deadlines travel with the rows: without them nobody would see that a batch comes home too late."""
    async with Harbour(tmp_path) as harbour:
        await harbour.task()
        for offset in (0, 1):
            harbour.log.put(offset)
        await harbour.hold(lot(LotState.WAITING, [0], due={100: 1}))
        await harbour.hold(lot(LotState.WAITING, [1], lot_id=LotId("B2"), due={100: 1, 200: 3}))
        quay = Quay(harbour)
        assert await quay.packed() == [[0, 1]]
        assert quay.made[0].lot(0).due == {100: 2, 200: 3}


async def test_rows_of_a_batch_that_was_too_large_travel_in_smaller_ones(tmp_path: Path) -> None:
    """A lot says how many rows may travel together; lots that say nothing fill the room that is left."""
    async with Harbour(tmp_path) as harbour:
        await harbour.task()
        for offset in range(7):
            harbour.log.put(offset)
        await harbour.hold(lot(LotState.WAITING, range(5), extra={PACK_ROWS: 2}))
        await harbour.hold(lot(LotState.WAITING, [5, 6], lot_id=LotId("B2")))
        packed = await Quay(harbour).packed()
        assert sorted(offset for rows in packed for offset in rows) == list(range(7))
        assert all(len(rows) <= 2 for rows in packed if min(rows) < 5)
        assert len(packed) <= 5
