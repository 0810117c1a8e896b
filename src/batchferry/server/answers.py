"""Answers as JSON, and routes that always give one.

Loads neither settings nor telemetry: the webhook process, which needs only this of the room, stays small and starts
quickly.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Endpoint = Callable[[Request], Awaitable[Response]]


class Report(Protocol):
    """Who is told what became of requests."""

    def answered(self, route: str, status_code: int) -> None:
        """A request to this route, as it is written with its placeholders, got this answer."""
        ...

    def failed(self, route: str, error: Exception) -> None:
        """A bug was met on the way."""
        ...


def guarded_route(path: str, endpoint: Endpoint, method: str, report: Report) -> Route:
    """A route whose refusals are JSON, whose bugs tell the client nothing, and whose answers are counted."""

    async def guarded(request: Request) -> Response:
        try:
            response = await endpoint(request)
        except HTTPException as refusal:
            response = refusal_response(refusal)
        except Exception as error:  # noqa: BLE001 - one page's bug stays with that page, and out of its answer
            report.failed(path, error)
            response = refusal_response(failure())
        report.answered(path, response.status_code)
        return response

    return Route(path, guarded, methods=[method])


def failure() -> HTTPException:
    """What a client is told of a bug."""
    return HTTPException(500, "this page could not be made; the log says where")


async def http_exception(_request: Request, error: Exception) -> Response:
    """Starlette's handler for what no route of ours took."""
    assert isinstance(error, HTTPException)
    return refusal_response(error)


def json_response(value: object, status_code: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer that no cache keeps."""
    return Response(
        orjson.dumps(value),
        status_code,
        {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", **(headers or {})},
        media_type="application/json",
    )


def refusal_response(error: HTTPException) -> Response:
    """A refusal as JSON."""
    told = {"error": {"status": error.status_code, "message": error.detail}}
    return json_response(told, error.status_code, error.headers)
