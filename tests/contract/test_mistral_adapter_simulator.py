"""What only Mistral has: its status words, windows of hours, a model on the job. The rest: test_every_adapter."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from random import Random

import pytest

from batchferry.domain.batcherrors import BatchErrorKind
from batchferry.domain.provider import (
    BatchSnapshot,
    DownloadedFile,
    ProviderStatus,
    RequestCounts,
    UploadedFile,
)
from batchferry.domain.rows import ResultLine, RowClass, UnreadableLine
from batchferry.providers.mistral import MistralAccount, MistralProvider
from batchferry.providers.retries import CallRetries
from batchferry.simulator import (
    DEFAULT_KEY,
    ManualSimClock,
    Scenario,
    Simulator,
    SimulatorSettings,
)

CHAT = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"
MODEL = "mistral-small-latest"
HOUR_S = 3600.0


class SimTime:
    """The service's clock on the simulator's time: a pause moves it, so nothing waits in truth."""

    def __init__(self, clock: ManualSimClock) -> None:
        self.clock = clock

    def now(self) -> datetime:
        return self.clock.now()

    def monotonic(self) -> float:
        return self.clock.timestamp()

    async def sleep(self, seconds: float) -> None:
        self.clock.advance(seconds)


class Lines:
    """An upload source over rendered lines."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.size_bytes = len(data)

    async def chunks(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self.data), 1 << 16):
            yield self.data[start : start + (1 << 16)]


def chat_body(text: str) -> bytes:
    """A chat request; the blanks are to survive."""
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": text}]}).encode()


class Harbour:
    """A simulator, its clock, and an adapter in front of it."""

    def __init__(self, simulator: Simulator, clock: ManualSimClock) -> None:
        self.simulator = simulator
        self.clock = clock
        self.provider = MistralProvider(
            MistralAccount(
                "sim", simulator.mistral_url, DEFAULT_KEY, retries=CallRetries(jitter=0.0), list_page_size=2
            ),
            SimTime(clock),
            rng=Random(1),
        )

    def file_of(self, rows: int, word: str = "hello") -> bytes:
        """A batch file as the adapter renders it; the row number stands in each text."""
        return b"".join(
            self.provider.line_head(f"0123456789-0-{row}-1")
            + self.provider.render_line(CHAT, chat_body(f"{word} {row}"))
            for row in range(rows)
        )

    async def uploaded(self, data: bytes) -> UploadedFile:
        """Upload, which must succeed."""
        got = await self.provider.upload(Lines(data), "batchferry-test.jsonl", 1_209_600)
        assert isinstance(got, UploadedFile), got
        return got

    async def submitted(self, data: bytes, window: str = "24h") -> BatchSnapshot:
        """Upload and create, which must succeed."""
        file = await self.uploaded(data)
        got = await self.provider.create(file.file_id, CHAT, window, {"batchferry_batch": "b-1"}, MODEL)
        assert isinstance(got, BatchSnapshot), got
        assert got.input_file_id == file.file_id
        return got

    async def after(self, job: BatchSnapshot, seconds: float) -> BatchSnapshot:
        """The job that many virtual seconds later."""
        self.clock.advance(seconds)
        got = await self.provider.retrieve(job.provider_batch_id)
        assert isinstance(got, BatchSnapshot), got
        return got

    async def ends(self, job: BatchSnapshot, folder: Path) -> dict[int, ResultLine | UnreadableLine]:
        """The verdict of every line of both files, by row."""
        ends = {}
        for file_id in (job.output_file_id, job.error_file_id):
            if file_id is None:
                continue
            to = folder / "part.jsonl"
            assert isinstance(await self.provider.download(file_id, to), DownloadedFile)
            for line in to.read_bytes().split(b"\n"):
                if line:
                    got = self.provider.parse_line(line, CHAT)
                    assert got.wire_id is not None
                    ends[int(got.wire_id.split("-")[2])] = got
        return ends


@pytest.fixture
async def harbour(request: pytest.FixtureRequest) -> AsyncIterator[Harbour]:
    """A running simulator on a clock that stands, and the adapter."""
    clock = ManualSimClock()
    script = getattr(request, "param", Scenario())
    async with Simulator(SimulatorSettings(clock=clock, scenario=script)) as simulator:
        made = Harbour(simulator, clock)
        yield made
        await made.provider.close()


async def test_the_words_of_a_job(harbour):
    """Its statuses in Mistral's words, with our metadata, and rows counted under the way."""
    job = await harbour.submitted(harbour.file_of(16))
    assert (job.status, job.raw_status) == (ProviderStatus.VALIDATING, "QUEUED")
    assert job.metadata == {"batchferry_batch": "b-1"}
    running = await harbour.after(job, 6)
    assert (running.status, running.counts.total) == (ProviderStatus.IN_PROGRESS, 16)
    asked = await harbour.provider.cancel(job.provider_batch_id)
    assert isinstance(asked, BatchSnapshot)
    assert (asked.status, asked.raw_status) == (ProviderStatus.CANCELLING, "CANCELLATION_REQUESTED")
    assert (await harbour.after(job, HOUR_S)).raw_status == "CANCELLED"
    other = await harbour.submitted(harbour.file_of(1))
    assert (await harbour.after(other, HOUR_S)).raw_status == "SUCCESS"


SLOW = Scenario.model_validate({"durations": {"in_progress": {"factor_s": 1800, "exponent": 1}}})


@pytest.mark.parametrize("harbour", [SLOW], indirect=True)
@pytest.mark.parametrize(("window", "hours"), [("1h", 1), ("3h", 3), ("168h", 168)])
async def test_the_window_ends_a_job(harbour, tmp_path, window, hours):
    """Ten rows of half an hour each: what the window leaves is told as expired."""
    job = await harbour.submitted(harbour.file_of(10), window)
    done = await harbour.after(job, hours * HOUR_S + 60)
    ran = min(10, hours * 2 - 1) if hours < 5 else 10
    assert done.status is (ProviderStatus.EXPIRED if ran < 10 else ProviderStatus.COMPLETED)
    assert done.raw_status == ("TIMEOUT_EXCEEDED" if ran < 10 else "SUCCESS")
    classes = [got.row_class for got in (await harbour.ends(done, tmp_path)).values()]
    assert (classes.count(RowClass.SUCCEEDED), classes.count(RowClass.EXPIRED)) == (ran, 10 - ran)


@pytest.mark.parametrize("harbour", [Scenario(no_batch_models=(MODEL,))], indirect=True)
async def test_a_job_of_an_unknown_model_fails_with_a_kind(harbour):
    """All rows together make one entry, which is about the model."""
    done = await harbour.after(await harbour.submitted(harbour.file_of(4)), HOUR_S)
    assert (done.status, done.counts) == (ProviderStatus.FAILED, RequestCounts())
    (entry,) = done.errors
    assert harbour.provider.classify_batch_error(entry) is BatchErrorKind.MODEL


async def test_single_embeddings(harbour):
    """Vectors come from the ordinary endpoint too."""
    body = json.dumps({"model": "mistral-embed", "input": ["one", "two"]}).encode()
    got = await harbour.provider.answer(EMBEDDINGS, body, 20.0)
    assert got.line.row_class is RowClass.SUCCEEDED
    assert len(json.loads(got.line.body or b"")["data"]) == 2
