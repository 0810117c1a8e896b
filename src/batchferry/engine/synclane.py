"""The sync lane: rows that no batch can bring home in time run one by one at the ordinary endpoint.

Rows come in two ways: offered by the intake (they ask for it, or are late when first read), or in waiting lots of the
lane that others have written (rescued, retried, small). Both leave in *waves*: a lot of the lane, SUBMITTING in the
ledger before its first call, so that a successor knows which rows may have been run. A wave is small, as its rows
are what a crash may pay for twice.

An answer is settled as it comes. What fails is judged like a line of a result file, with a budget of its own; what
travels again goes into waiting lots in the transaction that ends the wave. Calls follow the account's pace: bounded
and adaptive concurrency, the provider's wishes, a circuit breaker. Rows whose call has not begun when the pace stops
the lane go back and lose nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from batchferry.config import Settings
from batchferry.domain.batchkey import BatchKey
from batchferry.domain.envelope import EventKind
from batchferry.domain.errors import KafkaUnavailable, PartitionLost, StoreUnavailable
from batchferry.domain.ledger import UNPRICED, Lane, LedgerEntry, Lot, LotState, LotTally
from batchferry.domain.offsets import OffsetSet
from batchferry.domain.pacing import BreakerState, Pace
from batchferry.domain.partition import PartitionLedger
from batchferry.domain.provider import Usage
from batchferry.domain.rates import Allowance
from batchferry.domain.retry import carry_attempts
from batchferry.domain.rows import ResultLine, RowClass, SyncAnswer
from batchferry.engine.failpoints import Failpoint, reach
from batchferry.engine.fates import SHAPE, Fates, Heirs, Onward, waiting_lot
from batchferry.engine.holds import INPUT_FAILURES, Holds
from batchferry.engine.outcomes import OutcomeWriter
from batchferry.engine.partition import PartitionTask
from batchferry.engine.routing import Router
from batchferry.engine.rowsource import Accepted, RowSource
from batchferry.ports import BatchProvider, Clock, OutRecord, Telemetry

TICK_S = 0.25
"""Real seconds between two looks for rows; an offer wakes the lane at once."""
GIVE_BACK_S = 5.0
"""When the pace asks for a longer pause than this (service time), rows that have not begun go back into a lot."""
SLOT_LOOK_S = 0.1
"""Real seconds between two looks at the pace while a row waits for its call."""
HOUR_S = 3600.0
STOP_PATIENCE_S = 15.0
"""On a stop, calls under way may take so long (real seconds) to bring their answers."""
KAFKA_PAUSE_S = 2.0
CANARY = "canary"
"""The reason of waves that carry a canary's sample."""
LEFT_OVER_S = 60.0
"""Wait (service time) of a row whose answer could not be dealt with."""

AWAY = "away"
"""The name under which calls that found the breaker open, or opened it, are counted among a row's attempts."""
MAX_AWAY = 8
"""So many of them cost no try."""
AFTER_OTHERS_S = 30.0
"""A row whose call failed lets the others go first when the breaker lets a call through (service time)."""

Share = Callable[[], float]
"""What part of the fleet's budgets this replica may use, 0 to 1."""


@dataclass(slots=True)
class _Offer:
    """Fresh rows of one partition and key that wait for a wave."""

    task: PartitionTask
    key: BatchKey
    offsets: OffsetSet = field(default_factory=OffsetSet)
    deadline_ms: int = 0
    """Of the most urgent one."""
    reason: str = ""


@dataclass(slots=True)
class _Load:
    """Rows that could begin now."""

    task: PartitionTask
    key: BatchKey
    offsets: OffsetSet
    deadline_ms: int
    reason: str
    source: Lot | None = None


class _AccountLane:
    """What one account's calls share."""

    def __init__(self, settings: Settings, name: str) -> None:
        sync = settings.accounts[name].sync
        self.settings = sync
        self.pace = Pace(sync.max_concurrency, sync.breaker_failures, sync.breaker_pause_s)
        self.running = 0
        """Calls under way."""
        self.rows = 0
        """Rows in waves."""
        self.budget = Allowance(sync.rows_per_hour, HOUR_S)
        self.money = None if sync.usd_per_hour is None else Allowance(sync.usd_per_hour, HOUR_S)


@dataclass(slots=True)
class _WaveTally:
    """What the answers of one wave came to."""

    classes: dict[str, int] = field(default_factory=dict)
    usage: Usage = field(default_factory=Usage)
    cost: int = 0
    sync_cost: int = 0
    unpriced: int = 0
    unknown: int = 0

    def add(self, line: ResultLine, paid: int | None, listed: int | None) -> None:
        name = line.row_class.value
        self.classes[name] = self.classes.get(name, 0) + 1
        usage = line.usage
        if usage is not None:
            self.usage = Usage(
                self.usage.input_tokens + usage.input_tokens,
                self.usage.output_tokens + usage.output_tokens,
                self.usage.cached_tokens + usage.cached_tokens,
            )
        if paid is not None and listed is not None:
            self.cost += paid
            self.sync_cost += listed
        elif usage is not None or line.row_class is RowClass.SUCCEEDED:
            self.unpriced += 1

    def of(self) -> LotTally:
        extra = {UNPRICED: self.unpriced} if self.unpriced else {}
        return LotTally(dict(self.classes), self.usage, self.cost, self.sync_cost, extra)


class SyncLane:
    """Runs waves for the partitions this process owns; one a process."""

    def __init__(
        self,
        settings: Settings,
        providers: Mapping[str, BatchProvider],
        tasks: Mapping[int, PartitionTask],
        clock: Clock,
        telemetry: Telemetry,
        router: Router,
        source: RowSource,
        outcomes: OutcomeWriter,
        fates: Fates,
        holds: Holds,
        share: Share,
        task_failed: Callable[[str, BaseException], None],
    ) -> None:
        self._settings = settings
        self._providers = providers
        self._tasks = tasks
        self._clock = clock
        self._telemetry = telemetry
        self._router = router
        self._source = source
        self._outcomes = outcomes
        self._fates = fates
        self._holds = holds
        self._share = share
        self._task_failed = task_failed
        self._accounts = {name: _AccountLane(settings, name) for name in settings.accounts}
        self._offers: dict[tuple[int, BatchKey, str], _Offer] = {}
        self._in_waves: dict[int, OffsetSet] = {}
        """Rows by partition that a wave of this process is about to take or has taken, until it ends."""
        self._waves: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._stopping = False
        self.on_answer: Callable[[int, int, ResultLine, str], None] | None = None
        """Told of every answer (partition, offset, line, endpoint) before its row is judged: a canary listens."""
        self.spent: Callable[[BatchKey, int], None] = lambda _key, _picodollars: None
        """Told what answers have cost."""
        fates.room = self

    # ----------------------------------------------------------------------------------------------- offers

    def is_on(self, key: BatchKey) -> bool:
        """Whether rows of this key may go through the lane at all."""
        account = self._accounts.get(key.account)
        return account is not None and account.settings.enabled

    def reserve(self, key: BatchKey, rows: int = 1) -> bool:
        """Take room for late or rescued rows out of the lane's hourly budget; False when it has none."""
        if not self.is_on(key):
            return False
        account, now_s, share = self._accounts[key.account], self._clock.monotonic(), self._share()
        if account.money is not None and account.money.left(now_s, share) <= 0:
            return False
        return account.budget.take(rows, now_s, share)

    def room(self, key: BatchKey, within_s: float) -> float:
        """Late or rescued rows that the budget will have let through so many seconds from now; nothing is taken."""
        if not self.is_on(key):
            return 0.0
        account, now_s, share = self._accounts[key.account], self._clock.monotonic(), self._share()
        if account.money is not None and account.money.left(now_s, share) <= 0:
            return 0.0
        coming = account.settings.rows_per_hour * share * max(0.0, within_s) / HOUR_S
        return account.budget.left(now_s, share) + coming

    def offer(self, task: PartitionTask, key: BatchKey, offset: int, deadline_ms: int, reason: str) -> None:
        """Take a fresh row: it is in no lot, and this process reads it again if it dies before its wave."""
        offer = self._offers.get((task.partition, key, reason))
        if offer is None or offer.task is not task:
            offer = self._offers[task.partition, key, reason] = _Offer(task, key, OffsetSet(), deadline_ms, reason)
        offer.offsets.add(offset)
        offer.deadline_ms = min(offer.deadline_ms, deadline_ms)
        self._wake.set()

    def drop_partition(self, partition: int) -> None:
        """Forget a partition's rows: its next owner, or our next life, reads them again."""
        for place in [one for one in self._offers if one[0] == partition]:
            del self._offers[place]
        self._in_waves.pop(partition, None)

    def wake(self) -> None:
        """There may be something to do."""
        self._wake.set()

    @property
    def waiting_rows(self) -> int:
        """Rows that wait for a wave."""
        waiting = sum(len(offer.offsets) for offer in self._offers.values())
        for task in self._tasks.values():
            for lot_id in task.waiting_lots(Lane.SYNC):
                waiting += len(task.ledger.held_by(lot_id))
        return waiting

    @property
    def calls(self) -> tuple[int, int]:
        """Calls under way, and the most that there may be."""
        accounts = self._accounts.values()
        return sum(one.running for one in accounts), sum(one.settings.max_concurrency for one in accounts)

    def rows_per_s(self, account: str) -> float | None:
        """How fast rows have lately gone through the account's lane, in service time; None before it is known."""
        return self._accounts[account].pace.rows_per_s(self._clock.monotonic())

    def states(self) -> Mapping[str, tuple[str, int]]:
        """Of each account: the breaker's state, and the concurrency that the pace allows now."""
        return {name: (str(one.pace.state), one.pace.concurrency) for name, one in self._accounts.items()}

    # ------------------------------------------------------------------------------------------------- waves

    async def run(self) -> None:
        """Start waves until cancelled."""
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S):
                        await self._wake.wait()
                self._wake.clear()
                if not self._stopping and self._holds.are_known:
                    self._start_waves()
        finally:
            for wave in self._waves:
                wave.cancel()
            await asyncio.gather(*self._waves, return_exceptions=True)

    async def drain(self) -> None:
        """Begin no call any more; give those under way some time to bring their answers."""
        self._stopping = True
        self._wake.set()
        if self._waves:
            await asyncio.wait(self._waves, timeout=STOP_PATIENCE_S)

    def _start_waves(self) -> None:
        loads = sorted(self._loads(), key=lambda load: load.deadline_ms)
        for load in loads:
            account = self._accounts[load.key.account]
            # All waves under way together have at most wave_rows: a crash may pay for that many twice, however small
            # the waves are.
            most = self._settings.limits.wave_rows
            while load.offsets and account.rows < min(account.pace.concurrency, most) and self._may_begin(account):
                offsets = OffsetSet()
                for offset in load.offsets:
                    offsets.add(offset)
                    if len(offsets) >= most - account.rows:
                        break
                load.offsets -= offsets
                self._in_waves.setdefault(load.task.partition, OffsetSet()).update(offsets)
                account.rows += len(offsets)
                wave = asyncio.create_task(self._wave(load, offsets, account), name="wave")
                self._waves.add(wave)
                wave.add_done_callback(self._wave_done)

    def _may_begin(self, account: _AccountLane) -> bool:
        wait_s = account.pace.wait_s(self._clock.monotonic(), account.running)
        return wait_s is None or wait_s <= GIVE_BACK_S

    def _wave_done(self, wave: asyncio.Task[None]) -> None:
        self._waves.discard(wave)
        self._wake.set()
        if not wave.cancelled() and (error := wave.exception()) is not None:
            self._task_failed("wave", error)

    def _loads(self) -> list[_Load]:
        now = self._clock.now()
        loads: list[_Load] = []
        for place, offer in list(self._offers.items()):
            if not offer.task.is_live or not offer.offsets:
                del self._offers[place]
                continue
            if self.is_on(offer.key) and not self._is_held(offer):
                offsets = offer.offsets - self._in_waves.get(offer.task.partition, OffsetSet())
                if offsets:
                    loads.append(_Load(offer.task, offer.key, offsets, offer.deadline_ms, offer.reason))
        for task in self._tasks.values():
            if not task.is_live:
                continue
            for lot in task.waiting_lots(Lane.SYNC).values():
                if lot.not_before is not None and lot.not_before > now:
                    continue
                if not self.is_on(lot.key) or self._holds.standing(lot.key, str(lot.extra.get(SHAPE, ""))):
                    continue
                offsets = task.ledger.held_by(lot.lot_id) - self._in_waves.get(task.partition, OffsetSet())
                offsets -= task.packed_rows.get(lot.lot_id, OffsetSet())  # about to be given up
                if offsets:
                    due_ms = min(lot.due, default=0) * 900_000
                    loads.append(_Load(task, lot.key, offsets, due_ms, lot.seal_reason or "retry", lot))
        return loads

    def _is_held(self, offer: _Offer) -> bool:
        """A canary may look whether many failures of a key have come to an end; nothing else may."""
        holds = self._holds.standing(offer.key)
        return any(offer.reason != CANARY or hold.reason != INPUT_FAILURES for hold in holds)

    async def _wave(self, load: _Load, offsets: OffsetSet, account: _AccountLane) -> None:
        task = load.task
        try:
            lot = await self._record(load, offsets)
            offer = self._offers.get((task.partition, load.key, load.reason))
            if offer is not None and offer.task is task:
                offer.offsets -= offsets
            if lot is not None:
                await self._run_wave(task, lot, account)
        except PartitionLost:
            pass  # its next owner finds the wave in the ledger, or the rows open
        finally:
            account.rows -= len(offsets)
            left = self._in_waves.get(task.partition)
            if left is not None:
                left -= offsets

    async def _record(self, load: _Load, offsets: OffsetSet) -> Lot | None:
        """Write the wave; None when none of its rows wants to run any more."""
        task, source, now = load.task, load.source, self._clock.now()
        made: list[Lot] = []
        told: list[OutRecord] = []

        def plan(ledger: PartitionLedger) -> list[LedgerEntry]:
            rows = ledger.unsettled(offsets)
            if source is None:
                rows -= ledger.held()
            else:
                rows &= ledger.held_by(source.lot_id)
            if not rows:
                return []
            share = 0.0 if source is None else len(rows) / max(1, source.own_rows)
            tokens = 0 if source is None else round(source.own_tokens * share)
            size_bytes = 0 if source is None else round(source.own_bytes * share)
            lot = Lot(
                lot_id=task.new_lot_id(),
                lane=Lane.SYNC,
                state=LotState.SUBMITTING,
                key=load.key,
                offsets=rows,
                submission=ledger.next_submission(rows),
                partitions=(task.partition,),
                created_at=now,
                rows=len(rows),
                tokens=tokens,
                bytes=size_bytes,
                own_rows=len(rows),
                own_tokens=tokens,
                own_bytes=size_bytes,
                seal_reason=load.reason,
                attempts={} if source is None else carry_attempts([source], rows, {}),
                due={} if source is None else source.due,
                submitted_at=now,
                submit_ttl_s=self._accounts[load.key.account].settings.call_timeout_s,
                extra={} if source is None else source.extra,
            )
            made.append(lot)
            told.append(self._outcomes.wave_event(lot))
            return ledger.plan_submitting(lot)

        await task.commit(plan, told, purpose="wave")
        if not made:
            return None
        lot = made[0]
        self._telemetry.count("waves", reason=lot.seal_reason)
        self._telemetry.event(
            "wave_begun",
            batch_id=lot.lot_id,
            partition=task.partition,
            rows=lot.rows,
            account=lot.key.account,
            reason=lot.seal_reason,
        )
        return lot

    async def _run_wave(self, task: PartitionTask, lot: Lot, account: _AccountLane) -> None:
        heirs, tally = Heirs(), _WaveTally()
        begun = OffsetSet()
        calls: list[asyncio.Task[None]] = []
        found = OffsetSet()
        try:
            while True:
                try:
                    async for accepted, refused in self._source.requests(task.partition, lot.offsets - found):
                        for record, bad in refused:
                            found.add(record.offset)
                            await task.settle([self._outcomes.bad_record(task, record, bad, self._clock.now())])
                        for one in accepted:
                            found.add(one.row.offset)
                            if not await self._wait_for_a_turn(account):
                                continue  # it goes back with the others that have not begun
                            begun.add(one.row.offset)
                            account.running += 1
                            work = self._call(task, lot, account, one, heirs, tally)
                            calls.append(asyncio.create_task(work, name="sync call"))
                    break
                except KafkaUnavailable:
                    self._telemetry.event("kafka_unavailable", what="sync lane")
                    await asyncio.sleep(KAFKA_PAUSE_S)
            _raise_bug(await asyncio.gather(*calls, return_exceptions=True))
        except BaseException:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            raise
        gone = lot.offsets - found
        if gone:
            self._telemetry.count("input_lost_records", len(gone))
            self._telemetry.event("input_lost", partition=task.partition, rows=len(gone))
            await task.settle([self._outcomes.lost(task, offset, self._clock.now()) for offset in gone])
        await task.flush()
        back = found - begun
        if back:
            wait_s = account.pace.wait_s(self._clock.monotonic(), 0) or 0.0
            heirs.add_all(Onward(Lane.SYNC, 0.0 if self._stopping else wait_s), RowClass.BATCH_FAILED, back, lot.due)
        await self._end_wave(task, lot, heirs, tally)

    async def _wait_for_a_turn(self, account: _AccountLane) -> bool:
        """Until a call may begin; False when the pace asks for a longer pause, or the service stops."""
        while not self._stopping:
            now_s = self._clock.monotonic()
            if account.pace.may_start(now_s, account.running):
                account.pace.began(now_s)
                return True
            wait_s = account.pace.wait_s(now_s, account.running)
            if wait_s is not None and wait_s > GIVE_BACK_S:
                return False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SLOT_LOOK_S):
                    await self._clock.sleep(SLOT_LOOK_S if wait_s is None else max(wait_s, 0.001))
        return False

    async def _call(
        self, task: PartitionTask, lot: Lot, account: _AccountLane, one: Accepted, heirs: Heirs, tally: _WaveTally
    ) -> None:
        request = one.request
        provider = self._providers[lot.key.account]
        body = self._body_of(lot, one)
        answer: SyncAnswer | None = None
        reach(Failpoint.SYNC_CALL_BEFORE)
        try:
            answer = await provider.answer(request.url, body, account.settings.call_timeout_s)
        finally:
            account.running -= 1
            now_s = self._clock.monotonic()
            if answer is None:
                account.pace.dropped(now_s)
            else:
                account.pace.ended(now_s, answer)
        reach(Failpoint.SYNC_CALL_AFTER)
        await self._take(task, lot, account, one, answer, heirs, tally)

    def _body_of(self, lot: Lot, one: Accepted) -> bytes:
        """The request's own body; a row that was too long for its model asks for the larger one."""
        routed = self._router.for_key(lot.key)
        larger = None if routed is None else routed.route.larger_model
        if larger is None or not lot.attempts_of(RowClass.TOO_LONG.value, one.row.offset):
            return one.request.body
        members = msgspec.json.decode(one.request.body, type=dict[str, msgspec.Raw])
        members["model"] = msgspec.Raw(msgspec.json.encode(larger))
        return msgspec.json.encode(members)

    async def _take(
        self,
        task: PartitionTask,
        lot: Lot,
        account: _AccountLane,
        one: Accepted,
        answer: SyncAnswer,
        heirs: Heirs,
        tally: _WaveTally,
    ) -> None:
        line, offset = answer.line, one.row.offset
        self._telemetry.count("sync_calls", account=lot.key.account, outcome=line.row_class.value)
        if self.on_answer is not None:
            self.on_answer(task.partition, offset, line, one.request.url)
        price = self._outcomes.price(lot, line)
        tally.add(line, price.batch, price.sync)
        if price.batch is not None:
            self.spent(lot.key, price.batch)
            if account.money is not None:
                account.money.spend(price.batch / 10**12, self._clock.monotonic(), self._share())
        if line.row_class is RowClass.SUCCEEDED:
            await self._holds.sync_succeeded(lot.key)
            if task.ledger.is_settled(offset):
                self._telemetry.count("waste_rows", lane="sync")
            now = self._clock.now()
            await task.settle(self._outcomes.results(task, lot, [(one.row, line, price)], None, now))
            return
        if answer.may_have_run:
            tally.unknown += 1
            self._possibly_paid_twice(lot, 1, "sync_unanswered")
            if self._sync_unknown(lot) == "fail":
                line = ResultLine("", RowClass.SYNC_UNKNOWN, code=line.code, message=line.message)
        elif (
            line.row_class is RowClass.TRANSIENT
            and account.pace.state is not BreakerState.CLOSED
            and lot.attempts_of(AWAY, offset) < MAX_AWAY
        ):
            # The endpoint is away, and this row only found that out: it loses no try. It may also be the row itself
            # that fares so each time: it is not believed for ever, and the next call is another row's.
            wait_s = (account.pace.wait_s(self._clock.monotonic(), 0) or 0.0) + AFTER_OTHERS_S
            heirs.add(Onward(Lane.SYNC, wait_s), AWAY, RowClass.TRANSIENT, offset, one.row.deadline_ms)
            return
        if line.row_class is RowClass.ACCOUNT:
            await self._holds.place_account(lot.key, "sync_account")
        elif line.row_class is RowClass.MODEL_UNAVAILABLE:
            await self._holds.place_key(lot.key, "model_unavailable")
        # Rows that waited in the ledger through a restart are read again for their call, not for the index.
        await self._fates.judge(
            task, lot, [(offset, line)], None, heirs, retry_after_s=answer.hints.retry_after_s, rows={offset: one.row}
        )

    def _sync_unknown(self, lot: Lot) -> str:
        routed = self._router.for_key(lot.key)
        return "rerun" if routed is None else routed.route.sync_unknown

    def _possibly_paid_twice(self, lot: Lot, rows: int, reason: str) -> None:
        self._telemetry.count("possibly_paid_twice_rows", rows)
        self._telemetry.event("possibly_paid_twice", batch_id=lot.lot_id, rows=rows, reason=reason)

    async def _end_wave(self, task: PartitionTask, lot: Lot, heirs: Heirs, tally: _WaveTally) -> None:
        """Hand on what travels again; the wave ends with its last row."""
        now = self._clock.now()
        told: list[OutRecord] = []

        def plan(ledger: PartitionLedger) -> list[LedgerEntry]:
            made = self._fates.heirs(task, lot, heirs, ledger)
            left = ledger.held_by(lot.lot_id)
            for heir in made:
                left -= heir.offsets
            if left:  # an answer that could not be dealt with (a full disk): the row must not stay in a dead wave
                made.append(waiting_lot(task, ledger, [lot], left, {}, self._clock, LEFT_OVER_S, Lane.SYNC))
            told.extend(self._fates.tell(task, lot, heirs, made, self._onward_record))
            told.append(self._outcomes.landed_event(task, lot, None, tally.of(), now, tally.unknown))
            return ledger.plan_settle(OffsetSet(), now, made) if made else []

        await task.commit(plan, told, purpose="land")
        self._telemetry.event(
            "wave_ended",
            batch_id=lot.lot_id,
            partition=task.partition,
            rows=lot.rows,
            succeeded=tally.classes.get(RowClass.SUCCEEDED.value, 0),
            unknown=tally.unknown,
        )

    def _onward_record(self, lot: Lot, heir: Lot, classes: Mapping[str, int]) -> OutRecord:
        return self._outcomes.onward_event(lot, heir, classes, EventKind.RETRIED, "sync")

    # ------------------------------------------------------------------------------------------ after a crash

    async def resolve(self, task: PartitionTask, lot: Lot) -> None:
        """A wave that another life began: nobody has read all its answers. Wait until its calls are over, then judge.

        What the rows come to is the route's ``sync_unknown``; either way they are counted as perhaps paid twice.
        """
        await asyncio.sleep(lot.submit_ttl_s + self._settings.limits.resolve_lag_s)
        unknown = len(task.ledger.held_by(lot.lot_id))
        if not task.is_live or lot.lot_id not in task.ledger.lots:
            return
        self._possibly_paid_twice(lot, unknown, "sync_wave_lost")
        while task.is_live:
            try:
                await self._hand_on_unknown(task, lot, unknown)
            except (KafkaUnavailable, StoreUnavailable) as error:
                self._telemetry.event("rows_not_repacked", reason=type(error).__name__)
                await asyncio.sleep(KAFKA_PAUSE_S)
            except PartitionLost:
                return
            else:
                break

    async def _hand_on_unknown(self, task: PartitionTask, lot: Lot, unknown: int) -> None:
        if self._sync_unknown(lot) == "fail":
            await self._fail_unknown(task, lot, task.ledger.held_by(lot.lot_id))
        told: list[OutRecord] = []

        def plan(ledger: PartitionLedger) -> list[LedgerEntry]:
            if lot.lot_id not in ledger.lots:
                return []
            told.append(self._outcomes.landed_event(task, lot, None, LotTally(), self._clock.now(), unknown))
            left = ledger.held_by(lot.lot_id)
            if not left:
                return ledger.plan_dissolve(lot.lot_id, [])
            heir = waiting_lot(task, ledger, [lot], left, {}, self._clock, 0.0, Lane.SYNC)
            by_class = {RowClass.SYNC_UNKNOWN.value: len(left)}
            told.append(self._outcomes.onward_event(lot, heir, by_class, EventKind.RETRIED, "crash"))
            return ledger.plan_dissolve(lot.lot_id, [heir])

        await task.commit(plan, told, purpose="dissolve")
        self._wake.set()

    async def _fail_unknown(self, task: PartitionTask, lot: Lot, rows: OffsetSet) -> None:
        await self._source.index(task.partition, rows)
        failed = [(offset, ResultLine("", RowClass.SYNC_UNKNOWN, code="answer_not_read")) for offset in rows]
        await self._fates.judge(task, lot, failed, None, Heirs())
        await task.flush()


def _raise_bug(ended: Sequence[BaseException | None]) -> None:
    """Raise what is no expected end of a call."""
    for error in ended:
        if isinstance(error, BaseException) and not isinstance(
            error, PartitionLost | StoreUnavailable | KafkaUnavailable
        ):
            raise error
