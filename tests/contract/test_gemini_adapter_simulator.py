"""What only Gemini has: names, files that get ready, jobs that lose all, its refusals. The rest: test_every_adapter."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from batchferry.domain.batcherrors import BatchErrorKind
from batchferry.domain.provider import (
    BatchSnapshot,
    CallFailed,
    CallFailure,
    DownloadedFile,
    ProviderStatus,
    UploadedFile,
)
from batchferry.domain.rows import ResultLine, UnreadableLine
from batchferry.providers.gemini import GeminiAccount, GeminiProvider
from batchferry.providers.retries import CallRetries
from batchferry.simulator import (
    DEFAULT_KEY,
    BatchRule,
    Durations,
    JobError,
    Limits,
    ManualSimClock,
    Outcome,
    RowMatch,
    RowRule,
    RunCurve,
    Scenario,
    Simulator,
    SimulatorSettings,
    SyncScript,
)

GENERATE = "/v1beta/models:generateContent"
MODEL = "gemini-2.5-flash"
HOUR_S = 3_600
TIMEOUT_S = 20.0
METADATA = {"batch_id": "01KB000000000000000000000A", "ledger_id": "abcdefghjk"}


class SimTime:
    """The service's clock on the simulator's time."""

    def __init__(self, clock: ManualSimClock) -> None:
        self.clock = clock
        self.sleeps: list[float] = []

    def now(self) -> Any:
        return self.clock.now()

    def monotonic(self) -> float:
        return self.clock.timestamp()

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(int(seconds) if seconds >= 1 else seconds)
        self.clock.advance(seconds)


class Lines:
    """An upload source in memory."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.size_bytes = len(data)

    async def chunks(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self.data), 4_096):
            yield self.data[start : start + 4_096]


def body(text: str = "hello") -> dict[str, Any]:
    """A record's body: a GenerateContentRequest and its model."""
    return {"model": MODEL, "contents": [{"role": "user", "parts": [{"text": text}]}]}


class Quay:
    """A simulator with the adapter before it."""

    def __init__(self, simulator: Simulator, clock: ManualSimClock) -> None:
        self.simulator = simulator
        self.clock = clock
        self.time = SimTime(clock)
        self.provider = self.at()

    def at(self, **changes: Any) -> GeminiProvider:
        """An adapter of another account here."""
        settings: dict[str, Any] = {"base_url": f"{self.simulator.origin_url}/v1beta", "api_key": DEFAULT_KEY}
        settings |= {"retries": CallRetries(jitter=0.0)} | changes
        return GeminiProvider(GeminiAccount("sim", **settings), self.time, rng=Random(1))

    def file_of(self, rows: int, text: str = "hello") -> bytes:
        """A batch file of rows ``text 0"``, ``text 1"``, ..."""
        made = []
        for row in range(rows):
            rendered = self.provider.render_line(GENERATE, json.dumps(body(f"{text} {row}")).encode())
            made.append(self.provider.line_head(f"0123456789-0-{row}-1") + rendered)
        return b"".join(made)

    async def uploaded(self, data: bytes) -> UploadedFile:
        got = await self.provider.upload(Lines(data), "abcdefghjk-01KB000000000000000000000A.jsonl", None)
        assert isinstance(got, UploadedFile), got
        return got

    async def submitted(self, data: bytes) -> BatchSnapshot:
        file = await self.uploaded(data)
        got = await self.provider.create(file.file_id, GENERATE, "24h", METADATA, MODEL)
        assert isinstance(got, BatchSnapshot), got
        return got

    async def after(self, batch: BatchSnapshot, seconds: float) -> BatchSnapshot:
        self.clock.advance(seconds)
        got = await self.provider.retrieve(batch.provider_batch_id)
        assert isinstance(got, BatchSnapshot), got
        return got

    async def results(self, batch: BatchSnapshot, folder: Path) -> dict[int, ResultLine]:
        """The readable result lines of a batch by row."""
        to = folder / "part.jsonl"
        assert batch.output_file_id is not None
        assert isinstance(await self.provider.download(batch.output_file_id, to), DownloadedFile)
        read = [self.provider.parse_line(line, GENERATE) for line in to.read_bytes().split(b"\n") if line]
        return {int(line.wire_id.split("-")[2]): line for line in read if isinstance(line, ResultLine)}


@pytest.fixture
async def quay(request: pytest.FixtureRequest) -> AsyncIterator[Quay]:
    """A running simulator on a clock that stands."""
    clock = ManualSimClock()
    script = getattr(request, "param", Scenario())
    async with Simulator(SimulatorSettings(clock=clock, scenario=script)) as simulator:
        made = Quay(simulator, clock)
        yield made
        await made.provider.close()


async def test_how_a_job_looks(quay: Quay, tmp_path: Path) -> None:
    """Google's words and names, 48 hours of life, our metadata in the display name, one file, 403 for what is gone."""
    batch = await quay.submitted(quay.file_of(2))
    assert (batch.status, batch.raw_status) == (ProviderStatus.VALIDATING, "BATCH_STATE_PENDING")
    assert batch.metadata == METADATA
    assert batch.provider_batch_id.startswith("batches/")
    done = await quay.after(batch, 2 * HOUR_S)
    assert (done.error_file_id, done.input_file_id) == (None, batch.input_file_id)
    assert done.expires_at is not None
    assert done.created_at is not None
    assert (done.expires_at - done.created_at).total_seconds() == 48 * HOUR_S
    assert done.output_file_id is not None
    assert await quay.provider.delete_file(done.output_file_id) is None
    again = await quay.provider.download(done.output_file_id, tmp_path / "x")
    assert isinstance(again, CallFailed)
    assert (again.kind, again.http_status) == (CallFailure.NOT_FOUND, 403)


async def test_the_bill_knows_a_row_by_its_callers_body(quay: Quay, tmp_path: Path) -> None:
    """Runs of a batch and of a single call are booked on one body, with the tokens that the adapter reads."""
    done = await quay.after(await quay.submitted(quay.file_of(1)), 2 * HOUR_S)
    line = (await quay.results(done, tmp_path))[0]
    assert line.usage is not None
    wanted = body("hello 0")
    assert quay.simulator.bill.body(wanted) == (1, 0, 1)
    got = await quay.provider.answer(GENERATE, json.dumps(wanted).encode(), TIMEOUT_S)
    assert got.line.usage == line.usage
    assert quay.simulator.bill.body(wanted) == (1, 1, 2)
    tokens = quay.simulator.bill.summary()["tokens"]["batch"][MODEL]
    assert (line.usage.input_tokens, line.usage.output_tokens) == (tokens["input_tokens"], tokens["output_tokens"])


@pytest.mark.parametrize(
    "quay",
    [Scenario(rows=(RowRule(match=RowMatch(every=2), outcome=Outcome.UNREADABLE),), cut_last_line=True)],
    indirect=True,
)
async def test_cut_lines_are_told(quay: Quay, tmp_path: Path) -> None:
    """A line that breaks off is unreadable and still shows its key; the others are read."""
    done = await quay.after(await quay.submitted(quay.file_of(4)), 2 * HOUR_S)
    to = tmp_path / "o.jsonl"
    assert done.output_file_id is not None
    await quay.provider.download(done.output_file_id, to)
    assert not to.read_bytes().endswith(b"\n")
    read = [quay.provider.parse_line(line, GENERATE) for line in to.read_bytes().split(b"\n") if line]
    broken = [line for line in read if isinstance(line, UnreadableLine)]
    assert {line.wire_id for line in broken} >= {"0123456789-0-1-1"}
    assert {line.wire_id for line in read if isinstance(line, ResultLine)} <= {"0123456789-0-0-1", "0123456789-0-2-1"}


ODD = Scenario(
    rows=(
        RowRule(match=RowMatch(body_contains='hello 1"'), outcome=Outcome.MISSING),
        RowRule(match=RowMatch(body_contains='hello 2"'), outcome=Outcome.DUPLICATE),
        RowRule(match=RowMatch(body_contains='hello 3"'), outcome=Outcome.FOREIGN),
    )
)


@pytest.mark.parametrize(
    ("quay", "is_ordered"),
    [(ODD, True), (Scenario(shuffle_output=True), False)],
    indirect=["quay"],
)
async def test_the_order_of_the_requests_is_kept(quay: Quay, is_ordered: bool, tmp_path: Path) -> None:
    """Results stand in the order of the requests unless the scenario says otherwise; missing, doubled, foreign lines too."""
    done = await quay.after(await quay.submitted(quay.file_of(30)), 2 * HOUR_S)
    to = tmp_path / "o.jsonl"
    assert done.output_file_id is not None
    await quay.provider.download(done.output_file_id, to)
    keys = [json.loads(line)["key"] for line in to.read_bytes().split(b"\n") if line]
    ours = [int(key.split("-")[2]) for key in keys if key.startswith("0123456789-")]
    assert (ours == sorted(ours)) is is_ordered
    if is_ordered:
        assert ours == [0, 2, 2, *range(3, 30)]
        assert len(keys) == len(ours) + 1


@pytest.mark.parametrize("quay", [Scenario(file_processing_s=20.0)], indirect=True)
async def test_an_upload_waits_until_the_file_is_ready(quay: Quay) -> None:
    """The upload looks at the file until it is ACTIVE, and the create that follows is taken."""
    file = await quay.uploaded(quay.file_of(2))
    assert sum(quay.time.sleeps) >= 19
    assert isinstance(await quay.provider.create(file.file_id, GENERATE, "24h", METADATA, MODEL), BatchSnapshot)
    hasty = quay.at(file_ready_s=0.0)
    early = await hasty.upload(Lines(quay.file_of(1)), "a.jsonl", None)
    assert isinstance(early, UploadedFile)
    got = await hasty.create(early.file_id, GENERATE, "24h", METADATA, MODEL)
    await hasty.close()
    assert isinstance(got, CallFailed)
    assert (got.kind, got.is_definite, got.code) == (CallFailure.NOT_READY, True, "FAILED_PRECONDITION")


SLOW = Durations(in_progress=RunCurve(factor_s=0, minimum_s=100 * HOUR_S))


@pytest.mark.parametrize("quay", [Scenario(durations=SLOW)], indirect=True)
async def test_an_expired_job_has_lost_every_row(quay: Quay) -> None:
    """After 48 hours there is no file, whatever had been reached, and nothing is on the bill."""
    batch = await quay.submitted(quay.file_of(10))
    running = await quay.after(batch, 47 * HOUR_S)
    assert (running.status, running.raw_status) == (ProviderStatus.IN_PROGRESS, "BATCH_STATE_RUNNING")
    assert running.counts.completed > 0
    ended = await quay.after(batch, 2 * HOUR_S)
    assert (ended.status, ended.output_file_id, ended.error_file_id) == (ProviderStatus.EXPIRED, None, None)
    assert quay.simulator.bill.summary()["batch_runs"] == 0


FAILED = {
    "token_limit_exceeded": BatchErrorKind.TOKEN_LIMIT,
    "model_not_found": BatchErrorKind.MODEL,
    "invalid_api_key": BatchErrorKind.ACCOUNT,
    "server_error": BatchErrorKind.UNKNOWN,
}


@pytest.mark.parametrize(
    ("quay", "kind"),
    [
        *((Scenario(batches=(BatchRule(fail_with=(JobError(code=code),)),)), kind) for code, kind in FAILED.items()),
        (Scenario(limits=Limits(enqueued_tokens={MODEL: 10})), BatchErrorKind.TOKEN_LIMIT),
        (Scenario(limits=Limits(rows_per_batch=10)), BatchErrorKind.UNKNOWN),
    ],
    indirect=["quay"],
)
async def test_failed_jobs_say_why(quay: Quay, kind: BatchErrorKind) -> None:
    """The operation's one error is understood, and blames no row."""
    failed = await quay.after(await quay.submitted(quay.file_of(50)), HOUR_S)
    assert failed.status is ProviderStatus.FAILED
    assert [quay.provider.classify_batch_error(error) for error in failed.errors] == [kind]


@pytest.mark.parametrize("quay", [Scenario(no_batch_models=(MODEL,))], indirect=True)
async def test_a_model_without_batches_is_refused_at_once(quay: Quay) -> None:
    """The address of an unknown model answers 404: rejected, and nothing was made."""
    file = await quay.uploaded(quay.file_of(1))
    got = await quay.provider.create(file.file_id, GENERATE, "24h", METADATA, MODEL)
    assert isinstance(got, CallFailed)
    assert (got.kind, got.code, got.is_definite) == (CallFailure.REJECTED, "NOT_FOUND", True)


# ------------------------------------------------------------------------------------------ single calls


@pytest.mark.parametrize("quay", [Scenario(sync=SyncScript(calls_per_minute=1))], indirect=True)
async def test_a_limit_is_met_and_read(quay: Quay) -> None:
    """The refusal's details say when to come back, and then there is room."""

    async def ask(text: str) -> Any:
        return await quay.provider.answer(GENERATE, json.dumps(body(text)).encode(), TIMEOUT_S)

    assert (await ask("one")).failure is None
    refused = await ask("two")
    assert refused.failure is not None
    assert (refused.failure.kind, refused.failure.is_definite) == (CallFailure.THROTTLED, True)
    assert refused.hints.retry_after_s == 60.0
    quay.clock.advance(60)
    assert (await ask("two")).failure is None
