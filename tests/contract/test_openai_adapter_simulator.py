"""The OpenAI adapter against a real HTTP server: forms, streams, broken connections and a batch's whole life."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import datetime
from random import Random

import pytest

from batchferry.domain.batcherrors import BatchErrorKind
from batchferry.domain.provider import (
    BatchPage,
    BatchSnapshot,
    CallFailed,
    CallFailure,
    DownloadedFile,
    FilePage,
    FileRole,
    ProviderStatus,
    UploadedFile,
)
from batchferry.domain.rows import ResultLine, RowClass, RowFlag, UnreadableLine
from batchferry.providers.openai import OpenAIAccount, OpenAIProvider
from batchferry.providers.retries import CallRetries
from batchferry.simulator import (
    DEFAULT_KEY,
    CallName,
    FaultKind,
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

CHAT = "/v1/chat/completions"
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

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.size_bytes = len(data)

    async def chunks(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self.data), 1 << 16):
            yield self.data[start : start + (1 << 16)]


class Harbour:
    """A simulator, its clock, and an adapter in front of it."""

    def __init__(self, simulator: Simulator, clock: ManualSimClock) -> None:
        self.simulator = simulator
        self.clock = clock
        self.time = SimTime(clock)
        self.provider = OpenAIProvider(
            OpenAIAccount("sim", simulator.base_url, DEFAULT_KEY, retries=CallRetries(jitter=0.0)),
            self.time,
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

    async def submitted(self, data: bytes) -> BatchSnapshot:
        """Upload and create, which must succeed."""
        file = await self.uploaded(data)
        got = await self.provider.create(file.file_id, CHAT, "24h", {"batchferry_batch": "b-1"})
        assert isinstance(got, BatchSnapshot), got
        return got

    async def after(self, batch: BatchSnapshot, seconds: float) -> BatchSnapshot:
        """The batch that many virtual seconds later."""
        self.clock.advance(seconds)
        await self.simulator.settle()
        got = await self.provider.retrieve(batch.provider_batch_id)
        assert isinstance(got, BatchSnapshot), got
        return got


def chat_body(text: str) -> bytes:
    """A chat request."""
    return json.dumps({"model": "gpt-5-mini", "messages": [{"role": "user", "content": text}]}).encode()


@pytest.fixture
async def harbour(request: pytest.FixtureRequest) -> AsyncIterator[Harbour]:
    """A running simulator on a clock that stands, and the adapter."""
    script = getattr(request, "param", Scenario())
    clock = ManualSimClock()
    async with Simulator(SimulatorSettings(clock=clock, scenario=script)) as simulator:
        made = Harbour(simulator, clock)
        yield made
        await made.provider.close()


ROWS = (
    RowRule(match=RowMatch(body_contains='hello 1"'), outcome=Outcome.CONTEXT_LENGTH),
    RowRule(match=RowMatch(body_contains='hello 2"'), outcome=Outcome.TRUNCATED),
    RowRule(match=RowMatch(body_contains='hello 3"'), outcome=Outcome.LINE_SEPARATOR),
    RowRule(match=RowMatch(body_contains='hello 4"'), outcome=Outcome.NUL),
    RowRule(match=RowMatch(body_contains='hello 5"'), outcome=Outcome.INVALID_UTF8),
    RowRule(match=RowMatch(body_contains='hello 6"'), outcome=Outcome.STATUS_ZERO),
    RowRule(match=RowMatch(body_contains='hello 7"'), outcome=Outcome.EMPTY_BODY),
    RowRule(match=RowMatch(body_contains='hello 8"'), outcome=Outcome.REFUSAL),
    RowRule(match=RowMatch(body_contains='hello 9"'), outcome=Outcome.TOOL_CALL),
    RowRule(match=RowMatch(body_contains='hello 10"'), outcome=Outcome.CONTENT_FILTER),
    RowRule(match=RowMatch(body_contains='hello 11"'), outcome=Outcome.TIMEOUT),
    RowRule(match=RowMatch(body_contains='hello 12"'), outcome=Outcome.UNREADABLE),
    RowRule(match=RowMatch(body_contains='hello 13"'), outcome=Outcome.HTTP_ERROR, status=429, code="insufficient_quota"),
    RowRule(match=RowMatch(body_contains='hello 14"'), outcome=Outcome.HTTP_ERROR, status=503),
)  # fmt: skip
ENDS = {
    0: (RowClass.SUCCEEDED, ()),
    1: (RowClass.TOO_LONG, ()),
    2: (RowClass.SUCCEEDED, (RowFlag.TRUNCATED,)),
    3: (RowClass.SUCCEEDED, ()),
    4: (RowClass.SUCCEEDED, ()),
    5: (RowClass.SUCCEEDED, ()),
    6: (RowClass.TRANSIENT, ()),
    7: (RowClass.TRANSIENT, ()),
    8: (RowClass.SUCCEEDED, (RowFlag.REFUSED,)),
    9: (RowClass.SUCCEEDED, (RowFlag.TOOL_CALL_PENDING,)),
    10: (RowClass.CONTENT_FILTERED, ()),
    11: (RowClass.TRANSIENT, ()),
    13: (RowClass.ACCOUNT, ()),
    14: (RowClass.TRANSIENT, ()),
}


@pytest.mark.parametrize("harbour", [Scenario(rows=ROWS)], indirect=True)
async def test_a_batch_from_upload_to_deletion(harbour, tmp_path):
    """Upload, create, poll, download both files, judge every line, delete: each row ends as scripted."""
    batch = await harbour.submitted(harbour.file_of(15))
    assert batch.status is ProviderStatus.VALIDATING
    assert batch.metadata == {"batchferry_batch": "b-1"}
    done = await harbour.after(batch, 2 * HOUR_S)
    assert done.status is ProviderStatus.COMPLETED
    assert done.ended_at is not None
    ends = {}
    for file_id in (done.output_file_id, done.error_file_id):
        to = tmp_path / "part.jsonl"
        assert isinstance(await harbour.provider.download(file_id, to), DownloadedFile)
        for line in to.read_bytes().split(b"\n"):
            if line:
                got = harbour.provider.parse_line(line, CHAT)
                ends[int(got.wire_id.split("-")[2])] = got
    unreadable = ends.pop(12)
    assert isinstance(unreadable, UnreadableLine)
    assert {row: (got.row_class, got.flags) for row, got in ends.items()} == ENDS
    assert all(
        isinstance(got, ResultLine) and got.usage is not None for row, got in ends.items() if row in {0, 2, 3, 4, 5}
    )
    assert b"\xe2\x80\xa8" in ends[3].body
    assert b"\\u0000" in ends[4].body
    json.loads(ends[5].body)
    for file_id in (done.output_file_id, done.error_file_id, done.input_file_id):
        assert await harbour.provider.delete_file(file_id) is None
        assert await harbour.provider.delete_file(file_id) is None  # gone is gone
    again = await harbour.provider.download(done.output_file_id, tmp_path / "x")
    assert isinstance(again, CallFailed)
    assert again.kind is CallFailure.NOT_FOUND


async def test_a_lost_reply_to_a_create_is_found_by_listing(harbour):
    """The create is sent once and stays unanswered; the batch runs and is found by its input file."""
    file = await harbour.uploaded(harbour.file_of(3))
    harbour.simulator.faults.put(FaultRule(call=CallName.CREATE, kind=FaultKind.LOSE_REPLY))
    got = await harbour.provider.create(file.file_id, CHAT, "24h", {"batchferry_batch": "b-1"})
    assert isinstance(got, CallFailed)
    assert (got.kind, got.is_definite) == (CallFailure.UNANSWERED, False)
    assert harbour.simulator.faults.calls[CallName.CREATE] == 1
    page = await harbour.provider.list_batches()
    assert isinstance(page, BatchPage)
    assert [(b.input_file_id, b.metadata) for b in page.batches] == [(file.file_id, {"batchferry_batch": "b-1"})]


async def test_broken_calls_are_bridged(harbour, tmp_path):
    """Dropped uploads and polls, a 502, a throttled upload and a cut download are repeated from zero."""
    faults = harbour.simulator.faults
    faults.put(FaultRule(call=CallName.UPLOAD, kind=FaultKind.DROP, nth=1))
    faults.put(FaultRule(call=CallName.UPLOAD, status=429, nth=2, retry_after_s=17))
    faults.put(FaultRule(call=CallName.RETRIEVE, status=502, nth=1, body="<html>"))
    faults.put(FaultRule(call=CallName.CONTENT, kind=FaultKind.CUT, nth=1))
    faults.put(FaultRule(call=CallName.CONTENT, status=502, nth=2))
    data = harbour.file_of(200)
    batch = await harbour.submitted(data)
    assert harbour.time.sleeps == [1, 17]
    done = await harbour.after(batch, 2 * HOUR_S)
    assert done.counts.total == 200
    got = await harbour.provider.download(done.output_file_id, tmp_path / "o.jsonl")
    assert isinstance(got, DownloadedFile)
    assert (tmp_path / "o.jsonl").read_bytes().count(b"\n") == 200
    assert faults.calls[CallName.CONTENT] == 3


@pytest.mark.parametrize(
    "harbour", [Scenario(create_gap=1), Scenario(unknown_file="reject_404", create_gap=1)], indirect=True
)
async def test_a_file_not_yet_seen_is_no_refusal(harbour):
    """The first create after an upload may not see the file: not ready, and definitely not created."""
    file = await harbour.uploaded(harbour.file_of(2))
    got = await harbour.provider.create(file.file_id, CHAT, "24h", {})
    assert isinstance(got, CallFailed)
    assert (got.kind, got.is_definite) == (CallFailure.NOT_READY, True)
    assert isinstance(await harbour.provider.create(file.file_id, CHAT, "24h", {}), BatchSnapshot)


async def test_cancelling(harbour):
    """A running batch is cancelled; one that has ended answers with a conflict; an unknown one is not found."""
    batch = await harbour.submitted(harbour.file_of(50))
    await harbour.after(batch, 6)
    got = await harbour.provider.cancel(batch.provider_batch_id)
    assert isinstance(got, BatchSnapshot)
    assert got.status is ProviderStatus.CANCELLING
    assert (await harbour.after(batch, HOUR_S)).status is ProviderStatus.CANCELLED
    other = await harbour.submitted(harbour.file_of(1))
    assert (await harbour.after(other, HOUR_S)).status is ProviderStatus.COMPLETED
    late = await harbour.provider.cancel(other.provider_batch_id)
    assert isinstance(late, CallFailed)
    assert late.kind is CallFailure.CONFLICT
    unknown = await harbour.provider.retrieve("batch_unknown")
    assert isinstance(unknown, CallFailed)
    assert unknown.kind is CallFailure.NOT_FOUND


@pytest.mark.parametrize("harbour", [Scenario(limits=Limits(enqueued_tokens={"gpt-5-mini": 10}))], indirect=True)
async def test_the_enqueued_token_limit_is_told_from_bad_rows(harbour):
    """A batch over the quota fails with an entry that blames nobody."""
    batch = await harbour.submitted(harbour.file_of(50))
    failed = await harbour.after(batch, HOUR_S)
    assert failed.status is ProviderStatus.FAILED
    assert [harbour.provider.classify_batch_error(error) for error in failed.errors] == [BatchErrorKind.TOKEN_LIMIT]


async def test_bad_lines_are_named(harbour):
    """A file with a bad line is accepted and fails; the entry names the line."""
    bad = harbour.provider.line_head("0123456789-0-9-1") + b',"method":"GET","url":"/v1/chat/completions","body":{}}\n'
    failed = await harbour.after(await harbour.submitted(harbour.file_of(2) + bad), HOUR_S)
    assert failed.status is ProviderStatus.FAILED
    kinds = {(harbour.provider.classify_batch_error(error), error.line) for error in failed.errors}
    assert kinds == {(BatchErrorKind.ROW, 3)}


async def test_pages_are_followed_to_the_oldest(harbour):
    """Small pages chained by next_cursor give every batch once, newest first."""
    made = [await harbour.submitted(harbour.file_of(1, f"batch {number}")) for number in range(5)]
    small = OpenAIProvider(
        OpenAIAccount("sim", harbour.simulator.base_url, DEFAULT_KEY, list_page_size=2), harbour.time, rng=Random(1)
    )
    seen, cursor = [], None
    for _ in range(10):
        page = await small.list_batches(cursor)
        assert isinstance(page, BatchPage)
        seen += [batch.provider_batch_id for batch in page.batches]
        cursor = page.next_cursor
        if cursor is None:
            break
    await small.close()
    assert sorted(seen) == sorted(batch.provider_batch_id for batch in made)


async def test_files_are_listed_to_the_oldest(harbour):
    """Small pages give every input file once, newest first, under the name it was sent with; results are another list."""
    small = OpenAIProvider(
        OpenAIAccount("sim", harbour.simulator.base_url, DEFAULT_KEY, file_page_size=2), harbour.time, rng=Random(1)
    )

    async def every(role: FileRole):
        found, cursor = [], None
        for _ in range(10):
            page = await small.list_files(role, cursor)
            assert isinstance(page, FilePage)
            found += page.files
            cursor = page.next_cursor
            if cursor is None:
                return found
        raise AssertionError("a list without an end")

    batch = await harbour.submitted(harbour.file_of(3, "ended"))
    ended = await harbour.after(batch, 2 * HOUR_S)
    made = [batch.input_file_id]
    for number in range(4):
        made.append((await harbour.uploaded(harbour.file_of(1, f"file {number}"))).file_id)
        harbour.clock.advance(1)
    inputs = await every(FileRole.INPUT)
    assert [file.file_id for file in inputs] == made[::-1]
    assert {file.name for file in inputs} == {"batchferry-test.jsonl"}
    assert all(file.created_at is not None and file.expires_at is not None and file.size_bytes > 0 for file in inputs)
    assert [file.file_id for file in await every(FileRole.OUTPUT)] == [ended.output_file_id]
    assert await small.delete_file(made[0]) is None
    assert [file.file_id for file in await every(FileRole.INPUT)] == made[:0:-1]
    await small.close()


async def test_a_wrong_key_holds_the_account(harbour):
    """Whatever is asked with a wrong key is an account failure, definitely."""
    stranger = OpenAIProvider(OpenAIAccount("x", harbour.simulator.base_url, "sk-wrong"), harbour.time, rng=Random(1))
    upload = await stranger.upload(Lines(b"{}\n"), "a.jsonl", None)
    create = await stranger.create("file-1", CHAT, "24h", {})
    await stranger.close()
    assert [(got.kind, got.is_definite) for got in (upload, create)] == [(CallFailure.ACCOUNT, True)] * 2


async def test_nobody_listens(harbour):
    """A port without a server is unavailable, and a create surely did not happen."""
    nowhere = OpenAIProvider(OpenAIAccount("x", "http://127.0.0.1:9/v1", "k"), harbour.time, rng=Random(1))
    got = await nowhere.create("file-1", CHAT, "24h", {})
    await nowhere.close()
    assert isinstance(got, CallFailed)
    assert (got.kind, got.code, got.is_definite) == (CallFailure.UNAVAILABLE, "connect_error", True)


async def test_the_clocks_agree(harbour):
    """On one clock the skew is within the second to which a Date is cut."""
    await harbour.provider.list_batches()
    assert abs(harbour.provider.clock_skew_s) <= 1.0
