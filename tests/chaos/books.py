"""The books: what went in, what came out, and what the provider ran, held against each other after the run."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchferry.domain.ids import parse_wire_id
from batchferry.domain.ledger import Lot, LotState, decode
from batchferry.domain.partition import PartitionLedger
from batchferry.ports import LogReader, Record
from batchferry.simulator.settings import DEFAULT_PROJECT
from broker.kit import committed

from .history import Told
from .stage import PARTITIONS, Stage

Where = tuple[int, int]
"""(partition, offset) of an input record."""

EXPECTED_CLASSES = {
    "content_filtered": set[str](),  # scripted, final at once
    "invalid_request": set[str](),  # the line that a batch refused as a whole names
    "transient": {"transient"},
    "unreadable": {"unreadable", "transient"},
    "missing": {"missing"},
    "expired": {"expired"},
    "duplicate": set[str](),  # our own producer may have sent a record twice
}
"""Failures the provider's script leads to, and the attempts that must have gone before them (one of these)."""
PAID_AGAIN = ("missing", "unreadable", "transient")
"""Classes of rows that the provider may have run and billed before they are sent again."""
NEVER_TOLD = ("effect_failed", "batch_quarantined", "ledger_record_unreadable", "partition_refused", "input_lost")
MAX_SHOWN = 12
"""Offending records shown with everything known about them."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a row at the provider."""

    provider_batch: str
    batch_id: str
    wire_id: str
    is_paid: bool


@dataclass(slots=True)
class Row:
    """What is known of one input record."""

    custom_id: str
    number: int
    outcomes: list[tuple[str, dict[str, Any], bytes]] = field(default_factory=list)
    """(topic, value, raw value)"""
    runs: list[Run] = field(default_factory=list)

    @property
    def paid(self) -> int:
        return sum(run.is_paid for run in self.runs)


@dataclass(slots=True)
class Books:
    """Everything that was read, and what is wrong with it."""

    rows: dict[Where, Row] = field(default_factory=dict)
    classes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    offenders: dict[Where, list[str]] = field(default_factory=lambda: defaultdict(list))
    retried_rows: Counter[str] = field(default_factory=Counter)
    retries_lived: int = 0
    """Rows that were sent again, by their outcomes' own word."""
    allowances: Counter[str] = field(default_factory=Counter)
    """Rows counted as possibly paid twice, by reason."""
    allowed_batches: set[str] = field(default_factory=set)
    paid_runs: int = 0
    paid_again: Counter[str] = field(default_factory=Counter)
    """Further paid runs of rows, by what explains them."""
    provider_batches: Counter[str] = field(default_factory=Counter)
    files_left: Counter[str] = field(default_factory=Counter)
    lots: Counter[str] = field(default_factory=Counter)

    def blame(self, where: Where, what: str) -> None:
        """A record that is not as promised."""
        self.offenders[where].append(what)


async def is_finished(stage: Stage, reader: LogReader) -> str:
    """Why the service is not through with everything yet; empty when it is."""
    bounds = await reader.bounds(stage.requests, range(PARTITIONS))
    ends = {partition: end for partition, (_, end) in bounds.items()}
    settled = await committed(stage.kafka, stage.group, stage.requests)
    behind = {p: (settled.get(p, 0), end) for p, end in ends.items() if settled.get(p, 0) != end}
    if behind:
        return "unsettled (partition: committed offset, end): " + str(behind)
    for partition, ledger in (await read_ledgers(stage, reader)).items():
        if ledger.watermark != ends[partition] or ledger.settled:
            return f"partition {partition}: watermark {ledger.watermark}, end {ends[partition]}"
        open_lots = [f"{lot.lot_id} {lot.state}" for lot in ledger.lots.values() if lot.state is not LotState.CLEAN]
        if open_lots:
            return f"partition {partition} has open lots: {', '.join(open_lots[:5])}"
    return ""


async def read_ledgers(stage: Stage, reader: LogReader) -> dict[int, PartitionLedger]:
    """Every ledger partition as an owner would read it."""
    found = {}
    for partition, records in (await stage.whole(reader, stage.ledger)).items():
        ledger = found[partition] = PartitionLedger(partition)
        for record in records:
            if record.key is not None:
                ledger.replay(record.key, record.value)
    return found


async def audit(stage: Stage, reader: LogReader, told: Sequence[Told]) -> Books:
    """Read everything and compare. Offences are collected, never raised."""
    books = Books()
    await _read_input(stage, reader, books)
    ledgers = await read_ledgers(stage, reader)
    await _read_outcomes(stage, reader, books, ledgers)
    await stage.simulator.settle()
    _read_bill(stage, books, ledgers)
    _read_logs(books, told)
    _judge_rows(stage, books)
    ends = Counter(partition for partition, _ in books.rows)
    settled = await committed(stage.kafka, stage.group, stage.requests)
    if settled != dict(ends):
        books.wrong.append(f"committed offsets {settled} are not the ends of the input {dict(ends)}")
    _judge_lots(books, ledgers, ends)
    _judge_files(stage, books, ledgers)
    return books


async def _read_input(stage: Stage, reader: LogReader, books: Books) -> None:
    for partition, records in (await stage.whole(reader, stage.requests)).items():
        for record in records:
            custom_id = json.loads(record.value or b"")["custom_id"]
            books.rows[partition, record.offset] = Row(custom_id, int(custom_id.removeprefix("row-")))
    if len(books.rows) < stage.sent:
        books.wrong.append(f"the input has {len(books.rows)} records, {stage.sent} were acknowledged")


async def _read_outcomes(stage: Stage, reader: LogReader, books: Books, ledgers: Mapping[int, PartitionLedger]) -> None:
    for topic in (stage.results, stage.failures):
        for records in (await stage.whole(reader, topic)).values():
            for record in records:
                _take_outcome(books, ledgers, topic, record)


def _take_outcome(books: Books, ledgers: Mapping[int, PartitionLedger], topic: str, record: Record) -> None:
    raw = record.value or b""
    value = json.loads(raw)
    where = value["source"]["partition"], value["source"]["offset"]
    row = books.rows.get(where)
    if row is None:
        books.wrong.append(f"an outcome for {where}, where the input has no record")
        return
    row.outcomes.append((topic, value, raw))
    header = ledgers[where[0]].header
    wanted = None if header is None else f"{header.ledger_id}-{where[0]}-{where[1]}"
    if value["outcome_id"] != wanted or dict(record.headers)["ce_id"] != str(wanted).encode():
        books.blame(where, f"outcome id {value['outcome_id']}, wanted {wanted}")


def _read_bill(stage: Stage, books: Books, ledgers: Mapping[int, PartitionLedger]) -> None:
    partition_of = {ledger.header.ledger_id: p for p, ledger in ledgers.items() if ledger.header is not None}
    for batch in stage.simulator.world.list_batches(DEFAULT_PROJECT):
        books.provider_batches[batch.status.value] += 1
        batch_id = (batch.metadata or {}).get("batch_id", "")
        if not batch.status.is_terminal:
            books.wrong.append(f"provider batch {batch.id} ({batch_id}) still runs, and nobody waits for it")
        for wire_id, kind in _runs(stage.simulator.world.state.bill_path(batch.id)):
            if kind == 0:
                continue  # its turn came, and it was not run
            wire = parse_wire_id(wire_id)
            where = None if wire is None else (partition_of.get(wire.ledger_id, -1), wire.offset)
            row = None if where is None else books.rows.get(where)
            if wire is None or row is None:
                books.wrong.append(f"provider batch {batch.id} ran {wire_id}, which is no row of ours")
                continue
            row.runs.append(Run(batch.id, batch_id, wire_id, kind == 2))
            books.paid_runs += kind == 2


def _runs(path: Path) -> Iterator[tuple[str, int]]:
    if not path.exists():
        return
    for line in path.read_bytes().splitlines():
        wire_id, _, kind, *_ = json.loads(line)
        yield wire_id, kind


def _read_logs(books: Books, told: Sequence[Told]) -> None:
    for one in told:
        if one.event == "possibly_paid_twice":
            books.allowances[one.fields["reason"]] += one.fields["rows"]
            books.allowed_batches.add(one.fields.get("batch_id", ""))
        elif one.event == "rows_retried":
            books.retried_rows[one.fields["row_class"]] += one.fields["rows"]
        elif one.event in NEVER_TOLD or (one.event == "task_failed" and not _is_no_broker_at_start(one)):
            said = {name: value for name, value in one.fields.items() if name not in {"event", "timestamp", "level"}}
            books.wrong.append(f"{one.at_s:.2f} s {one.replica} told {one.event}: {json.dumps(said)[:900]}")


def _is_no_broker_at_start(one: Told) -> bool:
    """A process that starts while there is no broker ends, and is started again: so it is meant."""
    return one.fields.get("task") == "start" and one.fields.get("error") == "KafkaUnavailable"


# ------------------------------------------------------------------------------------------------ judging


def _judge_rows(stage: Stage, books: Books) -> None:
    asked = re.compile(rb"question (\d+) of " + stage.tag.encode())
    for where, row in books.rows.items():
        if len(row.outcomes) != 1:
            books.blame(where, f"{len(row.outcomes)} outcomes")
            if not row.outcomes:
                continue
        topic, value, raw = row.outcomes[0]
        if value["custom_id"] != row.custom_id:
            books.blame(where, f"the outcome is for {value['custom_id']}")
        others = {int(found) for found in asked.findall(raw)} - {row.number}
        if others:
            books.blame(where, f"the outcome speaks of the questions {sorted(others)}")
        attempts: dict[str, int] = value["attempts"]
        books.retries_lived += bool(attempts)
        if topic == stage.results:
            books.classes["succeeded"] += 1
            if "truncated" not in value["flags"] and row.number not in {int(one) for one in asked.findall(raw)}:
                books.blame(where, "the answer does not speak of its question")
            if not row.paid:
                books.blame(where, "succeeded, and no paid run is on the bill")
        else:
            _judge_failure(books, where, value, attempts)
        _judge_runs(books, where, row, attempts)


def _judge_failure(books: Books, where: Where, value: Mapping[str, Any], attempts: Mapping[str, int]) -> None:
    row_class = value["error"]["class"]
    books.classes[row_class] += 1
    before = EXPECTED_CLASSES.get(row_class)
    if before is None:
        books.blame(where, f"failed as {row_class} ({value['error']['code']}), which nothing here leads to")
    elif before and not before & attempts.keys():
        books.blame(where, f"failed as {row_class} without another try: attempts {dict(attempts)}")


def _judge_runs(books: Books, where: Where, row: Row, attempts: Mapping[str, int]) -> None:
    by_wire = Counter(run.wire_id for run in row.runs if run.is_paid)
    excess = row.paid - 1
    if excess <= 0:
        return
    classified = min(excess, sum(attempts.get(row_class, 0) for row_class in PAID_AGAIN))
    books.paid_again["classified retry"] += classified
    left = excess - classified
    if left and any(run.batch_id in books.allowed_batches for run in row.runs):
        books.paid_again["counted allowance"] += left
        left = 0
    if left:
        books.blame(where, f"paid {row.paid} times, attempts {dict(attempts)}; nothing allows {left} of them")
    twice = [wire_id for wire_id, paid in by_wire.items() if paid > 1]
    if twice and not any(run.batch_id in books.allowed_batches for run in row.runs):
        books.blame(where, f"one submission was paid twice: {twice}")


def _judge_lots(books: Books, ledgers: Mapping[int, PartitionLedger], ends: Mapping[int, int]) -> None:
    for partition, ledger in ledgers.items():
        for lot in ledger.lots.values():
            books.lots[lot.state.value] += 1
            if lot.state is not LotState.CLEAN:
                books.wrong.append(f"partition {partition}: lot {lot.lot_id} is {lot.state.value} at the end")
        if ledger.watermark != ends.get(partition, 0) or ledger.settled:
            books.wrong.append(f"partition {partition}: watermark {ledger.watermark}, end {ends.get(partition, 0)}")


def _judge_files(stage: Stage, books: Books, ledgers: Mapping[int, PartitionLedger]) -> None:
    """What is left must be what a sweep would find by the names in it; a clean lot has left nothing."""
    world = stage.simulator.world
    ledger_ids = {ledger.header.ledger_id for ledger in ledgers.values() if ledger.header is not None}
    clean = {lot.lot_id for ledger in ledgers.values() for lot in ledger.lots.values() if lot.state is LotState.CLEAN}
    batch_of_file = {}
    for batch in world.list_batches(DEFAULT_PROJECT):
        named = batch.metadata or {}
        for file_id in (batch.output_file_id, batch.error_file_id):
            if file_id is not None:
                batch_of_file[file_id] = named.get("ledger_id", ""), named.get("batch_id", "")
    for file in world.list_files(DEFAULT_PROJECT):
        ledger_id, _, rest = file.filename.partition("-")
        ledger_id, batch_id = batch_of_file.get(file.id, (ledger_id, rest.removesuffix(".jsonl")))
        kind = "result" if file.id in batch_of_file else "input"
        if ledger_id not in ledger_ids:
            books.wrong.append(f"{kind} file {file.id} ({file.filename}) at the provider bears no ledger's name")
        elif batch_id in clean:
            books.files_left[f"{kind} of a clean lot"] += 1
            books.wrong.append(f"{kind} file {file.id} of batch {batch_id} is left though its lot is clean")
        else:
            books.files_left[f"{kind}, orphan"] += 1


# ------------------------------------------------------------------------------------- everything known


async def dossiers(stage: Stage, reader: LogReader, books: Books, told: Sequence[Told]) -> list[str]:
    """What is known of the first offenders: outcomes, runs, every ledger record that names them, log lines."""
    if not books.offenders:
        return []
    ledger = await stage.whole(reader, stage.ledger)
    shown = []
    for where, blames in list(books.offenders.items())[:MAX_SHOWN]:
        row = books.rows[where]
        lines = [f"partition {where[0]} offset {where[1]} ({row.custom_id}): {'; '.join(blames)}"]
        for topic, value, _ in row.outcomes:
            batch = (value["batch"] or {}).get("batch_id")
            error = value.get("error") or {}
            lines.append(
                f"  outcome on {topic}: {value['status']} {error.get('class', '')} {error.get('code', '')}"
                f" wire {value['wire_id']} attempts {value['attempts']} batch {batch}"
            )
        lines += [f"  run: {run}" for run in row.runs]
        batches = {run.batch_id for run in row.runs}
        for at, lot in _lots_naming(ledger[where[0]], where[1]):
            batches.add(lot.lot_id)
            lines.append(
                f"  ledger offset {at}: lot {lot.lot_id} {lot.state.value} submission {lot.submission} partitions"
                f" {list(lot.partitions)} file {lot.input_file_id} provider {list(lot.provider_batch_ids)}"
            )
        for one in told:
            if one.fields.get("batch_id") in batches:
                said = {k: v for k, v in one.fields.items() if k not in {"event", "timestamp", "level"}}
                lines.append(f"  {one.at_s:8.2f} s {one.replica}/{one.life} {one.event} {json.dumps(said)[:300]}")
        shown.append("\n".join(lines))
    return shown


def _lots_naming(records: Sequence[Record], offset: int) -> Iterator[tuple[int, Lot]]:
    for record in records:
        if record.key is None or record.value is None:
            continue
        entry = decode(record.key, record.value)
        if isinstance(entry, Lot) and offset in entry.offsets:
            yield record.offset, entry
