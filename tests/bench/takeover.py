"""How soon a partition that changes hands can settle again, with ledgers of a size that a busy service has.

Twelve partitions name a million rows at a provider between them, in two hundred batches. Three services in this
process share them; one after the other is stopped and started again. Each assignment of a partition starts a clock,
which stops when the partition's ledger is read and its first settle transaction could be written.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from batchferry.app import Service, build_kafka
from batchferry.config import Settings
from batchferry.domain.batchkey import BatchKey
from batchferry.domain.ids import FileId, LotId, ProviderBatchId, new_batch_id, new_ledger_id
from batchferry.domain.ledger import Lane, LedgerHeader, Lot, LotState, Watermark, encode
from batchferry.domain.offsets import OffsetSet
from batchferry.engine.gates import LEDGER_CONFIGS
from batchferry.ports import OutRecord
from batchferry.telemetry import RecordingTelemetry

from .kit import Rehearsal, request, settings_for

PARTITIONS = 12
LOTS = 200
ROWS = 1_000_000
REPLICAS = 3
WAIT_LIMIT_S = 120.0
GOAL_S = 10.0


class Stopwatch(RecordingTelemetry):
    """Measures from the assignment of a partition to its restore."""

    def __init__(self, taken: list[float]) -> None:
        super().__init__()
        self._taken = taken
        self._since: dict[int, float] = {}

    def event(self, name: str, **fields: Any) -> None:
        if name == "partition_assigned":
            self._since[fields["partition"]] = time.monotonic()
        elif name == "partition_restored":
            self._taken.append(time.monotonic() - self._since.pop(fields["partition"]))


@dataclass(slots=True)
class Takeovers:
    """Seconds of each takeover, and what the ledgers held."""

    seconds: list[float] = field(default_factory=list)
    ledger_bytes: int = 0

    def at(self, share: float) -> float:
        """The time within which that share of the takeovers was over."""
        ranked = sorted(self.seconds)
        return ranked[min(len(ranked) - 1, int(share * len(ranked)))]


async def fill_ledgers(settings: Settings, clock: Rehearsal) -> int:
    """Write ledgers whose lots name a million rows at a provider; returns their bytes.

    Their records are not needed: nobody lands them here. Offset 0 is a request that waits, so that each life begins
    to read where the log is.
    """
    kafka = build_kafka(settings)
    admin = await kafka.admin()
    topics = settings.topics
    kept = {"retention.ms": "-1"}
    await admin.create(topics.requests, PARTITIONS, kept)
    await admin.create(topics.ledger_topic, PARTITIONS, LEDGER_CONFIGS)
    await admin.close()
    size_bytes = 0
    producer = kafka.plain_producer()
    await producer.start()
    now = clock.now()
    key = BatchKey("default", "/v1/chat/completions", "gpt-4o-mini", "24h")
    batch_ids = [new_batch_id(now.timestamp()) for _ in range(LOTS)]
    each = ROWS // LOTS // PARTITIONS
    everybody = tuple(range(PARTITIONS))
    for partition in everybody:
        entries: list[Any] = [LedgerHeader(new_ledger_id(), created_at=now), Watermark(0, now)]
        for number, batch_id in enumerate(batch_ids):
            # Two batches gather rows side by side, so that their offsets interleave.
            pair, odd = divmod(number, 2)
            offsets = OffsetSet(range(1 + pair * 2 * each + odd, 1 + (pair + 1) * 2 * each, 2))
            entries.append(
                Lot(
                    LotId(batch_id), Lane.BATCH, LotState.SUBMITTED, key, offsets, 1, everybody, now,
                    rows=each * PARTITIONS, own_rows=len(offsets), input_file_id=FileId(f"file-{number}"),
                    provider_batch_ids=(ProviderBatchId(f"batch_{number}"),), submitted_at=now,
                )
            )  # fmt: skip
        records = []
        for entry in entries:
            name, value = encode(entry)
            size_bytes += len(name) + len(value or b"")
            records.append(OutRecord(topics.ledger_topic, name, value, partition=partition))
        await producer.send(records)
        at_ms = round(now.timestamp() * 1000)
        waiting = OutRecord(topics.requests, None, request(partition, 200), partition=partition, timestamp_ms=at_ms)
        await producer.send([waiting])
    await producer.stop()
    await kafka.aclose()
    return size_bytes


async def measure(bootstrap: str, base_url: str, clock: Rehearsal, folder: Path) -> Takeovers:
    """Three rounds of a rolling restart."""
    found = Takeovers()
    settings = settings_for(bootstrap, base_url, clock, folder)
    settings = settings.model_copy(
        update={
            "topics": settings.topics.model_copy(update={"partitions": PARTITIONS, "group": f"bench-{uuid4().hex[:8]}"})
        }
    )
    found.ledger_bytes = await fill_ledgers(settings, clock)
    services: list[Service | None] = [None] * REPLICAS

    async def start(number: int) -> None:
        own = settings.model_copy(update={"state_dir": folder / f"state-{number}"})
        made = Service(own, telemetry=Stopwatch(found.seconds))
        await made.start()
        services[number] = made

    async def shared_out() -> None:
        until = time.monotonic() + WAIT_LIMIT_S
        while time.monotonic() < until:
            owned: list[set[str]] = []
            for service in services:
                partitions = (await service.status()).get("partitions", {}) if service is not None else {}
                owned.append(set(partitions))  # type: ignore[call-overload]
            if all(owned) and sum(len(one) for one in owned) == PARTITIONS:
                return
            await asyncio.sleep(0.1)
        raise SystemExit("the partitions were not shared out in time")

    try:
        for number in range(REPLICAS):
            await start(number)
        await shared_out()
        for _ in range(3):
            for number in range(REPLICAS):
                service = services[number]
                assert service is not None
                await service.stop()
                await start(number)
                await shared_out()
    finally:
        for service in services:
            if service is not None:
                await service.stop()
    return found


def explain(found: Takeovers) -> str:
    """One line for the README."""
    return (
        f"takeover: {len(found.seconds)} takeovers of {PARTITIONS} partitions with {ROWS:,} rows in {LOTS} batches"
        f" ({found.ledger_bytes / 1e6:.1f} MB of ledger): p50 {found.at(0.5):.2f} s, p99 {found.at(0.99):.2f} s,"
        f" max {max(found.seconds):.2f} s (goal: p99 {GOAL_S:.0f} s)"
    )
