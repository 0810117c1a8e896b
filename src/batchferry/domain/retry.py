"""What is done with a row after its class is known: one table and one function.

``DEFAULT_POLICIES`` says for every class what a route does that sets nothing; ``ALLOWED`` says what a route may set
instead. ``decide`` adds what only the moment knows: how often the row has ended so, and how much time is left.

Two rules stand above the table: a class in ``KEPT`` never uses up an attempt, and a row that another batch could not
bring home before its deadline goes through the sync lane where there is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from batchferry.domain.ledger import Lot
from batchferry.domain.offsets import OffsetSet
from batchferry.domain.rows import RowClass


class Policy(StrEnum):
    """What a route does with the rows of a class."""

    RETRY = "retry"
    """Once more in a small batch, or through the sync lane where the time is short; then ``fail``."""
    SYNC = "sync"
    """Once more through the sync lane; then, or without a lane, ``fail``."""
    REVIEW = "review"
    """A failure on the review topic."""
    SPLIT = "split"
    """Cut into parts, each a request of its own; a row that cannot be cut fails."""
    FAIL = "fail"
    """A failure."""
    HOLD = "hold"
    """The row stays, nothing is used up, and its account or batch key is held."""


class Action(StrEnum):
    """What happens to one row now."""

    FAIL = "fail"
    """A terminal failure on the failures topic."""
    REVIEW = "review"
    """A terminal failure on the review topic."""
    AGAIN = "again"
    """One more batch; the attempt counts."""
    SYNC = "sync"
    """Through the sync lane; the attempt counts."""
    KEEP = "keep"
    """One more submission once the hold is over; nothing counts."""
    SPLIT = "split"
    """Into parts, if it can be cut."""


DEFAULT_POLICIES: Mapping[RowClass, Policy] = {
    RowClass.CONTENT_FILTERED: Policy.REVIEW,
    RowClass.TOO_LONG: Policy.FAIL,
    RowClass.INVALID_REQUEST: Policy.FAIL,
    RowClass.MODEL_UNAVAILABLE: Policy.FAIL,
    RowClass.TRANSIENT: Policy.RETRY,
    RowClass.UNREADABLE: Policy.RETRY,
    RowClass.EXPIRED: Policy.RETRY,
    RowClass.CANCELLED: Policy.RETRY,
    RowClass.MISSING: Policy.RETRY,
    RowClass.ACCOUNT: Policy.HOLD,
    RowClass.BATCH_FAILED: Policy.HOLD,
}
"""The classes that a provider's answer can end in. Every other class is our own and is always a failure."""

_AGAIN = frozenset({Policy.RETRY, Policy.SYNC, Policy.REVIEW, Policy.FAIL})
ALLOWED: Mapping[RowClass, frozenset[Policy]] = {
    RowClass.CONTENT_FILTERED: frozenset({Policy.REVIEW, Policy.FAIL}),
    RowClass.TOO_LONG: frozenset({Policy.FAIL, Policy.REVIEW, Policy.SPLIT, Policy.SYNC}),
    RowClass.INVALID_REQUEST: frozenset({Policy.FAIL, Policy.REVIEW}),
    RowClass.MODEL_UNAVAILABLE: frozenset({Policy.FAIL, Policy.REVIEW, Policy.SYNC}),
    RowClass.TRANSIENT: _AGAIN,
    RowClass.UNREADABLE: _AGAIN,
    RowClass.EXPIRED: _AGAIN,
    RowClass.CANCELLED: _AGAIN,
    RowClass.MISSING: _AGAIN,
}
"""What a route may set for a class. A content filter's word is never asked twice, and an account's rows always stay."""

DEFAULT_RETRIES: Mapping[RowClass, int] = {
    RowClass.TRANSIENT: 1,
    RowClass.UNREADABLE: 1,
    RowClass.MISSING: 1,
    RowClass.EXPIRED: 1,
    RowClass.CANCELLED: 1,
}
"""How many further submissions a class is worth under the policy ``retry``."""

KEPT = frozenset({RowClass.ACCOUNT, RowClass.BATCH_FAILED})
"""Classes that never blame the row: it stays, and no attempt is used up."""

NOT_RUN = frozenset({RowClass.EXPIRED, RowClass.CANCELLED})
"""The provider had no time for the row. Even with its retries used up it is worth the sync lane, if there is one."""

SYNC_TRIES = "sync"
"""The name under which a row's attempts count how often it went on from the sync lane, whichever way."""


SYNC_SPREAD_SHARE = 0.1
"""Of the time to the deadline this much may pass before the third and each further call of a row."""
SYNC_SPREAD_S = (15.0, 60.0, 180.0)
"""The waits to choose from: rows that wait equally long travel in one lot."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """What one route does with rows that did not succeed. All lengths in seconds."""

    retries: Mapping[RowClass, int] = field(default_factory=lambda: DEFAULT_RETRIES)
    policies: Mapping[RowClass, Policy] = field(default_factory=dict)
    """What the route sets itself; every other class has its default."""
    backoff_s: float = 60.0
    """Before the second submission; doubled for each further one."""
    backoff_max_s: float = 3600.0
    window_s: float = 24 * 3600.0
    lead_s: float = 1800.0
    """A batch is in time only if it ends so long before the deadline."""
    sync_tries: int = 3
    """Calls of the sync lane that a row is worth."""
    has_lane: bool = False
    """Whether rows may go through the sync lane at all."""
    late: str = "sync"
    """A row that no batch can bring home in time: ``sync``, ``batch`` all the same, or ``fail``."""
    larger_model: str | None = None
    """For rows that are too long for the model they ask for, in the sync lane."""

    @classmethod
    def default(cls) -> RetryPolicy:
        """The policy of a route that sets none."""
        return cls()

    def of(self, row_class: RowClass) -> Policy:
        """What this route does with rows of a class."""
        return self.policies.get(row_class) or DEFAULT_POLICIES.get(row_class, Policy.FAIL)


@dataclass(frozen=True, slots=True)
class Fate:
    """What happens to a row now, and how long it waits first."""

    action: Action
    wait_s: float = 0.0


def decide(row_class: RowClass, attempts: int, policy: RetryPolicy, left_s: float | None = None) -> Fate:
    """What to do with a row that a batch brought home in ``row_class``.

    Args:
        attempts: how often it had ended so before.
        left_s: seconds to its deadline, negative when that is over; None: it has none, or its words are gone.
    """
    wanted = policy.of(row_class)
    if row_class in KEPT or wanted is Policy.HOLD:
        return Fate(Action.KEEP)
    if wanted is Policy.SPLIT:
        return Fate(Action.SPLIT)
    may_sync = policy.has_lane and left_s is not None and (row_class is not RowClass.TOO_LONG or policy.larger_model)
    if wanted is Policy.SYNC:
        return Fate(Action.SYNC if may_sync and not attempts else Action.FAIL)
    if wanted is Policy.RETRY:
        has_retry = attempts < policy.retries.get(row_class, 0)
        wait_s = _backoff(policy, attempts)
        fits = left_s is None or wait_s + policy.window_s + policy.lead_s <= left_s
        if may_sync and policy.late == "sync" and (not fits if has_retry else row_class in NOT_RUN):
            return Fate(Action.SYNC)
        if not fits and policy.late == "fail":
            return Fate(Action.FAIL)
        return Fate(Action.AGAIN, wait_s) if has_retry else Fate(Action.FAIL)
    return Fate(Action.REVIEW if wanted is Policy.REVIEW else Action.FAIL)


def decide_sync(
    row_class: RowClass, tries: int, policy: RetryPolicy, left_s: float | None, retry_after_s: float | None = None
) -> Fate:
    """What to do with a row whose call in the sync lane ended in ``row_class``.

    Args:
        tries: times that it had gone on from this lane before (``SYNC_TRIES`` among its attempts).
        left_s: as in ``decide``.
        retry_after_s: what the provider asks us to wait.
    """
    wanted = policy.of(row_class)
    if row_class in KEPT:
        return Fate(Action.KEEP)
    if wanted is Policy.SPLIT:
        return Fate(Action.SPLIT)
    if row_class not in DEFAULT_RETRIES or wanted not in {Policy.RETRY, Policy.SYNC}:
        return Fate(Action.REVIEW if wanted is Policy.REVIEW else Action.FAIL)
    if tries + 1 < policy.sync_tries:
        # The first try again comes at once; further ones spread over the time left, so that a short outage is outlived.
        left_s = left_s if left_s is not None and tries else 0.0
        spread_s = max((step_s for step_s in SYNC_SPREAD_S if step_s <= SYNC_SPREAD_SHARE * left_s), default=0.0)
        wait_s = min(policy.backoff_max_s, max(spread_s, 2.0 * 2.0 ** min(tries, 20)))
        return Fate(Action.SYNC, max(retry_after_s or 0.0, wait_s))
    wait_s = _backoff(policy, tries)
    fits = left_s is None or wait_s + policy.window_s + policy.lead_s <= left_s
    if wanted is Policy.RETRY and fits and tries + 1 == policy.sync_tries:
        return Fate(Action.AGAIN, wait_s)  # time enough for a batch, which may fare better; this way leads on once
    return Fate(Action.FAIL)


def _backoff(policy: RetryPolicy, attempts: int) -> float:
    return min(policy.backoff_max_s, policy.backoff_s * 2.0 ** min(attempts, 20))


def carry_attempts(
    lots: Iterable[Lot], rows: OffsetSet, ended_in: Mapping[RowClass, OffsetSet] | Mapping[str, OffsetSet]
) -> dict[str, dict[int, OffsetSet]]:
    """The attempts a new lot of ``rows`` carries: those of the lots they come from, plus how they ended now.

    Args:
        lots: the lots that held the rows.
        rows: the rows of the new lot.
        ended_in: rows by the class (or ``SYNC_TRIES``) that counts against them in this round.
    """
    before: dict[str, dict[int, OffsetSet]] = {}
    for lot in lots:
        for row_class, by_times in lot.attempts.items():
            for times, offsets in by_times.items():
                mine = offsets & rows
                if mine:
                    before.setdefault(row_class, {}).setdefault(times, OffsetSet()).update(mine)
    for by_times in before.values():  # several lots may name a row: the higher count holds
        counted_higher = OffsetSet()
        for times in sorted(by_times, reverse=True):
            by_times[times] -= counted_higher
            counted_higher |= by_times[times]
    for ended, offsets in ended_in.items():
        by_times = before.setdefault(str(ended), {})
        counted: dict[int, OffsetSet] = {}
        fresh = offsets & rows
        for times, earlier in by_times.items():
            again = earlier & fresh
            fresh -= again
            left = earlier - again
            if left:
                counted.setdefault(times, OffsetSet()).update(left)
            if again:
                counted.setdefault(times + 1, OffsetSet()).update(again)
        if fresh:
            counted.setdefault(1, OffsetSet()).update(fresh)
        before[str(ended)] = counted
    counts = {name: {times: held for times, held in by_times.items() if held} for name, by_times in before.items()}
    return {name: by_times for name, by_times in counts.items() if by_times}
