"""What adapters share whose batches are made of files that were uploaded before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from batchferry.domain.errors import InvariantBroken
from batchferry.domain.provider import BatchSnapshot, CallFailed, CallFailure, UploadedFile
from batchferry.ports import UploadSource
from batchferry.providers.calls import Form, HttpCalls, Miss, nonsense_answer, read_answer
from batchferry.providers.retries import Call
from batchferry.providers.shapes import NotOurShape, read_json


class FileCalls(HttpCalls):
    """``HttpCalls`` for batches made of files."""

    is_inline = False

    async def create_inline(
        self,
        source: UploadSource,  # noqa: ARG002 (never called)
        endpoint: str,  # noqa: ARG002
        model: str,  # noqa: ARG002
    ) -> BatchSnapshot | CallFailed:
        """Batches are made of files here: this is never to be called.

        Raises:
            InvariantBroken: always.
        """
        raise InvariantBroken(f"account {self.name} makes batches of files, not inline")

    def check_request(self, endpoint: str, body: bytes) -> tuple[str, str] | None:  # noqa: ARG002 (the provider decides)
        """None: what a batch refuses is known from its answer only."""
        return None

    async def _send_form(
        self, path: str, form: Form, read: Callable[[Any], tuple[UploadedFile, str | None]]
    ) -> UploadedFile | Miss:
        """One try to upload a file as a form. ``read`` finds it in the answer, with its status."""
        answer = await self._exchange(
            Call.UPLOAD,
            "POST",
            path,
            content=form.chunks(),
            headers={"content-type": form.content_type, "content-length": str(form.size_bytes)},
            total_s=self._connection.timeouts.upload_s,
        )
        if isinstance(answer, Miss):
            return answer
        found = read_answer(Call.UPLOAD, answer, read)
        if isinstance(found, Miss):
            return found
        uploaded, status = found
        if uploaded.size_bytes not in {0, form.file_bytes}:
            return nonsense_answer(Call.UPLOAD, answer, "size_mismatch")
        if status == "error":
            return Miss(CallFailed(Call.UPLOAD, CallFailure.REJECTED, answer.status, "file_status_error"))
        return UploadedFile(uploaded.file_id, form.file_bytes, uploaded.expires_at)

    async def _delete(self, path: str) -> CallFailed | None:
        """None when the file is gone: also by a 404 of the server's own, but not by an answer that denies it."""

        async def attempt() -> Miss | None:
            answer = await self._exchange(Call.DELETE, "DELETE", path)
            if isinstance(answer, Miss):
                return None if answer.failure.kind is CallFailure.NOT_FOUND else answer
            try:
                value = read_json(answer.body) if answer.body else None
            except NotOurShape:
                return None
            if isinstance(value, dict) and value.get("deleted") is False:
                return nonsense_answer(Call.DELETE, answer, "not_deleted")
            return None

        return await self._patiently(attempt)


def check_form_name(file_name: str) -> None:
    """See that a file's name can stand in a form.

    Raises:
        ValueError: a file name no server would take.
    """
    if not file_name.endswith(".jsonl") or not file_name.isascii() or set(file_name) & set('"\\/\r\n\0'):
        raise ValueError(f"file name {file_name!r} is not a plain ASCII name that ends in .jsonl")
