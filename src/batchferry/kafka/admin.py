"""What start-up checks, the demo and the command line ask the cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import InvalidPartitionsError, KafkaError, for_code
from aiokafka.protocol.metadata import MetadataRequest

from batchferry.domain.errors import KafkaUnavailable
from batchferry.kafka.faults import EXPECTED, name_of, unavailable
from batchferry.kafka.settings import KafkaClientSettings, connection_arguments
from batchferry.ports import TopicDescription

_T = TypeVar("_T")

UNKNOWN_TOPIC: Final = 3
LEADER_NOT_AVAILABLE: Final = 5
TOPIC_EXISTS: Final = 36
MOST_REPLICAS: Final = 3
RETRY_S: Final = 0.1


class ClusterAdmin:
    """One admin connection (``ports.KafkaAdmin``)."""

    def __init__(self, settings: KafkaClientSettings) -> None:
        self._settings = settings
        self._client: AIOKafkaAdminClient | None = None

    async def start(self) -> None:
        """Connect.

        Raises:
            KafkaUnavailable: no broker answered in time.
        """
        client = AIOKafkaAdminClient(**connection_arguments(self._settings, "admin"))
        try:
            async with asyncio.timeout(self._settings.connect_deadline_s):
                await client.start()
        except BaseException as error:
            with suppress(Exception):
                await client.close()
            if isinstance(error, EXPECTED):
                raise unavailable("connecting to", error, target=self._settings.bootstrap_servers) from error
            raise
        self._client = client

    async def describe(self, topics: Sequence[str]) -> Mapping[str, TopicDescription | None]:
        """Each topic's partitions and configuration (defaults included), None where it does not exist.

        Raises:
            KafkaUnavailable: no broker answered in time, or it refuses to tell.
        """
        if not topics:
            return {}
        return await self._bounded("describing topics", self._describe(list(topics)))

    async def create(self, topic: str, partitions: int, configs: Mapping[str, str]) -> None:
        """Make the topic if it is not there; an existing one is left alone.

        It gets as many replicas as the cluster has brokers, at most three. Returns when every partition has a leader.

        Raises:
            KafkaUnavailable: no broker answered in time, or it refuses; the text has its reason.
        """
        await self._bounded(f"creating topic {topic}", self._create(topic, partitions, configs))

    async def grow(self, topic: str, partitions: int) -> None:
        """Raise an existing topic to so many partitions; one that has as many or more is left alone.

        Returns when every partition has a leader. Several callers may ask at one time.

        Raises:
            KafkaUnavailable: no broker answered in time, the topic does not exist, or the cluster refuses.
        """
        await self._bounded(f"adding partitions to topic {topic}", self._grow(topic, partitions))

    async def committed(self, group: str, topic: str) -> Mapping[int, int]:
        """Committed offsets of the group by partition; partitions without one are absent.

        Raises:
            KafkaUnavailable: no broker answered in time, or it refuses to tell.
        """
        found = await self._bounded(
            f"reading offsets of group {group}",
            self._while_retriable(lambda: self._the_client().list_consumer_group_offsets(group)),
        )
        return {where.partition: at.offset for where, at in found.items() if where.topic == topic and at.offset >= 0}

    async def close(self) -> None:
        """Disconnect; bounded, safe to call twice."""
        client, self._client = self._client, None
        if client is not None:
            with suppress(Exception):
                async with asyncio.timeout(self._settings.close_deadline_s):
                    await client.close()

    async def _describe(self, topics: list[str]) -> dict[str, TopicDescription | None]:
        partitions: dict[str, int | None] = {}
        for entry in await self._metadata(topics):
            code = entry["error_code"]
            if code == UNKNOWN_TOPIC:
                partitions[entry["topic"]] = None
            elif code not in {0, LEADER_NOT_AVAILABLE}:
                raise for_code(code)
            else:
                partitions[entry["topic"]] = len(entry["partitions"])
        there = [name for name, count in partitions.items() if count is not None]
        configs: dict[str, dict[str, str]] = {name: {} for name in there}
        if there:
            resources = [ConfigResource(ConfigResourceType.TOPIC, name) for name in there]
            for answer in await self._the_client().describe_configs(resources):
                for code, _message, _kind, name, entries in answer.resources:
                    if code:
                        raise for_code(code)
                    configs[name] = {entry[0]: entry[1] for entry in entries if entry[1] is not None}
        return {
            name: None if count is None else TopicDescription(name, count, configs[name])
            for name, count in partitions.items()
        }

    async def _create(self, topic: str, partitions: int, configs: Mapping[str, str]) -> None:
        brokers = len((await self._the_client().describe_cluster())["brokers"])
        wanted = NewTopic(topic, partitions, max(1, min(MOST_REPLICAS, brokers)), topic_configs=dict(configs))
        while True:
            answer = await self._while_retriable(lambda: self._the_client().create_topics([wanted]))
            _, code, *text = answer.topic_errors[0]
            if code in {0, TOPIC_EXISTS}:
                break
            refusal = for_code(code)
            if not refusal.retriable and not refusal.invalid_metadata:
                reason = f": {text[0]}" if text and text[0] else ""
                raise KafkaUnavailable(f"creating topic {topic}: {name_of(refusal())}{reason}")
            await asyncio.sleep(RETRY_S)
        while not await self._has_leaders(topic):  # noqa: ASYNC110 (another process sets it)
            await asyncio.sleep(RETRY_S)

    async def _grow(self, topic: str, partitions: int) -> None:
        while True:
            (entry,) = await self._metadata([topic])
            if entry["error_code"] == UNKNOWN_TOPIC:
                raise KafkaUnavailable(f"adding partitions to topic {topic}: it does not exist")
            if entry["error_code"] == 0 and len(entry["partitions"]) >= partitions:
                break
            try:
                await self._the_client().create_partitions({topic: NewPartitions(partitions)})
            except InvalidPartitionsError:
                pass  # somebody else was faster, and the metadata does not show it yet
            except KafkaError as error:
                if not error.retriable and not error.invalid_metadata:
                    raise KafkaUnavailable(f"adding partitions to topic {topic}: {name_of(error)}") from error
            await asyncio.sleep(RETRY_S)
        while not await self._has_leaders(topic):  # noqa: ASYNC110 (another process sets it)
            await asyncio.sleep(RETRY_S)

    async def _has_leaders(self, topic: str) -> bool:
        (entry,) = await self._metadata([topic])
        return entry["error_code"] == 0 and all(
            part["error_code"] == 0 and part["leader"] >= 0 for part in entry["partitions"]
        )

    async def _metadata(self, topics: list[str]) -> Sequence[Any]:
        """The client's own way of asking would create missing topics on a cluster that allows it."""
        answer = await self._the_client()._send_request(  # noqa: SLF001 (see above)
            MetadataRequest(topics, allow_auto_topic_creation=False)
        )
        found: Sequence[Any] = answer.to_object()["topics"]
        return found

    async def _while_retriable(self, call: Any) -> Any:
        """Ask again while the broker says so (a coordinator that loads, a controller that moves)."""
        while True:
            try:
                return await call()
            except EXPECTED as error:
                if not getattr(error, "retriable", False):
                    raise
            await asyncio.sleep(RETRY_S)

    async def _bounded(self, doing: str, work: Awaitable[_T]) -> _T:
        try:
            async with asyncio.timeout(self._settings.request_timeout_s):
                return await work
        except EXPECTED as error:
            raise unavailable(doing, error) from error

    def _the_client(self) -> AIOKafkaAdminClient:
        if self._client is None:
            raise KafkaUnavailable("this admin connection is closed")
        return self._client
