"""What is done with a row that did not succeed, and how its attempts are carried on."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchferry.domain.batchkey import BatchKey
from batchferry.domain.ids import LotId
from batchferry.domain.ledger import Lane, Lot, LotState
from batchferry.domain.offsets import OffsetSet
from batchferry.domain.retry import (
    ALLOWED,
    DEFAULT_POLICIES,
    DEFAULT_RETRIES,
    KEPT,
    SYNC_TRIES,
    Action,
    Fate,
    Policy,
    RetryPolicy,
    carry_attempts,
    decide,
    decide_sync,
)
from batchferry.domain.rows import RowClass

RELAXED = settings(deadline=None)

AT = datetime(2026, 1, 31, tzinfo=UTC)
HOUR_S = 3600.0
POLICY = RetryPolicy.default()
LANE = RetryPolicy(has_lane=True)
FITS_S, TOO_SHORT_S = 30 * HOUR_S, 20 * HOUR_S
"""Time left in which a batch of 24 h can end, and in which it cannot."""
AGAIN_ONCE = {RowClass.TRANSIENT, RowClass.UNREADABLE, RowClass.MISSING, RowClass.EXPIRED, RowClass.CANCELLED}
STAYS = {RowClass.ACCOUNT, RowClass.BATCH_FAILED}
OURS = (
    set(RowClass)
    - AGAIN_ONCE
    - STAYS
    - {
        RowClass.SUCCEEDED,
        RowClass.CONTENT_FILTERED,
        RowClass.TOO_LONG,
        RowClass.INVALID_REQUEST,
        RowClass.MODEL_UNAVAILABLE,
    }
)


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


# ------------------------------------------------------------------------------------ a row of a batch

DEFAULTS = {
    RowClass.CONTENT_FILTERED: (Action.REVIEW, Action.REVIEW),
    RowClass.TOO_LONG: (Action.FAIL, Action.FAIL),
    RowClass.INVALID_REQUEST: (Action.FAIL, Action.FAIL),
    RowClass.MODEL_UNAVAILABLE: (Action.FAIL, Action.FAIL),
    RowClass.TRANSIENT: (Action.AGAIN, Action.FAIL),
    RowClass.UNREADABLE: (Action.AGAIN, Action.FAIL),
    RowClass.EXPIRED: (Action.AGAIN, Action.FAIL),
    RowClass.CANCELLED: (Action.AGAIN, Action.FAIL),
    RowClass.MISSING: (Action.AGAIN, Action.FAIL),
    RowClass.ACCOUNT: (Action.KEEP, Action.KEEP),
    RowClass.BATCH_FAILED: (Action.KEEP, Action.KEEP),
    RowClass.RETENTION: (Action.FAIL, Action.FAIL),
    RowClass.OUTCOME_TOO_LARGE: (Action.FAIL, Action.FAIL),
    RowClass.MAX_AGE: (Action.FAIL, Action.FAIL),
    RowClass.LATE: (Action.FAIL, Action.FAIL),
    RowClass.SYNC_UNKNOWN: (Action.FAIL, Action.FAIL),
    RowClass.SPLIT: (Action.FAIL, Action.FAIL),
    RowClass.DUPLICATE: (Action.FAIL, Action.FAIL),
    RowClass.BAD_RECORD: (Action.FAIL, Action.FAIL),
}
"""What a route that sets nothing does the first time, and from the second on."""


@pytest.mark.parametrize("row_class", sorted(set(RowClass) - {RowClass.SUCCEEDED}))
def test_the_table_of_classes(row_class: RowClass):
    """Every class has its default: blameless rows go again once, account trouble keeps them, all else is final."""
    first, later = DEFAULTS[row_class]
    assert decide(row_class, 0, POLICY).action is first
    for attempts in (1, 2, 20):
        assert decide(row_class, attempts, POLICY).action is later


def test_the_tables_cover_what_a_provider_can_say():
    """Each class of a provider has a default policy that its route could have set itself, unless it is kept."""
    assert set(DEFAULT_POLICIES) == set(RowClass) - OURS - {RowClass.SUCCEEDED}
    assert set(ALLOWED) == set(DEFAULT_POLICIES) - KEPT
    for row_class, policies in ALLOWED.items():
        assert DEFAULT_POLICIES[row_class] in policies
        assert Policy.HOLD not in policies
        assert (Policy.RETRY in policies) is (row_class in AGAIN_ONCE)
    assert {row_class for row_class, policy in DEFAULT_POLICIES.items() if policy is Policy.HOLD} == KEPT == STAYS
    assert dict.fromkeys(AGAIN_ONCE, 1) == DEFAULT_RETRIES


@pytest.mark.parametrize(
    ("row_class", "chosen", "policy", "first", "later"),
    [
        (row_class, chosen, policy, first, later)
        for row_class, allowed in ALLOWED.items()
        for chosen, policy, first, later in (
            (Policy.FAIL, {}, Action.FAIL, Action.FAIL),
            (Policy.REVIEW, {}, Action.REVIEW, Action.REVIEW),
            (Policy.SPLIT, {}, Action.SPLIT, Action.SPLIT),
            (Policy.SYNC, {}, Action.FAIL, Action.FAIL),  # no lane
            (Policy.SYNC, {"has_lane": True, "larger_model": "big"}, Action.SYNC, Action.FAIL),
            (Policy.RETRY, {}, Action.AGAIN, Action.FAIL),
        )
        if chosen in allowed
    ],
)
def test_what_a_route_sets(row_class, chosen, policy, first, later):
    """Every policy that a route may set for a class is carried out, the first time and the second."""
    made = RetryPolicy(policies={row_class: chosen}, **policy)
    assert decide(row_class, 0, made, FITS_S).action is first
    assert decide(row_class, 1, made, FITS_S).action is later


def test_too_long_needs_a_larger_model_in_the_lane():
    """The lane with the same model would only be refused again."""
    policies = {RowClass.TOO_LONG: Policy.SYNC}
    assert decide(RowClass.TOO_LONG, 0, RetryPolicy(policies=policies, has_lane=True), FITS_S).action is Action.FAIL


@pytest.mark.parametrize("row_class", sorted(AGAIN_ONCE))
@pytest.mark.parametrize(
    ("attempts", "has_lane", "late", "left_s", "expected"),
    [
        # Time for another batch, or no deadline: a small batch.
        (0, True, "sync", FITS_S, Action.AGAIN),
        (0, False, "sync", FITS_S, Action.AGAIN),
        (0, True, "sync", None, Action.AGAIN),
        (0, False, "fail", None, Action.AGAIN),
        (0, True, "fail", FITS_S, Action.AGAIN),
        # None left: the lane, else a late batch, as the route says.
        (0, True, "sync", TOO_SHORT_S, Action.SYNC),
        (0, True, "sync", -1.0, Action.SYNC),
        (0, False, "sync", TOO_SHORT_S, Action.AGAIN),
        (0, True, "batch", TOO_SHORT_S, Action.AGAIN),
        (0, True, "fail", TOO_SHORT_S, Action.FAIL),
        (0, False, "fail", TOO_SHORT_S, Action.FAIL),
        # The retries are used up.
        (1, False, "sync", FITS_S, Action.FAIL),
        (1, True, "batch", FITS_S, Action.FAIL),
        (1, True, "sync", None, Action.FAIL),
    ],
)
def test_the_time_left_decides(row_class, attempts, has_lane, late, left_s, expected):
    """A row goes into another batch only while one can end in time, and else as its route says."""
    policy = RetryPolicy(has_lane=has_lane, late=late)
    assert decide(row_class, attempts, policy, left_s).action is expected


@pytest.mark.parametrize("row_class", sorted(AGAIN_ONCE))
@pytest.mark.parametrize("left_s", [FITS_S, TOO_SHORT_S])
def test_a_row_that_was_not_run_is_worth_the_lane(row_class, left_s):
    """With its retries used up a row that the provider had no time for still has the lane; one that failed has not."""
    was_not_run = row_class in {RowClass.EXPIRED, RowClass.CANCELLED}
    assert decide(row_class, 1, LANE, left_s).action is (Action.SYNC if was_not_run else Action.FAIL)


def test_a_batch_fits_to_the_second():
    """Wait, window and lead together must end before the deadline."""
    needed_s = POLICY.backoff_s + POLICY.window_s + POLICY.lead_s
    assert decide(RowClass.TRANSIENT, 0, LANE, needed_s).action is Action.AGAIN
    assert decide(RowClass.TRANSIENT, 0, LANE, needed_s - 1).action is Action.SYNC


def test_the_wait_doubles_up_to_its_bound():
    """The first retry waits the back-off, each further one twice as long, none longer than the bound."""
    policy = RetryPolicy({RowClass.TRANSIENT: 100}, backoff_s=60.0, backoff_max_s=200.0)
    waits = [decide(RowClass.TRANSIENT, attempts, policy).wait_s for attempts in (0, 1, 2, 99)]
    assert waits == [60.0, 120.0, 200.0, 200.0]


@RELAXED
@given(st.sampled_from(sorted(set(RowClass) - {RowClass.SUCCEEDED})), st.integers(0, 20), st.integers(0, 10))
def test_a_budget_is_used_up_and_no_more(row_class: RowClass, attempts: int, budget: int):
    """A class worth n submissions goes again while it ended so fewer than n times; no other class has a budget."""
    action = decide(row_class, attempts, RetryPolicy({row_class: budget})).action
    if row_class in AGAIN_ONCE:
        assert action is (Action.AGAIN if attempts < budget else Action.FAIL)
    else:
        assert action is DEFAULTS[row_class][0]


# ------------------------------------------------------------------------------ a call of the sync lane


@pytest.mark.parametrize("row_class", sorted(set(RowClass) - {RowClass.SUCCEEDED}))
@pytest.mark.parametrize("left_s", [None, FITS_S, TOO_SHORT_S, -1.0])
def test_the_table_of_calls(row_class: RowClass, left_s: float | None):
    """A call that says nothing about the row is made again while it is worth it; then a batch, if there is time."""
    first, last = (decide_sync(row_class, tries, LANE, left_s).action for tries in (0, LANE.sync_tries - 1))
    if row_class in STAYS:
        assert first is last is Action.KEEP
    elif row_class in AGAIN_ONCE:
        assert first is Action.SYNC
        assert last is (Action.AGAIN if left_s in {None, FITS_S} else Action.FAIL)
    else:
        assert first is last is (Action.REVIEW if row_class is RowClass.CONTENT_FILTERED else Action.FAIL)


@pytest.mark.parametrize(
    ("row_class", "chosen", "expected"),
    [
        (RowClass.TOO_LONG, Policy.SPLIT, Action.SPLIT),
        (RowClass.TOO_LONG, Policy.REVIEW, Action.REVIEW),
        (RowClass.TOO_LONG, Policy.SYNC, Action.FAIL),  # even the larger model was too small
        (RowClass.MODEL_UNAVAILABLE, Policy.SYNC, Action.FAIL),
        (RowClass.INVALID_REQUEST, Policy.REVIEW, Action.REVIEW),
        (RowClass.CONTENT_FILTERED, Policy.FAIL, Action.FAIL),
    ],
)
def test_what_a_route_sets_holds_in_the_lane(row_class, chosen, expected):
    """What a call says about the row itself is final, as the route says."""
    policy = RetryPolicy(policies={row_class: chosen}, has_lane=True, larger_model="big")
    assert decide_sync(row_class, 0, policy, FITS_S).action is expected


def test_a_last_call_without_time_goes_to_review_where_the_route_says_so():
    """With no tries and no time left the row ends, on the topic its route chose."""
    policy = RetryPolicy(policies={RowClass.TRANSIENT: Policy.REVIEW}, has_lane=True)
    assert decide_sync(RowClass.TRANSIENT, 2, policy, TOO_SHORT_S) == Fate(Action.REVIEW)


def test_a_call_waits_as_long_as_it_is_told():
    """Two seconds first; then a tenth of the time left in steps, at least doubled; longer where the provider asks."""
    policy = RetryPolicy(has_lane=True, sync_tries=99, backoff_max_s=300.0)

    def waits(left_s):
        return [decide_sync(RowClass.TRANSIENT, tries, policy, left_s).wait_s for tries in (0, 1, 2, 50)]

    assert waits(FITS_S) == [2.0, 180.0, 180.0, 300.0]
    assert waits(1_799.0) == [2.0, 60.0, 60.0, 300.0]
    assert waits(100.0) == waits(-5.0) == [2.0, 4.0, 8.0, 300.0]
    assert decide_sync(RowClass.TRANSIENT, 0, policy, FITS_S, retry_after_s=17.0).wait_s == 17.0
    assert decide_sync(RowClass.TRANSIENT, 3, policy, FITS_S, retry_after_s=1.0).wait_s == 180.0
    assert decide_sync(RowClass.TRANSIENT, 0, policy, FITS_S, retry_after_s=900.0).wait_s == 900.0


# --------------------------------------------------------------------------------------------- the end

ENDS = sorted(AGAIN_ONCE | {RowClass.TOO_LONG, RowClass.MODEL_UNAVAILABLE, RowClass.CONTENT_FILTERED})


@st.composite
def lawful_policies(draw: st.DrawFn) -> RetryPolicy:
    """What a route may be configured to."""
    return RetryPolicy(
        retries={row_class: draw(st.integers(0, 3)) for row_class in sorted(AGAIN_ONCE)},
        policies={
            row_class: draw(st.sampled_from(sorted(ALLOWED[row_class] - {Policy.SPLIT})))
            for row_class in draw(st.sets(st.sampled_from(sorted(ALLOWED))))
        },
        has_lane=draw(st.booleans()),
        late=draw(st.sampled_from(["sync", "batch", "fail"])),
        larger_model=draw(st.none() | st.just("big")),
    )


@settings(deadline=None, max_examples=200)
@given(
    lawful_policies(),
    st.none() | st.floats(-HOUR_S, 100 * HOUR_S),
    st.sampled_from([Action.AGAIN, Action.SYNC]),
    st.lists(st.sampled_from(ENDS), min_size=1, max_size=10),
)
def test_no_row_goes_on_for_ever(policy: RetryPolicy, left_s: float | None, lane: Action, ends: list[RowClass]):
    """However a row's submissions end, at once and in whatever order, it comes to an end of its own.

    Submissions take no time here, the waits do. Each class's retries and the tries of the lane bound how often it is
    sent, whatever the time left.
    """
    counted: Counter[str] = Counter()
    budget = sum(policy.retries.values()) + policy.sync_tries + len(ENDS)
    for step in range(budget + 2):
        ended = ends[step % len(ends)]
        if lane is Action.SYNC:
            fate = decide_sync(ended, counted[SYNC_TRIES], policy, left_s)
            counted[SYNC_TRIES] += 1
        else:
            fate = decide(ended, counted[ended], policy, left_s)
            counted[ended] += 1
        if fate.action not in {Action.AGAIN, Action.SYNC}:
            assert fate.action in {Action.FAIL, Action.REVIEW}
            break
        assert fate.action is not Action.SYNC or policy.has_lane or lane is Action.SYNC
        lane = fate.action
        left_s = None if left_s is None else left_s - fate.wait_s
    else:
        pytest.fail("still going")


# ------------------------------------------------------------------------------------- attempts carried


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


def test_calls_of_the_lane_are_counted_under_a_name_of_their_own():
    """Calls that did not answer stand beside the classes and are carried on in the same way."""
    before = lot("A", {SYNC_TRIES: {1: {1}, 2: {2}}, "transient": {1: {1}}})
    carried = carry_attempts([before], OffsetSet([1, 2, 3]), {SYNC_TRIES: OffsetSet([1, 3])})
    assert plain(carried) == {"sync": {1: [3], 2: [1, 2]}, "transient": {1: [1]}}


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
