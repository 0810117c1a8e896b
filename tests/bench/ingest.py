"""Ingest against a raw ``getmany`` loop over the same topic, records per CPU second."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from aiokafka import AIOKafkaConsumer, TopicPartition

from batchferry.app import Service, build_kafka

from .kit import Rehearsal, cpu_s, fill, folder, settings_for

PARTITIONS = 4


@dataclass(frozen=True)
class Ingest:
    """Records per CPU second of both loops."""

    body_bytes: int
    raw: float
    ours: float

    @property
    def ratio(self) -> float:
        """Ours against the raw loop."""
        return self.ours / self.raw


async def raw_loop(bootstrap: str, topic: str, rows: int) -> float:
    """Records per CPU second of ``getmany`` that looks at nothing, with our fetch settings."""
    consumer = AIOKafkaConsumer(
        bootstrap_servers=bootstrap,
        enable_auto_commit=False,
        isolation_level="read_committed",
        max_partition_fetch_bytes=4 * 1024 * 1024,
        fetch_max_bytes=16 * 1024 * 1024,
    )
    await consumer.start()
    try:
        partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
        consumer.assign(partitions)
        await consumer.seek_to_beginning(*partitions)
        seen = 0
        first = last = 0.0
        while seen < rows:
            polled = await consumer.getmany(timeout_ms=500, max_records=2000)
            got = sum(len(records) for records in polled.values())
            if got and not seen:
                first, start = cpu_s(), got
            seen += got
            last = cpu_s()
        return (rows - start) / (last - first)
    finally:
        await consumer.stop()


async def our_loop(bootstrap: str, base_url: str, clock: Rehearsal, rows: int, body_bytes: int) -> tuple[float, float]:
    """(raw, ours): records per CPU second of the whole intake, over the same topic."""
    async with folder() as made:
        settings = settings_for(bootstrap, base_url, clock, made, max_rows=1_000_000, max_bytes=2_000_000_000)
        topic = settings.topics.requests
        kafka = build_kafka(settings)
        admin = await kafka.admin()
        await admin.create(topic, PARTITIONS, {})
        await admin.close()
        await kafka.aclose()
        await fill(bootstrap, topic, rows, body_bytes, clock.now(), PARTITIONS)
        raw = [await raw_loop(bootstrap, topic, rows) for _ in range(2)]
        service = Service(settings)
        await service.start()
        try:
            assert service.supervisor is not None
            intake = service.supervisor.intake
            deadline = time.monotonic() + 120
            while not intake.indexed_rows and time.monotonic() < deadline:  # noqa: ASYNC110 (watched from outside)
                await asyncio.sleep(0.005)
            first, start = cpu_s(), intake.indexed_rows
            while intake.indexed_rows < rows and time.monotonic() < deadline:  # noqa: ASYNC110 (same)
                await asyncio.sleep(0.02)
            ours = (intake.indexed_rows - start) / (cpu_s() - first)
        finally:
            await service.stop()
        return max(raw), ours


async def measure(bootstrap: str, base_url: str, clock: Rehearsal, rows: int, body_bytes: int) -> Ingest:
    """One size."""
    raw, ours = await our_loop(bootstrap, base_url, clock, rows, body_bytes)
    return Ingest(body_bytes, raw, ours)
