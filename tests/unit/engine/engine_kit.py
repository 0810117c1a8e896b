"""The engine on fakes: a partition whose transactions are kept in a list, a log in memory, the local store as it is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

from batchferry.app import request_rules
from batchferry.config import load_settings
from batchferry.domain.batchkey import BatchKey
from batchferry.domain.control import ControlEntry, ControlState
from batchferry.domain.errors import PartitionLost
from batchferry.domain.ids import BatchId, FileId, LotId, ProviderBatchId
from batchferry.domain.ledger import Claim, Lane, Lot, LotState
from batchferry.domain.machine import Batch, BatchState
from batchferry.domain.offsets import OffsetSet
from batchferry.domain.partition import PartitionLedger
from batchferry.domain.provider import BatchPage, BatchSnapshot, ProviderStatus
from batchferry.engine.admission import Admission
from batchferry.engine.fates import Fates
from batchferry.engine.holds import Holds
from batchferry.engine.outcomes import OutcomeWriter
from batchferry.engine.partition import PartitionPlaces, PartitionTask, SettleLimits
from batchferry.engine.routing import Router
from batchferry.engine.rowsource import RowSource
from batchferry.engine.splitting import RowSplitter
from batchferry.ports import OutRecord
from batchferry.store import LocalState
from batchferry.telemetry import RecordingTelemetry

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
ACCOUNT = "default"
KEY = BatchKey(ACCOUNT, "/v1/chat/completions", "gpt-4o-mini", "24h")
HEAD = b"*" * 50
BATCH = BatchId("01JAAAAAAAAAAAAAAAAAAAAAAA")
LOT = LotId(BATCH)
PLATFORM = ProviderBatchId("batch_1")


class Stopped:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.at = NOW

    def now(self) -> datetime:
        return self.at

    def monotonic(self) -> float:
        return (self.at - NOW).total_seconds()

    async def sleep(self, seconds: float) -> None:
        self.at += timedelta(seconds=seconds)
        await asyncio.sleep(0)


class Producer:
    """A transactional producer that keeps what it was given; it may be gated, or be told to fail."""

    def __init__(self) -> None:
        self.transactions: list[tuple[Sequence[OutRecord], int | None]] = []
        self.last_transaction_at = 0.0
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked = asyncio.Semaphore(0)
        """Released by each transaction that begins."""
        self.is_fenced = False

    async def init(self) -> None:
        self.last_transaction_at = asyncio.get_running_loop().time()

    async def transact(self, records: Sequence[OutRecord], committed_offset: int | None = None) -> None:
        self.asked.release()
        await self.gate.wait()
        if self.is_fenced:
            raise PartitionLost(0, "fenced")
        self.transactions.append((list(records), committed_offset))
        self.last_transaction_at = asyncio.get_running_loop().time()

    async def close(self) -> None:
        self.last_transaction_at = 0.0

    def offsets(self, transaction: int) -> list[int]:
        """Which input records the outcomes of a transaction speak of."""
        return [int(one.key or b"") for one in self.transactions[transaction][0] if one.topic == "outcomes"]


class Log:
    """A Kafka port as far as restoring a partition and reading records again need one."""

    def __init__(self) -> None:
        self.records: dict[tuple[int, int], Any] = {}
        self.producers: dict[int, Producer] = {}
        self.readers = 0
        """Readers that were started and not stopped."""

    def put(self, offset: int, text: str = "hi", partition: int = 0, **changes: Any) -> Any:
        """A request that a producer sent a minute ago."""
        model = changes.pop("model", "gpt-4o-mini")
        body = {"model": model, "messages": [{"role": "user", "content": text}]}
        fields: dict[str, Any] = {
            "topic": "requests",
            "partition": partition,
            "offset": offset,
            "timestamp": round(NOW.timestamp() * 1000) - 60_000,
            "timestamp_type": 0,
            "key": b"k%d" % offset,
            "value": json.dumps({"custom_id": f"c{offset}", "body": body}).encode(),
            "headers": [("trace", b"t")],
        }
        record = self.records[partition, offset] = SimpleNamespace(**{**fields, **changes})
        return record

    def partition_producer(self, _topic: str, partition: int, _group: str, _transactional_id: str) -> Producer:
        return self.producers.setdefault(partition, Producer())

    def reader(self) -> Any:
        return Reader(self)


class Reader:
    """Reads the log; the ledger behind it is empty."""

    def __init__(self, log: Log) -> None:
        self._log = log

    async def start(self) -> None:
        self._log.readers += 1

    async def stop(self) -> None:
        self._log.readers -= 1

    async def read_to_end(self, _topic: str, _partition: int, _start: int | None = None) -> AsyncIterator[list[Any]]:
        for nothing in ():
            yield nothing

    async def read_offsets(self, _topic: str, partition: int, offsets: OffsetSet) -> AsyncIterator[list[Any]]:
        for offset in offsets:
            if (partition, offset) in self._log.records:
                yield [self._log.records[partition, offset]]

    async def bounds(self, _topic: str, partitions: Sequence[int]) -> Mapping[int, tuple[int, int]]:
        return dict.fromkeys(partitions, (0, 1_000))


class Provider:
    """One account. ``pages`` is its batch list, ``shown`` what it answers about a batch, ``gone`` the deleted files."""

    name = ACCOUNT
    is_inline = False

    def __init__(self) -> None:
        self.pages: dict[str | None, Any] = {None: BatchPage(())}
        self.shown: Any = None
        self.asked: list[str] = []
        self.gone: list[str] = []

    def check_request(self, _endpoint: str, _body: bytes) -> None:
        return None

    def render_line(self, _url: str, body: bytes) -> bytes:
        return body + b"\n"

    def line_head(self, _wire_id: str) -> bytes:
        return HEAD

    async def list_batches(self, cursor: str | None = None) -> Any:
        return self.pages[cursor]

    async def retrieve(self, provider_batch_id: str) -> Any:
        self.asked.append(provider_batch_id)
        return self.shown

    async def delete_file(self, file_id: str) -> None:
        self.gone.append(file_id)


class Fleet:
    """The fleet view of one replica: our ledgers, those given as ``others``, and a control topic that is a list."""

    def __init__(self, tasks: Mapping[int, PartitionTask]) -> None:
        self._tasks = tasks
        self.others: dict[int, PartitionLedger] = {}
        self.control = ControlState()
        self.published: list[ControlEntry] = []
        self.events: list[dict[str, Any]] = []
        """What was sent to the events topic."""
        self.catches_up = 0
        """How often somebody wanted to have read everything."""

    is_ready = True

    async def ready(self) -> None:
        """All is read."""

    async def catch_up(self) -> None:
        self.catches_up += 1

    def ledgers(self) -> Mapping[int, PartitionLedger]:
        return {**{partition: task.ledger for partition, task in self._tasks.items()}, **self.others}

    def lots_of(self, batch_id: str) -> Mapping[int, Lot]:
        lot_id = LotId(batch_id)
        return {p: ledger.lots[lot_id] for p, ledger in self.ledgers().items() if lot_id in ledger.lots}

    async def publish(self, entry: ControlEntry) -> None:
        self.control.apply(entry)
        self.published.append(entry)

    async def send(self, records: Sequence[OutRecord]) -> None:
        self.events.extend(json.loads(one.value or b"") for one in records)


async def no_late_rows(*_: object) -> OffsetSet:
    """Every batch comes home in time."""
    return OffsetSet()


class Harbour:
    """Everything that a room of the engine is made of. The sync lane is off unless ``limits`` turn it on."""

    def __init__(self, folder: Path, **limits: Any) -> None:
        self.settings: Any = load_settings(
            None,
            {"OPENAI_API_KEY": "sk-test-0123456789abcdef"},
            dotenv_path=None,
            overrides={"accounts.default.sync.enabled": False, **limits},
        )
        self.clock: Any = Stopped()
        self.telemetry = RecordingTelemetry()
        self.log: Any = Log()
        self.store = LocalState(folder / "state")
        self.provider: Any = Provider()
        self.tasks: dict[int, PartitionTask] = {}
        self.router = Router(self.settings)
        topics = self.settings.topics
        names = (topics.results, topics.failures, topics.review_topic)
        self.outcomes = OutcomeWriter(
            self.settings, self.clock, self.telemetry, dict.fromkeys(names, 1_000_000), {"requests": 2}
        )
        self.source = RowSource(
            self.log, self.store, self.clock, "requests", request_rules(self.settings), self.router,
            {ACCOUNT: self.provider}, self.telemetry,
        )  # fmt: skip
        self.fleet: Any = Fleet(self.tasks)
        self.holds = Holds(self.fleet, self.clock, self.telemetry, self.outcomes)
        self.admission = Admission(
            self.settings, self.fleet, self.holds, self.clock, self.telemetry, self.router, lambda: 1.0
        )
        self.splitter = RowSplitter(self.settings, self.router, request_rules(self.settings), self.telemetry)
        self.fates = Fates(
            self.settings, self.store, self.clock, self.telemetry, self.router, self.source, self.outcomes,
            self.splitter,
        )  # fmt: skip
        self._settlers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        await self.store.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self.tasks.values():
            await task.close()
        await asyncio.gather(*self._settlers)
        await self.store.close()

    async def task(self, partition: int = 0, *, settles: bool = True, **limits: Any) -> PartitionTask:
        """A live partition."""
        settle_limits = SettleLimits(
            **{"chunk_rows": 100, "chunk_bytes": 1_000_000, "max_delay_s": 0.01, "queue_rows": 1_000, **limits}
        )
        task = PartitionTask(
            partition, self.log, self.clock, self.telemetry, PartitionPlaces("requests", "ledger", "group"),
            settle_limits, asyncio.Semaphore(4),
        )  # fmt: skip
        await task.restore(self.log.reader(), None, Claim("me", "0", NOW))
        self.tasks[partition] = task
        if settles:
            self.settle(task)
        return task

    def settle(self, task: PartitionTask) -> None:
        """Let the partition's outcomes go."""
        self._settlers.append(asyncio.create_task(task.run_settling()))

    async def hold(self, lot: Lot) -> Lot:
        """Put a lot into the ledger of its one partition."""
        await self.tasks[lot.partitions[0]].commit(lambda _: [lot])
        return lot

    async def settled(self) -> None:
        """Wait until all that is queued is committed."""
        for task in self.tasks.values():
            await task.flush()

    def written(self, topic: str) -> list[OutRecord]:
        """What this topic has been told in transactions, partition by partition in their order."""
        return [
            record
            for producer in self.log.producers.values()
            for records, _ in producer.transactions
            for record in records
            if record.topic == topic
        ]

    def failures(self) -> dict[int, dict[str, Any]]:
        """What the failures topic has been told, by offset."""
        told = [json.loads(record.value or b"") for record in self.written(self.settings.topics.failures)]
        return {one["source"]["offset"]: one for one in told}


def lot(state: LotState, offsets: Sequence[int], partition: int = 0, **changes: Any) -> Lot:
    """A lot of these rows."""
    rows = len(offsets)
    fields: dict[str, Any] = {
        "lot_id": LOT,
        "lane": Lane.BATCH,
        "state": state,
        "key": KEY,
        "offsets": OffsetSet(offsets),
        "submission": 1,
        "partitions": (partition,),
        "created_at": NOW,
        "rows": rows,
        "tokens": 20 * rows,
        "bytes": 200 * rows,
        "own_rows": rows,
        "own_tokens": 20 * rows,
        "own_bytes": 200 * rows,
    }
    return Lot(**{**fields, **changes})


def batch(state: BatchState, **changes: Any) -> Batch:
    """The batch of a lot."""
    fields: dict[str, Any] = {
        "batch_id": BATCH,
        "key": KEY,
        "partitions": (0,),
        "rows": 2,
        "window_s": 86_400.0,
        "sealed_at": NOW,
        "state": state,
        "state_since": NOW,
    }
    return Batch(**{**fields, **changes})


def shown(status: ProviderStatus = ProviderStatus.COMPLETED, **changes: Any) -> BatchSnapshot:
    """The provider's answer about it."""
    fields: dict[str, Any] = {"created_at": NOW, "output_file_id": FileId("out"), **changes}
    return BatchSnapshot(PLATFORM, status, status.value, **fields)
