r"""Result lines of OpenAI's shape: taken apart on the hot path, read again tolerantly when they are not quite JSON.

Several providers write them; what differs is the words of their errors, which are judged by each provider's tables.

**Strict reading.** The line is decoded with its ``response.body`` left raw, so the provider's bytes go out as they
came; then the body is decoded a second time for the few members that decide class, flags and usage. The strict
decoder checks the grammar of what it skips but not its UTF-8, which is therefore checked first.

**Tolerant reading.** A line that fails is mended token by token and read again. Nothing that carries meaning is
lost or re-rendered: numbers, keys, order and valid strings stay as they were. What is changed is exactly what JSON
does not allow: bytes that are no UTF-8 become U+FFFD, raw control characters inside strings become their ``\u00XX``
escape, ``NaN`` and ``Infinity`` become ``null``, a byte order mark and NUL padding around the line are dropped. An
escaped half of a surrogate pair is allowed by the JSON grammar (though many parsers refuse it) and stays. A line
that cannot be mended is an ``UnreadableLine``, with the wire id if a ``custom_id`` can still be seen in it.

**An answer that says nothing** is judged by what the server says of its end and of the tokens, in this order:

- stopped by the content filter: ``CONTENT_FILTERED``.
- stopped by a token limit, or every token spent on reasoning: a success with ``TRUNCATED`` and ``EMPTY``. It was
  billed, and the same request again would end the same way; only a larger limit helps, which is for the caller.
- the model ended by itself, having made tokens (or the server does not count): a success with ``EMPTY``. Silence can
  be an answer ("list all names in this text"), and it was billed.
- all else: ``TRANSIENT``, with ``empty_answer``. Nobody says that the model ended, or it ended having made no token
  at all: servers under load do that, nothing or little was billed, and a second try usually answers.

**Several choices**: their flags add up, and the row is an answer if one of them is. What was broken off by the server
itself (``BROKEN_REASONS``) is no answer, even with half a text: the row goes again, the half text stays as evidence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw, Struct

from batchferry.domain.provider import Usage
from batchferry.domain.rows import ResultLine, RowClass, RowFlag, UnreadableLine
from batchferry.providers.mending import loosely, mend, visible_id, whole_json
from batchferry.providers.shapes import NotOurShape, body_error, error_facts, read_json, safe_code
from batchferry.providers.verdicts import (
    BROKEN_REASONS,
    CALL_REASONS,
    FILTERED_REASONS,
    NO_FACTS,
    TRUNCATED_REASONS,
    UNANSWERED_STATUSES,
    ErrorFacts,
    OurCode,
    Verdict,
)

_NOTHING = frozenset({b"", b"null", b'""', b"[]", b"{}", b"false"})
"""JSON values that say nothing where text, parts or an error could stand."""
_NOTHING_BYTES = 16
"""Anything longer says something; this spares hashing a whole answer."""
_ABSENT = Raw()
"""The value of a member that is not there; it costs nothing to recognise."""


# ------------------------------------------------------------------------------- what is read of a line


class _Response(Struct, gc=False):
    status_code: int | None = None
    request_id: str | None = None
    body: Raw = _ABSENT


class _Line(Struct, gc=False):
    custom_id: str | int | None = None
    response: _Response | None = None
    error: Raw = _ABSENT


class _CachedTokens(Struct, gc=False):
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None


class _Usage(Struct, gc=False):
    """Both vocabularies: chat, completions and embeddings say prompt and completion, responses input and output."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _CachedTokens | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _CachedTokens | None = None
    total_tokens: int | None = None


class _Body(Struct, gc=False):
    """What every endpoint's answer may have."""

    model: str | None = None
    usage: _Usage | None = None
    error: Raw = _ABSENT


class _Message(Struct, gc=False):
    content: Raw = _ABSENT
    refusal: str | None = None
    tool_calls: list[Raw] | None = None
    function_call: dict[str, Raw] | None = None
    audio: dict[str, Raw] | None = None
    images: list[Raw] | None = None


class _Choice(Struct, gc=False):
    finish_reason: str | None = None
    message: _Message | None = None
    text: Raw = _ABSENT


class _ChoicesBody(_Body, gc=False):
    choices: list[_Choice] | None = None


class _Incomplete(Struct, gc=False):
    reason: str | None = None


class _Item(Struct, gc=False):
    type: str | None = None
    content: Raw = _ABSENT


class _Part(Struct, gc=False):
    type: str | None = None
    text: Raw = _ABSENT


class _ResponsesBody(_Body, gc=False):
    status: str | None = None
    incomplete_details: _Incomplete | None = None
    output: list[_Item] | None = None


class _DataBody(_Body, gc=False):
    data: list[Raw] | None = None


class _ResultsBody(_Body, gc=False):
    results: list[Raw] | None = None


class _Made(Struct, gc=False):
    reasoning_tokens: int | None = None


class _Spent(Struct, gc=False):
    """The tokens of the answer, in both vocabularies."""

    completion_tokens: int | None = None
    completion_tokens_details: _Made | None = None
    output_tokens: int | None = None
    output_tokens_details: _Made | None = None


class _SpentBody(Struct, gc=False):
    """What is read a second time, only of an answer that says nothing."""

    usage: _Spent | None = None


class _ToolChoiceBody(Struct, gc=False):
    """What is read a second time, only of an answer that is a call."""

    tool_choice: _Part | None = None


class _Findings(NamedTuple):
    """What a 2xx body says: no class means a success."""

    flags: tuple[RowFlag, ...] = ()
    row_class: RowClass | None = None
    code: str | None = None
    is_unknown: bool = False


def _says(raw: Raw | bytes) -> bool:
    """Whether a JSON value says anything; blanks do not."""
    if raw is _ABSENT:
        return False
    given = bytes(raw)
    if len(given) > _NOTHING_BYTES:
        return True
    if b"\\" in given:
        given = given.replace(b"\\n", b"").replace(b"\\r", b"").replace(b"\\t", b"")
    return given.translate(None, b" \t\r\n") not in _NOTHING


# -------------------------------------------------------------------------------- one reader a shape

_ANSWERED = _Findings()
_NOTHING_AT_ALL = _Findings((), RowClass.TRANSIENT, OurCode.EMPTY_ANSWER.value)
_BROKEN_OFF = _Findings((), RowClass.TRANSIENT, OurCode.BROKEN_OFF.value)


def _judge_choices(body: _ChoicesBody, readable: bytes) -> _Findings:
    """Chat and plain completions.

    A call that the request forced by naming its function ends with ``stop``, at OpenAI as at vLLM (its pull requests
    25054 and 49496 compare them), while one of the model's own, or of ``required``, ends with ``tool_calls``.
    """
    if not body.choices:
        return _NOTHING_AT_ALL
    flags: list[RowFlag] = []
    answered = broken = ended = False
    for choice in body.choices:
        message, reason = choice.message, choice.finish_reason
        has_text, refused, calls = _says(choice.text), False, False
        if message is not None:
            has_text = has_text or _says(message.content) or bool(message.audio or message.images)
            refused = bool(message.refusal)
            calls = bool(message.tool_calls or message.function_call)
        if reason == "stop" and (has_text or calls) and not refused:
            answered = True
            continue
        reason = (reason or "").lower()
        says = has_text or refused or calls
        if reason in BROKEN_REASONS:
            broken = True
            flags.append(RowFlag.TRUNCATED if says else RowFlag.EMPTY)
            continue
        if reason in TRUNCATED_REASONS:
            flags.append(RowFlag.TRUNCATED)
        elif reason in FILTERED_REASONS:
            flags.append(RowFlag.FILTERED)
        elif says and ((calls and reason != "stop") or reason in CALL_REASONS):
            flags.append(RowFlag.TOOL_CALL_PENDING)
        if refused:
            flags.append(RowFlag.REFUSED)
        if not says:
            flags.append(RowFlag.EMPTY)
            # Announced calls that are not there are no end of the model's own.
            ended = ended or bool(reason and reason not in CALL_REASONS)
        answered = answered or says
    if broken and not answered:
        return _BROKEN_OFF
    return _sum_up(flags) if answered else _judge_silence(flags, ended, True, readable)


_CALL_ITEMS = frozenset(
    {
        "function_call",
        "custom_tool_call",
        "computer_call",
        "local_shell_call",
        "shell_call",
        "apply_patch_call",
        "mcp_approval_request",
    }
)
"""Output items of the responses endpoint that wait for the caller; other tool items were carried out by the server."""
_FORCEABLE_ITEMS = {"function_call": "function", "custom_tool_call": "custom"}
"""Calls that a request may force by naming one, and the type of ``tool_choice`` that does."""

_parts = msgspec.json.Decoder(list[_Part])


def _forced_by(readable: bytes) -> str | None:
    """The kind of call by which the request left the model no other way: its ``tool_choice``, which is repeated.

    None also for ``allowed_tools`` and for words (``auto``, ``required``), which leave it a choice.
    """
    tool_choice = loosely(_ToolChoiceBody, _or_none(readable)).tool_choice
    return tool_choice.type if tool_choice is not None else None


def _judge_responses(body: _ResponsesBody, readable: bytes) -> _Findings:
    flags: list[RowFlag] = []
    answered, status = False, body.status
    if status != "completed":
        status = (status or "completed").lower()
        if status == "incomplete":
            reason = ((body.incomplete_details.reason if body.incomplete_details else None) or "").lower()
            flags.append(RowFlag.FILTERED if reason in FILTERED_REASONS else RowFlag.TRUNCATED)
        elif status != "completed":
            code = safe_code(f"response_{status}")
            return _Findings((), RowClass.TRANSIENT, code, is_unknown=status not in UNANSWERED_STATUSES)
    for item in body.output or ():
        if item.type in _CALL_ITEMS:
            wanted = _FORCEABLE_ITEMS.get(item.type or "")
            if status == "completed" and (wanted is None or _forced_by(readable) != wanted):
                flags.append(RowFlag.TOOL_CALL_PENDING)
            answered = True
        elif item.type == "message":
            try:
                parts = _parts.decode(item.content) if _says(item.content) else []
            except (msgspec.DecodeError, RecursionError):
                answered = True  # text in another form is text
                continue
            for part in parts:
                if part.type == "refusal":
                    flags.append(RowFlag.REFUSED)
                    answered = True
                else:
                    answered = answered or part.type != "output_text" or _says(part.text)
        elif item.type != "reasoning":
            answered = True
    if answered:
        return _sum_up(flags) if flags else _ANSWERED
    flags.append(RowFlag.EMPTY)
    return _judge_silence(flags, body.status is not None and status == "completed", bool(body.output), readable)


def _sum_up(flags: list[RowFlag]) -> _Findings:
    return _Findings(tuple(dict.fromkeys(flags))) if flags else _ANSWERED


def _judge_silence(given: list[RowFlag], has_ended: bool, has_place: bool, readable: bytes) -> _Findings:
    """An answer that says nothing; the reasons stand in the module's text.

    Args:
        given: its flags so far.
        has_ended: the server says that the model ended by itself.
        has_place: there is a message where a text could stand.
        readable: the body.
    """
    flags = tuple(dict.fromkeys(given))
    if RowFlag.FILTERED in flags:
        return _Findings(flags, RowClass.CONTENT_FILTERED)
    if RowFlag.TRUNCATED in flags:
        return _Findings(flags)
    spent = loosely(_SpentBody, _or_none(readable)).usage or _Spent()
    made = spent.completion_tokens if spent.completion_tokens is not None else spent.output_tokens
    details = spent.completion_tokens_details or spent.output_tokens_details
    thought = details.reasoning_tokens if details is not None else None
    if made is not None and 0 < made <= (thought or 0):
        return _Findings((RowFlag.TRUNCATED, *flags))
    if has_ended and (made or (made is None and has_place)):
        return _Findings(flags)
    return _NOTHING_AT_ALL


def _judge_data(body: _DataBody, _readable: bytes) -> _Findings:
    return _ANSWERED if body.data else _NOTHING_AT_ALL


def _judge_results(body: _ResultsBody, _readable: bytes) -> _Findings:
    return _ANSWERED if body.results else _NOTHING_AT_ALL


def _judge_any(_body: _Body, _readable: bytes) -> _Findings:
    return _ANSWERED


class _Shape(NamedTuple):
    """How the body of one endpoint is read and judged."""

    type: type[_Body]
    decode: Callable[[Any], _Body]
    judge: Callable[[Any, bytes], _Findings]


_SHAPES: tuple[tuple[str, _Shape], ...] = tuple(
    (ending, _Shape(kind, msgspec.json.Decoder(kind).decode, judge))
    for ending, kind, judge in (
        ("/completions", _ChoicesBody, _judge_choices),
        ("/chat/ds-test", _ChoicesBody, _judge_choices),  # DashScope's free rehearsal endpoint
        ("/responses", _ResponsesBody, _judge_responses),
        ("/embeddings", _DataBody, _judge_data),
        ("/moderations", _ResultsBody, _judge_results),
        ("", _Body, _judge_any),
    )
)


@lru_cache(maxsize=64)
def _shape_of(endpoint: str) -> _Shape:
    """By the end of the path: servers differ in what stands in front."""
    path = endpoint.partition("?")[0].rstrip("/").lower()
    return next(shape for ending, shape in _SHAPES if path.endswith(ending))


# ---------------------------------------------------------------------------------------- the reading

_line = msgspec.json.Decoder(_Line)


def _error_of(raw: Raw | bytes) -> ErrorFacts:
    if not _says(raw):
        return NO_FACTS
    value = _or_none(bytes(raw))
    return body_error(value) or error_facts(value)


def _or_none(raw: bytes) -> Any:
    try:
        return read_json(raw)
    except NotOurShape:
        return None


def _usage(read: _Usage | None) -> Usage | None:
    """Tokens in either vocabulary; None where the server counts nothing."""
    if read is None:
        return None
    taken = read.prompt_tokens if read.prompt_tokens is not None else read.input_tokens
    given = read.completion_tokens if read.completion_tokens is not None else read.output_tokens
    if taken is None and given is None:
        taken = read.total_tokens
        if taken is None:
            return None
    details = read.prompt_tokens_details or read.input_tokens_details
    cached = details.cached_tokens if details is not None else None
    taken, cached = max(taken or 0, 0), max(cached or 0, 0)
    written = details.cache_write_tokens if details is not None else None
    # Both are parts of the input: more than what is left of it cannot be priced.
    written = min(written, max(taken - cached, 0)) if written is not None and written > 0 else 0
    return Usage(taken, max(given or 0, 0), cached, written)


# ---------------------------------------------------------------------------------------- the reader


def _code_or_type(facts: ErrorFacts) -> str | None:
    return facts.code or facts.type


@dataclass(frozen=True, slots=True)
class LineReader:
    """Reads the lines of one provider: their shape is OpenAI's, the words of their errors are the provider's own."""

    classify: Callable[[int | None, ErrorFacts], Verdict]
    """Judges a row that did not succeed, by the provider's tables."""
    name_error: Callable[[ErrorFacts], str | None] = _code_or_type
    """The word under which an error is told, counted and shown."""

    def read_line(self, line: bytes, endpoint: str) -> ResultLine | UnreadableLine:
        """Take one result line apart and judge its row; see the module's text."""
        try:
            if not line.isascii():
                line.decode()
            read = _line.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self._read_tolerantly(line, endpoint)
        wire_id = read.custom_id
        if wire_id is None or wire_id == "":
            return UnreadableLine("no custom_id")
        if wire_id.__class__ is not str:
            wire_id = str(wire_id)
        response = read.response
        if response is None:
            return self._without_response(wire_id, bytes(read.error))
        body, status = bytes(response.body), response.status_code
        if status == 200 and len(body) > _NOTHING_BYTES:  # nearly every line
            return self._answered(wire_id, status, response.request_id, body, body, read.error, _shape_of(endpoint))
        return self._with_response(wire_id, status, response.request_id, body, body, read.error, _shape_of(endpoint))

    def judge_answer(self, status: int, request_id: str | None, body: bytes, endpoint: str) -> ResultLine:
        """Judge the whole answer of a synchronous call as if it stood in a result line; ``wire_id`` stays empty.

        The ``body`` of the verdict is JSON, or None where the answer holds none (a gateway's web page, a cut text). Its
        bytes stay as they are but for blanks around them; what is not quite JSON is mended like a line. A 2xx that
        cannot be read is ``UNREADABLE``.
        """
        whole = whole_json(body)
        if whole is None and 200 <= status < 300:
            return ResultLine("", RowClass.UNREADABLE, status, request_id, code=OurCode.UNREADABLE_ANSWER.value)
        kept, readable = whole or (b"", b"")
        return self._with_response("", status, request_id, kept, readable, b"", _shape_of(endpoint))

    def _with_response(
        self,
        wire_id: str,
        status: int | None,
        request_id: str | None,
        body: bytes,
        readable: bytes,
        error: Raw | bytes,
        shape: _Shape,
    ) -> ResultLine:
        """Judge a line that has a response; ``readable`` is ``body`` as the strict decoder takes it."""
        kept = None if body in (b"", b"null") else body
        if status is None or 200 <= status < 300:
            if not _says(readable):
                if _says(error):
                    return self._failed(wire_id, status, request_id, kept, _error_of(error), None)
                return ResultLine(wire_id, RowClass.TRANSIENT, status, request_id, kept, OurCode.EMPTY_BODY.value)
            return self._answered(wire_id, status, request_id, body, readable, error, shape)
        facts = None
        if _says(readable):
            try:
                value = read_json(readable)
            except NotOurShape:
                value = None
            facts = body_error(value)
            if facts is None and isinstance(value, dict) and isinstance(value.get("error"), str):
                facts = error_facts(value["error"])
            elif facts is None:
                facts = error_facts(value)
        return self._failed(wire_id, status, request_id, kept, facts or NO_FACTS, _error_of(error))

    def _answered(
        self,
        wire_id: str,
        status: int | None,
        request_id: str | None,
        body: bytes,
        readable: bytes,
        error: Raw | bytes,
        shape: _Shape,
    ) -> ResultLine:
        """Judge a 2xx with a body, or a body without a status."""
        try:
            read = shape.decode(readable)
        except (msgspec.DecodeError, RecursionError):
            read = loosely(shape.type, _or_none(readable))
        usage, model = _usage(read.usage), read.model
        if _says(read.error):
            facts = _error_of(bytes(read.error))
            return self._failed(wire_id, status, request_id, body, facts, None, usage, model)
        if status is None:
            # Servers that leave members out may leave the status out, but never what makes the answer an answer.
            value = _or_none(readable)
            if not (isinstance(value, dict) and value.keys() & {"choices", "output", "data", "results", "object"}):
                facts = body_error(value) or _error_of(error)
                return self._failed(
                    wire_id, None, request_id, body, facts, ErrorFacts(code=OurCode.NO_STATUS.value), usage, model
                )
        findings = shape.judge(read, readable) if readable[:1] == b"{" else _ANSWERED
        return ResultLine(
            wire_id,
            findings.row_class or RowClass.SUCCEEDED,
            status,
            request_id,
            body,
            findings.code,
            "",
            findings.flags,
            usage,
            model,
            findings.is_unknown,
        )

    def _without_response(self, wire_id: str, error: bytes) -> ResultLine:
        facts = _error_of(error)
        if facts is NO_FACTS:
            return ResultLine(wire_id, RowClass.TRANSIENT, code=OurCode.NO_RESPONSE_NO_ERROR.value)
        return self._failed(wire_id, None, None, None, facts, None)

    def _failed(
        self,
        wire_id: str,
        status: int | None,
        request_id: str | None,
        body: bytes | None,
        facts: ErrorFacts,
        second: ErrorFacts | None,
        usage: Usage | None = None,
        model: str | None = None,
    ) -> ResultLine:
        """A row that did not succeed; ``second`` helps out where ``facts`` says nothing."""
        if second is not None and facts == NO_FACTS:
            facts = second
        verdict = self.classify(status, facts)
        code = self.name_error(facts)
        known = status if status is not None else facts.http_status
        return ResultLine(
            wire_id,
            verdict.row_class,
            known,
            request_id,
            body,
            code,
            facts.message,
            (),
            usage,
            model,
            verdict.is_unknown,
        )

    def _read_tolerantly(self, line: bytes, endpoint: str) -> ResultLine | UnreadableLine:
        mended, readable = mend(line)
        if not mended:
            return UnreadableLine("empty line")
        try:
            members = msgspec.json.decode(readable, type=dict[str, Raw])
            response = msgspec.json.decode(members.get("response") or b"null", type=dict[str, Raw] | None)
        except msgspec.ValidationError:
            return UnreadableLine("not a result object", visible_id(line))
        except RecursionError:
            return UnreadableLine("nested too deep", visible_id(line))
        except msgspec.DecodeError:
            return UnreadableLine("not JSON", visible_id(line))
        custom_id = _or_none(bytes(members.get("custom_id", b"null")))
        if not isinstance(custom_id, str | int | float) or isinstance(custom_id, bool) or custom_id == "":
            return UnreadableLine("no custom_id")
        error = bytes(members.get("error", b""))
        if response is None:
            return self._without_response(str(custom_id), error)
        about = loosely(_Response, {name: _or_none(bytes(raw)) for name, raw in response.items() if name != "body"})
        body = bytes(response.get("body", b""))
        # Both texts are equally long, so the body lies at the same place in each.
        start = readable.find(body)
        return self._with_response(
            str(custom_id),
            about.status_code,
            about.request_id,
            mended[start : start + len(body)],
            body,
            error,
            _shape_of(endpoint),
        )
