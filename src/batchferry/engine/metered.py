"""A provider account whose calls are counted, timed and watched: what an operator sees of a provider.

Wrapped around every adapter where the parts are joined, so that no adapter and no caller has to think of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import TypeVar

from batchferry.domain.ids import FileId, ProviderBatchId
from batchferry.domain.provider import (
    BatchPage,
    BatchSnapshot,
    CallFailed,
    CallFailure,
    DownloadedFile,
    FilePage,
    FileRole,
    UploadedFile,
)
from batchferry.domain.rows import SyncAnswer
from batchferry.ports import BatchProvider, Telemetry, UploadSource

ANSWERED = "ok"
CUT_OFF = "cut_off"
"""The outcome of a call that we gave up ourselves (a stop, a time limit of ours)."""
BROKE = "broke"
"""The outcome of a call that ended by an exception: a disk that failed under an upload, or a bug."""

T = TypeVar("T")


def tell_failed_call(telemetry: Telemetry, account: str, failure: CallFailed) -> None:
    """Log a call that did not succeed: its kind and codes, none of the provider's text."""
    telemetry.event(
        "provider_call_failed",
        account=account,
        call=failure.call,
        kind=failure.kind.value,
        http_status=failure.http_status,
        code=failure.code,
    )


class MeteredProvider:
    """Keeps the ``BatchProvider`` port by handing everything on.

    The lines' three methods are the adapter's own bound methods: they run for every row.
    """

    def __init__(self, provider: BatchProvider, telemetry: Telemetry, max_clock_skew_s: float) -> None:
        """Take the parts.

        Args:
            max_clock_skew_s: how far the provider's clock may be from ours before that is told.
        """
        self.is_inline = provider.is_inline
        self.name = provider.name
        self._provider = provider
        self._telemetry = telemetry
        self._max_clock_skew_s = max_clock_skew_s
        self._is_skewed = False
        self.check_request = provider.check_request
        self.render_line = provider.render_line
        self.line_head = provider.line_head
        self.parse_line = provider.parse_line
        self.classify_batch_error = provider.classify_batch_error

    async def upload(
        self, source: UploadSource, file_name: str, expires_after_s: int | None
    ) -> UploadedFile | CallFailed:
        """As the port says; the file's bytes are counted once it is there."""
        answer = await self._call("upload", self._provider.upload(source, file_name, expires_after_s))
        if isinstance(answer, UploadedFile):
            self._telemetry.count("upload_bytes", answer.size_bytes)
        return answer

    async def create(
        self,
        file_id: FileId,
        endpoint: str,
        completion_window: str,
        metadata: Mapping[str, str],
        model: str = "",
    ) -> BatchSnapshot | CallFailed:
        """As the port says."""
        made = self._provider.create(file_id, endpoint, completion_window, metadata, model)
        return await self._call("create", made)

    async def create_inline(self, source: UploadSource, endpoint: str, model: str) -> BatchSnapshot | CallFailed:
        """As the port says; the rows' bytes are counted once the batch exists."""
        answer = await self._call("create", self._provider.create_inline(source, endpoint, model))
        if isinstance(answer, BatchSnapshot):
            self._telemetry.count("upload_bytes", source.size_bytes)
        return answer

    async def retrieve(self, provider_batch_id: ProviderBatchId) -> BatchSnapshot | CallFailed:
        """As the port says."""
        return await self._call("retrieve", self._provider.retrieve(provider_batch_id))

    async def list_batches(self, cursor: str | None = None) -> BatchPage | CallFailed:
        """As the port says."""
        return await self._call("list", self._provider.list_batches(cursor))

    async def list_files(self, role: FileRole, cursor: str | None = None) -> FilePage | CallFailed:
        """As the port says."""
        return await self._call("list_files", self._provider.list_files(role, cursor))

    async def cancel(self, provider_batch_id: ProviderBatchId) -> BatchSnapshot | CallFailed:
        """As the port says."""
        return await self._call("cancel", self._provider.cancel(provider_batch_id))

    async def download(self, file_id: FileId, to: Path) -> DownloadedFile | CallFailed:
        """As the port says; the file's bytes are counted once it is whole."""
        answer = await self._call("download", self._provider.download(file_id, to))
        if isinstance(answer, DownloadedFile):
            self._telemetry.count("download_bytes", answer.size_bytes)
        return answer

    async def delete_file(self, file_id: FileId) -> CallFailed | None:
        """As the port says."""
        return await self._call("delete", self._provider.delete_file(file_id))

    async def answer(self, endpoint: str, body: bytes, timeout_s: float) -> SyncAnswer:
        """As the port says."""
        return await self._call("answer", self._provider.answer(endpoint, body, timeout_s))

    @property
    def clock_skew_s(self) -> float | None:
        """As the port says."""
        return self._provider.clock_skew_s

    async def close(self) -> None:
        """As the port says."""
        await self._provider.close()

    async def _call(self, call: str, answer: Awaitable[T]) -> T:
        loop = asyncio.get_running_loop()
        started = loop.time()
        outcome = BROKE
        try:
            got = await answer
            failure = got.failure if isinstance(got, SyncAnswer) else got if isinstance(got, CallFailed) else None
            outcome = ANSWERED if failure is None else failure.kind.value
        except asyncio.CancelledError:
            outcome = CUT_OFF
            raise
        finally:
            self._telemetry.count("provider_calls", account=self.name, call=call, outcome=outcome)
            self._telemetry.observe("provider_call_seconds", loop.time() - started, call=call)
        if failure is not None and failure.kind is CallFailure.THROTTLED:
            self._telemetry.count("provider_throttled", account=self.name)
            self._telemetry.event(
                "provider_throttled", account=self.name, call=call, retry_after_s=failure.retry_after_s
            )
        self._watch_clock()
        return got

    def _watch_clock(self) -> None:
        skew_s = self._provider.clock_skew_s
        if skew_s is None:
            return
        self._telemetry.gauge("clock_skew_seconds", skew_s, account=self.name)
        is_skewed = abs(skew_s) > self._max_clock_skew_s
        if is_skewed == self._is_skewed:
            return
        self._is_skewed = is_skewed
        if is_skewed:
            self._telemetry.event(
                "clock_skewed", account=self.name, skew_s=round(skew_s, 3), limit_s=self._max_clock_skew_s
            )
        else:
            self._telemetry.event("clock_agrees", account=self.name, skew_s=round(skew_s, 3))
