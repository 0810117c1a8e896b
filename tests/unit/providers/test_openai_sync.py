"""One call of the synchronous endpoint through the OpenAI adapter: address, body, verdict, hints, broken calls."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any, Self

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai_kit import BASE, CHAT, KEY, HandClock, Server, account, answer, error, provider

from batchferry.domain.provider import CallFailure, PaceHints, Usage
from batchferry.domain.rows import ResultLine, RowClass, RowFlag, SyncAnswer
from batchferry.providers.openai import OpenAIProvider
from batchferry.providers.openai.lines import judge_answer, read_line
from batchferry.providers.synccall import endpoint_address

EMBEDDINGS = "/v1/embeddings"
BODY = b'{"model":"gpt-5-mini",  "messages":[{"role":"user","content":"caf\\u00e9 1.0e2"}]}'
HTML = {"content-type": "text/html"}
DAY_S = 86_400.0


def chat(text: str = "hi", reason: str = "stop") -> dict[str, Any]:
    """A chat answer."""
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "gpt-5-mini-2025-08-07",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12},
    }


async def call(server: Server, endpoint: str = CHAT, timeout_s: float = 5.0, **changes: Any) -> SyncAnswer:
    """One call at a scripted server."""
    made = provider(server, **changes)
    try:
        return await made.answer(endpoint, BODY, timeout_s)
    finally:
        await made.close()


# ------------------------------------------------------------------------------------------- the request


@pytest.mark.parametrize(
    ("base", "endpoint", "address"),
    [
        ("https://h/v1", CHAT, "https://h/v1/chat/completions"),
        ("https://h/v1/", EMBEDDINGS, "https://h/v1/embeddings"),
        ("https://h", CHAT, "https://h/chat/completions"),
        ("https://h/openai/v1beta", "/v1/responses", "https://h/openai/v1beta/responses"),
        ("https://h/compatible-mode/v1", CHAT, "https://h/compatible-mode/v1/chat/completions"),
        ("https://h/v4", "/v4/chat/completions", "https://h/v4/chat/completions"),
        ("https://h/v1", "/chat/completions", "https://h/v1/chat/completions"),
        ("https://h/v1", "/vision/answers", "https://h/v1/vision/answers"),
    ],
)
def test_the_version_stands_once_in_the_address(base: str, endpoint: str, address: str) -> None:
    """The base's own version is kept, the endpoint's is taken off, and neither is doubled."""
    assert endpoint_address(base, endpoint) == address


async def test_a_call_sends_the_body_unchanged_with_the_accounts_headers() -> None:
    """The bytes go out as they are, as JSON, with key, gateway header and query parameters."""
    server = Server(answer(200, chat()))
    await call(server, headers={"X-Gateway": "g"}, query={"api-version": "1"})
    request = server.requests[0]
    assert (request.method, str(request.url)) == ("POST", f"{BASE}/chat/completions?api-version=1")
    assert server.bodies == [BODY]
    assert request.headers["content-type"] == "application/json"
    assert request.headers["authorization"] == f"Bearer {KEY}"
    assert request.headers["x-gateway"] == "g"


@pytest.mark.parametrize("status", [408, 409, 429, 500, 503])
async def test_nothing_is_repeated(status: int) -> None:
    """One call is one request, even when the server asks for a repeat and the table of other calls knows one."""
    server = Server(answer(status, error(), {"x-should-retry": "true", "retry-after": "0"}))
    assert (await call(server)).failure is not None
    assert len(server.requests) == 1


# ------------------------------------------------------------------------------------------- the verdict


async def test_an_answer_is_judged_like_a_line() -> None:
    """Class, flags, usage, model, status and request id are read; the body's bytes stay as they came."""
    raw = json.dumps(chat("cut", "length"), indent=2).encode()
    got = await call(Server(answer(200, raw, {"x-request-id": "req_1"})))
    assert got.failure is None
    assert not got.may_have_run
    line = got.line
    assert (line.wire_id, line.row_class, line.http_status, line.provider_request_id) == (
        "",
        RowClass.SUCCEEDED,
        200,
        "req_1",
    )
    assert (line.flags, line.usage, line.model) == (
        (RowFlag.TRUNCATED,),
        Usage(9, 3, 0),
        "gpt-5-mini-2025-08-07",
    )
    assert line.body == raw


BODIES: tuple[object, ...] = (
    chat(),
    chat("", "stop"),
    chat("", "content_filter"),
    {"choices": []},
    {"error": {"code": "server_error", "message": "m"}},
    {"error": {"code": "context_length_exceeded", "message": "m"}},
    {"error": {"code": "insufficient_quota", "type": "insufficient_quota", "message": "m"}},
    {"error": {"code": "model_not_found", "message": "m"}},
    {"error": {"code": "never_heard_of_it", "message": "m"}},
    {"error": "HTTP 429 slow down"},
    {"detail": "Not Found"},
    {"object": "error", "message": "m", "code": 400},
    {},
    [],
    None,
    "text",
    7,
)


@pytest.mark.parametrize("endpoint", [CHAT, "/v1/responses", EMBEDDINGS])
@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
@pytest.mark.parametrize("status", [200, 400, 404, 429, 500])
def test_an_answer_and_a_line_with_the_same_answer_end_alike(status: int, body: object, endpoint: str) -> None:
    """Whatever a server says, it means the same in a result file and in a call of its own."""
    line = json.dumps({"custom_id": "x", "response": {"status_code": status, "request_id": "r", "body": body}})
    listed = read_line(line.encode(), endpoint)
    assert isinstance(listed, ResultLine)
    assert judge_answer(status, "r", json.dumps(body).encode(), endpoint) == _renamed(listed)


def _renamed(line: ResultLine) -> ResultLine:
    return type(line)(**{name: getattr(line, name) for name in line.__struct_fields__} | {"wire_id": ""})


@given(st.text(max_size=30), st.sampled_from([b"", b"\xff", b"\x00", b"\n", b"\\ud83d", b"\xe2\x80\xa8"]))
def test_odd_texts_are_mended_like_in_a_line(text: str, odd: bytes) -> None:
    """Bytes that are no UTF-8, raw control characters and half surrogate pairs end as they do in a result line."""
    quoted = json.dumps(text, ensure_ascii=False).encode(errors="replace")[:-1] + odd + b'"'
    body = b'{"choices":[{"finish_reason":"stop","message":{"content":' + quoted + b"}}]}"
    line = b'{"custom_id":"x","response":{"status_code":200,"request_id":"r","body":' + body + b'},"error":null}'
    listed = read_line(line, CHAT)
    assert isinstance(listed, ResultLine)
    judged = judge_answer(200, "r", body, CHAT)
    assert judged == _renamed(listed)
    assert judged.row_class is RowClass.SUCCEEDED


@pytest.mark.parametrize("frame", [b"%s", b"\n\n %s\n", b"\xef\xbb\xbf%s", b"%s\x00\x00"])
def test_what_stands_around_an_answer_is_left_out(frame: bytes) -> None:
    """Keep-alive blanks, a byte order mark and padding are no part of the answer."""
    raw = json.dumps(chat("", "length")).encode()
    judged = judge_answer(200, None, frame % raw, CHAT)
    assert (judged.row_class, judged.body) == (RowClass.SUCCEEDED, raw)
    assert RowFlag.TRUNCATED in judged.flags


@pytest.mark.parametrize(
    ("raw", "row_class", "code"),
    [
        (b"", RowClass.TRANSIENT, "empty_body"),
        (b" \n", RowClass.TRANSIENT, "empty_body"),
        (b"null", RowClass.TRANSIENT, "empty_body"),
        (b'{"choices":[{"mess', RowClass.UNREADABLE, "unreadable_answer"),
        (b"<html>welcome</html>", RowClass.UNREADABLE, "unreadable_answer"),
        (b"[" * 100_000, RowClass.UNREADABLE, "unreadable_answer"),
    ],
)
async def test_an_answer_without_sense(raw: bytes, row_class: RowClass, code: str) -> None:
    """A 2xx without an answer is worth another try; what is no JSON is not kept as a body."""
    got = await call(Server(answer(200, raw)))
    assert (got.failure, got.line.row_class, got.line.code, got.line.http_status) == (None, row_class, code, 200)
    assert got.line.body is None


@pytest.mark.parametrize(
    ("status", "body", "row_class", "kind", "code"),
    [
        (400, error(code="invalid_value"), RowClass.INVALID_REQUEST, CallFailure.REJECTED, "invalid_value"),
        (
            400,
            error(code="context_length_exceeded"),
            RowClass.TOO_LONG,
            CallFailure.REJECTED,
            "context_length_exceeded",
        ),
        (400, error(code="content_filter"), RowClass.CONTENT_FILTERED, CallFailure.REJECTED, "content_filter"),
        (401, error(code="invalid_api_key"), RowClass.ACCOUNT, CallFailure.ACCOUNT, "invalid_api_key"),
        (403, error(), RowClass.ACCOUNT, CallFailure.ACCOUNT, "invalid_request_error"),
        (404, error(code="model_not_found"), RowClass.MODEL_UNAVAILABLE, CallFailure.NOT_FOUND, "model_not_found"),
        (404, error(code="unknown_url"), RowClass.MODEL_UNAVAILABLE, CallFailure.NOT_FOUND, "unknown_url"),
        (429, error(code="rate_limit_exceeded"), RowClass.TRANSIENT, CallFailure.THROTTLED, "rate_limit_exceeded"),
        (429, error(code="insufficient_quota"), RowClass.ACCOUNT, CallFailure.ACCOUNT, "insufficient_quota"),
        (500, error(kind="server_error"), RowClass.TRANSIENT, CallFailure.UNAVAILABLE, "server_error"),
        (503, error(code="slow_down"), RowClass.TRANSIENT, CallFailure.UNAVAILABLE, "slow_down"),
    ],
)
async def test_refusals(status: int, body: dict[str, Any], row_class: RowClass, kind: CallFailure, code: str) -> None:
    """Every refusal has the class a row would have and the kind a call would have, and keeps its evidence.

    Save one: an address that nobody knows is not the row's fault, so its key is held and the row waits.
    """
    got = await call(Server(answer(status, body, {"x-request-id": "req_9"})))
    assert got.failure is not None
    assert (got.failure.call, got.failure.kind, got.failure.http_status, got.failure.code) == (
        "answer",
        kind,
        status,
        code,
    )
    assert (got.line.row_class, got.line.http_status, got.line.code) == (row_class, status, code)
    assert (got.line.message, got.line.provider_request_id) == ("m", "req_9")
    assert json.loads(got.line.body or b"") == body
    assert not got.may_have_run


async def test_a_gateways_page_blames_no_row() -> None:
    """A web page with 404 or 502 says nothing about the row, and is not kept as its answer."""
    for status in (404, 502):
        got = await call(Server(answer(status, b"<html>nothing here</html>", HTML)))
        assert got.failure is not None
        assert (got.failure.kind, got.line.row_class, got.line.body) == (
            CallFailure.UNAVAILABLE,
            RowClass.TRANSIENT,
            None,
        )


# ---------------------------------------------------------------------------------------- broken calls


@pytest.mark.parametrize(
    ("fault", "code", "is_definite"),
    [
        (httpx.ConnectError("refused"), "connect_error", True),
        (httpx.ConnectTimeout("slow"), "connect_timeout", True),
        (httpx.ReadError("reset after sending sk-secret"), "connection_broken", False),
        (httpx.RemoteProtocolError("gone"), "connection_broken", False),
        (httpx.WriteTimeout("slow"), "write_timeout", False),
    ],
)
async def test_a_broken_call_is_transient(fault: Exception, code: str, is_definite: bool) -> None:
    """The row may go again; only a call that never left us is known not to have run."""
    got = await call(Server(fault))
    assert got.failure is not None
    assert (got.line.row_class, got.line.code, got.failure.code) == (RowClass.TRANSIENT, code, code)
    assert (got.failure.is_definite, got.may_have_run) == (is_definite, not is_definite)
    assert got.failure.kind is (CallFailure.UNAVAILABLE if is_definite else CallFailure.UNANSWERED)
    assert "secret" not in repr(got)


async def test_an_answer_over_the_bound_is_not_read() -> None:
    """It ran and nobody has its answer; the next one would be as large, so the row ends as too large."""
    got = await call(Server(answer(200, b'"' + b"x" * 2000 + b'"')), max_answer_bytes=1000)
    assert got.failure is not None
    assert (got.line.row_class, got.failure.kind, got.failure.code) == (
        RowClass.OUTCOME_TOO_LARGE,
        CallFailure.PROTOCOL,
        "answer_too_large",
    )
    assert got.may_have_run


async def test_a_refusal_over_the_bound_is_known_by_its_status() -> None:
    """An endless error page is still a 503."""
    got = await call(Server(answer(503, b"x" * 2000, {"retry-after": "9"})), max_answer_bytes=1000)
    assert got.failure is not None
    assert (got.failure.http_status, got.line.row_class, got.hints.retry_after_s) == (503, RowClass.TRANSIENT, 9.0)


class _Speaker:
    """A TCP server that answers each connection by a function and counts them."""

    def __init__(self, speak: Any) -> None:
        self._speak = speak
        self.connections = 0
        self.url = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        return self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            await self._speak(reader, writer)
        finally:
            writer.close()

    async def __aexit__(self, *_: object) -> None:
        self._server.close()


async def _read_request(reader: asyncio.StreamReader) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
    await reader.readexactly(length)


def real(url: str, **changes: Any) -> OpenAIProvider:
    """A provider with a network under it."""
    return OpenAIProvider(account(base_url=url, **changes), HandClock())


async def test_the_deadline_holds_for_a_server_that_never_answers() -> None:
    """The whole call ends at its deadline, in real time; the request was sent, so the row may have run."""

    async def silent(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with _Speaker(silent) as server:
        made = real(server.url)
        got = await made.answer(CHAT, BODY, 0.2)
        await made.close()
    assert got.failure is not None
    assert (got.line.row_class, got.failure.code, got.may_have_run) == (RowClass.TRANSIENT, "call_timeout", True)


async def test_the_deadline_holds_for_a_server_that_dribbles() -> None:
    """A byte now and then does not lengthen the call."""

    async def dribble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
        while not writer.is_closing() and not reader.at_eof():
            writer.write(b" ")
            await asyncio.wait({asyncio.ensure_future(reader.read(1))}, timeout=0.02)

    async with _Speaker(dribble) as server:
        made = real(server.url)
        got = await made.answer(CHAT, BODY, 0.2)
        await made.close()
    assert got.failure is not None
    assert (got.failure.code, got.may_have_run) == ("call_timeout", True)


async def test_a_call_that_never_got_a_connection_has_not_run() -> None:
    """With every connection taken, a call whose time is up never left us; and nobody else's poll waits for it."""
    asked = asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            body = b'{"id":"batch_1","status":"in_progress"}'
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
            return
        asked.set()
        await reader.read()

    async with _Speaker(hold) as server:
        made = real(server.url, max_sync_connections=1, max_connections=1)
        first = asyncio.create_task(made.answer(CHAT, BODY, 30.0))
        await asyncio.wait_for(asked.wait(), 5)
        second = await made.answer(CHAT, BODY, 0.2)
        polled = await made.retrieve("batch_1")  # type: ignore[arg-type]
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await made.close()
    assert second.failure is not None
    assert (second.failure.code, second.failure.is_definite, second.may_have_run) == ("call_timeout", True, False)
    assert not hasattr(polled, "kind")


async def test_every_call_has_a_connection_of_its_own() -> None:
    """No call goes out over a kept-alive connection that the server may just have closed."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = json.dumps(chat()).encode()
        while not reader.at_eof():
            try:
                await _read_request(reader)
            except asyncio.IncompleteReadError:
                return
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))

    async with _Speaker(talk) as server:
        made = real(server.url)
        for _ in range(3):
            assert (await made.answer(CHAT, BODY, 5.0)).failure is None
        await made.close()
    assert server.connections == 3


# ------------------------------------------------------------------------------------------- the hints


LIMITS = {
    "x-ratelimit-limit-requests": "60",
    "x-ratelimit-remaining-requests": "59",
    "x-ratelimit-reset-requests": "1s",
    "x-ratelimit-remaining-tokens": "149984",
    "x-ratelimit-reset-tokens": "6m0s",
}


@pytest.mark.parametrize(("status", "body"), [(200, chat()), (429, error(code="rate_limit_exceeded"))])
async def test_hints_come_with_every_answer(status: int, body: dict[str, Any]) -> None:
    """What is left and when it is whole again is read from answers and refusals alike."""
    got = await call(Server(answer(status, body, LIMITS)))
    assert got.hints == PaceHints(59, 1.0, 149_984, 360.0)


@pytest.mark.parametrize(
    ("headers", "wish_s"),
    [
        ({"retry-after": "20"}, 20.0),
        ({"retry-after-ms": "1250", "retry-after": "2"}, 1.25),
        # the server's clock is two hours ahead of ours
        ({"date": "Sun, 15 Nov 2026 14:00:00 GMT", "retry-after": "Sun, 15 Nov 2026 14:00:25 GMT"}, 25.0),
        # and here an hour behind
        ({"date": "Sun, 15 Nov 2026 11:00:00 GMT", "retry-after": "Sun, 15 Nov 2026 11:00:25 GMT"}, 25.0),
        ({"retry-after": "99999999"}, DAY_S),
        ({}, None),
    ],
)
async def test_when_to_come_back(headers: dict[str, str], wish_s: float | None) -> None:
    """Seconds, milliseconds and a date on the server's own clock, a day at most."""
    got = await call(Server(answer(429, error(code="rate_limit_exceeded"), headers)))
    assert got.failure is not None
    assert (got.hints.retry_after_s, got.failure.retry_after_s) == (wish_s, wish_s)


async def test_answers_show_the_providers_clock() -> None:
    """Calls of the lane tell the clock's difference as all others do."""
    made = provider(Server(answer(200, chat(), {"date": "Sun, 15 Nov 2026 12:10:00 GMT"})))
    await made.answer(CHAT, BODY, 5.0)
    assert made.clock_skew_s == pytest.approx(600.5)
    await made.close()


async def test_neither_prompt_nor_answer_is_logged_or_shown(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing of the body, the answer or the provider's text appears in logs or reprs."""
    caplog.set_level(logging.INFO)
    shown = [
        repr(await call(Server(answer(200, chat("the secret answer"))))),
        repr(await call(Server(answer(400, error("the secret message"))))),
    ]
    assert "secret" not in "".join(shown) + caplog.text
    assert "caf" not in "".join(shown) + caplog.text
