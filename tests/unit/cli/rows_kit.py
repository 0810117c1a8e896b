"""A cluster inside the process with the service's topics, and the command line run against it at a fixed instant."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
import yaml

from batchferry import app
from batchferry.cli import main
from batchferry.domain import control, ledger
from batchferry.domain.batchkey import BatchKey
from batchferry.domain.envelope import (
    BatchFacts,
    EventKind,
    OutcomeContext,
    quote_original,
    render_event,
    render_failure,
    render_result,
)
from batchferry.domain.ids import BatchId, LotId, ProviderBatchId
from batchferry.domain.offsets import OffsetSet
from batchferry.domain.provider import Usage
from batchferry.domain.rows import ResultLine, RowClass
from batchferry.ports import OutRecord
from batchferry.simulator.kafka import SimCluster, SimKafka, SimProcess, StoredRecord

NOW = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
KEY = BatchKey("default", "/v1/chat/completions", "gpt-4o-mini", "24h")
LEDGER_ID = "0123456789"
BATCH = "01JT5ZQX3M0000000000000001"
WAVE = "01JT5ZQX3M0000000000000002"
SECRET = "SECRET-WORDS"


class Ran(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class FixedClock:
    """Time stands."""

    def now(self) -> datetime:
        return NOW


def chat(custom_id: str, **more: object) -> bytes:
    """A request; its prompt is a secret."""
    body = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 100, **more}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}).encode()


class Rows:
    """The topics, what is put on them, and the commands."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str], partitions: int = 2) -> None:
        self.cluster = SimCluster(random.Random(1), wall_clock=lambda: NOW, latency_s=(0.0, 0.0))
        self.config = folder / "batchferry.yaml"
        self.config.write_text(yaml.safe_dump(self.settings()))
        self._capfd = capfd
        self._started = 0
        for name in ("requests", "results", "failures", "batch-events"):
            self.cluster.create_topic(name, partitions)
        self.cluster.create_topic("requests.batchferry.ledger", partitions, {"cleanup.policy": "compact"})
        self.cluster.create_topic("requests.batchferry.control", 1, {"cleanup.policy": "compact"})

    def settings(self) -> dict[str, Any]:
        return {
            "accounts": {"default": {"api_key": "sk-x", "base_url": "http://127.0.0.1:1/v1"}},
            "routes": {"all": {"models": ["*"], "sla_s": "30h", "margin_s": "2h"}},
        }

    def kafka(self) -> SimKafka:
        self._started += 1
        return SimKafka(self.cluster, SimProcess(f"cli-{self._started}"))

    def run(self, *arguments: object) -> Ran:
        self._capfd.readouterr()
        code = main.call([*map(str, arguments), "--config", str(self.config)])
        told = self._capfd.readouterr()
        return Ran(int(code), told.out, told.err)

    # ------------------------------------------------------------------------------------------ putting

    def ask(
        self,
        custom_id: str,
        partition: int = 0,
        headers: Iterable[tuple[str, bytes | None]] = (),
        value: bytes | None = None,
        key: bytes | None = b"k",
        hours_ago: float = 1.0,
    ) -> int:
        """A request; its offset."""
        at = NOW - timedelta(hours=hours_ago)
        record = OutRecord(
            "requests", key, value or chat(custom_id), tuple(headers), partition, round(at.timestamp() * 1000)
        )
        return self.cluster.append([record])[0].offset

    def fail(
        self,
        offset: int,
        row_class: RowClass = RowClass.TRANSIENT,
        code: str = "server_error",
        partition: int = 0,
        custom_id: str | None = "c",
        topic: str = "failures",
        hours_ago: float = 0.5,
        value: bytes | None = None,
        **context: Any,
    ) -> None:
        """The failure of a request."""
        at = NOW - timedelta(hours=hours_ago)
        line = ResultLine("w", row_class, 500, "req_1", b'{"error":{"message":"' + SECRET.encode() + b'"}}', code)
        made = render_failure(
            self._context(partition, offset, custom_id, **context),
            row_class,
            code,
            SECRET,
            original=quote_original(value) if value is not None else None,
            line=line,
        )
        self.cluster.append([OutRecord(topic, b"k", made, (), partition, round(at.timestamp() * 1000))])

    def succeed(self, offset: int, partition: int = 0, custom_id: str = "c", **context: Any) -> None:
        """The result of a request."""
        line = ResultLine(
            "w", RowClass.SUCCEEDED, 200, "req_2", b'{"text":"' + SECRET.encode() + b'"}', usage=Usage(9, 3, 0)
        )
        made = render_result(self._context(partition, offset, custom_id, **context), line, None)
        self.cluster.append([OutRecord("results", b"k", made, (), partition)])

    def _context(self, partition: int, offset: int, custom_id: str | None, **more: Any) -> OutcomeContext:
        return OutcomeContext(
            ledger_id=LEDGER_ID,
            topic="requests",
            partition=partition,
            offset=offset,
            custom_id=custom_id,
            t0=NOW - timedelta(hours=1),
            deadline=NOW + timedelta(hours=29),
            deadline_met=True,
            **more,
        )

    def book(self, *entries: ledger.LedgerEntry, partition: int = 0) -> None:
        """Ledger facts."""
        for entry in entries:
            self.cluster.append([OutRecord("requests.batchferry.ledger", *ledger.encode(entry), partition=partition)])

    def settle(self, offset: int, partition: int = 0) -> None:
        """Everything below is settled."""
        self.book(ledger.Watermark(offset, NOW), partition=partition)

    def put(self, entry: control.ControlEntry) -> None:
        """A control record."""
        self.cluster.append([OutRecord("requests.batchferry.control", *control.encode(entry), partition=0)])

    def tell(self, kind: EventKind, at: datetime, batch_id: str | None = None, **fields: Any) -> None:
        """A batch event."""
        batch = None
        if batch_id is not None:
            batch = BatchFacts(
                account="default", provider="openai", endpoint=KEY.endpoint, model=KEY.model, batch_id=batch_id
            )
        value = render_event(kind, f"{kind}-{at}", at, batch, **fields)
        self.cluster.append([OutRecord("batch-events", b"e", value, ())])

    # ----------------------------------------------------------------------------------------- looking

    def requests(self, partition: int = 0) -> list[StoredRecord]:
        return self.cluster.committed_records("requests", partition)

    def controls(self) -> control.ControlState:
        state = control.ControlState()
        for record in self.cluster.committed_records("requests.batchferry.control", 0):
            entry = control.decode(record.key or b"", record.value)
            assert entry is not None
            state.apply(entry)
        return state

    def events(self) -> list[Mapping[str, Any]]:
        stored = [
            record for partition in (0, 1) for record in self.cluster.committed_records("batch-events", partition)
        ]
        return [json.loads(record.value or b"") for record in stored]


def lot(
    *offsets: int,
    batch_id: str = BATCH,
    state: ledger.LotState = ledger.LotState.SUBMITTED,
    lane: ledger.Lane = ledger.Lane.BATCH,
    submission: int = 1,
    provider: str | None = "batch_abc",
    **more: Any,
) -> ledger.Lot:
    """A lot of partition 0."""
    return ledger.Lot(
        lot_id=LotId(batch_id),
        lane=lane,
        state=state,
        key=KEY,
        offsets=OffsetSet(offsets),
        submission=submission,
        partitions=(0,),
        created_at=NOW - timedelta(minutes=50),
        submitted_at=NOW - timedelta(minutes=45),
        rows=len(offsets),
        own_rows=len(offsets),
        seal_reason="time",
        provider_batch_ids=() if provider is None else (ProviderBatchId(provider),),
        **more,
    )


@functools.cache
def _command() -> Any:
    """The command line taken from its functions once: that takes longer than most commands here."""
    return typer.main.get_command(main.cli)


@pytest.fixture(name="rows")
def make_rows(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Rows:
    """The topics, empty."""
    monkeypatch.chdir(tmp_path)
    for name in ("KAFKA_BOOTSTRAP_SERVERS", "OPENAI_API_KEY", "OPENAI_BASE_URL", "BATCHFERRY_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    made = Rows(tmp_path, capfd)
    monkeypatch.setattr(main, "cli", _command())
    monkeypatch.setattr(app, "build_kafka", lambda _settings: made.kafka())
    monkeypatch.setattr(app, "build_clock", lambda _settings: FixedClock())
    return made


__all__ = ["BATCH", "KEY", "NOW", "SECRET", "WAVE", "BatchId", "Rows", "chat", "lot", "make_rows"]
