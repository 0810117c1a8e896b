"""Transactions of the cluster inside the process: fencing, stable offsets, unknown outcomes, deaths on the wire."""

from __future__ import annotations

import asyncio
import random

import pytest
from simkafka_kit import World, producer, read, record, until, virtual

from batchferry.domain.errors import CommitUnknown, KafkaUnavailable, PartitionLost
from batchferry.kafka.partitioner import partition_of as real_partition_of
from batchferry.simulator.kafka import FaultKind, FaultRates
from batchferry.simulator.kafka.partitioner import partition_of


def test_keys_go_where_the_real_client_sends_them():
    """Both partitioners agree on keys of every length."""
    rng = random.Random(3)
    for length in range(40):
        key = rng.randbytes(length)
        assert partition_of(key, 97) == real_partition_of(key, 97)


async def left_open(world: World, name: str = "old", offset: int | None = 5) -> None:
    """A process dies between its records and its commit."""
    port = world.port(name)
    made = await producer(port)
    world.cluster.faults.once(FaultKind.LOSE_REQUEST, "commit", name)
    asyncio.create_task(made.transact([record("out", b"half")], offset))  # noqa: RUF006 (dies with its process)
    await until(lambda: any(one.records for one in world.cluster.open_transactions()), step_s=0.001)
    await asyncio.sleep(0.1)
    port.process.alive = False


@virtual
async def test_init_ends_the_predecessors_open_transaction(world):
    """The successor's init aborts it, marker first; neither its records nor its offset are ever seen."""
    world.cluster.create_topic("in", 1)
    world.cluster.create_topic("out", 1)
    await left_open(world)
    assert [one.owner for one in world.cluster.open_transactions()] == ["old"]
    assert (world.cluster.end_offset("out", 0), world.cluster.last_stable_offset("out", 0)) == (1, 0)
    successor = await producer(world.port("new"))
    assert world.cluster.open_transactions() == []
    assert (world.cluster.end_offset("out", 0), world.cluster.last_stable_offset("out", 0)) == (2, 2)
    await successor.transact([record("out", b"whole")], 9)
    assert world.values("out") == [b"whole"]
    assert [one.value for one in await read(world.port("reader"), "out")] == [b"whole"]
    assert world.cluster.group_offsets("g", "in") == {0: 9}
    aborted, committed = world.cluster.finished
    assert (aborted.is_committed, aborted.owner, aborted.reason) == (False, "old", "a successor, new")
    assert (committed.is_committed, committed.owner, committed.reason) == (True, "new", "its producer")
    assert committed.began_at_s < committed.ended_at_s


@virtual
async def test_a_paused_owner_is_fenced_at_every_later_step(world):
    """It wakes in the middle of a transaction after its successor began: nothing of it counts, and it is told so."""
    world.cluster.create_topic("in", 1)
    world.cluster.create_topic("out", 1)
    port = world.port("zombie")
    zombie = await producer(port)
    running = asyncio.create_task(zombie.transact([record("out", b"zombie")], 1))
    await until(world.cluster.open_transactions, step_s=0.0001)
    port.process.pause()
    await asyncio.sleep(3)
    successor = await producer(world.port("new"))
    port.process.wake()
    with pytest.raises(PartitionLost):
        await running
    with pytest.raises(PartitionLost):
        await zombie.transact([record("out", b"again")], 2)
    await successor.transact([record("out", b"new")], 3)
    assert world.values("out") == [b"new"]
    assert world.cluster.group_offsets("g", "in") == {0: 3}
    assert world.remembers("fenced txn epoch 0")


@virtual
async def test_an_open_transaction_holds_back_readers_until_it_times_out(world):
    """Records committed behind it wait; the coordinator aborts it after its timeout and ten seconds at most."""
    world.cluster.create_topic("in", 1)
    world.cluster.create_topic("out", 1)
    await left_open(world)
    began_s = world.cluster.open_transactions()[0].began_at_s
    world.cluster.append([record("out", b"behind")])
    assert world.values("out") == []
    tail = world.port("tail").tail()
    await tail.start(["out"])
    assert await tail.poll(5000) == ()
    assert not await tail.caught_up()
    assert [one.value for one in await read(world.port("reader"), "out")] == [b"behind"]
    ended = world.cluster.finished[-1]
    assert ended.reason == "the coordinator: timed out"
    assert 30 <= ended.ended_at_s - began_s <= 40
    assert [one.value for one in await tail.poll(5000)] == [b"behind"]
    await tail.poll(1000)
    assert await tail.caught_up()


@virtual
async def test_a_read_stuck_behind_a_transaction_gives_up(world):
    """With less patience than the transaction has, reading to the end is KafkaUnavailable, at the time it says."""
    world.cluster.create_topic("in", 1)
    world.cluster.create_topic("out", 1)
    await left_open(world)
    hasty = world.port("reader", transaction_timeout_s=4.0, transaction_deadline_s=3.0, read_stall_s=5.0)
    began_s = world.cluster.now_s
    with pytest.raises(KafkaUnavailable, match="stuck at offset 0 of 1"):
        await read(hasty, "out")
    assert 5 <= world.cluster.now_s - began_s < 6


@virtual
async def test_aborted_records_are_invisible_but_take_offsets(world):
    """A coordinator's abort fences the producer; its records never show, and positions pass over them."""
    world.cluster.create_topic("in", 1)
    world.cluster.create_topic("out", 1)
    made = await producer(world.port())
    await made.transact([record("out", b"first")])
    world.cluster.faults.once(FaultKind.SLOW_REQUEST, "commit")
    running = asyncio.create_task(made.transact([record("out", b"never")] * 3))
    await until(lambda: any(one.records for one in world.cluster.open_transactions()), step_s=0.0001)
    assert world.cluster.abort_transaction("txn", "a test")
    with pytest.raises(PartitionLost):
        await running
    fresh = await producer(world.port())
    await fresh.transact([record("out", b"last")])
    found = await read(world.port("reader"), "out")
    assert [(one.offset, one.value) for one in found] == [(0, b"first"), (6, b"last")]
    assert world.cluster.end_offset("out", 0) == 8


@virtual
async def test_the_coordinators_abort_before_a_commit_leaves_its_outcome_unknown(world):
    """The fault is struck at the commit: the producer hears no clear yes, and nothing is visible."""
    world.cluster.create_topic("in", 1)
    world.cluster.create_topic("out", 1)
    made = await producer(world.port())
    world.cluster.faults.rates = FaultRates(abort_transaction=1.0)
    with pytest.raises(CommitUnknown, match="fenced"):
        await made.transact([record("out", b"v")], 1)
    assert world.values("out") == []
    assert world.cluster.group_offsets("g", "in") == {}


@pytest.mark.parametrize("is_done", [True, False])
def test_a_commit_without_an_answer_is_unknown_either_way(is_done):
    """Done with the reply lost, or never arrived: the producer is told the same, after its deadline, and is dead."""

    @virtual
    async def run(world):
        world.cluster.create_topic("in", 1)
        world.cluster.create_topic("out", 1)
        made = await producer(world.port())
        world.cluster.faults.once(FaultKind.LOSE_REPLY if is_done else FaultKind.LOSE_REQUEST, "commit")
        began_s = world.cluster.now_s
        with pytest.raises(CommitUnknown):
            await made.transact([record("out", b"v")], 4)
        assert 15 <= world.cluster.now_s - began_s < 16
        assert world.values("out") == ([b"v"] if is_done else [])
        assert world.cluster.group_offsets("g", "in") == ({0: 4} if is_done else {})
        with pytest.raises(PartitionLost):
            await made.transact([record("out", b"more")])
        await producer(world.port())
        assert world.values("out") == ([b"v"] if is_done else [])

    run()


def test_a_commit_on_the_wire_at_death_arrives_or_is_lost():
    """Over many seeds both happen, no answer comes, and what is visible is always the whole transaction or nothing."""
    seen = set()

    async def once(seed):
        world = World(seed)
        world.cluster.create_topic("in", 1)
        world.cluster.create_topic("out", 2)
        port = world.port("victim")
        made = await producer(port)
        task = asyncio.create_task(made.transact([record("out", b"0"), record("out", b"1", partition=1)], 7))
        await until(lambda: any(one.records == 2 for one in world.cluster.open_transactions()), step_s=0.0001)
        await asyncio.sleep(0.009)  # the replies are in, the commit is on its way or has just arrived
        port.process.alive = False
        task.cancel()
        await asyncio.sleep(1)
        assert task.done()
        arrived = world.cluster.group_offsets("g", "in") == {0: 7}
        assert world.values("out", 0) == ([b"0"] if arrived else [])
        assert world.values("out", 1) == ([b"1"] if arrived else [])
        if world.remembers("commit of dead victim"):
            seen.add(arrived)

    for seed in range(40):
        virtual(lambda _world, seed=seed: once(seed))()
    assert seen == {True, False}


@virtual
async def test_a_dead_process_gets_no_answer(world):
    """Its calls wait for ever, whatever their deadlines; new ones change nothing."""
    world.cluster.create_topic("in", 1)
    port = world.port("dead")
    port.process.alive = False
    attempts = [
        asyncio.create_task(port.partition_producer("in", 0, "g", "txn").init()),
        asyncio.create_task(port.admin()),
    ]
    await asyncio.sleep(500)
    assert not any(task.done() for task in attempts)
    assert world.cluster.transactions.epoch("txn") == -1


@virtual
async def test_a_late_commit_counts_only_before_the_successors_init(world):
    """A commit that arrives after its caller gave up is done; after a successor's init it is fenced."""
    for topic in ("in", "out"):
        world.cluster.create_topic(topic, 1)
    for late_first in (True, False):
        made = await producer(world.port(commit_deadline_s=1.0))
        world.cluster.faults.rates = FaultRates(slow_s=(3.0, 3.0))
        world.cluster.faults.once(FaultKind.SLOW_REQUEST, "commit")
        with pytest.raises(CommitUnknown):
            await made.transact([record("out", b"%d" % late_first)])
        if late_first:
            await asyncio.sleep(5)
        await producer(world.port("next"))
        await asyncio.sleep(5)
    assert world.values("out") == [b"1"]


@virtual
async def test_a_broker_away_is_waited_for_within_the_deadlines(world):
    """Short absences only delay; long ones end as the port says: KafkaUnavailable, PartitionLost, never a hang."""
    for topic in ("in", "out"):
        world.cluster.create_topic(topic, 1)
    made = await producer(world.port())
    world.cluster.faults.take_broker_away(5.0)
    await made.transact([record("out", b"late")], 1)
    assert world.cluster.now_s > 5
    world.cluster.faults.take_broker_away(1000.0)
    with pytest.raises(PartitionLost) as refused:
        await made.transact([record("out", b"lost")], 2)
    assert not isinstance(refused.value, CommitUnknown)
    with pytest.raises(KafkaUnavailable):
        await producer(world.port())
    with pytest.raises(KafkaUnavailable):
        await world.port().admin()
    world.cluster.faults.clear()
    await producer(world.port())
    assert world.values("out") == [b"late"]


@virtual
async def test_what_a_topic_forbids_costs_the_producer(world):
    """A record above the topic's limit, without a key in a compacted topic, or of an unknown topic is PartitionLost."""
    world.cluster.create_topic("in", 1)
    world.cluster.create_topic("out", 1, {"max.message.bytes": "1000"})
    world.cluster.create_topic("ledger", 1, {"cleanup.policy": "compact"})
    for bad, why in (
        (record("out", b"x" * 1000), r"MESSAGE_TOO_LARGE \(10\)"),
        (record("ledger", b"v", key=None), r"INVALID_RECORD \(87\)"),
        (record("nowhere", b"v"), "no answer in time"),
    ):
        made = await producer(world.port())
        with pytest.raises(PartitionLost, match=why):
            await made.transact([record("out", b"fine"), bad], 3)
    assert world.values("out") == []
    assert world.cluster.group_offsets("g", "in") == {}
    assert world.cluster.open_transactions() == []


@virtual
async def test_observers_hear_of_records_when_they_become_visible(world):
    """Plain records at once, a transaction's at its commit and all partitions in one step, an aborted one's never."""
    world.cluster.create_topic("in", 1)
    world.cluster.create_topic("out", 2)
    heard = []
    world.cluster.on_append(
        lambda *what: heard.append((world.cluster.now_s, *what[:2], [one.value for one in what[2]]))
    )
    await left_open(world)
    assert heard == []
    made = await producer(world.port("new"))
    await made.transact([record("out", b"a"), record("out", b"b", partition=1), record("out", b"c")])
    assert [one[1:] for one in heard] == [("out", 0, [b"a", b"c"]), ("out", 1, [b"b"])]
    assert heard[0][0] == heard[1][0]
    world.cluster.append([record("out", b"plain")])
    assert heard[-1][1:] == ("out", 0, [b"plain"])
