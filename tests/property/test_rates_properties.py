"""A budget under any sequence of wishes: never more than what it held and what came in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batchferry.domain.rates import Allowance

PERIOD_S = 3600.0


@given(
    amount=st.integers(1, 1_000),
    wishes=st.lists(st.tuples(st.integers(1, 50), st.floats(0, 500)), max_size=200),
)
def test_in_no_stretch_of_time_more_is_taken_than_the_budget_gives(amount, wishes):
    """Between any two takings lies at most the full budget and what has come in since; a refusal names its wait."""
    budget = Allowance(amount, PERIOD_S)
    now_s = 0.0
    taken: list[tuple[float, int]] = []
    for wish, pause_s in wishes:
        now_s += pause_s
        left = budget.left(now_s)
        assert left <= amount
        if budget.take(wish, now_s):
            taken.append((now_s, wish))
        else:
            assert wish > left
            assert budget.wait_s(wish, now_s) > 0
    for first, (since_s, wanted) in enumerate(taken):
        total = 0
        for at_s, wish in taken[first:]:
            total += wish
            # One wish larger than the whole budget passes when nothing is used, and is paid off before the next.
            room = max(amount, wanted) + amount * (at_s - since_s) / PERIOD_S
            assert total <= room + max(0, wish - amount) + 1e-6
