"""Every log event, metric and span that the service can emit. Adding one is adding a line here.

Levels: info is the normal life-cycle; warning is odd, nothing is lost; error means that someone must act.
Fields hold ids, counts, times, sizes, states and codes, never the text of a prompt, an answer or a provider's message.
A metric's full name is ``batchferry_`` + its name here (+ ``_total`` for a counter); its unit ends its name here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

METRIC_PREFIX = "batchferry_"


class Level(StrEnum):
    """How much an event matters."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class EventSpec:
    """One log event. Not every field need be given each time; no other may be."""

    name: str
    level: Level
    help: str
    fields: frozenset[str]


class Kind(StrEnum):
    """What a metric does with the values it gets."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


MIXED_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Seconds, for calls and transactions."""
HOUR_BUCKETS = tuple(
    seconds
    for minutes in (1, 5, 15, 30, 60, 120, 240, 480, 720, 1080, 1440, 1800, 2160, 2880, 4320, 10080)
    for seconds in (60.0 * minutes,)
)
"""Seconds from a minute to a week, for waits: the usual buckets end at ten seconds."""
ROW_BUCKETS = (1.0, 10.0, 100.0, 500.0, 1_000.0, 2_500.0, 5_000.0, 10_000.0, 25_000.0, 50_000.0)
BYTE_BUCKETS = (1e4, 1e5, 1e6, 5e6, 1e7, 2.5e7, 5e7, 1e8, 2e8)


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric. ``labels`` maps each label to the values it may have; empty: free, but bounded in number."""

    name: str
    kind: Kind
    help: str
    labels: Mapping[str, frozenset[str]]
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        """The name Prometheus shows."""
        return METRIC_PREFIX + self.name + ("_total" if self.kind is Kind.COUNTER else "")

    @property
    def unit(self) -> str:
        """The unit in UCUM, which OpenTelemetry asks for."""
        return next((unit for end, unit in _UNITS.items() if self.name.endswith(end)), "1")


_UNITS = {"_seconds": "s", "_bytes": "By", "_dollars": "{USD}", "_records": "{record}", "_rows": "{row}"}


@dataclass(frozen=True, slots=True)
class SpanSpec:
    """One span: a piece of work that is already over when it is told."""

    name: str
    help: str
    attributes: frozenset[str]


MAX_LABEL_VALUES = 200
"""Distinct values of one free label of one metric; further ones are counted as ``other``."""
OTHER = "other"


# ------------------------------------------------------------------------------------------- events

_BATCH = "batch_id"
_PART = "partition"
_CALL = "account call kind http_status code request_id attempt retry_after_s"
_FAILURE = "error where error_text"

_EVENTS: dict[Level, tuple[tuple[str, str, str], ...]] = {
    Level.DEBUG: (
        ("records_read", "Records were taken from the input.", f"{_PART} records bytes"),
        ("batch_polled", "A batch was asked for its state.", f"{_BATCH} status completed failed total next_poll_at"),
        ("batch_list_read", "A page of the provider's batch list was read.", "account batches page"),
        ("settled", "A transaction of outcomes was committed.", f"{_PART} rows bytes watermark duration_s"),
        ("news_ignored", "Late or repeated news about a batch was dropped on purpose.", f"{_BATCH} state news"),
    ),
    Level.INFO: (
        ("service_started", "The process is up; nothing is consumed yet.", "version incarnation host speed"),
        ("service_ready", "All partitions are restored; work goes on.", "partitions duration_s"),
        ("service_stopping", "A stop was asked for; work in hand is being finished.", "signal budget_s reason"),
        ("service_stopped", "The process ends.", "exit_code drained duration_s reason"),
        ("settings_loaded", "The settings are read and fit together.", "path routes accounts"),
        ("gate_passed", "A start-up check is content.", "gate topic"),
        ("topic_created", "A missing topic was made.", "topic partitions"),
        ("topic_grown", "A topic of ours got more partitions, as the input did.", "topic partitions"),
        ("server_listening", "The admin address answers.", "host port"),
        ("partitions_assigned", "The group has a new generation.", "kept added lost"),
        ("partition_assigned", "A partition is ours; its ledger will be read.", _PART),
        (
            "partition_restored",
            "A partition's ledger is read: it can settle.",
            f"{_PART} ledger_id watermark lots next_offset records took_s",
        ),
        ("partition_released", "A partition was given back.", f"{_PART} reason"),
        (
            "partition_caught_up",
            "The open records of a restored partition are read again.",
            f"{_PART} records duration_s",
        ),
        ("ledger_created", "A partition got its ledger id.", f"{_PART} ledger_id"),
        ("partition_refreshed", "An idle partition's producer was used, so that it stays alive.", _PART),
        (
            "batch_sealed",
            "A batch is closed and will be sent.",
            f"{_BATCH} key account endpoint model slice reason rows bytes tokens partitions waited_s ship_by",
        ),
        (
            "batch_uploaded",
            "The provider holds the batch's file, or its rows, which then have the batch's own id.",
            f"{_BATCH} file_id bytes sha256 duration_s",
        ),
        (
            "provider_file_deleted",
            "A file at the provider is gone by our wish; bytes and sum where this process sent or fetched it.",
            f"{_BATCH} file_id bytes sha256",
        ),
        ("result_archived", "A result file is in the archive.", f"{_BATCH} file_kind file_id bytes sha256"),
        ("archive_dropped", "Files left the archive, for age or for room.", "files"),
        (
            "batch_submitted",
            "The provider made the batch, and every lot says so.",
            f"{_BATCH} provider_batch_id account rows bytes file_id",
        ),
        (
            "batch_state_changed",
            "A batch went from one state to the next.",
            f"{_BATCH} from_state to_state news provider_batch_id provider_status completed failed total",
        ),
        ("batch_adopted", "A batch whose create had no answer was found.", f"{_BATCH} provider_batch_id found_by"),
        ("batch_refused", "The provider definitely refused a create; nothing exists.", f"{_BATCH} {_CALL}"),
        ("batch_dissolved", "A batch was given up before it existed; its rows wait again.", f"{_BATCH} reason rows"),
        ("batch_cancel_sent", "A batch was asked to stop.", f"{_BATCH} provider_batch_id reason"),
        (
            "batch_downloaded",
            "A result file is on disk, whole.",
            f"{_BATCH} file_kind file_id bytes duration_s lines sha256",
        ),
        (
            "batch_landed",
            "Every row of ours in the batch has its outcome or waits again.",
            f"{_BATCH} provider_batch_id status rows succeeded failed retried missing duration_s wait_s turnaround_s",
        ),
        ("batch_cleaned", "The batch's files at the provider are gone, or kept on purpose.", f"{_BATCH} files kept"),
        ("rows_retried", "Rows wait for another submission.", f"{_BATCH} {_PART} row_class rows submission"),
        ("wave_begun", "Rows begin their way through the sync lane.", f"{_BATCH} {_PART} rows account reason"),
        ("wave_ended", "All calls of a wave have ended.", f"{_BATCH} {_PART} rows succeeded unknown"),
        (
            "rows_rescued",
            "Rows are taken out of a batch or a wait that would bring them home too late.",
            f"{_BATCH} {_PART} rows reason",
        ),
        ("batch_cancel_withheld", "A batch that may be somebody else's is not cancelled.", f"{_BATCH} reason"),
        ("batch_rescued", "A batch is cancelled because its rows come due.", f"{_BATCH} rows how"),
        ("small_batch_unpacked", "A small batch goes through the sync lane.", f"{_BATCH} rows"),
        ("batch_admission_waits", "A batch waits for a place, a trial, a rate or for tokens.", f"{_BATCH} reason"),
        ("batch_stepped_back", "Another replica's batch took the tokens that this one counted on.", f"{_BATCH} rows"),
        ("token_limit_learned", "The account may have fewer tokens enqueued than we thought.", "account model tokens"),
        ("hold_probed", "A hold has ended by its time: one batch tries.", f"scope reason {_BATCH}"),
        ("canary_drawn", "The sample of a kind of prompt goes ahead.", "shape rows label"),
        ("canary_judged", "A kind of prompt has its verdict.", "shape good rows bad_rows label"),
        ("row_not_split", "A row that is too long cannot be cut.", f"{_PART} offset reason"),
        ("key_held", "A batch key or account must not submit for now.", "scope reason label until times rows"),
        ("key_released", "A hold is lifted.", "scope reason label held_s"),
        ("flush_asked", "An operator asked for batches to leave now.", "scope"),
        ("consumption_resumed", "The input is read again.", "partitions reason spool_bytes indexed_rows paused_s"),
        ("fleet_caught_up", "All ledgers and the control topic have been read once.", "records duration_s"),
        (
            "sweep_done",
            "The accounts were searched for batches and files of ours that no ledger names.",
            "account reason batches files known not_ours open too_old suspects cancelled collected deleted failed",
        ),
        ("orphan_file_deleted", "An input file of ours that no record names is gone.", f"account {_BATCH} file_id"),
        (
            "webhook_received",
            "A signed delivery named a batch; poked: its next poll is brought forward.",
            "account provider_batch_id outcome",
        ),
        ("webhooks_listening", "The webhook process answers at the webhook address.", "host port"),
        ("webhooks_taken_again", "After an alarm a delivery to the webhook address was taken.", "account"),
        ("clock_agrees", "Our clock and the provider's agree again.", "account skew_s"),
    ),
    Level.WARNING: (
        ("gate_warned", "A start-up check is not content, but it is safe to go on.", "gate topic finding remedy"),
        ("telemetry_misused", "Something was told under a name or field that the catalogue lacks.", "name field"),
        ("partition_lost", "A partition's work was dropped.", f"{_PART} reason"),
        ("partition_fenced", "A newer owner has this partition.", f"{_PART} reason"),
        ("restore_failed", "A partition could not be restored; it is tried again.", f"{_PART} reason pause_s"),
        ("rows_not_repacked", "Waiting rows could not join a batch yet; they are tried again.", f"{_PART} reason rows"),
        (
            "record_refused",
            "An input record breaks a rule and became a failure.",
            f"topic {_PART} offset rule remedy",
        ),
        ("duplicates_coalesced", "The same requests again while the first ones waited.", f"{_PART} rows"),
        (
            "batch_waiting_long",
            "A batch has been in one state for too long.",
            f"{_BATCH} provider_batch_id state age_s",
        ),
        ("batch_submission_unknown", "A create had no clear answer and is looked up.", f"{_BATCH} account reason"),
        ("batch_twin_cancelled", "A second batch of one file was found and cancelled.", f"{_BATCH} provider_batch_id"),
        (
            "sweep_unfinished",
            "A search for orphans was cut short or saw only a part; what is left waits for the next.",
            f"account reason {_PART}",
        ),
        (
            "orphan_found",
            "A batch or file of ours that no ledger names; acted upon if the next search finds it as well.",
            f"account {_BATCH} provider_batch_id file_id kind status",
        ),
        (
            "orphan_cancelled",
            "A running batch of ours that no ledger names was cancelled.",
            f"account {_BATCH} provider_batch_id kind status",
        ),
        (
            "orphan_collected",
            "The files of an ended batch of ours that no ledger names are gone; its rows were waste.",
            f"account {_BATCH} provider_batch_id kind status files rows",
        ),
        ("batch_incomplete", "Result files have fewer lines than the provider counted.", f"{_BATCH} lines counted"),
        ("batch_results_unavailable", "Result files cannot be had yet.", f"{_BATCH} file_kind reason next_try_s"),
        (
            "batch_window_exceeded",
            "A batch outlasted its window and is cancelled.",
            f"{_BATCH} provider_batch_id age_s",
        ),
        ("rows_missing", "Submitted rows are in no result file.", f"{_BATCH} {_PART} rows status"),
        (
            "result_file_gone",
            "A result file is no longer at the provider; its rows are treated as absent.",
            f"{_BATCH} file_kind",
        ),
        ("line_unreadable", "A result line could not be read.", f"{_BATCH} file_kind line reason bytes {_PART} offset"),
        ("line_foreign", "A result line belongs to no row of the batch.", f"{_BATCH} file_kind line reason"),
        (
            "line_duplicate",
            "A row has a second result line; the first counts.",
            f"{_BATCH} file_kind line {_PART} offset",
        ),
        ("status_unknown", "The provider reports a status that nobody told us about.", f"{_BATCH} account status"),
        (
            "outcome_too_large",
            "An answer is larger than the output topic takes.",
            f"{_BATCH} {_PART} offset bytes limit_bytes kept_at",
        ),
        ("consumption_paused", "The input is not read for now.", "partitions reason spool_bytes indexed_rows"),
        ("provider_call_failed", "A call to the provider did not succeed.", f"{_BATCH} {_CALL}"),
        ("provider_throttled", "The provider asked for fewer calls.", f"account call retry_after_s {_BATCH}"),
        (
            "provider_file_left",
            "A file at the provider could not be deleted; it will expire.",
            f"{_BATCH} file_id reason",
        ),
        (
            "archive_failed",
            "A result file could not be kept: its batch waits, or goes on without.",
            f"{_BATCH} file_kind waits",
        ),
        ("settle_failed", "A transaction of outcomes did not commit; it will be made again.", f"{_PART} rows reason"),
        ("kafka_unavailable", "The brokers do not answer.", f"what pause_s {_FAILURE}"),
        ("events_dropped", "The oldest batch events were given up: the broker did not take them.", "records"),
        (
            "store_unavailable",
            "The local disk does not take what is written; the input waits.",
            f"what {_PART} {_FAILURE}",
        ),
        ("clock_skewed", "Our clock and the provider's disagree: no lateness is judged.", "account skew_s limit_s"),
        (
            "batch_not_ours",
            "A batch that was taken for ours has none of our rows: ours is looked for elsewhere.",
            f"{_BATCH} provider_batch_id",
        ),
        (
            "batch_gone",
            "The provider does not know a batch any more: it is looked for once again, else its rows go again.",
            f"{_BATCH} provider_batch_id",
        ),
        (
            "deadline_at_risk",
            "Rows may miss their deadline: nothing faster may take them.",
            f"{_BATCH} {_PART} rows deadline",
        ),
        ("spending_limit_reached", "A route has spent its money of the day.", "route spent_usd"),
        ("canary_off", "A route has more kinds of prompt than it may: its canary is off.", "route shapes"),
        ("possibly_paid_twice", "Rows may have been run by the provider twice.", f"{_BATCH} {_PART} rows reason"),
        ("library_warning", "A library told something odd; its text is left out.", "logger template error left_out"),
        (
            "webhook_refused",
            "A delivery to the webhook address was refused; told once a minute for each reason.",
            "account outcome",
        ),
        (
            "webhook_process_ended",
            "The webhook process has died and will be replaced; what it missed, polls find out.",
            "reason exit_code error where pause_s",
        ),
        ("api_failed", "A question to the admin address or a delivery could not be answered.", f"route {_FAILURE}"),
        ("read_position_failed", "The read position could not be committed.", _FAILURE),
        ("stop_unfinished", "The stop budget ended before the work did; a restart takes it up.", "what budget_s"),
    ),
    Level.ERROR: (
        ("gate_refused", "A start-up check forbids the start.", "gate topic finding remedy"),
        (
            "ledger_record_unreadable",
            "A record of the ledger or control topic makes no sense.",
            f"topic {_PART} offset",
        ),
        ("mailbox_overflowed", "A batch has more news waiting than it may; the oldest was kept.", f"{_BATCH} state"),
        ("partition_refused", "A ledger contradicts itself or the input, or is too new.", f"{_PART} reason remedy"),
        ("account_unknown", "A batch of ours belongs to an account that the settings lack.", f"{_BATCH} account"),
        (
            "batch_quarantined",
            "Our own bug met a batch; its rows stay in the ledger.",
            f"{_BATCH} state news why history {_FAILURE}",
        ),
        ("effect_failed", "A step of a batch ended by a bug; the batch is set aside.", f"{_BATCH} effect {_FAILURE}"),
        ("batch_failed_whole", "The provider refused a whole batch.", f"{_BATCH} provider_batch_id codes lines rows"),
        ("watchdog_complaint", "A part of the process is stuck; liveness fails.", "complaint"),
        ("deadline_missed", "Outcomes were committed after their deadline.", f"{_BATCH} {_PART} rows worst_s route"),
        ("input_lost", "The input topic deleted records before they were answered.", f"topic {_PART} rows first last"),
        (
            "input_expiring",
            "Records that no provider had became failures, because the input topic would soon delete them.",
            f"topic {_PART} rows first last",
        ),
        ("retention_near", "The input topic will soon delete records that wait.", f"topic {_PART} headroom_s"),
        ("task_failed", "A task ended by a bug; what it served is restarted or stopped.", f"task {_PART} {_FAILURE}"),
        (
            "webhook_process_failing",
            "The webhook process dies again and again: no delivery is taken meanwhile.",
            "ends",
        ),
        (
            "webhooks_all_refused",
            "No delivery to an account's webhook address is taken any more: see its secret, clock and field names.",
            "account outcome refused quiet_s",
        ),
        ("alarm", "Something needs an operator.", f"what scope reason {_PART} {_BATCH} rows codes"),
        ("library_error", "A library told of an error; its text is left out.", "logger template error left_out"),
    ),
}

EVENTS: Mapping[str, EventSpec] = {
    name: EventSpec(name, level, text, frozenset(fields.split()))
    for level, rows in _EVENTS.items()
    for name, text, fields in rows
}


# ------------------------------------------------------------------------------------------ metrics


def _metric(
    kind: Kind, name: str, text: str, labels: Iterable[str] = (), buckets: tuple[float, ...] = ()
) -> MetricSpec:
    """``labels`` as ``"call"`` (free, bounded in number) or ``"lane=batch|sync"`` (these values only)."""
    parsed = (label.partition("=") for label in labels)
    return MetricSpec(
        name,
        kind,
        text,
        {key: frozenset(values.split("|")) if values else frozenset() for key, _, values in parsed},
        buckets,
    )


def _count(name: str, text: str, *labels: str) -> MetricSpec:
    return _metric(Kind.COUNTER, name, text, labels)


def _gauge(name: str, text: str, *labels: str) -> MetricSpec:
    return _metric(Kind.GAUGE, name, text, labels)


def _spread(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> MetricSpec:
    return _metric(Kind.HISTOGRAM, name, text, labels, buckets)


_METRICS = (
    # what waits
    _gauge("backlog_records", "Input offsets not read yet, over our partitions."),
    _gauge("unsettled_records", "Records read or in flight without an outcome, over our partitions."),
    _gauge("oldest_unsettled_age_seconds", "Age of the oldest record without an outcome."),
    _gauge("retention_headroom_seconds", "Time until the input topic may delete the oldest record without an outcome."),
    _gauge("partitions", "Partitions of ours by state.", "state=restoring|ready|refused"),
    _gauge("open_keys", "Batch keys that gather rows."),
    _gauge("open_rows", "Rows gathering for a batch."),
    _gauge("next_ship_by_seconds", "Time until the next open batch must leave; negative: overdue; 0: none is open."),
    _gauge("batches", "Batches by state.", "state"),
    _gauge("provider_files", "Files at the provider by its own lists, as the last sweep saw them.", "account"),
    _gauge("held_keys", "Batch keys and accounts on hold.", "reason"),
    _gauge("waiting_rows", "Rows waiting for another submission."),
    # what goes through
    _count("records", "Records by outcome.", "outcome=succeeded|failed|review|split"),
    _count("records_read", "Records read from the input; those read again after a restore too."),
    _count("record_bytes", "Bytes of records read from the input."),
    _count("rows", "Rows by the class of their end.", "class"),
    _count("rows_flagged", "Answers with a flag.", "flag"),
    _count("masked_places", "Places masked in requests, each reading of a request counted.", "rule"),
    _count("bad_records", "Input records that break a rule.", "rule"),
    _count("duplicate_records", "Requests that came again while the first one waited."),
    _count("deadlines", "Outcomes by whether they were in time.", "met=yes|no"),
    _spread("record_wait_seconds", "Wait of the oldest row of a batch until its sealing.", HOUR_BUCKETS),
    _spread("record_turnaround_seconds", "From the beginning of the wait to the outcome, of three rows a chunk.",
            HOUR_BUCKETS),
    _spread("batch_turnaround_seconds", "From the create to the provider's end of a batch.", HOUR_BUCKETS, "account"),
    _count("batches_sealed", "Batches sealed, by reason.", "reason"),
    _count("batches_ended", "Batches by the provider's last status; dissolved: none was made of it.", "status"),
    _spread("batch_rows", "Rows of a sealed batch.", ROW_BUCKETS),
    _spread("batch_bytes", "Bytes of a sealed batch.", BYTE_BUCKETS),
    _count("rows_retried", "Rows that wait for another submission.", "class"),
    _count("rows_split", "Rows that were cut into parts."),
    _count("unknown_row_codes", "Rows judged by a code that no table knows.", "account"),
    _count("late_rows", "Rows that no batch could bring home in time when first read.",
           "policy=sync|batch|fail|no_lane"),
    _count("missing_max_tokens", "Requests that do not bound their answer's tokens."),
    _count("waves", "Waves of the sync lane.", "reason"),
    _count("sync_calls", "Calls of the sync lane, by the class of their row.", "account", "outcome"),
    _count("sync_lane_refused", "Rows that the sync lane had no room for.", "reason=budget"),
    _count("rows_rescued", "Rows taken out of a batch or a wait that would be too late.", "reason=rescue|late"),
    _count("waste_rows", "Answers of rows that the other lane had answered already.", "lane=batch|sync"),
    _count("deadlines_at_risk", "Rows whose deadline nothing can be done for."),
    _count("canaries", "Verdicts on kinds of prompt.", "verdict=good|bad"),
    _gauge("sync_waiting_rows", "Rows that wait for the sync lane."),
    _gauge("canary_waiting_rows", "Rows that wait for a canary's verdict."),
    _gauge("sync_concurrency", "Calls that the sync lane allows itself now.", "account"),
    _gauge("sync_breaker_is_open", "1 while the sync lane makes no calls.", "account"),
    _gauge("waiting_lots", "Lots whose rows wait for another submission."),
    _gauge("token_limit", "Enqueued tokens that refusals have taught, when last learned.", "account"),
    _gauge("spent_today_usd", "What a route with a spending limit has spent today (UTC), by estimate.", "route"),
    _count("news_ignored", "Late or repeated news about batches."),
    # answers
    _count("result_lines", "Result lines by what they were; a file that is read again counts again.",
           "kind=matched|duplicate|sibling|foreign|unreadable"),
    _count("missing_rows", "Submitted rows in no result file."),
    _count("possibly_paid_twice_rows", "Rows the provider may have run twice."),
    _count("orphans_found", "Batches and files of ours that no ledger names, when first seen.",
           "kind=batch|twin|file"),
    _count("orphans_cleared", "What was done about them.", "act=cancelled|collected|file_deleted"),
    _count("orphan_waste_rows", "Rows that collected orphans had run."),
    _gauge("orphan_suspects", "Batches and files of ours that no ledger names, as the last search saw them."),
    _count("sweeps", "Searches for orphans, an account each.", "outcome=done|unfinished"),
    _count("outcomes_too_large", "Answers larger than the output topic takes."),
    _count("events_dropped", "Batch events that the broker did not take for so long that others took their place."),
    _count("tokens", "Tokens by kind, as the provider counted them.", "kind=input|output|cached"),
    # Kafka
    _spread("settle_transaction_seconds", "A transaction of outcomes, from begin to commit.", MIXED_BUCKETS),
    _spread("settle_transaction_rows", "Outcomes of one transaction.", ROW_BUCKETS),
    _count("transactions", "Transactions committed, by what they were for.",
           "purpose=claim|submitting|submitted|settle|land|dissolve|hold|clean|refresh|tidy|ledger"),
    _count("transactions_failed", "Transactions that did not commit.", "reason"),
    _count("partitions_fenced", "Partitions taken by a newer owner."),
    _count("rebalances", "Generations of the group that we have seen."),
    _spread("restore_seconds", "From a partition's assignment until it can settle.", MIXED_BUCKETS),
    _gauge("settle_queue_rows", "Outcomes waiting for a transaction."),
    _count("read_position_failures", "Read positions that could not be committed."),
    # provider
    _count("provider_calls", "Calls: ok, the kind of failure, cut_off by us, broke.", "account", "call", "outcome"),
    _spread("provider_call_seconds", "Duration of calls.", MIXED_BUCKETS, "call"),
    _count("provider_throttled", "Answers that asked for fewer calls.", "account"),
    _count("polls", "Polls by how a batch's state was learned.", "how=single|list"),
    _gauge("poll_overdue_seconds", "How late the most overdue poll is, whatever holds it up."),
    _count("upload_bytes", "Bytes sent as batch files."),
    _count("download_bytes", "Bytes of result files."),
    _gauge("clock_skew_seconds", "Provider's clock minus ours.", "account"),
    # bounds
    _gauge("spool_bytes", "Bytes of waiting lines on disk."),
    _gauge("indexed_rows", "Rows in the local index."),
    _gauge("consumption_is_paused", "1 while the input is not read."),
    _gauge("bound_used", "How much of a bound is used, in the unit that ends its name.", "bound"),
    _gauge("bound_limit", "Where the bound is.", "bound"),
    _gauge("event_loop_lag_seconds", "How late the event loop runs what is due."),
    # trouble
    _count("alarms", "Alarms raised.", "what"),
    _gauge("watchdog_complaints", "What the watchdog finds wrong now."),
    _count("tasks_failed", "Tasks that ended by a bug.", "task"),
    _count("effects_failed", "Steps of batches that ended by a bug.", "effect"),
    _count("quarantined_batches", "Batches that our own bug has met."),
    _count("input_lost_records", "Records the input topic deleted before they were answered."),
    _count("input_expiring_records", "Records given up because the input topic would soon delete them."),
    _count("library_errors", "Errors that libraries told of.", "logger"),
    _count("http_requests", "Questions to the admin address and deliveries to the webhook address.", "route", "status"),
    _count("webhooks_received", "Deliveries to the webhook address by what became of them.", "account", "outcome"),
    _gauge("webhooks_refused_in_a_row", "Deliveries refused since one was last taken.", "account"),
    _gauge("webhook_process_is_up", "1 while the webhook process answers."),
    _count("webhook_process_ends", "Deaths of the webhook process."),
    _gauge("started_timestamp_seconds", "When the process started, seconds since the epoch."),
    _gauge("build", "1, with the version.", "version"),
)  # fmt: skip

METRICS: Mapping[str, MetricSpec] = {spec.name: spec for spec in _METRICS}


# -------------------------------------------------------------------------------------------- spans

_SEMCONV = (
    "messaging.system messaging.operation.name messaging.operation.type messaging.destination.name"
    " messaging.destination.partition.id messaging.consumer.group.name messaging.batch.message_count"
    " error.type server.address"
)
_TIMES = "started_at ended_at"
_SPAN_BATCH = "batch_id provider_batch_id account endpoint model rows bytes status"

SPANS: Mapping[str, SpanSpec] = {
    name: SpanSpec(name, text, frozenset(f"{attributes} {_TIMES} {_SEMCONV}".split()))
    for name, text, attributes in (
        ("batch", "A batch from its sealing to its landing, linked to the requests in it.",
         f"{_SPAN_BATCH} reason succeeded failed missing"),
        ("batch upload", "Sending the file.", _SPAN_BATCH),
        ("batch land", "Reading the results and publishing the outcomes.", f"{_SPAN_BATCH} succeeded failed"),
        ("settle", "One transaction of outcomes.", "partition rows bytes"),
        ("restore", "Reading a partition's ledger.", "partition records"),
    )
}  # fmt: skip
