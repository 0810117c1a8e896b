"""Enqueued tokens: a submitter that does not count them, and one that does, before the same provider.

Rows come in groups, one group every few minutes; a group is worth one batch. The naive submitter does what most
scripts do: it uploads every group at once, makes a batch of it, polls, and writes down what failed. Time runs an hour a
second for all.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import openai
from aiokafka import AIOKafkaProducer

from batchferry.app import Service, build_kafka
from batchferry.config import Settings
from batchferry.simulator import (
    TIER_1_ENQUEUED_TOKENS,
    ClockSettings,
    Durations,
    Limits,
    RunCurve,
    Scenario,
    Simulator,
    SimulatorSettings,
)
from batchferry.simulator.state import SimBatch, Status
from batchferry.telemetry import RecordingTelemetry

from .kit import KEY, Rehearsal, settings_for

MODEL, OTHER_MODEL = "gpt-4o", "gpt-4o-mini"
LIMIT_TOKENS = TIER_1_ENQUEUED_TOKENS[MODEL]
GROUPS = 20
ROWS = 25
"""Of a group."""
ROW_TOKENS = 1_000
EVERY_S = 450.0
"""Service-clock seconds between two groups."""
RUN_S = 3600.0
"""Service-clock seconds that a batch runs: more comes in meanwhile than the queue holds."""
WAIT_LIMIT_S = 90.0
PARTITIONS = 4
REFUSAL = "token_limit_exceeded"
WORDS = "What should I do when my card has not arrived after two weeks, and whom do I ask about it? "
CHINESE = "我的银行卡两周了还没有寄到，应该怎么办，应该去问谁？"

Body = dict[str, Any]


def bodies(group: int, *, rows: int = ROWS, model: str = MODEL, words: str = WORDS) -> list[Body]:
    """A group of rows of about ``ROW_TOKENS`` each, as the simulator counts them: a token for four characters."""
    text = (words * (4 * ROW_TOKENS // len(words) + 1))[: 4 * ROW_TOKENS - 20]
    return [{"model": model, "messages": [{"role": "user", "content": f"{group}/{row} {text}"}]} for row in range(rows)]


def pictures(group: int, *, rows: int = ROWS) -> list[Body]:
    """Rows with a picture that this provider counts by its length: three times what anybody would estimate."""
    url = "data:image/png;base64," + "A" * (4 * 3 * 1_600)
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    return [
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": [{"type": "text", "text": f"{group}/{row}"}, *parts]}],
        }
        for row in range(rows)
    ]


def stream(groups: int = GROUPS) -> list[list[Body]]:
    """The groups of the measurement."""
    return [bodies(group) for group in range(groups)]


@dataclass(slots=True)
class Voyage:
    """What became of a stream."""

    name: str
    rows: int
    answered: int = 0
    failed_rows: int = 0
    attempts: int = 0
    """Rows of which an attempt was used up."""
    batches: int = 0
    refused: int = 0
    """Batches that failed because of the tokens in the queue."""
    largest_tokens: int = 0
    """Input tokens of the largest batch that ran."""
    peak_tokens: int = 0
    """Most input tokens in the provider's queue."""
    hours: float = 0.0
    """Until the last row was answered."""
    learned_tokens: list[int] = field(default_factory=list)
    """Limits that refusals taught, in their order."""
    group_hours: list[float] = field(default_factory=list)
    """Until the last row of each group was answered; groups with failures are left out."""
    stepped_back: int = 0
    runs_paid: dict[str, int] = field(default_factory=dict)
    """Rows by how often the provider was paid for them."""

    def take(self, simulator: Simulator) -> None:
        """Count the provider's batches."""
        found = list(simulator.world.state.batches.values())
        self.batches = len(found)
        self.runs_paid = simulator.world.state.bill.summary()["bodies_by_paid_runs"]
        self.refused = sum(1 for one in found if one.status is Status.FAILED and _codes(one) == {REFUSAL})
        ran = [one for one in found if one.in_progress_at is not None and one.model == MODEL]
        self.largest_tokens = max((one.input_tokens for one in ran), default=0)
        starts = [(one.in_progress_at or 0.0, one.input_tokens) for one in ran]
        ends = [(one.ended_at, -one.input_tokens) for one in ran if one.ended_at is not None]
        queued = 0
        for _, change in sorted([*starts, *ends]):
            queued += change
            self.peak_tokens = max(self.peak_tokens, queued)


def _codes(batch: SimBatch) -> set[str]:
    return {str(error["code"]) for error in batch.errors}


def provider(clock: Rehearsal, **limits: Any) -> Simulator:
    """A provider with the lowest paid tier's limit for the model."""
    scenario = Scenario(
        durations=Durations(validating_s=60.0, in_progress=RunCurve(minimum_s=RUN_S, factor_s=0.0), finalizing_s=30.0),
        limits=Limits(enqueued_tokens={MODEL: LIMIT_TOKENS}, **limits),
    )
    speed = ClockSettings(speed=clock.speed, origin=clock.origin, started_real=clock.started)
    return Simulator(SimulatorSettings(clock=speed, scenario=scenario))


async def naive(groups: Sequence[Sequence[Body]], every_s: float = EVERY_S) -> Voyage:
    """Upload and create for every group as it comes, with the official client; failed batches are written down."""
    voyage = Voyage("naive", sum(map(len, groups)))
    clock = Rehearsal()
    simulator = provider(clock)
    await simulator.start()
    started = clock.now()
    try:
        async with openai.AsyncOpenAI(api_key=KEY, base_url=simulator.base_url, max_retries=0) as client:
            async with asyncio.TaskGroup() as running:
                for number, group in enumerate(groups):
                    await _at(clock, started, number * every_s)
                    running.create_task(_submit(client, number, group, voyage))
        voyage.hours = (clock.now() - started).total_seconds() / 3600
        voyage.take(simulator)
    finally:
        await simulator.stop()
    return voyage


async def _at(clock: Rehearsal, started: datetime, after_s: float) -> None:
    """Wait until so many seconds of the service's clock have passed: a slow machine does not thin the stream out."""
    left_s = after_s - (clock.now() - started).total_seconds()
    await asyncio.sleep(max(0.0, left_s / clock.speed))


async def _submit(client: openai.AsyncOpenAI, number: int, group: Sequence[Body], voyage: Voyage) -> None:
    lines = [
        json.dumps({"custom_id": f"{number}-{row}", "method": "POST", "url": "/v1/chat/completions", "body": body})
        for row, body in enumerate(group)
    ]
    uploaded = await client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = await client.batches.create(
        input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    while batch.status not in {"completed", "failed", "expired", "cancelled"}:
        await asyncio.sleep(0.05)
        batch = await client.batches.retrieve(batch.id)
    if batch.output_file_id is None:
        voyage.failed_rows += len(group)
        return
    content = await client.files.content(batch.output_file_id)
    voyage.answered += content.text.count('"status_code":200')


def _settings(bootstrap: str, base_url: str, clock: Rehearsal, folder: Path, limit: int | None, rows: int) -> Settings:
    settings = settings_for(bootstrap, base_url, clock, folder, max_rows=rows, sla_s=5 * 86_400)
    account = settings.accounts["default"]
    tokens = {} if limit is None else {MODEL: limit}
    account = account.model_copy(
        update={
            "limits": account.limits.model_copy(update={"enqueued_tokens": tokens}),
            "sync": account.sync.model_copy(update={"enabled": False}),
        }
    )
    topics = settings.topics.model_copy(update={"group": f"quota-{time.monotonic_ns()}"})
    return settings.model_copy(update={"accounts": {"default": account}, "topics": topics})


class _Outcomes:
    """Reads both output topics."""

    def __init__(self, settings: Settings, groups: Sequence[Sequence[Body]], clock: Rehearsal, voyage: Voyage) -> None:
        self._settings, self._clock, self._voyage = settings, clock, voyage
        self._left = [len(group) for group in groups]
        self._seen: Counter[str] = Counter()
        self._started = clock.now()

    async def read(self) -> None:
        """Until every row has its outcome; an outcome too many is a mistake."""
        kafka = build_kafka(self._settings)
        tail = kafka.tail()
        await tail.start([self._settings.topics.results, self._settings.topics.failures])
        try:
            while any(self._left):
                for record in await tail.poll(100):
                    self._note(json.loads(record.value or b"{}"))
        finally:
            await tail.stop()
            await kafka.aclose()

    def _note(self, said: Body) -> None:
        voyage, group = self._voyage, int(said["custom_id"].split("-")[0])
        self._seen[said["custom_id"]] += 1
        if self._seen[said["custom_id"]] > 1:
            raise AssertionError(f"{said['custom_id']} has two outcomes")
        voyage.answered += said["kind"] == "result"
        voyage.failed_rows += said["kind"] != "result"
        voyage.attempts += bool(said["attempts"])
        voyage.hours = (self._clock.now() - self._started).total_seconds() / 3600
        self._left[group] -= 1
        if not self._left[group]:
            voyage.group_hours[group] = voyage.hours


async def ferry(
    bootstrap: str,
    groups: Sequence[Sequence[Body]],
    folder: Path,
    *,
    limit: int | None,
    name: str = "batchferry",
    rows: int = ROWS,
    every_s: float = EVERY_S,
    replicas: int = 1,
    **limits: Any,
) -> Voyage:
    """The same stream through the service.

    Args:
        limit: what the service is told of the account's enqueued tokens; None: nothing.
        rows: of a full batch.
        replicas: services that share the partitions.
        limits: of the provider, beside the enqueued tokens.
    """
    voyage = Voyage(name, sum(map(len, groups)), group_hours=[0.0] * len(groups))
    clock = Rehearsal()
    simulator = provider(clock, **limits)
    await simulator.start()
    try:
        settings = _settings(bootstrap, simulator.base_url, clock, folder, limit, rows)
        kafka = build_kafka(settings)
        admin = await kafka.admin()
        for topic in (settings.topics.requests, settings.topics.results, settings.topics.failures):
            await admin.create(topic, PARTITIONS, {})
        await admin.close()
        await kafka.aclose()
        telemetry = RecordingTelemetry()
        services = [
            Service(settings.model_copy(update={"state_dir": folder / f"state-{number}"}), telemetry=telemetry)
            for number in range(replicas)
        ]
        try:
            for service in services:
                await service.start()
            await _until(lambda: _shared_out(services), "partitions shared out")
            reading = asyncio.create_task(_Outcomes(settings, groups, clock, voyage).read())
            await _produce(bootstrap, settings.topics.requests, groups, clock, every_s, telemetry)
            async with asyncio.timeout(WAIT_LIMIT_S):
                await reading
        finally:
            for service in services:
                await service.stop()
        voyage.take(simulator)
        voyage.learned_tokens = [int(str(one["tokens"])) for one in telemetry.named("token_limit_learned")]
        voyage.stepped_back = len(telemetry.named("batch_stepped_back"))
    finally:
        await simulator.stop()
    return voyage


def _shared_out(services: Sequence[Service]) -> bool:
    owned = [
        set(service.supervisor.status()["partitions"])  # type: ignore[call-overload]
        for service in services
        if service.supervisor is not None
    ]
    return all(owned) and sum(map(len, owned)) == PARTITIONS


async def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {WAIT_LIMIT_S:g} s")
        await asyncio.sleep(0.05)


async def _produce(
    bootstrap: str,
    topic: str,
    groups: Sequence[Sequence[Body]],
    clock: Rehearsal,
    every_s: float,
    telemetry: RecordingTelemetry,
) -> None:
    """Send group after group, each some time after the last one was sealed: on a slow machine they must not pile up."""
    rows_sent = 0

    def all_sealed() -> bool:
        sealed = [one for one in telemetry.named("batch_sealed") if one["reason"] == "count"]
        return sum(int(str(one["rows"])) for one in sealed) >= rows_sent

    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, max_request_size=8_000_000, max_batch_size=1_000_000)
    await producer.start()
    try:
        for number, group in enumerate(groups):
            stamp = round(clock.now().timestamp() * 1000)
            sent = [
                await producer.send(
                    topic,
                    json.dumps({"custom_id": f"{number}-{row}", "body": body}, ensure_ascii=False).encode(),
                    partition=row % PARTITIONS,
                    timestamp_ms=stamp,
                )
                for row, body in enumerate(group)
            ]
            await asyncio.gather(*sent)
            rows_sent += len(group)
            await _until(all_sealed, f"group {number} sealed")
            await asyncio.sleep(every_s / clock.speed)
    finally:
        await producer.stop()


HEADINGS = f"{'':<30} {'batches':>8} {'refused':>8} {'answered':>9} {'rows lost':>10} {'peak tokens':>12} {'hours':>6}"


def explain(voyage: Voyage) -> str:
    """One line of the table."""
    learned = f"  learned {', '.join(f'{one:,}' for one in voyage.learned_tokens)}" if voyage.learned_tokens else ""
    lost = voyage.rows - voyage.answered
    return (
        f"{voyage.name:<30} {voyage.batches:>8} {voyage.refused:>8} {voyage.answered:>9,} {lost:>10,}"
        f" {voyage.peak_tokens:>12,} {voyage.hours:>6.1f}{learned}"
    )


async def measure(bootstrap: str, folder: Path) -> list[Voyage]:
    """All three runs, one after the other."""
    groups = stream()
    return [
        await naive(groups),
        await ferry(bootstrap, groups, folder / "told", limit=LIMIT_TOKENS, name="batchferry, limit configured"),
        await ferry(bootstrap, groups, folder / "untold", limit=None, name="batchferry, limit learned"),
    ]
