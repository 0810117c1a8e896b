"""``batchferry sweep``: the wish it writes, and what a dry run shows without touching anything."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from cli_kit import Run, settings_file

from batchferry.cli.exits import Exit
from batchferry.clock import SystemClock
from batchferry.domain import control
from batchferry.domain.batchkey import BatchKey
from batchferry.domain.control import ControlState, SweepWish
from batchferry.domain.ids import LotId, batch_file_name, new_batch_id, new_ledger_id
from batchferry.domain.ledger import Lane, LedgerHeader, Lot, LotState, encode
from batchferry.domain.offsets import OffsetSet
from batchferry.domain.provider import BatchSnapshot, UploadedFile
from batchferry.kafka import AioKafka
from batchferry.ports import OutRecord
from batchferry.providers.openai import OpenAIAccount, OpenAIProvider
from batchferry.simulator import DEFAULT_KEY, Simulator, SimulatorSettings
from broker.kit import patient_settings

pytestmark = pytest.mark.broker
CHAT = "/v1/chat/completions"
LINE = b'{"model":"gpt-4o-mini","messages":[{"role":"user","content":"hello"}]}'


class Quay(NamedTuple):
    """Settings of a service on this run's broker, with an account at a simulator."""

    config: Path
    bootstrap: str
    base_url: str
    ledger: str
    control: str


@pytest.fixture(name="simulator")
def run_simulator() -> Iterator[Simulator]:
    """A simulated provider in a thread of its own: commands run their own event loop in this one."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    simulator = Simulator(SimulatorSettings())
    asyncio.run_coroutine_threadsafe(simulator.start(), loop).result(30)
    yield simulator
    asyncio.run_coroutine_threadsafe(simulator.stop(), loop).result(30)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)
    loop.close()


@pytest.fixture
def quay(broker: Any, simulator: Simulator, topic_name: Callable[[str], str], tmp_path: Path) -> Quay:
    """Settings with topics nobody else uses; none exists yet."""
    names = {name: topic_name(name) for name in ("requests", "results", "failures", "events", "group")}
    settings = {
        "kafka": {"bootstrap_servers": [broker.bootstrap]},
        "topics": {**names, "partitions": 1},
        "accounts": {"default": {"api_key": DEFAULT_KEY, "base_url": simulator.base_url}},
    }
    internal = f"{names['requests']}.{names['group']}"
    return Quay(
        settings_file(tmp_path, settings),
        broker.bootstrap,
        simulator.base_url,
        f"{internal}.ledger",
        f"{internal}.control",
    )


class Bytes:
    """An upload source."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.size_bytes = len(data)

    async def chunks(self) -> AsyncIterator[bytes]:
        yield self.data


async def set_up(quay: Quay) -> dict[str, str]:
    """A ledger with one lot; at the provider its batch, a batch of ours that no lot names, and a foreign one."""
    kafka = AioKafka(patient_settings(quay.bootstrap))
    provider = OpenAIProvider(OpenAIAccount("default", quay.base_url, DEFAULT_KEY), SystemClock())
    admin = await kafka.admin()
    for topic in (quay.ledger, quay.control):
        await admin.create(topic, 1, {"cleanup.policy": "compact"})
    await admin.close()
    ours, theirs = new_ledger_id(), new_ledger_id()
    now = datetime.now(UTC)
    made: dict[str, str] = {}
    for name, ledger_id in (("known", ours), ("orphan", ours), ("foreign", theirs)):
        batch_id = new_batch_id((now - timedelta(hours=1)).timestamp())
        line = provider.line_head(f"{ledger_id}-0-1-1") + provider.render_line(CHAT, LINE)
        file = await provider.upload(Bytes(line), batch_file_name(ledger_id, batch_id), 1_209_600)
        assert isinstance(file, UploadedFile)
        marks = {"batch_id": batch_id, "ledger_id": ledger_id}
        batch = await provider.create(file.file_id, CHAT, "24h", marks)
        assert isinstance(batch, BatchSnapshot)
        made |= {name: batch.provider_batch_id, f"{name} id": batch_id, f"{name} file": file.file_id}
    key = BatchKey("default", CHAT, "gpt-4o-mini", "24h")
    lot = Lot(
        LotId(made["known id"]), Lane.BATCH, LotState.SUBMITTED, key, OffsetSet([1]), 1, (0,), now,
        input_file_id=made["known file"], provider_batch_ids=(made["known"],),
    )  # type: ignore[arg-type]  # fmt: skip
    producer = kafka.plain_producer()
    await producer.start()
    await producer.send([OutRecord(quay.ledger, *encode(one), partition=0) for one in (LedgerHeader(ours), lot)])
    await producer.stop()
    await provider.close()
    await kafka.aclose()
    return made


async def standing_wishes(quay: Quay) -> dict[str, SweepWish]:
    """What the control topic says of sweeps."""
    kafka = AioKafka(patient_settings(quay.bootstrap))
    reader = kafka.reader()
    await reader.start()
    state = ControlState()
    async for records in reader.read_to_end(quay.control, 0):
        for record in records:
            entry = control.decode(record.key or b"", record.value)
            assert entry is not None
            state.apply(entry)
    await reader.stop()
    await kafka.aclose()
    return state.sweeps


def test_a_dry_run_shows_and_the_wish_is_written(cli: Run, quay: Quay, simulator: Simulator) -> None:
    """The orphan is named with what a sweep would do to it; known and foreign batches are counted or left alone, the
    provider is only read; without --dry-run a record is written for one account or for all.
    """
    for flags in ([], ["--dry-run"]):
        missing = cli("sweep", "--config", quay.config, *flags)
        assert missing.code == Exit.FAILED
        assert "does not exist" in missing.err
    made = asyncio.run(set_up(quay))
    before = simulator.faults.calls.copy()
    ran = cli("sweep", "--config", quay.config, "--dry-run")
    assert ran.code == Exit.OK
    assert ran.json["complete"]
    assert ran.json["counts"] == {"known": 2, "orphan": 1, "other_ledger": 2}
    acts = {one["provider_batch_id"] or one["file_id"]: (one["why"], one["act"]) for one in ran.json["findings"]}
    assert acts == {
        made["orphan"]: ("orphan", "cancel"),
        made["foreign"]: ("other_ledger", "none"),
        made["foreign file"]: ("other_ledger", "none"),
    }
    shown = cli("sweep", "--config", quay.config, "--dry-run", "--table").out
    assert "cancel it" in shown
    assert "1 orphan" in shown
    asked = {name for name, calls in simulator.faults.calls.items() if calls != before.get(name, 0)}
    assert asked == {"list", "file_list"}
    assert asyncio.run(standing_wishes(quay)) == {}

    began = datetime.now(UTC) - timedelta(milliseconds=1)
    written = cli("sweep", "--config", quay.config, "--json")
    assert (written.code, written.json["scope"]) == (Exit.OK, "all")
    assert cli("sweep", "--config", quay.config, "--account", "default", "--table").code == Exit.OK
    wishes = asyncio.run(standing_wishes(quay))
    assert wishes.keys() == {"all", "default"}
    assert all(began <= wish.at <= datetime.now(UTC) for wish in wishes.values())
    unknown = cli("sweep", "--config", quay.config, "--account", "nope")
    assert unknown.code == Exit.USAGE
    assert "default" in unknown.err


def test_a_dry_run_that_could_not_see_everything_fails(cli: Run, quay: Quay, tmp_path: Path) -> None:
    """A wrong key, or a ledger record that cannot be read: told by name, judged nothing, and the exit code says so."""
    asyncio.run(set_up(quay))
    wrong = yaml.safe_load(quay.config.read_text())
    wrong["accounts"]["default"]["api_key"] = "sk-wrong"
    (tmp_path / "wrong").mkdir()
    ran = cli("sweep", "--config", settings_file(tmp_path / "wrong", wrong), "--dry-run")
    assert ran.code == Exit.FAILED
    assert "account default: list: account HTTP 401" in ran.err
    assert ran.json["findings"] == []

    async def damage() -> None:
        kafka = AioKafka(patient_settings(quay.bootstrap))
        producer = kafka.plain_producer()
        await producer.start()
        await producer.send([OutRecord(quay.ledger, b"lot/X", b'{"v":99}', partition=0)])
        await producer.stop()
        await kafka.aclose()

    asyncio.run(damage())
    ran = cli("sweep", "--config", quay.config, "--dry-run")
    assert ran.code == Exit.FAILED
    assert "partition 0" in ran.err
    assert (ran.json["complete"], ran.json["findings"]) == (False, [])
