"""OpenAI's tables, by which a row's end and a whole batch's refusal are judged.

How they are walked, and what becomes of what they do not know, stands in ``providers.verdicts``. The codes and types
are those of OpenAI (its error guide, help pages and OpenAPI description), Azure, DashScope, Moonshot, Zhipu
(https://docs.z.ai/api-reference/api-code), the LiteLLM gateway, and open-source servers with the same shapes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from batchferry.domain.batcherrors import BatchErrorKind
from batchferry.domain.rows import RowClass
from batchferry.providers.verdicts import ErrorFacts, RowTables, Verdict

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
        # A LiteLLM gateway without a database, asked with a key that is not its own: a 400.
        "no_db_connection",
        # Zhipu, whose codes are numbers. An empty purse, a closed account and one under suspicion come with 429.
        "1001",
        "1002",
        "1003",
        "1004",
        "1110",
        "1111",
        "1112",
        "1113",
        "1121",
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
        # Zhipu: the account cannot be read now, the call broke, the network did, too many calls at one time.
        "1120",
        "1230",
        "1234",
        "1302",
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
        "1211",  # Zhipu
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
        "1301",  # Zhipu
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
        # Zhipu: wrong, missing, invalid, or excluding one another.
        "1210",
        "1213",
        "1214",
        "1215",
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

QUOTA_TYPES = frozenset({"insufficient_quota", "exceeded_current_quota_error"})
"""Types by which OpenAI and Moonshot name an exhausted quota."""
ENQUEUED_TOKENS = re.compile(r"\benqueued token limit\b|\benqueued tokens\b.{0,80}\blimit\b", re.IGNORECASE | re.DOTALL)

FILE_PARAMS = frozenset({"file_id", "input_file_id"})


TABLES = RowTables(
    codes=CODES,
    code_prefixes=CODE_PREFIXES,
    types=TYPES,
    generic_words=GENERIC_WORDS,
    fragments=FRAGMENTS,
    silent_codes=SILENT_CODES,
)


def classify_row(http_status: int | None, facts: ErrorFacts) -> Verdict:
    """Judge a row that did not succeed; ``http_status`` None when there was no HTTP answer.

    The type of an exhausted quota is believed whatever the code beside it says: ``rate_limit_exceeded`` would send the
    row again and again, and the quota comes back only when somebody pays.
    """
    if (facts.type or "").lower() in QUOTA_TYPES:
        return Verdict(RowClass.ACCOUNT)
    return TABLES.classify(http_status, facts)


def is_queue_full(code: str | None, message: str) -> bool:
    """Whether a refusal says that more tokens wait at the provider than may: nothing is wrong, it is to be sent later.

    Servers that keep OpenAI's shapes hand its sentence on without its code (openai-python issue 2084 quotes both).
    """
    return (code or "").lower() == "token_limit_exceeded" or ENQUEUED_TOKENS.search(message) is not None


def classify_batch_code(code: str, param: str | None, line: int | None, message: str = "") -> BatchErrorKind:
    """What one entry of a failed batch's error list is about.

    An unknown code that names a line is about that line; one that names none is unknown. ``invalid_request`` is a
    bad row when it names a line and an unseen input file when its ``param`` is the file's.
    """
    kind = BATCH_CODES.get(code.lower())
    if kind is not None and kind is not BatchErrorKind.ROW:
        return kind
    if line is not None:
        return BatchErrorKind.ROW
    if is_queue_full(code, message):
        return BatchErrorKind.TOKEN_LIMIT
    return BatchErrorKind.FILE_MISSING if param in FILE_PARAMS else BatchErrorKind.UNKNOWN
