"""A failure at any step loses nothing and pays nothing twice: the service as processes, on the real broker.

Each test breaks something at one place of a batch's life, lets the service go on, and then reads the books: one
outcome for each input offset under its deterministic id, every row billed once, the group's offset at the end of
the input, every lot clean and no file left at the provider.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from service_kit import PARTITIONS, Replica, Rig

from batchferry.kafka import AioKafka
from broker import RealBroker
from broker.kit import patient_settings

pytestmark = [pytest.mark.real_broker, pytest.mark.timeout(180)]

ROWS = 30
ALL = set(range(PARTITIONS))
BOTH_FOLDERS = pytest.mark.parametrize("folder_is", ["old", "empty"])

MakeRig = Callable[..., Any]


@pytest.fixture
async def make_rig(broker, kafka: AioKafka, tmp_path: Path) -> AsyncIterator[MakeRig]:
    """Makes the rig of a test; it is taken down at the end."""
    async with AsyncExitStack() as stack:

        async def make(**otherwise: object) -> Rig:
            session_s = 3.0 if isinstance(broker, RealBroker) else 6.0
            rig = Rig(kafka, broker.bootstrap, tmp_path, **{"session_s": session_s, **otherwise})
            return await stack.enter_async_context(rig)

        yield make


async def crash_and_start(replica: Replica, folder_is: str = "old") -> None:
    """Kill -9, then the same again on the old state folder or an empty one."""
    replica.kill()
    if folder_is == "empty":
        replica.forget_state()
    replica.go()


async def owns_all(rig: Rig, replica: Replica) -> None:
    """Every partition is restored and live in this replica."""

    async def all_owned() -> bool:
        return await replica.owned() == ALL

    await rig.until(all_owned, f"{replica.name} owning every partition")


async def takes_in(rig: Rig, replica: Replica, rows: int) -> None:
    """So many rows wait in open batches of this replica."""

    async def taken() -> bool:
        return await replica.waiting_rows() == rows

    await rig.until(taken, f"{rows} rows waiting in {replica.name}")


# ----------------------------------------------------------------------------------------------- kill -9


async def test_killed_while_rows_accumulate(make_rig: MakeRig) -> None:
    """Rows that were only in memory and in the spool are read again, once."""
    rig = await make_rig()
    one = rig.replica()
    await rig.produce(20)
    one.go()
    await takes_in(rig, one, 20)
    await crash_and_start(one, "empty")
    await takes_in(rig, one, 20)
    await rig.produce(ROWS - 20)
    await rig.settle_the_books()
    assert rig.provider_batches() == 1


async def test_killed_during_the_upload(make_rig: MakeRig) -> None:
    """A sealed batch that no record names is made anew from the input."""
    rig = await make_rig()
    rig.put(call="upload", kind="gate", gate="upload", nth=1)
    one = rig.replica()
    await rig.produce(ROWS)
    one.go()
    await rig.reached("upload")
    await crash_and_start(one)
    await rig.settle_the_books()
    assert rig.provider_batches() == 1


@pytest.mark.parametrize("late_create", ["never arrives", "arrives before the look-up", "arrives after the fence"])
async def test_killed_between_intent_and_create(make_rig: MakeRig, late_create: str) -> None:
    """The intent is resolved: a create that came through is adopted, one that comes after the fence fails."""
    rig = await make_rig()
    lost = late_create == "never arrives"
    rig.put(call="create", kind="drop" if lost else "gate", gate="create", nth=1)
    if lost:
        rig.put(call="list", kind="gate", gate="list", nth=1)
    one = rig.replica()
    await rig.produce(ROWS)
    one.go()
    await rig.reached("list" if lost else "create")
    await crash_and_start(one, "empty")
    if late_create == "arrives before the look-up":
        await rig.release("create")
    elif late_create == "arrives after the fence":
        await rig.until(lambda: not rig.provider_files(), "the deletion of the input file")
        await rig.release("create")
    await rig.settle_the_books()
    is_adopted = late_create == "arrives before the look-up"
    assert bool(one.told("batch_adopted")) == is_adopted
    assert rig.provider_batches() == 1 or not is_adopted


async def test_killed_after_create_before_the_id_is_recorded(make_rig: MakeRig) -> None:
    """The provider has the batch and nobody wrote it down: it is found in the list and adopted, not made again."""
    rig = await make_rig()
    rig.put(call="create", kind="gate", gate="created", nth=1, after_work=True)
    one = rig.replica()
    await rig.produce(ROWS)
    one.go()
    await rig.reached("created")
    await crash_and_start(one)
    await rig.settle_the_books()
    assert rig.provider_batches() == 1
    assert one.told("batch_adopted")


@BOTH_FOLDERS
async def test_killed_in_the_middle_of_landing(make_rig: MakeRig, folder_is: str) -> None:
    """Some outcomes are published, others are not: the result files are read again and only the rest is published."""
    rows = 600
    rig = await make_rig(max_rows=rows, settle_chunk_rows=5, settle_queue_rows=50)
    one = rig.replica()
    await rig.produce(rows)
    one.go()
    await rig.until(lambda: rig.outcomes, "the first outcome")
    one.kill()
    assert len(rig.outcomes) < rows / 2, "the kill came too late to prove anything"
    if folder_is == "empty":
        one.forget_state()
    one.go()
    await rig.settle_the_books()
    assert rig.provider_batches() == 1


# --------------------------------------------------------------------------------------------- rebalances


async def test_partition_moves_before_anything_is_recorded(make_rig: MakeRig) -> None:
    """A batch whose partition leaves during the upload is given up; each owner sends its own rows."""
    rig = await make_rig()
    rig.put(call="upload", kind="gate", gate="upload", nth=1)
    one, two = rig.replica("one"), rig.replica("two")
    await rig.produce(ROWS)
    one.go()
    await rig.reached("upload")
    two.go()
    await rig.until(lambda: one.told("partition_lost"), "a partition moving away")
    await rig.release("upload")
    await rig.until(two.owned, "the second replica owning something")
    moved = await two.owned()
    await rig.produce(ROWS - ROWS // PARTITIONS * len(moved), moved)  # makes a batch of the rows that moved
    await rig.settle_the_books()


async def test_partition_moves_while_create_is_held(make_rig: MakeRig) -> None:
    """A healthy rebalance between seal and create: the create goes through, the new owner finds it."""
    rig = await make_rig(submit_ttl_s=6.0)
    rig.put(call="create", kind="gate", gate="create", nth=1)
    one, two = rig.replica("one"), rig.replica("two")
    await rig.produce(ROWS)
    one.go()
    await rig.reached("create")
    two.go()
    await rig.until(two.owned, "the second replica owning something")
    await rig.release("create")
    await rig.settle_the_books()
    assert rig.provider_batches() == 1
    assert two.told("batch_adopted")


async def test_partition_moves_and_create_comes_too_late(make_rig: MakeRig) -> None:
    """The create stays away beyond its time to live: both owners fence it at the provider and send the rows anew."""
    rig = await make_rig()
    rig.put(call="create", kind="gate", gate="create", nth=1)
    one, two = rig.replica("one"), rig.replica("two")
    await rig.produce(ROWS)
    one.go()
    await rig.reached("create")
    two.go()
    await rig.until(lambda: not rig.provider_files(), "the deletion of the input file")
    await rig.release("create")
    await rig.settle_the_books()


async def test_partitions_move_while_the_batch_is_on_the_water(make_rig: MakeRig) -> None:
    """Two owners of one batch land their own rows; its files go once both are done."""
    rig = await make_rig()
    rig.put(call="retrieve", kind="gate", gate="poll")
    one, two = rig.replica("one"), rig.replica("two")
    await rig.produce(ROWS)
    one.go()
    await rig.reached("poll")
    two.go()
    await rig.until(two.owned, "the second replica owning something")
    await rig.release("poll")
    await rig.settle_the_books()
    assert rig.provider_batches() == 1
    assert one.told("batch_landed")
    assert two.told("batch_landed")


async def test_partitions_move_there_and_back_during_landing(make_rig: MakeRig) -> None:
    """A partition leaves a landing batch, and comes back because its new owner dies: its rows land too."""
    rig = await make_rig()
    rig.put(call="content", kind="gate", gate="content")
    one, two = rig.replica("one"), rig.replica("two")
    await rig.produce(ROWS)
    one.go()
    await rig.reached("content")
    two.go()
    await rig.until(two.owned, "the second replica owning something")
    await rig.reached("content", 2)
    two.kill()
    await owns_all(rig, one)
    await rig.release("content")
    await rig.settle_the_books()
    assert rig.provider_batches() == 1


async def test_owner_dies_while_two_land_the_same_batch(make_rig: MakeRig) -> None:
    """A replica that reads the results for its own partitions is given another one meanwhile: it lands that too."""
    rig = await make_rig()
    rig.put(call="retrieve", kind="gate", gate="poll")
    rig.put(call="content", kind="gate", gate="content")
    one, two = rig.replica("one"), rig.replica("two")
    await rig.produce(ROWS)
    one.go()
    await rig.reached("poll")
    two.go()
    await rig.until(two.owned, "the second replica owning something")
    await rig.release("poll")
    await rig.reached("content", 2)
    two.kill()
    await owns_all(rig, one)
    await rig.release("content")
    await rig.settle_the_books()
    assert rig.provider_batches() == 1


# ---------------------------------------------------------------------------------------- orderly stops


async def test_stopped_in_every_phase(make_rig: MakeRig) -> None:
    """SIGTERM is obeyed with exit code 0 wherever a batch is, and costs it nothing."""
    rig = await make_rig()
    rig.put(call="upload", kind="gate", gate="upload", nth=1)
    rig.put(call="create", kind="gate", gate="create", nth=1, after_work=True)
    rig.put(call="retrieve", kind="gate", gate="poll", nth=1)
    rig.put(call="content", kind="gate", gate="content", nth=1)
    rig.put(call="delete", kind="gate", gate="delete", nth=1, after_work=True)
    one = rig.replica()
    await rig.produce(20)
    one.go()
    await takes_in(rig, one, 20)
    assert await one.terminate() == 0
    await rig.produce(ROWS - 20)
    for gate in ("upload", "create", "poll", "content", "delete"):
        one.go()
        await rig.reached(gate)
        assert await one.terminate() == 0, f"at {gate}\n{one.tail_of_log()}"
    one.go()
    await rig.settle_the_books()
    assert rig.provider_batches() == 1


# ------------------------------------------------------------------------------------ broker and zombies


async def test_broker_killed_and_started_again(own_broker: RealBroker, tmp_path: Path) -> None:
    """The broker dies while a batch lands and comes back on its data: the replica goes on by itself."""
    rows = 450
    async with AsyncExitStack() as stack:
        kafka = AioKafka(patient_settings(own_broker.bootstrap))
        stack.push_async_callback(kafka.aclose)
        rig = await stack.enter_async_context(
            Rig(kafka, own_broker.bootstrap, tmp_path, max_rows=rows, settle_chunk_rows=5, settle_queue_rows=50)
        )
        one = rig.replica()
        await rig.produce(rows)
        one.go()
        await rig.until(lambda: rig.outcomes, "the first outcome")
        await asyncio.to_thread(own_broker.restart)
        await rig.settle_the_books()
        assert rig.provider_batches() == 1
        await rig.produce(rows)
        await rig.settle_the_books()


async def test_frozen_replica_wakes_up_as_a_zombie(make_rig: MakeRig) -> None:
    """Frozen in the middle of landing, taken over, thawed: its producer is fenced and nothing is doubled."""
    rows = 450
    rig = await make_rig(max_rows=rows // PARTITIONS, settle_chunk_rows=5, settle_queue_rows=50)
    one, two = rig.replica("one"), rig.replica("two")
    await rig.produce(rows)
    one.go()
    await rig.until(lambda: rig.outcomes, "the first outcome")
    one.freeze()
    assert len(rig.outcomes) < rows / 2, "the freeze came too late to prove anything"
    two.go()
    await owns_all(rig, two)
    one.thaw()
    await rig.settle_the_books()
    await rig.until(lambda: one.told("partition_lost"), "the zombie noticing")
    # Both are members in good standing afterwards: fresh rows find an owner.
    await rig.until(one.owned, "the thawed replica owning something again")
    await rig.produce(rows)
    await rig.settle_the_books()


async def test_frozen_replica_wakes_up_with_its_create_on_the_way(make_rig: MakeRig) -> None:
    """Its batch was fenced at the provider and its rows were sent anew: the zombie's own create comes to nothing."""
    rig = await make_rig()
    rig.put(call="create", kind="gate", gate="create", nth=1)
    one, two = rig.replica("one"), rig.replica("two")
    await rig.produce(ROWS)
    one.go()
    await rig.reached("create")
    one.freeze()
    two.go()
    await rig.until(lambda: two.told("batch_dissolved"), "the successor giving the lost create up")
    one.thaw()
    await rig.release("create")
    await rig.settle_the_books()
    await rig.until(lambda: len(one.told("partition_lost")) == PARTITIONS, "the zombie noticing")
