"""Payload shapes of Mistral's files and jobs, read tolerantly, and its request lines.

Names are those of ``BatchJob`` and ``FileSchema`` in the official client
(https://github.com/mistralai/client-python): file members lack the ``_id`` of other providers, counters lie flat in the
job, the files of a job are a list. Only an answer without an id is no answer.

A request line is ``{"custom_id", "body"}``. The model stands on the job. A row's body keeps its own ``model`` all the
same: bodies go out as they came, the sync lane needs it there, the official client's typed batches send it too, and
all rows of one of our batches have the same one, which is the job's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from batchferry.domain.ids import FileId, ProviderBatchId
from batchferry.domain.provider import (
    BatchPage,
    BatchSnapshot,
    FilePage,
    FileRole,
    LineError,
    ListedFile,
    RequestCounts,
    UploadedFile,
)
from batchferry.providers.mistral.classes import batch_code_of
from batchferry.providers.mistral.statuses import read_status
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
    readable,
    safe_code,
    text_of,
)

MAX_PAGES = 10_000
"""A list is not followed further: a server that ignores ``page`` would show its first one for ever."""

SAMPLE_TYPES: Mapping[FileRole, tuple[str, ...]] = {
    FileRole.INPUT: ("batch_request",),
    FileRole.OUTPUT: ("batch_result", "batch_error"),
}
"""``sample_type`` by which batch files are told apart; their ``purpose`` is the same."""


def read_file(body: Any) -> UploadedFile:
    """An uploaded file. ``size_bytes`` is 0 when the server does not say.

    Raises:
        NotOurShape: no id.
    """
    members = object_of(body)
    file_id = text_of(members.get("id"))
    if file_id is None:
        raise NotOurShape
    return UploadedFile(FileId(file_id), count_of(members.get("bytes")), read_instant(members.get("expires_at")))


def _errors(value: Any) -> tuple[LineError, ...]:
    found: list[LineError] = []
    for entry in value if isinstance(value, list) else ():
        members = object_of(entry)
        message = message_of(entry if isinstance(entry, str) else members.get("message"))
        code = safe_code(members.get("type")) or safe_code(members.get("code")) or batch_code_of(message)
        if message or code:
            found.append(LineError(code, message))
    return tuple(found)


def _first(value: Any) -> FileId | None:
    return file_id_of(value[0]) if isinstance(value, list) and value else file_id_of(value)


def read_job(body: Any) -> BatchSnapshot:
    """A job object. It says neither when it will expire nor what it used.

    Raises:
        NotOurShape: no id, or no status.
    """
    members = object_of(body)
    job_id, raw_status = text_of(members.get("id")), text_of(members.get("status"))
    if job_id is None or raw_status is None:
        raise NotOurShape
    status = read_status(raw_status)
    failed = count_of(members.get("failed_requests"))
    succeeded = members.get("succeeded_requests")
    if succeeded is None:
        # completed_requests counts both kinds of ends.
        succeeded = max(count_of(members.get("completed_requests")) - failed, 0)
    counts = RequestCounts(count_of(members.get("total_requests")), count_of(succeeded), failed)
    output_file_id = file_id_of(members.get("output_file"))
    return BatchSnapshot(
        provider_batch_id=ProviderBatchId(job_id),
        status=ended_early(status, counts, output_file_id),
        raw_status=raw_status,
        input_file_id=_first(members.get("input_files")),
        output_file_id=output_file_id,
        error_file_id=file_id_of(members.get("error_file")),
        counts=counts,
        errors=_errors(members.get("errors")),
        created_at=read_instant(members.get("created_at")),
        ended_at=read_instant(members.get("completed_at")) if status.is_terminal else None,
        metadata=metadata_of(members.get("metadata")),
    )


def page_of(cursor: str | None) -> int:
    """The page that a cursor names, counted from 0.

    Raises:
        ValueError: not one of our cursors.
    """
    if cursor is None:
        return 0
    if not (cursor.isascii() and cursor.isdigit()):
        raise ValueError("the cursor of a list of this provider is a page number")
    return int(cursor)


def read_job_page(body: Any, page: int, page_size: int) -> BatchPage:
    """A page of the job list; entries without an id are left out.

    Jobs that begin while the pages are read push older ones back, so one may be seen twice; none is passed over.

    Raises:
        NotOurShape: no list of jobs.
    """
    entries = _entries(body)
    jobs = readable(entries, read_job)
    return BatchPage(doubt_order(jobs), _next_page(body, entries, page, page_size))


def read_file_page(body: Any, page: int, page_size: int, role: FileRole) -> FilePage:
    """A page of the file list. Files of another kind are left out, for servers that ignore the wish for one.

    Raises:
        NotOurShape: no list of files.
    """
    entries = _entries(body)
    files: list[ListedFile] = []
    for entry in entries:
        members = object_of(entry)
        file_id, kind = text_of(members.get("id")), text_of(members.get("sample_type")) or ""
        if file_id is None or kind not in {"", *SAMPLE_TYPES[role]}:
            continue
        files.append(
            ListedFile(
                FileId(file_id),
                text_of(members.get("filename")) or "",
                text_of(members.get("purpose")) or "",
                count_of(members.get("bytes")),
                read_instant(members.get("created_at")),
                read_instant(members.get("expires_at")),
            )
        )
    return FilePage(tuple(files), _next_page(body, entries, page, page_size))


def _entries(body: Any) -> Sequence[Any]:
    entries: Sequence[Any] | None = object_of(body).get("data")
    if isinstance(entries, list):
        return entries
    if entries is None and object_of(body).get("total") == 0:
        return ()  # the schema lets an empty list be absent
    raise NotOurShape


def _next_page(body: Any, entries: Sequence[Any], page: int, page_size: int) -> str | None:
    if not entries or page + 1 >= MAX_PAGES:
        return None
    total = object_of(body).get("total")
    has_more = len(entries) >= page_size if total is None else (page + 1) * page_size < count_of(total)
    return str(page + 1) if has_more else None


# -------------------------------------------------------------------------------------- request lines


def request_head(wire_id: str) -> bytes:
    """The first member of a request line."""
    return b'{"custom_id":' + msgspec.json.encode(wire_id)


def request_line(body: bytes) -> bytes:
    """A request line behind its ``custom_id`` member, ended by a line feed; ``body`` goes in unchanged.

    Raises:
        ValueError: the body holds a raw line break, which would make two lines of it.
    """
    if b"\n" in body or b"\r" in body:
        raise ValueError("a request body holds a raw line break: replace those between tokens by spaces first")
    return b"".join((b',"body":', body, b"}\n"))
