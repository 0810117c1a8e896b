"""When a batch is sealed: the open batches, one a batch key, and the limits and times that close them.

Two questions are kept apart, as they have different answers: *does this row still fit* (if not, the open batch
is sealed without it) and *is the batch now full* (if so, it is sealed with it). A row larger than every
limit still gets a batch of its own; whether such a row may exist at all is decided where it is read.

The time threshold of a batch is the smallest ``ship_by`` in it, so no row waits longer than its own
``SLA - completion window - margin``.

Instants are integers, milliseconds since the epoch: this code runs once for every record.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from batchferry.domain.batchkey import BatchKey
from batchferry.domain.ledger import QUARTER_HOUR_S
from batchferry.domain.offsets import OffsetSet

_QUARTER_HOUR_MS = QUARTER_HOUR_S * 1000


class SealReason(StrEnum):
    """Why a batch was sealed."""

    COUNT = "count"
    """It has as many rows as a batch may have."""
    BYTES = "bytes"
    """The next row would make the file too large, or it is full to the byte."""
    TOKENS = "tokens"
    """The same for the estimated input tokens."""
    INPUTS = "inputs"
    """The same for embedding inputs, which providers count one by one."""
    TIME = "time"
    """The smallest ``ship_by`` in it has come."""
    FLUSH = "flush"
    """An operator asked."""
    PRESSURE = "pressure"
    """The spool, or the number of open batch keys, is at its limit."""
    RETRY = "retry"
    """Rows that get another submission travel at once, in a batch of their own."""


@dataclass(frozen=True, slots=True)
class SealLimits:
    """The most a batch may hold; each the smaller of the provider's limit and the operator's. None: no limit."""

    max_rows: int
    max_bytes: int
    max_tokens: int | None = None
    max_inputs: int | None = None


@dataclass(slots=True)
class Part:
    """One input partition's rows of a batch, offsets ascending."""

    partition: int
    offsets: array[int] = field(default_factory=lambda: array("Q"))
    bytes: int = 0
    tokens: int = 0
    due: dict[int, int] = field(default_factory=dict)
    """Rows by the quarter-hour (since the epoch) of their deadline."""

    def offset_set(self) -> OffsetSet:
        """The offsets as a set."""
        return OffsetSet(self.offsets)


@dataclass(slots=True)
class OpenBatch:
    """The rows of one batch key that wait together."""

    key: BatchKey
    limits: SealLimits
    rows: int = 0
    bytes: int = 0
    tokens: int = 0
    inputs: int = 0
    ship_by_ms: int = 0
    oldest_t0_ms: int = 0
    parts: dict[int, Part] = field(default_factory=dict)

    def full_for(self, size_bytes: int, tokens: int, inputs: int) -> SealReason | None:
        """Which limit one more row of this size would break; None when it fits or the batch is empty."""
        if not self.rows:
            return None
        limits = self.limits
        if self.rows + 1 > limits.max_rows:
            return SealReason.COUNT
        if self.bytes + size_bytes > limits.max_bytes:
            return SealReason.BYTES
        if limits.max_tokens is not None and self.tokens + tokens > limits.max_tokens:
            return SealReason.TOKENS
        if limits.max_inputs is not None and self.inputs + inputs > limits.max_inputs:
            return SealReason.INPUTS
        return None

    def full(self) -> SealReason | None:
        """Which limit has been reached, so that waiting longer gains nothing."""
        limits = self.limits
        if self.rows >= limits.max_rows:
            return SealReason.COUNT
        if self.bytes >= limits.max_bytes:
            return SealReason.BYTES
        if limits.max_tokens is not None and self.tokens >= limits.max_tokens:
            return SealReason.TOKENS
        if limits.max_inputs is not None and self.inputs >= limits.max_inputs:
            return SealReason.INPUTS
        return None


@dataclass(frozen=True, slots=True)
class Sealed:
    """An open batch that has been closed, and why."""

    batch: OpenBatch
    reason: SealReason


class Accumulator:
    """The open batches of one process. Not thread-safe; knows no clock."""

    def __init__(
        self, max_open_keys: int, limits_of: Callable[[BatchKey, SealLimits], SealLimits] = lambda _key, limits: limits
    ) -> None:
        """Begin empty.

        Args:
            max_open_keys: batches that may be open at one time.
            limits_of: asked once for each batch that is opened: its own limits, none of them larger.
        """
        self._max_open_keys = max_open_keys
        self._limits_of = limits_of
        self._open: dict[BatchKey, OpenBatch] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[OpenBatch]:
        return iter(self._open.values())

    @property
    def rows(self) -> int:
        """Rows that wait in all open batches."""
        return sum(batch.rows for batch in self._open.values())

    @property
    def bytes(self) -> int:
        """Line bytes that wait in all open batches."""
        return sum(batch.bytes for batch in self._open.values())

    def add(
        self,
        key: BatchKey,
        limits: SealLimits,
        partition: int,
        offset: int,
        *,
        size_bytes: int,
        tokens: int,
        inputs: int,
        t0_ms: int,
        ship_by_ms: int,
        deadline_ms: int,
    ) -> tuple[Sealed, ...]:
        """Take one row in; return the batches this seals, in the order they were sealed (mostly none).

        Rows of one partition must come in ascending offsets.
        """
        sealed: tuple[Sealed, ...] = ()
        batch = self._open.get(key)
        if batch is not None:
            reason = batch.full_for(size_bytes, tokens, inputs)
            if reason is not None:
                sealed = (Sealed(self._open.pop(key), reason),)
                batch = None
        if batch is None:
            if len(self._open) >= self._max_open_keys:
                sealed = (*sealed, self._seal_oldest())
            limits = self._limits_of(key, limits)
            batch = self._open[key] = OpenBatch(key, limits, ship_by_ms=ship_by_ms, oldest_t0_ms=t0_ms)
        batch.rows += 1
        batch.bytes += size_bytes
        batch.tokens += tokens
        batch.inputs += inputs
        if ship_by_ms < batch.ship_by_ms:  # noqa: PLR1730 (a call for every record costs more)
            batch.ship_by_ms = ship_by_ms
        if t0_ms < batch.oldest_t0_ms:  # noqa: PLR1730 (same)
            batch.oldest_t0_ms = t0_ms
        part = batch.parts.get(partition)
        if part is None:
            part = batch.parts[partition] = Part(partition)
        part.offsets.append(offset)
        part.bytes += size_bytes
        part.tokens += tokens
        quarter = deadline_ms // _QUARTER_HOUR_MS
        part.due[quarter] = part.due.get(quarter, 0) + 1
        if (reason := batch.full()) is not None:
            sealed = (*sealed, Sealed(self._open.pop(key), reason))
        return sealed

    def _seal_oldest(self) -> Sealed:
        oldest = min(self._open.values(), key=lambda batch: batch.ship_by_ms)
        return Sealed(self._open.pop(oldest.key), SealReason.PRESSURE)

    def due(self, now_ms: int, held: Iterable[BatchKey] = ()) -> list[Sealed]:
        """Seal every open batch whose time has come, except those of held keys."""
        kept = set(held)
        ready = [batch.key for batch in self._open.values() if batch.ship_by_ms <= now_ms and batch.key not in kept]
        return [Sealed(self._open.pop(key), SealReason.TIME) for key in ready]

    def next_due_ms(self) -> int | None:
        """When the next open batch must be sealed; None when nothing waits."""
        return min((batch.ship_by_ms for batch in self._open.values()), default=None)

    def seal(self, key: BatchKey, reason: SealReason) -> Sealed | None:
        """Seal the open batch of a key now, whatever is in it; None when the key has none."""
        batch = self._open.pop(key, None)
        return None if batch is None else Sealed(batch, reason)

    def seal_largest(self) -> Sealed | None:
        """Seal the open batch with the most bytes, to make room; None when nothing waits."""
        if not self._open:
            return None
        largest = max(self._open.values(), key=lambda batch: batch.bytes)
        return self.seal(largest.key, SealReason.PRESSURE)

    def drop_partition(self, partition: int) -> None:
        """Forget the rows of a partition that somebody else will read. Thresholds of others stay as they are."""
        for key, batch in list(self._open.items()):
            part = batch.parts.pop(partition, None)
            if part is None:
                continue
            if not batch.parts:
                del self._open[key]
                continue
            batch.rows -= len(part.offsets)
            batch.bytes -= part.bytes
            batch.tokens -= part.tokens
            # `inputs` is kept a batch, not a part: it stays too high, which seals early and breaks no limit
