"""The calls of an OpenAI-shaped account over httpx, as ``ports.BatchProvider``.

Every call answers with a value: what was asked for, or a ``CallFailed``. Repeats follow the one table in
``providers.retries``; a create is sent once, over a connection of its own, so that neither a retry nor a stale
kept-alive connection can make two bills of it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from batchferry import __version__
from batchferry.domain.batcherrors import BatchErrorKind
from batchferry.domain.errors import InvariantBroken
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
from batchferry.providers import http
from batchferry.providers.openai import errors, wire
from batchferry.providers.openai.account import OpenAIAccount
from batchferry.providers.openai.classes import classify_batch_code
from batchferry.providers.openai.lines import read_line
from batchferry.providers.openai.synccall import SyncCaller
from batchferry.providers.retries import Call

_T = TypeVar("_T")

KEEP_ALIVE_S = 5.0
"""Idle connections are closed early, before the servers and balancers on the way do it."""


@dataclass(frozen=True, slots=True)
class _Miss:
    """A try that failed, with the server's ``x-should-retry``."""

    failure: CallFailed
    should_retry: bool | None = None


class _Answer(NamedTuple):
    """A whole 2xx answer."""

    status: int
    headers: httpx.Headers
    body: bytes


class OpenAIProvider:
    """One account; safe for concurrent use within one event loop. ``close`` it when done.

    Args:
        account: settings.
        clock: time and the pauses between tries.
        transport: stands in for the network, in tests.
        rng: source of the jitter.
    """

    def __init__(
        self,
        account: OpenAIAccount,
        clock: Clock,
        transport: httpx.AsyncBaseTransport | None = None,
        rng: Random | None = None,
    ) -> None:
        self.name = account.name
        self.account = account
        self._clock = clock
        self._rng = rng or Random()  # noqa: S311 (spreads retries, guards nothing)
        self._skew = http.SkewMeter()
        self._base = account.base_url.rstrip("/")
        self._headers = _account_headers(account)
        tls = httpx.create_ssl_context() if transport is None else True
        times = account.timeouts
        self._timeout = httpx.Timeout(
            connect=times.connect_s, read=times.read_s, write=times.write_s, pool=times.pool_s
        )
        self._download_timeout = httpx.Timeout(
            connect=times.connect_s, read=times.download_read_s, write=times.write_s, pool=times.pool_s
        )

        def client(connections: int, kept_alive: int) -> httpx.AsyncClient:
            return httpx.AsyncClient(
                transport=transport,
                verify=tls,
                timeout=self._timeout,
                limits=httpx.Limits(
                    max_connections=connections,
                    max_keepalive_connections=kept_alive,
                    keepalive_expiry=KEEP_ALIVE_S,
                ),
                headers={"user-agent": f"batchferry/{__version__}"},
                follow_redirects=False,
            )

        self._client = client(account.max_connections, account.max_connections)
        # A create on a kept-alive connection that the server has just closed would count as unanswered.
        self._create_client = client(account.max_connections, 0)
        self._sync_client = client(account.max_sync_connections, 0)
        self._sync = SyncCaller(
            client=self._sync_client,
            base_url=self._base,
            headers=self._headers,
            query=dict(account.query),
            max_answer_bytes=account.max_answer_bytes,
            is_watched=transport is None,
            now=clock.now,
            note=self._skew.note,
        )

    # ------------------------------------------------------------------------------------- the calls

    async def upload(
        self, source: UploadSource, file_name: str, expires_after_s: int | None
    ) -> UploadedFile | CallFailed:
        """Send the batch file, each try from its beginning; at most 1 MiB of it is in memory at a time.

        Args:
            source: the file; what ``chunks`` raises passes through.
            file_name: ``[A-Za-z0-9._-]`` and ``.jsonl`` at the end, which servers insist on.
            expires_after_s: life of the file (OpenAI: 3,600 to 2,592,000 s); None: no expiry.

        Raises:
            ValueError: a file name no server would take.
            InvariantBroken: the source gave another number of bytes than its size.
        """
        if not file_name.endswith(".jsonl") or not file_name.isascii() or set(file_name) & set('"\\/\r\n\0'):
            raise ValueError(f"file name {file_name!r} is not a plain ASCII name that ends in .jsonl")
        size_bytes = source.size_bytes
        if size_bytes > self.account.max_upload_bytes:
            return CallFailed(Call.UPLOAD, CallFailure.REJECTED, code="file_too_large", is_definite=True)
        fields = {"purpose": self.account.file_purpose}
        if expires_after_s is not None and self.account.send_file_expiry:
            fields |= {"expires_after[anchor]": "created_at", "expires_after[seconds]": str(expires_after_s)}
        form = _Form(fields, file_name, source, size_bytes)

        async def attempt() -> UploadedFile | _Miss:
            answer = await self._exchange(
                Call.UPLOAD,
                "POST",
                "/files",
                content=form.chunks(),
                headers={"content-type": form.content_type, "content-length": str(form.size_bytes)},
                total_s=self.account.timeouts.upload_s,
            )
            if isinstance(answer, _Miss):
                return answer
            try:
                uploaded, status = wire.read_file(wire.read_json(answer.body))
            except wire.NotOurShape:
                return _nonsense(Call.UPLOAD, answer, "unreadable_answer")
            if uploaded.size_bytes not in {0, size_bytes}:
                return _nonsense(Call.UPLOAD, answer, "size_mismatch")
            if status == "error":
                return _Miss(CallFailed(Call.UPLOAD, CallFailure.REJECTED, answer.status, "file_status_error"))
            return UploadedFile(uploaded.file_id, size_bytes, uploaded.expires_at)

        return await self._patiently(attempt)

    async def create(
        self, file_id: FileId, endpoint: str, completion_window: str, metadata: Mapping[str, str]
    ) -> BatchSnapshot | CallFailed:
        """Ask once for a batch. An outcome that is not clear is ``UNANSWERED``: look the batch up."""
        account = self.account
        wanted: dict[str, object] = {
            "input_file_id": file_id,
            "endpoint": endpoint,
            "completion_window": completion_window or account.completion_window,
        }
        if metadata and account.send_metadata:
            wanted["metadata"] = dict(metadata)
        if account.output_expires_after_s is not None:
            wanted["output_expires_after"] = {"anchor": "created_at", "seconds": account.output_expires_after_s}
        answer = await self._exchange(
            Call.CREATE,
            "POST",
            "/batches",
            content=msgspec.json.encode(wanted),
            headers={"content-type": "application/json"},
            total_s=account.timeouts.create_s,
            file_id=file_id,
        )
        if isinstance(answer, _Miss):
            return answer.failure
        batch = _read_batch(Call.CREATE, answer)
        return batch.failure if isinstance(batch, _Miss) else batch

    async def retrieve(self, provider_batch_id: ProviderBatchId) -> BatchSnapshot | CallFailed:
        """The batch as it is now."""
        return await self._batch_call(Call.RETRIEVE, "GET", f"/batches/{_path(provider_batch_id)}")

    async def cancel(self, provider_batch_id: ProviderBatchId) -> BatchSnapshot | CallFailed:
        """Ask for the end of a batch; ``CONFLICT`` when it has ended already. Asking twice is harmless."""
        return await self._batch_call(Call.CANCEL, "POST", f"/batches/{_path(provider_batch_id)}/cancel")

    async def list_batches(self, cursor: str | None = None) -> BatchPage | CallFailed:
        """A page of batches, newest first; ``cursor`` is the previous page's ``next_cursor``."""
        page_size = self.account.list_page_size
        params = {"limit": str(page_size)} | ({"after": cursor} if cursor else {})

        async def attempt() -> BatchPage | _Miss:
            answer = await self._exchange(Call.LIST, "GET", "/batches", params=params)
            if isinstance(answer, _Miss):
                return answer
            try:
                return wire.read_batch_page(wire.read_json(answer.body), cursor, page_size)
            except wire.NotOurShape:
                return _nonsense(Call.LIST, answer, "unreadable_answer")

        return await self._patiently(attempt)

    async def list_files(self, role: FileRole, cursor: str | None = None) -> FilePage | CallFailed:
        """A page of batch files, newest first; ``cursor`` is the previous page's ``next_cursor``.

        Parameters and answer: https://platform.openai.com/docs/api-reference/files/list
        """
        account = self.account
        purpose = account.file_purpose if role is FileRole.INPUT else account.output_purpose
        page_size = account.file_page_size
        params = {"purpose": purpose, "order": "desc", "limit": str(page_size)} | ({"after": cursor} if cursor else {})

        async def attempt() -> FilePage | _Miss:
            answer = await self._exchange(Call.LIST_FILES, "GET", "/files", params=params)
            if isinstance(answer, _Miss):
                return answer
            try:
                return wire.read_file_page(wire.read_json(answer.body), cursor, page_size, purpose)
            except wire.NotOurShape:
                return _nonsense(Call.LIST_FILES, answer, "unreadable_answer")

        return await self._patiently(attempt)

    async def download(self, file_id: FileId, to: Path) -> DownloadedFile | CallFailed:
        """Fetch a file's content to ``to`` (0600), each try from its beginning; ``to`` appears only when whole.

        Redirects are followed; another host gets neither the key nor any other header of the account.

        Raises:
            StoreUnavailable: the disk does not take it.
        """
        return await self._patiently(lambda: self._download_once(file_id, to))

    async def delete_file(self, file_id: FileId) -> CallFailed | None:
        """None when the file is gone. A 404 counts as gone unless it is the web page of some gateway."""

        async def attempt() -> CallFailed | _Miss | None:
            answer = await self._exchange(Call.DELETE, "DELETE", f"/files/{_path(file_id)}")
            if isinstance(answer, _Miss):
                return None if answer.failure.kind is CallFailure.NOT_FOUND else answer
            try:
                value = wire.read_json(answer.body) if answer.body else None
            except wire.NotOurShape:
                return None
            if isinstance(value, dict) and value.get("deleted") is False:
                return _nonsense(Call.DELETE, answer, "not_deleted")
            return None

        return await self._patiently(attempt)

    async def answer(self, endpoint: str, body: bytes, timeout_s: float) -> SyncAnswer:
        """Run one row now: sent once and unchanged, over a connection of its own.

        Args:
            endpoint: as in the row; what follows its version is put behind the base address.
            body: the request body.
            timeout_s: real seconds for the whole call, the wait for a connection included.
        """
        return await self._sync.call(endpoint, body, timeout_s)

    # --------------------------------------------------------------------------------------- the lines

    def render_line(self, url: str, body: bytes) -> bytes:
        """The request line behind its ``custom_id`` member, with the line feed.

        Raises:
            ValueError: the body holds a raw line break.
        """
        return wire.request_line(url, body)

    def line_head(self, wire_id: str) -> bytes:
        """What goes in front of a rendered line."""
        return wire.request_head(wire_id)

    def parse_line(self, line: bytes, endpoint: str) -> ResultLine | UnreadableLine:
        """Take one result line apart and judge its row; the body's bytes stay as they are."""
        return read_line(line, endpoint)

    def classify_batch_error(self, error: LineError) -> BatchErrorKind:
        """What one entry of a failed batch's error list is about."""
        return classify_batch_code(error.code, error.param, error.line)

    @property
    def clock_skew_s(self) -> float | None:
        """Provider's clock minus ours in seconds; None before the first answer."""
        return self._skew.skew_s

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()
        await self._create_client.aclose()
        await self._sync_client.aclose()

    # ----------------------------------------------------------------------------------------- inside

    async def _patiently(self, attempt: Callable[[], Awaitable[_T | _Miss]]) -> _T | CallFailed:
        """Try as often as the table says; pauses are slept on the service's clock."""
        began = self._clock.monotonic()
        tries = 0
        while True:
            outcome = await attempt()
            if not isinstance(outcome, _Miss):
                return outcome
            tries += 1
            pause_s = self.account.retries.pause_before_next(
                outcome.failure, tries, self._clock.monotonic() - began, outcome.should_retry, self._rng
            )
            if pause_s is None:
                return outcome.failure
            await self._clock.sleep(pause_s)

    async def _batch_call(self, call: Call, method: str, path: str) -> BatchSnapshot | CallFailed:
        async def attempt() -> BatchSnapshot | _Miss:
            answer = await self._exchange(call, method, path)
            return answer if isinstance(answer, _Miss) else _read_batch(call, answer)

        return await self._patiently(attempt)

    async def _exchange(
        self,
        call: Call,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        content: bytes | AsyncIterator[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        total_s: float | None = None,
        file_id: str | None = None,
    ) -> _Answer | _Miss:
        """One request and its whole answer, whatever becomes of it."""
        client = self._create_client if call is Call.CREATE else self._client
        request = client.build_request(
            method,
            self._base + path,
            params={**self.account.query, **(params or {})},
            content=content,
            headers={"accept": "application/json", **self._headers, **(headers or {})},
        )
        try:
            async with asyncio.timeout(total_s or self.account.timeouts.call_s):
                response = await client.send(request, stream=True)
                try:
                    self._skew.note(response.headers, self._clock.now())
                    body = await http.read_whole(response, self.account.max_answer_bytes)
                finally:
                    await response.aclose()
        except http.BREAKS as error:
            return _Miss(errors.broken(call, http.fault_of(error)))
        if response.is_success:
            return _Answer(response.status_code, response.headers, body)
        return self._refused(call, response, body, file_id)

    def _refused(self, call: Call, response: httpx.Response, body: bytes, file_id: str | None = None) -> _Miss:
        failure = errors.refused(call, response.status_code, response.headers, body, self._clock.now(), file_id)
        return _Miss(failure, http.should_retry(response.headers))

    async def _download_once(self, file_id: FileId, to: Path) -> DownloadedFile | _Miss:
        home = httpx.URL(f"{self._base}/files/{_path(file_id)}/content", params=dict(self.account.query))
        try:
            async with asyncio.timeout(self.account.timeouts.download_s):
                target = home
                for _ in range(http.MAX_REDIRECTS + 1):
                    request = self._client.build_request(
                        "GET",
                        target,
                        # A compressed answer would hide whether its length is the promised one.
                        headers={"accept": "*/*", "accept-encoding": "identity"}
                        | (self._headers if http.same_origin(target, home) else {}),
                        timeout=self._download_timeout,
                    )
                    response = await self._client.send(request, stream=True)
                    try:
                        self._skew.note(response.headers, self._clock.now())
                        if response.is_success:
                            return await http.save_body(response, to, self.account.max_download_bytes)
                        if not response.is_redirect:
                            body = await http.read_whole(response, self.account.max_answer_bytes)
                            return self._refused(Call.DOWNLOAD, response, body)
                        target = http.redirect_target(response)
                    finally:
                        await response.aclose()
                raise http.BadRedirect
        except http.BREAKS as error:
            return _Miss(errors.broken(Call.DOWNLOAD, http.fault_of(error)))


class _Form:
    """A multipart body of known length around a file that is streamed.

    httpx's own multipart takes blocking files only; ours asks the source for chunks and knows its size before.
    """

    def __init__(self, fields: Mapping[str, str], file_name: str, source: UploadSource, file_bytes: int) -> None:
        boundary = f"batchferry-{secrets.token_hex(16)}"
        head = "".join(
            f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
            for name, value in fields.items()
        )
        head += (
            f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{file_name}"\r\n'
            "Content-Type: application/jsonl\r\n\r\n"
        )
        self._head = head.encode()
        self._tail = f"\r\n--{boundary}--\r\n".encode()
        self._source = source
        self._file_bytes = file_bytes
        self.content_type = f"multipart/form-data; boundary={boundary}"
        self.size_bytes = len(self._head) + file_bytes + len(self._tail)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The whole body, from its beginning."""
        yield self._head
        sent = 0
        async for chunk in self._source.chunks():
            sent += len(chunk)
            if sent > self._file_bytes:
                break
            yield chunk
        if sent != self._file_bytes:
            raise InvariantBroken(f"an upload of {self._file_bytes} bytes gave {sent}")
        yield self._tail


def _account_headers(account: OpenAIAccount) -> dict[str, str]:
    headers = {"authorization": f"Bearer {account.api_key}"} if account.api_key else {}
    if account.organization:
        headers["openai-organization"] = account.organization
    if account.project:
        headers["openai-project"] = account.project
    return headers | {name.lower(): value for name, value in account.headers.items()}


def _path(provider_id: str) -> str:
    """An id as one path segment: some servers' ids hold slashes, or are whole base64 texts."""
    return quote(provider_id, safe="")


def _nonsense(call: Call, answer: _Answer, code: str) -> _Miss:
    return _Miss(errors.nonsense(call, answer.status, answer.headers, code), http.should_retry(answer.headers))


def _read_batch(call: Call, answer: _Answer) -> BatchSnapshot | _Miss:
    try:
        return wire.read_batch(wire.read_json(answer.body))
    except wire.NotOurShape:
        return _nonsense(call, answer, "unreadable_answer")
