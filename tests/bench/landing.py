"""Landing against a raw transactional ``send_batch`` loop that publishes the same bytes, rows per CPU second."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from batchferry.app import Service, build_kafka

from .kit import Rehearsal, cpu_s, fill, folder, settings_for

PARTITIONS = 4
ROWS_A_TRANSACTION = 1000


@dataclass(frozen=True)
class Landed:
    """Rows per CPU second of both."""

    rows: int
    outcome_bytes: int
    raw: float
    ours: float

    @property
    def ratio(self) -> float:
        """Ours against the raw loop."""
        return self.ours / self.raw


async def read_values(bootstrap: str, topic: str, rows: int) -> list[tuple[bytes | None, bytes]]:
    """(key, value) of all results."""
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, enable_auto_commit=False, isolation_level="read_committed")
    await consumer.start()
    try:
        partitions = [TopicPartition(topic, number) for number in range(PARTITIONS)]
        consumer.assign(partitions)
        await consumer.seek_to_beginning(*partitions)
        values: list[tuple[bytes | None, bytes]] = []
        while len(values) < rows:
            for records in (await consumer.getmany(timeout_ms=500)).values():
                values += [(record.key, record.value) for record in records]
        return values
    finally:
        await consumer.stop()


async def raw_loop(bootstrap: str, topic: str, values: list[tuple[bytes | None, bytes]]) -> float:
    """Rows per CPU second of transactions of ``send_batch`` with the same keys, values and a few headers."""
    producer = AIOKafkaProducer(
        bootstrap_servers=bootstrap,
        transactional_id=f"raw-{time.monotonic_ns()}",
        acks="all",
        compression_type="lz4",
        max_batch_size=512 * 1024,
    )
    await producer.start()
    headers = [("ce_id", b"0123456789-0-123456"), ("ce_type", b"batchferry.request.succeeded")]
    started = cpu_s()
    try:
        for start in range(0, len(values), ROWS_A_TRANSACTION):
            async with producer.transaction():
                futures = []
                chunk = values[start : start + ROWS_A_TRANSACTION]
                for partition in range(PARTITIONS):
                    batch = producer.create_batch()
                    for key, value in chunk[partition::PARTITIONS]:
                        if batch.append(key=key, value=value, timestamp=None, headers=headers) is None:
                            futures.append(await producer.send_batch(batch, topic, partition=partition))
                            batch = producer.create_batch()
                            batch.append(key=key, value=value, timestamp=None, headers=headers)
                    if batch.record_count():
                        futures.append(await producer.send_batch(batch, topic, partition=partition))
                await asyncio.gather(*futures)
        return len(values) / (cpu_s() - started)
    finally:
        await producer.stop()


async def measure(bootstrap: str, base_url: str, clock: Rehearsal, rows: int, body_bytes: int) -> Landed:
    """Run one batch through, then publish its outcomes again with the raw loop."""
    async with folder() as made:
        settings = settings_for(
            bootstrap, base_url, clock, made, max_rows=rows, max_bytes=2_000_000_000, sla_s=80 * 3600
        )
        topics = settings.topics
        kafka = build_kafka(settings)
        admin = await kafka.admin()
        await admin.create(topics.requests, PARTITIONS, {})
        await admin.create(f"{topics.results}-raw", PARTITIONS, {})
        await admin.close()
        await kafka.aclose()
        await fill(bootstrap, topics.requests, rows, body_bytes, clock.now(), PARTITIONS)
        service = Service(settings)
        await service.start()
        try:
            assert service.supervisor is not None
            deadline = time.monotonic() + 180

            async def until(state: str) -> None:
                while time.monotonic() < deadline:
                    if state in {str(batch["state"]) for batch in await service.batches()}:
                        return
                    await asyncio.sleep(0.01)
                raise SystemExit(f"no batch came to {state}")

            await until("landing")
            started = cpu_s()
            await until("landed")
            ours = rows / (cpu_s() - started)
        finally:
            await service.stop()
        values = await read_values(bootstrap, topics.results, rows)
        raw = max([await raw_loop(bootstrap, f"{topics.results}-raw", values) for _ in range(2)])
        return Landed(rows, sum(len(value) for _, value in values), raw, ours)
