"""Payload shapes of files, operations and request lines, read tolerantly.

int64 numbers come as JSON texts, members with their default value are left out (both are proto3's JSON), instants have
up to nine digits. So every reader takes any JSON value and keeps what makes sense; only an answer without a name is no
answer. Source: https://ai.google.dev/api/batch-api, https://ai.google.dev/api/files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec

from batchferry.domain.ids import FileId, ProviderBatchId
from batchferry.domain.provider import (
    BatchPage,
    BatchSnapshot,
    FilePage,
    FileRole,
    LineError,
    ListedFile,
    ProviderStatus,
    RequestCounts,
    UploadedFile,
)
from batchferry.providers.gemini.classes import error_facts
from batchferry.providers.gemini.statuses import read_state
from batchferry.providers.shapes import (
    NotOurShape,
    count_of,
    doubt_order,
    ended_early,
    file_id_of,
    object_of,
    read_instant,
    readable,
    text_of,
)

BATCH_ID = "batch_id"
"""The member of a batch's metadata that stands first in its display name, which is all Gemini keeps for us."""
UNNAMED = "batchferry"
"""Display name of a batch that is created without a batch id: Gemini insists on one."""
GENERATED = "GENERATED"
"""``source`` of a file that Gemini made."""
_CANCELLED = "CANCELLED"


# ------------------------------------------------------------------------------------------ display names


def display_name(metadata: Mapping[str, str]) -> str:
    """The name of a batch: its batch id, then the rest of its metadata as ``name=value``, blanks between them.

    Raises:
        ValueError: a name or value that could not be read back.
    """
    batch_id = metadata.get(BATCH_ID, "")
    if not batch_id:
        return UNNAMED
    others = {name: value for name, value in metadata.items() if name != BATCH_ID}
    for text in (batch_id, *others, *others.values()):
        if not text or not text.isprintable() or set(text) & set(" ="):
            raise ValueError("a batch's metadata must be words without blanks or '=', since Gemini keeps only a name")
    return " ".join((batch_id, *(f"{name}={value}" for name, value in others.items())))


def read_display_name(text: str | None) -> Mapping[str, str]:
    """The metadata in a batch's name. A name that is not ours comes back whole, as a batch id that fits nobody."""
    if not text or text == UNNAMED:
        return {}
    first, *rest = text.split(" ")
    pairs = [part.partition("=") for part in rest]
    if not all(name and is_pair and value for name, is_pair, value in pairs):
        return {BATCH_ID: text}
    return {BATCH_ID: first} | {name: value for name, _, value in pairs if name != BATCH_ID}


# ------------------------------------------------------------------------------------------------- files


def read_file(body: Any) -> tuple[UploadedFile, str]:
    """A file, bare or inside ``{"file": ...}``, and its state word (``""`` when it says none).

    Raises:
        NotOurShape: no name.
    """
    members = object_of(body)
    if "name" not in members:
        members = object_of(members.get("file"))
    name = text_of(members.get("name"))
    if name is None:
        raise NotOurShape
    uploaded = UploadedFile(
        FileId(name), count_of(members.get("sizeBytes")), read_instant(members.get("expirationTime"))
    )
    return uploaded, (text_of(members.get("state")) or "").upper()


def read_file_page(body: Any, cursor: str | None, role: FileRole) -> FilePage:
    """A page of the file list. Gemini lists every file of the project; those of the other role are left out.

    Raises:
        NotOurShape: no object.
    """
    files: list[ListedFile] = []
    for entry in _entries(body, "files"):
        members = object_of(entry)
        name, source = text_of(members.get("name")), (text_of(members.get("source")) or "").upper()
        if name is None or (source == GENERATED) is not (role is FileRole.OUTPUT):
            continue
        files.append(
            ListedFile(
                FileId(name),
                text_of(members.get("displayName")) or "",
                source,
                count_of(members.get("sizeBytes")),
                read_instant(members.get("createTime")),
                read_instant(members.get("expirationTime")),
            )
        )
    return FilePage(tuple(files), _next_cursor(body, cursor))


# ----------------------------------------------------------------------------------------------- batches


def read_batch(body: Any, expires_after_s: int) -> BatchSnapshot:
    """An operation.

    Args:
        body: JSON value.
        expires_after_s: how long after its creation a job that has not ended expires; the wire does not say it.

    Raises:
        NotOurShape: no name, or nothing that says how the job stands.
    """
    members = object_of(body)
    about = object_of(members.get("metadata"))
    name = text_of(members.get("name"))
    raw_state = text_of(about.get("state"))
    response, is_done = object_of(members.get("response")), members.get("done") is True
    error = error_facts(members.get("error"))
    if name is None or (raw_state is None and "metadata" not in members and not is_done):
        raise NotOurShape
    if raw_state is not None:
        status = read_state(raw_state)
    elif not is_done:
        # A member with its default value is left out, and a job that has just been made may have no state yet.
        status = ProviderStatus.VALIDATING
    elif "error" in members:
        status = ProviderStatus.CANCELLED if error.status == _CANCELLED else ProviderStatus.FAILED
    else:
        status = ProviderStatus.COMPLETED
    created_at, stats = read_instant(about.get("createTime")), object_of(about.get("batchStats"))
    counts = RequestCounts(
        count_of(stats.get("requestCount")),
        count_of(stats.get("successfulRequestCount")),
        count_of(stats.get("failedRequestCount")),
    )
    output = text_of(response.get("responsesFile")) or text_of(object_of(about.get("output")).get("responsesFile"))
    # Of an expired job nothing can be fetched, whatever it still names.
    output_file_id = FileId(output) if output and status is not ProviderStatus.EXPIRED else None
    return BatchSnapshot(
        provider_batch_id=ProviderBatchId(name),
        status=ended_early(status, counts, output_file_id),
        raw_status=raw_state or "",
        input_file_id=file_id_of(object_of(about.get("inputConfig")).get("fileName")),
        output_file_id=output_file_id,
        counts=counts,
        errors=(LineError(error.code or "", error.message),) if status is ProviderStatus.FAILED else (),
        created_at=created_at,
        expires_at=None if created_at is None else created_at + timedelta(seconds=expires_after_s),
        ended_at=read_instant(about.get("endTime")) if status.is_terminal else None,
        metadata=read_display_name(text_of(about.get("displayName"))),
    )


def read_batch_page(body: Any, cursor: str | None, expires_after_s: int) -> BatchPage:
    """A page of the operations; entries without a name are left out.

    Raises:
        NotOurShape: no object.
    """
    batches = readable(_entries(body, "operations"), lambda entry: read_batch(entry, expires_after_s))
    return BatchPage(doubt_order(batches), _next_cursor(body, cursor))


def _entries(body: Any, member: str) -> Sequence[Any]:
    """The entries of a list, which is left out when it is empty."""
    if not isinstance(body, dict):
        raise NotOurShape
    entries = body.get(member, [])
    if not isinstance(entries, list):
        raise NotOurShape
    return entries


def _next_cursor(body: Any, cursor: str | None) -> str | None:
    """The next page's token; one that does not move is no next page."""
    token = text_of(object_of(body).get("nextPageToken"))
    return token if token != cursor else None


# ----------------------------------------------------------------------------------------- request lines


class Addressed(NamedTuple):
    """A request without its ``model`` member, and what that said (``""`` when it is not there or no text)."""

    body: bytes
    model: str


_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NO_MODEL = frozenset({b"null", b'""'})


def take_model(body: bytes) -> Addressed:
    """Take the ``model`` member out of a request; the bytes of all other values stay as they are.

    Raises:
        ValueError: the body is no JSON object.
    """
    if b'"model"' not in body and b"\\u" not in body:
        return Addressed(body, "")
    try:
        members: dict[str, Any] = {name: bytes(raw) for name, raw in _members.decode(body).items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        members = _split_carefully(body)  # half a surrogate pair, which the fast decoder refuses
    raw = members.pop("model", None)
    if raw is None:
        return Addressed(body, "")
    try:
        model = json.loads(raw) if raw not in _NO_MODEL else ""
    except ValueError:
        model = ""
    rest = b",".join(msgspec.json.encode(name) + b":" + value for name, value in members.items())
    return Addressed(b"{" + rest + b"}", model if isinstance(model, str) else "")


def _split_carefully(body: bytes) -> dict[str, bytes]:
    """The members of an object by the standard library's decoder, which takes all that JSON's grammar allows."""
    try:
        return _split(body.decode())
    except (ValueError, IndexError, RecursionError):
        raise ValueError("a request body is no JSON object that can be read") from None


def _split(text: str) -> dict[str, bytes]:
    decoder, members = json.JSONDecoder(), dict[str, bytes]()
    at = _after(text, _after_blanks(text, 0), "{")
    while text[at] != "}":
        if members:
            at = _after(text, at, ",")
        name, at = decoder.raw_decode(text, at)
        start = _after(text, _after_blanks(text, at), ":")
        _, end = decoder.raw_decode(text, start)
        members[name] = text[start:end].encode()
        at = _after_blanks(text, end)
    return members


def _after(text: str, at: int, sign: str) -> int:
    """Behind this sign and the blanks that follow it."""
    if text[at] != sign:
        raise ValueError(sign)
    return _after_blanks(text, at + 1)


def _after_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def request_line(body: bytes) -> bytes:
    """A request line behind its ``key`` member, ended by a line feed; ``body`` goes in without its ``model``.

    Raises:
        ValueError: the body holds a raw line break, or is no JSON object.
    """
    if b"\n" in body or b"\r" in body:
        raise ValueError("a request body holds a raw line break: replace those between tokens by spaces first")
    return b"".join((b',"request":', take_model(body).body, b"}\n"))


def request_head(wire_id: str) -> bytes:
    """The first member of a request line."""
    return b'{"key":' + msgspec.json.encode(wire_id)


def model_path(model: str) -> str:
    """The model as it stands in addresses: tuned models have a folder of their own."""
    return model if model.startswith(("models/", "tunedModels/")) else f"models/{model}"
