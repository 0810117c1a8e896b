"""Azure OpenAI through its two profiles, against a server that has its ways: paths, key, objects, codes, files."""

from __future__ import annotations

import json
from random import Random

import httpx
import pytest
from openai_kit import CHAT, BytesSource, HandClock

from batchferry.domain.batcherrors import BatchErrorKind
from batchferry.domain.provider import (
    BatchSnapshot,
    CallFailed,
    CallFailure,
    DownloadedFile,
    LineError,
    ProviderStatus,
    UploadedFile,
)
from batchferry.domain.rows import ResultLine, RowClass, RowFlag
from batchferry.providers.openai import OpenAIProvider
from batchferry.providers.retries import CallRetries
from profile_kit import account_of

KEY = "azure-secret"
HOST = "https://res.openai.azure.com"
FILTERED_ROW = {
    "id": "x-1",
    "custom_id": "a-1",
    "response": {
        "status_code": 400,
        "request_id": "r-1",
        "body": {
            "error": {
                "message": "The response was filtered",
                "type": None,
                "param": "prompt",
                "code": "content_filter",
                "status": 400,
                "innererror": {
                    "code": "ResponsibleAIPolicyViolation",
                    "content_filter_result": {"hate": {"filtered": True, "severity": "high"}},
                },
            }
        },
    },
    "error": None,
}


class Azure:
    """One resource that knows a version's paths and its key, and whose batch goes on as scripted."""

    def __init__(self, root: str, version: str | None) -> None:
        self.root = root
        self.version = version
        self.seen: list[httpx.Request] = []
        self.bodies: list[bytes] = []
        self.batch: dict[str, object] = {}
        self.contents: dict[str, bytes] = {}

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request)
        body = await request.aread()
        self.bodies.append(body)
        if request.headers.get("api-key") != KEY or "authorization" in request.headers:
            return self.refused(401, "401", "Access denied due to invalid subscription key or wrong API endpoint.")
        path, version = request.url.path, request.url.params.get("api-version")
        if not path.startswith(self.root) or version != self.version:
            return self.refused(404, "404", "Resource not found")
        match request.method, path.removeprefix(self.root).split("/")[1:]:
            case "POST", ["files"]:
                if b"expires_after" in body and b"\r\n\r\n1209600\r\n" not in body:
                    return self.refused(400, "invalidPayload", "expires_after is out of range")
                return httpx.Response(
                    201, json={"id": "file-in", "object": "file", "bytes": 20, "purpose": "batch", "status": "pending"}
                )
            case "POST", ["batches"]:
                self.batch = {"id": "batch_az", **self.made(json.loads(body))}
                return httpx.Response(200, json=self.batch)
            case "GET", ["batches", "batch_az"]:
                return httpx.Response(200, json=self.batch)
            case "POST", ["batches", "batch_az", "cancel"]:
                return httpx.Response(200, json=self.batch | {"status": "cancelling"})
            case "GET", ["batches"]:
                return httpx.Response(200, json={"data": [self.batch], "has_more": False})
            case "GET", ["files", file_id, "content"]:
                return httpx.Response(200, content=self.contents[file_id])
            case "DELETE", ["files", _]:
                return httpx.Response(204)
            case "POST", [*_, "chat", "completions"]:
                model = json.loads(body)["model"]
                choice = {"message": {"content": "hello"}, "finish_reason": "stop"}
                return httpx.Response(200, json={"model": model, "choices": [choice]})
        return self.refused(404, "404", "Resource not found")

    def made(self, wanted: dict[str, object]) -> dict[str, object]:
        """A batch object of the current version, or of an older one with its oddities."""
        if self.version is None:
            return {"object": "batch", "status": "validating", "created_at": 1790000000, "errors": None, **wanted}
        return {
            "object": "batch",
            "status": "Validating",
            "created_at": "2026-11-15T12:00:00.123Z",
            "request_counts": {"total": None, "completed": None, "failed": None},
            "errors": None,
            **wanted,
        }

    @staticmethod
    def refused(status: int, code: str, message: str) -> httpx.Response:
        return httpx.Response(
            status, json={"error": {"code": code, "message": message}}, headers={"apim-request-id": "apim-1"}
        )


def v1() -> Azure:
    """A resource under the current addresses."""
    return Azure("/openai/v1", None)


def legacy() -> Azure:
    """A resource under the dated addresses."""
    return Azure("/openai", "2024-10-21")


def ferry(azure: Azure, **given: object) -> OpenAIProvider:
    """The adapter by the profile that fits the resource."""
    name = "azure" if azure.version is None else "azure-legacy"
    settings = {"base_url": HOST + azure.root, "api_key": KEY, **given}
    account = account_of(name, settings=settings, retries=CallRetries(jitter=0.0))
    return OpenAIProvider(account, HandClock(), httpx.MockTransport(azure), Random(1))


@pytest.mark.parametrize("azure", [v1(), legacy()], ids=["v1", "legacy"])
async def test_the_whole_way_of_a_batch(azure, tmp_path):
    """Upload, create, look, list, cancel, fetch and delete under both kinds of addresses, with the key in api-key."""
    made = ferry(azure)
    file = await made.upload(BytesSource(b'{"custom_id":"a-1"}\n'), "b.jsonl", 1_209_600)
    assert isinstance(file, UploadedFile)
    created = await made.create(file.file_id, CHAT, "", {"batch_id": "b-1"}, model="my-deployment")
    assert isinstance(created, BatchSnapshot)
    assert (created.status, created.input_file_id) == (ProviderStatus.VALIDATING, "file-in")
    assert created.created_at is not None
    assert created.metadata == {"batch_id": "b-1"}
    assert created.counts.total == 0
    looked = await made.retrieve(created.provider_batch_id)
    listed = await made.list_batches()
    assert [one.provider_batch_id for one in listed.batches] == [looked.provider_batch_id]
    assert (await made.cancel(created.provider_batch_id)).status is ProviderStatus.CANCELLING
    azure.contents["file-out"] = b'{"custom_id":"a-1"}\n'
    assert isinstance(await made.download("file-out", tmp_path / "o"), DownloadedFile)
    assert await made.delete_file("file-out") is None
    assert all(request.url.host == "res.openai.azure.com" for request in azure.seen)


async def test_the_endpoint_has_the_versions_name():
    """The dated versions name /chat/completions in lines and job, the current ones keep OpenAI's name."""
    old, new = legacy(), v1()
    for azure, name in ((old, "/chat/completions"), (new, "/v1/chat/completions")):
        made = ferry(azure)
        await made.create("file-in", CHAT, "", {})
        assert json.loads(azure.bodies[0])["endpoint"] == name
        assert f'"url":"{name}"'.encode() in made.render_line(CHAT, b"{}")


async def test_a_short_life_is_raised_to_what_a_resource_takes():
    """A resource takes 14 to 30 days: an hour is sent as 14 days, and the dated versions get none."""
    new, old = v1(), legacy()
    assert isinstance(await ferry(new).upload(BytesSource(b"x" * 20), "b.jsonl", 3600), UploadedFile)
    assert isinstance(await ferry(old).upload(BytesSource(b"x" * 20), "b.jsonl", 3600), UploadedFile)
    assert b"expires_after" not in old.bodies[0]


async def test_result_files_get_an_end_that_counts():
    """A resource holds 10,000 files only while each of them ends by itself: results are given 14 days, too."""
    new, old = v1(), legacy()
    for azure in (new, old):
        await ferry(azure).create("file-in", CHAT, "", {})
    assert json.loads(new.bodies[0])["output_expires_after"] == {"anchor": "created_at", "seconds": 1_209_600}
    assert "output_expires_after" not in json.loads(old.bodies[0])


async def test_a_wrong_version_or_key_blames_no_batch():
    """A wrong version is not found, a wrong key is the account's; both name the gateway's id of the call."""
    azure = legacy()
    wrong = await ferry(azure, query={"api-version": "1999-01-01"}).retrieve("batch_az")
    assert isinstance(wrong, CallFailed)
    assert (wrong.kind, wrong.request_id) == (CallFailure.NOT_FOUND, "apim-1")
    locked = await ferry(azure, api_key="other").create("file-in", CHAT, "", {})
    assert isinstance(locked, CallFailed)
    assert (locked.kind, locked.is_definite) == (CallFailure.ACCOUNT, True)


async def test_an_upload_in_a_region_without_batches_is_refused():
    """A purpose that the region does not know is a refusal that would come again."""
    azure = v1()
    account = ferry(azure, dialect={"min_file_expiry_s": 2_592_000})
    got = await account.upload(BytesSource(b"x"), "b.jsonl", 3600)
    assert isinstance(got, CallFailed)
    assert (got.kind, got.code) == (CallFailure.REJECTED, "invalidPayload")


async def test_a_file_not_processed_yet_is_not_ready():
    """A create that comes before the file is processed may be tried again soon, and made nothing."""
    refusal = Azure.refused(400, "invalidPayload", "The file file-in is not yet processed.")
    account = account_of("azure", settings={"base_url": f"{HOST}/openai/v1"})
    made = OpenAIProvider(account, HandClock(), httpx.MockTransport(lambda _: refusal))
    got = await made.create("file-in", CHAT, "", {})
    assert isinstance(got, CallFailed)
    assert (got.kind, got.is_definite) == (CallFailure.NOT_READY, True)


@pytest.mark.parametrize(
    ("code", "line", "kind"),
    [
        ("invalid_json_line", 3, BatchErrorKind.ROW),
        ("url_mismatch", 2, BatchErrorKind.ROW),
        ("model_mismatch", 2, BatchErrorKind.ROW),
        ("duplicate_custom_id", 4, BatchErrorKind.ROW),
        ("invalid_request", 4, BatchErrorKind.ROW),
        ("model_not_found", 1, BatchErrorKind.MODEL),
        ("DeploymentNotFound", None, BatchErrorKind.MODEL),
        ("token_limit_exceeded", None, BatchErrorKind.TOKEN_LIMIT),
        ("too_many_tasks", None, BatchErrorKind.TOO_LARGE),
        ("empty_batch", None, BatchErrorKind.UNKNOWN),
        ("empty_file", None, BatchErrorKind.UNKNOWN),
        ("input_modified", None, BatchErrorKind.FILE_MISSING),
        ("input_no_permissions", None, BatchErrorKind.FILE_MISSING),
    ],
)
async def test_a_refused_batch_in_azures_words(code, line, kind):
    """Its codes blame the row, the model, the quota or the file as OpenAI's do."""
    azure = v1()
    made = ferry(azure)
    await made.create("file-in", CHAT, "", {})
    azure.batch |= {
        "status": "failed",
        "completed_at": 1790000200,
        "failed_at": 1790000100,
        "errors": {"object": "list", "data": [{"code": code, "message": "m", "param": None, "line": line}]},
    }
    failed = await made.retrieve("batch_az")
    assert isinstance(failed, BatchSnapshot)
    assert failed.status is ProviderStatus.FAILED
    assert failed.ended_at is not None
    assert failed.ended_at.timestamp() == 1790000100
    assert [made.classify_batch_error(error) for error in failed.errors] == [kind]
    assert failed.errors == (LineError(code, "m", None, line),)


@pytest.mark.parametrize(
    ("word", "status"),
    [
        ("Validating", ProviderStatus.VALIDATING),
        ("InProgress", ProviderStatus.UNKNOWN),
        ("In_Progress", ProviderStatus.IN_PROGRESS),
        ("Finalizing", ProviderStatus.FINALIZING),
        ("Completed", ProviderStatus.COMPLETED),
        ("Cancelling", ProviderStatus.CANCELLING),
        ("Cancelled", ProviderStatus.CANCELLED),
        ("Expired", ProviderStatus.EXPIRED),
        ("Failed", ProviderStatus.FAILED),
    ],
)
async def test_status_words_with_capitals(word, status):
    """The older versions' capitals mean the same; what they never said stays unknown and is polled on."""
    azure = legacy()
    made = ferry(azure)
    await made.create("file-in", CHAT, "", {})
    azure.batch["status"] = word
    assert (await made.retrieve("batch_az")).status is status


async def test_a_job_past_its_window_is_still_running():
    """A job that runs past its expires_at is neither ended nor unknown, so that the window's grace can judge it."""
    azure = v1()
    made = ferry(azure)
    await made.create("file-in", CHAT, "", {})
    azure.batch |= {"status": "in_progress", "expires_at": 1700000000}
    late = await made.retrieve("batch_az")
    assert (late.status, late.status.is_terminal) == (ProviderStatus.IN_PROGRESS, False)
    assert late.expires_at is not None
    assert late.expires_at.timestamp() == 1700000000


async def test_an_error_file_of_no_bytes_is_a_whole_file(tmp_path):
    """A job without failed rows names an error file of 0 bytes: fetched, kept, and without a line."""
    azure = v1()
    azure.contents["file-err"] = b""
    made = ferry(azure)
    await made.create("file-in", CHAT, "", {})
    azure.batch |= {"status": "completed", "output_file_id": "file-out", "error_file_id": "file-err"}
    done = await made.retrieve("batch_az")
    saved = await made.download(done.error_file_id, tmp_path / "e")
    assert isinstance(saved, DownloadedFile)
    assert (saved.size_bytes, (tmp_path / "e").read_bytes()) == (0, b"")


def row_of(value: object) -> ResultLine:
    """The verdict about one result line."""
    line = ferry(v1()).parse_line(json.dumps(value).encode(), CHAT)
    assert isinstance(line, ResultLine)
    return line


def test_a_filtered_prompt_is_a_filtered_row():
    """A 400 with content_filter blames the prompt, not the request's form."""
    line = row_of(FILTERED_ROW)
    assert (line.row_class, line.code, line.is_unknown) == (RowClass.CONTENT_FILTERED, "content_filter", False)


@pytest.mark.parametrize("outer", [None, "400", 400])
def test_the_filter_may_name_itself_inside_only(outer):
    """Where the outer code is missing or the bare status, the inner one tells that it was the filter."""
    value = json.loads(json.dumps(FILTERED_ROW))
    value["response"]["body"]["error"]["code"] = outer
    assert row_of(value).row_class is RowClass.CONTENT_FILTERED


def test_a_filtered_answer_and_azures_further_members():
    """An answer that the filter stopped is flagged; its further members do not disturb a good one."""
    body = {
        "model": "gpt-4o-2024-11-20",
        "prompt_filter_results": [{"prompt_index": 0, "content_filter_results": {}}],
        "choices": [
            {
                "message": {"content": "half a"},
                "finish_reason": "content_filter",
                "content_filter_results": {"violence": {"filtered": True, "severity": "medium"}},
            }
        ],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
    }
    value = {"custom_id": "a-1", "response": {"status_code": 200, "request_id": "r", "body": body}, "error": None}
    stopped = row_of(value)
    assert stopped.row_class is RowClass.SUCCEEDED
    assert RowFlag.FILTERED in stopped.flags
    body["choices"][0] |= {"finish_reason": "stop", "content_filter_results": {"violence": {"filtered": False}}}
    good = row_of(value)
    assert (good.row_class, good.flags, good.model) == (RowClass.SUCCEEDED, (), "gpt-4o-2024-11-20")


@pytest.mark.parametrize(
    ("azure", "path"),
    [
        (legacy(), "/openai/deployments/my%20standard/chat/completions"),
        (v1(), "/openai/v1/chat/completions"),
    ],
    ids=["legacy", "v1"],
)
async def test_single_calls_go_to_a_standard_deployment(azure, path):
    """The lane's deployment stands in the body, and in a dated version's address; other models stay as they are."""
    made = ferry(azure, dialect={"sync_models": {"my-batch": "my standard"}})
    got = await made.answer(CHAT, b'{"model":"my-batch","messages":[],"seed":1.0}', 10.0)
    assert (got.line.row_class, got.line.model) == (RowClass.SUCCEEDED, "my standard")
    assert azure.seen[0].url.raw_path.decode().partition("?")[0] == path
    assert azure.bodies[0] == b'{"model":"my standard","messages":[],"seed":1.0}'
    other = b'{ "model": "other" , "messages":[]}'
    await made.answer(CHAT, other, 10.0)
    assert azure.bodies[1] == other


async def test_the_lane_may_have_an_address_of_its_own():
    """Single calls go to the lane's own root, with the same key and query."""
    azure = legacy()
    made = ferry(azure, dialect={"sync_base_url": f"{HOST}/openai/other/", "deployment_paths": False})
    await made.answer(CHAT, b'{"model":"m"}', 10.0)
    assert str(azure.seen[0].url) == f"{HOST}/openai/other/chat/completions?api-version=2024-10-21"
    assert azure.seen[0].headers["api-key"] == KEY


def test_the_key_does_not_show():
    """Neither the account nor its adapter shows the key when printed."""
    assert KEY not in repr(ferry(v1()).account)
