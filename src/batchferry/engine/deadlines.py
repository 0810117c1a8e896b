"""Deadlines: rows that are about to miss theirs are taken out of wherever they wait and run through the sync lane.

What is done when, is the table in ``domain.deadlines``. This looks once a second at the lots of this process:

* a batch at the provider whose rows come due (``deadline - lead - cancel time``): with enough of them it is
  cancelled, what it has finished is landed, and the rest goes on from there; fewer run beside the living batch, and so
  do all when the cancelling takes too long. The first answer wins.
* rows that wait for another batch which could not come home in time;
* without the lane, or beyond its budget, nothing is moved and the risk is announced.

A lot's earliest deadline is known by the quarter-hour from the ledger, so most lots cost one comparison; only near
that time are the rows' own deadlines looked up.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from batchferry.config import Settings
from batchferry.domain import deadlines as table
from batchferry.domain import machine as m
from batchferry.domain.batchkey import BatchKey
from batchferry.domain.envelope import EventKind
from batchferry.domain.errors import KafkaUnavailable, PartitionLost, StoreUnavailable
from batchferry.domain.ids import BatchId, LotId
from batchferry.domain.ledger import QUARTER_HOUR_S, UNCERTAIN, Lane, LedgerEntry, Lot, LotState
from batchferry.domain.offsets import OffsetSet
from batchferry.domain.partition import PartitionLedger
from batchferry.domain.rows import RowClass
from batchferry.domain.times import from_ms
from batchferry.engine.fates import AT_ONCE_ROWS, SHAPE, batches, waiting_lot
from batchferry.engine.fleet import FleetView
from batchferry.engine.holds import Holds
from batchferry.engine.outcomes import OutcomeWriter
from batchferry.engine.partition import PartitionTask
from batchferry.engine.routing import Router
from batchferry.engine.rowsource import RowSource
from batchferry.engine.synclane import SyncLane
from batchferry.ports import BatchProvider, Clock, IndexRow, LocalStore, OutRecord, Telemetry

TICK_S = 1.0
"""Real seconds between two looks."""
ROWS_AT_ONCE = 1_000
"""Index rows in memory at one time."""
AGAIN_S = 60.0
"""A lot whose rows could not be moved is looked at again after so long (service time)."""
RESCUE = "deadline"
"""Why a batch is cancelled that would bring its rows home too late."""

StateOf = Callable[[BatchId], m.BatchState | None]
Post = Callable[[BatchId, m.Event], None]


@dataclass(slots=True)
class _Seen:
    """What is known of one lot since the last look."""

    next_look_ms: float = 0.0
    announced: OffsetSet = field(default_factory=OffsetSet)
    """Rows whose deadlines have been announced as at risk."""


class Deadlines:
    """Watches the lots of this process's partitions."""

    def __init__(
        self,
        settings: Settings,
        providers: Mapping[str, BatchProvider],
        tasks: Mapping[int, PartitionTask],
        store: LocalStore,
        clock: Clock,
        telemetry: Telemetry,
        router: Router,
        source: RowSource,
        outcomes: OutcomeWriter,
        fleet: FleetView,
        holds: Holds,
        lane: SyncLane,
        state_of: StateOf,
        post: Post,
    ) -> None:
        self._settings = settings
        self._providers = providers
        self._tasks = tasks
        self._store = store
        self._clock = clock
        self._telemetry = telemetry
        self._router = router
        self._source = source
        self._outcomes = outcomes
        self._fleet = fleet
        self._holds = holds
        self._lane = lane
        self._state_of = state_of
        self._post = post
        self._seen: dict[tuple[int, LotId], _Seen] = {}

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            await self.look()

    async def look(self) -> None:
        """Once over all lots; what Kafka or the disk does not answer is looked at again next time."""
        living: set[tuple[int, LotId]] = set()
        for task in list(self._tasks.values()):
            if not task.is_live:
                continue
            for lot in list(task.ledger.lots.values()):
                if lot.state in {LotState.DONE, LotState.CLEAN} or lot.lane is Lane.SYNC:
                    continue
                living.add((task.partition, lot.lot_id))
                with contextlib.suppress(PartitionLost, KafkaUnavailable, StoreUnavailable):
                    if lot.is_at_provider:
                        await self._mind_batch(task, lot)
                    else:
                        await self.mind_waiting(task, lot)
        for gone in self._seen.keys() - living:
            del self._seen[gone]

    # -------------------------------------------------------------------------------------------- lead times

    def lead_s(self, account: str) -> float:
        """How long before a deadline its rows must be free for the lane: longer when many wait and it is slow."""
        base_s = self._settings.rescue_lead_s
        return table.rescue_lead_s(base_s, self._lane.waiting_rows, self._lane.rows_per_s(account))

    def late_before_ms(self, key: BatchKey) -> float:
        """Deadlines before this instant cannot be kept by a batch that leaves now."""
        window_s = self._settings.accounts[key.account].window_s
        return (self._clock.now().timestamp() + window_s + self._settings.rescue_lead_s) * 1000

    def _may_judge(self, key: BatchKey) -> bool:
        """Not while our clock and the provider's differ too much to act upon lateness; it is only told."""
        provider = self._providers.get(key.account)
        skew_s = None if provider is None else provider.clock_skew_s
        return skew_s is None or abs(skew_s) <= self._settings.limits.max_clock_skew_s

    # ------------------------------------------------------------------------------------- batches on the water

    async def _mind_batch(self, task: PartitionTask, lot: Lot) -> None:
        seen = self._seen.setdefault((task.partition, lot.lot_id), _Seen())
        now_ms = self._clock.now().timestamp() * 1000
        wish = self._holds.rescue_wish(BatchId(lot.lot_id))
        if wish is None and now_ms < seen.next_look_ms:
            return
        if lot.key.account not in self._settings.accounts:
            return
        lead_ms = self.lead_s(lot.key.account) * 1000
        ahead_ms = lead_ms + self._settings.cancel_s * 1000
        earliest_ms = min(lot.due, default=0) * QUARTER_HOUR_S * 1000
        if wish is None and earliest_ms - ahead_ms > now_ms:
            seen.next_look_ms = earliest_ms - ahead_ms
            return
        held = task.ledger.held_by(lot.lot_id)
        if not held:
            seen.next_look_ms = now_ms + AGAIN_S * 1000
            return
        rows = await self._rows(task, held)
        if not rows:
            seen.next_look_ms = now_ms + AGAIN_S * 1000
            return
        # A deadline that is over is not worth the full price: the batch goes on, and the miss is told at the landing.
        due = [row for row in rows if wish is not None or row.deadline_ms - ahead_ms <= now_ms < row.deadline_ms]
        if not due:
            ahead = [row.deadline_ms for row in rows if row.deadline_ms > now_ms]
            seen.next_look_ms = min(ahead) - ahead_ms if ahead else now_ms + AGAIN_S * 1000
            return
        if not self._may_rescue(lot.key):
            seen.next_look_ms = now_ms + AGAIN_S * 1000
            await self._announce(seen, task, lot, due)
            return
        await self._rescue(seen, task, lot, rows, due, now_ms, lead_ms, is_wanted=wish is not None)

    async def _rescue(
        self,
        seen: _Seen,
        task: PartitionTask,
        lot: Lot,
        rows: Sequence[IndexRow],
        due: Sequence[IndexRow],
        now_ms: float,
        lead_ms: float,
        *,
        is_wanted: bool,
    ) -> None:
        """Cancel the batch, or run its due rows beside it."""
        batch_id = BatchId(lot.lot_id)
        state = self._state_of(batch_id)
        routed = self._router.for_key(lot.key)
        share = 0.5 if routed is None else routed.route.cancel_share
        pressing = [row for row in due if row.deadline_ms - lead_ms <= now_ms]
        # Without room for its rows the batch is still the best they have: what the budget takes runs beside it.
        left_s = (max(row.deadline_ms for row in due) - now_ms) / 1000
        has_room = self._lane.room(lot.key, left_s) >= len(due)
        if lot.extra.get(UNCERTAIN):
            beside = list(due)  # what may be somebody else's is not cancelled
        elif state is m.BatchState.LANDING:
            beside = pressing  # its results are being read; most of the due rows are among them
        elif is_wanted or (has_room and table.should_cancel(len(due), len(rows), share)):
            if state in m.IN_FLIGHT - {m.BatchState.CANCELLING}:
                self._telemetry.event("batch_rescued", batch_id=batch_id, rows=len(due), how="cancel")
                self._post(batch_id, m.CancelWanted(RESCUE))
            beside = pressing  # the cancelling takes too long: the first answer wins
        else:
            beside = list(due)
        if beside and not await self._move(task, lot, beside, "rescue"):
            seen.next_look_ms = now_ms + AGAIN_S * 1000
            await self._announce(seen, task, lot, beside)
        elif not beside:
            seen.next_look_ms = min(row.deadline_ms for row in due) - lead_ms if due else 0.0

    def _may_rescue(self, key: BatchKey, shape: str = "") -> bool:
        routed = self._router.for_key(key)
        wants = routed is None or routed.route.late == "sync"
        return wants and self._may_judge(key) and self._lane.is_on(key) and not self._holds.standing(key, shape)

    # ------------------------------------------------------------------------------------------- waiting rows

    async def mind_waiting(self, task: PartitionTask, lot: Lot) -> bool:
        """Move the rows of a waiting lot that no batch can bring home in time; whether any was moved."""
        if lot.lane is Lane.SYNC or lot.key.account not in self._settings.accounts:
            return False
        seen = self._seen.setdefault((task.partition, lot.lot_id), _Seen())
        now_ms = self._clock.now().timestamp() * 1000
        if now_ms < seen.next_look_ms:
            return False
        late_ms = self.late_before_ms(lot.key)
        earliest_ms = min(lot.due, default=0) * QUARTER_HOUR_S * 1000
        if earliest_ms > late_ms:
            seen.next_look_ms = now_ms + (earliest_ms - late_ms)
            return False
        seen.next_look_ms = now_ms + AGAIN_S * 1000
        packed = task.packed_rows.get(lot.lot_id, OffsetSet())
        late = [
            row for row in await self._rows(task, task.ledger.held_by(lot.lot_id) - packed) if row.deadline_ms < late_ms
        ]
        if not late:
            return False
        routed = self._router.for_key(lot.key)
        shape = str(lot.extra.get(SHAPE, ""))
        if (
            routed is not None
            and routed.route.late == "fail"
            and self._may_judge(lot.key)
            and not self._holds.standing(lot.key, shape)
        ):
            await self._give_up(task, lot, late)
            return True
        if not self._may_rescue(lot.key, shape) or not await self._move(task, lot, late, "late"):
            await self._announce(seen, task, lot, late)
            return False
        return True

    async def late_rows(self, task: PartitionTask, offsets: OffsetSet, key: BatchKey) -> OffsetSet:
        """Those of these rows that no batch which leaves now brings home in time, and that the lane has room for."""
        if not self._may_rescue(key):
            return OffsetSet()
        late_ms = self.late_before_ms(key)
        late = [row for row in await self._rows(task, offsets) if row.deadline_ms < late_ms]
        if not late or self._lane.room(key, 0.0) < len(late):
            return OffsetSet()  # for a few of them the whole batch is not unpacked; its rescue looks again in time
        return OffsetSet(row.offset for row in self._with_room(key, late))

    def _with_room(self, key: BatchKey, rows: Sequence[IndexRow]) -> list[IndexRow]:
        """As many of the rows as the lane's budget takes, the most urgent first; their room is taken."""
        chosen: list[IndexRow] = []
        for row in sorted(rows, key=lambda one: one.deadline_ms):
            if not self._lane.reserve(key):
                self._telemetry.count("sync_lane_refused", len(rows) - len(chosen), reason="budget")
                break
            chosen.append(row)
        return chosen

    async def _give_up(self, task: PartitionTask, lot: Lot, late: Sequence[IndexRow]) -> None:
        now = self._clock.now()
        for some in batches(late, AT_ONCE_ROWS):
            originals = await self._source.originals(task.partition, OffsetSet(row.offset for row in some))
            await task.settle(
                [
                    self._outcomes.given_up(
                        task,
                        row,
                        RowClass.LATE,
                        "no batch that leaves now could end before the deadline",
                        originals.get(row.offset),
                        now,
                        remedy="give requests a longer SLA, or set routes.<name>.late to sync or batch",
                        held_by=lot.lot_id,
                    )
                    for row in some
                ]
            )
        await task.flush()

    # ------------------------------------------------------------------------------------------------- moving

    async def _move(self, task: PartitionTask, lot: Lot, rows: Sequence[IndexRow], reason: str) -> bool:
        """Hand rows over to the sync lane, as many as its budget takes, the most urgent first; whether all went."""
        chosen = self._with_room(lot.key, rows)
        if not chosen:
            return False
        wanted = OffsetSet(row.offset for row in chosen)
        due: dict[int, int] = {}
        for row in chosen:
            quarter = row.deadline_ms // (QUARTER_HOUR_S * 1000)
            due[quarter] = due.get(quarter, 0) + 1
        told: list[OutRecord] = []
        claimed = OffsetSet()

        def plan(ledger: PartitionLedger) -> list[LedgerEntry]:
            if lot.lot_id not in ledger.lots:
                return []
            mine = (wanted & ledger.held_by(lot.lot_id)) - task.packed_rows.get(lot.lot_id, OffsetSet())
            if not mine:
                return []
            if lot.state is LotState.WAITING:  # until the transaction is through, the lot still seems to hold them
                claimed.update(mine)
                task.packed_rows.setdefault(lot.lot_id, OffsetSet()).update(mine)
            heir = waiting_lot(task, ledger, [lot], mine, {}, self._clock, 0.0, Lane.SYNC, due)
            told.append(self._outcomes.onward_event(lot, heir, {reason: len(mine)}, EventKind.RESCUED, reason))
            return ledger.plan_settle(OffsetSet(), self._clock.now(), [heir])

        try:
            await task.commit(plan, told, purpose="rescue")
        finally:
            if lot.lot_id in task.packed_rows:
                task.packed_rows[lot.lot_id] -= claimed
        if lot.is_at_provider:
            task.rescued.setdefault(lot.lot_id, OffsetSet()).update(wanted)
        self._telemetry.count("rows_rescued", len(chosen), reason=reason)
        self._telemetry.event(
            "rows_rescued", batch_id=lot.lot_id, partition=task.partition, rows=len(chosen), reason=reason
        )
        self._lane.wake()
        return len(chosen) == len(rows)

    async def _announce(self, seen: _Seen, task: PartitionTask, lot: Lot, rows: Sequence[IndexRow]) -> None:
        """Say once of each deadline that it may be missed."""
        fresh = [row for row in rows if row.offset not in seen.announced]
        if not fresh:
            return
        seen.announced |= OffsetSet(row.offset for row in fresh)
        first_ms = min(row.deadline_ms for row in fresh)
        self._telemetry.count("deadlines_at_risk", len(fresh))
        self._telemetry.event(
            "deadline_at_risk",
            batch_id=lot.lot_id,
            partition=task.partition,
            rows=len(fresh),
            deadline=from_ms(first_ms),
        )
        event = self._outcomes.plain_event(
            EventKind.DEADLINE_AT_RISK,
            f"{lot.lot_id}-at-risk-{task.partition}-{first_ms}",
            scope=lot.key.label,
            partition=task.partition,
            rows=len(fresh),
            deadline=from_ms(first_ms),
            offsets=OffsetSet(row.offset for row in fresh).dumps(),
        )
        await self._fleet.send([event])

    async def _rows(self, task: PartitionTask, offsets: OffsetSet) -> list[IndexRow]:
        """The index rows of these offsets; rows that the input topic has lost are absent, as are their deadlines."""
        await self._source.index(task.partition, offsets)
        rows: list[IndexRow] = []
        for some in batches(list(offsets), ROWS_AT_ONCE):
            rows.extend((await self._store.get_rows(task.partition, list(some))).values())
        return rows
