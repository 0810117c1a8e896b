"""Reading without a group: one partition to its end, single offsets again, and whole topics followed live."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Final

from batchferry.domain.errors import KafkaUnavailable
from batchferry.domain.offsets import OffsetSet
from batchferry.ports import LogMark, Record
from batchferry.simulator.kafka.fetch import Fetch, Fetched, Place, StableWait
from batchferry.simulator.kafka.log import PartitionLog
from batchferry.simulator.kafka.producers import connect
from batchferry.simulator.kafka.records import Refused
from batchferry.simulator.kafka.settings import SimKafkaSettings
from batchferry.simulator.kafka.wire import EXPECTED, GivenUp, NoAnswer, Wire, reason, rotated

CHUNK_RECORDS: Final = 2000
"""Most records of one yielded chunk."""
FETCH_WAIT_S: Final = 10.0
"""A fetch that finds nothing is asked again after so long: its topic may have been made anew, its answer lost."""
PARTITIONS_CHECK_S: Final = 30.0


class LongPoll:
    """The one fetch a client has at the broker; it waits there over many polls, so that idle polls cost nothing."""

    def __init__(self, wire: Wire, on_answer: Callable[[Mapping[Place, Fetched]], None]) -> None:
        self._wire = wire
        self._on_answer = on_answer
        self._task: asyncio.Task[None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._turn = 0

    @property
    def is_asking(self) -> bool:
        """Whether a fetch is under way."""
        return self._task is not None

    def ask(self, positions: Mapping[Place, int], max_records: int) -> None:
        """Fetch from these positions, unless a fetch is under way."""
        if self._task is not None or not positions:
            return
        self._turn += 1
        order = {place: positions[place] for place in rotated(positions, self._turn)}
        self._task = self._wire.process.run(self._fetch(order, max_records), "fetch")

    def drop(self) -> None:
        """The positions have changed: what is under way is void."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
        self.wake()

    def wake(self) -> None:
        """Let ``wait`` return."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, limit_s: float) -> None:
        """Until something has come, or changed, or ``limit_s`` have passed."""
        loop = asyncio.get_running_loop()
        waiter = self._waiter = loop.create_future()
        timer = loop.call_later(limit_s, self.wake)
        try:
            await waiter
        finally:
            timer.cancel()
            if self._waiter is waiter:
                self._waiter = None
        await self._wire.process.ready()

    async def _fetch(self, positions: Mapping[Place, int], max_records: int) -> None:
        resolve = self._wire.cluster.log
        answer: Mapping[Place, Fetched] = {}
        try:
            answer = await self._wire.wait(
                "fetch", lambda: Fetch(resolve, positions, max_records).begin(), FETCH_WAIT_S
            )
        except NoAnswer:
            pass
        except (Refused, GivenUp):
            return
        self._task = None
        self._on_answer(answer)
        self.wake()


class SimReader:
    """Reads partitions one after the other (``ports.LogReader``); one read at a time."""

    def __init__(self, wire: Wire, settings: SimKafkaSettings) -> None:
        self._wire = wire
        self._settings = settings
        self._started = False

    async def start(self) -> None:
        """Connect.

        Raises:
            KafkaUnavailable: no broker answered in time.
        """
        await connect(self._wire, self._settings, "connecting a reader")
        self._started = True

    async def read_to_end(
        self, topic: str, partition: int, start: int | None = None
    ) -> AsyncIterator[Sequence[Record]]:
        """Every record from ``start`` (None, or below it: the log's start) to the high watermark as it is now.

        Raises:
            KafkaUnavailable: no progress for ``read_stall_s``.
        """
        log_start, end = (await self.bounds(topic, [partition]))[partition]
        first = log_start if start is None else max(start, log_start)
        if first >= end:
            return
        async with aclosing(self._read((topic, partition), first, end)) as chunks:
            async for records in chunks:
                inside = [record for record in records if record.offset < end]
                if inside:
                    yield inside

    async def read_offsets(self, topic: str, partition: int, offsets: OffsetSet) -> AsyncIterator[Sequence[Record]]:
        """The records at these offsets that the log still has, ascending, in chunks of at most 2,000.

        Raises:
            KafkaUnavailable: as ``read_to_end``.
        """
        if not offsets:
            return
        log_start, log_end = (await self.bounds(topic, [partition]))[partition]
        wanted = list(offsets.within(log_start, log_end))
        resolve, place = self._wire.cluster.log, (topic, partition)
        for at in range(0, len(wanted), CHUNK_RECORDS):
            chunk = wanted[at : at + CHUNK_RECORDS]
            found = await self._ask(place, chunk[0], chunk[-1] + 1, partial(_stable, resolve, place, chunk))
            if found is None:
                raise self._stuck(place, chunk[0], chunk[-1] + 1)
            if found.records:
                yield found.records

    async def bounds(self, topic: str, partitions: Collection[int]) -> Mapping[int, tuple[int, int]]:
        """Log start and high watermark (end) of each partition.

        Raises:
            KafkaUnavailable: no answer in time, no such partition, or not started.
        """
        if not self._started:
            raise KafkaUnavailable("this reader is not started")
        if not partitions:
            return {}
        wanted = list(partitions)
        return {
            partition: ends
            for (_, partition), ends in (
                await bounds_of(self._wire, self._settings, [(topic, partition) for partition in wanted])
            ).items()
        }

    async def stop(self) -> None:
        """Disconnect; safe to call twice."""
        self._started = False
        self._wire.close()

    async def _read(self, place: Place, start: int, stop: int) -> AsyncGenerator[Sequence[Record], None]:
        """Chunks from ``start`` until the position has reached ``stop``; the last may run past it."""
        resolve, position = self._wire.cluster.log, start
        while position < stop:
            found = await self._ask(place, position, stop, partial(_fetch, resolve, place, position))
            if found is None:
                raise self._stuck(place, position, stop)
            if found.is_out_of_range:  # retention was faster than we: go on with what is left
                log_start, log_end = (await self.bounds(place[0], [place[1]]))[place[1]]
                if position > log_end:
                    return
                position = max(position, log_start)
                continue
            position = found.position
            if found.records:
                yield found.records

    async def _ask(self, place: Place, position: int, stop: int, make: Callable[[], Fetch]) -> Fetched | None:
        """What the fetch finds; None if it found nothing for ``read_stall_s``."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._settings.read_stall_s
        while (left_s := until - loop.time()) > 0:
            if not self._started:
                raise KafkaUnavailable("this reader is not started")
            try:
                answer = await self._wire.wait("fetch", make, min(left_s, FETCH_WAIT_S))
            except NoAnswer:
                continue
            except EXPECTED as error:
                raise KafkaUnavailable(f"reading {_name(place)} at {position} of {stop}: {reason(error)}") from error
            if place in answer:
                return answer[place]
            await asyncio.sleep(min(left_s, 0.1))  # the topic was deleted while the fetch waited
        return None

    def _stuck(self, place: Place, position: int, stop: int) -> KafkaUnavailable:
        return KafkaUnavailable(
            f"reading {_name(place)}: stuck at offset {position} of {stop} for {self._settings.read_stall_s:.0f} s;"
            " is a transaction left open there, or the broker away?"
        )


def _fetch(resolve: Callable[[str, int], PartitionLog], place: Place, position: int) -> Fetch:
    return Fetch(resolve, {place: position}, CHUNK_RECORDS).begin()


def _stable(resolve: Callable[[str, int], PartitionLog], place: Place, offsets: Sequence[int]) -> Fetch:
    return StableWait(resolve, place, offsets).begin()


class SimTail:
    """Follows whole topics from the log's start (``ports.LogTail``); finds partitions added later."""

    def __init__(self, wire: Wire, settings: SimKafkaSettings) -> None:
        self._wire = wire
        self._settings = settings
        self._poll = LongPoll(wire, self._fetched)
        self._topics: tuple[str, ...] = ()
        self._positions: dict[Place, int] = {}
        self._held: list[Record] = []
        self._started = False
        self._looked_at = 0.0

    async def start(self, topics: Sequence[str]) -> None:
        """Connect and begin at the start of every partition.

        Raises:
            KafkaUnavailable: no broker answered in time, or a topic does not exist.
        """
        self._topics = tuple(topics)
        await self._look(self._settings.connect_deadline_s)
        missing = [topic for topic in self._topics if not any(place[0] == topic for place in self._positions)]
        if missing:
            raise KafkaUnavailable(f"following {', '.join(missing)}: UNKNOWN_TOPIC_OR_PARTITION (3)")
        self._started = True

    async def poll(self, timeout_ms: int) -> Sequence[Record]:
        """What has been committed since the last call, each partition in order; empty after ``timeout_ms``."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_ms / 1000
        while self._started:
            if self._held:
                held, self._held = self._held, []
                return held
            if loop.time() - self._looked_at > min(PARTITIONS_CHECK_S, self._settings.metadata_max_age_s):
                try:
                    await self._look(self._settings.request_timeout_s)
                except KafkaUnavailable:
                    self._looked_at = loop.time()
            self._poll.ask(self._positions, CHUNK_RECORDS)
            left_s = until - loop.time()
            if left_s <= 0:
                break
            await self._poll.wait(left_s)
        return ()

    async def caught_up(self) -> bool:
        """Whether everything committed when this was asked has been returned by ``poll``.

        Raises:
            KafkaUnavailable: no answer in time.
        """
        return self.reached(await self.mark())

    async def mark(self) -> LogMark:
        """The ends of all partitions now, those added since the last look included.

        Raises:
            KafkaUnavailable: no answer in time, or not started.
        """
        if not self._started:
            raise KafkaUnavailable("this tail is not started")
        await self._look(self._settings.request_timeout_s)
        found = await bounds_of(self._wire, self._settings, list(self._positions))
        return {place: end for place, (start, end) in found.items() if end > start}

    def reached(self, mark: LogMark) -> bool:
        """Whether ``poll`` has returned everything below these ends; False after ``stop``."""
        if not self._started:
            return False
        held: dict[Place, int] = {}
        for record in self._held:
            held.setdefault((record.topic, record.partition), record.offset)
        return all(held.get(place, self._positions.get(place, -1)) >= end for place, end in mark.items())

    async def stop(self) -> None:
        """Disconnect; safe to call twice."""
        self._started = False
        self._poll.drop()
        self._wire.close()

    def _fetched(self, answer: Mapping[Place, Fetched]) -> None:
        for place, found in answer.items():
            if found.is_out_of_range:  # begin again where the log begins now
                self._positions[place] = self._wire.cluster.log(*place).start
                continue
            self._held.extend(found.records)
            self._positions[place] = found.position

    async def _look(self, deadline_s: float) -> None:
        """Take every partition there is now; those already followed go on where they are."""
        cluster, topics = self._wire.cluster, self._topics

        def effect() -> dict[Place, int]:
            return {
                (name, log.partition): log.start
                for name in topics
                if (topic := cluster.find_topic(name)) is not None
                for log in topic.logs
            }

        try:
            found = await self._wire.call("metadata", effect, deadline_s)
        except EXPECTED as error:
            raise KafkaUnavailable(f"following {', '.join(topics)}: {reason(error)}") from error
        self._looked_at = asyncio.get_running_loop().time()
        fresh = {place: start for place, start in found.items() if place not in self._positions}
        if fresh:
            self._positions.update(fresh)
            self._poll.drop()


async def bounds_of(wire: Wire, settings: SimKafkaSettings, places: Sequence[Place]) -> Mapping[Place, tuple[int, int]]:
    """Log start and high watermark of each.

    Raises:
        KafkaUnavailable: no answer in time, or no such partition.
    """
    cluster = wire.cluster

    def effect() -> dict[Place, tuple[int, int]]:
        logs = [(place, cluster.log(*place)) for place in places]
        return {place: (log.start, log.end) for place, log in logs}

    try:
        return await wire.call("bounds", effect, settings.request_timeout_s)
    except EXPECTED as error:
        topics = ", ".join(dict.fromkeys(topic for topic, _ in places))
        raise KafkaUnavailable(f"reading the log's bounds of {topics}: {reason(error)}") from error


def _name(place: Place) -> str:
    return f"{place[0]}-{place[1]}"
