"""What is published: one outcome for each request, and the events of a batch, as bytes.

An outcome is our own members around the provider's native answer, which is embedded byte for byte: no number,
escape or space of it is touched. The same envelope serves every provider. Members are only ever added under one
``schema_version``; the published JSON Schemas (``batchferry.messages``) say what each one means.

The caller's ``custom_id`` is a member, not a header; headers carry what routing and tracing need (CloudEvents binary
mode, ``traceparent``) and whatever headers the request brought along.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, TypedDict, Unpack

import msgspec
import orjson

from batchferry.domain.errors import InvariantBroken
from batchferry.domain.money import Price, format_usd
from batchferry.domain.rows import ResultLine, RowClass

Headers = tuple[tuple[str, bytes | None], ...]

SCHEMA_VERSION = 1
MAX_ORIGINAL_BYTES = 64 * 1024
"""Of a failed request's value this much is quoted: for people to look at; a replay reads the source offset."""
MAX_MESSAGE_CHARS = 4_096
"""Of a provider's error text."""
MAX_EVENT_TEXT_CHARS = 512

_OPTIONS = orjson.OPT_UTC_Z


# ------------------------------------------------------------------------------------- what is known of a row


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFacts:
    """What all rows of one batch (or sync wave) share. Make one a batch: its JSON is rendered once.

    Of a row that was never in a batch only what is known is set. Instants are aware UTC.
    """

    account: str
    provider: str
    endpoint: str
    model: str
    completion_window: str | None = None
    slice: str = ""
    lane: str = "batch"
    batch_id: str | None = None
    provider_batch_id: str | None = None
    provider_file_id: str | None = None
    """The provider's id of the input file."""
    sealed_at: datetime | None = None
    submitted_at: datetime | None = None
    landed_at: datetime | None = None
    rendered: orjson.Fragment = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        members = {name: getattr(self, name) for name in _BATCH_MEMBERS}
        object.__setattr__(self, "rendered", orjson.Fragment(orjson.dumps(members, option=_OPTIONS)))


_BATCH_MEMBERS = (
    "account",
    "provider",
    "endpoint",
    "model",
    "completion_window",
    "slice",
    "lane",
    "batch_id",
    "provider_batch_id",
    "provider_file_id",
    "sealed_at",
    "submitted_at",
    "landed_at",
)


class OutcomeContext(msgspec.Struct, kw_only=True, gc=False):
    """Where a row came from and what was done about it. A msgspec struct because one is made for every row."""

    ledger_id: str
    topic: str
    partition: int
    offset: int
    custom_id: str | None = None
    """None only where it cannot be read: a bad record, or an input record the topic no longer has."""
    t0: datetime | None = None
    """The smaller of the record's timestamp and the time it was first read; None when both are unknown."""
    deadline: datetime | None = None
    deadline_met: bool | None = None
    """Judged when the outcome's transaction is built; None without a deadline."""
    wire_id: str | None = None
    submission: int | None = None
    attempts: Mapping[str, int] = {}
    """Times this row was sent again, by the class that was the reason."""
    batch: BatchFacts | None = None
    source_event: str | None = None
    """``ce_id`` of the request, if it came as a CloudEvent."""
    masked: int = 0
    """Places of the request where personal data was masked before it was sent."""


@dataclass(frozen=True, slots=True)
class Original:
    """The refused or failed request's value, bounded. Payload."""

    encoding: str
    """``utf8`` or ``base64``."""
    value: str = field(repr=False)
    bytes: int
    """Size of the whole value."""
    sha256: str
    """Of the whole value, in hexadecimal."""
    truncated: bool


def quote_original(value: bytes | None, max_bytes: int = MAX_ORIGINAL_BYTES) -> Original | None:
    """The first ``max_bytes`` of a record's value; text is cut between characters. None for a tombstone."""
    if value is None:
        return None
    head = value[:max_bytes]
    digest = hashlib.sha256(value).hexdigest()
    truncated = len(value) > max_bytes
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        # A cut can split a character: at most its first three bytes stand at the end.
        if not (truncated and error.start >= len(head) - 3 and error.reason == "unexpected end of data"):
            return Original("base64", base64.b64encode(head).decode("ascii"), len(value), digest, truncated)
        text = head[: error.start].decode()
    return Original("utf8", text, len(value), digest, truncated)


class Attempt(TypedDict, total=False):
    """One try of a row that failed in the end."""

    lane: str
    batch_id: str | None
    wire_id: str | None
    row_class: str
    code: str | None
    at: datetime | None


# ---------------------------------------------------------------------------------------------------- outcomes


def outcome_id(ledger_id: str, partition: int, offset: int) -> str:
    """The outcome's id: the same however often and by whomever it is rendered, and no other outcome's."""
    return f"{ledger_id}-{partition}-{offset}"


def render_result(ctx: OutcomeContext, line: ResultLine, price: Price | None, *, is_strict: bool = True) -> bytes:
    """The value of a ``results`` record.

    Args:
        ctx: the row.
        line: the answer; its body is embedded as it is.
        price: None when unknown.
        is_strict: say False of a body that only a tolerant reader could use: unless it is JSON all the same, it goes
            out as ``body_base64``, so that one odd answer cannot spoil its message.
    """
    envelope = _begin(ctx, "result", "succeeded")
    envelope["flags"] = line.flags
    usage = line.usage
    envelope["usage"] = (
        None
        if usage is None
        else {
            "input_tokens": usage.input_tokens,
            "output_tokens": usage.output_tokens,
            "cached_tokens": usage.cached_tokens,
        }
    )
    if usage is not None and usage.cache_write_tokens:
        envelope["usage"]["cache_write_tokens"] = usage.cache_write_tokens
    envelope["cost"] = None if price is None else _cost(price)
    envelope["response"] = _response(line, is_strict=is_strict)
    return _dump(envelope)


def render_failure(
    ctx: OutcomeContext,
    row_class: RowClass,
    code: str,
    message: str,
    *,
    remedy: str | None = None,
    tried: Sequence[Attempt] = (),
    original: Original | None = None,
    line: ResultLine | None = None,
    price: Price | None = None,
    duplicate_of: int | None = None,
    answer: Mapping[str, str | int | None] | None = None,
    is_strict: bool = True,
) -> bytes:
    """The value of a ``failures`` (or ``review``) record.

    Args:
        ctx: the row.
        row_class: how it ended.
        code: the provider's code, or our rule.
        message: the provider's text (cut at ``MAX_MESSAGE_CHARS``) or ours.
        remedy: what the caller can do, where we know it.
        tried: earlier attempts, oldest first.
        original: the request's value.
        line: the provider's error answer, embedded like a result's.
        price: of an answer that was paid and could not be published.
        duplicate_of: offset (in the same partition) of the request whose outcome answers this one too.
        answer: what is known of an answer too large to publish: ``bytes``, ``sha256``, ``file_id``, ``kept_at``.
        is_strict: as in ``render_result``.
    """
    envelope = _begin(ctx, "failure", "failed")
    envelope["error"] = {
        "class": row_class.value,
        "code": code,
        "message": message[:MAX_MESSAGE_CHARS],
        "remedy": remedy,
        "http_status": None if line is None else line.http_status,
    }
    envelope["tried"] = tried
    if line is not None:
        envelope["response"] = _response(line, is_strict=is_strict)
    if price is not None:
        envelope["cost"] = _cost(price)
    if duplicate_of is not None:
        envelope["duplicate_of"] = {"topic": ctx.topic, "partition": ctx.partition, "offset": duplicate_of}
    if answer is not None:
        envelope["answer"] = answer
    if original is not None:
        envelope["original"] = original
    return _dump(envelope)


def render_split(ctx: OutcomeContext, line: ResultLine, parts: int) -> bytes:
    """The value of a ``results`` record of a request that was cut: ``parts`` requests of their own follow it.

    They are named ``<custom_id>#part1`` and so on; putting their answers together is the reader's business.
    """
    envelope = _begin(ctx, "split", "split")
    envelope["parts"] = parts
    envelope["error"] = {"class": line.row_class.value, "code": line.code, "http_status": line.http_status}
    return _dump(envelope)


def _begin(ctx: OutcomeContext, kind: str, status: str) -> dict[str, Any]:
    envelope: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "kind": kind,
        "outcome_id": f"{ctx.ledger_id}-{ctx.partition}-{ctx.offset}",
        "status": status,
        "custom_id": ctx.custom_id,
        "source": {
            "topic": ctx.topic,
            "partition": ctx.partition,
            "offset": ctx.offset,
            "event_id": ctx.source_event,
        },
        "t0": ctx.t0,
        "deadline": ctx.deadline,
        "deadline_met": ctx.deadline_met,
        "wire_id": ctx.wire_id,
        "submission": ctx.submission,
        "attempts": ctx.attempts,
        "batch": None if ctx.batch is None else ctx.batch.rendered,
    }
    if ctx.masked:
        envelope["masked"] = ctx.masked
    return envelope


def _response(line: ResultLine, *, is_strict: bool) -> dict[str, Any]:
    response: dict[str, Any] = {"status_code": line.http_status, "request_id": line.provider_request_id}
    body = line.body
    if body is None:
        response["body"] = None
    elif is_strict or _is_json(body):
        response["body"] = orjson.Fragment(body)
    else:
        response["body"] = None
        response["body_base64"] = base64.b64encode(body).decode("ascii")
    return response


def _is_json(body: bytes) -> bool:
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    return True


@functools.lru_cache(maxsize=4096)  # rows of one prompt differ by few tokens
def _cost(price: Price) -> Mapping[str, str]:
    return {
        "usd": format_usd(price.picodollars),
        "sync_usd": format_usd(price.list_picodollars),
        "basis": price.basis.value,
    }


def _dump(envelope: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(envelope, option=_OPTIONS)
    except TypeError:
        # Half a surrogate pair in a provider's text, or a count beyond 64 bits: an outcome is published even so.
        mended: bytes = orjson.dumps(_mend(envelope), option=_OPTIONS)
        return mended


def _mend(value: Any) -> Any:
    if isinstance(value, str):
        return str(value).encode(errors="replace").decode()
    if isinstance(value, Mapping):
        return {_mend(name): _mend(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_mend(inner) for inner in value]
    if isinstance(value, Original):
        return {name: _mend(inner) for name, inner in asdict(value).items()}
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return None
    return value


# ----------------------------------------------------------------------------------------------------- headers

_OWN_HEADERS = frozenset(
    {
        "content-type",
        "content-encoding",
        "ce_specversion",
        "ce_id",
        "ce_source",
        "ce_type",
        "ce_time",
        "ce_subject",
        "ce_dataschema",
        "ce_datacontenttype",
    }
)
"""Headers that speak about the message itself, so that the request's would be wrong on its outcome."""


def outcome_headers(
    ctx: OutcomeContext, status: str, at: datetime, request_headers: Sequence[tuple[str, bytes | None]] = ()
) -> Headers:
    """Headers of an outcome: CloudEvents attributes of our own, then the request's headers in their order.

    ``status`` is ``succeeded``, ``failed`` or ``split``. ``traceparent``, CloudEvents extension attributes and every
    unknown header are passed on; the request's own CloudEvents attributes are replaced (its id is ``source.event_id``).
    """
    subject = f"{ctx.topic}/{ctx.partition}/{ctx.offset}"
    ours = (
        ("ce_id", outcome_id(ctx.ledger_id, ctx.partition, ctx.offset).encode()),
        ("ce_subject", subject.encode()),
        *_common_headers(ctx.topic, f"batchferry.request.{status}", at),
    )
    if not request_headers:
        return ours
    return ours + tuple(header for header in request_headers if header[0].lower() not in _OWN_HEADERS)


def event_id_of(request_headers: Sequence[tuple[str, bytes | None]]) -> str | None:
    """``ce_id`` of a request that came as a CloudEvent; at most 256 characters of it."""
    for name, value in request_headers:
        if name.lower() == "ce_id" and value:
            return value.decode(errors="replace")[:256]
    return None


@functools.lru_cache(maxsize=64)
def _common_headers(topic: str, ce_type: str, at: datetime) -> Headers:
    """What all messages of one transaction share."""
    return (
        ("ce_specversion", b"1.0"),
        ("ce_source", f"/batchferry/{topic}".encode()),
        ("ce_type", ce_type.encode()),
        ("ce_time", orjson.dumps(at, option=_OPTIONS)[1:-1]),
        ("content-type", b"application/json"),
    )


# ------------------------------------------------------------------------------------------------------ events


class EventKind(StrEnum):
    """What happened to a batch, a batch key or an account."""

    SEALED = "sealed"
    SUBMITTED = "submitted"
    STATE_CHANGED = "state_changed"
    LANDED = "landed"
    HELD = "held"
    RELEASED = "released"
    ALARM = "alarm"
    RETRIED = "retried"
    """Rows of one partition travel again (or for the first time through the sync lane)."""
    RESCUED = "rescued"
    DEADLINE_AT_RISK = "deadline_at_risk"
    DEADLINE_MISSED = "deadline_missed"
    CANARY = "canary"
    COST = "cost"


class EventFields(TypedDict, total=False):
    """What an event may say: names, numbers and instants, never a word of a request or an answer."""

    from_state: str
    to_state: str
    reason: str
    """Of a seal (count, bytes, tokens, time, flush, pressure), a hold, a change."""
    scope: str
    """Batch key or account that is held or released."""
    alarm: str
    """Name of the alarm, from our catalogue."""
    remedy: str
    rows: int
    bytes: int
    tokens: int
    partitions: Sequence[int]
    classes: Mapping[str, int]
    """Rows by class."""
    partition: int
    offset: int
    deadline: datetime
    late_s: float
    waited_s: float
    """How long the oldest row waited for its batch to leave."""
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    usd: str
    sync_usd: str
    unpriced_rows: int
    lane: str
    row_class: str
    """Why rows travel again."""
    offsets: str
    """Input offsets of ``partition``, as a base64 roaring bitmap (``domain.offsets``)."""
    submission: int
    codes: Mapping[str, int]
    """Rows by the provider's code, the most frequent ones."""
    unknown_rows: int
    """Rows whose answers nobody read: perhaps paid, and in no sum."""
    shape: str
    estimated_usd: str


_EVENT_FIELDS = frozenset(EventFields.__annotations__)


def render_event(
    kind: EventKind, event_id: str, at: datetime, batch: BatchFacts | None = None, **fields: Unpack[EventFields]
) -> bytes:
    """The value of an ``events`` record.

    ``event_id`` is the caller's and deterministic where the event states a ledger fact, so that a repetition can be
    told. Texts are cut at ``MAX_EVENT_TEXT_CHARS``.

    Raises:
        InvariantBroken: a field that events do not have (every field is a promise that it holds no payload).
    """
    unknown = fields.keys() - _EVENT_FIELDS
    if unknown:
        raise InvariantBroken(f"events have no field {', '.join(sorted(unknown))}")
    event: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "kind": kind.value,
        "event_id": event_id,
        "at": at,
        "batch": None if batch is None else batch.rendered,
    }
    for name, value in fields.items():
        event[name] = value[:MAX_EVENT_TEXT_CHARS] if isinstance(value, str) else value
    return _dump(event)


def event_headers(kind: EventKind, event_id: str, at: datetime, topic: str) -> Headers:
    """CloudEvents headers of an ``events`` record; ``topic`` is the input topic."""
    return (("ce_id", event_id.encode()), *_common_headers(topic, f"batchferry.batch.{kind.value}", at))
