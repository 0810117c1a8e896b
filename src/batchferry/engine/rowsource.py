"""Where rows come from once their lines have left the spool: the input topic, read again.

Bodies and the caller's own words (custom_id, key, headers) live in the input topic; everything local is a
cache of it. What the log has deleted is reported, never guessed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from batchferry.domain.envelope import Original, quote_original
from batchferry.domain.ids import MAX_WIRE_ID_CHARS
from batchferry.domain.offsets import OffsetSet
from batchferry.domain.requests import BadRecord, Request, RequestRules, check_deadline, parse_request
from batchferry.domain.times import first_seen_ms, from_ms, to_ms
from batchferry.engine.routing import Routed, Router
from batchferry.ports import BatchProvider, Clock, IndexRow, KafkaPort, LocalStore, Record


class Accepted(NamedTuple):
    """A record that has been read and may travel."""

    row: IndexRow
    request: Request
    routed: Routed
    ship_by_ms: int


class RowLine(NamedTuple):
    """A row as it stands in a batch file, the head of its line aside."""

    offset: int
    line: bytes
    file_bytes: int
    """Bytes it takes in the file, the head at its longest included."""
    tokens: int
    """Estimated input tokens."""
    inputs: int
    row: IndexRow
    max_age_ms: int


@dataclass(slots=True)
class RowLines:
    """Some rows read again: those that can travel, and those that today's rules or routes refuse."""

    lines: list[RowLine] = field(default_factory=list)
    refused: list[tuple[Record, BadRecord]] = field(default_factory=list)


def refused_row(record: Record, bad: BadRecord, now_ms: int) -> IndexRow:
    """The index row of a record that was accepted once and is refused by today's rules: its words are still there."""
    t0_ms = first_seen_ms(record.timestamp, now_ms)
    return IndexRow(record.offset, bad.custom_id or "", record.key, tuple(record.headers), t0_ms, t0_ms, "")


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
            too_far = check_deadline(request, from_ms(t0_ms), self._rules)
            if too_far is not None:
                return too_far
            _, ship_by_ms, deadline_ms = routed.plan.times(
                t0_ms,
                sla_s=request.sla_s,
                deadline_ms=None if request.deadline is None else to_ms(request.deadline),
            )
        row = IndexRow(
            record.offset, request.custom_id, record.key, request.passed_headers, t0_ms, deadline_ms, routed.digest
        )
        return Accepted(row, request, routed, ship_by_ms)

    async def read(self, partition: int, offsets: OffsetSet) -> AsyncGenerator[Sequence[Record], None]:
        """The input records at these offsets that the log still has, in bounded chunks."""
        reader = self._kafka.reader()
        await reader.start()
        try:
            async for records in reader.read_offsets(self._topic, partition, offsets):
                yield records
        finally:
            await reader.stop()

    async def index(self, partition: int, offsets: OffsetSet) -> OffsetSet:
        """Make sure that the index knows these rows; returns those that the log no longer has.

        A record that today's rules refuse was accepted once, and its answer may be on its way: it is indexed as well.
        """
        missing = offsets - await self._store.indexed(partition, offsets)
        if not missing:
            return missing
        now_ms = round(self._clock.now().timestamp() * 1000)
        async for records in self.read(partition, missing.copy()):  # what is found leaves the set meanwhile
            rows = []
            for record in records:
                accepted = self.accept(record, now_ms)
                if isinstance(accepted, BadRecord):
                    rows.append(refused_row(record, accepted, now_ms))
                else:
                    rows.append(accepted.row)
                missing.discard(record.offset)
            if rows:
                await self._store.put_rows(partition, rows)
        return missing

    def has_account(self, account: str) -> bool:
        """Whether the settings have this account: rows under another can go nowhere."""
        return account in self._providers

    async def lines(self, partition: int, offsets: OffsetSet, account: str) -> AsyncGenerator[RowLines, None]:
        """These rows as lines for a file of this account, ascending, in bounded chunks; what the log lost is absent."""
        now_ms = round(self._clock.now().timestamp() * 1000)
        provider = self._providers[account]
        head_bytes = len(provider.line_head("w" * MAX_WIRE_ID_CHARS))
        async with aclosing(self.read(partition, offsets)) as reading:
            async for records in reading:
                rows = RowLines()
                for record in records:
                    accepted = self.accept(record, now_ms)
                    if isinstance(accepted, BadRecord):
                        rows.refused.append((record, accepted))
                        continue
                    request = accepted.request
                    line = provider.render_line(request.url, request.body)
                    size_bytes = len(line) + head_bytes
                    rows.lines.append(
                        RowLine(
                            record.offset,
                            line,
                            size_bytes,
                            request.tokens,
                            request.inputs,
                            accepted.row,
                            accepted.routed.max_age_ms,
                        )
                    )
                yield rows

    async def requests(
        self, partition: int, offsets: OffsetSet
    ) -> AsyncGenerator[tuple[list[Accepted], list[tuple[Record, BadRecord]]], None]:
        """These rows as requests, ascending, in bounded chunks, with those that today's rules or routes refuse."""
        now_ms = round(self._clock.now().timestamp() * 1000)
        async with aclosing(self.read(partition, offsets)) as reading:
            async for records in reading:
                accepted: list[Accepted] = []
                refused: list[tuple[Record, BadRecord]] = []
                for record in records:
                    one = self.accept(record, now_ms)
                    if isinstance(one, BadRecord):
                        refused.append((record, one))
                    else:
                        accepted.append(one)
                yield accepted, refused

    async def originals(self, partition: int, offsets: OffsetSet) -> Mapping[int, Original]:
        """The values of these input records as failures quote them: bounded, each. What is lost is absent."""
        quotes: dict[int, Original] = {}
        async with aclosing(self.read(partition, offsets)) as reading:
            async for records in reading:
                for record in records:
                    quote = quote_original(record.value)
                    if quote is not None:
                        quotes[record.offset] = quote
        return quotes
