"""The table of deadlines is whole, says what the promises say, and its sums are right."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchferry.domain.deadlines import (
    MAX_RESCUE_LEAD_S,
    TABLE,
    Act,
    Moment,
    RowKind,
    decide_act,
    is_due,
    lawful,
    rescue_at_s,
    rescue_lead_s,
    should_cancel,
    table,
)

CELLS = list(itertools.product(RowKind, Moment, (True, False)))
CALLS_THE_LANE = {Act.SYNC, Act.CANCEL_AND_SYNC, Act.RACE}


def test_the_table_has_a_rule_for_every_combination_and_no_other():
    """Six kinds, three moments, with and without a sync lane: 36 rules, each with a reason."""
    assert set(TABLE) == set(CELLS)
    assert len(TABLE) == 36
    assert all(rule.reason and all(other.when for other in rule.instead) for rule in TABLE.values())


def test_every_act_is_used_and_no_rule_names_one_twice():
    """An act that no rule names would be a word without a meaning."""
    assert set().union(*(lawful(*cell) for cell in CELLS)) == set(Act)
    for rule in TABLE.values():
        named = [rule.act, *(other.act for other in rule.instead)]
        assert len(named) == len(set(named))


@pytest.mark.parametrize("kind", RowKind)
@pytest.mark.parametrize("moment", Moment)
def test_without_a_sync_lane_nothing_goes_through_it(kind: RowKind, moment: Moment):
    """The lane that is off may not even be an exception."""
    assert not lawful(kind, moment, False) & CALLS_THE_LANE


@pytest.mark.parametrize("lane_on", [True, False])
def test_every_miss_is_announced_and_ends_nothing(lane_on: bool):
    """Whatever a row is doing at its deadline, the miss is told and the row goes on."""
    for kind in RowKind:
        assert lawful(kind, Moment.DEADLINE, lane_on) == {Act.ANNOUNCE_MISS}


def test_no_miss_comes_without_a_word_before_it():
    """Without a lane every kind is announced before its deadline: at the rescue moment, or when it leaves too late."""
    for kind in RowKind:
        acts = {decide_act(kind, moment, False) for moment in (Moment.SHIP_BY, Moment.RESCUE)}
        assert acts & {Act.ANNOUNCE_RISK, Act.BATCH_ANYWAY}


@pytest.mark.parametrize(
    ("kind", "moment", "lane_on", "act"),
    [
        (RowKind.FRESH, Moment.SHIP_BY, True, Act.SEAL),
        (RowKind.FRESH, Moment.SHIP_BY, False, Act.SEAL),
        (RowKind.RETRIED, Moment.SHIP_BY, True, Act.RETRY),
        (RowKind.CANARY, Moment.SHIP_BY, True, Act.SEAL),
        (RowKind.HELD, Moment.SHIP_BY, True, Act.WAIT),
        (RowKind.HELD, Moment.RESCUE, True, Act.ANNOUNCE_RISK),
        (RowKind.OVERDUE, Moment.SHIP_BY, True, Act.SYNC),
        (RowKind.OVERDUE, Moment.SHIP_BY, False, Act.BATCH_ANYWAY),
        (RowKind.FRESH, Moment.RESCUE, True, Act.CANCEL_AND_SYNC),
        (RowKind.FRESH, Moment.RESCUE, False, Act.ANNOUNCE_RISK),
        (RowKind.RETRIED, Moment.RESCUE, True, Act.CANCEL_AND_SYNC),
    ],
)
def test_the_rules_that_the_promises_name(kind: RowKind, moment: Moment, lane_on: bool, act: Act):
    """The usual acts are those the guarantees speak of."""
    assert decide_act(kind, moment, lane_on) is act


def test_settings_choose_among_lawful_acts_only():
    """Each setting that bends a rule has its place in the table, and no other kind of row is bent by it."""
    assert Act.WAIT in lawful(RowKind.CANARY, Moment.SHIP_BY, True)  # timeout: hold
    assert Act.RETRY in lawful(RowKind.RETRIED, Moment.SHIP_BY, True)
    assert Act.SYNC in lawful(RowKind.RETRIED, Moment.SHIP_BY, True)  # no second window fits
    assert lawful(RowKind.OVERDUE, Moment.SHIP_BY, True) == {Act.SYNC, Act.BATCH_ANYWAY, Act.FAIL}
    assert lawful(RowKind.HELD, Moment.RESCUE, True) == {Act.ANNOUNCE_RISK}
    assert {cell[0] for cell in CELLS if Act.FAIL in lawful(*cell)} == {RowKind.OVERDUE}
    assert Act.RACE in lawful(RowKind.FRESH, Moment.RESCUE, True)


def test_parts_are_judged_like_fresh_rows():
    """A part has its parent's deadline and no favours."""
    for moment, lane_on in itertools.product(Moment, (True, False)):
        assert lawful(RowKind.SPLIT, moment, lane_on) == lawful(RowKind.FRESH, moment, lane_on)


def test_the_printed_table_has_a_line_for_every_kind_and_moment():
    """Markdown of four columns; no text of a cell breaks out of its column."""
    lines = table().split("\n")
    assert len(lines) == 2 + len(RowKind) * len(Moment)
    assert all(line.count("|") == 5 for line in lines)
    assert [tuple(line.split(" | ")[:2]) for line in lines[2:]] == [
        (f"| {kind}", str(moment)) for kind in RowKind for moment in Moment
    ]
    for (kind, moment, lane_on), rule in TABLE.items():
        line = next(line for line in lines if line.startswith(f"| {kind} | {moment} |"))
        cell = line.split(" | ")[2 if lane_on else 3]
        assert cell.startswith(f"`{rule.act}`: {rule.reason}")
        assert all(f"`{other.act}` when {other.when}" in cell for other in rule.instead)


def test_the_rescue_moment_leaves_time_for_cancelling_and_running():
    """A 30 h promise with a lead of 30 min and 10 min for a cancel is rescued at 29 h 20 min."""
    assert rescue_at_s(30 * 3600, 1800, 600) == 29 * 3600 + 1200
    assert not is_due(29 * 3600 + 1199.9, 30 * 3600, 1800, 600)
    assert is_due(29 * 3600 + 1200, 30 * 3600, 1800, 600)
    assert is_due(40 * 3600, 30 * 3600, 1800, 600)


@pytest.mark.parametrize(
    ("rows", "rows_per_s", "lead_s"),
    [
        (0, 10.0, 1800.0),
        (10_000, 10.0, 1800.0),  # 1,000 s of work
        (50_000, 10.0, 5000.0),
        (1_000_000, 1.0, MAX_RESCUE_LEAD_S),
        (50_000, None, 1800.0),
        (50_000, 0.0, 1800.0),
        (50_000, -1.0, 1800.0),
        (50_000, float("nan"), 1800.0),
        (50_000, float("inf"), 1800.0),
    ],
)
def test_the_lead_grows_with_the_queue_and_is_bounded(rows: int, rows_per_s: float | None, lead_s: float):
    """At least the configured lead, at most the bound; a speed that nobody measured changes nothing."""
    assert rescue_lead_s(1800.0, rows, rows_per_s) == lead_s


def test_a_long_configured_lead_is_above_the_bound():
    """The operator's word is not cut short."""
    assert rescue_lead_s(10 * 3600.0, 5, 1.0) == 10 * 3600.0
    assert rescue_lead_s(60.0, 10_000, 1.0, max_s=300.0) == 300.0


@given(st.floats(0, 1e5), st.integers(0, 10**7), st.floats(1e-6, 1e6), st.floats(1.0, 10.0))
def test_more_rows_or_a_slower_lane_never_shorten_the_lead(base_s: float, rows: int, rows_per_s: float, factor: float):
    """The lead is monotone in what it is worked out from."""
    lead_s = rescue_lead_s(base_s, rows, rows_per_s)
    assert lead_s >= base_s
    assert rescue_lead_s(base_s, rows * 2, rows_per_s) >= lead_s
    assert rescue_lead_s(base_s, rows, rows_per_s / factor) >= lead_s


@pytest.mark.parametrize(
    ("due", "rows", "share", "cancels"),
    [
        (50, 100, 0.5, True),
        (49, 100, 0.5, False),
        (100, 100, 1.0, True),
        (99, 100, 1.0, False),
        (1, 3, 0.01, True),
        (0, 100, 0.01, False),
        (0, 0, 0.5, False),
        (1, 1, 0.5, True),
    ],
)
def test_a_batch_is_cancelled_only_for_enough_of_its_rows(due: int, rows: int, share: float, cancels: bool):
    """The share is reached exactly, and nothing due never cancels."""
    assert should_cancel(due, rows, share) is cancels
