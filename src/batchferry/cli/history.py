"""The story of one request, put together from the topics: when it came, how it travelled, where it is, how it ended.

Everything is read from Kafka; no running service is asked. What is searched:

- the outcome topics, by a text search of each message before any is taken apart;
- the unsettled part of the input topic, from the settled watermark on;
- the batch events: ``submitted`` and ``retried`` events name their rows by offset, the others their batch;
- the ledger, which alone says where a row is now.

Prompts, answers and the provider's own messages are only told when they are asked for.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from batchferry.cli.console import count, counts_text, instant, safe
from batchferry.cli.reading import ended, read_records
from batchferry.domain.batchkey import BatchKey
from batchferry.domain.control import Hold, account_scope, key_scope, shape_scope
from batchferry.domain.envelope import EventKind
from batchferry.domain.ledger import Lane, Lot, LotState
from batchferry.domain.offsets import OffsetSet
from batchferry.domain.requests import BadRecord, Request, parse_request
from batchferry.domain.retry import DEFAULT_POLICIES
from batchferry.domain.rows import RowClass
from batchferry.domain.shapes import fingerprint
from batchferry.domain.times import first_seen_ms, from_ms, hours

if TYPE_CHECKING:
    from batchferry.cli.standing import Standing
    from batchferry.config import Settings
    from batchferry.domain.partition import PartitionLedger
    from batchferry.ports import KafkaPort, LogReader, Record

MAX_ROWS = 20
"""Rows of one custom_id that are told; what is beyond is counted."""
MAX_STEPS = 200
"""Steps of one row's history that are kept, the newest."""
_PLACE = re.compile(r"(\d{1,9}):(\d{1,19})")
_LONG_PLACE = re.compile(r"([A-Za-z0-9._-]{1,249})-(\d{1,9})@(\d{1,19})")
_HELD = frozenset({EventKind.HELD.value, EventKind.RELEASED.value})
_NAMING = frozenset({EventKind.SUBMITTED.value, EventKind.RETRIED.value, EventKind.RESCUED.value})
_OURS = frozenset(RowClass) - DEFAULT_POLICIES.keys() - {RowClass.SUCCEEDED}
"""Classes whose message is in our own words, which never quote a record."""

WHY: Mapping[RowClass, str] = {
    RowClass.SUCCEEDED: "the provider answered",
    RowClass.CONTENT_FILTERED: "the provider's content filter blocked it; such a row is never asked again",
    RowClass.TOO_LONG: "it is longer than the model's context",
    RowClass.INVALID_REQUEST: "the provider refused it for what it says; the same request would be refused again",
    RowClass.MODEL_UNAVAILABLE: "the model does not exist, or the account may not use it",
    RowClass.TRANSIENT: "the provider could not run it, though nothing is wrong with it",
    RowClass.UNREADABLE: "the provider's result line could not be read",
    RowClass.EXPIRED: "the provider did not run it before its window closed",
    RowClass.CANCELLED: "its batch was cancelled before it was run",
    RowClass.MISSING: "the provider's complete result files do not name it",
    RowClass.ACCOUNT: "the account was refused (quota, billing or rights)",
    RowClass.BATCH_FAILED: "the provider refused its whole batch",
    RowClass.RETENTION: "the input topic deleted it, or was about to, before it was answered",
    RowClass.OUTCOME_TOO_LARGE: "its answer is larger than the results topic takes",
    RowClass.MAX_AGE: "it was older than an answer is still wanted for",
    RowClass.LATE: "no batch could end before its deadline, and its route runs no such rows",
    RowClass.SYNC_UNKNOWN: "nobody read the answer of its call in the sync lane, and its route calls only once",
    RowClass.SPLIT: "it was too long and was cut into parts, which are requests of their own",
    RowClass.DUPLICATE: "the same request was waiting already; the first one's outcome answers both",
    RowClass.BAD_RECORD: "the record breaks a rule of the input and never reached a batch",
}


class Place(NamedTuple):
    """Where a request stands on the input topic."""

    partition: int
    offset: int


class Step(NamedTuple):
    """Something that happened to a row."""

    at: datetime | None
    what: str
    told: str


@dataclass(slots=True)
class Match:
    """A row that was looked for, with its outcome if that was found."""

    place: Place
    outcome: Mapping[str, Any] | None = None
    topic: str = ""
    published_at: datetime | None = None


@dataclass(slots=True)
class Found:
    """The rows that fit."""

    matches: list[Match] = field(default_factory=list)
    more: int = 0
    """Further rows that fit and are not told."""


@dataclass(slots=True)
class Story:
    """One row, told."""

    topic: str
    place: Place
    custom_id: str | None = None
    key: BatchKey | None = None
    shape: str = ""
    """The kind of prompt, while the input topic has the record; a canary's hold names it."""
    route: str = ""
    produced_at: datetime | None = None
    t0: datetime | None = None
    ship_by: datetime | None = None
    deadline: datetime | None = None
    steps: list[Step] = field(default_factory=list)
    state: str = ""
    """settled, at provider, on its way, waiting, open, not read, gone or absent."""
    now: str = ""
    """Where it is now, in a sentence."""
    why: str = ""
    """Why it waits, or why it ended as it did."""
    holds: list[Hold] = field(default_factory=list)
    outcome: dict[str, Any] | None = None
    """How it ended; without a word of the answer unless that was asked for."""

    @property
    def where(self) -> str:
        """The record, as messages name it."""
        return f"{self.topic}-{self.place.partition}@{self.place.offset}"

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        return {
            "source": {"topic": self.topic, "partition": self.place.partition, "offset": self.place.offset},
            "custom_id": self.custom_id,
            "state": self.state,
            "now": self.now,
            "why": self.why,
            "key": None if self.key is None else self.key._asdict(),
            "shape": self.shape or None,
            "key_digest": None if self.key is None else self.key.digest,
            "route": self.route or None,
            "produced_at": self.produced_at,
            "t0": self.t0,
            "ship_by": self.ship_by,
            "deadline": self.deadline,
            "holds": [
                {"scope": one.scope, "reason": one.reason, "label": one.label, "since": one.since, "until": one.until}
                for one in self.holds
            ],
            "history": [{"at": step.at, "event": step.what, "told": step.told} for step in self.steps],
            "outcome": self.outcome,
        }


def parse_place(text: str, topic: str) -> Place | None:
    """The place that a text names, as ``PARTITION:OFFSET`` or ``TOPIC-PARTITION@OFFSET``; None for other texts."""
    if (short := _PLACE.fullmatch(text)) is not None:
        return Place(int(short[1]), int(short[2]))
    if (full := _LONG_PLACE.fullmatch(text)) is not None and full[1] == topic:
        return Place(int(full[2]), int(full[3]))
    return None


# ------------------------------------------------------------------------------------------------- finding


async def find_rows(kafka: KafkaPort, settings: Settings, standing: Standing, target: Place | str) -> Found:
    """The rows at a place, or with a custom_id: settled ones by their outcome, others on the input topic.

    A custom_id need not be unique: the first ``MAX_ROWS`` are kept, the rest is counted. A settled row whose outcome
    its topic no longer has is only found by its place.

    Raises:
        KafkaUnavailable: no broker answered.
    """
    found: dict[Place, Match] = {}
    more: set[Place] = set()
    reader = kafka.reader()
    await reader.start()
    try:
        async with ended(_outcomes(kafka, reader, settings, target)) as outcomes:
            async for match in outcomes:
                if match.place in found or match.place in more:
                    continue
                if len(found) < MAX_ROWS:
                    found[match.place] = match
                else:
                    more.add(match.place)
                if isinstance(target, Place):
                    break
        if isinstance(target, Place):
            found.setdefault(target, Match(target))
        else:
            async for place in _unsettled(reader, settings, standing, target):
                if place in found or place in more:
                    continue
                if len(found) < MAX_ROWS:
                    found[place] = Match(place)
                else:
                    more.add(place)
    finally:
        await reader.stop()
    return Found([found[place] for place in sorted(found)], len(more))


async def _outcomes(
    kafka: KafkaPort, reader: LogReader, settings: Settings, target: Place | str
) -> AsyncGenerator[Match, None]:
    topics = settings.topics
    names = list(dict.fromkeys([topics.results, topics.failures, topics.review_topic]))
    admin = await kafka.admin()
    try:
        described = await admin.describe(names)
    finally:
        await admin.close()
    needle = b'"partition":%d,"offset":%d,' % target if isinstance(target, Place) else orjson.dumps(_lawful(target))
    for name in names:
        description = described[name]
        if description is None:
            continue
        partitions = list(range(description.partitions))
        if isinstance(target, Place) and target.partition in partitions:
            # An outcome usually goes to the partition its request came from.
            partitions.remove(target.partition)
            partitions.insert(0, target.partition)
        async with ended(read_records(reader, name, partitions, f"searching {name}")) as records:
            async for record in records:
                value = record.value
                if value is None or needle not in value:
                    continue
                outcome = _loaded(value)
                place = None if outcome is None else _place_of(outcome, topics.requests)
                if outcome is None or place is None:
                    continue
                if place == target or (isinstance(target, str) and outcome.get("custom_id") == _lawful(target)):
                    yield Match(place, outcome, name, from_ms(record.timestamp))


async def _unsettled(
    reader: LogReader, settings: Settings, standing: Standing, custom_id: str
) -> AsyncGenerator[Place, None]:
    from batchferry import app  # noqa: PLC0415 - see run

    rules = app.request_rules(settings)
    lawful = _lawful(custom_id)
    needles = {orjson.dumps(lawful)[1:-1], json.dumps(lawful).encode()[1:-1]}
    for one in standing.partitions:
        ledger = standing.ledgers[one.partition]
        start = max(one.log_start, one.watermark)
        if start >= one.log_end:
            continue
        what = f"searching {settings.topics.requests}"
        async for record in read_records(reader, settings.topics.requests, [one.partition], what, start):
            value = record.value
            if value is None or ledger.is_settled(record.offset):
                continue
            # Plain characters may hide behind escapes (\u0041, \/): such a value is read whole. So is base64.
            if not any(needle in value for needle in needles) and not _may_hide(value):
                continue
            parsed = parse_request(value, record.headers, rules)
            if parsed.custom_id == custom_id:
                yield Place(record.partition, record.offset)


def _may_hide(value: bytes) -> bool:
    return b"\\u00" in value or b"\\/" in value or b'"data_base64"' in value


def _lawful(custom_id: str) -> str:
    """As an outcome shows it: half a surrogate pair cannot be published."""
    return custom_id.encode(errors="replace").decode()


def _loaded(value: bytes) -> dict[str, Any] | None:
    try:
        found = orjson.loads(value)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def _place_of(outcome: Mapping[str, Any], topic: str) -> Place | None:
    source = outcome.get("source")
    if not isinstance(source, dict) or source.get("topic") != topic:
        return None
    partition, offset = source.get("partition"), source.get("offset")
    return Place(partition, offset) if isinstance(partition, int) and isinstance(offset, int) else None


# ------------------------------------------------------------------------------------------------- telling


async def tell_rows(
    kafka: KafkaPort, settings: Settings, standing: Standing, matches: Sequence[Match], *, with_answer: bool
) -> list[Story]:
    """The stories of these rows.

    Raises:
        KafkaUnavailable: no broker answered.
    """
    stories = [Story(settings.topics.requests, match.place) for match in matches]
    reader = kafka.reader()
    await reader.start()
    try:
        for story, match in zip(stories, matches, strict=True):
            await _tell_beginning(reader, settings, standing, story, match)
            _tell_end(settings, standing, story, match, with_answer=with_answer)
        await _tell_events(kafka, reader, settings, standing, list(zip(stories, matches, strict=True)))
    finally:
        await reader.stop()
    for story, match in zip(stories, matches, strict=True):
        _put_in_order(standing, story, match)
    return stories


async def _tell_beginning(
    reader: LogReader, settings: Settings, standing: Standing, story: Story, match: Match
) -> None:
    """What the record itself says, while the input topic still has it; else what its outcome remembers."""
    record = await _record_at(reader, standing, story.place)
    outcome = match.outcome or {}
    story.custom_id = outcome.get("custom_id")
    story.t0, story.deadline = _instant(outcome.get("t0")), _instant(outcome.get("deadline"))
    batch = outcome.get("batch")
    if isinstance(batch, dict):
        story.key = _key_of(batch)
    if record is not None:
        _tell_record(settings, standing, story, record)
    if story.key is None and (holder := standing.ledgers[story.place.partition].holder_of(story.place.offset)):
        story.key = holder.key
    if story.key is not None and not story.route:
        route = settings.route_for(story.key.model, story.key.endpoint)
        story.route = "" if route is None else route.name


async def _record_at(reader: LogReader, standing: Standing, place: Place) -> Record | None:
    async with ended(reader.read_offsets(standing.topic, place.partition, OffsetSet([place.offset]))) as chunks:
        async for records in chunks:
            return records[0]
    return None


def _tell_record(settings: Settings, standing: Standing, story: Story, record: Record) -> None:
    from batchferry import app  # noqa: PLC0415 - see run
    from batchferry.engine.routing import Router  # noqa: PLC0415

    if record.timestamp >= 0:
        story.produced_at = from_ms(record.timestamp)
    parsed = parse_request(record.value, record.headers, app.request_rules(settings))
    if isinstance(parsed, BadRecord):
        story.custom_id = story.custom_id or parsed.custom_id
        return
    story.custom_id = story.custom_id or parsed.custom_id
    routed = Router(settings).route(parsed)
    if isinstance(routed, BadRecord):
        return
    story.key = story.key or routed.key
    story.route = routed.route.name
    story.shape = fingerprint(parsed.body, parsed.model)
    t0_ms = first_seen_ms(record.timestamp, round(standing.at.timestamp() * 1000))
    if story.t0 is not None:
        t0_ms = round(story.t0.timestamp() * 1000)
    times = routed.plan.times(t0_ms, sla_s=parsed.sla_s, deadline_ms=_deadline_ms(parsed))
    story.t0 = story.t0 or from_ms(t0_ms)
    story.ship_by = from_ms(times.ship_by_ms)
    story.deadline = story.deadline or from_ms(times.deadline_ms)


def _deadline_ms(request: Request) -> int | None:
    return None if request.deadline is None else round(request.deadline.timestamp() * 1000)


def _key_of(batch: Mapping[str, Any]) -> BatchKey | None:
    named = [batch.get(name) for name in ("account", "endpoint", "model", "completion_window")]
    if not all(isinstance(part, str) for part in named):
        return None
    account, endpoint, model, window = map(str, named)
    return BatchKey(account, endpoint, model, window, str(batch.get("slice") or ""))


# ---------------------------------------------------------------------------------------- where it is, how it ended


def _tell_end(settings: Settings, standing: Standing, story: Story, match: Match, *, with_answer: bool) -> None:
    partition = standing.partitions[story.place.partition]
    ledger = standing.ledgers[story.place.partition]
    offset = story.place.offset
    holder = ledger.holder_of(offset)
    if story.key is not None:
        story.holds = standing.controls.standing(story.key, standing.at, story.shape)
    if match.outcome is not None:
        story.outcome = _outcome_told(match, with_answer=with_answer)
        story.state, story.now, story.why = "settled", _ending(match), _why_ended(settings, story, match.outcome)
        story.holds = []
    elif ledger.is_settled(offset):
        story.state = "settled"
        story.now = "settled; no output topic has its outcome any more"
        story.why = "what remains of it is the history below; raise retention.ms of the output topics to keep more"
        story.holds = []
    elif offset >= partition.log_end:
        story.state, story.now = "absent", f"there is no such record: the partition ends at {partition.log_end}"
    elif holder is not None:
        _tell_holder(story, holder, standing.at)
    elif offset < partition.log_start:
        story.state = "gone"
        story.now = f"deleted: the input partition begins at {partition.log_start}, and nobody had answered it"
        story.why = "the service gives it the outcome 'retention' at its next look"
    elif partition.read is not None and offset >= partition.read:
        story.state = "not read"
        story.now = f"not read yet: the service reads offset {partition.read} next"
        story.why = "the service is behind, paused by one of its limits, or down; see 'batchferry status'"
    else:
        _tell_open(story, standing.at)
    if story.holds and story.state not in {"at provider", "absent", "gone"}:
        story.why = "; ".join([*([story.why] if story.why else []), *map(_held, story.holds)])


def _tell_holder(story: Story, lot: Lot, now: datetime) -> None:
    what = "wave" if lot.lane is Lane.SYNC else "batch"
    named = f"{what} {lot.lot_id} (submission {lot.submission})"
    tries = _attempts(lot, story.place.offset)
    again = f"; it has ended before: {counts_text(tries)}" if tries else ""
    provider = ", ".join(lot.provider_batch_ids) or "no id yet"
    if lot.state is LotState.WAITING:
        story.state = "waiting"
        lane = "the sync lane" if lot.lane is Lane.SYNC else "its next batch"
        story.now = f"waits for {lane}, as submission {lot.submission}"
        later = f", not before {instant(lot.not_before)}" if lot.not_before and lot.not_before > now else ""
        story.why = f"it travels again because of {lot.seal_reason or 'an earlier end'}{later}{again}"
    elif lot.state is LotState.SUBMITTING:
        story.state = "on its way"
        story.now = f"in {named}, which is being handed to the provider"
        story.why = f"sealed {instant(lot.created_at)} because of {lot.seal_reason or '-'}{again}"
    else:
        story.state = "at provider"
        story.now = f"in {named}, at the provider as {provider} since {instant(lot.submitted_at) or '-'}"
        story.why = f"the provider has until {lot.key.completion_window} after that{again}"
        if lot.lane is Lane.SYNC:
            story.now, story.why = f"in {named} of the sync lane", f"its call is under way{again}"


def _attempts(lot: Lot, offset: int) -> dict[str, int]:
    return {row_class: times for row_class in lot.attempts if (times := lot.attempts_of(row_class, offset))}


def _tell_open(story: Story, now: datetime) -> None:
    story.state = "open"
    story.now = "waits for its first batch to leave"
    if story.ship_by is None:
        story.why = "the service has not judged it yet"
    elif story.ship_by > now:
        left = hours((story.ship_by - now).total_seconds())
        story.why = f"its batch leaves when it is full, at the latest at {instant(story.ship_by)} (in {left})"
    else:
        story.why = (
            f"its batch was due to leave at {instant(story.ship_by)}; the service is behind, down, or it is held"
        )


def _held(one: Hold) -> str:
    until = "until an operator releases it" if one.until is None else f"until {instant(one.until)}"
    return f"{one.scope} is held for '{one.reason}' since {instant(one.since)}, {until}"


def _outcome_told(match: Match, *, with_answer: bool) -> dict[str, Any]:
    outcome = match.outcome or {}
    told: dict[str, Any] = {"topic": match.topic, "published_at": match.published_at}
    names = ("status", "flags", "usage", "cost", "deadline_met", "wire_id", "submission", "attempts", "batch", "tried")
    told |= {name: outcome[name] for name in (*names, "duplicate_of", "answer", "parts") if name in outcome}
    response = outcome.get("response")
    if isinstance(response, dict):
        told["status_code"], told["request_id"] = response.get("status_code"), response.get("request_id")
    error = outcome.get("error")
    if isinstance(error, dict):
        told["error"] = {name: error.get(name) for name in ("class", "code", "http_status", "remedy")}
        if with_answer or error.get("class") in _OURS:
            told["error"]["message"] = error.get("message")
    if with_answer:
        told["response"], told["original"] = response, outcome.get("original")
    return told


def _ending(match: Match) -> str:
    outcome = match.outcome or {}
    error = outcome.get("error")
    met = {"True": "before its deadline", "False": "after its deadline"}.get(str(outcome.get("deadline_met")), "")
    how = str(outcome.get("status"))
    if how == "split":
        how = f"split into {outcome.get('parts')} parts"
    elif isinstance(error, dict):
        how = f"failed as {error.get('class')} ({error.get('code')})"
    elif outcome.get("flags"):
        how += f" ({', '.join(map(str, outcome['flags']))})"
    return " ".join(part for part in (how, f"at {instant(match.published_at)}", met, f"on {match.topic}") if part)


def _why_ended(settings: Settings, story: Story, outcome: Mapping[str, Any]) -> str:
    error = outcome.get("error")
    if outcome.get("status") == "split":
        return f"{WHY[RowClass.SPLIT]}, named {story.custom_id}#part1 and so on"
    tries = {str(name): times for name, times in (outcome.get("attempts") or {}).items() if isinstance(times, int)}
    again = f"; it had been sent again because of {counts_text(tries)}" if tries else ""
    if not isinstance(error, dict):
        return WHY[RowClass.SUCCEEDED] + again
    try:
        row_class = RowClass(str(error.get("class")))
    except ValueError:
        return f"a newer version gave it the class {error.get('class')!r}{again}"
    text = WHY[row_class]
    default = DEFAULT_POLICIES.get(row_class)
    if default is not None:
        route = settings.routes.get(story.route)
        own = None if route is None else route.policies.get(row_class)
        policy = (own or default).value
        said = f"set by route {story.route}" if own is not None else "the default"
        text += f"; policy for {row_class.value}: {policy} ({said})"
    return text + again


# ------------------------------------------------------------------------------------------------------ events


async def _tell_events(
    kafka: KafkaPort,
    reader: LogReader,
    settings: Settings,
    standing: Standing,
    told: Sequence[tuple[Story, Match]],
) -> None:
    """Add what the events topic says of these rows: first their batches are learned, then what became of those."""
    topic = settings.topics.events
    admin = await kafka.admin()
    try:
        description = (await admin.describe([topic]))[topic]
    finally:
        await admin.close()
    batches = [_batches_of(standing, story, match) for story, match in told]
    if description is None:
        return
    partitions = range(description.partitions)
    async for record in read_records(reader, topic, partitions, "reading the events"):
        if record.value is None or b'"offsets":"' not in record.value:
            continue
        event = _loaded(record.value)
        batch_id = None if event is None else _batch_id(event)
        if event is None or batch_id is None or event.get("kind") not in _NAMING:
            continue
        for (story, _), known in zip(told, batches, strict=True):
            if names_row(event, story.place):
                known.add(batch_id)
    async for record in read_records(reader, topic, partitions, "reading the events"):
        event = None if record.value is None else _loaded(record.value)
        if event is None:
            continue
        for (story, match), known in zip(told, batches, strict=True):
            if _concerns(event, story, match, known, standing.at):
                story.steps.append(Step(_instant(event.get("at")), str(event.get("kind")), event_text(event)))
                del story.steps[:-MAX_STEPS]


def _batches_of(standing: Standing, story: Story, match: Match) -> set[str]:
    """The batches that the ledger and the outcome name."""
    lots = standing.ledgers[story.place.partition].lots.values()
    known = {str(lot.lot_id) for lot in lots if story.place.offset in lot.offsets}
    batch = (match.outcome or {}).get("batch")
    if isinstance(batch, dict) and batch.get("batch_id"):
        known.add(str(batch["batch_id"]))
    return known


def names_row(event: Mapping[str, Any], place: Place) -> bool:
    """Whether an event speaks of this very row: by its offset, or in a set of them."""
    if event.get("partition") != place.partition:
        return False
    if isinstance(event.get("offset"), int):
        return bool(event["offset"] == place.offset)
    try:
        return place.offset in OffsetSet.loads(str(event.get("offsets") or ""))
    except ValueError:
        return False


def _concerns(event: Mapping[str, Any], story: Story, match: Match, batches: set[str], now: datetime) -> bool:
    kind = event.get("kind")
    if kind in _HELD or (kind == EventKind.ALARM and _batch_id(event) is None):
        key = story.key
        if key is None:
            return False
        scopes = {key.account, account_scope(key.account), key.label, key_scope(key), shape_scope(story.shape)}
        at, begun = _instant(event.get("at")), story.t0 or story.produced_at
        ended = match.published_at or now
        return event.get("scope") in scopes and at is not None and begun is not None and begun <= at <= ended
    if event.get("offsets") or isinstance(event.get("offset"), int):
        return names_row(event, story.place)
    if _batch_id(event) not in batches:
        return False
    if isinstance(event.get("partition"), int):
        return bool(event["partition"] == story.place.partition)
    partitions = event.get("partitions")
    return not isinstance(partitions, list) or story.place.partition in partitions


def _batch_id(event: Mapping[str, Any]) -> str | None:
    batch = event.get("batch")
    found = batch.get("batch_id") if isinstance(batch, dict) else None
    return found if isinstance(found, str) else None


_SHOWN_FIELDS = (
    "from_state", "to_state", "lane", "submission", "row_class", "reason", "scope", "alarm", "remedy", "rows",
    "classes", "codes", "deadline", "late_s", "waited_s", "usd", "sync_usd", "unknown_rows", "shape",
)  # fmt: skip


def event_text(event: Mapping[str, Any]) -> str:
    """An event in one line: its batch and what it says."""
    batch = event.get("batch")
    parts = []
    if isinstance(batch, dict):
        parts += [f"batch {batch['batch_id']}"] if batch.get("batch_id") else []
        parts += [str(batch["provider_batch_id"])] if batch.get("provider_batch_id") else []
    for name in _SHOWN_FIELDS:
        value = event.get(name)
        if value in (None, "", {}, []):
            continue
        if isinstance(value, dict):
            value = counts_text({str(key): number for key, number in value.items() if isinstance(number, int)})
        parts.append(f"{name} {count(value) if name == 'rows' and isinstance(value, int) else value}")
    return safe(", ".join(parts))


# ------------------------------------------------------------------------------------------------------ order


def _put_in_order(standing: Standing, story: Story, match: Match) -> None:
    """Beginning, events and lots, end: by time, and without saying twice what an event and the ledger both say."""
    said = " ".join(step.told for step in story.steps if step.what in _NAMING)
    story.steps += _lot_steps(standing.ledgers[story.place.partition], story.place.offset, said)
    if story.t0 is not None or story.produced_at is not None:
        wanted = f"due {instant(story.deadline)}" if story.deadline is not None else "without a deadline"
        leave = f", to leave by {instant(story.ship_by)}" if story.ship_by is not None else ""
        story.steps.append(Step(story.t0 or story.produced_at, "began to wait", wanted + leave))
    first = {"began to wait": 0}
    far = datetime.max.replace(tzinfo=UTC)
    story.steps.sort(key=lambda step: (step.at or far, first.get(step.what, 1)))
    if match.outcome is not None:
        story.steps.append(Step(match.published_at, "settled", story.now))


def _lot_steps(ledger: PartitionLedger, offset: int, said: str) -> Iterator[Step]:
    """The lots that name the row and that no event has told."""
    for lot in ledger.lots.values():
        if offset in lot.offsets and lot.state is not LotState.WAITING and lot.lot_id not in said:
            lane = "wave" if lot.lane is Lane.SYNC else "batch"
            yield Step(
                lot.submitted_at or lot.created_at,
                f"in a {lane}",
                safe(
                    f"batch {lot.lot_id}, submission {lot.submission}, {lot.state.value}, sealed"
                    f" {instant(lot.created_at)} because of {lot.seal_reason or '-'}"
                ),
            )


def _instant(text: object) -> datetime | None:
    if not isinstance(text, str):
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
