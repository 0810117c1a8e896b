"""The catalogue itself, and that nothing outside it gets out."""

from __future__ import annotations

import io
import json
import logging
import re
from datetime import UTC, datetime
from enum import StrEnum

import pytest

from batchferry.domain.errors import LedgerDamaged
from batchferry.telemetry import (
    EVENTS,
    METRICS,
    SPANS,
    Kind,
    RecordingTelemetry,
    child_traceparent,
    error_fields,
    plain,
    setup_logging,
)
from batchferry.telemetry.catalogue import _EVENTS, _METRICS
from batchferry.telemetry.check import MASK, LabelGuard
from batchferry.telemetry.logs import write
from batchferry.telemetry.tracing import parse_traceparent

SECRET = "sk-proj-abcdefghijklmnop1234"
PARENT = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def logged(stream: io.StringIO) -> list[dict]:
    """The JSON lines written so far."""
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def fail(text: str) -> None:
    """An exception as a library might raise it."""
    raise RuntimeError(text)


def test_events_are_past_tense_names_with_help():
    """Every event has a snake-case name of two words and more, help that ends in a full stop, and known fields."""
    for name, spec in EVENTS.items():
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", name), name
        assert spec.help.endswith("."), name
        assert not spec.fields & {"event", "level", "timestamp", "message", "body", "prompt", "answer", "value"}, name


def test_metrics_follow_prometheus_naming():
    """Counters end in _total, units end the name, nothing else does; histograms have buckets."""
    for name, spec in METRICS.items():
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", name), name
        assert (spec.kind is Kind.COUNTER) == spec.full_name.endswith("_total"), name
        assert not name.endswith("_total"), name
        assert (spec.kind is Kind.HISTOGRAM) == bool(spec.buckets), name
        assert list(spec.buckets) == sorted(spec.buckets)
        assert not re.search(r"_(ms|minutes|hours|kb|mb)(_|$)", name), name
        assert spec.help.endswith("."), name


def test_waits_are_measured_in_hours():
    """Waits of hours fall into different buckets, which the usual buckets up to ten seconds would not give."""
    for name in ("record_wait_seconds", "record_turnaround_seconds", "batch_turnaround_seconds"):
        assert {3600.0, 4 * 3600.0, 24 * 3600.0, 30 * 3600.0} <= set(METRICS[name].buckets)


def test_no_name_is_declared_twice():
    """A second declaration would silently replace the first."""
    names = [row[0] for rows in _EVENTS.values() for row in rows]
    assert len(names) == len(set(names)) == len(EVENTS)
    assert len(_METRICS) == len(METRICS)
    assert {"batch", "settle"} <= set(SPANS)


def test_recording_refuses_what_is_not_declared():
    """A typing slip in a name, field or label fails the test that runs over it."""
    telemetry = RecordingTelemetry()
    for wrong in (
        lambda: telemetry.event("batch_seeled"),
        lambda: telemetry.event("batch_sealed", prompt="x"),
        lambda: telemetry.count("records"),
        lambda: telemetry.count("records", outcome="succeeded", model="x"),
        lambda: telemetry.count("spool_bytes"),
        lambda: telemetry.gauge("spool_bites", 1),
        lambda: telemetry.observe("spool_bytes", 1),
        lambda: telemetry.batch_span("batch", {"prompt": "x"}),
        lambda: telemetry.batch_span("bat", {}),
    ):
        with pytest.raises(KeyError):
            wrong()


def test_recording_keeps_what_it_is_told():
    """Tests can ask for events by name and for sums of counters."""
    telemetry = RecordingTelemetry()
    telemetry.event("batch_sealed", batch_id="b1", rows=3)
    telemetry.count("provider_calls", 2, account="a", call="create", outcome="ok")
    telemetry.count("provider_calls", account="a", call="list", outcome="ok")
    telemetry.gauge("spool_bytes", 7)
    telemetry.observe("restore_seconds", 0.5)
    telemetry.batch_span("batch", {"batch_id": "b1"}, [PARENT])
    assert telemetry.named("batch_sealed") == [{"batch_id": "b1", "rows": 3}]
    assert telemetry.total("provider_calls", account="a") == 3
    assert telemetry.total("provider_calls", call="list") == 1
    assert telemetry.spans[0].parents == (PARENT,)


def test_labels_stay_bounded():
    """Unforeseen values of a closed label, and too many of an open one, are counted as other."""
    guard = LabelGuard(max_values=2)
    closed, open_ = METRICS["records"], METRICS["bad_records"]
    assert guard.bounded(closed, {"outcome": "succeeded"}) == {"outcome": "succeeded"}
    assert guard.bounded(closed, {"outcome": "exploded"}) == {"outcome": "other"}
    assert [guard.bounded(open_, {"rule": rule})["rule"] for rule in "abca"] == ["a", "b", "other", "a"]


class Colour(StrEnum):
    """Any enum."""

    RED = "red"


def test_values_become_plain():
    """Numbers, short text, instants and lists are shown; bytes and objects only as their type."""
    assert plain(Colour.RED) == "red"
    assert plain(datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)) == "2026-01-02T03:04:05.000Z"
    assert plain(frozenset({2, 1})) == [1, 2]
    assert plain(b"a prompt") == "<bytes>"
    assert plain({"prompt": "text"}) == "<dict>"
    assert plain("two\nlines\x1b[31m") == "two lines [31m"
    assert len(str(plain("x" * 10_000))) < 400
    listed = plain(list(range(1000)))
    assert isinstance(listed, list)
    assert listed[-1] == "… 950 more"


@pytest.mark.parametrize("text", [SECRET, f"Bearer {SECRET}", "https://user:pass@host/v1", "whsec_abcDEF123+/="])
def test_what_looks_like_a_key_is_masked(text: str):
    """Should a key ever get into a field, it is not shown."""
    shown = str(plain(f"found {text} here"))
    assert MASK in shown
    assert SECRET not in shown
    assert "pass@" not in shown


def test_json_logs_are_one_object_a_line():
    """JSON logs hold time, level, event and the fields of the catalogue."""
    stream = io.StringIO()
    logger = setup_logging("json", "info", stream)
    write(logger, EVENTS["batch_sealed"], {"batch_id": "b1", "rows": 3})
    write(logger, EVENTS["records_read"], {"partition": 1})  # debug: below the level
    (line,) = logged(stream)
    assert list(line)[:3] == ["timestamp", "level", "event"]
    assert (line["level"], line["event"], line["rows"]) == ("info", "batch_sealed", 3)
    assert line["timestamp"].endswith("Z")


def test_human_logs_name_event_and_fields():
    """Human logs show the same event and fields on one line."""
    stream = io.StringIO()
    write(setup_logging("human", "debug", stream), EVENTS["rows_missing"], {"batch_id": "b1", "rows": 3})
    text = stream.getvalue()
    assert "rows_missing" in text
    assert "batch_id=b1" in text
    assert text.count("\n") == 1


def test_the_safety_net_drops_what_the_catalogue_lacks():
    """Even a logger used past the checks lets no unknown field or event out."""
    stream = io.StringIO()
    logger = setup_logging("json", "info", stream)
    logger.info("batch_sealed", batch_id="b1", prompt="tell me a secret")
    logger.info("made_up", batch_id="b1")
    assert [sorted(line) for line in logged(stream)] == [["batch_id", "event", "level", "timestamp"]]


def test_libraries_texts_stay_out():
    """Libraries' warnings show who and the fixed words; arguments, quoted text and tracebacks stay out."""
    stream = io.StringIO()
    setup_logging("json", "info", stream)
    try:
        fail(f"bad request: {SECRET} tell me a story")
    except RuntimeError:
        logging.getLogger("aiokafka.producer").exception("Failed to send %s", "tell me a story")
    logging.getLogger("httpx").warning("tell me a story")
    logging.getLogger("asyncio").error("Task exception was never retrieved\nfuture: <Task tell me a story>")
    logging.getLogger("aiokafka").info("below the level")
    text = stream.getvalue()
    assert "story" not in text
    assert SECRET not in text
    first, second, third = logged(stream)
    assert first["event"] == "library_error"
    assert (first["logger"], first["template"], first["error"]) == (
        "aiokafka.producer",
        "Failed to send %s",
        "RuntimeError",
    )
    assert (second["event"], "template" in second) == ("library_warning", False)
    assert third["template"] == "Task exception was never retrieved"


def test_exceptions_are_told_without_their_texts():
    """Type and place of any exception, the text only of our own, which never quote payload."""
    try:
        fail("prompt: tell me a story")
    except RuntimeError as error:
        fields = error_fields(error)
    assert fields["error"] == "RuntimeError"
    assert fields["where"].startswith("test_telemetry_catalogue.py:")
    assert "error_text" not in fields
    assert error_fields(LedgerDamaged(3, "gap", "stop"))["error_text"] == "partition 3: gap; stop"


def test_a_result_stays_in_its_requests_trace():
    """The child keeps trace and sampling of the request and has a span of its own."""
    child = child_traceparent(PARENT)
    assert child is not None
    before, after = parse_traceparent(PARENT), parse_traceparent(child)
    assert before is not None
    assert after is not None
    assert (after.trace_id, after.flags) == (before.trace_id, before.flags)
    assert after.span_id != before.span_id


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"",
        b"junk",
        b"ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        b"00-00000000000000000000000000000000-00f067aa0ba902b7-01",
        b"00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
        b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
        b"00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
        b"\xff" * 55,
    ],
)
def test_what_is_no_trace_context_is_left_alone(header: bytes | None):
    """An unusable header gives no child, and no exception."""
    assert child_traceparent(header) is None


def test_later_versions_of_the_header_are_understood():
    """A header of a later version may carry more; what is known of it is used."""
    assert child_traceparent(b"01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more") is not None
