"""One polling scheduler a process: asks for every batch on the water when its time has come.

The machine decides *when* a batch is due; this decides *how* it is asked: with jitter, within the account's
calls, not before an account's Retry-After is over, singly or, when many are due, by pages of the provider's list.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from batchferry.config import AccountSettings
from batchferry.domain.ids import BatchId, ProviderBatchId
from batchferry.domain.machine import Event, PollAnswered, PollFailed
from batchferry.domain.provider import BatchSnapshot, CallFailed, CallFailure, ProviderStatus
from batchferry.domain.webhooktrust import WebhookTrust
from batchferry.engine.metered import tell_failed_call
from batchferry.engine.slots import Slots
from batchferry.ports import BatchProvider, Clock, Telemetry

LIST_INSTEAD_FROM = 20
"""With so many batches of one account due at once, list pages are cheaper than single calls."""
TICK_S = 0.05
"""Real seconds between two looks at the clock."""

ROUND_SILENCE_S = 60.0
"""``run`` has not looked at what is due for so long (real seconds): it is stuck."""
ANSWER_SILENCE_S = 1800.0
"""Calls are under way and none has ended for so long (real seconds), tries and pauses included: they never will."""

Post = Callable[[BatchId, Event], None]


@dataclass(frozen=True, slots=True)
class Due:
    """One batch to ask for."""

    batch_id: BatchId
    account: str
    provider_batch_id: ProviderBatchId


class PollScheduler:
    """Knows when each batch is due; answers go to the batches' mailboxes."""

    def __init__(
        self,
        providers: Mapping[str, BatchProvider],
        accounts: Mapping[str, AccountSettings],
        clock: Clock,
        telemetry: Telemetry,
        post: Post,
        seed: int | None = None,
    ) -> None:
        self._providers = providers
        self._accounts = accounts
        self._clock = clock
        self._telemetry = telemetry
        self._post = post
        self._random = random.Random(seed)  # noqa: S311 (jitter, no secret)
        self._heap: list[tuple[datetime, BatchId]] = []
        self._due_at: dict[BatchId, datetime] = {}
        self._what: dict[BatchId, Due] = {}
        self._wanted_at: dict[BatchId, datetime] = {}
        """When each batch was to be asked for that has not been answered yet, whatever held the poll up since."""
        self._not_before: dict[str, datetime] = {}
        self._trust = {name: WebhookTrust() for name, account in accounts.items() if account.webhook_secret}
        self._stretched: set[str] = set()
        """Accounts whose polls were last told to be rarer."""
        self.on_webhook_missing: Callable[[str], None] = lambda _account: None
        self.calls = {name: Slots(account.max_concurrent_calls) for name, account in accounts.items()}
        self._round_at = 0.0
        """Real seconds (event loop time) when ``run`` last looked at what is due; 0 before it runs."""
        self._progress_at = 0.0
        """The same of the last answer, or of the first question after a time with none."""

    def schedule(self, due: Due, at: datetime) -> None:
        """Ask for this batch at ``at``, a little later by jitter; replaces what was scheduled for it."""
        jitter = self._accounts[due.account].poll.jitter
        ahead_s = max(0.0, (at - self._clock.now()).total_seconds())
        at += timedelta(seconds=ahead_s * jitter * self._random.random())
        self._what[due.batch_id] = due
        self._due_at[due.batch_id] = at
        self._wanted_at[due.batch_id] = at
        heapq.heappush(self._heap, (at, due.batch_id))

    def forget(self, batch_id: BatchId) -> None:
        """This batch is not asked for any more."""
        self._due_at.pop(batch_id, None)
        self._what.pop(batch_id, None)
        self._wanted_at.pop(batch_id, None)

    def told(self, account: str, provider_batch_id: ProviderBatchId) -> None:
        """A webhook named this batch."""
        trust = self._trust.get(account)
        if trust is not None:
            trust.told(provider_batch_id, self._clock.now())

    def stretch(self, account: str) -> float:
        """By what the time between two polls of this account's batches is multiplied now, 1 to 4."""
        trust = self._trust.get(account)
        factor = 1.0 if trust is None else trust.stretch(self._clock.now())
        if factor > 1.0:
            self._stretched.add(account)
        return factor

    def _shown(self, account: str, snapshot: BatchSnapshot, asked_at: datetime) -> None:
        """What a poll found, as evidence of webhooks."""
        trust = self._trust.get(account)
        if trust is None:
            return
        if not snapshot.status.is_terminal:
            trust.found_running(snapshot.provider_batch_id, asked_at)
        elif snapshot.status is ProviderStatus.CANCELLED:
            trust.forget(snapshot.provider_batch_id, self._clock.now())  # our own doing; not all senders tell of it
        else:
            trust.found_ended(snapshot.provider_batch_id, self._clock.now(), snapshot.ended_at)

    def _look_for_missing(self) -> None:
        for account in list(self._stretched):
            if self._trust[account].stretch(self._clock.now()) == 1.0:
                self._stretched.discard(account)
                self.on_webhook_missing(account)

    def overdue_s(self) -> float:
        """How late the most overdue poll is, in seconds of the service's clock; 0 when none is."""
        earliest = min(self._wanted_at.values(), default=None)
        return 0.0 if earliest is None else max(0.0, (self._clock.now() - earliest).total_seconds())

    def complaints(self) -> list[str]:
        """What is stuck here. A provider that is slow or away is not: each of its calls ends within its timeouts."""
        now = asyncio.get_running_loop().time()
        found = []
        if self._round_at and now - self._round_at > ROUND_SILENCE_S:
            found.append(f"no batch has been looked at for polling for {now - self._round_at:.0f} s")
        if any(one.taken for one in self.calls.values()) and now - self._progress_at > ANSWER_SILENCE_S:
            found.append(f"no call to a provider has ended for {now - self._progress_at:.0f} s")
        return found

    async def run(self) -> None:
        """Ask until cancelled."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            while True:
                self._round_at = loop.time()
                if not any(one.taken for one in self.calls.values()):
                    self._progress_at = self._round_at
                self._look_for_missing()
                for account, due in self._take_due().items():
                    group.create_task(self._ask(account, due), name=f"poll {account}")
                await asyncio.sleep(TICK_S)

    def _take_due(self) -> dict[str, list[Due]]:
        now = self._clock.now()
        ready: dict[str, list[Due]] = {}
        later: list[tuple[datetime, BatchId]] = []
        while self._heap and self._heap[0][0] <= now:
            at, batch_id = heapq.heappop(self._heap)
            if self._due_at.get(batch_id) != at:
                continue  # rescheduled or forgotten meanwhile
            due = self._what[batch_id]
            not_before = self._not_before.get(due.account)
            if not_before is not None and now < not_before:
                self._due_at[batch_id] = not_before
                later.append((not_before, batch_id))
                continue
            del self._due_at[batch_id]
            ready.setdefault(due.account, []).append(due)
        for entry in later:
            heapq.heappush(self._heap, entry)
        return ready

    async def _ask(self, account: str, due: list[Due]) -> None:
        async with self.calls[account]:
            if len(due) >= LIST_INSTEAD_FROM:
                due = await self._ask_by_list(account, due)
        async with asyncio.TaskGroup() as group:
            for one in due:
                group.create_task(self._ask_one(account, one), name=f"poll {one.batch_id}")

    async def _ask_one(self, account: str, due: Due) -> None:
        async with self.calls[account]:
            asked_at = self._clock.now()
            answer = await self._providers[account].retrieve(due.provider_batch_id)
            self._progress_at = asyncio.get_running_loop().time()
        self._telemetry.count("polls", how="single")
        self._wanted_at.pop(due.batch_id, None)
        if isinstance(answer, BatchSnapshot):
            self._shown(account, answer, asked_at)
            self._post(due.batch_id, PollAnswered(answer))
        else:
            self._failed(account, answer)
            self._post(due.batch_id, PollFailed(answer))

    async def _ask_by_list(self, account: str, due: list[Due]) -> list[Due]:
        """Read list pages; returns those that no page showed, to be asked for singly."""
        wanted = {one.provider_batch_id: one for one in due}
        cursor: str | None = None
        for _ in range(self._accounts[account].poll.list_pages):
            asked_at = self._clock.now()
            page = await self._providers[account].list_batches(cursor)
            self._progress_at = asyncio.get_running_loop().time()
            if isinstance(page, CallFailed):
                self._failed(account, page)
                break
            self._telemetry.event("batch_list_read", account=account, batches=len(page.batches))
            for snapshot in page.batches:
                one = wanted.pop(snapshot.provider_batch_id, None)
                if one is not None:
                    self._shown(account, snapshot, asked_at)
                    self._telemetry.count("polls", how="list")
                    self._wanted_at.pop(one.batch_id, None)
                    self._post(one.batch_id, PollAnswered(snapshot))
            if not wanted or page.next_cursor is None or page.next_cursor == cursor:
                break
            cursor = page.next_cursor
        return list(wanted.values())

    def _failed(self, account: str, failure: CallFailed) -> None:
        tell_failed_call(self._telemetry, account, failure)
        if failure.kind is CallFailure.THROTTLED:
            pause_s = failure.retry_after_s or self._accounts[account].poll.floor_s
            self._not_before[account] = self._clock.now() + timedelta(seconds=pause_s)
