"""How a row's end, and a whole batch's refusal, are judged: tables, read from top to bottom.

A row that did not succeed is judged by the first of these that knows it:

1. the code inside the error (or, when no HTTP answer was had, the line's outer code): ``CODES``, then
   ``CODE_PREFIXES``;
2. the error's type, where it says something of its own: ``TYPES``;
3. a piece of the error's message, on a 4xx, or where a word of ``GENERIC_WORDS`` stands for the status: ``FRAGMENTS``;
4. the HTTP status, where it means the same whatever the code: ``STATUS_CLASSES``;
5. a code or type that only says "your request": ``GENERIC_WORDS``;
6. statuses that mean something only where nothing above spoke: ``BARE_STATUS_CLASSES``.

**The default.** What no table knows takes the class of its status's hundred: a 4xx is about the row
(``invalid_request``), anything else is not (``transient``). Without any status it is ``transient``: worth one more
try. Such a verdict is marked ``is_unknown``, and so is one that a status gave although the error had a code that no
table knows: the class stands, but the code is worth a line here, so it is counted.

Codes and types are compared in lower case. They are those of OpenAI (its error guide, help pages and OpenAPI
description), Azure, DashScope, Moonshot, the LiteLLM gateway, and open-source servers with the same shapes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
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
        "exceeded_current_quota_error",
    }
)
"""Codes that speak about the account whatever the status: waiting or repeating does not help, a person must act."""


def _each(row_class: RowClass, *words: str) -> dict[str, RowClass]:
    return dict.fromkeys(words, row_class)


CODES: Mapping[str, RowClass] = MappingProxyType(
    dict.fromkeys(ACCOUNT_CODES, RowClass.ACCOUNT)
    # Outer codes: the row never had an HTTP answer.
    | _each(RowClass.EXPIRED, "batch_expired")
    | _each(RowClass.CANCELLED, "batch_cancelled", "batch_canceled")
    | _each(RowClass.TRANSIENT, "request_timeout")
    # Nothing is wrong with the row.
    | _each(
        RowClass.TRANSIENT,
        "server_error",
        "internal_error",
        "internal_server_error",
        "service_unavailable",
        "slow_down",
        "server_is_overloaded",
        "rate_limit_exceeded",
        "vector_store_timeout",
        # Somebody else's server did not hand over an image: a wrong address says invalid_image_url instead.
        "failed_to_download_image",
    )
    # Longer than the model takes.
    | _each(RowClass.TOO_LONG, "context_length_exceeded")
    # The model.
    | _each(
        RowClass.MODEL_UNAVAILABLE,
        "model_not_found",
        "modelnotfound.batch",
        "deploymentnotfound",
        "model_not_available",
    )
    # Content policy.
    | _each(
        RowClass.CONTENT_FILTERED,
        "content_filter",
        "content_policy_violation",
        "invalid_prompt",
        "moderation_blocked",
        "bio_policy",
        "misalignment_policy_violation",
        "image_content_policy_violation",
        "responsibleaipolicyviolation",
        "data_inspection_failed",
        "datainspectionfailed",
    )
    # The request.
    | _each(
        RowClass.INVALID_REQUEST,
        "data_residency_mismatch",
        "string_above_max_length",
        "unsupported_parameter",
        "unsupported_value",
        "invalid_value",
        "invalid_type",
        "missing_required_parameter",
        "unknown_parameter",
        "unknown_url",
        "invalid_base64_image",
        "unsupported_image_media_type",
        "empty_image_file",
    )
    # Faults of a line that stop the whole batch at OpenAI and Azure: at Groq a bad line fails only itself.
    | _each(
        RowClass.INVALID_REQUEST,
        "invalid_json_line",
        "invalid_method",
        "invalid_url",
        "url_mismatch",
        "streaming_unsupported",
        "duplicate_custom_id",
        "mismatched_model",
        "model_mismatch",
    )
)
CODE_PREFIXES: tuple[tuple[str, RowClass], ...] = (
    ("invalid_image", RowClass.INVALID_REQUEST),
    ("image_", RowClass.INVALID_REQUEST),
)
SILENT_CODES = frozenset({"inference_failed"})
"""Codes known to say nothing: Doubleword puts the real status into the message beside this one."""
TYPES: Mapping[str, RowClass] = MappingProxyType(
    _each(
        RowClass.ACCOUNT,
        "insufficient_quota",
        "exceeded_current_quota_error",
        "billing_error",
        "authentication_error",
        "authenticationerror",
        "invalid_authentication_error",
        "incorrect_api_key_error",
        "permission_error",
        "permission_denied_error",
        "permissiondeniederror",
    )
    | _each(
        RowClass.TRANSIENT,
        "server_error",
        "api_error",
        "internalservererror",
        "service_unavailable_error",
        "rate_limit_error",
        "rate_limit_reached_error",
        "overloaded_error",
        "engine_overloaded_error",
        "timeout_error",
    )
    | _each(RowClass.CONTENT_FILTERED, "content_filter")
    | _each(RowClass.TOO_LONG, "contextwindowexceedederror")
)
GENERIC_WORDS: Mapping[str, RowClass] = MappingProxyType(
    _each(
        RowClass.INVALID_REQUEST,
        "invalid_request_error",
        "invalid_request",
        "invalid_parameter_error",
        "invalidparameter",
        "badrequesterror",
        "notfounderror",
        "not_found_error",
        "resource_not_found_error",
        "unprocessableentityerror",
        "request_too_large",
    )
)
"""Types and codes that say no more than that the request is at fault. OpenAI sends the first with refusals of every
kind, a wrong key among them, and DashScope its own with requests that are too long: so the message and a status with
a meaning of its own go before them."""
FRAGMENTS: tuple[tuple[re.Pattern[str], RowClass], ...] = (
    (re.compile(r"maximum context length|context window|maximum input length", re.IGNORECASE), RowClass.TOO_LONG),
    # Embedding models name their limit in words of their own.
    (re.compile(r"max(?:imum)?(?: \w+)? tokens (?:per|for (?:this|the) model)", re.IGNORECASE), RowClass.TOO_LONG),
    # Moonshot, DashScope, Claude and Gemini behind a compatible endpoint.
    (
        re.compile(
            r"exceeded model token limit|input token length too long|range of input length|prompt is too long"
            r"|input token count\b.{0,80}\bexceeds",
            re.IGNORECASE | re.DOTALL,
        ),
        RowClass.TOO_LONG,
    ),
    (
        re.compile(r"the model\b.{0,200}\b(?:does not exist|not found|do not have access)", re.IGNORECASE | re.DOTALL),
        RowClass.MODEL_UNAVAILABLE,
    ),
)
STATUS_CLASSES: Mapping[int, RowClass] = MappingProxyType(
    dict.fromkeys((401, 402, 403, 407), RowClass.ACCOUNT)
    # 0: the provider's own call of the model broke. 499: the caller was gone. 529: overloaded.
    | dict.fromkeys((0, 408, 425, 429, 499, 500, 502, 503, 504, 529), RowClass.TRANSIENT)
)
BARE_STATUS_CLASSES: Mapping[int, RowClass] = MappingProxyType(
    # A conflict that blames nothing in the request is one of timing.
    {409: RowClass.TRANSIENT} | dict.fromkeys((413, 415, 422), RowClass.INVALID_REQUEST)
)


class OurCode(StrEnum):
    """Codes of our own, for ends that the provider has no word for."""

    NO_RESPONSE_NO_ERROR = "no_response_no_error"
    """``response`` and ``error`` of the line are both null or absent: it says nothing at all."""
    EMPTY_BODY = "empty_body"
    """A 2xx without a body."""
    EMPTY_ANSWER = "empty_answer"
    """A 2xx whose body has the form of an answer and nothing in it."""
    NO_STATUS = "no_status"
    """A response without a status, whose body is neither an answer nor an error."""
    UNREADABLE_ANSWER = "unreadable_answer"
    """A 2xx of the sync endpoint whose body cannot be read."""
    BROKEN_OFF = "broken_off"
    """The server says itself that it broke off: a ``finish_reason`` of ``BROKEN_REASONS``."""


OUR_CODES: Mapping[OurCode, RowClass] = MappingProxyType(
    dict.fromkeys(OurCode, RowClass.TRANSIENT) | {OurCode.UNREADABLE_ANSWER: RowClass.UNREADABLE}
)
"""None of them blames the row."""

UNANSWERED_STATUSES = frozenset({"failed", "cancelled", "in_progress", "queued"})
"""``status`` of the responses endpoint that is no answer. Where the body names an error the row is judged by that; else
it is transient, with the code ``response_<status>``. ``completed`` and ``incomplete`` are answers."""

TRUNCATED_REASONS = frozenset({"length", "max_tokens", "model_length", "model_context_window_exceeded", "time_limit"})
"""``finish_reason`` of a cut answer: OpenAI's word, and those of Mistral, Zhipu, watsonx and gateways to Claude."""
FILTERED_REASONS = frozenset({"content_filter", "sensitive"})
"""``finish_reason`` of an answer that a filter stopped: OpenAI's word and Zhipu's."""
CALL_REASONS = frozenset({"tool_calls", "function_call", "tool_use"})
"""``finish_reason`` of a model that waits for what its tools say."""
BROKEN_REASONS = frozenset({"error", "abort", "cancelled", "network_error", "insufficient_system_resource"})
"""``finish_reason`` of an answer that the server broke off: Mistral and OpenRouter, vLLM and SGLang, watsonx, Zhipu,
DeepSeek."""

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
        "too_many_tasks": BatchErrorKind.TOO_LARGE,
        "file_too_large": BatchErrorKind.TOO_LARGE,
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


class Verdict(NamedTuple):
    """The class of a row that did not succeed, and whether no table knew what its error says."""

    row_class: RowClass
    is_unknown: bool = False


def classify_row(http_status: int | None, facts: ErrorFacts) -> Verdict:
    """Judge a row that did not succeed; ``http_status`` None when there was no HTTP answer."""
    code, kind = (facts.code or "").lower(), (facts.type or "").lower()
    found = CODES.get(code)
    if found is None and code:
        found = next((row_class for prefix, row_class in CODE_PREFIXES if code.startswith(prefix)), None)
    if found is None:
        found = TYPES.get(kind)
    if found is not None:
        return Verdict(found)
    status = http_status
    if status is None or 200 <= status < 300:
        status = facts.http_status
    generic = GENERIC_WORDS.get(code) or GENERIC_WORDS.get(kind)
    is_about_request = generic is not None if status is None else 400 <= status < 500
    if is_about_request:
        for pattern, row_class in FRAGMENTS:
            if pattern.search(facts.message):
                return Verdict(row_class)
    is_new_code = bool(code) and code not in GENERIC_WORDS and code not in SILENT_CODES
    found = STATUS_CLASSES.get(-1 if status is None else status)
    if found is None and is_about_request:
        found = generic
    if found is None:
        found = BARE_STATUS_CLASSES.get(-1 if status is None else status)
    if found is not None:
        return Verdict(found, is_new_code)
    return Verdict(RowClass.INVALID_REQUEST if is_about_request else RowClass.TRANSIENT, is_unknown=True)


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
