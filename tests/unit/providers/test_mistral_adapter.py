"""The Mistral adapter's calls: what goes out, what comes back, and what a refusal means."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import pytest
from mistral_kit import BASE, CHAT, FILE, KEY, account, error, job, provider
from openai_kit import BytesSource, HandClock, Server, answer

from batchferry.domain.batcherrors import BatchErrorKind
from batchferry.domain.errors import ConfigError, InvariantBroken
from batchferry.domain.ids import FileId, ProviderBatchId
from batchferry.domain.provider import (
    BatchPage,
    BatchSnapshot,
    CallFailed,
    CallFailure,
    DownloadedFile,
    FilePage,
    FileRole,
    LineError,
    ProviderStatus,
    UploadedFile,
)
from batchferry.domain.rows import ResultLine, RowClass, RowFlag
from batchferry.ports import BatchProvider
from batchferry.providers.mistral import MistralProvider
from batchferry.providers.mistral.adapter import timeout_hours
from batchferry.providers.retries import SENT_ONCE, Call

JOB = ProviderBatchId("job-1")
INPUT = FileId(FILE)
LINES = b'{"custom_id":"a","body":{}}\n'


def test_it_plays_the_port():
    """The adapter is a provider of the port, and makes its batches of files."""
    made: BatchProvider = provider(Server(answer(200, {})))
    assert isinstance(made, MistralProvider)
    assert made.is_inline is False


async def test_an_upload_is_a_form_with_the_purpose():
    """One multipart form of known length: the purpose, then the file; no expiry unless its unit is known."""
    server = Server(answer(200, {"id": FILE, "bytes": len(LINES), "purpose": "batch"}))
    got = await provider(server).upload(BytesSource(LINES), "a.jsonl", 86_400)
    assert got == UploadedFile(INPUT, len(LINES))
    (request,) = server.requests
    assert (request.method, str(request.url)) == ("POST", f"{BASE}/files")
    assert request.headers["authorization"] == f"Bearer {KEY}"
    assert int(request.headers["content-length"]) == len(server.bodies[0])
    assert b'name="purpose"\r\n\r\nbatch\r\n' in server.bodies[0]
    assert b'filename="a.jsonl"' in server.bodies[0]
    assert LINES in server.bodies[0]
    assert b"expiry" not in server.bodies[0]


async def test_an_expiry_is_rounded_up_to_the_accounts_unit():
    """Where the account says what a step stands for, a life is sent in whole steps and never shorter."""
    server = Server(answer(200, {"id": FILE}))
    await provider(server, file_expiry_unit_s=3600).upload(BytesSource(LINES), "a.jsonl", 3601)
    assert b'name="expiry"\r\n\r\n2\r\n' in server.bodies[0]


@pytest.mark.parametrize(("body", "code"), [({}, "unreadable_answer"), ({"id": FILE, "bytes": 1}, "size_mismatch")])
async def test_an_upload_that_makes_no_sense(body, code):
    """An answer without an id or with another size is tried again once, then told."""
    server = Server(answer(200, body))
    got = await provider(server).upload(BytesSource(LINES), "a.jsonl", None)
    assert isinstance(got, CallFailed)
    assert (got.kind, got.code, len(server.requests)) == (CallFailure.PROTOCOL, code, 2)


async def test_a_file_that_is_too_large_is_not_sent():
    """The account's bound is looked at first."""
    server = Server(answer(200, {}))
    got = await provider(server, max_upload_bytes=3).upload(BytesSource(LINES), "a.jsonl", None)
    assert isinstance(got, CallFailed)
    assert got.is_too_large
    assert server.requests == []


@pytest.mark.parametrize("name", ["a.json", "ä.jsonl", 'a".jsonl', "a/b.jsonl"])
async def test_a_file_name_the_api_would_not_take(name):
    """It is a bug of the caller."""
    with pytest.raises(ValueError, match="file name"):
        await provider(Server(answer(200, {}))).upload(BytesSource(LINES), name, None)


async def test_a_create_has_the_model_on_the_job():
    """Files as a list, the model and the window in hours beside them, metadata as it is."""
    server = Server(answer(200, job(status="QUEUED", metadata={"k": "v"})))
    got = await provider(server).create(INPUT, CHAT, "7d", {"k": "v"}, "mistral-small-latest")
    assert isinstance(got, BatchSnapshot)
    assert (got.status, got.input_file_id, got.metadata) == (ProviderStatus.VALIDATING, FILE, {"k": "v"})
    (request,) = server.requests
    assert (request.method, str(request.url)) == ("POST", f"{BASE}/batch/jobs")
    assert json.loads(server.bodies[0]) == {
        "input_files": [FILE],
        "endpoint": CHAT,
        "timeout_hours": 168,
        "model": "mistral-small-latest",
        "metadata": {"k": "v"},
    }


async def test_a_create_without_window_model_and_metadata():
    """The account's window stands in; nothing empty is sent."""
    server = Server(answer(200, job()))
    await provider(server, timeout_hours=36, send_metadata=False).create(INPUT, CHAT, "", {"k": "v"})
    assert json.loads(server.bodies[0]) == {"input_files": [FILE], "endpoint": CHAT, "timeout_hours": 36}


@pytest.mark.parametrize(
    ("window", "hours"),
    [
        ("24h", 24),
        ("1h", 1),
        ("168h", 168),
        ("7d", 168),
        ("90m", 1),
        ("3600s", 1),
        ("169h", None),
        ("8d", None),
        ("59m", None),
        ("0h", None),
        ("24", None),
        ("week", None),
        ("\u0663h", None),
    ],
)
def test_windows(window, hours):
    """Whole hours from 1 to 168, never more than was asked for; every other window is none of this provider's."""
    assert timeout_hours(window) == hours


async def test_a_window_the_provider_has_not_is_refused_before_sending():
    """Nothing is sent, and that is certain."""
    server = Server(answer(200, job()))
    got = await provider(server).create(INPUT, CHAT, "30d", {}, "m")
    assert isinstance(got, CallFailed)
    assert (got.kind, got.code, got.is_definite) == (CallFailure.REJECTED, "completion_window", True)
    assert server.requests == []


REFUSED_CREATES: list[tuple[int, Any, CallFailure, str | None, bool]] = [
    (400, error("Invalid model: x", "invalid_model", "1500"), CallFailure.REJECTED, "invalid_model", True),
    (401, {"detail": "Unauthorized"}, CallFailure.ACCOUNT, None, True),
    (401, {"message": "Unauthorized", "request_id": "r"}, CallFailure.ACCOUNT, None, True),
    (402, {"detail": "Payment required"}, CallFailure.ACCOUNT, None, True),
    (402, b"<html>", CallFailure.UNANSWERED, None, False),
    (403, error("not in your tier", "tier_not_allowed", "1910"), CallFailure.REJECTED, "tier_not_allowed", True),
    (404, {"detail": f"File {FILE} not found"}, CallFailure.NOT_READY, None, True),
    (400, error("Input file not found.", "file_not_found"), CallFailure.NOT_READY, "file_not_found", True),
    (422, {"detail": [{"loc": ["body", "timeout_hours"], "msg": "too large"}]}, CallFailure.REJECTED, None, True),
    (429, {"message": "Requests rate limit exceeded"}, CallFailure.THROTTLED, None, True),
    (429, error("Rate limit exceeded", "rate_limited", "1300"), CallFailure.THROTTLED, "rate_limited", True),
    (400, error("Enqueued token limit reached", "invalid_request"), CallFailure.THROTTLED, "invalid_request", True),
    (429, b"<html>", CallFailure.UNANSWERED, None, False),
    (404, {"message": "no Route matched with those values", "request_id": "r"}, CallFailure.UNANSWERED, "gateway_page", False),
    (500, error("x", "internal_server_error", "1000"), CallFailure.UNANSWERED, "internal_server_error", False),
]  # fmt: skip


@pytest.mark.parametrize(("status", "body", "kind", "code", "is_definite"), REFUSED_CREATES)
async def test_a_refused_create(status, body, kind, code, is_definite):
    """A refusal in one of Mistral's own shapes is certain; anything else may have been carried out."""
    server = Server(answer(status, body))
    got = await provider(server).create(INPUT, CHAT, "24h", {}, "m")
    assert isinstance(got, CallFailed)
    assert (got.kind, got.code, got.is_definite) == (kind, code, is_definite)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("broken", "kind", "is_definite"),
    [
        (httpx.ConnectError("x"), CallFailure.UNAVAILABLE, True),
        (httpx.ReadTimeout("x"), CallFailure.UNANSWERED, False),
        (answer(200, b"not json"), CallFailure.UNANSWERED, False),
        (answer(200, {"id": "j"}), CallFailure.UNANSWERED, False),
    ],
)
async def test_a_create_is_sent_once(broken, kind, is_definite):
    """Whatever becomes of it, it goes out once."""
    server = Server(broken)
    got = await provider(server).create(INPUT, CHAT, "24h", {}, "m")
    assert isinstance(got, CallFailed)
    assert (got.kind, got.is_definite, len(server.requests)) == (kind, is_definite, 1)
    assert Call.CREATE in SENT_ONCE


@pytest.mark.parametrize(
    ("call", "method", "path"),
    [("retrieve", "GET", "/batch/jobs/a%2Fb"), ("cancel", "POST", "/batch/jobs/a%2Fb/cancel")],
)
async def test_calls_about_one_job(call, method, path):
    """They ask for the job by its id and read it; a 503 is bridged."""
    server, clock = Server(answer(503), answer(200, job(status="CANCELLATION_REQUESTED"))), HandClock()
    got = await getattr(provider(server, clock), call)(ProviderBatchId("a/b"))
    assert isinstance(got, BatchSnapshot)
    assert got.status is ProviderStatus.CANCELLING
    assert {(one.method, one.url.raw_path.decode()) for one in server.requests} == {(method, f"/v1{path}")}
    assert clock.sleeps == [1.0]


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (404, error("No batch job matches", "not_found", status=404), CallFailure.NOT_FOUND),
        (404, {"detail": "Not found"}, CallFailure.NOT_FOUND),
        (404, {"message": "no Route matched with those values", "request_id": "r"}, CallFailure.UNAVAILABLE),
        (409, error("ended", status=409), CallFailure.CONFLICT),
        (429, error("x", "rate_limited", "1300"), CallFailure.THROTTLED),
        (403, {"detail": "Forbidden"}, CallFailure.ACCOUNT),
    ],
)
async def test_a_refused_look_at_a_job(status, body, kind):
    """A 404 of the front gateway says nothing about the job."""
    got = await provider(Server(answer(status, body))).retrieve(JOB)
    assert isinstance(got, CallFailed)
    assert got.kind is kind


async def test_jobs_are_listed_page_by_page():
    """Newest first; the cursor is the next page's number."""
    server = Server(answer(200, {"data": [job()], "total": 2}), answer(200, {"data": [job(id="job-2")], "total": 2}))
    made = provider(server, list_page_size=1)
    first = await made.list_batches()
    assert isinstance(first, BatchPage)
    second = await made.list_batches(first.next_cursor)
    assert isinstance(second, BatchPage)
    assert [page.batches[0].provider_batch_id for page in (first, second)] == ["job-1", "job-2"]
    assert second.next_cursor is None
    assert [dict(one.url.params) for one in server.requests] == [
        {"page": page, "page_size": "1", "order_by": "-created"} for page in ("0", "1")
    ]


@pytest.mark.parametrize(
    ("role", "kinds"),
    [(FileRole.INPUT, ["batch_request"]), (FileRole.OUTPUT, ["batch_result", "batch_error"])],
)
async def test_files_are_listed_by_purpose_and_kind(role, kinds):
    """Both roles have the purpose of batches, and kinds of their own."""
    server = Server(answer(200, {"data": [{"id": FILE, "sample_type": kinds[0]}], "total": 1}))
    page = await provider(server, query={"q": "1"}).list_files(role)
    assert isinstance(page, FilePage)
    assert [file.file_id for file in page.files] == [FILE]
    params = server.requests[0].url.params
    assert params.get_list("sample_type") == kinds
    assert (params["purpose"], params["page"], params["page_size"], params["q"]) == ("batch", "0", "100", "1")


async def test_lists_that_are_none():
    """An answer of another shape is no end of the list."""
    made = provider(Server(answer(200, {"x": 1})))
    for got in (await made.list_batches(), await made.list_files(FileRole.INPUT)):
        assert isinstance(got, CallFailed)
        assert got.kind is CallFailure.PROTOCOL


async def test_a_download_follows_a_redirect_without_the_key(tmp_path):
    """The content lies elsewhere: the other host gets no header of the account."""

    def serve(request: httpx.Request) -> httpx.Response:
        if request.url.host == "mistral.example":
            return httpx.Response(307, headers={"location": "https://store.example/f?sig=1"})
        return httpx.Response(200, content=LINES)

    server = Server(serve)
    got = await provider(server).download(INPUT, tmp_path / "f")
    assert isinstance(got, DownloadedFile)
    assert (tmp_path / "f").read_bytes() == LINES
    assert [str(one.url) for one in server.requests] == [
        f"{BASE}/files/{FILE}/content",
        "https://store.example/f?sig=1",
    ]
    assert ["authorization" in one.headers for one in server.requests] == [True, False]


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (200, {"id": FILE, "object": "file", "deleted": True}, None),
        (204, b"", None),
        (404, error("No file matches", "not_found", status=404), None),
        (404, {"message": "no Route matched with those values", "request_id": "r"}, CallFailure.UNAVAILABLE),
        (200, {"deleted": False}, CallFailure.PROTOCOL),
        (401, {"detail": "Unauthorized"}, CallFailure.ACCOUNT),
    ],
)
async def test_deleting(status, body, kind):
    """Gone is gone, unless it is only the address that is not there."""
    got = await provider(Server(answer(status, body))).delete_file(INPUT)
    assert (got and got.kind) == kind


async def test_inline_is_a_bug():
    """Batches are made of files."""
    with pytest.raises(InvariantBroken):
        await provider(Server(answer(200, {}))).create_inline(BytesSource(LINES), CHAT, "m")


def test_an_entry_of_a_failed_jobs_list():
    """It is judged by its code."""
    made = provider(Server(answer(200, {})))
    assert made.classify_batch_error(LineError("invalid_model")) is BatchErrorKind.MODEL


async def test_the_providers_clock():
    """The skew is read off the answers."""
    made = provider(Server(answer(200, job(), {"date": "Sun, 15 Nov 2026 12:00:10 GMT"})))
    assert made.clock_skew_s is None
    await made.retrieve(JOB)
    assert made.clock_skew_s == 10.5
    await made.close()


# ------------------------------------------------------------------------------------------- result lines


def line(status: int, body: Any, **members: Any) -> bytes:
    """A result line."""
    whole = {"id": "b-1", "custom_id": "w-1", "response": {"status_code": status, "body": body}, "error": None}
    return json.dumps(whole | members).encode()


def chat(finish: str, **message: Any) -> dict[str, Any]:
    """A chat answer."""
    return {
        "id": "x",
        "object": "chat.completion",
        "model": "mistral-small-latest",
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
        "choices": [{"index": 0, "finish_reason": finish, "message": {"role": "assistant", **message}}],
    }


THINKING = [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": "yes"}]
CALLS = [{"id": "c", "function": {"name": "f", "arguments": "{}"}, "index": 0}]


@pytest.mark.parametrize(
    ("body", "row_class", "flags"),
    [
        (chat("stop", content="yes"), RowClass.SUCCEEDED, ()),
        (chat("stop", content=THINKING), RowClass.SUCCEEDED, ()),
        (chat("length", content="ye"), RowClass.SUCCEEDED, (RowFlag.TRUNCATED,)),
        (chat("model_length", content="ye"), RowClass.SUCCEEDED, (RowFlag.TRUNCATED,)),
        (chat("tool_calls", content="", tool_calls=CALLS), RowClass.SUCCEEDED, (RowFlag.TOOL_CALL_PENDING,)),
        (chat("error", content="ye"), RowClass.TRANSIENT, (RowFlag.TRUNCATED,)),
    ],
)
def test_ends_of_a_chat(body, row_class, flags):
    """Every finish_reason of the official client is understood, and thoughts are no empty answer."""
    got = provider(Server(answer(200, {}))).parse_line(line(200, body), CHAT)
    assert isinstance(got, ResultLine)
    assert got.wire_id == "w-1"
    if row_class is RowClass.SUCCEEDED:
        assert (got.row_class, got.flags) == (row_class, flags)
        assert got.usage is not None
        assert (got.usage.input_tokens, got.usage.output_tokens, got.model) == (3, 4, "mistral-small-latest")
        assert json.loads(got.body or b"") == body
    else:
        assert got.row_class is row_class


@pytest.mark.parametrize(
    ("raw", "row_class", "code"),
    [
        (line(400, error("Invalid model: x", "invalid_model", "1500")), RowClass.MODEL_UNAVAILABLE, "invalid_model"),
        (line(422, error({"detail": [{"loc": ["body"]}]}, "invalid_request_error")), RowClass.INVALID_REQUEST, "invalid_request_error"),
        (line(429, {"message": "Requests rate limit exceeded"}), RowClass.TRANSIENT, None),
        (line(200, None, response=None, error={"message": "gone", "type": "batch_expired"}), RowClass.EXPIRED, "batch_expired"),
        (line(200, None, response=None, error="boom"), RowClass.TRANSIENT, None),
        (line(200, None), RowClass.TRANSIENT, "empty_body"),
    ],
)  # fmt: skip
def test_lines_of_failed_rows(raw, row_class, code):
    """They are judged by Mistral's tables and told under its type."""
    got = provider(Server(answer(200, {}))).parse_line(raw, CHAT)
    assert isinstance(got, ResultLine)
    assert (got.row_class, got.code) == (row_class, code)


def test_a_line_the_endpoint_of_embeddings_makes():
    """Vectors are an answer, and none are none."""
    made = provider(Server(answer(200, {})))
    full = {"object": "list", "model": "mistral-embed", "usage": {"prompt_tokens": 3}, "data": [{"embedding": [0.5]}]}
    for data, row_class in ((full["data"], RowClass.SUCCEEDED), ([], RowClass.TRANSIENT)):
        got = made.parse_line(line(200, full | {"data": data}), "/v1/embeddings")
        assert isinstance(got, ResultLine)
        assert got.row_class is row_class


# ---------------------------------------------------------------------------------------------- sync


async def test_a_sync_call_goes_to_the_endpoint_unchanged():
    """The version of the base address stands, the body's bytes too."""
    server = Server(answer(200, chat("stop", content="yes"), {"x-ratelimit-remaining-requests": "5"}))
    got = await provider(server).answer(CHAT, b'{"model":"m" , "messages":[]}', 10.0)
    assert (got.line.row_class, got.failure) == (RowClass.SUCCEEDED, None)
    assert str(server.requests[0].url) == f"{BASE}/chat/completions"
    assert server.bodies == [b'{"model":"m" , "messages":[]}']
    assert got.hints.calls_left == 5


@pytest.mark.parametrize(
    ("reply", "row_class", "kind"),
    [
        (answer(429, error("x", "rate_limited", "1300")), RowClass.TRANSIENT, CallFailure.THROTTLED),
        (answer(401, {"detail": "Unauthorized"}), RowClass.ACCOUNT, CallFailure.ACCOUNT),
        (answer(403, error("blocked by a guardrail")), RowClass.CONTENT_FILTERED, CallFailure.REJECTED),
        (answer(400, error("Invalid model: x", "invalid_model", "1500")), RowClass.MODEL_UNAVAILABLE, CallFailure.REJECTED),
        (answer(404, {"message": "no Route matched", "request_id": "r"}), RowClass.TRANSIENT, CallFailure.UNAVAILABLE),
        (answer(503, b"x"), RowClass.TRANSIENT, CallFailure.UNAVAILABLE),
        (httpx.ConnectError("x"), RowClass.TRANSIENT, CallFailure.UNAVAILABLE),
        (httpx.ReadError("x"), RowClass.TRANSIENT, CallFailure.UNANSWERED),
    ],
)  # fmt: skip
async def test_a_refused_sync_call(reply, row_class, kind):
    """A guardrail's 403 is about the row and holds no account; nothing is sent twice."""
    server = Server(reply)
    got = await provider(server).answer("/v1/embeddings", b"{}", 10.0)
    assert got.failure is not None
    assert (got.line.row_class, got.failure.kind, len(server.requests)) == (row_class, kind, 1)


# -------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"base_url": "mistral"}, "base_url is no address"),
        ({"base_url": "https://u:p@h/v1"}, "holds a password"),
        ({"base_url": "https://h/v1?a=b"}, "give parameters in query"),
        ({"api_key": "a b"}, "api_key holds blanks"),
        ({"headers": {"x": "a\nb"}}, "header 'x'"),
        ({"timeout_hours": 0}, "timeout_hours must be 1 to 168"),
        ({"timeout_hours": 169}, "timeout_hours must be 1 to 168"),
        ({"list_page_size": 101}, "list_page_size must be 1 to 100"),
        ({"file_page_size": 0}, "file_page_size must be 1 to 100"),
        ({"max_connections": 0}, "max_connections must be at least 1"),
        ({"file_expiry_unit_s": 0}, "file_expiry_unit_s"),
    ],
)
def test_settings_that_cannot_work(changes, told):
    """Each is told with its account and its remedy."""
    with pytest.raises(ConfigError, match=told) as caught:
        account(**changes)
    assert "account main" in str(caught.value)


async def test_no_secret_is_shown_or_logged(caplog):
    """Neither key nor provider text is in a representation, a summary or the log."""
    caplog.set_level(logging.DEBUG)
    made = provider(Server(answer(400, error("a prompt is quoted here", "invalid_request_error"))))
    got = await made.create(INPUT, CHAT, "24h", {}, "m")
    assert isinstance(got, CallFailed)
    for text in (repr(made.account), repr(got), got.summary, caplog.text):
        assert KEY not in text
        assert "prompt" not in text
