"""What is done with a row that did not succeed, and how its attempts are carried on."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchferry.domain.batchkey import BatchKey
from batchferry.domain.ids import LotId
from batchferry.domain.ledger import Lane, Lot, LotState
from batchferry.domain.offsets import OffsetSet
from batchferry.domain.retry import DEFAULT_RETRIES, KEPT, Action, RetryPolicy, carry_attempts, decide
from batchferry.domain.rows import RowClass

RELAXED = settings(deadline=None)

AT = datetime(2026, 1, 31, tzinfo=UTC)
POLICY = RetryPolicy.default()
AGAIN_ONCE = {RowClass.TRANSIENT, RowClass.UNREADABLE, RowClass.MISSING, RowClass.EXPIRED, RowClass.CANCELLED}


def lot(name: str, attempts: dict[str, dict[int, set[int]]]) -> Lot:
    """A lot with these attempts behind it."""
    counted = {
        row_class: {times: OffsetSet(rows) for times, rows in by_times.items()}
        for row_class, by_times in attempts.items()
    }
    key = BatchKey("acct", "/v1/chat/completions", "m", "24h")
    return Lot(LotId(name), Lane.BATCH, LotState.DONE, key, OffsetSet(range(100)), 1, (0,), AT, attempts=counted)


def plain(attempts: dict[str, dict[int, OffsetSet]]) -> dict[str, dict[int, list[int]]]:
    """Attempts with lists in place of offset sets."""
    return {
        row_class: {times: list(rows) for times, rows in by_times.items()} for row_class, by_times in attempts.items()
    }


@pytest.mark.parametrize("row_class", sorted(RowClass))
@pytest.mark.parametrize("attempts", [0, 1, 2])
def test_the_table_of_classes(row_class: RowClass, attempts: int):
    """Blameless rows go again once, account trouble keeps them for nothing, all else is final at once."""
    if row_class in {RowClass.ACCOUNT, RowClass.BATCH_FAILED}:
        wanted = Action.KEEP
    elif row_class in AGAIN_ONCE and attempts == 0:
        wanted = Action.AGAIN
    else:
        wanted = Action.FAIL
    assert decide(row_class, attempts, POLICY) is wanted


def test_the_default_table_names_no_class_twice():
    """A class is either kept or counted, and one that is retried is retried at least once."""
    assert not KEPT & DEFAULT_RETRIES.keys()
    assert set(DEFAULT_RETRIES) == AGAIN_ONCE
    assert all(times >= 1 for times in DEFAULT_RETRIES.values())


@RELAXED
@given(st.sampled_from(RowClass), st.integers(0, 20), st.integers(0, 10))
def test_a_budget_is_used_up_and_no_more(row_class: RowClass, attempts: int, budget: int):
    """A class worth n submissions goes again while it ended so fewer than n times; a kept class always stays."""
    action = decide(row_class, attempts, RetryPolicy({row_class: budget}))
    if row_class in KEPT:
        assert action is Action.KEEP
    else:
        assert action is (Action.AGAIN if attempts < budget else Action.FAIL)


def test_an_end_counts_once_for_its_rows_and_class():
    """What ended now is one attempt more in its class; other rows and classes carry what they had."""
    before = lot("A", {"transient": {1: {1, 2}, 2: {3}}, "missing": {1: {1}}})
    carried = carry_attempts([before], OffsetSet([1, 2, 3, 4]), {RowClass.TRANSIENT: OffsetSet([1, 3, 4])})
    assert plain(carried) == {"transient": {1: [2, 4], 2: [1], 3: [3]}, "missing": {1: [1]}}


def test_only_the_rows_of_the_new_lot_are_carried():
    """Rows that do not travel on leave no attempts behind, and an empty count is not written."""
    before = lot("A", {"transient": {1: {1, 2}}, "missing": {1: {9}}})
    carried = carry_attempts([before], OffsetSet([2]), {RowClass.EXPIRED: OffsetSet([5])})
    assert plain(carried) == {"transient": {1: [2]}}


def test_rows_from_several_lots_come_together():
    """Rows merged from several lots each keep their own count."""
    one, other = lot("A", {"transient": {1: {1}}}), lot("B", {"transient": {1: {2}, 3: {4}}})
    carried = carry_attempts([one, other], OffsetSet([1, 2, 4]), {})
    assert plain(carried) == {"transient": {1: [1, 2], 3: [4]}}


def test_the_higher_count_holds_where_two_lots_name_a_row():
    """An older lot that still names a row cannot give it its attempts back."""
    old, new = lot("A", {"transient": {1: {1}}}), lot("B", {"transient": {2: {1}}})
    for lots in ([old, new], [new, old]):
        assert plain(carry_attempts(lots, OffsetSet([1]), {})) == {"transient": {2: [1]}}
        assert plain(carry_attempts(lots, OffsetSet([1]), {RowClass.TRANSIENT: OffsetSet([1])})) == {
            "transient": {3: [1]}
        }


def test_the_lots_the_rows_come_from_are_not_changed():
    """Carrying attempts on leaves the old lots' own counts alone."""
    before = lot("A", {"transient": {1: {1, 2}}})
    carry_attempts([before], OffsetSet([1, 2]), {RowClass.TRANSIENT: OffsetSet([1])})
    assert list(before.attempts["transient"][1]) == [1, 2]


rows = st.sets(st.integers(0, 12), max_size=8)


@RELAXED
@given(
    st.dictionaries(st.integers(0, 12), st.integers(1, 4)),
    rows,
    st.lists(rows, min_size=2, max_size=2),
)
def test_attempts_add_up(had: dict[int, int], travelling: set[int], ended: list[set[int]]):
    """For every row and class: attempts after = attempts before + 1 if it ended so now; and one count a row."""
    by_times: dict[int, set[int]] = {}
    for row, times in had.items():
        by_times.setdefault(times, set()).add(row)
    transient, missing = ended[0], ended[1] - ended[0]
    carried = carry_attempts(
        [lot("A", {"transient": by_times})],
        OffsetSet(travelling),
        {RowClass.TRANSIENT: OffsetSet(transient), RowClass.MISSING: OffsetSet(missing)},
    )
    for row in range(13):
        if row in travelling:
            wanted = {"transient": had.get(row, 0) + (row in transient), "missing": int(row in missing)}
        else:
            wanted = {"transient": 0, "missing": 0}
        for row_class, times in wanted.items():
            found = [count for count, offsets in carried.get(row_class, {}).items() if row in offsets]
            assert found == ([times] if times else [])
    assert all(offsets for counts in carried.values() for offsets in counts.values())
