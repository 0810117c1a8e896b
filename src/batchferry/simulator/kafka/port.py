"""The one place that hands out clients of the simulated cluster."""

from __future__ import annotations

from batchferry.simulator.kafka.admin import SimAdmin
from batchferry.simulator.kafka.cluster import SimCluster
from batchferry.simulator.kafka.consumer import SimConsumer
from batchferry.simulator.kafka.process import SimProcess
from batchferry.simulator.kafka.producers import SimPartitionProducer, SimPlainProducer, SimReadPosition, connect
from batchferry.simulator.kafka.readers import SimReader, SimTail
from batchferry.simulator.kafka.settings import SimKafkaSettings
from batchferry.simulator.kafka.wire import Wire


class SimKafka:
    """``ports.KafkaPort`` of one process. Makes objects only: each connects by its own ``start`` or ``init``."""

    def __init__(self, cluster: SimCluster, process: SimProcess, settings: SimKafkaSettings | None = None) -> None:
        self.cluster = cluster
        self.process = process
        self.settings = settings or SimKafkaSettings()

    def consumer(self, topic: str, group: str) -> SimConsumer:
        """A member of the group; its first assignment comes through the listener."""
        return SimConsumer(self._wire(), self.settings, topic, group)

    def partition_producer(self, topic: str, partition: int, group: str, transactional_id: str) -> SimPartitionProducer:
        """The producer whose transactions commit ``group``'s offset of ``topic``'s ``partition``."""
        return SimPartitionProducer(self._wire(), self.settings, topic, partition, group, transactional_id)

    def reader(self) -> SimReader:
        """A reader without a group."""
        return SimReader(self._wire(), self.settings)

    def tail(self) -> SimTail:
        """A follower of whole topics."""
        return SimTail(self._wire(), self.settings)

    def read_position(self, topic: str, group: str) -> SimReadPosition:
        """The committer of ``<group>.read``."""
        return SimReadPosition(self._wire(), self.settings, topic, group)

    def plain_producer(self) -> SimPlainProducer:
        """A producer outside transactions."""
        return SimPlainProducer(self._wire(), self.settings)

    async def admin(self) -> SimAdmin:
        """A connected admin client; close it after use.

        Raises:
            KafkaUnavailable: no broker answered in time.
        """
        wire = self._wire()
        await connect(wire, self.settings, "connecting an admin client")
        return SimAdmin(wire, self.settings)

    async def aclose(self) -> None:
        """End what this process's clients run in the background."""
        for task in list(self.process.tasks):
            task.cancel()

    def _wire(self) -> Wire:
        return Wire(self.cluster, self.process)
