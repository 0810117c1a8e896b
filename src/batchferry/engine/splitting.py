"""Rows that are too long become several requests of their own, written to the input topic by the row's partition."""

from __future__ import annotations

import functools
from datetime import datetime

from batchferry.config import Settings
from batchferry.domain.batchkey import BatchKey
from batchferry.domain.context import context_tokens
from batchferry.domain.requests import BadRecord, RequestRules, parse_request
from batchferry.domain.splitting import NotSplit, Splitter, load_splitter, make_parts, source_of
from batchferry.domain.times import from_ms, to_ms
from batchferry.engine.routing import Router
from batchferry.ports import IndexRow, OutRecord, Record, Telemetry

ROOM_SHARE = 0.7
"""A part may fill so much of the model's context: the rest is for the answer and for what the estimate misses."""


class RowSplitter:
    """Cuts rows by the splitter of their route."""

    def __init__(self, settings: Settings, router: Router, rules: RequestRules, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._settings = settings
        self._router = router
        self._rules = rules

    def parts(self, record: Record, row: IndexRow, key: BatchKey, now: datetime) -> list[OutRecord] | None:
        """The parts as records for the input topic, in the row's own partition; None when it cannot be cut.

        Their age begins ``now``: what the row has waited, perhaps in a hold, does not count against them.
        """
        routed = self._router.for_key(key)
        request = parse_request(record.value, record.headers, self._rules)
        if routed is None or isinstance(request, BadRecord):
            return None
        route = routed.route
        known = route.context_tokens or context_tokens(self._settings.accounts[key.account].provider, key.model)
        most = request.tokens // 2 if known is None else min(round(known * ROOM_SHARE), request.tokens * 2 // 3)
        made = make_parts(
            request,
            source=source_of(record.topic, record.partition, record.offset),
            deadline=from_ms(row.deadline_ms),
            splitter=_splitter(route.splitter),
            max_tokens=max(1, most),
            max_depth=route.max_split_depth,
            rules=self._rules,
        )
        if isinstance(made, NotSplit):
            self._telemetry.event("row_not_split", partition=record.partition, offset=record.offset, reason=made.value)
            return None
        return [
            OutRecord(record.topic, record.key, part.value, part.headers, record.partition, to_ms(now)) for part in made
        ]


@functools.lru_cache(maxsize=16)
def _splitter(name: str) -> Splitter:
    return load_splitter(name)
