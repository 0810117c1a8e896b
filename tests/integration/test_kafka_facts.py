"""Facts about a real broker and the bare client on which the Kafka room is built.

When one of these fails after an upgrade, the room's reasoning has lost a leg: find out what now holds, then change
the room. Most are about the client's traps; ``test_kafka_traps`` shows the same ones shut.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRebalanceListener, TopicPartition
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from aiokafka.errors import (
    IllegalOperation,
    KafkaError,
    MessageSizeTooLargeError,
    OutOfOrderSequenceNumber,
    ProducerFenced,
)
from aiokafka.structs import OffsetAndMetadata

from batchferry.kafka import AioKafka
from batchferry.kafka.dispose import discard_producer, stop_consumer
from broker import RealBroker
from broker.kit import Member, committed, made_topic, patient_settings, produced

pytestmark = pytest.mark.real_broker


async def open_producer(bootstrap: str, transactional_id: str, **settings: object) -> AIOKafkaProducer:
    """A started transactional producer."""
    made = AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=transactional_id, **settings)
    await made.start()
    return made


async def ends(bootstrap: str, where: TopicPartition) -> tuple[int, int]:
    """Last stable offset and high watermark."""
    found = []
    for isolation in ("read_committed", "read_uncommitted"):
        client = AIOKafkaConsumer(bootstrap_servers=bootstrap, isolation_level=isolation)
        await client.start()
        found.append((await client.end_offsets([where]))[where])
        await client.stop()
    return found[0], found[1]


async def test_a_successor_ends_the_open_transaction(broker, kafka: AioKafka, topic_name: Callable[[str], str]) -> None:
    """Init by a second producer aborts what the first has open, frees the readers, and fences its commit."""
    out, txn, group = await made_topic(kafka, topic_name("out")), topic_name("txn"), topic_name("group")
    where = TopicPartition(out, 0)
    first = await open_producer(broker.bootstrap, txn)
    await first.begin_transaction()
    await first.send_and_wait(out, b"never seen", partition=0)
    await first.send_offsets_to_transaction({where: 5}, group)
    assert await ends(broker.bootstrap, where) == (0, 1)

    second = await open_producer(broker.bootstrap, txn)
    assert await ends(broker.bootstrap, where) == (2, 2)
    with pytest.raises(ProducerFenced):
        await first.commit_transaction()

    reader = kafka.reader()
    await reader.start()
    assert [record async for chunk in reader.read_to_end(out, 0) for record in chunk] == []
    await reader.stop()
    assert await committed(kafka, group, out) == {}
    await discard_producer(first, 1)
    await second.stop()


async def test_an_offset_is_committed_by_whoever_has_the_epoch(
    broker, kafka: AioKafka, topic_name: Callable[[str], str], eventually
) -> None:
    """A transaction commits the offset of a group with a living member although its producer is no member of it."""
    source, group = await made_topic(kafka, topic_name("in")), topic_name("group")
    async with Member(kafka, source, group) as member:
        await eventually(lambda: member.hears.owned, "the assignment")
        producer = await open_producer(broker.bootstrap, topic_name("txn"))
        await producer.begin_transaction()
        await producer.send_offsets_to_transaction({TopicPartition(source, 0): 3}, group)
        await producer.commit_transaction()
        await producer.stop()
        assert await committed(kafka, group, source) == {0: 3}
        assert await member.consumer.confirms_assignment(0, 5)


async def test_a_dead_owners_transaction_times_out(
    broker, kafka: AioKafka, topic_name: Callable[[str], str], eventually
) -> None:
    """Without a successor the broker aborts the transaction after its timeout, and its producer is fenced."""
    out = await made_topic(kafka, topic_name("out"))
    where = TopicPartition(out, 0)
    producer = await open_producer(broker.bootstrap, topic_name("txn"), transaction_timeout_ms=1000)
    await producer.begin_transaction()
    await producer.send_and_wait(out, b"left open", partition=0)

    async def free() -> bool:
        return await ends(broker.bootstrap, where) == (2, 2)

    await eventually(free, "the end of the transaction")
    with pytest.raises(KafkaError):
        await producer.commit_transaction()
    await discard_producer(producer, 1)


async def test_idle_producers_and_expired_ids(tmp_path, topic_name: Callable[[str], str], eventually) -> None:
    """A producer idle beyond the broker's memory of its sequence goes on; one idle beyond its id must start anew."""
    broker = RealBroker(
        tmp_path,
        settings={
            "producer.id.expiration.ms": "1000",
            "producer.id.expiration.check.interval.ms": "200",
            "transactional.id.expiration.ms": "5000",
            "transaction.remove.expired.transaction.cleanup.interval.ms": "500",
        },
    )
    broker.start()
    try:
        kafka = AioKafka(patient_settings(broker.bootstrap))
        out = await made_topic(kafka, topic_name("out"))
        producer = await open_producer(broker.bootstrap, "idle")

        async def transaction() -> None:
            await producer.begin_transaction()
            await producer.send_and_wait(out, b"v", partition=0)
            await producer.commit_transaction()

        await transaction()
        await asyncio.sleep(2.5)  # the broker's clock, twice its expiration; nothing can be observed from outside
        await transaction()

        async def expired() -> bool:
            await asyncio.sleep(6)  # longer than the id lives, else each try would keep it alive
            try:
                await transaction()
            except KafkaError:
                return True
            return False

        await eventually(expired, "the expiry of the transactional id", limit_s=30)
        await discard_producer(producer, 1)
        producer = await open_producer(broker.bootstrap, "idle")
        await transaction()
        await producer.stop()
    finally:
        broker.kill()


# --------------------------------------------------------------------------------- the client's traps


async def test_raw_commit_succeeds_over_a_refused_record(
    broker, kafka: AioKafka, topic_name: Callable[[str], str]
) -> None:
    """The commit does not look at its records; and the same producer then refuses everything for that partition."""
    out = await made_topic(kafka, topic_name("out"), max_message_bytes="2000")
    producer = await open_producer(broker.bootstrap, topic_name("txn"))
    await producer.begin_transaction()
    await producer.send_and_wait(out, b"kept", partition=0)
    refused = await producer.send(out, secrets.token_bytes(5000), partition=0)
    await producer.commit_transaction()
    assert isinstance(refused.exception(), MessageSizeTooLargeError)

    await producer.begin_transaction()
    with pytest.raises(OutOfOrderSequenceNumber):
        await producer.send_and_wait(out, b"small", partition=0)
    await discard_producer(producer, 1)


async def test_raw_unanswered_commit_leaves_the_client_stuck(
    own_broker: RealBroker, topic_name: Callable[[str], str]
) -> None:
    """After a commit that got no answer in time the client can neither abort nor begin."""
    out = await made_topic(AioKafka(patient_settings(own_broker.bootstrap)), topic_name("out"))
    producer = await open_producer(own_broker.bootstrap, topic_name("txn"))
    await producer.begin_transaction()
    await producer.send_and_wait(out, b"v", partition=0)
    own_broker.freeze()
    try:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(producer.commit_transaction(), 0.3)
        for call in (producer.abort_transaction, producer.begin_transaction):
            with pytest.raises(AssertionError):
                await call()
    finally:
        own_broker.thaw()
    await discard_producer(producer, 2)


async def test_raw_send_has_no_end_without_a_broker(own_broker: RealBroker, topic_name: Callable[[str], str]) -> None:
    """With the broker gone neither the record's future nor stop() ends by the request timeout."""
    out = await made_topic(AioKafka(patient_settings(own_broker.bootstrap)), topic_name("out"))
    producer = await open_producer(own_broker.bootstrap, topic_name("txn"), request_timeout_ms=500)
    await producer.begin_transaction()
    await producer.send_and_wait(out, b"v", partition=0)
    own_broker.kill()
    sent = await producer.send(out, b"v", partition=0)
    done, _ = await asyncio.wait([sent], timeout=1.5)
    assert not done
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(producer.stop(), 1)
    await discard_producer(producer, 1)


async def test_raw_offset_refusal_kills_the_sender(
    broker, kafka: AioKafka, topic_name: Callable[[str], str], eventually
) -> None:
    """One refused transactional offset commit ends the client's sender task; every later use fails."""
    out = await made_topic(kafka, topic_name("out"))
    producer = await open_producer(broker.bootstrap, topic_name("txn"))
    await producer.begin_transaction()
    too_long = OffsetAndMetadata(1, "x" * 10_000)
    with pytest.raises(KafkaError):
        await producer.send_offsets_to_transaction({TopicPartition(out, 0): too_long}, topic_name("group"))
    await eventually(producer._sender.sender_task.done, "the sender's death")
    with pytest.raises((KafkaError, IllegalOperation)):
        await producer.send(out, b"v", partition=0)
    await discard_producer(producer, 1)


class SlowListener(ConsumerRebalanceListener):
    """Takes its time in the assignment callback."""

    def __init__(self) -> None:
        self.began, self.go_on = asyncio.Event(), asyncio.Event()
        self.revocations: list[set] = []

    async def on_partitions_revoked(self, revoked) -> None:
        self.revocations.append(set(revoked))

    async def on_partitions_assigned(self, assigned) -> None:
        self.began.set()
        await self.go_on.wait()


async def raw_member(bootstrap: str, topic: str, group: str, listener: object = None) -> AIOKafkaConsumer:
    """A group member with the client's own habits."""
    client = AIOKafkaConsumer(
        bootstrap_servers=bootstrap,
        group_id=group,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        heartbeat_interval_ms=200,
        session_timeout_ms=6000,
        metadata_max_age_ms=2000,
    )
    await client.start()
    client.subscribe([topic], listener=listener)
    return client


async def test_raw_records_come_and_no_heartbeat_goes_during_the_callback(
    broker, kafka: AioKafka, topic_name: Callable[[str], str]
) -> None:
    """The assignment callback is no barrier: records are delivered before it ends, and no heartbeat is sent."""
    source = await made_topic(kafka, topic_name("in"))
    await produced(kafka, source, [b"v"])
    listener = SlowListener()
    client = await raw_member(broker.bootstrap, source, topic_name("group"), listener)
    got: dict = {}
    while not got:
        got = await client.getmany(timeout_ms=1000)
    assert listener.began.is_set()
    assert not listener.go_on.is_set()
    assert client._coordinator._heartbeat_task is None
    assert listener.revocations == [set()], "the first join revokes nothing, and says so"
    listener.go_on.set()
    await client.stop()
    assert listener.revocations == [set()], "stop() calls no callback"


async def test_raw_fetch_outlasts_its_timeout_in_a_rebalance(
    broker, kafka: AioKafka, topic_name: Callable[[str], str], eventually
) -> None:
    """While the group waits for a slow member getmany ignores its timeout."""
    source, group = await made_topic(kafka, topic_name("in"), 2), topic_name("group")
    slow = SlowListener()
    holder = await raw_member(broker.bootstrap, source, group, slow)
    await slow.began.wait()  # it sits in the callback: no heartbeat, no rejoin
    client = await raw_member(broker.bootstrap, source, group)
    began = time.monotonic()
    call = asyncio.create_task(client.getmany(timeout_ms=100))
    done, _ = await asyncio.wait([call], timeout=1.5)
    assert not done
    assert time.monotonic() - began > 1
    slow.go_on.set()
    await eventually(call.done, "the end of the rebalance")
    await stop_consumer(client, 2)
    await stop_consumer(holder, 2)


async def test_raw_cancelled_fetch_switches_supervision_off(
    broker, kafka: AioKafka, topic_name: Callable[[str], str]
) -> None:
    """A cancelled getmany counts as one in progress for ever, so the client never again thinks itself idle."""
    source = await made_topic(kafka, topic_name("in"))
    client = await raw_member(broker.bootstrap, source, topic_name("group"))
    await client.getmany(timeout_ms=500)
    call = asyncio.create_task(client.getmany(timeout_ms=10_000))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait([call])
    assert client._subscription._fetch_count == 1
    assert client._subscription.fetcher_idle_time == 0
    await client.stop()


async def test_raw_kept_partitions_start_over_at_the_committed_offset(
    broker, kafka: AioKafka, topic_name: Callable[[str], str]
) -> None:
    """A rebalance sends a partition that stays back to the committed offset, here the beginning, and unpauses it."""
    source, group = await made_topic(kafka, topic_name("in"), 2), topic_name("group")
    for partition in range(2):
        await produced(kafka, source, [b"v"], partition)
    client = await raw_member(broker.bootstrap, source, group)
    got: list = []
    while len(got) < 2:
        got += [record for records in (await client.getmany(timeout_ms=1000)).values() for record in records]
    client.pause(*client.assignment())
    async with Member(kafka_roundrobin(kafka), source, group):
        again: list = []
        while not again:
            again += [r for records in (await client.getmany(timeout_ms=1000)).values() for r in records]
        assert again[0].offset == 0
    await client.stop()


def kafka_roundrobin(kafka: AioKafka) -> AioKafka:
    """The port whose members speak the raw member's assignment protocol, so that they can share a group."""

    class Sharing(RoundRobinPartitionAssignor):
        @staticmethod
        def on_generation_assignment(generation: int) -> None: ...

    class Port(AioKafka):
        def consumer(self, topic: str, group: str):
            made = super().consumer(topic, group)
            made._assignor = Sharing
            return made

    return Port(kafka._settings)
