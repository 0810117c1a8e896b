"""The tables by which Mistral's rows and jobs are judged, against answers that users of the API have published."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchferry.domain.batcherrors import BatchErrorKind
from batchferry.domain.provider import LineError
from batchferry.domain.rows import RowClass
from batchferry.providers.mistral.classes import (
    BATCH_CODES,
    BATCH_FRAGMENTS,
    CODE_PREFIXES,
    CODES,
    FRAGMENTS,
    GENERIC_PREFIXES,
    GENERIC_WORDS,
    batch_code_of,
    classify_batch_error,
    classify_row,
    word_of,
)
from batchferry.providers.verdicts import BARE_STATUS_CLASSES, STATUS_CLASSES, ErrorFacts

A, T, R = RowClass.ACCOUNT, RowClass.TRANSIENT, RowClass.INVALID_REQUEST
F, L, M = RowClass.CONTENT_FILTERED, RowClass.TOO_LONG, RowClass.MODEL_UNAVAILABLE
ARGS = "invalid_request_invalid_args"

KNOWN = [
    # Never run.
    (None, "batch_expired", None, "", RowClass.EXPIRED),
    (None, "timeout_exceeded", None, "", RowClass.EXPIRED),
    (None, "batch_cancelled", None, "", RowClass.CANCELLED),
    (None, "cancelled", None, "", RowClass.CANCELLED),
    (None, "request_timeout", None, "", T),
    # Rate and capacity.
    (429, "rate_limited", "1300", "Rate limit exceeded", T),
    (429, "rate_limit_exceeded", "3505", "Rate limit exceeded", T),
    (429, None, None, "Requests rate limit exceeded", T),
    (429, "service_tier_capacity_exceeded", "3505", "Service tier capacity exceeded for this model.", T),
    (429, "invalid_request_error", None, "Service tier capacity exceeded for this model.", T),
    (503, "service_tier_capacity_exceeded", "3505", "", T),
    (500, "internal_server_error", "1000", "", T),
    (503, "unreachable_backend", "1100", "", T),
    # Key, billing, permission.
    (401, None, None, "Unauthorized", A),
    (402, None, None, "", A),
    (403, None, None, "", A),
    (407, None, None, "", A),
    (429, "insufficient_quota", None, "", A),
    # The model.
    (400, "invalid_model", "1500", "Invalid model: no-such-model", M),
    (400, "invalid_request_error", None, "Invalid model: no-such-model", M),
    (403, "tier_not_allowed", "1910", "This model is not available in your subscription tier", M),
    # Length. The number is that of a whole group, so the message decides.
    (400, ARGS, "3051", "Prompt contains 9 tokens and 0 draft tokens, too large for model with 8 maximum context length", L),
    (400, "invalid_request_prompt_too_long", "3059", "Prompt 264620 > 262144 maximum context length", L),
    (400, "invalid_request_prompt", "3210", "Input id 0 has 9000 tokens, exceeding max 8192 tokens.", L),
    # Guardrails.
    (403, "guardrail_blocked", None, "", F),
    (403, "invalid_request_error", None, "The prompt was blocked by a guardrail", F),
    (403, None, None, "Request blocked by moderation", F),
    # Other refusals of the row.
    (400, ARGS, "3051", "reasoning_effort is not enabled for this model", R),
    (400, "invalid_request_prompt", "3210", "Too many inputs in request, split into more batches.", R),
    (400, "invalid_request_message_order", "3230", "Expected last role User or Tool", R),
    (422, "invalid_request_error", None, '{"detail":[{"loc":["body","temperature"]}]}', R),
    (400, "invalid_request", None, "", R),
    (400, "bad_request", None, "", R),
    *[(status, None, None, "", R) for status in (413, 415, 422)],
    # Nothing wrong with the row.
    *[(status, None, None, "", T) for status in (0, 408, 409, 425, 499, 500, 502, 503, 504, 529)],
]  # fmt: skip
"""(status, type, code, message, class). Nothing here is read off the code's tables."""


@pytest.mark.parametrize(("status", "kind", "code", "message", "expected"), KNOWN)
def test_every_published_end_has_its_class(status, kind, code, message, expected):
    """Each end has its class, in any case of letters, and none of them counts as unknown."""
    assert classify_row(status, ErrorFacts(kind, code, message)) == (expected, False)
    assert classify_row(status, ErrorFacts(kind and kind.upper(), code, message.upper())) == (expected, False)


def test_every_line_of_the_tables_is_published():
    """No word, prefix, piece of a message or status stands in the tables that the table above does not name."""
    kinds = {kind for _, kind, _, _, _ in KNOWN if kind}
    assert set(CODES) | set(GENERIC_WORDS) <= kinds
    for prefix, _ in (*CODE_PREFIXES, *GENERIC_PREFIXES):
        assert any(kind.startswith(prefix) for kind in kinds)
    for pattern, row_class in FRAGMENTS:
        assert any(pattern.search(message) and expected is row_class for _, _, _, message, expected in KNOWN)
    assert {*STATUS_CLASSES, *BARE_STATUS_CLASSES} <= {status for status, *_ in KNOWN}


@pytest.mark.parametrize(
    ("status", "kind", "code", "expected"),
    [
        (400, "something_new", "9999", R),
        (404, None, None, R),
        (400, None, "9999", R),
        (302, None, None, T),
        (None, "something_new", None, T),
        (None, None, None, T),
        (429, "something_new", None, T),
        (403, "something_new", None, A),
    ],
)
def test_the_default_is_counted(status, kind, code, expected):
    """What no table knows has the stated default, and says that it is unknown."""
    assert classify_row(status, ErrorFacts(kind, code)) == (expected, True)


def test_the_type_is_the_word_and_the_number_stands_in():
    """An error is told under its type, and under its number only where it has no type."""
    assert word_of(ErrorFacts("invalid_model", "1500")) == "invalid_model"
    assert word_of(ErrorFacts(None, "1500")) == "1500"
    assert word_of(ErrorFacts()) is None


WORDS = st.none() | st.sampled_from(sorted({*CODES, *GENERIC_WORDS})) | st.text(max_size=12)


@settings(deadline=None)
@given(st.none() | st.integers(0, 999), WORDS, WORDS, st.text(max_size=40), st.none() | st.integers(100, 599))
def test_every_error_has_a_class_of_a_provider(status, kind, code, message, hidden):
    """Any error at all ends in a class that a provider can give, never in a success or a class of our own."""
    found = classify_row(status, ErrorFacts(kind, code, message, None, hidden))
    assert found.row_class in {A, T, R, F, L, M, RowClass.EXPIRED, RowClass.CANCELLED}


JOB_ERRORS = [
    ("Invalid model: no-such-model", "invalid_model", BatchErrorKind.MODEL),
    ("The model no-such-model does not exist", "invalid_model", BatchErrorKind.MODEL),
    ("This model is not available in your subscription tier", "tier_not_allowed", BatchErrorKind.MODEL),
    ("Input file not found.", "file_not_found", BatchErrorKind.FILE_MISSING),
    ("Too many requests in the batch.", "too_many_requests_in_batch", BatchErrorKind.TOO_LARGE),
    ("Enqueued token limit reached for this model", "token_limit_exceeded", BatchErrorKind.TOKEN_LIMIT),
    ("Too many enqueued tokens, your limit is 1000000", "token_limit_exceeded", BatchErrorKind.TOKEN_LIMIT),
    ("Please check your billing settings", "billing", BatchErrorKind.ACCOUNT),
    ("Unauthorized", "unauthorized", BatchErrorKind.ACCOUNT),
    ("Line 3 is not JSON", "", BatchErrorKind.UNKNOWN),
    ("Too many requests", "", BatchErrorKind.UNKNOWN),
    ("", "", BatchErrorKind.UNKNOWN),
]


@pytest.mark.parametrize(("message", "code", "kind"), JOB_ERRORS)
def test_whole_job_errors(message, code, kind):
    """A message we know has a code and a kind; one we do not know blames no row."""
    assert batch_code_of(message) == code
    assert classify_batch_error(LineError(code.upper(), message)) is kind


def test_every_job_code_can_come_about():
    """Each code has a message that leads to it and a kind, and the kinds blame no row."""
    assert {code for _, code in BATCH_FRAGMENTS} == set(BATCH_CODES) == {code for _, code, _ in JOB_ERRORS if code}
    assert BatchErrorKind.ROW not in BATCH_CODES.values()


def test_words_are_written_in_lower_case():
    """Words are compared in lower case, so a capital in a table would never be found."""
    prefixes = [prefix for prefix, _ in (*CODE_PREFIXES, *GENERIC_PREFIXES)]
    assert all(word == word.lower() for word in (*CODES, *GENERIC_WORDS, *BATCH_CODES, *prefixes))
