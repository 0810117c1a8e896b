"""The tables by which rows of Message Batches are judged, against a table written from the provider's documents."""

from __future__ import annotations

from typing import get_args

import anthropic.types.shared as official
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchferry.domain.batcherrors import BatchErrorKind
from batchferry.domain.provider import LineError
from batchferry.domain.rows import RowClass
from batchferry.providers.anthropic.classes import (
    ACCOUNT_CODES,
    CODES,
    FRAGMENTS,
    GENERIC_WORDS,
    TYPE_STATUSES,
    TYPES,
    classify,
    classify_batch_error,
)
from batchferry.providers.verdicts import ErrorFacts

INVALID = "invalid_request_error"
A, T, R = RowClass.ACCOUNT, RowClass.TRANSIENT, RowClass.INVALID_REQUEST
F, L, M = RowClass.CONTENT_FILTERED, RowClass.TOO_LONG, RowClass.MODEL_UNAVAILABLE

KNOWN = [
    # Types alone.
    (INVALID, None, "messages: at least one message is required", R),
    ("not_found_error", None, "file not found", R),
    ("authentication_error", None, "", A),
    ("permission_error", None, "", A),
    ("billing_error", None, "", A),
    ("rate_limit_error", None, "", T),
    ("api_error", None, "", T),
    ("overloaded_error", None, "", T),
    ("timeout_error", None, "", T),
    ("conflict_error", None, "", T),
    ("request_too_large", None, "", L),
    # An empty purse behind the general type.
    (INVALID, None, "Your credit balance is too low to access the API.", A),
    (INVALID, None, "You have reached your specified API usage limits. You will regain access on 2026-12-01", A),
    # Length.
    (INVALID, None, "prompt is too long: 210000 tokens > 200000 maximum", L),
    (INVALID, None, "input length and max_tokens exceed context limit: 199000 + 8000 > 200000", L),
    # Content policy.
    (INVALID, None, "Output blocked by content filtering policy", F),
    (INVALID, None, "This request was blocked under Anthropic's Usage Policy", F),
    # The model.
    ("not_found_error", None, "model: claude-nobody", M),
    # Codes, whatever the type beside them.
    ("rate_limit_error", "enforced_spend_limit_reached", "", A),
    ("rate_limit_error", "contract_spend_limit_reached", "", A),
    ("billing_error", "linked_organization_spend_limit_reached", "", A),
    ("rate_limit_error", "workspace_spend_limit_reached", "", A),
    ("billing_error", "linked_organization_billing_unavailable", "", A),
    (INVALID, "organization_on_hold", "", A),
    (INVALID, "organization_type_not_supported", "", A),
    (INVALID, "parent_organization_required", "", A),
    (INVALID, "workspace_human_review_disabled", "", A),
    (INVALID, "cmek_key_disabled", "", A),
    (INVALID, "cmek_key_network_blocked", "", A),
    ("permission_error", "sandbox_egress_restricted", "", A),
    ("rate_limit_error", "ramp_limit_exceeded", "", T),
    ("api_error", "cmek_context_unavailable", "", T),
    ("api_error", "cmek_key_unreachable", "", T),
    ("request_too_large", "request_body_too_large_after_decoding", "", L),
    (INVALID, "request_body_encoding_invalid", "", R),
    (INVALID, "request_body_encoding_unsupported", "", R),
]
"""(type, code, message, class): what the references name. Nothing here is read off the code's tables."""


@pytest.mark.parametrize(("kind", "code", "message", "expected"), KNOWN)
def test_every_documented_end_has_its_class(kind, code, message, expected):
    """Each end that the provider documents has its class, in a line as in a single call, and none is unknown."""
    facts = ErrorFacts(kind, code, message)
    assert classify(None, facts) == (expected, False)
    assert classify(TYPE_STATUSES[kind], facts) == (expected, False)


def test_every_line_of_the_tables_is_documented():
    """No type, code or piece of a message stands in the tables that the table above does not name, and none twice."""
    kinds = {kind for kind, _, _, _ in KNOWN}
    codes = {code for _, code, _, _ in KNOWN if code}
    assert set(TYPES) | set(GENERIC_WORDS) == kinds == set(TYPE_STATUSES)
    assert not set(TYPES) & set(GENERIC_WORDS)
    assert codes - set(CODES) == {"workspace_spend_limit_reached"}  # by its ending
    assert set(CODES) <= codes
    assert set(CODES) >= ACCOUNT_CODES
    messages = [message for _, code, message, _ in KNOWN if not code]
    assert all(any(pattern.search(message) for message in messages) for pattern, _ in FRAGMENTS)
    assert all(word == word.lower() for word in (*CODES, *TYPES, *GENERIC_WORDS))


def test_no_type_of_the_official_client_is_forgotten():
    """Every error type that the official client knows stands in a table, those of the agents' memory aside."""
    known = {kind for kind in get_args(official.ErrorType) if not kind.startswith("memory_")}
    assert known <= {*TYPES, *GENERIC_WORDS}
    assert len(known) >= 9


@pytest.mark.parametrize(
    ("status", "kind", "code", "expected"),
    [
        (None, "something_new", None, T),
        (None, None, None, T),
        (None, INVALID, "something_new", R),
        (400, "something_new", None, R),
        (429, "something_new", "something_new", T),
        (503, None, "something_new", T),
    ],
)
def test_the_default_is_counted(status, kind, code, expected):
    """What no table knows goes once more, or fails its row on a 4xx, and says that it is unknown."""
    assert classify(status, ErrorFacts(kind, code)) == (expected, True)


WORDS = st.none() | st.sampled_from(sorted({*CODES, *TYPES, *GENERIC_WORDS})) | st.text(max_size=12)


@settings(deadline=None)
@given(st.none() | st.integers(0, 999), WORDS, WORDS, st.text(max_size=40))
def test_every_error_has_a_class_of_a_provider(status, kind, code, message):
    """Any error at all ends in a class that a provider can give, never in a success or a class of our own."""
    assert classify(status, ErrorFacts(kind, code, message)).row_class in {A, T, R, F, L, M}


def test_a_batch_has_no_errors_of_its_own():
    """Batches do not fail as a whole; should one name errors, they blame no row unless they name a line."""
    assert classify_batch_error(LineError("x")) is BatchErrorKind.UNKNOWN
    assert classify_batch_error(LineError("x", line=3)) is BatchErrorKind.ROW
