"""The calls of a Gemini account over httpx, as ``ports.BatchProvider``.

A create is documented as not idempotent: it is sent once, and a lost one is looked up by the batch id that stands in
the job's display name. Source: https://ai.google.dev/gemini-api/docs/batch-api, https://ai.google.dev/api/files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote

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
    ProviderStatus,
    UploadedFile,
)
from batchferry.domain.rows import ResultLine, SyncAnswer, UnreadableLine
from batchferry.ports import Clock, UploadSource
from batchferry.providers.calls import Miss, exactly, nonsense_answer, read_answer
from batchferry.providers.filecalls import FileCalls
from batchferry.providers.gemini import errors, wire
from batchferry.providers.gemini.account import GeminiAccount
from batchferry.providers.gemini.classes import classify_batch
from batchferry.providers.gemini.lines import read_line
from batchferry.providers.gemini.statuses import FILE_BROKEN, FILE_READY
from batchferry.providers.gemini.synccall import NO_MODEL, GenerateCaller, judge
from batchferry.providers.retries import Call
from batchferry.providers.synccall import SyncCaller

MIME_TYPE = "application/jsonl"
_JSON = {"content-type": "application/json"}
_READY_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Pauses between looks at a file that is being processed; the last one again and again."""


class GeminiProvider(FileCalls):
    """One account; safe for concurrent use within one event loop. ``close`` it when done.

    Args:
        account: settings.
        clock: time and the pauses between tries.
        transport: stands in for the network, in tests.
        rng: source of the jitter.
    """

    def __init__(
        self,
        account: GeminiAccount,
        clock: Clock,
        transport: httpx.AsyncBaseTransport | None = None,
        rng: Random | None = None,
    ) -> None:
        headers = {"x-goog-api-key": account.api_key} if account.api_key else {}
        headers |= {name.lower(): value for name, value in account.headers.items()}
        super().__init__(account, headers, clock, errors.refused, transport, rng)
        self.account = account
        # Uploads and downloads stand beside the version, not under it.
        self._base = account.root
        self._api = f"/{account.version}"
        self._sync = GenerateCaller(
            SyncCaller(
                client=self._sync_client,
                base_url=account.base_url,
                headers=self._headers,
                query=dict(account.query),
                max_answer_bytes=account.max_answer_bytes,
                is_watched=transport is None,
                now=clock.now,
                note=self._skew.note,
                refuse=errors.refused,
                judge=judge,
            )
        )

    # ------------------------------------------------------------------------------------- the calls

    async def upload(
        self,
        source: UploadSource,
        file_name: str,
        expires_after_s: int | None,  # noqa: ARG002 (every file lives for 48 hours)
    ) -> UploadedFile | CallFailed:
        """Send the batch file and wait until it may be used; each try starts an upload of its own from zero.

        Args:
            source: the file; what ``chunks`` raises passes through.
            file_name: becomes the file's display name; plain ASCII that ends in ``.jsonl``.
            expires_after_s: not taken by Gemini.

        Raises:
            ValueError: a file name that is not plain.
            InvariantBroken: the source gave another number of bytes than its size.
        """
        if not file_name.endswith(".jsonl") or not file_name.isascii() or not file_name.isprintable():
            raise ValueError(f"file name {file_name!r} is not a plain ASCII name that ends in .jsonl")
        size_bytes = source.size_bytes
        if size_bytes > self.account.max_upload_bytes:
            return CallFailed(Call.UPLOAD, CallFailure.REJECTED, code="file_too_large", is_definite=True)

        async def attempt() -> UploadedFile | Miss:
            target = await self._start_upload(file_name, size_bytes)
            if isinstance(target, Miss):
                return target
            path, query = target
            answer = await self._exchange(
                Call.UPLOAD,
                "POST",
                path,
                params=query,
                content=exactly(source, size_bytes),
                headers={
                    "content-length": str(size_bytes),
                    "x-goog-upload-offset": "0",
                    "x-goog-upload-command": "upload, finalize",
                },
                total_s=self.account.timeouts.upload_s,
            )
            if isinstance(answer, Miss):
                return answer
            if answer.headers.get("x-goog-upload-status", "final").lower() != "final":
                return nonsense_answer(Call.UPLOAD, answer, "upload_not_final")
            read = read_answer(Call.UPLOAD, answer, wire.read_file)
            if isinstance(read, Miss):
                return read
            uploaded, state = read
            if uploaded.size_bytes not in {0, size_bytes}:
                return nonsense_answer(Call.UPLOAD, answer, "size_mismatch")
            return await self._ready(replace(uploaded, size_bytes=size_bytes), state)

        return await self._patiently(attempt)

    async def create(
        self,
        file_id: FileId,
        endpoint: str,  # noqa: ARG002 (there is one)
        completion_window: str,  # noqa: ARG002 (not to be chosen: 24 h are aimed at, after 48 h a job expires)
        metadata: Mapping[str, str],
        model: str = "",
    ) -> BatchSnapshot | CallFailed:
        """Ask once for a batch. An outcome that is not clear is ``UNANSWERED``: look the batch up.

        Args:
            file_id: the input file's name, ``files/...``.
            endpoint: not sent.
            completion_window: not sent.
            metadata: its ``batch_id`` and the rest become the job's display name.
            model: the rows' model, without which there is no address.

        Raises:
            ValueError: metadata that does not fit into a name.
        """
        if not model:
            return CallFailed(Call.CREATE, CallFailure.REJECTED, code=NO_MODEL, is_definite=True)
        batch = {"displayName": wire.display_name(metadata), "inputConfig": {"fileName": file_id}}
        answer = await self._exchange(
            Call.CREATE,
            "POST",
            f"{self._api}/{quote(wire.model_path(model), safe='/')}:batchGenerateContent",
            content=msgspec.json.encode({"batch": batch}),
            headers=_JSON,
            total_s=self.account.timeouts.create_s,
            file_id=file_id,
        )
        if isinstance(answer, Miss):
            return answer.failure
        made = read_answer(Call.CREATE, answer, self._read_batch)
        return made.failure if isinstance(made, Miss) else made

    async def retrieve(self, provider_batch_id: ProviderBatchId) -> BatchSnapshot | CallFailed:
        """The batch as it is now."""
        return await self._patiently(lambda: self._look(Call.RETRIEVE, provider_batch_id))

    async def cancel(self, provider_batch_id: ProviderBatchId) -> BatchSnapshot | CallFailed:
        """Ask for the end of a batch; ``CONFLICT`` when it has ended already. Asking twice is harmless.

        Gemini answers with nothing, so the batch is looked at afterwards. It has no word for a batch that is being
        cancelled: one that has not ended yet is shown as ``CANCELLING``, since it was agreed to.
        """

        async def attempt() -> BatchSnapshot | Miss:
            path = f"{self._api}/{_resource('batches', provider_batch_id)}:cancel"
            answer = await self._exchange(Call.CANCEL, "POST", path, content=b"{}", headers=_JSON)
            if isinstance(answer, Miss):
                return answer
            seen = await self._look(Call.CANCEL, provider_batch_id)
            if isinstance(seen, Miss) or seen.status.is_terminal:
                return seen
            return replace(seen, status=ProviderStatus.CANCELLING)

        return await self._patiently(attempt)

    async def list_batches(self, cursor: str | None = None) -> BatchPage | CallFailed:
        """A page of batches; ``cursor`` is the previous page's ``next_cursor``."""
        params = _page(self.account.list_page_size, cursor)
        return await self._ask(
            Call.LIST,
            "GET",
            f"{self._api}/batches",
            lambda value: wire.read_batch_page(value, cursor, self.account.expires_after_s),
            params,
        )

    async def list_files(self, role: FileRole, cursor: str | None = None) -> FilePage | CallFailed:
        """A page of the project's files of this role; it may be empty although more follow."""
        params = _page(self.account.file_page_size, cursor)
        return await self._ask(
            Call.LIST_FILES, "GET", f"{self._api}/files", lambda value: wire.read_file_page(value, cursor, role), params
        )

    async def download(self, file_id: FileId, to: Path) -> DownloadedFile | CallFailed:
        """Fetch a result file to ``to`` (0600), each try from its beginning; ``to`` appears only when whole.

        The file is not asked about first: names of result files are longer than that call takes.

        Raises:
            StoreUnavailable: the disk does not take it.
        """
        path = f"/download{self._api}/{_resource('files', file_id)}:download?alt=media"
        return await self._patiently(lambda: self._download_once(path, to))

    async def delete_file(self, file_id: FileId) -> CallFailed | None:
        """None when the file is gone.

        Gemini refuses what is gone with 403, in the words it has for what belongs to somebody else, and was seen to do
        so for an account that had not paid. Such a refusal counts as gone only where the account may list its files.
        """

        async def attempt() -> Miss | None:
            answer = await self._exchange(Call.DELETE, "DELETE", f"{self._api}/{_resource('files', file_id)}")
            if not isinstance(answer, Miss) or answer.failure.kind is not CallFailure.NOT_FOUND:
                return answer if isinstance(answer, Miss) else None
            if answer.failure.http_status == 404:
                return None
            seen = await self._exchange(Call.DELETE, "GET", f"{self._api}/files", params=_page(1, None))
            return seen if isinstance(seen, Miss) else None

        return await self._patiently(attempt)

    async def answer(
        self,
        endpoint: str,  # noqa: ARG002 (there is one)
        body: bytes,
        timeout_s: float,
    ) -> SyncAnswer:
        """Run one row now: sent once, without its ``model``, which becomes the address.

        Args:
            endpoint: not sent.
            body: the request body, with ``model``.
            timeout_s: real seconds for the whole call, the wait for a connection included.
        """
        return await self._sync.call(body, timeout_s)

    # --------------------------------------------------------------------------------------- the lines

    def render_line(self, url: str, body: bytes) -> bytes:  # noqa: ARG002 (the job names the model and the method)
        """The request line behind its ``key`` member, with the line feed; ``body`` goes in without its ``model``.

        Raises:
            ValueError: the body holds a raw line break, or is no JSON object.
        """
        return wire.request_line(body)

    def line_head(self, wire_id: str) -> bytes:
        """What goes in front of a rendered line."""
        return wire.request_head(wire_id)

    def parse_line(self, line: bytes, endpoint: str) -> ResultLine | UnreadableLine:  # noqa: ARG002
        """Take one result line apart and judge its row; the response's bytes stay as they are."""
        return read_line(line)

    def classify_batch_error(self, error: LineError) -> BatchErrorKind:
        """What a failed operation's error is about."""
        return classify_batch(error.code, error.message)

    # ----------------------------------------------------------------------------------------- inside

    async def _start_upload(self, file_name: str, size_bytes: int) -> tuple[str, list[tuple[str, str]]] | Miss:
        """Where the bytes go: a path and its query. The host is always our own, so no answer can lead us elsewhere."""
        answer = await self._exchange(
            Call.UPLOAD,
            "POST",
            f"/upload{self._api}/files",
            content=msgspec.json.encode({"file": {"displayName": file_name, "mimeType": MIME_TYPE}}),
            headers=_JSON
            | {
                "x-goog-upload-protocol": "resumable",
                "x-goog-upload-command": "start",
                "x-goog-upload-header-content-length": str(size_bytes),
                "x-goog-upload-header-content-type": MIME_TYPE,
            },
        )
        if isinstance(answer, Miss):
            return answer
        try:
            url = httpx.URL(answer.headers["x-goog-upload-url"])
        except (KeyError, httpx.InvalidURL):
            return nonsense_answer(Call.UPLOAD, answer, "no_upload_address")
        # A gateway in front may or may not have put its own folder before the path.
        folder = httpx.URL(self._base).path.rstrip("/")
        return url.path.removeprefix(folder), url.params.multi_items()

    async def _ready(self, uploaded: UploadedFile, state: str) -> UploadedFile | Miss:
        """Wait until a file may be named in a create."""
        began, looks = self._clock.monotonic(), 0
        while state not in {"", FILE_READY}:
            if state == FILE_BROKEN:
                failure = CallFailed(Call.UPLOAD, CallFailure.REJECTED, code="file_state_failed")
                return Miss(failure)
            pause_s = _READY_PAUSES_S[min(looks, len(_READY_PAUSES_S) - 1)]
            if self._clock.monotonic() - began + pause_s > self.account.file_ready_s:
                break
            await self._clock.sleep(pause_s)
            looks += 1
            path = f"{self._api}/{_resource('files', uploaded.file_id)}"
            read = await self._read(Call.UPLOAD, "GET", path, wire.read_file)
            # A look that fails says nothing about the file, which is uploaded.
            state = state if isinstance(read, Miss) else read[1]
        return uploaded

    async def _look(self, call: Call, provider_batch_id: ProviderBatchId) -> BatchSnapshot | Miss:
        return await self._read(call, "GET", f"{self._api}/{_resource('batches', provider_batch_id)}", self._read_batch)

    def _read_batch(self, value: Any) -> BatchSnapshot:
        return wire.read_batch(value, self.account.expires_after_s)


def _page(size: int, cursor: str | None) -> dict[str, str]:
    return {"pageSize": str(size)} | ({"pageToken": cursor} if cursor else {})


def _resource(kind: str, name: str) -> str:
    """A resource's name as a path: ``files/x`` and the bare ``x`` are the same."""
    return f"{kind}/{quote(name.removeprefix(f'{kind}/'), safe='')}"
