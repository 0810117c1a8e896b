"""What effects do where the usual way is barred: ids nobody knows, lists without an end, a disk that keeps files."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_kit import ACCOUNT, BATCH, KEY, LOT, NOW, PLATFORM, Harbour, batch, lot, no_late_rows, shown

from batchferry.domain.accumulator import SealReason
from batchferry.domain.errors import StoreUnavailable
from batchferry.domain.ids import FileId, LotId, ProviderBatchId
from batchferry.domain.ledger import Lane, Lot, LotState
from batchferry.domain.machine import (
    Admit,
    Admitted,
    BatchFound,
    BatchNotFound,
    BatchState,
    CleanedUp,
    CleanUp,
    HandRowsOn,
    HeldBack,
    LandResults,
    LookUpBatch,
    LookUpFailed,
    PollAt,
    PollFailed,
    RecordSubmitted,
    RecordSubmitting,
    ResultsRead,
    RowsHandedOn,
    SubmittedRecorded,
    SubmittingRefused,
)
from batchferry.domain.offsets import OffsetSet
from batchferry.domain.partition import PartitionLedger
from batchferry.domain.provider import BatchPage, CallFailure, ProviderStatus
from batchferry.engine import work as rooms
from batchferry.engine.fates import HELD_SINCE, PACK_TOKENS
from batchferry.engine.landing import FileFacts
from batchferry.engine.sealed import SealedBatch, SealedPart
from batchferry.engine.work import BatchContext, BatchWork


class Fleet:
    """Lots that other replicas have recorded."""

    def __init__(self) -> None:
        self.lots: dict[int, Lot] = {}

    async def ready(self) -> None:
        """All is read."""

    async def catch_up(self) -> None:
        """All is read."""

    def lots_of(self, _batch_id: str) -> Mapping[int, Lot]:
        return self.lots

    def ledgers(self) -> Mapping[int, PartitionLedger]:
        return {}


class Yard:
    """The work of a harbour, with what it schedules and starts."""

    def __init__(self, harbour: Harbour, landing: Any = None) -> None:
        self.fleet: Any = Fleet()
        self.scheduled: list[Any] = []
        self.made: list[SealedBatch] = []
        self.context = BatchContext(None, ACCOUNT)
        scheduler: Any = SimpleNamespace(schedule=lambda due, at: self.scheduled.append((due.provider_batch_id, at)))
        self.work = BatchWork(
            harbour.settings, {ACCOUNT: harbour.provider}, harbour.tasks, harbour.store, harbour.clock,
            harbour.telemetry, self.fleet, harbour.holds, landing, harbour.outcomes, scheduler, self.made.append,
            lambda: 0, harbour.admission, no_late_rows, FileFacts(),
        )  # fmt: skip

    async def run(self, state: BatchState, effect: Any, **changes: Any) -> Any:
        """Carry out an effect of the batch."""
        return await self.work.run(self.context, batch(state, **changes), effect)


def submitted(offsets: list[int], partition: int = 0, **changes: Any) -> Lot:
    """A lot whose batch has its id on record."""
    return lot(LotState.SUBMITTED, offsets, partition, provider_batch_ids=(PLATFORM,), submitted_at=NOW, **changes)


async def test_a_batch_restored_without_its_id_polls_by_the_id_of_another_lot(tmp_path: Path) -> None:
    """Our own lots are asked first, then those of the other replicas."""
    async with Harbour(tmp_path) as harbour:
        await harbour.task()
        yard = Yard(harbour)
        await harbour.hold(lot(LotState.SUBMITTING, [1]))
        yard.fleet.lots = {1: submitted([1], 1)}
        assert await yard.run(BatchState.LANDING, PollAt(NOW)) is None
        yard.fleet.lots = {}
        await harbour.task(1)
        await harbour.hold(submitted([1], 1))
        assert await yard.run(BatchState.LANDING, PollAt(NOW)) is None
        assert yard.scheduled == [(PLATFORM, NOW)] * 2


async def test_a_batch_whose_id_no_lot_has_is_looked_for_and_asked_for_again(tmp_path: Path) -> None:
    """The provider's list is searched for it; not found is an answer as of a poll, so that it is tried again."""
    async with Harbour(tmp_path) as harbour:
        await harbour.task()
        yard = Yard(harbour)
        answer = await yard.run(BatchState.LANDING, PollAt(NOW))
        assert isinstance(answer, PollFailed)
        assert answer.failure.kind is CallFailure.NOT_FOUND
        harbour.provider.pages[None] = BatchPage((shown(metadata={"batch_id": BATCH}),))
        assert await yard.run(BatchState.LANDING, PollAt(NOW)) is None
        assert yard.scheduled == [(PLATFORM, NOW)]


async def test_a_lot_that_comes_late_gets_the_providers_id_before_it_lands(tmp_path: Path) -> None:
    """A lot still SUBMITTING when its results are read does not end without the id."""
    async with Harbour(tmp_path) as harbour:
        task = await harbour.task()
        await harbour.hold(lot(LotState.SUBMITTING, [1]))
        seen: list[Lot] = []

        async def land(_batch_id: str, own: Any, *_: object, **__: object) -> ResultsRead:
            seen.extend(pair[1] for pair in own.values())
            await task.commit(lambda ledger: ledger.plan_dissolve(LOT, _heirs(ledger.held_by(LOT))))
            return ResultsRead()

        landing = SimpleNamespace(land=land)
        assert await Yard(harbour, landing).run(BatchState.LANDING, LandResults(shown())) == ResultsRead()
        assert [(one.state, one.provider_batch_ids) for one in seen] == [(LotState.SUBMITTED, (PLATFORM,))]


def _heirs(rows: OffsetSet) -> list[Lot]:
    return [lot(LotState.WAITING, list(rows), lot_id="H", submission=2)]


async def test_recording_the_id_again_tells_nothing_again(tmp_path: Path) -> None:
    """The first record tells that the batch is submitted; a restart's is silent, and so is the topic of events."""
    async with Harbour(tmp_path) as harbour:
        await harbour.task()
        await harbour.hold(lot(LotState.SUBMITTING, [1]))
        yard = Yard(harbour)
        for _ in range(2):
            assert await yard.run(BatchState.VALIDATING, RecordSubmitted(shown())) == SubmittedRecorded()
        assert len(harbour.telemetry.named("batch_submitted")) == 1
        events = harbour.settings.topics.events
        told = [one for records, _ in harbour.log.producers[0].transactions for one in records if one.topic == events]
        assert len(told) == 1


async def test_files_are_deleted_though_the_leaders_lot_lacks_the_id(tmp_path: Path) -> None:
    """A lot that is DONE without the id: the result files are found by a sibling's."""
    async with Harbour(tmp_path) as harbour:
        await harbour.task()
        done = lot(LotState.DONE, [1], partitions=(0, 1), input_file_id=FileId("in"))
        await harbour.hold(done)
        harbour.provider.shown = shown(error_file_id=FileId("errors"))
        yard = Yard(harbour)
        yard.fleet.lots = {1: lot(LotState.DONE, [1], 1, provider_batch_ids=(PLATFORM,))}
        assert await yard.run(BatchState.LANDED, CleanUp(), partitions=(0, 1)) == CleanedUp()
        assert harbour.provider.gone == ["in", "out", "errors"]


async def test_a_list_that_was_not_read_to_its_end_proves_no_absence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the last page that is read, or one that leads nowhere, the look-up has failed; a listed batch is found."""
    monkeypatch.setattr(rooms, "MAX_LOOKUP_PAGES", 3)
    async with Harbour(tmp_path) as harbour:
        await harbour.task()
        yard = Yard(harbour)
        other = shown(status=ProviderStatus.IN_PROGRESS)
        pages = harbour.provider.pages
        pages.update({None: BatchPage((other,), "1"), "1": BatchPage((other,), "2"), "2": BatchPage((other,), "3")})
        assert isinstance(await yard.run(BatchState.SUBMISSION_UNKNOWN, LookUpBatch()), LookUpFailed)
        pages["1"] = BatchPage((other,), "1")
        assert isinstance(await yard.run(BatchState.SUBMISSION_UNKNOWN, LookUpBatch()), LookUpFailed)
        pages["1"] = BatchPage((shown(created_at=NOW - timedelta(days=1)),), "2")
        assert await yard.run(BatchState.SUBMISSION_UNKNOWN, LookUpBatch()) == BatchNotFound(is_final=False)


async def test_twins_that_were_counted_are_on_record(tmp_path: Path) -> None:
    """The oldest batch of a create is recorded first, the others behind it: a sweep does not count them again."""
    async with Harbour(tmp_path) as harbour:
        await harbour.task()
        await harbour.hold(lot(LotState.SUBMITTING, [1]))
        marks = {"batch_id": BATCH}
        twin = replace(
            shown(metadata=marks, created_at=NOW + timedelta(seconds=1)), provider_batch_id=ProviderBatchId("batch_2")
        )
        harbour.provider.pages[None] = BatchPage((twin, shown(metadata=marks)))
        yard = Yard(harbour)
        found = await yard.run(BatchState.SUBMISSION_UNKNOWN, LookUpBatch())
        assert isinstance(found, BatchFound)
        assert found.snapshot.provider_batch_id == PLATFORM
        await yard.run(BatchState.VALIDATING, RecordSubmitted(found.snapshot))
        assert harbour.tasks[0].ledger.lots[LOT].provider_batch_ids == (PLATFORM, "batch_2")
        assert harbour.telemetry.total("possibly_paid_twice_rows") == 2


async def test_rows_that_no_lot_names_are_handed_on_before_the_disk_is_tidied(tmp_path: Path) -> None:
    """A file that cannot be deleted neither loses the rows nor sets the batch aside."""
    async with Harbour(tmp_path) as harbour:
        recorded, fresh = await harbour.task(0), await harbour.task(1)
        await harbour.hold(lot(LotState.SUBMITTING, [1], partitions=(0, 1)))
        yard = Yard(harbour)
        parts = {
            0: SealedPart(recorded, OffsetSet([1]), 100, 10),
            1: SealedPart(fresh, OffsetSet([2, 3]), 100, 10),
        }
        yard.context = BatchContext(SealedBatch(BATCH, KEY, SealReason.TIME, parts, (), NOW, 0), ACCOUNT)
        yard.context.recorded = {0}

        def refuse(_refs: object) -> None:
            raise StoreUnavailable("read-only")

        harbour.store.delete_segments = refuse  # type: ignore[method-assign]
        assert await yard.run(BatchState.REFUSED, HandRowsOn("partition_moved"), partitions=(0, 1)) == RowsHandedOn()
        (rest,) = yard.made
        assert {partition: part.offsets for partition, part in rest.parts.items()} == {1: OffsetSet([2, 3])}
        (waiting,) = recorded.waiting_lots().values()
        assert waiting.offsets == OffsetSet([1])
        assert harbour.telemetry.named("store_unavailable")[0]["what"] == "segments"


async def test_rows_of_a_held_batch_wait_in_the_ledger_and_not_on_the_disk(tmp_path: Path) -> None:
    """Fresh rows become a waiting lot; rows that came out of waiting lots go back into them; segments are dropped."""
    async with Harbour(tmp_path) as harbour:
        task = await harbour.task(0)
        waiting = await harbour.hold(lot(LotState.WAITING, [7, 8], lot_id=LotId("01JWWWWWWWWWWWWWWWWWWWWWWW")))
        task.packed_rows[waiting.lot_id] = OffsetSet([7, 8])
        harbour.store.append(KEY, 0, [(offset, b"line\n") for offset in (1, 2, 7, 8)])
        ref = await harbour.store.close_segment(KEY, 0)
        assert ref is not None
        yard = Yard(harbour)
        parts = {0: SealedPart(task, OffsetSet([1, 2, 7, 8]), 100, 10)}
        yard.context = BatchContext(SealedBatch(BATCH, KEY, SealReason.TIME, parts, (ref,), NOW, 0), ACCOUNT)
        assert await yard.run(BatchState.REFUSED, HandRowsOn("held")) == RowsHandedOn()
        lots = task.waiting_lots()
        assert {lot_id: task.ledger.held_by(lot_id) for lot_id in lots} == {
            waiting.lot_id: OffsetSet([7, 8]),
            next(lot_id for lot_id in lots if lot_id != waiting.lot_id): OffsetSet([1, 2]),
        }
        assert not task.packed_rows[waiting.lot_id]
        assert yard.made == []
        assert harbour.store.spooled_bytes == 0


async def test_a_row_that_a_late_success_settled_leaves_its_packed_batch(tmp_path: Path) -> None:
    """Between packing and SUBMITTING an earlier submission may still succeed: the others travel in a new file."""
    async with Harbour(tmp_path) as harbour:
        task = await harbour.task(0)
        yard = Yard(harbour)
        parts = {0: SealedPart(task, OffsetSet([3, 4, 5]), 100, 10)}
        yard.context = BatchContext(SealedBatch(BATCH, KEY, SealReason.RETRY, parts, (), NOW, 0), ACCOUNT)
        await task.commit(lambda ledger: ledger.plan_settle(OffsetSet([4]), NOW), purpose="settle")
        refused = await yard.run(BatchState.SUBMITTING, RecordSubmitting(FileId("file-1")))
        assert refused == SubmittingRefused()
        assert LOT not in task.ledger.lots
        assert await yard.run(BatchState.REFUSED, HandRowsOn("partition_moved")) == RowsHandedOn()
        (rest,) = yard.made
        assert {partition: part.offsets for partition, part in rest.parts.items()} == {0: OffsetSet([3, 5])}
        assert rest.batch_id != BATCH


# ------------------------------------------------------------------------------------------- not as it is


async def admitted(yard: Yard, task: Any, offsets: list[int], tokens: int = 1_000, **part: Any) -> Any:
    """A sealed batch of these rows, and what its wish to go is answered with."""
    sealed = SealedPart(task, OffsetSet(offsets), 100, tokens, **part)
    yard.context = BatchContext(SealedBatch(BATCH, KEY, SealReason.TIME, {0: sealed}, (), NOW, 0), ACCOUNT)
    return await yard.run(BatchState.SEALED, Admit())


async def test_a_batch_beyond_the_token_limit_goes_on_in_smaller_ones(tmp_path: Path) -> None:
    """Its rows become waiting lots that say how much may travel together; those that came out of one are cut too."""
    limits = {f"accounts.{ACCOUNT}.limits.enqueued_tokens": {KEY.model: 500}}
    async with Harbour(tmp_path, **limits) as harbour:
        task = await harbour.task()
        before = await harbour.hold(lot(LotState.WAITING, [7, 8], lot_id=LotId("01JWWWWWWWWWWWWWWWWWWWWWWW")))
        task.packed_rows[before.lot_id] = OffsetSet([7, 8])
        yard = Yard(harbour)
        assert isinstance(await admitted(yard, task, [1, 2, 7, 8]), HeldBack)
        assert await yard.run(BatchState.REFUSED, HandRowsOn("held")) == RowsHandedOn()
        waiting = task.waiting_lots().values()
        assert sorted(offset for one in waiting for offset in task.ledger.held_by(one.lot_id)) == [1, 2, 7, 8]
        assert {one.extra[PACK_TOKENS] for one in waiting if task.ledger.held_by(one.lot_id)} == {450}
        assert HELD_SINCE not in next(iter(waiting)).extra, "no hold stands: they grow older"
        assert yard.made == []


async def test_rows_that_come_home_too_late_leave_their_batch_for_the_lane(tmp_path: Path) -> None:
    """Looked for while the batch waits for its place; the others wait in the ledger for another batch."""
    async with Harbour(tmp_path) as harbour:
        task = await harbour.task()
        yard = Yard(harbour)
        asked: list[list[int]] = []

        async def late(_task: Any, offsets: OffsetSet, _key: Any) -> OffsetSet:
            asked.append(list(offsets))
            return OffsetSet([2])

        yard.work._late_rows = late
        soon = round(NOW.timestamp()) // 900 + 4 * 20
        assert isinstance(await admitted(yard, task, [1, 2], due={soon: 2}), HeldBack)
        assert asked == [[1, 2]]
        await yard.run(BatchState.REFUSED, HandRowsOn("held"))
        lanes = {one.lane: list(task.ledger.held_by(one.lot_id)) for one in task.waiting_lots().values()}
        assert lanes == {Lane.SYNC: [2], Lane.BATCH: [1]}


async def test_a_batch_that_is_in_time_asks_nobody(tmp_path: Path) -> None:
    """Only near the time a row's own deadline is looked up."""
    async with Harbour(tmp_path) as harbour:
        task = await harbour.task()
        yard = Yard(harbour)

        async def never(*_: object) -> OffsetSet:
            raise AssertionError("nothing is late")

        yard.work._late_rows = never
        later = round(NOW.timestamp()) // 900 + 4 * 29
        assert isinstance(await admitted(yard, task, [1, 2], due={later: 2}), Admitted)
        assert yard.context.is_admitted


async def test_a_batch_waits_while_another_one_tries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hold has just ended: the second batch goes once the first one's success has lifted it."""
    monkeypatch.setattr(rooms, "ROOM_LOOK_S", 0.001)
    async with Harbour(tmp_path) as harbour:
        task = await harbour.task()
        await harbour.holds.place_account(KEY, "quota")
        harbour.clock.at += timedelta(seconds=60)
        assert harbour.holds.may_probe(KEY, "01JBBBBBBBBBBBBBBBBBBBBBBB")
        yard = Yard(harbour)
        wish = asyncio.create_task(admitted(yard, task, [1]))
        async with asyncio.timeout(10):
            while not harbour.telemetry.named("batch_admission_waits"):  # noqa: ASYNC110 (one loop, no other thread)
                await asyncio.sleep(0)
            assert harbour.telemetry.named("batch_admission_waits")[0]["reason"] == "probe"
            assert not wish.done()
            await harbour.holds.probe_succeeded(KEY, "01JBBBBBBBBBBBBBBBBBBBBBBB")
            assert isinstance(await wish, Admitted)


async def test_a_batch_that_steps_back_creates_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lots are seen beside a larger sum: the record is refused, and its rows leave again."""
    monkeypatch.setattr("batchferry.engine.admission.STEP_BACK_S", 0.0)
    limits = {f"accounts.{ACCOUNT}.limits.enqueued_tokens": {KEY.model: 500}}
    async with Harbour(tmp_path, **limits) as harbour:
        task = await harbour.task()
        await harbour.hold(submitted([9], lot_id=LotId("01JAAAAAAAAAAAAAAAAAAAAAA0"), own_tokens=300))
        yard = Yard(harbour)
        sealed = SealedPart(task, OffsetSet([1, 2]), 100, 300)
        yard.context = BatchContext(SealedBatch(BATCH, KEY, SealReason.TIME, {0: sealed}, (), NOW, 0), ACCOUNT)
        assert await yard.run(BatchState.SUBMITTING, RecordSubmitting(FileId("file-1"))) == SubmittingRefused()
        assert len(harbour.telemetry.named("batch_stepped_back")) == 1
        assert await yard.run(BatchState.REFUSED, HandRowsOn("partition_moved")) == RowsHandedOn()
        (waiting,) = task.waiting_lots().values()
        assert (list(waiting.offsets), waiting.attempts) == ([1, 2], {})
