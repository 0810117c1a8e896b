"""Intake: the one loop that reads the input topic and does nothing slow.

A record becomes an index row, a spooled line and a place in an open batch; a bad one becomes a failure on its
partition's settle queue. No Kafka write happens for a good record: the input topic itself is the
write-ahead log.

Sealing by size happens here, as rows come in; sealing by time happens in ``run_sealing``, under the same lock, so
that a batch is never closed between a row's place in it and the row's line.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, cast

from batchferry.config import Settings
from batchferry.domain.accumulator import Accumulator, Sealed, SealLimits, SealReason
from batchferry.domain.batchkey import BatchKey
from batchferry.domain.errors import KafkaUnavailable, PartitionLost, StoreUnavailable
from batchferry.domain.ids import MAX_WIRE_ID_CHARS, new_batch_id
from batchferry.domain.requests import BadRecord, check_timestamp
from batchferry.engine.failpoints import Failpoint, reach
from batchferry.engine.outcomes import OutcomeWriter
from batchferry.engine.partition import PartitionTask, Settlement
from batchferry.engine.routing import Router
from batchferry.engine.rowsource import Accepted, RowSource
from batchferry.engine.sealed import SealedBatch, SealedPart
from batchferry.engine.ways import Ways
from batchferry.ports import BatchProvider, Clock, IndexRow, LocalStore, Record, RequestConsumer, SpoolRef, Telemetry

POLL_TIMEOUT_MS = 200
SEAL_TICK_S = 0.25
"""Most real seconds between two looks at the open batches' times: a new row may be due before the others."""
SEAL_SLACK_S = 0.01
"""Service-clock seconds added, so that rounding does not wake us just before the time."""
CATCHING_UP_S = 60.0
"""While a backlog streams in, a due batch may wait so long (service time) for the rest of it."""
DISK_RESERVE_BYTES = 64 * 1024**2
"""With less free space than this on the state folder's file system the input waits: result files need room too."""
DISK_RESERVE_SHARE = 8
"""On a small file system the reserve is one part in so many of it."""
INDEX_LOW_SHARE = 0.75
"""Paused by a full index, the input is read again below this share of its limit."""
UNLIKE_ROWS = 499
"""Full batches of an account without metadata differ by up to so many rows, so that a lost create is known again,"""
UNLIKE_SHARE = 20
"""and by one part in so many at most."""
STORE_PAUSE_S = 2.0
KAFKA_PAUSE_S = 2.0
"""Real seconds before the next poll after one that failed."""


def disk_reserve_bytes(total_bytes: int) -> int:
    """How much of a file system of this size must stay free."""
    return min(DISK_RESERVE_BYTES, total_bytes // DISK_RESERVE_SHARE)


NewBatch = Callable[[SealedBatch], Awaitable[None]]


class Intake:
    """Reads, accepts, spools, accumulates."""

    def __init__(
        self,
        settings: Settings,
        consumer: RequestConsumer,
        store: LocalStore,
        clock: Clock,
        telemetry: Telemetry,
        router: Router,
        source: RowSource,
        outcomes: OutcomeWriter,
        providers: Mapping[str, BatchProvider],
        tasks: Mapping[int, PartitionTask],
        new_batch: NewBatch,
        ways: Ways,
    ) -> None:
        self._settings = settings
        self._ways = ways
        self._limits = settings.limits
        self._consumer = consumer
        self._store = store
        self._clock = clock
        self._telemetry = telemetry
        self._router = router
        self._source = source
        self._outcomes = outcomes
        self._providers = providers
        self._head_bytes = max((len(one.line_head("w" * MAX_WIRE_ID_CHARS)) for one in providers.values()), default=0)
        self._tasks = tasks
        self._new_batch = new_batch
        self.accumulator = Accumulator(self._limits.max_open_keys, self._limits_of)
        self._lock = asyncio.Lock()
        self._is_paused = False
        self._is_catching_up = False
        self._stopping = False
        self.last_poll_at = 0.0
        """Real seconds (event loop time) when the last poll returned; the watchdog reads it."""

    def _limits_of(self, key: BatchKey, limits: SealLimits) -> SealLimits:
        """A batch that only its number of rows tells from its siblings gets a number of its own, by chance."""
        if not self._providers[key.account].is_inline:
            return limits
        fewer = secrets.randbelow(1 + min(UNLIKE_ROWS, limits.max_rows // UNLIKE_SHARE))
        return replace(limits, max_rows=limits.max_rows - fewer)

    # --------------------------------------------------------------------------------------------- reading

    async def run(self) -> None:
        """Poll until stopped."""
        loop = asyncio.get_running_loop()
        while not self._stopping:
            try:
                polled = await self._consumer.poll(
                    self._limits.poll_records, 0 if self._is_catching_up else POLL_TIMEOUT_MS
                )
            except KafkaUnavailable:
                # Nothing was handed over and no position moved: the same records come with a later poll.
                self._telemetry.event("kafka_unavailable", what="intake")
                await asyncio.sleep(KAFKA_PAUSE_S)
                continue
            self.last_poll_at = loop.time()
            # Records belong to the lives that asked for them. A partition may be lost and restored while another one's
            # records are taken; its next life reads from its own position and must not see these.
            lives = {partition: self._tasks.get(partition) for partition in polled}
            taken = 0
            for partition, records in polled.items():
                task = lives[partition]
                if task is None or not task.is_live:
                    continue
                taken += len(records)
                await self._take_safely(task, records)
            for partition, position in self._consumer.lost_positions().items():
                task = self._tasks.get(partition)
                if task is not None:  # its next life finds out which rows the log has deleted, and says so
                    task.lose(f"the input log no longer has offset {position}")
            self._is_catching_up = taken >= self._limits.poll_records // 2
            self._note_trailing_gaps()
            await self._mind_the_bounds()

    def stop(self) -> None:
        """Let the running poll be the last."""
        self._stopping = True

    async def _take_safely(self, task: PartitionTask, records: Sequence[Record]) -> None:
        with contextlib.suppress(PartitionLost):
            await self._or_give_up(self._take(task, records))

    async def _or_give_up(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the work; when the disk does not take it, end the life of every partition.

        What was half written cannot be told from what was not, and a batch has rows of several partitions. All of it
        is a cache: the next lives read it again, after a pause.
        """
        try:
            await work
        except StoreUnavailable:
            self._telemetry.event("store_unavailable")
            for task in list(self._tasks.values()):
                task.lose("the local disk does not take what we write")
            await asyncio.sleep(STORE_PAUSE_S)

    async def _take(self, task: PartitionTask, records: Sequence[Record]) -> None:
        now = self._clock.now()
        now_ms = round(now.timestamp() * 1000)
        batches: list[SealedBatch] = []
        refused: list[Settlement] = []
        try:
            async with self._lock:
                await self._spool(task, records, now, now_ms, batches, refused)
        except PartitionLost:
            refused.clear()
        for batch in batches:  # they have rows of other partitions too
            await self._new_batch(batch)
        if refused:
            await task.settle(refused)

    async def _spool(
        self,
        task: PartitionTask,
        records: Sequence[Record],
        now: datetime,
        now_ms: int,
        batches: list[SealedBatch],
        refused: list[Settlement],
    ) -> None:
        """Take the records of one partition in; sealed batches and refusals are added to the two lists.

        Raises:
            PartitionLost: the partition's life ended while a batch was being closed; nothing of it is left here.
        """
        partition = task.partition
        ledger = task.ledger
        accept = self._source.accept
        add = self.accumulator.add
        renderers = {name: provider.render_line for name, provider in self._providers.items()}
        rows: list[IndexRow] = []
        pending: dict[BatchKey, list[tuple[int, bytes]]] = {}
        held = ledger.held() if records and records[0].offset < task.known_until else None
        expected = task.next_offset
        skew_s = self._limits.max_clock_skew_s
        latest_ms = now_ms + round(skew_s * 1000)
        known_until = task.known_until
        try:
            for record in records:
                offset = record.offset
                if offset < expected:
                    continue  # delivered before
                if offset > expected:
                    task.note_gap(expected, offset)
                is_known = False
                if offset < known_until:
                    if ledger.is_settled(offset):
                        expected = offset + 1
                        continue
                    is_known = held is not None and offset in held
                expected = offset + 1
                if 0 <= record.timestamp <= latest_ms:
                    accepted = accept(record, now_ms)
                else:
                    accepted = check_timestamp(record.timestamp, now, skew_s) or accept(record, now_ms)
                if type(accepted) is not Accepted:
                    if not is_known:
                        refused.append(self._refuse(task, record, cast("BadRecord", accepted), now))
                    continue
                row, request, routed, ship_by_ms = accepted
                rows.append(row)
                if is_known:
                    continue  # in a lot already: only its words are needed, for the outcome
                key = routed.key
                line = renderers[key.account](request.url, request.body)
                size_bytes = len(line) + self._head_bytes
                if (
                    row.deadline_ms < now_ms + routed.late_ms
                    or request.tokens > routed.long_tokens
                    or request.priority_now
                    or routed.is_special
                    or row.t0_ms + routed.max_age_ms < now_ms
                ):
                    way = self._ways.choose(task, record, accepted, size_bytes, now)
                    if type(way) is not BatchKey:
                        if way is not None:
                            refused.append(cast("Settlement", way))
                        continue
                    key = way
                sealed = add(
                    key,
                    routed.limits,
                    partition,
                    offset,
                    size_bytes=size_bytes,
                    tokens=request.tokens,
                    inputs=request.inputs,
                    t0_ms=row.t0_ms,
                    ship_by_ms=ship_by_ms,
                    deadline_ms=row.deadline_ms,
                )
                if not sealed:
                    pending.setdefault(key, []).append((offset, line))
                    continue
                for closed in sealed:
                    part = closed.batch.parts.get(partition)
                    if part is not None and part.offsets[-1] == offset:
                        pending.setdefault(key, []).append((offset, line))
                        line = b""
                    self._append(partition, pending)
                    batches.append(await self._close(closed))
                    if not task.is_live:  # its rows were dropped meanwhile; adding more would outlive it
                        self.accumulator.drop_partition(partition)
                        raise PartitionLost(partition, task.lost_reason)
                if line:
                    pending.setdefault(key, []).append((offset, line))
        finally:
            if task.is_live:
                self._append(partition, pending)
                if rows:
                    await self._store.put_rows(partition, rows)
                task.next_offset = max(task.next_offset, expected)
                if records:
                    task.note_read(records[-1])
                reach(Failpoint.ROWS_SPOOLED)
        read_bytes = sum([len(record.value or b"") for record in records])
        self._telemetry.count("records_read", len(records))
        self._telemetry.count("record_bytes", read_bytes)
        self._telemetry.event("records_read", partition=partition, records=len(records), bytes=read_bytes)

    def _append(self, partition: int, pending: dict[BatchKey, list[tuple[int, bytes]]]) -> None:
        for key, lines in pending.items():
            self._store.append(key, partition, lines)
        pending.clear()

    def _refuse(self, task: PartitionTask, record: Record, bad: BadRecord, now: datetime) -> Settlement:
        self._telemetry.event("record_refused", partition=record.partition, offset=record.offset, rule=str(bad.rule))
        self._telemetry.count("bad_records", rule=str(bad.rule))
        return self._outcomes.bad_record(task, record, bad, now)

    def _note_trailing_gaps(self) -> None:
        for partition, task in self._tasks.items():
            if not task.is_live:
                continue
            position = self._consumer.position(partition)
            if position is not None and position > task.next_offset:
                task.note_gap(task.next_offset, position)
                task.next_offset = position

    # --------------------------------------------------------------------------------------------- sealing

    async def run_sealing(self) -> None:
        """Seal by time until cancelled: when the next batch is due, and looking again as rows come in."""
        while True:
            next_due_ms = self.accumulator.next_due_ms()
            if next_due_ms is None:
                await asyncio.sleep(SEAL_TICK_S)
                continue
            wait_s = max(0.0, next_due_ms / 1000 + self._patience_s - self._clock.now().timestamp())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SEAL_TICK_S):
                    await self._clock.sleep(wait_s + SEAL_SLACK_S)
            await self._or_give_up(self.seal_due())

    @property
    def _patience_s(self) -> float:
        """How much later than its time a batch leaves now."""
        return CATCHING_UP_S if self._is_catching_up else 0.0

    async def seal_due(self) -> None:
        """Seal every open batch whose time has come; one that a backlog still streams into waits a little."""
        now_ms = round((self._clock.now().timestamp() - self._patience_s) * 1000)
        async with self._lock:
            batches = [await self._close(closed) for closed in self.accumulator.due(now_ms)]
        for batch in batches:
            await self._new_batch(batch)

    async def flush(self, key_digest: str | None, before: datetime) -> None:
        """Seal the open batches of a key (or all) that hold a row from before this instant."""
        await self._or_give_up(self._flush(key_digest, before))

    async def _flush(self, key_digest: str | None, before: datetime) -> None:
        before_ms = before.timestamp() * 1000
        async with self._lock:
            keys = [
                batch.key
                for batch in self.accumulator
                if key_digest in {None, batch.key.digest} and batch.oldest_t0_ms < before_ms
            ]
            batches = [
                await self._close(closed)
                for key in keys
                if (closed := self.accumulator.seal(key, SealReason.FLUSH)) is not None
            ]
        for batch in batches:
            await self._new_batch(batch)

    async def _close(self, closed: Sealed) -> SealedBatch:
        open_batch = closed.batch
        refs: list[SpoolRef] = []
        parts: dict[int, SealedPart] = {}
        for partition, part in sorted(open_batch.parts.items()):
            ref = await self._store.close_segment(open_batch.key, partition)
            task = self._tasks.get(partition)
            if ref is None or task is None or not task.is_live:
                continue
            refs.append(ref)
            parts[partition] = SealedPart(task, part.offset_set(), part.bytes, part.tokens, part.due)
        reach(Failpoint.BATCH_SEALED)
        now = self._clock.now()
        return SealedBatch(
            new_batch_id(now.timestamp()),
            open_batch.key,
            closed.reason,
            parts,
            tuple(refs),
            now,
            open_batch.oldest_t0_ms,
        )

    def drop_partition(self, partition: int) -> None:
        """Forget a partition's waiting rows: their new owner, or our own next life, reads them again."""
        self.accumulator.drop_partition(partition)

    # ------------------------------------------------------------------------------------------ back-pressure

    @property
    def indexed_rows(self) -> int:
        """Rows the local index holds."""
        return self._store.indexed_rows

    async def _mind_the_bounds(self) -> None:
        spooled, indexed = self._store.spooled_bytes, self.indexed_rows
        gauge = self._telemetry.gauge
        gauge("spool_bytes", spooled)
        gauge("indexed_rows", indexed)
        limits = self._limits
        low_rows = round(limits.max_index_rows * INDEX_LOW_SHARE)
        free, total = self._store.disk_bytes
        reserve = disk_reserve_bytes(total)
        full = [
            reason
            for reason, is_full in (
                ("spool", spooled >= limits.spool_high_bytes),
                ("index", indexed >= limits.max_index_rows),
                ("disk", free < reserve),
            )
            if is_full
        ]
        if full and not self._is_paused:
            self._is_paused = True
            self._telemetry.event(
                "consumption_paused", reason=",".join(full), spool_bytes=spooled, indexed_rows=indexed
            )
        elif self._is_paused and spooled < limits.spool_low_bytes and indexed <= low_rows and free >= 2 * reserve:
            self._is_paused = False
            self._telemetry.event("consumption_resumed", spool_bytes=spooled, indexed_rows=indexed)
            for partition, task in self._tasks.items():
                if task.is_live:
                    self._consumer.resume(partition)
        if self._is_paused:
            # What is sealed already will free its part by itself; of what is open only so much may stay.
            low_bytes = min(limits.spool_low_bytes, max(0, spooled + free - 2 * reserve))
            if self.accumulator.bytes > low_bytes or self.accumulator.rows > low_rows:
                await self._or_give_up(self._make_room())
            self._consumer.pause([partition for partition, task in self._tasks.items() if task.is_live])
        gauge("consumption_is_paused", 1 if self._is_paused else 0)

    async def _make_room(self) -> None:
        """Seal the largest open batch early: one a round."""
        async with self._lock:
            closed = self.accumulator.seal_largest()
            batch = None if closed is None else await self._close(closed)
        if batch is not None:
            await self._new_batch(batch)
