"""Lawful oddities of records: headers without a value, and promises beyond all bounds."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from batchferry.app import build_providers, request_rules
from batchferry.clock import SystemClock
from batchferry.config import Settings, load_settings
from batchferry.domain.requests import BadRecord, RecordRule
from batchferry.engine.outcomes import OutcomeWriter
from batchferry.engine.routing import Router
from batchferry.engine.rowsource import Accepted, RowSource
from batchferry.ports import Headers, IndexRow
from batchferry.telemetry import RecordingTelemetry

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
NOW_MS = round(NOW.timestamp() * 1000)
DAY_MS = 86_400_000
VALUE = b'{"custom_id": "x", "body": {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": "hi"}]}}'


@pytest.fixture
def settings() -> Settings:
    """The defaults."""
    return load_settings(None, {"OPENAI_API_KEY": "sk-test-0123456789abcdef"}, dotenv_path=None)


@pytest.fixture
def source(settings: Settings) -> RowSource:
    """A row source as the service builds it, as far as accepting needs one."""
    unused: Any = None
    return RowSource(
        unused,
        unused,
        SystemClock(),
        "requests",
        request_rules(settings),
        Router(settings),
        build_providers(settings, SystemClock()),
        RecordingTelemetry(),
    )


@pytest.fixture
def outcomes(settings: Settings) -> OutcomeWriter:
    """A writer for topics that take a megabyte."""
    limits = dict.fromkeys((settings.topics.results, settings.topics.failures), 1_000_000)
    return OutcomeWriter(settings, SystemClock(), RecordingTelemetry(), limits, {})


def record(headers: Headers, value: bytes = VALUE) -> Any:
    """An input record of this moment."""
    return SimpleNamespace(
        topic="requests",
        partition=0,
        offset=5,
        timestamp=NOW_MS,
        timestamp_type=0,
        key=None,
        value=value,
        headers=headers,
    )


TASK: Any = SimpleNamespace(partition=0, ledger_id="0123456789", next_offset=9)
NULLS: Headers = (("note", None), ("traceparent", None), ("ce_id", None))


def test_null_headers_are_accepted_and_kept(source: RowSource) -> None:
    """A header may lawfully have no value: it goes into the index as it came."""
    accepted = source.accept(record(NULLS), NOW_MS)
    assert isinstance(accepted, Accepted)
    assert accepted.row.headers == NULLS


def test_null_headers_of_a_refused_record_go_on(outcomes: OutcomeWriter) -> None:
    """The failure of a bad record carries the headers it came with, those without a value too."""
    bad = BadRecord(rule=RecordRule.NOT_JSON, message="m", remedy="r")
    settlement = outcomes.bad_record(TASK, record(NULLS, b"{"), bad, NOW)
    assert settlement.record is not None
    assert ("note", None) in settlement.record.headers
    assert ("traceparent", None) in settlement.record.headers


def test_null_headers_of_a_repeated_record_go_on(outcomes: OutcomeWriter) -> None:
    """So does the failure of a record that was accepted."""
    row = IndexRow(5, "x", None, NULLS, NOW_MS, NOW_MS + DAY_MS, "k")
    settlement = outcomes.duplicate(TASK, row, 3, NOW)
    assert settlement.record is not None
    assert ("note", None) in settlement.record.headers


def test_headers_that_the_topic_does_not_take_are_shed(settings: Settings) -> None:
    """The sizes of headers count, those of absent values as nothing."""
    limits = dict.fromkeys((settings.topics.results, settings.topics.failures), 2_000)
    small = OutcomeWriter(settings, SystemClock(), RecordingTelemetry(), limits, {})
    row = IndexRow(5, "x", None, (("note", None), ("long", b"x" * 5_000)), NOW_MS, NOW_MS + DAY_MS, "k")
    settlement = small.duplicate(TASK, row, 3, NOW)
    assert settlement.record is not None
    assert "long" not in dict(settlement.record.headers)


@pytest.mark.parametrize(
    ("header", "value"),
    [("sla", "P4000000D"), ("sla", "P31D"), ("deadline", "9999-12-31T23:59:59Z"), ("deadline", "2026-04-15T00:00:00Z")],
)
def test_a_promise_beyond_the_longest_is_refused(source: RowSource, header: str, value: str) -> None:
    """The longest SLA bounds both headers, by one rule."""
    refused = source.accept(record(((header, value.encode()),)), NOW_MS)
    assert isinstance(refused, BadRecord)
    assert refused.rule is RecordRule.BAD_HEADER
    assert (refused.custom_id, "2.592e+06 s" in refused.message) == ("x", True)


@pytest.mark.parametrize(
    ("header", "value", "deadline_ms"),
    [
        ("sla", "P30D", NOW_MS + 30 * DAY_MS),
        ("deadline", (NOW + timedelta(days=30)).isoformat(), NOW_MS + 30 * DAY_MS),
        ("deadline", "0001-01-01T00:00:00Z", -62_135_596_800_000),
    ],
)
def test_a_promise_at_the_bound_is_kept(source: RowSource, header: str, value: str, deadline_ms: int) -> None:
    """Thirty days are fine, and a deadline that is over is no fault of the record."""
    accepted = source.accept(record(((header, value.encode()),)), NOW_MS)
    assert isinstance(accepted, Accepted)
    assert accepted.row.deadline_ms == deadline_ms


@pytest.mark.parametrize("deadline_ms", [347_376_000_000_000, -(2**62), 2**62])
def test_an_outcome_is_rendered_whatever_its_deadline(outcomes: OutcomeWriter, deadline_ms: int) -> None:
    """A row accepted under other limits, with a deadline that no calendar holds, still gets its outcome."""
    row = IndexRow(5, "x", None, (), NOW_MS, deadline_ms, "k")
    settlement = outcomes.duplicate(TASK, row, 3, NOW)
    assert settlement.record is not None
    assert (b"9999-12-31" if deadline_ms > 0 else b"0001-01-01") in (settlement.record.value or b"")
