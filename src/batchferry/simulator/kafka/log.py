"""Topics and their partition logs: offsets, the stable end, retention and compaction. Pure: no time, no randomness."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from batchferry.simulator.kafka.records import Refused, StoredRecord, Transaction, TransactionState

if TYPE_CHECKING:
    from batchferry.simulator.kafka.fetch import Fetch

LEGAL_NAME: Final = re.compile(r"[a-zA-Z0-9._-]{1,249}")
FOREVER: Final = "9223372036854775807"
DEFAULT_CONFIGS: Final[Mapping[str, str]] = {
    "cleanup.policy": "delete",
    "compression.type": "producer",
    "delete.retention.ms": "86400000",
    "file.delete.delay.ms": "60000",
    "flush.messages": FOREVER,
    "flush.ms": FOREVER,
    "index.interval.bytes": "4096",
    "max.compaction.lag.ms": FOREVER,
    "max.message.bytes": "1048588",
    "message.timestamp.after.max.ms": "3600000",
    "message.timestamp.before.max.ms": FOREVER,
    "message.timestamp.type": "CreateTime",
    "min.cleanable.dirty.ratio": "0.5",
    "min.compaction.lag.ms": "0",
    "min.insync.replicas": "1",
    "preallocate": "false",
    "retention.bytes": "-1",
    "retention.ms": "604800000",
    "segment.bytes": "1073741824",
    "segment.ms": "604800000",
    "unclean.leader.election.enable": "false",
}
"""Topic settings and defaults of Apache Kafka 4 (its documentation, topic configs)."""
BATCH_OVERHEAD_BYTES: Final = 61
"""Header of a record batch (message format 2)."""
RECORD_OVERHEAD_BYTES: Final = 21
"""Most a record adds to its key, value and headers (message format 2, lengths as varints)."""


class PartitionLog:
    """One partition. Records ascend by offset; compaction and aborted transactions leave gaps."""

    __slots__ = ("_offsets", "_open", "end", "partition", "records", "start", "topic", "waiters")

    def __init__(self, topic: str, partition: int, first_offset: int = 0) -> None:
        self.topic = topic
        self.partition = partition
        self.start = first_offset
        self.end = first_offset
        """The high watermark: the next offset to be given out."""
        self.records: list[StoredRecord] = []
        self.waiters: dict[Fetch, None] = {}
        self._offsets: list[int] = []
        self._open: dict[Transaction, int] = {}

    @property
    def stable_end(self) -> int:
        """The last stable offset: where the first open transaction begins, else the end."""
        for first in self._open.values():
            return max(first, self.start)
        return self.end

    def append(self, record: StoredRecord) -> None:
        """Give the record the next offset and keep it."""
        record.offset = self.end
        if record.transaction is not None and not record.is_marker:
            self._open.setdefault(record.transaction, self.end)
        self.records.append(record)
        self._offsets.append(self.end)
        self.end += 1

    def mark(self, transaction: Transaction, timestamp_ms: int) -> None:
        """Write the end marker of the transaction; it takes an offset."""
        self.append(
            StoredRecord(
                self.topic, self.partition, -1, timestamp_ms, 1, None, None, transaction=transaction, is_marker=True
            )
        )
        self._open.pop(transaction, None)

    def read(self, position: int, max_records: int) -> tuple[list[StoredRecord], int]:
        """Committed records from ``position``, at most so many, and the position behind what was looked at.

        Raises:
            Refused: OFFSET_OUT_OF_RANGE, the position lies below the start or beyond the end.
        """
        if not self.start <= position <= self.end:
            raise Refused("OFFSET_OUT_OF_RANGE", 1)
        stop = self.stable_end
        found: list[StoredRecord] = []
        if position >= stop or max_records <= 0:
            return found, position
        records = self.records
        for at in range(bisect_left(self._offsets, position), len(records)):
            record = records[at]
            if record.offset >= stop:
                break
            if record.is_visible:
                found.append(record)
                if len(found) == max_records:
                    return found, record.offset + 1
        return found, stop

    def pick(self, offsets: Iterable[int]) -> list[StoredRecord]:
        """The committed records at these offsets, those that are there, in the order asked for."""
        stop = self.stable_end
        found = []
        for offset in offsets:
            at = bisect_left(self._offsets, offset)
            if at < len(self.records) and self._offsets[at] == offset < stop and self.records[at].is_visible:
                found.append(self.records[at])
        return found

    def visible(self) -> list[StoredRecord]:
        """Every committed record below the stable end."""
        stop = self.stable_end
        return [record for record in self.records if record.offset < stop and record.is_visible]

    def delete_below(self, offset: int) -> None:
        """Make the log start at ``offset``, at most at its end; it never goes back."""
        self.start = max(self.start, min(offset, self.end))
        gone = bisect_left(self._offsets, self.start)
        del self.records[:gone]
        del self._offsets[:gone]

    def expired_below(self, oldest_ms: int) -> int:
        """The offset below which every record is older than ``oldest_ms``; never past the stable end."""
        stop = self.stable_end
        for record in self.records:
            if record.offset >= stop or (record.timestamp >= oldest_ms and not record.is_marker):
                return record.offset
        return stop

    def compact(self, upto: int, now_ms: int, delete_retention_ms: int) -> int:
        """Below ``upto`` and the stable end keep the newest record of each key; the number of records dropped.

        A tombstone or marker stays for ``delete_retention_ms`` after the first pass that met it.
        """
        cut = bisect_left(self._offsets, min(upto, self.stable_end))
        newest = {record.key: record.offset for record in self.records[:cut] if record.is_visible}
        kept: list[StoredRecord] = []
        for record in self.records[:cut]:
            if not record.is_marker:
                if not record.is_visible or newest[record.key] != record.offset:
                    continue
                if record.value is not None:
                    kept.append(record)
                    continue
            if record.erasable_at_ms is None:
                record.erasable_at_ms = now_ms + delete_retention_ms
            if now_ms < record.erasable_at_ms:
                kept.append(record)
        dropped = cut - len(kept)
        if dropped:
            self.records[:cut] = kept
            self._offsets[:cut] = [record.offset for record in kept]
        return dropped


class Topic:
    """A topic of the cluster."""

    def __init__(
        self, name: str, partitions: int, configs: Mapping[str, str], first_offsets: Mapping[int, int] | None = None
    ) -> None:
        if not LEGAL_NAME.fullmatch(name) or name in {".", ".."}:
            raise Refused("INVALID_TOPIC_EXCEPTION", 17)
        if partitions < 1:
            raise Refused("INVALID_PARTITIONS", 37)
        if not configs.keys() <= DEFAULT_CONFIGS.keys():
            raise Refused("INVALID_CONFIG", 40)
        self.name = name
        self.configs = {**DEFAULT_CONFIGS, **configs}
        first = first_offsets or {}
        self.logs = [PartitionLog(name, number, first.get(number, 0)) for number in range(partitions)]

    @property
    def is_compacted(self) -> bool:
        """Whether old records of a key may go."""
        return "compact" in self.configs["cleanup.policy"]

    def log(self, partition: int) -> PartitionLog:
        """The partition's log.

        Raises:
            Refused: no such partition.
        """
        if not 0 <= partition < len(self.logs):
            raise Refused("UNKNOWN_TOPIC_OR_PARTITION", 3)
        return self.logs[partition]

    def check(self, record: StoredRecord, now_ms: int) -> None:
        """What a broker looks at before it takes a record.

        Raises:
            Refused: too large, without a key in a compacted topic, or from too far in the future.
        """
        if size_bytes(record.key, record.value, record.headers) > int(self.configs["max.message.bytes"]):
            raise Refused("MESSAGE_TOO_LARGE", 10)
        if record.key is None and self.is_compacted:
            raise Refused("INVALID_RECORD", 87)
        if record.timestamp_type == 0 and record.timestamp - now_ms > int(
            self.configs["message.timestamp.after.max.ms"]
        ):
            raise Refused("INVALID_TIMESTAMP", 32)


def size_bytes(key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes | None]]) -> int:
    """Bytes of the record alone in its batch, uncompressed; an upper bound by some bytes."""
    size = BATCH_OVERHEAD_BYTES + RECORD_OVERHEAD_BYTES + len(key or b"") + len(value or b"")
    return size + sum(len(name) + len(content or b"") + 10 for name, content in headers)


__all__ = ["DEFAULT_CONFIGS", "PartitionLog", "Topic", "TransactionState", "size_bytes"]
