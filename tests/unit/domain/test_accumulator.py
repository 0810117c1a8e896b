"""When a batch is sealed, and why."""

from __future__ import annotations

import pytest

from batchferry.domain.accumulator import Accumulator, OpenBatch, Sealed, SealLimits, SealReason
from batchferry.domain.batchkey import BatchKey
from batchferry.domain.offsets import OffsetSet
from batchferry.domain.times import plan_waits

HOUR_MS = 3_600_000
H = 3600.0
KEY = BatchKey("openai-main", "/v1/chat/completions", "gpt-4o-mini", "24h")
OTHER = KEY._replace(model="gpt-4.1")
ROOMY = SealLimits(max_rows=1000, max_bytes=1_000_000)


def add(
    accumulator: Accumulator,
    offset: int,
    *,
    key: BatchKey = KEY,
    limits: SealLimits = ROOMY,
    partition: int = 0,
    size_bytes: int = 100,
    tokens: int = 10,
    inputs: int = 1,
    t0_ms: int = 0,
    ship_by_ms: int = 4 * HOUR_MS,
    deadline_ms: int = 30 * HOUR_MS,
) -> tuple[Sealed, ...]:
    """One ordinary row, but for what is said."""
    return accumulator.add(
        key,
        limits,
        partition,
        offset,
        size_bytes=size_bytes,
        tokens=tokens,
        inputs=inputs,
        t0_ms=t0_ms,
        ship_by_ms=ship_by_ms,
        deadline_ms=deadline_ms,
    )


def rows_of(batch: OpenBatch) -> dict[int, list[int]]:
    """Offsets by partition."""
    return {partition: list(part.offsets) for partition, part in batch.parts.items()}


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (SealLimits(3, 1_000_000), SealReason.COUNT),
        (SealLimits(1000, 300), SealReason.BYTES),
        (SealLimits(1000, 1_000_000, max_tokens=30), SealReason.TOKENS),
        (SealLimits(1000, 1_000_000, max_inputs=3), SealReason.INPUTS),
    ],
)
def test_a_batch_that_is_full_leaves_with_its_last_row(limits: SealLimits, reason: SealReason):
    """Reaching a limit exactly seals the batch with the row in it, for that limit's reason."""
    accumulator = Accumulator(max_open_keys=8)
    assert [add(accumulator, offset, limits=limits) for offset in (1, 2)] == [(), ()]
    (sealed,) = add(accumulator, 3, limits=limits)
    assert sealed.reason is reason
    assert rows_of(sealed.batch) == {0: [1, 2, 3]}
    assert len(accumulator) == 0


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (SealLimits(1000, 250), SealReason.BYTES),
        (SealLimits(1000, 1_000_000, max_tokens=25), SealReason.TOKENS),
        (SealLimits(1000, 1_000_000, max_inputs=5), SealReason.INPUTS),
    ],
)
def test_a_row_that_does_not_fit_stays_for_the_next_batch(limits: SealLimits, reason: SealReason):
    """A row that would break a limit seals the batch without it and opens the next one."""
    accumulator = Accumulator(max_open_keys=8)
    assert [add(accumulator, offset, limits=limits, inputs=2) for offset in (1, 2)] == [(), ()]
    (sealed,) = add(accumulator, 3, limits=limits, inputs=2)
    assert sealed.reason is reason
    assert rows_of(sealed.batch) == {0: [1, 2]}
    assert [rows_of(batch) for batch in accumulator] == [{0: [3]}]


def test_a_row_larger_than_every_limit_travels_alone():
    """A lone oversize row seals what waits, then itself, in that order."""
    accumulator = Accumulator(max_open_keys=8)
    limits = SealLimits(1000, 250)
    add(accumulator, 1, limits=limits)
    sealed = add(accumulator, 2, limits=limits, size_bytes=999)
    assert [(rows_of(one.batch), one.reason) for one in sealed] == [
        ({0: [1]}, SealReason.BYTES),
        ({0: [2]}, SealReason.BYTES),
    ]
    assert accumulator.rows == 0


def test_thirty_hours_of_promise_wait_four():
    """SLA 30 h, window 24 h, margin 2 h: sealed at the latest 4 h after its oldest record, not a millisecond before."""
    plan = plan_waits(sla_s=30 * H, window_s=24 * H, margin_s=2 * H)
    accumulator = Accumulator(max_open_keys=8)
    for offset, t0_ms in enumerate((HOUR_MS, 2 * HOUR_MS, 5 * HOUR_MS - 1)):
        times = plan.times(t0_ms)
        add(accumulator, offset, t0_ms=t0_ms, ship_by_ms=times.ship_by_ms, deadline_ms=times.deadline_ms)
    assert accumulator.next_due_ms() == 5 * HOUR_MS
    assert accumulator.due(5 * HOUR_MS - 1) == []
    (sealed,) = accumulator.due(5 * HOUR_MS)
    assert sealed.reason is SealReason.TIME
    assert sealed.batch.oldest_t0_ms == HOUR_MS
    assert sealed.batch.rows == 3
    assert accumulator.next_due_ms() is None


def test_an_urgent_latecomer_brings_the_threshold_forward():
    """The threshold is the smallest ship_by in the batch, whichever row brought it, even one already past."""
    accumulator = Accumulator(max_open_keys=8)
    add(accumulator, 1, ship_by_ms=4 * HOUR_MS)
    add(accumulator, 2, ship_by_ms=HOUR_MS)
    add(accumulator, 3, ship_by_ms=3 * HOUR_MS)
    assert accumulator.next_due_ms() == HOUR_MS
    add(accumulator, 4, ship_by_ms=-HOUR_MS)
    assert [one.batch.rows for one in accumulator.due(0)] == [4]


def test_a_held_key_is_not_due():
    """A key that must not submit waits on, however late it is; the others leave."""
    accumulator = Accumulator(max_open_keys=8)
    add(accumulator, 1)
    add(accumulator, 2, key=OTHER)
    assert [one.batch.key for one in accumulator.due(9 * HOUR_MS, held=[KEY])] == [OTHER]
    assert [one.batch.key for one in accumulator.due(9 * HOUR_MS)] == [KEY]


def test_keys_never_mix():
    """Rows of two keys never share a batch, also when only the slice differs."""
    accumulator = Accumulator(max_open_keys=8)
    sliced = KEY._replace(slice="customer-7")
    add(accumulator, 1)
    add(accumulator, 2, key=sliced)
    assert {batch.key: rows_of(batch) for batch in accumulator} == {KEY: {0: [1]}, sliced: {0: [2]}}


def test_one_key_too_many_seals_the_most_urgent_batch():
    """The number of open keys is bounded: a new one sends the batch with the smallest ship_by away."""
    accumulator = Accumulator(max_open_keys=2)
    add(accumulator, 1, ship_by_ms=2 * HOUR_MS)
    add(accumulator, 2, key=OTHER, ship_by_ms=HOUR_MS)
    (sealed,) = add(accumulator, 3, key=KEY._replace(slice="new"))
    assert (sealed.batch.key, sealed.reason) == (OTHER, SealReason.PRESSURE)
    assert len(accumulator) == 2


def test_an_operator_and_pressure_seal_what_there_is():
    """A key is sealed on demand with the reason given; under pressure the batch with the most bytes goes first."""
    accumulator = Accumulator(max_open_keys=8)
    add(accumulator, 1)
    add(accumulator, 2, key=OTHER, size_bytes=500)
    assert (accumulator.rows, accumulator.bytes) == (2, 600)
    largest = accumulator.seal_largest()
    assert largest is not None
    assert (largest.batch.key, largest.reason) == (OTHER, SealReason.PRESSURE)
    assert accumulator.seal(OTHER, SealReason.FLUSH) is None
    flushed = accumulator.seal(KEY, SealReason.FLUSH)
    assert flushed is not None
    assert flushed.reason is SealReason.FLUSH
    assert accumulator.seal_largest() is None


def test_a_partition_that_leaves_takes_its_rows_and_nothing_else():
    """Dropping a partition forgets its rows, sizes and, if it was the only one, its batch."""
    accumulator = Accumulator(max_open_keys=8)
    add(accumulator, 1, partition=0, size_bytes=100, tokens=10)
    add(accumulator, 5, partition=3, size_bytes=40, tokens=4)
    add(accumulator, 2, partition=0, key=OTHER)
    accumulator.drop_partition(0)
    (batch,) = accumulator
    assert rows_of(batch) == {3: [5]}
    assert (batch.rows, batch.bytes, batch.tokens) == (1, 40, 4)
    accumulator.drop_partition(7)
    assert accumulator.rows == 1


def test_rows_are_counted_by_the_quarter_hour_of_their_deadline():
    """A part knows how many of its rows are due in which quarter-hour since the epoch."""
    accumulator = Accumulator(max_open_keys=8)
    for offset, minute in enumerate((0, 14, 15, 44)):
        add(accumulator, offset, deadline_ms=30 * HOUR_MS + minute * 60_000)
    (batch,) = accumulator
    assert batch.parts[0].due == {120: 2, 121: 1, 122: 1}
    assert batch.parts[0].offset_set() == OffsetSet(range(4))
