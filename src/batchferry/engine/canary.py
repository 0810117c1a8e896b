"""Canaries: a new kind of prompt first runs a random sample; the other rows wait for what it comes to.

A kind of prompt (a *shape*: model, system prompt, tools and answer format) without a verdict gathers its rows here, as
offsets only. Once enough have come, or after a while, a fair sample goes ahead, through the sync lane or in a batch of
its own. Its verdict stands in the control topic, so that every replica and every later life knows it: a good one lets
the rows go, a bad one holds the shape until an operator releases it. Rows whose time to leave comes before the verdict
follow the route's ``timeout``.

Nothing here is durable: a process that dies leaves its waiting rows open, and they are read again.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from batchferry.config import CanarySettings
from batchferry.domain.answercheck import AnswerSchema, check_answer, compile_schema
from batchferry.domain.batchkey import BatchKey
from batchferry.domain.control import CanaryVerdict, Lifted, key_scope, shape_scope
from batchferry.domain.envelope import EventKind
from batchferry.domain.errors import PartitionLost
from batchferry.domain.ledger import Lane, LedgerEntry, Lot, LotState
from batchferry.domain.offsets import OffsetSet
from batchferry.domain.partition import PartitionLedger
from batchferry.domain.rows import ResultLine, RowClass
from batchferry.domain.shapes import Reservoir
from batchferry.engine.fates import SHAPE, waiting_lot
from batchferry.engine.fleet import FleetView
from batchferry.engine.holds import INPUT_FAILURES, Holds
from batchferry.engine.outcomes import OutcomeWriter
from batchferry.engine.partition import PartitionTask
from batchferry.ports import Clock, Telemetry

TICK_S = 0.5
"""Real seconds between two looks at the shapes that wait."""
_BAD = frozenset(
    {RowClass.INVALID_REQUEST, RowClass.CONTENT_FILTERED, RowClass.TOO_LONG, RowClass.MODEL_UNAVAILABLE, RowClass.SPLIT}
)
"""Ends that speak against the prompt. What the provider failed to do is tried again and says nothing."""

Offer = Callable[[PartitionTask, BatchKey, int, int, str], None]


@dataclass(slots=True)
class _Waiting:
    """The rows of one partition that wait for a verdict."""

    task: PartitionTask
    offsets: OffsetSet = field(default_factory=OffsetSet)
    due: dict[int, int] = field(default_factory=dict)
    tokens: int = 0
    bytes: int = 0


@dataclass(slots=True)
class _Trial:
    """One shape without a verdict."""

    shape: str
    key: BatchKey
    settings: CanarySettings
    began_s: float
    ship_by_ms: int
    reservoir: Reservoir
    waiting: dict[int, _Waiting] = field(default_factory=dict)
    places: list[tuple[int, int, int]] = field(default_factory=list)
    """(partition, offset, deadline) by their number in the reservoir, until the sample is drawn."""
    sample: set[tuple[int, int]] = field(default_factory=set)
    rows: int = 0
    bad: int = 0
    is_running: bool = False


class CanaryDesk:
    """Gathers, samples, judges; one a process."""

    def __init__(
        self,
        clock: Clock,
        telemetry: Telemetry,
        fleet: FleetView,
        holds: Holds,
        outcomes: OutcomeWriter,
        offer: Offer,
        seed: int | None = None,
    ) -> None:
        self._clock = clock
        self._telemetry = telemetry
        self._fleet = fleet
        self._holds = holds
        self._outcomes = outcomes
        self._offer = offer
        self._random = random.Random(seed)  # noqa: S311 (draws a sample, guards nothing)
        self._trials: dict[str, _Trial] = {}
        self._is_off: set[str] = set()
        """Routes with more shapes than they may have; told once."""

    @property
    def waiting_rows(self) -> int:
        """Rows that wait for a verdict."""
        return sum(len(one.offsets) for trial in self._trials.values() for one in trial.waiting.values())

    def is_barred(self, key: BatchKey, shape: str) -> bool:
        """Whether rows of this kind wait whatever they ask for: it was found bad, or an operator holds it."""
        verdict = self._fleet.control.canaries.get(shape)
        if verdict is not None and not verdict.is_good:
            return True
        return any(hold.scope == shape_scope(shape) for hold in self._holds.standing(key, shape))

    def takes(
        self,
        task: PartitionTask,
        key: BatchKey,
        route: str,
        settings: CanarySettings,
        shape: str,
        offset: int,
        *,
        deadline_ms: int,
        ship_by_ms: int,
        tokens: int,
        size_bytes: int,
    ) -> bool:
        """Whether the row waits here; False when its shape may go."""
        verdict = self._fleet.control.canaries.get(shape)
        is_known = verdict is not None and verdict.is_good and not self.is_barred(key, shape)
        if is_known and shape not in self._trials:
            return False
        trial = self._trials.get(shape)
        if trial is None:
            if len(self._trials) >= settings.max_shapes:
                if route not in self._is_off:
                    self._is_off.add(route)
                    self._telemetry.event("canary_off", route=route, shapes=len(self._trials))
                    self._telemetry.count("alarms", what="canary_off")
                return False
            reservoir = Reservoir(settings.rows, self._random)
            now_s = self._clock.monotonic()
            trial = self._trials[shape] = _Trial(shape, key, settings, now_s, ship_by_ms, reservoir)
        waiting = trial.waiting.get(task.partition)
        if waiting is None or waiting.task is not task:
            waiting = trial.waiting[task.partition] = _Waiting(task)
        waiting.offsets.add(offset)
        waiting.tokens += tokens
        waiting.bytes += size_bytes
        quarter = deadline_ms // 900_000
        waiting.due[quarter] = waiting.due.get(quarter, 0) + 1
        trial.ship_by_ms = min(trial.ship_by_ms, ship_by_ms)
        if not trial.is_running and trial.reservoir.seen < MAX_GATHERED:
            trial.reservoir.offer(len(trial.places))
            trial.places.append((task.partition, offset, deadline_ms))
        return True

    def drop_partition(self, partition: int) -> None:
        """Forget a partition's rows: they are read again by whoever owns it next."""
        for shape, trial in list(self._trials.items()):
            trial.waiting.pop(partition, None)
            trial.sample = {place for place in trial.sample if place[0] != partition}
            if not trial.waiting and not trial.sample:
                del self._trials[shape]
            elif trial.is_running and not trial.sample and not trial.rows:
                self._begin_again(trial)

    def _begin_again(self, trial: _Trial) -> None:
        """The whole sample went with its partition, unanswered: another one is drawn from the rows that are left."""
        trial.is_running = False
        trial.reservoir, trial.places = Reservoir(trial.settings.rows, self._random), []
        for partition, waiting in trial.waiting.items():
            deadline_ms = min(waiting.due) * 900_000  # of the most urgent ones: a row's own is not kept
            for offset in waiting.offsets:
                if trial.reservoir.seen >= MAX_GATHERED:
                    return
                trial.reservoir.offer(len(trial.places))
                trial.places.append((partition, offset, deadline_ms))

    def note(self, partition: int, offset: int, line: ResultLine, endpoint: str) -> None:
        """An answer, of whatever row; counted when the row is in a sample. A fault of the provider does not count."""
        for trial in self._trials.values():
            if (partition, offset) not in trial.sample:
                continue
            if line.row_class is RowClass.SUCCEEDED:
                is_bad = not _is_good(trial.settings, line.body or b"", endpoint)
            elif line.row_class in _BAD:
                is_bad = True
            else:
                return
            trial.sample.discard((partition, offset))
            trial.rows += 1
            trial.bad += is_bad
            return

    async def run(self) -> None:
        """Draw samples and give verdicts until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            await self.look()

    async def look(self) -> None:
        """Once over all shapes that wait."""
        now = self._clock.now()
        now_s, now_ms = self._clock.monotonic(), now.timestamp() * 1000
        for shape, trial in list(self._trials.items()):
            known = self._fleet.control.canaries.get(shape)
            self._forget_ended(trial)
            if trial.is_running and not trial.sample and trial.rows and known is None:
                known = await self._judge(trial)
            if known is not None:
                is_free = known.is_good or not self._holds.standing(trial.key, shape)
                await self._let_go(trial, held=not is_free)
            elif now_ms >= trial.ship_by_ms:
                if trial.settings.timeout == "hold":
                    await self._holds.place_shape(trial.key, shape, "canary_timeout")
                await self._let_go(trial, held=trial.settings.timeout == "hold")
            elif not trial.is_running and (
                trial.reservoir.seen >= trial.settings.rows or now_s - trial.began_s >= trial.settings.gather_s
            ):
                await self._draw(trial)

    def _forget_ended(self, trial: _Trial) -> None:
        """Rows of the sample that ended without a word for or against the prompt: the provider could not run them."""
        for partition, offset in list(trial.sample):
            waiting = trial.waiting.get(partition)
            if waiting is not None and waiting.task.is_live and waiting.task.ledger.is_settled(offset):
                trial.sample.discard((partition, offset))
        if trial.is_running and not trial.sample and not trial.rows:
            if any(waiting.offsets for waiting in trial.waiting.values()):
                self._begin_again(trial)
            else:
                self._trials.pop(trial.shape, None)

    async def _draw(self, trial: _Trial) -> None:
        trial.is_running = True
        chosen = [trial.places[number] for number in trial.reservoir.sample]
        trial.places = []
        self._telemetry.event("canary_drawn", shape=trial.shape, rows=len(chosen), label=trial.key.label)
        by_partition: dict[int, OffsetSet] = {}
        for partition, offset, deadline_ms in chosen:
            waiting = trial.waiting.get(partition)
            if waiting is None or not waiting.task.is_live or offset not in waiting.offsets:
                continue
            waiting.offsets.discard(offset)
            trial.sample.add((partition, offset))
            if trial.settings.lane == "sync":
                self._offer(waiting.task, trial.key, offset, deadline_ms, "canary")
            else:
                by_partition.setdefault(partition, OffsetSet()).add(offset)
        for partition, offsets in by_partition.items():
            await self._park(trial, trial.waiting[partition], offsets, {})

    async def _judge(self, trial: _Trial) -> CanaryVerdict:
        now = self._clock.now()
        is_good = trial.bad <= trial.rows * trial.settings.max_bad_ratio
        verdict = CanaryVerdict(trial.shape, is_good, trial.rows, trial.bad, now)
        await self._fleet.publish(verdict)
        self._telemetry.count("canaries", verdict="good" if is_good else "bad")
        self._telemetry.event(
            "canary_judged", shape=trial.shape, good=is_good, rows=trial.rows, bad_rows=trial.bad, label=trial.key.label
        )
        event = self._outcomes.plain_event(
            EventKind.CANARY,
            f"canary-{trial.shape}-{round(now.timestamp() * 1000)}",
            scope=trial.key.label,
            shape=trial.shape,
            reason="good" if is_good else "bad",
            rows=trial.rows,
            classes={"bad": trial.bad, "good": trial.rows - trial.bad},
        )
        await self._fleet.send([event])
        if is_good:
            name = f"hold/{key_scope(trial.key)}/{INPUT_FAILURES}"
            if name in self._fleet.control.holds:
                self._telemetry.event(
                    "key_released", scope=key_scope(trial.key), reason=INPUT_FAILURES, label=trial.key.label
                )
                await self._fleet.publish(Lifted(name))
        else:
            await self._holds.place_shape(trial.key, trial.shape, "canary_bad")
            await self._holds.alarm("canary_bad", f"canary-{trial.shape}", trial.key, rows=trial.bad)
        return verdict

    async def _let_go(self, trial: _Trial, *, held: bool) -> None:
        """Write the waiting rows into waiting lots: due at once, or under the hold of their shape."""
        for waiting in list(trial.waiting.values()):
            await self._park(trial, waiting, waiting.offsets, {SHAPE: trial.shape} if held else {})
        trial.waiting.clear()
        if not trial.sample or held or self._fleet.control.canaries.get(trial.shape) is not None:
            self._trials.pop(trial.shape, None)

    async def _park(self, trial: _Trial, waiting: _Waiting, offsets: OffsetSet, extra: Mapping[str, object]) -> None:
        task, now = waiting.task, self._clock.now()
        rows = len(waiting.offsets | offsets)
        pattern = Lot(
            lot_id=task.new_lot_id(),
            lane=Lane.BATCH,
            state=LotState.WAITING,
            key=trial.key,
            offsets=offsets,
            submission=1,
            partitions=(task.partition,),
            created_at=now,
            own_rows=rows,
            own_tokens=waiting.tokens,
            own_bytes=waiting.bytes,
            due=waiting.due,
            extra=extra,
        )

        def plan(ledger: PartitionLedger) -> list[LedgerEntry]:
            left = ledger.unsettled(offsets) - ledger.held()
            return [waiting_lot(task, ledger, [pattern], left, {}, self._clock, 0.0)] if left else []

        with contextlib.suppress(PartitionLost):
            await task.commit(plan, purpose="hold")


MAX_GATHERED = 100_000
"""Rows of one shape that the sample is drawn from; a longer wait makes it no fairer."""


@lru_cache(maxsize=64)
def _schema(path: Path) -> AnswerSchema:
    return compile_schema(path.read_bytes())


def _is_good(settings: CanarySettings, body: bytes, endpoint: str) -> bool:
    schema = None if settings.schema_file is None else _schema(settings.schema_file)
    return check_answer(body, endpoint, settings.check, schema) is None
