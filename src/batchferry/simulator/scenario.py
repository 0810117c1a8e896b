"""The script of a simulated provider: how long things take, how rows end, what is refused.

A scenario is data: it can be written in YAML or JSON, ``Scenario.model_json_schema()`` describes it, and the same
scenario with the same seed gives the same outcomes. All durations are virtual seconds.
"""

from __future__ import annotations

import base64
import math
import random
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator

from batchferry.domain.errors import ConfigError
from batchferry.domain.yamltext import YamlFault, parse_yaml
from batchferry.simulator.anthropic_script import AnthropicScript
from batchferry.simulator.faults import FaultRule
from batchferry.simulator.surfaces import SURFACES, SurfaceName, not_played

DAY_S = 86_400
MAX_FILE_BYTES = 1 << 20
"""A larger file is no scenario."""
MIN_WEBHOOK_KEY_BYTES = 24
"""The least that Standard Webhooks allow."""

TIER_1_ENQUEUED_TOKENS: dict[str, int] = {
    "gpt-4o": 90_000,
    "gpt-4o-mini": 2_000_000,
    "gpt-4-turbo": 90_000,
    "gpt-4": 100_000,
    "gpt-3.5-turbo": 2_000_000,
    "text-embedding-3-small": 3_000_000,
    "text-embedding-3-large": 3_000_000,
}
"""Queue limits that users of the lowest paid tier reported in late 2024; a plausible script, no promise."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, use_attribute_docstrings=True)


class RunCurve(_Part):
    """How long rows take: ``factor_s * rows ** exponent``, at least ``minimum_s``.

    The defaults give about 8 minutes for 10,000 rows and 26 minutes for 50,000.
    """

    factor_s: Annotated[float, Field(ge=0)] = 0.5645
    exponent: Annotated[float, Field(ge=0, le=1)] = 0.7324
    minimum_s: Annotated[float, Field(ge=0)] = 4.0

    def duration_s(self, rows: int) -> float:
        """Virtual seconds that this many rows take."""
        return max(self.minimum_s, self.factor_s * math.pow(rows, self.exponent))


class Durations(_Part):
    """How long a batch stays in each status. ``jitter`` 0.2 means up to 20 % more or less."""

    validating_s: Annotated[float, Field(ge=0)] = 5.0
    in_progress: RunCurve = RunCurve()
    finalizing_s: Annotated[float, Field(ge=0)] = 3.0
    cancelling_s: Annotated[float, Field(ge=0)] = 120.0
    jitter: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def jittered(self, seconds: float, rng: random.Random) -> float:
        """``seconds``, a little longer or shorter."""
        return seconds * (1 + self.jitter * rng.uniform(-1, 1)) if self.jitter else seconds


class Outcome(StrEnum):
    """How a row ends."""

    SUCCESS = "success"
    TRUNCATED = "truncated"
    """200, cut by the token limit."""
    REFUSAL = "refusal"
    """200, the model refuses in so many words."""
    TOOL_CALL = "tool_call"
    """200, the model wants a tool called."""
    PAUSED = "paused"
    """Messages API: 200, a turn with server tools that stopped half way. Elsewhere a success."""
    WINDOW_FULL = "window_full"
    """Messages API: 200, cut because input and answer filled the model's window. Elsewhere a success."""
    FILTERED = "filtered"
    """200 whose answer the content filter stopped."""
    CONTENT_FILTER = "content_filter"
    """400 by the content policy."""
    CONTEXT_LENGTH = "context_length_exceeded"
    """400: longer than the model's context."""
    HTTP_ERROR = "http_error"
    """Any status with an error body; see ``status``, ``code``, ``type``."""
    TIMEOUT = "timeout"
    """Outer error ``request_timeout``; in a sync call the connection is closed."""
    EXPIRED = "expired"
    """Outer error ``batch_expired`` although the batch completes; the row is not run."""
    STATUS_ZERO = "status_zero"
    """``status_code`` 0."""
    EMPTY_BODY = "empty_body"
    """200 with an empty body."""
    MISSING = "missing"
    """Run and counted, and in neither file."""
    DUPLICATE = "duplicate"
    """The line is there twice."""
    FOREIGN = "foreign"
    """A line of somebody else's stands beside this one."""
    UNREADABLE = "unreadable"
    """The line is cut in the middle."""
    INVALID_UTF8 = "invalid_utf8"
    """The answer holds a byte that is not UTF-8."""
    LINE_SEPARATOR = "line_separator"
    """The answer holds U+2028 and U+2029, raw."""
    NUL = "nul"
    """The answer holds an escaped NUL."""
    HUGE = "huge"
    """An answer of ``size_bytes``."""


class RowOutcome(_Part):
    """An outcome with its particulars."""

    outcome: Outcome = Outcome.SUCCESS
    status: Annotated[int, Field(ge=400, le=599)] = 500
    code: str | None = None
    type: str | None = None
    message: str | None = None
    retry_after_s: Annotated[float, Field(ge=0)] | None = None
    """Sent as ``retry-after`` by a sync call."""
    size_bytes: Annotated[int, Field(ge=1, le=256 * 1024 * 1024)] = 2 * 1024 * 1024
    first_attempts: Annotated[int, Field(ge=1)] | None = None
    """Only the first n runs of the same body end so; later ones go on to the next rule. None: every run."""
    lane: Literal["both", "batch", "sync"] = "both"


class RowMatch(_Part):
    """Which rows a rule is about; every member given must fit. An empty match fits every row."""

    wire_id: str | None = None
    """The row's custom_id, whole."""
    wire_id_contains: str | None = None
    body_contains: str | None = None
    """A substring of the request body as JSON text."""
    every: Annotated[int, Field(ge=1)] | None = None
    """Every n-th row of a file (1-based; never fits a sync call)."""
    model: str | None = None

    def fits(self, wire_id: str, body: bytes, number: int | None, model: str | None) -> bool:
        """Whether the rule is about this row; ``number`` is its 1-based line, None in a sync call."""
        if self.wire_id is not None and wire_id != self.wire_id:
            return False
        if self.wire_id_contains is not None and self.wire_id_contains not in wire_id:
            return False
        if self.body_contains is not None and self.body_contains.encode() not in body:
            return False
        if self.model is not None and model != self.model:
            return False
        return self.every is None or (number is not None and number % self.every == 0)


class RowRule(RowOutcome):
    """Rows that match end like this. The first rule that fits is taken."""

    match: RowMatch = RowMatch()


class WeightedOutcome(RowOutcome):
    """A share of the rows ends like this, drawn by seed, body and attempt."""

    share: Annotated[float, Field(gt=0, le=1)]


class JobError(_Part):
    """One entry of a failed batch's error list."""

    code: str
    message: str = "The batch was refused."
    param: str | None = None
    line: Annotated[int, Field(ge=1)] | None = None


class BatchRule(_Part):
    """Scripts whole batches; every member given must fit, the first rule that fits is taken."""

    nth: Annotated[int, Field(ge=1)] | None = None
    """The n-th batch this simulator created (1-based)."""
    every: Annotated[int, Field(ge=1)] | None = None
    first: Annotated[int, Field(ge=1)] | None = None
    """Only the first so many batches."""
    endpoint: str | None = None
    metadata_contains: str | None = None
    """A metadata value holds this text."""
    durations: Durations | None = None
    fail_with: tuple[JobError, ...] | None = None
    """End as ``failed`` with these entries; an empty list means failed with no details at all."""
    expire_with_share: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Run into the end of the window with this share of the rows done, however long the window is."""
    cut_last_line: bool = False
    """The output file ends in the middle of its last line, without a line break."""

    def fits(self, number: int, endpoint: str, metadata: dict[str, str] | None) -> bool:
        """Whether the rule is about this batch."""
        if self.nth is not None and number != self.nth:
            return False
        if self.every is not None and number % self.every != 0:
            return False
        if self.first is not None and number > self.first:
            return False
        if self.endpoint is not None and endpoint != self.endpoint:
            return False
        return self.metadata_contains is None or any(
            self.metadata_contains in value for value in (metadata or {}).values()
        )


class Limits(_Part):
    """What the provider accepts."""

    rows_per_batch: Annotated[int, Field(ge=1)] = 50_000
    input_file_bytes: Annotated[int, Field(ge=1)] = 200 * 1024 * 1024
    any_file_bytes: Annotated[int, Field(ge=1)] = 512 * 1024 * 1024
    line_bytes: Annotated[int, Field(ge=1)] = 16 * 1024 * 1024
    """Longest input line; bounds the simulator's memory."""
    embedding_inputs: Annotated[int, Field(ge=1)] = 50_000
    batches_per_hour: Annotated[int, Field(ge=1)] = 2_000
    errors_listed: Annotated[int, Field(ge=1)] = 100
    """Entries at most in a failed batch's error list."""
    sync_body_bytes: Annotated[int, Field(ge=1)] = 32 * 1024 * 1024
    enqueued_tokens: dict[str, int] = {}
    """Input tokens by model that may wait or run at once; a model that is not named has no limit."""
    enqueued_release_s: Annotated[float, Field(ge=0)] = 0.0
    """How long after its end a batch still counts against ``enqueued_tokens``."""
    context_tokens: Annotated[int, Field(ge=1)] = 128_000
    """Longer requests end as ``context_length_exceeded``."""


class Outage(_Part):
    """A time in which every synchronous call is refused; seconds count from the start of the simulator."""

    start_s: Annotated[float, Field(ge=0)] = 0.0
    for_s: Annotated[float, Field(gt=0)] = 600.0
    status: Annotated[int, Field(ge=500, le=599)] = 503
    retry_after_s: Annotated[float, Field(ge=0)] | None = None
    """Named in the answers, in the form of ``retry_after``."""


class SyncScript(_Part):
    """What the synchronous endpoints take and how slow they are; nothing is limited unless it is said here."""

    calls_per_minute: Annotated[int, Field(ge=1)] | None = None
    """For each project and model; with ``x-ratelimit-*`` headers on every answer."""
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    """The same for tokens: those of the prompt, and the most that the body allows for the answer."""
    concurrent_calls: Annotated[int, Field(ge=1)] | None = None
    """More at one time get 503."""
    retry_after: Literal["seconds", "milliseconds", "date", "none"] = "seconds"
    """How a 429 says when to come back; dates are of the clock that ``clock_ahead_s`` is about."""
    outages: tuple[Outage, ...] = ()
    latency_s: Annotated[float, Field(ge=0)] = 0.0
    """Virtual seconds until a call is answered; it is run, and billed, at their beginning."""
    latency_jitter: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """0.2 means up to 20 % more or less."""


class WebhookScript(_Part):
    """Deliveries for the batches that end; see ``simulator.webhooks``."""

    url: Annotated[str, Field(pattern=r"^https?://[^/@\s]+(/\S*)?$")]
    form: Literal["provider", "generic"] = "provider"
    """``provider``: as each API's own provider sends them. ``generic``: ``{"batch_id", "status"}``, as gateways do, for
    the batches of the APIs of OpenAI's form."""
    auth: Literal["standard", "hmac", "header", "path"] = "standard"
    """``standard``: signed as Standard Webhooks say. Of the generic form alone, ``hmac``: HMAC-SHA256 over the body in
    a header; ``header``: the secret itself in a header; ``path``: the secret behind the last ``/`` of the address."""
    secret: SecretStr
    """``whsec_`` and the key in base64 for ``standard``, else a text of letters, digits and ``._~-``."""
    header: Annotated[str, Field(pattern=r"^[A-Za-z0-9-]+$")] | None = None
    """Header of ``hmac`` (else ``x-webhook-signature``) or of ``header`` (else ``x-webhook-secret``)."""
    header_prefix: Annotated[str, Field(pattern=r"^[!-~ ]*$")] = ""
    """Stands before the value in that header, such as ``sha256=`` or ``Bearer`` and a space."""
    digest: Literal["hex", "base64"] = "hex"
    """How an ``hmac`` is written."""
    tells_progress: bool = False
    """Of the generic form: also tell of each other status that a batch reaches, as some gateways do."""
    delay_s: Annotated[float, Field(ge=0)] = 1.0
    """Virtual seconds between a batch's end and the first try."""
    attempts: Annotated[int, Field(ge=1, le=20)] = 6
    """Tries until the receiver answers 2xx."""
    retry_s: Annotated[float, Field(gt=0)] = 30.0
    """Virtual seconds before the second try; each later wait is twice as long."""
    lose_every: Annotated[int, Field(ge=1)] | None = None
    """Every n-th event is never sent."""
    double_every: Annotated[int, Field(ge=1)] | None = None
    """Every n-th event is sent twice, with the same id."""
    hold_every: Annotated[int, Field(ge=1)] | None = None
    """Every n-th event is held back until the one after it has been sent, or for ``hold_s``."""
    hold_s: Annotated[float, Field(gt=0)] = 1800.0
    forge_every: Annotated[int, Field(ge=1)] | None = None
    """Every n-th event is first sent with a signature by another key, or with another secret."""
    late_every: Annotated[int, Field(ge=1)] | None = None
    """Every n-th event's first try has been ``late_s`` on its way when it arrives, by the time that it is signed with;
    the next try is in time."""
    late_s: Annotated[float, Field(gt=0)] = 600.0

    @model_validator(mode="after")
    def _fits_together(self) -> WebhookScript:
        if self.form == "provider" and self.auth != "standard":
            raise ValueError(f"no provider proves itself by {self.auth!r}: set form to generic, or auth to standard")
        if self.form == "provider" and self.tells_progress:
            raise ValueError("no provider tells of progress: set form to generic, or tells_progress to false")
        if self.late_every is not None and self.auth != "standard":
            raise ValueError("only Standard Webhooks bear a time: set auth to standard, or leave late_every out")
        text = self.secret.get_secret_value()
        if self.auth != "standard":
            if len(text) < MIN_WEBHOOK_KEY_BYTES or not _PLAIN_SECRET.fullmatch(text):
                raise ValueError(
                    f"a webhook secret for {self.auth!r} is {MIN_WEBHOOK_KEY_BYTES} or more letters, digits and ._~-: "
                    "write it so"
                )
            return self
        try:
            key = base64.b64decode(text.removeprefix("whsec_"), validate=True) if text.startswith("whsec_") else b""
        except ValueError:
            key = b""
        if len(key) < MIN_WEBHOOK_KEY_BYTES:
            raise ValueError(
                f"a webhook secret is 'whsec_' and at least {MIN_WEBHOOK_KEY_BYTES} bytes in base64: write it so"
            )
        return self

    @property
    def receiver(self) -> str:
        """Where they go, without the path: some addresses end with the secret."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}"


_PLAIN_SECRET = re.compile(r"[A-Za-z0-9._~-]+")


class Scenario(_Part):
    """Everything that can be scripted about the provider, its transport faults and its webhooks included."""

    title: Annotated[str, Field(max_length=100)] = ""
    """What happens, in one line."""
    about: str = ""
    """What happens, in a paragraph."""
    client_must: str = ""
    """What a client has to do right to come through."""
    surfaces: Annotated[tuple[SurfaceName, ...], Field(min_length=1)] = SURFACES
    """The APIs that it is meant for. A file that says so in so many words is refused with a member that one of them
    does not play."""
    faults: tuple[FaultRule, ...] = ()
    """In force from the start; faults given beside the scenario come after these."""
    webhooks: WebhookScript | None = None
    durations: Durations = Durations()
    rows: tuple[RowRule, ...] = ()
    shares: tuple[WeightedOutcome, ...] = ()
    """Drawn for rows no rule fits; what is left to 1 succeeds."""
    batches: tuple[BatchRule, ...] = ()
    limits: Limits = Limits()
    windows: tuple[str, ...] = ("24h",)
    """Completion windows the create call takes, such as ``24h``, ``30m`` or ``7d``."""
    unknown_file: Literal["reject", "reject_404", "fail_job"] = "reject"
    """Create with a file that is not there: 400, 404, or 200 and a job that fails. All are on record."""
    create_gap: Annotated[int, Field(ge=0)] = 0
    """The first n creates after an upload say that the file does not exist."""
    file_processing_s: Annotated[float, Field(ge=0)] = 0.0
    """How long an uploaded file is ``PROCESSING`` at Gemini; a create that names it meanwhile is refused."""
    retrieve_gap_s: Annotated[float, Field(ge=0)] = 0.0
    """How long after its creation a batch can be neither retrieved nor listed nor cancelled."""
    error_file_when_clean: Literal["null", "absent", "empty"] = "null"
    """How a clean job shows that it has no error file."""
    shuffle_output: bool = True
    cut_last_line: bool = False
    """Output files end in the middle of their last line, without a line break."""
    late_file_ids_s: Annotated[float, Field(ge=0)] = 0.0
    """How long a completed job hides its file ids."""
    list_unfinished_rows: bool = True
    """Whether expired and cancelled jobs list the rows they did not run in the error file."""
    in_flight_rows: Annotated[int, Field(ge=0)] = 20
    """Rows that still finish after a cancel."""
    cancel_while_finalizing: Literal["cancels", "completes"] = "cancels"
    sync: SyncScript = SyncScript()
    anthropic: AnthropicScript = AnthropicScript()
    """What only the Message Batches API has."""
    clock_ahead_s: float = 0.0
    """How far the clock of the servers in front is ahead of the truth (negative: behind): it writes ``Date`` and the
    dates in ``Retry-After``."""
    show_usage: bool = True
    batch_models: tuple[str, ...] | None = None
    """Models that may be used in batches; None: every model."""
    no_batch_models: tuple[str, ...] = ()
    """Models whose batches fail with ``model_not_found``."""

    @field_validator("windows")
    @classmethod
    def _windows_can_be_read(cls, windows: tuple[str, ...]) -> tuple[str, ...]:
        for window in windows:
            window_seconds(window)
        return windows

    @model_validator(mode="after")
    def _shares_fit_in_one(self) -> Scenario:
        if sum(part.share for part in self.shares) > 1 + 1e-9:
            raise ValueError("the shares add up to more than 1: lower them")
        return self

    def not_played(self) -> dict[SurfaceName, list[str]]:
        """Members that this scenario sets and an API has nothing for, by API."""
        return not_played(self)

    def batch_rule(self, number: int, endpoint: str, metadata: dict[str, str] | None) -> BatchRule | None:
        """The rule for this batch, or None."""
        return next((rule for rule in self.batches if rule.fits(number, endpoint, metadata)), None)

    def allows_model(self, model: str) -> bool:
        """Whether this model may be used in a batch."""
        return model not in self.no_batch_models and (self.batch_models is None or model in self.batch_models)


_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": DAY_S}


def window_seconds(window: str) -> int:
    """Seconds of a completion window such as ``24h``.

    Raises:
        ValueError: not a whole number above 0 with one of the units s, m, h, d.
    """
    number, unit = window[:-1], window[-1:]
    if unit not in _UNITS_S or not (number.isascii() and number.isdigit()) or int(number) == 0:
        raise ValueError(f"completion window {window!r} is not a number with s, m, h or d behind it")
    return int(number) * _UNITS_S[unit]


def with_webhooks(scenario: Scenario, url: str | None, secret_file: Path | None) -> Scenario:
    """The scenario with this address and secret in its webhook script, or with a script of these.

    Raises:
        ConfigError: the file cannot be read, one of the two is missing, or they break the script's rules.
    """
    if url is None and secret_file is None:
        return scenario
    given: dict[str, Any] = {}
    if url is not None:
        given["url"] = url
    if secret_file is not None:
        try:
            given["secret"] = secret_file.read_text(encoding="utf-8-sig").strip()
        except (OSError, ValueError) as error:
            raise ConfigError(
                [f"webhook secret file {secret_file}: cannot be read ({type(error).__name__}): give a readable file"]
            ) from error
    if scenario.webhooks is not None:
        given = {name: getattr(scenario.webhooks, name) for name in scenario.webhooks.model_fields_set} | given
    elif len(given) < 2:
        missing = "its address" if url is None else "the file of its secret"
        raise ConfigError([f"webhooks: the scenario has no webhook of its own: give {missing} as well"])
    try:
        script = WebhookScript.model_validate(given)
    except ValidationError as error:
        raise ConfigError(
            [f"webhooks: {'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}" for fault in error.errors()]
        ) from error
    return scenario.model_copy(update={"webhooks": script})


def load_scenario(path: Path) -> Scenario:
    """Read a scenario from a YAML or JSON file.

    Raises:
        ConfigError: the file cannot be read or breaks the scenario's rules; every fault is listed.
    """
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            raise ConfigError([f"scenario {path}: is larger than {MAX_FILE_BYTES} bytes: give a scenario"])
        _, data = parse_yaml(raw.decode("utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            [f"scenario {path}: cannot be read ({type(error).__name__}): give a readable file"]
        ) from error
    except YamlFault as fault:
        where = "" if fault.line is None else f" in line {fault.line}"
        raise ConfigError([f"scenario {path}: not YAML or JSON{where} ({fault.problem}): mend the file"]) from None
    try:
        scenario = Scenario.model_validate(data if data is not None else {})
    except ValidationError as error:
        raise ConfigError(
            [
                f"scenario {path}: {'.'.join(str(part) for part in fault['loc']) or 'document'}: {fault['msg']}"
                for fault in error.errors()
            ]
        ) from error
    if "surfaces" in scenario.model_fields_set:
        idle = {surface: members for surface, members in scenario.not_played().items() if surface in scenario.surfaces}
        if idle:
            raise ConfigError(
                [
                    f"scenario {path}: surfaces: {surface} does not play {', '.join(members)}: take one of them out"
                    for surface, members in idle.items()
                ]
            )
    return scenario
