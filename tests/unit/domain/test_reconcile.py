"""Result lines against the lots they answer: in any order, more than once, or not ours at all."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchferry.domain.batchkey import BatchKey
from batchferry.domain.ids import LedgerId, LotId, WireId
from batchferry.domain.ledger import Lane, Lot, LotState
from batchferry.domain.offsets import OffsetSet
from batchferry.domain.reconcile import Reconciliation, Whose

RELAXED = settings(deadline=None)

AT = datetime(2026, 1, 31, tzinfo=UTC)
OURS = {0: LedgerId("0000000000"), 2: LedgerId("2222222222")}
SIBLING = LedgerId("5555555555")
STRANGER = LedgerId("9999999999")
ROWS = {0: [3, 4, 5, 70_000], 2: [4, 9]}


def lot(partition: int, submission: int = 1) -> Lot:
    """Our lot in this partition of the batch."""
    key = BatchKey("acct", "/v1/chat/completions", "m", "24h")
    rows = OffsetSet(ROWS[partition])
    return Lot(LotId("B"), Lane.BATCH, LotState.SUBMITTED, key, rows, submission, (0, 2, 5), AT)


def fresh() -> Reconciliation:
    """The join before the first line."""
    return Reconciliation({partition: lot(partition) for partition in OURS}, OURS)


def wire(partition: int, offset: int, submission: int = 1, ledger_id: LedgerId | None = None) -> str:
    """A wire id as it stands in a result line."""
    return str(WireId(ledger_id or OURS.get(partition, SIBLING), partition, offset, submission))


ALL_OF_OURS = [wire(partition, offset) for partition, offsets in ROWS.items() for offset in offsets]
lines = st.one_of(
    st.sampled_from(ALL_OF_OURS),
    st.builds(wire, st.just(5), st.integers(0, 9)),
    st.builds(wire, st.sampled_from([0, 2]), st.sampled_from([3, 4, 9]), ledger_id=st.just(STRANGER)),
    st.builds(wire, st.sampled_from([1, 7]), st.integers(0, 9)),
    st.text(max_size=12),
)


@RELAXED
@given(st.permutations(ALL_OF_OURS))
def test_lines_may_come_in_any_order(shuffled: list[str]):
    """However the lines are ordered, each row is seen once and none is absent at the end."""
    join = fresh()
    assert [join.match(line).whose for line in shuffled] == [Whose.OURS] * len(shuffled)
    assert join.absent_rows == 0
    assert (join.lines, join.foreign, join.again, join.siblings) == (len(shuffled), 0, 0, 0)


@RELAXED
@given(st.lists(lines, max_size=30))
def test_absent_is_what_no_line_has_named(several: list[str]):
    """Absent = rows sent - rows seen, and every line is counted under exactly one heading."""
    join = fresh()
    verdicts = [join.match(line).whose for line in several]
    seen = {line for line in several if line in ALL_OF_OURS}
    for partition, offsets in ROWS.items():
        assert list(join.absent(partition)) == [offset for offset in offsets if wire(partition, offset) not in seen]
    assert join.absent_rows == len(ALL_OF_OURS) - len(seen)
    assert verdicts.count(Whose.OURS) == len(seen)
    counted = (verdicts.count(Whose.FOREIGN), verdicts.count(Whose.AGAIN), verdicts.count(Whose.SIBLING))
    assert (join.foreign, join.again, join.siblings) == counted
    assert join.lines == len(several)


def test_a_row_named_twice_is_told_apart():
    """A second line of the same row is a repetition, not another row."""
    join = fresh()
    assert [join.match(wire(0, 3)).whose for _ in range(3)] == [Whose.OURS, Whose.AGAIN, Whose.AGAIN]
    assert list(join.absent(0)) == [4, 5, 70_000]


def test_the_same_offset_in_two_partitions_is_two_rows():
    """Offsets count within their partition only."""
    join = fresh()
    assert join.match(wire(0, 4)).whose is Whose.OURS
    assert join.match(wire(2, 4)).whose is Whose.OURS


@pytest.mark.parametrize(
    ("line", "whose"),
    [
        (wire(5, 3), Whose.SIBLING),
        (wire(0, 3, ledger_id=STRANGER), Whose.FOREIGN),
        (wire(2, 9, ledger_id=OURS[0]), Whose.FOREIGN),
        (wire(1, 3), Whose.FOREIGN),
        (wire(0, 6), Whose.FOREIGN),
        ("r1", Whose.FOREIGN),
        ("", Whose.FOREIGN),
    ],
)
def test_lines_that_are_not_ours(line: str, whose: Whose):
    """A sibling's row, another ledger, another partition, a row we did not send, no wire id: none is our row."""
    join = fresh()
    assert join.match(line).whose is whose
    assert join.absent_rows == len(ALL_OF_OURS)


def test_a_siblings_lot_tells_its_rows_from_others():
    """Where the lot of another replica is known, only its rows are of this batch; one that was cleaned up says nothing."""
    lots = {partition: lot(partition) for partition in OURS}
    theirs = replace(lot(0), offsets=OffsetSet([3, 8]))
    join = Reconciliation(lots, OURS, {5: theirs})
    assert join.match(wire(5, 3)).whose is Whose.SIBLING
    assert join.match(wire(5, 4)).whose is Whose.FOREIGN
    join = Reconciliation(lots, OURS, {5: replace(theirs, offsets=OffsetSet())})
    assert join.match(wire(5, 4)).whose is Whose.SIBLING


def test_what_proves_that_the_files_are_of_this_batch():
    """A row of a lot that is known, ours or a sibling's. A sibling's place alone is also another environment's."""
    lots, theirs = {p: lot(p) for p in OURS}, {5: replace(lot(0), offsets=OffsetSet([3]))}
    its_id, other_id = SIBLING, STRANGER

    def said(line: str, siblings: dict[int, Lot], ids: dict[int, LedgerId]) -> tuple[Whose, bool]:
        join = Reconciliation(lots, {**OURS, **ids}, siblings)
        return join.match(line).whose, join.is_proven

    assert said(wire(0, 3), {}, {}) == (Whose.OURS, True)
    assert said(wire(0, 9), {}, {}) == (Whose.FOREIGN, False)
    assert said(str(WireId(its_id, 5, 3, 1)), theirs, {5: its_id}) == (Whose.SIBLING, True)
    assert said(str(WireId(other_id, 5, 3, 1)), theirs, {5: its_id}) == (Whose.FOREIGN, False)
    assert said(str(WireId(its_id, 5, 4, 1)), theirs, {5: its_id}) == (Whose.FOREIGN, False)
    assert said(str(WireId(its_id, 5, 3, 1)), {}, {5: its_id}) == (Whose.SIBLING, False)
    assert said(str(WireId(its_id, 5, 3, 1)), theirs, {}) == (Whose.SIBLING, False)


def test_a_match_tells_the_wire_id_it_read():
    """The parts of the wire id come with the verdict, also for strangers, and None when there are none."""
    join = fresh()
    assert join.match(wire(0, 3)).wire == WireId(OURS[0], 0, 3, 1)
    assert join.match(wire(7, 1)).wire == WireId(SIBLING, 7, 1, 1)
    assert join.match("r1").wire is None


def test_another_submission_of_a_row_names_the_row():
    """A line of an earlier or later submission speaks of the same row; what it is worth is decided elsewhere."""
    join = fresh()
    assert join.match(wire(0, 3, submission=4)).whose is Whose.OURS
    assert join.match(wire(0, 3)).whose is Whose.AGAIN


def test_one_pass_over_fifty_thousand_rows_leaves_nothing_absent():
    """A whole batch of 50,000 rows is joined row for row."""
    rows = range(0, 100_000, 2)
    big = Lot(
        LotId("B"), Lane.BATCH, LotState.SUBMITTED, BatchKey("a", "/v1/x", "m", "24h"), OffsetSet(rows), 1, (0,), AT
    )
    join = Reconciliation({0: big}, OURS)
    for offset in reversed(rows):
        join.match(wire(0, offset))
    assert (join.absent_rows, join.lines) == (0, 50_000)
