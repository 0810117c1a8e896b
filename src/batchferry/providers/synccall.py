"""One row at the ordinary endpoint: sent once, judged like a line of a result file, read for what it says of the pace.

The calls have connections of their own, so that a hundred slow answers never keep a poll waiting, and none of them
is kept alive: a kept-alive connection that the server has just closed would leave a call without a clear end, and
its row would perhaps be paid twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

import httpx
import msgspec

from batchferry.domain.provider import CallFailure, PaceHints
from batchferry.domain.rows import ResultLine, RowClass, SyncAnswer
from batchferry.providers import failures, http
from batchferry.providers.calls import Refuse
from batchferry.providers.retries import Call

_BROKEN_CLASSES = {"answer_too_large": RowClass.OUTCOME_TOO_LARGE}
"""Classes of calls without a whole answer, by code; every other one is transient. The size will not change."""
_DEADLINE = "call_timeout"

Judge = Callable[[int, str | None, bytes, str], ResultLine]
"""Judges a whole answer: status, the provider's id of the call, body and endpoint."""


def endpoint_address(base_url: str, endpoint: str) -> str:
    """The address of an endpoint such as ``/v1/chat/completions`` under a base that names the version already.

    The base's own version stands (``https://host/v1``, ``https://host/openai/v1beta``, or none at all): only what
    follows the endpoint's version is put behind it.
    """
    path = endpoint.lstrip("/")
    version, _, rest = path.partition("/")
    if rest and version[:1] == "v" and version[1:2].isdigit():
        path = rest
    return f"{base_url.rstrip('/')}/{path}"


@dataclass(frozen=True, slots=True)
class SyncCaller:
    """Makes the calls of one account. ``note`` is told the headers of every answer."""

    client: httpx.AsyncClient
    base_url: str
    headers: dict[str, str] = field(repr=False)
    query: dict[str, str] = field(repr=False)
    max_answer_bytes: int
    is_watched: bool
    """Whether the transport names its events: then a call that never left us can be told from one that did."""
    now: Callable[[], datetime]
    note: Callable[[httpx.Headers, datetime], None]
    refuse: Refuse
    judge: Judge
    pace_hints: Callable[[httpx.Headers, datetime], PaceHints] = http.pace_hints
    request_id: Callable[[httpx.Headers], str | None] = failures.request_id

    async def call(self, endpoint: str, body: bytes, timeout_s: float, address: str | None = None) -> SyncAnswer:
        """As ``BatchProvider.answer`` says; ``address`` stands in for the endpoint's own."""
        watch = http.SendWatch()
        request = self.client.build_request(
            "POST",
            address or endpoint_address(self.base_url, endpoint),
            params=self.query,
            content=body,
            headers={"accept": "application/json", **self.headers, "content-type": "application/json"},
            extensions={"trace": watch.note} if self.is_watched else {},
        )
        # An answer that is not streamed begins when it is finished: only the whole call has a deadline.
        request.extensions["timeout"] = request.extensions["timeout"] | {"read": None, "pool": None}
        response: httpx.Response | None = None
        try:
            async with asyncio.timeout(timeout_s):
                response = await self.client.send(request, stream=True)
                try:
                    self.note(response.headers, self.now())
                    content = await http.read_whole(response, self.max_answer_bytes)
                finally:
                    await response.aclose()
        except http.BREAKS as error:
            fault = http.fault_of(error)
            if response is not None and not response.is_success:
                # The status alone does not say whether it is about the row (a filter, its length) or about us.
                line = ResultLine("", RowClass.TRANSIENT, response.status_code, code=fault.code)
                failure = self.refuse(Call.ANSWER, response.status_code, response.headers, b"", self.now(), None)
                return SyncAnswer(line, failure, self.pace_hints(response.headers, self.now()))
            if fault.code == _DEADLINE and self.is_watched and not watch.has_sent:
                fault = fault._replace(never_sent=True)
            row_class = _BROKEN_CLASSES.get(fault.code, RowClass.TRANSIENT)
            return SyncAnswer(ResultLine("", row_class, code=fault.code), failures.broken(Call.ANSWER, fault))
        hints = self.pace_hints(response.headers, self.now())
        if response.is_success:
            request_id = self.request_id(response.headers)
            return SyncAnswer(self.judge(response.status_code, request_id, content, endpoint), None, hints)
        failure = self.refuse(Call.ANSWER, response.status_code, response.headers, content, self.now(), None)
        if failure.code == failures.GATEWAY_PAGE:
            # Nobody who knows the row has seen it.
            line = ResultLine("", RowClass.TRANSIENT, response.status_code, failure.request_id, code=failure.code)
        else:
            line = self.judge(response.status_code, failure.request_id, content, endpoint)
            if failure.kind is CallFailure.NOT_FOUND and line.row_class is RowClass.INVALID_REQUEST:
                # There is no such endpoint, or no such address: nobody has looked at the row.
                line = msgspec.structs.replace(line, row_class=RowClass.MODEL_UNAVAILABLE)
        return SyncAnswer(line, failure, hints)
