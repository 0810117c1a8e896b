"""The pace of the sync lane: how it learns what an account takes, and how it never stands still for good."""

from __future__ import annotations

import heapq
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from batchferry.domain.pacing import MAX_BREAKER_PAUSE_S, MAX_OWN_PAUSE_S, BreakerState, Pace
from batchferry.domain.provider import CallFailed, CallFailure, PaceHints
from batchferry.domain.rows import ResultLine, RowClass, SyncAnswer

MINUTE_S = 60.0


def good(**hints: float) -> SyncAnswer:
    """A call that was answered."""
    return SyncAnswer(ResultLine("", RowClass.SUCCEEDED, 200), None, PaceHints(**hints))  # type: ignore[arg-type]


def bad(
    kind: CallFailure, status: int | None = None, retry_after_s: float | None = None, row: RowClass = RowClass.TRANSIENT
) -> SyncAnswer:
    """A call that was not."""
    failure = CallFailed("answer", kind, status, retry_after_s=retry_after_s)
    return SyncAnswer(ResultLine("", row, status), failure, PaceHints(retry_after_s=retry_after_s))


def throttled(retry_after_s: float | None = None) -> SyncAnswer:
    """A 429 about the rate."""
    return bad(CallFailure.THROTTLED, 429, retry_after_s)


BROKEN = bad(CallFailure.UNAVAILABLE, 500)
LOST = bad(CallFailure.UNANSWERED)
OVERLOADED = bad(CallFailure.UNAVAILABLE, 503)
QUOTA = bad(CallFailure.ACCOUNT, 429, row=RowClass.ACCOUNT)
REFUSED = bad(CallFailure.REJECTED, 400, row=RowClass.INVALID_REQUEST)


class Lane:
    """A lane that always has rows, around a pace."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.now_s = 1000.0
        self.running = 0

    def state(self) -> BreakerState:
        """Of the breaker."""
        return self.pace.state

    def fill(self) -> int:
        """Begin as many calls as may begin; how many."""
        before = self.running
        while self.pace.may_start(self.now_s, self.running):
            self.pace.began(self.now_s)
            self.running += 1
        return self.running - before

    def end(self, answer: SyncAnswer, count: int | None = None) -> None:
        """So many calls (all) end like this."""
        for _ in range(self.running if count is None else count):
            self.running -= 1
            self.pace.ended(self.now_s, answer)

    def round(self, answer: SyncAnswer, took_s: float = 1.0) -> int:
        """One round trip of all calls that may begin; how many there were."""
        began = self.fill()
        self.now_s += took_s
        self.end(answer)
        return began

    def wait(self) -> float:
        """Sit out what holds the next call back."""
        wait_s = self.pace.wait_s(self.now_s, self.running)
        assert wait_s is not None
        self.now_s += wait_s
        return wait_s


@pytest.mark.parametrize(
    "bounds", [{"ceiling": 0}, {"breaker_failures": 0}, {"breaker_pause_s": 0.0}, {"max_pause_s": -1.0}]
)
def test_bounds_that_leave_nothing_are_refused(bounds: dict[str, float]) -> None:
    """A pace that could never let a call out is not made."""
    with pytest.raises(ValueError, match="at least 1"):
        Pace(**{"ceiling": 4} | bounds)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------ concurrency


def test_concurrency_doubles_to_its_ceiling_while_all_is_well() -> None:
    """Four calls, then eight, then sixteen: two round trips to the ceiling, and never beyond."""
    lane = Lane(Pace(16))
    assert [lane.round(good()) for _ in range(4)] == [4, 8, 16, 16]


def test_a_small_ceiling_holds_from_the_start() -> None:
    """An account that may have one call has one."""
    lane = Lane(Pace(1))
    assert [lane.round(good()) for _ in range(3)] == [1, 1, 1]


def test_a_throttled_round_halves_once_and_then_grows_by_one() -> None:
    """Sixteen 429s of one round trip halve the concurrency once; then each full round adds about one call."""
    lane = Lane(Pace(16))
    for _ in range(3):
        lane.round(good())
    lane.fill()
    lane.now_s += 1
    lane.end(throttled(0.0))
    assert lane.pace.concurrency == 8
    sizes = [lane.round(good()) for _ in range(9)]
    assert sizes[0] == 8
    assert all(0 <= later - earlier <= 1 for earlier, later in itertools.pairwise(sizes))
    assert sizes[-1] >= 14


def test_another_throttled_round_halves_again_down_to_one() -> None:
    """Each round trip of overload halves; at 1 it stays."""
    lane = Lane(Pace(16))
    for _ in range(3):
        lane.round(good())
    sizes = []
    for _ in range(6):
        lane.wait()
        sizes.append(lane.round(throttled(0.0)))
    assert sizes == [16, 8, 4, 2, 1, 1]


def test_calls_that_leave_room_do_not_raise_the_concurrency() -> None:
    """One call at a time shows nothing about what sixteen would meet."""
    pace, now_s = Pace(16), 0.0
    for _ in range(50):
        assert pace.may_start(now_s, 0)
        pace.began(now_s)
        now_s += 1
        pace.ended(now_s, good())
    assert pace.concurrency == 4


@pytest.mark.parametrize("answer", [QUOTA, REFUSED, BROKEN])
def test_only_overload_slows_down(answer: SyncAnswer) -> None:
    """A quota 429, a refused row and a single 500 neither pause nor cut: they are not about the pace."""
    lane = Lane(Pace(16))
    lane.fill()
    lane.end(answer, 1)
    assert lane.pace.concurrency >= 4
    assert lane.pace.wait_s(lane.now_s, 0) == 0.0


# ----------------------------------------------------------------------------------------------- pauses


def test_a_429_pauses_as_long_as_it_asks() -> None:
    """Nothing begins before Retry-After is over; the longest of several counts."""
    lane = Lane(Pace(4))
    lane.fill()
    lane.end(throttled(20.0), 2)
    lane.end(throttled(5.0), 2)
    assert lane.fill() == 0
    assert lane.wait() == pytest.approx(20.0)
    assert lane.fill() > 0


def test_a_wish_longer_than_the_bound_is_cut() -> None:
    """A server that asks for a day is asked again after ten minutes."""
    lane = Lane(Pace(4, max_pause_s=600.0))
    lane.round(throttled(86_400.0))
    assert lane.wait() == pytest.approx(600.0)


def test_without_a_wish_the_pauses_double() -> None:
    """429s that say nothing are waited out 1, 2, 4, ... s, 30 s at most; an answer resets that."""
    lane = Lane(Pace(4))
    pauses = []
    for _ in range(7):
        lane.round(throttled())
        pauses.append(lane.wait())
    assert pauses == pytest.approx([1, 2, 4, 8, 16, MAX_OWN_PAUSE_S, MAX_OWN_PAUSE_S])
    lane.round(good())
    lane.round(throttled())
    assert lane.wait() == pytest.approx(1.0)


def test_no_call_left_waits_for_the_reset() -> None:
    """An answer that leaves no call stops the lane until the limit's reset, and no 429 is needed for it."""
    lane = Lane(Pace(4))
    lane.fill()
    lane.end(good(calls_left=0, calls_reset_s=12.0))
    assert lane.fill() == 0
    assert lane.wait() == pytest.approx(12.0)
    assert lane.fill() > 0


def test_what_is_left_is_not_overdrawn() -> None:
    """Two calls left means two, even where eight could run at once."""
    lane = Lane(Pace(8))
    lane.fill()
    lane.end(good(calls_left=2, calls_reset_s=30.0))
    assert lane.fill() == 2
    assert lane.pace.wait_s(lane.now_s, lane.running) == pytest.approx(30.0)


def test_no_token_left_waits_for_the_reset() -> None:
    """Tokens are not counted here, but none is none."""
    lane = Lane(Pace(4))
    lane.round(good(tokens_left=0, tokens_reset_s=7.0))
    assert lane.wait() == pytest.approx(7.0)


def test_the_time_to_come_back_goes_before_the_reset() -> None:
    """A 429 names when one more call fits; the limit's reset, which is later, does not lengthen that."""
    lane = Lane(Pace(4))
    lane.fill()
    failure = CallFailed("answer", CallFailure.THROTTLED, 429, retry_after_s=1.0)
    hints = PaceHints(calls_left=0, calls_reset_s=60.0, retry_after_s=1.0)
    lane.end(SyncAnswer(ResultLine("", RowClass.TRANSIENT, 429), failure, hints))
    assert lane.wait() == pytest.approx(1.0)


# ---------------------------------------------------------------------------------------------- breaker


@pytest.mark.parametrize("answer", [BROKEN, LOST, OVERLOADED])
def test_the_breaker_opens_probes_and_closes(answer: SyncAnswer) -> None:
    """After so many calls without an answer one call goes out after each pause, which doubles; an answer closes."""
    lane = Lane(Pace(8, breaker_failures=3, breaker_pause_s=30.0))
    for _ in range(3):
        assert lane.state() is BreakerState.CLOSED
        lane.wait()
        lane.pace.began(lane.now_s)
        lane.pace.ended(lane.now_s, answer)
    assert lane.state() is BreakerState.OPEN
    pauses = []
    for _ in range(7):
        pauses.append(lane.wait())
        assert lane.fill() == 1
        assert lane.state() is BreakerState.HALF_OPEN
        assert lane.pace.wait_s(lane.now_s, lane.running) is None
        lane.end(answer)
        assert lane.state() is BreakerState.OPEN
    assert pauses == pytest.approx([30, 60, 120, 240, 480, 600, MAX_BREAKER_PAUSE_S])
    lane.wait()
    assert [lane.round(good()) for _ in range(5)] == [1, 2, 4, 8, 8]
    assert lane.state() is BreakerState.CLOSED


def test_the_next_outage_begins_with_the_short_pause() -> None:
    """The doubled pause of an outage that is over is forgotten."""
    lane = Lane(Pace(1, breaker_failures=2, breaker_pause_s=10.0))
    lane.round(LOST)
    lane.round(LOST)
    lane.wait()
    lane.round(LOST)
    assert lane.wait() == pytest.approx(20.0)
    lane.round(good())
    lane.round(LOST)
    lane.round(LOST)
    assert lane.wait() == pytest.approx(10.0)


def test_an_answer_in_between_keeps_the_breaker_closed() -> None:
    """Only failures in a row count, and any answer breaks the row: a refusal, a 429, a quota."""
    lane = Lane(Pace(1, breaker_failures=2))
    for answer in (REFUSED, throttled(0.0), QUOTA, good()):
        lane.round(BROKEN)
        lane.round(answer)
        assert lane.state() is BreakerState.CLOSED


def test_old_calls_that_fail_late_do_not_lengthen_an_open_pause() -> None:
    """Sixteen calls into the same outage open the breaker once, for its first pause."""
    lane = Lane(Pace(16, breaker_failures=3, breaker_pause_s=30.0))
    lane.round(good())
    lane.round(good())
    assert lane.fill() == 16
    lane.end(LOST)
    assert lane.state() is BreakerState.OPEN
    assert lane.wait() == pytest.approx(30.0)


def test_a_probe_that_was_given_up_makes_room_for_another() -> None:
    """A dropped call tells nothing: the breaker stays half open and the next call goes out at once."""
    lane = Lane(Pace(4, breaker_failures=1))
    lane.round(LOST)
    lane.wait()
    assert lane.fill() == 1
    lane.running -= 1
    lane.pace.dropped(lane.now_s)
    assert lane.state() is BreakerState.HALF_OPEN
    assert lane.fill() == 1


def test_a_probe_that_vanished_without_a_word_does_not_hold_the_lane() -> None:
    """With nothing under way there is no probe to wait for, whatever was told."""
    lane = Lane(Pace(4, breaker_failures=1))
    lane.round(LOST)
    lane.wait()
    assert lane.fill() == 1
    lane.running = 0
    assert lane.fill() == 1


# ------------------------------------------------------------------------------------------- throughput


def test_throughput_is_measured_from_the_calls() -> None:
    """Sixteen calls of 4 s each, all the time, are 4 rows a second; nothing is known before there were any."""
    lane = Lane(Pace(16))
    assert lane.pace.rows_per_s(lane.now_s) is None
    for _ in range(20):
        lane.round(good(), took_s=4.0)
    assert lane.pace.rows_per_s(lane.now_s) == pytest.approx(4.0, rel=0.05)


def test_a_trickle_tells_what_a_flood_could_do() -> None:
    """One call at a time still shows how long a call takes, and so what a full lane would do."""
    pace, now_s = Pace(4), 0.0
    for _ in range(30):
        pace.began(now_s)
        now_s += 2.0
        pace.ended(now_s, good())
        now_s += 60.0  # nothing to do
    assert pace.rows_per_s(now_s) == pytest.approx(2.0, rel=0.05)


def test_pauses_lower_the_throughput() -> None:
    """A lane that is made to wait half of its time is half as fast."""
    lane = Lane(Pace(4))
    for _ in range(30):
        lane.round(good(calls_left=0, calls_reset_s=10.0), took_s=10.0)
        lane.wait()
    assert lane.pace.rows_per_s(lane.now_s) == pytest.approx(0.2, rel=0.1)


def test_old_measurements_fade() -> None:
    """A day later nobody knows how fast the lane would be."""
    lane = Lane(Pace(4))
    for _ in range(30):
        lane.round(good())
    assert lane.pace.rows_per_s(lane.now_s + 86_400) is None


# ------------------------------------------------------------------------------- against a server model


def run_against_a_limit(calls_per_minute: int, seconds: float, took_s: float, ceiling: int) -> tuple[int, int]:
    """A full lane at a server with a bucket of calls; answered and throttled calls."""
    pace, now_s, running = Pace(ceiling), 0.0, 0
    rate, left, filled_s = calls_per_minute / MINUTE_S, float(calls_per_minute), 0.0
    under_way: list[tuple[float, int, SyncAnswer]] = []
    answered = refused = number = 0
    while now_s < seconds:
        while pace.may_start(now_s, running):
            left, filled_s = min(left + (now_s - filled_s) * rate, calls_per_minute), now_s
            pace.began(now_s)
            running += 1
            number += 1
            if left >= 1:
                left -= 1
                reset_s = (calls_per_minute - left) / rate
                answer = good(calls_left=math.floor(left), calls_reset_s=reset_s)
                heapq.heappush(under_way, (now_s + took_s * (1 + number % 7 / 7), number, answer))
            else:
                heapq.heappush(under_way, (now_s + 0.05, number, throttled(math.ceil((1 - left) / rate))))
        wait_s = pace.wait_s(now_s, running)
        ends_s = under_way[0][0] if under_way else math.inf
        wakes_s = math.inf if wait_s is None else now_s + wait_s
        now_s = min(ends_s, wakes_s)
        if ends_s <= now_s:
            _, _, answer = heapq.heappop(under_way)
            running -= 1
            pace.ended(now_s, answer)
            answered += answer.failure is None
            refused += answer.failure is not None
    return answered, refused


@pytest.mark.parametrize(("calls_per_minute", "took_s"), [(60, 2.0), (600, 1.0), (20, 10.0)])
def test_a_calls_limit_is_used_and_hardly_ever_hit(calls_per_minute: int, took_s: float) -> None:
    """Half an hour at a server that allows so many calls a minute: most of it is used, and next to none is refused."""
    answered, refused = run_against_a_limit(calls_per_minute, 1800.0, took_s, ceiling=32)
    allowed = calls_per_minute * 31
    assert 0.8 * allowed <= answered <= allowed
    assert refused <= 0.01 * answered


# ------------------------------------------------------------------------------------------- properties

seconds = st.floats(0.0, 5000.0, allow_nan=False)
answers = st.one_of(
    st.builds(throttled, st.none() | st.floats(0.0, 90_000.0)),
    st.sampled_from([BROKEN, LOST, OVERLOADED, QUOTA, REFUSED]),
    st.builds(
        good,
        calls_left=st.none() | st.integers(0, 20),
        calls_reset_s=st.none() | seconds,
        tokens_left=st.none() | st.integers(0, 2),
        tokens_reset_s=st.none() | seconds,
    ),
)


class PaceMachine(RuleBasedStateMachine):
    """Any history of calls: the bounds hold at each step, and a call can always begin in the end."""

    @initialize(ceiling=st.integers(1, 20), failures=st.integers(1, 5), pause_s=st.floats(0.5, 900.0))
    def begin(self, ceiling: int, failures: int, pause_s: float) -> None:
        """A new pace."""
        self.ceiling = ceiling
        self.longest_s = max(600.0, pause_s) + 1e-3
        self.pace = Pace(ceiling, failures, pause_s)
        self.now_s = 0.0
        self.running = 0

    @rule(passed_s=st.floats(-5.0, 2000.0))
    def time_passes(self, passed_s: float) -> None:
        """Also a little back, as a clock that is set does."""
        self.now_s += passed_s

    @rule()
    def try_to_begin(self) -> None:
        """A call begins if it may; while half open it is the only one."""
        state = self.pace.state
        if self.pace.may_start(self.now_s, self.running):
            self.pace.began(self.now_s)
            self.running += 1
            if state is BreakerState.HALF_OPEN:
                assert not self.pace.may_start(self.now_s, self.running)

    @precondition(lambda self: self.running)
    @rule(answer=answers)
    def one_ends(self, answer: SyncAnswer) -> None:
        """A call ends somehow."""
        self.running -= 1
        self.pace.ended(self.now_s, answer)

    @precondition(lambda self: self.running)
    @rule(is_told=st.booleans())
    def one_is_dropped(self, is_told: bool) -> None:
        """A call is given up, perhaps without a word."""
        self.running -= 1
        if is_told:
            self.pace.dropped(self.now_s)

    @invariant()
    def bounds_hold(self) -> None:
        """Never more than the ceiling, never less than one, and both questions agree."""
        assert 1 <= self.pace.concurrency <= self.ceiling
        assert self.running <= self.ceiling
        wait_s = self.pace.wait_s(self.now_s, self.running)
        assert self.pace.may_start(self.now_s, self.running) is (wait_s == 0.0)
        assert wait_s is None or 0.0 <= wait_s <= self.longest_s + 5.0 * 50  # a clock may have stepped back
        rate = self.pace.rows_per_s(self.now_s)
        assert rate is None or (rate > 0 and math.isfinite(rate))

    def teardown(self) -> None:
        """Whatever happened: with nothing under way a call begins within a bounded time, and success heals all."""
        if not hasattr(self, "pace"):
            return
        wait_s = self.pace.wait_s(self.now_s, 0)
        assert wait_s is not None
        now_s = self.now_s + wait_s
        assert self.pace.may_start(now_s, 0)
        for _ in range(3):
            self.pace.began(now_s)
            self.pace.ended(now_s, good())
        assert self.pace.state is BreakerState.CLOSED
        assert self.pace.wait_s(now_s, 0) == 0.0


TestPaceMachine = PaceMachine.TestCase
TestPaceMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(failures=st.integers(1, 10), pause_s=st.floats(0.5, 900.0), probes=st.integers(0, 12))
def test_the_breaker_opens_and_recovers(failures: int, pause_s: float, probes: int) -> None:
    """Exactly so many failures open it; however many probes fail, the first answer closes it."""
    lane = Lane(Pace(8, failures, pause_s))
    for _ in range(failures):
        assert lane.state() is BreakerState.CLOSED
        lane.pace.began(lane.now_s)
        lane.pace.ended(lane.now_s, LOST)
    assert lane.state() is BreakerState.OPEN
    for _ in range(probes):
        assert 0 < lane.wait() <= max(MAX_BREAKER_PAUSE_S, pause_s) + 1e-3
        assert lane.fill() == 1
        lane.end(LOST)
    lane.wait()
    assert lane.fill() == 1
    lane.end(good())
    assert lane.state() is BreakerState.CLOSED
