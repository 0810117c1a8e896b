"""What only Message Batches have: rows in the create, named rows, 404s, archived results. The rest: test_every_adapter."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from random import Random

import pytest
from anthropic_contract import Contract

from batchferry.domain.ids import FileId
from batchferry.domain.provider import (
    BatchPage,
    BatchSnapshot,
    CallFailed,
    CallFailure,
    DownloadedFile,
    ProviderStatus,
    RequestCounts,
)
from batchferry.domain.rows import ResultLine, RowClass, RowFlag, UnreadableLine
from batchferry.providers.anthropic import AnthropicAccount, AnthropicProvider
from batchferry.providers.anthropic.wire import FRAME_BYTES, InlineBody
from batchferry.providers.retries import CallRetries
from batchferry.simulator import (
    DEFAULT_KEY,
    CallName,
    FaultRule,
    Limits,
    ManualSimClock,
    Outcome,
    RowMatch,
    RowRule,
    Scenario,
    Simulator,
    SimulatorSettings,
)
from batchferry.simulator.anthropic_script import AnthropicScript

MESSAGES = "/v1/messages"
HOUR_S = 3600.0


class SimTime:
    """The service's clock on the simulator's time: a pause moves it, so nothing waits in truth."""

    def __init__(self, clock: ManualSimClock) -> None:
        self.clock = clock
        self.sleeps: list[float] = []

    def now(self) -> datetime:
        return self.clock.now()

    def monotonic(self) -> float:
        return self.clock.timestamp()

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.clock.advance(seconds)


class Lines:
    """An upload source over rendered lines."""

    def __init__(self, data: bytes, times: int = 1) -> None:
        self.data = data
        self.times = times
        self.size_bytes = len(data) * times

    async def chunks(self) -> AsyncIterator[bytes]:
        for _ in range(self.times):
            for start in range(0, len(self.data), 1 << 16):
                yield self.data[start : start + (1 << 16)]


class Harbour:
    """A simulator, its clock, and an adapter in front of it."""

    def __init__(self, simulator: Simulator, clock: ManualSimClock) -> None:
        self.simulator = simulator
        self.clock = clock
        self.time = SimTime(clock)
        self.provider = AnthropicProvider(
            AnthropicAccount("sim", simulator.base_url, DEFAULT_KEY, retries=CallRetries(jitter=0.0)),
            self.time,
            rng=Random(1),
        )

    def lines(self, rows: int, word: str = "hello") -> Lines:
        """Rows as the adapter renders them; the row's number stands in each text."""
        return Lines(
            b"".join(
                self.provider.line_head(f"0123456789-0-{row}-1")
                + self.provider.render_line(MESSAGES, params(f"{word} {row}"))
                for row in range(rows)
            )
        )

    async def created(self, rows: int) -> BatchSnapshot:
        """A create that must succeed."""
        got = await self.provider.create_inline(self.lines(rows), MESSAGES, "claude-haiku-4-5")
        assert isinstance(got, BatchSnapshot), got
        return got

    async def after(self, batch: BatchSnapshot, seconds: float) -> BatchSnapshot:
        """The batch that many virtual seconds later."""
        self.clock.advance(seconds)
        got = await self.provider.retrieve(batch.provider_batch_id)
        assert isinstance(got, BatchSnapshot), got
        return got

    async def results(self, batch: BatchSnapshot, to: Path) -> list[ResultLine | UnreadableLine]:
        """The judged lines of an ended batch."""
        assert batch.output_file_id is not None
        got = await self.provider.download(batch.output_file_id, to)
        assert isinstance(got, DownloadedFile), got
        return [
            self.provider.parse_line(line, MESSAGES)
            for line in (await asyncio.to_thread(to.read_bytes)).split(b"\n")[:-1]
        ]

    async def listed(self) -> list[BatchSnapshot]:
        """Every batch, page by page."""
        found: list[BatchSnapshot] = []
        cursor = None
        while True:
            page = await self.provider.list_batches(cursor)
            assert isinstance(page, BatchPage)
            found += page.batches
            cursor = page.next_cursor
            if cursor is None:
                return found


def params(text: str) -> bytes:
    """A request."""
    body = {"model": "claude-haiku-4-5", "max_tokens": 99, "messages": [{"role": "user", "content": text}]}
    return json.dumps(body).encode()


@pytest.fixture
async def harbour(request: pytest.FixtureRequest) -> AsyncIterator[Harbour]:
    """A running simulator on a clock that stands, and the adapter."""
    clock = ManualSimClock()
    script = getattr(request, "param", Scenario())
    async with Simulator(SimulatorSettings(clock=clock, scenario=script)) as simulator:
        made = Harbour(simulator, clock)
        yield made
        await made.provider.close()


ENDS = {
    Outcome.SUCCESS: (RowClass.SUCCEEDED, ()),
    Outcome.WINDOW_FULL: (RowClass.SUCCEEDED, (RowFlag.TRUNCATED,)),
    Outcome.FILTERED: (RowClass.SUCCEEDED, (RowFlag.REFUSED, RowFlag.EMPTY)),
    Outcome.PAUSED: (RowClass.SUCCEEDED, (RowFlag.TOOL_CALL_PENDING,)),
    Outcome.EXPIRED: (RowClass.EXPIRED, ()),
}
EVERY_END = Scenario(
    rows=tuple(
        RowRule(match=RowMatch(body_contains=f'hello {number}"'), outcome=outcome)
        for number, outcome in enumerate(ENDS)
    )
)


@pytest.mark.parametrize("harbour", [EVERY_END], indirect=True)
async def test_a_batch_from_create_to_deletion(harbour, tmp_path):
    """Create, poll, fetch the results, judge every line, delete: each row ends as scripted, then all is gone."""
    batch = await harbour.created(len(ENDS))
    assert (batch.status, batch.counts) == (ProviderStatus.IN_PROGRESS, RequestCounts(len(ENDS), 0, 0))
    done = await harbour.after(batch, HOUR_S)
    assert done.status is ProviderStatus.COMPLETED
    assert done.ended_at is not None
    lines = await harbour.results(done, tmp_path / "r")
    found = {}
    for line in lines:
        assert isinstance(line, ResultLine)
        found[int(line.wire_id.split("-")[2])] = (line.row_class, line.flags)
        if line.row_class is RowClass.SUCCEEDED:
            assert line.usage is not None
            assert json.loads(line.body or b"")["type"] == "message"
    assert found == dict(enumerate(ENDS.values()))
    ran = sum(end[0] is not RowClass.EXPIRED for end in ENDS.values())
    assert done.counts.completed + done.counts.failed == ran
    assert await harbour.provider.delete_file(done.output_file_id) is None
    assert await harbour.provider.delete_file(done.output_file_id) is None
    gone = await harbour.provider.retrieve(batch.provider_batch_id)
    assert isinstance(gone, CallFailed)
    assert gone.kind is CallFailure.NOT_FOUND


async def test_the_create_fits_the_schema(harbour):
    """What is sent as a create is what the official description asks for."""
    sent = b""
    contract = Contract()

    class Tee(Lines):
        async def chunks(self):
            nonlocal sent
            async for chunk in super().chunks():
                sent += chunk
                yield chunk

    got = await harbour.provider.create_inline(Tee(harbour.lines(3).data), MESSAGES, "m")
    assert isinstance(got, BatchSnapshot)
    body = b'{"requests":[' + sent[:-1].replace(b"\n", b",") + b"]}"
    assert contract.request_faults("POST", "/v1/messages/batches", body) == []


async def test_a_large_create_is_never_in_memory(harbour):
    """The body of a create of 32 MB is made with a few chunks in memory, and sent it is a batch of all its rows."""
    row = harbour.provider.render_line(MESSAGES, params("x" * 32_000))
    block = b"".join(harbour.provider.line_head(f"a-0-{number}-1") + row for number in range(1_000))
    source = Lines(block)
    tracemalloc.start()
    sizes = [len(chunk) async for chunk in InlineBody(source).chunks()]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(sizes) == source.size_bytes + FRAME_BYTES
    assert peak < 2_000_000
    got = await harbour.provider.create_inline(source, MESSAGES, "m")
    assert isinstance(got, BatchSnapshot)
    assert got.counts.total == 1_000


async def test_a_refused_row_is_named(harbour):
    """A create whose third row has a bad id is refused whole, names it, and leaves no batch."""
    lines = [harbour.lines(1, f"q{n}").data.replace(b"-0-0-1", f"-0-{n}-1".encode()) for n in range(5)]
    lines[2] = lines[2].replace(b"0123456789-0-2-1", b"not allowed")
    got = await harbour.provider.create_inline(Lines(b"".join(lines)), MESSAGES, "m")
    assert isinstance(got, CallFailed)
    assert (got.kind, got.is_definite, got.row) == (CallFailure.REJECTED, True, 2)
    assert await harbour.listed() == []


@pytest.mark.parametrize(
    "harbour", [Scenario(anthropic=AnthropicScript(rows_per_batch=3, body_bytes=100_000))], indirect=True
)
async def test_too_large_is_told(harbour):
    """Too many rows, or too many bytes: definite and too large, so that halves may go."""
    big = Lines(harbour.provider.line_head("a") + harbour.provider.render_line(MESSAGES, params("x" * 3_000_000)))
    for source in (harbour.lines(4), big):
        got = await harbour.provider.create_inline(source, MESSAGES, "m")
        assert isinstance(got, CallFailed)
        assert (got.is_definite, got.is_too_large, got.row) == (True, True, None)


@pytest.mark.parametrize(
    ("fault", "kind", "is_definite"),
    [
        (
            FaultRule(call=CallName.CREATE, status=429, error_code="enforced_spend_limit_reached"),
            CallFailure.ACCOUNT,
            True,
        ),
        (
            FaultRule(call=CallName.CREATE, status=400, message="Your credit balance is too low to access the API"),
            CallFailure.ACCOUNT,
            True,
        ),
        (FaultRule(call=CallName.CREATE, status=402), CallFailure.ACCOUNT, True),
    ],
)
async def test_creates_that_fail(harbour, fault, kind, is_definite):
    """An empty purse and a spend limit hold the account, whatever status they come with; no create is repeated."""
    harbour.simulator.faults.put(fault)
    got = await harbour.provider.create_inline(harbour.lines(2), MESSAGES, "m")
    assert isinstance(got, CallFailed)
    assert got.kind is kind
    assert got.is_definite is is_definite
    assert harbour.simulator.faults.calls["create"] == 1
    assert harbour.time.sleeps == []


@pytest.mark.parametrize(
    "harbour", [Scenario(anthropic=AnthropicScript(unseen_retrieves=2, unseen_results=2))], indirect=True
)
async def test_404s_come_and_go(harbour, tmp_path):
    """A fresh batch is not seen twice, and then it is; its results too."""
    batch = await harbour.created(2)
    seen = [await harbour.provider.retrieve(batch.provider_batch_id) for _ in range(3)]
    assert [isinstance(one, CallFailed) and one.kind is CallFailure.NOT_FOUND for one in seen] == [True, True, False]
    done = await harbour.after(batch, HOUR_S)
    got = [await harbour.provider.download(done.output_file_id, tmp_path / "r") for _ in range(3)]
    assert [isinstance(one, DownloadedFile) for one in got] == [False, False, True]


@pytest.mark.parametrize(
    "harbour", [Scenario(anthropic=AnthropicScript(results_origin="https://evil.example"))], indirect=True
)
async def test_a_foreign_results_address_is_not_followed(harbour, tmp_path):
    """The results come from the account's own host although the batch names another."""
    done = await harbour.after(await harbour.created(2), HOUR_S)
    assert len(await harbour.results(done, tmp_path / "r")) == 2


async def test_results_are_archived(harbour, tmp_path):
    """After 29 days the batch is still there and its results are not."""
    batch = await harbour.created(1)
    old = await harbour.after(batch, 29 * 24 * HOUR_S)
    assert (old.status, old.output_file_id) == (ProviderStatus.COMPLETED, None)
    assert old.counts.completed == 1
    got = await harbour.provider.download(FileId(f"results:{batch.provider_batch_id}"), tmp_path / "r")
    assert isinstance(got, CallFailed)
    assert got.kind is CallFailure.NOT_FOUND


async def test_what_runs_cannot_be_deleted(harbour):
    """Deleting a batch that has not ended is refused and leaves it running."""
    batch = await harbour.created(1)
    got = await harbour.provider.delete_file(FileId(f"results:{batch.provider_batch_id}"))
    assert isinstance(got, CallFailed)
    assert got.kind is CallFailure.REJECTED
    assert (await harbour.after(batch, HOUR_S)).status is ProviderStatus.COMPLETED


@pytest.mark.parametrize("harbour", [EVERY_END.model_copy(update={"limits": Limits()})], indirect=True)
async def test_single_calls_end_like_rows(harbour):
    """The same request ends in the same class by a single call; what only a batch can be is a success there."""
    expected = ENDS | {Outcome.EXPIRED: (RowClass.SUCCEEDED, ())}
    for number, end in enumerate(expected.values()):
        got = await harbour.provider.answer(MESSAGES, params(f"hello {number}"), 20.0)
        assert (got.line.row_class, got.line.flags) == end, number
    wrong = AnthropicProvider(AnthropicAccount("sim", harbour.simulator.origin_url, "sk-wrong"), harbour.time)
    refused = await wrong.answer(MESSAGES, params("x"), 20.0)
    assert refused.failure is not None
    assert (refused.failure.kind, refused.line.row_class) == (CallFailure.ACCOUNT, RowClass.ACCOUNT)
    await wrong.close()
