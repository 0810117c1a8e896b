"""Gemini's tables, against tables written from Google's documents, both ways."""

from __future__ import annotations

from typing import Any

import pytest
from google.genai import types
from hypothesis import given, settings
from hypothesis import strategies as st

from batchferry.domain.batcherrors import BatchErrorKind
from batchferry.domain.provider import ProviderStatus
from batchferry.domain.rows import RowClass
from batchferry.providers.gemini.classes import (
    BATCH_STATUSES,
    BLOCK_REASONS,
    FINISHES,
    FRAGMENTS,
    GRPC_NAMES,
    HTTP_NAMES,
    HTTP_STATUSES,
    NO_FACTS,
    REASONS,
    STATUSES,
    Finish,
    body_error,
    classify_batch,
    classify_row,
    error_facts,
)
from batchferry.providers.gemini.statuses import STATES, read_state

A, T, R = RowClass.ACCOUNT, RowClass.TRANSIENT, RowClass.INVALID_REQUEST
F, L, M = RowClass.CONTENT_FILTERED, RowClass.TOO_LONG, RowClass.MODEL_UNAVAILABLE

BY_NUMBER = {
    # gRPC
    1: RowClass.CANCELLED, 2: T, 3: R, 4: T, 5: R, 6: R, 7: A, 8: T, 9: R, 10: T, 11: R, 12: R, 13: T, 14: T, 15: T, 16: A,
    # HTTP
    400: R, 401: A, 402: A, 403: A, 404: R, 408: T, 409: T, 413: R, 422: R, 425: T, 429: T, 499: RowClass.CANCELLED,
    500: T, 501: R, 502: T, 503: T, 504: T, 529: T,
}  # fmt: skip

BY_MESSAGE = [
    (3, "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576).", L),
    (400, "The input token count exceeds the maximum number of tokens allowed 1048576.", L),
    (3, "Unable to submit request because the input token count is 1100000; exceeds the maximum number of tokens.", L),
    (8, "The input token count (2) exceeds the maximum number of tokens allowed (1).", L),
    (13, "The input token count (2) exceeds the maximum number of tokens allowed (1).", T),
    (5, "models/gemini-0 is not found for API version v1beta, or is not supported for generateContent.", M),
    (404, "models/gemini-0 is not found for API version v1beta, or is not supported for generateContent.", M),
    (404, "This model models/gemini-1.0-pro is no longer available to new users.", M),
    (400, "API key not valid. Please pass a valid API key.", A),
    (400, "API key expired. Please renew the API key.", A),
    (400, "User location is not supported for the API use.", A),
    (429, "Your prepayment credits are depleted. Please go to your project's billing page.", A),
    # The words of an ordinary per-minute limit as well.
    (429, "You exceeded your current quota, please check your plan and billing details.", T),
    (403, "You do not have permission to access the File abc or it may not exist.", R),
    (403, "The caller does not have permission", A),
    (400, "The request was blocked by our safety policy.", F),
    (400, "Invalid value at 'contents'", R),
]


@pytest.mark.parametrize(("number", "row_class"), BY_NUMBER.items())
def test_a_number_is_judged_as_grpc_or_http(number: int, row_class: RowClass) -> None:
    """Each number of either kind has its class, as a number and as a text, and is known."""
    for code in (number, str(number)):
        verdict = classify_row(error_facts({"code": code, "message": "m"}))
        assert verdict == (row_class, False)


def test_the_tables_hold_nothing_that_is_not_tested() -> None:
    """Every number and word of the product's tables stands in the test's, and the reverse."""
    assert set(BY_NUMBER) == set(GRPC_NAMES) | set(HTTP_NAMES)
    assert set(STATUSES) == set(GRPC_NAMES.values()) == set(HTTP_STATUSES)
    assert set(HTTP_NAMES.values()) <= set(STATUSES)
    assert set(REASONS.values()) == {A}


def test_words_go_before_numbers() -> None:
    """A line that has both is judged by its word; a word alone is enough."""
    for word, row_class in STATUSES.items():
        assert classify_row(error_facts({"code": 418, "status": word})).row_class is row_class
        assert classify_row(error_facts({"status": word.lower()})).row_class is row_class


@pytest.mark.parametrize(("code", "message", "row_class"), BY_MESSAGE)
def test_messages_that_say_more_than_the_number(code: int, message: str, row_class: RowClass) -> None:
    """Length, model, key, region, unpaid accounts and gone files are told from plain refusals."""
    assert classify_row(error_facts({"code": code, "message": message})) == (row_class, False)


def test_every_fragment_is_met() -> None:
    """No pattern of the product stands unused by the messages above."""
    for believed_of, pattern, row_class in FRAGMENTS:
        assert any(
            pattern.search(message) and error_facts({"code": code}).status in believed_of and row_class is wanted
            for code, message, wanted in BY_MESSAGE
        ), pattern.pattern


def test_a_reason_in_the_details_is_about_the_account() -> None:
    """A wrong key comes with 400 and is no fault of the row."""
    for reason in REASONS:
        facts = error_facts({"code": 400, "message": "m", "details": [{"reason": reason}]})
        assert (classify_row(facts).row_class, facts.code) == (A, reason)
    other = error_facts({"code": 400, "details": [{"reason": "SOMETHING_NEW"}]})
    assert (classify_row(other).row_class, other.code) == (R, "INVALID_ARGUMENT")


@pytest.mark.parametrize(("number", "row_class"), [(418, R), (451, R), (599, T), (0, T), (77, T)])
def test_the_default(number: int, row_class: RowClass) -> None:
    """What no table knows takes the class of its hundred, and says that it is unknown."""
    assert classify_row(error_facts({"code": number, "message": "m"})) == (row_class, True)


def test_the_delay_in_the_details() -> None:
    """RetryInfo is read in seconds; nonsense is nothing."""

    def delay(text: Any) -> float | None:
        return error_facts({"code": 429, "details": [{"retryDelay": text}]}).retry_after_s

    assert (delay("26s"), delay("1.5s"), delay(7), delay("soon")) == (26.0, 1.5, None, None)


_MEMBERS = st.sampled_from(["error", "code", "message", "status", "details", "reason", "retryDelay"])
_LEAVES = st.none() | st.booleans() | st.integers(-1, 600) | st.sampled_from(["INTERNAL", "3", "9s", ""])


@settings(deadline=None, max_examples=60)
@given(
    st.recursive(_LEAVES, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_MEMBERS, inner), max_leaves=8)
)
def test_any_json_is_read(value: Any) -> None:
    """Whatever stands where an error should be, there is a verdict."""
    assert classify_row(error_facts(value)).row_class in RowClass
    facts = body_error(value)
    assert facts is None or facts != NO_FACTS


def test_finish_reasons_of_the_official_client_are_all_known() -> None:
    """Both ways: each reason of the SDK has a meaning here, and there is none that it does not know."""
    theirs = {reason.value for reason in types.FinishReason} - {"FINISH_REASON_UNSPECIFIED"}
    assert set(FINISHES) == theirs
    assert {reason for reason, finish in FINISHES.items() if finish is Finish.ENDED} == {"STOP"}
    assert {reason.value for reason in types.BlockedReason} - {"BLOCKED_REASON_UNSPECIFIED"} == BLOCK_REASONS


def test_states_of_the_official_client_are_all_known() -> None:
    """Both ways, with both prefixes; what is new is unknown and not an end."""
    theirs = {state.value.removeprefix("JOB_STATE_") for state in types.JobState} - {"UNSPECIFIED"}
    assert set(STATES) == theirs
    for word, status in STATES.items():
        for text in (f"BATCH_STATE_{word}", f"JOB_STATE_{word}", word, f"batch_state_{word.lower()}"):
            assert read_state(text) is status
    for word in ("", "BATCH_STATE_UNSPECIFIED", "BATCH_STATE_DREAMING"):
        assert read_state(word) is ProviderStatus.UNKNOWN


BATCHES = [
    ("PERMISSION_DENIED", "m", BatchErrorKind.ACCOUNT),
    ("UNAUTHENTICATED", "m", BatchErrorKind.ACCOUNT),
    ("API_KEY_INVALID", "m", BatchErrorKind.ACCOUNT),
    ("RESOURCE_EXHAUSTED", "Enqueued token limit reached", BatchErrorKind.TOKEN_LIMIT),
    ("RESOURCE_EXHAUSTED", "Your prepayment credits are depleted.", BatchErrorKind.ACCOUNT),
    ("PERMISSION_DENIED", "You do not have permission to access the File x or it may not exist.", BatchErrorKind.FILE_MISSING),
    ("NOT_FOUND", "The input file was not found", BatchErrorKind.FILE_MISSING),
    ("FAILED_PRECONDITION", "The file is not ACTIVE", BatchErrorKind.FILE_MISSING),
    ("NOT_FOUND", "models/x is not found for API version v1beta", BatchErrorKind.MODEL),
    ("INVALID_ARGUMENT", "The input has too many requests", BatchErrorKind.TOO_LARGE),
    ("INVALID_ARGUMENT", "line 3 is no JSON", BatchErrorKind.UNKNOWN),
    ("INTERNAL", "file trouble", BatchErrorKind.UNKNOWN),
    ("", "", BatchErrorKind.UNKNOWN),
]  # fmt: skip


@pytest.mark.parametrize(("code", "message", "kind"), BATCHES)
def test_failed_jobs(code: str, message: str, kind: BatchErrorKind) -> None:
    """What a failed operation is about; what is not understood fails nobody."""
    assert classify_batch(code, message) is kind


def test_the_table_of_failed_jobs_is_tested_whole() -> None:
    """Each word of it stands above, reasons by one of them."""
    assert set(BATCH_STATUSES) - set(REASONS) <= {code for code, _, _ in BATCHES}
    assert all(BATCH_STATUSES[reason] is BatchErrorKind.ACCOUNT for reason in REASONS)
