"""The way of a fresh row: an open batch as a rule, or the sync lane, a canary's desk, a batch of its own, an end.

Runs for the few rows that are not plain: those that ask for the sync lane, are late or too old when first read, are
giants, or belong to a route that looks at every row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import datetime

from batchferry.config import CanarySettings, Settings
from batchferry.domain.batchkey import BatchKey
from batchferry.domain.context import is_surely_too_long
from batchferry.domain.requests import BadRecord, check_max_tokens
from batchferry.domain.retry import Policy
from batchferry.domain.rows import ResultLine, RowClass
from batchferry.domain.shapes import fingerprint, prefix
from batchferry.engine.canary import CanaryDesk
from batchferry.engine.outcomes import OutcomeWriter
from batchferry.engine.partition import PartitionTask, Settlement
from batchferry.engine.routing import Routed, Router
from batchferry.engine.rowsource import Accepted
from batchferry.engine.splitting import RowSplitter
from batchferry.engine.synclane import SyncLane
from batchferry.ports import BatchProvider, Clock, Record, Telemetry

LONG_SLICE = "~long"
"""Behind the slice of rows that travel in batches of their own because they are giants."""
PREFIX_SLICE = "~prefix-"
"""Behind the slice of rows that share a long system prompt, before its fingerprint."""
PREFIX_FROM_ROWS = 100
"""A prompt gets batches of its own once so many rows have shared it."""
MAX_PREFIXES = 10_000
"""Prompts that are counted; beyond that the count begins anew."""


class Ways:
    """Chooses; one a process."""

    def __init__(
        self,
        settings: Settings,
        providers: Mapping[str, BatchProvider],
        clock: Clock,
        telemetry: Telemetry,
        outcomes: OutcomeWriter,
        lane: SyncLane,
        desk: CanaryDesk,
        router: Router,
        splitter: RowSplitter,
    ) -> None:
        self._settings = settings
        self._providers = providers
        self._clock = clock
        self._telemetry = telemetry
        self._outcomes = outcomes
        self._lane = lane
        self._desk = desk
        self._router = router
        self._splitter = splitter
        self._prefixes: Counter[str] = Counter()

    def choose(
        self, task: PartitionTask, record: Record, accepted: Accepted, size_bytes: int, now: datetime
    ) -> BatchKey | Settlement | None:
        """The key under which the row waits for its batch, its end, or None when it goes another way.

        ``size_bytes`` are those it takes in a batch file.
        """
        row, request, routed, _ = accepted
        route, key = routed.route, routed.key
        now_ms = now.timestamp() * 1000
        if row.t0_ms + routed.max_age_ms < now_ms:
            age_h = (now_ms - row.t0_ms) / 3_600_000
            return self._end(
                task,
                record,
                accepted,
                RowClass.MAX_AGE,
                f"the request is {age_h:.1f} h old",
                "send it again if an answer is still wanted, or raise routes.<name>.max_age_s",
                now,
            )
        if route.missing_max_tokens != "allow" and (bad := check_max_tokens(request)) is not None:
            if route.missing_max_tokens == "fail":
                return self._refuse(task, record, bad, now)
            self._telemetry.count("missing_max_tokens")
        if (
            routed.context_tokens is not None
            and is_surely_too_long(
                request.tokens, len(request.body), routed.context_tokens, body=request.body, inputs=request.inputs
            )
            and (end := self._too_long(task, record, accepted, now)) is not None
        ):
            return end
        shape = "" if route.canary is None else fingerprint(request.body, key.model)
        if route.canary is not None and self._desk.is_barred(key, shape):
            self._wait_for_verdict(task, accepted, route.canary, shape, size_bytes)
            return None
        if (request.priority_now or route.lane == "sync") and self._lane.is_on(key):
            reason = "priority" if request.priority_now else "lane"
            self._lane.offer(task, key, row.offset, row.deadline_ms, reason)
            return None
        if row.deadline_ms < now_ms + routed.late_ms and not self._is_skewed(key):
            if route.late == "fail":
                return self._end(
                    task,
                    record,
                    accepted,
                    RowClass.LATE,
                    "no batch that leaves now could end before the deadline",
                    "send requests earlier, give them a longer SLA, or set routes.<name>.late to sync or batch",
                    now,
                )
            self._telemetry.count("late_rows", policy=route.late)
            if route.late == "sync" and self._lane.reserve(key):
                self._lane.offer(task, key, row.offset, row.deadline_ms, "late")
                return None
        elif request.priority_now:
            self._telemetry.count("late_rows", policy="no_lane")
        long_row = route.long_row
        if long_row is not None and request.tokens > long_row.over_tokens:
            if long_row.lane == "sync" and self._lane.is_on(key):
                self._lane.offer(task, key, row.offset, row.deadline_ms, "long")
                return None
            return key._replace(slice=key.slice + LONG_SLICE)
        if route.canary is not None and self._wait_for_verdict(task, accepted, route.canary, shape, size_bytes):
            return None
        return self._grouped(routed, accepted) if route.group_prefixes else key

    def _wait_for_verdict(
        self, task: PartitionTask, accepted: Accepted, canary: CanarySettings, shape: str, size_bytes: int
    ) -> bool:
        row, request, routed, ship_by_ms = accepted
        return self._desk.takes(
            task,
            routed.key,
            routed.route.name,
            canary,
            shape,
            row.offset,
            deadline_ms=row.deadline_ms,
            ship_by_ms=ship_by_ms,
            tokens=request.tokens,
            size_bytes=size_bytes,
        )

    def _grouped(self, routed: Routed, accepted: Accepted) -> BatchKey:
        shared = prefix(accepted.request.body)
        if shared is None:
            return routed.key
        if len(self._prefixes) >= MAX_PREFIXES and shared not in self._prefixes:
            self._prefixes.clear()
        self._prefixes[shared] += 1
        if self._prefixes[shared] < PREFIX_FROM_ROWS:
            return routed.key
        return routed.key._replace(slice=f"{routed.key.slice}{PREFIX_SLICE}{shared}")

    def _is_skewed(self, key: BatchKey) -> bool:
        """Whether our clock and the provider's differ so much that no lateness can be judged."""
        skew_s = self._providers[key.account].clock_skew_s
        return skew_s is not None and abs(skew_s) > self._settings.limits.max_clock_skew_s

    def _too_long(self, task: PartitionTask, record: Record, accepted: Accepted, now: datetime) -> Settlement | None:
        """The end of a row that no model of its kind could take; None when it is to be sent all the same."""
        routed = accepted.routed
        policy = routed.route.policies.get(RowClass.TOO_LONG, Policy.FAIL)
        if policy is Policy.SYNC:
            return None  # a larger model may take it, once the provider has said so
        if policy is Policy.SPLIT:
            parts = self._splitter.parts(record, accepted.row, routed.key, now)
            if parts is not None:
                self._telemetry.count("rows_split")
                line = ResultLine("", RowClass.TOO_LONG, code="longer_than_context")
                return self._outcomes.split(task, None, accepted.row, line, parts, None, now)
        return self._end(
            task,
            record,
            accepted,
            RowClass.TOO_LONG,
            f"about {accepted.request.tokens} tokens, and {routed.key.model} takes {routed.context_tokens}",
            "shorten or split the request, or set routes.<name>.context_tokens if the model takes more",
            now,
            for_review=policy is Policy.REVIEW,
        )

    def _end(
        self,
        task: PartitionTask,
        record: Record,
        accepted: Accepted,
        row_class: RowClass,
        message: str,
        remedy: str,
        now: datetime,
        *,
        for_review: bool = False,
    ) -> Settlement:
        where = f"{record.topic}-{record.partition}@{record.offset}"
        return self._outcomes.given_up(
            task,
            accepted.row,
            row_class,
            f"{where}: {message}",
            self._outcomes.quote(record),
            now,
            remedy=remedy,
            for_review=for_review,
        )

    def _refuse(self, task: PartitionTask, record: Record, bad: BadRecord, now: datetime) -> Settlement:
        self._telemetry.event("record_refused", partition=record.partition, offset=record.offset, rule=str(bad.rule))
        self._telemetry.count("bad_records", rule=str(bad.rule))
        return self._outcomes.bad_record(task, record, bad, now)
