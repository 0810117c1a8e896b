"""One row at Mistral's ordinary endpoint: the shared caller, with Mistral's words for refusals and ends."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

import httpx

from batchferry.providers.mistral.account import MistralAccount
from batchferry.providers.mistral.errors import refused
from batchferry.providers.mistral.lines import judge_answer
from batchferry.providers.synccall import SyncCaller


def sync_caller(
    account: MistralAccount,
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
        base_url=account.base_url,
        headers=headers,
        query=dict(account.query),
        max_answer_bytes=account.max_answer_bytes,
        is_watched=is_watched,
        now=now,
        note=note,
        refuse=refused,
        judge=judge_answer,
    )
