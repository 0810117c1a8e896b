"""The one place that hands out Kafka clients."""

from __future__ import annotations

from batchferry.kafka.admin import ClusterAdmin
from batchferry.kafka.consumer import GroupConsumer
from batchferry.kafka.dispose import background_done
from batchferry.kafka.positions import MemberlessCommitter
from batchferry.kafka.producer import IdempotentProducer, TransactionalProducer
from batchferry.kafka.reader import PartitionReader, TopicTail
from batchferry.kafka.settings import KafkaClientSettings


class AioKafka:
    """``ports.KafkaPort`` over aiokafka. Makes objects only: each connects by its own ``start`` or ``init``."""

    def __init__(self, settings: KafkaClientSettings) -> None:
        self._settings = settings

    def consumer(self, topic: str, group: str) -> GroupConsumer:
        """A member of the group; its first assignment comes through the listener."""
        return GroupConsumer(self._settings, topic, group)

    def partition_producer(
        self, topic: str, partition: int, group: str, transactional_id: str
    ) -> TransactionalProducer:
        """The producer whose transactions commit ``group``'s offset of ``topic``'s ``partition``."""
        return TransactionalProducer(self._settings, topic, partition, group, transactional_id)

    def reader(self) -> PartitionReader:
        """A reader without a group."""
        return PartitionReader(self._settings)

    def tail(self) -> TopicTail:
        """A follower of whole topics."""
        return TopicTail(self._settings)

    def read_position(self, topic: str, group: str) -> MemberlessCommitter:
        """The committer of ``<group>.read``."""
        return MemberlessCommitter(self._settings, topic, group)

    def plain_producer(self) -> IdempotentProducer:
        """A producer outside transactions."""
        return IdempotentProducer(self._settings)

    async def admin(self) -> ClusterAdmin:
        """A connected admin client; close it after use.

        Raises:
            KafkaUnavailable: no broker answered in time.
        """
        made = ClusterAdmin(self._settings)
        await made.start()
        return made

    async def aclose(self) -> None:
        """Wait, at most two close deadlines, for clients that were given up and are still being cleaned away."""
        await background_done(2 * self._settings.close_deadline_s)
