"""The tables by which rows and whole batches are judged, against tables written from the providers' documents."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchferry.domain.batcherrors import BatchErrorKind
from batchferry.domain.rows import RowClass
from batchferry.providers.openai.classes import (
    BATCH_CODES,
    CODE_PREFIXES,
    CODES,
    GENERIC_WORDS,
    SILENT_CODES,
    TYPES,
    classify_batch_code,
    classify_row,
)
from batchferry.providers.verdicts import BARE_STATUS_CLASSES, STATUS_CLASSES, ErrorFacts

INVALID = "invalid_request_error"
A, T, R = RowClass.ACCOUNT, RowClass.TRANSIENT, RowClass.INVALID_REQUEST
F, L, M = RowClass.CONTENT_FILTERED, RowClass.TOO_LONG, RowClass.MODEL_UNAVAILABLE

KNOWN = [
    # Never run: the outer codes of OpenAI's description.
    (None, None, "batch_expired", "", RowClass.EXPIRED),
    (None, None, "batch_cancelled", "", RowClass.CANCELLED),
    (None, None, "batch_canceled", "", RowClass.CANCELLED),
    (None, None, "request_timeout", "", T),
    # Rate.
    (429, "rate_limit_error", "rate_limit_exceeded", "", T),
    (429, "tokens", "rate_limit_exceeded", "", T),
    (429, "requests", "rate_limit_exceeded", "", T),
    (429, None, None, "", T),
    (429, "engine_overloaded_error", None, "", T),
    (429, "rate_limit_reached_error", None, "", T),
    # Quota and billing: by the type whatever the code, and by the code whatever the status.
    (429, "insufficient_quota", "insufficient_quota", "", A),
    (429, "insufficient_quota", "whatever_code", "", A),
    (429, "insufficient_quota", "rate_limit_exceeded", "", A),
    (429, "exceeded_current_quota_error", "rate_limit_exceeded", "", A),
    (429, "insufficient_quota", None, "", A),
    (429, None, "insufficient_quota", "", A),
    (429, None, "credit_balance_exhausted", "", A),
    (429, None, "organization_spend_limit_exceeded", "", A),
    (429, None, "project_spend_limit_exceeded", "", A),
    (429, None, "organization_usage_limit_exceeded", "", A),
    (429, None, "billing_hard_limit_reached", "", A),
    (400, INVALID, "billing_hard_limit_reached", "", A),
    (429, None, "billing_not_active", "", A),
    (400, None, "Arrearage", "", A),
    (400, "no_db_connection", "no_db_connection", "", A),
    (429, "exceeded_current_quota_error", None, "", A),
    (402, "billing_error", None, "", A),
    # Zhipu's numbers: an empty purse (1113) comes with the status of a matter of pace.
    *[(401, None, code, "", A) for code in ("1001", "1002", "1003", "1004")],
    *[(429, None, code, "", A) for code in ("1110", "1111", "1112", "1113", "1121")],
    (400, None, "1211", "", M),
    (400, None, "1301", "", F),
    *[(400, None, code, "", R) for code in ("1210", "1213", "1214", "1215")],
    *[(status, None, code, "", T) for status, code in ((429, "1120"), (500, "1230"), (500, "1234"), (429, "1302"))],
    # DeepSeek's unpaid account: a status that speaks, beside a code that only says "your request".
    (402, "unknown_error", INVALID, "Insufficient Balance", A),
    # Key and permission.
    (401, INVALID, "invalid_api_key", "", A),
    (401, INVALID, None, "", A),
    (401, "invalid_authentication_error", None, "", A),
    (401, "incorrect_api_key_error", None, "", A),
    (401, "authentication_error", None, "", A),
    (401, None, None, "", A),
    (402, None, None, "", A),
    (403, None, None, "", A),
    (403, INVALID, None, "", A),
    (403, "permission_error", None, "", A),
    (403, "permission_denied_error", None, "", A),
    (403, None, "unsupported_country_region_territory", "", A),
    (401, None, "account_deactivated", "", A),
    (407, None, None, "", A),
    # The model.
    (404, INVALID, "model_not_found", "", M),
    (403, INVALID, "model_not_found", "", M),
    (404, INVALID, None, "The model `x` does not exist", M),
    (404, "NotFoundError", None, "The model `x` does not exist.", M),
    (403, INVALID, None, "Project `p` and the model x: you do not have access to it", M),
    (404, None, "DeploymentNotFound", "", M),
    (400, None, "ModelNotFound.Batch", "", M),
    (400, None, "model_not_available", "", M),
    # Length: by code, and by the words of OpenAI, embeddings models and compatible servers.
    (400, INVALID, "context_length_exceeded", "", L),
    (400, INVALID, None, "This model's maximum context length is 8192 tokens", L),
    (400, "BadRequestError", None, "This model's maximum context length is 8192 tokens", L),
    (400, INVALID, None, "Input exceeds max tokens for this model", L),
    (400, INVALID, None, "Invalid 'input': maximum input length is 8192 tokens.", L),
    (400, INVALID, None, "Your request exceeded model token limit : 262144", L),
    (400, INVALID, None, "Input token length too long", L),
    (400, INVALID, "invalid_parameter_error", "Range of input length should be [1, 30720]", L),
    (400, INVALID, None, "prompt is too long: 210000 tokens > 200000 maximum", L),
    (400, None, None, "The input token count (1200000) exceeds the maximum number of tokens allowed", L),
    (400, "ContextWindowExceededError", None, "", L),
    (413, None, None, "longer than the context window", L),
    # An error without a status that only says "your request": its words count as they would on a 400.
    (200, INVALID, None, "This model's maximum context length is 8192 tokens", L),
    (None, INVALID, None, "This model's maximum context length is 8192 tokens", L),
    # Content policy.
    (400, INVALID, "content_policy_violation", "", F),
    (400, INVALID, "content_filter", "", F),
    (400, None, "content_filter", "", F),
    (400, INVALID, "invalid_prompt", "", F),
    (400, INVALID, "moderation_blocked", "", F),
    (400, "content_filter", None, "", F),
    (400, None, "ResponsibleAIPolicyViolation", "", F),
    (400, None, "data_inspection_failed", "", F),
    (400, None, "DataInspectionFailed", "", F),
    # Other refusals of the row.
    *[(status, INVALID, None, "", R) for status in (400, 404, 409, 413, 422)],
    (200, INVALID, None, "", R),
    (None, INVALID, None, "", R),
    (400, "BadRequestError", None, "", R),
    (404, "resource_not_found_error", None, "", R),
    (404, "not_found_error", None, "", R),
    (413, "request_too_large", None, "", R),
    (422, "UnprocessableEntityError", None, "", R),
    (413, None, None, "", R),
    (415, None, None, "", R),
    (422, None, None, "", R),
    (400, INVALID, "string_above_max_length", "", R),
    (400, INVALID, "unsupported_parameter", "", R),
    (400, INVALID, "unsupported_value", "", R),
    (400, INVALID, "unknown_parameter", "", R),
    (400, INVALID, "invalid_value", "", R),
    (400, INVALID, "invalid_type", "", R),
    (400, None, "invalid_parameter_error", "", R),
    (400, None, "InvalidParameter", "", R),
    (404, INVALID, "unknown_url", "", R),
    # Faults of a line that stop a whole batch at OpenAI and Azure, and only their row at Groq.
    *[
        (400, None, code, "", R)
        for code in (
            "invalid_json_line",
            "missing_required_parameter",
            "invalid_method",
            "invalid_url",
            "streaming_unsupported",
            "invalid_request",
            "duplicate_custom_id",
            "mismatched_model",
            "url_mismatch",
            "model_mismatch",
        )
    ],
    # Nothing wrong with the row.
    (0, None, None, "", T),
    (408, None, None, "", T),
    (409, None, None, "", T),
    (425, None, None, "", T),
    (499, None, None, "", T),
    *[(status, None, None, "", T) for status in (500, 502, 503, 504, 529)],
    *[(503, None, code, "", T) for code in ("server_error", "slow_down", "server_is_overloaded")],
    (500, None, "internal_error", "", T),
    (500, None, "internal_server_error", "", T),
    (503, None, "service_unavailable", "", T),
    (500, "server_error", None, "", T),
    (500, "api_error", None, "", T),
    (500, "InternalServerError", None, "", T),
    (503, "service_unavailable_error", None, "", T),
    (529, "overloaded_error", None, "", T),
    (504, "timeout_error", None, "", T),
    (500, INVALID, None, "", T),
    (500, None, None, "This model's maximum context length is 8192 tokens", T),
    # An answer of the responses endpoint that failed inside a 200.
    (200, None, "server_error", "", T),
    (200, None, "rate_limit_exceeded", "", T),
    (200, None, "vector_store_timeout", "", T),
    (200, None, "failed_to_download_image", "", T),
    *[
        (200, None, code, "", F)
        for code in (
            "invalid_prompt",
            "bio_policy",
            "misalignment_policy_violation",
            "image_content_policy_violation",
        )
    ],
    *[
        (200, None, code, "", R)
        for code in (
            "data_residency_mismatch",
            "invalid_image",
            "invalid_image_format",
            "invalid_image_url",
            "invalid_image_mode",
            "invalid_base64_image",
            "image_too_large",
            "image_too_small",
            "image_parse_error",
            "image_file_too_large",
            "image_file_not_found",
            "unsupported_image_media_type",
            "empty_image_file",
        )
    ],
]
"""(status, type, code, message, class): what the references name. Nothing here is read off the code's tables."""


@pytest.mark.parametrize(("status", "kind", "code", "message", "expected"), KNOWN)
def test_every_documented_end_has_its_class(status, kind, code, message, expected):
    """Each end that a provider documents has its class, and none of them counts as unknown."""
    facts = ErrorFacts(kind, code, message)
    assert classify_row(status, facts) == (expected, False)
    shouted = ErrorFacts(kind and kind.upper(), code and code.upper(), message.upper())
    assert classify_row(status, shouted) == (expected, False)


def test_every_line_of_the_tables_is_documented():
    """No code, prefix or type stands in the tables that the table above does not name."""
    codes = {str(code).lower() for _, _, code, _, _ in KNOWN if code}
    kinds = {str(kind).lower() for _, kind, _, _, _ in KNOWN if kind}
    prefixes = [prefix for prefix, _ in CODE_PREFIXES]
    # The quota type is Moonshot's; its gateways also send it as a code.
    assert set(CODES) - codes == {"exceeded_current_quota_error"}
    assert {code for code in codes - set(CODES) if not any(map(code.startswith, prefixes))} <= (
        set(GENERIC_WORDS) | {"whatever_code"}
    )
    assert set(TYPES) - kinds == {"authenticationerror", "permissiondeniederror"}  # vLLM's spelling
    assert set(GENERIC_WORDS) <= kinds | codes
    assert {*STATUS_CLASSES, *BARE_STATUS_CLASSES} <= {status for status, _, _, _, _ in KNOWN}


@pytest.mark.parametrize(
    ("status", "kind", "code", "expected"),
    [
        # What no table knows: a 4xx is about the row, anything else is not.
        (400, None, "something_new", R),
        (404, None, None, R),
        (418, None, None, R),
        (400, "something_new", None, R),
        (505, None, None, T),
        (302, None, None, T),
        (999, None, None, T),
        (200, None, "something_new", T),
        (None, None, "something_new", T),
        (None, None, None, T),
        # A status or a general word gives the class, but the code is new.
        (429, None, "something_new", T),
        (403, None, "something_new", A),
        (503, None, "something_new", T),
        (400, INVALID, "something_new", R),
        (422, None, "something_new", R),
    ],
)
def test_the_default_is_counted(status, kind, code, expected):
    """What no table knows has the stated default, and says that it is unknown."""
    assert classify_row(status, ErrorFacts(kind, code)) == (expected, True)


WORDS = st.none() | st.sampled_from(sorted({*CODES, *TYPES, *GENERIC_WORDS, *SILENT_CODES})) | st.text(max_size=12)


@settings(deadline=None)
@given(st.none() | st.integers(0, 999), WORDS, WORDS, st.text(max_size=40), st.none() | st.integers(100, 599))
def test_every_error_has_a_class_of_a_provider(status, kind, code, message, hidden):
    """Any error at all ends in a class that a provider can give, never in a success or a class of our own."""
    found = classify_row(status, ErrorFacts(kind, code, message, None, hidden))
    assert found.row_class in {A, T, R, F, L, M, RowClass.EXPIRED, RowClass.CANCELLED}


def test_a_status_hidden_in_the_error_counts_when_there_is_no_other():
    """Servers that drop the response tell the status in the error; a real status is not overruled by it."""
    assert classify_row(None, ErrorFacts(http_status=422)) == (R, False)
    assert classify_row(None, ErrorFacts(http_status=503)) == (T, False)
    assert classify_row(500, ErrorFacts(http_status=422)) == (T, False)
    assert classify_row(None, ErrorFacts(code="inference_failed", http_status=503)) == (T, False)


@pytest.mark.parametrize(
    ("code", "param", "line", "expected"),
    [
        *[
            (code, None, 2, BatchErrorKind.ROW)
            for code in (
                "invalid_json_line",
                "missing_required_parameter",
                "invalid_method",
                "invalid_url",
                "streaming_unsupported",
                "duplicate_custom_id",
                "mismatched_model",
                "model_mismatch",
                "url_mismatch",
                "invalid_request",
                "something_new",
            )
        ],
        ("model_not_found", "body.model", 1, BatchErrorKind.MODEL),
        ("model_not_found", None, None, BatchErrorKind.MODEL),
        ("token_limit_exceeded", None, None, BatchErrorKind.TOKEN_LIMIT),
        ("TOKEN_LIMIT_EXCEEDED", None, None, BatchErrorKind.TOKEN_LIMIT),
        ("invalid_request", "file_id", None, BatchErrorKind.FILE_MISSING),
        ("", "input_file_id", None, BatchErrorKind.FILE_MISSING),
        ("input_modified", None, None, BatchErrorKind.FILE_MISSING),
        ("input_no_permissions", None, None, BatchErrorKind.FILE_MISSING),
        ("ModelNotFound.Batch", None, None, BatchErrorKind.MODEL),
        ("insufficient_quota", None, None, BatchErrorKind.ACCOUNT),
        ("billing_hard_limit_reached", None, None, BatchErrorKind.ACCOUNT),
        ("empty_file", None, None, BatchErrorKind.UNKNOWN),
        ("empty_batch", None, None, BatchErrorKind.UNKNOWN),
        ("too_many_tasks", None, None, BatchErrorKind.TOO_LARGE),
        ("file_too_large", "file_id", None, BatchErrorKind.TOO_LARGE),
        ("invalid_request", None, None, BatchErrorKind.UNKNOWN),
        ("invalid_json_line", None, None, BatchErrorKind.UNKNOWN),
        ("", None, None, BatchErrorKind.UNKNOWN),
        ("", None, 7, BatchErrorKind.ROW),
    ],
)
def test_whole_batch_errors(code, param, line, expected):
    """A line's entry blames the line, a quota's nobody, and what is unknown never fails all rows."""
    assert classify_batch_code(code, param, line) is expected


@pytest.mark.parametrize(
    ("code", "param", "line", "message", "expected"),
    [
        (
            "",
            None,
            None,
            "Enqueued token limit reached for m in organization o. Limit: 9 enqueued tokens.",
            "token_limit",
        ),
        ("batch_error", None, None, "Too many enqueued tokens: the limit is 90,000", "token_limit"),
        ("invalid_request", None, None, "enqueued token limit", "token_limit"),
        ("something_new", None, 4, "enqueued token limit", "row"),
        ("billing_hard_limit_reached", None, None, "enqueued token limit", "account"),
        ("", None, None, "The maximum context length is 9 tokens", "unknown"),
    ],
)
def test_a_full_queue_is_known_by_its_sentence(code, param, line, message, expected):
    """A server that hands on OpenAI's sentence without its code is understood; a code or a line goes first."""
    assert classify_batch_code(code, param, line, message) == expected


def test_codes_are_written_in_lower_case():
    """Codes are compared in lower case, so a capital in a table would never be found."""
    assert all(word == word.lower() for word in (*CODES, *TYPES, *GENERIC_WORDS, *SILENT_CODES, *BATCH_CODES))
