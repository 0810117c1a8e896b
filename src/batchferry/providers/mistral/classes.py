"""Mistral's tables, by which a row's end and a whole job's refusal are judged.

How they are walked stands in ``providers.verdicts``. Mistral's error is flat: ``{"object": "error", "message", "type",
"param", "code", "raw_status_code"}``. Its ``type`` is the word that tells; its ``code`` is a number as a text that
stands for a whole group (``3051`` comes with a prompt that is too long, an image the model cannot see, and an effort
it does not know), so ``word_of`` takes the type and falls back on the number. Types that say no more than
"your request" leave the rest to the message. The words are from answers that users of the API have published; the
official client lists none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from batchferry.domain.batcherrors import BatchErrorKind
from batchferry.domain.provider import LineError
from batchferry.domain.rows import RowClass
from batchferry.providers.verdicts import ErrorFacts, RowTables, Verdict


def _each(row_class: RowClass, *words: str) -> dict[str, RowClass]:
    return dict.fromkeys(words, row_class)


CODES: Mapping[str, RowClass] = MappingProxyType(
    # Outer codes: the row never had an HTTP answer. Mistral documents none, gateways in front of it send these.
    _each(RowClass.EXPIRED, "batch_expired", "timeout_exceeded")
    | _each(RowClass.CANCELLED, "batch_cancelled", "cancelled")
    | _each(RowClass.TRANSIENT, "request_timeout")
    # A gateway's word; Mistral itself answers an unpaid account with 401, 402 or 403.
    | _each(RowClass.ACCOUNT, "insufficient_quota")
    # Nothing is wrong with the row.
    | _each(
        RowClass.TRANSIENT,
        "rate_limited",
        "rate_limit_exceeded",
        "service_tier_capacity_exceeded",
        "internal_server_error",
        "unreachable_backend",
    )
    | _each(RowClass.TOO_LONG, "invalid_request_prompt_too_long")
    # Unknown, withdrawn, or not in the account's tier.
    | _each(RowClass.MODEL_UNAVAILABLE, "invalid_model", "tier_not_allowed")
)
CODE_PREFIXES: tuple[tuple[str, RowClass], ...] = (("guardrail", RowClass.CONTENT_FILTERED),)
GENERIC_WORDS: Mapping[str, RowClass] = MappingProxyType(
    _each(RowClass.INVALID_REQUEST, "invalid_request", "bad_request")
)
GENERIC_PREFIXES: tuple[tuple[str, RowClass], ...] = (("invalid_request_", RowClass.INVALID_REQUEST),)
"""``invalid_request_error``, ``..._invalid_args``, ``..._prompt``, ``..._message_order``: their messages may say
more."""
FRAGMENTS: tuple[tuple[re.Pattern[str], RowClass], ...] = (
    (re.compile(r"too large for model with|maximum context length", re.IGNORECASE), RowClass.TOO_LONG),
    # One input of an embeddings request.
    (re.compile(r"\bexceeding max(?:imum)? \d+ tokens", re.IGNORECASE), RowClass.TOO_LONG),
    (re.compile(r"^invalid model\b", re.IGNORECASE), RowClass.MODEL_UNAVAILABLE),
    # Guardrails block a prompt with 403, which would else be about the account.
    (re.compile(r"\bguardrails?\b|\bmoderation\b|\bcontent policy\b", re.IGNORECASE), RowClass.CONTENT_FILTERED),
)

_tables = RowTables(
    codes=CODES,
    code_prefixes=CODE_PREFIXES,
    types=MappingProxyType({}),
    generic_words=GENERIC_WORDS,
    generic_prefixes=GENERIC_PREFIXES,
    fragments=FRAGMENTS,
)


def word_of(facts: ErrorFacts) -> str | None:
    """The word that tells most about an error: its type, else its code."""
    return facts.type or facts.code


def classify_row(http_status: int | None, facts: ErrorFacts) -> Verdict:
    """Judge a row that did not succeed; ``http_status`` None when there was no HTTP answer."""
    return _tables.classify(http_status, facts._replace(code=word_of(facts), type=None))


BATCH_CODES: Mapping[str, BatchErrorKind] = MappingProxyType(
    {
        "invalid_model": BatchErrorKind.MODEL,
        "tier_not_allowed": BatchErrorKind.MODEL,
        "file_not_found": BatchErrorKind.FILE_MISSING,
        "too_many_requests_in_batch": BatchErrorKind.TOO_LARGE,
        "token_limit_exceeded": BatchErrorKind.TOKEN_LIMIT,
        "billing": BatchErrorKind.ACCOUNT,
        "unauthorized": BatchErrorKind.ACCOUNT,
    }
)
"""What an entry of a job's error list is about, by its code: Mistral's where it names one, else ours."""
BATCH_FRAGMENTS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE | re.DOTALL), code)
    for pattern, code in (
        (r"\binvalid model\b|\bmodel\b.{0,200}\b(?:not found|does not exist)", "invalid_model"),
        (r"\bsubscription tier\b", "tier_not_allowed"),
        (r"\bfile\b.{0,200}\b(?:not found|does not exist|no longer available)", "file_not_found"),
        (r"\btoo many requests in (?:the |this )?(?:batch|file|job)\b", "too_many_requests_in_batch"),
        (r"\benqueued token limit\b|\benqueued tokens\b.{0,80}\blimit\b", "token_limit_exceeded"),
        (r"\b(?:billing|payment|insufficient (?:credits?|funds))\b", "billing"),
        (r"\bunauthori[sz]ed\b", "unauthorized"),
    )
)
"""Our codes for messages of a job's error list, whose entries have a message and a count only
(``BatchError`` in the official client). The wordings are not documented: what is not recognised stays without a code,
and its kind is unknown, which blames no row."""


def batch_code_of(message: str) -> str:
    """Our code for the message of an entry of a job's error list; empty when it says nothing we know."""
    return next((code for pattern, code in BATCH_FRAGMENTS if pattern.search(message)), "")


def is_queue_full(message: str) -> bool:
    """Whether a refusal says that more tokens wait at the provider than may: it is to be sent later."""
    return batch_code_of(message) == "token_limit_exceeded"


def classify_batch_error(error: LineError) -> BatchErrorKind:
    """What one entry of a failed job's error list is about. No entry names a line, so none blames a row."""
    return BATCH_CODES.get(error.code.lower(), BatchErrorKind.UNKNOWN)
