"""How a row's end, and a whole batch's refusal, are judged: tables.

A row whose line (or call) holds an ``error`` is judged by the first of these that knows it:

1. a reason in the error's details (``google.rpc.ErrorInfo``): ``REASONS``;
2. a piece of the message: ``FRAGMENTS``, each under the statuses it is believed of;
3. the status word, which a number stands for in result lines: ``STATUSES``. Lines hold gRPC numbers or HTTP statuses,
   so both are read (``GRPC_NAMES``, ``HTTP_NAMES``);
4. **the default**: an HTTP status we have no word for takes the class of its hundred (4xx is about the row, anything
   else is not), and what has neither is ``transient``. Such a verdict is marked ``is_unknown``, so that it is counted.

A row with an answer is judged by the ``finishReason`` of its candidates and by ``promptFeedback``: see ``FINISHES``.

Sources: https://grpc.io/docs/guides/status-codes/ and google.rpc.Code (numbers and their HTTP statuses), the
``google-genai`` SDK's enumerations (reasons), https://ai.google.dev/gemini-api/docs/troubleshooting (messages), issues
of googleapis/python-genai (1218: 403 for a file that is gone) and of users whose prepaid credits ran out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple

from batchferry.domain.batcherrors import BatchErrorKind
from batchferry.domain.rows import RowClass
from batchferry.providers.http import duration_s
from batchferry.providers.shapes import count_of, message_of, object_of, safe_code
from batchferry.providers.verdicts import Verdict

GRPC_NAMES: Mapping[int, str] = MappingProxyType(
    {
        1: "CANCELLED",
        2: "UNKNOWN",
        3: "INVALID_ARGUMENT",
        4: "DEADLINE_EXCEEDED",
        5: "NOT_FOUND",
        6: "ALREADY_EXISTS",
        7: "PERMISSION_DENIED",
        8: "RESOURCE_EXHAUSTED",
        9: "FAILED_PRECONDITION",
        10: "ABORTED",
        11: "OUT_OF_RANGE",
        12: "UNIMPLEMENTED",
        13: "INTERNAL",
        14: "UNAVAILABLE",
        15: "DATA_LOSS",
        16: "UNAUTHENTICATED",
    }
)
HTTP_NAMES: Mapping[int, str] = MappingProxyType(
    {
        400: "INVALID_ARGUMENT",
        401: "UNAUTHENTICATED",
        402: "PERMISSION_DENIED",
        403: "PERMISSION_DENIED",
        404: "NOT_FOUND",
        408: "DEADLINE_EXCEEDED",
        409: "ABORTED",
        413: "INVALID_ARGUMENT",
        422: "INVALID_ARGUMENT",
        425: "UNAVAILABLE",
        429: "RESOURCE_EXHAUSTED",
        499: "CANCELLED",
        500: "INTERNAL",
        501: "UNIMPLEMENTED",
        502: "UNAVAILABLE",
        503: "UNAVAILABLE",
        504: "DEADLINE_EXCEEDED",
        529: "UNAVAILABLE",
    }
)
HTTP_STATUSES: Mapping[str, int] = MappingProxyType(
    {
        "CANCELLED": 499,
        "UNKNOWN": 500,
        "INVALID_ARGUMENT": 400,
        "DEADLINE_EXCEEDED": 504,
        "NOT_FOUND": 404,
        "ALREADY_EXISTS": 409,
        "PERMISSION_DENIED": 403,
        "RESOURCE_EXHAUSTED": 429,
        "FAILED_PRECONDITION": 400,
        "ABORTED": 409,
        "OUT_OF_RANGE": 400,
        "UNIMPLEMENTED": 501,
        "INTERNAL": 500,
        "UNAVAILABLE": 503,
        "DATA_LOSS": 500,
        "UNAUTHENTICATED": 401,
    }
)
"""The HTTP status that goes with a word, as google.rpc.Code has it."""


def _each(row_class: RowClass, *words: str) -> dict[str, RowClass]:
    return dict.fromkeys(words, row_class)


REASONS: Mapping[str, RowClass] = MappingProxyType(
    _each(
        RowClass.ACCOUNT,
        "API_KEY_INVALID",
        "API_KEY_EXPIRED",
        "API_KEY_SERVICE_BLOCKED",
        "API_KEY_HTTP_REFERRER_BLOCKED",
        "API_KEY_IP_ADDRESS_BLOCKED",
        "ACCESS_TOKEN_EXPIRED",
        "ACCESS_TOKEN_SCOPE_INSUFFICIENT",
        "ACCOUNT_STATE_INVALID",
        "BILLING_DISABLED",
        "CONSUMER_INVALID",
        "CONSUMER_SUSPENDED",
        "CREDENTIALS_MISSING",
        "LOCATION_POLICY_VIOLATED",
        "SERVICE_DISABLED",
        "USER_PROJECT_DENIED",
    )
)
"""``reason`` of google.api.ErrorReason that is about the account whatever the status: a wrong key comes with 400."""

STATUSES: Mapping[str, RowClass] = MappingProxyType(
    _each(
        RowClass.INVALID_REQUEST,
        "INVALID_ARGUMENT",
        "NOT_FOUND",
        "ALREADY_EXISTS",
        "FAILED_PRECONDITION",
        "OUT_OF_RANGE",
        "UNIMPLEMENTED",
    )
    | _each(RowClass.ACCOUNT, "PERMISSION_DENIED", "UNAUTHENTICATED")
    # Quota as well as rate: which of the two is not told apart reliably, and rows are not to blame for either.
    | _each(
        RowClass.TRANSIENT,
        "RESOURCE_EXHAUSTED",
        "DEADLINE_EXCEEDED",
        "INTERNAL",
        "UNAVAILABLE",
        "UNKNOWN",
        "ABORTED",
        "DATA_LOSS",
    )
    | _each(RowClass.CANCELLED, "CANCELLED")
)

_ABOUT_REQUEST = frozenset({"INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "OUT_OF_RANGE", "UNIMPLEMENTED"})
GONE_FILE = re.compile(r"permission to access the file\b.{0,200}\bmay not exist", re.IGNORECASE | re.DOTALL)
"""How a file that is gone is refused: with 403, like one that belongs to somebody else."""
UNKNOWN_MODEL = re.compile(
    r"\bmodels?\b.{0,200}\b(?:not found|not supported for|does not exist|not available|no longer available)",
    re.IGNORECASE | re.DOTALL,
)
ACCOUNT_WORDS = re.compile(
    r"api key (?:not valid|not found|expired|was reported as leaked)|user location is not supported"
    r"|billing (?:account|is not|to be)|enable billing|credits? (?:are|is|has been|have been) (?:depleted|exhausted)",
    re.IGNORECASE,
)

FRAGMENTS: tuple[tuple[frozenset[str], re.Pattern[str], RowClass], ...] = (
    (_ABOUT_REQUEST | {"PERMISSION_DENIED", "RESOURCE_EXHAUSTED"}, ACCOUNT_WORDS, RowClass.ACCOUNT),
    (
        frozenset({"INVALID_ARGUMENT", "OUT_OF_RANGE", "RESOURCE_EXHAUSTED"}),
        re.compile(
            r"input token count\b.{0,80}\bexceeds|exceeds the maximum number of (?:input )?tokens"
            r"|maximum (?:input|context) (?:token|length)|context window",
            re.IGNORECASE | re.DOTALL,
        ),
        RowClass.TOO_LONG,
    ),
    # A file that the row itself names, not the batch's.
    (frozenset({"PERMISSION_DENIED"}), GONE_FILE, RowClass.INVALID_REQUEST),
    (frozenset({"NOT_FOUND", "INVALID_ARGUMENT", "UNIMPLEMENTED"}), UNKNOWN_MODEL, RowClass.MODEL_UNAVAILABLE),
    (
        frozenset({"INVALID_ARGUMENT", "FAILED_PRECONDITION"}),
        re.compile(r"\b(?:blocked|prohibited)\b.{0,80}\b(?:safety|content|policy|policies)\b", re.IGNORECASE),
        RowClass.CONTENT_FILTERED,
    ),
)


class Finish(StrEnum):
    """What a candidate's ``finishReason`` says of it."""

    ENDED = "ended"
    """The model came to an end by itself."""
    TRUNCATED = "truncated"
    """Cut by a token limit."""
    FILTERED = "filtered"
    """Stopped by a filter."""
    BROKEN = "broken"
    """Something went wrong that another run may do better: no answer, and not the row's fault."""
    REFUSED = "refused"
    """The request is at fault."""
    ACCOUNT = "account"
    """The account is limited."""


FINISHES: Mapping[str, Finish] = MappingProxyType(
    {"STOP": Finish.ENDED}
    | dict.fromkeys(("MAX_TOKENS", "CONTINUATION"), Finish.TRUNCATED)
    | dict.fromkeys(
        (
            "SAFETY",
            "RECITATION",
            "LANGUAGE",
            "BLOCKLIST",
            "PROHIBITED_CONTENT",
            "SPII",
            "IMAGE_SAFETY",
            "IMAGE_PROHIBITED_CONTENT",
            "IMAGE_RECITATION",
            "MODEL_ARMOR",
            "ESCALATION",
        ),
        Finish.FILTERED,
    )
    | dict.fromkeys(
        (
            "MALFORMED_FUNCTION_CALL",
            "MALFORMED_RESPONSE",
            "UNEXPECTED_TOOL_CALL",
            "TOO_MANY_TOOL_CALLS",
            "IMAGE_OTHER",
            "NO_IMAGE",
            "OTHER",
        ),
        Finish.BROKEN,
    )
    | {"MISSING_THOUGHT_SIGNATURE": Finish.REFUSED, "PUP_LIMITED_DISABLED": Finish.ACCOUNT}
)

BLOCK_REASONS = frozenset(
    {"SAFETY", "OTHER", "BLOCKLIST", "PROHIBITED_CONTENT", "IMAGE_SAFETY", "MODEL_ARMOR", "JAILBREAK"}
)
"""``promptFeedback.blockReason`` of a prompt that was not let through: no candidates, and the row counts as successful
at the provider."""


class ErrorFacts(NamedTuple):
    """What a Google error says of itself. Words are words; ``message`` is payload."""

    status: str | None = None
    """Its status word, or the one that its number stands for."""
    http_status: int | None = None
    reason: str | None = None
    message: str = ""
    retry_after_s: float | None = None
    """``retryDelay`` of google.rpc.RetryInfo, 0 to a day."""

    @property
    def code(self) -> str | None:
        """The word by which the error is told and counted: a reason that says more than the status, else the status."""
        return self.reason if self.reason in REASONS else self.status


NO_FACTS = ErrorFacts()


def error_facts(value: Any) -> ErrorFacts:
    """What an error object (``code``, ``message``, ``status``, ``details``) says; NO_FACTS when it is none."""
    members = object_of(value)
    code, word = members.get("code"), safe_code(members.get("status"))
    if isinstance(code, bool) or not isinstance(code, int | str):
        code = None
    if not members.keys() & {"code", "status", "message"}:
        return NO_FACTS
    number = count_of(code) if code is not None else 0
    if word is None and isinstance(code, str) and not number:
        word = safe_code(code)
    status = word.upper() if word is not None else GRPC_NAMES.get(number) or HTTP_NAMES.get(number)
    http_status = number if 100 <= number <= 599 else HTTP_STATUSES.get(status or "")
    reason = retry_after_s = None
    details = members.get("details")
    for detail in details if isinstance(details, list) else ():
        entry = object_of(detail)
        reason = reason or safe_code(entry.get("reason"))
        if isinstance(entry.get("retryDelay"), str):
            retry_after_s = duration_s(entry["retryDelay"])
    return ErrorFacts(status, http_status, reason, message_of(members.get("message")), retry_after_s)


def body_error(body: Any) -> ErrorFacts | None:
    """The error that an answer's body is, alone or in a list of one; None when it is no Google error."""
    if isinstance(body, list) and len(body) == 1:
        body = body[0]
    facts = error_facts(object_of(body).get("error"))
    return facts if facts != NO_FACTS else None


def classify_row(facts: ErrorFacts, http_status: int | None = None) -> Verdict:
    """Judge a row that holds an error; ``http_status`` is that of the call, where there was one."""
    about_account = REASONS.get(facts.reason or "")
    if about_account is not None:
        return Verdict(about_account)
    status = facts.status or HTTP_NAMES.get(http_status or 0)
    for believed_of, pattern, row_class in FRAGMENTS:
        if status in believed_of and pattern.search(facts.message):
            return Verdict(row_class)
    found = STATUSES.get(status or "")
    if found is not None:
        return Verdict(found)
    number = http_status if http_status is not None else facts.http_status
    is_about_row = number is not None and 400 <= number < 500
    return Verdict(RowClass.INVALID_REQUEST if is_about_row else RowClass.TRANSIENT, is_unknown=True)


BATCH_STATUSES: Mapping[str, BatchErrorKind] = MappingProxyType(
    {
        "PERMISSION_DENIED": BatchErrorKind.ACCOUNT,
        "UNAUTHENTICATED": BatchErrorKind.ACCOUNT,
        "RESOURCE_EXHAUSTED": BatchErrorKind.TOKEN_LIMIT,
    }
    | dict.fromkeys(REASONS, BatchErrorKind.ACCOUNT)
)
"""Status words of a failed operation that say what is wrong; the others depend on the message."""
_INPUT_FILE = re.compile(r"\bfile\b", re.IGNORECASE)
_TOO_LARGE = re.compile(r"\b(?:too (?:large|many|big)|exceeds? the (?:maximum|limit|allowed))\b", re.IGNORECASE)


def classify_batch(code: str, message: str) -> BatchErrorKind:
    """What a failed operation's error is about. No error is known to name a line; what is not understood is UNKNOWN."""
    status = code.upper()
    if ACCOUNT_WORDS.search(message):
        return BatchErrorKind.ACCOUNT
    if GONE_FILE.search(message):
        return BatchErrorKind.FILE_MISSING
    found = BATCH_STATUSES.get(status)
    if found is not None:
        return found
    if status not in _ABOUT_REQUEST:
        return BatchErrorKind.UNKNOWN
    if UNKNOWN_MODEL.search(message):
        return BatchErrorKind.MODEL
    if status in {"NOT_FOUND", "FAILED_PRECONDITION"} and _INPUT_FILE.search(message):
        return BatchErrorKind.FILE_MISSING
    return BatchErrorKind.TOO_LARGE if _TOO_LARGE.search(message) else BatchErrorKind.UNKNOWN
