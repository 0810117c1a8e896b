"""The settings tree. Each default stands beside its reason; every bound carries its unit in its name.

These models only say what one value may be. What values must be *together* is in ``checks.py``; where they
come from is in ``load.py``.
"""

from __future__ import annotations

import fnmatch
from dataclasses import fields
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from batchferry.config.values import (
    Bytes,
    Count,
    FieldPath,
    HeaderName,
    Seconds,
    Secrets,
    TextList,
    Topic,
    Window,
    as_list,
    check_webhook_secret,
    named,
    routes_by_name,
    webhook_key,
    webhook_secrets,
)
from batchferry.domain.dialect import Dialect, UploadWay
from batchferry.domain.masking import Masker, load_masker
from batchferry.domain.money import PriceList, Prices, UnitPrices
from batchferry.domain.personaldata import Rule
from batchferry.domain.retry import Policy
from batchferry.domain.rows import RowClass
from batchferry.domain.times import (
    CANCEL_S,
    DOWNLOAD_S,
    RESCUE_LEAD_S,
    WaitPlan,
    parse_window_s,
    plan_waits,
)
from batchferry.domain.webhooktrust import MAX_STRETCH

INLINE_PROVIDERS = frozenset({"anthropic"})
"""API families whose create carries the rows."""
ENV_PREFIX = "BATCHFERRY_"
ENV_DELIMITER = "__"

Positive = Annotated[Count, Field(ge=1)]
Port = Annotated[int, Field(ge=0, le=65535)]
Endpoint = Annotated[str, Field(pattern=r"^/[A-Za-z0-9/_.:-]+$")]


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        use_attribute_docstrings=True,
        str_strip_whitespace=True,
        hide_input_in_errors=True,
    )


class KafkaSettings(_Section):
    """How to reach the cluster. The usual ``KAFKA_*`` variables and Kafka's dotted names are understood too."""

    bootstrap_servers: Annotated[TextList, Field(min_length=1)] = ("localhost:9092",)
    """Brokers to ask first, ``host:port``."""
    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    """How the connection is protected."""
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] | None = None
    """How we log in. Expiring tokens are left out: the client cannot renew them on a live connection."""
    sasl_username: str | None = None
    """Login name."""
    sasl_password: SecretStr | None = None
    """Login password; by environment or file."""
    sasl_password_file: Path | None = None
    """File that holds the password."""
    ssl_cafile: Path | None = None
    """Certificates to trust, PEM; without it the system's."""
    ssl_certfile: Path | None = None
    """Our certificate for mutual TLS, PEM."""
    ssl_keyfile: Path | None = None
    """Its key, PEM."""
    client_id: str = "batchferry"
    """Name shown in the broker's logs and quotas."""
    rack: str | None = None
    """Our rack or zone, so that fetches go to the nearest replica."""
    compression: Literal["none", "gzip", "lz4", "zstd"] = "lz4"
    """Of what we produce. lz4 costs the least CPU; gzip is an order of magnitude slower in Python."""
    session_timeout_s: Seconds = 45.0
    """A member silent for so long is taken for dead; a shorter time turns one slow moment into a rebalance."""
    heartbeat_s: Seconds = 3.0
    """Pause between heartbeats; bounds how soon a rebalance is noticed."""
    rebalance_timeout_s: Seconds = 60.0
    """How long a rebalance waits for a member; the client's own default of 10 s throws slow members out."""
    max_poll_interval_s: Seconds = 300.0
    """A consumer that has not asked for records for so long leaves the group."""
    metadata_max_age_s: Seconds = 60.0
    """How soon new partitions and moved leaders are noticed."""
    request_timeout_s: Seconds = 20.0
    """Deadline of one request to a broker."""
    transaction_timeout_s: Seconds = 30.0
    """After it the broker aborts a dead producer's transaction; until then readers of the outputs wait."""
    fetch_max_bytes: Bytes = 16 * 1024 * 1024
    """Most bytes of one answer to a fetch, so of what the consumer holds for each broker."""
    partition_fetch_max_bytes: Bytes = 4 * 1024 * 1024
    """Most bytes of one partition in it: few large fetches cost less than many small ones."""
    fetch_min_bytes: Bytes = 1
    """A broker answers once it has so much, or after half a second."""
    produce_batch_bytes: Bytes = 512 * 1024
    """Size of one produced record batch."""
    produce_record_max_bytes: Bytes = 64 * 1024 * 1024
    """Largest record we try to produce; a topic's own limit is read at start-up and rules where it is lower."""
    check_crcs: bool = True
    """Check checksums of consumed records; off gives about 60 % more speed at 4 KB records."""

    @field_validator("bootstrap_servers")
    @classmethod
    def _host_and_port(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for server in value:
            host, colon, port = server.rpartition(":")
            if not colon or not host or not port.isdigit() or "/" in server:
                raise ValueError("each broker is host:port")
        return value


KAFKA_ALIASES = {
    "ssl.ca.location": "ssl_cafile",
    "ssl.certificate.location": "ssl_certfile",
    "ssl.key.location": "ssl_keyfile",
    "client.rack": "rack",
    "compression.type": "compression",
}
"""Kafka's own names that differ from ours by more than dots."""


class TopicSettings(_Section):
    """The topics. Input and outputs are yours; ``ledger`` and ``control`` are the service's own memory."""

    requests: Topic = "requests"
    """Input: one LLM request a record. Never compacted."""
    results: Topic = "results"
    """Outcomes that succeeded."""
    failures: Topic = "failures"
    """Outcomes that failed, with class, code and the original value."""
    review: Topic | None = None
    """Rows a person should look at; without it they go to ``failures``."""
    events: Topic = "batch-events"
    """Life-cycle of the batches."""
    group: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,120}$")] = "batchferry"
    """Consumer group; with the input's name it names the internal topics, so it is never changed later."""
    ledger: Topic | None = None
    """Compacted topic that says what happened to each offset; default ``<requests>.<group>.ledger``."""
    control: Topic | None = None
    """Compacted topic of facts about accounts and keys; default ``<requests>.<group>.control``."""
    create: bool = True
    """Make missing topics at start-up. Existing ones are never changed."""
    partitions: Positive = 12
    """Partitions of the topics we make: the most replicas that can share the work."""
    replication_factor: Annotated[Count, Field(ge=0, le=10)] = 0
    """Copies of each partition of the topics we make; 0 takes the cluster's default."""

    @property
    def ledger_topic(self) -> str:
        """Name of the ledger topic, the default worked out."""
        return self.ledger or f"{self.requests}.{self.group}.ledger"

    @property
    def control_topic(self) -> str:
        """Name of the control topic, the default worked out."""
        return self.control or f"{self.requests}.{self.group}.control"

    @property
    def review_topic(self) -> str:
        """Where rows for review go."""
        return self.review or self.failures


class AccountLimits(_Section):
    """What the provider takes. A route may ask for less, never for more."""

    max_rows: Positive = 50_000
    """Rows of one batch (OpenAI's limit)."""
    max_file_bytes: Bytes = 200_000_000
    """Bytes of one batch file (OpenAI's 200 MB)."""
    max_inputs: Positive = 50_000
    """Embedding inputs of one batch over all rows (OpenAI's limit)."""
    max_line_bytes: Annotated[Bytes, Field(ge=4096)] | None = None
    """Bytes of one line; null: as many as the file has."""
    enqueued_tokens: dict[str, Positive] = Field(default_factory=dict)
    """Most tokens waiting at the provider, by model; a model not named here is not bounded until it refuses."""
    batches_per_hour: Positive = 2_000
    """Creates of the whole fleet in an hour (OpenAI's limit)."""
    max_files: Positive | None = None
    """Files that the provider keeps for the account; an alarm tells of the last tenth; null: not bounded."""
    calls_per_minute: Positive = 600
    """Calls of the whole fleet in a minute that submit: uploads and creates. Polls have limits of their own."""


class PollSettings(_Section):
    """How often a batch is asked for its state."""

    first_s: Seconds = 10.0
    """Pause before the first poll."""
    factor: Annotated[float, Field(ge=1.0, le=10.0)] = 1.5
    """Each pause is so many times the one before."""
    max_s: Seconds = 300.0
    """Longest pause. It is part of what a route's margin must hold."""
    floor_s: Annotated[Seconds, Field(ge=1.0)] = 10.0
    """Shortest pause, whatever brings a poll forward: batches take minutes, and providers count calls."""
    jitter: Annotated[float, Field(ge=0.0, le=0.5)] = 0.1
    """Random part of a pause, so that batches of one moment do not poll in step."""
    list_pages: Annotated[Count, Field(le=100)] = 5
    """When many batches are due, read at most so many pages of the batch list before asking singly."""


class SyncSettings(_Section):
    """The sync lane: single calls at the full price, for rows that no batch can bring home in time."""

    enabled: bool = True
    """Whether rows may go through it at all. Off: a deadline that no batch can keep is announced and missed."""
    batch_chat: bool = False
    """The lane calls the provider's batch-chat endpoint: the price of a batch, for a connection that is held until the
    answer is there. Only with a profile that has one, which then says how long (``call_timeout_s``): a call that is let
    go before may have run all the same."""
    max_concurrency: Positive = 16
    """Calls at one time and replica, at most; it adapts downwards to what the provider takes."""
    call_timeout_s: Annotated[Seconds, Field(ge=1, le=3600)] = 600.0
    """Deadline of one call (the official client's value); a successor waits as long before it judges a call."""
    tries: Annotated[Count, Field(ge=1, le=10)] = 3
    """Calls that one row is worth."""
    rows_per_hour: Positive = 5_000
    """Late and rescued rows of the whole fleet in an hour; beyond it they go by batch and their miss is announced."""
    usd_per_hour: Annotated[float, Field(gt=0)] | None = None
    """The same in money, by estimate; null: only the rows are bounded. Rows that ask for the lane are not counted."""
    breaker_failures: Positive = 8
    """So many calls in a row without an answer close the lane for a while; the rows wait and lose no try."""
    breaker_pause_s: Seconds = 30.0
    """How long; doubled up to ten minutes while the first call after it fails again."""


class TimeoutSettings(_Section):
    """Deadlines of calls to the provider."""

    connect_s: Seconds = 5.0
    """Until a connection stands (the official client's value)."""
    read_s: Seconds = 60.0
    """Between two pieces of an answer."""
    write_s: Seconds = 60.0
    """Between two pieces of a request."""
    upload_s: Seconds = 900.0
    """A whole upload: 200 MB at about 2 Mbit/s."""
    download_s: Seconds = 900.0
    """A whole download."""
    create_s: Seconds = 60.0
    """The create call; without an answer by then the batch is looked up, never created blindly again."""


class ModelPrice(_Section):
    """What a model costs at this account, in USD for a million tokens outside a batch."""

    input_usd: Annotated[Decimal, Field(ge=0, le=1_000_000, decimal_places=6)]
    """Of input."""
    output_usd: Annotated[Decimal, Field(ge=0, le=1_000_000, decimal_places=6)]
    """Of output."""
    batch_share: Annotated[Decimal, Field(gt=0, le=1, decimal_places=6)] = Decimal("0.5")
    """What a batch costs of that."""


class DialectSettings(_Section):
    """Where a compatible server differs from OpenAI. A profile fills this in; what stands here goes before it."""

    file_purpose: str = "batch"
    """The ``purpose`` of uploaded files."""
    output_purpose: str = "batch_output"
    """The ``purpose`` under which result files are listed."""
    batch_metadata: bool = True
    """Whether ``metadata`` may be sent with a create; without it our batches are found by their input file."""
    file_expiry: bool = True
    """Whether ``expires_after`` may be sent with an upload."""
    list_page_size: Annotated[Positive, Field(le=100)] = 100
    """Batches on one page of a list."""
    file_page_size: Annotated[Positive, Field(le=10_000)] = 1_000
    """Files on one page of a list."""
    key_header: str = "authorization"
    """Header of the key: a bearer token in ``authorization``, in any other the bare key."""
    files_path: str = "/files"
    """What follows the base address for files."""
    batches_path: str = "/batches"
    """What follows it for batches."""
    endpoint_names: dict[str, str] = Field(default_factory=dict)
    """The server's names of endpoints, by those of the requests."""
    upload_way: UploadWay = UploadWay.FORM
    """How a file gets there: one form, or announced and then put to a signed address."""
    upload_fields: dict[str, str] = Field(default_factory=dict)
    """Further fields of an upload's form."""
    min_file_expiry_s: Annotated[Seconds, Field(ge=3600, le=2_592_000)] = 3600.0
    """Shortest life that an upload may ask for; a shorter wish is raised to it."""
    create_members: dict[str, Any] = Field(default_factory=dict)
    """Further members of a create."""
    cursor_param: str = "after"
    """Query parameter of a list's cursor."""
    unsure_throttles: bool = False
    """Whether a create refused with 429 may have been carried out all the same, behind a gateway that repeats it."""
    cancel_conflicts: frozenset[int] = frozenset()
    """Statuses beside 409 by which a cancel says that the batch has ended already."""
    sync_base_url: str | None = None
    """Root of the sync lane where it is another address."""
    sync_models: dict[str, str] = Field(default_factory=dict)
    """Models of the sync lane, by those of the rows: what runs batches may not answer single calls."""
    deployment_paths: bool = False
    """Whether the sync lane's address names the model (Azure's dated addresses)."""

    @model_validator(mode="after")
    def _usable(self) -> Self:
        faults = self.wire.faults()
        if faults:
            raise ValueError("; ".join(faults))
        return self

    @property
    def wire(self) -> Dialect:
        """What the adapter must know of it."""
        members = {field.name: getattr(self, field.name) for field in fields(Dialect)}
        return Dialect(**members | {"min_file_expiry_s": round(self.min_file_expiry_s)})


class AnthropicSettings(_Section):
    """What only Anthropic's API has."""

    version: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")] = "2026-10-21"
    """Sent as ``anthropic-version``; it decides which parameters a row may have. ``2023-06-01`` is taken too."""
    betas: TextList = ()
    """Sent as ``anthropic-beta``."""
    workspace: str | None = None
    """Sent as ``anthropic-workspace-id``, for keys that are not bound to one workspace."""
    key_header: Literal["x-api-key", "authorization"] = "x-api-key"
    """How the key is sent: as the documents say, or as a bearer token, as gateways may want it."""
    cache_prompts: bool = False
    """Mark system prompts for the provider's one-hour cache, in rows that set no mark themselves: worth it where many
    rows share a long one, dearer where none do."""


class WebhookSettings(_Section):
    """What is sent to ``/webhooks/<account>``, and how its sender proves himself."""

    auth: Literal["standard", "hmac", "header", "path"] = "standard"
    """``standard``: signed as Standard Webhooks say (OpenAI, Gemini). ``hmac``: HMAC-SHA256 over the raw body, in a
    header. For gateways that cannot sign, ``header``: the secret itself in a header; ``path``: the secret as the last
    part of the address, ``/webhooks/<account>/<secret>``."""
    header: HeaderName | None = None
    """Header of ``hmac`` (else ``x-webhook-signature``) or of ``header`` (else ``x-webhook-secret``)."""
    header_prefix: str = ""
    """What stands before the value in that header (``sha256=``, ``Bearer``)."""
    digest: Literal["hex", "base64"] = "hex"
    """How an ``hmac`` is written."""
    form: Literal["openai", "gemini", "generic"] | None = None
    """Whose fields are read: ``data.id`` and ``type`` of OpenAI and Gemini, or ``batch_id`` and ``status`` of
    ``generic``; null: as the account's provider has it."""
    batch_id_field: FieldPath | None = None
    """Where the batch is named, dots between the levels; null: as the form has it."""
    status_field: FieldPath | None = None
    """Where the status stands; null: as the form has it. It need not be there."""
    batch_id_prefix: str | None = None
    """Put before the name unless it is there already; null: ``batches/`` for Gemini, else nothing."""
    running_statuses: TextList = ("created", "pending", "queued", "validating", "in_progress", "running", "processing")
    """Statuses (``batch.running`` is ``running``) that tell of no end: acknowledged without effect."""
    alarm_rejected: Positive = 5
    """So many deliveries refused in a row, none taken between them, may raise an alarm,"""
    alarm_quiet_s: Seconds = 900.0
    """if none has been taken for so long: a secret was replaced on one side only."""


_WEBHOOK_FORMS = {
    "openai": ("data.id", "type", ""),
    "gemini": ("data.id", "type", "batches/"),
    "generic": ("batch_id", "status", ""),
}
"""Fields of the batch's name and the status, and what the name begins with."""


class AccountSettings(_Section):
    """One account at a provider. A batch is always asked for with the account that made it."""

    profile: str | None = None
    """What is known of the provider, by name (``groq``, ``azure``, ``anthropic`` ...) or as the path of a file: its
    address, windows, limits, prices and departures. Whatever is set beside it goes before it; null: that of
    ``provider``, and for ``openai`` the defaults that stand here."""
    provider: Literal["openai", "anthropic", "gemini", "mistral"] = "openai"
    """API family: ``openai`` is OpenAI and whatever speaks like it."""
    base_url: str = "https://api.openai.com/v1"
    """Root of the API."""
    api_key: SecretStr | None = None
    """Key; by environment or file."""
    api_key_file: Path | None = None
    """File that holds the key."""
    webhook: WebhookSettings = WebhookSettings()
    webhook_secret: Secrets | None = None
    """Signs what the provider sends to ``/webhooks/<account>`` (``whsec_...``); without one nothing is taken there.
    Several, one a line or a list, while one is being replaced: any of them will do."""
    webhook_secret_file: Path | None = None
    """File that holds it, or them."""
    organization: str | None = None
    """Sent as ``OpenAI-Organization``."""
    project: str | None = None
    """Sent as ``OpenAI-Project``."""
    headers: dict[str, SecretStr] = Field(default_factory=dict)
    """Further headers of every call; gateways often want one. Taken for secrets."""
    query: dict[str, str] = Field(default_factory=dict)
    """Further query parameters of every call; no secrets."""
    completion_window: Window = "24h"
    """Window asked for, in the provider's words; it is the longest that a batch may take."""
    timeouts: TimeoutSettings = TimeoutSettings()
    limits: AccountLimits = AccountLimits()
    poll: PollSettings = PollSettings()
    sync: SyncSettings = SyncSettings()
    prices: dict[str, ModelPrice] = Field(default_factory=dict)
    """Your own prices by model (``*`` and ``?`` as in file names), before published ones; the first match is taken."""
    price_provider: str | None = None
    """Whose published prices apply: an id of the price data; null: those of ``provider``, empty: nobody's."""
    batch_share: Annotated[Decimal, Field(gt=0, le=1, decimal_places=6)] | None = None
    """What a batch costs of a published list price where no batch price is published; null: as is known of them."""
    file_expiry_s: Annotated[Seconds, Field(ge=3600, le=2_592_000)] | None = 1_209_600.0
    """Uploaded files delete themselves after so long (1 h to 30 d), in case we never come back; null: never."""
    results_kept_s: Seconds | None = None
    """Results are deleted by the provider so long after their batch was made: those that go first are fetched first,
    and an alarm tells of results that may not be fetched in time; null: not known."""
    keep_files: bool = False
    """Leave input and result files at the provider after landing. Off: they hold prompts and answers."""
    max_concurrent_calls: Positive = 8
    """Calls at one time."""
    dialect: DialectSettings = DialectSettings()
    anthropic: AnthropicSettings = AnthropicSettings()

    @cached_property
    def price_list(self) -> Prices:
        """Whose prices apply."""
        provider = self.provider if self.price_provider is None else self.price_provider
        if not self.prices and self.batch_share is None:
            return provider
        named = tuple(
            (pattern, UnitPrices.per_million(f"{one.input_usd:f}", f"{one.output_usd:f}", Fraction(one.batch_share)))
            for pattern, one in self.prices.items()
        )
        return PriceList(provider, named, None if self.batch_share is None else Fraction(self.batch_share))

    @property
    def knows_models_of(self) -> str:
        """Whose model names these are, in the price data; empty: nobody's."""
        return self.provider if self.price_provider is None else self.price_provider

    @property
    def poll_cap_s(self) -> float:
        """Longest pause between two polls of a batch; longer while webhooks prove to arrive."""
        return self.poll.max_s * (1.0 if self.webhook_secret is None else MAX_STRETCH)

    @property
    def window_s(self) -> float:
        """Length of the completion window in seconds."""
        return parse_window_s(self.completion_window)

    @property
    def webhook_secrets(self) -> tuple[str, ...]:
        """Each secret of webhooks as it was given; empty while none is set."""
        return () if self.webhook_secret is None else webhook_secrets(self.webhook_secret.get_secret_value())

    @property
    def webhook_fields(self) -> tuple[str, str, str]:
        """Where a delivery names its batch and its status, and what the name begins with."""
        form = self.webhook.form or ("gemini" if self.provider == "gemini" else "openai")
        batch_id, status, prefix = _WEBHOOK_FORMS[form]
        given = self.webhook.batch_id_prefix
        return (
            self.webhook.batch_id_field or batch_id,
            self.webhook.status_field or status,
            prefix if given is None else given,
        )

    @field_validator("webhook_secret")
    @classmethod
    def _usable(cls, value: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        hook = info.data.get("webhook")
        if value is None or hook is None:
            return value
        for secret in webhook_secrets(value.get_secret_value()):
            if hook.auth == "standard":
                webhook_key(secret)
            else:
                check_webhook_secret(secret, hook.auth)
        return value

    @field_validator("base_url")
    @classmethod
    def _address(cls, value: str) -> str:
        scheme, colon, rest = value.partition("://")
        host = rest.partition("/")[0]
        if scheme not in {"http", "https"} or not colon or not host:
            raise ValueError("an address like https://host/v1 is wanted")
        if "@" in host:
            raise ValueError("an address must not hold a password: use api_key_file or headers")
        if "?" in rest or "#" in rest:
            raise ValueError("an address must not hold a query or a fragment")
        return value.rstrip("/")


class MaskSettings(_Section):
    """Masking of personal data before anything of a request is written to disk or sent. The input topic is yours."""

    masker: str | None = None
    """``stock``, or the name of an entry point of the group batchferry.maskers; null: nothing is masked."""
    rules: Annotated[tuple[Rule, ...], BeforeValidator(as_list, json_schema_input_type=list[Rule] | str)] = ()
    """What ``stock`` looks for: email, iban, card, national-id, phone, ip; none named: all but ip."""
    key: SecretStr | None = None
    """Makes a placeholder the same wherever the same thing stands, so that answers can be joined; by environment or
    file."""
    key_file: Path | None = None
    """File that holds the key."""
    max_body_bytes: Bytes = 256_000
    """A larger body is refused: dense ones take seconds, and nothing else happens meanwhile."""


class ArchiveSettings(_Section):
    """Copies of result files that outlive their landing."""

    folder: Path | None = None
    """A private folder, not inside ``state_dir``; null: nothing is kept. For an object store, mount it there."""
    max_bytes: Bytes | None = None
    """Of all files together; null: no bound."""
    max_age_s: Seconds | None = None
    """A file is deleted so long after it came; null: never."""
    when_full: Literal["wait", "drop_oldest", "skip"] = "wait"
    """What is done when a file cannot be kept: its batch waits, the oldest make room, or it is not kept and told."""


class RetrySettings(_Section):
    """How often a row of a class is sent again."""

    transient: Annotated[Count, Field(le=10)] = 1
    """After 5xx, 429, a timeout or an empty answer: nothing is wrong with the row."""
    missing: Annotated[Count, Field(le=10)] = 1
    """After a completed batch that had no line for the row."""
    expired: Annotated[Count, Field(le=10)] = 1
    """After the completion window closed, or the batch was cancelled, before the row was run."""
    backoff_s: Seconds = 60.0
    """Wait before the second submission; doubled for each further one."""
    backoff_max_s: Seconds = 3600.0
    """The longest of these waits."""


class LongRowSettings(_Section):
    """What is done with a few giant rows, so that they do not hold up a batch."""

    over_tokens: Positive = 50_000
    """Rows of more estimated input tokens than this."""
    lane: Literal["sync", "own_batch"] = "own_batch"
    """Through the sync lane, or in batches of their own."""


class CanarySettings(_Section):
    """Try a new kind of prompt on a few rows before the others follow."""

    rows: Annotated[Count, Field(ge=1, le=1_000)] = 50
    """Rows of the random sample."""
    lane: Literal["sync", "batch"] = "sync"
    """How the sample runs. A batch costs a whole window, so it is only lawful where two windows fit the SLA."""
    gather_s: Seconds = 300.0
    """The sample is drawn once so many rows wait, or after so long."""
    max_bad_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """More bad answers than this share, and the shape is held."""
    check: Literal["none", "json", "json_schema"] = "none"
    """A good answer must also be JSON, or fit a schema."""
    schema_file: Path | None = None
    """JSON Schema of the answers, for ``json_schema``."""
    timeout: Literal["ship", "hold"] = "ship"
    """What the waiting rows do when their time to leave comes before the verdict."""
    max_shapes: Positive = 1_000
    """Kinds of prompt that are remembered; with more than that the canary is off, with an alarm."""


class RouteSettings(_Section):
    """What is promised to the requests it matches, and how large their batches are. The first match is taken."""

    name: str = ""
    """Its name, where routes are a list; else the key under which it stands."""
    models: Annotated[TextList, Field(min_length=1)] = ("*",)
    """Models it takes; ``*`` and ``?`` as in file names."""
    endpoints: TextList = ()
    """Endpoints it takes; none named: all."""
    account: str = "default"
    """Account that pays."""
    fallback: TextList = ()
    """Accounts for new rows while the first one is held, in this order; rows that wait already stay with theirs."""
    mask: bool = True
    """Whether its requests are masked, where a masker is set."""
    lane: Literal["batch", "sync"] = "batch"
    """How its rows travel: in batches, or all of them one by one through the account's sync lane; meant for lanes of
    batch chat, since any other is paid in full."""
    endpoint: Endpoint = "/v1/chat/completions"
    """Endpoint of a record that names none."""
    sla_s: Seconds = 30 * 3600.0
    """Promise: the outcome is there so long after the record began to wait."""
    margin_s: Seconds = 2 * 3600.0
    """Kept free behind the completion window for noticing, cancelling, fetching and a rescue."""
    max_wait_s: Seconds | None = None
    """Longest wait for a batch to leave; default and upper bound are SLA - window - margin."""
    max_rows: Positive = 25_000
    """A batch leaves with so many rows: half the provider's limit, so that one failure costs less."""
    max_bytes: Bytes = 100_000_000
    """A batch leaves with so many bytes: what nearly every compatible provider takes."""
    max_tokens: Positive | None = None
    """A batch leaves with so many estimated tokens; null: not bounded."""
    max_inputs: Positive = 25_000
    """A batch leaves with so many embedding inputs."""
    retries: RetrySettings = RetrySettings()
    policies: dict[RowClass, Policy] = Field(default_factory=dict)
    """What is done with the rows of a class, where it is not the default: retry, sync, review, split or fail."""
    review: bool = False
    """Answers with a flag (truncated, refused, filtered, empty) go to the review topic instead of the results."""
    late: Literal["sync", "batch", "fail"] = "sync"
    """A row that no batch can bring home in time: the sync lane, a batch all the same, or a failure."""
    min_rows: Count = 500
    """A batch below so many rows at its time threshold is small."""
    small: Literal["batch", "sync"] = "batch"
    """How a small batch travels."""
    long_row: LongRowSettings | None = None
    """Where giant rows go; null: they travel with the others."""
    canary: CanarySettings | None = None
    """Whether a new kind of prompt is tried on a few rows first; null: no."""
    context_tokens: Positive | None = None
    """Context of the models; null: what the price data knows. A row that is surely longer is never sent."""
    larger_model: str | None = None
    """Model for rows that are too long for theirs, with the policy ``too_long: sync``."""
    splitter: str = "plain_text"
    """Name of the splitter for the policy ``too_long: split``; an entry point of the group batchferry.splitters."""
    max_split_depth: Annotated[Count, Field(ge=1, le=10)] = 3
    """A part that is too long may be split again so often."""
    alarm_ratio: Annotated[float, Field(gt=0, le=1)] = 0.05
    """More rows of a batch than this share refused for what they say: the key is held instead of trying on."""
    alarm_min_rows: Positive = 20
    """At least so many of them."""
    cancel_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """A batch is cancelled for a rescue when at least this share of its rows is due; fewer run beside it."""
    max_age_s: Seconds = 7 * 86_400.0
    """A row older than this is given up. Its clock stops while its key is held."""
    sync_unknown: Literal["rerun", "fail"] = "rerun"
    """A call of the sync lane whose replica died: run again (perhaps paid twice, and counted), or fail."""
    missing_max_tokens: Literal["allow", "warn", "fail"] = "allow"
    """A request that does not bound its answer's tokens."""
    max_usd_per_day: Annotated[float, Field(gt=0)] | None = None
    """Estimated and real spending of a day (UTC) at which the route's keys are held until the next one."""
    group_prefixes: bool = False
    """Rows that share a long system prompt leave in batches of their own, where the provider's cache helps them."""
    duplicates: Literal["coalesce", "allow", "reject"] = "coalesce"
    """The same request again while the first one waits: answered once, run twice, or refused."""
    keep_oversize_answers_dir: Path | None = None
    """Folder for answers that are larger than the output topic takes; null: they are only counted."""

    def matches(self, model: str, endpoint: str | None) -> bool:
        """Whether this route takes requests for the model at the endpoint (None: the record named none)."""
        wanted = self.endpoint if endpoint is None else endpoint
        return (not self.endpoints or wanted in self.endpoints) and any(
            fnmatch.fnmatchcase(model, pattern) for pattern in self.models
        )


class LimitSettings(_Section):
    """Bounds of the whole process: memory, disk, queues, transactions."""

    max_open_keys: Positive = 2_000
    """Batch keys that gather rows at one time; the model name is the caller's, so it must be bounded."""
    max_record_bytes: Bytes = 8 * 1024 * 1024
    """Largest input record that is accepted."""
    max_json_depth: Annotated[Count, Field(ge=8, le=900)] = 200
    """Deepest nesting of an input record."""
    max_sla_s: Annotated[Seconds, Field(gt=0, le=31_536_000)] = 2_592_000.0
    """Longest promise (30 d): of a route, and what a record may ask for by its headers ``sla`` and ``deadline``."""
    spool_high_bytes: Bytes = 8_000_000_000
    """At so many spooled bytes the largest open batch is sealed, then consumption pauses."""
    spool_low_bytes: Bytes = 6_000_000_000
    """Below so many it resumes."""
    spool_buffer_bytes: Bytes = 32 * 1024 * 1024
    """Most spooled bytes still in memory."""
    max_index_rows: Positive = 5_000_000
    """Rows waiting or at a provider; about 40 bytes of disk each and their headers."""
    poll_records: Positive = 2_000
    """Most records of one reading of the input."""
    settle_chunk_rows: Positive = 1_000
    """A settle transaction takes so many outcomes,"""
    settle_chunk_bytes: Bytes = 4 * 1024 * 1024
    """or so many bytes,"""
    settle_max_delay_s: Seconds = 2.0
    """or what has come in so long. Below about 200 rows a transaction costs more than its outcomes."""
    max_settle_transactions: Positive = 4
    """Settle transactions open at one time in this process."""
    settle_queue_rows: Positive = 5_000
    """Outcomes of one partition waiting for a transaction; landing pauses there."""
    max_batches_in_flight: Positive = 1_000
    """Batches at providers at one time."""
    max_uploads: Positive = 2
    """Uploads at one time."""
    max_downloads: Positive = 2
    """Downloads at one time; their files are reserved on disk."""
    mailbox_events: Positive = 1_000
    """Events waiting for one batch."""
    max_clock_skew_s: Seconds = 60.0
    """Our clock may differ so much from the provider's before no lateness is judged, and from a record's."""
    missing_grace_s: Seconds = 900.0
    """A completed batch with fewer lines than it counted is asked again for so long."""
    missing_confirm_s: Seconds = 60.0
    """A row is missing only when two complete downloads so far apart agree."""
    file_reuse_s: Seconds = 600.0
    """After a definite refusal the same file may be used for another create for so long."""
    wave_rows: Annotated[Count, Field(ge=1, le=1_000)] = 50
    """Rows of an account that a replica has in waves of the sync lane at one time: what its crash may pay for twice."""
    submit_ttl_s: Annotated[Seconds, Field(ge=2)] = 120.0
    """A create may be sent only so long after its intent was written; a successor waits as long."""
    resolve_lag_s: Seconds = 5.0
    """A successor waits so much longer: the creator's clock may run behind."""
    lookup_pause_s: Seconds = 60.0
    """Between the two look-ups that must agree before a lost create counts as never made."""
    sweep_interval_s: Annotated[Seconds, Field(ge=60)] = 3600.0
    """Between two searches of the accounts for batches and files of ours that no ledger names."""
    window_grace_s: Seconds = 1800.0
    """A batch still running so long after its window is cancelled and its partial results are landed."""
    restore_timeout_s: Seconds = 120.0
    """Deadline for reading one partition's ledger."""
    headroom_min_s: Annotated[Seconds, Field(ge=0, le=604_800)] = 21_600.0
    """Waiting rows that the input topic would delete within so long become failures; 0: they wait until they are lost.

    Time enough to read the failure and to replay the record while it still exists.
    """


class ServerSettings(_Section):
    """The admin address: probes, metrics, read-only JSON; and the webhook address."""

    enabled: bool = True
    """Whether they are served at all."""
    host: str = "127.0.0.1"
    """Address to listen on; in a container ``0.0.0.0``, so that probes and Prometheus reach it."""
    port: Port = 8080
    """Port; 0 takes a free one."""
    webhooks: Literal["own_process", "in_process"] = "own_process"
    """Who takes webhooks once an account has a secret. ``own_process``: a process of their own at ``webhook_port``, so
    that hundreds of deliveries a second take nothing from the landing of results. ``in_process``: this one, at
    ``port``, beside the admin pages; saves 40 MB, and does for a few deliveries a second."""
    webhook_port: Port = 8081
    """Port of the webhook process; 0 takes a free one. A provider need reach no other."""
    token: SecretStr | None = None
    """When set, ``/api`` asks for it as a bearer token; probes and metrics never do."""
    token_file: Path | None = None
    """File that holds the token."""


class LogSettings(_Section):
    """Logs of our own events. Payload is never in them, at any level."""

    format: Literal["auto", "json", "human"] = "auto"
    """``auto``: human on a terminal, JSON elsewhere."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level that is written."""


class OtelSettings(_Section):
    """OpenTelemetry. ``/metrics`` needs none of it; export follows the standard ``OTEL_*`` variables."""

    enabled: bool = True
    """Export metrics and traces when an ``OTEL_EXPORTER_OTLP_*ENDPOINT`` variable is set."""
    service_name: str = "batchferry"
    """Unless ``OTEL_SERVICE_NAME`` says otherwise."""


class ClockSettings(_Section):
    """Time runs faster in rehearsals: ``now = origin + (wall clock - started) * speed``. Never for real work."""

    speed: Annotated[float, Field(gt=0, le=100_000)] = 1.0
    """How many seconds pass in one."""
    origin: AwareDatetime | None = None
    """What the clock showed"""
    started: AwareDatetime | None = None
    """when the wall clock showed this. The simulator must be given the same three values."""

    @property
    def is_scaled(self) -> bool:
        """Whether this is a rehearsal."""
        return self.origin is not None or self.speed != 1.0


class Settings(BaseSettings):
    """All settings of one process.

    Reads nothing by itself: ``load_settings`` gathers the sources and makes it.
    """

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
        env_prefix=ENV_PREFIX,
        env_nested_delimiter=ENV_DELIMITER,
        case_sensitive=False,
    )

    kafka: KafkaSettings = KafkaSettings()
    topics: TopicSettings = TopicSettings()
    accounts: Annotated[dict[str, AccountSettings], named] = Field(
        default_factory=lambda: {"default": AccountSettings()}
    )
    """Provider accounts by name."""
    routes: Annotated[
        dict[str, RouteSettings],
        BeforeValidator(routes_by_name, json_schema_input_type=dict[str, RouteSettings] | list[RouteSettings]),
        named,
    ] = Field(default_factory=lambda: {"default": RouteSettings(name="default")})
    """Routes by name, in the order in which they are tried; in a file also a list whose items have a ``name``."""
    limits: LimitSettings = LimitSettings()
    mask: MaskSettings = MaskSettings()
    archive: ArchiveSettings = ArchiveSettings()
    state_dir: Path = Path("state")
    """Folder of index, spool and result files. A cache: wiped at every start, so it is nobody else's folder."""
    server: ServerSettings = ServerSettings()
    log: LogSettings = LogSettings()
    otel: OtelSettings = OtelSettings()
    clock: ClockSettings = ClockSettings()
    stop_budget_s: Annotated[Seconds, Field(ge=1)] = 25.0
    """Time for draining after SIGTERM; below the 30 s after which Kubernetes kills."""
    cancel_s: Seconds = CANCEL_S
    """How long a provider may take to cancel; part of what a margin must hold."""
    download_s: Seconds = DOWNLOAD_S
    """How long fetching a batch's results takes; part of what a margin must hold."""
    rescue_lead_s: Seconds = RESCUE_LEAD_S
    """Time for running a batch's rows another way; part of what a margin must hold."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - the library passes all of these by keyword
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Nothing but what the caller hands over: the environment is read by the loader alone."""
        return (init_settings,)

    @model_validator(mode="after")
    def _route_names(self) -> Self:
        for name, route in self.routes.items():
            if route.name != name:
                self.routes[name] = route.model_copy(update={"name": name})
        return self

    def route_for(self, model: str, endpoint: str | None = None) -> RouteSettings | None:
        """The first route that takes this model and endpoint."""
        return next((route for route in self.routes.values() if route.matches(model, endpoint)), None)

    def account_of(self, route: RouteSettings) -> AccountSettings:
        """The account that pays for a route."""
        return self.accounts[route.account]

    def masker(self) -> Masker | None:
        """What masks requests.

        Raises:
            ConfigError: it cannot be loaded.
        """
        mask = self.mask
        if mask.masker is None:
            return None
        key = None if mask.key is None else mask.key.get_secret_value().encode()
        return load_masker(mask.masker, rules=frozenset(mask.rules) or None, hash_key=key)

    def submit_ttl_s(self, account: str) -> float:
        """How long (real seconds) after its intent was written a create at this account may be sent.

        Where the rows travel in the create itself, the time of an upload is added.
        """
        paying = self.accounts[account]
        return self.limits.submit_ttl_s + (paying.timeouts.upload_s if paying.provider in INLINE_PROVIDERS else 0.0)

    def wait_plan(self, route: RouteSettings) -> WaitPlan:
        """The deadline arithmetic of a route."""
        return plan_waits(route.sla_s, self.account_of(route).window_s, route.margin_s, route.max_wait_s)
