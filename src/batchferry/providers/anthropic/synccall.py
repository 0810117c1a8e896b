"""One row at ``/v1/messages``: the shared caller, with Anthropic's words for refusals, ends and the pace."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

import httpx

from batchferry.domain.rows import ResultLine
from batchferry.providers.anthropic import errors
from batchferry.providers.anthropic.account import AnthropicAccount
from batchferry.providers.anthropic.lines import judge_answer
from batchferry.providers.synccall import SyncCaller


def _judge(status: int, request_id: str | None, body: bytes, endpoint: str) -> ResultLine:
    """Judge a whole answer; there is one endpoint."""
    del endpoint
    return judge_answer(status, request_id, body)


def sync_caller(
    account: AnthropicAccount,
    client: httpx.AsyncClient,
    headers: dict[str, str],
    now: Callable[[], datetime],
    note: Callable[[httpx.Headers, datetime], None],
    *,
    is_watched: bool,
) -> SyncCaller:
    """The caller of one account."""
    return SyncCaller(
        client=client,
        base_url=f"{account.root_url}/v1",
        headers=headers,
        query=dict(account.query),
        max_answer_bytes=account.max_answer_bytes,
        is_watched=is_watched,
        now=now,
        note=note,
        refuse=errors.refused,
        judge=_judge,
        pace_hints=errors.pace_hints,
        request_id=errors.request_id,
    )
