"""Bounds and back-pressure through the whole service: the input waits, nothing breaks, all goes on by itself."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import resource
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import inprocess_kit
import psutil
import pytest
from inprocess_kit import HOUR_S, ROUTE, Pier, request

from batchferry.domain.errors import StoreUnavailable
from batchferry.engine import intake as intake_module
from batchferry.engine.bounds import BOUNDS
from batchferry.simulator import CallName, FaultKind, FaultRule

MIB = 1024 * 1024
DISK_BYTES = 24 * MIB
ROWS = 60
WORDS = "w" * 200_000
MANY_PARTITIONS = int(os.environ.get("BATCHFERRY_TEST_PARTITIONS", "30"))
"""A hundred take half a minute: ``BATCHFERRY_TEST_PARTITIONS=100`` measures them."""

Limits = dict[str, Any]


@asynccontextmanager
async def quay(broker: Any, folder: Path, limits: Limits, **otherwise: Any) -> AsyncIterator[Pier]:
    """A service of its own with these limits."""
    with pytest.MonkeyPatch.context() as patch:
        async with Pier(broker.bootstrap, folder, patch, limits=limits, **otherwise) as made:
            yield made


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of a few megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, b"size=%d" % DISK_BYTES) != 0:
        pytest.skip(f"a small file system cannot be mounted here: {errno.errorcode[ctypes.get_errno()]}")
    try:
        yield folder
    finally:
        libc.umount2(str(folder).encode(), 2)


def gauges(pier: Pier, name: str) -> dict[str, float]:
    """The latest values of a gauge by bound."""
    return {dict(labels)["bound"]: value for (metric, labels), value in pier.telemetry.gauges.items() if metric == name}


def fill(folder: Path, leave_bytes: int) -> Path:
    """Take what is free but for this much, as somebody else's file would."""
    found = os.statvfs(folder)
    ballast = folder / "lost+found"  # the one name that is not ours and is left alone
    with ballast.open("ab") as file:
        file.write(b"\0" * max(0, found.f_bavail * found.f_frsize - leave_bytes))
    return ballast


async def all_answered(pier: Pier, case: str) -> None:
    """One answer for each record of the case, each run once."""
    outcomes = await pier.landed(case, 60)
    assert {one.row_class for one in outcomes} == {"succeeded"}
    texts = sorted(line.text[:8] for life in pier.provider.lives[case] for line in life.lines)
    assert texts == sorted(f"{number:04}" + "w" * 4 for number in range(len(outcomes)))


def heavy(case: str, rows: int = ROWS, keys: int = 1) -> list[Any]:
    """Records of 200 KB each, of so many batch keys in turn."""
    return [
        request(case, f"c{number}", text=f"{number:04}{WORDS}", slice_=f"{case}{number % keys}")
        for number in range(rows)
    ]


@pytest.mark.long
async def test_more_input_than_the_disk_holds(broker: Any, small_disk: Path) -> None:
    """Three times the disk comes in at once and time would not let it leave: the input waits, batches leave early in
    parts, and all of it is answered once. Nothing is told of a write that failed.
    """
    limits = {"spool_high_bytes": 10**10, "spool_low_bytes": 10**9, "poll_records": 10, "spool_buffer_bytes": 65_536}
    async with quay(broker, small_disk.parent, limits, state_dir=str(small_disk / "state")) as pier:
        await pier.send("flood", heavy("flood", 3 * ROWS * 2))
        await all_answered(pier, "flood")
        assert len(pier.provider.lives["flood"]) > 3
        assert {one["reason"] for one in pier.events("consumption_paused")} == {"disk"}
        await pier.until(lambda: pier.events("consumption_resumed"), "the input to be read again")
        assert pier.events("store_unavailable") == []
        assert list(pier.service.not_live()) == []  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "during",
    [
        "intake",
        pytest.param("upload", marks=pytest.mark.long),
        pytest.param("landing", marks=pytest.mark.long),
        pytest.param("recovery", marks=pytest.mark.long),
    ],
)
async def test_a_disk_that_somebody_else_fills(broker: Any, small_disk: Path, monkeypatch: Any, during: str) -> None:
    """The disk is full from one moment to the next, whatever the service is doing; once there is room it goes on."""
    monkeypatch.setattr(intake_module, "DISK_RESERVE_BYTES", 0)  # else the input would wait, and nothing be written
    state = small_disk / "state"
    state.mkdir()
    limits = {"spool_buffer_bytes": 65_536}
    async with quay(broker, small_disk.parent, limits, state_dir=str(state)) as pier:
        faults = pier.simulator.faults
        if during == "intake":
            ballast = fill(small_disk, 300_000)
            await pier.send("full", heavy("full"))
            await pier.until(lambda: pier.events("store_unavailable"), "a write that fails")
        else:
            call = {"upload": CallName.UPLOAD, "landing": CallName.CONTENT, "recovery": CallName.CONTENT}[during]
            faults.put(FaultRule(call=call, kind=FaultKind.GATE, gate="full", until_count=1))
            await pier.send("full", heavy("full"))
            await asyncio.wait_for(faults.gate("full").reached(), 40)
            if during == "recovery":
                await pier.stop()
                shutil.rmtree(state)  # else the start would first make the room that it needs
                ballast = fill(small_disk, 0)
                with pytest.raises(StoreUnavailable):
                    await pier.start()
                await pier.stop()
                ballast.unlink()
                await pier.start()
                ballast = fill(small_disk, 4_096)
            else:
                ballast = fill(small_disk, 4_096)
        await faults.release_all()
        await asyncio.sleep(1.0)  # a while in which everything that is tried meets the full disk
        assert list(pier.service.not_live()) == []  # type: ignore[union-attr]
        ballast.unlink()
        await all_answered(pier, "full")
        faults.clear()


@pytest.mark.long
async def test_the_spools_high_mark(broker: Any, tmp_path: Path) -> None:
    """More input than the spool may hold: batches leave early, the input pauses and is read again, and every bound is
    measured.
    """
    limits = {
        "spool_high_bytes": 3 * MIB,
        "spool_low_bytes": 2 * MIB,
        "poll_records": 5,
        "max_record_bytes": MIB,
    }
    routes = {"default": {**ROUTE, "max_bytes": 2_500_000}}
    async with quay(broker, tmp_path, limits, routes=routes) as pier:
        await pier.send("high", heavy("high", keys=3))
        await all_answered(pier, "high")
        assert {one["reason"] for one in pier.events("consumption_paused")} == {"spool"}
        assert pier.events("consumption_resumed")
        reasons = {str(one["reason"]) for one in pier.events("batch_sealed")}
        assert "pressure" in reasons
        await pier.until(
            lambda: gauges(pier, "bound_used").keys() == {one.name for one in BOUNDS} - {"admin_connections"},
            "every bound measured",
        )
        assert all(limit > 0 for limit in gauges(pier, "bound_limit").values())


async def test_the_limit_of_the_index(broker: Any, tmp_path: Path) -> None:
    """More rows than the index may hold: the largest batch leaves early instead of keeping the input waiting for hours;
    the index never holds more than one reading beyond its limit.
    """
    limits = {"max_index_rows": 100, "poll_records": 20}
    async with quay(broker, tmp_path, limits) as pier:
        rows = [request("index", f"c{number}", text=f"{number:04}wwww") for number in range(1_000)]
        await pier.send("index", rows)
        most = 0

        def done() -> bool:
            nonlocal most
            most = max(most, pier.supervisor._store.indexed_rows)
            return not pier.missing("index")

        await pier.until(done, "an outcome of every record", 60)
        await all_answered(pier, "index")
        assert {one["reason"] for one in pier.events("consumption_paused")} == {"index"}
        assert 100 <= most <= 120


@pytest.mark.long
async def test_a_provider_that_is_down_for_two_days(broker: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Rows sealed, rows gathering and rows still to come wait two days; then all are answered once, and no row's
    attempts have been used up.
    """
    monkeypatch.setattr(inprocess_kit, "SPEED", 9_000.0)  # two days in twenty seconds
    route = {"default": {"max_rows": 50, "sla_s": 77 * HOUR_S, "margin_s": 3 * HOUR_S}}
    async with quay(broker, tmp_path, {"max_index_rows": 10_000}, routes=route) as pier:
        await _two_days(pier)


async def _two_days(pier: Pier) -> None:
    faults = pier.simulator.faults
    number = faults.put(FaultRule(call=CallName.ANY, kind=FaultKind.DROP))
    sizes = {"first": 50, "second": 30, "third": 50}  # the second is not full, and leaves by time after fifty hours

    async def send(case: str) -> None:
        rows = [request(case, f"c{row}", text=f"{row:04}wwww") for row in range(sizes[case])]
        await pier.send(case, rows)

    await send("first")
    await send("second")
    await pier.until(lambda: pier.events("batch_sealed"), "the first batch sealed")
    began = pier.now
    await pier.until(lambda: (pier.now - began).total_seconds() > 48 * HOUR_S, "two days", 60)
    assert list(pier.service.not_live()) == []  # type: ignore[union-attr]
    assert list(pier.service.not_ready()) == []  # type: ignore[union-attr]
    await send("third")
    faults.take_away(number)
    for case, size in sizes.items():
        await pier.until(lambda case=case: not pier.missing(case), f"outcomes of {case}", 90)
        await all_answered(pier, case)
        assert [one.said["attempts"] for one in pier.outcomes(case)] == [{}] * size
    assert pier.events("rows_retried") == []
    faults.clear()


@pytest.mark.long
async def test_more_batch_keys_than_there_is_room_for(broker: Any, tmp_path: Path) -> None:
    """A hundred keys with room for thirty open ones and fifteen batches in flight: those due first leave early, no
    limit is ever passed, and all are answered.
    """
    limits = {"max_open_keys": 30, "max_batches_in_flight": 15}
    async with quay(broker, tmp_path, limits) as pier:
        rows = [
            request("keys", f"c{number}", text=f"{number:04}wwww", slice_=f"s{number}", key=b"%d" % number)
            for number in range(100)
        ]
        await pier.send("keys", rows)
        most_flying = 0

        def done() -> bool:
            nonlocal most_flying
            most_flying = max(most_flying, pier.supervisor._in_flight())
            assert len(pier.supervisor.intake.accumulator) <= 30
            return not pier.missing("keys")

        await pier.until(done, "an outcome of every key", 110)
        await all_answered(pier, "keys")
        assert most_flying == 15


@pytest.mark.long
@pytest.mark.real_broker
async def test_many_partitions_in_one_replica(broker: Any, tmp_path: Path, record_property: Any) -> None:
    """One replica takes all of many partitions, answers a record of each, and stays within sockets and memory."""
    process = psutil.Process()
    before = process.memory_info().rss, process.num_fds()
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with quay(broker, tmp_path, {}, partitions=MANY_PARTITIONS) as pier:
        took_s = loop.time() - began
        rows = [request("many", f"c{number}", text=f"{number:04}wwww", key=b"%d" % number) for number in range(300)]
        await pier.send("many", rows)
        await all_answered(pier, "many")
        used_mb = (process.memory_info().rss - before[0]) / MIB
        sockets = process.num_fds() - before[1]
        print(
            f"{MANY_PARTITIONS} partitions: ready after {took_s:.1f} s, {used_mb:.0f} MiB more, {sockets} descriptors more"
        )
        record_property("ready_s", round(took_s, 1))
        assert took_s < 60
        assert sockets < resource.getrlimit(resource.RLIMIT_NOFILE)[0] / 2
        assert used_mb < 400
