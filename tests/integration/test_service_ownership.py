"""Several replicas on one group: an orderly rolling restart, and one that wakes up when others have done its work."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from service_kit import SPEED, Replica, Rig

from batchferry.domain import control
from batchferry.kafka import AioKafka
from batchferry.ports import OutRecord

pytestmark = [pytest.mark.real_broker, pytest.mark.timeout(240)]

MakeRig = Callable[..., Any]


@pytest.fixture
async def make_rig(broker: Any, kafka: AioKafka, tmp_path: Path) -> AsyncIterator[MakeRig]:
    """Makes the rig of a test; it is taken down at the end."""
    async with AsyncExitStack() as stack:

        async def make(**otherwise: object) -> Rig:
            return await stack.enter_async_context(Rig(kafka, broker.bootstrap, tmp_path, **otherwise))

        yield make


async def flush(rig: Rig) -> None:
    """Whatever waits is due now."""
    now = rig.origin + (datetime.now(UTC) - rig.started) * SPEED
    key, value = control.encode(control.Flush("all", now))
    producer = rig.kafka.plain_producer()
    await producer.start()
    await producer.send([OutRecord(f"{rig.requests}.{rig.group}.control", key, value, partition=0)])
    await producer.stop()


async def owned_by(replicas: list[Replica]) -> dict[str, set[int]]:
    """Live partitions by replica."""
    return {one.name: await one.owned() for one in replicas}


@pytest.mark.long
async def test_a_rolling_restart_keeps_settling(make_rig: MakeRig) -> None:
    """Twelve partitions, three replicas restarted one after the other under traffic: results keep coming meanwhile.

    At each step the partitions that the other two keep through it get outcomes; at the end the books are right.
    """
    rig = await make_rig(partitions=12, max_rows=24)
    replicas = [rig.replica(name) for name in ("one", "two", "three")]
    for replica in replicas:
        replica.go()

    async def all_share() -> bool:
        owned = await owned_by(replicas)
        return all(owned.values()) and set.union(*owned.values()) == set(range(12))

    await rig.until(all_share, "a share for each replica", 60)
    stop = asyncio.Event()

    async def traffic() -> None:
        while not stop.is_set():
            await rig.produce(48)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await stop.wait()

    producing = asyncio.create_task(traffic())
    try:
        for replica in replicas:
            before = await owned_by(replicas)
            kept = set().union(*(mine for name, mine in before.items() if name != replica.name))
            count = sum(1 for partition, _ in rig.outcomes if partition in kept)
            assert await replica.terminate() == 0, replica.tail_of_log()
            replica.go()
            await rig.until(all_share, f"{replica.name} with a share again", 60)
            assert sum(1 for partition, _ in rig.outcomes if partition in kept) > count, "nothing came meanwhile"
    finally:
        stop.set()
        await producing
    await flush(rig)
    await rig.settle_the_books(orphan_files=None)


async def test_a_replica_that_wakes_up_in_the_middle_of_its_settling(make_rig: MakeRig) -> None:
    """Frozen between two chunks, and thawed when a successor has settled every row: it publishes not one of them."""
    rows = 450
    rig = await make_rig(max_rows=rows // 3, settle_chunk_rows=5, settle_queue_rows=50)
    one, two = rig.replica("one"), rig.replica("two")
    await rig.produce(rows)
    one.go()
    await rig.until(lambda: rig.outcomes, "the first outcome")
    one.freeze()
    assert len(rig.outcomes) < rows / 2, "the freeze came too late to prove anything"
    two.go()
    await rig.until(lambda: len(rig.outcomes) == rows, "an outcome for every row", 60)
    settled = len(one.told("settled"))
    one.thaw()
    await rig.until(lambda: one.told("partition_lost"), "the zombie noticing")
    await rig.settle_the_books()
    assert len(one.told("settled")) == settled
