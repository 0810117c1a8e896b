"""Budgets that refill: what may be taken when, and that all who share one together take no more than it holds."""

from __future__ import annotations

import pytest

from batchferry.domain.rates import Allowance

HOUR_S = 3600.0


def test_a_budget_is_full_at_first_and_fills_evenly():
    """Sixty an hour are one a minute; what is not taken is not saved beyond the hour's amount."""
    budget = Allowance(60, HOUR_S)
    assert budget.take(60, 0.0)
    assert not budget.take(1, 0.0)
    assert not budget.take(1, 59.0)
    assert budget.take(1, 60.0)
    assert budget.left(60.0 + 10 * HOUR_S) == 60


def test_what_must_be_done_counts_against_what_may_be_done():
    """Spending goes below nothing, and until it has come in again nothing may be taken."""
    budget = Allowance(10, HOUR_S)
    budget.spend(15, 0.0)
    assert budget.left(0.0) == -5
    assert not budget.take(1, HOUR_S / 2)
    assert budget.take(1, HOUR_S * 0.6)


@pytest.mark.parametrize("share", [0.01, 0.25, 1.0])
@pytest.mark.parametrize("amount", [1, 5])
def test_the_wait_is_exact(share: float, amount: int):
    """Just before it is over the budget refuses, at its end it gives: nobody asks in vain or waits longer."""
    budget = Allowance(5, HOUR_S)
    while budget.take(amount, 0.0, share):
        pass
    wait_s = budget.wait_s(amount, 0.0, share)
    assert wait_s > 0
    assert not budget.take(amount, wait_s * 0.999, share)
    assert budget.take(amount, wait_s * 1.000001, share)


def test_a_share_below_one_lets_one_through_at_a_time():
    """A replica with a hundredth of five an hour takes one, and the next when that one has come in: after 20 hours."""
    budget = Allowance(5, HOUR_S)
    assert budget.wait_s(1, 0.0, 0.01) == 0
    assert budget.take(1, 0.0, 0.01)
    assert budget.wait_s(1, 0.0, 0.01) == pytest.approx(20 * HOUR_S)
    assert not budget.take(1, 19 * HOUR_S, 0.01)
    assert budget.take(1, 20.1 * HOUR_S, 0.01)


def test_without_a_share_nothing_is_taken():
    """Who owns no partition has no part in the fleet's budget, used or not."""
    budget = Allowance(5, HOUR_S)
    assert not budget.take(1, 0.0, 0.0)
    assert budget.wait_s(1, 0.0, 0.0) > 0
    assert budget.take(1, 1.0, 1.0)


def test_shares_add_up_to_the_budget():
    """Three replicas that own half, a third and a sixth together take what one would, each its part of it."""
    taken = {}
    for share in (1 / 2, 1 / 3, 1 / 6):
        budget = Allowance(60, HOUR_S)
        taken[share] = sum(budget.take(1, float(second), share) for second in range(2 * 3600))
    assert sum(taken.values()) <= 180
    assert [taken[share] for share in taken] == pytest.approx([90, 60, 30], abs=1)


def test_a_clock_that_goes_back_gives_nothing():
    """The same seconds do not fill a budget twice."""
    budget = Allowance(60, HOUR_S)
    assert budget.take(60, 1000.0)
    assert budget.left(0.0) == 0
    assert budget.left(1000.0) == 0
    assert budget.left(1060.0) == pytest.approx(1)
