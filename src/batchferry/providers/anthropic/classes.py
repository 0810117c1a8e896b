"""How a row's end at Anthropic is judged: its words; the walk over them is ``verdicts.RowTables``.

An error names its ``type`` and, for some, a code in ``details.error_code``. The type ``invalid_request_error`` covers
far more than faults of the request (an empty purse among them), so there the message is looked at, although its
wording may change: what is not recognised fails the row, which is visible, and blames nobody else.

``not_found_error`` in a row is nearly always the model; the message then is its name behind ``model:``.

Sources: the types of the official Python client 2.14.0 and Anthropic's page on errors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from batchferry.domain.batcherrors import BatchErrorKind
from batchferry.domain.provider import LineError
from batchferry.domain.rows import RowClass
from batchferry.providers.verdicts import ErrorFacts, RowTables, Verdict

ACCOUNT_CODES = frozenset(
    {
        "enforced_spend_limit_reached",
        "contract_spend_limit_reached",
        "linked_organization_spend_limit_reached",
        "linked_organization_billing_unavailable",
        "organization_on_hold",
        "organization_type_not_supported",
        "parent_organization_required",
        "workspace_human_review_disabled",
        "cmek_key_disabled",
        "cmek_key_network_blocked",
        "sandbox_egress_restricted",
    }
)
"""Codes that speak about the account whatever the status: waiting does not help, a person must act."""
SPEND_LIMIT_ENDING = "_spend_limit_reached"
"""Ends every code of a spend limit, those to come included. With one of them a 429 is no matter of pace."""


def _each(row_class: RowClass, *words: str) -> dict[str, RowClass]:
    return dict.fromkeys(words, row_class)


CODES: Mapping[str, RowClass] = MappingProxyType(
    dict.fromkeys(ACCOUNT_CODES, RowClass.ACCOUNT)
    | _each(RowClass.TRANSIENT, "ramp_limit_exceeded", "cmek_context_unavailable", "cmek_key_unreachable")
    | _each(RowClass.TOO_LONG, "request_body_too_large_after_decoding")
    | _each(RowClass.INVALID_REQUEST, "request_body_encoding_invalid", "request_body_encoding_unsupported")
)
TYPES: Mapping[str, RowClass] = MappingProxyType(
    _each(RowClass.ACCOUNT, "authentication_error", "permission_error", "billing_error")
    | _each(
        RowClass.TRANSIENT,
        "rate_limit_error",
        "api_error",
        "overloaded_error",
        "timeout_error",
        "conflict_error",
    )
    | _each(RowClass.TOO_LONG, "request_too_large")
)
GENERIC_WORDS: Mapping[str, RowClass] = MappingProxyType(
    _each(RowClass.INVALID_REQUEST, "invalid_request_error", "not_found_error")
)
"""Types that say no more than that the request is at fault: the message goes before them."""
FRAGMENTS: tuple[tuple[re.Pattern[str], RowClass], ...] = (
    (re.compile(r"credit balance|usage limits?\b", re.IGNORECASE), RowClass.ACCOUNT),
    (
        re.compile(r"prompt is too long|exceeds? (?:the )?(?:model's )?context (?:window|limit)", re.IGNORECASE),
        RowClass.TOO_LONG,
    ),
    (re.compile(r"content[ _-]filter|(?:usage|content) polic(?:y|ies)", re.IGNORECASE), RowClass.CONTENT_FILTERED),
    (re.compile(r"\Amodel: "), RowClass.MODEL_UNAVAILABLE),
)

TABLES = RowTables(codes=CODES, types=TYPES, generic_words=GENERIC_WORDS, fragments=FRAGMENTS)

TYPE_STATUSES: Mapping[str, int] = MappingProxyType(
    {
        "invalid_request_error": 400,
        "authentication_error": 401,
        "billing_error": 402,
        "permission_error": 403,
        "not_found_error": 404,
        "conflict_error": 409,
        "request_too_large": 413,
        "rate_limit_error": 429,
        "api_error": 500,
        "timeout_error": 504,
        "overloaded_error": 529,
    }
)
"""The HTTP status with which a single call gets an error of this type: lines of a batch do not name one."""

TRUNCATED_REASONS = frozenset({"max_tokens", "model_context_window_exceeded"})
"""``stop_reason`` of a cut answer."""
PENDING_REASONS = frozenset({"tool_use", "pause_turn"})
"""``stop_reason`` of an answer that waits for the next request: a tool's result, or leave to go on. A tool that the
request forced by its ``tool_choice`` ends with ``tool_use`` as well, and no line repeats the request: so a forced call
is flagged too."""
REFUSED_REASON = "refusal"
ENDED_REASONS = frozenset({"end_turn", "stop_sequence"})
"""``stop_reason`` of a model that ended by itself."""


def classify(http_status: int | None, facts: ErrorFacts) -> Verdict:
    """Judge a row that did not succeed; ``http_status`` None when there was no HTTP answer."""
    if (facts.code or "").lower().endswith(SPEND_LIMIT_ENDING):
        return Verdict(RowClass.ACCOUNT)
    if http_status == 413:  # a page of whoever stands in front names no type
        return Verdict(RowClass.TOO_LONG)
    return TABLES.classify(http_status, facts)


def classify_batch_error(error: LineError) -> BatchErrorKind:
    """What an entry of a failed batch's error list is about; batches here never fail as a whole, so none is known."""
    return BatchErrorKind.UNKNOWN if error.line is None else BatchErrorKind.ROW
