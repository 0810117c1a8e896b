"""The simulator's own API under ``/_sim``: bill, state, clock, faults and gates, for tests in other processes.

| call | what |
|---|---|
| ``GET /_sim/state`` | files, batches by status, enqueued tokens |
| ``GET /_sim/bill`` | totals; see ``Bill.summary`` |
| ``GET /_sim/bill/rows?start=&limit=`` | one page of custom ids with their counts, and ``next`` |
| ``GET /_sim/bill/rows.jsonl`` | all of them, one JSON value a line |
| ``GET /_sim/bill/bodies/{sha256}`` | counts of the body with this identity; see ``body_digest`` |
| ``GET /_sim/clock``; ``POST {"advance_s": n}`` | the clock; moving it is for manual clocks |
| ``GET, POST, DELETE /_sim/faults``; ``DELETE /_sim/faults/{number}`` | rules in force; POST takes one or a list |
| ``GET /_sim/gate/{name}?count=&wait_s=`` | waits (30 s at most) until that many calls came to the gate |
| ``POST /_sim/gate/{name}/release`` | opens it, or lets ``{"count": n}`` calls through |
| ``GET /_sim/webhooks?limit=`` | where webhooks go and how the newest deliveries fared; no secrets |
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from batchferry.simulator.app import Activity
from batchferry.simulator.bill import RowCount
from batchferry.simulator.clock import ManualSimClock
from batchferry.simulator.faults import FaultPlan, FaultRule
from batchferry.simulator.jsontext import dump_json, parse_json
from batchferry.simulator.webhooks import WebhookSender
from batchferry.simulator.world import World

_MAX_PAGE_ROWS = 10_000
_MAX_WAIT_S = 30.0
_RULES: TypeAdapter[list[FaultRule]] = TypeAdapter(list[FaultRule])

Handler = Callable[[Request], Awaitable[Response]]


class _BadCall(Exception):
    """The admin call is wrong; the text says how."""


class Admin:
    """The handlers of ``/_sim``."""

    def __init__(
        self, world: World, faults: FaultPlan, activity: Activity, webhooks: WebhookSender | None = None
    ) -> None:
        self._world = world
        self._faults = faults
        self._activity = activity
        self._webhooks = webhooks

    def routes(self) -> list[Route]:
        """Every admin call with its path."""
        table: list[tuple[str, str, Handler]] = [
            ("GET", "/_sim/state", self._state),
            ("GET", "/_sim/bill", self._bill),
            ("GET", "/_sim/bill/rows", self._bill_rows),
            ("GET", "/_sim/bill/rows.jsonl", self._bill_stream),
            ("GET", "/_sim/bill/bodies/{digest}", self._bill_body),
            ("GET", "/_sim/clock", self._clock),
            ("POST", "/_sim/clock", self._move_clock),
            ("GET", "/_sim/faults", self._show_faults),
            ("POST", "/_sim/faults", self._put_faults),
            ("DELETE", "/_sim/faults", self._clear_faults),
            ("DELETE", "/_sim/faults/{number:int}", self._take_fault_away),
            ("GET", "/_sim/gate/{name}", self._gate),
            ("POST", "/_sim/gate/{name}/release", self._release),
            ("GET", "/_sim/webhooks", self._show_webhooks),
        ]
        return [Route(path, self._guarded(handler), methods=[method]) for method, path, handler in table]

    def _guarded(self, handler: Handler) -> Handler:
        async def call(request: Request) -> Response:
            with self._activity.request():
                try:
                    return await handler(request)
                except _BadCall as error:
                    return JSONResponse({"error": str(error)}, 400)

        return call

    async def _state(self, request: Request) -> Response:
        del request
        await self._world.settle()
        state, now = self._world.state, self._world.clock.timestamp()
        statuses = Counter(batch.status.value for batch in state.batches.values())
        models = {batch.model for batch in state.batches.values() if batch.model is not None}
        return JSONResponse(
            {
                "now": self._world.clock.now().isoformat(),
                "files": sum(file.is_there(now) for file in state.files.values()),
                "batches": len(state.batches),
                "batches_by_status": dict(sorted(statuses.items())),
                "enqueued_tokens": {model: self._world.enqueued_tokens(model, now) for model in sorted(models)},
            }
        )

    async def _bill(self, request: Request) -> Response:
        del request
        await self._world.settle()
        return JSONResponse(self._world.state.bill.summary())

    async def _bill_rows(self, request: Request) -> Response:
        start, limit = _number(request, "start", 0), _number(request, "limit", 1_000)
        if not 1 <= limit <= _MAX_PAGE_ROWS:
            raise _BadCall(f"limit must be from 1 to {_MAX_PAGE_ROWS}")
        await self._world.settle()
        page = self._world.state.bill.page(start, limit)
        following = start + len(page) if len(page) == limit else None
        return JSONResponse({"rows": [_shown(*row) for row in page], "next": following})

    async def _bill_stream(self, request: Request) -> Response:
        del request
        await self._world.settle()
        bill = self._world.state.bill

        async def lines() -> AsyncIterator[bytes]:
            # By pages, since rows may be booked while the caller reads.
            start = 0
            while page := bill.page(start, _MAX_PAGE_ROWS):
                start += len(page)
                yield b"".join(dump_json(_shown(*row)) + b"\n" for row in page)

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    async def _bill_body(self, request: Request) -> Response:
        digest = request.path_params["digest"]
        if len(digest) != 64 or any(character not in "0123456789abcdef" for character in digest):
            raise _BadCall("the identity of a body is 64 hexadecimal digits")
        await self._world.settle()
        return JSONResponse(self._world.state.bill.body_of_digest(digest)._asdict())

    async def _clock(self, request: Request) -> Response:
        del request
        return JSONResponse(self._world.clock.describe())

    async def _move_clock(self, request: Request) -> Response:
        clock = self._world.clock
        if not isinstance(clock, ManualSimClock):
            raise _BadCall("this clock runs by itself: start the simulator with a manual one to move it")
        seconds = (await _object(request)).get("advance_s")
        if not isinstance(seconds, int | float) or isinstance(seconds, bool) or seconds < 0:
            raise _BadCall("advance_s must be a number of seconds, 0 or more")
        clock.advance(seconds)
        return JSONResponse(clock.describe())

    async def _show_faults(self, request: Request) -> Response:
        del request
        return JSONResponse(self._faults.describe())

    async def _put_faults(self, request: Request) -> Response:
        try:
            given = parse_json(await request.body())
            rules = _RULES.validate_python(given if isinstance(given, list) else [given])
        except ValidationError as error:
            faults = "; ".join(f"{fault['loc']}: {fault['msg']}" for fault in error.errors())
            raise _BadCall(f"no fault rule: {faults}") from error
        except ValueError as error:
            raise _BadCall("the body must be JSON: a fault rule or a list of them") from error
        return JSONResponse({"numbers": [self._faults.put(rule) for rule in rules]})

    async def _clear_faults(self, request: Request) -> Response:
        del request
        self._faults.clear()
        return JSONResponse(self._faults.describe())

    async def _take_fault_away(self, request: Request) -> Response:
        number = request.path_params["number"]
        return JSONResponse({"found": self._faults.take_away(number)})

    async def _gate(self, request: Request) -> Response:
        gate = self._faults.gate(request.path_params["name"])
        count, wait_s = _number(request, "count", 1), min(float(_number(request, "wait_s", 0)), _MAX_WAIT_S)
        reached = gate.waiting + gate.passed >= count
        if not reached and wait_s > 0:
            try:
                await asyncio.wait_for(gate.reached(count), wait_s)
                reached = True
            except TimeoutError:
                pass
        return JSONResponse({"waiting": gate.waiting, "passed": gate.passed, "reached": reached})

    async def _release(self, request: Request) -> Response:
        count = (await _object(request)).get("count")
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise _BadCall("count must be an integer above 0, or absent to open the gate for good")
        gate = self._faults.gate(request.path_params["name"])
        await gate.release(count)
        return JSONResponse({"waiting": gate.waiting, "passed": gate.passed})

    async def _show_webhooks(self, request: Request) -> Response:
        limit = _number(request, "limit", 1_000)
        if limit > _MAX_PAGE_ROWS:
            raise _BadCall(f"limit must be at most {_MAX_PAGE_ROWS}")
        return JSONResponse(None if self._webhooks is None else self._webhooks.describe(limit))


async def _object(request: Request) -> dict[str, Any]:
    text = await request.body()
    try:
        value = parse_json(text) if text else {}
    except ValueError as error:
        raise _BadCall("the body must be JSON") from error
    if not isinstance(value, dict):
        raise _BadCall("the body must be a JSON object")
    return value


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()) or len(text) > 12:
        raise _BadCall(f"{name} must be a whole number, 0 or more")
    return int(text)


def _shown(wire_id: str, count: RowCount) -> dict[str, Any]:
    return {"wire_id": wire_id, **count._asdict()}
