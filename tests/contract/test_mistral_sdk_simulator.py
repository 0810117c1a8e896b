"""The simulator's Mistral API driven by the official SDK, its own batch client included."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from mistralai.client import Mistral
from mistralai.client.errors import SDKError
from mistralai.client.models import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    EmbeddingRequest,
    EmbeddingResponse,
    UserMessage,
)
from mistralai.extra.batch import BatchClient, BatchInput, BatchRequestError

from batchferry.simulator import (
    DEFAULT_KEY,
    ManualSimClock,
    Outcome,
    RowMatch,
    RowRule,
    Scenario,
    Simulator,
    SimulatorSettings,
    body_digest,
)

CHAT = "/v1/chat/completions"
MODEL = "mistral-small-latest"
NOBODY = "00000000-0000-4000-8000-00000000000f"
ROWS = (
    RowRule(match=RowMatch(wire_id="bad"), outcome=Outcome.CONTEXT_LENGTH),
    RowRule(match=RowMatch(wire_id="never"), outcome=Outcome.EXPIRED),
)


@pytest.fixture
def clock() -> ManualSimClock:
    """A clock the test moves."""
    return ManualSimClock()


@pytest.fixture
async def simulator(clock: ManualSimClock) -> AsyncIterator[Simulator]:
    """A simulator in which the rows named bad and never have no answer."""
    async with Simulator(SimulatorSettings(clock=clock, scenario=Scenario(rows=ROWS))) as running:
        yield running


@pytest.fixture
async def client(simulator: Simulator) -> AsyncIterator[Mistral]:
    """The official client; it repeats nothing by itself."""
    async with Mistral(api_key=DEFAULT_KEY, server_url=simulator.mistral_url.removesuffix("/v1")) as made:
        yield made


def lines(*ids: str, model: str | None = None) -> bytes:
    """A file as the documentation shows it: the model stands on the job alone."""
    extra = {} if model is None else {"model": model}
    return b"".join(
        json.dumps({"custom_id": one, "body": extra | {"messages": [{"role": "user", "content": one}]}}).encode()
        + b"\n"
        for one in ids
    )


async def upload(client: Mistral, content: bytes) -> str:
    """Upload; the file id."""
    file = await client.files.upload_async(file={"file_name": "in.jsonl", "content": content}, purpose="batch")
    assert (file.purpose, file.sample_type, file.source, file.size_bytes) == (
        "batch",
        "batch_request",
        "upload",
        len(content),
    )
    return file.id


async def content(client: Mistral, file_id: Any) -> list[dict[str, Any]]:
    """The lines of a file."""
    answer = await client.files.download_async(file_id=file_id)
    return [json.loads(line) for line in (await answer.aread()).split(b"\n") if line]


async def test_a_job_goes_its_whole_way_by_the_official_client(
    client: Mistral, clock: ManualSimClock, simulator: Simulator
) -> None:
    """Upload, create, get, list, content and deletes work; counters and files are where the client looks."""
    file_id = await upload(client, lines("a", "b", "bad", "never"))
    job = await client.batch.jobs.create_async(
        input_files=[file_id], model=MODEL, endpoint=CHAT, metadata={"job": "j-1"}, timeout_hours=48
    )
    assert (job.status, job.input_files, job.model, job.metadata) == ("QUEUED", [file_id], MODEL, {"job": "j-1"})
    clock.advance(6)
    running = await client.batch.jobs.get_async(job_id=job.id)
    assert (running.status, running.total_requests, running.output_file) == ("RUNNING", 4, None)
    clock.advance(3600)
    done = await client.batch.jobs.get_async(job_id=job.id)
    assert (done.status, done.errors) == ("SUCCESS", [])
    assert (done.succeeded_requests, done.failed_requests, done.completed_requests) == (2, 1, 3)
    output, error = await content(client, done.output_file), await content(client, done.error_file)
    assert {line["custom_id"] for line in output} == {"a", "b"}
    for line in output:
        answer = ChatCompletionResponse.model_validate(line["response"]["body"])
        assert (line["response"]["status_code"], answer.model) == (200, MODEL)
    told = {line["custom_id"]: line for line in error}
    assert told["bad"]["response"]["body"]["code"] == "3051"
    assert told["never"]["response"] is None
    inline = await client.batch.jobs.get_async(job_id=job.id, inline=True)
    assert isinstance(inline.outputs, list)
    assert {line["custom_id"] for line in inline.outputs} == {"a", "b", "bad", "never"}
    # Rows are billed under the body that was sent.
    sent = {"messages": [{"role": "user", "content": "a"}]}
    assert simulator.bill.body_of_digest(body_digest(sent)).paid_runs == 1
    shown = await client.files.list_async(sample_type=["batch_result", "batch_error"])
    assert {file.id for file in shown.data} == {done.output_file, done.error_file}
    assert [file.id for file in (await client.files.list_async(source=["upload"])).data] == [file_id]
    assert (await client.files.delete_async(file_id=file_id)).deleted is True
    assert (await client.batch.jobs.delete_async(job_id=job.id)).deleted is True
    assert (await client.batch.jobs.list_async()).total == 0


async def test_jobs_are_listed_filtered_and_paged(client: Mistral, clock: ManualSimClock) -> None:
    """Newest first unless asked otherwise; pages, statuses, models and instants narrow the list."""
    ids = []
    for number in range(3):
        file_id = await upload(client, lines(f"r{number}"))
        job = await client.batch.jobs.create_async(input_files=[file_id], model=f"{MODEL}-{number}", endpoint=CHAT)
        ids.append(job.id)
        clock.advance(3600 if number < 2 else 0)
    jobs = client.batch.jobs
    page = await jobs.list_async(page=0, page_size=2)
    assert (page.total, [job.id for job in page.data or []]) == (3, [ids[2], ids[1]])
    assert [job.id for job in (await jobs.list_async(page=1, page_size=2)).data or []] == [ids[0]]
    assert [job.id for job in (await jobs.list_async(order_by="created")).data or []] == ids
    assert [job.id for job in (await jobs.list_async(status=["QUEUED", "RUNNING"])).data or []] == [ids[2]]
    assert [job.id for job in (await jobs.list_async(model=f"{MODEL}-1")).data or []] == [ids[1]]
    late = clock.now() - timedelta(minutes=1)
    assert [job.id for job in (await jobs.list_async(created_after=late)).data or []] == [ids[2]]


async def test_a_job_is_cancelled(client: Mistral, clock: ManualSimClock) -> None:
    """It is asked to end, then has ended."""
    file_id = await upload(client, lines("a"))
    job = await client.batch.jobs.create_async(input_files=[file_id], model=MODEL, endpoint=CHAT)
    assert (await client.batch.jobs.cancel_async(job_id=job.id)).status == "CANCELLATION_REQUESTED"
    clock.advance(3600)
    assert (await client.batch.jobs.get_async(job_id=job.id)).status == "CANCELLED"


async def test_the_sdks_batch_client_reads_everything(client: Mistral, clock: ManualSimClock) -> None:
    """Typed bodies, which name their model, go through upload, job and output of the SDK's own batch client."""
    batches = BatchClient(client, endpoint=CHAT, response_body_type=ChatCompletionResponse)
    bodies = {
        one: ChatCompletionRequest(model=MODEL, messages=[UserMessage(content=f"Question {one}")])
        for one in ("a", "b", "bad")
    }
    handle = await batches.create(await batches.upload(BatchInput.from_payload(bodies)), model=MODEL)
    clock.advance(3600)
    got = {name: item async for name, item in batches.stream_results(await batches.get(handle.id))}
    assert {name for name, item in got.items() if isinstance(item, ChatCompletionResponse)} == {"a", "b"}
    assert isinstance(got["bad"], BatchRequestError)
    assert got["bad"].status_code == 400


async def test_requests_may_come_in_the_create(client: Mistral, clock: ManualSimClock) -> None:
    """Inline rows run like those of a file, embeddings too."""
    typed = BatchInput.from_payload({"v": EmbeddingRequest(model="mistral-embed", inputs=["one", "two"])})
    job = await client.batch.jobs.create_async(
        requests=typed.to_requests(), model="mistral-embed", endpoint="/v1/embeddings"
    )
    clock.advance(3600)
    done = await client.batch.jobs.get_async(job_id=job.id)
    assert (done.status, done.input_files) == ("SUCCESS", [])
    (line,) = await content(client, done.output_file)
    assert len(EmbeddingResponse.model_validate(line["response"]["body"]).data) == 2


async def test_single_calls(client: Mistral) -> None:
    """Chat, embeddings and the list of models are answered in shapes the client reads."""
    chat = await client.chat.complete_async(model=MODEL, messages=[UserMessage(content="Where is my card?")])
    assert chat.choices[0].finish_reason == "stop"
    assert (chat.usage.prompt_tokens or 0) > 0
    assert len((await client.embeddings.create_async(model="mistral-embed", inputs=["one", "two"])).data) == 2
    assert (await client.models.list_async()).data


async def test_refusals_are_those_the_client_knows(client: Mistral, simulator: Simulator) -> None:
    """A body that breaks the schema is a 422 with details; what is not there is a 404; a wrong key a 401."""
    file_id = await upload(client, lines("a"))
    for wrong in (
        {"input_files": [file_id], "timeout_hours": 169},
        {"input_files": [file_id], "model": ""},
        {},
    ):
        with pytest.raises(SDKError) as invalid:
            await client.batch.jobs.create_async(**({"model": MODEL, "endpoint": CHAT} | wrong))
        assert invalid.value.status_code == 422
        assert json.loads(invalid.value.body)["detail"][0]["loc"][0] == "body"
    for call in (
        client.batch.jobs.get_async(job_id=NOBODY),
        client.batch.jobs.cancel_async(job_id=NOBODY),
        client.files.retrieve_async(file_id=NOBODY),
        client.files.delete_async(file_id=NOBODY),
    ):
        with pytest.raises(SDKError) as missing:
            await call
        assert missing.value.status_code == 404
    async with Mistral(api_key="wrong", server_url=simulator.mistral_url.removesuffix("/v1")) as stranger:
        with pytest.raises(SDKError) as shut:
            await stranger.batch.jobs.list_async()
    assert (shut.value.status_code, json.loads(shut.value.body)) == (401, {"detail": "Unauthorized"})
