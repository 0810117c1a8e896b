"""Result lines: ``{"key": ..., "response": {...}}`` or ``{"key": ..., "error": {...}}``.

**Reading.** The line is decoded with its ``response`` left raw, so the provider's bytes go out as they came; then the
response is decoded a second time for the few members that decide class, flags and usage. A line that is not quite JSON
is mended and read again (``providers.mending``); one that cannot be is an ``UnreadableLine``, with its key if that can
still be seen.

**A prompt that was not let through** has no candidates and a ``promptFeedback.blockReason``. Gemini counts such a row
as successful; here it is ``CONTENT_FILTERED``.

**An answer that says nothing** is judged by its ``finishReason``: stopped by a filter it is ``CONTENT_FILTERED``; cut
by the token limit (thinking alone may use all of it) a success with ``TRUNCATED`` and ``EMPTY``; ended by the model
itself with tokens made, a success with ``EMPTY``; all else is ``TRANSIENT``. Thoughts are no answer.

**Several candidates**: their flags add up, and the row is an answer if one of them is. A candidate that broke (a
malformed function call, say) is none, even with half a text.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
from msgspec import Raw, Struct

from batchferry.domain.provider import Usage
from batchferry.domain.rows import ResultLine, RowClass, RowFlag, UnreadableLine
from batchferry.providers.gemini.classes import (
    BLOCK_REASONS,
    FINISHES,
    NO_FACTS,
    ErrorFacts,
    Finish,
    body_error,
    classify_row,
    error_facts,
)
from batchferry.providers.mending import loosely, mend, visible_id, whole_json
from batchferry.providers.shapes import NotOurShape, read_json, safe_code
from batchferry.providers.verdicts import OurCode

KEY = "key"
_ABSENT = Raw()
_NOTHING = frozenset({b"", b"null", b"{}", b"[]", b'""'})
_OK = 200


class _Line(Struct, gc=False):
    key: str | int | None = None
    response: Raw = _ABSENT
    error: Raw = _ABSENT


class _Part(Struct, gc=False, rename="camel"):
    text: str | None = None
    thought: bool | None = None
    function_call: Raw = _ABSENT
    inline_data: Raw = _ABSENT
    file_data: Raw = _ABSENT
    executable_code: Raw = _ABSENT
    code_execution_result: Raw = _ABSENT


class _Content(Struct, gc=False):
    parts: list[_Part] | None = None


class _Candidate(Struct, gc=False, rename="camel"):
    content: _Content | None = None
    finish_reason: str | None = None


class _Feedback(Struct, gc=False, rename="camel"):
    block_reason: str | None = None


class _Usage(Struct, gc=False, rename="camel"):
    prompt_token_count: int | None = None
    cached_content_token_count: int | None = None
    candidates_token_count: int | None = None
    thoughts_token_count: int | None = None
    tool_use_prompt_token_count: int | None = None


class _Response(Struct, gc=False, rename="camel"):
    candidates: list[_Candidate] | None = None
    prompt_feedback: _Feedback | None = None
    usage_metadata: _Usage | None = None
    model_version: str | None = None
    response_id: str | None = None
    error: Raw = _ABSENT


class _Findings(NamedTuple):
    """What a response says: no class means a success."""

    flags: tuple[RowFlag, ...] = ()
    row_class: RowClass | None = None
    code: str | None = None
    is_unknown: bool = False


_ANSWERED = _Findings()
_NOTHING_AT_ALL = _Findings((), RowClass.TRANSIENT, OurCode.EMPTY_ANSWER.value)

_line = msgspec.json.Decoder(_Line)
_response = msgspec.json.Decoder(_Response)


# ------------------------------------------------------------------------------------------ the judgement


def _judge(response: _Response) -> _Findings:
    candidates = response.candidates
    if not candidates:
        return _judge_blocked(response.prompt_feedback)
    flags: list[RowFlag] = []
    answered = ended = False
    failed: _Findings | None = None
    filtered_by: str | None = None
    for candidate in candidates:
        reason = (candidate.finish_reason or "").upper()
        finish = FINISHES.get(reason)
        says, calls = _says(candidate.content)
        if finish is Finish.ENDED and says and not calls:
            answered = True
            continue
        if finish in {Finish.BROKEN, Finish.REFUSED, Finish.ACCOUNT}:
            failed = failed or _Findings((), _FAILURES[finish], _finish_code(reason))
            flags.append(RowFlag.TRUNCATED if says else RowFlag.EMPTY)
            continue
        if finish is Finish.TRUNCATED:
            flags.append(RowFlag.TRUNCATED)
        elif finish is Finish.FILTERED:
            flags.append(RowFlag.FILTERED)
            filtered_by = filtered_by or _finish_code(reason)
        elif finish is None and reason and reason != "FINISH_REASON_UNSPECIFIED" and not says:
            failed = failed or _Findings((), RowClass.TRANSIENT, _finish_code(reason), is_unknown=True)
        elif calls:
            flags.append(RowFlag.TOOL_CALL_PENDING)
        if not says:
            flags.append(RowFlag.EMPTY)
            ended = ended or finish is Finish.ENDED
        answered = answered or says
    if answered:
        return _Findings(tuple(dict.fromkeys(flags))) if flags else _ANSWERED
    if failed is not None:
        return failed
    return _judge_silence(tuple(dict.fromkeys(flags)), ended, response.usage_metadata, filtered_by)


_FAILURES = {
    Finish.BROKEN: RowClass.TRANSIENT,
    Finish.REFUSED: RowClass.INVALID_REQUEST,
    Finish.ACCOUNT: RowClass.ACCOUNT,
}


def _finish_code(reason: str) -> str | None:
    return safe_code(f"finish_{reason.lower()}")


def _judge_blocked(feedback: _Feedback | None) -> _Findings:
    """No candidates: the prompt was blocked, or nothing is said at all."""
    reason = ((feedback.block_reason if feedback is not None else None) or "").upper()
    if not reason:
        return _NOTHING_AT_ALL
    code = safe_code(f"prompt_blocked_{reason.lower()}")
    return _Findings((), RowClass.CONTENT_FILTERED, code, is_unknown=reason not in BLOCK_REASONS)


def _judge_silence(
    flags: tuple[RowFlag, ...], has_ended: bool, usage: _Usage | None, filtered_by: str | None
) -> _Findings:
    if RowFlag.FILTERED in flags:
        return _Findings(flags, RowClass.CONTENT_FILTERED, filtered_by)
    if RowFlag.TRUNCATED in flags:
        return _Findings(flags)
    # Zero is left out on the wire, so a usage without these members counts none.
    made = None if usage is None else (usage.candidates_token_count or 0) + (usage.thoughts_token_count or 0)
    return _Findings(flags) if has_ended and made != 0 else _NOTHING_AT_ALL


def _says(content: _Content | None) -> tuple[bool, bool]:
    """Whether a candidate says anything, and whether it calls a function of the caller's."""
    says = calls = False
    for part in content.parts or () if content is not None else ():
        if part.function_call is not _ABSENT:
            says = calls = True
        elif part.text is not None:
            says = says or (not part.thought and bool(part.text) and not part.text.isspace())
        elif not part.thought:
            says = says or any(
                other is not _ABSENT
                for other in (part.inline_data, part.file_data, part.executable_code, part.code_execution_result)
            )
    return says, calls


def _usage(read: _Usage | None) -> Usage | None:
    """Tokens: the prompt includes what was cached; thoughts are billed as output and stand beside the candidates'.

    What tools gave back to the model is input that the prompt does not include.
    """
    if read is None:
        return None
    return Usage(
        _positive(read.prompt_token_count) + _positive(read.tool_use_prompt_token_count),
        _positive(read.candidates_token_count) + _positive(read.thoughts_token_count),
        _positive(read.cached_content_token_count),
    )


def _positive(count: int | None) -> int:
    return count if count is not None and count > 0 else 0


# --------------------------------------------------------------------------------------------- the reading


def read_line(line: bytes) -> ResultLine | UnreadableLine:
    """Take one result line apart and judge its row; see the module's text."""
    try:
        if not line.isascii():
            line.decode()
        read = _line.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _read_tolerantly(line)
    key = read.key
    if key is None or key == "":
        return UnreadableLine(f"no {KEY}")
    response, error = bytes(read.response), bytes(read.error)
    return _judged(str(key), response, response, error)


def _judged(key: str, response: bytes, readable: bytes, error: bytes) -> ResultLine:
    """Judge a line; ``readable`` is ``response`` as the strict decoder takes it."""
    if readable in _NOTHING:
        if error not in _NOTHING:
            return _failed(key, None, None, error, error_facts(_or_none(error)))
        code = OurCode.EMPTY_BODY if readable == b"{}" else OurCode.NO_RESPONSE_NO_ERROR
        return ResultLine(key, RowClass.TRANSIENT, _OK if readable == b"{}" else None, None, None, code.value)
    return _answered(key, _OK, None, response, readable)


def _answered(key: str, status: int, request_id: str | None, body: bytes, readable: bytes) -> ResultLine:
    try:
        read = _response.decode(readable)
    except (msgspec.DecodeError, RecursionError):
        read = loosely(_Response, _or_none(readable))
    request_id = request_id or safe_code(read.response_id)
    usage, model = _usage(read.usage_metadata), read.model_version
    if bytes(read.error) not in _NOTHING:
        facts = error_facts(_or_none(bytes(read.error)))
        return _failed(key, None, request_id, body, facts, usage, model)
    findings = _judge(read)
    return ResultLine(
        key,
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


def _failed(
    key: str,
    status: int | None,
    request_id: str | None,
    body: bytes | None,
    facts: ErrorFacts,
    usage: Usage | None = None,
    model: str | None = None,
) -> ResultLine:
    verdict = classify_row(facts, status)
    return ResultLine(
        key,
        verdict.row_class,
        status if status is not None else facts.http_status,
        request_id,
        body,
        facts.code,
        facts.message,
        (),
        usage,
        model,
        verdict.is_unknown,
    )


def _or_none(raw: bytes) -> Any:
    try:
        return read_json(raw)
    except NotOurShape:
        return None


def _read_tolerantly(line: bytes) -> ResultLine | UnreadableLine:
    mended, readable = mend(line)
    if not mended:
        return UnreadableLine("empty line")
    try:
        members = msgspec.json.decode(readable, type=dict[str, Raw])
    except msgspec.ValidationError:
        return UnreadableLine("not a result object", visible_id(line, KEY))
    except RecursionError:
        return UnreadableLine("nested too deep", visible_id(line, KEY))
    except msgspec.DecodeError:
        return UnreadableLine("not JSON", visible_id(line, KEY))
    key = _or_none(bytes(members.get(KEY, b"null")))
    if not isinstance(key, str | int | float) or isinstance(key, bool) or key == "":
        return UnreadableLine(f"no {KEY}")
    response, error = bytes(members.get("response", b"")), bytes(members.get("error", b""))
    # Both texts are equally long, so the response lies at the same place in each.
    start = readable.find(response)
    return _judged(str(key), mended[start : start + len(response)], response, error)


def judge_answer(status: int, request_id: str | None, body: bytes) -> ResultLine:
    """Judge the whole answer of a synchronous call as if it stood in a result line; ``wire_id`` stays empty.

    The ``body`` of the verdict is JSON, or None where the answer holds none. A 2xx that cannot be read is
    ``UNREADABLE``.
    """
    is_good = 200 <= status < 300
    whole = whole_json(body)
    if whole is None and is_good:
        return ResultLine("", RowClass.UNREADABLE, status, request_id, code=OurCode.UNREADABLE_ANSWER.value)
    kept, readable = whole or (b"", b"")
    if not is_good:
        facts = body_error(_or_none(readable)) or NO_FACTS
        return _failed("", status, request_id, kept or None, facts)
    if readable in _NOTHING:
        return ResultLine("", RowClass.TRANSIENT, status, request_id, kept or None, OurCode.EMPTY_BODY.value)
    return _answered("", status, request_id, kept, readable)
