"""The calls of an OpenAI-shaped account, as ``ports.BatchProvider``.

What sets its servers apart stands in the account's dialect. Connections, repeats and deadlines stand in
``providers.calls``.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec

from batchferry.domain.batcherrors import BatchErrorKind
from batchferry.domain.dialect import UploadWay
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
from batchferry.providers import failures, http
from batchferry.providers.calls import Form, Miss, exactly, nonsense_answer, path_segment, read_answer
from batchferry.providers.filecalls import FileCalls, check_form_name
from batchferry.providers.openai import errors, wire
from batchferry.providers.openai.account import OpenAIAccount
from batchferry.providers.openai.classes import classify_batch_code
from batchferry.providers.openai.lines import judge_answer, read_line
from batchferry.providers.openai.synccall import LaneCaller
from batchferry.providers.retries import Call
from batchferry.providers.shapes import NotOurShape, read_json
from batchferry.providers.synccall import SyncCaller

_LINK, _OUTPUT, _ERROR = "link", "output", "error"


class OpenAIProvider(FileCalls):
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
        super().__init__(account, _account_headers(account), clock, errors.refused, transport, rng)
        self.account = account
        self._dialect = account.dialect
        caller = SyncCaller(
            client=self._sync_client,
            base_url=(account.dialect.sync_base_url or self._base).rstrip("/"),
            headers=self._headers,
            query=dict(account.query),
            max_answer_bytes=account.max_answer_bytes,
            is_watched=transport is None,
            now=clock.now,
            note=self._skew.note,
            refuse=errors.refused,
            judge=judge_answer,
        )
        self._sync = LaneCaller(caller, account.dialect)

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
        check_form_name(file_name)
        size_bytes = source.size_bytes
        if size_bytes > self.account.max_upload_bytes:
            return CallFailed(Call.UPLOAD, CallFailure.REJECTED, code="file_too_large", is_definite=True)
        fields = {"purpose": self.account.file_purpose}
        fields |= self._dialect.upload_fields
        if self._dialect.upload_way is UploadWay.SIGNED_ADDRESS:
            fields |= {"file_name": file_name, "file_type": "jsonl", "checksum": await _sha256(source)}
            return await self._patiently(lambda: self._upload_by_address(Form(fields), source))
        if expires_after_s is not None and self.account.send_file_expiry:
            life_s = max(expires_after_s, self._dialect.min_file_expiry_s)
            fields |= {"expires_after[anchor]": "created_at", "expires_after[seconds]": str(life_s)}
        form = Form(fields, file_name, source)
        return await self._patiently(lambda: self._send_form(self._dialect.files_path, form, wire.read_file))

    async def create(
        self,
        file_id: FileId,
        endpoint: str,
        completion_window: str,
        metadata: Mapping[str, str],
        model: str = "",  # noqa: ARG002 (the model stands in each row)
    ) -> BatchSnapshot | CallFailed:
        """Ask once for a batch. An outcome that is not clear is ``UNANSWERED``: look the batch up."""
        account = self.account
        wanted: dict[str, object] = {
            "input_file_id": file_id,
            "endpoint": self._dialect.endpoint(endpoint),
            "completion_window": completion_window or account.completion_window,
        }
        if metadata and account.send_metadata:
            wanted["metadata"] = dict(metadata)
        if account.output_expires_after_s is not None:
            wanted["output_expires_after"] = {"anchor": "created_at", "seconds": account.output_expires_after_s}
        wanted |= self._dialect.create_members
        answer = await self._exchange(
            Call.CREATE,
            "POST",
            self._dialect.batches_path,
            content=msgspec.json.encode(wanted),
            headers={"content-type": "application/json"},
            total_s=account.timeouts.create_s,
            file_id=file_id,
        )
        if isinstance(answer, Miss):
            return answer.failure
        batch = read_answer(Call.CREATE, answer, _read_batch)
        return batch.failure if isinstance(batch, Miss) else batch

    async def retrieve(self, provider_batch_id: ProviderBatchId) -> BatchSnapshot | CallFailed:
        """The batch as it is now."""
        return await self._ask(Call.RETRIEVE, "GET", self._batch_path(provider_batch_id), _read_batch)

    async def cancel(self, provider_batch_id: ProviderBatchId) -> BatchSnapshot | CallFailed:
        """Ask for the end of a batch; ``CONFLICT`` when it has ended already. Asking twice is harmless."""
        return await self._ask(Call.CANCEL, "POST", f"{self._batch_path(provider_batch_id)}/cancel", _read_batch)

    async def list_batches(self, cursor: str | None = None) -> BatchPage | CallFailed:
        """A page of batches, newest first; ``cursor`` is the previous page's ``next_cursor``."""
        page_size = self.account.list_page_size
        params = {"limit": str(page_size)} | ({self._dialect.cursor_param: cursor} if cursor else {})

        def read(value: Any) -> BatchPage:
            page = wire.read_batch_page(value, cursor, page_size)
            return replace(page, batches=tuple(map(_hide_links, page.batches)))

        return await self._ask(Call.LIST, "GET", self._dialect.batches_path, read, params)

    async def list_files(self, role: FileRole, cursor: str | None = None) -> FilePage | CallFailed:
        """A page of batch files, newest first; ``cursor`` is the previous page's ``next_cursor``.

        Parameters and answer: https://platform.openai.com/docs/api-reference/files/list
        """
        account = self.account
        purpose = account.file_purpose if role is FileRole.INPUT else account.output_purpose
        page_size = account.file_page_size
        params = {"purpose": purpose, "order": "desc", "limit": str(page_size)}
        params |= {self._dialect.cursor_param: cursor} if cursor else {}
        return await self._ask(
            Call.LIST_FILES,
            "GET",
            self._dialect.files_path,
            lambda value: wire.read_file_page(value, cursor, page_size, purpose),
            params,
        )

    async def download(self, file_id: FileId, to: Path) -> DownloadedFile | CallFailed:
        """Fetch a file's content to ``to`` (0600), each try from its beginning; ``to`` appears only when whole.

        Redirects are followed; another host gets neither the key nor any other header of the account. Where a server
        names an address in place of a file id, every try first asks the batch for a fresh one: such addresses expire.

        Raises:
            StoreUnavailable: the disk does not take it.
        """
        return await self._patiently(lambda: self._fetch(file_id, to))

    async def delete_file(self, file_id: FileId) -> CallFailed | None:
        """None when the file is gone. A 404 counts as gone unless it is the web page of some gateway.

        Results behind an address of their own have no file that could be deleted: they go when the server says so.
        """
        if _link_of(file_id) is not None:
            return None
        return await self._delete(self._file_path(file_id))

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
        """The request line behind its ``custom_id`` member, with the line feed; the endpoint by the server's name.

        Raises:
            ValueError: the body holds a raw line break.
        """
        return wire.request_line(self._dialect.endpoint(url), body)

    def line_head(self, wire_id: str) -> bytes:
        """What goes in front of a rendered line."""
        return wire.request_head(wire_id)

    def parse_line(self, line: bytes, endpoint: str) -> ResultLine | UnreadableLine:
        """Take one result line apart and judge its row; the body's bytes stay as they are."""
        return read_line(line, endpoint)

    def classify_batch_error(self, error: LineError) -> BatchErrorKind:
        """What one entry of a failed batch's error list is about."""
        return classify_batch_code(error.code, error.param, error.line, error.message)

    # ----------------------------------------------------------------------------------------- inside

    def _refused(self, call: Call, response: httpx.Response, body: bytes, file_id: str | None = None) -> Miss:
        miss = super()._refused(call, response, body, file_id)
        failure = miss.failure
        if call is Call.CREATE and failure.kind is CallFailure.THROTTLED and self._dialect.unsure_throttles:
            failure = replace(failure, kind=CallFailure.UNANSWERED, is_definite=False)
        if call is Call.CANCEL and response.status_code in self._dialect.cancel_conflicts:
            failure = replace(failure, kind=CallFailure.CONFLICT)
        return replace(miss, failure=failure)

    def _file_path(self, file_id: str) -> str:
        return f"{self._dialect.files_path}/{path_segment(file_id)}"

    def _batch_path(self, batch_id: str) -> str:
        return f"{self._dialect.batches_path}/{path_segment(batch_id)}"

    async def _upload_by_address(self, form: Form, source: UploadSource) -> UploadedFile | Miss:
        """One try of ``UploadWay.SIGNED_ADDRESS``.

        The server knows contents by their checksum: a file that an earlier try has brought is answered by 409 and its
        id. It is never somebody else's file, since the rows' ids in it are ours.
        """
        upload_s = self.account.timeouts.upload_s
        announced = await self._exchange(
            Call.UPLOAD,
            "POST",
            self._dialect.files_path,
            content=form.chunks(),
            headers={"content-type": form.content_type, "content-length": str(form.size_bytes)},
            takes=frozenset({302, 409}),
        )
        if isinstance(announced, Miss):
            return announced
        if announced.status == 409:
            file_id = wire.known_file(announced.body)
            if file_id is None:
                return nonsense_answer(Call.UPLOAD, announced, "conflict_without_file")
            return UploadedFile(file_id, source.size_bytes)
        file_id, address = wire.announced_file(announced.headers)
        if file_id is None or address is None:
            return nonsense_answer(Call.UPLOAD, announced, "no_upload_address")
        try:
            async with asyncio.timeout(upload_s):
                refusal = await self._put(address, source)
        except http.BREAKS as error:
            return Miss(failures.broken(Call.UPLOAD, http.fault_of(error)))
        if refusal is not None:
            return refusal
        done = await self._exchange(
            Call.UPLOAD, "POST", f"{self._file_path(file_id)}/preprocess", content=b"", total_s=upload_s
        )
        return done if isinstance(done, Miss) else UploadedFile(file_id, source.size_bytes)

    async def _put(self, address: httpx.URL, source: UploadSource) -> Miss | None:
        """Put the bytes at a signed address, without any header of the account."""
        home = httpx.URL(self._base)
        if home.scheme == "https" and address.scheme != "https":
            raise http.BadRedirect
        for _ in range(http.MAX_REDIRECTS + 1):
            request = self._client.build_request(
                "PUT",
                address,
                content=exactly(source, source.size_bytes),
                headers={"content-length": str(source.size_bytes)},
            )
            response = await self._client.send(request, stream=True)
            try:
                if response.is_success:
                    return None
                if not response.is_redirect:
                    # The storage's refusal says nothing about our account: the next try gets a new address.
                    failure = CallFailed(
                        Call.UPLOAD, CallFailure.UNAVAILABLE, response.status_code, code="upload_address_refused"
                    )
                    return Miss(failure)
                address = http.redirect_target(response)
            finally:
                await response.aclose()
        raise http.BadRedirect

    async def _fetch(self, file_id: FileId, to: Path) -> DownloadedFile | Miss:
        link = _link_of(file_id)
        fresh = None if link is None else await self._fresh_link(link)
        if isinstance(fresh, Miss):
            return fresh
        return await self._download_once(f"{self._file_path(file_id)}/content", to, address=fresh)

    async def _fresh_link(self, link: tuple[str, str]) -> httpx.URL | Miss:
        """The address under which a batch's result file lies now."""
        role, batch_id = link
        answer = await self._exchange(Call.DOWNLOAD, "GET", self._batch_path(batch_id))
        if isinstance(answer, Miss):
            return answer
        try:
            batch = wire.read_batch(read_json(answer.body))
            address = httpx.URL((batch.output_file_id if role == _OUTPUT else batch.error_file_id) or "")
        except (NotOurShape, httpx.InvalidURL):
            return nonsense_answer(Call.DOWNLOAD, answer, "unreadable_answer")
        if not address.host or address.scheme not in {"https", httpx.URL(self._base).scheme}:
            return nonsense_answer(Call.DOWNLOAD, answer, "bad_redirect")
        return address


async def _sha256(source: UploadSource) -> str:
    sha = hashlib.sha256()
    async for chunk in exactly(source, source.size_bytes):
        sha.update(chunk)
    return sha.hexdigest()


def _account_headers(account: OpenAIAccount) -> dict[str, str]:
    dialect = account.dialect
    key = f"Bearer {account.api_key}" if dialect.is_bearer else account.api_key
    headers = {dialect.key_header.lower(): key} if account.api_key else {}
    if account.organization:
        headers["openai-organization"] = account.organization
    if account.project:
        headers["openai-project"] = account.project
    return headers | {name.lower(): value for name, value in account.headers.items()}


def _read_batch(value: Any) -> BatchSnapshot:
    return _hide_links(wire.read_batch(value))


def _hide_links(batch: BatchSnapshot) -> BatchSnapshot:
    """Put an id of ours in place of an address that stands where a file id belongs.

    Whoever has such an address can read the answers, and file ids are logged; it also expires, which ours does not.
    """

    def shown(file_id: FileId | None, role: str) -> FileId | None:
        is_link = file_id is not None and file_id.startswith(("https://", "http://"))
        return FileId(f"{_LINK}:{role}:{batch.provider_batch_id}") if is_link else file_id

    output, error = shown(batch.output_file_id, _OUTPUT), shown(batch.error_file_id, _ERROR)
    if (output, error) == (batch.output_file_id, batch.error_file_id):
        return batch
    return replace(batch, output_file_id=output, error_file_id=error)


def _link_of(file_id: str) -> tuple[str, str] | None:
    """Role and batch of an id that ``_hide_links`` has made; None for any other."""
    kind, _, rest = file_id.partition(":")
    role, _, batch_id = rest.partition(":")
    return (role, batch_id) if kind == _LINK and role in {_OUTPUT, _ERROR} and batch_id else None
