"""What becomes of rows that did not succeed: failures are settled, parts are made, the others are named for an heir.

Both lanes come here with rows and their classes. The decision is ``domain.retry``'s; this looks up what it needs
(how often a row has failed before, how much time it has left, whether the sync lane has room) and carries out what is
final. Rows that travel again are handed back: the caller writes them into waiting lots in the transaction that ends
the lot they were in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import NamedTuple, Protocol, TypeVar

from msgspec import structs

from batchferry.config import Settings
from batchferry.domain.batchkey import BatchKey
from batchferry.domain.ledger import QUARTER_HOUR_S, Lane, Lot, LotState
from batchferry.domain.offsets import OffsetSet
from batchferry.domain.partition import PartitionLedger
from batchferry.domain.provider import BatchSnapshot
from batchferry.domain.retry import (
    KEPT,
    SYNC_TRIES,
    Action,
    Fate,
    RetryPolicy,
    carry_attempts,
    decide,
    decide_sync,
)
from batchferry.domain.rows import ResultLine, RowClass, RowFlag
from batchferry.engine.outcomes import OutcomeWriter
from batchferry.engine.partition import PartitionTask, Settlement
from batchferry.engine.routing import Router, retry_policy
from batchferry.engine.rowsource import RowSource
from batchferry.engine.splitting import RowSplitter
from batchferry.ports import Clock, IndexRow, LocalStore, OutRecord, Telemetry

AT_ONCE_ROWS = 200
"""Input records read again at one time, for the failures that quote them."""
CHUNK_BYTES = 4 * 1024 * 1024
"""Lines that are in memory at one time."""
PACK_TOKENS = "pack_tokens"
"""Member of a waiting lot: a provider had no room for more, so a batch of its rows holds at most so many tokens."""
RESCUE_WISH = "rescue"
"""The rows of a batch that was cancelled for them to be run through the sync lane."""
PACK_ROWS = "pack_rows"
"""The same of rows: the provider refused a batch for its size."""
SHAPE = "shape"
"""Member of a waiting lot: the kind of prompt whose verdict its rows wait for."""
HELD_SINCE = "held_since_ms"
"""Member of a waiting lot whose rows wait only because of a hold: their age does not count since then."""
HELD_S = "held_s"
"""Member of a lot: seconds that its rows have spent in holds."""
CARRIED = frozenset({SHAPE, HELD_S})
"""Members that go on to the lots which the rows travel in next."""
_QUARTER_MS = QUARTER_HOUR_S * 1000

T = TypeVar("T")
NOT_CUT: Mapping[str, int] = {}


class LaneRoom(Protocol):
    """What is asked of the sync lane before a row is sent its way."""

    def reserve(self, key: BatchKey, rows: int = 1) -> bool:
        """Take room for late or rescued rows out of the lane's budget; False when it has none."""
        ...


class Onward(NamedTuple):
    """How rows travel next."""

    lane: Lane
    wait_s: float


@dataclass(slots=True)
class Heirs:
    """Rows of one lot that travel again, by the way they take and by what counts against them."""

    rows: dict[Onward, dict[str, OffsetSet]] = field(default_factory=dict)
    classes: dict[Onward, dict[str, int]] = field(default_factory=dict)
    due: dict[Onward, dict[int, int]] = field(default_factory=dict)

    def add(self, onward: Onward, counts: str, row_class: RowClass, offset: int, deadline_ms: int | None) -> None:
        """Note one row; ``counts`` is under what the attempt is counted, the class itself as a rule."""
        self.rows.setdefault(onward, {}).setdefault(counts, OffsetSet()).add(offset)
        by_class = self.classes.setdefault(onward, {})
        by_class[row_class.value] = by_class.get(row_class.value, 0) + 1
        if deadline_ms is not None:
            by_quarter = self.due.setdefault(onward, {})
            quarter = deadline_ms // _QUARTER_MS
            by_quarter[quarter] = by_quarter.get(quarter, 0) + 1

    def add_all(self, onward: Onward, row_class: RowClass, offsets: OffsetSet, due: Mapping[int, int]) -> None:
        """Note many rows of one class whose deadlines are known by the quarter-hour at best."""
        self.rows.setdefault(onward, {}).setdefault(row_class.value, OffsetSet()).update(offsets)
        by_class = self.classes.setdefault(onward, {})
        by_class[row_class.value] = by_class.get(row_class.value, 0) + len(offsets)
        by_quarter = self.due.setdefault(onward, {})
        for quarter, rows in due.items():
            by_quarter[quarter] = by_quarter.get(quarter, 0) + rows

    def has(self, row_class: RowClass) -> bool:
        """Whether a row that ended in this class travels again."""
        return any(row_class.value in by_class for by_class in self.classes.values())

    def __bool__(self) -> bool:
        return bool(self.rows)


class Fates:
    """Decides and carries out; one a process."""

    def __init__(
        self,
        settings: Settings,
        store: LocalStore,
        clock: Clock,
        telemetry: Telemetry,
        router: Router,
        source: RowSource,
        outcomes: OutcomeWriter,
        splitter: RowSplitter,
    ) -> None:
        self._settings = settings
        self._store = store
        self._clock = clock
        self._telemetry = telemetry
        self._router = router
        self._source = source
        self._outcomes = outcomes
        self._splitter = splitter
        self.room: LaneRoom | None = None
        """The sync lane, once it is there."""

    def policy(self, key: BatchKey) -> RetryPolicy:
        """What is done with rows of this key."""
        return retry_policy(self._settings, key, self._router.for_key(key))

    async def judge(
        self,
        task: PartitionTask,
        lot: Lot,
        failed: Sequence[tuple[int, ResultLine]],
        snapshot: BatchSnapshot | None,
        heirs: Heirs,
        *,
        wish_rows: str | None = None,
        retry_after_s: float | None = None,
        rows: Mapping[int, IndexRow] | None = None,
    ) -> None:
        """Settle what is final among these rows and put the others into ``heirs``.

        Args:
            failed: (offset, line) of rows that did not succeed.
            wish_rows: what whoever cancelled the batch said of the rows it did not run.
            retry_after_s: what the provider asks a row of the sync lane to wait.
            rows: their index rows, where the caller has them; else the index is asked, and must know them.

        Raises:
            PartitionLost: this life of the partition is over.
        """
        policy = self.policy(lot.key)
        known = await self._rows(task.partition, [offset for offset, _ in failed]) if rows is None else rows
        now_ms = self._clock.now().timestamp() * 1000
        final: list[tuple[int, ResultLine, Action]] = []
        split: list[tuple[int, ResultLine]] = []
        for offset, line in failed:
            if getattr(line, "is_unknown", False):
                self._telemetry.count("unknown_row_codes", account=lot.key.account)
            if task.ledger.is_settled(offset):
                continue
            row = known.get(offset)
            left_s = None if row is None else (row.deadline_ms - now_ms) / 1000
            fate = self._fate(lot, offset, line.row_class, policy, left_s, wish_rows, retry_after_s)
            counts = SYNC_TRIES if lot.lane is Lane.SYNC else line.row_class.value
            deadline_ms = None if row is None else row.deadline_ms
            if fate.action is Action.KEEP:
                kept = line.row_class if line.row_class in KEPT else RowClass.BATCH_FAILED
                lane = lot.lane if line.row_class is RowClass.ACCOUNT else Lane.BATCH
                heirs.add(Onward(lane, policy.backoff_s), kept.value, kept, offset, deadline_ms)
            elif fate.action is Action.AGAIN:
                heirs.add(Onward(Lane.BATCH, fate.wait_s), counts, line.row_class, offset, deadline_ms)
            elif fate.action is Action.SYNC:
                heirs.add(Onward(Lane.SYNC, fate.wait_s), counts, line.row_class, offset, deadline_ms)
            elif fate.action is Action.SPLIT:
                split.append((offset, line))
            else:
                final.append((offset, line, fate.action))
        if split:
            final += await self._split(task, lot, split, known, snapshot)
        for some in batches(final, AT_ONCE_ROWS):
            await self._fail(task, lot, some, known, snapshot)

    def _fate(
        self,
        lot: Lot,
        offset: int,
        row_class: RowClass,
        policy: RetryPolicy,
        left_s: float | None,
        wish_rows: str | None,
        retry_after_s: float | None,
    ) -> Fate:
        if row_class is RowClass.CANCELLED and wish_rows is not None:
            # Cancelled because somebody wanted it so: what he said of the rows goes before the retry table.
            if wish_rows == RESCUE_WISH:
                return Fate(Action.SYNC if policy.has_lane and left_s is not None else Action.KEEP)
            return Fate(Action.FAIL if wish_rows == "fail" else Action.KEEP)
        if lot.lane is Lane.SYNC:
            return decide_sync(row_class, lot.attempts_of(SYNC_TRIES, offset), policy, left_s, retry_after_s)
        attempts = lot.attempts_of(row_class.value, offset)
        fate = decide(row_class, attempts, policy, left_s)
        if fate.action is Action.SYNC and (self.room is None or not self.room.reserve(lot.key)):
            self._telemetry.count("sync_lane_refused", reason="budget")
            return decide(row_class, attempts, replace(policy, has_lane=False), left_s)
        return fate

    async def _rows(self, partition: int, offsets: Sequence[int]) -> Mapping[int, IndexRow]:
        return await self._store.get_rows(partition, offsets) if offsets else {}

    async def _split(
        self,
        task: PartitionTask,
        lot: Lot,
        split: Sequence[tuple[int, ResultLine]],
        known: Mapping[int, IndexRow],
        snapshot: BatchSnapshot | None,
    ) -> list[tuple[int, ResultLine, Action]]:
        """Publish the parts of the rows that can be cut; returns the others, which fail."""
        left = dict(split)
        now = self._clock.now()
        async with aclosing(self._source.read(task.partition, OffsetSet(left))) as reading:
            async for records in reading:
                for record in records:
                    line, row = left.get(record.offset), known.get(record.offset)
                    if line is None or row is None:
                        continue
                    parts = self._splitter.parts(record, row, lot.key, now)
                    if parts is None:
                        continue
                    self._telemetry.count("rows_split")
                    await task.settle([self._outcomes.split(task, lot, row, line, parts, snapshot, now)])
                    del left[record.offset]
        return [
            (offset, structs.replace(line, code=line.code or "not_divisible"), Action.FAIL)
            for offset, line in left.items()
        ]

    async def _fail(
        self,
        task: PartitionTask,
        lot: Lot,
        final: Sequence[tuple[int, ResultLine, Action]],
        known: Mapping[int, IndexRow],
        snapshot: BatchSnapshot | None,
    ) -> None:
        offsets = OffsetSet(offset for offset, _, _ in final if not task.ledger.is_settled(offset))
        if not offsets:
            return
        originals = await self._source.originals(task.partition, offsets)
        now = self._clock.now()
        settlements: list[Settlement] = []
        for offset, line, action in final:
            if offset in offsets:
                row = known.get(offset) or lost_row(offset, lot)
                original = originals.get(offset)
                for_review = action is Action.REVIEW
                settlements.append(
                    self._outcomes.failure(task, lot, row, line, original, snapshot, now, for_review=for_review)
                )
        self._outcomes.tell_turnaround([row for row in known.values() if row.offset in offsets][:3], now)
        await task.settle(settlements)

    def heirs(
        self, task: PartitionTask, lot: Lot, heirs: Heirs, ledger: PartitionLedger, cut: Mapping[str, int] = NOT_CUT
    ) -> list[Lot]:
        """The waiting lots of a lot's rows that travel again; only rows the lot still holds.

        ``cut``: what a batch that they are part of may hold (``PACK_TOKENS``, ``PACK_ROWS``).
        """
        held = ledger.held_by(lot.lot_id)
        made: list[Lot] = []
        for onward, ended_in in heirs.rows.items():
            mine = {counts: rows & held for counts, rows in ended_in.items()}
            rows = OffsetSet()
            for some in mine.values():
                rows |= some
            if not rows:
                continue
            counted = {counts: some for counts, some in mine.items() if counts not in KEPT}
            heir = waiting_lot(
                task,
                ledger,
                [lot],
                rows,
                counted,
                self._clock,
                onward.wait_s,
                onward.lane,
                heirs.due.get(onward),
                is_held=RowClass.ACCOUNT.value in ended_in,
            )
            made.append(replace(heir, extra={**heir.extra, **cut}) if cut else heir)
        return made

    def tell(
        self, task: PartitionTask, lot: Lot, heirs: Heirs, made: Sequence[Lot], record: OnwardRecord
    ) -> list[OutRecord]:
        """The events of rows that travel again, for the transaction that makes their heirs."""
        records: list[OutRecord] = []
        for heir in made:
            for onward, by_class in heirs.classes.items():
                if onward.lane is not heir.lane or heir.offsets.isdisjoint(_union(heirs.rows[onward])):
                    continue
                records.append(record(lot, heir, by_class))
                for row_class, rows in by_class.items():
                    self._telemetry.count("rows_retried", rows, **{"class": row_class})
                    self._telemetry.event(
                        "rows_retried",
                        batch_id=lot.lot_id,
                        partition=task.partition,
                        row_class=row_class,
                        rows=rows,
                        submission=heir.submission,
                    )
        return records


OnwardRecord = Callable[[Lot, Lot, Mapping[str, int]], OutRecord]


def _union(sets: Mapping[str, OffsetSet]) -> OffsetSet:
    union = OffsetSet()
    for some in sets.values():
        union |= some
    return union


def waiting_lot(
    task: PartitionTask,
    ledger: PartitionLedger,
    sources: Sequence[Lot],
    rows: OffsetSet,
    ended_in: Mapping[RowClass, OffsetSet] | Mapping[str, OffsetSet],
    clock: Clock,
    wait_s: float,
    lane: Lane = Lane.BATCH,
    due: Mapping[int, int] | None = None,
    *,
    is_held: bool = False,
) -> Lot:
    """A WAITING lot of rows that get another submission, with what they have been through.

    ``is_held`` says that they wait only because of a hold, so that the clock of their age stands still.

    ``due`` counts the rows by the quarter-hour of their deadline; left out, that of the first source stands for it:
    its earliest quarter is never later than the rows' own.
    """
    now = clock.now()
    pattern = sources[0]
    share = len(rows) / max(1, pattern.own_rows)
    kept = {name: value for name, value in pattern.extra.items() if name in CARRIED}
    if (held := held_s(pattern, now)) > 0:
        kept[HELD_S] = round(held)
    if is_held:
        kept[HELD_SINCE] = round(now.timestamp() * 1000)
    return Lot(
        lot_id=task.new_lot_id(),
        lane=lane,
        state=LotState.WAITING,
        key=pattern.key,
        offsets=rows,
        submission=ledger.next_submission(rows),
        partitions=(task.partition,),
        created_at=now,
        rows=len(rows),
        tokens=round(pattern.own_tokens * share),
        bytes=round(pattern.own_bytes * share),
        own_rows=len(rows),
        own_tokens=round(pattern.own_tokens * share),
        own_bytes=round(pattern.own_bytes * share),
        attempts=carry_attempts(sources, rows, ended_in),
        due=pattern.due if due is None else due,
        not_before=now + timedelta(seconds=wait_s),
        extra=kept,
    )


def held_s(lot: Lot, now: datetime) -> float:
    """Seconds that the rows of a lot have spent in holds, as far as the ledger tells."""
    before, since_ms = lot.extra.get(HELD_S), lot.extra.get(HELD_SINCE)
    total = float(before) if isinstance(before, int | float) else 0.0
    if isinstance(since_ms, int) and lot.state is LotState.WAITING:
        total += max(0.0, now.timestamp() - since_ms / 1000)
    return total


def lost_row(offset: int, lot: Lot) -> IndexRow:
    """The index row of a record that the log has deleted: its own words are gone, its outcome is not."""
    deadline_ms = round(lot.created_at.timestamp() * 1000)
    return IndexRow(offset, "", None, (), deadline_ms, deadline_ms, lot.key.digest)


def without_source(line: ResultLine) -> ResultLine:
    """The line of a row whose record the log has deleted, marked as such."""
    return structs.replace(line, flags=(*line.flags, RowFlag.SOURCE_DELETED))


def batches(items: Sequence[T], size: int, bytes_of: Callable[[T], int] = lambda _: 0) -> Iterator[Sequence[T]]:
    """The items in pieces of at most ``size`` and, but for a larger one alone, ``CHUNK_BYTES``."""
    start = size_bytes = 0
    for end, item in enumerate(items):
        more_bytes = bytes_of(item)
        if end > start and (end - start >= size or size_bytes + more_bytes > CHUNK_BYTES):
            yield items[start:end]
            start, size_bytes = end, 0
        size_bytes += more_bytes
    if start < len(items):
        yield items[start:]
