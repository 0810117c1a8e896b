"""The report agrees with what the topics say, counts nothing twice, and calls what is unknown unknown."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import pytest

from batchferry.cli.errors import TopicMissing
from batchferry.cli.exits import Exit
from batchferry.cli.main import call
from batchferry.cli.report import GROUPS, Report, Span, read_report
from batchferry.config import Settings
from batchferry.domain.envelope import (
    BatchFacts,
    EventKind,
    OutcomeContext,
    event_headers,
    outcome_headers,
    render_event,
    render_failure,
    render_result,
    render_split,
)
from batchferry.domain.money import format_usd, parse_usd, price_row
from batchferry.domain.provider import Usage
from batchferry.domain.rows import ResultLine, RowClass
from batchferry.ports import OutRecord, TopicDescription

LEDGER = "0123456789"
DAY = datetime(2026, 11, 15, 12, tzinfo=UTC)
EVENTS, RESULTS, FAILURES = "batch-events", "results", "failures"


class _Consumed(NamedTuple):
    topic: str
    partition: int
    offset: int
    timestamp: int
    timestamp_type: int
    key: bytes | None
    value: bytes | None
    headers: Any


class _Topics:
    """A cluster of three topics with these records; it plays port, admin and reader."""

    def __init__(self, *records: OutRecord, first_offset: int = 0, without: Sequence[str] = ()) -> None:
        self.first_offset = first_offset
        self.logs: dict[tuple[str, int], list[_Consumed]] = {
            (topic, partition): []
            for topic in (EVENTS, RESULTS, FAILURES)
            if topic not in without
            for partition in (0, 1)
        }
        for one in records:
            log = self.logs[one.topic, one.partition or 0]
            at = first_offset + len(log)
            log.append(_Consumed(one.topic, one.partition or 0, at, 0, 0, one.key, one.value, one.headers))

    async def admin(self) -> _Topics:
        return self

    def reader(self) -> _Topics:
        return self

    async def describe(self, topics: Sequence[str]) -> dict[str, TopicDescription | None]:
        return {topic: TopicDescription(topic, 2, {}) if (topic, 0) in self.logs else None for topic in topics}

    async def bounds(self, topic: str, partitions: Sequence[int]) -> dict[int, tuple[int, int]]:
        return {one: (self.first_offset, self.first_offset + len(self.logs[topic, one])) for one in partitions}

    async def read_to_end(self, topic: str, partition: int, start: int | None = None) -> AsyncIterator[list[_Consumed]]:
        log = self.logs[topic, partition]
        for at in range(0, len(log), 3):
            yield log[at : at + 3]

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def close(self) -> None: ...

    async def aclose(self) -> None: ...


def _facts(batch_id: str, lane: str = "batch", model: str = "gpt-4o-mini", account: str = "default") -> BatchFacts:
    return BatchFacts(
        account=account, provider="openai", endpoint="/v1/chat/completions", model=model, lane=lane, batch_id=batch_id
    )


def _landed(
    batch_id: str, *, at: datetime = DAY, partition: int = 0, facts: BatchFacts | None = None, **fields: Any
) -> OutRecord:
    facts = facts or _facts(batch_id)
    value = render_event(
        EventKind.LANDED,
        f"{batch_id}-landed-{partition}",
        at,
        facts,
        partition=partition,
        lane=facts.lane,
        **fields,
    )
    return OutRecord(EVENTS, batch_id.encode(), value, partition=partition % 2)


def _priced(rows: int, *, batch: bool) -> dict[str, Any]:
    row = price_row("openai", "gpt-4o-mini", Usage(1_000, 50), DAY, batch=batch)
    assert row is not None
    return {
        "rows": rows,
        "classes": {"succeeded": rows},
        "input_tokens": rows * 1_000,
        "output_tokens": rows * 50,
        "cached_tokens": 0,
        "usd": format_usd(rows * row.picodollars),
        "sync_usd": format_usd(rows * row.list_picodollars),
    }


def _outcome(
    offset: int,
    ended: str = "succeeded",
    *,
    partition: int = 0,
    met: bool | None = True,
    at: datetime = DAY,
    into: int = 0,
    ledger: str = LEDGER,
    topic: str = "requests",
) -> OutRecord:
    context = OutcomeContext(ledger_id=ledger, topic=topic, partition=partition, offset=offset, deadline_met=met)
    line = ResultLine("w", RowClass.SUCCEEDED, 200, body=b'{"status":"failed","deadline_met":false}')
    if ended == "split":
        value = render_split(context, line, 3)
    elif ended == "succeeded":
        value = render_result(context, line, None)
    else:
        value = render_failure(context, RowClass(ended), "code", "message")
    into_topic = RESULTS if ended in {"succeeded", "split"} else FAILURES
    return OutRecord(into_topic, None, value, outcome_headers(context, "succeeded", at), partition=into)


async def _report(*records: OutRecord, by: Sequence[str] = GROUPS, span: Span | None = None, **cluster: Any) -> Report:
    topics: Any = _Topics(*records, **cluster)
    return await read_report(topics, Settings(), Report(by, span or Span()), outcomes=True)


async def test_report_sums_are_exact_by_group() -> None:
    """Rows, tokens, cost, list price and saving of each group and of all are the events' own, to the last digit."""
    records = [
        _landed("A", **_priced(20, batch=True)),
        _landed("A", partition=1, **_priced(5, batch=True)),
        _landed("B", at=DAY + timedelta(days=1), **_priced(10, batch=True)),
        _landed("W", facts=_facts("W", "sync"), **_priced(3, batch=False)),
        _landed("C", facts=_facts("C", account="other"), **_priced(1, batch=True)),
    ]
    told = (await _report(*records)).as_json()
    groups: Any = told["groups"]
    assert [(one["day"], one["lane"], one["account"], one["batches"], one["rows"]) for one in groups] == [
        ("2026-11-15", "batch", "default", 1, 25),
        ("2026-11-15", "batch", "other", 1, 1),
        ("2026-11-15", "sync", "default", 1, 3),
        ("2026-11-16", "batch", "default", 1, 10),
    ]
    # 1,000 input and 50 output tokens of gpt-4o-mini: 0.00018 USD, half of it in a batch
    total: Any = told["total"]
    assert (total["rows"], total["batches"]) == (39, 4)
    assert total["cost_usd"] == format_usd(36 * 90_000_000 + 3 * 180_000_000)
    assert total["sync_cost_usd"] == format_usd(39 * 180_000_000)
    assert total["saving_usd"] == format_usd(36 * 90_000_000)
    assert groups[2]["saving_usd"] == "0"
    assert sum(parse_usd(one["cost_usd"]) for one in groups) == parse_usd(total["cost_usd"])
    by_lane = (await _report(*records, by=("lane",))).groups
    assert {names: sums.rows for names, sums in by_lane.items()} == {("batch",): 36, ("sync",): 3}


async def test_report_textbook_saving() -> None:
    """21,000 rows that cost 87 USD outside are reported as 43.50 USD by batch and 43.50 USD saved."""
    fields: Any = {"rows": 21_000, "classes": {"succeeded": 21_000}, "usd": "43.5", "sync_usd": "87"}
    total: Any = (await _report(_landed("A", **fields))).as_json()["total"]
    assert (total["cost_usd"], total["sync_cost_usd"], total["saving_usd"]) == ("43.5", "87", "43.5")


async def test_report_counts_an_event_once() -> None:
    """The same event delivered again, in another partition too, is told and counts once."""
    event = _landed("A", **_priced(7, batch=True))
    made = await _report(event, event, event._replace(partition=1))
    assert (made.total.rows, made.repeated_events) == (7, 2)


async def test_report_unknown_is_never_nothing() -> None:
    """Rows without a price make a cost unknown; what is known of the others stands beside it."""
    known = _landed("A", **_priced(10, batch=True))
    unpriced: Any = {"rows": 4, "classes": {"succeeded": 4, "expired": 2}, "input_tokens": 9, "output_tokens": 1}
    strange = _landed("B", facts=_facts("B", model="nobody-knows-it"), **unpriced)
    partly = _landed("C", **{**_priced(2, batch=True), "unpriced_rows": 3})
    only: Any = (await _report(strange)).as_json()["total"]
    assert (only["cost_usd"], only["sync_cost_usd"], only["saving_usd"], only["unpriced_rows"]) == (None, None, None, 4)
    made = await _report(known, strange, partly)
    total: Any = made.as_json()["total"]
    assert (total["cost_usd"], total["unpriced_rows"]) == (None, 7)
    assert total["priced"]["cost_usd"] == format_usd(12 * 90_000_000)
    assert any("7 rows" in note for note in made.notes())
    nothing_ran: Any = {"rows": 5, "classes": {"expired": 5}, "input_tokens": 0, "output_tokens": 0}
    free: Any = (await _report(_landed("D", **nothing_ran))).as_json()["total"]
    assert (free["cost_usd"], free["unpriced_rows"], free["answered_rows"]) == ("0", 0, 0)


async def test_report_classes_and_lost_calls() -> None:
    """Classes add up, rows that the provider took up are told from those it never ran, lost calls are noted."""
    classes = {"succeeded": 90, "transient": 4, "content_filtered": 1, "expired": 3, "missing": 2}
    made = await _report(
        _landed("A", **{**_priced(100, batch=True), "classes": classes}),
        _landed("W", facts=_facts("W", "sync"), **{**_priced(1, batch=False), "unknown_rows": 2}),
    )
    assert made.total.classes == {**classes, "succeeded": 91}
    assert (made.total.answered, made.total.succeeded, made.total.unknown_rows) == (96, 91, 2)
    assert any("2 rows have answers that nobody read" in note for note in made.notes())


async def test_report_span_of_time() -> None:
    """Since is in the span and until is not; other times, and what is no landed event, are in no sum."""
    hour = timedelta(hours=1)
    records = [_landed(str(number), at=DAY + number * hour, **_priced(1, batch=True)) for number in range(5)]
    records.append(OutRecord(EVENTS, b"k", render_event(EventKind.SEALED, "s", DAY, reason="landed"), partition=0))
    records += [_outcome(number, at=DAY + number * hour) for number in range(5)]
    made = await _report(*records, span=Span(DAY + hour, DAY + 3 * hour))
    assert len(made.total.batches) == 2
    assert made.outcomes is not None
    assert made.outcomes.succeeded == 2


async def test_report_outcomes_once_each() -> None:
    """Each request counts once by its outcome id; classes, splits and deadlines are told apart."""
    records = [
        *[_outcome(offset, partition=1) for offset in range(10)],
        _outcome(3, partition=1, into=1),
        _outcome(3, partition=1, ledger="another123"),
        _outcome(3, partition=0, met=False),
        _outcome(10, "too_long", met=False),
        _outcome(11, "bad_record", met=None),
        _outcome(12, "bad_record", met=None),
        _outcome(12, "bad_record", met=None),
        _outcome(13, "split"),
    ]
    outcomes = (await _report(*records)).outcomes
    assert outcomes is not None
    assert outcomes.as_json() == {
        "requests": 16,
        "succeeded": 12,
        "failed": 3,
        "split": 1,
        "classes": {"too_long": 1, "bad_record": 2},
        "deadlines": {"met": 12, "missed": 2, "none": 2},
        "repeated": 2,
    }


async def test_report_leaves_out_what_is_not_ours() -> None:
    """Odd records in these topics are counted and left out; a topic that has lost its beginning is noted."""
    odd = [
        OutRecord(EVENTS, None, b'{"kind":"landed"'),
        OutRecord(EVENTS, None, b'{"kind":"landed","event_id":"x","at":"2026-01-01T00:00:00"}'),
        OutRecord(
            EVENTS, None, b'{"kind":"landed","event_id":"y","at":"2026-01-01T00:00:00Z","usd":"x","sync_usd":"1"}'
        ),
        OutRecord(EVENTS, None, None),
        OutRecord(RESULTS, None, b"{}"),
        OutRecord(RESULTS, None, None),
        OutRecord(RESULTS, None, b'{"outcome_id":"nonsense","status":"succeeded"}'),
    ]
    made = await _report(*odd, _landed("A", **_priced(1, batch=True)), first_offset=5)
    assert (made.total.rows, made.unreadable) == (1, 6)
    assert [note for note in made.notes() if "deleted its oldest" in note and note.startswith(EVENTS)]


async def test_report_is_of_one_input_topic() -> None:
    """Messages about another service's input topic in the same topics are counted apart and left out."""
    landed = _landed("A", **_priced(3, batch=True))
    others = landed._replace(headers=event_headers(EventKind.LANDED, "x", DAY, "other-requests"))
    ours = _landed("B", **_priced(2, batch=True))._replace(
        headers=event_headers(EventKind.LANDED, "y", DAY, "requests")
    )
    made = await _report(others, ours, _outcome(1), _outcome(2, topic="other-requests"))
    assert (made.total.rows, made.foreign) == (2, 2)
    assert made.outcomes is not None
    assert made.outcomes.succeeded == 1
    assert any("2 records speak about other input topics" in note for note in made.notes())


async def test_report_without_outcome_topics() -> None:
    """An outcome topic that is not there yet is noted; without an events topic there is nothing to report."""
    made = await _report(without=(FAILURES,))
    assert any(FAILURES in note for note in made.notes())
    with pytest.raises(TopicMissing, match=EVENTS):
        await _report(without=(EVENTS,))


@pytest.fixture
def topics(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> list[OutRecord]:
    """Records that the command finds when it asks the cluster."""
    records: list[OutRecord] = []
    monkeypatch.chdir(tmp_path)
    for name in ("OPENAI_API_KEY", "BATCHFERRY_CONFIG", "KAFKA_BOOTSTRAP_SERVERS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("batchferry.app.build_kafka", lambda _: _Topics(*records))
    return records


def test_report_command_prints_both_ways(topics: list[OutRecord], capfd: pytest.CaptureFixture[str]) -> None:
    """The table has groups, a total and the outcomes; --json the same with exact decimals."""
    topics += [
        _landed("A", **_priced(20_000, batch=True)),
        _landed("B", facts=_facts("B", model="nobody-knows-it"), rows=4, classes={"succeeded": 4}),
        _outcome(0),
        _outcome(1, "transient", met=False),
    ]
    assert call(["report", "--table"]) == Exit.OK
    shown = capfd.readouterr().out
    for words in ("$1.80 +", "unknown", "total", "1 met, 1 missed, 50.00% met", "1 transient", "nobody-knows-it"):
        assert words in shown
    assert call(["report", "--by", "model", "--no-outcomes"]) == Exit.OK
    told = json.loads(capfd.readouterr().out)
    assert [one["cost_usd"] for one in told["groups"]] == ["1.8", None]
    assert told["outcomes"] is None
    assert call(["report", "--since", "1h", "--until", "2026-11-15"]) == Exit.OK
    told = json.loads(capfd.readouterr().out)
    assert told["groups"] == []
    assert told["until"] == "2026-11-15T00:00:00Z"
    assert any("no batch has ended" in note for note in told["notes"])


@pytest.mark.parametrize(
    "flags", [("--by", "colour"), ("--by", ""), ("--since", "yesterday"), ("--until", "9999999999999d")]
)
def test_report_wrong_flags(topics: list[OutRecord], flags: tuple[str, ...]) -> None:
    """A flag that says nothing lawful is a usage error."""
    assert call(["report", *flags]) == Exit.USAGE
