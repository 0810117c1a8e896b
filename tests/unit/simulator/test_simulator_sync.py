"""The synchronous endpoints under limits: calls and tokens a minute, outages, slow answers, a clock that is wrong."""

from __future__ import annotations

import asyncio
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from sim_kit import CHAT, Bench, bench, body, jsonl, rows

from batchferry.simulator import Limits, ManualSimClock, Outage, Outcome, RowRule, Scenario, SimClock, SyncScript


def script(**members: Any) -> Scenario:
    """A scenario whose synchronous endpoints are scripted."""
    ahead_s = members.pop("clock_ahead_s", 0.0)
    return Scenario(sync=SyncScript(**members), clock_ahead_s=ahead_s)


async def ask(it: Bench, text: str = "Where is my card?", **members: Any) -> httpx.Response:
    """One chat call."""
    return await it.http.post(CHAT, json=body(text) | members)


async def until_slept(clock: ManualSimClock, count: int) -> None:
    """Wait until so many calls are being slow."""
    await asyncio.wait_for(clock.slept_on(count), 10)


async def test_without_a_script_nothing_is_limited() -> None:
    """By default a call is answered at once and says nothing of limits."""
    async with bench() as it:
        answers = [await ask(it) for _ in range(50)]
    assert {answer.status_code for answer in answers} == {200}
    assert not [name for name in answers[0].headers if name.startswith("x-ratelimit") or name == "retry-after"]


async def test_calls_a_minute_are_counted_down_refused_and_filled_up() -> None:
    """Three calls a minute: each answer shows what is left, the fourth is refused with the time that one more takes."""
    async with bench(script(calls_per_minute=3)) as it:
        shown = []
        for _ in range(3):
            answer = await ask(it)
            assert answer.status_code == 200
            shown.append([answer.headers[f"x-ratelimit-{name}-requests"] for name in ("limit", "remaining", "reset")])
        assert shown == [["3", "2", "20s"], ["3", "1", "40s"], ["3", "0", "1m0s"]]
        it.clock.advance(5)
        refused = await ask(it)
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "15"
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert refused.json()["error"]["type"] == "requests"
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        it.clock.advance(15)
        assert (await ask(it)).status_code == 200
        assert (await ask(it)).status_code == 429
        assert it.simulator.world.sync_gate.throttled == 2


async def test_a_refused_call_is_not_billed() -> None:
    """What was turned away was not run: neither by a limit nor by an outage."""
    async with bench(script(calls_per_minute=1, outages=(Outage(start_s=100, for_s=50),))) as it:
        assert (await ask(it)).status_code == 200
        assert (await ask(it)).status_code == 429
        it.clock.advance(100)
        assert (await ask(it)).status_code == 503
        assert it.simulator.bill.summary()["sync_runs"] == 1


async def test_tokens_a_minute_count_prompt_and_room_for_the_answer() -> None:
    """A body that allows a long answer uses up its tokens at once; one that can never fit gets no time to come back."""
    async with bench(script(tokens_per_minute=1000)) as it:
        first = await ask(it, max_completion_tokens=900)
        assert first.status_code == 200
        assert int(first.headers["x-ratelimit-remaining-tokens"]) < 100
        second = await ask(it, max_completion_tokens=200)
        assert second.status_code == 429
        assert second.json()["error"]["type"] == "tokens"
        assert 0 < int(second.headers["retry-after"]) <= 12
        hopeless = await ask(it, max_completion_tokens=2000)
        assert hopeless.status_code == 429
        assert "retry-after" not in hopeless.headers


async def test_every_model_and_project_has_its_own_limit() -> None:
    """One model's calls do not take from another's, nor one project's from another's."""
    keys = {"sk-one": "proj_one", "sk-two": "proj_two"}
    async with bench(script(calls_per_minute=1), keys=keys) as it:

        async def status(key: str, model: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            answer = await it.http.post(CHAT, json=body(model=model), headers=headers)
            return answer.status_code

        assert [await status("sk-one", "gpt-5-mini") for _ in range(2)] == [200, 429]
        assert [await status("sk-one", "gpt-4o-mini") for _ in range(2)] == [200, 429]
        assert [await status("sk-two", "gpt-5-mini") for _ in range(2)] == [200, 429]


@pytest.mark.parametrize("ahead_s", [0.0, 7200.0, -1800.5])
async def test_the_time_to_come_back_as_a_date_of_a_wrong_clock(ahead_s: float) -> None:
    """``Date`` and ``Retry-After`` come from the same clock, so only their difference tells the truth."""
    async with bench(script(calls_per_minute=2, retry_after="date", clock_ahead_s=ahead_s)) as it:
        for _ in range(2):
            await ask(it)
        refused = await ask(it)
        date, until = (parsedate_to_datetime(refused.headers[name]) for name in ("date", "retry-after"))
        assert (date - it.clock.now()).total_seconds() == pytest.approx(ahead_s, abs=1)
        assert 30 <= (until - date).total_seconds() <= 31


@pytest.mark.parametrize(
    ("form", "names"),
    [("milliseconds", {"retry-after-ms": "30000", "retry-after": "30"}), ("none", {})],
)
async def test_other_forms_of_the_time_to_come_back(form: str, names: dict[str, str]) -> None:
    """In milliseconds as well, or not at all."""
    async with bench(script(calls_per_minute=2, retry_after=form)) as it:
        for _ in range(2):
            await ask(it)
        refused = await ask(it)
    assert {name: value for name, value in refused.headers.items() if name.startswith("retry-after")} == names


async def test_an_outage_begins_and_ends_by_the_clock() -> None:
    """Every synchronous call is refused while it lasts; batches go on."""
    outage = Outage(start_s=60, for_s=600, retry_after_s=30)
    async with bench(script(outages=(outage, Outage(start_s=5000, for_s=1, status=500)))) as it:
        assert (await ask(it)).status_code == 200
        it.clock.advance(60)
        refused = await ask(it)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "30")
        assert refused.json()["error"]["type"] == "service_unavailable_error"
        await it.start(jsonl(rows(2)))
        it.clock.advance(599.9)
        assert (await ask(it)).status_code == 503
        it.clock.advance(0.1)
        assert (await ask(it)).status_code == 200
        it.clock.advance(4340)
        assert (await ask(it)).status_code == 500


async def test_slow_answers_take_virtual_time() -> None:
    """An answer comes when its time is over, not before; it was run at its beginning."""
    async with bench(script(latency_s=30)) as it:
        call = asyncio.create_task(ask(it))
        await until_slept(it.clock, 1)
        assert it.simulator.bill.summary()["sync_runs"] == 1
        it.clock.advance(29)
        assert not call.done()
        assert it.clock.sleepers == 1
        it.clock.advance(1)
        assert (await asyncio.wait_for(call, 5)).status_code == 200


async def test_slow_answers_follow_a_fast_clock() -> None:
    """On a clock that runs, the wait is as much shorter as the clock is faster."""
    clock = SimClock(speed=3600)
    async with bench(script(latency_s=60, latency_jitter=0.5), clock=clock) as it:
        began = clock.timestamp()
        assert (await ask(it)).status_code == 200
        assert clock.timestamp() - began >= 30


async def test_an_ending_simulator_lets_slow_calls_go() -> None:
    """Nobody waits for a clock that will not be moved again."""
    async with bench(script(latency_s=30)) as it:
        call = asyncio.create_task(ask(it))
        await until_slept(it.clock, 1)
        await it.simulator.stop()
        assert (await asyncio.wait_for(call, 5)).status_code == 200


async def test_too_many_calls_at_one_time_are_an_overload() -> None:
    """The third of three that overlap gets 503, and room is there again when one has ended."""
    async with bench(script(latency_s=30, concurrent_calls=2)) as it:
        calls = [asyncio.create_task(ask(it, f"Question {number}")) for number in range(2)]
        await until_slept(it.clock, 2)
        refused = await ask(it)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_is_overloaded")
        it.clock.advance(30)
        assert [answer.status_code for answer in await asyncio.gather(*calls)] == [200, 200]
        last = asyncio.create_task(ask(it))
        await until_slept(it.clock, 1)
        it.clock.advance(30)
        assert (await last).status_code == 200
        assert it.simulator.world.sync_gate.most_under_way == 2


async def test_a_scripted_row_error_still_shows_the_limits() -> None:
    """A row that fails by script used up a call, and its answer says so."""
    rule = RowRule(outcome=Outcome.HTTP_ERROR, status=500, retry_after_s=3)
    async with bench(Scenario(rows=(rule,), sync=SyncScript(calls_per_minute=60))) as it:
        answer = await ask(it)
    assert answer.status_code == 500
    assert (answer.headers["retry-after"], answer.headers["x-ratelimit-remaining-requests"]) == ("3", "59")


async def test_a_wrong_body_takes_nothing_from_the_limits() -> None:
    """A body that is refused for its shape was never held against a limit."""
    async with bench(Scenario(limits=Limits(), sync=SyncScript(calls_per_minute=2))) as it:
        assert (await it.http.post(CHAT, json={"model": "gpt-5-mini"})).status_code == 400
        assert (await ask(it)).headers["x-ratelimit-remaining-requests"] == "1"


@pytest.mark.parametrize(
    "members", [{"calls_per_minute": 0}, {"retry_after": "soon"}, {"outages": [{"for_s": 0}]}, {"latency_jitter": 1}]
)
def test_scripts_that_make_no_sense_are_refused(members: dict[str, Any]) -> None:
    """A wrong script is told when it is read."""
    with pytest.raises(ValidationError):
        Scenario.model_validate({"sync": members})


def test_a_script_is_data() -> None:
    """The whole script can be written as plain values and comes back as they are."""
    given = {
        "sync": {"calls_per_minute": 5, "retry_after": "date", "outages": [{"start_s": 5.0}]},
        "clock_ahead_s": 9.0,
    }
    assert Scenario.model_validate(given).model_dump(exclude_unset=True, mode="json") == given
