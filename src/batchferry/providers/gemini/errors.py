"""Refused calls, translated once: HTTP status, Google's error body and headers become a ``CallFailed``."""

from __future__ import annotations

import re
from datetime import datetime

import httpx

from batchferry.domain.provider import CallFailed, CallFailure
from batchferry.providers import http
from batchferry.providers.failures import GATEWAY_PAGE, is_web_page, kind_of_status, request_id
from batchferry.providers.gemini.classes import (
    ACCOUNT_WORDS,
    GONE_FILE,
    NO_FACTS,
    REASONS,
    UNKNOWN_MODEL,
    ErrorFacts,
    body_error,
)
from batchferry.providers.retries import Call
from batchferry.providers.shapes import NotOurShape, read_json

REFUSALS = frozenset({400, 401, 402, 403, 404, 409, 413, 422, 429})
"""Statuses that, with Google's own error body, say that nothing was done."""

_FILE = re.compile(r"\bfiles?\b", re.IGNORECASE)


def refused(
    call: Call,
    status: int,
    headers: httpx.Headers,
    body: bytes,
    now: datetime,
    file_id: str | None = None,  # noqa: ARG001 (messages name files by other words than their ids)
) -> CallFailed:
    """An answer other than 2xx."""
    try:
        facts = body_error(read_json(body))
    except NotOurShape:
        facts = None
    is_own = facts is not None
    facts = facts or NO_FACTS
    is_definite = is_own and status in REFUSALS
    kind, code = _kind(call, status, facts), facts.code
    if status == 404 and not is_own and is_web_page(headers):
        # Taking a gateway's page for "gone" would let a batch start from a file we believe deleted.
        kind, code = CallFailure.UNAVAILABLE, GATEWAY_PAGE
    if call is Call.CREATE and not is_definite:
        kind = CallFailure.UNANSWERED
    hint_s = http.retry_after_s(headers, now)
    return CallFailed(
        call,
        kind,
        http_status=status,
        code=code,
        message=facts.message,
        retry_after_s=facts.retry_after_s if hint_s is None else hint_s,
        request_id=request_id(headers),
        is_definite=is_definite,
    )


def _kind(call: Call, status: int, facts: ErrorFacts) -> CallFailure:
    kind = kind_of_status(status)
    if kind in {CallFailure.UNAVAILABLE, CallFailure.PROTOCOL} or status == 499:
        return CallFailure.UNAVAILABLE if status == 499 else kind
    if facts.reason in REASONS or ACCOUNT_WORDS.search(facts.message):
        return CallFailure.ACCOUNT
    if GONE_FILE.search(facts.message):
        # Also the words for a file that is not there yet.
        return CallFailure.NOT_READY if call is Call.CREATE else CallFailure.NOT_FOUND
    if facts.status == "FAILED_PRECONDITION":
        if call is Call.CREATE:
            return CallFailure.NOT_READY  # the file is still being processed
        return CallFailure.CONFLICT if call is Call.CANCEL else kind
    if status == 404 and call is Call.CREATE:
        is_file = _FILE.search(facts.message) and not UNKNOWN_MODEL.search(facts.message)
        return CallFailure.NOT_READY if is_file else CallFailure.REJECTED
    return kind
