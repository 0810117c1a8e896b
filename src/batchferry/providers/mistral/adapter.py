"""The calls of a Mistral account, as ``ports.BatchProvider``.

Paths, members and parameters are those of the official client (https://github.com/mistralai/client-python, ``jobs.py``
and ``files.py``). Connections, repeats and deadlines stand in ``providers.calls``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec

from batchferry.domain.batcherrors import BatchErrorKind
from batchferry.domain.ids import FileId, ProviderBatchId
from batchferry.domain.provider import (
    BatchPage,
    BatchSnapshot,
    CallFailed,
    CallFailure,
    DownloadedFile,
    FilePage,
    FileRole,
    LineError,
    UploadedFile,
)
from batchferry.domain.rows import ResultLine, SyncAnswer, UnreadableLine
from batchferry.ports import Clock, UploadSource
from batchferry.providers.calls import Form, Miss, path_segment, read_answer
from batchferry.providers.filecalls import FileCalls, check_form_name
from batchferry.providers.mistral import wire
from batchferry.providers.mistral.account import MAX_TIMEOUT_HOURS, MistralAccount
from batchferry.providers.mistral.classes import classify_batch_error
from batchferry.providers.mistral.errors import refused
from batchferry.providers.mistral.lines import read_line
from batchferry.providers.mistral.synccall import sync_caller
from batchferry.providers.retries import Call

_PURPOSE = "batch"
_WINDOW = re.compile(r"([1-9]\d{0,8})([smhd])", re.ASCII)
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def timeout_hours(window: str) -> int | None:
    """Whole hours of a completion window such as ``24h`` or ``7d``; None when the provider has no such window.

    A part of an hour is cut off, so that the job never outlives the window that was asked for.
    """
    found = _WINDOW.fullmatch(window)
    hours = int(found.group(1)) * _UNITS_S[found.group(2)] // 3600 if found else 0
    return hours if 1 <= hours <= MAX_TIMEOUT_HOURS else None


class MistralProvider(FileCalls):
    """One account; safe for concurrent use within one event loop. ``close`` it when done.

    Args:
        account: settings.
        clock: time and the pauses between tries.
        transport: stands in for the network, in tests.
        rng: source of the jitter.
    """

    def __init__(
        self,
        account: MistralAccount,
        clock: Clock,
        transport: httpx.AsyncBaseTransport | None = None,
        rng: Random | None = None,
    ) -> None:
        headers = {"authorization": f"Bearer {account.api_key}"} if account.api_key else {}
        headers |= {name.lower(): value for name, value in account.headers.items()}
        super().__init__(account, headers, clock, refused, transport, rng)
        self.account = account
        self._sync = sync_caller(
            account, self._sync_client, headers, clock.now, self._skew.note, is_watched=transport is None
        )

    # ------------------------------------------------------------------------------------- the calls

    async def upload(
        self, source: UploadSource, file_name: str, expires_after_s: int | None
    ) -> UploadedFile | CallFailed:
        """Send the batch file, each try from its beginning; at most 1 MiB of it is in memory at a time.

        Args:
            source: the file; what ``chunks`` raises passes through.
            file_name: ``[A-Za-z0-9._-]`` and ``.jsonl`` at the end, which the API insists on.
            expires_after_s: life of the file, sent where the account knows the unit; None: no expiry.

        Raises:
            ValueError: a file name the API would not take.
            InvariantBroken: the source gave another number of bytes than its size.
        """
        check_form_name(file_name)
        size_bytes = source.size_bytes
        if size_bytes > self.account.max_upload_bytes:
            return CallFailed(Call.UPLOAD, CallFailure.REJECTED, code="file_too_large", is_definite=True)
        fields = {"purpose": _PURPOSE}
        if expires_after_s is not None and self.account.file_expiry_unit_s is not None:
            fields["expiry"] = str(-(-expires_after_s // self.account.file_expiry_unit_s))
        form = Form(fields, file_name, source)

        def read(value: Any) -> tuple[UploadedFile, None]:
            return wire.read_file(value), None

        return await self._patiently(lambda: self._send_form("/files", form, read))

    async def create(
        self,
        file_id: FileId,
        endpoint: str,
        completion_window: str,
        metadata: Mapping[str, str],
        model: str = "",
    ) -> BatchSnapshot | CallFailed:
        """Ask once for a job. An outcome that is not clear is ``UNANSWERED``: look the job up.

        A window that is no number of hours from 1 to 168 is refused before it is sent, with the code
        ``completion_window``.
        """
        account = self.account
        hours = timeout_hours(completion_window) if completion_window else account.timeout_hours
        if hours is None:
            return CallFailed(Call.CREATE, CallFailure.REJECTED, code="completion_window", is_definite=True)
        wanted: dict[str, object] = {"input_files": [file_id], "endpoint": endpoint, "timeout_hours": hours}
        if model:
            wanted["model"] = model
        if metadata and account.send_metadata:
            wanted["metadata"] = dict(metadata)
        answer = await self._exchange(
            Call.CREATE,
            "POST",
            "/batch/jobs",
            content=msgspec.json.encode(wanted),
            headers={"content-type": "application/json"},
            total_s=account.timeouts.create_s,
            file_id=file_id,
        )
        job = answer if isinstance(answer, Miss) else read_answer(Call.CREATE, answer, wire.read_job)
        return job.failure if isinstance(job, Miss) else job

    async def retrieve(self, provider_batch_id: ProviderBatchId) -> BatchSnapshot | CallFailed:
        """The job as it is now."""
        return await self._ask(Call.RETRIEVE, "GET", f"/batch/jobs/{path_segment(provider_batch_id)}", wire.read_job)

    async def cancel(self, provider_batch_id: ProviderBatchId) -> BatchSnapshot | CallFailed:
        """Ask for the end of a job. Asking twice is harmless."""
        return await self._ask(
            Call.CANCEL, "POST", f"/batch/jobs/{path_segment(provider_batch_id)}/cancel", wire.read_job
        )

    async def list_batches(self, cursor: str | None = None) -> BatchPage | CallFailed:
        """A page of jobs, newest first; ``cursor`` is the previous page's ``next_cursor``, a page number.

        Raises:
            ValueError: not such a cursor.
        """
        page, size = wire.page_of(cursor), self.account.list_page_size
        params = {"page": str(page), "page_size": str(size), "order_by": "-created"}
        return await self._ask(
            Call.LIST, "GET", "/batch/jobs", lambda value: wire.read_job_page(value, page, size), params
        )

    async def list_files(self, role: FileRole, cursor: str | None = None) -> FilePage | CallFailed:
        """A page of batch files; ``cursor`` as with jobs.

        Input and result files have the purpose ``batch`` alike and are told apart by their ``sample_type``.

        Raises:
            ValueError: not such a cursor.
        """
        page, size = wire.page_of(cursor), self.account.file_page_size
        params = [
            ("page", str(page)),
            ("page_size", str(size)),
            ("include_total", "true"),
            ("purpose", _PURPOSE),
            *(("sample_type", kind) for kind in wire.SAMPLE_TYPES[role]),
        ]
        return await self._ask(
            Call.LIST_FILES, "GET", "/files", lambda value: wire.read_file_page(value, page, size, role), params
        )

    async def download(self, file_id: FileId, to: Path) -> DownloadedFile | CallFailed:
        """Fetch a file's content to ``to`` (0600), each try from its beginning; ``to`` appears only when whole.

        Redirects are followed; another host gets neither the key nor any other header of the account.

        Raises:
            StoreUnavailable: the disk does not take it.
        """
        path = f"/files/{path_segment(file_id)}/content"
        return await self._patiently(lambda: self._download_once(path, to))

    async def delete_file(self, file_id: FileId) -> CallFailed | None:
        """None when the file is gone. A 404 counts as gone unless it is some gateway's."""
        return await self._delete(f"/files/{path_segment(file_id)}")

    async def answer(self, endpoint: str, body: bytes, timeout_s: float) -> SyncAnswer:
        """Run one row now: sent once and unchanged, over a connection of its own.

        Args:
            endpoint: as in the row; what follows its version is put behind the base address.
            body: the request body, its ``model`` included.
            timeout_s: real seconds for the whole call, the wait for a connection included.
        """
        return await self._sync.call(endpoint, body, timeout_s)

    # --------------------------------------------------------------------------------------- the lines

    def render_line(self, url: str, body: bytes) -> bytes:  # noqa: ARG002 (the endpoint stands on the job)
        """The request line behind its ``custom_id`` member, with the line feed.

        Raises:
            ValueError: the body holds a raw line break.
        """
        return wire.request_line(body)

    def line_head(self, wire_id: str) -> bytes:
        """What goes in front of a rendered line."""
        return wire.request_head(wire_id)

    def parse_line(self, line: bytes, endpoint: str) -> ResultLine | UnreadableLine:
        """Take one result line apart and judge its row; the body's bytes stay as they are."""
        return read_line(line, endpoint)

    def classify_batch_error(self, error: LineError) -> BatchErrorKind:
        """What one entry of a failed job's error list is about."""
        return classify_batch_error(error)
