"""The routes, and what each of them promises.

======================  ===========================================================================
``/livez``              503 with reasons while the watchdog complains: restart this process
``/readyz``             503 with reasons until every partition is restored, and while stopping
``/startupz``           503 with reasons until the first start is through
``/metrics``            Prometheus text
``/api/status``         the process and its partitions, one JSON object
``/api/batches``        batches, newest first; ``?state=`` and ``?limit=`` (1 to 1000, default 100)
``/api/batches/{id}``   one batch with its history
======================  ===========================================================================

Liveness does not depend on a provider or on Kafka being there: restarting would not bring them back. (After a quarter
of an hour without any broker it does fail: their addresses may have changed.)
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from batchferry.ports import Telemetry
from batchferry.server.answers import Endpoint, guarded_route, http_exception, json_response
from batchferry.telemetry import METRICS_CONTENT_TYPE, error_fields, plain

DEFAULT_LIMIT = 100
MAX_LIMIT = 1000
MAX_EVENTS = 1000


class HealthSource(Protocol):
    """What the probes ask. Each answer is a list of reasons, short and free of payload; empty means well."""

    def not_live(self) -> Sequence[str]:
        """What the watchdog finds wrong: only a restart helps."""
        ...

    def not_ready(self) -> Sequence[str]:
        """Why this replica does not do its whole share now."""
        ...

    def not_started(self) -> Sequence[str]:
        """What the first start still waits for."""
        ...


class ReadModel(Protocol):
    """What the JSON pages ask. Rows hold ids, counts, times and states; ``batch_id`` and ``state`` name a batch's."""

    async def status(self) -> Mapping[str, object]:
        """The process as a whole: version, partitions, waiting rows, limits."""
        ...

    async def batches(self) -> Sequence[Mapping[str, object]]:
        """Every batch of the local table."""
        ...

    async def batch_events(self, batch_id: str) -> Sequence[Mapping[str, object]]:
        """The history of one batch, oldest first."""
        ...


def make_app(
    health: HealthSource,
    metrics_text: Callable[[], bytes],
    read_model: ReadModel,
    *,
    telemetry: Telemetry,
    token: str | None = None,
    extra_routes: Sequence[BaseRoute] = (),
) -> Starlette:
    """The admin application.

    With a ``token``, ``/api`` asks for ``Authorization: Bearer <token>``; probes and metrics never do.
    ``extra_routes`` are served as they are: whoever adds one answers for its own checks.
    """

    async def livez(_request: Request) -> Response:
        return _probe(health.not_live())

    async def readyz(_request: Request) -> Response:
        return _probe(health.not_ready())

    async def startupz(_request: Request) -> Response:
        return _probe(health.not_started())

    async def metrics(_request: Request) -> Response:
        return Response(metrics_text(), media_type=METRICS_CONTENT_TYPE)

    async def status(_request: Request) -> Response:
        return json_response(_shown(await read_model.status()))

    async def batches(request: Request) -> Response:
        limit = _limit(request)
        state = request.query_params.get("state")
        rows = [row for row in await read_model.batches() if state is None or str(row.get("state")) == state]
        rows.sort(key=lambda row: str(row.get("batch_id")), reverse=True)  # a batch_id sorts by its time
        return json_response({"batches": _shown(rows[:limit]), "total": len(rows)})

    async def batch(request: Request) -> Response:
        batch_id = request.path_params["batch_id"]
        found = next((row for row in await read_model.batches() if row.get("batch_id") == batch_id), None)
        if found is None:
            raise HTTPException(404, "no such batch in this replica's table; another replica may know it")
        events = await read_model.batch_events(batch_id)
        return json_response(
            {"batch": _shown(found), "events": _shown(events[-MAX_EVENTS:]), "total_events": len(events)}
        )

    report = TelemetryReport(telemetry)

    def route(path: str, endpoint: Endpoint, *, private: bool = False) -> Route:
        async def allowed(request: Request) -> Response:
            if private and token is not None:
                _demand(request, token)
            return await endpoint(request)

        return guarded_route(path, allowed, "GET", report)

    return Starlette(
        routes=[
            route("/livez", livez),
            route("/readyz", readyz),
            route("/startupz", startupz),
            route("/metrics", metrics),
            route("/api/status", status, private=True),
            route("/api/batches", batches, private=True),
            route("/api/batches/{batch_id:str}", batch, private=True),
            *extra_routes,
        ],
        exception_handlers={HTTPException: http_exception},
    )


class TelemetryReport:
    """Tells of requests in this process's own telemetry."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def answered(self, route: str, status_code: int, times: int = 1) -> None:
        """Count answers."""
        self._telemetry.count("http_requests", times, route=route, status=str(status_code))

    def failed(self, route: str, error: Exception) -> None:
        """Tell of a bug, by its kind and place."""
        self._telemetry.event("api_failed", route=route, **error_fields(error))


def _probe(reasons: Sequence[str]) -> Response:
    if reasons:
        return json_response({"status": "failing", "reasons": _shown(list(reasons))}, 503)
    return json_response({"status": "ok"})


def _demand(request: Request, token: str) -> None:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
        raise HTTPException(401, "send the admin token: Authorization: Bearer <token>", {"WWW-Authenticate": "Bearer"})


def _limit(request: Request) -> int:
    text = request.query_params.get("limit", str(DEFAULT_LIMIT))
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and 1 <= int(text) <= MAX_LIMIT):
        raise HTTPException(400, f"limit is a number from 1 to {MAX_LIMIT}")
    return int(text)


def _shown(value: object) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _shown(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(item) for item in value]
    return plain(value)
