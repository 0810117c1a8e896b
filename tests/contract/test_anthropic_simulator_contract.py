"""The simulator's Message Batches against the official client and the published schema."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic_contract import Contract

from batchferry.simulator import (
    DEFAULT_KEY,
    FaultRule,
    ManualSimClock,
    Outcome,
    RowMatch,
    RowRule,
    Scenario,
    Simulator,
    SimulatorSettings,
)

MODEL = "claude-sonnet-5"
SPECIAL = {
    "cut": Outcome.TRUNCATED,
    "refused": Outcome.REFUSAL,
    "tool": Outcome.TOOL_CALL,
    "paused": Outcome.PAUSED,
    "full": Outcome.WINDOW_FULL,
    "filtered": Outcome.FILTERED,
    "policy": Outcome.CONTENT_FILTER,
    "long": Outcome.CONTEXT_LENGTH,
    "late": Outcome.TIMEOUT,
    "expired": Outcome.EXPIRED,
    "empty": Outcome.EMPTY_BODY,
}


def params(text: str = "Where is my card?", **members: Any) -> dict[str, Any]:
    """A request."""
    return {"model": MODEL, "max_tokens": 64, "messages": [{"role": "user", "content": text}]} | members


def rows(*wire_ids: str) -> list[Any]:
    """Rows of a batch."""
    return [{"custom_id": wire_id, "params": params(f"Question {wire_id}")} for wire_id in wire_ids]


@pytest.fixture(scope="module")
def contract() -> Contract:
    """The schema."""
    return Contract()


@pytest.fixture
def clock() -> ManualSimClock:
    """A clock that stands."""
    return ManualSimClock()


@pytest.fixture
async def simulator(clock: ManualSimClock) -> AsyncIterator[Simulator]:
    """A running simulator whose rows end by their ids."""
    script = Scenario(
        rows=(
            *(RowRule(match=RowMatch(wire_id=name), outcome=outcome) for name, outcome in SPECIAL.items()),
            RowRule(match=RowMatch(wire_id="gone"), outcome=Outcome.HTTP_ERROR, status=404, code="model_not_found"),
            RowRule(match=RowMatch(wire_id="busy"), outcome=Outcome.HTTP_ERROR, status=529),
            RowRule(match=RowMatch(wire_id="poor"), outcome=Outcome.HTTP_ERROR, status=429, code="insufficient_quota"),
        )
    )
    async with Simulator(SimulatorSettings(clock=clock, scenario=script)) as running:
        yield running


@pytest.fixture
async def client(simulator: Simulator, contract: Contract) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """The official client; every request and answer is held against the schema."""

    async def check(response: httpx2.Response) -> None:
        path, method = response.request.url.path, response.request.method
        content = await response.aread()
        assert contract.answer_faults(method, path, response.status_code, content) == []
        if method == "POST" and path.endswith("/batches") and response.status_code == 200:
            assert contract.request_faults(method, path, response.request.content) == []

    http = httpx2.AsyncClient(event_hooks={"response": [check]})
    async with anthropic.AsyncAnthropic(
        api_key=DEFAULT_KEY, base_url=simulator.origin_url, max_retries=0, http_client=http
    ) as made:
        yield made


async def test_a_batch_from_create_to_delete(client: anthropic.AsyncAnthropic, clock: ManualSimClock) -> None:
    """The client sees a batch through its life: counts stand still until the end, each row has its result type."""
    names = ["a", "b", *SPECIAL, "gone", "busy", "poor"]
    batch = await client.messages.batches.create(requests=rows(*names))
    assert (batch.processing_status, batch.results_url) == ("in_progress", None)
    clock.advance(8)
    seen = await client.messages.batches.retrieve(batch.id)
    assert (seen.request_counts.processing, seen.request_counts.succeeded) == (len(names), 0)
    with pytest.raises(anthropic.BadRequestError):
        await client.messages.batches.delete(batch.id)
    clock.advance(3600)
    ended = await client.messages.batches.retrieve(batch.id)
    assert (ended.processing_status, ended.cancel_initiated_at, ended.archived_at) == ("ended", None, None)
    counts = ended.request_counts
    assert (counts.processing, counts.succeeded, counts.errored, counts.canceled, counts.expired) == (0, 9, 6, 0, 1)
    found = {}
    async for line in await client.messages.batches.results(batch.id):
        result = line.result
        if result.type == "succeeded":
            found[line.custom_id] = str(result.message.stop_reason)
            assert result.message.usage.service_tier == "batch"
        else:
            found[line.custom_id] = result.error.error.type if result.type == "errored" else result.type
    assert found == {
        "a": "end_turn",
        "b": "end_turn",
        "cut": "max_tokens",
        "refused": "refusal",
        "tool": "tool_use",
        "paused": "pause_turn",
        "full": "model_context_window_exceeded",
        "filtered": "refusal",
        "empty": "end_turn",
        "policy": "invalid_request_error",
        "long": "invalid_request_error",
        "late": "timeout_error",
        "gone": "not_found_error",
        "busy": "overloaded_error",
        "poor": "billing_error",
        "expired": "expired",
    }
    assert (await client.messages.batches.delete(batch.id)).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.batches.retrieve(batch.id)


async def test_lists_are_read_both_ways(client: anthropic.AsyncAnthropic, clock: ManualSimClock) -> None:
    """Pages go from the newest to the oldest behind ``after_id``, and back before ``before_id``."""
    made = []
    for number in range(5):
        clock.advance(1)
        made.append((await client.messages.batches.create(requests=rows(f"r{number}"))).id)
    newest_first = made[::-1]
    assert [batch.id async for batch in client.messages.batches.list(limit=2)] == newest_first
    page = await client.messages.batches.list(limit=2, before_id=newest_first[4])
    assert ([batch.id for batch in page.data], page.has_more) == (newest_first[2:4], True)
    assert (await client.messages.batches.list(before_id=newest_first[0])).data == []
    for wrong in ({"limit": 0}, {"limit": 1001}, {"after_id": "msgbatch_nobody"}):
        with pytest.raises(anthropic.BadRequestError):
            await client.messages.batches.list(**wrong)  # type: ignore[arg-type]


async def test_a_cancel_keeps_what_was_done(client: anthropic.AsyncAnthropic, clock: ManualSimClock) -> None:
    """A cancelled batch ends with answers and cancelled rows, each with its line; asking again changes nothing."""
    batch = await client.messages.batches.create(requests=rows(*(f"r{number}" for number in range(400))))
    clock.advance(20)
    cancelled = await client.messages.batches.cancel(batch.id)
    assert cancelled.processing_status == "canceling"
    assert (await client.messages.batches.cancel(batch.id)).cancel_initiated_at == cancelled.cancel_initiated_at
    clock.advance(600)
    ended = await client.messages.batches.retrieve(batch.id)
    counts = ended.request_counts
    assert ended.processing_status == "ended"
    assert counts.succeeded > 0
    assert counts.canceled > 0
    assert counts.succeeded + counts.canceled == 400
    types = [line.result.type async for line in await client.messages.batches.results(batch.id)]
    assert (types.count("succeeded"), types.count("canceled")) == (counts.succeeded, counts.canceled)
    assert (await client.messages.batches.cancel(batch.id)).processing_status == "ended"


async def test_refusals_come_as_the_client_knows_them(client: anthropic.AsyncAnthropic, simulator: Simulator) -> None:
    """Keys, ids, spend limits and overload become the client's own exceptions with their codes."""
    batches = client.messages.batches
    with pytest.raises(anthropic.AuthenticationError):
        await client.with_options(api_key="sk-wrong").messages.batches.list()
    with pytest.raises(anthropic.NotFoundError):
        await batches.retrieve("msgbatch_nobody")
    with pytest.raises(anthropic.BadRequestError, match=r"requests\.1\.custom_id"):
        await batches.create(requests=rows("fine", "x" * 65))
    simulator.faults.put(
        FaultRule(call="list", status=429, error_code="enforced_spend_limit_reached", until_count=1)  # type: ignore[arg-type]
    )
    with pytest.raises(anthropic.RateLimitError) as spent:
        await batches.list()
    assert spent.value.type == "rate_limit_error"
    assert "retry-after" not in spent.value.response.headers
    assert json.loads(spent.value.response.content)["error"]["details"] == {
        "error_code": "enforced_spend_limit_reached"
    }
    for status, kind in ((529, "overloaded_error"), (500, "api_error"), (503, "overloaded_error")):
        simulator.faults.put(FaultRule(call="list", status=status, until_count=1))  # type: ignore[arg-type]
        with pytest.raises(anthropic.APIStatusError) as refused:
            await batches.list()
        assert (refused.value.status_code, refused.value.type) == (status, kind)


async def test_single_calls(client: anthropic.AsyncAnthropic, simulator: Simulator) -> None:
    """The same model answers ``/v1/messages`` at once; it stands on the bill, and wrong parameters are refused."""
    tool: Any = {"name": "look", "description": "d", "input_schema": {"type": "object"}}
    answer = await client.messages.create(**params(system="Be brief.", tools=[tool]))
    assert (answer.model, answer.stop_reason, answer.usage.service_tier) == (MODEL, "end_turn", "standard")
    assert answer.content[0].type == "text"
    assert simulator.bill.body(params(system="Be brief.", tools=[tool])) == (0, 1, 1)
    cached = [{"type": "text", "text": "Long rules. " * 50, "cache_control": {"type": "ephemeral"}}]
    usage = (await client.messages.create(**params(system=cached))).usage
    assert (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0) > 100
    for wrong in ({"max_tokens": -1}, {"messages": []}, {"extra_body": {"temperature": 0.5}}):
        with pytest.raises(anthropic.BadRequestError):
            await client.messages.create(**params(**wrong))
    old = client.with_options(default_headers={"anthropic-version": "2023-06-01"})
    assert (await old.messages.create(**params(extra_body={"temperature": 0.5}))).stop_reason == "end_turn"
