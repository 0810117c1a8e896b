"""Refused and broken calls, translated once: HTTP status, error body and headers become a ``CallFailed``.

The word that matters most is ``is_definite``: the provider did nothing. It is said of a call that never left us,
and of a refusal status that came with the provider's *own* error body. A bare 403 or 429 page may come from a
gateway that has already passed the call on; for a create that makes the outcome unknown, which is the safe side.
"""

from __future__ import annotations

import re
from datetime import datetime

import httpx

from batchferry.domain.provider import CallFailed, CallFailure
from batchferry.providers import http
from batchferry.providers.openai.classes import ACCOUNT_CODES, FILE_PARAMS, NO_FACTS, ErrorFacts
from batchferry.providers.openai.wire import NotOurShape, body_error, read_json, safe_code
from batchferry.providers.retries import Call

REFUSALS = frozenset({400, 401, 403, 404, 413, 422, 429})
"""Statuses that, with the provider's own error body, say that nothing was done."""

GATEWAY_PAGE = "gateway_page"
"""Our code for a 404 that is some gateway's web page."""

_OTHER_FAULT_OF_FILE_PARAM = frozenset({"missing_required_parameter", "invalid_type"})
_UNSEEN = re.compile(
    r"\b(?:no such|unknown|not found|not exist|not available|not have access|(?:cannot|can't|could not) find)\b",
    re.IGNORECASE,
)
_FILE = re.compile(r"\bfile\b", re.IGNORECASE)


def request_id(headers: httpx.Headers) -> str | None:
    """The provider's id of this call, for its support."""
    return safe_code(headers.get("x-request-id"))


def broken(call: Call, fault: http.Fault) -> CallFailed:
    """A call without a whole answer."""
    if fault.never_sent:
        return CallFailed(call, CallFailure.UNAVAILABLE, code=fault.code, is_definite=True)
    if call is Call.CREATE or (call is Call.ANSWER and not fault.makes_no_sense):
        return CallFailed(call, CallFailure.UNANSWERED, code=fault.code)
    return CallFailed(call, CallFailure.PROTOCOL if fault.makes_no_sense else CallFailure.UNAVAILABLE, code=fault.code)


def nonsense(call: Call, status: int, headers: httpx.Headers, code: str) -> CallFailed:
    """A 2xx whose body is not what was asked for. A create may well have been carried out."""
    kind = CallFailure.UNANSWERED if call is Call.CREATE else CallFailure.PROTOCOL
    return CallFailed(call, kind, http_status=status, code=code, request_id=request_id(headers))


def refused(
    call: Call, status: int, headers: httpx.Headers, body: bytes, now: datetime, file_id: str | None = None
) -> CallFailed:
    """An answer other than 2xx. ``file_id`` is the input file of a create."""
    try:
        facts = body_error(read_json(body))
    except NotOurShape:
        facts = None
    is_own = facts is not None
    facts = facts or NO_FACTS
    is_definite = is_own and status in REFUSALS
    code = facts.code or facts.type
    kind = _kind(call, status, facts, file_id)
    if status == 404 and not is_own and "html" in headers.get("content-type", "").lower():
        # A web page is some gateway's. Taking it for "gone" would let a batch start from a file we believe deleted.
        kind, code = CallFailure.UNAVAILABLE, GATEWAY_PAGE
    if call is Call.CREATE and not is_definite:
        kind = CallFailure.UNANSWERED
    return CallFailed(
        call,
        kind,
        http_status=status,
        code=code,
        message=facts.message,
        param=facts.param,
        retry_after_s=http.retry_after_s(headers, now),
        request_id=request_id(headers),
        is_definite=is_definite,
    )


def _kind(call: Call, status: int, facts: ErrorFacts, file_id: str | None) -> CallFailure:
    if status >= 500 or status in {408, 425}:
        return CallFailure.UNAVAILABLE
    if status in {401, 402, 403, 407} or {(facts.code or "").lower(), (facts.type or "").lower()} & ACCOUNT_CODES:
        return CallFailure.ACCOUNT
    if status == 429:
        return CallFailure.THROTTLED
    if call is Call.CREATE and status in {400, 404} and _is_unseen_file(facts, file_id):
        return CallFailure.NOT_READY
    if status == 404:
        return CallFailure.NOT_FOUND
    if status == 409:
        return CallFailure.CONFLICT
    return CallFailure.REJECTED if 400 <= status < 500 else CallFailure.PROTOCOL


def _is_unseen_file(facts: ErrorFacts, file_id: str | None) -> bool:
    """Whether a refused create says that it does not see the file which we have just uploaded."""
    if (facts.code or "").lower() in _OTHER_FAULT_OF_FILE_PARAM:
        return False
    if facts.param == "file_id":
        return True
    names_it = (
        facts.param in FILE_PARAMS
        or (file_id is not None and file_id in facts.message)
        or _FILE.search(facts.message) is not None
    )
    return names_it and _UNSEEN.search(facts.message) is not None
