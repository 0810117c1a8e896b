"""What lies at the provider under our name without any ledger record naming it, and what is to be done about it.

A batch may outlive every record of it: a create that was sent, forgotten and carried out late, or a second batch
that a gateway made of one create. A file may too, when its process died between the upload and the first record.

Deciding needs the provider's lists *first* and the ledgers, read to their end, *afterwards*: a lot is recorded before
its batch is asked for, so whatever the list shows and the later ledgers do not name has been given up. A batch id is
never used again after that, so the verdict is final; it is acted upon only when a later pass confirms it.

=================  ================================================================================================
a batch            what is done
=================  ================================================================================================
not ours           nothing: no ledger id of ours in its metadata or in the name of its input file
other ledger       nothing: named as we name ours, after a ledger that is not ours (another environment's)
contradictory      nothing: metadata and file name speak of two batches
known              nothing: a lot records this very batch
resolving          nothing: a lot of it waits or is being submitted; its owner looks the batch up by itself
unrecorded         nothing: its lots are over and none says which of the provider's batches was theirs
too old            nothing: sealed before the horizon, beyond which the ledgers have forgotten
orphan, twin       no lot at all, or a lot that records another batch of the provider: cancelled while it runs;
                   once it has ended its files are deleted and the rows it ran are counted
=================  ================================================================================================

An input file of ours that neither a lot nor a listed batch has is deleted once no upload under way can be its cause.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from batchferry.domain.ids import (
    BatchId,
    FileId,
    LedgerId,
    ProviderBatchId,
    batch_id_time,
    parse_batch_file_name,
    parse_batch_id,
)
from batchferry.domain.ledger import Lane, Lot, LotState
from batchferry.domain.partition import PartitionLedger
from batchferry.domain.provider import BatchSnapshot, ListedFile, ProviderStatus

HORIZON_S = 7 * 86_400.0
"""Nothing sealed longer ago is judged: a clean lot's stub stays in its ledger so long, and is forgotten then."""
HORIZON_SLACK_S = 3600.0
"""Judging ends so much before the forgetting begins: clocks differ, and a sweep takes its time."""
FILE_AGE_S = 2 * 3600.0
"""An upload may last half an hour and be tried again; a file this old is in no hand any more unless a lot says so."""


class Why(StrEnum):
    """What a batch or file turned out to be."""

    FOREIGN = "foreign"
    OTHER_LEDGER = "other_ledger"
    CONTRADICTORY = "contradictory"
    KNOWN = "known"
    RESOLVING = "resolving"
    UNRECORDED = "unrecorded"
    TOO_OLD = "too_old"
    TOO_YOUNG = "too_young"
    """A file that may still be on its way into a batch, or that does not say when it was made."""
    ORPHAN = "orphan"
    """A batch, or a file, without any lot."""
    TWIN = "twin"
    """A second batch, or file, of a batch id whose lots record another one."""


class Act(StrEnum):
    """What is to be done about it."""

    NONE = "none"
    CANCEL = "cancel"
    WAIT = "wait"
    """It is being cancelled; its end is waited for."""
    COLLECT = "collect"
    """The batch has ended: its files are deleted, the rows it ran are counted."""
    DELETE = "delete"
    """The input file is deleted."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One listed batch, or one listed input file of ours."""

    account: str
    why: Why
    act: Act = Act.NONE
    batch_id: BatchId | None = None
    provider_batch_id: ProviderBatchId | None = None
    file_id: FileId | None = None
    """The input file, where the finding is one."""
    status: str = ""
    files: tuple[FileId, ...] = ()
    """What ``COLLECT`` deletes, the result files first: while one is left, the batch is not collected."""
    waste_rows: int = 0
    """Rows ``COLLECT`` counts: the provider ran them, and they ran, or will run, in another batch as well."""
    size_bytes: int = 0

    @property
    def key(self) -> str:
        """Names what was found across passes."""
        return f"{self.account}/{self.provider_batch_id or self.file_id}"

    @property
    def is_suspect(self) -> bool:
        """Whether something is to be done about it, now or later."""
        return self.act is not Act.NONE


@dataclass(frozen=True, slots=True)
class Listing:
    """What one account showed. ``input_files``, ``output_files`` None: the file list could not be had."""

    account: str
    batches: Sequence[BatchSnapshot] = ()
    input_files: Sequence[ListedFile] | None = ()
    output_files: Sequence[ListedFile] | None = ()
    keeps_files: bool = False
    """The operator wants the provider's files kept: none is deleted."""


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What all ledger partitions together say. Must have been read after the lists."""

    ledger_ids: Collection[LedgerId]
    lots: Mapping[BatchId, Sequence[Lot]]
    batches: Collection[ProviderBatchId]
    """The provider's batches that lots record as theirs."""
    told_twins: Collection[ProviderBatchId]
    """Second batches that lots record: their rows have been counted by who found them."""
    input_files: Collection[FileId]

    @classmethod
    def of(cls, ledgers: Iterable[PartitionLedger]) -> Knowledge:
        """Put together what these partitions say."""
        ledger_ids: set[LedgerId] = set()
        lots: dict[BatchId, list[Lot]] = {}
        batches: set[ProviderBatchId] = set()
        told_twins: set[ProviderBatchId] = set()
        input_files: set[FileId] = set()
        for ledger in ledgers:
            if ledger.header is not None:
                ledger_ids.add(ledger.header.ledger_id)
            for lot in ledger.lots.values():
                if lot.lane is not Lane.BATCH:
                    continue
                lots.setdefault(BatchId(lot.lot_id), []).append(lot)
                batches.update(lot.provider_batch_ids[:1])
                told_twins.update(lot.provider_batch_ids[1:])
                if lot.input_file_id is not None:
                    input_files.add(lot.input_file_id)
        return cls(ledger_ids, lots, batches, told_twins, input_files)


def judge(listing: Listing, knowledge: Knowledge, now: datetime) -> list[Finding]:
    """What each listed batch is, and each listed input file that is named as ours are.

    Pure: nothing of what is found may be acted upon before a later pass has found it again (see ``due``).
    """
    names = {file.file_id: file.name for file in listing.input_files or ()}
    verdicts = [(batch, _judge_batch(batch, names, knowledge, now)) for batch in listing.batches]
    strays = [batch for batch, (why, _) in verdicts if why in {Why.ORPHAN, Why.TWIN}]
    kept_files = set(knowledge.input_files)
    for batch, (why, _) in verdicts:
        if why not in {Why.ORPHAN, Why.TWIN}:
            kept_files.update(_files_of(batch))
    findings = [
        _batch_finding(listing, batch, why, batch_id, kept_files, knowledge)
        for batch, (why, batch_id) in verdicts
    ]  # fmt: skip
    strays_files = {file_id for batch in strays for file_id in _files_of(batch)}
    findings += [
        finding
        for file in listing.input_files or ()
        if file.file_id not in strays_files and (finding := _file_finding(listing, file, kept_files, knowledge, now))
    ]
    return findings


def _judge_batch(
    batch: BatchSnapshot, names: Mapping[FileId, str], knowledge: Knowledge, now: datetime
) -> tuple[Why, BatchId | None]:
    told_ledgers: set[str] = set()
    told_batches: set[str] = set()
    if "batch_id" in batch.metadata:
        told_batches.add(batch.metadata["batch_id"])
    if "ledger_id" in batch.metadata:
        told_ledgers.add(batch.metadata["ledger_id"])
    named = parse_batch_file_name(names.get(batch.input_file_id, "")) if batch.input_file_id is not None else None
    if named is not None:
        told_ledgers.add(named[0])
        told_batches.add(named[1])
    batch_ids = {parse_batch_id(text) for text in told_batches}
    batch_id = next(iter(batch_ids)) if len(batch_ids) == 1 else None
    if batch.provider_batch_id in knowledge.batches:
        return Why.KNOWN, batch_id
    if not told_batches or batch_ids == {None}:
        return Why.FOREIGN, None
    if not told_ledgers.issubset(knowledge.ledger_ids):
        return Why.OTHER_LEDGER, batch_id
    if batch_id is None:
        return Why.CONTRADICTORY, None
    lots = knowledge.lots.get(batch_id, ())
    if not lots and not told_ledgers:
        return Why.FOREIGN, batch_id  # some batch id, but nothing ties it to a ledger of ours
    if _is_too_old(batch_id, now):
        return Why.TOO_OLD, batch_id
    if not lots:
        return Why.ORPHAN, batch_id
    if any(lot.state in {LotState.WAITING, LotState.SUBMITTING} for lot in lots):
        return Why.RESOLVING, batch_id
    if not any(lot.provider_batch_ids for lot in lots):
        return Why.UNRECORDED, batch_id
    return Why.TWIN, batch_id


def _is_too_old(batch_id: BatchId, now: datetime) -> bool:
    try:
        sealed_at = batch_id_time(batch_id)
    except ValueError:
        return True
    return (now - sealed_at).total_seconds() > HORIZON_S - HORIZON_SLACK_S


def _files_of(batch: BatchSnapshot) -> list[FileId]:
    """Result files first."""
    return [one for one in (batch.output_file_id, batch.error_file_id, batch.input_file_id) if one is not None]


def _batch_finding(
    listing: Listing,
    batch: BatchSnapshot,
    why: Why,
    batch_id: BatchId | None,
    kept_files: Collection[FileId],
    knowledge: Knowledge,
) -> Finding:
    act, waste_rows = Act.NONE, 0
    files: tuple[FileId, ...] = ()
    if why in {Why.ORPHAN, Why.TWIN}:
        if batch.status is ProviderStatus.CANCELLING:
            act = Act.WAIT
        elif not batch.status.is_terminal:
            act = Act.CANCEL
        else:
            files = _left_files(listing, batch, kept_files)
            act = Act.COLLECT if files else Act.NONE
            if batch.provider_batch_id not in knowledge.told_twins and set(files) - {batch.input_file_id}:
                waste_rows = _rows_run(batch, knowledge.lots.get(batch_id, ()) if batch_id is not None else ())
    return Finding(
        listing.account, why, act, batch_id, batch.provider_batch_id, None, batch.raw_status, files, waste_rows
    )


def _left_files(listing: Listing, batch: BatchSnapshot, kept_files: Collection[FileId]) -> tuple[FileId, ...]:
    """The batch's files that are still listed, and that nothing else of ours or of anybody has."""
    if listing.keeps_files or listing.input_files is None or listing.output_files is None:
        return ()
    inputs = {file.file_id: file.name for file in listing.input_files}
    outputs = {file.file_id for file in listing.output_files}
    left = [
        file_id for file_id in (batch.output_file_id, batch.error_file_id) if file_id is not None and file_id in outputs
    ]
    # The name is the proof: metadata says whose batch it is, not whose file it was made of.
    if batch.input_file_id is not None and parse_batch_file_name(inputs.get(batch.input_file_id, "")) is not None:
        left.append(batch.input_file_id)
    return tuple(file_id for file_id in left if file_id not in kept_files)


def _rows_run(batch: BatchSnapshot, lots: Sequence[Lot]) -> int:
    """How many rows it ran; a provider that does not count them is taken to have run all."""
    if batch.status is ProviderStatus.FAILED:
        return 0  # the file was refused as a whole
    counts = batch.counts
    return counts.completed + counts.failed or counts.total or max((lot.rows for lot in lots), default=0)


def _file_finding(
    listing: Listing, file: ListedFile, kept_files: Collection[FileId], knowledge: Knowledge, now: datetime
) -> Finding | None:
    """None for a file that is not named as ours are."""
    named = parse_batch_file_name(file.name)
    if named is None:
        return None
    ledger_id, batch_id = named
    why, act = _judge_file(ledger_id, batch_id, file, kept_files, knowledge, now), Act.NONE
    if why in {Why.ORPHAN, Why.TWIN} and not listing.keeps_files:
        act = Act.DELETE
    return Finding(listing.account, why, act, batch_id, None, file.file_id, size_bytes=file.size_bytes)


def _judge_file(
    ledger_id: LedgerId,
    batch_id: BatchId,
    file: ListedFile,
    kept_files: Collection[FileId],
    knowledge: Knowledge,
    now: datetime,
) -> Why:
    if ledger_id not in knowledge.ledger_ids:
        return Why.OTHER_LEDGER
    if file.file_id in kept_files:
        return Why.KNOWN
    if _is_too_old(batch_id, now):
        return Why.TOO_OLD
    lots = knowledge.lots.get(batch_id, ())
    if any(lot.input_file_id is None for lot in lots):
        return Why.RESOLVING
    if file.created_at is None or (now - file.created_at).total_seconds() < FILE_AGE_S:
        return Why.TOO_YOUNG
    return Why.TWIN if lots else Why.ORPHAN


def due(
    findings: Sequence[Finding], first_seen: Mapping[str, float], at_s: float, quiet_s: float
) -> list[Finding]:  # fmt: skip
    """The findings that are acted upon now: an earlier pass, at least ``quiet_s`` ago, suspected them as well.

    Args:
        first_seen: since when each suspect has been one without a break, in seconds of the clock of ``at_s``.
    """
    return [
        finding
        for finding in findings
        if finding.act in {Act.CANCEL, Act.COLLECT, Act.DELETE}
        and finding.key in first_seen
        and at_s - first_seen[finding.key] >= quiet_s
    ]


def remember(findings: Sequence[Finding], first_seen: Mapping[str, float], at_s: float) -> dict[str, float]:
    """``first_seen`` after a pass: who is no suspect any more is forgotten."""
    return {one.key: first_seen.get(one.key, at_s) for one in findings if one.is_suspect}
