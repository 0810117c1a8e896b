"""The Anthropic adapter at a scripted server: bodies, headers, refusals, and results that stay at their host."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import httpx
import pytest
from anthropic_kit import BASE, BATCHES, KEY, MESSAGES, account, batch, ended, error, message, provider
from openai_kit import BytesSource, HandClock, Server, answer

from batchferry.domain.errors import ConfigError, InvariantBroken
from batchferry.domain.ids import FileId, ProviderBatchId
from batchferry.domain.provider import (
    BatchSnapshot,
    CallFailed,
    CallFailure,
    DownloadedFile,
    FilePage,
    FileRole,
    ProviderStatus,
    RequestCounts,
)
from batchferry.domain.rows import RowClass
from batchferry.ports import BatchProvider
from batchferry.providers.anthropic import AnthropicAccount
from batchferry.providers.anthropic.statuses import STATUSES, read_status

BROKEN = httpx.ReadError("connection reset while sending sk-ant-secret")
ROWS = [{"custom_id": f"a-0-{n}-1", "params": {"model": "m", "max_tokens": 5, "messages": []}} for n in range(3)]
RESULTS = FileId("results:msgbatch_1")
ID = ProviderBatchId("msgbatch_1")


def lines_of(server: Server, rows: list[dict]) -> bytes:
    """The rows as the spool and the upload make lines of them."""
    made = provider(server)
    return b"".join(
        made.line_head(row["custom_id"]) + made.render_line(MESSAGES, json.dumps(row["params"]).encode())
        for row in rows
    )


async def create(server: Server, source: BytesSource | None = None, **changes) -> BatchSnapshot | CallFailed:
    """One create at a scripted server."""
    source = source or BytesSource(lines_of(server, ROWS))
    return await provider(server, **changes).create_inline(source, MESSAGES, "m")


# ------------------------------------------------------------------------------------------------ account


def test_the_account_hides_its_secrets_and_lists_its_faults():
    """Neither key nor headers show, and wrong settings are refused at once with all faults."""
    made = account(headers={"x-gateway": "hidden-1"})
    assert all(secret not in repr(made) for secret in (KEY, "hidden-1"))
    with pytest.raises(ConfigError) as caught:
        AnthropicAccount("a", "ftp://host", "sk-\nbroken", version="new", betas=("a b",), list_page_size=1001)
    assert len(caught.value.faults) == 5
    assert "broken" not in str(caught.value)
    assert account(base_url=f"{BASE}/v1/").root_url == BASE


def test_it_plays_the_port():
    """The adapter has every member of the provider port, and makes batches inline."""
    made = provider(Server(answer(200)))
    assert all(hasattr(made, name) for name in dir(BatchProvider) if not name.startswith("_"))
    assert (made.name, made.is_inline) == ("claude", True)


async def test_files_are_no_part_of_it():
    """Upload and create of a file are never called; there are no files to list."""
    made = provider(Server(answer(200)))
    with pytest.raises(InvariantBroken):
        await made.upload(BytesSource(b""), "a.jsonl", None)
    with pytest.raises(InvariantBroken):
        await made.create(FileId("f"), MESSAGES, "24h", {})
    assert await made.list_files(FileRole.OUTPUT) == FilePage(())


async def test_every_call_carries_the_accounts_headers():
    """Key, version, betas, workspace and further headers go with a call."""
    server = Server(answer(200, batch()))
    await provider(server, betas=("b1", "b2"), workspace="wrk_1", headers={"X-Gateway": "g"}).retrieve(ID)
    request = server.requests[0]
    assert (request.method, str(request.url)) == ("GET", f"{BATCHES}/msgbatch_1")
    names = ("x-api-key", "anthropic-version", "anthropic-beta", "anthropic-workspace-id", "x-gateway")
    assert [request.headers[name] for name in names] == [KEY, "2026-10-21", "b1,b2", "wrk_1", "g"]
    assert "authorization" not in request.headers
    await provider(server, key_header="authorization").retrieve(ID)
    assert server.requests[1].headers["authorization"] == f"Bearer {KEY}"
    assert "x-api-key" not in server.requests[1].headers
    await provider(server, api_key="").retrieve(ID)
    assert not {"x-api-key", "authorization"} & set(server.requests[2].headers)


# ------------------------------------------------------------------------------------------------- create


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 1 << 20])
async def test_a_create_is_one_body_of_known_length(chunk_bytes):
    """However the lines are cut into chunks, the body is the array of rows and its length is known beforehand."""
    server = Server(answer(200, batch()))
    got = await create(server, BytesSource(lines_of(server, ROWS), chunk_bytes))
    assert isinstance(got, BatchSnapshot)
    assert (got.provider_batch_id, got.counts, got.metadata) == ("msgbatch_1", RequestCounts(4, 0, 0), {})
    request, body = server.requests[0], server.bodies[0]
    assert (request.method, str(request.url)) == ("POST", BATCHES)
    assert json.loads(body) == {"requests": ROWS}
    assert int(request.headers["content-length"]) == len(body)
    assert "transfer-encoding" not in request.headers


def test_a_row_goes_in_unchanged():
    """The params' bytes stay as they are; a raw line break in them is refused, since it would end the row."""
    made = provider(Server(answer(200)))
    raw = b'{"max_tokens" : 1e1,"x":"\\u2028\xe2\x80\xa8"}'
    line = made.line_head("w-1") + made.render_line(MESSAGES, raw)
    assert line == b'{"custom_id":"w-1","params":' + raw + b"}\n"
    with pytest.raises(ValueError, match="line break"):
        made.render_line(MESSAGES, b'{\n"a":1}')


async def test_a_create_is_sent_once():
    """Whatever becomes of it: a second one would be a second bill."""
    for outcome in (BROKEN, answer(529, error("overloaded_error")), answer(429, error("rate_limit_error"))):
        server = Server(outcome)
        await create(server)
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    "outcome",
    [
        BROKEN,
        httpx.ReadTimeout("x"),
        answer(500, error("api_error")),
        answer(503, error("api_error", code="cmek_key_unreachable")),
        answer(529, error("overloaded_error")),
        answer(504, error("timeout_error")),
        answer(403, b"<html>", {"content-type": "text/html"}),
        answer(429, b"slow"),
        answer(200, b"<html>"),
        answer(200, {"id": "msgbatch_1"}),
    ],
)
async def test_a_create_without_a_clear_answer(outcome):
    """After the last byte went out, only the provider's own refusal says that nothing was created."""
    got = await create(Server(outcome))
    assert isinstance(got, CallFailed)
    assert (got.kind, got.is_definite) == (CallFailure.UNANSWERED, False)


async def test_a_create_that_broke_before_its_end_created_nothing():
    """A body that did not go out to its last byte cannot have become a batch, whatever the answer was."""

    class HalfRead(httpx.AsyncBaseTransport):
        def __init__(self, outcome: httpx.Response | Exception) -> None:
            self.outcome = outcome

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            assert isinstance(request.stream, httpx.AsyncByteStream)
            stream: AsyncIterator[bytes] = aiter(request.stream)
            await anext(stream)
            await anext(stream)
            if isinstance(self.outcome, Exception):
                raise self.outcome
            return self.outcome

    server = Server(answer(200))
    for outcome in (httpx.WriteError("x"), httpx.WriteTimeout("x"), answer(500, b"gone"), answer(529, error("x"))):
        made = provider(server)
        made._create_client = httpx.AsyncClient(transport=HalfRead(outcome))
        got = await made.create_inline(BytesSource(lines_of(server, ROWS)), MESSAGES, "m")
        assert isinstance(got, CallFailed)
        assert (got.kind, got.is_definite) == (CallFailure.UNAVAILABLE, True)
        await made.close()


@pytest.mark.parametrize(
    ("status", "body", "headers", "kind", "row"),
    [
        (400, error(message="requests.2.custom_id: String should have at most 64 characters"), {}, "rejected", 2),
        (400, error(message="requests.7.custom_id: not one of ours"), {}, "rejected", None),
        (400, error(message="something else"), {}, "rejected", None),
        (400, error(message="Your credit balance is too low"), {}, "account", None),
        (400, error(message="You have reached your specified API usage limits"), {}, "account", None),
        (400, error(code="organization_on_hold"), {}, "account", None),
        (401, error("authentication_error"), {}, "account", None),
        (402, error("billing_error"), {}, "account", None),
        (403, error("permission_error"), {}, "account", None),
        (404, error("not_found_error"), {}, "not_found", None),
        (413, error("request_too_large"), {}, "rejected", None),
        (429, error("rate_limit_error"), {"retry-after": "7"}, "throttled", None),
        (429, error("rate_limit_error"), {}, "throttled", None),
        (429, error("rate_limit_error", code="ramp_limit_exceeded"), {"retry-after": "7"}, "throttled", None),
        (429, error("rate_limit_error", code="enforced_spend_limit_reached"), {}, "account", None),
        (429, error("rate_limit_error", code="contract_spend_limit_reached"), {}, "account", None),
        (429, error("rate_limit_error", code="team_spend_limit_reached"), {}, "account", None),
    ],
)
async def test_a_refused_create(status, body, headers, kind, row):
    """The provider's own refusal is definite; an empty purse and a spend limit are the account's, a row is named."""
    got = await create(Server(answer(status, body, headers)))
    assert isinstance(got, CallFailed)
    assert (got.kind, got.is_definite, got.row) == (CallFailure(kind), True, row)
    assert got.is_too_large is (status == 413)
    assert got.retry_after_s == (7.0 if headers else None)
    assert got.request_id == "req_1"


async def test_a_create_that_the_front_finds_too_large_made_nothing():
    """A 413 is a page of the gateway in front, which passes no such body on: definite, and halves may go."""
    got = await create(Server(answer(413, b"<html>", {"content-type": "text/html", "cf-ray": "9"})))
    assert isinstance(got, CallFailed)
    assert (got.kind, got.is_definite, got.is_too_large) == (CallFailure.REJECTED, True, True)


async def test_a_create_that_is_too_large_is_not_sent():
    """A body above the account's bound is refused here, and its halves may go."""
    server = Server(answer(200, batch()))
    got = await create(server, max_upload_bytes=50)
    assert isinstance(got, CallFailed)
    assert (got.is_too_large, got.is_definite, server.requests) == (True, True, [])


@pytest.mark.parametrize(("data", "claimed"), [(b"", 0), (b'{"a":1}\n', 9), (b'{"a":1}\n', 7), (b'{"a":1}', 7)])
async def test_a_source_that_lies_is_a_bug(data, claimed):
    """No rows, other bytes than promised, or a last row without its end: none of it is sent as if it were whole."""
    server = Server(answer(200, batch()))
    with pytest.raises(InvariantBroken):
        await create(server, BytesSource(data, 4, claimed))


# -------------------------------------------------------------------------------------------- snapshots


@pytest.mark.parametrize(
    ("body", "status", "results"),
    [
        (batch(), ProviderStatus.IN_PROGRESS, None),
        (
            batch(processing_status="canceling", cancel_initiated_at="2026-11-15T10:10:00Z"),
            ProviderStatus.CANCELLING,
            None,
        ),
        (ended(), ProviderStatus.COMPLETED, RESULTS),
        (ended(cancel_initiated_at="2026-11-15T10:10:00Z"), ProviderStatus.CANCELLED, RESULTS),
        (ended(results_url=None), ProviderStatus.COMPLETED, RESULTS),  # late, or left out by a gateway
        (ended(archived_at="2026-12-14T10:00:00Z"), ProviderStatus.COMPLETED, None),
        (ended(archived_at="2026-12-14T10:00:00Z", results_url=None), ProviderStatus.COMPLETED, None),
        (batch(processing_status="resting"), ProviderStatus.UNKNOWN, None),
    ],
)
async def test_snapshots(body, status, results):
    """Each status in our words; results are there from the end until they are archived."""
    got = await provider(Server(answer(200, body))).retrieve(ID)
    assert isinstance(got, BatchSnapshot)
    assert (got.status, got.output_file_id, got.error_file_id) == (status, results, None)
    assert got.raw_status == body["processing_status"]
    assert got.counts == (RequestCounts(4, 2, 1) if status.is_terminal else RequestCounts(4, 0, 0))
    assert got.created_at == datetime(2026, 11, 15, 10, tzinfo=UTC)


def test_the_status_table():
    """Every documented status has its meaning; a cancel changes only what an end means."""
    assert set(STATUSES) == {"in_progress", "canceling", "cancelling", "ended"}
    assert read_status(" Ended", is_cancelled=False) is ProviderStatus.COMPLETED
    assert read_status("in_progress", is_cancelled=True) is ProviderStatus.IN_PROGRESS


async def test_a_list_is_read_by_its_cursor():
    """A page of a thousand, the next one behind its last id, and an end where the cursor stands still."""
    page = {"data": [ended(), {"no": "id"}], "has_more": True, "first_id": "msgbatch_1", "last_id": "msgbatch_1"}
    server = Server(answer(200, page))
    made = provider(server)
    first = await made.list_batches()
    assert not isinstance(first, CallFailed)
    assert (len(first.batches), first.next_cursor) == (1, "msgbatch_1")
    second = await made.list_batches(first.next_cursor)
    assert not isinstance(second, CallFailed)
    assert second.next_cursor is None
    assert [dict(request.url.params) for request in server.requests] == [
        {"limit": "1000"},
        {"limit": "1000", "after_id": "msgbatch_1"},
    ]


async def test_a_404_is_not_found_and_no_more():
    """A batch that is not seen is reported so, never as gone; a gateway's web page does not even say that."""
    got = await provider(Server(answer(404, error("not_found_error")))).retrieve(ID)
    assert isinstance(got, CallFailed)
    assert got.kind is CallFailure.NOT_FOUND
    page = await provider(Server(answer(404, b"<html>", {"content-type": "text/html"}))).retrieve(ID)
    assert isinstance(page, CallFailed)
    assert (page.kind, page.code) == (CallFailure.UNAVAILABLE, "gateway_page")


async def test_a_cancel_is_repeated_over_hiccups():
    """Asking twice is harmless, so a broken cancel is asked again."""
    clock, server = HandClock(), Server(BROKEN, answer(200, batch(processing_status="canceling")))
    got = await provider(server, clock).cancel(ID)
    assert isinstance(got, BatchSnapshot)
    assert got.status is ProviderStatus.CANCELLING
    assert [request.method for request in server.requests] == ["POST", "POST"]
    assert clock.sleeps == [1.0]


# ---------------------------------------------------------------------------------------------- results


async def test_results_are_fetched_from_the_accounts_own_host(tmp_path):
    """The address is made of the base and the id, whatever ``results_url`` says; the file is whole and private."""
    content = b'{"custom_id":"a","result":{"type":"expired"}}\n'
    server = Server(answer(200, content, {"content-type": "application/x-jsonl"}))
    got = await provider(server).download(RESULTS, tmp_path / "r")
    assert isinstance(got, DownloadedFile)
    assert ((tmp_path / "r").read_bytes(), (tmp_path / "r").stat().st_mode & 0o777) == (content, 0o600)
    assert str(server.requests[0].url) == f"{BATCHES}/msgbatch_1/results"


async def test_a_redirect_to_another_host_is_refused(tmp_path):
    """The key goes to no other origin, not even the request without it; one within the origin is followed."""
    away = Server(answer(307, b"", {"location": "https://evil.example/results"}))
    got = await provider(away).download(RESULTS, tmp_path / "r")
    assert isinstance(got, CallFailed)
    assert (got.kind, got.code) == (CallFailure.PROTOCOL, "bad_redirect")
    assert [request.url.host for request in away.requests] == ["claude.example"]
    home = Server(answer(307, b"", {"location": "/other"}), answer(200, b"x\n"))
    assert isinstance(await provider(home).download(RESULTS, tmp_path / "r"), DownloadedFile)


async def test_results_that_are_not_seen(tmp_path):
    """A 404 on results says nothing final: it is handed up as not found and no file appears."""
    got = await provider(Server(answer(404, error("not_found_error")))).download(RESULTS, tmp_path / "r")
    assert isinstance(got, CallFailed)
    assert got.kind is CallFailure.NOT_FOUND
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        (answer(200, {"id": "msgbatch_1", "type": "message_batch_deleted"}), None),
        (answer(404, error("not_found_error")), None),
        (answer(400, error(message="not ended")), CallFailure.REJECTED),
        (answer(404, b"<html>", {"content-type": "text/html"}), CallFailure.UNAVAILABLE),
    ],
)
async def test_deleting_results_deletes_the_batch(outcome, kind):
    """The batch is deleted with its results; gone counts as deleted, a refusal is told."""
    server = Server(outcome)
    got = await provider(server).delete_file(RESULTS)
    assert (got and got.kind) == kind
    assert (server.requests[0].method, str(server.requests[0].url)) == ("DELETE", f"{BATCHES}/msgbatch_1")


@pytest.mark.parametrize("file_id", ["file-1", "results:", ""])
async def test_an_id_that_is_none_of_ours_is_a_bug(file_id, tmp_path):
    """Only ids that a snapshot had can be fetched or deleted."""
    made = provider(Server(answer(200)))
    with pytest.raises(InvariantBroken):
        await made.download(FileId(file_id), tmp_path / "r")
    with pytest.raises(InvariantBroken):
        await made.delete_file(FileId(file_id))


# ------------------------------------------------------------------------------------------- single calls


async def test_a_single_call():
    """The body goes to the endpoint as it is; the answer is judged, and its headers say how fast to go on."""
    headers = {
        "date": "Sun, 15 Nov 2026 12:00:00 GMT",
        "request-id": "req_7",
        "anthropic-ratelimit-requests-remaining": "9",
        "anthropic-ratelimit-requests-reset": "2026-11-15T12:00:30Z",
        "anthropic-ratelimit-input-tokens-remaining": "5000",
        "anthropic-ratelimit-output-tokens-remaining": "100",
        "anthropic-ratelimit-output-tokens-reset": "2026-11-15T12:01:00Z",
    }
    server = Server(answer(200, message(), headers))
    got = await provider(server).answer(MESSAGES, b'{"a":1}', 10.0)
    assert (got.line.row_class, got.line.provider_request_id, got.failure) == (RowClass.SUCCEEDED, "req_7", None)
    assert (str(server.requests[0].url), server.bodies[0]) == (BASE + MESSAGES, b'{"a":1}')
    hints = got.hints
    assert (hints.calls_left, hints.calls_reset_s, hints.tokens_left, hints.tokens_reset_s) == (9, 30.0, 100, 60.0)


@pytest.mark.parametrize(
    ("outcome", "row_class", "kind"),
    [
        (answer(429, error("rate_limit_error"), {"retry-after": "3"}), RowClass.TRANSIENT, CallFailure.THROTTLED),
        (
            answer(429, error("rate_limit_error", code="enforced_spend_limit_reached")),
            RowClass.ACCOUNT,
            CallFailure.ACCOUNT,
        ),
        (answer(400, error(message="prompt is too long: 9 > 8")), RowClass.TOO_LONG, CallFailure.REJECTED),
        (answer(404, error("not_found_error", "model: x")), RowClass.MODEL_UNAVAILABLE, CallFailure.NOT_FOUND),
        (answer(529, error("overloaded_error")), RowClass.TRANSIENT, CallFailure.UNAVAILABLE),
        (answer(401, error("authentication_error")), RowClass.ACCOUNT, CallFailure.ACCOUNT),
        (answer(413, error("request_too_large")), RowClass.TOO_LONG, CallFailure.REJECTED),
        (answer(413, b"<html>", {"content-type": "text/html"}), RowClass.TOO_LONG, CallFailure.REJECTED),
        (answer(404, b"<html>", {"content-type": "text/html"}), RowClass.TRANSIENT, CallFailure.UNAVAILABLE),
        (BROKEN, RowClass.TRANSIENT, CallFailure.UNANSWERED),
        (httpx.ConnectError("x"), RowClass.TRANSIENT, CallFailure.UNAVAILABLE),
    ],
)
async def test_a_single_call_that_fails(outcome, row_class, kind):
    """What is the row's, the account's and the server's is told apart, and the call is sent once."""
    server = Server(outcome)
    got = await provider(server).answer(MESSAGES, b"{}", 10.0)
    assert got.failure is not None
    assert (got.line.row_class, got.failure.kind, len(server.requests)) == (row_class, kind, 1)


async def test_nothing_secret_is_logged(caplog):
    """Neither key nor prompt nor the provider's words are logged or shown."""
    caplog.set_level(logging.DEBUG, "batchferry")
    got = await create(Server(answer(400, error(message="quoting: my prompt"))))
    assert "prompt" not in repr(got)
    assert not any(word in caplog.text for word in (KEY, "my prompt"))


async def test_the_clock_is_compared():
    """The provider's ``Date`` shows how far its clock is ahead."""
    made = provider(Server(answer(200, batch(), {"date": "Sun, 15 Nov 2026 12:01:00 GMT"})))
    assert made.clock_skew_s is None
    await made.retrieve(ID)
    assert made.clock_skew_s == 60.5
