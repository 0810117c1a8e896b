"""Mistral's API over the same world: files, batch jobs and synchronous calls, under ``/mistral/v1``.

Its files and jobs live in projects of their own, so that neither API shows what was made by the other; durations,
outcomes, faults and the bill are shared. A job runs on a copy of its lines that has what the simulator needs beside
Mistral's members; a ``model`` in a row's body gives way to the job's.
"""

from __future__ import annotations

import asyncio
import secrets
from datetime import datetime
from pathlib import Path
from typing import Any

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from batchferry.simulator.answers import CHAT, EMBEDDINGS, MODERATIONS
from batchferry.simulator.app import Activity, Download, ServedCall, Surface, Work, json_object, read_body
from batchferry.simulator.errors import Refused
from batchferry.simulator.faults import CallName, FaultPlan
from batchferry.simulator.jsontext import dump_json, parse_json
from batchferry.simulator.mistralwire import (
    INPUT_PREFIX,
    Invalid,
    own_file_id,
    own_job_id,
    render_file,
    render_job,
    rewrite_results,
    sample_type,
    show_answer,
    show_error,
    shown_file_id,
    shown_job_id,
    write_lines,
)
from batchferry.simulator.settings import SimulatorSettings
from batchferry.simulator.state import SimBatch, SimFile
from batchferry.simulator.upload import receive_upload
from batchferry.simulator.world import BATCH_FILE_LIFE_S, CreateRequest, World

PREFIX = "/mistral"
"""Path in front of the API, since the other APIs have calls of the same names."""
PROJECT_PREFIX = "mistral:"
ENDPOINTS = (CHAT, EMBEDDINGS, MODERATIONS)
"""Endpoints that are answered, alone and in jobs."""
JOB_ENDPOINTS = (
    *ENDPOINTS,
    "/v1/fim/completions",
    "/v1/chat/moderations",
    "/v1/ocr",
    "/v1/classifications",
    "/v1/chat/classifications",
    "/v1/conversations",
    "/v1/audio/transcriptions",
)
"""What the create call takes; jobs for endpoints that are not answered here fail with a clear message."""
UPLOAD_PURPOSES = ("fine-tune", "batch", "ocr")
MAX_TIMEOUT_HOURS = 168
MAX_INLINE_REQUESTS = 10_000

_MAX_CREATE_BYTES = 64 * 1024 * 1024
_MAX_PAGE = 1_000


class MistralSurface(Surface):
    """The calls of Mistral's API over one ``World``."""

    def __init__(self, settings: SimulatorSettings, world: World, faults: FaultPlan, activity: Activity) -> None:
        super().__init__(settings, world, faults, activity)
        world.rewrite_results(PROJECT_PREFIX, rewrite_results)
        world.subscribe(self._forget_lines)

    def routes(self) -> list[Route]:
        """Every call with its path."""
        job = "/v1/batch/jobs/{job_id}"
        table: list[tuple[CallName, str, str, Work]] = [
            (CallName.UPLOAD, "POST", "/v1/files", self._take_file),
            (CallName.FILE_LIST, "GET", "/v1/files", self._show_files),
            (CallName.FILE_RETRIEVE, "GET", "/v1/files/{file_id}", self._show_file),
            (CallName.CONTENT, "GET", "/v1/files/{file_id}/content", self._show_content),
            (CallName.DELETE, "DELETE", "/v1/files/{file_id}", self._drop_file),
            (CallName.CREATE, "POST", "/v1/batch/jobs", self._make_job),
            (CallName.LIST, "GET", "/v1/batch/jobs", self._show_jobs),
            (CallName.RETRIEVE, "GET", job, self._show_job),
            (CallName.CANCEL, "POST", f"{job}/cancel", self._cancel_job),
            (CallName.DELETE, "DELETE", job, self._drop_job),
            (CallName.MODELS, "GET", "/v1/models", self._show_models),
            *((CallName.SYNC, "POST", endpoint, self._run) for endpoint in ENDPOINTS),
        ]
        return [
            Route(f"{PREFIX}{path}", ServedCall(self, name, work), methods=[method], name=f"mistral:{name}:{path}")
            for name, method, path, work in table
        ]

    # ------------------------------------------------------------------------------- how answers look

    def error_body(self, status: int, error: dict[str, Any]) -> dict[str, Any]:
        """Mistral's flat error."""
        return show_error(status, error).body

    def refusal(self, refused: Refused) -> dict[str, Any]:
        """A flat error, or what is wrong with a body."""
        return {"detail": refused.detail} if isinstance(refused, Invalid) else super().refusal(refused)

    def sync_answer(self, endpoint: str, status: int, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """A synchronous answer in Mistral's shape."""
        return show_answer(endpoint, status, body)

    def project_of(self, request: Request) -> str:
        """The project of the call's API key.

        Raises:
            Refused: 401.
        """
        return PROJECT_PREFIX + super().project_of(request)

    def stamp(self, response: Response) -> None:
        """The headers every answer has."""
        super().stamp(response)
        del response.headers["openai-version"]
        response.headers["mistral-correlation-id"] = secrets.token_hex(16)

    # ----------------------------------------------------------------------------------------- files

    async def _take_file(self, request: Request, project: str) -> Response:
        world = self.world
        file_id = world.new_file_id()
        upload = await receive_upload(
            request.headers.get("content-type", ""),
            request.stream(),
            world.state.file_path(file_id),
            world.scenario.limits.any_file_bytes,
        )
        purpose = upload.fields.get("purpose", "fine-tune")
        if upload.filename is None or purpose not in UPLOAD_PURPOSES:
            world.state.file_path(file_id).unlink(missing_ok=True)
            if upload.filename is None:
                raise Invalid(["file"], "missing", "Field required")
            raise Invalid(["purpose"], "enum", "Input should be one of the file purposes")
        file = await world.add_file(project, file_id, upload.filename, purpose, upload.size_bytes, None)
        return JSONResponse(render_file(file))

    async def _show_files(self, request: Request, project: str) -> Response:
        query = request.query_params
        await self.world.settle_patiently()
        kinds, sources = query.getlist("sample_type"), query.getlist("source")
        purpose, search = query.get("purpose"), query.get("search", "")
        shown = [
            render_file(file)
            for file in reversed(self.world.list_files(project))
            if not file.id.startswith(INPUT_PREFIX) and search in file.filename and _fits(sample_type(file), kinds)
        ]
        shown = [file for file in shown if purpose in {None, file["purpose"]} and _fits(file["source"], sources)]
        page: dict[str, Any] = {"object": "list", "data": _page(shown, query)}
        if query.get("include_total", "true").lower() != "false":
            page["total"] = len(shown)
        return JSONResponse(page)

    def _file(self, request: Request, project: str) -> SimFile:
        shown = request.path_params["file_id"]
        try:
            return self.world.file(project, own_file_id(shown))
        except Refused:
            raise Refused(404, f"No file matches the given id: {shown}.", error_type="not_found") from None

    async def _show_file(self, request: Request, project: str) -> Response:
        await self.world.settle_patiently()
        return JSONResponse(render_file(self._file(request, project)) | {"deleted": False})

    async def _show_content(self, request: Request, project: str) -> Response:
        await self.world.settle_patiently()
        path = self.world.state.file_path(self._file(request, project).id)
        return Download(path, media_type="application/octet-stream")

    async def _drop_file(self, request: Request, project: str) -> Response:
        await self.world.settle_patiently()
        file = self._file(request, project)
        self.world.delete_file(project, file.id)
        return JSONResponse({"id": shown_file_id(file.id), "object": "file", "deleted": True})

    # ------------------------------------------------------------------------------------------ jobs

    async def _make_job(self, request: Request, project: str) -> Response:
        world = self.world
        body = json_object(await read_body(request, _MAX_CREATE_BYTES))
        endpoint, model, hours, metadata = _job_members(body)
        names, requests = body.get("input_files") or [], body.get("requests") or []
        if bool(names) == bool(requests) or not isinstance(names, list) or not isinstance(requests, list):
            raise Invalid(["input_files"], "value_error", "Give either input_files or requests")
        if len(requests) > MAX_INLINE_REQUESTS:
            message = f"List should have at most {MAX_INLINE_REQUESTS} items"
            raise Invalid(["requests"], "too_long", message)
        files, missing = self._inputs(project, names)
        wanted = CreateRequest(own_file_id(str(missing)), endpoint, f"{hours}h", metadata, None)
        job: SimBatch
        if missing is not None:
            if world.scenario.unknown_file != "fail_job":
                status = 404 if world.scenario.unknown_file == "reject_404" else 400
                raise Refused(status, f"Input file {missing} not found.", error_type="file_not_found")
            job = world.create(project, wanted)
        else:
            if any(file.purpose != "batch" for file in files):
                raise Refused(400, "Input files of a batch job need the purpose 'batch'.")
            lines: list[Path | bytes] = (
                [world.state.file_path(file.id) for file in files] if files else [dump_json(one) for one in requests]
            )
            job = await self._start(project, files, lines, wanted, model)
        job.extra = {"input_files": names, "model": model, "inline": bool(requests)}
        world.state.save_batch(job)
        return self._shown_job(job)

    def _inputs(self, project: str, names: list[Any]) -> tuple[list[SimFile], str | None]:
        """The files of a job, and the first name that is none."""
        files: list[SimFile] = []
        for name in names:
            try:
                files.append(self.world.file(project, own_file_id(str(name))))
            except Refused:
                return files, str(name)
        return files, None

    async def _start(
        self, project: str, files: list[SimFile], lines: list[Path | bytes], wanted: CreateRequest, model: str | None
    ) -> SimBatch:
        """Make the job, on a copy of its lines that only the simulator sees."""
        world = self.world
        copy_id = f"{INPUT_PREFIX}{secrets.token_hex(11)}"
        path = world.state.file_path(copy_id)
        size_bytes = await asyncio.to_thread(write_lines, lines, path, wanted.endpoint, model)
        now = world.clock.timestamp()
        copy = SimFile(copy_id, project, "lines.jsonl", "batch", size_bytes, now, now + BATCH_FILE_LIFE_S)
        copy.refused_creates = files[0].refused_creates if files else world.scenario.create_gap
        world.state.save_file(copy)
        try:
            return world.create(
                project, CreateRequest(copy_id, wanted.endpoint, wanted.completion_window, wanted.metadata, None)
            )
        except Refused as refused:
            self._drop_copy(copy_id, now)
            path.unlink(missing_ok=True)
            if refused.body["error"]["param"] == "file_id":
                files[0].refused_creates = copy.refused_creates
                message = f"Input file {shown_file_id(files[0].id)} not found."
                raise Refused(refused.status, message, error_type="file_not_found") from None
            raise

    def _drop_copy(self, file_id: str, at: float) -> None:
        copy = self.world.state.files.get(file_id)
        if copy is not None and copy.deleted_at is None:
            copy.deleted_at = at
            self.world.state.save_file(copy)

    def _forget_lines(self, job: SimBatch) -> None:
        """The copy goes when its job has ended."""
        if job.ended_at is not None and job.input_file_id.startswith(INPUT_PREFIX):
            self._drop_copy(job.input_file_id, job.ended_at)

    def _job(self, request: Request, project: str) -> SimBatch:
        shown = request.path_params["job_id"]
        try:
            job = self.world.batch(project, own_job_id(shown))
        except Refused:
            job = None
        if job is None or job.extra.get("is_deleted"):
            raise Refused(404, f"No batch job matches the given id: {shown}.", error_type="not_found")
        return job

    async def _show_job(self, request: Request, project: str) -> Response:
        await self.world.settle_patiently()
        job = self._job(request, project)
        shown = render_job(job, self.world.scenario, self.world.clock.timestamp())
        if request.query_params.get("inline", "").lower() == "true" and job.status.is_terminal:
            ids = [file_id for file_id in (job.output_file_id, job.error_file_id) if file_id is not None]
            paths = [self.world.state.file_path(file_id) for file_id in ids]
            shown["outputs"] = await asyncio.to_thread(lambda: [one for path in paths for one in _read_outputs(path)])
        return JSONResponse(shown)

    async def _cancel_job(self, request: Request, project: str) -> Response:
        job = self._job(request, project)
        try:
            return self._shown_job(await self.world.cancel(project, job.id))
        except Refused as refused:
            message = "The batch job has ended already."
            raise Refused(refused.status, message, error_type="invalid_request_error") from None

    async def _drop_job(self, request: Request, project: str) -> Response:
        await self.world.settle_patiently()
        job = self._job(request, project)
        if not job.status.is_terminal:
            raise Refused(409, "The batch job has not ended yet: cancel it first.")
        job.extra = job.extra | {"is_deleted": True}
        self.world.state.save_batch(job)
        return JSONResponse({"id": shown_job_id(job.id), "object": "batch", "deleted": True})

    async def _show_jobs(self, request: Request, project: str) -> Response:
        world, query = self.world, request.query_params
        await world.settle_patiently()
        now = world.clock.timestamp()
        jobs = [job for job in world.list_batches(project) if not job.extra.get("is_deleted")]
        if query.get("order_by", "-created") == "created":
            jobs.reverse()
        after = _created_after(query.get("created_after"))
        shown = [render_job(job, world.scenario, now) for job in jobs if after is None or job.created_at > after]
        statuses, model = query.getlist("status"), query.get("model")
        shown = [job for job in shown if _fits(job["status"], statuses) and model in {None, job["model"]}]
        return JSONResponse({"object": "list", "data": _page(shown, query), "total": len(shown)})

    def _shown_job(self, job: SimBatch) -> Response:
        return JSONResponse(render_job(job, self.world.scenario, self.world.clock.timestamp()))

    # ------------------------------------------------------------------------------------ the others

    async def _show_models(self, request: Request, project: str) -> Response:
        del request, project
        names = self.world.scenario.batch_models or ("mistral-small-latest", "mistral-embed")
        models = [
            {
                "id": name,
                "object": "model",
                "created": 1_700_000_000,
                "owned_by": "mistralai",
                "type": "base",
                "capabilities": {"completion_chat": "embed" not in name, "function_calling": "embed" not in name},
            }
            for name in names
        ]
        return JSONResponse({"object": "list", "data": models})

    async def _run(self, request: Request, project: str) -> Response | None:
        return await self.answer(request, project, request.url.path.removeprefix(PREFIX))


def _fits(value: str, wanted: list[str]) -> bool:
    return not wanted or value in wanted


def _page(items: list[dict[str, Any]], query: QueryParams) -> list[dict[str, Any]]:
    page, size = _number(query, "page", 0, 10**9), _number(query, "page_size", 100, _MAX_PAGE)
    return items[page * size : (page + 1) * size]


def _number(query: QueryParams, name: str, default: int, maximum: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()) or int(text[:12]) > maximum:
        raise Invalid([name], "less_than_equal", f"Input should be a whole number of at most {maximum}")
    return int(text)


def _created_after(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise Invalid(["created_after"], "datetime_parsing", "Input should be a valid datetime") from None


def _job_members(body: dict[str, Any]) -> tuple[str, str | None, int, dict[str, str] | None]:
    """Endpoint, model, window in hours and metadata of a create.

    Raises:
        Refused: 400 or 422.
    """
    endpoint, model, hours, metadata = (
        body.get("endpoint"),
        body.get("model"),
        body.get("timeout_hours", 24),
        body.get("metadata"),
    )
    if endpoint not in JOB_ENDPOINTS:
        raise Invalid(["endpoint"], "enum", "Input should be one of the endpoints of batch jobs")
    if model is not None and (not isinstance(model, str) or not model):
        raise Invalid(["model"], "string_type", "Input should be a valid string")
    if body.get("agent_id") is not None:
        raise Refused(400, "This simulator knows no agents: give a model.")
    if not isinstance(hours, int) or isinstance(hours, bool) or not 1 <= hours <= MAX_TIMEOUT_HOURS:
        raise Invalid(["timeout_hours"], "less_than_equal", f"Input should be from 1 to {MAX_TIMEOUT_HOURS}")
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise Invalid(["metadata"], "string_type", "Values of metadata should be strings")
    return str(endpoint), model, hours, metadata


def _read_outputs(path: Path) -> list[Any]:
    outputs: list[Any] = []
    for line in path.read_bytes().split(b"\n"):
        try:
            outputs.append(parse_json(line))
        except ValueError:
            continue
    return outputs
