"""Azure OpenAI over the same world: under ``/openai/v1``, and under ``/openai`` with ``api-version`` in the query.

Its files and jobs live in projects of their own, so that no other API shows what was made by this one. It departs from
OpenAI as Microsoft's page on batches says (MicrosoftDocs/azure-ai-docs, how-to/batch.md): the key in ``api-key``, a
deployment's name for the model, codes of its own, a 0-byte error file where no row failed, and jobs that run on past
their window until they end or are cancelled. The dated versions have their oddities besides: a capital in
``Validating``, an ISO ``created_at``, counters that are null, ``completed_at`` on a failed job.
"""

from __future__ import annotations

import hmac
import secrets
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from batchferry.simulator.answers import ANSWERED_ENDPOINTS, CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES
from batchferry.simulator.app import Activity, ServedCall, Surface, Work, json_object, read_body
from batchferry.simulator.errors import Refused
from batchferry.simulator.faults import CallName, FaultPlan
from batchferry.simulator.jsontext import dump_json, parse_json
from batchferry.simulator.scenario import DAY_S
from batchferry.simulator.settings import SimulatorSettings
from batchferry.simulator.state import SimBatch, Status
from batchferry.simulator.wire import page_after, page_limit, render_batch, render_file, render_page
from batchferry.simulator.world import CreateRequest, World

PREFIX = "/openai"
"""Path in front of both APIs; the current one has ``/v1`` behind it."""
PROJECT_PREFIX = "azure:"
API_VERSIONS = ("2024-10-21", "2025-04-01-preview")
"""Dated versions that have batches."""
MIN_EXPIRY_S, MAX_EXPIRY_S = 14 * DAY_S, 30 * DAY_S

_MAX_CREATE_BYTES = 1024 * 1024
_CODES = {
    "invalid_url": "url_mismatch",
    "mismatched_model": "model_mismatch",
    "empty_file": "empty_batch",
    "invalid_method": "invalid_request",
    "missing_required_parameter": "invalid_request",
    "streaming_unsupported": "invalid_request",
}
"""Azure's codes of refused lines, by OpenAI's; the others are the same."""
_FILTERED = b'"content_policy_violation"'
_CATEGORIES = ("hate", "self_harm", "sexual", "violence")
_CLEAN = {name: {"filtered": False, "severity": "safe"} for name in _CATEGORIES}
_CHOICES = b'"choices":['
_PROMPT_RESULTS = (
    b'"prompt_filter_results":' + dump_json([{"prompt_index": 0, "content_filter_results": _CLEAN}]) + b","
)


class AzureSurface(Surface):
    """The calls of one Azure resource over one ``World``."""

    def __init__(self, settings: SimulatorSettings, world: World, faults: FaultPlan, activity: Activity) -> None:
        super().__init__(settings, world, faults, activity)
        world.rewrite_results(PROJECT_PREFIX, rewrite_results)

    def routes(self) -> list[Route]:
        """Every call with its path, of the current API first."""
        shared: list[tuple[CallName, str, str, Work]] = [
            (CallName.UPLOAD, "POST", "/files", self._take_file),
            (CallName.FILE_LIST, "GET", "/files", self._list_files),
            (CallName.FILE_RETRIEVE, "GET", "/files/{file_id}", self._retrieve_file),
            (CallName.CONTENT, "GET", "/files/{file_id}/content", self._content),
            (CallName.DELETE, "DELETE", "/files/{file_id}", self._drop_file),
            (CallName.CREATE, "POST", "/batches", self._make_job),
            (CallName.LIST, "GET", "/batches", self._show_jobs),
            (CallName.RETRIEVE, "GET", "/batches/{batch_id}", self._show_job),
            (CallName.CANCEL, "POST", "/batches/{batch_id}/cancel", self._cancel_job),
        ]
        table = [(name, method, f"/v1{path}", work) for name, method, path, work in shared]
        table += [(CallName.SYNC, "POST", endpoint, self._run) for endpoint in ANSWERED_ENDPOINTS]
        table += shared
        table += [
            (CallName.SYNC, "POST", "/deployments/{deployment}" + endpoint.removeprefix("/v1"), self._run_deployment)
            for endpoint in (CHAT, COMPLETIONS, EMBEDDINGS)
        ]
        return [
            Route(f"{PREFIX}{path}", ServedCall(self, name, work), methods=[method], name=f"azure:{name}:{path}")
            for name, method, path, work in table
        ]

    # ------------------------------------------------------------------------------- how answers look

    def error_body(self, status: int, error: dict[str, Any]) -> dict[str, Any]:
        """Azure's error: a code always, the status where there is none."""
        shown = {"code": error["code"] or str(status), "message": error["message"]}
        shown |= {name: error[name] for name in ("type", "param") if error[name] is not None}
        if shown["code"] == "content_policy_violation":
            return {"error": _filtered(shown, status)}
        return {"error": shown}

    def sync_answer(self, endpoint: str, status: int, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """A synchronous answer with what the content filter found."""
        if status != 200:
            error = body.get("error")
            return (status, self.error_body(status, error)) if isinstance(error, dict) else (status, body)
        if endpoint == CHAT and "choices" in body:
            body = {"prompt_filter_results": [{"prompt_index": 0, "content_filter_results": _CLEAN}]} | body
        return status, body

    def project_of(self, request: Request) -> str:
        """The project of the call's key, in ``api-key`` or as a bearer token, once the version is known.

        Raises:
            Refused: 401, or 404 for a version that there is not.
        """
        bearer = request.headers.get("authorization", "")
        given = request.headers.get("api-key") or (bearer[7:] if bearer.lower().startswith("bearer ") else "")
        key = given.strip().encode()
        found = [project for known, project in self._keys if hmac.compare_digest(known, key)]
        if not found:
            message = "Access denied due to invalid subscription key or wrong API endpoint."
            raise Refused(401, message, code="401")
        if _is_dated(request) and request.query_params.get("api-version") not in API_VERSIONS:
            raise Refused(404, "Resource not found", code="404")
        return PROJECT_PREFIX + found[0]

    def stamp(self, response: Response) -> None:
        """The headers every answer has."""
        super().stamp(response)
        del response.headers["openai-version"]
        response.headers["apim-request-id"] = secrets.token_hex(16)

    # ----------------------------------------------------------------------------------------- files

    async def _take_file(self, request: Request, project: str) -> Response:
        try:
            made = await self._upload(request, project)
        except Refused as refused:
            raise Refused(
                refused.status, str(refused), code="invalidPayload", param=refused.body["error"]["param"]
            ) from None
        file = self.world.state.files[str(parse_json(bytes(made.body))["id"])]
        if file.expires_at is not None and file.purpose == "batch":
            life_s = file.expires_at - file.created_at
            if not MIN_EXPIRY_S <= life_s <= MAX_EXPIRY_S:
                self.world.delete_file(project, file.id)
                message = f"expires_after.seconds must be from {MIN_EXPIRY_S} to {MAX_EXPIRY_S}."
                raise Refused(400, message, code="invalidPayload")
        return JSONResponse(render_file(file) | {"status": "pending"}, 201)

    async def _drop_file(self, request: Request, project: str) -> Response:
        await self._delete_file(request, project)
        return Response(status_code=204)

    # ------------------------------------------------------------------------------------------ jobs

    async def _make_job(self, request: Request, project: str) -> Response:
        body = json_object(await read_body(request, _MAX_CREATE_BYTES))
        file_id, named, window = body.get("input_file_id"), body.get("endpoint"), body.get("completion_window")
        metadata = body.get("metadata")
        if not isinstance(file_id, str) or not isinstance(named, str) or window not in self.world.scenario.windows:
            raise Refused(400, "input_file_id, endpoint and completion_window are required.", code="invalidPayload")
        endpoint = named if named.startswith("/v1/") else f"/v1{named}"
        if endpoint not in {CHAT, RESPONSES}:
            raise Refused(400, f"The endpoint {named[:40]} is not supported in batches.", code="invalidPayload")
        if metadata is not None and not (
            isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
        ):
            raise Refused(400, "metadata must be an object of texts.", code="invalidPayload", param="metadata")
        job = self.world.create(project, CreateRequest(file_id, endpoint, str(window), metadata, None))
        job.runs_on = job.names_empty_error_file = True
        job.line_url = named
        self.world.state.save_batch(job)
        return self._job(request, job)

    async def _show_job(self, request: Request, project: str) -> Response:
        await self.world.settle_patiently()
        return self._job(request, self.world.batch(project, request.path_params["batch_id"]))

    async def _cancel_job(self, request: Request, project: str) -> Response:
        return self._job(request, await self.world.cancel(project, request.path_params["batch_id"]))

    async def _show_jobs(self, request: Request, project: str) -> Response:
        query = request.query_params
        limit = page_limit(query.get("limit"), 20, 100)
        await self.world.settle_patiently()
        jobs = self.world.list_batches(project)
        start = page_after([job.id for job in jobs], query.get("after"))
        page = [self._render(request, job) for job in jobs[start : start + limit]]
        return JSONResponse(render_page(page, start + limit < len(jobs)))

    def _job(self, request: Request, job: SimBatch) -> Response:
        return JSONResponse(self._render(request, job))

    def _render(self, request: Request, job: SimBatch) -> dict[str, Any]:
        shown = render_batch(job, self.world.scenario, self.world.clock.timestamp())
        shown["endpoint"] = job.line_url
        if job.errors:
            shown["errors"]["data"] = [
                entry | {"code": _CODES.get(entry["code"], entry["code"])} for entry in job.errors
            ]
        if not _is_dated(request):
            return shown
        shown["created_at"] = datetime.fromtimestamp(job.created_at, UTC).isoformat(timespec="milliseconds")
        if job.status is Status.VALIDATING:
            shown["status"] = "Validating"
        if job.in_progress_at is None:
            shown["request_counts"] = {"total": None, "completed": None, "failed": None}
        if job.status is Status.FAILED:
            shown["completed_at"] = shown["failed_at"]
        return shown

    # ---------------------------------------------------------------------------------- single calls

    async def _run(self, request: Request, project: str) -> Response | None:
        return await self.answer(request, project, request.url.path.removeprefix(PREFIX))

    async def _run_deployment(self, request: Request, project: str) -> Response | None:
        """The deployment in the address stands for the model, whatever the body says."""
        body = json_object(await read_body(request, self.world.scenario.limits.sync_body_bytes))
        text = dump_json(body | {"model": request.path_params["deployment"]})

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": text, "more_body": False}

        named = request.url.path.rsplit(f"/{request.path_params['deployment']}/", 1)[1]
        return await self.answer(Request(request.scope, receive), project, f"/v1/{named}")


def _is_dated(request: Request) -> bool:
    return not request.url.path.startswith(f"{PREFIX}/v1/")


def _filtered(error: dict[str, Any], status: int) -> dict[str, Any]:
    """The error of a prompt that the filter stopped."""
    found = _CLEAN | {"hate": {"filtered": True, "severity": "high"}}
    return error | {
        "code": "content_filter",
        "param": "prompt",
        "status": status,
        "innererror": {"code": "ResponsibleAIPolicyViolation", "content_filter_result": found},
    }


def rewrite_results(job: SimBatch, path: Path) -> None:
    """Put into a finished result file what Azure's content filter adds to its rows."""
    del job
    fresh = path.with_name(f"{path.name}.rewritten")
    with path.open("rb") as source, fresh.open("wb") as target:
        for line in source:
            if _FILTERED in line and line.endswith(b"\n"):
                row = parse_json(line)
                body = row["response"]["body"]
                body["error"] = _filtered(body["error"], row["response"]["status_code"])
                target.write(dump_json(row) + b"\n")
            else:
                # Not parsed: some lines are scripted to be no JSON. Inside a text the quotes would be escaped.
                target.write(line.replace(_CHOICES, _PROMPT_RESULTS + _CHOICES, 1))
    fresh.replace(path)
