"""What tests of anything on Kafka do again and again, through the ports."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Self

from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete

from batchferry.kafka import KafkaClientSettings
from batchferry.ports import KafkaPort, OutRecord, Record, RequestConsumer
from batchferry.simulator.kafka import SimKafkaSettings

PATIENCE_S: dict[str, float] = {
    "session_timeout_s": 6.0,
    "heartbeat_interval_s": 0.3,
    "rebalance_timeout_s": 6.0,
    "transaction_timeout_s": 12.0,
    "transaction_deadline_s": 10.0,
    "commit_deadline_s": 10.0,
    "abort_deadline_s": 1.0,
    "close_deadline_s": 2.0,
    "read_stall_s": 20.0,
    "metadata_max_age_s": 2.0,
}
"""Short sessions and deadlines: a lost member is noticed in seconds."""


def patient_settings(bootstrap: str, **otherwise: object) -> KafkaClientSettings:
    """Settings of the real client with the patience of a test."""
    return KafkaClientSettings(bootstrap_servers=bootstrap, **(PATIENCE_S | otherwise))


def patient_sim_settings(**otherwise: float) -> SimKafkaSettings:
    """The same patience for clients of the cluster inside the process."""
    return SimKafkaSettings(**(PATIENCE_S | otherwise))


class Hears:
    """An assignment listener that writes down what it hears."""

    def __init__(self) -> None:
        self.assignments: list[tuple[frozenset[int], frozenset[int], frozenset[int]]] = []
        self.suspects: list[frozenset[int]] = []
        self.owned: frozenset[int] = frozenset()

    def on_assignment(self, kept, added, lost) -> None:
        self.assignments.append((kept, added, lost))
        self.owned = kept | added

    def on_suspect(self, partitions) -> None:
        self.suspects.append(partitions)


class Member:
    """A consumer that polls all the time and keeps what it is given."""

    def __init__(self, port: KafkaPort, topic: str, group: str) -> None:
        self.consumer: RequestConsumer = port.consumer(topic, group)
        self.hears = Hears()
        self.got: dict[int, list[Record]] = defaultdict(list)
        self.polls = 0
        self._task: asyncio.Task | None = None

    async def __aenter__(self) -> Self:
        await self.consumer.start(self.hears)
        self._task = asyncio.create_task(self._loop())
        return self

    async def __aexit__(self, *_) -> None:
        await self.leave()

    async def leave(self) -> None:
        if self._task is not None:
            task, self._task = self._task, None
            task.cancel()
            await asyncio.wait([task])
        await self.consumer.stop()

    async def _loop(self) -> None:
        while True:
            for partition, records in (await self.consumer.poll(500, 100)).items():
                self.got[partition] += records
            self.polls += 1

    async def rounds(self, eventually, count: int = 3) -> None:
        """Wait until so many more polls have come back."""
        target = self.polls + count
        await eventually(lambda: self.polls >= target, "some polls")

    def values(self, partition: int = 0) -> list[bytes]:
        return [record.value for record in self.got[partition]]


async def made_topic(port: KafkaPort, name: str, partitions: int = 1, **configs: str) -> str:
    """The topic's name, once it is there; ``cleanup_policy="compact"`` sets ``cleanup.policy``."""
    admin = await port.admin()
    await admin.create(name, partitions, {key.replace("_", "."): value for key, value in configs.items()})
    await admin.close()
    return name


async def committed(port: KafkaPort, group: str, topic: str) -> dict[int, int]:
    """The group's committed offsets."""
    admin = await port.admin()
    try:
        return dict(await admin.committed(group, topic))
    finally:
        await admin.close()


async def whole(port: KafkaPort, topic: str, partition: int = 0, start: int | None = None) -> list[Record]:
    """Every committed record of the partition."""
    reader = port.reader()
    await reader.start()
    try:
        return [record async for chunk in reader.read_to_end(topic, partition, start) for record in chunk]
    finally:
        await reader.stop()


async def produced(port: KafkaPort, topic: str, values: Sequence[bytes], partition: int = 0) -> None:
    """Put these values there, without keys."""
    producer = port.plain_producer()
    await producer.start()
    await producer.send([OutRecord(topic, None, value, partition=partition) for value in values])
    await producer.stop()


async def delete_below(bootstrap: str, topic: str, partition: int, offset: int) -> None:
    """Make the log start at ``offset``, as retention would."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        await admin.delete_records({TopicPartition(topic, partition): RecordsToDelete(before_offset=offset)})
    finally:
        await admin.close()
