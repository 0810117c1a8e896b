"""What every implementation of the Kafka ports must do, asked through the ports alone.

Two are held to it: the real client on the broker of this run, and the cluster inside the process that simulations
use. Another one is a further parameter of ``implementation``.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from batchferry.domain.errors import KafkaUnavailable, PartitionLost
from batchferry.domain.offsets import OffsetSet
from batchferry.kafka import AioKafka
from batchferry.ports import KafkaPort, OutRecord
from batchferry.simulator.kafka import SimCluster, SimKafka, SimProcess
from broker.kit import Member, committed, delete_below, made_topic, patient_sim_settings, produced, whole


@pytest.fixture(params=[pytest.param("broker", marks=pytest.mark.broker), "in-process"])
def port(request: pytest.FixtureRequest) -> KafkaPort:
    """The implementation held to the contract."""
    if request.param == "broker":
        return request.getfixturevalue("kafka")
    cluster = SimCluster(random.Random(1), wall_clock=lambda: datetime.now(UTC), initial_rebalance_delay_s=0.1)
    return SimKafka(cluster, SimProcess("contract"), patient_sim_settings())


@pytest.fixture
def log_starts_at(request: pytest.FixtureRequest, port: KafkaPort):
    """A function of topic, partition and offset that makes the log start there, as retention would."""

    async def cut(topic: str, partition: int, offset: int) -> None:
        if isinstance(port, SimKafka):
            port.cluster.delete_records(topic, partition, offset)
        else:
            await delete_below(bootstrap, topic, partition, offset)

    bootstrap = "" if isinstance(port, SimKafka) else request.getfixturevalue("broker").bootstrap
    return cut


# ---------------------------------------------------------------------------------------------- admin


async def test_admin_describes_what_was_created(port: KafkaPort, topic_name: Callable[[str], str]) -> None:
    """A created topic has its partitions and its settings beside the defaults; an unknown one is None."""
    name, unknown = topic_name("made"), topic_name("unknown")
    await made_topic(port, name, 3, cleanup_policy="compact")
    admin = await port.admin()
    found = await admin.describe([name, unknown])
    await admin.close()
    assert found[unknown] is None
    assert (found[name].name, found[name].partitions) == (name, 3)
    assert found[name].configs["cleanup.policy"] == "compact"
    assert "retention.ms" in found[name].configs


async def test_creating_again_changes_nothing(port: KafkaPort, topic_name: Callable[[str], str]) -> None:
    """An existing topic is left alone."""
    name = await made_topic(port, topic_name("twice"), 2)
    await made_topic(port, name, 5)
    admin = await port.admin()
    assert (await admin.describe([name]))[name].partitions == 2
    await admin.close()
    await admin.close()


async def test_topics_grow_and_never_shrink(port: KafkaPort, topic_name: Callable[[str], str]) -> None:
    """Two may ask at one time; asking for fewer changes nothing; a topic that is not there is not made."""
    name = await made_topic(port, topic_name("grows"), 3)
    admin = await port.admin()
    await asyncio.gather(admin.grow(name, 6), admin.grow(name, 6))
    await admin.grow(name, 2)
    described = (await admin.describe([name]))[name]
    assert described is not None
    assert described.partitions == 6
    await produced(port, name, [b"there"], partition=5)
    assert [record.value for record in await whole(port, name, 5)] == [b"there"]
    missing = topic_name("missing")
    with pytest.raises(KafkaUnavailable, match=missing):
        await admin.grow(missing, 3)
    assert (await admin.describe([missing]))[missing] is None
    await admin.close()


async def test_a_mark_includes_partitions_added_a_moment_ago(
    port: KafkaPort, topic_name: Callable[[str], str], eventually
) -> None:
    """What was written to a new partition before the mark is in it, and the tail gets there."""
    name = await made_topic(port, topic_name("grows"), 1)
    tail = port.tail()
    await tail.start([name])
    await tail.poll(50)
    admin = await port.admin()
    await admin.grow(name, 2)
    await admin.close()
    await produced(port, name, [b"new"], partition=1)
    mark = await tail.mark()
    assert (name, 1) in {(where[0], where[1]) for where in mark}
    got: list[bytes | None] = []

    async def reached() -> bool:
        got.extend(record.value for record in await tail.poll(50))
        return tail.reached(mark)

    await eventually(reached, "the mark")
    assert got == [b"new"]
    await tail.stop()


async def test_a_refused_topic_says_why(port: KafkaPort, topic_name: Callable[[str], str]) -> None:
    """A topic the cluster will not make is an error with the cluster's reason, not a hang."""
    admin = await port.admin()
    with pytest.raises(KafkaUnavailable, match=r"\(\d+\)"):
        await admin.create(topic_name("bad") + " with blanks", 1, {})
    await admin.close()


# --------------------------------------------------------------------------------- transactions


async def test_a_transaction_carries_records_and_offset(port: KafkaPort, topic_name: Callable[[str], str]) -> None:
    """Keys, values, headers, timestamps and tombstones arrive as they were sent, and the offset is committed."""
    source, out, group = topic_name("in"), topic_name("out"), topic_name("group")
    await made_topic(port, source, 2)
    await made_topic(port, out, 1)
    producer = port.partition_producer(source, 1, group, topic_name("txn"))
    await producer.init()
    before = producer.last_transaction_at
    headers = (("ce_id", b"1"), ("plain", b"\x00\xff"), ("no value", None))
    await producer.transact(
        [OutRecord(out, b"k", b"v", headers, timestamp_ms=1_700_000_000_123), OutRecord(out, b"gone", None)], 42
    )
    first, tombstone = await whole(port, out)
    assert (first.key, first.value, tuple(first.headers), first.timestamp) == (b"k", b"v", headers, 1_700_000_000_123)
    assert (tombstone.key, tombstone.value) == (b"gone", None)
    assert await committed(port, group, source) == {1: 42}
    assert producer.last_transaction_at > before
    await producer.close()
    await producer.close()


async def test_keys_choose_the_partition_every_client_would(port: KafkaPort, topic_name: Callable[[str], str]) -> None:
    """A key goes where Java's default partitioner sends it; an explicit partition wins over the key."""
    out = await made_topic(port, topic_name("out"), 4)
    producer = port.partition_producer(out, 0, "g", topic_name("txn"))
    await producer.init()
    # Java: toPositive(murmur2("21".getBytes())) = -973932308 & 0x7fffffff, from Kafka's own UtilsTest.
    expected = (-973932308 & 0x7FFFFFFF) % 4
    await producer.transact([OutRecord(out, b"21", b"by key"), OutRecord(out, b"21", b"told", partition=3 - expected)])
    await producer.close()
    assert [record.value for record in await whole(port, out, expected)] == [b"by key"]
    assert [record.value for record in await whole(port, out, 3 - expected)] == [b"told"]


async def test_many_records_arrive_complete_and_in_order(port: KafkaPort, topic_name: Callable[[str], str]) -> None:
    """A transaction of many batches in several partitions, one record above the batch size, keeps every record."""
    out = await made_topic(port, topic_name("out"), 3, max_message_bytes="3000000")
    producer = port.partition_producer(out, 0, "g", topic_name("txn"))
    await producer.init()
    values = [b"%06d" % number + b"x" * 2000 for number in range(1500)]
    values[700] = b"000700" + bytes(range(256)) * 6000
    await producer.transact([OutRecord(out, None, value, partition=int(value[:6]) % 3) for value in values])
    await producer.close()
    for partition in range(3):
        assert [r.value for r in await whole(port, out, partition)] == [
            v for v in values if int(v[:6]) % 3 == partition
        ]


async def test_nothing_to_write_is_no_transaction(port: KafkaPort, topic_name: Callable[[str], str]) -> None:
    """No records and no offset: returns at once; an offset alone is a transaction."""
    source, group = await made_topic(port, topic_name("in")), topic_name("group")
    producer = port.partition_producer(source, 0, group, topic_name("txn"))
    await producer.init()
    await producer.transact([])
    assert await committed(port, group, source) == {}
    await producer.transact([], 7)
    assert await committed(port, group, source) == {0: 7}
    await producer.close()


async def test_the_successor_fences_for_ever(port: KafkaPort, topic_name: Callable[[str], str]) -> None:
    """After a second init with the same id the first producer publishes nothing more, however often it tries."""
    out, txn, group = await made_topic(port, topic_name("out")), topic_name("txn"), topic_name("group")
    first, second = (port.partition_producer(out, 0, group, txn) for _ in range(2))
    await first.init()
    await first.transact([OutRecord(out, b"k", b"first")], 1)
    await second.init()
    for _ in range(2):
        with pytest.raises(PartitionLost):
            await first.transact([OutRecord(out, b"k", b"zombie")], 99)
    await second.transact([OutRecord(out, b"k", b"second")], 2)
    assert [record.value for record in await whole(port, out)] == [b"first", b"second"]
    assert await committed(port, group, out) == {0: 2}
    await first.close()
    await second.close()


async def test_transactions_of_one_producer_take_turns(port: KafkaPort, topic_name: Callable[[str], str]) -> None:
    """Concurrent callers of one producer are served one after the other."""
    out = await made_topic(port, topic_name("out"))
    producer = port.partition_producer(out, 0, "g", topic_name("txn"))
    await producer.init()
    await asyncio.gather(*(producer.transact([OutRecord(out, b"k", b"%d" % n)] * 2) for n in range(5)))
    values = [record.value for record in await whole(port, out)]
    assert values == [b"%d" % n for n in range(5) for _ in range(2)]
    await producer.close()


async def test_a_producer_that_never_started_refuses(port: KafkaPort, topic_name: Callable[[str], str]) -> None:
    """No init, or a closed one: PartitionLost, and closing is always safe."""
    producer = port.partition_producer("any", 0, "g", topic_name("txn"))
    with pytest.raises(PartitionLost):
        await producer.transact([OutRecord("any", b"k", b"v")])
    await producer.close()
    with pytest.raises(PartitionLost):
        await producer.init()


@pytest.mark.real_broker  # the embedded one makes topics as they are named
async def test_an_unknown_topic_costs_the_producer_not_the_reader(
    kafka_settings, topic_name: Callable[[str], str]
) -> None:
    """A record for a topic that does not exist is PartitionLost in bounded time, and nothing is visible."""
    port = AioKafka(kafka_settings(transaction_deadline_s=2.0))
    out = await made_topic(port, topic_name("out"))
    producer = port.partition_producer(out, 0, "g", topic_name("txn"))
    await producer.init()
    with pytest.raises(PartitionLost):
        await producer.transact([OutRecord(out, b"k", b"v"), OutRecord(topic_name("none"), b"k", b"v")])
    assert await whole(port, out) == []
    await port.aclose()


# ------------------------------------------------------------------------------------ plain producer


async def test_plain_producer_returns_when_written(port: KafkaPort, topic_name: Callable[[str], str]) -> None:
    """After send every record can be read; keyless ones of one call stay together."""
    out = await made_topic(port, topic_name("out"), 3)
    producer = port.plain_producer()
    await producer.start()
    await producer.send([OutRecord(out, None, b"%d" % n) for n in range(10)])
    await producer.send([])
    held = [await whole(port, out, partition) for partition in range(3)]
    assert sorted(len(part) for part in held) == [0, 0, 10]
    await producer.stop()
    await producer.stop()
    with pytest.raises(KafkaUnavailable):
        await producer.send([OutRecord(out, None, b"late")])


async def test_plain_producer_goes_on_after_a_failure(port: KafkaPort, topic_name: Callable[[str], str]) -> None:
    """A refused record is KafkaUnavailable; the next send works."""
    out = await made_topic(port, topic_name("out"), 1, max_message_bytes="1000")
    producer = port.plain_producer()
    await producer.start()
    incompressible = b"".join(hash((n, "salt")).to_bytes(8, "big", signed=True) for n in range(1000))
    with pytest.raises(KafkaUnavailable):
        await producer.send([OutRecord(out, None, incompressible)])
    await producer.send([OutRecord(out, None, b"small")])
    assert [record.value for record in await whole(port, out)] == [b"small"]
    await producer.stop()


# ---------------------------------------------------------------------------------------------- reader


async def test_reading_an_empty_log_ends_at_once(port: KafkaPort, topic_name: Callable[[str], str]) -> None:
    """No records, no wait."""
    assert await whole(port, await made_topic(port, topic_name("empty"))) == []


async def test_the_end_is_reached_over_markers(port: KafkaPort, topic_name: Callable[[str], str]) -> None:
    """Transaction markers at the end of the log do not keep the reader waiting; a start inside the log counts."""
    out = await made_topic(port, topic_name("out"))
    producer = port.partition_producer(out, 0, "g", topic_name("txn"))
    await producer.init()
    for number in range(3):
        await producer.transact([OutRecord(out, b"k", b"%d" % number)])
    await producer.close()
    began = time.monotonic()
    records = await whole(port, out)
    assert [record.value for record in records] == [b"0", b"1", b"2"]
    assert [r.value for r in await whole(port, out, start=records[1].offset)] == [b"1", b"2"]
    assert await whole(port, out, start=records[-1].offset + 1) == []
    assert await whole(port, out, start=10_000) == []
    assert time.monotonic() - began < 5


async def test_bounds_are_log_start_and_high_watermark(port: KafkaPort, topic_name: Callable[[str], str]) -> None:
    """Bounds count markers too: a log of one committed record ends at 2."""
    out = await made_topic(port, topic_name("out"), 2)
    producer = port.partition_producer(out, 0, "g", topic_name("txn"))
    await producer.init()
    await producer.transact([OutRecord(out, b"k", b"v", partition=1)])
    await producer.close()
    reader = port.reader()
    await reader.start()
    assert await reader.bounds(out, [0, 1]) == {0: (0, 0), 1: (0, 2)}
    assert await reader.bounds(out, []) == {}
    await reader.stop()
    await reader.stop()


async def test_single_offsets_are_read_again(port: KafkaPort, topic_name: Callable[[str], str]) -> None:
    """Wanted offsets come ascending, each once; those the log does not have are absent. One reader, many reads."""
    out = await made_topic(port, topic_name("out"), 2)
    await produced(port, out, [b"%d" % number for number in range(12_000)])
    await produced(port, out, [b"other"], partition=1)
    reader = port.reader()
    await reader.start()

    async def read(offsets: set[int], partition: int = 0) -> list[int]:
        return [r.offset async for chunk in reader.read_offsets(out, partition, OffsetSet(offsets)) for r in chunk]

    assert await read(set()) == []
    assert await read({3, 4, 9, 5001, 11_999, 50_000}) == [3, 4, 9, 5001, 11_999]
    assert await read({0, 7}, partition=1) == [0]
    assert await read({7}) == [7]
    chunks = [len(chunk) async for chunk in reader.read_offsets(out, 0, OffsetSet(range(12_000)))]
    assert sum(chunks) == 12_000
    assert max(chunks) <= 2000
    await reader.stop()


async def test_a_reader_left_half_way_can_be_used_again(port: KafkaPort, topic_name: Callable[[str], str]) -> None:
    """Breaking out of a read does not disturb the next one."""
    out = await made_topic(port, topic_name("out"))
    await produced(port, out, [b"%d" % number for number in range(5000)])
    reader = port.reader()
    await reader.start()
    async for chunk in reader.read_to_end(out, 0):
        assert chunk[0].offset == 0
        break
    assert [r.offset async for chunk in reader.read_to_end(out, 0, 4990) for r in chunk] == list(range(4990, 5000))
    await reader.stop()


# ------------------------------------------------------------------------------------------------ tail


async def test_the_tail_follows_several_topics(port: KafkaPort, topic_name: Callable[[str], str]) -> None:
    """Everything from the log's start comes, then what is written later; caught_up tells the truth both times."""
    one, two = await made_topic(port, topic_name("one"), 2), await made_topic(port, topic_name("two"))
    await produced(port, one, [b"a"], partition=1)
    tail = port.tail()
    await tail.start([one, two])
    assert not await tail.caught_up()
    seen: list[bytes] = []

    async def catch_up() -> None:
        for _ in range(100):
            seen.extend(record.value for record in await tail.poll(100))
            if await tail.caught_up():
                return
        pytest.fail("the tail never caught up")

    await catch_up()
    assert seen == [b"a"]
    await produced(port, two, [b"b"])
    assert not await tail.caught_up()
    await catch_up()
    assert seen == [b"a", b"b"]
    await tail.stop()
    await tail.stop()


async def test_a_mark_is_reached_whatever_is_written_after(port: KafkaPort, topic_name: Callable[[str], str]) -> None:
    """What was there when the mark was taken counts, not what came since; a stopped tail has reached nothing."""
    topic = await made_topic(port, topic_name("busy"), 2)
    await produced(port, topic, [b"a", b"b"])
    tail = port.tail()
    await tail.start([topic])
    mark = await tail.mark()
    assert not tail.reached(mark)
    seen: list[bytes] = []
    for _ in range(100):
        seen.extend(record.value or b"" for record in await tail.poll(100))
        if tail.reached(mark):
            break
    assert seen == [b"a", b"b"]
    await produced(port, topic, [b"c"], partition=1)
    assert tail.reached(mark)
    assert not await tail.caught_up()
    await tail.stop()
    assert not tail.reached(mark)


async def test_the_tail_is_caught_up_on_empty_topics(port: KafkaPort, topic_name: Callable[[str], str]) -> None:
    """Nothing written means nothing to wait for."""
    tail = port.tail()
    await tail.start([await made_topic(port, topic_name("empty"), 2)])
    assert await tail.caught_up()
    await tail.stop()


# -------------------------------------------------------------------------------------- read position


async def test_the_read_position_is_for_all_to_see(port: KafkaPort, topic_name: Callable[[str], str]) -> None:
    """Positions are committed to the group's ``.read`` sister, which has no members; more partitions may join in."""
    source, group = await made_topic(port, topic_name("in"), 3), topic_name("group")
    committer = port.read_position(source, group)
    await committer.commit({})
    await committer.commit({0: 5})
    await committer.commit({0: 8, 2: 1})
    assert await committed(port, f"{group}.read", source) == {0: 8, 2: 1}
    assert await committed(port, group, source) == {}
    await committer.stop()
    await committer.stop()


# ------------------------------------------------------------------------------------------- consumer


async def test_nothing_comes_before_resume(port: KafkaPort, topic_name: Callable[[str], str], eventually) -> None:
    """An added partition stays silent until resume names an offset, and then begins exactly there."""
    source = await made_topic(port, topic_name("in"), 2)
    await produced(port, source, [b"%d" % number for number in range(10)])
    async with Member(port, source, topic_name("group")) as member:
        await eventually(lambda: member.hears.assignments, "the first assignment")
        assert member.hears.assignments == [(frozenset(), frozenset({0, 1}), frozenset())]
        assert member.consumer.assignment() == {0, 1}
        assert member.consumer.position(0) is None
        with pytest.raises(ValueError, match="name an offset"):
            member.consumer.resume(0)
        await member.rounds(eventually)
        assert not member.got
        member.consumer.resume(0, 4)
        await eventually(lambda: len(member.got[0]) == 6, "six records")
        assert member.values() == [b"%d" % number for number in range(4, 10)]
        assert member.consumer.position(0) == 10
        assert member.hears.suspects == []
        assert not member.consumer.complaints()


async def test_pause_and_resume_lose_nothing(port: KafkaPort, topic_name: Callable[[str], str], eventually) -> None:
    """However often it is paused, every record comes once and in order; other partitions flow on."""
    source = await made_topic(port, topic_name("in"), 2)
    await produced(port, source, [b"%d" % number for number in range(3000)])
    await produced(port, source, [b"%d" % number for number in range(3000)], partition=1)
    async with Member(port, source, topic_name("group")) as member:
        await eventually(lambda: member.hears.owned, "the assignment")
        member.consumer.resume(0, 0)
        member.consumer.resume(1, 0)
        for step in range(1, 6):
            await eventually(lambda step=step: len(member.got[0]) >= 500 * step, "more records")
            member.consumer.pause([0, 77])
            held = len(member.got[0])
            await member.rounds(eventually)
            assert len(member.got[0]) == held
            member.consumer.resume(0)
        await eventually(lambda: len(member.got[0]) + len(member.got[1]) == 6000, "the rest")
        for partition in range(2):
            assert [record.offset for record in member.got[partition]] == list(range(3000))


async def test_resume_can_go_back(port: KafkaPort, topic_name: Callable[[str], str], eventually) -> None:
    """Naming an offset begins again there, also for a partition that is running."""
    source = await made_topic(port, topic_name("in"))
    await produced(port, source, [b"0", b"1", b"2"])
    async with Member(port, source, topic_name("group")) as member:
        await eventually(lambda: member.hears.owned, "the assignment")
        member.consumer.resume(0, 2)
        await eventually(lambda: member.values() == [b"2"], "the last record")
        member.consumer.resume(0, 1)
        await eventually(lambda: member.values() == [b"2", b"1", b"2"], "the last two again")
        member.consumer.resume(44, 0)


async def test_a_second_member_takes_some_and_disturbs_none(
    port: KafkaPort, topic_name: Callable[[str], str], eventually
) -> None:
    """Kept partitions go on where they were without a record twice; the others are named lost, then added back."""
    source, group = await made_topic(port, topic_name("in"), 4), topic_name("group")
    for partition in range(4):
        await produced(port, source, [b"%d" % number for number in range(20)], partition)
    async with Member(port, source, group) as first:
        await eventually(lambda: first.hears.owned, "the first assignment")
        for partition in range(4):
            first.consumer.resume(partition, 0)
        await eventually(lambda: all(len(first.got[p]) == 20 for p in range(4)), "all records")
        async with Member(port, source, group) as second:
            await eventually(lambda: second.hears.owned and len(first.hears.owned) == 2, "the split")
            assert first.hears.suspects[0] == {0, 1, 2, 3}
            kept, added, lost = first.hears.assignments[-1]
            assert kept == first.hears.owned
            assert lost == second.hears.owned
            assert kept | lost == {0, 1, 2, 3}
            assert not added
            assert first.consumer.assignment() == kept
            for partition in kept:
                await produced(port, source, [b"more"], partition)
            await eventually(lambda: all(len(first.got[p]) == 21 for p in kept), "the new records")
            assert all([r.offset for r in first.got[p]] == list(range(21)) for p in kept)
            assert not second.got
        await eventually(lambda: first.hears.owned == {0, 1, 2, 3}, "all four back")
        kept_now, added_now, lost_now = first.hears.assignments[-1]
        assert (kept_now, added_now, lost_now) == (kept, lost, frozenset())
        assert all(first.consumer.position(partition) is None for partition in added_now)


async def test_a_member_too_many_hears_that_it_has_joined(
    port: KafkaPort, topic_name: Callable[[str], str], eventually
) -> None:
    """More members than partitions: the one without any is told so, once a generation, and is healthy."""
    source, group = await made_topic(port, topic_name("in")), topic_name("group")
    nothing: frozenset[int] = frozenset()
    async with Member(port, source, group) as first:
        await eventually(lambda: first.hears.owned == {0}, "the assignment")
        async with Member(port, source, group) as second:
            await eventually(lambda: second.hears.assignments and len(first.hears.assignments) == 2, "both to join")
            idle, busy = sorted((first, second), key=lambda member: len(member.hears.owned))
            assert (idle.hears.owned, busy.hears.owned) == (nothing, {0})
            assert second.hears.assignments == [(nothing, second.hears.owned, nothing)]
            await idle.rounds(eventually)
            assert not idle.consumer.complaints()


async def test_a_paused_partition_stays_paused_over_a_rebalance(
    port: KafkaPort, topic_name: Callable[[str], str], eventually
) -> None:
    """The pause is ours, not the generation's; and so is the position."""
    source, group = await made_topic(port, topic_name("in"), 2), topic_name("group")
    for partition in range(2):
        await produced(port, source, [b"0", b"1", b"2"], partition)
    async with Member(port, source, group) as first:
        await eventually(lambda: first.hears.owned, "the assignment")
        first.consumer.resume(0, 1)
        first.consumer.resume(1, 1)
        await eventually(lambda: len(first.got[0]) == len(first.got[1]) == 2, "the records")
        first.consumer.pause([0, 1])
        for partition in range(2):
            await produced(port, source, [b"3"], partition)
        async with Member(port, source, group) as second:
            await eventually(lambda: second.hears.owned and len(first.hears.owned) == 1, "the split")
            (kept,) = first.hears.owned
            assert first.consumer.position(kept) == 3
            await first.rounds(eventually)
            assert len(first.got[kept]) == 2
            first.consumer.resume(kept)
            await eventually(lambda: len(first.got[kept]) == 3, "the held record")
            assert first.got[kept][-1].offset == 3


async def test_an_assignment_is_confirmed_by_the_group(
    port: KafkaPort, topic_name: Callable[[str], str], eventually
) -> None:
    """True for ours, false for a partition we do not have, and false after we left."""
    source, group = await made_topic(port, topic_name("in"), 2), topic_name("group")
    async with Member(port, source, group) as member:
        await eventually(lambda: member.hears.owned == {0, 1}, "the assignment")
        assert await member.consumer.confirms_assignment(0, 5)
        assert not await member.consumer.confirms_assignment(2, 5)
    assert not await member.consumer.confirms_assignment(0, 5)


async def test_stopping_is_quiet_and_repeatable(port: KafkaPort, topic_name: Callable[[str], str], eventually) -> None:
    """Stop leaves the group at once for others to have its partitions, calls no listener, and twice is once."""
    source, group = await made_topic(port, topic_name("in")), topic_name("group")
    member = Member(port, source, group)
    async with member:
        await eventually(lambda: member.hears.owned, "the assignment")
    heard = len(member.hears.assignments)
    await member.consumer.stop()
    assert await member.consumer.poll(10, 10) == {}
    assert len(member.hears.assignments) == heard
    async with Member(port, source, group) as next_one:
        await eventually(lambda: next_one.hears.owned, "the successor's assignment", limit_s=5)


async def test_a_deleted_position_is_told_not_jumped(
    port: KafkaPort, log_starts_at, topic_name: Callable[[str], str], eventually
) -> None:
    """Where the log no longer reaches down to the position the partition pauses and says so; resume clears it."""
    source = await made_topic(port, topic_name("in"))
    await produced(port, source, [b"0", b"1", b"2", b"3"])
    await log_starts_at(source, 0, 2)
    async with Member(port, source, topic_name("group")) as member:
        await eventually(lambda: member.hears.owned, "the assignment")
        member.consumer.resume(0, 0)
        await eventually(lambda: member.consumer.lost_positions() == {0: 0}, "the lost position")
        assert not member.got[0]
        with pytest.raises(ValueError, match="name an offset"):
            member.consumer.resume(0)
        member.consumer.resume(0, 2)
        assert member.consumer.lost_positions() == {}
        await eventually(lambda: member.values() == [b"2", b"3"], "what is left")
