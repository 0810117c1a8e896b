"""The read position, committed to a group of its own that has no members: for lag tools and autoscalers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from aiokafka import AIOKafkaConsumer, TopicPartition

from batchferry.domain.errors import KafkaUnavailable
from batchferry.kafka.dispose import stop_consumer
from batchferry.kafka.faults import EXPECTED, name_of
from batchferry.kafka.reader import started_consumer
from batchferry.kafka.settings import KafkaClientSettings

log = logging.getLogger(__name__)


class MemberlessCommitter:
    """Commits to ``<group>.read`` (``ports.ReadPositionCommitter``); connects at the first commit."""

    def __init__(self, settings: KafkaClientSettings, topic: str, group: str) -> None:
        self._settings = settings
        self._topic = topic
        self._group = f"{group}.read"
        self._client: AIOKafkaConsumer | None = None
        self._turn = asyncio.Lock()
        self.failures = 0
        """Commits that failed, in all."""
        self.last_failure = ""
        """Why the last commit failed; empty after one that succeeded."""

    async def commit(self, positions: Mapping[int, int]) -> None:
        """Commit these; a failure is counted in ``failures`` and never raised. At most ``request_timeout_s``."""
        if not positions:
            return
        try:
            async with self._turn, asyncio.timeout(self._settings.request_timeout_s):
                await self._commit({TopicPartition(self._topic, where): at for where, at in positions.items()})
        except (*EXPECTED, KafkaUnavailable) as error:
            self.failures += 1
            self.last_failure = name_of(error)
            log.debug("read position not committed: %s", self.last_failure)
            client, self._client = self._client, None
            if client is not None:
                await stop_consumer(client, self._settings.close_deadline_s)
        else:
            self.last_failure = ""

    async def stop(self) -> None:
        """Disconnect; bounded, safe to call twice."""
        client, self._client = self._client, None
        if client is not None:
            await stop_consumer(client, self._settings.close_deadline_s)

    async def _commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        if self._client is None:
            self._client = await started_consumer(self._settings, "read-position", group_id=self._group)
        client = self._client
        wanted = client.assignment() | offsets.keys()
        if wanted != client.assignment():
            # The client commits only what it is assigned; paused with a position it fetches nothing.
            client.assign(sorted(wanted))
            client.pause(*wanted)
            for where in wanted:
                client.seek(where, 0)
        await client.commit(dict(offsets))
