"""One owned input partition: its ledger, its transactional producer, its settle queue, its restore.

Owning a partition means: the producer was initialised (which fences the predecessor and ends its
transaction), and *then* the ledger was read to its end. Everything durable goes through ``commit``: one
transaction at a time, applied to the in-memory ledger after Kafka has taken it.

A ``PartitionTask`` lives once. After any failed transaction it is lost for ever; whoever still wants the partition
makes a new one, which restores from the ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import NoReturn

from batchferry.domain.errors import InvariantBroken, LedgerDamaged, PartitionLost
from batchferry.domain.ids import LedgerId, LotId, new_batch_id, new_ledger_id
from batchferry.domain.ledger import (
    Claim,
    Lane,
    LedgerEntry,
    LedgerHeader,
    Lot,
    LotState,
    LotTally,
    Tombstone,
    Watermark,
    Witness,
    encode,
    lot_key,
)
from batchferry.domain.offsets import OffsetSet
from batchferry.domain.orphans import HORIZON_S as ORPHAN_HORIZON_S
from batchferry.domain.partition import PartitionLedger
from batchferry.engine.failpoints import AFTER, BEFORE, Failpoint, reach, reach_transaction
from batchferry.ports import Clock, KafkaPort, LogReader, OutRecord, PartitionProducer, Record, Telemetry

IDLE_REFRESH_S = 12 * 3600.0
"""Real seconds after which an idle partition writes its watermark: producer ids and group offsets expire."""
CLOSE_PATIENCE_S = 3.0
"""Real seconds that a transaction under way gets when the task is closed."""
GAP_PATIENCE_S = 5.0
"""Real seconds before offsets that hold no record get a transaction of their own."""


SETTLE = "settle"
"""The purpose of a transaction that publishes outcomes."""
FENCED = "fenced"
"""Stands in the reason of a ``PartitionLost`` that a newer owner caused."""
QUEUED_CHUNKS = 4
"""Whoever queues outcomes waits while as many bytes are queued as fill so many transactions."""
RECORD_FRAME_BYTES = 200
"""Counted for a record's headers and framing."""


class TaskState(StrEnum):
    """Where the task is."""

    RESTORING = "restoring"
    LIVE = "live"
    LOST = "lost"


@dataclass(slots=True)
class Settlement:
    """One row's outcome, rendered and sized, on its way into a settle transaction.

    ``only_if_held_by``: the outcome counts only while this lot holds the row (failures, expiries, absences);
    None counts whenever the row is unsettled (successes, bad records).
    """

    offset: int
    record: OutRecord
    deadline_ms: int
    only_if_held_by: LotId | None = None
    is_missed: bool = False
    """The row's deadline was over when its outcome was made."""
    also: tuple[OutRecord, ...] = ()
    """Records that are published with it or not at all: the parts of a row that was split."""

    size_bytes: int = 0
    """What it weighs in a transaction."""

    def __post_init__(self) -> None:
        record = self.record
        self.size_bytes = len(record.value or b"") + len(record.key or b"") + RECORD_FRAME_BYTES
        for one in self.also:
            self.size_bytes += len(one.value or b"") + len(one.key or b"") + RECORD_FRAME_BYTES


@dataclass(frozen=True, slots=True)
class PartitionPlaces:
    """The names a partition task needs."""

    requests_topic: str
    ledger_topic: str
    group: str

    def transactional_id(self, partition: int) -> str:
        """Never changes between versions: it is what fences."""
        return f"{self.ledger_topic}.{partition}"


@dataclass(frozen=True, slots=True)
class SettleLimits:
    """How large a settle transaction gets, and how long outcomes wait for one. Delay in real seconds."""

    chunk_rows: int
    chunk_bytes: int
    max_delay_s: float
    queue_rows: int


@dataclass(slots=True)
class RestoreFacts:
    """What restore learned about the input log."""

    log_start: int = 0
    log_end: int = 0
    lost: OffsetSet = field(default_factory=OffsetSet)
    """Unsettled offsets the log has deleted and that no provider has."""
    expiring: OffsetSet = field(default_factory=OffsetSet)
    """Open and waiting offsets whose records the log may delete soon: to be settled as failures, not read again."""
    ledger_records: int = 0
    """Records of the ledger that were read."""


class PartitionTask:
    """One life of an owned partition."""

    def __init__(
        self,
        partition: int,
        kafka: KafkaPort,
        clock: Clock,
        telemetry: Telemetry,
        places: PartitionPlaces,
        limits: SettleLimits,
        transactions: asyncio.Semaphore,
    ) -> None:
        """Take the parts; nothing happens before ``restore``.

        Args:
            transactions: bounds the settle transactions open in this process at one time.
        """
        self.partition = partition
        self.ledger = PartitionLedger(partition)
        self.state = TaskState.RESTORING
        self.lost_reason = ""
        self.next_offset = 0
        """The next offset the intake expects; everything below has been read, settled, or is in a lot."""
        self.known_until = 0
        """Offsets at and above this one cannot be in the ledger yet."""
        self.packed_rows: dict[LotId, OffsetSet] = {}
        """Rows of waiting lots that are in a sealed batch of this process already."""
        self.rescued: dict[LotId, OffsetSet] = {}
        """Rows that run beside a batch which names them too: one of the two answers will be waste."""
        self.last_read: Witness | None = None
        """The last record that the intake took of this partition, in this life."""
        self._new_witness: Witness | None = None
        self._gaps = OffsetSet()
        self._gap_since: float | None = None
        self._clock = clock
        self._telemetry = telemetry
        self._places = places
        self._limits = limits
        self._transactions = transactions
        self._kafka = kafka
        self._producer: PartitionProducer = kafka.partition_producer(
            places.requests_topic, partition, places.group, places.transactional_id(partition)
        )
        self._lock = asyncio.Lock()
        self._queue: list[tuple[int, int, int, Settlement]] = []
        """A heap of (flush, deadline, sequence, outcome): what is queued after a flush does not overtake it."""
        self._flushes = 0
        self._sequence = 0
        self._queued_bytes = 0
        self._settling: Sequence[tuple[int, int, int, Settlement]] = ()
        self._work = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._idle = asyncio.Condition()
        self.on_lost: Callable[[PartitionTask], None] = lambda _task: None
        """Called once, synchronously, when this life ends."""
        self.on_missed: Callable[[int, Sequence[Settlement]], OutRecord | None] = lambda _partition, _missed: None
        """Makes the event that goes out with outcomes that came after their deadline."""
        self.on_settled: Callable[[int, OffsetSet], None] = lambda _partition, _offsets: None
        """Called after each commit with the offsets it settled."""

    # ------------------------------------------------------------------------------------------- restore

    async def restore(
        self, reader: LogReader, committed: int | None, claim: Claim, retire_before_ms: int | None = None
    ) -> RestoreFacts:
        """Fence the predecessor, claim the partition, read its ledger; afterwards the task is live.

        Args:
            retire_before_ms: rows made before this instant that no provider has are about to be deleted from the log,
                and are to be given up; None: no row is.

        Raises:
            PartitionLost: somebody else fenced us meanwhile.
            KafkaUnavailable: the broker did not answer.
            LedgerDamaged, LedgerTooNew: this ledger must not be touched by us.
        """
        reach(Failpoint.RESTORE_BEGUN)
        await self._producer.init()
        reach(Failpoint.RESTORE_FENCED)
        started_at = self._clock.now()
        read = 0
        await self._transact([claim], purpose="claim")
        async for records in reader.read_to_end(self._places.ledger_topic, self.partition):
            read += len(records)
            for record in records:
                if record.key is not None:
                    self._replay(record.key, record.value)
        reach(Failpoint.RESTORE_READ)
        bounds = await reader.bounds(self._places.requests_topic, [self.partition])
        log_start, log_end = bounds[self.partition]
        first: list[LedgerEntry] = []
        if self.ledger.header is None:
            if committed is not None and committed > log_start:
                raise LedgerDamaged(
                    self.partition,
                    f"the group has committed offset {committed} but the ledger is empty",
                    "restore the ledger topic, or reset the group's offset if the rows may run again",
                )
            first.append(LedgerHeader(new_ledger_id(), created_at=self._clock.now()))
        if not self.ledger.has_watermark:
            first.append(Watermark(log_start, self._clock.now()))
        else:
            self._check_watermark(committed, log_end)
            await self.check_witness(reader, log_start, log_end)
        if first:
            is_new = self.ledger.header is None
            await self._commit_entries(first, committed_offset=None, purpose="claim")
            if is_new:
                self._telemetry.event("ledger_created", partition=self.partition, ledger_id=self.ledger_id)
        self._telemetry.batch_span(
            "restore",
            {
                "partition": self.partition,
                "records": read,
                "started_at": started_at,
                "ended_at": self._clock.now(),
            },
        )
        lost = self._lost_input(log_start)
        expiring = OffsetSet()
        if retire_before_ms is not None:
            expiring = await self._expiring(reader, max(log_start, self.ledger.watermark), log_end, retire_before_ms)
        facts = RestoreFacts(log_start, log_end, lost, expiring, read)
        self.next_offset = max(self.ledger.first_open(), log_start, (expiring.last() or -1) + 1)
        self._set_aside(expiring)
        last = (self.ledger.settled | self.ledger.held()).last()
        self.known_until = max(self.ledger.watermark, 0 if last is None else last + 1)
        self.state = TaskState.LIVE
        return facts

    def _replay(self, key: bytes, value: bytes | None) -> None:
        try:
            self.ledger.replay(key, value)
        except ValueError as error:
            raise LedgerDamaged(
                self.partition, str(error), "upgrade this replica, or restore the record from a backup of the topic"
            ) from error

    def _check_watermark(self, committed: int | None, log_end: int) -> None:
        watermark = self.ledger.watermark
        if log_end < watermark:
            raise LedgerDamaged(
                self.partition,
                f"the input ends at {log_end}, below the settled watermark {watermark}: the topic was made anew",
                "use a new group name for the new topic, or remove this group's ledger topic",
            )
        if committed is not None and committed > watermark:
            raise LedgerDamaged(
                self.partition,
                f"the group's committed offset {committed} is beyond the settled watermark {watermark}",
                f"reset the group's offset to {watermark}: the ledger alone says what was settled",
            )

    async def check_witness(self, reader: LogReader, log_start: int, log_end: int) -> None:
        """Make sure that the input is still the topic it was when the ledger's witness was read.

        A topic that was deleted and made anew under the same name has other records under the same offsets: what the
        ledger says of an offset would be believed of a request that was never answered. The client library does not
        know topics by their ids, so one remembered record tells.

        Raises:
            LedgerDamaged: it is another topic, or it has lost its end.
            KafkaUnavailable: the broker did not answer.
        """
        witness = self.ledger.witness
        if witness is None or log_start > witness.offset:
            return  # nothing was read yet, or retention has taken the witness
        if log_end > witness.offset:
            async for records in reader.read_offsets(
                self._places.requests_topic, self.partition, OffsetSet([witness.offset])
            ):
                for record in records:
                    if witness.is_seen_in(record.timestamp, record.key, record.value):
                        return
                    self._refuse_input(f"another record stands at offset {witness.offset} than was read there")
            bounds = await reader.bounds(self._places.requests_topic, [self.partition])
            if bounds[self.partition][0] > witness.offset:
                return  # retention was just faster than we
            self._refuse_input(f"no record stands at offset {witness.offset}, where one was read")
        self._refuse_input(f"the input ends at {log_end}, at or below offset {witness.offset}, which was read")

    def _refuse_input(self, problem: str) -> NoReturn:
        topic = self._places.requests_topic
        raise LedgerDamaged(
            self.partition,
            f"{topic}-{self.partition}: {problem}: the topic was made anew, or its end was lost",
            f"use a new topics.group for the new topic, or remove the topic {self._places.ledger_topic}",
        )

    def _lost_input(self, log_start: int) -> OffsetSet:
        gone = self.ledger.unsettled(OffsetSet.span(self.ledger.watermark, log_start))
        return gone - self.at_provider()

    def at_provider(self) -> OffsetSet:
        """Unsettled offsets that a provider has, or may have."""
        theirs = OffsetSet()
        for lot in self.ledger.lots.values():
            if lot.is_at_provider:
                theirs |= self.ledger.held_by(lot.lot_id)
        return theirs

    async def _expiring(self, reader: LogReader, start: int, stop: int, before_ms: int) -> OffsetSet:
        """The first rows that no provider has, up to one made at ``before_ms`` or later.

        Kafka deletes whole segments from the start of the log, by the newest timestamp in each: behind a young record
        none is deleted before it.
        """
        found = OffsetSet()
        wanted = self.ledger.unsettled(OffsetSet.span(start, stop)) - self.at_provider()
        async with aclosing(_as_generator(reader, self._places.requests_topic, self.partition, wanted)) as reading:
            async for records in reading:
                for record in records:
                    if record.timestamp >= before_ms:
                        return found
                    found.add(record.offset)
        return found

    def _set_aside(self, expiring: OffsetSet) -> None:
        """Rows that are about to be settled as failures must not join a batch meanwhile."""
        for lot_id in self.waiting_lots():
            mine = self.ledger.held_by(lot_id) & expiring
            if mine:
                self.packed_rows[lot_id] = mine

    def note_read(self, record: Record) -> None:
        """The intake has taken this record. The first one becomes the ledger's witness with the next transaction."""
        self.last_read = Witness.of(record.offset, record.timestamp, record.key, record.value)
        if self.ledger.witness is None and self._new_witness is None:
            self._new_witness = self.last_read

    def renew_witness(self, witness: Witness) -> None:
        """Remember this record instead, with the next transaction. The present one must have been checked after it."""
        if witness != self.ledger.witness:
            self._new_witness = witness

    # -------------------------------------------------------------------------------------- transactions

    @property
    def is_live(self) -> bool:
        """Whether work for this partition may still be done by this task."""
        return self.state is TaskState.LIVE

    @property
    def ledger_id(self) -> LedgerId:
        """The ledger's id; known once live."""
        if self.ledger.header is None:
            raise InvariantBroken(f"partition {self.partition} has no ledger header")
        return self.ledger.header.ledger_id

    async def commit(
        self,
        plan: Callable[[PartitionLedger], Sequence[LedgerEntry]],
        records: Sequence[OutRecord] = (),
        *,
        purpose: str = "ledger",
    ) -> Sequence[LedgerEntry]:
        """Make a plan against the ledger as it is now, and write it with ``records`` in one transaction.

        Args:
            purpose: under which the transaction is counted; one of a few words.

        A caller that is cancelled does not cut the transaction short, which would cost the partition its life: it is
        finished behind its back.

        Raises:
            PartitionLost: nothing was written, or (CommitUnknown) only the ledger can tell.
            InvariantBroken: out of the plan; nothing was written.
        """
        work = asyncio.ensure_future(self._commit(plan, records, purpose))
        work.add_done_callback(_take_exception)
        return await asyncio.shield(work)

    async def _commit(
        self, plan: Callable[[PartitionLedger], Sequence[LedgerEntry]], records: Sequence[OutRecord], purpose: str
    ) -> Sequence[LedgerEntry]:
        async with self._lock:
            self._check_live()
            entries = list(plan(self.ledger))
            if not entries and not records:
                return entries
            witness, self._new_witness = self._new_witness, None
            if witness is not None:
                entries.append(witness)
            before = self.ledger.watermark
            after = next((entry.offset for entry in entries if isinstance(entry, Watermark)), before)
            await self._commit_entries(entries, after if after != before else None, records, purpose=purpose)
            return entries

    async def _commit_entries(
        self,
        entries: Sequence[LedgerEntry],
        committed_offset: int | None,
        records: Sequence[OutRecord] = (),
        *,
        purpose: str,
    ) -> None:
        await self._transact(entries, committed_offset, records, purpose=purpose)
        for entry in entries:
            self.ledger.apply(entry)

    async def _transact(
        self,
        entries: Sequence[LedgerEntry],
        committed_offset: int | None = None,
        records: Sequence[OutRecord] = (),
        *,
        purpose: str,
    ) -> None:
        out = list(records)
        for entry in entries:
            key, value = encode(entry)
            out.append(OutRecord(self._places.ledger_topic, key, value, partition=self.partition))
        started = asyncio.get_running_loop().time()
        reach_transaction(purpose, BEFORE)
        try:
            await self._producer.transact(out, committed_offset)
        except PartitionLost as error:
            self._telemetry.count("transactions_failed", reason=type(error).__name__)
            if FENCED in error.reason:
                self._telemetry.count("partitions_fenced")
                self._telemetry.event("partition_fenced", partition=self.partition, reason=error.reason)
            self.lose(error.reason)
            raise
        except BaseException as error:
            # Cut short, or ended by a bug of ours: the producer is of no more use, and only the ledger can tell.
            self.lose(f"transaction ended by {type(error).__name__}")
            raise
        reach_transaction(purpose, AFTER)
        self._telemetry.count("transactions", purpose=purpose)
        if purpose == SETTLE:
            self._telemetry.observe("settle_transaction_seconds", asyncio.get_running_loop().time() - started)

    def _check_live(self) -> None:
        if not self.is_live:
            raise PartitionLost(self.partition, self.lost_reason or "not restored yet")

    async def confirm_ownership(self, max_age_s: float) -> None:
        """Make sure that a transaction of ours went through in the last ``max_age_s`` real seconds.

        This is the fence check before anything is done once a batch (cancel, deleting files).

        Raises:
            PartitionLost: it did not.
        """
        self._check_live()
        if asyncio.get_running_loop().time() - self._producer.last_transaction_at > max_age_s:
            async with self._lock:
                self._check_live()
                watermark = Watermark(self.ledger.watermark, self._clock.now())
                # The group's offset too, though it has not moved: the broker forgets one that is never renewed.
                await self._commit_entries([watermark], watermark.offset, purpose="refresh")

    def lose(self, reason: str) -> None:
        """End this life of the partition: nothing is written any more; waiters are told. Twice is once."""
        if self.state is TaskState.LOST:
            return
        reach(Failpoint.PARTITION_LOST)
        self.state = TaskState.LOST
        self.lost_reason = reason
        self._queue.clear()
        self._queued_bytes = 0
        self._room.set()
        self._work.set()
        self.on_lost(self)

    async def close(self) -> None:
        """Give up the producer; bounded."""
        self.lose("closed")
        with contextlib.suppress(TimeoutError):  # a transaction under way is worth its end
            async with asyncio.timeout(CLOSE_PATIENCE_S), self._lock:
                pass
        await self._producer.close()
        reach(Failpoint.PARTITION_CLOSED)

    # ----------------------------------------------------------------------------------------- settling

    def note_gap(self, start: int, stop: int) -> None:
        """The log holds no record at these offsets (control markers, holes): they need no outcome."""
        fresh = self.ledger.unsettled(OffsetSet.span(start, stop))
        fresh -= self.ledger.held()
        if fresh:
            self._gaps |= fresh
            if self._gap_since is None:
                self._gap_since = asyncio.get_running_loop().time()
                self._work.set()

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """Put outcomes on the settle queue; waits while it is full. They are durable after ``flush``.

        Full is ``queue_rows`` outcomes or ``QUEUED_CHUNKS * chunk_bytes``, which the last one let in may exceed.

        Raises:
            PartitionLost: this life of the partition is over.
        """
        queue = self._queue
        for settlement in settlements:
            while self._is_full:
                self._work.set()
                self._room.clear()
                await self._room.wait()
            self._check_live()
            self._sequence += 1
            heapq.heappush(queue, (self._flushes, settlement.deadline_ms, self._sequence, settlement))
            self._queued_bytes += settlement.size_bytes
        if queue:
            self._work.set()

    @property
    def queued_bytes(self) -> int:
        """What those weigh that no transaction has taken yet."""
        return self._queued_bytes

    @property
    def queued_rows(self) -> int:
        """Outcomes that wait for a transaction."""
        return len(self._queue) + len(self._settling)

    @property
    def _is_full(self) -> bool:
        return (
            len(self._queue) >= self._limits.queue_rows
            or self._queued_bytes >= QUEUED_CHUNKS * self._limits.chunk_bytes
        )

    @property
    def _is_flushing(self) -> bool:
        """Whether somebody waits for the outcome that is next in the queue."""
        return bool(self._queue) and self._queue[0][0] < self._flushes

    def _chunk_is_full(self) -> bool:
        return len(self._queue) >= self._limits.chunk_rows or self._queued_bytes >= self._limits.chunk_bytes

    async def flush(self) -> None:
        """Return once every outcome queued before is committed (or was dropped as already settled).

        Outcomes queued later are not waited for: with many batches landing there always are some.

        Raises:
            PartitionLost: this life of the partition is over.
        """
        mine = self._flushes
        self._flushes += 1
        self._work.set()
        async with self._idle:
            await self._idle.wait_for(lambda: not self._has_queued(mine) or not self.is_live)
        self._check_live()

    def _has_queued(self, flush: int) -> bool:
        """Whether an outcome queued before this flush is not committed yet."""
        return any(first[0] <= flush for first in (*self._queue[:1], *self._settling[:1]))

    async def run_settling(self) -> None:
        """Turn the queue into transactions until the task is lost."""
        try:
            while True:
                self._check_live()  # before a wait that nobody would end any more
                if self._queue:
                    await self._wait_for_a_chunk()
                else:
                    await self._wait_for_work()
                self._check_live()
                await self._settle_chunk()
        except PartitionLost:
            pass  # `lose` has told everybody
        finally:
            async with self._idle:
                self._idle.notify_all()

    async def _wait_for_a_chunk(self) -> None:
        """Until a chunk is full, somebody waits in ``flush``, or the first outcome has waited long enough."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._limits.max_delay_s
        while self.state is TaskState.LIVE and not self._is_flushing and not self._chunk_is_full():
            left_s = until - loop.time()
            if left_s <= 0:
                return
            self._work.clear()
            await _wait(self._work, left_s)

    async def _wait_for_work(self) -> None:
        loop = asyncio.get_running_loop()
        self._work.clear()
        wait_s = IDLE_REFRESH_S
        if self._gap_since is not None:
            wait_s = max(0.0, self._gap_since + GAP_PATIENCE_S - loop.time())
        if not await _wait(self._work, wait_s) and self._gap_since is None:
            await self.confirm_ownership(IDLE_REFRESH_S / 2)
            self._telemetry.event("partition_refreshed", partition=self.partition)

    async def _settle_chunk(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._queue and (self._gap_since is None or loop.time() < self._gap_since + GAP_PATIENCE_S):
            return
        taken: list[tuple[int, int, int, Settlement]] = []
        size_bytes = 0
        while self._queue and len(taken) < self._limits.chunk_rows and size_bytes < self._limits.chunk_bytes:
            taken.append(heapq.heappop(self._queue))
            size_bytes += taken[-1][-1].size_bytes
        chunk = [settlement for _, _, _, settlement in taken]
        self._queued_bytes -= size_bytes
        self._settling = taken
        if not self._is_full:
            self._room.set()
        records: list[OutRecord] = []
        missed: list[Settlement] = []
        settled_now = OffsetSet()
        loop_started, started_at = loop.time(), self._clock.now()

        def plan(ledger: PartitionLedger) -> list[LedgerEntry]:
            settled_now.update(self._take_gaps(ledger))
            for settlement in chunk:
                offset = settlement.offset
                if ledger.is_settled(offset) or offset in settled_now:
                    continue
                if settlement.only_if_held_by is not None:
                    holder = ledger.holder_of(offset)
                    if holder is None or holder.lot_id != settlement.only_if_held_by:
                        continue
                settled_now.add(offset)
                records.append(settlement.record)
                records.extend(settlement.also)
                if settlement.is_missed:
                    missed.append(settlement)
            if missed and (event := self.on_missed(self.partition, missed)) is not None:
                records.append(event)
            return ledger.plan_settle(settled_now, self._clock.now()) if settled_now else []

        try:
            async with self._transactions:
                # `records` is filled by the plan, which runs before the transaction is built
                await self.commit(plan, records, purpose=SETTLE)
            if settled_now:
                self.on_settled(self.partition, settled_now)
                self._tell_settled(len(records), size_bytes, started_at, loop.time() - loop_started)
        except PartitionLost as error:
            self._telemetry.event(
                "settle_failed", partition=self.partition, rows=len(chunk), reason=type(error).__name__
            )
            raise
        finally:
            self._settling = ()
            async with self._idle:
                self._idle.notify_all()

    def _tell_settled(self, rows: int, size_bytes: int, started_at: datetime, duration_s: float) -> None:
        self._telemetry.observe("settle_transaction_rows", rows)
        self._telemetry.event(
            "settled",
            partition=self.partition,
            rows=rows,
            bytes=size_bytes,
            watermark=self.ledger.watermark,
            duration_s=round(duration_s, 3),
        )
        self._telemetry.batch_span(
            "settle",
            {
                "partition": self.partition,
                "rows": rows,
                "bytes": size_bytes,
                "started_at": started_at,
                "ended_at": self._clock.now(),
            },
        )

    def _take_gaps(self, ledger: PartitionLedger) -> OffsetSet:
        gaps, self._gaps, self._gap_since = self._gaps, OffsetSet(), None
        return ledger.unsettled(gaps) - ledger.held()

    async def finish_lot(
        self,
        lot_id: LotId,
        waiting: Callable[[PartitionLedger], Sequence[Lot]],
        tally: LotTally | None,
        events: Callable[[Sequence[Lot], bool], Sequence[OutRecord]],
    ) -> Sequence[Lot]:
        """End of a reading: rows to be tried again go into waiting lots, and the lot is DONE if it holds no row.

        Args:
            waiting: makes the waiting lots against the ledger as it then is.
            tally: what the result files said in all; None when they must be read again.
            events: what is told of it, given the waiting lots and whether the lot is DONE now; published with it.

        Returns:
            the waiting lots that were written.

        Raises:
            PartitionLost: this life of the partition is over.
        """
        heirs: list[Lot] = []
        told: list[OutRecord] = []

        def plan(ledger: PartitionLedger) -> list[LedgerEntry]:
            heirs.extend(waiting(ledger))
            lot = ledger.lots.get(lot_id)
            finished = {lot_id: tally} if tally is not None and lot is not None and lot.is_at_provider else {}
            if not heirs and not finished:
                return []
            entries = ledger.plan_settle(self._take_gaps(ledger), self._clock.now(), heirs, finished)
            is_done = any(isinstance(entry, Lot) and entry.state is LotState.DONE for entry in entries)
            told.extend(events(heirs, is_done))
            return entries

        await self.commit(plan, told, purpose="land")
        return heirs

    # -------------------------------------------------------------------------------------- housekeeping

    async def drop_old_stubs(self, now: datetime) -> None:
        """Forget clean lots that are older than any orphan could be."""

        def plan(ledger: PartitionLedger) -> list[LedgerEntry]:
            return [
                Tombstone(lot_key(lot.lot_id))
                for lot in ledger.lots.values()
                if lot.state is LotState.CLEAN and (now - lot.created_at).total_seconds() > ORPHAN_HORIZON_S
            ]

        await self.commit(plan, purpose="tidy")

    def waiting_lots(self, lane: Lane | None = None) -> Mapping[LotId, Lot]:
        """Lots whose rows wait for another submission, in either lane or in one."""
        return {
            lot.lot_id: lot
            for lot in self.ledger.lots.values()
            if lot.state is LotState.WAITING and (lane is None or lot.lane is lane)
        }

    def new_lot_id(self) -> LotId:
        """A fresh id for a waiting lot."""
        return LotId(new_batch_id(self._clock.now().timestamp()))


async def _as_generator(
    reader: LogReader, topic: str, partition: int, offsets: OffsetSet
) -> AsyncGenerator[Sequence[Record], None]:
    """The reader's records; closing this half-way ends the read."""
    async for records in reader.read_offsets(topic, partition, offsets):
        yield records


async def _wait(event: asyncio.Event, timeout_s: float) -> bool:
    """Whether the event was set within that many real seconds."""
    try:
        async with asyncio.timeout(max(0.0, timeout_s)):
            await event.wait()
    except TimeoutError:
        return event.is_set()
    return True


def _take_exception(work: asyncio.Future[Sequence[LedgerEntry]]) -> None:
    """The caller has it too, unless it was cancelled; then nobody asks, and asyncio need not complain."""
    if not work.cancelled():
        work.exception()
