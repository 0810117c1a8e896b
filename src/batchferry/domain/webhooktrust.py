"""What webhooks have proven: how far polling may be stretched, and when their refusal is an alarm.

**Stretch.** A webhook costs nothing and a poll costs a call, but a webhook that does not come tells nothing. So polls
grow rarer only on evidence, batch by batch: was the end told before the poll found it?

=====================================================  ===========================================================
told, and no poll since then found the batch running   the end was told
found by a poll, told within ``grace_s`` of the end    the end was told: the poll was only quicker
found by a poll, not told by then                      the webhook did not come: the stretch is 1 at once
=====================================================  ===========================================================

The factor is 1 until ``FIRST_STREAK`` ends in a row were told, reaches its ceiling with ``FULL_STREAK``, and is held
down by the share of the last ends that were told: nothing at ``LEAST_SHARE`` or below. What is older than ``lately_s``
proves nothing any more. News of a batch that still runs (some gateways send it) counts for nothing either: the poll
that finds it running clears it.

**Who waits.** A name in a delivery is looked up in ``LiveBatches``, at one price whatever the number of batches.

**Alarm.** Whoever may not sign is refused, and anybody can be refused; so a few refusals are no alarm while others are
taken. But a secret replaced on one side only refuses *all*, and nobody would notice: polling finds every end, later.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from datetime import datetime, timedelta

MAX_STRETCH = 4.0
FIRST_STREAK = 3
FULL_STREAK = 10
LEAST_SHARE = 0.8
MAX_ENDS = 20
"""So many of the last ends are looked at."""
GRACE_S = 60.0
"""From a batch's end until its webhook: deliveries take seconds, and two clocks may disagree by some."""
LATELY_S = 172_800.0
"""Two days: a batch may take one."""
MAX_BATCHES = 10_000
"""Of one account, as far as told or awaited; the oldest are given up first."""
REFUSAL_WINDOW_S = 86_400.0
"""Refusals further apart than this are strangers' noise."""
ALARM_AGAIN_S = 3600.0
"""An alarm that goes on is raised again after so long."""


class WebhookTrust:
    """One account's webhooks. Instants are aware UTC; a step back of the clock delays judgements, no more.

    Args:
        ceiling: the largest stretch, 1 to ``MAX_STRETCH``.
        grace_s: how long after a batch's end its webhook is in time.
        lately_s: what ended longer ago than this proves nothing.

    Raises:
        ValueError: a bound out of its range.
    """

    def __init__(self, ceiling: float = MAX_STRETCH, grace_s: float = GRACE_S, lately_s: float = LATELY_S) -> None:
        if not 1.0 <= ceiling <= MAX_STRETCH or grace_s < 0 or lately_s <= 0:
            raise ValueError(f"the ceiling is 1 to {MAX_STRETCH:g}, grace_s at least 0 and lately_s above 0")
        self._ceiling = ceiling
        self._grace = timedelta(seconds=grace_s)
        self._lately = timedelta(seconds=lately_s)
        self._told: dict[str, datetime] = {}
        self._awaited: dict[str, datetime] = {}
        """Ended batches whose webhook has not come, and until when it may."""
        self._ended: dict[str, None] = {}
        """Batches that have ended already: each counts once."""
        self._ends: deque[tuple[datetime, bool]] = deque(maxlen=MAX_ENDS)
        self._streak = 0

    def told(self, batch: str, now: datetime) -> None:
        """A webhook named this batch."""
        self._judge(now)
        if batch in self._awaited:
            del self._awaited[batch]
            self._note(now, was_told=True)
        elif batch not in self._ended:
            self._told.pop(batch, None)
            self._told[batch] = now
            _trim(self._told)

    def found_running(self, batch: str, asked_at: datetime) -> None:
        """A poll that began at ``asked_at`` found the batch not ended: what was told before was not its end."""
        told_at = self._told.get(batch)
        if told_at is not None and told_at < asked_at:
            del self._told[batch]

    def found_ended(self, batch: str, now: datetime, ended_at: datetime | None) -> None:
        """A poll found the batch ended, at ``ended_at`` by the provider's word. Only the first finding counts."""
        self._judge(now)
        if batch in self._ended:
            return
        self._ended[batch] = None
        _trim(self._ended)
        if self._told.pop(batch, None) is not None:
            self._note(now, was_told=True)
            return
        self._awaited[batch] = (now if ended_at is None else min(now, ended_at)) + self._grace
        if len(self._awaited) > MAX_BATCHES:
            del self._awaited[next(iter(self._awaited))]
            self._note(now, was_told=False)
        self._judge(now)

    def forget(self, batch: str, now: datetime) -> None:
        """This batch is not ours to watch any more, or its end is our own doing: no webhook is expected."""
        self._judge(now)
        self._told.pop(batch, None)
        self._awaited.pop(batch, None)
        self._ended[batch] = None
        _trim(self._ended)

    def told_share(self, now: datetime) -> float | None:
        """Of the ends that count now, the share that was told; None: there are none."""
        self._judge(now)
        return sum(was_told for _, was_told in self._ends) / len(self._ends) if self._ends else None

    def stretch(self, now: datetime) -> float:
        """By what the time between two polls may be multiplied: 1 to the ceiling."""
        share = self.told_share(now)
        if share is None or len(self._ends) < FIRST_STREAK or self._streak < FIRST_STREAK:
            return 1.0
        by_share = (share - LEAST_SHARE) / (1.0 - LEAST_SHARE)
        by_streak = (self._streak - FIRST_STREAK + 1) / (FULL_STREAK - FIRST_STREAK + 1)
        return 1.0 + (self._ceiling - 1.0) * min(1.0, max(0.0, by_share), by_streak)

    def _judge(self, now: datetime) -> None:
        for batch in [batch for batch, until in self._awaited.items() if until <= now]:
            del self._awaited[batch]
            self._note(now, was_told=False)
        while self._ends and self._ends[0][0] <= now - self._lately:
            self._ends.popleft()
            self._streak = min(self._streak, len(self._ends))

    def _note(self, now: datetime, *, was_told: bool) -> None:
        self._ends.append((now, was_told))
        self._streak = min(self._streak + 1, MAX_ENDS) if was_told else 0


def _trim(known: dict[str, datetime] | dict[str, None]) -> None:
    if len(known) > MAX_BATCHES:
        del known[next(iter(known))]


class LiveBatches:
    """Which provider batches somebody waits for, so that a webhook's batch is looked up without searching ledgers.

    A place is one lot of one partition; a batch is waited for while any place names it.
    """

    def __init__(self) -> None:
        self._named_by: dict[tuple[int, str], tuple[str, ...]] = {}
        self._accounts: dict[str, dict[tuple[int, str], str]] = {}

    def __len__(self) -> int:
        return len(self._accounts)

    def put(self, partition: int, lot_id: str, account: str, names: Iterable[str]) -> None:
        """These are the provider batches that the lot's rows are in now; none: it waits for nothing any more."""
        place = (partition, lot_id)
        for name in self._named_by.pop(place, ()):
            places = self._accounts[name]
            del places[place]
            if not places:
                del self._accounts[name]
        found = tuple(dict.fromkeys(names))
        if found:
            self._named_by[place] = found
        for name in found:
            self._accounts.setdefault(name, {})[place] = account

    def clear(self) -> None:
        """Forget all: the ledgers are read anew."""
        self._named_by.clear()
        self._accounts.clear()

    def has(self, account: str, name: str) -> bool:
        """Whether somebody waits for this batch of this account; takes no longer than a batch has partitions."""
        return account in self._accounts.get(name, {}).values()


class RefusalAlarm:
    """Whether one account's deliveries are refused one and all. Instants are seconds on a clock that goes forward.

    Args:
        started_s: since when deliveries are listened for.
        rejected: so many refusals in a row, none taken between them,
        quiet_s: and none taken for so long, are an alarm.

    Raises:
        ValueError: ``rejected`` below 1, or ``quiet_s`` below 0.
    """

    def __init__(self, started_s: float, rejected: int = 5, quiet_s: float = 900.0) -> None:
        if rejected < 1 or quiet_s < 0:
            raise ValueError("rejected is at least 1, and quiet_s at least 0")
        self._quiet_s = quiet_s
        self._taken_s = started_s
        self._refused: deque[tuple[float, str]] = deque(maxlen=rejected)
        self._in_a_row = 0
        self._raised_s: float | None = None

    @property
    def is_raised(self) -> bool:
        """Whether an alarm stands: it does until a delivery is taken."""
        return self._raised_s is not None

    @property
    def in_a_row(self) -> int:
        """Refusals since a delivery was last taken."""
        return self._in_a_row

    def taken(self, now_s: float) -> bool:
        """A delivery was believed; whether that ends an alarm."""
        was_raised = self.is_raised
        self._taken_s = max(self._taken_s, now_s)
        self._refused.clear()
        self._in_a_row = 0
        self._raised_s = None
        return was_raised

    def refused(self, now_s: float, reason: str) -> str | None:
        """A delivery was not believed; the commonest reason of late when an alarm is to be raised now, else None."""
        self._refused.append((now_s, reason))
        self._in_a_row += 1
        return self._due(now_s)

    def quiet_s(self, now_s: float) -> float:
        """Seconds since a delivery was last taken, or since the start."""
        return max(0.0, now_s - self._taken_s)

    def _due(self, now_s: float) -> str | None:
        refused = self._refused
        if len(refused) != refused.maxlen or now_s - refused[0][0] > REFUSAL_WINDOW_S:
            return None
        if self.quiet_s(now_s) < self._quiet_s:
            return None
        if self._raised_s is not None and now_s - self._raised_s < ALARM_AGAIN_S:
            return None
        self._raised_s = now_s
        return Counter(reason for _, reason in refused).most_common(1)[0][0]
