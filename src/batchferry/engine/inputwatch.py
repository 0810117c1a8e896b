"""The watch on the input topic: what waits in it, how long it will be kept, and whether it still is the same topic.

What it finds wrong it does not mend. It ends the life of the partition, and the next life, which reads the ledger and
fences everybody else first, reports, gives up or refuses.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence

from batchferry.domain.errors import KafkaUnavailable, LedgerDamaged, StoreUnavailable
from batchferry.domain.offsets import OffsetSet
from batchferry.domain.partition import first_absent
from batchferry.engine.partition import PartitionTask
from batchferry.ports import Clock, KafkaPort, LocalStore, LogReader, Telemetry, TopicDescription

LOOK_S = 10.0
"""Real seconds between two looks; what is looked at moves in minutes."""
LOOK_PATIENCE_S = 30.0
"""Real seconds that a look may take: reading from a topic that is gone does not end by itself for longer."""
TOPICS_LOOK_S = 60.0
"""Real seconds between two looks at the topics' settings; an operator changes them while we run."""
WITNESS_LOOK_S = 60.0
"""Real seconds between two comparisons of a partition's witness; each is one small read."""
WITNESSES_A_LOOK = 10
"""Most witnesses compared in one look, so that many partitions do not make a look long."""
RETENTION_NEAR_S = 86_400.0
"""The start-up check asks for a day of retention beyond the longest SLA: with less left, a record has outlived it."""
RETIRE_AHEAD = 0.25
"""So much of the least headroom is given up ahead, so that a trickle of old rows does not end a life at each look."""


def retention_of(configs: Mapping[str, str]) -> float | None:
    """How many seconds a topic keeps a record, None: for ever as far as time goes. Kafka's default is seven days."""
    kept_ms = int(configs.get("retention.ms", "604800000"))
    return None if kept_ms < 0 else kept_ms / 1000


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
        headroom_min_s: float = 0.0,
        other_topics: Sequence[str] = (),
        on_topics: Callable[[Mapping[str, TopicDescription]], None] = lambda _: None,
    ) -> None:
        """Take the parts.

        Args:
            retention_s: how long the topic keeps a record; None: for ever.
            headroom_min_s: rows that no provider has are given up when they would be deleted in less; 0: never.
            other_topics: looked at together with the input topic, for ``on_topics``.
            on_topics: told what the topics are like now.
        """
        self._kafka = kafka
        self._topic = topic
        self._tasks = tasks
        self._store = store
        self._clock = clock
        self._telemetry = telemetry
        self._retention_s = retention_s
        self._headroom_min_s = headroom_min_s
        self._topics = [topic, *other_topics]
        self._on_topics = on_topics
        self._oldest: dict[tuple[int, int], int | None] = {}
        """When the records at (partition, offset) were made, milliseconds; only those of the last look are kept."""
        self._near: set[int] = set()
        self._ends: dict[int, tuple[PartitionTask, int, int]] = {}
        """The log's start and end as a life of the partition last saw them."""
        self._compared: dict[int, tuple[PartitionTask, float]] = {}
        self.input_is_missing = False
        """The cluster answers, and says that there is no such topic."""
        self.retire_before_ms: dict[int, int] = {}
        """By partition: rows made before this instant are to be given up by the partition's next life."""

    async def run(self) -> None:
        """Look until cancelled; a broker that is away is waited for."""
        loop = asyncio.get_running_loop()
        topics_at = loop.time() + TOPICS_LOOK_S
        while True:
            reader = self._kafka.reader()
            try:
                await reader.start()
                while True:
                    if loop.time() >= topics_at or self.input_is_missing or not self._tasks:
                        topics_at = loop.time() + TOPICS_LOOK_S
                        await self.look_at_topics()
                    if not self.input_is_missing:
                        async with asyncio.timeout(LOOK_PATIENCE_S):
                            await self.look(reader)
                    await asyncio.sleep(LOOK_S)
            except (KafkaUnavailable, TimeoutError):
                topics_at = 0.0  # a topic that is gone looks like this too
                self._telemetry.event("kafka_unavailable", what="input watch", pause_s=LOOK_S)
                await asyncio.sleep(LOOK_S)
            finally:
                await reader.stop()

    async def look_at_topics(self) -> None:
        """Learn the topics' settings and partitions as they are now.

        Raises:
            KafkaUnavailable: the broker did not answer.
        """
        admin = await self._kafka.admin()
        try:
            described = await admin.describe(self._topics)
        finally:
            await admin.close()
        found = {name: topic for name, topic in described.items() if topic is not None}
        requests = found.get(self._topic)
        if requests is None and not self.input_is_missing:
            self._telemetry.event("alarm", what="input_topic_missing", scope=self._topic)
        self.input_is_missing = requests is None
        if requests is not None:
            self._retention_s = retention_of(requests.configs)
            self._on_topics(found)

    async def look(self, reader: LogReader) -> None:
        """Look once.

        Raises:
            KafkaUnavailable: the broker did not answer.
        """
        tasks = {partition: task for partition, task in self._tasks.items() if task.is_live}
        bounds = await reader.bounds(self._topic, tasks) if tasks else {}
        known, self._oldest = self._oldest, {}
        backlog = 0
        ages_s: dict[int, float] = {}
        for partition, (start, end) in bounds.items():
            task = tasks[partition]
            if self._went_back(task, start, end):
                continue
            backlog += max(0, end - task.next_offset)
            age_s = await self._age_s(reader, known, task, task.ledger.watermark, end)
            if age_s is not None:
                ages_s[partition] = age_s
            await self._mind_the_headroom(reader, known, task, end)
        self._telemetry.gauge("backlog_records", backlog)
        self._telemetry.gauge("oldest_unsettled_age_seconds", max(ages_s.values(), default=0.0))
        if self._retention_s is not None:
            self._tell_headroom(self._retention_s, ages_s)
        await self._compare_witnesses(reader, tasks, bounds)

    # ---------------------------------------------------------------------------------------- the same topic?

    def _went_back(self, task: PartitionTask, start: int, end: int) -> bool:
        """Whether the log begins or ends before where it did: no log does that, another topic would."""
        known = self._ends.get(task.partition)
        self._ends[task.partition] = (task, start, end)
        if known is None or known[0] is not task or (start >= known[1] and end >= known[2]):
            return False
        task.lose(f"the input log went back from {known[1]}..{known[2]} to {start}..{end}")
        return True

    async def _compare_witnesses(
        self, reader: LogReader, tasks: Mapping[int, PartitionTask], bounds: Mapping[int, tuple[int, int]]
    ) -> None:
        """Compare the witnesses that were not compared for the longest time, and move them along."""
        now = asyncio.get_running_loop().time()
        waiting = []
        for partition in bounds:
            task = tasks[partition]
            of, at = self._compared.get(partition, (task, float("-inf")))
            if task.is_live and (of is not task or now - at >= WITNESS_LOOK_S):
                waiting.append((at if of is task else float("-inf"), partition))
        for _, partition in sorted(waiting)[:WITNESSES_A_LOOK]:
            task = tasks[partition]
            # Noted before the present one is compared: what was read after a change of topic must not vouch for it.
            newer = task.last_read
            try:
                await task.check_witness(reader, *bounds[partition])
            except LedgerDamaged as damage:
                task.lose(damage.problem)
                continue
            self._compared[partition] = (task, now)
            if newer is not None:
                task.renew_witness(newer)

    # --------------------------------------------------------------------------------------- how long is it kept?

    async def _age_s(
        self, reader: LogReader, known: Mapping[tuple[int, int], int | None], task: PartitionTask, offset: int, end: int
    ) -> float | None:
        """How long ago the record at this offset was made; None where the log has none."""
        if offset >= end:
            return None
        where = task.partition, offset
        if where not in self._oldest:
            made_ms = known.get(where)
            self._oldest[where] = await self._made_ms(reader, *where) if made_ms is None else made_ms
        made_ms = self._oldest[where]
        return None if made_ms is None else max(0.0, self._clock.now().timestamp() - made_ms / 1000)

    async def _made_ms(self, reader: LogReader, partition: int, offset: int) -> int | None:
        with contextlib.suppress(StoreUnavailable):
            row = (await self._store.get_rows(partition, [offset])).get(offset)
            if row is not None:
                return row.t0_ms
        # It is in a lot and its words have not been needed since the restore, or it is unread, or it was refused.
        made_ms: int | None = None
        async for records in reader.read_offsets(self._topic, partition, OffsetSet([offset])):
            made_ms = next((record.timestamp for record in records if record.timestamp >= 0), made_ms)
        return made_ms

    async def _mind_the_headroom(
        self, reader: LogReader, known: Mapping[tuple[int, int], int | None], task: PartitionTask, end: int
    ) -> None:
        """Have the rows given up that no provider has and that retention would soon take."""
        retention_s = self._retention_s
        if retention_s is None or not self._headroom_min_s or not task.is_live:
            return
        ledger = task.ledger
        first = first_absent(ledger.settled | task.at_provider(), ledger.watermark)
        age_s = await self._age_s(reader, known, task, first, end)
        if age_s is None or retention_s - age_s >= self._headroom_min_s or not task.is_live:
            return
        limit_s = retention_s - self._headroom_min_s * (1 + RETIRE_AHEAD)
        self.retire_before_ms[task.partition] = round((self._clock.now().timestamp() - limit_s) * 1000)
        task.lose(f"rows that wait would be deleted from the input in {max(0.0, retention_s - age_s):.0f} s")

    def _tell_headroom(self, retention_s: float, ages_s: Mapping[int, float]) -> None:
        headrooms_s = {partition: retention_s - age_s for partition, age_s in ages_s.items()}
        self._telemetry.gauge("retention_headroom_seconds", min(headrooms_s.values(), default=retention_s))
        near = {partition for partition, left_s in headrooms_s.items() if left_s < RETENTION_NEAR_S}
        for partition in sorted(near - self._near):
            self._telemetry.event(
                "retention_near", topic=self._topic, partition=partition, headroom_s=round(headrooms_s[partition])
            )
        self._near = near
