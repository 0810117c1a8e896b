"""The partition ledger against a plain dictionary that knows what every offset is.

Blocks hold eight offsets here instead of 65,536, so that a few rows cross many of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from batchferry.domain import ledger as ledger_module
from batchferry.domain import partition as partition_module
from batchferry.domain.batchkey import BatchKey
from batchferry.domain.errors import InvariantBroken
from batchferry.domain.ids import LedgerId, LotId, ProviderBatchId
from batchferry.domain.ledger import (
    Claim,
    Lane,
    LedgerEntry,
    LedgerHeader,
    Lot,
    LotState,
    LotTally,
    SettledBlock,
    Tombstone,
    Watermark,
    block_number_of,
    encode,
    lot_id_of,
    lot_key,
)
from batchferry.domain.offsets import OffsetSet
from batchferry.domain.partition import PartitionLedger

SHIFT = 3
KEY = BatchKey("acct", "/v1/chat/completions", "m", "24h")
START = datetime(2026, 1, 1, tzinfo=UTC)
SETTLED = "settled"
OPEN = "open"

Record = tuple[bytes, bytes | None]


def picture(ledger: PartitionLedger) -> tuple[object, ...]:
    """All that a ledger knows."""
    return (
        ledger.header,
        ledger.claim,
        ledger.watermark,
        ledger.has_watermark,
        sorted(ledger.settled),
        ledger.lots,
        {lot_id: sorted(ledger.held_by(lot_id)) for lot_id in ledger.lots},
    )


def replayed(records: Iterable[Record]) -> PartitionLedger:
    """A ledger restored from these records."""
    restored = PartitionLedger(0)
    for key, value in records:
        restored.replay(key, value)
    return restored


def compacted(records: list[Record], *, tombstones: bool) -> list[Record]:
    """What Kafka keeps of these records: the last of every key, in log order, tombstones for a while."""
    last = {key: position for position, (key, _) in enumerate(records)}
    kept = [record for position, record in enumerate(records) if last[record[0]] == position]
    return kept if tombstones else [(key, value) for key, value in kept if value is not None]


class LedgerMachine(RuleBasedStateMachine):
    """One partition from its first record to wherever the rules lead it."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = [
            mock.patch.object(module, name, value)
            for module in (ledger_module, partition_module)
            for name, value in (("BLOCK_SHIFT", SHIFT), ("BLOCK_SIZE", 1 << SHIFT))
        ]
        for patch in self.patches:
            patch.start()
        self.live = PartitionLedger(0)
        self.log: list[Record] = []
        self.records_checked = -1
        self.now = START
        self.lots_made = 0
        # the model
        self.base = 0
        self.status: dict[int, str] = {}
        self.lots: dict[str, LotState] = {}
        self.lane: dict[str, Lane] = {}
        self.submissions: dict[int, int] = {}
        self.gaps: set[int] = set()
        self.read_to = 0

    def teardown(self) -> None:
        for patch in self.patches:
            patch.stop()

    # -- helpers

    def commit(self, make: Callable[[], list[LedgerEntry]], *, is_committed: bool = True) -> list[LedgerEntry] | None:
        """Plan; nothing may change by that alone. Then, mostly, write and apply."""
        before = picture(self.live)
        plan = make()
        assert picture(self.live) == before
        standing = {key for key, value in dict(self.log).items() if value is not None}
        ended = [entry.key for entry in plan if isinstance(entry, Tombstone)]
        assert standing.issuperset(ended), "a tombstone for a record that is not there"
        if not is_committed:
            return None
        self.log.extend(encode(entry) for entry in plan)
        for entry in plan:
            self.live.apply(entry)
        return plan

    def tick(self) -> datetime:
        self.now += timedelta(seconds=1)
        return self.now

    def new_lot(self, rows: Iterable[int], state: LotState, submission: int, lane: Lane = Lane.BATCH) -> Lot:
        self.lots_made += 1
        return Lot(LotId(f"lot{self.lots_made:04}"), lane, state, KEY, OffsetSet(rows), submission, (0,), self.tick())

    def rows_of(self, *statuses: str) -> list[int]:
        return sorted(offset for offset, status in self.status.items() if status in statuses)

    def in_state(self, *states: LotState) -> list[str]:
        return sorted(lot_id for lot_id, state in self.lots.items() if state in states)

    def some(self, data: st.DataObject, rows: list[int], *, at_least: int = 0) -> set[int]:
        """Any of these rows: a run of them or single ones."""
        if not rows:
            return set()
        if data.draw(st.booleans()):
            start = data.draw(st.integers(0, len(rows) - 1))
            stop = data.draw(st.integers(start, len(rows)))
            picked = set(rows[start:stop])
        else:
            picked = data.draw(st.sets(st.sampled_from(rows)))
        return picked if len(picked) >= at_least else set(rows)

    def end_emptied(self, finished: Iterable[str] = ()) -> None:
        """What the model expects of lots that hold nothing any more."""
        for lot_id, state in list(self.lots.items()):
            if lot_id in self.status.values():
                continue
            at_provider = state in {LotState.SUBMITTING, LotState.SUBMITTED}
            if state is LotState.WAITING or (self.lane[lot_id] is Lane.SYNC and at_provider):
                del self.lots[lot_id]
            elif at_provider and lot_id in finished:
                self.lots[lot_id] = LotState.DONE

    def heirs(self, data: st.DataObject, rows: set[int]) -> list[Lot]:
        """Waiting lots, one or two, that name exactly these rows."""
        first = self.some(data, sorted(rows))
        made = []
        for part in (first, rows - first):
            if part:
                extra = data.draw(st.integers(0, 1))
                made.append(self.new_lot(part, LotState.WAITING, self.live.next_submission(OffsetSet(part)) + extra))
        return made

    def take_over(self, lots: Iterable[Lot]) -> None:
        for lot in lots:
            self.lots[lot.lot_id] = lot.state
            self.lane[lot.lot_id] = lot.lane
            for offset in lot.offsets:
                assert lot.submission > self.submissions.get(offset, 0), "a submission was used twice"
                self.submissions[offset] = lot.submission
                self.status[offset] = lot.lot_id

    # -- what may happen

    @initialize(base=st.sampled_from([0, 0, 5, 8, 30, (1 << 32) - 9, 1 << 40]), data=st.data())
    def take_the_partition(self, base: int, data: st.DataObject) -> None:
        """A new ledger, on a log that begins anywhere, and the first rows, some of them on their way."""
        self.base = self.read_to = base
        first: list[LedgerEntry] = [LedgerHeader(LedgerId("0123456789"), 1, START), Claim("one", "0.1.0", START)]
        if base:
            first.append(Watermark(base, START))
        self.commit(lambda: first)
        self.read(data.draw(st.integers(8, 24)), data.draw(st.integers(0, 2)), gap_first=False)
        if data.draw(st.booleans()):
            self.submit(data, Lane.BATCH, is_committed=True)

    @rule(rows=st.integers(1, 12), gap=st.integers(0, 3), gap_first=st.booleans())
    def read(self, rows: int, gap: int, gap_first: bool) -> None:
        """Records are read; some offsets the log will never deliver."""
        for kind, count in ((OPEN, rows), ("gap", gap)) if not gap_first else (("gap", gap), (OPEN, rows)):
            for _ in range(count):
                if kind == OPEN:
                    self.status[self.read_to] = OPEN
                else:
                    self.gaps.add(self.read_to)
                self.read_to += 1

    @precondition(lambda self: self.rows_of(OPEN, *self.in_state(LotState.WAITING)))
    @rule(
        data=st.data(),
        lane=st.sampled_from([Lane.BATCH, Lane.BATCH, Lane.SYNC]),
        is_committed=st.integers(0, 4).map(bool),
    )
    def submit(self, data: st.DataObject, lane: Lane, is_committed: bool) -> None:
        """Open and waiting rows leave together."""
        rows = self.some(data, self.rows_of(OPEN, *self.in_state(LotState.WAITING)), at_least=1)
        lot = self.new_lot(rows, LotState.SUBMITTING, self.live.next_submission(OffsetSet(rows)), lane)
        if self.commit(lambda: self.live.plan_submitting(lot), is_committed=is_committed) is not None:
            self.take_over([lot])
            self.end_emptied()

    @precondition(lambda self: self.in_state(LotState.SUBMITTING))
    @rule(data=st.data())
    def record_again(self, data: st.DataObject) -> None:
        """Before another create of the same file SUBMITTING is written again: a state, so twice is once."""
        lot_id = LotId(data.draw(st.sampled_from(self.in_state(LotState.SUBMITTING))))
        self.commit(lambda: self.live.plan_submitting(replace(self.live.lots[lot_id], submit_ttl_s=60.0)))

    @precondition(lambda self: self.in_state(LotState.SUBMITTING, LotState.SUBMITTED, LotState.DONE, LotState.CLEAN))
    @rule(data=st.data(), is_committed=st.integers(0, 4).map(bool))
    def submitted(self, data: st.DataObject, is_committed: bool) -> None:
        """The provider's id is recorded, perhaps again, perhaps too late to matter."""
        states = (LotState.SUBMITTING, LotState.SUBMITTED, LotState.DONE, LotState.CLEAN)
        lot_id = LotId(data.draw(st.sampled_from(self.in_state(*states))))
        plan = self.commit(
            lambda: self.live.plan_submitted(lot_id, provider_batch_ids=(ProviderBatchId("batch_1"),)),
            is_committed=is_committed,
        )
        if plan:
            self.lots[lot_id] = LotState.SUBMITTED

    @rule(data=st.data(), is_committed=st.integers(0, 4).map(bool), take_gaps=st.booleans())
    def settle(self, data: st.DataObject, is_committed: bool, take_gaps: bool) -> None:
        """Outcomes of any unsettled rows, gaps, rows that go again, and lots that were read to the end."""
        unsettled = [offset for offset, status in sorted(self.status.items()) if status != SETTLED]
        now_settled = self.some(data, unsettled)
        held = [offset for offset in unsettled if offset not in now_settled and self.status[offset] != OPEN]
        retried = self.some(data, held) if data.draw(st.booleans()) else set()
        heirs = self.heirs(data, retried)
        gone = now_settled | (self.gaps if take_gaps else set())
        finished = [lot_id for lot_id in self.lots if data.draw(st.booleans())]
        tallies = {LotId(lot_id): LotTally({"succeeded": 1}) for lot_id in finished}
        plan = self.commit(
            lambda: self.live.plan_settle(OffsetSet(gone), self.tick(), heirs, tallies), is_committed=is_committed
        )
        if plan is None:
            return
        for entry in plan:
            if isinstance(entry, SettledBlock):
                assert any(offset >> SHIFT == entry.block for offset in gone), "a block was written for nothing"
        self.take_over(heirs)
        if take_gaps:
            self.gaps = set()
        for offset in gone:
            self.status[offset] = SETTLED
        self.end_emptied(finished)

    @precondition(lambda self: self.in_state(LotState.SUBMITTING, LotState.SUBMITTED, LotState.WAITING))
    @rule(data=st.data(), is_committed=st.integers(0, 4).map(bool))
    def dissolve(self, data: st.DataObject, is_committed: bool) -> None:
        """A batch that never came to be gives its rows to waiting lots."""
        states = (LotState.SUBMITTING, LotState.SUBMITTED, LotState.WAITING)
        lot_id = LotId(data.draw(st.sampled_from(self.in_state(*states))))
        heirs = self.heirs(data, set(self.live.held_by(lot_id)))
        if self.commit(lambda: self.live.plan_dissolve(lot_id, heirs), is_committed=is_committed) is not None:
            self.take_over(heirs)
            del self.lots[lot_id]

    @precondition(lambda self: self.in_state(LotState.DONE, LotState.CLEAN))
    @rule(data=st.data())
    def clean(self, data: st.DataObject) -> None:
        """The files are gone: the stub stays, or ends after a while."""
        lot_id = LotId(data.draw(st.sampled_from(self.in_state(LotState.DONE, LotState.CLEAN))))
        if self.lots[lot_id] is LotState.CLEAN and data.draw(st.booleans()):
            self.commit(lambda: [Tombstone(lot_key(lot_id))])
            del self.lots[lot_id]
        else:
            self.commit(lambda: self.live.plan_clean(lot_id))
            self.lots[lot_id] = LotState.CLEAN

    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        """Go on from what the log says, compacted up to any point of it."""
        cut = data.draw(st.integers(0, len(self.log)))
        log = compacted(self.log[:cut], tombstones=data.draw(st.booleans())) + self.log[cut:]
        assert picture(replayed(log)) == picture(self.live)
        self.live = replayed(log)

    @rule(data=st.data())
    def what_must_be_refused(self, data: st.DataObject) -> None:
        """A plan that would break the books is refused, and leaves them as they are."""
        before = picture(self.live)
        settled = self.rows_of(SETTLED)
        busy = self.rows_of(*self.in_state(LotState.SUBMITTING, LotState.SUBMITTED))
        if settled:
            row = data.draw(st.sampled_from(settled))
            with pytest.raises(InvariantBroken):
                self.live.plan_settle(OffsetSet([row]), self.now)
            with pytest.raises(InvariantBroken):
                self.live.plan_submitting(self.new_lot([row], LotState.SUBMITTING, 1000))
            with pytest.raises(InvariantBroken):
                self.live.plan_settle(OffsetSet(), self.now, [self.new_lot([row], LotState.WAITING, 1000)])
        if busy:
            row = data.draw(st.sampled_from(busy))
            with pytest.raises(InvariantBroken):
                self.live.plan_submitting(self.new_lot([row], LotState.SUBMITTING, 1000))
            with pytest.raises(InvariantBroken):
                self.live.plan_clean(LotId(self.status[row]))
            with pytest.raises(InvariantBroken):
                self.live.plan_settle(
                    OffsetSet(), self.now, [self.new_lot([row], LotState.WAITING, self.submissions[row])]
                )
        assert picture(self.live) == before

    # -- what must always hold

    @invariant()
    def every_offset_is_what_the_model_says(self) -> None:
        """A row is exactly one of open, held by one lot, settled; and the one the model has."""
        held_by = {lot_id: set(self.live.held_by(lot_id)) for lot_id in self.live.lots}
        for offset in range(self.base, self.read_to):
            status = self.status.get(offset, OPEN)
            holders = [lot_id for lot_id, rows in held_by.items() if offset in rows]
            assert self.live.is_settled(offset) == (status == SETTLED)
            assert holders == ([] if status in {SETTLED, OPEN} else [status])
            holder = self.live.holder_of(offset)
            assert (holder.lot_id if holder else None) == (holders[0] if holders else None)
            if holder is not None:
                assert holder.submission == self.submissions[offset]
        assert not self.live.is_settled(self.read_to)
        held = {offset for offset, status in self.status.items() if status not in {SETTLED, OPEN}}
        assert set(self.live.held()) == held

    @invariant()
    def the_watermark_stops_at_the_first_unsettled_offset(self) -> None:
        """It never moves over an unsettled offset, and never lags behind; nor does the first open one."""
        watermark = self.base
        while self.status.get(watermark) == SETTLED:
            watermark += 1
        assert self.live.watermark == watermark
        assert self.live.settled.first() is None or self.live.settled.first() >= watermark
        first_open = watermark
        while self.status.get(first_open, OPEN) != OPEN:
            first_open += 1
        assert self.live.first_open() == first_open

    @invariant()
    def lots_are_those_of_the_model(self) -> None:
        """Emptied waiting lots and waves are gone, finished ones DONE; a landed lot holds nothing."""
        assert {lot_id: lot.state for lot_id, lot in self.live.lots.items()} == self.lots
        for lot_id in self.in_state(LotState.DONE, LotState.CLEAN):
            assert not self.live.held_by(LotId(lot_id))

    @invariant()
    def the_log_tells_the_same(self) -> None:
        """The log so far (so every prefix of it) restores the live state, whole or compacted."""
        if self.records_checked == len(self.log):
            return
        self.records_checked = len(self.log)
        wanted = picture(self.live)
        assert picture(replayed(self.log)) == wanted
        assert picture(replayed(compacted(self.log, tombstones=True))) == wanted
        assert picture(replayed(compacted(self.log, tombstones=False))) == wanted

    @invariant()
    def nothing_is_kept_that_says_nothing(self) -> None:
        """No block record remains below the watermark, no record of a lot that has ended."""
        for key, _ in compacted(self.log, tombstones=False):
            block = block_number_of(key)
            assert block is None or (block + 1) << SHIFT > self.live.watermark
            lot_id = lot_id_of(key)
            assert lot_id is None or lot_id in self.lots


LedgerMachine.TestCase.settings = settings(
    max_examples=70, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestPartitionLedger = LedgerMachine.TestCase
TestPartitionLedger.__doc__ = (
    "Whatever is read, submitted, settled, handed on and restarted, the ledger and the model agree."
)
