"""A replica that dies, or is stopped, while the sync lane calls: real processes on a real broker.

The provider has run what was called, and nobody has read its answers: exactly those rows may be paid twice.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from service_kit import PARTITIONS, SPEED, Replica, Rig, Row

from batchferry.kafka import AioKafka
from batchferry.ports import OutRecord
from broker import RealBroker

pytestmark = [pytest.mark.real_broker, pytest.mark.timeout(180)]

WAVE_ROWS = 4
"""All waves under way together have so many rows; the lane also begins with so many calls at one time."""
RERUN, FAIL = "rerun-model", "fail-model"
MakeRig = Callable[..., Any]


@pytest.fixture
async def make_rig(broker, kafka: AioKafka, tmp_path: Path) -> AsyncIterator[MakeRig]:
    """Makes the rig of a test; it is taken down at the end."""
    async with AsyncExitStack() as stack:

        async def make(**otherwise: object) -> Rig:
            session_s = 3.0 if isinstance(broker, RealBroker) else 6.0
            rig = Rig(
                kafka, broker.bootstrap, tmp_path, **{"session_s": session_s, "wave_rows": WAVE_ROWS, **otherwise}
            )
            return await stack.enter_async_context(rig)

        yield make


def calling(rig: Rig, call_timeout_s: float) -> Replica:
    """A replica whose rows all go through the sync lane; those of one model may not be run again.

    ``call_timeout_s`` must cover the real seconds that a test holds calls for; a successor waits as long.
    """
    made = rig.replica()
    settings = yaml.safe_load(made._config.read_text())
    settings["accounts"]["default"]["sync"] = {
        "enabled": True,
        "call_timeout_s": call_timeout_s,
    }
    route = {**settings["routes"]["default"], "long_row": {"over_tokens": 1, "lane": "sync"}}
    settings["routes"] = {FAIL: {**route, "models": [FAIL], "sync_unknown": "fail"}, "default": route}
    made._config.write_text(yaml.safe_dump(settings, sort_keys=False))
    return made


async def produce(rig: Rig, rows: int, *models: str) -> dict[str, list[Row]]:
    """So many rows of each model over all partitions, all of one instant."""
    producer = rig.kafka.plain_producer()
    await producer.start()
    at_ms = int((rig.origin + (datetime.now(UTC) - rig.started) * SPEED).timestamp() * 1000)
    records = []
    made: dict[str, list[Row]] = {model: [] for model in models}
    for number in range(rows):
        partition = number % PARTITIONS
        for model in models:
            offset = sum(1 for row in rig.rows if row.partition == partition)
            words = f"question {number} for {model} {rig.tag}"
            body = {"model": model, "messages": [{"role": "user", "content": words}]}
            value = json.dumps({"custom_id": f"{model}-{number}", "body": body}).encode()
            records.append(OutRecord(rig.requests, b"key", value, (), partition, at_ms))
            rig.rows.append(row := Row(partition, offset, body))
            made[model].append(row)
    await producer.send(records)
    await producer.stop()
    return made


async def all_answered(rig: Rig, rows: list[Row]) -> dict[tuple[int, int], dict[str, Any]]:
    """The outcome of each row, checked to be the only one."""
    wanted = {(row.partition, row.offset) for row in rows}
    await rig.until(lambda: wanted <= rig.outcomes.keys(), "an outcome for every request", 40)
    assert rig._tail is not None
    await rig.until(rig._tail.caught_up, "the end of the outputs")
    found = {where: rig.outcomes[where] for where in wanted}
    assert {len(records) for records in found.values()} == {1}
    return {where: json.loads(records[0].value or b"") for where, records in found.items()}


def place(row: Row) -> tuple[int, int]:
    """Partition and offset."""
    return row.partition, row.offset


def paid(rig: Rig, row: Row) -> int:
    """How often the provider ran a row to its end."""
    return rig.simulator.bill.paid_runs_of_body(row.body)


async def all_lots_gone(rig: Rig) -> None:
    """No wave and no waiting lot is left in any ledger partition."""

    async def empty() -> bool:
        return not any(ledger.lots for ledger in (await rig.ledgers()).values())

    await rig.until(empty, "the end of every lot", 30, 0.2)


async def test_a_crash_in_a_wave_costs_its_rows_at_most_once_more(make_rig: MakeRig) -> None:
    """Kill -9 behind the calls, before their answers are read: ``wave_rows`` rows are counted as perhaps paid twice;
    they are run again, or, with ``sync_unknown: fail``, end as that class.
    """
    rig = await make_rig()
    gate = rig.put(call="sync", kind="gate", gate="calls", after_work=True)
    one = calling(rig, 5.0)
    made = await produce(rig, 9, RERUN, FAIL)
    one.go()
    await rig.reached("calls", WAVE_ROWS)
    one.kill()
    rig.simulator.faults.take_away(gate)
    await rig.release("calls")
    called = {place(row) for row in rig.rows if paid(rig, row)}
    assert len(called) == WAVE_ROWS
    one.go()
    outcomes = await all_answered(rig, rig.rows)
    lost = one.told("possibly_paid_twice")
    assert {line["reason"] for line in lost} == {"sync_wave_lost"}
    assert sum(int(line["rows"]) for line in lost) == WAVE_ROWS
    for row in made[RERUN]:
        assert outcomes[place(row)]["kind"] == "result"
        assert paid(rig, row) == (2 if place(row) in called else 1)
    ended = {place(row): outcomes[place(row)].get("error", {}).get("class") for row in made[FAIL]}
    assert set(ended.values()) == {None, "sync_unknown"}
    assert {where for where, row_class in ended.items() if row_class is not None} == called & ended.keys()
    assert [paid(rig, row) for row in made[FAIL]] == [1] * len(made[FAIL])
    assert {place(row) for row in made[RERUN]} & called
    assert {place(row) for row in made[FAIL]} & called
    await all_lots_gone(rig)


async def test_a_stop_lets_the_calls_under_way_end(make_rig: MakeRig) -> None:
    """SIGTERM while calls are out: their answers are published, no further call begins, and the next life calls the
    rest; nothing is paid twice.
    """
    rig = await make_rig()
    rig.put(call="sync", kind="gate", gate="calls")
    one = calling(rig, 20.0)
    rows = (await produce(rig, 18, RERUN))[RERUN]
    one.go()
    await rig.reached("calls", WAVE_ROWS)
    stopping = asyncio.create_task(one.terminate())
    await rig.until(lambda: one.told("service_stopping"), "the stop to begin")
    await rig.release("calls")
    assert await stopping == 0, one.tail_of_log()
    called = rig.calls("sync")
    await rig.until(lambda: len(rig.outcomes) >= called, "the answers of the calls under way")
    assert WAVE_ROWS <= called < len(rows)
    one.go()
    outcomes = await all_answered(rig, rows)
    assert {said["kind"] for said in outcomes.values()} == {"result"}
    assert [paid(rig, row) for row in rows] == [1] * len(rows)
    assert one.told("possibly_paid_twice") == []
    await all_lots_gone(rig)
