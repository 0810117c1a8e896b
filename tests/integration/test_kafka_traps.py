"""The client's traps, each shown shut: what ``test_kafka_facts`` makes happen raw cannot happen through the room."""

from __future__ import annotations

import asyncio
import inspect
import secrets
import time
from collections.abc import AsyncIterator, Callable

import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.errors import KafkaError

from batchferry.domain.errors import CommitUnknown, KafkaUnavailable, PartitionLost
from batchferry.kafka import AioKafka
from batchferry.kafka.consumer import _Rebalances
from batchferry.ports import OutRecord
from broker import RealBroker
from broker.kit import Hears, Member, committed, made_topic, patient_settings, produced, whole

pytestmark = pytest.mark.broker

SHORT = {"transaction_deadline_s": 1.0, "commit_deadline_s": 1.0, "abort_deadline_s": 0.5, "close_deadline_s": 0.5}


@pytest.fixture
async def victim(own_broker: RealBroker) -> AsyncIterator[AioKafka]:
    """The room on a broker that may be frozen and killed, with little patience."""
    made = AioKafka(patient_settings(own_broker.bootstrap, request_timeout_s=2.0, **SHORT))
    yield made
    await made.aclose()


# ------------------------------------------------------------------------------------------ producer


@pytest.mark.real_broker
async def test_a_refused_record_takes_the_whole_transaction(kafka: AioKafka, topic_name: Callable[[str], str]) -> None:
    """No commit over a refused record: nothing is visible, no offset moves, and the producer is dead."""
    out, group = await made_topic(kafka, topic_name("out"), max_message_bytes="2000"), topic_name("group")
    producer = kafka.partition_producer(out, 0, group, topic_name("txn"))
    await producer.init()
    records = [OutRecord(out, b"k", b"good"), OutRecord(out, b"k", secrets.token_bytes(5000))]
    with pytest.raises(PartitionLost, match=r"MESSAGE.*\(10\)") as caught:
        await producer.transact(records, 5)
    assert not isinstance(caught.value, CommitUnknown)
    assert await whole(kafka, out) == []
    assert await committed(kafka, group, out) == {}


@pytest.mark.real_broker
async def test_a_producer_is_never_used_after_a_failure(kafka: AioKafka, topic_name: Callable[[str], str]) -> None:
    """Its sequence numbers are out of step, so it refuses at once; a new one with the same id works."""
    out, txn = await made_topic(kafka, topic_name("out"), max_message_bytes="2000"), topic_name("txn")
    producer = kafka.partition_producer(out, 0, "g", txn)
    await producer.init()
    with pytest.raises(PartitionLost):
        await producer.transact([OutRecord(out, b"k", secrets.token_bytes(5000))])
    began = time.monotonic()
    with pytest.raises(PartitionLost, match="dead"):
        await producer.transact([OutRecord(out, b"k", b"small")])
    with pytest.raises(PartitionLost, match="cannot start again"):
        await producer.init()
    assert time.monotonic() - began < 0.5
    successor = kafka.partition_producer(out, 0, "g", txn)
    await successor.init()
    await successor.transact([OutRecord(out, b"k", b"small")])
    assert [record.value for record in await whole(kafka, out)] == [b"small"]
    await successor.close()


async def test_a_record_above_our_own_limit_is_not_even_sent(kafka_settings, topic_name: Callable[[str], str]) -> None:
    """A record no broker would take is refused before the transaction begins, with its size."""
    port = AioKafka(kafka_settings(max_record_bytes=10_000))
    out = await made_topic(port, topic_name("out"))
    producer = port.partition_producer(out, 0, "g", topic_name("txn"))
    await producer.init()
    with pytest.raises(PartitionLost, match=r"a record of 110\d\d bytes"):
        await producer.transact([OutRecord(out, b"k", b"x" * 11_000)])
    await port.aclose()


async def test_an_unanswered_commit_is_unknown_not_stuck(
    own_broker: RealBroker, victim: AioKafka, topic_name: Callable[[str], str]
) -> None:
    """A commit without an answer is CommitUnknown in time; a successor then finds the transaction whole or absent."""
    out, txn, group = await made_topic(victim, topic_name("out")), topic_name("txn"), topic_name("group")
    producer = victim.partition_producer(out, 0, group, txn)
    await producer.init()
    await producer.transact([OutRecord(out, b"k", b"before")], 1)

    client = producer._client
    commit = client.commit_transaction

    async def frozen_commit() -> None:
        own_broker.freeze()
        await commit()

    client.commit_transaction = frozen_commit
    began = time.monotonic()
    with pytest.raises(CommitUnknown):
        await producer.transact([OutRecord(out, b"k", b"perhaps")], 2)
    assert time.monotonic() - began < 4
    own_broker.thaw()
    successor = victim.partition_producer(out, 0, group, txn)
    await successor.init()
    seen = [record.value for record in await whole(victim, out)]
    offset = (await committed(victim, group, out))[0]
    assert (seen, offset) in (([b"before"], 1), ([b"before", b"perhaps"], 2))
    await successor.close()


async def test_without_a_broker_every_producer_call_ends(
    own_broker: RealBroker, victim: AioKafka, topic_name: Callable[[str], str]
) -> None:
    """Broker frozen or gone: init, transact, send and close all end within their deadlines."""
    out = await made_topic(victim, topic_name("out"))
    producer, plain = victim.partition_producer(out, 0, "g", topic_name("txn")), victim.plain_producer()
    idle = victim.partition_producer(out, 0, "g", topic_name("idle"))
    await producer.init()
    await idle.init()
    await plain.start()
    await plain.send([OutRecord(out, b"k", b"v")])
    own_broker.freeze()
    began = time.monotonic()
    with pytest.raises(PartitionLost, match="no answer in time"):
        await producer.transact([OutRecord(out, b"k", b"v")], 1)
    with pytest.raises(KafkaUnavailable, match="no answer in time"):
        await plain.send([OutRecord(out, b"k", b"v")])
    await idle.close()
    await plain.stop()
    assert time.monotonic() - began < 8
    own_broker.kill()
    quick = AioKafka(patient_settings(own_broker.bootstrap, init_deadline_s=1.0, connect_deadline_s=1.0, **SHORT))
    late = quick.partition_producer(out, 0, "g", topic_name("late"))
    began = time.monotonic()
    with pytest.raises(KafkaUnavailable, match="cluster up"):
        await late.init()
    with pytest.raises(KafkaUnavailable, match="cluster up"):
        await quick.plain_producer().start()
    with pytest.raises(KafkaUnavailable, match="cluster up"):
        await quick.admin()
    with pytest.raises(KafkaUnavailable, match="cluster up"):
        await quick.consumer(out, "g").start(Hears())
    with pytest.raises(KafkaUnavailable, match="cluster up"):
        await quick.reader().start()
    assert time.monotonic() - began < 8
    await quick.aclose()


@pytest.mark.real_broker
async def test_a_refused_offset_takes_the_whole_transaction(kafka_settings, topic_name: Callable[[str], str]) -> None:
    """An offset the group coordinator does not take (no such partition) loses the producer, not atomicity."""
    port = AioKafka(kafka_settings(transaction_deadline_s=1.5, transaction_timeout_s=2.0))
    out, group = await made_topic(port, topic_name("out")), topic_name("group")
    producer = port.partition_producer(out, 99, group, topic_name("txn"))
    await producer.init()
    with pytest.raises(PartitionLost):
        await producer.transact([OutRecord(out, b"k", b"v", partition=0)], 5)
    assert await whole(port, out) == []
    assert await committed(port, group, out) == {}
    await port.aclose()


async def test_cancelling_a_transaction_loses_the_producer(kafka: AioKafka, topic_name: Callable[[str], str]) -> None:
    """A cancelled transact leaves nothing visible and a dead producer, never one in the middle of something."""
    out = await made_topic(kafka, topic_name("out"))
    producer = kafka.partition_producer(out, 0, "g", topic_name("txn"))
    await producer.init()
    task = asyncio.create_task(producer.transact([OutRecord(out, b"k", b"v" * 1000)] * 200))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    with pytest.raises(PartitionLost, match="dead"):
        await producer.transact([], 1)
    assert await whole(kafka, out) == []


async def test_our_own_mistake_stays_an_exception(kafka: AioKafka, topic_name: Callable[[str], str]) -> None:
    """Text where bytes belong is a bug and shows as one; nothing becomes visible."""
    out = await made_topic(kafka, topic_name("out"))
    producer = kafka.partition_producer(out, 0, "g", topic_name("txn"))
    await producer.init()
    with pytest.raises(TypeError):
        await producer.transact([OutRecord(out, b"k", b"v"), OutRecord(out, b"k", "text")])  # type: ignore[arg-type]
    assert await whole(kafka, out) == []


# ------------------------------------------------------------------------------------------ consumer


def test_the_callbacks_cannot_wait() -> None:
    """They are plain functions, so nothing can be awaited in them and no heartbeat is missed."""
    assert not inspect.iscoroutinefunction(_Rebalances.on_partitions_assigned)
    assert not inspect.iscoroutinefunction(_Rebalances.on_partitions_revoked)


async def test_the_first_join_suspects_nothing(kafka: AioKafka, topic_name: Callable[[str], str], eventually) -> None:
    """The empty revocation of the first join reaches no listener."""
    source = await made_topic(kafka, topic_name("in"))
    async with Member(kafka, source, topic_name("group")) as member:
        await eventually(lambda: member.hears.owned, "the assignment")
        assert member.hears.suspects == []


@pytest.mark.real_broker
async def test_poll_returns_in_time_during_a_rebalance(
    kafka: AioKafka, broker, topic_name: Callable[[str], str], eventually
) -> None:
    """A member that keeps the group waiting delays nobody's poll; its end brings the assignment."""
    source, group = await made_topic(kafka, topic_name("in"), 2), topic_name("group")
    holder = kafka.consumer(source, group)
    joined, let_go = asyncio.Event(), asyncio.Event()

    async def never_again() -> bool:
        joined.set()
        await let_go.wait()
        return True

    await holder.start(Hears())
    await eventually(holder.assignment, "the holder's assignment")
    holder._client._coordinator._do_heartbeat = never_again  # it neither heartbeats nor hears of the rebalance
    await joined.wait()

    consumer, hears = kafka.consumer(source, group), Hears()
    await consumer.start(hears)
    for _ in range(5):
        began = time.monotonic()
        assert await consumer.poll(10, 100) == {}
        assert time.monotonic() - began < 1
    assert not hears.assignments
    del holder._client._coordinator._do_heartbeat
    let_go.set()

    async def assigned() -> bool:
        await consumer.poll(10, 20)
        return bool(hears.assignments)

    await eventually(assigned, "the assignment")
    await consumer.stop()
    await holder.stop()


async def test_a_cancelled_poll_loses_nothing_and_breaks_nothing(
    kafka: AioKafka, topic_name: Callable[[str], str], eventually
) -> None:
    """However poll is cancelled, each record comes once, and the client's own supervision stays on."""
    source = await made_topic(kafka, topic_name("in"))
    await produced(kafka, source, [b"%d" % number for number in range(200)])
    consumer, hears = kafka.consumer(source, topic_name("group")), Hears()
    await consumer.start(hears)
    while not hears.owned:
        await consumer.poll(10, 50)
    consumer.resume(0, 0)
    got: list[int] = []
    for turn in range(400):
        task = asyncio.create_task(consumer.poll(7, 30))
        for _ in range(turn % 5):
            await asyncio.sleep(0)
        if turn % 3 == 0:
            task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            got += [record.offset for record in task.result().get(0, ())]
        if len(got) == 200:
            break
    assert got == list(range(200))
    assert consumer._client._subscription._fetch_count <= 1
    await eventually(lambda: consumer._fetching is None or consumer._fetching.done(), "the last fetch")
    assert consumer._client._subscription._fetch_count == 0
    await consumer.stop()


async def test_seeking_makes_records_in_transit_void(kafka: AioKafka, topic_name: Callable[[str], str]) -> None:
    """What was fetched before a resume with an offset is not delivered after it; a pause only puts it off."""
    source = await made_topic(kafka, topic_name("in"))
    await produced(kafka, source, [b"%d" % number for number in range(10)])
    consumer, hears = kafka.consumer(source, topic_name("group")), Hears()
    await consumer.start(hears)
    while not hears.owned:
        await consumer.poll(10, 50)

    async def in_transit() -> None:
        """Cancel a poll that had begun, and wait until its fetch is in."""
        task = asyncio.create_task(consumer.poll(4, 1000))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await asyncio.wait([consumer._fetching])

    async def next_offsets() -> list[int]:
        while True:
            records = (await consumer.poll(4, 1000)).get(0, ())
            if records:
                return [record.offset for record in records]

    consumer.resume(0, 0)
    await in_transit()
    assert consumer.position(0) == 0
    consumer.pause([0])
    assert await consumer.poll(4, 50) == {}
    consumer.resume(0)
    assert await next_offsets() == [0, 1, 2, 3]
    await in_transit()
    consumer.resume(0, 8)
    assert await next_offsets() == [8, 9]
    await consumer.stop()


async def test_a_failing_fetch_skips_nothing(kafka: AioKafka, topic_name: Callable[[str], str]) -> None:
    """When the client raises half way through a call, the records it had already taken out come again."""
    source = await made_topic(kafka, topic_name("in"), 2)
    for partition in range(2):
        await produced(kafka, source, [b"v"] * 5, partition)
    consumer, hears = kafka.consumer(source, topic_name("group")), Hears()
    await consumer.start(hears)
    while not hears.owned:
        await consumer.poll(10, 50)
    client, getmany = consumer._client, consumer._client.getmany
    taken: list[int] = []

    async def raises_after_taking(**arguments: object) -> object:
        found = await getmany(**arguments)
        if found and not taken:
            taken.append(sum(map(len, found.values())))
            raise KafkaError("damaged")
        return found

    client.getmany = raises_after_taking
    consumer.resume(0, 0)
    consumer.resume(1, 0)
    got: dict[int, list[int]] = {0: [], 1: []}
    failures = 0
    while sum(map(len, got.values())) < 10:
        try:
            for partition, records in (await consumer.poll(100, 500)).items():
                got[partition] += [record.offset for record in records]
        except KafkaUnavailable:
            failures += 1
    assert failures == 1
    assert taken[0] > 0
    assert got == {0: [0, 1, 2, 3, 4], 1: [0, 1, 2, 3, 4]}
    await consumer.stop()


@pytest.mark.real_broker  # the embedded one takes no session this short
async def test_a_group_that_goes_on_without_us_takes_everything(
    kafka_settings, topic_name: Callable[[str], str], eventually
) -> None:
    """No assignment within the limit after a rebalance began: all partitions are lost, once, and can be added anew."""
    port = AioKafka(kafka_settings(session_timeout_s=1.5, rebalance_timeout_s=1.5, heartbeat_interval_s=0.2))
    source = await made_topic(port, topic_name("in"), 2)
    async with Member(port, source, topic_name("group")) as member:
        await eventually(lambda: member.hears.owned, "the assignment")
        coordinator = member.consumer._client._coordinator
        rejoin, blocked = coordinator._do_rejoin_group, asyncio.Event()

        async def blocked_rejoin(subscription: object) -> bool:
            await blocked.wait()
            return await rejoin(subscription)

        coordinator._do_rejoin_group = blocked_rejoin
        coordinator.request_rejoin()
        await eventually(lambda: member.hears.suspects, "the suspicion")
        assert not await member.consumer.confirms_assignment(0, 1)
        await eventually(lambda: not member.hears.owned, "the loss")
        assert member.hears.assignments[-1] == (frozenset(), frozenset(), frozenset({0, 1}))
        assert member.consumer.assignment() == frozenset()
        blocked.set()
        await eventually(lambda: member.hears.owned == {0, 1}, "the new assignment")
        assert member.hears.assignments[-1] == (frozenset(), frozenset({0, 1}), frozenset())


async def test_sticky_members_of_one_process_do_not_mix(
    kafka: AioKafka, topic_name: Callable[[str], str], eventually
) -> None:
    """Two consumers in one process keep their own partitions when a third comes and goes."""
    source, group = await made_topic(kafka, topic_name("in"), 6), topic_name("group")
    async with Member(kafka, source, group) as one, Member(kafka, source, group) as two:
        await eventually(lambda: len(one.hears.owned) == len(two.hears.owned) == 3, "the split")
        before = one.hears.owned, two.hears.owned
        async with Member(kafka, source, group) as three:
            await eventually(
                lambda: len(one.hears.owned) == len(two.hears.owned) == len(three.hears.owned) == 2, "three ways"
            )
            assert one.hears.owned < before[0]
            assert two.hears.owned < before[1]


async def test_the_watchdog_names_what_is_wrong(kafka: AioKafka, topic_name: Callable[[str], str], eventually) -> None:
    """Dead client tasks, a rejoin that never happens, a silent poll and a failing listener are each complained of."""
    source = await made_topic(kafka, topic_name("in"))

    class Faulty(Hears):
        def on_assignment(self, kept, added, lost) -> None:
            super().on_assignment(kept, added, lost)
            if len(self.assignments) > 1:
                raise RuntimeError

    consumer, hears = kafka.consumer(source, topic_name("group")), Faulty()
    assert consumer.complaints() == ()
    await consumer.start(hears)
    while not hears.owned:
        await consumer.poll(10, 50)
    assert not consumer.complaints()
    consumer._polled_at -= 61
    assert consumer.complaints() == ["no poll has returned for 61 s"]
    await consumer.poll(10, 10)
    assert not consumer.complaints()

    coordinator = consumer._client._coordinator
    generation = coordinator.generation
    coordinator.request_rejoin()
    await consumer.poll(10, 1)
    consumer._unsettled_since = time.monotonic() - 100
    assert consumer.complaints() == ["no assignment from the group for 100 s"]

    async def settled() -> bool:
        await consumer.poll(10, 10)
        return coordinator.generation > generation and consumer._unsettled_since is None

    await eventually(settled, "the next generation")
    assert consumer.complaints() == ["the assignment listener failed: on_assignment: RuntimeError"]

    for task in (consumer._client._fetcher._fetch_task, coordinator._coordination_task):
        task.cancel()
        await asyncio.wait([task])
    assert consumer.complaints()[:2] == ["the group coordination task has died", "the fetch task has died"]
    await consumer.stop()
    assert consumer.complaints() == ()


# -------------------------------------------------------------------------------------- broker trouble


async def test_everything_goes_on_after_a_broker_crash(
    own_broker: RealBroker, topic_name: Callable[[str], str], eventually
) -> None:
    """Kill -9 and start again: the consumer goes on where it was, the tail too, and a new producer works."""
    port = AioKafka(patient_settings(own_broker.bootstrap))
    source, group, txn = await made_topic(port, topic_name("in")), topic_name("group"), topic_name("txn")
    producer = port.partition_producer(source, 0, group, txn)
    await producer.init()
    await producer.transact([OutRecord(source, b"k", b"before")], 0)
    tail = port.tail()
    await tail.start([source])
    followed: list[bytes] = []

    async def follow() -> bool:
        try:
            followed.extend(record.value for record in await tail.poll(50))
            return await tail.caught_up()
        except KafkaUnavailable:
            return False

    await eventually(follow, "the tail")
    async with Member(port, source, group) as member:
        await eventually(lambda: member.hears.owned, "the assignment")
        member.consumer.resume(0, 0)
        await eventually(lambda: member.values() == [b"before"], "the first record")
        await asyncio.to_thread(own_broker.restart)
        successor = port.partition_producer(source, 0, group, txn)
        await successor.init()
        await successor.transact([OutRecord(source, b"k", b"after")], 1)
        await eventually(lambda: member.values() == [b"before", b"after"], "the record after the crash", limit_s=40)
        await eventually(lambda: not member.consumer.complaints(), "a healthy watchdog")
        await eventually(follow, "the tail after the crash")
        assert followed == [b"before", b"after"]
        await successor.close()
    await producer.close()
    await tail.stop()
    await port.aclose()


async def test_a_read_over_an_open_transaction_waits_and_then_says_so(
    kafka_settings, topic_name: Callable[[str], str]
) -> None:
    """The end of the log counts uncommitted records, so a transaction left open makes the read fail by name."""
    port = AioKafka(kafka_settings(transaction_timeout_s=30.0, transaction_deadline_s=0.5, read_stall_s=31.0))
    object.__setattr__(port._settings, "read_stall_s", 0.5)  # below what the settings allow, to be quick
    out = await made_topic(port, topic_name("out"))
    producer = port.partition_producer(out, 0, "g", topic_name("txn"))
    await producer.init()
    await producer.transact([OutRecord(out, b"k", b"done")])
    client = producer._client
    await client.begin_transaction()
    await client.send_and_wait(out, b"open", partition=0)
    reader = port.reader()
    await reader.start()
    chunks = reader.read_to_end(out, 0)
    assert [record.value for record in await anext(chunks)] == [b"done"]
    with pytest.raises(KafkaUnavailable, match="stuck at offset 2 of 3"):
        await anext(chunks)
    await client.abort_transaction()
    assert [record.value async for chunk in reader.read_to_end(out, 0) for record in chunk] == [b"done"]
    await reader.stop()
    await producer.close()


async def test_the_tail_finds_partitions_added_later(
    kafka: AioKafka, broker, topic_name: Callable[[str], str], eventually, monkeypatch
) -> None:
    """A topic that grows is followed in its new partitions too, and nothing old comes twice."""
    from aiokafka.admin import AIOKafkaAdminClient, NewPartitions  # noqa: PLC0415

    monkeypatch.setattr("batchferry.kafka.reader.PARTITIONS_CHECK_S", 0.0)
    source = await made_topic(kafka, topic_name("in"))
    await produced(kafka, source, [b"old"])
    tail = kafka.tail()
    await tail.start([source])
    seen: list[bytes] = []

    async def follow() -> bool:
        seen.extend(record.value for record in await tail.poll(50))
        return await tail.caught_up()

    await eventually(follow, "the tail")
    admin = AIOKafkaAdminClient(bootstrap_servers=broker.bootstrap)
    await admin.start()
    await admin.create_partitions({source: NewPartitions(2)})
    await admin.close()

    async def grown() -> bool:
        await follow()
        return TopicPartition(source, 1) in tail._client.assignment()

    await eventually(grown, "the new partition")
    await produced(kafka, source, [b"new"], partition=1)
    await eventually(follow, "the tail")
    assert seen == [b"old", b"new"]
    await tail.stop()


async def test_a_stranger_in_the_read_group_is_counted_not_raised(
    kafka: AioKafka, broker, topic_name: Callable[[str], str]
) -> None:
    """Somebody who joins the memberless group makes commits fail; they are counted and tried again later."""
    source, group = await made_topic(kafka, topic_name("in")), topic_name("group")
    stranger = AIOKafkaConsumer(
        source, bootstrap_servers=broker.bootstrap, group_id=f"{group}.read", auto_offset_reset="earliest"
    )
    await stranger.start()
    committer = kafka.read_position(source, group)
    await committer.commit({0: 1})
    assert committer.failures == 1
    assert committer.last_failure
    await stranger.stop()
    await committer.commit({0: 1})
    assert (committer.failures, committer.last_failure) == (1, "")
    await committer.stop()
