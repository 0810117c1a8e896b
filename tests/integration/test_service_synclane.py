"""The sync lane through the whole service: late, small, giant and rescued rows are answered by single calls.

One service lives through all the cases at once, each with a route of its own; the tests then look at what it
published and at the calls that the provider saw. The provider's clock is three hours behind ours.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from email.utils import formatdate
from typing import Any, ClassVar

import pytest
import pytest_asyncio
from inprocess_kit import (
    HOUR_S,
    Files,
    Line,
    Outcome,
    Pier,
    Sent,
    SyncCall,
    answer_body,
    answer_line,
    joined,
    unrun_line,
)
from lane_kit import (
    ENDLESS,
    NOW,
    TIMES,
    Case,
    Harbour,
    at,
    due_in,
    holds_of,
    lasting,
    operator_hold,
    registry,
    scenario,
    settings_of,
)

from batchferry.domain import control
from batchferry.domain.control import RescueWish, account_scope, hold_key
from batchferry.domain.ids import BatchId
from batchferry.domain.money import format_usd, price_row
from batchferry.domain.provider import Usage
from batchferry.engine import holds
from batchferry.simulator import Durations
from batchferry.simulator.errors import Refused
from batchferry.simulator.state import Status

AHEAD_S = -3 * HOUR_S
"""The provider's clock, against ours."""
CASES, case = registry()


# ------------------------------------------------------------------------------------------- who asks for it


@case("now-chat")
class NowChat(Case):
    """Rows that ask for the lane."""

    model = "gpt-4o-mini"
    headers = (NOW,)


@case("now-responses")
class NowResponses(NowChat):
    """The same at another endpoint."""

    def record(self, name: str, pier: Pier, custom_id: str, **otherwise: Any) -> Sent:
        body = json.dumps({"model": self.model, "input": f"case/{name}/ {custom_id}"}).encode()
        return super().record(name, pier, custom_id, body=body, url="/v1/responses")


@case("now-embeddings")
class NowEmbeddings(NowChat):
    """And at a third."""

    model = "text-embedding-3-small"

    def record(self, name: str, pier: Pier, custom_id: str, **otherwise: Any) -> Sent:
        body = json.dumps({"model": self.model, "input": f"case/{name}/ {custom_id}"}).encode()
        return super().record(name, pier, custom_id, body=body, url="/v1/embeddings")


# ----------------------------------------------------------------------------------------------- late rows


@case("late-sync")
class LateSync(Case):
    """Deadlines that no batch can keep."""

    deadline_h = 8.0


@case("late-batch")
class LateBatch(LateSync):
    """They go by batch all the same, which takes longer than they have."""

    route: ClassVar = {"late": "batch"}
    deadline_h = 5.0

    def durations(self, life: int) -> Durations | None:
        return lasting(5.7)


@case("late-fail")
class LateFail(LateSync):
    """They are not to be run at all."""

    route: ClassVar = {"late": "fail"}


@case("late-no-lane")
class LateNoLane(LateBatch):
    """The account has no lane."""

    route: ClassVar = {}
    account_settings: ClassVar = {"sync": {"enabled": False}}


@case("late-budget")
class LateBudget(LateBatch):
    """More of them than the lane may take in an hour."""

    route: ClassVar = {}
    rows = tuple(f"r{number:03}" for number in range(200))
    account_settings: ClassVar = {"sync": {"rows_per_hour": 3}}


# ------------------------------------------------------------------------------------------------- retries


class Called(Case):
    """One row for the lane, the first calls refused."""

    rows = ("r1",)
    headers = (NOW,)
    failing = 1

    def refusal(self, pier_now_s: float) -> Refused:
        return Refused(500, "The server had an error.", error_type="server_error")

    def refuse_call(self, call: SyncCall) -> Refused | None:
        return self.refusal(call.at.timestamp()) if call.attempt <= self.failing else None


@case("call-500")
class Call500(Called):
    """500, then an answer."""


class Throttled(Called):
    """429 with a wish to come back after two hours; it slows the account, so the account is its own."""

    account_settings: ClassVar = {}

    def wish(self, now_s: float) -> str:
        return "7200"

    def refusal(self, pier_now_s: float) -> Refused:
        return Refused(
            429,
            "Rate limit reached.",
            error_type="requests",
            code="rate_limit_exceeded",
            headers={"retry-after": self.wish(pier_now_s)},
        )


@case("call-429-seconds")
class Call429Seconds(Throttled):
    """In seconds."""


@case("call-429-date")
class Call429Date(Throttled):
    """As a date of the provider's clock, which lies an hour before our present."""

    def wish(self, now_s: float) -> str:
        return formatdate(now_s + AHEAD_S + 7200, usegmt=True)


@case("call-used-up")
class CallUsedUp(Called):
    """Every call fails, and there is time for a batch."""

    route: ClassVar = {"sla_s": 60 * HOUR_S}
    failing = 99


@case("call-used-up-late")
class CallUsedUpLate(CallUsedUp):
    """Every call fails, and no batch fits any more."""

    deadline_h = 8.0


@case("call-quota")
class CallQuota(Called):
    """The account has no money left for two calls."""

    account_settings: ClassVar = {}
    failing = 2

    def refusal(self, pier_now_s: float) -> Refused:
        return Refused(
            429, "You exceeded your current quota.", error_type="insufficient_quota", code="insufficient_quota"
        )


@case("outage")
class Outage(Case):
    """Nobody is there for four hours."""

    rows = tuple(f"r{number:02}" for number in range(12))
    headers = (NOW,)
    account_settings: ClassVar = {
        "sync": {"breaker_failures": 3, "breaker_pause_s": HOUR_S, "max_concurrency": 4, "tries": 10}
    }
    is_seen = False

    def refuse_call(self, call: SyncCall) -> Refused | None:
        self.began = min(getattr(self, "began", call.at), call.at)
        if call.at - self.began >= timedelta(hours=4):
            return None
        self.refused = {*getattr(self, "refused", set()), (call.text, call.attempt)}
        return Refused(503, "The server is overloaded.", error_type="service_unavailable_error")

    async def drive(self, name: str, pier: Pier) -> None:
        series = ("sync_breaker_is_open", (("account", name),))
        await pier.until(lambda: pier.telemetry.gauges.get(series) == 1, "an open breaker")
        await pier.until(lambda: pier.telemetry.gauges.get(series) == 0, "a closed breaker")
        self.is_seen = True


# ------------------------------------------------------------------------------- small, giant and too long rows


@case("small")
class Small(Case):
    """A batch of three, at its time threshold."""

    route: ClassVar = {"small": "sync", "min_rows": 10}


@case("small-not")
class SmallNot(Small):
    """Enough rows for a batch."""

    route: ClassVar = {"small": "sync", "min_rows": 3}


class LongRow(Case):
    """One giant among small rows."""

    lane = ""
    rows = ("r1", "giant " + "word " * 300, "r3")

    def records(self, name: str, pier: Pier) -> list[Sent]:
        return [self.record(name, pier, f"c{number}", text=text) for number, text in enumerate(self.rows)]


@case("long-sync")
class LongSync(LongRow):
    """It is called."""

    route: ClassVar = {"long_row": {"over_tokens": 200, "lane": "sync"}}


@case("long-own")
class LongOwn(LongRow):
    """It has a batch of its own."""

    route: ClassVar = {"long_row": {"over_tokens": 200, "lane": "own_batch"}}


@case("larger")
class Larger(Case):
    """r2 is too long for its model, in a batch as in a call."""

    route: ClassVar = {"policies": {"too_long": "sync"}, "larger_model": "gpt-4o", "max_rows": 3}

    def files(self, life: int, lines: Sequence[Line], files: Files) -> Files:
        output = [answer_line(line.wire_id, answer_body("fits")) for line in lines if line.text != "r2"]
        error = [answer_line(line.wire_id, TOO_LONG, 400) for line in lines if line.text == "r2"]
        return Files(joined(output), joined(error) if error else None)


TOO_LONG = (
    b'{"error":{"message":"input is longer than the model\'s context","type":"invalid_request_error","param":'
    b'"messages","code":"context_length_exceeded"}}'
)


@case("context")
class Context(LongRow):
    """A row that its model cannot take, by the route's own word."""

    rows = ("r1", "longer " + "than any model likes " * 120, "r3")
    route: ClassVar = {"context_tokens": 200}


# ----------------------------------------------------------------------------------------------------- rescue


class Stuck(Case):
    """A batch of four that does not come to an end; it has run two of them when it is cancelled.

    The deadline is 11.5 h away: in time for a batch that leaves within an hour and a half, due for a rescue after
    2.5 h, and the batch would expire after 6 h.
    """

    rows = ("r1", "r2", "r3", "r4")
    route: ClassVar = {"max_rows": 4}
    deadline_h = 11.5

    def durations(self, life: int) -> Durations | None:
        return ENDLESS.model_copy(update={"cancelling_s": 360.0})

    def files(self, life: int, lines: Sequence[Line], files: Files) -> Files:
        done = [line for line in lines if line.text in {"r1", "r2"}]
        return Files(
            joined(answer_line(line.wire_id, answer_body("by batch")) for line in done),
            joined(unrun_line(line.wire_id, "batch_cancelled") for line in lines if line not in done),
        )


@case("rescue")
class Rescue(Stuck):
    """It is cancelled quickly."""


@case("race")
class Race(Stuck):
    """Its cancelling takes longer than the deadline lets us wait; it had run all of them."""

    def durations(self, life: int) -> Durations | None:
        return ENDLESS.model_copy(update={"cancelling_s": 9 * HOUR_S})

    def files(self, life: int, lines: Sequence[Line], files: Files) -> Files:
        return Files(joined(answer_line(line.wire_id, answer_body("by batch")) for line in lines), None)


@case("beside")
class Beside(Case):
    """Two rows of ten are due; the batch ends a little later with all ten."""

    rows = tuple(f"r{number}" for number in range(10))
    route: ClassVar = {"max_rows": 10, "cancel_share": 0.5}

    def record(self, name: str, pier: Pier, custom_id: str, **otherwise: Any) -> Sent:
        headers = [due_in(pier, 11.5)] if custom_id in {"r3", "r7"} else []
        return super().record(name, pier, custom_id, headers=headers)

    def durations(self, life: int) -> Durations | None:
        return lasting(5.8)

    def files(self, life: int, lines: Sequence[Line], files: Files) -> Files:
        return Files(joined(answer_line(line.wire_id, answer_body("by batch")) for line in lines), None)


# ----------------------------------------------------------------------------------------- operators' wishes


@case("wish-rescue")
class WishRescue(Stuck):
    """An operator wants a batch's rows rescued long before they are due."""

    deadline_h = None

    async def drive(self, name: str, pier: Pier) -> None:
        await pier.until(lambda: "in_progress" in pier.provider.shown[name], "a running batch")
        (job,) = await pier.jobs(name)
        self.asked_at = pier.now
        await pier.tell(RescueWish(BatchId(str(job["batch_id"])), pier.now))


@case("held")
class Held(Case):
    """An operator's hold stands before rows come that ask for the lane."""

    headers = (NOW,)

    def records(self, name: str, pier: Pier) -> list[Sent]:
        return []

    async def drive(self, name: str, pier: Pier) -> None:
        hold = operator_hold(self, name, pier)
        await pier.tell(hold)
        await pier.until(lambda: hold_key(hold) in pier.supervisor.fleet.control.holds, "the hold to stand")
        await pier.send(name, [self.record(name, pier, custom_id) for custom_id in self.rows])
        later = pier.now + timedelta(hours=3)
        await pier.until(lambda: pier.now >= later, "three hours")
        assert len(pier.missing(name)) == 3
        self.released_at = pier.now
        await pier.tell(control.Lifted(hold_key(hold)))
        await pier.landed(name)


# ------------------------------------------------------------------------------------------------- the tests


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def harbour(broker: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harbour]:
    """All cases, played."""
    with pytest.MonkeyPatch.context() as patch:
        # Hours pass here between two submissions: a hold's reason must be remembered for longer than in real life.
        patch.setattr(holds, "FORGET_AFTER_S", 48 * HOUR_S)
        pier = Pier(
            broker.bootstrap,
            tmp_path_factory.mktemp("synclane"),
            patch,
            CASES,
            scenario(clock_ahead_s=AHEAD_S, sync={"latency_s": 30}),
            limits={"max_clock_skew_s": 4 * HOUR_S},
            **settings_of(CASES),
            **TIMES,
        )
        async with pier:
            played = Harbour(pier, CASES)
            await played.play([name for name, one in CASES.items() if isinstance(one, Stuck | Beside)])
            yield played


@pytest.mark.parametrize("name", ["now-chat", "now-responses", "now-embeddings"])
def test_rows_that_ask_for_it_go_through_the_lane(harbour: Harbour, name: str) -> None:
    """``priority: now``: one call a row at the row's own endpoint, at the list price, and no batch."""
    outcomes = harbour.outcomes(name)
    assert harbour.lanes(name) == ["sync"] * 3
    assert harbour.sent(name) == []
    assert sorted(call.text for call in harbour.calls(name)) == ["r1", "r2", "r3"]
    for one in outcomes:
        assert one.said["deadline_met"] is True
        assert one.said["batch"]["provider_batch_id"] is None
        assert one.said["cost"]["basis"] == "list"
        assert one.said["cost"]["usd"] == one.said["cost"]["sync_usd"]
    assert {call.endpoint for call in harbour.calls(name)} == {outcomes[0].said["batch"]["endpoint"]}


def test_a_late_row_is_called(harbour: Harbour) -> None:
    """By default a row that no batch could bring home in time goes through the lane, and is in time."""
    assert harbour.lanes("late-sync") == ["sync"] * 3
    assert harbour.sent("late-sync") == []
    assert all(one.said["deadline_met"] for one in harbour.outcomes("late-sync"))


def in_time_to_warn(outcomes: Sequence[Outcome]) -> set[tuple[int, int]]:
    """Rows whose batch was at the provider well before their deadline: the risk could be seen before the miss."""
    return {
        one.where
        for one in outcomes
        if at(one.said["deadline"]) - at(one.said["batch"]["submitted_at"]) > timedelta(hours=2)
    }


@pytest.mark.parametrize("name", ["late-batch", "late-no-lane"])
def test_a_late_row_may_go_by_batch(harbour: Harbour, name: str) -> None:
    """With ``late: batch``, or without a lane, it is answered too late; the risk and the miss are announced."""
    assert harbour.classes(name) == ["succeeded"] * 3
    assert harbour.lanes(name) == ["batch"] * 3
    assert harbour.calls(name) == []
    assert not any(one.said["deadline_met"] for one in harbour.outcomes(name))
    placed = set(harbour.pier.placed[name])
    assert harbour.named_by("deadline_at_risk", name) >= in_time_to_warn(harbour.outcomes(name))
    assert harbour.named_by("deadline_missed", name) == placed


def test_a_late_row_may_be_given_up(harbour: Harbour) -> None:
    """With ``late: fail`` it is never sent."""
    assert harbour.classes("late-fail") == ["late"] * 3
    assert harbour.sent("late-fail") == []
    assert harbour.calls("late-fail") == []
    assert all(one.said["error"]["remedy"] for one in harbour.outcomes("late-fail"))


def test_beyond_the_hourly_budget_late_rows_go_by_batch(harbour: Harbour) -> None:
    """The lane takes what its budget holds, the rest goes by batch, and each row that came too late was announced."""
    outcomes = harbour.outcomes("late-budget")
    assert [one.row_class for one in outcomes] == ["succeeded"] * 200
    called = [one for one in outcomes if one.said["batch"]["lane"] == "sync"]
    batched = [one for one in outcomes if one.said["batch"]["lane"] == "batch"]
    assert called
    assert batched
    first, last = (
        min(call.at for call in harbour.calls("late-budget")),
        max(call.at for call in harbour.calls("late-budget")),
    )
    assert len(called) <= 3 * (1 + (last - first) / timedelta(hours=1)) + 1
    lives = harbour.pier.provider.lives["late-budget"]
    assert {life.batch.status for life in lives} == {Status.COMPLETED}, "cancelled for rows that the lane cannot take"
    missed = {one.where for one in outcomes if not one.said["deadline_met"]}
    assert {one.where for one in batched} <= missed
    assert harbour.named_by("deadline_at_risk", "late-budget") >= in_time_to_warn(batched)
    assert harbour.pier.telemetry.total("sync_lane_refused", reason="budget") > 0


def test_every_miss_is_announced(harbour: Harbour) -> None:
    """Outcomes after their deadline, whatever the reason, are the rows that events of missed deadlines name."""
    missed, announced = set(), set()
    for name in CASES:
        missed |= {one.where for one in harbour.outcomes(name) if one.said["deadline_met"] is False}
        announced |= harbour.named_by("deadline_missed", name)
    assert announced == missed
    assert missed


def test_a_failed_call_is_tried_again(harbour: Harbour) -> None:
    """500, then 200: one answer, one try counted."""
    (one,) = harbour.outcomes("call-500")
    assert one.is_result
    assert one.said["attempts"] == {"sync": 1}
    assert len(harbour.calls("call-500")) == 2


@pytest.mark.parametrize("name", ["call-429-seconds", "call-429-date"])
def test_a_wish_to_come_back_later_is_kept(harbour: Harbour, name: str) -> None:
    """Retry-After in seconds, or as a date of a clock that differs from ours by hours: the next call comes after it."""
    (one,) = harbour.outcomes(name)
    assert one.is_result
    first, second = harbour.calls(name)
    assert timedelta(hours=2) <= second.at - first.at < timedelta(hours=4)


def test_used_up_tries_end_in_a_batch_while_there_is_time(harbour: Harbour) -> None:
    """Three calls without an answer, and a batch could still come home: it does."""
    (one,) = harbour.outcomes("call-used-up")
    assert one.is_result
    assert one.said["batch"]["lane"] == "batch"
    assert one.said["deadline_met"] is True
    assert len(harbour.calls("call-used-up")) == 3
    assert harbour.sent("call-used-up") == [["r1"]]


def test_used_up_tries_without_time_are_a_failure(harbour: Harbour) -> None:
    """Three calls without an answer, and no batch fits: the row's failure says what the provider said."""
    (one,) = harbour.outcomes("call-used-up-late")
    assert one.row_class == "transient"
    assert one.said["error"]["http_status"] == 500
    assert len(harbour.calls("call-used-up-late")) == 3
    assert harbour.sent("call-used-up-late") == []


def test_an_exhausted_quota_holds_the_account(harbour: Harbour) -> None:
    """The row stays and no try is used; the hold ends by its time, and its record by the call that succeeds."""
    (one,) = harbour.outcomes("call-quota")
    assert one.is_result
    assert one.said["attempts"] == {}
    scope = account_scope("call-quota")
    placed = holds_of(harbour.pier, "call-quota", "sync_account", scope)
    assert [hold.times for hold in placed] == [1, 2]
    second, third = harbour.calls("call-quota")[1:]
    assert placed[0].until is not None
    assert placed[1].until is not None
    assert second.at >= placed[0].until - timedelta(minutes=5)
    assert third.at >= placed[1].until - timedelta(minutes=5)
    released = [event for event in harbour.pier.events("key_released") if event["scope"] == scope]
    assert [event["reason"] for event in released] == ["sync_account"]
    assert scope not in {hold.scope for hold in harbour.pier.supervisor.fleet.control.holds.values()}


def test_an_outage_closes_the_lane(harbour: Harbour) -> None:
    """After three refused calls nobody calls but one probe an hour. Only the calls that found the outage out cost a try;
    who called while it was known, and who waited, loses none. All are answered.
    """
    assert harbour.lanes("outage") == ["sync"] * 12
    one = CASES["outage"]
    assert one.is_seen  # type: ignore[attr-defined]
    refused: set[tuple[str, int]] = one.refused  # type: ignore[attr-defined]
    assert 3 <= len(refused) <= 4 + 5
    tries = [outcome.said["attempts"].get("sync", 0) for outcome in harbour.outcomes("outage")]
    assert sum(tries) <= 2
    assert max(tries) <= 1


def test_a_small_batch_may_be_called(harbour: Harbour) -> None:
    """With ``small: sync`` a batch below ``min_rows`` is unpacked at its time threshold; a larger one leaves."""
    assert harbour.lanes("small") == ["sync"] * 3
    assert harbour.sent("small") == []
    first = min(call.at for call in harbour.calls("small"))
    assert first - at(harbour.outcomes("small")[0].said["t0"]) >= timedelta(hours=1.4)
    assert harbour.lanes("small-not") == ["batch"] * 3


def test_a_giant_row_does_not_hold_up_a_batch(harbour: Harbour) -> None:
    """``long_row``: it is called, or has a batch of its own; the others travel as always."""
    assert harbour.lanes("long-sync") == ["batch", "sync", "batch"]
    assert harbour.sent("long-sync") == [["r1", "r3"]]
    assert harbour.lanes("long-own") == ["batch"] * 3
    assert sorted(len(texts) for texts in harbour.sent("long-own")) == [1, 2]


def test_a_too_long_row_asks_a_larger_model(harbour: Harbour) -> None:
    """``too_long: sync`` with ``larger_model``: one call that carries that model and has its price."""
    outcomes = harbour.outcomes("larger")
    assert [one.row_class for one in outcomes] == ["succeeded"] * 3
    assert harbour.lanes("larger") == ["batch", "sync", "batch"]
    (call,) = harbour.calls("larger")
    assert (call.text, call.body["model"]) == ("r2", "gpt-4o")
    said = outcomes[1].said
    assert said["attempts"] == {"too_long": 1}
    used = said["usage"]
    usage = Usage(used["input_tokens"], used["output_tokens"], used["cached_tokens"])
    price = price_row("openai", "gpt-4o", usage, call.at, batch=False)
    assert price is not None
    assert said["cost"]["usd"] == format_usd(price.picodollars)


def test_a_row_longer_than_its_model_is_never_sent(harbour: Harbour) -> None:
    """By the route's ``context_tokens``: a failure that names both lengths; its neighbours travel."""
    assert harbour.classes("context") == ["succeeded", "too_long", "succeeded"]
    assert harbour.lanes("context") == ["batch", None, "batch"]
    assert harbour.sent("context") == [["r1", "r3"]]
    assert harbour.calls("context") == []
    assert " 200" in harbour.outcomes("context")[1].said["error"]["message"]


def test_a_stuck_batch_is_rescued(harbour: Harbour) -> None:
    """At deadline - lead - cancel it is cancelled, what it has run is landed, the rest is called before the deadline."""
    outcomes = harbour.outcomes("rescue")
    assert harbour.lanes("rescue") == ["batch", "batch", "sync", "sync"]
    assert all(one.said["deadline_met"] for one in outcomes)
    assert sorted(call.text for call in harbour.calls("rescue")) == ["r3", "r4"]
    (life,) = harbour.pier.provider.lives["rescue"]
    assert life.batch.status is Status.CANCELLED
    left_s = at(outcomes[0].said["deadline"]).timestamp() - (life.batch.cancelling_at or 0)
    assert 6 * HOUR_S < left_s <= 9 * HOUR_S + 1


def test_a_hanging_cancel_is_a_race(harbour: Harbour) -> None:
    """At deadline - lead all rows are called though the batch is still cancelling; its late answers change nothing."""
    assert harbour.lanes("race") == ["sync"] * 4
    assert all(one.said["deadline_met"] for one in harbour.outcomes("race"))
    assert len(harbour.calls("race")) == 4
    (life,) = harbour.pier.provider.lives["race"]
    assert life.batch.status is Status.CANCELLED
    assert life.batch.output_file_id is not None
    assert all(call.at.timestamp() < (life.batch.ended_at or 0) for call in harbour.calls("race"))


def test_few_due_rows_run_beside_their_batch(harbour: Harbour) -> None:
    """Below ``cancel_share`` the batch lives on: two rows are called, eight come with it, each has one outcome."""
    lanes = harbour.lanes("beside")
    assert [number for number, lane in enumerate(lanes) if lane == "sync"] == [3, 7]
    assert all(one.said["deadline_met"] for one in harbour.outcomes("beside"))
    (life,) = harbour.pier.provider.lives["beside"]
    assert life.batch.status is Status.COMPLETED
    assert len(life.lines) == 10


def test_an_operator_may_want_a_rescue(harbour: Harbour) -> None:
    """``rescue/<batch>``: the batch is cancelled long before its rows are due, and the rest is called."""
    assert harbour.lanes("wish-rescue") == ["batch", "batch", "sync", "sync"]
    (life,) = harbour.pier.provider.lives["wish-rescue"]
    cancelled_s = life.batch.cancelling_at or 0
    asked_at = CASES["wish-rescue"].asked_at  # type: ignore[attr-defined]
    assert 0 <= cancelled_s - asked_at.timestamp() < 3 * HOUR_S


def test_an_operators_hold_keeps_rows_from_the_lane(harbour: Harbour) -> None:
    """Rows that ask for the lane wait while their key is held, and are called after its release."""
    assert harbour.lanes("held") == ["sync"] * 3
    released_at = CASES["held"].released_at  # type: ignore[attr-defined]
    assert all(call.at >= released_at - timedelta(minutes=1) for call in harbour.calls("held"))
