"""Whatever comes in, every row leaves once, in order, in a lawful batch, and in time."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from batchferry.domain.accumulator import Accumulator, OpenBatch, Sealed, SealLimits, SealReason
from batchferry.domain.batchkey import BatchKey
from batchferry.domain.times import plan_waits

HOUR_MS = 3_600_000
H = 3600.0
KEYS = [BatchKey("acct", "/v1/embeddings", f"m{number}", "24h") for number in range(4)]


class Row(NamedTuple):
    """One row as the model knows it."""

    key: BatchKey
    partition: int
    offset: int
    size_bytes: int
    tokens: int
    inputs: int
    ship_by_ms: int


limits = st.builds(
    SealLimits,
    max_rows=st.integers(1, 6),
    max_bytes=st.integers(1, 60),
    max_tokens=st.none() | st.integers(1, 40),
    max_inputs=st.none() | st.integers(1, 12),
)
steps = st.one_of(
    st.tuples(
        st.just("add"),
        st.sampled_from(KEYS),
        st.integers(0, 2),
        st.integers(0, 30),
        st.integers(0, 20),
        st.integers(0, 5),
        st.integers(-5, 50),
    ),
    st.tuples(st.just("pass time"), st.integers(0, 15), st.sets(st.sampled_from(KEYS), max_size=1)),
    st.tuples(st.just("flush"), st.sampled_from(KEYS)),
    st.tuples(st.just("press")),
    st.tuples(st.just("drop"), st.integers(0, 2)),
)
voyages = st.lists(st.one_of(steps, steps, steps), max_size=60)


class Harbour:
    """Runs steps against an accumulator and keeps its own list of who waits where."""

    def __init__(self, limit: SealLimits, max_open_keys: int) -> None:
        self.limit = limit
        self.max_open_keys = max_open_keys
        self.accumulator = Accumulator(max_open_keys)
        self.now_ms = 0
        self.offset = 0
        self.waiting: dict[BatchKey, list[Row]] = defaultdict(list)
        self.has_lost_a_partition: set[BatchKey] = set()

    def add(self, key: BatchKey, partition: int, size_bytes: int, tokens: int, inputs: int, ahead_ms: int) -> None:
        self.offset += 1
        row = Row(key, partition, self.offset, size_bytes, tokens, inputs, self.now_ms + ahead_ms)
        sealed = self.accumulator.add(
            key,
            self.limit,
            partition,
            row.offset,
            size_bytes=size_bytes,
            tokens=tokens,
            inputs=inputs,
            t0_ms=self.now_ms,
            ship_by_ms=row.ship_by_ms,
            deadline_ms=self.now_ms + 1_000,
        )
        # the row is in the last batch sealed if that has its offset, else it waits
        mine = [one for one in sealed if self.names(one.batch, row)]
        for one in sealed:
            if one in mine:
                self.waiting[key].append(row)
            self.leave(one)
        if not mine:
            self.waiting[key].append(row)
        assert len(mine) <= 1
        assert mine == [] or mine[0] is sealed[-1]

    @staticmethod
    def names(batch: OpenBatch, row: Row) -> bool:
        part = batch.parts.get(row.partition)
        return batch.key == row.key and part is not None and row.offset in part.offsets

    def leave(self, sealed: Sealed) -> None:
        batch = sealed.batch
        rows = self.waiting.pop(batch.key)
        self.check(batch, rows)
        fits = len(rows) == 1 or self.is_lawful(rows)
        assert fits, "a batch over a limit"
        reached = {
            SealReason.COUNT: len(rows) == self.limit.max_rows,
            SealReason.TIME: min(row.ship_by_ms for row in rows) <= self.now_ms
            or batch.key in self.has_lost_a_partition,
        }
        assert reached.get(sealed.reason, True), "a reason that is not true"
        self.has_lost_a_partition.discard(batch.key)

    def is_lawful(self, rows: list[Row]) -> bool:
        limit = self.limit
        return (
            len(rows) <= limit.max_rows
            and sum(row.size_bytes for row in rows) <= limit.max_bytes
            and (limit.max_tokens is None or sum(row.tokens for row in rows) <= limit.max_tokens)
            and (limit.max_inputs is None or sum(row.inputs for row in rows) <= limit.max_inputs)
        )

    def check(self, batch: OpenBatch, rows: list[Row]) -> None:
        """The batch holds exactly these rows, none twice, each partition's in the order they came."""
        by_partition: dict[int, list[int]] = defaultdict(list)
        for row in rows:
            by_partition[row.partition].append(row.offset)
        assert {partition: list(part.offsets) for partition, part in batch.parts.items()} == by_partition
        assert batch.rows == len(rows)
        assert batch.bytes == sum(row.size_bytes for row in rows)
        assert batch.tokens == sum(row.tokens for row in rows)
        assert all(row.key == batch.key for row in rows)
        assert batch.ship_by_ms <= min(row.ship_by_ms for row in rows)
        if batch.key not in self.has_lost_a_partition:
            assert batch.ship_by_ms == min(row.ship_by_ms for row in rows)
            assert batch.inputs == sum(row.inputs for row in rows)
        assert sum(sum(part.due.values()) for part in batch.parts.values()) == len(rows)

    def pass_time(self, step_ms: int, held: set[BatchKey]) -> None:
        self.now_ms += step_ms
        for sealed in self.accumulator.due(self.now_ms, held):
            assert sealed.batch.key not in held
            assert sealed.reason is SealReason.TIME
            self.leave(sealed)
        for batch in self.accumulator:
            assert batch.key in held or batch.ship_by_ms > self.now_ms, "a batch stayed behind its time"

    def drop(self, partition: int) -> None:
        self.accumulator.drop_partition(partition)
        for key, rows in list(self.waiting.items()):
            left = [row for row in rows if row.partition != partition]
            if len(left) < len(rows):
                self.has_lost_a_partition.add(key)
            if left:
                self.waiting[key] = left
            else:
                del self.waiting[key]
                self.has_lost_a_partition.discard(key)

    def step(self, kind: str, *arguments: object) -> None:
        match kind:
            case "add":
                self.add(*arguments)  # type: ignore[arg-type]  # drawn in this order
            case "pass time":
                self.pass_time(*arguments)  # type: ignore[arg-type]  # same
            case "drop":
                self.drop(*arguments)  # type: ignore[arg-type]  # same
            case _:
                made = (
                    self.accumulator.seal(arguments[0], SealReason.FLUSH)  # type: ignore[arg-type]  # same
                    if kind == "flush"
                    else self.accumulator.seal_largest()
                )
                if made is not None:
                    self.leave(made)
        self.look_around()

    def look_around(self) -> None:
        """What waits is what the model says waits."""
        waiting = {key: rows for key, rows in self.waiting.items() if rows}
        assert {batch.key for batch in self.accumulator} == set(waiting)
        assert len(self.accumulator) <= self.max_open_keys
        for batch in self.accumulator:
            self.check(batch, waiting[batch.key])
            assert self.is_lawful(waiting[batch.key])
        assert self.accumulator.rows == sum(map(len, waiting.values()))
        assert self.accumulator.next_due_ms() == min((batch.ship_by_ms for batch in self.accumulator), default=None)


@settings(max_examples=150, deadline=None)
@given(limits, st.integers(1, 4), voyages)
def test_no_row_is_lost_doubled_reordered_or_packed_over_a_limit(
    limit: SealLimits, max_open_keys: int, voyage: list[tuple[object, ...]]
):
    """Every row that came in is in exactly one open or sealed batch of its key, in order, under every limit.

    Only a lone row may be larger than a limit, and only a partition that was dropped takes rows away.
    """
    harbour = Harbour(limit, max_open_keys)
    for step in voyage:
        harbour.step(*step)  # type: ignore[arg-type]  # the first is the kind


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5 * HOUR_MS), min_size=1, max_size=40))
def test_no_record_waits_longer_than_its_promise_allows(arrivals_ms: list[int]):
    """SLA 30 h, window 24 h, margin 2 h: whoever looks when told to seals every record within 4 h of its arrival."""
    plan = plan_waits(sla_s=30 * H, window_s=24 * H, margin_s=2 * H)
    accumulator = Accumulator(max_open_keys=1)
    coming = sorted(arrivals_ms)
    arrived_ms = dict(enumerate(coming))
    left_ms: dict[int, int] = {}
    now_ms = 0
    while len(left_ms) < len(coming):
        next_arrival_ms = (
            coming[len(left_ms) + accumulator.rows] if len(left_ms) + accumulator.rows < len(coming) else None
        )
        due_ms = accumulator.next_due_ms()
        now_ms = min(at for at in (next_arrival_ms, due_ms) if at is not None)
        if due_ms is not None and due_ms <= now_ms:
            for sealed in accumulator.due(now_ms):
                left_ms.update({offset: now_ms for part in sealed.batch.parts.values() for offset in part.offsets})
        else:
            offset = len(left_ms) + accumulator.rows
            times = plan.times(now_ms)
            accumulator.add(
                KEYS[0],
                SealLimits(10**6, 10**9),
                0,
                offset,
                size_bytes=1,
                tokens=1,
                inputs=1,
                t0_ms=now_ms,
                ship_by_ms=times.ship_by_ms,
                deadline_ms=times.deadline_ms,
            )
    waits_ms = {offset: left_ms[offset] - arrived_ms[offset] for offset in arrived_ms}
    assert max(waits_ms.values()) == 4 * HOUR_MS
    assert min(waits_ms.values()) >= 0
    assert all(
        left_ms[offset] + 24 * HOUR_MS + 2 * HOUR_MS <= arrived_ms[offset] + 30 * HOUR_MS for offset in arrived_ms
    )
