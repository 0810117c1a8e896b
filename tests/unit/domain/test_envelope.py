"""Outcomes and events: bounded, deterministic, and the provider's bytes unchanged."""

from __future__ import annotations

import base64
import hashlib
import json
from datetime import UTC, datetime

import orjson
import pytest

from batchferry.domain.envelope import (
    MAX_EVENT_TEXT_CHARS,
    MAX_MESSAGE_CHARS,
    BatchFacts,
    EventKind,
    OutcomeContext,
    event_headers,
    event_id_of,
    outcome_headers,
    outcome_id,
    quote_original,
    render_event,
    render_failure,
    render_result,
    render_split,
)
from batchferry.domain.errors import InvariantBroken
from batchferry.domain.money import price_row
from batchferry.domain.provider import Usage
from batchferry.domain.rows import ResultLine, RowClass, RowFlag

NOW = datetime(2026, 11, 15, 12, 0, 1, 250_000, tzinfo=UTC)
BATCH = BatchFacts(
    account="main",
    provider="openai",
    endpoint="/v1/chat/completions",
    model="m-small",
    batch_id="01JD0000000000000000000000",
    provider_batch_id="batch_1",
    provider_file_id="file-1",
    sealed_at=NOW,
)
BODY = b'{ "id":"x", "n": 1.50, "big":12345678901234567890123, "t":"\\u0000 \\u00e9 \xe2\x80\xa8 \xf0\x9f\x99\x82" }'


def context(**changes: object) -> OutcomeContext:
    """A row of a batch."""
    known = {
        "ledger_id": "abcdefghjk",
        "topic": "requests",
        "partition": 3,
        "offset": 42,
        "custom_id": 'order "1" 订单',
        "t0": NOW,
        "deadline": NOW,
        "deadline_met": True,
        "wire_id": "abcdefghjk-3-42-1",
        "submission": 1,
        "batch": BATCH,
    }
    return OutcomeContext(**(known | changes))


def answer(**changes: object) -> ResultLine:
    """A good answer to it."""
    known = {
        "wire_id": "abcdefghjk-3-42-1",
        "row_class": RowClass.SUCCEEDED,
        "http_status": 200,
        "provider_request_id": "req_1",
        "body": BODY,
        "usage": Usage(1000, 500, 0),
        "flags": (RowFlag.TRUNCATED,),
    }
    return ResultLine(**(known | changes))


def test_envelope_result_members():
    """A result says where it came from, what carried it, what it cost, and the answer."""
    price = price_row("openai", "gpt-4o-mini", Usage(1000, 500), NOW, batch=True)
    value = render_result(context(attempts={"transient": 1}), answer(), price)
    assert BODY in value
    found = json.loads(value)
    assert found["outcome_id"] == outcome_id("abcdefghjk", 3, 42) == "abcdefghjk-3-42"
    assert found["custom_id"] == 'order "1" 订单'
    assert found["source"] == {"topic": "requests", "partition": 3, "offset": 42, "event_id": None}
    assert (found["status"], found["flags"], found["attempts"]) == ("succeeded", ["truncated"], {"transient": 1})
    assert found["usage"] == {"input_tokens": 1000, "output_tokens": 500, "cached_tokens": 0}
    assert found["cost"] == {"usd": "0.000225", "sync_usd": "0.00045", "basis": "published"}
    assert found["t0"] == "2026-11-15T12:00:01.250000Z"
    assert found["batch"]["provider_batch_id"] == "batch_1"
    assert found["response"]["status_code"] == 200


def test_envelope_result_unknown_parts_are_null():
    """An unknown price or usage is null, never zero."""
    found = json.loads(render_result(context(), answer(usage=None, body=None), None))
    assert (found["usage"], found["cost"], found["response"]["body"]) == (None, None, None)


def test_envelope_odd_body_does_not_spoil_the_message():
    """A body only a tolerant reader could use goes out as base64 unless it is JSON all the same."""
    odd = b'{"text":"\xff"}'
    found = json.loads(render_result(context(), answer(body=odd), None, is_strict=False))
    assert found["response"]["body"] is None
    assert base64.b64decode(found["response"]["body_base64"]) == odd
    assert BODY in render_result(context(), answer(), None, is_strict=False)


def test_envelope_failure_members():
    """A failure names class, code, message, remedy and tries, and keeps the error answer and the bounded original."""
    line = answer(
        row_class=RowClass.INVALID_REQUEST, http_status=400, body=b'{"error":{"code":"c"}}', usage=None, flags=()
    )
    value = render_failure(
        context(),
        RowClass.INVALID_REQUEST,
        "invalid_value",
        "m" * 10_000,
        remedy="mend it",
        tried=[{"lane": "batch", "row_class": "transient", "code": "http_503", "at": NOW}],
        original=quote_original(b"abc"),
        line=line,
        duplicate_of=41,
        answer={"bytes": 5, "sha256": "0"},
    )
    assert b'{"error":{"code":"c"}}' in value
    found = json.loads(value)
    assert len(found["error"].pop("message")) == MAX_MESSAGE_CHARS
    assert found["error"] == {
        "class": "invalid_request",
        "code": "invalid_value",
        "remedy": "mend it",
        "http_status": 400,
    }
    assert found["tried"][0]["at"].endswith("Z")
    assert found["duplicate_of"] == {"topic": "requests", "partition": 3, "offset": 41}
    assert found["original"] == {
        "encoding": "utf8",
        "value": "abc",
        "bytes": 3,
        "truncated": False,
        "sha256": hashlib.sha256(b"abc").hexdigest(),
    }


def test_envelope_split_members():
    """A request that was cut has an outcome of its own: why, into how many parts, and no answer or quotation."""
    line = answer(row_class=RowClass.TOO_LONG, http_status=400, code="context_length_exceeded", message="a b c")
    found = json.loads(render_split(context(), line, 3))
    assert found["error"] == {"class": "too_long", "code": "context_length_exceeded", "http_status": 400}
    assert (found["kind"], found["status"], found["parts"]) == ("split", "split", 3)
    assert found["outcome_id"] == "abcdefghjk-3-42"
    assert not found.keys() & {"response", "original", "usage", "cost", "tried"}
    assert b"a b c" not in render_split(context(), line, 3)
    headers = dict(outcome_headers(context(), "split", NOW))
    assert headers["ce_type"] == b"batchferry.request.split"


def test_envelope_failure_of_a_bad_record():
    """A record that never met a batch still gets a whole failure."""
    bare = OutcomeContext(ledger_id="abcdefghjk", topic="requests", partition=0, offset=7)
    found = json.loads(
        render_failure(bare, RowClass.BAD_RECORD, "tombstone", "no value", original=quote_original(None))
    )
    assert (found["custom_id"], found["batch"], found["wire_id"], found["tried"]) == (None, None, None, [])
    assert "original" not in found


def test_envelope_failure_with_broken_text():
    """Half a surrogate pair in a provider's message, or a count beyond 64 bits, is mended, not fatal."""
    value = render_failure(
        context(attempts={"transient": 2**70}),
        RowClass.TRANSIENT,
        "c",
        "cut \ud83d",
        original=quote_original(b"v"),
        line=answer(),
    )
    found = json.loads(value)
    assert found["error"]["message"] == "cut ?"
    assert found["attempts"] == {"transient": None}
    assert BODY in value
    assert found["original"]["value"] == "v"


@pytest.mark.parametrize("limit", range(1, 14))
def test_original_text_is_cut_between_characters(limit: int):
    """Text is cut at most three bytes short of the limit and stays text."""
    whole = "aé我🙂z"
    raw = whole.encode()
    quoted = quote_original(raw, limit)
    assert quoted is not None
    assert quoted.encoding == "utf8"
    assert whole.startswith(quoted.value)
    assert limit - 3 <= len(quoted.value.encode()) <= limit
    assert (quoted.bytes, quoted.truncated) == (len(raw), limit < len(raw))
    assert quoted.sha256 == hashlib.sha256(raw).hexdigest()


@pytest.mark.parametrize("raw", [b"\xff\xfe", b"ab\xe6", b"ab\xffcdefgh", b"abcd\xff" + b"x" * 20])
def test_original_other_bytes_as_base64(raw: bytes):
    """What is not UTF-8 is quoted as base64, cut or not."""
    quoted = quote_original(raw, 6)
    assert quoted is not None
    assert quoted.encoding == "base64"
    assert base64.b64decode(quoted.value) == raw[:6]


def test_headers_outcome():
    """Our CloudEvents attributes replace the request's; traces, extensions and strangers are passed on in order."""
    request = (
        ("tenant", b"t"),
        ("ce_id", b"theirs"),
        ("CE_Type", b"x"),
        ("traceparent", b"00-1"),
        ("ce_customer", b"c"),
        ("content-type", b"text/plain"),
        ("odd", None),
    )
    headers = outcome_headers(context(), "succeeded", NOW, request)
    own, passed = headers[:7], headers[7:]
    assert dict(own) == {
        "ce_id": b"abcdefghjk-3-42",
        "ce_subject": b"requests/3/42",
        "ce_specversion": b"1.0",
        "ce_source": b"/batchferry/requests",
        "ce_type": b"batchferry.request.succeeded",
        "ce_time": b"2026-11-15T12:00:01.250000Z",
        "content-type": b"application/json",
    }
    assert passed == (("tenant", b"t"), ("traceparent", b"00-1"), ("ce_customer", b"c"), ("odd", None))
    assert event_id_of(request) == "theirs"
    assert event_id_of(()) is None
    assert outcome_headers(context(), "succeeded", NOW) == own


def test_event_holds_what_it_was_given():
    """An event is small, names its batch and cuts long texts."""
    value = render_event(
        EventKind.SEALED, "e1", NOW, BATCH, reason="x" * 9999, rows=5, partitions=[0, 2], classes={"succeeded": 4}
    )
    found = orjson.loads(value)
    assert (found["kind"], found["event_id"], found["rows"], found["partitions"]) == ("sealed", "e1", 5, [0, 2])
    assert len(found["reason"]) == MAX_EVENT_TEXT_CHARS
    assert found["batch"]["batch_id"] == BATCH.batch_id
    assert orjson.loads(render_event(EventKind.HELD, "e2", NOW, scope="main"))["batch"] is None
    assert dict(event_headers(EventKind.SEALED, "e1", NOW, "requests"))["ce_type"] == b"batchferry.batch.sealed"


def test_event_refuses_unknown_fields():
    """A field that is not in the contract is a bug, so payload cannot slip in under a new name."""
    with pytest.raises(InvariantBroken):
        render_event(EventKind.ALARM, "e", NOW, prompt="text")
