"""Rows of Message Batches: taken in from a create, and ended one by one; a single call of ``/v1/messages`` as well.

How a row ends is decided where it is for every API (``outcomes.decide``), and what the model says comes from the same
generator (``answers``), asked in the chat form; only the words and shapes around it are Anthropic's. Shapes: the types
of the official Python client, ``anthropic.types``.
"""

from __future__ import annotations

import hashlib
import mmap
import random
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple

import msgspec

from batchferry.simulator.answers import CHAT, answer, count_input_tokens
from batchferry.simulator.bill import Run, RunKind
from batchferry.simulator.errors import INVALID_REQUEST, Refused
from batchferry.simulator.jsontext import canonical_json, dump_json, parse_json
from batchferry.simulator.outcomes import Row, decide
from batchferry.simulator.scenario import JobError, Outcome, RowOutcome, Scenario

MESSAGES = "/v1/messages"
NO_SAMPLING_FROM = "2026-10-21"
"""The API version from which ``temperature``, ``top_p`` and ``top_k`` are refused."""

_CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_BROKEN_MARK = "\ue000"
"""Stands where the byte that is not UTF-8 goes; a private-use character that no answer has by itself."""
_BATCH_REFUSED = ("speed", "store", "previous_thread_event_id", "cache_hint", "context_hint")
TYPES_BY_STATUS: Mapping[int, str] = MappingProxyType(
    {
        400: INVALID_REQUEST,
        401: "authentication_error",
        402: "billing_error",
        403: "permission_error",
        404: "not_found_error",
        409: "conflict_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
        529: "overloaded_error",
    }
)
"""The type that goes with a status; 5xx without a line are ``api_error``, all else ``invalid_request_error``."""
_PURSE_CODES = frozenset(
    {
        "insufficient_quota",
        "billing_hard_limit_reached",
        "billing_not_active",
        "credit_balance_exhausted",
    }
)
"""Codes of other APIs that a scenario may name, for what is ``billing_error`` here."""


ERROR_CODES = frozenset(
    {
        "enforced_spend_limit_reached",
        "contract_spend_limit_reached",
        "linked_organization_spend_limit_reached",
        "linked_organization_billing_unavailable",
        "organization_on_hold",
        "cmek_key_disabled",
        "cmek_context_unavailable",
        "cmek_key_unreachable",
        "ramp_limit_exceeded",
        "request_body_encoding_unsupported",
        "request_body_encoding_invalid",
    }
)
"""Values of ``details.error_code`` that are sent; codes of other APIs are left out."""


def error_envelope(status: int, message: str, kind: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The error body. Without a ``kind`` of Anthropic's own the status decides, and codes of others are left out."""
    known = kind if kind in _KNOWN_TYPES and kind != INVALID_REQUEST else None
    error: dict[str, Any] = {"type": known or type_of_status(status), "message": message}
    if code in ERROR_CODES:
        error["details"] = {"error_code": code}
    return {"type": "error", "error": error, "request_id": None}


_KNOWN_TYPES = frozenset({*TYPES_BY_STATUS.values(), "api_error"})


def type_of_status(status: int) -> str:
    """The error type that usually goes with a status."""
    return TYPES_BY_STATUS.get(status, "api_error" if status >= 500 else INVALID_REQUEST)


# ---------------------------------------------------------------------------------------- taking in


class _Create(msgspec.Struct):
    requests: list[msgspec.Raw]


def take_in(body_path: Path, lines_path: Path, max_rows: int) -> int:
    """Check a create's body and write its rows, one a line; how many there are. The body is never copied to memory.

    What is checked is each row's id and form; its parameters are looked at when it runs.

    Raises:
        Refused: 400 or 413, naming ``requests.N`` (0-based) where a row is at fault.
    """
    if body_path.stat().st_size == 0:
        raise Refused(400, "The request body is empty.")
    with body_path.open("rb") as file, lines_path.open("wb") as out:
        # Not closed by hand: that fails while a request still looks into it, as it does behind an exception.
        view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            requests = msgspec.json.decode(view, type=_Create).requests
        except msgspec.ValidationError:
            raise Refused(400, "requests: Field required, an array of requests") from None
        except (msgspec.DecodeError, RecursionError):
            raise Refused(400, "The request body is not valid JSON.") from None
        _check_count(len(requests), max_rows)
        seen: set[str] = set()
        for number, raw in enumerate(requests):
            out.write(_line_of(number, bytes(raw), seen))
        return len(requests)


def _check_count(rows: int, max_rows: int) -> None:
    if rows == 0:
        raise Refused(400, "requests: List should have at least 1 item after validation, not 0")
    if rows > max_rows:
        message = f"requests: a batch has at most {max_rows} requests, not {rows}"
        raise Refused(413, message, error_type="request_too_large")


def _line_of(number: int, raw: bytes, seen: set[str]) -> bytes:
    where = f"requests.{number}"
    try:
        members = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        wire_id = msgspec.json.decode(members.get("custom_id", b"null"))
    except (msgspec.DecodeError, RecursionError):
        raise Refused(400, f"{where}: Input should be a valid object") from None
    for name in members:
        if name not in {"custom_id", "params"}:
            raise Refused(400, f"{where}.{name[:64]}: Extra inputs are not permitted")
    if wire_id is None:
        raise Refused(400, f"{where}.custom_id: Field required")
    if not isinstance(wire_id, str):
        raise Refused(400, f"{where}.custom_id: Input should be a valid string")
    if len(wire_id) > 64:
        raise Refused(400, f"{where}.custom_id: String should have at most 64 characters")
    if not _CUSTOM_ID.fullmatch(wire_id):
        raise Refused(400, f"{where}.custom_id: String should match pattern '^[a-zA-Z0-9_-]{{1,64}}$'")
    if wire_id in seen:
        raise Refused(400, f"{where}.custom_id: custom_id must be unique within a batch")
    seen.add(wire_id)
    params = bytes(members.get("params", b""))
    if params[:1] != b"{":
        raise Refused(400, f"{where}.params: Field required" if not params else f"{where}.params: not an object")
    # A raw line break in valid JSON stands between tokens.
    params = params.replace(b"\n", b" ").replace(b"\r", b" ")
    return b'{"custom_id":"' + wire_id.encode() + b'","params":' + params + b"}\n"


# ------------------------------------------------------------------------------------------ one row


@dataclass(frozen=True, slots=True)
class MessageEnd:
    """A row that ended with an answer: a message (200) or an error envelope."""

    status: int
    body: dict[str, Any]
    run: Run
    headers: dict[str, str]


def row_of(wire_id: str, params: dict[str, Any], number: int | None) -> Row:
    """A request as the script sees it."""
    raw = canonical_json(params)
    return Row(wire_id, MESSAGES, params, raw, hashlib.sha256(raw).hexdigest(), number)


def params_fault(params: dict[str, Any], version: str, *, in_batch: bool) -> str | None:
    """What the endpoint itself refuses about a request, in its words, or None."""
    messages, most = params.get("messages"), params.get("max_tokens")
    if not isinstance(params.get("model"), str) or not params["model"]:
        return "model: Field required"
    if most is None:
        return "max_tokens: Field required"
    if not isinstance(most, int) or isinstance(most, bool) or most < (1 if in_batch else 0):
        return "max_tokens: Input should be greater than or equal to 1"
    if not isinstance(messages, list) or not messages:
        return "messages: at least one message is required"
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in {"user", "assistant", "system"}:
            return f"messages.{number}.role: Input should be 'user' or 'assistant'"
        if not isinstance(message.get("content"), str | list):
            return f"messages.{number}.content: Field required"
    if in_batch:
        if params.get("stream") not in {None, False}:
            return "stream: not supported in a batch"
        for name in _BATCH_REFUSED:
            if params.get(name) is not None:
                return f"{name}: not supported in a batch"
    if version >= NO_SAMPLING_FROM:
        for name in ("temperature", "top_p", "top_k"):
            if params.get(name) is not None:
                return f"{name}: Extra inputs are not permitted"
    return None


def message_end(
    scenario: Scenario, row: Row, chosen: RowOutcome, at: float, version: str, *, in_batch: bool
) -> MessageEnd | None:
    """The answer of a row, or None for an outcome that has none (timeout and expiry)."""
    fault = params_fault(row.body, version, in_batch=in_batch)
    if fault is not None:
        return _refusal(row, 400, fault)
    if in_batch and not scenario.allows_model(row.model or ""):
        return _refusal(row, 404, f"model: {row.model}")
    chat, cached_tokens = _as_chat(row.body)
    tokens = count_input_tokens(CHAT, chat)
    if tokens > scenario.limits.context_tokens:
        return _too_long(row, tokens, scenario.limits.context_tokens)
    match chosen.outcome:
        case Outcome.TIMEOUT | Outcome.EXPIRED:
            return None
        case Outcome.CONTENT_FILTER:
            return _refusal(row, 400, "Output blocked by content filtering policy")
        case Outcome.CONTEXT_LENGTH:
            return _too_long(row, scenario.limits.context_tokens + 1, scenario.limits.context_tokens)
        case Outcome.HTTP_ERROR:
            return _scripted_error(row, chosen)
        case Outcome.STATUS_ZERO:
            return _refusal(row, 500, "Internal server error")
    made = answer(CHAT, chat, row.digest, tokens, at, chosen.outcome, chosen.size_bytes)
    body = _as_message(row, made.body, chosen.outcome, made.input_tokens, made.output_tokens, cached_tokens)
    body["usage"]["service_tier"] = "batch" if in_batch else "standard"
    if chosen.outcome is Outcome.EMPTY_BODY:
        body["content"] = []
        body["usage"]["output_tokens"] = 0
        return MessageEnd(200, body, _run(row), {})
    run = Run(row.wire_id, row.digest, RunKind.PAID, made.input_tokens, made.output_tokens, row.model or "")
    return MessageEnd(200, body, run, {})


def _as_chat(params: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The request in the form of the generator, and the tokens of a system prompt that is marked for the cache."""
    chat = {name: params[name] for name in ("model", "messages", "max_tokens", "tools") if params.get(name) is not None}
    system = params.get("system")
    cached_tokens = 0
    if system is not None:
        chat["instructions"] = system
        if isinstance(system, list) and any(isinstance(one, dict) and one.get("cache_control") for one in system):
            cached_tokens = count_input_tokens(CHAT, {"messages": system})
    output = params.get("output_config")
    wanted = output.get("format") if isinstance(output, dict) else params.get("output_format")
    if isinstance(wanted, dict) and isinstance(wanted.get("schema"), dict):
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": wanted["schema"]}}
    return chat, cached_tokens


_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "content_filter": "refusal", "tool_calls": "tool_use"}
_STOP_OUTCOMES = {
    Outcome.REFUSAL: "refusal",
    Outcome.PAUSED: "pause_turn",
    Outcome.WINDOW_FULL: "model_context_window_exceeded",
}


def _as_message(
    row: Row, chat: dict[str, Any], outcome: Outcome, input_tokens: int, output_tokens: int, cached_tokens: int
) -> dict[str, Any]:
    choice = chat["choices"][0]
    said = choice["message"]
    text = said["content"] or said["refusal"]
    content: list[dict[str, Any]] = [{"type": "text", "text": text, "citations": None}] if text else []
    content.extend(
        {
            "type": "tool_use",
            "id": f"toolu_{row.digest[:24]}",
            "name": call["function"]["name"],
            "input": {},
            "caller": {"type": "direct"},
        }
        for call in said.get("tool_calls") or ()
    )
    reason = _STOP_OUTCOMES.get(outcome) or _STOP_REASONS[choice["finish_reason"]]
    refused = {"type": "refusal", "category": "general_harms", "explanation": None}
    cached_tokens = min(cached_tokens, input_tokens)
    # Hits are best effort in a batch: one row in four finds the cache empty and writes it.
    is_written = int(row.digest[0], 16) < 4
    written, read = (cached_tokens, 0) if is_written else (0, cached_tokens)
    return {
        "id": f"msg_{row.digest[:24]}",
        "type": "message",
        "role": "assistant",
        "model": chat["model"],
        "content": content,
        "stop_reason": reason,
        "stop_sequence": None,
        "stop_details": refused if reason == "refusal" else None,
        "usage": {
            "input_tokens": input_tokens - cached_tokens,
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": read,
            "cache_creation": {"ephemeral_5m_input_tokens": written, "ephemeral_1h_input_tokens": 0},
            "output_tokens": output_tokens,
        },
    }


def _scripted_error(row: Row, chosen: RowOutcome) -> MessageEnd:
    hint = {} if chosen.retry_after_s is None else {"retry-after": f"{chosen.retry_after_s:g}"}
    if chosen.code == "model_not_found":
        return _refusal(row, 404, f"model: {row.model}")
    if chosen.code in _PURSE_CODES:
        return _refusal(row, 402, "Your organization has no means left.")
    message = chosen.message if chosen.message is not None else f"The request ended with status {chosen.status}."
    body = error_envelope(chosen.status, message, chosen.type, chosen.code)
    return MessageEnd(chosen.status, body, _run(row), hint)


def _refusal(row: Row, status: int, message: str) -> MessageEnd:
    return MessageEnd(status, error_envelope(status, message), _run(row), {})


def _too_long(row: Row, tokens: int, limit: int) -> MessageEnd:
    return _refusal(row, 400, f"prompt is too long: {tokens} tokens > {limit} maximum")


def _run(row: Row, kind: RunKind = RunKind.RUN) -> Run:
    return Run(row.wire_id, row.digest, kind, model=row.model or "")


def broken_utf8(message: dict[str, Any]) -> bytes:
    """The message as JSON text with one byte in its text that is not UTF-8."""
    first, *others = message["content"] or [{"type": "text", "text": "", "citations": None}]
    marked = message | {"content": [first | {"text": f"{_BROKEN_MARK}{first.get('text', '')}"}, *others]}
    return dump_json(marked).replace(_BROKEN_MARK.encode(), b"\xff")


# --------------------------------------------------------------------------------------- a whole batch


class BatchOrder(NamedTuple):
    """What to run: the first ``reached`` rows; the others get a line that says ``unrun`` (expired or canceled)."""

    number: int
    version: str
    lines_path: Path
    reached: int
    unrun: str
    at: float
    seed: int
    faults: tuple[JobError, ...] | None
    """Whole-batch faults of the script: there is no failed batch here, so each row ends with the first of them."""


@dataclass(frozen=True, slots=True)
class BatchEnd:
    """What running gave: the runs, and how many rows ended as ``succeeded``, ``errored``, ``canceled``, ``expired``."""

    runs: list[Run]
    counts: dict[str, int]


def run_batch(
    order: BatchOrder, scenario: Scenario, attempts: Callable[[str], int], results_path: Path, bill_path: Path
) -> BatchEnd:
    """Run the reached rows; write the results and the batch's part of the bill, each whole or not at all."""
    starts = _offsets(order.lines_path)
    sequence = list(range(len(starts)))
    if scenario.shuffle_output:
        random.Random(f"{order.seed}:{order.number}:order").shuffle(sequence)
    counts: Counter[str] = Counter()
    runs: list[Run] = []
    targets = [path.with_name(f"{path.name}.part") for path in (results_path, bill_path)]
    with order.lines_path.open("rb") as file, targets[0].open("wb") as results, targets[1].open("wb") as bill:
        for index in sequence:
            file.seek(starts[index])
            line = parse_json(file.readline())
            row = row_of(line["custom_id"], line["params"], index + 1)
            if index >= order.reached:
                counts[order.unrun] += 1
                results.write(_line(row.wire_id, {"type": order.unrun}) + b"\n")
                continue
            kind, lines, run = _ended(order, scenario, row, attempts(row.digest) + 1)
            counts[kind] += 1
            runs.append(run)
            results.writelines(one + b"\n" for one in lines)
            bill.write(dump_json(list(run)) + b"\n")
        if scenario.cut_last_line and results.tell() > 0:
            results.truncate(results.tell() - min(20, results.tell() // 2))
    for target, path in zip(targets, (results_path, bill_path), strict=True):
        target.replace(path)
    return BatchEnd(runs, dict(counts))


def _ended(order: BatchOrder, scenario: Scenario, row: Row, attempt: int) -> tuple[str, Iterator[bytes], Run]:
    chosen = decide(scenario, order.seed, row, attempt, "batch")
    if order.faults is not None:
        first = order.faults[0] if order.faults else JobError(code="", message="Internal server error")
        chosen = RowOutcome(outcome=Outcome.HTTP_ERROR, status=400 if order.faults else 500, message=first.message)
        if first.code == "model_not_found":
            chosen = chosen.model_copy(update={"code": first.code})
    end = message_end(scenario, row, chosen, order.at, order.version, in_batch=True)
    if end is None:
        if chosen.outcome is Outcome.EXPIRED:
            return "expired", iter([_line(row.wire_id, {"type": "expired"})]), _run(row, RunKind.NOT_RUN)
        envelope = error_envelope(504, "Request timed out")
        return "errored", iter([_line(row.wire_id, {"type": "errored", "error": envelope})]), _run(row)
    if end.status != 200:
        return "errored", iter([_line(row.wire_id, {"type": "errored", "error": end.body})]), end.run
    line = _line(row.wire_id, {"type": "succeeded", "message": end.body})
    lines = [line]
    match chosen.outcome:
        case Outcome.INVALID_UTF8:
            lines = [line.replace(dump_json(end.body), broken_utf8(end.body))]
        case Outcome.UNREADABLE:
            lines = [line[: max(1, len(line) * 3 // 5)]]
        case Outcome.MISSING:
            lines = []
        case Outcome.DUPLICATE:
            lines = [line, line]
        case Outcome.FOREIGN:
            lines.append(_line(f"somebody-else-{row.digest[:12]}", {"type": "succeeded", "message": end.body}))
    return "succeeded", iter(lines), end.run


def _line(wire_id: str, result: dict[str, Any]) -> bytes:
    return dump_json({"custom_id": wire_id, "result": result})


def _offsets(path: Path) -> array[int]:
    starts: array[int] = array("Q")
    file: IO[bytes]
    with path.open("rb") as file:
        at = 0
        for line in file:
            starts.append(at)
            at += len(line)
    return starts
