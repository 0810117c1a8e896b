"""Rows that get another submission: due waiting lots become small batches of their own.

They do not join the open batch of fresh rows: that would either make them wait for its time threshold or send the
fresh rows early. Bodies are read again from the input topic; what the log has lost meanwhile is a failure.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from batchferry.domain.accumulator import SealReason
from batchferry.domain.batchkey import BatchKey
from batchferry.domain.errors import KafkaUnavailable, PartitionLost, StoreUnavailable
from batchferry.domain.ids import BatchId, new_batch_id
from batchferry.domain.ledger import Lot
from batchferry.domain.offsets import OffsetSet
from batchferry.domain.retry import carry_attempts
from batchferry.engine.outcomes import OutcomeWriter
from batchferry.engine.partition import PartitionTask
from batchferry.engine.routing import Router
from batchferry.engine.rowsource import RowSource
from batchferry.engine.sealed import SealedBatch, SealedPart
from batchferry.ports import Clock, LocalStore, SpoolRef, Telemetry

TICK_S = 0.25
"""Real seconds between two looks for due lots."""


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
        is_held: Callable[[BatchKey], bool],
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

    async def run(self) -> None:
        """Pack until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            await self.pack_due()

    async def pack_due(self) -> None:
        """Seal every due waiting lot whose key is not held, merged by key up to the route's limits."""
        now = self._clock.now()
        due: dict[BatchKey, list[tuple[PartitionTask, Lot]]] = {}
        for task in [one for one in self._tasks.values() if one.is_live]:
            waiting = task.waiting_lots()
            task.packed_lots &= waiting.keys()
            for lot in waiting.values():
                is_due = lot.not_before is None or lot.not_before <= now
                if is_due and lot.lot_id not in task.packed_lots and not self._is_held(lot.key):
                    due.setdefault(lot.key, []).append((task, lot))
        for key, lots in due.items():
            await self._pack(key, lots)

    async def _pack(self, key: BatchKey, lots: list[tuple[PartitionTask, Lot]]) -> None:
        routed = self._router.for_key(key)
        max_rows = routed.limits.max_rows if routed is not None else 1_000
        max_bytes = routed.limits.max_bytes if routed is not None else 10_000_000
        chosen: list[tuple[PartitionTask, Lot]] = []
        rows = size_bytes = 0
        for task, lot in lots:
            held_rows = len(task.ledger.held_by(lot.lot_id))
            if chosen and (rows + held_rows > max_rows or size_bytes + lot.own_bytes > max_bytes):
                continue  # the next look takes it
            chosen.append((task, lot))
            rows += held_rows
            size_bytes += lot.own_bytes
        for task, lot in chosen:
            task.packed_lots.add(lot.lot_id)
        batch_id = new_batch_id(self._clock.now().timestamp())
        spool_key = key._replace(slice=f"{key.slice}\x00{batch_id}")  # a segment of its own
        refs: list[SpoolRef] = []
        try:
            sealed = await self._spool(key, spool_key, batch_id, chosen, refs)
        except (KafkaUnavailable, StoreUnavailable, PartitionLost) as error:
            if not isinstance(error, PartitionLost):
                self._telemetry.event("rows_not_repacked", reason=type(error).__name__)
            for partition in {task.partition for task, _ in chosen}:  # the next try spools under another name
                with contextlib.suppress(StoreUnavailable):
                    half = await self._store.close_segment(spool_key, partition)
                    refs += [] if half is None else [half]
            self._store.delete_segments(refs)
            self._unpack(chosen)
            return
        if sealed is None:
            self._unpack(chosen)
        else:
            self._new_batch(sealed)

    def _unpack(self, chosen: list[tuple[PartitionTask, Lot]]) -> None:
        for task, lot in chosen:
            task.packed_lots.discard(lot.lot_id)

    async def _spool(
        self,
        key: BatchKey,
        spool_key: BatchKey,
        batch_id: BatchId,
        chosen: list[tuple[PartitionTask, Lot]],
        refs: list[SpoolRef],
    ) -> SealedBatch | None:
        now = self._clock.now()
        by_task: dict[int, tuple[PartitionTask, list[Lot]]] = {}
        for task, lot in chosen:
            by_task.setdefault(task.partition, (task, []))[1].append(lot)
        parts: dict[int, SealedPart] = {}
        for partition, (task, lots) in sorted(by_task.items()):
            wanted = OffsetSet()
            for lot in lots:
                wanted |= task.ledger.held_by(lot.lot_id)
            if not wanted:
                continue
            found = OffsetSet()
            size_bytes = tokens = 0
            async for lines in self._source.lines(partition, wanted):
                self._store.append(spool_key, partition, [(offset, line) for offset, line, _ in lines])
                for offset, line, line_tokens in lines:
                    found.add(offset)
                    size_bytes += len(line)
                    tokens += line_tokens
            lost = wanted - found
            if lost:
                self._telemetry.event("input_lost", partition=partition, rows=len(lost))
                await task.settle([self._outcomes.lost(task, offset, self._clock.now()) for offset in lost])
                await task.flush()
            if not found:
                continue
            ref = await self._store.close_segment(spool_key, partition)
            if ref is None or not task.is_live:
                continue
            refs.append(ref)
            parts[partition] = SealedPart(task, found, size_bytes, tokens, attempts=carry_attempts(lots, found, {}))
        if not parts:
            return None
        oldest = min(lot.created_at for _, lot in chosen)
        return SealedBatch(batch_id, key, SealReason.RETRY, parts, tuple(refs), now, round(oldest.timestamp() * 1000))
