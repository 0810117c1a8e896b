"""What waits in the input topic: how much is unread, how old the oldest open record is, how long it will be kept."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from batchferry.domain.errors import KafkaUnavailable, StoreUnavailable
from batchferry.domain.offsets import OffsetSet
from batchferry.engine.partition import PartitionTask
from batchferry.ports import Clock, KafkaPort, LocalStore, LogReader, Telemetry

LOOK_S = 10.0
"""Real seconds between two looks; what is looked at moves in minutes."""
RETENTION_NEAR_S = 86_400.0
"""The start-up check asks for a day of retention beyond the longest SLA: with less left, a record has outlived it."""


class InputWatch:
    """Looks at the input partitions this process owns."""

    def __init__(
        self,
        kafka: KafkaPort,
        topic: str,
        tasks: Mapping[int, PartitionTask],
        store: LocalStore,
        clock: Clock,
        telemetry: Telemetry,
        retention_s: float | None,
    ) -> None:
        """Take the parts.

        Args:
            retention_s: how long the topic keeps a record; None: for ever.
        """
        self._kafka = kafka
        self._topic = topic
        self._tasks = tasks
        self._store = store
        self._clock = clock
        self._telemetry = telemetry
        self._retention_s = retention_s
        self._oldest: dict[int, tuple[int, int]] = {}
        """The first unsettled offset of a partition, and when its record was made (milliseconds)."""
        self._near: set[int] = set()

    async def run(self) -> None:
        """Look until cancelled; a broker that is away is waited for."""
        while True:
            reader = self._kafka.reader()
            try:
                await reader.start()
                while True:
                    await self.look(reader)
                    await asyncio.sleep(LOOK_S)
            except KafkaUnavailable:
                self._telemetry.event("kafka_unavailable", what="input watch", pause_s=LOOK_S)
                await asyncio.sleep(LOOK_S)
            finally:
                await reader.stop()

    async def look(self, reader: LogReader) -> None:
        """Look once.

        Raises:
            KafkaUnavailable: the broker did not answer.
        """
        tasks = {partition: task for partition, task in self._tasks.items() if task.is_live}
        bounds = await reader.bounds(self._topic, tasks) if tasks else {}
        backlog = 0
        ages_s: dict[int, float] = {}
        for partition, (_, end) in bounds.items():
            task = tasks[partition]
            backlog += max(0, end - task.next_offset)
            made_ms = await self._oldest_ms(reader, task) if task.ledger.watermark < end else None
            if made_ms is not None:
                ages_s[partition] = max(0.0, self._clock.now().timestamp() - made_ms / 1000)
        self._telemetry.gauge("backlog_records", backlog)
        self._telemetry.gauge("oldest_unsettled_age_seconds", max(ages_s.values(), default=0.0))
        if self._retention_s is not None:
            self._tell_headroom({partition: self._retention_s - age_s for partition, age_s in ages_s.items()})

    async def _oldest_ms(self, reader: LogReader, task: PartitionTask) -> int | None:
        """When the first record without an outcome was made; None where the log has none at that offset."""
        partition, offset = task.partition, task.ledger.watermark
        known = self._oldest.get(partition)
        if known is not None and known[0] == offset:
            return known[1]
        made_ms: int | None = None
        with contextlib.suppress(StoreUnavailable):
            row = (await self._store.get_rows(partition, [offset])).get(offset)
            made_ms = None if row is None else row.t0_ms
        if made_ms is None:  # it is in a lot and its words have not been needed since the restore, or it was refused
            async for records in reader.read_offsets(self._topic, partition, OffsetSet([offset])):
                made_ms = next((record.timestamp for record in records if record.timestamp >= 0), made_ms)
        if made_ms is not None:
            self._oldest[partition] = (offset, made_ms)
        return made_ms

    def _tell_headroom(self, headrooms_s: Mapping[int, float]) -> None:
        assert self._retention_s is not None
        self._telemetry.gauge("retention_headroom_seconds", min(headrooms_s.values(), default=self._retention_s))
        near = {partition for partition, left_s in headrooms_s.items() if left_s < RETENTION_NEAR_S}
        for partition in sorted(near - self._near):
            self._telemetry.event(
                "retention_near", topic=self._topic, partition=partition, headroom_s=round(headrooms_s[partition])
            )
        self._near = near
