import email.parser
import email.policy
import json
import logging
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from openai_kit import BASE, CHAT, KEY, BytesSource, HandClock, Server, account, answer, batch, error, provider

from batchferry.domain.batcherrors import BatchErrorKind
from batchferry.domain.errors import ConfigError, InvariantBroken
from batchferry.domain.ids import FileId
from batchferry.domain.provider import (
    BatchSnapshot,
    CallFailed,
    CallFailure,
    DownloadedFile,
    FilePage,
    FileRole,
    LineError,
    ListedFile,
    ProviderStatus,
    UploadedFile,
)
from batchferry.ports import BatchProvider
from batchferry.providers.openai import OpenAIAccount, OpenAIProvider

FILE = {
    "id": "file-1",
    "object": "file",
    "bytes": 20,
    "purpose": "batch",
    "status": "processed",
    "expires_at": 1790086400,
}
DATA = b'{"custom_id":"a-1"}\n'
HTML = {"content-type": "text/html"}
BROKEN = httpx.ReadError("connection reset while sending sk-secret")


async def create(server: Server, **changes):
    """One create at a scripted server."""
    return await provider(server, **changes).create("file-1", CHAT, "24h", {"batchferry_batch": "b"})


# ------------------------------------------------------------------------------------------------ account


def test_the_account_hides_its_secrets():
    """Neither key, headers nor query show when an account or its provider is printed."""
    made = account(headers={"api-key": "hidden-1"}, query={"sig": "hidden-2"})
    assert all(secret not in repr(made) for secret in (KEY, "hidden-1", "hidden-2"))


def test_every_fault_of_an_account_is_listed():
    """Wrong settings are refused at once, with all faults and without the secret in the text."""
    bounds = {"list_page_size": 500, "file_page_size": 0, "max_connections": 0}
    with pytest.raises(ConfigError) as caught:
        OpenAIAccount("a", "ftp://user:pw@host/v1?x=1", api_key="sk-\nbroken", **bounds)
    assert len(caught.value.faults) == 7
    assert "broken" not in str(caught.value)


def test_it_plays_the_port():
    """The adapter has every member of the provider port."""
    made = provider(Server(answer(200)))
    assert all(hasattr(made, name) for name in dir(BatchProvider) if not name.startswith("_"))
    assert made.name == "main"


async def test_every_call_carries_the_accounts_headers():
    """Key, organisation, project, further headers and query parameters go with a call; the agent names itself."""
    server = Server(answer(200, batch()))
    made = provider(
        server, organization="org-1", project="proj-1", headers={"X-Gateway": "g"}, query={"api-version": "2025-04-01"}
    )
    await made.retrieve("batch_1")
    request = server.requests[0]
    assert str(request.url) == f"{BASE}/batches/batch_1?api-version=2025-04-01"
    sent = {
        name: request.headers[name] for name in ("authorization", "openai-organization", "openai-project", "x-gateway")
    }
    assert sent == {
        "authorization": f"Bearer {KEY}",
        "openai-organization": "org-1",
        "openai-project": "proj-1",
        "x-gateway": "g",
    }
    assert request.headers["user-agent"].startswith("batchferry/")


async def test_a_server_without_a_key_gets_none():
    """No key means no Authorization header at all."""
    server = Server(answer(200, batch()))
    await provider(server, api_key="").retrieve("batch_1")
    assert "authorization" not in server.requests[0].headers


# ------------------------------------------------------------------------------------------------- upload


def parts_of(server: Server, index: int = -1):
    """The parts of the form that was uploaded, by name."""
    request, body = server.requests[index], server.bodies[index]
    head = f"content-type: {request.headers['content-type']}\r\n\r\n".encode()
    form = email.parser.BytesParser(policy=email.policy.HTTP).parsebytes(head + body)
    return {part.get_param("name", header="content-disposition"): part for part in form.iter_parts()}


async def test_an_upload_is_a_form_of_known_length():
    """Purpose, bracketed expiry and the file itself, with a Content-Length and no chunked encoding."""
    server, source = Server(answer(200, FILE)), BytesSource(DATA)
    got = await provider(server).upload(source, "batchferry-1.jsonl", 1_209_600)
    assert isinstance(got, UploadedFile)
    assert (got.file_id, got.size_bytes, got.expires_at is not None) == ("file-1", 20, True)
    request, body = server.requests[0], server.bodies[0]
    assert (request.method, str(request.url)) == ("POST", f"{BASE}/files")
    assert int(request.headers["content-length"]) == len(body)
    assert "transfer-encoding" not in request.headers
    parts = parts_of(server)
    texts = {name: part.get_payload(decode=True) for name, part in parts.items()}
    assert texts == {
        "purpose": b"batch",
        "expires_after[anchor]": b"created_at",
        "expires_after[seconds]": b"1209600",
        "file": DATA,
    }
    assert parts["file"].get_filename() == "batchferry-1.jsonl"


@pytest.mark.parametrize(("expires_after_s", "allowed"), [(None, True), (3600, False)])
async def test_an_expiry_may_be_left_out(expires_after_s, allowed):
    """No expiry is sent when none is wanted or the server takes none."""
    server = Server(answer(200, FILE))
    await provider(server, send_file_expiry=allowed).upload(BytesSource(DATA), "a.jsonl", expires_after_s)
    assert set(parts_of(server)) == {"purpose", "file"}


async def test_a_broken_upload_starts_from_zero():
    """After a reset and a 502 the third try sends the whole file again."""
    server, source, clock = (
        Server(BROKEN, answer(502, b"bad gateway"), answer(200, FILE)),
        BytesSource(DATA),
        HandClock(),
    )
    got = await provider(server, clock).upload(source, "a.jsonl", None)
    assert isinstance(got, UploadedFile)
    assert source.starts == 3
    assert parts_of(server)["file"].get_payload(decode=True) == DATA
    assert clock.sleeps == [1, 2]


async def test_a_file_that_arrived_with_another_size_is_not_trusted():
    """The answer's size must be ours; it may be absent. A second mismatch is handed up."""
    server = Server(answer(200, FILE | {"bytes": 19}))
    got = await provider(server).upload(BytesSource(DATA), "a.jsonl", None)
    assert isinstance(got, CallFailed)
    assert (got.kind, got.code, len(server.requests)) == (CallFailure.PROTOCOL, "size_mismatch", 2)
    assert isinstance(
        await provider(Server(answer(200, {"id": "f"}))).upload(BytesSource(DATA), "a.jsonl", None), UploadedFile
    )


async def test_a_file_that_the_server_marks_bad_is_refused():
    """A 200 whose file has the status error is no upload."""
    got = await provider(Server(answer(200, FILE | {"status": "error"}))).upload(BytesSource(DATA), "a.jsonl", None)
    assert isinstance(got, CallFailed)
    assert (got.kind, got.code) == (CallFailure.REJECTED, "file_status_error")


async def test_a_file_over_the_limit_is_not_sent():
    """An upload above the account's bound is refused here, definitely."""
    server = Server(answer(200, FILE))
    got = await provider(server, max_upload_bytes=19).upload(BytesSource(DATA), "a.jsonl", None)
    assert isinstance(got, CallFailed)
    assert (got.kind, got.code, got.is_definite, server.requests) == (CallFailure.REJECTED, "file_too_large", True, [])


@pytest.mark.parametrize("name", ["a.json", "a\r\n.jsonl", 'a".jsonl', "ä.jsonl", "../a.jsonl"])
async def test_a_file_name_no_server_takes_is_our_mistake(name):
    """A name that is not plain or does not end in .jsonl never leaves."""
    with pytest.raises(ValueError, match="jsonl"):
        await provider(Server(answer(200, FILE))).upload(BytesSource(DATA), name, None)


@pytest.mark.parametrize("claimed_bytes", [19, 21])
async def test_a_source_that_lies_about_its_size_is_our_mistake(claimed_bytes):
    """A source with another number of bytes than it said breaks the call, whatever the server would say."""
    with pytest.raises(InvariantBroken):
        await provider(Server(answer(200, FILE))).upload(BytesSource(DATA, 7, claimed_bytes), "a.jsonl", None)


# ------------------------------------------------------------------------------------------------- create


async def test_a_create_says_what_it_wants():
    """File, endpoint, window, metadata and the results' expiry are in the body; the answer is read."""
    server = Server(answer(200, batch(status="validating")))
    got = await create(server, output_expires_after_s=3600)
    assert isinstance(got, BatchSnapshot)
    assert got.status is ProviderStatus.VALIDATING
    assert json.loads(server.bodies[0]) == {
        "input_file_id": "file-1",
        "endpoint": CHAT,
        "completion_window": "24h",
        "metadata": {"batchferry_batch": "b"},
        "output_expires_after": {"anchor": "created_at", "seconds": 3600},
    }


async def test_metadata_may_be_left_out():
    """A server that takes no metadata gets none, and no window means the account's."""
    server = Server(answer(200, batch()))
    await provider(server, send_metadata=False, completion_window="48h").create("file-1", CHAT, "", {"a": "b"})
    assert json.loads(server.bodies[0]) == {"input_file_id": "file-1", "endpoint": CHAT, "completion_window": "48h"}


NOT_SEEN = "no such file: file-1"


@pytest.mark.parametrize(
    ("reply", "kind", "is_definite"),
    [
        # never left us
        (httpx.ConnectError("x"), CallFailure.UNAVAILABLE, True),
        (httpx.ConnectTimeout("x"), CallFailure.UNAVAILABLE, True),
        (httpx.PoolTimeout("x"), CallFailure.UNAVAILABLE, True),
        (httpx.ProxyError("x"), CallFailure.UNAVAILABLE, True),
        # may have been carried out
        (httpx.ReadTimeout("x"), CallFailure.UNANSWERED, False),
        (httpx.WriteTimeout("x"), CallFailure.UNANSWERED, False),
        (httpx.ReadError("x"), CallFailure.UNANSWERED, False),
        (httpx.WriteError("x"), CallFailure.UNANSWERED, False),
        (httpx.RemoteProtocolError("x"), CallFailure.UNANSWERED, False),
        (TimeoutError(), CallFailure.UNANSWERED, False),
        *[
            (answer(status, error()), CallFailure.UNANSWERED, False)
            for status in (408, 409, 418, 500, 502, 503, 504, 529)
        ],
        *[
            (answer(status, b"<html>", HTML), CallFailure.UNANSWERED, False)
            for status in (400, 401, 402, 403, 404, 413, 422, 429)
        ],
        (answer(429, {"message": "API rate limit exceeded"}), CallFailure.UNANSWERED, False),
        (answer(400, {"error": "text"}), CallFailure.UNANSWERED, False),
        (answer(307, b"", {"location": "/v2/batches"}), CallFailure.UNANSWERED, False),
        (answer(200, b"<html>", HTML), CallFailure.UNANSWERED, False),
        (answer(200, {"id": None}), CallFailure.UNANSWERED, False),
        # a clear no
        (answer(400, error(code="invalid_value", param="endpoint")), CallFailure.REJECTED, True),
        (answer(413, error()), CallFailure.REJECTED, True),
        (answer(422, {"detail": [{"msg": "bad window"}]}), CallFailure.REJECTED, True),
        (answer(401, error(code="invalid_api_key")), CallFailure.ACCOUNT, True),
        (answer(403, error()), CallFailure.ACCOUNT, True),
        (answer(429, error(code="rate_limit_exceeded", kind="requests")), CallFailure.THROTTLED, True),
        (answer(429, error(kind="insufficient_quota")), CallFailure.ACCOUNT, True),
        (answer(402, error("Insufficient Balance")), CallFailure.ACCOUNT, True),
        (answer(429, error(code="1113")), CallFailure.ACCOUNT, True),  # Zhipu's empty purse
        # the queue is full: a refusal that ends by waiting
        (answer(400, error(code="token_limit_exceeded")), CallFailure.THROTTLED, True),
        (answer(400, error("Enqueued token limit reached for m in organization o.")), CallFailure.THROTTLED, True),
        (answer(429, error(code="billing_not_active")), CallFailure.ACCOUNT, True),
        (answer(400, error(code="billing_hard_limit_reached")), CallFailure.ACCOUNT, True),
        (answer(404, {"detail": "Not Found"}), CallFailure.NOT_FOUND, True),
        # not yet
        (answer(400, error(NOT_SEEN, param="file_id")), CallFailure.NOT_READY, True),
        (answer(400, error("input file-1 does not exist", param="input_file_id")), CallFailure.NOT_READY, True),
        (answer(400, error("The file was not found or the project does not have access")), CallFailure.NOT_READY, True),
        (answer(404, {"detail": "no such input file"}), CallFailure.NOT_READY, True),
        (answer(404, error("file-1 not found")), CallFailure.NOT_READY, True),
        (answer(400, error("x", code="missing_required_parameter", param="input_file_id")), CallFailure.REJECTED, True),
        (answer(400, error("wrong purpose", param="input_file_id")), CallFailure.REJECTED, True),
    ],
)
async def test_a_create_is_sent_once_and_its_outcome_is_not_guessed(reply, kind, is_definite):
    """Only what never left us or was refused in the provider's own words counts as not done; nothing is repeated."""
    server, clock = Server(reply), HandClock()
    got = await provider(server, clock).create("file-1", CHAT, "24h", {})
    assert isinstance(got, CallFailed)
    assert (got.call, got.kind, got.is_definite) == ("create", kind, is_definite)
    assert len(server.requests) == 1
    assert clock.sleeps == []


async def test_a_server_cannot_talk_us_into_a_second_create():
    """x-should-retry and Retry-After are noted and not followed."""
    server = Server(answer(503, error(), {"x-should-retry": "true", "retry-after": "3"}))
    got = await create(server)
    assert isinstance(got, CallFailed)
    assert (got.retry_after_s, len(server.requests)) == (3.0, 1)


async def test_a_failure_tells_what_may_be_told():
    """Code, param, request id and hint are kept; message and exception texts never show in print."""
    headers = {"x-request-id": "req_9", "retry-after": "7"}
    got = await create(Server(answer(400, error("you wrote: hello", code="invalid_value", param="endpoint"), headers)))
    assert isinstance(got, CallFailed)
    assert (got.code, got.param, got.request_id, got.retry_after_s) == ("invalid_value", "endpoint", "req_9", 7.0)
    assert got.message == "you wrote: hello"
    assert "hello" not in repr(got) + got.summary
    assert got.summary == "create: rejected HTTP 400 invalid_value"
    broken = await create(Server(BROKEN))
    assert "secret" not in repr(broken)


async def test_a_code_that_is_a_sentence_is_not_kept():
    """A server that writes its text where a code belongs does not get it into our logs."""
    got = await create(Server(answer(400, error("m", code="the prompt 'hello' is bad", kind="another sentence here"))))
    assert isinstance(got, CallFailed)
    assert got.code is None


# ------------------------------------------------------------------------- retrieve, cancel, list, delete


async def test_retrieve_bridges_a_hiccup():
    """A broken poll is repeated; strange ids become one path segment."""
    server, clock = Server(BROKEN, answer(500, b"oops"), answer(200, batch())), HandClock()
    got = await provider(server, clock).retrieve("bGl0ZWxsbQ==/x")
    assert isinstance(got, BatchSnapshot)
    assert server.requests[0].url.raw_path == b"/v1/batches/bGl0ZWxsbQ%3D%3D%2Fx"
    assert clock.sleeps == [1, 2]


@pytest.mark.parametrize(
    ("reply", "kind", "tries"),
    [
        (answer(404, error("no batch found")), CallFailure.NOT_FOUND, 1),
        (answer(404, b"<html>", HTML), CallFailure.UNAVAILABLE, 3),
        (answer(401, b""), CallFailure.ACCOUNT, 1),
        (answer(403, error()), CallFailure.ACCOUNT, 1),
        (answer(429, error(), {"retry-after": "40"}), CallFailure.THROTTLED, 1),
        (answer(429, error(code="insufficient_quota")), CallFailure.ACCOUNT, 1),
        (answer(408, error()), CallFailure.UNAVAILABLE, 3),
        (answer(500, error()), CallFailure.UNAVAILABLE, 3),
        (answer(500, error(), {"x-should-retry": "false"}), CallFailure.UNAVAILABLE, 1),
        (answer(200, b"{"), CallFailure.PROTOCOL, 1),
        (answer(200, []), CallFailure.PROTOCOL, 1),
        (httpx.ConnectError("x"), CallFailure.UNAVAILABLE, 3),
        (httpx.ReadTimeout("x"), CallFailure.UNAVAILABLE, 3),
    ],
)
async def test_failures_of_a_poll(reply, kind, tries):
    """Each failure of a poll has its kind and its number of tries."""
    server = Server(reply)
    got = await provider(server).retrieve("batch_1")
    assert isinstance(got, CallFailed)
    assert (got.kind, len(server.requests)) == (kind, tries)


async def test_cancel():
    """A cancel is a POST without a body; one of an ended batch is a conflict and not repeated."""
    server = Server(answer(200, batch(status="cancelling")), answer(409, error("cannot cancel")))
    made = provider(server)
    got = await made.cancel("batch_1")
    assert isinstance(got, BatchSnapshot)
    assert got.status is ProviderStatus.CANCELLING
    again = await made.cancel("batch_1")
    assert isinstance(again, CallFailed)
    assert again.kind is CallFailure.CONFLICT
    assert [(r.method, r.url.path) for r in server.requests] == [("POST", "/v1/batches/batch_1/cancel")] * 2


async def test_a_listing_of_a_server_that_ignores_the_cursor_ends():
    """Following next_cursor visits two pages and stops, though has_more stays true."""
    server = Server(answer(200, {"data": [batch(id="b2"), batch(id="b1")], "has_more": True, "last_id": "b1"}))
    made, cursor, asked = provider(server, list_page_size=2), None, 0
    while asked < 5:
        page = await made.list_batches(cursor)
        asked += 1
        cursor = page.next_cursor
        if cursor is None:
            break
    assert asked == 2
    assert [dict(r.url.params) for r in server.requests] == [{"limit": "2"}, {"limit": "2", "after": "b1"}]


def listed(file_id: str, **members: object) -> dict[str, object]:
    """A file as a list shows it."""
    return {
        "id": file_id,
        "filename": "a.jsonl",
        "purpose": "batch",
        "bytes": 7,
        "created_at": 1_700_000_000,
        **members,
    }


async def test_files_are_listed_by_purpose_newest_first():
    """Inputs and results are two lists; the cursor is the last id of a page, and ends with the last page."""
    page = {"object": "list", "data": [listed("file-2", expires_at=1_700_100_000), listed("file-1")], "has_more": True}
    server = Server(answer(200, page), answer(200, {"data": [], "has_more": False}))
    made = provider(server, file_page_size=2)
    first = await made.list_files(FileRole.INPUT)
    assert isinstance(first, FilePage)
    made_at = datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
    assert first.files[0] == ListedFile(
        FileId("file-2"), "a.jsonl", "batch", 7, made_at, made_at + timedelta(seconds=100_000)
    )
    assert first.next_cursor == "file-1"
    assert await made.list_files(FileRole.OUTPUT, "file-9") == FilePage((), None)
    assert [(r.method, r.url.path) for r in server.requests] == [("GET", "/v1/files")] * 2
    assert [dict(r.url.params) for r in server.requests] == [
        {"purpose": "batch", "order": "desc", "limit": "2"},
        {"purpose": "batch_output", "order": "desc", "limit": "2", "after": "file-9"},
    ]


async def test_a_file_list_of_a_server_that_ignores_purpose_and_cursor_ends():
    """Files of other purposes are left out, entries without an id too, and a cursor that does not move ends it."""
    data = [listed("file-3", purpose="fine-tune"), {"filename": "x"}, listed("file-2", purpose=None), listed("file-1")]
    server = Server(answer(200, {"data": data, "has_more": True}))
    made = provider(server)
    page = await made.list_files(FileRole.INPUT)
    assert isinstance(page, FilePage)
    assert [file.file_id for file in page.files] == ["file-2", "file-1"]
    again = await made.list_files(FileRole.INPUT, page.next_cursor)
    assert isinstance(again, FilePage)
    assert again.next_cursor is None


@pytest.mark.parametrize(
    ("reply", "kind", "tries"),
    [
        (answer(404, error("no such route")), CallFailure.NOT_FOUND, 1),
        (answer(200, {"data": None}), CallFailure.PROTOCOL, 1),
        (answer(200, b"<html>", HTML), CallFailure.PROTOCOL, 1),
        (answer(503, b""), CallFailure.UNAVAILABLE, 4),
        (answer(401, error()), CallFailure.ACCOUNT, 1),
    ],
)
async def test_a_file_list_that_cannot_be_had(reply, kind, tries):
    """It is a failure, never an empty list."""
    server = Server(reply)
    got = await provider(server).list_files(FileRole.OUTPUT)
    assert isinstance(got, CallFailed)
    assert (got.call, got.kind, len(server.requests)) == ("list_files", kind, tries)


@pytest.mark.parametrize(
    "reply",
    [
        answer(200, {"id": "file-1", "deleted": True}),
        answer(204, b""),
        answer(200, b"ok"),
        answer(404, error("no such file")),
        answer(404, {"detail": "gone"}),
        answer(404, b""),
    ],
)
async def test_a_file_is_gone(reply):
    """Deleted now or not there any more: gone."""
    assert await provider(Server(reply)).delete_file("file-1") is None


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (answer(404, b"<html>", HTML), CallFailure.UNAVAILABLE),
        (answer(200, {"id": "file-1", "deleted": False}), CallFailure.PROTOCOL),
        (answer(403, error()), CallFailure.ACCOUNT),
        (answer(500, b""), CallFailure.UNAVAILABLE),
        (httpx.ReadTimeout("x"), CallFailure.UNAVAILABLE),
    ],
)
async def test_a_file_that_may_still_be_there_is_not_called_gone(reply, kind):
    """A gateway's page, a "no" and a broken call prove nothing."""
    got = await provider(Server(reply)).delete_file("file-1")
    assert isinstance(got, CallFailed)
    assert got.kind is kind


# ----------------------------------------------------------------------------------------------- download


async def test_a_download_lands_whole(tmp_path):
    """The file's bytes, size and hash; the request asks for no compression."""
    server = Server(answer(200, b'{"a":1}\n{"b":2}'))
    got = await provider(server).download("file-o", tmp_path / "o.jsonl")
    assert isinstance(got, DownloadedFile)
    assert (tmp_path / "o.jsonl").read_bytes() == b'{"a":1}\n{"b":2}'
    assert server.requests[0].url.path == "/v1/files/file-o/content"
    assert server.requests[0].headers["accept-encoding"] == "identity"


class Cut(httpx.AsyncByteStream):
    """A body whose connection breaks."""

    async def __aiter__(self):
        yield b"half of "
        raise httpx.ReadError("reset")


async def test_a_cut_download_starts_from_zero(tmp_path):
    """A reset, a short body and a 502 are tried again; the file is the last answer alone."""

    def short(_request):
        async def body():
            yield b"too short"

        return httpx.Response(200, headers={"content-length": "100"}, content=body())

    server = Server(lambda _r: httpx.Response(200, stream=Cut()), short, answer(502, b""), answer(200, b"whole\n"))
    clock, to = HandClock(), tmp_path / "o.jsonl"
    got = await provider(server, clock).download("file-o", to)
    assert isinstance(got, DownloadedFile)
    assert (to.read_bytes(), clock.sleeps) == (b"whole\n", [1, 2, 4])
    assert list(tmp_path.iterdir()) == [to]


@pytest.mark.parametrize(
    ("reply", "kind", "tries"),
    [
        (answer(404, error("no such file object")), CallFailure.NOT_FOUND, 1),
        (answer(403, error()), CallFailure.ACCOUNT, 1),
        (answer(403, b"<html>", HTML), CallFailure.ACCOUNT, 1),
        (answer(502, b""), CallFailure.UNAVAILABLE, 8),
        (answer(429, error(), {"retry-after": "300"}), CallFailure.THROTTLED, 1),
        (answer(302, b"", {"location": "http://llm.example/plain"}), CallFailure.PROTOCOL, 1),
        (answer(302, b"", {"location": "/v1/files/file-o/content"}), CallFailure.PROTOCOL, 1),
    ],
)
async def test_failures_of_a_download(tmp_path, reply, kind, tries):
    """Each failure has its kind and number of tries; nothing stays on the disk. A ring of redirects ends."""
    server = Server(reply)
    got = await provider(server).download("file-o", tmp_path / "o.jsonl")
    assert isinstance(got, CallFailed)
    hops = 6 if "location" in getattr(reply, "headers", {}) and reply.headers["location"].startswith("/") else 1
    assert (got.kind, len(server.requests)) == (kind, tries * hops)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("location", "keeps_key"),
    [("https://blobs.example/x?sig=1", False), ("https://llm.example:8443/x", False), ("/v1/elsewhere", True)],
)
async def test_another_host_never_gets_the_key(tmp_path, location, keeps_key):
    """A redirect is followed, but only the account's own host is shown its headers."""
    server = Server(answer(302, b"", {"location": location}), answer(200, b"x\n"))
    got = await provider(server, headers={"X-Gateway": "g"}, project="p").download("file-o", tmp_path / "o.jsonl")
    assert isinstance(got, DownloadedFile)
    second = server.requests[1].headers
    assert [name in second for name in ("authorization", "x-gateway", "openai-project")] == [keeps_key] * 3


# -------------------------------------------------------------------------------------------------- others


async def test_an_endless_answer_is_cut_off():
    """An answer above its bound is refused, not kept."""
    got = await provider(Server(answer(200, batch(note="x" * 500))), max_answer_bytes=100).retrieve("batch_1")
    assert isinstance(got, CallFailed)
    assert (got.kind, got.code) == (CallFailure.PROTOCOL, "answer_too_large")


async def test_the_providers_clock_is_learned_from_its_answers():
    """Skew is unknown before the first answer and then the provider's Date minus our time."""
    made = provider(Server(answer(200, batch(), {"date": "Sun, 15 Nov 2026 12:02:00 GMT"})))
    assert made.clock_skew_s is None
    await made.retrieve("batch_1")
    assert made.clock_skew_s == pytest.approx(120.5)


def test_entries_of_a_failed_batch_are_told_apart():
    """The adapter judges an entry of the error list by its code, param and line."""
    made = provider(Server(answer(200)))
    assert made.classify_batch_error(LineError("token_limit_exceeded")) is BatchErrorKind.TOKEN_LIMIT
    assert made.classify_batch_error(LineError("invalid_url", param="url", line=3)) is BatchErrorKind.ROW


async def test_nothing_secret_is_logged(caplog, tmp_path):
    """Key, prompt and provider message are in no log record, at any level."""
    caplog.set_level(logging.DEBUG)
    server = Server(answer(400, error("you said hello", code="invalid_value")))
    made = provider(server)
    await made.upload(BytesSource(b"prompt-text\n"), "a.jsonl", None)
    await made.create("file-1", CHAT, "24h", {})
    await made.download("file-1", tmp_path / "x")
    assert all(secret not in caplog.text for secret in (KEY, "hello", "prompt-text"))


async def test_close_closes():
    """After close no call leaves."""
    made = OpenAIProvider(account(), HandClock(), httpx.MockTransport(Server(answer(200, batch()))))
    await made.close()
    with pytest.raises(RuntimeError, match="closed"):
        await made.retrieve("batch_1")
