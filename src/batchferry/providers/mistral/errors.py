"""Mistral's refused calls, translated once: HTTP status, error body and headers become a ``CallFailed``.

Four bodies are known: the API's flat error object, the framework's ``{"detail": ...}`` (a text, or a list of what is
wrong with a body), the front gateway's ``{"message", "request_id"}``, and ``{"error": {...}}`` of other gateways. The
front gateway answers 401, 403 and 429 before anything is passed on, so these are definite; its 404 means that the
address has no route, which says nothing about the file or job in it.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import httpx

from batchferry.domain.provider import CallFailed, CallFailure
from batchferry.domain.rows import RowClass
from batchferry.providers import failures
from batchferry.providers.mistral.classes import classify_row, is_queue_full, word_of
from batchferry.providers.retries import Call
from batchferry.providers.shapes import NotOurShape, body_error, error_facts, read_json
from batchferry.providers.verdicts import NO_FACTS, ErrorFacts

FILE_PARAMS = frozenset({"input_files", "input_files.0"})
_FRONT_MEMBERS = frozenset({"message", "request_id"})
_FRONT_REFUSALS = frozenset({401, 403, 429})


def _front_error(body: Any) -> ErrorFacts | None:
    """The error of the gateway in front, or None when this is another body."""
    if isinstance(body, dict) and body.get("message") and body.keys() <= _FRONT_MEMBERS:
        return error_facts(body)
    return None


def refused(
    call: Call, status: int, headers: httpx.Headers, body: bytes, now: datetime, file_id: str | None = None
) -> CallFailed:
    """An answer other than 2xx. ``file_id`` is the input file of a create."""
    try:
        value = read_json(body)
    except NotOurShape:
        value = None
    own, front = body_error(value), _front_error(value)
    facts = own or front or NO_FACTS
    is_definite = (own is not None and status in failures.REFUSALS) or (front is not None and status in _FRONT_REFUSALS)
    kind, code = _kind(call, status, facts, file_id), word_of(facts)
    if status == 404 and own is None and (front is not None or failures.is_web_page(headers)):
        kind, code = CallFailure.UNAVAILABLE, failures.GATEWAY_PAGE
    return failures.refused_call(call, kind, status, headers, facts, now, code=code, is_definite=is_definite)


def _kind(call: Call, status: int, facts: ErrorFacts, file_id: str | None) -> CallFailure:
    if (
        call is Call.CREATE
        and status in {400, 404, 422}
        and failures.is_unseen_file(facts._replace(code=word_of(facts)), file_id, FILE_PARAMS)
    ):
        return CallFailure.NOT_READY
    if call is Call.CREATE and status in failures.REFUSALS and is_queue_full(facts.message):
        return CallFailure.THROTTLED
    if status == 403 and classify_row(status, facts).row_class is not RowClass.ACCOUNT:
        return CallFailure.REJECTED  # a prompt that a guardrail stopped, or a model outside the account's tier
    return failures.kind_of_status(status)
