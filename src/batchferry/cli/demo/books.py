"""The books of a demo, read from the topics alone: every record, every outcome, every price, and what they must say."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import orjson

from batchferry.cli.demo.questions import EXPECT, INTENT
from batchferry.domain.ids import parse_wire_id
from batchferry.domain.ledger import Lane
from batchferry.domain.money import PICODOLLARS
from batchferry.domain.retry import SYNC_TRIES
from batchferry.domain.rows import RowClass

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from batchferry.config import Settings
    from batchferry.ports import KafkaPort, LogReader, Record

SHOWN = 5
"""Examples of one fault."""
_ANSWERS: tuple[tuple[str | int, ...], ...] = (
    ("choices", 0, "message", "content"),
    ("content", 0, "text"),
    ("candidates", 0, "content", "parts", 0, "text"),
)
"""Where the text of an answer stands: OpenAI and its kin, Anthropic, Gemini."""
_LOST_ON_THE_WAY = (RowClass.MISSING.value, RowClass.UNREADABLE.value)
"""Classes of rows the provider has run and been paid for, and whose answer did not come."""

Place = tuple[int, int]
"""Input partition and offset."""


class Check(NamedTuple):
    """One promise and whether it was kept."""

    promise: str
    holds: bool
    detail: str = ""


class _Asked(NamedTuple):
    custom_id: str | None
    expect: tuple[str, ...]
    intent: str | None


class _Named(msgspec.Struct, gc=False):
    custom_id: str


class _Event(msgspec.Struct, gc=False):
    data: _Named


_decode_named = msgspec.json.Decoder(_Named).decode
_decode_event = msgspec.json.Decoder(_Event).decode


@dataclass(slots=True)
class Books:
    """Everything counted."""

    records: int = 0
    outcomes: int = 0
    succeeded: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    flags: Counter[str] = field(default_factory=Counter)
    without: list[Place] = field(default_factory=list)
    doubled: list[Place] = field(default_factory=list)
    strangers: list[Place] = field(default_factory=list)
    wrong_ids: list[Place] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)
    """From the record to the sealing of its first batch, in the service's time."""
    spans_s: list[float] = field(default_factory=list)
    """From the record to the landing of the answer."""
    met: int = 0
    missed: int = 0
    sent_again: Counter[str] = field(default_factory=Counter)
    """Rows that travelled again, by the class that was the reason."""
    answered: set[str] = field(default_factory=set)
    """Wire ids whose answers were published, of rows that were in a batch."""
    sync_answered: int = 0
    """Answers of the sync lane that were published."""
    waves: set[str] = field(default_factory=set)
    given_up: set[str] = field(default_factory=set)
    """Wire ids of records that failed because their answer did not come."""
    submissions: dict[Place, int] = field(default_factory=dict)
    """The submission that ended each record."""
    paid: int = 0
    listed: int = 0
    """Picodollars."""
    unpriced: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    labelled: int = 0
    agreeing: int = 0
    """Answers that name the data set's own label, of those that could."""
    batches: set[str] = field(default_factory=set)
    bill: Mapping[str, int] | None = None
    """How often each wire id was paid in a batch."""
    sync_billed: int = 0
    """Calls of the sync lane that were paid."""

    @property
    def all_failed(self) -> int:
        """Failures of every class."""
        return sum(self.failed.values())

    def checks(self) -> list[Check]:
        """Every promise with its verdict."""
        return [
            Check("every record has an outcome", not self.without, _places(self.without)),
            Check("no record has two", not self.doubled, _places(self.doubled)),
            Check("no outcome without a record", not self.strangers, _places(self.strangers)),
            Check(
                "records in = succeeded + failed",
                self.records == self.succeeded + self.all_failed,
                f"{self.records} = {self.succeeded} + {self.all_failed}",
            ),
            Check("every custom_id came back as it was", not self.wrong_ids, _places(self.wrong_ids)),
            Check("odd and bad records ended as they must", not self.unexpected, "; ".join(self.unexpected[:SHOWN])),
            *self._bill_checks(),
        ]

    def _bill_checks(self) -> list[Check]:
        """The provider's bill against the outcomes: a row runs once, and again only when its answer did not come."""
        if self.bill is None:
            return [Check("the provider's bill agrees", holds=False, detail="the provider does not answer")]
        twice = sum(paid > 1 for paid in self.bill.values())
        unbilled = sum(self.bill.get(wire_id, 0) != 1 for wire_id in self.answered)
        lost = unexplained = 0
        for wire_id, paid in self.bill.items():
            if not paid or wire_id in self.answered:
                continue
            wire = parse_wire_id(wire_id)
            last = 0 if wire is None else self.submissions.get((wire.partition, wire.offset), 0)
            # An answer that was paid and not published is explained by a later submission of the same record, or by a
            # failure that says so (its answer was missing or not readable to the end).
            if wire is not None and (wire.submission < last or wire_id in self.given_up):
                lost += 1
            else:
                unexplained += 1
        sync_again = self.sent_again[SYNC_TRIES] + self.all_failed
        sync_holds = self.sync_answered <= self.sync_billed <= self.sync_answered + sync_again
        sync_detail = f"{self.sync_billed} billed, {self.sync_answered} published"
        return [
            Check("every answer of the sync lane was billed once", sync_holds, sync_detail),
            Check("no submission was billed twice", twice == 0, f"{twice} rows" if twice else ""),
            Check("every published answer was billed once", unbilled == 0, f"{unbilled} were not" if unbilled else ""),
            Check(
                "every other bill is for an answer that never came",
                unexplained == 0,
                f"{unexplained} are not" if unexplained else f"{lost} answers lost or late, asked for again",
            ),
        ]


async def read_books(
    kafka: KafkaPort, settings: Settings, bill: Mapping[str, int] | None, sync_billed: int = 0
) -> Books:
    """Read input and outputs from their start (committed records only) and put everything together.

    Raises:
        KafkaUnavailable: a topic could not be read.
    """
    books = Books(bill=bill, sync_billed=sync_billed)
    topics = settings.topics
    reader = kafka.reader()
    admin = await kafka.admin()
    try:
        names = [topics.requests, topics.results, *dict.fromkeys((topics.failures, topics.review_topic))]
        found = await admin.describe(names)
        counts = {name: 0 if one is None else one.partitions for name, one in found.items()}
        await reader.start()
        asked: dict[Place, _Asked] = {}
        async for record in _all(reader, topics.requests, counts[topics.requests]):
            asked[record.partition, record.offset] = _asked(record)
        seen: set[Place] = set()
        for name in names[1:]:
            async for record in _all(reader, name, counts[name]):
                _book(books, orjson.loads(record.value or b"{}"), asked, seen)
    finally:
        await reader.stop()
        await admin.close()
    books.records = len(asked)
    books.without = sorted(asked.keys() - seen)
    return books


async def _all(reader: LogReader, topic: str, partitions: int) -> AsyncIterator[Record]:
    for partition in range(partitions):
        async for records in reader.read_to_end(topic, partition):
            for record in records:
                yield record


def _asked(record: Record) -> _Asked:
    headers = {name: value or b"" for name, value in record.headers}
    custom_id = None
    for decode in (_decode_named, _decode_event):
        try:
            named = decode(record.value or b"")
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
            continue
        custom_id = named.data.custom_id if isinstance(named, _Event) else named.custom_id
        break
    expect = headers.get(EXPECT, b"succeeded|failed").decode()
    intent = headers.get(INTENT)
    return _Asked(custom_id, tuple(expect.split("|")), None if intent is None else intent.decode())


def _book(books: Books, outcome: Mapping[str, Any], asked: Mapping[Place, _Asked], seen: set[Place]) -> None:
    source = outcome["source"]
    place = (source["partition"], source["offset"])
    record = asked.get(place)
    books.outcomes += 1
    if record is None:
        books.strangers.append(place)
        return
    if place in seen:
        books.doubled.append(place)
        return
    seen.add(place)
    succeeded = outcome["status"] == "succeeded"
    ended = _ended(outcome)
    if succeeded:
        books.succeeded += 1
        books.flags.update(outcome["flags"])
        _compare_label(books, outcome, record)
    else:
        books.failed[outcome["error"]["class"]] += 1
    if outcome["custom_id"] != record.custom_id and not (ended[0] == "bad_record" and outcome["custom_id"] is None):
        books.wrong_ids.append(place)
    if not set(ended) & set(record.expect):
        books.unexpected.append(f"{record.custom_id or place}: wanted {'|'.join(record.expect)}, got {ended[-1]}")
    _book_times(books, outcome)
    _book_money(books, outcome)
    attempts: Mapping[str, int] = outcome.get("attempts") or {}
    for row_class, times in attempts.items():
        books.sent_again[row_class] += times
    wire_id = outcome["wire_id"]
    if wire_id is not None:
        books.submissions[place] = outcome["submission"]
        if succeeded and outcome["batch"]["lane"] == Lane.SYNC.value:
            books.sync_answered += 1
        elif succeeded:
            books.answered.add(wire_id)
        elif ended[0] in _LOST_ON_THE_WAY:
            books.given_up.add(wire_id)


def _ended(outcome: Mapping[str, Any]) -> Sequence[str]:
    """The words under which this end may be expected."""
    if outcome["status"] == "succeeded":
        return ("succeeded",)
    row_class, code = outcome["error"]["class"], outcome["error"]["code"]
    if row_class == RowClass.BAD_RECORD.value:
        return row_class, f"{row_class}/{code}"
    return row_class, "failed"


def _compare_label(books: Books, outcome: Mapping[str, Any], record: _Asked) -> None:
    if record.intent is None:
        return
    books.labelled += 1
    books.agreeing += _answer(outcome["response"]["body"]) == record.intent


def _answer(body: Any) -> str | None:
    """The first text of an answer, in any family's shape."""
    for path in _ANSWERS:
        found = body
        try:
            for step in path:
                found = found[step]
        except (KeyError, TypeError, IndexError):
            continue
        return found if isinstance(found, str) else None
    return None


def _book_times(books: Books, outcome: Mapping[str, Any]) -> None:
    if outcome["deadline_met"] is True:
        books.met += 1
    elif outcome["deadline_met"] is False:
        books.missed += 1
    batch = outcome["batch"] or {}
    if batch.get("batch_id"):
        (books.waves if batch["lane"] == Lane.SYNC.value else books.batches).add(batch["batch_id"])
    t0 = _at(outcome["t0"])
    sealed, landed = _at(batch.get("sealed_at")), _at(batch.get("landed_at"))
    if t0 is None:
        return
    if sealed is not None and outcome["submission"] == 1 and batch["lane"] == Lane.BATCH.value:
        books.waits_s.append((sealed - t0).total_seconds())
    if landed is not None:
        books.spans_s.append((landed - t0).total_seconds())


def _book_money(books: Books, outcome: Mapping[str, Any]) -> None:
    usage = outcome.get("usage")
    if usage is not None:
        books.input_tokens += usage["input_tokens"]
        books.output_tokens += usage["output_tokens"]
    cost = outcome.get("cost")
    if cost is not None:
        books.paid += _picodollars(cost["usd"])
        books.listed += _picodollars(cost["sync_usd"])
    elif outcome["status"] == "succeeded":
        books.unpriced += 1


def _picodollars(usd: str) -> int:
    """Exact: the amount is a plain decimal with at most twelve places."""
    whole, _, part = usd.partition(".")
    return int(whole) * PICODOLLARS + int(part.ljust(12, "0"))


def _at(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def _places(places: Sequence[Place]) -> str:
    if not places:
        return ""
    shown = ", ".join(f"{partition}@{offset}" for partition, offset in places[:SHOWN])
    return f"{len(places)} records: {shown}" + (", ..." if len(places) > SHOWN else "")
