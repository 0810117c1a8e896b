"""Broken, senseless and refused calls as ``CallFailed``: what does not depend on the words of one provider.

The word that matters most is ``is_definite``: the provider did nothing. It is said of a call that never left us, and of
a refusal status that came with the provider's *own* error body. A bare 403 or 429 page may come from a gateway that has
already passed the call on; for a create that makes the outcome unknown, which is the safe side.
"""

from __future__ import annotations

import re
from collections.abc import Set as AbstractSet
from datetime import datetime

import httpx

from batchferry.domain.provider import CallFailed, CallFailure
from batchferry.providers import http
from batchferry.providers.retries import Call
from batchferry.providers.shapes import safe_code
from batchferry.providers.verdicts import ErrorFacts

REFUSALS = frozenset({400, 401, 402, 403, 404, 413, 422, 429})
"""Statuses that, with the provider's own error body, say that nothing was done."""

GATEWAY_PAGE = "gateway_page"
"""Our code for a 404 that is some gateway's web page."""

_REQUEST_IDS = ("x-request-id", "apim-request-id", "x-kong-request-id", "mistral-correlation-id")
_OTHER_FAULT_OF_FILE_PARAM = frozenset({"missing_required_parameter", "invalid_type"})
_UNSEEN = re.compile(
    r"\b(?:no such|unknown|not found|not exist|not available|not have access|(?:cannot|can't|could not) find"
    r"|not (?:yet |been )?(?:ready|processed))\b",
    re.IGNORECASE,
)
_FILE = re.compile(r"\bfiles?\b", re.IGNORECASE)


def request_id(headers: httpx.Headers) -> str | None:
    """The provider's id of this call, for its support; some gateways have names of their own for it."""
    for name in _REQUEST_IDS:
        code = safe_code(headers.get(name))
        if code is not None:
            return code
    return None


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


def kind_of_status(status: int) -> CallFailure:
    """What a status says by itself."""
    if status >= 500 or status in {408, 425}:
        return CallFailure.UNAVAILABLE
    if status in {401, 402, 403, 407}:
        return CallFailure.ACCOUNT
    found = {404: CallFailure.NOT_FOUND, 409: CallFailure.CONFLICT, 429: CallFailure.THROTTLED}.get(status)
    return found or (CallFailure.REJECTED if 400 <= status < 500 else CallFailure.PROTOCOL)


def refused_call(
    call: Call,
    kind: CallFailure,
    status: int,
    headers: httpx.Headers,
    facts: ErrorFacts,
    now: datetime,
    *,
    code: str | None,
    is_definite: bool,
) -> CallFailed:
    """An answer other than 2xx, judged. A create whose refusal is not definite is unanswered, whatever its kind."""
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


def is_web_page(headers: httpx.Headers) -> bool:
    """Whether an answer is some gateway's page: taking its 404 for "gone" would give up what is still there."""
    return "html" in headers.get("content-type", "").lower()


def is_unseen_file(
    facts: ErrorFacts, file_id: str | None, file_params: AbstractSet[str], file_word: re.Pattern[str] = _FILE
) -> bool:
    """Whether a refused create says that it does not see the file which we have just uploaded.

    Args:
        facts: of the refusal.
        file_id: the file.
        file_params: parameters that are the file's.
        file_word: how a message names a file.
    """
    if (facts.code or "").lower() in _OTHER_FAULT_OF_FILE_PARAM:
        return False
    if facts.param == "file_id":
        return True
    names_it = (
        facts.param in file_params
        or (file_id is not None and file_id in facts.message)
        or file_word.search(facts.message) is not None
    )
    return names_it and _UNSEEN.search(facts.message) is not None
