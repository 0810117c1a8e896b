"""Batches whose rows travel in the create itself: no file, no fence, and a list that does not name us."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from engine_kit import BATCH, KEY, LOT, NOW, PLATFORM, Harbour, batch, lot, no_late_rows, shown

from batchferry.domain.ids import FileId, LotId, ProviderBatchId
from batchferry.domain.ledger import GONE, UNCERTAIN, LotState
from batchferry.domain.machine import (
    GONE_GRACE_S,
    INLINE,
    BatchFound,
    BatchNotFound,
    BatchState,
    CancelBatch,
    CancelFailed,
    CreateRefused,
    DeleteInput,
    DisownBatch,
    Disowned,
    HandRowsOn,
    InputDeleted,
    LandResults,
    LookUpBatch,
    LookUpFailed,
    MachineSettings,
    PollAt,
    RecordSubmitted,
    ResultsIncomplete,
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


THEIRS, TRUE = ProviderBatchId("b-theirs"), ProviderBatchId("b-true")
BOTH = (0, 1)


async def halves(harbour: Harbour, first: LotState, second: LotState, **changes: Any) -> list[Any]:
    """Two partitions of one batch; what is given as a pair differs between them."""
    tasks = []
    for partition, state in enumerate((first, second)):
        task = await harbour.task(partition)
        own = {name: one[partition] if isinstance(one, list) else one for name, one in changes.items()}
        mine = lot(state, [partition], rows=2, input_file_id=INLINE, **own)
        await task.commit(lambda _, mine=mine: [replace(mine, partitions=BOTH)])
        tasks.append(task)
    return tasks


async def test_a_lot_that_comes_with_another_find_is_given_the_name_of_what_is_read(tmp_path: Path) -> None:
    """Two replicas took two batches for the same. What a landed lot names is deleted: it must be what it was read from."""
    async with Harbour(tmp_path) as harbour:
        quay = Quay(harbour)
        tasks = await halves(
            harbour, LotState.SUBMITTING, LotState.SUBMITTED, extra=[{}, {UNCERTAIN: True}],
            provider_batch_ids=[(), (THEIRS,)],
        )  # fmt: skip
        for found, is_uncertain in ((of(2, name=TRUE), True), (of(2, name="b-other"), False)):
            quay.context.is_uncertain = is_uncertain
            if not is_uncertain:  # it is known now, and what was only taken for ours gives way
                for task in tasks:
                    await task.commit(
                        lambda ledger: [replace(ledger.lots[LOT], extra={UNCERTAIN: True})], purpose="again"
                    )
            await quay.run(RecordSubmitted(found), BatchState.VALIDATING, partitions=BOTH)
            for task in tasks:
                recorded = task.ledger.lots[LOT]
                assert recorded.provider_batch_ids == (found.provider_batch_id,)
                assert bool(recorded.extra.get(UNCERTAIN)) is is_uncertain
        await quay.run(RecordSubmitted(of(2, name=TRUE)), BatchState.VALIDATING, partitions=BOTH)
        assert tasks[0].ledger.lots[LOT].provider_batch_ids == ("b-other",), "what is certain was renamed"


async def test_what_one_lot_only_took_for_its_own_no_other_lot_is_sure_of(tmp_path: Path) -> None:
    """After a restart one lot names a batch by its looks and the other none: both must wait for its lines."""
    async with Harbour(tmp_path) as harbour:
        quay = Quay(harbour)
        tasks = await halves(
            harbour, LotState.SUBMITTED, LotState.SUBMITTING, extra=[{UNCERTAIN: True}, {}],
            provider_batch_ids=[(THEIRS,), ()],
        )  # fmt: skip
        await quay.run(RecordSubmitted(of(2, name=THEIRS)), BatchState.VALIDATING, partitions=BOTH)
        assert tasks[1].ledger.lots[LOT].extra[UNCERTAIN] is True


async def test_a_find_is_not_cancelled_before_it_is_written_down_either(tmp_path: Path) -> None:
    """The wish to cancel may be faster than the transaction that says that the batch may be somebody else's."""
    async with Harbour(tmp_path) as harbour:
        quay = Quay(harbour)
        await harbour.task()
        await harbour.hold(lot(LotState.SUBMITTING, [1, 2, 3], input_file_id=INLINE))
        harbour.provider.pages[None] = BatchPage((of(3),))
        await quay.run(LookUpBatch())
        withheld = await quay.run(CancelBatch("operator"), BatchState.CANCELLING, provider_batch_id=PLATFORM)
        assert withheld == CancelFailed(CallFailed("cancel", CallFailure.CONFLICT))
        assert len(harbour.telemetry.named("batch_cancel_withheld")) == 1


async def test_giving_a_batch_back_leaves_what_another_lot_knows(tmp_path: Path) -> None:
    """Only lots that name the batch forget it; the search then finds what the other lot names."""
    async with Harbour(tmp_path) as harbour:
        quay = Quay(harbour)
        tasks = await halves(
            harbour, LotState.SUBMITTED, LotState.SUBMITTED, extra=[{UNCERTAIN: True}, {}],
            provider_batch_ids=[(THEIRS,), (TRUE,)],
        )  # fmt: skip
        assert await quay.run(DisownBatch(THEIRS), partitions=BOTH) == Disowned()
        assert [task.ledger.lots[LOT].provider_batch_ids for task in tasks] == [(), (TRUE,)]
        harbour.provider.shown = of(2, name=TRUE)
        assert await quay.run(LookUpBatch(), partitions=BOTH) == BatchFound(of(2, name=TRUE))
        assert harbour.provider.asked == [TRUE]
        assert not quay.context.is_uncertain


async def test_a_lot_that_comes_while_its_batch_is_read_waits_for_the_next_reading(tmp_path: Path) -> None:
    """It names another batch, which nobody has read: it would end under that name, and that batch be deleted."""
    async with Harbour(tmp_path) as harbour:
        quay = Quay(harbour)
        (task, late) = await halves(
            harbour, LotState.SUBMITTED, LotState.SUBMITTED, extra=[{}, {UNCERTAIN: True}],
            provider_batch_ids=[(TRUE,), (THEIRS,)],
        )  # fmt: skip
        read: list[Any] = []

        async def land(_batch_id: Any, own: Any, *_: Any, **__: Any) -> Any:
            read.append(sorted(own))
            return ResultsIncomplete("seen")

        quay.landing.land = land  # type: ignore[method-assign]
        commit = late.commit

        async def lost(*arguments: Any, **named: Any) -> Any:
            return await commit(lambda _: []) if named.get("purpose") == "submitted" else await commit(*arguments)

        late.commit = lost
        done = of(2, name=TRUE)
        await quay.run(LandResults(done), BatchState.LANDING, partitions=BOTH, snapshot=done)
        assert read == [[0]]
        assert task.ledger.lots[LOT].provider_batch_ids == (TRUE,)


async def test_what_has_gone_is_not_forgotten_in_a_crash(tmp_path: Path) -> None:
    """The next life neither asks for it again nor hands its rows on without saying that they may have run."""
    async with Harbour(tmp_path) as harbour:
        quay = Quay(harbour)
        harbour.provider.is_inline = False
        await harbour.task()
        file = FileId("f")
        await harbour.hold(lot(LotState.SUBMITTED, [1, 2, 3], input_file_id=file, provider_batch_ids=(PLATFORM,)))
        named = batch(BatchState.SUBMISSION_UNKNOWN, input_file_id=file, rows=3)
        await quay.work.run(quay.context, named, DisownBatch(PLATFORM))
        assert harbour.tasks[0].ledger.lots[LOT].extra == {GONE: [PLATFORM]}
        next_life = BatchContext(None, KEY.account)
        assert await quay.work.run(next_life, named, LookUpBatch(is_final=True)) == BatchNotFound(is_final=True)
        assert harbour.provider.asked == []
        await quay.work.run(next_life, named, HandRowsOn("never_created"))
        assert [one["reason"] for one in harbour.telemetry.named("possibly_paid_twice")] == ["batch_gone"]


async def test_what_a_landed_sibling_names_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    """Its lot names the batch for good, and the provider denies it: after an hour of denials it has gone."""
    async with Harbour(tmp_path) as harbour:
        quay = Quay(harbour)
        tasks = await halves(
            harbour, LotState.SUBMITTING, LotState.DONE, provider_batch_ids=[(), (PLATFORM,)]
        )  # fmt: skip
        harbour.provider.shown = denied = CallFailed("retrieve", CallFailure.NOT_FOUND, http_status=404)
        assert await quay.run(LookUpBatch(), partitions=BOTH) == LookUpFailed(denied)
        harbour.clock.at = harbour.clock.now() + timedelta(seconds=GONE_GRACE_S - 1)
        harbour.provider.shown = CallFailed("retrieve", CallFailure.UNAVAILABLE)
        await quay.run(LookUpBatch(), partitions=BOTH)
        harbour.provider.shown = denied
        harbour.clock.at = harbour.clock.now() + timedelta(seconds=2)
        assert await quay.run(LookUpBatch(), partitions=BOTH) == LookUpFailed(denied), "an outage was no denial"
        harbour.clock.at = harbour.clock.now() + timedelta(seconds=GONE_GRACE_S)
        assert await quay.run(LookUpBatch(is_final=True), partitions=BOTH) == BatchNotFound(is_final=True)
        assert len(harbour.telemetry.named("batch_gone")) == 1
        # The lot that has landed is still to be cleaned up, so the batch does not end with the rows that are handed on.
        assert await quay.run(HandRowsOn("never_created"), partitions=BOTH) == Disowned(is_over=True)
        assert LOT not in tasks[0].ledger.lots
        assert tasks[1].ledger.lots[LOT].state is LotState.DONE


async def test_a_lot_that_comes_late_with_a_batch_ends_the_giving_up(tmp_path: Path) -> None:
    """Its rows are at the provider for all that is known: they are not handed on, the batch is asked for."""
    async with Harbour(tmp_path) as harbour:
        quay = Quay(harbour)
        tasks = await halves(
            harbour, LotState.SUBMITTING, LotState.SUBMITTED, provider_batch_ids=[(), (TRUE,)]
        )  # fmt: skip
        assert await quay.run(HandRowsOn("never_created"), partitions=BOTH) == LookUpFailed()
        assert [task.ledger.lots[LOT].state for task in tasks] == [LotState.SUBMITTING, LotState.SUBMITTED]
        assert harbour.telemetry.total("possibly_paid_twice_rows") == 0


async def test_the_allowance_is_counted_before_the_rows_go(tmp_path: Path) -> None:
    """A process that dies with its transaction under way has said it: twice counted is better than not at all."""
    async with Harbour(tmp_path) as harbour:
        quay = Quay(harbour)
        task = await harbour.task()
        await harbour.hold(lot(LotState.SUBMITTING, [1, 2, 3], input_file_id=INLINE))

        async def dies(*_: Any, **__: Any) -> None:
            raise RuntimeError("killed")

        task.commit = dies  # type: ignore[method-assign, assignment]
        with pytest.raises(RuntimeError):
            await quay.run(HandRowsOn("never_created"))
        assert harbour.telemetry.total("possibly_paid_twice_rows") == 3


async def test_a_poll_never_takes_a_batch_by_its_looks(tmp_path: Path) -> None:
    """Only a look-up does, which says that it may be wrong; and what was given back meanwhile is not asked for."""
    async with Harbour(tmp_path) as harbour:
        quay = Quay(harbour)
        await harbour.task()
        harbour.provider.pages[None] = BatchPage((of(3),))
        failed = await quay.run(PollAt(NOW), BatchState.VALIDATING)
        assert failed.failure == CallFailed("list", CallFailure.NOT_FOUND)
        assert await quay.run(PollAt(NOW), provider_batch_id=PLATFORM) is None


@pytest.mark.parametrize("comes_back", [True, False])
async def test_an_account_that_shows_no_batch_at_all_has_the_wrong_key(tmp_path: Path, comes_back: bool) -> None:
    """Not one of two batches is found: an alarm, and nothing goes again until one shows, or a window has passed."""
    async with Harbour(tmp_path) as harbour:
        quay = Quay(harbour)
        harbour.provider.is_inline = False
        task = await harbour.task()
        await harbour.hold(
            lot(LotState.SUBMITTED, [1, 2, 3], input_file_id=FileId("f"), provider_batch_ids=(PLATFORM,))
        )
        neighbour = lot(
            LotState.SUBMITTED, [7, 8, 9], lot_id=LotId("01JCCCCCCCCCCCCCCCCCCCCCCC"),
            provider_batch_ids=(ProviderBatchId("b-other"),),
        )  # fmt: skip
        await harbour.hold(neighbour)
        right_from = NOW + timedelta(hours=2)

        async def retrieve(asked: ProviderBatchId) -> Any:
            if comes_back and asked == PLATFORM and harbour.clock.now() >= right_from:
                return of(3)
            return CallFailed("retrieve", CallFailure.NOT_FOUND, http_status=404)

        harbour.provider.retrieve = retrieve  # type: ignore[method-assign]
        named = batch(BatchState.SUBMISSION_UNKNOWN, input_file_id=FileId("f"), rows=3)
        answer = await quay.work.run(quay.context, named, DisownBatch(PLATFORM))
        assert [one["alarm"] for one in harbour.fleet.events if one["kind"] == "alarm"] == ["batches_not_found"]
        if comes_back:
            assert answer == BatchFound(of(3))
            assert task.ledger.lots[LOT].provider_batch_ids == (PLATFORM,)
        else:
            assert answer == Disowned()
            assert harbour.clock.now() >= NOW + timedelta(seconds=named.window_s)
            assert harbour.telemetry.named("batch_gone")


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
