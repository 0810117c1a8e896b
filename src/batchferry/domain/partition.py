"""The state of one input partition, as its ledger tells it, and the plans that may change it.

At any moment every input offset that has been read is exactly one of

* **settled**: below the watermark, or in a settled block. It has had its outcome; nothing else matters.
* **held** by one lot: the lot with the highest submission that names it. Only the holder's failures count;
  a success from any of our submissions settles it.
* **open**: neither. It waits to be packed into a batch.

A plan is a list of entries that go out in one Kafka transaction (together with the outcomes they speak of)
and are applied here after the commit, by the same ``apply`` that replays the ledger at start-up. A plan that
was never committed has changed nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from batchferry.domain.errors import InvariantBroken, LedgerTooNew
from batchferry.domain.ids import LotId, ProviderBatchId
from batchferry.domain.ledger import (
    FORMAT,
    GONE,
    UNCERTAIN,
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
    Witness,
    block_key,
    block_number_of,
    block_of,
    decode,
    lot_id_of,
    lot_key,
)
from batchferry.domain.offsets import BLOCK_SHIFT, BLOCK_SIZE, OffsetSet

MAX_GONE = 16
"""Provider batches that a lot remembers as gone, the last ones; more than one is rare."""


class PartitionLedger:
    """What is known of one input partition; changes only through ``apply``."""

    def __init__(self, partition: int) -> None:
        self.partition = partition
        self.header: LedgerHeader | None = None
        self.claim: Claim | None = None
        self.witness: Witness | None = None
        self.watermark = 0
        self.has_watermark = False
        self.settled = OffsetSet()
        """Settled offsets at and above the watermark."""
        self.lots: dict[LotId, Lot] = {}
        self._held: dict[LotId, OffsetSet] = {}
        self._blocks: set[int] = set()

    # ------------------------------------------------------------------------------------------- reading

    def is_settled(self, offset: int) -> bool:
        """Whether the offset has had its outcome."""
        return offset < self.watermark or offset in self.settled

    def unsettled(self, offsets: OffsetSet) -> OffsetSet:
        """Those of ``offsets`` that have had no outcome yet."""
        left = offsets - self.settled
        left.discard_below(self.watermark)
        return left

    def held_by(self, lot_id: LotId) -> OffsetSet:
        """The unsettled offsets this lot holds (a copy)."""
        held = self._held.get(lot_id)
        return held.copy() if held is not None else OffsetSet()

    def holder_of(self, offset: int) -> Lot | None:
        """The lot that holds this unsettled offset, None when it is open or settled."""
        for lot_id, held in self._held.items():
            if offset in held:
                return self.lots[lot_id]
        return None

    def held(self) -> OffsetSet:
        """All unsettled offsets that some lot holds."""
        union = OffsetSet()
        for held in self._held.values():
            union |= held
        return union

    def first_open(self) -> int:
        """The smallest offset that is neither settled nor named by a lot: where reading must start."""
        return first_absent(self.settled | self.held(), self.watermark)

    def next_submission(self, offsets: OffsetSet) -> int:
        """One more than the highest submission of any ledger record that names one of these rows."""
        highest = 0
        for lot in self.lots.values():
            if lot.submission > highest and not lot.offsets.isdisjoint(offsets):
                highest = lot.submission
        return highest + 1

    def live_lots(self) -> Iterable[Lot]:
        """Lots that are waiting for, on their way to, or at the provider."""
        return [lot for lot in self.lots.values() if lot.state not in {LotState.DONE, LotState.CLEAN}]

    # ------------------------------------------------------------------------------------------ applying

    def replay(self, key: bytes, value: bytes | None) -> None:
        """Apply one ledger record as it was read.

        Raises:
            LedgerTooNew: the ledger demands a newer reader.
            ValueError: the record cannot be read.
        """
        entry = decode(key, value)
        if entry is not None:
            self.apply(entry)

    def apply(self, entry: LedgerEntry) -> None:
        """Take a fact in. Facts of one transaction are applied in the order they were written."""
        match entry:
            case Lot():
                self._put_lot(entry)
            case SettledBlock(block, offsets):
                start = block << BLOCK_SHIFT
                self.settled -= self.settled.within(start, start + BLOCK_SIZE)
                fresh = offsets.copy()
                fresh.discard_below(self.watermark)
                self.settled |= fresh
                self._blocks.add(block)
                self._forget(fresh)
            case Watermark(offset):
                self.watermark = offset
                self.has_watermark = True
                self.settled.discard_below(offset)
                for held in self._held.values():
                    held.discard_below(offset)
            case LedgerHeader():
                if entry.min_reader > FORMAT:
                    raise LedgerTooNew(self.partition, entry.min_reader, FORMAT)
                self.header = entry
            case Claim():
                self.claim = entry
            case Witness():
                self.witness = entry
            case Tombstone(key):
                self._drop(key)

    def _forget(self, settled: OffsetSet) -> None:
        for lot_id in self._held:
            self._held[lot_id] -= settled

    def _put_lot(self, lot: Lot) -> None:
        known = self.lots.get(lot.lot_id)
        self.lots[lot.lot_id] = lot
        if known is not None and known.submission == lot.submission and known.offsets == lot.offsets:
            return  # only the state and its fields moved: who holds what is as it was
        self._share_out()

    def _drop(self, key: bytes) -> None:
        lot_id = lot_id_of(key)
        if lot_id is not None:
            if self.lots.pop(lot_id, None) is not None:
                self._share_out()
            return
        block = block_number_of(key)
        if block is not None:
            start = block << BLOCK_SHIFT
            self.settled -= self.settled.within(start, start + BLOCK_SIZE)
            self._blocks.discard(block)

    def _share_out(self) -> None:
        """Work out anew which lot holds which row: the highest submission first, the id as a tie-break."""
        taken = OffsetSet()
        shares: dict[LotId, OffsetSet] = {}
        for lot in sorted(self.lots.values(), key=lambda one: (one.submission, one.lot_id), reverse=True):
            share = self.unsettled(lot.offsets) - taken
            shares[lot.lot_id] = share
            taken |= share
        self._held = shares

    # ------------------------------------------------------------------------------------------ planning

    def plan_submitting(self, lot: Lot) -> list[LedgerEntry]:
        """The lot goes to the provider; waiting lots that it empties end.

        Raises:
            InvariantBroken: a row is settled, another lot may have it at a provider, or the lot is known and
                past SUBMITTING.
        """
        known = self.lots.get(lot.lot_id)
        if known is not None and known.state is not LotState.WAITING:
            # Written again before another create: the rows were checked the first time, and a late success of an
            # earlier submission may have settled some of them since.
            same = known.submission == lot.submission and known.offsets == lot.offsets
            if known.state is not LotState.SUBMITTING or not same:
                raise InvariantBroken(f"lot {lot.lot_id} is {known.state.value} and cannot be submitted as it is now")
            return [lot]
        self._check_takeable(lot)
        plan: list[LedgerEntry] = [lot]
        if lot.lot_id not in self.lots:
            plan.extend(
                Tombstone(lot_key(other.lot_id))
                for other in self.lots.values()
                if other.state is LotState.WAITING and self._held[other.lot_id].issubset(lot.offsets)
            )
        return plan

    def _check_takeable(self, lot: Lot) -> None:
        if len(self.unsettled(lot.offsets)) != len(lot.offsets):
            raise InvariantBroken(f"lot {lot.lot_id} names rows of partition {self.partition} that are settled")
        for other in self.lots.values():
            if other.lot_id == lot.lot_id:
                continue
            if other.submission >= lot.submission and not other.offsets.isdisjoint(lot.offsets):
                raise InvariantBroken(f"lot {lot.lot_id} names rows of a later submission in lot {other.lot_id}")
            if other.is_at_provider and not self._held[other.lot_id].isdisjoint(lot.offsets):
                raise InvariantBroken(f"lot {lot.lot_id} names rows that lot {other.lot_id} holds at a provider")

    def plan_submitted(self, lot_id: LotId, **fields: object) -> list[LedgerEntry]:
        """The provider's ids are known. Twice is harmless; empty when the lot is DONE or CLEAN already.

        Raises:
            InvariantBroken: there is no such lot, or it is not at a provider.
        """
        lot = self._known(lot_id)
        if lot.state in {LotState.DONE, LotState.CLEAN}:
            return []
        if not lot.is_at_provider:
            raise InvariantBroken(f"lot {lot_id} is {lot.state.value}: no provider batch can be its own")
        return [replace(lot, state=LotState.SUBMITTED, **fields)]  # type: ignore[arg-type]

    def plan_disown(self, lot_id: LotId, provider_batch_id: ProviderBatchId, *, is_gone: bool) -> list[LedgerEntry]:
        """This provider batch is gone, or is not the lot's own. Twice is harmless.

        Empty when there is no such lot, nothing of it is at a provider, or it names another batch: that one has not
        been asked for, and may well be its own.

        Args:
            lot_id: the lot.
            provider_batch_id: what it is to forget.
            is_gone: the batch was its own, so its rows may have run: the lot remembers that.
        """
        lot = self.lots.get(lot_id)
        if lot is None or lot.state is not LotState.SUBMITTED or lot.provider_batch_ids[:1] != (provider_batch_id,):
            return []
        extra = {name: value for name, value in lot.extra.items() if name != UNCERTAIN}
        if is_gone:
            extra[GONE] = [*lot.gone[1 - MAX_GONE :], provider_batch_id]
        return [replace(lot, state=LotState.SUBMITTING, provider_batch_ids=(), submitted_at=None, extra=extra)]

    def _known(self, lot_id: LotId) -> Lot:
        lot = self.lots.get(lot_id)
        if lot is None:
            raise InvariantBroken(f"partition {self.partition} knows no lot {lot_id}")
        return lot

    def plan_dissolve(self, lot_id: LotId, into: Sequence[Lot]) -> list[LedgerEntry]:
        """Nothing of this lot is at a provider: its unsettled rows go into waiting lots, and it ends.

        Raises:
            InvariantBroken: there is no such lot, it is DONE or CLEAN, or the waiting lots do not name exactly the
                rows the lot held.
        """
        if self._known(lot_id).state in {LotState.DONE, LotState.CLEAN}:
            raise InvariantBroken(f"lot {lot_id} has landed and cannot be dissolved")
        self._check_heirs(self.held_by(lot_id), into)
        return [*into, Tombstone(lot_key(lot_id))]

    def _check_heirs(self, rows: OffsetSet, into: Sequence[Lot]) -> None:
        named = OffsetSet()
        ids = set(self.lots)  # an heir under a known id would end with that lot, and its rows be open again
        for heir in into:
            if heir.state is not LotState.WAITING or heir.lot_id in ids or not named.isdisjoint(heir.offsets):
                raise InvariantBroken(f"lot {heir.lot_id} is no fit heir")
            ids.add(heir.lot_id)
            if heir.submission < self.next_submission(heir.offsets):
                raise InvariantBroken(f"waiting lot {heir.lot_id} carries a submission already used")
            named |= heir.offsets
        if named != rows:
            raise InvariantBroken(f"{len(rows)} rows to hand on, {len(named)} named by waiting lots")

    def plan_settle(
        self,
        settled_now: OffsetSet,
        now: datetime,
        waiting: Sequence[Lot] = (),
        finished: Mapping[LotId, LotTally] | None = None,
    ) -> list[LedgerEntry]:
        """The entries of one settle transaction.

        Args:
            settled_now: offsets whose outcome is in this transaction, or that the log will never deliver.
            now: the instant written beside the watermark.
            waiting: lots that take over rows to be tried again, from whatever lot holds them.
            finished: lots whose result files have been read to the end; they become DONE here if this
                transaction leaves them without an unsettled row.

        Raises:
            InvariantBroken: an offset is settled already, a row is both settled and waiting, or the waiting lots
                are no fit heirs.
        """
        if len(self.unsettled(settled_now)) != len(settled_now):
            raise InvariantBroken(f"partition {self.partition}: a row would be settled twice")
        after = self.settled | settled_now
        watermark = first_absent(after, self.watermark)
        plan: list[LedgerEntry] = list(waiting)
        handed_on = OffsetSet()
        for heir in waiting:
            handed_on |= heir.offsets
        if not handed_on.isdisjoint(settled_now) or len(self.unsettled(handed_on)) != len(handed_on):
            raise InvariantBroken(f"partition {self.partition}: a waiting lot names a settled row")
        self._check_heirs(handed_on, waiting)
        gone = settled_now | handed_on
        for lot_id, lot in self.lots.items():
            if self._held[lot_id].issubset(gone):
                if lot.state is LotState.WAITING or (lot.lane is Lane.SYNC and lot.is_at_provider):
                    plan.append(Tombstone(lot_key(lot_id)))
                elif finished is not None and lot_id in finished and lot.is_at_provider:
                    plan.append(replace(lot, state=LotState.DONE, tally=finished[lot_id]))
        plan.extend(self._plan_blocks(settled_now, after, watermark))
        plan.append(Watermark(watermark, now))
        return plan

    def _plan_blocks(self, settled_now: OffsetSet, after: OffsetSet, watermark: int) -> Iterable[LedgerEntry]:
        touched: set[int] = set()
        for start, stop in settled_now.ranges():
            touched.update(range(block_of(start), block_of(stop - 1) + 1))
        for block in sorted(touched | self._blocks):
            start = block << BLOCK_SHIFT
            content = after.within(max(start, watermark), start + BLOCK_SIZE)
            if not content:
                if block in self._blocks:  # wholly below the watermark, which says it all
                    yield Tombstone(block_key(block))
            elif block in touched:
                yield SettledBlock(block, content)

    def plan_clean(self, lot_id: LotId) -> list[LedgerEntry]:
        """The provider's files are gone: keep a stub without offsets, so a late twin can still be named.

        Raises:
            InvariantBroken: there is no such lot, or it is not DONE: its rows would be open again.
        """
        lot = self._known(lot_id)
        if lot.state not in {LotState.DONE, LotState.CLEAN}:
            raise InvariantBroken(f"lot {lot_id} is {lot.state.value} and cannot be cleaned")
        return [replace(lot, state=LotState.CLEAN, offsets=OffsetSet(), attempts={}, due={})]


def first_absent(offsets: OffsetSet, start: int) -> int:
    """The smallest offset at or above ``start`` that is not in the set."""
    last = offsets.last()
    if last is None or last < start:
        return start
    low, high = start, last + 1  # the answer lies in low..high; everything below low is present
    while low < high:
        middle = (low + high) // 2
        if offsets.count_within(low, middle + 1) == middle + 1 - low:
            low = middle + 1
        else:
            high = middle
    return low
