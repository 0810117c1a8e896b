"""The Message Batches API over HTTP: ``/v1/messages`` and ``/v1/messages/batches``, beside the other surfaces.

Paths, members and headers: the official Python client, and Anthropic's pages on errors and rate limits.
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import formatdate
from secrets import token_hex
from typing import IO, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from batchferry.simulator.anthropic_rows import MESSAGES, broken_utf8, error_envelope
from batchferry.simulator.anthropic_world import MessageBatch, MessageWorld
from batchferry.simulator.app import Activity, Download, ServedCall, Surface, Work, read_body
from batchferry.simulator.errors import Refused
from batchferry.simulator.faults import CallName, FaultPlan
from batchferry.simulator.jsontext import dump_json, parse_json
from batchferry.simulator.scenario import Outcome
from batchferry.simulator.settings import SimulatorSettings

BATCHES = f"{MESSAGES}/batches"
MAX_PAGE = 1_000
_FLUSH_BYTES = 1 << 20
_PLACES = ("processing", "succeeded", "errored", "canceled", "expired")


class MessageSurface(Surface):
    """The calls of Anthropic's API over one ``MessageWorld``."""

    def __init__(
        self, settings: SimulatorSettings, messages: MessageWorld, faults: FaultPlan, activity: Activity
    ) -> None:
        super().__init__(settings, messages.world, faults, activity)
        self.messages = messages

    def routes(self) -> list[Route]:
        """Every call with its path."""
        table: list[tuple[CallName, str, str, Work]] = [
            (CallName.CREATE, "POST", BATCHES, self._create_batch),
            (CallName.LIST, "GET", BATCHES, self._list),
            (CallName.RETRIEVE, "GET", BATCHES + "/{batch_id}", self._retrieve_batch),
            (CallName.DELETE, "DELETE", BATCHES + "/{batch_id}", self._delete_batch),
            (CallName.CANCEL, "POST", BATCHES + "/{batch_id}/cancel", self._cancel_batch),
            (CallName.CONTENT, "GET", BATCHES + "/{batch_id}/results", self._results),
            (CallName.SYNC, "POST", MESSAGES, self._message),
        ]
        return [
            Route(path, ServedCall(self, name, work), methods=[method], name=f"{name}:{method}:{path}")
            for name, method, path, work in table
        ]

    def project_of(self, request: Request) -> str:
        """The project of the call's API key, once its version is known.

        The key comes as ``x-api-key``, which is documented, or as a bearer token, which the official client 2.14.0
        makes of it.

        Raises:
            Refused: 401 or 400.
        """
        bearer = request.headers.get("authorization", "")
        given = request.headers.get("x-api-key") or (bearer[7:] if bearer.lower().startswith("bearer ") else "")
        key = given.strip().encode()
        if not key:
            raise Refused(401, "x-api-key header is required")
        found = [project for known, project in self._keys if hmac.compare_digest(known, key)]
        if not found:
            raise Refused(401, "invalid x-api-key")
        version = request.headers.get("anthropic-version")
        if version is None:
            raise Refused(400, "anthropic-version: header is required")
        if version not in self.messages.script.versions:
            raise Refused(400, f"anthropic-version: {version[:40]!r} is not a valid version")
        return found[0]

    def stamp(self, response: Response) -> None:
        """The headers every answer has."""
        response.headers["request-id"] = f"req_{token_hex(12)}"
        response.headers["anthropic-organization-id"] = "org-simulated"
        response.headers["date"] = formatdate(
            self.world.clock.timestamp() + self.world.scenario.clock_ahead_s, usegmt=True
        )

    def error_body(self, status: int, error: dict[str, Any]) -> dict[str, Any]:
        """See ``Surface``."""
        return error_envelope(status, error["message"], error["type"], error["code"])

    # --------------------------------------------------------------------------------------- batches

    async def _create_batch(self, request: Request, project: str) -> Response:
        messages = self.messages
        encoding = request.headers.get("content-encoding", "identity").lower()
        if encoding != "identity":
            code = "request_body_encoding_unsupported"
            raise Refused(400, f"content-encoding {encoding[:40]!r} is not supported here", code=code)
        path = messages.new_body_path()
        target: IO[bytes] = await asyncio.to_thread(path.open, "wb")
        size, whole = 0, False
        try:
            pending = bytearray()
            async for chunk in request.stream():
                size += len(chunk)
                if size > messages.script.body_bytes:
                    message = f"Request exceeds the maximum size of {messages.script.body_bytes} bytes"
                    raise Refused(413, message, error_type="request_too_large")
                pending += chunk
                if len(pending) >= _FLUSH_BYTES:
                    await asyncio.to_thread(target.write, pending)
                    pending = bytearray()
            await asyncio.to_thread(target.write, pending)
            whole = True
        finally:
            await asyncio.to_thread(target.close)
            if not whole:
                await asyncio.to_thread(path.unlink, missing_ok=True)
        batch = await messages.create(project, request.headers["anthropic-version"], path)
        return self._shown_batch(request, batch)

    async def _retrieve_batch(self, request: Request, project: str) -> Response:
        await self.world.settle_patiently()
        return self._shown_batch(request, self.messages.look(project, request.path_params["batch_id"]))

    async def _cancel_batch(self, request: Request, project: str) -> Response:
        return self._shown_batch(request, await self.messages.cancel(project, request.path_params["batch_id"]))

    async def _delete_batch(self, request: Request, project: str) -> Response:
        await self.world.settle_patiently()
        batch_id = request.path_params["batch_id"]
        self.messages.delete(project, batch_id)
        return JSONResponse({"id": batch_id, "type": "message_batch_deleted"})

    async def _results(self, request: Request, project: str) -> Response:
        await self.world.settle_patiently()
        return Download(
            self.messages.results(project, request.path_params["batch_id"]), media_type="application/x-jsonl"
        )

    async def _list(self, request: Request, project: str) -> Response:
        query = request.query_params
        limit = _page_limit(query.get("limit"))
        await self.world.settle_patiently()
        batches = self.messages.list_all(project)
        ids = [batch.id for batch in batches]
        after, before = query.get("after_id"), query.get("before_id")
        if after is not None and before is not None:
            raise Refused(400, "after_id and before_id cannot be used together")
        if before is not None:
            end = _place(ids, before, "before_id")
            start = max(0, end - limit)
            page, has_more = batches[start:end], start > 0
        else:
            start = 0 if after is None else _place(ids, after, "after_id") + 1
            page, has_more = batches[start : start + limit], start + limit < len(batches)
        return JSONResponse(
            {
                "data": [self._rendered(request, batch) for batch in page],
                "has_more": has_more,
                "first_id": page[0].id if page else None,
                "last_id": page[-1].id if page else None,
            }
        )

    def _shown_batch(self, request: Request, batch: MessageBatch) -> Response:
        return JSONResponse(self._rendered(request, batch))

    def _rendered(self, request: Request, batch: MessageBatch) -> dict[str, Any]:
        """A batch as it looks now: its counters stand still until it has ended."""
        messages = self.messages
        status = "in_progress" if batch.cancel_at is None else "canceling"
        counts = dict.fromkeys(_PLACES, 0) | {"processing": batch.rows}
        results_url, archived_at = None, None
        if batch.ended_at is not None:
            status = "ended"
            counts = dict.fromkeys(_PLACES, 0) | batch.counts
            if messages.is_archived(batch):
                archived_at = batch.created_at + messages.script.results_kept_s
            else:
                origin = messages.script.results_origin or str(request.base_url).rstrip("/")
                results_url = f"{origin}{BATCHES}/{batch.id}/results"
        return {
            "id": batch.id,
            "type": "message_batch",
            "processing_status": status,
            "request_counts": counts,
            "created_at": _instant(batch.created_at),
            "expires_at": _instant(batch.expires_at),
            "ended_at": _instant(batch.ended_at),
            "cancel_initiated_at": _instant(batch.cancel_at),
            "archived_at": _instant(archived_at),
            "results_url": results_url,
        }

    # ------------------------------------------------------------------------------------------ sync

    async def _message(self, request: Request, project: str) -> Response | None:
        version = request.headers["anthropic-version"]
        try:
            with self.world.sync_gate.entered():
                params = _params(await read_body(request, self.world.scenario.limits.sync_body_bytes))
                paced = self.world.admit_sync(project, MESSAGES, params)
                end, outcome = self.messages.answer_now(params, version, request.headers.get("x-client-request-id", ""))
                await self.world.take_time()
        except Refused as refused:
            refused.headers = self._paced(refused.headers)
            raise
        if end is None:
            return None
        content = dump_json(end.body)
        if end.status == 200:
            if outcome is Outcome.EMPTY_BODY:
                content = b""
            elif outcome is Outcome.UNREADABLE:
                content = content[: len(content) * 3 // 5]
            elif outcome is Outcome.INVALID_UTF8:
                content = broken_utf8(end.body)
        return Response(content, end.status, self._paced(paced) | end.headers, media_type="application/json")

    def _paced(self, headers: Mapping[str, str]) -> dict[str, str]:
        """The headers of the gate in Anthropic's form: other names, and resets as instants."""
        made: dict[str, str] = {}
        for name, value in headers.items():
            found = re.fullmatch(r"x-ratelimit-(limit|remaining|reset)-(requests|tokens)", name)
            if found is None:
                made[name] = value
                continue
            what, kind = found.groups()
            made[f"anthropic-ratelimit-{kind}-{what}"] = self._reset_at(value) if what == "reset" else value
        return made

    def _reset_at(self, duration: str) -> str:
        at = self.world.clock.timestamp() + self.world.scenario.clock_ahead_s + _seconds(duration)
        return str(_instant(at))


def _params(text: bytes) -> dict[str, Any]:
    try:
        params = parse_json(text)
    except ValueError:
        params = None
    if not isinstance(params, dict):
        raise Refused(400, "The request body is not a JSON object.")
    if params.get("stream") not in {None, False}:
        raise Refused(400, "This simulator does not stream.")
    return params


def _page_limit(text: str | None) -> int:
    if text is None:
        return 20
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:9]) <= MAX_PAGE:
        raise Refused(400, f"limit: Input should be from 1 to {MAX_PAGE}")
    return int(text)


def _place(ids: list[str], cursor: str, name: str) -> int:
    try:
        return ids.index(cursor)
    except ValueError:
        raise Refused(400, f"{name}: no message batch has this id") from None


def _instant(at: float | None) -> str | None:
    if at is None:
        return None
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")


_UNITS_S = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}


def _seconds(duration: str) -> float:
    """Seconds of a duration such as ``6m0s`` or ``20ms``."""
    return sum(float(number) * _UNITS_S[unit] for number, unit in re.findall(r"([0-9.]+)(ms|h|m|s)", duration))
