"""Liveness: each case of the watchdog, made as it happens, is seen at the real address; a healthy service answers 200.

The limits are minutes; here the constants are seconds, and what they limit is real. The last cases end a client's own
task, after which that service is of no more use.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
import pytest_asyncio
from inprocess_kit import Pier, request

from batchferry.domain.errors import KafkaUnavailable
from batchferry.engine import scheduler as scheduler_module
from batchferry.engine import supervisor as supervisor_module
from batchferry.engine.partition import SETTLE
from batchferry.kafka import consumer as consumer_module
from batchferry.simulator import CallName, FaultKind, FaultRule

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pier(broker: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pier]:
    """A service with its admin address."""
    with pytest.MonkeyPatch.context() as patch:
        server = {"enabled": True, "host": "127.0.0.1", "port": 0}
        async with Pier(broker.bootstrap, tmp_path_factory.mktemp("watchdog"), patch, server=server) as made:
            yield made


async def livez(pier: Pier) -> tuple[int, list[str]]:
    """What the probe gets."""
    assert pier.service is not None
    async with httpx.AsyncClient(trust_env=False, timeout=5.0) as client:
        answer = await client.get(f"{pier.service.admin_address}/livez")
    return answer.status_code, answer.json().get("reasons", [])


async def fails_with(pier: Pier, text: str, limit_s: float = 15.0) -> float:
    """Wait for the probe to fail with this complaint; how many seconds that took."""
    began = time.monotonic()
    while True:
        status, reasons = await livez(pier)
        if any(text in one for one in reasons):
            assert status == 503
            return time.monotonic() - began
        assert time.monotonic() < began + limit_s, f"{text!r} was not complained of; {reasons}"
        await asyncio.sleep(0.05)


async def is_well(pier: Pier, limit_s: float = 20.0) -> None:
    """Wait for the probe to succeed."""
    began = time.monotonic()
    while (found := await livez(pier)) != (200, []):
        assert time.monotonic() < began + limit_s, found
        await asyncio.sleep(0.05)


async def test_all_is_well(pier: Pier) -> None:
    """A service at work is alive."""
    await pier.send("well", [request("well", "a")])
    await pier.landed("well")
    assert await livez(pier) == (200, [])


async def test_a_blocked_loop_fails_the_probe_and_is_told_afterwards(pier: Pier, monkeypatch: Any) -> None:
    """While the loop blocks no probe is answered in time; after it the lag is complained of for a while, then no more."""
    monkeypatch.setattr(supervisor_module, "LOOP_LAG_S", 0.4)
    monkeypatch.setattr(supervisor_module, "LAG_TOLD_S", 2.0)
    assert pier.service is not None
    address = str(pier.service.admin_address)

    def probe() -> bool:
        try:
            return httpx.get(f"{address}/livez", timeout=0.5, trust_env=False).status_code == 200
        except httpx.TimeoutException:
            return False

    assert await asyncio.to_thread(probe)
    probing = asyncio.get_running_loop().run_in_executor(None, probe)
    time.sleep(1.5)  # noqa: ASYNC251 (blocking the loop is the case)
    assert not await probing
    await fails_with(pier, "the event loop was late by 1.", 2.0)
    # Measured again and again meanwhile; it is kept until its time is over.
    assert pier.supervisor._loop_lag_s > 1
    await pier.until(lambda: len(pier.events("watchdog_complaint")), "the complaint in the log")
    await is_well(pier, 5.0)
    told = [str(one["complaint"]) for one in pier.events("watchdog_complaint")]
    assert len([one for one in told if one.startswith("the event loop was late")]) == 1


async def test_a_poll_that_does_not_return(pier: Pier, monkeypatch: Any) -> None:
    """The intake hangs, so nobody polls."""
    monkeypatch.setattr(consumer_module, "POLL_SILENCE_LIMIT_S", 0.5)
    monkeypatch.setattr(supervisor_module, "POLL_SILENCE_S", 0.5)
    gate = asyncio.Event()
    intake = pier.supervisor.intake
    mind = intake._mind_the_bounds

    async def hang() -> None:
        await gate.wait()
        await mind()

    monkeypatch.setattr(intake, "_mind_the_bounds", hang)
    assert await fails_with(pier, "no poll has returned for") > 0.3
    gate.set()
    monkeypatch.setattr(intake, "_mind_the_bounds", mind)
    await is_well(pier)


async def test_a_fetch_that_does_not_return(pier: Pier, monkeypatch: Any) -> None:
    """The client's own call hangs although no rebalance holds it; polls go on returning."""
    monkeypatch.setattr(consumer_module, "FETCH_SILENCE_LIMIT_S", 0.5)
    gate = asyncio.Event()
    client = pier.supervisor.consumer._client
    getmany = client.getmany

    async def hang(**arguments: Any) -> Any:
        await gate.wait()
        return await getmany(**arguments)

    monkeypatch.setattr(client, "getmany", hang)
    await fails_with(pier, "the client's fetch call has not returned for")
    gate.set()
    monkeypatch.setattr(client, "getmany", getmany)
    await is_well(pier)


async def test_a_rejoin_that_does_not_happen(pier: Pier, monkeypatch: Any) -> None:
    """The group wants us to join and we never do; not complained of while no broker answers, for a quarter hour."""
    monkeypatch.setattr(consumer_module, "REJOIN_GRACE_S", 0.5 - pier.supervisor.consumer._settings.rebalance_timeout_s)
    consumer = pier.supervisor.consumer
    coordinator = consumer._client._coordinator
    gate = asyncio.Event()
    join = coordinator.ensure_active_group

    async def hang(*arguments: Any) -> Any:
        await gate.wait()
        return await join(*arguments)

    monkeypatch.setattr(coordinator, "ensure_active_group", hang)
    coordinator.request_rejoin()
    await fails_with(pier, "no assignment from the group for")
    known, coordinator.coordinator_id = coordinator.coordinator_id, None
    await is_well(pier, 5.0)
    monkeypatch.setattr(consumer_module, "CUT_OFF_LIMIT_S", 0.1)
    await fails_with(pier, "no assignment from the group for", 5.0)
    if coordinator.coordinator_id is None:
        coordinator.coordinator_id = known
    gate.set()
    await is_well(pier)


async def test_a_partition_without_a_live_producer(pier: Pier, monkeypatch: Any) -> None:
    """A partition's life ends and its restore never succeeds."""
    monkeypatch.setattr(supervisor_module, "NO_PRODUCER_S", 0.5)
    monkeypatch.setattr(supervisor_module, "RESTORE_PAUSE_S", 0.1)
    supervisor = pier.supervisor
    read = supervisor._read_ledger

    async def never(_task: Any) -> None:
        raise KafkaUnavailable("no")

    monkeypatch.setattr(supervisor, "_read_ledger", never)
    supervisor._tasks[1].lose("a test")
    await fails_with(pier, "partition 1 has had no live producer for")
    monkeypatch.setattr(supervisor, "_read_ledger", read)
    await pier.until(lambda: 1 in supervisor._tasks, "partition 1 restored", 60)
    await is_well(pier)


async def test_outcomes_that_are_not_settled(pier: Pier, monkeypatch: Any) -> None:
    """A partition's outcomes wait and its transaction never ends."""
    monkeypatch.setattr(supervisor_module, "SETTLE_SILENCE_S", 1.5)
    task = pier.supervisor._tasks[2]
    gate = asyncio.Event()
    commit = task.commit

    async def hang(*arguments: Any, **named: Any) -> Any:
        if named.get("purpose") == SETTLE:
            await gate.wait()
        return await commit(*arguments, **named)

    monkeypatch.setattr(task, "commit", hang)
    await pier.send("unsettled", [replace(request("unsettled", "a"), partition=2)])
    await fails_with(pier, "partition 2 has outcomes waiting and has settled nothing for", 30)
    gate.set()
    monkeypatch.setattr(task, "commit", commit)
    await pier.landed("unsettled")
    await is_well(pier)


async def test_a_provider_that_hangs_is_no_complaint_until_no_call_ends(pier: Pier, monkeypatch: Any) -> None:
    """A poll that is never answered: alive as long as the limit lets a call last, then not."""
    faults = pier.simulator.faults
    faults.put(FaultRule(call=CallName.RETRIEVE, kind=FaultKind.GATE, gate="poll", until_count=1))
    await pier.send("hung", [request("hung", "a")])
    await asyncio.wait_for(faults.gate("poll").reached(), 40)
    assert await livez(pier) == (200, [])
    monkeypatch.setattr(scheduler_module, "ANSWER_SILENCE_S", 0.3)
    await fails_with(pier, "no call to a provider has ended for")
    await faults.release_all()
    await pier.landed("hung")
    monkeypatch.setattr(scheduler_module, "ANSWER_SILENCE_S", 1800.0)
    await is_well(pier)
    faults.clear()


async def test_a_disk_that_does_not_answer(pier: Pier, monkeypatch: Any) -> None:
    """The local store hangs: the look around that is due every second does not end."""
    monkeypatch.setattr(supervisor_module, "HOUSEKEEPING_SILENCE_S", 1.5)
    gate = asyncio.Event()
    store = pier.supervisor._store
    drop = store.drop_rows

    async def hang(*arguments: Any) -> None:
        await gate.wait()
        await drop(*arguments)

    monkeypatch.setattr(store, "drop_rows", hang)
    await pier.send("disk", [request("disk", "a")])
    await fails_with(pier, "the look around has not ended for", 30)
    gate.set()
    monkeypatch.setattr(store, "drop_rows", drop)
    await is_well(pier)


async def test_a_stop_that_does_not_end(pier: Pier, monkeypatch: Any) -> None:
    """Draining is no complaint inside its time, whatever hangs; beyond it, it is."""
    supervisor = pier.supervisor
    monkeypatch.setattr(supervisor, "state", supervisor_module.RunState.DRAINING)
    monkeypatch.setattr(supervisor, "_stop_by", asyncio.get_running_loop().time() + 0.5)
    monkeypatch.setattr(supervisor.consumer, "complaints", lambda: ["something else"])
    assert await livez(pier) == (200, [])
    await fails_with(pier, "the stop should have been over")


async def test_a_client_task_that_has_died(pier: Pier) -> None:
    """The client's fetch and coordination tasks end: nothing would ever be read again."""
    client = pier.supervisor.consumer._client
    await is_well(pier)
    client._fetcher._fetch_task.cancel()
    await fails_with(pier, "the fetch task has died", 5.0)
    client._coordinator._coordination_task.cancel()
    await fails_with(pier, "the group coordination task has died", 5.0)
