"""One row at the model's own address, which is made of the row's ``model``."""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchferry.domain.provider import CallFailed, CallFailure
from batchferry.domain.rows import ResultLine, RowClass, SyncAnswer
from batchferry.providers.calls import path_segment
from batchferry.providers.gemini.lines import judge_answer
from batchferry.providers.gemini.wire import model_path, take_model
from batchferry.providers.retries import Call
from batchferry.providers.synccall import SyncCaller

NO_MODEL = "missing_model"
"""Our code for a row that names no model: there is no address to send it to."""


def judge(status: int, request_id: str | None, body: bytes, endpoint: str) -> ResultLine:
    """Judge a whole answer; every endpoint here has the same shape."""
    del endpoint
    return judge_answer(status, request_id, body)


@dataclass(frozen=True, slots=True)
class GenerateCaller:
    """Makes the calls of one account."""

    caller: SyncCaller

    async def call(self, body: bytes, timeout_s: float) -> SyncAnswer:
        """As ``BatchProvider.answer`` says."""
        try:
            request, model = take_model(body)
        except ValueError:
            request, model = body, ""
        if not model:
            failure = CallFailed(Call.ANSWER, CallFailure.REJECTED, code=NO_MODEL, is_definite=True)
            return SyncAnswer(ResultLine("", RowClass.INVALID_REQUEST, code=NO_MODEL), failure)
        answer = await self.caller.call(generate_path(model), request, timeout_s)
        hint_s = answer.failure.retry_after_s if answer.failure is not None else None
        if hint_s is None or answer.hints.retry_after_s is not None:
            return answer
        # There are no headers about the pace here: a refusal's details say when to come back.
        return replace(answer, hints=replace(answer.hints, retry_after_s=hint_s))


def generate_path(model: str) -> str:
    """Where rows of this model are answered, behind the API's version."""
    return f"/{'/'.join(map(path_segment, model_path(model).split('/')))}:generateContent"
