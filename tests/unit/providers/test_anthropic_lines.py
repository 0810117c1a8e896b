"""Result lines of Message Batches: every result type, stop reason and error, and bytes that stay as they came."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic_kit import error, message
from hypothesis import given, settings
from hypothesis import strategies as st

from batchferry.domain.provider import Usage
from batchferry.domain.rows import ResultLine, RowClass, RowFlag, UnreadableLine
from batchferry.providers.anthropic.lines import judge_answer, read_line

CALLS, EMPTY, REFUSED, CUT = RowFlag.TOOL_CALL_PENDING, RowFlag.EMPTY, RowFlag.REFUSED, RowFlag.TRUNCATED
TOOL = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "s"}


def line(result: Any, wire_id: str = "a-0-1-1") -> bytes:
    """A result line."""
    return json.dumps({"custom_id": wire_id, "result": result}).encode()


def read(result: Any) -> ResultLine:
    """The verdict on a result."""
    got = read_line(line(result))
    assert isinstance(got, ResultLine)
    return got


def test_a_success_keeps_its_bytes():
    """The body is the message byte for byte, with model, tokens and the status that a message comes with."""
    raw = b'{"id":"m", "content" : [{"type":"text","text":"\\u00e9 \xe2\x80\xa8 1.0e5"}],"stop_reason":"end_turn","n":1.50}'
    got = read_line(b'{"custom_id":"w","result":{"message":' + raw + b',"type":"succeeded"}}')
    assert isinstance(got, ResultLine)
    assert (got.wire_id, got.row_class, got.body, got.http_status) == ("w", RowClass.SUCCEEDED, raw, 200)
    full = read({"type": "succeeded", "message": message()})
    assert full.usage == Usage(129, 3, 100, 20)
    assert (full.model, full.flags, full.code) == ("claude-sonnet-4-5", (), None)


@pytest.mark.parametrize(
    ("made", "flags"),
    [
        (message("hi", "end_turn"), ()),
        (message("hi", "stop_sequence"), ()),
        (message("hi", "max_tokens"), (CUT,)),
        (message("hi", "model_context_window_exceeded"), (CUT,)),
        (message("hi", "refusal"), (REFUSED,)),
        (message(None, "refusal"), (REFUSED, EMPTY)),
        (message("hi", "pause_turn"), (CALLS,)),
        # A forced call looks like any other: the line does not repeat the request's tool_choice.
        (message(None, "tool_use", content=[TOOL]), (CALLS,)),
        (message("hi", "tool_use", content=[THOUGHT, {"type": "text", "text": "x"}, TOOL]), (CALLS,)),
        (message("hi", None), ()),
        (message("hi", "something_new"), ()),
        # Says nothing.
        (message(None, "max_tokens"), (CUT, EMPTY)),
        (message(" \n\t", "end_turn"), (EMPTY,)),
        (message(None, "end_turn"), (EMPTY,)),
        (message(None, "end_turn", usage={}), (EMPTY,)),
        (message(None, "stop_sequence", content=[THOUGHT]), (EMPTY,)),
        (
            message(
                None,
                "end_turn",
                content=[THOUGHT],
                usage={"input_tokens": 1, "output_tokens": 9, "output_tokens_details": {"thinking_tokens": 9}},
            ),
            (CUT, EMPTY),
        ),
    ],
)
def test_stop_reasons_become_flags(made, flags):
    """Each stop reason is a success with its flags; an answer that says nothing is told by its end and tokens."""
    got = read({"type": "succeeded", "message": made})
    assert (got.row_class, got.flags) == (RowClass.SUCCEEDED, flags)


@pytest.mark.parametrize(
    "made",
    [
        message(None, None),
        message(None, "tool_use"),
        message(None, "pause_turn"),
        message(None, "end_turn", usage={"input_tokens": 5, "output_tokens": 0}),
        message(None, "end_turn", content=None, usage={}),
    ],
)
def test_silence_without_an_end_goes_again(made):
    """Nothing said and no sign that the model ended: the row is sent again."""
    got = read({"type": "succeeded", "message": made})
    assert (got.row_class, got.code, got.flags) == (RowClass.TRANSIENT, "empty_answer", ())


def test_an_error_is_read_at_its_double_nesting():
    """The type is that of the error inside the envelope; the envelope is the body, its call's id the request id."""
    envelope = error("overloaded_error", "Overloaded")
    got = read({"type": "errored", "error": envelope})
    assert (got.row_class, got.code, got.http_status) == (RowClass.TRANSIENT, "overloaded_error", 529)
    assert (got.provider_request_id, got.message, got.is_unknown) == ("req_1", "Overloaded", False)
    assert json.loads(got.body or b"") == envelope
    assert "Overloaded" not in repr(got)


@pytest.mark.parametrize(
    ("result", "row_class", "code", "is_unknown"),
    [
        ({"type": "expired"}, RowClass.EXPIRED, "expired", False),
        ({"type": "canceled"}, RowClass.CANCELLED, "canceled", False),
        ({"type": "errored", "error": error("billing_error")}, RowClass.ACCOUNT, "billing_error", False),
        (
            {"type": "errored", "error": error("rate_limit_error", code="enforced_spend_limit_reached")},
            RowClass.ACCOUNT,
            "enforced_spend_limit_reached",
            False,
        ),
        ({"type": "errored", "error": error("brand_new_error")}, RowClass.TRANSIENT, "brand_new_error", True),
        # The error alone, without its envelope.
        (
            {"type": "errored", "error": {"type": "not_found_error", "message": "model: x"}},
            RowClass.MODEL_UNAVAILABLE,
            "not_found_error",
            False,
        ),
        ({"type": "errored", "error": {"type": "error"}}, RowClass.TRANSIENT, None, True),
        ({"type": "errored"}, RowClass.TRANSIENT, "no_response_no_error", False),
        ({"type": "succeeded"}, RowClass.TRANSIENT, "empty_body", False),
        ({"type": "succeeded", "message": {}}, RowClass.TRANSIENT, "empty_body", False),
        ({"type": "postponed"}, RowClass.TRANSIENT, "result_postponed", True),
        (None, RowClass.TRANSIENT, "no_response_no_error", False),
        ({}, RowClass.TRANSIENT, "no_response_no_error", False),
    ],
)
def test_results_that_are_no_answer(result, row_class, code, is_unknown):
    """Each result type has its class; what nobody has heard of goes once more and is counted."""
    got = read(result)
    assert (got.row_class, got.code, got.is_unknown) == (row_class, code, is_unknown)


def test_a_line_that_is_not_quite_json_is_mended():
    """Broken UTF-8, raw control characters and half pairs are mended; all else of the message stays."""
    raw = b'{"content":[{"type":"text","text":"a\xffb\x01c"}],"stop_reason":"end_turn","k":NaN,"h":"\\ud800"}'
    got = read_line(b'\xef\xbb\xbf{"custom_id":"w-1","result":{"type":"succeeded","message":' + raw + b"}}\x00")
    assert isinstance(got, ResultLine)
    kept = '{"content":[{"type":"text","text":"a\ufffdb\\u0001c"}],"stop_reason":"end_turn","k":null,"h":"\\ud800"}'
    assert (got.wire_id, got.row_class, got.body) == ("w-1", RowClass.SUCCEEDED, kept.encode())


@pytest.mark.parametrize(
    ("broken", "wire_id"),
    [
        (b"", None),
        (b"[]", None),
        (b'{"result":{"type":"expired"}}', None),
        (b'{"custom_id":"","result":{"type":"expired"}}', None),
        (b'{"custom_id":"abc","result":{"type":"succeeded","mess', "abc"),
        (b'{"custom_id":"abc","result":[]}', "abc"),
    ],
)
def test_a_line_that_cannot_be_read(broken, wire_id):
    """What cannot be read says so, with the id if one can be seen in it."""
    got = read_line(broken)
    assert isinstance(got, UnreadableLine)
    assert got.wire_id == wire_id


def test_members_of_wrong_types_count_as_absent():
    """Odd members do not cost the answer."""
    made = message("hi") | {"usage": {"input_tokens": "7", "output_tokens": []}, "model": 5, "stop_reason": None}
    got = read({"type": "succeeded", "message": made})
    assert (got.row_class, got.usage) == (RowClass.SUCCEEDED, Usage(7, 0, 0, 0))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["type", "error", "message", "content", "text", "stop_reason", "usage", "details", "result", "custom_id"]
    ), inner, max_size=5),
    max_leaves=12,
)  # fmt: skip


@settings(deadline=None, max_examples=150)
@given(JSON, st.binary(max_size=6))
def test_anything_has_a_verdict(value, tail):
    """No JSON value and no bytes behind it make the reader fail."""
    for raw in (json.dumps(value).encode() + tail, line(value), line({"type": "succeeded", "message": value})):
        assert isinstance(read_line(raw), ResultLine | UnreadableLine)
    assert isinstance(judge_answer(200, None, json.dumps(value).encode() + tail), ResultLine)
    assert isinstance(judge_answer(400, None, json.dumps(value).encode() + tail), ResultLine)


def test_a_single_answer_is_judged_like_a_line():
    """A message, an error body, an error inside a 200, an empty answer and nonsense, each as a line would be."""
    raw = json.dumps(message()).encode()
    good = judge_answer(200, "req_9", b" " + raw + b"\n")
    assert (good.row_class, good.body, good.provider_request_id) == (RowClass.SUCCEEDED, raw, "req_9")
    assert judge_answer(200, None, json.dumps(error("overloaded_error")).encode()).row_class is RowClass.TRANSIENT
    assert judge_answer(404, None, json.dumps(error("not_found_error", "model: x")).encode()).row_class is (
        RowClass.MODEL_UNAVAILABLE
    )
    assert judge_answer(200, None, b"").code == "empty_body"
    assert judge_answer(200, None, b"<html>").row_class is RowClass.UNREADABLE
    page = judge_answer(502, None, b"<html>")
    assert (page.row_class, page.body) == (RowClass.TRANSIENT, None)


@pytest.mark.parametrize(
    ("kept", "hour"),
    [
        (None, 0),
        ({"ephemeral_5m_input_tokens": 30, "ephemeral_1h_input_tokens": 0}, 0),
        ({"ephemeral_5m_input_tokens": 10, "ephemeral_1h_input_tokens": 20}, 20),
        ({"ephemeral_1h_input_tokens": 99}, 30),
        ({"ephemeral_1h_input_tokens": None}, 0),
        ({"ephemeral_1h_input_tokens": -5}, 0),
        ("thirty", 0),
    ],
)
def test_tokens_that_are_kept_for_an_hour_are_told_apart(kept: Any, hour: int):
    """They cost more; whatever is said of them, they are never more than were written."""
    usage = {
        "input_tokens": 5,
        "cache_creation_input_tokens": 30,
        "cache_read_input_tokens": 7,
        "output_tokens": 2,
        "cache_creation": kept,
    }
    body = {"content": [{"type": "text", "text": "hi"}], "stop_reason": "end_turn", "usage": usage}
    assert read({"type": "succeeded", "message": body}).usage == Usage(42, 2, 7, 30, hour)
