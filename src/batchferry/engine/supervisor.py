"""The supervisor: owns every long-lived task, takes partitions over and gives them up, and stops in order.

A rebalance callback only notes what changed; restoring a partition runs in a task of its own. Kept partitions work
on through a rebalance. A partition whose producer was fenced is restored only if the group still says that it is
ours; otherwise it is left to whoever fenced us.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from enum import StrEnum
from hashlib import sha256
from typing import Any

from batchferry import __version__
from batchferry.config import Settings
from batchferry.domain import machine as m
from batchferry.domain.accumulator import SealReason
from batchferry.domain.batchkey import BatchKey
from batchferry.domain.control import Poke
from batchferry.domain.envelope import EventKind
from batchferry.domain.errors import (
    KafkaUnavailable,
    LedgerDamaged,
    LedgerTooNew,
    PartitionLost,
    StoreUnavailable,
)
from batchferry.domain.ids import BatchId, LotId, ProviderBatchId
from batchferry.domain.ledger import Claim, Lane, Lot, LotState
from batchferry.domain.offsets import OffsetSet
from batchferry.domain.provider import ProviderStatus
from batchferry.domain.requests import RequestRules
from batchferry.domain.rows import RowClass
from batchferry.domain.times import parse_window_s
from batchferry.engine.actor import BatchActor
from batchferry.engine.admission import Admission
from batchferry.engine.bounds import Fullness
from batchferry.engine.canary import CanaryDesk
from batchferry.engine.deadlines import Deadlines
from batchferry.engine.failpoints import Failpoint, reach
from batchferry.engine.fates import Fates
from batchferry.engine.fleet import OUTBOX_RECORDS, FleetView
from batchferry.engine.holds import Holds
from batchferry.engine.inputwatch import InputWatch
from batchferry.engine.intake import Intake, disk_reserve_bytes
from batchferry.engine.landing import FileFacts, Landing, LandingMemory, results_gone_at
from batchferry.engine.outcomes import OutcomeWriter
from batchferry.engine.partition import QUEUED_CHUNKS, PartitionPlaces, PartitionTask, RestoreFacts, SettleLimits
from batchferry.engine.routing import Router
from batchferry.engine.rowsource import Masking, RowSource
from batchferry.engine.scheduler import PollScheduler
from batchferry.engine.sealed import SealedBatch
from batchferry.engine.slots import Slots
from batchferry.engine.splitting import RowSplitter
from batchferry.engine.sweep import Sweeper
from batchferry.engine.synclane import SyncLane
from batchferry.engine.waiting import WaitingRows
from batchferry.engine.ways import Ways
from batchferry.engine.work import BatchContext, BatchWork
from batchferry.ports import BatchProvider, Clock, KafkaPort, LocalStore, ResultArchive, Telemetry, TopicDescription
from batchferry.telemetry import error_fields

RESTORE_PAUSE_S = 1.0
RESTORE_PAUSE_MAX_S = 30.0
CONFIRM_TIMEOUT_S = 15.0
HOUSEKEEPING_S = 1.0
CREATE_PATIENCE_S = 15.0
"""On a stop, a create under way may take so long (real seconds)."""
CONTROL_LOOK_S = 1.0
"""Real seconds after which standing control records are held against the batches again."""
STUB_SWEEP_S = 3600.0
EXPIRING_SHARE = 0.1
"""Results that are not landed in the last tenth of the time for which they are kept raise an alarm."""
READ_COMMIT_S = 10.0
POLL_SILENCE_S = 60.0
"""No poll has returned for so long (real seconds): the consumer is stuck."""
LOOP_LAG_S = 5.0
"""The event loop was so late (real seconds) with what was due: something in it blocks."""
LAG_TOLD_S = 15.0
"""A lag is complained of for so long after it. While it lasted no probe was answered (its timeout is what fails); a
probe every ten seconds hears of it at least once, and one lag alone is not told three times."""
NO_PRODUCER_S = 300.0
"""An assigned partition without a live task for so long (real seconds) is a complaint."""
NO_PRODUCER_CUT_OFF_S = 900.0
"""The same while no broker answers: a restart would not bring them back."""
SETTLE_SILENCE_S = 1200.0
"""Outcomes of a partition wait and none was settled for so long (real seconds). Transactions have deadlines of half a
minute; with a hundred partitions each may have to wait for twenty-five others."""
HOUSEKEEPING_SILENCE_S = 300.0
"""The look around that is due every second has not ended for so long (real seconds): the local disk does not answer."""
CLOSE_RESERVE_S = 3.5
"""After the drain, real seconds for closing what is open, whatever hangs."""
LOST_CHUNK = 500
POKE_PAUSE_S = 10.0
"""Of one batch, news is passed on no more often than this (service time)."""
_SECONDS = re.compile(r"[\d.]+ s\b")
"""What changes in a complaint from one look to the next."""


class RunState(StrEnum):
    """Where the process is in its life."""

    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPED = "stopped"


class Supervisor:
    """One process's service. ``run`` returns when it was stopped, and raises what stopped it otherwise."""

    def __init__(
        self,
        settings: Settings,
        kafka: KafkaPort,
        providers: Mapping[str, BatchProvider],
        store: LocalStore,
        clock: Clock,
        telemetry: Telemetry,
        incarnation: str,
        rules: RequestRules,
        max_outcome_bytes: Mapping[str, int],
        partitions: Mapping[str, int],
        input_retention_s: float | None = None,
        archive: ResultArchive | None = None,
    ) -> None:
        """Take the parts.

        Args:
            providers: by account name.
            incarnation: a new id for every start of a process; stands in its claims.
            max_outcome_bytes: largest record each output topic takes, by topic.
            partitions: partition counts by topic.
            input_retention_s: how long the input topic keeps a record; None: for ever.
            archive: where copies of result files stay; None: nowhere.
        """
        self._archive = archive
        self.settings = settings
        self.state = RunState.STARTING
        self._kafka = kafka
        self._store = store
        self._clock = clock
        self._telemetry = telemetry
        self._incarnation = incarnation
        limits = settings.limits
        topics = settings.topics
        self._tasks: dict[int, PartitionTask] = {}
        self._restores: dict[int, asyncio.Task[None]] = {}
        self._unowned_since: dict[int, float] = {}
        self._refused: dict[int, str] = {}
        self._settlers: set[asyncio.Task[None]] = set()
        self._actors: dict[BatchId, BatchActor] = {}
        self._actor_tasks: dict[BatchId, asyncio.Task[None]] = {}
        self._contexts: dict[BatchId, BatchContext] = {}
        self._side_tasks: set[asyncio.Task[Any]] = set()
        self._settled: dict[int, OffsetSet] = {}
        self._failure: BaseException | None = None
        self._stop = asyncio.Event()
        self._loop_lag_s = 0.0
        self._lag_told_until = 0.0
        """A lag above the limit is complained of until then (event loop time)."""
        self._kept_house_at = 0.0
        self._stop_by = 0.0
        """When a stop must be over (event loop time)."""
        self._settling: dict[int, tuple[PartitionTask, tuple[int, int, int], float]] = {}
        """Partitions whose outcomes wait: what they had settled when we last saw progress, and when that was."""
        self._reading_again: dict[int, tuple[PartitionTask, int, int, float]] = {}
        """Restored partitions until their log is read to where it ended then: (task, from, to, since)."""
        self._complaints: set[str] = set()
        self._hold_reasons: set[str] = set()
        self._flushes_told: dict[str, datetime] = {}
        self._pokes_told: dict[str, datetime] = {}
        self._expiring: set[BatchId] = set()
        """Batches of whose results an alarm was raised."""
        self._positions_failed = 0
        self._was_assigned = False
        self._transactions = Slots(limits.max_settle_transactions)
        self._places = PartitionPlaces(topics.requests, topics.ledger_topic, topics.group)
        self._settle_limits = SettleLimits(
            limits.settle_chunk_rows, limits.settle_chunk_bytes, limits.settle_max_delay_s, limits.settle_queue_rows
        )
        self.consumer = kafka.consumer(topics.requests, topics.group)
        self._positions = kafka.read_position(topics.requests, topics.group)
        self.fleet = FleetView(kafka, clock, telemetry, topics.ledger_topic, topics.control_topic)
        self._machine = machine_settings(settings)
        router = Router(settings)
        self._router = router
        masking = Masking(settings.masker(), settings.mask.max_body_bytes)
        source = RowSource(kafka, store, clock, topics.requests, rules, router, providers, telemetry, masking)
        self._source = source
        self._partitions = dict(partitions)
        self._outcomes = OutcomeWriter(settings, clock, telemetry, max_outcome_bytes, partitions)
        self._outcomes.quote = source.quote
        self._holds = Holds(self.fleet, clock, telemetry, self._outcomes)
        router.is_held = self._holds.account_is_held
        self._scheduler = PollScheduler(providers, settings.accounts, clock, telemetry, self.post)
        self._scheduler.on_webhook_missing = self._poll_all_of
        self._admission = Admission(settings, self.fleet, self._holds, clock, telemetry, router, self._share)
        splitter = RowSplitter(settings, router, rules, telemetry)
        fates = Fates(settings, store, clock, telemetry, router, source, self._outcomes, splitter)
        self._lane = SyncLane(
            settings, providers, self._tasks, clock, telemetry, router, source, self._outcomes, fates, self._holds,
            self._share, self._task_failed,
        )  # fmt: skip
        self._lane.spent = self._admission.spent_by_sync
        self._desk = CanaryDesk(clock, telemetry, self.fleet, self._holds, self._outcomes, self._lane.offer)
        files = FileFacts()
        landing = self._landing = Landing(
            settings, store, clock, telemetry, router, source, self._outcomes, self._holds, fates, self._admission,
            files, archive,
        )  # fmt: skip
        if any(route.canary is not None for route in settings.routes.values()):
            landing.on_answer = self._lane.on_answer = self._desk.note
        self._deadlines = Deadlines(
            settings, providers, self._tasks, store, clock, telemetry, router, source, self._outcomes, self.fleet,
            self._holds, self._lane, self._state_of, self.post,
        )  # fmt: skip
        self._work = BatchWork(
            settings, providers, self._tasks, store, clock, telemetry, self.fleet, self._holds, landing,
            self._outcomes, self._scheduler, self.start_batch, self._in_flight, self._admission,
            self._deadlines.late_rows, files,
        )  # fmt: skip
        ways = Ways(settings, providers, clock, telemetry, self._outcomes, self._lane, self._desk, router, splitter)
        self.intake = Intake(
            settings, self.consumer, store, clock, telemetry, router, source, self._outcomes, providers, self._tasks,
            self._admit_sealed, ways,
        )  # fmt: skip
        outputs = [topics.results, topics.failures, topics.events, *([topics.review] if topics.review else [])]
        self._input_watch = InputWatch(
            kafka, topics.requests, self._tasks, store, clock, telemetry, input_retention_s,
            settings.limits.headroom_min_s, [*outputs, topics.ledger_topic], self._learn_topics,
        )  # fmt: skip
        self._sweeper = Sweeper(settings, providers, self._tasks, clock, telemetry, self.fleet)
        self._waiting = WaitingRows(
            self._tasks, store, clock, telemetry, router, source, self._outcomes, self.start_batch, self._is_held,
            self._deadlines.mind_waiting,
        )  # fmt: skip

    # ---------------------------------------------------------------------------------------------- running

    async def run(self) -> None:
        """Run until ``stop``; raises what ended it otherwise.

        Raises:
            KafkaUnavailable: no broker at the start.
            LedgerDamaged, LedgerTooNew: every partition we were given is refused.
        """
        self._telemetry.event("service_started", version=__version__, incarnation=self._incarnation)
        self._side("fleet view", self.fleet.run())
        # Joining does not wait for the fleet view: a predecessor that died in a transaction holds back its end until
        # restoring that partition ends the transaction. What must know the whole fleet (admission) waits for itself.
        await self._or_stop(self.consumer.start(self))
        if self._stop.is_set():
            return
        self.state = RunState.RUNNING
        self._side("intake", self.intake.run())
        self._side("sealing", self.intake.run_sealing())
        self._side("waiting rows", self._waiting.run())
        self._side("polling", self._scheduler.run())
        self._side("housekeeping", self._housekeeping())
        self._side("read position", self._commit_positions())
        self._side("input watch", self._input_watch.run())
        self._side("loop lag", self._measure_lag())
        self._side("control", self._follow_control())
        self._side("sweep", self._sweeper.run())
        self._side("sync lane", self._lane.run())
        self._side("deadlines", self._deadlines.run())
        self._side("canary", self._desk.run())
        await self._stop.wait()
        if self._failure is not None:
            raise self._failure

    async def _or_stop(self, wanted: Coroutine[Any, Any, None]) -> None:
        task, stopped = asyncio.create_task(wanted), asyncio.create_task(self._stop.wait())
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        for one in (task, stopped):
            one.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)
        if self._failure is not None:
            raise self._failure
        if not task.cancelled():
            task.result()

    def _side(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Start a side task; its death starts the drain rather than leaving the service half alive."""
        task = asyncio.create_task(work, name=name)
        self._side_tasks.add(task)
        task.add_done_callback(self._side_done)

    def _side_done(self, task: asyncio.Task[Any]) -> None:
        self._side_tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self._task_failed(task.get_name(), error)

    def _task_failed(self, name: str, error: BaseException) -> None:
        # The metric has no room for ids, which stand in the names of tasks for one batch or partition.
        kind = " ".join(word for word in name.split() if not any(one.isdecimal() for one in word))
        self._telemetry.count("tasks_failed", task=kind)
        self._telemetry.event("task_failed", task=name, **error_fields(error))
        self._failure = self._failure or error
        self._stop.set()

    async def stop(self) -> bool:
        """Drain within the budget, then close everything within ``CLOSE_RESERVE_S`` more; twice is once.

        Returns whether everything was settled that was ready to be, and closed. What is not drained is no loss: a
        stop, a kill and a start are the same thing to the ledger.
        """
        if self.state in {RunState.DRAINING, RunState.STOPPED}:
            return True
        loop = asyncio.get_running_loop()
        self._stop_by = loop.time() + self.settings.stop_budget_s + CLOSE_RESERVE_S
        self.state = RunState.DRAINING
        reach(Failpoint.STOP_BEGUN)
        self._telemetry.event("service_stopping")
        drained = True
        try:
            async with asyncio.timeout(self.settings.stop_budget_s):
                self.intake.stop()
                await asyncio.gather(self._wait_for_creates(), self._lane.drain())
                for task in [one for one in self._tasks.values() if one.is_live]:
                    with contextlib.suppress(PartitionLost):
                        await task.flush()
        except TimeoutError:
            drained = False
            self._telemetry.event("stop_unfinished", what="drain", budget_s=self.settings.stop_budget_s)
        reach(Failpoint.STOP_DRAINED)
        self._stop.set()
        closed = await self._close()
        if not closed:
            self._telemetry.event("stop_unfinished", what="close", budget_s=CLOSE_RESERVE_S)
        reach(Failpoint.STOP_CLOSED)
        self.state = RunState.STOPPED
        self._telemetry.event("service_stopped", drained=drained)
        return drained and closed

    async def _close(self) -> bool:
        """End every task and client; whether all of it ended in time.

        Each step gets a share of the time that is left, so that one that hangs does not keep the others from their
        turn: above all, the group should learn that we leave.
        """
        running = [*self._side_tasks, *self._restores.values(), *self._actor_tasks.values()]
        ended = await self._ended([one for one in running if one.get_name() != "intake"], 1 / 3, cancel=True)
        closing = [asyncio.create_task(one.close(), name="closing") for one in list(self._tasks.values())]
        ended &= await self._ended([*closing, *self._settlers], 1 / 2)
        ended &= await self._ended([asyncio.create_task(self.consumer.stop(), name="leaving")], 1 / 2)
        # The last poll may have begun something, and so may a partition that was closed just now.
        ended &= await self._ended([*self._side_tasks, *self._actor_tasks.values()], 1 / 2, cancel=True)
        last = (self._positions.stop(), self.fleet.stop())
        return await self._ended([asyncio.create_task(one, name="closing") for one in last], 1) and ended

    async def _ended(self, tasks: Sequence[asyncio.Task[Any]], share: float, *, cancel: bool = False) -> bool:
        """Wait for these at most this share of the time that is left, and cancel what is late; whether all ended."""
        if cancel:
            for task in tasks:
                task.cancel()
        if not tasks:
            return True
        left_s = max(0.0, self._stop_by - asyncio.get_running_loop().time())
        _, late = await asyncio.wait(tasks, timeout=left_s * share)
        for task in late:
            task.cancel()
        return not late

    async def _wait_for_creates(self) -> None:
        """A create under way is given time for its answer: its id is worth more than a look-up after the restart."""
        loop = asyncio.get_running_loop()
        until = loop.time() + min(CREATE_PATIENCE_S, self.settings.stop_budget_s / 2)
        while loop.time() < until and any(  # noqa: ASYNC110 (many actors, a bounded time, once in a life)
            actor.batch.state is m.BatchState.SUBMITTING for actor in self._actors.values()
        ):
            await asyncio.sleep(0.05)

    # ------------------------------------------------------------------------------------------- assignment

    def on_assignment(self, kept: frozenset[int], added: frozenset[int], lost: frozenset[int]) -> None:
        """A rebalance ended. Only notes and starts tasks: heartbeats wait for nothing here."""
        self._was_assigned = True
        self._telemetry.count("rebalances")
        self._telemetry.event("partitions_assigned", kept=sorted(kept), added=sorted(added), lost=sorted(lost))
        for partition in lost:
            self._unowned_since.pop(partition, None)
            self._refused.pop(partition, None)
            restore = self._restores.pop(partition, None)
            if restore is not None:
                restore.cancel()
            task = self._tasks.get(partition)
            if task is not None:
                task.lose("assigned to another member")
        now = asyncio.get_running_loop().time()
        for partition in added | {one for one in kept if one not in self._tasks and one not in self._restores}:
            self._unowned_since[partition] = now
            self._telemetry.event("partition_assigned", partition=partition)
            self._begin_restore(partition, 0.0)

    def on_suspect(self, partitions: frozenset[int]) -> None:
        """A rebalance began. Nothing to undo: every durable step fences by itself."""

    def _begin_restore(self, partition: int, pause_s: float) -> None:
        if partition in self._restores or self.state in {RunState.DRAINING, RunState.STOPPED}:
            return
        task = asyncio.create_task(self._restore(partition, pause_s), name=f"restore {partition}")
        self._restores[partition] = task
        task.add_done_callback(lambda done: self._restore_done(partition, done))

    def _restore_done(self, partition: int, task: asyncio.Task[None]) -> None:
        if self._restores.get(partition) is task:
            del self._restores[partition]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._task_failed(task.get_name(), error)

    async def _restore(self, partition: int, pause_s: float) -> None:
        loop = asyncio.get_running_loop()
        wait_s = pause_s
        while True:
            if wait_s:
                await asyncio.sleep(wait_s)
            wait_s = min(RESTORE_PAUSE_MAX_S, max(RESTORE_PAUSE_S, wait_s * 2))
            started = loop.time()
            task = PartitionTask(
                partition, self._kafka, self._clock, self._telemetry, self._places, self._settle_limits,
                self._transactions,
            )  # fmt: skip
            try:
                await self._store.drop_partition(partition)
                async with asyncio.timeout(self.settings.limits.restore_timeout_s):
                    facts = await self._read_ledger(task)
            except (PartitionLost, KafkaUnavailable, TimeoutError, StoreUnavailable) as error:
                self._telemetry.event("restore_failed", partition=partition, reason=type(error).__name__)
                await task.close()
                continue
            except (LedgerDamaged, LedgerTooNew) as error:
                self._refused[partition] = str(error)
                self._telemetry.event("partition_refused", partition=partition, reason=str(error))
                await task.close()
                return
            except BaseException:
                await task.close()
                raise
            self._adopt(task, facts, loop.time() - started)
            return

    async def _read_ledger(self, task: PartitionTask) -> RestoreFacts:
        await self._make_room(task.partition)
        reader = self._kafka.reader()
        await reader.start()
        try:
            return await task.restore(
                reader,
                await self._committed(task.partition),
                self._claim(),
                self._input_watch.retire_before_ms.get(task.partition),
            )
        finally:
            await reader.stop()

    async def _make_room(self, partition: int) -> None:
        """Make sure that the ledger topic has this partition: the input may have grown since the start.

        The partition counts are learned anew with it, before anything of the new partition is published.

        Raises:
            KafkaUnavailable: it does not have it, and the cluster or the settings do not let us add it.
        """
        topics = self.settings.topics
        if partition < self._partitions.get(topics.ledger_topic, 0):
            return
        admin = await self._kafka.admin()
        try:
            names = [topics.requests, topics.results, topics.failures, topics.events, topics.ledger_topic]
            names += [topics.review] if topics.review else []
            found = {name: topic for name, topic in (await admin.describe(names)).items() if topic is not None}
            there = found.get(topics.ledger_topic)
            requests = found.get(topics.requests)
            wanted = max(partition + 1, 0 if requests is None else requests.partitions)
            if there is None or there.partitions <= partition:
                if not topics.create or there is None:
                    has = 0 if there is None else there.partitions
                    text = (
                        f"{topics.ledger_topic} has {has} partitions, the input has grown to {wanted}:"
                        f" raise the ledger topic to {wanted} partitions"
                    )
                    if self._refused.get(partition) != text:
                        self._refused[partition] = text
                        self._telemetry.event("partition_refused", partition=partition, reason=text)
                    raise KafkaUnavailable(text)
                await admin.grow(topics.ledger_topic, wanted)
                self._telemetry.event("topic_grown", topic=topics.ledger_topic, partitions=wanted)
                found[topics.ledger_topic] = there._replace(partitions=wanted)
            if requests is not None:  # a broker that has not heard of the new partitions yet may have answered
                found[topics.requests] = requests._replace(partitions=wanted)
        finally:
            await admin.close()
        self._learn_topics(found)

    def _learn_topics(self, found: Mapping[str, TopicDescription]) -> None:
        """Topics only ever grow; an answer that says less is older than what we know."""
        for name, topic in found.items():
            self._partitions[name] = max(self._partitions.get(name, 0), topic.partitions)
        self._outcomes.learn_partitions(self._partitions)

    def _claim(self) -> Claim:
        return Claim(self._incarnation, __version__, self._clock.now())

    async def _committed(self, partition: int) -> int | None:
        admin = await self._kafka.admin()
        try:
            return (await admin.committed(self.settings.topics.group, self.settings.topics.requests)).get(partition)
        finally:
            await admin.close()

    def _adopt(self, task: PartitionTask, facts: RestoreFacts, took_s: float) -> None:
        partition = task.partition
        self._unowned_since.pop(partition, None)
        self._refused.pop(partition, None)
        task.on_lost = self._on_lost
        task.on_settled = self._on_settled
        task.on_missed = self._outcomes.missed_event
        self._tasks[partition] = task
        settler = asyncio.create_task(task.run_settling(), name=f"settle {partition}")
        self._settlers.add(settler)
        settler.add_done_callback(self._settlers.discard)
        settler.add_done_callback(self._side_done)
        if facts.lost:
            self._telemetry.count("input_lost_records", len(facts.lost))
            self._telemetry.event(
                "input_lost",
                partition=partition,
                rows=len(facts.lost),
                first=facts.lost.first(),
                last=facts.lost.last(),
            )
            self._side(f"lost input {partition}", self._report_lost(task, facts.lost))
        self._input_watch.retire_before_ms.pop(partition, None)
        if facts.expiring:
            self._telemetry.count("input_expiring_records", len(facts.expiring))
            self._telemetry.event(
                "input_expiring",
                partition=partition,
                rows=len(facts.expiring),
                first=facts.expiring.first(),
                last=facts.expiring.last(),
            )
            self._side(f"expiring input {partition}", self._report_expiring(task, facts))
        for lot in list(task.ledger.lots.values()):
            if lot.lane is Lane.BATCH and lot.state in {LotState.SUBMITTING, LotState.SUBMITTED, LotState.DONE}:
                self._resume_batch(lot)
            elif lot.lane is Lane.SYNC and lot.is_at_provider:
                self._side(f"lost wave {lot.lot_id}", self._lane.resolve(task, lot))
        self.consumer.resume(partition, task.next_offset)
        self._telemetry.observe("restore_seconds", took_s)
        self._telemetry.event(
            "partition_restored",
            partition=partition,
            watermark=task.ledger.watermark,
            next_offset=task.next_offset,
            lots=len(task.ledger.lots),
            records=facts.ledger_records,
            took_s=round(took_s, 3),
        )
        reach(Failpoint.RESTORE_ADOPTED)
        self._reading_again[partition] = (
            task, task.next_offset, facts.log_end, asyncio.get_running_loop().time()
        )  # fmt: skip
        self._note_readiness()

    async def _report_lost(self, task: PartitionTask, lost: OffsetSet) -> None:
        chunk = []
        with contextlib.suppress(PartitionLost):
            for offset in lost:
                chunk.append(self._outcomes.lost(task, offset, self._clock.now()))
                if len(chunk) >= LOST_CHUNK:
                    await task.settle(chunk)
                    chunk = []
            await task.settle(chunk)

    async def _report_expiring(self, task: PartitionTask, facts: RestoreFacts) -> None:
        """Give rows up that the log will soon delete, oldest first, while their words can still be quoted."""
        left = facts.expiring.copy()
        stop = (left.last() or 0) + 1
        with contextlib.suppress(PartitionLost):
            while task.is_live and left:
                try:
                    async for records in self._source.read(task.partition, left.copy()):
                        now = self._clock.now()
                        await task.settle([self._outcomes.expiring(task, record, now) for record in records])
                        left -= OffsetSet(record.offset for record in records)
                    await self._report_lost(task, left)  # the log was faster than we
                    left = OffsetSet()
                except KafkaUnavailable:
                    self._telemetry.event("kafka_unavailable", what="expiring input", pause_s=RESTORE_PAUSE_S)
                    await asyncio.sleep(RESTORE_PAUSE_S)
            await task.flush()
            # Reading went on behind these rows, so nobody else will tell of the offsets among them that hold no record.
            task.note_gap(max(facts.log_start, task.ledger.watermark), stop)

    def _on_lost(self, task: PartitionTask) -> None:
        """A partition's life ended: fenced, unknown commit, moved, or stopped. Must not wait for anything."""
        partition = task.partition
        if self._tasks.get(partition) is not task:
            return
        del self._tasks[partition]
        told = "partition_released" if self.state is RunState.DRAINING else "partition_lost"
        self._telemetry.event(told, partition=partition, reason=task.lost_reason)
        self.intake.drop_partition(partition)
        self._lane.drop_partition(partition)
        self._desk.drop_partition(partition)
        self.consumer.pause([partition])
        self._tell_actors(partition)
        if self.state is not RunState.RUNNING:
            return
        self._side(f"after loss {partition}", self._after_loss(task))

    def _tell_actors(self, partition: int) -> None:
        """Batches with no partition left here end; a file not yet submitted that names the lost rows is unusable."""
        for batch_id, actor in self._actors.items():
            if partition not in actor.batch.partitions:
                continue
            context = self._contexts[batch_id]
            sealed = context.sealed
            state = actor.batch.state
            if state is m.BatchState.REFUSED or (
                state is m.BatchState.SUBMITTING and len(context.recorded) < len(actor.batch.partitions)
            ):
                continue  # nothing was created and nothing will be: it deletes its file and ends by itself
            still_ours = bool(self._work.own_lots(batch_id)) or (
                sealed is not None and any(part.task.is_live for part in sealed.parts.values())
            )
            if state in {m.BatchState.SEALED, m.BatchState.UPLOADING}:
                actor.post(m.InputUnusable())  # it ends by itself, and deletes the file of an upload under way
            elif not still_ours and state is not m.BatchState.LANDED:
                self._actor_tasks[batch_id].cancel()
            elif sealed is not None:
                actor.post(m.InputUnusable())

    async def _after_loss(self, task: PartitionTask) -> None:
        partition = task.partition
        await task.close()
        if partition in self._tasks or partition in self._restores:
            return  # the next life has begun, and began by dropping what this one left
        with contextlib.suppress(StoreUnavailable):
            await self._store.drop_partition(partition)
        while self._is_ours_to_restore(partition):
            self._unowned_since.setdefault(partition, asyncio.get_running_loop().time())
            if await self.consumer.confirms_assignment(partition, CONFIRM_TIMEOUT_S):
                self._begin_restore(partition, RESTORE_PAUSE_S)
                return
            # Not certain now (no broker, a rebalance). A group that survived an outage tells us nothing new.
            await asyncio.sleep(self.settings.kafka.session_timeout_s)

    def _is_ours_to_restore(self, partition: int) -> bool:
        return (
            self.state is RunState.RUNNING
            and partition in self.consumer.assignment()
            and partition not in self._tasks
            and partition not in self._restores
        )

    def _on_settled(self, partition: int, offsets: OffsetSet) -> None:
        self._settled.setdefault(partition, OffsetSet()).update(offsets)

    # --------------------------------------------------------------------------------------------- batches

    def _is_held(self, key: BatchKey, shape: str) -> bool:
        return bool(self._holds.standing(key, shape))

    def _share(self) -> float:
        """The part of the fleet's budgets that is ours: the partitions we own of all there are."""
        total = max(1, self._partitions.get(self.settings.topics.requests, 1))
        return min(1.0, len(self._tasks) / total)

    def _state_of(self, batch_id: BatchId) -> m.BatchState | None:
        actor = self._actors.get(batch_id)
        return None if actor is None else actor.batch.state

    def _in_flight(self) -> int:
        """Batches that have a place: from their admission, before their state shows it, until they have landed."""
        return sum(
            1
            for batch_id, actor in self._actors.items()
            if (actor.batch.state not in {m.BatchState.SEALED, m.BatchState.LANDED})
            or (actor.batch.state is m.BatchState.SEALED and self._contexts[batch_id].is_admitted)
        )

    async def _admit_sealed(self, sealed: SealedBatch) -> None:
        """A freshly sealed batch: repeated requests in it are answered once; the rest leaves."""
        if not sealed.parts:
            self._store.delete_segments(sealed.refs)
            return
        await self._coalesce(sealed)
        if sealed.rows and not self._goes_by_lane(sealed):
            self.start_batch(sealed)
        else:
            self._store.delete_segments(sealed.refs)

    def _goes_by_lane(self, sealed: SealedBatch) -> bool:
        """A batch that its time sealed long before it was full may be worth single calls, where the route says so."""
        routed = self._router.for_key(sealed.key)
        if routed is None or routed.route.small != "sync" or sealed.reason is not SealReason.TIME:
            return False
        if sealed.rows >= routed.route.min_rows or not self._lane.reserve(sealed.key, sealed.rows):
            return False
        self._telemetry.event("small_batch_unpacked", batch_id=sealed.batch_id, rows=sealed.rows)
        for part in sealed.parts.values():
            deadline_ms = min(part.due, default=0) * 900_000
            for offset in part.offsets:
                self._lane.offer(part.task, sealed.key, offset, deadline_ms, "small")
        return True

    async def _coalesce(self, sealed: SealedBatch) -> None:
        routed = self._router.for_key(sealed.key)
        policy = "coalesce" if routed is None else routed.route.duplicates
        if policy == "allow":
            return
        for partition, part in list(sealed.parts.items()):
            if not part.task.is_live:
                continue
            groups = await self._store.same_custom_ids(partition, part.offsets)
            if not groups:
                continue
            suspects = OffsetSet(offset for group in groups for offset in group)
            bodies: dict[int, tuple[bytes, int]] = {}  # digest and size: the lines themselves could be the whole file
            try:
                async for lines in self._store.stream(sealed.refs, {partition: suspects}):
                    bodies.update({offset: (sha256(line).digest(), len(line)) for _, offset, line in lines})
            except PartitionLost:
                continue
            rows = await self._store.get_rows(partition, list(suspects))
            settlements = []
            for group in groups:
                first_of: dict[bytes, int] = {}
                for offset in group:
                    body, size_bytes = bodies.get(offset, (b"", 0))
                    first = first_of.setdefault(body, offset)
                    if first == offset and (policy == "coalesce" or len(first_of) == 1):
                        continue
                    if offset not in rows:
                        continue  # nothing is known of it but its line: let it run
                    earlier = first if first != offset else group[0]
                    settlements.append(self._outcomes.duplicate(part.task, rows[offset], earlier, self._clock.now()))
                    part.offsets.discard(offset)
                    part.bytes -= size_bytes
            if settlements:
                self._telemetry.event("duplicates_coalesced", partition=partition, rows=len(settlements))
                with contextlib.suppress(PartitionLost):
                    await part.task.settle(settlements)
            if not part.offsets:
                del sealed.parts[partition]

    def start_batch(self, sealed: SealedBatch) -> None:
        """Run a sealed batch; one that is sealed while we stop is left to the next owner, who reads its rows again."""
        if self.state in {RunState.DRAINING, RunState.STOPPED}:
            with contextlib.suppress(StoreUnavailable):
                self._store.delete_segments(sealed.refs)
            return
        now = self._clock.now()
        oldest_wait_s = max(0.0, now.timestamp() - sealed.oldest_t0_ms / 1000)
        self._telemetry.count("batches_sealed", reason=sealed.reason.value)
        self._telemetry.observe("batch_rows", sealed.rows)
        self._telemetry.observe("batch_bytes", sealed.bytes)
        self._telemetry.observe("record_wait_seconds", oldest_wait_s)
        self._telemetry.event(
            "batch_sealed",
            batch_id=sealed.batch_id,
            rows=sealed.rows,
            bytes=sealed.bytes,
            tokens=sealed.tokens,
            reason=sealed.reason.value,
            partitions=list(sealed.partitions),
            key=sealed.key.label,
            waited_s=round(oldest_wait_s),
        )
        batch = m.Batch(
            batch_id=sealed.batch_id,
            key=sealed.key,
            partitions=sealed.partitions,
            rows=sealed.rows,
            window_s=parse_window_s(sealed.key.completion_window),
            sealed_at=sealed.sealed_at,
            state=m.BatchState.SEALED,
            state_since=now,
        )
        details = _details(sealed.key, sealed.partitions, sealed.bytes, sealed.tokens, sealed.reason.value)
        details["waiting_s"] = oldest_wait_s
        self._run_actor(batch, BatchContext(sealed, sealed.key.account), details)
        event = self._outcomes.plain_event(
            EventKind.SEALED,
            f"{batch.batch_id}-sealed",
            batch,
            rows=sealed.rows,
            bytes=sealed.bytes,
            tokens=sealed.tokens,
            reason=sealed.reason.value,
            partitions=list(sealed.partitions),
            waited_s=round(oldest_wait_s, 3),
        )
        self._side(f"sealed event {batch.batch_id}", self.fleet.send([event]))

    def _resume_batch(self, lot: Lot) -> None:
        """A restored lot's batch: an actor may know it already (a sibling's partition was here before)."""
        batch_id = BatchId(lot.lot_id)
        actor = self._actors.get(batch_id)
        if actor is not None and not actor.is_over:
            actor.post(m.LotGained())
            return
        if lot.key.account not in self.settings.accounts:
            self._telemetry.event("account_unknown", batch_id=batch_id, account=lot.key.account)
            return
        state = {
            LotState.SUBMITTING: m.BatchState.SUBMISSION_UNKNOWN,
            LotState.SUBMITTED: m.BatchState.VALIDATING,
            LotState.DONE: m.BatchState.LANDED,
        }[lot.state]
        now = self._clock.now()
        account = self.settings.accounts[lot.key.account]
        batch = m.Batch(
            batch_id=batch_id,
            key=lot.key,
            partitions=lot.partitions,
            rows=lot.rows,
            window_s=parse_window_s(lot.key.completion_window),
            sealed_at=lot.created_at,
            state=state,
            state_since=now,
            input_file_id=lot.input_file_id,
            provider_batch_id=lot.provider_batch_ids[0] if lot.provider_batch_ids else None,
            submitted_at=lot.submitted_at,
            poll_interval_s=account.poll.first_s,
        )
        context = BatchContext(None, lot.key.account)
        if lot.state is LotState.SUBMITTING:
            wait_s = lot.submit_ttl_s + self.settings.limits.resolve_lag_s  # real seconds: the creator counts in them
            context.resolve_not_before = asyncio.get_running_loop().time() + wait_s
        self._run_actor(batch, context, _details(lot.key, lot.partitions, lot.bytes, lot.tokens, lot.seal_reason))

    def _run_actor(self, batch: m.Batch, context: BatchContext, details: Mapping[str, object]) -> None:
        batch_id = batch.batch_id

        async def run_effect(current: m.Batch, effect: m.Effect) -> m.Event | None:
            return await self._work.run(context, current, effect)

        account = self.settings.accounts[context.account]
        settings = replace(
            self._machine,
            poll_first_s=account.poll.first_s,
            poll_factor=account.poll.factor,
            poll_max_s=account.poll.max_s,
            poll_floor_s=account.poll.floor_s,
        )
        actor = BatchActor(
            batch, settings, run_effect, self._batch_changed, self._store, self._clock, self._telemetry,
            self.settings.limits.mailbox_events, details,
            lambda: self._scheduler.stretch(batch.key.account),
        )  # fmt: skip
        self._actors[batch_id] = actor
        self._contexts[batch_id] = context
        task = asyncio.create_task(actor.run(), name=f"batch {batch_id}")
        self._actor_tasks[batch_id] = task
        task.add_done_callback(lambda done: self._actor_done(batch_id, done))

    def _actor_done(self, batch_id: BatchId, task: asyncio.Task[None]) -> None:
        if self._actor_tasks.get(batch_id) is task:
            del self._actor_tasks[batch_id]
            actor = self._actors.pop(batch_id, None)
            context = self._contexts.pop(batch_id, None)
            self._scheduler.forget(batch_id)
            self._admission.forget(batch_id)
            self._holds.probe_ended(batch_id)
            if actor is not None and actor.batch.state is not m.BatchState.QUARANTINED:
                self._resume_left_behind(batch_id)
            elif context is not None and context.sealed is not None and self.state is RunState.RUNNING:
                # No lot names these rows yet: the next lives of their partitions read them again.
                for part in context.sealed.parts.values():
                    part.task.lose(f"batch {batch_id} is quarantined")
        self._side_done(task)

    def _resume_left_behind(self, batch_id: BatchId) -> None:
        """A partition may have come, with its lot, while the batch's actor was ending and heard no more of it."""
        if self.state is not RunState.RUNNING:
            return
        for task in self._tasks.values():
            lot = task.ledger.lots.get(LotId(batch_id))
            if task.is_live and lot is not None and (lot.is_at_provider or lot.state is LotState.DONE):
                self._resume_batch(lot)

    async def _batch_changed(self, before: m.Batch, after: m.Batch, _event: m.Event) -> None:
        self._telemetry.event(
            "batch_state_changed",
            batch_id=after.batch_id,
            from_state=before.state.value,
            to_state=after.state.value,
            provider_status=after.provider_status,
        )
        if after.state is m.BatchState.IN_PROGRESS or (
            after.state is m.BatchState.LANDING
            and after.snapshot is not None
            and after.snapshot.status is not ProviderStatus.FAILED
        ):
            await self._holds.probe_succeeded(after.key, after.batch_id)
        if after.state is m.BatchState.LANDING:
            self._tell_ended(after)
        elif after.state is m.BatchState.DISSOLVED:
            self._telemetry.count("batches_ended", status=after.state.value)
        elif after.state is m.BatchState.LANDED:
            await self._tell_landed(after)
        await self.fleet.send(self._outcomes.state_event(before, after, self._clock.now()))

    def _tell_ended(self, batch: m.Batch) -> None:
        """The provider is done with a batch. Every replica that has a part in it tells so."""
        status = batch.provider_status if batch.snapshot is None else batch.snapshot.status.value
        self._telemetry.count("batches_ended", status=status)
        if batch.submitted_at is not None and batch.ended_at is not None:
            took_s = max(0.0, (batch.ended_at - batch.submitted_at).total_seconds())
            self._telemetry.observe("batch_turnaround_seconds", took_s, account=batch.key.account)

    async def _tell_landed(self, batch: m.Batch) -> None:
        context = self._contexts.get(batch.batch_id)
        memory = LandingMemory() if context is None else context.memory
        tally = memory.tally
        succeeded, missing = tally.rows(RowClass.SUCCEEDED), tally.rows(RowClass.MISSING)
        failed = max(0, tally.all_rows - succeeded - tally.retried)
        with contextlib.suppress(StoreUnavailable):
            await self._store.save_batch(
                {"batch_id": batch.batch_id, "succeeded": succeeded, "failed": failed, "missing": missing}
            )
        self._telemetry.event(
            "batch_landed",
            batch_id=batch.batch_id,
            provider_batch_id=batch.provider_batch_id,
            status=batch.provider_status,
            rows=batch.rows,
            succeeded=succeeded,
            failed=failed,
            retried=tally.retried,
            missing=missing,
        )
        self._telemetry.batch_span(
            "batch",
            {
                "batch_id": batch.batch_id,
                "provider_batch_id": batch.provider_batch_id,
                "account": batch.key.account,
                "endpoint": batch.key.endpoint,
                "model": batch.key.model,
                "rows": batch.rows,
                "status": batch.provider_status,
                "succeeded": succeeded,
                "failed": failed,
                "missing": missing,
                "started_at": batch.sealed_at,
                "ended_at": self._clock.now(),
            },
            memory.parents,
        )

    def post(self, batch_id: BatchId, event: m.Event) -> None:
        """Give a batch news, if it is still here."""
        actor = self._actors.get(batch_id)
        if actor is not None:
            actor.post(event)

    # ------------------------------------------------------------------------------------------ side tasks

    async def _housekeeping(self) -> None:
        next_sweep = 0.0
        loop = asyncio.get_running_loop()
        while True:
            self._kept_house_at = loop.time()
            await asyncio.sleep(HOUSEKEEPING_S)
            settled, self._settled = self._settled, {}
            for partition, offsets in settled.items():
                with contextlib.suppress(StoreUnavailable):
                    await self._store.drop_rows(partition, offsets)
            self._outcomes.tell_counts()
            self._measure()
            self._watch()
            await self._mind_retention()
            if loop.time() >= next_sweep:
                next_sweep = loop.time() + STUB_SWEEP_S
                for task in list(self._tasks.values()):
                    with contextlib.suppress(PartitionLost):
                        await task.drop_old_stubs(self._clock.now())
                if 0 in self._tasks:
                    await self._holds.tidy()
                if self._archive is not None:
                    gone = await self._archive.expire(self._clock.now())
                    if not isinstance(gone, StoreUnavailable) and gone:
                        self._telemetry.event("archive_dropped", files=len(gone))

    async def _mind_retention(self) -> None:
        """Tell of results that the provider will delete soon and that are not landed."""
        now = self._clock.now()
        for batch_id, actor in list(self._actors.items()):
            batch = actor.batch
            if batch.state is not m.BatchState.LANDING or batch.snapshot is None or batch_id in self._expiring:
                continue
            account = self.settings.accounts[batch.key.account]
            gone_at = results_gone_at(batch.snapshot, account)
            if gone_at is None or account.results_kept_s is None:
                continue
            if (gone_at - now).total_seconds() < account.results_kept_s * EXPIRING_SHARE:
                self._expiring.add(batch_id)
                await self._holds.alarm("results_expiring", batch_id, batch.key, rows=batch.rows)
        self._expiring &= self._actors.keys()

    def _measure(self) -> None:
        gauge = self._telemetry.gauge
        by_state: dict[str, int] = dict.fromkeys((state.value for state in m.BatchState), 0)
        for actor in self._actors.values():
            by_state[actor.batch.state.value] += 1
        for state, count in by_state.items():
            gauge("batches", count, state=state)
        gauge("open_rows", self.intake.accumulator.rows)
        gauge("open_keys", len(self.intake.accumulator))
        gauge("partitions", len(self._tasks), state="ready")
        gauge("partitions", len(self._restores), state="restoring")
        gauge("partitions", len(self._refused), state="refused")
        unsettled = sum(
            max(0, task.next_offset - task.ledger.watermark - len(task.ledger.settled)) for task in self._tasks.values()
        )
        gauge("unsettled_records", unsettled)
        gauge("settle_queue_rows", sum(task.queued_rows for task in self._tasks.values()))
        now = self._clock.now()
        next_due_ms = self.intake.accumulator.next_due_ms()
        gauge("next_ship_by_seconds", 0.0 if next_due_ms is None else next_due_ms / 1000 - now.timestamp())
        gauge("poll_overdue_seconds", self._scheduler.overdue_s())
        waiting = (len(task.ledger.held_by(lot_id)) for task in self._tasks.values() for lot_id in task.waiting_lots())
        gauge("waiting_rows", sum(waiting))
        gauge("sync_waiting_rows", self._lane.waiting_rows)
        gauge("canary_waiting_rows", self._desk.waiting_rows)
        for account, (breaker, concurrency) in self._lane.states().items():
            gauge("sync_concurrency", concurrency, account=account)
            gauge("sync_breaker_is_open", 0 if breaker == "closed" else 1, account=account)
        gauge("waiting_lots", sum(len(task.waiting_lots()) for task in self._tasks.values()))
        held = Counter(hold.reason for hold in self.fleet.control.all_standing(now))
        self._hold_reasons |= held.keys()
        for reason in self._hold_reasons:  # a gauge does not forget: one whose holds are over must say 0
            gauge("held_keys", held[reason], reason=reason)
        for bound, (used, limit) in self.fullness().items():
            gauge("bound_used", used, bound=bound)
            gauge("bound_limit", limit, bound=bound)
        self._note_settling()

    def fullness(self) -> Fullness:
        """How full each bound of the engine and the store is now, and where it lies; see ``engine.bounds``."""
        limits, tasks = self.settings.limits, self._tasks.values()
        free, total = self._store.disk_bytes
        calls = max(self._scheduler.calls.values(), key=lambda one: one.taken / one.limit)
        return {
            **self._store.fullness(),
            "spool_bytes": (self._store.spooled_bytes, limits.spool_high_bytes),
            "disk_used_bytes": (total - free, total - disk_reserve_bytes(total)),
            "index_rows": (self._store.indexed_rows, limits.max_index_rows),
            "open_keys": (len(self.intake.accumulator), limits.max_open_keys),
            "batches_in_flight": (self._in_flight(), limits.max_batches_in_flight),
            "uploads": (self._work.uploads.taken, self._work.uploads.limit),
            "downloads": (self._landing.downloads.taken, self._landing.downloads.limit),
            "poll_calls": (calls.taken, calls.limit),
            "sync_calls": self._lane.calls,
            "mailbox_events": (
                max((actor.waiting_events for actor in self._actors.values()), default=0),
                limits.mailbox_events,
            ),
            "settle_queue_rows": (max((task.queued_rows for task in tasks), default=0), limits.settle_queue_rows),
            "settle_queue_bytes": (
                max((task.queued_bytes for task in tasks), default=0),
                QUEUED_CHUNKS * limits.settle_chunk_bytes,
            ),
            "settle_transactions": (self._transactions.taken, self._transactions.limit),
            "event_outbox_records": (self.fleet.waiting_events, OUTBOX_RECORDS),
        }

    def _note_settling(self) -> None:
        """Remember since when each partition that has outcomes waiting has settled nothing."""
        now = asyncio.get_running_loop().time()
        seen: dict[int, tuple[PartitionTask, tuple[int, int, int], float]] = {}
        for partition, task in self._tasks.items():
            if not task.queued_rows:
                continue
            mark = (task.ledger.watermark, len(task.ledger.settled), task.queued_rows)
            before = self._settling.get(partition)
            same = before is not None and before[0] is task and before[1] == mark
            seen[partition] = before if before is not None and same else (task, mark, now)
        self._settling = seen

    def _watch(self) -> None:
        """Tell what has changed since the last look and has no place of its own where it happens."""
        loop = asyncio.get_running_loop()
        complaints = self.complaints()
        self._telemetry.gauge("watchdog_complaints", len(complaints))
        kinds = {_SECONDS.sub("", one): one for one in complaints}
        for kind in kinds.keys() - self._complaints:
            self._telemetry.event("watchdog_complaint", complaint=kinds[kind])
        self._complaints = set(kinds)
        for partition, (task, start, end, since) in list(self._reading_again.items()):
            if self._tasks.get(partition) is not task:
                del self._reading_again[partition]
            elif task.next_offset >= end:
                del self._reading_again[partition]
                self._telemetry.event(
                    "partition_caught_up",
                    partition=partition,
                    records=max(0, end - start),
                    duration_s=round(loop.time() - since, 3),
                )

    async def _commit_positions(self) -> None:
        while True:
            await asyncio.sleep(READ_COMMIT_S)
            positions = {p: task.next_offset for p, task in self._tasks.items() if task.is_live}
            if positions:
                await self._positions.commit(positions)
                # A committer that keeps count of its failures says so by an attribute: the port has no room for it.
                failed = getattr(self._positions, "failures", 0)
                if failed > self._positions_failed:
                    self._telemetry.count("read_position_failures", failed - self._positions_failed)
                    reason = str(getattr(self._positions, "last_failure", ""))
                    self._telemetry.event("read_position_failed", error=reason)
                    self._positions_failed = failed

    async def _measure_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(0.5)
            self._note_lag(max(0.0, loop.time() - before - 0.5))
            self._telemetry.gauge("event_loop_lag_seconds", self._loop_lag_s)

    def _note_lag(self, lag_s: float) -> None:
        now = asyncio.get_running_loop().time()
        if lag_s > LOOP_LAG_S:
            self._lag_told_until = now + LAG_TOLD_S
        if lag_s > LOOP_LAG_S or now >= self._lag_told_until:
            self._loop_lag_s = lag_s

    async def _follow_control(self) -> None:
        """Do what standing records ask for. They are states: a wish may be older than the batch's actor or rows."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CONTROL_LOOK_S):
                    await self.fleet.changed.wait()
            self.fleet.changed.clear()
            for gone in self._flushes_told.keys() - self.fleet.control.flushes.keys():
                del self._flushes_told[gone]
            for digest, flush in list(self.fleet.control.flushes.items()):
                if self._flushes_told.get(digest) != flush.before:
                    self._flushes_told[digest] = flush.before
                    self._telemetry.event("flush_asked", scope=digest)
                await self.intake.flush(None if digest == "all" else digest, flush.before)
            for batch_id in list(self.fleet.control.cancels):
                actor = self._actors.get(batch_id)
                if actor is not None and actor.batch.state in m.IN_FLIGHT - {m.BatchState.CANCELLING}:
                    actor.post(m.CancelWanted("operator"))
            pokes = self.fleet.control.pokes
            for gone in self._pokes_told.keys() - pokes.keys():
                del self._pokes_told[gone]
            for actor in list(self._actors.values()) if pokes else ():
                provider_batch_id = actor.batch.provider_batch_id
                poke = None if provider_batch_id is None else pokes.get(provider_batch_id)
                if poke is not None and self._pokes_told.get(poke.provider_batch_id) != poke.at:
                    self._pokes_told[poke.provider_batch_id] = poke.at
                    self._scheduler.told(actor.batch.key.account, poke.provider_batch_id)
                    actor.post(m.Poked())

    def _poll_all_of(self, account: str) -> None:
        """An expected webhook did not come: polls that were put off because of trust are brought forward."""
        for actor in self._actors.values():
            if actor.batch.key.account == account:
                actor.post(m.Poked())

    async def poke(self, account: str, provider_batch_id: str) -> bool | None:
        """Somebody says that there is news of a provider batch: bring its poll forward, on whichever replica has it.

        True: it will be; False: it was just now; None: nobody waits for this batch of this account.
        Only what a live lot names is written to the control topic, and not more often than every ``POKE_PAUSE_S``.
        """
        now, named = self._clock.now(), ProviderBatchId(provider_batch_id)
        if not self.fleet.is_waited_for(account, named):
            return None
        before = self.fleet.control.pokes.get(named)
        if before is not None and (now - before.at).total_seconds() < POKE_PAUSE_S:
            return False
        await self.fleet.publish(Poke(named, now))
        return True

    # -------------------------------------------------------------------------------------------- health

    def _note_readiness(self) -> None:
        if not self.unready():
            self._telemetry.event("service_ready", partitions=sorted(self._tasks))

    def unready(self) -> Sequence[str]:
        """Why this replica does not do its whole work now; empty when ready."""
        if self.state is not RunState.RUNNING:
            return [self.state.value]
        if not self._was_assigned:
            return ["the group has not given out partitions yet"]
        if self._input_watch.input_is_missing:
            return [f"the topic {self.settings.topics.requests} does not exist"]
        restoring = sorted(self._restores.keys() - self._refused.keys())
        reasons = [f"partition {partition} is being restored" for partition in restoring]
        reasons += [f"partition {partition} refused: {why}" for partition, why in sorted(self._refused.items())]
        return reasons

    def complaints(self) -> Sequence[str]:
        """What the watchdog finds wrong: any of these means that a restart is better than waiting."""
        loop = asyncio.get_running_loop()
        if self.state is RunState.DRAINING:  # what is being given up need not be whole, but it has to end
            late_s = loop.time() - self._stop_by
            return [f"the stop should have been over {late_s:.0f} s ago"] if late_s > 0 else []
        if self.state is not RunState.RUNNING:
            return []
        found = list(self.consumer.complaints())
        if self.intake.last_poll_at and loop.time() - self.intake.last_poll_at > POLL_SILENCE_S:
            found.append(f"no poll has returned for {POLL_SILENCE_S:.0f} s")
        if self._loop_lag_s > LOOP_LAG_S:
            found.append(f"the event loop was late by {self._loop_lag_s:.1f} s")
        now = loop.time()
        # A consumer that can tell when it is cut off from the cluster does so by an attribute.
        cut_off_at = getattr(self.consumer, "cut_off_at", float("-inf"))
        found += [
            f"partition {partition} has had no live producer for {now - since:.0f} s"
            for partition, since in self._unowned_since.items()
            if partition not in self._refused
            and (now - max(since, cut_off_at) > NO_PRODUCER_S or now - since > NO_PRODUCER_CUT_OFF_S)
        ]
        found += [
            f"partition {partition} has outcomes waiting and has settled nothing for {now - since:.0f} s"
            for partition, (task, _, since) in self._settling.items()
            if task.is_live and now - since > SETTLE_SILENCE_S
        ]
        found += self._scheduler.complaints()
        if self._kept_house_at and now - self._kept_house_at > HOUSEKEEPING_SILENCE_S:
            found.append(f"the look around has not ended for {now - self._kept_house_at:.0f} s")
        return found

    def status(self) -> Mapping[str, object]:
        """A short account of what waits and what is on its way; ids, counts and instants only."""
        return {
            "state": self.state.value,
            "partitions": {
                str(partition): {
                    "next_offset": task.next_offset,
                    "watermark": task.ledger.watermark,
                    "lots": len(task.ledger.lots),
                }
                for partition, task in sorted(self._tasks.items())
            },
            "waiting": [
                {"key": one.key.label, "rows": one.rows, "bytes": one.bytes, "ship_by_ms": one.ship_by_ms}
                for one in self.intake.accumulator
            ],
            "batches": {batch_id: actor.batch.state.value for batch_id, actor in self._actors.items()},
            "holds": [
                {
                    "scope": hold.scope,
                    "reason": hold.reason,
                    "label": hold.label,
                    "until": None if hold.until is None else hold.until.isoformat(),
                }
                for hold in self.fleet.control.all_standing(self._clock.now())
            ],
        }

    async def batches(self) -> Sequence[Mapping[str, object]]:
        """The ``batch_jobs`` read model."""
        return await self._store.batches()

    async def batch_events(self, batch_id: str) -> Sequence[Mapping[str, object]]:
        """One batch's history."""
        return await self._store.batch_events(batch_id)


def machine_settings(settings: Settings) -> m.MachineSettings:
    """The machine's numbers as the settings have them (an account's poll settings come on top)."""
    limits = settings.limits
    return m.MachineSettings(
        file_reuse_s=limits.file_reuse_s,
        lookup_pause_s=limits.lookup_pause_s,
        landing_pause_s=limits.missing_confirm_s,
        missing_grace_s=limits.missing_grace_s,
        window_grace_s=limits.window_grace_s,
    )


def _details(key: BatchKey, partitions: Sequence[int], size_bytes: int, tokens: int, reason: str) -> dict[str, object]:
    return {
        "account": key.account,
        "endpoint": key.endpoint,
        "model": key.model,
        "completion_window": key.completion_window,
        "slice": key.slice,
        "partitions": list(partitions),
        "bytes": size_bytes,
        "tokens": tokens,
        "seal_reason": reason,
    }
