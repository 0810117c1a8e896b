"""Payload shapes of files, batches and errors, read tolerantly.

Servers that keep OpenAI's shapes leave null members out, answer instants as epochs or ISO texts, and send ``""``
for an id that is not there. So every reader takes any JSON value and keeps what makes sense; only an answer
without an id is no answer.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import httpx
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
from batchferry.providers.openai.statuses import read_status
from batchferry.providers.shapes import (
    NotOurShape,
    count_of,
    doubt_order,
    ended_early,
    file_id_of,
    message_of,
    metadata_of,
    object_of,
    read_instant,
    read_json,
    readable,
    safe_code,
    text_of,
)

_ENDED_AT = {
    ProviderStatus.COMPLETED: "completed_at",
    ProviderStatus.FAILED: "failed_at",
    ProviderStatus.EXPIRED: "expired_at",
    ProviderStatus.CANCELLED: "cancelled_at",
}


# ---------------------------------------------------------------------------------- files and batches


def read_file(body: Any) -> tuple[UploadedFile, str | None]:
    """An uploaded file and its ``status`` word. ``size_bytes`` is 0 when the server does not say.

    Raises:
        NotOurShape: no id.
    """
    members = object_of(body)
    file_id = text_of(members.get("id"))
    if file_id is None:
        raise NotOurShape
    size_bytes, expires_at = count_of(members.get("bytes")), read_instant(members.get("expires_at"))
    return UploadedFile(FileId(file_id), size_bytes, expires_at), text_of(members.get("status"))


def announced_file(headers: httpx.Headers) -> tuple[FileId | None, httpx.URL | None]:
    """Id and signed address of a file that Together has been told of; None for what is not there."""
    file_id = headers.get("x-together-file-id", "")
    try:
        address = httpx.URL(headers.get("location", ""))
    except httpx.InvalidURL:
        return None, None
    is_address = address.scheme in {"https", "http"} and bool(address.host)
    return FileId(file_id) if safe_code(file_id) else None, address if is_address else None


def known_file(body: bytes) -> FileId | None:
    """Id of the file that has these contents already, as Together's 409 names it."""
    try:
        found = text_of(object_of(read_json(body)).get("file_id"))
    except NotOurShape:
        return None
    return FileId(found) if found is not None else None


def _line_errors(value: Any) -> tuple[LineError, ...]:
    """The entries of ``errors``: an object with ``data``, a bare list, a single entry, or nothing."""
    entries = value.get("data") if isinstance(value, dict) else value
    if (isinstance(value, str) and value) or (isinstance(value, dict) and value.keys() & {"code", "message"}):
        entries = [value]
    found: list[LineError] = []
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, str):
            found.append(LineError("", message_of(entry)))
        elif isinstance(entry, dict):
            found.append(
                LineError(
                    code=safe_code(entry.get("code")) or "",
                    message=message_of(entry.get("message")),
                    param=text_of(entry.get("param")),
                    line=count_of(entry.get("line")) or None,
                )
            )
    return tuple(found)


def read_batch(body: Any) -> BatchSnapshot:
    """A batch object, bare or inside ``{"job": ...}`` (Together).

    Raises:
        NotOurShape: no id, or no status.
    """
    members = object_of(body)
    if "id" not in members:
        members = object_of(members.get("job"))
    batch_id, raw_status = text_of(members.get("id")), text_of(members.get("status"))
    if batch_id is None or raw_status is None:
        raise NotOurShape
    status = read_status(raw_status)
    counted = object_of(members.get("request_counts"))
    counts = RequestCounts(
        count_of(counted.get("total")), count_of(counted.get("completed")), count_of(counted.get("failed"))
    )
    output_file_id = file_id_of(members.get("output_file_id"))
    ended = [_ENDED_AT[status], *_ENDED_AT.values()] if status in _ENDED_AT else []
    return BatchSnapshot(
        provider_batch_id=ProviderBatchId(batch_id),
        status=ended_early(status, counts, output_file_id),
        raw_status=raw_status,
        input_file_id=file_id_of(members.get("input_file_id")),
        output_file_id=output_file_id,
        error_file_id=file_id_of(members.get("error_file_id")),
        counts=counts,
        errors=_line_errors(members.get("errors") or members.get("error")),
        created_at=read_instant(members.get("created_at")),
        expires_at=read_instant(members.get("expires_at")) or read_instant(members.get("job_deadline")),
        ended_at=next((at for name in ended if (at := read_instant(members.get(name)))), None),
        metadata=metadata_of(members.get("metadata")),
        usage=_batch_usage(members.get("usage")),
    )


def _batch_usage(value: Any) -> Usage | None:
    """OpenAI names it for batches made since September 2025, all zero until they have ended."""
    members = object_of(value)
    details = object_of(members.get("input_tokens_details"))
    taken, cached = count_of(members.get("input_tokens")), count_of(details.get("cached_tokens"))
    written = min(count_of(details.get("cache_write_tokens")), max(taken - cached, 0))
    usage = Usage(taken, count_of(members.get("output_tokens")), cached, written)
    return usage if usage.input_tokens or usage.output_tokens else None


def read_batch_page(body: Any, cursor: str | None, page_size: int) -> BatchPage:
    """A page of the batch list, asked for behind ``cursor``.

    ``next_cursor`` is None on the last page, and also when the cursor does not move: some gateways ignore ``after``
    while ``has_more`` stays true, and following them would never end. Entries without an id are left out.

    Raises:
        NotOurShape: no list of batches.
    """
    entries = _entries(body)
    batches = readable(entries, read_batch)
    return BatchPage(doubt_order(batches), _next_cursor(body, entries, cursor, page_size))


def read_file_page(body: Any, cursor: str | None, page_size: int, purpose: str) -> FilePage:
    """A page of the file list, asked for behind ``cursor``; ``next_cursor`` as with batches.

    Files of another purpose are left out: some gateways ignore the wish for one.

    Raises:
        NotOurShape: no list of files.
    """
    entries = _entries(body)
    files: list[ListedFile] = []
    for entry in entries:
        members = object_of(entry)
        file_id, of = text_of(members.get("id")), text_of(members.get("purpose")) or ""
        if file_id is None or of not in {"", purpose}:
            continue
        files.append(
            ListedFile(
                FileId(file_id),
                text_of(members.get("filename")) or "",
                of,
                count_of(members.get("bytes")),
                read_instant(members.get("created_at")),
                read_instant(members.get("expires_at")),
            )
        )
    return FilePage(tuple(files), _next_cursor(body, entries, cursor, page_size))


def _entries(body: Any) -> Sequence[Any]:
    entries: Sequence[Any] | None = body if isinstance(body, list) else object_of(body).get("data")
    if not isinstance(entries, list):
        raise NotOurShape
    return entries


def _next_cursor(body: Any, entries: Sequence[Any], cursor: str | None, page_size: int) -> str | None:
    if not entries:
        return None
    members = object_of(body)
    ids = [text_of(object_of(entry).get("id")) for entry in entries]
    if isinstance(members.get("paging"), dict):  # Groq's own cursor, null on the last page
        cursor_after = text_of(members["paging"].get("next_cursor"))
        return cursor_after if cursor_after != cursor else None
    last = text_of(members.get("last_id")) or ids[-1]
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
