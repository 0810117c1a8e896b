"""The batch machine, story by story; that it is complete is shown by the property tests."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest

from batchferry.domain.batchkey import BatchKey
from batchferry.domain.errors import IllegalTransition
from batchferry.domain.ids import BatchId, FileId, ProviderBatchId
from batchferry.domain.machine import (
    FINAL,
    IGNORED,
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
    UploadFailed,
    UploadInput,
    WarnSlow,
    begin,
    diagram,
    events,
    transition,
)
from batchferry.domain.provider import BatchSnapshot, CallFailed, CallFailure, ProviderStatus, RequestCounts

START = datetime(2026, 1, 31, 6, 0, tzinfo=UTC)
README = Path(__file__).parents[3] / "README.md"
FILE = FileId("file-1")
BATCH_1 = ProviderBatchId("batch_1")
S = BatchState
P = ProviderStatus


def after(seconds: float) -> datetime:
    """An instant of the story."""
    return START + timedelta(seconds=seconds)


def hours(number: float) -> datetime:
    """The same in hours."""
    return after(3600 * number)


def shown(status: ProviderStatus, **more: object) -> BatchSnapshot:
    """The provider's answer about the batch."""
    return BatchSnapshot(BATCH_1, status, status.value, **{"created_at": START, **more})


def failed(kind: CallFailure, retry_after_s: float | None = None) -> CallFailed:
    """A call that did not succeed."""
    return CallFailed("call", kind, retry_after_s=retry_after_s)


class Story:
    """One batch through a list of events, each at its time."""

    def __init__(self, state: BatchState = S.SEALED, **fields: object) -> None:
        self.settings = MachineSettings()
        self.batch = Batch(
            batch_id=BatchId("B1"),
            key=BatchKey("acct", "/v1/chat/completions", "m", "24h"),
            partitions=(0, 2),
            rows=3,
            window_s=86_400.0,
            sealed_at=START,
            state=state,
            state_since=START,
            **fields,  # type: ignore[arg-type]
        )

    def tell(self, event: Event, at: datetime = START) -> tuple[Effect, ...]:
        made = transition(self.batch, event, at, self.settings)
        self.batch = made.batch
        return made.effects

    @classmethod
    def in_flight(cls, state: BatchState = S.IN_PROGRESS) -> Story:
        """A batch that was accepted at START and has been polled once, ten seconds later."""
        story = cls(S.SUBMITTING, input_file_id=FILE)
        story.tell(CreateAccepted(shown(P.VALIDATING)))
        story.tell(PollAnswered(shown(P(state.value))), after(10))
        return story


# -- the good voyage


def test_a_batch_that_meets_no_trouble():
    """Sealed, uploaded, recorded, created, polled, landed and cleaned up, one effect leading to the next."""
    story = Story()
    assert begin(story.batch, START, story.settings) == (Admit(),)
    assert story.tell(Admitted()) == (UploadInput(),)
    assert story.tell(InputUploaded(FILE)) == (RecordSubmitting(FILE),)
    assert story.tell(SubmittingRecorded()) == (CreateBatch(FILE),)
    validating = shown(P.VALIDATING)
    assert story.tell(CreateAccepted(validating)) == (RecordSubmitted(validating), PollAt(after(10)))
    assert story.tell(SubmittedRecorded()) == ()
    assert story.tell(PollAnswered(shown(P.IN_PROGRESS)), after(10)) == (PollAt(after(20)),)
    assert story.batch.state is S.IN_PROGRESS
    assert story.tell(PollAnswered(shown(P.FINALIZING)), after(20)) == (PollAt(after(30)),)
    done = shown(P.COMPLETED, output_file_id=FileId("out"), ended_at=after(29))
    assert story.tell(PollAnswered(done), after(30)) == (LandResults(done),)
    assert (story.batch.state, story.batch.ended_at, story.batch.provider_status) == (S.LANDING, after(29), "completed")
    assert story.tell(ResultsRead(), after(40)) == (CleanUp(),)
    assert story.batch.state is S.LANDED
    assert story.tell(CleanedUp(), after(50)) == ()
    assert story.batch.is_clean


@pytest.mark.parametrize(
    ("state", "effects"),
    [
        (S.SEALED, (Admit(),)),
        (S.SUBMISSION_UNKNOWN, (LookUpBatch(),)),
        (S.VALIDATING, (PollAt(START),)),
        (S.LANDED, (CleanUp(after_s=10.0),)),
    ],
)
def test_a_batch_begins_where_its_lots_left_it(state: BatchState, effects: tuple[Effect, ...]):
    """A newly sealed batch, and what a start finds in the ledger, each begin with one effect."""
    story = Story(state)
    assert begin(story.batch, START, story.settings) == effects


@pytest.mark.parametrize("state", sorted(set(BatchState) - {S.SEALED, S.SUBMISSION_UNKNOWN, S.VALIDATING, S.LANDED}))
def test_no_batch_begins_in_between(state: BatchState):
    """The finer states are not durable, so nothing begins in them."""
    with pytest.raises(IllegalTransition):
        begin(Story(state).batch, START, MachineSettings())


# -- before the provider knows of it


def test_an_upload_that_fails_is_tried_again_ever_later():
    """Nothing is durable yet: the batch waits 5, 10, 20 ... 300 s, or as long as the provider says."""
    story = Story()
    pauses = []
    for _ in range(9):
        story.tell(Admitted())
        (effect,) = story.tell(UploadFailed(failed(CallFailure.UNAVAILABLE)))
        assert story.batch.state is S.SEALED
        pauses.append(effect.after_s)
    assert pauses == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    story.tell(Admitted())
    assert story.tell(UploadFailed(failed(CallFailure.THROTTLED, 900.0))) == (Admit(after_s=900.0),)


@pytest.mark.parametrize(("kind", "scope"), [(CallFailure.ACCOUNT, "account"), (CallFailure.REJECTED, "key")])
def test_an_upload_that_is_refused_holds_what_is_to_blame(kind: CallFailure, scope: str):
    """Account trouble holds the account, a file that is refused holds its key; the rows wait."""
    story = Story(S.UPLOADING)
    hold, admit = story.tell(UploadFailed(failed(kind)))
    assert isinstance(hold, Hold)
    assert hold.scope == scope
    assert isinstance(admit, Admit)


def test_a_batch_that_lost_a_partition_before_it_left_is_given_up():
    """The file would name rows that are not ours; one still on its way there is deleted when it has arrived."""
    story = Story(S.UPLOADING)
    assert story.tell(InputUnusable()) == (HandRowsOn("partition_moved"),)
    assert story.tell(InputUploaded(FILE)) == (DeleteInput(),)
    story.tell(RowsHandedOn())
    assert story.batch.state is S.DISSOLVED


def test_nothing_is_created_when_a_lot_could_not_be_recorded():
    """A transaction that failed means that a partition has moved: the file goes, the rows are handed on."""
    story = Story(S.SUBMITTING, input_file_id=FILE)
    assert story.tell(SubmittingRefused()) == (DeleteInput(), HandRowsOn("partition_moved"))
    story.tell(InputDeleted())
    story.tell(RowsHandedOn())
    assert story.batch.state is S.DISSOLVED


def test_a_refused_create_offers_the_same_file_again_and_records_before_each():
    """A definite no costs nothing: a pause, the ledger again, then the next create; for ten minutes."""
    story = Story(S.UPLOADING)
    story.tell(InputUploaded(FILE))
    now, pauses = START, []
    while story.batch.state is not S.DISSOLVED:
        assert story.tell(SubmittingRecorded(), now) == (CreateBatch(FILE),)
        effects = story.tell(CreateRefused(failed(CallFailure.NOT_READY)), now)
        if isinstance(effects[0], OfferAgain):
            pauses.append(effects[0].after_s)
            now += timedelta(seconds=effects[0].after_s)
            assert story.tell(RecreateDue(), now) == (RecordSubmitting(FILE),)
        else:
            assert effects == (DeleteInput(), HandRowsOn("create_not_ready"))
            story.tell(RowsHandedOn(), now)
    assert pauses == [5, 10, 20, 40, 80, 120, 120, 120]
    assert sum(pauses) <= story.settings.file_reuse_s


def test_a_create_that_was_rejected_for_good_holds_the_key():
    """After ten minutes of refusals that are not about load, the batch key is held with the rows."""
    story = Story(S.SUBMITTING, input_file_id=FILE, first_create_at=START)
    effects = story.tell(CreateRefused(failed(CallFailure.REJECTED)), after(600))
    assert effects == (DeleteInput(), HandRowsOn("create_rejected", hold="key"))


TOO_LARGE = [
    CallFailed("call", CallFailure.REJECTED, http_status=413),
    CallFailed("call", CallFailure.REJECTED, http_status=400, code="file_too_large"),
]


@pytest.mark.parametrize("failure", TOO_LARGE, ids=["status", "code"])
def test_a_batch_that_was_refused_for_its_size_goes_on_in_halves(failure: CallFailed):
    """Neither the same file again nor a hold would help: the rows are handed on at once, the file is deleted."""
    story = Story(S.UPLOADING)
    assert story.tell(UploadFailed(failure)) == (HandRowsOn("too_large", halve=True),)
    assert story.batch.state is S.REFUSED
    story = Story(S.SUBMITTING, input_file_id=FILE, first_create_at=START)
    assert story.tell(CreateRefused(failure)) == (DeleteInput(), HandRowsOn("too_large", halve=True))


@pytest.mark.parametrize("failure", TOO_LARGE, ids=["status", "code"])
def test_a_single_row_that_is_too_large_is_not_halved(failure: CallFailed):
    """There is nothing to halve: it takes the way of every refusal, which ends in a hold that a person sees."""
    story = Story(S.UPLOADING)
    story.batch = replace(story.batch, rows=1)
    hold, admit = story.tell(UploadFailed(failure))
    assert isinstance(hold, Hold)
    assert isinstance(admit, Admit)
    story = Story(S.SUBMITTING, input_file_id=FILE, first_create_at=START)
    story.batch = replace(story.batch, rows=1)
    assert story.tell(CreateRefused(failure), after(600)) == (DeleteInput(), HandRowsOn("create_rejected", hold="key"))


def test_account_trouble_at_create_holds_the_account_at_once():
    """Quota and billing are not waited out with a file: the account is held and the rows go back."""
    story = Story(S.SUBMITTING, input_file_id=FILE, first_create_at=START)
    assert story.tell(CreateRefused(failed(CallFailure.ACCOUNT))) == (
        DeleteInput(),
        HandRowsOn("account", hold="account"),
    )


def test_a_create_that_was_never_sent_is_offered_again():
    """A record that grew too old before the call is written again first; for ten minutes."""
    story = Story(S.SUBMITTING, input_file_id=FILE, first_create_at=START)
    assert story.tell(CreateNotSent()) == (OfferAgain(after_s=5.0),)
    story.tell(RecreateDue())
    assert story.tell(CreateNotSent(), after(600)) == (DeleteInput(), HandRowsOn("create_unavailable"))


@pytest.mark.parametrize(("rows", "first_s"), [(999, 10.0), (25_000, 60.0), (1_000_000, 300.0)])
def test_a_large_batch_is_asked_for_later(rows: int, first_s: float):
    """The first poll waits for the provider's validation, which grows with the file; never beyond the cap."""
    story = Story(S.SUBMITTING, input_file_id=FILE)
    story.batch = replace(story.batch, rows=rows)
    validating = shown(P.VALIDATING)
    assert story.tell(CreateAccepted(validating)) == (RecordSubmitted(validating), PollAt(after(first_s)))


# -- was it created?


def test_a_lost_reply_is_looked_up_and_adopted():
    """An unclear answer never leads to a second create; the batch that is found is taken over."""
    story = Story(S.SUBMITTING, input_file_id=FILE)
    assert story.tell(CreateUnanswered(failed(CallFailure.UNANSWERED))) == (LookUpBatch(),)
    running = shown(P.IN_PROGRESS)
    assert story.tell(BatchFound(running), after(5)) == (RecordSubmitted(running), PollAt(after(15)))
    assert (story.batch.state, story.batch.provider_batch_id) == (S.VALIDATING, BATCH_1)


def test_absence_is_believed_only_after_the_file_is_gone():
    """Not found, file deleted, a minute's pause, not found again: only then are the rows handed on."""
    story = Story(S.SUBMISSION_UNKNOWN, input_file_id=FILE)
    assert story.tell(BatchNotFound(is_final=False)) == (DeleteInput(),)
    assert story.tell(InputDeleted()) == (LookUpBatch(is_final=True, after_s=60.0),)
    assert story.tell(BatchNotFound(is_final=True)) == (HandRowsOn("never_created"),)
    assert story.batch.state is S.SUBMISSION_UNKNOWN
    story.tell(RowsHandedOn())
    assert story.batch.state is S.DISSOLVED


def test_a_question_that_cannot_be_answered_is_asked_again_from_the_start():
    """No answer, or no confirmed deletion, is no proof: the look-up begins anew, ever later."""
    story = Story(S.SUBMISSION_UNKNOWN, input_file_id=FILE)
    assert story.tell(LookUpFailed()) == (LookUpBatch(after_s=10.0),)
    assert story.tell(LookUpFailed(failed(CallFailure.UNAVAILABLE))) == (LookUpBatch(after_s=15.0),)
    story.tell(BatchNotFound(is_final=False))
    assert story.tell(InputNotDeleted(failed(CallFailure.UNAVAILABLE))) == (LookUpBatch(after_s=10.0),)


# -- on the water


def test_counts_that_are_complete_conclude_nothing():
    """All rows counted as done and `finalizing` for hours: polled on, told once, not cancelled, landed at the end."""
    none, all_done = RequestCounts(0, 0, 0), RequestCounts(3, 3, 0)
    story = Story(S.SUBMITTING, input_file_id=FILE)
    story.tell(CreateAccepted(shown(P.VALIDATING, counts=none)))
    story.tell(PollAnswered(shown(P.IN_PROGRESS, counts=all_done)), hours(1))
    story.tell(PollAnswered(shown(P.FINALIZING, counts=all_done)), hours(2))
    assert story.batch.state is S.FINALIZING
    seen: list[Effect] = []
    now = hours(2)
    while now < hours(7):
        assert story.batch.next_poll_at is not None
        now = story.batch.next_poll_at
        seen += story.tell(PollAnswered(shown(P.FINALIZING, counts=all_done)), now)
    kinds = {type(effect) for effect in seen}
    assert kinds == {PollAt, WarnSlow}
    (warning,) = (effect for effect in seen if isinstance(effect, WarnSlow))
    assert warning.state is S.FINALIZING
    assert 3600 < warning.age_s <= 3630
    polls = [effect.at for effect in seen if isinstance(effect, PollAt)]
    assert max(later - earlier for earlier, later in pairwise(polls)) <= timedelta(seconds=30)
    done = shown(P.COMPLETED, counts=all_done, output_file_id=FileId("file-out"))
    assert story.tell(PollAnswered(done), hours(8)) == (LandResults(done),)


@pytest.mark.parametrize("status", [P.COMPLETED, P.FAILED, P.EXPIRED, P.CANCELLED])
@pytest.mark.parametrize("state", [S.VALIDATING, S.IN_PROGRESS, S.FINALIZING, S.CANCELLING])
def test_every_terminal_status_is_landed(status: ProviderStatus, state: BatchState):
    """Rows may have finished in all of them, so all lead to the result files."""
    story = Story(state, provider_batch_id=BATCH_1, submitted_at=START)
    assert story.tell(PollAnswered(shown(status))) == (LandResults(shown(status)),)
    assert story.batch.state is S.LANDING


def test_a_status_nobody_told_us_about_is_polled_on():
    """An unknown status is kept in its own spelling and is no end."""
    story = Story.in_flight()
    strange = BatchSnapshot(BATCH_1, P.UNKNOWN, "paused_for_lunch", created_at=START)
    (poll,) = story.tell(PollAnswered(strange), after(20))
    assert isinstance(poll, PollAt)
    assert (story.batch.state, story.batch.provider_status) == (S.IN_PROGRESS, "paused_for_lunch")


def test_polls_slow_down_to_the_cap():
    """10 s, then half as long again each time, up to five minutes."""
    story = Story.in_flight()
    now, pauses = after(20), []
    for _ in range(11):
        (poll,) = story.tell(PollAnswered(shown(P.IN_PROGRESS)), now)
        pauses.append((poll.at - now).total_seconds())
        now = poll.at
    assert pauses == pytest.approx([15, 22.5, 33.75, 50.625, 75.9375, 113.90625, 170.859375, 256.289062, 300, 300, 300])


def test_a_poke_brings_the_poll_forward_but_never_below_the_floor():
    """A webhook a second after a poll waits for the floor, and a second one changes nothing."""
    story = Story.in_flight()
    story.batch = replace(story.batch, poll_interval_s=200.0)
    story.tell(PollAnswered(shown(P.IN_PROGRESS)), after(100))
    assert story.batch.next_poll_at == after(400)
    assert story.tell(Poked(), after(101)) == (PollAt(after(110)),)
    assert story.tell(Poked(), after(102)) == ()
    assert story.tell(Poked(), after(109)) == ()
    story.tell(PollAnswered(shown(P.IN_PROGRESS)), after(110))
    assert story.tell(Poked(), after(200)) == (PollAt(after(200)),)


def test_a_poke_after_a_restart_does_not_put_the_first_poll_off():
    """A restored batch is asked at once; news that comes meanwhile neither delays nor doubles that."""
    assert Story(S.VALIDATING, provider_batch_id=BATCH_1).tell(Poked()) == ()


def test_a_poll_is_due_when_the_window_ends():
    """The last pause is cut to the end of the window, though not below the floor."""
    story = Story.in_flight()
    story.batch = replace(story.batch, poll_interval_s=300.0)
    assert story.tell(PollAnswered(shown(P.IN_PROGRESS)), hours(24) - timedelta(seconds=60)) == (PollAt(hours(24)),)
    late = hours(24) - timedelta(seconds=3)
    assert story.tell(PollAnswered(shown(P.IN_PROGRESS)), late) == (PollAt(late + timedelta(seconds=10)),)


@pytest.mark.parametrize("is_shown", [True, False])
def test_past_the_window_and_a_grace_it_is_cancelled_once(is_shown: bool):
    """Half an hour past its window a batch is cancelled, whether it answers polls or not, and only once."""
    story = Story.in_flight()
    news = PollAnswered(shown(P.IN_PROGRESS)) if is_shown else PollFailed(failed(CallFailure.UNAVAILABLE))
    assert not any(isinstance(effect, CancelBatch) for effect in story.tell(news, hours(24.49)))
    cancel, poll = story.tell(news, hours(24.5))
    assert cancel == CancelBatch("window_passed")
    assert isinstance(poll, PollAt)
    assert story.batch.state is S.CANCELLING
    assert not any(isinstance(effect, CancelBatch) for effect in story.tell(news, hours(25)))


@pytest.mark.parametrize(("state", "slow_s"), [(S.VALIDATING, 300.0), (S.FINALIZING, 3600.0), (S.CANCELLING, 900.0)])
def test_a_state_that_lasts_is_told_once(state: BatchState, slow_s: float):
    """Validating 5 min, finalizing 1 h, cancelling 15 min: one warning with the age, and again only after a change."""
    story = Story(state, provider_batch_id=BATCH_1, submitted_at=START, snapshot=shown(P(state.value)))
    same = PollAnswered(shown(P(state.value)))
    assert [type(one) for one in story.tell(same, after(slow_s))] == [PollAt]
    warning, _ = story.tell(same, after(slow_s + 1))
    assert warning == WarnSlow(state, slow_s + 1)
    assert [type(one) for one in story.tell(same, after(slow_s + 2))] == [PollAt]


def test_one_failed_poll_proves_nothing():
    """A 404 may be a listing that lags: the batch stays where it is and is asked again, later each time."""
    story = Story.in_flight()
    assert story.tell(PollFailed(failed(CallFailure.NOT_FOUND)), after(20)) == (PollAt(after(35)),)
    assert story.tell(PollFailed(failed(CallFailure.THROTTLED, 200.0)), after(35)) == (PollAt(after(235)),)
    hold, poll = story.tell(PollFailed(failed(CallFailure.ACCOUNT)), after(235))
    assert hold == Hold("account", "account")
    assert isinstance(poll, PollAt)
    assert story.batch.state is S.IN_PROGRESS


def test_an_hour_without_being_found_asks_the_question_anew():
    """Deleted by somebody, or another's after all: the lots forget the batch, and a look-up decides about the rows."""
    story = Story.in_flight()
    gone = PollFailed(failed(CallFailure.NOT_FOUND))
    assert story.tell(gone, after(100)) == (PollAt(after(115)),)
    story.tell(PollFailed(failed(CallFailure.UNAVAILABLE)), after(2_000))
    story.tell(PollAnswered(shown(P.IN_PROGRESS)), after(3_000))
    story.tell(gone, after(3_100))
    story.tell(gone, after(6_699))
    assert story.batch.state is S.IN_PROGRESS
    assert story.tell(gone, after(6_700)) == (DisownBatch(BATCH_1),)
    assert story.batch.state is S.SUBMISSION_UNKNOWN
    assert (story.batch.provider_batch_id, story.batch.snapshot, story.batch.submitted_at) == (None, None, None)
    assert story.tell(Disowned(), after(6_701)) == (LookUpBatch(),)


def test_an_outage_does_not_prove_that_a_batch_has_gone():
    """One 404 after the create and an hour without the provider: only 404s without a break count."""
    story = Story.in_flight()
    gone, away = PollFailed(failed(CallFailure.NOT_FOUND)), PollFailed(failed(CallFailure.UNAVAILABLE))
    story.tell(gone, after(100))
    story.tell(away, after(200))
    story.tell(away, after(4_000))
    assert story.batch.state is S.IN_PROGRESS
    story.tell(gone, after(4_100))
    assert story.batch.state is S.IN_PROGRESS
    assert story.tell(gone, after(7_700)) == (DisownBatch(BATCH_1),)


def test_an_answer_about_a_batch_that_was_given_back_is_not_taken_for_ours():
    """It was asked for before the lines told; believing it would take the batch of others once more."""
    story = landing()
    story.tell(ResultsNotOurs(), after(100))
    story.tell(Disowned(), after(101))
    ours, theirs = replace(shown(P.IN_PROGRESS), provider_batch_id=ProviderBatchId("batch_2")), shown(P.COMPLETED)
    story.tell(BatchFound(ours), after(102))
    assert story.tell(PollAnswered(theirs), after(103)) == (PollAt(after(113)),)
    assert (story.batch.state, story.batch.provider_batch_id) == (S.VALIDATING, "batch_2")
    story.tell(PollAnswered(replace(ours, status=P.COMPLETED)), after(104))
    story.tell(ResultsIncomplete("null ids"), after(105))
    assert story.tell(PollAnswered(theirs), after(106)) == (PollAt(after(116)),)
    assert story.batch.snapshot is not None
    assert story.batch.snapshot.provider_batch_id == "batch_2"


def test_a_lot_that_comes_after_all_is_over_may_name_what_was_given_back():
    """Then nothing else is known of the batch, and its answer is the only one that can come."""
    story = landing()
    story.tell(ResultsNotOurs(), after(100))
    story.tell(Disowned(is_over=True), after(101))
    story.tell(LotGained(), after(102))
    assert story.tell(PollAnswered(shown(P.COMPLETED)), after(103)) == (LandResults(shown(P.COMPLETED)),)


def test_a_batch_that_comes_back_is_believed_again():
    """Denied for an hour, given up, and then on the list again: it is ours as before."""
    story = Story.in_flight()
    gone = PollFailed(failed(CallFailure.NOT_FOUND))
    story.tell(gone, after(100))
    story.tell(gone, after(3_700))
    story.tell(Disowned(), after(3_701))
    story.tell(BatchFound(shown(P.IN_PROGRESS)), after(3_702))
    story.tell(PollAnswered(shown(P.FINALIZING)), after(3_800))
    assert story.batch.state is S.FINALIZING


def test_a_batch_that_has_gone_after_it_was_read_is_only_cleaned_up():
    """Killed between deleting and writing it down: nothing waits for the batch, so no other is looked for."""
    story = landing()
    story.tell(ResultsNotOurs(), after(100))
    assert story.tell(Disowned(is_over=True), after(101)) == (CleanUp(),)
    assert story.batch.state is S.LANDED


def test_lines_of_others_send_the_search_on():
    """A batch whose lines are all somebody else's was only taken for ours: ours may be another one."""
    story = landing()
    assert story.tell(ResultsNotOurs(), after(100)) == (DisownBatch(BATCH_1),)
    story.tell(Disowned(), after(101))
    found = replace(shown(P.COMPLETED), provider_batch_id=ProviderBatchId("batch_2"))
    story.tell(BatchFound(found), after(102))
    assert story.batch.provider_batch_id == "batch_2"


def test_a_cancelled_batch_is_asked_until_it_has_ended():
    """After the cancel call the batch stays `cancelling`, whatever a lagging list says, until a terminal status."""
    story = Story.in_flight()
    assert story.tell(CancelWanted("operator"), after(12)) == (CancelBatch("operator"),)
    assert story.tell(CancelWanted("operator"), after(13)) == ()
    (poll,) = story.tell(CancelAnswered(shown(P.CANCELLING)), after(14))
    assert isinstance(poll, PollAt)
    story.tell(PollAnswered(shown(P.IN_PROGRESS)), after(30))
    assert story.batch.state is S.CANCELLING
    story.tell(PollAnswered(shown(P.CANCELLED)), after(60))
    assert story.batch.state is S.LANDING


def test_a_cancel_that_failed_is_repeated_unless_the_batch_had_ended():
    """A conflict means that it has ended, and the next poll tells how; anything else, a 404 too, is tried again."""
    story = Story.in_flight()
    story.tell(CancelWanted("operator"), after(12))
    assert story.tell(CancelFailed(failed(CallFailure.NOT_FOUND)), after(13)) == (
        CancelBatch("operator", after_s=10.0),
    )
    again = story.tell(CancelFailed(failed(CallFailure.THROTTLED, 90.0)), after(23))
    assert again == (CancelBatch("operator", after_s=90.0),)
    assert story.tell(CancelFailed(failed(CallFailure.CONFLICT)), after(113)) == (PollAt(after(123)),)


def test_a_lot_that_is_gained_learns_the_providers_id():
    """A partition that comes while the batch is on its way may still be SUBMITTING: the id is recorded in it."""
    story = Story.in_flight()
    assert story.tell(LotGained(), after(12)) == (RecordSubmitted(shown(P.IN_PROGRESS)),)


# -- home again


def landing() -> Story:
    """A batch whose result files are being read since second 100."""
    story = Story.in_flight()
    story.tell(PollAnswered(shown(P.COMPLETED)), after(100))
    return story


def test_incomplete_results_are_read_again_until_the_grace_is_over():
    """The batch is shown again before each reading; after 15 minutes absence is taken at its word."""
    story, now, readings = landing(), after(100), []
    while not readings or not readings[-1].is_last_chance:
        (effect,) = story.tell(ResultsIncomplete("fewer lines than counts"), now)
        if isinstance(effect, PollAt):
            assert effect.at == now + timedelta(seconds=60)
            now = effect.at
            (effect,) = story.tell(PollAnswered(shown(P.COMPLETED)), now)
        readings.append(effect)
    assert len(readings) == 15
    assert readings[-1].after_s == 60.0
    story.tell(ResultsRead(), now)
    assert story.batch.state is S.LANDED


def test_a_result_file_that_cannot_be_fetched_is_never_taken_for_absence():
    """Downloads that fail are repeated for as long as it takes, slower each time; account trouble holds the account."""
    story = landing()
    assert story.tell(ResultsUnavailable(failed(CallFailure.UNAVAILABLE)), after(100)) == (PollAt(after(110)),)
    assert story.tell(ResultsUnavailable(failed(CallFailure.THROTTLED, 500.0)), after(110)) == (PollAt(after(610)),)
    hold, poll = story.tell(ResultsUnavailable(failed(CallFailure.ACCOUNT)), hours(9))
    assert hold == Hold("account", "account")
    assert isinstance(poll, PollAt)


def test_a_refused_link_is_asked_for_again_before_the_account_is_held():
    """A link that has gone stale is answered 403 too: the batch is read again first, and only then is it the key."""
    refused = ResultsUnavailable(CallFailed("download", CallFailure.ACCOUNT, http_status=403))
    story = landing()
    assert story.tell(refused, after(100)) == (PollAt(after(110)),)
    done = shown(P.COMPLETED, output_file_id=FileId("fresh"))
    assert story.tell(PollAnswered(done), after(110)) == (LandResults(done),)
    assert Hold("account", "account") in story.tell(refused, after(120))
    bad_key = ResultsUnavailable(CallFailed("download", CallFailure.ACCOUNT, http_status=401))
    assert Hold("account", "account") in landing().tell(bad_key, after(100))


def test_a_listing_that_lags_does_not_undo_an_end():
    """Once a terminal status was seen, a poll that shows less leads to the files that are known."""
    story = landing()
    story.tell(ResultsIncomplete("null ids"), after(101))
    assert story.tell(PollAnswered(shown(P.FINALIZING)), after(161)) == (LandResults(shown(P.COMPLETED)),)
    story.tell(PollFailed(failed(CallFailure.UNAVAILABLE)), after(170))
    assert story.batch.state is S.LANDING


@pytest.mark.parametrize("news", [PollAnswered(shown(P.COMPLETED)), PollFailed(failed(CallFailure.UNAVAILABLE))])
def test_a_poll_that_is_answered_during_a_reading_starts_no_second_one(news: Event):
    """Two readings would share their files: a poll that was under way when the first began is dropped."""
    story = landing()
    assert story.tell(news, after(101)) == ()
    (again,) = story.tell(ResultsIncomplete("null ids"), after(102))
    assert isinstance(again, PollAt)
    assert story.tell(PollAnswered(shown(P.COMPLETED)), after(162)) == (LandResults(shown(P.COMPLETED)),)
    assert story.tell(news, after(163)) == ()


def test_the_last_reading_is_not_joined_by_another():
    """Also while the last chance is waited for, a late poll starts nothing."""
    story = landing()
    (effect,) = story.tell(ResultsIncomplete("fewer lines"), after(100 + 900))
    assert effect == LandResults(shown(P.COMPLETED), is_last_chance=True, after_s=60.0)
    assert story.tell(PollAnswered(shown(P.COMPLETED)), after(1_010)) == ()


def test_the_first_poll_after_a_restart_gives_every_lot_the_providers_id():
    """A lot gained before that poll could not be told the id yet; repeated, the record is harmless, and is left out."""
    story = Story(S.VALIDATING, provider_batch_id=BATCH_1, submitted_at=START)
    assert story.tell(LotGained()) == ()
    record, poll = story.tell(PollAnswered(shown(P.IN_PROGRESS)), after(1))
    assert record == RecordSubmitted(shown(P.IN_PROGRESS))
    assert isinstance(poll, PollAt)
    assert [type(one) for one in story.tell(PollAnswered(shown(P.IN_PROGRESS)), after(20))] == [PollAt]


def test_a_landed_batch_learns_its_id_from_the_poll():
    """Restored as landed without an id, a batch that is read again knows afterwards what the provider calls it."""
    story = Story(S.LANDED)
    assert story.tell(LotGained()) == (PollAt(START),)
    story.tell(PollAnswered(shown(P.COMPLETED)), after(1))
    assert story.batch.provider_batch_id == BATCH_1


def test_a_lot_that_is_gained_after_landing_is_read_too():
    """Its rows may be settled by nobody: the files are read again; a restored batch is asked for them first."""
    story = landing()
    story.tell(ResultsRead(), after(101))
    assert story.tell(LotGained(), after(102)) == (LandResults(shown(P.COMPLETED)),)
    restored = Story(S.LANDED, provider_batch_id=BATCH_1)
    assert restored.tell(LotGained()) == (PollAt(START),)
    assert restored.tell(PollAnswered(shown(P.IN_PROGRESS))) == (PollAt(after(60)),)
    assert restored.tell(PollAnswered(shown(P.COMPLETED)), after(60)) == (LandResults(shown(P.COMPLETED)),)


def test_cleaning_up_waits_for_the_other_owners():
    """Files are deleted once all lots are DONE; until then it is asked again, at most every five minutes."""
    story = Story(S.LANDED)
    pauses = [story.tell(CleanUpWaits())[0].after_s for _ in range(10)]
    assert pauses[:3] == [10, 15, 22.5]
    assert pauses[-1] == 300


# -- the table


def test_a_rule_and_an_ignore_never_meet():
    """No pair is both a rule and ignored."""
    assert not IGNORED & RULES.keys()


def test_the_final_states_have_no_rules():
    """Nothing leads out of a final state, and a quarantined batch is never news again."""
    assert not [state for state, _ in RULES if state in FINAL]
    assert {kind for state, kind in IGNORED if state is S.QUARANTINED} == set(events())


def test_news_that_makes_no_sense_is_illegal_and_says_where():
    """A pair nobody thought of names the batch, the state and the event, and nothing of their content."""
    with pytest.raises(IllegalTransition, match="batch B1: no rule for CreateAccepted in state sealed"):
        Story().tell(CreateAccepted(shown(P.VALIDATING)))


def test_every_kind_of_event_is_listed():
    """``events`` names each event once, and none of the effects."""
    kinds = events()
    names = [kind.__name__ for kind in kinds]
    assert len(names) == len(set(names))
    assert set(names) == {kind.__name__ for kind in Event.__subclasses__()}
    assert {kind for _, kind in RULES.keys() | IGNORED} <= set(kinds)


# -- the diagram

EDGE = re.compile(r"    (\w+|\[\*\]) --> (\w+|\[\*\])(?:: (\w+(?:, \w+)*))?")


def test_the_diagram_draws_exactly_the_table():
    """Every move the table allows is an edge with its events, and no edge is drawn that the table lacks."""
    first, *lines = diagram().split("\n")
    assert first == "stateDiagram-v2"
    drawn: set[tuple[str, str, str]] = set()
    for line in lines:
        match = EDGE.fullmatch(line)
        assert match, line
        source, target, names = match.groups()
        assert (names is None) == ("[*]" in {source, target})
        drawn.update((source, target, name) for name in (names or "").split(", ") if name)
    assert drawn == {
        (state.value, target.value, kind.__name__) for (state, kind), entry in RULES.items() for target in entry.targets
    }


def test_the_diagram_reaches_every_state_but_quarantine():
    """From the start, arrows lead to every state; quarantine alone is entered from outside the table."""
    edges = [match.groups()[:2] for match in map(EDGE.fullmatch, diagram().split("\n")) if match]
    reached = {"[*]"}
    while more := {target for source, target in edges if source in reached} - reached:
        reached |= more
    assert reached == {"[*]", *(state.value for state in BatchState)} - {"quarantined"}


def test_the_readme_shows_the_table_of_this_version():
    """The state diagram in the README is the generated one, to the letter."""
    text = README.read_text(encoding="utf-8")
    drawings = re.findall(r"```mermaid\n(stateDiagram-v2\n.*?)\n```", text, flags=re.DOTALL)
    if not drawings:
        pytest.skip("the README has no state diagram")
    assert drawings == [diagram()]
