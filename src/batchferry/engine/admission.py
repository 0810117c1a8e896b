"""Admission: whether a sealed batch may go now, by the account's rates, its enqueued tokens and the day's money.

All three are the whole fleet's. Rates are shared out by owned partitions. Tokens and money are summed over the lots of
the fleet view; what this process has admitted and the ledger does not show yet is added. Two replicas may still admit
at one time, so a batch that has a token limit is counted again once it is SUBMITTING and everybody can see it: then
those with the larger batch ids step back, and the one with the smallest waits until they have.

A large batch would wait for ever while small ones of its model keep the room filled: once it has waited for
``PATIENCE_S``, those with larger batch ids let it go first.

A token limit that nobody configured is learned from refusals, downwards only when our own sum was inside what we
believed, and recovers slowly: other users of the account, or a quota that the provider frees late, are no reason
to believe in a small limit for ever. What counts is the sum when the refused batch was admitted: when its refusal is
seen, others that stood in its way may have ended long ago.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from batchferry.config import Settings
from batchferry.domain.batchkey import BatchKey
from batchferry.domain.control import TokenLimit
from batchferry.domain.errors import KafkaUnavailable
from batchferry.domain.estimate import TokenEstimates, estimated_price
from batchferry.domain.ids import BatchId, LotId
from batchferry.domain.ledger import UNREAD, Lane, Lot, LotState, LotTally
from batchferry.domain.rates import Allowance
from batchferry.domain.rows import RowClass
from batchferry.engine.fleet import FleetView
from batchferry.engine.holds import Holds
from batchferry.engine.routing import Router
from batchferry.ports import Clock, Telemetry

HOUR_S = 3600.0
MINUTE_S = 60.0
CALLS_OF_A_BATCH = 2
"""An upload and a create."""
SAFETY = 0.9
"""Of a limit so much is used: nobody documents how the provider counts."""
LEARNED_SHARE = 0.8
"""After a refusal the limit is believed to be this share of what we had enqueued,"""
LEAST_SHARE = 0.1
"""Of the limit; a batch is not made smaller than this because it was refused."""
RECOVERY_PER_HOUR = 1.05
"""and grows so much an hour from then on,"""
RECOVERY_HOURS = 48.0
"""until it is forgotten."""
MIN_LIMIT_TOKENS = 1_000
MAX_PENDING = 10_000
"""Admitted batches that the ledger does not show yet; and as many sums at admission are remembered."""
PATIENCE_S = 900.0
"""Service-clock seconds for which smaller batches may overtake one that waits for tokens."""
ASKS_WITHIN_S = 5.0
"""Real seconds after which a batch that waited for tokens and asks no more keeps nobody back: it has gone another way,
or waits for something else."""
LEARN_EVERY_S = 1.0
"""Real seconds between two looks for lots that have ended."""
STEP_BACK_S = 5.0
"""Real seconds that the batch with the smallest id waits for the others to step back."""
STEP_BACK_LOOK_S = 0.25
PICODOLLARS = 10**12

Share = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Wait:
    """Not now."""

    reason: str
    """``rate``, ``tokens``, or ``fleet`` while it is not known what the others have enqueued."""
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TooLarge:
    """Never as it is: a batch of its rows may hold at most so many estimated tokens."""

    max_tokens: int


@dataclass(frozen=True, slots=True)
class Held:
    """A hold has just been placed."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """A batch that may go and whose lots the fleet view does not show yet."""

    key: BatchKey
    rows: int
    tokens: int
    """As they were estimated, before any factor."""


@dataclass(frozen=True, slots=True)
class _InLine:
    """A batch that waits for tokens."""

    pair: tuple[str, str]
    """Account and model."""
    since_s: float
    """On the service's monotonic clock."""
    asked_s: float
    """On the event loop's."""


Verdict = Wait | TooLarge | Held | None
"""None: it may go."""


class Admission:
    """Counts what is enqueued, called and spent; one a process."""

    def __init__(
        self,
        settings: Settings,
        fleet: FleetView,
        holds: Holds,
        clock: Clock,
        telemetry: Telemetry,
        router: Router,
        share: Share,
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._holds = holds
        self._clock = clock
        self._telemetry = telemetry
        self._router = router
        self._share = share
        self.estimates = TokenEstimates()
        self._learned_of: set[tuple[int, LotId]] = set()
        self._learn_at_s = float("-inf")
        self._pending: dict[BatchId, _Pending] = {}
        self._sums: dict[BatchId, int] = {}
        """What was enqueued of a batch's model once it was admitted, itself included."""
        self._in_line: dict[BatchId, _InLine] = {}
        """Batches that wait for tokens."""
        self._creates = {
            name: Allowance(account.limits.batches_per_hour, HOUR_S) for name, account in settings.accounts.items()
        }
        self._calls = {
            name: Allowance(account.limits.calls_per_minute, MINUTE_S) for name, account in settings.accounts.items()
        }
        self._sync_spent: dict[tuple[str, int], int] = {}
        """Picodollars that this process has spent in the sync lane, by route and day."""

    # ----------------------------------------------------------------------------------------------- verdicts

    async def verdict(self, batch_id: BatchId, key: BatchKey, rows: int, tokens: int) -> Verdict:
        """Whether this batch may go now; taking what it needs if so. ``tokens`` as they were estimated."""
        if not self._fleet.is_ready:
            return Wait("fleet")
        self._learn_from_fleet()
        self._pending.pop(batch_id, None)
        money = await self._money(key, rows, tokens)
        if money is not None:
            return money
        wanted = self.estimates.estimate(key.account, key.model, tokens)
        limit = self.token_limit(key.account, key.model)
        before: int | None = None
        if limit is not None:
            before = self.enqueued(key.account, key.model)
            usable = max(1, int(limit * SAFETY))
            if wanted > usable and rows > 1:
                self._in_line.pop(batch_id, None)
                factor = self.estimates.factor(key.account, key.model)
                return TooLarge(max(1, int(usable / factor)))
            if self._must_queue(batch_id, key, has_room=not before or wanted + before <= usable):
                return Wait("tokens")
        now_s, share = self._clock.monotonic(), self._share()
        creates, calls = self._creates[key.account], self._calls[key.account]
        wait_s = max(creates.wait_s(1, now_s, share), calls.wait_s(CALLS_OF_A_BATCH, now_s, share))
        if wait_s > 0:
            return Wait("rate", wait_s)
        creates.spend(1, now_s, share)
        calls.spend(CALLS_OF_A_BATCH, now_s, share)
        self._in_line.pop(batch_id, None)
        if before is None:
            before = self.enqueued(key.account, key.model)
        if len(self._pending) < MAX_PENDING:
            self._pending[batch_id] = _Pending(key, rows, tokens)
        self._sums.pop(batch_id, None)
        if len(self._sums) >= MAX_PENDING:
            del self._sums[next(iter(self._sums))]
        self._sums[batch_id] = before + wanted
        return None

    def _must_queue(self, batch_id: BatchId, key: BatchKey, *, has_room: bool) -> bool:
        """Whether a batch waits for tokens: there is no room, or somebody who waited long enough goes first."""
        loop_s, now_s = asyncio.get_running_loop().time(), self._clock.monotonic()
        self._in_line = {one: place for one, place in self._in_line.items() if loop_s - place.asked_s < ASKS_WITHIN_S}
        pair = (key.account, key.model)
        is_kept_back = any(
            one < batch_id and place.pair == pair and now_s - place.since_s > PATIENCE_S
            for one, place in self._in_line.items()
        )
        if has_room and not is_kept_back:
            return False
        mine = self._in_line.get(batch_id)
        if mine is not None or len(self._in_line) < MAX_PENDING:
            self._in_line[batch_id] = _InLine(pair, now_s if mine is None else mine.since_s, loop_s)
        return True

    def forget(self, batch_id: BatchId) -> None:
        """The batch has ended, or its lots speak for it."""
        self._pending.pop(batch_id, None)
        self._in_line.pop(batch_id, None)

    async def confirm(self, batch_id: BatchId, key: BatchKey) -> bool:
        """Count again, now that all can see the batch's SUBMITTING lots; False: it has to step back.

        The larger ids of those that are SUBMITTING step back at once, so that all replicas decide alike. The smallest
        cannot tell whether another looked before it could be seen, and goes to the provider now: it waits until the
        others have stepped back or have arrived, and steps back itself if that takes too long.
        """
        until_s = asyncio.get_running_loop().time() + STEP_BACK_S
        while True:
            limit = self.token_limit(key.account, key.model)
            if limit is None:
                return True
            try:
                await self._fleet.catch_up()
            except KafkaUnavailable:
                return True  # the provider will say if it was too much
            tokens: dict[BatchId, int] = {batch_id: 0}
            submitted = 0
            for lot in self._lots(key.account, key.model):
                amount = self.estimates.estimate(key.account, key.model, lot.own_tokens)
                if lot.state is LotState.SUBMITTED:
                    submitted += amount
                else:
                    one = BatchId(lot.lot_id)
                    tokens[one] = tokens.get(one, 0) + amount
            total = submitted + sum(tokens.values())
            if total <= limit or total == tokens[batch_id]:
                return True
            up_to_me = submitted + sum(amount for one, amount in tokens.items() if one <= batch_id)
            if up_to_me > limit or asyncio.get_running_loop().time() >= until_s:
                return False
            await asyncio.sleep(STEP_BACK_LOOK_S)

    # ----------------------------------------------------------------------------------------- enqueued tokens

    def token_limit(self, account: str, model: str) -> int | None:
        """Tokens that may be enqueued now: the configured limit, or the smaller one that refusals have taught."""
        configured = self._settings.accounts[account].limits.enqueued_tokens.get(model)
        learned = self._fleet.control.limits.get((account, model))
        if learned is None:
            return configured
        hours = max(0.0, (self._clock.now() - learned.at).total_seconds() / HOUR_S)
        if hours > RECOVERY_HOURS:
            return configured
        recovered = int(learned.tokens * RECOVERY_PER_HOUR**hours)
        return recovered if configured is None else min(configured, recovered)

    def enqueued(self, account: str, model: str) -> int:
        """Estimated tokens of the fleet that are at the provider, or on their way there."""
        lots = sum(self.estimates.estimate(account, model, lot.own_tokens) for lot in self._lots(account, model))
        return lots + sum(
            self.estimates.estimate(account, model, one.tokens)
            for one in self._not_shown()
            if (one.key.account, one.key.model) == (account, model)
        )

    def _not_shown(self) -> list[_Pending]:
        """What was admitted here and is in no ledger that we have read: nobody else knows of it.

        The tails show a batch's lots later than they were written, and one by one.
        """
        left = []
        for batch_id, one in list(self._pending.items()):
            shown = self._fleet.lots_of(batch_id).values()
            if shown and len(shown) >= min(len(lot.partitions) for lot in shown):
                del self._pending[batch_id]
                continue
            rows = one.rows - sum(lot.own_rows for lot in shown)
            tokens = one.tokens - sum(lot.own_tokens for lot in shown)
            left.append(replace(one, rows=max(0, rows), tokens=max(0, tokens)))
        return left

    def _lots(self, account: str, model: str) -> list[Lot]:
        return [
            lot
            for ledger in self._fleet.ledgers().values()
            for lot in ledger.lots.values()
            if lot.is_at_provider and lot.lane is Lane.BATCH and lot.key.account == account and lot.key.model == model
        ]

    async def refused(self, batch_id: BatchId, key: BatchKey, tokens: int) -> int:
        """The provider had no room for a batch of so many estimated tokens; returns what the next may hold.

        Half of it, since it may have been too large by itself; but rows that are refused again and again because
        others fill the queue are not cut to crumbs.
        """
        limit = self.token_limit(key.account, key.model)
        mine = self.estimates.estimate(key.account, key.model, tokens)
        had = max(mine, self._sums.pop(batch_id, 0) or self.enqueued(key.account, key.model))
        if limit is None or had <= limit:
            limit = max(MIN_LIMIT_TOKENS, int(had * LEARNED_SHARE))
            self._telemetry.event("token_limit_learned", account=key.account, model=key.model, tokens=limit)
            self._telemetry.gauge("token_limit", limit, account=key.account)
            await self._fleet.publish(TokenLimit(key.account, key.model, limit, self._clock.now()))
        crumbs = int(limit * LEAST_SHARE / self.estimates.factor(key.account, key.model))
        return max(1, min(tokens, max(tokens // 2, crumbs)))

    def _learn_from_fleet(self) -> None:
        """Take the tokens of lots that have ended since the last look, whoever ran them; a waiting batch asks often."""
        loop_s = asyncio.get_running_loop().time()
        if loop_s < self._learn_at_s:
            return
        self._learn_at_s = loop_s + LEARN_EVERY_S
        ended = {LotState.DONE, LotState.CLEAN}
        for partition, ledger in self._fleet.ledgers().items():
            for lot in ledger.lots.values():
                place = (partition, lot.lot_id)
                if lot.state not in ended or lot.tally is None or place in self._learned_of:
                    continue
                self._learned_of.add(place)
                counted = _counted_rows(lot.tally)
                usage = lot.tally.usage
                if counted and lot.own_rows:
                    account, model, share = lot.key.account, lot.key.model, min(1.0, counted / lot.own_rows)
                    self.estimates.learn(account, model, lot.own_tokens, usage.input_tokens, share=share)
                    self.estimates.learn_output(account, model, counted, usage.output_tokens)
        if len(self._learned_of) > 2 * MAX_PENDING:
            known = {(p, lot_id) for p, ledger in self._fleet.ledgers().items() for lot_id in ledger.lots}
            self._learned_of &= known

    # --------------------------------------------------------------------------------------------------- money

    def price(self, key: BatchKey, rows: int, tokens: int, *, batch: bool) -> int | None:
        """Estimated picodollars of rows that have not run; None where no price is known."""
        prices = self._settings.accounts[key.account].price_list
        inputs = self.estimates.estimate(key.account, key.model, tokens)
        outputs = self.estimates.output_tokens(key.account, key.model, None, rows)
        return estimated_price(prices, key.model, inputs, outputs, rows, self._clock.now(), batch=batch)

    def spent_by_sync(self, key: BatchKey, picodollars: int) -> None:
        """The sync lane has paid for a row."""
        routed = self._router.for_key(key)
        if routed is not None and routed.route.max_usd_per_day is not None:
            today = self._clock.now().toordinal()
            self._sync_spent = {place: sum_ for place, sum_ in self._sync_spent.items() if place[1] >= today}
            place = (routed.route.name, today)
            self._sync_spent[place] = self._sync_spent.get(place, 0) + picodollars

    async def _money(self, key: BatchKey, rows: int, tokens: int) -> TooLarge | Held | None:
        """What the route's money of the day (UTC) says; once it is spent, the key is held until tomorrow."""
        routed = self._router.for_key(key)
        if routed is None or routed.route.max_usd_per_day is None:
            return None
        route, now = routed.route, self._clock.now()
        most = round(routed.route.max_usd_per_day * PICODOLLARS)
        spent = self._sync_spent.get((route.name, now.toordinal()), 0)
        for ledger in self._fleet.ledgers().values():
            for lot in ledger.lots.values():
                since = lot.submitted_at or lot.created_at
                if lot.state is LotState.WAITING or since.astimezone(UTC).date() != now.date():
                    continue
                other = self._router.for_key(lot.key)
                if other is not None and other.route.name == route.name:
                    spent += self._cost_of(lot)
        for one in self._not_shown():
            other = self._router.for_key(one.key)
            if other is not None and other.route.name == route.name:
                spent += self.price(one.key, one.rows, one.tokens, batch=True) or 0
        mine = self.price(key, rows, tokens, batch=True) or 0
        self._telemetry.gauge("spent_today_usd", spent / PICODOLLARS, route=route.name)
        if spent + mine <= most:
            return None
        if rows > 1 and spent < most * LEARNED_SHARE and mine:  # a smaller batch may still go today
            return TooLarge(max(1, tokens * (most - spent) // mine * 9 // 10))
        tomorrow = datetime(now.year, now.month, now.day, tzinfo=UTC) + timedelta(days=1)
        self._telemetry.event("spending_limit_reached", route=route.name, spent_usd=round(spent / PICODOLLARS, 2))
        await self._holds.place_until(key, "spending_limit", tomorrow)
        return Held()

    def _cost_of(self, lot: Lot) -> int:
        if lot.tally is not None:
            return lot.tally.cost_picodollars or 0
        return self.price(lot.key, lot.own_rows, lot.own_tokens, batch=lot.lane is Lane.BATCH) or 0


def _counted_rows(tally: LotTally) -> int:
    """Rows whose tokens are in the tally's sum: those that succeeded, and lost answers that the provider counted."""
    lost = sum(tally.classes.get(one.value, 0) for one in (RowClass.MISSING, RowClass.UNREADABLE))
    unread = tally.extra.get(UNREAD, 0)
    return tally.classes.get(RowClass.SUCCEEDED.value, 0) + max(0, lost - (unread if isinstance(unread, int) else lost))
