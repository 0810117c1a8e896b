"""How one row of a batch ended: classes, flags and the verdict that a provider's room gives on a result line."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from batchferry.domain.provider import Usage


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
    """5xx, 429, overload, timeout, status 0, empty body: nothing is wrong with the row."""
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
    DUPLICATE = "duplicate"
    """The same request again while the first one was waiting; the outcome names the first."""
    BAD_RECORD = "bad_record"
    """The input record breaks a rule and never reached a batch."""


class RowFlag(StrEnum):
    """Something a reader of a success should know."""

    TRUNCATED = "truncated"
    REFUSED = "refused"
    FILTERED = "filtered"
    TOOL_CALL_PENDING = "tool_call_pending"
    EMPTY = "empty"
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

    def __repr__(self) -> str:
        return f"ResultLine(wire_id={self.wire_id!r}, row_class={self.row_class.value!r}, code={self.code!r})"


@dataclass(frozen=True, slots=True)
class UnreadableLine:
    """A result line that even the tolerant reading could not use; ``wire_id`` if one could still be seen in it."""

    reason: str
    wire_id: str | None = None
