"""``batchferry replay``: failed requests back onto the input topic, as new records of the same words.

How no failure is replayed twice. A replayed record goes to the *partition of its source* and carries the header
``replay-of`` with the source's place, so its mark stands behind its source in the same log. Kafka deletes a log from
its head: as long as a source can be read again, the mark of its replay is there too. So before anything is sent the
input partitions are read from the first chosen source to their end, and whatever a mark names is left out. Against two
runs at one time there is one transactional id for all of them: starting fences an earlier run and ends its open
transaction before the marks are read, and each of its records is either committed, and then seen, or never will be.

The record's own words are read again at the source offset. The value quoted in a failure is for people: it may be cut.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import typer

from batchferry.cli.console import (
    amount,
    complain,
    count,
    counts_text,
    facts,
    fail,
    instant,
    out,
    print_json,
    rows,
    size,
    table,
    usd,
    wants_json,
)
from batchferry.cli.errors import TopicMissing
from batchferry.cli.exits import Exit
from batchferry.cli.options import ConfigOption, JsonOption, load
from batchferry.cli.reading import ended, read_records
from batchferry.domain.errors import BatchferryError, CommitUnknown, KafkaUnavailable, PartitionLost
from batchferry.domain.estimate import UNLEARNED_OUTPUT_TOKENS
from batchferry.domain.money import price_row
from batchferry.domain.offsets import OffsetSet
from batchferry.domain.provider import Usage
from batchferry.domain.requests import BadRecord, Request, RequestRules, parse_request
from batchferry.domain.rows import RowClass
from batchferry.domain.times import from_ms, hours, parse_duration_s
from batchferry.ports import Headers, OutRecord

if TYPE_CHECKING:
    from batchferry.config import Settings
    from batchferry.engine.routing import Router
    from batchferry.ports import Clock, KafkaPort, LogReader, PartitionProducer, Record

REPLAY_OF = "replay-of"
"""Header of a replayed record: where its source stands, as ``topic-partition@offset``."""
REPLAY_NUMBER = "replay-number"
"""Header: how often the words of this record have been replayed, this time included."""
_OWN = frozenset({REPLAY_OF, REPLAY_NUMBER, "sla", "deadline"})
"""Headers that a replay writes anew or leaves out; all others stay as the caller set them."""

DEFAULT_LIMIT = 1_000
DEFAULT_MAX_REPLAYS = 3
MAX_FAILURES = 500_000
"""Failures that are looked at in one run, about 300 bytes of memory each."""
LOOK_RECORDS = 200
"""Sources read at one time,"""
TRANSACTION_RECORDS = 500
"""most records of one transaction,"""
TRANSACTION_BYTES = 4_000_000
"""and most bytes."""
MAX_PATCH_BYTES = 1_000_000
NAMED = 20
"""Requests and refusals that are named; the rest is counted."""
DEFAULT_TOPIC_BYTES = 1_048_588
"""Kafka's own default of ``max.message.bytes``."""
RECORD_OVERHEAD_BYTES = 512
"""Room for framing within the topic's limit."""

PERMANENT: Mapping[RowClass, str] = {
    RowClass.INVALID_REQUEST: "the provider refuses it for what it says",
    RowClass.TOO_LONG: "it is longer than the model's context",
    RowClass.CONTENT_FILTERED: "the content filter blocks it",
    RowClass.BAD_RECORD: "it breaks a rule of the input",
    RowClass.DUPLICATE: "another record's outcome answers it",
    RowClass.OUTCOME_TOO_LARGE: "its answer does not fit the results topic, and would be paid once more",
    RowClass.MODEL_UNAVAILABLE: "the model does not exist, or the account may not use it",
}
"""Classes that the same words end in again."""


class _Source(msgspec.Struct, gc=False):
    topic: str = ""
    partition: int = -1
    offset: int = -1


class _Error(msgspec.Struct, gc=False):
    row_class: str = msgspec.field(name="class", default="")
    code: str | None = None


class _Quoted(msgspec.Struct, gc=False):
    sha256: str = ""


class _Outcome(msgspec.Struct, gc=False):
    status: str = ""
    custom_id: str | None = None
    source: _Source | None = None
    error: _Error | None = None
    original: _Quoted | None = None


_decode_outcome = msgspec.json.Decoder(_Outcome).decode
_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Failed(NamedTuple):
    """A failure, as far as choosing it takes."""

    at_ms: int
    partition: int
    offset: int
    row_class: str
    code: str
    custom_id: str | None
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which failures are wanted. ``since`` and ``until`` are about when the outcome was published."""

    classes: frozenset[str] = frozenset()
    code: str | None = None
    custom_id: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    limit: int = DEFAULT_LIMIT
    max_replays: int = DEFAULT_MAX_REPLAYS
    force: bool = False

    def takes(self, found: Failed) -> bool:
        """Whether it is one of those."""
        return (
            (not self.classes or found.row_class in self.classes)
            and (self.code is None or found.code == self.code)
            and (self.custom_id is None or found.custom_id == self.custom_id)
            and (self.since is None or found.at_ms >= self.since.timestamp() * 1000)
            and (self.until is None or found.at_ms < self.until.timestamp() * 1000)
        )


@dataclass(frozen=True, slots=True)
class Change:
    """What is changed in the body of every request: a JSON merge patch (RFC 7386)."""

    patch: Mapping[str, msgspec.Raw] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.patch)


class CannotChange(BatchferryError):
    """A record that is not of a shape whose body could be changed; the text says why, and quotes nothing."""


@dataclass(frozen=True, slots=True)
class Replay:
    """One request that goes back."""

    source: Failed
    record: OutRecord
    number: int
    deadline: datetime
    cost: int | None
    """Picodollars by batch, at most: by our own estimate of its tokens."""


@dataclass(slots=True)
class Report:
    """What was found and done."""

    matching: int = 0
    by_class: Counter[str] = field(default_factory=Counter)
    replayed_before: int = 0
    permanent: Counter[str] = field(default_factory=Counter)
    """Left out because the same words would end the same way."""
    gone: int = 0
    """The input topic no longer has the source."""
    refused: int = 0
    refusals: list[str] = field(default_factory=list)
    named: list[Replay] = field(default_factory=list)
    chosen: int = 0
    bytes: int = 0
    cost: int = 0
    unpriced: int = 0
    deadlines: tuple[datetime, datetime] | None = None
    sent: int = 0
    beyond_limit: int = 0
    """Matching failures that this run did not come to."""

    def refuse(self, source: Failed, why: str) -> None:
        """Note a failure that cannot go back."""
        self.refused += 1
        if len(self.refusals) < NAMED:
            self.refusals.append(f"{source.partition}:{source.offset} ({source.row_class}): {why}")

    def take(self, one: Replay) -> None:
        """Note a request that goes back."""
        self.chosen += 1
        self.bytes += len(one.record.value or b"")
        if one.cost is None:
            self.unpriced += 1
        else:
            self.cost += one.cost
        first, last = self.deadlines or (one.deadline, one.deadline)
        self.deadlines = min(first, one.deadline), max(last, one.deadline)
        if len(self.named) < NAMED:
            # The words are not needed for the report, and would be held in memory.
            self.named.append(Replay(one.source, one.record._replace(value=None), one.number, one.deadline, one.cost))


# ------------------------------------------------------------------------------------------------- the command


def replay(
    config: ConfigOption = None,
    class_: Annotated[
        list[str] | None, typer.Option("--class", metavar="CLASS", help="Only failures of this class; repeatable.")
    ] = None,
    code: Annotated[str | None, typer.Option(help="Only failures with this code.")] = None,
    custom_id: Annotated[str | None, typer.Option("--custom-id", help="Only this request.")] = None,
    since: Annotated[
        str | None, typer.Option(help="Failed since: an ISO 8601 instant with a zone, or so long ago (6h).")
    ] = None,
    until: Annotated[str | None, typer.Option(help="Failed before; as --since.")] = None,
    limit: Annotated[
        int, typer.Option(min=1, max=MAX_FAILURES, help="At most so many, the oldest failures first.")
    ] = DEFAULT_LIMIT,
    sla: Annotated[
        str | None, typer.Option(help="New promise, from now on, such as 30h; left out: the route's SLA.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Change body.model to this.")] = None,
    patch: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Change the body by a JSON merge patch (RFC 7386): null removes."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also send unchanged what would end the same way; it is paid again.")
    ] = False,
    max_replays: Annotated[
        int, typer.Option(min=1, max=100, help="A request that was replayed so often is refused.")
    ] = DEFAULT_MAX_REPLAYS,
    yes: Annotated[bool, typer.Option("--yes", help="Send. Without it nothing is sent, only told.")] = False,
    as_json: JsonOption = None,
) -> None:
    """Send failed requests again, as new records on the input topic, with a new deadline.

    Each record is read again where it stands on the input topic, keeps its key, custom_id and headers, and is marked
    with the headers replay-of and replay-number, which its outcome carries too. A failure is never replayed twice,
    whatever is repeated or breaks off; what fails again is a failure of its own. Classes that the same words end in
    again (invalid_request, too_long, content_filtered, bad_record, duplicate, outcome_too_large, model_unavailable)
    need a change, by --model or --patch, or --force.
    """
    classes = _classes(class_ or [])
    change = read_change(patch, model)
    _mind_the_classic_mistake(classes, change, force=force)
    sla_s = _sla_s(sla)
    settings = load(config, keys_needed=False)
    longest_s = settings.limits.max_sla_s
    if sla_s is not None and sla_s > longest_s:
        fail(Exit.USAGE, f"--sla: {hours(sla_s)} is more than the longest promise, {hours(longest_s)}")
    from batchferry import app  # noqa: PLC0415 - see run

    clock = app.build_clock(settings)
    choice = Choice(
        classes=classes,
        code=code,
        custom_id=custom_id,
        since=_when("--since", since, clock.now()),
        until=_when("--until", until, clock.now()),
        limit=limit,
        max_replays=max_replays,
        force=force,
    )

    async def work() -> tuple[Report, str | None]:
        kafka = app.build_kafka(settings)
        try:
            return await replay_failures(kafka, settings, clock, choice, change, sla_s=sla_s, send=yes)
        finally:
            await kafka.aclose()

    report, stopped = asyncio.run(work())
    if wants_json(as_json):
        print_json(_as_json(report, settings, sla_s, is_sent=yes))
    else:
        _show(report, settings, sla_s, is_sent=yes)
    if stopped is not None:
        fail(Exit.FAILED, stopped, "remedy: give the command again; it finds out what was sent and goes on from there")
    if report.permanent:
        complain(
            f"left out {counts_text(report.permanent)}: resent unchanged they would end the same way,"
            " and be paid again",
            "remedy: change them with --model or --patch, or insist with --force",
        )
    if report.refused:
        complain(f"{count(report.refused)} cannot go back:", *report.refusals, *_more(report))
        if yes:
            raise typer.Exit(Exit.LINES_REFUSED)


async def replay_failures(
    kafka: KafkaPort,
    settings: Settings,
    clock: Clock,
    choice: Choice,
    change: Change,
    *,
    sla_s: float | None,
    send: bool,
) -> tuple[Report, str | None]:
    """Choose, look at, and (with ``send``) send. Returns what was done, and why it broke off if it did.

    Raises:
        KafkaUnavailable: no broker answered before anything was sent.
        TopicMissing: a topic does not exist.
    """
    topics = settings.topics
    partitions, inputs, max_bytes = await _ready_topics(kafka, settings)
    producer: PartitionProducer | None = None
    reader = kafka.reader()
    report = Report()
    try:
        if send:
            # Before anything is read: from here on no earlier run can write, and what it wrote can be read.
            transactional_id = f"{topics.requests}.{topics.group}.replay"
            producer = kafka.partition_producer(topics.requests, 0, f"{topics.group}.replay", transactional_id)
            await producer.init()
        await reader.start()
        failures = await _failures(reader, settings, partitions, choice, report)
        candidates = await _candidates(reader, (topics.requests, inputs), failures, choice, change, report)
        maker = _Maker(settings, clock, choice, change, sla_s, max_bytes)
        waiting: list[OutRecord] = []
        async with ended(_made(reader, maker, candidates, report)) as made:
            async for one in made:
                report.take(one)
                if producer is None:
                    continue
                waiting.append(one.record)
                if len(waiting) >= TRANSACTION_RECORDS or _size(waiting) >= TRANSACTION_BYTES:
                    await producer.transact(waiting)
                    report.sent += len(waiting)
                    waiting = []
        if producer is not None and waiting:
            await producer.transact(waiting)
            report.sent += len(waiting)
    except CommitUnknown:
        return report, f"{count(report.sent)} requests were sent; whether the next ones were, the broker did not say"
    except PartitionLost:
        return report, f"another replay has begun, or the broker refuses; {count(report.sent)} requests were sent"
    except KafkaUnavailable as error:
        if not report.sent:
            raise
        return report, f"{error}; {count(report.sent)} requests were sent"
    finally:
        await reader.stop()
        if producer is not None:
            await producer.close()
    return report, None


async def _ready_topics(kafka: KafkaPort, settings: Settings) -> tuple[Mapping[str, int], int, int]:
    """Partitions of the topics of failures and of the input topic, and the largest record that the latter takes."""
    topics = settings.topics
    names = list(dict.fromkeys([topics.failures, topics.review_topic]))
    admin = await kafka.admin()
    try:
        found = await admin.describe([topics.requests, *names])
    finally:
        await admin.close()
    requests = found[topics.requests]
    if requests is None or found[topics.failures] is None:
        missing = topics.requests if requests is None else topics.failures
        raise TopicMissing(
            f"topic {missing} does not exist; there is nothing to replay, or the topics settings are wrong"
        )
    takes = int(requests.configs.get("max.message.bytes", DEFAULT_TOPIC_BYTES))
    counts = {name: description.partitions for name in names if (description := found[name]) is not None}
    return counts, requests.partitions, max(1024, takes - RECORD_OVERHEAD_BYTES)


# ------------------------------------------------------------------------------------------------- choosing


async def _failures(
    reader: LogReader, settings: Settings, topics: Mapping[str, int], choice: Choice, report: Report
) -> list[Failed]:
    """The failures that are wanted, the oldest first, each request once."""
    found: dict[tuple[int, int], Failed] = {}
    needle = None if choice.custom_id is None else msgspec.json.encode(choice.custom_id)
    for topic, partitions in topics.items():
        async with ended(read_records(reader, topic, range(partitions), f"reading {topic}")) as records:
            async for record in records:
                if record.value is None or (needle is not None and needle not in record.value):
                    continue
                one = _failed(record, settings.topics.requests)
                if one is None or not choice.takes(one):
                    continue
                found.setdefault((one.partition, one.offset), one)
                if len(found) > MAX_FAILURES:
                    fail(
                        Exit.USAGE,
                        f"more than {count(MAX_FAILURES)} failures match; nothing was sent",
                        "remedy: narrow them with --class, --code, --since and --until",
                    )
    report.matching = len(found)
    report.by_class = Counter(one.row_class for one in found.values())
    return sorted(found.values())


def _failed(record: Record, topic: str) -> Failed | None:
    """The failure in a message; None for what is none, or speaks of another input topic."""
    try:
        outcome = _decode_outcome(record.value or b"")
    except (ValueError, RecursionError):
        return None
    source, error = outcome.source, outcome.error
    if outcome.status != "failed" or source is None or error is None or source.topic != topic or source.offset < 0:
        return None
    return Failed(
        record.timestamp,
        source.partition,
        source.offset,
        error.row_class,
        error.code or "",
        outcome.custom_id,
        "" if outcome.original is None else outcome.original.sha256,
    )


async def _candidates(
    reader: LogReader,
    requests: tuple[str, int],
    failures: Sequence[Failed],
    choice: Choice,
    change: Change,
    report: Report,
) -> list[Failed]:
    """Without what the same words end in again, what the input no longer has, and what went back before.

    ``requests`` is the input topic with its number of partitions.
    """
    topic, partitions = requests
    able = []
    for one in failures:
        if change or choice.force or not _is_permanent(one.row_class):
            able.append(one)
        else:
            report.permanent[one.row_class] += 1
    bounds = await reader.bounds(topic, sorted({one.partition for one in able if one.partition < partitions}))
    nothing = (0, 0)
    there = [
        one for one in able if (ends := bounds.get(one.partition, nothing))[0] <= one.offset and one.offset < ends[1]
    ]
    report.gone = len(able) - len(there)
    first: dict[int, int] = {}
    for one in there:
        first[one.partition] = min(first.get(one.partition, one.offset), one.offset)
    marked: set[tuple[int, int]] = set()
    for partition, start in sorted(first.items()):
        what = f"looking for earlier replays in {topic}-{partition}"
        async with ended(read_records(reader, topic, [partition], what, start)) as records:
            async for record in records:
                if (place := replayed_place(record.headers, topic)) is not None:
                    marked.add(place)
    fresh = [one for one in there if (one.partition, one.offset) not in marked]
    report.replayed_before = len(there) - len(fresh)
    return fresh


def _is_permanent(row_class: str) -> bool:
    """Whether the same words end in it again; of a class that only a newer version knows nobody can say."""
    return row_class in PERMANENT or row_class not in set(RowClass)


def replayed_place(headers: Sequence[tuple[str, bytes | None]], topic: str) -> tuple[int, int] | None:
    """Partition and offset of the record that this one replays; None when it is no replay on this topic."""
    for name, value in headers:
        if name == REPLAY_OF and value is not None:
            head, _, offset = value.decode(errors="replace").rpartition("@")
            named, _, partition = head.rpartition("-")
            if named == topic and partition.isdecimal() and offset.isdecimal():
                return int(partition), int(offset)
    return None


# ------------------------------------------------------------------------------------------------- making


async def _made(
    reader: LogReader, maker: _Maker, candidates: Sequence[Failed], report: Report
) -> AsyncGenerator[Replay, None]:
    """New records of the oldest failures, read a bounded piece at a time, until there are enough."""
    taken = looked = 0
    while looked < len(candidates) and taken < maker.choice.limit:
        some = candidates[looked : looked + min(LOOK_RECORDS, maker.choice.limit - taken)]
        looked += len(some)
        wanted = {(one.partition, one.offset): one for one in some}
        by_partition: dict[int, OffsetSet] = {}
        for partition, offset in wanted:
            by_partition.setdefault(partition, OffsetSet()).add(offset)
        for partition, offsets in sorted(by_partition.items()):
            async with ended(reader.read_offsets(maker.topic, partition, offsets)) as chunks:
                async for records in chunks:
                    for record in records:
                        source = wanted.pop((partition, record.offset))
                        made = maker.make(source, record)
                        if isinstance(made, str):
                            report.refuse(source, made)
                            continue
                        taken += 1
                        yield made
        for source in wanted.values():
            report.refuse(source, "the input topic no longer has the record")
    report.beyond_limit = len(candidates) - looked


class _Maker:
    """Makes the new record of a source."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        choice: Choice,
        change: Change,
        sla_s: float | None,
        max_bytes: int,
    ) -> None:
        from batchferry import app  # noqa: PLC0415 - see run
        from batchferry.engine.routing import Router  # noqa: PLC0415

        self.topic = settings.topics.requests
        self.choice = choice
        self._settings = settings
        self._clock = clock
        self._change = change
        self._sla_s = sla_s
        self._max_bytes = max_bytes
        self._rules: RequestRules = app.request_rules(settings)
        self._router: Router = Router(settings)

    def make(self, source: Failed, record: Record) -> Replay | str:
        """The replay, or why there is none, in words that quote nothing of the record."""
        value = record.value
        if value is None:
            return "the record has no value"
        if source.sha256 and hashlib.sha256(value).hexdigest() != source.sha256:
            return "the input topic has another record at this offset; it was made anew since"
        number = _number(record.headers) + 1
        if number > self.choice.max_replays:
            return f"it was replayed {number - 1} times, the limit is {self.choice.max_replays} (--max-replays)"
        before = value
        if self._change:
            try:
                value = changed(value, record.headers, self._change)
            except CannotChange as error:
                return str(error)
            if value == before and _is_permanent(source.row_class) and not self.choice.force:
                return "the change changes nothing in it, and the same words would end the same way"
        headers = self._headers(source, record.headers, number)
        request = parse_request(value, headers, self._rules)
        if isinstance(request, BadRecord):
            return f"it would be refused: {request.message} ({request.rule}); {request.remedy}"
        if not source.sha256 and source.custom_id is not None and request.custom_id != source.custom_id:
            return "the input topic has another record at this offset; it was made anew since"
        routed = self._router.route(request)
        if isinstance(routed, BadRecord):
            return f"it would be refused: {routed.message} ({routed.rule}); {routed.remedy}"
        size_bytes = _header_bytes(headers) + len(value) + len(record.key or b"")
        if size_bytes > self._max_bytes:
            return f"it has {count(size_bytes)} bytes, the topic takes {count(self._max_bytes)}"
        now = self._clock.now()
        made = OutRecord(
            self.topic, record.key, value, headers, record.partition, timestamp_ms=round(now.timestamp() * 1000)
        )
        promise_s = routed.route.sla_s if self._sla_s is None else self._sla_s
        cost = self._cost(routed.key.account, request, now)
        return Replay(source, made, number, now + timedelta(seconds=promise_s), cost)

    def _headers(self, source: Failed, given: Sequence[tuple[str, bytes | None]], number: int) -> Headers:
        kept = [(name, value) for name, value in given if name.lower() not in _OWN]
        place = f"{self.topic}-{source.partition}@{source.offset}"
        made: list[tuple[str, bytes | None]] = [*kept, (REPLAY_OF, place.encode()), (REPLAY_NUMBER, b"%d" % number)]
        if self._sla_s is not None:
            made.append(("sla", f"PT{self._sla_s:.3f}".rstrip("0").rstrip(".").encode() + b"S"))
        return tuple(made)

    def _cost(self, account: str, request: Request, now: datetime) -> int | None:
        output = UNLEARNED_OUTPUT_TOKENS if request.max_output_tokens is None else request.max_output_tokens
        if request.url.endswith(("/embeddings", "/moderations")):
            output = 0
        prices = self._settings.accounts[account].price_list
        usage = Usage(request.tokens, output, 0)
        price = price_row(prices, request.model, usage, now, batch=not request.priority_now)
        return None if price is None else price.picodollars


def _number(headers: Sequence[tuple[str, bytes | None]]) -> int:
    """How often a record has been replayed already."""
    found = [value for name, value in headers if name == REPLAY_NUMBER and value]
    text = found[-1].decode(errors="replace") if found else "0"
    return int(text) if text.isdecimal() and len(text) <= 9 else 0


def _header_bytes(headers: Headers) -> int:
    return sum(4 + len(name) + len(value or b"") for name, value in headers)


def _size(records: Sequence[OutRecord]) -> int:
    return sum(len(record.value or b"") for record in records)


# ------------------------------------------------------------------------------------------------- changing


def read_change(patch: Path | None, model: str | None) -> Change:
    """The change that the flags ask for; leaves with the remedy when it is none."""
    members: dict[str, msgspec.Raw] = {}
    if patch is not None:
        try:
            with patch.open("rb") as file:
                text = file.read(MAX_PATCH_BYTES + 1)
        except OSError as error:
            fail(Exit.USAGE, f"--patch: {patch} cannot be read ({error.strerror}); correct the path or its rights")
        if len(text) > MAX_PATCH_BYTES:
            fail(Exit.USAGE, f"--patch: {patch} is larger than {size(MAX_PATCH_BYTES)}")
        try:
            text.decode()
            members = _decode_object(text)
        except (ValueError, RecursionError):
            fail(
                Exit.USAGE, f'--patch: {patch} is no JSON object in UTF-8; write what changes, as {{"temperature": 0}}'
            )
        if not members:
            fail(Exit.USAGE, f"--patch: {patch} changes nothing")
    if model is not None:
        if not model.strip() or not model.isprintable():
            fail(Exit.USAGE, "--model: name a model")
        members["model"] = msgspec.Raw(msgspec.json.encode(model))
    return Change(members)


def changed(value: bytes, headers: Sequence[tuple[str, bytes | None]], change: Change) -> bytes:
    """The record's value with its body changed; every member that the patch does not name keeps its bytes.

    Raises:
        CannotChange: it is not of a shape that has a body.
    """
    kind = next((raw or b"" for name, raw in reversed(headers) if name.lower() == "content-type"), b"")
    path = ["data"] if kind.lower().startswith(b"application/cloudevents") else []
    try:
        value.decode()
        made = _changed(value, path, change)
        # Nothing to change leaves even the white space as it was.
        return value if _meaning(made) == _meaning(value) else made
    except (ValueError, RecursionError):
        raise CannotChange("it cannot be changed: its value is no JSON object with a body") from None


def _meaning(value: bytes) -> Any:
    return json.loads(value, parse_float=Decimal)


def _changed(value: bytes, path: Sequence[str], change: Change) -> bytes:
    members = _decode_object(value)
    if path:
        inner = members.get(path[0])
        if inner is None:
            raise CannotChange("it cannot be changed: its CloudEvent has no JSON data")
        members[path[0]] = msgspec.Raw(_changed(bytes(inner), path[1:], change))
        return msgspec.json.encode(members)
    name = next((one for one in ("body", "params", "request") if one in members), None)
    if name is None:
        raise CannotChange("it cannot be changed: it has no body")
    members[name] = msgspec.Raw(merge_patch(bytes(members[name]), change.patch))
    return msgspec.json.encode(members)


def merge_patch(target: bytes, patch: Mapping[str, msgspec.Raw]) -> bytes:
    """A JSON object with a merge patch (RFC 7386) applied; what the patch does not name keeps its bytes.

    Raises:
        ValueError: the target is no JSON object.
    """
    members = _decode_object(target)
    for name, raw in patch.items():
        given = bytes(raw)
        if given == b"null":
            members.pop(name, None)
        elif given[:1] == b"{":
            before = bytes(members.get(name, msgspec.Raw(b"{}")))
            merged = merge_patch(before if before[:1] == b"{" else b"{}", _decode_object(given))
            members[name] = msgspec.Raw(merged)
        else:
            members[name] = raw
    return msgspec.json.encode(members)


# ------------------------------------------------------------------------------------------------- the flags


def _classes(named: Sequence[str]) -> frozenset[str]:
    known = {one.value for one in RowClass} - {RowClass.SUCCEEDED, RowClass.SPLIT}
    wrong = [name for name in named if name not in known]
    if wrong:
        fail(Exit.USAGE, f"--class: no failure has the class {wrong[0]!r}", f"there are: {', '.join(sorted(known))}")
    return frozenset(named)


def _mind_the_classic_mistake(classes: frozenset[str], change: Change, *, force: bool) -> None:
    permanent = [row_class for row_class in PERMANENT if row_class in classes]
    if permanent and not change and not force:
        fail(
            Exit.USAGE,
            "resending the same thing unchanged is the classic mistake: it would end the same way, and be paid again",
            *[f"{row_class.value}: {PERMANENT[row_class]}" for row_class in permanent],
            "remedy: change the requests with --model or --patch, or insist with --force",
        )


def _sla_s(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        seconds = parse_duration_s(text)
    except ValueError as error:
        fail(Exit.USAGE, f"--sla: {error}")
    if seconds < 1:
        fail(Exit.USAGE, "--sla: a promise is a second at least")
    return seconds


def _when(flag: str, text: str | None, now: datetime) -> datetime | None:
    if text is None:
        return None
    try:
        return now - timedelta(seconds=parse_duration_s(text))
    except (ValueError, OverflowError):
        pass
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        fail(Exit.USAGE, f"{flag}: {text!r} is neither an ISO 8601 instant with a zone nor a length of time such as 6h")
    return found.astimezone(UTC)


# ------------------------------------------------------------------------------------------------- the report


def _promise(settings: Settings, sla_s: float | None) -> str:
    if sla_s is not None:
        return f"now + {hours(sla_s)} (--sla)"
    promises = sorted({route.sla_s for route in settings.routes.values()})
    return "now + " + " or ".join(hours(one) for one in promises) + " (SLA of the route)"


def _more(report: Report) -> Iterator[str]:
    if report.refused > len(report.refusals):
        yield f"... and {count(report.refused - len(report.refusals))} more"


def _as_json(report: Report, settings: Settings, sla_s: float | None, *, is_sent: bool) -> dict[str, object]:
    return {
        "topic": settings.topics.requests,
        "dry_run": not is_sent,
        "matching": report.matching,
        "by_class": dict(report.by_class),
        "chosen": report.chosen,
        "sent": report.sent,
        "replayed_before": report.replayed_before,
        "permanent_left_out": dict(report.permanent),
        "gone": report.gone,
        "refused": report.refused,
        "refusals": [*report.refusals, *_more(report)],
        "beyond_limit": report.beyond_limit,
        "bytes": report.bytes,
        "new_deadline": _promise(settings, sla_s),
        "deadlines": None if report.deadlines is None else {"first": report.deadlines[0], "last": report.deadlines[1]},
        "estimated_usd": usd(report.cost) if report.chosen > report.unpriced else None,
        "unpriced_rows": report.unpriced,
        "first": [
            {
                "source": {"partition": one.source.partition, "offset": one.source.offset},
                "custom_id": one.source.custom_id,
                "class": one.source.row_class,
                "code": one.source.code,
                "failed_at": from_ms(one.source.at_ms),
                "replay_number": one.number,
                "deadline": one.deadline,
                "estimated_usd": usd(one.cost),
            }
            for one in report.named
        ],
    }


def _show(report: Report, settings: Settings, sla_s: float | None, *, is_sent: bool) -> None:
    console = out()
    if report.named:
        shown = table("source", "custom_id", "class", "code", "failed", "replay", "new deadline", right=("replay",))
        lines = (
            (
                f"{one.source.partition}:{one.source.offset}",
                one.source.custom_id or "-",
                one.source.row_class,
                one.source.code,
                instant(from_ms(one.source.at_ms)),
                one.number,
                instant(one.deadline),
            )
            for one in report.named
        )
        console.print(rows(shown, lines))
        if report.chosen > len(report.named):
            console.print(f"... and {count(report.chosen - len(report.named))} more")
        console.print()
    unpriced = f", and {count(report.unpriced)} rows of unknown price" if report.unpriced else ""
    told: list[tuple[str, object]] = [
        ("failures that match", f"{count(report.matching)} ({counts_text(report.by_class) or '-'})"),
        ("replayed before", count(report.replayed_before)),
        ("left out", counts_text(report.permanent) or "-"),
        ("source deleted", count(report.gone)),
        ("refused", count(report.refused)),
        ("beyond --limit", count(report.beyond_limit)),
        ("sent" if is_sent else "would be sent", f"{count(report.sent if is_sent else report.chosen)}"),
        ("bytes", size(report.bytes)),
        ("new deadline", _promise(settings, sla_s)),
        ("estimated cost", amount(report.cost if report.chosen > report.unpriced else None) + unpriced),
    ]
    console.print(facts(told))
    if not is_sent and report.chosen:
        console.print("\nnothing was sent; --yes sends")
