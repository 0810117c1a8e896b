"""Batches and files of ours that no ledger names: found, cancelled at the second pass, taken away, told.

The zombie here is a create that stood in the network until its batch had been given up, at a provider that had said
the input file was gone when it was not: the one thing that no fence of ours can stop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from inprocess_kit import HOUR_S, QUICK, Pier, Script, chat_body, request

from batchferry.domain import control
from batchferry.domain.control import ALL_ACCOUNTS, SweepWish
from batchferry.domain.ids import LedgerId, batch_file_name, new_batch_id, new_ledger_id
from batchferry.domain.provider import BatchSnapshot, UploadedFile
from batchferry.ports import OutRecord
from batchferry.simulator import CallName, Durations, FaultKind, FaultRule, RunCurve
from batchferry.simulator.jsontext import dump_json
from batchferry.simulator.state import Status

CHAT = "/v1/chat/completions"
SLOW = Durations(
    validating_s=5.0, in_progress=RunCurve(minimum_s=60 * HOUR_S, factor_s=0.0), finalizing_s=3.0, cancelling_s=60.0
)
PATIENCE = {
    "limits": {"submit_ttl_s": 2, "resolve_lag_s": 0.5},
    "accounts": {"default": {"timeouts": {"create_s": 1.5}}},
}


class LateTwin(Script):
    """The batch that was made at last is quick; the zombie, which comes after it, would run for days."""

    def durations(self, life: int) -> Durations:
        return QUICK if life == 1 else SLOW


class Slow(Script):
    """A batch that runs for days."""

    def durations(self, life: int) -> Durations:
        del life
        return SLOW


class Bytes:
    """An upload source."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.size_bytes = len(data)

    async def chunks(self) -> AsyncIterator[bytes]:
        yield self.data


async def upload(pier: Pier, case: str, ledger_id: LedgerId) -> tuple[UploadedFile, str]:
    """Put a file of one row there, named after this ledger; the file and its batch id."""
    assert pier.service is not None
    provider = pier.service.providers["default"]
    line = provider.line_head(f"{ledger_id}-0-7-1") + provider.render_line(CHAT, dump_json(chat_body(case)))
    batch_id = new_batch_id(pier.now.timestamp())
    file = await provider.upload(Bytes(line), batch_file_name(ledger_id, batch_id), 1_209_600)
    assert isinstance(file, UploadedFile)
    return file, batch_id


async def ask_for_a_sweep(pier: Pier) -> None:
    """Write the control record as ``batchferry sweep`` does."""
    assert pier.service is not None
    producer = pier.kafka.plain_producer()
    await producer.start()
    topic = pier.service.settings.topics.control_topic
    await producer.send([OutRecord(topic, *control.encode(SweepWish(ALL_ACCOUNTS, pier.now)), partition=0)])
    await producer.stop()


async def test_what_was_left_behind_is_taken_away_and_nothing_else(
    broker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A zombie's batch is cancelled at the second pass and its files are deleted, and the rows it ran are counted; a
    file whose process died before it recorded anything goes too; another environment's batch on the same account,
    and a batch whose owner is still looking for it, are left alone.
    """
    scripts = {"zombie": LateTwin(), "foreign": Slow()}
    async with Pier(broker.bootstrap, tmp_path, monkeypatch, scripts, partitions=1, **PATIENCE) as pier:
        faults = pier.simulator.faults
        faults.put(FaultRule(call=CallName.CREATE, kind=FaultKind.GATE, gate="create", until_count=1))
        faults.put(FaultRule(call=CallName.DELETE, status=404, until_count=1))  # "gone", and it is not
        await pier.send("zombie", [request("zombie", f"r{number}") for number in range(20)])
        await asyncio.wait_for(faults.gate("create").reached(), 20)
        await ask_for_a_sweep(pier)
        await pier.until(lambda: pier.events("sweep_done"), "a sweep while the create is under way")
        (first,) = pier.events("sweep_done")
        assert (first["known"], first["suspects"]) == (1, 0)  # the file has its lot

        outcomes = await pier.landed("zombie")
        assert {one.row_class for one in outcomes} == {"succeeded"}
        assert [one["reason"] for one in pier.events("batch_dissolved")] == ["never_created"]
        assert pier.service is not None
        foreign_file, foreign_id = await upload(pier, "foreign", theirs := new_ledger_id())
        foreign = await pier.service.providers["default"].create(
            foreign_file.file_id, CHAT, "24h", {"batch_id": foreign_id, "ledger_id": theirs}
        )
        assert isinstance(foreign, BatchSnapshot)
        stray_file, _ = await upload(pier, "stray", pier.supervisor._tasks[0].ledger_id)
        await faults.gate("create").release()
        await pier.until(lambda: len(pier.provider.lives["zombie"]) == 2, "the late create to be carried out")
        zombie = pier.provider.lives["zombie"][1].batch
        began = pier.now
        await pier.until(lambda: (pier.now - began).total_seconds() > 2.5 * HOUR_S, "an age no upload lasts")

        await ask_for_a_sweep(pier)
        await pier.until(lambda: len(pier.events("orphan_found")) == 2, "both to be found")
        await pier.until(lambda: len(pier.events("sweep_done")) == 2, "the pass to end")
        assert zombie.status is Status.IN_PROGRESS  # at first sight nothing is done
        await pier.until(lambda: pier.events("orphan_collected"), "the zombie's end")
        assert zombie.status is Status.CANCELLED
        found = {one["kind"]: one for one in pier.events("orphan_found")}
        assert found["batch"]["provider_batch_id"] == zombie.id
        assert found["file"]["file_id"] == stray_file.file_id
        assert [one["provider_batch_id"] for one in pier.events("orphan_cancelled")] == [zombie.id]
        assert [one["file_id"] for one in pier.events("orphan_file_deleted")] == [stray_file.file_id]
        assert pier.simulator.world.state.batches[foreign.provider_batch_id].status is Status.IN_PROGRESS
        await pier.until(lambda: not pier.supervisor.status()["batches"], "the landed batch to be cleaned up")
        assert pier.provider.files_left() == [foreign_file.file_id]

        run = zombie.completed + zombie.failed
        assert run > 0
        assert pier.telemetry.total("orphan_waste_rows") == run
        assert pier.telemetry.total("possibly_paid_twice_rows") == run
        paid = pier.simulator.bill.summary()["bodies_by_paid_runs"]
        assert sum(int(times) * bodies for times, bodies in paid.items()) == 20 + run
        assert len(pier.outcomes("zombie")) == 20
