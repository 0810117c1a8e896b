"""The batch machine: every state with every event, and whole voyages against a driver that may answer anything."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchferry.domain.batchkey import BatchKey
from batchferry.domain.errors import IllegalTransition
from batchferry.domain.ids import BatchId, FileId, ProviderBatchId
from batchferry.domain.machine import (
    FINAL,
    IGNORED,
    IN_FLIGHT,
    RULES,
    Admit,
    Admitted,
    Batch,
    BatchFound,
    BatchNotFound,
    BatchState,
    CancelAnswered,
    CancelBatch,
    CancelFailed,
    CancelWanted,
    CleanedUp,
    CleanUp,
    CleanUpWaits,
    CreateAccepted,
    CreateBatch,
    CreateNotSent,
    CreateRefused,
    CreateUnanswered,
    DeleteInput,
    DisownBatch,
    Disowned,
    Effect,
    Event,
    HandRowsOn,
    HeldBack,
    Hold,
    InputDeleted,
    InputNotDeleted,
    InputUnusable,
    InputUploaded,
    LandResults,
    LookUpBatch,
    LookUpFailed,
    LotGained,
    MachineSettings,
    OfferAgain,
    Poked,
    PollAnswered,
    PollAt,
    PollFailed,
    RecordSubmitted,
    RecordSubmitting,
    RecreateDue,
    ResultsIncomplete,
    ResultsNotOurs,
    ResultsRead,
    ResultsUnavailable,
    RowsHandedOn,
    SubmittedRecorded,
    SubmittingRecorded,
    SubmittingRefused,
    Transition,
    UploadFailed,
    UploadInput,
    WarnSlow,
    begin,
    events,
    transition,
)
from batchferry.domain.provider import BatchSnapshot, CallFailed, CallFailure, ProviderStatus, RequestCounts

START = datetime(2026, 1, 1, tzinfo=UTC)
KEY = BatchKey("acct", "/v1/chat/completions", "m", "24h")
S = BatchState
LANDED_OR_OVER = {S.LANDED, S.DISSOLVED}

# -- samples

seconds = st.integers(0, 200_000).map(lambda whole: timedelta(seconds=whole))
instants = seconds.map(lambda after: START + after)
maybe_instants = st.none() | instants
counts = st.builds(RequestCounts, st.integers(0, 5), st.integers(0, 5), st.integers(0, 5))
file_ids = st.sampled_from([FileId("file-1"), FileId("file-2")])
snapshots = st.builds(
    BatchSnapshot,
    provider_batch_id=st.just(ProviderBatchId("batch_1")),
    status=st.sampled_from(ProviderStatus),
    raw_status=st.sampled_from(["validating", "completed", "what_is_this"]),
    input_file_id=st.none() | file_ids,
    output_file_id=st.none() | file_ids,
    error_file_id=st.none() | file_ids,
    counts=counts,
    created_at=maybe_instants,
    expires_at=maybe_instants,
    ended_at=maybe_instants,
)
failures = st.builds(
    CallFailed,
    st.sampled_from(["create", "retrieve", "cancel", "upload"]),
    st.sampled_from(CallFailure),
    http_status=st.sampled_from([None, 400, 404, 429, 500]),
    retry_after_s=st.none() | st.floats(0, 4_000),
    is_definite=st.booleans(),
)
machine_settings = st.one_of(
    st.just(MachineSettings()),
    st.builds(
        MachineSettings,
        poll_first_s=st.floats(0.1, 900),
        poll_factor=st.floats(1.0, 3.0),
        poll_floor_s=st.floats(5, 20),
        poll_max_s=st.floats(20, 400),
        poll_finalizing_s=st.floats(1, 100),
        window_grace_s=st.floats(0, 3_000),
    ),
)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """A batch in any state, with every combination of what may be known of it.

    Two things are part of a state: a batch that is being submitted or was refused has its file.
    """
    state = draw(st.sampled_from(BatchState))
    needs_file = state in {S.SUBMITTING, S.REFUSED}
    asked_at = draw(maybe_instants)
    return Batch(
        batch_id=BatchId("B1"),
        key=KEY,
        partitions=(0, 1),
        rows=draw(st.integers(1, 9)),
        window_s=draw(st.sampled_from([3_600.0, 86_400.0])),
        sealed_at=START,
        state=state,
        state_since=draw(instants),
        input_file_id=draw(file_ids if needs_file else st.none() | file_ids),
        provider_batch_id=draw(st.none() | st.just(ProviderBatchId("batch_1"))),
        provider_status=draw(st.sampled_from(["", "in_progress"])),
        counts=draw(counts),
        snapshot=draw(st.none() | snapshots),
        submitted_at=draw(maybe_instants),
        ended_at=draw(maybe_instants),
        asked_at=asked_at,
        next_poll_at=draw(maybe_instants),
        poll_interval_s=draw(st.floats(0, 300)),
        tries=draw(st.integers(0, 2_000)),
        first_create_at=draw(maybe_instants),
        cancel_reason=draw(st.sampled_from(["", "operator", "window_passed"])),
        warned=draw(st.booleans()),
        landing_since=draw(maybe_instants),
        unseen_since=draw(maybe_instants),
        is_clean=draw(st.booleans()),
    )


def event_of(kind: type[Event], snapshot: BatchSnapshot, failure: CallFailed, flag: bool) -> Event:
    """An event of this kind, filled with these."""
    fields: dict[str, object] = {
        "snapshot": snapshot,
        "failure": failure if flag or kind is not LookUpFailed else None,
        "file_id": FileId("file-1"),
        "is_final": flag,
        "is_over": flag,
        "reason": "operator",
    }
    return kind(**{name: fields[name] for name in kind.__dataclass_fields__})


EVENTS = events()


@settings(max_examples=60, deadline=None)
@given(batches(), snapshots, failures, st.booleans(), instants, machine_settings)
def test_every_state_with_every_event(
    batch: Batch, snapshot: BatchSnapshot, failure: CallFailed, flag: bool, now: datetime, numbers: MachineSettings
):
    """A rule, an explicit "ignore" or IllegalTransition: nothing else is ever raised, and each keeps its promises."""
    for state in BatchState:
        one = replace(batch, state=state, input_file_id=batch.input_file_id or FileId("file-1"))
        for kind in EVENTS:
            event = event_of(kind, snapshot, failure, flag)
            if (state, kind) not in RULES and (state, kind) not in IGNORED:
                with pytest.raises(IllegalTransition) as caught:
                    transition(one, event, now, numbers)
                assert (caught.value.batch_id, caught.value.state, caught.value.event) == ("B1", state, kind.__name__)
                continue
            made = transition(one, event, now, numbers)
            if (state, kind) in IGNORED:
                assert made == Transition(one, is_ignored=True)
                assert made.batch is one
            else:
                check_rule(one, event, now, numbers, made)


def check_rule(before: Batch, event: Event, now: datetime, numbers: MachineSettings, made: Transition) -> None:
    """What every rule promises, whatever it decides."""
    after = made.batch
    assert not made.is_ignored
    assert after.state is before.state or after.state in RULES[before.state, type(event)].targets
    for name in ("batch_id", "key", "partitions", "rows", "window_s", "sealed_at"):
        assert getattr(after, name) == getattr(before, name)
    of_provider = ("provider_batch_id", "submitted_at", "snapshot")
    if after.state is S.SUBMISSION_UNKNOWN and before.state in IN_FLIGHT | {S.LANDING}:
        assert isinstance(event, ResultsNotOurs | PollFailed)
        assert not any(getattr(after, name) for name in of_provider), "a batch that is not ours is still spoken of"
        assert not after.cancel_reason
    else:
        for name in of_provider:
            assert getattr(after, name) is not None or getattr(before, name) is None, f"{name} was forgotten"
        assert after.cancel_reason or not before.cancel_reason
    assert after.first_create_at is not None or before.first_create_at is None
    if after.state is before.state:
        assert after.state_since == before.state_since
    else:
        assert after.state_since == now
    creates = [effect for effect in made.effects if isinstance(effect, CreateBatch)]
    assert bool(creates) == isinstance(event, SubmittingRecorded), "a create that nothing was recorded for"
    assert all(0 <= effect.after_s <= 4_000 for effect in made.effects)
    assert before.state not in FINAL
    for effect in made.effects:
        if isinstance(effect, LandResults | RecordSubmitted):
            assert isinstance(effect.snapshot, BatchSnapshot), "nothing to go by"
    shown = getattr(event, "snapshot", None)
    if before.state in IN_FLIGHT and isinstance(event, PollAnswered | CancelAnswered):
        assert (after.state is S.LANDING) == shown.status.is_terminal
    if after.state in IN_FLIGHT:
        check_poll(before, event, now, numbers, made)
    check_warning(before, now, numbers, made)


def check_poll(before: Batch, event: Event, now: datetime, numbers: MachineSettings, made: Transition) -> None:
    """A poll is asked for where one must be, and within the bounds."""
    after = made.batch
    polls = [effect for effect in made.effects if isinstance(effect, PollAt)]
    assert len(polls) <= 1
    asked = isinstance(event, CreateAccepted | BatchFound | PollAnswered | PollFailed | CancelAnswered)
    assert polls or not asked, "nobody would ever ask again"
    for poll in polls:
        assert after.next_poll_at == poll.at
        assert poll.at >= now
        floor_from = before.asked_at if isinstance(event, Poked) else now
        assert floor_from is not None
        assert poll.at >= floor_from + timedelta(seconds=numbers.poll_floor_s), "polled below the floor"
        assert poll.at <= now + timedelta(seconds=numbers.poll_max_s) or isinstance(event, Poked), "polled too late"
        if isinstance(event, Poked):
            assert before.next_poll_at is not None
            assert poll.at < before.next_poll_at, "a poke put the poll off"
        elif after.window_ends_at is not None and now < after.window_ends_at:
            floor_at = now + timedelta(seconds=numbers.poll_floor_s)
            assert poll.at <= max(after.window_ends_at, floor_at), "no poll is due at the end of the window"


def check_warning(before: Batch, now: datetime, numbers: MachineSettings, made: Transition) -> None:
    """A warning is given once for a stay in a state, when it has lasted too long."""
    warnings = [effect for effect in made.effects if isinstance(effect, WarnSlow)]
    if not warnings:
        return
    (warning,) = warnings
    assert made.batch.state is before.state is warning.state
    assert not before.warned
    assert made.batch.warned
    slow_s = {
        S.VALIDATING: numbers.validating_slow_s,
        S.FINALIZING: numbers.finalizing_slow_s,
        S.CANCELLING: numbers.cancelling_slow_s,
    }[warning.state]
    assert warning.age_s == (now - before.state_since).total_seconds() > slow_s


@settings(max_examples=40, deadline=None)
@given(batches(), snapshots, st.sampled_from([one for one in ProviderStatus if one.is_terminal]), instants)
def test_every_end_at_the_provider_leads_to_landing(
    batch: Batch, snapshot: BatchSnapshot, status: ProviderStatus, now: datetime
):
    """completed, failed, expired and cancelled all land, from every in-flight state: rows may have finished in each."""
    ended = replace(snapshot, status=status)
    for state in sorted(IN_FLIGHT):
        made = transition(replace(batch, state=state), PollAnswered(ended), now, MachineSettings())
        assert made.batch.state is S.LANDING
        assert made.effects == (LandResults(ended),)
        assert made.batch.landing_since == now
        assert made.batch.next_poll_at is None


# -- whole voyages

Answer = Callable[[BatchSnapshot, CallFailed, bool], Event]

ANSWERS: dict[type[Effect], tuple[Answer, ...]] = {
    Admit: (lambda *_: Admitted(), lambda *_: HeldBack(), lambda *_: InputUnusable()),
    UploadInput: (
        lambda *_: InputUploaded(FileId("file-1")),
        lambda _s, failure, _f: UploadFailed(failure),
        lambda *_: InputUnusable(),
    ),
    RecordSubmitting: (lambda *_: SubmittingRecorded(), lambda *_: SubmittingRefused()),
    CreateBatch: (
        lambda snapshot, *_: CreateAccepted(snapshot),
        lambda _s, failure, _f: CreateRefused(failure),
        lambda *_: CreateNotSent(),
        lambda _s, failure, _f: CreateUnanswered(failure),
    ),
    OfferAgain: (lambda *_: RecreateDue(),),
    LookUpBatch: (
        lambda snapshot, *_: BatchFound(snapshot),
        lambda *_: LookUpFailed(),  # replaced below by the answer that carries is_final
        lambda _s, failure, _f: LookUpFailed(failure),
    ),
    DeleteInput: (lambda *_: InputDeleted(), lambda _s, failure, _f: InputNotDeleted(failure)),
    RecordSubmitted: (lambda *_: SubmittedRecorded(),),
    HandRowsOn: (lambda *_: RowsHandedOn(),),
    CancelBatch: (lambda snapshot, *_: CancelAnswered(snapshot), lambda _s, failure, _f: CancelFailed(failure)),
    LandResults: (
        lambda *_: ResultsRead(),
        lambda *_: ResultsIncomplete("counts"),
        lambda _s, failure, _f: ResultsUnavailable(failure),
        lambda *_: ResultsNotOurs(),
    ),
    DisownBatch: (lambda *_: Disowned(), lambda *_: Disowned(is_over=True)),
    CleanUp: (lambda *_: CleanedUp(), lambda *_: CleanUpWaits()),
}
"""What each effect may answer, the favourable answer first. PollAt stands apart: a later one replaces it."""
SILENT = (WarnSlow, Hold)
UNASKED: tuple[Event, ...] = (Poked(), LotGained(), CancelWanted("operator"), InputUnusable())
"""What happens without having been asked for."""


class Voyage:
    """One batch, what it has asked for, and a driver that answers in any order."""

    def __init__(self, batch: Batch, numbers: MachineSettings, now: datetime = START) -> None:
        self.batch = batch
        self.numbers = numbers
        self.now = now
        self.outstanding: list[Effect] = []
        self.timer: PollAt | None = None
        self.polls_under_way = 0
        self.recorded = 0
        self.created = 0
        self.met: set[tuple[BatchState, type[Event], BatchState]] = set()
        self.take(begin(batch, now, numbers))

    def copy(self) -> Voyage:
        """The same voyage, to be tried another way."""
        twin = copy.copy(self)
        twin.outstanding = list(self.outstanding)
        twin.met = set()
        return twin

    def take(self, effects: tuple[Effect, ...]) -> None:
        for effect in effects:
            if isinstance(effect, PollAt):
                self.timer = effect
            elif not isinstance(effect, SILENT):
                self.outstanding.append(effect)

    def tell(self, event: Event) -> None:
        if isinstance(event, SubmittingRecorded):
            self.recorded += 1
        made = transition(self.batch, event, self.now, self.numbers)
        self.met.add((self.batch.state, type(event), made.batch.state))
        self.batch = made.batch
        self.created += sum(isinstance(effect, CreateBatch) for effect in made.effects)
        assert self.created <= self.recorded
        self.take(made.effects)
        readings = [one for one in self.outstanding if isinstance(one, LandResults)]
        assert len(readings) <= 1, "two readings at once share their files"
        assert self.is_over or self.is_pending, f"stuck in {self.batch.state} after {event}"

    @property
    def is_pending(self) -> bool:
        return bool(self.outstanding or self.timer or self.polls_under_way)

    @property
    def is_over(self) -> bool:
        return self.batch.state in FINAL or (self.batch.state is S.LANDED and self.batch.is_clean)

    def answer(self, effect: Effect, snapshot: BatchSnapshot, failure: CallFailed, choice: int) -> Event:
        if isinstance(effect, LookUpBatch) and choice % 3 == 1:
            return BatchNotFound(effect.is_final)
        answers = ANSWERS[type(effect)]
        return answers[choice % len(answers)](snapshot, failure, False)

    def step(self, what: int, choice: int, snapshot: BatchSnapshot, failure: CallFailed) -> None:
        """Let one of the things happen that can happen now."""
        possible: list[Callable[[], None]] = [
            lambda index=index: self.tell(self.answer(self.outstanding.pop(index), snapshot, failure, choice))
            for index in range(len(self.outstanding))
        ]
        if self.timer is not None:
            possible.append(self.fire)
        if self.polls_under_way:
            possible.append(lambda: self.end_poll(snapshot, failure, is_shown=choice % 3 > 0))
        possible.append(lambda: self.tell(UNASKED[choice % len(UNASKED)]))
        possible[what % len(possible)]()

    def fire(self) -> None:
        assert self.timer is not None
        self.now = max(self.now, self.timer.at)
        self.timer = None
        self.polls_under_way += 1

    def end_poll(self, snapshot: BatchSnapshot, failure: CallFailed, *, is_shown: bool) -> None:
        self.polls_under_way -= 1
        self.tell(PollAnswered(snapshot) if is_shown else PollFailed(failure))

    def favour(self, good: BatchSnapshot) -> None:
        """The next outstanding thing succeeds."""
        if self.outstanding:
            self.tell(self.answer(self.outstanding.pop(0), good, FAILURE, 0))
        elif self.polls_under_way:
            self.end_poll(good, FAILURE, is_shown=True)
        else:
            self.fire()

    def sail_home(self, good: BatchSnapshot) -> None:
        """From now on everything succeeds."""
        for _ in range(60):
            if self.batch.state in LANDED_OR_OVER:
                return
            self.favour(good)
        pytest.fail(f"never came home: {self.batch.state}")


GOOD = BatchSnapshot(ProviderBatchId("batch_1"), ProviderStatus.COMPLETED, "completed", output_file_id=FileId("out"))
FAILURE = CallFailed("retrieve", CallFailure.UNAVAILABLE)


def sealed(**changes: object) -> Batch:
    """A batch that has just been sealed, but for these fields."""
    plain = Batch(
        batch_id=BatchId("B1"),
        key=KEY,
        partitions=(0,),
        rows=3,
        window_s=86_400.0,
        sealed_at=START,
        state=S.SEALED,
        state_since=START,
    )
    return replace(plain, **changes)


BEGINNINGS = [
    sealed(),  # the others are what a restart finds
    sealed(state=S.SUBMISSION_UNKNOWN, input_file_id=FileId("file-1")),
    sealed(state=S.VALIDATING, provider_batch_id=ProviderBatchId("batch_1"), submitted_at=START),
    sealed(state=S.VALIDATING, provider_batch_id=ProviderBatchId("batch_1")),
    sealed(state=S.LANDED, provider_batch_id=ProviderBatchId("batch_1")),
]
beginnings = st.sampled_from([*[BEGINNINGS[0]] * 4, *BEGINNINGS])
RUNNING = [status for status in ProviderStatus if not status.is_terminal]
likely_snapshots = st.sampled_from(
    [
        replace(GOOD, status=status, raw_status=status.value, created_at=created_at)
        for status in [*ProviderStatus, *RUNNING, *RUNNING]
        for created_at in (START, None)
    ]
)
likely_failures = st.sampled_from(
    [
        *(CallFailed("call", kind, retry_after_s=wait_s) for kind in CallFailure for wait_s in (None, 5.0, 4_000.0)),
        CallFailed("call", CallFailure.REJECTED, http_status=413),
    ]
)
happenings = st.lists(
    st.tuples(
        st.integers(0, 11),
        st.integers(0, 11),
        likely_snapshots,
        likely_failures,
        st.sampled_from([0, 1, 20, 400, 4_000]),
    ),
    min_size=12,
    max_size=40,
)


NUMBERS = MachineSettings()
LATER_S = (0, 200_000)
"""Nothing has happened yet, and everything is overdue."""
EVERY_SNAPSHOT = [
    replace(GOOD, status=status, raw_status=status.value, created_at=START)
    for status in ProviderStatus
    if not status.is_terminal or status is ProviderStatus.COMPLETED
]
"""One end stands for all: the machine asks no more of it than that it is one."""
EVERY_FAILURE = [
    FAILURE,
    CallFailed("call", CallFailure.ACCOUNT),
    CallFailed("call", CallFailure.CONFLICT),
    CallFailed("call", CallFailure.THROTTLED, retry_after_s=4_000.0),
    CallFailed("call", CallFailure.REJECTED, http_status=413),
    CallFailed("call", CallFailure.NOT_FOUND, http_status=404),
]


ALL_NEWS = [*((one, FAILURE) for one in EVERY_SNAPSHOT), *((GOOD, one) for one in EVERY_FAILURE)]


def situation(voyage: Voyage) -> tuple[object, ...]:
    """What two voyages must share to be the same for the machine, numbers and instants aside."""
    batch = voyage.batch
    return (
        batch.state,
        batch.snapshot is None,
        batch.is_clean,
        bool(batch.cancel_reason),
        batch.next_poll_at is None,
        batch.unseen_since is None,
        voyage.timer is None,
        voyage.polls_under_way,
        tuple(sorted(f"{type(one).__name__}{getattr(one, 'is_final', '')}" for one in voyage.outstanding)),
    )


@functools.cache
def answers(kind: type[Effect], is_final: bool, choice: int) -> list[Event]:
    """All that this choice among an effect's answers can be."""
    if kind is LookUpBatch and choice % 3 == 1:
        return [BatchNotFound(is_final)]
    answer = ANSWERS[kind][choice]
    return list({repr(one): one for one in (answer(*pair, False) for pair in ALL_NEWS)}.values())


def news(voyage: Voyage) -> list[Callable[[Voyage], None]]:
    """All that can happen next."""
    possible: list[Callable[[Voyage], None]] = []
    for index, effect in enumerate(voyage.outstanding):
        for choice in range(len(ANSWERS[type(effect)])):
            made = answers(type(effect), getattr(effect, "is_final", False), choice)
            possible.extend(lambda one, i=index, e=event: (one.outstanding.pop(i), one.tell(e))[1] for event in made)
    if voyage.timer is not None:
        possible.append(Voyage.fire)
    if voyage.polls_under_way:
        possible.extend(lambda one, s=shown: one.end_poll(s, FAILURE, is_shown=True) for shown in EVERY_SNAPSHOT)
        possible.extend(lambda one, f=failed: one.end_poll(GOOD, f, is_shown=False) for failed in EVERY_FAILURE)
    possible.extend(lambda one, e=event: one.tell(e) for event in UNASKED)
    return possible


def test_every_situation_that_can_arise_has_a_way_home():
    """All situations are visited: no news is illegal in any, none is stuck, and fair weather leads home from each.

    A situation is the state with everything that is outstanding. Of the same thing at most two are outstanding.
    """
    queue = [Voyage(batch, NUMBERS) for batch in {str(one): one for one in BEGINNINGS}.values()]
    visited = {situation(voyage) for voyage in queue}
    met: set[tuple[BatchState, type[Event], BatchState]] = set()
    while queue:
        voyage = queue.pop()
        voyage.copy().sail_home(GOOD)
        for happen in news(voyage):
            for later_s in LATER_S:
                one = voyage.copy()
                one.now += timedelta(seconds=later_s)
                happen(one)
                met |= one.met
                kinds = Counter(map(type, one.outstanding))
                if max(kinds.values(), default=0) <= 2 and one.polls_under_way <= 2 and situation(one) not in visited:
                    visited.add(situation(one))
                    queue.append(one)
    assert {(state, kind) for state, kind, _ in met} >= set(RULES), "a rule that nothing can lead to"
    edges = {(state, kind, target) for (state, kind), entry in RULES.items() for target in entry.targets}
    moves = {(state, kind, target) for state, kind, target in met if target is not state}
    assert moves == edges, "the table declares other moves than its rules make"


@settings(max_examples=100, deadline=None)
@given(beginnings, machine_settings, st.integers(0, 10), happenings)
def test_no_voyage_gets_stuck_or_lost(
    batch: Batch,
    numbers: MachineSettings,
    fair_steps: int,
    happened: list[tuple[int, int, BatchSnapshot, CallFailed, int]],
):
    """Whatever the driver answers and in whatever order, no news is illegal and something is always outstanding.

    After any number of steps in fair weather anything may happen; once everything succeeds again, the batch comes
    home from wherever it was.
    """
    voyage = Voyage(batch, numbers)
    for _ in range(fair_steps):
        if not voyage.is_over:
            voyage.favour(GOOD)
    for what, choice, snapshot, failure, later_s in happened:
        voyage.now += timedelta(seconds=later_s)
        voyage.step(what, choice, snapshot, failure)
    voyage.sail_home(GOOD)


@settings(max_examples=60, deadline=None)
@given(
    machine_settings,
    st.lists(
        st.sampled_from([ProviderStatus.VALIDATING, ProviderStatus.IN_PROGRESS, ProviderStatus.FINALIZING, None]),
        min_size=1,
        max_size=6,
    ),
    st.lists(st.integers(0, 120), max_size=6),
    st.booleans(),
)
def test_a_batch_is_watched_through_its_whole_window(
    numbers: MachineSettings, statuses: list[ProviderStatus | None], poke_after_s: list[int], cancel_works: bool
):
    """Polls keep floor and cap for a whole window; one falls on its end; past the grace it is cancelled, once."""
    window_s = 7_200.0
    batch = sealed(state=S.SUBMITTING, window_s=window_s, input_file_id=FileId("file-1"))
    running = replace(GOOD, status=ProviderStatus.IN_PROGRESS, raw_status="in_progress", created_at=None)
    made = transition(batch, CreateAccepted(running), START, numbers)
    polled_at = [START]
    cancels: list[datetime] = []
    warned: list[tuple[BatchState, datetime]] = []
    due = [effect.at for effect in made.effects if isinstance(effect, PollAt)]
    (poll_at,) = due
    end = START + timedelta(seconds=window_s + numbers.window_grace_s + 3 * numbers.poll_max_s)
    turn = 0
    while poll_at < end:
        if turn < len(poke_after_s):
            poked_at = polled_at[-1] + timedelta(seconds=poke_after_s[turn])
            if poked_at < poll_at:
                made = transition(made.batch, Poked(), poked_at, numbers)
                poll_at = next((effect.at for effect in made.effects if isinstance(effect, PollAt)), poll_at)
        now = poll_at
        polled_at.append(now)
        status = statuses[turn % len(statuses)]
        shown = None if status is None else replace(running, status=status, raw_status=status.value)
        made = transition(made.batch, PollFailed(FAILURE) if shown is None else PollAnswered(shown), now, numbers)
        (poll_at,) = (effect.at for effect in made.effects if isinstance(effect, PollAt))
        warned += [(effect.state, made.batch.state_since) for effect in made.effects if isinstance(effect, WarnSlow)]
        for effect in made.effects:
            if isinstance(effect, CancelBatch):
                cancels.append(now)
                assert effect.reason == "window_passed"
                if cancel_works:
                    made = transition(made.batch, CancelAnswered(running), now, numbers)
                    (poll_at,) = (one.at for one in made.effects if isinstance(one, PollAt))
        turn += 1
    pauses_s = [(after - before).total_seconds() for before, after in pairwise(polled_at)]
    slack_s = 1e-5
    assert min(pauses_s) >= numbers.poll_floor_s - slack_s
    assert max(pauses_s) <= numbers.poll_max_s + slack_s
    window_ends_at = START + timedelta(seconds=window_s)
    assert any(
        window_ends_at <= at <= window_ends_at + timedelta(seconds=numbers.poll_floor_s + slack_s) for at in polled_at
    ), "no poll at the end of the window"
    (cancelled_at,) = cancels
    grace_ends_at = window_ends_at + timedelta(seconds=numbers.window_grace_s)
    assert grace_ends_at <= cancelled_at <= grace_ends_at + timedelta(seconds=numbers.poll_max_s + slack_s)
    assert made.batch.state is S.CANCELLING
    assert len(warned) == len(set(warned)), "warned twice about one stay in a state"
