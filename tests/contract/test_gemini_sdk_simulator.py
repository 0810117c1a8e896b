"""The official ``google-genai`` client drives the simulator as it would drive Gemini."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from google import genai
from google.genai import errors, types

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
from batchferry.simulator.faults import CallName

MODEL = "gemini-2.5-flash"
DAY_S = 86_400


def request_of(text: str) -> dict[str, Any]:
    """A GenerateContentRequest."""
    return {"contents": [{"role": "user", "parts": [{"text": text}]}]}


def lines(*texts: str) -> bytes:
    """A batch file with keys k0, k1, ..."""
    return b"".join(
        json.dumps({"key": f"k{number}", "request": request_of(text)}).encode() + b"\n"
        for number, text in enumerate(texts)
    )


class Desk:
    """A simulator on a clock that stands, and the official client before it."""

    def __init__(self, simulator: Simulator, clock: ManualSimClock, client: genai.Client) -> None:
        self.simulator = simulator
        self.clock = clock
        self.client = client.aio

    async def upload(self, content: bytes) -> types.File:
        """Upload a batch file."""
        config = types.UploadFileConfig(display_name="in.jsonl", mime_type="application/jsonl")
        return await self.client.files.upload(file=io.BytesIO(content), config=config)

    async def create(self, content: bytes, name: str = "my job") -> types.BatchJob:
        """Upload and create."""
        file = await self.upload(content)
        config = types.CreateBatchJobConfig(display_name=name)
        return await self.client.batches.create(model=MODEL, src=file.name, config=config)

    async def get(self, job: types.BatchJob) -> types.BatchJob:
        """The job as it is now."""
        return await self.client.batches.get(name=job.name)

    async def rows(self, job: types.BatchJob) -> list[dict[str, Any]]:
        """The result lines of a job."""
        data = await self.client.files.download(file=job.dest.file_name)
        return [json.loads(line) for line in data.split(b"\n") if line]


@pytest.fixture
async def desk(request: pytest.FixtureRequest) -> AsyncIterator[Desk]:
    """A running simulator."""
    clock, scenario = ManualSimClock(), getattr(request, "param", Scenario())
    async with Simulator(SimulatorSettings(clock=clock, scenario=scenario)) as simulator:
        client = genai.Client(
            api_key=DEFAULT_KEY,
            http_options=types.HttpOptions(base_url=simulator.origin_url, api_version="v1beta"),
            vertexai=False,
        )
        yield Desk(simulator, clock, client)
        await client.aio.aclose()
        client.close()


async def test_a_job_from_upload_to_deletion(desk: Desk) -> None:
    """Upload, create, poll, download, delete: states, times, file and rows are what the client's types expect."""
    file = await desk.upload(lines("hello 0", "hello 1", "hello 2"))
    assert (file.state, file.source, file.mime_type) == (
        types.FileState.ACTIVE,
        types.FileSource.UPLOADED,
        "application/jsonl",
    )
    assert file.size_bytes == len(lines("hello 0", "hello 1", "hello 2"))
    config = types.CreateBatchJobConfig(display_name="my job")
    job = await desk.client.batches.create(model=MODEL, src=file.name, config=config)
    assert (job.state, job.display_name, job.model) == (types.JobState.JOB_STATE_PENDING, "my job", f"models/{MODEL}")
    desk.clock.advance(8)
    assert (await desk.get(job)).state is types.JobState.JOB_STATE_RUNNING
    desk.clock.advance(DAY_S)
    done = await desk.get(job)
    assert done.state is types.JobState.JOB_STATE_SUCCEEDED
    assert done.end_time > done.create_time
    rows = await desk.rows(done)
    assert [row["key"] for row in rows] == ["k0", "k1", "k2"]
    for row in rows:
        answer = types.GenerateContentResponse.model_validate(row["response"])
        assert answer.text
        assert answer.candidates[0].finish_reason is types.FinishReason.STOP
        usage = answer.usage_metadata
        total = usage.prompt_token_count + usage.candidates_token_count + (usage.thoughts_token_count or 0)
        assert usage.total_token_count == total
    assert desk.simulator.bill.body(request_of("hello 0") | {"model": MODEL}) == (1, 0, 1)
    await desk.client.batches.delete(name=job.name)
    with pytest.raises(errors.ClientError) as gone:
        await desk.get(job)
    assert (gone.value.code, gone.value.status) == (404, "NOT_FOUND")
    await desk.client.files.delete(name=file.name)
    with pytest.raises(errors.ClientError) as denied:
        await desk.client.files.get(name=file.name)
    assert (denied.value.code, denied.value.status) == (403, "PERMISSION_DENIED")


async def test_a_long_file_is_sent_in_pieces(desk: Desk) -> None:
    """More than the client's piece of 8 MiB is put together again."""
    content = lines(*(f"{number} {'x' * 1_000_000}" for number in range(9)))
    file = await desk.upload(content)
    assert file.size_bytes == len(content) > 8 * 1024 * 1024
    assert desk.simulator.faults.calls[CallName.UPLOAD] == 3
    done = await desk.client.batches.create(model=MODEL, src=file.name, config={"display_name": "x"})
    desk.clock.advance(DAY_S)
    assert len(await desk.rows(await desk.get(done))) == 9


async def test_the_list_is_paged(desk: Desk) -> None:
    """The client's pager follows the tokens to the oldest job, newest first."""
    made = [(await desk.create(lines(f"job {number}"))).name for number in range(5)]
    pager = await desk.client.batches.list(config=types.ListBatchJobsConfig(page_size=2))
    assert [job.name async for job in pager] == made[::-1]
    files = await desk.client.files.list(config=types.ListFilesConfig(page_size=2))
    assert len([file.name async for file in files]) == 5


async def test_cancelling(desk: Desk) -> None:
    """A cancelled job ends without a file; one that has ended is not cancelled."""
    job = await desk.create(lines("one"))
    await desk.client.batches.cancel(name=job.name)
    desk.clock.advance(DAY_S)
    ended = await desk.get(job)
    assert (ended.state, ended.dest) == (types.JobState.JOB_STATE_CANCELLED, None)
    other = await desk.create(lines("two"))
    desk.clock.advance(DAY_S)
    assert (await desk.get(other)).state is types.JobState.JOB_STATE_SUCCEEDED
    with pytest.raises(errors.ClientError) as late:
        await desk.client.batches.cancel(name=other.name)
    assert (late.value.code, late.value.status) == (400, "FAILED_PRECONDITION")


ENDS = Scenario(
    rows=tuple(
        RowRule(match=RowMatch(body_contains=f"end {outcome} now"), outcome=outcome)
        for outcome in (
            Outcome.TRUNCATED,
            Outcome.FILTERED,
            Outcome.CONTENT_FILTER,
            Outcome.TOOL_CALL,
            Outcome.CONTEXT_LENGTH,
        )
    )
)


@pytest.mark.parametrize("desk", [ENDS], indirect=True)
async def test_single_calls(desk: Desk) -> None:
    """GenerateContent answers in the client's types, whatever the end."""

    async def ask(text: str) -> types.GenerateContentResponse:
        return await desk.client.models.generate_content(model=MODEL, contents=text)

    assert (await ask("hello")).text
    reasons = types.FinishReason
    assert (await ask("end truncated now")).candidates[0].finish_reason is reasons.MAX_TOKENS
    assert (await ask("end filtered now")).candidates[0].finish_reason is reasons.SAFETY
    blocked = await ask("end content_filter now")
    assert not blocked.candidates
    assert blocked.prompt_feedback.block_reason is types.BlockedReason.PROHIBITED_CONTENT
    assert (await ask("end tool_call now")).function_calls
    with pytest.raises(errors.ClientError) as too_long:
        await ask("end context_length_exceeded now")
    assert (too_long.value.code, too_long.value.status) == (400, "INVALID_ARGUMENT")
    assert "input token count" in too_long.value.message


async def test_structured_output_follows_its_schema(desk: Desk) -> None:
    """A schema in the client's own types is answered with JSON of that form."""
    schema = types.Schema(
        type=types.Type.OBJECT, properties={"label": types.Schema(type=types.Type.STRING, enum=["a_b", "c_d"])}
    )
    config = types.GenerateContentConfig(response_mime_type="application/json", response_schema=schema)
    answer = await desk.client.models.generate_content(model=MODEL, contents="c and d", config=config)
    assert json.loads(answer.text) in ({"label": "a_b"}, {"label": "c_d"})


async def test_refusals_are_the_clients_own_errors(desk: Desk) -> None:
    """A wrong key, an unknown file and a server's fault come as the client's exceptions with their words."""
    client = genai.Client(
        api_key="wrong",
        http_options=types.HttpOptions(base_url=desk.simulator.origin_url, api_version="v1beta"),
        vertexai=False,
    )
    with pytest.raises(errors.ClientError) as wrong_key:
        await client.aio.batches.list()
    await client.aio.aclose()
    client.close()
    assert wrong_key.value.status == "INVALID_ARGUMENT"
    assert "API key not valid" in wrong_key.value.message
    with pytest.raises(errors.ClientError) as no_file:
        await desk.client.batches.create(model=MODEL, src="files/0123", config={"display_name": "x"})
    assert no_file.value.status == "PERMISSION_DENIED"
    desk.simulator.faults.put(FaultRule(call=CallName.RETRIEVE, status=503))
    with pytest.raises(errors.ServerError) as down:
        await desk.client.batches.get(name="batches/0123")
    assert (down.value.code, down.value.status) == (503, "UNAVAILABLE")


@pytest.mark.parametrize("desk", [Scenario(file_processing_s=30.0)], indirect=True)
async def test_a_file_is_processed_before_it_may_be_used(desk: Desk) -> None:
    """A create is refused while the file is PROCESSING."""
    file = await desk.upload(lines("one"))
    assert file.state is types.FileState.PROCESSING
    with pytest.raises(errors.ClientError) as early:
        await desk.client.batches.create(model=MODEL, src=file.name, config={"display_name": "x"})
    assert (early.value.code, early.value.status) == (400, "FAILED_PRECONDITION")
    desk.clock.advance(30)
    assert (await desk.client.files.get(name=file.name)).state is types.FileState.ACTIVE
    assert await desk.client.batches.create(model=MODEL, src=file.name, config={"display_name": "x"})
