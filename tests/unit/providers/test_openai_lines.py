import json
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchferry.domain.provider import Usage
from batchferry.domain.rows import ResultLine, RowClass, RowFlag, UnreadableLine
from batchferry.providers.openai.lines import read_line

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
ID = "0123456789-0-17-1"


def line_of(body: bytes, status: object = 200, custom_id: str = ID) -> bytes:
    """A result line around a body."""
    return (
        b'{"id":"batch_req_1","custom_id":'
        + json.dumps(custom_id).encode()
        + b',"response":{"status_code":'
        + json.dumps(status).encode()
        + b',"request_id":"rq_1","body":'
        + body
        + b'},"error":null}'
    )


def read(body: object, endpoint: str = CHAT, status: object = 200) -> ResultLine:
    """The reading of a line around a body, which must be a result."""
    got = read_line(line_of(json.dumps(body).encode(), status), endpoint)
    assert isinstance(got, ResultLine), got
    return got


USAGE = {"prompt_tokens": 12, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
UNCOUNTED = object()


def chat(finish_reason="stop", content="hi", made=3, thought=None, **message):
    """A chat answer of one choice, with so many tokens of output and of reasoning."""
    usage = USAGE | {"completion_tokens": made, "completion_tokens_details": {"reasoning_tokens": thought}}
    return {
        "object": "chat.completion",
        "model": "m-1",
        "choices": [
            {
                "index": 0,
                "finish_reason": finish_reason,
                "message": {"role": "assistant", "content": content, **message},
            }
        ],
        "usage": None if made is UNCOUNTED else usage,
    }


def test_a_success_in_full():
    """Id, class, status, request id, body, model and usage of an ordinary chat line."""
    body = json.dumps(chat()).encode()
    assert read_line(line_of(body), CHAT) == ResultLine(
        wire_id=ID,
        row_class=RowClass.SUCCEEDED,
        http_status=200,
        provider_request_id="rq_1",
        body=body,
        usage=Usage(12, 3, 4),
        model="m-1",
    )


CALLS = [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


@pytest.mark.parametrize(
    ("body", "row_class", "flags"),
    [
        (chat(), RowClass.SUCCEEDED, ()),
        (chat(None), RowClass.SUCCEEDED, ()),
        (chat("length"), RowClass.SUCCEEDED, (RowFlag.TRUNCATED,)),
        (chat("length", ""), RowClass.SUCCEEDED, (RowFlag.TRUNCATED, RowFlag.EMPTY)),
        (chat("length", None), RowClass.SUCCEEDED, (RowFlag.TRUNCATED, RowFlag.EMPTY)),
        (chat("stop", ""), RowClass.SUCCEEDED, (RowFlag.EMPTY,)),
        (chat("stop", "  "), RowClass.SUCCEEDED, (RowFlag.EMPTY,)),
        (chat("stop", []), RowClass.SUCCEEDED, (RowFlag.EMPTY,)),
        (chat("stop", [{"type": "text", "text": "a"}]), RowClass.SUCCEEDED, ()),
        (chat("stop", None, refusal="no"), RowClass.SUCCEEDED, (RowFlag.REFUSED,)),
        (chat("content_filter", "half an ans"), RowClass.SUCCEEDED, (RowFlag.FILTERED,)),
        (chat("content_filter", ""), RowClass.CONTENT_FILTERED, (RowFlag.FILTERED, RowFlag.EMPTY)),
        (chat("tool_calls", None, tool_calls=CALLS), RowClass.SUCCEEDED, (RowFlag.TOOL_CALL_PENDING,)),
        (chat("tool_calls", "I look.", tool_calls=CALLS), RowClass.SUCCEEDED, (RowFlag.TOOL_CALL_PENDING,)),
        (chat("function_call", None, function_call={"name": "f"}), RowClass.SUCCEEDED, (RowFlag.TOOL_CALL_PENDING,)),
        (chat("tool_use", None, tool_calls=CALLS), RowClass.SUCCEEDED, (RowFlag.TOOL_CALL_PENDING,)),
        (chat(None, None, tool_calls=CALLS), RowClass.SUCCEEDED, (RowFlag.TOOL_CALL_PENDING,)),
        # The request named the function, so the call is the answer.
        (chat("stop", None, tool_calls=CALLS), RowClass.SUCCEEDED, ()),
        (chat("STOP", None, tool_calls=CALLS), RowClass.SUCCEEDED, ()),
        (chat("stop", "text", tool_calls=CALLS), RowClass.SUCCEEDED, ()),
        (chat("stop", None, function_call={"name": "f"}), RowClass.SUCCEEDED, ()),
        # A call whose arguments are cut waits for nobody.
        (chat("length", None, tool_calls=CALLS), RowClass.SUCCEEDED, (RowFlag.TRUNCATED,)),
        (chat("stop", None, audio={"id": "a"}), RowClass.SUCCEEDED, ()),
        (chat("stop", "", images=[{"type": "image_url"}]), RowClass.SUCCEEDED, ()),
        # Words of compatible servers.
        (chat("model_length", "half"), RowClass.SUCCEEDED, (RowFlag.TRUNCATED,)),
        (chat("model_context_window_exceeded", "half"), RowClass.SUCCEEDED, (RowFlag.TRUNCATED,)),
        (chat("max_tokens", "half"), RowClass.SUCCEEDED, (RowFlag.TRUNCATED,)),
        (chat("time_limit", "half"), RowClass.SUCCEEDED, (RowFlag.TRUNCATED,)),
        (chat("sensitive", "half"), RowClass.SUCCEEDED, (RowFlag.FILTERED,)),
        (chat("sensitive", ""), RowClass.CONTENT_FILTERED, (RowFlag.FILTERED, RowFlag.EMPTY)),
        (chat("eos"), RowClass.SUCCEEDED, ()),
        (
            chat()
            | {
                "choices": [*chat()["choices"], *chat("length")["choices"], *chat("stop", None, refusal="n")["choices"]]
            },
            RowClass.SUCCEEDED,
            (RowFlag.TRUNCATED, RowFlag.REFUSED),
        ),
        (
            chat() | {"choices": [*chat("content_filter", "")["choices"], *chat()["choices"]]},
            RowClass.SUCCEEDED,
            (RowFlag.FILTERED, RowFlag.EMPTY),
        ),
        # Of several choices one broke off: the row has an answer, and the flag tells of the other.
        (
            chat() | {"choices": [*chat("error", "half")["choices"], *chat()["choices"]]},
            RowClass.SUCCEEDED,
            (RowFlag.TRUNCATED,),
        ),
        (
            chat() | {"choices": [*chat("error", "")["choices"], *chat()["choices"]]},
            RowClass.SUCCEEDED,
            (RowFlag.EMPTY,),
        ),
    ],
)
def test_chat_flags(body, row_class, flags):
    """Each way in which a chat answer is less than an answer has its flag; of several choices the worst counts."""
    got = read(body)
    assert (got.row_class, got.flags) == (row_class, flags)


CUT = (RowClass.SUCCEEDED, (RowFlag.TRUNCATED, RowFlag.EMPTY), None)
SILENT = (RowClass.SUCCEEDED, (RowFlag.EMPTY,), None)
NOTHING = (RowClass.TRANSIENT, (), "empty_answer")
BLOCKED = (RowClass.CONTENT_FILTERED, (RowFlag.FILTERED, RowFlag.EMPTY), None)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        # A token limit: billed, and the same again would end the same way.
        (chat("length", ""), CUT),
        (chat("length", None, made=0), CUT),
        (chat("length", "", made=UNCOUNTED), CUT),
        (chat("length", "", made=500, thought=500), CUT),
        # Every token went into reasoning, whatever the server calls the end.
        (chat("stop", "", made=500, thought=500), CUT),
        (chat(None, "", made=500, thought=500), CUT),
        (chat("stop", None, made=500, thought=512), CUT),
        # The model ended by itself and was billed, or the server does not count.
        (chat("stop", "", made=3), SILENT),
        (chat("stop", "", made=500, thought=499), SILENT),
        (chat("stop", "", made=3, thought=0), SILENT),
        (chat("stop", "", made=UNCOUNTED), SILENT),
        (chat("stop", " \n", made=2), SILENT),
        (chat("eos", "", made=1), SILENT),
        # It ended having made no token: servers under load do that.
        (chat("stop", "", made=0), NOTHING),
        (chat("stop", "", made=0, thought=0), NOTHING),
        # Nobody says that it ended.
        (chat(None, "", made=3), NOTHING),
        (chat(None, "", made=0), NOTHING),
        (chat(None, None, made=UNCOUNTED), NOTHING),
        (chat() | {"choices": []}, NOTHING),
        (chat(made=0) | {"choices": []}, NOTHING),
        (chat(made=500, thought=500) | {"choices": []}, NOTHING),
        ({"object": "chat.completion", "model": "m-1"}, NOTHING),
        ({"choices": [{"index": 0}], "model": "m-1"}, NOTHING),
        # It announces calls and makes none.
        (chat("tool_calls", None, made=9), NOTHING),
        (chat("tool_calls", "", made=9, tool_calls=[]), NOTHING),
        # The server broke off, with nothing or with half a text.
        *[
            (chat(reason, text), (RowClass.TRANSIENT, (), "broken_off"))
            for reason in ("error", "abort", "cancelled", "network_error", "insufficient_system_resource")
            for text in ("", "half a te")
        ],
        # A filter.
        (chat("content_filter", "", made=0), BLOCKED),
        (chat("content_filter", None, made=UNCOUNTED), BLOCKED),
    ],
)
def test_an_answer_that_says_nothing(body, expected):
    """Filter, token limit, silence by choice and a hole are told apart by the end's reason and the usage."""
    got = read(body)
    assert (got.row_class, got.flags, got.code) == expected
    assert got.body == json.dumps(body).encode()
    assert not got.is_unknown


def message(*parts, kind="message"):
    """An output item of a response."""
    return {"type": kind, "role": "assistant", "content": list(parts)}


TEXT, NO_TEXT = {"type": "output_text", "text": "a"}, {"type": "output_text", "text": ""}
REASONING = {"type": "reasoning", "summary": [], "content": None}
CALL = {"type": "function_call", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("members", "row_class", "flags", "code"),
    [
        ({"status": "completed", "output": [REASONING, message(TEXT)]}, RowClass.SUCCEEDED, (), None),
        ({"status": "completed", "output": [message(NO_TEXT)]}, RowClass.SUCCEEDED, (RowFlag.EMPTY,), None),
        ({"status": "completed", "output": [REASONING]}, *SILENT),
        ({"status": "completed", "output": []}, *NOTHING),
        ({"output": [message(NO_TEXT)]}, *NOTHING),
        ({"object": "response"}, *NOTHING),
        ({"status": "completed", "output": [message(NO_TEXT)], "usage": {"output_tokens": 0}}, *NOTHING),
        ({"status": "completed", "output": [], "usage": {"output_tokens": 5}}, *SILENT),
        (
            {
                "status": "completed",
                "output": [REASONING],
                "usage": {"output_tokens": 64, "output_tokens_details": {"reasoning_tokens": 64}},
            },
            *CUT,
        ),
        ({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, *CUT),
        ({"status": "incomplete", "incomplete_details": None, "output": []}, *CUT),
        (
            {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}, "output": [CALL]},
            RowClass.SUCCEEDED,
            (RowFlag.TRUNCATED,),
            None,
        ),
        *[
            ({"status": "completed", "tool_choice": choice, "output": [item]}, RowClass.SUCCEEDED, flags, None)
            for choice, item, flags in (
                ("auto", CALL, (RowFlag.TOOL_CALL_PENDING,)),
                ("required", CALL, (RowFlag.TOOL_CALL_PENDING,)),
                ({"type": "allowed_tools", "mode": "required"}, CALL, (RowFlag.TOOL_CALL_PENDING,)),
                ({"type": "function", "name": "f"}, CALL, ()),
                ({"type": "custom", "name": "f"}, {"type": "custom_tool_call", "name": "f"}, ()),
                ({"type": "function", "name": "f"}, {"type": "mcp_approval_request"}, (RowFlag.TOOL_CALL_PENDING,)),
                ({"type": "shell"}, {"type": "shell_call"}, (RowFlag.TOOL_CALL_PENDING,)),
            )
        ],
        ({"status": "completed", "output": [{"type": "message", "content": "plain"}]}, RowClass.SUCCEEDED, (), None),
        ({"status": "completed", "output": [{"type": "image_generation_call"}]}, RowClass.SUCCEEDED, (), None),
        (
            {"status": "completed", "output": [message({"type": "refusal", "refusal": "no"})]},
            RowClass.SUCCEEDED,
            (RowFlag.REFUSED,),
            None,
        ),
        (
            {"status": "completed", "output": [{"type": "function_call", "name": "f"}]},
            RowClass.SUCCEEDED,
            (RowFlag.TOOL_CALL_PENDING,),
            None,
        ),
        (
            {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}, "output": [message(TEXT)]},
            RowClass.SUCCEEDED,
            (RowFlag.TRUNCATED,),
            None,
        ),
        (
            {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}, "output": [REASONING]},
            RowClass.SUCCEEDED,
            (RowFlag.TRUNCATED, RowFlag.EMPTY),
            None,
        ),
        (
            {"status": "incomplete", "incomplete_details": {"reason": "content_filter"}, "output": [message(TEXT)]},
            RowClass.SUCCEEDED,
            (RowFlag.FILTERED,),
            None,
        ),
        (
            {"status": "incomplete", "incomplete_details": {"reason": "content_filter"}, "output": []},
            RowClass.CONTENT_FILTERED,
            (RowFlag.FILTERED, RowFlag.EMPTY),
            None,
        ),
        (
            {"status": "failed", "error": {"code": "server_error", "message": "m"}, "output": []},
            RowClass.TRANSIENT,
            (),
            "server_error",
        ),
        (
            {"status": "failed", "error": {"code": "invalid_prompt", "message": "m"}},
            RowClass.CONTENT_FILTERED,
            (),
            "invalid_prompt",
        ),
        ({"status": "failed", "error": None}, RowClass.TRANSIENT, (), "response_failed"),
        ({"status": "in_progress"}, RowClass.TRANSIENT, (), "response_in_progress"),
        ({"status": "queued"}, RowClass.TRANSIENT, (), "response_queued"),
        ({"status": "cancelled"}, RowClass.TRANSIENT, (), "response_cancelled"),
        *[
            ({"status": "failed", "error": {"code": code, "message": "m"}, "output": []}, row_class, (), code)
            for code, row_class in (
                ("rate_limit_exceeded", RowClass.TRANSIENT),
                ("vector_store_timeout", RowClass.TRANSIENT),
                ("insufficient_quota", RowClass.ACCOUNT),
                ("context_length_exceeded", RowClass.TOO_LONG),
                ("bio_policy", RowClass.CONTENT_FILTERED),
                ("invalid_image_url", RowClass.INVALID_REQUEST),
                ("data_residency_mismatch", RowClass.INVALID_REQUEST),
            )
        ],
        ({"status": "completed", "error": None, "output": [message(TEXT)]}, RowClass.SUCCEEDED, (), None),
    ],
)
def test_responses(members, row_class, flags, code):
    """A response inside a 200 may still have failed, be cut, refused, blocked or empty."""
    got = read({"object": "response", "id": "resp_1", **members}, RESPONSES)
    assert (got.row_class, got.flags, got.code) == (row_class, flags, code)


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/embeddings", {"object": "list", "data": [], "usage": {"prompt_tokens": 7, "total_tokens": 7}}),
        ("/v1/embeddings", {"object": "list", "model": "e"}),
        ("/v1/moderations", {"results": [], "model": "omni"}),
        ("/v1/completions", {"choices": [], "model": "m-1"}),
    ],
)
def test_an_answer_without_its_one_member(endpoint, body):
    """Embeddings, moderations and completions that bring none are a hole: the row may go again."""
    got = read(body, endpoint)
    assert (got.row_class, got.flags, got.code) == NOTHING


@pytest.mark.parametrize(
    ("endpoint", "body", "flags"),
    [
        ("/v1/embeddings", {"object": "list", "data": [{"embedding": [0.1]}]}, ()),
        ("/v1/moderations", {"results": [{"flagged": False}]}, ()),
        ("/v1/completions", {"choices": [{"text": "a", "finish_reason": "stop"}]}, ()),
        ("/v1/completions", {"choices": [{"text": "a", "finish_reason": "length"}]}, (RowFlag.TRUNCATED,)),
        ("/v1/completions", {"choices": [{"text": "", "finish_reason": "stop"}]}, (RowFlag.EMPTY,)),
        ("/openai/deployments/x/chat/completions?api-version=1", chat("length"), (RowFlag.TRUNCATED,)),
        ("/v1/videos", {"object": "video"}, ()),
    ],
)
def test_other_endpoints(endpoint, body, flags):
    """Each endpoint's answer is judged by its own members; an endpoint nobody knows is passed on."""
    got = read(body, endpoint)
    assert (got.row_class, got.flags) == (RowClass.SUCCEEDED, flags)


@pytest.mark.parametrize(
    ("endpoint", "usage", "tokens"),
    [
        (CHAT, {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}, Usage(5, 6, 0)),
        (CHAT, {"prompt_tokens": 5, "completion_tokens": 6, "prompt_tokens_details": None}, Usage(5, 6, 0)),
        (
            RESPONSES,
            {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 8}, "output_tokens": 2},
            Usage(9, 2, 8),
        ),
        # what was written to the cache, in either vocabulary; never more than the input beside what was read from it
        (
            CHAT,
            {
                "prompt_tokens": 90,
                "completion_tokens": 6,
                "prompt_tokens_details": {"cached_tokens": 40, "cache_write_tokens": 30},
            },
            Usage(90, 6, 40, 30),
        ),
        (
            RESPONSES,
            {
                "input_tokens": 9,
                "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 9},
                "output_tokens": 2,
            },
            Usage(9, 2, 4, 5),
        ),
        (
            CHAT,
            {"prompt_tokens": 5, "completion_tokens": 6, "prompt_tokens_details": {"cache_write_tokens": -1}},
            Usage(5, 6, 0, 0),
        ),
        ("/v1/embeddings", {"prompt_tokens": 7, "total_tokens": 7}, Usage(7, 0, 0)),
        ("/v1/embeddings", {"total_tokens": 7}, Usage(7, 0, 0)),
        (CHAT, {"prompt_tokens": "5", "completion_tokens": 6.0}, Usage(5, 6, 0)),
        (CHAT, {"prompt_tokens": -5, "completion_tokens": None}, Usage(0, 0, 0)),
        (CHAT, {"prompt_tokens": "many", "completion_tokens": 1}, Usage(0, 1, 0)),
        (CHAT, {}, None),
        (CHAT, None, None),
        (CHAT, "free", None),
    ],
)
def test_usage_in_every_vocabulary(endpoint, usage, tokens):
    """Tokens are read from both vocabularies, odd ones as far as they make sense, and never invented."""
    assert read(chat() | {"output": [message(TEXT)], "data": [1], "usage": usage}, endpoint).usage == tokens


@pytest.mark.parametrize("body", [b"null", b"{}", b"{ }", b'""', b"[]"])
def test_a_200_without_a_body_is_nobodys_fault(body):
    """An empty body under 200 is a hole in the transport: the row may go again."""
    got = read_line(line_of(body), CHAT)
    assert isinstance(got, ResultLine)
    assert (got.row_class, got.code, got.flags) == (RowClass.TRANSIENT, "empty_body", ())


def test_a_row_error_sits_in_the_body():
    """A refused row has a null outer error; class, code, message and status come from the body's."""
    body = {
        "error": {
            "message": "too long",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
        }
    }
    got = read(body, status=400)
    assert (got.row_class, got.http_status, got.code, got.message) == (
        RowClass.TOO_LONG,
        400,
        "context_length_exceeded",
        "too long",
    )
    assert got.body == json.dumps(body).encode()


@pytest.mark.parametrize(
    ("line", "row_class", "code", "status"),
    [
        ({"response": None, "error": {"code": "batch_expired", "message": "m"}}, RowClass.EXPIRED, "batch_expired", None),
        ({"error": {"code": "batch_cancelled", "message": "m"}}, RowClass.CANCELLED, "batch_cancelled", None),
        ({"response": None, "error": {"code": "request_timeout"}}, RowClass.TRANSIENT, "request_timeout", None),
        ({"response": None, "error": None}, RowClass.TRANSIENT, "no_response_no_error", None),
        ({}, RowClass.TRANSIENT, "no_response_no_error", None),
        ({"response": {"status_code": 0, "request_id": None, "body": None}}, RowClass.TRANSIENT, None, 0),
        ({"response": {"status_code": 503, "body": "upstream gone"}}, RowClass.TRANSIENT, None, 503),
        ({"response": {"status_code": 429, "body": {"error": {"code": "insufficient_quota"}}}}, RowClass.ACCOUNT, "insufficient_quota", 429),
        ({"response": {"status_code": 422, "body": {"detail": [{"msg": "bad"}]}}}, RowClass.INVALID_REQUEST, None, 422),
        # servers that drop the response, or fill both
        ({"response": None, "error": {"code": "inference_failed", "message": "[x] y: HTTP 400"}}, RowClass.INVALID_REQUEST, "inference_failed", 400),
        ({"response": None, "error": {"code": "inference_failed", "message": "[x] y: HTTP 503"}}, RowClass.TRANSIENT, "inference_failed", 503),
        ({"response": None, "error": "it broke"}, RowClass.TRANSIENT, None, None),
        (
            {"response": {"status_code": 400, "body": None}, "error": {"object": "error", "message": "maximum context length", "type": "BadRequestError", "code": 400}},
            RowClass.TOO_LONG,
            "BadRequestError",
            400,
        ),
        ({"response": {"body": {"error": {"code": "server_error"}}}}, RowClass.TRANSIENT, "server_error", None),
        ({"response": {"status_code": 200, "body": {"error": {"code": "rate_limit_exceeded"}}}}, RowClass.TRANSIENT, "rate_limit_exceeded", 200),
        ({"response": {"body": {"mystery": 1}}}, RowClass.TRANSIENT, "no_status", None),
    ],
)  # fmt: skip
def test_failures_in_every_shape(line, row_class, code, status):
    """Wherever a server puts the failure, its class, code and status are found."""
    got = read_line(json.dumps({"custom_id": ID, **line}).encode(), CHAT)
    assert isinstance(got, ResultLine)
    assert (got.wire_id, got.row_class, got.code, got.http_status) == (ID, row_class, code, status)


@pytest.mark.parametrize(
    ("line", "row_class", "is_unknown"),
    [
        ({"response": {"status_code": 400, "body": {"error": {"code": "brand_new"}}}}, RowClass.INVALID_REQUEST, True),
        ({"response": {"status_code": 418, "body": {"error": {"message": "m"}}}}, RowClass.INVALID_REQUEST, True),
        ({"response": {"status_code": 500, "body": {"error": {"code": "brand_new"}}}}, RowClass.TRANSIENT, True),
        ({"response": None, "error": {"code": "brand_new"}}, RowClass.TRANSIENT, True),
        ({"response": None, "error": {"message": "m"}}, RowClass.TRANSIENT, True),
        ({"response": {"body": {"mystery": 1, "more": "members"}}}, RowClass.TRANSIENT, True),
        ({"response": {"status_code": 400, "body": {"error": {"type": "invalid_request_error"}}}}, RowClass.INVALID_REQUEST, False),
        ({"response": {"status_code": 500, "body": None}}, RowClass.TRANSIENT, False),
        ({"response": {"status_code": 0, "body": None}}, RowClass.TRANSIENT, False),
        ({"response": None, "error": None}, RowClass.TRANSIENT, False),
        ({"response": {"status_code": 200, "body": {}}}, RowClass.TRANSIENT, False),
        ({"response": {"status_code": 200, "body": chat()}}, RowClass.SUCCEEDED, False),
        ({"response": {"status_code": 200, "body": chat("a_new_reason")}}, RowClass.SUCCEEDED, False),
    ],
)  # fmt: skip
def test_what_no_table_knows_is_marked(line, row_class, is_unknown):
    """A failed row that only has the default class says so, for a metric; a known one and a success do not."""
    got = read_line(json.dumps({"custom_id": ID, **line}).encode(), CHAT)
    assert isinstance(got, ResultLine)
    assert (got.row_class, got.is_unknown) == (row_class, is_unknown)


def test_an_unknown_status_of_a_response_is_marked():
    """The responses endpoint's own status words are known; another one is no answer either, and counts as unknown."""
    assert not read({"object": "response", "status": "in_progress"}, RESPONSES).is_unknown
    got = read({"object": "response", "status": "pondering"}, RESPONSES)
    assert (got.row_class, got.code, got.is_unknown) == (RowClass.TRANSIENT, "response_pondering", True)


def test_a_success_may_leave_members_out():
    """A line without status, ids and nulls but with a real answer is an answer."""
    got = read_line(json.dumps({"custom_id": ID, "response": {"body": chat()}}).encode(), CHAT)
    assert isinstance(got, ResultLine)
    assert (got.row_class, got.http_status, got.usage) == (RowClass.SUCCEEDED, None, Usage(12, 3, 4))


@pytest.mark.parametrize(
    ("custom_id", "wire_id"),
    [("x", "x"), (17, "17"), (1.5, "1.5"), (None, None), ("", None), (True, None), ([1], None)],
)
def test_ids_of_other_types(custom_id, wire_id):
    """A number as custom_id is read as its text; no id at all makes the line unreadable."""
    got = read_line(
        json.dumps({"custom_id": custom_id, "response": {"status_code": 200, "body": chat()}}).encode(), CHAT
    )
    assert got.wire_id == wire_id
    assert isinstance(got, UnreadableLine) is (wire_id is None)


def test_members_of_the_wrong_type_do_not_cost_the_row():
    """A status as text, choices with odd members and a list as model still make a success."""
    body = chat("length") | {"model": ["m"]}
    body["choices"][0]["message"]["refusal"] = {"odd": True}
    body["choices"].append("odd")
    got = read(body, status="200")
    assert (got.row_class, got.http_status, got.model) == (RowClass.SUCCEEDED, 200, None)
    assert RowFlag.TRUNCATED in got.flags
    assert got.usage == Usage(12, 3, 4)


# ----------------------------------------------------------------------------------- bytes stay as they are

SPECIAL = [
    b'{"choices":[{"message":{"content":"first\xe2\x80\xa8second\xe2\x80\xa9third"}}]}',
    b'{"choices":[{"message":{"content":"nov\\u0000mber"}}]}',
    b'{"choices":[ {"message" : {"content":"a\\/b\\u00e9"}} ], "n":1E400, "n":123456789012345678901234567890.10}',
    b'{"choices":[{"message":{"content":"x"}}],"id":' + b"9" * 6000 + b"}",
    b'{"choices":[{"message":{"content":"\\ud83d\\ude00 half \\ud83d, \\ude00 and \\\\ud800"}}]}',
]


@pytest.mark.parametrize("body", SPECIAL)
def test_special_bodies_keep_their_bytes(body):
    """Separators, NUL escapes, huge numbers, double keys, blanks and half surrogate pairs pass unchanged."""
    got = read_line(line_of(body), CHAT)
    assert isinstance(got, ResultLine)
    assert (got.row_class, got.body) == (RowClass.SUCCEEDED, body)


NUMBERS = st.from_regex(
    re.compile(r"-?(0|[1-9][0-9]{0,40})(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,4})?", re.ASCII), fullmatch=True
)
BLANKS = st.sampled_from(["", " ", "\t", "  "])
TEXTS = st.text(max_size=20).flatmap(
    lambda text: st.sampled_from(
        [json.dumps(text), json.dumps(text, ensure_ascii=text.encode(errors="ignore").decode() != text)]
    )
)


def members(inner):
    """Texts of JSON objects, blanks and double keys included."""
    return st.lists(st.tuples(TEXTS, BLANKS, inner), max_size=4).map(
        lambda given: "{" + ",".join(f"{name}{blank}:{blank}{value}" for name, blank, value in given) + "}"
    )


def items(inner):
    """Texts of JSON arrays."""
    return st.lists(st.tuples(BLANKS, inner), max_size=4).map(
        lambda given: "[" + ",".join(b + v + b for b, v in given) + "]"
    )


JSON_TEXTS = st.recursive(
    NUMBERS | TEXTS | st.sampled_from(["null", "true", "false"]),
    lambda inner: members(inner) | items(inner),
    max_leaves=12,
)
ENDPOINTS = st.sampled_from([CHAT, RESPONSES, "/v1/embeddings", "/v1/completions", "/v1/moderations", "/v1/other"])


@given(JSON_TEXTS, st.sampled_from([200, 400, 500, 0]), ENDPOINTS)
def test_any_body_keeps_its_bytes(text, status, endpoint):
    """Whatever valid JSON the provider answers comes back byte for byte (an absent body is null)."""
    body = text.encode()
    got = read_line(line_of(body, status), endpoint)
    assert isinstance(got, ResultLine)
    assert got.body == (None if body == b"null" else body)


@given(st.binary(max_size=200), ENDPOINTS)
def test_no_bytes_break_the_reader(noise, endpoint):
    """Any bytes, alone or inside a line, are a result or an unreadable line; nothing is raised."""
    for line in (noise, line_of(noise), line_of(b'{"choices":[{"message":{"content":"' + noise + b'"}}]}')):
        assert isinstance(read_line(line, endpoint), ResultLine | UnreadableLine)


# ------------------------------------------------------------------------------------------ second reading


def content_of(got) -> str:
    """The content of the first choice."""
    assert isinstance(got, ResultLine), got
    return msgspec.json.decode(got.body)["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"a\xffb", "a\ufffdb"),
        (b"a\x01b\x00c", "a\x01b\x00c"),
        (b"tab\there", "tab\there"),
        (b'quote \\" and \x02 \\\\', 'quote " and \x02 \\'),
    ],
)
def test_a_line_that_is_not_quite_json_is_mended(raw, text):
    """Bytes that are no UTF-8 and raw control characters do not cost the answer; the body is valid JSON after."""
    got = read_line(
        line_of(b'{"choices":[{"message":{"content":"' + raw + b'"}}],"big":12345678901234567890123}'), CHAT
    )
    assert content_of(got) == text
    assert got.row_class is RowClass.SUCCEEDED
    assert got.body.endswith(b'"big":12345678901234567890123}')


def test_a_number_that_json_has_not_becomes_null():
    """NaN and infinities, which some servers write into logprobs, become null; the same words in a text stay."""
    got = read_line(
        line_of(b'{"choices":[{"message":{"content":"NaN -Infinity"}}],"p":[NaN,-Infinity,Infinity,1.50]}'), CHAT
    )
    assert isinstance(got, ResultLine)
    assert got.body == b'{"choices":[{"message":{"content":"NaN -Infinity"}}],"p":[null,null,null,1.50]}'


@pytest.mark.parametrize("around", [(b"\xef\xbb\xbf", b""), (b"", b"\r"), (b"\x00\x00", b"\x00"), (b" ", b" \n")])
def test_what_stands_around_a_line_does_not_matter(around):
    """A byte order mark, NUL padding and blanks are dropped."""
    body = json.dumps(chat()).encode()
    got = read_line(around[0] + line_of(body) + around[1], CHAT)
    assert isinstance(got, ResultLine)
    assert got.body == body


@pytest.mark.parametrize(
    ("line", "reason", "wire_id"),
    [
        (b'{"id":"batch_req_2","custom_id":"0123456789-0-18-1","response":{"status_code":200,"bo', "not JSON", "0123456789-0-18-1"),
        (b'{"custom_id" : "r2", "response": tru', "not JSON", "r2"),
        (line_of(b"{}") + line_of(b"{}", custom_id="other"), "not JSON", ID),
        (line_of(b"[" * 5000 + b"]" * 5000), "nested too deep", ID),
        (b"[1,2]", "not a result object", None),
        (b'"custom_id"', "not a result object", None),
        (b'{"custom_id":"r3","response":[]}', "not a result object", "r3"),
        (b'{"response":null}', "no custom_id", None),
        (b"garbage", "not JSON", None),
        (b"  \x00 ", "empty line", None),
        (b"", "empty line", None),
    ],
)  # fmt: skip
def test_what_cannot_be_read_says_so(line, reason, wire_id):
    """A line beyond mending names its reason, and its row where an id can still be seen."""
    assert read_line(line, CHAT) == UnreadableLine(reason, wire_id)


def test_an_id_inside_an_answer_does_not_win():
    """Of several ids in a broken line the one of our making is taken."""
    line = b'{"custom_id":"theirs","x":{"custom_id":"0123456789-1-5-2"},'
    assert read_line(line, CHAT) == UnreadableLine("not JSON", "0123456789-1-5-2")


def test_no_payload_in_reprs():
    """Neither answer nor message shows when a result is printed."""
    got = read({"error": {"message": "you said: hello", "code": "invalid_value"}}, status=400)
    assert "hello" not in repr(got)
