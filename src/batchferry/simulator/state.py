"""What the simulator keeps: files, batches, and the journal that lets a killed simulator come back.

Layout of the data folder: ``journal.jsonl`` (the newest record of each file and batch wins), ``files/<id>`` (the
bytes), ``bill/<batch id>.jsonl`` (rows that batch ran) and ``bill/sync.jsonl``.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

from batchferry.domain.errors import ConfigError
from batchferry.simulator.bill import Bill, Run, RunKind
from batchferry.simulator.jsontext import dump_json, parse_json

_FORMAT = 1


class Status(StrEnum):
    """A batch's status, in the provider's words."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        """Whether nothing more will happen."""
        return self in _TERMINAL


_TERMINAL = frozenset({Status.COMPLETED, Status.FAILED, Status.EXPIRED, Status.CANCELLED})


@dataclass(slots=True)
class SimFile:
    """A stored file. Times are virtual seconds since the epoch."""

    id: str
    project: str
    filename: str
    purpose: str
    size_bytes: int
    created_at: float
    expires_at: float | None
    deleted_at: float | None = None
    refused_creates: int = 0

    def is_there(self, at: float) -> bool:
        """Whether a caller still finds it at this time."""
        if self.deleted_at is not None and self.deleted_at <= at:
            return False
        return self.expires_at is None or at < self.expires_at


@dataclass(slots=True)
class SimBatch:
    """A batch. Times are virtual seconds since the epoch; ``number`` is 1 for the first batch ever created."""

    id: str
    number: int
    project: str
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[str, str] | None
    output_expires_s: int
    created_at: float
    validate_at: float
    expires_at: float
    status: Status = Status.VALIDATING
    errors: list[dict[str, Any]] = field(default_factory=list)
    model: str | None = None
    rows: int = 0
    input_tokens: int = 0
    failing_rows: int = 0
    run_s: float = 0.0
    finalizing_s: float = 0.0
    cancelling_s: float = 0.0
    in_progress_at: float | None = None
    finalizing_at: float | None = None
    cancelling_at: float | None = None
    ended_at: float | None = None
    completed: int = 0
    failed: int = 0
    used_input_tokens: int = 0
    used_output_tokens: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    """What the API that made the batch keeps of it beside all this, JSON values."""
    loses_rows: bool = False
    """Whether a batch that is not brought to its end has no results at all: nothing of it counts as run."""
    runs_on: bool = False
    """Whether the window is an aim only: a batch that is not done by then goes on until it ends or is cancelled."""
    names_empty_error_file: bool = False
    """Whether a batch without a failed row has an error file all the same, of 0 bytes."""
    line_url: str | None = None
    """What its lines name as their address; None: the endpoint."""

    @property
    def next_due_at(self) -> float | None:
        """When the status changes by itself; None when it has ended."""
        match self.status:
            case Status.VALIDATING:
                return self.validate_at
            case Status.IN_PROGRESS if self.in_progress_at is not None:
                if self.runs_on:
                    return self.in_progress_at + self.run_s
                return min(self.in_progress_at + self.run_s, max(self.expires_at, self.in_progress_at))
            case Status.FINALIZING if self.finalizing_at is not None:
                return self.finalizing_at + self.finalizing_s
            case Status.CANCELLING if self.cancelling_at is not None:
                return self.cancelling_at + self.cancelling_s
            case _:
                return None

    def reached_rows(self, at: float) -> int:
        """How many rows are done at this time; they are taken in the order of the file, at an even pace."""
        if self.in_progress_at is None:
            return 0
        if self.finalizing_at is not None or self.run_s <= 0:
            return self.rows
        share = (at - self.in_progress_at) / self.run_s
        return max(0, min(self.rows, int(self.rows * share)))


class State:
    """Files, batches and bill, with every change written to the journal before it is answered.

    Raises (constructor):
        ConfigError: another simulator uses the folder, or the journal cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, SimFile] = {}
        self.batches: dict[str, SimBatch] = {}
        self.bill = Bill()
        self._files_folder = folder / "files"
        self._bill_folder = folder / "bill"
        for path in (folder, self._files_folder, self._bill_folder):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = (folder / "lock").open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise ConfigError([f"data folder {folder}: another simulator uses it: stop it or take another"]) from error
        self._journal_path = folder / "journal.jsonl"
        try:
            self._load()
        except ConfigError:
            self._lock.close()
            raise
        self._journal: IO[bytes] = self._journal_path.open("ab", buffering=0)
        self._sync_bill: IO[bytes] = (self._bill_folder / "sync.jsonl").open("ab", buffering=0)

    def file_path(self, file_id: str) -> Path:
        """Where the bytes of a file are."""
        return self._files_folder / file_id

    def bill_path(self, batch_id: str) -> Path:
        """Where the runs of a batch are written."""
        return self._bill_folder / f"{batch_id}.jsonl"

    def save_file(self, file: SimFile) -> None:
        """Add or change a file."""
        self.files[file.id] = file
        self._journal.write(dump_json({"file": asdict(file)}) + b"\n")

    def save_batch(self, batch: SimBatch) -> None:
        """Add or change a batch."""
        self.batches[batch.id] = batch
        self._journal.write(dump_json({"batch": asdict(batch)}) + b"\n")

    def book_sync(self, run: Run) -> None:
        """Put a sync call on the bill."""
        self._sync_bill.write(dump_json(list(run)) + b"\n")
        self.bill.add_sync(run)

    def purge(self, at: float) -> None:
        """Delete the bytes of files nobody can see any more and no live batch reads."""
        gone = [file for file in self.files.values() if not file.is_there(at)]
        if not gone:
            return
        needed = {batch.input_file_id for batch in self.batches.values() if not batch.status.is_terminal}
        for file in gone:
            if file.id not in needed:
                self.file_path(file.id).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the journal and let go of the folder."""
        self._journal.close()
        self._sync_bill.close()
        self._lock.close()

    def _load(self) -> None:
        """Read the journal back and write it anew without superseded records."""
        for record in _records(self._journal_path):
            if "file" in record:
                file = SimFile(**record["file"])
                self.files[file.id] = file
            elif "batch" in record:
                batch = SimBatch(**record["batch"] | {"status": Status(record["batch"]["status"])})
                self.batches[batch.id] = batch
            elif record.get("format") != _FORMAT:
                raise ConfigError([f"data folder {self.folder}: written by another version: take an empty folder"])
        fresh = self._journal_path.with_suffix(".new")
        with fresh.open("wb") as out:
            out.write(dump_json({"format": _FORMAT}) + b"\n")
            out.writelines(dump_json({"file": asdict(file)}) + b"\n" for file in self.files.values())
            out.writelines(dump_json({"batch": asdict(batch)}) + b"\n" for batch in self.batches.values())
            out.flush()
            os.fsync(out.fileno())
        fresh.replace(self._journal_path)
        # A bill beside a batch that has not ended is the trace of a run a crash cut off: that run is made again.
        for batch in self.batches.values():
            if batch.status.is_terminal:
                self.bill.add_batch(_runs(self.bill_path(batch.id)))
        sync_path = self._bill_folder / "sync.jsonl"
        _drop_torn_line(sync_path)
        for run in _runs(sync_path):
            self.bill.add_sync(run)


def _records(path: Path) -> Iterator[Any]:
    """The records of a line file; a torn last line, left by a kill, is passed over."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                yield parse_json(line)
            except ValueError as error:
                raise ConfigError([f"{path}: damaged: take an empty data folder"]) from error


def _drop_torn_line(path: Path) -> None:
    """Cut off a last line without its break, so that the next one does not grow onto it."""
    whole_bytes = 0
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                whole_bytes += len(line)
    os.truncate(path, whole_bytes)


def _runs(path: Path) -> Iterator[Run]:
    for record in _records(path):
        wire_id, digest, kind, input_tokens, output_tokens, model = record
        yield Run(wire_id, digest, RunKind(kind), input_tokens, output_tokens, model)
