r"""Result lines of Message Batches: taken apart on the hot path, and read again tolerantly when not quite JSON.

A line is ``{"custom_id", "result": {"type", ...}}`` and its type decides: ``succeeded`` has a ``message``, ``errored``
an error *envelope* (the error itself lies at ``result.error.error``, since ``result.error.type`` is always ``error``),
``canceled`` and ``expired`` have nothing. The message, or the envelope, is the row's native body and its bytes stay as
they came; only what JSON does not allow is mended (``mending`` says what).

**An answer that says nothing** is judged as in the other rooms: cut by a limit, or all spent on thinking: a success
with ``TRUNCATED`` and ``EMPTY``; refused: a success with ``REFUSED``; ended by itself, having made tokens (or not
counting them): a success with ``EMPTY``; all else ``TRANSIENT``, to be sent again.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw, Struct

from batchferry.domain.provider import Usage
from batchferry.domain.rows import ResultLine, RowClass, RowFlag, UnreadableLine
from batchferry.providers.anthropic.classes import (
    ENDED_REASONS,
    PENDING_REASONS,
    REFUSED_REASON,
    TRUNCATED_REASONS,
    TYPE_STATUSES,
    classify,
)
from batchferry.providers.anthropic.wire import error_facts, is_envelope, request_id_of
from batchferry.providers.mending import loosely, mend, visible_id, whole_json
from batchferry.providers.shapes import NotOurShape, read_json, safe_code
from batchferry.providers.verdicts import NO_FACTS, ErrorFacts, OurCode

_ABSENT = Raw()
_LOOK_BYTES = 16
"""Anything longer is taken to say something."""
_SUCCESS_STATUS = 200
"""A message is what the ordinary endpoint answers with this status; a line names none."""


class _Result(Struct, gc=False):
    type: str | None = None
    message: Raw = _ABSENT
    error: Raw = _ABSENT


class _Line(Struct, gc=False):
    custom_id: str | None = None
    result: _Result | None = None


class _Block(Struct, gc=False):
    type: str | None = None
    text: Raw = _ABSENT


class _Made(Struct, gc=False):
    thinking_tokens: int | None = None


class _Kept(Struct, gc=False):
    ephemeral_1h_input_tokens: int | None = None


class _Usage(Struct, gc=False):
    input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    cache_creation: _Kept | None = None
    cache_read_input_tokens: int | None = None
    output_tokens: int | None = None
    output_tokens_details: _Made | None = None


class _Message(Struct, gc=False):
    model: str | None = None
    content: list[_Block] | None = None
    stop_reason: str | None = None
    usage: _Usage | None = None


class _Findings(NamedTuple):
    flags: tuple[RowFlag, ...] = ()
    row_class: RowClass = RowClass.SUCCEEDED
    code: str | None = None


_ANSWERED = _Findings()
_NOTHING_AT_ALL = _Findings((), RowClass.TRANSIENT, OurCode.EMPTY_ANSWER.value)
_THOUGHTS = frozenset({"thinking", "redacted_thinking"})

_NOTHING = frozenset({b"", b"null", b'""', b"{}"})
_BLANKS = re.compile(rb"(?:[ \t\r\n]|\\[nrt])+")

_line = msgspec.json.Decoder(_Line)
_message = msgspec.json.Decoder(_Message)


def read_line(line: bytes) -> ResultLine | UnreadableLine:
    """Take one result line apart and judge its row; see the module's text."""
    try:
        if not line.isascii():
            line.decode()
        read = _line.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _read_tolerantly(line)
    if not read.custom_id:
        return UnreadableLine("no custom_id")
    result = read.result
    if result is None:
        return ResultLine(read.custom_id, RowClass.TRANSIENT, code=OurCode.NO_RESPONSE_NO_ERROR.value)
    message, error = bytes(result.message), bytes(result.error)
    return _judge(read.custom_id, result.type, message, message, error, error)


def _read_tolerantly(line: bytes) -> ResultLine | UnreadableLine:
    mended, readable = mend(line)
    if not mended:
        return UnreadableLine("empty line")
    try:
        members = msgspec.json.decode(readable, type=dict[str, Raw])
        result = msgspec.json.decode(members.get("result") or b"null", type=dict[str, Raw] | None)
    except msgspec.ValidationError:
        return UnreadableLine("not a result object", visible_id(line))
    except RecursionError:
        return UnreadableLine("nested too deep", visible_id(line))
    except msgspec.DecodeError:
        return UnreadableLine("not JSON", visible_id(line))
    wire_id = _or_none(bytes(members.get("custom_id", b"null")))
    if not isinstance(wire_id, str | int | float) or isinstance(wire_id, bool) or wire_id == "":
        return UnreadableLine("no custom_id")
    if result is None:
        return ResultLine(str(wire_id), RowClass.TRANSIENT, code=OurCode.NO_RESPONSE_NO_ERROR.value)

    def kept(part: bytes) -> bytes:
        # Both texts are equally long, so a part lies at the same place in each.
        start = readable.find(part)
        return mended[start : start + len(part)]

    kind = _or_none(bytes(result.get("type", b"null")))
    message, error = bytes(result.get("message", b"")), bytes(result.get("error", b""))
    return _judge(str(wire_id), kind if isinstance(kind, str) else None, kept(message), message, kept(error), error)


def _judge(
    wire_id: str, kind: str | None, message: bytes, readable: bytes, error: bytes, readable_error: bytes
) -> ResultLine:
    """A row by its result; each part comes as it is kept and as the strict decoder takes it."""
    kind = (kind or "").lower()
    if kind == "succeeded" or (not kind and _says(readable)):
        if not _says(readable):
            return ResultLine(wire_id, RowClass.TRANSIENT, code=OurCode.EMPTY_BODY.value)
        return _answered(wire_id, _SUCCESS_STATUS, None, message, readable)
    if kind == "expired":
        return ResultLine(wire_id, RowClass.EXPIRED, code="expired")
    if kind in {"canceled", "cancelled"}:
        return ResultLine(wire_id, RowClass.CANCELLED, code="canceled")
    if _says(readable_error):
        envelope = _or_none(readable_error)
        facts = error_facts(envelope)
        status = TYPE_STATUSES.get((facts.type or "").lower())
        return _failed(wire_id, status, request_id_of(envelope), error, facts)
    if kind == "errored" or not kind:
        return ResultLine(wire_id, RowClass.TRANSIENT, code=OurCode.NO_RESPONSE_NO_ERROR.value)
    # A type that nobody told us about: the row goes once more, and is counted.
    return ResultLine(wire_id, RowClass.TRANSIENT, code=safe_code(f"result_{kind}"), is_unknown=True)


def _says(raw: Raw | bytes) -> bool:
    """Whether a JSON value says anything; blanks do not."""
    given = bytes(raw)
    if len(given) > _LOOK_BYTES:
        return True
    return _BLANKS.sub(b"", given) not in _NOTHING


def _or_none(raw: bytes) -> Any:
    try:
        return read_json(raw)
    except NotOurShape:
        return None


def _answered(wire_id: str, status: int, request_id: str | None, body: bytes, readable: bytes) -> ResultLine:
    try:
        read = _message.decode(readable)
    except (msgspec.DecodeError, RecursionError):
        read = loosely(_Message, _or_none(readable))
    findings = _judge_message(read)
    return ResultLine(
        wire_id,
        findings.row_class,
        status,
        request_id,
        body,
        findings.code,
        "",
        findings.flags,
        _usage(read.usage),
        read.model,
    )


def _judge_message(message: _Message) -> _Findings:
    reason = (message.stop_reason or "").lower()
    blocks = message.content or []
    has_text = any(_says(block.text) if block.type == "text" else block.type not in _THOUGHTS for block in blocks)
    if has_text and reason in ENDED_REASONS:  # nearly every answer
        return _ANSWERED
    flags: list[RowFlag] = []
    if reason in TRUNCATED_REASONS:
        flags.append(RowFlag.TRUNCATED)
    elif reason == REFUSED_REASON:
        flags.append(RowFlag.REFUSED)
    elif reason in PENDING_REASONS and has_text:
        flags.append(RowFlag.TOOL_CALL_PENDING)
    if has_text:
        return _Findings(tuple(flags))
    if flags:
        return _Findings((*flags, RowFlag.EMPTY))
    usage = message.usage or _Usage()
    made = usage.output_tokens
    thought = usage.output_tokens_details.thinking_tokens if usage.output_tokens_details is not None else None
    if made is not None and 0 < made <= (thought or 0):
        return _Findings((RowFlag.TRUNCATED, RowFlag.EMPTY))
    if reason in ENDED_REASONS and (made or (made is None and message.content is not None)):
        return _Findings((RowFlag.EMPTY,))
    return _NOTHING_AT_ALL


def _failed(
    wire_id: str, status: int | None, request_id: str | None, body: bytes | None, facts: ErrorFacts
) -> ResultLine:
    verdict = classify(status, facts)
    return ResultLine(
        wire_id,
        verdict.row_class,
        status,
        request_id,
        body,
        facts.code or facts.type,
        facts.message,
        is_unknown=verdict.is_unknown,
    )


def _usage(read: _Usage | None) -> Usage | None:
    """The tokens; ``input_tokens`` on the wire leaves cached ones out, ours is the whole. None: nothing is counted."""
    if read is None or (read.input_tokens is None and read.output_tokens is None):
        return None
    written = max(read.cache_creation_input_tokens or 0, 0)
    cached = max(read.cache_read_input_tokens or 0, 0)
    fresh = max(read.input_tokens or 0, 0)
    kept_1h = max(read.cache_creation.ephemeral_1h_input_tokens or 0, 0) if read.cache_creation is not None else 0
    output = max(read.output_tokens or 0, 0)
    return Usage(fresh + cached + written, output, cached, written, min(kept_1h, written))


# ---------------------------------------------------------------------------- the answer of a single call


def judge_answer(status: int, request_id: str | None, body: bytes) -> ResultLine:
    """Judge the whole answer of a single call as if it stood in a result line; ``wire_id`` stays empty.

    The ``body`` of the verdict is JSON, or None where the answer holds none. A 2xx that cannot be read is
    ``UNREADABLE``.
    """
    is_success = 200 <= status < 300
    whole = whole_json(body)
    if whole is None and is_success:
        return ResultLine("", RowClass.UNREADABLE, status, request_id, code=OurCode.UNREADABLE_ANSWER.value)
    kept, readable = whole or (b"", b"")
    envelope: Any = None
    if not is_success or b'"error"' in readable[:200]:
        envelope = _or_none(readable)
    if is_success and not is_envelope(envelope):
        if not _says(readable):
            return ResultLine("", RowClass.TRANSIENT, status, request_id, code=OurCode.EMPTY_BODY.value)
        return _answered("", status, request_id, kept, readable)
    facts = error_facts(envelope) if envelope is not None else NO_FACTS
    return _failed("", status, request_id or request_id_of(envelope), kept or None, facts)
