"""How one row of a batch ended: classes, flags and the verdict that a provider's room gives on a result line."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from batchferry.domain.provider import CallFailed, PaceHints, Usage


class RowClass(StrEnum):
    """The class of a row's end. What is done about each stands in ``retry.py``."""

    SUCCEEDED = "succeeded"
    """A 2xx answer with a body."""
    CONTENT_FILTERED = "content_filtered"
    """Blocked by the provider's content filter without an answer."""
    TOO_LONG = "too_long"
    """Longer than the model's context."""
    INVALID_REQUEST = "invalid_request"
    """The provider refused this row for what it says."""
    MODEL_UNAVAILABLE = "model_unavailable"
    """The model does not exist or this account may not use it."""
    TRANSIENT = "transient"
    """5xx, 429, overload, timeout, status 0, empty answer: nothing is wrong with the row."""
    UNREADABLE = "unreadable"
    """A result line named this row but could not be read."""
    EXPIRED = "expired"
    """Not run before the completion window closed."""
    CANCELLED = "cancelled"
    """Not run because the batch was cancelled."""
    MISSING = "missing"
    """Submitted, and in neither result file of a completed batch."""
    ACCOUNT = "account"
    """Quota, billing, authentication or permission: the row is not to blame and stays."""
    BATCH_FAILED = "batch_failed"
    """The whole batch was refused; this row was not named and goes again."""
    RETENTION = "retention"
    """The input topic deleted, or is about to delete, the record."""
    OUTCOME_TOO_LARGE = "outcome_too_large"
    """The answer is larger than the output topic accepts."""
    MAX_AGE = "max_age"
    """Older than the oldest age at which an answer is still wanted."""
    LATE = "late"
    """No batch could end before its deadline, and the route says that such a row is not to be run."""
    SYNC_UNKNOWN = "sync_unknown"
    """A call of the sync lane whose answer nobody read, and the route says that such a row is not to be run again."""
    SPLIT = "split"
    """Too long, and cut into parts that are requests of their own."""
    DUPLICATE = "duplicate"
    """The same request again while the first one was waiting; the outcome names the first."""
    BAD_RECORD = "bad_record"
    """The input record breaks a rule and never reached a batch."""


class RowFlag(StrEnum):
    """Something a reader of a success should know."""

    TRUNCATED = "truncated"
    """Cut by a token limit: more tokens are needed, the same request again would be cut again."""
    REFUSED = "refused"
    """The model declined."""
    FILTERED = "filtered"
    """The provider's content filter stopped the answer, or one of its choices."""
    TOOL_CALL_PENDING = "tool_call_pending"
    """The model waits for the result of a tool, and a batch cannot go on from there: the caller must ask anew. A call
    that the request itself forced, as is done for structured output, is an answer and not flagged."""
    EMPTY = "empty"
    """The answer, or one of its choices, was run and billed but says nothing."""
    WASTE = "waste"
    SOURCE_DELETED = "source_deleted"
    """The input topic had deleted the request when its answer came: key, headers and custom_id are not known."""


class ResultLine(msgspec.Struct, frozen=True):
    """One line of a result file, taken apart but not changed.

    ``body`` holds the bytes of the provider's native answer (success or error) exactly as they came, or
    None when there is none. It is payload: never logged, and not in ``repr``. A msgspec struct because one is
    made for every row: it costs a third of a dataclass.
    """

    wire_id: str
    row_class: RowClass
    http_status: int | None = None
    provider_request_id: str | None = None
    body: bytes | None = None
    code: str | None = None
    message: str = ""
    flags: tuple[RowFlag, ...] = ()
    usage: Usage | None = None
    model: str | None = None
    is_unknown: bool = False
    """The row did not succeed, and no table knew what the provider said: it has the default class."""

    def __repr__(self) -> str:
        return f"ResultLine(wire_id={self.wire_id!r}, row_class={self.row_class.value!r}, code={self.code!r})"


@dataclass(frozen=True, slots=True)
class UnreadableLine:
    """A result line that even the tolerant reading could not use; ``wire_id`` if one could still be seen in it."""

    reason: str
    wire_id: str | None = None


@dataclass(frozen=True, slots=True)
class SyncAnswer:
    """How one call of the sync endpoint ended: judged like a line of a result file, with what it says of the pace.

    ``failure`` is set when the call did not end in a 2xx. ``line.wire_id`` is empty: there is only one row in a call.
    """

    line: ResultLine
    failure: CallFailed | None = None
    hints: PaceHints = field(default_factory=PaceHints)

    @property
    def may_have_run(self) -> bool:
        """Whether the row may have been run, and billed, although nobody has its answer."""
        failure = self.failure
        return failure is not None and failure.http_status in UNCLEAR_STATUSES and not failure.is_definite


UNCLEAR_STATUSES = frozenset({None, 408, 499, 504})
"""No status at all, or one with which a gateway gives up waiting: behind it the row may have been run."""
