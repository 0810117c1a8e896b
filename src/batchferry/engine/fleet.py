"""The fleet view: what every ledger partition and the control topic say, followed by every replica.

It answers two kinds of question: what has a *sibling* lot (a part of the same batch, in a partition that another
replica owns) come to, and which holds stand. It is small: lots and offset sets, never payload.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from batchferry.domain import control
from batchferry.domain.errors import KafkaUnavailable, LedgerTooNew
from batchferry.domain.ids import BatchId, LotId
from batchferry.domain.ledger import Lot
from batchferry.domain.partition import PartitionLedger
from batchferry.ports import Clock, KafkaPort, LogTail, OutRecord, PlainProducer, Record, Telemetry

POLL_TIMEOUT_MS = 500
RETRY_PAUSE_S = 2.0
"""Real seconds between two attempts to follow the topics when the broker does not answer."""
CATCH_UP_TIMEOUT_S = 60.0


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
        self.control = control.ControlState()
        self._tail: LogTail | None = None
        self._producer: PlainProducer | None = None
        self._connecting = asyncio.Lock()
        self._reached_end = asyncio.Event()
        self._rounds = asyncio.Condition()
        self.changed = asyncio.Event()
        """Set whenever a control record came in; waiters clear it."""

    async def run(self) -> None:
        """Follow until cancelled; a broker that is away is waited for."""
        while True:
            tail = self._kafka.tail()
            try:
                await tail.start([self._ledger_topic, self._control_topic])
                self._ledgers.clear()
                self._tail = tail
                while True:
                    for record in await tail.poll(POLL_TIMEOUT_MS):
                        self._take(record)
                    if not self._reached_end.is_set() and await tail.caught_up():
                        self._reached_end.set()
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
        except (ValueError, LedgerTooNew):
            # The owner of that partition refuses it; here it only means that we know less of a sibling.
            self._telemetry.event("ledger_record_unreadable", partition=record.partition, offset=record.offset)

    async def ready(self) -> None:
        """Return once everything written before the start has been read."""
        await self._reached_end.wait()

    @property
    def is_ready(self) -> bool:
        """Whether the end has been reached once."""
        return self._reached_end.is_set()

    async def catch_up(self) -> None:
        """Return once everything committed before this call has been read.

        Raises:
            KafkaUnavailable: not within a minute.
        """
        try:
            async with asyncio.timeout(CATCH_UP_TIMEOUT_S):
                while True:
                    if self._tail is not None and await self._tail.caught_up():
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
            await producer.send([OutRecord(self._control_topic, key, value, partition=0)])
        except KafkaUnavailable:
            self._telemetry.event("kafka_unavailable", what="control record")

    async def send(self, records: list[OutRecord]) -> None:
        """Publish records that state no ledger fact (batch events); best effort."""
        try:
            producer = await self._connected()
            await producer.send(records)
        except KafkaUnavailable:
            self._telemetry.event("kafka_unavailable", what="events")

    async def _connected(self) -> PlainProducer:
        """The one producer; several tasks may be the first to want it."""
        async with self._connecting:
            if self._producer is None:
                producer = self._kafka.plain_producer()
                await producer.start()
                self._producer = producer
            return self._producer

    async def stop(self) -> None:
        """Give up the producer; ``run`` is ended by cancelling its task."""
        if self._producer is not None:
            await self._producer.stop()
            self._producer = None
