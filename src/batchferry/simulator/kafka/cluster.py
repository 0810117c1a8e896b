"""The broker: topics, the two coordinators, and what an operator or a checker asks without a round trip."""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Final, NamedTuple

from batchferry.ports import OutRecord
from batchferry.simulator.kafka.faults import Faults
from batchferry.simulator.kafka.groups import GroupCoordinator, GroupState
from batchferry.simulator.kafka.log import PartitionLog, Topic
from batchferry.simulator.kafka.partitioner import partition_of
from batchferry.simulator.kafka.process import SimProcess
from batchferry.simulator.kafka.records import FinishedTransaction, OpenTransaction, Refused, StoredRecord
from batchferry.simulator.kafka.transactions import TransactionCoordinator

AppendListener = Callable[[str, int, Sequence[StoredRecord]], None]
Later = Callable[[float, Callable[[], None]], asyncio.TimerHandle]

MOST_FINISHED: Final = 1_000_000
"""Finished transactions kept for the checker."""


class GroupView(NamedTuple):
    """A group as it is now, for a checker."""

    state: GroupState
    generation: int
    members: Mapping[str, frozenset[int]]
    """Partitions by member id (``process/number``)."""


class SimCluster:
    """One cluster. Make it outside any process's context: its timers run in the context it was made in.

    Args:
        rng: the only source of chance.
        wall_clock: the instant records are stamped with, aware UTC; it may run apart from the loop's time.
        later: runs a function after so many seconds, whatever becomes of the caller; by default the running loop's
            ``call_later`` in the cluster's context. A simulation that counts or holds back tasks by process may give
            its own.
        latency_s: shortest and longest one-way delay.
        abort_check_s: how much later than its timeout a transaction may be aborted; Kafka looks every 10 s
            (``transaction.abort.timed.out.transaction.cleanup.interval.ms``).
        initial_rebalance_delay_s: how long an empty group waits for more members
            (``group.initial.rebalance.delay.ms``).
        history_lines: most lines of ``history``.
    """

    def __init__(
        self,
        rng: random.Random,
        *,
        wall_clock: Callable[[], datetime],
        later: Later | None = None,
        latency_s: tuple[float, float] = (0.0005, 0.005),
        abort_check_s: float = 10.0,
        initial_rebalance_delay_s: float = 0.5,
        history_lines: int = 5000,
        most_finished: int = MOST_FINISHED,
    ) -> None:
        self.rng = rng
        self.latency_s = latency_s
        self.history: deque[str] = deque(maxlen=history_lines)
        """What happened, one short line each, the loop's seconds first."""
        self._wall_clock = wall_clock
        self._context = contextvars.copy_context()
        self._later = later
        self._topics: dict[str, Topic] = {}
        self._listeners: list[AppendListener] = []
        self._housekeeping: asyncio.TimerHandle | None = None
        self.groups = GroupCoordinator(self, initial_rebalance_delay_s)
        self.transactions = TransactionCoordinator(self, abort_check_s, most_finished)
        self.faults = Faults(rng, self.later, self.note, self.groups.restart_sessions)

    # -------------------------------------------------------------------- time, chance, telling

    @property
    def now_s(self) -> float:
        """The running loop's time; 0 before there is a loop."""
        try:
            return asyncio.get_running_loop().time()
        except RuntimeError:
            return 0.0

    def wall_ms(self) -> int:
        """The wall clock in milliseconds since the epoch."""
        return round(self._wall_clock().timestamp() * 1000)

    def later(self, wait_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        """Run this after so long, in nobody's context but the cluster's."""
        if self._later is not None:
            return self._later(wait_s, call)
        return asyncio.get_running_loop().call_later(wait_s, call, context=self._context)

    def latency(self, process: SimProcess) -> float:
        """A one-way delay between this process and the broker, in seconds."""
        return self.rng.uniform(*(process.latency_s or self.latency_s))

    def note(self, line: str) -> None:
        """Add a line to the history."""
        self.history.append(f"{self.now_s:.3f} {line}")

    def on_append(self, listener: AppendListener) -> None:
        """Call this with topic, partition and records the moment they may be read, offsets ascending.

        Once a transaction for each of its partitions, all in the same step.
        """
        self._listeners.append(listener)

    def tell(self, records: Iterable[StoredRecord]) -> None:
        """Records have become visible."""
        if not self._listeners:
            return
        parts: dict[tuple[str, int], list[StoredRecord]] = {}
        for record in records:
            parts.setdefault((record.topic, record.partition), []).append(record)
        for (topic, partition), batch in parts.items():
            for listener in self._listeners:
                listener(topic, partition, batch)

    def wake(self, logs: Iterable[PartitionLog]) -> None:
        """The stable end of these has moved: answer the fetches that wait for it."""
        for log in logs:
            for fetch in list(log.waiters):
                fetch.look()

    # --------------------------------------------------------------------------------- topics

    def create_topic(
        self,
        name: str,
        partitions: int,
        configs: Mapping[str, str] | None = None,
        first_offsets: Mapping[int, int] | None = None,
    ) -> None:
        """Make a topic; ``first_offsets`` lets logs start above zero, as after retention.

        Raises:
            Refused: it exists, or name, partitions or configs will not do.
        """
        if name in self._topics:
            raise Refused("TOPIC_ALREADY_EXISTS", 36)
        self._topics[name] = Topic(name, partitions, configs or {}, first_offsets)
        self.note(f"topic {name} made with {partitions} partitions")

    def create_partitions(self, name: str, partitions: int) -> None:
        """Raise the number of partitions; clients notice within their metadata age.

        Raises:
            Refused: no such topic, or not more than there are.
        """
        topic = self.topic(name)
        if partitions <= len(topic.logs):
            raise Refused("INVALID_PARTITIONS", 37)
        topic.logs += [PartitionLog(name, number) for number in range(len(topic.logs), partitions)]
        self.note(f"topic {name} grows to {partitions} partitions")

    def delete_topic(self, name: str) -> None:
        """Delete the topic and every group's offsets of it.

        Raises:
            Refused: no such topic.
        """
        topic = self.topic(name)
        del self._topics[name]
        self.groups.forget_topic(name)
        self.note(f"topic {name} deleted")
        for log in topic.logs:
            for fetch in list(log.waiters):
                fetch.drop()
                fetch.set({})

    def recreate_topic(self, name: str, partitions: int | None = None) -> None:
        """Delete and make anew with the same settings; offsets begin at zero again."""
        topic = self.topic(name)
        self.delete_topic(name)
        self.create_topic(name, partitions or len(topic.logs), topic.configs)

    def set_configs(self, name: str, configs: Mapping[str, str]) -> None:
        """Change settings of a topic."""
        self.topic(name).configs.update(configs)

    def topic(self, name: str) -> Topic:
        """The topic.

        Raises:
            Refused: no such topic.
        """
        found = self._topics.get(name)
        if found is None:
            raise Refused("UNKNOWN_TOPIC_OR_PARTITION", 3)
        return found

    def find_topic(self, name: str) -> Topic | None:
        """The topic, None where there is none."""
        return self._topics.get(name)

    @property
    def topic_names(self) -> list[str]:
        """Every topic, in the order they were made."""
        return list(self._topics)

    def partition_count(self, name: str) -> int:
        """Partitions of the topic; 0 where there is none."""
        found = self._topics.get(name)
        return 0 if found is None else len(found.logs)

    def log(self, topic: str, partition: int) -> PartitionLog:
        """One partition's log.

        Raises:
            Refused: no such topic or partition.
        """
        return self.topic(topic).log(partition)

    # -------------------------------------------------------------------------------- writing

    def sorted_out(self, records: Sequence[OutRecord]) -> dict[PartitionLog, list[StoredRecord]]:
        """Records as they will be stored, by log; keyless ones of one topic go together to a random partition.

        Raises:
            Refused: no such topic or partition.
        """
        keyless: dict[str, int] = {}
        lanes: dict[PartitionLog, list[StoredRecord]] = {}
        now_ms = self.wall_ms()
        for name, key, value, headers, told, timestamp_ms in records:
            topic = self.topic(name)
            if told is not None:
                partition = told
            elif key is not None:
                partition = partition_of(key, len(topic.logs))
            else:
                partition = keyless[name] if name in keyless else self.rng.randrange(len(topic.logs))
                keyless[name] = partition
            by_broker = topic.configs["message.timestamp.type"] == "LogAppendTime"
            lanes.setdefault(topic.log(partition), []).append(
                StoredRecord(
                    name,
                    partition,
                    -1,
                    now_ms if by_broker or timestamp_ms is None else timestamp_ms,
                    int(by_broker),
                    key,
                    value,
                    tuple(headers),
                )
            )
        return lanes

    def check(self, lanes: Mapping[PartitionLog, Sequence[StoredRecord]]) -> None:
        """What the topics' settings forbid; stamps what the broker is to stamp.

        Raises:
            Refused: a record is too large, has no key where one is needed, or comes from the future; or the topic
                has been made anew since its client looked.
        """
        now_ms = self.wall_ms()
        for log, entries in lanes.items():
            topic = self.topic(log.topic)
            if topic.log(log.partition) is not log:
                raise Refused("UNKNOWN_TOPIC_OR_PARTITION", 3)
            for entry in entries:
                topic.check(entry, now_ms)
                if entry.timestamp_type == 1:
                    entry.timestamp = now_ms

    def append(self, records: Sequence[OutRecord]) -> list[StoredRecord]:
        """Write plain records at once, from outside any process; what was stored, with offsets.

        Raises:
            Refused: a topic or its settings forbid one; nothing is written then.
        """
        lanes = self.sorted_out(records)
        self.check(lanes)
        for log, entries in lanes.items():
            self.append_plain(log, entries)
        return [entry for entries in lanes.values() for entry in entries]

    def append_plain(self, log: PartitionLog, entries: Sequence[StoredRecord]) -> None:
        """Write these outside any transaction; they become visible once nothing open lies before them."""
        for entry in entries:
            log.append(entry)
        self.tell(entries)
        self.wake((log,))

    # ------------------------------------------------------------------------------- operators

    def delete_records(self, topic: str, partition: int, below: int) -> None:
        """Make the log start at this offset, at most at its end."""
        log = self.log(topic, partition)
        log.delete_below(below)
        self.note(f"{topic}-{partition} starts at {log.start}")
        self.wake((log,))

    def apply_retention(self, topic: str) -> None:
        """Delete what ``retention.ms`` no longer keeps, where the topic's policy deletes."""
        found = self.topic(topic)
        keep_ms = int(found.configs["retention.ms"])
        if keep_ms < 0 or "delete" not in found.configs["cleanup.policy"]:
            return
        oldest_ms = self.wall_ms() - keep_ms
        for log in found.logs:
            below = log.expired_below(oldest_ms)
            if below > log.start:
                self.delete_records(topic, log.partition, below)

    def compact(self, topic: str, partition: int, upto: int | None = None) -> int:
        """Clean a compacted topic's partition below ``upto`` (None: all that is stable); the records dropped."""
        found = self.topic(topic)
        if not found.is_compacted:
            return 0
        log = found.log(partition)
        limit = log.end if upto is None else upto
        dropped = log.compact(limit, self.wall_ms(), int(found.configs["delete.retention.ms"]))
        if dropped:
            self.note(f"{topic}-{partition} compacted below {min(limit, log.stable_end)}: {dropped} dropped")
        return dropped

    def housekeeping(self) -> None:
        """One round of retention and of compaction, each log up to an offset of chance, as segments would have it."""
        for name, topic in list(self._topics.items()):
            self.apply_retention(name)
            if topic.is_compacted:
                for log in topic.logs:
                    if log.end > log.start:
                        self.compact(name, log.partition, self.rng.randint(log.start, log.end))

    def start_housekeeping(self, every_s: float) -> None:
        """Do that every so often, until ``stop_housekeeping``."""
        self.stop_housekeeping()

        def round_and_again() -> None:
            self.housekeeping()
            self._housekeeping = self.later(every_s, round_and_again)

        self._housekeeping = self.later(every_s, round_and_again)

    def stop_housekeeping(self) -> None:
        """Let the logs be."""
        timer, self._housekeeping = self._housekeeping, None
        if timer is not None:
            timer.cancel()

    def abort_transaction(self, transactional_id: str, why: str = "told to") -> bool:
        """The coordinator aborts the open transaction and fences its producer; False where none is open."""
        return self.transactions.abort(transactional_id, why)

    def rebalance(self, group: str, why: str = "told to") -> None:
        """Start a rebalance of a group at rest."""
        self.groups.rebalance(group, why)

    # ---------------------------------------------------------------------------------- peeking

    def committed_records(self, topic: str, partition: int) -> list[StoredRecord]:
        """What a ``read_committed`` reader would be given now."""
        return self.log(topic, partition).visible()

    def log_start(self, topic: str, partition: int) -> int:
        """The first offset that can be read."""
        return self.log(topic, partition).start

    def end_offset(self, topic: str, partition: int) -> int:
        """The high watermark."""
        return self.log(topic, partition).end

    def last_stable_offset(self, topic: str, partition: int) -> int:
        """Where ``read_committed`` readers stop now."""
        return self.log(topic, partition).stable_end

    def group_offsets(self, group: str, topic: str) -> dict[int, int]:
        """Committed offsets by partition."""
        return self.groups.offsets(group, topic)

    def group_view(self, group: str) -> GroupView:
        """Members and generation of a group."""
        found = self.groups.group(group)
        return GroupView(
            found.state, found.generation, {name: member.partitions for name, member in found.members.items()}
        )

    def open_transactions(self) -> list[OpenTransaction]:
        """What is open now."""
        return self.transactions.open()

    @property
    def finished(self) -> Sequence[FinishedTransaction]:
        """Ended transactions, oldest first; the oldest go when there are more than ``most_finished``."""
        return self.transactions.finished
