"""Outcomes and batch events as Kafka records, rendered and sized before any transaction begins.

An answer that is larger than its topic takes becomes a failure of class ``outcome_too_large`` here, so that it can
never abort its neighbours' transaction.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, TypedDict, TypeVar

from batchferry.config import Settings
from batchferry.domain import machine as m
from batchferry.domain.batchkey import BatchKey
from batchferry.domain.envelope import (
    Attempt,
    BatchFacts,
    EventKind,
    Original,
    OutcomeContext,
    event_headers,
    event_id_of,
    outcome_headers,
    quote_original,
    render_event,
    render_failure,
    render_result,
    render_split,
)
from batchferry.domain.ids import LotId, WireId
from batchferry.domain.ledger import UNPRICED, UNREAD, Lane, Lot, LotTally
from batchferry.domain.money import Price, format_usd, price_row
from batchferry.domain.offsets import OffsetSet
from batchferry.domain.provider import BatchSnapshot
from batchferry.domain.requests import DEFAULT_RULES, BadRecord, parse_request
from batchferry.domain.retry import SYNC_TRIES
from batchferry.domain.rows import ResultLine, RowClass, RowFlag
from batchferry.domain.times import first_seen_ms, from_ms
from batchferry.engine.partition import PartitionTask, Settlement
from batchferry.engine.routing import Router
from batchferry.ports import Clock, Headers, IndexRow, OutRecord, Record, Telemetry
from batchferry.telemetry import child_traceparent

FILE_MODE = 0o600
OWN_HEADERS_BYTES = 1024
"""Room for the headers that an outcome has of its own."""
ENVELOPE_BYTES = 4096
"""About what our own members and the headers add to an answer."""


REVIEWED = frozenset({RowFlag.TRUNCATED, RowFlag.REFUSED, RowFlag.FILTERED, RowFlag.EMPTY})
"""Flags of an answer that a person may want to see."""
_NO_ATTEMPTS: Mapping[str, int] = {}
T = TypeVar("T")


class RowPrice(NamedTuple):
    """What a row cost and would have cost, in picodollars; None where unknown."""

    price: Price | None

    @property
    def batch(self) -> int | None:
        """What was paid."""
        return None if self.price is None else self.price.picodollars

    @property
    def sync(self) -> int | None:
        """What the same row costs outside a batch."""
        return None if self.price is None else self.price.list_picodollars


class OutcomeWriter:
    """Makes the records that a settle transaction publishes."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        telemetry: Telemetry,
        max_outcome_bytes: Mapping[str, int],
        partitions: Mapping[str, int],
    ) -> None:
        """Take the parts.

        Args:
            max_outcome_bytes: largest record each output topic takes, by topic.
            partitions: partition counts by topic.
        """
        self._settings = settings
        self._topics = settings.topics
        self._clock = clock
        self._telemetry = telemetry
        self._max_bytes = max_outcome_bytes
        self._co_partitioned: set[str] = set()
        self.learn_partitions(partitions)
        self._router = Router(settings)
        self.quote: Callable[[Record], Original | None] = lambda record: quote_original(record.value)
        """How a failure quotes its request."""
        self._counts: Counter[tuple[str, str, str]] = Counter()

    def learn_partitions(self, partitions: Mapping[str, int]) -> None:
        """The topics have so many partitions now. To be told before an outcome of a new input partition is made."""
        requests = partitions.get(self._topics.requests)
        self._co_partitioned = {name for name, count in partitions.items() if count == requests}

    # --------------------------------------------------------------------------------------------- outcomes

    def price(self, lot: Lot, line: ResultLine) -> RowPrice:
        """What the row of this line cost, by the model that answered."""
        if line.usage is None:
            return RowPrice(None)
        account = self._settings.accounts[lot.key.account]
        prices = account.price_list
        when = lot.submitted_at or lot.created_at
        batch = lot.lane is Lane.BATCH or account.sync.batch_chat
        price = price_row(prices, line.model or lot.key.model, line.usage, when, batch=batch)
        if price is None and line.model:
            price = price_row(prices, lot.key.model, line.usage, when, batch=batch)
        return RowPrice(price)

    def results(
        self,
        task: PartitionTask,
        lot: Lot,
        answered: Sequence[tuple[IndexRow, ResultLine, RowPrice]],
        snapshot: BatchSnapshot | None,
        now: datetime,
    ) -> list[Settlement]:
        """Successes of one lot (``snapshot`` None: of a wave); one too large for its topic becomes a failure saying so.

        Runs for every row of every batch: what all rows of the chunk share is worked out once.
        """
        results = self._topics.results
        review = self._review_of(lot)
        facts = self._facts(lot, snapshot, now)
        now_ms = now.timestamp() * 1000
        limits = {
            name: (self._max_bytes[name], self._partition(name, task.partition))
            for name in {results, review or results}
        }
        settlements = []
        plain = 0
        for row, line, price in answered:
            context = self._context(task, lot, row, facts, now_ms, line.wire_id)
            value = render_result(context, line, price.price)
            topic = review if review is not None and not REVIEWED.isdisjoint(line.flags) else results
            limit, partition = limits[topic]
            headers = outcome_headers(context, "succeeded", now, _traced(row.headers))
            key = _key(row)
            if len(value) + len(key or b"") + _size(headers) <= limit:
                record = OutRecord(topic, key, value, headers, partition)
                is_missed = context.deadline_met is False
                settlements.append(Settlement(row.offset, record, row.deadline_ms, is_missed=is_missed))
                if context.deadline_met is False or line.flags:
                    self._told(row, RowClass.SUCCEEDED, now, line)
                else:
                    plain += 1
            else:
                self._told(row, RowClass.OUTCOME_TOO_LARGE, now, None)
                settlements.append(self._too_large(task, lot, row, line, price, context, len(value), now, snapshot))
        if plain:  # the usual case, counted once a chunk
            self._counts["rows", "class", RowClass.SUCCEEDED.value] += plain
            self._counts["records", "outcome", "succeeded"] += plain
            self._counts["deadlines", "met", "yes"] += plain
        self.tell_turnaround([row for row, _, _ in sample(answered)], now)
        return settlements

    def _too_large(
        self,
        task: PartitionTask,
        lot: Lot,
        row: IndexRow,
        line: ResultLine,
        price: RowPrice,
        context: OutcomeContext,
        size_bytes: int,
        now: datetime,
        snapshot: BatchSnapshot | None,
    ) -> Settlement:
        body = line.body or b""
        kept_at = self._keep_answer(lot, task.partition, row.offset, body)
        limit = self._max_bytes[self._topics.results]
        self._telemetry.count("outcomes_too_large")
        self._telemetry.event(
            "outcome_too_large",
            batch_id=lot.lot_id,
            partition=task.partition,
            offset=row.offset,
            bytes=size_bytes,
            limit_bytes=limit,
            kept_at=kept_at or "",
        )
        value = render_failure(
            context,
            RowClass.OUTCOME_TOO_LARGE,
            "outcome_too_large",
            f"the answer needs {size_bytes} bytes, the topic {self._topics.results} takes {limit}",
            remedy="raise max.message.bytes of the results topic, or ask for shorter answers; the provider's files"
            " of this batch are kept",
            price=price.price,
            answer={
                "bytes": len(body),
                "sha256": hashlib.sha256(body).hexdigest(),
                "file_id": None if snapshot is None else snapshot.output_file_id,
                "kept_at": kept_at,
            },
        )
        record = self._fitted(self._topics.failures, context, row, value, now)
        return Settlement(row.offset, record, row.deadline_ms, is_missed=context.deadline_met is False)

    def _review_of(self, lot: Lot) -> str | None:
        """Where flagged answers of this lot go; None: to the results like all others."""
        routed = self._router.for_key(lot.key)
        return self._topics.review_topic if routed is not None and routed.route.review else None

    def _fitted(self, topic: str, context: OutcomeContext, row: IndexRow, value: bytes, now: datetime) -> OutRecord:
        """A failure's record; key and headers are the caller's, and go when the topic does not take them."""
        headers = outcome_headers(context, "failed", now, _traced(row.headers))
        key = _key(row)
        if len(value) + len(key or b"") + _size(headers) > self._max_bytes[topic]:
            key, headers = None, outcome_headers(context, "failed", now)
        return OutRecord(topic, key, value, headers, self._partition(topic, context.partition))

    def _partition(self, topic: str, partition: int) -> int | None:
        """An outcome goes to the partition its request came from where the topics have equally many.

        That keeps them co-partitioned whatever partitioner the producer used, and a settle transaction touches two
        partitions instead of all. Otherwise the key decides.
        """
        return partition if topic in self._co_partitioned else None

    def _keep_answer(self, lot: Lot, partition: int, offset: int, body: bytes) -> str | None:
        routed = self._router.for_key(lot.key)
        folder: Path | None = None if routed is None else routed.route.keep_oversize_answers_dir
        if folder is None:
            return None
        path = folder / f"{lot.lot_id}-{partition}-{offset}.json"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE), "wb") as file:
                file.write(body)
        except OSError:
            return None  # the outcome says that nothing was kept; the provider's file still has the answer
        return str(path)

    def is_too_large(self, line: ResultLine) -> bool:
        """Whether an answer of this size could not be published, its envelope roughly counted."""
        return line.body is not None and len(line.body) + ENVELOPE_BYTES > self._max_bytes[self._topics.results]

    def failure(
        self,
        task: PartitionTask,
        lot: Lot,
        row: IndexRow,
        line: ResultLine,
        original: Original | None,
        snapshot: BatchSnapshot | None,
        now: datetime,
        *,
        for_review: bool = False,
    ) -> Settlement:
        """A final failure; it counts only while ``lot`` still holds the row."""
        context = self._context(task, lot, row, self._facts(lot, snapshot, now), now.timestamp() * 1000)
        topic = self._topics.review_topic if for_review else self._topics.failures
        self._told(row, line.row_class, now, line)
        record = self._failure_record(
            topic,
            context,
            row,
            line.row_class,
            line.code or line.row_class.value,
            line.message,
            now,
            original,
            line,
            tried=_tried(context, lot, line, now),
        )
        is_missed = context.deadline_met is False
        return Settlement(row.offset, record, row.deadline_ms, only_if_held_by=lot.lot_id, is_missed=is_missed)

    def split(
        self,
        task: PartitionTask,
        lot: Lot | None,
        row: IndexRow,
        line: ResultLine,
        parts: Sequence[OutRecord],
        snapshot: BatchSnapshot | None,
        now: datetime,
    ) -> Settlement:
        """The end of a row that goes on as parts: its outcome and the parts are published together or not at all.

        ``lot`` is None for a row that was never sent.
        """
        if lot is None:
            context = self._bare_context(task, row)
        else:
            context = self._context(task, lot, row, self._facts(lot, snapshot, now), now.timestamp() * 1000)
        self._told(row, RowClass.SPLIT, now, None)
        value = render_split(context, line, len(parts))
        headers = outcome_headers(context, "split", now, _traced(row.headers))
        topic = self._topics.results
        record = OutRecord(topic, _key(row), value, headers, self._partition(topic, task.partition))
        held_by = None if lot is None else lot.lot_id
        return Settlement(
            row.offset,
            record,
            row.deadline_ms,
            only_if_held_by=held_by,
            is_missed=context.deadline_met is False,
            also=tuple(parts),
        )

    def given_up(
        self,
        task: PartitionTask,
        row: IndexRow,
        row_class: RowClass,
        message: str,
        original: Original | None,
        now: datetime,
        *,
        remedy: str,
        held_by: LotId | None = None,
        for_review: bool = False,
    ) -> Settlement:
        """The failure of a row that is not to be run (any more): too old, too late, or surely too long."""
        self._told(row, row_class, now, None)
        context = self._bare_context(task, row)
        topic = self._topics.review_topic if for_review else self._topics.failures
        made = self._failure_record(
            topic, context, row, row_class, row_class.value, message, now, original, remedy=remedy
        )
        is_missed = row.deadline_ms > row.t0_ms and now.timestamp() * 1000 > row.deadline_ms
        return Settlement(row.offset, made, row.deadline_ms, only_if_held_by=held_by, is_missed=is_missed)

    def _failure_record(
        self,
        topic: str,
        context: OutcomeContext,
        row: IndexRow,
        row_class: RowClass,
        code: str,
        message: str,
        now: datetime,
        original: Original | None = None,
        line: ResultLine | None = None,
        *,
        remedy: str | None = None,
        duplicate_of: int | None = None,
        tried: Sequence[Attempt] = (),
    ) -> OutRecord:
        passed = _size(row.headers)
        attempt_line = line if line is not None and line.body is not None else None

        def render(quote: Original | None, answer: ResultLine | None) -> bytes:
            return render_failure(
                context,
                row_class,
                code,
                message,
                remedy=remedy,
                original=quote,
                line=answer,
                duplicate_of=duplicate_of,
                tried=tried,
            )

        value = render(original, attempt_line)
        limit = self._max_bytes[topic] - passed - OWN_HEADERS_BYTES - len(_key(row) or b"")
        if len(value) > limit:
            value = render(None if original is None else _shorter(original), None)
        if len(value) > limit:
            value = render(None, None)
        return self._fitted(topic, context, row, value, now)

    def bad_record(self, task: PartitionTask, record: Record, bad: BadRecord, now: datetime) -> Settlement:
        """The failure of an input record that breaks a rule."""
        t0_ms = first_seen_ms(record.timestamp, round(now.timestamp() * 1000))
        context = OutcomeContext(
            ledger_id=task.ledger_id,
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            custom_id=bad.custom_id,
            t0=from_ms(t0_ms),
            source_event=event_id_of(record.headers),
        )
        row = IndexRow(record.offset, bad.custom_id or "", record.key, tuple(record.headers), t0_ms, t0_ms, "")
        self._counts["rows", "class", RowClass.BAD_RECORD.value] += 1
        self._counts["records", "outcome", "failed"] += 1
        where = f"{record.topic}-{record.partition}@{record.offset}"
        made = self._failure_record(
            self._topics.failures,
            context,
            row,
            RowClass.BAD_RECORD,
            str(bad.rule),
            f"{where}: {bad.message}",
            now,
            self.quote(record),
            remedy=bad.remedy,
        )
        return Settlement(record.offset, made, t0_ms)

    def duplicate(self, task: PartitionTask, row: IndexRow, first_offset: int, now: datetime) -> Settlement:
        """The same request again while the first one waited: the outcome names the first."""
        context = self._bare_context(task, row)
        self._told(row, RowClass.DUPLICATE, now, None)
        self._telemetry.count("duplicate_records")
        made = self._failure_record(
            self._topics.failures,
            context,
            row,
            RowClass.DUPLICATE,
            "duplicate",
            f"custom_id was already waiting at offset {first_offset} of this partition",
            now,
            remedy="read the outcome of the first record, or give each request its own custom_id",
            duplicate_of=first_offset,
        )
        return Settlement(row.offset, made, row.deadline_ms)

    def lost(self, task: PartitionTask, offset: int, now: datetime) -> Settlement:
        """A record that the input topic deleted before it was answered."""
        now_ms = round(now.timestamp() * 1000)
        row = IndexRow(offset, "", None, (), now_ms, now_ms, "")
        context = OutcomeContext(
            ledger_id=task.ledger_id, topic=self._topics.requests, partition=task.partition, offset=offset
        )
        self._told(row, RowClass.RETENTION, now, None)
        made = self._failure_record(
            self._topics.failures,
            context,
            row,
            RowClass.RETENTION,
            "input_deleted",
            f"{self._topics.requests}-{task.partition}@{offset}: the input topic deleted this record before it was"
            " answered",
            now,
            remedy="raise retention.ms of the input topic, and send the request again",
        )
        return Settlement(offset, made, now_ms)

    def expiring(self, task: PartitionTask, record: Record, now: datetime) -> Settlement:
        """A record that waits and that the input topic would delete soon: said while it can still be quoted."""
        t0_ms = first_seen_ms(record.timestamp, round(now.timestamp() * 1000))
        request = parse_request(record.value, record.headers, DEFAULT_RULES)
        passed = tuple(record.headers) if isinstance(request, BadRecord) else request.passed_headers
        row = IndexRow(record.offset, request.custom_id or "", record.key, passed, t0_ms, t0_ms, "")
        self._told(row, RowClass.RETENTION, now, None)
        made = self._failure_record(
            self._topics.failures,
            self._bare_context(task, row),
            row,
            RowClass.RETENTION,
            "input_expiring",
            f"{record.topic}-{record.partition}@{record.offset}: no provider had this request yet, and the input topic"
            " was about to delete it",
            now,
            self.quote(record),
            remedy="raise retention.ms of the input topic, see why requests wait so long, and send it again",
        )
        return Settlement(record.offset, made, 0)

    def _context(
        self,
        task: PartitionTask,
        lot: Lot,
        row: IndexRow,
        facts: BatchFacts,
        now_ms: float,
        wire_id: str = "",
    ) -> OutcomeContext:
        ledger_id = task.ledger_id
        partition = task.partition
        attempts: Mapping[str, int] = _NO_ATTEMPTS
        if lot.attempts:
            offset = row.offset
            attempts = {name: times for name in lot.attempts if (times := lot.attempts_of(name, offset))}
        return OutcomeContext(
            ledger_id=ledger_id,
            topic=self._topics.requests,
            partition=partition,
            offset=row.offset,
            custom_id=row.custom_id or None,
            t0=from_ms(row.t0_ms),
            deadline=from_ms(row.deadline_ms),
            deadline_met=now_ms <= row.deadline_ms,
            wire_id=wire_id or str(WireId(ledger_id, partition, row.offset, lot.submission)),
            submission=lot.submission,
            attempts=attempts,
            batch=facts,
            source_event=event_id_of(row.headers) if row.headers else None,
            masked=row.masked,
        )

    def _bare_context(self, task: PartitionTask, row: IndexRow) -> OutcomeContext:
        return OutcomeContext(
            ledger_id=task.ledger_id,
            topic=self._topics.requests,
            partition=task.partition,
            offset=row.offset,
            custom_id=row.custom_id or None,
            t0=from_ms(row.t0_ms),
            deadline=from_ms(row.deadline_ms),
            source_event=event_id_of(row.headers),
            masked=row.masked,
        )

    def _facts(self, lot: Lot, snapshot: BatchSnapshot | None, now: datetime | None) -> BatchFacts:
        return _facts(
            lot.lot_id,
            lot.key,
            self._settings.accounts[lot.key.account].provider,
            None if snapshot is None else snapshot.provider_batch_id,
            lot.input_file_id,
            lot.created_at,
            lot.submitted_at,
            now,
            lot.lane,
        )

    def _told(self, row: IndexRow, row_class: RowClass, now: datetime, line: ResultLine | None) -> None:
        counts = self._counts
        counts["rows", "class", row_class.value] += 1
        counts["records", "outcome", "succeeded" if row_class is RowClass.SUCCEEDED else "failed"] += 1
        if row.deadline_ms > row.t0_ms:
            is_met = now.timestamp() * 1000 <= row.deadline_ms
            counts["deadlines", "met", "yes" if is_met else "no"] += 1
        if line is not None:
            for flag in line.flags:
                counts["rows_flagged", "flag", flag.value] += 1

    def tell_turnaround(self, rows: Sequence[IndexRow], now: datetime) -> None:
        """Put the turnaround of some rows (a ``sample`` of a chunk) into the metrics."""
        now_ms = now.timestamp() * 1000
        for row in rows:
            self._telemetry.observe("record_turnaround_seconds", max(0.0, now_ms - row.t0_ms) / 1000)

    def tell_counts(self) -> None:
        """Hand the counts gathered since the last call to the metrics: once a second, not once a row."""
        counts, self._counts = self._counts, Counter()
        for (name, label, value), rows in counts.items():
            self._telemetry.count(name, rows, **{label: value})

    # ------------------------------------------------------------------------------------------------ events

    def submitted_event(self, partition: int, lot: Lot, snapshot: BatchSnapshot) -> OutRecord:
        """The provider batch exists; written in the transaction that records its id."""
        return self._event(
            EventKind.SUBMITTED,
            f"{lot.lot_id}-submitted-{partition}",
            lot,
            snapshot,
            rows=lot.rows,
            bytes=lot.bytes,
            tokens=lot.tokens,
            partitions=list(lot.partitions),
            reason=lot.seal_reason,
            **_row_fields(lot, partition),
        )

    def wave_event(self, lot: Lot) -> OutRecord:
        """Rows begin their way through the sync lane; written in the transaction that says so in the ledger."""
        rows = _row_fields(lot)
        event_id = f"{lot.lot_id}-submitted"
        return self._event(EventKind.SUBMITTED, event_id, lot, None, rows=lot.rows, reason=lot.seal_reason, **rows)

    def onward_event(self, lot: Lot, heir: Lot, classes: Mapping[str, int], kind: EventKind, reason: str) -> OutRecord:
        """Rows of ``lot`` travel again, in ``heir``; written in the transaction that makes the heir."""
        fields = _row_fields(heir)
        return self._event(
            kind, f"{heir.lot_id}-{kind.value}", lot, None, rows=heir.own_rows, classes=classes, reason=reason, **fields
        )

    def missed_event(self, partition: int, missed: Sequence[Settlement]) -> OutRecord:
        """Outcomes that came after their deadline; written in the transaction that publishes them."""
        now = self._clock.now()
        first = min(missed, key=lambda one: one.offset).offset
        event_id = f"missed-{partition}-{first}-{len(missed)}-{round(now.timestamp() * 1000)}"
        late_s = now.timestamp() - min(one.deadline_ms for one in missed) / 1000
        offsets = OffsetSet(one.offset for one in missed).dumps()
        self._telemetry.event("deadline_missed", rows=len(missed))
        return self.plain_event(
            EventKind.DEADLINE_MISSED,
            event_id,
            partition=partition,
            rows=len(missed),
            late_s=round(late_s, 3),
            offsets=offsets,
        )

    def landed_event(
        self,
        task: PartitionTask,
        lot: Lot,
        snapshot: BatchSnapshot | None,
        tally: LotTally,
        now: datetime,
        unknown_rows: int = 0,
    ) -> OutRecord:
        """One partition's part has landed; written in the transaction that makes its lot DONE (or ends a wave)."""
        money: dict[str, str | int] = {}
        if tally.cost_picodollars is not None and tally.list_picodollars is not None:
            money = {"usd": format_usd(tally.cost_picodollars), "sync_usd": format_usd(tally.list_picodollars)}
        if isinstance(unpriced := tally.extra.get(UNPRICED), int):
            money["unpriced_rows"] = unpriced
        unread = tally.extra.get(UNREAD)
        unknown_rows += unread if isinstance(unread, int) else 0
        if unknown_rows:
            money["unknown_rows"] = unknown_rows
        return self._event(
            EventKind.LANDED,
            f"{lot.lot_id}-landed-{task.partition}",
            lot,
            snapshot,
            now,
            partition=task.partition,
            rows=lot.own_rows,
            classes=dict(tally.classes),
            lane=lot.lane.value,
            input_tokens=tally.usage.input_tokens,
            output_tokens=tally.usage.output_tokens,
            cached_tokens=tally.usage.cached_tokens,
            **money,
        )

    def state_event(self, before: m.Batch, after: m.Batch, now: datetime) -> list[OutRecord]:
        """A batch went from one state to the next; published outside any transaction, as it states no ledger fact."""
        event_id = f"{after.batch_id}-{after.state.value}-{round(now.timestamp() * 1000)}"
        facts = _facts(
            after.batch_id,
            after.key,
            self._settings.accounts[after.key.account].provider,
            after.provider_batch_id,
            after.input_file_id,
            after.sealed_at,
            after.submitted_at,
            None,
        )
        value = render_event(
            EventKind.STATE_CHANGED,
            event_id,
            now,
            facts,
            from_state=before.state.value,
            to_state=after.state.value,
            rows=after.rows,
        )
        headers = event_headers(EventKind.STATE_CHANGED, event_id, now, self._topics.requests)
        return [OutRecord(self._topics.events, after.batch_id.encode(), value, headers)]

    def plain_event(self, kind: EventKind, event_id: str, batch: m.Batch | None = None, **fields: object) -> OutRecord:
        """An event that states no ledger fact: a sealing, a hold, an alarm."""
        now = self._clock.now()
        facts = None
        if batch is not None:
            provider = self._settings.accounts[batch.key.account].provider
            facts = _facts(batch.batch_id, batch.key, provider, None, None, batch.sealed_at, None, None)
        value = render_event(kind, event_id, now, facts, **fields)  # type: ignore[arg-type]
        key = (batch.batch_id if batch is not None else str(fields.get("scope", event_id))).encode()
        headers = event_headers(kind, event_id, now, self._topics.requests)
        return OutRecord(self._topics.events, key, value, headers)

    def _event(
        self,
        kind: EventKind,
        event_id: str,
        lot: Lot,
        snapshot: BatchSnapshot | None,
        now: datetime | None = None,
        **fields: object,
    ) -> OutRecord:
        at = now or self._clock.now()
        value = render_event(kind, event_id, at, self._facts(lot, snapshot, None), **fields)  # type: ignore[arg-type]
        headers = event_headers(kind, event_id, at, self._topics.requests)
        return OutRecord(self._topics.events, lot.lot_id.encode(), value, headers)


def sample(chunk: Sequence[T]) -> Sequence[T]:
    """The first, the middle and the last of a chunk: what a histogram gets of it, as each value has its price."""
    return chunk if len(chunk) <= 3 else (chunk[0], chunk[len(chunk) // 2], chunk[-1])


@functools.lru_cache(maxsize=256)
def _facts(
    batch_id: str,
    key: BatchKey,
    provider: str,
    provider_batch_id: str | None,
    file_id: str | None,
    sealed_at: datetime,
    submitted_at: datetime | None,
    landed_at: datetime | None,
    lane: Lane = Lane.BATCH,
) -> BatchFacts:
    return BatchFacts(
        lane=lane.value,
        account=key.account,
        provider=provider,
        endpoint=key.endpoint,
        model=key.model,
        completion_window=key.completion_window,
        slice=key.slice,
        batch_id=batch_id,
        provider_batch_id=provider_batch_id,
        provider_file_id=file_id,
        sealed_at=sealed_at,
        submitted_at=submitted_at,
        landed_at=landed_at,
    )


class _RowFields(TypedDict):
    """What an event says of the rows of one partition."""

    partition: int
    offsets: str
    submission: int
    lane: str


def _row_fields(lot: Lot, partition: int | None = None) -> _RowFields:
    return {
        "partition": lot.partitions[0] if partition is None else partition,
        "offsets": lot.offsets.dumps(),
        "submission": lot.submission,
        "lane": lot.lane.value,
    }


def _tried(context: OutcomeContext, lot: Lot, line: ResultLine, now: datetime) -> list[Attempt]:
    """What a failure says of its tries: of the earlier ones the ledger keeps only why they ended, the last is known."""
    earlier: list[Attempt] = []
    for name, times in context.attempts.items():
        one: Attempt = {"lane": Lane.SYNC.value} if name == SYNC_TRIES else {"row_class": name}
        earlier += [one] * times
    last: Attempt = {
        "lane": lot.lane.value,
        "batch_id": lot.lot_id,
        "wire_id": context.wire_id,
        "row_class": line.row_class.value,
        "code": line.code,
        "at": now,
    }
    return [*earlier, last]


def _key(row: IndexRow) -> bytes | None:
    """Outcomes keep the request's key; without one, the caller's id spreads them."""
    if row.key is not None:
        return row.key
    return row.custom_id.encode(errors="replace") if row.custom_id else None


def _traced(headers: Headers) -> Headers:
    """The request's headers with its ``traceparent`` continued by a span of ours."""
    if not headers:
        return headers
    return tuple(
        (name, (child_traceparent(value) or value) if name.lower() == "traceparent" else value)
        for name, value in headers
    )


def _shorter(quote: Original) -> Original:
    """Only its beginning; the number is one that base64 can be cut at."""
    return replace(quote, value=quote.value[:1024], truncated=quote.truncated or len(quote.value) > 1024)


def _size(headers: Headers) -> int:
    size_bytes = 4 * len(headers)
    for name, value in headers:
        size_bytes += len(name) + len(value or b"")  # a header may have no value; it goes on without one
    return size_bytes
