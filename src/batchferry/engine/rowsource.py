"""Where rows come from once their lines have left the spool: the input topic, read again.

Bodies and the caller's own words (custom_id, key, headers) live in the input topic; everything local is a
cache of it. What the log has deleted is reported, never guessed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import msgspec

from batchferry.domain.caching import add_cache_marker
from batchferry.domain.envelope import Original, quote_original
from batchferry.domain.ids import MAX_WIRE_ID_CHARS
from batchferry.domain.masking import Masker, MaskFault, mask_body
from batchferry.domain.offsets import OffsetSet
from batchferry.domain.requests import (
    REMEDIES,
    BadRecord,
    RecordRule,
    Request,
    RequestRules,
    check_deadline,
    parse_request,
)
from batchferry.domain.shapes import prefix
from batchferry.domain.times import first_seen_ms, from_ms, to_ms
from batchferry.engine.routing import Routed, Router
from batchferry.ports import BatchProvider, Clock, IndexRow, KafkaPort, LocalStore, Record, Telemetry

LINE_FRAME_BYTES = 512
"""Kept free of an account's longest line for what stands around the body: wire id, method, endpoint."""


@dataclass(frozen=True, slots=True)
class Masking:
    """How personal data is kept out of what is written and sent."""

    masker: Masker | None = None
    max_body_bytes: int = 256_000


NO_MASKING = Masking()


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


def _unfit(request: Request, account: str, member: str, why: str) -> BadRecord:
    rule = RecordRule.NOT_IN_A_BATCH
    what, _, remedy = why.rpartition(": ")
    text = f"{member}: {what} (account {account})"
    return BadRecord(rule=rule, message=text, remedy=remedy or REMEDIES[rule], custom_id=request.custom_id)


def _too_large(request: Request, account: str, size_bytes: int, max_bytes: int) -> BadRecord:
    rule = RecordRule.TOO_LARGE
    text = f"the body has {size_bytes} bytes, and account {account} takes {max_bytes} in one line"
    return BadRecord(rule=rule, message=text, remedy=REMEDIES[rule], custom_id=request.custom_id)


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
        telemetry: Telemetry,
        masking: Masking = NO_MASKING,
    ) -> None:
        self._telemetry = telemetry
        self._masking = masking
        self._kafka = kafka
        self._store = store
        self._clock = clock
        self._topic = topic
        self._rules = rules
        self._router = router
        self._providers = providers
        self._checks = {name: provider.check_request for name, provider in providers.items()}

    def accept(self, record: Record, now_ms: int) -> Accepted | BadRecord:
        """What a record asks for and when it must leave, or why it is refused. Runs once for every record."""
        request = parse_request(record.value, record.headers, self._rules)
        if type(request) is not Request:
            return cast("BadRecord", request)
        routed = self._router.route(request)
        if type(routed) is not Routed:
            return cast("BadRecord", routed)
        masked = 0
        if self._masking.masker is not None and routed.route.mask:
            found = self._mask(request)
            if type(found) is BadRecord:
                return found
            request, masked = cast("tuple[Request, int]", found)
        if routed.marks_cache and prefix(request.body) is not None:
            request = msgspec.structs.replace(request, body=add_cache_marker(request.body))
        account, size_bytes = routed.key.account, len(request.body)
        if (unfit := self._checks[account](request.url, request.body)) is not None:
            return _unfit(request, account, *unfit)
        if size_bytes > routed.max_line_bytes - LINE_FRAME_BYTES:
            return _too_large(request, account, size_bytes, routed.max_line_bytes - LINE_FRAME_BYTES)
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
            record.offset,
            request.custom_id,
            record.key,
            request.passed_headers,
            t0_ms,
            deadline_ms,
            routed.digest,
            masked,
        )
        return Accepted(row, request, routed, ship_by_ms)

    def _mask(self, request: Request) -> tuple[Request, int] | BadRecord:
        """The request without personal data, and in how many places; a refusal where that cannot be had."""
        masking, rule = self._masking, RecordRule.NOT_MASKABLE
        assert masking.masker is not None
        if len(request.body) > masking.max_body_bytes:
            text = f"the body has {len(request.body)} bytes, and no more than {masking.max_body_bytes} are masked"
            remedy = "shorten the request, or raise mask.max_body_bytes"
            return BadRecord(rule=rule, message=text, remedy=remedy, custom_id=request.custom_id)
        masked = mask_body(masking.masker, request.body, request.url)
        if masked is None:
            return request, 0
        if isinstance(masked, MaskFault):
            text = f"the request could not be masked ({masked.value})"
            return BadRecord(rule=rule, message=text, remedy=REMEDIES[rule], custom_id=request.custom_id)
        for name, places in masked.counts.items():
            self._telemetry.count("masked_places", places, rule=name)
        return msgspec.structs.replace(request, body=masked.body), sum(masked.counts.values())

    def quote(self, record: Record) -> Original | None:
        """A record's value as a failure quotes it: bounded, and masked where requests are.

        A record that cannot be read as a request cannot be masked: with a masker it is not quoted.
        """
        if self._masking.masker is None:
            return quote_original(record.value)
        accepted = self.accept(record, round(self._clock.now().timestamp() * 1000))
        if isinstance(accepted, BadRecord):
            return None
        if not accepted.routed.route.mask:
            return quote_original(record.value)
        request = accepted.request
        members = {"custom_id": request.custom_id, "url": request.url, "body": msgspec.Raw(request.body)}
        return quote_original(msgspec.json.encode(members))

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
                    quote = self.quote(record)
                    if quote is not None:
                        quotes[record.offset] = quote
        return quotes
