"""Single rows and the operator's commands on a broker: show, replay, hold, release."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
from cli_kit import Run, chat_line, settings_file

from batchferry import app
from batchferry.cli.exits import Exit
from batchferry.config import Settings, load_settings
from batchferry.domain.control import ControlState, account_scope, decode
from batchferry.domain.envelope import OutcomeContext, render_failure
from batchferry.domain.rows import RowClass
from batchferry.ports import KafkaPort, OutRecord, Record

pytestmark = pytest.mark.broker
T = TypeVar("T")
NAMES = ("requests", "results", "failures", "events", "control", "ledger")


@pytest.fixture
def config(broker: object, topic_name: Callable[[str], str], tmp_path: Path) -> Path:
    """Settings for this run's broker, with topics nobody else uses, which are there."""
    path = settings_file(
        tmp_path,
        {
            "kafka": {"bootstrap_servers": [broker.bootstrap]},  # type: ignore[attr-defined]
            "topics": {**{name: topic_name(name) for name in NAMES}, "group": topic_name("group"), "partitions": 2},
            "accounts": {"default": {"api_key": "sk-x", "base_url": "http://127.0.0.1:1/v1"}},
        },
    )

    async def make(kafka: KafkaPort, settings: Settings) -> None:
        admin = await kafka.admin()
        try:
            for name in NAMES:
                one = name == "control"
                await admin.create(getattr(settings.topics, name), 1 if one else 2, {})
        finally:
            await admin.close()

    _on(path, make)
    return path


def _on(config: Path, work: Callable[[KafkaPort, Settings], Awaitable[T]]) -> T:
    settings = load_settings(config, None, {})

    async def whole() -> T:
        kafka = app.build_kafka(settings)
        try:
            return await work(kafka, settings)
        finally:
            await kafka.aclose()

    return asyncio.run(whole())


async def _everything(kafka: KafkaPort, topic: str, partitions: int) -> list[Record]:
    reader = kafka.reader()
    await reader.start()
    try:
        return [
            record
            for partition in range(partitions)
            async for records in reader.read_to_end(topic, partition)
            for record in records
        ]
    finally:
        await reader.stop()


def _requests(config: Path) -> list[Record]:
    return _on(config, lambda kafka, settings: _everything(kafka, settings.topics.requests, 2))


def test_a_failure_goes_back_once_and_its_row_can_be_followed(cli: Run, config: Path, tmp_path: Path) -> None:
    """Open rows are shown as waiting; failed ones go back in one transaction, a repetition sends nothing more."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join(chat_line(f"c{number}", "secret words") for number in range(6)) + b"\n")
    assert cli("produce", path, "--config", config, "--header", "tenant=x").code == Exit.OK
    shown = cli("show", "c3", "--config", config)
    assert [row["state"] for row in shown.json["rows"]] == ["open"]
    assert "secret words" not in shown.out
    sources = _requests(config)

    async def fail(kafka: KafkaPort, settings: Settings) -> None:
        producer = kafka.plain_producer()
        await producer.start()
        try:
            for record in sources:
                where = OutcomeContext(
                    ledger_id="0123456789",
                    topic=record.topic,
                    partition=record.partition,
                    offset=record.offset,
                    custom_id=json.loads(record.value or b"")["custom_id"],
                )
                value = render_failure(where, RowClass.TRANSIENT, "server_error", "")
                await producer.send([OutRecord(settings.topics.failures, record.key, value, (), record.partition)])
        finally:
            await producer.stop()

    _on(config, fail)
    assert cli("replay", "--config", config).json["chosen"] == 6
    assert cli("replay", "--config", config, "--yes", "--limit", 4).json["sent"] == 4
    again = cli("replay", "--config", config, "--yes").json
    assert (again["sent"], again["replayed_before"]) == (2, 4)
    assert cli("replay", "--config", config, "--yes").json["sent"] == 0
    everything = _requests(config)
    marks = sorted(value for record in everything for name, value in record.headers if name == "replay-of" and value)
    assert marks == sorted(f"{one.topic}-{one.partition}@{one.offset}".encode() for one in sources)
    for record in everything:
        assert ("tenant", b"x") in record.headers
    states = [row["state"] for row in cli("show", "c3", "--config", config).json["rows"]]
    assert states == ["settled", "open"]


def test_an_operators_hold_reaches_the_control_topic(cli: Run, config: Path) -> None:
    """Hold writes what every replica will follow, release takes it back, and status shows it meanwhile."""
    assert cli("hold", "account:default", "--reason", "maintenance", "--config", config).code == Exit.OK
    holds = cli("status", "--config", config).json["holds"]
    assert [(hold["scope"], hold["reason"]) for hold in holds] == [(account_scope("default"), "operator: maintenance")]
    assert cli("release", "default", "--config", config).code == Exit.OK

    async def standing(kafka: KafkaPort, settings: Settings) -> ControlState:
        state = ControlState()
        for record in await _everything(kafka, settings.topics.control_topic, 1):
            entry = decode(record.key or b"", record.value)
            assert entry is not None
            state.apply(entry)
        return state

    assert _on(config, standing).holds == {}
