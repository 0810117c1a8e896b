"""Landing: result files come to disk, each line finds its row, each row is settled or sent on its way again.

One reading of a batch goes like this:

1. Both files are fetched whole (a broken download starts from zero in the adapter).
2. First pass over both: lines are matched by wire id; successes go to their partition's settle queue at once.
   Places of failing lines are noted, as a later line may still be a success for the same row.
3. Second pass over the noted places: failures become outcomes, or rows for another submission, by the policy.
4. Rows that no line named are *expired* or *cancelled* if the batch ended so; after ``completed`` they are missing,
   but only when two complete readings some time apart agree.
5. Each partition's lot is DONE in the transaction that hands on its last rows.

Reading twice is harmless: a settled row is skipped when the transaction is built, and a failure counts only while
its lot still holds the row.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from types import MappingProxyType

from batchferry.config import AccountSettings, Settings
from batchferry.domain.batcherrors import BatchErrorKind
from batchferry.domain.envelope import EventKind
from batchferry.domain.errors import PartitionLost, StoreUnavailable
from batchferry.domain.estimate import estimated_price
from batchferry.domain.ids import BatchId, FileId, LedgerId
from batchferry.domain.ledger import UNCERTAIN, UNPRICED, UNREAD, Lane, Lot, LotTally
from batchferry.domain.machine import (
    Event,
    LandResults,
    ResultsIncomplete,
    ResultsNotOurs,
    ResultsRead,
    ResultsUnavailable,
)
from batchferry.domain.offsets import OffsetSet
from batchferry.domain.partition import PartitionLedger
from batchferry.domain.provider import BatchSnapshot, CallFailed, DownloadedFile, LineError, ProviderStatus, Usage
from batchferry.domain.reconcile import Reconciliation, Whose
from batchferry.domain.rows import ResultLine, RowClass, UnreadableLine
from batchferry.engine.admission import Admission
from batchferry.engine.failpoints import Failpoint, reach
from batchferry.engine.fates import (
    AT_ONCE_ROWS,
    CHUNK_BYTES,
    NOT_CUT,
    PACK_ROWS,
    PACK_TOKENS,
    RESCUE_WISH,
    Fates,
    Heirs,
    Onward,
    batches,
    lost_row,
    without_source,
)
from batchferry.engine.holds import INPUT_FAILURES, Holds
from batchferry.engine.outcomes import OutcomeWriter
from batchferry.engine.partition import PartitionTask
from batchferry.engine.routing import Router
from batchferry.engine.rowsource import RowSource
from batchferry.engine.slots import OrderedSlots
from batchferry.ports import BatchProvider, Clock, LocalStore, OutRecord, ResultArchive, Telemetry

READ_BYTES = 1024 * 1024
"""One read of a result file. Lines are split on ``\\n`` bytes only: a model's text may hold U+2028."""
MAX_LINE_BYTES = 64 * 1024 * 1024
"""Of a longer line only the beginning is kept: it counts as unreadable, and memory stays bounded."""
CHUNK_ROWS = 500
"""Answers (or ``CHUNK_BYTES`` of them) that wait in memory for the settle queue, one read more at most."""
MAX_LINKS = 128
"""A span links to at most so many requests."""
TOP_CODES = 5
"""An alarm names so many of the failures' codes, the most frequent ones."""
PROVIDER_ALARM_RATIO = 0.2
"""More rows than this share that the provider failed to run: an alarm, which holds nothing."""
BLAMES_INPUT = (RowClass.INVALID_REQUEST, RowClass.CONTENT_FILTERED, RowClass.TOO_LONG)
"""Failures that speak about what was asked."""
LOST_ANSWERS = (RowClass.MISSING, RowClass.UNREADABLE)
"""Rows that the provider ran and bills, for all we know, and whose answers nobody can read."""
BLAMES_PROVIDER = (RowClass.TRANSIENT, RowClass.UNREADABLE, RowClass.MISSING, RowClass.EXPIRED)

OwnLots = Mapping[int, tuple[PartitionTask, Lot]]


@dataclass(slots=True)
class BatchTally:
    """What the lines of one reading said, by partition and in all."""

    classes: dict[int, dict[str, int]] = field(default_factory=dict)
    usage: dict[int, Usage] = field(default_factory=dict)
    cost: dict[int, int] = field(default_factory=dict)
    sync_cost: dict[int, int] = field(default_factory=dict)
    unpriced: dict[int, int] = field(default_factory=dict)
    """Rows that ran and whose price is not known; the sums are of the others."""
    unread: dict[int, int] = field(default_factory=dict)
    """Rows whose answers are lost and whose tokens nobody knows: perhaps paid, and in no sum."""
    keep_files: set[int] = field(default_factory=set)
    """Partitions with an answer too large to publish: the provider's files are then kept."""
    retried: int = 0
    """Rows that did not succeed and travel again."""
    codes: Counter[str] = field(default_factory=Counter)
    """Codes of the rows that were refused for what they say."""

    def count(self, partition: int, row_class: RowClass, rows: int = 1) -> None:
        """Add rows of a class."""
        by_class = self.classes.setdefault(partition, {})
        by_class[row_class.value] = by_class.get(row_class.value, 0) + rows

    def add_rows(self, partition: int, rows: Sequence[tuple[Usage | None, int | None, int | None]]) -> None:
        """Add rows' tokens and prices in picodollars (paid, list); rows of unknown price are counted."""
        before = self.usage.get(partition, Usage())
        inputs, outputs, cached = before.input_tokens, before.output_tokens, before.cached_tokens
        cost, sync_cost = self.cost.get(partition, 0), self.sync_cost.get(partition, 0)
        for usage, paid, listed in rows:
            if usage is not None:
                inputs += usage.input_tokens
                outputs += usage.output_tokens
                cached += usage.cached_tokens
            if paid is None or listed is None:
                self.unpriced[partition] = self.unpriced.get(partition, 0) + 1
            else:
                cost += paid
                sync_cost += listed
        self.usage[partition] = Usage(inputs, outputs, cached)
        self.cost[partition] = cost
        self.sync_cost[partition] = sync_cost

    def of(self, partition: int) -> LotTally:
        """The tally of one lot."""
        extra: dict[str, object] = {"keep_files": True} if partition in self.keep_files else {}
        if unpriced := self.unpriced.get(partition):
            extra[UNPRICED] = unpriced
        if unread := self.unread.get(partition):
            extra[UNREAD] = unread
        return LotTally(
            dict(self.classes.get(partition, {})),
            self.usage.get(partition, Usage()),
            self.cost.get(partition, 0),
            self.sync_cost.get(partition, 0),
            extra,
        )

    def rows(self, *row_classes: RowClass) -> int:
        """Rows of these classes in all partitions."""
        return sum(by_class.get(one.value, 0) for by_class in self.classes.values() for one in row_classes)

    @property
    def all_rows(self) -> int:
        """Rows of every class in all partitions."""
        return sum(sum(by_class.values()) for by_class in self.classes.values())


@dataclass(slots=True)
class LandingMemory:
    """What a batch's earlier readings found; lost in a crash, which only costs another reading."""

    absent: dict[int, OffsetSet] = field(default_factory=dict)
    absent_since: float | None = None
    """Service-clock seconds of the first complete reading that found exactly these rows absent."""
    tally: BatchTally = field(default_factory=BatchTally)
    parents: list[bytes] = field(default_factory=list)
    """``traceparent`` of some of the requests, for the batch's span."""
    lost: dict[int, OffsetSet] = field(default_factory=dict)
    """Rows whose records the input topic has deleted, as far as that has been told."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a failing line stands: file number, byte position, length; or the class of a line that was not readable."""

    file: int
    position: int
    length: int


def results_gone_at(snapshot: BatchSnapshot, account: AccountSettings) -> datetime | None:
    """When the provider deletes the batch's results, counted from its creation; None where that is not known."""
    made = snapshot.created_at
    return None if made is None or account.results_kept_s is None else made + timedelta(seconds=account.results_kept_s)


class FileFacts:
    """What this process knows of files at the provider, for the account of what was sent, fetched and deleted."""

    def __init__(self, max_files: int = 10_000) -> None:
        self._known: OrderedDict[FileId, tuple[int, str]] = OrderedDict()
        self._max_files = max_files

    def note(self, file_id: FileId, size_bytes: int, sha256: str) -> None:
        """A file was sent or fetched."""
        self._known[file_id] = size_bytes, sha256
        while len(self._known) > self._max_files:
            self._known.popitem(last=False)

    def of(self, file_id: FileId) -> tuple[int | None, str | None]:
        """Its bytes and its SHA-256 in hexadecimal; None where another process had it."""
        return self._known.get(file_id, (None, None))


class Landing:
    """Reads results for the lots this process owns."""

    def __init__(
        self,
        settings: Settings,
        store: LocalStore,
        clock: Clock,
        telemetry: Telemetry,
        router: Router,
        source: RowSource,
        outcomes: OutcomeWriter,
        holds: Holds,
        fates: Fates,
        admission: Admission,
        files: FileFacts,
        archive: ResultArchive | None = None,
    ) -> None:
        self._files = files
        self._archive = archive
        self._settings = settings
        self._limits = settings.limits
        self._store = store
        self._clock = clock
        self._telemetry = telemetry
        self._router = router
        self._source = source
        self._outcomes = outcomes
        self._holds = holds
        self._fates = fates
        self._admission = admission
        self.on_answer: Callable[[int, int, ResultLine, str], None] | None = None
        """Told of the lines of our rows (partition, offset, line, endpoint) while somebody listens: a canary."""
        self.downloads = OrderedSlots(settings.limits.max_downloads)

    async def land(
        self,
        batch_id: BatchId,
        own: OwnLots,
        effect: LandResults,
        provider: BatchProvider,
        memory: LandingMemory,
        siblings: Mapping[int, Lot] = MappingProxyType({}),
        ledger_ids: Mapping[int, LedgerId] = MappingProxyType({}),
        *,
        is_uncertain: bool = False,
    ) -> Event:
        """One reading of the batch; see the module's text.

        Args:
            batch_id: ours.
            own: its lots in partitions of this process.
            effect: what was asked for.
            provider: of its account.
            memory: what earlier readings found.
            siblings: its lots in partitions of others.
            ledger_ids: of the siblings' ledgers, as far as they are known.
            is_uncertain: the provider's batch was only taken for ours (as a lot's ``UNCERTAIN`` says too): before a
                line of it is a row of ours, nothing of it is settled, kept or believed.
        """
        snapshot = effect.snapshot
        lots = {partition: pair for partition, pair in own.items() if pair[1].is_at_provider}
        if not lots:
            return ResultsRead()
        is_uncertain = is_uncertain or any(lot.extra.get(UNCERTAIN) for _, lot in lots.values())
        if is_uncertain and snapshot.status is ProviderStatus.FAILED:
            return ResultsNotOurs()  # nothing of it ran, and no line will ever tell
        if snapshot.status is ProviderStatus.FAILED:
            return await self._land_failed(batch_id, lots, snapshot, provider, memory)
        file_ids = [one for one in (snapshot.output_file_id, snapshot.error_file_id) if one is not None]
        counted = snapshot.counts.completed + snapshot.counts.failed
        if not file_ids and counted and not effect.is_last_chance:
            return ResultsIncomplete("no_file_ids")
        account = self._settings.accounts[next(iter(lots.values()))[1].key.account]
        gone_at = results_gone_at(snapshot, account)
        async with self.downloads.place(math.inf if gone_at is None else gone_at.timestamp()):
            paths: list[Path] = []
            fetched_files: list[tuple[Path, str, FileId, DownloadedFile]] = []
            try:
                for number, file_id in enumerate(file_ids):
                    path = self._store.download_path(batch_id, f"result{number}")
                    file_kind = "output" if file_id == snapshot.output_file_id else "error"
                    started = asyncio.get_running_loop().time()
                    fetched = await provider.download(file_id, path)
                    if isinstance(fetched, CallFailed):
                        if not effect.is_last_chance or fetched.kind.value != "not_found":
                            self._telemetry.event(
                                "batch_results_unavailable",
                                batch_id=batch_id,
                                file_kind=file_kind,
                                reason=fetched.kind.value,
                            )
                            return ResultsUnavailable(fetched)
                        if is_uncertain:
                            return ResultsNotOurs()  # whoever knew it for his own has read and deleted it
                        self._telemetry.event("result_file_gone", batch_id=batch_id, file_kind=file_kind)
                        continue
                    self._telemetry.event(
                        "batch_downloaded",
                        batch_id=batch_id,
                        file_kind=file_kind,
                        file_id=file_id,
                        bytes=fetched.size_bytes,
                        sha256=fetched.sha256,
                        duration_s=round(asyncio.get_running_loop().time() - started, 3),
                    )
                    paths.append(path)
                    self._files.note(file_id, fetched.size_bytes, fetched.sha256)
                    fetched_files.append((path, file_kind, file_id, fetched))
                reach(Failpoint.RESULTS_DOWNLOADED)
                join = _join(lots, siblings, ledger_ids)
                if is_uncertain and not await self._is_proven(join, lots, provider, paths):
                    has_told = join.lines or effect.is_last_chance
                    return ResultsNotOurs() if has_told else ResultsIncomplete("no_lines")
                for path, file_kind, file_id, fetched in fetched_files:
                    await self._keep(batch_id, path, file_kind, file_id, fetched)
                started_at = self._clock.now()
                join = _join(lots, siblings, ledger_ids)
                event = await self._read(batch_id, lots, effect, provider, memory, paths, counted, join)
                self._tell_span(batch_id, lots, snapshot, memory, started_at)
                return event
            finally:
                for path in paths:
                    path.unlink(missing_ok=True)

    async def _is_proven(
        self, join: Reconciliation, lots: OwnLots, provider: BatchProvider, paths: Sequence[Path]
    ) -> bool:
        """Whether a line is of a row of ours: usually the first one tells."""
        endpoint = next(iter(lots.values()))[1].key.endpoint
        for path in paths:
            async for places in read_lines(path):
                for _, line in places:
                    wire_id = provider.parse_line(line, endpoint).wire_id
                    if wire_id is not None:
                        join.match(wire_id)
                    if join.is_proven:
                        return True
        return False

    async def _keep(
        self, batch_id: BatchId, path: Path, file_kind: str, file_id: FileId, fetched: DownloadedFile
    ) -> None:
        """Copy a result file to the archive, if there is one.

        Raises:
            StoreUnavailable: it cannot be kept, and the batch is to wait until it can.
        """
        if self._archive is None:
            return
        kept = await self._archive.keep(path, batch_id, file_kind, self._clock.now(), sha256=fetched.sha256)
        if isinstance(kept, StoreUnavailable):
            when_full = self._settings.archive.when_full
            self._telemetry.event("archive_failed", batch_id=batch_id, file_kind=file_kind, waits=when_full == "wait")
            if when_full == "wait":
                raise kept
            return
        if kept.is_new:
            self._telemetry.event(
                "result_archived",
                batch_id=batch_id,
                file_kind=file_kind,
                file_id=file_id,
                bytes=fetched.size_bytes,
                sha256=fetched.sha256,
            )
        if kept.dropped:
            self._telemetry.event("archive_dropped", files=len(kept.dropped))

    def _tell_span(
        self, batch_id: BatchId, lots: OwnLots, snapshot: BatchSnapshot, memory: LandingMemory, started_at: datetime
    ) -> None:
        lot = next(iter(lots.values()))[1]
        succeeded = memory.tally.rows(RowClass.SUCCEEDED)
        self._telemetry.batch_span(
            "batch land",
            {
                "batch_id": batch_id,
                "provider_batch_id": snapshot.provider_batch_id,
                "account": lot.key.account,
                "endpoint": lot.key.endpoint,
                "model": lot.key.model,
                "rows": sum(own.own_rows for _, own in lots.values()),
                "status": snapshot.raw_status,
                "succeeded": succeeded,
                "failed": memory.tally.all_rows - succeeded,
                "started_at": started_at,
                "ended_at": self._clock.now(),
            },
        )

    # --------------------------------------------------------------------------------------------- reading

    async def _read(
        self,
        batch_id: BatchId,
        lots: OwnLots,
        effect: LandResults,
        provider: BatchProvider,
        memory: LandingMemory,
        paths: Sequence[Path],
        counted: int,
        join: Reconciliation,
    ) -> Event:
        for partition, (task, lot) in lots.items():
            gone = await self._source.index(partition, task.ledger.unsettled(lot.offsets))
            new = gone - memory.lost.get(partition, OffsetSet())
            if new:  # another reading of the same files finds the same rows
                memory.lost[partition] = gone
                self._telemetry.count("input_lost_records", len(new))
                self._telemetry.event("input_lost", partition=partition, rows=len(new))
        memory.tally = BatchTally()
        first = _FirstPass(batch_id, effect.snapshot, lots, join, memory)
        try:
            for number, path in enumerate(paths):
                await self._first_pass(first, provider, number, path)
            # A file that was cut short ends in a line that is only half there: its row may well have succeeded.
            is_short = (join.lines + first.unnamed < counted or first.is_cut) and not effect.is_last_chance
            again = await self._second_pass(first, provider, paths, believes_unreadable=not is_short)
            for task, _ in lots.values():
                if task.is_live:
                    await task.flush()
            incomplete = ""
            if is_short:
                incomplete = "fewer_lines_than_counted"
                self._telemetry.event(
                    "batch_incomplete", batch_id=batch_id, lines=join.lines + first.unnamed, counted=counted
                )
            reach(Failpoint.RESULTS_READ)
            absent = {partition: join.absent(partition) for partition in lots}
            absent = {partition: rows for partition, rows in absent.items() if rows}
            absent_class = self._class_of_absent(effect, memory, absent)
            if absent_class is None:
                incomplete = incomplete or "rows_absent"
            elif absent and not incomplete:
                await self._settle_absent(first, absent, absent_class, again)
        except PartitionLost:
            # One partition has moved on; the others are read again from the start, which skips what is settled.
            return ResultsIncomplete("partition_moved")
        finally:
            self._tell_lines(first)
        return await self._finish(first, again, incomplete)

    def _tell_lines(self, first: _FirstPass) -> None:
        """What the lines of one reading were. A file that is read again is counted again."""
        join, unreadable = first.join, first.unreadable
        matched = join.lines - join.again - join.siblings - join.foreign
        by_kind = {
            "matched": matched - unreadable[Whose.OURS],
            "duplicate": join.again - unreadable[Whose.AGAIN],
            "sibling": join.siblings - unreadable[Whose.SIBLING],
            "foreign": join.foreign - unreadable[Whose.FOREIGN],
            "unreadable": first.unnamed + unreadable.total(),
        }
        for kind, lines in by_kind.items():
            if lines:
                self._telemetry.count("result_lines", lines, kind=kind)

    def _class_of_absent(
        self, effect: LandResults, memory: LandingMemory, absent: Mapping[int, OffsetSet]
    ) -> RowClass | None:
        """The class of rows no line named; None: not yet, read again."""
        status = effect.snapshot.status
        if status is ProviderStatus.EXPIRED:
            return RowClass.EXPIRED
        if status is ProviderStatus.CANCELLED:
            return RowClass.CANCELLED
        if not absent or effect.is_last_chance:
            return RowClass.MISSING
        now_s = self._clock.monotonic()
        if memory.absent_since is None or memory.absent != absent:
            memory.absent = dict(absent)
            memory.absent_since = now_s
            return None
        return RowClass.MISSING if now_s - memory.absent_since >= self._limits.missing_confirm_s - 1.0 else None

    async def _first_pass(self, first: _FirstPass, provider: BatchProvider, number: int, path: Path) -> None:
        endpoint = first.endpoint
        chunk: dict[int, list[tuple[int, ResultLine]]] = {}
        rows = size_bytes = 0
        line_number = 0
        size_in_all = (await asyncio.to_thread(path.stat)).st_size
        async for places in read_lines(path):
            for position, line in places:
                line_number += 1
                parsed = provider.parse_line(line, endpoint)
                if isinstance(parsed, UnreadableLine):
                    first.is_cut = first.is_cut or position + len(line) >= size_in_all
                    self._note_unreadable(first, parsed, number, position, len(line), line_number)
                    continue
                match = first.join.match(parsed.wire_id)
                if match.whose is Whose.SIBLING:
                    continue
                if match.whose is Whose.FOREIGN or match.wire is None:
                    self._telemetry.event("line_foreign", batch_id=first.batch_id, line=line_number)
                    continue
                where = (match.wire.partition, match.wire.offset)
                if match.whose is Whose.AGAIN:
                    self._telemetry.event("line_duplicate", batch_id=first.batch_id, line=line_number)
                    if match.wire.offset in first.succeeded[match.wire.partition]:
                        continue
                if parsed.row_class is RowClass.SUCCEEDED:
                    first.succeeded[match.wire.partition].add(match.wire.offset)
                    first.failing.pop(where, None)
                    chunk.setdefault(match.wire.partition, []).append((match.wire.offset, parsed))
                    rows += 1
                    size_bytes += len(line)
                else:
                    first.failing[where] = _Place(number, position, len(line))
            if rows >= CHUNK_ROWS or size_bytes >= CHUNK_BYTES:
                await self._settle_successes(first, chunk)
                chunk, rows, size_bytes = {}, 0, 0
        if rows:
            await self._settle_successes(first, chunk)

    def _note_unreadable(
        self, first: _FirstPass, line: UnreadableLine, number: int, position: int, length: int, line_number: int
    ) -> None:
        self._telemetry.event("line_unreadable", batch_id=first.batch_id, line=line_number, reason=line.reason)
        if line.wire_id is None:
            first.unnamed += 1
            return
        match = first.join.match(line.wire_id)
        first.unreadable[match.whose] += 1
        if match.whose in {Whose.OURS, Whose.AGAIN} and match.wire is not None:
            where = (match.wire.partition, match.wire.offset)
            if match.wire.offset not in first.succeeded[match.wire.partition] and where not in first.failing:
                first.failing[where] = _Place(number, position, length)

    async def _settle_successes(self, first: _FirstPass, chunk: Mapping[int, list[tuple[int, ResultLine]]]) -> None:
        for partition, lines in chunk.items():
            task, lot = first.lots[partition]
            ledger = task.ledger
            first.tally.count(partition, RowClass.SUCCEEDED, len(lines))
            if self.on_answer is not None:
                for offset, line in lines:
                    self.on_answer(partition, offset, line, first.endpoint)
            if (raced := task.rescued.get(lot.lot_id)) is not None:
                late = OffsetSet(offset for offset, _ in lines if offset in raced and ledger.is_settled(offset))
                raced -= late  # another reading finds the same lines
                if late:
                    self._telemetry.count("waste_rows", len(late), lane="batch")
            unsettled = [pair for pair in lines if not ledger.is_settled(pair[0])]
            known = await self._store.get_rows(partition, [offset for offset, _ in unsettled]) if unsettled else {}
            priced = [(offset, line, self._outcomes.price(lot, line)) for offset, line in lines]
            first.tally.add_rows(partition, [(line.usage, price.batch, price.sync) for _, line, price in priced])
            answered = [
                (row, line, price) if row is not None else (lost_row(offset, lot), without_source(line), price)
                for offset, line, price in priced
                if not ledger.is_settled(offset)
                for row in (known.get(offset),)
            ]
            settlements = self._outcomes.results(task, lot, answered, first.snapshot, self._clock.now())
            results = self._settings.topics.results
            # The second question is for rows that an earlier reading has settled: of those only the line is left.
            if any(one.record.topic != results for one in settlements) or any(
                self._outcomes.is_too_large(line) for _, line in lines
            ):
                first.tally.keep_files.add(partition)
            for row, _, _ in answered:
                if row.headers and len(first.memory.parents) < MAX_LINKS:
                    first.memory.parents.extend(value for name, value in row.headers if name == "traceparent" and value)
            await task.settle(settlements)

    # ------------------------------------------------------------------------------------------ failing rows

    async def _second_pass(
        self, first: _FirstPass, provider: BatchProvider, paths: Sequence[Path], *, believes_unreadable: bool
    ) -> dict[int, Heirs]:
        """Turn failing lines into outcomes; returns, by partition, the rows that travel again."""
        again: dict[int, Heirs] = {}
        by_partition: dict[int, list[tuple[int, _Place]]] = {}
        for (partition, offset), place in first.failing.items():
            by_partition.setdefault(partition, []).append((offset, place))
        for partition, places in by_partition.items():
            places.sort()
            for some in batches(places, AT_ONCE_ROWS, lambda one: one[1].length):
                lines = await asyncio.to_thread(_read_places, paths, [place for _, place in some])
                failed: list[tuple[int, ResultLine]] = []
                for (offset, _), raw in zip(some, lines, strict=True):
                    parsed = provider.parse_line(raw, first.endpoint)
                    if isinstance(parsed, UnreadableLine):
                        if not believes_unreadable:
                            continue
                        parsed = ResultLine(
                            wire_id=parsed.wire_id or "",
                            row_class=RowClass.UNREADABLE,
                            code="unreadable_line",
                            message=parsed.reason,
                        )
                    failed.append((offset, parsed))
                await self._judge(first, partition, failed, again)
        return again

    async def _judge(
        self, first: _FirstPass, partition: int, failed: Sequence[tuple[int, ResultLine]], again: dict[int, Heirs]
    ) -> None:
        task, lot = first.lots[partition]
        wish = self._holds.cancel_wish(first.batch_id)
        for offset, line in failed:
            if self.on_answer is not None:
                self.on_answer(partition, offset, line, first.endpoint)
            first.tally.count(partition, line.row_class)
            if line.usage is not None:
                price = self._outcomes.price(lot, line)
                first.tally.add_rows(partition, [(line.usage, price.batch, price.sync)])
            if line.row_class in BLAMES_INPUT:
                first.tally.codes[line.code or line.row_class.value] += 1
        heirs = again.setdefault(partition, Heirs())
        wanted = None if wish is None else wish.rows
        if wanted is None and self._holds.rescue_wish(first.batch_id) is not None:
            wanted = RESCUE_WISH
        await self._fates.judge(task, lot, failed, first.snapshot, heirs, wish_rows=wanted)

    async def _settle_absent(
        self,
        first: _FirstPass,
        absent: Mapping[int, OffsetSet],
        row_class: RowClass,
        again: dict[int, Heirs],
    ) -> None:
        for partition, rows in absent.items():
            if row_class is RowClass.MISSING:
                self._telemetry.count("missing_rows", len(rows))
                self._telemetry.event("rows_missing", batch_id=first.batch_id, partition=partition, rows=len(rows))
            for some in batches(list(rows), AT_ONCE_ROWS):
                lines = [
                    (offset, ResultLine(wire_id="", row_class=row_class, code=f"row_{row_class.value}"))
                    for offset in some
                ]
                await self._judge(first, partition, lines, again)

    async def _finish(self, first: _FirstPass, again: Mapping[int, Heirs], incomplete: str) -> Event:
        if not incomplete:
            await self._mind_the_ratios(first)
            self._count_lost_answers(first)
        unfinished = ""
        for partition, (task, lot) in first.lots.items():
            try:
                await task.flush()
                tally = None if incomplete else first.tally.of(partition)
                await self._end_lot(task, lot, again.get(partition, Heirs()), first.snapshot, first.tally, tally)
            except PartitionLost:
                continue  # whoever has it now reads the files itself
            if tally is not None and task.ledger.lots.get(lot.lot_id, lot).is_at_provider:
                unfinished = "rows_left"
            elif tally is not None:  # the lot is DONE: that happens once
                self._telemetry.count("tokens", tally.usage.input_tokens, kind="input")
                self._telemetry.count("tokens", tally.usage.output_tokens, kind="output")
                self._telemetry.count("tokens", tally.usage.cached_tokens, kind="cached")
        wish = self._holds.cancel_wish(first.batch_id)
        if wish is not None and wish.rows == "hold" and any(again.values()):
            await self._holds.place_for_operator(first.key, "cancelled")
        if any(heirs.has(RowClass.ACCOUNT) for heirs in again.values()):
            await self._holds.place_account(first.key, "row_account_error")
        if first.tally.rows(RowClass.MODEL_UNAVAILABLE):
            await self._holds.place_key(first.key, "model_unavailable")
        if incomplete or unfinished:
            return ResultsIncomplete(incomplete or unfinished)
        return ResultsRead()

    async def _end_lot(
        self,
        task: PartitionTask,
        lot: Lot,
        heirs: Heirs,
        snapshot: BatchSnapshot,
        batch_tally: BatchTally,
        tally: LotTally | None,
        cut: Mapping[str, int] = NOT_CUT,
    ) -> None:
        """Hand on the rows that travel again and make the lot DONE, in one transaction."""

        def events(made: Sequence[Lot], is_done: bool) -> list[OutRecord]:
            records = self._fates.tell(task, lot, heirs, made, self._onward_record)
            batch_tally.retried += sum(len(heir.offsets) for heir in made)
            if is_done and tally is not None:
                records.append(self._outcomes.landed_event(task, lot, snapshot, tally, self._clock.now()))
            return records

        def plan(ledger: PartitionLedger) -> list[Lot]:
            return self._fates.heirs(task, lot, heirs, ledger, cut)

        await task.finish_lot(lot.lot_id, plan, tally, events)

    def _onward_record(self, lot: Lot, heir: Lot, classes: Mapping[str, int]) -> OutRecord:
        return self._outcomes.onward_event(lot, heir, classes, EventKind.RETRIED, "landed")

    def _count_lost_answers(self, first: _FirstPass) -> None:
        """Book the tokens of rows whose answers are lost: what the provider counted beyond the lines that were read.

        Only who reads every line of the batch can tell; otherwise, and where the provider counts nothing, the rows
        are told as such.
        """
        tally = first.tally
        lost = {p: rows for p in first.lots if (rows := sum(tally.classes.get(p, {}).get(c, 0) for c in LOST_ANSWERS))}
        if not lost:
            return
        rows = sum(lost.values())
        lot = first.lots[min(first.lots)][1]
        counted = first.snapshot.usage
        read = [tally.usage.get(partition, Usage()) for partition in first.lots]
        inputs = (counted.input_tokens if counted else 0) - sum(one.input_tokens for one in read)
        outputs = (counted.output_tokens if counted else 0) - sum(one.output_tokens for one in read)
        if counted is None or set(lot.partitions) != set(first.lots) or min(inputs, outputs) < 0:
            tally.unread = lost
            return
        prices = self._settings.accounts[lot.key.account].price_list
        when = lot.submitted_at or lot.created_at
        left = rows
        for partition, some in lost.items():
            mine = Usage(inputs * some // left, outputs * some // left)
            inputs, outputs, left = inputs - mine.input_tokens, outputs - mine.output_tokens, left - some
            paid, listed = (
                estimated_price(
                    prices, lot.key.model, mine.input_tokens, mine.output_tokens, some, when, batch=is_batch
                )
                for is_batch in (True, False)
            )
            tally.add_rows(partition, [(mine, paid or 0, listed or 0)])
            if paid is None or listed is None:
                tally.unpriced[partition] = tally.unpriced.get(partition, 0) + some

    async def _mind_the_ratios(self, first: _FirstPass) -> None:
        """Many refusals of what was asked hold the key, so that nothing more is spent on it; many faults only alarm."""
        tally = first.tally
        rows = sum(lot.own_rows for _, lot in first.lots.values())
        routed = self._router.for_key(first.key)
        if routed is None or not rows:
            return
        route = routed.route
        refused, faults = tally.rows(*BLAMES_INPUT), tally.rows(*BLAMES_PROVIDER)
        if refused >= route.alarm_min_rows and refused > rows * route.alarm_ratio:
            codes = dict(tally.codes.most_common(TOP_CODES))
            await self._holds.place_for_operator(first.key, INPUT_FAILURES)
            await self._holds.alarm(INPUT_FAILURES, first.batch_id, first.key, rows=refused, codes=codes)
        if faults >= route.alarm_min_rows and faults > rows * PROVIDER_ALARM_RATIO:
            classes = {one.value: count for one in BLAMES_PROVIDER if (count := tally.rows(one))}
            await self._holds.alarm("provider_failures", first.batch_id, first.key, rows=faults, codes=classes)

    async def fail_row(self, task: PartitionTask, lot: Lot, line: int, failure: CallFailed) -> None:
        """A create was refused for the sake of this 1-based line: its row fails, if it is of this lot.

        Raises:
            KafkaUnavailable, StoreUnavailable: its words cannot be had now.
        """
        offset = lot.offset_of_line(line)
        if offset is None:
            return
        with contextlib.suppress(PartitionLost):
            await self._source.index(task.partition, OffsetSet([offset]))
            said = ResultLine(
                "",
                RowClass.INVALID_REQUEST,
                failure.http_status,
                failure.request_id,
                None,
                failure.code,
                failure.message,
            )
            await self._fates.judge(task, lot, [(offset, said)], None, Heirs())
            await task.flush()

    # ------------------------------------------------------------------------------------------ failed batches

    async def _land_failed(
        self, batch_id: BatchId, lots: OwnLots, snapshot: BatchSnapshot, provider: BatchProvider, memory: LandingMemory
    ) -> Event:
        """The provider refused the file as a whole: nothing ran. Named rows fail, all others go again."""
        tally = memory.tally = BatchTally()
        key, rows = next(iter(lots.values()))[1].key, next(iter(lots.values()))[1].rows
        kinds = {error: provider.classify_batch_error(error) for error in snapshot.errors}
        self._telemetry.event(
            "batch_failed_whole",
            batch_id=batch_id,
            provider_batch_id=snapshot.provider_batch_id,
            codes=sorted({error.code for error in snapshot.errors}),
            lines=sum(1 for error in snapshot.errors if error.line is not None),
            rows=sum(lot.own_rows for _, lot in lots.values()),
        )
        cut: dict[str, int] = {}
        named: dict[int, list[tuple[int, LineError]]] = {}
        has_row_errors = False
        for error, kind in kinds.items():
            if kind is not BatchErrorKind.ROW or error.line is None:
                continue
            for partition, (_, lot) in lots.items():
                # A line beyond the file names no row: the same file again would be refused again.
                has_row_errors = has_row_errors or 1 <= error.line <= lot.rows
                offset = lot.offset_of_line(error.line)
                if offset is not None:
                    named.setdefault(partition, []).append((offset, error))
        delay_s: float | None = 0.0
        seen = set(kinds.values())
        if BatchErrorKind.ACCOUNT in seen:
            await self._holds.place_account(key, "account")
        elif BatchErrorKind.TOKEN_LIMIT in seen:
            await self._holds.place_key(key, "token_limit_exceeded")
            # The same rows at once may be too many for ever: half as many travel next, and half again after that.
            cut[PACK_TOKENS] = await self._admission.refused(batch_id, key, next(iter(lots.values()))[1].tokens)
        elif BatchErrorKind.TOO_LARGE in seen and not has_row_errors and rows > 1:
            cut[PACK_ROWS] = rows // 2
        elif BatchErrorKind.MODEL in seen and not has_row_errors:
            await self._holds.place_key(key, "model_unavailable")
        elif not has_row_errors and BatchErrorKind.FILE_MISSING not in seen:
            # No detail that we understand: never fail all rows for it; an operator should look.
            await self._holds.place_key(key, "batch_failed_without_details")
            await self._holds.alarm("batch_failed_without_details", batch_id, key)
        elif not has_row_errors:
            delay_s = None  # the file has vanished: the route's pause, lest uploads follow one another without end
        first = _FirstPass(
            batch_id, snapshot, lots, Reconciliation({p: lot for p, (_, lot) in lots.items()}, {}), memory
        )
        again: dict[int, Heirs] = {}
        try:
            for partition, (task, lot) in lots.items():
                await self._source.index(partition, task.ledger.unsettled(lot.offsets))
                failing = dict(named.get(partition, []))
                lines = [
                    (offset, ResultLine("", RowClass.INVALID_REQUEST, code=error.code, message=error.message))
                    for offset, error in failing.items()
                ]
                for some in batches(lines, AT_ONCE_ROWS):
                    await self._judge(first, partition, some, again)
                rest = task.ledger.held_by(lot.lot_id) - OffsetSet(failing)
                if rest:
                    wait_s = self._fates.policy(key).backoff_s if delay_s is None else delay_s
                    heirs = again.setdefault(partition, Heirs())
                    heirs.add_all(Onward(Lane.BATCH, wait_s), RowClass.BATCH_FAILED, rest, lot.due)
                    tally.count(partition, RowClass.BATCH_FAILED, len(rest))
                await task.flush()
        except PartitionLost:
            return ResultsIncomplete("partition_moved")
        for partition, (task, lot) in lots.items():
            with contextlib.suppress(PartitionLost):
                heirs = again.get(partition, Heirs())
                await self._end_lot(task, lot, heirs, snapshot, tally, tally.of(partition), cut)
        return ResultsRead()


class _FirstPass:
    """What the reading of one batch keeps in memory: never more than ids and places."""

    def __init__(
        self, batch_id: BatchId, snapshot: BatchSnapshot, lots: OwnLots, join: Reconciliation, memory: LandingMemory
    ) -> None:
        self.batch_id = batch_id
        self.snapshot = snapshot
        self.lots = lots
        self.join = join
        self.memory = memory
        self.tally = memory.tally
        self.key = next(iter(lots.values()))[1].key
        self.endpoint = self.key.endpoint
        self.succeeded = {partition: OffsetSet() for partition in lots}
        self.failing: dict[tuple[int, int], _Place] = {}
        self.unnamed = 0
        """Unreadable lines in which not even a wire id could be seen."""
        self.unreadable: Counter[Whose] = Counter()
        """The other unreadable lines, by whose they are."""
        self.is_cut = False
        """A file ends in the middle of a line: its lines may be as many as were counted, and one is not whole."""


def _join(lots: OwnLots, siblings: Mapping[int, Lot], ledger_ids: Mapping[int, LedgerId]) -> Reconciliation:
    own_ids = {partition: task.ledger_id for partition, (task, _) in lots.items()}
    return Reconciliation({partition: lot for partition, (_, lot) in lots.items()}, {**ledger_ids, **own_ids}, siblings)


async def read_lines(path: Path) -> AsyncIterator[Sequence[tuple[int, bytes]]]:
    """(byte position, line without its newline) of a file, about 1 MiB at a time; blank lines are left out."""
    lines = _lines_of(path)
    while chunk := await asyncio.to_thread(next, lines, None):
        yield chunk


def _lines_of(path: Path) -> Iterator[list[tuple[int, bytes]]]:
    with path.open("rb") as file:
        position = 0
        while True:
            lines = []
            size_bytes = 0
            while size_bytes < READ_BYTES and (line := file.readline(MAX_LINE_BYTES)):
                if line.strip():
                    lines.append((position + size_bytes, line[:-1] if line.endswith(b"\n") else line))
                size_bytes += len(line)
                while not line.endswith(b"\n") and (more := file.readline(MAX_LINE_BYTES)):
                    size_bytes += len(more)  # the rest of an endless line is passed over
                    line = more
            if not size_bytes:
                return
            position += size_bytes
            if lines:
                yield lines


def _read_places(paths: Sequence[Path], places: Sequence[_Place]) -> list[bytes]:
    lines = []
    files = [path.open("rb") for path in paths]
    try:
        for place in places:
            files[place.file].seek(place.position)
            lines.append(files[place.file].read(place.length))
    finally:
        for file in files:
            file.close()
    return lines
