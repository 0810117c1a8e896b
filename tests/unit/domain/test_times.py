"""Deadline arithmetic, on sums that a person can check by head."""

from __future__ import annotations

from datetime import UTC

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchferry.domain.times import (
    check_route,
    first_seen_ms,
    from_ms,
    hours,
    parse_duration_s,
    parse_window_s,
    plan_waits,
    to_ms,
)

H = 3600.0
HOUR_MS = 3_600_000


def faults(sla_h: float = 30, window_h: float = 24, margin_h: float = 2, max_wait_h: float | None = None, **more):
    """What is wrong with a route whose lengths are given in hours."""
    return check_route(
        sla_s=sla_h * H,
        window_s=window_h * H,
        margin_s=margin_h * H,
        max_wait_s=None if max_wait_h is None else max_wait_h * H,
        **{"poll_cap_s": 300.0, **more},
    )


def test_thirty_hours_leave_four_to_wait_and_end_after_twenty_eight():
    """SLA 30 h, window 24 h, margin 2 h: sealed at most 4 h after the oldest record, done after 28 h at worst."""
    plan = plan_waits(30 * H, 24 * H, 2 * H)
    assert plan.max_wait_s == 4 * H
    assert plan.worst_case_s == 28 * H
    assert plan.times(0).ship_by_ms == 4 * HOUR_MS
    assert plan.times(0).deadline_ms == 30 * HOUR_MS
    assert faults() == []


def test_a_promise_of_one_window_is_refused_with_the_sum():
    """SLA 24 h with a 24 h window can never be kept, and the refusal shows why."""
    (fault,) = faults(sla_h=24)
    assert "SLA 24 h - completion window 24 h - margin 2 h = -2 h" in fault
    assert "longer than 26 h" in fault


def test_no_time_at_all_is_no_time_either():
    """A wait of exactly zero gathers no batch, so it is refused too."""
    (fault,) = faults(sla_h=26)
    assert "= 0 s" in fault


def test_an_operators_longer_wait_is_refused_with_the_sum():
    """max_wait_s above the formula is refused, and the largest lawful value is named."""
    (fault,) = faults(max_wait_h=5)
    assert "max_wait_s of 5 h" in fault
    assert "SLA 30 h - completion window 24 h - margin 2 h = 4 h" in fault
    assert "set max_wait_s to 4 h" in fault
    assert faults(max_wait_h=4) == []


def test_an_operators_shorter_wait_is_kept():
    """max_wait_s below the formula makes batches leave earlier, and the worst case better."""
    plan = plan_waits(30 * H, 24 * H, 2 * H, 1 * H)
    assert plan.times(0).ship_by_ms == HOUR_MS
    assert plan.worst_case_s == 25 * H
    assert plan.formula_wait_s == 4 * H


def test_the_margin_must_hold_what_can_still_happen():
    """Poll cap + cancel + download + rescue lead must fit the margin; the refusal adds them up."""
    (fault,) = faults(sla_h=30, margin_h=0.5)
    assert "poll cap 5 min + cancel 10 min + download 10 min + rescue lead 30 min = 55 min" in fault
    assert "set margin_s to 55 min" in fault
    assert faults(margin_h=55 / 60) == []
    assert len(faults(margin_h=55 / 60, poll_cap_s=301.0)) == 1


def test_both_faults_of_a_route_are_told_together():
    """An impossible SLA does not hide a margin that is too small."""
    assert len(faults(sla_h=24, margin_h=0.1)) == 2


def test_a_records_own_promise_takes_the_routes_place():
    """Header SLA and header deadline move deadline and ship_by; the instant wins over the length."""
    plan = plan_waits(30 * H, 24 * H, 2 * H)
    assert plan.times(0, sla_s=27 * H) == (0, HOUR_MS, 27 * HOUR_MS)
    assert plan.times(0, sla_s=27 * H, deadline_ms=28 * HOUR_MS).ship_by_ms == 2 * HOUR_MS
    assert plan.times(0, sla_s=100 * H).ship_by_ms == 4 * HOUR_MS, "a longer promise does not wait longer"


def test_late_leaves_room_for_a_crash_at_the_threshold():
    """A record just past ship_by is not late: the margin beyond the rescue lead covers it."""
    plan = plan_waits(30 * H, 24 * H, 2 * H)
    times = plan.times(0)
    assert not plan.is_late(times.ship_by_ms, times.deadline_ms)
    assert not plan.is_late(round(5.5 * HOUR_MS), times.deadline_ms)
    assert plan.is_late(round(5.5 * HOUR_MS) + 1, times.deadline_ms)


def test_waiting_begins_at_the_earlier_of_timestamp_and_reading():
    """A record stamped in the future waits from its reading; one without a timestamp too."""
    assert first_seen_ms(100, 200) == 100
    assert first_seen_ms(300, 200) == 200
    assert first_seen_ms(-1, 200) == 200


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30h", 30 * H),
        ("1h 30m", 1.5 * H),
        ("1.5d", 36 * H),
        ("90", 90.0),
        ("250ms", 0.25),
        ("PT30H", 30 * H),
        ("P1DT6H", 30 * H),
        ("pt15m", 900.0),
        ("2w", 336 * H),
        ("10min", 600.0),
    ],
)
def test_lengths_of_time_as_people_write_them(text: str, seconds: float):
    """Numbers with units, ISO 8601 and plain seconds mean what they say."""
    assert parse_duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "soon", "5x", "-1h", "P1M", "P1Y", "PT", "1h later", "nan", "inf", "-5"])
def test_other_texts_are_no_length_of_time(text: str):
    """Months have no fixed length, negative times make no sense, and words are refused."""
    with pytest.raises(ValueError):
        parse_duration_s(text)


@pytest.mark.parametrize(("text", "hours_"), [("24h", 24), ("1h", 1), ("168h", 168), ("7d", 168)])
def test_completion_windows(text: str, hours_: int):
    """The windows that providers offer are read."""
    assert parse_window_s(text) == hours_ * H


def test_a_window_without_unit_is_refused():
    """24 without its unit would be 24 seconds, which no provider means."""
    with pytest.raises(ValueError, match="24h"):
        parse_window_s("24")


@pytest.mark.parametrize(
    ("seconds", "text"), [(14_400, "4 h"), (5_400, "1 h 30 min"), (3300, "55 min"), (-7200, "-2 h"), (45, "45 s")]
)
def test_lengths_are_told_in_hours(seconds: float, text: str):
    """Sums are shown in units that people think in."""
    assert hours(seconds) == text


@given(st.integers(min_value=0, max_value=4_102_444_800_000))
def test_kafka_timestamps_round_trip(milliseconds: int):
    """Milliseconds become an instant and come back unchanged."""
    assert to_ms(from_ms(milliseconds)) == milliseconds
    assert from_ms(milliseconds).tzinfo is not None


@given(st.integers())
def test_any_timestamp_is_some_instant(milliseconds: int):
    """A timestamp or a deadline that no calendar holds is cut to the first or last year, never refused."""
    instant = from_ms(milliseconds)
    assert instant.tzinfo is UTC
    if abs(to_ms(instant) - milliseconds) > 1:
        assert instant.year == (9999 if milliseconds > 0 else 1)


@given(
    sla=st.integers(1, 400),
    window=st.integers(1, 336),
    margin=st.integers(1, 48),
    wait=st.none() | st.integers(1, 100),
    t0=st.integers(0, 10**12),
)
def test_an_accepted_route_keeps_its_promise(sla: int, window: int, margin: int, wait: int | None, t0: int):
    """Whenever a route is accepted, leaving at ship_by plus a whole window plus the margin's needs meets the deadline."""
    if faults(sla, window, margin, wait):
        return
    plan = plan_waits(sla * H, window * H, margin * H, None if wait is None else wait * H)
    times = plan.times(t0)
    assert t0 < times.ship_by_ms <= t0 + plan.max_wait_s * 1000
    assert times.ship_by_ms + (plan.window_s + 300 + 600 + 600 + 1800) * 1000 <= times.deadline_ms
    assert not plan.is_late(times.ship_by_ms, times.deadline_ms)
