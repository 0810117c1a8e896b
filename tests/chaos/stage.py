"""The stage: a broker of its own, the simulated provider, three replicas, and whoever makes them suffer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from service_kit import Named, Replica

from batchferry.domain.errors import KafkaUnavailable
from batchferry.kafka import AioKafka
from batchferry.ports import LogReader, OutRecord, PlainProducer, Record
from batchferry.simulator import (
    DEFAULT_KEY,
    BatchRule,
    ClockSettings,
    Durations,
    FaultRule,
    JobError,
    Outcome,
    RunCurve,
    Scenario,
    Simulator,
    SimulatorSettings,
    WeightedOutcome,
)
from broker import RealBroker
from broker.kit import made_topic, patient_settings
from broker.real import free_port

from .history import Act, History
from .plan import CREATE_S, FAULTS_BY_NAME, REPLICAS, SESSION_S, Kind, Misfortune

PARTITIONS = 12
MODELS = ("gpt-4o-mini", "gpt-4.1-mini")
SLICES = ("", "night")
SPEED = 600.0
"""Virtual seconds in a real one: a batch runs for some real seconds, and hours of patience are some seconds too."""
HOUR_S = 3600.0
SUBMIT_TTL_S = 10.0
"""How long after its intent a create may be sent, and a successor waits (real seconds)."""
KEEPER_PAUSE_S = 0.3
READY_LIMIT_S = 60.0
RESTART_PAUSE_S = 1.0
"""Real seconds until a replica that ended by itself is started again, as an orchestrator would."""
PRODUCE_EVERY_S = 0.25


@dataclass(frozen=True, slots=True)
class Scale:
    """How large a run is."""

    seed: int
    length_s: float
    records: int
    max_rows: int = 100
    window: str = "4h"


def scenario(window: str) -> Scenario:
    """Batches of some real seconds, and a share of every way in which rows and batches can end badly."""

    def share(outcome: Outcome, part: float, first_attempts: int | None = 1, **more: Any) -> WeightedOutcome:
        return WeightedOutcome(outcome=outcome, share=part, first_attempts=first_attempts, **more)

    calm = Durations(
        validating_s=0.3 * SPEED, in_progress=RunCurve(minimum_s=2.5 * SPEED), finalizing_s=0.2 * SPEED, jitter=0.9
    )
    endless = Durations(in_progress=RunCurve(factor_s=0, minimum_s=2000 * HOUR_S), jitter=0.1)
    return Scenario(
        windows=(window,),
        durations=calm,
        shares=(
            share(Outcome.HTTP_ERROR, 0.02, status=500),
            share(Outcome.TIMEOUT, 0.002),
            share(Outcome.EXPIRED, 0.005),
            share(Outcome.MISSING, 0.003),
            share(Outcome.UNREADABLE, 0.002),
            share(Outcome.CONTENT_FILTER, 0.005, None),
            share(Outcome.DUPLICATE, 0.003),
            share(Outcome.FOREIGN, 0.003),
            share(Outcome.TRUNCATED, 0.003, None),
            share(Outcome.LINE_SEPARATOR, 0.003, None),
        ),
        batches=(
            BatchRule(every=23, durations=endless),
            BatchRule(every=17, fail_with=(JobError(code="invalid_json_line", line=2),)),
            BatchRule(every=31, fail_with=(JobError(code="token_limit_exceeded"),)),
        ),
    )


class Stage(Named):
    """Everything a run needs; an async context manager. Topics, logs and the provider's bill are in ``folder``."""

    def __init__(self, folder: Path, scale: Scale, history: History, broker: RealBroker | None = None) -> None:
        """Take a folder of its own.

        Args:
            broker: a running one that may be killed, and is left running; None: one of our own.
        """
        self.folder = folder
        self.scale = scale
        self.history = history
        self.tag = uuid4().hex[:8]
        self._owns_broker = broker is None
        self.broker = broker or RealBroker(folder / "kafka", settings={"broker.session.timeout.ms": "4000"})
        self.kafka = AioKafka(patient_settings(self.broker.bootstrap))
        self.started = datetime.now(UTC)
        self.origin = self.started - timedelta(days=60)
        self._provider_port = free_port()
        self.simulator = self._new_simulator()
        self.replicas = [Replica(self, f"replica-{n + 1}", self._settings()) for n in range(REPLICAS)]
        self.done: Counter[Kind] = Counter()
        self.faults_fired: Counter[str] = Counter()
        """By name, how many calls each kind of provider fault hit."""
        self.life_ends: dict[tuple[str, int], float] = {}
        self.frozen: dict[str, list[Act]] = {replica.name: [] for replica in self.replicas}
        self.outages: list[Act] = []
        self.ended_by_themselves: list[str] = []
        self.bad_exits: list[str] = []
        self._lives: Counter[str] = Counter()
        self._turns = [asyncio.Lock() for _ in self.replicas]
        self._broker_turn = asyncio.Lock()
        self._provider_turn = asyncio.Lock()
        self.sent = 0
        self.unsure = 0
        """Records whose producer had no answer: the log alone says whether they are there."""

    def _new_simulator(self) -> Simulator:
        return Simulator(
            SimulatorSettings(
                data_dir=self.folder / "provider",
                port=self._provider_port,
                seed=self.scale.seed,
                clock=ClockSettings(speed=SPEED, origin=self.origin, started_real=self.started),
                scenario=scenario(self.scale.window),
            )
        )

    def _settings(self) -> dict[str, Any]:
        """Real times are about a ninth of the defaults, all alike; virtual ones are long enough to be some real seconds."""
        return {
            "kafka": {
                "bootstrap_servers": self.broker.bootstrap,
                "session_timeout_s": SESSION_S,
                "heartbeat_s": SESSION_S / 10,
                "rebalance_timeout_s": 8.0,
                "request_timeout_s": 8.0,
                "metadata_max_age_s": 2.0,
                "transaction_timeout_s": 10.0,
            },
            "topics": {
                "requests": self.requests,
                "results": self.results,
                "failures": self.failures,
                "events": self.events,
                "group": self.group,
                "partitions": PARTITIONS,
            },
            "accounts": {
                "default": {
                    "base_url": f"http://127.0.0.1:{self._provider_port}/v1",
                    "api_key": DEFAULT_KEY,
                    "completion_window": self.scale.window,
                    "file_expiry_s": 30 * 24 * HOUR_S,
                    "poll": {"first_s": 0.5 * SPEED, "floor_s": 0.2 * SPEED, "max_s": 1.5 * SPEED},
                    "timeouts": {"create_s": CREATE_S, "upload_s": 6.0, "download_s": 6.0, "read_s": 4.0},
                    "sync": {"enabled": False},
                }
            },
            "routes": {
                "default": {
                    "max_rows": self.scale.max_rows,
                    "max_wait_s": 5 * SPEED,
                    "sla_s": 600 * HOUR_S,
                    "margin_s": 6 * HOUR_S,
                    "retries": {"transient": 2, "missing": 2, "expired": 2},
                }
            },
            "clock": {"speed": SPEED, "origin": self.origin.isoformat(), "started": self.started.isoformat()},
            "limits": {
                "settle_max_delay_s": 0.1,
                "submit_ttl_s": SUBMIT_TTL_S,
                "resolve_lag_s": 0.5,
                "lookup_pause_s": SPEED,
                "file_reuse_s": 8 * SPEED,
                "missing_confirm_s": SPEED,
                "missing_grace_s": 6 * SPEED,
                "window_grace_s": 3 * SPEED,
                "restore_timeout_s": 20.0,
                "max_clock_skew_s": 5 * SPEED,
            },
            "log": {"format": "json"},
            "otel": {"enabled": False},
            "stop_budget_s": 8,
        }

    # --------------------------------------------------------------------------------------------- life

    async def __aenter__(self) -> Self:
        if self._owns_broker:
            await asyncio.to_thread(self.broker.start)
        await self.simulator.start()
        for topic in (self.requests, self.results, self.failures, self.events):
            await made_topic(self.kafka, topic, PARTITIONS, retention_ms="-1")  # virtual time begins long ago
        for number in range(REPLICAS):
            self._start(number)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for replica in self.replicas:
            with contextlib.suppress(ProcessLookupError):
                replica.close()
        await self.kafka.aclose()
        await self.simulator.stop()
        if self._owns_broker:
            await asyncio.to_thread(self.broker.stop)

    async def ready(self) -> None:
        """Wait until every partition is restored in some replica, so that misfortunes meet a service at work."""
        async with asyncio.timeout(READY_LIMIT_S):
            while True:
                restored = {line["partition"] for one in self.replicas for line in one.told("partition_restored")}
                if len(restored) == PARTITIONS and all(one.told("partitions_assigned") for one in self.replicas):
                    return
                await asyncio.sleep(KEEPER_PAUSE_S)

    def _start(self, number: int) -> None:
        replica = self.replicas[number]
        replica.go()
        self._lives[replica.name] += 1

    def _ended(self, replica: Replica) -> None:
        self.life_ends[replica.name, self._lives[replica.name]] = self.history.now_s()

    # -------------------------------------------------------------------------------------------- input

    async def produce(self) -> None:
        """All records, evenly over the length of the run. While the broker is away none is sent."""
        rng = random.Random(f"input {self.scale.seed}")
        number = 0
        producer = await self._new_producer()
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            while number < self.scale.records:
                due = min(self.scale.records, round((loop.time() - began) / self.scale.length_s * self.scale.records))
                if due <= number or self._broker_turn.locked():
                    await asyncio.sleep(PRODUCE_EVERY_S)
                    continue
                due = min(due, number + 2000)
                records = [self._request(rng, one) for one in range(number, due)]
                number = due
                try:
                    await producer.send(records)
                    self.sent += len(records)
                except KafkaUnavailable:  # never sent again by us: which of them are there, the log will tell
                    self.unsure += len(records)
                    await producer.stop()
                    producer = await self._new_producer()
                await asyncio.sleep(PRODUCE_EVERY_S)
        finally:
            await producer.stop()

    async def _new_producer(self) -> PlainProducer:
        while True:
            producer = self.kafka.plain_producer()
            with contextlib.suppress(KafkaUnavailable):
                await producer.start()
                return producer
            await asyncio.sleep(0.5)

    def question(self, number: int) -> str:
        """What row ``number`` asks; its answer repeats it."""
        return f"question {number} of {self.tag}"

    def _request(self, rng: random.Random, number: int) -> OutRecord:
        body = {"model": rng.choice(MODELS), "messages": [{"role": "user", "content": self.question(number)}]}
        value = json.dumps({"custom_id": f"row-{number}", "body": body}).encode()
        part = rng.choice(SLICES)
        headers = (("slice", part.encode()),) if part else ()
        at_ms = int((self.origin + (datetime.now(UTC) - self.started) * SPEED).timestamp() * 1000)
        return OutRecord(self.requests, b"key", value, headers, rng.randrange(PARTITIONS), at_ms)

    @contextlib.asynccontextmanager
    async def reader(self) -> AsyncIterator[LogReader]:
        """Reads topics, committed records only."""
        reader = self.kafka.reader()
        await reader.start()
        try:
            yield reader
        finally:
            await reader.stop()

    async def whole(self, reader: LogReader, topic: str) -> dict[int, list[Record]]:
        """Every record of a topic by partition."""
        return {
            partition: [record async for some in reader.read_to_end(topic, partition) for record in some]
            for partition in range(PARTITIONS)
        }

    # -------------------------------------------------------------------------------------- misfortunes

    async def suffer(self, misfortunes: list[Misfortune]) -> None:
        """Let everything in the plan happen at its time; returns when the last of it is over."""
        async with asyncio.TaskGroup() as group:
            for misfortune in misfortunes:
                await asyncio.sleep(max(0.0, misfortune.at_s - self.history.now_s()))
                group.create_task(self._befalls(misfortune))

    async def keep(self) -> None:
        """Start again, for ever, what ended by itself, as an orchestrator does."""
        while True:
            await asyncio.sleep(KEEPER_PAUSE_S)
            for number, replica in enumerate(self.replicas):
                if replica.has_ended and not self._turns[number].locked():
                    async with self._turns[number]:
                        self._collect(replica)
                        await asyncio.sleep(RESTART_PAUSE_S)
                        self._start(number)

    def _collect(self, replica: Replica) -> None:
        self._ended(replica)
        code = replica.collect()
        self.history.tell(f"{replica.name} ended by itself with code {code}")
        self.ended_by_themselves.append(f"{replica.name} life {self._lives[replica.name]}: code {code}")

    async def _befalls(self, it: Misfortune) -> None:
        match it.kind:
            case Kind.BROKER_KILL | Kind.BROKER_FREEZE:
                await self._to_broker(it)
            case Kind.PROVIDER:
                await self._fault(it)
            case Kind.PROVIDER_DOWN:
                await self._provider_down(it)
            case Kind.ROLLING:
                for number in range(REPLICAS):
                    await self._to_replica(Misfortune(it.at_s, Kind.TERMINATE, 0.0, number))
                    await asyncio.sleep(2.0)
                self.done[it.kind] += 1
            case _:
                await self._to_replica(it)

    async def _to_replica(self, it: Misfortune) -> None:
        assert it.replica is not None
        replica = self.replicas[it.replica]
        async with self._turns[it.replica]:
            if not replica.is_running:
                self._collect(replica)
                self._start(it.replica)
                return
            act = self.history.tell(it.text)
            freezes = it.kind in {Kind.FREEZE_SHORT, Kind.FREEZE_LONG, Kind.KILL_FROZEN}
            try:
                if freezes:
                    replica.freeze()
                    self.frozen[replica.name].append(act)
                    await asyncio.sleep(it.lasts_s)
                match it.kind:
                    case Kind.FREEZE_SHORT | Kind.FREEZE_LONG:
                        replica.thaw()
                    case Kind.TERMINATE:
                        code = await replica.terminate()
                        is_early = code == -signal.SIGTERM and not replica.told("server_listening")  # nothing had begun
                        if code not in {0, 4} and not is_early:
                            self.bad_exits.append(f"{act.at_s:.2f} s {replica.name}: code {code} after SIGTERM")
                    case _:
                        replica.kill()
            except ProcessLookupError:
                self._collect(replica)  # it ended at this very moment
            self.done[it.kind] += 1
            if not replica.is_running:
                self._ended(replica)
                if it.forgets:
                    replica.forget_state()
                if not freezes:
                    await asyncio.sleep(it.lasts_s)
                self._start(it.replica)
            act.until_s = self.history.now_s()

    async def _to_broker(self, it: Misfortune) -> None:
        async with self._broker_turn:
            act = self.history.tell(it.text)
            self.outages.append(act)
            if it.kind is Kind.BROKER_FREEZE:
                self.broker.freeze()
                await asyncio.sleep(it.lasts_s)
                self.broker.thaw()
            else:
                await asyncio.to_thread(self.broker.kill)
                await asyncio.sleep(it.lasts_s)
                await asyncio.to_thread(self.broker.start)
            act.until_s = self.history.now_s()
            self.done[it.kind] += 1

    async def _fault(self, it: Misfortune) -> None:
        fault = FAULTS_BY_NAME[it.fault]
        gate = f"g{it.at_s:.3f}"
        async with self._provider_turn:
            act = self.history.tell(it.text)
            plan = self.simulator.faults
            rule = {**fault.rule, **({"gate": gate} if fault.is_gate else {})}
            number = plan.put(FaultRule.model_validate(rule))
            await asyncio.sleep(it.lasts_s)
            hits = next(one["fired"] for one in plan.describe()["rules"] if one["number"] == number)
            plan.take_away(number)
            if fault.is_gate:
                await plan.gate(gate).release()
            self.faults_fired[it.fault] += hits
            self.done[it.kind] += 1
            act.what += f": hit {hits} calls"
            act.until_s = self.history.now_s()

    async def _provider_down(self, it: Misfortune) -> None:
        async with self._provider_turn:
            act = self.history.tell(it.text)
            await self.simulator.stop()
            await asyncio.sleep(it.lasts_s)
            self.simulator = self._new_simulator()
            await self.simulator.start()
            act.until_s = self.history.now_s()
            self.done[it.kind] += 1

    async def put_right(self) -> None:
        """Faults off: everybody runs, nothing is held."""
        self.simulator.faults.clear()
        await self.simulator.faults.release_all()
        self.history.tell("all misfortunes are over")
