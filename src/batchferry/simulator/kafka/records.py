"""What the broker keeps: records, and the transactions they belong to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import asyncio

    from batchferry.simulator.kafka.log import PartitionLog


class Refused(Exception):
    """The broker says no; ``name`` and ``code`` are those of Kafka's protocol guide, error codes."""

    def __init__(self, name: str, code: int) -> None:
        self.name = name
        self.code = code
        super().__init__(f"{name} ({code})")

    @property
    def is_fenced(self) -> bool:
        """Whether a newer producer with the same transactional id, or the coordinator, has ended this one."""
        return self.code in {47, 90}


def fenced() -> Refused:
    """A producer's epoch is not the newest."""
    return Refused("INVALID_PRODUCER_EPOCH", 47)


class TransactionState(StrEnum):
    """Where a transaction stands."""

    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(slots=True, eq=False)
class Transaction:
    """One transaction, from its first partition or offset to its markers. Identity is what it is compared by."""

    transactional_id: str
    epoch: int
    number: int
    owner: str
    began_at_s: float
    state: TransactionState = TransactionState.OPEN
    logs: dict[PartitionLog, None] = field(default_factory=dict)
    records: list[StoredRecord] = field(default_factory=list)
    offsets: dict[tuple[str, str, int], int] = field(default_factory=dict)
    """Pending offsets by group, topic and partition."""
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True, eq=False)
class StoredRecord:
    """A record of a log (``ports.Record``), or a control marker, which nobody is ever given."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    timestamp_type: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]] = ()
    transaction: Transaction | None = None
    is_marker: bool = False
    erasable_at_ms: int | None = None
    """When compaction may drop this tombstone or marker; set by the first pass that meets it."""

    @property
    def is_visible(self) -> bool:
        """Whether a ``read_committed`` reader is given it (below the last stable offset)."""
        if self.is_marker:
            return False
        transaction = self.transaction
        return transaction is None or transaction.state is TransactionState.COMMITTED


class OpenTransaction(NamedTuple):
    """An open transaction, for a checker. Times are of the loop, in seconds."""

    transactional_id: str
    epoch: int
    owner: str
    began_at_s: float
    records: int


class FinishedTransaction(NamedTuple):
    """A transaction that has ended, for a checker. Times are of the loop, in seconds."""

    transactional_id: str
    epoch: int
    owner: str
    began_at_s: float
    ended_at_s: float
    is_committed: bool
    reason: str
    """Who ended it: ``its producer``, ``a successor``, ``the coordinator: ...``."""
    records: Sequence[StoredRecord]
    offsets: Mapping[tuple[str, str, int], int]
    """Offsets by group, topic and partition."""
