"""Logs of the cluster inside the process: compaction, retention, starts above zero, growth, topics made anew."""

from __future__ import annotations

import asyncio

import pytest
from simkafka_kit import producer, read, record, until, virtual

from batchferry.domain.errors import CommitUnknown, KafkaUnavailable
from batchferry.domain.offsets import OffsetSet
from batchferry.simulator.kafka import FaultKind

COMPACT = {"cleanup.policy": "compact", "delete.retention.ms": "60000"}


def contents(world, topic="ledger"):
    """Offset, key and value of what is there."""
    return [(one.offset, one.key, one.value) for one in world.cluster.committed_records(topic, 0)]


@virtual
async def test_compaction_keeps_the_newest_and_the_gaps(world):
    """One record a key is left at its old offset, the end stays, and a reader from zero passes over the gaps."""
    world.cluster.create_topic("ledger", 1, COMPACT)
    made = await producer(world.port())
    for number in range(3):
        await made.transact([record("ledger", b"a%d" % number, b"a"), record("ledger", b"b%d" % number, b"b")])
    end = world.cluster.end_offset("ledger", 0)
    world.cluster.compact("ledger", 0)
    assert contents(world) == [(6, b"a", b"a2"), (7, b"b", b"b2")]
    assert (world.cluster.log_start("ledger", 0), world.cluster.end_offset("ledger", 0)) == (0, end)
    assert [one.offset for one in await read(world.port(), "ledger")] == [6, 7]
    reader = world.port().reader()
    await reader.start()
    found = [one.offset async for chunk in reader.read_offsets("ledger", 0, OffsetSet([0, 1, 6, 400])) for one in chunk]
    assert found == [6]


@virtual
async def test_compaction_stops_where_it_is_told_and_where_it_is_stable(world):
    """Above the given offset nothing goes, and what an open transaction holds back neither goes nor counts."""
    world.cluster.create_topic("ledger", 1, COMPACT)
    world.cluster.append([record("ledger", b"%d" % number, b"a") for number in range(4)])
    world.cluster.compact("ledger", 0, upto=2)
    assert [value for _, _, value in contents(world)] == [b"1", b"2", b"3"]
    made = await producer(world.port())
    world.cluster.faults.once(FaultKind.LOSE_REQUEST, "commit")
    running = asyncio.create_task(made.transact([record("ledger", b"open", b"a")]))
    await until(lambda: any(one.records for one in world.cluster.open_transactions()), step_s=0.001)
    world.cluster.append([record("ledger", b"behind", b"a")])
    world.cluster.compact("ledger", 0)
    assert [value for _, _, value in contents(world)] == [b"3"]
    await until(running.done)
    assert isinstance(running.exception(), CommitUnknown)
    world.cluster.abort_transaction("txn")
    world.cluster.compact("ledger", 0)
    assert [value for _, _, value in contents(world)] == [b"behind"]


@virtual
async def test_tombstones_go_a_while_after_they_were_first_met(world):
    """A tombstone outlives the first passes and is dropped once its retention has passed; its key is gone then."""
    world.cluster.create_topic("ledger", 1, COMPACT)
    world.cluster.append([record("ledger", b"v", b"a"), record("ledger", None, b"a"), record("ledger", b"w", b"b")])
    world.cluster.compact("ledger", 0)
    assert contents(world) == [(1, b"a", None), (2, b"b", b"w")]
    loop_s = world.cluster.now_s
    await until(lambda: world.cluster.now_s > loop_s + 59)
    world.cluster.compact("ledger", 0)
    assert contents(world) == [(1, b"a", None), (2, b"b", b"w")]
    await until(lambda: world.cluster.now_s > loop_s + 61)
    world.cluster.compact("ledger", 0)
    assert contents(world) == [(2, b"b", b"w")]


@virtual
async def test_a_log_may_start_above_zero(world):
    """As after retention: bounds say so, readers begin there, and a consumer's older position is told as lost."""
    world.cluster.create_topic("in", 1, first_offsets={0: 1000})
    world.cluster.append([record("in", b"x")])
    reader = world.port().reader()
    await reader.start()
    assert await reader.bounds("in", [0]) == {0: (1000, 1001)}
    assert [one.offset for one in await read(world.port(), "in", start=3)] == [1000]
    tail = world.port().tail()
    await tail.start(["in"])
    assert [one.offset for one in await tail.poll(1000)] == [1000]


@virtual
async def test_retention_deletes_by_age_up_to_the_first_young_record(world):
    """Old records go, the log starts higher, and housekeeping by timer does it alone."""
    world.cluster.create_topic("in", 1, {"retention.ms": "60000"})
    world.cluster.append([record("in", b"old"), record("in", b"old too")])
    world.cluster.start_housekeeping(10.0)
    await until(lambda: world.cluster.now_s > 30)
    world.cluster.append([record("in", b"young")])
    await until(lambda: world.cluster.log_start("in", 0) == 2, 60)
    assert world.cluster.now_s >= 60
    assert world.values("in") == [b"young"]
    world.cluster.stop_housekeeping()


@virtual
async def test_the_tail_finds_partitions_added_later(world):
    """Within its metadata age, from the start of the new partition, without a record twice."""
    world.cluster.create_topic("control", 1)
    world.cluster.append([record("control", b"0")])
    tail = world.port(metadata_max_age_s=20.0).tail()
    await tail.start(["control"])
    assert [one.value for one in await tail.poll(1000)] == [b"0"]
    world.cluster.create_partitions("control", 2)
    world.cluster.append([record("control", b"1", partition=1)])
    grown_s, seen = world.cluster.now_s, []
    while not seen:
        seen += [one.value for one in await tail.poll(1000)]
        assert world.cluster.now_s - grown_s < 22
    assert seen == [b"1"]


@virtual
async def test_an_admin_grows_a_topic_and_a_mark_knows_it_at_once(world):
    """Fewer or as many is left alone, an unknown topic is refused, and a tail's mark includes the new partition."""
    world.cluster.create_topic("control", 2)
    tail = world.port().tail()
    await tail.start(["control"])
    admin = await world.port().admin()
    for wanted, have in ((1, 2), (3, 3), (3, 3)):
        await admin.grow("control", wanted)
        assert world.cluster.partition_count("control") == have
    with pytest.raises(KafkaUnavailable, match=r"UNKNOWN_TOPIC_OR_PARTITION \(3\)"):
        await admin.grow("nowhere", 3)
    world.cluster.append([record("control", b"v", partition=2)])
    assert await tail.mark() == {("control", 2): 1}
    assert [one.value for one in await tail.poll(1000)] == [b"v"]


@virtual
async def test_a_topic_made_anew_begins_at_zero_and_forgets_offsets(world):
    """Groups' offsets of it are gone, a tail begins again, and an old position beyond the end is told as lost."""
    world.cluster.create_topic("in", 2, {"retention.ms": "-1"})
    made = await producer(world.port())
    await made.transact([record("in", b"a"), record("in", b"b")], 2)
    tail = world.port().tail()
    await tail.start(["in"])
    assert len(await tail.poll(1000)) == 2
    world.cluster.recreate_topic("in")
    assert world.cluster.group_offsets("g", "in") == {}
    assert world.cluster.topic("in").configs["retention.ms"] == "-1"
    world.cluster.append([record("in", b"new")])
    assert [one.value for one in await tail.poll(30_000)] == [b"new"]
    world.cluster.delete_topic("in")
    with pytest.raises(KafkaUnavailable):
        await read(world.port(), "in")


@virtual
async def test_the_brokers_stamp_is_business_time(world):
    """LogAppendTime topics carry the wall clock's instant at the append, others what the producer says."""
    world.cluster.create_topic("stamped", 1, {"message.timestamp.type": "LogAppendTime"})
    world.cluster.create_topic("told", 1)
    for topic in ("stamped", "told"):
        world.cluster.append([record(topic, b"v")._replace(timestamp_ms=1000)])
    (stamped,), (told,) = (world.cluster.committed_records(topic, 0) for topic in ("stamped", "told"))
    assert (stamped.timestamp, stamped.timestamp_type) == (round(world.now().timestamp() * 1000), 1)
    assert (told.timestamp, told.timestamp_type) == (1000, 0)
