"""The calls of an Anthropic account over httpx, as ``ports.BatchProvider``.

Every call answers with a value: what was asked for, or a ``CallFailed``. Repeats follow the one table in
``providers.retries``. A create carries all rows and is sent once, over a connection of its own; nothing on the server
names it, so a lost reply cannot be asked for again: it is looked up by time and number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random

import httpx

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
from batchferry.providers.anthropic import errors, wire
from batchferry.providers.anthropic.account import AnthropicAccount
from batchferry.providers.anthropic.classes import classify_batch_error
from batchferry.providers.anthropic.lines import read_line
from batchferry.providers.anthropic.params import check_params
from batchferry.providers.anthropic.synccall import sync_caller
from batchferry.providers.calls import HttpCalls, Miss, path_segment, read_answer
from batchferry.providers.retries import Call

BATCHES = "/v1/messages/batches"


class AnthropicProvider(HttpCalls):
    """One account; safe for concurrent use within one event loop. ``close`` it when done.

    Args:
        account: settings.
        clock: time and the pauses between tries.
        transport: stands in for the network, in tests.
        rng: source of the jitter.
    """

    is_inline = True

    def __init__(
        self,
        account: AnthropicAccount,
        clock: Clock,
        transport: httpx.AsyncBaseTransport | None = None,
        rng: Random | None = None,
    ) -> None:
        super().__init__(account, _account_headers(account), clock, errors.refused, transport, rng)
        self.account = account
        self._base = account.root_url
        self._sync = sync_caller(
            account, self._sync_client, self._headers, clock.now, self._skew.note, is_watched=transport is None
        )

    # ------------------------------------------------------------------------------------- the calls

    async def upload(
        self,
        source: UploadSource,  # noqa: ARG002 (never called)
        file_name: str,  # noqa: ARG002
        expires_after_s: int | None,  # noqa: ARG002
    ) -> UploadedFile | CallFailed:
        """Batches are made of their rows here: this is never to be called.

        Raises:
            InvariantBroken: always.
        """
        raise InvariantBroken(f"account {self.name} makes batches inline, not of files")

    async def create(
        self,
        file_id: FileId,  # noqa: ARG002 (never called)
        endpoint: str,  # noqa: ARG002
        completion_window: str,  # noqa: ARG002
        metadata: Mapping[str, str],  # noqa: ARG002
        model: str = "",  # noqa: ARG002
    ) -> BatchSnapshot | CallFailed:
        """Batches are made of their rows here: this is never to be called.

        Raises:
            InvariantBroken: always.
        """
        raise InvariantBroken(f"account {self.name} makes batches inline, not of files")

    async def create_inline(
        self,
        source: UploadSource,
        endpoint: str,  # noqa: ARG002 (there is one endpoint)
        model: str,  # noqa: ARG002 (the model stands in each row)
    ) -> BatchSnapshot | CallFailed:
        """Ask once for a batch of these rows; at most one chunk of the source is in memory at a time.

        An outcome that is not clear is ``UNANSWERED``: look the batch up. A call that broke before its last byte had
        gone out is clear: nothing was created. A refusal may name a ``row`` (0-based).

        Args:
            source: the rows; what ``chunks`` raises passes through, and nothing is created then.
            endpoint: not sent.
            model: not sent.

        Raises:
            InvariantBroken: there are no rows, or not as many bytes as the source says.
        """
        if source.size_bytes < 1:
            raise InvariantBroken("an inline batch without rows")
        body = wire.InlineBody(source)
        if body.size_bytes > self.account.max_upload_bytes:
            return CallFailed(Call.CREATE, CallFailure.REJECTED, code="request_too_large", is_definite=True)
        answer = await self._exchange(
            Call.CREATE,
            "POST",
            BATCHES,
            content=body.chunks(),
            headers={"content-type": "application/json", "content-length": str(body.size_bytes)},
            total_s=self.account.timeouts.create_s,
        )
        if isinstance(answer, Miss):
            return _create_failure(answer.failure, body)
        batch = read_answer(Call.CREATE, answer, wire.read_batch)
        return batch.failure if isinstance(batch, Miss) else batch

    async def retrieve(self, provider_batch_id: ProviderBatchId) -> BatchSnapshot | CallFailed:
        """The batch as it is now. ``NOT_FOUND`` comes and goes for minutes after a create, and means nothing then."""
        return await self._ask(Call.RETRIEVE, "GET", f"{BATCHES}/{path_segment(provider_batch_id)}", wire.read_batch)

    async def cancel(self, provider_batch_id: ProviderBatchId) -> BatchSnapshot | CallFailed:
        """Ask for the end of a batch. Asking twice, or when it has ended, is harmless."""
        return await self._ask(
            Call.CANCEL, "POST", f"{BATCHES}/{path_segment(provider_batch_id)}/cancel", wire.read_batch
        )

    async def list_batches(self, cursor: str | None = None) -> BatchPage | CallFailed:
        """A page of batches, newest first; ``cursor`` is the previous page's ``next_cursor``."""
        page_size = self.account.list_page_size
        params = {"limit": str(page_size)} | ({"after_id": cursor} if cursor else {})
        return await self._ask(
            Call.LIST, "GET", BATCHES, lambda value: wire.read_batch_page(value, cursor, page_size), params
        )

    async def list_files(
        self,
        role: FileRole,  # noqa: ARG002
        cursor: str | None = None,  # noqa: ARG002
    ) -> FilePage | CallFailed:
        """An empty page: rows and results are parts of a batch here, no files."""
        return FilePage(())

    async def download(self, file_id: FileId, to: Path) -> DownloadedFile | CallFailed:
        """Fetch a batch's results to ``to`` (0600), each try from the beginning; ``to`` appears only when whole.

        The address is made of the account's own and the batch's id: the one that the batch names could lead the key
        to another host. For the same reason no redirect is followed to another origin.

        Raises:
            StoreUnavailable: the disk does not take it.
            InvariantBroken: no id of results.
        """
        path = f"{BATCHES}/{path_segment(wire.batch_of_results(file_id))}/results"
        return await self._patiently(lambda: self._download_once(path, to, stays_home=True))

    async def delete_file(self, file_id: FileId) -> CallFailed | None:
        """Delete a batch with its results: None when it is gone. A 404 of the provider's own counts as gone.

        Raises:
            InvariantBroken: no id of results.
        """
        batch_id = wire.batch_of_results(file_id)

        async def attempt() -> CallFailed | Miss | None:
            answer = await self._exchange(Call.DELETE, "DELETE", f"{BATCHES}/{path_segment(batch_id)}")
            if isinstance(answer, Miss):
                return None if answer.failure.kind is CallFailure.NOT_FOUND else answer
            return None

        return await self._patiently(attempt)

    async def answer(self, endpoint: str, body: bytes, timeout_s: float) -> SyncAnswer:
        """Run one row now: sent once and unchanged, over a connection of its own.

        Args:
            endpoint: ``/v1/messages``.
            body: the request body.
            timeout_s: real seconds for the whole call, the wait for a connection included.
        """
        return await self._sync.call(endpoint, body, timeout_s)

    # --------------------------------------------------------------------------------------- the lines

    def check_request(self, endpoint: str, body: bytes) -> tuple[str, str] | None:  # noqa: ARG002 (one endpoint)
        """The first parameter that a batch of the account's API version refuses, and why; None: none."""
        return check_params(body, self.account.version)

    def render_line(self, url: str, body: bytes) -> bytes:  # noqa: ARG002 (a row of a batch names no address)
        """The request behind its ``custom_id`` member, with the line feed.

        Raises:
            ValueError: the body holds a raw line break.
        """
        return wire.request_line(body)

    def line_head(self, wire_id: str) -> bytes:
        """What goes in front of a rendered line."""
        return wire.request_head(wire_id)

    def parse_line(self, line: bytes, endpoint: str) -> ResultLine | UnreadableLine:  # noqa: ARG002 (one endpoint)
        """Take one result line apart and judge its row; the body's bytes stay as they are."""
        return read_line(line)

    def classify_batch_error(self, error: LineError) -> BatchErrorKind:
        """What one entry of a failed batch's error list is about; batches do not fail as a whole here."""
        return classify_batch_error(error)


def _account_headers(account: AnthropicAccount) -> dict[str, str]:
    headers = {"anthropic-version": account.version}
    if account.api_key:
        is_bearer = account.key_header == "authorization"
        headers[account.key_header] = f"Bearer {account.api_key}" if is_bearer else account.api_key
    if account.betas:
        headers["anthropic-beta"] = ",".join(account.betas)
    if account.workspace:
        headers["anthropic-workspace-id"] = account.workspace
    return headers | {name.lower(): value for name, value in account.headers.items()}


def _create_failure(failure: CallFailed, body: wire.InlineBody) -> CallFailed:
    if not body.is_whole and not failure.is_definite:
        return replace(failure, kind=CallFailure.UNAVAILABLE, is_definite=True)
    if failure.row is not None and failure.row >= body.rows:
        return replace(failure, row=None)  # nothing of ours has that number
    return failure
