"""The producers: a transactional one for each input partition, a plain one, and the committer of read positions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from batchferry.domain.errors import CommitUnknown, KafkaUnavailable, PartitionLost
from batchferry.ports import OutRecord
from batchferry.simulator.kafka.log import PartitionLog, size_bytes
from batchferry.simulator.kafka.records import Refused, StoredRecord
from batchferry.simulator.kafka.settings import SimKafkaSettings
from batchferry.simulator.kafka.wire import EXPECTED, Wire, reason

_NEW: Final = "init has not run"
SPLIT_CHANCE: Final = 0.3
"""How often the records of a transaction travel in two requests, so that one may arrive without the other."""

Lanes = Mapping[PartitionLog, Sequence[StoredRecord]]


class SimPartitionProducer:
    """A fuse, as the real one: any failure burns it (``ports.PartitionProducer``)."""

    def __init__(
        self, wire: Wire, settings: SimKafkaSettings, topic: str, partition: int, group: str, transactional_id: str
    ) -> None:
        self._wire = wire
        self._settings = settings
        self._topic = topic
        self._partition = partition
        self._group = group
        self._id = transactional_id
        self._dead = _NEW
        self._started = False
        self._epoch = -1
        self._number = 0
        self._turn = asyncio.Lock()
        self._last_transaction_at = 0.0

    @property
    def last_transaction_at(self) -> float:
        """The loop's time, in seconds, of the last finished transaction, or of ``init``."""
        return self._last_transaction_at

    async def init(self) -> None:
        """Fence the predecessor and end its transaction.

        Raises:
            PartitionLost: called a second time, or closed.
            KafkaUnavailable: no answer within ``init_deadline_s``.
        """
        if self._dead != _NEW or self._started:
            raise PartitionLost(self._partition, f"this producer cannot start again: {self._dead or 'it runs'}")
        self._started = True
        coordinator, name = self._wire.cluster.transactions, self._wire.process.name
        try:
            self._epoch = await self._wire.call(
                "init",
                lambda: coordinator.init(self._id, name, self._settings.transaction_timeout_s),
                self._settings.init_deadline_s,
                outlives=True,
            )
        except BaseException as error:
            self._give_up(f"init failed: {reason(error)}")
            if isinstance(error, EXPECTED):
                raise KafkaUnavailable(
                    f"starting the transactional producer {self._id}: {reason(error)}; is the cluster up?"
                ) from error
            raise
        if self._dead != _NEW:  # closed meanwhile
            raise PartitionLost(self._partition, self._dead)
        self._dead = ""
        self._last_transaction_at = asyncio.get_running_loop().time()

    async def transact(self, records: Sequence[OutRecord], committed_offset: int | None = None) -> None:
        """All records and the committed offset in one transaction, or nothing; calls take turns.

        Raises:
            PartitionLost: fenced, refused, or not written in time: nothing of it will ever be visible.
            CommitUnknown: the commit was sent and anything but a clear yes came back.
        """
        async with self._turn:
            if self._dead:
                raise PartitionLost(self._partition, f"its producer is dead: {self._dead}")
            if not records and committed_offset is None:
                return
            self._number += 1
            await self._write(records, committed_offset)
            await self._commit()
            self._last_transaction_at = asyncio.get_running_loop().time()

    async def close(self) -> None:
        """Give up the connection; never raises, safe to call twice. A running transaction is lost."""
        self._give_up("closed")

    async def _write(self, records: Sequence[OutRecord], offset: int | None) -> None:
        begun = False
        try:
            async with asyncio.timeout(self._settings.transaction_deadline_s):
                lanes = await self._packed(records)
                begun = True
                async with asyncio.TaskGroup() as parts:
                    if offset is not None:
                        parts.create_task(self._send_offset(offset))
                    for lane in self._requests(lanes):
                        await self._produce(lane)
        except BaseException as error:
            if not isinstance(error, asyncio.CancelledError):
                await self._wire.process.ready()  # a dead process does not even learn of its deadline
            cause = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
            is_fenced = isinstance(cause, Refused) and cause.is_fenced
            why = "fenced by a newer owner" if is_fenced else f"transaction failed: {reason(cause)}"
            if isinstance(cause, TimeoutError):
                why = "transaction failed: no answer in time"
            if isinstance(cause, PartitionLost):
                why = cause.reason
            if begun and not self._dead and not is_fenced and self._wire.process.alive:
                await self._abort()
            self._give_up(why)
            if isinstance(cause, (*EXPECTED, TimeoutError)):
                raise PartitionLost(self._partition, why) from cause
            if cause is error:
                raise
            raise cause from None

    async def _packed(self, records: Sequence[OutRecord]) -> dict[PartitionLog, list[StoredRecord]]:
        """The records by log. An unknown topic may yet come to be: the client waits for it until its deadline."""
        for record in records:
            size = size_bytes(record.key, record.value, record.headers)
            if size > self._settings.max_record_bytes:
                raise PartitionLost(
                    self._partition,
                    f"a record of {size} bytes is above max_record_bytes ({self._settings.max_record_bytes})",
                )
        cluster = self._wire.cluster
        while True:
            try:
                return cluster.sorted_out(records)
            except Refused:
                await asyncio.sleep(0.5)

    def _requests(self, lanes: dict[PartitionLog, list[StoredRecord]]) -> list[Lanes]:
        rng = self._wire.cluster.rng
        if len(lanes) < 2 or rng.random() >= SPLIT_CHANCE:
            return [lanes] if lanes else []
        cut, items = rng.randrange(1, len(lanes)), list(lanes.items())
        return [dict(items[:cut]), dict(items[cut:])]

    async def _produce(self, lanes: Lanes) -> None:
        cluster, epoch, number = self._wire.cluster, self._epoch, self._number

        def effect() -> None:
            cluster.check(lanes)
            cluster.transactions.append(self._id, epoch, number, lanes)

        await self._wire.call(
            "produce", effect, self._settings.transaction_deadline_s, outlives=True, transactional_id=self._id
        )

    async def _send_offset(self, offset: int) -> None:
        coordinator, epoch, number = self._wire.cluster.transactions, self._epoch, self._number
        await self._wire.call(
            "offsets",
            lambda: coordinator.add_offset(self._id, epoch, number, self._group, self._topic, self._partition, offset),
            self._settings.transaction_deadline_s,
            outlives=True,
        )

    async def _commit(self) -> None:
        coordinator, epoch, number = self._wire.cluster.transactions, self._epoch, self._number
        try:
            await self._wire.call(
                "commit",
                lambda: coordinator.end(self._id, epoch, number, commit=True),
                self._settings.commit_deadline_s,
                outlives=True,
                transactional_id=self._id,
            )
        except BaseException as error:
            is_fenced = isinstance(error, Refused) and error.is_fenced
            why = f"commit not confirmed: {'fenced' if is_fenced else reason(error)}"
            self._give_up(why)
            if isinstance(error, Exception):
                raise CommitUnknown(self._partition, why) from error
            raise

    async def _abort(self) -> None:
        coordinator, epoch, number = self._wire.cluster.transactions, self._epoch, self._number
        try:
            await self._wire.call(
                "abort",
                lambda: coordinator.end(self._id, epoch, number, commit=False),
                self._settings.abort_deadline_s,
                outlives=True,
            )
        except (*EXPECTED, asyncio.CancelledError):
            return  # the broker's timeout ends it anyway

    def _give_up(self, why: str) -> None:
        self._dead = why if self._dead in {"", _NEW} else self._dead
        self._wire.close()


class SimPlainProducer:
    """Records outside the partitions' transactions (``ports.PlainProducer``)."""

    def __init__(self, wire: Wire, settings: SimKafkaSettings) -> None:
        self._wire = wire
        self._settings = settings
        self._turn = asyncio.Lock()
        self._stopped = False

    async def start(self) -> None:
        """Connect.

        Raises:
            KafkaUnavailable: no broker answered in time, or stopped.
        """
        if self._stopped:
            raise KafkaUnavailable("this producer is stopped")
        await connect(self._wire, self._settings, "connecting a producer")

    async def send(self, records: Sequence[OutRecord]) -> None:
        """Return when all are acknowledged; calls take turns.

        Raises:
            KafkaUnavailable: refused or not acknowledged in time; some may have been written.
        """
        if not records:
            return
        async with self._turn:
            if self._stopped:
                raise KafkaUnavailable("this producer is stopped")
            for record in records:
                size = size_bytes(record.key, record.value, record.headers)
                if size > self._settings.max_record_bytes:
                    raise KafkaUnavailable(
                        f"a record of {size} bytes is above max_record_bytes ({self._settings.max_record_bytes}),"
                        " nothing was sent"
                    )
            try:
                await self._wire.call(
                    "plain", lambda: self._write(records), self._settings.transaction_deadline_s, outlives=True
                )
            except EXPECTED as error:
                raise KafkaUnavailable(f"producing {records[0].topic}: {reason(error)}") from error

    async def stop(self) -> None:
        """Give up the connection; never raises, safe to call twice."""
        self._stopped = True
        self._wire.close()

    def _write(self, records: Sequence[OutRecord]) -> None:
        """Each partition's records are taken or refused on their own."""
        cluster = self._wire.cluster
        refusal: Refused | None = None
        for log, entries in cluster.sorted_out(records).items():
            try:
                cluster.check({log: entries})
            except Refused as error:
                refusal = refusal or error
            else:
                cluster.append_plain(log, entries)
        if refusal is not None:
            raise refusal


class SimReadPosition:
    """Commits to ``<group>.read`` (``ports.ReadPositionCommitter``)."""

    def __init__(self, wire: Wire, settings: SimKafkaSettings, topic: str, group: str) -> None:
        self._wire = wire
        self._settings = settings
        self._topic = topic
        self._group = f"{group}.read"
        self.failures = 0
        """Commits that failed, in all."""
        self.last_failure = ""
        """Why the last commit failed; empty after one that succeeded."""

    async def commit(self, positions: Mapping[int, int]) -> None:
        """Commit these; a failure is counted and never raised. At most ``request_timeout_s``."""
        if not positions:
            return
        groups, told = self._wire.cluster.groups, dict(positions)
        try:
            await self._wire.call(
                "read-position",
                lambda: groups.commit(self._group, self._topic, told),
                self._settings.request_timeout_s,
                outlives=True,
            )
        except EXPECTED as error:
            self.failures += 1
            self.last_failure = reason(error)
        else:
            self.last_failure = ""

    async def stop(self) -> None:
        """Give up the connection; safe to call twice."""
        self._wire.close()


async def connect(wire: Wire, settings: SimKafkaSettings, doing: str) -> None:
    """One round trip, as a client makes when it starts.

    Raises:
        KafkaUnavailable: no answer within ``connect_deadline_s``.
    """
    try:
        await wire.call("metadata", lambda: None, settings.connect_deadline_s)
    except EXPECTED as error:
        raise KafkaUnavailable(f"{doing} to the cluster: {reason(error)}; is it up?") from error
