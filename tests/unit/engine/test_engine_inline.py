"""Batches whose rows travel in the create itself: no file, no fence, and a list that does not name us."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from engine_kit import BATCH, KEY, LOT, NOW, PLATFORM, Harbour, batch, lot, no_late_rows, shown

from batchferry.domain.ids import FileId, LotId, ProviderBatchId
from batchferry.domain.ledger import UNCERTAIN, LotState
from batchferry.domain.machine import (
    INLINE,
    BatchFound,
    BatchNotFound,
    BatchState,
    CreateRefused,
    DeleteInput,
    DisownBatch,
    Disowned,
    HandRowsOn,
    InputDeleted,
    LookUpBatch,
    MachineSettings,
    RecordSubmitted,
    transition,
)
from batchferry.domain.provider import BatchPage, CallFailed, CallFailure, ProviderStatus, RequestCounts
from batchferry.engine.landing import FileFacts, Landing
from batchferry.engine.work import BatchContext, BatchWork

RUNNING = ProviderStatus.IN_PROGRESS


def of(rows: int, minutes: float = 1.0, name: str = PLATFORM) -> Any:
    """A batch on the provider's list."""
    made = NOW + timedelta(minutes=minutes)
    snapshot = shown(RUNNING, counts=RequestCounts(rows), created_at=made, output_file_id=None)
    return replace(snapshot, provider_batch_id=ProviderBatchId(name))


class Quay:
    """The work of a harbour whose provider takes rows inline."""

    def __init__(self, harbour: Harbour) -> None:
        harbour.provider.is_inline = True
        self.harbour = harbour
        self.context = BatchContext(None, KEY.account)
        nothing: Any = None
        self.landing = Landing(
            harbour.settings, harbour.store, harbour.clock, harbour.telemetry, harbour.router, harbour.source,
            harbour.outcomes, harbour.holds, harbour.fates, harbour.admission, FileFacts(),
        )  # fmt: skip
        self.work = BatchWork(
            harbour.settings, {KEY.account: harbour.provider}, harbour.tasks, harbour.store, harbour.clock,
            harbour.telemetry, harbour.fleet, harbour.holds, self.landing, harbour.outcomes, nothing, lambda _: None,
            lambda: 0, harbour.admission, no_late_rows, FileFacts(),
        )  # fmt: skip

    async def run(self, effect: Any, state: BatchState = BatchState.SUBMISSION_UNKNOWN, **changes: Any) -> Any:
        return await self.work.run(self.context, batch(state, input_file_id=INLINE, rows=3, **changes), effect)


async def test_a_lost_create_is_known_by_its_time_and_its_rows(tmp_path: Path) -> None:
    """Of the batches on the list only one was made in its time, has as many rows, and stands in no ledger."""
    async with Harbour(tmp_path) as harbour:
        quay = Quay(harbour)
        await harbour.task()
        await harbour.hold(lot(LotState.SUBMITTING, [1, 2, 3], input_file_id=INLINE))
        recorded = lot(
            LotState.SUBMITTED, [7, 8, 9], lot_id=LotId("01JCCCCCCCCCCCCCCCCCCCCCCC"),
            provider_batch_ids=(ProviderBatchId("b-recorded"),),
        )  # fmt: skip
        await harbour.hold(recorded)
        others = (of(4, name="b-other-rows"), of(3, -60, name="b-too-old"), of(3, name="b-recorded"))
        harbour.provider.pages[None] = BatchPage(others)
        assert await quay.run(LookUpBatch()) == BatchNotFound(is_final=False)
        harbour.provider.pages[None] = BatchPage((*others, of(3)))
        assert await quay.run(LookUpBatch()) == BatchFound(of(3))


async def test_what_was_made_long_after_the_first_look_is_not_ours(tmp_path: Path) -> None:
    """A provider that was away for hours lists later batches of as many rows: our create is older than all of them."""
    async with Harbour(tmp_path) as harbour:
        quay = Quay(harbour)
        await harbour.task()
        await harbour.hold(lot(LotState.SUBMITTING, [1, 2, 3], input_file_id=INLINE))
        harbour.provider.pages[None] = CallFailed("list", CallFailure.UNAVAILABLE)
        await quay.run(LookUpBatch())
        harbour.clock.at = harbour.clock.now() + timedelta(hours=8)
        harbour.provider.pages[None] = BatchPage((of(3, 7 * 60, "b-later"),))
        assert await quay.run(LookUpBatch()) == BatchNotFound(is_final=False)


async def test_a_batch_of_others_is_given_back_and_the_search_goes_on(tmp_path: Path) -> None:
    """The lot forgets what was only taken for its own, and the next look takes another; without one, none is there."""
    async with Harbour(tmp_path) as harbour:
        quay = Quay(harbour)
        task = await harbour.task()
        await harbour.hold(lot(LotState.SUBMITTING, [1, 2, 3], input_file_id=INLINE))
        theirs, ours = of(3, 1, "b-theirs"), of(3, 2, "b-ours")
        harbour.provider.pages[None] = BatchPage((theirs, ours))
        assert await quay.run(LookUpBatch()) == BatchFound(theirs)
        await quay.run(RecordSubmitted(theirs))
        assert task.ledger.lots[LOT].extra[UNCERTAIN] is True
        assert await quay.run(DisownBatch(theirs.provider_batch_id)) == Disowned()
        forgotten = task.ledger.lots[LOT]
        assert (forgotten.state, forgotten.provider_batch_ids, dict(forgotten.extra)) == (LotState.SUBMITTING, (), {})
        assert harbour.telemetry.named("batch_not_ours")[0]["provider_batch_id"] == "b-theirs"
        assert await quay.run(LookUpBatch()) == BatchFound(ours)
        await quay.run(DisownBatch(ours.provider_batch_id))
        assert await quay.run(LookUpBatch()) == BatchNotFound(is_final=False)
        assert harbour.telemetry.total("possibly_paid_twice_rows") == 0


async def test_what_another_of_ours_has_taken_is_left_to_it_while_there_is_one_more(tmp_path: Path) -> None:
    """Two lost creates of one minute and one size: each takes a batch of its own, if there are two."""
    async with Harbour(tmp_path) as harbour:
        quay = Quay(harbour)
        await harbour.task()
        await harbour.hold(lot(LotState.SUBMITTING, [1, 2, 3], input_file_id=INLINE))
        neighbour = lot(
            LotState.SUBMITTED, [7, 8, 9], lot_id=LotId("01JCCCCCCCCCCCCCCCCCCCCCCC"), extra={UNCERTAIN: True},
            provider_batch_ids=(ProviderBatchId("b-first"),),
        )  # fmt: skip
        await harbour.hold(neighbour)
        harbour.provider.pages[None] = BatchPage((of(3, 1, "b-first"), of(3, 2, "b-second")))
        found = await quay.run(LookUpBatch())
        assert found.snapshot.provider_batch_id == "b-second"
        await quay.run(DisownBatch(ProviderBatchId("b-second")))
        found = await quay.run(LookUpBatch())
        assert found.snapshot.provider_batch_id == "b-first"


async def test_rows_of_a_batch_that_has_gone_are_counted_when_they_go_again(tmp_path: Path) -> None:
    """Somebody deleted it at the provider: what it ran is paid, and so it is said."""
    async with Harbour(tmp_path) as harbour:
        quay = Quay(harbour)
        harbour.provider.is_inline = False
        await harbour.task()
        await harbour.hold(
            lot(LotState.SUBMITTED, [1, 2, 3], input_file_id=FileId("f"), provider_batch_ids=(PLATFORM,))
        )
        named = batch(BatchState.SUBMISSION_UNKNOWN, input_file_id=FileId("f"), rows=3)
        await quay.work.run(quay.context, named, DisownBatch(PLATFORM))
        assert harbour.telemetry.named("batch_gone")[0]["provider_batch_id"] == PLATFORM
        await quay.work.run(quay.context, named, HandRowsOn("never_created"))
        assert harbour.telemetry.named("possibly_paid_twice")[0] == {
            "batch_id": BATCH, "rows": 3, "reason": "batch_gone",
        }  # fmt: skip


async def test_what_may_be_somebody_elses_is_never_cancelled(tmp_path: Path) -> None:
    """Two that fit: the older one is taken, and the other left alone, since nothing says that it is ours."""
    async with Harbour(tmp_path) as harbour:
        quay = Quay(harbour)
        await harbour.task()
        await harbour.hold(lot(LotState.SUBMITTING, [1, 2, 3], input_file_id=INLINE))
        harbour.provider.pages[None] = BatchPage((of(3, 2, "b-younger"), of(3, 1, "b-older")))
        found = await quay.run(LookUpBatch())
        assert found.snapshot.provider_batch_id == "b-older"
        assert harbour.telemetry.named("batch_twin_cancelled") == []


async def test_there_is_no_file_to_delete_and_the_allowance_is_counted(tmp_path: Path) -> None:
    """Without a fence a late create may still go through: handing the rows on is counted as perhaps paid twice."""
    async with Harbour(tmp_path) as harbour:
        quay = Quay(harbour)
        task = await harbour.task()
        await harbour.hold(lot(LotState.SUBMITTING, [1, 2, 3], input_file_id=INLINE))
        assert await quay.run(DeleteInput()) == InputDeleted()
        assert harbour.provider.gone == []
        await quay.run(HandRowsOn("never_created"))
        assert LOT not in task.ledger.lots
        assert harbour.telemetry.total("possibly_paid_twice_rows") == 3


async def test_the_row_that_a_create_was_refused_for_fails_alone(tmp_path: Path) -> None:
    """``requests.1`` names the second row: it gets its failure with the provider's words, the others go on."""
    async with Harbour(tmp_path) as harbour:
        quay = Quay(harbour)
        task = await harbour.task()
        for offset in (1, 2, 3):
            harbour.log.put(offset)
        await harbour.hold(lot(LotState.SUBMITTING, [1, 2, 3], input_file_id=INLINE))
        failure = CallFailed("create", CallFailure.REJECTED, 400, "invalid_request_error", is_definite=True, row=1)
        decided = transition(
            batch(BatchState.SUBMITTING, input_file_id=INLINE, rows=3), CreateRefused(failure), NOW, MachineSettings()
        )
        handing = decided.effects[-1]
        assert isinstance(handing, HandRowsOn)
        await quay.run(handing, BatchState.REFUSED)
        assert {offset: one["error"]["class"] for offset, one in harbour.failures().items()} == {2: "invalid_request"}
        (heir,) = task.waiting_lots().values()
        assert list(heir.offsets) == [1, 3]


def test_a_refusal_that_names_no_row_halves_an_inline_batch() -> None:
    """One of its rows is to blame and nobody says which: halves find it in a few steps. A batch of one row is held."""
    failure = CallFailed("create", CallFailure.REJECTED, 400, "invalid_request_error", is_definite=True)
    many, one = (
        transition(
            batch(BatchState.SUBMITTING, input_file_id=INLINE, rows=rows),
            CreateRefused(failure),
            NOW,
            MachineSettings(),
        )
        for rows in (8, 1)
    )
    halving = many.effects[-1]
    assert isinstance(halving, HandRowsOn)
    assert halving.halve
    assert not any(isinstance(effect, HandRowsOn) and effect.halve for effect in one.effects)
    assert many.batch.batch_id == BATCH
