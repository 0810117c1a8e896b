"""One model for each message. Readers ignore members they do not know; members are only added within a version."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from batchferry.domain.envelope import MAX_MESSAGE_CHARS, EventKind
from batchferry.domain.ids import MAX_WIRE_ID_CHARS
from batchferry.domain.money import PriceBasis
from batchferry.domain.requests import DEFAULT_RULES, MAX_NAME_CHARS
from batchferry.domain.rows import RowClass, RowFlag

Count = Annotated[int, Field(ge=0)]
Usd = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?$", description="An exact decimal amount in USD.")]


class _Message(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


# ------------------------------------------------------------------------------------------------------- input


class RequestBody(_Message):
    """The request as the provider's ordinary endpoint takes it; every other member is the provider's business."""

    model: str = Field(min_length=1, max_length=MAX_NAME_CHARS, description="One model a batch: part of the batch key.")
    stream: Literal[False] | None = Field(default=None, description="A batch answer is never streamed.")
    n: Count | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    max_output_tokens: Count | None = None


class RequestRecord(_Message):
    """The value of an input record: exactly one line of a provider's batch file, in the account's own shape."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"required": ["custom_id", "body"]},
                {"required": ["custom_id", "params"]},
                {"required": ["key", "request"]},
            ]
        }
    )

    custom_id: str | None = Field(
        default=None,
        min_length=1,
        max_length=DEFAULT_RULES.max_custom_id_chars,
        description="Your own key (any characters). It comes back unchanged in the outcome; it need not be unique.",
    )
    method: Literal["POST"] | None = Field(default=None, description="POST, or left out.")
    url: str | None = Field(
        default=None,
        pattern="^/",
        description="The endpoint's path, such as /v1/chat/completions; left out, the configured default.",
    )
    body: RequestBody | None = Field(default=None, description="The request; at every account.")
    params: RequestBody | None = Field(default=None, description="The request, as Anthropic's batches name it.")
    key: str | None = Field(default=None, min_length=1, description="What custom_id is in Gemini's batches.")
    request: RequestBody | None = Field(
        default=None, description="The request, as Gemini's batches name it; its model stands in it."
    )


# ----------------------------------------------------------------------------------------------------- outcome


class Source(_Message):
    """The input record that this outcome ends."""

    topic: str
    partition: Count
    offset: Count
    event_id: str | None = Field(default=None, description="ce_id of the request, if it was a CloudEvent.")


class Batch(_Message):
    """The batch (or wave of the sync lane) that carried the request; ids are null where there were none."""

    account: str
    provider: str
    endpoint: str
    model: str = Field(description="The model asked for; the one that answered stands in the native body.")
    completion_window: str | None = None
    slice: str = Field(default="", description="The header slice: batches are kept apart by it.")
    lane: Literal["batch", "sync"]
    batch_id: str | None = Field(default=None, description="Ours, a ULID; the key of the events topic.")
    provider_batch_id: str | None = None
    provider_file_id: str | None = Field(default=None, description="The provider's input file.")
    sealed_at: AwareDatetime | None = None
    submitted_at: AwareDatetime | None = None
    landed_at: AwareDatetime | None = None


class TokenUsage(_Message):
    """Tokens the provider counted for this request; input_tokens includes cached_tokens."""

    input_tokens: Count
    output_tokens: Count
    cached_tokens: Count
    cache_write_tokens: Count = Field(default=0, description="Input tokens that were written to the provider's cache.")


class Cost(_Message):
    """What the answer cost, and what it would have cost outside a batch."""

    usd: Usd
    sync_usd: Usd
    basis: PriceBasis = Field(
        description="list: outside a batch; published: the model's own batch price; "
        "assumed_discount: a share of the list price, for the price data names no batch price of this model; "
        "named: by the account's own prices."
    )


class Response(_Message):
    """The provider's native answer, byte for byte."""

    status_code: int | None = None
    request_id: str | None = None
    body: Any = None
    body_base64: str | None = Field(
        default=None, description="The body's bytes, where they are not JSON as RFC 8259 has it; body is null then."
    )


class _Outcome(_Message):
    schema_version: Literal[1]
    outcome_id: str = Field(description="Equal for every delivery of the same outcome; also the header ce_id.")
    custom_id: str | None = Field(description="As the request gave it; null only where it could not be read.")
    source: Source
    t0: AwareDatetime | None = Field(description="The record's timestamp or first reading, whichever was earlier.")
    deadline: AwareDatetime | None
    deadline_met: bool | None = Field(description="Judged when the outcome was committed.")
    wire_id: str | None = Field(max_length=MAX_WIRE_ID_CHARS, description="The custom_id the provider saw.")
    submission: int | None = Field(ge=1, description="How often this row has been put into a batch or wave.")
    attempts: dict[str, Count] = Field(description="Times the row was sent again, by the class that was the reason.")
    batch: Batch | None = Field(description="Null for a record that was refused before it met a batch.")
    masked: int = Field(
        default=0, ge=0, description="Places of the request where personal data was masked before it was sent."
    )


class ResultMessage(_Outcome):
    """The value of a record on the results topic: the provider answered with success."""

    kind: Literal["result"]
    status: Literal["succeeded"]
    flags: list[RowFlag] = Field(description="What a reader of a success should know; often empty.")
    usage: TokenUsage | None
    cost: Cost | None = Field(description="Null where the price is not known.")
    response: Response


class Error(_Message):
    """Why there is no answer."""

    class_: RowClass = Field(alias="class")
    code: str = Field(description="The provider's code; of a bad record, the rule it breaks.")
    message: str = Field(max_length=MAX_MESSAGE_CHARS)
    remedy: str | None
    http_status: int | None


class Tried(_Message):
    """One earlier try of this request."""

    lane: Literal["batch", "sync"] | None = None
    batch_id: str | None = None
    wire_id: str | None = None
    row_class: RowClass | None = None
    code: str | None = None
    at: AwareDatetime | None = None


class SplitReason(_Message):
    """Why the request was cut."""

    class_: RowClass = Field(alias="class")
    code: str | None = Field(description="The provider's code; null where it was cut before anybody had seen it.")
    http_status: int | None


class SplitMessage(_Outcome):
    """The value of a record on the results topic whose request was too long: it went on as several requests.

    Their records follow on the input topic, named ``<custom_id>#part1`` and so on, and each has an outcome of its own;
    putting the answers together is the reader's business.
    """

    kind: Literal["split"]
    status: Literal["split"]
    parts: int = Field(ge=2, description="How many requests it became.")
    error: SplitReason


class OriginalValue(_Message):
    """The input record's value, bounded: for people. A replay reads the source offset instead."""

    encoding: Literal["utf8", "base64"]
    value: str
    bytes: Count = Field(description="Size of the whole value.")
    truncated: bool
    sha256: str = Field(pattern="^[0-9a-f]{64}$", description="Of the whole value.")


class DuplicateOf(_Message):
    """The request whose outcome answers this one too."""

    topic: str
    partition: Count
    offset: Count


class UnpublishedAnswer(_Message):
    """What is known of an answer larger than the output topic takes."""

    bytes: Count | None = None
    sha256: str | None = None
    file_id: str | None = Field(default=None, description="The provider's result file, which is kept.")
    kept_at: str | None = Field(default=None, description="Where the service keeps the answer, if it is told to.")


class FailureMessage(_Outcome):
    """The value of a record on the failures (or review) topic."""

    kind: Literal["failure"]
    status: Literal["failed"]
    error: Error
    tried: list[Tried]
    response: Response | None = Field(default=None, description="The provider's error answer, where there was one.")
    cost: Cost | None = Field(default=None, description="Of an answer that was paid and could not be published.")
    duplicate_of: DuplicateOf | None = None
    answer: UnpublishedAnswer | None = None
    original: OriginalValue | None = None


# ------------------------------------------------------------------------------------------------------ events


class EventMessage(_Message):
    """The value of a record on the events topic. It never holds a word of a request or an answer."""

    schema_version: Literal[1]
    kind: EventKind
    event_id: str = Field(description="Also the header ce_id.")
    at: AwareDatetime
    batch: Batch | None = Field(description="Null where a batch key, an account or the service is meant.")
    from_state: str | None = None
    to_state: str | None = None
    reason: str | None = Field(default=None, description="Of a seal, a hold or a change.")
    scope: str | None = Field(default=None, description="The batch key or account held or released.")
    alarm: str | None = None
    remedy: str | None = None
    rows: Count | None = None
    bytes: Count | None = None
    tokens: Count | None = Field(default=None, description="Estimated input tokens.")
    partitions: list[Count] | None = None
    classes: dict[str, Count] | None = Field(default=None, description="Rows by class.")
    partition: Count | None = None
    offset: Count | None = None
    deadline: AwareDatetime | None = None
    late_s: float | None = None
    waited_s: float | None = Field(default=None, description="How long the oldest row waited for its batch to leave.")
    input_tokens: Count | None = None
    output_tokens: Count | None = None
    cached_tokens: Count | None = None
    usd: Usd | None = None
    sync_usd: Usd | None = None
    unpriced_rows: Count | None = Field(default=None, description="Rows whose price is not known.")
    lane: Literal["batch", "sync"] | None = Field(default=None, description="The lane in which rows travel on.")
    row_class: str | None = Field(default=None, description="Why rows travel again.")
    offsets: str | None = Field(
        default=None, description="Input offsets of partition, as a roaring bitmap in base64 (portable format)."
    )
    submission: int | None = Field(default=None, ge=1, description="The number of the rows' next submission.")
    codes: dict[str, Count] | None = Field(
        default=None, description="Rows by the provider's code, the most frequent ones."
    )
    unknown_rows: Count | None = Field(
        default=None, description="Rows whose answers nobody read: they may have been paid, and are in no sum."
    )
    shape: str | None = Field(default=None, description="Fingerprint of a kind of prompt.")
    estimated_usd: Usd | None = None
