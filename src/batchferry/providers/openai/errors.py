"""Refused calls of OpenAI-shaped servers, translated once: HTTP status, error body and headers become a ``CallFailed``.

What does not depend on the words of this family stands in ``providers.failures``.
"""

from __future__ import annotations

import re
from datetime import datetime

import httpx

from batchferry.domain.provider import CallFailed, CallFailure
from batchferry.providers import failures
from batchferry.providers.openai.classes import ACCOUNT_CODES, FILE_PARAMS, is_queue_full
from batchferry.providers.retries import Call
from batchferry.providers.shapes import NotOurShape, body_error, read_json
from batchferry.providers.verdicts import NO_FACTS, ErrorFacts

_FILE = re.compile(r"\bfile\b", re.IGNORECASE)
"""Not in the plural: ``files`` is the name of an address here, which an unknown one's refusal may quote."""


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
    kind, code = _kind(call, status, facts, file_id), facts.code or facts.type
    if status == 404 and not is_own and failures.is_web_page(headers):
        # Taking a gateway's page for "gone" would let a batch start from a file we believe deleted.
        kind, code = CallFailure.UNAVAILABLE, failures.GATEWAY_PAGE
    is_definite = is_own and status in failures.REFUSALS
    return failures.refused_call(call, kind, status, headers, facts, now, code=code, is_definite=is_definite)


def _kind(call: Call, status: int, facts: ErrorFacts, file_id: str | None) -> CallFailure:
    kind = failures.kind_of_status(status)
    if kind is CallFailure.UNAVAILABLE:
        return kind
    if {(facts.code or "").lower(), (facts.type or "").lower()} & ACCOUNT_CODES:
        return CallFailure.ACCOUNT
    if call is Call.CREATE and status in failures.REFUSALS and is_queue_full(facts.code, facts.message):
        return CallFailure.THROTTLED
    if call is Call.CREATE and status in {400, 404} and failures.is_unseen_file(facts, file_id, FILE_PARAMS, _FILE):
        return CallFailure.NOT_READY
    return kind
