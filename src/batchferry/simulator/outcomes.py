"""How a row ends: the decision (repeatable), and the lines and counts that follow from it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

from batchferry.simulator.answers import (
    CHAT,
    COMPLETIONS,
    PROMPT_MEMBER,
    RESPONSES,
    answer,
    body_fault,
    count_input_tokens,
    model_of,
)
from batchferry.simulator.bill import Run, RunKind
from batchferry.simulator.errors import INVALID_REQUEST, envelope
from batchferry.simulator.jsontext import dump_json
from batchferry.simulator.scenario import Outcome, RowOutcome, Scenario

_TEXT_ENDPOINTS = frozenset({CHAT, RESPONSES, COMPLETIONS})
_BROKEN_MARK = "\ue000"
"""Stands where the byte that is not UTF-8 goes; a private-use character that no answer has by itself."""
_SUCCESS = RowOutcome()


class Counted(Enum):
    """Under which of the batch's counters a row falls."""

    COMPLETED = "completed"
    FAILED = "failed"
    NEITHER = "neither"


@dataclass(frozen=True)
class Row:
    """One request, read and identified. ``raw`` is the body's canonical text; ``number`` its 1-based line."""

    wire_id: str
    endpoint: str
    body: dict[str, Any]
    raw: bytes
    digest: str
    number: int | None

    @cached_property
    def model(self) -> str | None:
        """The model asked for."""
        return model_of(self.endpoint, self.body)

    @cached_property
    def input_tokens(self) -> int:
        """Estimated tokens of the prompt."""
        return count_input_tokens(self.endpoint, self.body)


@dataclass(frozen=True, slots=True)
class HttpEnd:
    """A row that ended with an HTTP answer. ``body`` is None where there is none."""

    status: int
    body: dict[str, Any]
    run: Run
    headers: dict[str, str]


@dataclass(frozen=True, slots=True)
class RowEnd:
    """A row's lines in the two files (without line breaks), its run, and its counter."""

    output: tuple[bytes, ...]
    error: tuple[bytes, ...]
    run: Run
    counted: Counted


def decide(scenario: Scenario, seed: int, row: Row, attempt: int, lane: str) -> RowOutcome:
    """How this row ends on its ``attempt``-th run (1-based): the first rule that fits, else the drawn share.

    The same seed, body and attempt always give the same outcome, whatever custom_id the row has; only rules
    that match on the custom_id or the line number look at more.
    """
    for rule in scenario.rows:
        if _applies(rule, attempt, lane) and rule.match.fits(row.wire_id, row.raw, row.number, row.model):
            return rule
    if scenario.shares:
        drawn = hashlib.blake2b(f"{seed}:{row.digest}:{attempt}".encode(), digest_size=8).digest()
        point = int.from_bytes(drawn, "big") / 2**64
        for part in scenario.shares:
            if point < part.share:
                return part if _applies(part, attempt, lane) else _SUCCESS
            point -= part.share
    return _SUCCESS


def _applies(outcome: RowOutcome, attempt: int, lane: str) -> bool:
    return outcome.lane in {"both", lane} and (outcome.first_attempts is None or attempt <= outcome.first_attempts)


def natural_end(scenario: Scenario, row: Row) -> HttpEnd | None:
    """How the endpoint itself refuses the row whatever the script says: a wrong body, or one too long."""
    fault = body_fault(row.endpoint, row.body)
    if fault is not None:
        member, message = fault
        return _refusal(row, 400, message, INVALID_REQUEST, "invalid_type", member)
    tokens = row.input_tokens
    limit = scenario.limits.context_tokens
    if tokens > limit:
        return _too_long(row, tokens, limit)
    return None


def http_end(scenario: Scenario, row: Row, chosen: RowOutcome, at: float) -> HttpEnd | None:
    """The HTTP answer of a row, or None for an outcome that has none (timeout, expired)."""
    natural = natural_end(scenario, row)
    if natural is not None:
        return natural
    outcome = chosen.outcome
    if outcome in {Outcome.TIMEOUT, Outcome.EXPIRED}:
        return None
    if outcome is Outcome.CONTENT_FILTER:
        # Real refusals quote what they refuse, so this one does too.
        message = f"Your request was rejected by the safety system: {_quote(row)!r}"
        return _refusal(row, 400, message, INVALID_REQUEST, "content_policy_violation", None)
    if outcome is Outcome.CONTEXT_LENGTH:
        limit = scenario.limits.context_tokens
        return _too_long(row, limit + 1, limit)
    if outcome is Outcome.HTTP_ERROR:
        hint = {} if chosen.retry_after_s is None else {"retry-after": f"{chosen.retry_after_s:g}"}
        body = envelope(chosen.status, chosen.message, chosen.type, chosen.code)
        return HttpEnd(chosen.status, body, _run(row, RunKind.RUN), hint)
    if outcome is Outcome.STATUS_ZERO:
        return HttpEnd(0, {}, _run(row, RunKind.RUN), {})
    if outcome is Outcome.EMPTY_BODY:
        return HttpEnd(200, {}, _run(row, RunKind.RUN), {})
    made = answer(row.endpoint, row.body, row.digest, row.input_tokens, at, outcome, chosen.size_bytes)
    run = Run(row.wire_id, row.digest, RunKind.PAID, made.input_tokens, made.output_tokens, row.model or "")
    return HttpEnd(200, made.body, run, {})


def batch_end(scenario: Scenario, row: Row, chosen: RowOutcome, at: float, line_id: str) -> RowEnd:
    """The lines of a row that a batch reached; ``line_id`` is the unique end of the line's own ids."""
    end = http_end(scenario, row, chosen, at)
    if end is None:
        if chosen.outcome is Outcome.EXPIRED:
            line = unrun_line(row.wire_id, line_id, "batch_expired")
            return RowEnd((), (line,), _run(row, RunKind.NOT_RUN), Counted.NEITHER)
        line = unrun_line(row.wire_id, line_id, "request_timeout")
        return RowEnd((), (line,), _run(row, RunKind.RUN), Counted.FAILED)
    if end.status != 200:
        line = _line(row.wire_id, line_id, end.status, end.body)
        return RowEnd((), (line,), end.run, Counted.FAILED)
    outcome = chosen.outcome
    body = end.body
    if outcome is Outcome.INVALID_UTF8:
        body = _marked(row.endpoint, body)
    line = _line(row.wire_id, line_id, 200, body)
    lines: tuple[bytes, ...] = (line,)
    if outcome is Outcome.INVALID_UTF8:
        lines = (line.replace(_BROKEN_MARK.encode(), b"\xff"),)
    elif outcome is Outcome.UNREADABLE:
        lines = (line[: max(1, len(line) * 3 // 5)],)
    elif outcome is Outcome.MISSING:
        lines = ()
    elif outcome is Outcome.DUPLICATE:
        lines = (line, line)
    elif outcome is Outcome.FOREIGN:
        lines = (line, _line(f"somebody-else-{row.digest[:12]}", f"{line_id}f", 200, body))
    return RowEnd(lines, (), end.run, Counted.COMPLETED)


def unrun_line(wire_id: str, line_id: str, code: str) -> bytes:
    """A line for a row that got no HTTP answer."""
    messages = {
        "batch_expired": "This request could not be executed before the completion window expired.",
        "batch_cancelled": "This request was not executed because the batch was cancelled.",
        "request_timeout": "The request timed out.",
    }
    return dump_json(
        {
            "id": f"batch_req_{line_id}",
            "custom_id": wire_id,
            "response": None,
            "error": {"code": code, "message": messages[code]},
        }
    )


def _line(wire_id: str, line_id: str, status: int, body: dict[str, Any]) -> bytes:
    return dump_json(
        {
            "id": f"batch_req_{line_id}",
            "custom_id": wire_id,
            "response": {"status_code": status, "request_id": f"req_{line_id}", "body": body},
            "error": None,
        }
    )


def broken_utf8(endpoint: str, body: dict[str, Any]) -> bytes:
    """The body as JSON text with one byte in its text that is not UTF-8."""
    return dump_json(_marked(endpoint, body)).replace(_BROKEN_MARK.encode(), b"\xff")


def _marked(endpoint: str, body: dict[str, Any]) -> dict[str, Any]:
    """The body with the broken byte's mark in the text, or in the model's name where there is no text."""
    if endpoint not in _TEXT_ENDPOINTS:
        return body | {"model": f"{body['model']}{_BROKEN_MARK}"}
    if endpoint == RESPONSES:
        (item,) = body["output"]
        part = item["content"][0]
        return body | {"output": [item | {"content": [part | {"text": f"{_BROKEN_MARK}{part['text']}"}]}]}
    first, *others = body["choices"]
    if endpoint == COMPLETIONS:
        first = first | {"text": f"{_BROKEN_MARK}{first['text']}"}
    else:
        message = first["message"]
        first = first | {"message": message | {"content": f"{_BROKEN_MARK}{message['content']}"}}
    return body | {"choices": [first, *others]}


def _run(row: Row, kind: RunKind) -> Run:
    return Run(row.wire_id, row.digest, kind, model=row.model or "")


def _refusal(row: Row, status: int, message: str, kind: str, code: str | None, param: str | None) -> HttpEnd:
    return HttpEnd(status, envelope(status, message, kind, code, param), _run(row, RunKind.RUN), {})


def _too_long(row: Row, tokens: int, limit: int) -> HttpEnd:
    message = (
        f"This model's maximum context length is {limit} tokens. However, your input came to {tokens} tokens. "
        "Please shorten it."
    )
    param = PROMPT_MEMBER[row.endpoint]
    return _refusal(row, 400, message, INVALID_REQUEST, "context_length_exceeded", param)


def _quote(row: Row) -> str:
    text = row.body.get(PROMPT_MEMBER[row.endpoint])
    if isinstance(text, list) and text and isinstance(text[-1], dict):
        text = text[-1].get("content")
    return text[:60] if isinstance(text, str) else ""
