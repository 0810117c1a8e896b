"""Reading without a group: one partition to its end, single offsets again, and whole topics followed live.

"The end" is the high watermark, not the last stable offset that a ``read_committed`` client is told: only then has
everything committed before been seen. Markers of transactions take up offsets and are never delivered, so the end is
reached when the *position* says so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import OffsetOutOfRangeError

from batchferry.domain.errors import KafkaUnavailable
from batchferry.domain.offsets import OffsetSet
from batchferry.kafka.dispose import in_background, stop_consumer
from batchferry.kafka.faults import EXPECTED, unavailable
from batchferry.kafka.settings import KafkaClientSettings, connection_arguments, fetch_arguments
from batchferry.ports import LogMark, Record

CHUNK_RECORDS: Final = 2000
"""Most records of one yielded chunk; their bytes are bounded by the fetch limits."""
WAIT_MS: Final = 50
"""A fetch of nothing but markers wakes nobody, so the position is looked at this often."""
SEEK_GAP_OFFSETS: Final = 5000
"""Between wanted offsets so far apart it is cheaper to seek than to read and throw away."""
PARTITIONS_CHECK_S: Final = 30.0

Bounds = Mapping[TopicPartition, tuple[int, int]]


class _Bounds:
    """Log start and high watermark of partitions.

    A connection of its own, because a ``read_committed`` client is told the last stable offset instead.
    """

    def __init__(self, settings: KafkaClientSettings) -> None:
        self._settings = settings
        self._client: AIOKafkaConsumer | None = None

    async def start(self) -> None:
        self._client = await started_consumer(self._settings, "bounds", isolation_level="read_uncommitted")

    async def of(self, partitions: Collection[TopicPartition]) -> Bounds:
        """Both ends of each partition.

        Raises:
            KafkaUnavailable: no answer in time, or no such partition.
        """
        if self._client is None:
            raise KafkaUnavailable("this reader is not started")
        if not partitions:
            return {}
        wanted = list(partitions)
        try:
            async with asyncio.timeout(self._settings.request_timeout_s):
                starts = await self._client.beginning_offsets(wanted)
                ends = await self._client.end_offsets(wanted)
        except EXPECTED as error:
            topics = ", ".join(sorted({where.topic for where in wanted}))
            raise unavailable("reading the log's bounds of", error, target=topics) from error
        return {where: (starts[where], ends[where]) for where in wanted}

    async def stop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await stop_consumer(client, self._settings.close_deadline_s)


class PartitionReader:
    """Reads partitions one after the other (``ports.LogReader``); one read at a time, connections are kept."""

    def __init__(self, settings: KafkaClientSettings) -> None:
        self._settings = settings
        self._bounds = _Bounds(settings)
        self._client: AIOKafkaConsumer | None = None

    async def start(self) -> None:
        """Connect.

        Raises:
            KafkaUnavailable: no broker answered in time.
        """
        await self._bounds.start()
        self._client = await started_consumer(self._settings, "reader")

    async def read_to_end(
        self, topic: str, partition: int, start: int | None = None
    ) -> AsyncIterator[Sequence[Record]]:
        """Every record from ``start`` (None, or below it: the log's start) to the high watermark as it is now.

        Raises:
            KafkaUnavailable: no progress for ``read_stall_s`` (a transaction left open, or no broker).
        """
        where = TopicPartition(topic, partition)
        log_start, end = (await self._bounds.of([where]))[where]
        first = log_start if start is None else max(start, log_start)
        if first >= end:
            return
        async with aclosing(self._read(where, first, end)) as chunks:
            async for records in chunks:
                inside = records if records[-1].offset < end else [each for each in records if each.offset < end]
                if inside:
                    yield inside

    async def read_offsets(self, topic: str, partition: int, offsets: OffsetSet) -> AsyncIterator[Sequence[Record]]:
        """The records at these offsets that the log still has, ascending, in chunks of at most 2,000.

        Raises:
            KafkaUnavailable: as ``read_to_end``.
        """
        last = offsets.last()
        if last is None:
            return
        where = TopicPartition(topic, partition)
        log_start, log_end = (await self._bounds.of([where]))[where]
        wanted = offsets.within(log_start, log_end)
        for first, stop in _stretches(wanted):
            async with aclosing(self._read(where, first, stop)) as chunks:
                async for records in chunks:
                    found = [record for record in records if record.offset < stop and record.offset in wanted]
                    if found:
                        yield found

    async def bounds(self, topic: str, partitions: Collection[int]) -> Mapping[int, tuple[int, int]]:
        """Log start and high watermark (end) of each partition.

        Raises:
            KafkaUnavailable: no answer in time, or no such partition.
        """
        found = await self._bounds.of([TopicPartition(topic, partition) for partition in partitions])
        return {where.partition: ends for where, ends in found.items()}

    async def stop(self) -> None:
        """Disconnect; bounded, safe to call twice."""
        client, self._client = self._client, None
        if client is not None:
            await stop_consumer(client, self._settings.close_deadline_s)
        await self._bounds.stop()

    async def _read(self, where: TopicPartition, start: int, stop: int) -> AsyncGenerator[Sequence[Record], None]:
        """Chunks from ``start`` until the position has reached ``stop``; the last may run past it."""
        client = self._client
        if client is None:
            raise KafkaUnavailable("this reader is not started")
        if client.assignment() != {where}:
            client.assign([where])
        client.seek(where, start)
        client.resume(where)
        position, moved_at = start, time.monotonic()
        try:
            while position < stop:
                try:
                    records = (await client.getmany(timeout_ms=WAIT_MS, max_records=CHUNK_RECORDS)).get(where, ())
                except OffsetOutOfRangeError:
                    # Retention was faster than we: go on with what is left.
                    log_start, log_end = (await self._bounds.of([where]))[where]
                    client.seek(where, min(max(position, log_start), log_end))
                    records = ()
                    if position > log_end:
                        return
                except EXPECTED as error:
                    raise unavailable("reading", error, target=_name(where)) from error
                now_at = await client.position(where)
                if now_at != position:
                    position, moved_at = now_at, time.monotonic()
                elif time.monotonic() - moved_at > self._settings.read_stall_s:
                    raise KafkaUnavailable(
                        f"reading {_name(where)}: stuck at offset {position} of {stop} for "
                        f"{self._settings.read_stall_s:.0f} s; is a transaction left open there, or the broker away?"
                    )
                if records:
                    yield records
        finally:
            if self._client is not None:
                self._client.pause(where)  # else it would fetch on ahead for nobody


class TopicTail:
    """Follows whole topics from the log's start (``ports.LogTail``); finds partitions added later."""

    def __init__(self, settings: KafkaClientSettings) -> None:
        self._settings = settings
        self._bounds = _Bounds(settings)
        self._client: AIOKafkaConsumer | None = None
        self._topics: tuple[str, ...] = ()
        self._looked_at = 0.0

    async def start(self, topics: Sequence[str]) -> None:
        """Connect and begin at the start of every partition.

        Raises:
            KafkaUnavailable: no broker answered in time, or a topic does not exist.
        """
        self._topics = tuple(topics)
        await self._bounds.start()
        client = self._client = await started_consumer(self._settings, "tail", auto_offset_reset="earliest")
        try:
            async with asyncio.timeout(self._settings.connect_deadline_s):
                for topic in self._topics:
                    await client._client._wait_on_metadata(topic)  # noqa: SLF001 (topics() would load every topic there is)
        except EXPECTED as error:
            raise unavailable("following", error, target=", ".join(self._topics)) from error
        self._assign_all(client)

    async def poll(self, timeout_ms: int) -> Sequence[Record]:
        """What has been committed since the last call, each partition in order; empty after ``timeout_ms``.

        Raises:
            KafkaUnavailable: the client cannot go on (not authorised, damaged data).
        """
        client = self._client
        if client is None:
            return ()
        if time.monotonic() - self._looked_at > PARTITIONS_CHECK_S:
            self._assign_all(client)
        try:
            fetched: Mapping[TopicPartition, list[Record]] = await client.getmany(
                timeout_ms=timeout_ms, max_records=CHUNK_RECORDS
            )
        except EXPECTED as error:
            raise unavailable("following", error, target=", ".join(self._topics)) from error
        if len(fetched) == 1:
            return next(iter(fetched.values()))
        return [record for records in fetched.values() for record in records]

    async def caught_up(self) -> bool:
        """Whether everything committed when this was asked has been returned by ``poll``.

        Raises:
            KafkaUnavailable: no answer in time.
        """
        return self.reached(await self.mark())

    async def mark(self) -> LogMark:
        """The ends of all partitions now, for ``reached``: under constant writing ``caught_up`` may stay behind.

        Partitions that were added a moment ago are among them, and followed from now on: what a sibling wrote there
        would else be overlooked until the next look for new partitions.

        Raises:
            KafkaUnavailable: no answer in time, or not started.
        """
        client = self._client
        if client is None:
            raise KafkaUnavailable("this tail is not started")
        try:
            async with asyncio.timeout(self._settings.request_timeout_s):
                await client._client.force_metadata_update()  # noqa: SLF001 (nothing public asks now)
        except EXPECTED as error:
            raise unavailable("following", error, target=", ".join(self._topics)) from error
        self._assign_all(client)
        return {
            where: end for where, (start, end) in (await self._bounds.of(client.assignment())).items() if end > start
        }

    def reached(self, mark: LogMark) -> bool:
        """Whether ``poll`` has returned everything below these ends; False after ``stop``."""
        client = self._client
        if client is None:
            return False
        states = client._subscription.subscription.assignment._tp_state  # noqa: SLF001 (position() may wait)
        return all(
            where in states and states[where].has_valid_position and states[where].position >= end
            for where, end in mark.items()
        )

    async def stop(self) -> None:
        """Disconnect; bounded, safe to call twice."""
        client, self._client = self._client, None
        if client is not None:
            await stop_consumer(client, self._settings.close_deadline_s)
        await self._bounds.stop()

    def _assign_all(self, client: AIOKafkaConsumer) -> None:
        """Take every partition there is now; those already followed go on where they are."""
        self._looked_at = time.monotonic()
        there = {
            TopicPartition(topic, partition)
            for topic in self._topics
            for partition in client.partitions_for_topic(topic) or ()
        }
        now = client.assignment()
        if not there - now:
            return
        states = client._subscription.subscription.assignment._tp_state if now else {}  # noqa: SLF001
        positions = {where: states[where].position for where in now if states[where].has_valid_position}
        client.assign(sorted(there | now))
        for where, position in positions.items():
            client.seek(where, position)


async def started_consumer(settings: KafkaClientSettings, role: str, **arguments: Any) -> AIOKafkaConsumer:
    """A connected consumer without a subscription; the caller stops it.

    Raises:
        KafkaUnavailable: no broker answered in time.
    """
    client = AIOKafkaConsumer(
        **(connection_arguments(settings, role) | fetch_arguments(settings) | {"auto_offset_reset": "none"} | arguments)
    )
    try:
        async with asyncio.timeout(settings.connect_deadline_s):
            await client.start()
    except BaseException as error:
        in_background(stop_consumer(client, settings.close_deadline_s), name=f"discard-{role}")
        if isinstance(error, EXPECTED):
            raise unavailable("connecting to", error, target=settings.bootstrap_servers) from error
        raise
    return client


def _stretches(wanted: OffsetSet) -> Sequence[tuple[int, int]]:
    """(start, stop) of the stretches to read: runs of wanted offsets with small gaps read over."""
    joined: list[tuple[int, int]] = []
    for start, stop in wanted.ranges():
        if joined and start - joined[-1][1] < SEEK_GAP_OFFSETS:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def _name(where: TopicPartition) -> str:
    return f"{where.topic}-{where.partition}"
