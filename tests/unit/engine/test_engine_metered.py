"""A provider's calls as the metrics show them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from batchferry.domain.ids import FileId, ProviderBatchId
from batchferry.domain.provider import (
    BatchPage,
    CallFailed,
    CallFailure,
    DownloadedFile,
    FilePage,
    FileRole,
    UploadedFile,
)
from batchferry.domain.rows import ResultLine, RowClass, SyncAnswer
from batchferry.engine.metered import MeteredProvider
from batchferry.telemetry import RecordingTelemetry


def render(url: str, body: bytes) -> bytes:
    """Any function of its own."""
    return url.encode() + body


def metered(telemetry: RecordingTelemetry, clock_skew_s: float | None = None, **calls: Any) -> Any:
    """A metered account whose calls answer with what is given: a value, or a coroutine function."""

    def answering(answer: Any) -> Any:
        async def call(*_arguments: object) -> object:
            return await answer() if callable(answer) else answer

        return call

    inner: Any = SimpleNamespace(
        is_inline=False,
        name="main",
        clock_skew_s=clock_skew_s,
        check_request=None,
        render_line=render,
        line_head=render,
        parse_line=render,
        classify_batch_error=render,
        **{name: answering(answer) for name, answer in calls.items()},
    )
    return MeteredProvider(inner, telemetry, max_clock_skew_s=60.0), inner


async def test_calls_and_bytes_are_counted() -> None:
    """Each call counts once under its name and end; files count their bytes only when they are whole."""
    telemetry = RecordingTelemetry()
    failed = CallFailed("retrieve", CallFailure.NOT_FOUND)
    provider, _ = metered(
        telemetry,
        upload=UploadedFile(FileId("file-1"), 700),
        download=DownloadedFile(30, "00"),
        retrieve=failed,
        list_batches=BatchPage(()),
        list_files=FilePage(()),
        delete_file=None,
    )
    await provider.upload(None, "name", None)
    await provider.download(FileId("file-1"), None)
    assert await provider.retrieve(ProviderBatchId("batch_1")) is failed
    await provider.list_batches()
    assert await provider.list_files(FileRole.INPUT) == FilePage(())
    assert await provider.delete_file(FileId("file-1")) is None
    assert telemetry.total("provider_calls") == 6
    assert telemetry.total("provider_calls", call="list_files", outcome="ok") == 1
    assert telemetry.total("provider_calls", account="main", call="retrieve", outcome="not_found") == 1
    assert telemetry.total("provider_calls", call="delete", outcome="ok") == 1
    assert telemetry.total("upload_bytes") == 700
    assert telemetry.total("download_bytes") == 30
    assert len(telemetry.observations[("provider_call_seconds", (("call", "upload"),))]) == 1


async def test_throttling_is_told_with_its_pause() -> None:
    """A 429 is counted for its account, and told with the time the provider asked for."""
    telemetry = RecordingTelemetry()
    provider, _ = metered(telemetry, cancel=CallFailed("cancel", CallFailure.THROTTLED, retry_after_s=7.0))
    await provider.cancel(ProviderBatchId("batch_1"))
    assert telemetry.total("provider_throttled", account="main") == 1
    assert telemetry.named("provider_throttled") == [{"account": "main", "call": "cancel", "retry_after_s": 7.0}]


async def test_single_calls_count_by_how_they_ended() -> None:
    """A call of the sync lane counts like any other: by its failure inside the answer, its throttling told."""
    telemetry = RecordingTelemetry()
    line = ResultLine("", RowClass.TRANSIENT)
    throttled = SyncAnswer(line, CallFailed("answer", CallFailure.THROTTLED, 429, retry_after_s=3.0))
    answers = iter([SyncAnswer(ResultLine("", RowClass.SUCCEEDED, 200)), throttled])

    async def answering() -> SyncAnswer:
        return next(answers)

    provider, _ = metered(telemetry, answer=answering)
    assert (await provider.answer("/v1/embeddings", b"{}", 5.0)).failure is None
    assert await provider.answer("/v1/embeddings", b"{}", 5.0) is throttled
    assert telemetry.total("provider_calls", account="main", call="answer", outcome="ok") == 1
    assert telemetry.total("provider_calls", account="main", call="answer", outcome="throttled") == 1
    assert telemetry.named("provider_throttled") == [{"account": "main", "call": "answer", "retry_after_s": 3.0}]


async def test_clock_is_told_when_it_leaves_and_when_it_comes_back() -> None:
    """The skew is always in the gauge; an event comes only when it crosses the limit, in either direction."""
    telemetry = RecordingTelemetry()
    provider, inner = metered(telemetry, list_batches=BatchPage(()))
    await provider.list_batches()
    assert telemetry.gauges == {}
    for inner.clock_skew_s in (-61.0, -90.0, 3.0):
        await provider.list_batches()
    assert [name for name, _ in telemetry.events] == ["clock_skewed", "clock_agrees"]
    assert telemetry.gauges[("clock_skew_seconds", (("account", "main"),))] == 3.0


async def test_calls_that_do_not_return_are_counted() -> None:
    """A call that we cut off and one that broke count as such, and what ended them goes on."""
    telemetry = RecordingTelemetry()

    async def breaking() -> None:
        raise OSError

    provider, _ = metered(telemetry, retrieve=asyncio.Event().wait, upload=breaking)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await provider.retrieve(ProviderBatchId("batch_1"))
    with pytest.raises(OSError):
        await provider.upload(None, "name", None)
    assert telemetry.total("provider_calls", call="retrieve", outcome="cut_off") == 1
    assert telemetry.total("provider_calls", call="upload", outcome="broke") == 1


def test_lines_are_the_adapters_own() -> None:
    """What runs for every row is the adapter's own method, with nothing in between."""
    provider, inner = metered(RecordingTelemetry())
    assert provider.parse_line is inner.parse_line
    assert provider.render_line is inner.render_line
    assert provider.line_head is inner.line_head
