"""How a row's end, and a whole batch's refusal, are judged: tables, read from top to bottom.

A row is judged by the first of these that knows it:

1. the code inside the error (or, when no HTTP answer was had, the line's outer code): ``CODES``, then
   ``CODE_PREFIXES``;
2. the error's type: ``TYPES``;
3. a piece of the error's message, on a 4xx only: ``FRAGMENTS``;
4. the HTTP status: ``STATUS_CLASSES``, then its hundred;
5. without a status: ``TRANSIENT``, worth one more try.

So an **unknown code** takes the class of its status (a 4xx is about the row, a 5xx is not), and an unknown outer
code is transient. Codes and types are compared in lower case. The codes are those of OpenAI, Azure, DashScope and
the open-source servers with the same shapes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from batchferry.domain.batcherrors import BatchErrorKind
from batchferry.domain.rows import RowClass

ACCOUNT_CODES = frozenset(
    {
        "insufficient_quota",
        "credit_balance_exhausted",
        "organization_spend_limit_exceeded",
        "project_spend_limit_exceeded",
        "organization_usage_limit_exceeded",
        "billing_hard_limit_reached",
        "billing_not_active",
        "invalid_api_key",
        "account_deactivated",
        "unsupported_country_region_territory",
        "arrearage",
    }
)
"""Codes that speak about the account whatever the status: waiting or repeating does not help, a person must act."""

CODES: Mapping[str, RowClass] = MappingProxyType(
    dict.fromkeys(ACCOUNT_CODES, RowClass.ACCOUNT)
    | {
        # Outer codes: the row never had an HTTP answer.
        "batch_expired": RowClass.EXPIRED,
        "batch_cancelled": RowClass.CANCELLED,
        "batch_canceled": RowClass.CANCELLED,
        "request_timeout": RowClass.TRANSIENT,
        # Nothing is wrong with the row.
        "server_error": RowClass.TRANSIENT,
        "internal_error": RowClass.TRANSIENT,
        "slow_down": RowClass.TRANSIENT,
        "server_is_overloaded": RowClass.TRANSIENT,
        "rate_limit_exceeded": RowClass.TRANSIENT,
        "vector_store_timeout": RowClass.TRANSIENT,
        # Longer than the model takes.
        "context_length_exceeded": RowClass.TOO_LONG,
        # The model.
        "model_not_found": RowClass.MODEL_UNAVAILABLE,
        "modelnotfound.batch": RowClass.MODEL_UNAVAILABLE,
        "deploymentnotfound": RowClass.MODEL_UNAVAILABLE,
        "model_not_available": RowClass.MODEL_UNAVAILABLE,
        # Content policy.
        "content_filter": RowClass.CONTENT_FILTERED,
        "content_policy_violation": RowClass.CONTENT_FILTERED,
        "invalid_prompt": RowClass.CONTENT_FILTERED,
        "moderation_blocked": RowClass.CONTENT_FILTERED,
        "bio_policy": RowClass.CONTENT_FILTERED,
        "misalignment_policy_violation": RowClass.CONTENT_FILTERED,
        "image_content_policy_violation": RowClass.CONTENT_FILTERED,
        # The request.
        "data_residency_mismatch": RowClass.INVALID_REQUEST,
        "string_above_max_length": RowClass.INVALID_REQUEST,
        "unsupported_parameter": RowClass.INVALID_REQUEST,
        "unsupported_value": RowClass.INVALID_REQUEST,
        "invalid_value": RowClass.INVALID_REQUEST,
        "invalid_type": RowClass.INVALID_REQUEST,
        "missing_required_parameter": RowClass.INVALID_REQUEST,
    }
)
CODE_PREFIXES: tuple[tuple[str, RowClass], ...] = (
    ("invalid_image", RowClass.INVALID_REQUEST),
    ("image_", RowClass.INVALID_REQUEST),
)
TYPES: Mapping[str, RowClass] = MappingProxyType(
    {
        "insufficient_quota": RowClass.ACCOUNT,
        "authentication_error": RowClass.ACCOUNT,
        "authenticationerror": RowClass.ACCOUNT,
        "permission_error": RowClass.ACCOUNT,
        "permissiondeniederror": RowClass.ACCOUNT,
        "server_error": RowClass.TRANSIENT,
        "internalservererror": RowClass.TRANSIENT,
        "service_unavailable_error": RowClass.TRANSIENT,
        "rate_limit_error": RowClass.TRANSIENT,
        "overloaded_error": RowClass.TRANSIENT,
        "timeout_error": RowClass.TRANSIENT,
    }
)
FRAGMENTS: tuple[tuple[re.Pattern[str], RowClass], ...] = (
    (re.compile(r"maximum context length|context window|maximum input length", re.IGNORECASE), RowClass.TOO_LONG),
    # Embedding models name their limit in words of their own.
    (re.compile(r"max(?:imum)?(?: \w+)? tokens (?:per|for (?:this|the) model)", re.IGNORECASE), RowClass.TOO_LONG),
    (
        re.compile(r"the model\b.{0,200}\b(?:does not exist|not found|do not have access)", re.IGNORECASE | re.DOTALL),
        RowClass.MODEL_UNAVAILABLE,
    ),
)
STATUS_CLASSES: Mapping[int, RowClass] = MappingProxyType(
    {
        0: RowClass.TRANSIENT,
        401: RowClass.ACCOUNT,
        402: RowClass.ACCOUNT,
        403: RowClass.ACCOUNT,
        407: RowClass.ACCOUNT,
        408: RowClass.TRANSIENT,
        425: RowClass.TRANSIENT,
        429: RowClass.TRANSIENT,
        499: RowClass.TRANSIENT,
    }
)

BATCH_CODES: Mapping[str, BatchErrorKind] = MappingProxyType(
    dict.fromkeys(ACCOUNT_CODES, BatchErrorKind.ACCOUNT)
    | {
        "invalid_json_line": BatchErrorKind.ROW,
        "missing_required_parameter": BatchErrorKind.ROW,
        "invalid_method": BatchErrorKind.ROW,
        "invalid_url": BatchErrorKind.ROW,
        "url_mismatch": BatchErrorKind.ROW,
        "streaming_unsupported": BatchErrorKind.ROW,
        "duplicate_custom_id": BatchErrorKind.ROW,
        "mismatched_model": BatchErrorKind.ROW,
        "model_mismatch": BatchErrorKind.ROW,
        "model_not_found": BatchErrorKind.MODEL,
        "modelnotfound.batch": BatchErrorKind.MODEL,
        "deploymentnotfound": BatchErrorKind.MODEL,
        "token_limit_exceeded": BatchErrorKind.TOKEN_LIMIT,
        # Azure: the blob was changed or closed to the service while the batch waited.
        "input_modified": BatchErrorKind.FILE_MISSING,
        "input_no_permissions": BatchErrorKind.FILE_MISSING,
        # The file as a whole: no row is to blame, and only a smaller or another file would help.
        "empty_file": BatchErrorKind.UNKNOWN,
        "empty_batch": BatchErrorKind.UNKNOWN,
        "too_many_tasks": BatchErrorKind.UNKNOWN,
        "authentication_error": BatchErrorKind.ACCOUNT,
    }
)
"""Codes in a failed batch's error list. A code that blames a row counts as such only when it names a line."""

FILE_PARAMS = frozenset({"file_id", "input_file_id"})


class ErrorFacts(NamedTuple):
    """What an error says of itself, whatever its shape. ``code`` and ``type`` are words, ``message`` is payload."""

    type: str | None = None
    code: str | None = None
    message: str = ""
    param: str | None = None
    http_status: int | None = None
    """A status hidden in the error: a numeric code, or ``HTTP 429`` in the text of servers that have no other place."""


NO_FACTS = ErrorFacts()


def classify_row(http_status: int | None, facts: ErrorFacts) -> RowClass:
    """The class of a row that did not succeed; ``http_status`` None when there was no HTTP answer."""
    code = (facts.code or "").lower()
    found = CODES.get(code)
    if found is None and code:
        found = next((row_class for prefix, row_class in CODE_PREFIXES if code.startswith(prefix)), None)
    if found is None and facts.type is not None:
        found = TYPES.get(facts.type.lower())
    if found is not None:
        return found
    status = http_status
    if status is None or 200 <= status < 300:
        status = facts.http_status
    if status is None:
        return RowClass.TRANSIENT
    if 400 <= status < 500:
        for pattern, row_class in FRAGMENTS:
            if pattern.search(facts.message):
                return row_class
    if status == 409 and facts.type != "invalid_request_error":
        return RowClass.TRANSIENT
    by_status = STATUS_CLASSES.get(status)
    if by_status is not None:
        return by_status
    return RowClass.INVALID_REQUEST if 400 <= status < 500 else RowClass.TRANSIENT


def classify_batch_code(code: str, param: str | None, line: int | None) -> BatchErrorKind:
    """What one entry of a failed batch's error list is about.

    An unknown code that names a line is about that line; one that names none is unknown. ``invalid_request`` is a
    bad row when it names a line and an unseen input file when its ``param`` is the file's.
    """
    kind = BATCH_CODES.get(code.lower())
    if kind is not None and kind is not BatchErrorKind.ROW:
        return kind
    if line is not None:
        return BatchErrorKind.ROW
    return BatchErrorKind.FILE_MISSING if param in FILE_PARAMS else BatchErrorKind.UNKNOWN
