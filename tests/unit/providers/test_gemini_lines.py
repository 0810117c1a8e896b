"""Gemini's result lines and answers of single calls: verdicts, flags, tokens and bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchferry.domain.provider import Usage
from batchferry.domain.rows import ResultLine, RowClass, RowFlag, UnreadableLine
from batchferry.providers.gemini.classes import FINISHES, Finish
from batchferry.providers.gemini.lines import judge_answer, read_line

KEY = "0123456789-0-7-1"
S, T, F = RowClass.SUCCEEDED, RowClass.TRANSIENT, RowClass.CONTENT_FILTERED
EMPTY, CUT, FILTERED, CALL = RowFlag.EMPTY, RowFlag.TRUNCATED, RowFlag.FILTERED, RowFlag.TOOL_CALL_PENDING
TEXT, THOUGHT = {"text": "hello"}, {"text": "let me think", "thought": True}
FUNCTION = {"functionCall": {"name": "f", "args": {}}}
PICTURE = {"inlineData": {"mimeType": "image/png", "data": "AA=="}}


def candidate(reason: str | None, *parts: dict[str, Any]) -> dict[str, Any]:
    """A candidate; without parts it has no content at all."""
    made: dict[str, Any] = {"content": {"parts": list(parts), "role": "model"}} if parts else {}
    return made | ({} if reason is None else {"finishReason": reason})


def response(*candidates: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A GenerateContentResponse."""
    return ({"candidates": list(candidates)} if candidates else {}) | more


def read(body: Any, **members: Any) -> ResultLine:
    """The verdict on a line with this response."""
    got = read_line(json.dumps({"key": KEY, "response": body} | members).encode())
    assert isinstance(got, ResultLine)
    return got


MADE = {"usageMetadata": {"promptTokenCount": 3, "candidatesTokenCount": 2}}
NONE_MADE = {"usageMetadata": {"promptTokenCount": 3}}

VERDICTS: list[tuple[dict[str, Any], RowClass, tuple[RowFlag, ...]]] = [
    (response(candidate("STOP", TEXT)), S, ()),
    (response(candidate("STOP", THOUGHT, TEXT)), S, ()),
    (response(candidate("STOP", PICTURE)), S, ()),
    (response(candidate(None, TEXT)), S, ()),
    (response(candidate("SOMETHING_NEW", TEXT)), S, ()),
    (response(candidate("STOP", FUNCTION)), S, (CALL,)),
    (response(candidate("STOP", TEXT, FUNCTION)), S, (CALL,)),
    # cut
    (response(candidate("MAX_TOKENS", TEXT)), S, (CUT,)),
    (response(candidate("MAX_TOKENS")), S, (CUT, EMPTY)),
    (response(candidate("MAX_TOKENS", THOUGHT)), S, (CUT, EMPTY)),
    # filtered
    (response(candidate("SAFETY", TEXT)), S, (FILTERED,)),
    (response(candidate("SAFETY")), F, (FILTERED, EMPTY)),
    (response(candidate("RECITATION")), F, (FILTERED, EMPTY)),
    # broken
    (response(candidate("MALFORMED_FUNCTION_CALL")), T, ()),
    (response(candidate("MALFORMED_FUNCTION_CALL", TEXT)), T, ()),
    (response(candidate("OTHER")), T, ()),
    (response(candidate("SOMETHING_NEW")), T, ()),
    (response(candidate("MISSING_THOUGHT_SIGNATURE")), RowClass.INVALID_REQUEST, ()),
    (response(candidate("PUP_LIMITED_DISABLED")), RowClass.ACCOUNT, ()),
    # silence
    (response(candidate("STOP"), **MADE), S, (EMPTY,)),
    (response(candidate("STOP", {"text": " \n"}), **MADE), S, (EMPTY,)),
    (response(candidate("STOP", THOUGHT), usageMetadata={"thoughtsTokenCount": 9}), S, (EMPTY,)),
    (response(candidate("STOP"), **NONE_MADE), T, ()),
    (response(candidate(None)), T, ()),
    (response(), T, ()),
    (response(**MADE), T, ()),
    # several
    (response(candidate("STOP", TEXT), candidate("MAX_TOKENS", TEXT)), S, (CUT,)),
    (response(candidate("SAFETY"), candidate("STOP", TEXT)), S, (FILTERED, EMPTY)),
    (response(candidate("OTHER"), candidate("STOP", TEXT)), S, (EMPTY,)),
]


@pytest.mark.parametrize(("body", "row_class", "flags"), VERDICTS)
def test_an_answer_is_judged_by_what_it_says(body: Any, row_class: RowClass, flags: tuple[RowFlag, ...]) -> None:
    """Class and flags follow from the candidates; the body's bytes are the line's."""
    got = read(body)
    assert (got.row_class, set(got.flags)) == (row_class, set(flags))
    assert got.wire_id == KEY
    if body:
        assert json.loads(got.body or b"") == body


@pytest.mark.parametrize("reason", FINISHES)
def test_every_finish_reason_without_a_text(reason: str) -> None:
    """None of them passes for a plain success, and every failure has a code that names the reason."""
    got = read(response(candidate(reason), **NONE_MADE))
    wanted = {
        Finish.ENDED: T,
        Finish.TRUNCATED: S,
        Finish.FILTERED: F,
        Finish.BROKEN: T,
        Finish.REFUSED: RowClass.INVALID_REQUEST,
        Finish.ACCOUNT: RowClass.ACCOUNT,
    }[FINISHES[reason]]
    assert got.row_class is wanted
    if FINISHES[reason] in {Finish.FILTERED, Finish.BROKEN, Finish.REFUSED, Finish.ACCOUNT}:
        assert (got.code, got.is_unknown) == (f"finish_{reason.lower()}", False)


def test_a_new_finish_reason_is_counted() -> None:
    """A reason nobody knows is worth a line in the table."""
    got = read(response(candidate("SOMETHING_NEW")))
    assert (got.code, got.is_unknown) == ("finish_something_new", True)


@pytest.mark.parametrize(("reason", "is_unknown"), [("SAFETY", False), ("JAILBREAK", False), ("SOMETHING_NEW", True)])
def test_a_blocked_prompt_is_no_success(reason: str, is_unknown: bool) -> None:
    """Gemini counts it as one; here it is filtered, with its reason and its tokens."""
    got = read(response(promptFeedback={"blockReason": reason}, **NONE_MADE))
    assert (got.row_class, got.code, got.is_unknown) == (F, f"prompt_blocked_{reason.lower()}", is_unknown)
    assert got.usage == Usage(3, 0, 0)


def test_tokens_are_added_up() -> None:
    """Thoughts are output and stand apart; the prompt includes the cached ones; tools' results are further input."""
    usage = {
        "promptTokenCount": 100,
        "cachedContentTokenCount": 40,
        "candidatesTokenCount": 7,
        "thoughtsTokenCount": 5,
        "toolUsePromptTokenCount": 11,
        "totalTokenCount": 123,
    }
    got = read(response(candidate("STOP", TEXT), usageMetadata=usage, modelVersion="gemini-2.5-flash", responseId="r1"))
    assert got.usage == Usage(input_tokens=111, output_tokens=12, cached_tokens=40)
    assert (got.model, got.provider_request_id, got.http_status) == ("gemini-2.5-flash", "r1", 200)
    assert read(response(candidate("STOP", TEXT))).usage is None
    odd = read(response(candidate("STOP", TEXT), usageMetadata={"promptTokenCount": "9", "candidatesTokenCount": -1}))
    assert odd.usage == Usage(9, 0, 0)


def test_an_error_line() -> None:
    """The status object is the native body; the code is a word, the message payload."""
    got = read(None, error={"code": 8, "message": "Resource has been exhausted (e.g. check quota)."})
    assert (got.row_class, got.code, got.http_status) == (T, "RESOURCE_EXHAUSTED", 429)
    assert json.loads(got.body or b"")["code"] == 8
    assert got.message.startswith("Resource")
    assert "Resource" not in repr(got)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b'{"key":"k"}', "no_response_no_error"),
        (b'{"key":"k","response":null,"error":null}', "no_response_no_error"),
        (b'{"key":"k","response":{}}', "empty_body"),
    ],
)
def test_a_line_that_says_nothing(line: bytes, code: str) -> None:
    """It is worth another try."""
    got = read_line(line)
    assert isinstance(got, ResultLine)
    assert (got.row_class, got.code) == (T, code)


@pytest.mark.parametrize(
    ("line", "wire_id"),
    [
        (b"", None),
        (b"\x00\x00", None),
        (b"[]", None),
        (b'{"response":{}}', None),
        (b'{"key":"","response":{}}', None),
        (b'{"key":"' + KEY.encode() + b'","response":{"candidates":[{"con', KEY),
        (b'{"key":"k","response":' + b"[" * 5000 + b"]" * 5000 + b"}", "k"),
    ],
)
def test_lines_that_cannot_be_read(line: bytes, wire_id: str | None) -> None:
    """They say why, with the key where it can still be seen."""
    got = read_line(line)
    assert isinstance(got, UnreadableLine) or got.row_class is not S
    if isinstance(got, UnreadableLine):
        assert got.wire_id == wire_id


def test_a_line_that_is_not_quite_json_is_mended() -> None:
    """Raw bytes, control characters and halves of pairs cost nothing but themselves."""
    line = (
        b'{"key":"k","response":{"candidates":[{"content":{"parts":[{"text":"a\xffb\x01c\\ud800d"}]},'
        b'"finishReason":"STOP","avgLogprobs":NaN}]}}'
    )
    got = read_line(line)
    assert isinstance(got, ResultLine)
    assert (got.row_class, got.flags) == (S, ())
    kept = json.loads(got.body or b"")
    assert kept["candidates"][0]["content"]["parts"][0]["text"] == "a\ufffdb\x01c\ud800d"
    assert kept["candidates"][0]["avgLogprobs"] is None


def test_the_bytes_of_a_response_stay() -> None:
    """White space, order and the spelling of numbers go out as they came."""
    body = b'{ "candidates" : [{"finishReason":"STOP","content":{"parts":[{"text":"x"}]},"avgLogprobs":-1.50e-3}] }'
    got = read_line(b'{"response":' + body + b',"key":"k"}')
    assert isinstance(got, ResultLine)
    assert got.body == body


@given(
    st.binary(max_size=200)
    | st.builds(lambda tail: b'{"key":"k","response":{"candidates":' + tail, st.binary(max_size=80))
)
def test_any_bytes_have_a_verdict(line: bytes) -> None:
    """No line, however broken, is an exception."""
    assert isinstance(read_line(line), ResultLine | UnreadableLine)


@pytest.mark.parametrize(
    ("status", "body", "row_class", "code"),
    [
        (200, json.dumps(response(candidate("STOP", TEXT))).encode(), S, None),
        (200, b"", T, "empty_body"),
        (200, b"{}", T, "empty_body"),
        (200, b'{"candidates":[{"con', RowClass.UNREADABLE, "unreadable_answer"),
        (400, b'{"error":{"code":400,"message":"bad","status":"INVALID_ARGUMENT"}}', RowClass.INVALID_REQUEST, "INVALID_ARGUMENT"),
        (429, b'[{"error":{"code":429,"message":"slow","status":"RESOURCE_EXHAUSTED"}}]', T, "RESOURCE_EXHAUSTED"),
        (503, b"<html>", T, None),
        (403, b"", RowClass.ACCOUNT, None),
        (418, b"{}", RowClass.INVALID_REQUEST, None),
    ],
)  # fmt: skip
def test_the_answer_of_a_single_call(status: int, body: bytes, row_class: RowClass, code: str | None) -> None:
    """It is judged like a line, and keeps its status; a page of some gateway is no body."""
    got = judge_answer(status, "r", body)
    assert (got.row_class, got.code, got.http_status, got.wire_id) == (row_class, code, status, "")
    if got.body is not None:
        json.loads(got.body)
