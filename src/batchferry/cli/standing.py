"""Where everything stands, read from Kafka alone: no running service is asked or needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

import orjson

from batchferry.cli.errors import TopicMissing
from batchferry.domain import control
from batchferry.domain.errors import LedgerTooNew
from batchferry.domain.ledger import Lot, LotState
from batchferry.domain.partition import PartitionLedger

if TYPE_CHECKING:
    from batchferry.config import Settings
    from batchferry.ports import KafkaAdmin, KafkaPort, LogReader

_ORDER = {state: number for number, state in enumerate(LotState)}
MAX_EVENTS = 500
"""Events of one batch that are kept to be shown, the newest."""


@dataclass(slots=True)
class PartitionStanding:
    """One input partition."""

    partition: int
    log_start: int
    log_end: int
    read: int | None
    """Where the service reads next, as it last reported; None before its first report."""
    committed: int | None
    """The group's committed offset: the settled watermark."""
    watermark: int
    unsettled: int
    """Records without an outcome yet."""
    in_lots: int
    """Of those, the ones that are in a batch (or wait for the next one)."""
    lots: Mapping[str, int]
    ledger_id: str | None
    owner: str | None
    """Incarnation that took the partition over last, with its version and when."""
    fault: str = ""

    @property
    def open(self) -> int:
        """Records that are in no batch yet."""
        return max(0, self.unsettled - self.in_lots)


@dataclass(slots=True)
class BatchStanding:
    """One batch, put together from its lots."""

    batch_id: str
    lots: dict[int, Lot] = field(default_factory=dict)
    unsettled: int = 0

    @property
    def any_lot(self) -> Lot:
        """A lot, for what all of them say."""
        return next(iter(self.lots.values()))

    @property
    def state(self) -> LotState:
        """The least advanced state of its lots."""
        return min((lot.state for lot in self.lots.values()), key=_ORDER.__getitem__)

    @property
    def provider_ids(self) -> list[str]:
        """The provider's names for it."""
        return sorted({one for lot in self.lots.values() for one in lot.provider_batch_ids})

    @property
    def classes(self) -> Counter[str]:
        """Lines by class, of the lots that are done."""
        counted: Counter[str] = Counter()
        for lot in self.lots.values():
            if lot.tally is not None:
                counted.update(lot.tally.classes)
        return counted

    @property
    def prices(self) -> tuple[int | None, int | None]:
        """What its lines cost and would have cost outside a batch, in picodollars; None where not known."""
        paid = listed = 0
        for lot in self.lots.values():
            if lot.tally is None or lot.tally.cost_picodollars is None or lot.tally.list_picodollars is None:
                return None, None
            paid += lot.tally.cost_picodollars
            listed += lot.tally.list_picodollars
        return paid, listed

    def as_json(self) -> dict[str, object]:
        """For --json."""
        lot = self.any_lot
        paid, listed = self.prices
        return {
            "batch_id": self.batch_id,
            "state": self.state.value,
            "lane": lot.lane.value,
            "key": lot.key._asdict(),
            "rows": lot.rows,
            "bytes": lot.bytes,
            "tokens": lot.tokens,
            "unsettled": self.unsettled,
            "seal_reason": lot.seal_reason,
            "partitions": list(lot.partitions),
            "provider_batch_ids": self.provider_ids,
            "created_at": lot.created_at,
            "submitted_at": lot.submitted_at,
            "classes": dict(self.classes),
            "cost_picodollars": paid,
            "sync_cost_picodollars": listed,
            "lots": [
                {
                    "partition": partition,
                    "state": one.state.value,
                    "rows": one.own_rows,
                    "submission": one.submission,
                    "input_file_id": one.input_file_id,
                    "provider_batch_ids": list(one.provider_batch_ids),
                    "classes": {} if one.tally is None else dict(one.tally.classes),
                }
                for partition, one in sorted(self.lots.items())
            ],
        }


@dataclass(slots=True)
class Standing:
    """Everything."""

    topic: str
    group: str
    at: datetime
    partitions: list[PartitionStanding]
    batches: list[BatchStanding]
    """Newest first."""
    holds: list[control.Hold]
    ledgers: Mapping[int, PartitionLedger] = field(default_factory=dict)
    """What each partition's ledger says, for questions about a single row."""
    controls: control.ControlState = field(default_factory=control.ControlState)

    @property
    def unsettled(self) -> int:
        """Records without an outcome yet."""
        return sum(one.unsettled for one in self.partitions)


async def read_standing(kafka: KafkaPort, settings: Settings, now: datetime) -> Standing:
    """Read ledgers, control topic and committed offsets.

    Raises:
        KafkaUnavailable: no broker answered.
        TopicMissing: the input topic does not exist.
    """
    topics = settings.topics
    admin = await kafka.admin()
    reader = kafka.reader()
    try:
        found = await admin.describe([topics.requests, topics.ledger_topic, topics.control_topic])
        requests = found[topics.requests]
        if requests is None:
            raise TopicMissing(f"topic {topics.requests} does not exist; correct topics.requests, or produce into it")
        committed = await _committed(admin, topics.group, topics.requests)
        read = await _committed(admin, f"{topics.group}.read", topics.requests)
        await reader.start()
        bounds = await reader.bounds(topics.requests, range(requests.partitions))
        ledger_topic = found[topics.ledger_topic]
        there = 0 if ledger_topic is None else ledger_topic.partitions
        partitions: list[PartitionStanding] = []
        batches: dict[str, BatchStanding] = {}
        ledgers: dict[int, PartitionLedger] = {}
        for partition in range(requests.partitions):
            ledger = ledgers[partition] = PartitionLedger(partition)
            fault = "" if partition >= there else await _replay(reader, topics.ledger_topic, ledger)
            partitions.append(_standing_of(ledger, bounds[partition], read, committed, fault))
            for lot in ledger.lots.values():
                batch = batches.setdefault(lot.lot_id, BatchStanding(lot.lot_id))
                batch.lots[partition] = lot
                batch.unsettled += len(ledger.held_by(lot.lot_id))
        state = control.ControlState()
        if found[topics.control_topic] is not None:
            async for records in reader.read_to_end(topics.control_topic, 0):
                for record in records:
                    entry = None if record.key is None else control.decode(record.key, record.value)
                    if entry is not None:
                        state.apply(entry)
    finally:
        await reader.stop()
        await admin.close()
    newest = sorted(batches.values(), key=lambda batch: batch.batch_id, reverse=True)
    holds = list(state.all_standing(now))
    return Standing(topics.requests, topics.group, now, partitions, newest, holds, ledgers, state)


async def read_events(kafka: KafkaPort, settings: Settings, batch_id: str) -> list[dict[str, Any]]:
    """What the events topic says of one batch, oldest first; empty when the topic does not exist."""
    topic = settings.topics.events
    admin = await kafka.admin()
    reader = kafka.reader()
    events: list[dict[str, Any]] = []
    try:
        description = (await admin.describe([topic]))[topic]
        if description is None:
            return []
        await reader.start()
        for partition in range(description.partitions):
            async for records in reader.read_to_end(topic, partition):
                for record in records:
                    if record.key != batch_id.encode() or record.value is None:
                        continue
                    events.append(orjson.loads(record.value))
                    del events[:-MAX_EVENTS]
    finally:
        await reader.stop()
        await admin.close()
    return sorted(events, key=lambda event: str(event.get("at")))


MIN_PREFIX_CHARS = 6
"""A batch may be named by so many of its first characters; what is shorter could be anybody's custom_id."""


def find_batches(standing: Standing, named: str) -> list[BatchStanding]:
    """The batches a person may mean: by our id, the beginning of one, or the provider's id."""
    wanted = named.upper()
    exact = [batch for batch in standing.batches if batch.batch_id == wanted or named in batch.provider_ids]
    if exact or len(wanted) < MIN_PREFIX_CHARS:
        return exact
    return [batch for batch in standing.batches if batch.batch_id.startswith(wanted)]


async def _committed(admin: KafkaAdmin, group: str, topic: str) -> Mapping[int, int]:
    return await admin.committed(group, topic)


async def _replay(reader: LogReader, topic: str, ledger: PartitionLedger) -> str:
    """Read one ledger partition; what could not be read is told, the rest counts."""
    fault = ""
    async for records in reader.read_to_end(topic, ledger.partition):
        for record in records:
            if record.key is None:
                continue
            try:
                ledger.replay(record.key, record.value)
            except (ValueError, LedgerTooNew) as error:
                fault = f"ledger record at {record.offset}: {error}"
    return fault


def _standing_of(
    ledger: PartitionLedger,
    bounds: tuple[int, int],
    read: Mapping[int, int],
    committed: Mapping[int, int],
    fault: str,
) -> PartitionStanding:
    partition = ledger.partition
    start, end = bounds
    first = max(start, ledger.watermark)
    claim = ledger.claim
    return PartitionStanding(
        partition,
        start,
        end,
        read.get(partition),
        committed.get(partition),
        ledger.watermark,
        max(0, end - first - ledger.settled.count_within(first, end)) if end > first else 0,
        len(ledger.held()),
        Counter(lot.state.value for lot in ledger.lots.values()),
        None if ledger.header is None else ledger.header.ledger_id,
        None if claim is None else f"{claim.incarnation} ({claim.app_version}, {claim.at:%Y-%m-%d %H:%M:%SZ})",
        fault,
    )
