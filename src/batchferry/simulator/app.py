"""The HTTP surface under ``/v1``: parses calls, lets faults have their way, answers as the provider does."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from email.utils import formatdate
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from batchferry.simulator.answers import (
    ANSWERED_ENDPOINTS,
    PROMPT_MEMBER,
    model_of,
)
from batchferry.simulator.errors import Refused, envelope
from batchferry.simulator.faults import CallName, FaultKind, FaultPlan, FaultRule
from batchferry.simulator.jsontext import dump_json, parse_json
from batchferry.simulator.outcomes import broken_utf8
from batchferry.simulator.scenario import Outcome
from batchferry.simulator.settings import SimulatorSettings
from batchferry.simulator.upload import Upload, receive_upload
from batchferry.simulator.wire import page_after, page_limit, render_batch, render_file, render_page
from batchferry.simulator.world import (
    BATCH_ENDPOINTS,
    MAX_EXPIRY_S,
    MIN_EXPIRY_S,
    UPLOAD_PURPOSES,
    CreateRequest,
    World,
)

_MAX_CREATE_BYTES = 1024 * 1024
_PIECE_BYTES = 512 * 1024
TRANSPORT = "transport"
"""Where the server leaves a connection's transport in the request's state, so that a fault can hang up."""

Work = Callable[[Request, str], Awaitable[Response | None]]
"""The work of a call for a project; None hangs up."""


class Activity:
    """When the last request came, for a simulator that leaves when nobody needs it."""

    def __init__(self) -> None:
        self._last_request = time.monotonic()
        self._under_way = 0

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """A request is being served."""
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            self._last_request = time.monotonic()

    def idle_s(self) -> float:
        """Real seconds since the last request; 0 while one is under way."""
        return 0.0 if self._under_way else time.monotonic() - self._last_request


async def hang_up(scope: Scope, receive: Receive) -> None:
    """Close the connection under the call; what was written before still goes out."""
    transport = scope.get("state", {}).get(TRANSPORT)
    if transport is None:
        raise RuntimeError("only the simulator's own server can hang up")
    transport.close()
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body of a call.

    Raises:
        Refused: 413.
    """
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise Refused(413, f"The request body is larger than {max_bytes} bytes.")
    return bytes(body)


class _Incoming:
    """A call's ``receive`` that knows whether the body has come to its end."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._ended = False
        self._held: deque[Message] = deque()

    async def __call__(self) -> Message:
        if self._held:
            return self._held.popleft()
        return await self._next()

    async def hold(self) -> None:
        """Read the whole body now and hand it out later."""
        held: deque[Message] = deque()
        while not self._ended:
            held.append(await self._next())
        self._held = held

    async def copy(self) -> Receive:
        """Another ``receive`` with the whole body; this one still has it too."""
        if not self._held:
            await self.hold()
        again = deque(self._held)

        async def receive() -> Message:
            return again.popleft() if again else await self._receive()

        return receive

    async def _next(self) -> Message:
        message = await self._receive()
        if message["type"] != "http.request" or not message.get("more_body", False):
            self._ended = True
        return message

    async def drain(self) -> None:
        """Read what is left: a client that is still writing would see a broken pipe, not the answer."""
        while not self._ended:
            await self()


class Download(FileResponse):
    """A file from disk, in pieces large enough that 200 MB do not cost thousands of thread switches."""

    chunk_size = _PIECE_BYTES


class _PartialResponse(Response):
    """The first ``share`` of another response's body; ``honest`` says so in its length, else it breaks off."""

    def __init__(self, whole: Response, share: float, *, honest: bool) -> None:
        super().__init__(status_code=whole.status_code, media_type=whole.media_type)
        self.headers.update(whole.headers)
        self._whole = whole
        self._share = share
        self._honest = honest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if isinstance(self._whole, FileResponse):
            with open(self._whole.path, "rb") as file:  # noqa: PTH123, ASYNC230 (a local file, read in small pieces)
                size = file.seek(0, 2)
                file.seek(0)
                await self._send(scope, receive, send, size, file.read)
            return
        body = bytes(self._whole.body)
        at = 0

        def read(count: int) -> bytes:
            nonlocal at
            at += count
            return body[at - count : at]

        await self._send(scope, receive, send, len(body), read)

    async def _send(self, scope: Scope, receive: Receive, send: Send, size: int, read: Callable[[int], bytes]) -> None:
        left = int(size * self._share)
        self.headers["content-length"] = str(left if self._honest else size)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while left > 0:
            piece = read(min(left, _PIECE_BYTES))
            left -= len(piece)
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        if self._honest:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            await hang_up(scope, receive)


class ServedCall:
    """One kind of call as an ASGI application: faults, authorisation, work, headers."""

    def __init__(self, surface: Surface, name: CallName, work: Work) -> None:
        self._surface = surface
        self._name = name
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A caller that goes away in the middle of its body leaves nobody to answer.
        with self._surface.activity.request(), contextlib.suppress(ClientDisconnect):
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        incoming = _Incoming(receive)
        faults = self._surface.faults
        hits = faults.draw(self._name)
        fault = next((hit for hit in hits if hit.kind is not FaultKind.GATE), None)
        gates = [hit for hit in hits if hit.kind is FaultKind.GATE]
        is_delayed = fault is not None and fault.kind is FaultKind.DELAY
        if (gates or is_delayed) and self._name is not CallName.UPLOAD:
            # The call has arrived whole: its caller may go away while it is held, and it is carried out all the same.
            await incoming.hold()
        if fault is not None and fault.kind is FaultKind.REPEAT:
            await self._do_work(Request(scope, await incoming.copy()))
        await self._pass_gates(gates, after_work=False)
        if fault is not None and fault.kind is FaultKind.DROP:
            await hang_up(scope, receive)
            return
        response: Response | None
        if fault is not None and fault.kind is FaultKind.ANSWER and not fault.after_work:
            response = self._fault_response(fault)
        else:
            response = await self._do_work(Request(scope, incoming))
            await self._pass_gates(gates, after_work=True)
            if response is None or (fault is not None and fault.kind is FaultKind.LOSE_REPLY):
                await hang_up(scope, receive)
                return
            if fault is not None and fault.kind is FaultKind.DELAY:
                await self._surface.world.wait(fault.delay_s)
            elif fault is not None and fault.kind is not FaultKind.REPEAT:
                response = self._changed(fault, response)
        await incoming.drain()
        self._surface.stamp(response)
        await response(scope, receive, send)

    async def _pass_gates(self, gates: list[FaultRule], *, after_work: bool) -> None:
        for rule in gates:
            if rule.after_work is after_work:
                await self._surface.faults.gate(rule.gate).pass_through()

    async def _do_work(self, request: Request) -> Response | None:
        try:
            return await self._work(request, self._surface.project_of(request))
        except Refused as refused:
            return JSONResponse(self._surface.refusal(refused), refused.status, refused.headers)

    def _changed(self, fault: FaultRule, response: Response) -> Response:
        if fault.kind is FaultKind.ANSWER:
            return self._fault_response(fault)
        return _PartialResponse(response, fault.share, honest=fault.kind is FaultKind.SHORTEN)

    def _fault_response(self, fault: FaultRule) -> Response:
        headers: dict[str, str] = {}
        if fault.retry_after_s is not None:
            headers["retry-after"] = f"{fault.retry_after_s:g}"
        if fault.retry_after_ms is not None:
            headers["retry-after-ms"] = str(fault.retry_after_ms)
        if fault.should_retry is not None:
            headers["x-should-retry"] = str(fault.should_retry).lower()
        if fault.body is not None:
            kind = "application/json" if fault.body.lstrip().startswith("{") else "text/html"
            return Response(fault.body, fault.status, headers, media_type=kind)
        error = envelope(fault.status, fault.message, fault.error_type, fault.error_code, fault.error_param)["error"]
        return JSONResponse(self._surface.error_body(fault.status, error), fault.status, headers)


class Surface:
    """The calls of the API over one ``World``."""

    def __init__(
        self, settings: SimulatorSettings, world: World, faults: FaultPlan, activity: Activity | None = None
    ) -> None:
        self.world = world
        self.faults = faults
        self.activity = activity or Activity()
        self._keys = [(key.get_secret_value().encode(), project) for key, project in settings.keys.items()]

    def routes(self) -> list[Route]:
        """Every call with its path."""
        table: list[tuple[CallName, str, str, Work]] = [
            (CallName.UPLOAD, "POST", "/v1/files", self._upload),
            (CallName.FILE_LIST, "GET", "/v1/files", self._list_files),
            (CallName.FILE_RETRIEVE, "GET", "/v1/files/{file_id}", self._retrieve_file),
            (CallName.CONTENT, "GET", "/v1/files/{file_id}/content", self._content),
            (CallName.DELETE, "DELETE", "/v1/files/{file_id}", self._delete_file),
            (CallName.CREATE, "POST", "/v1/batches", self._create),
            (CallName.LIST, "GET", "/v1/batches", self._list_batches),
            (CallName.RETRIEVE, "GET", "/v1/batches/{batch_id}", self._retrieve),
            (CallName.CANCEL, "POST", "/v1/batches/{batch_id}/cancel", self._cancel),
            (CallName.MODELS, "GET", "/v1/models", self._models),
            *((CallName.SYNC, "POST", endpoint, self._sync) for endpoint in ANSWERED_ENDPOINTS),
        ]
        return [
            Route(path, ServedCall(self, name, work), methods=[method], name=f"{name}:{path}")
            for name, method, path, work in table
        ]

    def error_body(self, status: int, error: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002 (others need it)
        """The body of an answer that is no success; ``error`` has the members of OpenAI's error object."""
        return {"error": error}

    def refusal(self, refused: Refused) -> dict[str, Any]:
        """The body of a refusal."""
        return self.error_body(refused.status, refused.body["error"])

    def project_of(self, request: Request) -> str:
        """The project of the call's API key.

        Raises:
            Refused: 401.
        """
        given = request.headers.get("authorization", "")
        if not given.lower().startswith("bearer ") or not given[7:].strip():
            raise Refused(401, "You didn't provide an API key. Send it as 'Authorization: Bearer KEY'.")
        key = given[7:].strip().encode()
        # Every key is compared, each in constant time; dictionary look-up would tell a key's prefix by its time.
        found = [project for known, project in self._keys if hmac.compare_digest(known, key)]
        if not found:
            raise Refused(401, "Incorrect API key provided.", code="invalid_api_key")
        return found[0]

    def stamp(self, response: Response) -> None:
        """The headers every answer has. ``date`` is virtual, as clients compare it with their clock."""
        response.headers["x-request-id"] = f"req_{secrets.token_hex(16)}"
        response.headers["openai-version"] = "2020-10-01"
        response.headers["date"] = formatdate(
            self.world.clock.timestamp() + self.world.scenario.clock_ahead_s, usegmt=True
        )

    # ----------------------------------------------------------------------------------------- files

    async def _upload(self, request: Request, project: str) -> Response:
        world = self.world
        file_id = world.new_file_id()
        upload = await receive_upload(
            request.headers.get("content-type", ""),
            request.stream(),
            world.state.file_path(file_id),
            world.scenario.limits.any_file_bytes,
        )
        try:
            purpose, expires_s = _upload_fields(upload)
        except Refused:
            world.state.file_path(file_id).unlink(missing_ok=True)
            raise
        file = await world.add_file(project, file_id, upload.filename or "", purpose, upload.size_bytes, expires_s)
        return JSONResponse(render_file(file))

    async def _list_files(self, request: Request, project: str) -> Response:
        query = request.query_params
        await self.world.settle_patiently()
        files = [
            file
            for file in self.world.list_files(project)
            if query.get("purpose") is None or file.purpose == query["purpose"]
        ]
        order = query.get("order", "desc")
        if order not in {"asc", "desc"}:
            raise Refused(400, "'order' must be 'asc' or 'desc'.", param="order", code="invalid_value")
        if order == "desc":
            files.reverse()
        limit = page_limit(query.get("limit"), 10_000, 10_000)
        start = page_after([file.id for file in files], query.get("after") or query.get("cursor"))
        page = [render_file(file) for file in files[start : start + limit]]
        return JSONResponse(render_page(page, start + limit < len(files)))

    async def _retrieve_file(self, request: Request, project: str) -> Response:
        await self.world.settle_patiently()
        return JSONResponse(render_file(self.world.file(project, request.path_params["file_id"])))

    async def _content(self, request: Request, project: str) -> Response:
        await self.world.settle_patiently()
        file = self.world.file(project, request.path_params["file_id"])
        return Download(self.world.state.file_path(file.id), media_type="application/octet-stream")

    async def _delete_file(self, request: Request, project: str) -> Response:
        file_id = request.path_params["file_id"]
        await self.world.settle_patiently()
        self.world.delete_file(project, file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    # --------------------------------------------------------------------------------------- batches

    async def _create(self, request: Request, project: str) -> Response:
        wanted = _create_request(await read_body(request, _MAX_CREATE_BYTES), self.world.scenario.windows)
        return self._shown(self.world.create(project, wanted))

    async def _retrieve(self, request: Request, project: str) -> Response:
        await self.world.settle_patiently()
        return self._shown(self.world.batch(project, request.path_params["batch_id"]))

    async def _cancel(self, request: Request, project: str) -> Response:
        return self._shown(await self.world.cancel(project, request.path_params["batch_id"]))

    async def _list_batches(self, request: Request, project: str) -> Response:
        world, query = self.world, request.query_params
        limit = page_limit(query.get("limit"), 20, 100)
        await world.settle_patiently()
        batches = world.list_batches(project)
        # ``cursor`` is what some compatible servers call it.
        start = page_after([batch.id for batch in batches], query.get("after") or query.get("cursor"))
        now = world.clock.timestamp()
        page = [render_batch(batch, world.scenario, now) for batch in batches[start : start + limit]]
        return JSONResponse(render_page(page, start + limit < len(batches)))

    def _shown(self, batch: Any) -> Response:
        return JSONResponse(render_batch(batch, self.world.scenario, self.world.clock.timestamp()))

    # ------------------------------------------------------------------------------------ the others

    async def _models(self, request: Request, project: str) -> Response:
        del request, project
        names = self.world.scenario.batch_models or ("gpt-5-mini", "gpt-4o-mini", "text-embedding-3-small")
        models = [{"id": name, "object": "model", "created": 1_700_000_000, "owned_by": "simulator"} for name in names]
        return JSONResponse({"object": "list", "data": models})

    async def _sync(self, request: Request, project: str) -> Response | None:
        return await self.answer(request, project, request.url.path)

    def sync_answer(self, endpoint: str, status: int, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:  # noqa: ARG002 (same)
        """Status and body of a synchronous answer, made of OpenAI's."""
        return status, body

    async def answer(self, request: Request, project: str, endpoint: str) -> Response | None:
        """Run one call of a synchronous endpoint."""
        with self.world.sync_gate.entered():
            text = await read_body(request, self.world.scenario.limits.sync_body_bytes)
            body = _sync_body(endpoint, text)
            paced = self.world.admit_sync(project, endpoint, body)
            result = self.world.answer_now(endpoint, body, request.headers.get("x-client-request-id", ""))
            await self.world.take_time()
        end, outcome = result.end, result.outcome
        if end is None or end.status == 0:
            return None
        status, body = self.sync_answer(endpoint, end.status, end.body)
        content = dump_json(body)
        if status == 200:
            if outcome is Outcome.EMPTY_BODY:
                content = b""
            elif outcome is Outcome.UNREADABLE:
                content = content[: len(content) * 3 // 5]
            elif outcome is Outcome.INVALID_UTF8:
                content = broken_utf8(endpoint, body)
        return Response(content, status, paced | end.headers, media_type="application/json")


def _upload_fields(upload: Upload) -> tuple[str, int | None]:
    """Purpose and life in seconds.

    Raises:
        Refused: 400.
    """
    if upload.filename is None:
        raise Refused(400, "'file' is a required property", param="file", code="missing_required_parameter")
    purpose = upload.fields.get("purpose")
    if purpose is None:
        raise Refused(400, "'purpose' is a required property", param="purpose", code="missing_required_parameter")
    if purpose not in UPLOAD_PURPOSES:
        supported = ", ".join(f"'{name}'" for name in UPLOAD_PURPOSES)
        message = f"'{purpose}' is not one of the supported purposes: {supported}."
        raise Refused(400, message, param="purpose", code="invalid_value")
    anchor, seconds = upload.fields.get("expires_after[anchor]"), upload.fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return purpose, None
    return purpose, _expiry(anchor, int(seconds[:12]) if seconds is not None and seconds.isdecimal() else None)


def _expiry(anchor: object, seconds: object, name: str = "expires_after") -> int:
    if anchor != "created_at":
        raise Refused(400, f"'{name}.anchor' must be 'created_at'.", param=f"{name}.anchor", code="invalid_value")
    if not isinstance(seconds, int) or isinstance(seconds, bool) or not MIN_EXPIRY_S <= seconds <= MAX_EXPIRY_S:
        message = f"'{name}.seconds' must be an integer from {MIN_EXPIRY_S} to {MAX_EXPIRY_S}."
        raise Refused(400, message, param=f"{name}.seconds", code="invalid_value")
    return seconds


def json_object(text: bytes) -> dict[str, Any]:
    """A JSON object.

    Raises:
        Refused: 400.
    """
    try:
        body = parse_json(text)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise Refused(400, "We could not parse the JSON body of your request.")
    return body


def _create_request(text: bytes, windows: tuple[str, ...]) -> CreateRequest:
    body = json_object(text)
    for member in ("input_file_id", "endpoint", "completion_window"):
        value = body.get(member)
        if value is None:
            message = f"Missing required parameter: '{member}'."
            raise Refused(400, message, param=member, code="missing_required_parameter")
        if not isinstance(value, str):
            raise Refused(400, f"Invalid type for '{member}': expected a string.", param=member, code="invalid_type")
    for member, supported in (("endpoint", BATCH_ENDPOINTS), ("completion_window", windows)):
        if body[member] not in supported:
            names = ", ".join(f"'{name}'" for name in supported)
            message = f"Invalid value: '{body[member]}'. Supported values are: {names}."
            raise Refused(400, message, param=member, code="invalid_value")
    metadata = body.get("metadata")
    if metadata is not None:
        _check_metadata(metadata)
    output_expires = body.get("output_expires_after")
    output_expires_s = None
    if output_expires is not None:
        if not isinstance(output_expires, dict):
            message = "Invalid type for 'output_expires_after': expected an object."
            raise Refused(400, message, param="output_expires_after", code="invalid_type")
        output_expires_s = _expiry(output_expires.get("anchor"), output_expires.get("seconds"), "output_expires_after")
    return CreateRequest(body["input_file_id"], body["endpoint"], body["completion_window"], metadata, output_expires_s)


def _check_metadata(metadata: object) -> None:
    if not isinstance(metadata, dict):
        raise Refused(400, "Invalid type for 'metadata': expected an object.", param="metadata", code="invalid_type")
    if len(metadata) > 16:
        raise Refused(400, "'metadata' has more than 16 members.", param="metadata", code="invalid_value")
    for name, value in metadata.items():
        param = f"metadata.{name}"
        if not isinstance(value, str):
            raise Refused(400, f"Invalid type for '{param}': expected a string.", param=param, code="invalid_type")
        if len(name) > 64 or len(value) > 512:
            message = "A metadata key has at most 64 characters, its value at most 512."
            raise Refused(400, message, param=param, code="string_above_max_length")


def _sync_body(endpoint: str, text: bytes) -> dict[str, Any]:
    body = json_object(text)
    if body.get("stream") not in {None, False}:
        raise Refused(400, "This simulator does not stream.", param="stream", code="unsupported_value")
    if model_of(endpoint, body) is None:
        raise Refused(400, "you must provide a model parameter", param="model", code="missing_required_parameter")
    prompt = PROMPT_MEMBER[endpoint]
    if body.get(prompt) is None:
        message = f"Missing required parameter: '{prompt}'."
        raise Refused(400, message, param=prompt, code="missing_required_parameter")
    return body
