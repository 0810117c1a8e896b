"""Payload shapes of batches, errors and rows at Anthropic, read tolerantly; the create's body is written here too.

Names and forms: the types of the official Python client, ``anthropic.types.messages``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec

from batchferry.domain.errors import InvariantBroken
from batchferry.domain.ids import FileId, ProviderBatchId
from batchferry.domain.provider import BatchPage, BatchSnapshot, RequestCounts
from batchferry.ports import UploadSource
from batchferry.providers.anthropic.statuses import read_status
from batchferry.providers.shapes import (
    NotOurShape,
    count_of,
    message_of,
    object_of,
    read_instant,
    readable,
    safe_code,
    text_of,
)
from batchferry.providers.verdicts import NO_FACTS, ErrorFacts

RESULTS = "results:"
"""What stands before a batch's id in the id of its results, which are no file of their own here."""

_OPENING = b'{"requests":['
_CLOSING = b"]}"
FRAME_BYTES = len(_OPENING) + len(_CLOSING) - 1
"""What a create's body is longer than its lines: the last line feed falls away."""


# -------------------------------------------------------------------------------------------- results


def results_id(batch_id: str) -> FileId:
    """The id of a batch's results."""
    return FileId(RESULTS + batch_id)


def batch_of_results(file_id: FileId) -> str:
    """The batch whose results these are.

    Raises:
        InvariantBroken: no id that ``results_id`` has made.
    """
    batch_id = file_id.removeprefix(RESULTS)
    if batch_id == file_id or not batch_id:
        raise InvariantBroken("a file id that no batch of this account can have had")
    return batch_id


# --------------------------------------------------------------------------------------------- errors


def error_facts(envelope: Any) -> ErrorFacts:
    """What an error envelope ``{"type":"error","error":{...}}`` says of itself; NO_FACTS when it is none.

    The error inside alone, as some gateways send it, is taken as well.
    """
    members = object_of(envelope)
    inner = members.get("error")
    error = object_of(inner if inner is not None else members)
    kind = safe_code(error.get("type"))
    if kind is None or (inner is None and kind == "error"):
        return NO_FACTS
    return ErrorFacts(
        type=kind,
        code=safe_code(object_of(error.get("details")).get("error_code")),
        message=message_of(error.get("message")),
    )


def is_envelope(value: Any) -> bool:
    """Whether a value is the provider's own error body."""
    members = object_of(value)
    return members.get("type") == "error" and error_facts(value) is not NO_FACTS


def request_id_of(envelope: Any) -> str | None:
    """The id of the call that an error envelope names."""
    return safe_code(object_of(envelope).get("request_id"))


# -------------------------------------------------------------------------------------------- batches


def read_batch(body: Any) -> BatchSnapshot:
    """A batch object.

    All counters but ``processing`` stay 0 until the batch has ended, and their sum is always its number of rows.
    Rows that ran are counted as completed or failed; those that expired or were cancelled are in the total alone.
    There are results once it has ended and until they are archived, 29 days after its creation.

    Raises:
        NotOurShape: no id, or no status.
    """
    members = object_of(body)
    batch_id, raw_status = text_of(members.get("id")), text_of(members.get("processing_status"))
    if batch_id is None or raw_status is None:
        raise NotOurShape
    status = read_status(raw_status, is_cancelled=read_instant(members.get("cancel_initiated_at")) is not None)
    counts = object_of(members.get("request_counts"))
    numbers = {
        name: count_of(counts.get(name)) for name in ("processing", "succeeded", "errored", "canceled", "expired")
    }
    has_results = status.is_terminal and read_instant(members.get("archived_at")) is None
    return BatchSnapshot(
        provider_batch_id=ProviderBatchId(batch_id),
        status=status,
        raw_status=raw_status,
        # ``results_url`` is not used: it would decide where the account's key goes. Nor is it waited for: a batch whose
        # address is late would be taken for one without results, and its rows run and paid a second time.
        output_file_id=results_id(batch_id) if has_results else None,
        counts=RequestCounts(sum(numbers.values()), numbers["succeeded"], numbers["errored"]),
        created_at=read_instant(members.get("created_at")),
        expires_at=read_instant(members.get("expires_at")),
        ended_at=read_instant(members.get("ended_at")),
    )


def read_batch_page(body: Any, cursor: str | None, page_size: int) -> BatchPage:
    """A page of the batch list, asked for behind ``cursor``.

    ``next_cursor`` is None on the last page, and also when the cursor does not move: following a server that ignores
    it would never end. Entries without an id are left out.

    Raises:
        NotOurShape: no list of batches.
    """
    members = object_of(body)
    entries = members.get("data")
    if not isinstance(entries, list):
        raise NotOurShape
    batches = readable(entries, read_batch)
    return BatchPage(tuple(batches), _next_cursor(members, entries, cursor, page_size))


def _next_cursor(members: Mapping[str, Any], entries: Sequence[Any], cursor: str | None, page_size: int) -> str | None:
    if not entries:
        return None
    ids = [text_of(object_of(entry).get("id")) for entry in entries]
    last = text_of(members.get("last_id")) or ids[-1]
    more = members.get("has_more")
    has_more = bool(more) if more is not None else len(entries) >= page_size
    came_round = cursor is not None and (last == cursor or cursor in ids)
    return last if has_more and not came_round else None


# ---------------------------------------------------------------------------------- the create's body


def request_line(body: bytes) -> bytes:
    """A request behind its ``custom_id`` member, ended by a line feed; ``body`` goes in unchanged.

    Raises:
        ValueError: the body holds a raw line break, which would make two lines of it.
    """
    if b"\n" in body or b"\r" in body:
        raise ValueError("a request body holds a raw line break: replace those between tokens by spaces first")
    return b"".join((b',"params":', body, b"}\n"))  # one copy of the body


def request_head(wire_id: str) -> bytes:
    """The first member of a request."""
    return b'{"custom_id":' + msgspec.json.encode(wire_id)


class InlineBody:
    """The body of a create around lines that are streamed: each line feed but the last becomes a comma.

    A line holds no raw line feed of its own (``request_line`` sees to that), so every one of them ends a row.
    """

    def __init__(self, source: UploadSource) -> None:
        self._source = source
        self._lines_bytes = source.size_bytes
        self.size_bytes = self._lines_bytes + FRAME_BYTES
        self.rows = 0
        """Rows handed out so far."""
        self.is_whole = False
        """Whether the last byte was handed out: before that no server can have seen a batch."""

    async def chunks(self) -> AsyncIterator[bytes]:
        """The whole body, once.

        Raises:
            InvariantBroken: the source gave another number of bytes than its size, or no line feed at its end.
        """
        yield _OPENING
        taken = 0
        async for chunk in self._source.chunks():
            if not chunk:
                continue
            taken += len(chunk)
            if taken > self._lines_bytes:
                break
            self.rows += chunk.count(b"\n")
            is_last = taken == self._lines_bytes
            if is_last and chunk[-1:] != b"\n":
                raise InvariantBroken("the last row of an inline batch does not end with a line feed")
            elements = (chunk[:-1] if is_last else chunk).replace(b"\n", b",")
            if elements:
                yield elements
        if taken != self._lines_bytes:
            raise InvariantBroken(f"an inline batch of {self._lines_bytes} bytes gave {taken}")
        self.is_whole = True
        yield _CLOSING
