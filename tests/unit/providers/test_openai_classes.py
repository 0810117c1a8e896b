import pytest

from batchferry.domain.batcherrors import BatchErrorKind
from batchferry.domain.rows import RowClass
from batchferry.providers.openai.classes import (
    ACCOUNT_CODES,
    BATCH_CODES,
    CODES,
    ErrorFacts,
    classify_batch_code,
    classify_row,
)

INVALID = "invalid_request_error"


@pytest.mark.parametrize(
    ("status", "kind", "code", "message", "expected"),
    [
        # never run
        (None, None, "batch_expired", "", RowClass.EXPIRED),
        (None, None, "batch_cancelled", "", RowClass.CANCELLED),
        (None, None, "batch_canceled", "", RowClass.CANCELLED),
        (None, None, "request_timeout", "", RowClass.TRANSIENT),
        (None, None, "something_new", "", RowClass.TRANSIENT),
        (None, None, None, "", RowClass.TRANSIENT),
        # rate and quota
        (429, "rate_limit_error", "rate_limit_exceeded", "", RowClass.TRANSIENT),
        (429, None, None, "", RowClass.TRANSIENT),
        (429, "tokens", "rate_limit_exceeded", "", RowClass.TRANSIENT),
        (429, "insufficient_quota", "insufficient_quota", "", RowClass.ACCOUNT),
        (429, "insufficient_quota", "whatever_code", "", RowClass.ACCOUNT),
        (429, "insufficient_quota", None, "", RowClass.ACCOUNT),
        *[(429, None, code, "", RowClass.ACCOUNT) for code in sorted(ACCOUNT_CODES)],
        (400, INVALID, "billing_hard_limit_reached", "", RowClass.ACCOUNT),
        (400, None, "Arrearage", "", RowClass.ACCOUNT),
        # account
        (401, INVALID, "invalid_api_key", "", RowClass.ACCOUNT),
        (401, None, None, "", RowClass.ACCOUNT),
        (402, None, None, "", RowClass.ACCOUNT),
        (403, None, None, "", RowClass.ACCOUNT),
        # model
        (404, INVALID, "model_not_found", "", RowClass.MODEL_UNAVAILABLE),
        (403, INVALID, "model_not_found", "", RowClass.MODEL_UNAVAILABLE),
        (404, INVALID, None, "The model `x` does not exist", RowClass.MODEL_UNAVAILABLE),
        (404, None, "DeploymentNotFound", "", RowClass.MODEL_UNAVAILABLE),
        (400, None, "ModelNotFound.Batch", "", RowClass.MODEL_UNAVAILABLE),
        # length
        (400, INVALID, "context_length_exceeded", "", RowClass.TOO_LONG),
        (400, INVALID, None, "This model's maximum context length is 8192 tokens", RowClass.TOO_LONG),
        (400, INVALID, None, "Input exceeds max tokens for this model", RowClass.TOO_LONG),
        (500, None, None, "This model's maximum context length is 8192 tokens", RowClass.TRANSIENT),
        # policy
        *[
            (400, INVALID, code, "", RowClass.CONTENT_FILTERED)
            for code in ("content_policy_violation", "content_filter", "invalid_prompt", "moderation_blocked")
        ],
        # about the row
        *[(status, INVALID, None, "", RowClass.INVALID_REQUEST) for status in (400, 404, 409, 413, 422)],
        (400, None, "something_new", "", RowClass.INVALID_REQUEST),
        (418, None, None, "", RowClass.INVALID_REQUEST),
        (409, None, None, "", RowClass.TRANSIENT),
        # nothing wrong with it
        (0, None, None, "", RowClass.TRANSIENT),
        (408, None, None, "", RowClass.TRANSIENT),
        *[(status, None, None, "", RowClass.TRANSIENT) for status in (500, 502, 503, 504, 529)],
        *[(503, None, code, "", RowClass.TRANSIENT) for code in ("server_error", "slow_down", "server_is_overloaded")],
        (503, "service_unavailable_error", None, "", RowClass.TRANSIENT),
        (302, None, None, "", RowClass.TRANSIENT),
        # an answer of the responses endpoint that failed inside a 200
        (200, None, "server_error", "", RowClass.TRANSIENT),
        (200, None, "rate_limit_exceeded", "", RowClass.TRANSIENT),
        (200, None, "vector_store_timeout", "", RowClass.TRANSIENT),
        *[
            (200, None, code, "", RowClass.CONTENT_FILTERED)
            for code in (
                "invalid_prompt",
                "bio_policy",
                "misalignment_policy_violation",
                "image_content_policy_violation",
            )
        ],
        *[
            (200, None, code, "", RowClass.INVALID_REQUEST)
            for code in ("invalid_image_format", "image_too_large", "data_residency_mismatch")
        ],
        (200, None, "something_new", "", RowClass.TRANSIENT),
    ],
)
def test_rows(status, kind, code, message, expected):
    """Each known way to fail has its class, and each unknown one the stated default."""
    assert classify_row(status, ErrorFacts(kind, code, message)) is expected


def test_a_status_hidden_in_the_error_counts_when_there_is_no_other():
    """Servers that drop the response tell the status in the error; a real status is not overruled by it."""
    assert classify_row(None, ErrorFacts(http_status=400)) is RowClass.INVALID_REQUEST
    assert classify_row(None, ErrorFacts(http_status=503)) is RowClass.TRANSIENT
    assert classify_row(500, ErrorFacts(http_status=400)) is RowClass.TRANSIENT


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
        ("insufficient_quota", None, None, BatchErrorKind.ACCOUNT),
        ("billing_hard_limit_reached", None, None, BatchErrorKind.ACCOUNT),
        ("empty_file", None, None, BatchErrorKind.UNKNOWN),
        ("too_many_tasks", None, None, BatchErrorKind.UNKNOWN),
        ("invalid_request", None, None, BatchErrorKind.UNKNOWN),
        ("invalid_json_line", None, None, BatchErrorKind.UNKNOWN),
        ("", None, None, BatchErrorKind.UNKNOWN),
        ("", None, 7, BatchErrorKind.ROW),
    ],
)
def test_whole_batch_errors(code, param, line, expected):
    """A line's entry blames the line, a quota's nobody, and what is unknown never fails all rows."""
    assert classify_batch_code(code, param, line) is expected


def test_codes_are_written_in_lower_case():
    """Codes are compared in lower case, so a capital in a table would never be found."""
    assert all(code == code.lower() for code in (*CODES, *BATCH_CODES))
