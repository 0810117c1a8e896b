"""Gemini's native API over the same world: resumable uploads, operations and ``generateContent``, under ``/v1beta``.

Its files and jobs live in projects of their own, so that no other API shows what was made by this one; durations,
outcomes, faults and the bill are shared. A job runs on a translated copy of its lines (``gemini_rows``).

What no source says is played the hard way: a job that is cancelled has no results, like one that has expired, and
nothing of either is on the bill. Files that are gone are refused with 403, as was reported (python-genai issue 1218).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from batchferry.simulator.answers import CHAT
from batchferry.simulator.app import Activity, Download, ServedCall, Surface, Work, json_object, read_body
from batchferry.simulator.errors import Refused
from batchferry.simulator.faults import CallName, FaultPlan
from batchferry.simulator.gemini_rows import (
    chat_of,
    end_of,
    google_error,
    google_of,
    identity_of,
    translate_requests,
    translate_results,
    unknown_model,
)
from batchferry.simulator.jsontext import dump_json
from batchferry.simulator.outcomes import HttpEnd
from batchferry.simulator.scenario import DAY_S, Outcome
from batchferry.simulator.settings import SimulatorSettings
from batchferry.simulator.state import SimBatch, SimFile, Status
from batchferry.simulator.wire import counts_at
from batchferry.simulator.world import CreateRequest, World, derived_file_id

_T = TypeVar("_T")

PROJECT_PREFIX = "gemini:"
VERSION = "v1beta"
FILE_LIFE_S = 2 * DAY_S
EXPIRES_AFTER = "48h"
"""Pending or running for so long, a job expires."""
MAX_PAGE = 100
MAX_UPLOADS = 1_000
"""Uploads that may be under way; the oldest one is forgotten for a further one."""

_COPY_PREFIX = "lines-"
_MAX_CREATE_BYTES = 1024 * 1024
_BATCH_PREFIX, _FILE_PREFIX = "batch_", "file-"
_OUTPUT_PREFIX = "batch-"
_ID_CHARS = 22
_OUTPUT_FILL = "0123456789abcdefghij"
"""Makes names of result files longer than the 40 characters that ``files.get`` takes (js-genai issue 1227)."""
_MAX_FILE_ID_CHARS = 40
_STATES = {
    Status.VALIDATING: "PENDING",
    Status.IN_PROGRESS: "RUNNING",
    Status.FINALIZING: "RUNNING",
    # There is no word for a job that is being cancelled.
    Status.CANCELLING: "RUNNING",
    Status.COMPLETED: "SUCCEEDED",
    Status.FAILED: "FAILED",
    Status.EXPIRED: "EXPIRED",
    Status.CANCELLED: "CANCELLED",
}
_TYPE = "type.googleapis.com/google.ai.generativelanguage.v1main."
_JOB_ERRORS = {
    "model_not_found": "NOT_FOUND",
    "token_limit_exceeded": "RESOURCE_EXHAUSTED",
    "server_error": "INTERNAL",
    "invalid_api_key": "PERMISSION_DENIED",
    "insufficient_quota": "RESOURCE_EXHAUSTED",
}
"""Words for the codes that a scenario gives a failed batch; ``INVALID_ARGUMENT`` for all others."""


class GoogleRefused(Refused):
    """A refusal in Google's own words."""

    def __init__(self, word: str, message: str, details: list[dict[str, Any]] | None = None) -> None:
        body = google_error(word, message, details)
        super().__init__(body["error"]["code"], message)
        self.body = body


@dataclass(slots=True)
class _Upload:
    """An upload under way."""

    project: str
    file_id: str
    display_name: str
    mime_type: str
    announced_bytes: int | None
    received_bytes: int = 0


class GeminiSurface(Surface):
    """The calls of Gemini's API over one ``World``."""

    def __init__(self, settings: SimulatorSettings, world: World, faults: FaultPlan, activity: Activity) -> None:
        super().__init__(settings, world, faults, activity)
        self._uploads: dict[str, _Upload] = {}
        world.rewrite_results(PROJECT_PREFIX, self._rewrite)
        world.subscribe(self._forget_lines)

    def routes(self) -> list[Route]:
        """Every call with its path; those with a colon go before those that would take it for a part of an id."""
        files, batches, models = f"/{VERSION}/files", f"/{VERSION}/batches", f"/{VERSION}/models"
        table: list[tuple[CallName, str, str, Work]] = [
            (CallName.UPLOAD, "POST", f"/upload{files}", self._receive),
            (CallName.CONTENT, "GET", f"/download{files}/{{file_id}}:download", self._show_content),
            (CallName.CONTENT, "GET", f"{files}/{{file_id}}:download", self._show_content),
            (CallName.FILE_LIST, "GET", files, self._show_files),
            (CallName.FILE_RETRIEVE, "GET", f"{files}/{{file_id}}", self._show_file),
            (CallName.DELETE, "DELETE", f"{files}/{{file_id}}", self._drop_file),
            (CallName.CREATE, "POST", f"{models}/{{model}}:batchGenerateContent", self._make_batch),
            (CallName.SYNC, "POST", f"{models}/{{model}}:generateContent", self._generate),
            (CallName.MODELS, "GET", models, self._show_models),
            (CallName.CANCEL, "POST", f"{batches}/{{batch_id}}:cancel", self._cancel_batch),
            (CallName.LIST, "GET", batches, self._show_batches),
            (CallName.RETRIEVE, "GET", f"{batches}/{{batch_id}}", self._show_batch),
            (CallName.DELETE, "DELETE", f"{batches}/{{batch_id}}", self._drop_batch),
        ]
        return [
            Route(path, ServedCall(self, name, work), methods=[method], name=f"gemini:{name}:{path}")
            for name, method, path, work in table
        ]

    # ------------------------------------------------------------------------------- how answers look

    def error_body(self, status: int, error: dict[str, Any]) -> dict[str, Any]:
        """Google's error object."""
        body = google_error(google_of(status).word, str(error["message"]))
        body["error"]["code"] = status
        return body

    def refusal(self, refused: Refused) -> dict[str, Any]:
        """Google's error object; when to come back stands in its details, not in headers."""
        if isinstance(refused, GoogleRefused):
            return refused.body
        body = self.error_body(refused.status, refused.body["error"])
        for name in [name for name in refused.headers if name.startswith("x-ratelimit-")]:
            del refused.headers[name]
        refused.headers.pop("retry-after-ms", None)
        seconds = refused.headers.get("retry-after", "")
        if seconds.isdigit():
            del refused.headers["retry-after"]
            body["error"]["details"] = [_retry_info(seconds)]
        return body

    def project_of(self, request: Request) -> str:
        """The project of the call's key, or of the upload whose address the call has.

        Raises:
            GoogleRefused: 403 without a key, 400 with a wrong one, as Google has it.
        """
        upload = self._uploads.get(request.query_params.get("upload_id", ""))
        if upload is not None:
            return upload.project
        given = request.headers.get("x-goog-api-key") or request.query_params.get("key") or ""
        if not given:
            message = "Method doesn't allow unregistered callers (callers without established identity)."
            raise GoogleRefused("PERMISSION_DENIED", message)
        found = [project for known, project in self._keys if hmac.compare_digest(known, given.encode())]
        if not found:
            info = {
                "@type": "type.googleapis.com/google.rpc.ErrorInfo",
                "reason": "API_KEY_INVALID",
                "domain": "googleapis.com",
                "metadata": {"service": "generativelanguage.googleapis.com"},
            }
            raise GoogleRefused("INVALID_ARGUMENT", "API key not valid. Please pass a valid API key.", [info])
        return PROJECT_PREFIX + found[0]

    def stamp(self, response: Response) -> None:
        """The headers every answer has."""
        super().stamp(response)
        del response.headers["openai-version"]
        del response.headers["x-request-id"]

    # ----------------------------------------------------------------------------------------- files

    async def _receive(self, request: Request, project: str) -> Response:
        """Both steps of a resumable upload."""
        commands = {word.strip().lower() for word in request.headers.get("x-goog-upload-command", "").split(",")}
        upload_id = request.query_params.get("upload_id")
        if upload_id is None:
            if request.headers.get("x-goog-upload-protocol") != "resumable" or commands != {"start"}:
                raise GoogleRefused("INVALID_ARGUMENT", "Only resumable uploads are taken: begin with 'start'.")
            return await self._start(request, project)
        upload = self._uploads.get(upload_id)
        if upload is None:
            raise GoogleRefused("NOT_FOUND", "The upload was not found.")
        if "query" in commands:
            headers = {"x-goog-upload-status": "active", "x-goog-upload-size-received": str(upload.received_bytes)}
            return Response(status_code=200, headers=headers)
        if not commands <= {"upload", "finalize"} or not commands:
            raise GoogleRefused("INVALID_ARGUMENT", "The upload command is not known.")
        await self._take_bytes(request, upload)
        if "finalize" not in commands:
            return Response(status_code=200, headers={"x-goog-upload-status": "active"})
        if upload.announced_bytes is not None and upload.received_bytes != upload.announced_bytes:
            raise GoogleRefused("INVALID_ARGUMENT", "The upload has another size than it said.")
        del self._uploads[upload_id]
        now = self.world.clock.timestamp()
        file = SimFile(
            upload.file_id, project, upload.display_name, "batch", upload.received_bytes, now, now + FILE_LIFE_S
        )
        self.world.state.save_file(file)
        return JSONResponse({"file": self._rendered(file)}, headers={"x-goog-upload-status": "final"})

    async def _start(self, request: Request, project: str) -> Response:
        text = await read_body(request, _MAX_CREATE_BYTES)
        described = json_object(text).get("file") if text else None
        described = described if isinstance(described, dict) else {}
        announced = request.headers.get("x-goog-upload-header-content-length", "")
        if announced.isdigit() and int(announced) > self.world.scenario.limits.any_file_bytes:
            raise GoogleRefused("INVALID_ARGUMENT", "The file is larger than a file may be.")
        upload = _Upload(
            project,
            self.world.new_file_id(),
            str(described.get("displayName") or described.get("display_name") or ""),
            str(described.get("mimeType") or request.headers.get("x-goog-upload-header-content-type") or ""),
            int(announced) if announced.isdigit() else None,
        )
        if len(self._uploads) >= MAX_UPLOADS:
            forgotten = self._uploads.pop(next(iter(self._uploads)))
            self.world.state.file_path(forgotten.file_id).unlink(missing_ok=True)
        upload_id = secrets.token_urlsafe(24)
        self._uploads[upload_id] = upload
        address = request.url.replace(query=f"upload_id={upload_id}&upload_protocol=resumable")
        headers = {
            "x-goog-upload-status": "active",
            "x-goog-upload-url": str(address),
            "x-goog-upload-chunk-granularity": "262144",
        }
        return Response(status_code=200, headers=headers)

    async def _take_bytes(self, request: Request, upload: _Upload) -> None:
        """Append the body to the upload's file.

        Raises:
            GoogleRefused: it does not go on where the last piece ended, or is too large.
        """
        if request.headers.get("x-goog-upload-offset", "0") != str(upload.received_bytes):
            raise GoogleRefused("INVALID_ARGUMENT", "The upload does not go on where it stopped.")
        path = self.world.state.file_path(upload.file_id)
        file = await asyncio.to_thread(path.open, "ab")
        try:
            async for chunk in request.stream():
                upload.received_bytes += len(chunk)
                if upload.received_bytes > self.world.scenario.limits.any_file_bytes:
                    raise GoogleRefused("INVALID_ARGUMENT", "The file is larger than a file may be.")
                await asyncio.to_thread(file.write, chunk)
        finally:
            await asyncio.to_thread(file.close)

    def _file(self, request: Request, project: str) -> SimFile:
        """The file that a call names.

        Raises:
            GoogleRefused: 403, whether it is gone or somebody else's.
        """
        return self._file_named(project, request.path_params["file_id"])

    def _file_named(self, project: str, name: str) -> SimFile:
        shown = name.removeprefix("files/")
        file_id = shown.removeprefix(_OUTPUT_PREFIX)[:_ID_CHARS] if shown.startswith(_OUTPUT_PREFIX) else shown
        try:
            return self.world.file(project, _FILE_PREFIX + file_id)
        except Refused:
            message = f"You do not have permission to access the File {shown} or it may not exist."
            raise GoogleRefused("PERMISSION_DENIED", message) from None

    def _rendered(self, file: SimFile) -> dict[str, Any]:
        shown = {
            "name": _file_name(file),
            "displayName": file.filename,
            "mimeType": "application/jsonl",
            "sizeBytes": str(file.size_bytes),
            "createTime": _instant(file.created_at),
            "updateTime": _instant(file.created_at),
            "uri": f"https://generativelanguage.googleapis.com/{VERSION}/{_file_name(file)}",
            "state": "PROCESSING" if self._is_processing(file) else "ACTIVE",
            "source": "UPLOADED",
        }
        if file.expires_at is not None:
            shown["expirationTime"] = _instant(file.expires_at)
        if file.purpose == "batch_output":
            shown["source"] = "GENERATED"
            shown["downloadUri"] = f"{shown['uri']}:download?alt=media"
        return shown

    def _is_processing(self, file: SimFile) -> bool:
        return self.world.clock.timestamp() < file.created_at + self.world.scenario.file_processing_s

    async def _show_files(self, request: Request, project: str) -> Response:
        await self.world.settle_patiently()
        files = [file for file in reversed(self.world.list_files(project)) if not file.id.startswith(_COPY_PREFIX)]
        page, token = _page(files, [file.id for file in files], request)
        return JSONResponse(({"files": [self._rendered(file) for file in page]} if page else {}) | token)

    async def _show_file(self, request: Request, project: str) -> Response:
        if len(request.path_params["file_id"]) > _MAX_FILE_ID_CHARS:
            message = f"* GetFileRequest.name: name must be at most {_MAX_FILE_ID_CHARS} characters\n"
            raise GoogleRefused("INVALID_ARGUMENT", message)
        await self.world.settle_patiently()
        return JSONResponse(self._rendered(self._file(request, project)))

    async def _show_content(self, request: Request, project: str) -> Response:
        await self.world.settle_patiently()
        file = self._file(request, project)
        if file.purpose != "batch_output":
            raise GoogleRefused("INVALID_ARGUMENT", "Only generated files can be downloaded.")
        return Download(self.world.state.file_path(file.id), media_type="application/octet-stream")

    async def _drop_file(self, request: Request, project: str) -> Response:
        await self.world.settle_patiently()
        self.world.delete_file(project, self._file(request, project).id)
        return JSONResponse({})

    # --------------------------------------------------------------------------------------- batches

    async def _make_batch(self, request: Request, project: str) -> Response:
        world, model = self.world, request.path_params["model"]
        batch = json_object(await read_body(request, _MAX_CREATE_BYTES)).get("batch")
        batch = batch if isinstance(batch, dict) else {}
        name, config = batch.get("displayName"), batch.get("inputConfig")
        if not isinstance(name, str) or not name:
            raise GoogleRefused("INVALID_ARGUMENT", "* BatchGenerateContentRequest.batch.display_name: is required\n")
        file_name = config.get("fileName") if isinstance(config, dict) else None
        if not isinstance(file_name, str):
            raise GoogleRefused("INVALID_ARGUMENT", "This simulator takes input files, no inlined requests.")
        if not world.scenario.allows_model(model):
            raise GoogleRefused("NOT_FOUND", unknown_model(model).replace("generateContent", "batchGenerateContent"))
        file = self._file_named(project, file_name)
        if self._is_processing(file) or file.refused_creates < world.scenario.create_gap:
            file.refused_creates += not self._is_processing(file)
            raise GoogleRefused("FAILED_PRECONDITION", f"File {file_name} is not in an ACTIVE state.")
        made = await self._run(project, file, model, name)
        return JSONResponse(self._operation(made))

    async def _run(self, project: str, file: SimFile, model: str, name: str) -> SimBatch:
        """Make the job, on a translated copy of its lines that only the simulator sees."""
        world, state = self.world, self.world.state
        copy_id = f"{_COPY_PREFIX}{secrets.token_hex(11)}"
        source, target = state.file_path(file.id), state.file_path(copy_id)
        await asyncio.to_thread(translate_requests, source, target, model, world.scenario.limits.line_bytes)
        now = world.clock.timestamp()
        copy = SimFile(copy_id, project, "lines.jsonl", "batch", target.stat().st_size, now, now + 3 * DAY_S)
        copy.refused_creates = world.scenario.create_gap
        state.save_file(copy)
        wanted = CreateRequest(copy_id, CHAT, EXPIRES_AFTER, {"displayName": name}, FILE_LIFE_S)
        try:
            made = world.create(project, wanted)
        except Refused:
            self._drop_copy(copy_id)
            target.unlink(missing_ok=True)
            raise
        made.extra = {"model": model, "file": file.id}
        made.loses_rows = True
        state.save_batch(made)
        return made

    def _drop_copy(self, file_id: str) -> None:
        copy = self.world.state.files.get(file_id)
        if copy is not None and copy.deleted_at is None:
            copy.deleted_at = self.world.clock.timestamp()
            self.world.state.save_file(copy)

    def _forget_lines(self, batch: SimBatch) -> None:
        """The copy goes when its job has ended."""
        if batch.status.is_terminal and batch.input_file_id.startswith(_COPY_PREFIX):
            self._drop_copy(batch.input_file_id)

    def _rewrite(self, batch: SimBatch, path: Path) -> None:
        """Both result files become one of Gemini's, when the first of them is shown."""
        if path.name != derived_file_id(batch.id, "output"):
            return
        error = path.with_name(derived_file_id(batch.id, "error"))
        scenario = self.world.scenario
        # Requests and results have one order, as is documented, unless a scenario says in so many words that not.
        is_shuffled = scenario.shuffle_output and "shuffle_output" in scenario.model_fields_set
        blocked = translate_results(path, error, str(batch.extra["model"]), in_order=not is_shuffled)
        batch.extra = batch.extra | {"blocked": blocked}

    def _operation(self, batch: SimBatch) -> dict[str, Any]:
        """A job as an operation, without the members that have their default value."""
        now, name = self.world.clock.timestamp(), job_name(batch)
        ended = batch.ended_at if batch.status.is_terminal else None
        source = self.world.state.files.get(str(batch.extra.get("file")))
        stats, blocked = counts_at(batch, now), int(batch.extra.get("blocked", 0))
        counts = {
            "requestCount": stats["total"],
            "successfulRequestCount": stats["completed"] + blocked,
            "failedRequestCount": stats["failed"] - blocked,
            "pendingRequestCount": 0 if ended else stats["total"] - stats["completed"] - stats["failed"],
        }
        about: dict[str, Any] = {
            "@type": f"{_TYPE}GenerateContentBatch",
            "model": f"models/{batch.extra.get('model')}",
            "displayName": (batch.metadata or {}).get("displayName", ""),
            "createTime": _instant(batch.created_at),
            "updateTime": _instant(ended or batch.finalizing_at or batch.in_progress_at or batch.created_at),
            "batchStats": {member: str(count) for member, count in counts.items() if count},
            "state": f"BATCH_STATE_{_STATES[batch.status]}",
            "name": name,
        }
        if source is not None:
            about["inputConfig"] = {"fileName": _file_name(source)}
        shown: dict[str, Any] = {"name": name, "metadata": about}
        if ended is None:
            return shown
        about["endTime"] = _instant(ended)
        shown["done"] = True
        match batch.status:
            case Status.COMPLETED:
                output = {"@type": f"{_TYPE}GenerateContentBatchOutput"}
                if batch.output_file_id is not None and now >= ended + self.world.scenario.late_file_ids_s:
                    output["responsesFile"] = _output_name(batch.output_file_id)
                about["output"] = {member: value for member, value in output.items() if member != "@type"}
                shown["response"] = output
            case Status.CANCELLED:
                shown["error"] = {"code": 1, "message": "The operation was cancelled."}
            case Status.EXPIRED:
                shown["error"] = {"code": 4, "message": "The batch was not finished in time."}
            case _:
                shown["error"] = job_error(batch)
        return shown

    def _batch(self, request: Request, project: str) -> SimBatch:
        """The job that a call names.

        Raises:
            GoogleRefused: 404.
        """
        try:
            batch = self.world.batch(project, _BATCH_PREFIX + request.path_params["batch_id"])
        except Refused:
            batch = None
        if batch is None or batch.extra.get("is_deleted"):
            raise GoogleRefused("NOT_FOUND", "Requested entity was not found.")
        return batch

    async def _show_batch(self, request: Request, project: str) -> Response:
        await self.world.settle_patiently()
        return JSONResponse(self._operation(self._batch(request, project)))

    async def _show_batches(self, request: Request, project: str) -> Response:
        await self.world.settle_patiently()
        batches = [batch for batch in self.world.list_batches(project) if not batch.extra.get("is_deleted")]
        page, token = _page(batches, [batch.id for batch in batches], request)
        return JSONResponse(({"operations": [self._operation(batch) for batch in page]} if page else {}) | token)

    async def _cancel_batch(self, request: Request, project: str) -> Response:
        batch = self._batch(request, project)
        try:
            await self.world.cancel(project, batch.id)
        except Refused:
            message = f"Batch is in state BATCH_STATE_{_STATES[batch.status]} and cannot be cancelled."
            raise GoogleRefused("FAILED_PRECONDITION", message) from None
        return JSONResponse({})

    async def _drop_batch(self, request: Request, project: str) -> Response:
        """A deleted job is not shown any more; it is not cancelled by that."""
        await self.world.settle_patiently()
        batch = self._batch(request, project)
        batch.extra = batch.extra | {"is_deleted": True}
        self.world.state.save_batch(batch)
        return JSONResponse({})

    # ------------------------------------------------------------------------------------ the others

    async def _show_models(self, request: Request, project: str) -> Response:
        del request, project
        names = self.world.scenario.batch_models or ("gemini-2.5-flash", "gemini-2.5-flash-lite", "gemini-2.5-pro")
        methods = ["generateContent", "batchGenerateContent"]
        return JSONResponse(
            {"models": [{"name": f"models/{name}", "supportedGenerationMethods": methods} for name in names]}
        )

    async def _generate(self, request: Request, project: str) -> Response | None:
        world, model = self.world, request.path_params["model"]
        with world.sync_gate.entered():
            native = json_object(await read_body(request, world.scenario.limits.sync_body_bytes))
            chat = chat_of(native, model)
            world.admit_sync(project, CHAT, chat)
            client_id = request.headers.get("x-client-request-id", "")
            result = world.answer_now(CHAT, chat, client_id, identity_of(native, model))
            await world.take_time()
        if result.end is None or result.end.status == 0:
            return None
        return _shown_end(result.end, result.outcome, model)


def job_name(batch: SimBatch) -> str:
    """A job's name as this API has it."""
    return f"batches/{batch.id.removeprefix(_BATCH_PREFIX)}"


def output_uri(batch: SimBatch) -> str | None:
    """Where a job's results are, once it has any."""
    return None if batch.output_file_id is None else _output_name(batch.output_file_id)


def _shown_end(end: HttpEnd, outcome: Outcome, model: str) -> Response:
    """The answer of a single call."""
    shown = end_of(end.status, end.body, model)
    if shown.error is not None:
        assert shown.google is not None
        hint = end.headers.get("retry-after")
        error = {**shown.error, "code": end.status}
        if hint is not None:
            error["details"] = [_retry_info(hint)]
        return JSONResponse({"error": error}, end.status)
    content = dump_json(shown.response)
    if outcome is Outcome.EMPTY_BODY:
        content = b""
    elif outcome is Outcome.UNREADABLE:
        content = content[: len(content) * 3 // 5]
    elif outcome is Outcome.INVALID_UTF8:
        content = content.replace(b'"text":"', b'"text":"\xff', 1)
    return Response(content, 200, media_type="application/json")


def _retry_info(seconds: str) -> dict[str, Any]:
    return {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": f"{seconds}s"}


def job_error(batch: SimBatch) -> dict[str, Any]:
    """Why a job as a whole failed: one status, whatever number of lines was at fault."""
    first: dict[str, Any] = batch.errors[0] if batch.errors else {}
    code, message = first.get("code"), str(first.get("message") or "The batch failed.")
    word = _JOB_ERRORS.get(str(code), "INVALID_ARGUMENT")
    if code == "model_not_found":
        message = unknown_model(str(batch.extra.get("model")))
    return {"code": _GRPC[word], "message": message}


_GRPC = {"INVALID_ARGUMENT": 3, "NOT_FOUND": 5, "PERMISSION_DENIED": 7, "RESOURCE_EXHAUSTED": 8, "INTERNAL": 13}


def _file_name(file: SimFile) -> str:
    if file.purpose == "batch_output":
        return _output_name(file.id)
    return f"files/{file.id.removeprefix(_FILE_PREFIX)}"


def _output_name(file_id: str) -> str:
    return f"files/{_OUTPUT_PREFIX}{file_id.removeprefix(_FILE_PREFIX)}{_OUTPUT_FILL}"


def _instant(at: float) -> str:
    """RFC 3339 with the nine digits that Google's servers write."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z")


def _page(items: list[_T], ids: list[str], request: Request) -> tuple[list[_T], dict[str, str]]:
    """The page that a list call asks for, and the token of the next one, if there is any.

    Raises:
        GoogleRefused: the size is no number, or the token none of ours.
    """
    query = request.query_params
    size_text, token = query.get("pageSize", "50"), query.get("pageToken", "")
    if not size_text.isdigit():
        raise GoogleRefused("INVALID_ARGUMENT", "page_size must be a number.")
    size, start = min(int(size_text[:9]) or 50, MAX_PAGE), 0
    if token:
        try:
            start = ids.index(base64.urlsafe_b64decode(token.encode()).decode()) + 1
        except (ValueError, binascii.Error):
            raise GoogleRefused("INVALID_ARGUMENT", "page_token is not valid.") from None
    page = items[start : start + size]
    has_more = start + size < len(items)
    last = base64.urlsafe_b64encode(ids[start + len(page) - 1].encode()).decode() if has_more else ""
    return page, {"nextPageToken": last} if has_more else {}
