"""The producers: a transactional one for each input partition, and a plain idempotent one.

A transactional producer here is a fuse. Any failure, of whatever kind, burns it: the transaction is aborted as
well as that can be done in a moment, the client is given up, and every later call says so. The client itself
must not be used on, because it neither resets sequence numbers after a refused record nor leaves the committing
state after an unanswered commit. Whoever needs to go on makes a new one, which fences this one, and reads the
ledger again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Final

from aiokafka import AIOKafkaProducer, TopicPartition

from batchferry.domain.errors import CommitUnknown, KafkaUnavailable, PartitionLost
from batchferry.kafka.dispose import discard_producer, in_background, stop_producer
from batchferry.kafka.faults import EXPECTED, is_fenced, name_of, unavailable
from batchferry.kafka.outgoing import RecordTooLarge, deliver, pack
from batchferry.kafka.settings import KafkaClientSettings, connection_arguments, ms
from batchferry.ports import OutRecord

log = logging.getLogger(__name__)

_NEW: Final = "init has not run"
_LIVE: Final = ""


class TransactionalProducer:
    """The one producer of one input partition (``ports.PartitionProducer``); transactions queue up, one at a time."""

    def __init__(
        self, settings: KafkaClientSettings, topic: str, partition: int, group_id: str, transactional_id: str
    ) -> None:
        self._settings = settings
        self._input = TopicPartition(topic, partition)
        self._group = group_id
        self._transactional_id = transactional_id
        self._partition = partition
        self._client: AIOKafkaProducer | None = None
        self._dead = _NEW
        self._turn = asyncio.Lock()
        self._last_transaction_at = 0.0

    @property
    def last_transaction_at(self) -> float:
        """Monotonic real seconds of the last finished transaction, or of ``init``."""
        return self._last_transaction_at

    async def init(self) -> None:
        """Fence the predecessor: when this returns its open transaction is aborted and it can commit nothing more.

        Raises:
            PartitionLost: fenced by another one while starting, or called a second time.
            KafkaUnavailable: no answer within ``init_deadline_s``, or the cluster refuses us.
        """
        if self._dead != _NEW or self._client is not None:
            raise PartitionLost(self._partition, f"this producer cannot start again: {self._dead or 'it runs'}")
        self._client = client = AIOKafkaProducer(
            **connection_arguments(self._settings, f"txn-{self._partition}"),
            transactional_id=self._transactional_id,
            transaction_timeout_ms=ms(self._settings.transaction_timeout_s),
            **_sending_arguments(self._settings),
        )
        try:
            async with asyncio.timeout(self._settings.init_deadline_s):
                await client.start()
        except BaseException as error:
            self._give_up(f"init failed: {name_of(error)}")
            if is_fenced(error):
                raise PartitionLost(self._partition, "fenced while starting") from error
            if isinstance(error, EXPECTED):
                raise unavailable(
                    "starting the transactional producer", error, target=self._transactional_id
                ) from error
            raise
        if self._dead != _NEW:  # closed meanwhile
            raise PartitionLost(self._partition, self._dead)
        self._dead = _LIVE
        self._last_transaction_at = time.monotonic()

    async def transact(self, records: Sequence[OutRecord], committed_offset: int | None = None) -> None:
        """All records and the input partition's committed offset in one transaction, or nothing.

        Nothing at all to write is no transaction and returns at once. The calls of several tasks take turns.

        Raises:
            PartitionLost: fenced, refused, or not written in time. Nothing of this transaction is, or will become,
                visible to a ``read_committed`` reader.
            CommitUnknown: the commit was sent and anything but a clear yes came back. That includes "fenced": a
                repeated commit request meets a successor's epoch although the first one had succeeded.
        """
        async with self._turn:
            if self._dead or self._client is None:
                raise PartitionLost(self._partition, f"its producer is dead: {self._dead}")
            if not records and committed_offset is None:
                return
            client = self._client
            await self._write(client, records, committed_offset)
            await self._commit(client)
            self._last_transaction_at = time.monotonic()

    async def close(self) -> None:
        """Give up the connection; bounded, never raises, safe to call twice. A running transaction is lost."""
        client, self._client = self._client, None
        was, self._dead = self._dead, self._dead or "closed"
        if self._dead == _NEW:
            self._dead = "closed"
        if client is None:
            return
        if was == _LIVE and not self._turn.locked():
            await stop_producer(client, self._settings.close_deadline_s)
        else:
            await discard_producer(client, self._settings.close_deadline_s)

    async def _write(self, client: AIOKafkaProducer, records: Sequence[OutRecord], offset: int | None) -> None:
        begun = False
        try:
            async with asyncio.timeout(self._settings.transaction_deadline_s):
                packed = await pack(client, records, self._settings.max_record_bytes)
                await client.begin_transaction()
                begun = True
                # The offset travels beside the records: both only count with the commit, and it saves two round trips.
                async with asyncio.TaskGroup() as parts:
                    if offset is not None:
                        parts.create_task(client.send_offsets_to_transaction({self._input: offset}, self._group))
                    await deliver(client, packed)
        except BaseException as error:
            cause = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
            fenced = is_fenced(cause)
            if fenced:
                reason = "fenced by a newer owner"
            elif isinstance(cause, RecordTooLarge):
                reason = str(cause)
            else:
                reason = f"transaction failed: {name_of(cause)}"
            if begun and self._client is client and not fenced:
                await self._abort(client)
            self._give_up(reason)
            if isinstance(cause, (*EXPECTED, RecordTooLarge)):
                raise PartitionLost(self._partition, reason) from cause
            if cause is error:
                raise
            raise cause from None

    async def _commit(self, client: AIOKafkaProducer) -> None:
        try:
            async with asyncio.timeout(self._settings.commit_deadline_s):
                await client.commit_transaction()
        except BaseException as error:
            reason = f"commit not confirmed: {'fenced' if is_fenced(error) else name_of(error)}"
            self._give_up(reason)
            if isinstance(error, Exception):
                raise CommitUnknown(self._partition, reason) from error
            raise

    async def _abort(self, client: AIOKafkaProducer) -> None:
        """Let readers pass at once instead of after the transaction timeout; a try, no more."""
        try:
            async with asyncio.timeout(self._settings.abort_deadline_s):
                await client.abort_transaction()
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 (the broker's timeout ends it anyway)
            log.debug("partition %d: abort was not confirmed: %s", self._partition, name_of(error))

    def _give_up(self, reason: str) -> None:
        self._dead = reason
        client, self._client = self._client, None
        if client is not None:
            in_background(
                discard_producer(client, self._settings.close_deadline_s), name=f"discard-txn-{self._partition}"
            )


class IdempotentProducer:
    """Records outside the partitions' transactions (``ports.PlainProducer``).

    After a failure the client is thrown away and the next ``send`` makes a new one: an idempotent client that
    lost a record refuses all that follow.
    """

    def __init__(self, settings: KafkaClientSettings) -> None:
        self._settings = settings
        self._client: AIOKafkaProducer | None = None
        self._turn = asyncio.Lock()
        self._stopped = False

    async def start(self) -> None:
        """Connect.

        Raises:
            KafkaUnavailable: no broker answered in time.
        """
        async with self._turn:
            await self._connected()

    async def send(self, records: Sequence[OutRecord]) -> None:
        """Return when all are acknowledged; the calls of several tasks take turns.

        Raises:
            KafkaUnavailable: refused or not acknowledged in time; some may have been written.
        """
        if not records:
            return
        async with self._turn:
            client = await self._connected()
            try:
                async with asyncio.timeout(self._settings.transaction_deadline_s):
                    packed = await pack(client, records, self._settings.max_record_bytes)
                    await deliver(client, packed)
            except RecordTooLarge as error:  # nothing was sent, so the client is as good as before
                raise KafkaUnavailable(f"{error}, nothing was sent") from error
            except BaseException as error:
                self._client = None
                in_background(discard_producer(client, self._settings.close_deadline_s), name="discard-producer")
                if isinstance(error, EXPECTED):
                    raise unavailable("producing", error, target=records[0].topic) from error
                raise

    async def stop(self) -> None:
        """Give up the connection; bounded, never raises, safe to call twice."""
        self._stopped = True
        client, self._client = self._client, None
        if client is not None:
            await stop_producer(client, self._settings.close_deadline_s)

    async def _connected(self) -> AIOKafkaProducer:
        if self._stopped:
            raise KafkaUnavailable("this producer is stopped")
        if self._client is not None:
            return self._client
        client = AIOKafkaProducer(
            **connection_arguments(self._settings, "plain"),
            enable_idempotence=True,
            **_sending_arguments(self._settings),
        )
        try:
            async with asyncio.timeout(self._settings.connect_deadline_s):
                await client.start()
        except BaseException as error:
            in_background(discard_producer(client, self._settings.close_deadline_s), name="discard-producer")
            if isinstance(error, EXPECTED):
                raise unavailable("connecting a producer to", error, target=self._settings.bootstrap_servers) from error
            raise
        self._client = client
        return client


def _sending_arguments(settings: KafkaClientSettings) -> dict[str, object]:
    return {
        "acks": "all",
        "compression_type": None if settings.compression == "none" else settings.compression,
        "max_batch_size": settings.max_batch_bytes,
        "max_request_size": settings.max_record_bytes,
    }
