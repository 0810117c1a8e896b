"""The fleet view: what every ledger partition and the control topic say, followed by every replica.

It answers two kinds of question: what has a *sibling* lot (a part of the same batch, in a partition that another
replica owns) come to, and which holds stand. It is small: lots and offset sets, never payload.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence

from batchferry.domain import control
from batchferry.domain.errors import KafkaUnavailable, LedgerTooNew
from batchferry.domain.ids import BatchId, LotId
from batchferry.domain.ledger import Lot, lot_id_of
from batchferry.domain.partition import PartitionLedger
from batchferry.domain.webhooktrust import LiveBatches
from batchferry.engine.failpoints import Failpoint, reach
from batchferry.ports import Clock, KafkaPort, LogMark, LogTail, OutRecord, PlainProducer, Record, Telemetry
from batchferry.telemetry import error_fields

POLL_TIMEOUT_MS = 500
RETRY_PAUSE_S = 2.0
"""Real seconds between two attempts to follow the topics when the broker does not answer."""
CATCH_UP_TIMEOUT_S = 60.0
OUTBOX_RECORDS = 5_000
"""Most events waiting for the broker, about a kilobyte each; beyond that the oldest go."""
SEND_RECORDS = 500
"""Most events of one sending."""
FAREWELL_S = 2.0
"""Real seconds that the events still waiting get at a stop."""


class FleetView:
    """Follows the ledger and control topics; one a process."""

    def __init__(
        self, kafka: KafkaPort, clock: Clock, telemetry: Telemetry, ledger_topic: str, control_topic: str
    ) -> None:
        self._kafka = kafka
        self._clock = clock
        self._telemetry = telemetry
        self._ledger_topic = ledger_topic
        self._control_topic = control_topic
        self._ledgers: dict[int, PartitionLedger] = {}
        self._live = LiveBatches()
        self.unreadable: set[int] = set()
        """Partitions in whose ledger a record could not be read: their absence of a lot proves nothing."""
        self.control = control.ControlState()
        self._tail: LogTail | None = None
        self._producer: PlainProducer | None = None
        self._connecting = asyncio.Lock()
        self._reached_end = asyncio.Event()
        self._rounds = asyncio.Condition()
        self._outbox: deque[OutRecord] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._unsent = 0
        """Events given up since that was last told."""
        self.changed = asyncio.Event()
        """Set whenever a control record came in; waiters clear it."""

    async def run(self) -> None:
        """Follow until cancelled; a broker that is away is waited for."""
        while True:
            tail = self._kafka.tail()
            try:
                await tail.start([self._ledger_topic, self._control_topic])
                started, records = asyncio.get_running_loop().time(), 0
                self._reached_end.clear()  # what is read again is not known meanwhile
                self._ledgers.clear()
                self._live.clear()
                self.unreadable.clear()
                self._tail = tail
                # Marked once: the fleet writes without a pause, and an end that moves along is never reached.
                mark = await tail.mark()
                while True:
                    for record in await tail.poll(POLL_TIMEOUT_MS):
                        self._take(record)
                        records += 1
                    if not self._reached_end.is_set() and tail.reached(mark):
                        self._reached_end.set()
                        took_s = asyncio.get_running_loop().time() - started
                        self._telemetry.event("fleet_caught_up", records=records, duration_s=round(took_s, 3))
                    async with self._rounds:
                        self._rounds.notify_all()
            except KafkaUnavailable:
                self._telemetry.event("kafka_unavailable", what="fleet view")
                await asyncio.sleep(RETRY_PAUSE_S)
            finally:
                self._tail = None
                await tail.stop()

    def _take(self, record: Record) -> None:
        if record.key is None:
            return
        if record.topic == self._control_topic:
            entry = control.decode(record.key, record.value)
            if entry is not None:
                self.control.apply(entry)
                self.changed.set()
            return
        ledger = self._ledgers.setdefault(record.partition, PartitionLedger(record.partition))
        try:
            ledger.replay(record.key, record.value)
            lot_id = lot_id_of(record.key)
            if lot_id is not None:
                lot = ledger.lots.get(lot_id)
                names = lot.provider_batch_ids if lot is not None and lot.is_at_provider else ()
                self._live.put(record.partition, lot_id, lot.key.account if lot is not None else "", names)
        except (ValueError, LedgerTooNew):
            # The owner of that partition refuses it; here it only means that we know less of a sibling.
            self.unreadable.add(record.partition)
            self._telemetry.event("ledger_record_unreadable", partition=record.partition, offset=record.offset)

    @property
    def is_ready(self) -> bool:
        """Whether everything written before the start (or the last break of the connection) has been read."""
        return self._reached_end.is_set()

    async def ready(self) -> None:
        """Return once everything written before the start has been read."""
        await self._reached_end.wait()

    async def catch_up(self) -> None:
        """Return once everything committed before this call has been read.

        Raises:
            KafkaUnavailable: not within a minute.
        """
        try:
            async with asyncio.timeout(CATCH_UP_TIMEOUT_S):
                marked: LogTail | None = None
                mark: LogMark = {}
                while True:
                    tail = self._tail
                    if tail is not None and tail is not marked:  # the first, or a new one that reads all again
                        mark, marked = await tail.mark(), tail
                    if marked is not None and marked is self._tail and marked.reached(mark):
                        return
                    async with self._rounds:
                        await self._rounds.wait()
        except TimeoutError:
            raise KafkaUnavailable("the ledger topics could not be read to their end in a minute") from None

    def lots_of(self, batch_id: BatchId) -> Mapping[int, Lot]:
        """The lots of a batch by partition, as far as they have been read."""
        return {
            partition: ledger.lots[LotId(batch_id)]
            for partition, ledger in self._ledgers.items()
            if LotId(batch_id) in ledger.lots
        }

    def is_waited_for(self, account: str, provider_batch_id: str) -> bool:
        """Whether a lot of this account is at the provider in this batch; at one price for any number of lots."""
        return self._live.has(account, provider_batch_id)

    def ledgers(self) -> Mapping[int, PartitionLedger]:
        """Every partition's ledger as read; not to be changed."""
        return self._ledgers

    async def publish(self, entry: control.ControlEntry) -> None:
        """Write a control record; it is believed here at once, and by the others when they read it.

        Best effort: when the broker does not take it, it stands in this process only, and that is reported.
        """
        self.control.apply(entry)
        self.changed.set()
        try:
            producer = await self._connected()
            key, value = control.encode(entry)
            reach(Failpoint.CONTROL_BEFORE)
            await producer.send([OutRecord(self._control_topic, key, value, partition=0)])
            reach(Failpoint.CONTROL_AFTER)
        except KafkaUnavailable:
            self._telemetry.event("kafka_unavailable", what="control record")

    async def send(self, records: Sequence[OutRecord]) -> None:
        """Publish records that state no ledger fact (batch events), in their order; best effort.

        Returns at once: a batch never waits for its events. While the broker is away the last ``OUTBOX_RECORDS`` are
        kept for it; one that was sent and not acknowledged may then be there twice, under the same id.
        """
        self._outbox.extend(records)
        self._give_up(len(self._outbox) - OUTBOX_RECORDS)
        if self._outbox and (self._sender is None or self._sender.done()):
            self._sender = asyncio.create_task(self._send_waiting(), name="events")
            self._sender.add_done_callback(self._sender_done)

    @property
    def waiting_events(self) -> int:
        """Records that wait for the broker."""
        return len(self._outbox)

    async def _send_waiting(self) -> None:
        while self._outbox:
            records = [self._outbox.popleft() for _ in range(min(len(self._outbox), SEND_RECORDS))]
            try:
                producer = await self._connected()
                await producer.send(records)
            except KafkaUnavailable:
                self._telemetry.event("kafka_unavailable", what="events")
                self._outbox.extendleft(reversed(records))
                self._give_up(len(self._outbox) - OUTBOX_RECORDS)
                self._tell_unsent()
                await asyncio.sleep(RETRY_PAUSE_S)
            else:
                self._tell_unsent()

    def _sender_done(self, task: asyncio.Task[None]) -> None:
        if self._sender is task:
            self._sender = None
        if not task.cancelled() and (error := task.exception()) is not None:  # our bug; it costs events, no more
            self._telemetry.count("tasks_failed", task="events")
            self._telemetry.event("task_failed", task="events", **error_fields(error))

    def _give_up(self, records: int) -> None:
        """Drop so many of the oldest; none when negative."""
        if records <= 0:
            return
        for _ in range(records):
            self._outbox.popleft()
        self._unsent += records
        self._telemetry.count("events_dropped", records)

    def _tell_unsent(self) -> None:
        """Say once a sending how many events went meanwhile."""
        if self._unsent:
            self._telemetry.event("events_dropped", records=self._unsent)
            self._unsent = 0

    async def _connected(self) -> PlainProducer:
        """The one producer; several tasks may be the first to want it."""
        async with self._connecting:
            if self._producer is None:
                producer = self._kafka.plain_producer()
                await producer.start()
                self._producer = producer
            return self._producer

    async def stop(self) -> None:
        """Send what waits, within ``FAREWELL_S``, and give up the producer; ``run`` is ended by cancelling its task."""
        sender = self._sender
        if sender is not None:
            await asyncio.wait([sender], timeout=FAREWELL_S)
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
        self._give_up(len(self._outbox))
        self._tell_unsent()
        if self._producer is not None:
            await self._producer.stop()
            self._producer = None
