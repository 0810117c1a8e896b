"""A sealed batch before the ledger knows of it, and the file it becomes."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from batchferry.domain.accumulator import SealReason
from batchferry.domain.batchkey import BatchKey
from batchferry.domain.errors import InvariantBroken
from batchferry.domain.ids import BatchId, LotId, WireId
from batchferry.domain.ledger import Lane, Lot, LotState
from batchferry.domain.offsets import OffsetSet
from batchferry.domain.wellformed import BatchFileChecker
from batchferry.engine.partition import PartitionTask
from batchferry.ports import BatchProvider, LocalStore, SpoolRef

CHUNK_BYTES = 256 * 1024


@dataclass(slots=True)
class SealedPart:
    """One partition's rows of a sealed batch. ``task`` is the life of the partition that packed them."""

    task: PartitionTask
    offsets: OffsetSet
    bytes: int
    tokens: int
    due: Mapping[int, int] = field(default_factory=dict)
    attempts: Mapping[str, Mapping[int, OffsetSet]] = field(default_factory=dict)
    extra: Mapping[str, object] = field(default_factory=dict)
    """Members of the lot that go on from those its rows waited in."""
    submission: int = 0
    """The number in the wire ids; fixed when the batch is made, as the file carries it."""

    @property
    def partition(self) -> int:
        """The input partition."""
        return self.task.partition


@dataclass(slots=True)
class SealedBatch:
    """Rows that leave together. Not durable: until its lots are written a crash simply reads the rows again."""

    batch_id: BatchId
    key: BatchKey
    reason: SealReason
    parts: dict[int, SealedPart]
    refs: tuple[SpoolRef, ...]
    sealed_at: datetime
    oldest_t0_ms: int

    def __post_init__(self) -> None:
        for part in self.parts.values():
            if not part.submission:
                part.submission = part.task.ledger.next_submission(part.offsets)

    @property
    def rows(self) -> int:
        """Rows of all parts."""
        return sum(len(part.offsets) for part in self.parts.values())

    @property
    def tokens(self) -> int:
        """Estimated input tokens of all parts."""
        return sum(part.tokens for part in self.parts.values())

    @property
    def bytes(self) -> int:
        """Spooled line bytes of all parts."""
        return sum(part.bytes for part in self.parts.values())

    @property
    def partitions(self) -> tuple[int, ...]:
        """Input partitions, ascending: the order of the file."""
        return tuple(sorted(self.parts))

    @property
    def is_whole(self) -> bool:
        """Whether every partition is still owned by the life that packed its rows."""
        return all(part.task.is_live for part in self.parts.values())

    def lot(self, partition: int, **fields: object) -> Lot:
        """This batch's lot in one partition, SUBMITTING."""
        part = self.parts[partition]
        line_base = sum(len(self.parts[other].offsets) for other in self.partitions if other < partition)
        return Lot(
            lot_id=LotId(self.batch_id),
            lane=Lane.BATCH,
            state=LotState.SUBMITTING,
            key=self.key,
            offsets=part.offsets,
            submission=part.submission,
            partitions=self.partitions,
            created_at=self.sealed_at,
            rows=self.rows,
            tokens=self.tokens,
            bytes=self.bytes,
            own_rows=len(part.offsets),
            own_tokens=part.tokens,
            own_bytes=part.bytes,
            line_base=line_base,
            seal_reason=self.reason.value,
            attempts=part.attempts,
            due=part.due,
            extra=part.extra,
            **fields,  # type: ignore[arg-type]
        )


class BatchFile:
    """The provider's file of a sealed batch, streamed from the spool: partition, then offset ascending.

    Every line is checked as it goes out; the file is never whole in memory, nor twice on disk.
    """

    def __init__(self, store: LocalStore, provider: BatchProvider, sealed: SealedBatch) -> None:
        self._store = store
        self._provider = provider
        self._sealed = sealed
        self._wanted = {partition: part.offsets for partition, part in sealed.parts.items()}
        self.sha256 = ""
        """Of what was sent, in hexadecimal, once ``chunks`` has come to its end."""
        self._ids = {partition: (part.task.ledger_id, part.submission) for partition, part in sealed.parts.items()}

    @property
    def size_bytes(self) -> int:
        """Exact size of what ``chunks`` yields."""
        lines = sum(self._store.line_sizes(self._sealed.refs, self._wanted).values())
        return lines + sum(self._heads_bytes(partition) for partition in self._wanted)

    def _heads_bytes(self, partition: int) -> int:
        ledger_id, submission = self._ids[partition]
        shortest = len(self._provider.line_head(str(WireId(ledger_id, partition, 0, submission)))) - 1
        offsets = self._wanted[partition]
        return len(offsets) * shortest + total_digits(offsets)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The file from its beginning, in bounded chunks.

        Raises:
            InvariantBroken: the file would not be well-formed, or not hold exactly the batch's rows.
        """
        checker, digest = BatchFileChecker(self._sealed.rows), hashlib.sha256()
        head = self._provider.line_head
        ids = self._ids
        rows = 0
        buffer = bytearray()
        async for lines in self._store.stream(self._sealed.refs, self._wanted):
            for partition, offset, line in lines:
                ledger_id, submission = ids[partition]
                buffer += head(f"{ledger_id}-{partition}-{offset}-{submission}")
                buffer += line
                if len(buffer) >= CHUNK_BYTES:
                    chunk = bytes(buffer)
                    checker.feed(chunk)
                    digest.update(chunk)
                    yield chunk
                    buffer.clear()
            rows += len(lines)
        if buffer:
            checker.feed(bytes(buffer))
            digest.update(buffer)
            yield bytes(buffer)
        self.sha256 = digest.hexdigest()
        defects = checker.finish()
        if defects or rows != self._sealed.rows:
            raise InvariantBroken(
                f"batch {self._sealed.batch_id}: its file has {rows} of {self._sealed.rows} rows"
                f" and {len(defects)} defects ({', '.join(sorted({str(defect.rule) for defect in defects}))})"
            )


def total_digits(offsets: OffsetSet) -> int:
    """How many decimal digits the offsets have together, without looking at each."""
    total = 0
    low, digits = 0, 1
    last = offsets.last()
    while last is not None and low <= last:
        high = 10**digits
        total += digits * offsets.count_within(low, high)
        low, digits = high, digits + 1
    return total


def remaining(sealed: SealedBatch, batch_id: BatchId, left_out: Iterable[int], now: datetime) -> SealedBatch | None:
    """The unsettled rows without some partitions, as a new batch: a batch id names exactly one file."""
    gone = set(left_out)
    parts: dict[int, SealedPart] = {}
    for partition, part in sealed.parts.items():
        left = part.task.ledger.unsettled(part.offsets)
        if partition not in gone and part.task.is_live and left:
            parts[partition] = replace(part, offsets=left, submission=0)
    if not parts:
        return None
    refs: Sequence[SpoolRef] = [ref for ref in sealed.refs if ref.partition in parts]
    return SealedBatch(batch_id, sealed.key, sealed.reason, parts, tuple(refs), now, sealed.oldest_t0_ms)
