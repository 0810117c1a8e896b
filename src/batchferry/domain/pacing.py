"""How fast one account's sync lane may call: learned from its answers, with no clock inside.

Four things hold a call back, and the last to end decides:

| what | begins | ends |
|---|---|---|
| concurrency | as many calls run as the account is known to take | a call ends |
| pause | a 429, or a 503 or 529 of an overload | after what the answer asks for, else after 1 s, doubled up to 30 s |
| budget | answers say how many calls are left, and those have begun (or no token is left) | the limit's reset |
| breaker | so many calls in a row without an answer or with a 5xx | one call after the pause is answered |

**Concurrency** starts small, doubles each round trip until the first sign of overload, then grows by one a round trip
while it is used to the full. An overload halves it, at most once a round trip: the other calls that were under way
then tell nothing new. It never falls below 1 or exceeds its ceiling.

**The breaker** closes again on any answer. While it is half open, one call goes out; when that fails, the pause before
the next is twice as long, up to ten minutes.

No pause is longer than ``max_pause_s``, whatever an answer asks for: after it one may try again, which costs a refused
call and ends a mistaken wait. Instants are seconds on any clock that does not go back; a step back counts as none.
"""

from __future__ import annotations

from enum import StrEnum

from batchferry.domain.provider import CallFailed, CallFailure
from batchferry.domain.rows import SyncAnswer

FIRST_CONCURRENCY = 4
FIRST_PAUSE_S = 1.0
"""After an overload that names no pause; doubled for each further one until an answer comes."""
MAX_OWN_PAUSE_S = 30.0
MAX_BREAKER_PAUSE_S = 600.0
RATE_HALF_LIFE_S = 600.0
"""What was seen so long ago counts half in the measured throughput."""
MIN_ROWS_MEASURED = 3.0
"""Fewer answered calls than this say nothing of a rate."""

_OVERLOADED = frozenset({503, 529})
_UNANSWERED = frozenset({CallFailure.UNAVAILABLE, CallFailure.UNANSWERED})
_TICK_S = 1e-6
"""Sums of seconds are rounded: whoever waited as long as he was told must not come a billionth too early."""


class BreakerState(StrEnum):
    """Where the circuit breaker stands."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Pace:
    """The pace of one account. Tell it every call: ``began``, then ``ended`` or ``dropped``.

    Args:
        ceiling: calls at one time, at most.
        breaker_failures: so many calls in a row without an answer open the breaker.
        breaker_pause_s: its first pause.
        max_pause_s: longest pause that an answer can ask for.

    Raises:
        ValueError: a bound that leaves nothing.
    """

    def __init__(
        self, ceiling: int, breaker_failures: int = 8, breaker_pause_s: float = 30.0, max_pause_s: float = 600.0
    ) -> None:
        if ceiling < 1 or breaker_failures < 1 or breaker_pause_s <= 0 or max_pause_s <= 0:
            raise ValueError("a pace needs a ceiling and breaker_failures of at least 1, and pauses above 0 s")
        self._ceiling = ceiling
        self._breaker_failures = breaker_failures
        self._first_breaker_pause_s = breaker_pause_s
        self._max_pause_s = max_pause_s
        self._now_s = 0.0
        self._has_begun = False
        self._running = 0

        self._limit = float(min(ceiling, FIRST_CONCURRENCY))
        self._doubles = True
        self._older = 0
        """Calls under way when the concurrency was last cut, that have not ended."""
        self._full = 0
        """Calls under way when the concurrency was last used to the full, that have not ended: their ends count."""

        self._paused_until_s = 0.0
        self._own_pause_s = FIRST_PAUSE_S
        self._calls_left: int | None = None
        self._budget_until_s = 0.0

        self._state = BreakerState.CLOSED
        self._failures = 0
        self._breaker_pause_s = breaker_pause_s
        self._open_until_s = 0.0
        self._probe_is_out = False

        self._rows = 0.0
        self._work_s = 0.0
        self._barred_s = 0.0

    # ------------------------------------------------------------------------------------- questions

    @property
    def concurrency(self) -> int:
        """Calls at one time that the account is now thought to take: 1 to the ceiling."""
        return int(self._limit)

    @property
    def state(self) -> BreakerState:
        """Of the breaker, as of the last question or news."""
        return self._state

    def may_start(self, now_s: float, running: int) -> bool:
        """Whether one more call may begin; ``running`` is how many are under way in truth."""
        return self.wait_s(now_s, running) == 0.0

    def wait_s(self, now_s: float, running: int) -> float | None:
        """Seconds until a call may begin, 0 when it may at once; None: not before one under way ends."""
        self._advance(now_s)
        self._running = running  # calls whose end nobody told are forgotten here
        if running >= self.concurrency:
            return None
        if self._state is BreakerState.HALF_OPEN and self._probe_is_out and running > 0:
            return None
        until_s = self._barred_until_s()
        return until_s - now_s if until_s - self._now_s > _TICK_S else 0.0

    def rows_per_s(self, now_s: float) -> float | None:
        """Rows a second that the lane would manage with work enough, from what it did lately; None: not known.

        The time of the calls, spread over as many as may now run together, plus the pauses there were.
        """
        self._advance(now_s)
        needed_s = self._work_s / self.concurrency + self._barred_s
        if self._rows < MIN_ROWS_MEASURED or needed_s <= 0:
            return None
        return self._rows / needed_s

    # ------------------------------------------------------------------------------------------ news

    def began(self, now_s: float) -> None:
        """A call goes out now."""
        self._advance(now_s)
        self._running += 1
        if self._running >= self.concurrency:
            self._full = self._running
        if self._calls_left is not None:
            self._calls_left = max(self._calls_left - 1, 0)
        if self._state is BreakerState.HALF_OPEN:
            self._probe_is_out = True

    def dropped(self, now_s: float) -> None:
        """A call was given up by ourselves: it tells nothing."""
        self._advance(now_s)
        self._leave()
        if self._running == 0:
            self._probe_is_out = False

    def ended(self, now_s: float, answer: SyncAnswer) -> None:
        """A call came to its end."""
        self._advance(now_s)
        was_full = self._full > 0
        was_older = self._older > 0
        self._leave()
        self._note_hints(answer)
        failure = answer.failure
        is_unanswered = failure is not None and failure.kind in _UNANSWERED
        is_overload = failure is not None and _is_overload(failure)
        if is_unanswered:
            self._fail()
        else:
            self._close()
        if is_overload:
            self._slow_down(answer, was_older=was_older)
        elif failure is None or not (is_unanswered or failure.kind is CallFailure.ACCOUNT):
            self._rows += 1
            self._own_pause_s = FIRST_PAUSE_S
            if was_full and not was_older:
                step = 1.0 if self._doubles else 1.0 / self._limit
                self._limit = min(self._limit + step, float(self._ceiling))

    # ---------------------------------------------------------------------------------------- inside

    def _advance(self, now_s: float) -> None:
        """Time goes on: what was under way until now is measured, and what is over ends."""
        if not self._has_begun:
            self._now_s, self._has_begun = now_s, True
        now_s = max(now_s, self._now_s)
        passed_s = now_s - self._now_s
        if passed_s > 0:
            barred_s = min(max(self._barred_until_s() - self._now_s, 0.0), passed_s)
            kept = 0.5 ** (passed_s / RATE_HALF_LIFE_S)
            self._rows *= kept
            self._work_s = self._work_s * kept + self._running * passed_s
            self._barred_s = self._barred_s * kept + barred_s
        self._now_s = now_s
        if self._calls_left is not None and now_s >= self._budget_until_s - _TICK_S:
            self._calls_left = None
        if self._state is BreakerState.OPEN and now_s >= self._open_until_s - _TICK_S:
            self._state, self._probe_is_out = BreakerState.HALF_OPEN, False

    def _barred_until_s(self) -> float:
        """When time alone holds no call back any more."""
        until_s = self._paused_until_s
        if self._calls_left == 0:
            until_s = max(until_s, self._budget_until_s)
        if self._state is BreakerState.OPEN:
            until_s = max(until_s, self._open_until_s)
        return until_s

    def _leave(self) -> None:
        self._running = max(self._running - 1, 0)
        self._older = max(self._older - 1, 0)
        self._full = max(self._full - 1, 0)

    def _pause(self, seconds: float) -> None:
        self._paused_until_s = max(self._paused_until_s, self._now_s + min(seconds, self._max_pause_s))

    def _note_hints(self, answer: SyncAnswer) -> None:
        hints = answer.hints
        if answer.failure is not None and hints.retry_after_s is not None:
            return  # it says when to come back; the reset is when the limit is whole again
        if hints.tokens_left == 0 and hints.tokens_reset_s is not None:
            self._pause(hints.tokens_reset_s)
        if hints.calls_left is None or hints.calls_reset_s is None:
            return
        # The server may not have seen the calls under way when it counted.
        self._calls_left = max(hints.calls_left - self._running, 0)
        self._budget_until_s = self._now_s + min(hints.calls_reset_s, self._max_pause_s)

    def _slow_down(self, answer: SyncAnswer, *, was_older: bool) -> None:
        failure = answer.failure
        asked_s = answer.hints.retry_after_s
        if asked_s is None and failure is not None:
            asked_s = failure.retry_after_s
        if asked_s is not None:
            self._pause(asked_s)
        if was_older or self._state is BreakerState.OPEN:
            return
        if asked_s is None:
            self._pause(self._own_pause_s)
            self._own_pause_s = min(self._own_pause_s * 2, MAX_OWN_PAUSE_S)
        self._cut(self._limit / 2)

    def _cut(self, limit: float) -> None:
        self._limit = max(limit, 1.0)
        self._doubles = False
        self._older = self._running

    def _fail(self) -> None:
        self._failures += 1
        if self._state is BreakerState.HALF_OPEN:
            self._breaker_pause_s = max(
                self._first_breaker_pause_s, min(self._breaker_pause_s * 2, MAX_BREAKER_PAUSE_S)
            )
            self._open()
        elif self._state is BreakerState.CLOSED and self._failures >= self._breaker_failures:
            self._breaker_pause_s = self._first_breaker_pause_s
            self._open()

    def _open(self) -> None:
        self._state = BreakerState.OPEN
        self._open_until_s = self._now_s + self._breaker_pause_s
        self._probe_is_out = False
        self._cut(1.0)
        self._doubles = True  # after an outage the account may well take what it took before

    def _close(self) -> None:
        """An answer came: whatever it says, somebody is there."""
        self._failures = 0
        self._state = BreakerState.CLOSED
        self._probe_is_out = False


def _is_overload(failure: CallFailed) -> bool:
    """A 429 about the rate, or an overload. A 429 about quota is the account's matter and comes as such."""
    if failure.kind is CallFailure.ACCOUNT:
        return False
    return failure.kind is CallFailure.THROTTLED or failure.http_status in _OVERLOADED
