"""The batch machine: what each piece of news means for a batch. This file decides, and does nothing.

Theory of operation
-------------------
There is one machine, run once for every batch that this process has a part in. Its input is an *event*
(something happened, past tense), its output is the next batch and a list of *effects* (something to do,
imperative). Every effect answers with an event, also when it did not succeed: an exception is a bug, a
timeout is news.

``RULES`` is the whole truth: (state, event) -> rule. A pair under ``IGNORED`` is late or repeated news (a webhook
and a poll tell the same story) and is dropped on purpose. Any other pair is illegal: that one batch is
quarantined with its history, the service goes on.

What is durable is not here. The lots in the ledger (SUBMITTING, SUBMITTED, DONE, CLEAN) are the skeleton; the
finer states below can be found again by asking the provider, which is why a start and a crash are the same thing:
a lot found SUBMITTING enters in ``submission_unknown``, a lot found SUBMITTED in ``validating``, one found DONE in
``landed``.

Three rules are worth knowing before reading the table:

* *Create is never repeated blindly.* An unclear answer leads to ``submission_unknown``, where the provider and the
  sibling lots are asked; a definite refusal leads to ``refused``, where the ledger is written again before
  another create.
* *Every terminal status of the provider leads to* ``landing``, because rows may have finished in all of them.
* *Counters and statuses never end a batch*; only result files that have been read do.

Durations are seconds, instants aware UTC.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum

from batchferry.domain.batchkey import BatchKey
from batchferry.domain.errors import IllegalTransition
from batchferry.domain.ids import BatchId, FileId, ProviderBatchId
from batchferry.domain.provider import BatchSnapshot, CallFailed, CallFailure, ProviderStatus, RequestCounts


class BatchState(StrEnum):
    """Where a batch is."""

    SEALED = "sealed"
    """Closed, waiting to be admitted (holds, the provider's quota). Ends by admission."""
    UPLOADING = "uploading"
    """The file is on its way. Ends with the provider's file id, or back in ``sealed`` after a pause."""
    SUBMITTING = "submitting"
    """The ledger says that a batch may exist from now on; then the one create call. Ends with its answer."""
    SUBMISSION_UNKNOWN = "submission_unknown"
    """A create may have been carried out. Ends when the batch is found, or proven absent twice."""
    REFUSED = "refused"
    """The provider said no and nothing exists. Ends with another create of the same file, or by dissolving."""
    VALIDATING = "validating"
    """The provider reads the file (or we have not asked yet). Ends by a poll. Warned about after 5 min."""
    IN_PROGRESS = "in_progress"
    """Rows are running. Ends by a poll; past the window and a grace it is cancelled."""
    FINALIZING = "finalizing"
    """Rows are done, files are being written. Ends by a poll. Warned about after 1 h."""
    CANCELLING = "cancelling"
    """Asked to stop; rows in flight may still finish. Ends by a poll. Warned about after 15 min."""
    LANDING = "landing"
    """The provider is done, whatever its status; result files are read and rows settled."""
    LANDED = "landed"
    """Every row of ours is settled or waits for another submission. Left: deleting the provider's files."""
    DISSOLVED = "dissolved"
    """Given up before anything existed at the provider; its rows wait for another batch. The end."""
    QUARANTINED = "quarantined"
    """Our own bug met this batch. Its rows stay in the ledger; an operator or a restart takes it up. The end."""


FORBIDDEN = 403
INLINE = FileId("inline")
"""Stands for the input file of a batch whose rows travel in the create itself."""
MAX_DISOWNED = 16
"""Provider batches that a batch remembers to have given back, the last ones: answers about them may still come."""
GONE_GRACE_S = 3600.0
"""So long a batch must not have been found, every time it was asked for, before it is taken for deleted. Providers
answer 404 for minutes after a create."""
WINDOW_PASSED = "window_passed"
"""Why a batch is cancelled that outlasted its completion window and the grace."""
IN_FLIGHT = frozenset({BatchState.VALIDATING, BatchState.IN_PROGRESS, BatchState.FINALIZING, BatchState.CANCELLING})
FINAL = frozenset({BatchState.DISSOLVED, BatchState.QUARANTINED})

_STATE_OF_STATUS: Mapping[ProviderStatus, BatchState] = {
    ProviderStatus.VALIDATING: BatchState.VALIDATING,
    ProviderStatus.IN_PROGRESS: BatchState.IN_PROGRESS,
    ProviderStatus.FINALIZING: BatchState.FINALIZING,
    ProviderStatus.CANCELLING: BatchState.CANCELLING,
}


@dataclass(frozen=True, slots=True)
class MachineSettings:
    """The machine's numbers; each has its reason beside it."""

    poll_first_s: float = 10.0
    """Before the first poll: validation takes seconds for small files,"""
    poll_first_per_1000_rows_s: float = 2.0
    """and longer for large ones: 25,000 rows are first asked for after a minute."""
    poll_factor: float = 1.5
    poll_max_s: float = 300.0
    """The cap is part of what the route's margin must hold."""
    poll_stretch: float = 1.0
    """Polls are so many times rarer while webhooks prove to arrive (``WebhookTrust.stretch``)."""
    poll_floor_s: float = 10.0
    """Never faster, also in ``finalizing`` and after a webhook: providers limit calls, and hours are in play."""
    poll_finalizing_s: float = 30.0
    """Files are being written: the end is near, so polls come closer again."""
    upload_pause_first_s: float = 5.0
    upload_pause_max_s: float = 300.0
    file_reuse_s: float = 600.0
    """How long a refused file is offered again before its rows are dissolved."""
    recreate_pause_s: float = 5.0
    lookup_pause_s: float = 60.0
    """Between two looks for a batch: listings lag behind creates."""
    landing_pause_s: float = 60.0
    """Between two complete readings that must agree before a row is called missing."""
    missing_grace_s: float = 900.0
    """How long an incomplete or unreadable result is waited for."""
    window_grace_s: float = 1800.0
    """Past the completion window by this much the batch is cancelled and its partial results are landed."""
    validating_slow_s: float = 300.0
    finalizing_slow_s: float = 3600.0
    cancelling_slow_s: float = 900.0
    gone_grace_s: float = GONE_GRACE_S
    clean_pause_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch as this process knows it."""

    batch_id: BatchId
    key: BatchKey
    partitions: tuple[int, ...]
    rows: int
    window_s: float
    sealed_at: datetime
    state: BatchState
    state_since: datetime
    input_file_id: FileId | None = None
    provider_batch_id: ProviderBatchId | None = None
    provider_status: str = ""
    """The provider's last status in its own spelling."""
    counts: RequestCounts = field(default_factory=RequestCounts)
    snapshot: BatchSnapshot | None = None
    submitted_at: datetime | None = None
    ended_at: datetime | None = None
    asked_at: datetime | None = None
    """When the provider was last asked about it; the floor between two polls counts from here."""
    next_poll_at: datetime | None = None
    """In ``landing`` it is None exactly while a reading runs: two at once would share their files."""
    poll_interval_s: float = 0.0
    tries: int = 0
    """Consecutive failures of what the current state tries."""
    first_create_at: datetime | None = None
    cancel_reason: str = ""
    warned: bool = False
    landing_since: datetime | None = None
    unseen_since: datetime | None = None
    """The first of the polls in a row that did not find it."""
    disowned: tuple[ProviderBatchId, ...] = ()
    """Provider batches that were taken for this one and were given back; at most ``MAX_DISOWNED``."""
    is_clean: bool = False

    @property
    def is_inline(self) -> bool:
        """Whether its rows travel in the create itself: there is no file, and so no fence against a late create."""
        return self.input_file_id == INLINE

    @property
    def window_ends_at(self) -> datetime | None:
        """When the completion window closes; None before submission."""
        return None if self.submitted_at is None else self.submitted_at + timedelta(seconds=self.window_s)


# ------------------------------------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True)
class Event:
    """Something happened."""


@dataclass(frozen=True, slots=True)
class Admitted(Event):
    """No hold stands and the quota has room."""


@dataclass(frozen=True, slots=True)
class HeldBack(Event):
    """A hold stands: the rows are better kept as offsets in the ledger than as lines on the disk."""


@dataclass(frozen=True, slots=True)
class InputUploaded(Event):
    """The provider holds the file."""

    file_id: FileId


@dataclass(frozen=True, slots=True)
class UploadFailed(Event):
    """The file did not get there; the adapter's own repeats are used up."""

    failure: CallFailed


@dataclass(frozen=True, slots=True)
class InputUnusable(Event):
    """A lot left this process before anything was recorded: the file would name rows that are not ours."""


@dataclass(frozen=True, slots=True)
class SubmittingRecorded(Event):
    """Every lot is SUBMITTING in the ledger."""


@dataclass(frozen=True, slots=True)
class SubmittingRefused(Event):
    """A lot's transaction failed (the partition has moved): nothing may be created from this file."""


@dataclass(frozen=True, slots=True)
class CreateAccepted(Event):
    """The provider batch exists."""

    snapshot: BatchSnapshot


@dataclass(frozen=True, slots=True)
class CreateRefused(Event):
    """A definite no with the provider's own error body: nothing was created."""

    failure: CallFailed


@dataclass(frozen=True, slots=True)
class CreateNotSent(Event):
    """The time to live of the SUBMITTING record ran out, or no connection could be made, before the call."""


@dataclass(frozen=True, slots=True)
class CreateUnanswered(Event):
    """The call was sent and no clear answer came."""

    failure: CallFailed


@dataclass(frozen=True, slots=True)
class RecreateDue(Event):
    """The pause after a refusal is over."""


@dataclass(frozen=True, slots=True)
class BatchFound(Event):
    """A provider batch that is ours was found: recorded by a sibling, or listed."""

    snapshot: BatchSnapshot


@dataclass(frozen=True, slots=True)
class BatchNotFound(Event):
    """Neither a sibling nor a complete listing knows a batch of ours. ``is_final``: also after the file was deleted."""

    is_final: bool


@dataclass(frozen=True, slots=True)
class LookUpFailed(Event):
    """The question could not be answered now."""

    failure: CallFailed | None = None


@dataclass(frozen=True, slots=True)
class InputDeleted(Event):
    """The provider confirmed that the input file is gone: a late create must fail."""


@dataclass(frozen=True, slots=True)
class InputNotDeleted(Event):
    """The provider did not confirm it."""

    failure: CallFailed


@dataclass(frozen=True, slots=True)
class SubmittedRecorded(Event):
    """Every lot of ours is SUBMITTED in the ledger."""


@dataclass(frozen=True, slots=True)
class RowsHandedOn(Event):
    """Every row of ours is in a waiting lot, or back among the open ones."""


@dataclass(frozen=True, slots=True)
class PollAnswered(Event):
    """The provider showed the batch."""

    snapshot: BatchSnapshot


@dataclass(frozen=True, slots=True)
class PollFailed(Event):
    """The provider did not show the batch."""

    failure: CallFailed


@dataclass(frozen=True, slots=True)
class Poked(Event):
    """Somebody says that there is news (a webhook, an operator)."""


@dataclass(frozen=True, slots=True)
class CancelWanted(Event):
    """An operator, or a deadline, wants the batch stopped."""

    reason: str


@dataclass(frozen=True, slots=True)
class CancelAnswered(Event):
    """The provider took the cancel call."""

    snapshot: BatchSnapshot


@dataclass(frozen=True, slots=True)
class CancelFailed(Event):
    """The provider did not take it; CONFLICT means that the batch had already ended."""

    failure: CallFailed


@dataclass(frozen=True, slots=True)
class LotGained(Event):
    """A rebalance gave this process another partition of the batch."""


@dataclass(frozen=True, slots=True)
class ResultsRead(Event):
    """The result files were read to the end and all our lots are DONE."""


@dataclass(frozen=True, slots=True)
class ResultsIncomplete(Event):
    """The files say less than they should: fewer lines than counts, null ids, or rows absent for the first time."""

    reason: str


@dataclass(frozen=True, slots=True)
class ResultsUnavailable(Event):
    """A result file could not be fetched."""

    failure: CallFailed


@dataclass(frozen=True, slots=True)
class ResultsNotOurs(Event):
    """Not one line is of a row of ours: the batch was only taken for ours."""


@dataclass(frozen=True, slots=True)
class Disowned(Event):
    """No lot of ours names the provider batch any more.

    ``is_over``: none waits for one either. All have landed, or have handed their rows on.
    """

    is_over: bool = False


@dataclass(frozen=True, slots=True)
class CleanedUp(Event):
    """Our lots are CLEAN."""


@dataclass(frozen=True, slots=True)
class CleanUpWaits(Event):
    """Another owner is not DONE yet, or the provider did not confirm a deletion."""


# ----------------------------------------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Effect:
    """Something to do. ``after_s`` is waited first."""

    after_s: float = field(default=0.0, kw_only=True)


@dataclass(frozen=True, slots=True)
class Admit(Effect):
    """Wait for room. Answers Admitted, HeldBack or InputUnusable. Twice is harmless: nothing is written."""


@dataclass(frozen=True, slots=True)
class UploadInput(Effect):
    """Stream the file. Answers InputUploaded, UploadFailed or InputUnusable. Twice leaves a file that expires."""


@dataclass(frozen=True, slots=True)
class RecordSubmitting(Effect):
    """Write SUBMITTING in every lot. Answers SubmittingRecorded or SubmittingRefused. A state, so twice is once."""

    file_id: FileId


@dataclass(frozen=True, slots=True)
class CreateBatch(Effect):
    """The one create call. Answers CreateAccepted, -Refused, -NotSent or -Unanswered. Twice is *not* harmless."""

    file_id: FileId


@dataclass(frozen=True, slots=True)
class OfferAgain(Effect):
    """After the pause, the same file is offered again. Answers RecreateDue."""


@dataclass(frozen=True, slots=True)
class LookUpBatch(Effect):
    """Ask siblings and the provider's list. Answers BatchFound, BatchNotFound or LookUpFailed."""

    is_final: bool = False


@dataclass(frozen=True, slots=True)
class DeleteInput(Effect):
    """Delete the input file. Answers InputDeleted (also when it was gone) or InputNotDeleted."""


@dataclass(frozen=True, slots=True)
class RecordSubmitted(Effect):
    """Write the provider's ids in every lot of ours. Answers SubmittedRecorded. A state, so twice is once."""

    snapshot: BatchSnapshot


@dataclass(frozen=True, slots=True)
class HandRowsOn(Effect):
    """Dissolve our lots into waiting ones (or reopen rows no record names). Answers RowsHandedOn.

    After a search for the batch also LookUpFailed (a lot that came meanwhile knows of one), or Disowned where lots are
    left that have landed and are to be cleaned up.
    """

    reason: str
    hold: str = ""
    """Hold the account (``account``) or the batch key (``key``) first; empty: neither."""
    halve: bool = False
    """The batch was refused for its size: its rows go on in batches of at most half as many."""
    refused_row: int | None = None
    """0-based row for whose sake the batch was refused: it fails, the others go on."""
    failure: CallFailed | None = None
    """What was said of it."""


@dataclass(frozen=True, slots=True)
class PollAt(Effect):
    """Ask for the batch at this instant (the scheduler adds jitter and obeys the account). Replaces an earlier one.

    Answers PollFailed by itself when nobody knows what the provider calls the batch.
    """

    at: datetime


@dataclass(frozen=True, slots=True)
class CancelBatch(Effect):
    """Cancel at the provider, if we lead the batch or its leader has not for two minutes. Twice is harmless."""

    reason: str


@dataclass(frozen=True, slots=True)
class LandResults(Effect):
    """Read the result files and settle our rows. Answers ResultsRead, -Incomplete or -Unavailable.

    Lots of ours that do not have the provider's id yet get it first.
    ``is_last_chance``: absence is now taken at its word. Twice is harmless: settled rows are skipped.
    """

    snapshot: BatchSnapshot
    is_last_chance: bool = False


@dataclass(frozen=True, slots=True)
class DisownBatch(Effect):
    """Write our lots that name this provider batch as they were before anything was known of it: gone, or not ours.

    Answers Disowned. A state, so twice is once.
    """

    provider_batch_id: ProviderBatchId


@dataclass(frozen=True, slots=True)
class CleanUp(Effect):
    """Delete the provider's files once every owner is DONE; write CLEAN. Answers CleanedUp or CleanUpWaits."""


@dataclass(frozen=True, slots=True)
class WarnSlow(Effect):
    """Tell an operator that the state lasts long. Answers nothing."""

    state: BatchState
    age_s: float


@dataclass(frozen=True, slots=True)
class Hold(Effect):
    """Keep the account (``account``) or batch key (``key``) from submitting for a while. Answers nothing."""

    scope: str
    reason: str


# ------------------------------------------------------------------------------------------------- table

Rule = Callable[..., "Transition"]
"""(batch, event, now, settings) -> Transition; each rule names the one event class it reads."""


@dataclass(frozen=True, slots=True)
class Transition:
    """The decision: the batch from now on, and what to do."""

    batch: Batch
    effects: tuple[Effect, ...] = ()
    is_ignored: bool = False


@dataclass(frozen=True, slots=True)
class RuleEntry:
    """A rule and the states it may lead to besides the one it starts in, for the diagram and the property test."""

    rule: Rule
    targets: frozenset[BatchState]


RULES: dict[tuple[BatchState, type[Event]], RuleEntry] = {}
IGNORED: set[tuple[BatchState, type[Event]]] = set()

S = BatchState


def transition(batch: Batch, event: Event, now: datetime, settings: MachineSettings) -> Transition:
    """Decide what ``event`` means for ``batch``.

    Raises:
        IllegalTransition: there is no rule for this state and event, not even "ignore".
    """
    pair = (batch.state, type(event))
    entry = RULES.get(pair)
    if entry is not None:
        return entry.rule(batch, event, now, settings)
    if pair in IGNORED:
        return Transition(batch, is_ignored=True)
    raise IllegalTransition(batch.batch_id, batch.state, type(event).__name__)


def begin(batch: Batch, now: datetime, settings: MachineSettings) -> tuple[Effect, ...]:
    """The effects of a batch that enters in its present state: newly sealed, or restored from its lots."""
    match batch.state:
        case S.SEALED:
            return (Admit(),)
        case S.SUBMISSION_UNKNOWN:
            return (LookUpBatch(),)
        case S.VALIDATING:
            return (PollAt(now),)
        case S.LANDED:
            return (CleanUp(after_s=settings.poll_floor_s),)
        case _:
            raise IllegalTransition(batch.batch_id, batch.state, "begin")


def _on(
    states: BatchState | tuple[BatchState, ...], event: type[Event], to: tuple[BatchState, ...] = ()
) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        for state in states if isinstance(states, tuple) else (states,):
            RULES[state, event] = RuleEntry(rule, frozenset(to) - {state})
        return rule

    return register


def _ignore(states: tuple[BatchState, ...], *events: type[Event]) -> None:
    IGNORED.update((state, event) for state in states for event in events)


def _enter(batch: Batch, state: BatchState, now: datetime, **changes: object) -> Batch:
    if state is batch.state:
        return replace(batch, **changes)  # type: ignore[arg-type]
    return replace(batch, state=state, state_since=now, warned=False, **{"tries": 0, **changes})  # type: ignore[arg-type]


def _growing(first_s: float, factor: float, max_s: float, tries: int) -> float:
    return min(max_s, first_s * factor ** min(tries, 60))


# -- before the provider knows of the batch


@_on(S.SEALED, Admitted, to=(S.UPLOADING,))
def _admitted(batch: Batch, _event: Event, now: datetime, _settings: MachineSettings) -> Transition:
    return Transition(_enter(batch, S.UPLOADING, now, tries=batch.tries), (UploadInput(),))


@_on(S.SEALED, HeldBack, to=(S.REFUSED,))
def _held_back(batch: Batch, _event: Event, now: datetime, _settings: MachineSettings) -> Transition:
    """One held account must not fill the disk of all: its rows wait as lots, and are read again at the release."""
    return Transition(_enter(batch, S.REFUSED, now), (HandRowsOn("held"),))


@_on((S.SEALED, S.UPLOADING), InputUnusable, to=(S.REFUSED,))
def _unusable(batch: Batch, _event: Event, now: datetime, _settings: MachineSettings) -> Transition:
    return Transition(_enter(batch, S.REFUSED, now), (HandRowsOn("partition_moved"),))


@_on(S.REFUSED, InputUploaded)
def _uploaded_for_nothing(batch: Batch, event: InputUploaded, _now: datetime, _settings: MachineSettings) -> Transition:
    """The upload was under way when a partition moved: its file names rows that are not ours any more."""
    return Transition(replace(batch, input_file_id=event.file_id), (DeleteInput(),))


@_on(S.UPLOADING, InputUploaded, to=(S.SUBMITTING,))
def _uploaded(batch: Batch, event: InputUploaded, now: datetime, _settings: MachineSettings) -> Transition:
    moved = _enter(batch, S.SUBMITTING, now, input_file_id=event.file_id, first_create_at=now)
    return Transition(moved, (RecordSubmitting(event.file_id),))


@_on(S.UPLOADING, UploadFailed, to=(S.SEALED, S.REFUSED))
def _upload_failed(batch: Batch, event: UploadFailed, now: datetime, settings: MachineSettings) -> Transition:
    """Nothing of the batch is durable yet: it goes back to the quay and asks again, later each time."""
    failure = event.failure
    if failure.is_too_large and batch.rows > 1:
        return Transition(_enter(batch, S.REFUSED, now), (HandRowsOn("too_large", halve=True),))
    pause_s = _growing(settings.upload_pause_first_s, 2.0, settings.upload_pause_max_s, batch.tries)
    effects: tuple[Effect, ...] = (Admit(after_s=max(pause_s, failure.retry_after_s or 0.0)),)
    if failure.kind is CallFailure.ACCOUNT:
        effects = (Hold("account", failure.kind.value), *effects)
    elif failure.kind is CallFailure.REJECTED:
        effects = (Hold("key", "upload_rejected"), *effects)
    return Transition(_enter(batch, S.SEALED, now, tries=batch.tries + 1), effects)


@_on(S.SUBMITTING, SubmittingRecorded)
def _may_create(batch: Batch, _event: Event, _now: datetime, _settings: MachineSettings) -> Transition:
    assert batch.input_file_id is not None
    return Transition(batch, (CreateBatch(batch.input_file_id),))


@_on(S.SUBMITTING, SubmittingRefused, to=(S.REFUSED,))
def _fenced_before_create(batch: Batch, _event: Event, now: datetime, _settings: MachineSettings) -> Transition:
    """We know that nothing was created: the file goes, and so do the lots that were already recorded."""
    return Transition(_enter(batch, S.REFUSED, now), (DeleteInput(), HandRowsOn("partition_moved")))


@_on(S.SUBMITTING, CreateAccepted, to=(S.VALIDATING,))
def _accepted(batch: Batch, event: CreateAccepted, now: datetime, settings: MachineSettings) -> Transition:
    return _submitted(batch, event.snapshot, now, settings)


@_on((S.SUBMITTING,), CreateRefused, to=(S.REFUSED,))
def _refused(batch: Batch, event: CreateRefused, now: datetime, settings: MachineSettings) -> Transition:
    """A definite no costs nothing. The same file is offered again for a while; then the rows are dissolved."""
    failure = event.failure
    refused = _enter(batch, S.REFUSED, now, tries=batch.tries + 1)
    since = batch.first_create_at or now
    pause_s = max(_growing(settings.recreate_pause_s, 2.0, 120.0, batch.tries), failure.retry_after_s or 0.0)
    if failure.kind is CallFailure.ACCOUNT:
        return Transition(refused, (DeleteInput(), HandRowsOn("account", hold="account")))
    if failure.row is not None and failure.row < batch.rows:
        named = HandRowsOn("row_refused", refused_row=failure.row, failure=failure)
        return Transition(refused, (DeleteInput(), named))
    if batch.rows > 1 and (failure.is_too_large or (batch.is_inline and failure.kind is CallFailure.REJECTED)):
        return Transition(refused, (DeleteInput(), HandRowsOn("too_large", halve=True)))
    if now + timedelta(seconds=pause_s) > since + timedelta(seconds=settings.file_reuse_s):
        hold = "" if failure.kind in {CallFailure.THROTTLED, CallFailure.NOT_READY} else "key"
        return Transition(refused, (DeleteInput(), HandRowsOn(f"create_{failure.kind.value}", hold=hold)))
    return Transition(refused, (OfferAgain(after_s=pause_s),))


@_on(S.SUBMITTING, CreateNotSent, to=(S.REFUSED,))
def _not_sent(batch: Batch, _event: Event, now: datetime, settings: MachineSettings) -> Transition:
    refused = _enter(batch, S.REFUSED, now, tries=batch.tries + 1)
    since = batch.first_create_at or now
    pause_s = _growing(settings.recreate_pause_s, 2.0, 120.0, batch.tries)
    if now + timedelta(seconds=pause_s) > since + timedelta(seconds=settings.file_reuse_s):
        return Transition(refused, (DeleteInput(), HandRowsOn("create_unavailable")))
    return Transition(refused, (OfferAgain(after_s=pause_s),))


@_on(S.SUBMITTING, CreateUnanswered, to=(S.SUBMISSION_UNKNOWN,))
def _unanswered(batch: Batch, _event: Event, now: datetime, _settings: MachineSettings) -> Transition:
    return Transition(_enter(batch, S.SUBMISSION_UNKNOWN, now), (LookUpBatch(),))


@_on(S.REFUSED, RecreateDue, to=(S.SUBMITTING,))
def _recreate(batch: Batch, _event: Event, now: datetime, _settings: MachineSettings) -> Transition:
    assert batch.input_file_id is not None
    moved = _enter(batch, S.SUBMITTING, now, tries=batch.tries)
    return Transition(moved, (RecordSubmitting(batch.input_file_id),))


@_on((S.REFUSED, S.SUBMISSION_UNKNOWN), RowsHandedOn, to=(S.DISSOLVED,))
def _dissolved(batch: Batch, _event: Event, now: datetime, _settings: MachineSettings) -> Transition:
    return Transition(_enter(batch, S.DISSOLVED, now))


# -- was it created?


@_on(S.SUBMISSION_UNKNOWN, BatchFound, to=(S.VALIDATING,))
def _found(batch: Batch, event: BatchFound, now: datetime, settings: MachineSettings) -> Transition:
    return _submitted(batch, event.snapshot, now, settings)


@_on(S.SUBMISSION_UNKNOWN, BatchNotFound)
def _not_found(batch: Batch, event: BatchNotFound, _now: datetime, _settings: MachineSettings) -> Transition:
    """The file is deleted before absence is believed, so that a create still under way must fail."""
    if event.is_final:
        return Transition(replace(batch, tries=0), (HandRowsOn("never_created"),))
    return Transition(replace(batch, tries=0), (DeleteInput(),))


@_on(S.SUBMISSION_UNKNOWN, InputDeleted)
def _fenced_at_provider(batch: Batch, _event: Event, _now: datetime, settings: MachineSettings) -> Transition:
    return Transition(replace(batch, tries=0), (LookUpBatch(is_final=True, after_s=settings.lookup_pause_s),))


@_on(S.SUBMISSION_UNKNOWN, InputNotDeleted)
@_on(S.SUBMISSION_UNKNOWN, LookUpFailed)
def _ask_again(batch: Batch, _event: Event, _now: datetime, settings: MachineSettings) -> Transition:
    pause_s = _growing(settings.poll_floor_s, settings.poll_factor, settings.poll_max_s, batch.tries)
    return Transition(replace(batch, tries=batch.tries + 1), (LookUpBatch(after_s=pause_s),))


@_on(S.SUBMISSION_UNKNOWN, Disowned, to=(S.LANDED,))
def _look_elsewhere(batch: Batch, event: Disowned, now: datetime, _settings: MachineSettings) -> Transition:
    """A batch that was deleted after it had been read to its end is wanted by nobody: what it leaves is cleaned up."""
    if event.is_over:
        return Transition(_enter(batch, S.LANDED, now), (CleanUp(),))
    return Transition(replace(batch, tries=0), (LookUpBatch(),))


def _disowned(batch: Batch, now: datetime) -> Transition:
    """What was known of the provider batch is not true of ours: ask anew whether there is one."""
    named = batch.provider_batch_id or (None if batch.snapshot is None else batch.snapshot.provider_batch_id)
    disowned = batch.disowned if named is None else (*batch.disowned[1 - MAX_DISOWNED :], named)
    moved = _enter(
        batch,
        S.SUBMISSION_UNKNOWN,
        now,
        provider_batch_id=None,
        provider_status="",
        counts=RequestCounts(),
        snapshot=None,
        submitted_at=None,
        ended_at=None,
        next_poll_at=None,
        cancel_reason="",
        landing_since=None,
        unseen_since=None,
        disowned=disowned,
    )
    return Transition(moved, (LookUpBatch() if named is None else DisownBatch(named),))


def _submitted(batch: Batch, snapshot: BatchSnapshot, now: datetime, settings: MachineSettings) -> Transition:
    submitted_at = snapshot.created_at or now
    first_s = min(settings.poll_max_s, settings.poll_first_s + batch.rows // 1000 * settings.poll_first_per_1000_rows_s)
    moved = _enter(
        batch,
        S.VALIDATING,
        now,
        provider_batch_id=snapshot.provider_batch_id,
        provider_status=snapshot.raw_status,
        snapshot=snapshot,
        submitted_at=submitted_at,
        poll_interval_s=settings.poll_first_s,
        disowned=tuple(one for one in batch.disowned if one != snapshot.provider_batch_id),  # it may come back
    )
    moved, poll = _next_poll(moved, now, settings, first_s)
    return Transition(moved, (RecordSubmitted(snapshot), poll))


# -- on the water


@_on((S.VALIDATING, S.IN_PROGRESS, S.FINALIZING), PollAnswered, to=(*IN_FLIGHT, S.LANDING))
@_on(S.CANCELLING, PollAnswered, to=(S.LANDING,))
def _polled(batch: Batch, event: PollAnswered, now: datetime, settings: MachineSettings) -> Transition:
    snapshot = event.snapshot
    if _is_anothers(batch, snapshot):
        moved, poll = _next_poll(batch, now, settings, settings.poll_floor_s)
        return Transition(moved, (poll,))
    shown = replace(
        batch,
        snapshot=snapshot,
        provider_status=snapshot.raw_status,
        counts=snapshot.counts,
        provider_batch_id=snapshot.provider_batch_id,
        submitted_at=batch.submitted_at or snapshot.created_at or now,
        tries=0,
        unseen_since=None,
    )
    if snapshot.status.is_terminal:
        landing = _enter(shown, S.LANDING, now, next_poll_at=None, landing_since=now, ended_at=snapshot.ended_at or now)
        return Transition(landing, (LandResults(snapshot),))
    state = _STATE_OF_STATUS.get(snapshot.status, batch.state)
    if batch.state is S.CANCELLING and state is not S.CANCELLING:
        state = S.CANCELLING  # we have asked; the provider's list may lag
    moved = _enter(shown, state, now)
    interval_s = settings.poll_first_s if state is not batch.state else moved.poll_interval_s * settings.poll_factor
    if state is S.FINALIZING:
        interval_s = min(interval_s, settings.poll_finalizing_s)
    decided = _keep_watch(moved, now, settings, interval_s)
    if batch.snapshot is None:  # restored: a lot that came before this poll may not have the provider's id yet
        return replace(decided, effects=(RecordSubmitted(snapshot), *decided.effects))
    return decided


@_on(tuple(IN_FLIGHT), PollFailed, to=(S.CANCELLING, S.SUBMISSION_UNKNOWN))
def _poll_failed(batch: Batch, event: PollFailed, now: datetime, settings: MachineSettings) -> Transition:
    """No single failure proves anything: a 404 may be a listing that lags, a 403 a key being rotated."""
    failure = event.failure
    failed = _unseen(batch, failure, now)
    if _is_gone(failed, now, settings):
        return _disowned(failed, now)
    interval_s = max(batch.poll_interval_s * settings.poll_factor, failure.retry_after_s or 0.0)
    decided = _keep_watch(failed, now, settings, interval_s)
    if failure.kind is CallFailure.ACCOUNT:
        return replace(decided, effects=(Hold("account", failure.kind.value), *decided.effects))
    return decided


def _is_anothers(batch: Batch, snapshot: BatchSnapshot) -> bool:
    """Whether it was asked for before it was given back, and ours is another one by now."""
    current = batch.provider_batch_id
    return current not in {None, snapshot.provider_batch_id} and snapshot.provider_batch_id in batch.disowned


def _unseen(batch: Batch, failure: CallFailed, now: datetime) -> Batch:
    """Any other failure says nothing of the batch, so the time without it begins anew: an outage proves no absence."""
    since = None
    if failure.kind is CallFailure.NOT_FOUND and batch.provider_batch_id is not None:
        since = batch.unseen_since or now
    return replace(batch, tries=batch.tries + 1, unseen_since=since)


def _is_gone(batch: Batch, now: datetime, settings: MachineSettings) -> bool:
    since = batch.unseen_since
    return since is not None and now >= since + timedelta(seconds=settings.gone_grace_s)


def _keep_watch(batch: Batch, now: datetime, settings: MachineSettings, interval_s: float) -> Transition:
    effects: list[Effect] = []
    window_ends_at = batch.window_ends_at
    overdue = window_ends_at is not None and now >= window_ends_at + timedelta(seconds=settings.window_grace_s)
    if overdue and not batch.cancel_reason:
        batch = replace(_enter(batch, S.CANCELLING, now), cancel_reason=WINDOW_PASSED)
        effects.append(CancelBatch(WINDOW_PASSED))
    age_s = (now - batch.state_since).total_seconds()
    slow_s = {
        S.VALIDATING: settings.validating_slow_s,
        S.FINALIZING: settings.finalizing_slow_s,
        S.CANCELLING: settings.cancelling_slow_s,
    }.get(batch.state)
    if slow_s is not None and age_s > slow_s and not batch.warned:
        batch = replace(batch, warned=True)
        effects.append(WarnSlow(batch.state, age_s))
    batch, poll = _next_poll(batch, now, settings, interval_s)
    return Transition(batch, (*effects, poll))


def _next_poll(batch: Batch, now: datetime, settings: MachineSettings, interval_s: float) -> tuple[Batch, PollAt]:
    interval_s = min(max(interval_s, settings.poll_floor_s), settings.poll_max_s)
    # Here and not where the poll is made: a webhook must find the true time of the next poll to bring it forward from.
    at = now + timedelta(seconds=interval_s * settings.poll_stretch)
    ends_at = batch.window_ends_at
    if ends_at is not None and now < ends_at < at:  # a poll is always due when the window ends
        at = max(ends_at, now + timedelta(seconds=settings.poll_floor_s))
    return replace(batch, asked_at=now, next_poll_at=at, poll_interval_s=interval_s), PollAt(at)


@_on(tuple(IN_FLIGHT), Poked)
def _poked(batch: Batch, _event: Event, now: datetime, settings: MachineSettings) -> Transition:
    """Bring the poll forward, never below the floor: a webhook only says where to look."""
    if batch.asked_at is None or batch.next_poll_at is None:
        return Transition(batch)  # just restored: its first poll is under way
    at = max(now, batch.asked_at + timedelta(seconds=settings.poll_floor_s))
    if at >= batch.next_poll_at:
        return Transition(batch)
    return Transition(replace(batch, next_poll_at=at), (PollAt(at),))


@_on(tuple(IN_FLIGHT - {S.CANCELLING}), CancelWanted, to=(S.CANCELLING,))
def _cancel_wanted(batch: Batch, event: CancelWanted, now: datetime, _settings: MachineSettings) -> Transition:
    moved = _enter(batch, S.CANCELLING, now, cancel_reason=event.reason)
    return Transition(moved, (CancelBatch(event.reason),))


@_on(S.CANCELLING, CancelAnswered, to=(S.LANDING,))
def _cancel_answered(batch: Batch, event: CancelAnswered, now: datetime, settings: MachineSettings) -> Transition:
    return _polled(batch, PollAnswered(event.snapshot), now, settings)


@_on(S.CANCELLING, CancelFailed)
def _cancel_failed(batch: Batch, event: CancelFailed, now: datetime, settings: MachineSettings) -> Transition:
    failed = replace(batch, tries=batch.tries + 1)
    if event.failure.kind is CallFailure.CONFLICT:
        moved, poll = _next_poll(failed, now, settings, settings.poll_floor_s)
        return Transition(moved, (poll,))  # it has ended: the poll will tell how
    pause_s = _growing(settings.poll_floor_s, settings.poll_factor, settings.poll_max_s, batch.tries)
    return Transition(
        failed, (CancelBatch(batch.cancel_reason, after_s=max(pause_s, event.failure.retry_after_s or 0)),)
    )


@_on(tuple(IN_FLIGHT), LotGained)
def _lot_gained(batch: Batch, _event: Event, _now: datetime, _settings: MachineSettings) -> Transition:
    """The new lot may still be SUBMITTING: our provider id is the canonical one."""
    if batch.snapshot is None:
        return Transition(batch)
    return Transition(batch, (RecordSubmitted(batch.snapshot),))


# -- home again


@_on(S.LANDING, ResultsRead, to=(S.LANDED,))
def _results_read(batch: Batch, _event: Event, now: datetime, _settings: MachineSettings) -> Transition:
    return Transition(_enter(batch, S.LANDED, now, unseen_since=None), (CleanUp(),))


@_on(S.LANDING, ResultsIncomplete)
@_on(S.LANDING, ResultsUnavailable)
def _read_again(batch: Batch, event: Event, now: datetime, settings: MachineSettings) -> Transition:
    """Ask for the batch first: file ids may only now be filled in, and a link may have to be fresh."""
    since = batch.landing_since or now
    tried = replace(batch, tries=batch.tries + 1)
    pause_s = settings.landing_pause_s
    last_chance = now + timedelta(seconds=pause_s) >= since + timedelta(seconds=settings.missing_grace_s)
    # A file that is not found for so long has been deleted; any other failure may end, so it is waited out.
    is_gone = isinstance(event, ResultsUnavailable) and event.failure.kind is CallFailure.NOT_FOUND and last_chance
    if isinstance(event, ResultsUnavailable) and not is_gone:
        pause_s = max(
            _growing(settings.poll_floor_s, settings.poll_factor, settings.poll_max_s, batch.tries),
            event.failure.retry_after_s or 0.0,
        )
        effects: tuple[Effect, ...] = ()
        # A link that has gone stale is refused like a key without rights: only a fresh one tells them apart.
        is_stale_link = event.failure.http_status == FORBIDDEN and batch.tries == 0
        if event.failure.kind is CallFailure.ACCOUNT and not is_stale_link:
            effects = (Hold("account", event.failure.kind.value),)
        at = now + timedelta(seconds=pause_s)
        return Transition(replace(tried, next_poll_at=at), (*effects, PollAt(at)))
    if last_chance and batch.snapshot is not None:
        reading = LandResults(batch.snapshot, is_last_chance=True, after_s=pause_s)
        return Transition(replace(tried, next_poll_at=None), (reading,))
    at = now + timedelta(seconds=pause_s)
    return Transition(replace(tried, next_poll_at=at), (PollAt(at),))


@_on(S.LANDING, PollAnswered)
def _landing_polled(batch: Batch, event: PollAnswered, now: datetime, settings: MachineSettings) -> Transition:
    if batch.next_poll_at is None:
        return Transition(batch)  # a reading runs, and asks for a poll by itself should it need one
    if _is_anothers(batch, event.snapshot):
        at = now + timedelta(seconds=settings.poll_floor_s)
        return Transition(replace(batch, next_poll_at=at), (PollAt(at),))
    if not event.snapshot.status.is_terminal:
        # A terminal status was seen; a listing that lags does not undo it.
        if batch.snapshot is None:  # restored as landed, so only the provider knows the files
            at = now + timedelta(seconds=settings.landing_pause_s)
            return Transition(replace(batch, next_poll_at=at), (PollAt(at),))
        return Transition(replace(batch, next_poll_at=None), (LandResults(batch.snapshot),))
    shown = replace(
        batch,
        snapshot=event.snapshot,
        counts=event.snapshot.counts,
        provider_status=event.snapshot.raw_status,
        provider_batch_id=event.snapshot.provider_batch_id,
        next_poll_at=None,
        unseen_since=None,
    )
    return Transition(shown, (LandResults(event.snapshot),))


@_on(S.LANDING, PollFailed, to=(S.SUBMISSION_UNKNOWN,))
def _landing_poll_failed(batch: Batch, event: PollFailed, now: datetime, settings: MachineSettings) -> Transition:
    if batch.next_poll_at is None:
        return Transition(batch)
    failed = _unseen(batch, event.failure, now)
    if _is_gone(failed, now, settings):
        return _disowned(failed, now)
    pause_s = _growing(settings.poll_floor_s, settings.poll_factor, settings.poll_max_s, batch.tries)
    at = now + timedelta(seconds=max(pause_s, event.failure.retry_after_s or 0.0))
    return Transition(replace(failed, next_poll_at=at), (PollAt(at),))


@_on(S.LANDING, ResultsNotOurs, to=(S.SUBMISSION_UNKNOWN,))
def _not_ours(batch: Batch, _event: Event, now: datetime, _settings: MachineSettings) -> Transition:
    """Ours may be another one that was made in the same minute: the search goes on without this one."""
    return _disowned(batch, now)


@_on(S.LANDED, LotGained, to=(S.LANDING,))
def _landed_lot_gained(batch: Batch, _event: Event, now: datetime, _settings: MachineSettings) -> Transition:
    """The partition that came may hold rows nobody has settled: read the files again for it."""
    if batch.snapshot is None or batch.is_clean:
        return Transition(_enter(batch, S.LANDING, now, landing_since=now, next_poll_at=now), (PollAt(now),))
    return Transition(
        _enter(batch, S.LANDING, now, landing_since=now, next_poll_at=None), (LandResults(batch.snapshot),)
    )


@_on(S.LANDED, CleanedUp)
def _cleaned(batch: Batch, _event: Event, _now: datetime, _settings: MachineSettings) -> Transition:
    return Transition(replace(batch, is_clean=True))


@_on(S.LANDED, CleanUpWaits)
def _clean_later(batch: Batch, _event: Event, _now: datetime, settings: MachineSettings) -> Transition:
    pause_s = _growing(settings.poll_floor_s, settings.poll_factor, settings.poll_max_s, batch.tries)
    return Transition(replace(batch, tries=batch.tries + 1), (CleanUp(after_s=pause_s),))


# -- news that comes late or twice, dropped on purpose

_ALL = tuple(BatchState)
_BEFORE = (S.SEALED, S.UPLOADING, S.SUBMITTING, S.SUBMISSION_UNKNOWN, S.REFUSED)
_AFTER = (S.LANDING, S.LANDED, S.DISSOLVED, S.QUARANTINED)
_END = (S.DISSOLVED, S.QUARANTINED)

_ignore((*_BEFORE, *_AFTER), Poked)
_ignore((*_BEFORE, S.LANDED, *_END), PollAnswered, PollFailed)
_ignore((*_BEFORE, S.CANCELLING, *_AFTER), CancelWanted)
_ignore((*_AFTER, S.VALIDATING, S.IN_PROGRESS, S.FINALIZING), CancelAnswered, CancelFailed)
_ignore((*_BEFORE, S.LANDING, *_END), LotGained)
_ignore(_ALL, SubmittedRecorded)
_ignore((S.SUBMITTING, S.SUBMISSION_UNKNOWN, S.REFUSED, *IN_FLIGHT, S.LANDING, S.LANDED), InputUnusable)
_ignore((S.REFUSED,), Admitted, HeldBack, UploadFailed)
_ignore((S.REFUSED, *_END), InputDeleted, InputNotDeleted)
_ignore((*IN_FLIGHT, S.LANDING, S.LANDED, *_END), BatchFound, BatchNotFound, LookUpFailed)
_ignore((*IN_FLIGHT, S.LANDING, S.LANDED), InputDeleted, InputNotDeleted)
_ignore(_END, RowsHandedOn, CleanedUp, CleanUpWaits)
_ignore((*_END, S.LANDED), ResultsRead, ResultsIncomplete, ResultsUnavailable, ResultsNotOurs)
_ignore(_END, Disowned)
# A clean-up that a gained lot overtook may still answer when the batch has turned out to be another's.
_ignore((S.LANDING, S.SUBMISSION_UNKNOWN, *IN_FLIGHT), CleanedUp, CleanUpWaits)
_ignore((S.SUBMISSION_UNKNOWN,), CancelAnswered, CancelFailed)
_ignore(
    _END,
    Admitted,
    HeldBack,
    InputUploaded,
    UploadFailed,
    InputUnusable,
    SubmittingRecorded,
    SubmittingRefused,
    RecreateDue,
)
_ignore((S.QUARANTINED,), CreateAccepted, CreateRefused, CreateNotSent, CreateUnanswered)


def events() -> tuple[type[Event], ...]:
    """Every kind of event, in the order of this file."""
    return tuple(
        kind for kind in globals().values() if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
    )


def diagram() -> str:
    """The machine as a Mermaid state diagram, drawn from the table."""
    edges: dict[tuple[BatchState, BatchState], list[str]] = {}
    for (state, event), entry in RULES.items():
        for target in entry.targets:
            if target is not state:
                edges.setdefault((state, target), []).append(event.__name__)
    lines = ["stateDiagram-v2", "    [*] --> sealed"]
    order = {state: number for number, state in enumerate(BatchState)}
    for state, target in sorted(edges, key=lambda edge: (order[edge[0]], order[edge[1]])):
        lines.append(f"    {state} --> {target}: {', '.join(sorted(set(edges[state, target])))}")
    lines.extend(("    landed --> [*]", "    dissolved --> [*]"))
    return "\n".join(lines)
