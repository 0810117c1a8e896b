"""Single calls against a real HTTP server: the adapter and the official client see the same answers and refusals."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from batchferry.domain.pacing import BreakerState, Pace
from batchferry.domain.provider import CallFailure
from batchferry.domain.rows import RowClass, RowFlag
from batchferry.providers import http
from batchferry.providers.openai import OpenAIAccount, OpenAIProvider
from batchferry.simulator import (
    DEFAULT_KEY,
    CallName,
    FaultKind,
    FaultRule,
    ManualSimClock,
    Outage,
    Outcome,
    RowMatch,
    RowRule,
    Scenario,
    Simulator,
    SimulatorSettings,
    SyncScript,
)

CHAT = "/v1/chat/completions"
MODEL = "gpt-5-mini"
TIMEOUT_S = 20.0


class SimTime:
    """The service's clock on the simulator's time."""

    def __init__(self, clock: ManualSimClock) -> None:
        self.clock = clock

    def now(self) -> Any:
        return self.clock.now()

    def monotonic(self) -> float:
        return self.clock.timestamp()

    async def sleep(self, seconds: float) -> None:
        self.clock.advance(seconds)


class Quay:
    """A simulator with the adapter and the official client before it."""

    def __init__(self, simulator: Simulator, clock: ManualSimClock) -> None:
        self.simulator = simulator
        self.clock = clock
        self.provider = OpenAIProvider(OpenAIAccount("sim", simulator.base_url, DEFAULT_KEY), SimTime(clock))
        self.official = openai.AsyncOpenAI(api_key=DEFAULT_KEY, base_url=simulator.base_url, max_retries=0)

    async def answer(self, text: str = "Where is my card?") -> Any:
        """One chat call by the adapter."""
        return await self.provider.answer(CHAT, chat_body(text), TIMEOUT_S)

    async def official_answer(self, text: str = "Where is my card?") -> Any:
        """The same by the official client, as a raw answer."""
        return await self.official.chat.completions.with_raw_response.create(**json.loads(chat_body(text)))


def chat_body(text: str) -> bytes:
    """A chat request."""
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": text}]}).encode()


@pytest.fixture
async def quay(request: pytest.FixtureRequest) -> AsyncIterator[Quay]:
    """A running simulator on a clock that stands."""
    clock = ManualSimClock()
    script = getattr(request, "param", Scenario())
    async with Simulator(SimulatorSettings(clock=clock, scenario=script)) as simulator:
        made = Quay(simulator, clock)
        yield made
        await made.provider.close()
        await made.official.close()


@pytest.mark.parametrize(
    ("endpoint", "body", "member"),
    [
        (CHAT, {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}, "choices"),
        ("/v1/responses", {"model": MODEL, "input": "hello"}, "output"),
        ("/v1/embeddings", {"model": "text-embedding-3-small", "input": ["one", "two"]}, "data"),
    ],
)
async def test_single_calls_of_the_three_endpoints(
    quay: Quay, endpoint: str, body: dict[str, Any], member: str
) -> None:
    """Each is answered, judged a success with its tokens, and stands on the bill as a single run."""
    got = await quay.provider.answer(endpoint, json.dumps(body).encode(), TIMEOUT_S)
    assert got.failure is None
    line = got.line
    assert (line.row_class, line.http_status, line.flags) == (RowClass.SUCCEEDED, 200, ())
    assert line.usage is not None
    assert line.usage.input_tokens > 0
    assert (line.provider_request_id or "").startswith("req_")
    assert json.loads(line.body or b"")[member]
    assert quay.simulator.bill.body(body) == (0, 1, 1)


ROWS = (
    (Outcome.CONTEXT_LENGTH, RowClass.TOO_LONG, ()),
    (Outcome.CONTENT_FILTER, RowClass.CONTENT_FILTERED, ()),
    (Outcome.TRUNCATED, RowClass.SUCCEEDED, (RowFlag.TRUNCATED,)),
    (Outcome.REFUSAL, RowClass.SUCCEEDED, (RowFlag.REFUSED,)),
    (Outcome.TOOL_CALL, RowClass.SUCCEEDED, (RowFlag.TOOL_CALL_PENDING,)),
    (Outcome.EMPTY_BODY, RowClass.TRANSIENT, ()),
    (Outcome.UNREADABLE, RowClass.UNREADABLE, ()),
    (Outcome.INVALID_UTF8, RowClass.SUCCEEDED, ()),
    (Outcome.LINE_SEPARATOR, RowClass.SUCCEEDED, ()),
    (Outcome.NUL, RowClass.SUCCEEDED, ()),
    (Outcome.TIMEOUT, RowClass.TRANSIENT, ()),
    (Outcome.STATUS_ZERO, RowClass.TRANSIENT, ()),
    (Outcome.HTTP_ERROR, RowClass.TRANSIENT, ()),
)
SCRIPTED = Scenario(
    rows=tuple(RowRule(match=RowMatch(body_contains=f"end {outcome} now"), outcome=outcome) for outcome, _, _ in ROWS)
)


@pytest.mark.parametrize("quay", [SCRIPTED], indirect=True)
async def test_every_end_of_a_row_has_its_class(quay: Quay) -> None:
    """However a row ends, a single call of it is judged as a result line would be."""
    for outcome, row_class, flags in ROWS:
        got = await quay.answer(f"end {outcome} now")
        assert (outcome, got.line.row_class) == (outcome, row_class)
        assert set(flags) <= set(got.line.flags), outcome
        if got.line.body is not None:
            json.loads(got.line.body)


LIMITED = {
    form: Scenario(sync=SyncScript(calls_per_minute=2, retry_after=form), clock_ahead_s=5400.0)
    for form in ("seconds", "date", "milliseconds")
}


@pytest.mark.parametrize("quay", LIMITED.values(), indirect=True, ids=LIMITED)
async def test_a_calls_limit_is_met_and_read(quay: Quay) -> None:
    """In each form, the refusal names the same half minute, whatever the server's clock says; then there is room."""
    first = await quay.answer("one")
    assert (first.hints.calls_left, first.hints.calls_reset_s) == (1, 30.0)
    second = await quay.answer("two")
    assert (second.hints.calls_left, second.hints.calls_reset_s) == (0, 60.0)
    refused = await quay.answer("three")
    assert refused.failure is not None
    assert (refused.failure.kind, refused.failure.code, refused.failure.is_definite) == (
        CallFailure.THROTTLED,
        "rate_limit_exceeded",
        True,
    )
    assert (refused.line.row_class, refused.may_have_run) == (RowClass.TRANSIENT, False)
    wait_s = refused.hints.retry_after_s
    assert wait_s is not None
    assert 30.0 <= wait_s <= 31.0
    quay.clock.advance(wait_s)
    assert (await quay.answer("three")).failure is None


@pytest.mark.parametrize("quay", LIMITED.values(), indirect=True, ids=LIMITED)
async def test_the_official_client_sees_the_same(quay: Quay) -> None:
    """Its raw answers have the same headers, and its exception the same code, as the adapter reads."""
    raw = await quay.official_answer("one")
    assert raw.parse().choices[0].message.content
    assert http.pace_hints(raw.headers, quay.clock.now()).calls_left == 1
    await quay.official_answer("two")
    with pytest.raises(openai.RateLimitError) as throttled:
        await quay.official_answer("three")
    theirs = http.pace_hints(throttled.value.response.headers, quay.clock.now())  # type: ignore[arg-type]
    ours = await quay.answer("three")
    assert ours.failure is not None
    assert (throttled.value.code, throttled.value.status_code) == (ours.failure.code, ours.failure.http_status)
    assert theirs == ours.hints


@pytest.mark.parametrize("quay", [LIMITED["milliseconds"]], indirect=True)
async def test_the_official_clients_own_retry_obeys_the_hint(quay: Quay, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its retries on, the client waits out what the simulator asks for and is answered."""
    naps: list[float] = []

    async def nap(seconds: float) -> None:
        naps.append(seconds)
        quay.clock.advance(seconds)

    monkeypatch.setattr("openai._base_client.anyio.sleep", nap)
    for text in ("one", "two"):
        await quay.answer(text)
    patient = quay.official.with_options(max_retries=1)
    assert (await patient.chat.completions.create(**json.loads(chat_body("three")))).choices
    assert len(naps) == 1
    assert 30.0 <= naps[0] <= 31.0


@pytest.mark.parametrize("quay", [Scenario(sync=SyncScript(outages=(Outage(for_s=300),)))], indirect=True)
async def test_an_outage_opens_the_breaker_and_its_end_closes_it(quay: Quay) -> None:
    """A lane kept by the pace asks a dead endpoint a handful of times, and is back within a pause of its end."""
    pace, calls = Pace(4, breaker_failures=3, breaker_pause_s=30.0), 0
    while True:
        now_s = quay.clock.timestamp()
        wait_s = pace.wait_s(now_s, 0)
        assert wait_s is not None
        quay.clock.advance(wait_s)
        pace.began(quay.clock.timestamp())
        got = await quay.answer()
        pace.ended(quay.clock.timestamp(), got)
        calls += 1
        if got.failure is None:
            break
        assert got.failure.http_status == 503
    assert pace.state is BreakerState.CLOSED
    assert calls == 3 + 3 + 1  # open after 3; probes after 30, 90 and 210 s fail, the one after 450 s does not


@pytest.mark.parametrize("quay", [Scenario(sync=SyncScript(calls_per_minute=30, retry_after="date"))], indirect=True)
async def test_a_paced_lane_is_never_refused(quay: Quay) -> None:
    """A hundred rows one after another at 30 calls a minute: the headers alone keep the lane under the limit."""
    pace = Pace(4)
    began_s = quay.clock.timestamp()
    for number in range(100):
        wait_s = pace.wait_s(quay.clock.timestamp(), 0)
        assert wait_s is not None
        quay.clock.advance(wait_s)
        pace.began(quay.clock.timestamp())
        got = await quay.answer(f"row {number}")
        pace.ended(quay.clock.timestamp(), got)
        assert got.failure is None
    assert quay.simulator.world.sync_gate.throttled == 0
    assert quay.clock.timestamp() - began_s <= 100 / 30 * 60


@pytest.mark.parametrize(
    ("kind", "has_run"), [(FaultKind.LOSE_REPLY, True), (FaultKind.DROP, False), (FaultKind.CUT, True)]
)
async def test_a_lost_answer_is_told_as_such(quay: Quay, kind: FaultKind, has_run: bool) -> None:
    """Whether the row ran cannot be seen from here, and the verdict says just that; nothing is sent twice."""
    quay.simulator.faults.put(FaultRule(call=CallName.SYNC, kind=kind))
    got = await quay.answer()
    assert got.failure is not None
    assert (got.line.row_class, got.failure.kind, got.may_have_run) == (
        RowClass.TRANSIENT,
        CallFailure.UNANSWERED,
        True,
    )
    assert quay.simulator.bill.summary()["sync_runs"] == has_run
    assert quay.simulator.faults.calls[CallName.SYNC] == 1


async def test_a_server_that_is_not_there() -> None:
    """A refused connection is known not to have run anything."""
    made = OpenAIProvider(OpenAIAccount("x", "http://127.0.0.1:9/v1", "k"), SimTime(ManualSimClock()))
    got = await made.answer(CHAT, chat_body("x"), TIMEOUT_S)
    await made.close()
    assert got.failure is not None
    assert (got.failure.is_definite, got.may_have_run, got.line.row_class) == (True, False, RowClass.TRANSIENT)
