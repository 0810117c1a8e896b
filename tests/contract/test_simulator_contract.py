"""The simulator against the official SDK and the published schemas."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai_contract import RESPONSE_SCHEMAS, Contract

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

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "gpt-5-mini", "messages": [{"role": "user", "content": "Where is my card?"}]},
    "/v1/responses": {"model": "gpt-5-mini", "input": "Where is my card?", "instructions": "Be brief."},
    "/v1/embeddings": {"model": "text-embedding-3-small", "input": ["one", "two"]},
    "/v1/completions": {"model": "gpt-3.5-turbo-instruct", "prompt": "Where is"},
    "/v1/moderations": {"model": "omni-moderation-latest", "input": "I like cards"},
}


@pytest.fixture(scope="session")
def contract() -> Contract:
    """The published description, read once."""
    return Contract()


class Seen:
    """What the client saw, checked against the contract as it came."""

    def __init__(self, contract: Contract) -> None:
        self._contract = contract
        self.calls: list[str] = []
        self.faults: list[str] = []

    async def __call__(self, response: Any) -> None:
        await response.aread()
        method, path = response.request.method, response.request.url.path
        self.calls.append(f"{method} {response.status_code}")
        kind = response.headers["content-type"]
        self.faults += self._contract.answer_faults(method, path, response.status_code, kind, response.content)


@pytest.fixture
def clock() -> ManualSimClock:
    """A clock the test moves."""
    return ManualSimClock()


@pytest.fixture
async def simulator(clock: ManualSimClock) -> AsyncIterator[Simulator]:
    """A simulator in which the rows named bad and slow fail."""
    rules = (
        RowRule(match=RowMatch(wire_id="bad"), outcome=Outcome.HTTP_ERROR, status=400, code="invalid_value"),
        RowRule(match=RowMatch(wire_id="slow"), outcome=Outcome.TIMEOUT),
    )
    async with Simulator(SimulatorSettings(clock=clock, scenario=Scenario(rows=rules))) as running:
        yield running


@pytest.fixture
async def seen(contract: Contract) -> AsyncIterator[Seen]:
    """Every answer of the test, checked; the test fails if one breaks the contract."""
    watch = Seen(contract)
    yield watch
    assert watch.calls, "the hook saw no answer"
    assert watch.faults == []


@pytest.fixture
async def client(simulator: Simulator, seen: Seen) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client, without retries."""
    transport = openai.DefaultAsyncHttpxClient(event_hooks={"response": [seen]})
    async with openai.AsyncOpenAI(
        api_key=DEFAULT_KEY, base_url=simulator.base_url, http_client=transport, max_retries=0
    ) as made:
        yield made


def lines(endpoint: str, ids: list[str]) -> bytes:
    """A batch file."""
    return b"".join(
        json.dumps({"custom_id": name, "method": "POST", "url": endpoint, "body": BODIES[endpoint]}).encode() + b"\n"
        for name in ids
    )


async def upload(client: openai.AsyncOpenAI, content: bytes) -> str:
    """Upload with an expiry; the file id."""
    file = await client.files.create(
        file=("in.jsonl", content),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 7200},
    )
    return file.id


@pytest.mark.parametrize("endpoint", list(BODIES))
async def test_a_batch_goes_its_whole_way_by_the_official_client(
    client: openai.AsyncOpenAI, clock: ManualSimClock, contract: Contract, endpoint: str
) -> None:
    """Upload, create, retrieve, content, delete work for every endpoint, and every line keeps to the schemas."""
    file_id = await upload(client, lines(endpoint, ["a", "b", "bad", "slow"]))
    assert (await client.files.retrieve(file_id)).expires_at == int(clock.timestamp()) + 7200
    batch = await client.batches.create(
        input_file_id=file_id,
        endpoint=endpoint,  # type: ignore[arg-type]
        completion_window="24h",
        metadata={"job": "j-1"},
        output_expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert (batch.status, batch.model, batch.usage) == ("validating", None, None)
    clock.advance(6)
    assert (await client.batches.retrieve(batch.id)).status == "in_progress"
    clock.advance(5)
    assert (await client.batches.retrieve(batch.id)).status == "finalizing"
    clock.advance(3600)
    ended = await client.batches.retrieve(batch.id)
    assert ended.status == "completed"
    assert ended.request_counts is not None
    assert (ended.request_counts.completed, ended.request_counts.failed) == (2, 2)
    assert ended.metadata == {"job": "j-1"}
    assert ended.usage is not None
    assert ended.usage.input_tokens > 0
    found: dict[str, Any] = {}
    for result_id in (ended.output_file_id, ended.error_file_id):
        assert result_id is not None
        content = (await client.files.content(result_id)).content
        for line in content.splitlines():
            parsed = json.loads(line)
            assert contract.line_faults(parsed, endpoint) == []
            found[parsed["custom_id"]] = parsed
    assert sorted(found) == ["a", "b", "bad", "slow"]
    assert found["bad"]["error"] is None
    assert found["bad"]["response"]["body"]["error"]["code"] == "invalid_value"
    assert found["slow"]["response"] is None
    assert (await client.files.delete(file_id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(file_id)


async def test_lists_are_read_page_by_page(client: openai.AsyncOpenAI, clock: ManualSimClock) -> None:
    """The client pages through all batches, newest first, and through files, while new ones appear."""
    file_id = await upload(client, lines("/v1/responses", ["a"]))
    made = []
    for _ in range(5):
        clock.advance(1)
        batch = await client.batches.create(input_file_id=file_id, endpoint="/v1/responses", completion_window="24h")
        made.append(batch.id)
    page = await client.batches.list(limit=2)
    newcomer = await client.batches.create(input_file_id=file_id, endpoint="/v1/responses", completion_window="24h")
    listed = [batch.id async for batch in page]
    assert listed == made[::-1]
    assert newcomer.id not in listed
    assert [file.id async for file in client.files.list(purpose="batch", limit=1)] == [file_id]
    clock.advance(1)
    other_id = await upload(client, lines("/v1/responses", ["b"]))
    newest_first = [file.id async for file in client.files.list(purpose="batch", order="desc", limit=1)]
    assert newest_first == [other_id, file_id]
    assert [file.id async for file in client.files.list(purpose="batch_output", limit=1)] == []


async def test_cancel_and_its_conflict(client: openai.AsyncOpenAI, clock: ManualSimClock) -> None:
    """A cancel answers cancelling, twice is harmless, and an ended batch refuses it with 409."""
    file_id = await upload(client, lines("/v1/chat/completions", ["a", "b"]))
    batch = await client.batches.create(input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h")
    clock.advance(6)
    assert (await client.batches.cancel(batch.id)).status == "cancelling"
    assert (await client.batches.cancel(batch.id)).status == "cancelling"
    clock.advance(600)
    assert (await client.batches.retrieve(batch.id)).status == "cancelled"
    other = await client.batches.create(input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h")
    clock.advance(3600)
    with pytest.raises(openai.ConflictError, match="completed"):
        await client.batches.cancel(other.id)
    with pytest.raises(openai.NotFoundError):
        await client.batches.cancel("batch_nobody")


async def test_synchronous_calls_of_every_endpoint(client: openai.AsyncOpenAI, simulator: Simulator) -> None:
    """The same generator answers the synchronous endpoints, and they stand on the bill by themselves."""
    chat = await client.chat.completions.create(**BODIES["/v1/chat/completions"])
    assert chat.model == "gpt-5-mini-2025-08-07"
    assert chat.choices[0].message.content
    assert chat.usage is not None
    assert chat.usage.total_tokens > 0
    assert (await client.responses.create(**BODIES["/v1/responses"])).output_text
    vectors = await client.embeddings.create(**BODIES["/v1/embeddings"], encoding_format="float")
    assert len(vectors.data) == 2
    assert (await client.completions.create(**BODIES["/v1/completions"])).choices[0].text
    assert not (await client.moderations.create(**BODIES["/v1/moderations"])).results[0].flagged
    assert [model.id async for model in client.models.list()]
    assert simulator.bill.body(BODIES["/v1/chat/completions"]) == (0, 1, 1)
    assert simulator.bill.summary()["sync_runs"] == len(RESPONSE_SCHEMAS)


async def test_errors_come_as_the_client_knows_them(client: openai.AsyncOpenAI, simulator: Simulator) -> None:
    """Wrong key, wrong values and throttling become the client's own exceptions with code and param."""
    with pytest.raises(openai.AuthenticationError) as wrong_key:
        await client.with_options(api_key="sk-wrong").batches.list()
    assert wrong_key.value.code == "invalid_api_key"
    with pytest.raises(openai.BadRequestError) as wrong_window:
        await client.batches.create(
            input_file_id="file-x",
            endpoint="/v1/responses",
            completion_window="1h",  # type: ignore[arg-type]
        )
    assert (wrong_window.value.code, wrong_window.value.param) == ("invalid_value", "completion_window")
    simulator.faults.put(FaultRule(call="list", status=429, retry_after_s=7, until_count=1))  # type: ignore[arg-type]
    with pytest.raises(openai.RateLimitError) as throttled:
        await client.batches.list()
    assert throttled.value.response.headers["retry-after"] == "7"
