"""Payload shapes of files, batches and errors, read tolerantly.

Servers that keep OpenAI's shapes leave null members out, answer instants as epochs or ISO texts, and send ``""``
for an id that is not there. So every reader takes any JSON value and keeps what makes sense; only an answer
without an id is no answer.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from batchferry.domain.ids import FileId, ProviderBatchId
from batchferry.domain.provider import (
    BatchPage,
    BatchSnapshot,
    FilePage,
    LineError,
    ListedFile,
    ProviderStatus,
    RequestCounts,
    UploadedFile,
    Usage,
)
from batchferry.providers.openai.classes import NO_FACTS, ErrorFacts
from batchferry.providers.openai.statuses import read_status

MAX_MESSAGE_CHARS = 8_192
"""A provider's message is cut here; the native error body, which we keep whole, has all of it."""

_CODE = re.compile(r"[A-Za-z0-9_.:/-]{1,64}")
_STATUS_IN_TEXT = re.compile(r"\b(?:HTTP|status(?:[ _]code)?)[ =:]{1,3}([1-5]\d\d)\b", re.IGNORECASE)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECONDS_FROM = 100_000_000_000
"""A larger epoch is in milliseconds: in seconds it would lie beyond the year 5000."""
_ENDED_AT = {
    ProviderStatus.COMPLETED: "completed_at",
    ProviderStatus.FAILED: "failed_at",
    ProviderStatus.EXPIRED: "expired_at",
    ProviderStatus.CANCELLED: "cancelled_at",
}


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


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str | None:
    """A text that says something; numbers become texts, everything falsy becomes None."""
    if isinstance(value, str):
        return value or None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return None


def safe_code(value: Any) -> str | None:
    """A code if it is a word and not a sentence: codes are logged, and sentences may quote a prompt."""
    text = _text(value)
    return text if text is not None and _CODE.fullmatch(text) else None


def _count(value: Any) -> int:
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


# ------------------------------------------------------------------------------------------- errors


def _message(value: Any) -> str:
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
        return ErrorFacts(message=_message(value), http_status=_status_in(value)) if value else NO_FACTS
    members = _object(value)
    if not members:
        return NO_FACTS
    code = members.get("code")
    status = _count(code) if isinstance(code, int | str) and not isinstance(code, bool) else 0
    message = _message(members.get("message"))
    is_status = 100 <= status <= 599
    return ErrorFacts(
        type=safe_code(members.get("type")),
        code=None if is_status else safe_code(code),
        message=message,
        param=_text(members.get("param")),
        http_status=status if is_status else _status_in(message),
    )


def _status_in(message: str) -> int | None:
    found = _STATUS_IN_TEXT.search(message[:MAX_MESSAGE_CHARS])
    return int(found.group(1)) if found else None


def body_error(body: Any) -> ErrorFacts | None:
    """The error that an answer's body is, or None when it is no provider's error body.

    Three shapes are known: ``{"error": {...}}``, FastAPI's ``{"detail": ...}``, and vLLM's bare error object.
    """
    members = _object(body)
    error = members.get("error")
    if isinstance(error, dict) and error:
        return error_facts(error)
    if members.get("object") == "error":
        return error_facts(members)
    detail = members.get("detail")
    if detail:
        return error_facts(detail) if isinstance(detail, dict) else ErrorFacts(message=_message(detail))
    return None


# ---------------------------------------------------------------------------------- files and batches


def read_file(body: Any) -> tuple[UploadedFile, str | None]:
    """An uploaded file and its ``status`` word. ``size_bytes`` is 0 when the server does not say.

    Raises:
        NotOurShape: no id.
    """
    members = _object(body)
    file_id = _text(members.get("id"))
    if file_id is None:
        raise NotOurShape
    size_bytes, expires_at = _count(members.get("bytes")), read_instant(members.get("expires_at"))
    return UploadedFile(FileId(file_id), size_bytes, expires_at), _text(members.get("status"))


def _file_id(value: Any) -> FileId | None:
    text = _text(value) if value else None
    return FileId(text) if text else None


def _line_errors(value: Any) -> tuple[LineError, ...]:
    """The entries of ``errors``: an object with ``data``, a bare list, or nothing."""
    entries = value.get("data") if isinstance(value, dict) else value
    if isinstance(value, str) and value:
        entries = [value]
    found: list[LineError] = []
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, str):
            found.append(LineError("", _message(entry)))
        elif isinstance(entry, dict):
            found.append(
                LineError(
                    code=safe_code(entry.get("code")) or "",
                    message=_message(entry.get("message")),
                    param=_text(entry.get("param")),
                    line=_count(entry.get("line")) or None,
                )
            )
    return tuple(found)


def _metadata(value: Any) -> Mapping[str, str]:
    return {key: _text(item) or "" for key, item in _object(value).items()}


def read_batch(body: Any) -> BatchSnapshot:
    """A batch object.

    Raises:
        NotOurShape: no id, or no status.
    """
    members = _object(body)
    batch_id, raw_status = _text(members.get("id")), _text(members.get("status"))
    if batch_id is None or raw_status is None:
        raise NotOurShape
    status = read_status(raw_status)
    counts = _object(members.get("request_counts"))
    ended = [_ENDED_AT[status], *_ENDED_AT.values()] if status in _ENDED_AT else []
    return BatchSnapshot(
        provider_batch_id=ProviderBatchId(batch_id),
        status=status,
        raw_status=raw_status,
        input_file_id=_file_id(members.get("input_file_id")),
        output_file_id=_file_id(members.get("output_file_id")),
        error_file_id=_file_id(members.get("error_file_id")),
        counts=RequestCounts(
            _count(counts.get("total")), _count(counts.get("completed")), _count(counts.get("failed"))
        ),
        errors=_line_errors(members.get("errors")),
        created_at=read_instant(members.get("created_at")),
        expires_at=read_instant(members.get("expires_at")),
        ended_at=next((at for name in ended if (at := read_instant(members.get(name)))), None),
        metadata=_metadata(members.get("metadata")),
        usage=_batch_usage(members.get("usage")),
    )


def _batch_usage(value: Any) -> Usage | None:
    """OpenAI names it for batches made since September 2025, all zero until they have ended."""
    members = _object(value)
    usage = Usage(
        _count(members.get("input_tokens")),
        _count(members.get("output_tokens")),
        _count(_object(members.get("input_tokens_details")).get("cached_tokens")),
    )
    return usage if usage.input_tokens or usage.output_tokens else None


def read_batch_page(body: Any, cursor: str | None, page_size: int) -> BatchPage:
    """A page of the batch list, asked for behind ``cursor``.

    ``next_cursor`` is None on the last page, and also when the cursor does not move: some gateways ignore ``after``
    while ``has_more`` stays true, and following them would never end. Entries without an id are left out.

    Raises:
        NotOurShape: no list of batches.
    """
    entries = _entries(body)
    batches: list[BatchSnapshot] = []
    for entry in entries:
        try:
            batches.append(read_batch(entry))
        except NotOurShape:
            continue
    return BatchPage(tuple(batches), _next_cursor(body, entries, cursor, page_size))


def read_file_page(body: Any, cursor: str | None, page_size: int, purpose: str) -> FilePage:
    """A page of the file list, asked for behind ``cursor``; ``next_cursor`` as with batches.

    Files of another purpose are left out: some gateways ignore the wish for one.

    Raises:
        NotOurShape: no list of files.
    """
    entries = _entries(body)
    files: list[ListedFile] = []
    for entry in entries:
        members = _object(entry)
        file_id, of = _text(members.get("id")), _text(members.get("purpose")) or ""
        if file_id is None or of not in {"", purpose}:
            continue
        files.append(
            ListedFile(
                FileId(file_id),
                _text(members.get("filename")) or "",
                of,
                _count(members.get("bytes")),
                read_instant(members.get("created_at")),
                read_instant(members.get("expires_at")),
            )
        )
    return FilePage(tuple(files), _next_cursor(body, entries, cursor, page_size))


def _entries(body: Any) -> Sequence[Any]:
    entries: Sequence[Any] | None = _object(body).get("data")
    if not isinstance(entries, list):
        raise NotOurShape
    return entries


def _next_cursor(body: Any, entries: Sequence[Any], cursor: str | None, page_size: int) -> str | None:
    if not entries:
        return None
    members = _object(body)
    ids = [_text(_object(entry).get("id")) for entry in entries]
    last = _text(members.get("last_id")) or ids[-1]
    more = members.get("has_more")
    has_more = bool(more) if more is not None else len(entries) >= page_size
    came_round = cursor is not None and (last == cursor or cursor in ids)
    return last if has_more and not came_round else None


# -------------------------------------------------------------------------------------- request lines


def request_line(url: str, body: bytes) -> bytes:
    """A request line behind its ``custom_id`` member, ended by a line feed; ``body`` goes in unchanged.

    Raises:
        ValueError: the body holds a raw line break, which would make two lines of it.
    """
    if b"\n" in body or b"\r" in body:
        raise ValueError("a request body holds a raw line break: replace those between tokens by spaces first")
    return b"".join((_before_body(url), body, b"}\n"))  # one copy of the body


@functools.lru_cache(maxsize=64)
def _before_body(url: str) -> bytes:
    return b',"method":"POST","url":' + msgspec.json.encode(url) + b',"body":'


def request_head(wire_id: str) -> bytes:
    """The first member of a request line."""
    return b'{"custom_id":' + msgspec.json.encode(wire_id)
