"""``batchferry report``: what was run, what it cost and what it saved, from the topics alone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
import typer

from batchferry.cli.console import (
    cell,
    count,
    counts_text,
    facts,
    fail,
    instant,
    money,
    out,
    print_json,
    rows,
    table,
    usd,
    wants_json,
)
from batchferry.cli.errors import TopicMissing
from batchferry.cli.exits import Exit
from batchferry.cli.options import ConfigOption, JsonOption, load
from batchferry.domain.envelope import EventKind
from batchferry.domain.money import parse_usd
from batchferry.domain.offsets import OffsetSet
from batchferry.domain.rows import RowClass
from batchferry.domain.times import parse_duration_s

if TYPE_CHECKING:
    from batchferry.config import Settings
    from batchferry.ports import KafkaPort, LogReader, Record

GROUPS = ("day", "lane", "account", "model")
ANSWERED = frozenset(
    {
        RowClass.SUCCEEDED,
        RowClass.CONTENT_FILTERED,
        RowClass.TOO_LONG,
        RowClass.INVALID_REQUEST,
        RowClass.MODEL_UNAVAILABLE,
        RowClass.TRANSIENT,
        RowClass.ACCOUNT,
        RowClass.UNREADABLE,
    }
)
"""Classes of rows that the provider answered, well or badly; the others it never ran, or nobody knows."""
_PAID = frozenset({RowClass.SUCCEEDED})
"""Classes of rows that are paid for wherever an event says nothing of their price."""
_LANDED = b'"landed"'
MAX_OFFSET_DIGITS = 19
"""An offset has 63 bits."""

Group = tuple[str, ...]
T = TypeVar("T")


class _Batch(msgspec.Struct, gc=False):
    batch_id: str | None = None
    account: str = ""
    model: str = ""
    lane: str = "batch"


class _Event(msgspec.Struct, gc=False):
    kind: str
    event_id: str
    at: Annotated[datetime, msgspec.Meta(tz=True)]
    batch: _Batch | None = None
    lane: str | None = None
    rows: int | None = None
    classes: dict[str, int] = {}
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    usd: str | None = None
    sync_usd: str | None = None
    unpriced_rows: int | None = None
    unknown_rows: int | None = None


class _Error(msgspec.Struct, gc=False):
    class_: str = msgspec.field(name="class", default="")


class _Outcome(msgspec.Struct, gc=False):
    outcome_id: str
    status: str
    deadline_met: bool | None = None
    error: _Error | None = None


_decode_event = msgspec.json.Decoder(_Event).decode
_decode_outcome = msgspec.json.Decoder(_Outcome).decode


@dataclass(slots=True)
class Sums:
    """What the lots of one group came to."""

    lots: int = 0
    """Parts of batches (one an input partition), and waves of the sync lane."""
    batches: set[bytes] = field(default_factory=set)
    rows: int = 0
    """Rows that were sent: a row that travelled twice counts twice."""
    classes: Counter[str] = field(default_factory=Counter)
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    cost: int = 0
    """Picodollars of the rows whose price is known."""
    sync_cost: int = 0
    unpriced_rows: int = 0
    """Rows that were answered, and whose price is not known."""
    unknown_rows: int = 0
    """Rows whose answers nobody read (of batches that do not say what they cost, or of calls in the sync lane that a
    crash cut off): perhaps paid, and in no sum."""

    def add(self, other: Sums) -> None:
        """Put another group's sums in."""
        self.lots += other.lots
        self.batches |= other.batches
        self.rows += other.rows
        self.classes.update(other.classes)
        self.input_tokens += other.input_tokens
        self.output_tokens += other.output_tokens
        self.cached_tokens += other.cached_tokens
        self.cost += other.cost
        self.sync_cost += other.sync_cost
        self.unpriced_rows += other.unpriced_rows
        self.unknown_rows += other.unknown_rows

    @property
    def answered(self) -> int:
        """Rows that the provider answered, well or badly."""
        return sum(number for name, number in self.classes.items() if name in ANSWERED)

    @property
    def succeeded(self) -> int:
        """Rows that succeeded."""
        return self.classes[RowClass.SUCCEEDED.value]

    def as_json(self) -> dict[str, object]:
        """For ``--json``: exact decimals; the whole cost is null as soon as one row's price is not known."""
        is_known = not self.unpriced_rows
        return {
            "batches": len(self.batches),
            "rows": self.rows,
            "answered_rows": self.answered,
            "classes": dict(self.classes),
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "cached_tokens": self.cached_tokens,
            "cost_usd": usd(self.cost) if is_known else None,
            "sync_cost_usd": usd(self.sync_cost) if is_known else None,
            "saving_usd": _signed(self.sync_cost - self.cost) if is_known else None,
            "priced": {
                "cost_usd": usd(self.cost),
                "sync_cost_usd": usd(self.sync_cost),
                "saving_usd": _signed(self.sync_cost - self.cost),
            },
            "unpriced_rows": self.unpriced_rows,
            "unknown_rows": self.unknown_rows,
        }


@dataclass(slots=True)
class Outcomes:
    """What requests came to; each counts once, however often its outcome is read."""

    succeeded: int = 0
    failed: int = 0
    split: int = 0
    """Requests that were cut: they go on as requests of their own."""
    classes: Counter[str] = field(default_factory=Counter)
    """Of those that failed."""
    met: int = 0
    missed: int = 0
    without_deadline: int = 0
    """Outcomes without a deadline: of a record that broke a rule, say."""
    repeated: int = 0
    """Outcomes read again; they count nowhere else."""
    seen: dict[str, OffsetSet] = field(default_factory=dict)
    """Input offsets with an outcome, by ledger and input partition: at most two bytes an offset."""

    def add(self, outcome: _Outcome) -> bool:
        """Count one outcome; False when its id is none of ours."""
        place, _, offset_text = outcome.outcome_id.rpartition("-")
        if not (offset_text.isascii() and offset_text.isdecimal() and len(offset_text) < MAX_OFFSET_DIGITS):
            return False
        known = self.seen.setdefault(place, OffsetSet())
        offset = int(offset_text)
        if offset in known:
            self.repeated += 1
            return True
        known.add(offset)
        if outcome.status == "succeeded":
            self.succeeded += 1
        elif outcome.status == "split":
            self.split += 1
        else:
            self.failed += 1
            self.classes[outcome.error.class_ if outcome.error is not None else outcome.status] += 1
        if outcome.deadline_met is None:
            self.without_deadline += 1
        elif outcome.deadline_met:
            self.met += 1
        else:
            self.missed += 1
        return True

    def as_json(self) -> dict[str, object]:
        """For ``--json``."""
        return {
            "requests": sum(len(offsets) for offsets in self.seen.values()),
            "succeeded": self.succeeded,
            "failed": self.failed,
            "split": self.split,
            "classes": dict(self.classes),
            "deadlines": {"met": self.met, "missed": self.missed, "none": self.without_deadline},
            "repeated": self.repeated,
        }


@dataclass(slots=True)
class Span:
    """A stretch of time; None: open on that side. ``since`` is in it, ``until`` is not. Aware UTC."""

    since: datetime | None = None
    until: datetime | None = None

    def has(self, at: datetime) -> bool:
        """Whether an instant lies in it."""
        return (self.since is None or at >= self.since) and (self.until is None or at < self.until)

    @property
    def is_open(self) -> bool:
        """Whether every instant lies in it."""
        return self.since is None and self.until is None


@dataclass(slots=True)
class Report:
    """Everything that was found."""

    by: Sequence[str]
    span: Span
    groups: dict[Group, Sums] = field(default_factory=dict)
    outcomes: Outcomes | None = None
    repeated_events: int = 0
    foreign: int = 0
    """Records of services with another input topic, which share these topics."""
    unreadable: int = 0
    """Records of these topics that are not ours, or too odd to be read."""
    cut: list[str] = field(default_factory=list)
    """Topics that have deleted their oldest records."""
    absent: list[str] = field(default_factory=list)
    """Outcome topics that do not exist."""

    @property
    def total(self) -> Sums:
        """All groups together."""
        total = Sums()
        for sums in self.groups.values():
            total.add(sums)
        return total

    def add(self, event: _Event) -> None:
        """Count one landed lot.

        Raises:
            ValueError: an amount is no decimal.
        """
        batch = event.batch or _Batch()
        lane = event.lane or batch.lane
        named = {
            "day": event.at.astimezone(UTC).date().isoformat(),
            "lane": lane,
            "account": batch.account,
            "model": batch.model,
        }
        one = Sums(
            1,
            set() if batch.batch_id is None else {_digest(batch.batch_id)},
            event.rows or 0,
            Counter(event.classes),
            event.input_tokens or 0,
            event.output_tokens or 0,
            event.cached_tokens or 0,
            unknown_rows=event.unknown_rows or 0,
        )
        if event.usd is not None and event.sync_usd is not None:
            one.cost, one.sync_cost = parse_usd(event.usd), parse_usd(event.sync_usd)
            one.unpriced_rows = event.unpriced_rows or 0
        elif event.unpriced_rows is not None:
            one.unpriced_rows = event.unpriced_rows
        else:
            paid = sum(number for name, number in one.classes.items() if name in _PAID)
            one.unpriced_rows = paid or int(bool(one.input_tokens or one.output_tokens))
        self.groups.setdefault(tuple(named[name] for name in self.by), Sums()).add(one)

    def as_json(self) -> dict[str, object]:
        """For ``--json``."""
        return {
            "since": self.span.since,
            "until": self.span.until,
            "groups": [
                {**dict(zip(self.by, names, strict=True)), **sums.as_json()}
                for names, sums in sorted(self.groups.items())
            ],
            "total": self.total.as_json(),
            "outcomes": None if self.outcomes is None else self.outcomes.as_json(),
            "repeated_events": self.repeated_events,
            "foreign_records": self.foreign,
            "unreadable_records": self.unreadable,
            "notes": self.notes(),
        }

    def notes(self) -> list[str]:
        """What a reader must know to judge the numbers."""
        total = self.total
        told = []
        if not self.groups:
            told.append("no batch has ended in this time; those under way are in no sum, see 'batchferry status'")
        if total.unpriced_rows:
            told.append(
                f"the price of {count(total.unpriced_rows)} rows is not known: a cost with a + is that of the others"
            )
        if total.unknown_rows:
            told.append(f"{count(total.unknown_rows)} rows have answers that nobody read: perhaps paid, and in no sum")
        told += [f"{topic} has deleted its oldest records: what they said is missing here" for topic in self.cut]
        told += [f"topic {topic} does not exist" for topic in self.absent]
        if self.foreign:
            told.append(f"{count(self.foreign)} records speak about other input topics and are left out")
        if self.unreadable:
            told.append(f"{count(self.unreadable)} records could not be read as ours and are left out")
        return told


def report(
    config: ConfigOption = None,
    by: Annotated[
        str, typer.Option(metavar="NAMES", help="Group by these, with commas: day (UTC), lane, account, model.")
    ] = ",".join(GROUPS),
    since: Annotated[
        str | None, typer.Option(help="From then on: 7d or 36h ago, or an ISO 8601 instant or day (UTC).")
    ] = None,
    until: Annotated[str | None, typer.Option(help="Before then; written the same way.")] = None,
    outcomes: Annotated[
        bool, typer.Option("--outcomes/--no-outcomes", help="Also read every outcome: how they ended, and when.")
    ] = True,
    as_json: JsonOption = None,
) -> None:
    """Show what was run, what it cost, what it would have cost outside a batch, and what was saved.

    Reads the events topic, and with --outcomes the results and failures; the service need not run. A lot counts on the
    day it landed. Rows whose price is not known are told apart, never counted as nothing.
    """
    names = tuple(dict.fromkeys(name.strip() for name in by.split(",") if name.strip()))
    if not names or not set(names) <= set(GROUPS):
        raise typer.BadParameter(f"{by!r}: name some of {', '.join(GROUPS)}", param_hint="--by")
    settings = load(config, keys_needed=False)
    from batchferry import app  # noqa: PLC0415 - see run

    now = app.build_clock(settings).now()
    span = Span(_instant(since, now, "--since"), _instant(until, now, "--until"))

    async def work() -> Report:
        kafka = app.build_kafka(settings)
        try:
            return await read_report(kafka, settings, Report(names, span), outcomes=outcomes)
        finally:
            await kafka.aclose()

    made = asyncio.run(work())
    if wants_json(as_json):
        print_json(made.as_json())
    else:
        _show(made)


async def read_report(kafka: KafkaPort, settings: Settings, into: Report, *, outcomes: bool) -> Report:
    """Read the topics into a report; each is streamed, with memory of 8 bytes and a set's slot for a landed lot.

    Raises:
        TopicMissing: there is no events topic.
        KafkaUnavailable: no broker answered, or the end of a topic cannot be reached.
    """
    topics = settings.topics
    ends = list(dict.fromkeys([topics.results, topics.failures, topics.review_topic])) if outcomes else []
    admin = await kafka.admin()
    try:
        found = await admin.describe([topics.events, *ends])
    finally:
        await admin.close()
    partitions = {topic: one.partitions for topic, one in found.items() if one is not None}
    if topics.events not in partitions:
        raise TopicMissing(
            f"topic {topics.events} does not exist; 'batchferry run' makes it, or correct the topics settings"
        )
    into.absent = [topic for topic in ends if topic not in partitions]
    reader = kafka.reader()
    await reader.start()
    try:
        seen: set[bytes] = set()
        source = f"/batchferry/{topics.requests}".encode()
        for partition in await _partitions(reader, topics.events, partitions[topics.events], into):
            async for records in reader.read_to_end(topics.events, partition):
                _take_events(records, into, seen, source)
        if outcomes:
            into.outcomes = Outcomes()
            for topic in ends:
                for partition in await _partitions(reader, topic, partitions.get(topic, 0), into):
                    async for records in reader.read_to_end(topic, partition):
                        _take_outcomes(records, into, into.outcomes, source)
    finally:
        await reader.stop()
    return into


async def _partitions(reader: LogReader, topic: str, number: int, into: Report) -> list[int]:
    """Those with records in them; a topic whose log no longer begins at 0 is noted."""
    if not number:
        return []
    bounds = await reader.bounds(topic, range(number))
    if any(start > 0 for start, _ in bounds.values()):
        into.cut.append(topic)
    return [partition for partition, (start, end) in sorted(bounds.items()) if end > start]


def _take_events(records: Iterable[Record], into: Report, seen: set[bytes], source: bytes) -> None:
    for record in records:
        if record.value is None or _LANDED not in record.value:
            continue
        if not _is_from(record, source):
            into.foreign += 1
            continue
        event = _read(_decode_event, record.value)
        if event is None:
            into.unreadable += 1
            continue
        if event.kind != EventKind.LANDED.value or not into.span.has(event.at):
            continue
        known_by = _digest(event.event_id)
        if known_by in seen:
            into.repeated_events += 1
            continue
        seen.add(known_by)
        try:
            into.add(event)
        except ValueError:
            into.unreadable += 1


def _take_outcomes(records: Iterable[Record], into: Report, outcomes: Outcomes, source: bytes) -> None:
    for record in records:
        if not into.span.is_open and not into.span.has(_time_of(record)):
            continue
        if not _is_from(record, source):
            into.foreign += 1
            continue
        outcome = None if record.value is None else _read(_decode_outcome, record.value)
        if outcome is None or not outcomes.add(outcome):
            into.unreadable += 1


def _is_from(record: Record, source: bytes) -> bool:
    """Whether a message is of this input topic; one that does not say is taken for it."""
    return next((value for name, value in record.headers if name == "ce_source"), source) == source


def _time_of(record: Record) -> datetime:
    """When the outcome was made: its CloudEvents time, for the record's own is the broker's or a faster clock's."""
    for name, value in record.headers:
        if name == "ce_time" and value:
            try:
                at = datetime.fromisoformat(value.decode())
            except ValueError:
                break
            if at.tzinfo is not None:
                return at
    return datetime.fromtimestamp(max(0, record.timestamp) / 1000, UTC)


def _read(decode: Callable[[bytes], T], value: bytes) -> T | None:
    try:
        return decode(value)
    except (ValueError, RecursionError):
        return None


def _digest(text: str) -> bytes:
    return blake2b(text.encode(errors="replace"), digest_size=8).digest()


def _instant(text: str | None, now: datetime, option: str) -> datetime | None:
    """An instant, a day, or a length of time before ``now``."""
    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        try:
            return now - timedelta(seconds=parse_duration_s(text))
        except (ValueError, OverflowError):
            fail(
                Exit.USAGE, f"{option}: {text!r} is neither a length of time such as 7d nor an ISO 8601 instant or day"
            )
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)


# ------------------------------------------------------------------------------------------------- for people


def _show(made: Report) -> None:
    console = out()
    if not made.span.is_open:
        since, until = made.span.since, made.span.until
        console.print(cell(f"from {instant(since) or 'the beginning'} to {instant(until) or 'now'}\n"))
    if made.groups:
        numbers = ("batches", "rows", "cost", "outside", "saved")
        shown = table(*made.by, *numbers, right=numbers)
        rows(shown, ((*names, *_figures(sums)) for names, sums in sorted(made.groups.items())))
        if len(made.groups) > 1:
            shown.add_section()
            rows(shown, [("total", *[""] * (len(made.by) - 1), *_figures(made.total))])
        console.print(shown)
        console.print()
    total, told = made.total, []
    if made.groups:
        told += [
            ("rows sent", f"{count(total.rows)}, each try counted; the provider answered {count(total.answered)}"),
            ("how they ended", counts_text(total.classes)),
            ("input tokens", f"{count(total.input_tokens)}, {count(total.cached_tokens)} of them cached"),
            ("output tokens", count(total.output_tokens)),
        ]
    console.print(facts(told + ([] if made.outcomes is None else _outcome_facts(made.outcomes))))
    for note in made.notes():
        console.print(cell(f"note: {note}"))


def _outcome_facts(outcomes: Outcomes) -> list[tuple[str, str]]:
    judged = outcomes.met + outcomes.missed
    share = f", {outcomes.met / judged:.2%} met" if judged else ""
    told = [
        ("requests succeeded", count(outcomes.succeeded)),
        ("requests failed", f"{count(outcomes.failed)}{_listed(outcomes.classes)}"),
        ("deadlines", f"{count(outcomes.met)} met, {count(outcomes.missed)} missed{share}"),
    ]
    if outcomes.split:
        told.append(("requests split", count(outcomes.split)))
    if outcomes.repeated:
        told.append(("outcomes read again", count(outcomes.repeated)))
    return told


def _figures(sums: Sums) -> tuple[str, ...]:
    return (
        count(len(sums.batches)),
        count(sums.rows),
        _amount(sums.cost, sums),
        _amount(sums.sync_cost, sums),
        _amount(sums.sync_cost - sums.cost, sums),
    )


def _amount(picodollars: int, sums: Sums) -> str:
    """An amount; ``+`` where rows of unknown price come on top, and a word where there are no others."""
    if not sums.unpriced_rows:
        return money(picodollars) if picodollars >= 0 else f"-{money(-picodollars)}"
    return f"{money(picodollars)} +" if sums.sync_cost else "unknown"


def _signed(picodollars: int) -> str | None:
    return usd(picodollars) if picodollars >= 0 else f"-{usd(-picodollars)}"


def _listed(classes: Counter[str]) -> str:
    return f" ({counts_text(classes)})" if classes else ""
