"""What every reader of JSON answers needs: members that may be missing or odd, instants, and errors of known shapes.

A reader takes any JSON value and keeps what makes sense; servers leave members out, answer instants as epochs or ISO
texts, and send ``""`` for what is not there.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from typing import Any, TypeVar

import msgspec

from batchferry.domain.ids import FileId
from batchferry.domain.provider import BatchSnapshot, ProviderStatus, RequestCounts
from batchferry.providers.verdicts import NO_FACTS, ErrorFacts

_T = TypeVar("_T")

MAX_MESSAGE_CHARS = 8_192
"""A provider's message is cut here; the native error body, which we keep whole, has all of it."""

_CODE = re.compile(r"[A-Za-z0-9_.:/-]{1,64}")
_STATUS_IN_TEXT = re.compile(r"\b(?:HTTP|status(?:[ _]code)?)[ =:]{1,3}([1-5]\d\d)\b", re.IGNORECASE)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECONDS_FROM = 100_000_000_000
"""A larger epoch is in milliseconds: in seconds it would lie beyond the year 5000."""


ORDER_SLACK_S = 300.0
"""A batch in a list may be so much newer than one before it: servers of one provider disagree on the time."""


class NotOurShape(Exception):
    """The answer is not the object that was asked for."""


def read_json(raw: bytes) -> Any:
    """Any JSON value.

    Raises:
        NotOurShape: not JSON, or nested too deep.
    """
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError):
        raise NotOurShape from None


def object_of(value: Any) -> Mapping[str, Any]:
    """The object's members; none if it is no object."""
    return value if isinstance(value, dict) else {}


def text_of(value: Any) -> str | None:
    """A text that says something; numbers become texts, everything falsy becomes None."""
    if isinstance(value, str):
        return value or None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return None


def safe_code(value: Any) -> str | None:
    """A code if it is a word and not a sentence: codes are logged, and sentences may quote a prompt."""
    text = text_of(value)
    return text if text is not None and _CODE.fullmatch(text) else None


def count_of(value: Any) -> int:
    """A number from 0; 0 if it is none."""
    try:
        return max(int(value), 0) if isinstance(value, int | float | str) else 0
    except (ValueError, OverflowError):
        return 0


def read_instant(value: Any) -> datetime | None:
    """An epoch in seconds or milliseconds, or an ISO 8601 text (UTC if it names no zone); 0 and nonsense are None."""
    if isinstance(value, str):
        try:
            instant = datetime.fromisoformat(value)
        except ValueError:
            pass
        else:
            return instant.replace(tzinfo=UTC) if instant.tzinfo is None else instant.astimezone(UTC)
    try:
        epoch = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else 0.0
        if abs(epoch) >= _MILLISECONDS_FROM:
            epoch /= 1000
        return _EPOCH + timedelta(seconds=epoch) if epoch > 0 else None
    except (ValueError, OverflowError):
        return None


def file_id_of(value: Any) -> FileId | None:
    """A file's id, or None where there is none."""
    text = text_of(value) if value else None
    return FileId(text) if text else None


def ended_early(status: ProviderStatus, counts: RequestCounts, output_file_id: FileId | None) -> ProviderStatus:
    """The status, or ``EXPIRED`` for a failed batch that ran rows and names their file.

    A failed batch is one of which nothing ran: its rows go again unread. Where a server says otherwise by its own
    counters, the answers are paid for and lie in the file, so it is read like any batch that ended early.
    """
    has_answers = output_file_id is not None and counts.completed > 0
    return ProviderStatus.EXPIRED if status is ProviderStatus.FAILED and has_answers else status


def doubt_order(batches: Sequence[BatchSnapshot]) -> tuple[BatchSnapshot, ...]:
    """The batches of a list page; without their instants where the list is plainly not newest first.

    Whoever looks for a batch of ours stops where a list gets older than it: in a list of another order that would be
    the first page, and a batch that is there would count as never made, and be paid for again. Few servers document
    their order. Without instants the list is read to its end. (Not for batches that are known by their instant.)
    """
    instants = [one.created_at for one in batches if one.created_at is not None]
    is_ascending = bool(instants) and instants[-1] > instants[0] + timedelta(seconds=1)
    newer = zip(instants[1:], accumulate(instants, min), strict=False)
    if is_ascending or any(at > before + timedelta(seconds=ORDER_SLACK_S) for at, before in newer):
        return tuple(replace(one, created_at=None) for one in batches)
    return tuple(batches)


def readable(entries: Iterable[Any], read: Callable[[Any], _T]) -> list[_T]:
    """What ``read`` makes of the entries of a list; those that it cannot take are left out."""
    found = []
    for entry in entries:
        with contextlib.suppress(NotOurShape):
            found.append(read(entry))
    return found


def metadata_of(value: Any) -> Mapping[str, str]:
    """Metadata with texts for values."""
    return {key: text_of(item) or "" for key, item in object_of(value).items()}


# ------------------------------------------------------------------------------------------- errors


def message_of(value: Any) -> str:
    """The text of a message, cut to ``MAX_MESSAGE_CHARS``; anything but a text is shown as JSON."""
    if isinstance(value, str):
        return value[:MAX_MESSAGE_CHARS]
    if value is None:
        return ""
    return msgspec.json.encode(value).decode()[:MAX_MESSAGE_CHARS]  # FastAPI's list of what is wrong with a body


def error_facts(value: Any) -> ErrorFacts:
    """What an error object says of itself; NO_FACTS when the value is no error or an empty one.

    Takes the object inside ``{"error": ...}`` as OpenAI and most servers send it, a bare text, and vLLM's numeric
    ``code``, which is an HTTP status.
    """
    if isinstance(value, str):
        return ErrorFacts(message=message_of(value), http_status=_status_in(value)) if value else NO_FACTS
    members = object_of(value)
    if not members:
        return NO_FACTS
    code = members.get("code")
    status = count_of(code) if isinstance(code, int | str) and not isinstance(code, bool) else 0
    message = message_of(members.get("message"))
    is_status = 100 <= status <= 599
    return ErrorFacts(
        type=safe_code(members.get("type")),
        # Azure's filter names itself inside; outside may stand the bare status.
        code=(None if is_status else safe_code(code)) or safe_code(object_of(members.get("innererror")).get("code")),
        message=message,
        param=text_of(members.get("param")),
        http_status=status if is_status else _status_in(message),
    )


def _status_in(message: str) -> int | None:
    found = _STATUS_IN_TEXT.search(message[:MAX_MESSAGE_CHARS])
    return int(found.group(1)) if found else None


def body_error(body: Any) -> ErrorFacts | None:
    """The error that an answer's body is, or None when it is no provider's error body.

    Three shapes are known: ``{"error": {...}}``, FastAPI's ``{"detail": ...}``, and vLLM's bare error object.
    """
    members = object_of(body)
    error = members.get("error")
    if isinstance(error, dict) and error:
        return error_facts(error)
    if members.get("object") == "error":
        return error_facts(members)
    detail = members.get("detail")
    if detail:
        return error_facts(detail) if isinstance(detail, dict) else ErrorFacts(message=message_of(detail))
    return None
