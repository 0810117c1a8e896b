"""Refused calls, translated once: HTTP status, error body and headers become a ``CallFailed``.

What does not depend on Anthropic's words stands in ``providers.failures``. ``is_definite`` says that the provider did
nothing: here, that a refusal status came with the provider's *own* error body. A bare page may be a gateway's, which
has already passed the call on; only a 413 is believed whoever sends it.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx

from batchferry.domain.provider import CallFailed, CallFailure, PaceHints
from batchferry.domain.rows import RowClass
from batchferry.providers import http
from batchferry.providers.anthropic.classes import classify
from batchferry.providers.anthropic.wire import error_facts, is_envelope, request_id_of
from batchferry.providers.failures import GATEWAY_PAGE
from batchferry.providers.retries import Call
from batchferry.providers.shapes import NotOurShape, read_instant, read_json, safe_code
from batchferry.providers.verdicts import NO_FACTS, ErrorFacts

REFUSALS = frozenset({400, 401, 402, 403, 404, 413, 422, 429})
"""Statuses that, with the provider's own error body, say that nothing was done."""

_ROW = re.compile(r"\brequests\.(\d{1,7})\b")
"""A row as a refused create names it, such as ``requests.3.custom_id``; 0-based. Seen in anthropic-sdk-python#984."""


def request_id(headers: httpx.Headers) -> str | None:
    """The provider's id of this call, for its support."""
    return safe_code(headers.get("request-id"))


def refused(
    call: Call,
    status: int,
    headers: httpx.Headers,
    body: bytes,
    now: datetime,
    _file_id: str | None = None,
) -> CallFailed:
    """An answer other than 2xx; of a refused create with the row that it names."""
    try:
        envelope = read_json(body)
    except NotOurShape:
        envelope = None
    is_own = is_envelope(envelope)
    facts = error_facts(envelope) if is_own else NO_FACTS
    hint_s = http.retry_after_s(headers, now)
    # A body that is too large is turned away by whoever stands in front and is not passed on, so there is no batch, and
    # half of it may be taken (at Anthropic this is Cloudflare: https://platform.claude.com/docs/en/api/errors).
    is_definite = (is_own and status in REFUSALS) or status == 413
    kind, code = _kind(status, facts), facts.code or facts.type
    if status == 404 and not is_own and "html" in headers.get("content-type", "").lower():
        kind, code = CallFailure.UNAVAILABLE, GATEWAY_PAGE
    if call is Call.CREATE and not is_definite:
        kind = CallFailure.UNANSWERED
    return CallFailed(
        call,
        kind,
        http_status=status,
        code=code,
        message=facts.message,
        retry_after_s=hint_s,
        request_id=request_id(headers) or request_id_of(envelope),
        is_definite=is_definite,
        row=_named_row(facts) if call is Call.CREATE and status == 400 else None,
    )


def _kind(status: int, facts: ErrorFacts) -> CallFailure:
    if status in {401, 402, 403, 407}:
        return CallFailure.ACCOUNT
    if facts is not NO_FACTS and classify(status, facts).row_class is RowClass.ACCOUNT:
        # Also an empty purse behind a 400, and a spend limit behind a 429: neither ends by waiting.
        return CallFailure.ACCOUNT
    if status >= 500 or status in {408, 425}:
        return CallFailure.UNAVAILABLE
    return _BY_STATUS.get(status, CallFailure.REJECTED if 400 <= status < 500 else CallFailure.PROTOCOL)


_BY_STATUS = {404: CallFailure.NOT_FOUND, 409: CallFailure.CONFLICT, 429: CallFailure.THROTTLED}


def _named_row(facts: ErrorFacts) -> int | None:
    """The first row that a refused create names."""
    found = _ROW.search(facts.message)
    return int(found.group(1)) if found else None


def pace_hints(headers: httpx.Headers, now: datetime) -> PaceHints:
    """What an answer says of how fast calls may follow; every header may be missing.

    The resets are instants, read against the answer's own ``Date``. Without a figure for all tokens the scarcer of
    input and output counts. Names and forms: Anthropic's page on rate limits.
    """
    tokens = min(
        (
            (left, _reset_s(headers, kind, now))
            for kind in ("tokens", "input-tokens", "output-tokens")
            if (left := _left(headers, kind)) is not None
        ),
        key=lambda pair: pair[0],
        default=(None, None),
    )
    return PaceHints(
        calls_left=_left(headers, "requests"),
        calls_reset_s=_reset_s(headers, "requests", now),
        tokens_left=tokens[0],
        tokens_reset_s=tokens[1],
        retry_after_s=http.retry_after_s(headers, now),
    )


def _left(headers: httpx.Headers, kind: str) -> int | None:
    text = headers.get(f"anthropic-ratelimit-{kind}-remaining", "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def _date(text: str | None) -> datetime | None:
    try:
        return parsedate_to_datetime(text).astimezone(UTC) if text else None
    except ValueError:
        return None


def _reset_s(headers: httpx.Headers, kind: str, now: datetime) -> float | None:
    at = read_instant(headers.get(f"anthropic-ratelimit-{kind}-reset"))
    if at is None:
        return None
    since = _date(headers.get("date")) or now
    return min(max((at.astimezone(UTC) - since).total_seconds(), 0.0), http.MAX_HINT_S)
