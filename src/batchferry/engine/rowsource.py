"""Where rows come from: the spool if it still has them, else the input topic, read again.

Bodies and the caller's own words (custom_id, key, headers) live in the input topic; everything local is a
cache of it. What the log has deleted is reported, never guessed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import NamedTuple, cast

from batchferry.domain.envelope import Original, quote_original
from batchferry.domain.offsets import OffsetSet
from batchferry.domain.requests import BadRecord, Request, RequestRules, parse_request
from batchferry.domain.times import to_ms
from batchferry.engine.routing import Routed, Router
from batchferry.ports import BatchProvider, Clock, IndexRow, KafkaPort, LocalStore, Record


class Accepted(NamedTuple):
    """A record that has been read and may travel."""

    row: IndexRow
    request: Request
    routed: Routed
    ship_by_ms: int


class RowSource:
    """Reads rows again by their offsets."""

    def __init__(
        self,
        kafka: KafkaPort,
        store: LocalStore,
        clock: Clock,
        topic: str,
        rules: RequestRules,
        router: Router,
        providers: Mapping[str, BatchProvider],
    ) -> None:
        self._kafka = kafka
        self._store = store
        self._clock = clock
        self._topic = topic
        self._rules = rules
        self._router = router
        self._providers = providers

    def accept(self, record: Record, now_ms: int) -> Accepted | BadRecord:
        """What a record asks for and when it must leave, or why it is refused. Runs once for every record."""
        request = parse_request(record.value, record.headers, self._rules)
        if type(request) is not Request:
            return cast("BadRecord", request)
        routed = self._router.route(request)
        if type(routed) is not Routed:
            return cast("BadRecord", routed)
        t0_ms = record.timestamp
        if t0_ms > now_ms or t0_ms < 0:
            t0_ms = now_ms
        if request.sla_s is None and request.deadline is None:
            deadline_ms = t0_ms + routed.sla_ms
            ship_by_ms = t0_ms + routed.wait_ms
        else:
            _, ship_by_ms, deadline_ms = routed.plan.times(
                t0_ms,
                sla_s=request.sla_s,
                deadline_ms=None if request.deadline is None else to_ms(request.deadline),
            )
        row = IndexRow(
            record.offset, request.custom_id, record.key, request.passed_headers, t0_ms, deadline_ms, routed.digest
        )
        return Accepted(row, request, routed, ship_by_ms)

    async def read(self, partition: int, offsets: OffsetSet) -> AsyncIterator[Sequence[Record]]:
        """The input records at these offsets that the log still has, in bounded chunks."""
        reader = self._kafka.reader()
        await reader.start()
        try:
            async for records in reader.read_offsets(self._topic, partition, offsets):
                yield records
        finally:
            await reader.stop()

    async def index(self, partition: int, offsets: OffsetSet) -> OffsetSet:
        """Make sure that the index knows these rows; returns those that the log no longer has."""
        missing = offsets - await self._store.indexed(partition, offsets)
        if not missing:
            return missing
        now_ms = round(self._clock.now().timestamp() * 1000)
        async for records in self.read(partition, missing):
            rows = []
            for record in records:
                accepted = self.accept(record, now_ms)
                if not isinstance(accepted, BadRecord):
                    rows.append(accepted.row)
                    missing.discard(record.offset)
            if rows:
                await self._store.put_rows(partition, rows)
        return missing

    async def lines(self, partition: int, offsets: OffsetSet) -> AsyncIterator[Sequence[tuple[int, bytes, int]]]:
        """(offset, provider line, estimated tokens) of these rows, ascending; what the log lost is absent."""
        now_ms = round(self._clock.now().timestamp() * 1000)
        async for records in self.read(partition, offsets):
            lines = []
            for record in records:
                accepted = self.accept(record, now_ms)
                if isinstance(accepted, BadRecord):
                    continue
                request = accepted.request
                account = accepted.routed.key.account
                line = self._providers[account].render_line(request.url, request.body)
                lines.append((record.offset, line, request.tokens))
            yield lines

    async def originals(self, partition: int, offsets: OffsetSet) -> Mapping[int, Original]:
        """The values of these input records as failures quote them: bounded, each. What is lost is absent."""
        quotes: dict[int, Original] = {}
        async for records in self.read(partition, offsets):
            for record in records:
                quote = quote_original(record.value)
                if quote is not None:
                    quotes[record.offset] = quote
        return quotes
