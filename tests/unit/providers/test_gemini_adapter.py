"""The Gemini adapter in front of scripted answers: addresses, headers, readings and failures."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from openai_kit import BytesSource, HandClock, Server, answer

from batchferry.domain.errors import ConfigError, InvariantBroken
from batchferry.domain.ids import FileId
from batchferry.domain.provider import (
    BatchPage,
    BatchSnapshot,
    CallFailed,
    CallFailure,
    DownloadedFile,
    FilePage,
    FileRole,
    ProviderStatus,
    UploadedFile,
)
from batchferry.domain.rows import RowClass
from batchferry.providers.gemini import GeminiAccount, GeminiProvider, wire
from batchferry.providers.retries import CallRetries
from batchferry.providers.shapes import NotOurShape

HOST = "https://gemini.example"
KEY = "AIza-very-secret"
GENERATE = "/v1beta/models:generateContent"
FILE = {"name": "files/abc", "sizeBytes": "12", "state": "ACTIVE", "expirationTime": "2026-11-17T12:00:00.123456789Z"}
TWELVE = b'{"key":"a"}\n'


def provider(server: Server, clock: HandClock | None = None, **changes: Any) -> GeminiProvider:
    """A provider in front of a scripted server; its retries have no jitter."""
    settings: dict[str, Any] = {"base_url": f"{HOST}/v1beta", "api_key": KEY, "retries": CallRetries(jitter=0.0)}
    account = GeminiAccount("main", **settings | changes)
    return GeminiProvider(account, clock or HandClock(), httpx.MockTransport(server), Random(1))


def error(code: int, status: str, message: str = "m", **more: Any) -> httpx.Response:
    """Google's refusal."""
    return answer(code, {"error": {"code": code, "message": message, "status": status} | more})


def started(url: str = f"{HOST}/upload/v1beta/files?upload_id=u1&upload_protocol=resumable") -> httpx.Response:
    """The answer to the start of an upload."""
    return answer(200, b"", {"x-goog-upload-url": url, "x-goog-upload-status": "active"})


def finished(**members: Any) -> httpx.Response:
    """The answer to the last bytes."""
    return answer(200, {"file": FILE | members}, {"x-goog-upload-status": "final"})


def operation(state: str | None = "BATCH_STATE_RUNNING", **members: Any) -> dict[str, Any]:
    """An operation."""
    about = {"createTime": "2026-11-15T12:00:00Z"} | ({} if state is None else {"state": state})
    return {"name": "batches/b1", "metadata": about} | members


# ------------------------------------------------------------------------------------------------ uploads


async def test_an_upload_is_two_calls() -> None:
    """First the size and the name, then the bytes to the address that was given, on our own host."""
    server = Server(started("https://elsewhere.example/upload/v1beta/files?upload_id=u1"), finished())
    got = await provider(server).upload(BytesSource(TWELVE), "a.jsonl", None)
    assert isinstance(got, UploadedFile)
    assert (got.file_id, got.size_bytes) == ("files/abc", 12)
    assert got.expires_at is not None
    first, second = server.requests
    assert (first.method, str(first.url)) == ("POST", f"{HOST}/upload/v1beta/files")
    assert first.headers["x-goog-api-key"] == KEY
    assert first.headers["x-goog-upload-protocol"] == "resumable"
    assert first.headers["x-goog-upload-command"] == "start"
    assert first.headers["x-goog-upload-header-content-length"] == "12"
    assert first.headers["x-goog-upload-header-content-type"] == "application/jsonl"
    assert json.loads(server.bodies[0]) == {"file": {"displayName": "a.jsonl", "mimeType": "application/jsonl"}}
    assert str(second.url) == f"{HOST}/upload/v1beta/files?upload_id=u1"
    assert second.headers["x-goog-upload-command"] == "upload, finalize"
    assert (second.headers["x-goog-upload-offset"], second.headers["content-length"]) == ("0", "12")
    assert server.bodies[1] == TWELVE


async def test_a_gateway_with_a_folder_of_its_own() -> None:
    """The folder stands once before each path, whether or not the gateway has put it into the upload's address."""
    for path in ("/upload/v1beta/files", "/gemini/upload/v1beta/files"):
        server = Server(started(f"{HOST}{path}?upload_id=u1"), finished())
        await provider(server, base_url=f"{HOST}/gemini/v1beta/").upload(BytesSource(TWELVE), "a.jsonl", None)
        assert [request.url.path for request in server.requests] == ["/gemini/upload/v1beta/files"] * 2


async def test_a_file_is_waited_for() -> None:
    """PROCESSING is polled with growing pauses, a failed look is passed over, and ACTIVE ends it."""
    server = Server(
        started(),
        finished(state="PROCESSING"),
        answer(200, FILE | {"state": "PROCESSING"}),
        answer(503, b""),
        answer(200, FILE),
    )
    clock = HandClock()
    assert isinstance(await provider(server, clock).upload(BytesSource(TWELVE), "a.jsonl", None), UploadedFile)
    assert clock.sleeps == [0.5, 1.0, 2.0]
    assert [request.url.path for request in server.requests[2:]] == ["/v1beta/files/abc"] * 3


async def test_a_file_is_not_waited_for_without_end() -> None:
    """After ``file_ready_s`` it is handed out as it is: a create that comes too early comes again."""
    server, clock = (
        Server(started(), finished(state="PROCESSING"), answer(200, FILE | {"state": "PROCESSING"})),
        HandClock(),
    )
    got = await provider(server, clock, file_ready_s=20.0).upload(BytesSource(TWELVE), "a.jsonl", None)
    assert isinstance(got, UploadedFile)
    assert clock.elapsed_s <= 20.0


@pytest.mark.parametrize(
    ("answers", "code"),
    [
        ((started(), finished(state="FAILED")), "file_state_failed"),
        ((started(), finished(sizeBytes="11")), "size_mismatch"),
        ((started(), answer(200, {"file": FILE}, {"x-goog-upload-status": "active"})), "upload_not_final"),
        ((started(), answer(200, {"nothing": 1}, {"x-goog-upload-status": "final"})), "unreadable_answer"),
        ((answer(200, b""),), "no_upload_address"),
    ],
)
async def test_uploads_that_went_wrong(answers: tuple[httpx.Response, ...], code: str) -> None:
    """Each is told by a code of ours."""
    got = await provider(Server(*answers, *answers, answers[-1])).upload(BytesSource(TWELVE), "a.jsonl", None)
    assert isinstance(got, CallFailed)
    assert got.code == code


@pytest.mark.parametrize(
    "address", [".evil.example/x", "@evil.example/x", "https:.evil.example/x", ":1/x", "/a%0d%0ab"]
)
async def test_an_upload_address_never_leads_away(address: str) -> None:
    """An answer whose upload address has no slash in front would lengthen the host's name: nothing is sent there."""
    server = Server(*[started(address)] * 3)
    got = await provider(server).upload(BytesSource(TWELVE), "a.jsonl", None)
    assert isinstance(got, CallFailed)
    assert got.code == "bad_redirect"
    assert {request.url.host for request in server.requests} == {"gemini.example"}


async def test_a_model_never_leads_out_of_the_api() -> None:
    """A row's model is a part of the address: with steps upwards in it no create is sent."""
    server = Server(answer(200, operation()))
    got = await provider(server).create(FileId("files/abc"), GENERATE, "24h", {"batch_id": "b1"}, "../../other")
    assert isinstance(got, CallFailed)
    assert (got.kind, got.code) == (CallFailure.REJECTED, "bad_redirect")
    assert got.is_definite
    assert server.requests == []


async def test_uploads_that_are_not_tried() -> None:
    """Too large is a refusal for size; a wrong size or a strange name is a bug."""
    server = Server(started(), finished())
    too_large = await provider(server, max_upload_bytes=11).upload(BytesSource(TWELVE), "a.jsonl", None)
    assert isinstance(too_large, CallFailed)
    assert too_large.is_too_large
    with pytest.raises(ValueError, match="jsonl"):
        await provider(server).upload(BytesSource(TWELVE), "a.txt", None)
    with pytest.raises(InvariantBroken):
        await provider(server).upload(BytesSource(TWELVE, claimed_bytes=13), "a.jsonl", None)
    with pytest.raises(InvariantBroken):
        await provider(server).create_inline(BytesSource(TWELVE), GENERATE, "m")


# ------------------------------------------------------------------------------------------------ batches


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ("gemini-2.5-flash", "/v1beta/models/gemini-2.5-flash:batchGenerateContent"),
        ("models/x", "/v1beta/models/x:batchGenerateContent"),
        ("tunedModels/mine", "/v1beta/tunedModels/mine:batchGenerateContent"),
        ("odd?x#y", "/v1beta/models/odd%3Fx%23y:batchGenerateContent"),
    ],
)
async def test_a_create(model: str, path: str) -> None:
    """The model is the address, the batch id the beginning of the name."""
    server = Server(answer(200, operation(None)))
    metadata = {"batch_id": "01J", "ledger_id": "abc"}
    got = await provider(server).create("files/abc", GENERATE, "24h", metadata, model)
    assert isinstance(got, BatchSnapshot)
    assert got.status is ProviderStatus.VALIDATING
    assert server.requests[0].url.raw_path.decode() == path
    wanted = {"batch": {"displayName": "01J ledger_id=abc", "inputConfig": {"fileName": "files/abc"}}}
    assert json.loads(server.bodies[0]) == wanted


async def test_a_create_without_a_model_is_not_sent() -> None:
    """There is no address for it."""
    server = Server(answer(500))
    got = await provider(server).create("files/abc", GENERATE, "24h", {}, "")
    assert isinstance(got, CallFailed)
    assert (got.kind, got.code, got.is_definite) == (CallFailure.REJECTED, "missing_model", True)
    assert server.requests == []


CREATES = [
    (error(400, "FAILED_PRECONDITION"), CallFailure.NOT_READY, True),
    (error(400, "FAILED_PRECONDITION", "User location is not supported for the API use."), CallFailure.ACCOUNT, True),
    (error(403, "PERMISSION_DENIED", "You do not have permission to access the File x or it may not exist."),
     CallFailure.NOT_READY, True),
    (error(404, "NOT_FOUND", "File x was not found"), CallFailure.NOT_READY, True),
    (error(404, "NOT_FOUND", "models/x is not found for API version v1beta"), CallFailure.REJECTED, True),
    (error(400, "INVALID_ARGUMENT"), CallFailure.REJECTED, True),
    (error(400, "INVALID_ARGUMENT", details=[{"reason": "API_KEY_INVALID"}]), CallFailure.ACCOUNT, True),
    (error(403, "PERMISSION_DENIED"), CallFailure.ACCOUNT, True),
    (error(429, "RESOURCE_EXHAUSTED"), CallFailure.THROTTLED, True),
    (error(429, "RESOURCE_EXHAUSTED", "Your prepayment credits are depleted."), CallFailure.ACCOUNT, True),
    (error(503, "UNAVAILABLE"), CallFailure.UNANSWERED, False),
    (answer(429, b"<html>"), CallFailure.UNANSWERED, False),
    (answer(200, b"<html>"), CallFailure.UNANSWERED, False),
    (httpx.ReadTimeout("x"), CallFailure.UNANSWERED, False),
    (httpx.ConnectError("x"), CallFailure.UNAVAILABLE, True),
]  # fmt: skip


@pytest.mark.parametrize(("given", "kind", "is_definite"), CREATES)
async def test_creates_that_fail(given: Any, kind: CallFailure, is_definite: bool) -> None:
    """Sent once; what Google itself refused was not done, all else is not known."""
    server = Server(given)
    got = await provider(server).create("files/abc", GENERATE, "24h", {"batch_id": "01J"}, "m")
    assert isinstance(got, CallFailed)
    assert (got.kind, got.is_definite) == (kind, is_definite)
    assert len(server.requests) == 1


FAILED_WITH_ANSWERS = {
    "state": "BATCH_STATE_FAILED",
    "batchStats": {"requestCount": "3", "successfulRequestCount": "2"},
}
SEEN = [
    (operation("BATCH_STATE_PENDING"), ProviderStatus.VALIDATING, None),
    (operation("JOB_STATE_RUNNING"), ProviderStatus.IN_PROGRESS, None),
    (operation("BATCH_STATE_DREAMING"), ProviderStatus.UNKNOWN, None),
    (operation("BATCH_STATE_SUCCEEDED", done=True, response={"responsesFile": "files/o"}), ProviderStatus.COMPLETED, "files/o"),
    (operation("BATCH_STATE_SUCCEEDED", done=True), ProviderStatus.COMPLETED, None),
    (operation("BATCH_STATE_EXPIRED", done=True, response={"responsesFile": "files/o"}), ProviderStatus.EXPIRED, None),
    (operation(None, done=True, error={"code": 1}), ProviderStatus.CANCELLED, None),
    (operation(None, done=True, error={"code": 13, "message": "m"}), ProviderStatus.FAILED, None),
    (operation(None, done=True, response={"responsesFile": "files/o"}), ProviderStatus.COMPLETED, "files/o"),
    # A failed job that names answers has them, and they are paid for; without a file, or without one answered, nothing ran.
    (operation("BATCH_STATE_FAILED", done=True, metadata=FAILED_WITH_ANSWERS, response={"responsesFile": "files/o"}),
     ProviderStatus.EXPIRED, "files/o"),
    (operation("BATCH_STATE_FAILED", done=True, metadata=FAILED_WITH_ANSWERS), ProviderStatus.FAILED, None),
    (operation("BATCH_STATE_FAILED", done=True, response={"responsesFile": "files/o"}), ProviderStatus.FAILED, "files/o"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "status", "output"), SEEN)
async def test_a_batch_is_read(body: Any, status: ProviderStatus, output: str | None) -> None:
    """By its state where it has one, else by how the operation ended; what has expired has no file."""
    server = Server(answer(200, body))
    got = await provider(server).retrieve("batches/b1")
    assert isinstance(got, BatchSnapshot)
    assert (got.status, got.output_file_id) == (status, output)
    assert server.requests[0].url.path == "/v1beta/batches/b1"


def test_counters_are_texts_and_may_be_left_out() -> None:
    """int64 comes as a JSON text, zero not at all; the name gives the metadata back."""
    about = {
        "state": "BATCH_STATE_SUCCEEDED",
        "createTime": "2026-11-15T12:00:00.123456789Z",
        "endTime": "2026-11-15T13:00:00Z",
        "displayName": "01J ledger_id=abc",
        "batchStats": {"requestCount": "10", "successfulRequestCount": "9", "pendingRequestCount": "x"},
        "output": {"responsesFile": "files/out"},
        "inputConfig": {"fileName": "files/in"},
    }
    got = wire.read_batch({"name": "batches/b", "metadata": about, "done": True}, 172_800)
    assert (got.counts.total, got.counts.completed, got.counts.failed) == (10, 9, 0)
    assert (got.output_file_id, got.input_file_id, got.metadata) == (
        "files/out",
        "files/in",
        {"batch_id": "01J", "ledger_id": "abc"},
    )
    assert got.created_at is not None
    assert got.expires_at is not None
    assert (got.expires_at - got.created_at).days == 2
    assert got.ended_at is not None


@pytest.mark.parametrize("body", [None, [], {}, {"name": "batches/b"}, {"metadata": {"state": "BATCH_STATE_RUNNING"}}])
def test_what_is_no_batch(body: Any) -> None:
    """Without a name, or without any word on how it stands."""
    with pytest.raises(NotOurShape):
        wire.read_batch(body, 1)


async def test_a_cancel_is_followed_by_a_look() -> None:
    """Agreed to and still running is cancelling; refused because it has ended is a conflict."""
    server = Server(answer(200, {}), answer(200, operation()))
    got = await provider(server).cancel("batches/b1")
    assert isinstance(got, BatchSnapshot)
    assert (got.status, got.raw_status) == (ProviderStatus.CANCELLING, "BATCH_STATE_RUNNING")
    assert [request.url.path for request in server.requests] == ["/v1beta/batches/b1:cancel", "/v1beta/batches/b1"]
    ended = await provider(Server(answer(200, {}), answer(200, operation("BATCH_STATE_CANCELLED")))).cancel("b1")
    assert isinstance(ended, BatchSnapshot)
    assert ended.status is ProviderStatus.CANCELLED
    late = await provider(Server(error(400, "FAILED_PRECONDITION"))).cancel("batches/b1")
    assert isinstance(late, CallFailed)
    assert late.kind is CallFailure.CONFLICT


async def test_lists() -> None:
    """Tokens chain pages, a token that does not move ends them, and an empty page has no member at all."""
    server = Server(answer(200, {"operations": [operation(), {"no": "name"}], "nextPageToken": "t2"}))
    adapter = provider(server)
    page = await adapter.list_batches("t1")
    assert isinstance(page, BatchPage)
    assert (len(page.batches), page.next_cursor) == (1, "t2")
    assert dict(server.requests[0].url.params) == {"pageSize": "100", "pageToken": "t1"}
    again = await adapter.list_batches("t2")
    assert isinstance(again, BatchPage)
    assert again.next_cursor is None
    empty = await provider(Server(answer(200, {}))).list_batches()
    assert empty == BatchPage(())
    files = {"files": [FILE | {"source": "GENERATED"}, FILE | {"source": "UPLOADED", "displayName": "a.jsonl"}, FILE]}
    for role, count in ((FileRole.INPUT, 2), (FileRole.OUTPUT, 1)):
        found = await provider(Server(answer(200, files))).list_files(role)
        assert isinstance(found, FilePage)
        assert len(found.files) == count
    odd = await provider(Server(answer(200, []))).list_files(FileRole.INPUT)
    assert isinstance(odd, CallFailed)
    assert odd.kind is CallFailure.PROTOCOL


# -------------------------------------------------------------------------------------------------- files


def test_a_list_of_another_order_ends_no_search() -> None:
    """Gemini documents no order of its lists: one that is not newest first comes without instants."""
    old, new = (operation() | {"metadata": {"createTime": f"2026-11-1{day}T12:00:00Z", "state": "X"}} for day in (1, 5))
    told = [
        [one.created_at is not None for one in wire.read_batch_page({"operations": page}, None, 9).batches]
        for page in ([new, old], [old, new])
    ]
    assert told == [[True, True], [False, False]]


async def test_a_download_asks_for_the_bytes_alone(tmp_path: Path) -> None:
    """A name of more than 40 characters is fetched without a look at the file; another host gets no key."""
    name = f"files/batch-{'x' * 50}"
    server = Server(answer(302, b"", {"location": "https://cdn.example/x"}), answer(200, b"{}\n"))
    got = await provider(server).download(name, tmp_path / "o")
    assert isinstance(got, DownloadedFile)
    first, second = server.requests
    assert str(first.url) == f"{HOST}/download/v1beta/{name}:download?alt=media"
    assert first.headers["x-goog-api-key"] == KEY
    assert "x-goog-api-key" not in second.headers


GONE = error(403, "PERMISSION_DENIED", "You do not have permission to access the File abc or it may not exist.")


@pytest.mark.parametrize(
    ("answers", "kind"),
    [
        ((answer(200, {}),), None),
        ((error(404, "NOT_FOUND"),), None),
        ((GONE, answer(200, {})), None),
        # An account that has not paid is told the same: the file may well be there.
        ((GONE, error(403, "PERMISSION_DENIED")), CallFailure.ACCOUNT),
        ((error(403, "PERMISSION_DENIED"),), CallFailure.ACCOUNT),
        ((answer(404, b"<html>", {"content-type": "text/html"}),), CallFailure.UNAVAILABLE),
    ],
)
async def test_deleting(answers: tuple[httpx.Response, ...], kind: CallFailure | None) -> None:
    """Gone is gone, but only where it is certain: a late create could otherwise start from the file."""
    got = await provider(Server(*answers)).delete_file("files/abc")
    assert (got.kind if got is not None else None) is kind


# ------------------------------------------------------------------------------------------- lines, single calls


@pytest.mark.parametrize(
    ("body", "request_"),
    [
        (b'{"contents":[1.50]}', b'{"contents":[1.50]}'),
        (b'{ "model" : "m", "contents" : [ {"parts":[]} ] }', b'{"contents":[ {"parts":[]} ]}'),
        (b'{"contents":[{"model":"kept"}],"\\u006dodel":"m"}', b'{"contents":[{"model":"kept"}]}'),
        (b'{"contents":["\\ud800"],"model":"m"}', b'{"contents":["\\ud800"]}'),
        ('{"contents":["\u2028é"],"model":null}'.encode(), '{"contents":["\u2028é"]}'.encode()),
        (b'{"model":"m"}', b"{}"),
    ],
)
def test_a_request_line(body: bytes, request_: bytes) -> None:
    """Head and line make one JSON line; the model is taken out, the bytes of everything else stay."""
    adapter = provider(Server(answer(500)))
    line = adapter.line_head("0123456789-0-1-1") + adapter.render_line(GENERATE, body)
    assert line == b'{"key":"0123456789-0-1-1","request":' + request_ + b"}\n"
    assert json.loads(line)["key"] == "0123456789-0-1-1"


@pytest.mark.parametrize("body", [b'{"a":\n1}', b'["model"]', b'{"model":"m"', b'{"model":"\\ud800" "x"}'])
def test_what_is_no_request(body: bytes) -> None:
    """A raw line break would make two lines, and what is no object has no model."""
    with pytest.raises(ValueError, match="request body"):
        provider(Server(answer(500))).render_line(GENERATE, body)


@pytest.mark.parametrize("metadata", [{"batch_id": "a b"}, {"batch_id": "a=b"}, {"batch_id": "a", "x": ""}])
def test_names_that_could_not_be_read_back(metadata: dict[str, str]) -> None:
    """They are refused before anything is sent."""
    with pytest.raises(ValueError, match="words"):
        wire.display_name(metadata)


@pytest.mark.parametrize(
    ("text", "metadata"),
    [
        (None, {}),
        ("", {}),
        ("batchferry", {}),
        ("01J", {"batch_id": "01J"}),
        ("01J a=b c=d", {"batch_id": "01J", "a": "b", "c": "d"}),
        ("somebody's nightly job", {"batch_id": "somebody's nightly job"}),
    ],
)
def test_names_are_read_back(text: str | None, metadata: dict[str, str]) -> None:
    """Ours give the metadata; others are one batch id that fits nobody."""
    assert wire.read_display_name(text) == metadata
    assert wire.display_name({}) == "batchferry"


async def test_a_single_call() -> None:
    """The model is the address and leaves the body; the answer is judged like a line."""
    candidates = [{"content": {"parts": [{"text": "x"}]}, "finishReason": "STOP"}]
    server = Server(answer(200, {"candidates": candidates}))
    got = await provider(server).answer(GENERATE, b'{"model":"models/g","contents":[]}', 5.0)
    assert (got.failure, got.line.row_class) == (None, RowClass.SUCCEEDED)
    assert str(server.requests[0].url) == f"{HOST}/v1beta/models/g:generateContent"
    assert server.bodies[0] == b'{"contents":[]}'
    for body in (b"{}", b'{"model":7}', b"no json \\u"):
        none = await provider(server).answer(GENERATE, body, 5.0)
        assert none.failure is not None
        assert (none.line.row_class, none.failure.is_definite) == (RowClass.INVALID_REQUEST, True)
    assert len(server.requests) == 1


async def test_when_to_come_back_stands_in_the_details() -> None:
    """RetryInfo is the hint where no header is; a header goes first."""
    details = [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "26s"}]
    refusal = error(429, "RESOURCE_EXHAUSTED", details=details)
    got = await provider(Server(refusal)).answer(GENERATE, b'{"model":"m"}', 5.0)
    assert got.hints.retry_after_s == 26.0
    refusal.headers["retry-after"] = "3"
    got = await provider(Server(refusal)).answer(GENERATE, b'{"model":"m"}', 5.0)
    assert got.hints.retry_after_s == 3.0


def test_an_account_that_cannot_work() -> None:
    """Every fault is listed, and none quotes the key."""
    with pytest.raises(ConfigError) as refused:
        GeminiAccount(
            "x", "https://h/api", "a b", file_ready_s=-1, expires_after_s=0, list_page_size=0, file_page_size=101
        )
    assert len(refused.value.faults) == 6
    assert "a b" not in str(refused.value)
    assert KEY not in repr(GeminiAccount("x", api_key=KEY))
