"""What is done with a row after its class is known: one table and one function.

This is the place of the per-class policy. It is deliberately small today: a row that is not to blame (transient,
missing, unreadable, expired, cancelled) gets one more batch; account trouble keeps the row without using up
anything; whatever speaks about the row itself is final.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from batchferry.domain.ledger import Lot
from batchferry.domain.offsets import OffsetSet
from batchferry.domain.rows import RowClass


class Action(StrEnum):
    """What happens to a row that did not succeed."""

    FAIL = "fail"
    """A terminal failure on the failures topic."""
    AGAIN = "again"
    """One more submission; the attempt counts."""
    KEEP = "keep"
    """One more submission once the hold is over; nothing counts."""


DEFAULT_RETRIES: Mapping[RowClass, int] = {
    RowClass.TRANSIENT: 1,
    RowClass.UNREADABLE: 1,
    RowClass.MISSING: 1,
    RowClass.EXPIRED: 1,
    RowClass.CANCELLED: 1,
}
"""How many further submissions a class is worth. A class that is absent is final at once."""

KEPT = frozenset({RowClass.ACCOUNT, RowClass.BATCH_FAILED})
"""Classes that never blame the row: it stays, and no attempt is used up."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Further submissions by class; ``backoff_s`` is the wait before the rows travel again."""

    retries: Mapping[RowClass, int]
    backoff_s: float = 60.0

    @classmethod
    def default(cls) -> RetryPolicy:
        """The policy of a route that sets none."""
        return cls(DEFAULT_RETRIES)


def decide(row_class: RowClass, attempts: int, policy: RetryPolicy) -> Action:
    """What to do with a row that has ended in ``row_class`` and had ended so ``attempts`` times before."""
    if row_class in KEPT:
        return Action.KEEP
    return Action.AGAIN if attempts < policy.retries.get(row_class, 0) else Action.FAIL


def carry_attempts(
    lots: Iterable[Lot], rows: OffsetSet, ended_in: Mapping[RowClass, OffsetSet]
) -> dict[str, dict[int, OffsetSet]]:
    """The attempts a new lot of ``rows`` carries: those of the lots they come from, plus how they ended now.

    Args:
        lots: the lots that held the rows.
        rows: the rows of the new lot.
        ended_in: rows by the class that counts against them in this round.
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
        by_times = before.setdefault(ended.value, {})
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
        before[ended.value] = counted
    counts = {name: {times: held for times, held in by_times.items() if held} for name, by_times in before.items()}
    return {name: by_times for name, by_times in counts.items() if by_times}
