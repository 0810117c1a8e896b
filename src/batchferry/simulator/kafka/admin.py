"""What start-up checks, the demo and the command line ask the cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

from batchferry.domain.errors import KafkaUnavailable
from batchferry.ports import TopicDescription
from batchferry.simulator.kafka.records import Refused
from batchferry.simulator.kafka.settings import SimKafkaSettings
from batchferry.simulator.kafka.wire import EXPECTED, Wire, reason

T = TypeVar("T")

TOPIC_EXISTS: Final = 36


class SimAdmin:
    """One admin connection (``ports.KafkaAdmin``)."""

    def __init__(self, wire: Wire, settings: SimKafkaSettings) -> None:
        self._wire = wire
        self._settings = settings
        self._closed = False

    async def describe(self, topics: Sequence[str]) -> Mapping[str, TopicDescription | None]:
        """Each topic's partitions and configuration (defaults included), None where it does not exist.

        Raises:
            KafkaUnavailable: no broker answered in time.
        """
        cluster = self._wire.cluster

        def effect() -> dict[str, TopicDescription | None]:
            found = {name: cluster.find_topic(name) for name in topics}
            return {
                name: None if topic is None else TopicDescription(name, len(topic.logs), dict(topic.configs))
                for name, topic in found.items()
            }

        return await self._ask("describing topics", effect)

    async def create(self, topic: str, partitions: int, configs: Mapping[str, str]) -> None:
        """Make the topic if it is not there; an existing one is left alone.

        Raises:
            KafkaUnavailable: no broker answered in time, or it refuses; the text has its reason.
        """
        cluster = self._wire.cluster

        def effect() -> None:
            try:
                cluster.create_topic(topic, partitions, configs)
            except Refused as refusal:
                if refusal.code != TOPIC_EXISTS:
                    raise

        await self._ask(f"creating topic {topic}", effect, outlives=True)

    async def grow(self, topic: str, partitions: int) -> None:
        """Raise an existing topic to so many partitions; one that has as many or more is left alone.

        Raises:
            KafkaUnavailable: no broker answered in time, or the topic does not exist.
        """
        cluster = self._wire.cluster

        def effect() -> None:
            if len(cluster.topic(topic).logs) < partitions:
                cluster.create_partitions(topic, partitions)

        await self._ask(f"adding partitions to topic {topic}", effect, outlives=True)

    async def committed(self, group: str, topic: str) -> Mapping[int, int]:
        """Committed offsets of the group by partition; partitions without one are absent.

        Raises:
            KafkaUnavailable: no broker answered in time.
        """
        groups = self._wire.cluster.groups
        return await self._ask(f"reading offsets of group {group}", lambda: groups.offsets(group, topic))

    async def close(self) -> None:
        """Disconnect; safe to call twice."""
        self._closed = True
        self._wire.close()

    async def _ask(self, doing: str, effect: Callable[[], T], *, outlives: bool = False) -> T:
        if self._closed:
            raise KafkaUnavailable("this admin connection is closed")
        try:
            return await self._wire.call("admin", effect, self._settings.request_timeout_s, outlives=outlives)
        except EXPECTED as error:
            raise KafkaUnavailable(f"{doing}: {reason(error)}") from error
