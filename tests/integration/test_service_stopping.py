"""Stopping: inside the budget and its reserve whatever hangs, at once on a second signal, with the code that tells.

Real processes; the broker may be killed or frozen, the provider may hang.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from service_kit import FORKS, PARTITIONS, Replica, Rig
from stuck_process import serve_stuck

from batchferry.app import (
    EXIT_BUDGET_PASSED,
    EXIT_DRAINED,
    EXIT_FAILED,
    EXIT_GATE_REFUSED,
    EXIT_SECOND_SIGNAL,
    STOP_RESERVE_S,
)
from batchferry.kafka import AioKafka
from broker import RealBroker
from broker.kit import patient_settings

pytestmark = [pytest.mark.real_broker, pytest.mark.timeout(180)]

BUDGET_S = 3.0
NOISE_S = 3.0
"""For the signal's way, the end of the process and a busy machine."""


@pytest.fixture
async def rig(own_broker: RealBroker, tmp_path: Path) -> AsyncIterator[Rig]:
    """Topics on a broker that may be killed and frozen."""
    kafka = AioKafka(patient_settings(own_broker.bootstrap))
    try:
        async with Rig(kafka, own_broker.bootstrap, tmp_path, session_s=3.0, submit_ttl_s=20.0) as made:
            try:
                yield made
            finally:
                own_broker.recover()
    finally:
        await kafka.aclose()


def replica_of(rig: Rig, name: str = "one", **settings: Any) -> Replica:
    """A replica with a short stop budget; ``settings`` replace whole sections, ``kafka`` is merged."""
    made = rig.replica(name)
    config = yaml.safe_load(made._config.read_text())
    kafka = {**config["kafka"], **settings.pop("kafka", {})}
    made._config.write_text(yaml.safe_dump({**config, "stop_budget_s": BUDGET_S, "kafka": kafka, **settings}))
    return made


async def ready(rig: Rig, replica: Replica) -> None:
    """Every partition is restored."""

    async def all_owned() -> bool:
        return len(await replica.owned()) == PARTITIONS

    await rig.until(all_owned, "every partition restored")


async def ended(replica: Replica, *signals: signal.Signals) -> tuple[int | None, float]:
    """Send the signals; the exit code, and how many seconds the process lived on."""
    began = time.monotonic()
    for one in signals:
        replica._signal(one)
        await asyncio.sleep(0.2 if len(signals) > 1 else 0)
    code = await asyncio.to_thread(replica._joined)
    return code, time.monotonic() - began


async def settling(rig: Rig, replica: Replica) -> None:
    """Results are at hand and the service is about to publish them: it has begun to read the batch's file."""
    rig.put(call="content", kind="gate", gate="results", until_count=PARTITIONS)
    replica.go()
    await ready(rig, replica)
    await rig.produce(30)
    await rig.reached("results", limit_s=40)


async def test_a_stop_drains_and_says_so(rig: Rig, own_broker: RealBroker) -> None:
    """All is well: code 0, long before the budget is over."""
    one = replica_of(rig)
    one.go()
    await ready(rig, one)
    code, took_s = await ended(one, signal.SIGTERM)
    assert (code, took_s < BUDGET_S) == (EXIT_DRAINED, True)
    assert one.told("service_stopped", drained=True)
    del own_broker


@pytest.mark.parametrize("harm", ["killed", pytest.param("frozen", marks=pytest.mark.long)])
async def test_a_stop_without_a_broker_ends_in_time(rig: Rig, own_broker: RealBroker, harm: str) -> None:
    """The broker is gone, or does not answer, while outcomes wait to be published: over within budget and reserve."""
    one = replica_of(rig)
    await settling(rig, one)
    if harm == "killed":
        own_broker.kill()
    else:
        own_broker.freeze()
    await rig.release("results")
    code, took_s = await ended(one, signal.SIGTERM)
    assert took_s < BUDGET_S + STOP_RESERVE_S + NOISE_S
    assert code in {EXIT_DRAINED, EXIT_BUDGET_PASSED}
    unfinished = {line["what"] for line in one.told("stop_unfinished")}
    assert (code == EXIT_DRAINED) == (not unfinished)
    own_broker.recover()
    one.go()
    await rig.settle_the_books()


async def test_a_second_signal_is_obeyed_at_once(rig: Rig, own_broker: RealBroker) -> None:
    """While the first is being obeyed and hangs at broker and provider, a second one ends the process: 130."""
    rig.put(call="create", kind="gate", gate="create", until_count=1)
    one = replica_of(rig)
    one.go()
    await ready(rig, one)
    await rig.produce(30)
    await rig.reached("create", limit_s=40)
    own_broker.freeze()
    code, took_s = await ended(one, signal.SIGTERM, signal.SIGTERM)
    assert (code, took_s < 2.5) == (EXIT_SECOND_SIGNAL, True)
    await rig.release("create")


@pytest.mark.parametrize("call", ["create", pytest.param("content", marks=pytest.mark.long)])
async def test_a_provider_that_hangs_does_not_hold_up_a_stop(rig: Rig, own_broker: RealBroker, call: str) -> None:
    """A call to the provider that is never answered ends with the stop; the next start does what is left."""
    rig.put(call=call, kind="gate", gate="never", until_count=1)
    one = replica_of(rig, kafka={"session_timeout_s": 3.0})
    one.go()
    await ready(rig, one)
    await rig.produce(30)
    await rig.reached("never", limit_s=40)
    code, took_s = await ended(one, signal.SIGTERM)
    assert (code, took_s < BUDGET_S + NOISE_S) == (EXIT_DRAINED, True)
    await rig.release("never")
    del own_broker


async def test_a_signal_during_the_start_is_obeyed(rig: Rig, own_broker: RealBroker) -> None:
    """The start-up checks wait for a broker that does not answer: the process ends at once, with nothing undone."""
    one = replica_of(rig)
    own_broker.freeze()
    one.go()
    await rig.until(lambda: one.told("settings_loaded"), "the start-up checks")
    code, took_s = await ended(one, signal.SIGTERM)
    assert (code, took_s < BUDGET_S + NOISE_S) == (EXIT_DRAINED, True)
    assert one.told("service_stopped", drained=True)


async def test_the_code_tells_why_it_did_not_start(rig: Rig, own_broker: RealBroker) -> None:
    """A gate that refuses is 3, a broker that is not there is 1; each within the time of a stop."""
    refused = replica_of(rig, "refused", topics={"requests": f"nowhere-{rig.tag}", "group": rig.group, "create": False})
    failed = replica_of(rig, "failed", kafka={"bootstrap_servers": "127.0.0.1:1", "request_timeout_s": 2.0})
    for replica, wanted in ((refused, EXIT_GATE_REFUSED), (failed, EXIT_FAILED)):
        replica.go()
        code = await asyncio.wait_for(asyncio.to_thread(replica._joined), 40)
        assert code == wanted, replica.tail_of_log()
    del own_broker


async def test_the_process_ends_although_its_event_loop_is_stuck(rig: Rig, own_broker: RealBroker) -> None:
    """A stop in which the event loop itself blocks for ever ends with the reserve: 4. Nobody answers meanwhile."""
    one = replica_of(rig)
    one._process = FORKS.Process(target=serve_stuck, args=(str(one._config), str(one._log)))
    one._process.start()
    await ready(rig, one)
    began = time.monotonic()
    one._signal(signal.SIGTERM)
    await rig.until(lambda: one.told("service_stopping", signal="SIGTERM"), "the stop")
    with pytest.raises(httpx.HTTPError):
        async with httpx.AsyncClient(trust_env=False, timeout=1.0) as client:
            await client.get(f"http://127.0.0.1:{one.port}/livez")
    code = await asyncio.to_thread(one._joined)
    took_s = time.monotonic() - began
    assert code == EXIT_BUDGET_PASSED
    assert took_s < BUDGET_S + STOP_RESERVE_S + NOISE_S
    del own_broker
