"""What a provider can tell us, in our own words, the same for every provider.

Adapters translate once, at their edge. An expected failure (timeout, 429, a lost reply, a refusal) is a
``CallFailed`` value that the batch machine takes as news; an exception out of an adapter is a bug.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

import msgspec

from batchferry.domain.ids import FileId, ProviderBatchId


class ProviderStatus(StrEnum):
    """A provider batch's status in the field's own names, whatever the dialect."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    """A status nobody told us about: kept, counted and polled on, never taken for an end."""

    @property
    def is_terminal(self) -> bool:
        """Whether the provider will do nothing more with this batch."""
        return self in _TERMINAL


_TERMINAL = frozenset(
    {ProviderStatus.COMPLETED, ProviderStatus.FAILED, ProviderStatus.EXPIRED, ProviderStatus.CANCELLED}
)


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """The provider's counters. ``completed + failed`` need not reach ``total`` after an expiry."""

    total: int = 0
    completed: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class LineError:
    """One entry of a failed batch's error list; ``line`` is 1-based, None when the file as a whole is meant."""

    code: str
    message: str = field(default="", repr=False)
    param: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class BatchSnapshot:
    """A provider batch as one answer showed it. Instants are aware UTC; missing ids are None, never ``""``."""

    provider_batch_id: ProviderBatchId
    status: ProviderStatus
    raw_status: str
    input_file_id: FileId | None = None
    output_file_id: FileId | None = None
    error_file_id: FileId | None = None
    counts: RequestCounts = RequestCounts()
    errors: tuple[LineError, ...] = ()
    created_at: datetime | None = None
    expires_at: datetime | None = None
    ended_at: datetime | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    usage: Usage | None = None
    """Tokens of all rows together as the provider counted them, of rows whose answers got lost too; None where it
    does not say."""


class CallFailure(StrEnum):
    """Why a provider call did not succeed; the value says what the caller may do."""

    UNAVAILABLE = "unavailable"
    """No connection, a broken read, or a 5xx on a call that is safe to repeat: try again with back-off."""
    THROTTLED = "throttled"
    """429 about rate: try again, not before ``retry_after_s``."""
    ACCOUNT = "account"
    """Quota, billing, authentication or permission: hold the account, blame no row."""
    REJECTED = "rejected"
    """We asked wrongly (400, 413, 422): the same call will be refused again."""
    NOT_READY = "not_ready"
    """Refused because the provider does not yet see the file we have just uploaded: try again soon."""
    NOT_FOUND = "not_found"
    """404 for a thing we named. One 404 never proves that it is gone."""
    CONFLICT = "conflict"
    """409: the thing is in a state that forbids the call (a batch that has already ended)."""
    UNANSWERED = "unanswered"
    """The call may have been carried out although no clear answer came. Only ``create`` and ``answer`` report
    this."""
    PROTOCOL = "protocol"
    """The answer makes no sense (not JSON, wrong shape): keep the evidence, poll on, tell an operator."""


TOO_LARGE_CODES = frozenset({"file_too_large", "request_too_large", "too_many_tasks"})
"""Codes of calls and batches refused for their size: ours, Azure's and Anthropic's; OpenAI's is not documented."""


@dataclass(frozen=True, slots=True)
class CallFailed:
    """A provider call that did not succeed.

    ``message`` is the provider's own text: it may quote a prompt, so it is never logged nor put in an event.
    ``is_definite`` says that nothing was done by the provider: a refusal status (400, 401, 403, 404, 413,
    422, 429) that came with the provider's own error body.
    """

    call: str
    kind: CallFailure
    http_status: int | None = None
    code: str | None = None
    message: str = field(default="", repr=False)
    param: str | None = None
    retry_after_s: float | None = None
    request_id: str | None = None
    is_definite: bool = False
    row: int | None = None
    """0-based row that a refused inline create names (``requests.N``); the others are not to blame."""

    @property
    def is_too_large(self) -> bool:
        """Whether it was refused for its size: half of it may be taken."""
        return self.http_status == 413 or (self.code or "").lower() in TOO_LARGE_CODES

    @property
    def summary(self) -> str:
        """What may be shown and logged: call, kind, status and code, none of the provider's text."""
        status = f" HTTP {self.http_status}" if self.http_status is not None else ""
        code = f" {self.code}" if self.code else ""
        return f"{self.call}: {self.kind.value}{status}{code}"


@dataclass(frozen=True, slots=True)
class UploadedFile:
    """A file the provider now holds."""

    file_id: FileId
    size_bytes: int
    expires_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class DownloadedFile:
    """A provider file now on our disk, whole: the transport said it ended where it should."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class BatchPage:
    """One page of the provider's batch list, newest first; ``next_cursor`` is None on the last page."""

    batches: tuple[BatchSnapshot, ...]
    next_cursor: str | None = None


class FileRole(StrEnum):
    """What a provider's file is to a batch."""

    INPUT = "input"
    OUTPUT = "output"
    """A result file, the error file included."""


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file as the provider's list shows it. Instants are aware UTC; what a server does not say is None or ``""``."""

    file_id: FileId
    name: str = ""
    purpose: str = ""
    size_bytes: int = 0
    created_at: datetime | None = None
    expires_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class FilePage:
    """One page of the provider's file list, newest first; ``next_cursor`` is None on the last page."""

    files: tuple[ListedFile, ...]
    next_cursor: str | None = None


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Tokens of one row. ``input_tokens`` is the total, cached tokens included."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    """Tokens written into the provider's prompt cache, part of ``input_tokens``; most providers do not tell them."""
    cache_write_1h_tokens: int = 0
    """Those of ``cache_write_tokens`` that are kept for an hour, which Anthropic sells dearer."""


@dataclass(frozen=True, slots=True)
class PaceHints:
    """What an answer of the sync endpoint says of how fast it may be called; None where it says nothing."""

    calls_left: int | None = None
    """Calls that may still begin before ``calls_reset_s`` is over."""
    calls_reset_s: float | None = None
    tokens_left: int | None = None
    tokens_reset_s: float | None = None
    retry_after_s: float | None = None
    """0 to a day; read against the answer's own ``Date`` where it was an instant."""
