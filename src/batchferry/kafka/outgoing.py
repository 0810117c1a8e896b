"""Records on their way out: packed by topic and partition into batches, which cost half the CPU of single sends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka.errors import UnknownTopicOrPartitionError

from batchferry.kafka.partitioner import partition_of
from batchferry.ports import OutRecord

Packed = dict[tuple[str, int], list[Any]]
"""Closed batches by topic and partition, in order."""


class RecordTooLarge(Exception):
    """A record is above ``max_record_bytes``; nothing was sent."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"a record of {size} bytes is above max_record_bytes ({limit})")


async def pack(producer: AIOKafkaProducer, records: Iterable[OutRecord], max_record_bytes: int) -> Packed:
    """The records as batches, ready to be sent; order is kept within a partition.

    A key decides by murmur2. Records with neither key nor partition go together to one random partition a call:
    one batch instead of one a partition.

    Raises:
        UnknownTopicOrPartitionError: no such topic, or no such partition of it.
        RecordTooLarge: before anything is sent.
    """
    packed: Packed = {}
    # For each topic: its partitions' open batches, by partition; as many places as partitions.
    open_batches: dict[str, list[Any]] = {}
    keyless: dict[str, int] = {}
    for topic, key, value, headers, told, timestamp in records:
        lanes = open_batches.get(topic)
        if lanes is None:
            lanes = open_batches[topic] = [None] * len(await producer.partitions_for(topic))
        if told is not None:
            partition = told
            if not 0 <= partition < len(lanes):
                raise UnknownTopicOrPartitionError(f"{topic}-{partition}")
        elif key is not None:
            partition = partition_of(key, len(lanes))
        else:
            partition = keyless.setdefault(topic, random.randrange(len(lanes)))  # noqa: S311 (spreading, not secrecy)
        as_list = list(headers)  # the compiled encoder takes nothing else
        batch = lanes[partition]
        if batch is None:
            batch = lanes[partition] = producer.create_batch()
            packed[topic, partition] = [batch]
        written = batch.append(timestamp=timestamp, key=key, value=value, headers=as_list)
        if written is None:  # full, and closed by that; a first record always fits, however large
            batch = lanes[partition] = producer.create_batch()
            packed[topic, partition].append(batch)
            written = batch.append(timestamp=timestamp, key=key, value=value, headers=as_list)
        if written.size > max_record_bytes:
            raise RecordTooLarge(written.size, max_record_bytes)
    for batches in packed.values():
        batches[-1].close()  # so that it does not linger for more
    return packed


async def deliver(producer: AIOKafkaProducer, packed: Packed) -> None:
    """Send all and return when every single batch is acknowledged.

    Waiting for every future is the point: a commit looks at none of them, and would succeed over a refused record.

    Raises:
        Exception: the first refusal, after all the others have ended too.
    """
    outcomes = await asyncio.gather(
        *(_deliver_partition(producer, *where, batches) for where, batches in packed.items()), return_exceptions=True
    )
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


async def _deliver_partition(producer: AIOKafkaProducer, topic: str, partition: int, batches: Sequence[Any]) -> None:
    sent: list[asyncio.Future[Any]] = []
    try:
        for batch in batches:
            sent.append(await producer.send_batch(batch, topic, partition=partition))  # noqa: PERF401 (kept if one fails)
        await asyncio.gather(*sent)
    finally:
        for future in sent:
            future.add_done_callback(_taken)


def _taken(future: asyncio.Future[Any]) -> None:
    """Look at the exception, so that asyncio does not report it as forgotten."""
    if not future.cancelled():
        future.exception()
