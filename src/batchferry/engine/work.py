"""What the machine's effects do: upload, record, create, look up, poll, cancel, land, clean up.

Every method answers with an event. Each says why doing it twice is harmless, or how twice is prevented.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial

from batchferry.config import Settings
from batchferry.domain import machine as m
from batchferry.domain.batchkey import BatchKey
from batchferry.domain.errors import KafkaUnavailable, PartitionLost, StoreUnavailable
from batchferry.domain.ids import BatchId, FileId, LotId, ProviderBatchId, batch_file_name, new_batch_id
from batchferry.domain.ledger import GONE, QUARTER_HOUR_S, UNCERTAIN, Lane, LedgerEntry, Lot, LotState
from batchferry.domain.offsets import OffsetSet
from batchferry.domain.partition import PartitionLedger
from batchferry.domain.provider import BatchSnapshot, CallFailed, CallFailure, ProviderStatus
from batchferry.engine.admission import Admission, Held, TooLarge
from batchferry.engine.failpoints import Failpoint, reach
from batchferry.engine.fates import PACK_ROWS, PACK_TOKENS, waiting_lot
from batchferry.engine.fleet import FleetView
from batchferry.engine.holds import Holds
from batchferry.engine.landing import FileFacts, Landing, LandingMemory
from batchferry.engine.metered import tell_failed_call
from batchferry.engine.outcomes import OutcomeWriter
from batchferry.engine.partition import PartitionTask
from batchferry.engine.scheduler import Due, PollScheduler
from batchferry.engine.sealed import BatchFile, SealedBatch, remaining
from batchferry.engine.slots import Slots
from batchferry.ports import BatchProvider, Clock, LocalStore, OutRecord, SpoolRef, Telemetry

ROOM_LOOK_S = 0.5
"""Real seconds between two looks whether another batch may go."""
LEADER_PATIENCE_S = 120.0
"""After so long any owner cancels in the leader's place."""
FENCE_AGE_S = 30.0
"""What is done once a batch follows a transaction of our own partition at most this old (real seconds)."""
MAX_LOOKUP_PAGES = 100
MAX_TWINS_TOLD = 16
"""Second batches of one create that are kept on record; a gateway repeats a create a few times, not often."""
COMPARED_BATCHES = 3
"""Batches of an account that are asked for before one of them is taken for deleted."""
COMPARE_PAUSE_S = 300.0
"""Between two such comparisons while none of them is found."""
LOOKUP_SLACK_S = 600.0
"""The provider's clock may differ: a listing is read so far back beyond the batch's own time."""
NO_PLACE = "in_flight"
"""Why a batch waits that finds as many at the providers as there may be."""
HELD = "held"
"""Why the machine hands rows on when a hold stands."""
STORE_PAUSE_S = 5.0
LATE_LOOK_S = 60.0
"""Service-clock seconds between two looks for rows that a waiting batch would bring home too late."""
CREATE_RESERVE_S = 1.0
"""A create is not started with less than this left of its time to live (real seconds)."""


LateRows = Callable[[PartitionTask, OffsetSet, BatchKey], Awaitable[OffsetSet]]
"""Rows that no batch which leaves now brings home in time, and for which the sync lane has just given room."""


@dataclass(slots=True)
class BatchContext:
    """What one batch's effects share: the sealed rows before they are recorded, and what readings found."""

    sealed: SealedBatch | None
    """None when the batch was restored from its lots."""
    account: str
    recorded_at: float = 0.0
    """Real seconds from before the SUBMITTING transactions: a create may only start within its time to live."""
    resolve_not_before: float = 0.0
    """Real seconds before which a restored batch must not be judged: its creator may still be at it."""
    looked_up_at: datetime | None = None
    """When it was first asked whether the batch was created: what was made well after that is somebody else's."""
    is_admitted: bool = False
    """It has a place among the batches in flight, which its state may not show yet."""
    recorded: set[int] = field(default_factory=set)
    """Partitions whose SUBMITTING record of this process went through."""
    twins: tuple[ProviderBatchId, ...] = ()
    """Second batches that a look-up has counted: written beside the id, so that no sweep counts them again."""
    is_uncertain: bool = False
    """The provider's batch was found by its time and its number of rows alone. Who adopts another replica's find, or
    takes a lot over, learns it from the lots (``BatchWork._is_uncertain``)."""
    not_ours: set[ProviderBatchId] = field(default_factory=set)
    """Batches that were taken for this one, and whose lines were others'."""
    gone: set[ProviderBatchId] = field(default_factory=set)
    """Batches that were ours, and are not there any more."""
    missed: dict[ProviderBatchId, datetime] = field(default_factory=dict)
    """Since when the provider has denied, at every look-up, a batch that another lot of this one names."""
    memory: LandingMemory = field(default_factory=LandingMemory)
    cut: dict[str, int] = field(default_factory=dict)
    """What smaller batches of its rows may hold: there was no room (or no money) for so much, or it was too large."""
    late: dict[int, OffsetSet] = field(default_factory=dict)
    """Rows that this batch would bring home too late: they go on through the sync lane."""
    looked_late_at_s: float | None = None
    """Service-clock seconds of the last look for such rows."""


class BatchWork:
    """Runs effects for every batch of this process."""

    def __init__(
        self,
        settings: Settings,
        providers: Mapping[str, BatchProvider],
        tasks: Mapping[int, PartitionTask],
        store: LocalStore,
        clock: Clock,
        telemetry: Telemetry,
        fleet: FleetView,
        holds: Holds,
        landing: Landing,
        outcomes: OutcomeWriter,
        scheduler: PollScheduler,
        new_batch: Callable[[SealedBatch], None],
        in_flight: Callable[[], int],
        admission: Admission,
        late_rows: LateRows,
        files: FileFacts,
    ) -> None:
        self._files = files
        self._settings = settings
        self._limits = settings.limits
        self._providers = providers
        self._tasks = tasks
        self._store = store
        self._clock = clock
        self._telemetry = telemetry
        self._fleet = fleet
        self._holds = holds
        self._landing = landing
        self._outcomes = outcomes
        self._scheduler = scheduler
        self._new_batch = new_batch
        self._in_flight = in_flight
        self._admission = admission
        self._late_rows = late_rows
        self._taken: dict[BatchId, ProviderBatchId] = {}
        """What look-ups have found and no ledger names yet."""
        self._line = asyncio.Lock()
        """Batches that wait for a place stand in line here; the first in it looks, the others cost nothing."""
        self.uploads = Slots(settings.limits.max_uploads)

    # -------------------------------------------------------------------------------------------- dispatch

    async def run(self, context: BatchContext, batch: m.Batch, effect: m.Effect) -> m.Event | None:
        """Carry one effect out; see each method for what it answers."""
        provider = self._providers[context.account]
        match effect:
            case m.Admit():
                return await self._admit(context, batch)
            case m.UploadInput():
                return await self._upload(context, batch, provider)
            case m.RecordSubmitting():
                return await self._record_submitting(context, effect.file_id)
            case m.CreateBatch():
                return await self._create(context, batch, effect.file_id, provider)
            case m.OfferAgain():
                return m.RecreateDue()
            case m.LookUpBatch():
                return await self._look_up(context, batch, provider, is_final=effect.is_final)
            case m.DeleteInput():
                return await self._delete_input(batch, provider)
            case m.RecordSubmitted():
                return await self._record_submitted(context, batch, effect.snapshot)
            case m.HandRowsOn():
                return await self._hand_rows_on(context, batch, effect)
            case m.PollAt():
                return await self._poll_at(context, batch, effect.at, provider)
            case m.CancelBatch():
                return await self._cancel(context, batch, effect, provider)
            case m.LandResults():
                return await self._land(context, batch, effect, provider)
            case m.DisownBatch():
                return await self._disown(context, batch, effect.provider_batch_id, provider)
            case m.CleanUp():
                return await self._clean_up(batch, provider)
            case m.WarnSlow():
                self._telemetry.event(
                    "batch_waiting_long", batch_id=batch.batch_id, state=effect.state.value, age_s=round(effect.age_s)
                )
                return None
            case m.Hold():
                if effect.scope == "account":
                    await self._holds.place_account(batch.key, effect.reason)
                else:
                    await self._holds.place_key(batch.key, effect.reason)
                return None
            case _:
                raise NotImplementedError(type(effect).__name__)

    def _is_uncertain(self, context: BatchContext, batch: m.Batch, provider_batch_id: ProviderBatchId) -> bool:
        """Whether this provider batch was only taken for ours, by this process or by whoever had a lot before."""
        if not context.is_uncertain:
            lot_id = LotId(batch.batch_id)
            own = [task.ledger.lots[lot_id] for task in self._tasks.values() if lot_id in task.ledger.lots]
            context.is_uncertain = any(
                provider_batch_id in lot.provider_batch_ids and bool(lot.extra.get(UNCERTAIN))
                for lot in (*own, *self._fleet.lots_of(batch.batch_id).values())
            )
        return context.is_uncertain

    def own_lots(self, batch_id: BatchId) -> dict[int, tuple[PartitionTask, Lot]]:
        """The lots of a batch in partitions this process owns now, not yet DONE."""
        own = {}
        for partition, task in self._tasks.items():
            lot = task.ledger.lots.get(LotId(batch_id)) if task.is_live else None
            if lot is not None and lot.is_at_provider:
                own[partition] = (task, lot)
        return own

    # ------------------------------------------------------------------------------------------ submission

    async def _admit(self, context: BatchContext, batch: m.Batch) -> m.Event:
        sealed = context.sealed
        assert sealed is not None
        context.is_admitted = False  # it may have come back, and must not stand in its own way
        await self._fleet.ready()  # holds stand there
        turn: asyncio.Future[object] = asyncio.ensure_future(self._line.acquire())
        told = ""
        try:
            while True:
                if not sealed.is_whole:
                    return m.InputUnusable()
                if self._holds.standing(batch.key) or await self._is_late(context, sealed):
                    return m.HeldBack()
                if not turn.done():
                    await asyncio.wait({turn}, timeout=ROOM_LOOK_S)
                    continue
                reason = NO_PLACE
                if self._in_flight() < self._limits.max_batches_in_flight:
                    reason = "probe"
                    if self._holds.may_probe(batch.key, batch.batch_id):
                        verdict = await self._admission.verdict(batch.batch_id, batch.key, sealed.rows, sealed.tokens)
                        if verdict is None:
                            context.is_admitted = True
                            return m.Admitted()
                        if isinstance(verdict, TooLarge):
                            context.cut[PACK_TOKENS] = verdict.max_tokens
                            return m.HeldBack()
                        if isinstance(verdict, Held):
                            return m.HeldBack()
                        reason = verdict.reason
                if told != reason:
                    told = reason
                    self._telemetry.event("batch_admission_waits", batch_id=batch.batch_id, reason=reason)
                if reason == NO_PLACE:  # those behind it would fare no better, and the first in line stays the first
                    await asyncio.sleep(ROOM_LOOK_S)
                    continue
                # Others may have room where this one has none (another model, another account).
                self._line.release()
                turn = asyncio.get_running_loop().create_future()
                await asyncio.sleep(ROOM_LOOK_S)
                turn = asyncio.ensure_future(self._line.acquire())
        finally:
            if turn.done() and not turn.cancelled():
                self._line.release()
            else:
                turn.cancel()

    async def _is_late(self, context: BatchContext, sealed: SealedBatch) -> bool:
        """Whether rows of the batch would come home too late and may go another way; notes them."""
        now = self._clock.now()
        window_s = self._settings.accounts[sealed.key.account].window_s
        late_s = now.timestamp() + window_s + self._settings.rescue_lead_s
        earliest = min((min(part.due) for part in sealed.parts.values() if part.due), default=None)
        if earliest is None or earliest * QUARTER_HOUR_S > late_s:
            return False
        now_s = self._clock.monotonic()
        if context.looked_late_at_s is not None and now_s - context.looked_late_at_s < LATE_LOOK_S:
            return False
        context.looked_late_at_s = now_s
        with contextlib.suppress(KafkaUnavailable, StoreUnavailable):
            for partition, part in sealed.parts.items():
                late = await self._late_rows(part.task, part.offsets, sealed.key)
                if late:
                    context.late[partition] = late
        return bool(context.late)

    async def _upload(self, context: BatchContext, batch: m.Batch, provider: BatchProvider) -> m.Event:
        """Twice leaves a second file at the provider, which expires by itself."""
        sealed = context.sealed
        assert sealed is not None
        if not sealed.is_whole:
            return m.InputUnusable()
        if provider.is_inline:
            return m.InputUploaded(m.INLINE)
        leader = sealed.parts[sealed.partitions[0]].task.ledger_id
        try:
            source = BatchFile(self._store, provider, sealed)
        except PartitionLost:
            return m.InputUnusable()
        account = self._settings.accounts[context.account]
        async with self.uploads:
            started, started_at = asyncio.get_running_loop().time(), self._clock.now()
            reach(Failpoint.UPLOAD_BEFORE)
            try:
                answer = await provider.upload(
                    source,
                    batch_file_name(leader, batch.batch_id),
                    None if account.file_expiry_s is None else round(account.file_expiry_s),
                )
            except StoreUnavailable:
                return m.UploadFailed(CallFailed("upload", CallFailure.UNAVAILABLE, retry_after_s=STORE_PAUSE_S))
            except PartitionLost:  # its segments went with the partition
                return m.InputUnusable()
        reach(Failpoint.UPLOAD_AFTER)
        if isinstance(answer, CallFailed):
            tell_failed_call(self._telemetry, context.account, answer)
            return m.UploadFailed(answer)
        self._telemetry.event(
            "batch_uploaded",
            batch_id=batch.batch_id,
            bytes=answer.size_bytes,
            file_id=answer.file_id,
            sha256=source.sha256,
            duration_s=round(asyncio.get_running_loop().time() - started, 3),
        )
        self._telemetry.batch_span(
            "batch upload",
            {
                "batch_id": batch.batch_id,
                "account": context.account,
                "endpoint": batch.key.endpoint,
                "model": batch.key.model,
                "rows": batch.rows,
                "bytes": answer.size_bytes,
                "started_at": started_at,
                "ended_at": self._clock.now(),
            },
        )
        self._files.note(answer.file_id, answer.size_bytes, source.sha256)
        return m.InputUploaded(answer.file_id)

    async def _record_submitting(self, context: BatchContext, file_id: FileId) -> m.Event:
        """A state, so twice is once. It is also the fence check: a partition that moved makes it fail."""
        sealed = context.sealed
        assert sealed is not None
        context.recorded_at = asyncio.get_running_loop().time()
        ttl_s = self._settings.submit_ttl_s(context.account)
        for partition in sealed.partitions:
            task = sealed.parts[partition].task
            lot = sealed.lot(partition, input_file_id=file_id, submit_ttl_s=ttl_s)
            late: list[int] = []

            def plan(ledger: PartitionLedger, lot: Lot = lot, late: list[int] = late) -> list[LedgerEntry]:
                late.extend(lot.offsets - ledger.unsettled(lot.offsets))
                return [] if late and lot.lot_id not in ledger.lots else ledger.plan_submitting(lot)

            try:
                await task.commit(plan, purpose="submitting")
            except PartitionLost:
                return m.SubmittingRefused()
            if late and LotId(sealed.batch_id) not in task.ledger.lots:
                # A success of an earlier submission came in while these rows were packed: without it they go again.
                return m.SubmittingRefused()
            context.recorded.add(partition)
        if not sealed.is_whole:
            return m.SubmittingRefused()
        if not await self._admission.confirm(sealed.batch_id, sealed.key):
            self._telemetry.event("batch_stepped_back", batch_id=sealed.batch_id, rows=sealed.rows)
            return m.SubmittingRefused()
        return m.SubmittingRecorded()

    async def _create(self, context: BatchContext, batch: m.Batch, file_id: FileId, provider: BatchProvider) -> m.Event:
        """The one call that must not run twice: it starts only while our SUBMITTING records are fresh."""
        sealed = context.sealed
        assert sealed is not None
        loop = asyncio.get_running_loop()
        left_s = context.recorded_at + self._settings.submit_ttl_s(context.account) - loop.time()
        if left_s < CREATE_RESERVE_S:
            return m.CreateNotSent()
        leader = sealed.parts[sealed.partitions[0]].task.ledger_id
        metadata = {"batch_id": batch.batch_id, "ledger_id": leader}
        key = batch.key
        source, size_bytes = BatchFile(self._store, provider, sealed), 0
        started = loop.time()
        reach(Failpoint.CREATE_BEFORE)
        try:
            async with asyncio.timeout(left_s):
                if provider.is_inline:
                    size_bytes = source.size_bytes
                    answer = await provider.create_inline(source, key.endpoint, key.model)
                else:
                    answer = await provider.create(file_id, key.endpoint, key.completion_window, metadata, key.model)
        except (PartitionLost, StoreUnavailable):
            # Its rows went while they were read: perhaps not a byte was sent, perhaps all but the last.
            answer = CallFailed("create", CallFailure.UNANSWERED)
        except TimeoutError:
            answer = CallFailed("create", CallFailure.UNANSWERED)
        reach(Failpoint.CREATE_AFTER)
        if isinstance(answer, BatchSnapshot):
            if provider.is_inline:
                self._telemetry.event(
                    "batch_uploaded",
                    batch_id=batch.batch_id,
                    bytes=size_bytes,
                    file_id=answer.provider_batch_id,
                    sha256=source.sha256,
                    duration_s=round(loop.time() - started, 3),
                )
            return m.CreateAccepted(answer)
        tell_failed_call(self._telemetry, context.account, answer)
        if answer.kind is CallFailure.UNAVAILABLE:
            return m.CreateNotSent()
        if answer.is_definite:
            self._telemetry.event(
                "batch_refused",
                batch_id=batch.batch_id,
                account=context.account,
                kind=answer.kind.value,
                http_status=answer.http_status,
                code=answer.code,
                request_id=answer.request_id,
            )
            return m.CreateRefused(answer)
        self._telemetry.event("batch_submission_unknown", batch_id=batch.batch_id)
        return m.CreateUnanswered(answer)

    async def _record_submitted(self, context: BatchContext, batch: m.Batch, snapshot: BatchSnapshot) -> m.Event | None:
        """A state, so twice is once. A partition that moved learns the id from its siblings' records."""
        is_recorded = await self._record_id(context, batch, snapshot)
        self._taken.pop(batch.batch_id, None)
        if is_recorded:
            self._telemetry.event(
                "batch_submitted",
                batch_id=batch.batch_id,
                provider_batch_id=snapshot.provider_batch_id,
                rows=batch.rows,
                account=context.account,
            )
        sealed, context.sealed = context.sealed, None
        if sealed is not None:
            self._drop_segments(sealed.refs)
        return m.SubmittedRecorded()

    async def _record_id(self, context: BatchContext, batch: m.Batch, snapshot: BatchSnapshot) -> bool:
        """Write the provider's id in every lot of ours that lacks it; whether one did."""
        recorded = False
        if snapshot.provider_batch_id in context.not_ours:
            return False  # meanwhile its lines have told
        is_uncertain = self._is_uncertain(context, batch, snapshot.provider_batch_id)
        given_back = context.not_ours | context.gone
        for partition, (task, lot) in self.own_lots(batch.batch_id).items():
            if lot.state is LotState.SUBMITTED and not _may_be_renamed(lot, snapshot.provider_batch_id, given_back):
                continue
            told = [self._outcomes.submitted_event(partition, lot, snapshot)]

            def plan(ledger: PartitionLedger, lot: Lot = lot, told: list[OutRecord] = told) -> list[LedgerEntry]:
                ids = (snapshot.provider_batch_id, *context.twins)
                entries = _plan_submitted(
                    lot, ids, snapshot.created_at or self._clock.now(), ledger, is_uncertain=is_uncertain
                )
                if not entries:
                    told.clear()  # somebody was first, and has told it
                return entries

            try:
                recorded = bool(await task.commit(plan, told, purpose="submitted")) or recorded
            except PartitionLost:
                continue
        return recorded

    def _drop_segments(self, refs: Iterable[SpoolRef]) -> None:
        """A file that the disk does not let go is no reason to set a batch aside: the next start wipes the folder."""
        try:
            self._store.delete_segments(refs)
        except StoreUnavailable as error:
            self._telemetry.event("store_unavailable", what="segments", error=type(error).__name__)

    async def _hand_rows_on(self, context: BatchContext, batch: m.Batch, effect: m.HandRowsOn) -> m.Event:
        """Dissolve: recorded lots become waiting lots; rows no record names leave again under a new batch id."""
        is_search = batch.state is m.BatchState.SUBMISSION_UNKNOWN
        if is_search and self._knows_better(context, batch):
            return m.LookUpFailed()
        if effect.hold == "account":
            await self._holds.place_account(batch.key, effect.reason)
        elif effect.hold == "key":
            await self._holds.place_key(batch.key, effect.reason)
        if effect.halve:
            context.cut[PACK_ROWS] = batch.rows // 2
        recorded: set[int] = set()
        own = self.own_lots(batch.batch_id)
        if is_search:  # before the rows go: a process that ends in between counts them twice rather than not at all
            self._count_second_runs(context, batch, [lot for _, lot in own.values()])
        for partition, (task, lot) in own.items():
            recorded.add(partition)
            if effect.refused_row is not None and effect.failure is not None:
                await self._landing.fail_row(task, lot, effect.refused_row + 1, effect.failure)

            def plan(ledger: PartitionLedger, task: PartitionTask = task, lot: Lot = lot) -> list[LedgerEntry]:
                if lot.lot_id not in ledger.lots:
                    return []
                rows = ledger.held_by(lot.lot_id)
                if not rows:
                    return ledger.plan_dissolve(lot.lot_id, [])
                heir = waiting_lot(task, ledger, [lot], rows, {}, self._clock, 0.0, is_held=bool(effect.hold))
                return ledger.plan_dissolve(lot.lot_id, [replace(heir, extra={**heir.extra, **context.cut})])

            try:
                await task.commit(plan, purpose="dissolve")
            except PartitionLost:
                continue
        self._telemetry.event("batch_dissolved", batch_id=batch.batch_id, reason=effect.reason, rows=batch.rows)
        sealed = context.sealed
        if sealed is not None and (effect.reason == HELD or effect.halve):
            await self._park(context, sealed)
            recorded.update(sealed.partitions)
        if sealed is not None:
            now = self._clock.now()
            rest = remaining(sealed, new_batch_id(now.timestamp()), recorded | context.recorded, now)
            if rest is not None:
                self._new_batch(rest)  # before anything that may fail: nothing else names these rows
            context.sealed = None
            kept = set() if rest is None else set(rest.refs)
            self._drop_segments([ref for ref in sealed.refs if ref not in kept])
        lot_id = LotId(batch.batch_id)
        lots = [task.ledger.lots[lot_id] for task in self._tasks.values() if lot_id in task.ledger.lots]
        if is_search and any(lot.state is LotState.DONE for lot in lots):
            return m.Disowned(is_over=True)  # read before the batch went: theirs is only the cleaning up
        return m.RowsHandedOn()

    def _knows_better(self, context: BatchContext, batch: m.Batch) -> bool:
        """Whether a lot that came while the batch was looked for names one that has not been asked for."""
        return any(
            lot.provider_batch_ids and lot.provider_batch_ids[0] not in self._given_back(context, batch)
            for _, lot in self.own_lots(batch.batch_id).values()
        )

    def _given_back(self, context: BatchContext, batch: m.Batch) -> set[ProviderBatchId]:
        """Provider batches that are not to be taken for this one: other people's, and what is not there any more."""
        own = self.own_lots(batch.batch_id).values()
        return context.not_ours.union(context.gone, *(lot.gone for _, lot in own))

    def _count_second_runs(self, context: BatchContext, batch: m.Batch, lots: Iterable[Lot]) -> None:
        """Say of rows that go again after a search in vain what a batch that may exist, or did, costs."""
        own = [lot for lot in lots if lot.own_rows]
        if batch.input_file_id is None or batch.is_inline:
            # There was no file to delete: a create of another life of the service may still go through.
            rows, reason = sum(lot.own_rows for lot in own), "input_file_not_deleted"
        else:
            rows, reason = sum(lot.own_rows for lot in own if context.gone or lot.gone), "batch_gone"
        if rows:
            self._possibly_paid_twice(batch, rows, reason)

    async def _park(self, context: BatchContext, sealed: SealedBatch) -> None:
        """Keep the rows of a batch that may not go as waiting lots: a few bytes in the ledger, nothing on the disk.

        Rows that came out of waiting lots simply go back into them; those that are late go on to the sync lane.
        """
        is_held = bool(self._holds.standing(sealed.key))
        for partition, part in sealed.parts.items():
            task = part.task
            pattern = sealed.lot(partition)
            late = context.late.get(partition, OffsetSet())

            def plan(
                ledger: PartitionLedger, task: PartitionTask = task, pattern: Lot = pattern, late: OffsetSet = late
            ) -> list[LedgerEntry]:
                rows = ledger.unsettled(pattern.offsets)
                heirs = []
                for_lane = rows & late
                if for_lane:
                    heirs.append(waiting_lot(task, ledger, [pattern], for_lane, {}, self._clock, 0.0, Lane.SYNC))
                rest = rows - late - ledger.held()
                if rest:
                    heir = waiting_lot(task, ledger, [pattern], rest, {}, self._clock, 0.0, is_held=is_held)
                    heirs.append(replace(heir, extra={**heir.extra, **context.cut}))
                if context.cut:
                    heirs += self._cut_down(ledger, task, rows - late, context.cut)
                return ledger.plan_settle(OffsetSet(), self._clock.now(), heirs) if heirs else []

            with contextlib.suppress(PartitionLost):
                await task.commit(plan, purpose="hold")
            for lot_id, packed in list(task.packed_rows.items()):
                task.packed_rows[lot_id] = packed - part.offsets

    def _cut_down(
        self, ledger: PartitionLedger, task: PartitionTask, rows: OffsetSet, cut: Mapping[str, int]
    ) -> list[Lot]:
        """Heirs of rows that came out of waiting lots: they would be packed as large again."""
        heirs = []
        for lot_id, lot in task.waiting_lots(Lane.BATCH).items():
            mine = ledger.held_by(lot_id) & rows
            if mine and any(lot.extra.get(name) != most for name, most in cut.items()):
                heir = waiting_lot(task, ledger, [lot], mine, {}, self._clock, 0.0)
                heirs.append(replace(heir, extra={**heir.extra, **cut}))
        return heirs

    # ---------------------------------------------------------------------------------------- was it created?

    async def _look_up(
        self, context: BatchContext, batch: m.Batch, provider: BatchProvider, *, is_final: bool
    ) -> m.Event:
        """Reading only, so twice is harmless."""
        loop = asyncio.get_running_loop()
        wait_s = context.resolve_not_before - loop.time()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        context.looked_up_at = context.looked_up_at or self._clock.now()
        try:
            await self._fleet.catch_up()
        except KafkaUnavailable:
            return m.LookUpFailed()
        given_back = self._given_back(context, batch)
        # What somebody knows goes before what somebody has only taken for his own.
        for lot in sorted(self._fleet.lots_of(batch.batch_id).values(), key=lambda one: bool(one.extra.get(UNCERTAIN))):
            if lot.provider_batch_ids and lot.provider_batch_ids[0] not in given_back:
                answer = await provider.retrieve(lot.provider_batch_ids[0])
                if isinstance(answer, BatchSnapshot):
                    context.missed.clear()
                    context.is_uncertain = bool(lot.extra.get(UNCERTAIN))
                    return self._adopted(batch, answer, "sibling")
                tell_failed_call(self._telemetry, context.account, answer)
                if not self._has_gone(context, batch, lot, answer):
                    return m.LookUpFailed(answer)
                given_back.add(lot.provider_batch_ids[0])
        found = await self._list_ours(context, batch, provider)
        if isinstance(found, CallFailed):
            tell_failed_call(self._telemetry, context.account, found)
            return m.LookUpFailed(found)
        if not found:
            return m.BatchNotFound(is_final=is_final)
        found.sort(key=partial(_age, batch))
        own = self.own_lots(batch.batch_id)
        if provider.is_inline:
            # Only their lines can tell whose they are: that is seen when they are read.
            claimed = self._claimed(batch)
            found = sorted(found, key=lambda one: one.provider_batch_id in claimed)[:1]
            context.is_uncertain = True
        canonical, *twins = found
        if twins and min(batch.partitions) in own:
            context.twins = tuple(twin.provider_batch_id for twin in twins[:MAX_TWINS_TOLD])
            for twin in twins:
                self._telemetry.event(
                    "batch_twin_cancelled", batch_id=batch.batch_id, provider_batch_id=twin.provider_batch_id
                )
                if twin.status is not ProviderStatus.FAILED:  # of a file that was refused as a whole nothing ran
                    self._possibly_paid_twice(batch, batch.rows, "twin")
                if not twin.status.is_terminal:
                    await provider.cancel(twin.provider_batch_id)
        return self._adopted(batch, canonical, "list")

    def _has_gone(self, context: BatchContext, batch: m.Batch, lot: Lot, answer: CallFailed) -> bool:
        """Whether the batch that another lot names has not been there for so long that it never will be again.

        Its owner finds that out as well, unless he has landed: then his lot names the batch for ever.
        """
        named, now = lot.provider_batch_ids[0], self._clock.now()
        if answer.kind is not CallFailure.NOT_FOUND:
            context.missed.pop(named, None)
            return False
        if now < context.missed.setdefault(named, now) + timedelta(seconds=m.GONE_GRACE_S):
            return False
        self._give_back(context, batch, named, is_ours=not lot.extra.get(UNCERTAIN))
        return True

    def _give_back(
        self, context: BatchContext, batch: m.Batch, provider_batch_id: ProviderBatchId, *, is_ours: bool
    ) -> None:
        (context.gone if is_ours else context.not_ours).add(provider_batch_id)
        self._telemetry.event(
            "batch_gone" if is_ours else "batch_not_ours",
            batch_id=batch.batch_id,
            provider_batch_id=provider_batch_id,
        )

    async def _disown(
        self, context: BatchContext, batch: m.Batch, provider_batch_id: ProviderBatchId, provider: BatchProvider
    ) -> m.Event:
        """A state, so twice is once. Lots that name another batch keep it: the look-up that follows asks for it."""
        is_gone = not self._is_uncertain(context, batch, provider_batch_id)
        if is_gone:
            back = await self._back_in_sight(context, batch, provider_batch_id, provider)
            if back is not None:
                return m.BatchFound(back)
        self._give_back(context, batch, provider_batch_id, is_ours=is_gone)
        context.is_uncertain, context.twins, context.memory = False, (), LandingMemory()
        self._taken.pop(batch.batch_id, None)
        for task, lot in self.own_lots(batch.batch_id).values():
            plan = partial(_plan_disown, lot.lot_id, provider_batch_id, is_gone=is_gone)
            with contextlib.suppress(PartitionLost):
                await task.commit(plan, purpose="disown")
        return m.Disowned(is_over=not self.own_lots(batch.batch_id))

    async def _back_in_sight(
        self, context: BatchContext, batch: m.Batch, provider_batch_id: ProviderBatchId, provider: BatchProvider
    ) -> BatchSnapshot | None:
        """Wait while the account shows not one of its batches: then its key is another project's, and none is gone.

        None: others are there, there is no other to compare with, or a whole window has passed since.
        """
        until, is_told = self._clock.now() + timedelta(seconds=batch.window_s), False
        while True:
            others = self._under_way(context, batch, provider_batch_id)
            if not others:
                return None
            for other in others[:COMPARED_BATCHES]:
                if isinstance(await provider.retrieve(other), BatchSnapshot):
                    return None
            again = await provider.retrieve(provider_batch_id)
            if isinstance(again, BatchSnapshot):
                return again
            if self._clock.now() >= until:
                return None
            if not is_told:
                is_told = True
                with contextlib.suppress(KafkaUnavailable):
                    await self._holds.alarm("batches_not_found", batch.batch_id, batch.key, rows=batch.rows)
            await self._clock.sleep(COMPARE_PAUSE_S)

    def _under_way(
        self, context: BatchContext, batch: m.Batch, provider_batch_id: ProviderBatchId
    ) -> list[ProviderBatchId]:
        """Other batches of the account that must be at the provider, the latest first."""
        lots = [
            lot
            for lot in self._other_lots(batch)
            if lot.is_at_provider and lot.provider_batch_ids and lot.key.account == context.account
        ]
        lots.sort(key=lambda lot: lot.submitted_at or lot.created_at, reverse=True)
        named = dict.fromkeys(lot.provider_batch_ids[0] for lot in lots)
        return [one for one in named if one != provider_batch_id and one not in context.gone]

    def _possibly_paid_twice(self, batch: m.Batch, rows: int, reason: str) -> None:
        self._telemetry.count("possibly_paid_twice_rows", rows)
        self._telemetry.event("possibly_paid_twice", batch_id=batch.batch_id, rows=rows, reason=reason)

    def _adopted(self, batch: m.Batch, snapshot: BatchSnapshot, by: str) -> m.Event:
        self._taken[batch.batch_id] = snapshot.provider_batch_id
        self._telemetry.event(
            "batch_adopted", batch_id=batch.batch_id, provider_batch_id=snapshot.provider_batch_id, found_by=by
        )
        return m.BatchFound(snapshot)

    async def _list_ours(
        self, context: BatchContext, batch: m.Batch, provider: BatchProvider
    ) -> list[BatchSnapshot] | CallFailed:
        found: list[BatchSnapshot] = []
        oldest = batch.sealed_at - timedelta(seconds=LOOKUP_SLACK_S)
        cursor: str | None = None
        for _ in range(MAX_LOOKUP_PAGES):
            page = await provider.list_batches(cursor)
            if isinstance(page, CallFailed):
                return page
            found.extend(one for one in page.batches if self._is_ours(context, batch, one))
            reached = any(one.created_at is not None and one.created_at < oldest for one in page.batches)
            if reached or page.next_cursor is None:
                return found
            if page.next_cursor == cursor:
                break
            cursor = page.next_cursor
        # The listing was not read to its end: what it showed is there, what it did not show may be as well.
        return found or CallFailed("list", CallFailure.UNAVAILABLE)

    def _is_ours(self, context: BatchContext, batch: m.Batch, snapshot: BatchSnapshot) -> bool:
        """By the input file first: a file belongs to one batch id; metadata is lost by some gateways.

        A batch that was created inline has neither: what was made in its time, has its number of rows and is not known
        for another's is taken for it, until its lines say whose it is.
        """
        if not batch.is_inline:
            if batch.input_file_id is not None and snapshot.input_file_id == batch.input_file_id:
                return True
            return snapshot.metadata.get("batch_id") == batch.batch_id
        made = snapshot.created_at
        if made is None or snapshot.counts.total != batch.rows or snapshot.provider_batch_id in context.not_ours:
            return False
        since, slack = batch.sealed_at, timedelta(seconds=LOOKUP_SLACK_S)
        if not since - slack <= made <= (context.looked_up_at or self._clock.now()) + slack:
            return False
        return not any(
            snapshot.provider_batch_id in lot.provider_batch_ids
            # Who only took it for his own may be wrong; who has read it to the end was right.
            and not (lot.extra.get(UNCERTAIN) and lot.is_at_provider)
            for lot in self._other_lots(batch)
        )

    def _other_lots(self, batch: m.Batch) -> Iterator[Lot]:
        for ledger in self._fleet.ledgers().values():
            yield from (lot for lot in ledger.lots.values() if lot.lot_id != LotId(batch.batch_id))

    def _claimed(self, batch: m.Batch) -> set[ProviderBatchId]:
        """Batches that others have taken for theirs: left to them while there is one that nobody wants."""
        taken = {found for batch_id, found in self._taken.items() if batch_id != batch.batch_id}
        return taken.union(*(lot.provider_batch_ids for lot in self._other_lots(batch)))

    def _tell_deleted(self, batch_id: BatchId, file_id: FileId) -> None:
        size_bytes, sha256 = self._files.of(file_id)
        self._telemetry.event(
            "provider_file_deleted", batch_id=batch_id, file_id=file_id, bytes=size_bytes, sha256=sha256
        )

    async def _delete_input(self, batch: m.Batch, provider: BatchProvider) -> m.Event:
        """A deleted file stays deleted. Until the provider confirms it, absence of the batch proves nothing."""
        if batch.input_file_id is None or batch.is_inline:
            return m.InputDeleted()
        reach(Failpoint.DELETE_INPUT_BEFORE)
        failure = await provider.delete_file(batch.input_file_id)
        reach(Failpoint.DELETE_INPUT_AFTER)
        if failure is None:
            self._tell_deleted(batch.batch_id, batch.input_file_id)
        if failure is not None and batch.state is not m.BatchState.SUBMISSION_UNKNOWN:  # there it is tried again
            self._telemetry.event(
                "provider_file_left",
                batch_id=batch.batch_id,
                file_id=batch.input_file_id,
                reason=failure.kind.value,
            )
        return m.InputDeleted() if failure is None else m.InputNotDeleted(failure)

    # ------------------------------------------------------------------------------------------- on the water

    async def _poll_at(
        self, context: BatchContext, batch: m.Batch, at: datetime, provider: BatchProvider
    ) -> m.Event | None:
        """Reading only. A batch restored from a lot without the provider's id finds it elsewhere, or asks again."""
        if batch.state is m.BatchState.SUBMISSION_UNKNOWN:
            return None  # given back since this was wanted
        provider_batch_id = batch.provider_batch_id or self._known_id(batch)
        if provider_batch_id is None:
            try:
                await self._fleet.catch_up()
            except KafkaUnavailable:
                return m.PollFailed(CallFailed("ledger", CallFailure.UNAVAILABLE))
            provider_batch_id = self._known_id(batch)
        if provider_batch_id is None:
            # Without a name of ours on it only a look-up takes a batch for ours, which says that it may be wrong.
            found = [] if provider.is_inline else await self._list_ours(context, batch, provider)
            if isinstance(found, CallFailed):
                tell_failed_call(self._telemetry, context.account, found)
                return m.PollFailed(found)
            if not found:
                return m.PollFailed(CallFailed("list", CallFailure.NOT_FOUND))
            provider_batch_id = min(found, key=partial(_age, batch)).provider_batch_id
        self._scheduler.schedule(Due(batch.batch_id, context.account, provider_batch_id), at)
        return None

    def _known_id(self, batch: m.Batch) -> ProviderBatchId | None:
        """The provider's id as any lot of the batch has it, ours first."""
        lot_id = LotId(batch.batch_id)
        ours = [task.ledger.lots[lot_id] for task in self._tasks.values() if lot_id in task.ledger.lots]
        lots = [*ours, *self._fleet.lots_of(batch.batch_id).values()]
        return next((lot.provider_batch_ids[0] for lot in lots if lot.provider_batch_ids), None)

    async def _cancel(
        self, context: BatchContext, batch: m.Batch, effect: m.CancelBatch, provider: BatchProvider
    ) -> m.Event | None:
        """Cancelling twice is harmless at every provider."""
        if batch.provider_batch_id is None:
            return None
        if self._is_uncertain(context, batch, batch.provider_batch_id):
            self._telemetry.event("batch_cancel_withheld", batch_id=batch.batch_id, reason=effect.reason)
            return m.CancelFailed(CallFailed("cancel", CallFailure.CONFLICT))
        if effect.reason == m.WINDOW_PASSED:
            self._telemetry.event(
                "batch_window_exceeded",
                batch_id=batch.batch_id,
                provider_batch_id=batch.provider_batch_id,
                age_s=round((self._clock.now() - (batch.submitted_at or batch.sealed_at)).total_seconds()),
            )
        leader = self._tasks.get(min(batch.partitions))
        if leader is None or not leader.is_live:
            await self._clock.sleep(LEADER_PATIENCE_S)
        else:
            try:
                await leader.confirm_ownership(FENCE_AGE_S)
            except PartitionLost:
                return None  # the new leader, or another owner, does it
        self._telemetry.event("batch_cancel_sent", batch_id=batch.batch_id, reason=effect.reason)
        reach(Failpoint.CANCEL_BEFORE)
        answer = await provider.cancel(batch.provider_batch_id)
        reach(Failpoint.CANCEL_AFTER)
        return m.CancelFailed(answer) if isinstance(answer, CallFailed) else m.CancelAnswered(answer)

    # ---------------------------------------------------------------------------------------------- home again

    async def _land(
        self, context: BatchContext, batch: m.Batch, effect: m.LandResults, provider: BatchProvider
    ) -> m.Event:
        await self._record_id(context, batch, effect.snapshot)  # a lot that came late would else end without it
        provider_batch_id = effect.snapshot.provider_batch_id
        given_back = context.not_ours | context.gone
        # One that came while that was written waits for the next reading: it would end under another batch's name.
        own = {
            partition: (task, lot)
            for partition, (task, lot) in self.own_lots(batch.batch_id).items()
            if lot.state is LotState.SUBMITTED and not _may_be_renamed(lot, provider_batch_id, given_back)
        }
        try:
            event = await self._landing.land(
                batch.batch_id,
                own,
                effect,
                provider,
                context.memory,
                self._fleet.lots_of(batch.batch_id),
                {p: one.header.ledger_id for p, one in self._fleet.ledgers().items() if one.header is not None},
                is_uncertain=self._is_uncertain(context, batch, provider_batch_id),
            )
        except KafkaUnavailable:
            return m.ResultsUnavailable(CallFailed("input", CallFailure.UNAVAILABLE))
        except StoreUnavailable:
            return m.ResultsUnavailable(CallFailed("disk", CallFailure.UNAVAILABLE, retry_after_s=STORE_PAUSE_S))
        if isinstance(event, m.ResultsIncomplete) and not self.own_lots(batch.batch_id):
            return m.ResultsRead()  # the last partition of ours has moved on, or is DONE
        if isinstance(event, m.ResultsRead) and self.own_lots(batch.batch_id):
            return m.ResultsIncomplete("lot_gained")  # it came while the files were read
        return event

    async def _clean_up(self, batch: m.Batch, provider: BatchProvider) -> m.Event:
        """Deleting and writing CLEAN are states, so twice is once."""
        lot_id = LotId(batch.batch_id)
        mine = {
            partition: (task, task.ledger.lots[lot_id])
            for partition, task in self._tasks.items()
            if task.is_live and lot_id in task.ledger.lots
        }
        open_lots = {p: pair for p, pair in mine.items() if pair[1].state is not LotState.CLEAN}
        if not open_lots:
            return m.CleanedUp()
        if any(lot.is_at_provider for _, lot in open_lots.values()):
            return m.LotGained()  # it came while the files were read, so nobody has looked for its rows
        if any(lot.state is not LotState.DONE for _, lot in open_lots.values()):
            return m.CleanUpWaits()
        leader_partition = min(batch.partitions)
        try:
            if leader_partition in mine:
                if not await self._delete_files(batch, mine, provider):
                    return m.CleanUpWaits()
            else:
                await self._fleet.catch_up()
                leading = self._fleet.lots_of(batch.batch_id).get(leader_partition)
                if leading is not None and leading.state is not LotState.CLEAN:
                    return m.CleanUpWaits()
            for task, _ in open_lots.values():
                await task.commit(lambda ledger: ledger.plan_clean(lot_id), purpose="clean")
        except (PartitionLost, KafkaUnavailable):
            return m.CleanUpWaits()
        return m.CleanedUp()

    async def _delete_files(
        self, batch: m.Batch, mine: Mapping[int, tuple[PartitionTask, Lot]], provider: BatchProvider
    ) -> bool:
        """Whether the files are gone (or are kept on purpose); not before every owner is DONE."""
        others = [partition for partition in batch.partitions if partition not in mine]
        if others:
            await self._fleet.catch_up()
            known = self._fleet.lots_of(batch.batch_id)
            if any(p in known and known[p].state not in {LotState.DONE, LotState.CLEAN} for p in others):
                return False
        task, lot = mine[min(batch.partitions)]
        lots = [pair[1] for pair in mine.values()] + list(self._fleet.lots_of(batch.batch_id).values())
        is_kept = any(one.tally is not None and one.tally.extra.get("keep_files") for one in lots)
        if is_kept or self._settings.accounts[batch.key.account].keep_files:
            self._telemetry.event("batch_cleaned", batch_id=batch.batch_id, files=0, kept=True)
            return True
        await task.confirm_ownership(FENCE_AGE_S)
        file_ids: list[FileId | None] = [None if lot.input_file_id == m.INLINE else lot.input_file_id]
        snapshot = batch.snapshot
        known_id = self._known_id(batch) or batch.provider_batch_id
        if snapshot is not None and snapshot.provider_batch_id != known_id:
            snapshot = None  # whatever was shown last, what is deleted is what the ledger names
        if snapshot is None and known_id is not None:
            answer = await provider.retrieve(known_id)
            if isinstance(answer, CallFailed):
                if answer.kind is not CallFailure.NOT_FOUND:
                    return False
            else:
                snapshot = answer
        if snapshot is not None:
            file_ids += [snapshot.output_file_id, snapshot.error_file_id]
        reach(Failpoint.DELETE_FILES_BEFORE)
        for file_id in file_ids:
            if file_id is None:
                continue
            if await provider.delete_file(file_id) is not None:
                return False
            self._tell_deleted(batch.batch_id, file_id)
        reach(Failpoint.DELETE_FILES_AFTER)
        gone = sum(1 for file_id in file_ids if file_id is not None)
        self._telemetry.event("batch_cleaned", batch_id=batch.batch_id, files=gone, kept=False)
        return True


def _plan_disown(
    lot_id: LotId, provider_batch_id: ProviderBatchId, ledger: PartitionLedger, *, is_gone: bool
) -> list[LedgerEntry]:
    return ledger.plan_disown(lot_id, provider_batch_id, is_gone=is_gone)


def _may_be_renamed(lot: Lot, provider_batch_id: ProviderBatchId, given_back: Collection[ProviderBatchId]) -> bool:
    """Whether a lot names another provider batch than this one, and only took it for its own or has lost it.

    It came from a replica that had looked for the batch by itself. What it named must not outlive the reading of the
    true one: whatever a landed lot names is deleted.
    """
    named = lot.provider_batch_ids[:1]
    if not named or named[0] == provider_batch_id:
        return False
    return bool(lot.extra.get(UNCERTAIN)) or named[0] in given_back


def _plan_submitted(
    known: Lot,
    provider_batch_ids: tuple[ProviderBatchId, ...],
    submitted_at: datetime,
    ledger: PartitionLedger,
    *,
    is_uncertain: bool,
) -> list[LedgerEntry]:
    lot = ledger.lots.get(known.lot_id)
    # Recorded, given back or even landed while this waited for its turn?
    if lot is None or not lot.is_at_provider or lot.provider_batch_ids != known.provider_batch_ids:
        return []
    gone = [one for one in lot.gone if one not in provider_batch_ids]
    extra = {name: value for name, value in lot.extra.items() if name not in {UNCERTAIN, GONE}}
    extra |= ({UNCERTAIN: True} if is_uncertain else {}) | ({GONE: gone} if gone else {})
    return ledger.plan_submitted(
        lot.lot_id, provider_batch_ids=provider_batch_ids, submitted_at=submitted_at, extra=extra
    )


def _age(batch: m.Batch, snapshot: BatchSnapshot) -> tuple[datetime, str]:
    """The order of twins: the oldest is the one that counts."""
    return snapshot.created_at or batch.sealed_at, snapshot.provider_batch_id
