"""Budgets that refill: so many rows an hour, so many calls a minute. Pure; seconds come in from outside."""

from __future__ import annotations


class Allowance:
    """A budget that fills evenly and holds at most what comes in during ``period_s``; full at the beginning.

    Rates are for the whole fleet: ``share`` (0 to 1) says how much of it this replica may use, and may change with
    every call.
    """

    def __init__(self, amount: float, period_s: float) -> None:
        """Take the budget of the whole fleet: ``amount`` in every ``period_s``."""
        self._amount = amount
        self._period_s = period_s
        self._used = 0.0
        self._at_s: float | None = None

    def left(self, now_s: float, share: float = 1.0) -> float:
        """What may be taken now; below 0 where more was taken than there was."""
        self._refill(now_s, share)
        return self._amount * share - self._used

    def take(self, amount: float, now_s: float, share: float = 1.0) -> bool:
        """Take it, if it is there. A share below one unit still lets one through when nothing is used."""
        left = self.left(now_s, share)
        if amount > left and (self._used > 0 or share <= 0):
            return False
        self._used += amount
        return True

    def spend(self, amount: float, now_s: float, share: float = 1.0) -> None:
        """Take it whether it is there or not: what must be done counts against what may be done."""
        self._refill(now_s, share)
        self._used += amount

    def wait_s(self, amount: float, now_s: float, share: float = 1.0) -> float:
        """How long until so much is there again; 0 when it is."""
        missing = amount - self.left(now_s, share)
        if missing <= 0 or (not self._used and share > 0):
            return 0.0
        rate = self._amount * share / self._period_s
        return min(missing, self._used) / rate if rate > 0 else self._period_s

    def _refill(self, now_s: float, share: float) -> None:
        if self._at_s is not None and now_s > self._at_s:
            self._used = max(0.0, self._used - (now_s - self._at_s) * self._amount * share / self._period_s)
        self._at_s = now_s if self._at_s is None else max(self._at_s, now_s)
