"""Rows that get another submission: due waiting lots become small batches of their own.

They do not join the open batch of fresh rows: that would either make them wait for its time threshold or send the
fresh rows early. Bodies are read again from the input topic; what the log has lost meanwhile is a failure, and so
is what today's rules or routes refuse.

Whole lots are merged by what their records say of their size. The batch is closed by the rows themselves, as they are
read: the first that would break a limit stays in its lot for the next batch.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import datetime

from batchferry.domain.accumulator import OpenBatch, SealLimits, SealReason
from batchferry.domain.batchkey import BatchKey
from batchferry.domain.errors import KafkaUnavailable, PartitionLost, StoreUnavailable
from batchferry.domain.ids import BatchId, new_batch_id
from batchferry.domain.ledger import Lane, Lot
from batchferry.domain.offsets import OffsetSet
from batchferry.domain.requests import BadRecord
from batchferry.domain.retry import carry_attempts
from batchferry.domain.rows import RowClass
from batchferry.engine.fates import HELD_S, PACK_ROWS, PACK_TOKENS, SHAPE, held_s
from batchferry.engine.outcomes import OutcomeWriter
from batchferry.engine.partition import PartitionTask, Settlement
from batchferry.engine.routing import Router
from batchferry.engine.rowsource import RowSource
from batchferry.engine.sealed import SealedBatch, SealedPart
from batchferry.ports import Clock, IndexRow, LocalStore, Record, SpoolRef, Telemetry

TICK_S = 0.25
"""Real seconds between two looks for due lots."""
UNROUTED_LIMITS = SealLimits(1_000, 10_000_000)
"""For rows that no route takes any more; reading them again will refuse them."""


@dataclass(frozen=True, slots=True)
class Due:
    """A waiting lot that is due, and its rows that are in no sealed batch yet."""

    task: PartitionTask
    lot: Lot
    rows: OffsetSet

    @property
    def share(self) -> float:
        """How much of the lot the rows are."""
        return len(self.rows) / max(1, self.lot.own_rows)


class WaitingRows:
    """Packs due waiting lots of this process's partitions."""

    def __init__(
        self,
        tasks: Mapping[int, PartitionTask],
        store: LocalStore,
        clock: Clock,
        telemetry: Telemetry,
        router: Router,
        source: RowSource,
        outcomes: OutcomeWriter,
        new_batch: Callable[[SealedBatch], None],
        is_held: Callable[[BatchKey, str], bool],
        move_late: Callable[[PartitionTask, Lot], Awaitable[bool]],
    ) -> None:
        self._tasks = tasks
        self._store = store
        self._clock = clock
        self._telemetry = telemetry
        self._router = router
        self._source = source
        self._outcomes = outcomes
        self._new_batch = new_batch
        self._is_held = is_held
        self._move_late = move_late
        self._unknown_accounts: set[str] = set()
        """Accounts that the settings lack and that have been told of."""

    async def run(self) -> None:
        """Pack until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            await self.pack_due()

    async def pack_due(self) -> None:
        """Seal every due waiting lot whose key is not held, merged by key up to the route's limits."""
        now = self._clock.now()
        due: dict[BatchKey, list[Due]] = {}
        for task in [one for one in self._tasks.values() if one.is_live]:
            waiting = task.waiting_lots(Lane.BATCH)
            for gone in task.packed_rows.keys() - task.waiting_lots().keys():
                del task.packed_rows[gone]
            for lot in waiting.values():
                if lot.not_before is not None and lot.not_before > now:
                    continue
                if not self._has_account(lot) or self._is_held(lot.key, str(lot.extra.get(SHAPE, ""))):
                    continue
                with contextlib.suppress(PartitionLost, KafkaUnavailable, StoreUnavailable):
                    await self._move_late(task, lot)
                    rows = _free_rows(task, lot)
                    if rows and task.is_live:
                        due.setdefault(lot.key, []).append(Due(task, lot, rows))
        for key, lots in due.items():
            await self._pack(key, lots)

    def _has_account(self, lot: Lot) -> bool:
        """Rows of an account that the settings lack wait until it is there again; said once an account."""
        account = lot.key.account
        if self._source.has_account(account):
            return True
        if account not in self._unknown_accounts:
            self._unknown_accounts.add(account)
            self._telemetry.event("account_unknown", batch_id=lot.lot_id, account=account)
        return False

    def _choose(self, key: BatchKey, lots: list[Due]) -> tuple[list[Due], SealLimits]:
        """Lots that together seem to fit one batch, at least one, and what the batch may hold."""
        routed = self._router.for_key(key)
        limits = UNROUTED_LIMITS if routed is None else routed.limits
        max_tokens, max_rows = limits.max_tokens, limits.max_rows
        chosen: list[Due] = []
        rows = size_bytes = tokens = 0.0
        for due in lots:
            more_rows, more_bytes = rows + len(due.rows), size_bytes + due.lot.own_bytes * due.share
            more_tokens = tokens + due.lot.own_tokens * due.share
            most = _smaller(max_tokens, due.lot.extra.get(PACK_TOKENS))
            most_rows = _smaller(max_rows, due.lot.extra.get(PACK_ROWS)) or max_rows
            breaks_tokens = most is not None and more_tokens > most
            if chosen and (more_rows > most_rows or more_bytes > limits.max_bytes or breaks_tokens):
                continue  # the next look takes it
            chosen.append(due)
            rows, size_bytes, tokens, max_tokens, max_rows = more_rows, more_bytes, more_tokens, most, most_rows
        return chosen, replace(limits, max_tokens=max_tokens, max_rows=max_rows)

    async def _pack(self, key: BatchKey, lots: list[Due]) -> None:
        # Since the rows were looked up, others were waited for: some may have gone to the sync lane meanwhile.
        lots = [replace(due, rows=free) for due in lots if (free := due.rows & _free_rows(due.task, due.lot))]
        if not lots:
            return
        chosen, limits = self._choose(key, lots)
        batch_id = new_batch_id(self._clock.now().timestamp())
        spool_key = key._replace(slice=f"{key.slice}\x00{batch_id}")  # a segment of its own
        refs: list[SpoolRef] = []
        for due in chosen:  # from here on nobody else takes them
            due.task.packed_rows.setdefault(due.lot.lot_id, OffsetSet()).update(due.rows)
        try:
            sealed = await self._spool(OpenBatch(key, limits), spool_key, batch_id, chosen, refs)
        except (KafkaUnavailable, StoreUnavailable, PartitionLost) as error:
            if not isinstance(error, PartitionLost):
                self._telemetry.event("rows_not_repacked", reason=type(error).__name__)
            for partition in {due.task.partition for due in chosen}:  # the next try spools under another name
                with contextlib.suppress(StoreUnavailable):
                    half = await self._store.close_segment(spool_key, partition)
                    refs += [] if half is None else [half]
            sealed = None
        for due in chosen:
            part = None if sealed is None else sealed.parts.get(due.task.partition)
            left = due.rows if part is None else due.rows - part.offsets
            if left and due.lot.lot_id in due.task.packed_rows:
                due.task.packed_rows[due.lot.lot_id] -= left
        if sealed is not None:
            self._new_batch(sealed)
        kept = () if sealed is None else sealed.refs
        with contextlib.suppress(StoreUnavailable):  # the books are right even then, and a start wipes what is left
            self._store.delete_segments([ref for ref in refs if ref not in kept])

    async def _spool(
        self, batch: OpenBatch, spool_key: BatchKey, batch_id: BatchId, chosen: list[Due], refs: list[SpoolRef]
    ) -> SealedBatch | None:
        """Read the rows into segments of their own until the batch is full; every segment made is put into ``refs``."""
        now = self._clock.now()
        by_partition: dict[int, list[Due]] = {}
        for due in chosen:
            by_partition.setdefault(due.task.partition, []).append(due)
        parts: dict[int, SealedPart] = {}
        kept: list[SpoolRef] = []
        for partition, mine in sorted(by_partition.items()):
            task = mine[0].task
            found, size_bytes, tokens, is_full = await self._read_rows(batch, spool_key, task, mine)
            ref = await self._store.close_segment(spool_key, partition)
            if ref is not None:
                refs.append(ref)
                if task.is_live and found:
                    kept.append(ref)
                    lots = [due.lot for due in mine]
                    attempts = carry_attempts(lots, found, {})
                    held = max(held_s(lot, now) for lot in lots)
                    extra = {HELD_S: round(held)} if held else {}
                    quarters: Counter[int] = Counter()
                    for lot in lots:
                        quarters.update(lot.due)
                    parts[partition] = SealedPart(
                        task, found, size_bytes, tokens, due=dict(quarters), attempts=attempts, extra=extra
                    )
            if is_full:
                break
        if not parts:
            return None
        oldest = min(due.lot.created_at for due in chosen)
        return SealedBatch(
            batch_id, batch.key, SealReason.RETRY, parts, tuple(kept), now, round(oldest.timestamp() * 1000)
        )

    async def _read_rows(
        self, batch: OpenBatch, spool_key: BatchKey, task: PartitionTask, mine: list[Due]
    ) -> tuple[OffsetSet, int, int, bool]:
        """(rows spooled, their bytes in the file, their tokens, whether the batch has no room for the next row)."""
        partition = task.partition
        wanted = OffsetSet()
        for due in mine:
            wanted |= due.rows
        found, refused = OffsetSet(), OffsetSet()
        size_bytes = tokens = 0
        now = self._clock.now()
        now_ms = now.timestamp() * 1000 - max(held_s(due.lot, now) for due in mine) * 1000
        stop: int | None = None
        async with aclosing(self._source.lines(partition, wanted, batch.key.account)) as reading:
            async for some in reading:
                lines: list[tuple[int, bytes]] = []
                old: list[IndexRow] = []
                for row in some.lines:
                    if row.row.t0_ms + row.max_age_ms < now_ms:
                        old.append(row.row)
                        continue
                    if batch.full_for(row.file_bytes, row.tokens, row.inputs):
                        stop = row.offset
                        break
                    lines.append((row.offset, row.line))
                    found.add(row.offset)
                    size_bytes += row.file_bytes
                    tokens += row.tokens
                    batch.rows += 1
                    batch.bytes += row.file_bytes
                    batch.tokens += row.tokens
                    batch.inputs += row.inputs
                if lines:
                    self._store.append(spool_key, partition, lines)
                if old:
                    refused |= OffsetSet(row.offset for row in old)
                    await task.settle([self._too_old(task, row, now) for row in old])
                bad = [(record, why) for record, why in some.refused if stop is None or record.offset < stop]
                if bad:
                    refused |= OffsetSet(record.offset for record, _ in bad)
                    await task.settle([self._refuse(task, record, why) for record, why in bad])
                if stop is not None:
                    break
        lost = wanted - found - refused
        if stop is not None:
            lost = lost.within(0, stop)
        if lost:
            self._telemetry.count("input_lost_records", len(lost))
            self._telemetry.event("input_lost", partition=partition, rows=len(lost))
            await task.settle([self._outcomes.lost(task, offset, self._clock.now()) for offset in lost])
        if lost or refused:
            await task.flush()
        return found, size_bytes, tokens, stop is not None

    def _too_old(self, task: PartitionTask, row: IndexRow, now: datetime) -> Settlement:
        """Nobody is thought to want its answer any more."""
        return self._outcomes.given_up(
            task,
            row,
            RowClass.MAX_AGE,
            f"the request is {(now.timestamp() - row.t0_ms / 1000) / 3600:.1f} h old",
            None,
            now,
            remedy="send it again if an answer is still wanted, or raise routes.<name>.max_age_s",
        )

    def _refuse(self, task: PartitionTask, record: Record, bad: BadRecord) -> Settlement:
        """A record that was accepted once breaks a rule or has no route today: its failure names the rule."""
        self._telemetry.event("record_refused", partition=record.partition, offset=record.offset, rule=str(bad.rule))
        self._telemetry.count("bad_records", rule=str(bad.rule))
        return self._outcomes.bad_record(task, record, bad, self._clock.now())


def _free_rows(task: PartitionTask, lot: Lot) -> OffsetSet:
    """Rows that the lot holds and that nobody of this process has begun to take out of it."""
    return task.ledger.held_by(lot.lot_id) - task.packed_rows.get(lot.lot_id, OffsetSet())


def _smaller(limit: int | None, other: object) -> int | None:
    """The smaller of a limit and what a ledger record says, which may be anything."""
    if not isinstance(other, int) or other < 1:
        return limit
    return other if limit is None else min(limit, other)
